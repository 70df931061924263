//! Regions whose faults the program's threads answer themselves, on the running kernel.
//!
//! What a signal does is the whole process's: such tests run in a process of their own, see [`alone`].

mod api_support;
mod counting;

use api_support::{fill, mixed, verify, LIMIT, MIB, SLACK};
use counting::{ALLOCATED, IN_HANDLER};
use pageout::{Advice, Builder, Bytes, Delivery, Error, Region, Swap};
use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::thread;
use std::time::{Duration, Instant};

const PAGE: usize = 4096;

fn swap_on(device: &str) -> Option<Swap> {
    api_support::swap_on(device, |builder| builder.delivery(Delivery::Inline))
}

fn swap() -> Option<Swap> {
    swap_on("mem,size=256M")
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
    // By looks, not by the clock: all of this may be stopped for a while.
    for _ in 0..10_000 {
        if let Some(status) = child.try_wait().unwrap() {
            return Some(status);
        }
        thread::sleep(Duration::from_millis(5));
    }
    child.kill().unwrap();
    panic!("{name} hangs");
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

/// What a thread may take for slots without asking for memory was soon used up, and what had come back for want of it counted as
/// a device that is full: up to 566 MiB of 64 were there, in four of ten runs over 200.
#[test]
fn fresh_memory_of_many_threads_is_within_the_limit() {
    well("fresh_memory_of_many_threads_is_within_the_limit", || {
        let limit = Bytes::mib(64);
        for threads in [1, 8, 8, 8, 8] {
            let asked = |builder: Builder| builder.memory(limit).delivery(Delivery::Inline);
            let Some(swap) = api_support::swap_on("mem,size=2G", asked) else { return };
            let mut region = swap.map(1024 * MIB).unwrap();
            let words = region.as_mut_slice::<u64>();
            let part = words.len() / threads;
            thread::scope(|scope| {
                for (thread, words) in words.chunks_mut(part).enumerate() {
                    scope.spawn(move || fill(words, thread * part / 512));
                }
            });
            let peak = swap.stats().resident_peak_bytes.load(SeqCst);
            assert!(peak <= limit.0 + SLACK && !swap.is_full(), "{threads}: peak {}", Bytes(peak));
            verify(words, 0);
        }
    });
}

#[test]
fn what_is_touched_far_apart_asks_for_no_memory_in_the_handler() {
    well("what_is_touched_far_apart_asks_for_no_memory_in_the_handler", || {
        let Some(swap) = swap() else { return };
        // A table for each block, and one for each 16 GiB: more than are made ahead, faster than they are made.
        for (step, touches) in [(2 * MIB, 300), (16 << 30, 20)] {
            let Ok(region) = swap.map(step * touches) else { return println!("skipped: no addresses") };
            for n in 0..touches {
                // SAFETY: in the region, of which nobody has a reference.
                let at = unsafe { region.as_mut_ptr().add(n * step) };
                IN_HANDLER.with(|inside| inside.set(true));
                // SAFETY: the same.
                let was = unsafe { at.replace(n as u8) };
                IN_HANDLER.with(|inside| inside.set(false));
                assert_eq!(was, 0);
            }
            // SAFETY: the same.
            (0..touches).for_each(|n| assert_eq!(unsafe { *region.as_ptr().add(n * step) }, n as u8));
        }
        assert_eq!(ALLOCATED.load(SeqCst), 0);
    });
}

#[test]
fn regions_come_and_go_under_load() {
    well("regions_come_and_go_under_load", || {
        let Some(swap) = swap() else { return };
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            for thread in 0..2 {
                let (swap, stop) = (&swap, &stop);
                scope.spawn(move || {
                    let mut region = swap.map(9 * MIB).unwrap();
                    while !stop.load(SeqCst) {
                        fill(region.as_mut_slice(), thread);
                        verify(region.as_slice(), thread);
                    }
                });
            }
            for n in 0..14 {
                let mut region = swap.map((1 + n % 7) * MIB + 5).unwrap();
                assert!(region.as_slice::<u64>().iter().step_by(512).all(|word| *word == 0));
                fill(region.as_mut_slice(), n);
                verify(region.as_slice(), n);
                region.discard(MIB / 2..MIB).unwrap();
                assert!(region.as_slice::<u64>()[MIB / 16..MIB / 8].iter().all(|word| *word == 0));
                verify(&region.as_slice::<u64>()[..MIB / 16], n);
            }
            stop.store(true, SeqCst);
        });
        let started = Instant::now();
        while swap.stats().swapped_pages.load(SeqCst) != 0 {
            assert!(started.elapsed() < Duration::from_secs(5), "slots of regions that are gone");
            thread::sleep(Duration::from_millis(10));
        }
    });
}

