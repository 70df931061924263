//! Faults are answered in a real signal handler, and no memory is asked for there.
//!
//! The test is the engine's only server: one thread touches managed memory and waits, the test reads the fault
//! and answers it in a handler of SIGUSR1.

mod counting;

use counting::{ALLOCATED, IN_HANDLER};
use pageout::device::{Device, FileDevice};
use pageout::engine::{Config, Engine, Swapin};
use pageout::fault::Server;
use pageout::frame::{Frames, CHUNK};
use pageout::kernel::{Event, Fault, Found, Kernel, Linux};
use pageout::slot::DeviceConfig;
use pageout::space::{BLOCK, PAGE};
use pageout::stats::Stats;
use pageout::swap::swapout::Outgoing;
use pageout::swap::{Lessor, Place};
use std::ops::Range;
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicUsize, Ordering::SeqCst};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

static ENGINE: AtomicPtr<Engine<Linux>> = AtomicPtr::new(std::ptr::null_mut());
static SERVER: AtomicPtr<Server> = AtomicPtr::new(std::ptr::null_mut());
static ADDRESS: AtomicUsize = AtomicUsize::new(0);
static THREAD: AtomicU32 = AtomicU32::new(0);
static ANSWERED: AtomicUsize = AtomicUsize::new(0);

extern "C" fn handler(_signal: libc::c_int) {
    IN_HANDLER.with(|inside| inside.set(true));
    // SAFETY: set before the signal is raised; the test uses neither meanwhile.
    let (engine, server) = unsafe { (&*ENGINE.load(SeqCst), &mut *SERVER.load(SeqCst)) };
    let fault = Fault { address: ADDRESS.load(SeqCst), thread: THREAD.load(SeqCst) };
    server.answer(engine, fault);
    ANSWERED.fetch_add(1, SeqCst);
    IN_HANDLER.with(|inside| inside.set(false));
}

/// One trunk is enough.
struct OneTrunk(AtomicU32);

impl Lessor for OneTrunk {
    fn lease(&self, _device: usize) -> Option<Range<u32>> {
        let trunk = self.0.fetch_add(1, SeqCst);
        (trunk == 0).then_some(0..1)
    }
    fn give_back(&self, _device: usize, _trunk: u32) -> bool {
        false
    }
}

fn map(len: usize) -> usize {
    // SAFETY: a new mapping, never unmapped.
    unsafe {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let base = libc::mmap(std::ptr::null_mut(), len + 2 * BLOCK, access, flags, -1, 0);
        assert_ne!(base, libc::MAP_FAILED);
        // The start of a block, and an area of its own: neighbours of equal kind would merge.
        let start = (base as usize).next_multiple_of(BLOCK);
        assert_eq!(libc::mprotect((start + len) as *mut _, PAGE, libc::PROT_NONE), 0);
        start
    }
}

const FRAMES: usize = 1024;
const PAGES: usize = 2048;

fn engine() -> Option<&'static Engine<Linux>> {
    // SAFETY: gets addresses of our own mappings only.
    let mut kernel = match unsafe { Linux::open() } {
        Ok(kernel) => kernel,
        Err(reason) => {
            println!("skipped: {reason}");
            return None;
        }
    };
    let (staging, probe) = (map(FRAMES * PAGE), map(PAGE));
    // SAFETY: our own page.
    unsafe { (probe as *mut u8).write_volatile(1) };
    kernel.register(staging, FRAMES * PAGE).unwrap();
    kernel.register(probe, PAGE).unwrap();
    kernel.set_probe(probe);
    let config = Config {
        pins: None,
        limit_pages: 1 << 20,
        max_order: 8,
        swapin: Swapin::Auto,
        huge: false,
        zeros: map(CHUNK * PAGE),
    };
    let device: Box<dyn Device> = Box::new(FileDevice::create_memory(64 << 20).unwrap());
    let settings = DeviceConfig::new(0);
    let place = Place::new(2, [(settings, device)], Box::new(OneTrunk(AtomicU32::new(0)))).unwrap();
    // SAFETY: zeros are valid counters.
    let stats: &'static Stats = Box::leak(Box::new(unsafe { std::mem::zeroed() }));
    let frames = Frames::new(staging, FRAMES / CHUNK, staging, 0);
    Some(Box::leak(Box::new(Engine::new(kernel, config, frames, place, stats))))
}

