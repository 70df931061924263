//! Memory that is written, leaves, comes back and must be the same: by who made it and who touches it.

use super::load::{together, Ballast, Churn, Dice};
use super::span::{bytes_of, load, pattern, store, Span, BLOCK, PAGE};
use super::{ensure, sys, Ctx, Outcome, Stop, Trap};
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, Ordering};

pub const TRAPS: &[Trap] = &[
    Trap::new("fill", "fills memory in order and reads it back, three times", fill),
    Trap::new("fill-threads", "the same by four threads", fill_threads),
    Trap::new("random", "reads and writes pages in random order", random),
    Trap::new("zero-pages", "pages that are zero stay zero, and can be written after", zero_pages),
    Trap::new(
        "read-then-write",
        "pages that came in to be read, then written, by us and the kernel",
        read_then_write,
    ),
    Trap::new("heap", "small objects of malloc, by four threads, with malloc_trim", heap),
    Trap::new("brk", "grows and shrinks the program break", brk),
    Trap::new("grows-down", "a MAP_GROWSDOWN mapping grows", grows_down),
    Trap::new("deep-stack", "6 MiB of the main thread's stack", deep_stack),
    Trap::new("sparse", "1 TiB without reserve, touched here and there", sparse).may_log(),
    Trap::new("mappings", "5,000 mappings with gaps", mappings),
    Trap::new(
        "mappings-all",
        "two threads fault while there are as many mappings as there may be",
        mappings_all,
    ),
    Trap::new("kernel-touched", "memory that only the kernel has touched", kernel_touched),
    Trap::new("huge", "huge pages, three times", huge),
    Trap::new("huge-unasked", "the same where nobody asked for them", huge_unasked),
    Trap::new("huge-forbidden", "the same where they are forbidden", huge_forbidden),
    Trap::new("huge-parts", "huge pages of which parts are unmapped, protected, dropped", huge_parts),
    Trap::new("let-go", "says when its memory is written and when it is unmapped, then rests", let_go)
        .helper(),
    Trap::new("not-anonymous", "shared and file mappings beside evicted memory", not_anonymous),
];

fn fill(ctx: &Ctx) -> Outcome {
    let field = sys::map(ctx.size)?;
    for generation in 1..=3 {
        field.fill(generation);
        field.check(generation)?;
    }
    Ok(())
}

fn let_go(ctx: &Ctx) -> Outcome {
    let field = sys::map(ctx.size)?;
    field.fill(1);
    field.check(1)?;
    println!("filled");
    std::thread::sleep(ctx.time);
    sys::unmap(field)?;
    println!("gone");
    std::thread::sleep(10 * ctx.time);
    Ok(())
}

fn fill_threads(ctx: &Ctx) -> Outcome {
    let field = sys::map(ctx.size)?;
    let piece = field.len / 4 / PAGE * PAGE;
    together(4, |index| {
        let mine = field.part(index * piece, piece);
        for generation in 1..=2 {
            mine.fill(generation);
            mine.check(generation)?;
        }
        Ok(())
    })
}

fn random(ctx: &Ctx) -> Outcome {
    let field = sys::map(ctx.size)?;
    field.fill(1);
    let mut generations = vec![1u16; field.pages()];
    let mut dice = Dice::new(1);
    let deadline = ctx.deadline();
    while std::time::Instant::now() < deadline {
        for _ in 0..64 {
            let index = dice.roll(field.pages());
            let page = field.page(index);
            page.check(generations[index])?;
            if dice.roll(2) == 0 {
                generations[index] += 1;
                page.fill(generations[index]);
            }
        }
    }
    generations.iter().enumerate().try_for_each(|(index, &g)| field.page(index).check(g))
}

