//! Zeros for a fault in new memory: new while there is room below the limit, then frames that somebody else left.

use crate::engine::{Engine, Swapin};
use crate::frame::{Parts, CHUNK};
use crate::kernel::{Kernel, Partial};
use crate::page::Tag;
use crate::slot::Memory;
use crate::space::{BlockState, BLOCK, BLOCK_PAGES, PAGE, UNIT_PAGES};
use crate::stats::Stats;
use crate::swap::swapin::Brought;
use crate::sync::atomic::Ordering::Relaxed;
use core::ops::Range;
use rustix::io::Errno;

/// Where the kernel had no huge page so often in a row, it is asked again after so long (ns).
const IN_VAIN: u32 = 4;
const ASKED_AGAIN: u64 = 100_000_000;

/// Where zeros for a fault come from.
#[expect(
    clippy::large_enum_variant,
    reason = "lives on the stack of one call; the fault path allocates nothing"
)]
enum Zeros {
    /// New memory for `n` pages, `left` of which nothing is mapped for yet.
    New { n: usize, left: usize },
    /// Filled frames; so many have been moved away.
    Frames { parts: Parts, used: usize },
}

impl Zeros {
    /// For so many pages.
    fn count(&self) -> usize {
        match self {
            Zeros::New { n, .. } => *n,
            Zeros::Frames { parts, .. } => parts.count(),
        }
    }
}

impl<K: Kernel> Engine<K> {
    /// Maps zeros on pages `low..high` of a block, which hold nothing; at least on `index`. `whole`: not small pages
    /// where a huge one would do. `None`: tables would be needed for which no memory is at hand.
    pub(super) fn fill(
        &self,
        block_start: usize,
        index: usize,
        (low, high): (usize, usize),
        whole: bool,
        since: Option<u32>,
        memory: Memory,
    ) -> Option<Brought> {
        let n = high - low;
        if n == BLOCK_PAGES && self.config.huge && self.config.swapin != Swapin::Never {
            match self.fill_huge(block_start, memory) {
                Some(Brought::NoHuge) if !whole => {}
                Some(done) => return Some(done),
                None => {}
            }
        }
        let Some(mut source) = self.source_of_zeros(n, whole) else { return Some(Brought::NoFrame) };
        let brought = self.fill_from(&mut source, block_start, index, low, since, memory);
        match source {
            Zeros::New { left, .. } => self.budget.add(left),
            Zeros::Frames { parts, used } => {
                (used..parts.count()).for_each(|i| self.frames.give_back(parts.locate(i).0));
            }
        }
        brought
    }

    /// As many as there are, from `low` on or nearer to `index`.
    fn fill_from(
        &self,
        source: &mut Zeros,
        block_start: usize,
        index: usize,
        low: usize,
        since: Option<u32>,
        memory: Memory,
    ) -> Option<Brought> {
        let n = source.count();
        let low = if low + n > index { low } else { index + 1 - n };
        let regions = self.events.read();
        // It was there when this was decided, and none goes.
        let mut block = self.space.block_or_new(block_start).lock();
        let mut brought = Some(Brought::Done(low + n));
        // Not beyond the region: what was looked at without this lock may be somebody else's by now.
        let (first, end) = self.bounds(&regions, block_start, index, since).unwrap_or_else(|| {
            self.kernel.wake(block_start + index * PAGE, PAGE);
            (index, index)
        });
        let mut end = end.min(low + n);
        let mut at = low.max(first);
        let asked = Some(block_start + index * PAGE);
        if !self.has_units(&mut block, at..end, memory) {
            (end, brought) = (at, None);
        }
        while at < end {
            if !matches!(block.word(at).tag(), Tag::None | Tag::Zero | Tag::Resident) {
                // It changed since it was looked at; whoever waits looks again.
                self.kernel.wake(block_start + at * PAGE, PAGE);
                at += 1;
                continue;
            }
            let nothing = |at: &usize| matches!(block.word(*at).tag(), Tag::None | Tag::Zero);
            let run = 1 + (at + 1..end).take_while(nothing).count();
            let (done, errno) = self.map_zeros(source, block_start + at * PAGE, run, asked);
            (at..at + done).for_each(|index| self.filled(&mut block, index));
            if done > 0 {
                self.used(&mut block, block_start, at..at + done, n <= UNIT_PAGES);
            }
            at += done;
            match errno {
                None => {}
                Some(Errno::AGAIN) if done > 0 => {}
                Some(Errno::AGAIN) => {
                    brought = Some(if index >= at { Brought::Pending } else { Brought::Done(at) });
                    break;
                }
                // Mapped already, or not to be mapped: the program takes its fault again.
                Some(_) => {
                    self.kernel.wake(block_start + at * PAGE, PAGE);
                    at += 1;
                }
            }
        }
        brought
    }

    /// Zeros for up to `n` pages: new memory while there is room below the limit; after that, what somebody else left.
    fn source_of_zeros(&self, n: usize, whole: bool) -> Option<Zeros> {
        if self.take_room(n) {
            return Some(Zeros::New { n, left: n });
        }
        let parts = self.take_frames(n, whole)?;
        for part in parts.iter() {
            let at = self.frames.address(part.frame) as *mut u8;
            // SAFETY: the frames were taken: filled, and nobody else's.
            unsafe { core::ptr::write_bytes(at, 0, part.count as usize * PAGE) };
        }
        Some(Zeros::Frames { parts, used: 0 })
    }

