//! Other pagers in user space, by benchmarks of their own: UMap's `pfbenchmark`, vmcache's random reads.
//!
//! Programs must be written for them, so what runs is theirs, set to the workload's size, threads and
//! time, in the same memory by their own settings, with their file in memory, as pageout's. What they
//! print is told under names of theirs: it is work of the same kind, not the same work.

use std::ffi::OsString;
use std::fmt;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{ensure, Context, Result};

use crate::engine::{own_dir, Setting};
use crate::janitor::{Made, Scope};
use crate::units::{Bytes, KB, PAGE};
use crate::work::{Report, Set, Work, WorkLine};

/// What a tuple of vmcache's random reads takes on its pages, measured as its `space:` over their number.
const BYTES_PER_TUPLE: u64 = 151;

/// A peer, and the directory with its built programs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Peer {
    /// `pfbenchmark-write` fills a mapping; `pfbenchmark-readmodifywrite` goes over all of its pages once,
    /// in order for `seq`, shuffled for `rand`, checks the first word of each and writes it.
    Umap(PathBuf),
    /// `vmcache` looks up random tuples of a B-tree, for `rand`; it does not check them.
    Vmcache(PathBuf),
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Peer::Umap(dir) => write!(f, "umap:{}", dir.display()),
            Peer::Vmcache(dir) => write!(f, "vmcache:{}", dir.display()),
        }
    }
}

impl Peer {
    /// The program that is timed.
    fn program(&self) -> PathBuf {
        match self {
            Peer::Umap(dir) => dir.join("pfbenchmark-readmodifywrite"),
            Peer::Vmcache(dir) => dir.join("vmcache"),
        }
    }

