//! A world for the engine: simulated kernel, model program, device with rules, and everything else that the
//! engine must keep true, checked while it stands still.

#![allow(dead_code)]

pub mod program;
pub mod schedule;

use pageout::device::faulty::{FaultyDevice, Operation};
use pageout::device::{Device, Errno, FileDevice, Run};
use pageout::engine::{Config, Engine, Key, Swapin};
use pageout::fault::Server;
use pageout::frame::{Frames, CHUNK, EXECUTABLE};
use pageout::kernel::sim::Simulated;
use pageout::kernel::Kernel;
use pageout::page::Tag;
use pageout::slot::{DeviceConfig, MAX_DEVICES, TRUNK_SLOTS};
use pageout::space::pins::Pins;
use pageout::space::{Region, Regions, BLOCK, BLOCK_PAGES};
use pageout::stats::Stats;
use pageout::swap::heir::SlotRun;
use pageout::swap::moved::Moved;
use pageout::swap::swapin::Incoming;
use pageout::swap::swapout::Outgoing;
use pageout::swap::vacate::Vacated;
use pageout::swap::{Lessor, Place};
#[cfg(shuttle)]
pub use shuttle::{sync::Mutex, thread};
#[cfg(not(shuttle))]
pub use std::{sync::Mutex, thread};

use program::{Habits, Program, Random, PAGE};
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, OnceLock, TryLockError, Weak};
use std::time::{Duration, Instant};

/// What a world is made of.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    pub blocks: usize,
    pub chunks: usize,
    pub huge: usize,
    pub threads: usize,
    pub limit_pages: i64,
    pub slots: u64,
    pub swapin: Swapin,
    pub max_order: u8,
    pub partial: u32,
    /// So many of 65536 copies find no memory.
    pub short: u32,
    /// Other threads of the program go on in one of so many calls of the kernel; 0: never.
    pub meanwhile: usize,
    /// Other engine threads work in one of so many requests to the device; 0: never.
    pub nested: usize,
    /// Reads take long: the leader leaves while it answers.
    pub slow: bool,
    /// The device is a disk that turns.
    pub rotational: bool,
    /// What is free there is discarded, at any time.
    pub discards: bool,
    /// The threads are real ones.
    pub real: bool,
    /// So many of 65536 mappings can be executed.
    pub executable: u32,
    /// The program's threads answer their own faults. With real threads.
    pub inline: bool,
    /// Units can be pinned.
    pub pins: bool,
    pub habits: Habits,
}

impl Plan {
    /// A plan by seed.
    pub fn by_seed(seed: u64) -> Self {
        let mut random = Random(seed ^ 0xabcd);
        let huge = random.one_in(3);
        let blocks = 2 + random.below(4);
        // What others hold while they wait for the device below us must not be all that there is.
        let nested = random.one_in(2);
        Self {
            blocks,
            chunks: random.below(10) + if nested { 10 * (DEPTH + 1) } else { 2 },
            huge: if huge { 1 + random.below(2) } else { 0 },
            threads: 1 + random.below(6),
            limit_pages: 64 + random.below(blocks * BLOCK_PAGES) as i64,
            slots: if random.one_in(4) { 513 + random.below(1024) as u64 } else { 16384 },
            swapin: [Swapin::Auto, Swapin::Always, Swapin::Madvise, Swapin::Never][random.below(4)],
            max_order: [0, 3, 4, 6, 9, 9, 9, 9][random.below(8)],
            partial: if random.one_in(2) { 0 } else { random.below(20_000) as u32 },
            short: if random.one_in(4) { random.below(10_000) as u32 } else { 0 },
            meanwhile: 1 + random.below(8),
            nested: if nested { 1 + random.below(6) } else { 0 },
            slow: random.one_in(2),
            rotational: seed % 4 == 3,
            discards: seed % 3 == 1,
            real: false,
            executable: [0, 0, 0, 0, 8192, 32768][Random(seed ^ 0xe8ec).below(6)],
            inline: false,
            pins: false,
            habits: Habits { huge, share: random.below(2), ..Habits::ALL },
        }
    }
}

/// Before each request other threads of the engine may run, on the same stack.
struct Hooked {
    inner: Arc<FaultyDevice<FileDevice>>,
    for_handlers: bool,
    world: Arc<OnceLock<Weak<World>>>,
}

impl Hooked {
    fn record(&self, operation: Operation, at: u64, len: usize) {
        if let Some(world) = self.world.get().and_then(Weak::upgrade) {
            world.requests.lock().unwrap().push((operation, at, len));
        }
    }

