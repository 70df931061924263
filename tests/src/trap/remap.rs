//! Memory whose mappings move, vanish, come back or change their protection while pages are out.

use super::load::{together, Ballast, Churn, Dice, Mover};
use super::span::{decode, load, pattern, store, Span, BLOCK, PAGE};
use super::{ensure, sys, Ctx, Outcome, Stop, Trap};
use libc::{c_int, c_void};
use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicUsize, Ordering};
use std::sync::Mutex;
use std::time::{Duration, Instant};

pub const TRAPS: &[Trap] = &[
    Trap::new("realloc", "grows one object by realloc, which moves it by mremap", realloc),
    Trap::new("mremap-move", "moves evicted memory to chosen addresses, then shrinks it", mremap_move),
    Trap::new("mremap-over", "moves evicted memory over other evicted memory", mremap_over),
    Trap::new(
        "mremap-grow-over",
        "moves evicted memory over what came just before, and has it grow",
        mremap_grow_over,
    ),
    Trap::new("mremap-regrow", "moves evicted memory, has it shrink and grow in place", mremap_regrow),
    Trap::new("mremap-regrow-beside", "the same while there is another thread", mremap_regrow_beside),
    Trap::new(
        "mremap-regrow-half",
        "unmaps evicted memory, has what lies before it grow over a half, and maps the other",
        mremap_regrow_half,
    ),
    Trap::new(
        "mremap-regrow-past",
        "unmaps evicted memory, and has what lies before it grow over it past libc",
        mremap_regrow_past,
    ),
    Trap::new("mremap-dontunmap", "moves pages away and leaves the mapping", mremap_dontunmap),
    Trap::new(
        "mremap-dontunmap-pieces",
        "the same with memory of which the first pages have just been mapped",
        mremap_dontunmap_pieces,
    ),
    Trap::new("mremap-in-place", "shrinks and grows evicted memory where it is", mremap_in_place),
    Trap::new("mremap-pieces", "grows, moves and cuts memory that was mapped piece by piece", mremap_pieces),
    Trap::new(
        "mremap-at-fork",
        "handlers of fork move memory that was mapped piece by piece",
        mremap_at_fork,
    )
    .may_log(),
    Trap::new(
        "mremap-beside-fork",
        "such memory is moved under a lock that handlers of fork take",
        mremap_beside_fork,
    )
    .may_log(),
    Trap::new(
        "mremap-pieces-read",
        "moves such memory onto memory that another thread reads",
        mremap_pieces_read,
    ),
    Trap::new(
        "mremap-sealed",
        "moves such memory over what is sealed in part: nothing is moved",
        mremap_sealed,
    ),
    Trap::new(
        "mremap-mappings-all",
        "moves such memory while there are as many mappings as there may be, and nearly",
        mremap_mappings_all,
    ),
    Trap::new("mremap-random", "does so at random, with several threads", mremap_random),
    Trap::new("mremap-race", "moves memory back and forth while others evict", mremap_race),
    Trap::new(
        "mremap-handover",
        "threads move memory to addresses that others have just left",
        mremap_handover,
    ),
    Trap::new(
        "mremap-overtaken",
        "the same, and what comes there moves on, before the thread that left has told of it",
        mremap_overtaken,
    ),
    Trap::new(
        "realloc-race",
        "threads grow objects by realloc, which moves them to where others were",
        realloc_race,
    ),
    Trap::new(
        "realloc-helped",
        "an object grows that a SIGSEGV handler makes readable, with another thread's help that moves memory",
        realloc_helped,
    ),
    Trap::new(
        "mremap-parked",
        "a signal stops a thread that moves memory until another has moved some",
        mremap_parked,
    ),
    Trap::new(
        "mremap-signals",
        "a handler moves memory, a thousand times a second, as its thread does",
        mremap_signals,
    ),
    Trap::new("mremap-killed", "processes that share the memory are killed as they move some", mremap_killed)
        .may_log(),
    Trap::new("map-fixed", "maps over evicted memory", map_fixed),
    Trap::new("map-file-over", "maps a file over evicted memory, then nothing, then zeros", map_file_over),
    Trap::new(
        "zero-device-over",
        "maps /dev/zero over memory that is about to be found, and forks",
        zero_device_over,
    ),
    Trap::new("munmap-parts", "unmaps parts of evicted memory and maps the holes again", munmap_parts),
    Trap::new("mprotect", "read-only, none and back, on evicted memory", mprotect),
    Trap::new("mprotect-race", "the same while others evict", mprotect_race),
    Trap::new("commit", "commits and uncommits by MAP_FIXED, as java does", commit),
    Trap::new("unmap-race", "one thread unmaps, another maps the same address again", unmap_race),
    Trap::new("fixed-readers", "one thread maps over and fills what others read", fixed_readers),
    Trap::new("shm-remap", "shared memory takes the place of what is out, and goes", shm_remap),
    Trap::new("areas", "as many areas as the kernel allows, nearly", areas).may_log(),
    Trap::new(
        "behind-libraries",
        "memory that was mapped right behind what libraries have",
        behind_libraries,
    ),
    Trap::new(
        "executable",
        "memory that can be written and executed, by two threads and children",
        executable,
    ),
    Trap::new("jit", "code that is written, evicted, made executable and run", jit),
    Trap::new("mseal", "sealed memory is evicted like any other", mseal),
    Trap::new(
        "unmap-refused",
        "is refused to unmap memory that is out, by what is sealed behind it and by a limit: what cannot be read is lost, \
         nothing is zeros, and what is mapped there later is new",
        unmap_refused,
    )
    .may_log(),
];

fn realloc(ctx: &Ctx) -> Outcome {
    const ORIGIN: usize = 0x1000_0000;
    let mut ballast = Ballast::new(ctx.half())?;
    let step = (ctx.half() / 16).next_multiple_of(PAGE);
    let mut object = Span::new(0, 0);
    for generation in 1..=16u16 {
        // SAFETY: null, or what the last round got.
        let at = unsafe { libc::realloc(object.as_ptr(), object.len + step) } as usize;
        ensure!(at != 0, "realloc failed");
        let old = object.len;
        object = Span::new(at, old + step);
        object.part(old, step).fill_as(ORIGIN + old, generation);
        if generation % 4 == 0 {
            ballast.walk()?;
        }
    }
    for generation in 1..=16u16 {
        let offset = usize::from(generation - 1) * step;
        object.part(offset, step).check_as(ORIGIN + offset, generation)?;
    }
    // SAFETY: the object is malloc's; a smaller one keeps what it has.
    let at = unsafe { libc::realloc(object.as_ptr(), step) } as usize;
    Span::new(at, step).check_as(ORIGIN, 1)?;
    // SAFETY: as above.
    unsafe { libc::free(at as *mut _) };
    Ok(())
}

fn mremap_move(ctx: &Ctx) -> Outcome {
    let (field, mut ballast) = ctx.evicted()?;
    let place = sys::map_at(0, field.len, libc::PROT_NONE, sys::ANON | libc::MAP_NORESERVE)?;
    // In pieces, the order of places reversed.
    let pieces: Vec<_> = field.pieces(BLOCK).zip(place.pieces(BLOCK).rev()).collect();
    for (from, to) in &pieces {
        sys::remap(*from, from.len, sys::FIXED, to.start)?;
    }
    ensure!(!sys::is_mapped_anywhere(field), "the old place is still mapped");
    for (from, to) in &pieces {
        to.check_as(from.start, 1)?;
    }
    ballast.walk()?;
    for (from, to) in &pieces {
        to.check_as(from.start, 1)?;
        sys::remap(*to, BLOCK / 2, 0, 0)?;
        ensure!(!sys::is_readable(to.start + BLOCK / 2)?, "the cut half can be read");
    }
    // What comes to the old place knows nothing of what was there.
    let again = sys::map_at(field.start, field.len, sys::RW, sys::ANON | libc::MAP_FIXED_NOREPLACE)?;
    again.check_zero()?;
    ballast.walk()?;
    pieces.iter().try_for_each(|(from, to)| to.part(0, BLOCK / 2).check_as(from.start, 1))?;
    again.check_zero()
}

fn mremap_over(ctx: &Ctx) -> Outcome {
    let (field, mut ballast) = ctx.evicted()?;
    let (low, high) = field.halves();
    high.fill(2);
    ballast.walk()?;
    sys::remap(high, high.len, sys::FIXED, low.start)?;
    let moved = low.part(0, high.len);
    moved.check_as(high.start, 2)?;
    ballast.walk()?;
    moved.check_as(high.start, 2)
}

fn mremap_grow_over(ctx: &Ctx) -> Outcome {
    const LONG: usize = 16 * PAGE;
    const SHORT: usize = 8 * PAGE;
    const AT: usize = 4 * PAGE;
    let (field, mut ballast) = ctx.evicted()?;
    let places = (0..field.len / (LONG + SHORT)).map(|n| {
        let part = field.part(n * (LONG + SHORT), LONG + SHORT);
        let (long, short) = (part.part(0, LONG), part.part(LONG, SHORT));
        let place = sys::map(LONG)?;
        // Nothing between the two: the reader of events meets them in one go.
        sys::remap(long, LONG, sys::FIXED, place.start)?;
        sys::remap(short, LONG - AT, sys::FIXED, place.start + AT)?;
        Ok((place, long, short))
    });
    let places: Vec<_> = places.collect::<Result<_, Stop>>()?;
    let check = || {
        places.iter().try_for_each(|(place, long, short)| {
            place.part(0, AT).check_as(long.start, 1)?;
            place.part(AT, SHORT).check_as(short.start, 1)?;
            place.part(AT + SHORT, LONG - AT - SHORT).check_zero()
        })
    };
    check()?;
    ballast.walk()?;
    check()
}

