//! Processes of a run that it does not limit: static programs, those of another user, those whose keeper stepped aside, those
//! that another run below it limits. What they have counts as memory that cannot go: the others leave room for it.
//!
//! Counted by a thread that runs while there are some: the kernel's count takes the lock of a process's mappings, and run waits
//! for no process. It walks all pages meanwhile, and who maps memory waits: so only when much has changed.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::sys;
use crate::tree::{self, Process};

/// Between two counts: this, or so many times as long as the count took.
const EVERY: Duration = Duration::from_millis(100);
const SHARE: u32 = 50;
/// What is shared since a fork is counted again when a process has so many bytes more or less, or a 16th, and after so long.
const MUCH: u64 = 1 << 20;
const AGAIN: Duration = Duration::from_secs(10);
/// So many processes that may have the same memory are compared with each.
const COMPARED: usize = 16;

/// Those of a run.
#[derive(Debug)]
pub struct Unlimited {
    counted: Arc<Counted>,
    /// It is of use what they have.
    counts: bool,
}

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
    why: Why,
}

/// Why a process has no limit from us.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Why {
    /// It had a keeper, which stepped aside on purpose.
    Aside,
    /// It cannot have one.
    Stray,
    /// Another run gives it one.
    Elsewhere,
}

impl Unlimited {
    /// None so far, of a run with this limit.
    pub fn new(limit: u64) -> Self {
        Self { counted: Arc::default(), counts: limit != u64::MAX }
    }

    /// It has none from now on.
    pub fn add(&self, process: Process, why: Why) {
        let pid = process.pid;
        let was_counted = self.counted.with(|members| {
            members.all.retain(|member| member.process.pid != pid);
            members.all.push(Member { process, why });
            std::mem::replace(&mut members.counted, self.counts)
        });
        if was_counted || !self.counts {
            return;
        }
        let counted = self.counted.clone();
        let thread = thread::Builder::new().name("unlimited".into());
        if thread.spawn(move || counted.count()).is_err() {
            // Tried again with the next.
            self.counted.with(|members| members.counted = false);
        }
    }

    /// It has a keeper, or has become another.
    pub fn forget(&self, pid: i32) {
        self.counted.with(|members| members.all.retain(|member| member.process.pid != pid));
    }

    /// Those that have not ended and are asked for.
    pub fn living(&self, is_asked: impl Fn(Why) -> bool) -> Vec<Process> {
        self.counted.with(|members| {
            members.all.retain(|member| !member.process.has_ended());
            let asked = members.all.iter().filter(|member| is_asked(member.why));
            asked.filter_map(|member| Process::of(member.process.pid)).collect()
        })
    }

    /// What they have together, at the last count: of what several share, each its part.
    pub fn bytes(&self) -> u64 {
        self.counted.bytes.load(Relaxed)
    }
}

impl Counted {
    fn with<T>(&self, act: impl FnOnce(&mut Members) -> T) -> T {
        act(&mut self.members.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Counts until there are none.
    fn count(&self) {
        let mut known = HashMap::new();
        loop {
            let begun = Instant::now();
            let all: Option<Vec<Process>> = self.with(|members| {
                members.all.retain(|member| !member.process.has_ended());
                members.counted = !members.all.is_empty();
                if !members.counted {
                    // Under the lock: who comes next begins anew.
                    self.bytes.store(0, Relaxed);
                }
                members.counted.then(|| members.all.iter().map(|member| member.process.clone()).collect())
            });
            let Some(all) = all else { return };
            let memories = memories(&all);
            known.retain(|thread, _| memories.contains(thread));
            self.bytes
                .store(memories.into_iter().filter_map(|thread| own(thread, &mut known)).sum(), Relaxed);
            thread::sleep(EVERY.max(SHARE * begun.elapsed()));
        }
    }
}

/// A thread of one process of each memory: some may share theirs, without being threads of one.
fn memories(all: &[Process]) -> HashSet<i32> {
    // Who shares memory has the same stack, as a fork's child has.
    let mut by_stack: HashMap<u64, Vec<i32>> = HashMap::new();
    for process in all {
        // It may execute another program by now, or its first thread have ended.
        let Some(Process { stack, thread, .. }) = Process::of(process.pid) else { continue };
        let alike = by_stack.entry(stack).or_default();
        if !alike.iter().take(COMPARED).any(|other| sys::same_memory(*other, thread)) {
            alike.push(thread);
        }
    }
    by_stack.into_values().flatten().collect()
}

/// What was counted of a process.
struct Count {
    at: Instant,
    /// All of its own memory, and its part of that.
    whole: u64,
    part: u64,
}

/// The memory that is a process's own, as one of its threads has it, without files, in bytes: of what it shares since a fork
/// its part, or all if it lets nobody look closer.
fn own(thread: i32, known: &mut HashMap<i32, Count>) -> Option<u64> {
    let (resident, shared) = tree::resident(thread)?;
    let whole = resident.saturating_sub(shared);
    if let Some(count) = known.get(&thread) {
        let change = count.whole.abs_diff(whole);
        if change < MUCH.max(whole / 16) && count.at.elapsed() < AGAIN {
            return Some((count.part + whole).saturating_sub(count.whole));
        }
    }
    let part = tree::proportional(thread, "Pss_Anon:").unwrap_or(whole);
    known.insert(thread, Count { at: Instant::now(), whole, part });
    Some(part)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_while_there_are_some() {
        let unlimited = Unlimited::new(1 << 30);
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let process = Process::of(child.id() as i32).unwrap();
        let until = |is_so: &dyn Fn() -> bool| {
            let patience = Instant::now() + Duration::from_secs(10);
            while !is_so() {
                assert!(Instant::now() < patience);
                thread::sleep(Duration::from_millis(5));
            }
        };
        let there = || (unlimited.living(|_| true).len(), unlimited.living(|why| why == Why::Aside).len());
        unlimited.add(process.clone(), Why::Stray);
        until(&|| unlimited.bytes() > 0);
        assert_eq!(there(), (1, 0));
        unlimited.forget(process.pid);
        until(&|| unlimited.bytes() == 0);
        unlimited.add(process, Why::Aside);
        until(&|| unlimited.bytes() > 0);
        assert_eq!(there(), (1, 1));
        child.kill().unwrap();
        child.wait().unwrap();
        until(&|| unlimited.bytes() == 0);
        assert_eq!(there(), (0, 0));
        let me = std::process::id() as i32;
        let mut known = HashMap::new();
        for _ in 0..2 {
            let own = own(me, &mut known);
            assert!(own.is_some_and(|bytes| (64 << 10..1 << 30).contains(&bytes)), "{own:?}");
        }
        let myself = Process::of(me).unwrap();
        assert_eq!(memories(&[myself.clone(), myself]), HashSet::from([me]));
    }
}