    fn others(&self) {
        if let Some(world) = self.world.get().and_then(Weak::upgrade) {
            let then = world.at_device.lock().unwrap().take();
            if let Some(then) = then {
                world.reached.fetch_add(1, Relaxed);
                then(&world);
            }
            world.others();
        }
    }
}

impl Device for Hooked {
    unsafe fn read_vectored(&self, at: u64, parts: &[(usize, usize)]) -> Result<(), Errno> {
        self.record(Operation::Read, at, parts.iter().map(|(_, len)| len).sum());
        self.others();
        let result = unsafe { self.inner.read_vectored(at, parts) };
        if let Some(world) = self.world.get().and_then(Weak::upgrade).filter(|world| world.plan.slow) {
            world.engine.kernel.advance(100_000_000);
        }
        self.others();
        result
    }

    unsafe fn write_batch(&self, runs: &[Run], results: &mut [Result<(), Errno>]) {
        runs.iter().for_each(|run| self.record(Operation::Write, run.at, run.len));
        self.others();
        unsafe { self.inner.write_batch(runs, results) };
        self.others();
    }

    fn discard(&self, at: u64, len: u64) -> Result<(), Errno> {
        self.others();
        let result = self.inner.discard(at, len);
        self.others();
        result
    }

    fn is_for_handlers(&self) -> bool {
        self.for_handlers
    }
}

struct NoTrunks;

impl Lessor for NoTrunks {
    fn lease(&self, _device: usize) -> Option<Range<u32>> {
        None
    }

    fn give_back(&self, _device: usize, _trunk: u32) -> bool {
        false
    }
}

/// Lends trunks of a device to the worlds that share it, as `run` does: never the same twice.
#[derive(Clone)]
struct Trunks(Arc<AtomicU32>);

impl Lessor for Trunks {
    fn lease(&self, _device: usize) -> Option<Range<u32>> {
        let trunk = self.0.fetch_add(1, Relaxed);
        (trunk < TRUNKS).then_some(trunk..trunk + 1)
    }

    fn give_back(&self, _device: usize, _trunk: u32) -> bool {
        false
    }
}

/// Calls of the kernel in one step of a world before it counts as a hang.
const PATIENCE: usize = 2_000_000;
/// Calls after which no more threads work within each other: where writes fail each page may have others work, who let
/// other pages go.
const ENOUGH: usize = 100_000;
/// Rounds after which something that has not ended never does.
const ROUNDS: usize = if cfg!(shuttle) { 20_000 } else { 200_000 };
/// Trunks of a device that worlds share.
const TRUNKS: u32 = 16;
/// Engine threads that work within each other.
const DEPTH: usize = 3;

/// Sets the flag when its thread panics, so that the others end and the failure is seen.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            self.0.store(true, Relaxed);
        }
    }
}

/// Works until the flag is set.
pub fn until(stop: &AtomicBool, mut work: impl FnMut()) {
    let _stop = Stop(stop);
    while !stop.load(Relaxed) {
        work();
        thread::yield_now();
    }
}

/// What somebody does at a certain point.
pub type Deed = Box<dyn FnOnce(&World) + Send>;

pub struct World {
    pub engine: Engine<Simulated>,
    pub device: Arc<FaultyDevice<FileDevice>>,
    pub program: Mutex<Program>,
    pub plan: Plan,
    seed: u64,
    /// Who shares the device, if others do.
    trunks: Option<Trunks>,
    /// It reads slots that its parent counts.
    is_heir: bool,
    servers: Mutex<Vec<Server>>,
    seats: Mutex<Vec<Server>>,
    outs: Mutex<Vec<Outgoing>>,
    /// What the devices were asked for: where, and how many bytes.
    pub requests: Mutex<Vec<(Operation, u64, usize)>>,
    /// What a schedule does at the next request to the device.
    pub at_device: Mutex<Option<Deed>>,
    /// What a schedule does after so many more calls of the kernel.
    pub at_call: Mutex<Option<(usize, Deed)>>,
    /// How many of these points were reached.
    pub reached: AtomicUsize,
    random: Mutex<Random>,
    /// How often the engine called the kernel, since somebody last waited for it.
    pub calls: AtomicUsize,
    depth: AtomicUsize,
}

pub fn stats() -> &'static Stats {
    // SAFETY: counters that are all 0.
    Box::leak(Box::new(unsafe { std::mem::zeroed() }))
}

impl World {
    pub fn new(plan: Plan, seed: u64) -> Arc<Self> {
        let device = Arc::new(FaultyDevice::memory(plan.slots * PAGE as u64, seed).unwrap());
        Self::on(device, None, None, plan, seed)
    }