fn zero_pages(ctx: &Ctx) -> Outcome {
    let field = sys::map(ctx.half())?;
    // A third never touched, a third only read, a third written with zeros.
    for index in 0..field.pages() {
        match index % 3 {
            0 => {}
            1 => drop(load(field.page(index).start)),
            _ => store(field.page(index).start, 0),
        }
    }
    let mut ballast = Ballast::new(ctx.half())?;
    field.check_zero()?;
    ballast.walk()?;
    field.fill(2);
    ballast.walk()?;
    field.check(2)
}

/// A page that is as it was on the device needs no second writing; one that was changed since does.
fn read_then_write(ctx: &Ctx) -> Outcome {
    let (field, mut ballast) = ctx.evicted()?;
    let (read_end, write_end) = sys::pipe()?;
    for generation in 2..5 {
        // Twice in and out unchanged.
        field.check(1)?;
        ballast.walk()?;
        field.check(1)?;
        // Of three pages, still here from reading or not, one is written by us and one by the kernel.
        for (index, page) in field.pieces(PAGE).enumerate() {
            let word = pattern(page.start, generation);
            match index % 3 {
                0 => store(page.start, word),
                1 => {
                    sys::write_all(write_end.as_raw_fd(), &word.to_ne_bytes())?;
                    sys::read_span(read_end.as_raw_fd(), page.part(0, 8))?;
                }
                _ => {}
            }
        }
        ballast.walk()?;
        for (index, page) in field.pieces(PAGE).enumerate() {
            let word = pattern(page.start, if index % 3 == 2 { 1 } else { generation });
            ensure!(load(page.start) == word, "a write to page {index} is lost");
            page.part(8, PAGE - 8).check(1)?;
            store(page.start, pattern(page.start, 1));
        }
    }
    field.check(1)
}

fn heap(ctx: &Ctx) -> Outcome {
    let each = ctx.size / 4 * 3 / 4;
    together(4, |index| {
        let mut dice = Dice::new(index);
        let mut objects: Vec<Vec<u64>> = Vec::new();
        let mut bytes = 0;
        let wrong = |object: &[u64]| object.iter().any(|&word| word != object.len() as u64);
        while bytes < each {
            // Mostly small, some above the size that malloc takes from mmap.
            let words = if dice.roll(1000) == 0 { 40_000 } else { 1 + dice.roll(600) };
            bytes += words * 8 + 16;
            objects.push(vec![words as u64; words]);
            if dice.roll(4) == 0 {
                let freed = objects.swap_remove(dice.roll(objects.len()));
                bytes -= freed.len() * 8 + 16;
                ensure!(!wrong(&freed), "an object of {} words changed", freed.len());
            }
        }
        let mut keep = false;
        ensure!(!objects.iter().any(|o| wrong(o)), "an object changed");
        objects.retain(|_| {
            keep = !keep;
            keep
        });
        // SAFETY: gives free memory back, by madvise and the break.
        unsafe { libc::malloc_trim(0) };
        ensure!(!objects.iter().any(|o| wrong(o)), "an object changed after malloc_trim");
        Ok(())
    })
}

/// Nothing here may allocate between the first and the last move of the break.
fn brk(ctx: &Ctx) -> Outcome {
    let mut ballast = Ballast::new(ctx.half())?;
    let move_break = |by: isize| {
        // SAFETY: the C library tolerates others who move the break up and back again.
        let old = unsafe { libc::sbrk(by) };
        if old as isize == -1 {
            return Err(Stop::Wrong("sbrk failed".into()));
        }
        Ok(old as usize)
    };
    let old = move_break(0)?;
    move_break((old.next_multiple_of(PAGE) - old + ctx.half()) as isize)?;
    let heap = Span::new(old.next_multiple_of(PAGE), ctx.half());
    let (low, high) = heap.halves();
    heap.fill(1);
    ballast.walk()?;
    move_break(-(high.len as isize))?;
    low.check(1)?;
    ensure!(!sys::is_readable(high.start)?, "memory above the break can be read");
    move_break(high.len as isize)?;
    high.check_zero()?;
    heap.fill(2);
    ballast.walk()?;
    heap.check(2)?;
    move_break(old as isize - heap.end() as isize).map(drop)
}

