//! Real programs that fit in their memory, one after another: what it costs them that an engine looks on.
//!
//! Python builds and walks its tables, sort(1) orders lines, gzip(1) packs them and unpacks them again.
//! What comes out of each is checked. A program that is not installed is left out, and said.

use std::io::{ErrorKind, Write};
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{ensure, Context, Result};
use clap::Args;

use super::python::Python;
use super::Report;
use crate::dist::Rng;
use crate::units::Bytes;

/// Bytes of a line that is sorted.
const LINE: usize = 32;

/// Options of `overhead`.
#[derive(Clone, Debug, Args)]
pub struct Overhead {
    #[command(flatten)]
    pub python: Python,
    /// Bytes that sort and gzip get; sort takes some times as much memory
    #[arg(long, value_name = "SIZE", default_value = "32M")]
    pub text: Bytes,
    /// What the lines derive from
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
}

impl Overhead {
    pub fn run(&self) -> Result<Report> {
        let mut rng = Rng::new(self.seed);
        let lines: Vec<u8> = (0..self.text.len() / LINE)
            .flat_map(|_| format!("{:016x} {:014x}\n", rng.next(), rng.next() >> 8).into_bytes())
            .collect();
        let mut report = Report::default();
        let mut total = 0.0;
        let mut timed = |name: &str, command: &[String], input: &[u8]| -> Result<Option<Vec<u8>>> {
            let begun = Instant::now();
            let output = through(command, input)?;
            if output.is_some() {
                let seconds = begun.elapsed().as_secs_f64();
                total += seconds;
                report.set(&format!("overhead.{name}_s"), seconds);
            }
            Ok(output)
        };
        let words = |line: &str| line.split(' ').map(String::from).collect::<Vec<_>>();
        let python: Vec<String> =
            self.python.command().iter().map(|word| word.to_string_lossy().into_owned()).collect();
        timed("python", &python, &[])?;
        if let Some(sorted) = timed("sort", &words("env LC_ALL=C sort"), &lines)? {
            let sum = |text: &[u8]| text.iter().map(|byte| u64::from(*byte)).sum::<u64>();
            let ascending = sorted.chunks(LINE).is_sorted();
            ensure!(
                ascending && sorted.len() == lines.len() && sum(&sorted) == sum(&lines),
                "data error: sort"
            );
        }
        if let Some(packed) = timed("gzip", &words("gzip -c"), &lines)? {
            let unpacked = timed("gunzip", &words("gzip -dc"), &packed)?;
            ensure!(unpacked.as_ref() == Some(&lines), "data error: gzip");
        }
        ensure!(total > 0.0, "none of python3, sort and gzip is installed");
        report.set("overhead.seconds", total);
        Ok(report)
    }
}

/// What `command` makes of `input`; `None` when there is no such program.
fn through(command: &[String], input: &[u8]) -> Result<Option<Vec<u8>>> {
    let mut child = match Command::new(&command[0])
        .args(&command[1..])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
    {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            eprintln!("pageout-bench: left out {}: not installed", command[0]);
            return Ok(None);
        }
        child => child.with_context(|| format!("starting {}", command[0]))?,
    };
    let mut stdin = child.stdin.take().context("its input")?;
    let output = std::thread::scope(|scope| {
        // Python reads nothing and may be gone by then.
        scope.spawn(move || stdin.write_all(input));
        child.wait_with_output()
    });
    let output = output.with_context(|| format!("waiting for {}", command[0]))?;
    ensure!(output.status.success(), "{} ended with {}", command[0], output.status);
    Ok(Some(output.stdout))
}
