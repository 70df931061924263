//! The managed addresses of one process: blocks of 2 MiB, units of 64 KiB in them, a word per page.
//!
//! A two-level table maps an address to its block without a lock; blocks and units come with the first
//! page that is known of them. Everything in a block is guarded by the block's lock, which comes after the events lock and
//! before all others.
//!
//! Memory: 16 words and 16 checksums a unit, 416 bytes for 64 KiB, so one page touched here and there
//! costs less than a page of its own; a dense gigabyte costs 6.5 MiB. Units go once all of them is unmapped; blocks, which
//! are looked up without a lock, stay: 300 bytes for each 2 MiB that were ever managed, and 4 KiB for each GiB.

pub mod discover;
pub mod event;
pub(crate) mod order;
pub mod pins;
mod region;

pub use region::{Change, Region, Regions};

use crate::page::{Tag, Word};
use crate::slot::Memory;
use crate::sync::atomic::{
    AtomicUsize,
    Ordering::{AcqRel, Acquire, Relaxed},
};
use crate::sync::{zeros, Guard, Lock, LockClass, TablePtr, OTHER_LOCKS};
use alloc::boxed::Box;
use alloc::vec::Vec;
use core::ops::Range;

/// Bytes of a page.
pub const PAGE: usize = 4096;
/// Bytes of a block.
pub const BLOCK: usize = 2 << 20;
/// Pages of a block.
pub const BLOCK_PAGES: usize = 1 << BLOCK_ORDER;
/// Its order, the largest that there is: pages of a run as a power of two.
pub const BLOCK_ORDER: u8 = 9;
/// Pages of a unit: what reclaim queues and takes.
pub const UNIT_PAGES: usize = 16;
/// Bytes of a unit.
pub const UNIT: usize = UNIT_PAGES * PAGE;
/// Units of a block.
pub const BLOCK_UNITS: usize = BLOCK / UNIT;
/// Past the last user address (47 bits; programs that ask for more with MAP_FIXED are not managed there).
pub const TOP: usize = 1 << 47;

const LEAF_BITS: usize = 13;
const LEAF: usize = 1 << LEAF_BITS;

/// Acquisitions and waits of block locks.
pub static BLOCK_LOCKS: LockClass = LockClass::new();

/// The address of the page that has `address`.
pub const fn page_start(address: usize) -> usize {
    address & !(PAGE - 1)
}

/// What reclaim knows of a unit. See `reclaim::policy`.
#[derive(Clone, Copy, Debug, Default)]
pub struct Usage {
    /// The clock of evictions when the unit left last; 0 = never.
    pub evicted_at: u32,
    /// The pages that left at its last turn and are not back, a bit for each.
    pub left: u16,
    /// How often each page came back soon: the low bits and the high bits of 0 to 3.
    pub heat: [u16; 2],
    /// The pages that were out when it began to be watched which of them are used (`fault::order`): they come in one by
    /// one. 0: it is not.
    pub sampled: u16,
    /// As what.
    pub sampled_as: crate::fault::order::Kind,
    /// It is in a queue.
    pub queued: bool,
    /// A page of it was shared when its turn came, and has been made the process's own: it goes now, or is pinned.
    pub unshared: bool,
    /// What could not leave when it was last its turn ([`BlockState::park`]).
    parked: Parked,
}

/// See [`Usage`].
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
enum Parked {
    #[default]
    No,
    /// The unit.
    Unit,
    /// The huge page that it stands for.
    Whole,
}

/// A bit for each page of a part of some units.
pub fn bits(pages: Range<usize>) -> u64 {
    pages.fold(0, |bits, page| bits | 1 << page)
}

/// 16 pages and what is known of them.
pub struct Unit {
    /// Where each page is.
    pub words: [Word; UNIT_PAGES],
    /// Keyed checksum of what each page's entry holds; 0 = the entry holds nothing yet.
    pub sums: [u128; UNIT_PAGES],
    /// For the reclaim policy.
    pub usage: Usage,
    /// How many hold it here: it does not leave while this is above 0.
    pub held: u16,
}

