//! The fault path: receive, decide, resolve.
//!
//! A server holds the leadership while it reads events and answers faults; another takes over when a read
//! from a slow device is ahead. Decide looks at one word under its block's lock; resolve maps by MOVE or
//! COPY under the same lock, or, after I/O, under it again. The same path answers a thread's fault on that thread
//! itself ([`inline`]).
//!
//! Fit to run in a signal handler: no allocation, no thread-local state, raw system calls, and no
//! lock that the interrupted thread could hold (engine threads take no signals).

pub mod crowd;
pub mod inline;
pub mod order;
pub mod pending;
pub mod stream;
pub mod trial;
mod zeros;

use crate::engine::{Engine, Swapin, MOST_SPLITS};
use crate::frame::CHUNK;
use crate::kernel::{Fault, Found, Kernel};
use crate::page::Tag;
use crate::slot::Memory;
use crate::space::{
    page_start, BlockState, Region, Regions, Unit, BLOCK, BLOCK_ORDER, BLOCK_PAGES, PAGE, UNIT, UNIT_PAGES,
};
use crate::stats::Stats;
use crate::swap::swapin::{Brought, Incoming, Urge};
use crate::sync::atomic::Ordering::Relaxed;
use crate::sync::Backoff;
use crowd::{Called, Wakes};
use order::Asked;
use rustix::io::Errno;
use stream::Stream;

/// A server of faults: what it has under way.
pub struct Server {
    incoming: Incoming,
    /// The stream that the fault at hand continues.
    stream: Option<Stream>,
    /// The block that this stream comes to next, and the thread whose it is: it goes through whole blocks, one after another.
    next: Option<(usize, u32)>,
    /// Faults answered since it settled on a CPU; 0: it has not.
    settled: u32,
    /// Whom it has called there.
    called: Called,
    /// It is to call the thread to its CPU before it answers; and: that thread may not run there.
    calls: bool,
    apart: bool,
    /// It answers the thread that it runs on, in a signal handler.
    inline: bool,
    /// See [`Engine::bounds`].
    since: Option<u32>,
}

/// A device that answers a page faster than this is served without calling another server: to wake one costs as
/// much.
const QUICK_NS: u64 = 30_000;

/// Faults after which a server lets the scheduler choose its CPU again.
const SETTLED: u32 = 256;

/// Blocks that are brought in ahead of a stream at once, and the share of the limit that they may be (1 of this).
const MOST_AHEAD: usize = 3;
const AHEAD_SHARE: usize = 32;

/// Times that a fault makes a huge frame, which somebody else then takes, before it takes small ones.
const PATIENCE: u32 = 8;

/// Pages that a server which makes room itself wants to see free, and lets leave at once.
const ROOM: i64 = 32;

/// What a fault asks for, after a look at its word.
enum Decision {
    /// It was answered.
    Answered,
    /// Somebody is bringing it in and will wake all who wait.
    Busy,
    /// Pages `low..high` of the block hold nothing: zeros. With the order that asked for them.
    Zeros(usize, usize, u8),
    /// On the device; the window to bring in, with its order.
    Read(usize, usize, u8),
    /// An event is unread.
    Pending,
    /// Memory that a thread in its signal handler must not ask for.
    Memory,
}

impl Server {
    /// A server with nothing to do.
    pub fn new() -> Self {
        Self {
            incoming: Incoming::new(),
            stream: None,
            next: None,
            settled: 0,
            called: Called::default(),
            calls: false,
            apart: false,
            inline: false,
            since: None,
        }
    }

