//! Descendants that run without the agent: said once for each program, or killed with `--strict`.
//!
//! The agent says hello before `main`, and a fork's child before it goes on. So a process that looks at /proc find
//! without a connection for a second has none to come; unless the machine is so busy that its keeper, which is there,
//! had no time to say it; or it is still being loaded; or it is stopped, or another `pageout run` limits it: such are found
//! for what they have.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use pageout::api::reason;

use crate::config::Config;
use crate::directory::Reach;
use crate::program;
use crate::say;
use crate::sys::{self, PidFd};
use crate::tree::{self, Process};
use crate::unlimited::Why;

/// Between two looks, at first and with `--strict` always.
const SHORTEST: Duration = Duration::from_millis(200);
/// Until the look after the program has ended.
const SOON: Duration = Duration::from_millis(20);
/// How long a process may take to say hello.
const PATIENCE: Duration = Duration::from_secs(1);
/// The same while it is being loaded: a large program on a busy machine, or from a slow disk.
const LOADING: Duration = Duration::from_secs(30);
/// Between two looks in the end.
const LONGEST: Duration = Duration::from_secs(2);
/// And always so many times as long as a look takes: a tree may have thousands of threads.
const SHARE: u32 = 50;

/// What was seen of them.
#[derive(Debug)]
pub struct Strays {
    strict: bool,
    reach: Reach,
    /// The file of the agent, and the socket where it says hello.
    agent: PathBuf,
    socket: PathBuf,
    interval: Duration,
    next: Instant,
    /// Without a connection at the last look: number, start and stack.
    suspects: HashMap<(i32, u64, u64), Suspect>,
    /// Programs that were told of.
    told: HashSet<PathBuf>,
    /// Processes that are not of this run: number and start. What descends from them is not either, and joins them at each look:
    /// as an orphan it would be a child of ours, like one of the run.
    strangers: HashSet<(i32, u64)>,
}

/// Who may be one.
#[derive(Debug, Clone, Copy)]
struct Suspect {
    since: Instant,
    /// Since when the agent is known to have begun there.
    begun: Option<Instant>,
    /// It is one, and was treated so; or it is another run's.
    stray: bool,
}

/// How far the agent has come with a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// Not to its first instruction: the process is still being loaded.
    Loading,
    /// Beyond it.
    Begun,
    /// It does not come there.
    Never,
}

/// What was done about one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Treated {
    /// By us, or it had ended.
    Killed,
    /// It was told of, and is to count.
    LivesOn,
}

impl Strays {
    /// Nothing seen yet. `strict`: kill them. Those that descended from us `earlier` are not ours to judge.
    pub fn new(config: &Config, agent: &Path, socket: &Path, earlier: &[Process]) -> Self {
        let strangers = earlier.iter().map(|process| (process.pid, process.started)).collect();
        let (agent, socket) = (agent.to_owned(), socket.to_owned());
        let (interval, next) = (SHORTEST, Instant::now() + SHORTEST);
        Self {
            strict: config.strict,
            reach: config.reach(),
            agent,
            socket,
            interval,
            next,
            suspects: HashMap::new(),
            told: HashSet::new(),
            strangers,
        }
    }

    /// Until the next look.
    pub fn due_in(&self) -> Duration {
        self.next.saturating_duration_since(Instant::now())
    }

    /// Who is not of the run, by number.
    pub fn strangers(&self) -> HashSet<i32> {
        self.strangers.iter().map(|(pid, _)| *pid).collect()
    }

    /// One of ours, not of the run.
    pub fn pass_over(&mut self, pid: i32) {
        self.strangers.extend(Process::of(pid).map(|process| (pid, process.started)));
    }