fn mremap_regrow(ctx: &Ctx) -> Outcome {
    const LONG: usize = 16 * PAGE;
    const SHORT: usize = 4 * PAGE;
    let (field, mut ballast) = ctx.evicted()?;
    let places = (0..field.len / LONG).map(|n| {
        let long = field.part(n * LONG, LONG);
        let place = sys::map(LONG)?;
        sys::remap(long, LONG, sys::FIXED, place.start)?;
        sys::remap(place, SHORT, 0, 0)?;
        sys::remap(place.part(0, SHORT), LONG, 0, 0)?;
        Ok((place, long))
    });
    let places: Vec<_> = places.collect::<Result<_, Stop>>()?;
    let check = || {
        places.iter().try_for_each(|(place, long)| {
            place.part(0, SHORT).check_as(long.start, 1)?;
            place.part(SHORT, LONG - SHORT).check_zero()
        })
    };
    check()?;
    ballast.walk()?;
    check()
}

fn mremap_regrow_beside(ctx: &Ctx) -> Outcome {
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        // It only has to be there.
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                std::thread::park_timeout(Duration::from_millis(10));
            }
        });
        let outcome = mremap_regrow(ctx);
        done.store(true, Ordering::Relaxed);
        outcome
    })
}

fn mremap_regrow_half(ctx: &Ctx) -> Outcome {
    const AREAS: usize = 16;
    let len = ctx.half() / AREAS / BLOCK * BLOCK;
    let mut ballast = Ballast::new(ctx.half())?;
    let deadline = ctx.deadline();
    while Instant::now() < deadline {
        // Where nobody else is given addresses.
        let area = |index: usize| {
            let whole = Span::new(0x2f00_0000_0000 + index * (1 << 30), BLOCK + len);
            (whole, whole.part(0, BLOCK), whole.part(BLOCK, len))
        };
        for (whole, ..) in (0..AREAS).map(area) {
            sys::map_at(whole.start, whole.len, sys::RW, sys::ANON | libc::MAP_FIXED_NOREPLACE)?;
            whole.fill(1);
        }
        ballast.walk()?;
        for (whole, before, rest) in (0..AREAS).map(area) {
            let (near, far) = rest.halves();
            // A page of what goes is there.
            far.page(far.pages() - 1).check(1)?;
            sys::unmap(rest)?;
            sys::remap(before, before.len + near.len, 0, 0)?;
            sys::map_at(far.start, far.len, sys::RW, sys::ANON | libc::MAP_FIXED_NOREPLACE)?;
            far.page(1).fill(2);
            near.check_zero()?;
            before.check(1)?;
            sys::unmap(whole)?;
        }
    }
    ballast.walk()
}

fn mremap_regrow_past(ctx: &Ctx) -> Outcome {
    let mut ballast = Ballast::new(ctx.half())?;
    let deadline = ctx.deadline();
    while Instant::now() < deadline {
        // Where nobody else is given addresses.
        let whole =
            sys::map_at(0x2f00_0000_0000, ctx.half(), sys::RW, sys::ANON | libc::MAP_FIXED_NOREPLACE)?;
        let (before, rest) = whole.halves();
        whole.fill(1);
        ballast.walk()?;
        sys::unmap(rest)?;
        let grown: usize;
        // SAFETY: mremap(2) of memory of ours, where it is.
        unsafe {
            core::arch::asm!(
                "syscall",
                inlateout("rax") libc::SYS_mremap as usize => grown,
                in("rdi") before.start,
                in("rsi") before.len,
                in("rdx") whole.len,
                in("r10") 0,
                lateout("rcx") _,
                lateout("r11") _,
            );
        }
        ensure!(grown == whole.start, "mremap: {grown:#x}");
        rest.check_zero()?;
        before.check(1)?;
        sys::unmap(whole)?;
    }
    Ok(())
}

fn mremap_dontunmap(ctx: &Ctx) -> Outcome {
    let (field, mut ballast) = ctx.evicted()?;
    let (old, _) = field.halves();
    let moved = sys::remap(old, old.len, libc::MREMAP_MAYMOVE | libc::MREMAP_DONTUNMAP, 0)?;
    moved.check_as(old.start, 1)?;
    ballast.walk()?;
    old.check_zero()?;
    old.fill(3);
    ballast.walk()?;
    moved.check_as(old.start, 1)?;
    old.check(3)
}

/// All of it moves, or nothing: what has just been mapped is not registered, and Linux moves several mappings up to the first that
/// is.
fn mremap_dontunmap_pieces(ctx: &Ctx) -> Outcome {
    let (field, mut ballast) = ctx.evicted()?;
    let place = sys::map(field.len)?;
    let new = Span::new(field.start, 16 * PAGE);
    let rest = Span::new(new.end(), field.len - new.len);
    for _ in 0..20 {
        sys::map_at(new.start, new.len, sys::RW, sys::ANON | libc::MAP_FIXED)?;
        new.fill(2);
        if sys::remap(field, field.len, sys::FIXED | libc::MREMAP_DONTUNMAP, place.start).is_ok() {
            Span::new(place.start, new.len).check_as(new.start, 2)?;
            Span::new(place.start + new.len, rest.len).check_as(rest.start, 1)?;
            return field.check_zero();
        }
        new.check(2)?;
        rest.check(1)?;
        ballast.walk()?;
    }
    Ok(())
}

fn mremap_in_place(ctx: &Ctx) -> Outcome {
    let (field, mut ballast) = ctx.evicted()?;
    let (low, high) = field.halves();
    for _ in 0..2 {
        let short = sys::remap(field, low.len, 0, 0)?;
        ensure!(!sys::is_mapped_anywhere(high), "what was cut off is still mapped");
        ballast.walk()?;
        sys::remap(short, field.len, 0, 0)?;
        low.check(1)?;
        high.check_zero()?;
        high.fill(2);
        ballast.walk()?;
        high.check(2)?;
    }
    low.check(1)
}

/// Memory that was mapped piece by piece, each behind the last: one mapping of the kernel's, without us.
struct Pieced {
    span: Span,
    /// What each page holds: where it was filled, and its generation; 0: zeros.
    pages: Vec<(usize, u16)>,
    /// Since it was moved nothing mapped behind it is of the same mapping.
    moved: bool,
}

impl Pieced {
    fn new(at: usize, len: usize) -> Result<Self, Stop> {
        let span = sys::map_at(at, len, sys::RW, sys::ANON | libc::MAP_FIXED_NOREPLACE)?;
        Ok(Pieced { span, pages: vec![(0, 0); span.pages()], moved: false })
    }

    fn fill(&mut self, first: usize, generation: u16) {
        for (page, holds) in self.pages.iter_mut().enumerate().skip(first) {
            let page = self.span.page(page);
            page.fill(generation);
            *holds = (page.start, generation);
        }
    }

    fn check(&self) -> Outcome {
        let holds = |(page, holds): (usize, &(usize, u16))| match *holds {
            (_, 0) => self.span.page(page).check_zero(),
            (origin, generation) => self.span.page(page).check_as(origin, generation),
        };
        self.pages.iter().enumerate().try_for_each(holds)
    }

    /// Maps more behind it; `false`: there is something.
    fn extend(&mut self, len: usize) -> bool {
        let there = sys::map_at(self.span.end(), len, sys::RW, sys::ANON | libc::MAP_FIXED_NOREPLACE);
        if there.is_ok() {
            self.now(Span::new(self.span.start, self.span.len + len));
        }
        there.is_ok()
    }

    fn remap(&mut self, len: usize, flags: i32, to: usize) -> Outcome {
        let span = sys::remap(self.span, len, flags, to)?;
        self.moved |= span.start != self.span.start;
        self.now(span);
        Ok(())
    }

    fn now(&mut self, span: Span) {
        self.span = span;
        self.pages.resize(span.pages(), (0, 0));
    }
}

fn mremap_pieces(ctx: &Ctx) -> Outcome {
    const PIECE: usize = 2 << 20;
    let mut ballast = Ballast::new(ctx.half())?;
    // Where nobody else is given addresses.
    let (low, high) = Span::new(0x2800_0000_0000, 4 * ctx.half()).halves();
    sys::map_at(high.start, high.len, libc::PROT_NONE, sys::ANON | libc::MAP_NORESERVE | libc::MAP_FIXED)?;
    let mut pieced = Pieced::new(low.start, PIECE)?;
    pieced.fill(0, 1);
    for generation in 2..=(ctx.half() / PIECE) as u16 {
        // Each is taken up by itself; the last not at all.
        ballast.walk()?;
        let known = pieced.span.pages();
        ensure!(pieced.extend(PIECE), "there was no room");
        pieced.fill(known, generation);
    }
    let len = pieced.span.len;
    // Where it is, as far as there is room.
    pieced.remap(len + PIECE, 0, 0)?;
    pieced.check()?;
    let refused = sys::remap(pieced.span, 2 * low.len, 0, 0);
    ensure!(refused.is_err() && sys::errno() == libc::ENOMEM, "grew over something: {refused:?}");
    // To where there is, and longer; to a chosen place; shorter; back again, all over something.
    pieced.remap(2 * low.len, libc::MREMAP_MAYMOVE, 0)?;
    pieced.check()?;
    ballast.walk()?;
    pieced.remap(len, sys::FIXED, high.start)?;
    ballast.walk()?;
    pieced.check()?;
    sys::map_at(low.start, low.len, sys::RW, sys::ANON | libc::MAP_FIXED_NOREPLACE)?.part(0, PIECE).fill(7);
    pieced.remap(len, sys::FIXED, low.start)?;
    pieced.check()?;
    pieced.remap(len + PIECE, sys::FIXED, high.start)?;
    ballast.walk()?;
    pieced.check()?;
    // What is new comes first: a kernel that moves one after the other would stop amid.
    let whole = Span::new(0x2900_0000_0000, 2 * PIECE);
    let (new, old) = whole.halves();
    sys::map_at(old.start, old.len, sys::RW, sys::ANON | libc::MAP_FIXED_NOREPLACE)?.fill(1);
    ballast.walk()?;
    sys::map_at(new.start, new.len, sys::RW, sys::ANON | libc::MAP_FIXED_NOREPLACE)?.fill(2);
    let moved = sys::remap(whole, whole.len, sys::FIXED, whole.end())?;
    moved.part(0, PIECE).check_as(new.start, 2)?;
    moved.part(PIECE, PIECE).check_as(old.start, 1)?;
    // A hole is refused as ever, and nothing is lost.
    let (whole, hole) = (pieced.span, pieced.span.page(len / 2 / PAGE));
    sys::unmap(hole)?;
    let refused = sys::remap(whole, 2 * len, libc::MREMAP_MAYMOVE, 0);
    ensure!(refused.is_err() && sys::errno() == libc::EFAULT, "moved a hole: {refused:?}");
    sys::map_over(hole, sys::RW, 0)?;
    pieced.pages[len / 2 / PAGE] = (0, 0);
    ballast.walk()?;
    pieced.check()
}

