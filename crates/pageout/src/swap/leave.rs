//! Leave: the pages of a unit, or a huge page, go into frames by MOVE, where the program cannot reach them.
//!
//! The first step of the way out ([`super::swapout`]). The lock of the block is held for one MOVE at a time; between two of
//! them servers have their turn.

use super::swapout::{Fate, Out, Outgoing, MOST};
use crate::engine::Engine;
use crate::frame::CHUNK;
use crate::kernel::{Kernel, Partial};
use crate::page::Tag;
use crate::reclaim::policy::Turn;
use crate::slot::Memory;
use crate::space::{bits, BlockState, Unit, BLOCK, BLOCK_PAGES, PAGE, UNIT, UNIT_PAGES};
use crate::stats::Stats;
use crate::sync::atomic::Ordering::{Relaxed, SeqCst};
use rustix::io::Errno;

/// How an attempt to let a unit leave ended.
pub(super) enum Left {
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

impl<K: Kernel> Engine<K> {
    /// Moves the resident pages of a unit, or of its whole huge block, into frames; those of its neighbours too, if it is
    /// their turn: each MOVE may interrupt other CPUs, and costs more than the pages that it moves.
    pub(super) fn leave(&self, out: &mut Outgoing, number: u32, want: usize) -> Left {
        let unit_start = number as usize * UNIT;
        let regions = self.events.read();
        if self.still.load(SeqCst) {
            return Left::Pending;
        }
        let Some(block) = self.space.block(unit_start) else { return Left::Some };
        let mut block = block.lock();
        let block_start = unit_start & !(BLOCK - 1);
        let first = (unit_start - block_start) / PAGE;
        // A caller in a hurry (a fault) takes small ones; huge blocks wait for an evictor.
        let passes = want < MOST;
        let Some(mut leave) = self.chosen(out.placed_only, passes, &mut block, block_start, first) else {
            return Left::Some;
        };
        if block.huge {
            if passes {
                if !self.huge_due.swap(true, Relaxed) {
                    self.kick();
                }
                return Left::Passed;
            }
            if self.leave_huge(out, &mut block, block_start, first) {
                return Left::Some;
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
                    self.note_part(&leaving);
                    let mut policy = self.policy.lock();
                    (1..units).for_each(|unit| policy.keep(Turn::new(leaving.number(unit), false)));
                    return stopped;
                }
            }
        }
        // Of each, whatever was found of another.
        let mut is_shared = false;
        for unit in 0..units {
            is_shared |= self.have_left(out, &leaving, unit, busy_before);
        }
        if is_shared {
            Left::Shared
        } else {
            Left::Some
        }
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
            let Some(pages) = self.chosen(out.placed_only, false, block, block_start, next) else { break };
            leave |= (pages as u64) << (units * UNIT_PAGES);
            units += 1;
        }
        (units, leave)
    }

    /// Which of its pages leave now that it is a unit's turn; none: it stays, or there is nothing.
    /// `passes`: what is huge is not looked at now.
    fn chosen(
        &self,
        placed_only: bool,
        passes: bool,
        block: &mut BlockState,
        block_start: usize,
        first: usize,
    ) -> Option<u16> {
        let unit_start = block_start + first * PAGE;
        let unit = block.unit_mut(first)?;
        if unit.resident() == 0 {
            unit.usage.queued = false;
            return None;
        }
        block.unpark(first);
        let (huge, is_held) = (block.huge, block.is_held(first));
        let is_pinned = self.is_pinned(unit_start);
        if huge && (is_pinned || is_held && self.kernel.refuses_pinned()) {
            // The others of its block can leave. (What is held may be pinned by a device.)
            block.became_split();
            self.requeue_units(block, block_start);
        }
        let looked_at = match (block.huge, passes) {
            (false, _) => UNIT_PAGES,
            (true, false) => BLOCK_PAGES,
            (true, true) => 0,
        };
        Stats::add(&self.stats.pgscan, looked_at as u64);
        if is_pinned {
            block.park(first, false);
            self.policy.lock().park(Turn::new((unit_start / UNIT) as u32, false));
            return None;
        }
        // Of what was a huge page this unit, maybe, is not.
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

    /// Notes in a unit which of its pages have left.
    fn note(&self, unit: &mut Unit, moved: u16) {
        if moved != 0 {
            unit.usage.left = moved & !unit.resident();
            unit.usage.evicted_at = self.evictions.fetch_add(1, Relaxed).max(1);
        }
    }

    /// The same in each of its units, as far as they have left before something stopped them.
    fn note_part(&self, leaving: &Leaving) {
        let Some(block) = self.space.block(leaving.block_start) else { return };
        let mut block = block.lock();
        for place in 0..leaving.units {
            if let Some(unit) = block.unit_mut(leaving.first + place * UNIT_PAGES) {
                self.note(unit, Leaving::of(leaving.moved, place));
            }
        }
    }

    /// Says in a unit what has left of it, and queues it again if something stayed: is that [`Left::Shared`]?
    fn have_left(&self, out: &mut Outgoing, leaving: &Leaving, place: usize, busy_before: usize) -> bool {
        let first = leaving.first + place * UNIT_PAGES;
        let unit_start = leaving.block_start + first * PAGE;
        let (leave, moved) = (Leaving::of(leaving.leave, place), Leaving::of(leaving.moved, place));
        let number = leaving.number(place);
        let Some(block) = self.space.block(unit_start) else { return false };
        let mut block = block.lock();
        let huge = block.huge;
        let is_held = block.is_held(first);
        let Some(unit) = block.unit_mut(first) else { return false };
        let shared =
            !leaving.unshared && out.busy[busy_before..].iter().any(|page| page / UNIT == number as usize);
        unit.usage.unshared = false;
        if leaving.unshared {
            // What is busy still is pinned.
            out.busy.truncate(busy_before);
        }
        self.note(unit, moved);
        match unit.resident() {
            // As when its turn comes.
            stay if is_held || stay == 0 => unit.usage.queued = false,
            _ if shared => {
                self.policy.lock().pass(Turn::new(number, huge));
                return true;
            }
            // Pinned, read-only or locked.
            stay if stay & !(leave & !moved) == 0 && !huge => {
                block.park(first, false);
                self.policy.lock().park(Turn::new(number, false))
            }
            // Some are hot, or are back.
            _ => self.policy.lock().keep(Turn::new(number, huge)),
        }
        false
    }

    /// Must a unit stay?
    fn is_pinned(&self, unit_start: usize) -> bool {
        self.config.pins.is_some_and(|pins| pins.is_pinned(unit_start))
    }

    /// Moves the next neighbours of those pages that are to leave, as far as they are there and may.
    fn leave_run(&self, out: &mut Outgoing, leaving: &mut Leaving) -> Left {
        let Leaving { block_start, first, leave, .. } = *leaving;
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
            Memory::AtHand => self.take_timed(to, from, run),
            Memory::Asked => self.kernel.take_pages(to, from, run * PAGE),
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
        leaving.index = index + done;
        match moved {
            Ok(()) => Left::Some,
            Err(Partial { errno: Errno::AGAIN, .. }) if done > 0 => Left::Some,
            Err(Partial { errno: Errno::AGAIN, .. }) => Left::Pending,
            // Or no such mapping: then it is on its way elsewhere, and its pages with it.
            Err(Partial { errno: Errno::NOENT, .. }) if self.kernel.event_pending() => Left::Pending,
            Err(Partial { errno: Errno::EXIST, .. })
                if self.empty_touched(self.frames.address(frame) + done * PAGE, PAGE) =>
            {
                Left::Some
            }
            Err(partial) => {
                self.was_refused(out, leaving, &mut block, (done, run), partial.errno);
                Left::Some
            }
        }
    }

    /// After `done` of `run` pages a MOVE was refused at the index: what to do about that page, or with what is left of the
    /// run.
    fn was_refused(
        &self,
        out: &mut Outgoing,
        leaving: &mut Leaving,
        block: &mut BlockState,
        (done, run): (usize, usize),
        errno: Errno,
    ) {
        let index = leaving.index;
        match errno {
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
                let busy = if leaving.unshared { 1 } else { (run - done).min(unit_end(index) - index) };
                (0..busy).for_each(|page| out.was_busy(leaving.block_start + (index + page) * PAGE));
                leaving.index += busy;
            }
            // Another access than the frames have.
            Errno::INVAL if self.frames.has_executable() && leaving.refused != Some(index) => {
                leaving.refused = Some(index);
                leaving.executable = !leaving.executable;
            }
            _ if done == 0 && index + run > unit_end(index) => {
                (leaving.apart, leaving.refused) = (true, None);
            }
            _ if done == 0 && run > 1 => {
                let part = run.next_power_of_two() / 2;
                leaving.parts = (leaving.parts.0.max(index + run), part);
                leaving.refused = None;
            }
            // Read-only, locked: stays.
            _ => {
                self.unlock_for_refused();
                leaving.index += 1;
            }
        }
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

    /// Moves a block that is mapped huge in one piece, if it can be now. `false`: it is not huge (any more), or a part of it must
    /// stay: small pages, then.
    fn leave_huge(
        &self,
        out: &mut Outgoing,
        block: &mut BlockState,
        block_start: usize,
        first: usize,
    ) -> bool {
        let turn = Turn::new(((block_start + first * PAGE) / UNIT) as u32, true);
        let stays = (0..BLOCK_PAGES).step_by(UNIT_PAGES).any(|index| {
            out.placed_only && block.placed(index) != u16::MAX || self.is_pinned(block_start + index * PAGE)
        });
        if stays || !self.is_one_page(block_start) || !block.all(0, BLOCK_PAGES, Tag::Resident) {
            block.became_split();
            self.requeue_units(block, block_start);
            return false;
        }
        let Some(huge) = self.frames.take_huge_hole() else {
            self.policy.lock().keep(turn);
            return true;
        };
        let moved = self.kernel.take_pages(self.frames.huge_address(huge), block_start, BLOCK);
        let done = moved.map_or_else(|partial| partial.done / PAGE, |()| BLOCK_PAGES);
        if let (0, Err(partial)) = (done, moved) {
            if partial.errno == Errno::EXIST {
                self.empty_touched(self.frames.huge_address(huge), BLOCK);
            }
            self.frames.huge_emptied(huge);
            if partial.errno == Errno::INVAL && self.frames.has_executable() {
                // It can be executed, maybe: then it goes by small pages, and never comes back as a huge one.
                block.splits = 2;
                block.became_split();
                self.requeue_units(block, block_start);
                return false;
            }
            let unit = block.unit_mut(first).expect("unit of a queued page");
            let was_unshared = core::mem::take(&mut unit.usage.unshared);
            let parks = match partial.errno {
                // An unread event stops the others that are looked at, too.
                Errno::AGAIN | Errno::NOENT | Errno::EXIST => false,
                // Shared since a fork, then it is small pages once it is the process's own; or pinned.
                Errno::BUSY if !was_unshared => {
                    out.was_busy(block_start + first * PAGE);
                    false
                }
                // Pinned, read-only or locked.
                _ => {
                    self.unlock_for_refused();
                    true
                }
            };
            if parks {
                block.park(first, true);
                self.policy.lock().park(turn);
            } else {
                self.policy.lock().keep(turn);
            }
            return true;
        }
        let whole = done == BLOCK_PAGES && self.is_one_page(self.frames.huge_address(huge));
        block.became_split();
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
        true
    }

    /// Queues every unit of a block that was queued by another one, since the block is not huge any more.
    pub(crate) fn requeue_units(&self, block: &mut BlockState, block_start: usize) {
        for index in (0..BLOCK_PAGES).step_by(UNIT_PAGES) {
            if block.unit(index).is_some_and(|unit| unit.resident() != 0 && !unit.usage.queued) {
                self.is_here(block, block_start, index..index + UNIT_PAGES);
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
}
