//! Keeping to the limit: evictors that work ahead, faults that help themselves when they must.
//!
//! Resident memory is the program's pages, what cannot go, and the filled frames. A fault that takes a
//! filled frame leaves the sum as it is; an eviction fills a frame and leaves it as it is too. So:
//!
//! - `budget` > 0: there is room below the limit, and faults take new memory from the kernel;
//! - `budget` about 0: faults take filled frames; evictors keep some of them ready;
//! - `budget` < 0: evictors give filled frames back to the kernel until it is 0 again.
//!
//! The budget is corrected by looking at the kernel's own count ([`Engine::measure`]).

pub(crate) mod ahead;
pub mod budget;
pub mod files;
mod hold;
pub mod policy;

pub use hold::HOLDS_MAX;

use crate::engine::{Engine, Swapin};
use crate::frame::{Part, CHUNK};
use crate::kernel::Kernel;
use crate::space::{BLOCK, BLOCK_PAGES, PAGE, UNIT_PAGES};
use crate::stats::Stats;
use crate::swap::swapout::{Outgoing, MOST};
use crate::sync::atomic::Ordering::{Relaxed, SeqCst};
use crate::sync::Backoff;
use budget::Mark;
use rustix::io::Errno;

/// Pages by which the kernel's count of resident memory may be off: it adds up what each CPU has noted (64 a CPU).
const COUNT_ERROR: i64 = 128;

/// So often a fault that lacks memory to let pages leave with looks whether an evictor has made some (about 1 ms), before it goes
/// over the limit.
const UNSTOCKED: u32 = 90;

/// Times that a fault lets pages leave for a huge frame before it takes small ones.
const HUGE_TRIES: usize = 3;

/// Fewer pages than this are few for a round of an evictor that looks for those that have their place.
const FEW: usize = MOST / 8;
/// Then it rests for so long (ns), and as long again for as many pages more.
const REST: u64 = 10_000_000;

/// To make a block huge takes longer than this (ns) where the kernel's workers wait for a CPU: MADV_COLLAPSE waits for those of
/// all CPUs, under the lock of the program's mappings. Then none is for so many times as long.
const SLOW_MEND: u64 = 50_000_000;
const MEND_SHARE: u64 = 100;

/// How often (ns) frames are unlocked because MOVE refuses a page.
const UNLOCK_EVERY: u64 = 100_000_000;

/// What one round of an evictor found to do.
#[derive(Debug, PartialEq, Eq, Clone, Copy)]
pub enum Round {
    /// All is as it should be.
    Idle,
    /// Something was done; look again.
    Worked,
    /// Something should go and cannot before an event is read, by somebody else: sleep, for he may need the processor.
    Pending,
    /// Something should go and nothing can.
    Stuck,
}

impl Round {
    /// How long (ns) the evictor sleeps after it, unless it is called; none: it goes on.
    pub fn nap_ns(self) -> Option<u64> {
        match self {
            Round::Worked => None,
            Round::Idle => Some(1_000_000_000),
            Round::Pending => Some(50_000),
            Round::Stuck => Some(10_000_000),
        }
    }
}

impl<K: Kernel> Engine<K> {
    /// Corrects the budget by the kernel's count. Returns resident pages.
    pub fn measure(&self) -> usize {
        let mark = self.budget.mark();
        let resident = self.kernel.resident_pages();
        self.measured(resident, mark);
        resident
    }

    /// The same for who has read the kernel's count since the mark.
    pub fn measured(&self, resident: usize, mark: Mark) {
        let resident = resident as i64;
        let stuck = self.stuck_pages.load(Relaxed);
        // What is to be tried again has to go, or nobody would try: just that, for what else is there may be in use.
        let untried = match stuck > self.limit() {
            true => (self.policy.lock().untried() * UNIT_PAGES) as i64,
            false => 0,
        };
        let floor = if untried > 0 { stuck.min(resident) - untried } else { stuck };
        self.tries_again.store(untried > 0, Relaxed);
        self.floor_pages.store(floor, Relaxed);
        self.budget.set(self.limit().max(floor) - resident, mark);
        let bytes = resident as u64 * PAGE as u64;
        Stats::set(&self.stats.resident_bytes, bytes);
        self.stats.resident_peak_bytes.fetch_max(bytes, Relaxed);
        Stats::set(&self.stats.swapped_pages, self.place.own());
        for (device, pages) in self.stats.device_pages.iter().enumerate() {
            Stats::set(pages, self.place.used(device));
        }
    }