#[test]
fn a_system_call_takes_pinned_bytes_only() {
    well("a_system_call_takes_pinned_bytes_only", || {
        let Some(swap) = swap() else { return };
        let mut region = swap.map(64 * MIB).unwrap();
        fill(region.as_mut_slice(), 1);
        let at = out(&region) as usize - region.as_ptr() as usize;
        let mut file = std::fs::File::options().write(true).open("/dev/null").unwrap();
        // Nothing looks at what goes to /dev/null.
        file.write_all(&region.as_slice::<u8>()[at..at + PAGE]).unwrap();
        // SAFETY: two descriptors.
        let ends = unsafe {
            let mut ends = [0; 2];
            assert_eq!(libc::pipe(ends.as_mut_ptr()), 0);
            ends
        };
        // SAFETY: bytes of the region.
        let write = |at: usize| unsafe { libc::write(ends[1], region.as_ptr().add(at).cast(), PAGE) };
        assert_eq!(write(at), -1);
        assert_eq!(std::io::Error::last_os_error().raw_os_error(), Some(libc::EFAULT));
        let pinned = region.pin(at..at + PAGE).unwrap();
        assert_eq!(write(at), PAGE as isize);
        let mut read = [0u8; PAGE];
        // SAFETY: as many bytes as there is room for.
        assert_eq!(unsafe { libc::read(ends[0], read.as_mut_ptr().cast(), PAGE) }, PAGE as isize);
        assert_eq!(read[..8], mixed(1 + at / PAGE).to_ne_bytes());
        drop(pinned);
        // Pages that were never touched are brought in as well; much more than a page, too.
        let fresh = swap.map(4 * MIB).unwrap();
        let pinned = fresh.pin(0..4 * MIB).unwrap();
        let state = fresh.stats();
        assert_eq!(state.resident, 4 * MIB, "{state:?}");
        drop(pinned);
        assert!(matches!(region.pin(0..12 * MIB), Err(Error::Pin { .. })));
        // What is pinned counts once, however often.
        let pins: Vec<_> = (0..1000).map(|n| region.pin(n..n + 1).unwrap()).collect();
        let most = region.pin(0..8 * MIB).unwrap();
        assert!(matches!(region.pin(8 * MIB..8 * MIB + 1), Err(Error::Pin { .. })));
        drop((most, pins));
        region.pin(8 * MIB..16 * MIB).unwrap();
        region.advise(0..4 * MIB, Advice::WillNeed).unwrap();
        verify(region.as_slice(), 1);
    });
}

/// The address that a handler of the program was told, what it found in its signal mask, and how often it was called.
static TOLD: AtomicUsize = AtomicUsize::new(0);
static BLOCKED: AtomicBool = AtomicBool::new(false);
static CALLS: AtomicUsize = AtomicUsize::new(0);
/// Where the handler below reads a word of a region, if anywhere.
static LOOKS_AT: AtomicUsize = AtomicUsize::new(0);
static SEEN: AtomicUsize = AtomicUsize::new(0);

/// The program's handler: maps zeros where a file was cut off, so that the touch goes on.
extern "C" fn map_zeros(_: i32, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: system calls only; the address is that of a page of the test's own mapping.
    unsafe {
        let page = (*info).si_addr() as usize & !(PAGE - 1);
        TOLD.store((*info).si_addr() as usize, SeqCst);
        CALLS.fetch_add(1, SeqCst);
        let mut mask = std::mem::zeroed();
        libc::pthread_sigmask(libc::SIG_BLOCK, std::ptr::null(), &mut mask);
        BLOCKED.store(libc::sigismember(&mask, libc::SIGBUS) == 1, SeqCst);
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
        libc::mmap(page as *mut _, PAGE, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0);
        let looks_at = LOOKS_AT.load(SeqCst) as *const usize;
        if !looks_at.is_null() {
            SEEN.store(looks_at.read_volatile(), SeqCst);
        }
        *libc::__errno_location() = 99;
    }
}

/// A handler with one argument, which can only make room blindly.
extern "C" fn map_zeros_at_told(_: i32) {
    CALLS.fetch_add(1, SeqCst);
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
    // SAFETY: the test's own page.
    unsafe { libc::mmap(TOLD.load(SeqCst) as *mut _, PAGE, libc::PROT_READ, flags, -1, 0) };
}

/// A page that nobody had got to for some milliseconds was taken for one that holds nothing: 1 to 9 in 1000 calls.
#[test]
fn what_is_pinned_is_there() {
    well("what_is_pinned_is_there", || {
        let device = format!("{},size=512M", std::env::temp_dir().join("pageout-pinned").display());
        let asked = |builder: Builder| builder.memory(Bytes::mib(16)).delivery(Delivery::Inline);
        let Some(swap) = api_support::swap_on(&device, asked) else { return };
        let left_out = |seed: usize| {
            let mut random = seed << 32;
            let mut below = |end: usize| {
                random += 1;
                (mixed(random) >> 20) as usize % end
            };
            let mut left_out = 0;
            for _ in 0..250 {
                let len = 3 * MIB + below(24 * MIB);
                let region = swap.map(len).unwrap();
                for _ in 0..10 {
                    for touch in 0..100 {
                        // SAFETY: in the region, which is this thread's alone.
                        unsafe {
                            let at = region.as_mut_ptr().add(below(len));
                            at.read_volatile();
                            if touch % 2 == 0 {
                                at.write_volatile(1);
                            }
                        }
                    }
                    let start = below(len - MIB) / PAGE * PAGE;
                    let end = start + (1 + below(MIB / PAGE)) * PAGE;
                    let Ok(_pinned) = region.pin(start..end) else { continue };
                    let mut there = vec![0u8; (end - start) / PAGE];
                    let from = region.as_ptr().wrapping_add(start) as *mut _;
                    // SAFETY: a vector for every page.
                    assert_eq!(unsafe { libc::mincore(from, end - start, there.as_mut_ptr()) }, 0);
                    left_out += there.iter().filter(|byte| **byte & 1 == 0).count();
                }
            }
            left_out
        };
        let both = thread::scope(|scope| {
            [1, 2].map(|seed| scope.spawn(move || left_out(seed))).map(|t| t.join().unwrap())
        });
        assert_eq!(both, [0, 0], "pages that were not there");
    });
}

