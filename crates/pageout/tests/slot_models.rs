//! Models of the slot allocator: loom tries the ways in which threads can meet.
//!
//! `RUSTFLAGS="--cfg loom" cargo test --release -p pageout --test slot_models`; see `model_support`.
#![cfg(loom)]

mod model_support;

use loom::sync::Arc;
use loom::thread;
use model_support::passes_and_would_notice;
use pageout::flaw::Flaw;
use pageout::slot::*;

const CLUSTER: u64 = CLUSTER_SLOTS as u64;

fn owner(page: u64) -> Owner {
    Owner { space: 1, page }
}

fn slots_with(cpus: usize, slots: u64) -> (Arc<Slots>, DeviceId) {
    let all = Slots::new(cpus);
    let id = all.swapon(DeviceConfig::new(slots)).unwrap();
    (Arc::new(all), id)
}

/// The slot word: of two who put the last count of a slot one is told that it was free.
#[test]
fn slot_word() {
    passes_and_would_notice(Flaw::PutInTwo, None, || {
        let (slots, _) = slots_with(1, CLUSTER);
        let entry = slots.alloc(0, 0, owner(1)).unwrap();
        let _other = slots.alloc(0, 0, owner(2)).unwrap();
        let other = slots.clone();
        let thread = thread::spawn(move || other.put(entry, 1).is_ok());
        let here = slots.put(entry, 1).is_ok();
        assert!(here != thread.join().unwrap(), "freed once");
        slots.audit();
    });
}

/// The cluster: slots of one cluster freed and taken at once leave it where it belongs.
#[test]
fn cluster() {
    passes_and_would_notice(Flaw::MoveUnlocked, None, || {
        let (slots, _) = slots_with(1, CLUSTER);
        let pair = slots.alloc(0, 1, owner(1)).unwrap();
        let second = slots.alloc(0, 1, owner(3)).unwrap();
        let other = slots.clone();
        let thread = thread::spawn(move || other.put(pair, 2).unwrap());
        slots.put(second, 2).unwrap();
        let got = slots.alloc(0, 1, owner(5));
        thread.join().unwrap();
        assert!(got.is_some());
        slots.audit();
    });
}

/// Hints: one that holds no longer gives nothing.
#[test]
fn hints() {
    passes_and_would_notice(Flaw::HintBelieved, None, || {
        let (slots, id) = slots_with(1, CLUSTER);
        let single = slots.alloc(0, 0, owner(1)).unwrap();
        let other = slots.clone();
        let thread = thread::spawn(move || {
            other.put(single, 1).unwrap();
            other.alloc(0, 1, owner(2))
        });
        let got = slots.alloc(0, 0, owner(4));
        let pair = thread.join().unwrap();
        assert!(got.is_some() && (pair.is_none() || pair != got));
        assert!(slots.swapoff_begin(id));
        assert_eq!(slots.alloc(0, 0, owner(4)), None, "the hint is of a device that is off");
        slots.audit();
    });
}

/// Lists, and whether a device is full: a single page finds the slot that is free.
#[test]
fn lists() {
    passes_and_would_notice(Flaw::FullUnsure, None, || {
        let (slots, _) = slots_with(2, CLUSTER);
        let whole = slots.alloc(0, CLUSTER_ORDER, owner(1)).unwrap();
        let other = slots.clone();
        let thread = thread::spawn(move || other.put(whole, 1).unwrap());
        let got = slots.alloc(1, 0, owner(9));
        thread.join().unwrap();
        slots.audit();
        let got = got.or_else(|| slots.alloc(1, 0, owner(9)));
        assert_eq!(got, Some(whole), "no slot hides");
        slots.audit();
    });
}

/// The last cluster that waits for discard is allocated from while the device is to be told: one of the two has it.
#[test]
fn discards() {
    passes_and_would_notice(Flaw::DiscardUnsure, None, || {
        let all = Slots::new(1);
        let id = all.swapon(DeviceConfig { discard: true, ..DeviceConfig::new(CLUSTER) }).unwrap();
        let slots = Arc::new(all);
        let first = slots.alloc(0, 0, owner(1)).unwrap();
        slots.put(first, 1).unwrap();
        let other = slots.clone();
        let thread = thread::spawn(move || other.alloc(0, 0, owner(2)));
        let told = slots.take_discard(id);
        let got = thread.join().unwrap();
        assert!(told.is_some() != got.is_some(), "{told:?} {got:?}");
        told.into_iter().for_each(|told| slots.discarded(told));
        slots.audit();
    });
}

