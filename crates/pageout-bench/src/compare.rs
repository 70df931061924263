//! Comparison: each engine runs the workload in turn, round after round, the order turned around each
//! time, so that what drifts (heat, caches, other tenants) meets all alike.

use std::fmt::Write as _;
use std::fs;
use std::io::{IsTerminal, Write as _};
use std::path::Path;

use anyhow::{ensure, Context, Result};
use serde::{Deserialize, Serialize};

use crate::engine::{self, Engine, OomKilled, Record, Setting};
use crate::ladder;
use crate::machine::Machine;
use crate::slots;
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

    /// `changed` over `base`, of each round's pair: one went right after the other, so what makes the machine slow for a while
    /// is in both.
    pub fn paired(&self, changed: &str, base: &str, metric: &str) -> Option<f64> {
        let values = |engine| {
            let runs = self.runs.iter().find(|runs| runs.engine == engine)?;
            Some(runs.rounds.iter().map(move |record| record.metrics.get(metric).copied()))
        };
        let pairs = values(changed)?.zip(values(base)?);
        Some(table::summary(pairs.filter_map(|(changed, base)| Some(changed? / base?)).collect())?.median)
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

/// Runs `line` under all of `engines`, `rounds` times each. Engines that cannot run here, and those under
/// which the kernel kills the workload again and again, are left out, and said; an error when none is
/// left, or when any run fails.
pub fn compare(line: &WorkLine, engines: &[Engine], rounds: usize, setting: &Setting) -> Result<Comparison> {
    let mut left_out = Vec::new();
    let mut leave_out = |why: String| {
        eprintln!("pageout-bench: left out {why}");
        left_out.push(why);
    };
    let mut able: Vec<(&Engine, Vec<Record>)> = Vec::new();
    for engine in engines {
        match engine.lack(line, setting) {
            Some(lack) => leave_out(format!("{engine}: {lack}")),
            None => able.push((engine, Vec::new())),
        }
    }
    ensure!(!able.is_empty(), "no engine of those asked for can run here; see above");
    let mut given_up = vec![false; able.len()];
    let total = rounds * able.len();
    for round in 0..rounds {
        for turn in 0..able.len() {
            let at = if round % 2 == 1 { able.len() - 1 - turn } else { turn };
            if given_up[at] {
                continue;
            }
            let (engine, records) = &mut able[at];
            progress(round * given_up.len() + turn, total, &format!("{} under {engine}", line.text()));
            let run = || engine::run(engine, line, setting);
            match again_when_killed(run, engine, &mut leave_out)? {
                Some(record) => records.push(record),
                None => given_up[at] = true,
            }
        }
    }
    progress(total, total, "");
    let names: Vec<String> = able.iter().map(|(engine, _)| engine.to_string()).collect();
    let runs = able.into_iter().map(|(engine, rounds)| Runs { engine: engine.to_string(), rounds });
    let runs: Vec<Runs> = runs.filter(|runs| !runs.rounds.is_empty()).collect();
    ensure!(!runs.is_empty(), "{}: no run came to an end; see above", line.text());
    Ok(Comparison {
        id: line.work().name().into(),
        work: line.text(),
        memory: setting.memory.to_string(),
        command: format!(
            "pageout-bench compare --engines '{}' --rounds {rounds} --memory {} {}{}",
            names.join(","),
            setting.memory,
            if setting.fits { "--fits " } else { "" },
            line.text()
        ),
        runs,
        left_out,
    })
}

/// One run, and one more when the kernel killed the workload; `None` when it did so again.
fn again_when_killed(
    mut run: impl FnMut() -> Result<Record>,
    engine: &Engine,
    leave_out: &mut impl FnMut(String),
) -> Result<Option<Record>> {
    for then in ["made again", "and again; this engine's other rounds are not made"] {
        match run() {
            Err(error) if error.is::<OomKilled>() => {
                leave_out(format!("a run under {engine}: {OomKilled}; {then}"));
            }
            result => return result.map(Some),
        }
    }
    Ok(None)
}

/// A bar on a terminal, overwritten by the next, gone with the last; nothing elsewhere.
fn progress(done: usize, total: usize, text: &str) {
    const WIDTH: usize = 20;
    let mut stderr = std::io::stderr();
    if stderr.is_terminal() {
        let full = done * WIDTH / total.max(1);
        let bar = format!("[{}{}] {done}/{total} ", "#".repeat(full), "-".repeat(WIDTH - full));
        let text: String = text.chars().take(72).collect();
        let line = if done < total { bar + &text } else { String::new() };
        let _ = write!(stderr, "\r\x1b[K{line}");
        let _ = stderr.flush();
    }
}

/// What a command leaves for other programs, and for `report`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Results {
    pub machine: Machine,
    pub comparisons: Vec<Comparison>,
    /// The command that made all of it.
    pub command: String,
    /// Comparisons that came to no end, and why.
    #[serde(default)]
    pub failed: Vec<String>,
    /// What `slots`, `ladder` and `frag` print, when they were run.
    #[serde(default)]
    pub slots: Vec<slots::Row>,
    #[serde(default)]
    pub ladder: Vec<ladder::Row>,
    #[serde(default)]
    pub frag: Vec<(f64, f64)>,
}

impl Results {
    /// Of comparisons alone.
    pub fn new(machine: Machine, comparisons: Vec<Comparison>) -> Results {
        let own: Vec<String> = std::env::args().skip(1).collect();
        let command = format!("pageout-bench {}", own.join(" "));
        let (failed, slots, ladder, frag) = Default::default();
        Results { machine, comparisons, command, failed, slots, ladder, frag }
    }

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_killed_are_tried_twice() {
        let tries = |fail: usize| {
            let (mut runs, mut told) = (0, Vec::new());
            let run = || {
                runs += 1;
                if runs > fail {
                    Ok(Record::default())
                } else {
                    Err(anyhow::anyhow!("137").context(OomKilled))
                }
            };
            let record = again_when_killed(run, &Engine::None, &mut |why| told.push(why)).unwrap();
            (runs, record.is_some(), told.len())
        };
        assert_eq!([tries(0), tries(1), tries(9)], [(1, true, 0), (2, true, 1), (2, false, 2)]);
        let other = again_when_killed(|| Err(anyhow::anyhow!("data error")), &Engine::None, &mut |_| ());
        assert!(other.is_err(), "other failures are not smoothed over");
    }
}
