//! `pageout-bench ladder`: the steps of ten years of swap, from one lock for everything to what pageout
//! does, on the same work: pages go out and come back, by several threads. Beside the throughput stand
//! locks taken and waits per page, which hold on any machine.
//!
//! The old steps are each as short as they can be: what is theirs is which lock is taken when.

use std::array;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicU8, Ordering::Relaxed};
use std::sync::Barrier;
use std::time::{Duration, Instant};

use anyhow::{ensure, Result};
use clap::Args;
use pageout::slot::*;
use pageout::sync::{Guard, Lock};
use serde::{Deserialize, Serialize};

use crate::dist::Rng;
use crate::slots::lock_counts;

/// Pages that reclaim hands over at a time.
const BATCH: usize = 32;
/// Pages that a thread has out.
const OUT: usize = 128 * BATCH;
/// Slots that a CPU takes at a time, and frees that it puts by.
const SLOT_CACHE: usize = 64;

#[derive(Args)]
pub struct LadderArgs {
    /// How many threads
    #[arg(long, default_value_t = 2)]
    pub threads: usize,
    /// How long each figure may take, in seconds
    #[arg(long, default_value_t = 1.0)]
    pub seconds: f64,
}

/// One step on one device.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Row {
    pub step: String,
    pub aged: bool,
    pub pages_per_s: f64,
    locks_per_page: f64,
    waits_per_page: f64,
}

/// Prints the table.
pub fn run(args: &LadderArgs) -> Result<()> {
    print!("{}", text(&measure(args)?));
    Ok(())
}

/// Climbs it.
pub fn measure(args: &LadderArgs) -> Result<Vec<Row>> {
    ensure!((1..=256).contains(&args.threads), "--threads: 1 to 256");
    let threads = args.threads;
    let time = Duration::from_secs_f64(args.seconds / 10.0);
    let steps = [
        ("one lock", Step::ONE_LOCK),
        ("+ cluster lock", Step::CLUSTER_LOCK),
        ("+ split cache", Step::SPLIT_CACHE),
        ("+ slots by batch, per CPU", Step::SLOT_CACHES),
        ("+ scan base per CPU", Step::SCAN_BASES),
    ];
    let mut rows = Vec::new();
    for aged in [false, true] {
        for (name, step) in steps {
            rows.push(climb(name, aged, &Old::new(step, threads, aged), threads, time));
        }
        rows.push(climb("pageout", aged, &Shipped::new(threads, aged), threads, time));
    }
    Ok(rows)
}

/// The best of ten slices, so that other work on the machine does not decide.
fn climb(step: &str, aged: bool, design: &dyn Design, threads: usize, time: Duration) -> Row {
    let slices = (0..10).map(|_| {
        let before = counts();
        let (pages, pages_per_s) = work(design, threads, time);
        let after = counts();
        let per_page = |count: u64| count as f64 / pages as f64;
        Row {
            step: step.into(),
            aged,
            pages_per_s,
            locks_per_page: per_page(after.0 - before.0),
            waits_per_page: per_page(after.1 - before.1),
        }
    });
    slices.max_by(|a, b| a.pages_per_s.total_cmp(&b.pages_per_s)).expect("ten slices")
}

/// The table.
pub fn text(rows: &[Row]) -> String {
    let mut text = format!(
        "{:<28} {:>6} {:>9} {:>8} {:>10} {:>10}\n",
        "single pages out and in", "device", "Mpage/s", "change", "locks/page", "waits/1000"
    );
    for row in rows {
        let base =
            rows.iter().find(|base| base.aged == row.aged).map_or(row.pages_per_s, |base| base.pages_per_s);
        let _ = writeln!(
            text,
            "{:<28} {:>6} {:>9.2} {:>+7.0}% {:>10.3} {:>10.3}",
            row.step,
            if row.aged { "aged" } else { "fresh" },
            row.pages_per_s / 1e6,
            100.0 * (row.pages_per_s / base - 1.0),
            row.locks_per_page,
            row.waits_per_page * 1e3,
        );
    }
    text
}

/// How a page gets a place to go to, and gives it back.
trait Design: Sync {
    /// Pages go out: each gets a slot and is found under it until it is written. Fills `slots`.
    fn out(&self, cpu: usize, slots: &mut [u64]);
    /// Pages come back: each is looked for, and its slot is free.
    fn back(&self, cpu: usize, slots: &mut [u64]);
}

/// The locks of the old steps; those of pageout count for themselves.
static OLD_LOCKS: LockClass = LockClass::new();

fn counts() -> (u64, u64) {
    let (old, new) = (OLD_LOCKS.counts(), lock_counts());
    (old.0 + new.0, old.1 + new.1)
}

