//! Processes: descriptors, daemons, programs started and replaced, guests in the same memory.

use super::load::{together, Ballast, Churn, Dice};
use super::span::{load, pattern, store, Span, PAGE};
use super::{ensure, sys, Ctx, Outcome, Stop, Trap};
use libc::{c_int, c_void};
use std::ffi::{CString, OsStr};
use std::io::Read;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

pub const TRAPS: &[Trap] = &[
    Trap::new("closefrom", "closes every descriptor beyond the third, again and again", closefrom),
    Trap::new("closed-streams", "forks and executes with its standard streams closed", closed_streams),
    Trap::new("descriptors", "sees no descriptors come that it did not open", descriptors),
    Trap::new("daemon", "daemon(): the parent exits, the child goes on", daemon).need_not_swap().may_log(),
    Trap::new("daemon-closefrom", "the same by two forks, all descriptors closed", daemon_closefrom)
        .need_not_swap()
        .may_log(),
    Trap::new(
        "group-killed",
        "a daemon, which has left its group, goes on when that is killed",
        group_killed,
    )
    .may_log(),
    Trap::new("fork-exec", "a child that reads, then becomes another program", fork_exec).may_log(),
    Trap::new("vfork", "a vfork child touches evicted memory, closes all and exits", vfork).may_log(),
    Trap::new("clone-vm", "a process that shares the memory and nothing else", clone_vm).may_log(),
    Trap::new(
        "guest-stays",
        "the same, for longer than who runs without an agent is overlooked",
        guest_stays,
    ),
    Trap::new("guest-alone", "the same, whose maker ends, is killed or becomes another program", guest_alone)
        .may_log(),
    Trap::new(
        "guest-chain",
        "such processes that each make the next and end, as their maker did",
        guest_chain,
    )
    .may_log(),
    Trap::new("guest-killed-maps", "such a process is killed as it maps and unmaps", guest_killed_maps)
        .may_log(),
    Trap::new(
        "guest-killed-grows",
        "such a process is killed as its memory grows; then the program makes threads",
        guest_killed_grows,
    )
    .may_log(),
    Trap::new("guest-killed", "such a process is killed as it forks; then the program forks", guest_killed)
        .may_log(),
    Trap::new(
        "guest-killed-early",
        "such processes are killed as they fork by number; then the program takes memory",
        guest_killed_early,
    )
    .may_log(),
    Trap::new(
        "forks-on",
        "kills who runs it while an eighth of --size is out, which fits, and forks",
        forks_on,
    )
    .helper(),
    Trap::new(
        "guest-killed-handlers",
        "such a process is killed in a handler of fork; the program goes on, and forks later",
        guest_killed_in_handler,
    )
    .may_log(),
    Trap::new("spawn", "posix_spawn by two threads while memory is evicted", spawn).may_log(),
    Trap::new("system", "system and popen", system).may_log(),
    Trap::new("exec", "becomes another program", exec).may_log(),
    Trap::new("exec-threads", "a thread becomes another program while others fault", exec_threads).may_log(),
    Trap::new(
        "exec-amid-threads",
        "[COUNT]: becomes itself again, COUNT times, amid threads that make threads",
        exec_amid_threads,
    )
    .need_not_swap()
    .may_log(),
    Trap::new("exec-filtered", "the same where a filter forbids to compare processes", exec_filtered)
        .may_log(),
    Trap::new("exec-first-ends", "executes a program whose first thread ends at once", exec_first_ends)
        .need_not_swap()
        .may_log(),
    Trap::new("exec-filtered-fork", "forks with memory out where a filter forbids that", exec_filtered_fork)
        .may_log(),
    Trap::new(
        "exec-unshared",
        "a program that is executed when its children are to be in a PID namespace",
        exec_unshared,
    )
    .may_log()
    .need_not_swap(),
    Trap::new("exec-fits", "[COUNT]: touches --size and becomes itself again, COUNT times", exec_fits)
        .helper(),
    Trap::new(
        "exec-real-time",
        "the same on one CPU, which a program of a real-time class has for itself",
        exec_real_time,
    )
    .may_log(),
    Trap::new("no-children", "waits for children that it does not have", no_children),
    Trap::new("no-children-init", "the same as the first process of a PID namespace", no_children_init)
        .need_not_swap()
        .may_log(),
    Trap::new("no-children-reaper", "the same as one that orphans come to, often another program", reaper)
        .need_not_swap()
        .may_log(),
];

/// The file of this program.
pub fn own_program() -> Result<PathBuf, Stop> {
    Ok(std::env::current_exe()?)
}

