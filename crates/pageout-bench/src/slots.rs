//! `pageout-bench slots`: allocating and freeing slots, by threads that share an allocator and by as many
//! that have one each, so that what the machine's shared parts cost cancels out of the ratio.
//!
//! Both ways run in short slices in turn. The rates are those of the best slices, so that other work on the machine
//! does not decide; the ratio is the median of those of slices that follow each other, as the machine may become
//! slower or faster for a while. One allocator each is measured twice: by as much as the two differ, the ratio may be
//! off by chance.

use std::fmt::Write as _;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::Barrier;
use std::time::{Duration, Instant};

use anyhow::{ensure, Context, Result};
use clap::Args;
use pageout::slot::*;
use serde::{Deserialize, Serialize};

use crate::dist::Rng;
use crate::table::summary;

/// Slots that a thread holds at a time: two clusters' worth, or two runs.
const HELD_SLOTS: usize = 2 * CLUSTER_SLOTS;
/// What a thread allocates and frees at a time, in runs.
const BATCH: usize = 64;
/// Classes of locks.
const CLASSES: usize = 3;
/// The trunks of a device for each thread.
const TRUNKS_EACH: u64 = 8;

#[derive(Args)]
pub struct SlotsArgs {
    /// Numbers of threads
    #[arg(long, value_delimiter = ',', default_value = "1,2,4,8,16")]
    pub threads: Vec<usize>,
    /// Orders of the runs
    #[arg(long, value_delimiter = ',', default_value = "0,4,9")]
    pub orders: Vec<u8>,
    /// How long each figure may take, in seconds
    #[arg(long, default_value_t = 1.0)]
    pub seconds: f64,
}

/// Prints the table.
pub fn run(args: &SlotsArgs) -> Result<()> {
    print!("{}", text(&measure_all(args)?));
    Ok(())
}

/// All that is asked for.
pub fn measure_all(args: &SlotsArgs) -> Result<Vec<Row>> {
    ensure!(args.orders.iter().all(|&order| order <= CLUSTER_ORDER), "--orders: at most {CLUSTER_ORDER}");
    ensure!(args.threads.iter().all(|n| (1..=256).contains(n)), "--threads: 1 to 256");
    let time = Duration::try_from_secs_f64(args.seconds).context("--seconds")?;
    let mut rows = Vec::new();
    for &threads in &args.threads {
        for &order in &args.orders {
            for aged in [false, true] {
                rows.push(measure(threads, order, aged, time));
            }
        }
    }
    Ok(rows)
}

/// The table.
pub fn text(rows: &[Row]) -> String {
    let mut text = format!(
        "{:>7} {:>5} {:>6} {:>10} {:>10} {:>7} {:>7} {:>27} {:>26}\n",
        "threads",
        "order",
        "device",
        "shared",
        "own",
        "ratio",
        "chance",
        "locks taken/1000 slots",
        "waits/1M allocations"
    );
    let classes = ["cluster", "lists", "device"].map(|class| format!("{class:>8}")).concat();
    let _ =
        writeln!(text, "{:>31} {:>10} {:>7} {:>7}    {classes}   {classes}", "Mslot/s", "Mslot/s", "%", "%");
    for row in rows {
        let _ = write!(
            text,
            "{:>7} {:>5} {:>6} {:>10.1} {:>10.1} {:>7.1} {:>7.1}    ",
            row.threads,
            row.order,
            if row.aged { "aged" } else { "fresh" },
            row.shared / 1e6,
            row.own / 1e6,
            100.0 * row.ratio,
            100.0 * row.chance,
        );
        let columns = |values: [f64; CLASSES]| values.map(|value| format!("{value:>8.1}")).concat();
        let _ = writeln!(text, "{}   {}", columns(row.locks_per_thousand), columns(row.waits_per_million));
    }
    text
}

/// So many threads with runs of one order on one device.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Row {
    threads: usize,
    order: u8,
    aged: bool,
    /// Slots a second, allocated and freed, by all threads together.
    shared: f64,
    own: f64,
    /// Of the one to the other, and of the other to itself.
    #[serde(default)]
    ratio: f64,
    #[serde(default)]
    chance: f64,
    /// By class: clusters, lists, devices.
    locks_per_thousand: [f64; CLASSES],
    waits_per_million: [f64; CLASSES],
}

fn measure(threads: usize, order: u8, aged: bool, time: Duration) -> Row {
    let one = [allocator(threads, threads, aged)];
    let each: Vec<Slots> = (0..threads).map(|_| allocator(threads, 1, aged)).collect();
    let slice = Duration::from_millis(20);
    let slices = (time.as_secs_f64() / slice.as_secs_f64() / 3.0).ceil().max(5.0) as usize;
    let (mut shared, mut own, mut again) = (Vec::new(), Vec::new(), Vec::new());
    let (mut locks, mut waits, mut slots) = ([0; CLASSES], [0; CLASSES], 0);
    for _ in 0..slices {
        let before = class_counts();
        let (done, rate) = work(&one, threads, order, slice);
        for (class, (after, before)) in class_counts().into_iter().zip(before).enumerate() {
            locks[class] += after.0 - before.0;
            waits[class] += after.1 - before.1;
        }
        slots += done;
        shared.push(rate);
        own.push(work(&each, threads, order, slice).1);
        again.push(work(&each, threads, order, slice).1);
    }
    Row {
        threads,
        order,
        aged,
        ratio: ratio(&shared, &own),
        chance: ratio(&again, &own),
        shared: best(shared),
        own: best(own),
        locks_per_thousand: locks.map(|locks| locks as f64 * 1e3 / slots as f64),
        waits_per_million: waits.map(|waits| waits as f64 * 1e6 / (slots >> order) as f64),
    }
}

