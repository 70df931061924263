//! The engine with real threads on the simulated kernel: two that answer faults, two evictors, one that adopts,
//! and a program. What they do is by seed; how they meet is not. `PAGEOUT_STRESS_MS` says how long a seed runs.

mod engine_support;

use engine_support::{seeds, OnFailure, World};

fn stress(seed: u64, inline: bool) {
    let world = World::of_threads(seed, inline);
    let _on_failure = OnFailure(&world);
    world.threads_meet(|| {});
    world.read_all();
    world.check();
}

#[test]
fn threads_that_meet() {
    for seed in seeds(5000, 10) {
        stress(seed, false);
    }
}

/// The same with threads that answer their own faults.
#[test]
fn threads_that_serve_themselves() {
    for seed in seeds(6000, 10) {
        stress(seed, true);
    }
}