/// A process of the group has a child that leaves it, and needs memory; then the group is killed.
fn group_killed(ctx: &Ctx) -> Outcome {
    let ((said, say), (told, tell)) = (sys::pipe()?, sys::pipe()?);
    let member = sys::fork(|| {
        // SAFETY: numbers only.
        sys::ret("setpgid", unsafe { libc::setpgid(0, 0) })?;
        sys::fork(|| {
            // SAFETY: takes nothing.
            sys::ret("setsid", unsafe { libc::setsid() })?;
            let (field, mut ballast) = ctx.evicted()?;
            sys::write_all(say.as_raw_fd(), b"filled..")?;
            let mut word = [0u8; 8];
            sys::read_span(told.as_raw_fd(), Span::new(word.as_mut_ptr() as usize, 8))?;
            field.check(1)?;
            ballast.walk()?;
            sys::write_all(say.as_raw_fd(), b"all well")
        })?;
        loop {
            std::thread::sleep(Duration::from_secs(1));
        }
    })?;
    drop(say);
    let mut word = [0u8; 8];
    let to = Span::new(word.as_mut_ptr() as usize, 8);
    sys::read_span(said.as_raw_fd(), to)?;
    // SAFETY: a group of our own.
    sys::ret("kill", unsafe { libc::kill(-member, libc::SIGKILL) })?;
    sys::wait_status(member)?;
    // SAFETY: the same; asks whether there is anybody.
    ensure!(unsafe { libc::kill(-member, 0) } == -1, "somebody is left in the group");
    sys::write_all(tell.as_raw_fd(), b"go on...")?;
    sys::read_span(said.as_raw_fd(), to)
}

fn close_all() {
    // SAFETY: nothing of ours beyond the third descriptor is used after.
    unsafe {
        libc::close_range(3, libc::c_uint::MAX, 0);
        for fd in 3..1024 {
            libc::close(fd);
        }
    }
}

fn closefrom(ctx: &Ctx) -> Outcome {
    close_all();
    let (field, mut ballast) = ctx.evicted()?;
    for generation in 2..5 {
        close_all();
        // And a descriptor of the program's own over each number that could have been somebody's.
        for fd in 3..64 {
            // SAFETY: these descriptors are nobody's now.
            unsafe { libc::dup2(2, fd) };
        }
        field.check(generation - 1)?;
        field.fill(generation);
        ballast.walk()?;
    }
    close_all();
    field.check(4)
}

/// What a keeper opens may get these numbers.
fn closed_streams(ctx: &Ctx) -> Outcome {
    let (field, mut ballast) = ctx.evicted()?;
    let words = arguments(ctx, "fill", ctx.half())?;
    let child = sys::fork(|| {
        for stream in 0..3 {
            // SAFETY: the streams of this child alone, which says nothing any more.
            unsafe { libc::close(stream) };
        }
        let heir = sys::fork(|| field.check(1))?;
        sys::wait_for(heir, 0)?;
        let heir = sys::fork(|| Err(become_trap(&words)))?;
        sys::wait_for(heir, 0)
    })?;
    field.fill(2);
    ballast.walk()?;
    field.check(2)?;
    sys::wait_for(child, 0)
}

fn own_descriptors() -> Result<Vec<String>, Stop> {
    let mut all = Vec::new();
    for entry in std::fs::read_dir("/proc/self/fd")? {
        let path = entry?.path();
        // The directory that is being read is gone when its link is.
        if let Ok(target) = std::fs::read_link(&path) {
            all.push(format!("{} {}", path.display(), target.display()));
        }
    }
    all.sort();
    Ok(all)
}

fn descriptors(ctx: &Ctx) -> Outcome {
    let before = own_descriptors()?;
    let (field, mut ballast) = ctx.evicted()?;
    ballast.walk()?;
    let after = own_descriptors()?;
    ensure!(before == after, "descriptors were {before:?} and are {after:?}");
    field.check(1)
}

/// What the child of a daemon does: all the work, and it says how it went.
pub fn go_on(field: Span, ballast: &mut Ballast) -> Outcome {
    for generation in 2..4 {
        field.check(generation - 1)?;
        field.fill(generation);
        ballast.walk()?;
    }
    field.check(3)
}

fn daemon(ctx: &Ctx) -> Outcome {
    let (field, mut ballast) = ctx.evicted()?;
    let (read, write) = sys::pipe()?;
    // SAFETY: this program has one thread here, and what is closed is the child's.
    let child = sys::fork(|| unsafe {
        libc::close(0);
        sys::ret("daemon", libc::daemon(1, 0))?;
        let all = (0..3).all(|stream| libc::fcntl(stream, libc::F_GETFD) >= 0);
        sys::write_all(write.as_raw_fd(), if all { b"." } else { b"" })
    })?;
    sys::wait_for(child, 0)?;
    drop(write);
    let mut said = String::new();
    std::fs::File::from(read).read_to_string(&mut said).expect("a pipe can be read");
    ensure!(said == ".", "a standard stream is closed, which was closed before daemon()");
    // SAFETY: this program has one thread here.
    let done = unsafe { libc::daemon(1, 1) };
    sys::ret("daemon", done)?;
    go_on(field, &mut ballast)
}

fn daemon_closefrom(ctx: &Ctx) -> Outcome {
    close_all();
    let (field, mut ballast) = ctx.evicted()?;
    for _ in 0..2 {
        close_all();
        // SAFETY: this program has one thread here; the parents leave without destructors.
        unsafe {
            let child = libc::fork();
            if sys::ret("fork", child)? != 0 {
                libc::_exit(0);
            }
            libc::setsid();
        }
    }
    close_all();
    go_on(field, &mut ballast)
}