/// A device that goes while somebody allocates the first of its slots: it stays, or gives none.
#[test]
fn device_off() {
    passes_and_would_notice(Flaw::OffAtOnce, None, || {
        let (slots, id) = slots_with(1, CLUSTER);
        let other = slots.clone();
        let thread = thread::spawn(move || other.alloc(0, 0, owner(2)));
        assert!(slots.swapoff_begin(id));
        let left = slots.swapoff_end(id);
        let got = thread.join().unwrap();
        assert_eq!(left, if got.is_some() { Err(SwapoffError::InUse(1)) } else { Ok(()) });
        if let Some(got) = got {
            slots.put(got, 1).unwrap();
            assert_eq!(slots.swapoff_end(id), Ok(()));
        }
        slots.audit();
    });
}

/// A device's last slot is put while it goes: it stays, or the slot was free.
#[test]
fn device_gone() {
    passes_and_would_notice(Flaw::EndUnsure, None, || {
        let (slots, id) = slots_with(1, CLUSTER);
        let entry = slots.alloc(0, 0, owner(1)).unwrap();
        assert!(slots.swapoff_begin(id));
        let other = slots.clone();
        let thread = thread::spawn(move || other.put(entry, 1));
        let left = slots.swapoff_end(id);
        assert_eq!(thread.join().unwrap(), Ok(1), "a slot of a device that went");
        let again = slots.swapoff_end(id);
        assert_eq!(again, if left.is_ok() { Err(SwapoffError::NoDevice) } else { Ok(()) });
        slots.audit();
    });
}

/// A trunk comes while somebody looks for room: whoever looks next finds it.
#[test]
fn device_on() {
    passes_and_would_notice(Flaw::FullUnsure, None, || {
        let slots = Arc::new(Slots::new(1));
        let id = slots.swapon(DeviceConfig::new(0)).unwrap();
        let other = slots.clone();
        let thread = thread::spawn(move || assert!(other.add_trunk(id, 0)));
        let got = slots.alloc(0, 0, owner(1));
        thread.join().unwrap();
        slots.audit();
        assert!(got.is_some() || slots.alloc(0, 0, owner(1)).is_some());
    });
}

/// A device that is on its way off goes, and another comes under its number, while somebody allocates: no slot is of the
/// old one, and room on the new one is not overlooked afterwards.
#[test]
fn device_back() {
    passes_and_would_notice(Flaw::OnUnseen, None, || {
        let (slots, id) = slots_with(1, CLUSTER);
        let entry = slots.alloc(0, 0, owner(1)).unwrap();
        slots.put(entry, 1).unwrap();
        assert!(slots.swapoff_begin(id));
        let other = slots.clone();
        let thread = thread::spawn(move || other.alloc(0, 0, owner(2)));
        assert_eq!(slots.swapoff_end(id), Ok(()));
        assert_eq!(slots.swapon_as(id, DeviceConfig::new(2 * CLUSTER)), Ok(()));
        if let Some(got) = thread.join().unwrap() {
            assert_eq!(slots.look(got), Ok((owner(2), 1)));
        }
        slots.audit();
    });
}

/// The trunk that comes is used for the first time by two at once, who look for room from before it came.
#[test]
fn trunk_comes() {
    passes_and_would_notice(Flaw::AdoptTwice, Some(3), || {
        let slots = Arc::new(Slots::new(2));
        let id = slots.swapon(DeviceConfig::new(0)).unwrap();
        let other = slots.clone();
        let thread = thread::spawn(move || {
            assert!(other.add_trunk(id, 0));
            other.alloc(1, 0, owner(1))
        });
        let got = slots.alloc(0, 0, owner(2));
        let there = thread.join().unwrap();
        assert!(there.is_some(), "who brought the trunk finds room in it");
        assert_ne!(got, there);
        slots.audit();
    });
}