    /// What the program has given up since it was counted is room again: asks the kernel how much there is. The event alone tells
    /// too little: the pages go after it was read. True: there is more. Where the kernel counts at once.
    pub(crate) fn credit(&self) -> bool {
        if self.given_up.load(Relaxed) < CHUNK || !self.kernel.counts_at_once() {
            return false;
        }
        let pages = self.given_up.swap(0, Relaxed) as i64;
        let before = self.budget.get();
        self.measure();
        let more = self.budget.get() - before;
        // Not all has gone yet, or something else has come: the rest is asked for a few times more.
        self.given_up.fetch_add((pages - more).max(0) as usize / 2, Relaxed);
        more > 0
    }

    /// Takes room below the limit for so many pages, all or none.
    pub(crate) fn take_room(&self, pages: usize) -> bool {
        self.budget.take(pages) || self.credit() && self.budget.take(pages)
    }

    /// Another limit, in pages, from the next look on.
    pub fn set_limit(&self, pages: usize) {
        self.limit_pages.store(pages as i64, Relaxed);
    }

    /// Resident pages that the process may have, its frames included.
    pub(crate) fn limit(&self) -> i64 {
        self.limit_pages.load(Relaxed)
    }

    /// Nothing more can come in unless something leaves.
    pub fn is_full(&self) -> bool {
        self.budget.get() < self.high_pages() as i64
    }

    /// Evictors stop at so many filled frames; they begin at half of it.
    pub(crate) fn high_pages(&self) -> usize {
        self.ahead.pages(self.much())
    }

    /// The most of it; so many pages over the limit are many.
    pub(crate) fn much(&self) -> usize {
        (self.limit() as usize / 32).clamp(64, 4096)
    }

    /// Is much over the limit? What comes ready goes back at once then, and nothing is begun that can wait.
    pub(crate) fn is_far_over(&self) -> bool {
        self.budget.get() < -(self.much() as i64)
    }

    /// A fault waits until something has left.
    fn stalls(&self) {
        Stats::add(&self.stats.allocstall, 1);
        self.ran_short();
    }

    /// More filled frames could have been used than were ready.
    pub(crate) fn ran_short(&self) {
        self.ahead.ran_short(self.kernel.now(), self.much());
    }

    /// At least so many pages may be resident from the next look on, whatever the limit. For a process of which more
    /// cannot go than its limit has: all the rest would leave again as soon as it comes in. But for those that are to be tried
    /// again.
    pub fn give_way(&self, pages: usize) {
        self.stuck_pages.store(pages as i64, Relaxed);
    }

    /// From here on no page leaves, by whoever's hand, until it is called with `false`. Pages that left before
    /// may still be on their way to a device. Memory may grow beyond the limit meanwhile. No lock held.
    pub fn stand_still(&self, still: bool) {
        self.still.store(still, SeqCst);
        self.settled();
    }

    /// Has [`Engine::stand_still`] been called with `true`?
    pub fn stands_still(&self) -> bool {
        self.still.load(SeqCst)
    }

    /// Returns when every decision to let a unit leave that was taken before the call has been carried out:
    /// later ones see what the caller did before, a pin or a standstill. No lock held.
    pub fn settled(&self) {
        drop(self.events.write());
    }

    /// Did something come back a moment ago because it found no place, and has none come free since? Then what has none is not
    /// tried for a while; what has one, only by an evictor, or far over the limit.
    pub(crate) fn is_stuck(&self) -> bool {
        self.kernel.now() < self.stuck_until.load(Relaxed) && !self.place.has_some()
    }

    /// Does what is in use give up its place when it comes in, since others find none? Not where those that have one are few: it
    /// is far beyond the limit with them or without.
    pub(crate) fn gives_up(&self) -> bool {
        self.place.is_full() && !self.few_have_places(self.budget.get())
    }

    /// Are the pages that have a place few, of what is there?
    fn few_have_places(&self, budget: i64) -> bool {
        let resident = self.limit().max(self.floor_pages.load(Relaxed)) - budget;
        (self.place.swapped() as i64) < resident / 8
    }

    /// Is there work for an evictor?
    pub fn pressed(&self) -> bool {
        let budget = self.budget.get();
        !self.is_helped(budget) && (budget < 0 || self.room() < self.high_pages() as i64 / 2)
    }

    /// Servers make room themselves, and are not disturbed for the error of the kernel's own count.
    fn is_helped(&self, budget: i64) -> bool {
        // Regions are counted exactly, and there is more to give back.
        let error = match self.is_crowded_inline() {
            true => COUNT_ERROR.min(self.much() as i64 / 8),
            false => COUNT_ERROR,
        };
        self.helps_itself.load(Relaxed) && budget >= -error
    }

