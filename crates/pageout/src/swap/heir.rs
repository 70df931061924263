//! What a fork's child gets of what is out: the names of the slots, not the data.
//!
//! ```text
//! parent                                          child
//!   stands still, no page on its way out
//!   bequeath: each page that is out, its slot
//!     counted once more, into shared memory
//!   clone                                    ──►  registers the same areas, takes up what is mapped
//!   goes on                                       inherit: what is not mapped is where the parent had it
//! ```
//! From the first to the clone the parent holds the events lock: nothing comes in, no event is read. What another of
//! its threads unmaps meanwhile is not there in the child either; what it discards waits for its event until after
//! the clone.
//!
//! The child only reads the slots that it inherits. They stay as they are until the last who inherited from that
//! fork has gone; then the parent gives them up ([`Engine::disinherit`]).

use crate::engine::{Engine, Key};
use crate::kernel::Kernel;
use crate::page::Tag;
use crate::space::{Regions, BLOCK, BLOCK_PAGES, PAGE, TOP};
use crate::sync::atomic::{AtomicU32, Ordering::Relaxed};
use crate::sync::WriteGuard;

/// The first page of a file that a bequest is written to. Behind it come the parent's areas, pairs of addresses, and
/// then the heirlooms, at a multiple of their size.
#[repr(C)]
#[derive(Debug)]
pub struct Bequest {
    /// Set by `run` when the last who inherited has gone.
    pub released: AtomicU32,
    /// How many areas.
    pub areas: u32,
    /// How many heirlooms.
    pub heirlooms: u64,
    /// What their checksums were made with.
    pub key: Key,
}

/// Bytes before the areas.
pub const AREAS_AT: usize = 4096;

/// Bytes before the heirlooms, behind so many areas.
pub fn heirlooms_at(areas: usize) -> usize {
    (AREAS_AT + areas * size_of::<[u64; 2]>()).next_multiple_of(size_of::<Heirloom>())
}

/// One page that is out. Plain numbers: it crosses a process border.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Heirloom {
    /// The page's address.
    pub page: u64,
    /// The slot that holds it.
    pub entry: u64,
    /// Low and high half of the checksum of what it holds.
    pub sum: [u64; 2],
}

impl<K: Kernel> Engine<K> {
    /// Pages that [`Engine::bequeath`] will name, more or less. No lock held.
    pub fn out_pages(&self) -> usize {
        self.space.count(|tag| matches!(tag, Tag::Swapped | Tag::Busy | Tag::Cached))
    }

    /// Names every page that is out to `take`, whose slots are then counted once more. The engine stands still
    /// ([`Engine::stand_still`]). With the names comes the lock that keeps things so until the clone is done.
    /// `None`: `take` had no room.
    pub fn bequeath(&self, mut take: impl FnMut(Heirloom) -> bool) -> Option<WriteGuard<'_, Regions>> {
        let mut backoff = crate::sync::Backoff::new();
        let regions = loop {
            let regions = self.events.write();
            if self.space.count(|tag| tag == Tag::Cached) == 0 {
                break regions;
            }
            drop(regions);
            backoff.snooze();
        };
        for (start, block) in self.space.blocks(0, TOP) {
            let block = block.lock();
            for index in 0..BLOCK_PAGES {
                let word = block.word(index);
                if !matches!(word.tag(), Tag::Swapped | Tag::Busy) {
                    continue;
                }
                let sum = block.sum(index);
                let heirloom = Heirloom {
                    page: (start + index * PAGE) as u64,
                    entry: word.payload(),
                    sum: [sum as u64, (sum >> 64) as u64],
                };
                if !take(heirloom) {
                    return None;
                }
                self.place.dup(word.payload(), 1);
            }
        }
        Some(regions)
    }

    /// The counts that [`Engine::bequeath`] added are taken back: nobody reads these slots any more.
    pub fn disinherit(&self, heirlooms: &[Heirloom]) {
        heirlooms.iter().for_each(|heirloom| self.place.put(heirloom.entry, 1));
    }

    /// Takes over what the parent had out, in a child in which nobody runs yet but who waits for this: of `heirlooms`
    /// those whose page is managed, is not mapped, and `is_kept`. The others are what the parent had brought in by
    /// the time of the clone, or memory that children do not get.
    pub fn inherit(&self, heirlooms: &[Heirloom], is_kept: impl Fn(usize) -> bool) {
        self.place.read_from_others(heirlooms.iter().map(|heirloom| heirloom.entry));
        let regions = self.events.write();
        for heirloom in heirlooms {
            let page = heirloom.page as usize;
            if regions.find(page).is_none() || !is_kept(page) {
                continue;
            }
            let index = page % BLOCK / PAGE;
            let mut block = self.space.block_or_new(page).lock();
            block.unit_or_new(index, &self.space.spares);
            let word = block.word(index);
            if !word.is_unknown() {
                continue;
            }
            self.place.dup(heirloom.entry, 1);
            block.set(index, word.inherit(heirloom.entry));
            block.set_sum(index, u128::from(heirloom.sum[0]) | u128::from(heirloom.sum[1]) << 64);
            // What it left with is not known; not never, so that it counts as coming back.
            if let Some(unit) = block.unit_mut(index) {
                unit.usage.evicted_at = self.evictions.load(Relaxed);
            }
        }
    }
}
