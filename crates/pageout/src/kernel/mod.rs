//! The kernel as the engine sees it: one small trait, so that a simulated kernel can stand in for it.
//!
//! Everything that touches managed memory or its mappings goes through here. Addresses and lengths are
//! bytes, multiples of 4096. All methods may be called from any engine thread; where it matters they say which
//! lock the caller holds. None allocates but `is_own`, which is asked of who touched a frame.

mod linux;
#[cfg(any(test, feature = "simulated", loom, shuttle))]
pub mod sim;
pub use linux::{nobody_is_called, pagemap_scan, undisturbed};
pub use linux::{HugePages, Linux, LinuxError, Sought, Statm, NEEDED};
pub use pageout_uffd::Partial;
use rustix::io::Errno;

/// Pages found by [`Kernel::scan`]: `start..end` are mapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Found {
    /// First byte.
    pub start: usize,
    /// Past the last byte.
    pub end: usize,
    /// Mapped by 2 MiB, and not by the kernel's page of zeros.
    pub huge: bool,
}

impl Found {
    /// Nothing, to be written over.
    pub const NONE: Self = Self { start: 0, end: 0, huge: false };
}

/// A fault that waits for its answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fault {
    /// The byte that was touched.
    pub address: usize,
    /// The thread that waits.
    pub thread: u32,
}

/// What happened to managed memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// A page was touched that is not there.
    Fault(Fault),
    /// Pages and mapping moved.
    Remap {
        /// Old place.
        from: usize,
        /// New place.
        to: usize,
        /// Bytes.
        len: usize,
    },
    /// The pages are about to be discarded; the mapping stays.
    Remove {
        /// First byte.
        start: usize,
        /// Past the last byte.
        end: usize,
    },
    /// The mapping is gone.
    Unmap {
        /// First byte.
        start: usize,
        /// Past the last byte.
        end: usize,
    },
}

/// A call that moves memory and has it grow.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Growth {
    /// Tells it from those before.
    pub number: u32,
    /// Who calls.
    pub thread: u32,
    /// By so many bytes; 0: nobody knows.
    pub by: usize,
}

/// What the engine asks of the kernel.
///
/// # Safety
/// Memory is where calls that succeed have put it, with the content that it had: the engine reads and writes there.
pub unsafe trait Kernel: Send + Sync {
    /// Starts fault delivery for a range. Events lock held exclusively.
    ///
    /// # Errors
    /// The kernel's: EINVAL for memory that cannot be registered, EBUSY for somebody else's.
    fn register(&self, start: usize, len: usize) -> Result<(), Errno>;

    /// Marks memory, or takes the mark off. It goes where the mapping goes, the child of a fork has it too, and what is
    /// mapped anew has none. Events lock held exclusively.
    ///
    /// # Errors
    /// The kernel's: a part of the range is not mapped, or the process has as many mappings as it may. The rest may be done.
    fn mark(&self, start: usize, len: usize, on: bool) -> Result<(), Errno>;

    /// Moves mapped pages; the source becomes a hole. Events lock held shared. `wake`: wakes who waits
    /// for the destination.
    ///
    /// # Errors
    /// What was moved and why it stopped; see `pageout_uffd::Uffd::move_pages`.
    fn move_pages(&self, to: usize, from: usize, len: usize, wake: bool) -> Result<(), Partial>;

    /// [`Kernel::move_pages`] of the program's memory, into frames. Where nobody can have lost an event that is all.
    ///
    /// # Errors
    /// As that; INVAL where it is registered no more, or not in one mapping.
    fn take_pages(&self, frames: usize, from: usize, len: usize) -> Result<(), Partial> {
        self.move_pages(frames, from, len, false)
    }

    /// Copies into a hole. Events lock held shared.
    ///
    /// # Errors
    /// What was copied and why it stopped.
    fn copy(&self, to: usize, from: usize, len: usize, wake: bool) -> Result<(), Partial>;

    /// Fills a hole with zeros. Events lock held shared.
    ///
    /// # Errors
    /// What was filled and why it stopped.
    fn zero(&self, at: usize, len: usize, wake: bool) -> Result<(), Partial>;

    /// Makes a hole raise SIGBUS. Events lock held shared.
    ///
    /// # Errors
    /// What was poisoned and why it stopped.
    fn poison(&self, at: usize, len: usize) -> Result<(), Partial>;

    /// Wakes who waits for a range; each takes its fault again. No lock needed.
    fn wake(&self, at: usize, len: usize);

    /// Is it a thread of the engine's process? Not allowed to the fault path but where it would have to stop otherwise.
    fn is_own(&self, _thread: u32) -> bool {
        true
    }

    /// Has a thread that waits for a fault on the page at `at` wake up on the caller's CPU, if it can be, before the
    /// fault is answered: two wake-ups across CPUs cost several times what the fault itself does. `false`: it may not run
    /// here. Events lock held shared, and that of the block, of which the page is not there: so long the thread is blocked.
    fn call_here(&self, _thread: u32, _at: usize) -> bool {
        true
    }

    /// Takes the caller, a thread of the engine, to where another thread may run.
    fn follow(&self, _thread: u32) {}

    /// Keeps the caller, a thread of the engine, on the CPU that it runs on: the scheduler wakes a server on an idle
    /// CPU, away from the thread that faults.
    fn settle_here(&self) {}

    /// Lets the caller run on any CPU again.
    fn roam(&self) {}

