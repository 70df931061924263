//! Engines: what gives a workload less memory than it wants. One run of a workload under one of them.
//!
//! The workload is a child in a process group of its own, started by way of `pageout-bench enter`,
//! which joins the cgroup and asks to die with the bench before it becomes the workload. Everything
//! else that a run needs is made within one `Scope` and gone when the run is over.

use std::ffi::OsString;
use std::fmt;
use std::io::Read;
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::str::FromStr;
use std::time::{Duration, Instant};

use anyhow::{anyhow, bail, ensure, Context, Result};
use serde::{Deserialize, Serialize};

use crate::cgroup::Cgroup;
use crate::counters::{self, Figures, Kernel};
use crate::janitor::{Made, Scope};
use crate::kswap::{self, Backing};
use crate::peer::Peer;
use crate::sample::{Sampler, Seen};
use crate::sys;
use crate::units::{Bytes, GIB, KB, PAGE};
use crate::work::{own_path, redis, Report, Work, WorkLine};

/// What gives the workload its memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Engine {
    /// All that it wants.
    None,
    /// A memory cgroup and the kernel's swap.
    Kernel(Backing),
    /// `pageout run`, where its swap is, and options passed on.
    Pageout(Store, Vec<String>),
    /// A region of the library with inline delivery, on its memory device.
    Inline,
    /// Another pager in user space, by its own benchmark.
    Peer(Peer),
}

/// Where pageout swaps to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Store {
    /// A file in `/dev/shm`.
    Ram,
    /// A file in the working directory.
    File,
    /// The block device given by `--device`.
    Device,
    /// pageout's own memory device.
    Mem,
}

impl FromStr for Engine {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, options) = text.split_once(':').unwrap_or((text, ""));
        if let "umap" | "vmcache" = name {
            return Peer::parse(name, options).map(Engine::Peer);
        }
        let options: Vec<String> = options.split_whitespace().map(str::to_owned).collect();
        let engine = match name {
            "none" => Engine::None,
            "kernel-zram" => Engine::Kernel(Backing::Zram),
            "kernel-ram" => Engine::Kernel(Backing::Ram),
            "kernel-file" => Engine::Kernel(Backing::File),
            "kernel-device" => Engine::Kernel(Backing::Device),
            "pageout" => return Ok(Engine::Pageout(Store::Ram, options)),
            "pageout-file" => return Ok(Engine::Pageout(Store::File, options)),
            "pageout-device" => return Ok(Engine::Pageout(Store::Device, options)),
            "pageout-mem" => return Ok(Engine::Pageout(Store::Mem, options)),
            "pageout-inline" => Engine::Inline,
            _ => {
                return Err(format!(
                    "{name}: not an engine; it is none, kernel-zram, kernel-ram, kernel-file, kernel-device, \
                     pageout, pageout-file, pageout-device or pageout-mem, these four with :OPTIONS of \
                     `pageout run`, pageout-inline, umap:DIR or vmcache:DIR"
                ))
            }
        };
        if options.is_empty() {
            Ok(engine)
        } else {
            Err(format!("{name}: takes no options; only pageout does"))
        }
    }
}

impl fmt::Display for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, options) = match self {
            Engine::None => ("none", &[][..]),
            Engine::Kernel(Backing::Zram) => ("kernel-zram", &[][..]),
            Engine::Kernel(Backing::Ram) => ("kernel-ram", &[][..]),
            Engine::Kernel(Backing::File) => ("kernel-file", &[][..]),
            Engine::Kernel(Backing::Device) => ("kernel-device", &[][..]),
            Engine::Pageout(Store::Ram, options) => ("pageout", &options[..]),
            Engine::Pageout(Store::File, options) => ("pageout-file", &options[..]),
            Engine::Pageout(Store::Device, options) => ("pageout-device", &options[..]),
            Engine::Pageout(Store::Mem, options) => ("pageout-mem", &options[..]),
            Engine::Inline => ("pageout-inline", &[][..]),
            Engine::Peer(peer) => return peer.fmt(f),
        };
        f.write_str(name)?;
        if options.is_empty() {
            return Ok(());
        }
        write!(f, ":{}", options.join(" "))
    }
}

