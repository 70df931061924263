//! The way out: MOVE a unit's pages into frames, write what must be written, settle their words.
//!
//! ```text
//! leave    events shared, block lock: MOVE out, word Resident → Cached      (the program can no longer write)
//! weigh    no lock: zeros? unchanged since the entry was written? else a slot and a write
//! write    no lock: one request a run, several in flight                     (a fault here is a rescue)
//! settle   events shared, block lock: Cached → Swapped or Zero; else the page came back or is gone
//! ```
//! The frame belongs to the evictor from leave to settle, whatever happens to the page; then it is filled and
//! free. A page that finds no room, or whose write failed twice, is moved back: nothing is lost.

use crate::device::Run;
use crate::engine::Engine;
use crate::flaw::{makes, Flaw};
use crate::frame::{Part, CHUNK, EXECUTABLE};
use crate::kernel::Kernel;
use crate::page::Tag;
use crate::reclaim::policy::Turn;
use crate::slot::Memory;
use crate::space::{bits, BlockState, BLOCK, BLOCK_PAGES, BLOCK_UNITS, PAGE, UNIT, UNIT_PAGES};
use crate::stats::Stats;
use crate::swap::Place;
use crate::sync::atomic::Ordering::{Relaxed, SeqCst};
use alloc::vec::Vec;
use rustix::io::Errno;

/// What becomes of a page that left.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Fate {
    /// It holds only zeros.
    Zero,
    /// Its entry has these very data.
    Clean,
    /// To be written.
    Write,
    /// Could not be written: goes back.
    Return,
}

struct Out {
    frame: u32,
    /// Where it was when it left; `Frames::owner` knows where it is.
    page: usize,
    entry: u64,
    old_sum: u128,
    sum: u128,
    fate: Fate,
}

/// What one evictor has under way. Made once, used again and again: nothing is allocated later.
pub struct Outgoing {
    pages: Vec<Out>,
    runs: Vec<Run>,
    results: Vec<Result<(), Errno>>,
    /// The chunk being filled and how far.
    chunk: Option<(u32, usize)>,
    chunks: Vec<u32>,
    /// The same of what can be executed.
    executable: Option<(u32, usize)>,
    executables: Vec<u32>,
    /// Huge frames, how many pages of each are filled, and whether by one huge page.
    huge: Vec<(u32, usize, bool)>,
    busy: Vec<usize>,
    /// Where slots may have memory from.
    memory: Memory,
    /// It is a signal's handler's: events, which take memory, are for servers to read.
    pub(crate) of_handler: bool,
    /// Something found no place a moment ago: only what has its place on a device leaves.
    placed_only: bool,
    /// Pages that have no place yet.
    unplaced: usize,
}

/// How an attempt to let a unit leave ended.
enum Left {
    Some,
    /// An event is unread, or all stand still: nothing can be moved now.
    Pending,
    /// No hole to move into.
    NoRoom,
    /// A huge page, and only a few pages are wanted: it stays where it is in the queue.
    Passed,
    /// Pages shared since a fork, or pinned: it stays where it is in the queue, too.
    Shared,
}

/// Pages on their way out, from `index` on: of units that are neighbours and whose turns follow each other, up to a chunk;
/// `leave` and `moved` have a bit for each page from `first` on.
struct Leaving {
    block_start: usize,
    first: usize,
    units: usize,
    leave: u64,
    unshared: bool,
    /// Unit by unit: a MOVE of several was refused as a whole, since another mapping begins between them or one is read-only or
    /// locked.
    apart: bool,
    /// Up to the first in parts of the second, a power of two: a MOVE within a unit was refused as well.
    parts: (usize, usize),
    /// Into frames that can be executed; and where the others have been tried.
    executable: bool,
    refused: Option<usize>,
    index: usize,
    moved: u64,
}

impl Leaving {
    /// The bits of a unit, by its place among them.
    fn of(bits: u64, unit: usize) -> u16 {
        (bits >> (unit * UNIT_PAGES)) as u16
    }

    fn end(&self) -> usize {
        self.first + self.units * UNIT_PAGES
    }

