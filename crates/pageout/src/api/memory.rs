//! Mappings of the API: regions, the engine's own staging, devices in memory.
//!
//! Each lies between inaccessible guard pages, so that the kernel merges it with nothing; starts at 2 MiB, so
//! that huge pages fit; is in no child of a fork; and is not locked under `mlockall`, where it could never leave.

use crate::device::{Device, Kind, Run};
use crate::space::{BLOCK, PAGE};
use rustix::io::Errno;
use rustix::mm::{self, Advice, MapFlags, MprotectFlags, ProtFlags};

/// A private anonymous mapping; unmapped when dropped.
///
/// Where it is registered, unmapping waits until a server has read the event: never drop it on the
/// thread that reads events.
#[derive(Debug)]
pub(super) struct Mapping {
    start: usize,
    len: usize,
}

impl Mapping {
    /// Maps `len` bytes of zeros, rounded up to pages. `len` is above 0 and at most `MOST_BYTES`.
    pub(super) fn new(len: usize) -> Result<Self, Errno> {
        let len = len.next_multiple_of(PAGE);
        let whole = len + BLOCK + 2 * PAGE;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a new mapping; only parts of it are changed.
        unsafe {
            let base = mm::mmap_anonymous(core::ptr::null_mut(), whole, ProtFlags::empty(), flags)? as usize;
            let start = (base + PAGE).next_multiple_of(BLOCK);
            let (before, after) = (start - PAGE - base, base + whole - (start + len + PAGE));
            if before > 0 {
                let _ = mm::munmap(base as *mut _, before);
            }
            if after > 0 {
                let _ = mm::munmap((start + len + PAGE) as *mut _, after);
            }
            let mapping = Self { start, len };
            // Before the access is given: locked memory would be filled at once.
            let _ = mm::munlock(start as *mut _, len);
            mm::mprotect(start as *mut _, len, MprotectFlags::READ | MprotectFlags::WRITE)?;
            mm::madvise(start as *mut _, len, Advice::LinuxDontFork)?;
            Ok(mapping)
        }
    }

    pub(super) fn start(&self) -> usize {
        self.start
    }

    pub(super) fn end(&self) -> usize {
        self.start + self.len
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }
}

/// A device in the process's own memory: no descriptor, no system call to read or write it.
pub(super) struct MemoryDevice(Mapping);

impl MemoryDevice {
    /// `len` bytes, which take no memory until they are written.
    pub(super) fn new(len: usize) -> Result<Self, Errno> {
        Mapping::new(len).map(Self)
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// The address of `len` bytes from `at` on.
    fn find(&self, at: u64, len: usize) -> Result<usize, Errno> {
        let end = (at as usize).checked_add(len).filter(|end| *end <= self.0.len());
        end.map(|_| self.0.start() + at as usize).ok_or(Errno::NXIO)
    }
}

impl Device for MemoryDevice {
    unsafe fn read(&self, run: Run) -> Result<(), Errno> {
        let from = self.find(run.at, run.len)?;
        // SAFETY: ours to read, and the caller's to write.
        unsafe { core::ptr::copy_nonoverlapping(from as *const u8, run.address as *mut u8, run.len) };
        Ok(())
    }

    unsafe fn read_vectored(&self, mut at: u64, parts: &[(usize, usize)]) -> Result<(), Errno> {
        for &(address, len) in parts {
            // SAFETY: the caller's promise.
            unsafe { self.read(Run { at, address, len })? };
            at += len as u64;
        }
        Ok(())
    }

    unsafe fn write_batch(&self, runs: &[Run], results: &mut [Result<(), Errno>]) {
        for (run, result) in runs.iter().zip(results) {
            *result = self.find(run.at, run.len).map(|to| {
                // SAFETY: the caller's to read, and ours to write: slots have one writer.
                unsafe { core::ptr::copy_nonoverlapping(run.address as *const u8, to as *mut u8, run.len) };
            });
        }
    }

    fn discard(&self, at: u64, len: u64) -> Result<(), Errno> {
        let start = self.find(at, len as usize)?;
        // SAFETY: nobody reads what is discarded.
        unsafe { mm::madvise(start as *mut _, len as usize, Advice::LinuxDontNeed) }
    }

    fn flush(&self) -> Result<(), Errno> {
        Ok(())
    }

    fn kind(&self) -> Kind {
        Kind::Memory
    }

    fn is_for_handlers(&self) -> bool {
        true
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: ours, guard pages included; whoever had addresses in it is gone.
        let _ = unsafe { mm::munmap((self.start - PAGE) as *mut _, self.len + 2 * PAGE) };
    }
}
