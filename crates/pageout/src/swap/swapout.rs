//! The way out: MOVE a unit's pages into frames, write what must be written, settle their words.
//!
//! ```text
//! leave    events shared, block lock: MOVE out, word Resident → Cached      (the program can no longer write)
//! weigh    no lock: zeros? unchanged since the entry was written? else a slot and a write
//! write    no lock: one request a run, several in flight                     (a fault here is a rescue)
//! settle   events shared, block lock: Cached → Swapped or Zero; else the page came back or is gone
//! ```
//! The frame belongs to the evictor from leave to settle, whatever happens to the page; then it is filled and
//! free. A page that finds no room, or whose write failed twice, is copied back: nothing is lost.

use super::leave::Left;
use crate::device::Run;
use crate::engine::Engine;
use crate::flaw::{makes, Flaw};
use crate::frame::{Part, CHUNK, EXECUTABLE};
use crate::kernel::Kernel;
use crate::page::Tag;
use crate::slot::Memory;
use crate::space::{BlockState, BLOCK, BLOCK_PAGES, BLOCK_UNITS, PAGE, UNIT};
use crate::stats::Stats;
use crate::swap::Place;
use crate::sync::atomic::Ordering::Relaxed;
use alloc::vec::Vec;
use rustix::io::Errno;

/// What becomes of a page that left.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Fate {
    /// It holds only zeros.
    Zero,
    /// Its entry has these very data.
    Clean,
    /// To be written.
    Write,
    /// Could not be written: goes back.
    Return,
}

pub(super) struct Out {
    pub(super) frame: u32,
    /// Where it was when it left; `Frames::owner` knows where it is.
    pub(super) page: usize,
    pub(super) entry: u64,
    pub(super) old_sum: u128,
    pub(super) sum: u128,
    pub(super) fate: Fate,
}

/// What one evictor has under way. Made once, used again and again: nothing is allocated later.
pub struct Outgoing {
    pub(super) pages: Vec<Out>,
    runs: Vec<Run>,
    results: Vec<Result<(), Errno>>,
    /// The chunk being filled and how far.
    pub(super) chunk: Option<(u32, usize)>,
    pub(super) chunks: Vec<u32>,
    /// The same of what can be executed.
    pub(super) executable: Option<(u32, usize)>,
    pub(super) executables: Vec<u32>,
    /// Huge frames, how many pages of each are filled, and whether by one huge page.
    pub(super) huge: Vec<(u32, usize, bool)>,
    pub(super) busy: Vec<usize>,
    /// Where slots may have memory from.
    pub(super) memory: Memory,
    /// It is a signal's handler's: events, which take memory, are for servers to read.
    pub(crate) of_handler: bool,
    /// Something found no place a moment ago: only what has its place on a device leaves.
    pub(super) placed_only: bool,
    /// Pages that have no place yet.
    pub(super) unplaced: usize,
    /// What left has gone back to the kernel, with what was no memory.
    pub(crate) gave_back: bool,
}

/// Looks at each unit before it is said that nothing can go.
const LOOKS: usize = 8;

/// Looks in a round where only what has its place can go: there may be none, and the next round looks further.
const LOOKS_STUCK: usize = BLOCK_PAGES;

/// Huge pages that a fault passes over in search of small ones, and the share of all memory that these may be (1 of
/// this): behind them is what came in last.
const MOST_PASSED: usize = 8;
const PASSED_SHARE: usize = 8;

/// Shared pages that are made the process's own at once. Each is a copy, which must leave before the next are made.
const MOST_SHARED: usize = 128;

/// So long (ns) a fault looks for memory that can leave where all that it finds was only read; then it goes over the limit.
const ZEROS_FOR: u64 = 20_000_000;

/// Pages that one round takes at most.
pub const MOST: usize = BLOCK_PAGES;

impl Outgoing {
    /// Empty, with room for a round.
    pub fn new() -> Self {
        Self {
            pages: Vec::with_capacity(MOST + BLOCK_PAGES),
            runs: Vec::with_capacity(MOST + BLOCK_PAGES),
            results: Vec::with_capacity(MOST + BLOCK_PAGES),
            chunk: None,
            // Of each that was begun by others there may be no more than a page to fill.
            chunks: Vec::with_capacity(MOST + BLOCK_PAGES),
            executable: None,
            executables: Vec::with_capacity(EXECUTABLE / CHUNK),
            huge: Vec::with_capacity(2),
            busy: Vec::with_capacity(MOST),
            memory: Memory::Asked,
            of_handler: false,
            placed_only: false,
            unplaced: 0,
            gave_back: false,
        }
    }

