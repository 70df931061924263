//! Looks at a running process tree from outside: resident memory, the share of it in huge pages.
//!
//! A thread of its own; it also ends the tree when its time is up. `smaps_rollup` walks the page
//! tables of the process, so it is read less often than the cheap resident size.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::sys;
use crate::units::PAGE;

const RESIDENT_EVERY: Duration = Duration::from_millis(10);
const HUGE_EVERY: Duration = Duration::from_millis(250);

/// What was seen.
#[derive(Clone, Debug, Default)]
pub struct Seen {
    /// The most resident bytes of the whole tree.
    pub resident_peak: f64,
    /// (seconds since the start, percent of anonymous memory in huge pages).
    pub huge_share: Vec<(f64, f64)>,
    /// What the contents of the zram device shrank to at their fullest, in percent.
    pub compressed: Option<f64>,
    /// Whether the time was up.
    pub timed_out: bool,
}

/// A sampler at work.
pub struct Sampler {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Seen>,
}

impl Sampler {
    /// Starts looking at the tree below `pid`, the leader of a process group, for `limit` at most, and
    /// at the `mm_stat` of a zram device where one is given.
    pub fn start(pid: i32, limit: Duration, mm_stat: Option<PathBuf>) -> Sampler {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let thread = std::thread::spawn(move || look(pid, limit, mm_stat.as_deref(), &stopped));
        Sampler { stop, thread }
    }

    /// Ends it and gives what it saw.
    pub fn finish(self) -> Seen {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().expect("the sampler does not panic")
    }
}

fn look(pid: i32, limit: Duration, mm_stat: Option<&Path>, stop: &AtomicBool) -> Seen {
    let begun = Instant::now();
    let mut seen = Seen::default();
    let mut fullest = 0.0;
    let mut huge_next = HUGE_EVERY;
    while !stop.load(Ordering::Relaxed) {
        let tree = descendants(pid);
        let resident: f64 = tree.iter().filter_map(|pid| resident(*pid)).sum();
        seen.resident_peak = seen.resident_peak.max(resident);
        if begun.elapsed() >= huge_next {
            let (mut huge, mut anonymous) = (0.0, 0.0);
            for (h, a) in tree.iter().filter_map(|pid| huge_and_anonymous(*pid)) {
                huge += h;
                anonymous += a;
            }
            if anonymous > 0.0 {
                seen.huge_share.push((begun.elapsed().as_secs_f64(), 100.0 * huge / anonymous));
            }
            if let Some((data, percent)) = mm_stat.and_then(compressed) {
                if data > fullest {
                    (fullest, seen.compressed) = (data, Some(percent));
                }
            }
            huge_next = begun.elapsed() + HUGE_EVERY;
        }
        if begun.elapsed() > limit && !seen.timed_out {
            seen.timed_out = true;
            let _ = sys::kill_group(pid);
        }
        std::thread::sleep(RESIDENT_EVERY);
    }
    seen
}

/// `pid` and the processes below it; of those that share one memory, as a helper of an engine's may, the first.
fn descendants(pid: i32) -> Vec<i32> {
    let mut tree = vec![pid];
    let mut next = 0;
    while next < tree.len() {
        let parent = tree[next];
        let threads = fs::read_dir(format!("/proc/{parent}/task")).into_iter().flatten().flatten();
        for thread in threads {
            let children = fs::read_to_string(thread.path().join("children")).unwrap_or_default();
            tree.extend(children.split_whitespace().filter_map(|child| child.parse::<i32>().ok()));
        }
        next += 1;
    }
    let mut counted: Vec<i32> = Vec::with_capacity(tree.len());
    for pid in tree {
        if !counted.iter().any(|other| sys::share_memory(*other, pid)) {
            counted.push(pid);
        }
    }
    counted
}

/// Resident bytes.
fn resident(pid: i32) -> Option<f64> {
    let statm = fs::read_to_string(format!("/proc/{pid}/statm")).ok()?;
    let pages: f64 = statm.split(' ').nth(1)?.parse().ok()?;
    Some(pages * PAGE as f64)
}

/// Kilobytes of anonymous memory in huge pages, and of anonymous memory.
fn huge_and_anonymous(pid: i32) -> Option<(f64, f64)> {
    let text = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).ok()?;
    let field = |name: &str| -> Option<f64> {
        let line = text.lines().find(|line| line.starts_with(name))?;
        line.split_whitespace().nth(1)?.parse().ok()
    };
    Some((field("AnonHugePages:")?, field("Anonymous:")?))
}

/// Bytes in a zram device, and what they shrank to in percent.
fn compressed(mm_stat: &Path) -> Option<(f64, f64)> {
    let text = fs::read_to_string(mm_stat).ok()?;
    let mut fields = text.split_whitespace().map_while(|field| field.parse::<f64>().ok());
    let (data, compressed) = (fields.next()?, fields.next()?);
    (data > 0.0).then(|| (data, 100.0 * compressed / data))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sees_itself() {
        let own = std::process::id() as i32;
        assert!(resident(own).unwrap() > 100_000.0);
        assert!(huge_and_anonymous(own).unwrap().1 > 0.0);
        assert_eq!(descendants(own)[0], own);
    }
}
