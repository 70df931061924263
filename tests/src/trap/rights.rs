//! Rights given up, early or late: what the engine needs later it must have by then, or say so.

use super::load::{together, Mover};
use super::procs::go_on;
use super::span::{Span, BLOCK, PAGE};
use super::{ensure, sys, Ctx, Outcome, Stop, Trap};
use std::ffi::CString;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::ffi::OsStrExt;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

pub const TRAPS: &[Trap] = &[
    Trap::new("drop-early", "becomes an ordinary user before it needs memory", drop_early).may_refuse(),
    Trap::new("drop-late", "becomes an ordinary user when memory is out", drop_late),
    Trap::new("seccomp-early", "forbids most calls before it needs memory", seccomp_early).may_refuse(),
    Trap::new("seccomp-late", "forbids most calls to all threads when memory is out", seccomp_late),
    Trap::new("seccomp-kill", "the same; a forbidden call kills", seccomp_kill),
    Trap::new("seccomp-populate", "has memory populated where a filter allows no advice", seccomp_populate),
    Trap::new("seccomp-moves", "moves memory where a filter allows hardly more", seccomp_moves),
    Trap::new(
        "seccomp-moves-threads",
        "the same with threads, which may not even wait for each other",
        seccomp_moves_threads,
    )
    .may_log(),
    Trap::new("chroot-early", "goes into an empty directory before it needs memory", chroot_early)
        .may_refuse(),
    Trap::new("chroot-late", "goes into an empty directory when memory is out", chroot_late),
    Trap::new("drop-fork", "becomes another user with memory out, and forks", drop_fork).may_log(),
    Trap::new(
        "drop-fork-data",
        "the same, with a file of data in the place of standard error",
        drop_fork_data,
    )
    .may_log(),
    Trap::new("chroot-fork", "goes into an empty directory with memory out, and forks", chroot_fork)
        .may_log(),
    Trap::new(
        "mounts-fork",
        "has something else mounted over run's socket, with memory out, and forks",
        mounts_fork,
    )
    .may_log(),
    Trap::new("descriptors-fork", "may have hardly any descriptors, and forks", descriptors_fork).may_log(),
    Trap::new("seccomp-trap", "a filter raises SIGSYS where it forks", seccomp_trap).may_log(),
    Trap::new("userns-early", "enters a user namespace before it needs memory", userns_early).may_refuse(),
    Trap::new("undumpable", "makes itself unreadable for others of its user", undumpable),
];

const NOBODY: libc::uid_t = 65534;

fn become_nobody() -> Outcome {
    if !sys::is_root() {
        return Err(Stop::Skip("only root can become another user".into()));
    }
    // SAFETY: numbers only; the C library tells all threads.
    unsafe {
        sys::ret("setgroups", libc::setgroups(0, std::ptr::null()))?;
        sys::ret("setresgid", libc::setresgid(NOBODY, NOBODY, NOBODY))?;
        sys::ret("setresuid", libc::setresuid(NOBODY, NOBODY, NOBODY)).map(drop)
    }
}

/// Does something to itself, then needs memory.
fn early(ctx: &Ctx, act: impl Fn() -> Outcome) -> Outcome {
    act()?;
    let (field, mut ballast) = ctx.evicted()?;
    go_on(field, &mut ballast)
}

/// Has threads and memory out, does something to itself, then goes on.
fn late(ctx: &Ctx, act: impl Fn() -> Outcome + Sync) -> Outcome {
    let (field, mut ballast) = ctx.evicted()?;
    let other = sys::map(ctx.size / 8)?;
    other.fill(1);
    let stop = AtomicBool::new(false);
    let other_runs = AtomicBool::new(false);
    together(2, |index| {
        if index == 0 {
            while !stop.load(Ordering::Relaxed) {
                other_runs.store(true, Ordering::Relaxed);
                other.check(1)?;
                other.fill(1);
            }
            return Ok(());
        }
        // The C library's calls at the start of a thread must be behind it: `act` may forbid them.
        while !other_runs.load(Ordering::Relaxed) {
            std::thread::yield_now();
        }
        let done = act().and_then(|()| go_on_alone(field));
        stop.store(true, Ordering::Relaxed);
        done
    })?;
    ballast.walk()?;
    field.check(3)
}

/// As [`go_on`], with new memory instead of ballast.
fn go_on_alone(field: Span) -> Outcome {
    for generation in 2..4 {
        field.check(generation - 1)?;
        field.fill(generation);
    }
    let fresh = sys::map(4 * BLOCK)?;
    fresh.fill(1);
    fresh.check(1)?;
    sys::advise(fresh, libc::MADV_DONTNEED)?;
    fresh.check_zero()?;
    sys::unmap(fresh)
}