    /// MOVE refused a page as busy. Those that are too many wait for a later round.
    pub(super) fn was_busy(&mut self, page: usize) {
        if self.busy.len() < self.busy.capacity() {
            self.busy.push(page);
        }
    }
}

impl Default for Outgoing {
    fn default() -> Self {
        Self::new()
    }
}

impl<K: Kernel> Engine<K> {
    /// Lets about `want` pages leave (at most [`MOST`], a huge page as a whole). Returns how many did: 0 means
    /// that nothing could go. Far over the limit their frames go back to the kernel at once: once they are ready,
    /// faults take them, and it would stay far over. No lock held.
    pub fn evict(&self, out: &mut Outgoing, want: usize) -> usize {
        out.memory = Memory::Asked;
        let mut left = 0;
        loop {
            left += self.let_leave(out, want - left);
            self.drop_zeros(out);
            self.drop_filled(out);
            self.release(out);
            // Only now that nobody can wait for what was held: populating may wait for the fault path.
            if !self.unshare(out) || left >= want {
                return left;
            }
        }
    }

    /// The same for a fault that helps itself: it asks for no memory, and touches none, so never waits for itself.
    pub(crate) fn evict_directly(&self, out: &mut Outgoing, want: usize) -> usize {
        out.memory = Memory::AtHand;
        out.gave_back = false;
        let mut until = None;
        loop {
            let left = self.let_leave(out, want);
            let zeros = self.drop_zeros(out);
            self.release(out);
            // What was no memory makes no room, but is gone through, for a while: the next may be some.
            if left > zeros || zeros == 0 {
                return left.saturating_sub(zeros);
            }
            let now = self.kernel.now();
            if now > *until.get_or_insert(now + ZEROS_FOR) {
                return 0;
            }
        }
    }

    /// What both do. The frames are filled and the caller's.
    fn let_leave(&self, out: &mut Outgoing, want: usize) -> usize {
        out.busy.clear();
        self.place.forgive(|| self.kernel.now());
        let want = want.min(MOST);
        // Everything is looked at once, a few times where the dice or a shared page saved it.
        let (turns, units) = {
            let policy = self.policy.lock();
            (policy.turns(), policy.len())
        };
        // Without memory at hand what has no place would come back.
        out.placed_only = self.is_stuck() || out.memory == Memory::AtHand && !self.place.is_stocked();
        let mut looks = (LOOKS * turns + 1).min(if out.placed_only { LOOKS_STUCK } else { usize::MAX });
        let most_passed = (units / BLOCK_UNITS / PASSED_SHARE).clamp(1, MOST_PASSED);
        let (mut passed, mut shared) = (0, 0);
        let most_unplaced = self.place.room();
        // Nothing else has to.
        let tries = out.memory == Memory::Asked && self.tries_again.load(Relaxed);
        let has_tried = || tries && self.policy.lock().untried() == 0;
        let goes_on = |out: &Outgoing| {
            // A handler may not ask for memory, for more huge frames than there is room for.
            out.pages.len() < want
                && out.unplaced < most_unplaced
                && out.busy.len() < MOST_SHARED
                && out.huge.len() < out.huge.capacity()
                && !has_tried()
        };
        while goes_on(out) && looks > 0 && passed < most_passed {
            looks -= 1;
            let Some(turn) = self.policy.lock().candidate() else { break };
            match self.leave(out, turn.unit(), want) {
                Left::Some => {}
                Left::Passed => {
                    self.policy.lock().pass(turn);
                    passed += 1;
                }
                Left::Shared => shared += 1,
                Left::NoRoom if out.memory == Memory::Asked && self.drop_loose() > 0 => {
                    self.policy.lock().keep(turn);
                }
                Left::Pending | Left::NoRoom => {
                    self.policy.lock().keep(turn);
                    break;
                }
            }
        }
        if passed + shared > 0 {
            self.policy.lock().rejoin();
        }
        if out.pages.is_empty() {
            return 0;
        }
        self.weigh(out);
        self.write(out);
        // Who asks for frames goes another way where all come back.
        out.pages.len() - self.settle(out)
    }

