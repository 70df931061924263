//! Mappings of the API: regions, and the engine's own staging.
//!
//! Each lies between inaccessible guard pages, so that the kernel merges it with nothing; starts at 2 MiB, so
//! that huge pages fit; is in no child of a fork; and is not locked under `mlockall`, where it could never leave.

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

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: ours, guard pages included; whoever had addresses in it is gone.
        let _ = unsafe { mm::munmap((self.start - PAGE) as *mut _, self.len + 2 * PAGE) };
    }
}
