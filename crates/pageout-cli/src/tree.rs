//! The processes of the run, as /proc shows them. Owns nothing; every answer may be old when it is used, so what is
//! killed by it is held by a [`PidFd`](crate::sys::PidFd) and looked at again.

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::{fs, io};

use crate::device::PAGE;
use crate::sys;

/// A process at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Process {
    /// Its number.
    pub pid: i32,
    /// Its parent.
    pub parent: i32,
    /// Its name, as `ps` shows it.
    pub name: String,
    /// When it started, in ticks since boot: with the number it names the process for good.
    pub started: u64,
    /// It has ended, or is about to.
    pub ending: bool,
    /// It is stopped, by a signal or by who traces it.
    pub stopped: bool,
    /// Where its stack began, if that can be seen: elsewhere when it executes another program.
    pub stack: u64,
    /// It wants to run, or waits for a disk, and has hardly run at all.
    pub starved: bool,
    /// What it has in memory.
    pub resident_bytes: u64,
    /// A thread of it that has not ended, the first if that has not: its memory and its files are seen there only.
    pub thread: i32,
}

impl Process {
    /// The process of this number.
    pub fn of(pid: i32) -> Option<Self> {
        let first = Self::parse(&stat(&format!("/proc/{pid}"))?)?;
        if !first.ending {
            return Some(first);
        }
        // As a program whose `main` calls pthread_exit.
        Some(first.seen_by_another().unwrap_or(first))
    }

    /// The same, as it is while threads go on after the first.
    fn seen_by_another(&self) -> Option<Self> {
        let Self { pid, started, .. } = *self;
        let threads = fs::read_dir(format!("/proc/{pid}/task")).ok()?;
        let mut others = threads.filter_map(|thread| Self::parse(&stat(thread.ok()?.path().to_str()?)?));
        let other = others.find(|thread| !thread.ending)?;
        Some(Self { pid, started, name: self.name.clone(), ..other })
    }

    /// Has it ended since, or is it about to?
    pub fn has_ended(&self) -> bool {
        let differs = |now: Self| now.started != self.started || now.ending;
        Self::of(self.pid).map_or_else(|| !exists(self.pid), differs)
    }

    fn parse(stat: &str) -> Option<Self> {
        const PF_EXITING: u64 = 0x4;
        /// Hundredths of a second.
        const HARDLY: u64 = 50;
        // The name is in parentheses and may hold anything, also parentheses.
        let (left, right) = stat.rsplit_once(") ")?;
        let (pid, name) = left.split_once(" (")?;
        let fields: Vec<&str> = right.split(' ').collect();
        let number = |index: usize| fields.get(index)?.parse::<u64>().ok();
        let flags = number(6)?;
        Some(Self {
            pid: pid.parse().ok()?,
            parent: fields.get(1)?.parse().ok()?,
            name: name.to_owned(),
            started: number(19)?,
            ending: matches!(*fields.first()?, "Z" | "X") || flags & PF_EXITING != 0,
            stopped: matches!(*fields.first()?, "T" | "t"),
            stack: number(25).unwrap_or(0),
            resident_bytes: number(21)? * PAGE,
            starved: matches!(*fields.first()?, "R" | "D") && number(11)? + number(12)? < HARDLY,
            thread: pid.parse().ok()?,
        })
    }
}

/// What /proc says of a process or a thread.
fn stat(directory: &str) -> Option<String> {
    sys::text_of(format!("{directory}/stat"))
}

/// Who a process is to others, also where it lets nobody look at it.
pub fn user_of(pid: i32) -> Option<u32> {
    let status = sys::text_of(format!("/proc/{pid}/status"))?;
    status.lines().find_map(|line| line.strip_prefix("Uid:"))?.split_whitespace().nth(1)?.parse().ok()
}

/// What a process, as one of its threads has it, has in memory, and of that what is of files or shared on purpose, in bytes.
pub fn resident(thread: i32) -> Option<(u64, u64)> {
    let text = sys::text_of(format!("/proc/{thread}/statm"))?;
    let mut bytes = text.split(' ').skip(1).map_while(|pages| Some(pages.parse::<u64>().ok()? * PAGE));
    Some((bytes.next()?, bytes.next()?))
}

/// The same of `what` (`Pss:`, `Pss_Anon:`): of what several have, its part. Walks all of it; only for who may look into it.
pub fn proportional(thread: i32, what: &str) -> Option<u64> {
    let text = sys::text_of(format!("/proc/{thread}/smaps_rollup"))?;
    let line = text.lines().find_map(|line| line.strip_prefix(what))?;
    Some(line.trim().strip_suffix(" kB")?.parse::<u64>().ok()? << 10)
}

/// Is there a process of this number? Where nothing more can be opened it is known all the same.
pub fn exists(pid: i32) -> bool {
    fs::metadata(format!("/proc/{pid}")).map_or_else(|e| e.kind() != io::ErrorKind::NotFound, |_| true)
}

