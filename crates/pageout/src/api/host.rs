//! The engine's threads in the program: what the agent's keeper is to `pageout run`.
//!
//! | thread | does |
//! |---|---|
//! | `pageout` | opens everything, takes up regions, corrects the budget, ends it all |
//! | `pageout-serve`, several | read events, answer faults; all but one sleep unless faults wait for each other |
//! | `pageout-evict` | lets pages leave ahead of need |
//!
//! They have a file table of their own, so that nothing the program closes is theirs: the first thread leaves
//! the program's table before it opens anything, and the others are its children. So the engine's descriptors
//! are used on these threads only, and the engine is dropped here. All signals are blocked in them. A panic in
//! one ends the process: regions would hang or read as zeros.
//!
//! With inline delivery the program's threads answer their faults themselves ([`inline`]); servers read events, and answer
//! what is handed to them. The kernel's descriptors are in the program's file table too, then.
//!
//! They use the program's allocator, which is why memory of a region must never be behind it.

use super::devices::{Asked, Opened, Trunks};
use super::inline;
use super::managed::{Managed, THREADS};
use super::memory::Mapping;
use super::{Bytes, Error};
use crate::engine::{Config, Engine, Swapin};
use crate::fault::Server;
use crate::frame::{Frames, CHUNK};
use crate::kernel::{HugePages, Kernel, Linux};
use crate::reclaim::Round;
use crate::space::{BLOCK, BLOCK_ORDER, PAGE};
use crate::stats::Stats;
use crate::swap::swapout::Outgoing;
use crate::swap::Place;
use crate::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use crate::sync::FOREVER;
use rustix::fd::RawFd;
use rustix::io::Errno;
use std::boxed::Box;
use std::io;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender};
use std::sync::Arc;
use std::thread::{self, Builder};
use std::time::{Duration, Instant};
use std::vec::Vec;

/// The longest pause between two looks at what is resident, when nothing happens.
const LONGEST_PAUSE: Duration = Duration::from_millis(64);
const SHORTEST_PAUSE: Duration = Duration::from_micros(500);
/// A look takes at most this share of the time, as long as the longest pause allows that, or, while much leaves, of which it is to be known how much is there, this.
const LOOK_SHARE: u32 = 50;
const LOOK_SHARE_PRESSED: u32 = 5;
/// Resident pages are counted anew, so often at most, when the thread did not run for so long in the middle.
const RECOUNTS: usize = 8;
const UNDISTURBED: Duration = Duration::from_millis(1);
/// Servers of faults: all threads but the first and the evictor.
const SERVERS: usize = THREADS - 2;
/// Clusters that are discarded in one rest of the evictor at most.
const DISCARDS: usize = 16;

/// What to build an engine of.
pub(super) struct Plan {
    pub(super) memory: Bytes,
    pub(super) devices: Vec<Asked>,
    pub(super) swapin: Swapin,
    pub(super) max_order: u8,
    pub(super) stats: Arc<Stats>,
    /// The descriptors of inline delivery, in the program's file table.
    pub(super) inline: Option<[RawFd; 2]>,
}

/// What the program asks of the first thread.
pub(super) enum Request {
    /// Take up a mapping.
    Adopt { start: usize, end: usize, answer: SyncSender<Result<(), Errno>> },
    /// Memory came or went: look now.
    Look,
    /// No region is left.
    Stop,
}

/// The engine, for who keeps its threads alive: valid from start until `Request::Stop` is sent.
#[derive(Clone, Copy)]
pub(super) struct Handle(*const Engine<Managed>);

// SAFETY: Engine is Sync.
unsafe impl Send for Handle {}
unsafe impl Sync for Handle {}

impl Handle {
    /// # Safety
    /// `Request::Stop` is sent only after the last use of what is returned.
    pub(super) unsafe fn engine(&self) -> &Engine<Managed> {
        // SAFETY: by contract.
        unsafe { &*self.0 }
    }
}

/// Starts the first thread. It answers once with the engine, or with why there is none.
pub(super) fn start(
    plan: Plan,
    requests: Receiver<Request>,
    ready: Sender<Result<Handle, Error>>,
) -> io::Result<thread::JoinHandle<()>> {
    let mask = block_signals();
    let thread = Builder::new().name("pageout".into()).spawn(move || run(plan, &requests, &ready));
    restore_signals(&mask);
    thread
}

