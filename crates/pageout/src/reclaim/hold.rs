//! What the owner of memory asks of reclaim: to hold units here, to let units go first.
//!
//! Ranges are bytes, multiples of 4096, and count by units of 64 KiB. From any thread that holds no lock and
//! may allocate; nothing here touches the memory itself.

use crate::engine::Engine;
use crate::kernel::Kernel;
use crate::page::Tag;
use crate::space::{BlockState, BLOCK, BLOCK_PAGES, PAGE, UNIT, UNIT_PAGES};
use crate::sync::atomic::Ordering::Relaxed;
use core::ops::Range;

/// How often the same memory can be held at once.
pub const HOLDS_MAX: u16 = u16::MAX;

/// One unit of a range.
struct UnitAt {
    block_start: usize,
    /// Its first page in the block.
    first: usize,
}

fn units(start: usize, end: usize) -> impl Iterator<Item = UnitAt> {
    // Of no bytes there is none.
    let first = if start < end { start & !(UNIT - 1) } else { end };
    (first..end).step_by(UNIT).map(|at| {
        let block_start = at & !(BLOCK - 1);
        UnitAt { block_start, first: (at - block_start) / PAGE }
    })
}

impl<K: Kernel> Engine<K> {
    /// From here on the units of a range do not leave, until [`Engine::release_hold`] was called as often.
    /// What is out stays out until it is touched. `false`: some unit is held [`HOLDS_MAX`] times, and nothing has changed.
    #[must_use]
    pub fn hold(&self, start: usize, end: usize) -> bool {
        for UnitAt { block_start, first } in units(start, end) {
            let mut block = self.space.block_or_new(block_start).lock();
            let unit = block.unit_or_new(first, &self.space.spares);
            if unit.held == HOLDS_MAX {
                drop(block);
                self.release_hold(start, block_start + first * PAGE);
                return false;
            }
            unit.held += 1;
            if unit.held == 1 {
                self.held.fetch_add(1, Relaxed);
            }
        }
        true
    }

    /// Bytes that are held, however often.
    pub fn held_bytes(&self) -> u64 {
        (self.held.load(Relaxed) * UNIT) as u64
    }

    /// Ends one [`Engine::hold`] of the same range.
    pub fn release_hold(&self, start: usize, end: usize) {
        for UnitAt { block_start, first } in units(start, end) {
            let mut block = self.space.block_or_new(block_start).lock();
            let unit = block.unit_mut(first).expect("unit that is held");
            unit.held = unit.held.checked_sub(1).expect("as many releases as holds");
            if unit.held == 0 {
                self.held.fetch_sub(1, Relaxed);
            }
            if block.is_held(first) {
                continue;
            }
            // A huge block is queued by one of its units.
            let units = if block.huge { 0..BLOCK_PAGES } else { first..first + UNIT_PAGES };
            if !is_queued(&block, units.clone()) && is_resident(&block, units.clone()) {
                self.is_here(&mut block, block_start, units.start..units.start + UNIT_PAGES);
            }
        }
    }

    /// Forgets the signs of use of the units of a range: each leaves when its turn comes next.
    pub fn cool(&self, start: usize, end: usize) {
        for (block_start, block) in self.space.blocks(start, end) {
            let mut block = block.lock();
            for UnitAt { first, .. } in units(start.max(block_start), end.min(block_start + BLOCK)) {
                if let Some(unit) = block.unit_mut(first) {
                    unit.usage.heat = [0; 2];
                }
            }
        }
    }
}

fn is_queued(block: &BlockState, mut pages: Range<usize>) -> bool {
    pages.any(|index| block.unit(index).is_some_and(|unit| unit.usage.queued))
}

fn is_resident(block: &BlockState, mut pages: Range<usize>) -> bool {
    pages.any(|index| block.word(index).tag() == Tag::Resident)
}