fn arguments(ctx: &Ctx, name: &str, size: usize) -> Result<Vec<CString>, Stop> {
    let program = own_program()?;
    let words = [
        program.as_os_str(),
        OsStr::new(name),
        OsStr::new("--size"),
        OsStr::new(&size.to_string()),
        OsStr::new("--seconds"),
        OsStr::new(&ctx.time.as_secs_f64().to_string()),
    ]
    .map(|word| CString::new(word.as_bytes()));
    words.into_iter().collect::<Result<_, _>>().map_err(|_| Stop::Wrong("an argument with a NUL".into()))
}

/// Becomes `trap NAME`; comes back only with an error.
fn become_trap(words: &[CString]) -> Stop {
    let mut pointers: Vec<_> = words.iter().map(|word| word.as_ptr()).collect();
    pointers.push(std::ptr::null());
    // SAFETY: the pointers are C strings and end with null.
    unsafe { libc::execv(pointers[0], pointers.as_ptr()) };
    Stop::Wrong(format!("exec: {}", std::io::Error::last_os_error()))
}

fn fork_exec(ctx: &Ctx) -> Outcome {
    let (field, mut ballast) = ctx.evicted()?;
    let words = arguments(ctx, "fill", ctx.half())?;
    // Its "ok" would be one too many on our own output.
    // SAFETY: the descriptors are opened here.
    let null =
        unsafe { sys::ret("open", libc::open(c"/dev/null".as_ptr(), libc::O_WRONLY | libc::O_CLOEXEC))? };
    let child = sys::fork(|| {
        field.part(0, field.len / 4 / PAGE * PAGE).check(1)?;
        // SAFETY: standard output of the child alone.
        unsafe { libc::dup2(null, 1) };
        Err(become_trap(&words))
    })?;
    field.fill(2);
    ballast.walk()?;
    field.check(2)?;
    sys::wait_for(child, 0)
}

/// What a process gets that shares our memory.
struct Guest {
    field: Span,
    right: AtomicBool,
}

/// Reads evicted memory, writes it, closes everything, leaves. Calls nothing that keeps state.
extern "C" fn guest(argument: *mut c_void) -> c_int {
    // SAFETY: `invite` passed it and waits.
    let guest = unsafe { &*(argument as *const Guest) };
    let (low, high) = guest.field.halves();
    high.fill(6);
    guest.right.store(low.check(1).is_ok() && high.check(6).is_ok(), Ordering::SeqCst);
    close_all();
    0
}

fn invite(ctx: &Ctx, flags: c_int) -> Outcome {
    let (field, mut ballast) = ctx.evicted()?;
    let stack = sys::map(256 << 10)?;
    let file = std::fs::File::open("/dev/null")?;
    for _ in 0..3 {
        let shared = Guest { field, right: AtomicBool::new(false) };
        // SAFETY: the stack is the child's alone; what is shared outlives it.
        let child = unsafe {
            let top = stack.end() as *mut c_void;
            libc::clone(
                guest,
                top,
                libc::CLONE_VM | flags | libc::SIGCHLD,
                (&raw const shared) as *mut c_void,
            )
        };
        sys::ret("clone", child)?;
        field.halves().0.check(1)?;
        sys::wait_for(child, 0)?;
        ensure!(shared.right.load(Ordering::SeqCst), "the other process found its memory wrong");
        ballast.walk()?;
        field.halves().1.check(6)?;
        field.fill(1);
        ballast.walk()?;
    }
    ensure!(file.metadata().is_ok(), "the child's closing closed our file");
    field.check(1)
}

fn vfork(ctx: &Ctx) -> Outcome {
    invite(ctx, libc::CLONE_VFORK)
}

fn clone_vm(ctx: &Ctx) -> Outcome {
    invite(ctx, 0)
}

fn guest_stays(ctx: &Ctx) -> Outcome {
    extern "C" fn rest(_: *mut c_void) -> c_int {
        std::thread::sleep(Duration::from_secs(3));
        0
    }
    let (field, _ballast) = ctx.evicted()?;
    let stack = sys::map(256 << 10)?;
    let top = stack.end() as *mut c_void;
    // SAFETY: the stack is the child's alone.
    let child = unsafe { libc::clone(rest, top, libc::CLONE_VM | libc::SIGCHLD, std::ptr::null_mut()) };
    sys::wait_for(sys::ret("clone", child)?, 0)?;
    field.check(1)
}

/// What a process gets that shares our memory, and the pipes that end when we do, and by which it tells what it found.
struct LoneGuest {
    field: Span,
    ends: [c_int; 2],
    tell: c_int,
}

extern "C" fn lone_guest(argument: *mut c_void) -> c_int {
    // SAFETY: `guest_alone` passed it, and never frees it.
    let guest = unsafe { &*(argument as *const LoneGuest) };
    // SAFETY: descriptors of this process alone, and a byte that takes what does not come.
    unsafe {
        libc::close(guest.ends[1]);
        libc::read(guest.ends[0], [0u8].as_mut_ptr().cast(), 1);
    }
    // Until whoever looks after the memory may have noticed.
    std::thread::sleep(Duration::from_millis(300));
    let found = guest.field.check(1).and_then(|()| sys::write_all(guest.tell, b"k"));
    sys::leave(found)
}

