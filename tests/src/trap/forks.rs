//! Forks: the child reads and writes memory that was out when it was made.

use super::load::{together, Ballast, Churn, Dice, Tally};
use super::span::{Span, BLOCK, PAGE};
use super::{ensure, sys, Ctx, Outcome, Stop, Trap};
use libc::{c_int, c_void};
use std::io::Read;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, RwLock};
use std::time::{Duration, Instant};

pub const TRAPS: &[Trap] = &[
    Trap::new("fork", "the child reads all, the parent goes on writing", fork).may_log(),
    Trap::new("fork-exit", "ten children that exit at once", fork_exit).may_log(),
    Trap::new("fork-write", "parent and child write the same pages", fork_write).may_log(),
    Trap::new("fork-deep", "a child of a child reads what its parents wrote", fork_deep).may_log(),
    Trap::new("fork-in-handlers", "forks in handlers of fork", fork_in_handlers).may_log(),
    Trap::new(
        "fork-handlers-mask",
        "handlers of fork block signals and let them through",
        fork_handlers_mask,
    ),
    Trap::new(
        "fork-setxid",
        "handlers of fork wait for a thread that changes the group of all threads",
        fork_setxid,
    )
    .may_log(),
    Trap::new(
        "fork-begins",
        "a handler of fork waits for a new thread while memory nears the limit",
        fork_begins,
    )
    .may_log(),
    Trap::new(
        "fork-begins-later",
        "the same in a child that was made while another thread forked",
        fork_begins_later,
    )
    .may_log(),
    Trap::new("fork-threads", "forks while other threads write", fork_threads).may_log(),
    Trap::new(
        "fork-snapshot",
        "children that see the moment of the fork while the parent writes on",
        fork_snapshot,
    )
    .may_log(),
    Trap::new("fork-chain", "a child of a child of a child, whose parents end first", fork_chain).may_log(),
    Trap::new("fork-generations", "each forks the next, writes to some, and ends", fork_generations)
        .may_log(),
    Trap::new("fork-orphan", "a child that reads on when its parent was killed", fork_orphan).may_log(),
    Trap::new("fork-killed", "processes that are killed while they fork", fork_killed).may_log(),
    Trap::new("fork-stillborn", "children that are killed as soon as they are there", fork_stillborn),
    Trap::new("fork-changes", "forks while another thread discards, unmaps and moves memory", fork_changes)
        .may_log(),
    Trap::new("fork-moves", "forks while threads are inside mremap", fork_moves).may_log(),
    Trap::new("fork-advice", "forks while a thread gives advice on what is out", fork_advice).may_log(),
    Trap::new("fork-handlers", "handlers of fork that make threads and wait for them", fork_handlers)
        .may_log(),
    Trap::new("fork-held-up", "the same in a parent that is held up right after its clone", fork_held_up)
        .may_log(),
    Trap::new("fork-newcomer", "forks while a thread maps what another is unmapping", fork_newcomer)
        .may_log(),
    Trap::new(
        "fork-init",
        "a child that is the init of a PID namespace, and ends with memory out",
        fork_init,
    ),
    Trap::new("fork-guards", "forks while threads put up guard pages over what is out", fork_guards)
        .may_log(),
    Trap::new("fork-dontunmap", "forks while threads move memory by MREMAP_DONTUNMAP", fork_dontunmap)
        .may_log(),
    Trap::new(
        "fork-grown-over",
        "forks while a thread has memory grow over what another is unmapping",
        fork_grown_over,
    )
    .may_log(),
    Trap::new(
        "fork-mapped-over",
        "forks while threads map over memory of theirs that is out",
        fork_mapped_over,
    )
    .may_log(),
    Trap::new("fork-grown", "forks when what had grown in place is out", fork_grown).may_log(),
    Trap::new(
        "fork-collapsed",
        "somebody makes huge pages of a child's memory as soon as it is there",
        fork_collapsed,
    )
    .may_log(),
    Trap::new("fork-peeked", "another process reads a child's memory as soon as it is there", fork_peeked)
        .may_log(),
    Trap::new("fork-vfork", "waits for a child with memory of its own (CLONE_VFORK)", fork_vfork).may_log(),
    Trap::new("fork-stdio", "a FILE in use over a fork with all memory out", fork_stdio).may_log(),
    Trap::new("fork-holes", "maps again, at the same addresses, what it unmapped before a fork", fork_holes)
        .may_log(),
    Trap::new(
        "fork-small-stack",
        "forks by a thread, and in a signal's handler, on 16 KiB",
        fork_small_stack,
    )
    .may_log(),
    Trap::new("fork-stack-out", "forks where the stack is out below its pointer", fork_stack_out).may_log(),
    Trap::new(
        "clone-small-stack",
        "clones onto a few hundred bytes of its caller's frame, or above a guard page",
        clone_small_stack,
    )
    .may_log(),
    Trap::new("fork-names", "forks by libc's other names for fork and clone", fork_names).may_log(),
    Trap::new("dontfork", "memory that the child does not get", dontfork).may_log(),
    Trap::new("dontfork-asm", "the same, said by an instruction, past libc", dontfork_asm).may_log(),
    Trap::new("dontfork-moves", "the same while threads move it", dontfork_moves).may_log(),
    Trap::new("wipeonfork", "memory that the child gets as zeros", wipeonfork).may_log(),
    Trap::new("fork-raw", "forks by the bare system call, past all handlers", fork_raw).may_log(),
    Trap::new("fork-asm", "forks by an instruction, past libc, while memory leaves", fork_asm).may_log(),
    Trap::new("fork-asm-made", "the same by code that the program has written", fork_asm_made).may_log(),
    Trap::new("fork-asm-beside", "the same beside forks that ask", fork_asm_beside).may_log(),
    Trap::new("fork-code", "forks while code comes and goes, and data come where it was", fork_code)
        .may_log(),
    Trap::new("fork-code-made", "forks that fork, with memory that can be executed", fork_code_made)
        .may_log(),
    Trap::new("fork-code-moves", "forks while memory that is code, or was, moves and grows", fork_code_moves),
    Trap::new("fork-code-files", "code of files: written to, deleted, replaced, and forks", fork_code_files),
    Trap::new("fork-mdwe", "forks where nothing may become code that was none", fork_mdwe).may_log(),
    Trap::new("fork-asm-fits", "the same in a program that needs little memory", fork_asm_fits)
        .need_not_swap(),
];

fn fork(ctx: &Ctx) -> Outcome {
    let (field, mut ballast) = ctx.evicted()?;
    let child = sys::fork(|| field.check(1))?;
    field.fill(2);
    ballast.walk()?;
    field.check(2)?;
    sys::wait_for(child, 0)?;
    // And once more: what the first left behind is still shared, or was.
    let child = sys::fork(|| field.check(2))?;
    sys::wait_for(child, 0)?;
    field.check(2)?;
    ballast.walk()?;
    field.check(2)
}

fn fork_snapshot(ctx: &Ctx) -> Outcome {
    let (field, mut ballast) = ctx.evicted()?;
    for generation in 1..8 {
        let child = sys::fork(|| {
            field.check(generation)?;
            // What the parent has out by now, and what it will.
            field.check(generation)?;
            let (low, _) = field.halves();
            low.fill(100 + generation);
            low.check(100 + generation)
        })?;
        field.fill(generation + 1);
        ballast.walk()?;
        field.check(generation + 1)?;
        sys::wait_for(child, 0)?;
    }
    Ok(())
}

/// Whatever is mapped at the fork without the program's asking must not be where the program was and will be.
fn fork_holes(ctx: &Ctx) -> Outcome {
    let (field, mut ballast) = ctx.evicted()?;
    let hole = sys::map((ctx.size / 8).next_multiple_of(BLOCK))?;
    for generation in 1..=20 {
        sys::unmap(hole)?;
        let child = sys::fork(|| Ok(()))?;
        sys::map_over(hole, sys::RW, 0)?;
        hole.fill(generation);
        sys::wait_for(child, 0)?;
        if generation % 4 == 0 {
            ballast.walk()?;
        }
        hole.check(generation)?;
    }
    field.check(1)
}

/// Of memory that can be executed a child has what its parent has; what is there besides the program's is no child's.
fn fork_code_made(ctx: &Ctx) -> Outcome {
    const GENERATIONS: usize = 3;
    let made = || {
        let is_made = |line: &str| line.contains(" rwxp ") && line.split_whitespace().count() == 5;
        Ok::<_, Stop>(sys::mappings(is_made)?.iter().map(|span| span.len).sum::<usize>())
    };
    fn next(ctx: &Ctx, field: Span, left: usize, made: &dyn Fn() -> Result<usize, Stop>) -> Outcome {
        let mut ballast = Ballast::new(ctx.half())?;
        ballast.walk()?;
        let most = made()?;
        let child = sys::fork(|| {
            let inherited = made()?;
            ensure!(inherited <= most, "{inherited} bytes that can be executed, {most} in the parent");
            field.check(1)?;
            if left > 0 {
                next(ctx, field, left - 1, made)?;
            }
            Ok(())
        })?;
        sys::wait_for(child, 0)?;
        field.check(1)
    }
    let field = sys::map_aligned(ctx.half(), BLOCK)?;
    sys::protect(field, sys::RW | libc::PROT_EXEC)?;
    field.fill(1);
    next(ctx, field, GENERATIONS, &made)
}

/// As khugepaged may: where nothing is mapped, a huge page that is made has zeros. What is out is not mapped, and in a child
/// nobody is told of that before its memory is registered.
fn fork_collapsed(ctx: &Ctx) -> Outcome {
    fork_beside(ctx, collapse)
}

