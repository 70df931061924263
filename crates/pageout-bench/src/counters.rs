//! The kernel's counters over a run, and pageout's, under the same names.
//!
//! `/proc/vmstat` counts for the whole machine: what others swap meanwhile is counted as well, so a
//! table is made on a machine that does nothing else.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use serde_json::Value;

use crate::sys;

/// Counters of `/proc/vmstat` that are told.
const VMSTAT: [&str; 12] = [
    "pswpin",
    "pswpout",
    "swpin_zero",
    "swpout_zero",
    "thp_swpout",
    "thp_swpout_fallback",
    "thp_collapse_alloc",
    "swap_ra",
    "swap_ra_hit",
    "pgmajfault",
    "workingset_refault_anon",
    "workingset_activate_anon",
];
/// What `/proc/vmstat` tells in parts, and pageout in one. Those by who reclaims leave out cgroups.
const SUMS: [(&str, &[&str]); 3] = [
    ("pgscan", &["pgscan_anon", "pgscan_file"]),
    ("pgsteal", &["pgsteal_anon", "pgsteal_file"]),
    ("allocstall", &["allocstall_dma", "allocstall_dma32", "allocstall_normal", "allocstall_movable"]),
];
/// Counters of each order of huge pages that are told; pageout has lists of the first three.
const HUGEPAGES: [&str; 4] = ["swpin", "swpout", "swpout_fallback", "swpin_fallback"];
/// Those of the largest order that pageout tells by the manner of `/proc/vmstat`, which lacks them.
const LARGEST: [(&str, &str); 2] =
    [("thp_swpin", "hugepages-2048kB.swpin"), ("thp_swpin_fallback", "hugepages-2048kB.swpin_fallback")];
/// What of pageout's says nothing about a run.
const UNTOLD: [&str; 4] = ["active", "pid", "processes_unlisted", "swap_lost_bytes"];

/// Figures by name.
pub type Figures = BTreeMap<String, f64>;

/// CPU time of threads, in clock ticks, by their number and when they began: numbers come again.
type Ticks = BTreeMap<(i32, u64), u64>;

/// The kernel's counters at one moment.
pub struct Kernel {
    figures: Figures,
    threads: Ticks,
}

impl Kernel {
    /// Reads them; what this kernel lacks is left out.
    pub fn now() -> Kernel {
        let mut figures = Figures::new();
        let text = fs::read_to_string("/proc/vmstat").unwrap_or_default();
        for (name, value) in text.lines().filter_map(|line| line.split_once(' ')) {
            let value: f64 = value.parse().unwrap_or(0.0);
            if VMSTAT.contains(&name) {
                figures.insert(name.into(), value);
            }
            for (sum, _) in SUMS.iter().filter(|(_, parts)| parts.contains(&name)) {
                *figures.entry((*sum).into()).or_default() += value;
            }
        }
        let sizes = fs::read_dir("/sys/kernel/mm/transparent_hugepage").into_iter().flatten().flatten();
        for size in sizes {
            let size_name = size.file_name().to_string_lossy().into_owned();
            for counter in HUGEPAGES {
                let text = fs::read_to_string(size.path().join("stats").join(counter));
                if let Some(value) = text.ok().and_then(|t| t.trim().parse().ok()) {
                    figures.insert(format!("{size_name}.{counter}"), value);
                }
            }
        }
        for (name, of_order) in LARGEST {
            if let Some(value) = figures.get(of_order).copied() {
                figures.insert(name.into(), value);
            }
        }
        figures.insert("tlb_shootdowns".into(), tlb_shootdowns());
        Kernel { figures, threads: kernel_threads() }
    }

    /// What was counted since, without what stayed at zero in an order of huge pages.
    pub fn since(&self) -> Figures {
        let now = Kernel::now();
        let delta = now.figures.into_iter().map(|(name, value)| {
            let before = self.figures.get(&name).copied().unwrap_or(0.0);
            (name, value - before)
        });
        let mut delta: Figures =
            delta.filter(|(name, value)| *value != 0.0 || !name.starts_with("hugepages-")).collect();
        let seconds = ticks_since(&self.threads, &now.threads) as f64 / sys::clock_ticks();
        delta.insert("kernel_threads_s".into(), seconds);
        delta
    }
}

fn tlb_shootdowns() -> f64 {
    let text = fs::read_to_string("/proc/interrupts").unwrap_or_default();
    let line = text.lines().find(|line| line.trim_start().starts_with("TLB:")).unwrap_or_default();
    line.split_whitespace().skip(1).map_while(|field| field.parse::<f64>().ok()).sum()
}

/// The kernel's threads that swapping may use: kswapd, and workers (a loop device's).
fn kernel_threads() -> Ticks {
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let threads = processes.filter_map(|process| {
        let text = fs::read_to_string(process.path().join("stat")).ok()?;
        let (head, tail) = text.rsplit_once(") ")?;
        let (number, name) = head.split_once(" (")?;
        if !["kswapd", "kworker", "loop"].iter().any(|prefix| name.starts_with(prefix)) {
            return None;
        }
        let fields: Vec<&str> = tail.split(' ').collect();
        let field = |n: usize| fields.get(n)?.parse::<u64>().ok();
        let (user, system, begun) = (field(11)?, field(12)?, field(19)?);
        Some(((number.parse().ok()?, begun), user + system))
    });
    threads.collect()
}