    /// Are the descriptors that the caller would use the engine's? The program may have closed what is in its own
    /// table. Any lock.
    fn is_ours(&self) -> bool {
        true
    }

    /// Is an event unread? Any lock.
    fn event_pending(&self) -> bool;

    /// The first part of a range for which faults are delivered, as far as one mapping has it. That is sure if no event is
    /// pending, before and after. Changes nothing. Events lock held exclusively.
    fn next_registered(&self, start: usize, end: usize) -> Option<(usize, usize)>;

    /// May an event that was to be told have been taken back, though what it tells of was done?
    fn loses_events(&self) -> bool {
        false
    }

    /// How often memory has grown, as far as it is known: of that no event tells. `None`: it may be growing, or nobody knows.
    fn growths(&self) -> Option<u32> {
        None
    }

    /// The growths at the last moment at which no event was known to be unread: they were over when what an event tells of
    /// that was read since began. Events lock held exclusively.
    fn told_growths(&self) -> Option<u32> {
        None
    }

    /// The first part of a range where anything is mapped, whatever events are unread. Any lock.
    fn next_mapped(&self, start: usize, end: usize) -> Option<(usize, usize)>;

    /// The mapping around an address, or else the next above it, whatever events are unread. `None`: there is none, or it is
    /// not known. Any lock.
    fn mapping(&self, _at: usize) -> Option<(usize, usize)> {
        None
    }

    /// Is what is mapped at an address private memory of no file, as all that is to be managed? Where that is not known it is,
    /// before Linux 6.11 always. That is sure if no event is pending after it. Changes nothing. Any lock.
    fn is_anonymous(&self, _at: usize) -> bool {
        true
    }

    /// The call under way that moves memory and has it grow, if it is known. What locked memory has grown by the kernel fills
    /// before the move is told of.
    fn growing(&self) -> Option<Growth> {
        None
    }

    /// Ends the delivery of faults for a range, and wakes who waits there. Any lock.
    fn unregister(&self, _start: usize, _len: usize) {}

    /// Has the mapping around `at` be one where huge pages stay whole. They are known to be allowed there. No lock held.
    fn prefer_huge(&self, _at: usize) {}

    /// Unlocks frames that the program has locked (mlockall): what is locked cannot be given back, nor change places with what is
    /// not. Any lock.
    fn unlock(&self, _start: usize, _len: usize) {}

    /// Waits until an event can be read, at most `timeout_ns`; [`FOREVER`](crate::sync::FOREVER): without setting a timer. No lock held.
    fn wait_event(&self, timeout_ns: u64) -> bool;

    /// Reads what is there without waiting, faults first, and the rest as it happened; returns how many. Events lock held
    /// exclusively, and the caller applies everything but faults before it lets go: reading is what lets the program
    /// go on.
    fn read_events(&self, out: &mut [Event]) -> usize;

    /// The mapped pages of a range, at most `out.len()` runs; returns the runs and where it stopped.
    fn scan(&self, start: usize, end: usize, out: &mut [Found]) -> (usize, usize);

    /// Does MOVE refuse a part of a huge page of which something is pinned (io_uring's buffers, RDMA)? Before Linux 6.18 it tries to
    /// split that for ever.
    fn refuses_pinned(&self) -> bool {
        true
    }

    /// Does the page table of a block go with the pages, when all of it is discarded? Since Linux 6.14; where a table is, no huge page
    /// comes in whole.
    fn frees_tables(&self) -> bool {
        true
    }

    /// Is [`Kernel::resident_pages`] what is there at that moment, and not at the last look?
    fn counts_at_once(&self) -> bool {
        true
    }

    /// How many pages of a range are the kernel's page of zeros, which is no memory. Of frames.
    fn count_zeros(&self, _start: usize, _len: usize) -> usize {
        0
    }

    /// Is what is mapped in a range but the kernel's page of zeros, which who only reads is given? Of frames.
    fn holds_zeros(&self, _start: usize, _len: usize) -> bool {
        false
    }

    /// Makes a page writable and the process's own, as a write by the program would. May fault: no lock.
    ///
    /// # Errors
    /// The kernel's.
    fn populate_write(&self, at: usize, len: usize) -> Result<(), Errno>;

    /// Gives frames (not managed memory) back to the kernel, so that the range is a hole again.
    /// Events lock held shared or exclusively.
    ///
    /// # Errors
    /// The kernel's: the process has as many mappings as it may. Nothing has changed.
    fn drop_frames(&self, at: usize, len: usize) -> Result<(), Errno>;

    /// Makes one huge page of a 2 MiB hole of frames. Not held: any lock that a fault needs.
    ///
    /// # Errors
    /// ENOMEM when no huge page can be had; the range is a hole then.
    fn make_huge(&self, at: usize) -> Result<(), Errno>;

    /// Makes one huge page of the small ones of a 2 MiB block of managed memory, if all are mapped; what is in them
    /// stays. Takes half a millisecond. No lock held.
    ///
    /// # Errors
    /// The kernel's; nothing has changed then.
    fn collapse(&self, at: usize) -> Result<(), Errno>;

    /// Resident memory of the address space, in pages.
    fn resident_pages(&self) -> usize;

    /// Nanoseconds, monotonic.
    fn now(&self) -> u64;

    /// The CPU that the caller runs on.
    fn cpu(&self) -> usize;

    /// How many there are for it.
    fn cpus(&self) -> usize;
}