/// A filter of one thread refuses what it would answer with: it took its fault again for ever.
#[test]
fn a_thread_that_may_not_ask_is_answered() {
    well("a_thread_that_may_not_ask_is_answered", || {
        for call in [libc::SYS_ioctl, libc::SYS_madvise] {
            let Some(swap) = swap() else { return };
            let mut region = swap.map(4 * LIMIT.0 as usize).unwrap();
            fill(region.as_mut_slice(), 1);
            thread::scope(|scope| {
                scope.spawn(|| {
                    refuse(call);
                    verify(region.as_slice(), 1);
                    fill(region.as_mut_slice(), 2);
                });
            });
            verify(region.as_slice(), 2);
        }
    });
}

/// Puts a filter on the calling thread, by which a call is not permitted.
fn refuse(call: libc::c_long) {
    let step = |code: u32, jf: u8, k: u32| libc::sock_filter { code: code as u16, jt: 0, jf, k };
    // The call's number is the first word of the data.
    let mut filter = [
        step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0),
        step(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 1, call as u32),
        step(libc::BPF_RET | libc::BPF_K, 0, libc::SECCOMP_RET_ERRNO | libc::EPERM as u32),
        step(libc::BPF_RET | libc::BPF_K, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: the program is whole.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        assert_eq!(libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program), 0);
    }
}

fn set_action(handler: usize, flags: i32) -> libc::sigaction {
    // SAFETY: handlers of this test, or SIG_DFL, SIG_IGN.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        let mut before: libc::sigaction = std::mem::zeroed();
        (action.sa_sigaction, action.sa_flags) = (handler, flags);
        assert_eq!(libc::sigaction(libc::SIGBUS, &action, &mut before), 0);
        before
    }
}

/// Pages of a file that is empty: a touch is a SIGBUS that is no region's.
fn beyond_a_file() -> *const u8 {
    let file = tempfile();
    // SAFETY: a new mapping.
    let map = unsafe {
        libc::mmap(std::ptr::null_mut(), 4 * PAGE, libc::PROT_READ, libc::MAP_SHARED, file.as_raw_fd(), 0)
    };
    assert_ne!(map, libc::MAP_FAILED);
    map.cast()
}

fn tempfile() -> std::fs::File {
    use std::os::fd::FromRawFd;
    // SAFETY: a new descriptor.
    unsafe { std::fs::File::from_raw_fd(libc::memfd_create(c"test".as_ptr(), 0)) }
}

fn touch(at: *const u8) -> u8 {
    // SAFETY: mapped, or the signal is what is tested.
    unsafe { at.read_volatile() }
}

#[test]
fn the_programs_handler_gets_what_is_not_a_regions() {
    well("the_programs_handler_gets_what_is_not_a_regions", || {
        set_action(map_zeros as *const () as usize, libc::SA_SIGINFO);
        let Some(swap) = swap() else { return };
        let mut region = swap.map(64 * MIB).unwrap();
        fill(region.as_mut_slice(), 3);
        let file = beyond_a_file();
        for n in 0..3 {
            let at = file.wrapping_add(n * PAGE + 7);
            // SAFETY: this thread's own.
            unsafe { *libc::__errno_location() = 5 };
            assert_eq!(touch(at), 0);
            // SAFETY: the same.
            assert_eq!(unsafe { *libc::__errno_location() }, 5, "as it was before the fault");
            assert_eq!((TOLD.load(SeqCst), CALLS.load(SeqCst)), (at as usize, n + 1));
            assert!(BLOCKED.load(SeqCst), "the signal is blocked in its handler");
            verify(region.as_slice(), 3);
        }
    });
}

#[test]
fn a_handler_of_sigbus_may_touch_regions_if_it_asked_to() {
    well("a_handler_of_sigbus_may_touch_regions_if_it_asked_to", || {
        set_action(map_zeros as *const () as usize, libc::SA_SIGINFO | libc::SA_NODEFER);
        let Some(swap) = swap() else { return };
        let mut region = swap.map(64 * MIB).unwrap();
        fill(region.as_mut_slice(), 3);
        let at = out(&region);
        LOOKS_AT.store(at as usize, SeqCst);
        assert_eq!(touch(beyond_a_file()), 0);
        let page = (at as usize - region.as_ptr() as usize) / PAGE;
        assert_eq!(SEEN.load(SeqCst) as u64, mixed(3 + page));
        assert!(!BLOCKED.load(SeqCst));
    });
}