    /// A world whose device has room for children's, too.
    pub fn with_trunks(plan: Plan, seed: u64) -> Arc<Self> {
        let size = u64::from(TRUNKS) * TRUNK_SLOTS * PAGE as u64;
        let device = Arc::new(FaultyDevice::memory(size, seed).unwrap());
        Self::on(device, Some(Trunks(Arc::default())), None, plan, seed)
    }

    fn on(
        device: Arc<FaultyDevice<FileDevice>>,
        trunks: Option<Trunks>,
        key: Option<Key>,
        plan: Plan,
        seed: u64,
    ) -> Arc<Self> {
        let kernel = Simulated::new(plan.blocks, plan.chunks, plan.huge, seed);
        kernel.set_partial(plan.partial);
        kernel.set_short(plan.short);
        kernel.set_executable(plan.executable);
        let config = Config {
            pins: plan.pins.then(|| &*Box::leak(Box::new(Pins::new()))),
            limit_pages: plan.limit_pages,
            max_order: plan.max_order,
            swapin: plan.swapin,
            huge: plan.huge > 0,
            zeros: kernel.zeros(),
        };
        let frames = Frames::new(kernel.frames_base(), plan.chunks, kernel.huge_base(), plan.huge);
        if plan.executable > 0 {
            frames.open_executable(kernel.executable_base());
        }
        let known = Arc::new(OnceLock::new());
        let hooked = Hooked { inner: device.clone(), for_handlers: plan.inline, world: known.clone() };
        let (slots, first, lessor) = match &trunks {
            Some(trunks) => (0, 0, Box::new(trunks.clone()) as Box<dyn Lessor>),
            None => (plan.slots, 1, Box::new(NoTrunks) as Box<dyn Lessor>),
        };
        let config_of_device = DeviceConfig {
            rotational: plan.rotational,
            discard: plan.discards,
            first,
            ..DeviceConfig::new(slots)
        };
        let devices = [(config_of_device, Box::new(hooked) as Box<dyn Device>)];
        let place = Place::new(2, devices, lessor).unwrap();
        let pages = plan.blocks * BLOCK_PAGES;
        let mut program = Program::new(kernel.program_base(), pages, plan.threads, plan.habits, seed);
        program.map(&kernel, 0, pages);
        let mut engine = Engine::new(kernel, config, frames, place, stats());
        engine.stock();
        let is_heir = key.is_some();
        if let Some(key) = key {
            engine = engine.with_key(key);
        }
        if plan.inline {
            engine.kernel.set_signals();
            engine = engine.with_inline();
        }
        let world = Arc::new(Self {
            engine,
            trunks,
            is_heir,
            device,
            program: Mutex::new(program),
            plan,
            seed,
            servers: Mutex::default(),
            seats: Mutex::default(),
            outs: Mutex::default(),
            requests: Mutex::default(),
            at_device: Mutex::default(),
            at_call: Mutex::default(),
            reached: AtomicUsize::new(0),
            random: Mutex::new(Random(seed ^ 0x5eed)),
            calls: AtomicUsize::new(0),
            depth: AtomicUsize::new(0),
        });
        known.set(Arc::downgrade(&world)).unwrap();
        let weak = Arc::downgrade(&world);
        world.engine.kernel.set_held(move |exclusively| {
            weak.upgrade().is_none_or(|world| world.engine.events.is_held(exclusively))
        });
        let weak = Arc::downgrade(&world);
        world.engine.kernel.set_meanwhile(move || {
            if let Some(world) = weak.upgrade() {
                world.meanwhile();
            }
        });
        world
    }

