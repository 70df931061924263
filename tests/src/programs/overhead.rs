//! What pageout costs a program that fits: processor time and start-up, in alternating pairs.
//!
//! At the small size few pairs are measured, on machines that do other things too, and the bounds are
//! wider; the full size measures what is asked for: 1 % (1 to 2 are reached) and 5 ms.

use super::harness::{counter, Bench};
use super::runtimes::python;
use super::{process, report, Invocation};
use anyhow::{ensure, Result};
use std::ffi::OsString;
use std::path::Path;
use std::time::Instant;

/// Processor seconds, wall seconds and the largest resident memory of one run.
struct Cost {
    cpu: f64,
    wall: f64,
    max_rss: u64,
}

fn measure(invocation: &Invocation, wrapper: &[OsString], dir: &Path) -> Result<Cost> {
    let start = Instant::now();
    let ended = process::wait(process::spawn(invocation, wrapper, dir)?)?;
    let wall = start.elapsed().as_secs_f64();
    ensure!(ended.status.success(), "ended with {}", ended.status);
    Ok(Cost { cpu: ended.cpu.as_secs_f64(), wall, max_rss: ended.max_rss })
}

/// Runs pairs, every other one the other way round, and gives `compare(plain, paged)` of each, sorted.
fn pairs(
    count: usize,
    invocation: &Invocation,
    wrapper: &[OsString],
    dir: &Path,
    compare: impl Fn(&Cost, &Cost) -> f64,
) -> Result<Vec<f64>> {
    let mut results = Vec::with_capacity(count);
    for pair in 0..count {
        let first = measure(invocation, if pair % 2 == 0 { &[] } else { wrapper }, dir)?;
        let second = measure(invocation, if pair % 2 == 0 { wrapper } else { &[] }, dir)?;
        let (plain, paged) = if pair % 2 == 0 { (&first, &second) } else { (&second, &first) };
        results.push(compare(plain, paged));
    }
    results.sort_by(f64::total_cmp);
    Ok(results)
}

fn spread(sorted: &[f64]) -> (f64, f64, f64) {
    (sorted[sorted.len() / 4], sorted[sorted.len() / 2], sorted[sorted.len() * 3 / 4])
}

/// Processor time of a Python program whose resident memory peaks at 77 % of the limit.
pub fn processor_time(bench: &Bench) -> Result<()> {
    let dir = bench.directory("overhead-cpu")?;
    let invocation = (python("overhead", bench.size.pick(200, 600)).command)(&dir);
    let natural = measure(&invocation, &[], &dir)?;
    let stats = dir.join("stats.json");
    let wrapper = bench.wrapper(natural.max_rss * 13 / 10, &stats, true);
    let count = bench.size.pick(5, 15);
    let ratios =
        pairs(count, &invocation, &wrapper, &dir, |plain, paged| (paged.cpu / plain.cpu - 1.0) * 100.0)?;
    let swapped = counter(&stats, "pswpout")?;
    let (low, median, high) = spread(&ratios);
    report::note(format!(
        "processor time below 80 % of the limit: {median:+.2} % (quartiles {low:+.2} to {high:+.2}, {count} pairs, {:.2} s)",
        natural.cpu
    ));
    ensure!(swapped == 0, "{swapped} pages were paged out of a program that fits");
    let bound = bench.size.pick(5.0, 1.0);
    ensure!(median <= bound, "{median:.2} % more processor time, allowed are {bound} %");
    Ok(std::fs::remove_dir_all(&dir)?)
}

/// A shell script of many short processes: each is a fork and an exec.
pub fn short_processes(bench: &Bench) -> Result<()> {
    let dir = bench.directory("overhead-short")?;
    let wrapper = bench.wrapper(1 << 30, &dir.join("stats.json"), true);
    let each = bench.size.pick(300, 3000);
    let script = format!("i=0; while [ $i -lt {each} ]; do /bin/true; i=$((i+1)); done; echo $i");
    let invocation = Invocation::new("sh").arg("-c").arg(script);
    let count = bench.size.pick(3, 7);
    let differences = pairs(count, &invocation, &wrapper, &dir, |plain, paged| {
        (paged.wall - plain.wall) * 1e3 / f64::from(each)
    })?;
    let (low, median, high) = spread(&differences);
    report::note(format!(
        "each of {each} short processes: {median:+.2} ms (quartiles {low:+.2} to {high:+.2}, {count} pairs)"
    ));
    let bound = bench.size.pick(10.0, 5.0);
    ensure!(median <= bound, "each takes {median:.2} ms longer, allowed are {bound} ms");
    Ok(std::fs::remove_dir_all(&dir)?)
}

/// Start and end of `true`.
pub fn start_up(bench: &Bench) -> Result<()> {
    let dir = bench.directory("overhead-start")?;
    let wrapper = bench.wrapper(1 << 30, &dir.join("stats.json"), true);
    let invocation = Invocation::new("true");
    let count = bench.size.pick(30, 100);
    let differences =
        pairs(count, &invocation, &wrapper, &dir, |plain, paged| (paged.wall - plain.wall) * 1e3)?;
    let (low, median, high) = spread(&differences);
    report::note(format!(
        "start-up: {median:+.2} ms (quartiles {low:+.2} to {high:+.2}, {count} pairs of true)"
    ));
    let bound = bench.size.pick(20.0, 5.0);
    ensure!(median <= bound, "starts {median:.2} ms later, allowed are {bound} ms");
    Ok(std::fs::remove_dir_all(&dir)?)
}