    /// The set of a workload that it has the like of, and for random accesses their time.
    fn like<'w>(&self, line: &'w WorkLine) -> Option<(&'w Set, Option<Duration>)> {
        match (self, line.work()) {
            (Peer::Umap(_), Work::Seq(seq)) => Some((&seq.set, None)),
            (_, Work::Rand(rand)) => Some((&rand.set, Some(rand.seconds))),
            _ => None,
        }
    }

    /// Why it cannot run `line`, if it cannot.
    pub fn lack(&self, line: &WorkLine, setting: &Setting) -> Option<String> {
        let Some((Set { size, .. }, _)) = self.like(line) else {
            return Some("its own benchmarks have nothing like this workload".into());
        };
        let program = self.program();
        if !program.exists() {
            return Some(format!(
                "{}: no such program; give the directory it was built in",
                program.display()
            ));
        }
        if matches!(self, Peer::Vmcache(_)) && setting.memory.0 % (1 << 30) != 0 {
            return Some("it takes whole GiB of memory; use --memory 1G".into());
        }
        (*size <= setting.memory).then(|| format!("{size} fit in the memory; it would measure nothing"))
    }

    /// The command for a workload that it does not lack.
    pub fn command(&self, scope: &Scope, line: &WorkLine, setting: &Setting) -> Result<Vec<OsString>> {
        let (set, time) = self.like(line).context("nothing like this workload")?;
        let file = own_dir(scope)?.join("file");
        scope.made(Made::File(file.clone()))?;
        let setting_of = |name: &str, value: u64| OsString::from(format!("{name}={value}"));
        let mut command: Vec<OsString> = vec!["env".into()];
        match self {
            Peer::Umap(dir) => {
                command.push("UMAP_LOG_LEVEL=ERROR".into());
                command.push(setting_of("UMAP_BUFSIZE", setting.memory.pages() as u64));
                let both = r#""$0/pfbenchmark-write" "$@" > /dev/null && exec "$0/pfbenchmark-readmodifywrite" --noinit "$@""#;
                command.extend(["sh".into(), "-c".into(), both.into(), dir.into()]);
                command.extend(["-p".into(), set.size.pages().to_string().into()]);
                command.extend(["-t".into(), set.threads.to_string().into(), "-f".into(), file.into()]);
                command.extend(time.map(|_| "--shuffle".into()));
            }
            Peer::Vmcache(_) => {
                File::create(&file).with_context(|| format!("making {}", file.display()))?;
                let gib = |bytes: Bytes| bytes.0.div_ceil(1 << 30);
                let seconds = time.map_or(1, |time| time.as_secs().max(1));
                command.push([OsString::from("BLOCK="), file.into()].into_iter().collect());
                command.push(setting_of("PHYSGB", gib(setting.memory)));
                command.push(setting_of("VIRTGB", 2 * gib(set.size)));
                command.push(setting_of("RNDREAD", 1));
                command.push(setting_of("DATASIZE", set.size.0 / BYTES_PER_TUPLE));
                command.push(setting_of("THREADS", set.threads));
                command.push(setting_of("RUNFOR", seconds));
                command.push(self.program().into());
            }
        }
        Ok(command)
    }

    /// What it printed, as figures.
    pub fn report(&self, output: &str) -> Result<Report> {
        let mut report = Report::default();
        // Lines of numbers and words with commas between.
        let numbers =
            |line: &str| line.split(',').map(|field| field.parse().ok()).collect::<Vec<Option<f64>>>();
        match self {
            Peer::Umap(_) => {
                let last = output.lines().rfind(|line| line.starts_with("umap,"));
                let nanoseconds = last.and_then(|line| *numbers(line).last()?).filter(|ns| *ns > 0.0);
                let rate = 1e9 / nanoseconds.context("it printed no time for a page")?;
                report.set("umap.pages_per_s", rate);
                report.set("umap.throughput", rate * PAGE as f64 / KB);
            }
            Peer::Vmcache(_) => {
                // A line each second: number, lookups, MiB read, MiB written, ...
                let seconds: Vec<[f64; 3]> = output
                    .lines()
                    .filter_map(|line| match numbers(line)[..] {
                        [Some(_), Some(lookups), Some(read), Some(written), ..] => {
                            Some([lookups, read, written])
                        }
                        _ => None,
                    })
                    .collect();
                let mean = |at: usize| seconds.iter().map(|s| s[at]).sum::<f64>() / seconds.len() as f64;
                ensure!(!seconds.is_empty() && mean(1) > 0.0, "it read nothing, so it measured nothing");
                report.set("vmcache.lookups_per_s", mean(0));
                report.set("swap.in", mean(1) * KB);
                report.set("swap.out", mean(2) * KB);
            }
        }
        Ok(report)
    }

    /// From what stands after the engine's name.
    pub fn parse(name: &str, dir: &str) -> Result<Peer, String> {
        let dir = Path::new(dir).to_owned();
        match name {
            _ if dir.as_os_str().is_empty() => {
                Err(format!("{name}: needs {name}:DIR, where its programs were built"))
            }
            "umap" => Ok(Peer::Umap(dir)),
            _ => Ok(Peer::Vmcache(dir)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_they_print() {
        let umap =
            Peer::Umap("/u".into()).report("umap,shuffle,write,2,2,9\numap,shuffle,rmw,2,2,50000\n").unwrap();
        assert_eq!(umap.metrics["umap.pages_per_s"], 20_000.0);
        assert_eq!(umap.metrics["umap.throughput"], 80_000.0);
        let lines = "ts,tx,rmb,wmb,system\n0,100,2,1,vmcache\n1,300,4,0,vmcache\n";
        let vmcache = Peer::Vmcache("/v".into()).report(lines).unwrap();
        assert_eq!((vmcache.metrics["vmcache.lookups_per_s"], vmcache.metrics["swap.in"]), (200.0, 3072.0));
        assert!(Peer::Umap("/u".into()).report("").is_err());
        assert!(Peer::Vmcache("/v".into()).report("0,100,0,0,vmcache\n").is_err(), "nothing was read");
    }
}