    /// Pages that MOVE refused as busy are either shared since a fork, then a write makes them the process's
    /// own and they can leave, or pinned, then they stay. Not more than find a place: what does not is a copy for nothing.
    /// False: none was.
    fn unshare(&self, out: &mut Outgoing) -> bool {
        let mut room = self.place.free();
        let mut any = false;
        for run in out.busy.chunk_by(|page, next| page + PAGE == *next && next % UNIT != 0) {
            if run.len() > room {
                break;
            }
            (room, any) = (room - run.len(), true);
            // May fault and wait for the fault path: no lock is held here.
            if self.kernel.populate_write(run[0], run.len() * PAGE).is_err() {
                run.iter().for_each(|page| _ = self.kernel.populate_write(*page, PAGE));
            }
            Stats::add(&self.stats.busy_left, run.len() as u64);
            let Some(block) = self.space.block(run[0]) else { continue };
            if let Some(unit) = block.lock().unit_mut(run[0] % BLOCK / PAGE) {
                unit.usage.unshared = true;
            }
        }
        out.busy.clear();
        any
    }

    /// Zero, clean or to be written; what is to be written gets its place.
    fn weigh(&self, out: &mut Outgoing) {
        for page in &mut out.pages {
            let address = self.frames.address(page.frame);
            // SAFETY: the frame is ours and filled; the program cannot reach it.
            if unsafe { is_zero(address) } {
                page.fate = Fate::Zero;
                continue;
            }
            // SAFETY: the same.
            page.sum = unsafe { self.key.sum(address) };
            if page.entry != 0 && page.sum == page.old_sum {
                page.fate = Fate::Clean;
            } else if page.entry != 0 && self.place.is_shared(page.entry) {
                // A fork's child, or the parent, reads the slot: what is new goes elsewhere.
                self.place.put(page.entry, 1);
                page.entry = 0;
            }
        }
        self.place_pages(out);
    }

    /// A slot for each page to be written that has none: neighbours get neighbouring ones.
    fn place_pages(&self, out: &mut Outgoing) {
        let cpu = self.kernel.cpu();
        let mut at = 0;
        while at < out.pages.len() {
            let needs = |page: &Out| page.fate == Fate::Write && page.entry == 0;
            if !needs(&out.pages[at]) {
                at += 1;
                continue;
            }
            let mut n = 1;
            while at + n < out.pages.len()
                && needs(&out.pages[at + n])
                && out.pages[at + n].page == out.pages[at].page + n * PAGE
                && n < BLOCK_PAGES
            {
                n += 1;
            }
            while n > 0 {
                match self.place.alloc(cpu, n, (out.pages[at].page / PAGE) as u64, out.memory) {
                    Some((entry, got)) => {
                        Stats::add(&self.stats.swpout[got.ilog2() as usize], 1);
                        let wanted = n.ilog2();
                        if got.ilog2() < wanted {
                            Stats::add(&self.stats.swpout_fallback[wanted as usize], 1);
                        }
                        for (i, page) in out.pages[at..at + got].iter_mut().enumerate() {
                            page.entry = entry + i as u64;
                        }
                        (at, n) = (at + got, n - got);
                    }
                    None => {
                        // All devices are full, or no memory is at hand: what has no place goes back.
                        if self.place.is_full() {
                            self.found_none();
                        }
                        for page in &mut out.pages[at..at + n] {
                            page.fate = Fate::Return;
                        }
                        (at, n) = (at + n, 0);
                    }
                }
            }
        }
    }

    fn write(&self, out: &mut Outgoing) {
        let mut from = 0;
        while from < out.pages.len() {
            // One batch a device.
            let Some(first) = out.pages[from..].iter().find(|page| page.fate == Fate::Write) else { break };
            let of = |(id, _)| Some((id, self.place.device(id)?));
            let (id, device) = Place::at(first.entry).and_then(of).expect("the device of a slot in use");
            out.runs.clear();
            let mut upto = from;
            while upto < out.pages.len() {
                let page = &out.pages[upto];
                if page.fate == Fate::Write {
                    let Some((on, at)) = Place::at(page.entry) else { break };
                    if on != id {
                        break;
                    }
                    let address = self.frames.address(page.frame);
                    match out.runs.last_mut() {
                        Some(run) if run.at + run.len as u64 == at && run.address + run.len == address => {
                            run.len += PAGE;
                        }
                        _ => out.runs.push(Run { at, address, len: PAGE }),
                    }
                }
                upto += 1;
            }
            out.results.clear();
            out.results.resize(out.runs.len(), Ok(()));
            // SAFETY: the frames are ours until they are settled; a rescue only reads them.
            unsafe { device.write_batch(&out.runs, &mut out.results) };
            self.judge_writes(out, from, upto);
            from = upto;
        }
    }

