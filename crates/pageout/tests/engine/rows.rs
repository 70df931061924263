//! Rows S1.1 to S1.9 and S4.6 of the seeds: huge pages out and in as one piece, on the simulated kernel. On the real one:
//! the traps `huge`, `huge-parts` and `huge-entries`, and the share of huge pages in `pageout-bench compare seq`.

use crate::engine_support::program::Program;
use crate::engine_support::schedule::*;
use crate::engine_support::{OnFailure, Plan, World};
use pageout::device::faulty::Operation::{Read, Write};
use pageout::engine::Swapin;
use pageout::kernel::sim::Simulated;
use pageout::kernel::Kernel;
use pageout::space::{BLOCK, BLOCK_PAGES};
use pageout::swap::vacate::Vacated;
use pageout::sync::atomic::AtomicU64;
use std::collections::BTreeMap;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::Arc;

const BLOCKS: usize = 2;

/// All memory in huge pages; room for it, and frames for one page more than leave.
fn huge(by: impl Fn(Plan) -> Plan) -> Arc<World> {
    let world = advised_by(BLOCKS, 1, |plan| by(Plan { huge: BLOCKS + 1, limit_pages: 2048, ..plan }));
    touch(&world, 0, 0, BLOCKS * BLOCK_PAGES, true);
    world.settle();
    world
}

/// The same, and all of it has left.
fn huge_out(by: impl Fn(Plan) -> Plan) -> Arc<World> {
    let world = huge(by);
    evict_all(&world);
    assert_eq!(world.engine.place.swapped(), (BLOCKS * BLOCK_PAGES) as u64);
    assert_eq!(counted(&world)["thp_swpout"], BLOCKS as u64);
    world.engine.measure();
    world
}

fn always(plan: Plan) -> Plan {
    Plan { swapin: Swapin::Always, ..plan }
}

fn fault(world: &World, page: usize) {
    touch(world, 1, page, 1, false);
    world.settle();
}

fn is_huge(world: &World) -> [bool; BLOCKS] {
    [0, 1].map(|block| world.engine.kernel.is_huge(world.engine.kernel.program_base() + block * BLOCK))
}

fn counted(world: &World) -> BTreeMap<&'static str, u64> {
    world.engine.stats.counters().collect()
}

fn requests(world: &World) -> Vec<(pageout::device::faulty::Operation, u64, usize)> {
    std::mem::take(&mut *world.requests.lock().unwrap())
}

#[test]
fn s1_1_a_huge_page_leaves_whole_and_comes_back_whole_and_huge() {
    let world = huge_out(always);
    let _on_failure = OnFailure(&world);
    assert_eq!(is_huge(&world), [false, false]);
    fault(&world, 7);
    assert_eq!(is_huge(&world), [true, false]);
    fault(&world, BLOCK_PAGES + 511);
    assert_eq!(is_huge(&world), [true, true]);
    end(&world);
}

/// Calls of the kernel, requests to the device, faults, runs of slots: as many as for one page. Locks: `engine_locks`.
#[test]
fn s1_2_everything_is_done_once_for_a_huge_page() {
    let cost = |pages: usize| {
        let world = advised_by(1, 1, |plan| always(Plan { huge: 2, ..plan }));
        touch(&world, 0, 0, pages, true);
        world.settle();
        let calls = |since: usize| world.calls.load(Relaxed) - since;
        let before = calls(0);
        while world.evict(512) == 0 {}
        let out = calls(before);
        touch(&world, 1, 0, 1, false);
        let before = calls(0);
        world.serve();
        let back = calls(before);
        let runs: u64 = world.engine.stats.swpout.iter().map(|count| count.load(Relaxed)).sum();
        assert_eq!((requests(&world).len(), counted(&world)["pgmajfault"], runs), (2, 1, 1));
        end(&world);
        (out, back)
    };
    let (one, huge) = (cost(1), cost(BLOCK_PAGES));
    // One more: whether what came in is one page to the kernel.
    assert_eq!(huge, (one.0, one.1 + 1));
}