/// Has a thread run `touch`, whose faults are answered in the handler until it is done.
fn answered_in_handler<T: Send>(engine: &Engine<Linux>, touch: impl FnOnce() -> T + Send) -> T {
    thread::scope(|scope| {
        let (done, is_done) = mpsc::channel();
        scope.spawn(move || done.send(touch()).unwrap());
        loop {
            if let Ok(result) = is_done.recv_timeout(Duration::from_millis(1)) {
                return result;
            }
            while engine.kernel.wait_event(1_000_000) {
                let mut events = [Event::Remove { start: 0, end: 0 }; 8];
                let n = engine.kernel.read_events(&mut events);
                for event in &events[..n] {
                    let Event::Fault(fault) = event else { panic!("{event:?}") };
                    ADDRESS.store(fault.address, SeqCst);
                    THREAD.store(fault.thread, SeqCst);
                    let before = ANSWERED.load(SeqCst);
                    // SAFETY: our handler.
                    assert_eq!(unsafe { libc::raise(libc::SIGUSR1) }, 0);
                    assert_eq!(ANSWERED.load(SeqCst), before + 1);
                }
            }
        }
    })
}

#[test]
fn the_fault_path_runs_in_a_signal_handler_and_allocates_nothing() {
    let Some(engine) = engine() else { return };
    // SAFETY: a handler that uses raw system calls and the engine's memory only.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handler as *const () as usize;
        libc::sigfillset(&mut action.sa_mask);
        assert_eq!(libc::sigaction(libc::SIGUSR1, &action, std::ptr::null_mut()), 0);
    }
    ENGINE.store(engine as *const _ as *mut _, SeqCst);
    SERVER.store(Box::leak(Box::new(Server::new())), SeqCst);
    let region = map(PAGES * PAGE);
    engine.adopt(region, region + PAGES * PAGE).unwrap();
    let page = |n: usize| (region + n * PAGE) as *mut u64;
    let write_all = || {
        for n in 0..PAGES {
            // SAFETY: our own mapping.
            unsafe { page(n).write_volatile(n as u64 + 1) };
        }
    };
    let all_there = || {
        // SAFETY: our own mapping.
        (0..PAGES).rev().all(|n| unsafe { page(n).read_volatile() } == n as u64 + 1)
    };
    let counters = |name: &str| engine.stats.counters().find(|(known, _)| *known == name).unwrap().1;

    // New memory: there is room below the limit.
    engine.budget.set(1 << 20, engine.budget.mark());
    answered_in_handler(engine, write_all);
    assert_eq!(ALLOCATED.load(SeqCst), 0, "new memory");

    // From the device, by frames.
    engine.space.spares.refill();
    let mut out = Outgoing::new();
    while engine.frames.ready_pages() < FRAMES - 2 * CHUNK && engine.evict(&mut out, 256) > 0 {}
    assert!(counters("pswpout") > 500);
    engine.budget.set(0, engine.budget.mark());
    assert!(answered_in_handler(engine, all_there));
    assert!(counters("pswpin") > 500);
    assert_eq!(ALLOCATED.load(SeqCst), 0, "from the device");

    // Zeros by frames that others left, and from the device when there is no frame: the fault lets pages leave itself.
    let other = map(PAGES * PAGE);
    engine.adopt(other, other + PAGES * PAGE).unwrap();
    engine.stock();
    let write_other = || {
        for n in 0..PAGES {
            // SAFETY: our own mapping.
            unsafe { ((other + n * PAGE) as *mut u64).write_volatile(!0) };
        }
    };
    for _ in 0..2 {
        answered_in_handler(engine, write_other);
        assert!(answered_in_handler(engine, all_there));
    }
    assert!(counters("allocstall") > 0);
    println!("{} faults, {} stalls", ANSWERED.load(SeqCst), counters("allocstall"));
    // Clusters of the device that were never used before have their tables from those kept ready.
    assert_eq!(ALLOCATED.load(SeqCst), 0, "direct reclaim");
}

#[test]
fn what_is_another_engines_by_now_is_left_to_it() {
    let (Some(engine), Some(other)) = (engine(), engine()) else { return };
    let page = map(PAGE);
    other.adopt(page, page + PAGE).unwrap();
    let is_there = || {
        let mut found = [Found { start: 0, end: 0, huge: false }];
        engine.kernel.scan(page, page + PAGE, &mut found).0 == 1
    };
    // The kernel would take the zeros: it asks only whether the page is registered.
    for engine in [engine, other] {
        engine.budget.set(1 << 20, engine.budget.mark());
        assert!(!is_there());
        Server::new().answer(engine, Fault { address: page, thread: 1 });
    }
    assert!(is_there(), "its own engine answers");
}
