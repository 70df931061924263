//! Batches of writes: with io_uring and where it is refused, and figures for both.
//!
//! `cargo test --release -p pageout --test device_batch -- --ignored --nocapture`

mod device_support;

use device_support::{c, read, round_trip, write_all, Memory, Scratch};
use pageout::device::{Device, Errno, FileDevice, FileOptions, Queue, Run, PAGE};
use rustix::mm::{mprotect, MprotectFlags};
use std::ffi::{c_int, c_ulong, CString};
use std::time::{Duration, Instant};

const SIZE: u64 = 32 << 20;

fn queued(scratch: &Scratch, direct: bool) -> FileDevice {
    let options = FileOptions { direct, queue: Queue::Always };
    FileDevice::create_unlinked(&c(&scratch.0), SIZE, options).unwrap()
}

#[test]
fn io_uring_round_trip() {
    let scratch = Scratch::new("uring");
    for direct in [true, false] {
        round_trip(&queued(&scratch, direct));
    }
}

#[test]
fn large_batches_are_whole_and_in_place() {
    let scratch = Scratch::new("large");
    let device = queued(&scratch, true);
    // More runs than a plan has, each a page, every second page of the device, then the others.
    let memory = Memory::filled(1000 * PAGE, 11);
    let place = |page: usize| (page % 500 * 2 + page / 500) as u64 * PAGE as u64;
    let runs: Vec<Run> = (0..1000).map(|page| memory.run(page * PAGE, place(page), PAGE)).collect();
    assert!(write_all(&device, &runs).iter().all(Result::is_ok));
    let back = Memory::new(1000 * PAGE);
    read(&device, back.run(0, 0, 1000 * PAGE)).unwrap();
    for page in 0..1000 {
        let found = &back.words()[place(page) as usize / 8..][..PAGE / 8];
        assert!(found == &memory.words()[page * PAGE / 8..][..PAGE / 8], "page {page}");
    }
}

#[test]
fn a_run_that_fails_in_flight_fails_alone() {
    let scratch = Scratch::new("hole");
    let memory = Memory::filled(64 * PAGE, 13);
    for direct in [true, false] {
        let device = queued(&scratch, direct);
        let mut runs: Vec<Run> =
            (0..64).map(|page| memory.run(page * PAGE, (page * 2 * PAGE) as u64, PAGE)).collect();
        // Page 1 is below what anybody may map.
        runs[40].address = PAGE;
        // A neighbour of the bad one, merged with it.
        runs[41].at = runs[40].at + PAGE as u64;
        for (number, result) in write_all(&device, &runs).into_iter().enumerate() {
            assert_eq!(result, if number == 40 { Err(Errno::FAULT) } else { Ok(()) }, "run {number}");
        }
    }
}

/// Of neighbours that are merged the second ends in a hole. What had gone of it, and of the first, is not taken for what follows.
#[test]
fn what_follows_a_run_that_failed_is_written() {
    let scratch = Scratch::new("behind");
    for (lens, hole) in [([2, 8, 1, 3], 8), ([4, 3, 1, 1], 6)] {
        let memory = Memory::filled(32 * PAGE, 19);
        // SAFETY: a page of the test's own, that is not looked at.
        unsafe { mprotect((memory.address + hole * PAGE) as *mut _, PAGE, MprotectFlags::empty()) }.unwrap();
        let mut runs: Vec<Run> = Vec::new();
        let (mut page, mut at) = (0, 0);
        for len in lens {
            runs.push(memory.run(page * PAGE, at, len * PAGE));
            (page, at) = (page + len + 1, at + (len * PAGE) as u64);
        }
        // So that there are several to be in flight.
        runs.push(memory.run(31 * PAGE, SIZE / 2, PAGE));
        for direct in [true, false] {
            for queue in [Queue::Always, Queue::Never] {
                let options = FileOptions { direct, queue };
                let device = FileDevice::create_unlinked(&c(&scratch.0), SIZE, options).unwrap();
                let results = write_all(&device, &runs);
                assert_eq!(results, [Ok(()), Err(Errno::FAULT), Ok(()), Ok(()), Ok(())], "{options:?}");
                for run in [0, 2, 3, 4].map(|number| runs[number]) {
                    let back = Memory::new(run.len);
                    read(&device, back.run(0, run.at, run.len)).unwrap();
                    let there = (run.address - memory.address) / 8;
                    assert!(back.words() == &memory.words()[there..there + run.len / 8], "{options:?}");
                }
            }
        }
    }
}

