//! Off a device: every page that it has comes home, and leaves again to another device when its turn comes.
//!
//! Since [`Place::swapoff_begin`](super::Place::swapoff_begin) the device gives no slot, so names of its slots only
//! become fewer: a page that comes in loses its name there, and so does one that is in and kept it. What is with
//! others meanwhile (a fault that reads it, an evictor that has not settled it) is found by a later walk. Nothing is
//! taken from anybody for it: frames are made by eviction, or below the limit; where there are none it waits.
//!
//! What a fork's child has inherited leaves the slots of others in the same way.

use super::swapin::{Brought, Incoming, Urge};
use super::swapout::MOST;
use crate::engine::Engine;
use crate::frame::CHUNK;
use crate::kernel::Kernel;
use crate::page::{Tag, Word};
use crate::slot::{DeviceId, Entry};
use crate::space::{BlockState, BLOCK_PAGES, TOP};
use crate::sync::Backoff;

/// Pages that come in at once, unless a whole block does.
const AT_ONCE: usize = 64;
/// Pages over the limit from which nothing more comes in: within them it comes and goes all the time.
const SHORT: i64 = 128;
/// Times that the same page is tried before it is left for a later walk.
const TRIES: usize = 16;

/// What a walk over all pages came to.
#[derive(Debug, PartialEq, Eq, Clone, Copy)]
pub enum Vacated {
    /// The device has gone; the serial that it had.
    Gone(usize),
    /// Something is on it still, and some of it moved.
    Some,
    /// Something is on it still, and nothing of it could be moved now.
    Stuck,
    /// It is not on its way off, or not any more.
    Not,
}

impl<K: Kernel> Engine<K> {
    /// One walk over all pages for those that are on a device which is on its way off; ends early when it is not any
    /// more. Another thread reads events. No lock held.
    pub fn vacate(&self, incoming: &mut Incoming, number: usize) -> Vacated {
        let Some(id) = DeviceId::new(number) else { return Vacated::Not };
        let before = self.place.used(number);
        for (block_start, _) in self.space.blocks(0, TOP) {
            if self.place.used(number) == 0 {
                break;
            }
            if !self.place.is_leaving(number) {
                return Vacated::Not;
            }
            if !self.vacate_block(incoming, block_start, |entry| entry.device() == Some(id)) {
                break;
            }
        }
        match self.place.swapoff_end(number) {
            Ok(serial) => Vacated::Gone(serial),
            Err(_) if !self.place.is_leaving(number) => Vacated::Not,
            Err(_) if self.place.used(number) < before => Vacated::Some,
            Err(_) => Vacated::Stuck,
        }
    }

    /// One walk over all pages for those that are in slots of others, what a fork's child has inherited: `true` when none
    /// is any more. As [`Engine::vacate`].
    pub fn vacate_foreign(&self, incoming: &mut Incoming) -> bool {
        for (block_start, _) in self.space.blocks(0, TOP) {
            if self.place.foreign_names() == 0
                || !self.vacate_block(incoming, block_start, |entry| self.place.is_foreign(entry))
            {
                break;
            }
        }
        self.place.foreign_names() == 0
    }

    /// The pages of one block that are in slots which are `there`; `false` when there is no room for them now.
    fn vacate_block(
        &self,
        incoming: &mut Incoming,
        block_start: usize,
        there: impl Fn(Entry) -> bool,
    ) -> bool {
        let mut backoff = Backoff::new();
        let mut last = (BLOCK_PAGES, 0);
        // What lies before it cannot be read now.
        let mut from = 0;
        while let Some((low, high)) = self.detach(block_start, from, &there) {
            last = if last.0 == low { (low, last.1 + 1) } else { (low, 0) };
            if last.1 > TRIES {
                break;
            }
            if self.budget.get() < -SHORT {
                // What comes in would have to go at once, or could not.
                self.kick();
                return false;
            }
            match self.bring_in(incoming, block_start, low, (low, high), Urge::Ahead) {
                Brought::Done(_) => {}
                Brought::Unread => from = high,
                Brought::Pending => {
                    self.pump();
                    backoff.snooze();
                }
                Brought::NoFrame | Brought::NoHuge if self.make_way(incoming) => {}
                Brought::NoFrame | Brought::NoHuge => return false,
            }
        }
        true
    }

    /// Pages of a block that are in give up their names there. The first run of those that are out there, from one on.
    fn detach(
        &self,
        block_start: usize,
        from: usize,
        there: impl Fn(Entry) -> bool,
    ) -> Option<(usize, usize)> {
        let _regions = self.events.read();
        let mut block = self.space.block(block_start)?.lock();
        let is_there =
            |word: Word, tag: Tag| word.tag() == tag && Entry::from_raw(word.payload()).is_some_and(&there);
        for index in 0..BLOCK_PAGES {
            if is_there(block.word(index), Tag::Resident) {
                self.give_up(&mut block, index);
            }
        }
        let low = (from..BLOCK_PAGES).find(|index| is_there(block.word(*index), Tag::Swapped))?;
        let run = (low..BLOCK_PAGES).take_while(|index| is_there(block.word(*index), Tag::Swapped)).count();
        Some((low, low + if run == BLOCK_PAGES { run } else { run.min(AT_ONCE) }))
    }

    /// A page that is in gives up its name on a device, if it has one.
    pub(crate) fn give_up(&self, block: &mut BlockState, index: usize) {
        let word = block.word(index);
        if word.tag() == Tag::Resident && word.payload() != 0 {
            self.place.put(word.payload(), 1);
            block.set(index, word.detach());
            block.set_sum(index, 0);
        }
    }

    /// Frames for what comes in: of new memory below the limit, else of what leaves. `false`: none can be had now.
    fn make_way(&self, incoming: &mut Incoming) -> bool {
        self.kick();
        if self.budget.get() >= CHUNK as i64 {
            self.grow_frames();
            return true;
        }
        if self.is_stuck() {
            return false;
        }
        if self.evict(&mut incoming.outgoing, 2 * CHUNK) > 0 {
            return true;
        }
        // As where one faults: huge frames that wait, or a huge page, give their memory.
        if self.frames.huge_ready() == 0 {
            self.evict(&mut incoming.outgoing, MOST);
        }
        self.drop_huge(1) > 0
    }
}