impl Unit {
    /// All None.
    pub fn new() -> Self {
        Self { words: [Word::default(); UNIT_PAGES], sums: [0; UNIT_PAGES], usage: Usage::default(), held: 0 }
    }

    /// A bit for each page that is mapped.
    pub fn resident(&self) -> u16 {
        self.pages(Tag::Resident)
    }

    /// A bit for each page whose word says so.
    pub fn pages(&self, tag: Tag) -> u16 {
        let is = |page: &usize| self.words[*page].tag() == tag;
        (0..UNIT_PAGES).filter(is).fold(0, |bits, page| bits | 1 << page)
    }

    /// Nothing is known of it, and nobody holds it.
    fn is_empty(&self) -> bool {
        self.held == 0 && self.words.iter().all(|word| word.tag() == Tag::None && word.is_unknown())
    }
}

impl Default for Unit {
    fn default() -> Self {
        Self::new()
    }
}

type Units = [Option<Box<Unit>>; BLOCK_UNITS];

const NO_UNITS: Units = [const { None }; BLOCK_UNITS];

/// What a block's lock guards.
pub struct BlockState {
    units: Units,
    /// Pages were unmapped: there may be units that are empty.
    pub thinned: bool,
    /// There may be units that could not leave.
    parked: bool,
    /// Words of units that come are newer than those of units that went.
    generation: u64,
    /// Pages whose word is Resident.
    pub resident: u16,
    /// Pages whose word is Swapped.
    out: u16,
    /// Pages whose word is Gone.
    gone: u16,
    /// Last known to be mapped by one huge page.
    pub huge: bool,
    /// Small pages were mapped here, and as far as is known the page table that they left behind still is: a huge
    /// page that came in would be split.
    pub table: bool,
    /// Huge pages that were split when they came in, though no small one was known. Once may be a page table from before
    /// the block was known; twice, and it is where huge pages are forbidden (MADV_NOHUGEPAGE) or
    /// not asked for (`--swapin madvise`): there each fault leaves one.
    pub splits: u8,
}

impl BlockState {
    /// The unit of page `first`, or the huge page that it stands for (`whole`), could not leave; until its next turn it counts as
    /// what cannot go.
    pub fn park(&mut self, first: usize, whole: bool) {
        self.parked = true;
        let parked = if whole { Parked::Whole } else { Parked::Unit };
        self.unit_mut(first).into_iter().for_each(|unit| unit.usage.parked = parked);
    }

    /// It is its turn again.
    pub fn unpark(&mut self, first: usize) {
        self.unit_mut(first).into_iter().for_each(|unit| unit.usage.parked = Parked::No);
    }

    /// Pages that are there and could not leave: each once, though turns of units may still wait beside that of a huge page.
    fn count_parked(&mut self) -> usize {
        if !self.parked {
            return 0;
        }
        let parked = || self.units.iter().flatten().filter(|unit| unit.usage.parked != Parked::No);
        self.parked = parked().next().is_some();
        if self.huge && parked().any(|unit| unit.usage.parked == Parked::Whole) {
            return self.resident as usize;
        }
        parked().map(|unit| unit.resident().count_ones() as usize).sum()
    }

    /// The unit of page `index`, if anything is known of it.
    pub fn unit(&self, index: usize) -> Option<&Unit> {
        self.units[index / UNIT_PAGES].as_deref()
    }

    /// The same, to change.
    pub fn unit_mut(&mut self, index: usize) -> Option<&mut Unit> {
        self.units[index / UNIT_PAGES].as_deref_mut()
    }

    /// The unit of page `index`; a missing one comes from `spares`.
    pub fn unit_or_new(&mut self, index: usize, spares: &Spares) -> &mut Unit {
        self.unit_by(index, spares, Memory::Asked).expect("memory is asked for")
    }

