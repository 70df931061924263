//! Files that are mapped, of which more is used than may be in memory.

use super::load::{together, Ballast, Dice};
use super::span::{Span, PAGE};
use super::{ensure, sys, Ctx, Outcome, Stop, Trap};
use libc::c_int;
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

pub const TRAPS: &[Trap] = &[
    Trap::new("files-read", "files that are mapped, shared and private, are read at random", files_read),
    Trap::new(
        "files-written",
        "a file is written to and read through its mapping, by two threads",
        files_written,
    ),
    Trap::new(
        "files-private",
        "of a private mapping some pages are written and others are the file's",
        files_private,
    ),
    Trap::new("files-replaced", "memory comes where a file was mapped, and the file again", files_replaced),
    Trap::new("files-cut", "a file is cut while it is mapped, and grows again", files_cut),
    Trap::new("files-forked", "children read what is mapped, and write to it", files_forked),
    Trap::new(
        "scan",
        "[private|used]: reads a file of --size through its mapping, in order, or at random beside a little of its own; rests, and says what is resident",
        scan,
    )
    .helper(),
];

/// Where the words of a file come from.
const ORIGIN: usize = 0x200_0000;
/// What is looked at together.
const PIECE: usize = 8 * PAGE;

/// A file of so many bytes.
fn file_of(len: usize) -> Result<OwnedFd, Stop> {
    let file = sys::scratch_file(0)?;
    let part = sys::map(len.min(4 << 20))?;
    for at in (0..len).step_by(part.len) {
        let now = part.part(0, part.len.min(len - at));
        now.fill_as(ORIGIN + at, 1);
        sys::pwrite_span(file.as_raw_fd(), now, at)?;
    }
    sys::unmap(part)?;
    Ok(file)
}

fn mapped(file: &OwnedFd, len: usize, prot: c_int, how: c_int) -> Result<Span, Stop> {
    sys::map_file(0, len, prot, how, file.as_raw_fd())
}

fn check_piece(field: Span, dice: &mut Dice) -> Outcome {
    let offset = dice.roll(field.len / PIECE) * PIECE;
    field.part(offset, PIECE).check_as(ORIGIN + offset, 1)
}

fn files_read(ctx: &Ctx) -> Outcome {
    let len = 2 * ctx.half();
    let file = file_of(len)?;
    let fields = [libc::MAP_SHARED, libc::MAP_PRIVATE].map(|how| mapped(&file, len, libc::PROT_READ, how));
    let [shared, private] = fields;
    let fields = [shared?, private?];
    let mut ballast = Ballast::new(ctx.half())?;
    let deadline = ctx.deadline();
    together(2, |me| {
        let mut dice = Dice::new(me);
        while Instant::now() < deadline {
            check_piece(fields[me], &mut dice)?;
        }
        fields[me].check_as(ORIGIN, 1)
    })?;
    ballast.walk()?;
    fields.iter().try_for_each(|field| field.check_as(ORIGIN, 1))
}

fn files_written(ctx: &Ctx) -> Outcome {
    let len = 2 * ctx.half();
    let file = file_of(len)?;
    let field = mapped(&file, len, sys::RW, libc::MAP_SHARED)?;
    let mut ballast = Ballast::new(ctx.half())?;
    let deadline = ctx.deadline();
    let (first, second) = field.halves();
    together(2, |me| {
        let mine = [first, second][me];
        let mut dice = Dice::new(me);
        let mut generations = vec![0u16; mine.len / PIECE];
        let place = |index: usize| mine.part(index * PIECE, PIECE);
        let check = |index: usize, generation: u16| match generation {
            0 => place(index).check_as(ORIGIN + place(index).start - field.start, 1),
            written => place(index).check(written),
        };
        while Instant::now() < deadline {
            let index = dice.roll(generations.len());
            check(index, generations[index])?;
            generations[index] = generations[index] % 1000 + 1;
            place(index).fill(generations[index]);
        }
        generations.iter().enumerate().try_for_each(|(index, generation)| check(index, *generation))?;
        // What the file says is what was written.
        let copy = sys::map(PIECE)?;
        (0..generations.len()).filter(|index| generations[*index] > 0).try_for_each(|index| {
            sys::pread_span(file.as_raw_fd(), copy, place(index).start - field.start)?;
            copy.check_as(place(index).start, generations[index])
        })
    })?;
    ballast.walk()
}

fn files_private(ctx: &Ctx) -> Outcome {
    let len = 2 * ctx.half();
    let file = file_of(len)?;
    let field = mapped(&file, len, sys::RW, libc::MAP_PRIVATE)?;
    let mut ballast = Ballast::new(ctx.half())?;
    // An eighth is written, here and there: that stays.
    let is_written = |offset: usize| offset / PIECE % 8 == 3;
    let places = || (0..len).step_by(PIECE);
    places().filter(|offset| is_written(*offset)).for_each(|offset| field.part(offset, PIECE).fill(2));
    let check = |offset: usize| match is_written(offset) {
        true => field.part(offset, PIECE).check(2),
        false => field.part(offset, PIECE).check_as(ORIGIN + offset, 1),
    };
    let deadline = ctx.deadline();
    let mut dice = Dice::new(0);
    while Instant::now() < deadline {
        check(dice.roll(len / PIECE) * PIECE)?;
    }
    ballast.walk()?;
    places().try_for_each(check)
}

