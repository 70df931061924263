//! The workloads: what runs inside an engine, as a process of its own.
//!
//! `pageout-bench work NAME ...` runs one and prints a `Report` as one line of JSON on standard
//! output. Each checks every datum that it reads and ends with an error on the first that is wrong.

mod fault;
mod hotscan;
mod overhead;
mod program;
mod python;
mod rand;
pub mod redis;
mod seq;
mod zipf;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::{Args, Parser, Subcommand};
use serde::{Deserialize, Serialize};

use crate::mem::{self, Map, Pages};
use crate::pattern::Pattern;
use crate::units::Bytes;

/// What a workload found.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Report {
    /// Figures by name: `WORK.what_unit`.
    pub metrics: BTreeMap<String, f64>,
    /// Figures in the order of rounds, by name.
    #[serde(default)]
    pub series: BTreeMap<String, Vec<f64>>,
    /// How often which latency was seen: (nanoseconds, count).
    #[serde(default)]
    pub latency_ns: Vec<(u64, u64)>,
}

impl Report {
    /// Sets one figure.
    pub fn set(&mut self, name: &str, value: f64) {
        self.metrics.insert(name.into(), value);
    }
}

/// A workload and its options, as on the command line.
#[derive(Clone, Debug, Subcommand)]
pub enum Work {
    /// Threads or processes write every word ascending, round after round, then read it all back
    /// (swap-w-seq of vm-scalability)
    Seq(seq::Seq),
    /// Fill once, then read everything back, several times
    Readback(seq::Readback),
    /// Random accesses to single words for a time (swap-w-rand, pmbench)
    Rand(rand::Rand),
    /// One fault at a time on memory that is out, with percentiles
    Latency(fault::Latency),
    /// Zipf accesses; the hit ratio beside those of LRU and CLOCK on the same accesses
    Zipf(zipf::Zipf),
    /// A hot set in use while a cold array is scanned
    Hotscan(hotscan::Hotscan),
    /// A Python program that builds and walks dictionaries and lists
    Python(python::Python),
    /// redis-server filled and read with Zipf keys by a client outside the engine
    Redis(redis::Redis),
    /// Real programs that fit in the memory: python, sort, gzip
    Overhead(overhead::Overhead),
    /// Any command line, timed
    Program(program::Program),
}

#[derive(Parser)]
#[command(name = "work", no_binary_name = true, disable_help_subcommand = true)]
struct Line {
    #[command(subcommand)]
    work: Work,
}

/// A workload as words, `["seq", "--size", "2G"]`: checked once, passed on unchanged.
#[derive(Clone, Debug)]
pub struct WorkLine {
    words: Vec<String>,
    work: Work,
}

impl WorkLine {
    /// Checks `words`; the error is clap's, with its usage text.
    pub fn parse(words: &[String]) -> Result<WorkLine, clap::Error> {
        Ok(WorkLine { words: words.to_vec(), work: Line::try_parse_from(words)?.work })
    }

    /// From a line of the crate's own without quotes.
    pub fn own(line: &str) -> WorkLine {
        let words: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
        WorkLine::parse(&words).expect("the crate's own lines are right")
    }

    /// The workload.
    pub fn work(&self) -> &Work {
        &self.work
    }

    /// As typed.
    pub fn text(&self) -> String {
        self.words.join(" ")
    }

    /// The command that an engine starts.
    pub fn command(&self) -> Result<Vec<OsString>> {
        match &self.work {
            Work::Python(python) => Ok(python.command()),
            Work::Redis(redis) => redis.command(),
            Work::Program(program) => Ok(program.command()),
            _ => {
                let mut command = vec![own_path()?.into_os_string(), "work".into()];
                command.extend(self.words.iter().map(OsString::from));
                Ok(command)
            }
        }
    }
}

/// The path of this program, for children of its own.
pub fn own_path() -> Result<PathBuf> {
    std::env::current_exe().context("the path of this program")
}

