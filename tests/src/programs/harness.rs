//! One program's test: natively, then under `pageout run`, then compared.

use super::process::{self, Ended};
use super::report::{self, Row};
use super::sample::{self, Peak, Watched};
use super::{compare, Invocation, Limit, Program, Size, MIB};
use anyhow::{anyhow, bail, ensure, Context, Result};
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// Resident memory may exceed the limit by the larger of a twentieth and this, with one thread touching
/// new memory.
const SLACK_BYTES: u64 = 64 * MIB;
/// The same with as many threads as CPUs.
const PARALLEL_SLACK_BYTES: u64 = 128 * MIB;
/// That is for moments, and more than what small programs have without a limit. For half of the time resident memory
/// may exceed it by the larger of an eighth and this.
const USUAL_SLACK_BYTES: u64 = 4 * MIB;

/// What all tests share: the command `pageout`, a directory on disk, the size.
pub struct Bench {
    pub(super) pageout: PathBuf,
    directory: PathBuf,
    pub(super) size: Size,
}

impl Bench {
    /// `directory` holds inputs and outputs and must not be on a tmpfs: swap files lie there too.
    ///
    /// The command is `$PAGEOUT_BIN`, else the one beside the test executable, brought up to date by
    /// cargo when cargo runs the tests.
    pub fn new(directory: &Path, size: Size) -> Result<Self> {
        process::adopt_orphans();
        Ok(Bench { pageout: find_pageout()?, directory: directory.to_owned(), size })
    }

    /// An empty directory for one test.
    pub(super) fn directory(&self, name: &str) -> Result<PathBuf> {
        let path = self.directory.join(name);
        if path.exists() {
            fs::remove_dir_all(&path)?;
        }
        fs::create_dir_all(&path).with_context(|| path.display().to_string())?;
        Ok(path)
    }

    /// The words before the command. Pages go to memory, so that the time of the small runs does not hang on a
    /// disk; to a file if it is asked for, and always at the full size.
    pub(super) fn wrapper(&self, limit_bytes: u64, stats: &Path, on_file: bool) -> Vec<OsString> {
        let memory = format!("{}M", limit_bytes.div_ceil(MIB));
        let mut words: Vec<OsString> =
            vec![self.pageout.clone().into(), "run".into(), "--memory".into(), memory.into()];
        if !on_file && self.size == Size::Small {
            words.extend(["--swap".into(), "mem".into()]);
        }
        words.extend(["--stats".into(), stats.into(), "--".into()]);
        words
    }
}

/// Why no program can be paged on this machine, if so.
pub fn unsupported() -> Option<String> {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let mut numbers =
        release.split(|c: char| !c.is_ascii_digit()).map(|word| word.parse::<u32>().unwrap_or(0));
    if (numbers.next(), numbers.next()) < (Some(6), Some(8)) {
        return Some(format!("Linux {} is older than 6.8", release.trim()));
    }
    let device = fs::OpenOptions::new().read(true).write(true).open("/dev/userfaultfd");
    let Err(error) = device else { return None };
    // SAFETY: a system call without pointers; the descriptor that it makes is closed at once.
    let descriptor = unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | libc::O_NONBLOCK) };
    if descriptor < 0 {
        return Some(format!("no userfaultfd: /dev/userfaultfd: {error}"));
    }
    // SAFETY: the descriptor is ours.
    unsafe { libc::close(descriptor as i32) };
    None
}

