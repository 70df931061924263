//! Programs that catch, raise and die of signals while their memory is out.

use super::forks::reads_a_byte;
use super::load::{together, Ballast, Churn, Dice};
use super::span::{load, pattern, store, Span, PAGE};
use super::{ensure, sys, Ctx, End, Outcome, Stop, Trap};
use libc::{c_int, c_void, siginfo_t, ucontext_t};
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

pub const TRAPS: &[Trap] = &[
    Trap::new(
        "segv-barrier",
        "a write barrier: mprotect, and mprotect again in a SIGSEGV handler",
        segv_barrier,
    ),
    Trap::new("segv-jump", "leaves its SIGSEGV handler by a jump", segv_jump),
    Trap::new("bus-handler", "handles the SIGBUS of a file mapping that was cut off", bus_handler),
    Trap::new("alt-stack", "a signal stack in evicted memory", alt_stack),
    Trap::new("contexts", "makecontext stacks in evicted memory", contexts),
    Trap::new(
        "signal-storm",
        "a signal each millisecond, whose handler touches evicted memory",
        signal_storm,
    ),
    Trap::new(
        "signal-threads",
        "the same to a thread that makes threads, while memory comes and goes",
        signal_threads,
    ),
    Trap::new(
        "clone-storm",
        "clones while another thread sends what faults raise, to a handler whose memory is out",
        clone_storm,
    )
    .may_log(),
    Trap::new("signal-pending", "has blocked what an instruction raises, and it is pending", signal_pending),
    Trap::new("crash", "dies of SIGSEGV", crash).ends(End::Signal(libc::SIGSEGV)),
    Trap::new("abort", "dies of SIGABRT", abort).ends(End::Signal(libc::SIGABRT)),
    Trap::new("killed", "kills itself", killed).ends(End::Signal(libc::SIGKILL)),
    Trap::new("status", "exits with 42", status).ends(End::Exit(42)),
    Trap::new("term", "says ready, and ends well when SIGTERM comes", term).helper(),
    Trap::new("term-default", "says ready, and dies of SIGTERM", term_default).helper(),
    Trap::new("cat", "copies its input to its output by way of evicted memory", cat).helper(),
];

fn signal_pending(ctx: &Ctx) -> Outcome {
    let (field, mut ballast) = ctx.evicted()?;
    let signals = [libc::SIGTRAP, libc::SIGSEGV, libc::SIGBUS, libc::SIGILL, libc::SIGFPE, libc::SIGTERM];
    for signal in signals {
        // SAFETY: plain sets and numbers; the signal is blocked, and taken before its mask goes.
        unsafe {
            let mut set = std::mem::zeroed();
            let mut before = std::mem::zeroed();
            libc::sigemptyset(&mut set);
            libc::sigaddset(&mut set, signal);
            sys::ret("pthread_sigmask", libc::pthread_sigmask(libc::SIG_BLOCK, &set, &mut before))?;
            sys::ret("pthread_kill", libc::pthread_kill(libc::pthread_self(), signal))?;
            // Each of them passes by the agent.
            std::thread::spawn(|| ()).join().map_err(|_| Stop::Wrong("a thread failed".into()))?;
            let child = libc::fork();
            if child == 0 {
                libc::_exit(0);
            }
            sys::wait_for(sys::ret("fork", child)?, 0)?;
            let moved = sys::map(PAGE)?;
            let moved = libc::mremap(moved.start as *mut _, PAGE, 2 * PAGE, libc::MREMAP_MAYMOVE);
            ensure!(moved != libc::MAP_FAILED, "mremap failed");
            let at_once = libc::timespec { tv_sec: 0, tv_nsec: 0 };
            let got = libc::sigtimedwait(&set, std::ptr::null_mut(), &at_once);
            ensure!(got == signal, "{got} was pending, not {signal}");
            sys::ret(
                "pthread_sigmask",
                libc::pthread_sigmask(libc::SIG_SETMASK, &before, std::ptr::null_mut()),
            )?;
        }
    }
    ballast.walk()?;
    field.check(1)
}

/// Where the handlers may act, and how often they did.
static GUARDED_START: AtomicUsize = AtomicUsize::new(0);
static GUARDED_LEN: AtomicUsize = AtomicUsize::new(0);
static HANDLED: AtomicUsize = AtomicUsize::new(0);

