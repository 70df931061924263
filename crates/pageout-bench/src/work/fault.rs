//! One fault at a time: accesses to pages that are out, each timed; the others are not touched.
//!
//! Whether a page is out is asked of `/proc/self/pagemap` before each access, which says so for any
//! engine: what counts is that the page is not mapped.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use anyhow::{ensure, Context, Result};
use clap::Args;

use super::rand::Own;
use super::{Report, Set};
use crate::dist::Rng;
use crate::latency::Latencies;
use crate::mem::Map;
use crate::pattern::{mix, WORDS};
use crate::units::{parse_time, Bytes, PAGE};

/// Options of `latency`.
#[derive(Clone, Debug, Args)]
pub struct Latency {
    #[command(flatten)]
    pub set: Set,
    /// Share of faults by a read, in percent
    #[arg(long, value_name = "PERCENT", default_value_t = 80, value_parser = clap::value_parser!(u64).range(0..=100))]
    reads: u64,
    /// How long to fault
    #[arg(long, value_name = "TIME", default_value = "5", value_parser = parse_time)]
    seconds: Duration,
    /// Rest between faults: seconds, or 250ms
    #[arg(long, value_name = "TIME", default_value = "0", value_parser = parse_time)]
    rest: Duration,
    /// Memory that is written, half before the set and half after, which puts that out, and given back before the faults:
    /// they find room, and evictors are idle. Each page that is out faults once
    #[arg(long, value_name = "SIZE")]
    pub ballast: Option<Bytes>,
}

/// Tells which pages are mapped.
struct Pagemap(File);

impl Pagemap {
    fn open() -> Result<Pagemap> {
        Ok(Pagemap(File::open("/proc/self/pagemap").context("/proc/self/pagemap")?))
    }

    fn is_present(&self, address: usize) -> Result<bool> {
        const PRESENT: u64 = 1 << 63;
        let mut entry = [0; 8];
        self.0
            .read_exact_at(&mut entry, (address / PAGE * 8) as u64)
            .context("reading /proc/self/pagemap")?;
        Ok(u64::from_ne_bytes(entry) & PRESENT != 0)
    }
}

impl Latency {
    pub fn run(&self) -> Result<Report> {
        // One engine puts out what is old, another what is new.
        let ballast = || -> Result<Option<Map>> {
            let Some(size) = self.ballast else { return Ok(None) };
            let mut half = Set { size: Bytes(size.0 / 2), ..self.set.clone() }.map()?;
            self.set.pattern(1).write(half.words_mut(), 0, None)?;
            Ok(Some(half))
        };
        let before = ballast()?;
        let mut map = self.set.map()?;
        self.set.pattern(0).write(map.words_mut(), 0, None)?;
        drop((before, ballast()?));
        let barrier = Barrier::new(self.set.threads as usize);
        let results: Vec<(Latencies, Duration)> = std::thread::scope(|scope| {
            let tasks: Vec<_> = (0..self.set.threads)
                .map(|task| {
                    let (map, barrier) = (&map, &barrier);
                    scope.spawn(move || self.fault(map, task, barrier))
                })
                .collect();
            tasks.into_iter().map(|task| task.join().expect("a task does not panic")).collect::<Result<_>>()
        })?;
        let mut all = Latencies::new();
        let mut rate = 0.0;
        for (latencies, time) in &results {
            all.add(latencies);
            rate += latencies.count() as f64 / time.as_secs_f64();
        }
        let mut report = Report::default();
        report.set("latency.faults_per_s", rate);
        all.tell("latency", &mut report.metrics);
        report.latency_ns = all.counts();
        Ok(report)
    }

    /// One thread's faults, over its pages in random order, again and again. The time is that spent in
    /// the faults, not in finding pages that are out.
    fn fault(&self, map: &Map, task: u64, barrier: &Barrier) -> Result<(Latencies, Duration)> {
        let pagemap = Pagemap::open()?;
        let pages = (map.atomics().len() / WORDS) as u64;
        let mut own = Own::new(map, self.set.pattern(0), pages, task, self.set.threads);
        let mut rng = Rng::new(self.set.seed ^ mix(task + 1));
        let mut order: Vec<u32> = (0..own.len() as u32).collect();
        let mut latencies = Latencies::new();
        let mut spent = Duration::ZERO;
        barrier.wait();
        let begun = Instant::now();
        'time: loop {
            rng.shuffle(&mut order);
            let before = latencies.count();
            for &page in &order {
                if begun.elapsed() >= self.seconds {
                    break 'time;
                }
                let page = u64::from(page);
                if pagemap.is_present(map.address() + own.page(page) as usize * PAGE)? {
                    continue;
                }
                if !self.rest.is_zero() {
                    std::thread::sleep(self.rest);
                }
                let choice = rng.next();
                let time =
                    if choice % 100 < self.reads { own.read(page, choice >> 8)? } else { own.write(page) };
                latencies.record(time);
                spent += time;
            }
            ensure!(
                latencies.count() > before,
                "no page of {} was out; use more than the limit",
                self.set.size
            );
            if self.ballast.is_some() {
                break;
            }
        }
        own.verify()?;
        Ok((latencies, spent))
    }
}