/// As debuggers and profilers do. Zeros are mapped where they read, which the child must not find.
fn fork_peeked(ctx: &Ctx) -> Outcome {
    fork_beside(ctx, peek)
}

/// Meddles with each block of a process's memory: with how many it could, and the first failure.
type Meddle = fn(libc::pid_t, Span) -> (usize, Option<c_int>);

/// Forks while another process meddles with the memory of each child, from when it is there.
fn fork_beside(ctx: &Ctx, meddle: Meddle) -> Outcome {
    let (field, mut ballast) = ctx.evicted()?;
    let parent = std::process::id();
    let met = Tally::new()?;
    let meddler = sys::fork(|| meddle_with_children(parent, field, meddle, met))?;
    // May it do that? With whom makes no difference.
    let (could, may) = meddle(meddler, field);
    let outcome = (1..=20).try_for_each(|generation| {
        // So that there are page tables.
        field.pieces(BLOCK).try_for_each(|block| block.page(7).check(generation))?;
        let child = sys::fork(|| field.check(generation))?;
        sys::wait_for(child, 0)?;
        field.fill(generation + 1);
        ballast.walk()
    });
    // SAFETY: a child that was not waited for.
    sys::ret("kill", unsafe { libc::kill(meddler, libc::SIGKILL) })?;
    sys::wait_status(meddler)?;
    match may {
        Some(libc::EPERM | libc::ENOSYS) => Err(Stop::Skip("it takes rights over other processes".into())),
        Some(libc::EINVAL | libc::ENOMEM | libc::EAGAIN) if could == 0 && met.count() == 0 => {
            Err(Stop::Skip("there are no huge pages".into()))
        }
        _ => outcome.and_then(|()| met.some("blocks of children met")),
    }
}

/// Until it is killed.
fn meddle_with_children(parent: u32, field: Span, meddle: Meddle, met: Tally) -> Outcome {
    let list = std::fs::File::open(format!("/proc/{parent}/task/{parent}/children"))?;
    let mut text = [0; 256];
    loop {
        let len = std::os::unix::fs::FileExt::read_at(&list, &mut text, 0)?;
        let children = String::from_utf8_lossy(&text[..len]);
        let children = children.split_whitespace().filter_map(|child| child.parse().ok());
        for child in children.filter(|child| *child != std::process::id() as libc::pid_t) {
            met.add(meddle(child, field).0);
        }
    }
}

/// Makes huge pages of a process's memory, as far as it can be.
fn collapse(process: libc::pid_t, field: Span) -> (usize, Option<c_int>) {
    // SAFETY: takes numbers.
    let pidfd = unsafe { libc::syscall(libc::SYS_pidfd_open, process, 0) } as c_int;
    if pidfd < 0 {
        return (0, Some(sys::errno()));
    }
    // SAFETY: it was just opened.
    let pidfd = unsafe { OwnedFd::from_raw_fd(pidfd) };
    with_each_block(field, |block| {
        let block = libc::iovec { iov_base: block.as_ptr(), iov_len: BLOCK };
        let (fd, advice) = (pidfd.as_raw_fd(), libc::MADV_COLLAPSE);
        // SAFETY: one range; the content stays as it is.
        unsafe { libc::syscall(libc::SYS_process_madvise, fd, &raw const block, 1, advice, 0) }
    })
}

/// Reads a word of each block of a process's memory.
fn peek(process: libc::pid_t, field: Span) -> (usize, Option<c_int>) {
    with_each_block(field, |block| {
        let mut word = 0u64;
        let into = libc::iovec { iov_base: (&raw mut word).cast(), iov_len: 8 };
        let from = libc::iovec { iov_base: block.page(11).as_ptr(), iov_len: 8 };
        // SAFETY: there is room for a word.
        unsafe { libc::process_vm_readv(process, &into, 1, &from, 1, 0) as libc::c_long }
    })
}

fn with_each_block(field: Span, meddle: impl Fn(Span) -> libc::c_long) -> (usize, Option<c_int>) {
    field.pieces(BLOCK).fold((0, None), |(met, failure), block| match meddle(block) {
        0.. => (met + 1, failure),
        _ => (met, failure.or_else(|| Some(sys::errno()))),
    })
}

/// What the forks below read, and what they found.
static SMALL: Mutex<Option<(Span, Outcome)>> = Mutex::new(None);

extern "C" fn fork_here(_: c_int, _: *mut libc::siginfo_t, _: *mut c_void) {
    let Ok(mut small) = SMALL.lock() else { return };
    if let Some((field, outcome)) = small.as_mut() {
        let child = sys::fork(|| field.page(1).check(1));
        *outcome = child.and_then(|child| sys::wait_for(child, 0));
    }
}

extern "C" fn fork_in_thread(_: *mut c_void) -> *mut c_void {
    fork_here(0, std::ptr::null_mut(), std::ptr::null_mut());
    std::ptr::null_mut()
}

fn fork_small_stack(ctx: &Ctx) -> Outcome {
    const LEN: usize = 16 << 10;
    let found = || {
        let mut small = SMALL.lock().map_err(|_| Stop::Wrong("a fork panicked".into()))?;
        small.take().ok_or(Stop::Wrong("nobody forked".into()))?.1
    };
    let ask = |field| {
        let unheard = Err(Stop::Wrong("nobody forked".into()));
        SMALL
            .lock()
            .map(|mut small| *small = Some((field, unheard)))
            .map_err(|_| Stop::Wrong("panicked".into()))
    };
    let (field, mut ballast) = ctx.evicted()?;
    ask(field)?;
    // SAFETY: the attributes are initialised first; the thread is joined.
    unsafe {
        let mut attributes: libc::pthread_attr_t = std::mem::zeroed();
        libc::pthread_attr_init(&mut attributes);
        let mut thread = 0;
        let r = libc::pthread_attr_setstacksize(&mut attributes, LEN);
        ensure!(r == 0, "pthread_attr_setstacksize says {r}");
        let r = libc::pthread_create(&mut thread, &attributes, fork_in_thread, std::ptr::null_mut());
        ensure!(r == 0, "pthread_create says {r}");
        libc::pthread_join(thread, std::ptr::null_mut());
    }
    found()?;
    ballast.walk()?;
    ask(field)?;
    // Nothing lies below it.
    let all = sys::map_at(0, 16 * LEN, libc::PROT_NONE, sys::ANON)?;
    let stack = all.part(15 * LEN, LEN);
    sys::protect(stack, sys::RW)?;
    let signals = libc::stack_t { ss_sp: stack.as_ptr(), ss_flags: 0, ss_size: LEN };
    // SAFETY: the stack stays mapped; SIGUSR1 is handled.
    unsafe { sys::ret("sigaltstack", libc::sigaltstack(&signals, std::ptr::null_mut()))? };
    sys::handle(libc::SIGUSR1, libc::SA_ONSTACK, fork_here)?;
    // SAFETY: as above.
    sys::ret("raise", unsafe { libc::raise(libc::SIGUSR1) })?;
    found()?;
    field.check(1)
}

extern "C" fn forks_by(number: usize) -> libc::c_long {
    // SAFETY: the child returns to where the parent does, and leaves soon.
    unsafe {
        match number {
            0 => libc::fork().into(),
            number => libc::syscall(number as libc::c_long),
        }
    }
}

/// The child's engine began on what was out of its stack, and then that was not what the engine found.
fn fork_stack_out(ctx: &Ctx) -> Outcome {
    const UNIT: usize = 64 << 10;
    let (field, mut ballast) = ctx.evicted()?;
    for number in [0, libc::SYS_fork as usize] {
        let stacks = field.part(0, (16 << 20).min(field.len)).pieces(2 * UNIT);
        let step = PAGE / stacks.clone().count();
        for (n, stack) in stacks.enumerate() {
            // What is on one side of the border does not come in with what is on the other.
            let border = stack.start + UNIT;
            let top = border + ((n + 1) * step).next_multiple_of(16);
            super::span::load(border);
            let child: libc::c_long;
            // SAFETY: nobody else is on that stack; the register that keeps ours is one that functions save.
            unsafe {
                std::arch::asm!(
                    "mov r12, rsp", "mov rsp, {top}", "call {forks}", "mov rsp, r12",
                    top = in(reg) top, forks = sym forks_by, in("rdi") number, lateout("rax") child, out("r12") _,
                    clobber_abi("C"),
                );
            }
            if sys::ret("fork", child as libc::pid_t)? == 0 {
                sys::leave(stack.part(0, UNIT / 2).check(1));
            }
            sys::wait_for(child as libc::pid_t, 0)?;
        }
        field.fill(1);
        ballast.walk()?;
    }
    field.check(1)
}

/// What a clone does: it ends with the byte that is pointed to.
pub(super) extern "C" fn reads_a_byte(at: *mut c_void) -> c_int {
    // SAFETY: what is given below, of which the child has a copy.
    unsafe { at.cast::<*const u8>().read().read_volatile() }.into()
}