fn guard(span: Span) {
    GUARDED_START.store(span.start, Ordering::SeqCst);
    GUARDED_LEN.store(span.len, Ordering::SeqCst);
    HANDLED.store(0, Ordering::SeqCst);
}

fn guarded() -> Span {
    Span::new(GUARDED_START.load(Ordering::SeqCst), GUARDED_LEN.load(Ordering::SeqCst))
}

/// The guarded page of the fault, if it is one of ours; any other fault must kill the program.
fn guarded_page(signal: c_int, info: *mut siginfo_t) -> Option<Span> {
    // SAFETY: the kernel passes a whole structure to a handler with SA_SIGINFO.
    let address = unsafe { (*info).si_addr() } as usize;
    let all = guarded();
    if address < all.start || address >= all.end() {
        // SAFETY: the fault happens again and ends the program.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
        return None;
    }
    HANDLED.fetch_add(1, Ordering::SeqCst);
    Some(Span::new(address / PAGE * PAGE, PAGE))
}

extern "C" fn unprotect(signal: c_int, info: *mut siginfo_t, _: *mut c_void) {
    if let Some(page) = guarded_page(signal, info) {
        let _ = sys::protect(page, sys::RW);
    }
}

fn segv_barrier(ctx: &Ctx) -> Outcome {
    sys::handle(libc::SIGSEGV, 0, unprotect)?;
    let (field, mut ballast) = ctx.evicted()?;
    let mut dice = Dice::new(1);
    for generation in 2..6 {
        guard(field);
        let prot = if generation % 2 == 0 { libc::PROT_READ } else { libc::PROT_NONE };
        sys::protect(field, prot)?;
        let mut cards: Vec<usize> = (0..1000).map(|_| dice.roll(field.pages())).collect();
        for &card in &cards {
            store(field.page(card).start, pattern(field.page(card).start, generation));
        }
        cards.sort_unstable();
        cards.dedup();
        let handled = HANDLED.load(Ordering::SeqCst);
        ensure!(handled == cards.len(), "{handled} faults for {} protected pages", cards.len());
        ballast.walk()?;
        sys::protect(field, sys::RW)?;
        for &card in &cards {
            let page = field.page(card);
            ensure!(load(page.start) == pattern(page.start, generation), "a write in the barrier is lost");
            page.part(8, PAGE - 8).check(1)?;
            page.fill(1);
        }
    }
    field.check(1)
}

/// The contexts of this trap program: 0 is the main one.
static CONTEXTS: AtomicPtr<ucontext_t> = AtomicPtr::new(std::ptr::null_mut());
/// The context that runs.
static CURRENT: AtomicUsize = AtomicUsize::new(0);

fn context(index: usize) -> *mut ucontext_t {
    // SAFETY: the callers made that many.
    unsafe { CONTEXTS.load(Ordering::SeqCst).add(index) }
}

/// Makes contexts, and gives each but the first a stack of the field and the function.
fn make_contexts(stacks: &[Span], body: extern "C" fn()) -> Outcome {
    let mut all: Vec<ucontext_t> = Vec::with_capacity(stacks.len() + 1);
    // SAFETY: zero is a valid context until getcontext fills it; the vector is never freed.
    unsafe {
        all.resize(stacks.len() + 1, std::mem::zeroed());
        CONTEXTS.store(all.leak().as_mut_ptr(), Ordering::SeqCst);
        for (index, stack) in stacks.iter().enumerate() {
            let new = context(index + 1);
            sys::ret("getcontext", libc::getcontext(new))?;
            (*new).uc_stack.ss_sp = stack.as_ptr();
            (*new).uc_stack.ss_size = stack.len;
            (*new).uc_link = context(0);
            libc::makecontext(new, body, 0);
        }
    }
    Ok(())
}

/// Runs a context until it comes back.
fn enter(index: usize) -> Outcome {
    CURRENT.store(index, Ordering::SeqCst);
    // SAFETY: both contexts are made; the main one is saved here.
    sys::ret("swapcontext", unsafe { libc::swapcontext(context(0), context(index)) }).map(drop)
}

extern "C" fn jump_out(signal: c_int, info: *mut siginfo_t, _: *mut c_void) {
    if guarded_page(signal, info).is_some() {
        // SAFETY: the main context was saved by `enter`.
        unsafe { libc::setcontext(context(0)) };
    }
}