    /// Pages whose write failed are tried one by one somewhere else, once, on another device if there is one; then they go back.
    fn judge_writes(&self, out: &mut Outgoing, from: usize, upto: usize) {
        let mut written = 0;
        let (mut run, mut within) = (0, 0);
        for page in out.pages[from..upto].iter_mut().filter(|page| page.fate == Fate::Write) {
            if within == out.runs[run].len {
                (run, within) = (run + 1, 0);
            }
            within += PAGE;
            if out.results[run].is_ok() {
                written += 1;
                continue;
            }
            Stats::add(&self.stats.write_errors, 1);
            self.place.found_no_room();
            self.place.shun(page.entry, self.kernel.now());
            let bad = page.entry;
            let elsewhere = self.place.alloc(self.kernel.cpu(), 1, (page.page / PAGE) as u64, out.memory);
            page.entry = 0;
            if let Some((entry, _)) = elsewhere {
                let ok = self.place.locate(entry).is_some_and(|(device, at)| {
                    let run = [Run { at, address: self.frames.address(page.frame), len: PAGE }];
                    let mut result = [Ok(())];
                    // SAFETY: as in `write`.
                    unsafe { device.write_batch(&run, &mut result) };
                    result[0].is_ok()
                });
                if ok {
                    page.entry = entry;
                    written += 1;
                } else {
                    self.place.put(entry, 1);
                }
            }
            if page.entry == 0 {
                page.fate = Fate::Return;
                // Or no memory is at hand.
                if elsewhere.is_some() || self.place.is_full() {
                    self.found_none();
                }
            }
            self.place.put(bad, 1);
        }
        Stats::add(&self.stats.pswpout, written);
    }

    /// Says in the words where the pages are now. How many are where they were.
    fn settle(&self, out: &mut Outgoing) -> usize {
        let (mut at, mut returned) = (0, 0);
        while at < out.pages.len() {
            let regions = self.events.read();
            let owner = self.frames.owner(out.pages[at].frame);
            let block_start = owner & !(BLOCK - 1);
            let Some(block) = self.space.block(owner) else { unreachable!("a page without a block left") };
            let mut block = block.lock();
            while at < out.pages.len() {
                let page = &out.pages[at];
                let owner = self.frames.owner(page.frame);
                if owner & !(BLOCK - 1) != block_start {
                    break;
                }
                let index = (owner - block_start) / PAGE;
                let word = block.word(index);
                let is_ours = word.tag() == Tag::Cached && word.payload() == page.frame as u64;
                if is_ours || makes(Flaw::SettleUnsure) {
                    if page.fate == Fate::Return {
                        break;
                    }
                    self.settle_page(&mut block, index, page);
                } else if page.entry != 0 {
                    // Rescued, or given up by the program: the entry is nobody's.
                    self.place.put(page.entry, 1);
                }
                at += 1;
            }
            drop(block);
            drop(regions);
            if at < out.pages.len() && out.pages[at].fate == Fate::Return {
                self.return_page(out.pages[at].frame, out.of_handler);
                (at, returned) = (at + 1, returned + 1);
            }
        }
        returned
    }

    fn settle_page(&self, block: &mut BlockState, index: usize, page: &Out) {
        let word = block.word(index);
        match page.fate {
            Fate::Zero => {
                if page.entry != 0 {
                    self.place.put(page.entry, 1);
                }
                block.set(index, word.settle_zero());
                block.set_sum(index, 0);
                Stats::add(&self.stats.swpout_zero, 1);
            }
            fate => {
                block.set(index, word.settle(page.entry));
                block.set_sum(index, page.sum);
                Stats::add(&self.stats.clean_dropped, (fate == Fate::Clean) as u64);
            }
        }
        Stats::add(&self.stats.pgsteal, 1);
    }

    /// Brings a page that could not be written back to the program. Its frame is the only place where its data
    /// are: it is tried until the page is there or its mapping is not. Reads the events that stop it: the caller
    /// may be the only thread that does, but for a signal's handler.
    fn return_page(&self, frame: u32, of_handler: bool) {
        let mut backoff = crate::sync::Backoff::new();
        loop {
            let regions = self.events.read();
            let owner = self.frames.owner(frame);
            let block_start = owner & !(BLOCK - 1);
            let index = (owner - block_start) / PAGE;
            let mut block = self.space.block_or_new(owner).lock();
            let word = block.word(index);
            if word.tag() != Tag::Cached || word.payload() != frame as u64 {
                break;
            }
            let copied = self.copy(owner, self.frames.address(frame), 1, None);
            match copied.map_err(|partial| partial.errno) {
                // Mapped already, by somebody who writes around us: theirs is the newer.
                Ok(()) | Err(Errno::EXIST) => {
                    self.budget.sub(copied.is_ok().into());
                    block.set(index, word.rescue());
                    self.is_here(&mut block, block_start, index..index + 1);
                    break;
                }
                // No event explains it, so none will come: the mapping is gone for good.
                Err(Errno::NOENT | Errno::SRCH) if !self.kernel.event_pending() => {
                    block.set(index, word.forget());
                    block.set_sum(index, 0);
                    break;
                }
                // An event is unread, or memory is short.
                Err(_) => {
                    drop(block);
                    drop(regions);
                    if !of_handler {
                        self.pump();
                    }
                    backoff.snooze();
                }
            }
        }
    }

