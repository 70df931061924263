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
//! looked up in. As one, xz in 160M read four times what it used, and took 45 s instead of 28.
//!
//! Streams of a thread are counted apart, too, for who takes one page of every eight, as a walk down a column of a matrix does,
//! comes from window to window as well. If that costs half as much by an order below a unit's they take that, and do not
//! double. A unit that is watched breaks a stream, so one is, as long as whole units are right, for each GiB.
//!
//! *Fault*: the round trip and the request to the device. *Page*: what a page costs on its way in and out. *Place*: what
//! a page brought in for nothing costs by having put out another, a fault times the chance that it comes back; it is
//! estimated by the share of memory that is resident. So a walk brings in whole units, a program that looks up
//! single small things brings in single pages, and a change is noticed after about a thousand faults.
//!
//! Plain arithmetic on what it is told; its owner guards it by a lock that is a leaf.

use super::stream::{self, THREADS, UNIT_ORDER};
use crate::space::{bits, Usage, BLOCK_ORDER, UNIT_PAGES};

/// The largest order that the sample decides about: a unit.
const ORDERS: usize = UNIT_PAGES.trailing_zeros() as usize + 1;
/// A fault without its device, on a slow machine (ARCHITECTURE.md), and a page's way in and out: nanoseconds.
const FAULT_NS: u64 = 15_000;
const PAGE_NS: u64 = 2_000;
/// The order while nothing is known.
const FIRST: u8 = 2;
/// Units that are sampled at once.
const SAMPLES: usize = 64;
/// Faults that a unit is watched for; and, where one of a stream is, of the thread's streams elsewhere.
const WATCHED: u32 = 1024;
const WATCHED_STREAM: u32 = 32;
/// Of a unit with fewer pages out little can be learned of streams.
const MOST_OUT: u32 = UNIT_PAGES as u32 * 3 / 4;
/// Pages that come in by a thread's streams for each unit of theirs that is watched, while whole units are right; and before
/// the first.
const STREAMED: u32 = 1 << 18;
const STREAMED_FIRST: u32 = 1 << 16;
/// So many times cheaper must less than a unit be for a stream to end.
const CLEARLY: i64 = 2;
/// The share of a new sample in the average: 1 of this. There are few of streams.
const SHARE: i64 = 16;
const SHARE_STREAM: i64 = 2;

/// What is counted apart: units of which nothing was there, others, and those that streams of a thread come to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Kind(u8);

const KINDS: usize = 2 + THREADS;

impl Kind {
    /// Of a unit of which the pages `out` are out.
    fn of(out: u16) -> Self {
        Self((out != u16::MAX) as u8)
    }

    fn of_streams(thread: u32) -> Self {
        Self(2 + stream::place(thread) as u8)
    }

    /// Is it that of streams of another thread?
    fn is_anothers(self, thread: u32) -> bool {
        self.of_whose_streams().is_some_and(|place| place != stream::place(thread))
    }

    /// Where what is known of the threads is of whose streams it is.
    fn of_whose_streams(self) -> Option<usize> {
        self.at().checked_sub(2)
    }

    fn at(self) -> usize {
        self.0 as usize
    }
}

/// A fault on a page that is out.
#[derive(Clone, Copy)]
pub struct Asked {
    /// Who faults.
    pub thread: u32,
    /// The number of the unit.
    pub unit: usize,
    /// Which of its pages was touched.
    pub at: usize,
    /// A bit for each page of it that is out.
    pub out: u16,
    /// The order of the last window of the stream that it continues, if it does.
    pub last: Option<u8>,
}

/// What a unit's sample needs: where it is, and since which fault.
#[derive(Clone, Copy)]
struct Sample {
    unit: usize,
    since: u32,
}

/// The unit of a thread's streams that is watched, or was last.
#[derive(Clone, Copy)]
struct Watch {
    unit: Option<usize>,
    /// Faults of the streams since, and the pages that they have brought in since something was learned.
    faults: u32,
    pages: u32,
}

