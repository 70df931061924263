//! Units that must stay: the kernel writes to them when a thread exits, and then no fault is served.
//!
//! A thread's control block holds the word that the kernel clears (and `pthread_join` waits for) at its
//! end; an exiting thread's fault is not delivered, so that page must be there. Any thread of the program
//! pins its own at its start, without a lock: it may be interrupted by a signal handler that faults.
//! Neighbours share units, so pins are counted; a unit without any may leave again.
//!
//! An eviction that was decided before a pin came may still take the unit. Who pins waits until those are done, and says
//! so: whoever pins the unit meanwhile need not wait.

use super::UNIT;
use crate::flaw::{makes, Flaw};
use crate::sync::atomic::{AtomicU64, Ordering::AcqRel, Ordering::Acquire};

const SIZE: usize = if cfg!(any(loom, shuttle)) { 2 } else { 16384 };
const PROBES: usize = if cfg!(any(loom, shuttle)) { 2 } else { 64 };

/// A place of the table has the number of a unit in its upper half, and below how often it is pinned. It is never empty
/// again: what has a unit without pins is passed by, and taken by the next.
const TAKEN: u64 = 1 << 31;
/// What was decided before the unit was pinned is done.
const SETTLED: u64 = 1 << 30;
const FOR_GOOD: u64 = 1 << 29;

/// What a pin met.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Pinned {
    /// The unit was pinned, and nothing that was decided before is on its way: it stays where it is.
    Already,
    /// An eviction may be under way. To be [`settled`](Pins::settled) when none is.
    Fresh,
    /// The table is full around it.
    Not,
}

/// A set of unit numbers, each with how often it is there.
pub struct Pins {
    table: [AtomicU64; SIZE],
}

impl Pins {
    /// No pins.
    #[cfg(not(any(loom, shuttle)))]
    pub const fn new() -> Self {
        Self { table: [const { AtomicU64::new(0) }; SIZE] }
    }

    /// No pins.
    #[cfg(any(loom, shuttle))]
    pub fn new() -> Self {
        Self { table: core::array::from_fn(|_| AtomicU64::new(0)) }
    }

    /// What a place holds whose unit is that of `address`, without pins.
    fn unit(address: usize) -> u64 {
        ((address / UNIT) as u64) << 32 | TAKEN
    }

    fn is_of(held: u64, unit: u64) -> bool {
        held >> 32 == unit >> 32 && held != 0
    }

    fn has_pins(held: u64) -> bool {
        held & (SETTLED - 1) != 0
    }

    /// Where a unit may be: up to the first place that was never taken.
    fn places(&self, unit: u64) -> impl Iterator<Item = (&AtomicU64, u64)> {
        let start = ((unit >> 32) as u32).wrapping_mul(0x9e37_79b1) as usize >> 16;
        let mut ends = false;
        (0..PROBES).map_while(move |probe| {
            let place = &self.table[(start + probe) % SIZE];
            let held = place.load(Acquire);
            (!core::mem::replace(&mut ends, held == 0)).then_some((place, held))
        })
    }

    /// Pins the unit of `address` once more. From any thread.
    pub fn pin(&self, address: usize) -> Pinned {
        self.add(address, |held| held + 1)
    }

    /// Pins the unit of `address` for good. From any thread.
    pub fn keep(&self, address: usize) -> Pinned {
        self.add(address, |held| held | FOR_GOOD)
    }

    fn add(&self, address: usize, one: impl Fn(u64) -> u64) -> Pinned {
        let unit = Self::unit(address);
        loop {
            let mut free = None;
            let found = self.places(unit).find(|&(place, held)| {
                if !Self::has_pins(held) {
                    free = free.or(Some((place, held)));
                }
                Self::is_of(held, unit)
            });
            let Some((place, held)) = found.or(free) else { return Pinned::Not };
            let before = if Self::is_of(held, unit) { held } else { unit };
            // Another that comes at once may take a second place for the same unit: each counts its own.
            if place.compare_exchange(held, one(before), AcqRel, Acquire).is_ok() {
                let settled = before & SETTLED != 0 || makes(Flaw::PinUnsettled) && Self::has_pins(before);
                return if settled { Pinned::Already } else { Pinned::Fresh };
            }
        }
    }

    /// Every eviction that was decided before the caller pinned the unit of `address` is done.
    pub fn settled(&self, address: usize) {
        self.change(address, |held| held | SETTLED, true);
    }

    /// Takes back one pin of the unit of `address`, for each that came by [`Pins::pin`]. From any thread.
    pub fn unpin(&self, address: usize) {
        self.change(
            address,
            |held| match held - 1 {
                left if Self::has_pins(left) => left,
                left => left & !SETTLED,
            },
            false,
        );
    }

    /// Of one of the places of the unit that have pins, or of all.
    fn change(&self, address: usize, to: impl Fn(u64) -> u64, all: bool) {
        let unit = Self::unit(address);
        for (place, mut held) in self.places(unit) {
            while Self::is_of(held, unit) && Self::has_pins(held) && (all || held & (FOR_GOOD - 1) != 0) {
                match place.compare_exchange(held, to(held), AcqRel, Acquire) {
                    Ok(_) if all => break,
                    Ok(_) => return,
                    Err(other) => held = other,
                }
            }
        }
    }

    /// Is the unit of `address` pinned?
    pub fn is_pinned(&self, address: usize) -> bool {
        let unit = Self::unit(address);
        self.places(unit).any(|(_, held)| Self::is_of(held, unit) && Self::has_pins(held))
    }
}

impl Default for Pins {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::*;

    const BASE: usize = 0x7f00_0000_0000;

    #[test]
    fn pinned_units_are_found() {
        let pins = Pins::new();
        for n in 0..1000 {
            assert_eq!(pins.pin(BASE + n * 0x1_2000), Pinned::Fresh);
        }
        assert!((0..1000).all(|n| pins.is_pinned(BASE + 0xfff + n * 0x1_2000)));
        assert!(!pins.is_pinned(0x5500_0000_0000));
    }

    #[test]
    fn a_unit_stays_until_its_last_pin_goes() {
        let pins = Pins::new();
        assert_eq!((pins.pin(BASE), pins.pin(BASE + 0x8000)), (Pinned::Fresh, Pinned::Fresh));
        pins.settled(BASE);
        assert_eq!(pins.pin(BASE), Pinned::Already);
        (0..2).for_each(|_| pins.unpin(BASE));
        assert!(pins.is_pinned(BASE));
        pins.unpin(BASE);
        assert!(!pins.is_pinned(BASE));
        assert_eq!(pins.keep(BASE), Pinned::Fresh);
        // Nobody's: what is kept is kept.
        pins.unpin(BASE);
        assert!(pins.is_pinned(BASE));
    }

    #[test]
    fn there_is_room_for_more_than_were_ever_there_at_once() {
        let pins = Pins::new();
        for n in 0..10 * SIZE {
            let at = |n: usize| BASE + n * UNIT;
            assert_eq!(pins.pin(at(n)), Pinned::Fresh);
            if n >= SIZE / 4 {
                pins.unpin(at(n - SIZE / 4));
            }
            assert!(pins.is_pinned(at(n)));
        }
    }
}
