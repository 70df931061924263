//! The rows S0, S2, S3 and S4: each behaviour of the slot allocator by its name.
#![cfg(not(any(loom, shuttle)))]

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};

use pageout::slot::*;

const PLAIN: DeviceConfig = DeviceConfig::new(TRUNK_SLOTS);

fn owner(page: u64) -> Owner {
    Owner { space: 1, page }
}

fn slots_with(cpus: usize, config: DeviceConfig) -> (Slots, DeviceId) {
    let slots = Slots::new(cpus);
    let id = slots.swapon(config).unwrap();
    (slots, id)
}

/// Takes runs of an order until there is none.
fn drain(slots: &Slots, cpu: usize, order: u8) -> Vec<Entry> {
    std::iter::from_fn(|| slots.alloc(cpu, order, owner(0))).collect()
}

#[test]
fn s0_1_wrong_entry_is_reported() {
    let (slots, id) = slots_with(1, DeviceConfig { slots: 1000, first: 1, ..PLAIN });
    let entry = slots.alloc(0, 0, owner(5)).unwrap();
    assert!(slots.look(entry).is_ok());
    let nowhere = Entry::new(DeviceId::new(9).unwrap(), 3);
    let beyond = Entry::new(id, 1000);
    assert_eq!(slots.look(nowhere), Err(WrongEntry::BadDevice(nowhere)));
    assert_eq!(slots.look(Entry::INVALID), Err(WrongEntry::BadDevice(Entry::INVALID)));
    assert_eq!(slots.look(beyond), Err(WrongEntry::BeyondEnd(beyond)));
    assert_eq!(slots.look(Entry::new(id, 0)), Err(WrongEntry::BadSlot(Entry::new(id, 0))));
    assert_eq!(slots.put(entry, 1), Ok(1));
    assert_eq!(slots.look(entry), Err(WrongEntry::FreeSlot(entry)));
    assert_eq!(slots.put(entry, 1), Err(WrongEntry::FreeSlot(entry)));
    assert_eq!(slots.dup(entry, 1), Err(DupError::Wrong(WrongEntry::FreeSlot(entry))));
    assert_eq!(
        format!("{}", WrongEntry::BeyondEnd(beyond)),
        "swap entry device 0 slot 1000: beyond the end of the device"
    );
}

#[test]
fn s0_2_counts_that_overflow_in_neighbours_share_nothing() {
    let (slots, _) = slots_with(1, PLAIN);
    let first = slots.alloc(0, CLUSTER_ORDER, owner(0)).unwrap();
    let second = slots.alloc(0, CLUSTER_ORDER, owner(1 << 20)).unwrap();
    assert_eq!(first.slot().abs_diff(second.slot()), CLUSTER_SLOTS as u64);
    std::thread::scope(|scope| {
        for (entry, more) in [(first, 1000), (second, 700)] {
            let slots = &slots;
            scope.spawn(move || {
                for _ in 0..more {
                    slots.dup(entry.at(3), 2).unwrap();
                }
                for _ in 0..more / 2 {
                    slots.put(entry.at(3), 2).unwrap();
                }
            });
        }
    });
    assert_eq!(slots.look(first.at(4)), Ok((owner(4), 501)));
    assert_eq!(slots.look(second.at(3)), Ok((owner((1 << 20) + 3), 351)));
    assert_eq!(slots.look(second.at(5)), Ok((owner((1 << 20) + 5), 1)));
    slots.audit();
    (0..501).for_each(|_| _ = slots.put(first.at(3), 2).unwrap());
    assert!(slots.look(first.at(3)).is_err() && slots.look(first.at(2)).is_ok());
    slots.audit();
}

#[test]
fn s0_2_counts_that_overflow_in_one_cluster_end_apart() {
    let (slots, id) = slots_with(1, PLAIN);
    let run = slots.alloc(0, CLUSTER_ORDER, owner(0)).unwrap();
    let counts = [(3, 300), (4, 700)];
    for (at, more) in counts {
        (0..more).for_each(|_| slots.dup(run.at(at), 1).unwrap());
    }
    for (at, more) in counts {
        (0..more).for_each(|_| assert_eq!(slots.put(run.at(at), 1), Ok(0)));
        assert_eq!(slots.look(run.at(at)), Ok((owner(at as u64), 1)));
        slots.audit();
        assert_eq!(slots.put(run.at(at), 1), Ok(1));
        assert!(slots.look(run.at(at)).is_err());
    }
    assert_eq!(slots.usage(id).unwrap().used, CLUSTER_SLOTS as u64 - 2);
    slots.audit();
}