/// The life of the engine.
fn run(plan: Plan, requests: &Receiver<Request>, ready: &Sender<Result<Handle, Error>>) {
    let _last_word = EndOnPanic;
    let host = match leave_file_table(plan.inline).map_err(Error::Thread).and_then(|()| Host::new(&plan)) {
        Ok(host) => host,
        Err(error) => {
            let _ = ready.send(Err(error));
            return;
        }
    };
    thread::scope(|scope| {
        let evictor = Builder::new().name("pageout-evict".into()).spawn_scoped(scope, || host.evict());
        let mut spawned = evictor.map(drop);
        let mut servers = 0;
        while spawned.is_ok() && servers < SERVERS {
            let server = Builder::new().name("pageout-serve".into());
            spawned = server.spawn_scoped(scope, || host.serve()).map(drop);
            servers += usize::from(spawned.is_ok());
        }
        match spawned {
            Ok(()) => {
                let _ = ready.send(Ok(Handle(&host.engine)));
                host.follow(requests);
            }
            Err(error) => {
                let _ = ready.send(Err(Error::Thread(error)));
            }
        }
        host.stop(servers);
    });
    // Regions are unmapped by now; of what was moved out of one nobody knows.
    host.engine.abandon();
    // The engine goes first, and its registration with it: unmapping raises no event then. With inline delivery the
    // program, or a child of it, may keep the registration.
    if plan.inline.is_some() {
        for mapping in &host._memory {
            host.engine.kernel.unregister(mapping.start(), mapping.len());
        }
    }
    drop(host);
    drop(plan);
}

const GO_ON: u32 = 0;
/// The servers read events for a little longer, each until all know.
const STOPPING: u32 = 1;
const STOPPED: u32 = 2;

struct Host {
    engine: Engine<Managed>,
    state: AtomicU32,
    /// Servers that know that it is to stop.
    know: AtomicUsize,
    /// The evictor sleeps.
    dozing: AtomicBool,
    /// Discarding it raises an event, which wakes the server.
    bell: usize,
    /// Dropped after the engine.
    _memory: Vec<Mapping>,
}

impl Host {
    fn new(plan: &Plan) -> Result<Self, Error> {
        let limit_pages = plan.memory.pages() as usize;
        let linux = match plan.inline {
            // SAFETY: this thread has its own file table, and kept these in it.
            Some(numbers) => unsafe { inline::linux(numbers) },
            // SAFETY: it gets the addresses of regions, and of what is made here.
            None => unsafe { Linux::open() },
        };
        let linux = linux.map_err(Error::Kernel)?;
        let devices = plan.devices.iter().enumerate().map(|(index, spec)| spec.open(index));
        let devices: Vec<Opened> = devices.collect::<Result<_, _>>()?;

        let (frames, huge) = Frames::counts(limit_pages);
        let map = |len: usize| {
            Mapping::new(len).map_err(|errno| Error::Memory {
                what: "the engine",
                len: Bytes(len as u64),
                errno,
            })
        };
        let zeros = map(CHUNK * PAGE)?;
        let small = map(frames * PAGE)?;
        let large = map(huge * BLOCK)?;
        let probe = map(2 * PAGE)?;
        let attic = (!linux.frees_tables()).then(|| map(BLOCK)).transpose()?;
        let trunks = Box::new(Trunks::of(&devices));
        let cpus = thread::available_parallelism().map_or(1, |n| n.get());
        let devices = devices.into_iter().map(|opened| (opened.config, opened.device));
        let place = Place::new(cpus, devices, trunks)
            .map_err(|error| Error::Device { name: "swap".into(), why: std::format!("{error}") })?;
        // From here on the first to be dropped: to unmap what is registered would wait for a reader of events.
        let mut linux = linux;
        // SAFETY: our own page.
        unsafe { (probe.start() as *mut u8).write_volatile(1) };
        let registered = [&small, &large, &probe];
        for (n, mapping) in registered.iter().enumerate() {
            linux.register(mapping.start(), mapping.len()).map_err(|errno| {
                // With inline delivery the program has the descriptor, too.
                registered[..n].iter().for_each(|before| linux.unregister(before.start(), before.len()));
                let (what, len) = ("the engine (registering)", Bytes(mapping.len() as u64));
                Error::Memory { what, len, errno }
            })?;
        }
        linux.set_probe(probe.start());
        if let Some(attic) = &attic {
            linux.set_attic(attic.start());
        }

        let config = Config {
            pins: None,
            limit_pages: limit_pages as i64,
            max_order: plan.max_order,
            swapin: plan.swapin,
            huge: plan.max_order >= BLOCK_ORDER && HugePages::now() != HugePages::Never,
            zeros: zeros.start(),
        };
        let staging = [small.start()..small.end(), large.start()..large.end()];
        let kernel = Managed::new(linux, staging);
        kernel.enlist();
        let frames = Frames::new(small.start(), frames / CHUNK, large.start(), huge);
        // SAFETY: `run` holds the plan, and so the counters, until the engine is gone.
        let stats: &'static Stats = unsafe { &*Arc::as_ptr(&plan.stats) };
        Stats::set(&stats.limit_bytes, plan.memory.0);
        Stats::set(&stats.active, 1);
        let mut engine = Engine::new(kernel, config, frames, place, stats);
        if plan.inline.is_some() {
            engine = engine.with_inline();
            engine.stock();
        }
        engine.measure();
        Ok(Self {
            engine,
            state: AtomicU32::new(GO_ON),
            know: AtomicUsize::new(0),
            dozing: AtomicBool::new(false),
            bell: probe.start() + PAGE,
            _memory: [zeros, small, large, probe].into_iter().chain(attic).collect(),
        })
    }