impl Engine {
    /// Why this engine cannot run `line` here, if it cannot.
    pub fn lack(&self, line: &WorkLine, setting: &Setting) -> Option<String> {
        match self {
            Engine::Kernel(Backing::Device) | Engine::Pageout(Store::Device, _)
                if setting.device.is_none() =>
            {
                Some("which one? give --device PATH, of a block device made by mkswap".into())
            }
            Engine::Peer(peer) => peer.lack(line, setting),
            Engine::Kernel(_) if !sys::is_root() => Some("only root may set up kernel swap".into()),
            Engine::Inline if !matches!(line.work(), Work::Latency(_) | Work::Rand(_) | Work::Seq(_)) => {
                Some("only latency, rand and seq work on regions".into())
            }
            Engine::Pageout(..) if !setting.pageout.exists() => Some(format!(
                "{}: no such program; build it, or give --pageout PATH",
                setting.pageout.display()
            )),
            Engine::Pageout(..) => refused(&setting.pageout),
            _ => None,
        }
    }
}

/// Why `pageout` runs nothing here, in its own words: the kernel or its settings do not let this user.
fn refused(pageout: &Path) -> Option<String> {
    const FAILED: i32 = 125;
    let output = Command::new(pageout).args(["run", "--quiet", "--", "true"]).output();
    let output = match output {
        Ok(output) => output,
        Err(error) => return Some(format!("{}: {error}", pageout.display())),
    };
    (output.status.code() == Some(FAILED)).then(|| String::from_utf8_lossy(&output.stderr).trim().to_owned())
}

/// What is the same for all runs of a comparison.
#[derive(Clone, Debug)]
pub struct Setting {
    /// Resident memory that the workload may keep.
    pub memory: Bytes,
    /// Where swap files go.
    pub dir: PathBuf,
    /// The block device of the engines that swap to one.
    pub device: Option<PathBuf>,
    /// The `pageout` command.
    pub pageout: PathBuf,
    /// Swap space; without it, a quarter more than the workload's set.
    pub swap: Option<Bytes>,
    /// The longest that a run may take.
    pub time_limit: Duration,
    /// The workload is meant to fit: that nothing is swapped is no error.
    pub fits: bool,
    /// What a program prints goes to standard error, once it has ended.
    pub show: bool,
}

/// What one run found.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Record {
    /// Figures by name, the workload's, the kernel's or pageout's counters, and ratios of both.
    pub metrics: Figures,
    /// Figures in the order of rounds.
    pub series: std::collections::BTreeMap<String, Vec<f64>>,
    /// (nanoseconds, count).
    pub latency_ns: Vec<(u64, u64)>,
    /// (seconds, percent of anonymous memory in huge pages).
    pub huge_share: Vec<(f64, f64)>,
}

/// The kernel killed the workload for want of memory although swap was free: its reclaim gives up
/// now and then when all pages of a small cgroup are in use. Such a run may be made again.
#[derive(Clone, Copy, Debug)]
pub struct OomKilled;

impl fmt::Display for OomKilled {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("killed by the kernel for want of memory, with swap free")
    }
}

/// Runs `line` once under `engine`; everything made for it is gone afterwards.
pub fn run(engine: &Engine, line: &WorkLine, setting: &Setting) -> Result<Record> {
    let scope = Scope::new()?;
    let record =
        run_within(&scope, engine, line, setting).with_context(|| format!("{} under {engine}", line.text()));
    scope.finish()?;
    record
}