/// As the collector of D does: its child began on what held what it was to do, and ended by SIGSEGV. On a stack right above what
/// cannot be written to the parent waited for ever.
fn clone_small_stack(ctx: &Ctx) -> Outcome {
    #[repr(align(16))]
    struct Stack([u8; 256]);
    let (field, mut ballast) = ctx.evicted()?;
    let all = sys::map(2 * PAGE)?;
    sys::protect(all.part(0, PAGE), libc::PROT_NONE)?;
    for round in 0..16 {
        let mut own = Stack([0; 256]);
        let mut byte = field.page(round).as_ptr::<u8>().cast_const();
        let own = own.0.as_mut_ptr_range().end.cast();
        let guarded = all.part(PAGE, PAGE).as_ptr::<c_void>().wrapping_byte_add(256 + 16 * round);
        for stack in [own, guarded] {
            // SAFETY: the child has a copy of all, and needs little.
            let child = unsafe { libc::clone(reads_a_byte, stack, libc::SIGCHLD, (&raw mut byte).cast()) };
            // SAFETY: a page of the field.
            sys::wait_for(sys::ret("clone", child)?, unsafe { byte.read() }.into())?;
        }
        if round % 8 == 0 {
            ballast.walk()?;
        }
    }
    field.check(1)
}

extern "C" {
    fn __fork() -> libc::pid_t;
    fn __clone(
        main: extern "C" fn(*mut c_void) -> c_int,
        stack: *mut c_void,
        flags: c_int,
        argument: *mut c_void,
        ...
    ) -> libc::pid_t;
}

extern "C" fn reads_all(field: *mut c_void) -> c_int {
    // SAFETY: what is given below, of which the child has a copy.
    sys::leave(unsafe { *field.cast::<Span>() }.check(1))
}

fn fork_names(ctx: &Ctx) -> Outcome {
    let (field, mut ballast) = ctx.evicted()?;
    // SAFETY: as `fork`; the child leaves at once.
    let child = sys::ret("__fork", unsafe { __fork() })?;
    if child == 0 {
        sys::leave(field.check(1));
    }
    sys::wait_for(child, 0)?;
    ballast.walk()?;
    let stack = sys::map(256 << 10)?;
    let (mut argument, top) = (field, stack.end() as *mut c_void);
    // SAFETY: as `clone`; the child is on a stack of its own.
    let child = unsafe { __clone(reads_all, top, libc::SIGCHLD, (&raw mut argument).cast()) };
    sys::wait_for(sys::ret("__clone", child)?, 0)
}

fn fork_chain(ctx: &Ctx) -> Outcome {
    let (field, mut ballast) = ctx.evicted()?;
    let (read, write) = sys::pipe()?;
    for generation in 1..6 {
        let child = sys::fork(|| {
            field.page(usize::from(generation)).check(generation)?;
            let grandchild = sys::fork(|| {
                // Its parent ends at once; what it inherited must stay.
                let last = sys::fork(|| {
                    std::thread::sleep(std::time::Duration::from_millis(30));
                    field.check(generation)?;
                    sys::write_all(write.as_raw_fd(), b".")
                })?;
                ensure!(last > 0, "no process");
                Ok(())
            })?;
            sys::wait_for(grandchild, 0)
        })?;
        sys::wait_for(child, 0)?;
        // Over what they read, unless it is kept.
        field.fill(generation + 1);
        ballast.walk()?;
        ensure!(says_something(&read), "the last of the line said nothing");
    }
    field.check(6)
}

const GENERATIONS: u16 = 60;

fn fork_generations(ctx: &Ctx) -> Outcome {
    let (field, _ballast) = ctx.evicted()?;
    let (read, write) = sys::pipe()?;
    let before = runs_descriptors();
    let first = sys::fork(|| {
        next_generation(field, 2, &|| {
            let many = usize::from(GENERATIONS) / 2;
            let is_kept = before.zip(runs_descriptors()).is_some_and(|(before, now)| now > before + many);
            ensure!(!is_kept, "run keeps what generations that have gone left each other");
            sys::write_all(write.as_raw_fd(), b".")
        })
    })?;
    drop(write);
    sys::wait_for(first, 0)?;
    ensure!(says_something(&read), "the last generation said nothing");
    field.check(1)
}

fn next_generation(field: Span, generation: u16, last: &dyn Fn() -> Outcome) -> Outcome {
    // Of the pages each generation has one in so many.
    let pages = |of: u16| (usize::from(of)..field.pages()).step_by(usize::from(GENERATIONS) + 1);
    pages(generation).map(|page| field.page(page)).for_each(|page| page.fill(generation));
    if generation < GENERATIONS {
        return sys::fork(|| next_generation(field, generation + 1, last)).map(drop);
    }
    for of in 0..=GENERATIONS {
        pages(of).try_for_each(|page| field.page(page).check(of.max(1)))?;
    }
    last()
}

fn fork_orphan(ctx: &Ctx) -> Outcome {
    let (read, write) = sys::pipe()?;
    let parent = sys::fork(|| {
        let (field, mut ballast) = ctx.evicted()?;
        let parent = std::process::id();
        let child = sys::fork(|| {
            // Until it is another's child.
            while std::os::unix::process::parent_id() == parent {
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
            for generation in [1, 7, 8] {
                field.check(generation)?;
                field.fill(generation.max(6) + 1);
            }
            field.check(9)?;
            sys::write_all(write.as_raw_fd(), b"k")
        })?;
        ensure!(child > 0, "no child");
        field.fill(2);
        ballast.walk()?;
        // SAFETY: ends this process.
        unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
        Ok(())
    })?;
    let mut status = 0;
    // SAFETY: the integer takes the status.
    sys::ret("waitpid", unsafe { libc::waitpid(parent, &mut status, 0) })?;
    ensure!(libc::WIFSIGNALED(status), "the parent was not killed: {status:#x}");
    drop(write);
    // Meanwhile others want the room that the parent had.
    let other = sys::map(ctx.size / 2)?;
    other.fill(3);
    ensure!(says_something(&read), "the child did not find what it inherited");
    other.check(3)
}

fn fork_killed(ctx: &Ctx) -> Outcome {
    let mut dice = Dice::new(1);
    let (met, in_fork) = (Tally::new()?, Tally::new()?);
    for _ in 0..12 {
        let (read, write) = sys::pipe()?;
        let victim = sys::fork(|| {
            let (field, _ballast) = ctx.evicted()?;
            sys::write_all(write.as_raw_fd(), b".")?;
            loop {
                sys::write_all(write.as_raw_fd(), b"f")?;
                let child = sys::fork(|| {
                    sys::write_all(write.as_raw_fd(), b"b")?;
                    field.page(7).check(1)?;
                    sys::write_all(write.as_raw_fd(), b"e")
                })?;
                sys::wait_for(child, 0)?;
            }
        })?;
        drop(write);
        ensure!(says_something(&read), "the victim has not begun");
        std::thread::sleep(std::time::Duration::from_micros(dice.roll(30_000) as u64));
        let mut status = 0;
        // SAFETY: a child that was not waited for; the integer takes the status.
        sys::ret("waitpid", unsafe {
            libc::kill(victim, libc::SIGKILL);
            libc::waitpid(victim, &mut status, 0)
        })?;
        ensure!(libc::WIFSIGNALED(status), "the victim ended with {status:#x}");
        // Its last child goes on, and is soon done.
        let mut said = Vec::new();
        std::fs::File::from(read).read_to_end(&mut said).expect("a pipe can be read");
        let count = |what: u8| said.iter().filter(|byte| **byte == what).count();
        ensure!(count(b'b') == count(b'e'), "children of the victim did not end: {said:?}");
        met.add(count(b'b'));
        in_fork.add(count(b'f') - count(b'b'));
    }
    in_fork.say("victims were killed in a fork");
    met.some("children of victims")
}

/// Does a byte come, or the end?
fn says_something(pipe: &OwnedFd) -> bool {
    let mut told = [0u8];
    // SAFETY: a buffer of one byte.
    unsafe { libc::read(pipe.as_raw_fd(), told.as_mut_ptr().cast(), 1) == 1 }
}

/// How many run has open.
fn runs_descriptors() -> Option<usize> {
    let socket = std::env::var_os(pageout::wire::ENV_RUN)?;
    let run = std::path::Path::new(&socket).file_stem()?.to_str()?.split('-').next()?;
    Some(std::fs::read_dir(format!("/proc/{run}/fd")).ok()?.count())
}

fn fork_stillborn(ctx: &Ctx) -> Outcome {
    const CHILDREN: usize = 60;
    let (field, _ballast) = ctx.evicted()?;
    // One for each child that has not come yet.
    let before = runs_descriptors();
    for _ in 0..CHILDREN {
        let child = sys::fork(|| field.check(1))?;
        // SAFETY: a child that was not waited for.
        sys::ret("kill", unsafe { libc::kill(child, libc::SIGKILL) })?;
        sys::wait_status(child)?;
    }
    let began = Instant::now();
    while before.zip(runs_descriptors()).is_some_and(|(before, now)| now > before + CHILDREN / 4) {
        ensure!(began.elapsed().as_secs() < 20, "run waits for those that were killed");
        std::thread::sleep(std::time::Duration::from_millis(100));
    }
    let child = sys::fork(|| field.check(1))?;
    sys::wait_for(child, 0)?;
    field.check(1)
}

fn fork_changes(ctx: &Ctx) -> Outcome {
    let (field, mut ballast) = ctx.evicted()?;
    let stop = AtomicBool::new(false);
    let moving = sys::map(4 << 20)?;
    moving.fill(5);
    std::thread::scope(|scope| {
        let changer = scope.spawn(|| -> Outcome {
            let mut at = moving;
            while !stop.load(Ordering::Relaxed) {
                let (_, high) = at.halves();
                sys::advise(high, libc::MADV_DONTNEED)?;
                high.fill_as(moving.start + moving.len / 2, 5);
                let target = sys::map(at.len)?;
                at = sys::remap(at, at.len, sys::FIXED, target.start)?;
            }
            at.check_as(moving.start, 5)
        });
        let done = (|| {
            for _ in 0..6 {
                let child = sys::fork(|| field.check(1))?;
                ballast.walk()?;
                sys::wait_for(child, 0)?;
            }
            field.check(1)
        })();
        stop.store(true, Ordering::Relaxed);
        done.and(changer.join().expect("the thread does not panic"))
    })
}

/// Memory that somebody moves is at the one place or at the other, whole.
fn fork_moves(ctx: &Ctx) -> Outcome {
    let (field, mut ballast) = ctx.evicted()?;
    let piece = field.len / 64;
    let pairs: Vec<(Span, Span)> =
        (0..2).map(|n| (field.part(n * 8 * piece, piece), field.part((n * 8 + 4) * piece, piece))).collect();
    for (_, to) in &pairs {
        sys::unmap(*to)?;
    }
    let rest = field.part(32 * piece, 32 * piece);
    let stop = AtomicBool::new(false);
    let check = || {
        for (from, to) in &pairs {
            let at = if sys::is_mapped(*from) { from } else { to };
            at.check_as(from.start, 1)?;
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let movers: Vec<_> = pairs
            .iter()
            .map(|(from, to)| {
                let stop = &stop;
                scope.spawn(move || -> Outcome {
                    while !stop.load(Ordering::Relaxed) {
                        sys::remap(*from, from.len, sys::FIXED, to.start)?;
                        std::thread::sleep(std::time::Duration::from_micros(300));
                        sys::remap(*to, to.len, sys::FIXED, from.start)?;
                    }
                    Ok(())
                })
            })
            .collect();
        let done = (0..40).try_for_each(|turn| {
            if turn % 4 == 0 {
                ballast.walk()?;
            }
            let child = sys::fork(check)?;
            sys::wait_for(child, 0)
        });
        stop.store(true, Ordering::Relaxed);
        movers.into_iter().try_for_each(|mover| mover.join().expect("the thread does not panic")).and(done)
    })?;
    check()?;
    rest.check(1)
}

/// Advice about reading ahead changes nothing.
fn fork_advice(ctx: &Ctx) -> Outcome {
    let (field, mut ballast) = ctx.evicted()?;
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let adviser = scope.spawn(|| -> Outcome {
            let advices = [libc::MADV_NORMAL, libc::MADV_RANDOM, libc::MADV_SEQUENTIAL];
            let mut next = advices.iter().cycle();
            while !stop.load(Ordering::Relaxed) {
                for piece in field.pieces(BLOCK / 2) {
                    sys::advise(piece, *next.next().expect("there are some"))?;
                }
            }
            Ok(())
        });
        let done = (0..10).try_for_each(|_| {
            ballast.walk()?;
            let child = sys::fork(|| field.check(1))?;
            sys::wait_for(child, 0)
        });
        stop.store(true, Ordering::Relaxed);
        adviser.join().expect("the thread does not panic").and(done)
    })?;
    field.check(1)
}

