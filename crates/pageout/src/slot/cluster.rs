//! A cluster: the lock under which its slots change, and what is known of them.
//!
//! The descriptor lives as long as the allocator, so a stale entry or hint always finds a lock to take
//! and looks at `listed` under it. `listed` and the links belong to the lists: they change only with both
//! the cluster's lock and the lock of its shard's lists held, so either is enough to read `listed`.
//!
//! Invariants, when the cluster's lock is free: no slot is used if and only if the cluster is free,
//! waits for discard, is being discarded or absent (but for clusters with bad slots, which are never
//! free again); then and only then it has no table. A cluster on a nonfull or fragmented list has a
//! free slot; one on a fragmented list has no free run of its order.

use core::mem;

use super::lists::Listed;
use super::table::{one, One, Table, Word};
use super::{Entry, LockClass, Owner, WrongEntry, CLUSTER_ORDER, CLUSTER_SLOTS};
use crate::flaw::{makes, Flaw};
use crate::sync::atomic::{AtomicU16, AtomicU32, AtomicU8, Ordering::Relaxed};
use crate::sync::{Guard, Lock};

/// Locks of clusters: slots, counts, owners.
pub static CLUSTER_LOCKS: LockClass = LockClass::new();

/// Marks the end of a list.
pub(super) const NOBODY: u32 = u32::MAX;

#[repr(align(64))]
pub(super) struct Cluster {
    state: Lock<State>,
    pub(super) next: AtomicU32,
    pub(super) prev: AtomicU32,
    /// The shard that it is listed in; changes only while it is absent.
    shard: AtomicU16,
    listed: AtomicU8,
}

impl Cluster {
    pub(super) fn new() -> Self {
        Self {
            state: Lock::new(State::default(), &CLUSTER_LOCKS),
            next: AtomicU32::new(NOBODY),
            prev: AtomicU32::new(NOBODY),
            shard: AtomicU16::new(0),
            listed: AtomicU8::new(Listed::ABSENT.0),
        }
    }

    pub(super) fn lock(&self) -> Guard<'_, State> {
        self.state.lock()
    }

    pub(super) fn try_lock(&self) -> Option<Guard<'_, State>> {
        self.state.try_lock()
    }

    pub(super) fn shard(&self) -> usize {
        self.shard.load(Relaxed) as usize
    }

    /// Only with the cluster's lock held, while it is absent.
    pub(super) fn set_shard(&self, shard: usize) {
        self.shard.store(shard as u16, Relaxed);
    }

    /// The list that the cluster is on. Without its lock or its shard's, a guess.
    pub(super) fn listed(&self) -> Listed {
        Listed(self.listed.load(Relaxed))
    }

    /// Only with both locks held.
    pub(super) fn set_listed(&self, listed: Listed) {
        self.listed.store(listed.0, Relaxed);
    }
}

/// Counts that do not fit into the slots' words. Each cluster has its own: two that overflow at once
/// share nothing.
pub(super) struct Continued {
    counts: [u32; CLUSTER_SLOTS],
    /// How many of them are not 0.
    slots: u16,
}

impl Continued {
    pub(super) fn new() -> Option<One<Self>> {
        one(Self { counts: [0; CLUSTER_SLOTS], slots: 0 })
    }
}

/// What a cluster's lock guards.
#[derive(Default)]
pub(super) struct State {
    pub(super) table: Option<One<Table>>,
    continued: Option<One<Continued>>,
    used: u16,
    bad: u16,
    /// The order that the cluster serves; without meaning while it is free.
    pub(super) order: u8,
}

/// Memory that a change under the lock left over, to be dropped when the lock is free again.
#[derive(Default)]
#[must_use = "dropping it under a lock gives memory back under a lock"]
pub(super) struct Leftover {
    pub(super) table: Option<One<Table>>,
    pub(super) continued: Option<One<Continued>>,
}

/// A count would overflow and the cluster has nowhere to continue it yet.
pub(super) struct NeedsContinued;

impl State {
    pub(super) fn table(&mut self) -> Option<&mut Table> {
        self.table.as_mut().map(|table| &mut table[0])
    }

    fn table_ref(&self) -> Option<&Table> {
        self.table.as_ref().map(|table| &table[0])
    }

    pub(super) fn used(&self) -> usize {
        self.used as usize
    }

    /// No slot used and none bad: may be free as a whole.
    pub(super) fn is_empty(&self) -> bool {
        self.used == 0 && self.bad == 0
    }

    pub(super) fn is_full(&self) -> bool {
        self.used as usize + self.bad as usize == CLUSTER_SLOTS
    }