fn drop_early(ctx: &Ctx) -> Outcome {
    early(ctx, become_nobody)
}

fn drop_late(ctx: &Ctx) -> Outcome {
    late(ctx, become_nobody)
}

/// The calls of a program that has all its files open.
const ALLOWED: &[libc::c_long] = &[
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_mmap,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_mprotect,
    libc::SYS_madvise,
    libc::SYS_brk,
    libc::SYS_futex,
    libc::SYS_sched_yield,
    libc::SYS_rt_sigreturn,
    libc::SYS_rt_sigprocmask,
    libc::SYS_sigaltstack,
    libc::SYS_clock_nanosleep,
];

/// Puts a filter on all threads: what is not in the list meets `otherwise`.
fn forbid(otherwise: u32) -> Outcome {
    put_filter(ALLOWED, libc::SECCOMP_RET_ALLOW, otherwise)
}

/// Puts a filter on all threads that refuses one call.
pub fn refuse(call: libc::c_long) -> Outcome {
    put_filter(&[call], REFUSE, libc::SECCOMP_RET_ALLOW)
}

fn put_filter(calls: &[libc::c_long], answer: u32, otherwise: u32) -> Outcome {
    let statement = |code: u32, k: u32| libc::sock_filter { code: code as u16, jt: 0, jf: 0, k };
    // The call's number is the first word of the data.
    let mut filter = vec![statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0)];
    for &call in calls {
        let code = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
        filter.push(libc::sock_filter { code, jt: 0, jf: 1, k: call as u32 });
        filter.push(statement(libc::BPF_RET | libc::BPF_K, answer));
    }
    filter.push(statement(libc::BPF_RET | libc::BPF_K, otherwise));
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: the program is whole.
    unsafe {
        sys::ret("prctl", libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))?;
        let (mode, flags) = (libc::SECCOMP_SET_MODE_FILTER, libc::SECCOMP_FILTER_FLAG_TSYNC);
        let r = sys::ret("seccomp", libc::syscall(libc::SYS_seccomp, mode, flags, &raw const program))?;
        ensure!(r == 0, "thread {r} could not be given the filter");
    }
    Ok(())
}

const REFUSE: u32 = libc::SECCOMP_RET_ERRNO | libc::EPERM as u32;

fn seccomp_early(ctx: &Ctx) -> Outcome {
    early(ctx, || forbid(REFUSE))
}

fn seccomp_late(ctx: &Ctx) -> Outcome {
    late(ctx, || forbid(REFUSE))
}

fn seccomp_kill(ctx: &Ctx) -> Outcome {
    late(ctx, || forbid(libc::SECCOMP_RET_KILL_PROCESS))
}

fn seccomp_populate(ctx: &Ctx) -> Outcome {
    let (field, _ballast) = ctx.evicted()?;
    let allowed: Vec<_> = ALLOWED.iter().copied().filter(|call| *call != libc::SYS_madvise).collect();
    let child = sys::fork(|| {
        put_filter(&allowed, libc::SECCOMP_RET_ALLOW, libc::SECCOMP_RET_KILL_PROCESS)?;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_POPULATE;
        let populated = sys::map_at(0, 8 << 20, libc::PROT_READ | libc::PROT_WRITE, flags)?;
        populated.check_zero()?;
        populated.fill(1);
        populated.check(1)?;
        field.check(1)
    })?;
    sys::wait_for(child, 0)
}

/// What a lone thread needs that only moves what it has, and ends.
const HARDLY: &[libc::c_long] = &[
    libc::SYS_write,
    libc::SYS_exit_group,
    libc::SYS_mmap,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_brk,
    libc::SYS_sigaltstack,
];

fn seccomp_moves(ctx: &Ctx) -> Outcome {
    const ORIGIN: usize = 0x1000_0000;
    const STEP: usize = 64 * PAGE;
    let (field, mut ballast) = ctx.evicted()?;
    let mut object = Span::new(0, 0);
    put_filter(HARDLY, libc::SECCOMP_RET_ALLOW, libc::SECCOMP_RET_KILL_PROCESS)?;
    let mut part = Mover::new(field.part(0, STEP), Mover::place(0));
    let rest = field.part(STEP, field.len - STEP);
    for round in 0..400 {
        part.go()?;
        part.check()?;
        // SAFETY: null, or what the last round got.
        let at = unsafe { libc::realloc(object.as_ptr(), object.len + PAGE) } as usize;
        ensure!(at != 0, "realloc failed");
        object = Span::new(at, object.len + PAGE);
        object.part(object.len - PAGE, PAGE).fill_as(ORIGIN + object.len, 1);
        if round % 100 == 0 {
            ballast.walk()?;
        }
    }
    rest.check(1)?;
    object
        .pieces(PAGE)
        .enumerate()
        .try_for_each(|(page, piece)| piece.check_as(ORIGIN + (page + 1) * PAGE, 1))
}