#[test]
fn a_handler_with_one_argument_and_one_that_comes_later() {
    well("a_handler_with_one_argument_and_one_that_comes_later", || {
        set_action(map_zeros_at_told as *const () as usize, 0);
        let Some(swap) = swap() else { return };
        let mut region = swap.map(64 * MIB).unwrap();
        fill(region.as_mut_slice(), 3);
        let file = beyond_a_file();
        TOLD.store(file as usize, SeqCst);
        assert_eq!(touch(file), 0);
        assert_eq!(CALLS.load(SeqCst), 1);

        KNOWN.store(file as usize + PAGE, SeqCst);
        set_later(libc::SA_SIGINFO);
        verify(region.as_slice(), 3);
        assert_eq!(touch(file.wrapping_add(PAGE)), 0);
        fill(region.as_mut_slice(), 4);
        verify(region.as_slice(), 4);
    });
}

/// What comes later passes on to, and the page that it knows itself.
static OURS: AtomicUsize = AtomicUsize::new(0);
static KNOWN: AtomicUsize = AtomicUsize::new(0);

/// A handler that is installed when there is one of ours, and passes on what it does not know.
extern "C" fn later(signal: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: what sigaction returned is a handler with three arguments.
    unsafe {
        if (*info).si_addr() as usize == KNOWN.load(SeqCst) {
            return map_zeros(signal, info, context);
        }
        let ours: extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void) =
            std::mem::transmute(OURS.load(SeqCst));
        ours(signal, info, context);
    }
}

fn set_later(flags: i32) {
    OURS.store(set_action(later as *const () as usize, flags).sa_sigaction, SeqCst);
}

#[test]
fn a_handler_that_comes_later_may_be_interrupted() {
    well("a_handler_that_comes_later_may_be_interrupted", || {
        let Some(swap) = swap() else { return };
        let mut read = swap.map(64 * MIB).unwrap();
        fill(read.as_mut_slice(), 0);
        set_later(libc::SA_SIGINFO | libc::SA_NODEFER);
        ALARMED.store(read.as_ptr() as usize, SeqCst);
        PAGES.store(read.len() / PAGE, SeqCst);
        alarms_every(100);
        let started = Instant::now();
        while started.elapsed() < Duration::from_secs(1) {
            verify(read.as_slice(), 0);
        }
        end_alarms();
        assert!(CALLS.load(SeqCst) > 100, "{} calls", CALLS.load(SeqCst));
        assert_eq!((WRONG.load(SeqCst), ALLOCATED.load(SeqCst)), (0, 0));
    });
}

#[test]
fn a_swap_puts_a_handler_before_what_the_program_put_there() {
    well("a_swap_puts_a_handler_before_what_the_program_put_there", || {
        set_action(map_zeros as *const () as usize, libc::SA_SIGINFO);
        let Some(first) = swap() else { return };
        let works = |swap: &Swap, seed| {
            let mut region = swap.map(20 * MIB).unwrap();
            fill(region.as_mut_slice(), seed);
            verify(region.as_slice(), seed);
        };
        // Before one that passes on to ours, which must not pass back to it.
        set_later(libc::SA_SIGINFO);
        let second = swap().unwrap();
        let file = beyond_a_file();
        works(&first, 1);
        works(&second, 2);
        assert_eq!(touch(file), 0);
        assert_eq!(CALLS.load(SeqCst), 1);
        drop((first, second));
        // Without one, and with the same one as often as it is put there.
        set_action(libc::SIG_DFL, 0);
        works(&swap().unwrap(), 3);
        for n in 1..10 {
            set_action(map_zeros as *const () as usize, libc::SA_SIGINFO);
            swap().unwrap().map(MIB).unwrap().as_mut_slice::<u64>()[0] = n;
        }
        assert_eq!(touch(file.wrapping_add(PAGE)), 0);
        assert_eq!(CALLS.load(SeqCst), 2);
        // As the program puts back what is its own, without flags and mask.
        let ours = set_action(libc::SIG_DFL, 0).sa_sigaction;
        set_action(ours, 0);
        works(&swap().unwrap(), 4);
        assert_eq!(touch(file.wrapping_add(2 * PAGE)), 0);
        assert_eq!(CALLS.load(SeqCst), 3);
    });
}

#[test]
fn without_a_handler_what_is_not_a_regions_ends_the_program() {
    killed("without_a_handler_what_is_not_a_regions_ends_the_program", libc::SIGBUS, || {
        set_action(libc::SIG_DFL, 0);
        let Some(_swap) = swap() else { return };
        touch(beyond_a_file());
    });
}

#[test]
fn a_signal_that_is_sent_ends_the_program_too() {
    killed("a_signal_that_is_sent_ends_the_program_too", libc::SIGBUS, || {
        set_action(libc::SIG_DFL, 0);
        let Some(_swap) = swap() else { return };
        // SAFETY: no memory.
        unsafe { libc::raise(libc::SIGBUS) };
    });
}

#[test]
fn a_fault_cannot_be_ignored_but_a_signal_that_is_sent_can() {
    killed("a_fault_cannot_be_ignored_but_a_signal_that_is_sent_can", libc::SIGBUS, || {
        set_action(libc::SIG_IGN, 0);
        let Some(swap) = swap() else { return };
        let mut region = swap.map(64 * MIB).unwrap();
        fill(region.as_mut_slice(), 3);
        // SAFETY: no memory.
        unsafe { libc::raise(libc::SIGBUS) };
        verify(region.as_slice(), 3);
        touch(beyond_a_file());
    });
}

