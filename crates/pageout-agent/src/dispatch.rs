//! Makes libc's `fork` clone under our control: between the clone and libc's own work in the child the child must
//! get its engine, for libc reads memory that may be out (its files, its arenas), and no handler of `fork` comes
//! before that.
//!
//! For the thread that forks, and from the last handler before the clone on, every system call raises SIGSYS (syscall
//! user dispatch, Linux 5.11). The handler makes the calls itself; at the clone it turns all this off again. The
//! child of a clone has no dispatch.

use crate::{fork, sys};
use core::arch::global_asm;
use core::ffi::c_int;
use core::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering};
use linux_raw_sys::general as raw;
use rustix::io::Errno;

const ALLOW: u8 = 0;
const BLOCK: u8 = 1;
/// Read by the kernel at each system call of the thread.
static SELECTOR: AtomicU8 = AtomicU8::new(ALLOW);
static ON: AtomicBool = AtomicBool::new(false);
/// SIGSYS's action before: handler, flags, restorer, mask.
static OLD: [AtomicUsize; 4] = [const { AtomicUsize::new(0) }; 4];

const SIGSYS: usize = raw::SIGSYS as usize;
/// In a mask of signals.
const SIGSYS_BIT: u64 = 1 << (SIGSYS - 1);
const PR_SET_SYSCALL_USER_DISPATCH: usize = 59;
/// `si_code` of a SIGSYS by dispatch.
const SYS_USER_DISPATCH: i32 = 2;

// Returns from the handler: the one system call that the kernel lets pass by its address.
global_asm!(
    ".type pageout_restore, @function",
    ".globl pageout_restore",
    ".hidden pageout_restore",
    "pageout_restore:",
    "mov eax, 15",
    "syscall",
    "ud2",
    ".size pageout_restore, . - pageout_restore",
);
/// Bytes of `pageout_restore`, and the address behind its system call among them.
const RESTORE_BYTES: usize = 9;

extern "C" {
    fn pageout_restore();
}

/// `struct ucontext`, as far as it is needed, by offsets of 8 bytes.
mod context {
    pub const R8: usize = 5;
    pub const R9: usize = 6;
    pub const R10: usize = 7;
    pub const RDI: usize = 13;
    pub const RSI: usize = 14;
    pub const RDX: usize = 17;
    pub const RAX: usize = 18;
    pub const MASK: usize = 37;
}

/// From here on [`block`] works, for the calling thread, which has the right to fork. False: this kernel, or a filter,
/// does not let us.
pub fn begin() -> bool {
    let handler = dispatched as unsafe extern "C" fn(c_int, *const u8, *mut u64);
    // All signals wait while the handler runs, but for this one: a filter raises it at a call that the handler makes, and
    // blocked it would kill.
    let action = [
        handler as usize,
        (raw::SA_SIGINFO | raw::SA_RESTORER | raw::SA_NODEFER) as usize,
        pageout_restore as unsafe extern "C" fn() as usize,
        !SIGSYS_BIT as usize,
    ];
    if !set_action(&action, Some(&OLD)) {
        return false;
    }
    SELECTOR.store(ALLOW, Ordering::Relaxed);
    let restore = pageout_restore as unsafe extern "C" fn() as usize;
    // SAFETY: the selector is there as long as the process.
    let on = unsafe {
        let arguments =
            [PR_SET_SYSCALL_USER_DISPATCH, 1, restore, RESTORE_BYTES, SELECTOR.as_ptr() as usize, 0];
        sys::call6(raw::__NR_prctl, arguments).is_ok()
    };
    ON.store(on, Ordering::Relaxed);
    if !on {
        restore_action();
    }
    on
}

/// From here on every system call of the thread is made by us, if [`begin`] was called. No handler of a signal may come between,
/// whose return is such a call.
pub fn block() {
    if ON.load(Ordering::Relaxed) {
        sys::block_setxid();
    }
    go_on();
}

fn go_on() {
    if ON.load(Ordering::Relaxed) {
        SELECTOR.store(BLOCK, Ordering::Relaxed);
    }
}

/// As it was before [`begin`]. In the child too.
pub fn end() {
    off();
    restore_action();
}

fn off() {
    SELECTOR.store(ALLOW, Ordering::Relaxed);
    ON.store(false, Ordering::Relaxed);
    // SAFETY: takes numbers.
    let _ = unsafe { sys::call6(raw::__NR_prctl, [PR_SET_SYSCALL_USER_DISPATCH, 0, 0, 0, 0, 0]) };
}