#[test]
fn s1_3_it_is_one_sequential_request_each_way() {
    let world = huge_out(always);
    let _on_failure = OnFailure(&world);
    let written = requests(&world);
    assert_eq!(written, [(Write, written[0].1, BLOCK), (Write, written[0].1 + BLOCK as u64, BLOCK)]);
    fault(&world, 7);
    let read = requests(&world);
    assert_eq!(read, [(Read, read[0].1, BLOCK)]);
    assert!(written.iter().any(|(_, at, _)| *at == read[0].1));
    end(&world);
}

/// Who changes a part of what is out as one piece, or all of it; then all memory is read. A fork: `seeds`.
#[test]
fn s1_4_all_who_meet_a_huge_entry_know_it() {
    type Change = dyn Fn(&mut Program, &Simulated);
    const PART: (usize, usize) = (200, 100);
    let changes: [(&str, &Change); 6] = [
        ("written", &|program, _| program.start_touch(1, PART.0, PART.1, true)),
        ("discarded", &|program, kernel| program.start_dontneed(kernel, 1, PART)),
        ("unmapped", &|program, kernel| program.start_munmap(kernel, 1, PART)),
        ("mapped over", &|program, kernel| program.start_mmap(kernel, 1, PART)),
        ("moved", &|program, kernel| program.start_mremap(kernel, 1, PART, BLOCK_PAGES + 88)),
        ("moved whole", &|program, kernel| program.start_mremap(kernel, 1, (0, BLOCK_PAGES), BLOCK_PAGES)),
    ];
    for (name, change) in changes {
        for swapin in [Swapin::Always, Swapin::Never] {
            let world = huge_out(|plan| Plan { swapin, ..plan });
            let _on_failure = OnFailure(&world);
            world.program.lock().unwrap().say(format!("{name}, {swapin:?}"));
            change(&mut world.program.lock().unwrap(), &world.engine.kernel);
            world.settle();
            world.adopt();
            world.check();
            end(&world);
        }
    }
    let world = huge_out(always);
    let _on_failure = OnFailure(&world);
    goes(&world);
    assert_eq!(is_huge(&world), [true, true]);
    end(&world);
}

/// The device is taken from the engine.
fn goes(world: &World) {
    world.engine.place.swapoff_begin(0);
    assert!((0..100).any(|_| matches!(world.vacate(0), Vacated::Gone(_))));
}

#[test]
fn s1_6_it_is_split_where_a_part_is_wanted_or_no_huge_page_can_be_had() {
    let world = huge_out(|plan| Plan { swapin: Swapin::Never, ..plan });
    let _on_failure = OnFailure(&world);
    fault(&world, 7);
    let counts = counted(&world);
    assert!((1..=16).contains(&counts["pswpin"]), "{}", counts["pswpin"]);
    assert_eq!((is_huge(&world)[0], counts["thp_swpin"], counts["thp_swpin_fallback"]), (false, 0, 0));
    end(&world);
    // One page was given up and comes anew: from then on the block has a page table.
    let world = huge_out(always);
    let _on_failure = OnFailure(&world);
    world.program.lock().unwrap().start_dontneed(&world.engine.kernel, 1, (100, 1));
    world.settle();
    touch(&world, 1, 100, 1, true);
    world.settle();
    evict_all(&world);
    fault(&world, 7);
    let counts = counted(&world);
    assert_eq!((is_huge(&world)[0], counts["thp_swpin"], counts["thp_swpin_fallback"]), (false, 0, 1));
    end(&world);
}

