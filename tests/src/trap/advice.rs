//! What programs tell the kernel about memory: not needed, free, locked, guarded, cold.

use super::load::{together, Churn, Dice};
use super::span::{load, pattern, store, Span, BLOCK, PAGE};
use super::{ensure, sys, Ctx, Outcome, Stop, Trap};
use libc::c_int;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

pub const TRAPS: &[Trap] = &[
    Trap::new("dontneed", "drops parts of evicted memory; the others stay", |c| dontneed(c, sys::advise)),
    Trap::new("dontneed-raw", "the same by the bare system call", |c| dontneed(c, sys::advise_raw)),
    Trap::new("free", "frees parts lazily, then writes to them", |c| free(c, sys::advise)),
    Trap::new("free-raw", "the same by the bare system call", |c| free(c, sys::advise_raw)),
    Trap::new("free-file", "frees private memory of a file lazily, which the kernel refuses", free_file),
    Trap::new("dontneed-race", "drops while others evict", dontneed_race),
    Trap::new("free-race", "frees lazily while others evict", |c| free_race(c, sys::advise)),
    Trap::new("free-race-raw", "the same by the bare system call", |c| free_race(c, sys::advise_raw)),
    Trap::new("dontneed-readers", "drops what other threads are reading", dontneed_readers),
    Trap::new("event-storm", "faults are served while others drop and unmap without a pause", event_storm),
    Trap::new("discard-storm", "faults are served while others discard without a pause", discard_storm),
    Trap::new(
        "event-crowd",
        "hundreds of threads fault at once while one discards now and then",
        event_crowd,
    ),
    Trap::new("advice-storm", "WILLNEED, COLD, PAGEOUT, POPULATE, COLLAPSE and others at random", storm),
    Trap::new(
        "advice-everywhere",
        "gives advice for parts of all memory that is there, libraries' too",
        everywhere,
    ),
    Trap::new("guard", "guard pages over evicted memory, put up and taken down", guard),
    Trap::new(
        "guard-filled",
        "guard pages amid what is filled in order, in a fork's child too",
        guard_filled,
    ),
    Trap::new("mlock", "locks a part of evicted memory and unlocks it", mlock),
    Trap::new("mlock-grows", "locked memory grows by moves while other threads fault", mlock_grows),
    Trap::new("mlock-grows-over", "locked memory grows by a move over memory that is out", mlock_grows_over),
    Trap::new("mlock-grew", "what is out moves to where locked memory has grown and gone", mlock_grew),
    Trap::new("mlockall-current", "locks all that there is while it is out", mlockall_current).may_log(),
    Trap::new("mlockall-past", "locks all that there is past libc, while it is out", mlockall_past)
        .may_log()
        .may_skip(),
    Trap::new("mlockall-past-early", "the same before anything left", mlockall_past_early)
        .may_log()
        .may_skip(),
    Trap::new("mlockall-future", "locks all that will be mapped", mlockall_future),
    Trap::new("mlockall-refused", "locks all that there is, which is more than it may", mlockall_refused),
    Trap::new("mlockall-onfault", "locks all that will be touched", mlockall_onfault),
];

type Advise = fn(Span, c_int) -> Outcome;

fn dontneed(ctx: &Ctx, advise: Advise) -> Outcome {
    let (field, mut ballast) = ctx.evicted()?;
    for part in [7 * PAGE, 300 << 10] {
        let odd = || field.pieces(part).skip(1).step_by(2);
        field.fill(1);
        ballast.walk()?;
        odd().try_for_each(|piece| advise(piece, libc::MADV_DONTNEED))?;
        odd().try_for_each(Span::check_zero)?;
        field.pieces(part).step_by(2).try_for_each(|piece| piece.check(1))?;
        odd().for_each(|piece| piece.fill(2));
        ballast.walk()?;
        odd().try_for_each(|piece| piece.check(2))?;
    }
    // And all of it at once.
    advise(field, libc::MADV_DONTNEED)?;
    field.check_zero()
}