/// All that descend from `root`, without it, and without these, by number and start, and what descends from them. By the lists of
/// children, for a host may have thousands of other processes: one whose parent ends just then can be missing.
pub fn descendants_but(root: i32, not: &HashSet<(i32, u64)>) -> Vec<Process> {
    let (mut found, mut seen, mut parents) = (Vec::new(), HashSet::from([root]), vec![root]);
    while let Some(parent) = parents.pop() {
        for pid in children_of(parent).into_iter().filter(|pid| seen.insert(*pid)) {
            let process = Process::of(pid).filter(|process| !not.contains(&(pid, process.started)));
            parents.extend(process.as_ref().map(|process| process.pid));
            found.extend(process);
        }
    }
    found
}

/// All that descend from the calling process; none where some may be missing, for want of descriptors or memory.
pub fn all_descendants() -> Option<Vec<Process>> {
    let me = std::process::id() as i32;
    let mut all = Vec::new();
    for entry in fs::read_dir("/proc").ok()? {
        let Some(pid) = entry.ok()?.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        match Process::of(pid) {
            Some(process) => all.push(process),
            None if exists(pid) => return None,
            None => {}
        }
    }
    Some(below(me, all))
}

/// Those whose parents are not in our namespace of process numbers; its first process among them.
pub fn without_parent() -> Vec<Process> {
    all_pids().filter_map(Process::of).filter(|process| process.parent == 0).collect()
}

/// The processes that /proc lists, as far as it can be read.
fn all_pids() -> impl Iterator<Item = i32> {
    let entries = fs::read_dir("/proc").into_iter().flatten();
    entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
}

/// Has the calling process, which reaps in this thread only, children that are not among `known` and have not ended,
/// or is about to get them from one that is ending?
pub fn has_children_but(known: &HashSet<i32>) -> bool {
    let me = std::process::id() as i32;
    loop {
        let children = children_of(me);
        if children.iter().any(|pid| !known.contains(pid) && lives_or_leaves(*pid)) {
            return true;
        }
        // Else one may have come from its parent to us in between: none goes, for nobody else reaps them.
        if children_of(me) == children {
            return false;
        }
    }
}

/// Whether a process has not ended, nor all of its children when it is about to.
fn lives_or_leaves(pid: i32) -> bool {
    Process::of(pid)
        .is_some_and(|process| !process.ending || children_of(pid).into_iter().any(lives_or_leaves))
}

/// The children of all threads of a process.
fn children_of(pid: i32) -> Vec<i32> {
    let Ok(threads) = fs::read_dir(format!("/proc/{pid}/task")) else { return Vec::new() };
    let lists = threads.filter_map(|thread| sys::text_of(thread.ok()?.path().join("children")));
    lists
        .flat_map(|list| list.split_whitespace().filter_map(|pid| pid.parse().ok()).collect::<Vec<_>>())
        .collect()
}

fn below(root: i32, all: Vec<Process>) -> Vec<Process> {
    let mut children: HashMap<i32, Vec<Process>> = HashMap::new();
    for process in all {
        children.entry(process.parent).or_default().push(process);
    }
    let mut found = children.remove(&root).unwrap_or_default();
    let mut next = 0;
    while next < found.len() {
        found.extend(children.remove(&found[next].pid).unwrap_or_default());
        next += 1;
    }
    found
}

/// Whether `pid` descends from `root`, or is it.
pub fn descends_from(pid: i32, root: i32) -> bool {
    /// More generations than any tree has: /proc is not read at one moment, and must not send us in circles.
    const GENERATIONS: usize = 4096;
    let (mut pid, mut child_started) = (pid, u64::MAX);
    for _ in 0..GENERATIONS {
        if pid == root {
            return true;
        }
        match Process::of(pid) {
            // Who began after its child has its parent's number.
            Some(process) if process.parent > 0 && process.started <= child_started => {
                (pid, child_started) = (process.parent, process.started);
            }
            _ => return false,
        }
    }
    false
}

/// What we call the process that `peer` calls `pid`: they are in one namespace of process numbers, but it need not be
/// ours.
pub fn translate(pid: i32, peer: i32) -> Option<i32> {
    // Who has one number has it here; another user's namespace might not be shown to us.
    let numbers = sys::text_of(format!("/proc/{peer}/status"))?;
    if pids(&numbers)?.count() == 1 {
        return Some(pid);
    }
    called(pid, &namespace(peer)?)
}

/// The namespace of process numbers that a process is in, as the kernel calls it.
pub fn namespace(pid: i32) -> Option<PathBuf> {
    fs::read_link(format!("/proc/{pid}/ns/pid")).ok()
}

/// Does a namespace of process numbers end? When its init does, the kernel kills all others there.
pub fn namespace_ends(namespace: &Path) -> bool {
    called(1, namespace).and_then(Process::of).is_none_or(|init| init.ending)
}

/// What we call the process that has a number in a namespace.
fn called(pid: i32, there: &Path) -> Option<i32> {
    all_pids().filter(|&candidate| namespace(candidate).as_deref() == Some(there)).find(|candidate| {
        sys::text_of(format!("/proc/{candidate}/status")).and_then(|status| innermost_pid(&status))
            == Some(pid)
    })
}

