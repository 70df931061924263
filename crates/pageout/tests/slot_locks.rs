//! Which locks are taken, and how often: rows S0.3, S0.5, S0.6 and the limit on waits. The counters are
//! the process's, so the tests here take turns.
#![cfg(not(any(loom, shuttle)))]

use std::sync::{Mutex, MutexGuard};

use pageout::slot::*;

static TURN: Mutex<()> = Mutex::new(());

fn turn() -> MutexGuard<'static, ()> {
    TURN.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Acquisitions of cluster locks, and of all others that the allocator has.
fn taken() -> (u64, u64) {
    (CLUSTER_LOCKS.counts().0, LIST_LOCKS.counts().0 + DEVICE_LOCKS.counts().0)
}

fn owner(page: u64) -> Owner {
    Owner { space: 1, page }
}

fn slots(cpus: usize) -> Slots {
    let slots = Slots::new(cpus);
    let config = DeviceConfig { first: 1, ..DeviceConfig::new(8 * TRUNK_SLOTS) };
    slots.swapon(config).unwrap();
    slots
}

#[test]
fn s0_3_looking_at_a_slot_takes_its_clusters_lock_alone() {
    let _turn = turn();
    let slots = slots(1);
    let mut out = [Entry::INVALID; 1000];
    assert_eq!(slots.alloc_batch(0, 0, owner_of, &mut out), 1000);
    let before = taken();
    for &entry in &out {
        slots.look(entry).unwrap();
    }
    let after = taken();
    assert_eq!((after.0 - before.0, after.1 - before.1), (1000, 0));
}

fn owner_of(i: usize) -> Owner {
    owner(i as u64)
}

#[test]
fn s0_6_each_cluster_is_locked_once_for_a_batch() {
    let _turn = turn();
    let slots = slots(1);
    let mut out = vec![Entry::INVALID; 4 * CLUSTER_SLOTS];
    let got = slots.alloc_batch(0, 0, owner_of, &mut out);
    assert_eq!(got, out.len());
    let mut batch: Vec<Entry> = out.iter().copied().step_by(37).collect();
    batch.sort_by_key(|entry| entry.slot().wrapping_mul(0x9e37_79b9) % 65_521);
    let clusters: std::collections::HashSet<u64> =
        batch.iter().map(|entry| entry.slot() / CLUSTER_SLOTS as u64).collect();
    let before = taken();
    slots.put_batch(&mut batch).unwrap();
    assert_eq!(taken().0 - before.0, clusters.len() as u64);
}

#[test]
fn s0_5_a_batch_within_a_cluster_takes_one_lock() {
    let _turn = turn();
    let slots = slots(1);
    let mut out = [Entry::INVALID; 64];
    slots.alloc(0, 0, owner(0)).unwrap();
    let before = taken();
    assert_eq!(slots.alloc_batch(0, 0, owner_of, &mut out), 64);
    let after = taken();
    assert_eq!((after.0 - before.0, after.1 - before.1), (1, 0), "the hint, and nothing shared");
}

#[test]
fn a_full_device_leaves_and_returns_without_a_lock_that_all_share() {
    let _turn = turn();
    let slots = slots(2);
    let config = |priority| DeviceConfig { priority, ..DeviceConfig::new(2 * CLUSTER_SLOTS as u64) };
    let (high, higher) = (slots.swapon(config(1)).unwrap(), slots.swapon(config(2)).unwrap());
    let mut full = vec![Entry::INVALID; 4 * CLUSTER_SLOTS];
    assert_eq!(slots.alloc_batch(0, 0, owner_of, &mut full), full.len());
    // Nobody looks at the two that are full.
    assert!(slots.alloc(0, 0, owner(0)).is_some());
    let before = (DEVICE_LOCKS.counts().0, taken());
    for page in 0..100 {
        let entry = slots.alloc(0, 0, owner(page)).unwrap();
        assert!(![Some(high), Some(higher)].contains(&entry.device()));
    }
    assert_eq!((DEVICE_LOCKS.counts().0, taken().0), (before.0, before.1 .0 + 100), "a cluster's lock each");
    // They return: the cluster's lock, that of its own list, and no other.
    let (one, other) = (full[3], *full.last().unwrap());
    let before = taken();
    slots.put(one, 1).unwrap();
    slots.put(other, 1).unwrap();
    assert_eq!((taken().0 - before.0, taken().1 - before.1), (2, 2));
    let back = [slots.alloc(1, 0, owner(0)), slots.alloc(1, 0, owner(0))];
    assert_eq!(back, [Some(one), Some(other)], "the higher one first");
}

#[test]
fn fewer_than_one_allocation_in_10000_waits() {
    let _turn = turn();
    let slots = slots(2);
    let classes = [&CLUSTER_LOCKS, &LIST_LOCKS, &DEVICE_LOCKS];
    let waits = || classes.iter().map(|class| class.counts().1).sum::<u64>();
    let before = waits();
    let rounds = 20_000;
    std::thread::scope(|scope| {
        for cpu in 0..2 {
            let slots = &slots;
            scope.spawn(move || {
                let mut held = vec![[Entry::INVALID; 64]; 32];
                for round in 0..rounds {
                    let batch = &mut held[round % 32];
                    if round >= 32 {
                        slots.put_batch(batch).unwrap();
                    }
                    assert_eq!(slots.alloc_batch(cpu, 0, owner_of, batch), 64);
                    let run = slots.alloc(cpu, 4, owner(0)).unwrap();
                    slots.put(run, 16).unwrap();
                }
            });
        }
    });
    let (waits, allocations) = (waits() - before, 2 * rounds as u64 * 2);
    assert!(waits * 10_000 < allocations, "{waits} of {allocations} allocations waited");
}