#[test]
fn s0_4_what_nobody_names_is_not_read_ahead_and_new_slots_have_owners_at_once() {
    let (slots, id) = slots_with(2, PLAIN);
    let entries: Vec<Entry> = (0..16).map(|page| slots.alloc(0, 0, owner(page)).unwrap()).collect();
    entries.iter().step_by(2).for_each(|&entry| _ = slots.put(entry, 1).unwrap());
    let mut around = [Some(owner(99)); 20];
    assert_eq!(slots.look_around(entries[0], &mut around), Ok(20));
    for (i, seen) in around.into_iter().enumerate() {
        assert_eq!(seen, (i < 16 && i % 2 == 1).then(|| owner(i as u64)));
    }
    // A walk that meets slots in the moment they are given always learns whose they are.
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for page in 1..30_000 {
                let entry = slots.alloc(1, 0, owner(page)).unwrap();
                slots.put(entry, 1).unwrap();
            }
            stop.store(true, Ordering::Relaxed);
        });
        while !stop.load(Ordering::Relaxed) {
            let mut walk = slots.walk(id);
            while let Some((_, seen, count)) = slots.next_used(&mut walk) {
                assert!(seen.space == 1 && seen.page < 30_000 && count == 1);
            }
        }
    });
}

#[test]
fn s0_5_a_partial_batch_is_used() {
    let (slots, _) = slots_with(1, DeviceConfig { slots: 100, ..PLAIN });
    let mut out = [Entry::INVALID; 64];
    assert_eq!(slots.alloc_batch(0, 0, |i| owner(i as u64), &mut out), 64);
    assert!(out.iter().enumerate().all(|(i, &entry)| slots.look(entry) == Ok((owner(i as u64), 1))));
    out.fill(Entry::INVALID);
    assert_eq!(slots.alloc_batch(0, 0, |i| owner(i as u64), &mut out), 36);
    assert!(out[..36].iter().all(|&entry| slots.look(entry).is_ok()));
    assert!(out[36..].iter().all(|&entry| entry == Entry::INVALID));
    assert_eq!(slots.alloc_batch(0, 0, |i| owner(i as u64), &mut out), 0);
    assert_eq!(slots.alloc_batch(0, 0, |i| owner(i as u64), &mut []), 0);
}

#[test]
fn s0_6_a_batch_frees_all_that_is_right() {
    let (slots, id) = slots_with(1, PLAIN);
    let mut all = drain(&slots, 0, 0);
    all.sort_by_key(|entry| entry.slot().wrapping_mul(0x9e37_79b9) % 16381);
    let twice = all[5];
    all[6] = twice;
    assert_eq!(slots.put_batch(&mut all), Err(WrongEntry::FreeSlot(twice)));
    assert_eq!(slots.usage(id).unwrap().used, 1, "the one that was left out");
    assert_eq!(slots.put_batch(&mut []), Ok(()));
    slots.audit();
}

#[test]
fn s0_7_hints_own_nothing() {
    let (slots, id) = slots_with(4, DeviceConfig { slots: 4 * CLUSTER_SLOTS as u64, ..PLAIN });
    // Each CPU has a hint for some order somewhere.
    let first: Vec<Entry> = (0..4).map(|cpu| slots.alloc(cpu, cpu as u8, owner(0)).unwrap()).collect();
    let rest = drain(&slots, 3, 0);
    assert_eq!(rest.len(), 4 * CLUSTER_SLOTS - 1 - 2 - 4 - 8, "one CPU can have all that is left");
    for cpu in 0..4 {
        assert_eq!(slots.alloc(cpu, 0, owner(0)), None, "full is none, never a stale slot");
        assert_eq!(slots.alloc(cpu, 3, owner(0)), None);
    }
    slots.put(rest[17], 1).unwrap();
    assert_eq!(slots.alloc(0, 0, owner(1)), Some(rest[17]), "an empty hint is not a full device");
    assert_eq!(slots.usage(id).unwrap().used, 4 * CLUSTER_SLOTS as u64);
    slots.put(first[3], 8).unwrap();
    assert_eq!(slots.alloc(2, 3, owner(1)), Some(first[3]));
    slots.audit();
}