    /// Looks who they are by now.
    fn know_strangers(&mut self) {
        let me = std::process::id() as i32;
        // As the first of its namespace we get the orphans of all who have come into it from outside (docker exec).
        let entered = if me == 1 { tree::without_parent() } else { Vec::new() };
        let still = |(pid, started): &(i32, u64)| Process::of(*pid).is_some_and(|p| p.started == *started);
        let entered = entered.into_iter().filter(|process| process.pid != me);
        self.strangers.retain(still);
        self.strangers.extend(entered.map(|process| (process.pid, process.started)));
        for (root, _) in self.strangers.clone() {
            let below = tree::descendants_but(root, &self.strangers);
            self.strangers.extend(below.into_iter().map(|process| (process.pid, process.started)));
        }
    }

    /// The program has ended, and may have left somebody who is not known yet; or nobody, so not at once.
    pub fn look_soon(&mut self) {
        (self.interval, self.next) = (SHORTEST, Instant::now() + SOON);
    }

    /// How long to wait for who may still say hello, if that is known.
    pub fn patience(&self) -> Option<Duration> {
        self.suspects.values().any(|suspect| !suspect.stray).then_some(LOADING)
    }

    /// Looks: those that are found to be strays and live on, or to be another run's. The processes that are `known` are none.
    /// `is_told`: it was said why programs of a name have no keeper.
    pub fn look(&mut self, known: &HashSet<i32>, is_told: impl Fn(&str) -> bool) -> Vec<(Process, Why)> {
        let me = std::process::id() as i32;
        let begun = Instant::now();
        self.know_strangers();
        let all = tree::descendants_but(me, &self.strangers);
        // Who is stopped may not have come to its first instruction: its time begins when it goes on.
        let alone = all.iter().filter(|p| !p.ending && !p.stopped && !known.contains(&p.pid));
        let mut other_runs = OtherRuns::among(&all);
        // Or is one, or shares the memory of one that has. Keepers are our children, or those of whoever gets our part of
        // the tree's orphans.
        let may_keep = |process: &Process| process.parent == me || process.name == "pageout";
        let keepers: Vec<&Process> = all.iter().filter(|process| may_keep(process)).collect();
        let has_keeper = |process: &Process| {
            let shares =
                |other: &Process| other.pid != process.pid && sys::same_memory(other.thread, process.thread);
            keepers.iter().any(|other| shares(other)) || may_keep(process) && all.iter().any(shares)
        };
        let (mut suspects, mut found) = (HashMap::new(), Vec::new());
        let (now, mut news) = (Instant::now(), false);
        for process in alone {
            // Each program that it executes has its time.
            let identity = (process.pid, process.started, process.stack);
            let new = Suspect { since: now, begun: None, stray: false };
            let mut suspect = self.suspects.get(&identity).copied().unwrap_or(new);
            if other_runs.have(process.pid) {
                if !std::mem::replace(&mut suspect.stray, true) {
                    found.push((process.clone(), Why::Elsewhere));
                }
                suspects.insert(identity, suspect);
                continue;
            }
            let age = now - suspect.since;
            let is_awaited = |suspect: &mut Suspect| match self.stage(process) {
                Stage::Loading => age < LOADING,
                // Just now, maybe; or who is to start the keeper, on the same memory, gets no time.
                Stage::Begun => {
                    let mut others = all.iter().filter(|other| other.pid != process.pid);
                    let mut is_starting = || {
                        process.starved || others.any(|other| sys::same_memory(other.thread, process.thread))
                    };
                    now - *suspect.begun.get_or_insert(now) < PATIENCE || age < LOADING && is_starting()
                }
                Stage::Never => false,
            };
            // Who is one stays one: if it gets a keeper it is known.
            let may_come =
                !suspect.stray && (age < PATIENCE || has_keeper(process) || is_awaited(&mut suspect));
            // A keeper whose program was killed while it waited to be served.
            let is_keeper = || {
                let is_agent =
                    || Loaded::of(process.thread, "maps", &self.agent).is_some_and(|loaded| loaded.agent);
                process.parent == me && process.name == "pageout" && is_agent()
            };
            if !may_come && !suspect.stray && !is_keeper() {
                let treated = self.treat(process, &is_told);
                suspect.stray = treated.is_some();
                found.extend((treated == Some(Treated::LivesOn)).then(|| (process.clone(), Why::Stray)));
            }
            news |= may_come;
            suspects.insert(identity, suspect);
        }
        self.suspects = suspects;
        if !self.strict {
            self.interval = (self.interval * 2).min(LONGEST);
        }
        let interval = if news { SHORTEST } else { self.interval };
        self.next = Instant::now() + interval.max(SHARE * begun.elapsed());
        found
    }

