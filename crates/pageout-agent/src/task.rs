//! Raw clones: tasks with a stack and thread-local block of their own, that libc knows nothing of.
//!
//! The thread pointer of such a task points to a zeroed block, so that code compiled for threads (stack
//! protector, a stray thread-local) reads zeros there and never the program's own.

use crate::memory;
use core::arch::asm;
use linux_raw_sys::general as raw;
use rustix::io::Errno;

const STACK: usize = 256 << 10;
const TLS: usize = 8192;

/// What a task is in relation to its maker.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Another process on the same memory; the caller waits until it has exited. Of no use but to make a
    /// [`Kind::Process`] whose parent is gone, or a [`Kind::Sibling`].
    Messenger,
    /// Another process on the same memory, with copies of descriptors, handlers and everything else.
    Process,
    /// The same as a child of its maker's parent, seen by none but `wait` with `__WCLONE` or `__WALL` if its maker is a
    /// [`Kind::Messenger`].
    Sibling,
    /// A thread of the calling process.
    Thread,
}

/// Starts `main(argument)` on a new stack. Returns its id.
///
/// # Errors
/// The kernel's, EAGAIN mostly: too many processes.
///
/// # Safety
/// `main` never returns, and `argument` lives as long as it needs it.
pub unsafe fn start(kind: Kind, main: extern "C" fn(usize) -> !, argument: usize) -> Result<u32, Errno> {
    let base = memory::map(STACK + TLS, 4096)?;
    let tls = base + STACK + TLS / 2;
    // SAFETY: inside the mapping; the thread pointer's first word points to itself.
    unsafe { (tls as *mut usize).write(tls) };
    let process = raw::CLONE_VM | raw::CLONE_SETTLS | raw::CLONE_UNTRACED;
    let flags = match kind {
        Kind::Messenger => process | raw::CLONE_VFORK,
        Kind::Process => process,
        Kind::Sibling => process | raw::CLONE_PARENT,
        Kind::Thread => {
            raw::CLONE_VM
                | raw::CLONE_FS
                | raw::CLONE_FILES
                | raw::CLONE_SIGHAND
                | raw::CLONE_THREAD
                | raw::CLONE_SYSVSEM
                | raw::CLONE_SETTLS
        }
    };
    // The new stack starts with what the child pops: argument and entry.
    let top = (base + STACK - 64) & !15;
    // SAFETY: inside the new stack.
    unsafe {
        (top as *mut usize).write(main as usize);
        ((top + 8) as *mut usize).write(argument);
    }
    let result: isize;
    // SAFETY: the parent goes on behind the asm; the child has its own stack, takes entry and argument from
    // it and never comes back.
    unsafe {
        asm!(
            "syscall",
            "test rax, rax",
            "jnz 2f",
            "xor ebp, ebp",
            "pop rax",
            "pop rdi",
            "call rax",
            "ud2",
            "2:",
            inlateout("rax") raw::__NR_clone as isize => result,
            in("rdi") flags as usize,
            in("rsi") top,
            in("rdx") 0usize,
            in("r10") 0usize,
            in("r8") tls,
            lateout("rcx") _,
            lateout("r11") _,
        );
    }
    if result < 0 {
        memory::unmap(base, STACK + TLS);
        Err(Errno::from_raw_os_error(-result as i32))
    } else {
        Ok(result as u32)
    }
}