    /// The same with memory from where the caller says; `None`: there is none.
    pub fn unit_by(&mut self, index: usize, spares: &Spares, memory: Memory) -> Option<&mut Unit> {
        let unit = &mut self.units[index / UNIT_PAGES];
        if unit.is_none() {
            let mut new = spares.unit(memory)?;
            // Who has let go of the lock, for I/O, must not take one that came meanwhile for the one that it knew.
            new.words = [Word::unknown(self.generation); UNIT_PAGES];
            *unit = Some(new);
        }
        unit.as_deref_mut()
    }

    /// Takes out the units of which nothing is known. What is queued goes later, when its turn has come.
    fn take_empty(&mut self) -> Units {
        let mut empty = NO_UNITS;
        for (place, slot) in self.units.iter_mut().enumerate() {
            let Some(unit) = slot.as_ref().filter(|unit| unit.is_empty()) else { continue };
            if unit.usage.queued {
                self.thinned = true;
                continue;
            }
            let newest = unit.words.iter().map(|word| word.generation()).max();
            self.generation = Word::unknown(self.generation.max(newest.unwrap_or(0) + 1)).generation();
            empty[place] = slot.take();
        }
        empty
    }

    /// The word of page `index`.
    pub fn word(&self, index: usize) -> Word {
        self.unit(index).map_or(Word::default(), |unit| unit.words[index % UNIT_PAGES])
    }

    /// Sets the word of page `index`, whose unit exists, and keeps the counts of resident pages and of those out. One that
    /// comes is taken for a small one; see [`BlockState::became_whole`].
    pub fn set(&mut self, index: usize, word: Word) {
        let unit = self.units[index / UNIT_PAGES].as_deref_mut().expect("unit of a known page");
        let old = core::mem::replace(&mut unit.words[index % UNIT_PAGES], word);
        self.resident -= (old.tag() == Tag::Resident) as u16;
        self.resident += (word.tag() == Tag::Resident) as u16;
        self.out -= (old.tag() == Tag::Swapped) as u16;
        self.out += (word.tag() == Tag::Swapped) as u16;
        self.gone -= (old.tag() == Tag::Gone) as u16;
        self.gone += (word.tag() == Tag::Gone) as u16;
        self.table |= word.tag() == Tag::Resident;
    }

    /// The block was found to be mapped by one huge page.
    pub fn became_whole(&mut self) {
        (self.huge, self.table) = (true, false);
    }

    /// What was a huge page are small ones now.
    pub fn became_split(&mut self) {
        (self.huge, self.table) = (false, true);
    }

    /// The checksum of page `index`.
    pub fn sum(&self, index: usize) -> u128 {
        self.unit(index).map_or(0, |unit| unit.sums[index % UNIT_PAGES])
    }

    /// Sets the checksum of page `index`, whose unit exists.
    pub fn set_sum(&mut self, index: usize, sum: u128) {
        self.units[index / UNIT_PAGES].as_deref_mut().expect("unit of a known page").sums
            [index % UNIT_PAGES] = sum;
    }

    /// A bit for each page of the unit of page `index` that is mapped and has an entry.
    pub fn placed(&self, index: usize) -> u16 {
        let is = |word: Word| word.tag() == Tag::Resident && word.payload() != 0;
        self.unit(index).map_or(0, |unit| {
            (0..UNIT_PAGES).filter(|page| is(unit.words[*page])).fold(0, |bits, page| bits | 1 << page)
        })
    }

    /// Does somebody hold the unit of page `index`, or, of a huge page, any part of it?
    pub fn is_held(&self, index: usize) -> bool {
        let held = |unit: &Option<Box<Unit>>| unit.as_ref().is_some_and(|unit| unit.held > 0);
        if self.huge {
            self.units.iter().any(held)
        } else {
            held(&self.units[index / UNIT_PAGES])
        }
    }

