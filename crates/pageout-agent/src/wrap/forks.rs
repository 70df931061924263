//! Forks and clones.

use super::{bring_in, fail, Next};
use crate::{dispatch, exit, fork, keeper, sys};
use core::ffi::{c_char, c_int, c_long, c_void};
use core::sync::atomic::{AtomicU64, Ordering};
use linux_raw_sys::general as raw;
use rustix::fd::AsRawFd;
use rustix::io::Errno;

static FORK: Next = Next::new(c"fork");
static BARE_FORK: Next = Next::new(c"_Fork");
static FORKPTY: Next = Next::new(c"forkpty");
static CLONE: Next = Next::new(c"clone");

/// Before `main`.
pub fn prepare() {
    for next in [&FORK, &BARE_FORK, &FORKPTY, &CLONE] {
        next.get();
    }
}

type Fork = unsafe extern "C" fn() -> c_int;

/// A fork by libc, which runs its handlers of fork, or not (`handles`). Its child is ours from the clone on.
fn fork_by(handles: bool, libc: impl FnOnce() -> c_int) -> c_int {
    let Some(mut turn) = fork::before() else { return fail(Errno::AGAIN) };
    let dispatched = turn.is_out() && dispatch::begin();
    if turn.is_out() && !dispatched && !turn.bring_home() {
        turn.end();
        return fail(Errno::NOMEM);
    }
    turn.handlers_begin();
    let child = libc();
    turn.handlers_end();
    if dispatched {
        dispatch::end();
    }
    if child == 0 {
        // Else our handler has run.
        if !(handles && keeper::is_prepared()) {
            fork::child();
        }
        turn.restore();
    } else {
        turn.end();
    }
    child
}

/// See the table of [`super`].
#[no_mangle]
pub extern "C" fn fork() -> c_int {
    // SAFETY: libc's function of that name.
    fork_by(true, || unsafe { core::mem::transmute::<usize, Fork>(FORK.get())() })
}

/// See the table of [`super`]: another name of `fork`.
#[no_mangle]
pub extern "C" fn __fork() -> c_int {
    fork()
}

/// See the table of [`super`]. Runs no handlers of its own, so the child's keeper is started here.
#[no_mangle]
pub extern "C" fn _Fork() -> c_int {
    fork_by(false, || {
        dispatch::block();
        // SAFETY: libc's function of that name.
        unsafe { core::mem::transmute::<usize, Fork>(BARE_FORK.get())() }
    })
}

/// See the table of [`super`]: as libc's, by our `fork`.
#[no_mangle]
pub extern "C" fn daemon(keep_directory: c_int, keep_streams: c_int) -> c_int {
    match fork() {
        -1 => return -1,
        0 => {}
        _ => sys::exit_group(0),
    }
    if let Err(errno) = rustix::process::setsid() {
        return fail(errno);
    }
    if keep_directory == 0 {
        let _ = rustix::process::chdir(c"/");
    }
    if keep_streams == 0 {
        let null = rustix::fs::open(c"/dev/null", rustix::fs::OFlags::RDWR, rustix::fs::Mode::empty());
        let null = match null {
            Ok(null) => null,
            Err(errno) => return fail(errno),
        };
        let _ = rustix::stdio::dup2_stdin(&null);
        let _ = rustix::stdio::dup2_stdout(&null);
        let _ = rustix::stdio::dup2_stderr(&null);
        // One of them was closed, and it is that.
        if null.as_raw_fd() <= 2 {
            core::mem::forget(null);
        }
    }
    0
}

type ForkPty = unsafe extern "C" fn(*mut c_int, *mut c_char, *const c_void, *const c_void) -> c_int;

/// See the table of [`super`].
///
/// # Safety
/// As libc's.
#[no_mangle]
pub unsafe extern "C" fn forkpty(
    master: *mut c_int,
    name: *mut c_char,
    terminal: *const c_void,
    window: *const c_void,
) -> c_int {
    // SAFETY: libc's function of that name; arguments as the caller promises.
    fork_by(true, || unsafe {
        core::mem::transmute::<usize, ForkPty>(FORKPTY.get())(master, name, terminal, window)
    })
}

/// In the child of a clone of our own, which is on its parent's stack.
pub(super) fn begin_child(turn: &fork::Turn) {
    begin_child_by(turn, fork::child_inherits);
}

fn begin_child_by(turn: &fork::Turn, inherits: impl FnOnce()) {
    if turn.is_out() {
        inherits();
    } else {
        fork::child();
    }
}

/// In its parent, or where there is no child.
pub(super) fn end_clone(turn: fork::Turn, id: c_long) {
    if turn.is_out() {
        fork::cloned((id > 0).then_some(id as u32));
    }
    turn.end();
}

type Main = extern "C" fn(*mut c_void) -> c_int;
type Clone = unsafe extern "C" fn(
    Option<Main>,
    *mut c_void,
    c_int,
    *mut c_void,
    *mut c_void,
    *mut c_void,
    *mut c_void,
) -> c_int;

/// What a clone's child is to do.
#[repr(C)]
struct Start {
    main: Main,
    argument: *mut c_void,
}

struct Cloned {
    start: Start,
    turn: fork::Turn,
}

/// The child's signals, for when it is back on its own.
static CHILD_SIGNALS: AtomicU64 = AtomicU64::new(0);

