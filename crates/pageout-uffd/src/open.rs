//! Opening: the two ways to a context, the handshake, and why it did not work.
//!
//! Owns [`OpenError`]. Any thread; a context is for the address space of the thread that opens it.

use core::fmt;

use linux_raw_sys::general::UFFD_USER_MODE_ONLY;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::mm::{userfaultfd, UserfaultfdFlags};

use crate::{abi, Features};

/// A new context with `wanted`, by the device or else by the system call.
pub(crate) fn open(wanted: Features, nonblock: bool) -> Result<OwnedFd, OpenError> {
    let context = context(nonblock, wanted.contains(Features::SIGBUS))?;
    handshake(context.as_fd(), wanted)?;
    Ok(context)
}

/// A new context with `wanted` from a device that was opened before.
pub(crate) fn open_on(
    device: BorrowedFd<'_>,
    wanted: Features,
    nonblock: bool,
) -> Result<OwnedFd, OpenError> {
    let context = abi::new_context(device, flags(nonblock).bits()).map_err(OpenError::Device)?;
    handshake(context.as_fd(), wanted)?;
    Ok(context)
}

/// What the kernel offers to whoever may open a context.
pub(crate) fn supported() -> Result<Features, OpenError> {
    offered(context(true, false)?.as_fd()).map_err(OpenError::Handshake)
}

/// Opens the device that contexts come from.
pub(crate) fn device() -> Result<OwnedFd, Errno> {
    rustix::fs::open(c"/dev/userfaultfd", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
}

fn flags(nonblock: bool) -> UserfaultfdFlags {
    let mut flags = UserfaultfdFlags::CLOEXEC;
    flags.set(UserfaultfdFlags::NONBLOCK, nonblock);
    flags
}

/// `user_mode`: one for faults in user mode is as good, since no other is to be served.
fn context(nonblock: bool, user_mode: bool) -> Result<OwnedFd, OpenError> {
    let flags = flags(nonblock);
    let device = match device().and_then(|device| abi::new_context(device.as_fd(), flags.bits())) {
        Ok(context) => return Ok(context),
        Err(errno) => errno,
    };
    // SAFETY: a context by itself touches no memory; what is done with it is unsafe where it matters.
    let syscall = match unsafe { userfaultfd(flags) } {
        Ok(context) => return Ok(context),
        Err(errno) => errno,
    };
    let weaker = flags | UserfaultfdFlags::from_bits_retain(UFFD_USER_MODE_ONLY);
    if syscall == Errno::PERM {
        // SAFETY: as above; where it is not good enough it only tells why, and is closed at once.
        if let Ok(context) = unsafe { userfaultfd(weaker) } {
            return if user_mode { Ok(context) } else { Err(OpenError::UserModeOnly { device }) };
        }
    }
    Err(OpenError::Refused { device, syscall })
}

/// Tells the kernel the version and the features; a context is of no use before.
fn handshake(context: BorrowedFd<'_>, wanted: Features) -> Result<(), OpenError> {
    let errno = match exchange(context, wanted) {
        Ok(_) => return Ok(()),
        Err(errno) => errno,
    };
    if errno == Errno::PERM && wanted.contains(Features::EVENT_FORK) {
        return Err(OpenError::ForkNotPermitted);
    }
    // A refused handshake may be repeated: ask for nothing, to learn what there is.
    match offered(context) {
        Ok(offered) if !offered.contains(wanted) => {
            Err(OpenError::Missing { missing: wanted.difference(offered), offered })
        }
        _ => Err(OpenError::Handshake(errno)),
    }
}

fn offered(context: BorrowedFd<'_>) -> Result<Features, Errno> {
    exchange(context, Features::empty())
}

fn exchange(context: BorrowedFd<'_>, features: Features) -> Result<Features, Errno> {
    let mut api = abi::Api { api: abi::VERSION, features: features.bits(), ioctls: 0 };
    // SAFETY: the handshake changes nothing but the context, which holds no range yet.
    unsafe { abi::call(context, &mut api)? };
    Ok(Features::from_bits_retain(api.features))
}

/// Why there is no context. Displays as one line that says what to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum OpenError {
    /// Neither way gave a context.
    Refused {
        /// Why `/dev/userfaultfd` (Linux 6.1) did not: opening it, or its `USERFAULTFD_IOC_NEW`.
        device: Errno,
        /// Why `userfaultfd(2)` did not.
        syscall: Errno,
    },
    /// The system call would only give a context for faults in user mode (`UFFD_USER_MODE_ONLY`). With that
    /// one a system call that is given a missing page fails with EFAULT, so it is never taken in silence.
    UserModeOnly {
        /// Why `/dev/userfaultfd` (Linux 6.1) did not give one.
        device: Errno,
    },
    /// The device that was handed in did not give a context.
    Device(Errno),
    /// The kernel lacks features that were asked for.
    Missing {
        /// Those it lacks.
        missing: Features,
        /// All that it offers.
        offered: Features,
    },
    /// [`Features::EVENT_FORK`] was asked for without CAP_SYS_PTRACE.
    ForkNotPermitted,
    /// The handshake (`UFFDIO_API`) failed for another reason.
    Handshake(Errno),
}