/// What the threads of `now` have used since `before`; those begun since, all that they have. What one that
/// has ended used of late is not known: idle workers end all the time, and count for nothing.
fn ticks_since(before: &Ticks, now: &Ticks) -> u64 {
    now.iter().map(|(thread, ticks)| ticks.saturating_sub(before.get(thread).copied().unwrap_or(0))).sum()
}

/// Reads what `pageout run --stats FILE` wrote: every number, nested ones as `outer.inner`; lists by order
/// as the kernel names them, histograms as percentiles.
pub fn of_pageout(file: &Path) -> Result<Figures> {
    let text =
        fs::read_to_string(file).with_context(|| format!("{}: the statistics of pageout", file.display()))?;
    let value: Value =
        serde_json::from_str(&text).with_context(|| format!("{}: not JSON", file.display()))?;
    let mut figures = Figures::new();
    flatten("", &value, &mut figures);
    figures.retain(|name, _| !UNTOLD.contains(&name.as_str()));
    Ok(figures)
}

fn flatten(prefix: &str, value: &Value, into: &mut Figures) {
    match value {
        Value::Object(members) => {
            for (name, value) in members {
                let name = if prefix.is_empty() { name.clone() } else { format!("{prefix}.{name}") };
                flatten(&name, value, into);
            }
        }
        Value::Number(number) => {
            into.insert(prefix.into(), number.as_f64().unwrap_or(0.0));
        }
        Value::Array(list) => {
            let counts: Vec<f64> = list.iter().filter_map(Value::as_f64).collect();
            match prefix.strip_suffix("_ns") {
                Some(what) => percentiles(what, &counts, into),
                None if HUGEPAGES.contains(&prefix) => {
                    for (order, count) in counts.iter().enumerate().skip(1).filter(|(_, n)| **n > 0.0) {
                        into.insert(format!("hugepages-{}kB.{prefix}", 4 << order), *count);
                    }
                }
                None => {}
            }
        }
        _ => {}
    }
}

/// Of a histogram whose bucket `n` counts what took less than `2^(n+1)` ns: upper bounds, therefore.
fn percentiles(what: &str, counts: &[f64], into: &mut Figures) {
    let all: f64 = counts.iter().sum();
    for (share, name) in [(0.5, "p50"), (0.99, "p99"), (0.999, "p99.9"), (0.9999, "p99.99")] {
        let mut below = 0.0;
        let bucket = counts.iter().position(|count| {
            below += count;
            all > 0.0 && below >= share * all
        });
        if let Some(bucket) = bucket {
            into.insert(format!("{what}.{name}_us"), 2f64.powi(bucket as i32 + 1) / 1e3);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_counts() {
        let before = Kernel::now();
        assert!(before.figures.contains_key("pswpout") && before.figures.contains_key("tlb_shootdowns"));
        assert!(before.since().contains_key("kernel_threads_s"));
        // In a PID namespace of its own nobody sees them.
        let sees_kernel = std::fs::read_to_string("/proc/2/comm").is_ok_and(|name| name == "kthreadd\n");
        assert_eq!(!before.threads.is_empty(), sees_kernel);
    }

    #[test]
    fn a_worker_that_has_ended_takes_nothing_along() {
        let before = Ticks::from([((7, 100), 5), ((8, 100), 9000), ((9, 100), 9000)]);
        // One goes on, one has ended, the number of one is a new one's.
        let now = Ticks::from([((7, 100), 8), ((9, 250), 4)]);
        assert_eq!(ticks_since(&before, &now), 3 + 4);
        assert_eq!(ticks_since(&before, &Ticks::new()), 0);
    }

    #[test]
    fn nested_statistics_become_dotted_names() {
        let value =
            serde_json::json!({"pswpin": 3, "locks": {"cluster": {"waits": 2}}, "processes": [{"pid": 1}]});
        let mut figures = Figures::new();
        flatten("", &value, &mut figures);
        let names: Vec<_> = figures.iter().map(|(name, value)| (name.as_str(), *value)).collect();
        assert_eq!(names, [("locks.cluster.waits", 2.0), ("pswpin", 3.0)]);
    }

    #[test]
    fn lists_are_orders_or_percentiles() {
        let value =
            serde_json::json!({"swpout": [7, 0, 3], "fault_ns": [0, 0, 90, 0, 10], "device_ns": [0, 0]});
        let mut figures = Figures::new();
        flatten("", &value, &mut figures);
        assert_eq!(figures["hugepages-16kB.swpout"], 3.0);
        assert_eq!((figures["fault.p50_us"], figures["fault.p99_us"]), (0.008, 0.032));
        assert!(!figures.contains_key("device.p50_us"), "none were counted");
    }
}
