//! The table of a used cluster: one word per slot, and a map of what is taken.
//!
//! Owned by its cluster's state, so by its lock. A table that nobody uses is all zero again but for the
//! bits past the end of a short map, so it can serve the next cluster as it is.

use alloc::boxed::Box;
use alloc::vec::Vec;

use super::{Owner, CLUSTER_SLOTS};

/// A boxed value whose memory was asked for politely: see [`one`].
pub(super) type One<T> = Box<[T; 1]>;

/// Boxes `value`; `None` when there is no memory, which ends nothing.
pub(super) fn one<T>(value: T) -> Option<One<T>> {
    let mut room = Vec::new();
    room.try_reserve_exact(1).ok()?;
    room.push(value);
    room.into_boxed_slice().try_into().ok()
}

/// What is known of a slot: count in bits 0 to 7, flags 8 to 11, space 12 to 27, page 28 to 63.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Word(u64);

impl Word {
    pub(super) const FREE: Self = Self(0);
    /// Not for pages: header, bad, or past the end.
    pub(super) const BAD: Self = Self(1 << 8);
    const CONTINUED: u64 = 1 << 9;
    const COUNT: u64 = 0xff;
    const PAGE_SHIFT: u32 = 28;
    const SPACE_SHIFT: u32 = 12;

    /// The largest count that the word itself holds.
    #[cfg(not(loom))]
    pub(super) const MAX: u32 = 255;
    #[cfg(loom)]
    pub(super) const MAX: u32 = 2;

    pub(super) const fn new(owner: Owner) -> Self {
        debug_assert!(owner.page < 1 << (64 - Self::PAGE_SHIFT));
        Self(1 | (owner.space as u64) << Self::SPACE_SHIFT | owner.page << Self::PAGE_SHIFT)
    }

    pub(super) const fn owner(self) -> Owner {
        Owner { space: (self.0 >> Self::SPACE_SHIFT) as u16, page: self.0 >> Self::PAGE_SHIFT }
    }

    /// The part of the count that is here; the rest is in the cluster's continuation.
    pub(super) const fn count(self) -> u32 {
        (self.0 & Self::COUNT) as u32
    }

    pub(super) const fn with_count(self, count: u32) -> Self {
        debug_assert!(count <= Self::MAX);
        Self(self.0 & !Self::COUNT | count as u64)
    }

    pub(super) const fn is_bad(self) -> bool {
        self.0 == Self::BAD.0
    }

    pub(super) const fn is_continued(self) -> bool {
        self.0 & Self::CONTINUED != 0
    }

    pub(super) const fn with_continued(self, on: bool) -> Self {
        Self(if on { self.0 | Self::CONTINUED } else { self.0 & !Self::CONTINUED })
    }

    /// 0 when the count is exactly one and nothing hangs on it elsewhere. Branchless, so that a run of
    /// words is looked at by vector instructions.
    const fn differs_from_single(self) -> u64 {
        (self.0 & (Self::COUNT | Self::CONTINUED | Self::BAD.0)) ^ 1
    }
}

/// Words of the map of taken slots.
const MAP: usize = CLUSTER_SLOTS.div_ceil(64);
/// Taken for good in the last word of the map, where a cluster has fewer than 64 slots.
const PAST_END: u64 = if CLUSTER_SLOTS % 64 == 0 { 0 } else { !0 << (CLUSTER_SLOTS % 64) };

pub(super) struct Table {
    /// Bit i set: slot i is used or bad. Agrees with `words`; it is what searches look at.
    taken: [u64; MAP],
    words: [Word; CLUSTER_SLOTS],
    /// See [`Chain`].
    next: Option<One<Table>>,
}

impl Table {
    pub(super) fn new() -> Option<One<Self>> {
        let mut table = Self { taken: [0; MAP], words: [Word::FREE; CLUSTER_SLOTS], next: None };
        table.taken[MAP - 1] |= PAST_END;
        one(table)
    }

    pub(super) fn word(&self, at: usize) -> Word {
        self.words[at]
    }

    pub(super) fn word_mut(&mut self, at: usize) -> &mut Word {
        &mut self.words[at]
    }

    /// The first free run of `1 << order` slots, naturally aligned, at or after `from`.
    pub(super) fn find(&self, order: u8, from: usize) -> Option<usize> {
        let n = 1usize << order;
        let from = from.next_multiple_of(n);
        if n >= 64 {
            return (from..CLUSTER_SLOTS)
                .step_by(n)
                .find(|&at| self.taken[at / 64..(at + n) / 64].iter().all(|&taken| taken == 0));
        }
        (from / 64..MAP).find_map(|i| {
            let below = if i == from / 64 { (1u64 << (from % 64)) - 1 } else { 0 };
            let starts = run_starts(!(self.taken[i] | below), order);
            (starts != 0).then(|| i * 64 + starts.trailing_zeros() as usize)
        })
    }

    /// Takes the free run of `n` slots at `at` for `owner` and the pages that follow it.
    pub(super) fn take_run(&mut self, at: usize, n: usize, owner: Owner) {
        self.mark(at, n, true);
        let first = Word::new(owner);
        for (i, word) in self.words[at..at + n].iter_mut().enumerate() {
            debug_assert!(*word == Word::FREE, "a slot is given once");
            *word = Word(first.0 + ((i as u64) << Word::PAGE_SHIFT));
        }
    }