fn device_slots(threads: usize) -> usize {
    (threads * OUT * 4).next_multiple_of(CLUSTER_SLOTS * 64)
}

/// Which slots an aged device has in use: five of eight, scattered.
fn is_aged(slot: u64) -> bool {
    Rng::new(slot).next() % 8 < 5
}

/// Each step has what the ones before it have.
#[derive(Clone, Copy, PartialEq, PartialOrd)]
struct Step(u8);

impl Step {
    const ONE_LOCK: Self = Self(0);
    const CLUSTER_LOCK: Self = Self(1);
    const SPLIT_CACHE: Self = Self(2);
    const SLOT_CACHES: Self = Self(3);
    const SCAN_BASES: Self = Self(4);
}

/// What a CPU has to itself; under a lock, since threads move.
#[derive(Default)]
struct PerCpu {
    slots: Vec<u64>,
    freed: Vec<u64>,
    base: usize,
}

/// The designs of 2016 to 2020.
struct Old {
    step: Step,
    /// Guards allocation, and the shared place where it goes on; in the first step the counts too.
    device: Lock<usize>,
    clusters: Box<[Lock<()>]>,
    counts: Box<[AtomicU8]>,
    /// Pages on their way, by slot: one tree, or one for each 64 MiB.
    cache: Box<[Lock<BTreeMap<u64, u64>>]>,
    cpus: Box<[Lock<PerCpu>]>,
}

impl Old {
    fn new(step: Step, threads: usize, aged: bool) -> Self {
        let slots = device_slots(threads);
        let lock = |_| Lock::new((), &OLD_LOCKS);
        let trees = if step >= Step::SPLIT_CACHE { slots.div_ceil(TRUNK_SLOTS as usize) } else { 1 };
        let base = |cpu| PerCpu { base: cpu * slots / threads, ..PerCpu::default() };
        Self {
            step,
            device: Lock::new(0, &OLD_LOCKS),
            clusters: (0..slots / CLUSTER_SLOTS).map(lock).collect(),
            counts: (0..slots as u64).map(|slot| AtomicU8::new((aged && is_aged(slot)).into())).collect(),
            cache: (0..trees).map(|_| Lock::new(BTreeMap::new(), &OLD_LOCKS)).collect(),
            cpus: (0..threads).map(|cpu| Lock::new(base(cpu), &OLD_LOCKS)).collect(),
        }
    }

    fn tree(&self, slot: u64) -> Guard<'_, BTreeMap<u64, u64>> {
        self.cache[slot as usize / TRUNK_SLOTS as usize % self.cache.len()].lock()
    }

    /// Changes a count under the lock that guards it in this step.
    fn count(&self, slot: u64, by: i8) {
        let cluster =
            (self.step >= Step::CLUSTER_LOCK).then(|| self.clusters[slot as usize / CLUSTER_SLOTS].lock());
        let device = cluster.is_none().then(|| self.device.lock());
        let count = &self.counts[slot as usize];
        count.store(count.load(Relaxed).wrapping_add_signed(by), Relaxed);
        drop((cluster, device));
    }

    /// Slots from the device, one after another from a base on, under its lock.
    fn take(&self, base: Option<&mut usize>, n: usize, slots: &mut Vec<u64>) {
        let mut device = self.device.lock();
        let base = base.unwrap_or(&mut device);
        let wanted = slots.len() + n;
        for _ in 0..self.counts.len() {
            if slots.len() == wanted {
                break;
            }
            let slot = *base;
            *base = (slot + 1) % self.counts.len();
            if self.counts[slot].load(Relaxed) == 0 {
                let _cluster =
                    (self.step >= Step::CLUSTER_LOCK).then(|| self.clusters[slot / CLUSTER_SLOTS].lock());
                self.counts[slot].store(1, Relaxed);
                slots.push(slot as u64);
            }
        }
    }

    /// A slot by the cache of the CPU, which owns what it holds, or from the device.
    fn alloc(&self, cpu: usize) -> u64 {
        let mut one = Vec::new();
        if self.step >= Step::SLOT_CACHES {
            let mut own = self.cpus[cpu].lock();
            let PerCpu { slots, base, .. } = &mut *own;
            if slots.is_empty() {
                self.take((self.step >= Step::SCAN_BASES).then_some(base), SLOT_CACHE, slots);
            }
            one.extend(slots.pop());
        } else {
            self.take(None, 1, &mut one);
        }
        one.pop().expect("the device is large enough")
    }

    fn free(&self, cpu: usize, slot: u64) {
        if self.step < Step::SLOT_CACHES {
            // The cluster may be free now, which the device's lists are told.
            let told = (self.step >= Step::CLUSTER_LOCK).then(|| self.device.lock());
            drop(told);
            return self.count(slot, -1);
        }
        let mut own = self.cpus[cpu].lock();
        own.freed.push(slot);
        if own.freed.len() == SLOT_CACHE {
            let _device = self.device.lock();
            own.freed.drain(..).for_each(|slot| self.count(slot, -1));
        }
    }
}