    /// Whether a run of the cluster's order is free.
    pub(super) fn fits(&self) -> bool {
        self.table_ref().is_some_and(|table| table.find(self.order, 0).is_some())
    }

    /// Makes slots `0..first` and `end..` bad. The cluster has a table and no used slot.
    pub(super) fn trim(&mut self, first: usize, end: usize) {
        for at in (0..first).chain(end..CLUSTER_SLOTS) {
            self.table().expect("a trimmed cluster has a table").set(at, Word::BAD);
            self.bad += 1;
        }
    }

    /// Back to how the cluster was made. No slot may be used.
    pub(super) fn reset(&mut self) -> Leftover {
        debug_assert!(self.used == 0 || makes(Flaw::EndUnsure));
        let old = mem::take(self);
        Leftover { table: old.table, continued: old.continued }
    }

    /// Takes runs of `1 << order` slots, from offset `from` up and, if `wrap`, then below it. Writes an
    /// entry for each into `out`; `owner` is asked with the index of the run. Returns how many.
    pub(super) fn fill(
        &mut self,
        base: Entry,
        order: u8,
        (from, wrap): (usize, bool),
        owner: &impl Fn(usize) -> Owner,
        out: &mut [Entry],
        done: usize,
    ) -> usize {
        let Some(table) = self.table.as_mut().map(|table| &mut table[0]) else { return 0 };
        let mut got = 0;
        let wanted = out.len() - done;
        for start in [from, 0].into_iter().take(if wrap && from != 0 { 2 } else { 1 }) {
            if order == 0 {
                let mut next = done + got;
                got += table.take_singles(start, wanted - got, |at| {
                    out[next] = base.at(at);
                    next += 1;
                    owner(next - 1)
                });
            } else {
                let mut at = start;
                while got < wanted {
                    let Some(found) = table.find(order, at) else { break };
                    table.take_run(found, 1 << order, owner(done + got));
                    out[done + got] = base.at(found);
                    got += 1;
                    at = found + (1 << order);
                }
            }
            if got == wanted {
                break;
            }
        }
        self.used += (got << order) as u16;
        got
    }

    fn count_at(&self, at: usize) -> u32 {
        let word = self.table_ref().map_or(Word::FREE, |table| table.word(at));
        let more = match &self.continued {
            Some(continued) if word.is_continued() => continued[0].counts[at],
            _ => 0,
        };
        word.count() + more
    }

    /// Owner and count of a used slot.
    pub(super) fn look(&self, entry: Entry) -> Result<(Owner, u32), WrongEntry> {
        let at = entry.offset_in_cluster();
        let word = self.table_ref().map_or(Word::FREE, |table| table.word(at));
        match word.count() {
            _ if word.is_bad() => Err(WrongEntry::BadSlot(entry)),
            0 => Err(WrongEntry::FreeSlot(entry)),
            _ => Ok((word.owner(), self.count_at(at))),
        }
    }

    fn check_run(&self, entry: Entry, n: usize) -> Result<(), WrongEntry> {
        (0..n).try_for_each(|i| self.look(entry.at(i)).map(drop))
    }

    /// Adds one to each count of the run, or changes nothing.
    pub(super) fn dup(&mut self, entry: Entry, n: usize) -> Result<Result<(), NeedsContinued>, WrongEntry> {
        self.check_run(entry, n)?;
        let run = entry.offset_in_cluster()..entry.offset_in_cluster() + n;
        let Self { table: Some(table), continued, .. } = self else {
            return Err(WrongEntry::FreeSlot(entry));
        };
        let table = &mut table[0];
        if continued.is_none() && run.clone().any(|at| table.word(at).count() == Word::MAX) {
            return Ok(Err(NeedsContinued));
        }
        for at in run {
            let word = table.word_mut(at);
            match continued {
                Some(continued) if word.count() == Word::MAX => {
                    let continued = &mut continued[0];
                    continued.slots += u16::from(continued.counts[at] == 0);
                    continued.counts[at] += 1;
                    *word = word.with_continued(true);
                }
                _ => *word = word.with_count(word.count() + 1),
            }
        }
        Ok(Ok(()))
    }

    /// Gives the cluster room for counts that overflow, and back what it does not need.
    pub(super) fn install(&mut self, room: One<Continued>) -> Option<One<Continued>> {
        let there = self.continued.is_some() && !makes(Flaw::ContinuedTwice);
        if there || self.table.is_none() {
            return Some(room);
        }
        self.continued = Some(room);
        None
    }