    /// One round of a server: answers a fault that was read, or leads: waits for events (at most `timeout_ns`),
    /// applies them and answers the first fault. If another leads already it sleeps until it is called, at most
    /// `timeout_ns`. Any number of servers may do so.
    ///
    /// The leader leads on while it answers, unless faults wait that another server had better take, or the device is slow:
    /// to call another costs as much as an answer.
    pub fn serve<K: Kernel>(&mut self, engine: &Engine<K>, timeout_ns: u64) {
        let calls = engine.calls.heard();
        let waiting = engine.pending.lock().pop();
        if let Some((fault, since, more)) = waiting {
            self.since = since;
            if engine.wants_another(more) {
                engine.calls.ring();
            }
            let wakes = if self.settled != 0 { engine.crowd.wakes() } else { Wakes::Apart };
            self.answer_where(engine, fault, engine.kernel.now(), wakes);
            if engine.is_inline() {
                engine.answered.ring_all();
            }
            return self.go_ahead(engine);
        }
        let Some(leader) = engine.leader.try_lock() else {
            return engine.calls.wait(calls, timeout_ns);
        };
        if engine.is_through() && engine.kernel.wait_event(timeout_ns) {
            engine.read_and_hear(&mut engine.events.write(), |_| ());
        }
        if engine.is_inline() {
            // The events are all that it reads; faults are handed to those who wait for calls.
            return;
        }
        let Some((fault, since, more)) = engine.pending.lock().pop() else { return };
        self.since = since;
        let leader = if engine.wants_another(more) {
            drop(leader);
            engine.calls.ring();
            None
        } else {
            Some(leader)
        };
        // Who faults is woken on this CPU, where his next fault finds the server. One that takes much at a time has work
        // for two CPUs.
        let small = engine.is_quick() && engine.takes_little();
        let wakes = if small && leader.is_some() { engine.crowd.wakes() } else { Wakes::Apart };
        engine.helps_itself.store(small, Relaxed);
        self.settle(engine, wakes != Wakes::Apart);
        let read = engine.kernel.now();
        if small {
            self.make_room(engine);
        }
        self.answer_where(engine, fault, read, wakes);
        if self.next.is_some() && leader.is_some() {
            drop(leader);
            engine.calls.ring();
        }
        self.go_ahead(engine);
    }

    /// Brings in the next blocks of a stream, as long as they are out as a whole and huge frames lie ready, while the thread goes
    /// through what it has. Not where those who fault keep all CPUs at work: it would take from them what it saves.
    fn go_ahead<K: Kernel>(&mut self, engine: &Engine<K>) {
        let Some(((next, thread), stream)) = self.next.take().zip(self.stream) else { return };
        let most = (engine.limit() as usize / (AHEAD_SHARE * BLOCK_PAGES)).min(MOST_AHEAD);
        for block_start in (next..).step_by(BLOCK).take(most) {
            let block = engine.space.block(block_start);
            let is_out = block.is_some_and(|block| block.lock().all(0, BLOCK_PAGES, Tag::Swapped));
            if !is_out || engine.crowd.threads() >= engine.kernel.cpus() {
                return;
            }
            if engine.frames.huge_ready() == 0 {
                return engine.ran_short();
            }
            let brought =
                engine.bring_in(&mut self.incoming, block_start, 0, (0, BLOCK_PAGES), Urge::WholeAhead);
            if brought != Brought::Done(BLOCK_PAGES) {
                return;
            }
            // All of them; the first was not asked for either.
            Stats::add(&engine.stats.swap_ra, 1);
            engine.streams.went_ahead(thread, stream, BLOCK_PAGES as u16);
        }
    }

    /// Answers a fault that was read at `started` (ns), so that the thread wakes up where it is to. If it faults alone and may
    /// not run here, the server goes to where it may.
    fn answer_where<K: Kernel>(&mut self, engine: &Engine<K>, fault: Fault, started: u64, wakes: Wakes) {
        let (thread, threads) = (fault.thread, engine.crowd.threads());
        self.calls = match wakes {
            Wakes::Apart => false,
            Wakes::Called => true,
            Wakes::Stays => !self.called.stays(thread, started, threads),
        };
        // Others who wait for the same page would be woken by the call, and fault again.
        self.calls &= !engine.pending.lock().has(page_start(fault.address));
        let calls = self.calls;
        let (_, ended) = self.answer_timed(engine, fault, started);
        let was_called = calls && !core::mem::take(&mut self.calls);
        if wakes == Wakes::Stays && (was_called || !calls) {
            self.called.answered(thread, ended, was_called);
        }
        if core::mem::take(&mut self.apart) && threads == 1 {
            engine.kernel.follow(thread);
            engine.kernel.settle_here();
        }
    }