    /// Pages that faults can take without waiting: below the limit, or in filled frames.
    pub(crate) fn room(&self) -> i64 {
        self.budget.get().max(0) + self.ready_pages() as i64
    }

    /// Of `resident` pages, those that cannot go: not managed, or tried in vain not long ago. A walk over all
    /// blocks; no lock held.
    pub fn unmanaged(&self, resident: usize) -> usize {
        let (known, parked) = self.space.resident();
        Stats::set(&self.stats.out_pages, self.space.out() as u64);
        resident.saturating_sub(known - parked + self.ready_pages())
    }

    fn ready_pages(&self) -> usize {
        self.frames.ready_pages() + self.frames.huge_ready() * BLOCK_PAGES
    }

    /// One round of an evictor: frees what must go, or fills frames ahead. No lock held.
    pub fn balance(&self, out: &mut Outgoing) -> Round {
        self.ahead.look(self.kernel.now());
        // Faults that make room themselves may have used it up.
        self.place.refill();
        // It may wait for other CPUs: MADV_COLLAPSE drains their lists of pages.
        if !self.is_far_over() {
            self.mend();
        }
        if self.budget.get() < self.high_pages() as i64 {
            self.credit();
        }
        let budget = self.budget.get();
        let ready = self.ready_pages();
        let due = self.huge_due.swap(false, Relaxed);
        let helped = self.is_helped(budget) && !due;
        if helped || budget >= 0 && budget as usize + ready >= self.high_pages() {
            return if self.convert(budget) { Round::Worked } else { Round::Idle };
        }
        if budget < 0 && ready > self.high_pages() && self.drop_ready((-budget) as usize) > 0 {
            return Round::Worked;
        }
        let stuck = self.is_stuck();
        // Each fault calls.
        if stuck && self.kernel.now() < self.rest_until.load(Relaxed) {
            return Round::Stuck;
        }
        let tries = self.tries_again.load(Relaxed);
        let evicted = self.evict(out, MOST);
        if tries {
            // What was tried in vain does not have to go any more.
            self.measure();
            if !self.tries_again.load(Relaxed) {
                return Round::Worked;
            }
        }
        if stuck {
            self.rest(evicted, budget);
        }
        let budget = self.budget.get();
        if budget < 0 {
            let dropped = self.drop_ready((-budget) as usize);
            if evicted + dropped == 0 {
                return Round::Stuck;
            }
        }
        if evicted == 0 {
            return if self.kernel.event_pending() { Round::Pending } else { Round::Stuck };
        }
        Round::Worked
    }

    /// A round of an evictor found so many pages that have their place, while nothing else finds one. Where these are few
    /// whoever faults would wait for the processor while they are looked for. Where all that have one are few, of what is
    /// there, they leave slowly: it is far beyond the limit with them or without, and what it uses would come back at once.
    fn rest(&self, evicted: usize, budget: i64) {
        if evicted < FEW || self.few_have_places(budget) {
            let rest = REST * (1 + evicted / FEW) as u64;
            self.rest_until.store(self.kernel.now() + rest, Relaxed);
        }
    }

    /// Makes the block that a stream went through last a huge page again, so that it leaves and comes back whole: its
    /// page table goes with the small pages. Once for each block; a copy of 2 MiB.
    fn mend(&self) {
        let start = self.mend.swap(0, Relaxed);
        let begun = self.kernel.now();
        // Of a part of it that has its place nothing more could leave by itself.
        let may = !self.stands_still() && !self.is_stuck() && begun >= self.mend_after.load(Relaxed);
        if start == 0 || !may {
            return;
        }
        let done = self.kernel.collapse(start);
        let took = self.kernel.now() - begun;
        if took > SLOW_MEND {
            self.mend_after.store(begun + took * MEND_SHARE, Relaxed);
        }
        if done.is_err() {
            return;
        }
        Stats::add(&self.stats.thp_collapse_alloc, 1);
        if self.config.swapin != Swapin::Madvise {
            self.kernel.prefer_huge(start);
        }
        let _regions = self.events.read();
        let Some(block) = self.space.block(start) else { return };
        let mut block = block.lock();
        if block.resident as usize == BLOCK_PAGES && self.is_one_page(start) {
            block.became_whole();
        }
    }