fn find_pageout() -> Result<PathBuf> {
    if let Some(path) = std::env::var_os("PAGEOUT_BIN") {
        return fs::canonicalize(&path).with_context(|| format!("PAGEOUT_BIN={}", path.to_string_lossy()));
    }
    let executable = std::env::current_exe()?;
    let profile = executable
        .parent()
        .and_then(Path::parent)
        .context("the test executable is not in a target directory")?;
    if let Some(cargo) = std::env::var_os("CARGO") {
        // `cargo test` builds a package's command only for tests of the same package.
        let mut build = Command::new(cargo);
        build.args(["build", "--quiet", "--package", "pageout-cli"]);
        if profile.file_name().is_some_and(|name| name == "release") {
            build.arg("--release");
        }
        let status = build.current_dir(env!("CARGO_MANIFEST_DIR")).status().context("cargo")?;
        ensure!(status.success(), "cargo build --package pageout-cli ended with {status}");
    }
    let path = profile.join("pageout");
    ensure!(path.exists(), "{}: not there; build pageout-cli or set PAGEOUT_BIN", path.display());
    Ok(path)
}

/// What one run did.
struct Run {
    ended: Ended,
    peak: Peak,
    /// What was resident for half of the time, at least.
    usual: u64,
    seconds: f64,
    /// What the driver saw.
    seen: Vec<u8>,
}

/// Why a run gave nothing to compare.
struct Unfinished {
    error: anyhow::Error,
    peak: Peak,
}

fn run(
    program: &Program,
    invocation: &Invocation,
    wrapper: &[OsString],
    dir: &Path,
    time_limit: Duration,
) -> Result<Run, Unfinished> {
    let start = Instant::now();
    let pid = match process::spawn(invocation, wrapper, dir) {
        Ok(pid) => pid,
        Err(error) => return Err(Unfinished { error, peak: Peak::default() }),
    };
    let (done, wait_done) = mpsc::channel();
    let (ended, seen, seconds, watched) = std::thread::scope(|scope| {
        let watcher = scope.spawn(move || sample::watch(&wait_done, time_limit, wrapper.is_empty()));
        let together = program.together.then(|| {
            let (done, wait_done) = mpsc::channel::<()>();
            (done, scope.spawn(move || sample::together(&wait_done)))
        });
        let seen = program.driver.as_ref().map_or(Ok(Vec::new()), |driver| driver(dir));
        if seen.is_err() {
            process::kill_all();
        }
        let ended = process::wait(pid);
        let seconds = start.elapsed().as_secs_f64();
        drop(done);
        let together = together.map(|(done, looker)| {
            drop(done);
            looker.join().unwrap_or_default()
        });
        let watched = watcher.join().map(|watched| match together {
            Some(peak) => Watched { peak, ..watched },
            None => watched,
        });
        (ended, seen, seconds, watched)
    });
    let left = process::sweep();
    let Ok(watched) = watched else {
        return Err(Unfinished { error: anyhow!("the watching thread panicked"), peak: Peak::default() });
    };
    let Watched { peak, usual, hung } = watched;
    let finish = || -> Result<Run> {
        if let Some(states) = hung {
            let path = dir.join("hang");
            fs::write(&path, &states)?;
            bail!(
                "not done after {:.0} s; its threads (also in {}):\n{states}",
                time_limit.as_secs_f64(),
                path.display()
            );
        }
        let ended = ended?;
        let errors =
            || String::from_utf8_lossy(&fs::read(dir.join("stderr")).unwrap_or_default()).into_owned();
        let seen = seen.with_context(|| {
            format!("the program ended with {}; it said: {}", ended.status, errors().trim())
        })?;
        ensure!(left == 0, "{left} processes were left running");
        program.verify.as_ref().map_or(Ok(()), |verify| verify(dir))?;
        Ok(Run { ended, peak, usual, seconds, seen })
    };
    finish().map_err(|error| Unfinished { error, peak })
}

