//! Lists of clusters, and the shards that hold them.
//!
//! A device has a shard per CPU (a rotating one has one shard). The clusters of a trunk join the shard of the CPU that
//! uses it first, so CPUs meet on a list lock only when one frees what another allocated, or when space
//! is short. Nothing is owned by that: every CPU may use every shard.
//!
//! The list lock is inside the cluster lock. Whoever holds it first may only *try* cluster locks.

use super::cluster::{Cluster, NOBODY};
use super::device::Device;
use super::table::{Chain, One, Table};
use super::{LockClass, ORDERS};
use crate::sync::atomic::{AtomicU32, Ordering::Relaxed};
use crate::sync::{Guard, Lock};

/// Locks of the devices' lists of clusters.
pub static LIST_LOCKS: LockClass = LockClass::new();

/// Where a cluster is: on one of the lists, or on none.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Listed(pub(super) u8);

impl Listed {
    /// Nothing used; one of these serves any order next.
    pub(super) const FREE: Self = Self(0);
    /// Nothing used; the device has not been told yet.
    pub(super) const DISCARD: Self = Self(1);
    /// No slot free.
    pub(super) const FULL: Self = Self(2);
    const NONFULL: u8 = 3;
    const FRAGMENTED: u8 = Self::NONFULL + ORDERS as u8;
    const LISTS: usize = Self::FRAGMENTED as usize + ORDERS;

    /// On no list: the device is being told that it is empty.
    pub(super) const DISCARDING: Self = Self(254);
    /// On no list: the cluster is not the allocator's.
    pub(super) const ABSENT: Self = Self(255);

    /// Serves `order`, and may have a free run of it.
    pub(super) const fn nonfull(order: u8) -> Self {
        Self(Self::NONFULL + order)
    }

    /// Serves `order`, has free slots, but no free run of it.
    pub(super) const fn fragmented(order: u8) -> Self {
        Self(Self::FRAGMENTED + order)
    }

    pub(super) const fn is_list(self) -> bool {
        (self.0 as usize) < Self::LISTS
    }

    /// Every list.
    #[cfg(any(test, feature = "simulated", loom, shuttle))]
    pub(super) fn all() -> impl Iterator<Item = Self> {
        (0..Self::LISTS as u8).map(Self)
    }

    /// A cluster here has a slot that an order-0 allocation can have.
    pub(super) fn has_room(self) -> bool {
        self.is_list() && self != Self::FULL
    }

    /// A cluster here has no table.
    pub(super) fn is_bare(self) -> bool {
        self == Self::FREE || self == Self::DISCARD
    }

    const fn bit(self) -> u32 {
        1 << self.0
    }
}

const _: () = assert!(Listed::LISTS < 31, "a list has a bit in Shard::occupied");

/// Bit of `Shard::occupied` that says: fewer than an eighth of the clusters are free.
const TIGHT: u32 = 1 << 31;

/// Tables kept at hand in each shard, so that a cluster that empties and fills again and again does not
/// go to the program's memory for it.
const SPARE_TABLES: usize = 8;

#[derive(Clone, Copy)]
struct Ends {
    first: u32,
    last: u32,
    len: u32,
}

pub(super) struct Lists {
    ends: [Ends; Listed::LISTS],
    /// A bit for each list that has members.
    members: u32,
    clusters: u32,
    spare: Chain,
}

impl Lists {
    pub(super) fn first(&self, listed: Listed) -> u32 {
        self.ends[listed.0 as usize].first
    }

    pub(super) fn len(&self, listed: Listed) -> u32 {
        self.ends[listed.0 as usize].len
    }

    pub(super) fn has_room(&self) -> bool {
        self.members & !Listed::FULL.bit() != 0
    }

    pub(super) fn spare(&mut self) -> &mut Chain {
        &mut self.spare
    }

    /// Puts a table by; gives it back if there are enough.
    pub(super) fn keep(&mut self, table: One<Table>) -> Option<One<Table>> {
        if self.spare.len() == SPARE_TABLES {
            return Some(table);
        }
        self.spare.push(table);
        None
    }

    /// Moves the cluster to the end of another list, or of its own. The caller holds its lock too.
    pub(super) fn place(&mut self, device: &Device, index: u32, cluster: &Cluster, to: Listed) {
        let from = cluster.listed();
        if from == to && to.is_list() && self.ends[to.0 as usize].last == index {
            return;
        }
        if from.is_list() {
            self.unlink(device, cluster, from);
        }
        if to.is_list() {
            self.link_last(device, index, cluster, to);
        }
        self.clusters += u32::from(from == Listed::ABSENT);
        self.clusters -= u32::from(to == Listed::ABSENT);
        cluster.set_listed(to);
    }

    fn link_last(&mut self, device: &Device, index: u32, cluster: &Cluster, to: Listed) {
        let ends = &mut self.ends[to.0 as usize];
        cluster.prev.store(ends.last, Relaxed);
        cluster.next.store(NOBODY, Relaxed);
        match ends.last {
            NOBODY => ends.first = index,
            last => device.cluster(last).next.store(index, Relaxed),
        }
        ends.last = index;
        ends.len += 1;
        self.members |= to.bit();
    }

    fn unlink(&mut self, device: &Device, cluster: &Cluster, from: Listed) {
        let ends = &mut self.ends[from.0 as usize];
        let (prev, next) = (cluster.prev.load(Relaxed), cluster.next.load(Relaxed));
        match prev {
            NOBODY => ends.first = next,
            prev => device.cluster(prev).next.store(next, Relaxed),
        }
        match next {
            NOBODY => ends.last = prev,
            next => device.cluster(next).prev.store(prev, Relaxed),
        }
        ends.len -= 1;
        if ends.len == 0 {
            self.members &= !from.bit();
        }
    }

    /// The bits of `Shard::occupied`.
    fn summary(&self) -> u32 {
        let tight = if self.len(Listed::FREE) * 8 < self.clusters { TIGHT } else { 0 };
        self.members | tight
    }
}

/// On a cache line of its own: all CPUs read it, and it changes seldom.
#[repr(align(128))]
struct Occupied(AtomicU32);

#[repr(align(128))]
pub(super) struct Shard {
    lists: Lock<Lists>,
    /// Which lists have members, to be looked at without the lock: a guess that saves locking in vain.
    occupied: Occupied,
}

impl Shard {
    pub(super) fn new() -> Self {
        let ends = [Ends { first: NOBODY, last: NOBODY, len: 0 }; Listed::LISTS];
        let lists = Lists { ends, members: 0, clusters: 0, spare: Chain::default() };
        Self { lists: Lock::new(lists, &LIST_LOCKS), occupied: Occupied(AtomicU32::new(0)) }
    }

    pub(super) fn lock(&self) -> Guard<'_, Lists> {
        self.lists.lock()
    }

    /// Tells those who look without the lock what the lists hold now; call it before unlocking.
    pub(super) fn publish(&self, lists: &Lists) {
        let summary = lists.summary();
        if self.occupied.0.load(Relaxed) != summary {
            self.occupied.0.store(summary, Relaxed);
        }
    }

    /// Whether the list seems to have members.
    pub(super) fn may_have(&self, listed: Listed) -> bool {
        self.occupied.0.load(Relaxed) & listed.bit() != 0
    }

    /// Whether nearly all of the shard's clusters are in use.
    pub(super) fn is_tight(&self) -> bool {
        self.occupied.0.load(Relaxed) & TIGHT != 0
    }
}
