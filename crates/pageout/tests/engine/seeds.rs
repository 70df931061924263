//! The engine against a model program on the simulated kernel, by seed. `PAGEOUT_SEED` replays one,
//! `PAGEOUT_SEEDS` says how many, `PAGEOUT_SIM_STEPS` how long each.

use crate::engine_support::program::{Habits, Random};
use crate::engine_support::{run, seeds, steps, OnFailure, Plan, World};
use pageout::device::faulty::{Fault, Operation, Rule, When};
use pageout::device::Errno;

#[test]
fn accesses_alone() {
    for seed in seeds(1, 20) {
        let plan = Plan::by_seed(seed);
        let habits = Habits { huge: plan.habits.huge, ..Habits::ACCESS };
        run(Plan { habits, ..plan }, seed, |_| ());
    }
}

#[test]
fn all_calls() {
    for seed in seeds(1000, 20) {
        run(Plan::by_seed(seed), seed, |_| ());
    }
}

/// Mappings that go and come all the time, to addresses that others have just left.
#[test]
fn moving_mappings() {
    for seed in seeds(3000, 20) {
        let plan = Plan::by_seed(seed);
        let bare = seed % 2 == 0;
        let habits =
            Habits { touch: 10, run: 30, mmap: 15, munmap: 10, mremap: 30, mprotect: 0, bare, ..plan.habits };
        run(Plan { habits, threads: plan.threads + 2, ..plan }, seed, |_| ());
    }
}

/// Forks in the midst of it: the child has what its parent had when it was made, wherever that was.
#[test]
fn forks_while_mappings_move() {
    let (mut forks, mut unclear) = (0, 0);
    for seed in seeds(4000, 20) {
        let plan = Plan::by_seed(seed);
        let habits = Habits {
            touch: 10,
            run: 30,
            mmap: 10,
            munmap: 10,
            mremap: 30,
            mprotect: 0,
            share: 0,
            ..plan.habits
        };
        let world = World::with_trunks(Plan { habits, threads: plan.threads + 2, ..plan }, seed);
        let _on_failure = OnFailure(&world);
        world.adopt();
        world.engine.measure();
        for _ in 0..steps() / 50 {
            (0..50).for_each(|_| world.step());
            let (child, slots) = world.fork();
            forks += 1;
            match child {
                Some(child) => {
                    let _on_failure = OnFailure(&child);
                    child.read_all();
                    child.check();
                }
                None => unclear += 1,
            }
            world.engine.disinherit(&slots);
        }
        world.read_all();
        world.check();
    }
    assert!(unclear * 50 <= forks, "{unclear} of {forks} children do not know what they have");
}

/// A device that fails and tears: a page then holds the right data or raises SIGBUS, never anything else.
#[test]
fn failing_devices() {
    let mut struck = Vec::new();
    for seed in seeds(2000, 20) {
        let plan = Plan::by_seed(seed);
        let mut random = Random(seed);
        let rules: Vec<Rule> = (0..1 + random.below(3)).map(|_| rule(&mut random)).collect();
        let habits =
            if seed % 2 == 0 { plan.habits } else { Habits { huge: plan.habits.huge, ..Habits::ACCESS } };
        let habits = Habits { faulty: true, ..habits };
        struck.push(run(Plan { habits, ..plan }, seed, |device| {
            rules.iter().for_each(|rule| device.arm(*rule));
        }));
    }
    fails_often(&struck);
}

/// Many a rule strikes in no run: it is about a request that is never made.
fn fails_often(struck: &[u64]) {
    eprintln!("rules struck {struck:?} times");
    let runs = struck.iter().filter(|times| **times > 0).count();
    assert!(runs * 4 > struck.len() || struck.len() < 8, "hardly a rule struck: {struck:?}");
}

/// A device that does not take what is written, or not all of it, and says so: nothing is lost.
#[test]
fn refused_writes() {
    let mut struck = Vec::new();
    for seed in seeds(9000, 20) {
        let plan = Plan::by_seed(seed);
        let mut random = Random(seed);
        let faults = [Fault::Fail(Errno::IO), Fault::Tear(Errno::NOSPC)];
        let refuses =
            |rule: Rule| Rule { operation: Operation::Write, fault: faults[seed as usize % 2], ..rule };
        let rules: Vec<Rule> = (0..1 + random.below(3)).map(|_| refuses(rule(&mut random))).collect();
        struck.push(run(plan, seed, |device| rules.iter().for_each(|rule| device.arm(*rule))));
    }
    fails_often(&struck);
}

fn rule(random: &mut Random) -> Rule {
    let operation = if random.one_in(2) { Operation::Read } else { Operation::Write };
    let when = match random.below(4) {
        0 => When::After(random.below(50) as u64),
        1 => When::Since(random.below(300) as u64),
        2 => When::At(random.below(2000 * 4096) as u64),
        _ => When::Chance(1 << random.below(16)),
    };
    let fault = match random.below(3) {
        0 => Fault::Fail(Errno::IO),
        1 => Fault::Tear(Errno::NOSPC),
        _ => Fault::TearSilently,
    };
    Rule { operation, when, fault }
}