fn set_action(action: &[usize; 4], old: Option<&[AtomicUsize; 4]>) -> bool {
    let old = old.map_or(0, |old| old.as_ptr() as usize);
    // SAFETY: both are as long as the kernel's structure.
    unsafe { sys::call(raw::__NR_rt_sigaction, SIGSYS, action.as_ptr() as usize, old, 8).is_ok() }
}

fn restore_action() {
    set_action(&core::array::from_fn(|i| OLD[i].load(Ordering::Relaxed)), None);
}

/// A system call of the thread that forks; or somebody else's SIGSYS, which goes where it went before.
unsafe extern "C" fn dispatched(signal: c_int, info: *const u8, context: *mut u64) {
    // SAFETY: what the kernel gives to a handler.
    unsafe {
        if info.add(8).cast::<i32>().read() != SYS_USER_DISPATCH {
            return pass_on(signal, info, context);
        }
        SELECTOR.store(ALLOW, Ordering::Relaxed);
        let register = |at: usize| context.add(at).read() as usize;
        let number = register(context::RAX) as u32;
        let arguments = [context::RDI, context::RSI, context::RDX, context::R10, context::R8, context::R9];
        let arguments = arguments.map(register);
        let result = match number {
            raw::__NR_rt_sigprocmask => set_mask(arguments, &mut *context.add(context::MASK)),
            // What needs a stack of its own would come back on it, here.
            raw::__NR_clone if arguments[0] as u32 & raw::CLONE_VM == 0 && arguments[1] == 0 => {
                fork_by(number, arguments)
            }
            raw::__NR_clone3 if is_plain_clone3(arguments[0]) => fork_by(number, arguments),
            raw::__NR_fork => fork_by(number, arguments),
            raw::__NR_clone | raw::__NR_clone3 | raw::__NR_vfork => Err(Errno::AGAIN),
            _ => sys::call6(number, arguments),
        };
        let value = result.map_or_else(|errno| -i64::from(errno.raw_os_error()) as u64, |value| value as u64);
        context.add(context::RAX).write(value);
        go_on();
    }
}

/// The mask of blocked signals is that which the handler's return sets. SIGSYS stays out of it: blocked, it would kill.
///
/// # Safety
/// The arguments are those of rt_sigprocmask.
unsafe fn set_mask(arguments: [usize; 6], mask: &mut u64) -> Result<usize, Errno> {
    let [how, new, old, ..] = arguments;
    let before = *mask;
    // SAFETY: by contract.
    unsafe {
        if new != 0 {
            let new = (new as *const u64).read();
            let wanted = match how {
                0 => before | new,
                1 => before & !new,
                2 => new,
                _ => return Err(Errno::INVAL),
            };
            *mask = wanted & !SIGSYS_BIT;
        }
        if old != 0 {
            (old as *mut u64).write(before);
        }
    }
    Ok(0)
}

/// Is it a fork whose child goes on on the same stack?
///
/// # Safety
/// The argument is clone3's structure.
unsafe fn is_plain_clone3(structure: usize) -> bool {
    /// Where the flags are, and the stack: numbers of 8 bytes.
    const FLAGS: usize = 0;
    const STACK: usize = 5;
    let structure = structure as *const u64;
    // SAFETY: by contract.
    unsafe { structure.add(FLAGS).read() & u64::from(raw::CLONE_VM) == 0 && structure.add(STACK).read() == 0 }
}

/// The clone itself, after which the thread's calls are its own again.
///
/// # Safety
/// The call is a fork whose child goes on on the same stack.
unsafe fn fork_by(number: u32, arguments: [usize; 6]) -> Result<usize, Errno> {
    off();
    if !fork::bequeath() {
        return Err(Errno::NOMEM);
    }
    // SAFETY: by contract.
    let result = unsafe { sys::call6(number, arguments) };
    if result == Ok(0) {
        fork::child_in_dispatch();
    } else {
        fork::cloned(result.ok().map(|pid| pid as u32));
    }
    result
}

/// # Safety
/// The arguments of a handler.
unsafe fn pass_on(signal: c_int, info: *const u8, context: *mut u64) {
    match OLD[0].load(Ordering::Relaxed) {
        // Ignored.
        1 => {}
        0 => {
            restore_action();
            // SAFETY: takes numbers. As if it had not been caught.
            let _ = unsafe {
                let me = sys::call(raw::__NR_gettid, 0, 0, 0, 0).unwrap_or(0);
                sys::call(raw::__NR_tkill, me, signal as usize, 0, 0)
            };
        }
        handler => {
            type Handler = unsafe extern "C" fn(c_int, *const u8, *mut u64);
            // SAFETY: the program's handler; more arguments than it takes do no harm.
            unsafe { core::mem::transmute::<usize, Handler>(handler)(signal, info, context) }
        }
    }
}
