//! How many pages a fault brings in.
//!
//! [*Streams*](super::stream) double their windows, up to 2 MiB. *All others* take
//! the order that has been cheapest lately, which a sample tells: of some units (64 KiB) pages are brought in one by
//! one, and after a while the map of those that came says what each order would have cost there:
//!
//! ```text
//! cost of order k = over windows of 2^k pages that hold one that was used: fault + pages that were out × (page + place)
//! ```
//! Units of which nothing was there and others are counted apart: the first are swept through, mostly, the others are
//! looked up in. As one, xz in 160M read four times what it used, and took 50 s instead of 28.
//!
//! *Fault*: the round trip and the request to the device. *Page*: what a page costs on its way in and out. *Place*: what
//! a page brought in for nothing costs by having put out another, a fault times the chance that it comes back; it is
//! estimated by the share of memory that is resident. So a walk brings in whole units, a program that looks up
//! single small things brings in single pages, and a change is noticed after about a thousand faults.
//!
//! Plain arithmetic on what it is told; its owner guards it by a lock that is a leaf.

use crate::space::{bits, UNIT_PAGES};

/// The largest order that the sample decides about: a unit.
const ORDERS: usize = UNIT_PAGES.trailing_zeros() as usize + 1;
/// A fault without its device, and a page's way in and out: nanoseconds, measured (ARCHITECTURE.md).
const FAULT_NS: u64 = 15_000;
const PAGE_NS: u64 = 2_000;
/// The order while nothing is known.
const FIRST: u8 = 2;
/// Units that are sampled at once.
const SAMPLES: usize = 64;
/// Faults that a unit is watched for.
const WATCHED: u32 = 1024;
/// The share of a new sample in the average: 1 of this.
const SHARE: i64 = 16;

/// What a unit's sample needs: where it is, and since which fault.
#[derive(Clone, Copy)]
struct Sample {
    unit: usize,
    since: u32,
}

/// The sample and what it says.
pub struct Orders {
    /// Nanoseconds for a unit, by order: of units of which nothing was there, of others.
    cost: [[i64; ORDERS]; 2],
    best: [u8; 2],
    /// Faults so far.
    faults: u32,
    /// The units under watch, oldest first.
    samples: [Sample; SAMPLES],
    first: usize,
    len: usize,
}

impl Orders {
    /// Nothing is known.
    pub const fn new() -> Self {
        Self {
            cost: [[0; ORDERS]; 2],
            best: [FIRST; 2],
            faults: 0,
            samples: [Sample { unit: 0, since: 0 }; SAMPLES],
            first: 0,
            len: 0,
        }
    }

    /// The order for a fault that belongs to no stream, on a unit of which the pages `out` are out.
    pub fn best(&self, out: u16) -> u8 {
        self.best[kind(out)]
    }

    /// One more such fault: is the unit to be sampled? Then its pages are to be brought in one by one until
    /// [`Orders::due`] names it.
    ///
    /// Sampling costs faults where windows are large, so it is done less there.
    pub fn sample(&mut self, unit: usize, out: u16) -> bool {
        self.faults = self.faults.wrapping_add(1);
        if self.faults % (4 << self.best(out)) != 0 || self.len == SAMPLES {
            return false;
        }
        self.samples[(self.first + self.len) % SAMPLES] = Sample { unit, since: self.faults };
        self.len += 1;
        true
    }

    /// A unit that has been watched for long enough; it is no more.
    pub fn due(&mut self) -> Option<usize> {
        let sample = (self.len > 0).then(|| self.samples[self.first])?;
        if self.faults.wrapping_sub(sample.since) < WATCHED {
            return None;
        }
        self.first = (self.first + 1) % SAMPLES;
        self.len -= 1;
        Some(sample.unit)
    }

