//! Models of the whole engine: shuttle decides who goes on, at every atomic and every lock, for five or six threads on
//! the simulated kernel. What must hold is asserted on the way and, when all stand still, by the world's own look at
//! itself; the program checks every byte; a thread that never goes on is a hang.
//!
//! `RUSTFLAGS="--cfg shuttle" cargo test --release -p pageout --test engine_models`. Half of the schedules are random,
//! half by priorities that change at few points (PCT). `PAGEOUT_SCHEDULES` says how many of each, `PAGEOUT_SEED` where
//! they start: the same give the same schedules. Each model has a twin that is told to make one mistake and must fail.
#![cfg(shuttle)]

mod engine_support;

use engine_support::program::Habits;
use engine_support::{thread, until, OnFailure, Plan, World};
use pageout::engine::Swapin;
use pageout::flaw::{ask, Flaw};
use pageout::space::BLOCK_PAGES;
use pageout::swap::vacate::Vacated;
use shuttle::scheduler::{PctScheduler, RandomScheduler, Scheduler};
use shuttle::{Config, FailurePersistence, MaxSteps, Runner};
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::Arc;
use std::time::Instant;

/// Atomics and locks of a schedule before it counts as a hang; few come to a tenth.
const MOST_STEPS: usize = 8_000_000;
/// Times that a PCT schedule changes who goes first.
const CHANGES: usize = 40;
/// What the program's threads do in a schedule.
const STEPS: usize = 120;
/// Looks at the program after which something that does not go on never does. A fault takes some hundred turns of the
/// engine's threads, and the program has as many turns as each of them: it looks about 80 times for a page.
const PATIENCE: usize = 20_000;

type Model = fn(u64);

fn number(name: &str, or: u64) -> u64 {
    std::env::var(name).map_or(or, |text| text.parse().unwrap_or_else(|_| panic!("{name} takes a number")))
}

/// Says how far it came: with this seed and so many schedules it comes there again.
struct Reached(Arc<AtomicU64>);

impl Drop for Reached {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("failed in the schedule before that of seed {}", self.0.load(Relaxed));
        }
    }
}

/// Runs schedules of `model` until it fails or there were `schedules`.
fn run(scheduler: impl Scheduler + 'static, model: Model, seed: u64) {
    let mut config = Config::new();
    config.stack_size = 1 << 20;
    config.max_steps = MaxSteps::FailAfter(MOST_STEPS);
    config.failure_persistence = FailurePersistence::None;
    config.silence_warnings = true;
    let next = Arc::new(AtomicU64::new(seed));
    let _on_failure = Reached(next.clone());
    Runner::new(scheduler, config).run(move || model(next.fetch_add(1, Relaxed)));
}

fn explore(model: Model, schedules: usize) {
    let seed = number("PAGEOUT_SEED", 1);
    for seed in seed..seed + schedules as u64 {
        run(RandomScheduler::new_from_seed(seed, 1), model, seed);
    }
    run(PctScheduler::new_from_seed(seed, CHANGES, schedules), model, seed);
}

/// The model passes, and fails when the engine makes any of `flaws`.
fn passes_and_would_notice(flaws: &[Flaw], model: Model) {
    let short = std::env::var("PAGEOUT_MODELS").is_ok_and(|form| form == "short");
    let schedules = number("PAGEOUT_SCHEDULES", if short { 20 } else { 400 }) as usize;
    let started = Instant::now();
    explore(model, schedules);
    println!("{} schedules in {:.1?}", 2 * schedules, started.elapsed());
    for flaw in flaws {
        println!("told to make a mistake: {flaw:?}");
        let started = Instant::now();
        ask(Some(*flaw));
        let noticed = catch_unwind(AssertUnwindSafe(|| explore(model, 2000))).is_err();
        ask(None);
        println!("{flaw:?} noticed: {noticed}, in {:.1?}", started.elapsed());
        assert!(noticed, "the model does not notice {flaw:?}");
    }
}

fn plan(seed: u64, habits: Habits) -> Plan {
    Plan {
        blocks: 1,
        chunks: 20,
        huge: 0,
        threads: 3,
        limit_pages: 200,
        slots: 2048,
        swapin: Swapin::Auto,
        max_order: [4, 9][seed as usize % 2],
        partial: [0, 10_000][seed as usize / 2 % 2],
        short: 0,
        meanwhile: 0,
        nested: 0,
        slow: false,
        rotational: seed % 3 == 2,
        discards: seed % 2 == 1,
        executable: [0, 32768][seed as usize / 4 % 2],
        inline: false,
        pins: false,
        real: true,
        habits,
    }
}

