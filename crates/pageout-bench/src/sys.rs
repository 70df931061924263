//! The system calls that `std` does not wrap. Owns no state; with `mem.rs` the only `unsafe` of the crate.
//!
//! Every function returns the kernel's error as `io::Error`; none keeps a pointer past the call.

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::Duration;

fn c_path(path: &Path) -> io::Result<CString> {
    CString::new(path.as_os_str().as_bytes()).map_err(|_| io::ErrorKind::InvalidInput.into())
}

fn done(result: libc::c_int) -> io::Result<()> {
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}

/// Starts swapping on `path` at the highest priority that there is (32767).
pub fn swapon(path: &Path) -> io::Result<()> {
    const PREFER: libc::c_int = 0x8000;
    let path = c_path(path)?;
    // SAFETY: `path` is a C string that lives through the call.
    done(unsafe { libc::swapon(path.as_ptr(), PREFER | 0x7fff) })
}

/// Stops swapping on `path`.
pub fn swapoff(path: &Path) -> io::Result<()> {
    let path = c_path(path)?;
    // SAFETY: `path` is a C string that lives through the call.
    done(unsafe { libc::swapoff(path.as_ptr()) })
}

/// Mounts a fresh ramfs on `at`.
pub fn mount_ramfs(at: &Path) -> io::Result<()> {
    let at = c_path(at)?;
    // SAFETY: all strings live through the call; ramfs takes no data.
    done(unsafe {
        libc::mount(
            c"pageout-bench".as_ptr(),
            at.as_ptr(),
            c"ramfs".as_ptr(),
            libc::MS_NODEV,
            std::ptr::null(),
        )
    })
}

/// Unmounts what is mounted on `at`.
pub fn unmount(at: &Path) -> io::Result<()> {
    let at = c_path(at)?;
    // SAFETY: `at` is a C string that lives through the call.
    done(unsafe { libc::umount2(at.as_ptr(), 0) })
}

/// The number of a loop device that is free at this moment.
pub fn loop_free(control: &File) -> io::Result<u32> {
    const LOOP_CTL_GET_FREE: libc::c_ulong = 0x4c82;
    // SAFETY: the request takes no argument.
    let number = unsafe { libc::ioctl(control.as_raw_fd(), LOOP_CTL_GET_FREE) };
    done(number)?;
    Ok(number as u32)
}

/// Backs the loop device `device` by `file`; EBUSY when another took the device first.
pub fn loop_attach(device: &File, file: &File) -> io::Result<()> {
    const LOOP_SET_FD: libc::c_ulong = 0x4c00;
    // SAFETY: the argument is a descriptor, borrowed for the call.
    done(unsafe { libc::ioctl(device.as_raw_fd(), LOOP_SET_FD, file.as_raw_fd()) })
}

/// Takes the file from the loop device `device`, at the latest when its last user closes it.
pub fn loop_detach(device: &File) -> io::Result<()> {
    const LOOP_CLR_FD: libc::c_ulong = 0x4c01;
    // SAFETY: the request takes no argument.
    done(unsafe { libc::ioctl(device.as_raw_fd(), LOOP_CLR_FD) })
}

/// Kills the process group `group` (never 0 or 1) outright.
pub fn kill_group(group: i32) -> io::Result<()> {
    assert!(group > 1, "a group of our own");
    // SAFETY: a plain system call on numbers.
    done(unsafe { libc::kill(-group, libc::SIGKILL) })
}

/// Kills one process outright.
pub fn kill(pid: i32) -> io::Result<()> {
    assert!(pid > 1, "a process of our own");
    // SAFETY: a plain system call on numbers.
    done(unsafe { libc::kill(pid, libc::SIGKILL) })
}

/// Asks for SIGKILL when the process that started this one dies. Kept across `exec`.
pub fn die_with_parent() -> io::Result<()> {
    // SAFETY: the option takes one number.
    done(unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL as libc::c_ulong) })
}

/// How a child ended, and the CPU time of it and of all descendants that were waited for.
#[derive(Clone, Copy, Debug)]
pub struct Ended {
    /// Exit code, or 128 + the signal that ended it.
    pub code: i32,
    /// CPU time in user mode.
    pub user: Duration,
    /// CPU time in the kernel.
    pub system: Duration,
}

/// Waits for the child `pid`, which must not have been waited for.
pub fn wait(pid: i32) -> io::Result<Ended> {
    let mut status = 0;
    let mut usage = MaybeUninit::<libc::rusage>::zeroed();
    loop {
        // SAFETY: both pointers are to live, writable memory of the right types.
        let got = unsafe { libc::wait4(pid, &mut status, 0, usage.as_mut_ptr()) };
        if got == pid {
            break;
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
    // SAFETY: zeroed is a valid rusage, and the kernel filled it in.
    let usage = unsafe { usage.assume_init() };
    let code =
        if libc::WIFSIGNALED(status) { 128 + libc::WTERMSIG(status) } else { libc::WEXITSTATUS(status) };
    let time = |t: libc::timeval| Duration::new(t.tv_sec as u64, t.tv_usec as u32 * 1000);
    Ok(Ended { code, user: time(usage.ru_utime), system: time(usage.ru_stime) })
}

/// Whether the processes `a` and `b` have one and the same memory; false when the kernel will not say.
pub fn share_memory(a: i32, b: i32) -> bool {
    const KCMP_VM: libc::c_int = 1;
    // SAFETY: a plain system call on numbers.
    unsafe { libc::syscall(libc::SYS_kcmp, a, b, KCMP_VM, 0, 0) == 0 }
}

/// Clock ticks a second, the unit of CPU times in /proc.
pub fn clock_ticks() -> f64 {
    // SAFETY: a plain query by number.
    unsafe { libc::sysconf(libc::_SC_CLK_TCK) as f64 }
}

/// Whether this process is root.
pub fn is_root() -> bool {
    // SAFETY: takes nothing, cannot fail.
    unsafe { libc::geteuid() == 0 }
}

/// Signals by which somebody ends a program.
const END_SIGNALS: [libc::c_int; 3] = [libc::SIGINT, libc::SIGTERM, libc::SIGHUP];

/// Goes on in spite of them.
pub fn ignore_end_signals() {
    for signal in END_SIGNALS {
        // SAFETY: no handler.
        unsafe { libc::signal(signal, libc::SIG_IGN) };
    }
}

/// Makes the signals that ask a program to end write one byte to `pipe` instead; it must stay open for
/// good. `exec` undoes it.
pub fn on_end_signals(pipe: &impl AsRawFd) -> io::Result<()> {
    use std::sync::atomic::{AtomicI32, Ordering};
    static PIPE: AtomicI32 = AtomicI32::new(-1);
    extern "C" fn tell(_: libc::c_int) {
        let byte = 1u8;
        // SAFETY: `write` may be called in a signal handler; the byte lives through the call. A full
        // pipe or a closed one changes nothing: the first byte is what counts.
        unsafe { libc::write(PIPE.load(Ordering::Relaxed), (&raw const byte).cast(), 1) };
    }
    PIPE.store(pipe.as_raw_fd(), Ordering::Relaxed);
    for signal in END_SIGNALS {
        // SAFETY: a zeroed sigaction is valid (no flags, empty mask); the handler does what is
        // allowed in one.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = tell as *const () as usize;
            action.sa_flags = libc::SA_RESTART;
            done(libc::sigaction(signal, &action, std::ptr::null_mut()))?;
        }
    }
    Ok(())
}