#[test]
fn s0_8_devices_and_threads_come_and_go_under_load() {
    let slots = Slots::new(2);
    let stays = slots.swapon(DeviceConfig { slots: TRUNK_SLOTS, ..PLAIN }).unwrap();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for cpu in 0..2 {
            let (slots, stop) = (&slots, &stop);
            scope.spawn(move || {
                let mut held: Vec<(Entry, u8, Owner)> = Vec::new();
                for page in 0.. {
                    let order = [0, 0, 4, 0, 9][page as usize % 5];
                    let owner = Owner { space: cpu as u16 + 1, page: page % 1000 * 512 };
                    if let Some(entry) = slots.alloc(cpu, order, owner) {
                        held.push((entry, order, owner));
                    }
                    // What lies on a device that leaves is brought home.
                    held.retain(|&(entry, order, owner)| {
                        let goes = entry.device() != Some(stays) || page % 3 == 0;
                        if goes {
                            assert_eq!(slots.look(entry), Ok((owner, 1)));
                            slots.put(entry, 1 << order).unwrap();
                        }
                        !goes
                    });
                    if stop.load(Ordering::Relaxed) {
                        break;
                    }
                }
                held.iter().for_each(|&(entry, order, _)| _ = slots.put(entry, 1 << order).unwrap());
            });
        }
        for _ in 0..60 {
            let id = slots.swapon(DeviceConfig { priority: 1, ..PLAIN }).unwrap();
            assert_ne!(id, stays);
            std::thread::sleep(std::time::Duration::from_millis(1));
            assert!(slots.swapoff_begin(id));
            let mut used = slots.usage(id).unwrap().used;
            loop {
                match slots.swapoff_end(id) {
                    Ok(()) => break,
                    Err(SwapoffError::InUse(now)) => {
                        assert!(now <= used, "use grew after the device stopped taking pages");
                        used = now;
                        std::thread::yield_now();
                    }
                    Err(other) => panic!("{other}"),
                }
            }
            assert_eq!(slots.look(Entry::new(id, 0)), Err(WrongEntry::BadDevice(Entry::new(id, 0))));
        }
        stop.store(true, Ordering::Relaxed);
    });
    assert_eq!(slots.usage(stays).unwrap().used, 0);
    slots.audit();
    assert!(slots.swapoff_begin(stays));
    assert_eq!(slots.alloc(0, 0, owner(0)), None, "no device is left");
    assert_eq!(slots.swapoff_end(stays), Ok(()));
    assert_eq!(slots.swapoff_end(stays), Err(SwapoffError::NoDevice));
}

#[test]
fn swapoff_can_be_given_up_and_taken_up_again() {
    let (slots, id) = slots_with(2, DeviceConfig { slots: 3 * TRUNK_SLOTS, first: 1, ..PLAIN });
    let entries: Vec<Entry> = (0..700).map(|page| slots.alloc(0, 0, owner(page)).unwrap()).collect();
    assert!(slots.swapoff_begin(id));
    assert_eq!(slots.alloc(0, 0, owner(0)), None);
    assert_eq!(slots.swapoff_end(id), Err(SwapoffError::InUse(700)));
    slots.swapoff_cancel(id);
    let again = slots.alloc(1, 9, owner(5)).expect("the device gives slots again");
    slots.put(again, 512).unwrap();
    assert!(slots.swapoff_begin(id));
    let mut walk = slots.walk(id);
    let mut pages = Vec::new();
    while let Some((entry, owner, count)) = slots.next_used(&mut walk) {
        assert_eq!((entries[owner.page as usize], count), (entry, 1));
        pages.push(owner.page);
        slots.put(entry, 1).unwrap();
    }
    pages.sort_unstable();
    assert!(pages.into_iter().eq(0..700), "each is met once");
    assert_eq!(slots.swapoff_end(id), Ok(()));
    slots.audit();
    let id = slots.swapon(DeviceConfig { slots: 1000, ..PLAIN }).unwrap();
    assert_eq!(drain(&slots, 1, 0).len(), 1000, "the number serves a smaller device now");
    assert_eq!(slots.usage(id).unwrap().used, 1000);
    slots.audit();
}