/// Makes threads and waits for them.
extern "C" fn make_threads() {
    // Stacks of other sizes, so that no thread's place is known.
    for n in 1..5 {
        let thread = std::thread::Builder::new().stack_size(n << 20).spawn(|| {});
        thread.expect("there is room for a thread").join().expect("the thread does not panic");
    }
}

/// As libraries do that have threads of their own: these go on in the parent.
fn fork_handlers(ctx: &Ctx) -> Outcome {
    let (field, mut ballast) = ctx.evicted()?;
    // SAFETY: the handler is there as long as the program.
    let set = unsafe { libc::pthread_atfork(Some(make_threads), Some(make_threads), None) };
    sys::ret("pthread_atfork", set)?;
    for _ in 0..3 {
        let child = sys::fork(|| field.check(1))?;
        sys::wait_for(child, 0)?;
        ballast.walk()?;
    }
    field.check(1)
}

/// As a debugger holds it, or a busy machine: its child is there, and has its engine, long before it goes on.
fn fork_held_up(ctx: &Ctx) -> Outcome {
    // SAFETY: lets a child of ours trace us; no pointers.
    unsafe { libc::prctl(libc::PR_SET_PTRACER, -1i64) };
    // SAFETY: takes nothing.
    let me = unsafe { libc::getpid() };
    let (attached, tell) = sys::pipe()?;
    let tracer = sys::fork(|| hold_up(me, tell.as_raw_fd()))?;
    drop(tell);
    let mut word = [0u8];
    sys::read_span(attached.as_raw_fd(), Span::new(word.as_mut_ptr() as usize, 1))?;
    let (field, _ballast) = ctx.evicted()?;
    // SAFETY: the handler is there as long as the program.
    sys::ret("pthread_atfork", unsafe { libc::pthread_atfork(None, Some(make_threads), None) })?;
    let child = sys::fork(|| field.check(1))?;
    sys::wait_for(child, 0)?;
    // SAFETY: a child of ours, not waited for yet.
    unsafe { libc::kill(tracer, libc::SIGKILL) };
    sys::wait_status(tracer)?;
    field.check(1)
}

/// Traces a process, says so, and holds it up where it has forked.
fn hold_up(traced: libc::pid_t, tell: libc::c_int) -> Outcome {
    // SAFETY: the kernel checks whom we may trace.
    let seized = unsafe { libc::ptrace(libc::PTRACE_SEIZE, traced, 0, libc::PTRACE_O_TRACEFORK) };
    sys::ret("seize", seized)?;
    sys::write_all(tell, b"!")?;
    loop {
        let mut status = 0;
        // SAFETY: room for a number.
        let stopped = sys::ret("waitpid", unsafe { libc::waitpid(-1, &mut status, libc::__WALL) })?;
        let event = status >> 16;
        if stopped != traced {
            // SAFETY: it has stopped, and is ours to trace.
            unsafe { libc::ptrace(libc::PTRACE_DETACH, stopped, 0, 0) };
            continue;
        }
        if event == libc::PTRACE_EVENT_FORK {
            std::thread::sleep(Duration::from_millis(400));
        }
        let signal = if event == 0 { libc::WSTOPSIG(status) } else { 0 };
        // SAFETY: as above.
        unsafe { libc::ptrace(libc::PTRACE_CONT, traced, 0, signal) };
    }
}

fn fork_mapped_over(ctx: &Ctx) -> Outcome {
    const THREADS: usize = 4;
    let field = sys::map_aligned(2 * ctx.half(), BLOCK)?;
    let pieces: Vec<Span> = field.pieces(32 * PAGE).collect();
    // It took a second or two, when what was mapped over was taken for lost.
    work_beside_forks(ctx, THREADS, |me, ends| {
        let mut dice = Dice::new(me);
        let mut written = vec![false; pieces.len()];
        while !ends.load(Ordering::Relaxed) {
            let number = dice.roll(pieces.len() / THREADS) * THREADS + me;
            match (pieces[number], written[number]) {
                (piece, false) => piece.fill(1),
                (piece, true) if dice.roll(2) == 0 => piece.check(1)?,
                (piece, true) => {
                    sys::map_over(piece, sys::RW, 0)?;
                    piece.page(dice.roll(piece.pages())).check_zero()?;
                    written[number] = false;
                    continue;
                }
            }
            written[number] = true;
        }
        Ok(())
    })
}

fn fork_newcomer(ctx: &Ctx) -> Outcome {
    let anew = |place: Span| {
        sys::map_at(place.start, place.len, sys::RW, sys::ANON | libc::MAP_FIXED_NOREPLACE).map(|_| ())
    };
    fork_while_replaced(ctx, anew)
}

/// The kernel kills all others there before it has ended, its keeper too: nothing to tell of.
fn fork_init(ctx: &Ctx) -> Outcome {
    // SAFETY: for children to come only.
    if unsafe { libc::unshare(libc::CLONE_NEWPID) } != 0 {
        return Err(Stop::Skip("no PID namespace can be made here".into()));
    }
    let child = sys::fork(|| {
        ensure!(std::process::id() == 1, "it is not the init");
        let (field, _ballast) = ctx.evicted()?;
        field.check(1)
    })?;
    sys::wait_for(child, 0)
}

/// One thread forks children that end at once, while `threads` others `work`, each by its number, until that ends.
fn work_beside_forks(
    ctx: &Ctx,
    threads: usize,
    work: impl Fn(usize, &AtomicBool) -> Outcome + Sync,
) -> Outcome {
    let (deadline, ends) = (Instant::now() + 6 * ctx.time, AtomicBool::new(false));
    let forks = || -> Outcome {
        while Instant::now() < deadline {
            sys::wait_for(sys::fork(|| Ok(()))?, 0)?;
        }
        Ok(())
    };
    together(threads + 1, |me| {
        if me < threads {
            return work(me, &ends);
        }
        let done = forks();
        ends.store(true, Ordering::Relaxed);
        done
    })
}

/// The same with three others, each with an eighth of the memory of its own that it fills before each time.
fn fill_beside_forks(ctx: &Ctx, work: impl Fn(Span) -> Outcome + Sync) -> Outcome {
    work_beside_forks(ctx, 3, |_, ends| {
        let part = sys::map(ctx.half() / 4)?;
        while !ends.load(Ordering::Relaxed) {
            part.fill(1);
            work(part)?;
        }
        Ok(())
    })
}

/// The kernel has given up what is below a guard before it tells of that.
fn fork_guards(ctx: &Ctx) -> Outcome {
    let page = sys::map(PAGE)?;
    if sys::advise(page, sys::GUARD_INSTALL).is_err() {
        return Err(Stop::Skip("the kernel has no guard pages (Linux 6.13)".into()));
    }
    fill_beside_forks(ctx, |part| {
        part.pieces(16 * PAGE).try_for_each(|piece| {
            sys::advise(piece, sys::GUARD_INSTALL)?;
            sys::advise(piece, sys::GUARD_REMOVE)?;
            piece.check_zero()
        })
    })
}

