//! Devices that come and go while pages leave and come in, on the simulated kernel. Every byte is checked by the model
//! program. `PAGEOUT_SEED` replays a seed, `PAGEOUT_SEEDS` says how many, `PAGEOUT_SIM_STEPS` how long each.

use crate::engine_support::program::{Habits, Random};
use crate::engine_support::{seeds, steps, OnFailure, Plan, World};
use pageout::frame::CHUNK;
use pageout::swap::vacate::Vacated;
use std::sync::Arc;

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
            .set_limit(world.plan.blocks * 512 + CHUNK * world.plan.chunks + 512 * world.plan.huge + 1024);
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

/// The same with real threads: two servers, two evictors, one that adopts, one that switches, and a program.
fn stress(seed: u64) -> usize {
    let world = World::of_threads(seed, false);
    let _on_failure = OnFailure(&world);
    let mut switches = Switches::new(seed);
    world.threads_meet(|| switches.step(&world));
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
    // Thousands, mostly.
    assert!(gone > 20, "{gone} devices went: this tests nothing");
}