fn seccomp_moves_threads(ctx: &Ctx) -> Outcome {
    const LEN: usize = 16 * PAGE;
    const COUNT: usize = 3;
    let (field, _ballast) = ctx.evicted()?;
    let child = sys::fork(|| {
        let (begun, filtered, ended) = (AtomicUsize::new(0), AtomicBool::new(false), AtomicUsize::new(0));
        let moves = |index: usize| {
            let mut mine = Mover::new(field.part(index * LEN, LEN), Mover::place(index));
            begun.fetch_add(1, Ordering::SeqCst);
            while !filtered.load(Ordering::SeqCst) {
                std::hint::spin_loop();
            }
            for round in 0..2000 {
                mine.go()?;
                mine.check_page(round % 16)?;
            }
            mine.check()
        };
        // Nothing of the threads is called that a filter may kill: who is done waits for the end.
        std::thread::scope(|scope| {
            for index in 1..COUNT {
                let (moves, ended) = (&moves, &ended);
                scope.spawn(move || {
                    if let Err(stop) = moves(index) {
                        sys::leave(Err(stop));
                    }
                    ended.fetch_add(1, Ordering::SeqCst);
                    loop {
                        std::hint::spin_loop();
                    }
                });
            }
            while begun.load(Ordering::SeqCst) < COUNT - 1 {
                std::hint::spin_loop();
            }
            let filter = put_filter(HARDLY, libc::SECCOMP_RET_ALLOW, libc::SECCOMP_RET_KILL_PROCESS);
            filtered.store(true, Ordering::SeqCst);
            let outcome = filter.and_then(|()| moves(0));
            while outcome.is_ok() && ended.load(Ordering::SeqCst) < COUNT - 1 {
                std::hint::spin_loop();
            }
            sys::leave(outcome)
        })
    })?;
    sys::wait_for(child, 0)?;
    field.check(1)
}

fn into_empty_directory() -> Outcome {
    if !sys::is_root() {
        return Err(Stop::Skip("only root can chroot".into()));
    }
    let template = std::env::temp_dir().join("trap-XXXXXX");
    let mut path = CString::new(template.as_os_str().as_bytes())
        .map_err(|_| Stop::Wrong("TMPDIR with a NUL".into()))?
        .into_bytes_with_nul();
    // SAFETY: a C string that is written in place; the directory stays in use after its name is gone.
    unsafe {
        let path = path.as_mut_ptr().cast();
        ensure!(!libc::mkdtemp(path).is_null(), "mkdtemp failed");
        sys::ret("chdir", libc::chdir(path))?;
        sys::ret("rmdir", libc::rmdir(path))?;
        sys::ret("chroot", libc::chroot(c".".as_ptr())).map(drop)
    }
}

fn chroot_early(ctx: &Ctx) -> Outcome {
    early(ctx, into_empty_directory)
}

fn chroot_late(ctx: &Ctx) -> Outcome {
    late(ctx, into_empty_directory)
}

/// The child is right, or there is none.
fn fork_after(ctx: &Ctx, act: impl Fn() -> Outcome) -> Outcome {
    let (field, mut ballast) = ctx.evicted()?;
    ballast.walk()?;
    act()?;
    right_or_none(field)?;
    ballast.walk()?;
    field.check(1)
}

fn right_or_none(field: Span) -> Outcome {
    // SAFETY: the child calls nothing that keeps state and leaves by `_exit`.
    let child = unsafe { libc::fork() };
    if child == 0 {
        sys::leave(field.check(1));
    }
    if child > 0 || sys::errno() != libc::ENOMEM {
        sys::wait_for(sys::ret("fork", child)?, 0)?;
    }
    Ok(())
}