fn run_within(scope: &Scope, engine: &Engine, line: &WorkLine, setting: &Setting) -> Result<Record> {
    let swap = setting.swap.unwrap_or_else(|| match line.work().set() {
        Some(set) => Bytes(set.0 + (64 << 20)).scaled(1.25),
        None => setting.memory.scaled(8.0),
    });
    let stats = std::env::temp_dir().join(format!("pageout-bench.{}.stats", std::process::id()));
    let mut command: Vec<OsString> = vec!["enter".into()];
    let (mut cgroup, mut mm_stat) = (None, None);
    match engine {
        Engine::None | Engine::Inline => command.push("--".into()),
        Engine::Kernel(backing) => {
            mm_stat = kswap::make(scope, *backing, swap, setting)?.mm_stat();
            let group = Cgroup::new(scope, setting.memory)?;
            command.extend(["--cgroup".into(), group.dir().into(), "--".into()]);
            cgroup = Some(group);
        }
        Engine::Pageout(store, options) => {
            command.push("--".into());
            command.extend([setting.pageout.clone().into(), "run".into(), "--quiet".into()]);
            command.extend(["--memory".into(), format!("{}M", setting.memory.0 >> 20).into()]);
            command.extend(["--swap".into(), spec(scope, *store, swap, setting)?]);
            scope.made(Made::File(stats.clone()))?;
            command.extend(["--stats".into(), stats.clone().into()]);
            command.extend(options.iter().map(OsString::from));
            command.push("--".into());
        }
        Engine::Peer(_) => command.push("--".into()),
    }
    match engine {
        Engine::Peer(peer) => command.extend(peer.command(scope, line, setting)?),
        _ => command.extend(line.command()?),
    }
    if *engine == Engine::Inline {
        command.extend(["--inline".into(), format!("{}M", setting.memory.0 >> 20).into()]);
    }
    let before = Kernel::now();
    let ended = start_and_wait(scope, &command, engine, line, setting, mm_stat);
    // Also where only a descendant was killed, and the program ends as if nothing had been.
    if cgroup.as_ref().is_some_and(|group| group.oom_kills() > 0) {
        return Err(ended.err().unwrap_or_else(|| anyhow!("a process of it was killed")).context(OomKilled));
    }
    let outcome = ended?;
    let kernel = before.since();
    let mut metrics = match engine {
        Engine::Kernel(_) => kernel,
        // What the kernel swaps meanwhile is not this run's.
        Engine::None | Engine::Pageout(..) | Engine::Inline | Engine::Peer(_) => {
            let own = matches!(engine, Engine::Pageout(..)).then(|| counters::of_pageout(&stats));
            let mut figures = own.transpose()?.unwrap_or_default();
            for name in ["tlb_shootdowns", "kernel_threads_s"] {
                figures.insert(name.into(), kernel.get(name).copied().unwrap_or(0.0));
            }
            figures
        }
    };
    let swapped_out = metrics.get("pswpout").copied().unwrap_or(0.0);
    // A peer is not started on what fits.
    if matches!(engine, Engine::Kernel(_) | Engine::Pageout(..)) && !setting.fits && swapped_out < 1.0 {
        bail!("not one page was swapped out, so it measured nothing; use a larger set or less --memory");
    }
    if let Some(peak) = cgroup.and_then(|group| group.peak()) {
        metrics.insert("cgroup.peak_MiB".into(), peak / f64::from(1 << 20));
    }
    outcome.tell(&mut metrics);
    metrics.extend(outcome.report.metrics);
    Ok(Record {
        metrics,
        series: outcome.report.series,
        latency_ns: outcome.report.latency_ns,
        huge_share: outcome.seen.huge_share,
    })
}

/// A directory in memory for a swap file: others can write /dev/shm itself, where no swap file with a name
/// is accepted.
pub fn own_dir(scope: &Scope) -> Result<PathBuf> {
    let own = Path::new("/dev/shm").join(format!("pageout-bench.{}.swap", std::process::id()));
    scope.made(Made::Dir(own.clone()))?;
    std::fs::DirBuilder::new()
        .mode(0o700)
        .create(&own)
        .with_context(|| format!("making {}", own.display()))?;
    Ok(own)
}

/// The device for `pageout run --swap`.
fn spec(scope: &Scope, store: Store, swap: Bytes, setting: &Setting) -> Result<OsString> {
    let file = match store {
        Store::Mem => return Ok(format!("mem,size={}M", swap.0 >> 20).into()),
        Store::Device => return Ok(kswap::device(scope, setting)?.into()),
        Store::Ram => own_dir(scope)?.join("file"),
        Store::File => setting.dir.join(format!(".pageout-bench.{}.swap", std::process::id())),
    };
    scope.made(Made::File(file.clone()))?;
    let mut spec = file.into_os_string();
    spec.push(format!(",size={}M", swap.0 >> 20));
    Ok(spec)
}

struct Outcome {
    report: Report,
    ended: sys::Ended,
    elapsed: Duration,
    seen: Seen,
}

impl Outcome {
    /// Adds what was seen from outside, and ratios to what was swapped, to the counters.
    fn tell(&self, metrics: &mut Figures) {
        let swapped = |name: &str| metrics.get(name).map(|pages| pages * PAGE as f64);
        let (read, written) = (swapped("pswpin"), swapped("pswpout"));
        let elapsed = self.elapsed.as_secs_f64();
        let (user, system) = (self.ended.user.as_secs_f64(), self.ended.system.as_secs_f64());
        let threads = metrics.get("kernel_threads_s").copied().unwrap_or(0.0);
        let mut set = |name: &str, value: f64| metrics.insert(name.into(), value);
        set("time.elapsed_s", elapsed);
        set("time.user_s", user);
        set("time.system_s", system);
        set("time.cpu_s", user + system);
        if let (Some(read), Some(written)) = (read, written) {
            set("swap.in", read / KB / elapsed);
            set("swap.out", written / KB / elapsed);
        }
        let gib = (read.unwrap_or(0.0) + written.unwrap_or(0.0)) / GIB;
        if gib > 0.0 {
            set("cpu.user_s_per_GiB", user / gib);
            set("cpu.system_s_per_GiB", (system + threads) / gib);
            set("cpu.s_per_GiB", (user + system + threads) / gib);
        }
        set("resident.peak_MiB", self.seen.resident_peak / f64::from(1 << 20));
        if !self.seen.huge_share.is_empty() {
            let mut shares: Vec<f64> = self.seen.huge_share.iter().map(|sample| sample.1).collect();
            shares.sort_by(f64::total_cmp);
            set("anon.huge_%", shares[shares.len() / 2]);
        }
        if let Some(percent) = self.seen.compressed {
            set("zram.compressed_%", percent);
        }
    }
}

