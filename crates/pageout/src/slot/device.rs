//! A device as the allocator sees it: its geometry, its clusters, and the trunks it may use.
//!
//! The directory finds a cluster without a lock. What it holds is made when a trunk is first used and
//! stays until the allocator goes, also across swapoff and swapon, so nobody can meet a descriptor that
//! is gone; a device of which nothing was used yet costs a bit per trunk. It goes by the largest trunks there can be: a
//! device that comes under the same number may have others.
//!
//! The trunks lock is taken before cluster locks, which are taken before list locks. It is for rare
//! things: a trunk is used for the first time, comes, or goes; swapon and swapoff.

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::array;
use core::ops::Range;

use once_cell::race::OnceBox;

use super::cluster::{Cluster, Leftover, State};
use super::lists::{Listed, Lists, Shard};
use super::spare::{Memory, Spares};
use super::table::{one, One, Table};
use super::trunks::TrunkSet;
use super::{DeviceId, Entry, LockClass, CLUSTER_SLOTS, MAX_SLOTS, ORDERS, TRUNK_CLUSTERS, TRUNK_SLOTS};
use crate::flaw::{makes, Flaw};
use crate::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use crate::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, AtomicUsize};
use crate::sync::{Guard, Lock};

/// Locks of the devices' trunks and of the table of devices.
pub static DEVICE_LOCKS: LockClass = LockClass::new();

const CHUNK_GROUPS: usize = if cfg!(loom) { 4 } else { 256 };
const CHUNKS: usize = (MAX_SLOTS / TRUNK_SLOTS) as usize / CHUNK_GROUPS;

/// Memory is short.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NoMemory;

/// So many more trunks than were ever there have room for their numbers.
const NEXT_TRUNKS: u32 = 64;

/// How far into a list of clusters that others work in an allocation looks.
const PICK_TRIES: u32 = 16;

/// What came of looking for a cluster on a list.
pub(super) enum Pick<'a> {
    /// This one, locked; it is on a list for the order asked for, or where it was.
    Got(u32, &'a Cluster, Guard<'a, State>),
    /// Others work in those looked at; this is one of them.
    Busy(u32, &'a Cluster),
    /// There is one, but no table for it: see [`Device::add_spare`].
    NeedTable,
    /// There is none.
    Empty,
}

/// What `swapon` is told about a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DeviceConfig {
    /// Devices of higher priority are filled first; equal ones take turns.
    pub priority: i32,
    /// A disk that seeks: all CPUs share one base per order, which ascends.
    pub rotational: bool,
    /// Clusters that empty wait for [`Slots::take_discard`](super::Slots::take_discard).
    pub discard: bool,
    /// Slots that are there from the start, at most [`MAX_SLOTS`]; 0 where trunks are leased.
    pub slots: u64,
    /// The first slot for pages: 1 where page 0 holds a header. Below a cluster's size.
    pub first: u64,
    /// Clusters in a trunk: a power of two, at most [`TRUNK_CLUSTERS`](super::TRUNK_CLUSTERS).
    pub trunk_clusters: usize,
}

impl DeviceConfig {
    /// So many slots, all of them for pages, in the largest trunks, and nothing special.
    pub const fn new(slots: u64) -> Self {
        Self {
            priority: 0,
            rotational: false,
            discard: false,
            slots,
            first: 0,
            trunk_clusters: TRUNK_CLUSTERS,
        }
    }
}

/// The descriptors of a trunk, or of several small ones.
pub(super) type Group = [Cluster; TRUNK_CLUSTERS];
pub(super) type Chunk = [OnceBox<[Group; 1]>; CHUNK_GROUPS];

/// Descriptors of absent clusters; `None` without memory.
pub(super) fn new_group() -> Option<One<Group>> {
    one(array::from_fn(|_| Cluster::new()))
}

/// What a part of the directory is made of; `None` without memory.
pub(super) fn new_chunk() -> Option<One<Chunk>> {
    one(array::from_fn(|_| OnceBox::new()))
}