    /// Turns filled frames of the size that nobody asks for into the other. Both ways the memory goes back to
    /// the kernel first: the limit holds.
    fn convert(&self, budget: i64) -> bool {
        if self.huge_wanted.swap(false, Relaxed) && self.frames.huge_ready() < 2 && self.may_have_huge() {
            let short = BLOCK_PAGES as i64 - budget;
            if short > 0 && self.drop_small(short as usize) < short as usize {
                return false;
            }
            return match self.new_huge() {
                Some(huge) => {
                    self.frames.huge_filled(huge);
                    true
                }
                None => false,
            };
        }
        let small = self.frames.ready_pages() + budget.max(0) as usize;
        small < self.high_pages() / 4 && self.small_wanted.swap(false, Relaxed) && self.drop_huge(1) > 0
    }

    /// A whole block can come in, and there is no huge frame: lets a huge page leave, which leaves one. If small ones
    /// leave instead, their memory makes one. `false`: none can be had. No lock held.
    pub(crate) fn make_huge_frame(&self, out: &mut Outgoing) -> bool {
        self.stalls();
        let made = |huge: u32| self.frames.huge_filled(huge);
        for _ in 0..HUGE_TRIES {
            let may = self.may_have_huge();
            let short = (BLOCK_PAGES as i64 - self.budget.get()).max(0) as usize;
            if may && short <= self.frames.ready_pages() {
                self.drop_small(short);
            }
            if self.frames.huge_ready() > 0 || self.new_huge().map(made).is_some() {
                return true;
            }
            // Small frames will do, and there is room for those.
            let has_room = !may && short == 0;
            if has_room || self.is_stuck() || self.evict_directly(out, MOST) == 0 || !may {
                break;
            }
        }
        self.frames.huge_ready() > 0
    }

    /// What is ready goes back to the kernel: as much room is left as before, which others may need more. For who has not been
    /// asked for long. No lock held.
    pub fn shed(&self) {
        self.drop_ready(usize::MAX);
    }

    /// Gives about `pages` of filled frames back to the kernel, whole chunks first. Faults will do without them: that is for the caller
    /// to weigh.
    fn drop_ready(&self, pages: usize) -> usize {
        let dropped = self.drop_small(pages);
        dropped + self.drop_huge(pages.saturating_sub(dropped))
    }

    pub(crate) fn drop_small(&self, pages: usize) -> usize {
        let mut dropped = 0;
        while dropped < pages && self.frames.ready_pages() >= CHUNK {
            let Some(first) = self.frames.take_ready_chunk() else { break };
            if !self.drop_chunk(first) {
                self.frames.filled(first, CHUNK);
                break;
            }
            dropped += CHUNK;
        }
        dropped
    }

    /// Gives the memory of a filled chunk, which is the caller's, back to the kernel. `false`: it stays filled, and the
    /// caller's. No lock held.
    pub(crate) fn drop_chunk(&self, first: u32) -> bool {
        let _regions = self.events.read();
        let dropped = self.drop_frames(self.frames.address(first), CHUNK * PAGE).is_ok();
        if dropped {
            self.frames.dropped(first);
            self.budget.add(CHUNK);
        }
        dropped
    }

    /// Gives the memory of frames that went back unused to the kernel: where there is one in each chunk there is no hole for what
    /// is to leave. How many. No lock held.
    pub(crate) fn drop_loose(&self) -> usize {
        let loose = core::iter::from_fn(|| self.frames.take_loose());
        let dropped = loose.take_while(|frame| {
            let _regions = self.events.read();
            let dropped = self.drop_frames(self.frames.address(*frame), PAGE).is_ok();
            match dropped {
                true => {
                    self.frames.emptied(*frame, 1);
                    self.budget.add(1);
                }
                false => self.frames.give_back(*frame),
            }
            dropped
        });
        dropped.count()
    }

    /// As [`Engine::drop_chunk`], a chunk for what can be executed. `false`: it is tried again.
    pub(crate) fn drop_executable(&self, chunk: Part) -> bool {
        let _regions = self.events.read();
        let at = self.frames.address(chunk.frame);
        let filled = chunk.count as usize;
        if filled > 0 {
            // Some may be no memory ([`Engine::drop_zeros`]).
            let zeros = self.kernel.count_zeros(at, filled * PAGE);
            if self.drop_frames(at, CHUNK * PAGE).is_err() {
                self.frames.executable_left(chunk);
                return false;
            }
            self.budget.add(filled - zeros);
        }
        self.frames.executable_dropped(chunk.frame);
        true
    }

    pub(crate) fn drop_huge(&self, pages: usize) -> usize {
        let mut dropped = 0;
        while dropped < pages {
            let Some(huge) = self.frames.take_huge() else { break };
            if !self.drop_huge_frame(huge, BLOCK_PAGES) {
                self.frames.huge_filled(huge);
                break;
            }
            dropped += BLOCK_PAGES;
        }
        dropped
    }

