//! S1.4: whoever walks page tables knows a huge page that is out. The cases of the kernel's self-test for huge swap
//! entries, each on two huge pages that left whole; the last of them, swapoff, is the test `switch-huge-entries`, which
//! takes the device away meanwhile.

use super::load::Ballast;
use super::span::{Span, BLOCK, PAGE};
use super::{ensure, sys, Ctx, Outcome, Stop, Trap};
use std::time::Instant;

pub const TRAPS: &[Trap] = &[
    Trap::new("huge-entries", "S1.4: every call that meets a huge page which is out", huge_entries)
        .swaps_huge()
        .may_log(),
    Trap::new(
        "huge-zeros",
        "reads huge pages that nobody has written to, before memory is short",
        huge_zeros,
    ),
];

/// The kernel has one page of zeros for all of them, which is not to be moved.
fn huge_zeros(ctx: &Ctx) -> Outcome {
    let field = sys::map_aligned(ctx.half(), BLOCK)?;
    sys::advise(field, libc::MADV_HUGEPAGE)?;
    field.check_zero()?;
    let mut ballast = Ballast::new(ctx.size)?;
    (0..2).try_for_each(|_| ballast.walk())?;
    field.check_zero()?;
    let written = || field.pieces(3 * PAGE).step_by(2);
    written().for_each(|piece| piece.fill(1));
    ballast.walk()?;
    written().try_for_each(|piece| piece.check(1))?;
    field.pieces(3 * PAGE).skip(1).step_by(2).try_for_each(Span::check_zero)
}

/// What happens to two blocks that are out. Afterwards the rest of them is unmapped.
type Case = fn(Span, &mut Ballast) -> Outcome;

const CASES: [(&str, Case); 16] = [
    ("basic", |field, _| field.check(1)),
    ("write", write),
    ("fork", fork),
    ("fork and write", fork_and_write),
    ("unmap", |field, ballast| unmap(field, field.part(0, BLOCK), ballast)),
    ("split by unmap", |field, ballast| unmap(field, inside(field), ballast)),
    ("protect", |field, ballast| protect(field, field.part(0, BLOCK), ballast)),
    ("split by protect", |field, ballast| protect(field, inside(field), ballast)),
    ("dontneed", |field, ballast| dontneed(field, field.part(0, BLOCK), ballast)),
    ("split by dontneed", |field, ballast| dontneed(field, inside(field), ballast)),
    ("free", free),
    ("move", |field, ballast| remap(field, field.part(0, BLOCK), 0, ballast)),
    ("split by move", |field, ballast| remap(field, inside(field), 0, ballast)),
    ("move to where no huge page fits", |field, ballast| remap(field, field.part(0, BLOCK), PART, ballast)),
    ("query", query),
    ("willneed", willneed),
];

/// A part that begins and ends inside a huge page.
const PART: usize = 192 << 10;

fn inside(field: Span) -> Span {
    field.part(BLOCK / 2, PART)
}

fn huge_entries(ctx: &Ctx) -> Outcome {
    let deadline = ctx.deadline();
    // The older: what comes after it leaves before it.
    let mut ballast = Ballast::new(ctx.half())?;
    loop {
        for (name, case) in CASES {
            let field = sys::map_aligned(2 * BLOCK, BLOCK)?;
            sys::advise(field, libc::MADV_HUGEPAGE)?;
            field.fill(1);
            ballast.walk()?;
            case(field, &mut ballast).map_err(|stop| match stop {
                Stop::Wrong(what) => Stop::Wrong(format!("{name}: {what}")),
                skip => skip,
            })?;
            sys::unmap(field)?;
        }
        if Instant::now() >= deadline {
            return Ok(());
        }
    }
}

/// All of the field but `part` is as it was filled first.
fn rest_is_there(field: Span, part: Span) -> Outcome {
    field.part(0, part.start - field.start).check(1)?;
    field.part(part.end() - field.start, field.end() - part.end()).check(1)
}

fn write(field: Span, ballast: &mut Ballast) -> Outcome {
    field.fill(2);
    ballast.walk()?;
    field.check(2)
}

fn fork(field: Span, _: &mut Ballast) -> Outcome {
    let child = sys::fork(|| field.check(1))?;
    field.check(1)?;
    sys::wait_for(child, 0)
}

fn fork_and_write(field: Span, ballast: &mut Ballast) -> Outcome {
    let (low, high) = field.halves();
    let child = sys::fork(|| {
        low.fill(2);
        high.check(1)?;
        low.check(2)
    })?;
    high.fill(3);
    ballast.walk()?;
    low.check(1)?;
    high.check(3)?;
    sys::wait_for(child, 0)
}

fn unmap(field: Span, part: Span, ballast: &mut Ballast) -> Outcome {
    sys::unmap(part)?;
    ballast.walk()?;
    ensure!(!sys::is_readable(part.start)?, "unmapped memory can be read");
    rest_is_there(field, part)?;
    sys::map_over(part, sys::RW, 0)?;
    part.check_zero()
}

fn protect(field: Span, part: Span, ballast: &mut Ballast) -> Outcome {
    sys::protect(part, libc::PROT_READ)?;
    ensure!(!sys::is_writable(part.start)?, "memory for reading can be written");
    field.check(1)?;
    sys::protect(part, libc::PROT_NONE)?;
    ballast.walk()?;
    ensure!(!sys::is_readable(part.start)?, "memory without access can be read");
    sys::protect(part, sys::RW)?;
    part.check(1)?;
    part.fill(2);
    rest_is_there(field, part)?;
    part.check(2)
}

fn dontneed(field: Span, part: Span, ballast: &mut Ballast) -> Outcome {
    sys::advise(part, libc::MADV_DONTNEED)?;
    part.check_zero()?;
    ballast.walk()?;
    part.check_zero()?;
    rest_is_there(field, part)
}

fn free(field: Span, ballast: &mut Ballast) -> Outcome {
    let part = inside(field);
    sys::advise(part, libc::MADV_FREE)?;
    part.check_zero_or(1)?;
    ballast.walk()?;
    part.check_zero_or(1)?;
    part.fill(2);
    rest_is_there(field, part)?;
    part.check(2)
}

/// Moves `part` to a place that lies `beside` a multiple of 2 MiB.
fn remap(field: Span, part: Span, beside: usize, ballast: &mut Ballast) -> Outcome {
    let to = sys::map_aligned(2 * BLOCK, BLOCK)?;
    let moved = sys::remap(part, part.len, sys::FIXED, to.start + beside)?;
    rest_is_there(field, part)?;
    ballast.walk()?;
    moved.check_as(part.start, 1)?;
    ensure!(!sys::is_readable(part.start)?, "memory that was moved away can be read");
    sys::unmap(to)
}

fn query(field: Span, ballast: &mut Ballast) -> Outcome {
    // It comes home by itself when a device goes, but not each time.
    for _ in 0..5 {
        let there = sys::resident(field)?;
        if sys::resident(field)? <= there {
            return field.check(1);
        }
        ballast.walk()?;
    }
    Err(Stop::Wrong("to ask what is in memory brought it in".into()))
}

fn willneed(field: Span, _: &mut Ballast) -> Outcome {
    sys::advise(field, libc::MADV_WILLNEED)?;
    sys::advise(field, libc::MADV_POPULATE_READ)?;
    field.check(1)
}