#[test]
fn a_handler_for_one_time_is_called_once() {
    killed("a_handler_for_one_time_is_called_once", libc::SIGBUS, || {
        set_action(map_zeros as *const () as usize, libc::SA_SIGINFO | libc::SA_RESETHAND);
        let Some(swap) = swap() else { return };
        let mut region = swap.map(64 * MIB).unwrap();
        fill(region.as_mut_slice(), 3);
        let file = beyond_a_file();
        assert_eq!(touch(file), 0);
        verify(region.as_slice(), 3);
        touch(file.wrapping_add(PAGE));
        // SAFETY: ends in another way than the one that is expected.
        unsafe { libc::_exit(3) };
    });
}

/// As std's does, which looks for its stacks only.
#[test]
fn a_handler_that_sets_the_default_leaves_ours() {
    well("a_handler_that_sets_the_default_leaves_ours", || {
        let Some(swap) = swap() else { return };
        let mut region = swap.map(64 * MIB).unwrap();
        fill(region.as_mut_slice(), 3);
        // SAFETY: no memory.
        unsafe { libc::raise(libc::SIGBUS) };
        verify(region.as_slice(), 3);
    });
}

#[test]
fn what_is_given_up_but_still_there_may_be_pinned() {
    well("what_is_given_up_but_still_there_may_be_pinned", || {
        let Some(swap) = swap() else { return };
        let mut region = swap.map(MIB).unwrap();
        for advice in [libc::MADV_FREE, libc::MADV_DONTNEED] {
            fill(region.as_mut_slice(), 5);
            // SAFETY: bytes of the region, which are not looked at before they are written.
            assert_eq!(unsafe { libc::madvise(region.as_mut_ptr().cast(), 16 * PAGE, advice) }, 0);
            let pinned = region.pin(0..16 * PAGE).unwrap();
            region.advise(0..16 * PAGE, Advice::WillNeed).unwrap();
            drop(pinned);
            verify(&region.as_slice::<u64>()[16 * PAGE / 8..], 5 + 16);
        }
    });
}

#[test]
fn a_thread_that_blocks_sigbus_is_ended() {
    killed("a_thread_that_blocks_sigbus_is_ended", libc::SIGBUS, || {
        let Some(swap) = swap() else { return };
        let mut region = swap.map(64 * MIB).unwrap();
        fill(region.as_mut_slice(), 3);
        let at = out(&region) as usize - region.as_ptr() as usize;
        // SAFETY: plain data.
        unsafe {
            let mut all = std::mem::zeroed();
            libc::sigfillset(&mut all);
            libc::pthread_sigmask(libc::SIG_SETMASK, &all, std::ptr::null_mut());
        }
        // What is pinned needs no signal, also to come in.
        let pinned = region.pin(at..at + PAGE).unwrap();
        touch(region.as_ptr().wrapping_add(at));
        drop(pinned);
        touch(out(&region).cast());
    });
}

/// Reads all of this process's memory that can be read, as what reports crashes does, past any handler of signals.
fn read_all_mapped() {
    let mut bytes = vec![0u8; MIB];
    for line in std::fs::read_to_string("/proc/self/maps").unwrap().lines() {
        let (range, rest) = line.split_once(' ').unwrap();
        let (start, end) = range.split_once('-').unwrap();
        let [start, end] = [start, end].map(|at| usize::from_str_radix(at, 16).unwrap());
        if !rest.starts_with("rw") {
            continue;
        }
        for at in (start..end).step_by(MIB) {
            let len = MIB.min(end - at);
            let to = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: len };
            let from = libc::iovec { iov_base: at as *mut _, iov_len: len };
            // SAFETY: what cannot be read is refused.
            unsafe { libc::process_vm_readv(libc::getpid(), &to, 1, &from, 1, 0) };
        }
    }
}

#[test]
fn a_program_may_read_and_lock_all_that_it_has_mapped() {
    well("a_program_may_read_and_lock_all_that_it_has_mapped", || {
        for delivery in [Delivery::Handler, Delivery::Inline] {
            for lock in [0, libc::MCL_CURRENT, libc::MCL_CURRENT | libc::MCL_ONFAULT] {
                let Some(swap) = api_support::swap_on("mem,size=256M", |builder| builder.delivery(delivery))
                else {
                    continue;
                };
                let mut region = swap.map(40 * MIB).unwrap();
                fill(region.as_mut_slice(), 1);
                if lock == 0 {
                    read_all_mapped();
                // SAFETY: locks pages.
                } else if unsafe { libc::mlockall(lock) } != 0 {
                    println!("skipped: mlockall: {}", std::io::Error::last_os_error());
                }
                verify(region.as_slice(), 1);
                fill(region.as_mut_slice(), 2);
                // What is mapped now is not locked, and what was can leave again.
                let mut other = swap.map(40 * MIB).unwrap();
                // SAFETY: as above.
                unsafe { libc::munlockall() };
                for seed in 2..4 {
                    fill(other.as_mut_slice(), seed);
                    verify(region.as_slice(), seed);
                    fill(region.as_mut_slice(), seed + 1);
                    verify(other.as_slice(), seed);
                }
                // What could not leave while it was locked is tried again now and then.
                let since = Instant::now();
                loop {
                    let resident = region.stats().resident + other.stats().resident;
                    if resident as u64 <= LIMIT.0 + SLACK {
                        break;
                    }
                    assert!(since.elapsed().as_secs() < 30, "{delivery:?} {lock}: {resident}");
                    fill(other.as_mut_slice(), 5);
                }
            }
        }
    });
}