    /// A fork: the child's world, and the slots that its engine inherits. The engine of this one stands still only meanwhile, and
    /// other threads of the program may go on a little before the clone and after it. No child: nobody knows what it has.
    pub fn fork(&self) -> (Option<Arc<Self>>, Vec<SlotRun>) {
        self.program.lock().unwrap().forking = true;
        self.engine.stand_still(true);
        let (mut heirlooms, mut slots) = (Vec::new(), Vec::new());
        let take = |heirloom| {
            heirlooms.push(heirloom);
            true
        };
        let mut regions = self.engine.bequeath(&mut slots, take).expect("room for all names");
        let areas: Vec<Region> = regions.iter().collect();
        self.go_on();
        let kernel = &self.engine.kernel;
        let plan = Plan { habits: Habits { faulty: self.plan.habits.faulty, ..Habits::ACCESS }, ..self.plan };
        let child =
            Self::on(self.device.clone(), self.trunks.clone(), Some(self.engine.key), plan, self.seed ^ 0xf0);
        let offset = child.engine.kernel.program_base().wrapping_sub(kernel.program_base());
        {
            let program = self.program.lock().unwrap();
            let mut other = child.program.lock().unwrap();
            other.values.clone_from(&program.values);
            // Nobody runs there until it has what it inherits.
            other.ending = true;
            for value in &mut other.values {
                // The child may have been made before the page was dropped, or after.
                value.lazy |= std::mem::take(&mut value.removing) > 0;
            }
            kernel.fork_to(&child.engine.kernel);
        }
        self.go_on();
        let changes = self.engine.cloned(&mut regions);
        let pages = (0..self.plan.blocks * BLOCK_PAGES).map(|page| kernel.program_base() + page * PAGE);
        // What moves just now takes its mark along.
        let is_quiet = kernel.changing() == 0;
        // So does what came where something is marked, before that is told of, and moves on at once: nothing tells where.
        let is_marked = |at: usize| kernel.page(at).marked && kernel.page(at).registered;
        pages.for_each(|at| assert!(!is_quiet || !is_marked(at), "{at:#x} is marked"));
        drop(regions);
        self.engine.stand_still(false);
        self.program.lock().unwrap().forking = false;
        let in_child = |at: usize| at.wrapping_add(offset);
        let mut parents = Regions::default();
        areas.iter().for_each(|area| parents.insert(*area));
        let (mut there, mut marked) = (Regions::default(), Regions::default());
        let pages = self.plan.blocks * BLOCK_PAGES;
        let of_child =
            |index: usize| child.engine.kernel.page(in_child(kernel.program_base() + index * PAGE));
        let mut index = 0;
        while index < pages {
            let page = of_child(index);
            let alike = |next: &usize| {
                let next = of_child(*next);
                (next.mapping, next.marked) == (page.mapping, page.marked)
            };
            let len = (index..pages).take_while(alike).count();
            let start = kernel.program_base() + index * PAGE;
            let mapping = Region { start, end: start + len * PAGE };
            index += len;
            if page.mapping != 0 {
                there.insert(mapping);
            }
            if page.marked {
                marked.insert(mapping);
            }
        }
        // Another process may look, before anything is registered there: zeros are mapped.
        for _ in 0..self.below(20) {
            let at = kernel.program_base() + self.below(self.plan.blocks * BLOCK_PAGES) * PAGE;
            if there.find(at).is_some() {
                let _ = child.engine.kernel.access(0, in_child(at), None);
            }
        }
        let moved = Moved::new(&parents, there, marked, &changes, false);
        for region in moved.parents() {
            let _ = child.engine.adopt(in_child(region.start), in_child(region.end));
        }
        if heirlooms.iter().any(|heirloom| moved.place(heirloom.page as usize).is_err()) {
            return (None, slots);
        }
        // A child whose memory is refused is killed.
        child.engine.kernel.set_short(0);
        assert!(child.engine.inherit(&heirlooms, |page| moved.place(page).ok().flatten().map(in_child)));
        child.engine.kernel.set_short(self.plan.short);
        child.adopt();
        child.engine.measure();
        child.program.lock().unwrap().ending = false;
        (Some(child), slots)
    }

    /// The program does a little more while the engine's locks are held.
    fn go_on(&self) {
        for _ in 0..self.below(30) {
            self.program.lock().unwrap().step(&self.engine.kernel);
        }
    }

    /// Another device comes.
    pub fn switch_on(self: &Arc<Self>, number: usize, serial: usize, slots: u64) {
        self.switch_on_by(number, serial, slots, 0);
    }

    /// The same of a priority.
    pub fn switch_on_by(self: &Arc<Self>, number: usize, serial: usize, slots: u64, priority: i32) {
        let inner = Arc::new(FaultyDevice::memory(slots * PAGE as u64, self.seed).unwrap());
        let world = Arc::new(OnceLock::from(Arc::downgrade(self)));
        let config = DeviceConfig { first: 1, priority, ..DeviceConfig::new(slots) };
        self.engine
            .place
            .swapon(number, serial, config, Box::new(Hooked { inner, for_handlers: false, world }))
            .unwrap();
    }

    /// One walk of a thread that clears a device.
    pub fn vacate(&self, number: usize) -> Vacated {
        let mut incoming = Box::new(Incoming::new());
        self.engine.vacate(&mut incoming, number)
    }

    /// A world for [`World::threads_meet`], with all of its memory adopted.
    pub fn of_threads(seed: u64, inline: bool) -> Arc<Self> {
        let plan = Plan::by_seed(seed);
        // A thread answers its own fault only in what the engine was given.
        let of_others = if inline { Habits { grow: 0, refuse: 0, ..plan.habits } } else { plan.habits };
        let plan = Plan { inline, habits: of_others, ..plan };
        let plan = Plan { meanwhile: 0, nested: 0, real: true, chunks: plan.chunks.max(2), ..plan };
        let world = Self::new(plan, seed);
        world.adopt();
        world.engine.measure();
        world
    }

