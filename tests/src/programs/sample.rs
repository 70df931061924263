//! What a run keeps in memory, looked at every 20 ms by a thread of the test process, which also
//! ends the run when its time is up.
//!
//! Figures are those of the largest process at each look; of trees, the sum of all ([`together`]).
//! `RssAnon` of `status` costs next to nothing; `smaps`, which walks the page tables under the map
//! lock, is read only when the anonymous memory of a native run has grown by a twentieth.

use super::process::{self, Pid};
use std::collections::HashMap;
use std::fs;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

const INTERVAL: Duration = Duration::from_millis(20);
const TOGETHER_INTERVAL: Duration = Duration::from_millis(200);
/// From killing what hangs to giving up on the whole test.
const UNKILLABLE: Duration = Duration::from_secs(60);

/// Peaks over a run, in bytes.
#[derive(Clone, Copy, Default)]
pub(super) struct Peak {
    /// Anonymous memory.
    pub(super) anonymous: u64,
    /// Memory that pageout cannot move: files, shared memory, stacks, code, locked pages.
    pub(super) fixed: u64,
    /// Everything resident.
    pub(super) resident: u64,
}

/// What the watching thread saw.
pub(super) struct Watched {
    pub(super) peak: Peak,
    /// What was resident at half of the looks, at least: the median.
    pub(super) usual: u64,
    /// The state of all threads when the time was up.
    pub(super) hung: Option<String>,
}

/// Looks until `done` says or closes; kills the run after `time_limit`. `thorough` also reads `smaps`.
pub(super) fn watch(done: &Receiver<()>, time_limit: Duration, thorough: bool) -> Watched {
    let start = Instant::now();
    let mut sampler = Sampler { thorough, ..Sampler::default() };
    let mut hung: Option<String> = None;
    loop {
        sampler.look();
        match done.recv_timeout(INTERVAL) {
            Err(RecvTimeoutError::Timeout) => {}
            _ => return Watched { peak: sampler.peak, usual: median(sampler.resident), hung },
        }
        if hung.is_none() && start.elapsed() > time_limit {
            hung = Some(process::dump());
            process::kill_all();
        }
        if start.elapsed() > time_limit + UNKILLABLE {
            eprintln!("the run does not die; its threads:\n{}", process::dump());
            std::process::exit(3);
        }
    }
}

/// Looks every 200 ms at what all processes have together, shared pages counted once (Pss). A thread of its own:
/// `smaps_rollup` waits for the map lock.
pub(super) fn together(done: &Receiver<()>) -> Peak {
    let mut peak = Peak::default();
    while let Err(RecvTimeoutError::Timeout) = done.recv_timeout(TOGETHER_INTERVAL) {
        let (mut anonymous, mut all) = (0, 0);
        for pid in process::descendants() {
            // A keeper's memory is its program's.
            let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
            if name.trim_end() == "pageout" {
                continue;
            }
            let text = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap_or_default();
            let field = |name: &str| text.lines().find_map(|line| kibibytes(line, name)).unwrap_or(0);
            anonymous += field("Pss_Anon:");
            all += field("Pss:");
        }
        peak.anonymous = peak.anonymous.max(anonymous);
        peak.fixed = peak.fixed.max(all - anonymous);
        peak.resident = peak.resident.max(all);
    }
    peak
}

fn median(mut values: Vec<u64>) -> u64 {
    values.sort_unstable();
    values[values.len() / 2]
}

#[derive(Default)]
struct Sampler {
    thorough: bool,
    peak: Peak,
    /// Per process: anonymous memory when its `smaps` was last read.
    seen: HashMap<Pid, u64>,
    /// Of each look, what the largest process had.
    resident: Vec<u64>,
    tree: Vec<Pid>,
}

impl Sampler {
    fn look(&mut self) {
        // The tree changes rarely; finding it costs more than looking at it.
        if self.tree.is_empty() || self.resident.len() & 3 == 0 {
            self.tree = process::descendants();
        }
        let mut resident = 0;
        for pid in std::mem::take(&mut self.tree) {
            if let Some(rss) = Rss::of(pid) {
                resident = resident.max(rss.anonymous + rss.shared);
                self.note(pid, rss);
                self.tree.push(pid);
            }
        }
        self.peak.resident = self.peak.resident.max(resident);
        self.resident.push(resident);
    }

    fn note(&mut self, pid: Pid, rss: Rss) {
        let peak = &mut self.peak;
        peak.anonymous = peak.anonymous.max(rss.anonymous);
        peak.fixed = peak.fixed.max(rss.shared);
        if !self.thorough {
            return;
        }
        let seen = self.seen.entry(pid).or_default();
        if rss.anonymous > *seen + *seen / 20 + (1 << 20) {
            *seen = rss.anonymous;
            let text = fs::read_to_string(format!("/proc/{pid}/smaps")).unwrap_or_default();
            peak.fixed = peak.fixed.max(rss.shared + unadoptable(&text));
        }
    }
}

struct Rss {
    anonymous: u64,
    /// Files and shared memory.
    shared: u64,
}

impl Rss {
    fn of(pid: Pid) -> Option<Self> {
        let text = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
        let field = |name: &str| text.lines().find_map(|line| kibibytes(line, name)).unwrap_or(0);
        Some(Rss { anonymous: field("RssAnon:"), shared: field("RssFile:") + field("RssShmem:") })
    }
}

fn kibibytes(line: &str, name: &str) -> Option<u64> {
    Some(line.strip_prefix(name)?.split_whitespace().next()?.parse::<u64>().ok()? * 1024)
}

/// Bytes of anonymous memory in areas that are not adopted: copies of file pages, stacks, executable
/// and locked areas.
fn unadoptable(smaps: &str) -> u64 {
    let (mut sum, mut anonymous, mut adoptable) = (0, 0, true);
    // The area before, when it was one that nobody may touch: a small one guards a thread's stack.
    let mut guard_end = 0;
    for line in smaps.lines() {
        if let Some(area) = Area::parse(line) {
            adoptable = area.private && !area.executable && !area.named && area.start != guard_end;
            guard_end = if area.guard { area.end } else { 0 };
        } else if let Some(bytes) = kibibytes(line, "Anonymous:") {
            anonymous = bytes;
        } else if let Some(flags) = line.strip_prefix("VmFlags:") {
            if !adoptable || flags.split_whitespace().any(|flag| flag == "lo") {
                sum += anonymous;
            }
        }
    }
    sum
}

struct Area {
    start: u64,
    end: u64,
    private: bool,
    executable: bool,
    /// Of a file, or a stack.
    named: bool,
    guard: bool,
}

impl Area {
    fn parse(line: &str) -> Option<Self> {
        let mut words = line.split_whitespace();
        let (start, end) = words.next()?.split_once('-')?;
        let (start, end) = (u64::from_str_radix(start, 16).ok()?, u64::from_str_radix(end, 16).ok()?);
        let rights = words.next()?.as_bytes();
        let name = words.nth(3).unwrap_or_default();
        Some(Area {
            start,
            end,
            private: rights.get(3) == Some(&b'p'),
            executable: rights.get(2) == Some(&b'x'),
            named: !name.is_empty() && name != "[heap]" && !name.starts_with("[anon"),
            guard: rights.starts_with(b"---") && end - start <= 16384,
        })
    }
}
