//! The device that fails, tears and delays on command.

mod device_support;

use device_support::{read, round_trip, write_all, Memory};
use pageout::device::faulty::{Fault, FaultyDevice, Operation, Rule, When};
use pageout::device::{Device, Errno, Run, PAGE};
use std::time::{Duration, Instant};

const SIZE: u64 = 32 << 20;

fn device(rules: &[(Operation, When, Fault)]) -> FaultyDevice {
    let device = FaultyDevice::memory(SIZE, 1).unwrap();
    for &(operation, when, fault) in rules {
        device.arm(Rule { operation, when, fault });
    }
    device
}

fn pages(memory: &Memory) -> Vec<Run> {
    (0..memory.len / PAGE).map(|page| memory.run(page * PAGE, (page * PAGE) as u64, PAGE)).collect()
}

#[test]
fn without_rules_it_is_the_device_behind_it() {
    let device = device(&[]);
    round_trip(&device);
    assert_eq!(device.struck(), 0);
}

#[test]
fn countdowns_strike_once_or_from_then_on() {
    let memory = Memory::filled(4 * PAGE, 1);
    let once = device(&[(Operation::Write, When::After(2), Fault::Fail(Errno::IO))]);
    assert_eq!(write_all(&once, &pages(&memory)), [Ok(()), Ok(()), Err(Errno::IO), Ok(())]);
    assert_eq!(write_all(&once, &pages(&memory)), [Ok(()); 4]);
    assert_eq!(once.struck(), 1);
    let since = device(&[(Operation::Write, When::Since(3), Fault::Fail(Errno::NOSPC))]);
    assert_eq!(write_all(&since, &pages(&memory)), [Ok(()), Ok(()), Ok(()), Err(Errno::NOSPC)]);
    assert_eq!(write_all(&since, &pages(&memory)), [Err(Errno::NOSPC); 4]);
    since.disarm();
    assert_eq!(write_all(&since, &pages(&memory)), [Ok(()); 4]);
}

#[test]
fn a_bad_sector_fails_what_touches_it() {
    let memory = Memory::new(4 * PAGE);
    let device = device(&[(Operation::Read, When::At(2 * PAGE as u64 + 5), Fault::Fail(Errno::IO))]);
    assert_eq!(read(&device, memory.run(0, 0, 2 * PAGE)), Ok(()));
    assert_eq!(read(&device, memory.run(0, 0, 3 * PAGE)), Err(Errno::IO));
    assert_eq!(read(&device, memory.run(0, 3 * PAGE as u64, PAGE)), Ok(()));
}

#[test]
fn torn_writes_leave_the_second_half_as_it_was() {
    for (fault, answer) in [(Fault::TearSilently, Ok(())), (Fault::Tear(Errno::IO), Err(Errno::IO))] {
        for len in [PAGE, 8 * PAGE] {
            let (old, new) = (Memory::filled(len, 1), Memory::filled(len, 2));
            let device = device(&[]);
            assert_eq!(write_all(&device, &[old.run(0, 0, len)]), [Ok(())]);
            device.arm(Rule { operation: Operation::Write, when: When::After(0), fault });
            assert_eq!(write_all(&device, &[new.run(0, 0, len)]), [answer]);
            let back = Memory::new(len);
            read(&device, back.run(0, 0, len)).unwrap();
            let half = len / 16;
            assert!(back.words()[..half] == new.words()[..half]);
            assert!(back.words()[half..] == old.words()[half..]);
        }
    }
}

#[test]
fn torn_reads_leave_the_second_half_as_it_was() {
    let written = Memory::filled(4 * PAGE, 3);
    let device = device(&[(Operation::Read, When::After(0), Fault::TearSilently)]);
    assert_eq!(write_all(&device, &[written.run(0, 0, 4 * PAGE)]), [Ok(())]);
    let back = Memory::new(4 * PAGE);
    read(&device, back.run(0, 0, 4 * PAGE)).unwrap();
    assert!(back.words()[..1024] == written.words()[..1024]);
    assert!(back.words()[1024..].iter().all(|&word| word == 0));
}

#[test]
fn delays_are_sat_out() {
    let memory = Memory::filled(PAGE, 1);
    let time = Duration::from_millis(30);
    let device = device(&[(Operation::Write, When::After(0), Fault::Delay(time))]);
    let start = Instant::now();
    assert_eq!(write_all(&device, &pages(&memory)), [Ok(())]);
    assert!(start.elapsed() >= time);
}

#[test]
fn the_same_seed_gives_the_same_faults() {
    let memory = Memory::filled(256 * PAGE, 1);
    let run = |seed| {
        let device = FaultyDevice::memory(SIZE, seed).unwrap();
        let fault = Fault::Fail(Errno::IO);
        device.arm(Rule { operation: Operation::Write, when: When::Chance(16384), fault });
        let results = write_all(&device, &pages(&memory));
        let failed = results.iter().filter(|result| result.is_err()).count();
        assert_eq!(device.struck(), failed as u64);
        assert!((32..96).contains(&failed), "a quarter of 256, about: {failed}");
        results
    };
    assert_eq!(run(7), run(7));
    assert_ne!(run(7), run(8));
}

#[test]
fn discards_fail_too() {
    let device = device(&[(Operation::Discard, When::After(0), Fault::Fail(Errno::OPNOTSUPP))]);
    assert_eq!(device.discard(0, PAGE as u64), Err(Errno::OPNOTSUPP));
    assert_eq!(device.discard(0, PAGE as u64), Ok(()));
}
