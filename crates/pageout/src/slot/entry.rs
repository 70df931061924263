//! Names: the entry that says where a page is swapped to, the device it lies on, and who it belongs to.

use core::fmt;
use core::num::NonZeroU64;

use super::CLUSTER_SLOTS;

const SLOT_BITS: u32 = 34;
const SLOT_MASK: u64 = (1 << SLOT_BITS) - 1;

/// Bytes of one slot: room for one page.
pub const SLOT_BYTES: u64 = 4096;
/// The most slots that a device can have: 64 TiB.
pub const MAX_SLOTS: u64 = if cfg!(loom) { 1 << 12 } else { 1 << SLOT_BITS };
/// The most devices at once.
pub const MAX_DEVICES: usize = 63;

/// A swap device that is on: its number, used again after swapoff.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct DeviceId(u8);

impl DeviceId {
    /// The device of number `index`, if there can be one.
    pub const fn new(index: usize) -> Option<Self> {
        if index < MAX_DEVICES {
            Some(Self(index as u8))
        } else {
            None
        }
    }

    /// The number, below [`MAX_DEVICES`].
    pub const fn index(self) -> usize {
        self.0 as usize
    }

    pub(super) const fn bit(self) -> u64 {
        1 << self.0
    }
}

/// Where a page is swapped to: a slot of a device, in 40 bits, never 0.
///
/// A run of `1 << order` slots goes by the entry of its first slot; [`Entry::at`] names the others.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Entry(NonZeroU64);

impl Entry {
    /// The bits that [`Entry::raw`] needs.
    pub const BITS: u32 = 40;
    /// An entry that names no slot of any device; what arrays of entries start with.
    pub const INVALID: Entry = Entry(NonZeroU64::MIN);

    /// The entry of `slot` on `device`. `slot` is below [`MAX_SLOTS`].
    pub const fn new(device: DeviceId, slot: u64) -> Self {
        assert!(slot <= SLOT_MASK);
        match NonZeroU64::new(((device.0 as u64 + 1) << SLOT_BITS) | slot) {
            Some(raw) => Self(raw),
            None => Self::INVALID,
        }
    }

    /// What [`Entry::raw`] gave; `None` for 0 and for what needs more than 40 bits.
    pub const fn from_raw(raw: u64) -> Option<Self> {
        if raw >> Self::BITS != 0 {
            return None;
        }
        match NonZeroU64::new(raw) {
            Some(raw) => Some(Self(raw)),
            None => None,
        }
    }

    /// As a number of 40 bits, not 0, to keep in a page's word.
    pub const fn raw(self) -> u64 {
        self.0.get()
    }

    /// Whether this can name a slot at all.
    pub const fn is_valid(self) -> bool {
        self.0.get() >> SLOT_BITS != 0
    }

    /// The device; `None` for an invalid entry.
    pub const fn device(self) -> Option<DeviceId> {
        match (self.0.get() >> SLOT_BITS) as u8 {
            0 => None,
            tag => Some(DeviceId(tag - 1)),
        }
    }

    /// The slot on the device.
    pub const fn slot(self) -> u64 {
        self.0.get() & SLOT_MASK
    }

    /// Where on the device the slot starts, in bytes.
    pub const fn offset_bytes(self) -> u64 {
        self.slot() * SLOT_BYTES
    }

    /// The `i`th slot of the run that starts here. A run stays inside one cluster.
    pub fn at(self, i: usize) -> Self {
        debug_assert!(self.offset_in_cluster() + i < CLUSTER_SLOTS, "a run never leaves its cluster");
        Self(self.0.saturating_add(i as u64))
    }

    pub(super) const fn cluster(self) -> u32 {
        (self.slot() / CLUSTER_SLOTS as u64) as u32
    }

    pub(super) const fn offset_in_cluster(self) -> usize {
        (self.slot() % CLUSTER_SLOTS as u64) as usize
    }
}

impl fmt::Debug for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.device() {
            Some(device) => write!(f, "device {} slot {}", device.0, self.slot()),
            None => f.write_str("invalid entry"),
        }
    }
}

/// Who named a slot first: an address space and the number of a page in it.
///
/// Tells which pages lie beside each other on the device. A hint: the page may have moved since, or be another process's
/// after a fork.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Owner {
    /// The address space.
    pub space: u16,
    /// The page's address divided by 4096; below 2^36.
    pub page: u64,
}

/// An entry that names no used slot: what is wrong, and where.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum WrongEntry {
    /// There is no such device.
    BadDevice(Entry),
    /// The device ends before this slot, or does not hold its trunk.
    BeyondEnd(Entry),
    /// Nobody uses this slot.
    FreeSlot(Entry),
    /// The slot is a bad one, or holds the device's header.
    BadSlot(Entry),
}

impl fmt::Display for WrongEntry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::BadDevice(entry) => write!(f, "swap entry {entry:?}: no such device"),
            Self::BeyondEnd(entry) => write!(f, "swap entry {entry:?}: beyond the end of the device"),
            Self::FreeSlot(entry) => write!(f, "swap entry {entry:?}: the slot is free"),
            Self::BadSlot(entry) => write!(f, "swap entry {entry:?}: the slot is not for pages"),
        }
    }
}

impl core::error::Error for WrongEntry {}