fn fork_dontunmap(ctx: &Ctx) -> Outcome {
    let moves = Tally::new()?;
    fill_beside_forks(ctx, |part| {
        part.pieces(64 * PAGE).try_for_each(|piece| {
            let how = libc::MREMAP_MAYMOVE | libc::MREMAP_DONTUNMAP;
            // Of several mappings it is refused.
            let Ok(moved) = sys::remap(piece, piece.len, how, 0) else { return piece.check(1) };
            moves.add(1);
            piece.page(0).check_zero()?;
            moved.check_as(piece.start, 1)?;
            sys::unmap(moved)
        })
    })?;
    moves.some("moves")
}

fn fork_grown_over(ctx: &Ctx) -> Outcome {
    // By what is mapped before it.
    let grown =
        |place: Span| sys::remap(Span::new(place.start - PAGE, PAGE), PAGE + place.len, 0, 0).map(|_| ());
    fork_while_replaced(ctx, grown)
}

/// Memory that `comes` where other memory has just been is empty, though who unmapped that is still about it.
fn fork_while_replaced(ctx: &Ctx, comes: impl Fn(Span) -> Result<(), Stop> + Sync) -> Outcome {
    let (field, mut ballast) = ctx.evicted()?;
    let piece = field.len / 64;
    let (turn, mapped) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let (begins, unmapped, stop) = (AtomicUsize::new(0), AtomicUsize::new(0), AtomicBool::new(false));
    // Children that have the newcomer, and of these those whose parent's thread was still about what had been there.
    let (met, met_amid) = (Tally::new()?, Tally::new()?);
    let place = |turn: usize| field.part((1 + turn) * piece, piece);
    std::thread::scope(|scope| {
        let unmaps = scope.spawn(|| -> Outcome {
            let mut done = 0;
            while !stop.load(Ordering::Relaxed) {
                if turn.load(Ordering::SeqCst) > done {
                    done += 1;
                    begins.store(done, Ordering::SeqCst);
                    sys::unmap(place(done - 1))?;
                    unmapped.store(done, Ordering::SeqCst);
                }
            }
            Ok(())
        });
        let maps = scope.spawn(|| -> Outcome {
            let mut done = 0;
            while !stop.load(Ordering::Relaxed) {
                if begins.load(Ordering::SeqCst) > done && comes(place(done)).is_ok() {
                    done += 1;
                    mapped.store(done, Ordering::SeqCst);
                }
            }
            Ok(())
        });
        let done = (1..=32).try_for_each(|next| {
            ballast.walk()?;
            turn.store(next, Ordering::SeqCst);
            let wait_for_newcomer = || {
                while mapped.load(Ordering::SeqCst) != next {
                    ensure!(!unmaps.is_finished() && !maps.is_finished(), "a thread ended early");
                    std::thread::yield_now();
                }
                Ok(())
            };
            // At once, and a little later each time; or as soon as the newcomer is there, which that hardly ever meets.
            match next % 2 {
                0 => wait_for_newcomer()?,
                _ => (0..next * 200).for_each(|_| std::hint::spin_loop()),
            }
            let child = sys::fork(|| match mapped.load(Ordering::SeqCst) == next {
                true => {
                    met.add(1);
                    met_amid.add(usize::from(unmapped.load(Ordering::SeqCst) != next));
                    place(next - 1).check_zero()
                }
                false => Ok(()),
            })?;
            sys::wait_for(child, 0)?;
            wait_for_newcomer()?;
            place(next - 1).check_zero()
        });
        stop.store(true, Ordering::Relaxed);
        [unmaps, maps].into_iter().try_for_each(|thread| thread.join().expect("no panic")).and(done)
    })?;
    field.part(33 * piece, 31 * piece).check(1)?;
    met_amid.say("children with a newcomer amid the unmapping");
    met.some("children with a newcomer")
}

/// What grew in place is registered with what it grew from, and found later.
fn fork_grown(ctx: &Ctx) -> Outcome {
    const LONG: usize = 32 * PAGE;
    const SHORT: usize = 2 * PAGE;
    let (field, mut ballast) = ctx.evicted()?;
    for place in field.pieces(field.len / 8) {
        let place = place.part(0, LONG);
        sys::remap(place, SHORT, 0, 0)?;
        sys::remap(place.part(0, SHORT), LONG, 0, 0)?;
        place.fill(2);
    }
    let check = || {
        field.pieces(field.len / 8).try_for_each(|place| {
            place.part(0, LONG).check(2)?;
            place.part(LONG, place.len - LONG).check(1)
        })
    };
    ballast.walk()?;
    let child = sys::fork(check)?;
    sys::wait_for(child, 0)?;
    ballast.walk()?;
    check()
}

/// The parent waits in the kernel until its child is done, and other threads of it go on.
fn fork_vfork(ctx: &Ctx) -> Outcome {
    let (field, mut ballast) = ctx.evicted()?;
    let (runs, read) = (AtomicBool::new(false), AtomicBool::new(false));
    let (ask, answer) = (sys::pipe()?, sys::pipe()?);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| -> Outcome {
            runs.store(true, Ordering::SeqCst);
            let mut byte = [0u8];
            // SAFETY: a buffer of the length given.
            let n = unsafe { libc::read(ask.0.as_raw_fd(), byte.as_mut_ptr().cast(), 1) };
            ensure!(n == 1, "the child says nothing");
            field.check(1)?;
            ballast.walk()?;
            read.store(true, Ordering::SeqCst);
            sys::write_all(answer.1.as_raw_fd(), &byte)
        });
        while !runs.load(Ordering::SeqCst) {
            std::thread::yield_now();
        }
        let flags = libc::CLONE_VFORK | libc::SIGCHLD;
        let no_stack = 0;
        // SAFETY: a plain fork; the child calls nothing that keeps state and leaves by `_exit`.
        let child = unsafe { libc::syscall(libc::SYS_clone, flags, no_stack, 0, 0, 0) };
        if sys::ret("clone", child)? == 0 {
            let mut byte = [0u8];
            let said = sys::write_all(ask.1.as_raw_fd(), &byte);
            // SAFETY: as above.
            let n = unsafe { libc::read(answer.0.as_raw_fd(), byte.as_mut_ptr().cast(), 1) };
            sys::leave(said.and(if n == 1 { field.check(1) } else { Err(Stop::Wrong("no answer".into())) }));
        }
        ensure!(read.load(Ordering::SeqCst), "the parent went on before its child was done");
        sys::wait_for(child as libc::pid_t, 0)?;
        reader.join().expect("no panic")
    })?;
    field.check(1)
}

fn fork_exit(ctx: &Ctx) -> Outcome {
    let (field, mut ballast) = ctx.evicted()?;
    for turn in 0..10 {
        let child = sys::fork(|| Ok(()))?;
        field.page(turn * 7).check(1)?;
        sys::wait_for(child, 0)?;
    }
    field.check(1)?;
    ballast.walk()?;
    field.fill(2);
    ballast.walk()?;
    field.check(2)
}

fn fork_write(ctx: &Ctx) -> Outcome {
    let (field, mut ballast) = ctx.evicted()?;
    let child = sys::fork(|| {
        field.check(1)?;
        for page in field.pieces(PAGE).step_by(3) {
            page.fill(8);
        }
        for (index, page) in field.pieces(PAGE).enumerate() {
            page.check(if index % 3 == 0 { 8 } else { 1 })?;
        }
        Ok(())
    })?;
    for page in field.pieces(PAGE).step_by(2) {
        page.fill(9);
    }
    ballast.walk()?;
    for (index, page) in field.pieces(PAGE).enumerate() {
        page.check(if index % 2 == 0 { 9 } else { 1 })?;
    }
    sys::wait_for(child, 0)
}

fn fork_deep(ctx: &Ctx) -> Outcome {
    let (field, mut ballast) = ctx.evicted()?;
    let (low, high) = field.halves();
    let child = sys::fork(|| {
        low.fill(2);
        let grandchild = sys::fork(|| {
            low.check(2)?;
            high.check(1)
        })?;
        high.fill(3);
        sys::wait_for(grandchild, 0)?;
        low.check(2)?;
        high.check(3)
    })?;
    sys::wait_for(child, 0)?;
    field.check(1)?;
    ballast.walk()?;
    field.check(1)
}

fn fork_threads(ctx: &Ctx) -> Outcome {
    let (field, _) = ctx.evicted()?;
    let writers = 2;
    let each = field.len / writers / PAGE * PAGE;
    let whole: Vec<AtomicU16> = (0..writers).map(|_| AtomicU16::new(1)).collect();
    let stop = AtomicBool::new(false);
    together(writers + 1, |index| {
        if index < writers {
            let mine = field.part(index * each, each);
            let mut generation = 1;
            while !stop.load(Ordering::Relaxed) {
                mine.check(generation)?;
                generation += 1;
                mine.fill(generation);
                whole[index].store(generation, Ordering::SeqCst);
            }
            return mine.check(generation);
        }
        let forks = (0..3).try_for_each(|_| {
            let least: Vec<u16> = whole.iter().map(|g| g.load(Ordering::SeqCst)).collect();
            let child = sys::fork(|| {
                // The writers went on while the kernel copied: any later generation is right.
                (0..writers).try_for_each(|w| field.part(w * each, each).check_among(least[w]..=u16::MAX))
            })?;
            sys::wait_for(child, 0)
        });
        stop.store(true, Ordering::Relaxed);
        forks
    })
}