fn grows_down(ctx: &Ctx) -> Outcome {
    // Below the place of mappings, where nothing else comes by itself.
    let top = 0x1000_0000_0000;
    let depth = 4 << 20;
    let flags = sys::ANON | libc::MAP_GROWSDOWN | libc::MAP_FIXED_NOREPLACE;
    let first = sys::map_at(top, PAGE, sys::RW, flags)?;
    let mut ballast = Ballast::new(ctx.size)?;
    let all = Span::new(first.start - depth, depth + PAGE);
    for generation in 1..=2 {
        all.pieces(PAGE).rev().for_each(|page| page.fill(generation));
        ballast.walk()?;
        all.check(generation)?;
    }
    Ok(())
}

fn deep_stack(ctx: &Ctx) -> Outcome {
    let mut ballast = Ballast::new(ctx.size)?;
    sink(6 << 20, &mut ballast)
}

/// Puts frames of 64 KiB on the stack, then pushes everything out, then checks frames on the way up.
#[inline(never)]
fn sink(depth: usize, ballast: &mut Ballast) -> Outcome {
    let mut frame = [0u64; 8192];
    let here = frame.as_mut_ptr() as usize;
    let frame = Span::new(here, std::mem::size_of_val(&frame));
    frame.fill(1);
    if depth > frame.len {
        sink(depth - frame.len, ballast)?;
    } else {
        ballast.walk()?;
    }
    frame.check(1)
}

fn sparse(ctx: &Ctx) -> Outcome {
    let field = sys::map_at(0, 1 << 40, sys::RW, sys::ANON | libc::MAP_NORESERVE)?;
    let count = ctx.half() / PAGE;
    let pages = || {
        let mut dice = Dice::new(3);
        (0..count).map(move |_| field.page(dice.roll(field.pages())))
    };
    pages().for_each(|page| page.fill(1));
    let mut ballast = Ballast::new(ctx.half())?;
    pages().try_for_each(|page| page.check(1))?;
    // Neighbours were never written; most are zero, the few that were hit are right as well.
    for page in pages().step_by(64).filter(|page| page.start > field.start) {
        Span::new(page.start - PAGE, PAGE).check_zero_or(1)?;
    }
    pages().for_each(|page| page.fill(2));
    ballast.walk()?;
    pages().try_for_each(|page| page.check(2))?;
    sys::unmap(field)
}

fn mappings(ctx: &Ctx) -> Outcome {
    const COUNT: usize = 5000;
    let each = (ctx.half() / COUNT / PAGE * PAGE).max(PAGE);
    let flags = sys::ANON | libc::MAP_NORESERVE;
    let all = sys::map_at(0, COUNT * (each + PAGE), libc::PROT_NONE, flags)?;
    let areas = || all.pieces(each + PAGE).map(|piece| piece.part(0, each));
    areas().try_for_each(|area| sys::protect(area, sys::RW))?;
    areas().for_each(|area| area.fill(1));
    let mut ballast = Ballast::new(ctx.half())?;
    areas().try_for_each(|area| area.check(1))?;
    areas().step_by(2).try_for_each(sys::unmap)?;
    ballast.walk()?;
    areas().skip(1).step_by(2).try_for_each(|area| area.check(1))?;
    areas().step_by(2).try_for_each(|area| {
        sys::map_at(area.start, area.len, sys::RW, sys::ANON | libc::MAP_FIXED_NOREPLACE)?;
        area.check_zero()?;
        area.fill(2);
        Ok::<(), Stop>(())
    })?;
    ballast.walk()?;
    areas().step_by(2).try_for_each(|area| area.check(2))?;
    areas().skip(1).step_by(2).try_for_each(|area| area.check(1))
}