fn free(ctx: &Ctx, advise: Advise) -> Outcome {
    let (field, mut ballast) = ctx.evicted()?;
    let part = 96 << 10;
    let odd = || field.pieces(part).skip(1).step_by(2);
    odd().try_for_each(|piece| advise(piece, libc::MADV_FREE))?;
    odd().try_for_each(|piece| piece.check_zero_or(1))?;
    // One word of each freed page: it stays, and the page has no word of others.
    for page in odd().flat_map(|piece| piece.pieces(PAGE)) {
        store(page.start, pattern(page.start, 2));
    }
    ballast.walk()?;
    for page in odd().flat_map(|piece| piece.pieces(PAGE)) {
        ensure!(load(page.start) == pattern(page.start, 2), "a write after MADV_FREE is lost");
        page.part(8, PAGE - 8).check_zero_or(1)?;
    }
    field.pieces(part).step_by(2).try_for_each(|piece| piece.check(1))?;
    odd().for_each(|piece| piece.fill(3));
    ballast.walk()?;
    odd().try_for_each(|piece| piece.check(3))
}

fn free_file(ctx: &Ctx) -> Outcome {
    let (field, _) = ctx.evicted()?;
    let file = sys::scratch_file(0)?;
    // SAFETY: grows our own file.
    sys::ret("ftruncate", unsafe { libc::ftruncate(file.as_raw_fd(), 64 * PAGE as i64) })?;
    let part = sys::map_file(0, 64 * PAGE, sys::RW, libc::MAP_PRIVATE, file.as_raw_fd())?;
    part.fill(1);
    ensure!(sys::advise(part, libc::MADV_FREE).is_err(), "MADV_FREE of a file's memory went well");
    ensure!(sys::advise_raw(part, libc::MADV_FREE).is_err(), "MADV_FREE of a file's memory went well");
    part.check(1)?;
    field.check(1)
}

/// Runs `turn(piece, generation, dice)` on pieces that two threads own, while others evict.
fn race(ctx: &Ctx, turn: impl Fn(Span, u16, &mut Dice) -> Outcome + Sync) -> Outcome {
    let churn = Churn::start(ctx.half())?;
    let field = sys::map_aligned(ctx.half(), BLOCK)?;
    let deadline = ctx.deadline();
    together(2, |index| {
        let mine = if index == 0 { field.halves().0 } else { field.halves().1 };
        let pieces: Vec<_> = mine.pieces((192 << 10) + PAGE).collect();
        let mut generations = vec![1u16; pieces.len()];
        let mut dice = Dice::new(index);
        pieces.iter().for_each(|piece| piece.fill(1));
        while Instant::now() < deadline {
            let which = dice.roll(pieces.len());
            pieces[which].check(generations[which])?;
            generations[which] += 1;
            turn(pieces[which], generations[which], &mut dice)?;
            pieces[which].check(generations[which])?;
        }
        pieces.iter().zip(generations).try_for_each(|(piece, generation)| piece.check(generation))
    })?;
    churn.end()
}

fn dontneed_race(ctx: &Ctx) -> Outcome {
    race(ctx, |piece, generation, _| {
        sys::advise(piece, libc::MADV_DONTNEED)?;
        piece.check_zero()?;
        piece.fill(generation);
        Ok(())
    })
}

fn free_race(ctx: &Ctx, advise: Advise) -> Outcome {
    race(ctx, |piece, generation, dice| {
        advise(piece, libc::MADV_FREE)?;
        if dice.roll(2) == 0 {
            piece.check_zero_or(generation - 1)?;
        }
        piece.fill(generation);
        Ok(())
    })
}

fn dontneed_readers(ctx: &Ctx) -> Outcome {
    let churn = Churn::start(ctx.half())?;
    let field = sys::map_aligned((ctx.half() / 8).next_multiple_of(BLOCK), BLOCK)?;
    let deadline = ctx.deadline();
    together(3, |index| {
        let mut dice = Dice::new(index);
        while Instant::now() < deadline {
            let page = field.page(dice.roll(field.pages()));
            if index == 0 {
                page.fill(1);
                sys::advise(page, libc::MADV_DONTNEED)?;
                page.check_zero()?;
            } else {
                page.check_zero_or(1)?;
            }
        }
        Ok(())
    })?;
    churn.end()
}

