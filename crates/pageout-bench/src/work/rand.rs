//! swap-w-rand and pmbench: single words read and written at random for a time, each access timed.
//!
//! A thread owns every `threads`-th page, so that all threads meet in every block and none writes what
//! another checks. One word of each page, chosen by its number, is written again and again; its
//! version is kept in memory of the thread's. The others keep what the filling wrote. Reads check
//! either. At the end everything is checked once more.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::Barrier;
use std::time::{Duration, Instant};

use anyhow::Result;
use clap::Args;

use super::{Report, Set};
use crate::dist::{Rng, Sampler, Spread};
use crate::latency::Latencies;
use crate::mem::Map;
use crate::pattern::{expect, mix, Pattern, WORDS};
use crate::units::{parse_time, KB, PAGE};

/// An access that takes longer was not served from resident memory: a first-level fault of any engine
/// takes more, a cache and TLB miss less.
pub const MISS: Duration = Duration::from_nanos(1500);

/// Options of `rand`.
#[derive(Clone, Debug, Args)]
pub struct Rand {
    #[command(flatten)]
    pub set: Set,
    /// Share of reads, in percent
    #[arg(long, value_name = "PERCENT", default_value_t = 80, value_parser = clap::value_parser!(u64).range(0..=100))]
    reads: u64,
    /// uniform, normal, zipf or zipf:EXPONENT
    #[arg(long, value_name = "DIST", default_value = "uniform")]
    spread: Spread,
    /// How long to access
    #[arg(long, value_name = "TIME", default_value = "5", value_parser = parse_time)]
    pub seconds: Duration,
}

/// The pages of one thread: every `step`-th from `first`, and which version each was written last.
pub struct Own<'m> {
    words: &'m [AtomicU64],
    pattern: Pattern,
    first: u64,
    step: u64,
    versions: Vec<u16>,
}

impl<'m> Own<'m> {
    /// The pages of thread `first` of `step` threads; all at version 0, as the filling left them.
    pub fn new(map: &'m Map, pattern: Pattern, pages: u64, first: u64, step: u64) -> Own<'m> {
        let count = pages.saturating_sub(first).div_ceil(step);
        Own { words: map.atomics(), pattern, first, step, versions: vec![0; count as usize] }
    }

    /// How many pages there are.
    pub fn len(&self) -> u64 {
        self.versions.len() as u64
    }

    /// The number of page `own` within the whole set.
    pub fn page(&self, own: u64) -> u64 {
        self.first + own * self.step
    }

    /// The word of `page` that is written.
    fn written(page: u64) -> u64 {
        page * WORDS as u64 + mix(page) % WORDS as u64
    }

    fn value(&self, index: u64, own: u64) -> u64 {
        let base = self.pattern.word(index);
        if index == Self::written(self.page(own)) {
            base.wrapping_add(mix(u64::from(self.versions[own as usize])).wrapping_sub(mix(0)))
        } else {
            base
        }
    }

    /// Reads one word of page `own` and gives the time that it took, once it is checked.
    #[inline]
    pub fn read(&self, own: u64, choice: u64) -> Result<Duration> {
        let page = self.page(own);
        let index = match choice % 4 {
            0 => Self::written(page),
            _ => page * WORDS as u64 + (choice >> 2) % WORDS as u64,
        };
        let begun = Instant::now();
        let found = self.words[index as usize].load(Ordering::Relaxed);
        let time = begun.elapsed();
        expect(found, self.value(index, own), index)?;
        Ok(time)
    }

    /// Writes the next version to page `own` and gives the time that it took.
    #[inline]
    pub fn write(&mut self, own: u64) -> Duration {
        let version = &mut self.versions[own as usize];
        *version = version.wrapping_add(1);
        let index = Self::written(self.page(own));
        let value = self.value(index, own);
        let begun = Instant::now();
        self.words[index as usize].store(value, Ordering::Relaxed);
        begun.elapsed()
    }

    /// Checks all words of all pages.
    pub fn verify(&self) -> Result<()> {
        for own in 0..self.len() {
            let page = self.page(own) * WORDS as u64;
            for index in page..page + WORDS as u64 {
                expect(self.words[index as usize].load(Ordering::Relaxed), self.value(index, own), index)?;
            }
        }
        Ok(())
    }
}

impl Rand {
    pub fn run(&self) -> Result<Report> {
        let pattern = self.set.pattern(0);
        let mut map = self.set.map()?;
        pattern.write(map.words_mut(), 0, None)?;
        let pages = (map.atomics().len() / WORDS) as u64;
        let (barrier, stop) = (Barrier::new(self.set.threads as usize), AtomicBool::new(false));
        let results: Vec<(Latencies, u64, Duration)> = std::thread::scope(|scope| {
            let tasks: Vec<_> = (0..self.set.threads)
                .map(|task| {
                    let own = Own::new(&map, pattern, pages, task, self.set.threads);
                    let (barrier, stop) = (&barrier, &stop);
                    scope.spawn(move || {
                        let result = self.access(own, task, barrier, stop);
                        if result.is_err() {
                            stop.store(true, Ordering::Relaxed);
                        }
                        result
                    })
                })
                .collect();
            tasks.into_iter().map(|task| task.join().expect("a task does not panic")).collect::<Result<_>>()
        })?;
        let mut report = Report::default();
        let (mut all, mut misses, mut rate, mut miss_rate) = (Latencies::new(), 0, 0.0, 0.0);
        for (latencies, missed, time) in &results {
            all.add(latencies);
            misses += missed;
            rate += latencies.count() as f64 / time.as_secs_f64();
            miss_rate += *missed as f64 / time.as_secs_f64();
        }
        report.set("swap-w-rand.accesses_per_s", rate);
        report.set("swap-w-rand.throughput", rate * PAGE as f64 / KB);
        report.set("swap-w-rand.misses_per_s", miss_rate);
        report.set("swap-w-rand.hit_%", 100.0 * (1.0 - misses as f64 / all.count().max(1) as f64));
        all.tell("swap-w-rand", &mut report.metrics);
        report.latency_ns = all.counts();
        Ok(report)
    }

    /// One thread's accesses, and its check at the end, outside the time.
    fn access(
        &self,
        mut own: Own<'_>,
        task: u64,
        barrier: &Barrier,
        stop: &AtomicBool,
    ) -> Result<(Latencies, u64, Duration)> {
        let mut rng = Rng::new(self.set.seed ^ mix(task + 1));
        let sampler = Sampler::new(self.spread, own.len().max(1));
        let (mut latencies, mut misses) = (Latencies::new(), 0);
        barrier.wait();
        let begun = Instant::now();
        while begun.elapsed() < self.seconds && !stop.load(Ordering::Relaxed) {
            // The clock and the flag are looked at once in 64 accesses.
            for _ in 0..64 {
                let page = sampler.draw(&mut rng);
                let choice = rng.next();
                let time =
                    if choice % 100 < self.reads { own.read(page, choice >> 8)? } else { own.write(page) };
                misses += u64::from(time > MISS);
                latencies.record(time);
            }
        }
        let time = begun.elapsed();
        own.verify()?;
        Ok((latencies, misses, time))
    }
}