impl fmt::Display for OpenError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Refused { device, syscall: Errno::NOSYS } if device == Errno::NOENT => {
                f.write_str("userfaultfd: not in this kernel; use one built with CONFIG_USERFAULTFD")
            }
            Self::Refused { device, syscall } => write!(
                f,
                "userfaultfd: /dev/userfaultfd: {}, userfaultfd(2): {}; {}",
                Reason(device),
                Reason(syscall),
                remedy(device)
            ),
            Self::UserModeOnly { device } => write!(
                f,
                "userfaultfd: /dev/userfaultfd: {}, userfaultfd(2): without faults in system calls only; {}",
                Reason(device),
                remedy(device)
            ),
            Self::Device(errno) => write!(
                f,
                "userfaultfd: no context from the device: {}; hand in /dev/userfaultfd, open for reading and \
                 writing",
                Reason(errno)
            ),
            Self::Missing { missing, .. } => {
                let (major, minor) = missing.since();
                write!(f, "userfaultfd: this kernel lacks {missing}; use Linux {major}.{minor} or later")
            }
            Self::ForkNotPermitted => f.write_str(
                "userfaultfd: EVENT_FORK is not permitted; run with CAP_SYS_PTRACE or do without EVENT_FORK",
            ),
            Self::Handshake(errno) => write!(
                f,
                "userfaultfd: UFFDIO_API: {}; hand in a context that nobody has used yet, on Linux 4.11 or later",
                Reason(errno)
            ),
        }
    }
}

impl core::error::Error for OpenError {}

/// What to do, by why the device failed: it is the way that needs least.
const fn remedy(device: Errno) -> &'static str {
    match device {
        Errno::ACCESS | Errno::PERM => {
            "let the user read and write /dev/userfaultfd (setfacl -m u:USER:rw /dev/userfaultfd)"
        }
        Errno::NOENT | Errno::NODEV | Errno::NXIO => {
            "in a container pass --device /dev/userfaultfd; before Linux 6.1 set vm.unprivileged_userfaultfd=1"
        }
        Errno::MFILE => "raise the limit of open files (ulimit -n)",
        _ => "try as root",
    }
}

/// An error number in words, for those that opening gives.
struct Reason(Errno);

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let words = match self.0 {
            Errno::ACCESS => "permission denied",
            Errno::PERM => "not permitted",
            Errno::NOENT => "no such file",
            Errno::NODEV | Errno::NXIO => "no such device",
            Errno::NOSYS => "not in this kernel",
            Errno::MFILE | Errno::NFILE => "too many open files",
            Errno::NOMEM => "out of memory",
            Errno::NOTTY => "not a userfaultfd device",
            Errno::INVAL => "invalid argument",
            Errno::BADF => "not open",
            other => return write!(f, "error {}", other.raw_os_error()),
        };
        f.write_str(words)
    }
}

#[cfg(test)]
mod tests {
    extern crate std;
    use std::string::ToString;

    use super::*;

    #[test]
    fn errors_are_one_line_that_says_what_to_do() {
        let refused = |device, syscall| OpenError::Refused { device, syscall }.to_string();
        let missing =
            OpenError::Missing { missing: Features::POISON | Features::MOVE, offered: Features::empty() };
        for (text, expected) in [
            (
                refused(Errno::NOENT, Errno::PERM),
                "userfaultfd: /dev/userfaultfd: no such file, userfaultfd(2): not permitted; in a container \
                 pass --device /dev/userfaultfd; before Linux 6.1 set vm.unprivileged_userfaultfd=1",
            ),
            (
                refused(Errno::NOENT, Errno::NOSYS),
                "userfaultfd: not in this kernel; use one built with CONFIG_USERFAULTFD",
            ),
            (
                refused(Errno::MFILE, Errno::MFILE),
                "userfaultfd: /dev/userfaultfd: too many open files, userfaultfd(2): too many open files; \
                 raise the limit of open files (ulimit -n)",
            ),
            (missing.to_string(), "userfaultfd: this kernel lacks POISON, MOVE; use Linux 6.8 or later"),
            (
                OpenError::ForkNotPermitted.to_string(),
                "userfaultfd: EVENT_FORK is not permitted; run with CAP_SYS_PTRACE or do without EVENT_FORK",
            ),
        ] {
            assert_eq!(text, expected);
            assert!(!text.contains('\n'));
        }
    }
}
