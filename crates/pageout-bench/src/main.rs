//! The command `pageout-bench`: workloads, and the comparison of pageout with the kernel's own swap.
//!
//! A workload is always a process of its own (`work.rs`), run under an engine (`engine.rs`), several
//! in turn (`compare.rs`). What a run sets up on the machine is undone by `janitor.rs`, whatever
//! happens. `unsafe` lives in `sys.rs` and `mem.rs` alone.

mod asks;
mod caches;
mod cgroup;
mod compare;
mod counters;
mod dist;
mod engine;
mod frag;
mod janitor;
mod kswap;
mod ladder;
mod latency;
mod machine;
mod mem;
mod only;
mod pattern;
mod peer;
mod plans;
mod plot;
mod policy;
mod quick;
mod report;
mod sample;
mod slots;
mod sys;
mod table;
mod units;
mod work;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{ensure, Context, Result};
use clap::{Args, Parser, Subcommand};

use crate::compare::{compare, Results};
use crate::engine::{Engine, Setting};
use crate::machine::Machine;
use crate::quick::Quick;
use crate::units::{parse_time, Bytes};
use crate::work::{Work, WorkLine};

#[derive(Parser)]
#[command(name = "pageout-bench", version, about, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// Run a workload here and now, and print what it found as JSON
    Work {
        #[command(subcommand)]
        work: Work,
    },
    /// Run a workload under several engines in turn and print the table
    Compare(Compare),
    /// The main table in under three minutes
    Quick {
        #[command(flatten)]
        common: Common,
    },
    /// What is asked of pageout's speed: ask, figure, met or not; the exit status says whether all are
    Asks(Asks),
    /// Run everything and write the page of results, with plots and commands
    Report {
        #[command(flatten)]
        asks: Asks,
        /// Draw from results that --json wrote, and run nothing
        #[arg(long, value_name = "FILE")]
        from: Option<PathBuf>,
        /// The page; plots go beside it
        #[arg(long, value_name = "FILE", default_value = "docs/results.md")]
        out: PathBuf,
    },
    /// Time any command line under several engines
    Program(Program),
    /// Allocate and free slots by 1 to 16 threads, of orders 0, 4 and 9, on a fresh and an aged device
    Slots(slots::SlotsArgs),
    /// The steps from one lock for everything to what pageout does
    Ladder(ladder::LadderArgs),
    /// How often a large run of slots is not to be had, round after round
    Frag(frag::FragArgs),
    /// Hit ratios of the reclaim policy on traces of accesses, beside FIFO, CLOCK, LRU and the optimum
    Policy(policy::PolicyArgs),
    /// Undo what the bench made when it is gone (started by the bench)
    #[command(hide = true)]
    Janitor,
    /// Join a cgroup and become another program (started by the bench)
    #[command(hide = true)]
    Enter {
        #[arg(long)]
        cgroup: Option<PathBuf>,
        #[arg(required = true, last = true)]
        command: Vec<OsString>,
    },
}

#[derive(Args)]
struct Compare {
    #[command(flatten)]
    common: Common,
    /// Engines in the order of the table, the base first: none, kernel-zram, kernel-ram, kernel-file,
    /// kernel-device, pageout, pageout-file, pageout-device, pageout-mem, pageout-inline; umap:DIR and vmcache:DIR, their
    /// own benchmarks; those of pageout take options, as 'pageout:--swapin never'
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "kernel-zram,pageout")]
    engines: Vec<Engine>,
    /// Rounds; the order of engines alternates
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..))]
    rounds: u64,
    /// The workload fits in the memory: that nothing is swapped is no error
    #[arg(long)]
    fits: bool,
    /// Print what a program prints, on standard error
    #[arg(long)]
    show: bool,
    /// Workload and its options, as `pageout-bench work` takes them
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "WORK")]
    work: Vec<String>,
}

#[derive(Args)]
struct Asks {
    #[command(flatten)]
    common: Common,
    /// Rounds of each comparison
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..))]
    rounds: u64,
    /// Only comparisons whose names contain one of these, as seq,redis
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    only: Vec<String>,
}

