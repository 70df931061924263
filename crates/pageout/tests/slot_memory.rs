//! What the tables cost: on a sparse device of 16 TiB, of which next to nothing is used.
#![cfg(not(any(loom, shuttle)))]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use pageout::slot::*;

/// The system's memory, counted.
struct Counted;

static BYTES: AtomicUsize = AtomicUsize::new(0);
static CALLS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: everything is passed on; counting touches no memory that is allocated.
unsafe impl GlobalAlloc for Counted {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        BYTES.fetch_add(layout.size(), Relaxed);
        CALLS.fetch_add(1, Relaxed);
        // SAFETY: as the caller promised.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        BYTES.fetch_sub(layout.size(), Relaxed);
        // SAFETY: as the caller promised.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static COUNTED: Counted = Counted;

fn owner(page: u64) -> Owner {
    Owner { space: 1, page }
}

#[test]
fn tables_come_with_use_and_go_with_it() {
    let before = BYTES.load(Relaxed);
    let held = || BYTES.load(Relaxed) - before;
    let slots = Slots::new(2);
    let size = (16u64 << 40) / SLOT_BYTES;
    let config = DeviceConfig { first: 1, ..DeviceConfig::new(size) };
    let id = slots.swapon(config).unwrap();
    let unused = held();
    println!("16T, nothing used: {unused} bytes, {:.6} a slot", unused as f64 / size as f64);
    assert!(unused as f64 <= 0.01 * size as f64);

    // A few trunks in use, cluster by cluster.
    let clusters = 4 * TRUNK_CLUSTERS;
    let runs: Vec<Entry> = (0..clusters).map(|_| slots.alloc(0, CLUSTER_ORDER, owner(0)).unwrap()).collect();
    let used = clusters * CLUSTER_SLOTS;
    let tables = held() - unused - runs.capacity() * 8;
    println!("{used} slots used: {tables} bytes, {:.3} a slot", tables as f64 / used as f64);
    assert!(tables <= 16 * used);

    // The common path asks for nothing.
    let calls = CALLS.load(Relaxed);
    let mut batch = [Entry::INVALID; 64];
    for run in &runs[..8] {
        slots.put(*run, CLUSTER_SLOTS).unwrap();
    }
    for round in 0..1000 {
        assert_eq!(slots.alloc_batch(0, 0, |i| owner(i as u64), &mut batch), 64);
        slots.dup(batch[round % 64], 1).unwrap();
        slots.put(batch[round % 64], 1).unwrap();
        slots.put_batch(&mut batch).unwrap();
        let run = slots.alloc(0, 4, owner(0)).unwrap();
        slots.put(run, 16).unwrap();
    }
    assert_eq!(CALLS.load(Relaxed), calls, "no memory is asked for on the common path");

    runs[8..].iter().for_each(|&run| slots.put(run, CLUSTER_SLOTS).unwrap());
    slots.refill();
    let left = held() - unused - runs.capacity() * 8;
    println!("all free again: {left} bytes left, descriptors and tables at hand");
    assert!(left <= 5 * 4096 + (2 * 8 + 32) * 5000, "{left} bytes of tables stayed");

    // Counts that overflow have memory as long as they do.
    let run = slots.alloc(0, 4, owner(0)).unwrap();
    let plain = held();
    (0..300).for_each(|_| slots.dup(run, 16).unwrap());
    assert!(held() - plain <= 4 * CLUSTER_SLOTS + 8);
    (0..300).for_each(|_| slots.put(run, 16).unwrap());
    assert_eq!(held(), plain);
    slots.put(run, 16).unwrap();
    assert!(slots.swapoff_begin(id));
    slots.swapoff_end(id).unwrap();
}
