//! Which locks the engine takes: row S2.1. The counters are the process's, so there is one test.
#![cfg(not(any(loom, shuttle)))]

mod engine_support;

use engine_support::program::Habits;
use engine_support::{Plan, World};
use pageout::slot::{CLUSTER_LOCKS, DEVICE_LOCKS, LIST_LOCKS};
use pageout::space::{BLOCK_LOCKS, BLOCK_PAGES};
use std::sync::{Arc, Mutex};

/// Acquisitions of blocks' locks, and of all that the slots have.
fn taken() -> [u64; 2] {
    let slots = [&CLUSTER_LOCKS, &LIST_LOCKS, &DEVICE_LOCKS].map(|class| class.counts().0);
    [BLOCK_LOCKS.counts().0, slots.iter().sum()]
}

/// The write of 512 pages starts and ends without a lock: that they are on their way is in their own words. Afterwards
/// the lock of their block is taken once for all of them, and none of the slots'.
#[test]
fn s2_1_writeback_starts_and_ends_without_a_lock() {
    let plan = Plan {
        meanwhile: 0,
        nested: 0,
        partial: 0,
        short: 0,
        huge: 0,
        chunks: 25,
        slow: false,
        ..Plan::by_seed(2)
    };
    let plan = Plan {
        blocks: 1,
        rotational: false,
        limit_pages: 4096,
        slots: 16384,
        habits: Habits::ACCESS,
        ..plan
    };
    let world = World::new(plan, 1);
    world.program.lock().unwrap().zeros = false;
    world.adopt();
    world.engine.measure();
    world.program.lock().unwrap().start_touch(0, 0, BLOCK_PAGES, true);
    world.settle();
    // Before the write, and after it.
    let seen = Arc::new(Mutex::new(Vec::new()));
    let (first, second) = (seen.clone(), seen.clone());
    *world.at_device.lock().unwrap() = Some(Box::new(move |world: &World| {
        first.lock().unwrap().push(taken());
        *world.at_device.lock().unwrap() = Some(Box::new(move |_| second.lock().unwrap().push(taken())));
    }));
    let mut left = 0;
    while left == 0 {
        left = world.evict(512);
    }
    let after = taken();
    let seen = seen.lock().unwrap();
    assert_eq!((left, seen.len()), (BLOCK_PAGES, 2));
    assert_eq!(seen[0], seen[1], "locks were taken from the start of the write to its end");
    assert_eq!([after[0] - seen[1][0], after[1] - seen[1][1]], [1, 0], "to settle 512 pages");
    drop(seen);
    world.read_all();
    world.check();
}