/// What handlers of fork move, and how that went.
static AT_FORK: Mutex<Option<(Pieced, Outcome)>> = Mutex::new(None);

/// Moves it to its other place.
extern "C" fn move_it() {
    if let Ok(Some((pieced, outcome))) = AT_FORK.lock().as_deref_mut() {
        let to = if pieced.span.start == HERE { THERE } else { HERE };
        *outcome = pieced.remap(pieced.span.len, sys::FIXED, to);
    }
}

const HERE: usize = 0x2c00_0000_0000;
const THERE: usize = 0x2d00_0000_0000;

/// Has handlers of fork, and forks, whose children look at what was moved, as does the parent.
fn at_forks(
    ctx: &Ctx,
    before: extern "C" fn(),
    after: extern "C" fn(),
    in_child: Option<unsafe extern "C" fn()>,
) -> Outcome {
    const PIECE: usize = 2 << 20;
    let check = || match AT_FORK.lock().as_deref_mut() {
        Ok(Some((pieced, outcome))) => std::mem::replace(outcome, Ok(())).and_then(|()| pieced.check()),
        _ => Ok(()),
    };
    let mut ballast = Ballast::new(ctx.half())?;
    let mut pieced = Pieced::new(HERE, PIECE)?;
    pieced.fill(0, 1);
    for generation in 2..=4 {
        // Each is taken up by itself.
        ballast.walk()?;
        let known = pieced.span.pages();
        ensure!(pieced.extend(PIECE), "there was no room");
        pieced.fill(known, generation);
    }
    ballast.walk()?;
    *AT_FORK.lock().map_err(|_| Stop::Wrong("a thread panicked".into()))? = Some((pieced, Ok(())));
    // SAFETY: the handlers are there as long as the program.
    sys::ret("pthread_atfork", unsafe { libc::pthread_atfork(Some(before), Some(after), in_child) })?;
    for _ in 0..4 {
        let child = sys::fork(check)?;
        sys::wait_for(child, 0)?;
        check()?;
        ballast.walk()?;
    }
    Ok(())
}

fn mremap_at_fork(ctx: &Ctx) -> Outcome {
    at_forks(ctx, move_it, move_it, None)
}

/// The lock of whoever moves it, which a fork takes.
static MOVING: AtomicBool = AtomicBool::new(false);

extern "C" fn begin_to_move() {
    while MOVING.swap(true, Ordering::SeqCst) {
        std::thread::yield_now();
    }
}

extern "C" fn end_to_move() {
    MOVING.store(false, Ordering::SeqCst);
}

fn mremap_beside_fork(ctx: &Ctx) -> Outcome {
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::SeqCst) {
                begin_to_move();
                move_it();
                end_to_move();
                std::thread::yield_now();
            }
        });
        let outcome = at_forks(ctx, begin_to_move, end_to_move, Some(end_to_move));
        done.store(true, Ordering::SeqCst);
        outcome
    })
}

/// Whoever reads where memory is moved to finds what was there or what has come.
fn mremap_pieces_read(ctx: &Ctx) -> Outcome {
    const ORIGIN: usize = 0x1000_0000;
    const TO: usize = 0x2a00_0000_0000;
    const FROM: usize = 0x2b00_0000_0000;
    let mut ballast = Ballast::new(ctx.half())?;
    let len = (ctx.half() / 4).next_multiple_of(4 * PAGE);
    let place = sys::map_at(TO, len, sys::RW, sys::ANON | libc::MAP_FIXED_NOREPLACE)?;
    place.fill_as(ORIGIN, 1);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| -> Outcome {
            while !stop.load(Ordering::Relaxed) {
                for at in (0..len).step_by(PAGE) {
                    let word = load(place.start + at);
                    ensure!(
                        word == pattern(ORIGIN + at, 1) || word == pattern(ORIGIN + at, 2),
                        "neither what was there nor what came"
                    );
                }
            }
            Ok(())
        });
        let done = (0..6).try_for_each(|turn| {
            for at in (0..len).step_by(len / 4) {
                let piece = sys::map_at(FROM + at, len / 4, sys::RW, sys::ANON | libc::MAP_FIXED_NOREPLACE)?;
                piece.fill_as(ORIGIN + at, 2 - turn % 2);
                ballast.walk()?;
            }
            sys::remap(Span::new(FROM, len), len, sys::FIXED, TO)?;
            Ok(())
        });
        stop.store(true, Ordering::Relaxed);
        reader.join().expect("the thread does not panic").and(done)
    })?;
    place.check_as(ORIGIN, 1)
}

/// Moved or refused, it is whole.
fn mremap_mappings_all(ctx: &Ctx) -> Outcome {
    const PIECE: usize = 4 << 20;
    let mut ballast = Ballast::new(ctx.half())?;
    let first = Span::new(0x2e00_0000_0000, ctx.half());
    let other = Span::new(0x2f00_0000_0000, ctx.half());
    // What comes amid another mapping makes it two.
    let around = Span::new(other.start - PAGE, other.len + 2 * PAGE);
    let flags = sys::ANON | libc::MAP_NORESERVE | libc::MAP_FIXED_NOREPLACE;
    sys::map_at(around.start, around.len, libc::PROT_NONE, flags)?;
    for piece in first.pieces(PIECE) {
        sys::map_at(piece.start, piece.len, sys::RW, sys::ANON | libc::MAP_FIXED_NOREPLACE)?.fill(1);
        ballast.walk()?;
    }
    let (reserve, count) = super::basic::use_up_mappings()?;
    let (mut at, mut to) = (first, other);
    for spare in 0..24 {
        match sys::remap(at, at.len, sys::FIXED, to.start) {
            Ok(_) => std::mem::swap(&mut at, &mut to),
            Err(_) if sys::errno() == libc::ENOMEM => {}
            Err(stop) => return Err(stop),
        }
        at.check_as(first.start, 1)?;
        // One more, or two, that there may be.
        sys::protect(reserve.part((count - 1 - spare) * 2 * PAGE, PAGE), libc::PROT_NONE)?;
    }
    sys::unmap(reserve)?;
    sys::remap(at, at.len, sys::FIXED, to.start)?.check_as(first.start, 1)
}

fn mremap_random(ctx: &Ctx) -> Outcome {
    const COUNT: usize = 2;
    const OBJECTS: usize = 4;
    const EACH: usize = 8 << 20;
    let churn = Churn::start(ctx.half())?;
    let deadline = ctx.deadline();
    let most = ctx.half() / COUNT / OBJECTS;
    together(COUNT, |index| {
        let mut dice = Dice::new(index);
        // Chosen places; nobody else comes there.
        let places: Vec<_> = (0..=OBJECTS).map(|n| 0x3000_0000_0000 + (index << 40) + n * EACH).collect();
        let objects = places[..OBJECTS].iter().map(|place| Pieced::new(*place, PAGE));
        let mut objects = objects.collect::<Result<Vec<_>, _>>()?;
        let mut generation = 0u16;
        while Instant::now() < deadline {
            let is_free = |place: &&usize| objects.iter().all(|object| object.span.start != **place);
            let free = *places.iter().find(is_free).expect("one more than there are objects");
            let object = &mut objects[dice.roll(OBJECTS)];
            let some = (1 + dice.roll(most / 4 / PAGE)) * PAGE;
            let (len, known) = (object.span.len, object.span.pages());
            let less = (1 + dice.roll(known)) * PAGE;
            match dice.roll(8) {
                0..4 if !object.moved && len < most => {
                    object.extend(some);
                }
                4 if len < most => match object.remap(len + some, 0, 0) {
                    Err(_) if sys::errno() == libc::ENOMEM => {}
                    done => done?,
                },
                5 if len < most => object.remap(len + some, libc::MREMAP_MAYMOVE, 0)?,
                6 => {
                    let to = [len, less, (len + some).min(EACH)][dice.roll(3)];
                    object.remap(to, sys::FIXED, free)?;
                }
                7 if object.moved => {
                    object.check()?;
                    sys::unmap(object.span)?;
                    *object = Pieced::new(free, PAGE)?;
                }
                7 => object.remap(less, 0, 0)?,
                _ => continue,
            }
            object.check()?;
            generation = generation.wrapping_add(1).max(1);
            let from = dice.roll(known);
            object.fill(from.min(object.pages.len() - 1), generation);
        }
        objects.iter().try_for_each(Pieced::check)
    })?;
    churn.end()
}