/// What each process of a chain gets.
struct Chain {
    field: Span,
    stacks: Vec<Span>,
    hop: AtomicUsize,
    tell: c_int,
}

/// Makes the next, but for the last, which looks at the memory.
extern "C" fn chain_guest(argument: *mut c_void) -> c_int {
    const HOPS: usize = 500;
    // SAFETY: `guest_chain` passed it, and never frees it.
    let chain = unsafe { &*(argument as *const Chain) };
    let hop = chain.hop.fetch_add(1, Ordering::SeqCst);
    if hop == HOPS {
        sys::leave(chain.field.check(1).and_then(|()| sys::write_all(chain.tell, b"k")))
    }
    let top = chain.stacks[hop % chain.stacks.len()].end() as *mut c_void;
    // SAFETY: the stack is the child's alone until as many others have ended as there are.
    let child = unsafe { libc::clone(chain_guest, top, libc::CLONE_VM | libc::SIGCHLD, argument) };
    // SAFETY: ends this process, without what would end all that share the memory.
    unsafe { libc::_exit((child < 0) as c_int) }
}

fn guest_chain(ctx: &Ctx) -> Outcome {
    let (said, tell) = sys::pipe()?;
    let maker = sys::fork(|| {
        let (field, _ballast) = ctx.evicted()?;
        let stacks = (0..16).map(|_| sys::map(256 << 10)).collect::<Result<Vec<_>, _>>()?;
        stacks.iter().for_each(|stack| stack.fill(1));
        let chain =
            Box::leak(Box::new(Chain { field, stacks, hop: AtomicUsize::new(0), tell: tell.as_raw_fd() }));
        chain_guest((&raw mut *chain).cast());
        Ok(())
    })?;
    sys::wait_for(maker, 0)?;
    drop(tell);
    let mut word = [0u8];
    sys::read_span(said.as_raw_fd(), Span::new(word.as_mut_ptr() as usize, 1))
}

/// Forks, past libc, until it is killed.
extern "C" fn forking_guest(begun: *mut c_void) -> c_int {
    loop {
        // SAFETY: `guest_killed` passed it and waits; a child of this process ends at once.
        unsafe {
            (*(begun as *const AtomicBool)).store(true, Ordering::SeqCst);
            match libc::syscall(libc::SYS_fork) {
                0 => libc::_exit(0),
                child => libc::waitpid(child as c_int, std::ptr::null_mut(), 0),
            };
        }
    }
}

fn guest_killed(ctx: &Ctx) -> Outcome {
    let (field, mut ballast) = ctx.evicted()?;
    let stack = sys::map(256 << 10)?;
    let mut dice = Dice::new(7);
    let deadline = ctx.deadline();
    while Instant::now() < deadline {
        let begun = AtomicBool::new(false);
        let argument = (&raw const begun) as *mut c_void;
        let (top, flags) = (stack.end() as *mut c_void, libc::CLONE_VM | libc::SIGCHLD);
        // SAFETY: the stack is the child's alone; what is shared outlives it.
        let guest = sys::ret("clone", unsafe { libc::clone(forking_guest, top, flags, argument) })?;
        while !begun.load(Ordering::SeqCst) {
            std::thread::yield_now();
        }
        std::thread::sleep(Duration::from_micros(dice.roll(30_000) as u64));
        // SAFETY: a child of ours, not waited for yet.
        unsafe { libc::kill(guest, libc::SIGKILL) };
        sys::wait_status(guest)?;
        // Who would fork next needs pages first.
        field.check(1)?;
        ballast.walk()?;
        let child = sys::fork(|| field.check(1))?;
        sys::wait_for(child, 0)?;
        ballast.walk()?;
    }
    field.check(1)
}

/// 0: nobody; 1: who forks next stays in its handler; 2: it is there.
static STAYS: AtomicUsize = AtomicUsize::new(0);

extern "C" fn stays() {
    if STAYS.compare_exchange(1, 2, Ordering::SeqCst, Ordering::SeqCst).is_ok() {
        loop {
            std::hint::spin_loop();
        }
    }
}

extern "C" fn guest_in_handler(_: *mut c_void) -> c_int {
    // SAFETY: it is killed in its handler.
    unsafe { libc::fork() }
}

/// It has the control block of its maker, which took its own mask for the one that the guest believed to have; and nothing left any
/// more until somebody forked, or ever, where no engine had begun before.
fn guest_killed_in_handler(ctx: &Ctx) -> Outcome {
    kill_guest_in_handler()?;
    let (field, mut ballast) = ctx.evicted()?;
    some_leaves(field, &mut ballast)?;
    kill_guest_in_handler()?;
    let blocked = |signal: c_int| -> Result<bool, Stop> {
        let status = std::fs::read_to_string("/proc/thread-self/status")?;
        let mask = status.lines().find_map(|line| line.strip_prefix("SigBlk:"));
        let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
        Ok(mask >> (signal - 1) & 1 != 0)
    };
    for how in [libc::SIG_BLOCK, libc::SIG_UNBLOCK] {
        // SAFETY: a set of our own.
        unsafe {
            let mut set = std::mem::zeroed();
            libc::sigemptyset(&mut set);
            libc::sigaddset(&mut set, libc::SIGUSR1);
            sys::ret("pthread_sigmask", libc::pthread_sigmask(how, &set, std::ptr::null_mut()))?;
        }
        ensure!(blocked(libc::SIGUSR1)? == (how == libc::SIG_BLOCK), "the mask does not change");
    }
    for _ in 0..2 {
        field.check(1)?;
        ballast.walk()?;
    }
    some_leaves(field, &mut ballast)?;
    let child = sys::fork(|| field.check(1))?;
    sys::wait_for(child, 0)?;
    ballast.walk()?;
    field.check(1)
}

