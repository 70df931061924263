//! The processes that a program started, and what they are doing.
//!
//! A process belongs to the tree once it was seen as a child of one that does, also when its parent has
//! gone since. Only files of `/proc` are read that need neither the memory nor the locks of the process.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Write;
use std::fs::read_to_string;
use std::time::{Duration, Instant};

/// The kernel function in which a thread waits for userfaultfd to bring its page.
const WAITS_FOR_PAGE: &str = "handle_userfault";

/// A process is named by its number and the time it started: numbers are used again.
pub struct Tree {
    members: BTreeMap<u32, u64>,
    /// Threads seen waiting for a page, how often they had slept then, and since when.
    waiting: HashMap<(u32, u32), (u64, Instant)>,
}

struct Stat {
    parent: u32,
    state: char,
    started: u64,
}

fn stat(pid: u32) -> Option<Stat> {
    let text = read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name may hold anything, parentheses too.
    let mut words = text[text.rfind(')')? + 1..].split_whitespace();
    let state = words.next()?.chars().next()?;
    Some(Stat { state, parent: words.next()?.parse().ok()?, started: words.nth(17)?.parse().ok()? })
}

fn numbers_in(directory: &str) -> Vec<u32> {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}

impl Tree {
    /// The tree below a process that has just been started.
    pub fn new(root: u32) -> Self {
        let members = stat(root).map(|stat| (root, stat.started)).into_iter().collect();
        Tree { members, waiting: HashMap::new() }
    }

    /// Takes in the children of members, until there are no more.
    pub fn scan(&mut self) {
        let all: Vec<(u32, Stat)> =
            numbers_in("/proc").into_iter().filter_map(|pid| Some((pid, stat(pid)?))).collect();
        loop {
            let before = self.members.len();
            for (pid, stat) in &all {
                if self.members.contains_key(&stat.parent) {
                    self.members.entry(*pid).or_insert(stat.started);
                }
            }
            if self.members.len() == before {
                return;
            }
        }
    }

    fn living(&self) -> impl Iterator<Item = u32> + '_ {
        let lives = |pid: u32, started: u64| {
            stat(pid).is_some_and(|stat| stat.started == started && !matches!(stat.state, 'Z' | 'X'))
        };
        self.members.iter().filter(move |(pid, started)| lives(**pid, **started)).map(|(pid, _)| *pid)
    }

    /// Whether any member still runs.
    pub fn is_alive(&self) -> bool {
        self.living().next().is_some()
    }

    /// Names a thread that has been waiting for one and the same page for longer than `limit`.
    pub fn stuck(&mut self, limit: Duration) -> Option<String> {
        let mut waiting = HashMap::new();
        for pid in self.living() {
            for thread in numbers_in(&format!("/proc/{pid}/task")) {
                let wchan = read_to_string(format!("/proc/{pid}/task/{thread}/wchan")).unwrap_or_default();
                if !wchan.starts_with(WAITS_FOR_PAGE) {
                    continue;
                }
                let sleeps = sleeps(pid, thread);
                let since = match self.waiting.get(&(pid, thread)) {
                    Some((before, since)) if *before == sleeps => *since,
                    _ => Instant::now(),
                };
                waiting.insert((pid, thread), (sleeps, since));
            }
        }
        self.waiting = waiting;
        let ((pid, thread), _) = self.waiting.iter().find(|(_, (_, since))| since.elapsed() > limit)?;
        Some(format!("thread {thread} of process {pid} has waited for a page for more than {limit:.0?}"))
    }

    /// What every thread of the tree is doing, a few lines each.
    pub fn states(&self) -> String {
        let mut text = String::new();
        for pid in self.living() {
            for thread in numbers_in(&format!("/proc/{pid}/task")) {
                let read = |name: &str| {
                    let file = read_to_string(format!("/proc/{pid}/task/{thread}/{name}"));
                    file.unwrap_or_else(|error| error.to_string())
                };
                let _ = writeln!(text, "process {pid} thread {thread}: waits in {}", read("wchan"));
                let _ = writeln!(text, "  system call: {}", read("syscall").trim());
                let wanted = ["Name", "State", "PPid", "VmRSS", "SigBlk", "SigPnd", "ShdPnd", "voluntary"];
                for line in read("status").lines().filter(|line| wanted.iter().any(|w| line.starts_with(w))) {
                    let _ = writeln!(text, "  {line}");
                }
                for line in read("stack").lines() {
                    let _ = writeln!(text, "    {line}");
                }
            }
        }
        text
    }

    /// Kills every member.
    pub fn kill(&self) {
        for pid in self.living() {
            // SAFETY: has no conditions; the process was seen to be ours a moment ago.
            unsafe { libc::kill(pid as libc::pid_t, libc::SIGKILL) };
        }
    }
}

/// How often the thread has gone to sleep: it changes with each page it waits for.
fn sleeps(pid: u32, thread: u32) -> u64 {
    let status = read_to_string(format!("/proc/{pid}/task/{thread}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
    line.and_then(|value| value.trim().parse().ok()).unwrap_or(0)
}
