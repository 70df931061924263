//! System calls by number, for those that rustix has no name for: no allocation, no lock, no panic, no thread-local state.

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