    /// As [`Engine::drop_huge_frame`], of one that is filled in part. `false`: it is tried again.
    pub(crate) fn give_up_huge(&self, huge: u32, filled: usize) -> bool {
        let dropped = self.drop_huge_frame(huge, filled);
        if !dropped {
            self.frames.huge_left(huge, filled);
        }
        dropped
    }

    /// As [`Engine::drop_chunk`], a huge frame, of which `filled` pages are filled.
    pub(crate) fn drop_huge_frame(&self, huge: u32, filled: usize) -> bool {
        let _regions = self.events.read();
        let dropped = self.drop_frames(self.frames.huge_address(huge), BLOCK).is_ok();
        if dropped {
            self.frames.huge_emptied(huge);
            self.budget.add(filled);
        }
        dropped
    }

    /// Gives frames back to the kernel, if need be those that the program has locked (mlockall, past the agent).
    pub(crate) fn drop_frames(&self, at: usize, len: usize) -> Result<(), Errno> {
        self.kernel.drop_frames(at, len).or_else(|errno| match errno {
            Errno::INVAL => {
                self.unlock_frames();
                self.kernel.drop_frames(at, len)
            }
            _ => Err(errno),
        })
    }

    /// Nothing of the staging area is locked afterwards.
    pub(crate) fn unlock_frames(&self) {
        self.frames.places().for_each(|(start, len)| self.kernel.unlock(start, len));
    }

    /// MOVE refuses a page: it may be that the frames are locked, and it is not.
    pub(crate) fn unlock_for_refused(&self) {
        let now = self.kernel.now();
        if now >= self.unlock_after.load(Relaxed) {
            self.unlock_after.store(now + UNLOCK_EVERY, Relaxed);
            self.unlock_frames();
        }
    }

    /// A frame that should be a hole is not, because somebody else touched it: makes it one. False: it cannot be. Events lock
    /// held shared.
    pub(crate) fn empty_touched(&self, at: usize, len: usize) -> bool {
        // In inline delivery nobody hears of it; nor of who read by /proc/PID/mem while frames were dropped.
        assert!(
            self.touched.load(Relaxed) || self.is_inline() || self.kernel.holds_zeros(at, len),
            "a frame that should be a hole is not, {at:#x}"
        );
        self.drop_frames(at, len).is_ok()
    }

    /// A fault found too few filled frames: takes new memory if there is room, else lets a few pages leave (direct
    /// reclaim), else goes over the limit, since the program must go on. No lock held.
    pub(crate) fn make_frames(&self, out: &mut Outgoing) {
        let is_short = || self.budget.get() < CHUNK as i64;
        if is_short() {
            self.credit();
        }
        if is_short() {
            self.kick();
            self.small_wanted.store(true, Relaxed);
            self.stalls();
            let mut backoff = Backoff::new();
            for _ in 0..UNSTOCKED {
                if self.place.is_stocked() || self.frames.ready_pages() > 0 {
                    break;
                }
                backoff.snooze();
            }
            let stuck = self.is_stuck();
            // What has its place can go then; on a busy machine an evictor alone may be far behind.
            let helps = || self.is_far_over() && !self.few_have_places(self.budget.get());
            if !stuck || helps() {
                let left = self.evict_directly(out, 2 * CHUNK);
                if left > 0 {
                    // What was no memory has taken it along, back to the kernel: as much may come.
                    if out.gave_back && self.frames.ready_pages() == 0 {
                        self.grow_frames();
                    }
                    return;
                }
                // Nothing small can go. Huge frames that wait, or a huge page, give their memory first.
                if !stuck && self.frames.huge_ready() == 0 {
                    self.evict_directly(out, MOST);
                }
            }
            self.drop_huge(1);
        }
        self.grow_frames();
    }

    /// One more chunk of filled frames from the kernel. No lock held.
    pub(crate) fn grow_frames(&self) {
        let _regions = self.events.read();
        let Some((first, before)) = self.frames.take_holes() else { return };
        let (at, n) = (self.frames.address(first + before as u32), CHUNK - before);
        let filled = before
            + match self.kernel.copy(at, self.config.zeros, n * PAGE, false) {
                Ok(()) => n,
                Err(partial) => {
                    if partial.errno == Errno::EXIST {
                        self.empty_touched(at + partial.done, PAGE);
                    }
                    partial.done / PAGE
                }
            };
        self.budget.sub(filled - before);
        self.frames.filled(first, filled);
    }
}
