//! `pageout swapon` and `pageout swapoff`: devices of a tree that runs.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{anyhow, bail, Result};
use pageout::api::{reason, Backing, Bytes, Spec};
use serde_json::json;

use crate::options::{SwapoffOptions, SwaponOptions};
use crate::runs::{self, Run, Switched};
use crate::say;

/// How long a device may stay as full as it is before the user is told.
const PATIENCE: Duration = Duration::from_secs(5);

/// Gives a tree another device.
pub fn on(options: &SwaponOptions) -> Result<i32> {
    let path = match Spec::parse(&options.spec)?.backing {
        Backing::Path(path) => absolute(path)?,
        Backing::Memory | Backing::Unnamed => String::new(),
    };
    let (run, _) = runs::one(options.which.run.as_deref())?;
    run.switch(false, &json!({ "spec": options.spec, "path": path }))?;
    wait(&run, &options.spec)
}

/// Takes a device from a tree; returns when it has gone. The tree keeps it if we end before.
pub fn off(options: &SwapoffOptions) -> Result<i32> {
    // As it was switched on, too: by a tag, or with a size.
    let path = match Spec::parse(&options.name) {
        Ok(Spec { backing: Backing::Path(path), .. }) => path,
        _ => PathBuf::from(&options.name),
    };
    // A name without a directory needs none: it may be that of memory.
    let needs_none = !options.name.is_empty() && path.components().count() == 1;
    let path = absolute(path).or_else(|error| if needs_none { Ok(String::new()) } else { Err(error) })?;
    let (run, _) = runs::one(options.which.run.as_deref())?;
    run.switch(true, &json!({ "name": options.name, "path": path }))?;
    wait(&run, &options.name)
}

/// `what`: as the user called it.
fn wait(run: &Run, what: &str) -> Result<i32> {
    loop {
        match run.switched()? {
            Switched::Done(warnings) => {
                warnings.lines().for_each(say::warning);
                return Ok(0);
            }
            Switched::UnderWay => watch(run, what)?,
            Switched::Refused(why) => bail!(why),
        }
    }
}

/// Returns when the run has something to say. Says so, once, when a device that is to go does not get emptier.
fn watch(run: &Run, what: &str) -> Result<()> {
    let (mut left, mut told, mut errors) = (u64::MAX, false, None);
    while !run.stirs_before(Instant::now() + PATIENCE)? {
        // By another connection: the answer on this one is not to be mixed up with the last word.
        let Ok((_, view)) = runs::one(Some(&run.pid.to_string())) else { continue };
        let (leaving, others): (Vec<_>, Vec<_>) = view.devices.iter().partition(|device| device.leaving);
        let before = std::mem::replace(&mut left, leaving.iter().map(|device| device.used_bytes).sum());
        let room: u64 =
            others.iter().map(|device| device.size_bytes - device.used_bytes.min(device.size_bytes)).sum();
        let errors_now = view.total("read_errors");
        let fails = errors.replace(errors_now).is_some_and(|errors| errors < errors_now);
        if left > 0 && left >= before && !told {
            told = true;
            let why = match (fails, room > left) {
                (true, _) => "it cannot be read now; mend it, or interrupt this to keep it on",
                (false, false) => "no room for it now; add a device (pageout swapon), or interrupt this",
                (false, true) => {
                    "its processes have not brought it home yet: continue one that is stopped, wait for one that has no \
                     time, add a device (pageout swapon), or interrupt this"
                }
            };
            say::warning(format_args!("{what}: {} left there and {why}", Bytes(left)));
        }
    }
    Ok(())
}

/// From the root on: the tree may work in another directory.
fn absolute(path: PathBuf) -> Result<String> {
    if path.as_os_str().is_empty() {
        bail!("no device is named; see pageout show");
    }
    let absolute = std::path::absolute(&path).map_err(|e| {
        anyhow!("{}: working directory: {}; name it from the root on", path.display(), reason(&e))
    })?;
    match absolute.into_os_string().into_string() {
        Ok(path) => Ok(path),
        Err(path) => bail!("{}: not UTF-8; name it by a path that is", PathBuf::from(path).display()),
    }
}