fn mremap_race(ctx: &Ctx) -> Outcome {
    let churn = Churn::start(ctx.half())?;
    let deadline = ctx.deadline();
    let each = (ctx.half() / 4 / BLOCK * BLOCK).max(BLOCK);
    let ready = std::sync::Barrier::new(2);
    together(2, |index| {
        let mut here = sys::map_aligned(each, BLOCK)?;
        let mut there = sys::map_aligned(each, BLOCK)?;
        let mut generation = 0;
        let mut dice = Dice::new(index);
        // Nothing else may be mapped from here on, this thread's own heap included: it could get the addresses that
        // are free for a moment.
        std::hint::black_box(vec![index; 64]);
        ready.wait();
        while Instant::now() < deadline {
            generation += 1;
            here.fill_as(0x100_0000, generation);
            let len = dice.roll(here.pages()) * PAGE;
            for piece in [here.part(0, len), here.part(len, here.len - len)] {
                if piece.len > 0 {
                    let to = there.start + piece.start - here.start;
                    // What came in two pieces, of which only one has been taken up by then, is two mappings for a
                    // moment, and those do not move in one call.
                    let last = Instant::now() + Duration::from_secs(1);
                    while let Err(stop) = sys::remap(piece, piece.len, sys::FIXED, to) {
                        if sys::errno() != libc::EFAULT || Instant::now() > last {
                            return Err(stop);
                        }
                        std::thread::yield_now();
                    }
                }
            }
            there.check_as(0x100_0000, generation)?;
            sys::map_at(here.start, here.len, sys::RW, sys::ANON | libc::MAP_FIXED)?;
            std::mem::swap(&mut here, &mut there);
        }
        Ok(())
    })?;
    churn.end()
}

fn mremap_handover(ctx: &Ctx) -> Outcome {
    const ORIGIN: usize = 0x1000_0000;
    const COUNT: usize = 4;
    const OBJECTS: usize = 16;
    let churn = Churn::start(ctx.half())?;
    let most = (ctx.half() / COUNT / OBJECTS / PAGE).clamp(8, 256);
    let deadline = ctx.deadline();
    together(COUNT, |index| {
        let mut dice = Dice::new(index);
        let mut objects = [(Span::new(0, 0), 0u16); OBJECTS];
        let mut generation = 0u16;
        while Instant::now() < deadline {
            let which = dice.roll(OBJECTS);
            let (span, known) = objects[which];
            let origin = ORIGIN * (1 + index * OBJECTS + which);
            if span.len == 0 {
                generation = generation.wrapping_add(1);
                let new = sys::map((1 + dice.roll(most / 2)) * PAGE)?;
                new.check_zero()?;
                new.fill_as(origin, generation);
                objects[which] = (new, generation);
                continue;
            }
            // The kernel chooses the place, and likes one that was left just now: to be moved at once again, and
            // without a look at it, is what a thread that is told of late is overtaken by.
            let mut moved = span;
            for _ in 0..1 + dice.roll(3) {
                let len = moved.len + (1 + dice.roll(4)) * PAGE;
                moved = grow(moved, len)?;
            }
            moved.part(0, span.len).check_as(origin, known)?;
            moved.part(span.len, moved.len - span.len).check_zero()?;
            moved.part(span.len, moved.len - span.len).fill_as(origin + span.len, known);
            objects[which].0 = moved;
            if moved.pages() > most || dice.roll(3) == 0 {
                sys::unmap(moved)?;
                objects[which].0 = Span::new(0, 0);
            }
        }
        objects.iter().enumerate().filter(|(_, (span, _))| span.len > 0).try_for_each(
            |(which, (span, known))| span.check_as(ORIGIN * (1 + index * OBJECTS + which), *known),
        )
    })?;
    churn.end()
}

/// Moves memory to where there is room for more. What grew in place while it was taken up can be two areas of the
/// kernel's list; then the kernel refuses, and this does what `realloc` does.
fn grow(span: Span, len: usize) -> Result<Span, Stop> {
    match sys::remap(span, len, libc::MREMAP_MAYMOVE, 0) {
        Err(_) if sys::errno() == libc::EFAULT => {
            let new = sys::map(len)?;
            // SAFETY: both are ours, and apart.
            unsafe { std::ptr::copy_nonoverlapping(span.as_ptr::<u8>(), new.as_ptr(), span.len) };
            sys::unmap(span)?;
            Ok(new)
        }
        other => other,
    }
}

/// What is at hand in one round of [`mremap_overtaken`].
#[derive(Clone, Copy)]
struct Arena {
    start: usize,
    generation: u16,
    /// What came on its own way moves on.
    moves_on: bool,
    /// What others left is grown over.
    grows: [bool; 2],
}

impl Arena {
    const LEN: usize = 16 * PAGE;
    /// Of so many places.
    const SIZE: usize = 16 * Self::LEN;

    fn place(&self, number: usize) -> Span {
        Span::new(self.start + number * Self::LEN, Self::LEN)
    }

    /// Grows, unseen, to `left`, which is moved `away`.
    fn first(&self) -> Span {
        self.place(0)
    }

    fn left(&self) -> Span {
        self.place(1)
    }

    fn away(&self) -> Span {
        self.place(10)
    }

    /// Comes from right behind `neighbour` to where that was, and moves `on`.
    fn neighbour(&self) -> Span {
        self.place(3)
    }

    fn comer(&self) -> Span {
        self.place(4)
    }

    fn on(&self) -> Span {
        self.place(7)
    }

    fn fill(&self) {
        [self.first(), self.neighbour(), self.comer()]
            .into_iter()
            .for_each(|span| span.fill(self.generation));
    }

    /// Who has which part in a race; `came`: the one who comes has returned.
    fn race(&self, part: usize, came: &AtomicBool) -> Outcome {
        let is_there = |span: Span| sys::is_mapped(span.page(0));
        let wait = |until: &dyn Fn() -> bool| {
            let last = Instant::now() + Duration::from_secs(10);
            while !until() {
                ensure!(Instant::now() < last, "what is waited for does not come");
                std::thread::yield_now();
            }
            Ok(())
        };
        let shift = |from: Span, to: Span| sys::remap(from, from.len, sys::FIXED, to.start).map(drop);
        let grow = |span: Span| sys::remap(span, 2 * span.len, 0, 0).map(drop);
        match part {
            0 => shift(self.left(), self.away()),
            1 => {
                wait(&|| is_there(self.away()) && !is_there(self.left()))?;
                shift(self.comer(), self.left())?;
                came.store(true, Ordering::SeqCst);
                Ok(())
            }
            2 if self.moves_on => {
                wait(&|| came.load(Ordering::SeqCst))?;
                shift(self.left(), self.on())
            }
            3 if self.grows[0] && self.moves_on => {
                wait(&|| is_there(self.on()) && !is_there(self.left()))?;
                grow(self.first())
            }
            4 if self.grows[1] => {
                wait(&|| !is_there(self.comer()))?;
                grow(self.neighbour())
            }
            _ => Ok(()),
        }
    }

    /// All is where it was moved, and what grew is empty; then it is as before.
    fn settle(&mut self) -> Outcome {
        let came = if self.moves_on { self.on() } else { self.left() };
        came.check_as(self.comer().start, self.generation)?;
        self.first().check(self.generation)?;
        self.neighbour().check(self.generation)?;
        self.away().check_zero()?;
        sys::unmap(self.away())?;
        for grown in [self.left(), self.comer()].into_iter().filter(|span| span.start != came.start) {
            if sys::is_mapped(grown) {
                grown.check_zero()?;
                sys::unmap(grown)?;
            }
        }
        sys::remap(came, came.len, sys::FIXED, self.comer().start)?;
        self.generation += 1;
        self.fill();
        Ok(())
    }
}

fn mremap_overtaken(ctx: &Ctx) -> Outcome {
    const PARTS: usize = 5;
    let deadline = ctx.deadline();
    // In turn, so that what is moved is out.
    let count = ctx.half() / (3 * Arena::LEN);
    // Where nobody else comes.
    let mut arenas = Vec::new();
    for start in (0..count).map(|index| 0x2000_0000_0000 + index * Arena::SIZE) {
        let arena = Arena { start, generation: 1, moves_on: false, grows: [false; 2] };
        for span in [arena.first(), arena.neighbour(), arena.comer()] {
            sys::map_at(span.start, span.len, sys::RW, sys::ANON | libc::MAP_FIXED_NOREPLACE)?;
        }
        arena.fill();
        arenas.push(arena);
    }
    let mut dice = Dice::new(0);
    let (round, came) = (Mutex::new(None), AtomicBool::new(false));
    let [begin, end] = std::array::from_fn(|_| std::sync::Barrier::new(PARTS + 1));
    std::thread::scope(|scope| {
        let parts: Vec<_> = (0..PARTS)
            .map(|part| {
                let (round, came, begin, end) = (&round, &came, &begin, &end);
                scope.spawn(move || {
                    let mut outcome = Ok(());
                    loop {
                        begin.wait();
                        let Some(arena): Option<Arena> = *round.lock().unwrap() else { return outcome };
                        outcome = outcome.and_then(|()| arena.race(part, came));
                        end.wait();
                    }
                })
            })
            .collect();
        let mut outcome = Ok(());
        for index in (0..count).cycle() {
            if outcome.is_err() || Instant::now() > deadline {
                break;
            }
            let arena = &mut arenas[index];
            arena.moves_on = dice.roll(4) > 0;
            arena.grows = std::array::from_fn(|_| dice.roll(2) == 0);
            outcome = sys::remap(arena.first(), 2 * Arena::LEN, 0, 0).map(drop);
            if outcome.is_ok() {
                *round.lock().unwrap() = Some(*arena);
                came.store(false, Ordering::SeqCst);
                begin.wait();
                end.wait();
                outcome = arena.settle();
            }
        }
        *round.lock().unwrap() = None;
        begin.wait();
        for part in parts {
            part.join().map_err(|_| Stop::Wrong("a thread panicked".into()))??;
        }
        outcome
    })
}