/// All of it under one allocation: a device stops, goes, and another comes under its number. A slot is of the one that
/// is there.
#[test]
fn device_again() {
    passes_and_would_notice(Flaw::EndUnsure, Some(3), || {
        let (slots, id) = slots_with(1, CLUSTER);
        let other = slots.clone();
        let thread = thread::spawn(move || other.alloc(0, 0, owner(2)));
        assert_eq!(slots.swapon_as(id, DeviceConfig::new(CLUSTER)), Err(SwaponError::TooManyDevices));
        assert!(slots.swapoff_begin(id));
        let again = slots.swapoff_end(id).is_ok();
        if again {
            assert_eq!(slots.swapon_as(id, DeviceConfig::new(2 * CLUSTER)), Ok(()));
        }
        let got = thread.join().unwrap();
        assert!(again || got.is_some(), "what kept the device from going is the slot that was given");
        if let Some(got) = got {
            assert_eq!(slots.look(got), Ok((owner(2), 1)));
            slots.put(got, 1).unwrap();
        }
        assert!(slots.swapoff_begin(id));
        assert_eq!(slots.swapoff_end(id), Ok(()));
        slots.audit();
    });
}

/// The same with one that has a header, when somebody is about to use the first trunk: the cluster that is cut short had no table.
#[test]
fn device_again_with_header() {
    passes_and_would_notice(Flaw::TablesUnsure, Some(3), || {
        let slots = Arc::new(Slots::new(1));
        let id = slots.swapon(DeviceConfig::new(TRUNK_SLOTS)).unwrap();
        let other = slots.clone();
        let thread = thread::spawn(move || {
            assert!(other.swapoff_begin(id));
            if other.swapoff_end(id).is_ok() {
                let with_header = DeviceConfig { first: 1, ..DeviceConfig::new(TRUNK_SLOTS) };
                assert_eq!(other.swapon_as(id, with_header), Ok(()));
            }
        });
        let got = slots.alloc(0, 0, owner(1));
        thread.join().unwrap();
        slots.audit();
        if let Some(got) = got {
            slots.put(got, 1).unwrap();
        }
        slots.audit();
    });
}

/// Counts that overflow at once in one cluster are all kept.
#[test]
fn overflow() {
    passes_and_would_notice(Flaw::ContinuedTwice, None, || {
        let (slots, _) = slots_with(1, CLUSTER);
        let pair = slots.alloc(0, 1, owner(1)).unwrap();
        slots.dup(pair, 2).unwrap();
        let other = slots.clone();
        let thread = thread::spawn(move || other.dup(pair, 1).unwrap());
        slots.dup(pair.at(1), 1).unwrap();
        thread.join().unwrap();
        assert_eq!(slots.look(pair), Ok((owner(1), 3)));
        assert_eq!(slots.look(pair.at(1)), Ok((owner(2), 3)));
        slots.audit();
        for _ in 0..3 {
            slots.put(pair, 2).unwrap();
        }
        slots.audit();
    });
}

/// A trunk is handed back while somebody wants a slot of it.
#[test]
fn trunk_goes() {
    passes_and_would_notice(Flaw::TrunkUnsure, None, || {
        let (slots, id) = slots_with(1, TRUNK_SLOTS);
        let entry = slots.alloc(0, 0, owner(1)).unwrap();
        slots.put(entry, 1).unwrap();
        let other = slots.clone();
        let thread = thread::spawn(move || other.take_empty_trunk(id, 0));
        let got = slots.alloc(0, 0, owner(2));
        let gone = thread.join().unwrap();
        assert!(gone.is_none() || got.is_none(), "a slot of a trunk that went");
        slots.audit();
    });
}

/// A trunk is handed back and comes again while somebody wants a slot of it: there is one when it is back.
#[test]
fn trunk_goes_and_comes() {
    passes_and_would_notice(Flaw::FullUnsure, Some(3), || {
        let (slots, id) = slots_with(1, TRUNK_SLOTS);
        let entry = slots.alloc(0, 0, owner(1)).unwrap();
        slots.put(entry, 1).unwrap();
        let other = slots.clone();
        let thread = thread::spawn(move || {
            if let Some(trunk) = other.take_empty_trunk(id, 0) {
                assert!(other.add_trunk(id, trunk));
            }
        });
        let got = slots.alloc(0, 0, owner(2));
        thread.join().unwrap();
        slots.audit();
        assert!(got.is_some() || slots.alloc(0, 0, owner(3)).is_some(), "no slot hides");
    });
}

