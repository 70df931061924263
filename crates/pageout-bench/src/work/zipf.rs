//! Zipf accesses to single pages: the share that needed no fault, beside LRU's and CLOCK's on the very
//! same accesses with as many pages as the limit has.

use std::time::{Duration, Instant};

use anyhow::Result;
use clap::Args;

use super::rand::{Own, MISS};
use super::{Report, Set};
use crate::dist::{Rng, Sampler, Spread};
use crate::pattern::WORDS;
use crate::units::Bytes;

/// Options of `zipf`.
#[derive(Clone, Debug, Args)]
pub struct Zipf {
    #[command(flatten)]
    pub set: Set,
    /// Memory that LRU and CLOCK are given: the limit that the work runs under
    #[arg(long, value_name = "SIZE", default_value = "512M")]
    memory: Bytes,
    /// Exponent
    #[arg(long, default_value = "zipf:0.99", value_name = "DIST")]
    spread: Spread,
    /// Accesses, the first half to warm up
    #[arg(long, value_name = "N", default_value_t = 4_000_000)]
    accesses: u64,
}

/// What LRU, or CLOCK, keeps of pages numbered from 0. A list by index, `NONE` at its ends.
struct Cache {
    capacity: usize,
    used: usize,
    /// LRU: the neighbours towards recent and old. CLOCK uses `slots`, `hand` and `referenced`.
    newer: Vec<u32>,
    older: Vec<u32>,
    newest: u32,
    oldest: u32,
    slots: Vec<u32>,
    hand: usize,
    referenced: Vec<bool>,
    present: Vec<bool>,
}

const NONE: u32 = u32::MAX;

impl Cache {
    fn new(pages: usize, capacity: usize) -> Cache {
        Cache {
            capacity: capacity.max(1),
            used: 0,
            newer: vec![NONE; pages],
            older: vec![NONE; pages],
            newest: NONE,
            oldest: NONE,
            slots: Vec::with_capacity(capacity),
            hand: 0,
            referenced: vec![false; pages],
            present: vec![false; pages],
        }
    }

    fn unlink(&mut self, page: u32) {
        let (newer, older) = (self.newer[page as usize], self.older[page as usize]);
        match newer {
            NONE => self.newest = older,
            newer => self.older[newer as usize] = older,
        }
        match older {
            NONE => self.oldest = newer,
            older => self.newer[older as usize] = newer,
        }
    }

    /// An access under LRU; whether it hit.
    fn lru(&mut self, page: u32) -> bool {
        let hit = self.present[page as usize];
        if hit {
            self.unlink(page);
        } else if self.used == self.capacity {
            let oldest = self.oldest;
            self.unlink(oldest);
            self.present[oldest as usize] = false;
        } else {
            self.used += 1;
        }
        (self.newer[page as usize], self.older[page as usize]) = (NONE, self.newest);
        match self.newest {
            NONE => self.oldest = page,
            newest => self.newer[newest as usize] = page,
        }
        self.newest = page;
        self.present[page as usize] = true;
        hit
    }

    /// An access under CLOCK; whether it hit.
    fn clock(&mut self, page: u32) -> bool {
        if self.present[page as usize] {
            self.referenced[page as usize] = true;
            return true;
        }
        self.present[page as usize] = true;
        if self.slots.len() < self.capacity {
            self.slots.push(page);
            return false;
        }
        while std::mem::take(&mut self.referenced[self.slots[self.hand] as usize]) {
            self.hand = (self.hand + 1) % self.capacity;
        }
        let victim = std::mem::replace(&mut self.slots[self.hand], page);
        self.present[victim as usize] = false;
        self.hand = (self.hand + 1) % self.capacity;
        false
    }
}

impl Zipf {
    pub fn run(&self) -> Result<Report> {
        let pattern = self.set.pattern(0);
        let mut map = self.set.map()?;
        pattern.write(map.words_mut(), 0, None)?;
        let pages = map.atomics().len() / WORDS;
        let mut own = Own::new(&map, pattern, pages as u64, 0, 1);
        let sampler = Sampler::new(self.spread, pages as u64);
        let mut rng = Rng::new(self.set.seed);
        let (mut hits, mut counted, mut spent) = (0u64, 0u64, Duration::ZERO);
        for access in 0..self.accesses {
            let page = sampler.draw(&mut rng);
            let choice = rng.next();
            let time = if choice % 5 != 0 { own.read(page, choice >> 8)? } else { own.write(page) };
            if access >= self.accesses / 2 {
                counted += 1;
                hits += u64::from(time <= MISS);
                spent += time;
            }
        }
        own.verify()?;
        drop(own);
        drop(map);
        let (lru, clock) = self.simulate(pages, &sampler);
        let mut report = Report::default();
        report.set("zipf.hit_%", 100.0 * hits as f64 / counted.max(1) as f64);
        report.set("zipf.lru_hit_%", lru);
        report.set("zipf.clock_hit_%", clock);
        report.set("zipf.accesses_per_s", counted as f64 / spent.as_secs_f64());
        Ok(report)
    }

    /// Hit ratios in percent of LRU and CLOCK on the same accesses, over their second half.
    fn simulate(&self, pages: usize, sampler: &Sampler) -> (f64, f64) {
        let begun = Instant::now();
        let mut rng = Rng::new(self.set.seed);
        let capacity = self.memory.pages().min(pages);
        let (mut lru, mut clock) = (Cache::new(pages, capacity), Cache::new(pages, capacity));
        // The filling touched every page in order.
        for page in 0..pages as u32 {
            lru.lru(page);
            clock.clock(page);
        }
        let (mut lru_hits, mut clock_hits, mut counted) = (0u64, 0u64, 0u64);
        for access in 0..self.accesses {
            let page = sampler.draw(&mut rng) as u32;
            rng.next();
            let hits = (lru.lru(page), clock.clock(page));
            if access >= self.accesses / 2 {
                counted += 1;
                lru_hits += u64::from(hits.0);
                clock_hits += u64::from(hits.1);
            }
        }
        debug_assert!(begun.elapsed() < Duration::from_secs(600), "the simulation is short beside the work");
        let percent = |hits: u64| 100.0 * hits as f64 / counted.max(1) as f64;
        (percent(lru_hits), percent(clock_hits))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lru_and_clock_by_hand() {
        let accesses = [0, 1, 2, 1, 0, 3, 1, 0];
        let mut lru = Cache::new(4, 3);
        let hits: Vec<bool> = accesses.iter().map(|&page| lru.lru(page)).collect();
        assert_eq!(hits, [false, false, false, true, true, false, true, true], "3 took 2's place");
        let mut clock = Cache::new(4, 2);
        let hits: Vec<bool> = [0, 1, 0, 2, 0, 1].iter().map(|&page| clock.clock(page)).collect();
        assert_eq!(hits, [false, false, true, false, true, false], "0 had its second chance");
    }
}