fn realloc_race(ctx: &Ctx) -> Outcome {
    const ORIGIN: usize = 0x1000_0000;
    const COUNT: usize = 4;
    const OBJECTS: usize = 16;
    const SOME: usize = 40 * PAGE;
    let churn = Churn::start(ctx.half())?;
    let deadline = ctx.deadline();
    let most = (ctx.half() / COUNT / OBJECTS).clamp(2 * SOME, 256 * PAGE);
    together(COUNT, |index| {
        let mut dice = Dice::new(index);
        // Of each as much as was filled.
        let mut objects = [(Span::new(0, 0), 0usize); OBJECTS];
        let mut check = |dice: &mut Dice, which: usize| {
            let (object, filled) = &mut objects[which];
            // Large enough to be mappings of their own, in which the first page begins late.
            for _ in 0..1 + dice.roll(3) {
                // To the last byte that there is, too, with which libc's is a page longer.
                let len = object.len.max(SOME) + (1 + dice.roll(8)) * PAGE - dice.roll(3) * 16;
                // SAFETY: null, or what the last round got.
                let at = unsafe { libc::realloc(object.as_ptr(), len) } as usize;
                ensure!(at != 0, "realloc failed");
                *object = Span::new(at, len);
            }
            let origin = ORIGIN * (1 + index * OBJECTS + which);
            for at in (0..*filled).step_by(PAGE) {
                let word = load(object.start + at);
                ensure!(
                    word == pattern(origin + at, 1),
                    "object {which} of thread {index} has {word:#x} at {at:#x}"
                );
            }
            // Not to the end: what grew is left untouched, and moved.
            *filled = object.len - dice.roll(8) * PAGE;
            (0..*filled).step_by(PAGE).for_each(|at| store(object.start + at, pattern(origin + at, 1)));
            if object.len > most {
                // SAFETY: what realloc gave.
                unsafe { libc::free(object.as_ptr()) };
                (*object, *filled) = (Span::new(0, 0), 0);
            }
            Ok(())
        };
        while Instant::now() < deadline {
            let which = dice.roll(OBJECTS);
            check(&mut dice, which)?;
        }
        Ok(())
    })?;
    churn.end()
}

/// What [`help`] protects, and how far the help is: asked for so often, given so often.
static HELPED: [AtomicUsize; 4] = [const { AtomicUsize::new(0) }; 4];

extern "C" fn help(signal: c_int, info: *mut libc::siginfo_t, _: *mut c_void) {
    let [start, len, asked, given] = HELPED.each_ref();
    let (start, len) = (start.load(Ordering::SeqCst), len.load(Ordering::SeqCst));
    // SAFETY: the kernel passes a whole structure.
    let at = unsafe { (*info).si_addr() } as usize;
    if at.wrapping_sub(start) >= len {
        // SAFETY: the fault happens again and ends the program.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
        return;
    }
    let which = asked.fetch_add(1, Ordering::SeqCst);
    while given.load(Ordering::SeqCst) <= which {
        std::hint::spin_loop();
    }
    let _ = sys::protect(Span::new(start, len), sys::RW);
}

fn realloc_helped(ctx: &Ctx) -> Outcome {
    const LEN: usize = 256 * PAGE;
    let [start, len, asked, given] = HELPED.each_ref();
    let churn = Churn::start(ctx.half())?;
    sys::handle(libc::SIGSEGV, 0, help)?;
    let done = AtomicBool::new(false);
    together(2, |index| {
        if index == 0 {
            let mut mine = Mover::map(Mover::place(0), 16 * PAGE)?;
            while !done.load(Ordering::SeqCst) {
                if given.load(Ordering::SeqCst) < asked.load(Ordering::SeqCst) {
                    mine.go()?;
                    given.fetch_add(1, Ordering::SeqCst);
                }
                std::thread::yield_now();
            }
            return mine.check();
        }
        let each = |round: usize| {
            // SAFETY: what malloc gives, which begins with a part of a page.
            let at = unsafe { libc::malloc(LEN) } as usize;
            ensure!(at != 0, "malloc failed");
            let field = Span::new(at.next_multiple_of(PAGE), LEN - PAGE);
            field.fill(1);
            let some = field.part((1 + round) * PAGE, 8 * PAGE);
            start.store(some.start, Ordering::SeqCst);
            len.store(some.len, Ordering::SeqCst);
            sys::protect(some, libc::PROT_NONE)?;
            // SAFETY: what malloc gave.
            let new = unsafe { libc::realloc(at as *mut c_void, 2 * LEN) } as usize;
            ensure!(new != 0, "realloc failed");
            Span::new(new + (field.start - at), field.len).check_as(field.start, 1)?;
            // SAFETY: what realloc gave.
            unsafe { libc::free(new as *mut c_void) };
            Ok(())
        };
        let outcome = (0..20).try_for_each(each);
        done.store(true, Ordering::SeqCst);
        outcome
    })?;
    churn.end()
}

/// Moves that are done, for which a thread that is stopped waits, and how often it was.
static MOVED: AtomicUsize = AtomicUsize::new(0);
static STOPPED: AtomicUsize = AtomicUsize::new(0);

extern "C" fn park(_: c_int, _: *mut libc::siginfo_t, _: *mut c_void) {
    let seen = MOVED.load(Ordering::SeqCst);
    STOPPED.fetch_add(1, Ordering::SeqCst);
    while MOVED.load(Ordering::SeqCst) == seen {
        std::hint::spin_loop();
    }
}

fn mremap_parked(ctx: &Ctx) -> Outcome {
    const LEN: usize = 16 * PAGE;
    let churn = Churn::start(ctx.half())?;
    sys::handle(libc::SIGUSR1, libc::SA_RESTART, park)?;
    let mover = AtomicUsize::new(0);
    let done = AtomicBool::new(false);
    together(2, |index| {
        let mut mine = Mover::map(Mover::place(index), LEN)?;
        if index == 0 {
            // SAFETY: no conditions.
            mover.store(unsafe { libc::pthread_self() } as usize, Ordering::SeqCst);
            while !done.load(Ordering::SeqCst) {
                mine.go()?;
                mine.check()?;
            }
            return Ok(());
        }
        while mover.load(Ordering::SeqCst) == 0 {
            std::thread::yield_now();
        }
        let outcome = (0..50).try_for_each(|round| {
            std::thread::sleep(Duration::from_micros(100 + 37 * round));
            // SAFETY: the thread ends when it is told.
            unsafe { libc::pthread_kill(mover.load(Ordering::SeqCst) as libc::pthread_t, libc::SIGUSR1) };
            while STOPPED.load(Ordering::SeqCst) == round as usize {
                std::thread::yield_now();
            }
            mine.go()?;
            MOVED.fetch_add(1, Ordering::SeqCst);
            mine.check()
        });
        done.store(true, Ordering::SeqCst);
        MOVED.fetch_add(1, Ordering::SeqCst);
        outcome
    })?;
    churn.end()
}

/// What a handler moves, and how often it has.
static ITS_OWN: AtomicUsize = AtomicUsize::new(0);
const ITS_PLACES: [usize; 2] = [0x2e00_0000_0000, 0x2f00_0000_0000];

extern "C" fn move_its_own(_: c_int, _: *mut libc::siginfo_t, _: *mut c_void) {
    // SAFETY: libc's own of this thread.
    let errno = unsafe { *libc::__errno_location() };
    let done = ITS_OWN.load(Ordering::SeqCst);
    let mine = Span::new(ITS_PLACES[done % 2], 16 * PAGE);
    if sys::remap(mine, mine.len, sys::FIXED, ITS_PLACES[1 - done % 2]).is_ok() {
        ITS_OWN.store(done + 1, Ordering::SeqCst);
    }
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = errno };
}

fn mremap_signals(ctx: &Ctx) -> Outcome {
    const LEN: usize = 16 * PAGE;
    let churn = Churn::start(ctx.half())?;
    let its = sys::map_at(ITS_PLACES[0], LEN, sys::RW, sys::ANON | libc::MAP_FIXED_NOREPLACE)?;
    its.fill(1);
    sys::handle(libc::SIGUSR1, libc::SA_RESTART, move_its_own)?;
    let mut mine = Mover::map(Mover::place(0), LEN)?;
    // SAFETY: no conditions.
    let me = unsafe { libc::pthread_self() };
    let done = AtomicBool::new(false);
    let outcome = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::SeqCst) {
                std::thread::sleep(Duration::from_millis(1));
                // SAFETY: the thread waits for this one.
                unsafe { libc::pthread_kill(me, libc::SIGUSR1) };
            }
        });
        let outcome = (1..=10_000).try_for_each(|round| {
            mine.go()?;
            mine.check_page(round % 16)
        });
        done.store(true, Ordering::SeqCst);
        outcome
    });
    outcome?;
    let moves = ITS_OWN.load(Ordering::SeqCst);
    ensure!(moves > 0, "the handler has moved nothing");
    Span::new(ITS_PLACES[moves % 2], LEN).check_as(ITS_PLACES[0], 1)?;
    churn.end()
}

/// Moves its memory to and fro until it is killed. Calls nothing that keeps state.
extern "C" fn move_endlessly(its: *mut c_void) -> c_int {
    // SAFETY: what `mremap_killed` made and keeps.
    let mut its = unsafe { *its.cast::<Mover>() };
    while its.go().is_ok() {}
    1
}