    /// The handler of a thread of the program whose touch raised a fault, if there is one.
    fn answer_own(&self) {
        let waiting = self.engine.kernel.waiting();
        if waiting.is_empty() {
            return;
        }
        let (thread, address, _) = waiting[self.below(waiting.len())];
        let seat = self.seats.lock().unwrap().pop();
        let mut seat = seat.unwrap_or_else(Server::inline);
        seat.answer_own(&self.engine, address, thread);
        self.seats.lock().unwrap().push(seat);
        // It touches the page again.
        self.engine.kernel.wake(address & !(PAGE - 1), PAGE);
    }

    /// Real threads: two that answer faults, two evictors, one that adopts, one that does what else there is, and the
    /// program on the caller's. For `PAGEOUT_STRESS_MS` (100).
    pub fn threads_meet(&self, mut also: impl FnMut() + Send) {
        let time = std::env::var("PAGEOUT_STRESS_MS").ok().and_then(|ms| ms.parse().ok()).unwrap_or(100);
        let end = Instant::now() + Duration::from_millis(time);
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            let stop = &stop;
            for _ in 0..2 {
                scope.spawn(move || until(stop, || self.serve()));
                if self.plan.inline {
                    scope.spawn(move || until(stop, || self.answer_own()));
                }
                scope.spawn(move || {
                    until(stop, || {
                        self.balance();
                        self.evict(512);
                    })
                });
            }
            scope.spawn(move || until(stop, &mut also));
            scope.spawn(move || {
                until(stop, || {
                    self.look();
                    self.adopt();
                    self.engine.kernel.advance(100_000_000);
                })
            });
            while Instant::now() < end && !stop.load(Relaxed) {
                let mut program = self.program.lock().unwrap();
                for _ in 0..64 {
                    program.step(&self.engine.kernel);
                }
                drop(program);
                thread::yield_now();
            }
            // The calls under way end while the servers still work.
            self.program.lock().unwrap().ending = true;
            let patience = Instant::now() + Duration::from_secs(10);
            while !stop.load(Relaxed) && Instant::now() < patience {
                let mut program = self.program.lock().unwrap();
                if program.idle() {
                    break;
                }
                program.step(&self.engine.kernel);
            }
            stop.store(true, Relaxed);
        });
    }

    fn below(&self, n: usize) -> usize {
        self.random.lock().unwrap().below(n)
    }

    /// Other threads of the program go on, perhaps.
    fn meanwhile(&self) {
        if self.plan.meanwhile == 0 {
            self.scheduled();
            return;
        }
        let calls = self.calls.fetch_add(1, Relaxed);
        assert!(calls < PATIENCE, "hang: the engine goes round and round");
        if self.below(self.plan.meanwhile) == 0 {
            let Ok(mut program) = self.program.try_lock() else { return };
            program.step(&self.engine.kernel);
        }
    }

    fn scheduled(&self) {
        let mut at_call = self.at_call.lock().unwrap();
        match &mut *at_call {
            None => {
                // Who waits for a system call of the program to go on waits for this.
                let calls = self.calls.fetch_add(1, Relaxed);
                assert!(calls < PATIENCE, "hang: the engine goes round and round");
                if calls % 64 == 63 && self.engine.kernel.changing() > 0 {
                    if let Ok(mut program) = self.program.try_lock() {
                        program.step_calls(&self.engine.kernel);
                    }
                }
                return;
            }
            Some((calls, _)) if *calls > 0 => {
                *calls -= 1;
                return;
            }
            Some(_) => {}
        }
        let (_, then) = at_call.take().unwrap();
        drop(at_call);
        self.reached.fetch_add(1, Relaxed);
        then(self);
    }

    /// Other threads of the engine go on, perhaps.
    fn others(&self) {
        let nested = self.plan.nested;
        let may = self.depth.load(Relaxed) < DEPTH && self.calls.load(Relaxed) < ENOUGH;
        if nested > 0 && may && self.below(nested) == 0 {
            self.depth.fetch_add(1, Relaxed);
            let before = self.engine.kernel.set_serving(false);
            for _ in 0..1 + self.below(3) {
                self.one_engine_step();
            }
            self.engine.kernel.set_serving(before);
            self.depth.fetch_sub(1, Relaxed);
        }
    }

    pub fn serve(&self) {
        if !self.plan.real && self.engine.is_led() {
            // The leader is below us on this stack.
            return;
        }
        // The one that has waited longest: it may have a backlog.
        let first = {
            let mut servers = self.servers.lock().unwrap();
            (!servers.is_empty()).then(|| servers.remove(0))
        };
        let mut server = first.unwrap_or_default();
        // Who is asked there is the last to come: with real threads nobody can tell.
        let before = self.engine.kernel.set_serving(!self.plan.real);
        server.serve(&self.engine, 0);
        self.engine.kernel.set_serving(before);
        self.servers.lock().unwrap().push(server);
    }

    pub fn evict(&self, want: usize) -> usize {
        let mut out = self.outs.lock().unwrap().pop().unwrap_or_default();
        let evicted = self.engine.evict(&mut out, want);
        self.outs.lock().unwrap().push(out);
        evicted
    }

    pub fn balance(&self) {
        let mut out = self.outs.lock().unwrap().pop().unwrap_or_default();
        self.engine.balance(&mut out);
        self.outs.lock().unwrap().push(out);
    }

    /// The agent finds mappings that nobody manages.
    pub fn adopt(&self) {
        let (base, pages) = {
            let program = self.program.lock().unwrap();
            (
                program.at(0),
                program.values.iter().map(|value| value.mapped && value.writable).collect::<Vec<_>>(),
            )
        };
        let mut first = 0;
        while first < pages.len() {
            let n = pages[first..].iter().take_while(|mapped| **mapped).count();
            if n > 0 {
                let mut gaps = Vec::new();
                let (start, end) = (base + first * PAGE, base + (first + n) * PAGE);
                self.engine.events.read().gaps(start, end, |from, to| gaps.push((from, to)));
                for (from, to) in gaps {
                    let _ = self.engine.adopt(from, to);
                }
            }
            first += n.max(1);
        }
    }

    /// What the watch does, but for adoption; and what an evictor does that rests, if the plan says so.
    pub fn look(&self) {
        self.engine.stock();
        self.engine.unmanaged(self.engine.measure());
        if self.plan.discards {
            self.engine.place.discard();
        }
    }

    fn one_engine_step(&self) {
        match self.below(12) {
            0..=4 => self.serve(),
            5 => drop(self.evict(1 + self.below(64))),
            6 => drop(self.evict(512)),
            7 | 8 => self.balance(),
            9 => self.look(),
            10 => self.engine.pump(),
            _ => self.adopt(),
        }
    }

    /// One step of somebody.
    pub fn step(&self) {
        self.calls.store(0, Relaxed);
        match self.below(8) {
            0..=4 => {
                let mut program = self.program.lock().unwrap();
                program.step(&self.engine.kernel);
            }
            5 if self.below(20) == 0 => {
                let mut program = self.program.lock().unwrap();
                program.reclaim_lazy(&self.engine.kernel);
                self.engine.kernel.advance(200_000_000);
            }
            _ => self.one_engine_step(),
        }
    }

    /// All that is under way ends; a thread that never does is a hang.
    pub fn settle(&self) {
        self.program.lock().unwrap().ending = true;
        for round in 0.. {
            if self.program.lock().unwrap().idle() {
                break;
            }
            if round > ROUNDS {
                self.hang();
            }
            if cfg!(shuttle) {
                // What could not go is tried again when some time has passed, and a watch makes ready what it takes.
                self.engine.kernel.advance(1_000_000);
                self.engine.stock();
            }
            self.calls.store(0, Relaxed);
            self.program.lock().unwrap().step(&self.engine.kernel);
            self.serve();
            // Nobody else reads events here.
            if self.plan.inline && !self.engine.kernel.event_pending() {
                self.answer_own();
            }
        }
        self.program.lock().unwrap().ending = false;
    }

    /// Says who waits, and for what.
    pub fn hang(&self) -> ! {
        let waiting = self.engine.kernel.waiting();
        for (thread, address, read) in &waiting {
            eprintln!(
                "thread {thread} waits at page {} (fault read: {read}): {:?} {:?}",
                (address - self.engine.kernel.program_base()) / PAGE,
                self.word(*address),
                self.engine.kernel.page(*address)
            );
        }
        let (kernel, budget) = (&self.engine.kernel, &self.engine.budget);
        panic!(
            "hang: {} threads wait; {} calls under way, budget {budget:?}, {} frames ready",
            waiting.len(),
            kernel.changing(),
            self.engine.frames.ready_pages()
        );
    }

    /// What the engine knows of a page.
    pub fn word(&self, address: usize) -> Option<pageout::page::Word> {
        let block = self.engine.space.block(address)?.lock();
        Some(block.word(address % BLOCK / PAGE))
    }

    /// The program reads all of its memory.
    pub fn read_all(&self) {
        self.settle();
        let runs = {
            let program = self.program.lock().unwrap();
            let mut runs = Vec::new();
            let mut first = 0;
            while first < program.values.len() {
                let n = program.values[first..].iter().take_while(|value| value.mapped).count();
                if n > 0 {
                    runs.push((first, n));
                }
                first += n.max(1);
            }
            runs
        };
        for (first, n) in runs {
            self.program.lock().unwrap().read_run(first, n);
            self.settle();
        }
    }

    /// What must hold while no engine thread works.
    pub fn check(&self) {
        let engine = &self.engine;
        let kernel = &engine.kernel;
        let program = self.program.lock().unwrap();
        let quiet = kernel.changing() == 0 && program.values.iter().all(|value| value.removing == 0);
        if quiet {
            for region in engine.events.read().iter() {
                for at in (region.start..region.end).step_by(PAGE) {
                    assert!(kernel.page(at).registered, "{at:#x} of {region:x?} is not registered");
                }
            }
        }
        let mut names: BTreeMap<u64, u32> = BTreeMap::new();
        let mut queued: HashMap<u32, usize> = HashMap::new();
        for unit in engine.policy.lock().queued() {
            *queued.entry(unit).or_default() += 1;
        }
        for (block_start, block) in engine.space.blocks(program.at(0), program.at(program.values.len())) {
            let block = block.lock();
            let mut resident = 0;
            for index in 0..BLOCK_PAGES {
                let at = block_start + index * PAGE;
                let number = (at - program.at(0)) / PAGE;
                let word = block.word(index);
                let page = kernel.page(at);
                resident += usize::from(word.tag() == Tag::Resident);
                if matches!(word.tag(), Tag::Resident | Tag::Swapped) && word.payload() != 0 {
                    *names.entry(word.payload()).or_default() += 1;
                }
                assert!(
                    !matches!(word.tag(), Tag::Cached | Tag::Busy),
                    "page {number} is left {word:?} though nobody works on it"
                );
                if quiet && matches!(word.tag(), Tag::Zero | Tag::Swapped | Tag::Poisoned) {
                    assert!(!page.present, "page {number} is {word:?} and mapped: {page:?}");
                    assert!(page.mapping != 0, "page {number} is {word:?} and its mapping has gone");
                }
                if quiet && !word.is_empty() {
                    assert!(page.registered, "page {number} is {word:?} and not registered: {page:?}");
                }
                if quiet && word.tag() == Tag::Resident && !page.present {
                    let value = program.values[number];
                    assert!(
                        value.token == 0 || value.lazy || value.lost || !value.mapped,
                        "page {number} is lost: {word:?}, {page:?}, should be {value:?}"
                    );
                }
                if index % 16 == 0 {
                    self.check_unit(&block, block_start, index, &queued);
                }
            }
            assert_eq!(resident, block.resident as usize);
        }
        for (entry, names) in &names {
            let count = engine.place.count(*entry);
            let is_lent = self.is_heir && count.is_none();
            assert!(
                is_lent || count == Some(*names),
                "count of slot {entry:#x}: {count:?}, named by {names}"
            );
        }
        engine.place.audit();
        let swapped: u64 = names.values().map(|names| u64::from(*names)).sum();
        assert_eq!(engine.place.swapped(), swapped, "slots that no word names");
        let own = names.keys().filter(|entry| engine.place.count(**entry).is_some()).count();
        let taken: u64 = (0..MAX_DEVICES).map(|device| engine.place.taken(device)).sum();
        assert_eq!(taken, own as u64, "slots that are taken and have no name");
        self.check_frames();
        if self.plan.habits.is_access_alone() && !kernel.grew_unseen() {
            // All memory comes and goes through the engine, so its sum is exact.
            let left = self.plan.limit_pages - kernel.resident_pages() as i64;
            assert_eq!(engine.budget.get(), left, "budget");
        }
    }

    fn check_unit(
        &self,
        block: &pageout::space::BlockState,
        block_start: usize,
        index: usize,
        queued: &HashMap<u32, usize>,
    ) {
        let Some(unit) = block.unit(index) else { return };
        let number = ((block_start + index * PAGE) / (16 * PAGE)) as u32;
        let times = queued.get(&number).copied().unwrap_or(0);
        let page = (block_start - self.engine.kernel.program_base()) / PAGE + index;
        assert_eq!(
            times,
            usize::from(unit.usage.queued),
            "unit of page {page} in the queues; its own word: {:?}",
            unit.usage
        );
        let resident = unit.words.iter().any(|word| word.tag() == Tag::Resident);
        let by_block = block.huge && block.unit(0).is_some_and(|unit| unit.usage.queued);
        assert!(!resident || unit.usage.queued || by_block, "unit of page {page} can never leave");
    }

    fn check_frames(&self) {
        let frames = &self.engine.frames;
        let kernel = &self.engine.kernel;
        let census = frames.census();
        let mut ready = vec![0; self.plan.chunks];
        for frame in &census.ready {
            assert!(kernel.page(frames.address(*frame)).present, "ready frame {frame} is a hole");
            ready[*frame as usize / CHUNK] += 1;
        }
        assert_eq!(census.ready.len(), frames.ready_pages(), "count of ready frames");
        for (chunk, ready) in ready.into_iter().enumerate() {
            let first = (chunk * CHUNK) as u32;
            let times = census.holes.iter().filter(|hole| **hole == first).count();
            let present = (first..first + CHUNK as u32)
                .filter(|frame| kernel.page(frames.address(*frame)).present)
                .count();
            assert_eq!(present, ready, "filled frames of chunk {chunk}");
            match times {
                0 => assert_eq!(census.emptied[chunk] + present, CHUNK, "chunk {chunk} lost frames"),
                1 => assert_eq!((present, census.emptied[chunk]), (0, 0), "chunk {chunk} of holes"),
                _ => panic!("chunk {chunk} is twice among the holes"),
            }
        }
        let executable = if self.plan.executable > 0 { EXECUTABLE / CHUNK } else { 0 };
        let (holes, left) = (&census.executable_holes, &census.executable_left);
        assert_eq!(holes.len() + left.len(), executable, "chunks for what can be executed");
        let filled: u32 = left.iter().map(|part| part.count).sum();
        let pages = (0..executable * CHUNK).map(|page| kernel.page(kernel.executable_base() + page * PAGE));
        let present = pages.filter(|page| page.present).count();
        assert_eq!(present, filled as usize, "pages of those for what can be executed");
        let huge_left = census.huge_left.iter().map(|(huge, _)| huge);
        let mut huge: Vec<u32> =
            census.huge_ready.iter().chain(&census.huge_holes).chain(huge_left).copied().collect();
        huge.sort_unstable();
        assert_eq!(huge, (0..self.plan.huge as u32).collect::<Vec<_>>(), "huge frames");
        for (list, present) in [(&census.huge_ready, true), (&census.huge_holes, false)] {
            for huge in list {
                for page in 0..BLOCK_PAGES {
                    let at = frames.huge_address(*huge) + page * PAGE;
                    assert_eq!(kernel.page(at).present, present, "page {page} of huge frame {huge}");
                }
            }
        }
        for &(huge, filled) in &census.huge_left {
            let pages = (0..BLOCK_PAGES).map(|page| kernel.page(frames.huge_address(huge) + page * PAGE));
            assert_eq!(pages.filter(|page| page.present).count(), filled, "pages of huge frame {huge}, left");
        }
    }
}