    /// None: to be tried again.
    fn treat(&mut self, process: &Process, is_told: impl Fn(&str) -> bool) -> Option<Treated> {
        let Process { pid, name, thread, .. } = process;
        let mut refused = String::new();
        if self.strict {
            let pidfd = PidFd::open(*pid).ok()?;
            // While there is something to be read of it.
            let why = self.reason(*thread);
            // The number may have gone to another process before it was held.
            if Process::of(*pid).is_none_or(|now| now.started != process.started) {
                return Some(Treated::Killed);
            }
            match pidfd.kill(libc::SIGKILL) {
                Ok(()) => {
                    say::error(format_args!("{pid} ({name}): {why}; killed (--strict)"));
                    return Some(Treated::Killed);
                }
                // It has become another user.
                Err(error) => refused = format!("cannot be killed ({}); ", reason(&error)),
            }
        } else if is_told(name) {
            return Some(Treated::LivesOn);
        }
        let program = match fs::read_link(exe(*thread)) {
            // Another user's.
            Err(error) if error.kind() == ErrorKind::PermissionDenied => PathBuf::from(name),
            Err(_) => return None,
            Ok(program) => program,
        };
        if self.told.insert(program) {
            say::warning(format_args!(
                "{pid} ({name}): {}; {refused}its memory is not limited, but counts",
                self.reason(*thread)
            ));
        }
        Some(Treated::LivesOn)
    }

    fn stage(&self, process: &Process) -> Stage {
        let pid = process.thread;
        let loaded = match why_not_preloaded(pid, &self.agent, self.reach) {
            None => Loaded::of(pid, "smaps", &self.agent),
            Some(_) => None,
        };
        match loaded {
            Some(Loaded { agent: true, begun: true, .. }) => Stage::Begun,
            Some(Loaded { agent: true, .. }) => Stage::Loading,
            // What is preloaded is mapped first: so far there are the program and the loader.
            Some(Loaded { files: ..=2, .. }) if process.starved => Stage::Loading,
            _ => Stage::Never,
        }
    }

    /// Why a process has no keeper.
    fn reason(&self, pid: i32) -> String {
        if let Some(why) = why_not_preloaded(pid, &self.agent, self.reach) {
            return why;
        }
        if !Loaded::of(pid, "maps", &self.agent).is_some_and(|loaded| loaded.agent) {
            return "runs without pageout's agent".into();
        }
        let socket = self.socket.display();
        match fs::symlink_metadata(format!("/proc/{pid}/root{socket}")) {
            Err(error) if error.kind() == ErrorKind::NotFound => format!(
                "run's socket, {socket}, is hidden from it; show it that, or set XDG_RUNTIME_DIR to a directory that \
                 it sees"
            ),
            _ => "pageout's agent got no keeper in it".into(),
        }
    }
}

/// Processes that another `pageout run` below us looks after, and those runs. A tree may be thousands deep.
struct OtherRuns {
    parents: HashMap<i32, i32>,
    known: HashMap<i32, bool>,
}

impl OtherRuns {
    fn among(all: &[Process]) -> Self {
        let parents = all.iter().map(|process| (process.pid, process.parent)).collect();
        Self { parents, known: HashMap::new() }
    }