extern "C" fn fall_into_guard() {
    load(guarded().start + CURRENT.load(Ordering::SeqCst) * PAGE);
}

fn segv_jump(ctx: &Ctx) -> Outcome {
    sys::handle(libc::SIGSEGV, 0, jump_out)?;
    let (field, mut ballast) = ctx.evicted()?;
    let (low, high) = field.halves();
    let protected = low.part(0, 64 * PAGE);
    sys::protect(protected, libc::PROT_NONE)?;
    guard(protected);
    let stacks: Vec<_> = high.pieces(64 << 10).take(32).collect();
    high.part(0, 32 * (64 << 10)).fill(2);
    make_contexts(&stacks, fall_into_guard)?;
    for index in 1..=32 {
        if index % 8 == 0 {
            ballast.walk()?;
        }
        enter(index)?;
        let handled = HANDLED.load(Ordering::SeqCst);
        ensure!(handled == index, "{handled} jumps instead of {index}");
    }
    sys::protect(protected, sys::RW)?;
    low.check(1)?;
    high.part(32 * (64 << 10), high.len - 32 * (64 << 10)).check(1)
}

extern "C" fn map_zeros(signal: c_int, info: *mut siginfo_t, _: *mut c_void) {
    if let Some(page) = guarded_page(signal, info) {
        let _ = sys::map_over(page, sys::RW, 0);
    }
}

fn bus_handler(ctx: &Ctx) -> Outcome {
    sys::handle(libc::SIGBUS, 0, map_zeros)?;
    let (field, mut ballast) = ctx.evicted()?;
    let file = sys::scratch_file(0)?;
    let pages = 256;
    // SAFETY: the descriptor is ours.
    let cut = |len: usize| sys::ret("ftruncate", unsafe { libc::ftruncate(file.as_raw_fd(), len as i64) });
    cut(pages * PAGE)?;
    let mapping = sys::map_file(0, pages * PAGE, sys::RW, libc::MAP_SHARED, file.as_raw_fd())?;
    mapping.fill(1);
    guard(mapping);
    cut(0)?;
    ballast.walk()?;
    for page in mapping.pieces(PAGE) {
        page.check_zero()?;
        page.fill(2);
    }
    ensure!(HANDLED.load(Ordering::SeqCst) == pages, "the SIGBUS handler was not called once a page");
    ballast.walk()?;
    mapping.check(2)?;
    field.check(1)
}

/// How deep the handler went into its stack, and whether it was right there.
static SIGNAL_DEPTH: AtomicUsize = AtomicUsize::new(0);

extern "C" fn use_stack(_: c_int, _: *mut siginfo_t, _: *mut c_void) {
    let mut words = [0u64; 8192];
    let here = Span::new(words.as_mut_ptr() as usize, std::mem::size_of_val(&words));
    here.fill(3);
    if here.check(3).is_ok() {
        SIGNAL_DEPTH.store(here.start, Ordering::SeqCst);
        HANDLED.fetch_add(1, Ordering::SeqCst);
    }
}

fn alt_stack(ctx: &Ctx) -> Outcome {
    let (field, mut ballast) = ctx.evicted()?;
    sys::handle(libc::SIGUSR1, libc::SA_ONSTACK, use_stack)?;
    let stack = field.part(field.len / 2 / PAGE * PAGE, 256 << 10);
    let stack_t = libc::stack_t { ss_sp: stack.as_ptr(), ss_flags: 0, ss_size: stack.len };
    // SAFETY: the stack is ours and stays.
    sys::ret("sigaltstack", unsafe { libc::sigaltstack(&stack_t, std::ptr::null_mut()) })?;
    for round in 1..=4 {
        ballast.walk()?;
        // SAFETY: the handler is set.
        unsafe { libc::raise(libc::SIGUSR1) };
        ensure!(HANDLED.load(Ordering::SeqCst) == round, "the handler was wrong about its stack");
        let depth = SIGNAL_DEPTH.load(Ordering::SeqCst);
        ensure!(depth > stack.start && depth < stack.end(), "the handler ran on another stack");
    }
    field.part(0, stack.start - field.start).check(1)?;
    field.part(stack.end() - field.start, field.end() - stack.end()).check(1)
}