/// Sooner or later, where there is a limit.
fn some_leaves(field: Span, ballast: &mut Ballast) -> Outcome {
    for _ in 0..100 {
        if !sys::under_pageout() || sys::resident(field)? < field.pages() {
            return Ok(());
        }
        ballast.walk()?;
    }
    Err(Stop::Wrong("nothing has left".into()))
}

fn kill_guest_in_handler() -> Outcome {
    // SAFETY: a function that stays.
    sys::ret("pthread_atfork", unsafe { libc::pthread_atfork(Some(stays), None, None) })?;
    let stack = sys::map(256 << 10)?;
    stack.fill(1);
    STAYS.store(1, Ordering::SeqCst);
    let (top, flags) = (stack.end() as *mut c_void, libc::CLONE_VM | libc::SIGCHLD);
    // SAFETY: the stack is the child's alone.
    let guest =
        sys::ret("clone", unsafe { libc::clone(guest_in_handler, top, flags, std::ptr::null_mut()) })?;
    while STAYS.load(Ordering::SeqCst) != 2 {
        std::thread::yield_now();
    }
    // SAFETY: a child of ours, not waited for yet.
    unsafe { libc::kill(guest, libc::SIGKILL) };
    sys::wait_status(guest)?;
    sys::unmap(stack)
}

/// A process that shares the memory, on a stack and with what it works on for itself alone, is killed after so many microseconds.
fn kill_guest(
    stack: Span,
    main: extern "C" fn(*mut c_void) -> c_int,
    argument: *mut c_void,
    after: u64,
) -> Outcome {
    let (top, flags) = (stack.end() as *mut c_void, libc::CLONE_VM | libc::SIGCHLD);
    // SAFETY: what it has it has for itself as long as it lives.
    let guest = sys::ret("clone", unsafe { libc::clone(main, top, flags, argument) })?;
    std::thread::sleep(Duration::from_micros(after));
    // SAFETY: a child of ours, not waited for yet.
    unsafe { libc::kill(guest, libc::SIGKILL) };
    sys::wait_status(guest).map(drop)
}

/// Forks, past libc.
extern "C" fn bare_forking_guest(_: *mut c_void) -> c_int {
    loop {
        // SAFETY: the child does nothing.
        let child = unsafe { libc::syscall(libc::SYS_fork) } as libc::pid_t;
        if child == 0 {
            sys::leave(Ok(()));
        }
        if child > 0 {
            let _ = sys::wait_status(child);
        }
    }
}

/// Their forks found no engine to ask, and are never over: that which began waited for them.
fn guest_killed_early(ctx: &Ctx) -> Outcome {
    let (stack, mut dice) = (sys::map(256 << 10)?, Dice::new(9));
    for _ in 0..100 {
        let after = 1000 + dice.roll(4000) as u64;
        kill_guest(stack, bare_forking_guest, std::ptr::null_mut(), after)?;
    }
    let (field, mut ballast) = ctx.evicted()?;
    if sys::under_pageout() {
        ballast.push_out(field)?;
    }
    field.check(1)
}

/// All comes home for it, where it fits: a child would not find who is to give it what is out.
fn forks_on(ctx: &Ctx) -> Outcome {
    let field = sys::map(ctx.size / 8 / PAGE * PAGE)?;
    field.fill(1);
    let mut ballast = Ballast::new(ctx.half())?;
    // More than comes home anyway.
    ballast.push_out(field)?;
    ballast.unmap()?;
    // SAFETY: has no conditions.
    sys::ret("kill", unsafe { libc::kill(libc::getppid(), libc::SIGKILL) })?;
    std::thread::sleep(Duration::from_millis(200));
    for _ in 0..3 {
        let child = sys::fork(|| field.check(1))?;
        sys::wait_for(child, 0)?;
    }
    field.check(1)
}

/// Maps, fills and unmaps at one place, by calls that need nothing of libc's.
extern "C" fn mapping_guest(place: *mut c_void) -> c_int {
    // SAFETY: a span that its maker keeps for it.
    let place = unsafe { *(place as *const Span) };
    loop {
        if sys::map_over(place, sys::RW, 0).is_ok() {
            (0..place.pages()).for_each(|at| store(place.page(at).start, 7));
            std::thread::sleep(Duration::from_millis(3));
            let _ = sys::unmap(place);
        }
    }
}