fn fork_stdio(ctx: &Ctx) -> Outcome {
    let (read_end, write_end) = sys::pipe()?;
    // SAFETY: the descriptor is ours; the FILE lies in the heap, which leaves like anything else.
    let stream = unsafe { libc::fdopen(libc::dup(write_end.as_raw_fd()), c"w".as_ptr()) };
    ensure!(!stream.is_null(), "fdopen failed");
    // SAFETY: the stream is open.
    unsafe { libc::fputs(c"begin ".as_ptr(), stream) };
    let (field, mut ballast) = ctx.evicted()?;
    ballast.walk()?;
    let child = sys::fork(|| {
        // SAFETY: the stream is open in the child too, with what the parent had put into it.
        unsafe {
            libc::fputs(c"child".as_ptr(), stream);
            libc::fclose(stream);
        }
        field.check(1)
    })?;
    sys::wait_for(child, 0)?;
    let mut text = [0u8; 64];
    // SAFETY: the array takes what comes.
    let n = unsafe { libc::read(read_end.as_raw_fd(), text.as_mut_ptr().cast(), text.len()) };
    ensure!(
        n == 11 && &text[..11] == b"begin child",
        "the child's FILE wrote {:?}",
        &text[..n.max(0) as usize]
    );
    field.check(1)
}

fn dontfork(ctx: &Ctx) -> Outcome {
    keeps_from_children(ctx, |kept| sys::advise(kept, libc::MADV_DONTFORK))
}

fn dontfork_asm(ctx: &Ctx) -> Outcome {
    keeps_from_children(ctx, |kept| {
        let result: i64;
        // SAFETY: advice on the trap's own memory.
        unsafe {
            std::arch::asm!(
                "syscall",
                inlateout("rax") libc::SYS_madvise => result,
                in("rdi") kept.start,
                in("rsi") kept.len,
                in("rdx") libc::MADV_DONTFORK,
                out("rcx") _,
                out("r11") _,
            );
        }
        ensure!(result == 0, "madvise: errno {}", -result);
        Ok(())
    })
}

fn keeps_from_children(ctx: &Ctx, keep: impl Fn(Span) -> Outcome) -> Outcome {
    let (field, mut ballast) = ctx.evicted()?;
    let (kept, given) = field.halves();
    keep(kept)?;
    let child = sys::fork(|| {
        ensure!(!sys::is_readable(kept.start)?, "the child has memory that it should not get");
        given.check(1)
    })?;
    sys::wait_for(child, 0)?;
    field.check(1)?;
    sys::advise(kept, libc::MADV_DOFORK)?;
    ballast.walk()?;
    let child = sys::fork(|| field.check(1))?;
    sys::wait_for(child, 0)?;
    field.check(1)
}

fn dontfork_moves(ctx: &Ctx) -> Outcome {
    let (field, mut ballast) = ctx.evicted()?;
    let piece = field.len / 16;
    let (kept, to) = (field.part(0, piece), field.part(2 * piece, piece));
    let given = field.part(4 * piece, 12 * piece);
    sys::advise(kept, libc::MADV_DONTFORK)?;
    sys::unmap(to)?;
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let mover = scope.spawn(|| -> Outcome {
            while !stop.load(Ordering::Relaxed) {
                sys::remap(kept, piece, sys::FIXED, to.start)?;
                std::thread::sleep(std::time::Duration::from_micros(300));
                sys::remap(to, piece, sys::FIXED, kept.start)?;
            }
            Ok(())
        });
        let done = (0..20).try_for_each(|turn| {
            if turn % 4 == 0 {
                ballast.walk()?;
            }
            let child = sys::fork(|| {
                ensure!(
                    !sys::is_mapped_anywhere(kept) && !sys::is_mapped_anywhere(to),
                    "the child has what it should not get"
                );
                given.check(1)
            })?;
            sys::wait_for(child, 0)
        });
        stop.store(true, Ordering::Relaxed);
        mover.join().expect("the thread does not panic").and(done)
    })?;
    kept.check(1)?;
    given.check(1)
}

fn wipeonfork(ctx: &Ctx) -> Outcome {
    let (field, mut ballast) = ctx.evicted()?;
    let (wiped, given) = field.halves();
    sys::advise(wiped, libc::MADV_WIPEONFORK)?;
    let child = sys::fork(|| {
        wiped.check_zero()?;
        given.check(1)?;
        wiped.fill(5);
        wiped.check(5)
    })?;
    field.check(1)?;
    sys::wait_for(child, 0)?;
    ballast.walk()?;
    field.check(1)
}

/// A child, or none now: it may be refused.
extern "C" fn fork_again() {
    static WITHIN: AtomicBool = AtomicBool::new(false);
    if WITHIN.swap(true, Ordering::SeqCst) {
        return;
    }
    // SAFETY: the child ends at once.
    unsafe {
        match libc::fork() {
            0 => libc::_exit(0),
            -1 => {}
            child => _ = libc::waitpid(child, std::ptr::null_mut(), 0),
        }
    }
    WITHIN.store(false, Ordering::SeqCst);
}

fn fork_in_handlers(ctx: &Ctx) -> Outcome {
    let (field, mut ballast) = ctx.evicted()?;
    // SAFETY: functions that stay.
    let set = unsafe { libc::pthread_atfork(Some(fork_again), Some(fork_again), Some(fork_again)) };
    sys::ret("pthread_atfork", set)?;
    for generation in 1..4 {
        let child = sys::fork(|| field.check(generation))?;
        sys::wait_for(child, 0)?;
        field.fill(generation + 1);
        ballast.walk()?;
    }
    field.check(4)
}

/// What the handlers wait for, each by its number: a fork that has begun, one that is over.
static FORKS_BEGUN: AtomicUsize = AtomicUsize::new(0);
static FORKS_OVER: AtomicUsize = AtomicUsize::new(0);
static CHANGES: AtomicUsize = AtomicUsize::new(0);

fn await_changes(than: usize) {
    while CHANGES.load(Ordering::SeqCst) < than {
        std::thread::yield_now();
    }
}

extern "C" fn awaits_change() {
    await_changes(2 * FORKS_BEGUN.fetch_add(1, Ordering::SeqCst) + 1);
}

extern "C" fn awaits_another() {
    await_changes(2 * FORKS_OVER.fetch_add(1, Ordering::SeqCst) + 2);
}

/// libc has each thread change its group by a signal, and waits for all of them: for a thread in a handler of fork, too.
fn fork_setxid(ctx: &Ctx) -> Outcome {
    const FORKS: usize = 6;
    let (field, mut ballast) = ctx.evicted()?;
    // SAFETY: functions that stay.
    let set = unsafe { libc::pthread_atfork(Some(awaits_change), Some(awaits_another), None) };
    sys::ret("pthread_atfork", set)?;
    let changes = || {
        for change in 1..=2 * FORKS {
            while FORKS_BEGUN.load(Ordering::SeqCst) + FORKS_OVER.load(Ordering::SeqCst) < change {
                std::thread::yield_now();
            }
            // SAFETY: the group that it has.
            sys::ret("setgid", unsafe { libc::setgid(libc::getgid()) })?;
            CHANGES.store(change, Ordering::SeqCst);
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let changing = scope.spawn(changes);
        for _ in 0..FORKS {
            let child = sys::fork(|| field.check(1))?;
            sys::wait_for(child, 0)?;
            ballast.walk()?;
        }
        changing.join().expect("no panic")
    })
}

/// What a handler fills: start and length.
static FILLS: [AtomicUsize; 2] = [const { AtomicUsize::new(0) }; 2];

extern "C" fn fills_and_waits() {
    let [start, len] = [0, 1].map(|word: usize| FILLS[word].load(Ordering::SeqCst));
    Span::new(start, len).fill(1);
    // Long enough for an engine to begin.
    std::thread::sleep(Duration::from_millis(300));
    std::thread::spawn(|| ()).join().expect("it does nothing");
}

/// The fork found no engine to ask; that which begins waits for it, and the new thread for an answer of that.
fn fork_begins(ctx: &Ctx) -> Outcome {
    let field = sys::map(2 * ctx.half())?;
    FILLS[0].store(field.start, Ordering::SeqCst);
    FILLS[1].store(field.len, Ordering::SeqCst);
    // SAFETY: a function that stays.
    let set = unsafe { libc::pthread_atfork(Some(fills_and_waits), None, None) };
    sys::ret("pthread_atfork", set)?;
    let child = sys::fork(|| field.check(1))?;
    sys::wait_for(child, 0)?;
    field.check(1)?;
    field.fill(2);
    field.check(2)
}

/// Who forks first, by number; how far the two have come.
static FIRST: AtomicUsize = AtomicUsize::new(0);
static STAGE: AtomicUsize = AtomicUsize::new(0);

