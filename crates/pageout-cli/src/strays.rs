//! Descendants that run without the agent: said once for each program, or killed with `--strict`.
//!
//! The agent says hello before `main`, and a fork's child before it goes on. So a process that looks at /proc find
//! without a connection for a second has none to come; unless the machine is so busy that its keeper, which is there,
//! had no time to say it; or it is stopped, or another `pageout run` limits it.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::program;
use crate::say;
use crate::sys::{self, PidFd};
use crate::tree::{self, Process};

/// Between two looks, at first and with `--strict` always.
const SHORTEST: Duration = Duration::from_millis(200);
/// How long a process may take to say hello.
const PATIENCE: Duration = Duration::from_secs(1);
/// Between two looks in the end: a look reads all of /proc.
const LONGEST: Duration = Duration::from_secs(5);

/// What was seen of them.
#[derive(Debug)]
pub struct Strays {
    strict: bool,
    interval: Duration,
    next: Instant,
    /// Without a connection at the last look, number and start, and since when.
    suspects: HashMap<(i32, u64), Instant>,
    /// Programs that were told of.
    told: HashSet<PathBuf>,
}

impl Strays {
    /// Nothing seen yet. `strict`: kill them.
    pub fn new(strict: bool) -> Self {
        let next = Instant::now() + SHORTEST;
        Self { strict, interval: SHORTEST, next, suspects: HashMap::new(), told: HashSet::new() }
    }

    /// Until the next look.
    pub fn due_in(&self) -> Duration {
        self.next.saturating_duration_since(Instant::now())
    }

    /// Looks. The processes that are `known` are no strays. `is_told`: it was said why programs of a name have no keeper.
    pub fn look(&mut self, known: &HashSet<i32>, is_told: impl Fn(&str) -> bool) {
        let me = std::process::id() as i32;
        let all = tree::descendants(me);
        // Who is stopped may not have come to its first instruction: its time begins when it goes on.
        let alone = all.iter().filter(|p| !p.ending && !p.stopped && !known.contains(&p.pid));
        let alone = alone.filter(|process| !is_of_another_run(process, &all));
        // Or is one, or shares the memory of one that has. Keepers are our children, or those of whoever gets our part of
        // the tree's orphans.
        let has_keeper = |process: &Process| {
            let others = all.iter().filter(|other| other.pid != process.pid);
            let may_keep = |process: &Process| process.parent == me || process.name == "pageout";
            let mut pairs = others.filter(|other| may_keep(other) || may_keep(process));
            pairs.any(|other| sys::same_memory(other.pid, process.pid))
        };
        let mut suspects = HashMap::new();
        let (now, mut news) = (Instant::now(), false);
        for process in alone {
            let identity = (process.pid, process.started);
            let since = self.suspects.get(&identity).copied().unwrap_or(now);
            match now - since >= PATIENCE {
                true if !has_keeper(process) => self.treat(process, &is_told),
                _ => news = true,
            }
            suspects.insert(identity, since);
        }
        self.suspects = suspects;
        if !self.strict {
            self.interval = (self.interval * 2).min(LONGEST);
        }
        self.next = Instant::now() + if news { SHORTEST } else { self.interval };
    }

    fn treat(&mut self, process: &Process, is_told: impl Fn(&str) -> bool) {
        let Process { pid, name, .. } = process;
        let link = PathBuf::from(format!("/proc/{pid}/exe"));
        if self.strict {
            let Ok(pidfd) = PidFd::open(*pid) else { return };
            // While there is something to be read of it.
            let why = reason(*pid, &link);
            // The number may have gone to another process before it was held.
            if Process::of(*pid).is_some_and(|now| now.started == process.started) {
                pidfd.kill(libc::SIGKILL);
                say::error(format_args!("{pid} ({name}): {why}; killed (--strict)"));
            }
            return;
        }
        if is_told(name) {
            return;
        }
        let program = match fs::read_link(&link) {
            // Another user's.
            Err(error) if error.kind() == ErrorKind::PermissionDenied => PathBuf::from(name),
            Err(_) => return,
            Ok(program) => program,
        };
        if self.told.insert(program) {
            say::warning(format_args!("{pid} ({name}): {}; its memory is not limited", reason(*pid, &link)));
        }
    }
}

/// Whether another `pageout run` below us looks after a process, or it is one.
fn is_of_another_run(process: &Process, all: &[Process]) -> bool {
    let parent = |process: &&Process| all.iter().find(|other| other.pid == process.parent);
    std::iter::successors(Some(process), parent).any(|process| is_pageout(process.pid))
}

/// Whether a process executes the same file as we do.
fn is_pageout(pid: i32) -> bool {
    let file =
        |pid: &str| fs::metadata(format!("/proc/{pid}/exe")).map(|about| (about.dev(), about.ino())).ok();
    file(&pid.to_string()).is_some_and(|theirs| file("self") == Some(theirs))
}

/// Who a process is to others, also where it lets nobody look at it.
fn user_of(pid: i32) -> Option<u32> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    status.lines().find_map(|line| line.strip_prefix("Uid:"))?.split_whitespace().nth(1)?.parse().ok()
}

/// Why a process has no agent.
fn reason(pid: i32, program: &Path) -> String {
    if let Ok(Some((_, obstacle))) = program::obstacle(program) {
        return format!("{obstacle}, so pageout cannot be preloaded");
    }
    if let Some(user) = user_of(pid).filter(|user| *user != sys::euid()) {
        return format!("runs as another user than pageout ({user}), so pageout was not preloaded");
    }
    let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
    let has = |name: &str| {
        let start = format!("{name}=");
        environment.split(|byte| *byte == 0).any(|entry| entry.starts_with(start.as_bytes()))
    };
    match has(pageout::wire::ENV_RUN) && has("LD_PRELOAD") {
        true => "runs without pageout's agent".into(),
        false => "its environment was cleared, so pageout was not preloaded".into(),
    }
}