    /// Maps zeros on up to `run` pages: how many, and what stopped it.
    fn map_zeros(
        &self,
        source: &mut Zeros,
        to: usize,
        run: usize,
        asked: Option<usize>,
    ) -> (usize, Option<Errno>) {
        match source {
            Zeros::New { left, .. } => {
                let run = run.min(CHUNK);
                let (done, errno) = match self.copy(to, self.config.zeros, run, asked) {
                    Ok(()) => (run, None),
                    // The kernel has woken who waited for those that are done.
                    Err(partial) => (partial.done / PAGE, Some(partial.errno)),
                };
                *left -= done;
                (done, errno)
            }
            Zeros::Frames { parts, used } => {
                let (frame, there) = parts.locate(*used);
                let run = run.min(there).min(CHUNK - frame as usize % CHUNK);
                let (done, moved, errno) = self.map(to, self.frames.address(frame), run, asked);
                if moved && done > 0 {
                    self.frames.emptied(frame, done);
                    *used += done;
                }
                (done, errno)
            }
        }
    }

    /// Is there a unit for each of these pages, or memory for it?
    fn has_units(&self, block: &mut BlockState, pages: Range<usize>, memory: Memory) -> bool {
        let mut units = pages.start / UNIT_PAGES..pages.end.div_ceil(UNIT_PAGES);
        units.all(|unit| block.unit_by(unit * UNIT_PAGES, &self.space.spares, memory).is_some())
    }

    /// A page, which has its unit, is mapped now and holds zeros.
    fn filled(&self, block: &mut BlockState, index: usize) {
        let word = block.word(index);
        Stats::add(&self.stats.swpin_zero, (word.tag() == Tag::Zero) as u64);
        if word.tag() == Tag::Resident {
            Stats::add(&self.stats.discarded_unseen, 1);
            // What its slot holds is from before it came in: neither what was lost nor the zeros asked for.
            if word.payload() != 0 {
                self.place.put(word.payload(), 1);
            }
        }
        block.set_sum(index, 0);
        block.set(index, word.fill());
    }

    /// A whole block of zeros by one huge page. `None`: it would be split, or there is something in the block.
    fn fill_huge(&self, block_start: usize, memory: Memory) -> Option<Brought> {
        if !self.comes_whole(&self.space.block_or_new(block_start).lock()) {
            return None;
        }
        let huge = match self.take_huge() {
            Some(huge) => {
                // SAFETY: a filled frame that was taken.
                unsafe { core::ptr::write_bytes(self.frames.huge_address(huge) as *mut u8, 0, BLOCK) };
                huge
            }
            None => match self.new_huge() {
                Some(huge) => huge,
                None => return Some(Brought::NoHuge),
            },
        };
        let regions = self.events.read();
        let mut block = self.space.block_or_new(block_start).lock();
        let empty = block.resident == 0
            && !block.table
            && (0..BLOCK_PAGES).all(|at| matches!(block.word(at).tag(), Tag::None | Tag::Zero))
            && self.has_units(&mut block, 0..BLOCK_PAGES, memory);
        let moved = if empty {
            self.kernel.move_pages(block_start, self.frames.huge_address(huge), BLOCK, true)
        } else {
            Err(Partial { done: 0, errno: Errno::EXIST })
        };
        let done = moved.map_or_else(|partial| partial.done / PAGE, |()| BLOCK_PAGES);
        (0..done).for_each(|index| self.filled(&mut block, index));
        if done == BLOCK_PAGES && self.came_whole(&mut block, block_start) {
            self.frames.huge_emptied(huge);
            self.used(&mut block, block_start, 0..UNIT_PAGES, false);
            return Some(Brought::Done(BLOCK_PAGES));
        }
        self.used(&mut block, block_start, 0..done, false);
        drop(block);
        drop(regions);
        if done == 0 {
            self.frames.huge_filled(huge);
        } else {
            self.kernel.wake(block_start, done * PAGE);
            self.give_up_huge(huge, BLOCK_PAGES - done);
        }
        match moved {
            Ok(()) => Some(Brought::Done(BLOCK_PAGES)),
            Err(Partial { errno: Errno::INVAL, .. }) => {
                self.unlock_for_refused();
                None
            }
            Err(partial) if done > 0 || partial.errno == Errno::AGAIN => Some(Brought::Pending),
            Err(_) => None,
        }
    }

    /// A filled huge frame, if there is one; whoever takes it sees to it that more follow.
    pub(crate) fn take_huge(&self) -> Option<u32> {
        let huge = self.frames.take_huge();
        if huge.is_none() {
            self.huge_wanted.store(true, Relaxed);
        }
        if huge.is_none() || self.room() < self.high_pages() as i64 / 2 {
            self.kick();
        }
        huge
    }

    /// May the kernel have a huge page? Where there are none (its memory is in pieces, or the program has said
    /// PR_SET_THP_DISABLE) it is not asked for each block.
    pub(crate) fn may_have_huge(&self) -> bool {
        self.kernel.now() >= self.huge_after.load(Relaxed)
    }

    /// A new huge frame of zeros, if there is room below the limit.
    pub(crate) fn new_huge(&self) -> Option<u32> {
        if !self.may_have_huge() || !self.take_room(BLOCK_PAGES) {
            return None;
        }
        let made = self.frames.take_huge_hole().filter(|huge| {
            let made = self.kernel.make_huge(self.frames.huge_address(*huge)).is_ok();
            if made {
                self.huge_failed.store(0, Relaxed);
            } else {
                if self.huge_failed.fetch_add(1, Relaxed) + 1 >= IN_VAIN {
                    self.huge_after.store(self.kernel.now() + ASKED_AGAIN, Relaxed);
                }
                self.frames.huge_emptied(*huge);
            }
            made
        });
        if made.is_none() {
            self.budget.add(BLOCK_PAGES);
        }
        made
    }
}
