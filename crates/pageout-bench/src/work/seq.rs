//! swap-w-seq: every word written ascending, round after round; then read back and checked.
//!
//! Tasks (threads, or processes of one thread each) own equal parts and go at their own pace, as the
//! original's do. The first round only swaps out; the later ones swap in and out.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{bail, ensure, Context, Result};
use clap::Args;

use super::{own_path, Report, Set};
use crate::pattern::{Pattern, WORDS};
use crate::units::{Bytes, HUGE, KB};

/// Options of `seq`.
#[derive(Clone, Debug, Args)]
pub struct Seq {
    #[command(flatten)]
    pub set: Set,
    /// Times that everything is written
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u64).range(1..))]
    rounds: u64,
    /// Processes instead of threads: N of them, each with its part of the set
    #[arg(
        long,
        value_name = "N",
        default_value_t = 1,
        conflicts_with_all = ["inline", "threads"],
        value_parser = clap::value_parser!(u64).range(1..=1024)
    )]
    processes: u64,
}

/// Options of `readback`.
#[derive(Clone, Debug, Args)]
pub struct Readback {
    #[command(flatten)]
    pub set: Set,
    /// Times that everything is read
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    rounds: u64,
}

/// How long the tasks took for each round of one kind.
struct Rounds {
    bytes: f64,
    times: Vec<Duration>,
    whole: Duration,
}

impl Rounds {
    /// KB/s of each round, the unit of vm-scalability.
    fn throughputs(&self) -> Vec<f64> {
        self.times.iter().map(|time| self.bytes / KB / time.as_secs_f64()).collect()
    }

    /// KB/s over all rounds.
    fn throughput(&self) -> f64 {
        self.bytes * self.times.len() as f64 / KB / self.whole.as_secs_f64()
    }
}

/// Runs `work(part, index of its first word, round)` on `threads` parts, each `rounds` times.
fn on_parts<W>(words: &mut [u64], threads: u64, rounds: u64, work: W) -> Result<Rounds>
where
    W: Fn(&mut [u64], u64, u64) -> Result<()> + Sync,
{
    let bytes = words.len() as f64 * 8.0;
    let part = words.len().div_ceil(threads as usize).next_multiple_of(HUGE / 8);
    let started = Instant::now();
    let all: Vec<Vec<Duration>> = std::thread::scope(|scope| {
        let tasks: Vec<_> = words
            .chunks_mut(part)
            .enumerate()
            .map(|(task, words)| {
                let work = &work;
                scope.spawn(move || -> Result<Vec<Duration>> {
                    let mut times = Vec::with_capacity(rounds as usize);
                    for round in 0..rounds {
                        let begun = Instant::now();
                        work(words, (task * part) as u64, round)?;
                        times.push(begun.elapsed());
                    }
                    Ok(times)
                })
            })
            .collect();
        tasks.into_iter().map(|task| task.join().expect("a task does not panic")).collect::<Result<_>>()
    })?;
    let whole = started.elapsed();
    let slowest = |round: usize| all.iter().map(|times| times[round]).max().expect("one task at least");
    Ok(Rounds { bytes, times: (0..rounds as usize).map(slowest).collect(), whole })
}

impl Seq {
    pub fn run(&self) -> Result<Report> {
        if self.processes > 1 {
            return self.run_processes();
        }
        let mut map = self.set.map()?;
        let words = map.words_mut();
        let pattern = |round| self.set.pattern(round);
        let written = on_parts(words, self.set.threads, self.rounds, |words, first, round| {
            pattern(round).write(words, first, round.checked_sub(1).map(pattern))
        })?;
        let last = pattern(self.rounds - 1);
        let read = on_parts(words, self.set.threads, 1, |words, first, _| last.verify(words, first))?;
        let mut report = Report::default();
        let each = written.throughputs();
        report.set("swap-w-seq.throughput", written.throughput());
        report.set("swap-w-seq.first_round", each[0]);
        if each.len() > 1 {
            report.set("swap-w-seq.later_rounds", mean(&each[1..]));
        }
        report.set("swap-w-seq.read_back", read.throughput());
        report.series.insert("swap-w-seq.throughput".into(), each);
        Ok(report)
    }

    /// Starts one process a task and adds up what they find.
    fn run_processes(&self) -> Result<Report> {
        let part = Bytes(self.set.size.0 / self.processes).scaled(1.0);
        let started = Instant::now();
        let tasks: Vec<_> = (0..self.processes)
            .map(|task| {
                let mut command = Command::new(own_path()?);
                command.args(["work", "seq", "--size", &part.0.to_string()]);
                command.args(["--rounds", &self.rounds.to_string()]);
                command.args(["--seed", &(self.set.seed + task).to_string()]);
                command.args(["--repeat", &self.set.repeat.to_string()]);
                command.args(self.set.counting.then_some("--counting"));
                command.args(self.set.huge.then_some("--huge"));
                command.args(self.set.small.then_some("--small"));
                command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().context("starting a task")
            })
            .collect::<Result<_>>()?;
        let mut sum = Report::default();
        for task in tasks {
            let output = task.wait_with_output().context("waiting for a task")?;
            ensure!(output.status.success(), "a task of seq ended with {}", output.status);
            let one: Report = serde_json::from_slice(&output.stdout).context("what a task printed")?;
            for (name, value) in one.metrics {
                *sum.metrics.entry(name).or_default() += value;
            }
            for (name, values) in one.series {
                let total = sum.series.entry(name).or_insert_with(|| vec![0.0; values.len()]);
                total.iter_mut().zip(values).for_each(|(total, value)| *total += value);
            }
        }
        if sum.metrics.is_empty() {
            bail!("no task of seq told anything");
        }
        sum.set("swap-w-seq.whole_s", started.elapsed().as_secs_f64());
        Ok(sum)
    }
}

impl Readback {
    pub fn run(&self) -> Result<Report> {
        let mut map = self.set.map()?;
        let words = map.words_mut();
        let pattern: Pattern = self.set.pattern(0);
        on_parts(words, self.set.threads, 1, |words, first, _| pattern.write(words, first, None))?;
        let read = on_parts(words, self.set.threads, self.rounds, |words, first, _| {
            debug_assert_eq!(words.len() % WORDS, 0);
            pattern.verify(words, first)
        })?;
        let mut report = Report::default();
        report.set("readback.throughput", read.throughput());
        report.series.insert("readback.throughput".into(), read.throughputs());
        Ok(report)
    }
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}
