//! System calls that no library of ours offers, by number. No allocation, no lock, no panic, no thread-local state.

use rustix::io::Errno;

/// One system call; what it answers.
///
/// # Safety
/// That of the system call.
pub(crate) unsafe fn call(number: u32, args: [usize; 5]) -> Result<usize, Errno> {
    let [a, b, c, d, e] = args;
    let answer: isize;
    // SAFETY: the caller's promise; registers as the kernel wants them.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        core::arch::asm!(
            "syscall",
            inlateout("rax") number as isize => answer,
            in("rdi") a, in("rsi") b, in("rdx") c, in("r10") d, in("r8") e,
            lateout("rcx") _, lateout("r11") _,
            options(nostack, preserves_flags),
        );
    }
    // SAFETY: as above.
    #[cfg(target_arch = "aarch64")]
    unsafe {
        core::arch::asm!(
            "svc 0",
            in("x8") number as usize, inlateout("x0") a => answer,
            in("x1") b, in("x2") c, in("x3") d, in("x4") e,
            options(nostack, preserves_flags),
        );
    }
    // SAFETY: as above.
    #[cfg(target_arch = "riscv64")]
    unsafe {
        core::arch::asm!(
            "ecall",
            in("a7") number as usize, inlateout("a0") a => answer,
            in("a1") b, in("a2") c, in("a3") d, in("a4") e,
            options(nostack, preserves_flags),
        );
    }
    if answer < 0 {
        Err(Errno::from_raw_os_error(-answer as i32))
    } else {
        Ok(answer as usize)
    }
}