/// The kernel takes back what it was about to tell of its last call: what is mapped there next looked like what was there before.
fn guest_killed_maps(ctx: &Ctx) -> Outcome {
    let mut ballast = Ballast::new(2 * ctx.half())?;
    let (stack, place) = (sys::map(256 << 10)?, sys::map(8 << 20)?);
    let mut dice = Dice::new(8);
    let deadline = ctx.deadline() + 3 * ctx.time;
    while Instant::now() < deadline {
        let after = 5_000 + dice.roll(40_000) as u64;
        kill_guest(stack, mapping_guest, (&raw const place) as *mut c_void, after)?;
        // What is there no more is out for ever, where nobody heard of it: forks waited for it, or gave it to their child.
        if dice.roll(2) == 0 {
            let child = sys::fork(|| ballast.walk())?;
            sys::wait_for(child, 0)?;
        }
        sys::map_over(place, sys::RW, 0)?;
        let child = sys::fork(|| place.check_zero())?;
        sys::wait_for(child, 0)?;
        place.check_zero()?;
        place.fill(3);
        (0..2).try_for_each(|_| ballast.walk())?;
        place.check(3)?;
    }
    Ok(())
}

/// Has its memory grow and shrink.
extern "C" fn growing_guest(place: *mut c_void) -> c_int {
    loop {
        for (len, new_len) in [(PAGE, 2 * PAGE), (2 * PAGE, PAGE)] {
            // SAFETY: the mapping is the guest's alone.
            unsafe { libc::mremap(place, len, new_len, 0) };
        }
    }
}

/// It had the turn of those that fork: a new thread waited for it for ever.
fn guest_killed_grows(ctx: &Ctx) -> Outcome {
    let (field, mut ballast) = ctx.evicted()?;
    let (stack, room) = (sys::map(256 << 10)?, sys::map(2 << 20)?);
    sys::unmap(room.part(PAGE, room.len - PAGE))?;
    for after in (3_000..9_000).step_by(300) {
        kill_guest(stack, growing_guest, room.start as *mut c_void, after)?;
        if sys::is_mapped(room.part(PAGE, PAGE)) {
            sys::unmap(room.part(PAGE, PAGE))?;
        }
        // Its place is in no unit that is pinned already.
        let size = (2 << 20) + after as usize / 300 * PAGE * 16;
        let thread = std::thread::Builder::new().stack_size(size).spawn(|| {})?;
        thread.join().expect("the thread does not panic");
    }
    ballast.walk()?;
    field.check(1)
}

/// How a process goes that has a guest.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Goes {
    Ends,
    IsKilled,
    Executes,
}

fn guest_alone(ctx: &Ctx) -> Outcome {
    for goes in [Goes::Ends, Goes::IsKilled, Goes::Executes] {
        let (said, tell) = sys::pipe()?;
        let maker = sys::fork(|| {
            let (field, _ballast) = ctx.evicted()?;
            if goes == Goes::Ends {
                // As keepers are, and the guest.
                // SAFETY: a C string.
                unsafe { libc::prctl(libc::PR_SET_NAME, c"pageout".as_ptr()) };
            }
            let stack = sys::map(256 << 10)?;
            let (end, other_end) = sys::pipe()?;
            let ends = [end.as_raw_fd(), other_end.as_raw_fd()];
            let guest = Box::leak(Box::new(LoneGuest { field, ends, tell: tell.as_raw_fd() }));
            let waits = if goes == Goes::IsKilled { libc::CLONE_VFORK } else { 0 };
            if goes == Goes::IsKilled {
                std::thread::spawn(|| {
                    std::thread::sleep(Duration::from_millis(100));
                    // SAFETY: ends this process.
                    unsafe { libc::kill(libc::getpid(), libc::SIGKILL) }
                });
            }
            // SAFETY: the stack is the child's alone; what is shared outlives it.
            let child = unsafe {
                let (top, flags) = (stack.end() as *mut c_void, libc::CLONE_VM | waits | libc::SIGCHLD);
                libc::clone(lone_guest, top, flags, (&raw mut *guest).cast())
            };
            sys::ret("clone", child)?;
            if goes == Goes::Executes {
                let words = [c"sleep".as_ptr(), c"1".as_ptr(), std::ptr::null()];
                // SAFETY: C strings, and null at the end.
                sys::ret("exec", unsafe { libc::execvp(words[0], words.as_ptr()) })?;
            }
            Ok(())
        })?;
        let status = sys::wait_status(maker)?;
        let wanted = if goes == Goes::IsKilled { libc::SIGKILL } else { 0 };
        ensure!(status == wanted, "its maker ended with wait status {status:#x}");
        drop(tell);
        let mut word = [0u8];
        sys::read_span(said.as_raw_fd(), Span::new(word.as_mut_ptr() as usize, 1))?;
    }
    Ok(())
}

fn spawn(ctx: &Ctx) -> Outcome {
    let churn = Churn::start(ctx.half())?;
    let field = sys::map(ctx.half())?;
    field.fill(1);
    together(2, |index| {
        let mut dice = Dice::new(index);
        for _ in 0..5 {
            let done = Command::new("/bin/sh").args(["-c", "exit 3"]).status()?;
            ensure!(done.code() == Some(3), "sh ended with {done}");
            field.page(dice.roll(field.pages())).check(1)?;
        }
        let size = (ctx.size / 8).to_string();
        let out = Command::new(own_program()?).args(["fill", "--size", &size]).output()?;
        ensure!(out.status.success() && out.stdout == b"ok\n", "a program of our own ended with {out:?}");
        Ok(())
    })?;
    churn.end()?;
    field.check(1)
}