    /// Is this one of them?
    fn have(&mut self, pid: i32) -> bool {
        let (mut line, mut next) = (Vec::new(), Some(pid));
        let found = loop {
            // /proc is not read at one moment, and must not send us in circles.
            let Some(pid) = next.filter(|_| line.len() <= self.parents.len()) else { break false };
            if let Some(known) = self.known.get(&pid) {
                break *known;
            }
            line.push(pid);
            if is_pageout(pid) {
                break true;
            }
            next = self.parents.get(&pid).copied().filter(|parent| self.parents.contains_key(parent));
        };
        self.known.extend(line.into_iter().map(|pid| (pid, found)));
        found
    }
}

/// Whether a process executes the same file as we do.
fn is_pageout(pid: i32) -> bool {
    let file =
        |pid: &str| fs::metadata(format!("/proc/{pid}/exe")).map(|about| (about.dev(), about.ino())).ok();
    file(&pid.to_string()).is_some_and(|theirs| file("self") == Some(theirs))
}

/// How far the loader has come with a process.
#[derive(Debug, PartialEq, Eq)]
struct Loaded {
    /// The agent is there.
    agent: bool,
    /// And has begun: there is what it maps first, which a fork's child finds empty (see its `memory.rs`).
    begun: bool,
    /// That is mapped at least, as it is in a fork's child.
    mapped: bool,
    /// Files that are mapped.
    files: usize,
}

impl Loaded {
    /// From what `maps` or `smaps` of a process says, of which only the latter tells who has begun, or whose parent had.
    fn of(pid: i32, list: &str, agent: &Path) -> Option<Self> {
        Some(Self::read(&sys::text_of(format!("/proc/{pid}/{list}"))?, agent))
    }

    fn read(list: &str, agent: &Path) -> Self {
        let files: HashSet<&Path> =
            list.lines().filter_map(|line| line.find('/').map(|at| Path::new(&line[at..]))).collect();
        let has = |flags: &str, wanted| flags.split_whitespace().any(|flag| flag == wanted);
        let (mut there, mut begun, mut mapped) = (0, false, false);
        for line in list.lines() {
            let (name, rest) = line.split_once(':').unwrap_or_default();
            let bytes = || rest.split_whitespace().next()?.parse::<u64>().ok();
            match name {
                "Rss" => there = bytes().unwrap_or(0),
                "Swap" => there += bytes().unwrap_or(0),
                // Not that of the kernel's random numbers, which may go at any time.
                "VmFlags" if has(rest, "wf") && !has(rest, "dp") => {
                    (begun, mapped) = (begun || there > 0, true);
                }
                _ => {}
            }
        }
        // Another mount namespace may have it elsewhere.
        let agent = files.iter().any(|path| path.file_name() == agent.file_name());
        Self { agent, begun, mapped, files: files.len() }
    }
}

/// What a process executes.
fn exe(pid: i32) -> PathBuf {
    PathBuf::from(format!("/proc/{pid}/exe"))
}

/// What kept the agent from being preloaded into a process, or from working there; a process that has gone was told nothing.
fn why_not_preloaded(pid: i32, agent: &Path, reach: Reach) -> Option<String> {
    if let Ok(Some((_, obstacle))) = program::obstacle(&exe(pid)) {
        return Some(format!("{obstacle}, so pageout cannot be preloaded"));
    }
    // A program may write over what it was told, as setproctitle does.
    let has_agent = || Loaded::of(pid, "maps", agent).is_some_and(|loaded| loaded.agent);
    if is_secure(pid) && !has_agent() {
        return Some(
            "was executed with two users or groups, real and effective, or more rights than it had, so pageout cannot be \
             preloaded (run it as one user from the start)"
                .into(),
        );
    }
    if let Some(user) = tree::user_of(pid).filter(|user| reach == Reach::Own && *user != sys::euid()) {
        let remedy = if sys::euid() == 0 { ", or with --any-user" } else { "" };
        return Some(format!(
            "runs as another user than pageout ({user}), who cannot reach its run (run pageout as that user{remedy})"
        ));
    }
    if !has_our_root(pid) {
        return Some("has another root than pageout, where neither agent nor run can be reached".into());
    }
    let told = told(pid, agent);
    // It ends before it maps anything. A fork's child has what its parent maps, which may have written over its environment.
    let is_idle = || Loaded::of(pid, "smaps", agent).is_some_and(|loaded| loaded.agent && !loaded.mapped);
    let effect = match told {
        Told::All => return None,
        Told::NoRun if is_idle() => "pageout's agent has no run there",
        _ if has_agent() => return None,
        Told::Others => {
            return Some(
                "LD_PRELOAD was set anew, so pageout was not preloaded (add to it: LD_PRELOAD=LIBRARY:$LD_PRELOAD)"
                    .into(),
            )
        }
        Told::NoRun | Told::Nothing => "pageout was not preloaded",
    };
    Some(format!("its environment was cleared, so {effect} (keep LD_PRELOAD and {})", pageout::wire::ENV_RUN))
}

