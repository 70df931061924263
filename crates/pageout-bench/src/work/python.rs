//! The main-job program: Python's dictionaries and lists, built, walked and checked.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::process::Command;

use anyhow::{Context, Result};
use clap::Args;

use super::Report;
use crate::units::Bytes;

const SCRIPT: &str = include_str!("python.py");
/// What one entry of the script's table takes under CPython 3.11, measured as peak over count.
const BYTES_PER_ENTRY: u64 = 310;

/// Options of `python`.
#[derive(Clone, Debug, Args)]
pub struct Python {
    /// Memory that the program takes when it has all it wants, about
    #[arg(long, value_name = "SIZE", default_value = "740M")]
    pub size: Bytes,
    /// Times to walk through it
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    walks: u64,
    /// The interpreter
    #[arg(long, value_name = "PATH", default_value = "/usr/bin/python3")]
    python: String,
}

impl Python {
    pub fn command(&self) -> Vec<OsString> {
        let count = self.size.0 / BYTES_PER_ENTRY;
        let numbers = [count, self.walks].map(|number| number.to_string().into());
        [self.python.clone().into(), "-c".into(), SCRIPT.into()].into_iter().chain(numbers).collect()
    }

    /// Becomes the program; it prints the report itself.
    pub fn run(&self) -> Result<Report> {
        let command = self.command();
        let error = Command::new(&command[0]).args(&command[1..]).exec();
        Err(error).with_context(|| format!("starting {}", self.python))
    }
}