#[test]
fn as_many_as_can_have_it_and_one_more() {
    well("as_many_as_can_have_it_and_one_more", || {
        let build =
            || Swap::builder().memory(LIMIT).device("mem,size=64M").delivery(Delivery::Inline).build();
        let mut swaps = Vec::new();
        let refused = loop {
            match build() {
                Ok(swap) => swaps.push(swap),
                Err(Error::Kernel(reason)) => return println!("skipped: {reason}"),
                Err(error) => break error,
            }
        };
        assert_eq!(swaps.len(), 64);
        assert!(matches!(refused, Error::Inline(_)), "{refused:?}");
        assert!(refused.to_string().contains("as many have it as can, 64"), "{refused}");
        swaps.pop();
        let mut region = build().unwrap().map(32 * MIB).unwrap();
        fill(region.as_mut_slice(), 1);
        verify(region.as_slice(), 1);
    });
}

/// A device that lies on a file, of which everything is then changed.
#[test]
fn what_is_lost_is_told_and_ends_the_program() {
    killed("what_is_lost_is_told_and_ends_the_program", libc::SIGBUS, || {
        extern "C" fn lost(_: i32, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
            // SAFETY: the kernel's argument.
            let expected = unsafe { (*info).si_addr() as usize & !(PAGE - 1) == LOOKS_AT.load(SeqCst) };
            CALLS.fetch_add(1, SeqCst);
            if CALLS.load(SeqCst) > 1 || !expected {
                // SAFETY: ends in another way than the one that is expected.
                unsafe { libc::_exit(3) };
            }
        }
        set_action(lost as *const () as usize, libc::SA_SIGINFO | libc::SA_RESETHAND);
        let directory = std::env::temp_dir().join(format!("pageout-inline-{}", std::process::id()));
        {
            use std::os::unix::fs::DirBuilderExt;
            std::fs::DirBuilder::new().mode(0o700).create(&directory).unwrap();
        }
        let path = directory.join("swap");
        let open = || {
            use std::os::unix::fs::OpenOptionsExt;
            std::fs::File::options()
                .read(true)
                .write(true)
                .create(true)
                .mode(0o600)
                .truncate(false)
                .open(&path)
        };
        let file = open().unwrap();
        let swap = swap_on(&format!("{},size=256M", path.display()));
        std::fs::remove_dir_all(&directory).unwrap();
        let Some(swap) = swap else { return };
        let mut region = swap.map(64 * MIB).unwrap();
        fill(region.as_mut_slice(), 3);
        // This goes by way of the engine's threads: files are not for handlers.
        verify(region.as_slice(), 3);
        let at = out(&region);
        LOOKS_AT.store(at as usize, SeqCst);
        let garbage = vec![7u8; MIB];
        for n in 0..128 {
            use std::os::unix::fs::FileExt;
            file.write_all_at(&garbage, (n * MIB) as u64).unwrap();
        }
        let start = at as usize - region.as_ptr() as usize;
        let refused = region.pin(start..start + PAGE);
        let refused = refused.unwrap_err();
        assert!(
            matches!(refused, Error::Memory { errno, .. } if errno.raw_os_error() == libc::EHWPOISON),
            "{refused:?}"
        );
        assert!(refused.to_string().contains("a device has lost some of it"), "{refused}");
        assert!(region.stats().lost >= PAGE);
        // The handler is called once, comes back, and the next touch is not for it.
        touch(at.cast());
    });
}

/// A region that a handler of SIGALRM reads, and how many pages it has.
static ALARMED: AtomicUsize = AtomicUsize::new(0);
static PAGES: AtomicUsize = AtomicUsize::new(0);
static WRONG: AtomicUsize = AtomicUsize::new(0);

extern "C" fn on_alarm(_: i32) {
    let call = CALLS.fetch_add(1, SeqCst);
    IN_HANDLER.with(|inside| inside.set(true));
    for n in 0..4 {
        let page = mixed(call * 4 + n) as usize % PAGES.load(SeqCst);
        // SAFETY: in the region.
        let found = unsafe { ((ALARMED.load(SeqCst) + page * PAGE) as *const u64).read_volatile() };
        WRONG.fetch_add((found != mixed(page)) as usize, SeqCst);
    }
    IN_HANDLER.with(|inside| inside.set(false));
}

fn alarms_every(us: i64) {
    let every = libc::timeval { tv_sec: 0, tv_usec: us };
    // SAFETY: a handler that touches memory only.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = on_alarm as *const () as usize;
        action.sa_flags = libc::SA_RESTART;
        assert_eq!(libc::sigaction(libc::SIGALRM, &action, std::ptr::null_mut()), 0);
        let timer = libc::itimerval { it_interval: every, it_value: every };
        assert_eq!(libc::setitimer(libc::ITIMER_REAL, &timer, std::ptr::null_mut()), 0);
    }
}

