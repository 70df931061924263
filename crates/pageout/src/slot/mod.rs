//! Slots: who gets which place on which swap device.
//!
//! A device is cut into clusters of 512 slots. A cluster serves one order at a time, under a lock of its
//! own; its slots have a word each that says how many name it and who did first. Which clusters are free,
//! have room, or are full is kept in lists under locks that CPUs seldom meet on. Each CPU has a hint per
//! order where it allocated last. A hint owns nothing: it is looked at under the cluster's lock and
//! dropped when it does not hold any more, so no CPU, thread or device that goes leaves anything behind.
//!
//! Order of attempts, for a run of an order on the device of highest priority: the hint; nonfull clusters
//! of the order; a free cluster; and single pages alone take, at last, from fragmented and then from nonfull
//! clusters of larger orders. Then the next device. That names of clean pages are given up where space is short is
//! the engine's matter (`Place::is_full`).
//!
//! Any thread may call anything here. Nothing in here does I/O or asks for memory with a cluster or list
//! lock held. It is asked for when a cluster that was free is used, or a trunk, and no table for it is at hand, for which
//! those that were kept ready are taken first ([`Slots::refill`]); and when a slot gets more names than its word counts.
//! Locks, outermost first: the numbers of devices, the trunks of one, cluster, lists. No two cluster locks are held together.
#![forbid(unsafe_code)]

mod alloc;
#[cfg(any(test, feature = "simulated", loom, shuttle))]
mod audit;
mod cluster;
mod device;
mod entry;
mod free;
mod lists;
mod spare;
mod switch;
mod table;
mod trunks;

pub use self::alloc::Lack;
#[cfg(any(test, feature = "simulated", loom, shuttle))]
pub use self::audit::{Cursor, DeviceUsage};
pub use self::cluster::CLUSTER_LOCKS;
pub use self::device::{DeviceConfig, NoMemory, DEVICE_LOCKS};
pub use self::entry::{DeviceId, Entry, Owner, WrongEntry, MAX_DEVICES, MAX_SLOTS, SLOT_BYTES};
pub use self::free::DupError;
pub use self::lists::LIST_LOCKS;
pub use self::spare::Memory;
pub use self::switch::{SwapoffError, SwaponError};
pub use crate::sync::LockClass;

use ::alloc::boxed::Box;
use ::alloc::vec::Vec;
use core::array;

use once_cell::race::OnceBox;

use self::cluster::Cluster;
use self::device::Device;
use self::spare::Spares;
use crate::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use crate::sync::Lock;

/// The order of a run that is a whole cluster.
#[cfg(not(loom))]
pub const CLUSTER_ORDER: u8 = 9;
/// Models have few slots, so that they meet every case.
#[cfg(loom)]
pub const CLUSTER_ORDER: u8 = 2;
/// Slots in a cluster.
pub const CLUSTER_SLOTS: usize = 1 << CLUSTER_ORDER;
/// Clusters in a trunk, the most that it can have.
pub const TRUNK_CLUSTERS: usize = if cfg!(loom) { 2 } else { 32 };
/// Slots in such a trunk: 64 MiB.
pub const TRUNK_SLOTS: u64 = (TRUNK_CLUSTERS * CLUSTER_SLOTS) as u64;
/// How many orders there are: 0 to [`CLUSTER_ORDER`].
pub const ORDERS: usize = CLUSTER_ORDER as usize + 1;

/// What a CPU remembers. Nothing depends on it.
#[repr(align(128))]
struct Cpu {
    /// Per order the entry to look at first, or 0.
    hints: [AtomicU64; ORDERS],
    /// Whose turn it is among devices of equal priority.
    turn: AtomicU32,
}

/// The slots of all swap devices.
pub struct Slots {
    cpus: Box<[Cpu]>,
    devices: [OnceBox<[Device; 1]>; MAX_DEVICES],
    /// A bit for each device that is on and seems to have room. Set under the list lock that room appears
    /// under; who clears it looks under all list locks of the device afterwards.
    available: AtomicU64,
    /// A bit for each device number in use; held while a device comes or goes.
    numbers: Lock<u64>,
    spares: Spares,
}

impl Slots {
    /// An allocator without devices. CPU numbers from `cpus` on share with lower ones.
    pub fn new(cpus: usize) -> Self {
        let cpus: Vec<Cpu> = (0..cpus.clamp(1, 1024))
            .map(|cpu| Cpu { hints: array::from_fn(|_| AtomicU64::new(0)), turn: AtomicU32::new(cpu as u32) })
            .collect();
        Self {
            cpus: cpus.into(),
            devices: array::from_fn(|_| OnceBox::new()),
            available: AtomicU64::new(0),
            numbers: Lock::new(0, &DEVICE_LOCKS),
            spares: Spares::new(),
        }
    }

    fn device(&self, id: DeviceId) -> Option<&Device> {
        self.devices[id.index()].get().map(|device| &device[0])
    }

    /// The cluster that an entry is in, if anything of its trunk was ever used.
    fn locate(&self, entry: Entry) -> Result<(&Device, u32, &Cluster), WrongEntry> {
        let device = entry.device().and_then(|id| self.device(id)).filter(|device| device.is_known());
        let device = device.ok_or(WrongEntry::BadDevice(entry))?;
        if entry.slot() >= device.end() {
            return Err(WrongEntry::BeyondEnd(entry));
        }
        let index = entry.cluster();
        let cluster = device.get(index).ok_or(WrongEntry::FreeSlot(entry))?;
        Ok((device, index, cluster))
    }

    /// Room appeared on a device; its list lock is held.
    fn mark_available(&self, device: &Device) {
        let bit = device.id.bit();
        if self.available.load(Relaxed) & bit == 0 {
            self.available.fetch_or(bit, Relaxed);
        }
    }
}