/// Makes as many mappings as there may be: in these addresses, each second page of the first so many.
pub fn use_up_mappings() -> Result<(Span, usize), Stop> {
    // More than that is a machine without a bound worth the name.
    const MOST: usize = 1 << 18;
    let bound = std::fs::read_to_string("/proc/sys/vm/max_map_count").unwrap_or_default();
    let most = bound.trim().parse().map_or(MOST, |most: usize| most.min(MOST));
    let reserve = sys::map_at(0, 2 * most * PAGE, libc::PROT_NONE, sys::ANON | libc::MAP_NORESERVE)?;
    // SAFETY: ours, and nothing is there.
    let opens = |page: &Span| unsafe { libc::mprotect(page.as_ptr(), PAGE, libc::PROT_READ) } == 0;
    let count = reserve.pieces(2 * PAGE).take_while(opens).count();
    if count == most {
        return Err(Stop::Skip("vm.max_map_count is larger than what is filled here".into()));
    }
    Ok((reserve, count))
}

fn mappings_all(ctx: &Ctx) -> Outcome {
    let (field, mut ballast) = ctx.evicted()?;
    let full = AtomicBool::new(false);
    let halves = [field.halves().0, field.halves().1];
    std::thread::scope(|scope| {
        let readers = halves.map(|half| {
            let full = &full;
            scope.spawn(move || {
                while !full.load(Ordering::Acquire) {
                    std::thread::yield_now();
                }
                let mut dice = Dice::new(half.start);
                (0..4 * half.pages())
                    .try_for_each(|_| half.part(dice.roll(half.pages()) * PAGE, PAGE).check(1))
            })
        });
        // By this thread: the stack of one that ends makes room for mappings again.
        let used_up = use_up_mappings();
        full.store(true, Ordering::Release);
        readers
            .into_iter()
            .try_for_each(|reader| reader.join().map_err(|_| Stop::Wrong("a thread panicked".into()))?)?;
        sys::unmap(used_up?.0)
    })?;
    ballast.walk()?;
    field.check(1)
}

fn kernel_touched(ctx: &Ctx) -> Outcome {
    let field = sys::map(ctx.half())?;
    let (from_file, random) = field.halves();
    let file = sys::scratch_file(0)?;
    sys::write_all(file.as_raw_fd(), &bytes_of(0x10_0000, BLOCK, 5))?;
    let mut digests = Vec::new();
    for piece in from_file.pieces(BLOCK) {
        sys::pread_span(file.as_raw_fd(), piece, 0)?;
    }
    for piece in random.pieces(BLOCK) {
        // SAFETY: the piece is ours.
        let n = unsafe { libc::getrandom(piece.as_ptr(), piece.len, 0) };
        sys::whole("getrandom", n, piece.len)?;
        digests.push(piece.digest());
    }
    let mut ballast = Ballast::new(ctx.half())?;
    ballast.walk()?;
    from_file.pieces(BLOCK).try_for_each(|piece| piece.check_as(0x10_0000, 5))?;
    for (piece, digest) in random.pieces(BLOCK).zip(digests) {
        ensure!(piece.digest() == digest, "random bytes at {:#x} changed", piece.start);
    }
    Ok(())
}

fn huge_field(ctx: &Ctx, len: usize) -> Result<Span, Stop> {
    let field = sys::map_aligned(len.min(ctx.size) / BLOCK * BLOCK, BLOCK)?;
    sys::advise(field, libc::MADV_HUGEPAGE)?;
    Ok(field)
}

fn huge(ctx: &Ctx) -> Outcome {
    thrice(huge_field(ctx, ctx.size)?)
}

fn huge_unasked(ctx: &Ctx) -> Outcome {
    // What is filled before the engine has seen to it, on a busy machine much, comes in pieces at first.
    walked(sys::map_aligned(ctx.size / BLOCK * BLOCK, BLOCK)?, 8)
}

