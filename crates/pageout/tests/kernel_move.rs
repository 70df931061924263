//! `UFFDIO_MOVE` on the running kernel, while the pages that it moves are being written: whatever it answers, the
//! pages are where `Kernel::move_pages` says. Linux 6.18 answers EEXIST now and then for pages that it has moved.
//! `PAGEOUT_STRESS_MS` says how long (3,000).

use pageout::kernel::{Event, Found, Kernel, Linux};
use rustix::io::Errno;
use rustix::mm::{mmap_anonymous, MapFlags, ProtFlags};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

const PAGE: usize = 4096;
const PAGES: usize = 16;
const LEN: usize = PAGES * PAGE;

/// Movers, each with pages and frames of its own in the same two mappings, as evictors and servers are.
const MOVERS: usize = 2;

fn map(kernel: &Linux) -> usize {
    let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::NORESERVE);
    let len = MOVERS * LEN;
    // SAFETY: a fresh mapping.
    let at = unsafe { mmap_anonymous(std::ptr::null_mut(), len, protection, flags).unwrap() as usize };
    kernel.register(at, len).unwrap();
    at
}

fn mapped(kernel: &Linux, at: usize) -> bool {
    kernel.scan(at, at + PAGE, &mut [Found::NONE; 1]).0 == 1
}

/// Moves all, in as many calls as it takes. EEXIST, which nobody but the kernel's own move can cause here, is an error.
fn move_all(kernel: &Linux, to: usize, from: usize, wake: bool) {
    let mut done = 0;
    while done < LEN {
        match kernel.move_pages(to + done, from + done, LEN - done, wake) {
            Ok(()) => done = LEN,
            Err(partial) => {
                done += partial.done;
                let harmless = partial.done > 0 || matches!(partial.errno, Errno::AGAIN | Errno::BUSY);
                assert!(harmless, "page {}: {}", done / PAGE, partial.errno);
            }
        }
    }
}

#[test]
fn pages_are_where_the_answer_says() {
    // SAFETY: gets addresses of our own mappings only.
    let Ok(kernel) = (unsafe { Linux::open() }) else {
        println!("skipped: no userfaultfd");
        return;
    };
    let (memory, frames) = (map(&kernel), map(&kernel));
    let zeros = [0u8; PAGE];
    for page in 0..MOVERS * PAGES {
        kernel.copy(memory + page * PAGE, zeros.as_ptr() as usize, PAGE, true).unwrap();
    }
    let time = std::env::var("PAGEOUT_STRESS_MS").ok().and_then(|ms| ms.parse().ok()).unwrap_or(3000);
    let end = Instant::now() + Duration::from_millis(time);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for mover in 0..MOVERS {
            let (kernel, stop) = (&kernel, &stop);
            let (memory, frames) = (memory + mover * LEN, frames + mover * LEN);
            scope.spawn(move || {
                let mut moves = 0u64;
                while Instant::now() < end && !stop.load(Relaxed) {
                    move_all(kernel, frames, memory, false);
                    assert!(!mapped(kernel, memory) && mapped(kernel, frames + LEN - PAGE));
                    move_all(kernel, memory, frames, true);
                    moves += 1;
                    // The faults are answered by the move back; they are read so that they do not pile up.
                    kernel.read_events(&mut [Event::Remove { start: 0, end: 0 }; 32]);
                    kernel.wake(memory, LEN);
                }
                stop.store(true, Relaxed);
                println!("{moves} moves each way");
            });
            scope.spawn(move || {
                // One count for each page, kept here as well: a page that came back as zeros is found at once.
                let mut counts = [0u64; PAGES];
                while !stop.load(Relaxed) {
                    for (page, count) in counts.iter_mut().enumerate() {
                        let word = (memory + page * PAGE) as *mut u64;
                        // SAFETY: mapped, or brought back by the other thread.
                        unsafe {
                            assert_eq!(word.read_volatile(), *count, "page {page}");
                            *count += 1;
                            word.write_volatile(*count);
                        }
                    }
                }
            });
        }
    });
}