/// No handler runs any more.
fn end_alarms() {
    // SAFETY: ends the timer.
    unsafe { libc::setitimer(libc::ITIMER_REAL, &std::mem::zeroed(), std::ptr::null_mut()) };
    while {
        let before = CALLS.load(SeqCst);
        thread::sleep(Duration::from_millis(100));
        CALLS.load(SeqCst) != before
    } {}
}

#[test]
fn handlers_of_other_signals_touch_regions_whatever_they_interrupt() {
    well("handlers_of_other_signals_touch_regions_whatever_they_interrupt", || {
        let Some(swap) = swap() else { return };
        let mut read = swap.map(64 * MIB).unwrap();
        let mut region = swap.map(64 * MIB).unwrap();
        fill(read.as_mut_slice(), 0);
        fill(region.as_mut_slice(), 5);
        ALARMED.store(read.as_ptr() as usize, SeqCst);
        PAGES.store(read.len() / PAGE, SeqCst);
        alarms_every(200);
        // Signals come in touches, in calls of the API that hold the engine's locks, in malloc and free.
        let (started, mut round) = (Instant::now(), 0);
        while started.elapsed() < Duration::from_secs(3) {
            let kept: Vec<Vec<u8>> = (1..200).map(|n| vec![n as u8; n * 97]).collect();
            let at = round % 60 * MIB;
            let pinned = region.pin(at..at + MIB).unwrap();
            assert!(region.stats().lost == 0 && read.stats().resident > 0);
            verify(&region.as_slice::<u64>()[at / 8..(at + MIB) / 8], 5 + at / PAGE);
            drop(pinned);
            region.advise(at..at + 3 * MIB, Advice::Cold).unwrap();
            drop(swap.map(MIB).unwrap());
            drop(kept);
            round += 1;
        }
        end_alarms();
        verify(region.as_slice(), 5);
        assert!(CALLS.load(SeqCst) > 100, "{} calls", CALLS.load(SeqCst));
        assert_eq!((WRONG.load(SeqCst), ALLOCATED.load(SeqCst)), (0, 0));
    });
}

#[test]
fn what_the_program_closes_costs_time_only() {
    well("what_the_program_closes_costs_time_only", || {
        let Some(swap) = swap() else { return };
        let mut region = swap.map(48 * MIB).unwrap();
        fill(region.as_mut_slice(), 4);
        // SAFETY: this process has no descriptor that it needs beyond the standard ones.
        unsafe { libc::syscall(libc::SYS_close_range, 3, u32::MAX, 0) };
        verify(region.as_slice(), 4);
        // And others may get their numbers.
        let files: Vec<_> = (0..1000).map_while(|_| std::fs::File::open("/dev/null").ok()).collect();
        fill(region.as_mut_slice(), 5);
        verify(region.as_slice(), 5);
        drop((region, swap));
        assert!(files.iter().all(|file| file.metadata().is_ok()), "closed by its number");
    });
}

#[test]
fn no_more_descriptors_may_be_had() {
    well("no_more_descriptors_may_be_had", || {
        let handler = api_support::swap_on("mem,size=256M", |builder| builder);
        for swap in [swap(), handler].into_iter().flatten() {
            let mut region = swap.map(48 * MIB).unwrap();
            fill(region.as_mut_slice(), 4);
            // SAFETY: a whole structure.
            let limit = |most| unsafe {
                let mut limit: libc::rlimit = std::mem::zeroed();
                assert_eq!(libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit), 0);
                let before = std::mem::replace(&mut limit.rlim_cur, most);
                assert_eq!(libc::setrlimit(libc::RLIMIT_NOFILE, &limit), 0);
                before
            };
            let before = limit(0);
            verify(region.as_slice(), 4);
            drop((region, swap));
            limit(before);
        }
    });
}

#[test]
fn a_child_has_no_regions_and_may_make_its_own() {
    well("a_child_has_no_regions_and_may_make_its_own", || {
        let Some(first) = swap() else { return };
        let mut region = first.map(40 * MIB).unwrap();
        fill(region.as_mut_slice(), 8);
        let child = |test: &dyn Fn() -> i32| {
            // SAFETY: the child leaves without cleaning up.
            match unsafe { libc::fork() } {
                0 => unsafe { libc::_exit(test()) },
                child => child,
            }
        };
        let ended = |child| {
            let mut status = 0;
            assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
            status
        };
        let touches = child(&|| touch(region.as_ptr()).into());
        assert_eq!(libc::WTERMSIG(ended(touches)), libc::SIGSEGV);
        let own = child(&|| {
            let Some(swap) = swap() else { return 1 };
            let mut region = swap.map(40 * MIB).unwrap();
            fill(region.as_mut_slice(), 1);
            verify(region.as_slice(), 1);
            7
        });
        let status = ended(own);
        assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 7, "{status:#x}");
        // One that lives on has the descriptors still: nobody waits for it.
        let sleeps = child(&|| {
            thread::sleep(Duration::from_secs(30));
            0
        });
        verify(region.as_slice(), 8);
        drop((region, first));
        // SAFETY: our own child.
        unsafe { libc::kill(sleeps, libc::SIGKILL) };
        assert_eq!(libc::WTERMSIG(ended(sleeps)), libc::SIGKILL);
    });
}

