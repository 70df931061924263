//! The comparisons behind the asks and the pages, by name, at any scale.
//!
//! Sizes are multiples of the limit, so that a smaller limit makes the same shape in less time.

use crate::compare::{compare, Comparison};
use crate::engine::{Engine, Setting};
use crate::units::Bytes;
use crate::work::WorkLine;

/// One comparison to be run.
pub struct Plan {
    /// What asks refer to.
    pub id: &'static str,
    work: String,
    engines: &'static str,
    memory: Bytes,
    fits: bool,
}

/// All of them, for a limit of `memory`; but the Python program is the same at any scale. In a quarter of what a smaller one
/// takes the kernel finds nothing that it could put out, and kills.
pub fn all(memory: Bytes) -> Vec<Plan> {
    let times = |factor: f64| format!("{}M", memory.scaled(factor).0 >> 20);
    let plan = |id, work: String, engines| Plan { id, work, engines, memory, fits: false };
    let python = |id, mib: u64| Plan {
        memory: Bytes(mib << 20),
        ..plan(id, "python --size 740M".into(), "kernel-zram,pageout")
    };
    let fitting = |id, work: String| Plan { id, work, engines: "none,pageout", memory, fits: true };
    let (two, four) = (times(2.0), times(4.0));
    let rand = |threads: u32| format!("rand --size {two} --threads {threads} --small --seconds 5");
    let swapins = "pageout:--swapin auto,pageout:--swapin never,pageout:--swapin always";
    vec![
        plan(
            "seq",
            format!("seq --size {four} --threads 2 --rounds 8 --huge"),
            "kernel-zram,kernel-ram,pageout",
        ),
        plan(
            "seq-processes",
            format!("seq --size {four} --processes 2 --rounds 8 --huge"),
            "kernel-zram,pageout",
        ),
        plan(
            "seq-file",
            format!("seq --size {four} --threads 2 --rounds 8 --huge"),
            "kernel-file,pageout-file",
        ),
        plan("rand-1", rand(1), "kernel-zram,pageout"),
        plan("rand-2", rand(2), "kernel-zram,pageout"),
        plan("rand-file-1", rand(1), "kernel-file,pageout-file"),
        plan("rand-file-2", rand(2), "kernel-file,pageout-file"),
        python("python-half", 400),
        python("python-quarter", 200),
        plan("redis", format!("redis --data {two}"), "kernel-zram,pageout"),
        plan("zipf", format!("zipf --size {four} --memory {}M", memory.0 >> 20), "kernel-zram,pageout"),
        plan("hotscan", format!("hotscan --hot {} --cold {four}", times(0.5)), "kernel-zram,pageout"),
        plan("latency-1", format!("latency --size {two} --threads 1 --small"), "kernel-zram,pageout"),
        plan("latency-2", format!("latency --size {two} --threads 2 --small"), "kernel-zram,pageout"),
        plan("latency-4", format!("latency --size {two} --threads 4 --small"), "kernel-zram,pageout"),
        plan(
            "latency-idle",
            format!("latency --size {} --ballast {} --small", times(0.75), times(1.0)),
            "kernel-zram,pageout",
        ),
        plan("latency-cold", format!("latency --size {two} --small --rest 2ms"), "kernel-zram,pageout"),
        plan("latency-inline", format!("latency --size {two} --small"), "kernel-zram,pageout-inline"),
        plan("swapin-rand", format!("rand --size {two} --seconds 5"), swapins),
        plan("swapin-seq", format!("seq --size {four} --threads 2 --rounds 4 --huge"), swapins),
        fitting("fits", format!("python --size {}M --walks 16", memory.scaled(0.5).0 >> 20)),
        fitting("overhead", format!("overhead --size {} --text {}", times(0.5), times(0.0625))),
        fitting("start", "program /bin/true".into()),
    ]
}

impl Plan {
    /// Runs it, `rounds` times each engine, what fits five times as often: there one percent counts. A failure is a line
    /// of text.
    pub fn run(&self, rounds: usize, setting: &Setting) -> Result<Comparison, String> {
        let engines: Vec<Engine> =
            self.engines.split(',').map(|e| e.parse().expect("the crate's own engines are right")).collect();
        let setting = Setting { memory: self.memory, fits: self.fits, ..setting.clone() };
        let rounds = if self.fits { 5 * rounds } else { rounds };
        let comparison = compare(&WorkLine::own(&self.work), &engines, rounds, &setting);
        comparison
            .map(|comparison| Comparison { id: self.id.into(), ..comparison })
            .map_err(|error| format!("{error:#}"))
    }
}