fn start_and_wait(
    scope: &Scope,
    command: &[OsString],
    engine: &Engine,
    line: &WorkLine,
    setting: &Setting,
    mm_stat: Option<PathBuf>,
) -> Result<Outcome> {
    let begun = Instant::now();
    let mut child = Command::new(own_path()?)
        .args(command)
        .process_group(0)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .context("starting the workload")?;
    let pid = child.id() as i32;
    scope.made(Made::Group(pid))?;
    if let Work::Redis(_) = line.work() {
        scope.made(Made::File(redis::Redis::socket()))?;
    }
    let mut stdout = child.stdout.take().context("the workload's output")?;
    let sampler = Sampler::start(pid, setting.time_limit, mm_stat);
    let (driven, ended, output) = std::thread::scope(|threads| {
        let output = threads.spawn(move || {
            let mut output = Vec::new();
            stdout.read_to_end(&mut output).map(|_| output)
        });
        let driven = match line.work() {
            Work::Redis(redis) => {
                let report = redis.drive();
                if report.is_err() {
                    let _ = sys::kill_group(pid);
                }
                Some(report)
            }
            _ => None,
        };
        (driven, sys::wait(pid), output.join().expect("reading does not panic"))
    });
    let elapsed = begun.elapsed();
    scope.gone(Made::Group(pid))?;
    let seen = sampler.finish();
    let (ended, output) = (ended.context("waiting for the workload")?, output.context("reading its output")?);
    ensure!(!seen.timed_out, "not done after {} s; use --time-limit", setting.time_limit.as_secs());
    let report = match (driven, engine, line.work()) {
        (Some(report), ..) => report?,
        (None, Engine::Peer(peer), _) => {
            ensure!(ended.code == 0, "its program ended with status {}; its message is above", ended.code);
            peer.report(&String::from_utf8_lossy(&output))?
        }
        (None, _, Work::Program(_)) => {
            if setting.show {
                eprint!("{}", String::from_utf8_lossy(&output));
            }
            ensure!(ended.code == 0, "it ended with status {}", ended.code);
            let mut report = Report::default();
            report.set("program.seconds", elapsed.as_secs_f64());
            report
        }
        _ => {
            ensure!(ended.code == 0, "it ended with status {}; its message is above", ended.code);
            serde_json::from_slice(&output).context("what the workload printed")?
        }
    };
    Ok(Outcome { report, ended, elapsed, seen })
}

/// `pageout-bench enter`: joins `cgroup`, ties itself to the bench's life, and becomes `command`.
pub fn enter(cgroup: Option<&Path>, command: &[OsString]) -> Result<()> {
    sys::die_with_parent().context("asking to die with the bench")?;
    if let Some(dir) = cgroup {
        let procs = dir.join("cgroup.procs");
        std::fs::write(&procs, "0").with_context(|| format!("entering {}", dir.display()))?;
    }
    let error = Command::new(&command[0]).args(&command[1..]).exec();
    Err(error).with_context(|| format!("starting {}", command[0].to_string_lossy()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn engines_go_both_ways() {
        for text in
            ["none", "kernel-zram", "kernel-ram", "kernel-file", "kernel-device", "pageout:--swapin never"]
        {
            assert_eq!(text.parse::<Engine>().unwrap().to_string(), text);
        }
        for text in [
            "pageout-file",
            "pageout-device",
            "pageout-mem",
            "pageout-inline",
            "umap:/built",
            "vmcache:/built",
        ] {
            assert_eq!(text.parse::<Engine>().unwrap().to_string(), text);
        }
        assert!("kernel-zram:--swapin never".parse::<Engine>().is_err());
        assert!("umap".parse::<Engine>().unwrap_err().contains("umap:DIR"));
        assert!("kernel".parse::<Engine>().unwrap_err().contains("kernel-zram"));
    }
}