/// A process's numbers, from ours to that in its innermost namespace.
fn pids(status: &str) -> Option<std::str::SplitWhitespace<'_>> {
    Some(status.lines().find_map(|line| line.strip_prefix("NSpid:"))?.split_whitespace())
}

/// A process's number in its innermost namespace.
fn innermost_pid(status: &str) -> Option<i32> {
    pids(status)?.last()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::PidFd;

    fn process(pid: i32, parent: i32) -> Process {
        let (name, started, stack) = ("x".into(), 1, 2);
        let (ending, stopped, starved) = (false, false, false);
        let (thread, resident_bytes) = (pid, 0);
        Process { pid, parent, name, started, stack, ending, stopped, starved, resident_bytes, thread }
    }

    #[test]
    fn reads_names_that_are_odd() {
        let line = "12 (a) (b c) S 3 4 5 0 -1 4194308 1 2 3 4 5 6 7 8 20 0 1 0 777 9 10";
        let read = Process::parse(line).unwrap();
        assert_eq!((read.pid, read.parent, read.name.as_str(), read.started), (12, 3, "a) (b c", 777));
        assert!(read.ending && !read.stopped && !read.starved);
        let line = "12 (a) R 3 4 5 0 -1 0 1 2 3 4 5 6 7 8 20 0 1 0 777 9 10 11 12 13 14 15 16 17 18";
        let read = Process::parse(line).unwrap();
        assert_eq!((read.stack, read.starved), (14, true));
        assert_eq!(Process::parse("12 (a) S"), None);
    }

    #[test]
    fn walks_the_tree_and_nothing_else() {
        let all = vec![process(2, 1), process(5, 3), process(3, 2), process(9, 8), process(4, 2)];
        let mut pids: Vec<i32> = below(2, all).into_iter().map(|p| p.pid).collect();
        pids.sort();
        assert_eq!(pids, [3, 4, 5]);
    }

    #[test]
    fn finds_children_of_children_but_not_those_of_whom_it_passes_over() {
        let mut shell = std::process::Command::new("sh").args(["-c", "sleep 60 & wait"]).spawn().unwrap();
        let (me, parent) = (std::process::id() as i32, shell.id() as i32);
        let patience = std::time::Instant::now() + std::time::Duration::from_secs(20);
        let is_grandchild = |process: &Process| process.parent == parent && process.name == "sleep";
        while !descendants_but(me, &HashSet::new()).iter().any(is_grandchild) {
            assert!(std::time::Instant::now() < patience);
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        let below = descendants_but(parent, &HashSet::new());
        assert!(below.len() == 1 && is_grandchild(&below[0]));
        let not = HashSet::from([(parent, Process::of(parent).unwrap().started)]);
        assert!(!descendants_but(me, &not)
            .iter()
            .any(|process| process.pid == parent || is_grandchild(process)));
        PidFd::open(below[0].pid).unwrap().kill(libc::SIGKILL).unwrap();
        shell.wait().unwrap();
    }

    #[test]
    fn knows_itself() {
        let me = std::process::id() as i32;
        let myself = Process::of(me).unwrap();
        assert_eq!(myself.pid, me);
        assert!(descends_from(me, myself.parent));
        assert!(!descends_from(myself.parent, me));
        assert_eq!(translate(me, me), Some(me));
    }

    #[test]
    fn a_process_has_not_ended_while_one_of_its_threads_goes_on() {
        extern "C" fn goes_on(_: *mut libc::c_void) -> *mut libc::c_void {
            // SAFETY: waits.
            std::iter::repeat_with(|| unsafe { libc::pause() }).for_each(drop);
            std::ptr::null_mut()
        }
        // SAFETY: the child makes a thread and ends its own; the arguments outlive that.
        let pid = unsafe {
            let pid = libc::fork();
            if pid == 0 {
                let mut thread = 0;
                libc::pthread_create(&mut thread, std::ptr::null(), goes_on, std::ptr::null_mut());
                libc::syscall(libc::SYS_exit, 0);
            }
            pid
        };
        let first = || Process::parse(&stat(&format!("/proc/{pid}")).unwrap()).unwrap();
        let patience = std::time::Instant::now() + std::time::Duration::from_secs(20);
        while !first().ending {
            assert!(std::time::Instant::now() < patience);
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        let process = Process::of(pid).unwrap();
        assert!(!process.ending && !process.has_ended() && process.thread != pid);
        assert_eq!((process.pid, process.started, process.name), (pid, first().started, first().name));
        assert!(process.resident_bytes > 0 && process.stack != 0);
        // SAFETY: takes numbers; nobody waits for a status.
        unsafe { libc::kill(pid, libc::SIGKILL) };
        while !Process::of(pid).unwrap().ending {
            assert!(std::time::Instant::now() < patience);
        }
        // SAFETY: as above.
        unsafe { libc::waitpid(pid, std::ptr::null_mut(), 0) };
    }

    #[test]
    fn finds_the_innermost_number() {
        assert_eq!(innermost_pid("Name:\tx\nNSpid:\t400\t7\n"), Some(7));
    }
}
