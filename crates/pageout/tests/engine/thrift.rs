//! What the engine does not do, or not for long: write what is written, shun a device, let go what fits, or what is stuck.

use crate::engine_support::program::{Habits, PAGE};
use crate::engine_support::schedule::*;
use crate::engine_support::{OnFailure, Plan, World};
use crate::schedules::present;
use pageout::device::faulty::{Fault, Operation, Rule, When};
use pageout::device::Errno;
use pageout::kernel::Kernel;
use pageout::space::UNIT;
use pageout::sync::atomic::Ordering::Relaxed;
use std::sync::Arc;

const SECOND: u64 = 1_000_000_000;

fn plain(by: impl Fn(Plan) -> Plan) -> Arc<World> {
    world(|plan| by(Plan { habits: Habits::ACCESS, ..plan }))
}

fn fill(world: &World, first: usize, n: usize) {
    touch(world, 0, first, n, true);
    world.settle();
}

/// Of one write the device says that it failed.
fn one_write_fails(world: &World) {
    let once = Rule { operation: Operation::Write, when: When::After(0), fault: Fault::Fail(Errno::IO) };
    world.device.arm(once);
}

fn writes(world: &World) -> usize {
    let requests = std::mem::take(&mut *world.requests.lock().unwrap());
    requests.iter().filter(|(operation, ..)| *operation == Operation::Write).count()
}

#[test]
fn what_is_clean_is_not_written_again() {
    let world = plain(|plan| plan);
    let _on_failure = OnFailure(&world);
    write_and_evict(&world, 0, 64);
    assert!(writes(&world) > 0);
    touch(&world, 0, 0, 64, false);
    world.settle();
    evict_all(&world);
    let stats = world.engine.stats;
    assert_eq!((writes(&world), stats.clean_dropped.load(Relaxed)), (0, 64));
    assert_eq!(world.engine.place.swapped(), 64);
    // Of what was written to since all is.
    fill(&world, 0, 64);
    evict_all(&world);
    assert!(writes(&world) > 0);
    assert_eq!(stats.clean_dropped.load(Relaxed), 64);
    end(&world);
}

/// A single device has to take what it failed to take, at once.
#[test]
fn one_write_that_failed_keeps_nothing_from_leaving() {
    let world = plain(|plan| plan);
    let _on_failure = OnFailure(&world);
    one_write_fails(&world);
    write_and_evict(&world, 0, 64);
    // What came back is tried again soon, and long before what failed is forgiven.
    world.engine.kernel.advance(SECOND);
    evict_all(&world);
    assert_eq!((world.device.struck(), world.engine.place.swapped()), (1, 64));
    end(&world);
}

/// Where there is another device it is shunned, but not for ever.
#[test]
fn what_failed_once_is_written_to_again_later() {
    let world = plain(|plan| plan);
    let _on_failure = OnFailure(&world);
    world.switch_on_by(1, 1, 16384, -1);
    one_write_fails(&world);
    // Runs of another length each time: where the last one of a length was the next is, whatever comes first.
    let used_after = |first: usize, n: usize| {
        fill(&world, first, n);
        evict_all(&world);
        world.engine.kernel.advance(SECOND);
        evict_all(&world);
        [0, 1].map(|number| world.engine.place.used(number))
    };
    assert_eq!(used_after(0, 64), [0, 64]);
    assert_eq!(world.device.struck(), 1);
    assert_eq!(used_after(64, 32), [0, 96]);
    world.engine.kernel.advance(11 * SECOND);
    assert_eq!(used_after(128, 16), [16, 96]);
    end(&world);
}

/// What the program gave up is room before the next look.
#[test]
fn what_was_given_up_is_room_at_once() {
    let world = plain(|plan| Plan { limit_pages: 512, ..plan });
    let _on_failure = OnFailure(&world);
    // With what servers keep free.
    fill(&world, 0, 512 - 64);
    world.program.lock().unwrap().start_dontneed(&world.engine.kernel, 1, (0, 128));
    world.settle();
    fill(&world, 512, 128);
    assert_eq!(world.engine.stats.pswpout.load(Relaxed), 0);
    // Without that it does not fit.
    fill(&world, 0, 128);
    assert!(world.engine.stats.pswpout.load(Relaxed) > 0);
    end(&world);
}

/// The limit gives way to what cannot go, less what is about to be tried again: or it never would be.
#[test]
fn the_limit_does_not_give_way_to_what_is_to_be_tried_again() {
    let world = plain(|plan| Plan { limit_pages: 64, ..plan });
    let _on_failure = OnFailure(&world);
    let (engine, kernel) = (&world.engine, &world.engine.kernel);
    engine.set_limit(1024);
    engine.measure();
    fill(&world, 0, 256);
    let pin = |pinned| {
        (0..256).for_each(|page| assert!(kernel.pin(kernel.program_base() + page * PAGE, pinned)));
    };
    pin(true);
    evict_all(&world);
    engine.set_limit(64);
    let stays = engine.unmanaged(kernel.resident_pages());
    assert_eq!((stays, engine.policy.lock().parked()), (256, 256 / (UNIT / PAGE)));
    let budget = || {
        engine.give_way(stays);
        engine.measure() as i64 + engine.budget.get()
    };
    assert_eq!(budget(), 256);
    engine.policy.lock().unpark();
    assert_eq!(engine.policy.lock().untried(), 256 / (UNIT / PAGE));
    assert_eq!(budget(), 64, "the limit, while all is to be tried");
    evict_all(&world);
    assert_eq!(budget(), 256, "it was tried in vain");
    // Also where there is room beside it; and what lies there does not have to go meanwhile.
    fill(&world, 512, 64);
    engine.policy.lock().unpark_in_time(kernel.now());
    engine.give_way(stays + 128);
    engine.measure();
    assert!(engine.pressed() && engine.policy.lock().untried() > 0);
    world.balance();
    assert_eq!((engine.policy.lock().untried(), present(&world, 512..576)), (0, 64));
    pin(false);
    engine.policy.lock().unpark();
    evict_all(&world);
    assert_eq!(world.engine.place.swapped(), 256 + 64);
    engine.measure();
    engine.give_way(0);
    engine.measure();
    end(&world);
}