    /// Keeps the server on one CPU, to which it calls who faults. Now and then it lets the scheduler choose another: this
    /// one may have got other work.
    fn settle<K: Kernel>(&mut self, engine: &Engine<K>, here: bool) {
        self.settled = match (here, self.settled) {
            (true, 0) => {
                engine.kernel.settle_here();
                1
            }
            (true, faults) if faults < SETTLED => faults + 1,
            (false, 0) => 0,
            _ => {
                engine.kernel.roam();
                self.called = Called::default();
                0
            }
        };
    }

    /// Lets pages leave before the fault is answered, if room runs short: while those who fault wait, nobody runs on these
    /// page tables, and to take a page costs no interrupt on another CPU. What came in by COPY ([`Engine::is_copied`])
    /// left its frame filled; as much goes back to the kernel.
    fn make_room<K: Kernel>(&mut self, engine: &Engine<K>) {
        let over = || !self.inline && engine.budget.get() < 0;
        // What lies ready goes before what is in use.
        while over() && engine.room() >= 2 * ROOM && engine.drop_small(CHUNK) > 0 {}
        let is_short = || over() || engine.room() < ROOM;
        if is_short() {
            engine.credit();
        }
        if is_short() && !engine.is_stuck() {
            let left = engine.evict_directly(&mut self.incoming.outgoing, ROOM as usize);
            if over() {
                engine.drop_small(left);
            }
        }
    }

    /// Answers a fault, and notes how long that took since `started`; whether it could, and when it had.
    fn answer_timed<K: Kernel>(&mut self, engine: &Engine<K>, fault: Fault, started: u64) -> (bool, u64) {
        let answered = self.answer(engine, fault);
        let ended = engine.kernel.now();
        Stats::add(&engine.stats.pgfault, answered as u64);
        Stats::observe(&engine.stats.fault_ns, ended - started);
        (answered, ended)
    }

    /// Reads and applies events in the midst of an answer, which may take long; another server is called for the faults that come
    /// with them. In a signal handler somebody else does: the lists of regions may grow.
    fn pump<K: Kernel>(&self, engine: &Engine<K>) {
        if !self.inline {
            engine.pump();
        }
    }