/// The child's keeper does not find run, and says so, but not there.
fn drop_fork_data(ctx: &Ctx) -> Outcome {
    let field = sys::map(2 * ctx.half())?;
    field.fill(1);
    let data = sys::scratch_file(0)?;
    let own = std::io::stderr().as_fd().try_clone_to_owned()?;
    // SAFETY: what was there is put back at the end.
    sys::ret("dup2", unsafe { libc::dup2(data.as_raw_fd(), 2) })?;
    sys::write_all(2, b"one")?;
    become_nobody()?;
    // What is left comes home.
    let (kept, rest) = (field.part(0, BLOCK), field.part(BLOCK, field.len - BLOCK));
    sys::unmap(rest)?;
    let child = sys::fork(|| sys::write_all(2, b"two"))?;
    sys::wait_for(child, 0)?;
    sys::write_all(2, b"three")?;
    // SAFETY: as above.
    sys::ret("dup2", unsafe { libc::dup2(own.as_raw_fd(), 2) })?;
    let mut found = [0; 64];
    let len = std::os::unix::fs::FileExt::read_at(&std::fs::File::from(data), &mut found, 0)?;
    ensure!(&found[..len] == b"onetwothree", "in the file is {}", String::from_utf8_lossy(&found[..len]));
    kept.check(1)
}

fn descriptors_fork(ctx: &Ctx) -> Outcome {
    const FEW: u64 = 4;
    let (field, mut ballast) = ctx.evicted()?;
    ballast.walk()?;
    sys::set_soft_limit(libc::RLIMIT_NOFILE, FEW)?;
    let child = sys::fork(|| field.check(1))?;
    sys::wait_for(child, 0)?;
    ballast.walk()?;
    sys::set_limit(libc::RLIMIT_NOFILE, FEW)?;
    right_or_none(field)?;
    ballast.walk()?;
    field.check(1)
}

/// As a sandbox does that answers calls itself.
extern "C" fn refuse_call(_: libc::c_int, _: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: a context of a signal, whose register takes the call's result.
    unsafe {
        let context = &mut *context.cast::<libc::ucontext_t>();
        context.uc_mcontext.gregs[libc::REG_RAX as usize] = -i64::from(libc::EPERM);
    }
}

fn seccomp_trap(ctx: &Ctx) -> Outcome {
    let (field, mut ballast) = ctx.evicted()?;
    ballast.walk()?;
    sys::handle(libc::SIGSYS, 0, refuse_call)?;
    put_filter(&[libc::SYS_clone], libc::SECCOMP_RET_TRAP, libc::SECCOMP_RET_ALLOW)?;
    for _ in 0..2 {
        // SAFETY: the child, which there is not, leaves at once.
        let child = unsafe { libc::fork() };
        if child == 0 {
            sys::leave(Ok(()));
        }
        ensure!(
            child == -1 && sys::errno() == libc::EPERM,
            "a fork that is refused: {child}, {}",
            sys::errno()
        );
        ballast.walk()?;
    }
    field.check(1)
}

fn drop_fork(ctx: &Ctx) -> Outcome {
    fork_after(ctx, become_nobody)
}

fn chroot_fork(ctx: &Ctx) -> Outcome {
    fork_after(ctx, into_empty_directory)
}

fn mounts_fork(ctx: &Ctx) -> Outcome {
    fork_after(ctx, || {
        // SAFETY: C strings.
        let done = unsafe {
            libc::unshare(libc::CLONE_NEWNS) == 0
                && libc::mount(
                    std::ptr::null(),
                    c"/".as_ptr(),
                    std::ptr::null(),
                    libc::MS_REC | libc::MS_PRIVATE,
                    std::ptr::null(),
                ) == 0
        };
        if !done {
            return Err(Stop::Skip(format!("mounts of its own: {}", std::io::Error::last_os_error())));
        }
        let Some(socket) = std::env::var_os(pageout::wire::ENV_RUN) else { return Ok(()) };
        let directory = std::path::Path::new(&socket).parent().map(|path| path.as_os_str().as_bytes());
        let directory = CString::new(directory.unwrap_or(b"/")).map_err(|_| Stop::Wrong("a NUL".into()))?;
        let tmpfs = c"tmpfs".as_ptr();
        // SAFETY: C strings.
        sys::ret("mount", unsafe { libc::mount(tmpfs, directory.as_ptr(), tmpfs, 0, std::ptr::null()) })
            .map(drop)
    })
}

fn userns_early(ctx: &Ctx) -> Outcome {
    early(ctx, || {
        // SAFETY: this program has one thread here.
        if unsafe { libc::unshare(libc::CLONE_NEWUSER) } != 0 {
            let why = std::io::Error::last_os_error();
            return Err(Stop::Skip(format!("unshare(CLONE_NEWUSER): {why}")));
        }
        Ok(())
    })
}

fn undumpable(ctx: &Ctx) -> Outcome {
    early(ctx, || {
        // SAFETY: numbers only.
        sys::ret("prctl", unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 0) }).map(drop)
    })
}