/// The trunks of a device; guarded by the trunks lock.
#[derive(Default)]
pub(super) struct Trunks {
    /// May be used.
    pub(super) owned: TrunkSet,
    /// Of these, the ones whose clusters are still absent.
    pub(super) fresh: TrunkSet,
}

pub(super) struct Device {
    pub(super) id: DeviceId,
    /// Between swapon and the end of swapoff.
    known: AtomicBool,
    /// Gives slots.
    on: AtomicBool,
    priority: AtomicI32,
    rotational: AtomicBool,
    discard: AtomicBool,
    first: AtomicU64,
    /// Slots from here on are beyond the end.
    end: AtomicU64,
    /// Clusters in a trunk.
    trunk_clusters: AtomicU32,
    shards: Box<[Shard]>,
    directory: Box<[OnceBox<[Chunk; 1]>]>,
    trunks: Lock<Trunks>,
    /// How many trunks are fresh: a guess without the lock.
    fresh: AtomicUsize,
    /// Where a rotational device goes on, per order; 0 is nowhere.
    pub(super) bases: [AtomicU64; ORDERS],
}

impl Device {
    /// A device that is off and has nothing; `None` without memory.
    pub(super) fn new(id: DeviceId, cpus: usize) -> Option<Self> {
        let mut shards = Vec::new();
        shards.try_reserve_exact(cpus).ok()?;
        shards.extend((0..cpus).map(|_| Shard::new()));
        let mut directory = Vec::new();
        directory.try_reserve_exact(CHUNKS).ok()?;
        directory.extend((0..CHUNKS).map(|_| OnceBox::new()));
        Some(Self {
            id,
            known: AtomicBool::new(false),
            on: AtomicBool::new(false),
            priority: AtomicI32::new(0),
            rotational: AtomicBool::new(false),
            discard: AtomicBool::new(false),
            first: AtomicU64::new(0),
            end: AtomicU64::new(0),
            trunk_clusters: AtomicU32::new(1),
            shards: shards.into(),
            directory: directory.into(),
            trunks: Lock::new(Trunks::default(), &DEVICE_LOCKS),
            fresh: AtomicUsize::new(0),
            bases: array::from_fn(|_| AtomicU64::new(0)),
        })
    }

    /// Takes on a new life as `config` says; the device is off and holds nothing. `false` without memory.
    pub(super) fn configure(&self, config: &DeviceConfig) -> bool {
        let trunks = config.slots.div_ceil((config.trunk_clusters * CLUSTER_SLOTS) as u64) as u32;
        let (Some(owned), Some(fresh)) = (TrunkSet::first(trunks), TrunkSet::first(trunks)) else {
            return false;
        };
        let mut guard = self.trunks.lock();
        let old = core::mem::replace(&mut *guard, Trunks { owned, fresh });
        self.priority.store(config.priority, Relaxed);
        self.rotational.store(config.rotational, Relaxed);
        self.discard.store(config.discard, Relaxed);
        self.first.store(config.first, Relaxed);
        self.end.store(config.slots, Relaxed);
        self.trunk_clusters.store(config.trunk_clusters as u32, Relaxed);
        self.fresh.store(trunks as usize, Relaxed);
        self.known.store(true, Release);
        self.bases.iter().for_each(|base| base.store(0, Relaxed));
        drop(guard);
        drop(old);
        true
    }

    pub(super) fn is_known(&self) -> bool {
        self.known.load(Acquire)
    }

    pub(super) fn is_on(&self) -> bool {
        self.on.load(Acquire)
    }

    pub(super) fn set_on(&self, on: bool) {
        self.on.store(on, Release);
    }

    pub(super) fn end(&self) -> u64 {
        self.end.load(Relaxed)
    }

    pub(super) fn discards(&self) -> bool {
        self.discard.load(Relaxed)
    }

    pub(super) fn is_rotational(&self) -> bool {
        self.rotational.load(Relaxed)
    }

    /// The entry of the first slot of a cluster.
    pub(super) fn base(&self, index: u32) -> Entry {
        Entry::new(self.id, index as u64 * CLUSTER_SLOTS as u64)
    }