    /// Answers one fault. `false`: only one that is not [`inline`] can.
    pub fn answer<K: Kernel>(&mut self, engine: &Engine<K>, fault: Fault) -> bool {
        let address = page_start(fault.address);
        if engine.frames.has(address) {
            engine.touched(address, fault.thread);
            return true;
        }
        let block_start = address & !(BLOCK - 1);
        let index = (address - block_start) / PAGE;
        engine.end_sample(fault.thread);
        // What came in besides after the last fault is counted.
        self.incoming.ahead = 0;
        let mut backoff = Backoff::new();
        // How often what is to come in waits for the frames to do so.
        let mut patience = PATIENCE;
        let mut held_up = None;
        loop {
            let decision = self.decide(engine, block_start, index, fault);
            let was_read = matches!(decision, Decision::Read(..));
            let (brought, order) = match decision {
                Decision::Answered => return true,
                Decision::Busy if !engine.is_inline() => return true,
                Decision::Busy => {
                    backoff.snooze();
                    continue;
                }
                Decision::Pending => (Brought::Pending, 0),
                Decision::Memory => return false,
                Decision::Zeros(..) | Decision::Read(..) if self.inline && !engine.has_room_in_queues() => {
                    return false;
                }
                Decision::Read(..) if self.inline && !engine.self_service => return false,
                Decision::Zeros(low, high, order) => {
                    let whole = patience > 0;
                    let window = (low, high);
                    let memory = self.memory();
                    match engine.fill(block_start, index, window, whole, self.since, memory) {
                        Some(brought) => (brought, order),
                        None => return false,
                    }
                }
                Decision::Read(low, high, order) => {
                    let urge = if patience > 0 { Urge::Whole } else { Urge::Asked };
                    (engine.bring_in(&mut self.incoming, block_start, index, (low, high), urge), order)
                }
            };
            match brought {
                Brought::Done(end) => {
                    let ahead = core::mem::take(&mut self.incoming.ahead);
                    let end = block_start / PAGE + end;
                    engine.streams.advance(fault.thread, self.stream, end, order, ahead);
                    let goes_on =
                        self.stream.is_some_and(|stream| stream.is_next && stream.order == BLOCK_ORDER);
                    if was_read {
                        Stats::add(&engine.stats.pgmajfault, 1);
                        if goes_on && ahead as usize + 1 == BLOCK_PAGES && !self.inline {
                            self.next = Some((block_start + BLOCK, fault.thread));
                        }
                        engine.bring_around(&mut self.incoming);
                    }
                    return true;
                }
                Brought::Unread => unreachable!("what is asked for is given up"),
                Brought::Pending => {
                    // Whoever caused the event waits until it is read; nothing can be mapped before.
                    held_up.get_or_insert_with(|| engine.holds_events_up());
                    self.pump(engine);
                    backoff.snooze();
                }
                Brought::NoHuge | Brought::NoFrame if self.inline && !engine.may_reclaim_inline() => {
                    return false;
                }
                Brought::NoHuge if engine.make_huge_frame(&mut self.incoming.outgoing) => patience -= 1,
                // While an event is unread no page can leave.
                Brought::NoHuge if engine.kernel.event_pending() => {
                    patience -= 1;
                    held_up.get_or_insert_with(|| engine.holds_events_up());
                    self.pump(engine);
                }
                Brought::NoHuge => patience = 0,
                Brought::NoFrame => {
                    patience = patience.saturating_sub(1);
                    engine.make_frames(&mut self.incoming.outgoing);
                    if engine.frames.ready_pages() == 0 {
                        // A filter may allow this thread nothing of what that takes.
                        if self.inline && patience == 0 {
                            return false;
                        }
                        // While an event is unread no page can leave and no frame be filled.
                        held_up.get_or_insert_with(|| engine.holds_events_up());
                        if engine.kernel.event_pending() {
                            self.pump(engine);
                        }
                        backoff.snooze();
                    }
                }
            }
        }
    }

    /// Where the tables of new memory are made of.
    fn memory(&self) -> Memory {
        if self.inline {
            Memory::AtHand
        } else {
            Memory::Asked
        }
    }

    /// Brings in what is out in a block, by whole runs. `false`: some of it cannot be read now.
    fn bring_block<K: Kernel>(&mut self, engine: &Engine<K>, block_start: usize) -> bool {
        /// So often the same page may come in and be out as before: nothing is mapped there, and no event has told.
        const TRIES: u32 = 100;
        let mut backoff = Backoff::new();
        let (mut last, mut tries) = (BLOCK_PAGES, 0);
        loop {
            let index = {
                let Some(block) = engine.space.block(block_start) else { return true };
                let block = block.lock();
                let find = |tags: &[Tag]| (0..BLOCK_PAGES).find(|at| tags.contains(&block.word(*at).tag()));
                match find(&[Tag::Swapped]) {
                    Some(index) => Some(index),
                    // Another server's, or an evictor's that has not settled it yet: not mapped either.
                    None if find(&[Tag::Busy, Tag::Cached]).is_some() => None,
                    None => return true,
                }
            };
            let Some(index) = index else {
                backoff.snooze();
                continue;
            };
            match engine.bring_in(&mut self.incoming, block_start, index, (0, BLOCK_PAGES), Urge::Ahead) {
                Brought::Done(_) if index != last => {
                    (last, tries) = (index, 0);
                    backoff = Backoff::new();
                }
                Brought::Done(_) if tries == TRIES => return false,
                Brought::Done(_) => {
                    tries += 1;
                    backoff.snooze();
                }
                Brought::Unread => return false,
                Brought::Pending => backoff.snooze(),
                Brought::NoFrame | Brought::NoHuge => {
                    engine.grow_frames();
                    backoff.snooze();
                }
            }
        }
    }