#[derive(Args)]
struct Program {
    #[command(flatten)]
    common: Common,
    /// Engines, the base first
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "kernel-zram,pageout")]
    engines: Vec<Engine>,
    /// Rounds; the order of engines alternates
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..))]
    rounds: u64,
    /// The program fits in the memory: that nothing is swapped is no error
    #[arg(long)]
    fits: bool,
    /// Print what the program prints, on standard error
    #[arg(long)]
    show: bool,
    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "COMMAND")]
    command: Vec<String>,
}

/// What all comparing commands share.
#[derive(Args)]
struct Common {
    /// Resident memory that a workload may keep
    #[arg(short, long, value_name = "SIZE", default_value = "512M")]
    memory: Bytes,
    /// The pageout command; without it, the one beside this program
    #[arg(long, value_name = "PATH")]
    pageout: Option<PathBuf>,
    /// Where swap files on a disk go
    #[arg(long, value_name = "DIR", default_value = ".")]
    dir: PathBuf,
    /// The block device of kernel-device and pageout-device, made by mkswap and used by nobody
    #[arg(long, value_name = "PATH")]
    device: Option<PathBuf>,
    /// Swap space; without it, a quarter more than the workload's set
    #[arg(long, value_name = "SIZE")]
    swap_size: Option<Bytes>,
    /// The longest that one run may take: seconds, or 250ms
    #[arg(long, value_name = "TIME", default_value = "600", value_parser = parse_time)]
    time_limit: Duration,
    /// Write everything that was found as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

impl Common {
    fn setting(&self) -> Result<Setting> {
        let pageout = match &self.pageout {
            Some(path) => path.clone(),
            None => work::own_path()?.with_file_name("pageout"),
        };
        let dir = self.dir.canonicalize().with_context(|| format!("--dir {}", self.dir.display()))?;
        if let Some(file) = &self.json {
            let parent = file.parent().filter(|parent| *parent != Path::new("")).unwrap_or(Path::new("."));
            ensure!(parent.is_dir(), "--json {}: no such directory; name a file in one", file.display());
        }
        ensure!(self.memory.0 >= 16 << 20, "--memory {}: too little to run in; 16M at least", self.memory);
        Ok(Setting {
            memory: self.memory,
            dir,
            device: self.device.clone(),
            pageout,
            swap: self.swap_size,
            time_limit: self.time_limit,
            fits: false,
            show: false,
        })
    }
}

/// What a report has besides comparisons.
const BESIDE: [&str; 3] = ["slots", "ladder", "frag"];

/// The options of a command as they are when none is given.
fn defaults<A: Args>() -> A {
    let none = A::augment_args(clap::Command::new("")).get_matches_from([""]);
    A::from_arg_matches(&none).expect("every option has a default")
}

impl Compare {
    fn run(&self) -> Result<()> {
        let line = WorkLine::parse(&self.work).unwrap_or_else(|error| error.exit());
        let setting = Setting { fits: self.fits, show: self.show, ..self.common.setting()? };
        let machine = Machine::describe(&setting.dir)?;
        let comparison = compare(&line, &self.engines, self.rounds as usize, &setting)?;
        machine.lines().iter().for_each(|line| println!("{line}"));
        println!("{}", comparison.table());
        if let Some(file) = &self.common.json {
            Results::new(machine, vec![comparison]).write(file)?;
        }
        Ok(())
    }
}

impl Asks {
    fn wants(&self, plan: &str) -> bool {
        only::wants(&self.only, plan)
    }

    /// Makes all comparisons that are wanted. One that fails is said and left out.
    fn measure(&self) -> Result<Results> {
        let setting = self.common.setting()?;
        let plans = plans::all(setting.memory);
        let names: Vec<&str> = plans.iter().map(|plan| plan.id).chain(BESIDE).collect();
        only::check(&self.only, &names)?;
        let mut machine = Machine::describe(&setting.dir)?;
        machine.measure(&setting.dir)?;
        let (mut comparisons, mut failed) = (Vec::new(), Vec::new());
        for plan in plans.iter().filter(|plan| self.wants(plan.id)) {
            match plan.run(self.rounds as usize, &setting) {
                Ok(comparison) => comparisons.push(comparison),
                Err(error) => {
                    eprintln!("pageout-bench: {}: {error}", plan.id);
                    failed.push(format!("{}: {error}", plan.id));
                }
            }
        }
        Ok(Results { failed, ..Results::new(machine, comparisons) })
    }

