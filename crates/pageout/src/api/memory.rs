//! Mappings of the API: regions, the engine's own staging, devices in memory.
//!
//! Each lies between inaccessible guard pages, so that the kernel merges it with nothing; starts at 2 MiB, so
//! that huge pages fit; is in no child of a fork; and is not locked under `mlockall`, where it could never leave.
//!
//! Under `pageout run` another engine manages the program's memory, and must not take up what is registered here: there
//! the agent maps it, and knows what is to be left alone from before it can be seen until it is gone.

use super::error::MOST_BYTES;
use super::process::Process;
use crate::device::{Device, Run};
use crate::space::{BLOCK, PAGE};
use core::ffi::{c_void, CStr};
use core::mem::transmute;
use once_cell::race::OnceBox;
use rustix::io::Errno;
use rustix::mm::{self, Advice, MapFlags, MprotectFlags, ProtFlags};
use std::boxed::Box;

/// A private anonymous mapping; unmapped when dropped.
///
/// Where it is registered, unmapping waits until a server has read the event: never drop it on the
/// thread that reads events.
#[derive(Debug)]
pub(super) struct Mapping {
    start: usize,
    len: usize,
    /// Who has mapped it, if we have not.
    agent: Option<&'static Agent>,
    /// Whose it is. A fork's child does not have it, and may have something else there.
    process: Process,
}

/// Maps addresses without access, `len` and a guard page on each side.
fn between_guards(len: usize) -> Result<usize, Errno> {
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
        Ok(start)
    }
}

/// Zeros of this type, for good; zeros again in a fork's child.
///
/// # Safety
/// All zeros is a valid `T`.
pub(super) unsafe fn wiped_in_children<T: Sync>() -> Result<&'static T, Errno> {
    let (len, access) = (size_of::<T>(), ProtFlags::READ | ProtFlags::WRITE);
    // SAFETY: a new mapping, aligned to a page and never unmapped; zeros by contract.
    unsafe {
        let start = mm::mmap_anonymous(core::ptr::null_mut(), len, access, MapFlags::PRIVATE)?;
        mm::madvise(start, len, Advice::LinuxWipeOnFork)?;
        Ok(&*start.cast::<T>())
    }
}

/// What the agent of `pageout run` offers.
#[derive(Debug)]
struct Agent {
    map: Map,
    unmap: Unmap,
}

type Map = extern "C" fn(usize, usize) -> isize;
type Unmap = unsafe extern "C" fn(usize, usize);

impl Agent {
    /// The one that is loaded into this program, if it runs under `pageout run`.
    fn of_run() -> Option<&'static Self> {
        static AGENT: OnceBox<Option<Agent>> = OnceBox::new();
        // Nobody waits for another thread, which a fork's child does not have.
        AGENT.get_or_init(|| Box::new(Self::find())).as_ref()
    }

    fn find() -> Option<Self> {
        // SAFETY: functions of these types, if they are there.
        unsafe {
            let find = |name: &CStr| libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr());
            let map = transmute::<*mut c_void, Option<Map>>(find(c"pageout_agent_map"))?;
            let unmap = transmute::<*mut c_void, Option<Unmap>>(find(c"pageout_agent_unmap"))?;
            Some(Self { map, unmap })
        }
    }

    fn map(&self, len: usize) -> Result<usize, Errno> {
        match (self.map)(len, BLOCK) {
            errno @ ..0 => Err(Errno::from_raw_os_error(-errno as i32)),
            start => Ok(start as usize),
        }
    }
}

impl Mapping {
    /// Maps `len` bytes of zeros, rounded up to pages, which no other engine manages; from 1 to [`MOST_BYTES`].
    pub(super) fn new(len: usize) -> Result<Self, Errno> {
        Self::by(Agent::of_run(), len)
    }

    /// The same for memory that is never registered: under `pageout run` it is like the program's other memory.
    fn ordinary(len: usize) -> Result<Self, Errno> {
        Self::by(None, len)
    }

    fn by(agent: Option<&'static Agent>, len: usize) -> Result<Self, Errno> {
        if !(1..=MOST_BYTES).contains(&len) {
            return Err(Errno::NOMEM);
        }
        let len = len.next_multiple_of(PAGE);
        let start = match agent {
            Some(agent) => agent.map(len)?,
            None => between_guards(len)?,
        };
        let mapping = Self { start, len, agent, process: Process::this() };
        // SAFETY: just mapped, and ours.
        unsafe {
            // Before the access is given: locked memory would be filled at once.
            let _ = mm::munlock(start as *mut _, len);
            mm::mprotect(start as *mut _, len, MprotectFlags::READ | MprotectFlags::WRITE)?;
            mm::madvise(start as *mut _, len, Advice::LinuxDontFork)?;
        }
        Ok(mapping)
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
        Mapping::ordinary(len).map(Self)
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
    unsafe fn read_vectored(&self, mut at: u64, parts: &[(usize, usize)]) -> Result<(), Errno> {
        for &(address, len) in parts {
            let from = self.find(at, len)?;
            // SAFETY: ours to read, and the caller's to write.
            unsafe { core::ptr::copy_nonoverlapping(from as *const u8, address as *mut u8, len) };
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

    fn is_for_handlers(&self) -> bool {
        true
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if Process::this() != self.process {
            return;
        }
        // SAFETY: ours, guard pages included; whoever had addresses in it is gone.
        unsafe {
            match self.agent {
                Some(agent) => (agent.unmap)(self.start, self.len),
                None => drop(mm::munmap((self.start - PAGE) as *mut _, self.len + 2 * PAGE)),
            }
        }
    }
}