fn mremap_killed(ctx: &Ctx) -> Outcome {
    const LEN: usize = 16 * PAGE;
    let (field, mut ballast) = ctx.evicted()?;
    let stack = sys::map(256 << 10)?;
    let mut mine = Mover::map(Mover::place(1), LEN)?;
    for round in 0..4 {
        let filled = sys::map_at(Mover::place(0), LEN, sys::RW, sys::ANON | libc::MAP_FIXED)?;
        filled.fill(1);
        let its = Mover::new(filled, filled.start);
        // SAFETY: the stack is the child's alone; what it reads outlives it.
        let child = unsafe {
            let (top, flags) = (stack.end() as *mut c_void, libc::CLONE_VM | libc::SIGCHLD);
            libc::clone(move_endlessly, top, flags, (&raw const its) as *mut c_void)
        };
        sys::ret("clone", child)?;
        for _ in 0..10 {
            mine.go()?;
            mine.check()?;
        }
        std::thread::sleep(Duration::from_micros(1000 + 137 * round));
        // SAFETY: our child, which was not waited for.
        unsafe { libc::kill(child, libc::SIGKILL) };
        let status = sys::wait_status(child)?;
        ensure!(status == libc::SIGKILL, "the other process ended with wait status {status:#x}");
        mine.go()?;
        mine.check()?;
        ballast.walk()?;
    }
    field.check(1)
}

fn map_fixed(ctx: &Ctx) -> Outcome {
    let (field, mut ballast) = ctx.evicted()?;
    let part = 256 << 10;
    let odd = || field.pieces(part).skip(1).step_by(2);
    odd().try_for_each(|piece| sys::map_over(piece, sys::RW, 0))?;
    odd().try_for_each(Span::check_zero)?;
    ballast.walk()?;
    field.pieces(part).step_by(2).try_for_each(|piece| piece.check(1))?;
    odd().for_each(|piece| piece.fill(2));
    ballast.walk()?;
    odd().try_for_each(|piece| piece.check(2))?;
    field.pieces(part).step_by(2).try_for_each(|piece| piece.check(1))
}

fn map_file_over(ctx: &Ctx) -> Outcome {
    let (field, mut ballast) = ctx.evicted()?;
    let file = sys::scratch_file(0)?;
    let part = field.part(field.len / 2 / PAGE * PAGE, 4 << 20);
    sys::pwrite_span(file.as_raw_fd(), part, 0)?;
    for flags in [libc::MAP_SHARED, libc::MAP_PRIVATE] {
        part.fill(2);
        sys::map_file(part.start, part.len, sys::RW, flags | libc::MAP_FIXED, file.as_raw_fd())?;
        part.check(1)?;
        ballast.walk()?;
        part.check(1)?;
        sys::map_over(part, libc::PROT_NONE, libc::MAP_NORESERVE)?;
        ballast.walk()?;
        sys::map_over(part, sys::RW, 0)?;
        part.check_zero()?;
    }
    field.part(0, part.start - field.start).check(1)?;
    field.part(part.end() - field.start, field.end() - part.end()).check(1)
}

/// Memory of `/dev/zero` can be registered like any, and does not come in like any. Beside what is mapped and unmapped all the
/// time, so that mappings are looked for.
fn zero_device_over(ctx: &Ctx) -> Outcome {
    let churn = Churn::start(ctx.half())?;
    let device = File::options()
        .read(true)
        .write(true)
        .open("/dev/zero")
        .map_err(|error| Stop::Wrong(error.to_string()))?;
    let whole = sys::map_aligned((ctx.half() / 2).next_multiple_of(BLOCK), BLOCK)?;
    sys::map_over(whole, libc::PROT_NONE, libc::MAP_NORESERVE)?;
    let places: Vec<Span> = whole.pieces(BLOCK).collect();
    let deadline = ctx.deadline();
    together(2, |index| {
        let mut dice = Dice::new(index);
        let mut generations = vec![0u16; places.len()];
        for turn in 1.. {
            if Instant::now() >= deadline {
                break;
            }
            if index == 0 {
                let span = sys::map(BLOCK + BLOCK / 2)?;
                span.fill(1);
                span.check(1)?;
                sys::unmap(span)?;
                continue;
            }
            let at = dice.roll(places.len());
            let full = || places.iter().zip(&generations).filter(|(_, generation)| **generation > 0);
            if turn % 16 == 0 {
                let child =
                    sys::fork(|| full().try_for_each(|(place, generation)| place.check(*generation)))?;
                sys::wait_for(child, 0)?;
            } else if generations[at] > 0 {
                places[at].check(generations[at])?;
            }
            sys::map_over(places[at], sys::RW, 0)?;
            places[at].fill(0);
            let flags = libc::MAP_PRIVATE | libc::MAP_FIXED;
            sys::map_file(places[at].start, BLOCK, sys::RW, flags, device.as_raw_fd())?;
            generations[at] += 1;
            places[at].fill(generations[at]);
        }
        Ok(())
    })?;
    churn.end()
}

fn munmap_parts(ctx: &Ctx) -> Outcome {
    let (field, mut ballast) = ctx.evicted()?;
    let part = 12 * PAGE;
    let holes = || field.pieces(part).skip(2).step_by(5);
    holes().try_for_each(sys::unmap)?;
    ballast.walk()?;
    let check = |hole_check: &dyn Fn(Span) -> Outcome| {
        field.pieces(part).enumerate().try_for_each(|(index, piece)| {
            if index >= 2 && (index - 2) % 5 == 0 {
                hole_check(piece)
            } else {
                piece.check(1)
            }
        })
    };
    check(&|hole| {
        ensure!(!sys::is_mapped_anywhere(hole), "a hole at {:#x} is mapped", hole.start);
        Ok(())
    })?;
    for hole in holes() {
        sys::map_at(hole.start, hole.len, sys::RW, sys::ANON | libc::MAP_FIXED_NOREPLACE)?;
    }
    check(&Span::check_zero)?;
    holes().for_each(|hole| hole.fill(2));
    ballast.walk()?;
    check(&|hole| hole.check(2))
}

fn mprotect(ctx: &Ctx) -> Outcome {
    let (field, mut ballast) = ctx.evicted()?;
    // Read-only from evicted, and only read.
    sys::protect(field, libc::PROT_READ)?;
    field.check(1)?;
    ensure!(!sys::is_writable(field.start)?, "read-only memory was written");
    ballast.walk()?;
    field.check(1)?;
    // No access, then back.
    sys::protect(field, libc::PROT_NONE)?;
    ballast.walk()?;
    ensure!(!sys::is_readable(field.start)?, "memory without access was read");
    sys::protect(field, sys::RW)?;
    field.check(1)?;
    field.fill(2);
    ballast.walk()?;
    // By single pages: every other one read-only.
    let pages = || field.pieces(PAGE).step_by(2).take(2000);
    pages().try_for_each(|page| sys::protect(page, libc::PROT_READ))?;
    ballast.walk()?;
    field.check(2)?;
    pages().try_for_each(|page| sys::protect(page, sys::RW))?;
    field.fill(3);
    ballast.walk()?;
    field.check(3)
}

fn mprotect_race(ctx: &Ctx) -> Outcome {
    let churn = Churn::start(ctx.half())?;
    let field = sys::map_aligned(ctx.half(), BLOCK)?;
    let deadline = ctx.deadline();
    together(2, |index| {
        let mine = if index == 0 { field.halves().0 } else { field.halves().1 };
        let mut dice = Dice::new(index);
        let mut generation = 0;
        while Instant::now() < deadline {
            generation += 1;
            mine.fill(generation);
            for _ in 0..64 {
                let from = dice.roll(mine.pages() - 16);
                let part = mine.part(from * PAGE, 16 * PAGE);
                sys::protect(part, [libc::PROT_READ, libc::PROT_NONE][dice.roll(2)])?;
                let other = mine.page(dice.roll(mine.pages()));
                if other.start < part.start || other.start >= part.end() {
                    other.check(generation)?;
                }
                sys::protect(part, sys::RW)?;
            }
            mine.check(generation)?;
        }
        Ok(())
    })?;
    churn.end()
}

fn commit(ctx: &Ctx) -> Outcome {
    let churn = Churn::start(ctx.half())?;
    let deadline = ctx.deadline();
    let count = 4;
    together(count, |index| {
        let reserve = sys::ANON | libc::MAP_NORESERVE;
        let heap = sys::map_at(0, ctx.half() / count, libc::PROT_NONE, reserve)?;
        let pieces: Vec<_> = heap.pieces(512 << 10).collect();
        let mut generations = vec![0u16; pieces.len()];
        let mut dice = Dice::new(index);
        let mut generation = 0;
        while Instant::now() < deadline {
            let which = dice.roll(pieces.len());
            if generations[which] == 0 {
                generation += 1;
                sys::map_over(pieces[which], sys::RW, 0)?;
                pieces[which].check_zero()?;
                pieces[which].fill(generation);
                generations[which] = generation;
            } else {
                pieces[which].check(generations[which])?;
                if dice.roll(2) == 0 {
                    sys::map_over(pieces[which], libc::PROT_NONE, libc::MAP_NORESERVE)?;
                    generations[which] = 0;
                }
            }
        }
        pieces
            .iter()
            .zip(generations)
            .filter(|(_, generation)| *generation != 0)
            .try_for_each(|(piece, generation)| piece.check(generation))
    })?;
    churn.end()
}

/// A place that two threads hand to and fro: one unmaps it, the other maps it again.
struct Place {
    span: Span,
    generation: AtomicU16,
    /// Set by who filled the place, cleared by who is about to unmap it.
    full: AtomicBool,
    /// Something else of the process took the place while it was unmapped.
    lost: AtomicBool,
}