    /// Takes one from each count of the run, or changes nothing; slots whose count becomes 0 are free.
    pub(super) fn put(&mut self, entry: Entry, n: usize) -> Result<Leftover, WrongEntry> {
        let start = entry.offset_in_cluster();
        let Some(table) = self.table() else { return Err(WrongEntry::FreeSlot(entry)) };
        if table.free_if_single(start, n) {
            self.used -= n as u16;
            return Ok(Leftover::default());
        }
        self.check_run(entry, n)?;
        let mut leftover = Leftover::default();
        for at in start..start + n {
            self.put_one(at);
        }
        if self.continued.as_ref().is_some_and(|continued| continued[0].slots == 0) {
            leftover.continued = self.continued.take();
        }
        Ok(leftover)
    }

    /// As [`State::put`] for each slot of a run that was sorted out of a batch: what is wrong is left out.
    pub(super) fn put_run(&mut self, run: &[Entry], leftover: &mut Leftover) -> Result<(), WrongEntry> {
        let (start, n) = (run[0].offset_in_cluster(), run.len());
        if self.table().is_some_and(|table| table.free_if_single(start, n)) {
            self.used -= n as u16;
            return Ok(());
        }
        let mut result = Ok(());
        for &entry in run {
            match self.put(entry, 1) {
                Ok(Leftover { continued: None, .. }) => {}
                Ok(left) => *leftover = left,
                Err(wrong) => result = result.and(Err(wrong)),
            }
        }
        result
    }

    fn put_one(&mut self, at: usize) {
        let Self { table: Some(table), continued, used, .. } = self else { return };
        let word = table[0].word(at);
        match continued {
            // The continued part goes first: a word that is not continued holds its whole count.
            Some(continued) if word.is_continued() => {
                let continued = &mut continued[0];
                continued.counts[at] -= 1;
                if continued.counts[at] == 0 {
                    continued.slots -= 1;
                    *table[0].word_mut(at) = word.with_continued(false);
                }
            }
            _ if word.count() > 1 => *table[0].word_mut(at) = word.with_count(word.count() - 1),
            _ => {
                *used -= 1;
                table[0].set(at, Word::FREE);
            }
        }
    }

    /// The list where the cluster belongs, now that slots of it were given or freed. From a nonfull list
    /// it goes only when it is empty or full: whether a run is left is found out by who looks for one.
    pub(super) fn home(&mut self, now: Listed, discard: bool) -> Listed {
        if self.is_empty() {
            return if discard { Listed::DISCARD } else { Listed::FREE };
        }
        if self.is_full() {
            return Listed::FULL;
        }
        if self.used == 0 {
            // Bad slots alone: a new start as a cluster for single pages.
            self.order = 0;
        }
        if now == Listed::nonfull(self.order) || self.fits() {
            Listed::nonfull(self.order)
        } else {
            Listed::fragmented(self.order)
        }
    }
}

#[cfg(any(test, feature = "simulated", loom, shuttle))]
impl State {
    /// The first used slot at or after `from`, with owner and count.
    pub(super) fn next_used(&self, from: usize) -> Option<(usize, Owner, u32)> {
        let table = self.table_ref()?;
        let mut at = from;
        loop {
            at = table.next_taken(at)?;
            if !table.word(at).is_bad() {
                return Some((at, table.word(at).owner(), self.count_at(at)));
            }
            at += 1;
        }
    }

    pub(super) fn has_table(&self) -> bool {
        self.table.is_some()
    }

    /// Panics if the words, the map of taken slots and the sums disagree.
    pub(super) fn audit(&self) {
        let Some(table) = self.table_ref() else {
            assert!(self.is_empty() && self.continued.is_none(), "without a table there is nothing");
            return;
        };
        let words = || (0..CLUSTER_SLOTS).map(|at| table.word(at));
        let count = |what: fn(Word) -> bool| words().filter(|&word| what(word)).count();
        assert_eq!(count(|word| word.count() != 0), self.used());
        assert_eq!(count(Word::is_bad), self.bad as usize);
        let taken = core::iter::successors(table.next_taken(0), |at| table.next_taken(at + 1)).count();
        assert_eq!(taken, self.used() + self.bad as usize, "the map says what the words say");
        let continued = self.continued.as_ref().map_or(0, |continued| continued[0].slots as usize);
        assert_eq!(count(Word::is_continued), continued);
        for (at, word) in words().enumerate() {
            let more = self.continued.as_ref().map_or(0, |continued| continued[0].counts[at]);
            assert_eq!(word.is_continued(), more != 0);
            assert!(more == 0 || word.count() == Word::MAX);
        }
    }
}

/// The whole of a cluster in one run.
pub(super) fn fills(order: u8) -> bool {
    order == CLUSTER_ORDER
}