fn huge_forbidden(ctx: &Ctx) -> Outcome {
    let field = sys::map_aligned(ctx.size / BLOCK * BLOCK, BLOCK)?;
    sys::advise(field, libc::MADV_NOHUGEPAGE)?;
    thrice(field)?;
    let maps = std::fs::read_to_string("/proc/self/smaps").unwrap_or_default();
    // From the line of the field's mapping on.
    let (_, mapping) = maps.split_once(&format!("{:x}-", field.start)).unwrap_or_default();
    let value = |name: &str| mapping.lines().find_map(|line| line.strip_prefix(name)).unwrap_or("").trim();
    let (flags, huge) = (value("VmFlags:"), value("AnonHugePages:"));
    ensure!(
        flags.contains(" nh") && !flags.contains(" hg"),
        "huge pages are not forbidden any more: {flags}"
    );
    ensure!(huge == "0 kB", "huge pages where they are forbidden: {huge}");
    Ok(())
}

fn thrice(field: Span) -> Outcome {
    walked(field, 3)
}

fn walked(field: Span, generations: u16) -> Outcome {
    for generation in 1..=generations {
        field.fill(generation);
        field.check(generation)?;
    }
    Ok(())
}

fn huge_parts(ctx: &Ctx) -> Outcome {
    let field = huge_field(ctx, ctx.half())?;
    field.fill(1);
    let mut ballast = Ballast::new(ctx.half())?;
    let part = 64 << 10;
    for block in field.pieces(BLOCK) {
        sys::unmap(block.part(part, part))?;
        sys::protect(block.part(5 * part, part), libc::PROT_READ)?;
        sys::advise(block.part(9 * part, part), libc::MADV_DONTNEED)?;
    }
    let check = || {
        field.pieces(BLOCK).try_for_each(|block| {
            for (index, piece) in block.pieces(part).enumerate() {
                match index {
                    1 => {}
                    9 => piece.check_zero()?,
                    _ => piece.check(1)?,
                }
            }
            Ok::<(), Stop>(())
        })
    };
    check()?;
    ballast.walk()?;
    check()?;
    for block in field.pieces(BLOCK) {
        ensure!(!sys::is_readable(block.start + part)?, "an unmapped part can be read");
        ensure!(!sys::is_writable(block.start + 5 * part)?, "a read-only part can be written");
        sys::protect(block.part(5 * part, part), sys::RW)?;
        block.part(5 * part, part).fill(3);
    }
    ballast.walk()?;
    field.pieces(BLOCK).try_for_each(|block| block.part(5 * part, part).check(3))
}

fn not_anonymous(ctx: &Ctx) -> Outcome {
    let len = 8 << 20;
    let file = sys::scratch_file(0)?;
    // SAFETY: the descriptor is ours.
    sys::ret("ftruncate", unsafe { libc::ftruncate(file.as_raw_fd(), len as i64) })?;
    let shared_file = sys::map_file(0, len, sys::RW, libc::MAP_SHARED, file.as_raw_fd())?;
    let private_file = sys::map_file(0, len, sys::RW, libc::MAP_PRIVATE, file.as_raw_fd())?;
    let shared = sys::map_at(0, len, sys::RW, libc::MAP_SHARED | libc::MAP_ANONYMOUS)?;
    let all = [shared_file, private_file, shared];
    shared_file.fill(4);
    private_file.check_as(shared_file.start, 4)?;
    let churn = Churn::start(ctx.half() * 3 / 2)?;
    for generation in 5..8 {
        all.iter().for_each(|span| span.fill(generation));
        std::thread::sleep(ctx.time / 6);
        all.iter().try_for_each(|span| span.check(generation))?;
    }
    churn.end()?;
    let buffer = sys::map(len)?;
    sys::pread_span(file.as_raw_fd(), buffer, 0)?;
    buffer.check_as(shared_file.start, 7)?;
    // A word of the file that the private mapping had made its own does not follow the file.
    ensure!(load(private_file.start) == pattern(private_file.start, 7), "a private page changed");
    Ok(())
}