fn unmap_race(ctx: &Ctx) -> Outcome {
    let churn = Churn::start(ctx.half())?;
    // Far below the addresses that the kernel chooses, so that nobody else comes to a hole.
    let base = 0x2000_0000_0000;
    let sizes = [PAGE, 64 << 10, 512 << 10, BLOCK];
    let count = (ctx.half() / (4 * BLOCK)).clamp(2, 32);
    let places: Vec<_> = (0..count)
        .map(|index| Place {
            span: Span::new(base + index * 2 * BLOCK, sizes[index % sizes.len()]),
            generation: AtomicU16::new(0),
            full: AtomicBool::new(false),
            lost: AtomicBool::new(false),
        })
        .collect();
    let flags = sys::ANON | libc::MAP_FIXED_NOREPLACE;
    for place in &places {
        sys::map_at(place.span.start, place.span.len, sys::RW, flags)?;
        place.span.fill(0);
        place.full.store(true, Ordering::Release);
    }
    let deadline = ctx.deadline();
    let turn = AtomicUsize::new(0);
    together(2, |index| {
        if index == 0 {
            unmapper(&places, &turn, deadline)
        } else {
            mapper(&places, &turn, deadline)
        }
    })?;
    churn.end()
}

/// Unmaps place after place, having seen that it holds what the other thread wrote.
fn unmapper(places: &[Place], turn: &AtomicUsize, deadline: Instant) -> Outcome {
    while Instant::now() < deadline {
        let next = turn.load(Ordering::Relaxed) % places.len();
        let place = &places[next];
        if place.lost.load(Ordering::Acquire) {
            turn.fetch_add(1, Ordering::Relaxed);
        } else if place.full.load(Ordering::Acquire) {
            place.span.check(place.generation.load(Ordering::Relaxed))?;
            place.full.store(false, Ordering::Release);
            sys::unmap(place.span)?;
        } else {
            std::thread::yield_now();
        }
    }
    Ok(())
}

/// Maps what is being unmapped as soon as the kernel lets it, even before `munmap` has returned.
fn mapper(places: &[Place], turn: &AtomicUsize, deadline: Instant) -> Outcome {
    let flags = sys::ANON | libc::MAP_FIXED_NOREPLACE;
    while Instant::now() < deadline {
        let place = &places[turn.load(Ordering::Relaxed) % places.len()];
        if place.full.load(Ordering::Acquire) || place.lost.load(Ordering::Relaxed) {
            std::thread::yield_now();
            continue;
        }
        let patience = Instant::now() + Duration::from_secs(2);
        while sys::map_at(place.span.start, place.span.len, sys::RW, flags).is_err() {
            if Instant::now() > patience {
                place.lost.store(true, Ordering::Release);
                break;
            }
        }
        if !place.lost.load(Ordering::Relaxed) {
            place.span.check_zero()?;
            let generation = place.generation.load(Ordering::Relaxed).wrapping_add(1);
            place.span.fill(generation);
            place.span.check(generation)?;
            place.generation.store(generation, Ordering::Relaxed);
            place.full.store(true, Ordering::Release);
            turn.fetch_add(1, Ordering::Relaxed);
        }
    }
    Ok(())
}

fn shm_remap(ctx: &Ctx) -> Outcome {
    const SHM_REMAP: c_int = 0o40000;
    let (field, mut ballast) = ctx.evicted()?;
    let part = field.part(0, field.len / 2 / PAGE * PAGE);
    // SAFETY: what is there is ours, and looked at by nobody meanwhile.
    unsafe {
        let id = sys::ret("shmget", libc::shmget(libc::IPC_PRIVATE, part.len, libc::IPC_CREAT | 0o600))?;
        let wrong = libc::shmat(id, (part.start + 1) as *const c_void, SHM_REMAP);
        ensure!(wrong as isize == -1, "shmat took an address within a page");
        part.check(1)?;
        let at = libc::shmat(id, part.start as *const c_void, SHM_REMAP);
        libc::shmctl(id, libc::IPC_RMID, std::ptr::null_mut());
        ensure!(at as usize == part.start, "shmat gave {at:?}: errno {}", sys::errno());
        part.fill(2);
        let child = sys::fork(|| part.check(2))?;
        sys::wait_for(child, 0)?;
        ballast.walk()?;
        part.check(2)?;
        sys::ret("shmdt", libc::shmdt(at))?;
    }
    sys::map_at(part.start, part.len, sys::RW, sys::ANON | libc::MAP_FIXED)?;
    part.fill(3);
    for _ in 0..2 {
        ballast.walk()?;
        part.check(3)?;
    }
    field.part(part.len, field.len - part.len).check(1)
}

fn fixed_readers(ctx: &Ctx) -> Outcome {
    let churn = Churn::start(ctx.half())?;
    let field = sys::map_aligned((ctx.half() / 8).next_multiple_of(BLOCK), BLOCK)?;
    // Generations that were begun and that are whole; equal while nothing happens.
    let (begun, whole) = (AtomicU16::new(0), AtomicU16::new(0));
    field.fill(0);
    let deadline = ctx.deadline();
    together(3, |index| {
        let mut dice = Dice::new(index);
        while Instant::now() < deadline {
            if index == 0 {
                let generation = begun.fetch_add(1, Ordering::SeqCst) + 1;
                sys::map_over(field, sys::RW, 0)?;
                field.fill(generation);
                whole.store(generation, Ordering::SeqCst);
                field.check(generation)?;
                continue;
            }
            let address = field.start + dice.roll(field.len / 8) * 8;
            let least = whole.load(Ordering::SeqCst);
            let word = load(address);
            let most = begun.load(Ordering::SeqCst);
            let fits = match decode(word) {
                _ if word == 0 => least != most,
                Some((whose, generation)) => whose == address && (least..=most).contains(&generation),
                None => false,
            };
            ensure!(
                fits,
                "at {address:#x}: {word:#x} ({:x?}) is not of the generations {least} to {most}",
                decode(word)
            );
        }
        Ok(())
    })?;
    churn.end()
}

fn areas(ctx: &Ctx) -> Outcome {
    // Two areas each, of 65,530: what is left is for the program's start and for the engine.
    const COUNT: usize = 31_000;
    let mut ballast = Ballast::new(ctx.half())?;
    let all = sys::map_at(0, COUNT * 2 * PAGE, libc::PROT_NONE, sys::ANON | libc::MAP_NORESERVE)?;
    let pages = || all.pieces(PAGE).step_by(2);
    for page in pages() {
        if sys::protect(page, sys::RW).is_err() {
            return Err(Stop::Wrong(format!("no more areas after {}", (page.start - all.start) / PAGE)));
        }
        page.fill(1);
    }
    ballast.walk()?;
    pages().try_for_each(|page| page.check(1))?;
    pages().for_each(|page| page.fill(2));
    ballast.walk()?;
    pages().try_for_each(|page| page.check(2))?;
    sys::unmap(all)
}

/// What Python's allocator maps by 1 MiB comes to lie behind libraries that are loaded later.
fn behind_libraries(ctx: &Ctx) -> Outcome {
    const EACH: usize = 1 << 20;
    const OWN: usize = 5 * PAGE;
    // A library of one segment, of which a page is in the file and some more are its zero-initialised data.
    let mut header = [0u64; 64 / 8 + 56 / 8];
    (header[0], header[4], header[6], header[7]) = (0x0001_0102_464c_457f, 64, 56 << 48, 1);
    (header[8], header[12], header[13]) = (1 | 6 << 32, PAGE as u64 - 8, (PAGE + OWN) as u64 - 8);
    // SAFETY: a name that ends with a zero.
    let fd =
        sys::ret("memfd_create", unsafe { libc::memfd_create(c"behind.so".as_ptr(), libc::MFD_CLOEXEC) })?;
    // SAFETY: new, and nobody else's.
    let file = unsafe { File::from_raw_fd(fd) };
    let bytes: Vec<u8> = header.iter().flat_map(|word| word.to_le_bytes()).collect();
    file.write_all_at(&bytes, 0)?;
    file.set_len(PAGE as u64)?;
    let count = ctx.half() / EACH;
    let all = sys::map_at(0, count * (EACH + 2 * PAGE), libc::PROT_NONE, sys::ANON | libc::MAP_NORESERVE)?;
    let mut areas = Vec::new();
    for library in all.pieces(EACH + 2 * PAGE) {
        let fixed = libc::MAP_PRIVATE | libc::MAP_FIXED;
        sys::map_file(library.start, PAGE, sys::RW, fixed, file.as_raw_fd())?;
        let area = library.part(PAGE, EACH);
        sys::map_over(area, sys::RW, 0)?;
        area.fill(1);
        areas.push(area);
    }
    let mut ballast = Ballast::new(ctx.half())?;
    ballast.walk()?;
    let there: usize = areas.iter().map(|area| sys::resident(*area).unwrap_or(0)).sum();
    let pages = count * EACH / PAGE;
    ensure!(!sys::under_pageout() || there < pages / 2, "{there} of {pages} pages stay in memory");
    for generation in 1..3 {
        areas.iter().try_for_each(|area| area.check(generation))?;
        areas.iter().for_each(|area| area.fill(generation + 1));
        ballast.walk()?;
    }
    areas.iter().try_for_each(|area| area.check(3))?;
    sys::unmap(all)
}