fn files_replaced(ctx: &Ctx) -> Outcome {
    let len = 2 * ctx.half();
    let file = file_of(len)?;
    let field = mapped(&file, len, libc::PROT_READ, libc::MAP_SHARED)?;
    let mut ballast = Ballast::new(ctx.half() / 2)?;
    let deadline = ctx.deadline();
    let each = 16 * PIECE;
    together(2, |me| {
        let mut dice = Dice::new(me);
        // Of every second piece, which is memory now, and with what in it.
        let mut generations = vec![0u16; len / each / 2];
        while Instant::now() < deadline {
            let index = dice.roll(generations.len());
            let offset = (2 * index + me) * each;
            let place = field.part(offset, each);
            match generations[index] {
                0 => {
                    place.check_as(ORIGIN + offset, 1)?;
                    generations[index] = 2 + dice.roll(1000) as u16;
                    sys::map_over(place, sys::RW, 0)?;
                    place.fill(generations[index]);
                }
                written => {
                    place.check(written)?;
                    let how = libc::MAP_SHARED | libc::MAP_FIXED;
                    let fd = file.as_raw_fd();
                    // SAFETY: the place is the trap's own.
                    let at =
                        unsafe { libc::mmap(place.as_ptr(), each, libc::PROT_READ, how, fd, offset as i64) };
                    ensure!(at == place.as_ptr(), "the file cannot be mapped again");
                    generations[index] = 0;
                }
            }
        }
        Ok(())
    })?;
    ballast.walk()
}

fn files_cut(ctx: &Ctx) -> Outcome {
    let len = 2 * ctx.half();
    let file = file_of(len)?;
    let field = mapped(&file, len, sys::RW, libc::MAP_SHARED)?;
    let mut ballast = Ballast::new(ctx.half())?;
    let (kept, cut) = field.halves();
    let deadline = ctx.deadline();
    together(2, |me| {
        let mut dice = Dice::new(me);
        while Instant::now() < deadline {
            if me == 0 {
                check_piece(kept, &mut dice)?;
                continue;
            }
            for size in [kept.len, len] {
                // SAFETY: takes numbers.
                sys::ret("ftruncate", unsafe { libc::ftruncate(file.as_raw_fd(), size as i64) })?;
            }
            cut.check_zero()?;
            cut.fill(1);
            cut.check(1)?;
        }
        Ok(())
    })?;
    ballast.walk()
}

fn files_forked(ctx: &Ctx) -> Outcome {
    let len = 2 * ctx.half();
    let file = file_of(len)?;
    let shared = mapped(&file, len, sys::RW, libc::MAP_SHARED)?;
    let private = mapped(&file, len, sys::RW, libc::MAP_PRIVATE)?;
    let mut ballast = Ballast::new(ctx.half())?;
    let (read, written) = shared.halves();
    for turn in 1..4u16 {
        ballast.walk()?;
        read.check_as(ORIGIN, 1)?;
        let child = sys::fork(|| {
            read.check_as(ORIGIN, 1)?;
            private.part(0, read.len).check_as(ORIGIN, 1)?;
            private.part(0, read.len).fill(2);
            written.fill(turn);
            private.part(0, read.len).check(2)
        })?;
        private.part(0, read.len).check_as(ORIGIN, 1)?;
        sys::wait_for(child, 0)?;
        written.check(turn)?;
        private.part(0, read.len).check_as(ORIGIN, 1)?;
    }
    Ok(())
}

fn scan(ctx: &Ctx) -> Outcome {
    let file = file_of(ctx.size)?;
    let how = ctx.args.first().map(String::as_str);
    let flags = if how == Some("private") { libc::MAP_PRIVATE } else { libc::MAP_SHARED };
    let field = mapped(&file, ctx.size, libc::PROT_READ, flags)?;
    if how == Some("used") {
        let own = sys::map(8 << 20)?;
        own.fill(1);
        let mut dice = Dice::new(0);
        let deadline = Instant::now() + Duration::from_secs(3);
        while Instant::now() < deadline {
            check_piece(field, &mut dice)?;
            own.page(dice.roll(own.pages())).check(1)?;
        }
        say_resident()?;
        return own.check(1);
    }
    let own = sys::map(ctx.size / 16)?;
    own.fill(1);
    for _ in 0..2 {
        field.check_as(ORIGIN, 1)?;
    }
    say_resident()?;
    own.check(1)
}

fn say_resident() -> Outcome {
    std::thread::sleep(Duration::from_millis(500));
    let status = std::fs::read_to_string("/proc/self/status")?;
    println!("{}", status.lines().find(|line| line.starts_with("VmRSS")).unwrap_or_default());
    Ok(())
}
