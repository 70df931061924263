//! Devices that come and go while pages leave and come in, on the simulated kernel. Every byte is checked by the model
//! program. `PAGEOUT_SEED` replays a seed, `PAGEOUT_SEEDS` says how many, `PAGEOUT_SIM_STEPS` how long each.

mod engine_support;

use engine_support::program::{Habits, Random};
use engine_support::{seeds, steps, OnFailure, Plan, World};
use pageout::swap::vacate::Vacated;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

/// Devices that are ever on at once.
const DEVICES: usize = 3;
/// Walks after which a device that has room to be cleared into must have gone.
const WALKS: usize = 1000;

#[derive(Clone, Copy, PartialEq, Debug)]
enum State {
    Off,
    On,
    Leaving,
}

/// Who switches.
struct Switches {
    random: Random,
    states: [State; DEVICES],
    /// Serials count up: those of the start are numbers.
    serial: usize,
    /// How often a device went.
    gone: usize,
    /// Given up on the way.
    stayed: usize,
}

impl Switches {
    fn new(seed: u64) -> Self {
        let states = [State::On, State::Off, State::Off];
        Self { random: Random(seed ^ 0x0ff), states, serial: 1, gone: 0, stayed: 0 }
    }

    /// Switches something, or goes on with what is on its way off.
    fn step(&mut self, world: &Arc<World>) {
        let number = self.random.below(DEVICES);
        let place = &world.engine.place;
        match self.states[number] {
            State::Off => {
                // What is small is full soon, and then cannot take what another has.
                let slots = if self.random.one_in(3) { 513 + self.random.below(1000) as u64 } else { 16384 };
                world.switch_on(number, self.serial, slots);
                self.serial += 1;
                self.states[number] = State::On;
            }
            State::On if self.random.one_in(3) => {
                assert!(place.swapoff_begin(number));
                self.states[number] = State::Leaving;
            }
            State::On => {}
            State::Leaving if self.random.one_in(8) => {
                assert!(place.swapoff_cancel(number));
                self.stayed += 1;
                self.states[number] = State::On;
            }
            State::Leaving => {
                let used = place.used(number);
                match world.vacate(number) {
                    Vacated::Gone(_) => {
                        self.gone += 1;
                        self.states[number] = State::Off;
                        assert_eq!(place.used(number), 0);
                        assert!(!place.swapoff_cancel(number));
                    }
                    Vacated::Some => assert!(place.used(number) < used),
                    Vacated::Stuck => {}
                    Vacated::Not => panic!("device {number} is on its way off"),
                }
            }
        }
    }

    /// With room for all that is out every device goes.
    fn clear(&mut self, world: &World) {
        world
            .engine
            .set_limit(world.plan.blocks * 512 + 16 * world.plan.chunks + 512 * world.plan.huge + 1024);
        for number in (0..DEVICES).filter(|number| self.states[*number] != State::Off) {
            world.engine.place.swapoff_begin(number);
            let gone = (0..WALKS).any(|_| {
                // Servers read events all the time.
                world.serve();
                world.engine.measure();
                world.engine.kernel.advance(200_000_000);
                matches!(world.vacate(number), Vacated::Gone(_))
            });
            assert!(gone, "device {number} keeps {} pages", world.engine.place.used(number));
        }
        assert_eq!(world.engine.place.swapped(), 0);
        world.engine.set_limit(world.plan.limit_pages as usize);
        world.engine.measure();
    }
}

fn run(plan: Plan, seed: u64) -> Switches {
    let world = World::new(plan, seed);
    let _on_failure = OnFailure(&world);
    let mut switches = Switches::new(seed);
    world.adopt();
    world.engine.measure();
    for step in 0..steps() {
        world.step();
        if step % 5 == 0 {
            switches.step(&world);
        }
        if step % 16 == 0 {
            world.check();
        }
        if step % 1000 == 999 {
            world.settle();
            world.check();
        }
    }
    world.settle();
    switches.clear(&world);
    world.check();
    world.read_all();
    world.check();
    switches
}

#[test]
fn devices_come_and_go() {
    let (mut gone, mut stayed) = (0, 0);
    let all = seeds(7000, 30);
    for &seed in &all {
        let plan = Plan::by_seed(seed);
        let habits = match seed % 3 {
            0 => Habits { huge: plan.habits.huge, ..Habits::ACCESS },
            1 => plan.habits,
            // Mappings move while pages of them are read and written.
            _ => Habits { touch: 10, run: 30, mmap: 15, munmap: 10, mremap: 30, ..plan.habits },
        };
        let switches = run(Plan { habits, ..plan }, seed);
        gone += switches.gone;
        stayed += switches.stayed;
    }
    eprintln!("{gone} devices went, {stayed} stayed after all");
    assert!(gone > all.len(), "hardly any device went: this tests nothing");
}

/// Sets the flag when its thread panics, so that the others end and the failure is seen.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            self.0.store(true, Relaxed);
        }
    }
}

fn until(stop: &AtomicBool, mut work: impl FnMut()) {
    let _stop = Stop(stop);
    while !stop.load(Relaxed) {
        work();
        thread::yield_now();
    }
}

/// The same with real threads: two servers, two evictors, one that adopts, one that switches, and a program.
fn stress(seed: u64) -> usize {
    let plan = Plan::by_seed(seed);
    let plan = Plan { meanwhile: 0, nested: 0, real: true, chunks: plan.chunks.max(8), ..plan };
    let world = World::new(plan, seed);
    let _on_failure = OnFailure(&world);
    let mut switches = Switches::new(seed);
    world.adopt();
    world.engine.measure();
    let time = std::env::var("PAGEOUT_STRESS_MS").ok().and_then(|ms| ms.parse().ok()).unwrap_or(100);
    let end = Instant::now() + Duration::from_millis(time);
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let (world, stop, switches) = (&world, &stop, &mut switches);
        for _ in 0..2 {
            scope.spawn(move || until(stop, || world.serve()));
            scope.spawn(move || {
                until(stop, || {
                    world.balance();
                    world.evict(512);
                })
            });
        }
        scope.spawn(move || until(stop, || switches.step(world)));
        scope.spawn(move || {
            until(stop, || {
                world.engine.measure();
                world.adopt();
                world.engine.kernel.advance(100_000_000);
            })
        });
        while Instant::now() < end && !stop.load(Relaxed) {
            let mut program = world.program.lock().unwrap();
            for _ in 0..64 {
                program.step(&world.engine.kernel);
            }
            drop(program);
            thread::yield_now();
        }
        // The calls under way end while the servers still work.
        world.program.lock().unwrap().ending = true;
        let patience = Instant::now() + Duration::from_secs(10);
        while !stop.load(Relaxed) && Instant::now() < patience {
            let mut program = world.program.lock().unwrap();
            if program.idle() {
                break;
            }
            program.step(&world.engine.kernel);
        }
        stop.store(true, Relaxed);
    });
    world.settle();
    switches.clear(&world);
    world.read_all();
    world.check();
    switches.gone
}

#[test]
fn devices_that_go_while_threads_meet() {
    let gone: usize = seeds(8000, 10).into_iter().map(stress).sum();
    eprintln!("{gone} devices went");
}
