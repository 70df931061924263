//! Comparison: each engine runs the workload in turn, round after round, the order turned around each
//! time, so that what drifts (heat, caches, other tenants) meets all alike.

use std::fmt::Write as _;
use std::fs;
use std::io::{IsTerminal, Write as _};
use std::path::Path;

use anyhow::{ensure, Context, Result};
use serde::{Deserialize, Serialize};

use crate::engine::{self, Engine, OomKilled, Record, Setting};
use crate::machine::Machine;
use crate::table::{self, Column, Summary};
use crate::work::WorkLine;

/// All rounds of one engine.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Runs {
    pub engine: String,
    pub rounds: Vec<Record>,
}

/// A comparison's outcome; what `--json` writes.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Comparison {
    /// What the asks and the pages call it.
    pub id: String,
    /// The workload as typed.
    pub work: String,
    /// The limit, as people write it.
    pub memory: String,
    /// The command that makes this comparison.
    pub command: String,
    pub runs: Vec<Runs>,
    /// What was left out, and why.
    pub left_out: Vec<String>,
}

impl Comparison {
    /// The summary of one metric of one engine.
    pub fn summary(&self, engine: &str, metric: &str) -> Option<Summary> {
        let runs = self.runs.iter().find(|runs| runs.engine == engine)?;
        Column { name: String::new(), rounds: runs.rounds.iter().map(|r| &r.metrics).collect() }
            .summary(metric)
    }

    /// `changed` over `base`, of medians.
    pub fn ratio(&self, changed: &str, base: &str, metric: &str) -> Option<f64> {
        let (changed, base) = (self.summary(changed, metric)?.median, self.summary(base, metric)?.median);
        (base != 0.0).then(|| changed / base)
    }

    /// Adds the rounds of the same workload run again, under the same engines or others.
    pub fn add(&mut self, again: Comparison) {
        self.left_out.extend(again.left_out);
        for other in again.runs {
            match self.runs.iter_mut().find(|runs| runs.engine == other.engine) {
                Some(runs) => runs.rounds.extend(other.rounds),
                None => self.runs.push(other),
            }
        }
    }

    /// The table as pasted, with a line that says what was run.
    pub fn table(&self) -> String {
        let columns: Vec<Column<'_>> = self
            .runs
            .iter()
            .map(|runs| Column {
                name: runs.engine.clone(),
                rounds: runs.rounds.iter().map(|record| &record.metrics).collect(),
            })
            .collect();
        let mut text = format!("{} in {}", self.work, self.memory);
        let rounds = self.runs.first().map_or(0, |runs| runs.rounds.len());
        let _ = writeln!(text, ", medians of {rounds}\n");
        text + &table::table(&columns)
    }
}

/// Runs `line` under all of `engines`, `rounds` times each. Engines that cannot run here are left out,
/// and said; an error when none is left, or when any run fails.
pub fn compare(line: &WorkLine, engines: &[Engine], rounds: usize, setting: &Setting) -> Result<Comparison> {
    let mut left_out = Vec::new();
    let mut able = Vec::new();
    for engine in engines {
        match engine.lack(setting) {
            Some(lack) => left_out.push(format!("{engine}: {lack}")),
            None => able.push(engine),
        }
    }
    for lack in &left_out {
        eprintln!("pageout-bench: left out {lack}");
    }
    ensure!(!able.is_empty(), "no engine of those asked for can run here; see above");
    let mut records: Vec<Vec<Record>> = able.iter().map(|_| Vec::new()).collect();
    let total = rounds * able.len();
    for round in 0..rounds {
        let mut order: Vec<usize> = (0..able.len()).collect();
        if round % 2 == 1 {
            order.reverse();
        }
        for at in order {
            let done = records.iter().map(Vec::len).sum::<usize>();
            progress(&format!("[{}/{total}] {} under {}", done + 1, line.text(), able[at]));
            records[at].push(run_again_when_killed(able[at], line, setting, &mut left_out)?);
        }
    }
    progress("");
    let runs = able
        .iter()
        .zip(records)
        .map(|(engine, rounds)| Runs { engine: engine.to_string(), rounds })
        .collect();
    let names: Vec<String> = able.iter().map(|engine| engine.to_string()).collect();
    Ok(Comparison {
        id: line.work().name().into(),
        work: line.text(),
        memory: setting.memory.to_string(),
        command: format!(
            "pageout-bench compare --engines '{}' --rounds {rounds} --memory {} {}",
            names.join(","),
            setting.memory,
            line.text()
        ),
        runs,
        left_out,
    })
}

/// One run; up to four more when the kernel killed the workload, each of which is told.
fn run_again_when_killed(
    engine: &Engine,
    line: &WorkLine,
    setting: &Setting,
    left_out: &mut Vec<String>,
) -> Result<Record> {
    for _ in 0..4 {
        match engine::run(engine, line, setting) {
            Err(error) if error.is::<OomKilled>() => {
                let told = format!("a run under {engine}: {OomKilled}; made again");
                eprintln!("pageout-bench: left out {told}");
                left_out.push(told);
            }
            result => return result,
        }
    }
    engine::run(engine, line, setting)
}

/// One line on a terminal, overwritten by the next; nothing elsewhere.
fn progress(text: &str) {
    let mut stderr = std::io::stderr();
    if stderr.is_terminal() {
        let cut: String = text.chars().take(100).collect();
        let _ = write!(stderr, "\r\x1b[K{cut}");
        let _ = stderr.flush();
    }
}

/// What a command leaves for other programs, and for `report`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Results {
    pub machine: Machine,
    pub comparisons: Vec<Comparison>,
}

impl Results {
    /// Writes them as JSON.
    pub fn write(&self, file: &Path) -> Result<()> {
        let text = serde_json::to_vec_pretty(self)?;
        fs::write(file, text).with_context(|| format!("writing {}", file.display()))
    }

    /// Reads what `write` wrote.
    pub fn read(file: &Path) -> Result<Results> {
        let text = fs::read(file).with_context(|| format!("reading {}", file.display()))?;
        serde_json::from_slice(&text).with_context(|| format!("{}: not results of the bench", file.display()))
    }
}
