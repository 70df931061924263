//! System calls by number, for those that rustix has no name for, and calls on another stack: no allocation, no lock, no panic, no
//! thread-local state.

use core::ffi::c_void;
use rustix::io::Errno;

/// One system call; what it answers.
///
/// # Safety
/// That of the system call.
pub unsafe fn call(number: u32, args: [usize; 6]) -> Result<usize, Errno> {
    let [a, b, c, d, e, f] = args;
    let answer: isize;
    // SAFETY: the caller's promise; the kernel clobbers rcx and r11 only.
    unsafe {
        core::arch::asm!(
            "syscall",
            inlateout("rax") number as isize => answer,
            in("rdi") a, in("rsi") b, in("rdx") c, in("r10") d, in("r8") e, in("r9") f,
            lateout("rcx") _, lateout("r11") _,
            options(nostack, preserves_flags),
        );
    }
    if (-4095..0).contains(&answer) {
        Err(Errno::from_raw_os_error(-answer as i32))
    } else {
        Ok(answer as usize)
    }
}

/// Calls `function(argument)` on the stack that ends at `top`.
///
/// # Safety
/// Nobody else uses the stack; `top` is aligned to 16 bytes; the function does not unwind.
pub unsafe fn on_stack(top: usize, function: extern "C" fn(*const c_void), argument: *const c_void) {
    // SAFETY: the register that keeps the stack pointer is one that functions save.
    unsafe {
        core::arch::asm!(
            "mov r12, rsp", "mov rsp, {top}", "call {function}", "mov rsp, r12",
            top = in(reg) top, function = in(reg) function, in("rdi") argument, out("r12") _,
            clobber_abi("C"),
        );
    }
}
