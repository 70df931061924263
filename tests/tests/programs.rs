//! Real programs give the same output in a quarter of their memory, and cost nothing when they fit.
//!
//! ```text
//! cargo test --release -p pageout-tests --test programs                        # small, as in CI
//! PAGEOUT_TESTS_FULL=1 cargo test --release -p pageout-tests --test programs   # 1 to 1.5 GiB each
//! cargo test --release -p pageout-tests --test programs -- redis               # some
//! ```
//!
//! `PAGEOUT_BIN` names another `pageout` to test. What a test needs and the machine lacks is named as
//! the reason why it was skipped; `tests/setup` installs it.

#[path = "../src/programs/mod.rs"]
mod programs;

use anyhow::Result;
use libtest_mimic::{Arguments, Completion, Failed, Trial};
use programs::{overhead, Bench, Size};
use std::path::Path;
use std::process::ExitCode;
use std::sync::{Arc, OnceLock};

/// So slow in a quarter of their memory that CI has no time for them, or bound to a time that a busy machine
/// exceeds: they touch their memory at random, and a fault costs more than the kernel's own. Run with `PAGEOUT_TESTS_SLOW=1`, or in full.
const SLOW: [&str; 3] = ["overhead::processor-time", "perl", "mimalloc-perl"];

/// Made by the first test that runs, so that listing the tests builds nothing.
type Shared = Arc<OnceLock<Result<Bench, String>>>;

fn trial(
    name: &str,
    shared: &Shared,
    size: Size,
    missing: Vec<&'static str>,
    body: impl FnOnce(&Bench) -> Result<()> + Send + 'static,
) -> Trial {
    let shared = shared.clone();
    let asked =
        ["PAGEOUT_TESTS_FULL", "PAGEOUT_TESTS_SLOW"].iter().any(|name| std::env::var_os(name).is_some());
    let skipped = !asked && SLOW.contains(&name);
    Trial::ignorable_test(name, move || {
        if let Some(reason) = programs::unsupported() {
            return Ok(Completion::ignored_with(reason));
        }
        if skipped {
            return Ok(Completion::ignored_with("slow; PAGEOUT_TESTS_SLOW=1 runs it"));
        }
        if !missing.is_empty() {
            return Ok(Completion::ignored_with(format!("{} not installed", missing.join(", "))));
        }
        let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join("programs");
        let bench = shared.get_or_init(|| Bench::new(&directory, size).map_err(|error| format!("{error:#}")));
        let bench = bench.as_ref().map_err(Failed::from)?;
        body(bench).map_err(|error| Failed::from(format!("{error:#}")))?;
        Ok(Completion::Completed)
    })
}

fn main() -> ExitCode {
    let mut arguments = Arguments::from_args();
    // One at a time: each run is measured, and its processes are told by being the only ones.
    arguments.test_threads = Some(1);
    let size = Size::from_env();
    let shared = Shared::default();
    let mut trials = vec![
        trial("overhead::start-up", &shared, size, Vec::new(), overhead::start_up),
        trial("overhead::short-processes", &shared, size, Vec::new(), overhead::short_processes),
        trial("overhead::processor-time", &shared, size, Vec::new(), overhead::processor_time),
    ];
    for program in programs::all(size) {
        let name = program.name();
        let missing = program.missing();
        trials.push(trial(name, &shared, size, missing, move |bench| programs::check(&program, bench)));
    }
    let conclusion = libtest_mimic::run(&arguments, trials);
    programs::report::print();
    conclusion.exit_code()
}