#[test]
fn priorities_come_first_and_equal_devices_take_turns() {
    let slots = Slots::new(1);
    let size = 8 * CLUSTER_SLOTS as u64;
    let on = |priority| slots.swapon(DeviceConfig { priority, slots: size, ..PLAIN }).unwrap();
    let (low, high, equal) = (on(1), on(5), on(5));
    let devices: Vec<DeviceId> =
        (0..24).map(|_| slots.alloc(0, CLUSTER_ORDER, owner(0)).unwrap().device().unwrap()).collect();
    assert!(devices[..16].chunks(2).all(|pair| pair.contains(&high) && pair.contains(&equal)), "{devices:?}");
    assert!(devices[16..].iter().all(|&device| device == low));
    assert_eq!(slots.alloc(0, CLUSTER_ORDER, owner(0)), None);
    assert_eq!(slots.alloc(0, 0, owner(0)), None);
    // A full device that has room again is back in its place.
    slots.put(Entry::new(high, 512), 512).unwrap();
    slots.put(Entry::new(low, 0), 512).unwrap();
    assert_eq!(slots.alloc(0, 0, owner(0)).unwrap().device(), Some(high));
}

#[test]
fn of_a_device_that_is_left_out_no_hint_is_followed() {
    let slots = Slots::new(1);
    let on = |priority| slots.swapon(DeviceConfig { priority, ..PLAIN }).unwrap();
    let (first, second) = (on(2), on(1));
    let alloc = |not: u64| slots.alloc_by(0, 0, owner(0), Memory::Asked, not).unwrap().device();
    let bit = |id: DeviceId| 1 << id.index();
    assert_eq!([0, bit(first), 0, bit(second)].map(alloc), [first, second, second, first].map(Some));
    assert_eq!(slots.alloc_by(0, 0, owner(0), Memory::Asked, bit(first) | bit(second)), Err(Lack::Slots));
}

#[test]
fn s3_1_on_an_aged_device_cpus_allocate_from_different_places() {
    // Aged by one CPU, so all clusters are listed together; and by each for itself.
    for aging_cpus in [1, 4] {
        let (slots, id) = slots_with(4, DeviceConfig { slots: 4 * TRUNK_SLOTS, ..PLAIN });
        let all: Vec<Entry> = (0..4 * TRUNK_SLOTS)
            .map(|i| slots.alloc(i as usize / 512 % aging_cpus, 0, owner(i)).unwrap())
            .collect();
        let (mut free, _): (Vec<Entry>, Vec<Entry>) = all.iter().partition(|entry| entry.slot() % 3 == 0);
        slots.put_batch(&mut free).unwrap();
        assert_eq!(slots.usage(id).unwrap().free_clusters, 0, "no cluster is free");
        let places: Vec<HashSet<u64>> = (0..4)
            .map(|cpu| {
                (0..100)
                    .map(|_| slots.alloc(cpu, 0, owner(0)).unwrap().slot() / CLUSTER_SLOTS as u64)
                    .collect()
            })
            .collect();
        for (cpu, place) in places.iter().enumerate() {
            assert!(places[..cpu].iter().all(|other| other.is_disjoint(place)), "{places:?}");
        }
        // Full is found out, and only then.
        let rest = (0..4).map(|cpu| drain(&slots, cpu, 0).len()).sum::<usize>();
        assert_eq!(rest, free.len() - 400);
        slots.audit();
    }
}