    fn decide<K: Kernel>(
        &mut self,
        engine: &Engine<K>,
        block_start: usize,
        index: usize,
        fault: Fault,
    ) -> Decision {
        let regions = engine.events.read();
        let at = block_start + index * PAGE;
        self.stream = engine.continued(at / PAGE, fault.thread);
        let Some(block) = engine.space.block_by(block_start, self.memory()) else { return Decision::Memory };
        let mut block = block.lock();
        let is_known = || engine.bounds(&regions, block_start, index, self.since).is_some();
        if block.word(index).tag() == Tag::Gone && is_known() {
            engine.settle_gone(&mut block, block_start, index);
        }
        let word = block.word(index);
        let is_out = !matches!(word.tag(), Tag::Busy | Tag::Resident | Tag::Poisoned | Tag::Gone);
        if is_out && core::mem::take(&mut self.calls) {
            // The thread is blocked for as long as nothing is mapped here, so until this lock is let go of; but for
            // a signal, whose handler it runs first.
            self.apart = !engine.kernel.call_here(fault.thread, at);
        }
        match word.tag() {
            Tag::Busy => Decision::Busy,
            Tag::Resident if engine.is_mapped(at) => {
                engine.kernel.wake(at, PAGE);
                Decision::Answered
            }
            // Nobody's that is known of, or an event is unread: who waits comes again, if it is there.
            Tag::Gone => {
                engine.kernel.wake(at, PAGE);
                Decision::Answered
            }
            Tag::Poisoned => {
                let _ = engine.kernel.poison(at, PAGE);
                engine.kernel.wake(at, PAGE);
                Decision::Answered
            }
            Tag::Cached => engine.rescue(&mut block, block_start, index),
            tag => {
                let Some(bounds) = engine.bounds(&regions, block_start, index, self.since) else {
                    engine.kernel.wake(at, PAGE);
                    return Decision::Answered;
                };
                let swapped = tag == Tag::Swapped;
                let order = engine.order(&mut block, at / PAGE, fault.thread, self.stream, swapped);
                let low = index & !((1 << order) - 1);
                let window = (low.max(bounds.0), (low + (1 << order)).min(bounds.1));
                if swapped {
                    Decision::Read(window.0, window.1, order)
                } else {
                    let nothing =
                        |at: usize| at == index || matches!(block.word(at).tag(), Tag::None | Tag::Zero);
                    let low = (window.0..index).rev().take_while(|at| nothing(*at)).last().unwrap_or(index);
                    let high = (index..window.1).take_while(|at| nothing(*at)).last().unwrap_or(index) + 1;
                    Decision::Zeros(low, high, order)
                }
            }
        }
    }
}

impl Default for Server {
    fn default() -> Self {
        Self::new()
    }
}

impl<K: Kernel> Engine<K> {
    /// Somebody touched a hole among the frames. Whoever of the engine does would pass zeros on as somebody's page. Others,
    /// who read all that the program has mapped, get zeros.
    fn touched(&self, at: usize, thread: u32) {
        assert!(!self.kernel.is_own(thread), "the engine touched a frame that is not there, {at:#x}");
        self.touched.store(true, Relaxed);
        // Maybe to lock all that is mapped.
        self.unlock_frames();
        let _regions = self.events.read();
        if self.kernel.zero(at, PAGE, true).is_err() {
            // It is there by now, or an event is unread: he comes again.
            self.kernel.wake(at, PAGE);
        }
    }

