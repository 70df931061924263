//! A device on a descriptor: a regular file, a block device or memory behind a memfd.
//!
//! Owns the descriptor and the file's advisory lock. Reads are one `pread` or `preadv`: a thread waits for its
//! own bytes and for nobody's lock. Writes are planned by [`batch`](super::batch), neighbours as one I/O;
//! with O_DIRECT several I/Os are in flight, by an io_uring that is made with the first batch that has
//! several. One writer at a time has the ring; who finds it taken waits for nobody and writes by itself.

use super::batch::{Plan, BATCH};
use super::uring::{After, Uring};
use super::{filesystem::FileSystem, open, raw, Device, Errno, OpenError, Run, PAGE};
use crate::sync::atomic::{AtomicBool, Ordering::Relaxed};
use crate::sync::{Lock, OTHER_LOCKS};
use core::ffi::CStr;
use core::fmt;
use core::ops::Range;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{self, AtFlags, FileType, OFlags, SeekFrom, StatxFlags};

/// What may be done with a file; everything by default.
#[derive(Clone, Copy, Debug)]
pub struct FileOptions {
    /// Ask for I/O past the page cache (O_DIRECT). [`FileDevice::access`] says what was got.
    pub direct: bool,
    /// When to have several writes in flight.
    pub queue: Queue,
}

impl Default for FileOptions {
    fn default() -> Self {
        Self { direct: true, queue: Queue::WhenDirect }
    }
}

/// When a batch has several writes in flight at the same time (io_uring, where it is allowed).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Queue {
    /// With O_DIRECT, when the writes are small enough to gain by it (256 KiB on average, as measured in
    /// `uring`). Writes into the page cache are copies, which gain nothing.
    WhenDirect,
    /// Whatever the file and the sizes are.
    Always,
    /// One after the other.
    Never,
}

/// How bytes get to the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// From the caller's memory to the medium and back (O_DIRECT).
    Direct,
    /// Through the kernel's page cache, which takes memory and copies.
    Buffered,
}

/// A device on a file, a block device or a memfd.
///
/// Any thread may use it whose file table holds its descriptor: a number from the table of an engine
/// thread is another file, or none, in the program's.
pub struct FileDevice {
    fd: OwnedFd,
    is_block: bool,
    access: Access,
    queue: Queue,
    ring: Lock<Ring>,
    /// What holds nothing any more when the device is dropped, and whether there are holes to be left.
    emptied: Option<(Range<u64>, bool)>,
    written: AtomicBool,
}

/// The average length, in bytes, up to which writes to a disk gain by having several in flight.
const QUEUED_MAX: usize = 256 << 10;

/// Whether the device has an io_uring.
enum Ring {
    /// Not asked for yet.
    Wanted,
    There(Uring),
    /// Refused by the kernel, or not wanted.
    None,
}

impl FileDevice {
    /// Takes a descriptor, open for reading and writing, of a regular file, block device or memfd.
    ///
    /// Sets the descriptor's O_DIRECT if the options ask for it and the file system takes it. Rights are
    /// not looked at: that was for whoever opened it.
    pub fn from_fd(fd: OwnedFd, options: FileOptions) -> Result<Self, OpenError> {
        let status = fs::fstat(&fd)?;
        let is_block = match FileType::from_raw_mode(status.st_mode) {
            FileType::RegularFile => false,
            FileType::BlockDevice => true,
            _ => return Err(OpenError::NotAFile),
        };
        // A block device's own file system is that of /dev: memory, which says nothing of the disk.
        let in_memory = !is_block && FileSystem::of_file(&fd)?.in_memory;
        let direct = options.direct && !in_memory && go_direct(fd.as_fd())?;
        let access = if direct { Access::Direct } else { Access::Buffered };
        let queue = match options.queue {
            Queue::Always => true,
            Queue::Never => false,
            Queue::WhenDirect => direct,
        };
        let ring = if queue { Ring::Wanted } else { Ring::None };
        Ok(Self {
            fd,
            is_block,
            access,
            queue: options.queue,
            ring: Lock::new(ring, &OTHER_LOCKS),
            emptied: None,
            written: AtomicBool::new(false),
        })
    }

    /// Creates a file of `size` bytes in `directory` that nobody else can open and that goes with its
    /// last descriptor. It takes up no room until it is written.
    ///
    /// [`FileSystem::of_path`] says beforehand whether there is room, and whether it is memory after all.
    pub fn create_unlinked(directory: &CStr, size: u64, options: FileOptions) -> Result<Self, OpenError> {
        let fd = open::unlinked(directory)?;
        fs::ftruncate(&fd, size)?;
        Self::from_fd(fd, options)
    }

    /// Creates `size` bytes of memory that belong to no process's address space. It takes up no room
    /// until it is written, and the kernel may swap it. For tests.
    #[cfg(any(test, feature = "simulated"))]
    pub fn create_memory(size: u64) -> Result<Self, OpenError> {
        Self::from_fd(open::memory(size)?, FileOptions { direct: false, ..FileOptions::default() })
    }

    /// How bytes get to the file.
    pub fn access(&self) -> Access {
        self.access
    }

    /// The size in bytes, now.
    pub fn size(&self) -> Result<u64, Errno> {
        // The descriptor's own position is used for nothing, and a block device's `stat` has no size.
        fs::seek(&self.fd, SeekFrom::End(0))
    }