fn await_stage(stage: usize) {
    while STAGE.load(Ordering::SeqCst) < stage {
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn own_number() -> usize {
    // SAFETY: has no conditions.
    unsafe { libc::gettid() as usize }
}

extern "C" fn waits_for_the_other() {
    if own_number() != FIRST.load(Ordering::SeqCst) {
        STAGE.store(2, Ordering::SeqCst);
        await_stage(3);
    } else if STAGE.swap(1, Ordering::SeqCst) == 0 {
        await_stage(2);
        std::thread::sleep(Duration::from_millis(50));
    } else {
        fills_and_waits();
    }
}

extern "C" fn has_forked() {
    if own_number() == FIRST.load(Ordering::SeqCst) {
        STAGE.store(3, Ordering::SeqCst);
    }
}

/// The child took its parent's thread, which has ended by then, for one that was killed in a fork of its own.
fn fork_begins_later(ctx: &Ctx) -> Outcome {
    let field = sys::map(2 * ctx.half())?;
    FILLS[0].store(field.start, Ordering::SeqCst);
    FILLS[1].store(field.len, Ordering::SeqCst);
    FIRST.store(own_number(), Ordering::SeqCst);
    // SAFETY: functions that stay.
    let set = unsafe { libc::pthread_atfork(Some(waits_for_the_other), Some(has_forked), None) };
    sys::ret("pthread_atfork", set)?;
    let other = std::thread::spawn(|| {
        await_stage(1);
        sys::wait_for(sys::fork(|| Ok(()))?, 0)
    });
    let child = sys::fork(|| {
        FIRST.store(own_number(), Ordering::SeqCst);
        STAGE.store(1, Ordering::SeqCst);
        // The other has ended.
        std::thread::sleep(Duration::from_millis(500));
        let child = sys::fork(|| field.check(1))?;
        sys::wait_for(child, 0)?;
        field.check(1)
    })?;
    super::load::join(other)?;
    sys::wait_for(child, 0)
}

/// The first word of the calling thread's mask, after a change.
fn mask_after(how: libc::c_int, signal: libc::c_int) -> u64 {
    // SAFETY: sets of our own.
    unsafe {
        let (mut set, mut now) = (std::mem::zeroed(), std::mem::zeroed());
        libc::sigemptyset(&mut set);
        libc::sigaddset(&mut set, signal);
        libc::pthread_sigmask(how, &set, std::ptr::null_mut());
        libc::pthread_sigmask(libc::SIG_BLOCK, std::ptr::null(), &mut now);
        (&raw const now).cast::<u64>().read()
    }
}

/// What the handlers found and left: before the clone, in the parent and in the child.
static MASKS: [AtomicU64; 3] = [const { AtomicU64::new(0) }; 3];

extern "C" fn blocks_before() {
    MASKS[0].store(mask_after(libc::SIG_BLOCK, libc::SIGUSR1), Ordering::SeqCst);
}

extern "C" fn blocks_in_parent() {
    MASKS[1].store(mask_after(libc::SIG_BLOCK, libc::SIGUSR2), Ordering::SeqCst);
}

extern "C" fn lets_through_in_child() {
    MASKS[2].store(mask_after(libc::SIG_UNBLOCK, libc::SIGUSR1), Ordering::SeqCst);
}

/// Threads that handlers of fork make inherit their mask, and what these change stays.
fn fork_handlers_mask(ctx: &Ctx) -> Outcome {
    let bit = |signal: libc::c_int| 1u64 << (signal - 1);
    let (one, two) = (bit(libc::SIGUSR1), bit(libc::SIGUSR2));
    let (field, _ballast) = ctx.evicted()?;
    // SAFETY: functions that stay.
    let set = unsafe {
        libc::pthread_atfork(Some(blocks_before), Some(blocks_in_parent), Some(lets_through_in_child))
    };
    sys::ret("pthread_atfork", set)?;
    let now = || mask_after(libc::SIG_UNBLOCK, libc::SIGWINCH);
    let child = sys::fork(|| {
        let found = [MASKS[0].load(Ordering::SeqCst), MASKS[2].load(Ordering::SeqCst), now()];
        ensure!(found == [one, 0, 0], "masks {found:x?} in the child");
        field.check(1)
    })?;
    let found = [MASKS[0].load(Ordering::SeqCst), MASKS[1].load(Ordering::SeqCst), now()];
    ensure!(found == [one, one | two, one | two], "masks {found:x?}");
    sys::wait_for(child, 0)?;
    field.check(1)
}

/// As sandboxes and runtimes of other languages do it: no handler of `pthread_atfork` runs.
fn fork_raw(ctx: &Ctx) -> Outcome {
    let (field, mut ballast) = ctx.evicted()?;
    let no_stack = 0;
    // SAFETY: a plain fork; the child calls nothing that keeps state and leaves by `_exit`.
    let child = unsafe { libc::syscall(libc::SYS_clone, libc::SIGCHLD, no_stack, 0, 0, 0) };
    sys::may_lack_memory("clone", child)?;
    if sys::ret("clone", child)? == 0 {
        sys::leave(field.check(1));
    }
    field.fill(2);
    ballast.walk()?;
    sys::wait_for(child as libc::pid_t, 0)?;
    // The number that the child is to have lies where memory is out. None that can be had, or allowed, mostly.
    let mut how = [0u64; 11];
    (how[4], how[8], how[9]) = (libc::SIGCHLD as u64, field.start as u64, 1);
    // SAFETY: a plain fork, see above.
    let child = unsafe { libc::syscall(libc::SYS_clone3, how.as_ptr(), size_of_val(&how)) };
    match child {
        0 => sys::leave(Ok(())),
        1.. => sys::wait_for(child as libc::pid_t, 0)?,
        _ => {}
    }
    field.check(2)
}

/// A fork that libc knows nothing of. The child calls nothing that keeps state and leaves by `_exit`.
#[cfg(target_arch = "x86_64")]
fn fork_by_instruction(work: impl FnOnce() -> Outcome) -> Result<libc::pid_t, Stop> {
    let result: i64;
    // SAFETY: a plain fork; see above.
    unsafe {
        std::arch::asm!("syscall", inlateout("rax") libc::SYS_fork => result, out("rcx") _, out("r11") _);
    }
    ensure!(result >= 0, "fork: errno {}", -result);
    if result == 0 {
        sys::leave(work());
    }
    Ok(result as libc::pid_t)
}

/// Was the child right? Else it was not let run at all.
fn right_or_refused(child: libc::pid_t) -> Result<bool, Stop> {
    let status = sys::wait_status(child)?;
    let refused = libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGSEGV;
    ensure!(status == 0 || refused, "a child ended with wait status {status:#x}");
    Ok(!refused)
}

/// Right, or refused: such a child may not run at all, but it never sees anything else than was there.
fn fork_asm(ctx: &Ctx) -> Outcome {
    let field = sys::map_aligned(ctx.half(), BLOCK)?;
    field.fill(1);
    let churn = Churn::start(ctx.half())?;
    let mut dice = Dice::new(2);
    let (mut right, mut refused) = (0, 0);
    let deadline = ctx.deadline();
    while right + refused < 20 || Instant::now() < deadline {
        // Some of it is in memory, some is not, some is on its way.
        let near = dice.roll(field.pages() - 16);
        field.part(near * PAGE, 16 * PAGE).check(1)?;
        std::thread::sleep(std::time::Duration::from_micros(dice.roll(3000) as u64));
        let far = dice.roll(field.pages() - 64);
        let child = fork_by_instruction(|| {
            field.part(near * PAGE, 16 * PAGE).check(1)?;
            field.part(far * PAGE, 64 * PAGE).check(1)
        })?;
        if right_or_refused(child)? {
            right += 1;
        } else {
            refused += 1;
        }
        // Others are as right as ever before and after; their children are no better off than they.
        let child = sys::fork(|| {
            let child = fork_by_instruction(|| field.part(far * PAGE, 64 * PAGE).check(1))?;
            right_or_refused(child)?;
            field.part(far * PAGE, 64 * PAGE).check(1)
        })?;
        sys::wait_for(child, 0)?;
    }
    eprintln!("{right} children were right, {refused} refused");
    churn.end()?;
    field.check(1)
}

/// By code that is in memory of the program's own, reads there what is out, and calls nothing else.
#[cfg(target_arch = "x86_64")]
fn fork_asm_made(ctx: &Ctx) -> Outcome {
    // mov eax, SYS_fork; syscall; test eax, eax; jnz parent; movzx edi, byte [rdi]; mov eax, SYS_exit; syscall; parent: ret
    const CODE: &[u8] = b"\xb8\x39\0\0\0\x0f\x05\x85\xc0\x75\x0a\x0f\xb6\x3f\xb8\x3c\0\0\0\x0f\x05\xc3";
    let (field, mut ballast) = ctx.evicted()?;
    let byte_of = |page: usize| {
        // SAFETY: mapped, and filled.
        unsafe { (field.page(page).start as *const u8).read_volatile() }
    };
    for protection in [sys::RW | libc::PROT_EXEC, libc::PROT_READ | libc::PROT_EXEC] {
        let made = sys::map(PAGE)?;
        // SAFETY: mapped, and longer.
        unsafe { std::ptr::copy_nonoverlapping(CODE.as_ptr(), made.start as *mut u8, CODE.len()) };
        sys::protect(made, protection)?;
        // SAFETY: it is such a function; its child calls nothing that keeps state.
        let fork: extern "C" fn(*const u8) -> i32 = unsafe { std::mem::transmute(made.start) };
        // It is found by now.
        ballast.walk()?;
        let (mut right, mut refused) = (0, 0);
        for page in (0..field.pages()).step_by(field.pages() / 16) {
            // Others' children have it.
            let other = sys::fork(|| {
                // SAFETY: as long as it is there.
                ensure!(unsafe { (made.start as *const u8).read_volatile() } == CODE[0], "no code");
                field.page(page).check(1)
            })?;
            sys::wait_for(other, 0)?;
            let child = fork(field.page(page).start as *const u8);
            ensure!(child > 0, "fork: {child}");
            let status = sys::wait_status(child)?;
            if libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGSEGV {
                refused += 1;
            } else {
                ensure!(
                    status == i32::from(byte_of(page)) << 8,
                    "wait status {status:#x}, {:#x}",
                    byte_of(page)
                );
                right += 1;
            }
        }
        eprintln!("{right} children were right, {refused} refused");
    }
    field.check(1)
}

/// What other forks' children get is not there for these.
fn fork_asm_beside(ctx: &Ctx) -> Outcome {
    let (field, mut ballast) = ctx.evicted()?;
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let other = scope.spawn(|| {
            let mut dice = Dice::new(4);
            let (mut right, mut refused) = (0, 0);
            while !stop.load(Ordering::Relaxed) {
                let far = dice.roll(field.pages() - 64);
                let child = fork_by_instruction(|| field.part(far * PAGE, 64 * PAGE).check(1))?;
                if right_or_refused(child)? {
                    right += 1;
                } else {
                    refused += 1;
                }
            }
            eprintln!("{right} children were right, {refused} refused");
            Ok(())
        });
        let mut dice = Dice::new(5);
        let mut stack = vec![0u8; 256 << 10];
        let deadline = ctx.deadline();
        let done = (|| {
            while Instant::now() < deadline {
                let far = dice.roll(field.pages() - 64);
                let part = field.part(far * PAGE, 64 * PAGE);
                sys::wait_for(sys::fork(|| part.check(1))?, 0)?;
                sys::wait_for(sys::fork_on(&mut stack, &|| part.check(1))?, 0)?;
            }
            ballast.walk()
        })();
        stop.store(true, Ordering::Relaxed);
        done.and(other.join().expect("the thread does not panic"))
    })?;
    field.check(1)
}

