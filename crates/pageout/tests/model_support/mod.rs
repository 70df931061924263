//! Has loom try the ways in which the threads of a model can meet.
//!
//! Two threads are tried in full, one race a model; what several races make together, and three threads, with the bound on
//! preemptions that is given. `PAGEOUT_MODELS=short` bounds all of them. Each model has a twin that is told to make one
//! mistake and must fail.

#![allow(dead_code)]

use pageout::flaw::{ask, Flaw};
use std::panic::{catch_unwind, AssertUnwindSafe};

pub fn explore(bound: Option<usize>, model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    let short = std::env::var("PAGEOUT_MODELS").is_ok_and(|form| form == "short");
    builder.preemption_bound = if short { Some(bound.map_or(2, |bound| (bound - 1).min(2))) } else { bound };
    builder.max_branches = 100_000;
    let runs = std::sync::Arc::new(std::sync::atomic::AtomicU64::new(0));
    let count = runs.clone();
    builder.check(move || {
        count.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        model()
    });
    println!("{} schedules", runs.load(std::sync::atomic::Ordering::Relaxed));
}

/// The model passes, and fails when the allocator makes `flaw`.
pub fn passes_and_would_notice(flaw: Flaw, bound: Option<usize>, model: fn()) {
    let started = std::time::Instant::now();
    explore(bound, model);
    let took = started.elapsed();
    ask(Some(flaw));
    let noticed =
        catch_unwind(AssertUnwindSafe(|| explore(Some(bound.map_or(3, |bound| bound.min(3))), model)))
            .is_err();
    ask(None);
    println!("{flaw:?}: passed in {took:.1?}, noticed: {noticed}");
    assert!(noticed, "the model does not notice {flaw:?}");
}