    /// Makes a file larger or smaller; what a smaller one held beyond its end is lost. `INVAL` for a
    /// block device, `FBIG` beyond `RLIMIT_FSIZE` (with SIGXFSZ, if it is not blocked).
    pub fn set_size(&self, size: u64) -> Result<(), Errno> {
        fs::ftruncate(&self.fd, size)
    }

    /// Has `room` of a file hold nothing when the device is dropped, as large as the file is now: what was in memory is not to be
    /// found there. Not if nothing was written, but what has no room is cut back to that. `has_holes`: it has less room on its disk
    /// than its length, and is to have no more then.
    pub fn empty_at_end(&mut self, room: Range<u64>, has_holes: bool) {
        self.emptied = Some((room, has_holes));
    }
}

impl FileDevice {
    /// Writes the I/Os of a plan at the same time; false, with nothing done, if there is no ring for them
    /// or nothing to gain.
    ///
    /// # Safety
    /// The memory that the plan names is readable.
    unsafe fn write_queued(&self, plan: &Plan, outcomes: &mut [Result<usize, Errno>]) -> bool {
        let few = plan.ios().len() < 2;
        let large = plan.len() / plan.ios().len().max(1) > QUEUED_MAX && self.queue != Queue::Always;
        if few || large {
            return false;
        }
        let Some(mut ring) = self.ring.try_lock() else { return false };
        if matches!(*ring, Ring::Wanted) {
            *ring = Uring::new().map_or(Ring::None, Ring::There);
        }
        match &mut *ring {
            Ring::There(uring) if uring.is_ours() => {
                // SAFETY: the caller's promise.
                if unsafe { uring.write(self.fd.as_fd(), plan, outcomes) } == After::Broken {
                    *ring = Ring::None;
                }
                true
            }
            _ => false,
        }
    }
}

impl Drop for FileDevice {
    fn drop(&mut self) {
        let emptied = self.emptied.take();
        let was_used = |room: &Range<u64>| room.is_empty() || self.written.load(Relaxed);
        if let Some((room, has_holes)) = emptied.filter(|(room, _)| was_used(room)) {
            let _ = open::empty(&self.fd, room, has_holes);
        }
    }
}

impl fmt::Debug for FileDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FileDevice")
            .field("fd", &self.fd)
            .field("is_block", &self.is_block)
            .field("access", &self.access)
            .finish_non_exhaustive()
    }
}

impl AsFd for FileDevice {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Device for FileDevice {
    unsafe fn read_vectored(&self, at: u64, parts: &[(usize, usize)]) -> Result<(), Errno> {
        // SAFETY: the caller's promise.
        unsafe { raw::read_all(self.fd.as_fd(), at, parts) }
    }

    unsafe fn write_batch(&self, runs: &[Run], results: &mut [Result<(), Errno>]) {
        debug_assert_eq!(runs.len(), results.len());
        self.written.store(true, Relaxed);
        for (runs, results) in runs.chunks(BATCH).zip(results.chunks_mut(BATCH)) {
            let plan = Plan::new(runs);
            let mut outcomes = [Err(Errno::AGAIN); BATCH];
            let outcomes = &mut outcomes[..plan.ios().len()];
            // SAFETY: the caller's promise.
            if !unsafe { self.write_queued(&plan, outcomes) } {
                for (io, outcome) in plan.ios().iter().zip(outcomes.iter_mut()) {
                    // SAFETY: the caller's promise.
                    *outcome = unsafe { raw::write_some(self.fd.as_fd(), io.at, plan.parts(io)) };
                }
            }
            for (io, &outcome) in plan.ios().iter().zip(outcomes.iter()) {
                // SAFETY: the caller's promise.
                unsafe { plan.settle(self.fd.as_fd(), io, outcome, runs, results) };
            }
        }
    }

    fn discard(&self, at: u64, len: u64) -> Result<(), Errno> {
        open::discard(&self.fd, self.is_block, at, len)
    }
}

/// Turns O_DIRECT on if it works for pages; says whether it does.
fn go_direct(fd: BorrowedFd<'_>) -> Result<bool, Errno> {
    #[repr(align(4096))]
    struct Page([u8; PAGE]);

    // A filter of system calls may know no statx; to read tells as well.
    let limits = fs::statx(fd, c"", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN);
    if let Some(limits) = limits.ok().filter(|limits| limits.stx_mask & StatxFlags::DIOALIGN.bits() != 0) {
        let fits = |align: u32| align != 0 && PAGE as u32 % align == 0;
        if !fits(limits.stx_dio_mem_align) || !fits(limits.stx_dio_offset_align) {
            return Ok(false);
        }
    }
    let flags = fs::fcntl_getfl(fd)?;
    if fs::fcntl_setfl(fd, flags | OFlags::DIRECT).is_err() {
        return Ok(false);
    }
    // Some file systems take the flag and refuse the I/O. An empty file answers 0 either way.
    let mut page = Page([0; PAGE]);
    if rustix::io::pread(fd, &mut page.0, 0) == Err(Errno::INVAL) {
        // Another process that shares the open file may have set it meanwhile: `flags` may have it too.
        fs::fcntl_setfl(fd, flags - OFlags::DIRECT)?;
        return Ok(false);
    }
    Ok(true)
}