    /// Pages `from..from + n` are all in `tag`.
    pub fn all(&self, from: usize, n: usize, tag: Tag) -> bool {
        (from..from + n).all(|index| self.word(index).tag() == tag)
    }
}

/// 2 MiB of addresses, aligned.
pub struct Block {
    state: Lock<BlockState>,
}

impl Block {
    fn new() -> Self {
        let state = BlockState {
            units: NO_UNITS,
            thinned: false,
            parked: false,
            generation: 0,
            resident: 0,
            out: 0,
            gone: 0,
            huge: false,
            table: false,
            splits: 0,
        };
        Self { state: Lock::new(state, &BLOCK_LOCKS) }
    }

    /// Takes the block's lock.
    pub fn lock(&self) -> Guard<'_, BlockState> {
        self.state.lock()
    }
}

type Leaf = [TablePtr<Block>; LEAF];

fn new_leaf() -> Box<Leaf> {
    zeros(LEAF).try_into().expect("so many were made")
}

/// Leaves, blocks and units made ahead, so that the fault path allocates nothing.
// Boxes: they are handed on as they are, published by address.
#[allow(clippy::vec_box)]
pub struct Spares {
    units: Lock<Vec<Box<Unit>>>,
    blocks: Lock<Vec<Box<Block>>>,
    leaves: Lock<Vec<Box<Leaf>>>,
}

/// Units and blocks to keep ready.
const SPARE_UNITS: usize = 256;
const SPARE_BLOCKS: usize = 64;
const SPARE_LEAVES: usize = 2;

impl Spares {
    fn new() -> Self {
        // What somebody else was quicker to make comes back.
        let spares = Self {
            units: Lock::new(Vec::with_capacity(SPARE_UNITS), &OTHER_LOCKS),
            blocks: Lock::new(Vec::with_capacity(2 * SPARE_BLOCKS), &OTHER_LOCKS),
            leaves: Lock::new(Vec::with_capacity(16 * SPARE_LEAVES), &OTHER_LOCKS),
        };
        spares.refill();
        spares
    }

    fn unit(&self, memory: Memory) -> Option<Box<Unit>> {
        let spare = self.units.lock().pop();
        memory.or_new(spare, || Some(Box::new(Unit::new())))
    }

    /// Makes what was used up. From a thread that may allocate; no lock held.
    pub fn refill(&self) {
        self.units.fill_up(SPARE_UNITS, || Some(Box::new(Unit::new())));
        self.blocks.fill_up(SPARE_BLOCKS, || Some(Box::new(Block::new())));
        self.leaves.fill_up(SPARE_LEAVES, || Some(new_leaf()));
    }
}

/// All blocks of a process.
pub struct Space {
    root: Box<[TablePtr<Leaf>]>,
    /// Made ahead for the fault path.
    pub spares: Spares,
    out: AtomicUsize,
}

impl Space {
    /// An empty space.
    pub fn new() -> Self {
        Self { root: zeros(TOP / BLOCK / LEAF), spares: Spares::new(), out: AtomicUsize::new(0) }
    }

    /// The block of `address`, if anything is known of it.
    pub fn block(&self, address: usize) -> Option<&Block> {
        let number = address / BLOCK;
        let leaf = self.root.get(number / LEAF)?.load(Acquire);
        // SAFETY: leaves and blocks are published whole and never freed before the space.
        let block = unsafe { leaf.as_ref()? }[number % LEAF].load(Acquire);
        unsafe { block.as_ref() }
    }

    /// The block of `address`; made when it is not there. `address` is below [`TOP`].
    pub fn block_or_new(&self, address: usize) -> &Block {
        self.block_by(address, Memory::Asked).expect("memory is asked for")
    }

