//! What a slot costs: `cargo bench -p pageout-bench --bench slots`.
//!
//! `batch/64` is an allocation of 64 slots and their freeing; divide by 64 for a slot. `order/9` is one
//! call of each. `threads/*` is what two threads take for the same work, with one allocator and with one each.

#![allow(missing_docs)] // what criterion's macros make

use std::hint::black_box;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use criterion::{criterion_group, criterion_main, Criterion};
use pageout::slot::*;

const BATCH: usize = 64;
/// Batches that a thread holds at a time, so that clusters fill and empty as they do in use.
const HELD: usize = 64;

fn slots(cpus: usize) -> Slots {
    let slots = Slots::new(cpus);
    let size = 64 * TRUNK_SLOTS;
    slots.swapon(DeviceConfig { first: 1, ..DeviceConfig::new(size) }).unwrap();
    slots
}

fn owner(i: usize) -> Owner {
    Owner { space: 1, page: i as u64 }
}

/// A thread's work: batches go round, the oldest is freed for each new one.
struct Work<'a> {
    slots: &'a Slots,
    cpu: usize,
    order: u8,
    held: Vec<Vec<Entry>>,
    next: usize,
}

impl<'a> Work<'a> {
    fn new(slots: &'a Slots, cpu: usize, order: u8, batch: usize) -> Self {
        let held = (0..HELD)
            .map(|_| {
                let mut entries = vec![Entry::INVALID; batch];
                assert_eq!(slots.alloc_batch(cpu, order, owner, &mut entries), batch);
                entries
            })
            .collect();
        Self { slots, cpu, order, held, next: 0 }
    }

    fn step(&mut self) {
        let entries = &mut self.held[self.next % HELD];
        self.next += 1;
        if self.order == 0 {
            self.slots.put_batch(entries).unwrap();
        } else {
            entries.iter().for_each(|&entry| _ = self.slots.put(entry, 1 << self.order).unwrap());
        }
        assert_eq!(self.slots.alloc_batch(self.cpu, self.order, owner, entries), entries.len());
        black_box(entries);
    }
}

fn single(c: &mut Criterion) {
    let all = slots(1);
    let mut work = Work::new(&all, 0, 0, BATCH);
    c.bench_function("batch/64", |b| b.iter(|| work.step()));
    let all = slots(1);
    let mut work = Work::new(&all, 0, 4, 1);
    c.bench_function("order/4", |b| b.iter(|| work.step()));
    let all = slots(1);
    let mut work = Work::new(&all, 0, 9, 1);
    c.bench_function("order/9", |b| b.iter(|| work.step()));
    let all = slots(1);
    let mut work = Work::new(&all, 0, 0, 1);
    c.bench_function("single/1", |b| b.iter(|| work.step()));
}

/// What two threads take for `rounds` steps each.
fn pair(each: [&Slots; 2], order: u8, rounds: u64) -> Duration {
    let start = Barrier::new(2);
    let run = |cpu: usize| {
        let mut work = Work::new(each[cpu], cpu, order, if order == 0 { BATCH } else { 1 });
        start.wait();
        let started = Instant::now();
        (0..rounds).for_each(|_| work.step());
        let took = started.elapsed();
        for mut entries in work.held {
            match order {
                0 => each[cpu].put_batch(&mut entries).unwrap(),
                _ => entries.iter().for_each(|&entry| _ = each[cpu].put(entry, 1 << order).unwrap()),
            }
        }
        took
    };
    std::thread::scope(|scope| {
        let other = scope.spawn(|| run(1));
        run(0).max(other.join().unwrap())
    })
}

fn threads(c: &mut Criterion) {
    for order in [0, 4, 9] {
        let (one, other) = (slots(2), slots(2));
        c.bench_function(&format!("threads/shared/{order}"), |b| {
            b.iter_custom(|n| pair([&one, &one], order, n))
        });
        c.bench_function(&format!("threads/own/{order}"), |b| {
            b.iter_custom(|n| pair([&one, &other], order, n))
        });
    }
    let counts = [("cluster", &CLUSTER_LOCKS), ("lists", &LIST_LOCKS), ("device", &DEVICE_LOCKS)];
    for (name, class) in counts {
        let (acquired, waited) = class.counts();
        eprintln!("{name} locks: {acquired} taken, {waited} waited for");
    }
}

criterion_group!(benches, single, threads);
criterion_main!(benches);