/// A page that comes does so within this time; one that never does waits until all is over, which is later.
const PATIENCE: Duration = Duration::from_secs(4);
const LASTS: Duration = Duration::from_secs(5);

/// Each page of the field that is looked at, at random until then, is there before long. Where events starved faults it was looked
/// at 300.
fn comes_in_time(field: Span, deadline: Instant) -> Outcome {
    const FEWEST: usize = 2000;
    let mut dice = Dice::new(1);
    let mut longest = Duration::ZERO;
    let mut looks = 0;
    while Instant::now() < deadline {
        let begin = Instant::now();
        field.page(dice.roll(field.pages())).check(1)?;
        longest = longest.max(begin.elapsed());
        looks += 1;
    }
    println!("met: {looks} looks");
    ensure!(longest < PATIENCE, "a page came only after {longest:.1?}");
    ensure!(looks >= FEWEST, "{looks} looks in all that time");
    Ok(())
}

/// Two threads raise events in a tight loop; the third must get its pages all the same.
fn event_storm(ctx: &Ctx) -> Outcome {
    let (field, _) = ctx.evicted()?;
    let deadline = ctx.deadline().max(Instant::now() + LASTS);
    together(3, |index| {
        if index > 0 {
            while Instant::now() < deadline {
                let fresh = sys::map(16 * PAGE)?;
                fresh.page(0).fill(1);
                sys::advise(fresh, libc::MADV_DONTNEED)?;
                fresh.page(0).check_zero()?;
                sys::unmap(fresh)?;
            }
            return Ok(());
        }
        comes_in_time(field, deadline)
    })?;
    field.check(1)
}

/// Three threads discard what is managed in a tight loop, and touch none of it; the fourth must get its pages all the same.
fn discard_storm(ctx: &Ctx) -> Outcome {
    let idle = sys::map(3 << 20)?;
    idle.fill(7);
    let (field, _) = ctx.evicted()?;
    let deadline = ctx.deadline().max(Instant::now() + LASTS);
    together(4, |index| {
        if index > 0 {
            let own = idle.part((index - 1) << 20, 64 << 10);
            while Instant::now() < deadline {
                sys::advise(own, libc::MADV_DONTNEED)?;
            }
            return own.check_zero();
        }
        comes_in_time(field, deadline)
    })?;
    field.check(1)
}

/// The kernel gives out faults before events: those of a crowd must not keep an event from being read.
fn event_crowd(ctx: &Ctx) -> Outcome {
    let (field, _) = ctx.evicted()?;
    let fresh = sys::map(16 * PAGE)?;
    let deadline = ctx.deadline().max(Instant::now() + LASTS);
    together(400, |index| {
        if index > 0 {
            let mut dice = Dice::new(index);
            while Instant::now() < deadline {
                field.page(dice.roll(field.pages())).check(1)?;
            }
            return Ok(());
        }
        let mut longest = Duration::ZERO;
        let mut rounds = 0;
        while Instant::now() < deadline {
            let begin = Instant::now();
            fresh.fill(1);
            sys::advise(fresh, libc::MADV_DONTNEED)?;
            fresh.check_zero()?;
            longest = longest.max(begin.elapsed());
            rounds += 1;
            std::thread::sleep(Duration::from_millis(10));
        }
        println!("met: {rounds} rounds");
        // Without it there are so many threads that can run.
        ensure!(rounds > 10 || !sys::under_pageout(), "{rounds} rounds in all that time");
        ensure!(longest < PATIENCE, "what was discarded was written to only after {longest:.1?}");
        Ok(())
    })?;
    field.check(1)
}