    /// What has no place finds none for a while ([`Engine::is_stuck`]).
    fn found_none(&self) {
        self.stuck_until.store(self.kernel.now() + 100_000_000, Relaxed);
    }

    /// Gives chunks with frames that hold the kernel's page of zeros back to the kernel: these are no memory, and would take some
    /// when they are written to. Memory has it that was only read before it was taken up. How many frames. No lock held.
    fn drop_zeros(&self, out: &mut Outgoing) -> usize {
        // Regions are registered before they are read.
        if self.is_inline() {
            return 0;
        }
        let mut dropped = 0;
        let pages = &out.pages;
        let mut stays = |first: u32, filled: usize| {
            let is_in = |page: &Out| page.fate == Fate::Zero && page.frame.wrapping_sub(first) < CHUNK as u32;
            if !pages.iter().any(is_in) {
                return true;
            }
            let at = self.frames.address(first);
            let zeros = self.kernel.count_zeros(at, filled * PAGE);
            if zeros == 0 {
                return true;
            }
            let _regions = self.events.read();
            if self.drop_frames(at, CHUNK * PAGE).is_err() {
                // Then they are memory from now on.
                for page in pages.iter().filter(|page| is_in(page)) {
                    // SAFETY: a frame that is ours, of a page that has been settled.
                    unsafe { (self.frames.address(page.frame) as *mut u64).write_volatile(1) };
                }
                self.budget.sub(zeros);
                return true;
            }
            self.frames.dropped(first);
            self.budget.add(filled - zeros);
            dropped += zeros;
            false
        };
        out.chunks.retain(|first| stays(*first, CHUNK));
        out.chunk = out.chunk.filter(|(first, filled)| stays(*first, *filled));
        out.gave_back |= dropped > 0;
        dropped
    }

    /// Gives whole chunks and huge frames back to the kernel, as long as the process is far over its limit.
    fn drop_filled(&self, out: &mut Outgoing) {
        while self.is_far_over() {
            if let Some(chunk) = out.chunks.pop() {
                if !self.drop_chunk(chunk) {
                    return out.chunks.push(chunk);
                }
            } else if let Some((huge, filled, whole)) = out.huge.pop() {
                if !self.drop_huge_frame(huge, filled) {
                    return out.huge.push((huge, filled, whole));
                }
            } else {
                break;
            }
        }
    }

    /// The frames are filled and free. No lock held.
    fn release(&self, out: &mut Outgoing) {
        for chunk in out.chunks.drain(..) {
            self.frames.filled(chunk, CHUNK);
        }
        if let Some((chunk, filled)) = out.chunk.take() {
            self.frames.filled(chunk, filled);
        }
        while self.frames.take_executable_left().is_some_and(|chunk| self.drop_executable(chunk)) {}
        let full = out.executables.drain(..).map(|chunk| (chunk, CHUNK));
        for (frame, filled) in full.chain(out.executable.take()) {
            self.drop_executable(Part { frame, count: filled as u32 });
        }
        while self.frames.take_huge_left().is_some_and(|(huge, filled)| self.give_up_huge(huge, filled)) {}
        for (huge, filled, whole) in out.huge.drain(..) {
            if whole {
                self.frames.huge_filled(huge);
            } else {
                self.give_up_huge(huge, filled);
            }
        }
        out.pages.clear();
        out.unplaced = 0;
    }
}

/// Is a page all zeros?
///
/// # Safety
/// `address` is a mapped page that nobody writes now.
pub(super) unsafe fn is_zero(address: usize) -> bool {
    // SAFETY: by contract; page-aligned.
    let words = unsafe { core::slice::from_raw_parts(address as *const u64, PAGE / 8) };
    words.chunks_exact(8).all(|line| line.iter().fold(0, |all, word| all | word) == 0)
}