fn jit(ctx: &Ctx) -> Outcome {
    let Some(code_for) = code_that_returns() else {
        return Err(Stop::Skip("this trap has no code for this kind of CPU".into()));
    };
    let mut ballast = Ballast::new(ctx.half())?;
    let field = sys::map(ctx.half())?;
    field.fill(1);
    for (index, page) in field.pieces(PAGE).enumerate() {
        // SAFETY: the page is ours; unaligned words of code.
        unsafe { page.as_ptr::<[u8; 8]>().write_unaligned(code_for(index as u16)) };
    }
    ballast.walk()?;
    for prot in [libc::PROT_READ | libc::PROT_EXEC, sys::RW | libc::PROT_EXEC] {
        sys::protect(field, prot)?;
        for (index, page) in field.pieces(PAGE).enumerate() {
            // SAFETY: the page begins with such a function.
            let function: extern "C" fn() -> u32 = unsafe { std::mem::transmute(page.start) };
            let found = function();
            ensure!(found == u32::from(index as u16), "the code of page {index} returned {found}");
            page.part(8, PAGE - 8).check(1)?;
        }
        sys::protect(field, sys::RW)?;
        ballast.walk()?;
    }
    field.pieces(PAGE).try_for_each(|page| page.part(8, PAGE - 8).check(1))
}

/// As in heaps of Lisp: all that there is can be executed.
fn executable(ctx: &Ctx) -> Outcome {
    const THREADS: usize = 2;
    let Some(code_for) = code_that_returns() else {
        return Err(Stop::Skip("this trap has no code for this kind of CPU".into()));
    };
    let rwx = sys::RW | libc::PROT_EXEC;
    let whole = sys::map_aligned(ctx.size, BLOCK)?;
    sys::protect(whole, rwx)?;
    whole.fill(1);
    // Some is moved and has its access changed now and then; the rest is for the threads.
    let (mut moves, field) = (whole.part(0, ctx.size / 16), whole.part(ctx.size / 16, ctx.size / 16 * 15));
    let write = |page: Span, number: u16| {
        // SAFETY: the page is ours; unaligned words of code.
        unsafe { page.as_ptr::<[u8; 8]>().write_unaligned(code_for(number)) };
    };
    let call = |page: Span| {
        // SAFETY: the page begins with such a function.
        let function: extern "C" fn() -> u32 = unsafe { std::mem::transmute(page.start) };
        function()
    };
    let origin = moves.start;
    (0..field.pages()).for_each(|page| write(field.page(page), page as u16));
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS)
            .map(|thread| {
                let (stop, write, call) = (&stop, &write, &call);
                scope.spawn(move || {
                    let mut dice = Dice::new(thread);
                    let mut numbers: Vec<u16> = (0..field.pages()).map(|page| page as u16).collect();
                    let mut rounds = 0;
                    while rounds < 2 * field.pages() || !stop.load(Ordering::Relaxed) {
                        rounds += 1;
                        let page = dice.roll(field.pages() / THREADS) * THREADS + thread;
                        let (at, number) = (field.page(page), &mut numbers[page]);
                        ensure!(call(at) == u32::from(*number), "page {page} returned {}", call(at));
                        at.part(8, PAGE - 8).check(1)?;
                        if dice.roll(3) == 0 {
                            *number = number.wrapping_add(1);
                            write(at, *number);
                        }
                    }
                    let mut mine = (thread..field.pages()).step_by(THREADS);
                    mine.try_for_each(|page| {
                        ensure!(call(field.page(page)) == u32::from(numbers[page]), "page {page} at the end");
                        field.page(page).part(8, PAGE - 8).check(1)
                    })
                })
            })
            .collect();
        let mut dice = Dice::new(THREADS);
        let deadline = ctx.deadline();
        let done = (|| {
            while Instant::now() < deadline {
                for access in [libc::PROT_READ | libc::PROT_EXEC, sys::RW, rwx] {
                    sys::protect(moves, access)?;
                    moves.check_as(origin, 1)?;
                }
                moves = sys::remap(moves, moves.len, libc::MREMAP_MAYMOVE | sys::FIXED, Mover::place(0))?;
                moves.check_as(origin, 1)?;
                moves = sys::remap(moves, moves.len, libc::MREMAP_MAYMOVE | sys::FIXED, origin)?;
                let some: Vec<usize> = (0..64).map(|_| dice.roll(field.pages())).collect();
                let child = sys::fork(|| {
                    moves.check_as(origin, 1)?;
                    some.iter().try_for_each(|page| {
                        let at = field.page(*page);
                        ensure!(call(at) <= u32::from(u16::MAX), "page {page} in the child");
                        at.part(8, PAGE - 8).check(1)
                    })
                })?;
                sys::wait_for(child, 0)?;
            }
            Ok(())
        })();
        stop.store(true, Ordering::Relaxed);
        threads
            .into_iter()
            .fold(done, |done, thread| done.and(thread.join().expect("the thread does not panic")))
    })
}

/// Eight bytes of code for a function that returns the number.
fn code_that_returns() -> Option<fn(u16) -> [u8; 8]> {
    if cfg!(target_arch = "x86_64") {
        // mov eax, number; ret
        return Some(|number| {
            let [low, high] = number.to_le_bytes();
            [0xb8, low, high, 0, 0, 0xc3, 0xcc, 0xcc]
        });
    }
    None
}

/// Until the process ends.
fn seal(span: Span) -> Outcome {
    const SYS_MSEAL: libc::c_long = 462;
    // SAFETY: the span is ours and stays.
    if unsafe { libc::syscall(SYS_MSEAL, span.start, span.len, 0) } != 0 {
        return Err(Stop::Skip("mseal is not there (Linux 6.10)".into()));
    }
    Ok(())
}

fn mremap_sealed(ctx: &Ctx) -> Outcome {
    const PIECE: usize = 2 << 20;
    const PIECES: usize = 4;
    let mut ballast = Ballast::new(ctx.half())?;
    // Where nobody else is given addresses.
    let mut pieced = Pieced::new(0x2c00_0000_0000, PIECE)?;
    for generation in 1..=PIECES as u16 {
        let known = pieced.span.pages() - PIECE / PAGE;
        pieced.fill(known, generation);
        ballast.walk()?;
        ensure!(generation == PIECES as u16 || pieced.extend(PIECE), "there was no room");
    }
    let len = pieced.span.len;
    // A hole, what is there, a hole.
    let place = Span::new(0x2d00_0000_0000, 2 * len);
    let there = sys::map_at(place.start + PIECE, len, sys::RW, sys::ANON | libc::MAP_FIXED_NOREPLACE)?;
    there.fill(9);
    seal(there.page(there.pages() / 2))?;
    for new_len in [len, len + PIECE] {
        ballast.walk()?;
        let refused = sys::remap(pieced.span, new_len, sys::FIXED, place.start);
        ensure!(refused.is_err() && sys::errno() == libc::EPERM, "moved over what is sealed: {refused:?}");
        there.check(9)?;
        pieced.check()?;
        ensure!(!sys::is_mapped(place.page(0)), "there is something where nothing was");
    }
    Ok(())
}

fn unmap_refused(ctx: &Ctx) -> Outcome {
    let field = sys::map_at(0x2e00_0000_0000, ctx.half(), sys::RW, sys::ANON | libc::MAP_FIXED_NOREPLACE)?;
    seal(field.page(field.pages() - 1))?;
    let rest = field.part(0, field.len - PAGE);
    let mut ballast = Ballast::new(ctx.half())?;
    let limit = sys::limit(libc::RLIMIT_AS)?;
    let beyond_limit = || {
        let none = libc::rlimit { rlim_cur: 1, ..limit };
        // SAFETY: limits of this process; nothing else is mapped meanwhile that has to be.
        unsafe {
            libc::setrlimit(libc::RLIMIT_AS, &none);
            let refused = sys::map_over(rest, sys::RW, 0).is_err();
            libc::setrlimit(libc::RLIMIT_AS, &limit);
            refused
        }
    };
    let is_refused = |way: usize| match way {
        0 => sys::unmap(field).is_err(),
        1 => sys::map_over(field, sys::RW, 0).is_err(),
        2 => sys::remap(field, PAGE, 0, 0).is_err(),
        _ => beyond_limit(),
    };
    let (deadline, ends) = (ctx.deadline(), AtomicBool::new(false));
    std::thread::scope(|scope| {
        // Mappings of another thread come and go in the meantime.
        let other = scope.spawn(|| -> Outcome {
            while !ends.load(Ordering::Relaxed) {
                // The limit is there for it, too.
                let Ok(piece) = sys::map(1 << 20) else { continue };
                piece.fill(2);
                piece.check(2)?;
                sys::unmap(piece)?;
            }
            Ok(())
        });
        let mut refuse = || -> Outcome {
            let is_right = || -> Outcome {
                for page in rest.pieces(PAGE) {
                    if sys::is_readable(page.start)? {
                        page.check(1)?;
                    }
                }
                Ok(())
            };
            for way in (0..4).cycle().take_while(|_| Instant::now() < deadline) {
                rest.fill(1);
                ballast.walk()?;
                // Twice: of what is lost already that is told again.
                ensure!(is_refused(way) && is_refused(way), "way {way} to unmap was not refused");
                // What nobody has touched since, nor taken up again.
                sys::wait_for(sys::fork(is_right)?, 0)?;
                is_right()?;
                sys::unmap(rest)?;
                sys::map_at(rest.start, rest.len, sys::RW, sys::ANON | libc::MAP_FIXED_NOREPLACE)?;
                rest.check_zero()?;
            }
            Ok(())
        };
        let done = refuse();
        ends.store(true, Ordering::Relaxed);
        done.and(other.join().expect("the other thread"))
    })
}

fn mseal(ctx: &Ctx) -> Outcome {
    let (field, mut ballast) = ctx.evicted()?;
    let (sealed, rest) = field.halves();
    seal(sealed)?;
    ballast.walk()?;
    field.check(1)?;
    ensure!(sys::unmap(sealed.page(0)).is_err(), "a sealed page was unmapped");
    ensure!(sys::protect(sealed.page(1), libc::PROT_READ).is_err(), "a sealed page was protected");
    field.fill(2);
    ballast.walk()?;
    ensure!(load(rest.start) == pattern(rest.start, 2), "the rest changed");
    field.check(2)
}