    /// The same with memory from where the caller says; `None`: there is none.
    pub fn block_by(&self, address: usize, memory: Memory) -> Option<&Block> {
        let number = address / BLOCK;
        let leaf = publish(&self.root[number / LEAF], &self.spares.leaves, memory, new_leaf)?;
        publish(&leaf[number % LEAF], &self.spares.blocks, memory, || Box::new(Block::new()))
    }

    /// Pages that are mapped in the program, as far as is known, and those of them that could not leave when it was last their
    /// turn: a walk over all blocks, which counts what is out, too, and
    /// frees the units that are empty. From a thread that may free memory; no block lock held.
    pub fn resident(&self) -> (usize, usize) {
        let (mut resident, mut parked, mut out) = (0, 0, 0);
        for (_, block) in self.blocks(0, TOP) {
            let mut block = block.lock();
            resident += block.resident as usize;
            parked += block.count_parked();
            out += block.out as usize;
            // Most have none: this walk is taken often.
            let empty = core::mem::take(&mut block.thinned).then(|| block.take_empty());
            drop(block);
            drop(empty);
        }
        self.out.store(out, Relaxed);
        (resident, parked)
    }

    /// Pages that were out at the last such walk.
    pub fn out(&self) -> usize {
        self.out.load(Relaxed)
    }

    /// Pages whose word says what is asked for: a walk over all blocks. No block lock held.
    pub fn count(&self, is: impl Fn(Tag) -> bool) -> usize {
        let of = |block: &Block| {
            let block = block.lock();
            (0..BLOCK_PAGES).filter(|index| is(block.word(*index).tag())).count()
        };
        self.blocks(0, TOP).map(|(_, block)| of(block)).sum()
    }

    /// The first run of pages in a range of which anything is known, within a block. No block lock held.
    pub(crate) fn first_known(&self, start: usize, end: usize) -> Option<(usize, usize)> {
        self.blocks(start, end).find_map(|(block_start, block)| {
            let block = block.lock();
            let (from, to) = (start.max(block_start), end.min(block_start + BLOCK));
            let mut pages = (from..to).step_by(PAGE);
            let is_known = |at: &usize| !block.word((at - block_start) / PAGE).is_empty();
            let first = pages.find(is_known)?;
            Some((first, first + PAGE * (1 + pages.take_while(is_known).count())))
        })
    }

    /// Does a page of a range have a word that `is`? No block lock held.
    pub(crate) fn any(&self, start: usize, end: usize, is: impl Fn(Tag) -> bool) -> bool {
        self.blocks(start, end).any(|(block_start, block)| {
            let block = block.lock();
            let (from, to) = (start.max(block_start), end.min(block_start + BLOCK));
            let mut pages = (from - block_start) / PAGE..(to - block_start) / PAGE;
            pages.any(|index| is(block.word(index).tag()))
        })
    }

    /// Shows each page of a range that is Gone: its block, where that starts, and the page in it. No block lock held.
    pub(crate) fn each_gone(
        &self,
        start: usize,
        end: usize,
        mut each: impl FnMut(&mut BlockState, usize, usize),
    ) {
        for (block_start, block) in self.blocks(start, end) {
            let (from, to) = (start.max(block_start), end.min(block_start + BLOCK));
            let mut block = block.lock();
            for index in (from - block_start) / PAGE..(to - block_start) / PAGE {
                if block.gone == 0 {
                    break;
                }
                if block.word(index).tag() == Tag::Gone {
                    each(&mut block, block_start, index);
                }
            }
        }
    }

    /// Each known block that has addresses in `start..end`, with its first address.
    pub fn blocks(&self, start: usize, end: usize) -> impl Iterator<Item = (usize, &Block)> + '_ {
        let end = end.min(TOP);
        let mut at = start & !(BLOCK - 1);
        core::iter::from_fn(move || {
            while at < end {
                let number = at / BLOCK;
                if self.root[number / LEAF].load(Acquire).is_null() {
                    at = (number / LEAF + 1) * LEAF * BLOCK;
                    continue;
                }
                let here = at;
                at += BLOCK;
                if let Some(block) = self.block(here) {
                    return Some((here, block));
                }
            }
            None
        })
    }
}