#[test]
fn a_small_stack_is_enough() {
    well("a_small_stack_is_enough", || {
        let Some(swap) = swap() else { return };
        let mut region = swap.map(40 * MIB).unwrap();
        let words = region.as_mut_slice::<u64>();
        let small = || thread::Builder::new().stack_size(16 << 10);
        thread::scope(|scope| {
            small().spawn_scoped(scope, || fill(words, 8)).unwrap();
        });
        thread::scope(|scope| {
            small().spawn_scoped(scope, || drop(region.pin(0..8 * MIB).unwrap())).unwrap();
        });
        verify(region.as_slice(), 8);
    });
}

#[test]
fn it_takes_no_rights() {
    well("it_takes_no_rights", || {
        if unsafe { libc::getuid() } == 0 {
            // SAFETY: no memory that matters.
            unsafe {
                assert_eq!(libc::setgroups(0, std::ptr::null()), 0);
                assert_eq!((libc::setgid(65534), libc::setuid(65534)), (0, 0));
                // Else /proc/self is root's.
                assert_eq!(libc::prctl(libc::PR_SET_DUMPABLE, 1), 0);
            }
        }
        let Some(swap) = swap() else { return };
        let mut region = swap.map(40 * MIB).unwrap();
        fill(region.as_mut_slice(), 8);
        verify(region.as_slice(), 8);
    });
}

/// Random reads and writes by several threads, each checked, while others discard and unmap parts and signals come.
/// `PAGEOUT_ATTACK` says for how many seconds.
#[test]
fn under_attack() {
    well("under_attack", || {
        const THREADS: usize = 3;
        let seconds = std::env::var("PAGEOUT_ATTACK").map_or(3, |seconds| seconds.parse().unwrap());
        let Some(swap) = swap() else { return };
        let region = swap.map(4 * LIMIT.0 as usize).unwrap();
        let scratch = swap.map(16 * MIB).unwrap();
        let (base, pages) = (region.as_ptr() as usize, region.len() / PAGE);
        let mut read = swap.map(32 * MIB).unwrap();
        fill(read.as_mut_slice(), 0);
        ALARMED.store(read.as_ptr() as usize, SeqCst);
        PAGES.store(read.len() / PAGE, SeqCst);
        alarms_every(1000);
        let until = Instant::now() + Duration::from_secs(seconds);
        let faults = swap.stats().pgfault.load(SeqCst);
        thread::scope(|scope| {
            for thread in 0..THREADS {
                scope.spawn(move || {
                    let mut versions = vec![0u64; pages / THREADS];
                    let mut random = thread;
                    while Instant::now() < until {
                        for _ in 0..64 {
                            random = mixed(random) as usize;
                            let own = random % versions.len();
                            let page = own * THREADS + thread;
                            let word = (base + page * PAGE + random / 7 % 512 * 8) as *mut u64;
                            let first = (base + page * PAGE) as *mut u64;
                            // SAFETY: this thread's own page.
                            unsafe {
                                let known = if versions[own] == 0 { 0 } else { mixed(page) ^ versions[own] };
                                assert_eq!(first.read_volatile(), known, "page {page}");
                                match random >> 32 & 15 {
                                    0 => {
                                        let at = (base + page * PAGE) as *mut _;
                                        assert_eq!(libc::madvise(at, PAGE, libc::MADV_DONTNEED), 0);
                                        versions[own] = 0;
                                    }
                                    1..=4 => {
                                        versions[own] += 1;
                                        word.write_volatile(random as u64);
                                        first.write_volatile(mixed(page) ^ versions[own]);
                                    }
                                    _ => {}
                                }
                            }
                        }
                    }
                });
            }
            scope.spawn(|| {
                let mut n = 0;
                while Instant::now() < until {
                    n += 1;
                    // A region that goes as a whole, and one that goes in parts.
                    let mut other = swap.map((1 + n % 5) * MIB).unwrap();
                    fill(other.as_mut_slice(), n);
                    verify(other.as_slice(), n);
                    let part = scratch.as_ptr() as usize + n * 16 % 4000 * PAGE;
                    // SAFETY: nobody else uses it.
                    unsafe {
                        for page in 0..16 {
                            ((part + page * PAGE) as *mut u64).write_volatile(1);
                        }
                        let flags =
                            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE;
                        let access = libc::PROT_READ | libc::PROT_WRITE;
                        let map = libc::mmap(part as *mut _, 8 * PAGE, access, flags, -1, 0);
                        assert_eq!(map as usize, part);
                        assert_eq!((part as *const u64).read_volatile(), 0);
                    }
                }
            });
        });
        end_alarms();
        assert_eq!((WRONG.load(SeqCst), ALLOCATED.load(SeqCst)), (0, 0));
        let peak = swap.stats().resident_peak_bytes.load(SeqCst);
        let faults = swap.stats().pgfault.load(SeqCst) - faults;
        println!("{faults} faults, {} signals, peak {}", CALLS.load(SeqCst), Bytes(peak));
        assert!(peak <= LIMIT.0 + SLACK, "peak {}", Bytes(peak));
    });
}
