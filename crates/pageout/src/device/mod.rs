//! Where swapped pages live: the trait that the engine writes to and reads from, and what implements it.
//!
//! A device is a row of pages, addressed by byte offset. It knows nothing of slots, owners or checksums:
//! it moves bytes between memory and a place, all of them or with an error, and it never makes bytes up.
//!
//! * [`FileDevice`]: a regular file, a block device, or memory outside the process (a memfd).
//! * `faulty`: a device for tests that fails, tears and delays on command.
//!
//! # Threads
//!
//! A device is shared by all engine threads. `read_vectored` takes no lock, allocates nothing,
//! does not panic, uses no thread-local state and makes raw system calls only, so it may run in a signal
//! handler. `write_batch` may take the device's own lock, which it holds across I/O: it is for engine
//! threads, never for a handler. Every call must be made by a thread whose file table holds the device's
//! descriptors. A device that [is for handlers](Device::is_for_handlers) has neither.
//!
//! # Errors
//!
//! | error | meaning |
//! |---|---|
//! | `NXIO` | a read beyond the end of the device: data that should be there is not |
//! | `IO` | the medium failed, or took only part of a page |
//! | `NOSPC`, `DQUOT` | the file system, or the user's share of it, is full: keep the frame, write elsewhere |
//! | `FBIG` | the write lies beyond `RLIMIT_FSIZE` or what the file system can address; the process gets SIGXFSZ too, which engine threads keep blocked |
//! | `FAULT` | the memory is not there (unmapped, or without the access that is needed) |
//! | `INVAL` | an address, length or offset that is no multiple of what the device takes |
//! | `OPNOTSUPP` | the device cannot discard |
//!
//! An interrupted call (`INTR`) is taken up again and never reported; so is a short transfer.

mod batch;
#[cfg(any(test, feature = "simulated"))]
pub mod faulty;
mod file;
mod filesystem;
mod open;
mod raw;
mod uring;

pub use file::{Access, FileDevice, FileOptions, Queue};
pub use filesystem::FileSystem;
pub use open::{
    discard, empty, is_hole, is_private, is_read_only, take, unlinked, write_in_place, OpenError,
};
pub use rustix::io::Errno;

/// Does an error say nothing of the data, nor of the medium? `CANCELED`: the kernel could make no worker for io_uring
/// (RLIMIT_NPROC, pids.max).
pub(crate) fn is_passing(errno: Errno) -> bool {
    matches!(errno, Errno::NOMEM | Errno::AGAIN | Errno::INTR | Errno::CANCELED)
}

/// Bytes in a page: the unit of devices and of the memory that they serve.
pub const PAGE: usize = 4096;

/// Bytes that belong together, on the device and in memory.
///
/// The memory is named by address, not by reference: the program and the kernel change it while the
/// device looks at it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Byte offset on the device, a multiple of [`PAGE`].
    pub at: u64,
    /// Address in memory, a multiple of [`PAGE`].
    pub address: usize,
    /// Bytes, a multiple of [`PAGE`].
    pub len: usize,
}

/// A place for pages. The module's documentation has the thread rules and what the errors mean.
pub trait Device: Send + Sync {
    /// Reads the device's bytes from `at` on into `parts` (address and length of each, multiples of
    /// [`PAGE`]), one after the other, in one I/O where there are at most 1024 parts. All or an error,
    /// after which the memory holds anything.
    ///
    /// Safe to call in a signal handler. A place never written, within the device, may read as zeros:
    /// whoever owns the slots must not ask for it.
    ///
    /// # Safety
    /// The memory of every part belongs to the caller, is writable, and is no Rust object's.
    unsafe fn read_vectored(&self, at: u64, parts: &[(usize, usize)]) -> Result<(), Errno>;

    /// Writes many runs, several at a time, neighbours on the device as one I/O, and says of each how
    /// it went: `results[i]` belongs to `runs[i]`. A run that failed leaves anything in its place.
    ///
    /// The runs may come in any order and must not overlap on the device. `results` is as long as `runs`.
    /// No I/O on the memory is going on any more when this returns. Not for signal handlers.
    ///
    /// # Safety
    /// The memory of every run is readable until the call returns. It may change meanwhile; what is
    /// written then is some mixture, never memory of others.
    unsafe fn write_batch(&self, runs: &[Run], results: &mut [Result<(), Errno>]);

    /// Tells the device that the bytes from `at` on are not needed any more (multiples of [`PAGE`]).
    ///
    /// What is read there afterwards is anything. Advice: `OPNOTSUPP` says that the device cannot.
    fn discard(&self, at: u64, len: u64) -> Result<(), Errno>;

    /// May any thread use it, whatever its file table, and write in a signal handler too?
    fn is_for_handlers(&self) -> bool {
        false
    }
}
