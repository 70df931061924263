//! Regions whose faults the program's threads answer themselves, on the running kernel.
//!
//! What a signal does is the whole process's: such tests run in a process of their own, see [`alone`].

use pageout::{Advice, Bytes, Delivery, Error, Region, Swap};
use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::thread;
use std::time::{Duration, Instant};

const LIMIT: Bytes = Bytes::mib(16);
const SLACK: u64 = 16 << 20;
const MIB: usize = 1 << 20;
const PAGE: usize = 4096;

fn swap_on(device: &str) -> Option<Swap> {
    match Swap::builder().memory(LIMIT).device(device).delivery(Delivery::Inline).build() {
        Ok(swap) => Some(swap),
        Err(Error::Kernel(reason)) => {
            println!("skipped: {reason}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

fn swap() -> Option<Swap> {
    swap_on("mem,size=256M")
}

fn mixed(n: usize) -> u64 {
    (n as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

fn fill(words: &mut [u64], seed: usize) {
    for (n, page) in words.chunks_mut(512).enumerate() {
        page[0] = mixed(seed + n);
        page[page.len() - 1] = mixed(seed + n) ^ 1;
    }
}

fn verify(words: &[u64], seed: usize) {
    for (n, page) in words.chunks(512).enumerate() {
        assert_eq!(page[0], mixed(seed + n), "page {n}");
        assert_eq!(page[page.len() - 1], mixed(seed + n) ^ 1, "page {n}");
    }
}

/// The address of a page that is out.
fn out(region: &Region) -> *mut u64 {
    let pages = region.len() / PAGE;
    let mut resident = vec![0u8; pages];
    // SAFETY: a vector for every page.
    assert_eq!(unsafe { libc::mincore(region.as_ptr() as *mut _, pages * PAGE, resident.as_mut_ptr()) }, 0);
    let page = resident.iter().position(|byte| byte & 1 == 0).expect("a page that is out");
    // SAFETY: in the region.
    unsafe { region.as_mut_ptr().add(page * PAGE).cast() }
}

/// Runs a test in a process of its own; how that ended. `None`: this is that process, and `test` has run.
fn alone(name: &str, test: impl FnOnce()) -> Option<ExitStatus> {
    if std::env::var("PAGEOUT_ALONE").as_deref() == Ok(name) {
        test();
        return None;
    }
    let program = std::env::current_exe().unwrap();
    let mut child = Command::new(program)
        .args([name, "--exact", "--nocapture", "--test-threads=1"])
        .env("PAGEOUT_ALONE", name)
        .spawn()
        .unwrap();
    let started = Instant::now();
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return Some(status);
        }
        if started.elapsed() > Duration::from_secs(50) {
            child.kill().unwrap();
            panic!("{name} hangs");
        }
        thread::sleep(Duration::from_millis(5));
    }
}

/// The same, for one that should end well.
fn well(name: &str, test: impl FnOnce()) {
    let status = alone(name, test);
    assert!(status.is_none_or(|status| status.success()), "{status:?}");
}

/// The same, for one that a signal should end. Where the kernel allows nothing it ends well.
fn killed(name: &str, signal: i32, test: impl FnOnce()) {
    let Some(status) = alone(name, test) else { return };
    assert!(status.signal() == Some(signal) || status.success() && swap().is_none(), "{status:?}");
}

#[test]
fn four_times_the_limit_by_several_threads() {
    well("four_times_the_limit_by_several_threads", || {
        let Some(swap) = swap() else { return };
        let mut region = swap.map(4 * LIMIT.0 as usize).unwrap();
        let words = region.as_mut_slice::<u64>();
        let part = words.len() / 4;
        for round in 0..2 {
            thread::scope(|scope| {
                for (thread, words) in words.chunks_mut(part).enumerate() {
                    scope.spawn(move || fill(words, thread * part + round));
                }
            });
            thread::scope(|scope| {
                for (thread, words) in words.chunks(part).enumerate() {
                    scope.spawn(move || verify(words, thread * part + round));
                }
            });
        }
        let peak = swap.stats().resident_peak_bytes.load(SeqCst);
        assert!(peak <= LIMIT.0 + SLACK, "peak {}", Bytes(peak));
        let state = region.stats();
        assert!(state.swapped > 2 * LIMIT.0 as usize && state.lost == 0, "{state:?}");
        assert!(state.resident as u64 <= LIMIT.0 + SLACK, "{state:?}");
    });
}