#[test]
fn s3_2_a_cpu_that_finishes_a_trunk_goes_to_another_of_the_device() {
    let trunks = 5;
    let (slots, _) = slots_with(3, DeviceConfig { slots: trunks * TRUNK_SLOTS - 7, ..PLAIN });
    let mut seen = vec![HashSet::new(); 3];
    for round in 0..trunks as usize * 32 {
        let cpu = round % 3;
        if let Some(entry) = slots.alloc(cpu, CLUSTER_ORDER, owner(0)) {
            assert!(entry.slot() + (CLUSTER_SLOTS as u64) < trunks * TRUNK_SLOTS);
            seen[cpu].insert(entry.slot() / TRUNK_SLOTS);
        }
    }
    assert!(seen.iter().all(|trunks| trunks.len() >= 2), "{seen:?}");
    assert!(seen[0].intersection(&seen[1]).count() <= 2, "CPUs meet only at the end: {seen:?}");
}

#[test]
fn s3_3_a_rotating_disk_has_one_shared_ascending_base() {
    let size = 2 * TRUNK_SLOTS + 300;
    let (slots, id) = slots_with(4, DeviceConfig { rotational: true, slots: size, first: 1, ..PLAIN });
    let entries: Vec<u64> =
        (0..size - 1).map(|i| slots.alloc(i as usize % 4, 0, owner(0)).unwrap().slot()).collect();
    assert!(entries.windows(2).all(|pair| pair[0] + 1 == pair[1]), "all CPUs follow one base");
    assert_eq!(slots.alloc(0, 0, owner(0)), None);
    // Aged: what is free in front of the base is taken ascending, then from the start again.
    for slot in (1..size).filter(|slot| slot % 5 == 0) {
        slots.put(Entry::new(id, slot), 1).unwrap();
    }
    let got: Vec<u64> = drain(&slots, 1, 0).iter().map(|entry| entry.slot()).collect();
    assert_eq!(got.len() as u64, (size - 1) / 5);
    assert_eq!(got.windows(2).filter(|pair| pair[0] > pair[1]).count(), 0, "one sweep");
    slots.audit();
}

#[test]
fn s3_3_larger_orders_ascend_too() {
    let (slots, _) = slots_with(2, DeviceConfig { rotational: true, slots: 3 * TRUNK_SLOTS, ..PLAIN });
    for order in [4, 9] {
        let got: Vec<u64> = (0..40).map(|i| slots.alloc(i % 2, order, owner(0)).unwrap().slot()).collect();
        assert!(got.windows(2).all(|pair| pair[0] + (1 << order) == pair[1]), "order {order}: {got:?}");
    }
    slots.audit();
}

/// Larger orders have left nothing that is free, but room in their clusters.
#[test]
fn s3_3_single_pages_of_a_rotating_disk_take_from_larger_orders() {
    let size = 2 * CLUSTER_SLOTS;
    let (slots, _) = slots_with(1, DeviceConfig { rotational: true, slots: size as u64, ..PLAIN });
    assert!(slots.alloc(0, 4, owner(0)).is_some() && slots.alloc(0, 5, owner(0)).is_some());
    assert_eq!(drain(&slots, 0, 0).len(), size - 16 - 32);
    slots.audit();
}

#[test]
fn s4_1_runs_of_any_order_are_aligned_and_within_a_cluster() {
    for order in 0..=CLUSTER_ORDER {
        let (slots, id) = slots_with(2, PLAIN);
        let got = drain(&slots, 1, order);
        assert_eq!(got.len() as u64, TRUNK_SLOTS >> order);
        let distinct: HashSet<Entry> = got.iter().copied().collect();
        assert_eq!(distinct.len(), got.len());
        assert!(got.iter().all(|entry| entry.slot() % (1 << order) == 0));
        assert_eq!(slots.usage(id).unwrap().used, TRUNK_SLOTS);
        slots.audit();
        for entry in got {
            slots.put(entry, 1 << order).unwrap();
        }
        assert_eq!(slots.usage(id).unwrap(), DeviceUsage { slots: TRUNK_SLOTS, used: 0, free_clusters: 32 });
        slots.audit();
        assert_eq!(slots.take_empty_trunk(id, 0), Some(0));
        assert_eq!(slots.alloc(0, 0, owner(0)), None);
        assert_eq!(slots.take_empty_trunk(id, 0), None);
        assert!(slots.add_trunk(id, 3) && !slots.add_trunk(id, 3));
        assert_eq!(slots.alloc(0, 9, owner(0)).unwrap().slot(), 3 * TRUNK_SLOTS);
    }
}

