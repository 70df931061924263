//! The engine with real threads on the simulated kernel: two that answer faults, two evictors, one that adopts,
//! and a program. What they do is by seed; how they meet is not. `PAGEOUT_STRESS_MS` says how long a seed runs.

mod engine_support;

use engine_support::{seeds, OnFailure, Plan, World};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

/// Sets the flag when its thread panics, so that the others end and the failure is seen.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            self.0.store(true, Relaxed);
        }
    }
}

/// Works until the flag is set.
fn until(stop: &AtomicBool, work: impl Fn()) {
    let _stop = Stop(stop);
    while !stop.load(Relaxed) {
        work();
        thread::yield_now();
    }
}

fn stress(seed: u64) {
    let plan = Plan::by_seed(seed);
    let plan = Plan { meanwhile: 0, nested: 0, real: true, chunks: plan.chunks.max(8), ..plan };
    let world = World::new(plan, seed);
    let _on_failure = OnFailure(&world);
    world.adopt();
    world.engine.measure();
    let time = std::env::var("PAGEOUT_STRESS_MS").ok().and_then(|ms| ms.parse().ok()).unwrap_or(100);
    let end = Instant::now() + Duration::from_millis(time);
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let world = &world;
        let stop = &stop;
        for _ in 0..2 {
            scope.spawn(move || until(stop, || world.serve()));
            scope.spawn(move || {
                until(stop, || {
                    world.balance();
                    world.evict(512);
                })
            });
        }
        scope.spawn(move || {
            until(stop, || {
                world.engine.measure();
                world.adopt();
                world.engine.kernel.advance(100_000_000);
            })
        });
        while Instant::now() < end && !stop.load(Relaxed) {
            let mut program = world.program.lock().unwrap();
            for _ in 0..64 {
                program.step(&world.engine.kernel);
            }
            drop(program);
            thread::yield_now();
        }
        // The calls under way end while the servers still work.
        world.program.lock().unwrap().ending = true;
        let patience = Instant::now() + Duration::from_secs(10);
        while !stop.load(Relaxed) && Instant::now() < patience {
            let mut program = world.program.lock().unwrap();
            if program.idle() {
                break;
            }
            program.step(&world.engine.kernel);
        }
        stop.store(true, Relaxed);
    });
    world.read_all();
    world.check();
}

#[test]
fn threads_that_meet() {
    for seed in seeds(5000, 10) {
        stress(seed);
    }
}