fn system(ctx: &Ctx) -> Outcome {
    let (field, mut ballast) = ctx.evicted()?;
    for code in [0, 3] {
        let command = if code == 0 { c"exit 0" } else { c"exit 3" };
        // SAFETY: a C string.
        let status = unsafe { libc::system(command.as_ptr()) };
        ensure!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == code, "system gave {status:#x}");
        ballast.walk()?;
    }
    let mut line = [0 as libc::c_char; 64];
    // SAFETY: C strings, and an array that takes the line.
    unsafe {
        let stream = libc::popen(c"echo hello; exit 4".as_ptr(), c"r".as_ptr());
        ensure!(!stream.is_null(), "popen failed");
        libc::fgets(line.as_mut_ptr(), line.len() as c_int, stream);
        let status = libc::pclose(stream);
        ensure!(libc::WEXITSTATUS(status) == 4, "pclose gave {status:#x}");
        ensure!(std::ffi::CStr::from_ptr(line.as_ptr()) == c"hello\n", "popen read something else");
    }
    field.check(1)
}

fn exec(ctx: &Ctx) -> Outcome {
    let (field, _ballast) = ctx.evicted()?;
    field.part(0, field.len / 2 / PAGE * PAGE).check(1)?;
    Err(become_trap(&arguments(ctx, "fill", ctx.size)?))
}

fn exec_fits(ctx: &Ctx) -> Outcome {
    let left = ctx.args.first().and_then(|count| count.parse().ok()).unwrap_or(0u32);
    let field = sys::map(ctx.size / PAGE * PAGE)?;
    field.fill(1);
    field.check(1)?;
    let Some(left) = left.checked_sub(1) else { return Ok(()) };
    let mut words = arguments(ctx, "exec-fits", ctx.size)?;
    words.push(CString::new(left.to_string()).expect("no zero"));
    Err(become_trap(&words))
}

fn exec_real_time(ctx: &Ctx) -> Outcome {
    // SAFETY: whole structures; zeroed is an empty set.
    let has_it = unsafe {
        let mut one: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(libc::sched_getcpu().max(0) as usize, &mut one);
        let mut priority: libc::sched_param = std::mem::zeroed();
        priority.sched_priority = 3;
        libc::sched_setaffinity(0, size_of_val(&one), &one) == 0
            && libc::sched_setscheduler(0, libc::SCHED_FIFO, &priority) == 0
    };
    if !has_it {
        return Err(Stop::Skip(format!("a real-time class: {}", std::io::Error::last_os_error())));
    }
    Err(become_trap(&arguments(ctx, "fill", ctx.size)?))
}

fn exec_threads(ctx: &Ctx) -> Outcome {
    let (field, _ballast) = ctx.evicted()?;
    let words = arguments(ctx, "fill", ctx.size)?;
    for index in 0..3 {
        std::thread::spawn(move || {
            let mut dice = Dice::new(index);
            loop {
                let page = field.page(dice.roll(field.pages()));
                if load(page.start) != pattern(page.start, 1) {
                    println!("wrong: a page changed");
                }
            }
        });
    }
    std::thread::sleep(ctx.time / 10);
    let thread = std::thread::spawn(move || Err(become_trap(&words)));
    super::load::join(thread)
}

/// Each is killed wherever it is, and the keeper of what was before has to end.
fn exec_amid_threads(ctx: &Ctx) -> Outcome {
    let most = if sys::under_pageout() { 1200usize } else { 20 };
    let left = ctx.args.first().and_then(|count| count.parse().ok()).unwrap_or(most);
    let Some(left) = left.checked_sub(1) else {
        return if sys::under_pageout() { are_children_of_run(2) } else { Ok(()) };
    };
    for _ in 0..8 {
        std::thread::spawn(|| loop {
            // Refused while another thread executes.
            let _ = std::thread::Builder::new().spawn(|| ()).map(|thread| thread.join());
        });
    }
    std::thread::sleep(Duration::from_micros(1000 + Dice::new(left).roll(2000) as u64));
    let mut words = arguments(ctx, "exec-amid-threads", ctx.size)?;
    words.push(CString::new(left.to_string()).expect("no zero"));
    Err(become_trap(&words))
}

