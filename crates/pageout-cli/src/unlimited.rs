//! Processes of a run that have no limit of their own: static programs, those of another user, those whose keeper stepped
//! aside. What they have counts as memory that cannot go: the others leave room for it.
//!
//! Counted by a thread that runs while there are some: the kernel's count waits for the lock of a process's mappings, and
//! run waits for no process.

use std::fs;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::device::PAGE;
use crate::tree::Process;

/// Between two counts: this, or so many times as long as the count took.
const EVERY: Duration = Duration::from_millis(100);
const SHARE: u32 = 50;

/// Those of a run.
#[derive(Debug, Default)]
pub struct Unlimited(Arc<Counted>);

#[derive(Debug, Default)]
struct Counted {
    members: Mutex<Members>,
    bytes: AtomicU64,
}

#[derive(Debug, Default)]
struct Members {
    all: Vec<Member>,
    /// There is a thread that counts them; it ends when there are none.
    counted: bool,
}

#[derive(Debug, Clone)]
struct Member {
    process: Process,
    /// It had a keeper, which stepped aside on purpose.
    aside: bool,
}

impl Unlimited {
    /// It has none from now on.
    pub fn add(&self, process: Process, aside: bool) {
        let pid = process.pid;
        let was_counted = self.0.with(|members| {
            members.all.retain(|member| member.process.pid != pid);
            members.all.push(Member { process, aside });
            std::mem::replace(&mut members.counted, true)
        });
        if was_counted {
            return;
        }
        let counted = self.0.clone();
        let thread = thread::Builder::new().name("unlimited".into());
        if thread.spawn(move || counted.count()).is_err() {
            // Tried again with the next.
            self.0.with(|members| members.counted = false);
        }
    }

    /// It has a keeper, or has become another.
    pub fn forget(&self, pid: i32) {
        self.0.with(|members| members.all.retain(|member| member.process.pid != pid));
    }

    /// Those that have not ended; `aside`: only whose keeper stepped aside.
    pub fn living(&self, aside: bool) -> Vec<Process> {
        let asked = |member: &&Member| !aside || member.aside;
        let known: Vec<Process> = self
            .0
            .with(|members| members.all.iter().filter(asked).map(|member| member.process.clone()).collect());
        let now = |process: Process| Process::of(process.pid).filter(|now| now.started == process.started);
        known.into_iter().filter_map(now).collect()
    }

    /// What they have together, at the last count: of what several share, each its part.
    pub fn bytes(&self) -> u64 {
        self.0.bytes.load(Relaxed)
    }
}

impl Counted {
    fn with<T>(&self, act: impl FnOnce(&mut Members) -> T) -> T {
        act(&mut self.members.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Counts until there are none.
    fn count(&self) {
        loop {
            let begun = Instant::now();
            let pids: Option<Vec<i32>> = self.with(|members| {
                members.all.retain(|member| !member.process.has_ended());
                members.counted = !members.all.is_empty();
                if !members.counted {
                    // Under the lock: who comes next begins anew.
                    self.bytes.store(0, Relaxed);
                }
                members.counted.then(|| members.all.iter().map(|member| member.process.pid).collect())
            });
            let Some(pids) = pids else { return };
            self.bytes.store(pids.into_iter().filter_map(own).sum(), Relaxed);
            thread::sleep(EVERY.max(SHARE * begun.elapsed()));
        }
    }
}

/// The memory that is a process's own, without files, in bytes. Of a process that lets nobody look closer, all that it
/// shares since a fork is counted, too.
fn own(pid: i32) -> Option<u64> {
    let read = |file: &str| fs::read_to_string(format!("/proc/{pid}/{file}")).ok();
    let part = |text: String| {
        let line = text.lines().find_map(|line| line.strip_prefix("Pss_Anon:"))?;
        line.trim().strip_suffix(" kB")?.parse::<u64>().ok()
    };
    if let Some(kib) = read("smaps_rollup").and_then(part) {
        return Some(kib << 10);
    }
    let text = read("statm")?;
    let mut pages = text.split(' ').skip(1).map_while(|pages| pages.parse::<u64>().ok());
    let (resident, shared) = (pages.next()?, pages.next()?);
    Some(resident.saturating_sub(shared) * PAGE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_while_there_are_some() {
        let unlimited = Unlimited::default();
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let process = Process::of(child.id() as i32).unwrap();
        let until = |is_so: &dyn Fn() -> bool| {
            let patience = Instant::now() + Duration::from_secs(10);
            while !is_so() {
                assert!(Instant::now() < patience);
                thread::sleep(Duration::from_millis(5));
            }
        };
        let there = || (unlimited.living(false).len(), unlimited.living(true).len());
        unlimited.add(process.clone(), false);
        until(&|| unlimited.bytes() > 0);
        assert_eq!(there(), (1, 0));
        unlimited.forget(process.pid);
        until(&|| unlimited.bytes() == 0);
        unlimited.add(process, true);
        until(&|| unlimited.bytes() > 0);
        assert_eq!(there(), (1, 1));
        child.kill().unwrap();
        child.wait().unwrap();
        until(&|| unlimited.bytes() == 0);
        assert_eq!(there(), (0, 0));
        let me = std::process::id() as i32;
        assert!(own(me).is_some_and(|bytes| (64 << 10..1 << 30).contains(&bytes)), "{:?}", own(me));
    }
}
