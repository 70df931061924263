//! The kernel's requests as `<linux/userfaultfd.h>` lays them out, and the one place that calls `ioctl`.
//!
//! Owns nothing. Invariant: a [`Request`] ties an argument's layout to its number, so no caller can pass one
//! structure under another's number. Callable on any thread and in a signal handler.

use core::ffi::c_void;

use linux_raw_sys::general as raw;
use rustix::fd::{BorrowedFd, FromRawFd, OwnedFd};
use rustix::io::Errno;
use rustix::ioctl::{ioctl, opcode, Ioctl, IoctlOutput, Opcode};

pub(crate) use raw::{
    uffdio_api as Api, uffdio_continue as Continue, uffdio_copy as Copy, uffdio_move as Move,
    uffdio_poison as Poison, uffdio_range as Range, uffdio_register as Register,
    uffdio_writeprotect as WriteProtect, uffdio_zeropage as ZeroPage,
};

/// The version of the interface; there has been one so far.
pub(crate) const VERSION: u64 = raw::UFFD_API as u64;

/// `DONTWAKE` of `UFFDIO_ZEROPAGE`, `UFFDIO_POISON` and `UFFDIO_CONTINUE` alike.
pub(crate) const DONTWAKE: u64 = 1 << 0;
pub(crate) const WRITEPROTECT_WP: u64 = 1 << 0;
pub(crate) const WRITEPROTECT_DONTWAKE: u64 = 1 << 1;

const GROUP: u8 = raw::UFFDIO as u8;

/// An argument of a userfaultfd request.
///
/// # Safety
///
/// `OPCODE` must be the request whose argument has this type's layout.
pub(crate) unsafe trait Request {
    const OPCODE: Opcode;
}

/// The range that `UFFDIO_UNREGISTER` takes.
#[repr(transparent)]
pub(crate) struct Unregister(pub Range);

/// The range that `UFFDIO_WAKE` takes.
#[repr(transparent)]
pub(crate) struct Wake(pub Range);

macro_rules! requests {
    ($($argument:ty = $direction:ident $number:expr;)*) => {$(
        // SAFETY: number, direction and argument are those of <linux/userfaultfd.h>.
        unsafe impl Request for $argument {
            const OPCODE: Opcode = opcode::$direction::<$argument>(GROUP, $number as u8);
        }
    )*};
}

requests! {
    Api = read_write raw::_UFFDIO_API;
    Register = read_write raw::_UFFDIO_REGISTER;
    // The header says "read" where the kernel only takes the range; it is too late to mend there.
    Unregister = read raw::_UFFDIO_UNREGISTER;
    Wake = read raw::_UFFDIO_WAKE;
    Copy = read_write raw::_UFFDIO_COPY;
    ZeroPage = read_write raw::_UFFDIO_ZEROPAGE;
    Move = read_write raw::_UFFDIO_MOVE;
    WriteProtect = read_write raw::_UFFDIO_WRITEPROTECT;
    Continue = read_write raw::_UFFDIO_CONTINUE;
    Poison = read_write raw::_UFFDIO_POISON;
}

// What the generated header knows must agree with what is composed here.
const _: () = {
    assert!(Api::OPCODE == linux_raw_sys::ioctl::UFFDIO_API);
    assert!(Register::OPCODE == linux_raw_sys::ioctl::UFFDIO_REGISTER);
    assert!(Unregister::OPCODE == linux_raw_sys::ioctl::UFFDIO_UNREGISTER);
    assert!(Wake::OPCODE == linux_raw_sys::ioctl::UFFDIO_WAKE);
    assert!(Copy::OPCODE == linux_raw_sys::ioctl::UFFDIO_COPY);
    assert!(ZeroPage::OPCODE == linux_raw_sys::ioctl::UFFDIO_ZEROPAGE);
    assert!(WriteProtect::OPCODE == linux_raw_sys::ioctl::UFFDIO_WRITEPROTECT);
    assert!(Continue::OPCODE == linux_raw_sys::ioctl::UFFDIO_CONTINUE);
};

/// Does the request. The kernel's answer is in `argument` afterwards, also when it failed.
///
/// # Safety
///
/// `fd` must be a userfaultfd, or something that refuses the request; what the request does to the address
/// space must be sound.
pub(crate) unsafe fn call<R: Request>(fd: BorrowedFd<'_>, argument: &mut R) -> Result<(), Errno> {
    // SAFETY: `Request` says that number and argument belong together; the rest is the caller's promise.
    unsafe { ioctl(fd, Call(argument)) }
}

/// An argument on its way: borrowed, so that the answer survives an error.
struct Call<'a, R>(&'a mut R);

// SAFETY: the pointer is to a live argument of the layout that `OPCODE` has; there is no other output.
unsafe impl<R: Request> Ioctl for Call<'_, R> {
    type Output = ();
    const IS_MUTATING: bool = true;

    fn opcode(&self) -> Opcode {
        R::OPCODE
    }

    fn as_ptr(&mut self) -> *mut c_void {
        (self.0 as *mut R).cast()
    }

    unsafe fn output_from_ptr(_: IoctlOutput, _: *mut c_void) -> Result<(), Errno> {
        Ok(())
    }
}

/// `USERFAULTFD_IOC_NEW` on `/dev/userfaultfd`: a new context for the *caller's* address space, whoever opened
/// the device. `flags` are those of `userfaultfd(2)`.
pub(crate) fn new_context(device: BorrowedFd<'_>, flags: u32) -> Result<OwnedFd, Errno> {
    // SAFETY: the request takes its flags by value and touches no memory.
    unsafe { ioctl(device, NewContext(flags)) }
}

struct NewContext(u32);

// SAFETY: flags go by value in place of the pointer; what comes back is a descriptor of our own.
unsafe impl Ioctl for NewContext {
    type Output = OwnedFd;
    const IS_MUTATING: bool = false;

    fn opcode(&self) -> Opcode {
        opcode::none(GROUP, 0)
    }

    fn as_ptr(&mut self) -> *mut c_void {
        core::ptr::without_provenance_mut(self.0 as usize)
    }

    unsafe fn output_from_ptr(fd: IoctlOutput, _: *mut c_void) -> Result<OwnedFd, Errno> {
        if fd < 0 {
            return Err(Errno::BADF);
        }
        // SAFETY: the request succeeded, so this is a descriptor made for us that nobody else holds.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }
}
