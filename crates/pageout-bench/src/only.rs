//! `--only`: a choice by parts of names; without one, all.

use anyhow::{ensure, Result};

/// Is the name among those that are wanted?
pub fn wants(only: &[String], name: &str) -> bool {
    only.is_empty() || only.iter().any(|part| name.contains(part.as_str()))
}

/// Refuses a choice that none of the names is among.
pub fn check(only: &[String], names: &[&str]) -> Result<()> {
    let is_any = names.iter().any(|name| wants(only, name));
    ensure!(is_any, "--only: nothing is called so; there are {}", names.join(", "));
    Ok(())
}