    /// Had another server better be called, while `more` wait beside the fault at hand? If this one will wait for the
    /// device, or somebody else faults while much is brought in, or a CPU is idle: of those who fault, the others run.
    fn wants_another(&self, more: usize) -> bool {
        let threads = self.crowd.threads();
        if !self.is_quick() {
            true
        } else if self.takes_little() {
            let running = threads.saturating_sub(more + 1) + 1;
            more > 0 && self.crowd.wakes() == Wakes::Apart && running < self.kernel.cpus()
        } else {
            more > 0 || threads > 1
        }
    }

    /// Does nobody who faults just now go through much at a time?
    fn takes_little(&self) -> bool {
        !self.crowd.each().any(|thread| self.streams.is_streaming(thread))
    }

    /// Answers the device faster than another server could be called?
    pub(crate) fn is_quick(&self) -> bool {
        self.device_ns.load(Relaxed) <= QUICK_NS
    }

    /// Brings every page home that is on a device or on its way, if that fits the limit; `false` if it does
    /// not, or cannot be read now. Nothing leaves meanwhile ([`Engine::stand_still`]), and another thread reads events. No lock held.
    pub fn bring_home(&self, server: &mut Server) -> bool {
        self.forget_untold(&mut self.events.write());
        let resident = self.measure() as i64;
        let out = self.space.count(|tag| tag == Tag::Swapped) as i64;
        if resident + out > self.limit() {
            return false;
        }
        loop {
            for (block_start, _) in self.space.blocks(0, crate::space::TOP) {
                if !server.bring_block(self, block_start) {
                    return false;
                }
            }
            // What the program moved meanwhile may be where all had been brought in before. Under this lock nothing moves.
            let mut regions = self.events.write();
            if self.out_pages() == 0 {
                self.adopt_gone(&mut regions);
                return true;
            }
        }
    }

    /// A page on its way out is touched: it comes in as a copy of its frame.
    fn rescue(&self, block: &mut BlockState, block_start: usize, index: usize) -> Decision {
        let (word, at) = (block.word(index), block_start + index * PAGE);
        match self.kernel.copy(at, self.frames.address(word.payload() as u32), PAGE, true) {
            Ok(()) => {
                self.budget.sub(1);
                block.set(index, word.rescue());
                self.used(block, block_start, index..index + 1, true);
                Stats::add(&self.stats.rescued, 1);
                Decision::Answered
            }
            Err(partial) if partial.errno == Errno::AGAIN => Decision::Pending,
            Err(_) => {
                self.kernel.wake(at, PAGE);
                Decision::Answered
            }
        }
    }

    /// Is a page mapped that its word calls Resident? MADV_GUARD_INSTALL discards pages without an event, and
    /// nothing else is known to; such a page is a hole that the program asked for. What the kernel has swapped
    /// or is moving to another place in memory counts as mapped.
    pub(crate) fn is_mapped(&self, at: usize) -> bool {
        self.kernel.scan(at, at + PAGE, &mut [Found::NONE]).0 == 1
    }

    /// The stream of its thread that a fault continues. No block lock held.
    fn continued(&self, page: usize, thread: u32) -> Option<Stream> {
        let stream =
            self.streams.find(thread, page, self.space.out(), |page, end| self.are_there(page, end))?;
        if let Some(block) = stream.left {
            self.went_through(block * BLOCK);
        }
        Stats::add(&self.stats.swap_ra_hit, self.streams.take_ahead(thread, stream));
        Some(stream)
    }

    /// Are all pages of a range mapped?
    fn are_there(&self, mut page: usize, end: usize) -> bool {
        while page < end {
            let Some(block) = self.space.block(page * PAGE) else { return false };
            let (block, first) = (block.lock(), page % BLOCK_PAGES);
            let n = (BLOCK_PAGES - first).min(end - page);
            if (block.resident as usize) < BLOCK_PAGES && !block.all(first, n, Tag::Resident) {
                return false;
            }
            page += n;
        }
        true
    }