#[test]
fn trunks_of_any_size_come_and_go() {
    for trunk_clusters in [1, 2, 32] {
        let (slots, id) = slots_with(2, DeviceConfig { slots: 0, discard: true, trunk_clusters, ..PLAIN });
        let trunk = (trunk_clusters * CLUSTER_SLOTS) as u64;
        assert!((3..6).all(|number| slots.add_trunk(id, number)));
        let got = drain(&slots, 0, CLUSTER_ORDER);
        assert_eq!(got.len(), 3 * trunk_clusters);
        assert!(got.iter().all(|entry| (3 * trunk..6 * trunk).contains(&entry.slot())));
        assert_eq!(slots.take_empty_trunk(id, 0), None);
        // One slot is enough to keep a trunk; what waits for discard is not.
        let last = got.iter().filter(|entry| entry.slot() / trunk == 5).max().unwrap();
        for entry in &got {
            let used = usize::from(entry == last);
            slots.put(*entry, CLUSTER_SLOTS - used).unwrap();
        }
        assert_eq!(slots.usage(id).unwrap().used, 1);
        let left: Vec<Option<u32>> = [2, 1, 1, 0, 0].map(|kept| slots.take_empty_trunk(id, kept)).into();
        assert_eq!(left, [None, Some(3), None, Some(4), None]);
        assert_eq!(slots.take_discard(id).is_some(), trunk_clusters > 1);
        slots.audit();
    }
    let odd = |trunk_clusters| Slots::new(1).swapon(DeviceConfig { trunk_clusters, ..PLAIN });
    assert_eq!([0, 3, 64].map(odd), [Err(SwaponError::BadSize); 3]);
    let large = |first, slots| Slots::new(1).swapon(DeviceConfig { first, slots, ..PLAIN });
    assert_eq!(large(CLUSTER_SLOTS as u64, TRUNK_SLOTS), Err(SwaponError::BadSize));
    assert_eq!(large(0, MAX_SLOTS + 1), Err(SwaponError::BadSize));
}

/// The header is nobody's to lend, nor is what lies behind the end.
#[test]
fn a_trunk_that_the_header_or_the_end_cuts_short_stays() {
    let size = 3 * TRUNK_SLOTS - 7;
    let (slots, id) = slots_with(1, DeviceConfig { slots: size, first: 1, ..PLAIN });
    assert_eq!(slots.usage(id), Some(DeviceUsage { slots: size, used: 0, free_clusters: 96 }));
    // One that was never used, and none that was.
    assert_eq!([0; 2].map(|kept| slots.take_empty_trunk(id, kept)), [Some(1), None]);
    assert_eq!(slots.usage(id).unwrap().slots, size - TRUNK_SLOTS);
    let mut all = drain(&slots, 0, 0);
    assert_eq!(all.len() as u64, size - TRUNK_SLOTS - 1);
    slots.put_batch(&mut all).unwrap();
    assert_eq!(slots.take_empty_trunk(id, 0), None);
    slots.audit();
}

#[test]
fn a_number_comes_again_with_other_trunks() {
    let slots = Slots::new(2);
    for trunk_clusters in [32, 1, 8] {
        let slots_there = 32 * CLUSTER_SLOTS as u64;
        let id = slots.swapon(DeviceConfig { slots: slots_there, trunk_clusters, ..PLAIN }).unwrap();
        let got = drain(&slots, 0, CLUSTER_ORDER);
        assert_eq!(got.len(), 32);
        got.iter().for_each(|entry| _ = slots.put(*entry, CLUSTER_SLOTS).unwrap());
        let gone: Vec<u32> = std::iter::from_fn(|| slots.take_empty_trunk(id, 0)).collect();
        assert_eq!(gone.len(), 32 / trunk_clusters);
        slots.audit();
        assert!(slots.swapoff_begin(id));
        slots.swapoff_end(id).unwrap();
    }
}