fn storm(ctx: &Ctx) -> Outcome {
    let advices = [
        libc::MADV_NORMAL,
        libc::MADV_RANDOM,
        libc::MADV_SEQUENTIAL,
        libc::MADV_WILLNEED,
        libc::MADV_COLD,
        libc::MADV_PAGEOUT,
        libc::MADV_POPULATE_READ,
        libc::MADV_POPULATE_WRITE,
        libc::MADV_HUGEPAGE,
        libc::MADV_COLLAPSE,
        libc::MADV_NOHUGEPAGE,
        libc::MADV_DONTDUMP,
        libc::MADV_DODUMP,
        libc::MADV_MERGEABLE,
        libc::MADV_UNMERGEABLE,
    ];
    race(ctx, |piece, generation, dice| {
        for _ in 0..4 {
            // COLLAPSE may fail, and a kernel may lack one; what counts is that the content stays.
            let _ = sys::advise(piece, advices[dice.roll(advices.len())]);
        }
        piece.check(generation - 1)?;
        piece.fill(generation);
        let _ = sys::advise(piece, advices[dice.roll(advices.len())]);
        Ok(())
    })
}

/// Splits the zero-initialised data of libraries, among which is pageout's own, before anything is managed.
fn everywhere(ctx: &Ctx) -> Outcome {
    for mapping in sys::mappings(|line| line.contains(" rw-p ") && !line.contains(['/', '[']))? {
        for piece in mapping.pieces(16 << 10).step_by(2).take(2000) {
            // What has been unmapped since is not our affair.
            let _ = sys::advise(piece, libc::MADV_NOHUGEPAGE);
        }
    }
    let (field, mut ballast) = ctx.evicted()?;
    field.check(1)?;
    ballast.walk()
}

/// What comes ahead of a fault did not stop at them: COPY goes over guard pages.
fn guard_filled(ctx: &Ctx) -> Outcome {
    let (field, mut ballast) = ctx.evicted()?;
    if sys::advise(field.page(1), sys::GUARD_INSTALL).is_err() {
        return Err(Stop::Skip("the kernel has no guard pages (Linux 6.13)".into()));
    }
    sys::advise(field.page(1), sys::GUARD_REMOVE)?;
    field.page(1).fill(1);
    // From 100 of 200 pages on, four, as an allocator has them around what it gives out.
    let guards = |run: Span| (100..run.pages() - 4).step_by(200).map(move |at| run.part(at * PAGE, 4 * PAGE));
    let fill = |run: Span| {
        let between = (0..run.pages()).filter(|at| at % 200 / 4 != 25);
        between.for_each(|at| run.page(at).fill(1));
    };
    let check = |run: Span| -> Outcome {
        for page in guards(run).flat_map(|guard| (0..4).map(move |at| guard.page(at))) {
            ensure!(!sys::is_writable(page.start)?, "a guard page at {:#x} can be written", page.start);
        }
        Ok(())
    };
    for round in 0..8 {
        let run = sys::map(2 * BLOCK)?;
        run.page(0).fill(1);
        ballast.walk()?;
        guards(run).try_for_each(|guard| sys::advise(guard, sys::GUARD_INSTALL))?;
        fill(run);
        check(run)?;
        let child = sys::fork(|| {
            // Given back and used again; what is between the guards is discarded, they stay.
            sys::advise(run, libc::MADV_DONTNEED)?;
            fill(run);
            check(run)?;
            field.page(round).check(1)
        })?;
        sys::wait_for(child, 0)?;
        check(run)?;
        sys::unmap(run)?;
    }
    field.check(1)
}

fn guard(ctx: &Ctx) -> Outcome {
    let (field, mut ballast) = ctx.evicted()?;
    if sys::advise(field.page(1), sys::GUARD_INSTALL).is_err() {
        return Err(Stop::Skip("the kernel has no guard pages (Linux 6.13)".into()));
    }
    let part = 40 << 10;
    let odd = || field.pieces(part).skip(1).step_by(2);
    odd().try_for_each(|piece| sys::advise(piece, sys::GUARD_INSTALL))?;
    ballast.walk()?;
    for piece in odd().step_by(16) {
        ensure!(!sys::is_readable(piece.start)?, "a guard page at {:#x} can be read", piece.start);
        ensure!(!sys::is_writable(piece.end() - 8)?, "a guard page at {:#x} can be written", piece.end() - 8);
    }
    sys::advise(field.page(1), sys::GUARD_REMOVE)?;
    field.page(1).check_zero()?;
    field.page(1).fill(1);
    field.pieces(part).step_by(2).try_for_each(|piece| piece.check(1))?;
    odd().try_for_each(|piece| sys::advise(piece, sys::GUARD_REMOVE))?;
    odd().try_for_each(Span::check_zero)?;
    odd().for_each(|piece| piece.fill(2));
    ballast.walk()?;
    field.pieces(part).step_by(2).try_for_each(|piece| piece.check(1))?;
    odd().try_for_each(|piece| piece.check(2))
}

