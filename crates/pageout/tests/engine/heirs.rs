//! Forks at certain points of the engine's work, and what parent and child do afterwards: each holds what it should.

use crate::engine_support::program::{Habits, PAGE};
use crate::engine_support::schedule::*;
use crate::engine_support::{thread, OnFailure, Plan, World};
use pageout::swap::heir::SlotRun;
use pageout::swap::vacate::Vacated;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// A world whose device has room for a child's slots, too. Its pages are there.
fn parent(pages: usize) -> Arc<World> {
    let world = World::with_trunks(Plan { chunks: 60, habits: Habits::ACCESS, ..base() }, 1);
    world.program.lock().unwrap().zeros = false;
    world.adopt();
    world.engine.measure();
    touch(&world, 0, 0, pages, true);
    world.settle();
    world
}

/// Nobody does anything meanwhile.
fn fork(world: &World) -> (Arc<World>, Vec<SlotRun>) {
    world.program.lock().unwrap().ending = true;
    let (child, slots) = world.fork();
    (child.expect("what happened is clear"), slots)
}

fn end_both(world: &World, child: &World, slots: &[SlotRun]) {
    end(child);
    world.engine.disinherit(slots);
    end(world);
}

/// All leave, also what has come back soon.
fn leave(world: &World, pages: usize) {
    let kernel = &world.engine.kernel;
    let is_there = |page: usize| kernel.page(kernel.program_base() + page * PAGE).present;
    let all_left = |_| {
        world.evict(512);
        !(0..pages).any(is_there)
    };
    assert!((0..100).any(all_left), "something stays");
}

fn write(world: &World, pages: usize) {
    touch(world, 0, 0, pages, true);
    world.settle();
    leave(world, pages);
}

#[test]
fn what_the_parent_writes_is_not_the_childs() {
    let world = parent(64);
    let _on_failure = OnFailure(&world);
    leave(&world, 64);
    let (child, slots) = fork(&world);
    let _on_failure = OnFailure(&child);
    // Out again: not to where the child reads.
    write(&world, 64);
    child.read_all();
    child.check();
    world.engine.disinherit(&slots);
    end(&world);
}

#[test]
fn what_the_child_writes_is_not_the_parents() {
    let world = parent(64);
    let _on_failure = OnFailure(&world);
    leave(&world, 64);
    let (child, slots) = fork(&world);
    let _on_failure = OnFailure(&child);
    child.read_all();
    // Of the second nothing is as its parent wrote it.
    write(&child, 64);
    write(&child, 64);
    end_both(&world, &child, &slots);
}

/// No event tells of it, so it is in no region.
#[test]
fn what_grew_in_place_and_is_out_is_the_childs_too() {
    let world = parent(64);
    let _on_failure = OnFailure(&world);
    let kernel = &world.engine.kernel;
    world.program.lock().unwrap().start_munmap(kernel, 1, (600, 64));
    world.settle();
    world.program.lock().unwrap().start_grow(kernel, (600, 64));
    touch(&world, 0, 600, 64, true);
    world.settle();
    leave(&world, 664);
    let (child, slots) = fork(&world);
    let _on_failure = OnFailure(&child);
    end_both(&world, &child, &slots);
}

#[test]
fn what_is_being_read_is_the_childs_too() {
    let world = parent(64);
    let _on_failure = OnFailure(&world);
    leave(&world, 64);
    touch(&world, 0, 5, 1, false);
    *world.at_device.lock().unwrap() = Some(Box::new(|world| {
        let (child, slots) = fork(world);
        let _on_failure = OnFailure(&child);
        end(&child);
        world.engine.disinherit(&slots);
    }));
    world.serve();
    end(&world);
}

#[test]
fn a_fork_waits_for_what_is_being_written() {
    let world = parent(64);
    let _on_failure = OnFailure(&world);
    let forks = Arc::new(Mutex::new(None));
    let (parent, forked) = (world.clone(), forks.clone());
    *world.at_device.lock().unwrap() = Some(Box::new(move |world| {
        let forks = thread::spawn(move || fork(&parent));
        while !world.engine.stands_still() && !forks.is_finished() {
            thread::yield_now();
        }
        thread::sleep(Duration::from_millis(20));
        *forked.lock().unwrap() = Some(forks);
    }));
    while forks.lock().unwrap().is_none() {
        world.evict(512);
    }
    let (child, slots) = forks.lock().unwrap().take().unwrap().join().unwrap();
    let _on_failure = OnFailure(&child);
    end_both(&world, &child, &slots);
}

/// Slots of the parent are no slots of the child's devices: it knows by its names alone that something is there.
#[test]
fn a_device_does_not_leave_a_child_that_has_something_there() {
    let world = parent(600);
    let _on_failure = OnFailure(&world);
    leave(&world, 600);
    let (child, slots) = fork(&world);
    let _on_failure = OnFailure(&child);
    let place = &child.engine.place;
    child.engine.set_limit(0);
    child.engine.measure();
    assert!(place.swapoff_begin(0));
    assert!(!(0..20).any(|_| matches!(child.vacate(0), Vacated::Gone(_))));
    child.engine.set_limit(1024);
    child.engine.measure();
    assert!((0..20).any(|_| matches!(child.vacate(0), Vacated::Gone(_))));
    // What has its number next is the child's own.
    child.switch_on(0, 1, 16384);
    child.engine.kernel.advance(1_000_000_000);
    write(&child, 600);
    write(&child, 600);
    end_both(&world, &child, &slots);
}
