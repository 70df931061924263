//! A set of trunk numbers: a bit for each, so that 16 TiB cost 32 KiB.

use alloc::vec::Vec;

/// Words that a set has at least: 64 GiB of the largest trunks, so that few ever grow.
const LEAST_WORDS: usize = 16;

/// Trunk numbers. Grows only by memory that was got before, so a lock may be held meanwhile.
#[derive(Default)]
pub(super) struct TrunkSet {
    bits: Vec<u64>,
    /// All words of `bits` before this one are 0.
    low: usize,
}

impl TrunkSet {
    /// The trunks 0 to `n - 1`; `None` without memory.
    pub(super) fn first(n: u32) -> Option<Self> {
        let full = n as usize / 64;
        let words = (full + 1).max(LEAST_WORDS);
        let mut bits = Vec::new();
        bits.try_reserve_exact(words).ok()?;
        bits.resize(full, !0);
        bits.resize(words, 0);
        bits[full] = (1 << (n % 64)) - 1;
        Some(Self { bits, low: 0 })
    }

    /// Memory with which `number` fits into any set; `None` if there is none.
    pub(super) fn room(number: u32) -> Option<Vec<u64>> {
        let words = (number as usize / 64 + 1).next_power_of_two();
        let mut room = Vec::new();
        room.try_reserve_exact(words).ok()?;
        room.resize(words, 0);
        Some(room)
    }

    /// Whether `number` fits in as it is.
    pub(super) fn fits(&self, number: u32) -> bool {
        self.bits.len() > number as usize / 64
    }

    /// Grows into `room`, if it is larger, and leaves there what is to be dropped.
    pub(super) fn grow(&mut self, room: &mut Vec<u64>) {
        if room.len() > self.bits.len() {
            room[..self.bits.len()].copy_from_slice(&self.bits);
            core::mem::swap(&mut self.bits, room);
        }
    }

    /// Whether `number` was new. Not where there is no room.
    pub(super) fn insert(&mut self, number: u32) -> bool {
        let (word, bit) = (number as usize / 64, 1 << (number % 64));
        let Some(bits) = self.bits.get_mut(word) else { return false };
        let new = *bits & bit == 0;
        *bits |= bit;
        self.low = self.low.min(word);
        new
    }

    /// Whether `number` was there.
    pub(super) fn remove(&mut self, number: u32) -> bool {
        let was = self.contains(number);
        if was {
            self.bits[number as usize / 64] &= !(1 << (number % 64));
        }
        was
    }

    pub(super) fn contains(&self, number: u32) -> bool {
        self.bits.get(number as usize / 64).is_some_and(|word| word & (1 << (number % 64)) != 0)
    }

    pub(super) fn lowest(&mut self) -> Option<u32> {
        self.low += self.bits[self.low..].iter().position(|&word| word != 0)?;
        Some(self.low as u32 * 64 + self.bits[self.low].trailing_zeros())
    }

    /// From the highest down.
    pub(super) fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        let words = self.bits.iter().enumerate().rev().filter(|(_, &word)| word != 0);
        words.flat_map(|(i, &word)| {
            (0..64).rev().filter(move |bit| word & (1 << bit) != 0).map(move |bit| i as u32 * 64 + bit)
        })
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::*;

    #[test]
    fn numbers_come_and_go() {
        let mut set = TrunkSet::first(70).unwrap();
        assert_eq!((set.lowest(), set.iter().next()), (Some(0), Some(69)));
        assert!((0..69).all(|number| set.remove(number)));
        assert_eq!((set.lowest(), set.iter().next()), (Some(69), Some(69)));
        let mut room = TrunkSet::room(1000).unwrap();
        set.grow(&mut room);
        assert!(set.insert(1000) && !set.insert(69) && set.insert(3));
        assert_eq!(set.iter().collect::<std::vec::Vec<_>>(), [1000, 69, 3]);
        assert_eq!(set.lowest(), Some(3));
    }
}