fn mlock(ctx: &Ctx) -> Outcome {
    let (field, mut ballast) = ctx.evicted()?;
    // An eighth of the limit, and what an ordinary user may lock.
    let part = field.part(3 * PAGE, (ctx.size / 32).clamp(PAGE, 4 << 20));
    sys::lock(part)?;
    let all_there = || {
        let there = sys::resident(part)?;
        ensure!(there == part.pages(), "{there} of {} locked pages are in memory", part.pages());
        Ok::<(), Stop>(())
    };
    all_there()?;
    for generation in 2..4 {
        field.fill(generation);
        ballast.walk()?;
        all_there()?;
        field.check(generation)?;
    }
    sys::unlock(part)?;
    ballast.walk()?;
    field.check(3)?;
    field.fill(4);
    ballast.walk()?;
    field.check(4)
}

/// The kernel fills what is new before it tells of the move: nobody got a page any more.
fn mlock_grows(ctx: &Ctx) -> Outcome {
    let (field, _) = ctx.evicted()?;
    let churn = Churn::start(ctx.half())?;
    let most = (ctx.size / 32).clamp(2 * PAGE, 4 << 20);
    let deadline = ctx.deadline();
    let mut moved = 0;
    while moved < 4 || Instant::now() < deadline {
        let room = sys::map(2 * PAGE)?;
        // Nothing can grow where it is.
        sys::protect(room.page(1), libc::PROT_NONE)?;
        let mut locked = room.page(0);
        locked.fill(1);
        sys::lock(locked)?;
        let beside = sys::map(PAGE)?;
        while 2 * locked.len <= most {
            let (before, was) = (locked.len, locked.start);
            locked = sys::remap(locked, 2 * locked.len, libc::MREMAP_MAYMOVE, 0)?;
            moved += usize::from(locked.start != was);
            locked.part(before, before).check_zero()?;
            locked.part(0, before).check_as(was, 1)?;
            locked.fill(1);
        }
        sys::unmap(locked)?;
        sys::unmap(beside)?;
        sys::unmap(room.page(1))?;
    }
    churn.end()?;
    field.check(1)
}

/// What was there is told to be gone only after the move, too.
fn mlock_grows_over(ctx: &Ctx) -> Outcome {
    let (field, mut ballast) = ctx.evicted()?;
    let len = ctx.size / 64;
    for (round, place) in field.pieces(4 * len).take(8).enumerate() {
        let locked = sys::map(len)?;
        sys::lock(locked)?;
        locked.fill(2);
        ballast.walk()?;
        let to = place.start + round * PAGE;
        let moved = sys::remap(locked, len + 16 * PAGE, sys::FIXED, to)?;
        moved.part(0, len).check_as(locked.start, 2)?;
        moved.part(len, 16 * PAGE).check_zero()?;
        let behind = round * PAGE + moved.len;
        place.part(behind, place.len - behind).check(1)?;
        place.part(0, round * PAGE).check(1)?;
    }
    Ok(())
}