/// The mean of the best tenth.
fn best(mut rates: Vec<f64>) -> f64 {
    rates.sort_unstable_by(|a, b| b.total_cmp(a));
    let n = rates.len().div_ceil(10);
    rates[..n].iter().sum::<f64>() / n as f64
}

/// The median ratio of slices that follow each other.
fn ratio(rates: &[f64], to: &[f64]) -> f64 {
    let ratios = rates.iter().zip(to).map(|(rate, to)| rate / to).collect();
    summary(ratios).expect("slices").median
}

/// Locks taken, and waited for, by class.
fn class_counts() -> [(u64, u64); CLASSES] {
    [&CLUSTER_LOCKS, &LIST_LOCKS, &DEVICE_LOCKS].map(|class| class.counts())
}

/// The same of all.
pub fn lock_counts() -> (u64, u64) {
    class_counts().into_iter().fold((0, 0), |sum, class| (sum.0 + class.0, sum.1 + class.1))
}

/// An allocator with room for `threads`; an aged one has one slot in eight used, all over, but for whole
/// clusters here and there.
fn allocator(cpus: usize, threads: usize, aged: bool) -> Slots {
    let slots = Slots::new(cpus);
    let size = TRUNKS_EACH * threads as u64 * TRUNK_SLOTS;
    let config = DeviceConfig { first: 1, ..DeviceConfig::new(size) };
    slots.swapon(config).expect("a first device");
    if aged {
        let owner = |i| Owner { space: 0, page: i as u64 };
        let mut all = vec![Entry::INVALID; size as usize];
        let mut random = Rng::new(7);
        let mut done = 0;
        while done < all.len() {
            let cpu = random.next() as usize % cpus;
            let end = (done + BATCH).min(all.len());
            match slots.alloc_batch(cpu, 0, owner, &mut all[done..end]) {
                0 => break,
                n => done += n,
            }
        }
        all.truncate(done);
        let stays = |entry: &Entry| {
            let cluster = entry.slot() / CLUSTER_SLOTS as u64;
            cluster % 4 != 0 && Rng::new(entry.slot()).next() % 8 == 0
        };
        all.retain(|entry| !stays(entry));
        random.shuffle(&mut all);
        all.chunks_mut(BATCH).for_each(|chunk| slots.put_batch(chunk).expect("slots in use"));
    }
    slots
}

/// Lets each thread allocate and free for a while; returns the slots that went round, and how many a second. The time
/// is that of all: where there are more threads than CPUs each has only a part of it.
fn work(each: &[Slots], threads: usize, order: u8, time: Duration) -> (u64, f64) {
    let (ready, stop) = (Barrier::new(threads + 1), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads)
            .map(|cpu| {
                let (slots, ready, stop) = (&each[cpu % each.len()], &ready, &stop);
                scope.spawn(move || worker(slots, cpu, order, ready, stop))
            })
            .collect();
        ready.wait();
        let started = Instant::now();
        std::thread::sleep(time);
        stop.store(true, Relaxed);
        let took = started.elapsed();
        let done = workers.into_iter().map(|worker| worker.join().expect("a worker")).sum::<u64>();
        (done, done as f64 / took.as_secs_f64())
    })
}

fn worker(slots: &Slots, cpu: usize, order: u8, ready: &Barrier, stop: &AtomicBool) -> u64 {
    let batch = if order == 0 { BATCH } else { 1 };
    let owner = |i| Owner { space: cpu as u16, page: i as u64 };
    let rounds = (HELD_SLOTS >> order) / batch;
    let mut held = vec![[Entry::INVALID; BATCH]; rounds];
    let mut got = vec![0; rounds];
    let put = |entries: &mut [Entry]| match order {
        0 => slots.put_batch(entries).expect("slots in use"),
        _ => entries.iter().for_each(|&entry| _ = slots.put(entry, 1 << order).expect("a run in use")),
    };
    for (held, got) in held.iter_mut().zip(&mut got) {
        *got = slots.alloc_batch(cpu, order, owner, &mut held[..batch]);
    }
    ready.wait();
    let mut done = 0;
    'work: loop {
        for (held, got) in held.iter_mut().zip(&mut got) {
            if stop.load(Relaxed) {
                break 'work;
            }
            put(&mut held[..*got]);
            *got = slots.alloc_batch(cpu, order, owner, &mut held[..batch]);
            done += (*got as u64) << order;
        }
    }
    held.iter_mut().zip(got).for_each(|(held, got)| put(&mut held[..got]));
    done
}
