//! Counting slots: one more, one less, and looking at them.

use super::cluster::{Continued, Leftover, State};
use super::device::Device;
use super::lists::Listed;
use super::{Cluster, Entry, Owner, Slots, WrongEntry};
use crate::flaw::{makes, Flaw};
use crate::sync::Guard;

/// A count could not be raised.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DupError {
    /// The entry names no used slot.
    Wrong(WrongEntry),
    /// The count overflows its word and there is no memory to go on in. Nothing was changed.
    NoMemory,
}

impl Slots {
    /// Counts each of the `n` slots from `entry` once more: another page names it. They are of one cluster.
    pub fn dup(&self, entry: Entry, n: usize) -> Result<(), DupError> {
        let (_, _, cluster) = self.locate(entry).map_err(DupError::Wrong)?;
        loop {
            let counted = cluster.lock().dup(entry, n).map_err(DupError::Wrong)?;
            if counted.is_ok() {
                return Ok(());
            }
            let room = Continued::new().ok_or(DupError::NoMemory)?;
            let unneeded = cluster.lock().install(room);
            drop(unneeded);
        }
    }

    /// Counts each of the `n` slots from `entry` once less; one that nobody names any more is free: how many are. They
    /// are of one cluster. On an error nothing was changed.
    pub fn put(&self, entry: Entry, n: usize) -> Result<usize, WrongEntry> {
        let (device, index, cluster) = self.locate(entry)?;
        let mut state = cluster.lock();
        if makes(Flaw::PutInTwo) {
            state.look(entry)?;
            drop(state);
            state = cluster.lock();
        }
        let before = state.used();
        let leftover = match state.put(entry, n) {
            Err(_) if makes(Flaw::PutInTwo) => Leftover::default(),
            put => put?,
        };
        let freed = before - state.used();
        self.settle(device, index, cluster, state, leftover);
        Ok(freed)
    }

    /// [Puts](Slots::put) single slots, in any order; sorts them, so that each cluster's lock is taken
    /// once. Wrong entries are left out; the first of them is the error.
    pub fn put_batch(&self, entries: &mut [Entry]) -> Result<(), WrongEntry> {
        entries.sort_unstable();
        let mut result = Ok(());
        let same = |a: &Entry, b: &Entry| a.device() == b.device() && a.cluster() == b.cluster();
        for group in entries.chunk_by(same) {
            match self.locate(group[0]) {
                Ok((device, index, cluster)) => {
                    let mut state = cluster.lock();
                    let mut leftover = Leftover::default();
                    for run in group.chunk_by(|a, b| a.raw() + 1 == b.raw()) {
                        result = result.and(state.put_run(run, &mut leftover));
                    }
                    self.settle(device, index, cluster, state, leftover);
                }
                Err(wrong) => result = result.and(Err(wrong)),
            }
        }
        result
    }

    /// Puts a cluster, some of whose slots may be free now, where it belongs, and unlocks it.
    fn settle<'a>(
        &self,
        device: &Device,
        index: u32,
        cluster: &'a Cluster,
        mut state: Guard<'a, State>,
        leftover: Leftover,
    ) {
        let now = cluster.listed();
        let to = if now.is_list() { state.home(now, device.discards()) } else { now };
        let mut table = Leftover::default();
        if makes(Flaw::MoveUnlocked) {
            drop(state);
            state = cluster.lock();
        }
        if to != now {
            table = device.move_to(index, cluster, &mut state, to, || self.mark_available(device));
        }
        drop(state);
        self.spares.give(table.table);
        drop((table.continued, leftover));
    }

    /// The first owner of a used slot, and how many name it.
    pub fn look(&self, entry: Entry) -> Result<(Owner, u32), WrongEntry> {
        let (_, _, cluster) = self.locate(entry)?;
        let state = cluster.lock();
        state.look(entry)
    }

    /// Owners of the slots from `entry` on, `None` for free ones; as many as `out` holds, one cluster's at
    /// most. Returns how many it looked at. For readahead by place on the device: what nobody names is
    /// not worth a frame.
    pub fn look_around(&self, entry: Entry, out: &mut [Option<Owner>]) -> Result<usize, WrongEntry> {
        let (_, _, cluster) = self.locate(entry)?;
        let n = out.len().min(super::CLUSTER_SLOTS - entry.offset_in_cluster());
        let state = cluster.lock();
        for (i, out) in out[..n].iter_mut().enumerate() {
            *out = state.look(entry.at(i)).ok().map(|(owner, _)| owner);
        }
        Ok(n)
    }

    /// The first slot of an empty cluster whose 2 MiB the device should discard, or `None`. Until
    /// [`Slots::discarded`] is told nobody gets a slot of it.
    pub fn take_discard(&self, id: super::DeviceId) -> Option<Entry> {
        let device = self.device(id)?;
        (0..device.spread()).find_map(|shard| {
            let (index, cluster) = device.first_of(shard, Listed::DISCARD)?;
            let mut state = cluster.lock();
            if cluster.listed() != Listed::DISCARD && !makes(Flaw::DiscardUnsure) {
                return None;
            }
            let _ = device.move_to(index, cluster, &mut state, Listed::DISCARDING, || ());
            Some(device.base(index))
        })
    }

    /// The cluster that [`Slots::take_discard`] named is discarded, or cannot be: it is free.
    pub fn discarded(&self, entry: Entry) {
        let Ok((device, index, cluster)) = self.locate(entry) else { return };
        let mut state = cluster.lock();
        if cluster.listed() == Listed::DISCARDING {
            let _ = device.move_to(index, cluster, &mut state, Listed::FREE, || self.mark_available(device));
        }
    }
}