/// A context of three turns; its data on its stack must be there at each.
extern "C" fn three_turns() {
    let mut words = [0u64; 16384];
    let here = Span::new(words.as_mut_ptr() as usize, std::mem::size_of_val(&words));
    for generation in 1..=3 {
        here.fill(generation);
        let index = CURRENT.load(Ordering::SeqCst);
        // SAFETY: both contexts are made.
        unsafe { libc::swapcontext(context(index), context(0)) };
        if here.check(generation).is_ok() {
            HANDLED.fetch_add(1, Ordering::SeqCst);
        }
    }
}

fn contexts(ctx: &Ctx) -> Outcome {
    let stack_len = 256 << 10;
    let field = sys::map(ctx.half())?;
    let stacks: Vec<_> = field.pieces(stack_len).collect();
    let mut ballast = Ballast::new(ctx.half())?;
    make_contexts(&stacks, three_turns)?;
    HANDLED.store(0, Ordering::SeqCst);
    for _ in 0..4 {
        for index in 1..=stacks.len() {
            enter(index)?;
        }
        ballast.walk()?;
    }
    let right = HANDLED.load(Ordering::SeqCst);
    ensure!(right == 3 * stacks.len(), "{right} of {} turns found their stack as it was", 3 * stacks.len());
    Ok(())
}

extern "C" fn touch_next(_: c_int, _: *mut siginfo_t, _: *mut c_void) {
    let field = guarded();
    let turn = HANDLED.fetch_add(1, Ordering::Relaxed);
    let page = field.page(turn * 97 % field.pages());
    if load(page.start) != pattern(page.start, 1) {
        // SAFETY: ends the program from a handler.
        unsafe { libc::abort() };
    }
}

fn signal_storm(ctx: &Ctx) -> Outcome {
    let (field, _) = ctx.evicted()?;
    let (seen, rest) = field.halves();
    guard(seen);
    sys::handle(libc::SIGALRM, libc::SA_RESTART, touch_next)?;
    let churn = Churn::start(ctx.half())?;
    let tick = libc::timeval { tv_sec: 0, tv_usec: 1000 };
    let none = libc::timeval { tv_sec: 0, tv_usec: 0 };
    let set = |period: libc::timeval| {
        let timer = libc::itimerval { it_interval: period, it_value: period };
        // SAFETY: the structure is whole.
        sys::ret("setitimer", unsafe { libc::setitimer(libc::ITIMER_REAL, &timer, std::ptr::null_mut()) })
    };
    set(tick)?;
    let (read_end, write_end) = sys::pipe()?;
    let (from, to) = rest.halves();
    let piece = 1 << 20;
    let deadline = ctx.deadline();
    let mut dice = Dice::new(1);
    while Instant::now() < deadline {
        let from = from.part(dice.roll((from.len - piece) / PAGE) * PAGE, piece);
        let to = to.part(dice.roll((to.len - piece) / PAGE) * PAGE, piece);
        // Neither call is ever interrupted for the program to see: the handler says SA_RESTART.
        together(2, |index| match index {
            0 => sys::write_span(write_end.as_raw_fd(), from),
            _ => sys::read_span(read_end.as_raw_fd(), to),
        })?;
        to.check_as(from.start, 1)?;
        to.fill(1);
    }
    set(none)?;
    churn.end()?;
    ensure!(HANDLED.load(Ordering::Relaxed) > 10, "the timer's signals did not come");
    field.check(1)
}

/// Does `work` while another thread sends this one a signal again and again.
fn amid_signals(signal: c_int, every: Duration, work: impl FnOnce() -> Outcome) -> Outcome {
    // SAFETY: has no conditions.
    let (me, over) = (unsafe { libc::pthread_self() }, AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                // SAFETY: that thread waits for this one.
                unsafe { libc::pthread_kill(me, signal) };
                std::thread::sleep(every);
            }
        });
        let done = work();
        over.store(true, Ordering::Relaxed);
        done
    })
}

