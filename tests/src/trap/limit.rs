//! New memory as fast as it can be had: what the limit is measured with.

use super::load::{together, Ballast, Dice};
use super::span::{load, pattern, store, Span, BLOCK, PAGE};
use super::{ensure, sys, Ctx, Outcome, Stop, Trap};
use libc::{c_int, c_void};
use std::io::Write;
use std::time::{Duration, Instant};

pub const TRAPS: &[Trap] = &[
    Trap::new("grows-slowly", "maps a little more every now and then: not a mapping each", grows_slowly),
    Trap::new(
        "protect-exchange",
        "closes a part of what it has reserved and opens another, of the same size, again and again",
        protect_exchange,
    ),
    Trap::new(
        "touch",
        "[malloc|brk|mmap|executable|mixed|small|huge|huge-pieces|one|again|populate|read]: says its pid and touches --size of new memory by --threads threads",
        touch,
    )
    .helper(),
    Trap::new(
        "mapped-thrice",
        "has half of --size of its own, and a third of it shared with itself alone, mapped three times, as collectors map heaps",
        mapped_thrice,
    )
    .helper(),
    Trap::new(
        "host",
        "says its pid and rests with a fifth of --size, while a process that shares its memory has a quarter again and again",
        host,
    )
    .helper(),
];

fn grows_slowly(ctx: &Ctx) -> Outcome {
    let mut ballast = Ballast::new(ctx.half())?;
    let mappings = || Ok::<_, Stop>(std::fs::read_to_string("/proc/self/maps")?.lines().count());
    let before = mappings()?;
    let mut parts = Vec::new();
    for _ in 0..ctx.half() / (32 << 10) {
        let part = sys::map(32 << 10)?;
        part.fill(1);
        parts.push(part);
        std::thread::sleep(Duration::from_micros(500));
    }
    let more = mappings()?.saturating_sub(before);
    ensure!(more < ctx.half() >> 17, "{more} mappings more for {} MiB", ctx.half() >> 20);
    ballast.walk()?;
    parts.iter().try_for_each(|part| part.check(1))
}

/// As pools of memory do. No size changes, and nothing is mapped: that the other is there shows in what is resident alone.
fn protect_exchange(ctx: &Ctx) -> Outcome {
    let whole = sys::map_at(0, 3 * ctx.size, libc::PROT_NONE, sys::ANON | libc::MAP_NORESERVE)?;
    let [low, high] = [0, 2 * ctx.size].map(|at| whole.part(at, ctx.size));
    sys::protect(high, sys::RW)?;
    high.fill(1);
    let mut dice = Dice::new(1);
    for (generation, from, to) in [(2, high, low), (3, low, high), (4, high, low), (5, low, high)] {
        // Areas are looked for, and what cannot go is counted, at some time before.
        sys::map(PAGE)?.fill(1);
        std::thread::sleep(Duration::from_millis(20 + dice.roll(250) as u64));
        sys::advise(from, libc::MADV_DONTNEED)?;
        std::thread::sleep(Duration::from_millis(100));
        sys::protect(from, libc::PROT_NONE)?;
        sys::protect(to, sys::RW)?;
        to.fill(generation);
        let since = Instant::now();
        while sys::under_pageout() && sys::resident(to)? > to.pages() / 4 * 3 {
            ensure!(since.elapsed() < Duration::from_secs(10), "what was opened last stays");
            std::thread::sleep(Duration::from_millis(10));
        }
        to.check(generation)?;
    }
    Ok(())
}

fn touch(ctx: &Ctx) -> Outcome {
    let new_piece: fn(usize) -> Result<Span, Stop> = match ctx.args.first().map(String::as_str) {
        None | Some("mmap") => |_| sys::map(4 << 20),
        Some("executable") => |_| {
            let piece = sys::map(4 << 20)?;
            sys::protect(piece, sys::RW | libc::PROT_EXEC)?;
            Ok(piece)
        },
        Some("mixed") => |_| in_mappings_of(32 << 10),
        // Not faster than such are found: the kernel takes 30 ms and more to list so many.
        Some("small") => |_| {
            std::thread::sleep(Duration::from_millis(30));
            in_mappings_of(8 << 10)
        },
        Some("malloc") => |_| allocate(64 << 10),
        Some("brk") => |_| grow_break(64 << 10),
        Some("huge") => |_| huge(64 << 20),
        // Each of them new, and filled faster than anything leaves.
        Some("huge-pieces") => |_| huge(4 << 20),
        Some("one") => sys::map,
        // Filled by one call: the one that maps it, then another.
        Some("populate") => |each| {
            let whole = sys::map_at(0, each, sys::RW, sys::ANON | libc::MAP_POPULATE)?;
            sys::unmap(whole)?;
            let whole = sys::map(each)?;
            sys::advise(whole, libc::MADV_POPULATE_WRITE)?;
            Ok(whole)
        },
        // Beside much that was only read, and takes none.
        Some("read") => |each| {
            let whole = sys::map(each)?;
            let table = sys::map(12 * each)?;
            sys::advise(table, libc::MADV_NOHUGEPAGE)?;
            words_of(table).for_each(|word| _ = load(word));
            Ok(whole)
        },
        Some("again") => |each| {
            let first = sys::map(each)?;
            words_of(first).for_each(|word| store(word, 1));
            sys::unmap(first)?;
            sys::map(each)
        },
        Some(other) => return Err(Stop::Wrong(format!("touch knows no {other}"))),
    };
    say_pid()?;
    let each = ctx.size / ctx.threads;
    together(ctx.threads, |_| {
        let mut pieces = Vec::new();
        let mut touched = 0;
        while touched < each {
            let piece = new_piece(each)?;
            words_of(piece).for_each(|word| store(word, pattern(word, 1)));
            touched += piece.len;
            pieces.push(piece);
        }
        if ctx.args.get(1).is_some_and(|word| word == "stay") {
            // Until nobody can say any more that it may go.
            std::io::copy(&mut std::io::stdin(), &mut std::io::sink())?;
        }
        for word in pieces.into_iter().flat_map(words_of) {
            ensure!(load(word) == pattern(word, 1), "the word at {word:#x} is {:#x}", load(word));
        }
        Ok(())
    })
}

