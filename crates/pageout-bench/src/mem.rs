//! The memory that workloads work on: private anonymous mappings of whole huge pages.
//!
//! A mapping belongs to the process; that its pages leave and come back underneath is the subject of
//! the measurements and invisible to the language. Or a region of the library, whose faults the workload's threads
//! answer themselves.

use std::io;
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;
use std::sync::OnceLock;

use anyhow::Result;
use pageout::{Delivery, Region, Swap};

use crate::pattern::WORDS;
use crate::units::{Bytes, HUGE};

/// What the mapping asks of transparent huge pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pages {
    /// `MADV_HUGEPAGE`.
    Huge,
    /// `MADV_NOHUGEPAGE`.
    Small,
    /// Nothing: the system's setting decides.
    Default,
}

/// What regions are mapped from, in a workload of the engine `pageout-inline`.
static SWAP: OnceLock<Swap> = OnceLock::new();

/// The same, for its counters.
pub fn swap() -> Option<&'static Swap> {
    SWAP.get()
}

/// Zeroed private anonymous memory, 2 MiB aligned, unmapped on drop.
pub struct Map {
    start: NonNull<u64>,
    words: usize,
    mapped: (usize, usize),
    region: Option<Region>,
}

// SAFETY: the memory is owned by the Map; access goes by the usual borrow rules or by atomics.
unsafe impl Send for Map {}
// SAFETY: shared access hands out atomics only.
unsafe impl Sync for Map {}

impl Map {
    /// Maps `bytes`, rounded up to huge pages.
    pub fn new(bytes: usize, pages: Pages) -> io::Result<Map> {
        let len = bytes.max(1).next_multiple_of(HUGE);
        let whole = len + HUGE;
        // SAFETY: a fresh mapping at an address of the kernel's choice touches nothing that exists.
        let address = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                whole,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if address == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let mapped = (address as usize, whole);
        let start = NonNull::new(mapped.0.next_multiple_of(HUGE) as *mut u64).expect("mmap gives no null");
        let map = Map { start, words: len / 8, mapped, region: None };
        let advice = match pages {
            Pages::Huge => libc::MADV_HUGEPAGE,
            Pages::Small => libc::MADV_NOHUGEPAGE,
            Pages::Default => return Ok(map),
        };
        // SAFETY: the range is the mapping made above; the advice changes no contents.
        if unsafe { libc::madvise(map.start.as_ptr().cast(), len, advice) } != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(map)
    }

    /// Maps `bytes` as a region with inline delivery, of which `memory` stays in memory.
    pub fn inline(bytes: usize, memory: Bytes, pages: Pages) -> Result<Map> {
        if SWAP.get().is_none() {
            let memory = pageout::Bytes(memory.0);
            let builder = Swap::builder().memory(memory).device("mem").delivery(Delivery::Inline);
            // Small pages only, where they are asked for.
            let builder = if pages == Pages::Small { builder.max_order(8) } else { builder };
            let _ = SWAP.set(builder.build()?);
        }
        let len = bytes.max(1).next_multiple_of(HUGE);
        let region = SWAP.get().expect("set above").map(len)?;
        let start = NonNull::new(region.as_mut_ptr().cast()).expect("a region is not at 0");
        Ok(Map { start, words: len / 8, mapped: (0, 0), region: Some(region) })
    }

    /// How many of its pages of 4 KiB are in memory.
    pub fn resident_pages(&self) -> io::Result<usize> {
        let mut there = vec![0u8; self.words / WORDS];
        // SAFETY: the range is mapped, and there is a byte for each of its pages.
        if unsafe { libc::mincore(self.start.as_ptr().cast(), self.words * 8, there.as_mut_ptr()) } != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(there.iter().filter(|page| **page & 1 != 0).count())
    }

    /// Address of the first byte.
    pub fn address(&self) -> usize {
        self.start.as_ptr() as usize
    }

    /// All words, for one owner.
    pub fn words_mut(&mut self) -> &mut [u64] {
        // SAFETY: the mapping is readable, writable and zeroed, lives as long as `self`, and `&mut self`
        // makes this the only access.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.words) }
    }

    /// All bytes, for one owner; page-aligned, as direct I/O wants them.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above; any word is eight valid bytes and the other way round.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr().cast(), self.words * 8) }
    }

    /// All words, for threads that share them.
    pub fn atomics(&self) -> &[AtomicU64] {
        // SAFETY: as above; AtomicU64 has u64's layout, and shared access is by atomics only.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr().cast(), self.words) }
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        if self.region.is_some() {
            return;
        }
        // SAFETY: exactly the range that was mapped; no borrow of it outlives `self`.
        unsafe { libc::munmap(self.mapped.0 as *mut libc::c_void, self.mapped.1) };
    }
}

/// Writes `word` now: the compiler does not move it past another `touch` or `look`.
pub fn touch(word: &mut u64, value: u64) {
    // SAFETY: a valid, exclusive reference.
    unsafe { std::ptr::write_volatile(word, value) }
}

/// Reads `word` now: the compiler does not move it past another `touch` or `look`.
pub fn look(word: &u64) -> u64 {
    // SAFETY: a valid reference.
    unsafe { std::ptr::read_volatile(word) }
}