    /// What became of a unit: a bit for each page that was `out` when the watch began, and for each of them that was
    /// `used` since. `request_ns`: what a device takes for a request; `resident`, `swapped`: pages.
    pub fn learn(&mut self, used: u16, out: u16, request_ns: u64, resident: u64, swapped: u64) {
        if used == 0 {
            return;
        }
        let fault = FAULT_NS + request_ns;
        let place = fault * resident.min(2 * swapped) / swapped.max(1);
        let costs = &mut self.cost[kind(out)];
        let known = costs[0] != 0;
        for (order, average) in costs.iter_mut().enumerate() {
            let pages = 1 << order;
            let windows = (0..UNIT_PAGES).step_by(pages).map(|first| bits(first..first + pages) as u16);
            let read = windows.filter(|window| window & used != 0);
            let cost: u64 =
                read.map(|window| fault + (window & out).count_ones() as u64 * (PAGE_NS + place)).sum();
            let step = cost as i64 - *average;
            *average += if known { step / SHARE } else { step };
        }
        let cheapest = (0..ORDERS).min_by_key(|order| costs[*order]).expect("orders");
        self.best[kind(out)] = cheapest as u8;
    }
}

/// Of which kind is a unit?
fn kind(out: u16) -> usize {
    (out != u16::MAX) as usize
}

impl Default for Orders {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The order found after units that were used like this.
    fn found(used: &[u16], resident: u64, swapped: u64) -> u8 {
        let mut orders = Orders::new();
        for _ in 0..200 {
            for used in used {
                orders.learn(*used, u16::MAX, 2_000, resident, swapped);
            }
        }
        orders.best(u16::MAX)
    }

    #[test]
    fn what_is_used_decides() {
        assert_eq!(found(&[0xffff], 1000, 1000), 4);
        assert_eq!(found(&[0x0100], 1000, 1000), 0);
        assert_eq!(found(&[0x0400, 0x0001, 0x8000, 0x0020], 1000, 3000), 0);
        assert_eq!(found(&[0x00ff, 0xff00], 1000, 1000), 3);
        // Most pages of a unit, in no order: the whole unit.
        assert_eq!(found(&[0xb7ed, 0x7ddb], 1000, 1000), 4);
        // Where places are cheap (little fits, nothing comes back) a bolder window pays.
        assert!(found(&[0x0055], 100, 10_000) >= found(&[0x0055], 10_000, 5_000));
    }

    #[test]
    fn a_change_is_followed() {
        let mut orders = Orders::new();
        (0..100).for_each(|_| orders.learn(0xffff, u16::MAX, 2_000, 1000, 1000));
        assert_eq!(orders.best(u16::MAX), 4);
        (0..60).for_each(|_| orders.learn(1, u16::MAX, 2_000, 1000, 1000));
        assert_eq!(orders.best(u16::MAX), 0);
        (0..60).for_each(|_| orders.learn(0xffff, u16::MAX, 2_000, 1000, 1000));
        assert_eq!(orders.best(u16::MAX), 4);
    }

    #[test]
    fn units_that_are_there_in_part_are_counted_apart() {
        let mut orders = Orders::new();
        for _ in 0..100 {
            orders.learn(0xffff, u16::MAX, 2_000, 1000, 1000);
            orders.learn(0x0010, 0x0ff0, 2_000, 1000, 1000);
        }
        assert_eq!((orders.best(u16::MAX), orders.best(0x00f0)), (4, 0));
        // What is there costs nothing: all that is out is used.
        (0..100).for_each(|_| orders.learn(0x1010, 0x1010, 2_000, 1000, 1000));
        assert_eq!(orders.best(0x00f0), 4);
    }

    #[test]
    fn a_sample_is_due_after_its_time_and_once() {
        let mut orders = Orders::new();
        let mut watched = std::vec::Vec::new();
        let mut ended = std::vec::Vec::new();
        for unit in 0..10_000 {
            if orders.sample(unit, u16::MAX) {
                watched.push(unit);
            }
            ended.extend(orders.due());
        }
        assert!(watched.len() > 100 && ended.len() + SAMPLES >= watched.len());
        assert_eq!(ended, watched[..ended.len()]);
    }
}
