//! What a fork's child gets of what is out: the names of the slots, not the data.
//!
//! ```text
//! parent                                          child
//!   stands still, no page on its way out
//!   bequeath: each page that is out, its slot
//!     counted once more, into shared memory
//!   clone                                    ──►  registers the same areas, takes up what is mapped
//!   goes on                                       inherit: what is not mapped is where the parent had it
//! ```
//! From the first to the clone the parent holds the events lock: nothing comes in, no event is read. What others of its
//! threads discard meanwhile waits for its event until after the clone. What they unmap and move does not: so all that is
//! managed is marked first, and after the clone the child is told what changed ([`moved`](super::moved)).
//!
//! The child only reads the slots that it inherits. They stay as they are until the last who inherited from that
//! fork has gone; then the parent gives them up ([`Engine::disinherit`]).

use crate::engine::{Engine, Key};
use crate::kernel::{Kernel, Partial};
use crate::page::Tag;
use crate::slot::CLUSTER_SLOTS;
use crate::space::{Change, Region, Regions, BLOCK, BLOCK_PAGES, PAGE, TOP};
use crate::swap::moved::addresses;
use crate::swap::swapout::is_zero;
use crate::sync::atomic::{AtomicU32, Ordering::Relaxed};
use crate::sync::WriteGuard;
use alloc::vec::Vec;
use rustix::io::Errno;

/// The first page of a file that a bequest is written to. Behind it come what changed until the child was there, the
/// parent's areas, pairs of addresses, and the heirlooms, at a multiple of their size.
#[repr(C)]
#[derive(Debug)]
pub struct Bequest {
    /// Set by `run` when the last who inherited has gone.
    pub released: AtomicU32,
    /// How many areas.
    pub areas: u32,
    /// How many heirlooms.
    pub heirlooms: u64,
    /// What their checksums were made with.
    pub key: Key,
    /// Set by the child: the clone is through.
    pub born: AtomicU32,
    /// Set by the parent after the clone: one more than there are changes. More than [`MOST_CHANGES`]: there was no room.
    pub told: AtomicU32,
}

/// Bytes before the changes.
pub const CHANGES_AT: usize = 4096;
/// Room for so many.
pub const MOST_CHANGES: usize = 2048;
/// Bytes before the areas.
pub const AREAS_AT: usize = CHANGES_AT + MOST_CHANGES * size_of::<Change>();

/// Bytes before the heirlooms, behind so many areas.
pub fn heirlooms_at(areas: usize) -> usize {
    (AREAS_AT + areas * size_of::<[u64; 2]>()).next_multiple_of(size_of::<Heirloom>())
}

/// Times that what is managed is marked again, where mappings change without a pause.
const MOST_MARKS: usize = 10_000;

/// Times that something which must not be mapped is tried to be taken away.
const MOST_TRIES: usize = 1000;

/// One page that is out. Plain numbers: it crosses a process border.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Heirloom {
    /// The page's address.
    pub page: u64,
    /// The slot that holds it.
    pub entry: u64,
    /// Low and high half of the checksum of what it holds.
    pub sum: [u64; 2],
}

/// Slots that follow each other in one cluster.
#[derive(Debug, Clone, Copy)]
pub struct SlotRun {
    /// The first.
    pub entry: u64,
    /// How many; one at least.
    pub n: usize,
}

impl SlotRun {
    /// Is this the next?
    fn is_before(self, entry: u64) -> bool {
        entry == self.entry + self.n as u64 && entry % CLUSTER_SLOTS as u64 != 0
    }
}

/// The addresses that changes are about.
fn touched(changes: &[Change]) -> impl Iterator<Item = Region> + '_ {
    changes.iter().flat_map(|change| addresses(*change)).map(|(start, end)| Region { start, end })
}

impl<K: Kernel> Engine<K> {
    /// Pages that [`Engine::bequeath`] will name, more or less, but under the events lock. No block lock held.
    pub fn out_pages(&self) -> usize {
        self.space.count(|tag| matches!(tag, Tag::Swapped | Tag::Busy | Tag::Cached))
    }

