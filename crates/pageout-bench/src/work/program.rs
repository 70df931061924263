//! Any command line: timed from outside, its output left alone.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::process::Command;

use anyhow::{Context, Result};
use clap::Args;

use super::Report;

/// Options of `program`.
#[derive(Clone, Debug, Args)]
pub struct Program {
    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

impl Program {
    pub fn command(&self) -> Vec<OsString> {
        self.command.clone()
    }

    /// Becomes the program; an engine tells its time.
    pub fn run(&self) -> Result<Report> {
        let error = Command::new(&self.command[0]).args(&self.command[1..]).exec();
        Err(error).with_context(|| format!("starting {}", self.command[0].to_string_lossy()))
    }
}