impl Default for Space {
    fn default() -> Self {
        Self::new()
    }
}

/// The value behind `slot`; the first to come takes it from the `spares`, or makes it if `memory` is asked for.
#[allow(clippy::vec_box)]
fn publish<'a, T>(
    slot: &'a TablePtr<T>,
    spares: &Lock<Vec<Box<T>>>,
    memory: Memory,
    make: impl FnOnce() -> Box<T>,
) -> Option<&'a T> {
    let mut found = slot.load(Acquire);
    if found.is_null() {
        let spare = spares.lock().pop();
        let made = Box::into_raw(memory.or_new(spare, || Some(make()))?);
        found = match slot.compare_exchange(core::ptr::null_mut(), made, AcqRel, Acquire) {
            Ok(_) => made,
            Err(first) => {
                // SAFETY: ours was never published.
                let made = unsafe { Box::from_raw(made) };
                let mut spares = spares.lock();
                if spares.len() < spares.capacity() {
                    spares.push(made);
                }
                first
            }
        };
    }
    // SAFETY: published whole, never freed before its owner.
    Some(unsafe { &*found })
}

impl Drop for Space {
    fn drop(&mut self) {
        for leaf in self.root.iter() {
            let leaf = leaf.load(Acquire);
            if leaf.is_null() {
                continue;
            }
            // SAFETY: made by Box in `publish`; nobody else is left.
            let leaf = unsafe { Box::from_raw(leaf) };
            for block in leaf.iter() {
                let block = block.load(Acquire);
                if !block.is_null() {
                    // SAFETY: the same.
                    drop(unsafe { Box::from_raw(block) });
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_appear_once_and_are_found_in_order() {
        let space = Space::new();
        assert!(space.block(0x7f00_0000_0000).is_none());
        for address in [0x7f00_0060_0000, 0x5500_0000_0000, 0x7f00_0000_1000] {
            space.block_or_new(address);
        }
        assert!(core::ptr::eq(space.block_or_new(0x7f00_0000_2000), space.block(0x7f00_0000_0000).unwrap()));
        let found: Vec<usize> = space.blocks(0, TOP).map(|(start, _)| start).collect();
        assert_eq!(found, [0x5500_0000_0000, 0x7f00_0000_0000, 0x7f00_0060_0000]);
    }

    #[test]
    fn empty_units_go_and_those_that_come_are_newer() {
        let space = Space::new();
        let look = |unit: &dyn Fn(&mut Unit)| {
            let mut block = space.block_or_new(0).lock();
            unit(block.unit_or_new(3, &space.spares));
            block.thinned = true;
            drop(block);
            space.resident();
            space.block(0).unwrap().lock().unit(3).map(|unit| unit.words[3])
        };
        let known = look(&|unit| unit.words[3] = unit.words[3].adopt().leave(1)).unwrap();
        assert_eq!(look(&|unit| unit.words[3] = known.discard()).map(Word::is_unknown), Some(false));
        assert!(look(&|unit| (unit.words[3], unit.held) = (known.forget(), 1)).is_some());
        assert!(look(&|unit| (unit.held, unit.usage.queued) = (0, true)).is_some());
        assert!(look(&|unit| unit.usage.queued = false).is_none());
        let newer = look(&|unit| unit.words[3] = unit.words[3].adopt().leave(1)).unwrap();
        assert!(newer != known && newer.generation() > known.generation());
    }

    #[test]
    fn resident_pages_are_counted() {
        let space = Space::new();
        let mut block = space.block_or_new(0).lock();
        block.unit_or_new(3, &space.spares);
        let word = block.word(3).adopt();
        block.set(3, word);
        assert_eq!(block.resident, 1);
        block.set(3, word.leave(1));
        assert_eq!(block.resident, 0);
    }
}