/// Prints the seed, and what happened last, when a test fails.
pub struct OnFailure<'a>(pub &'a World);

impl Drop for OnFailure<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            match self.0.program.try_lock() {
                Ok(program) => program.print_log(),
                Err(TryLockError::Poisoned(program)) => program.into_inner().print_log(),
                Err(TryLockError::WouldBlock) => {}
            }
            eprintln!("PAGEOUT_SEED={} {:?}", self.0.seed, self.0.plan);
        }
    }
}

/// Steps of one run.
pub fn steps() -> usize {
    std::env::var("PAGEOUT_SIM_STEPS").ok().and_then(|steps| steps.parse().ok()).unwrap_or(1000)
}

/// The seeds to run: `PAGEOUT_SEED`, or `n` from `first` on.
pub fn seeds(first: u64, n: u64) -> Vec<u64> {
    let n = std::env::var("PAGEOUT_SEEDS").ok().and_then(|seeds| seeds.parse().ok()).unwrap_or(n);
    match std::env::var("PAGEOUT_SEED") {
        Ok(seed) => vec![seed.parse().expect("PAGEOUT_SEED is a number")],
        Err(_) => (first..first + n).collect(),
    }
}

/// One run: random steps, looked at often, at the end everything is read. How often a rule of the device struck.
pub fn run(plan: Plan, seed: u64, arm: impl Fn(&FaultyDevice<FileDevice>)) -> u64 {
    let world = World::new(plan, seed);
    let _on_failure = OnFailure(&world);
    arm(&world.device);
    world.adopt();
    world.engine.measure();
    for step in 0..steps() {
        world.step();
        if step % 16 == 0 {
            world.check();
        }
        if step % 1000 == 999 {
            world.settle();
            world.check();
        }
    }
    world.read_all();
    world.check();
    world.device.struck()
}