fn mapped_thrice(ctx: &Ctx) -> Outcome {
    let (heap, own) = (ctx.size / 3 / PAGE * PAGE, ctx.half());
    // SAFETY: a string.
    let file = sys::ret("memfd_create", unsafe { libc::memfd_create(c"heap".as_ptr(), libc::MFD_CLOEXEC) })?;
    // SAFETY: our own file.
    sys::ret("ftruncate", unsafe { libc::ftruncate(file, heap as i64) })?;
    let maps: Vec<Span> =
        (0..3).map(|_| sys::map_file(0, heap, sys::RW, libc::MAP_SHARED, file)).collect::<Result<_, _>>()?;
    maps[0].fill(2);
    let field = sys::map(own)?;
    field.fill(1);
    for _ in 0..8 {
        maps.iter().try_for_each(|map| map.check_as(maps[0].start, 2))?;
        field.check(1)?;
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}

fn host(ctx: &Ctx) -> Outcome {
    extern "C" fn guest(size: *mut c_void) -> c_int {
        let turns = || {
            for turn in 1..6 {
                std::thread::sleep(Duration::from_millis(300));
                let piece = sys::map(size as usize / 4 / PAGE * PAGE)?;
                words_of(piece).for_each(|word| store(word, turn));
                for word in words_of(piece) {
                    ensure!(load(word) == turn, "the word at {word:#x} is {:#x}", load(word));
                }
                sys::unmap(piece)?;
            }
            Ok(())
        };
        sys::leave(turns())
    }
    say_pid()?;
    let field = sys::map(ctx.size / 5 / PAGE * PAGE)?;
    field.fill(1);
    std::thread::sleep(Duration::from_millis(500));
    let stack = sys::map(256 << 10)?;
    let (top, size) = (stack.end() as *mut c_void, ctx.size as *mut c_void);
    // SAFETY: the stack is the child's alone.
    let child = unsafe { libc::clone(guest, top, libc::CLONE_VM | libc::SIGCHLD, size) };
    sys::wait_for(sys::ret("clone", child)?, 0)?;
    field.check(1)
}

/// Whose memory is to be watched.
fn say_pid() -> Outcome {
    println!("pid {}", std::process::id());
    std::io::stdout().flush()?;
    Ok(())
}

/// One word in each page.
fn words_of(piece: Span) -> impl Iterator<Item = usize> {
    (piece.start..piece.end()).step_by(PAGE)
}

/// 4 MiB in mappings of so many bytes each.
fn in_mappings_of(len: usize) -> Result<Span, Stop> {
    let piece = sys::map(4 << 20)?;
    piece.pieces(len).step_by(2).try_for_each(|part| sys::advise(part, libc::MADV_DONTDUMP))?;
    Ok(piece)
}

fn allocate(len: usize) -> Result<Span, Stop> {
    // SAFETY: the object is never freed.
    let at = unsafe { libc::malloc(len) } as usize;
    ensure!(at != 0, "malloc failed");
    let start = at.next_multiple_of(8);
    Ok(Span::new(start, len - (start - at)))
}

/// By one thread: what `malloc` does in a program that has no other.
fn grow_break(len: usize) -> Result<Span, Stop> {
    // SAFETY: moves the break up only.
    let at = unsafe { libc::sbrk(len as libc::intptr_t) } as usize;
    ensure!(at != usize::MAX, "the break cannot be moved");
    let start = at.next_multiple_of(8);
    Ok(Span::new(start, len - (start - at)))
}

fn huge(len: usize) -> Result<Span, Stop> {
    let piece = sys::map_aligned(len, BLOCK)?;
    sys::advise(piece, libc::MADV_HUGEPAGE)?;
    Ok(piece)
}
