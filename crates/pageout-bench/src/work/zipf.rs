//! Zipf accesses to single pages: the share that needed no fault, beside LRU's and CLOCK's on the very
//! same accesses with as many pages as the limit has, and CLOCK's with as many as the set had: an engine of user space
//! keeps its books in the limit, the kernel does not.

use std::time::Duration;

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
    /// How the pages are drawn: zipf:EXPONENT, zipf, uniform or normal
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
        let resident = map.resident_pages()?;
        own.verify()?;
        drop(own);
        drop(map);
        let all = self.memory.pages().min(pages);
        let mut caches: [Box<dyn Cache>; 3] = [
            Box::new(Lru::new(pages, all)),
            Box::new(Clock::new(pages, all)),
            Box::new(Clock::new(pages, resident.max(1))),
        ];
        let [lru, clock, clock_same] = self.simulate(pages, &sampler, &mut caches);
        let mut report = Report::default();
        report.set("zipf.hit_%", 100.0 * hits as f64 / counted.max(1) as f64);
        report.set("zipf.lru_hit_%", lru);
        report.set("zipf.clock_hit_%", clock);
        report.set("zipf.clock_same_hit_%", clock_same);
        report.set("zipf.resident_MiB", resident as f64 / 256.0);
        report.set("zipf.accesses_per_s", counted as f64 / spent.as_secs_f64());
        Ok(report)
    }

    /// Hit ratios in percent of caches on the same accesses, over their second half.
    fn simulate<const N: usize>(
        &self,
        pages: usize,
        sampler: &Sampler,
        caches: &mut [Box<dyn Cache>; N],
    ) -> [f64; N] {
        let mut rng = Rng::new(self.set.seed);
        // The filling touched every page in order.
        for page in 0..pages as u32 {
            caches.iter_mut().for_each(|cache| _ = cache.access(page));
        }
        let mut hits = [0u64; N];
        for access in 0..self.accesses {
            let page = sampler.draw(&mut rng) as u32;
            rng.next();
            let counts = access >= self.accesses / 2;
            for (hits, cache) in hits.iter_mut().zip(caches.iter_mut()) {
                *hits += u64::from(cache.access(page) && counts);
            }
        }
        let counted = self.accesses - self.accesses / 2;
        hits.map(|hits| 100.0 * hits as f64 / counted.max(1) as f64)
    }
}