/// Wherever the signal comes in the making of a thread, its handler gets its page.
fn signal_threads(ctx: &Ctx) -> Outcome {
    let (field, _) = ctx.evicted()?;
    guard(field);
    sys::handle(libc::SIGUSR1, libc::SA_RESTART, touch_next)?;
    let churn = Churn::start(ctx.half())?;
    let deadline = ctx.deadline();
    let stop = AtomicBool::new(false);
    amid_signals(libc::SIGUSR1, Duration::from_micros(20), || {
        std::thread::scope(|scope| {
            // What is taken up takes memory of the engine's.
            let other = scope.spawn(|| -> Outcome {
                while !stop.load(Ordering::Relaxed) {
                    let new = sys::map(4 << 20)?;
                    new.pieces(PAGE).for_each(|page| store(page.start, 1));
                    sys::unmap(new)?;
                }
                Ok(())
            });
            while Instant::now() < deadline {
                let _ = std::thread::spawn(|| {}).join();
            }
            stop.store(true, Ordering::Relaxed);
            other.join().expect("the thread does not panic")
        })
    })?;
    churn.end()?;
    ensure!(HANDLED.load(Ordering::Relaxed) > 0, "no signal came");
    field.check(1)
}

/// The handler waited for its page between a bequest and its clone, when nobody gets one.
fn clone_storm(ctx: &Ctx) -> Outcome {
    let (field, mut ballast) = ctx.evicted()?;
    guard(field);
    sys::handle(libc::SIGTRAP, libc::SA_RESTART, touch_next)?;
    let stack = sys::map(256 << 10)?;
    let deadline = ctx.deadline();
    amid_signals(libc::SIGTRAP, Duration::from_micros(200), || {
        let mut byte = field.page(7).as_ptr::<u8>().cast_const();
        while Instant::now() < deadline {
            let (top, argument) = (stack.end() as *mut c_void, (&raw mut byte).cast());
            // SAFETY: the child has a copy of all, and a stack of its own.
            let child = unsafe { libc::clone(reads_a_byte, top, libc::SIGCHLD, argument) };
            // SAFETY: a page of the field.
            sys::wait_for(sys::ret("clone", child)?, unsafe { byte.read() }.into())?;
            ballast.walk()?;
        }
        Ok(())
    })?;
    ensure!(HANDLED.load(Ordering::Relaxed) > 0, "no signal came");
    field.check(1)
}

fn crash(ctx: &Ctx) -> Outcome {
    let (field, _ballast) = ctx.evicted()?;
    field.check(1)?;
    say("checked")?;
    store(std::hint::black_box(16), 1);
    Err(Stop::Wrong("a write to address 16 went well".into()))
}

fn abort(ctx: &Ctx) -> Outcome {
    let (field, _ballast) = ctx.evicted()?;
    field.check(1)?;
    say("checked")?;
    std::process::abort()
}

fn killed(ctx: &Ctx) -> Outcome {
    let (field, _ballast) = ctx.evicted()?;
    field.check(1)?;
    say("checked")?;
    // SAFETY: has no conditions.
    sys::ret("kill", unsafe { libc::kill(libc::getpid(), libc::SIGKILL) })?;
    Err(Stop::Wrong("survived SIGKILL".into()))
}

fn status(ctx: &Ctx) -> Outcome {
    let (field, _ballast) = ctx.evicted()?;
    field.check(1)?;
    println!("ok");
    std::process::exit(42)
}

/// At once: what ends by a signal flushes nothing.
fn say(what: &str) -> Outcome {
    println!("{what}");
    Ok(std::io::stdout().flush()?)
}

extern "C" fn count(_: c_int, _: *mut siginfo_t, _: *mut c_void) {
    HANDLED.fetch_add(1, Ordering::SeqCst);
}

fn term(ctx: &Ctx) -> Outcome {
    sys::handle(libc::SIGTERM, 0, count)?;
    let (field, mut ballast) = ctx.evicted()?;
    say("ready")?;
    while HANDLED.load(Ordering::SeqCst) == 0 {
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    field.check(1)?;
    ballast.walk()
}

fn term_default(ctx: &Ctx) -> Outcome {
    let (_field, _ballast) = ctx.evicted()?;
    say("ready")?;
    loop {
        std::thread::sleep(std::time::Duration::from_secs(1));
    }
}

fn cat(ctx: &Ctx) -> Outcome {
    let mut input = Vec::new();
    std::io::stdin().read_to_end(&mut input)?;
    let mut ballast = Ballast::new(ctx.size)?;
    std::io::stdout().write_all(&input)?;
    std::io::stderr().write_all(b"copied\n")?;
    ballast.walk()?;
    Ok(())
}