/// Whether the kernel has told its loader to trust nobody (AT_SECURE).
fn is_secure(pid: i32) -> bool {
    const AT_SECURE: usize = 23;
    let told = fs::read(format!("/proc/{pid}/auxv")).unwrap_or_default();
    let words: Vec<usize> =
        told.chunks_exact(8).map(|word| usize::from_ne_bytes(word.try_into().expect("8 bytes"))).collect();
    words.chunks_exact(2).any(|pair| pair[0] == AT_SECURE && pair[1] != 0)
}

/// Whether a process finds run's socket by its path. The child of a fork takes the agent along wherever it goes.
fn has_our_root(pid: i32) -> bool {
    let root = |whose: &str| fs::metadata(format!("/proc/{whose}/root")).map(|at| (at.dev(), at.ino())).ok();
    root(&pid.to_string()).is_none_or(|theirs| root("self") == Some(theirs))
}

/// What a process was told by its environment.
#[derive(Debug, PartialEq, Eq)]
enum Told {
    /// To preload the agent, and where run is.
    All,
    /// To preload something else.
    Others,
    /// Something, but not where run is.
    NoRun,
    /// Nothing, or that is not to be seen.
    Nothing,
}

fn told(pid: i32, agent: &Path) -> Told {
    let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
    let value = |name: &str| {
        let start = format!("{name}=");
        environment.split(|byte| *byte == 0).find_map(|entry| entry.strip_prefix(start.as_bytes()))
    };
    // Another mount namespace may have it elsewhere.
    let is_agent = |entry: &[u8]| entry.ends_with(agent.file_name().unwrap_or_default().as_encoded_bytes());
    match (value(pageout::wire::ENV_RUN), value("LD_PRELOAD")) {
        (Some(_), Some(list)) if list.split(|byte| b": ".contains(byte)).any(is_agent) => Told::All,
        (Some(_), Some(list)) if !list.is_empty() => Told::Others,
        (None, _) if !environment.is_empty() => Told::NoRun,
        _ => Told::Nothing,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sees_how_far_the_loader_is() {
        let area = |path: &str, rss: u32, flags: &str| {
            format!("7f00-7f10 r-xp 00000000 fd:01 77    {path}\nRss: {rss} kB\nSwap: 0 kB\nVmFlags: rd {flags} \n")
        };
        let new = area("/bin/x", 4, "ex") + &area("/lib/ld.so", 4, "ex") + &area("/bin/x", 0, "wr");
        let read = |list: &str| {
            let Loaded { agent, begun, mapped, files } = Loaded::read(list, Path::new("/c/agent.so"));
            (agent, mapped, begun, files)
        };
        assert_eq!(read(&new), (false, false, false, 2));
        let mapped = new + &area("/other/agent.so", 4, "ex");
        assert_eq!(read(&mapped), (true, false, false, 3));
        assert_eq!(read(&(mapped.clone() + &area("", 0, "wf"))), (true, true, false, 3));
        assert_eq!(read(&(mapped.clone() + &area("", 4, "wf"))), (true, true, true, 3));
        assert_eq!(read(&(mapped + &area("", 4, "wf dp"))), (true, false, false, 3));
    }
}