#[test]
fn s1_6_somebody_else_wants_it_meanwhile_or_the_device_goes() {
    let world = huge_out(always);
    let _on_failure = OnFailure(&world);
    *world.at_device.lock().unwrap() = Some(Box::new(|world| {
        touch(world, 2, 300, 1, true);
        world.serve();
    }));
    fault(&world, 7);
    assert_eq!((is_huge(&world)[0], counted(&world)["pswpin"]), (true, BLOCK_PAGES as u64));
    end(&world);
    let world = huge_out(always);
    let _on_failure = OnFailure(&world);
    *world.at_device.lock().unwrap() = Some(Box::new(|world| {
        world.engine.place.swapoff_begin(0);
        for _ in 0..3 {
            assert!(!matches!(world.vacate(0), Vacated::Gone(_)));
        }
    }));
    fault(&world, 7);
    goes(&world);
    assert_eq!(is_huge(&world), [true, true]);
    end(&world);
}

#[test]
fn s1_7_swapin_says_what_comes_back_whole() {
    // By a single fault, and by a walk.
    let whole = |swapin| {
        let world = huge_out(|plan| Plan { swapin, ..plan });
        let _on_failure = OnFailure(&world);
        fault(&world, 7);
        let at_once = is_huge(&world)[0];
        (0..BLOCKS * BLOCK_PAGES).for_each(|page| fault(&world, page));
        end(&world);
        (at_once, is_huge(&world)[1])
    };
    assert_eq!(whole(Swapin::Always), (true, true));
    assert_eq!(whole(Swapin::Auto), (false, true));
    assert_eq!(whole(Swapin::Madvise), (false, true));
    assert_eq!(whole(Swapin::Never), (false, false));
}

#[test]
fn s1_8_what_goes_and_comes_whole_is_counted_also_by_order() {
    let world = huge_out(always);
    let _on_failure = OnFailure(&world);
    fault(&world, 7);
    fault(&world, BLOCK_PAGES);
    let stats = world.engine.stats;
    let of_order = |list: &[AtomicU64]| list.iter().map(|count| count.load(Relaxed)).collect::<Vec<_>>();
    let twice = [0, 0, 0, 0, 0, 0, 0, 0, 0, 2];
    assert_eq!((of_order(&stats.swpout), of_order(&stats.swpin)), (twice.to_vec(), twice.to_vec()));
    let counts = counted(&world);
    let names = ["thp_swpout", "thp_swpout_fallback", "thp_swpin", "thp_swpin_fallback", "pswpout", "pswpin"];
    assert_eq!(names.map(|name| counts[name]), [2, 0, 2, 0, 1024, 1024]);
    end(&world);
}

#[test]
fn s1_9_it_is_charged_as_a_whole_or_not_at_all() {
    // The limit is one huge page: what is there leaves whole before the other comes.
    let world = advised_by(BLOCKS, 1, |plan| always(Plan { huge: 2, chunks: 2, ..plan }));
    let _on_failure = OnFailure(&world);
    touch(&world, 0, 0, BLOCKS * BLOCK_PAGES, true);
    world.settle();
    evict_all(&world);
    let charged = |world: &World| {
        let resident = world.engine.kernel.resident_pages() as i64;
        assert_eq!(resident + world.engine.budget.get(), 512);
        resident
    };
    for (page, there) in [(7, [true, false]), (BLOCK_PAGES + 7, [false, true]), (8, [true, false])] {
        *world.at_device.lock().unwrap() = Some(Box::new(move |world| assert_eq!(charged(world), 512)));
        fault(&world, page);
        assert_eq!((is_huge(&world), charged(&world)), (there, 512));
    }
    end(&world);
}

#[test]
fn s4_6_a_huge_page_leaves_whole_unless_a_part_of_it_is_gone() {
    let world = huge(|plan| plan);
    let _on_failure = OnFailure(&world);
    world.program.lock().unwrap().start_dontneed(&world.engine.kernel, 1, (100, 20));
    world.settle();
    evict_all(&world);
    let counted = counted(&world);
    assert_eq!((counted["thp_swpout"], counted["thp_swpout_fallback"]), (1, 0));
    assert_eq!(world.engine.place.swapped(), 1004);
    world.engine.measure();
    end(&world);
}
