//! `pageout-bench policy`: hit ratios of pageout's reclaim policy beside those of the books, on traces. See
//! `docs/policy.md`.

mod model;
mod record;
mod trace;

use std::path::PathBuf;

use anyhow::Result;
use clap::Args;

use crate::caches::{Cache, Clock, Fifo, Lru, Optimum};
use crate::only;
use crate::units::{Bytes, PAGE};
use model::Model;
use trace::{Access, Trace};

#[derive(Args)]
pub struct PolicyArgs {
    /// Memory that the traces made by rule run in
    #[arg(short, long, value_name = "SIZE", default_value = "64M")]
    memory: Bytes,
    /// Only traces whose names contain one of these
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    only: Vec<String>,
    /// Run a program under valgrind and write its trace, instead
    #[arg(long, value_name = "FILE", requires = "command")]
    record: Option<PathBuf>,
    /// The program and its arguments
    #[arg(last = true, requires = "record", value_name = "COMMAND")]
    command: Vec<String>,
}

/// Prints the table, or records a trace.
pub fn run(args: &PolicyArgs) -> Result<()> {
    if let Some(file) = &args.record {
        return record::record(file, &args.command);
    }
    let traces: Vec<Trace> = trace::made(args.memory.pages()).into_iter().chain(trace::recorded()?).collect();
    let names: Vec<&str> = traces.iter().map(|trace| trace.name.as_str()).collect();
    only::check(&args.only, &names)?;
    println!("hits of accesses that count, %{:>47}", "pages in per fault");
    println!(
        "{:>12} {:>7} {:>8} {:>7} {:>7} {:>7} {:>7} {:>9}",
        "trace", "memory", "pageout", "FIFO", "CLOCK", "LRU", "optimum", "pageout"
    );
    let wanted = traces.iter().filter(|trace| only::wants(&args.only, &trace.name));
    wanted.for_each(|trace| println!("{}", row(trace)));
    Ok(())
}

fn row(trace: &Trace) -> String {
    let (pages, frames) = (trace.pages(), trace.frames);
    let numbers: Vec<u32> = trace.accesses.iter().map(|access| access.page() as u32).collect();
    let mut model = Model::new(pages, frames);
    let own = hits(trace, |access| model.access(access));
    let book = |mut cache: Box<dyn Cache>| hits(trace, |access| cache.access(access.page() as u32));
    format!(
        "{:>12} {:>7} {own:>8.2} {:>7.2} {:>7.2} {:>7.2} {:>7.2} {:>9.1}",
        trace.name,
        Bytes((frames * PAGE) as u64).to_string(),
        book(Box::new(Fifo::new(pages, frames))),
        book(Box::new(Clock::new(pages, frames))),
        book(Box::new(Lru::new(pages, frames))),
        book(Box::new(Optimum::new(pages, frames, &numbers))),
        model.brought as f64 / model.faults.max(1) as f64,
    )
}

/// The share of the accesses that count which `access` says were hits, in percent.
fn hits(trace: &Trace, mut access: impl FnMut(Access) -> bool) -> f64 {
    let (mut hits, mut counted) = (0usize, 0usize);
    for each in &trace.accesses {
        let hit = access(*each);
        hits += usize::from(hit && each.counts());
        counted += usize::from(each.counts());
    }
    100.0 * hits as f64 / counted.max(1) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pageout(trace: &Trace) -> f64 {
        let mut model = Model::new(trace.pages(), trace.frames);
        hits(trace, |access| model.access(access))
    }

    fn lru(trace: &Trace) -> f64 {
        let mut lru = Lru::new(trace.pages(), trace.frames);
        hits(trace, |access| lru.access(access.page() as u32))
    }

    /// What is asked of the policy, at a small scale.
    #[test]
    fn the_policy_keeps_what_is_used() {
        for trace in trace::made(Bytes(32 << 20).pages()) {
            let (own, lru) = (pageout(&trace), lru(&trace));
            match trace.name.as_str() {
                "zipf" => assert!(own > lru, "Zipf: {own} against LRU's {lru}"),
                "hotscan" => assert!(own > 99.9, "beside a scan: {own}"),
                "loop" => assert!(own > 80.0, "a loop: {own}"),
                "columns" => assert!(own > 88.0, "down columns: {own}"),
                "uniform" => assert!(own > lru - 1.0, "uniform: {own} against LRU's {lru}"),
                _ => assert!(own > 99.0, "{}: {own}", trace.name),
            }
        }
        for trace in trace::recorded().unwrap() {
            let (own, lru) = (pageout(&trace), lru(&trace));
            assert!(own > lru - 6.0, "{}: {own} against LRU's {lru}", trace.name);
        }
    }
}