    /// Names every page that is out to `take`; their slots are counted once more, and added to `slots`. The engine stands still
    /// ([`Engine::stand_still`]). With the names comes the lock that keeps things so until the clone is done;
    /// [`Engine::cloned`] comes next. `None`: `take` had no room, or the mappings never came to rest.
    pub fn bequeath(
        &self,
        slots: &mut Vec<SlotRun>,
        take: impl FnMut(Heirloom) -> bool,
    ) -> Option<WriteGuard<'_, Regions>> {
        let mut backoff = crate::sync::Backoff::new();
        let mut regions = loop {
            let regions = self.events.write();
            if self.space.count(|tag| tag == Tag::Cached) == 0 {
                break regions;
            }
            drop(regions);
            backoff.snooze();
        };
        self.forget_untold(&mut regions);
        self.take_in_growth(&mut regions);
        if self.mark(&mut regions) && self.name(slots, take) {
            return Some(regions);
        }
        self.unmark(regions.iter());
        None
    }

    /// What is known of is a region too: a mapping that grew in place is registered there, and its pages leave.
    fn take_in_growth(&self, regions: &mut Regions) {
        let mut grown = Vec::new();
        regions.gaps(0, TOP, |from, to| {
            let mut at = from;
            while let Some((start, end)) = self.space.first_known(at, to) {
                grown.push(Region { start, end });
                at = end;
            }
        });
        grown.into_iter().for_each(|part| regions.insert(part));
    }

    /// Marks all regions, and nothing else; what is Gone is one by then, if it is there.
    fn mark(&self, regions: &mut Regions) -> bool {
        let mut left: Vec<Region> = regions.iter().collect();
        for _ in 0..MOST_MARKS {
            regions.write_down();
            self.read_all(regions, |_| ());
            left.extend(self.adopt_gone(regions));
            let changes = regions.written_down();
            // What came there since was marked in its place.
            self.unmark(touched(&changes));
            left.extend(touched(&changes));
            left.retain(|Region { start, end }| {
                let mut parts = regions.within(*start, *end);
                !parts.all(|part| self.kernel.mark(part.start, part.end - part.start, true).is_ok())
            });
            // No mapping has changed before it was marked, or the event of that was read; and with none nothing more is Gone.
            if changes.is_empty() && !self.kernel.event_pending() {
                return left.is_empty();
            }
        }
        false
    }

    fn unmark(&self, parts: impl Iterator<Item = Region>) {
        for Region { start, end } in parts {
            // What has changed since is not marked, or is where its event will tell.
            let _ = self.kernel.mark(start, end - start, false);
        }
    }

    /// After [`Engine::bequeath`] and the clone, or where there was none: what changed since, in the order in which it
    /// happened.
    pub fn cloned(&self, regions: &mut Regions) -> Vec<Change> {
        regions.write_down();
        self.read_all(regions, |_| ());
        self.unmark(regions.iter());
        let changes = regions.written_down();
        // What was not unmapped after all.
        self.unmark(touched(&changes));
        changes
    }

    fn name(&self, slots: &mut Vec<SlotRun>, mut take: impl FnMut(Heirloom) -> bool) -> bool {
        for (start, block) in self.space.blocks(0, TOP) {
            let block = block.lock();
            let first = slots.len();
            let mut named = (0..BLOCK_PAGES).filter_map(|index| {
                let word = block.word(index);
                let is_out = matches!(word.tag(), Tag::Swapped | Tag::Busy);
                is_out.then(|| {
                    let sum = block.sum(index);
                    let sum = [sum as u64, (sum >> 64) as u64];
                    Heirloom { page: (start + index * PAGE) as u64, entry: word.payload(), sum }
                })
            });
            let done = named.all(|heirloom| {
                let has_room = take(heirloom);
                if has_room {
                    match slots[first..].last_mut() {
                        Some(before) if before.is_before(heirloom.entry) => before.n += 1,
                        _ => slots.push(SlotRun { entry: heirloom.entry, n: 1 }),
                    }
                }
                has_room
            });
            slots[first..].iter().for_each(|run| self.place.bequeath(run.entry, run.n));
            if !done {
                return false;
            }
        }
        true
    }

    /// The counts that [`Engine::bequeath`] added are taken back: nobody reads these slots any more.
    pub fn disinherit(&self, slots: &[SlotRun]) {
        slots.iter().for_each(|run| self.place.disinherit(run.entry, run.n));
    }

    /// Takes over what the parent had out, in a child in which nobody runs yet but who waits for this: of `heirlooms`
    /// those that have a `place` which is managed. The others are memory that the parent had not any more, or that
    /// children do not get. Something may be there already, which nobody of the program can have put there: another
    /// process has looked before it was registered, or khugepaged has made a huge page, and zeros came. They are taken
    /// away. False: they cannot be, or somebody has written, too.
    #[must_use]
    pub fn inherit(&self, heirlooms: &[Heirloom], place: impl Fn(usize) -> Option<usize>) -> bool {
        self.place.read_from_others(heirlooms.iter().map(|heirloom| heirloom.entry));
        let regions = self.events.write();
        let had =
            |heirloom: &Heirloom| place(heirloom.page as usize).filter(|page| regions.find(*page).is_some());
        let mut left = heirlooms;
        while let Some((first, others)) = left.split_first() {
            let Some(page) = had(first) else {
                left = others;
                continue;
            };
            // Those that follow, in memory and where they are out, within the block.
            let follow = others.iter().zip(1..(BLOCK - page % BLOCK) / PAGE).take_while(|(other, n)| {
                SlotRun { entry: first.entry, n: *n }.is_before(other.entry)
                    && had(other) == Some(page + n * PAGE)
            });
            let run;
            (run, left) = left.split_at(1 + follow.count());
            if !self.inherit_run(run, page) {
                return false;
            }
        }
        true
    }

    /// The same of pages and slots that follow each other in a block; `page`: where the first is now.
    fn inherit_run(&self, run: &[Heirloom], page: usize) -> bool {
        let mut block = self.space.block_or_new(page).lock();
        self.place.dup(run[0].entry, run.len());
        let mut taken = false;
        for (heirloom, page) in run.iter().zip((page..).step_by(PAGE)) {
            let index = page % BLOCK / PAGE;
            block.unit_or_new(index, &self.space.spares);
            let mut word = block.word(index);
            if word.tag() == Tag::Resident {
                match self.take_zeros(page) {
                    Ok(true) => (word, taken) = (word.forget(), true),
                    // A guard, for which the program has given the page up: no event tells, or one that is still to come.
                    Err(Errno::FAULT) => {
                        self.place.put(heirloom.entry, 1);
                        block.set(index, word.forget());
                        continue;
                    }
                    _ => {}
                }
            }
            if !word.is_unknown() {
                return false;
            }
            block.set(index, word.inherit(heirloom.entry));
            block.set_sum(index, u128::from(heirloom.sum[0]) | u128::from(heirloom.sum[1]) << 64);
            // What it left with is not known; not never, so that it counts as coming back.
            if let Some(unit) = block.unit_mut(index) {
                unit.usage.evicted_at = self.evictions.load(Relaxed);
            }
        }
        if taken && block.huge {
            block.became_split();
            self.requeue_units(&mut block, page & !(BLOCK - 1));
        }
        true
    }

    /// Takes away what is mapped at a page; whether it was zeros. FAULT: it is a guard (MADV_GUARD_INSTALL).
    fn take_zeros(&self, page: usize) -> Result<bool, Errno> {
        let Some((first, filled)) = self.frames.take_holes() else { return Ok(false) };
        let mut done = self.take_zeros_by(self.frames.address(first + filled as u32), page);
        self.frames.filled(first, filled);
        if done == Err(Errno::INVAL) {
            let Some(first) = self.frames.take_executable_holes() else { return Ok(false) };
            done = self.take_zeros_by(self.frames.address(first), page);
            self.frames.executable_dropped(first);
        }
        done
    }

    /// The same by a hole for that.
    fn take_zeros_by(&self, frame: usize, page: usize) -> Result<bool, Errno> {
        let mut backoff = crate::sync::Backoff::new();
        let mut tries = 0;
        // Somebody may have it for a moment: khugepaged, or who looks.
        while let Err(Partial { errno, .. }) = self.kernel.move_pages(frame, page, PAGE, false) {
            tries += 1;
            if matches!(errno, Errno::INVAL | Errno::FAULT) || tries == MOST_TRIES {
                return Err(errno);
            }
            if errno == Errno::EXIST && self.kernel.holds_zeros(frame, PAGE) {
                // Somebody has read the hole from outside.
                let _ = self.drop_frames(frame, PAGE);
            }
            backoff.snooze();
        }
        // SAFETY: a frame that is filled, and nobody else's.
        let is_zeros = unsafe { is_zero(frame) };
        self.drop_frames(frame, PAGE)?;
        Ok(is_zeros)
    }
}
