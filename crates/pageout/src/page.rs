//! The page word: where one page of a managed block is, and every way that can change.
//!
//! | tag | means | payload |
//! |---|---|---|
//! | None | nothing is known of the page: a fault on it gets zeros; it is never evicted | whether it was discarded |
//! | Zero | left the program holding only zeros; no slot, no frame | - |
//! | Resident | mapped in the program | entry that may still hold its data, or none |
//! | Cached | moved out, in a staging frame, being written | frame |
//! | Swapped | on the device | entry |
//! | Busy | being read from the device | entry |
//! | Poisoned | could not be brought back; touching it raises SIGBUS | - |
//! | Gone | was out when an event told that it was unmapped. The kernel tells so too where it refuses: if it is there still, touching it raises SIGBUS | how often memory had grown before |
//!
//! | verb | from | to | who |
//! |---|---|---|---|
//! | adopt | None, Gone | Resident | adopter, which found it mapped |
//! | fill | None, Zero, Resident | Resident | fault: zeros; Resident where somebody discarded it past us |
//! | inherit | None, Gone | Swapped | a fork's child, before it goes on: its parent's page was out |
//! | detach | Resident | Resident | who clears a device, or a fault while it is full: the entry is given up |
//! | leave | Resident | Cached | evictor, after MOVE out |
//! | rescue | Cached | Resident | fault: the frame still has it; evictor: it could not be written |
//! | settle | Cached | Swapped, Zero | evictor, after the write |
//! | fetch | Swapped | Busy | fault, before the read |
//! | arrive | Busy | Resident | fault, after MOVE or COPY in |
//! | abandon | Busy | Swapped | fault that could not finish |
//! | poison | Busy, Gone | Poisoned | fault whose data are lost; adopter that found the page there |
//! | forget | any | None | event: moved away; something else is here by now. Evictor, fault, adopter, a fork's child: found so without an event |
//! | unmap | any | Gone, None | event |
//! | moved | any | what it was elsewhere; Swapped if that was Busy | event: it came here |
//! | discard | any | None | event: about to be discarded, so not to be adopted though it may still be mapped |
//!
//! Every change bumps the generation, so whoever let go of the block's lock (for I/O) can tell by one
//! comparison whether the page is still in the state it left it in.
//!
//! A word is read and changed only under its block's lock. That one lock covers a run of neighbours, which
//! are nearly always changed together; a compare-and-swap per page would cost 512 of them for a huge one.

use crate::sync::Zero;

/// What is known of a page: tag, payload and generation in 64 bits.
#[repr(transparent)]
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub struct Word(u64);

// SAFETY: a number, and the default is 0.
unsafe impl Zero for Word {}

/// Where a page is. See the table of this module.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Tag {
    /// Unknown: zeros.
    None = 0,
    /// Left as zeros.
    Zero = 1,
    /// Mapped.
    Resident = 2,
    /// In a frame, being written.
    Cached = 3,
    /// On the device.
    Swapped = 4,
    /// Being read.
    Busy = 5,
    /// Lost.
    Poisoned = 6,
    /// Unmapped, or lost.
    Gone = 7,
}

const TAG_BITS: u32 = 3;
const PAYLOAD_BITS: u32 = 40;
const GENERATION_SHIFT: u32 = TAG_BITS + PAYLOAD_BITS;
const PAYLOAD_MASK: u64 = (1 << PAYLOAD_BITS) - 1;
/// The payload of None that tells discarded pages.
const DISCARDED: u64 = 1;

impl Word {
    /// Where the page is.
    pub fn tag(self) -> Tag {
        match self.0 & 7 {
            0 => Tag::None,
            1 => Tag::Zero,
            2 => Tag::Resident,
            3 => Tag::Cached,
            4 => Tag::Swapped,
            5 => Tag::Busy,
            6 => Tag::Poisoned,
            _ => Tag::Gone,
        }
    }

    /// Frame, entry or growths, as the tag says; 0 means no entry.
    pub fn payload(self) -> u64 {
        (self.0 >> TAG_BITS) & PAYLOAD_MASK
    }

    /// Of a page of which nothing is known any more, after so many changes.
    pub fn unknown(generation: u64) -> Word {
        Word(generation << GENERATION_SHIFT)
    }

    /// How often it has changed.
    pub fn generation(self) -> u64 {
        self.0 >> GENERATION_SHIFT
    }

    fn become_(self, tag: Tag, payload: u64) -> Word {
        debug_assert!(payload <= PAYLOAD_MASK);
        let generation = self.generation().wrapping_add(1);
        Word(tag as u64 | payload << TAG_BITS | generation << GENERATION_SHIFT)
    }

    /// None → Resident: found mapped.
    #[must_use]
    pub fn adopt(self) -> Word {
        debug_assert!(self.is_unknown());
        self.become_(Tag::Resident, 0)
    }

    /// None, Zero, Resident → Resident: zeros were mapped.
    #[must_use]
    pub fn fill(self) -> Word {
        debug_assert!(matches!(self.tag(), Tag::None | Tag::Zero | Tag::Resident));
        self.become_(Tag::Resident, 0)
    }