impl Design for Old {
    fn out(&self, cpu: usize, slots: &mut [u64]) {
        for slot in slots {
            *slot = self.alloc(cpu);
            self.tree(*slot).insert(*slot, cpu as u64);
            // The page table names the slot from now on; when it is written the page leaves the cache.
            self.count(*slot, 1);
            self.tree(*slot).remove(slot);
            self.count(*slot, -1);
        }
    }

    fn back(&self, cpu: usize, slots: &mut [u64]) {
        for slot in slots {
            let cached = self.tree(*slot).contains_key(slot);
            if !cached {
                self.tree(*slot).insert(*slot, cpu as u64);
            }
            self.tree(*slot).remove(slot);
            self.free(cpu, *slot);
        }
    }
}

/// What pageout does: batches, and a word per page for the cache.
struct Shipped {
    slots: Slots,
    device: DeviceId,
    /// A page's word says where it is; here by slot, as one page has one slot.
    words: Box<[AtomicU64]>,
}

impl Shipped {
    fn new(threads: usize, aged: bool) -> Self {
        let slots = Slots::new(threads);
        let size = device_slots(threads);
        let config = DeviceConfig::new(size as u64);
        let device = slots.swapon(config).expect("a first device");
        if aged {
            let owner = |_| Owner { space: 0, page: 0 };
            let mut all = vec![Entry::INVALID; size];
            let got = slots.alloc_batch(0, 0, owner, &mut all);
            all.truncate(got);
            all.retain(|entry| !is_aged(entry.slot()));
            slots.put_batch(&mut all).expect("slots in use");
        }
        Self { slots, device, words: (0..size).map(|_| AtomicU64::new(0)).collect() }
    }
}

impl Design for Shipped {
    fn out(&self, cpu: usize, slots: &mut [u64]) {
        let mut entries = [Entry::INVALID; BATCH];
        let owner = |i: usize| Owner { space: cpu as u16, page: i as u64 };
        let got = self.slots.alloc_batch(cpu, 0, owner, &mut entries[..slots.len()]);
        assert_eq!(got, slots.len(), "the device is large enough");
        for (slot, entry) in slots.iter_mut().zip(entries) {
            *slot = entry.slot();
            let word = &self.words[*slot as usize];
            // Cached while it is written, then swapped.
            let _ = word.compare_exchange(0, 1, Relaxed, Relaxed);
            let _ = word.compare_exchange(1, 2, Relaxed, Relaxed);
        }
    }

    fn back(&self, _: usize, slots: &mut [u64]) {
        let mut entries: [Entry; BATCH] = array::from_fn(|_| Entry::INVALID);
        for (entry, slot) in entries.iter_mut().zip(&*slots) {
            let word = &self.words[*slot as usize];
            let _ = word.compare_exchange(2, 1, Relaxed, Relaxed);
            let _ = word.compare_exchange(1, 0, Relaxed, Relaxed);
            *entry = Entry::new(self.device, *slot);
        }
        self.slots.put_batch(&mut entries[..slots.len()]).expect("slots in use");
    }
}

/// Lets each thread send pages out and bring the oldest back; returns the pages that went round, and how
/// many a second.
fn work(design: &dyn Design, threads: usize, time: Duration) -> (u64, f64) {
    let (ready, stop) = (Barrier::new(threads + 1), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads)
            .map(|cpu| {
                let (ready, stop) = (&ready, &stop);
                scope.spawn(move || {
                    let mut held = vec![[0; BATCH]; OUT / BATCH];
                    held.iter_mut().for_each(|slots| design.out(cpu, slots));
                    ready.wait();
                    let mut pages = 0;
                    for at in (0..held.len()).cycle() {
                        design.back(cpu, &mut held[at]);
                        design.out(cpu, &mut held[at]);
                        pages += BATCH as u64;
                        if stop.load(Relaxed) {
                            break;
                        }
                    }
                    held.iter_mut().for_each(|slots| design.back(cpu, slots));
                    pages
                })
            })
            .collect();
        ready.wait();
        let started = Instant::now();
        std::thread::sleep(time);
        stop.store(true, Relaxed);
        let took = started.elapsed();
        let pages = workers.into_iter().map(|worker| worker.join().expect("a worker")).sum::<u64>();
        (pages, pages as f64 / took.as_secs_f64())
    })
}