    /// Writes what was found where `--json` says.
    fn keep(&self, results: &Results) -> Result<()> {
        self.common.json.as_ref().map_or(Ok(()), |file| results.write(file))
    }

    /// Makes the comparisons, and what else is on the page.
    fn measure_all(&self) -> Result<Results> {
        let mut results = self.measure()?;
        if self.wants("slots") {
            results.slots = slots::measure_all(&defaults())?;
        }
        if self.wants("ladder") {
            results.ladder = ladder::measure(&defaults())?;
        }
        if self.wants("frag") {
            results.frag = frag::measure(&defaults());
        }
        self.keep(&results)?;
        Ok(results)
    }

    /// Whether all asks are met.
    fn run(&self) -> Result<bool> {
        let results = self.measure()?;
        self.keep(&results)?;
        results.machine.lines().iter().for_each(|line| println!("{line}"));
        let verdicts = asks::judge(&results, |plan| self.wants(plan));
        print!("\n{}", asks::text(&verdicts));
        Ok(verdicts.iter().all(|verdict| verdict.met))
    }
}

impl Program {
    /// As the comparison of the workload `program`.
    fn into_compare(self) -> Compare {
        let work = ["program".into(), "--".into()].into_iter().chain(self.command.iter().cloned()).collect();
        let Program { common, engines, rounds, fits, show, .. } = self;
        Compare { common, engines, rounds, fits, show, work }
    }
}

/// Whether all runs came to a good end.
fn quick(common: &Common) -> Result<bool> {
    let setting = common.setting()?;
    let machine = Machine::describe(&setting.dir)?;
    let Quick { comparisons, table, complete } = quick::run(&setting)?;
    machine.lines().iter().for_each(|line| println!("{line}"));
    for comparison in &comparisons {
        let rounds = comparison.runs.first().map_or(0, |runs| runs.rounds.len());
        println!("{} in {}, medians of {rounds}", comparison.work, comparison.memory);
    }
    println!("\n{table}");
    if let Some(file) = &common.json {
        Results::new(machine, comparisons).write(file)?;
    }
    Ok(complete)
}

/// Runs the command; whether what it asks is so.
fn run(command: Verb) -> Result<bool> {
    match command {
        Verb::Work { work } => println!("{}", serde_json::to_string(&work.run()?)?),
        Verb::Slots(args) => slots::run(&args)?,
        Verb::Ladder(args) => ladder::run(&args)?,
        Verb::Frag(args) => frag::run(&args)?,
        Verb::Policy(args) => policy::run(&args)?,
        Verb::Janitor => janitor::run()?,
        Verb::Enter { cgroup, command } => engine::enter(cgroup.as_deref(), &command)?,
        Verb::Compare(compare) => compare.run()?,
        Verb::Program(program) => program.into_compare().run()?,
        Verb::Quick { common } => return quick(&common),
        Verb::Asks(asks) => return asks.run(),
        Verb::Report { asks, from, out } => {
            let results = from.map_or_else(|| asks.measure_all(), |file| Results::read(&file))?;
            report::write(&results, &out)?;
        }
    }
    Ok(true)
}

fn main() -> ExitCode {
    // In a thread that others wait for, too.
    let tell = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        tell(info);
        std::process::abort();
    }));
    match run(Cli::parse().command) {
        Ok(true) => ExitCode::SUCCESS,
        // As grep and diff have it: 1 is the answer no, 2 an error.
        Ok(false) => ExitCode::from(1),
        Err(error) => {
            eprintln!("pageout-bench: {error:#}");
            ExitCode::from(2)
        }
    }
}