#[test]
fn two_writers_share_a_device() {
    let scratch = Scratch::new("two");
    let device = queued(&scratch, true);
    std::thread::scope(|scope| {
        for half in 0..2u64 {
            let device = &device;
            scope.spawn(move || {
                let memory = Memory::filled(64 * PAGE, half);
                let back = Memory::new(PAGE);
                for _ in 0..10 {
                    let place = |page: usize| half * SIZE / 2 + (page * 2 * PAGE) as u64;
                    let runs: Vec<Run> =
                        (0..64).map(|page| memory.run(page * PAGE, place(page), PAGE)).collect();
                    assert!(write_all(device, &runs).iter().all(Result::is_ok));
                    read(device, back.run(0, place(63), PAGE)).unwrap();
                    assert!(back.words() == &memory.words()[63 * PAGE / 8..]);
                }
            });
        }
    });
}

#[test]
fn a_forked_child_writes_without_the_ring() {
    extern "C" {
        fn fork() -> c_int;
        fn _exit(code: c_int) -> !;
        fn waitpid(pid: c_int, status: *mut c_int, options: c_int) -> c_int;
    }
    let scratch = Scratch::new("fork");
    let device = queued(&scratch, true);
    round_trip(&device);
    let memory = Memory::filled(4 * PAGE, 17);
    let runs: Vec<Run> = (0..4).map(|page| memory.run(page * PAGE, (page * 2 * PAGE) as u64, PAGE)).collect();
    let mut results = [Err(Errno::NOSYS); 4];
    let mut status = 0;
    // SAFETY: the child calls nothing that allocates or locks, and ends by `_exit`.
    unsafe {
        match fork() {
            0 => {
                device.write_batch(&runs, &mut results);
                _exit(c_int::from(!results.iter().all(Result::is_ok)));
            }
            child => assert_eq!(waitpid(child, &mut status, 0), child),
        }
    }
    assert_eq!(status, 0);
    let back = Memory::new(PAGE);
    read(&device, back.run(0, 6 * PAGE as u64, PAGE)).unwrap();
    assert!(back.words() == &memory.words()[3 * PAGE / 8..]);
    round_trip(&device);
}

/// Makes the kernel answer EPERM to a system call, for this thread alone and for good.
fn refuse(system_call: u32) {
    refuse_by(system_call, Errno::PERM);
}

fn refuse_by(system_call: u32, errno: Errno) {
    #[repr(C)]
    struct Step(u16, u8, u8, u32);
    #[repr(C)]
    struct Filter(u16, *const Step);
    extern "C" {
        fn prctl(option: c_int, ...) -> c_int;
    }
    const SET_SECCOMP: c_int = 22;
    const SET_NO_NEW_PRIVILEGES: c_int = 38;
    const FILTER: c_ulong = 2;
    const ON: c_ulong = 1;
    const NONE: c_ulong = 0;
    // Load the call's number; if it is the one, the error; else go on.
    let steps = [
        Step(0x20, 0, 0, 0),
        Step(0x15, 0, 1, system_call),
        Step(0x06, 0, 0, 0x0005_0000 | errno.raw_os_error() as u32),
        Step(0x06, 0, 0, 0x7fff_0000),
    ];
    let filter = Filter(4, steps.as_ptr());
    // SAFETY: the filter lives until the call returns.
    unsafe {
        assert_eq!(prctl(SET_NO_NEW_PRIVILEGES, ON, NONE, NONE, NONE), 0);
        assert_eq!(prctl(SET_SECCOMP, FILTER, &filter), 0);
    }
}