    /// The number of a unit, by its place among them.
    fn number(&self, unit: usize) -> u32 {
        ((self.block_start + self.first * PAGE) / UNIT + unit) as u32
    }
}

/// The page behind a page's unit.
fn unit_end(page: usize) -> usize {
    page / UNIT_PAGES * UNIT_PAGES + UNIT_PAGES
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
            chunks: Vec::with_capacity(MOST / CHUNK + 2),
            executable: None,
            executables: Vec::with_capacity(EXECUTABLE / CHUNK),
            huge: Vec::with_capacity(2),
            busy: Vec::with_capacity(MOST),
            memory: Memory::Asked,
            of_handler: false,
            placed_only: false,
            unplaced: 0,
        }
    }

    /// MOVE refused a page as busy. Those that are too many wait for a later round.
    fn was_busy(&mut self, page: usize) {
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
        let left = self.let_leave(out, want);
        self.release(out);
        left
    }

    /// What both do. The frames are filled and the caller's.
    fn let_leave(&self, out: &mut Outgoing, want: usize) -> usize {
        out.busy.clear();
        let want = want.min(MOST);
        // Everything is looked at once, a few times where the dice or a shared page saved it.
        let (turns, units) = {
            let policy = self.policy.lock();
            (policy.turns(), policy.len())
        };
        out.placed_only = self.is_stuck();
        let mut looks = (LOOKS * turns + 1).min(if out.placed_only { LOOKS_STUCK } else { usize::MAX });
        let most_passed = (units / BLOCK_UNITS / PASSED_SHARE).clamp(1, MOST_PASSED);
        let (mut passed, mut shared) = (0, 0);
        let most_unplaced = self.place.room();
        let goes_on = |out: &Outgoing| {
            out.pages.len() < want && out.unplaced < most_unplaced && out.busy.len() < MOST_SHARED
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
                Left::Pending | Left::NoRoom => {
                    self.policy.lock().keep(turn);
                    break;
                }
            }
        }
        if passed + shared > 0 {
            self.policy.lock().rejoin();
        }
        let left = out.pages.len();
        if left > 0 {
            self.weigh(out);
            self.write(out);
            self.settle(out);
        }
        left
    }

    /// Moves the resident pages of a unit, or of its whole huge block, into frames; those of its neighbours too, if it is
    /// their turn: each MOVE may interrupt other CPUs, and costs more than the pages that it moves.
    fn leave(&self, out: &mut Outgoing, number: u32, want: usize) -> Left {
        let unit_start = number as usize * UNIT;
        let regions = self.events.read();
        if self.still.load(SeqCst) {
            return Left::Pending;
        }
        let Some(block) = self.space.block(unit_start) else { return Left::Some };
        let mut block = block.lock();
        let block_start = unit_start & !(BLOCK - 1);
        let first = (unit_start - block_start) / PAGE;
        let Some(mut leave) = self.chosen(out.placed_only, &mut block, block_start, first) else {
            return Left::Some;
        };
        if block.huge {
            if want < MOST {
                // A caller in a hurry (a fault) takes small ones; huge blocks wait for an evictor.
                if !self.huge_due.swap(true, Relaxed) {
                    self.kick();
                }
                return Left::Passed;
            }
            if let Some(done) = self.leave_huge(out, &mut block, block_start, first) {
                return done;
            }
            leave = if out.placed_only { block.placed(first) } else { u16::MAX };
        }
        let unshared = block.unit(first).is_some_and(|unit| unit.usage.unshared);
        let (units, leave) = match unshared {
            true => (1, leave as u64),
            false => self.with_neighbours(out, &mut block, block_start, first, leave, want - out.pages.len()),
        };
        drop(block);
        drop(regions);
        let busy_before = out.busy.len();
        let mut leaving = Leaving {
            block_start,
            first,
            units,
            leave,
            unshared,
            apart: false,
            parts: (first, 1),
            executable: false,
            refused: None,
            index: first,
            moved: 0,
        };
        // Servers wait for the locks to read a fault.
        while leaving.index < leaving.end() {
            match self.leave_run(out, &mut leaving) {
                Left::Some => {}
                stopped => {
                    let mut policy = self.policy.lock();
                    (1..units).for_each(|unit| policy.keep(Turn::new(leaving.number(unit), false)));
                    return stopped;
                }
            }
        }
        let mut shared = Left::Some;
        for unit in 0..units {
            if let Left::Shared = self.have_left(out, &leaving, unit, busy_before) {
                shared = Left::Shared;
            }
        }
        shared
    }

    /// How many units leave together, from `first` on, and which of their pages: those of the first and, as far as it is their turn
    /// next and they are no more than `room` pages, of its neighbours.
    fn with_neighbours(
        &self,
        out: &Outgoing,
        block: &mut BlockState,
        block_start: usize,
        first: usize,
        leave: u16,
        room: usize,
    ) -> (usize, u64) {
        let (mut units, mut leave) = (1, leave as u64);
        let number = (block_start + first * PAGE) / UNIT;
        while first + (units + 1) * UNIT_PAGES <= BLOCK_PAGES && (units + 1) * UNIT_PAGES <= CHUNK {
            let next = first + units * UNIT_PAGES;
            let is_plain = block.unit(next).is_some_and(|unit| !unit.usage.unshared);
            let fits = leave.count_ones() as usize + UNIT_PAGES <= room;
            let turn = Turn::new((number + units) as u32, false);
            if !is_plain || !fits || !self.policy.lock().candidate_is(turn) {
                break;
            }
            let Some(pages) = self.chosen(out.placed_only, block, block_start, next) else { break };
            leave |= (pages as u64) << (units * UNIT_PAGES);
            units += 1;
        }
        (units, leave)
    }

    /// Which of its pages leave now that it is a unit's turn; none: it stays, or there is nothing.
    fn chosen(
        &self,
        placed_only: bool,
        block: &mut BlockState,
        block_start: usize,
        first: usize,
    ) -> Option<u16> {
        let unit_start = block_start + first * PAGE;
        let unit = block.unit_mut(first)?;
        if !unit.words.iter().any(|word| word.tag() == Tag::Resident) {
            unit.usage.queued = false;
            return None;
        }
        Stats::add(&self.stats.pgscan, UNIT_PAGES as u64);
        if self.is_pinned(unit_start) {
            // It is out of the queue for good; the others of its block are not.
            if block.huge {
                block.is_split();
                self.requeue_units(block, block_start);
            }
            return None;
        }
        if block.is_held(first) {
            // `release_hold` queues it again.
            block.unit_mut(first).expect("unit of a candidate").usage.queued = false;
            return None;
        }
        let huge = block.huge;
        let placed = match (placed_only, huge) {
            (false, _) => u16::MAX,
            (true, false) => block.placed(first),
            (true, true) => {
                let units = (0..BLOCK_PAGES).step_by(UNIT_PAGES);
                units.map(|first| block.placed(first)).find(|placed| *placed != 0).unwrap_or(0)
            }
        };
        if placed == 0 {
            self.policy.lock().keep(Turn::new((unit_start / UNIT) as u32, huge));
            return None;
        }
        let unit = block.unit_mut(first).expect("unit of a candidate");
        // A huge page goes by the heat of the first page of the unit that stands for it.
        let pages = if huge { 1 } else { unit.resident() & placed };
        // What was un-shared to leave is a copy that takes memory: it goes without a throw.
        let leave = match unit.usage.unshared {
            true => pages,
            false => {
                let turn = Turn::new((unit_start / UNIT) as u32, huge);
                self.policy.lock().judge(turn, &unit.usage, pages)
            }
        };
        if leave == 0 {
            return None;
        }
        // As long as all that came is there.
        self.learn(unit);
        Some(leave)
    }

    /// Says in a unit what has left of it, and queues it again if something stayed.
    fn have_left(&self, out: &mut Outgoing, leaving: &Leaving, place: usize, busy_before: usize) -> Left {
        let first = leaving.first + place * UNIT_PAGES;
        let unit_start = leaving.block_start + first * PAGE;
        let (leave, moved) = (Leaving::of(leaving.leave, place), Leaving::of(leaving.moved, place));
        let number = leaving.number(place);
        let Some(block) = self.space.block(unit_start) else { return Left::Some };
        let mut block = block.lock();
        let huge = block.huge;
        let is_held = block.is_held(first);
        let Some(unit) = block.unit_mut(first) else { return Left::Some };
        let shared =
            !leaving.unshared && out.busy[busy_before..].iter().any(|page| page / UNIT == number as usize);
        unit.usage.unshared = false;
        if leaving.unshared {
            // What is busy still is pinned.
            out.busy.truncate(busy_before);
        }
        unit.usage.left = moved & !unit.resident();
        unit.usage.evicted_at = self.evictions.fetch_add(1, Relaxed).max(1);
        match unit.resident() {
            // As when its turn comes.
            stay if is_held || stay == 0 => unit.usage.queued = false,
            _ if shared => {
                self.policy.lock().pass(Turn::new(number, huge));
                return Left::Shared;
            }
            // Pinned, read-only or locked.
            stay if stay & !(leave & !moved) == 0 && !huge => {
                self.policy.lock().park(Turn::new(number, false))
            }
            // Some are hot, or are back.
            _ => self.policy.lock().keep(Turn::new(number, huge)),
        }
        Left::Some
    }

    /// Must a unit stay for good?
    fn is_pinned(&self, unit_start: usize) -> bool {
        self.config.pins.is_some_and(|pins| pins.is_pinned(unit_start))
    }

    /// Moves the next neighbours of those pages that are to leave, as far as they are there and may.
    fn leave_run(&self, out: &mut Outgoing, leaving: &mut Leaving) -> Left {
        let Leaving { block_start, first, leave, unshared, .. } = *leaving;
        let end = leaving.end();
        let _regions = self.events.read();
        if self.still.load(SeqCst) {
            return Left::Pending;
        }
        let Some(mut block) =
            self.space.block(block_start).map(|block| block.lock()).filter(|block| !block.huge)
        else {
            leaving.index = end;
            return Left::Some;
        };
        let stays = |at: &usize| block.is_held(*at) || self.is_pinned(block_start + at * PAGE);
        let stay = (first..end).step_by(UNIT_PAGES).filter(stays);
        let leave = stay.fold(leave, |leave, at| leave & !bits(at - first..at - first + UNIT_PAGES));
        let leaves =
            |index: usize| leave & 1 << (index - first) != 0 && block.word(index).tag() == Tag::Resident;
        let Some(index) = (leaving.index..end).find(|index| leaves(*index)) else {
            leaving.index = end;
            return Left::Some;
        };
        let Some((chunk, filled)) = self.holes(out, leaving.executable) else { return Left::NoRoom };
        let upto = match () {
            () if index < leaving.parts.0 => index / leaving.parts.1 * leaving.parts.1 + leaving.parts.1,
            () if leaving.apart => unit_end(index),
            () => end,
        };
        let run = (index..upto.min(index + CHUNK - filled)).take_while(|index| leaves(*index)).count();
        let frame = chunk + filled as u32;
        let from = block_start + index * PAGE;
        let to = self.frames.address(frame);
        // What it costs an evictor, which may run while all others rest, says nothing about the servers.
        let moved = match out.memory {
            Memory::AtHand => self.move_timed(to, from, run, false),
            Memory::Asked => self.kernel.move_pages(to, from, run * PAGE, false),
        };
        let done = moved.map_or_else(|partial| partial.done / PAGE, |()| run);
        for page in 0..done {
            self.left(out, &mut block, block_start, index + page, frame + page as u32);
        }
        let begun = if leaving.executable { &mut out.executable } else { &mut out.chunk };
        *begun = Some((chunk, filled + done));
        if leaving.executable && done > 0 {
            // It never comes by a huge frame, so it is not to become a huge page.
            block.splits = 2;
        }
        leaving.moved |= bits(index - first..index - first + done);
        let index = index + done;
        leaving.index = index;
        let Err(partial) = moved else { return Left::Some };
        match partial.errno {
            Errno::AGAIN if done > 0 => {}
            Errno::AGAIN => return Left::Pending,
            // Or no such mapping: then it is on its way elsewhere, and its pages with it.
            Errno::NOENT if self.kernel.event_pending() => return Left::Pending,
            // The kernel knows no such page: discarded without an event (guard pages).
            Errno::NOENT => {
                Stats::add(&self.stats.discarded_unseen, 1);
                let word = block.word(index);
                if word.payload() != 0 {
                    self.place.put(word.payload(), 1);
                }
                block.set(index, word.forget());
                block.set_sum(index, 0);
                leaving.index += 1;
            }
            Errno::BUSY => {
                // What is shared is so in runs. Who was made the process's own and is busy still is pinned.
                let busy = if unshared { 1 } else { (run - done).min(unit_end(index) - index) };
                (0..busy).for_each(|page| out.was_busy(block_start + (index + page) * PAGE));
                leaving.index += busy;
            }
            Errno::EXIST if self.empty_touched(self.frames.address(frame) + done * PAGE, PAGE) => {}
            // Another access than the frames have.
            Errno::INVAL if self.frames.has_executable() && leaving.refused != Some(index) => {
                leaving.refused = Some(index);
                leaving.executable = !leaving.executable;
            }
            _ if done == 0 && index + run > unit_end(index) => {
                (leaving.apart, leaving.refused) = (true, None)
            }
            _ if done == 0 && run > 1 => {
                let part = run.next_power_of_two() / 2;
                leaving.parts = (leaving.parts.0.max(index + run), part);
                leaving.refused = None;
            }
            // Read-only, locked: stays.
            _ => leaving.index += 1,
        }
        Left::Some
    }

    /// A chunk that is not full, and how far it is filled.
    fn holes(&self, out: &mut Outgoing, executable: bool) -> Option<(u32, usize)> {
        let (begun, full) = match executable {
            true => (&mut out.executable, &mut out.executables),
            false => (&mut out.chunk, &mut out.chunks),
        };
        if let Some(chunk) = begun.filter(|(_, filled)| *filled < CHUNK) {
            return Some(chunk);
        }
        let new = match executable {
            true => (self.frames.take_executable_holes()?, 0),
            false => self.frames.take_holes()?,
        };
        full.extend(begun.replace(new).map(|(full, _)| full));
        Some(new)
    }

    /// Moves a block that is mapped huge in one piece. `None`: it is not huge (any more), or a part of it must stay: small
    /// pages, then.
    fn leave_huge(
        &self,
        out: &mut Outgoing,
        block: &mut BlockState,
        block_start: usize,
        first: usize,
    ) -> Option<Left> {
        let turn = Turn::new(((block_start + first * PAGE) / UNIT) as u32, true);
        let stays = (0..BLOCK_PAGES).step_by(UNIT_PAGES).any(|index| {
            out.placed_only && block.placed(index) != u16::MAX || self.is_pinned(block_start + index * PAGE)
        });
        if stays || !self.is_one_page(block_start) || !block.all(0, BLOCK_PAGES, Tag::Resident) {
            block.is_split();
            self.requeue_units(block, block_start);
            return None;
        }
        let Some(huge) = self.frames.take_huge_hole() else {
            self.policy.lock().keep(turn);
            return Some(Left::Some);
        };
        let moved = self.kernel.move_pages(self.frames.huge_address(huge), block_start, BLOCK, false);
        let done = moved.map_or_else(|partial| partial.done / PAGE, |()| BLOCK_PAGES);
        if let (0, Err(partial)) = (done, moved) {
            if partial.errno == Errno::EXIST {
                self.empty_touched(self.frames.huge_address(huge), BLOCK);
            }
            self.frames.huge_emptied(huge);
            if partial.errno == Errno::INVAL && self.frames.has_executable() {
                // It can be executed, maybe: then it goes by small pages, and never comes back as a huge one.
                block.splits = 2;
                block.is_split();
                self.requeue_units(block, block_start);
                return None;
            }
            let unit = block.unit_mut(first).expect("unit of a queued page");
            let was_unshared = core::mem::take(&mut unit.usage.unshared);
            let mut policy = self.policy.lock();
            match partial.errno {
                // An unread event stops the others that are looked at, too.
                Errno::AGAIN | Errno::NOENT | Errno::EXIST => policy.keep(turn),
                // Shared since a fork, then it is small pages once it is the process's own; or pinned.
                Errno::BUSY if !was_unshared => {
                    policy.keep(turn);
                    out.was_busy(block_start + first * PAGE);
                }
                // Pinned, read-only or locked.
                _ => policy.park(turn),
            }
            return Some(Left::Some);
        }
        let whole = done == BLOCK_PAGES && self.is_one_page(self.frames.huge_address(huge));
        block.is_split();
        block.table = !whole;
        for index in 0..done {
            self.left(out, block, block_start, index, self.frames.of_huge(huge) + index as u32);
        }
        let now = self.evictions.fetch_add(BLOCK_PAGES as u32 / UNIT_PAGES as u32, Relaxed).max(1);
        for index in (0..done).step_by(UNIT_PAGES) {
            let unit = block.unit_mut(index).expect("unit of a page that left");
            (unit.usage.evicted_at, unit.usage.left) = (now, u16::MAX);
        }
        // The others of its units that are queued are found to be gone when their turn comes.
        let usage = &mut block.unit_mut(first).expect("unit of a queued page").usage;
        (usage.queued, usage.unshared) = (false, false);
        Stats::add(if whole { &self.stats.thp_swpout } else { &self.stats.thp_swpout_fallback }, 1);
        if done < BLOCK_PAGES {
            self.requeue_units(block, block_start);
        }
        out.huge.push((huge, done, whole));
        Some(Left::Some)
    }

    /// Queues every unit of a block that was queued by another one, since the block is not huge any more.
    pub(crate) fn requeue_units(&self, block: &mut BlockState, block_start: usize) {
        for index in (0..BLOCK_PAGES).step_by(UNIT_PAGES) {
            let resident = block
                .unit(index)
                .is_some_and(|unit| unit.words.iter().any(|word| word.tag() == Tag::Resident));
            if resident && !block.unit(index).is_some_and(|unit| unit.usage.queued) {
                self.used(block, block_start, index..index + UNIT_PAGES, false);
            }
        }
    }

    /// A page is in `frame` now.
    fn left(&self, out: &mut Outgoing, block: &mut BlockState, block_start: usize, index: usize, frame: u32) {
        let (word, sum) = (block.word(index), block.sum(index));
        out.unplaced += (word.payload() == 0) as usize;
        let page = block_start + index * PAGE;
        self.frames.set_owner(frame, page);
        block.set(index, word.leave(frame));
        out.pages.push(Out { frame, page, entry: word.payload(), old_sum: sum, sum: 0, fate: Fate::Write });
    }

    /// Pages that MOVE refused as busy are either shared since a fork, then a write makes them the process's
    /// own and they can leave, or pinned, then they stay. False: there were none.
    fn unshare(&self, out: &mut Outgoing) -> bool {
        for run in out.busy.chunk_by(|page, next| page + PAGE == *next && next % UNIT != 0) {
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
        let any = !out.busy.is_empty();
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
                        // All devices are full: what has no place goes back.
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

    /// Pages whose write failed are tried one by one somewhere else, once; then they go back.
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
            self.place.has_none();
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
            }
            self.place.put(bad, 1);
        }
        Stats::add(&self.stats.pswpout, written);
    }

    /// Says in the words where the pages are now.
    fn settle(&self, out: &mut Outgoing) {
        let mut at = 0;
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
                at += 1;
            }
        }
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
            let copied = self.kernel.copy(owner, self.frames.address(frame), PAGE, true);
            match copied.map_err(|partial| partial.errno) {
                // Mapped already, by somebody who writes around us: theirs is the newer.
                Ok(()) | Err(Errno::EXIST) => {
                    self.budget.fetch_sub(copied.is_ok() as i64, Relaxed);
                    block.set(index, word.rescue());
                    self.used(&mut block, block_start, index..index + 1, false);
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
        self.stuck_until.store(self.kernel.now() + 100_000_000, Relaxed);
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
        for (huge, filled, whole) in out.huge.drain(..) {
            if whole {
                self.frames.huge_filled(huge);
            } else {
                self.drop_huge_frame(huge, filled);
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