    /// A stream has left a block behind: if it came in small pages, it is to be a huge page from now on.
    fn went_through(&self, block_start: usize) {
        let Some(block) = self.space.block(block_start) else { return };
        let block = block.lock();
        let mends = block.resident as usize == BLOCK_PAGES && !block.huge && block.splits < 2;
        let may = self.config.huge && self.config.swapin != Swapin::Never;
        // Who wants little would wait for it.
        let disturbs = || !self.crowd.each().all(|thread| self.streams.is_streaming(thread));
        if mends && may && self.splits.load(Relaxed) < MOST_SPLITS && !disturbs() {
            self.mend.store(block_start, Relaxed);
            self.kick();
        }
    }

    /// The order that this fault brings in; see [`order`].
    fn order(
        &self,
        block: &mut BlockState,
        page: usize,
        thread: u32,
        stream: Option<Stream>,
        swapped: bool,
    ) -> u8 {
        let largest = if self.config.swapin == Swapin::Never { BLOCK_ORDER - 1 } else { BLOCK_ORDER };
        let most = self.config.max_order.min(largest);
        let order = match (swapped, self.config.swapin) {
            // New memory that lies in between was not asked for, and may never be.
            (false, _) => stream.filter(|stream| stream.is_next).map_or(0, |stream| stream.order + 2),
            (true, Swapin::Always) => most,
            (true, _) => self.order_of_swapped(block, page, thread, stream.map(|stream| stream.order)),
        };
        order.min(most)
    }

    fn order_of_swapped(&self, block: &mut BlockState, page: usize, thread: u32, last: Option<u8>) -> u8 {
        let unit = block.unit_mut(page % BLOCK_PAGES).expect("unit of a swapped page");
        let out = unit.pages(Tag::Swapped);
        let asked = Asked { thread, unit: page / UNIT_PAGES, at: page % UNIT_PAGES, out, last };
        self.orders.lock().choose(&mut unit.usage, asked)
    }

    /// Ends the watch over a unit whose time has come, when a thread faults. No lock held.
    fn end_sample(&self, thread: u32) {
        let Some(unit) = self.orders.lock().due(thread) else { return };
        let Some(block) = self.space.block(unit * UNIT) else { return };
        if let Some(unit) = block.lock().unit_mut(unit * UNIT_PAGES % BLOCK_PAGES) {
            self.learn(unit);
        }
    }

    /// What became of a unit that is watched: its time has come, or reclaim looks at it. Under its block's lock.
    pub(crate) fn learn(&self, unit: &mut Unit) {
        let out = core::mem::take(&mut unit.usage.sampled);
        if out == 0 {
            return;
        }
        let resident = (self.limit() - self.budget.get()).max(0) as u64;
        let used = unit.resident() & out;
        let request_ns = self.request_ns.load(Relaxed);
        self.orders.lock().learn(
            unit.usage.sampled_as,
            used,
            out,
            request_ns,
            resident,
            self.space.out() as u64,
        );
    }

    /// The pages of its block that a fault may bring in with the one that it asks for: those of its region. If that is in
    /// none it may have grown to where it is, which is not told, and comes alone: so long as nothing has gone `since`
    /// the fault was read. Else `None`: what has gone may be another engine's by now, and COPY asks only whether a page
    /// is registered, not with whom. There it would put zeros in the place of what that one has out.
    fn bounds(
        &self,
        regions: &Regions,
        block_start: usize,
        index: usize,
        since: Option<u32>,
    ) -> Option<(usize, usize)> {
        match regions.find(block_start + index * PAGE) {
            Some(Region { start, end }) => {
                let (start, end) = (start.max(block_start), end.min(block_start + BLOCK));
                Some(((start - block_start) / PAGE, (end - block_start) / PAGE))
            }
            None => (since == Some(self.unmappings.load(Relaxed))).then_some((index, index + 1)),
        }
    }
}