#[test]
fn where_io_uring_is_refused_pwritev_does_it() {
    let scratch = Scratch::new("seccomp");
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let before = queued(&scratch, true);
            round_trip(&before);
            refuse(linux_raw_sys::general::__NR_io_uring_enter);
            // A ring that was there before the filter.
            round_trip(&before);
            round_trip(&before);
            refuse(linux_raw_sys::general::__NR_io_uring_setup);
            round_trip(&queued(&scratch, true));
        });
    });
}

/// The kernel has no memory for a moment: what was put into the ring is taken back, and does not go for the next one's.
#[test]
fn what_a_ring_did_not_take_is_not_in_it_for_the_next() {
    let scratch = Scratch::new("again");
    let device = queued(&scratch, true);
    round_trip(&device);
    let write = |seed: u64, first: usize| {
        let memory = Memory::filled(16 * PAGE, seed);
        let place = |page: usize| ((first + page) * 2 * PAGE) as u64;
        let runs: Vec<Run> = (0..16).map(|page| memory.run(page * PAGE, place(page), PAGE)).collect();
        assert!(write_all(&device, &runs).iter().all(Result::is_ok));
        let back = Memory::new(PAGE);
        for page in 0..16 {
            read(&device, back.run(0, place(page), PAGE)).unwrap();
            assert!(back.words() == &memory.words()[page * PAGE / 8..][..PAGE / 8], "page {page}");
        }
    };
    for errno in [Errno::AGAIN, Errno::BUSY, Errno::NOMEM] {
        std::thread::scope(|scope| {
            scope.spawn(|| {
                refuse_by(linux_raw_sys::general::__NR_io_uring_enter, errno);
                write(1, 0);
            });
        });
        write(2, 16);
        write(3, 0);
    }
}

const SPACE: u64 = 256 << 20;
const RUNS: usize = 32;

/// The median time of a batch of `RUNS` runs of `len` bytes, no two of them neighbours.
fn batch(device: &FileDevice, memory: &Memory, len: usize) -> Duration {
    let room = SPACE / (RUNS as u64 + 1);
    let runs: Vec<Run> =
        (0..RUNS).map(|number| memory.run(number * len, number as u64 * room / 4096 * 4096, len)).collect();
    let mut results = vec![Err(Errno::NOSYS); RUNS];
    let mut times: Vec<_> = (0..15)
        .map(|_| {
            let start = Instant::now();
            // SAFETY: the memory stays.
            unsafe { device.write_batch(&runs, &mut results) };
            let took = start.elapsed();
            assert!(results.iter().all(Result::is_ok), "{results:?}");
            took
        })
        .collect();
    times.sort();
    times[times.len() / 2]
}

#[test]
#[ignore = "measures; run by hand, see above"]
fn io_uring_against_pwritev() {
    let memory = Memory::filled(RUNS * (2 << 20), 5);
    println!("{:24} {:>8} {:>14} {:>14}", "32 runs to", "of", "pwritev", "io_uring");
    for (name, directory, direct) in [
        ("disk, O_DIRECT", env!("CARGO_TARGET_TMPDIR"), true),
        ("disk, page cache", env!("CARGO_TARGET_TMPDIR"), false),
        ("tmpfs", "/dev/shm", false),
    ] {
        let directory = CString::new(directory).unwrap();
        let device = |queue| {
            let options = FileOptions { direct, queue };
            let device = FileDevice::create_unlinked(&directory, SPACE, options).expect("a file");
            rustix::fs::fallocate(&device, rustix::fs::FallocateFlags::empty(), 0, SPACE).unwrap();
            device
        };
        let (one, many) = (device(Queue::Never), device(Queue::Always));
        for kib in [2048, 512, 256, 64, 4] {
            let (size, len) = (format!("{kib} KiB"), kib << 10);
            // The first round allocates and converts the blocks.
            let _ = (batch(&one, &memory, len), batch(&many, &memory, len));
            let (one, many) = (batch(&one, &memory, len), batch(&many, &memory, len));
            let rate = |took: Duration| (RUNS * len) as f64 / took.as_secs_f64() / 1e6;
            println!(
                "{name:24} {size:>8} {:>8.0?} {:>5.0} {:>8.0?} {:>5.0}  (time, MB/s)",
                one,
                rate(one),
                many,
                rate(many)
            );
        }
    }
}