/// The sample and what it says.
pub struct Orders {
    /// Nanoseconds for a unit, by kind and order.
    cost: [[i64; ORDERS]; KINDS],
    best: [u8; KINDS],
    streams: [Watch; THREADS],
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
            cost: [[0; ORDERS]; KINDS],
            best: {
                let mut best = [UNIT_ORDER; KINDS];
                (best[0], best[1]) = (FIRST, FIRST);
                best
            },
            streams: [Watch { unit: None, faults: 0, pages: 0 }; THREADS],
            faults: 0,
            samples: [Sample { unit: 0, since: 0 }; SAMPLES],
            first: 0,
            len: 0,
        }
    }

    /// The order for a fault; `usage` is of its unit. Whether that is watched, and as what, is kept there: its pages come in one
    /// by one until [`Orders::due`] names it.
    pub fn choose(&mut self, usage: &mut Usage, asked: Asked) -> u8 {
        if usage.sampled != 0 {
            if usage.sampled_as.is_anothers(asked.thread) {
                // What others use says nothing of this stream.
                usage.sampled &= !(1 << asked.at);
            }
            return 0;
        }
        let (order, watched) = self.choose_anew(asked);
        if let Some(kind) = watched {
            (usage.sampled, usage.sampled_as) = (asked.out, kind);
        }
        order
    }

    /// The same for a unit that is not watched. With a kind: it is to be from now on, as one of that.
    fn choose_anew(&mut self, asked: Asked) -> (u8, Option<Kind>) {
        let Asked { thread, unit, out, last, .. } = asked;
        if let Some(last) = last {
            let (kind, best) = self.streams(thread);
            if best < UNIT_ORDER || last >= UNIT_ORDER {
                let order = if best < UNIT_ORDER { best } else { (last + 1).min(BLOCK_ORDER) };
                let watched = self.sample_stream(thread, unit, out, order);
                return if watched { (0, Some(kind)) } else { (order, None) };
            }
        }
        if self.sample(unit, out) {
            return (0, Some(Kind::of(out)));
        }
        (last.map_or(0, |last| last + 1).max(self.best(out)), None)
    }

    /// The order that has been cheapest for faults that belong to no stream, on a unit of which the pages `out` are out.
    fn best(&self, out: u16) -> u8 {
        self.best[Kind::of(out).at()]
    }

    /// The same for a thread's streams.
    fn streams(&self, thread: u32) -> (Kind, u8) {
        let kind = Kind::of_streams(thread);
        (kind, self.best[kind.at()])
    }

    /// One more such fault: is the unit to be watched? Sampling costs faults where windows are large, so it is done less there.
    fn sample(&mut self, unit: usize, out: u16) -> bool {
        self.faults = self.faults.wrapping_add(1);
        if self.faults % (4 << self.best(out)) != 0 || self.len == SAMPLES {
            return false;
        }
        self.samples[(self.first + self.len) % SAMPLES] = Sample { unit, since: self.faults };
        self.len += 1;
        true
    }

    /// The same for one that continues a stream.
    fn sample_stream(&mut self, thread: u32, unit: usize, out: u16, order: u8) -> bool {
        let (kind, best) = self.streams(thread);
        let enough = match best {
            UNIT_ORDER if self.cost[kind.at()][0] == 0 => STREAMED_FIRST,
            UNIT_ORDER => STREAMED,
            _ => 4 << (2 * best),
        };
        let watch = &mut self.streams[stream::place(thread)];
        (watch.faults, watch.pages) =
            (watch.faults.saturating_add(1), watch.pages.saturating_add(1 << order));
        let begins = watch.unit.is_none() && watch.pages >= enough && out.count_ones() >= MOST_OUT;
        if begins {
            (watch.unit, watch.faults) = (Some(unit), 0);
        }
        begins
    }

    /// A unit that has been watched for long enough, when a thread faults; it is no more.
    pub fn due(&mut self, thread: u32) -> Option<usize> {
        let watch = &mut self.streams[stream::place(thread)];
        if watch.faults >= WATCHED_STREAM {
            if let Some(unit) = watch.unit.take() {
                return Some(unit);
            }
        }
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
    pub fn learn(&mut self, kind: Kind, used: u16, out: u16, request_ns: u64, resident: u64, swapped: u64) {
        if used == 0 {
            return;
        }
        let fault = FAULT_NS + request_ns;
        let place = fault * resident.min(2 * swapped) / swapped.max(1);
        let streams = kind.of_whose_streams();
        if let Some(place) = streams {
            self.streams[place].pages = 0;
        }
        let costs = &mut self.cost[kind.at()];
        let known = costs[0] != 0;
        let share = if streams.is_some() { SHARE_STREAM } else { SHARE };
        for (order, average) in costs.iter_mut().enumerate() {
            let pages = 1 << order;
            let windows = (0..UNIT_PAGES).step_by(pages).map(|first| bits(first..first + pages) as u16);
            let read = windows.filter(|window| window & used != 0);
            let cost: u64 =
                read.map(|window| fault + (window & out).count_ones() as u64 * (PAGE_NS + place)).sum();
            let step = cost as i64 - *average;
            *average += if known { step / share } else { step };
        }
        let cheapest =
            |orders: core::ops::Range<usize>| orders.min_by_key(|order| costs[*order]).expect("orders");
        let small = cheapest(0..ORDERS - 1);
        // The units of a large window share its fault, and what was put out for them was cold as a rule.
        let is_clear = costs[small] * CLEARLY <= costs[ORDERS - 1];
        self.best[kind.at()] = match streams {
            Some(_) if is_clear => small as u8,
            Some(_) => UNIT_ORDER,
            None => cheapest(0..ORDERS) as u8,
        };
    }
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
                orders.learn(Kind::of(u16::MAX), *used, u16::MAX, 2_000, resident, swapped);
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
        (0..100).for_each(|_| orders.learn(Kind::of(u16::MAX), 0xffff, u16::MAX, 2_000, 1000, 1000));
        assert_eq!(orders.best(u16::MAX), 4);
        (0..60).for_each(|_| orders.learn(Kind::of(u16::MAX), 1, u16::MAX, 2_000, 1000, 1000));
        assert_eq!(orders.best(u16::MAX), 0);
        (0..60).for_each(|_| orders.learn(Kind::of(u16::MAX), 0xffff, u16::MAX, 2_000, 1000, 1000));
        assert_eq!(orders.best(u16::MAX), 4);
    }

    #[test]
    fn units_that_are_there_in_part_are_counted_apart() {
        let mut orders = Orders::new();
        for _ in 0..100 {
            orders.learn(Kind::of(u16::MAX), 0xffff, u16::MAX, 2_000, 1000, 1000);
            orders.learn(Kind::of(0x0ff0), 0x0010, 0x0ff0, 2_000, 1000, 1000);
        }
        assert_eq!((orders.best(u16::MAX), orders.best(0x00f0)), (4, 0));
        // What is there costs nothing: all that is out is used.
        (0..100).for_each(|_| orders.learn(Kind::of(0x1010), 0x1010, 0x1010, 2_000, 1000, 1000));
        assert_eq!(orders.best(0x00f0), 4);
    }

    /// What a thread's stream of whole blocks takes, fault by fault, when of each unit these pages are used.
    fn of_stream(orders: &mut Orders, used: u16, faults: usize) -> std::vec::Vec<u8> {
        let mut last = BLOCK_ORDER;
        let fault = |unit: usize| {
            if orders.due(1).is_some() {
                orders.learn(Kind::of_streams(1), used, u16::MAX, 2_000, 1000, 3000);
            }
            let asked = Asked { thread: 1, unit, at: 0, out: u16::MAX, last: Some(last) };
            let order = orders.choose_anew(asked).0;
            last = order.max(UNIT_ORDER);
            order
        };
        (0..faults).map(fault).collect()
    }

    #[test]
    fn a_stream_that_uses_little_of_what_it_brings_in_ends() {
        let mut orders = Orders::new();
        let dense = of_stream(&mut orders, u16::MAX, 4000);
        let watched = dense.iter().filter(|order| **order == 0).count();
        assert!((6..10).contains(&watched), "{watched} units watched");
        assert!(dense[100..].iter().filter(|order| **order >= BLOCK_ORDER).count() > 3800);
        // One page of eight.
        let sparse = of_stream(&mut orders, 0x0101, 4000);
        assert!(sparse[3000..].iter().all(|order| *order == 0));
        // Another thread's does not end by that, and this one's goes on when it uses all again.
        let asked = Asked { thread: 2, unit: 1, at: 0, out: u16::MAX, last: Some(8) };
        assert_eq!(orders.choose_anew(asked), (BLOCK_ORDER, None));
        let dense = of_stream(&mut orders, u16::MAX, 1000);
        assert!(dense[100..].iter().filter(|order| **order >= BLOCK_ORDER).count() > 800);
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
            ended.extend(orders.due(1));
        }
        assert!(watched.len() > 100 && ended.len() + SAMPLES >= watched.len());
        assert_eq!(ended, watched[..ended.len()]);
    }
}
