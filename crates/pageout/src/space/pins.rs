//! Units that must stay: the kernel writes to them when a thread exits, and then no fault is served.
//!
//! A thread's control block holds the word that the kernel clears (and `pthread_join` waits for) at its
//! end; an exiting thread's fault is not delivered, so that page must be there. Any thread of the program
//! pins its own at its start, without a lock: it may be interrupted by a signal handler that faults.
//! Pins are few (glibc reuses its stacks) and stay.

use super::UNIT;
use crate::sync::atomic::{AtomicU32, Ordering::AcqRel, Ordering::Acquire};

const SIZE: usize = 16384;
const PROBES: usize = 64;

/// An insert-only set of unit numbers.
pub struct Pins {
    table: [AtomicU32; SIZE],
}

impl Pins {
    /// No pins.
    #[cfg(not(any(loom, shuttle)))]
    pub const fn new() -> Self {
        Self { table: [const { AtomicU32::new(0) }; SIZE] }
    }

    fn places(unit: u32) -> impl Iterator<Item = usize> {
        let start = unit.wrapping_mul(0x9e37_79b1) as usize >> 16;
        (0..PROBES).map(move |probe| (start + probe) % SIZE)
    }

    /// Pins the unit of `address`. From any thread. `false`: the table is full around it.
    pub fn pin(&self, address: usize) -> bool {
        let unit = (address / UNIT) as u32;
        Self::places(unit).any(|place| match self.table[place].compare_exchange(0, unit, AcqRel, Acquire) {
            Ok(_) => true,
            Err(other) => other == unit,
        })
    }

    /// Is the unit of `address` pinned?
    pub fn is_pinned(&self, address: usize) -> bool {
        let unit = (address / UNIT) as u32;
        for place in Self::places(unit) {
            match self.table[place].load(Acquire) {
                0 => return false,
                other if other == unit => return true,
                _ => {}
            }
        }
        false
    }
}

#[cfg(not(any(loom, shuttle)))]
impl Default for Pins {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pinned_units_are_found() {
        let pins = Pins::new();
        for n in 0..1000 {
            assert!(pins.pin(0x7f00_0000_0000 + n * 0x1_2000));
        }
        assert!((0..1000).all(|n| pins.is_pinned(0x7f00_0000_0fff + n * 0x1_2000)));
        assert!(!pins.is_pinned(0x5500_0000_0000));
    }
}