/// Runs the program both ways and compares; the figures go to the report.
pub fn check(program: &Program, bench: &Bench) -> Result<()> {
    let home = bench.directory(program.name)?;
    let place = |name: &str| -> Result<PathBuf> {
        let path = home.join(name);
        fs::create_dir(&path)?;
        Ok(path)
    };
    let (input, plain_dir, paged_dir) = (place("input")?, place("plain")?, place("paged")?);
    (program.prepare)(&input).context("the input")?;
    let invocation = (program.command)(&input);

    let natural_limit = Duration::from_secs(bench.size.pick(120, 900));
    let plain = run(program, &invocation, &[], &plain_dir, natural_limit)
        .map_err(|unfinished| unfinished.error.context("the native run"))?;
    // Where a short run of several threads had one of them at work at a time, a quarter is less than the least that works.
    let limit_bytes = match program.limit {
        Limit::Quarter => plain.peak.anonymous / 4 + plain.peak.fixed,
        Limit::Tree(part) => plain.peak.anonymous / part + plain.peak.fixed,
        Limit::Fixed(bytes) => bytes,
    }
    .max(16 << 20);
    let mut row = Row {
        name: program.name,
        natural_bytes: plain.peak.anonymous,
        fixed_bytes: plain.peak.fixed,
        limit_bytes,
        natural_seconds: plain.seconds,
        paged_seconds: None,
        resident_bytes: 0,
        swapped_out: 0,
        verdict: "FAILED",
    };

    let stats_path = home.join("stats.json");
    let wrapper = bench.wrapper(limit_bytes, &stats_path, program.on_file);
    let times = bench.size.pick(20.0, 400.0);
    let time_limit = Duration::from_secs_f64((times * plain.seconds).max(120.0));
    let result = run(program, &invocation, &wrapper, &paged_dir, time_limit);
    row.resident_bytes = match &result {
        Ok(run) => run.peak.resident,
        Err(unfinished) => unfinished.peak.resident,
    };
    let verdict = result.map_err(|unfinished| unfinished.error).and_then(|paged| {
        row.paged_seconds = Some(paged.seconds);
        same(program, &plain, &paged, &plain_dir, &paged_dir)?;
        row.swapped_out = counter(&stats_path, "pswpout")?;
        ensure!(row.swapped_out > 0, "nothing was paged out (pswpout is 0)");
        let slack = if program.parallel { PARALLEL_SLACK_BYTES } else { SLACK_BYTES };
        let most = limit_bytes + slack.max(limit_bytes / 20);
        ensure!(
            row.resident_bytes <= most,
            "{}M were resident, over the limit of {}M and its slack",
            row.resident_bytes / MIB,
            limit_bytes / MIB
        );
        ensure!(
            paged.usual <= limit_bytes + USUAL_SLACK_BYTES.max(limit_bytes / 8),
            "{}M or more were resident for half of the time, over the limit of {}M",
            paged.usual / MIB,
            limit_bytes / MIB
        );
        Ok(())
    });
    if verdict.is_ok() {
        row.verdict = "ok";
        // What failed is left to be looked at.
        fs::remove_dir_all(&home)?;
    }
    report::add(row);
    verdict.with_context(|| format!("under {:?} in {}", wrapper, paged_dir.display()))
}

fn same(program: &Program, plain: &Run, paged: &Run, plain_dir: &Path, paged_dir: &Path) -> Result<()> {
    if plain.ended.status != paged.ended.status {
        let errors = String::from_utf8_lossy(&fs::read(paged_dir.join("stderr"))?).into_owned();
        bail!(
            "ended with {}, natively with {}; it said: {}",
            paged.ended.status,
            plain.ended.status,
            errors.trim()
        );
    }
    for stream in ["stderr", "stdout"] {
        compare::normalised(&plain_dir.join(stream), &paged_dir.join(stream), program.normalise)?;
    }
    compare::bytes("what the driver saw", 0, &plain.seen, &paged.seen)?;
    program.outputs.iter().try_for_each(|name| compare::files(&plain_dir.join(name), &paged_dir.join(name)))
}

/// A counter of the JSON that `--stats` wrote.
pub(super) fn counter(path: &Path, name: &str) -> Result<u64> {
    let text = fs::read_to_string(path).with_context(|| format!("{}: no counters", path.display()))?;
    let stats: serde_json::Value = serde_json::from_str(&text).with_context(|| path.display().to_string())?;
    stats[name].as_u64().with_context(|| format!("{}: no counter {name}", path.display()))
}
