//! Zipf accesses to single pages: the share that needed no fault, beside LRU's and CLOCK's on the very
//! same accesses with as many pages as the limit has.

use std::time::{Duration, Instant};

use anyhow::Result;
use clap::Args;

use super::rand::{Own, MISS};
use super::{Report, Set};
use crate::caches::{Cache, Clock, Lru};
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
        let (mut lru, mut clock) = (Lru::new(pages, capacity), Clock::new(pages, capacity));
        // The filling touched every page in order.
        for page in 0..pages as u32 {
            lru.access(page);
            clock.access(page);
        }
        let (mut lru_hits, mut clock_hits, mut counted) = (0u64, 0u64, 0u64);
        for access in 0..self.accesses {
            let page = sampler.draw(&mut rng) as u32;
            rng.next();
            let hits = (lru.access(page), clock.access(page));
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
