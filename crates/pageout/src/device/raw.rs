//! Positioned I/O between a descriptor and raw addresses, whole or an error.
//!
//! Owns nothing. Memory that others change must not be named by a Rust reference; here addresses go
//! straight to the kernel. No allocation, no lock, no panic, no thread-local state: fit for
//! a signal handler.

use super::Errno;
use crate::call::call;
use core::mem::{align_of, offset_of, size_of};
use linux_raw_sys::general::{__NR_pread64, __NR_preadv, __NR_pwrite64, __NR_pwritev, iovec};
use rustix::fd::{AsRawFd, BorrowedFd};

/// The most parts that one system call takes (`UIO_MAXIOV`).
const PARTS_MAX: usize = 1024;

/// Address and length of memory: by the assertions below, the kernel's `iovec`.
pub(super) type Part = (usize, usize);

// Rust does not promise a tuple's layout, so the build checks it.
const _: () = {
    assert!(size_of::<Part>() == size_of::<iovec>() && align_of::<Part>() == align_of::<iovec>());
    assert!(offset_of!(Part, 0) == offset_of!(iovec, iov_base));
    assert!(offset_of!(Part, 1) == offset_of!(iovec, iov_len));
};

/// One write of at most [`PARTS_MAX`] parts; the bytes that went.
///
/// # Safety
/// The memory is readable.
pub(super) unsafe fn write_some(fd: BorrowedFd<'_>, at: u64, parts: &[Part]) -> Result<usize, Errno> {
    // SAFETY: the caller's promise.
    unsafe { Way::Out.some(fd, at, parts) }
}

/// Which way bytes go; holds what differs between the two.
#[derive(Clone, Copy, PartialEq)]
enum Way {
    In,
    Out,
}

impl Way {
    /// One system call for at most [`PARTS_MAX`] parts, without the references to memory that a safe wrapper would ask
    /// for; the bytes that went. One part, as for nearly each small page, goes by the call that has less to do.
    ///
    /// # Safety
    /// In: the memory belongs to the caller, is writable and no Rust object's. Out: it is readable.
    unsafe fn some(self, fd: BorrowedFd<'_>, at: u64, parts: &[Part]) -> Result<usize, Errno> {
        let (plain, vectored) = match self {
            Way::In => (__NR_pread64, __NR_preadv),
            Way::Out => (__NR_pwrite64, __NR_pwritev),
        };
        let (number, what, len) = match parts {
            [(address, len)] => (plain, *address, *len),
            _ => (vectored, parts.as_ptr() as usize, parts.len().min(PARTS_MAX)),
        };
        // SAFETY: a system call that reads the parts and moves bytes as the caller allowed. On 64-bit machines the whole
        // offset is in its low word.
        unsafe { call(number, [fd.as_raw_fd() as usize, what, len, at as usize, 0, 0]) }
    }

    /// The error when the kernel moves nothing, or with O_DIRECT only part of a sector.
    fn stuck(self) -> Errno {
        match self {
            Way::In => Errno::NXIO,
            Way::Out => Errno::IO,
        }
    }

    /// Moves every byte of `parts` or fails.
    ///
    /// # Safety
    /// As for [`Way::some`].
    unsafe fn all(self, fd: BorrowedFd<'_>, mut at: u64, mut parts: &[Part]) -> Result<(), Errno> {
        while !parts.is_empty() {
            let now = &parts[..parts.len().min(PARTS_MAX)];
            // SAFETY: the caller's promise.
            let mut moved = match unsafe { self.some(fd, at, now) } {
                Ok(moved) => moved,
                Err(Errno::INTR) => continue,
                Err(errno) => return Err(errno),
            };
            if moved == 0 && now.iter().any(|part| part.1 != 0) {
                return Err(self.stuck());
            }
            at += moved as u64;
            let mut whole = 0;
            while whole < now.len() && moved >= now[whole].1 {
                moved -= now[whole].1;
                whole += 1;
            }
            if moved > 0 {
                // The transfer ended within a part: its rest goes alone, so that the array needs no copy.
                let (address, len) = now[whole];
                // SAFETY: part of the caller's memory.
                unsafe { self.rest(fd, at, (address + moved, len - moved)) }?;
                at += (len - moved) as u64;
                whole += 1;
            }
            parts = &parts[whole..];
        }
        Ok(())
    }

    /// Moves the rest of a part of which something has been moved.
    ///
    /// # Safety
    /// As for [`Way::some`].
    unsafe fn rest(self, fd: BorrowedFd<'_>, mut at: u64, (address, len): Part) -> Result<(), Errno> {
        let mut done = 0;
        while done < len {
            // SAFETY: the caller's promise.
            match unsafe { self.some(fd, at, &[(address + done, len - done)]) } {
                // O_DIRECT cannot go on in the middle of a sector: the end of the file is there.
                Ok(0) | Err(Errno::INVAL) => return Err(self.stuck()),
                Ok(moved) => {
                    done += moved;
                    at += moved as u64;
                }
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno),
            }
        }
        Ok(())
    }
}

/// Reads into every byte of `parts`, or fails; `NXIO` at the end of the file.
///
/// # Safety
/// The memory belongs to the caller, is writable and no Rust object's.
pub(super) unsafe fn read_all(fd: BorrowedFd<'_>, at: u64, parts: &[Part]) -> Result<(), Errno> {
    // SAFETY: the caller's promise.
    unsafe { Way::In.all(fd, at, parts) }
}

/// Writes every byte of `parts`, or fails.
///
/// # Safety
/// The memory is readable.
pub(super) unsafe fn write_all(fd: BorrowedFd<'_>, at: u64, parts: &[Part]) -> Result<(), Errno> {
    // SAFETY: the caller's promise.
    unsafe { Way::Out.all(fd, at, parts) }
}

/// Tells a block device that `len` bytes from `at` on are not needed.
pub(super) fn discard_blocks(fd: BorrowedFd<'_>, at: u64, len: u64) -> Result<(), Errno> {
    const BLKDISCARD: u32 = linux_raw_sys::ioctl::BLKDISCARD;
    // SAFETY: BLKDISCARD takes two u64: offset and length in bytes.
    let range = unsafe { rustix::ioctl::Setter::<BLKDISCARD, [u64; 2]>::new([at, len]) };
    // SAFETY: the descriptor is a block device that the caller owns the bytes of; a wrong descriptor
    // answers with an error.
    unsafe { rustix::ioctl::ioctl(fd, range) }
}