#[test]
#[should_panic(expected = "larger than a cluster")]
fn s4_1_other_sizes_are_an_error_of_the_caller() {
    slots_with(1, PLAIN).0.alloc(0, CLUSTER_ORDER + 1, owner(0));
}

#[test]
fn s4_2_each_cpu_has_a_current_cluster_per_order() {
    let (slots, _) = slots_with(2, DeviceConfig { slots: 4 * TRUNK_SLOTS, ..PLAIN });
    let cluster = |cpu, order| slots.alloc(cpu, order, owner(0)).unwrap().slot() / CLUSTER_SLOTS as u64;
    let mut seen = HashSet::new();
    for cpu in 0..2 {
        for order in 0..=8 {
            let first = cluster(cpu, order);
            assert!(seen.insert(first), "a cluster serves one order and one CPU here");
            assert_eq!(cluster(cpu, order), first, "and goes on serving it");
        }
    }
    slots.audit();
}

#[test]
fn s4_3_without_a_free_cluster_the_lists_are_searched_before_a_run_is_refused() {
    let (slots, _) = slots_with(1, DeviceConfig { slots: 4 * CLUSTER_SLOTS as u64, ..PLAIN });
    let runs = drain(&slots, 0, 4);
    assert_eq!(slots.alloc(0, 4, owner(0)), None);
    // A hole in each of three clusters; none of them is the hint.
    for run in [5, 40, 70] {
        slots.put(runs[run], 16).unwrap();
    }
    let mut got = drain(&slots, 0, 4);
    got.sort();
    assert_eq!(got, [runs[5], runs[40], runs[70]]);
    // Holes too small for the order make a cluster fragmented, until they grow together.
    (0..16).step_by(2).for_each(|i| _ = slots.put(runs[9].at(i), 1).unwrap());
    assert_eq!(slots.alloc(0, 4, owner(0)), None);
    slots.audit();
    (1..16).step_by(2).for_each(|i| _ = slots.put(runs[9].at(i), 1).unwrap());
    assert_eq!(slots.alloc(0, 4, owner(0)), Some(runs[9]));
    slots.audit();
}

#[test]
fn s4_4_single_pages_take_from_larger_orders_last_and_from_fragmented_clusters_first() {
    let (slots, _) = slots_with(1, DeviceConfig { slots: 3 * CLUSTER_SLOTS as u64, ..PLAIN });
    let runs = drain(&slots, 0, 4);
    slots.put(runs[3], 16).unwrap(); // first cluster: nonfull
    slots.put(runs[40].at(2), 1).unwrap(); // second cluster: fragmented
    slots.put(runs[70], 16).unwrap();
    slots.put(runs[70 + 1], 8).unwrap();
    let single = slots.alloc(0, 0, owner(0)).unwrap();
    assert_eq!(single, runs[40].at(2), "from the fragmented one");
    assert_eq!(slots.alloc(0, 4, owner(0)).map(|run| run.slot() % 16), Some(0), "the large order goes on");
    let rest = drain(&slots, 0, 0);
    assert_eq!(rest.len(), 16 + 8, "and single pages have all that is left");
    assert_eq!(slots.alloc(0, 4, owner(0)), None, "which the owner of the cluster notices");
    slots.audit();
    // A cluster that was stolen from serves any order when it is empty.
    rest.iter().chain([&single]).for_each(|&entry| _ = slots.put(entry, 1).unwrap());
    slots.audit();
}

#[test]
fn s4_4_larger_orders_never_take_from_others() {
    let (slots, _) = slots_with(1, DeviceConfig { slots: 2 * CLUSTER_SLOTS as u64, ..PLAIN });
    slots.alloc(0, 0, owner(0)).unwrap();
    slots.alloc(0, 2, owner(0)).unwrap();
    assert_eq!(slots.alloc(0, 4, owner(0)), None, "the caller steps down");
    assert!(slots.alloc(0, 2, owner(0)).is_some());
}

