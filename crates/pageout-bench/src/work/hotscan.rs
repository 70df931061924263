//! A hot set in random use, first alone, then while another thread reads a cold array once.
//!
//! What is told is how much slower the hot set got. On one CPU the two threads share it, and the figure
//! says nothing.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::Result;
use clap::Args;

use super::rand::Own;
use super::Report;
use crate::dist::Rng;
use crate::mem::{Map, Pages};
use crate::pattern::{Pattern, WORDS};
use crate::units::{parse_time, Bytes, KB};

/// Options of `hotscan`.
#[derive(Clone, Debug, Args)]
pub struct Hotscan {
    /// The set in use: half of the limit
    #[arg(long, value_name = "SIZE", default_value = "256M")]
    pub hot: Bytes,
    /// The array that is read once
    #[arg(long, value_name = "SIZE", default_value = "2G")]
    pub cold: Bytes,
    /// How long the hot set is used alone
    #[arg(long, value_name = "TIME", default_value = "3", value_parser = parse_time)]
    seconds: Duration,
    /// What the contents and the choices derive from
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
}

impl Hotscan {
    pub fn run(&self) -> Result<Report> {
        let mut hot = Map::new(self.hot.len(), Pages::Default)?;
        let mut cold = Map::new(self.cold.len(), Pages::Default)?;
        let (hot_pattern, cold_pattern) = (Pattern::new(self.seed, 0, 1), Pattern::new(self.seed, 1, 1));
        cold_pattern.write(cold.words_mut(), 0, None)?;
        hot_pattern.write(hot.words_mut(), 0, None)?;
        let pages = (hot.atomics().len() / WORDS) as u64;
        let mut own = Own::new(&hot, hot_pattern, pages, 0, 1);
        let mut rng = Rng::new(self.seed);
        // Used until every page was met many times, so that any policy knows it for hot.
        self.use_hot(&mut own, &mut rng, |used| used < pages * 16)?;
        let begun = Instant::now();
        let alone = self.use_hot(&mut own, &mut rng, |_| begun.elapsed() < self.seconds)?;
        let scanning = AtomicBool::new(true);
        let (with_scan, scan_time) = std::thread::scope(|scope| -> Result<_> {
            let scan = scope.spawn(|| {
                let begun = Instant::now();
                let result = cold_pattern.verify(cold.words_mut(), 0);
                scanning.store(false, Ordering::Relaxed);
                result.map(|()| begun.elapsed())
            });
            let rate = self.use_hot(&mut own, &mut rng, |_| scanning.load(Ordering::Relaxed));
            let time = scan.join().expect("the scan does not panic")?;
            Ok((rate?, time))
        })?;
        own.verify()?;
        let mut report = Report::default();
        report.set("hotscan.alone_per_s", alone);
        report.set("hotscan.with_scan_per_s", with_scan);
        report.set("hotscan.drop_%", 100.0 * (1.0 - with_scan / alone));
        report.set("hotscan.scan_throughput", self.cold.0 as f64 / KB / scan_time.as_secs_f64());
        Ok(report)
    }

    /// Accesses the hot set as long as `go_on` says, asked every 256 accesses; gives accesses a second.
    fn use_hot(&self, own: &mut Own<'_>, rng: &mut Rng, go_on: impl Fn(u64) -> bool) -> Result<f64> {
        let begun = Instant::now();
        let mut used = 0;
        loop {
            for _ in 0..256 {
                let (page, choice) = (rng.below(own.len()), rng.next());
                if choice % 5 == 0 {
                    own.write(page);
                } else {
                    own.read(page, choice >> 8)?;
                }
            }
            used += 256;
            if !go_on(used) {
                return Ok(used as f64 / begun.elapsed().as_secs_f64());
            }
        }
    }
}
