//! Latencies in nanoseconds: recorded per thread, merged, told as percentiles and as counts for plots.

use std::collections::BTreeMap;
use std::time::Duration;

use hdrhistogram::Histogram;

/// The percentiles that are told, with their names.
const TOLD: [(f64, &str); 5] =
    [(50.0, "p50"), (90.0, "p90"), (99.0, "p99"), (99.9, "p99.9"), (99.99, "p99.99")];

/// Recorded latencies, within 0.1 %.
#[derive(Clone)]
pub struct Latencies(Histogram<u64>);

impl Latencies {
    /// None yet; holds 1 ns to 1000 s.
    pub fn new() -> Latencies {
        Latencies(Histogram::new_with_bounds(1, 1_000_000_000_000, 3).expect("fixed bounds are right"))
    }

    /// Adds one.
    #[inline]
    pub fn record(&mut self, time: Duration) {
        self.0.saturating_record(time.as_nanos() as u64);
    }

    /// Adds all of `other`.
    pub fn add(&mut self, other: &Latencies) {
        self.0.add(&other.0).expect("same bounds");
    }

    /// How many there are.
    pub fn count(&self) -> u64 {
        self.0.len()
    }

    /// Percentiles and maximum as metrics `PREFIX.p50_us` and so on; nothing when there are none.
    pub fn tell(&self, prefix: &str, metrics: &mut BTreeMap<String, f64>) {
        if self.count() == 0 {
            return;
        }
        for (percentile, name) in TOLD {
            let value = self.0.value_at_percentile(percentile) as f64 / 1e3;
            metrics.insert(format!("{prefix}.{name}_us"), value);
        }
        metrics.insert(format!("{prefix}.max_us"), self.0.max() as f64 / 1e3);
        metrics.insert(format!("{prefix}.count"), self.count() as f64);
    }

    /// (nanoseconds, count), ascending, a tenth of a decade each: enough for a plot on log axes.
    pub fn counts(&self) -> Vec<(u64, u64)> {
        let mut counts: BTreeMap<u64, u64> = BTreeMap::new();
        for step in self.0.iter_recorded() {
            let value = step.value_iterated_to().max(1) as f64;
            let bucket = 10f64.powf((value.log10() * 10.0).floor() / 10.0);
            *counts.entry(bucket.round() as u64).or_default() += step.count_since_last_iteration();
        }
        counts.into_iter().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_and_counts_agree() {
        let mut latencies = Latencies::new();
        for microseconds in 1..=1000 {
            latencies.record(Duration::from_micros(microseconds));
        }
        let mut metrics = BTreeMap::new();
        latencies.tell("x", &mut metrics);
        assert!((metrics["x.p50_us"] - 500.0).abs() < 2.0 && (metrics["x.p99_us"] - 990.0).abs() < 3.0);
        assert_eq!(latencies.counts().iter().map(|c| c.1).sum::<u64>(), 1000);
        let mut none = BTreeMap::new();
        Latencies::new().tell("x", &mut none);
        assert!(none.is_empty());
    }
}
