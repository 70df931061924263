//! How many threads fault just now.
//!
//! Noted by whoever reads faults, so by one at a time; looked at by anybody.

use crate::engine::STREAMS;
use crate::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// The threads of the last 16 to 32 faults, a bit for each: those of the last faults, those of the 16 before. Two of
/// which the numbers are multiples of 16 apart count as one.
pub struct Crowd(AtomicU64);

/// Faults before the older ones are forgotten. Of two threads that fault at random each takes one of so many.
const WINDOW: u64 = 16;
/// Bits for threads; the rest of the word counts faults.
const THREADS: u32 = STREAMS as u32;
const MASK: u64 = (1 << THREADS) - 1;

impl Crowd {
    /// Nobody.
    pub fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// A thread faults.
    pub fn note(&self, thread: u32) {
        let word = self.0.load(Relaxed);
        let (last, before, faults) = (word & MASK, word >> THREADS & MASK, word >> (2 * THREADS));
        let last = last | 1 << (thread % THREADS);
        let word = match faults + 1 {
            WINDOW => last << THREADS,
            faults => faults << (2 * THREADS) | before << THREADS | last,
        };
        self.0.store(word, Relaxed);
    }

    /// How many there are.
    pub fn threads(&self) -> usize {
        self.bits().count_ones() as usize
    }

    /// A number for each of them, as good as its own to tell streams apart.
    pub fn each(&self) -> impl Iterator<Item = u32> {
        let bits = self.bits();
        (0..THREADS).filter(move |thread| bits & 1 << thread != 0)
    }

    fn bits(&self) -> u64 {
        let word = self.0.load(Relaxed);
        (word | word >> THREADS) & MASK
    }
}

impl Default for Crowd {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_stops_is_forgotten() {
        let crowd = Crowd::new();
        assert_eq!(crowd.threads(), 0);
        for thread in [5, 7, 9, 7] {
            crowd.note(thread);
        }
        assert_eq!(crowd.threads(), 3);
        assert!(crowd.each().eq([5, 7, 9]));
        (0..WINDOW).for_each(|_| crowd.note(7));
        assert_eq!(crowd.threads(), 3);
        (0..WINDOW).for_each(|_| crowd.note(7));
        assert_eq!(crowd.threads(), 1);
    }
}
