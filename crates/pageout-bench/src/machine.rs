//! What the figures were made on: kernel, CPUs, memory, storage and its raw speed.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use crate::dist::Rng;
use crate::janitor::{Made, Scope};
use crate::mem::{Map, Pages};
use crate::pattern::Pattern;
use crate::units::{Bytes, HUGE};

/// Bytes of the file that the raw speed is measured on.
const RAW_FILE: usize = 256 << 20;

/// MB/s of 2 MiB pieces with direct I/O, two threads, from ordinary memory as fio does it.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct RawSpeed {
    /// Writes alone.
    pub write: f64,
    /// Reads alone.
    pub read: f64,
    /// Half of each, both together.
    pub mixed: f64,
    /// The same from huge pages: contiguous memory goes to a device in fewer pieces.
    pub mixed_huge: f64,
}

/// The machine.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Machine {
    /// Release of the kernel.
    pub kernel: String,
    /// Model and number of the CPUs.
    pub cpus: String,
    /// All memory, as people write it.
    pub memory: String,
    /// Settings of transparent huge pages.
    pub huge_pages: String,
    /// File system of the working directory.
    pub storage: String,
    /// What that storage does, when it was measured.
    pub raw: Option<RawSpeed>,
}

/// What the kernel says could be used without swapping.
pub fn available_memory() -> Result<Bytes> {
    meminfo("MemAvailable:")
}

fn meminfo(field: &str) -> Result<Bytes> {
    let text = fs::read_to_string("/proc/meminfo").context("/proc/meminfo")?;
    let line = text.lines().find(|line| line.starts_with(field));
    let kilobytes = line.and_then(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok());
    Ok(Bytes(kilobytes.with_context(|| format!("/proc/meminfo has no {field}"))? * 1024))
}

impl Machine {
    /// Describes this one; `dir` is where swap files go.
    pub fn describe(dir: &Path) -> Result<Machine> {
        let text = |path: &str| fs::read_to_string(path).unwrap_or_default().trim().to_owned();
        let cpuinfo = text("/proc/cpuinfo");
        let model = cpuinfo
            .lines()
            .find_map(|line| line.strip_prefix("model name").and_then(|rest| rest.split_once(": ")))
            .map_or("unknown CPU", |(_, model)| model);
        let count = std::thread::available_parallelism().map_or(1, |n| n.get());
        Ok(Machine {
            kernel: text("/proc/sys/kernel/osrelease"),
            cpus: format!("{count} x {model}"),
            memory: meminfo("MemTotal:")?.to_string(),
            huge_pages: text("/sys/kernel/mm/transparent_hugepage/enabled"),
            storage: storage_of(dir)?,
            raw: None,
        })
    }

    /// Measures the storage under `dir` as well, some seconds long.
    pub fn measure(&mut self, dir: &Path) -> Result<()> {
        self.raw = Some(raw_speed(dir)?);
        Ok(())
    }

    /// As lines for people.
    pub fn lines(&self) -> Vec<String> {
        let mut lines = vec![
            format!("kernel {} · {} · {} of memory", self.kernel, self.cpus, self.memory),
            format!("transparent huge pages: {} · storage: {}", self.huge_pages, self.storage),
        ];
        if let Some(raw) = self.raw {
            lines.push(format!(
                "storage at 2 MiB, direct: write {:.0}, read {:.0}, half and half {:.0} MB/s; from huge pages {:.0}",
                raw.write, raw.read, raw.mixed, raw.mixed_huge
            ));
        }
        lines
    }
}

/// The file system and device that `dir` is on.
fn storage_of(dir: &Path) -> Result<String> {
    let dir = dir.canonicalize().with_context(|| dir.display().to_string())?;
    let mounts = fs::read_to_string("/proc/self/mounts").context("/proc/self/mounts")?;
    let mounted = mounts.lines().filter_map(|line| {
        let fields: Vec<&str> = line.split(' ').collect();
        let &[device, at, kind, ..] = &fields[..] else { return None };
        dir.starts_with(at).then(|| (at.len(), format!("{kind} on {device}")))
    });
    Ok(mounted.max().map_or_else(|| "unknown".into(), |(_, text)| text))
}

/// Measures the storage under `dir`: 2 MiB at a time at random places of a file, two threads.
fn raw_speed(dir: &Path) -> Result<RawSpeed> {
    let scope = Scope::new()?;
    let path = dir.join(format!(".pageout-bench.{}.raw", std::process::id()));
    scope.made(Made::File(path.clone()))?;
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create_new(true)
        .mode(0o600)
        .custom_flags(libc::O_DIRECT)
        .open(&path)
        .with_context(|| format!("making {}, for direct I/O", path.display()))?;
    let pattern = Pattern::new(1, 0, 1);
    let (mut small, mut huge) = (Map::new(2 * HUGE, Pages::Small)?, Map::new(2 * HUGE, Pages::Huge)?);
    pattern.write(small.words_mut(), 0, None)?;
    pattern.write(huge.words_mut(), 0, None)?;
    for at in (0..RAW_FILE).step_by(HUGE) {
        let piece = &huge.bytes_mut()[..HUGE];
        file.write_all_at(piece, at as u64).with_context(|| format!("writing to {}", path.display()))?;
    }
    file.sync_all()?;
    // Long enough that what a throttled disk grants in bursts does not count.
    let speed = RawSpeed {
        write: pieces(&file, &mut small, 0, 2)?,
        read: pieces(&file, &mut small, 2, 2)?,
        mixed: pieces(&file, &mut small, 1, 4)?,
        mixed_huge: pieces(&file, &mut huge, 1, 4)?,
    };
    drop(file);
    scope.finish()?;
    Ok(speed)
}

/// MB/s of 2 MiB pieces at random places of `file`, two threads, `reads` of two being reads.
fn pieces(file: &File, memory: &mut Map, reads: u64, seconds: u64) -> Result<f64> {
    let time = Duration::from_secs(seconds);
    let begun = Instant::now();
    let moved: u64 = std::thread::scope(|scope| {
        let tasks: Vec<_> = memory
            .bytes_mut()
            .chunks_exact_mut(HUGE)
            .zip(1..)
            .map(|(buffer, seed)| {
                scope.spawn(move || -> Result<u64> {
                    let (mut rng, mut moved) = (Rng::new(seed), 0u64);
                    while begun.elapsed() < time {
                        let at = rng.below((RAW_FILE / HUGE) as u64) * HUGE as u64;
                        if rng.below(2) < reads {
                            file.read_exact_at(buffer, at)?;
                        } else {
                            file.write_all_at(buffer, at)?;
                        }
                        moved += HUGE as u64;
                    }
                    Ok(moved)
                })
            })
            .collect();
        tasks.into_iter().map(|task| task.join().expect("I/O does not panic")).sum::<Result<u64>>()
    })?;
    Ok(moved as f64 / 1e6 / begun.elapsed().as_secs_f64())
}