/// The engine's threads beside whatever else a model has: two servers and two evictors, while the program takes its
/// steps. Then everything is read, and looked at.
fn with_engine(world: &Arc<World>, mut others: Vec<Box<dyn FnMut(&Arc<World>) + Send>>) {
    let _on_failure = OnFailure(world);
    world.adopt();
    world.engine.measure();
    world.program.lock().unwrap().start_touch(0, 0, BLOCK_PAGES, true);
    world.settle();
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let stop = &stop;
        for _ in 0..2 {
            scope.spawn(move || until(stop, || world.serve()));
        }
        // What came in stays until it is used, however late the thread that waited for it has its turn.
        let is_used = |seen: &mut u64| {
            let before = std::mem::replace(seen, world.program.lock().unwrap().done);
            before != *seen || !world.engine.kernel.waiting().is_empty()
        };
        scope.spawn(move || {
            let mut seen = u64::MAX;
            until(stop, || {
                // Not all the time: no page would stay until it is used.
                let below = world.engine.budget.get().max(0);
                if below as usize + world.engine.frames.ready_pages() < 40 && is_used(&mut seen) {
                    world.evict(16);
                }
            })
        });
        scope.spawn(move || {
            let mut seen = u64::MAX;
            until(stop, || {
                if !is_used(&mut seen) {
                    return;
                }
                world.balance();
                // What can go is tried again when some time has passed.
                world.engine.kernel.advance(10_000_000);
            })
        });
        for other in &mut others {
            scope.spawn(move || until(stop, || other(world)));
        }
        // How far the program had come, and when.
        let mut last = (0, 0);
        for step in 0.. {
            let mut program = world.program.lock().unwrap();
            program.ending = step >= STEPS;
            if program.done != last.0 {
                last = (program.done, step);
            }
            if step - last.1 > PATIENCE {
                drop(program);
                world.hang();
            }
            if program.ending && program.idle() {
                break;
            }
            program.step(&world.engine.kernel);
            drop(program);
            thread::yield_now();
        }
        stop.store(true, Relaxed);
    });
    world.program.lock().unwrap().ending = false;
    world.read_all();
    // What is counted while others work may be off by what they do meanwhile.
    world.engine.measure();
    world.check();
}

/// Threads that touch the same pages as they leave and come in (invariants 1, 2, 3, 7, 8, 9). Six with the program's.
#[test]
fn faults_and_evictions() {
    passes_and_would_notice(&[Flaw::SettleUnsure], |seed| {
        let world = World::new(plan(seed, Habits::ACCESS), seed);
        let measures = |world: &Arc<World>| {
            world.engine.measure();
        };
        with_engine(&world, vec![Box::new(measures)]);
    });
}

/// Mappings that go, come, move and are discarded while pages of them are on their way, and who reads of it (1, 3, 7, 8).
#[test]
fn events() {
    passes_and_would_notice(&[Flaw::ArriveUnsure, Flaw::WakeForgotten], |seed| {
        let habits =
            Habits { touch: 30, run: 30, mmap: 5, munmap: 5, dontneed: 15, mremap: 10, ..Habits::ALL };
        let world = World::new(plan(seed, Habits { free: 0, pin: 0, mprotect: 0, ..habits }), seed);
        let looks = |world: &Arc<World>| {
            world.look();
            world.adopt();
        };
        with_engine(&world, vec![Box::new(looks)]);
    });
}

/// Devices that come and go under it all; one on its way off gives no slot, and goes when it is empty (4, 5, 6).
#[test]
fn devices() {
    static GONE: AtomicUsize = AtomicUsize::new(0);
    passes_and_would_notice(&[Flaw::LeavingGives], |seed| {
        let world = World::new(plan(seed, Habits::ACCESS), seed);
        let (mut number, mut serial, mut used) = (0, 1, None);
        let mut walks = 0..12;
        let switches = move |world: &Arc<World>| {
            let place = &world.engine.place;
            // Not for ever: what comes home leaves for the other device, and who uses it waits.
            if walks.next().is_none() {
                return;
            }
            let Some(before) = used else {
                world.switch_on(1 - number, serial, 2048);
                assert!(place.swapoff_begin(number));
                used = Some(place.taken(number));
                return;
            };
            let now = place.taken(number);
            assert!(now <= before, "use grew from {before} to {now} after the device stopped taking pages");
            used = Some(now);
            if let Vacated::Gone(_) = world.vacate(number) {
                assert_eq!(place.used(number), 0);
                (number, serial, used) = (1 - number, serial + 1, None);
                GONE.fetch_add(1, Relaxed);
            }
            world.engine.measure();
        };
        with_engine(&world, vec![Box::new(switches)]);
    });
    assert!(GONE.load(Relaxed) > 10, "hardly any device went: this tests nothing");
}

/// A fork in the midst of it: the child reads what its parent had out, while the parent goes on (2, 3, 8).
#[test]
fn forks() {
    passes_and_would_notice(&[Flaw::SharedWritten], |seed| {
        let world = World::with_trunks(plan(seed, Habits::ACCESS), seed);
        let mut forks = 0..2;
        let forks = move |world: &Arc<World>| {
            if forks.next().is_none() {
                return;
            }
            let (child, slots) = world.fork();
            let child = child.expect("what happened is clear");
            for _ in 0..40 {
                child.step();
                thread::yield_now();
            }
            child.read_all();
            child.check();
            drop(child);
            world.engine.disinherit(&slots);
        };
        with_engine(&world, vec![Box::new(forks)]);
    });
}

/// The same while the program unmaps and moves memory: the child has it where it was when the child was made (2, 5).
#[test]
fn forks_while_mappings_move() {
    passes_and_would_notice(&[Flaw::MovesUntold], |seed| {
        let habits = Habits { touch: 20, munmap: 4, mmap: 4, mremap: 12, ..Habits::ACCESS };
        let world = World::with_trunks(plan(seed, habits), seed);
        let mut forks = 0..2;
        let forks = move |world: &Arc<World>| {
            if forks.next().is_none() {
                return;
            }
            let (child, slots) = world.fork();
            if let Some(child) = child {
                child.read_all();
                child.check();
            }
            world.engine.disinherit(&slots);
        };
        // What is unmapped is room again only when that is counted.
        with_engine(&world, vec![Box::new(forks), Box::new(|world: &Arc<World>| world.look())]);
    });
}