#[test]
fn s4_5_a_cluster_being_discarded_is_nobodys() {
    let size = 3 * CLUSTER_SLOTS as u64;
    let (slots, id) = slots_with(1, DeviceConfig { discard: true, slots: size, ..PLAIN });
    assert_eq!(slots.take_discard(id), None);
    let runs = drain(&slots, 0, CLUSTER_ORDER);
    let single = {
        slots.put(runs[1], 512).unwrap();
        slots.alloc(0, 0, owner(0)).expect("one that waits for discard is as good as free")
    };
    slots.put(single, 1).unwrap();
    let cluster = slots.take_discard(id).unwrap();
    assert_eq!(cluster, runs[1]);
    assert_eq!(slots.take_discard(id), None, "once per cluster");
    assert_eq!(slots.alloc(0, 0, owner(0)), None, "on no list, and the hint that points there gives nothing");
    assert_eq!(slots.look(cluster), Err(WrongEntry::FreeSlot(cluster)));
    slots.audit();
    assert!(slots.swapoff_begin(id));
    runs.iter().filter(|&&run| run != cluster).for_each(|&run| _ = slots.put(run, 512).unwrap());
    assert_eq!(slots.swapoff_end(id), Err(SwapoffError::Discarding));
    slots.swapoff_cancel(id);
    slots.discarded(cluster);
    slots.discarded(cluster);
    assert_eq!(slots.alloc(0, 9, owner(0)), Some(cluster));
    slots.audit();
}

#[test]
fn s4_6_parts_of_a_run_are_counted_and_freed_alone() {
    let (slots, id) = slots_with(1, PLAIN);
    let run = slots.alloc(0, CLUSTER_ORDER, owner(1000)).unwrap();
    slots.put(run.at(100), 12).unwrap();
    assert_eq!(slots.usage(id).unwrap().used, 500);
    assert_eq!(slots.look(run.at(99)), Ok((owner(1099), 1)));
    assert_eq!(slots.put(run, 512), Err(WrongEntry::FreeSlot(run.at(100))));
    assert_eq!(slots.usage(id).unwrap().used, 500, "a wrong run changes nothing");
    slots.put(run, 100).unwrap();
    slots.put(run.at(112), 400).unwrap();
    assert_eq!(slots.usage(id).unwrap().free_clusters, 32);
    slots.audit();
}

#[test]
fn s4_7_one_allocator_for_all_orders_and_an_invalid_entry_by_that_name() {
    assert!(!Entry::INVALID.is_valid() && Entry::INVALID.device().is_none());
    assert_eq!(Entry::from_raw(0), None);
    assert_eq!(std::mem::size_of::<Option<Entry>>(), 8);
    let last = Entry::new(DeviceId::new(MAX_DEVICES - 1).unwrap(), MAX_SLOTS - 1);
    assert_eq!(last.raw() >> Entry::BITS, 0);
    assert_eq!(Entry::from_raw(last.raw()), Some(last));
    assert_eq!((last.slot(), last.offset_bytes()), (MAX_SLOTS - 1, (MAX_SLOTS - 1) * SLOT_BYTES));
    let (slots, _) = slots_with(1, PLAIN);
    for order in 0..=CLUSTER_ORDER {
        let mut out = [Entry::INVALID; 3];
        assert_eq!(slots.alloc_batch(0, order, |_| owner(0), &mut out), 3);
    }
    slots.audit();
}

#[test]
fn threads_share_one_device() {
    let (slots, id) = slots_with(2, DeviceConfig { slots: 4 * TRUNK_SLOTS, ..PLAIN });
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for cpu in 0..2 {
            let (slots, stop) = (&slots, &stop);
            scope.spawn(move || {
                let mut held = Vec::new();
                for round in 0..20_000u64 {
                    let order = (round % 10) as u8;
                    if let Some(entry) = slots.alloc(cpu, order, owner(round)) {
                        held.push((entry, order, round));
                    }
                    if held.len() > 100 {
                        let (entry, order, round) = held.swap_remove(round as usize * 7 % 100);
                        assert_eq!(slots.look(entry), Ok((owner(round), 1)));
                        slots.put(entry, 1 << order).unwrap();
                    }
                    if stop.load(Ordering::Relaxed) {
                        break;
                    }
                }
                for (entry, order, _) in held {
                    slots.put(entry, 1 << order).unwrap();
                }
            });
        }
    });
    assert_eq!(slots.usage(id).unwrap().used, 0);
}