    /// Takes free slots one by one at or after `from`, as many as `give` wants. `give` gets the slot
    /// and answers with its owner.
    pub(super) fn take_singles(
        &mut self,
        from: usize,
        wanted: usize,
        mut give: impl FnMut(usize) -> Owner,
    ) -> usize {
        let mut done = 0;
        for i in from / 64..MAP {
            let below = if i == from / 64 { (1u64 << (from % 64)) - 1 } else { 0 };
            let mut free = !(self.taken[i] | below);
            while free != 0 && done < wanted {
                let bit = free.trailing_zeros() as usize;
                free &= free - 1;
                self.taken[i] |= 1 << bit;
                let at = i * 64 + bit;
                debug_assert!(self.words[at] == Word::FREE, "a slot is given once");
                self.words[at] = Word::new(give(at));
                done += 1;
            }
            if done == wanted {
                break;
            }
        }
        done
    }

    /// Makes a slot free, or bad.
    pub(super) fn set(&mut self, at: usize, word: Word) {
        self.words[at] = word;
        self.mark(at, 1, word != Word::FREE);
    }

    /// Frees the run if each of its counts is one and nothing else is known of it; else changes nothing.
    pub(super) fn free_if_single(&mut self, at: usize, n: usize) -> bool {
        let words = &mut self.words[at..at + n];
        if words.iter().fold(0, |all, word| all | word.differs_from_single()) != 0 {
            return false;
        }
        words.fill(Word::FREE);
        self.mark(at, n, false);
        true
    }

    /// The first taken slot at or after `from`.
    #[cfg(any(test, feature = "simulated", loom, shuttle))]
    pub(super) fn next_taken(&self, from: usize) -> Option<usize> {
        (from / 64..MAP).find_map(|i| {
            let below = if i == from / 64 { (1u64 << (from % 64)) - 1 } else { 0 };
            let past = if i == MAP - 1 { PAST_END } else { 0 };
            let taken = self.taken[i] & !below & !past;
            (taken != 0).then(|| i * 64 + taken.trailing_zeros() as usize)
        })
    }

    fn mark(&mut self, at: usize, n: usize, taken: bool) {
        let mut change = |i: usize, mask: u64| {
            if taken {
                self.taken[i] |= mask
            } else {
                self.taken[i] &= !mask
            }
        };
        let (mut at, end) = (at, at + n);
        while at < end {
            let here = (end - at).min(64 - at % 64);
            change(at / 64, (!0 >> (64 - here)) << (at % 64));
            at += here;
        }
    }
}

/// Tables that nobody uses. They hang on each other, so there may be any number.
#[derive(Default)]
pub(super) struct Chain {
    first: Option<One<Table>>,
    len: usize,
}

impl Chain {
    pub(super) fn push(&mut self, mut table: One<Table>) {
        table[0].next = self.first.take();
        self.first = Some(table);
        self.len += 1;
    }

    pub(super) fn pop(&mut self) -> Option<One<Table>> {
        let mut table = self.first.take()?;
        self.first = table[0].next.take();
        self.len -= 1;
        Some(table)
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }
}

impl Drop for Chain {
    /// One by one: a long chain must not need a deep stack.
    fn drop(&mut self) {
        while self.pop().is_some() {}
    }
}

/// The bits of `free` at which a naturally aligned run of `1 << order` ones starts; `order` is below 6.
fn run_starts(free: u64, order: u8) -> u64 {
    const ALIGNED: [u64; 6] = [
        !0,
        0x5555_5555_5555_5555,
        0x1111_1111_1111_1111,
        0x0101_0101_0101_0101,
        0x0001_0001_0001_0001,
        0x0000_0001_0000_0001,
    ];
    (0..order).fold(free, |starts, i| starts & (starts >> (1 << i))) & ALIGNED[order as usize]
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::*;

    const OWNER: Owner = Owner { space: 7, page: (1 << 36) - 600 };

    #[test]
    fn word_keeps_what_it_is_given() {
        let word = Word::new(OWNER).with_count(200).with_continued(true);
        assert_eq!(word.owner(), OWNER);
        assert_eq!(word.count(), 200);
        assert!(word.is_continued() && !word.with_continued(false).is_continued());
    }

    #[test]
    fn finds_aligned_runs_of_every_order() {
        for order in 0..=super::super::CLUSTER_ORDER {
            let mut table = Table::new().unwrap();
            let table = &mut table[0];
            let n = 1 << order;
            table.set(CLUSTER_SLOTS / 2, Word::BAD);
            let mut found = 0;
            while let Some(at) = table.find(order, 0) {
                assert_eq!(at % n, 0);
                table.take_run(at, n, OWNER);
                assert_eq!(table.word(at + n - 1).owner().page, OWNER.page + n as u64 - 1);
                found += n;
            }
            assert_eq!(found, CLUSTER_SLOTS - n, "order {order}: all but the run with the bad slot");
            let first = (0..CLUSTER_SLOTS / n).map(|i| i * n).find(|&at| table.free_if_single(at, n));
            assert_eq!(table.find(order, 0), first);
        }
    }
}
