//! What tests say of a world whose threads do as they are told.

use super::program::Habits;
use super::{Deed, Plan, World};
use pageout::engine::Swapin;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::Arc;

/// Three threads; what they do is said, not left to chance. All memory is managed from the start.
pub fn world(plan: impl Fn(Plan) -> Plan) -> Arc<World> {
    let world = World::new(plan(base()), 1);
    world.program.lock().unwrap().zeros = false;
    world.adopt();
    world.engine.measure();
    world
}

pub fn base() -> Plan {
    Plan {
        blocks: 2,
        chunks: 10,
        huge: 0,
        threads: 3,
        limit_pages: 1024,
        slots: 16384,
        swapin: Swapin::Auto,
        max_order: 9,
        partial: 0,
        short: 0,
        meanwhile: 0,
        nested: 0,
        slow: false,
        rotational: false,
        discards: false,
        real: false,
        executable: 0,
        inline: false,
        pins: false,
        habits: Habits { bare: true, ..Habits::ALL },
    }
}

pub fn touch(world: &World, thread: usize, page: usize, n: usize, write: bool) {
    let mut program = world.program.lock().unwrap();
    program.start_touch(thread, page, n, write);
    program.step_thread(&world.engine.kernel, thread);
}

pub fn step(world: &World, thread: usize) {
    let mut program = world.program.lock().unwrap();
    program.ending = true;
    program.step_thread(&world.engine.kernel, thread);
}

/// Pages are written, then all leave.
pub fn write_and_evict(world: &World, page: usize, n: usize) {
    touch(world, 0, page, n, true);
    world.settle();
    evict_all(world);
    assert!(world.engine.place.swapped() > 0);
}

/// Everything that can leave does; what was used lately has its second chances first.
pub fn evict_all(world: &World) {
    for _ in 0..8 {
        world.evict(512);
    }
}

/// A thread that is in a system call runs whenever the engine calls the kernel.
pub fn returns(thread: usize) -> Deed {
    Box::new(move |world| {
        step(world, thread);
        if world.engine.kernel.changing() > 0 {
            *world.at_call.lock().unwrap() = Some((0, returns(thread)));
        }
    })
}

/// How many of the points that a schedule says were reached so far.
pub fn reached(world: &World) -> usize {
    world.reached.load(Relaxed)
}

/// Everybody ends what they began, all memory holds what it should, and the engine's books are right. A schedule that says a point
/// is one.
pub fn end(world: &World) {
    world.settle();
    world.check();
    let said = world.at_call.lock().unwrap().is_some() || world.at_device.lock().unwrap().is_some();
    assert!(!said || reached(world) > 0, "the point that the schedule says was not reached");
    world.read_all();
    world.check();
}

/// Blocks where the kernel gives huge pages, in memory for half of them.
pub fn advised(blocks: usize, seed: u64) -> Arc<World> {
    advised_by(blocks, seed, |plan| plan)
}

/// The same, by another plan.
pub fn advised_by(blocks: usize, seed: u64, plan: impl Fn(Plan) -> Plan) -> Arc<World> {
    let habits = Habits { huge: true, ..Habits::ACCESS };
    let limit_pages = blocks as i64 / 2 * 512;
    let slots = base().slots.max(blocks as u64 * 1024);
    let of_half = Plan { blocks, chunks: 50, huge: blocks / 2, limit_pages, slots, habits, ..base() };
    let world = World::new(plan(of_half), seed);
    world.program.lock().unwrap().zeros = false;
    let kernel = &world.engine.kernel;
    let mut mmap = kernel.mmap(kernel.program_base(), blocks * 512 * 4096, true);
    assert!(kernel.advance_call(&mut mmap));
    world.adopt();
    world.engine.measure();
    world
}
