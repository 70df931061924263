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
const VMSTAT: [&str; 16] = [
    "pswpin",
    "pswpout",
    "swpin_zero",
    "swpout_zero",
    "thp_swpout",
    "thp_swpout_fallback",
    "swap_ra",
    "swap_ra_hit",
    "pgmajfault",
    "pgscan_direct",
    "pgscan_kswapd",
    "pgsteal_direct",
    "pgsteal_kswapd",
    "allocstall_movable",
    "workingset_refault_anon",
    "workingset_activate_anon",
];
/// Counters of each order of huge pages that are told.
const HUGEPAGES: [&str; 3] = ["swpin", "swpout", "swpout_fallback"];

/// Figures by name.
pub type Figures = BTreeMap<String, f64>;

/// The kernel's counters at one moment.
pub struct Kernel(Figures);

impl Kernel {
    /// Reads them; what this kernel lacks is left out.
    pub fn now() -> Kernel {
        let mut figures = Figures::new();
        let text = fs::read_to_string("/proc/vmstat").unwrap_or_default();
        for (name, value) in text.lines().filter_map(|line| line.split_once(' ')) {
            if VMSTAT.contains(&name) {
                figures.insert(name.into(), value.parse().unwrap_or(0.0));
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
        figures.insert("tlb_shootdowns".into(), tlb_shootdowns());
        figures.insert("kernel_threads_s".into(), kernel_threads_seconds());
        Kernel(figures)
    }

    /// What was counted since, without what stayed at zero in an order of huge pages.
    pub fn since(&self) -> Figures {
        let now = Kernel::now().0.into_iter();
        let delta = now.map(|(name, value)| {
            let before = self.0.get(&name).copied().unwrap_or(0.0);
            (name, value - before)
        });
        delta.filter(|(name, value)| *value != 0.0 || !name.starts_with("hugepages-")).collect()
    }
}

fn tlb_shootdowns() -> f64 {
    let text = fs::read_to_string("/proc/interrupts").unwrap_or_default();
    let line = text.lines().find(|line| line.trim_start().starts_with("TLB:")).unwrap_or_default();
    line.split_whitespace().skip(1).map_while(|field| field.parse::<f64>().ok()).sum()
}

/// CPU seconds of the kernel's threads that swapping may use: kswapd, and workers (a loop device's).
fn kernel_threads_seconds() -> f64 {
    let ticks = sys::clock_ticks();
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let seconds = processes.filter_map(|process| {
        let text = fs::read_to_string(process.path().join("stat")).ok()?;
        let (head, tail) = text.rsplit_once(") ")?;
        let name = head.split_once('(')?.1;
        if !["kswapd", "kworker", "loop"].iter().any(|prefix| name.starts_with(prefix)) {
            return None;
        }
        let fields: Vec<&str> = tail.split(' ').collect();
        let (user, system): (f64, f64) = (fields.get(11)?.parse().ok()?, fields.get(12)?.parse().ok()?);
        Some((user + system) / ticks)
    });
    seconds.sum()
}

/// Reads what `pageout run --stats FILE` wrote: every number, nested ones as `outer.inner`.
pub fn of_pageout(file: &Path) -> Result<Figures> {
    let text =
        fs::read_to_string(file).with_context(|| format!("{}: the statistics of pageout", file.display()))?;
    let value: Value =
        serde_json::from_str(&text).with_context(|| format!("{}: not JSON", file.display()))?;
    let mut figures = Figures::new();
    flatten("", &value, &mut figures);
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
        // Lists are histograms, told by the workloads' own percentiles.
        Value::Number(number) => {
            into.insert(prefix.into(), number.as_f64().unwrap_or(0.0));
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_counts() {
        let figures = Kernel::now().0;
        assert!(figures.contains_key("pswpout") && figures.contains_key("tlb_shootdowns"));
    }

    #[test]
    fn nested_statistics_become_dotted_names() {
        let value = serde_json::json!({"pswpin": 3, "locks": {"cluster": {"waits": 2}}, "fault_ns": [1, 2]});
        let mut figures = Figures::new();
        flatten("", &value, &mut figures);
        let names: Vec<_> = figures.iter().map(|(name, value)| (name.as_str(), *value)).collect();
        assert_eq!(names, [("locks.cluster.waits", 2.0), ("pswpin", 3.0)]);
    }
}