/// The last slot of a trunk is put while it is handed back.
#[test]
fn trunk_empties() {
    passes_and_would_notice(Flaw::TrunkUnsure, None, || {
        let (slots, id) = slots_with(1, TRUNK_SLOTS);
        let entry = slots.alloc(0, 0, owner(1)).unwrap();
        let other = slots.clone();
        let thread = thread::spawn(move || other.take_empty_trunk(id, 0));
        slots.put(entry, 1).unwrap();
        let got = slots.alloc(0, 0, owner(2));
        let gone = thread.join().unwrap();
        assert!(gone.is_none() || got.is_none(), "a slot of a trunk that went");
        slots.audit();
    });
}

/// Three who put a slot that has two names: two of them are told that there was one.
#[test]
fn slot_word_of_three() {
    passes_and_would_notice(Flaw::PutInTwo, Some(2), || {
        let (slots, _) = slots_with(1, CLUSTER);
        let entry = slots.alloc(0, 0, owner(1)).unwrap();
        let _other = slots.alloc(0, 0, owner(2)).unwrap();
        slots.dup(entry, 1).unwrap();
        let put = |slots: &Arc<Slots>| {
            let slots = slots.clone();
            thread::spawn(move || slots.put(entry, 1).is_ok())
        };
        let (second, third) = (put(&slots), put(&slots));
        let puts = [slots.put(entry, 1).is_ok(), second.join().unwrap(), third.join().unwrap()];
        assert_eq!(puts.into_iter().filter(|put| *put).count(), 2, "freed once");
        slots.audit();
    });
}

/// A cluster is freed while two CPUs look for a slot: there is room for both.
#[test]
fn lists_of_three() {
    passes_and_would_notice(Flaw::MoveUnlocked, Some(2), || {
        let (slots, _) = slots_with(2, CLUSTER);
        let pair = slots.alloc(0, 1, owner(1)).unwrap();
        let second = slots.alloc(0, 1, owner(3)).unwrap();
        let put = |entry| {
            let slots = slots.clone();
            thread::spawn(move || slots.put(entry, 2).unwrap())
        };
        let (one, other) = (put(pair), put(second));
        let got = slots.alloc(1, 0, owner(9));
        one.join().unwrap();
        other.join().unwrap();
        slots.audit();
        assert!(got.is_none_or(|got| slots.look(got) == Ok((owner(9), 1))));
        assert!(slots.alloc(1, 0, owner(9)).is_some(), "no slot hides");
        slots.audit();
    });
}

/// Counts of three that overflow at once in one cluster are all kept.
#[test]
fn overflow_of_three() {
    passes_and_would_notice(Flaw::ContinuedTwice, Some(2), || {
        let (slots, _) = slots_with(1, CLUSTER);
        let pair = slots.alloc(0, 1, owner(1)).unwrap();
        slots.dup(pair, 2).unwrap();
        let dup = |entry| {
            let slots = slots.clone();
            thread::spawn(move || slots.dup(entry, 1).unwrap())
        };
        let (one, other) = (dup(pair), dup(pair));
        slots.dup(pair.at(1), 1).unwrap();
        one.join().unwrap();
        other.join().unwrap();
        assert_eq!(slots.look(pair), Ok((owner(1), 4)));
        assert_eq!(slots.look(pair.at(1)), Ok((owner(2), 3)));
        slots.audit();
    });
}

/// Three threads that allocate, free and switch off: the device goes when nothing of it is in use, not before.
#[test]
fn device_of_three() {
    passes_and_would_notice(Flaw::EndUnsure, Some(2), || {
        let (slots, id) = slots_with(2, TRUNK_SLOTS);
        let first = slots.alloc(0, 0, owner(1)).unwrap();
        let (second, third) = (slots.clone(), slots.clone());
        let allocates = thread::spawn(move || second.alloc(1, 1, owner(2)));
        let frees = thread::spawn(move || third.put(first, 1).is_ok());
        assert!(slots.swapoff_begin(id));
        let left = slots.swapoff_end(id);
        assert!(frees.join().unwrap(), "a slot of a device that went");
        let got = allocates.join().unwrap();
        assert!(left.is_err() || got.is_none(), "a device went with a slot in use");
        if let Some(pair) = got {
            slots.put(pair, 2).unwrap();
        }
        let gone = slots.swapoff_end(id);
        assert_eq!(gone, if left.is_ok() { Err(SwapoffError::NoDevice) } else { Ok(()) });
        slots.audit();
    });
}
