//! What the tables cost: on a sparse device of 16 TiB, of which next to nothing is used.
#![cfg(not(any(loom, shuttle)))]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use pageout::slot::*;

/// The system's memory, counted.
struct Counted;

// By thread: the tests run at the same time, and their harness asks for memory too.
thread_local! {
    static BYTES: Cell<usize> = const { Cell::new(0) };
    static CALLS: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: everything is passed on; counting touches no memory that is allocated.
unsafe impl GlobalAlloc for Counted {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        BYTES.set(BYTES.get().wrapping_add(layout.size()));
        CALLS.set(CALLS.get() + 1);
        // SAFETY: as the caller promised.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        BYTES.set(BYTES.get().wrapping_sub(layout.size()));
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
    let before = BYTES.get();
    let held = || BYTES.get().wrapping_sub(before);
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
    let calls = CALLS.get();
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
    assert_eq!(CALLS.get(), calls, "no memory is asked for on the common path");

    runs[8..].iter().for_each(|&run| _ = slots.put(run, CLUSTER_SLOTS).unwrap());
    slots.refill();
    let left = held() - unused - runs.capacity() * 8;
    println!("all free again: {left} bytes left, descriptors and tables at hand");
    assert!(left <= 5 * 4096 + (2 * 8 + 32) * 5000, "{left} bytes of tables stayed");

    // Counts that overflow have memory as long as they do.
    let run = slots.alloc(0, 4, owner(0)).unwrap();
    let plain = held();
    (0..300).for_each(|_| slots.dup(run, 16).unwrap());
    assert!(held() - plain <= 4 * CLUSTER_SLOTS + 8);
    (0..300).for_each(|_| _ = slots.put(run, 16).unwrap());
    assert_eq!(held(), plain);
    slots.put(run, 16).unwrap();
    assert!(slots.swapoff_begin(id));
    slots.swapoff_end(id).unwrap();
}

/// Parts of a huge entry are named, given up and freed one by one; what names one slot too few or too many changes nothing.
#[test]
fn s1_5_a_huge_entry_is_split_without_memory_and_cannot_fail() {
    let slots = Slots::new(1);
    let id = slots.swapon(DeviceConfig { first: 1, ..DeviceConfig::new(64 * TRUNK_SLOTS) }).unwrap();
    let run = slots.alloc(0, CLUSTER_ORDER, owner(0)).unwrap();
    let count = |slot: usize| slots.look(run.at(slot)).map(|(_, count)| count);
    let calls = CALLS.get();
    slots.dup(run.at(100), 12).unwrap();
    assert_eq!([99, 100, 111, 112].map(count), [Ok(1), Ok(2), Ok(2), Ok(1)]);
    slots.put(run.at(50), 1).unwrap();
    assert_eq!(slots.dup(run, CLUSTER_SLOTS), Err(DupError::Wrong(WrongEntry::FreeSlot(run.at(50)))));
    assert_eq!(slots.put(run, CLUSTER_SLOTS), Err(WrongEntry::FreeSlot(run.at(50))));
    assert_eq!([49, 51, 100, 511].map(count), [Ok(1), Ok(1), Ok(2), Ok(1)]);
    slots.put(run.at(100), 12).unwrap();
    (0..CLUSTER_SLOTS).filter(|&slot| slot != 50).for_each(|slot| _ = slots.put(run.at(slot), 1).unwrap());
    assert_eq!(CALLS.get(), calls, "memory was asked for");
    // An overflow in the middle takes memory of its own, for as long as it lasts.
    let run = slots.alloc(0, CLUSTER_ORDER, owner(0)).unwrap();
    let count = |slot: usize| slots.look(run.at(slot)).map(|(_, count)| count);
    (0..300).for_each(|_| slots.dup(run.at(200), 1).unwrap());
    slots.dup(run, CLUSTER_SLOTS).unwrap();
    assert_eq!([199, 200, 201].map(count), [Ok(2), Ok(302), Ok(2)]);
    (0..300).for_each(|_| _ = slots.put(run.at(200), 1).unwrap());
    (0..2).for_each(|_| _ = slots.put(run, CLUSTER_SLOTS).unwrap());
    assert_eq!(slots.usage(id).unwrap().used, 0);
}
