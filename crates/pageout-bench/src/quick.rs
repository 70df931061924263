//! The main table in under three minutes on two cores.
//!
//! Small sets under a small limit, all workloads once around; another time around, in turned order,
//! while the time allows.

use std::time::{Duration, Instant};

use anyhow::{ensure, Result};

use crate::compare::{compare, Comparison};
use crate::counters::Figures;
use crate::engine::{Engine, Setting};
use crate::table::{self, Column};
use crate::units::Bytes;
use crate::work::WorkLine;

const TIME: Duration = Duration::from_secs(165);

/// Workload, and the limit it runs in.
const WORKS: [(&str, u64); 4] = [
    ("seq --size 512M --threads 2 --rounds 3 --huge", 128),
    ("rand --size 256M --small --seconds 3", 128),
    ("latency --size 256M --small --seconds 3", 128),
    ("python --size 160M", 80),
];

/// The metrics of the main table.
const MAIN: [&str; 17] = [
    "anon.huge_%",
    "cpu.s_per_GiB",
    "latency.p50_us",
    "latency.p99_us",
    "latency.p99.9_us",
    "python.seconds",
    "resident.peak_MiB",
    "swap-w-rand.accesses_per_s",
    "swap-w-rand.p50_us",
    "swap-w-rand.p99_us",
    "swap-w-rand.p99.9_us",
    "swap-w-seq.first_round",
    "swap-w-seq.later_rounds",
    "swap-w-seq.read_back",
    "swap-w-seq.throughput",
    "tlb_shootdowns",
    "zram.compressed_%",
];

/// What `run` gives.
pub struct Quick {
    pub comparisons: Vec<Comparison>,
    /// The main table.
    pub table: String,
    /// Whether all runs came to a good end.
    pub complete: bool,
}

/// Runs all. A run that fails is told and left out.
pub fn run(setting: &Setting) -> Result<Quick> {
    let mut engines: Vec<Engine> = ["kernel-zram", "kernel-ram", "pageout"]
        .iter()
        .map(|name| name.parse().expect("the crate's own engines are right"))
        .collect();
    let first = WorkLine::own(WORKS[0].0);
    engines.retain(|engine| {
        let lack = engine.lack(&first, setting);
        if let Some(lack) = &lack {
            eprintln!("pageout-bench: left out {engine}: {lack}");
        }
        lack.is_none()
    });
    ensure!(!engines.is_empty(), "no engine can run here; see above");
    let begun = Instant::now();
    let mut all: Vec<Option<Comparison>> = WORKS.iter().map(|_| None).collect();
    let mut complete = true;
    loop {
        let round_begun = Instant::now();
        for ((work, megabytes), sum) in WORKS.iter().zip(&mut all) {
            let setting = Setting { memory: Bytes(megabytes << 20), ..setting.clone() };
            for engine in &engines {
                match (compare(&WorkLine::own(work), std::slice::from_ref(engine), 1, &setting), &mut *sum) {
                    (Ok(comparison), Some(sum)) => sum.add(comparison),
                    (Ok(comparison), sum) => *sum = Some(comparison),
                    (Err(error), _) => {
                        eprintln!("pageout-bench: left out {error:#}");
                        complete = false;
                    }
                }
            }
        }
        engines.reverse();
        if begun.elapsed() + round_begun.elapsed() > TIME {
            break;
        }
    }
    let comparisons: Vec<Comparison> = all.into_iter().flatten().collect();
    let table = main_table(&comparisons);
    Ok(Quick { comparisons, table, complete })
}

/// One table of the main metrics of all comparisons. What every workload has is taken from the first.
fn main_table(all: &[Comparison]) -> String {
    // An engine may be missing from some, where the kernel killed the work again and again.
    let mut merged: Vec<(&str, Vec<Figures>)> = Vec::new();
    for runs in all.iter().flat_map(|comparison| &comparison.runs) {
        let at = merged.iter().position(|(name, _)| *name == runs.engine).unwrap_or_else(|| {
            merged.push((&runs.engine, Vec::new()));
            merged.len() - 1
        });
        let rounds = &mut merged[at].1;
        rounds.resize(rounds.len().max(runs.rounds.len()), Figures::new());
        for (figures, record) in rounds.iter_mut().zip(&runs.rounds) {
            for (name, value) in record.metrics.iter().filter(|(name, _)| MAIN.contains(&name.as_str())) {
                figures.entry(name.clone()).or_insert(*value);
            }
        }
    }
    let columns: Vec<Column<'_>> = merged
        .iter()
        .map(|(name, rounds)| Column { name: (*name).into(), rounds: rounds.iter().collect() })
        .collect();
    table::table(&columns)
}