/// As many as this process and its keeper are: that of the program before goes.
fn are_children_of_run(count: usize) -> Outcome {
    let run = std::os::unix::process::parent_id();
    let children = format!("/proc/{run}/task/{run}/children");
    let deadline = Instant::now() + Duration::from_secs(5);
    // Run's witness is always there.
    let counts = |pid: &&str| {
        std::fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name != "witness\n")
    };
    while std::fs::read_to_string(&children)?.split_whitespace().filter(counts).count() > count {
        ensure!(Instant::now() < deadline, "a keeper stays that has nothing to keep");
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

/// Before the keeper, which rests, has looked again. The second program has none.
fn exec_first_ends(ctx: &Ctx) -> Outcome {
    if ctx.args.is_empty() {
        if !sys::under_pageout() {
            return Ok(());
        }
        let mut words = arguments(ctx, "exec-first-ends", ctx.size)?;
        words.push(c"second".into());
        // SAFETY: no other thread looks at it.
        unsafe { libc::clearenv() };
        return Err(become_trap(&words));
    }
    std::thread::spawn(|| {
        let outcome = are_children_of_run(1);
        if outcome.is_ok() {
            println!("ok");
        }
        sys::leave(outcome)
    });
    // SAFETY: ends this thread, which nobody waits for.
    unsafe { libc::syscall(libc::SYS_exit, 0) };
    unreachable!("the thread has ended")
}

/// As in containers. The second program has a keeper that has the filter; the third looks whether that has gone.
fn exec_filtered(ctx: &Ctx) -> Outcome {
    let stage = ctx.args.first().map(String::as_str);
    if stage == Some("third") {
        if !sys::under_pageout() {
            return Ok(());
        }
        return are_children_of_run(2);
    }
    let next = if stage.is_none() { c"second" } else { c"third" };
    let mut words = arguments(ctx, "exec-filtered", ctx.size)?;
    words.push(next.into());
    if stage.is_none() {
        super::rights::refuse(libc::SYS_kcmp)?;
        return Err(become_trap(&words));
    }
    let (field, _ballast) = ctx.evicted()?;
    field.check(1)?;
    Err(become_trap(&words))
}

fn exec_filtered_fork(ctx: &Ctx) -> Outcome {
    if ctx.args.is_empty() {
        let mut words = arguments(ctx, "exec-filtered-fork", ctx.size)?;
        words.push(c"second".into());
        super::rights::refuse(libc::SYS_kcmp)?;
        return Err(become_trap(&words));
    }
    let (field, _ballast) = ctx.evicted()?;
    for _ in 0..3 {
        let child = sys::fork(|| field.check(1))?;
        sys::wait_for(child, 0)?;
    }
    field.check(1)
}

fn exec_unshared(ctx: &Ctx) -> Outcome {
    // SAFETY: numbers only.
    if unsafe { libc::unshare(libc::CLONE_NEWPID) } != 0 {
        return Err(Stop::Skip(format!("unshare(CLONE_NEWPID): {}", std::io::Error::last_os_error())));
    }
    Err(become_trap(&arguments(ctx, "fill", ctx.size / 8)?))
}

fn no_children(ctx: &Ctx) -> Outcome {
    let (field, mut ballast) = ctx.evicted()?;
    let mut status = 0;
    // SAFETY: the integer takes the status.
    let r = unsafe { libc::waitpid(-1, &mut status, 0) };
    ensure!(r == -1 && sys::errno() == libc::ECHILD, "waitpid found a child {r} that is not ours");
    let child = sys::fork(|| Ok(()));
    if let Ok(child) = child {
        // SAFETY: as above.
        let r = unsafe { libc::waitpid(-1, &mut status, 0) };
        ensure!(r == child, "waitpid gave {r}, not our child {child}");
    }
    ballast.walk()?;
    field.check(1)
}

/// Whoever waits for all children, its own and orphans, until there are none.
fn wait_for_all() -> Outcome {
    let deadline = Instant::now() + Duration::from_secs(3);
    loop {
        let mut status = 0;
        // SAFETY: the integer takes the status.
        match unsafe { libc::waitpid(-1, &mut status, libc::WNOHANG) } {
            -1 => break,
            0 => {
                ensure!(Instant::now() < deadline, "there is a child that does not end");
                std::thread::sleep(Duration::from_millis(2));
            }
            _ => ensure!(status == 0, "a child ended with {status:#x}"),
        }
    }
    ensure!(sys::errno() == libc::ECHILD, "waitpid: {}", std::io::Error::last_os_error());
    Ok(())
}

fn no_children_init(ctx: &Ctx) -> Outcome {
    // SAFETY: this program has one thread here.
    let enters = |what| unsafe { libc::unshare(what) } == 0;
    if !enters(libc::CLONE_NEWPID) && !enters(libc::CLONE_NEWUSER | libc::CLONE_NEWPID) {
        return Err(Stop::Skip(format!("unshare(CLONE_NEWPID): {}", std::io::Error::last_os_error())));
    }
    let init = sys::fork(|| {
        wait_for_all()?;
        let child = sys::fork(|| {
            sys::fork(|| Ok(()))?;
            Ok(())
        });
        child.map(drop)?;
        let (field, _ballast) = ctx.evicted()?;
        field.check(1)?;
        wait_for_all()
    })?;
    sys::wait_for(init, 0)
}

fn reaper(ctx: &Ctx) -> Outcome {
    const TIMES: usize = 5;
    let stage = ctx.args.first().map_or(0, |stage| stage.len());
    // SAFETY: numbers only.
    sys::ret("prctl", unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1) })?;
    sys::fork(|| Ok(()))?;
    wait_for_all()?;
    if stage < TIMES {
        let mut words = arguments(ctx, "no-children-reaper", ctx.size)?;
        words.push(CString::new("x".repeat(stage + 1)).unwrap_or_default());
        return Err(become_trap(&words));
    }
    let me = std::process::id();
    let children = std::fs::read_to_string(format!("/proc/{me}/task/{me}/children"))?;
    ensure!(children.split_whitespace().count() <= 3, "of programs that were before, these stay: {children}");
    Ok(())
}