    fn serve(&self) {
        let _last_word = EndOnPanic;
        self.engine.kernel.enlist();
        let mut server = Server::new();
        let mut knows = false;
        loop {
            let timeout_ns = match self.state.load(Ordering::Acquire) {
                GO_ON => FOREVER,
                STOPPING => {
                    if !core::mem::replace(&mut knows, true) {
                        self.know.fetch_add(1, Ordering::Release);
                    }
                    1_000_000
                }
                _ => return,
            };
            server.serve(&self.engine, timeout_ns);
            if self.dozing.load(Ordering::Relaxed) && self.engine.pressed() {
                self.engine.kick();
            }
        }
    }

    fn evict(&self) {
        let _last_word = EndOnPanic;
        let engine = &self.engine;
        engine.kernel.enlist();
        let mut out = Box::new(Outgoing::new());
        loop {
            let wanted = engine.wanted.heard();
            if self.state.load(Ordering::Acquire) != GO_ON {
                return;
            }
            let round = engine.balance(&mut out);
            let Some(nap) = round.nap_ns() else { continue };
            self.dozing.store(true, Ordering::Relaxed);
            engine.wanted.wait(wanted, nap);
            self.dozing.store(false, Ordering::Relaxed);
            // Nobody has called for so long. Under load what is free is written again at once.
            let rests = || round == Round::Idle && engine.wanted.heard() == wanted;
            for _ in 0..DISCARDS {
                if !rests() || !engine.place.discard() {
                    break;
                }
            }
        }
    }

    /// The first thread's work: the program's requests, and a look now and then, the less often the less happens. Requests put
    /// no look off, and however many come together there is one look after them.
    fn follow(&self, requests: &Receiver<Request>) {
        let (mut pause, mut last) = (SHORTEST_PAUSE, 0);
        let mut soonest = Instant::now() + pause;
        let mut due = soonest;
        loop {
            let now = Instant::now();
            if now < due {
                match requests.recv_timeout(due - now) {
                    Ok(Request::Adopt { start, end, answer }) => {
                        let _ = answer.send(self.engine.adopt(start, end));
                        due = due.min(soonest);
                    }
                    Ok(Request::Look) => due = due.min(soonest),
                    Err(RecvTimeoutError::Timeout) => {}
                    Ok(Request::Stop) | Err(RecvTimeoutError::Disconnected) => return,
                }
                continue;
            }
            let begun = spent();
            self.look();
            self.engine.policy.lock().unpark_in_time(self.engine.kernel.now());
            let faults = self.engine.stats.pgfault.load(Ordering::Relaxed);
            let share = if self.engine.pressed() { LOOK_SHARE_PRESSED } else { LOOK_SHARE };
            let shortest = SHORTEST_PAUSE.max((spent() - begun) * share).min(LONGEST_PAUSE);
            pause = if faults == last { (pause * 2).min(LONGEST_PAUSE) } else { SHORTEST_PAUSE };
            last = faults;
            soonest = Instant::now() + shortest;
            due = Instant::now() + pause.max(shortest);
        }
    }