/// Where it grew was remembered for too long: what was moved there lost its registration, and what was out of it.
fn mlock_grew(ctx: &Ctx) -> Outcome {
    let churn = Churn::start(ctx.half())?;
    let mut field = sys::map(ctx.half())?;
    field.fill(1);
    let was = field.start;
    let room = sys::map(4 * field.len)?;
    sys::unmap(room)?;
    let len = ctx.size / 128;
    let deadline = ctx.deadline();
    let mut rounds = 0;
    while rounds < 16 || Instant::now() < deadline {
        let there = room.start + field.len / 2;
        let locked = sys::map_at(there, len, sys::RW, sys::ANON | libc::MAP_FIXED_NOREPLACE)?;
        sys::lock(locked)?;
        locked.fill(2);
        std::thread::sleep(Duration::from_millis(30));
        let grown = sys::remap(locked, len + 16 * PAGE, 0, 0)?;
        sys::unmap(grown)?;
        for to in [room.start + PAGE, room.start + 2 * field.len] {
            field = sys::remap(field, field.len, sys::FIXED, to)?;
            field.check_as(was, 1)?;
        }
        rounds += 1;
    }
    churn.end()
}

/// All comes in and stays, and what was locked before never leaves; the engine's own memory is neither locked nor filled.
fn mlockall_current(ctx: &Ctx) -> Outcome {
    let (field, mut ballast) = ctx.evicted()?;
    // What is to come is locked for a moment: what is there is not to be unlocked for that later.
    // SAFETY: has no conditions.
    if unsafe { libc::mlockall(libc::MCL_FUTURE) } != 0 {
        return Err(Stop::Skip(format!("mlockall: {}", std::io::Error::last_os_error())));
    }
    // SAFETY: has no conditions.
    sys::ret("munlockall", unsafe { libc::munlockall() })?;
    let secret = field.part(0, 256 * PAGE);
    secret.fill(1);
    // SAFETY: a part of the field.
    sys::ret("mlock", unsafe { libc::mlock(secret.as_ptr(), secret.len) })?;
    let is_done = AtomicBool::new(false);
    let locked = std::thread::scope(|scope| {
        let looks = scope.spawn(|| -> Result<usize, Stop> {
            let mut least = secret.pages();
            while !is_done.load(Ordering::Relaxed) {
                least = least.min(sys::resident(secret)?);
            }
            Ok(least)
        });
        for _ in 0..4 {
            // SAFETY: has no conditions.
            if unsafe { libc::mlockall(libc::MCL_CURRENT) } != 0 {
                is_done.store(true, Ordering::Relaxed);
                return Err(Stop::Skip(format!("mlockall: {}", std::io::Error::last_os_error())));
            }
        }
        is_done.store(true, Ordering::Relaxed);
        looks.join().expect("it does not panic")
    })?;
    ensure!(locked == secret.pages(), "{locked} of {} pages that were locked stayed", secret.pages());
    let locked = locked_bytes()?;
    let all = 2 * ctx.half()..=2 * ctx.half() + (128 << 20);
    ensure!(all.contains(&locked), "{} MiB are locked", locked >> 20);
    for generation in 2..4 {
        field.check(generation - 1)?;
        field.fill(generation);
        ballast.walk()?;
        let there = sys::resident(field)?;
        ensure!(there == field.pages(), "{there} of {} locked pages are in memory", field.pages());
    }
    // SAFETY: has no conditions.
    sys::ret("munlockall", unsafe { libc::munlockall() })?;
    ballast.walk()?;
    field.check(3)
}

/// As what looks libc's up by itself does (JNA).
fn mlockall_past_libc(flags: c_int) -> Result<(), Stop> {
    let result: isize;
    // SAFETY: takes a number.
    unsafe {
        std::arch::asm!(
            "syscall",
            inlateout("rax") libc::SYS_mlockall as isize => result,
            in("rdi") flags,
            out("rcx") _,
            out("r11") _,
        );
    }
    match result {
        0 => Ok(()),
        errno => Err(Stop::Skip(format!("mlockall: {}", std::io::Error::from_raw_os_error(-errno as i32)))),
    }
}