extern "C" fn cloned(child: *mut c_void) -> Start {
    // SAFETY: on the stack of the caller of `clone`, of which this process has a copy that nobody has written to.
    let Cloned { start, turn } = unsafe { child.cast::<Cloned>().read() };
    begin_child_by(&turn, fork::inherit);
    CHILD_SIGNALS.store(turn.signals(), Ordering::Relaxed);
    start
}

// What libc's `clone` does, but for [`cloned`] before the program's function, on [`fork::CHILD_STACK`]. Not libc's: its code may
// not be there yet. The child's own stack is the program's, may be as small as a few hundred bytes, may be out, and may lie in the
// frame of a caller (D's collector): nothing is on it before that is where it belongs.
// Global within the library, as the others: who calls it may be compiled into another object.
core::arch::global_asm!(
    ".type pageout_bare_clone, @function",
    ".globl pageout_bare_clone",
    ".hidden pageout_bare_clone",
    "pageout_bare_clone:",
    "and rsi, -16",
    "mov r10, rcx",
    "mov eax, 56",
    "syscall",
    "test rax, rax",
    "jz 2f",
    "ret",
    "2:",
    "xor ebp, ebp",
    "mov r12, rsp",
    "lea rsp, [rip + {stack} + {size}]",
    "mov rdi, r9",
    "call {cloned}",
    "mov rsp, r12",
    "mov r12, rax",
    "mov r13, rdx",
    // rt_sigprocmask(SIG_SETMASK, signals, null, 8)
    "mov edi, 2",
    "lea rsi, [rip + {signals}]",
    "xor edx, edx",
    "mov r10d, 8",
    "mov eax, 14",
    "syscall",
    "mov rdi, r13",
    "call r12",
    "mov edi, eax",
    "mov eax, 60",
    "syscall",
    "ud2",
    ".size pageout_bare_clone, . - pageout_bare_clone",
    cloned = sym cloned,
    stack = sym fork::CHILD_STACK,
    size = const fork::CHILD_STACK_LEN,
    signals = sym CHILD_SIGNALS,
);

extern "C" {
    fn pageout_bare_clone(
        flags: c_long,
        stack: *mut c_void,
        parent: *mut c_void,
        child: *mut c_void,
        tls: *mut c_void,
        argument: *mut c_void,
    ) -> c_long;
}

/// Brings in where a clone says who the child is.
pub(super) fn bring_in_ids(flags: u64, parent: usize, child: usize) {
    if flags & u64::from(raw::CLONE_PARENT_SETTID | raw::CLONE_PIDFD) != 0 {
        bring_in(parent, 4);
    }
    if flags & u64::from(raw::CLONE_CHILD_SETTID) != 0 {
        bring_in(child, 4);
    }
}

/// Before a clone: has the word stay that the kernel clears when the child ends, if that shares the memory.
pub(super) fn keep_word(flags: u64, child: usize) {
    if flags & u64::from(raw::CLONE_VM) == 0 {
        return;
    }
    exit::expect_guest(flags & u64::from(raw::CLONE_NEWPID) != 0 || sys::children_are_elsewhere());
    if flags & u64::from(raw::CLONE_CHILD_CLEARTID) != 0 {
        exit::keep_word(child);
    }
}

/// See the table of [`super`]. Takes what libc's takes in `...`, there or not.
///
/// # Safety
/// As libc's.
#[no_mangle]
pub unsafe extern "C" fn clone(
    main: Option<Main>,
    stack: *mut c_void,
    flags: c_int,
    argument: *mut c_void,
    parent: *mut c_void,
    tls: *mut c_void,
    child: *mut c_void,
) -> c_int {
    // SAFETY: libc's function of that name.
    let next: Clone = unsafe { core::mem::transmute(CLONE.get()) };
    let (Some(main), false, false) = (main, stack.is_null(), flags as u32 & raw::CLONE_VM != 0) else {
        keep_word(flags as u64, child as usize);
        // SAFETY: as the caller promises.
        return unsafe { next(main, stack, flags, argument, parent, tls, child) };
    };
    let Some(turn) = fork::before() else { return fail(Errno::AGAIN) };
    if turn.is_out() {
        bring_in_ids(flags as u64, parent as usize, child as usize);
        if !fork::bequeath() {
            turn.end();
            return fail(Errno::NOMEM);
        }
    }
    let mut both = Cloned { start: Start { main, argument }, turn };
    // SAFETY: as the caller promises; the child reads its own copy of `both`.
    let id = unsafe { pageout_bare_clone(flags.into(), stack, parent, child, tls, (&raw mut both).cast()) };
    end_clone(both.turn, id);
    if id < 0 {
        return fail(Errno::from_raw_os_error(-id as i32));
    }
    id as c_int
}

/// See the table of [`super`]: another name of `clone`.
///
/// # Safety
/// As libc's.
#[no_mangle]
pub unsafe extern "C" fn __clone(
    main: Option<Main>,
    stack: *mut c_void,
    flags: c_int,
    argument: *mut c_void,
    parent: *mut c_void,
    tls: *mut c_void,
    child: *mut c_void,
) -> c_int {
    // SAFETY: as the caller promises.
    unsafe { clone(main, stack, flags, argument, parent, tls, child) }
}