    /// How many shards are in use: one where all CPUs share one base.
    pub(super) fn spread(&self) -> usize {
        if self.is_rotational() {
            1
        } else {
            self.shards.len()
        }
    }

    pub(super) fn shard(&self, at: usize) -> &Shard {
        &self.shards[at]
    }

    pub(super) fn has_fresh(&self) -> bool {
        self.fresh.load(Relaxed) != 0
    }

    #[cfg(any(test, feature = "simulated", loom, shuttle))]
    pub(super) fn trunks(&self) -> Guard<'_, Trunks> {
        self.trunks.lock()
    }

    /// Slots in a trunk.
    pub(super) fn trunk_slots(&self) -> u64 {
        u64::from(self.trunk_clusters.load(Relaxed)) * CLUSTER_SLOTS as u64
    }

    /// The trunk that a cluster is in.
    pub(super) fn trunk_of(&self, index: u32) -> u32 {
        index / self.trunk_clusters.load(Relaxed)
    }

    /// The clusters of a trunk: all of one group.
    fn clusters_of(&self, trunk: u32) -> Range<u32> {
        let clusters = self.trunk_clusters.load(Relaxed);
        trunk * clusters..(trunk + 1) * clusters
    }

    /// Makes the descriptor of a cluster if it never was, with those of its group; `None` without memory.
    fn make(&self, index: u32, spares: &Spares, memory: Memory) -> Option<()> {
        let group = index as usize / TRUNK_CLUSTERS;
        let chunk = self.directory.get(group / CHUNK_GROUPS)?;
        let chunk = chunk.get_or_try_init(|| spares.chunk(memory).ok_or(())).ok()?;
        let made = chunk[0][group % CHUNK_GROUPS].get_or_try_init(|| spares.group(memory).ok_or(()));
        made.ok().map(drop)
    }

    /// The cluster, if its trunk was ever used.
    pub(super) fn get(&self, index: u32) -> Option<&Cluster> {
        let group = index as usize / TRUNK_CLUSTERS;
        // Not that of `NOBODY`, where a list has none any more.
        let chunk = self.directory.get(group / CHUNK_GROUPS)?.get()?;
        chunk[0][group % CHUNK_GROUPS].get().map(|group| &group[0][index as usize % TRUNK_CLUSTERS])
    }

    /// The same of one whose trunk was.
    pub(super) fn cluster(&self, index: u32) -> &Cluster {
        self.get(index).expect("a cluster on a list was made")
    }

    /// All clusters that were ever used, with their numbers, ascending from cluster `from`.
    pub(super) fn clusters(&self, from: u32) -> impl Iterator<Item = (u32, &Cluster)> {
        let first = from as usize / TRUNK_CLUSTERS;
        let chunks = self.directory.iter().enumerate().skip(first / CHUNK_GROUPS);
        chunks
            .filter_map(|(i, chunk)| Some((i, chunk.get()?)))
            .flat_map(|(i, chunk)| {
                chunk[0].iter().enumerate().map(move |(j, group)| (i * CHUNK_GROUPS + j, group))
            })
            .skip_while(move |(i, _)| *i < first)
            .filter_map(|(i, group)| Some((i, group.get()?)))
            .flat_map(|(i, group)| {
                let first = i * TRUNK_CLUSTERS;
                group[0].iter().enumerate().map(move |(j, cluster)| ((first + j) as u32, cluster))
            })
            .skip_while(move |(index, _)| *index < from)
    }

    /// Moves a cluster, whose lock the caller holds, to where it belongs now. A bare place takes its
    /// table, the others leave it. Runs `room` under the list lock if order 0 can have a slot where it could have none before.
    /// Returns what that left over.
    pub(super) fn move_to(
        &self,
        index: u32,
        cluster: &Cluster,
        state: &mut State,
        to: Listed,
        room: impl FnOnce(),
    ) -> Leftover {
        let mut leftover = Leftover::default();
        let from = cluster.listed();
        let shard = &self.shards[cluster.shard()];
        let mut lists = shard.lock();
        lists.place(self, index, cluster, to);
        if to.is_bare() {
            leftover = state.reset();
            leftover.table = leftover.table.and_then(|table| lists.keep(table));
        }
        shard.publish(&lists);
        if to.has_room() && !from.has_room() {
            room();
        }
        leftover
    }

    /// Takes the first cluster of a list of a shard that nobody works in, for `order`.
    pub(super) fn pick(&self, shard: usize, from: Listed, order: u8) -> Pick<'_> {
        let shard = &self.shards[shard];
        if !shard.may_have(from) {
            return Pick::Empty;
        }
        let mut lists = shard.lock();
        let mut index = lists.first(from);
        let mut busy = None;
        for _ in 0..lists.len(from).min(PICK_TRIES) {
            let cluster = self.cluster(index);
            let Some(mut state) = cluster.try_lock() else {
                busy = busy.or(Some((index, cluster)));
                index = cluster.next.load(Relaxed);
                continue;
            };
            if !from.is_bare() {
                lists.place(self, index, cluster, from);
            } else if !self.take_bare(&mut lists, index, cluster, &mut state, order) {
                return Pick::NeedTable;
            }
            shard.publish(&lists);
            return Pick::Got(index, cluster, state);
        }
        busy.map_or(Pick::Empty, |(index, cluster)| Pick::Busy(index, cluster))
    }

    /// Gives a bare cluster, whose lock and whose lists' the caller holds, to `order`; `false` without a table.
    fn take_bare(
        &self,
        lists: &mut Lists,
        index: u32,
        cluster: &Cluster,
        state: &mut State,
        order: u8,
    ) -> bool {
        let Some(table) = lists.spare().pop() else { return false };
        state.table = Some(table);
        state.order = order;
        // The whole cluster goes to one run: it is full as soon as the lock is free again.
        let to = if super::cluster::fills(order) { Listed::FULL } else { Listed::nonfull(order) };
        lists.place(self, index, cluster, to);
        true
    }

    /// Takes a bare cluster, whose lock the caller holds, for `order`; `false` without a table.
    pub(super) fn claim(&self, index: u32, cluster: &Cluster, state: &mut State, order: u8) -> bool {
        let shard = &self.shards[cluster.shard()];
        let mut lists = shard.lock();
        let taken = self.take_bare(&mut lists, index, cluster, state, order);
        shard.publish(&lists);
        taken
    }

    /// The first cluster of a list of a shard, not locked: a guess.
    pub(super) fn first_of(&self, shard: usize, listed: Listed) -> Option<(u32, &Cluster)> {
        let shard = &self.shards[shard];
        if !shard.may_have(listed) {
            return None;
        }
        let index = shard.lock().first(listed);
        self.get(index).map(|cluster| (index, cluster))
    }

    /// The entry of the first slot of the cluster after this one, or of the first of all.
    pub(super) fn base_after(&self, index: u32) -> Entry {
        let next = (index as u64 + 1) * CLUSTER_SLOTS as u64;
        self.base(if next < self.end() { index + 1 } else { 0 })
    }

    pub(super) fn priority(&self) -> i32 {
        self.priority.load(Relaxed)
    }

    /// Gives a shard a table to use for its next free cluster; `false` without memory.
    pub(super) fn add_spare(&self, shard: usize, spares: &Spares, memory: Memory) -> bool {
        let Some(table) = spares.table(memory) else { return false };
        let left = self.shards[shard].lock().keep(table);
        spares.give(left);
        true
    }

    /// Lets a shard have the clusters of a trunk that was not used yet: `wanted`, or the lowest. Returns
    /// whether there was one.
    pub(super) fn adopt(
        &self,
        shard: usize,
        wanted: Option<u32>,
        (spares, memory): (&Spares, Memory),
        mut room: impl FnMut(),
    ) -> Result<bool, NoMemory> {
        if !self.has_fresh() {
            return Ok(false);
        }
        // Before the lock: see what `Spares` says of loom.
        let each = self.trunk_clusters.load(Relaxed);
        let lowest = || self.trunks.lock().fresh.lowest();
        let Some(number) = wanted.or_else(lowest) else { return Ok(false) };
        let clusters = number * each..(number + 1) * each;
        self.make(clusters.start, spares, memory).ok_or(NoMemory)?;
        let tables = self.trim_tables(number, spares, memory).ok_or(NoMemory)?;
        let made = tables.iter().flatten().count();
        let mut tables = tables.into_iter().flatten();
        let mut trunks = self.trunks.lock();
        // Under the lock that swapoff takes after it switched the device off. One that came since may have other trunks, or a
        // header.
        let is_it = self.is_on()
            && clusters == self.clusters_of(number)
            && (self.cut_clusters(number).count() <= made || makes(Flaw::TablesUnsure));
        if !is_it || !trunks.fresh.remove(number) && !makes(Flaw::AdoptTwice) {
            // Another CPU was quicker: what it adopted is for all.
            return Ok(self.is_on() && wanted.is_none());
        }
        self.fresh.fetch_sub(1, Relaxed);
        for index in clusters {
            let (first, end) = self.limits(index);
            if first >= end {
                continue;
            }
            let cluster = self.cluster(index);
            let mut state = cluster.lock();
            cluster.set_shard(shard);
            let mut to = Listed::FREE;
            if (first, end) != (0, CLUSTER_SLOTS) {
                // Never whole, so never free: it starts as a cluster for single pages.
                state.table = tables.next();
                state.trim(first, end);
                to = Listed::nonfull(0);
            }
            let _ = self.move_to(index, cluster, &mut state, to, &mut room);
        }
        Ok(true)
    }

    /// The clusters of a trunk that the header or the end of the device cut short: two at most.
    fn cut_clusters(&self, trunk: u32) -> impl Iterator<Item = u32> + '_ {
        self.clusters_of(trunk).filter(|&index| {
            let (first, end) = self.limits(index);
            first < end && (first, end) != (0, CLUSTER_SLOTS)
        })
    }

    /// Tables for these.
    fn trim_tables(&self, trunk: u32, spares: &Spares, memory: Memory) -> Option<[Option<One<Table>>; 2]> {
        let mut cut = self.cut_clusters(trunk);
        let mut tables = [None, None];
        for table in &mut tables {
            if cut.next().is_some() {
                *table = Some(spares.table(memory)?);
            }
        }
        Some(tables)
    }

    /// Which slots of a cluster are for pages.
    fn limits(&self, index: u32) -> (usize, usize) {
        let start = index as u64 * CLUSTER_SLOTS as u64;
        let within = |slot: u64| slot.saturating_sub(start).min(CLUSTER_SLOTS as u64) as usize;
        (within(self.first.load(Relaxed)), within(self.end()))
    }

    /// A leased trunk comes. `false` if it is there already, or out of range.
    pub(super) fn add_trunk(&self, number: u32, memory: Memory) -> Result<bool, NoMemory> {
        if u64::from(number) >= MAX_SLOTS / self.trunk_slots() {
            return Ok(false);
        }
        self.make_room(number, memory).ok_or(NoMemory)?;
        let mut trunks = self.trunks.lock();
        if !trunks.owned.insert(number) {
            return Ok(false);
        }
        trunks.fresh.insert(number);
        self.end.fetch_max((number as u64 + 1) * self.trunk_slots(), Relaxed);
        self.fresh.fetch_add(1, Relaxed);
        Ok(true)
    }

    /// Has this trunk's number fit.
    fn make_room(&self, number: u32, memory: Memory) -> Option<()> {
        let fits = {
            let trunks = self.trunks.lock();
            trunks.owned.fits(number) && trunks.fresh.fits(number)
        };
        if !fits {
            let room = || memory.or_new(None, || TrunkSet::room(number));
            let (mut owned_room, mut fresh_room) = (room()?, room()?);
            let mut trunks = self.trunks.lock();
            trunks.owned.grow(&mut owned_room);
            trunks.fresh.grow(&mut fresh_room);
        }
        Some(())
    }

    /// Has the numbers fit that come next, most likely. From a thread that may allocate.
    pub(super) fn refill(&self) {
        let last = (self.end() / self.trunk_slots()) as u32 + NEXT_TRUNKS;
        // Without memory it is tried again.
        let _ = self.make_room(last, Memory::Asked);
    }

    /// Whether all slots of a trunk are for pages.
    fn is_whole(&self, number: u32) -> bool {
        let start = number as u64 * self.trunk_slots();
        self.first.load(Relaxed) <= start && start + self.trunk_slots() <= self.end()
    }

    /// A trunk none of whose slots is used goes, if there are more than `kept` such: its number. One that holds the
    /// header, or that the device's end cuts short, stays.
    pub(super) fn take_empty_trunk(&self, kept: usize) -> Option<u32> {
        let mut trunks = self.trunks.lock();
        let Trunks { owned, fresh } = &*trunks;
        let seems_empty = |&number: &u32| {
            let is_bare = |index| self.get(index).is_some_and(|cluster| cluster.listed().is_bare());
            self.is_whole(number) && (fresh.contains(number) || self.clusters_of(number).all(is_bare))
        };
        let goes = |&number: &u32| fresh.contains(number) || self.empty_trunk(number);
        let number = owned.iter().filter(seems_empty).skip(kept).find(goes)?;
        if trunks.fresh.remove(number) {
            self.fresh.fetch_sub(1, Relaxed);
        }
        trunks.owned.remove(number);
        Some(number)
    }

    /// Makes all clusters of a trunk absent if all are bare; the trunks lock is held.
    fn empty_trunk(&self, number: u32) -> bool {
        let clusters = self.clusters_of(number);
        let taken = clusters.clone().find(|&index| {
            let cluster = self.cluster(index);
            let mut state = cluster.lock();
            let in_use = !cluster.listed().is_bare() && !makes(Flaw::TrunkUnsure);
            if !in_use {
                let _ = self.move_to(index, cluster, &mut state, Listed::ABSENT, || ());
            }
            in_use
        });
        // Somebody was quicker and uses a slot now. Who found no room meanwhile looks again with the trunks lock.
        for index in clusters.start..taken.unwrap_or(clusters.start) {
            let cluster = self.cluster(index);
            let mut state = cluster.lock();
            let to = if self.discards() { Listed::DISCARD } else { Listed::FREE };
            let _ = self.move_to(index, cluster, &mut state, to, || ());
        }
        taken.is_none()
    }

    /// Whether order 0 can have a slot: looks under the locks, so the answer is not a guess.
    pub(super) fn has_room(&self) -> bool {
        // Held over both: it waits for a trunk that is between fresh and free.
        let mut trunks = self.trunks.lock();
        trunks.fresh.lowest().is_some() || self.shards.iter().any(|shard| shard.lock().has_room())
    }

    /// Every trunk that the device has is fresh again, as after swapon. All slots are free, the device
    /// is off, and nobody discards.
    pub(super) fn renew(&self) {
        let mut trunks = self.trunks.lock();
        for (index, cluster) in self.clusters(0) {
            let mut state = cluster.lock();
            if cluster.listed() != Listed::ABSENT {
                let first = self.move_to(index, cluster, &mut state, Listed::ABSENT, || ());
                let second = state.reset();
                drop(state);
                drop((first, second));
            }
        }
        self.known.store(false, Relaxed);
        *trunks = Trunks::default();
        self.fresh.store(0, Relaxed);
        for shard in &self.shards {
            while let Some(table) = { shard.lock().spare().pop() } {
                drop(table);
            }
        }
    }

    /// Waits until everybody who began to allocate while the device was on is done with it.
    pub(super) fn settle(&self) {
        drop(self.trunks.lock());
        for (_, cluster) in self.clusters(0) {
            drop(cluster.lock());
        }
    }
}