/// What is mapped afterwards can leave, and once it is unlocked everything.
fn mlockall_past(ctx: &Ctx) -> Outcome {
    let (field, mut ballast) = ctx.evicted()?;
    for flags in [libc::MCL_CURRENT, libc::MCL_CURRENT | libc::MCL_ONFAULT] {
        mlockall_past_libc(flags)?;
        field.check(1)?;
        let fresh = sys::map(field.len)?;
        for generation in 2..4 {
            fresh.fill(generation);
            field.check(1)?;
            ballast.walk()?;
            fresh.check(generation)?;
        }
        // SAFETY: has no conditions.
        sys::ret("munlockall", unsafe { libc::munlockall() })?;
        sys::unmap(fresh)?;
        // What could not leave is tried again now and then.
        let since = Instant::now();
        while sys::under_pageout() && sys::resident(field)? > field.pages() / 2 {
            ensure!(since.elapsed() < Duration::from_secs(30), "what was locked stays");
            ballast.walk()?;
        }
    }
    field.check(1)
}

fn mlockall_past_early(ctx: &Ctx) -> Outcome {
    mlockall_past_libc(libc::MCL_CURRENT)?;
    let (field, mut ballast) = ctx.evicted()?;
    field.check(1)?;
    ballast.walk()?;
    field.check(1)
}

fn locked_bytes() -> Result<usize, Stop> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let locked = status.lines().find_map(|line| line.strip_prefix("VmLck:")?.split_whitespace().next());
    Ok(locked.and_then(|kilobytes| kilobytes.parse().ok()).unwrap_or(0) << 10)
}

/// What was locked stays so, and what is to come is locked if it was to be.
fn mlockall_refused(ctx: &Ctx) -> Outcome {
    const LOCKED: usize = 64 * PAGE;
    const IPC_LOCK: u32 = 14;
    let (field, mut ballast) = ctx.evicted()?;
    sys::lock(field.part(0, LOCKED))?;
    // SAFETY: has no conditions.
    if unsafe { libc::mlockall(libc::MCL_FUTURE) } != 0 {
        return Err(Stop::Skip(format!("mlockall: {}", std::io::Error::last_os_error())));
    }
    sys::set_limit(libc::RLIMIT_MEMLOCK, 4 << 20)?;
    sys::give_up_right(IPC_LOCK)?;
    let before = locked_bytes()?;
    ensure!(before >= LOCKED, "{before} bytes are locked");
    // SAFETY: has no conditions.
    let all = unsafe { libc::mlockall(libc::MCL_CURRENT | libc::MCL_FUTURE) };
    ensure!(all == -1 && sys::errno() == libc::ENOMEM, "mlockall: {all}, {}", sys::errno());
    let after = locked_bytes()?;
    ensure!(after == before, "{after} bytes are locked, {before} were before");
    let fresh = sys::map(LOCKED)?;
    let after = locked_bytes()?;
    ensure!(after == before + LOCKED, "{after} bytes are locked, {before} were before, and {LOCKED} came");
    fresh.fill(2);
    ballast.walk()?;
    fresh.check(2)?;
    field.check(1)
}

fn mlockall_future(ctx: &Ctx) -> Outcome {
    mlockall(ctx, libc::MCL_FUTURE)
}

fn mlockall_onfault(ctx: &Ctx) -> Outcome {
    mlockall(ctx, libc::MCL_FUTURE | libc::MCL_ONFAULT)
}

/// The lock covers what is mapped later, the engine's own memory included, but not what is there.
fn mlockall(ctx: &Ctx, flags: c_int) -> Outcome {
    let (field, mut ballast) = ctx.evicted()?;
    // SAFETY: has no conditions.
    if unsafe { libc::mlockall(flags) } != 0 {
        return Err(Stop::Skip(format!("mlockall: {}", std::io::Error::last_os_error())));
    }
    let locked = sys::map((ctx.size / 64).clamp(PAGE, 2 << 20))?;
    locked.fill(9);
    for generation in 2..4 {
        field.check(generation - 1)?;
        field.fill(generation);
        ballast.walk()?;
        locked.check(9)?;
        let there = sys::resident(locked)?;
        ensure!(there == locked.pages(), "{there} of {} locked pages are in memory", locked.pages());
    }
    // SAFETY: has no conditions.
    sys::ret("munlockall", unsafe { libc::munlockall() })?;
    ballast.walk()?;
    field.check(3)?;
    locked.check(9)
}