fn fork_mdwe(ctx: &Ctx) -> Outcome {
    const PR_SET_MDWE: libc::c_int = 65;
    let (field, mut ballast) = ctx.evicted()?;
    // SAFETY: takes numbers.
    sys::ret("prctl", unsafe { libc::prctl(PR_SET_MDWE, 1, 0, 0, 0) })?;
    for _ in 0..2 {
        sys::wait_for(sys::fork(|| field.part(0, 64 * PAGE).check(1))?, 0)?;
        ballast.walk()?;
    }
    field.check(1)
}

fn fork_asm_fits(ctx: &Ctx) -> Outcome {
    let field = sys::map(ctx.size / 16)?;
    for generation in 1..20 {
        field.fill(generation);
        let child = fork_by_instruction(|| {
            field.check(generation)?;
            field.fill(100);
            // With a thread, of which the engine is told where there is one.
            let checked = std::thread::spawn(move || field.check(100)).join();
            checked.unwrap_or_else(|_| Err(Stop::Wrong("the thread panicked".into())))
        })?;
        sys::wait_for(child, 0)?;
        field.check(generation)?;
    }
    Ok(())
}

/// What is kept from the children of other forks is not kept from these, nor what lies there by then.
fn fork_code(ctx: &Ctx) -> Outcome {
    const LEN: usize = 16 * PAGE;
    let (field, mut ballast) = ctx.evicted()?;
    let at = sys::map(LEN)?;
    let met = Tally::new()?;
    let (stop, is_data) = (AtomicBool::new(false), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let changer = scope.spawn(|| -> Outcome {
            let mut dice = Dice::new(3);
            let mut nap = || std::thread::sleep(std::time::Duration::from_micros(dice.roll(10_000) as u64));
            let mut visibility = libc::MAP_SHARED;
            while !stop.load(Ordering::Relaxed) {
                sys::map_over(at, libc::PROT_READ | libc::PROT_EXEC, 0)?;
                nap();
                visibility ^= libc::MAP_SHARED ^ libc::MAP_PRIVATE;
                sys::map_at(at.start, LEN, sys::RW, libc::MAP_ANONYMOUS | libc::MAP_FIXED | visibility)?;
                at.fill(7);
                is_data.store(true, Ordering::SeqCst);
                nap();
                is_data.store(false, Ordering::SeqCst);
            }
            Ok(())
        });
        let deadline = ctx.deadline();
        let done = (|| {
            let is_missing = || met.count() == 0 && Instant::now() < deadline + Duration::from_secs(5);
            while Instant::now() < deadline || is_missing() {
                let child = sys::fork(|| {
                    if is_data.load(Ordering::SeqCst) {
                        met.add(1);
                        at.check(7)?;
                    }
                    field.page(3).check(1)
                })?;
                sys::wait_for(child, 0)?;
            }
            ballast.walk()
        })();
        stop.store(true, Ordering::Relaxed);
        done.and(changer.join().expect("the thread does not panic"))
    })?;
    met.some("children with data where code was")
}

/// What keeps code from others' children goes with it where it moves, and must not be there when it is data.
fn fork_code_moves(ctx: &Ctx) -> Outcome {
    const THREADS: usize = 3;
    const MOST: usize = 64;
    let rwx = sys::RW | libc::PROT_EXEC;
    let (field, mut ballast) = ctx.evicted()?;
    // Pieces, and where each was when it was filled.
    let pieces: Vec<Mutex<Option<(Span, usize)>>> = (0..16).map(|_| Mutex::new(None)).collect();
    let (all, stop) = (RwLock::new(()), AtomicBool::new(false));
    let change = |piece: &mut Option<(Span, usize)>, dice: &mut Dice| -> Outcome {
        let Some((span, origin)) = piece else {
            let span = sys::map((1 + dice.roll(MOST)) * PAGE)?;
            sys::protect(span, rwx)?;
            span.fill(1);
            *piece = Some((span, span.start));
            return Ok(());
        };
        match dice.roll(5) {
            0 => {
                sys::unmap(*span)?;
                *piece = None;
            }
            1 => {
                sys::protect(*span, rwx)?;
                let grown = span.len + (1 + dice.roll(16)) * PAGE;
                *span = sys::remap(*span, grown, libc::MREMAP_MAYMOVE, 0)?;
                span.fill(1);
                *origin = span.start;
            }
            2 => sys::protect(span.page(0), sys::RW)?,
            3 => sys::protect(*span, rwx)?,
            _ => span.check_as(*origin, 1)?,
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS)
            .map(|thread| {
                let (pieces, all, stop, change) = (&pieces, &all, &stop, &change);
                scope.spawn(move || -> Outcome {
                    let mut dice = Dice::new(thread);
                    while !stop.load(Ordering::Relaxed) {
                        let _no_fork = all.read().expect("nobody panics");
                        let mut piece = pieces[dice.roll(pieces.len())].lock().expect("nobody panics");
                        change(&mut piece, &mut dice)?;
                    }
                    Ok(())
                })
            })
            .collect();
        let deadline = ctx.deadline();
        let done = (|| {
            while Instant::now() < deadline {
                let still = all.write().expect("nobody panics");
                let child = sys::fork(|| {
                    for piece in &pieces {
                        let piece = piece.lock().map_err(|_| Stop::Wrong("a lock".into()))?;
                        piece.map_or(Ok(()), |(span, origin)| span.check_as(origin, 1))?;
                    }
                    field.part(0, 64 * PAGE).check(1)
                })?;
                drop(still);
                sys::wait_for(child, 0)?;
            }
            ballast.walk()
        })();
        stop.store(true, Ordering::Relaxed);
        threads
            .into_iter()
            .fold(done, |done, thread| done.and(thread.join().expect("the thread does not panic")))
    })?;
    field.check(1)
}

/// What can be executed and is of a file: the child has what its parent has, also what the file has not.
fn fork_code_files(ctx: &Ctx) -> Outcome {
    const LEN: usize = 4 * PAGE;
    const CODE: libc::c_int = libc::PROT_READ | libc::PROT_EXEC;
    let (field, mut ballast) = ctx.evicted()?;
    let path = std::env::temp_dir().join(format!("pageout-code-{}", std::process::id()));
    std::fs::write(&path, [1; LEN])?;
    // One that is as it was when the program began, and two that are new.
    let old = std::fs::File::open(std::env::current_exe()?)?;
    let (file, other) = (std::fs::File::open(&path)?, sys::scratch_file(0)?);
    sys::write_all(other.as_raw_fd(), &[2; LEN])?;
    let map = |at: usize, fd: i32| -> Result<*mut u8, Stop> {
        let flags = libc::MAP_PRIVATE | if at == 0 { 0 } else { libc::MAP_FIXED };
        Ok(sys::map_file(at, LEN, CODE, flags, fd)?.start as *mut u8)
    };
    let (old, file, other) = (old.as_raw_fd(), file.as_raw_fd(), other.as_raw_fd());
    let codes = [map(0, old)?, map(0, old)?, map(0, old)?, map(0, file)?, map(0, other)?];
    let [_, patched, replaced, ..] = codes;
    const FIRST: u8 = 0x7f; // of an executable
    for wanted in [[FIRST, FIRST, FIRST, 1, 2], [FIRST, 9, FIRST, 1, 2], [FIRST, 9, 2, 1, 2]] {
        let child = sys::fork(|| {
            // SAFETY: mapped above.
            let found = codes.map(|code| unsafe { code.read_volatile() });
            ensure!(found == wanted, "{found:?} instead of {wanted:?}");
            field.part(0, 64 * PAGE).check(1)
        })?;
        sys::wait_for(child, 0)?;
        if wanted[1] == FIRST {
            sys::protect(Span::new(patched as usize, LEN), sys::RW)?;
            // SAFETY: mapped above.
            unsafe { patched.write_volatile(9) };
            sys::protect(Span::new(patched as usize, LEN), CODE)?;
        } else {
            map(replaced as usize, other)?;
        }
        ballast.walk()?;
    }
    std::fs::remove_file(path)?;
    field.check(1)
}