impl Work {
    /// The prefix of its metrics.
    pub fn name(&self) -> &'static str {
        match self {
            Work::Seq(_) => "swap-w-seq",
            Work::Readback(_) => "readback",
            Work::Rand(_) => "swap-w-rand",
            Work::Latency(_) => "latency",
            Work::Zipf(_) => "zipf",
            Work::Hotscan(_) => "hotscan",
            Work::Python(_) => "python",
            Work::Redis(_) => "redis",
            Work::Overhead(_) => "overhead",
            Work::Program(_) => "program",
        }
    }

    /// How much anonymous memory it takes at its peak, about; `None` when nobody can tell.
    pub fn set(&self) -> Option<Bytes> {
        match self {
            Work::Seq(w) => Some(w.set.size),
            Work::Readback(w) => Some(w.set.size),
            Work::Rand(w) => Some(w.set.size),
            Work::Latency(w) => Some(Bytes(w.set.size.0 + w.ballast.map_or(0, |ballast| ballast.0))),
            Work::Zipf(w) => Some(w.set.size),
            Work::Hotscan(w) => Some(Bytes(w.hot.0 + w.cold.0)),
            Work::Python(w) => Some(w.size),
            Work::Redis(w) => Some(Bytes(w.data.0 * 3 / 2)),
            Work::Overhead(w) => Some(Bytes(w.python.size.0 + 4 * w.text.0)),
            Work::Program(_) => None,
        }
    }

    /// Runs it in this process and gives what it found, with the counters of a region that it worked on.
    pub fn run(&self) -> Result<Report> {
        let mut report = self.run_plain()?;
        for (name, value) in mem::swap().iter().flat_map(|swap| swap.stats().counters()) {
            report.set(name, value as f64);
        }
        Ok(report)
    }

    fn run_plain(&self) -> Result<Report> {
        match self {
            Work::Seq(w) => w.run(),
            Work::Readback(w) => w.run(),
            Work::Rand(w) => w.run(),
            Work::Latency(w) => w.run(),
            Work::Zipf(w) => w.run(),
            Work::Hotscan(w) => w.run(),
            Work::Python(w) => w.run(),
            Work::Redis(w) => w.run(),
            Work::Overhead(w) => w.run(),
            Work::Program(w) => w.run(),
        }
    }
}

/// The memory that a workload works on; the same words in all of them.
#[derive(Clone, Debug, Args)]
pub struct Set {
    /// Memory worked on
    #[arg(long, value_name = "SIZE", default_value = "2G")]
    pub size: Bytes,
    /// Threads at work
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=1024))]
    pub threads: u64,
    /// What the contents and the choices derive from
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
    /// Ask for huge pages (madvise)
    #[arg(long, conflicts_with = "small")]
    pub huge: bool,
    /// Refuse huge pages (madvise)
    #[arg(long)]
    pub small: bool,
    /// Repeat each word N times, a power of two: 1 is incompressible, 4 shrinks to about a quarter
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = power_of_two)]
    pub repeat: u64,
    /// Words that count up, as usemem's do; they shrink to about half
    #[arg(long)]
    pub counting: bool,
    /// Work on a region of the library with inline delivery, of which SIZE stays in memory
    #[arg(long, value_name = "SIZE")]
    pub inline: Option<Bytes>,
}

fn power_of_two(text: &str) -> Result<u64, String> {
    match text.parse::<u64>() {
        Ok(n) if n.is_power_of_two() && n <= 512 => Ok(n),
        _ => Err(format!("{text}: not a power of two from 1 to 512")),
    }
}

impl Set {
    /// Maps the set, with the advice asked for.
    pub fn map(&self) -> Result<Map> {
        let pages = match (self.huge, self.small) {
            (true, _) => Pages::Huge,
            (_, true) => Pages::Small,
            _ => Pages::Default,
        };
        if let Some(memory) = self.inline {
            return Map::inline(self.size.len(), memory, pages);
        }
        Map::new(self.size.len(), pages).with_context(|| format!("mapping {}", self.size))
    }

    /// The contents of `round`.
    pub fn pattern(&self, round: u64) -> Pattern {
        let pattern = Pattern::new(self.seed, round, self.repeat);
        if self.counting {
            pattern.counting()
        } else {
            pattern
        }
    }
}
