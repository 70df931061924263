//! All that a run shows of itself at one moment, as it crosses from run to whoever looks: JSON in a file in memory.

use std::fs::File;
use std::io::{self, Read};
use std::sync::atomic::Ordering::Relaxed;

use anyhow::{Context, Result};
use pageout::stats::Stats;
use serde::{Deserialize, Serialize};
use serde_json::{json, Map, Value};

use crate::mounts::Mount;
use crate::report::Counters;
use crate::sys;
use crate::tree::Process;

/// A run at one moment.
#[derive(Debug, Serialize, Deserialize)]
pub struct View {
    /// Process number of `pageout run`.
    pub run: i32,
    /// Process number of the program that it was started for.
    pub main: i32,
    /// The name of that program.
    pub program: String,
    /// How long it has been running.
    pub uptime_seconds: f64,
    /// Resident memory that all processes may keep together.
    pub limit_bytes: u64,
    /// Where pages go.
    pub devices: Vec<DeviceView>,
    /// Who is there: served, ending, or without a limit.
    pub processes: Vec<ProcessView>,
    /// The counters of those that have ended, added up.
    pub ended: Map<String, Value>,
}

/// A device of a run.
#[derive(Debug, Serialize, Deserialize)]
pub struct DeviceView {
    /// Its path, or what it is.
    pub name: String,
    /// `partition`, `file` or `memory`.
    #[serde(rename = "type")]
    pub kind: String,
    /// The most that it takes.
    pub size_bytes: u64,
    /// What processes have there, as they said at their last look.
    pub used_bytes: u64,
    /// Higher is used first.
    pub priority: i32,
    /// It is on its way off.
    pub leaving: bool,
}

/// A process of a run.
#[derive(Debug, Serialize, Deserialize)]
pub struct ProcessView {
    /// As ps shows it.
    pub name: String,
    /// What its engine does.
    pub state: State,
    /// Its counters, `pid` among them.
    #[serde(flatten)]
    pub counters: Map<String, Value>,
}

/// What a process's engine does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// It looks at the resident memory; nothing can go yet.
    Watching,
    /// It has taken up its work.
    Swapping,
    /// It has ended, and the process is about to.
    Ending,
    /// The process has no limit.
    Unlimited,
}

impl View {
    /// As a file to send.
    pub fn file(&self) -> io::Result<File> {
        sys::file_of(c"pageout-view", &serde_json::to_vec(self)?)
    }

    /// From the file that came.
    pub fn read(mut file: File) -> Result<Self> {
        let mut text = String::new();
        file.read_to_string(&mut text).context("its answer")?;
        serde_json::from_str(&text).context("its answer")
    }

    /// Is that the name of the program, as it was started or as it calls itself now?
    pub fn is_named(&self, name: &str) -> bool {
        let is_main = |process: &&ProcessView| process.pid() == self.main;
        self.program == name || self.processes.iter().find(is_main).is_some_and(|main| main.name == name)
    }

    /// A counter, of all processes that are or were.
    pub fn total(&self, counter: &str) -> u64 {
        let ended = self.ended.get(counter).and_then(Value::as_u64).unwrap_or(0);
        ended + self.now(counter)
    }

    /// What is resident, in bytes, with what processes share counted once, but for files.
    pub fn resident(&self) -> u64 {
        self.processes.iter().map(ProcessView::resident).sum()
    }

    /// A counter, of the processes that are.
    pub fn now(&self, counter: &str) -> u64 {
        self.processes.iter().map(|process| process.counter(counter)).sum()
    }
}

impl DeviceView {
    /// What there is to see of a device. `named`: the bytes that processes name there, who share some since a fork.
    pub fn of(mount: &Mount, named: u64) -> Self {
        let Mount { device, leaving, .. } = mount;
        Self {
            name: device.shown(),
            kind: device.kind().into(),
            size_bytes: device.trunks * device.trunk.0,
            used_bytes: named.min(mount.lent().0),
            priority: device.settings.priority,
            leaving: *leaving,
        }
    }
}

impl ProcessView {
    /// A process that is served; `state` where its counters do not tell.
    pub fn of(pid: i32, name: String, state: Option<State>, stats: &Stats) -> Self {
        let by_counters = match stats.active.load(Relaxed) {
            0 => State::Watching,
            _ => State::Swapping,
        };
        Self { name, state: state.unwrap_or(by_counters), counters: Counters::of(stats, pid).json() }
    }

    /// A process without a keeper, that has no limit.
    pub fn unlimited(process: Process) -> Self {
        let Process { pid, name, resident_bytes, .. } = process;
        let counters = [
            ("pid", json!(pid)),
            ("limit_bytes", json!(u64::MAX)),
            ("resident_bytes", json!(resident_bytes)),
            ("unmanaged_bytes", json!(resident_bytes)),
        ];
        let counters = counters.map(|(name, value)| (name.to_owned(), value));
        Self { name, state: State::Unlimited, counters: counters.into_iter().collect() }
    }

    /// Its number.
    pub fn pid(&self) -> i32 {
        self.counter("pid") as i32
    }

    /// What it has in memory, in bytes, without what is shared and counts elsewhere, but for files.
    pub fn resident(&self) -> u64 {
        self.counter("resident_bytes").saturating_sub(self.counter("shared_bytes"))
    }

    /// One of its counters; 0 if it has no such.
    pub fn counter(&self, name: &str) -> u64 {
        self.counters.get(name).and_then(Value::as_u64).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn crosses_as_it_is() {
        let page = sys::memfd(c"test", pageout::stats::STATS_BYTES as u64, true).unwrap();
        let page = sys::Mapping::of(&page, pageout::stats::STATS_BYTES).unwrap();
        page.stats().pswpin.store(5, Relaxed);
        let mut processes = vec![ProcessView::of(7, "a b".into(), None, page.stats())];
        page.stats().active.store(1, Relaxed);
        processes.push(ProcessView::of(8, "c".into(), None, page.stats()));
        let own = Process::of(std::process::id() as i32).unwrap();
        processes.push(ProcessView::unlimited(Process { pid: 9, ..own }));
        let view = View {
            run: 1,
            main: 7,
            program: "a".into(),
            uptime_seconds: 1.5,
            limit_bytes: u64::MAX,
            devices: Vec::new(),
            processes,
            ended: Counters::of(page.stats(), 0).json(),
        };
        let read = View::read(view.file().unwrap()).unwrap();
        assert_eq!(serde_json::to_value(&read).unwrap(), serde_json::to_value(&view).unwrap());
        assert_eq!((read.total("pswpin"), read.now("pswpin"), read.now("nothing")), (15, 10, 0));
        let states: Vec<_> = read.processes.iter().map(|p| (p.pid(), p.state)).collect();
        assert_eq!(states, [(7, State::Watching), (8, State::Swapping), (9, State::Unlimited)]);
    }
}