    fn look(&self) {
        let engine = &self.engine;
        engine.stock();
        // Who was kept from running in the middle has counted what moved meanwhile twice, or not at all.
        let mut mark = engine.budget.mark();
        for _ in 0..RECOUNTS {
            let (begun, ran) = (Instant::now(), spent());
            mark = engine.budget.mark();
            engine.kernel.set_resident(engine.space.resident().0);
            if begun.elapsed() < spent() - ran + UNDISTURBED {
                break;
            }
        }
        engine.measured(engine.kernel.resident_pages(), mark);
        if engine.pressed() {
            engine.kick();
        }
    }

    /// Ends the others. The bell comes back when a server has read its event, so the `servers` must be there until no more is
    /// rung. That is once each knows: who has not looked since waits for events, or for a call.
    fn stop(&self, servers: usize) {
        self.state.store(STOPPING, Ordering::Release);
        self.engine.kick();
        while self.know.load(Ordering::Acquire) < servers {
            self.engine.calls.ring_all();
            // SAFETY: our own page, which holds nothing.
            let _ =
                unsafe { rustix::mm::madvise(self.bell as *mut _, PAGE, rustix::mm::Advice::LinuxDontNeed) };
        }
        self.state.store(STOPPED, Ordering::Release);
    }
}

/// For how long the calling thread has run. On a busy machine the time that passes says nothing about what a look costs.
fn spent() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

/// A thread of the engine that is gone leaves faults unanswered: then the whole program ends.
struct EndOnPanic;

impl Drop for EndOnPanic {
    fn drop(&mut self) {
        if thread::panicking() {
            // Not by std: who has its lock may wait for memory of ours.
            let line = b"pageout: the engine cannot go on; the program is ended\n";
            let _ = rustix::io::write(rustix::stdio::stderr(), line);
            std::process::abort();
        }
    }
}

/// Gives the calling thread, and the threads it starts, a file table of their own. Of the program's
/// descriptors only standard error stays in it, for a last word, and those to `keep`.
fn leave_file_table(keep: Option<[RawFd; 2]>) -> io::Result<()> {
    // SAFETY: no pointers; nothing on this thread uses the program's descriptors.
    unsafe {
        if libc::unshare(libc::CLONE_FILES) != 0 {
            return Err(io::Error::last_os_error());
        }
        let null = rustix::fs::open(c"/dev/null", rustix::fs::OFlags::RDWR, rustix::fs::Mode::empty())?;
        rustix::stdio::dup2_stdin(&null)?;
        rustix::stdio::dup2_stdout(&null)?;
        core::mem::forget(null);
        let mut keep = keep.unwrap_or([2; 2]).map(|number| number as libc::c_uint);
        keep.sort_unstable();
        for (from, to) in [(3, keep[0].saturating_sub(1)), (keep[0] + 1, keep[1].saturating_sub(1))] {
            if from <= to {
                libc::syscall(libc::SYS_close_range, from, to, 0);
            }
        }
        libc::syscall(libc::SYS_close_range, keep[1] + 1, libc::c_uint::MAX, 0);
    }
    Ok(())
}

/// Blocks every signal for the calling thread; returns the mask before.
pub(super) fn block_signals() -> libc::sigset_t {
    // SAFETY: both sets are valid for the calls.
    unsafe {
        let (mut all, mut before) = (core::mem::zeroed(), core::mem::zeroed());
        libc::sigfillset(&mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &all, &mut before);
        before
    }
}

pub(super) fn restore_signals(mask: &libc::sigset_t) {
    // SAFETY: a mask that the call above gave.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, mask, core::ptr::null_mut()) };
}