    /// None → Swapped: `entry` has what the parent's page held when it forked.
    #[must_use]
    pub fn inherit(self, entry: u64) -> Word {
        debug_assert!(self.is_unknown() && entry != 0);
        self.become_(Tag::Swapped, entry)
    }

    /// Resident → Resident: its entry is given up.
    #[must_use]
    pub fn detach(self) -> Word {
        debug_assert_eq!(self.tag(), Tag::Resident);
        self.become_(Tag::Resident, 0)
    }

    /// Resident → Cached: moved out into `frame`. The entry is now the evictor's to keep.
    #[must_use]
    pub fn leave(self, frame: u32) -> Word {
        debug_assert_eq!(self.tag(), Tag::Resident);
        self.become_(Tag::Cached, frame as u64)
    }

    /// Cached → Resident: copied back from its frame.
    #[must_use]
    pub fn rescue(self) -> Word {
        debug_assert_eq!(self.tag(), Tag::Cached);
        self.become_(Tag::Resident, 0)
    }

    /// Cached → Swapped: `entry` has the data.
    #[must_use]
    pub fn settle(self, entry: u64) -> Word {
        debug_assert!(self.tag() == Tag::Cached && entry != 0);
        self.become_(Tag::Swapped, entry)
    }

    /// Cached → Zero: it held only zeros.
    #[must_use]
    pub fn settle_zero(self) -> Word {
        debug_assert_eq!(self.tag(), Tag::Cached);
        self.become_(Tag::Zero, 0)
    }

    /// Swapped → Busy: a read is under way.
    #[must_use]
    pub fn fetch(self) -> Word {
        debug_assert_eq!(self.tag(), Tag::Swapped);
        self.become_(Tag::Busy, self.payload())
    }

    /// Busy → Resident; the entry still has the same data.
    #[must_use]
    pub fn arrive(self) -> Word {
        debug_assert_eq!(self.tag(), Tag::Busy);
        self.become_(Tag::Resident, self.payload())
    }

    /// Busy → Swapped: not brought in after all.
    #[must_use]
    pub fn abandon(self) -> Word {
        debug_assert_eq!(self.tag(), Tag::Busy);
        self.become_(Tag::Swapped, self.payload())
    }

    /// Busy, Gone → Poisoned: the data are lost.
    #[must_use]
    pub fn poison(self) -> Word {
        debug_assert!(matches!(self.tag(), Tag::Busy | Tag::Gone));
        self.become_(Tag::Poisoned, 0)
    }

    /// Any → None: the page is gone from here.
    #[must_use]
    pub fn forget(self) -> Word {
        self.become_(Tag::None, 0)
    }

    /// Any → Gone, None: an event tells that it was unmapped. `growths`: how often memory had grown before, if that is known:
    /// else it cannot be told from what has grown to where it was.
    #[must_use]
    pub fn unmap(self, growths: Option<u32>) -> Word {
        match (self.tag(), growths) {
            (Tag::Gone, _) => self,
            (Tag::Cached | Tag::Swapped | Tag::Busy, Some(growths)) => {
                self.become_(Tag::Gone, growths.into())
            }
            _ => self.forget(),
        }
    }

    /// Any → None: the program is about to discard the page. The kernel drops it after it was told that we
    /// know: what is mapped until then must not be taken up, or it would come back afterwards.
    #[must_use]
    pub fn discard(self) -> Word {
        self.become_(Tag::None, DISCARDED)
    }

    /// Nothing is known of what is here now, not even that it was discarded.
    pub fn is_unknown(self) -> bool {
        self.is_empty() && (self.tag() == Tag::Gone || self.payload() != DISCARDED)
    }

    /// Nothing is here, as far as is known.
    pub fn is_empty(self) -> bool {
        matches!(self.tag(), Tag::None | Tag::Gone)
    }

    /// The word of a page that `mremap` moved here from where it was `from`.
    #[must_use]
    pub fn moved(self, from: Word) -> Word {
        self.become_(from.tag(), from.payload())
    }

    /// The word of a page that `mremap` moved here while it was Busy `from` where it was: its reader will
    /// not come here, so it is to be read again.
    #[must_use]
    pub fn moved_swapped(self, from: Word) -> Word {
        debug_assert_eq!(from.tag(), Tag::Busy);
        self.become_(Tag::Swapped, from.payload())
    }
}

impl core::fmt::Debug for Word {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "{:?}({:#x})@{}", self.tag(), self.payload(), self.generation())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stale_comparison_never_succeeds() {
        let word = Word::default().adopt();
        let round = word.leave(7).rescue();
        assert_eq!((round.tag(), round.payload()), (word.tag(), word.payload()));
        assert_ne!(round, word);
    }

    #[test]
    fn payload_and_tag_do_not_touch() {
        let entry = PAYLOAD_MASK;
        let word = Word::default().adopt().leave(u32::MAX).settle(entry).fetch();
        assert_eq!((word.tag(), word.payload()), (Tag::Busy, entry));
        assert_eq!(word.arrive().payload(), entry);
        assert_eq!(word.forget(), word.forget());
        assert_eq!(word.forget().tag(), Tag::None);
    }
}
