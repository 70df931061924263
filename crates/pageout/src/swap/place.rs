//! The devices of an engine with the slots on them.
//!
//! Slots come by trunks that are leased (from `pageout run`, or from oneself): when none is left the
//! [`Lessor`] is asked, by reclaim only, never on the fault path.

use crate::device::Device;
use crate::slot::{DeviceConfig, DeviceId, Entry, Owner, Slots};
use crate::slot::{CLUSTER_SLOTS, MAX_DEVICES, SLOT_BYTES, TRUNK_SLOTS};
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use alloc::boxed::Box;
use alloc::vec::Vec;
use once_cell::race::OnceBox;

const CLUSTER_BYTES: u64 = CLUSTER_SLOTS as u64 * SLOT_BYTES;

/// Who gives trunks.
pub trait Lessor: Send + Sync {
    /// A trunk of device `device` (by its place in the list of devices). `None`: there is no more. May
    /// wait; no lock held.
    fn lease(&self, device: usize) -> Option<u32>;

    /// A wholly free trunk goes back.
    fn give_back(&self, device: usize, trunk: u32);
}

/// The trunk of an entry, with its device's number.
fn trunk_of(entry: Entry) -> Option<(usize, u32)> {
    Some((entry.device()?.index(), (entry.slot() / TRUNK_SLOTS) as u32))
}

/// Devices and slots.
pub struct Place {
    slots: Slots,
    devices: Vec<(DeviceId, Box<dyn Device>)>,
    lessor: Box<dyn Lessor>,
    /// Trunks of others that this process reads from: device number and trunk, in order.
    foreign: OnceBox<Vec<(usize, u32)>>,
    /// A slot may have more than one name.
    shares: AtomicBool,
    swapped: AtomicU64,
    /// The same by device number.
    used: [AtomicU64; MAX_DEVICES],
    full: AtomicBool,
}

impl Place {
    /// Takes devices on. The configurations say priority and the like; room comes by leases.
    pub fn new(
        cpus: usize,
        devices: impl IntoIterator<Item = (DeviceConfig, Box<dyn Device>)>,
        lessor: Box<dyn Lessor>,
    ) -> Self {
        let slots = Slots::new(cpus);
        let devices = devices
            .into_iter()
            .filter_map(|(config, device)| Some((slots.swapon(config).ok()?, device)))
            .collect();
        let used = core::array::from_fn(|_| AtomicU64::new(0));
        Self {
            slots,
            devices,
            lessor,
            foreign: OnceBox::new(),
            shares: AtomicBool::new(false),
            swapped: AtomicU64::new(0),
            used,
            full: AtomicBool::new(false),
        }
    }

    /// `n` names of slots from `entry` on came to be.
    fn named(&self, entry: Entry, n: usize) {
        self.swapped.fetch_add(n as u64, Relaxed);
        if let Some(id) = entry.device() {
            self.used[id.index()].fetch_add(n as u64, Relaxed);
        }
    }

    /// A run of up to `n` slots for the pages from `page` (a page number) on, and how many they are: a
    /// power of two, smaller where the devices are fragmented. `None`: all are full.
    pub fn alloc(&self, cpu: usize, n: usize, page: u64) -> Option<(u64, usize)> {
        let mut order = (usize::BITS - 1 - n.leading_zeros()) as u8;
        loop {
            if let Some(entry) = self.slots.alloc(cpu, order, Owner { space: 0, page }) {
                self.named(entry, 1 << order);
                return Some((entry.raw(), 1 << order));
            }
            // A fresh trunk keeps large runs whole; only when there is none are they cut up.
            if self.grow() {
                continue;
            }
            if order == 0 {
                self.full.store(true, Relaxed);
                return None;
            }
            order -= 1;
        }
    }

    fn grow(&self) -> bool {
        self.devices.iter().enumerate().any(|(index, (id, _))| {
            self.lessor.lease(index).is_some_and(|trunk| self.slots.add_trunk(*id, trunk))
        })
    }

    /// One page's name of each of `n` slots is gone.
    pub fn put(&self, raw: u64, n: usize) {
        let entry = Entry::from_raw(raw).expect("entry of a page word");
        if !self.is_foreign(entry) {
            if let Err(wrong) = self.slots.put(entry, n) {
                panic!("slot put twice: {wrong:?}");
            }
        }
        self.swapped.fetch_sub(n as u64, Relaxed);
        if let Some(id) = entry.device() {
            self.used[id.index()].fetch_sub(n as u64, Relaxed);
        }
    }

    /// One more page names each of `n` slots.
    pub fn dup(&self, raw: u64, n: usize) {
        self.shares.store(true, Relaxed);
        let entry = Entry::from_raw(raw).expect("entry of a page word");
        if !self.is_foreign(entry) {
            if let Err(wrong) = self.slots.dup(entry, n) {
                panic!("slot counted though free: {wrong:?}");
            }
        }
        self.named(entry, n);
    }

    /// From here on the trunks of these entries, which are not this process's, are read from, and their slots counted
    /// by who lent them. Once, before there is any entry.
    pub fn read_from_others(&self, entries: impl Iterator<Item = u64>) {
        let mut trunks: Vec<(usize, u32)> = Vec::new();
        for trunk in entries.filter_map(|raw| trunk_of(Entry::from_raw(raw)?)) {
            if trunks.last() != Some(&trunk) {
                trunks.push(trunk);
            }
        }
        trunks.sort_unstable();
        trunks.dedup();
        let _ = self.foreign.set(Box::new(trunks));
    }

    /// Does anybody else name the slot of an entry? Then it must not be written again.
    pub fn is_shared(&self, raw: u64) -> bool {
        if !self.shares.load(Relaxed) {
            return false;
        }
        let entry = Entry::from_raw(raw).expect("entry of a page word");
        self.is_foreign(entry) || self.slots.look(entry).is_ok_and(|(_, count)| count > 1)
    }

    fn is_foreign(&self, entry: Entry) -> bool {
        let Some(trunks) = self.foreign.get() else { return false };
        trunk_of(entry).is_some_and(|trunk| trunks.binary_search(&trunk).is_ok())
    }

    /// The device of an entry and the byte offset there.
    pub fn locate(&self, raw: u64) -> Option<(&dyn Device, u64)> {
        let entry = Entry::from_raw(raw)?;
        let id = entry.device()?;
        let (_, device) = self.devices.iter().find(|(known, _)| *known == id)?;
        Some((&**device, entry.offset_bytes()))
    }

    /// Tells a device that discards about one cluster of 2 MiB that nobody uses any more; `false` when there is
    /// none. May wait for the device; no lock held.
    pub fn discard(&self) -> bool {
        self.devices.iter().any(|(id, device)| {
            let Some(entry) = self.slots.take_discard(*id) else { return false };
            // Advice: what cannot be discarded is only kept longer.
            let _ = device.discard(entry.offset_bytes(), CLUSTER_BYTES);
            self.slots.discarded(entry);
            true
        })
    }

    /// Has a page found no place?
    pub fn is_full(&self) -> bool {
        self.full.load(Relaxed)
    }

    /// Names of slots in use.
    pub fn swapped(&self) -> u64 {
        self.swapped.load(Relaxed)
    }

    /// The same of one device, by its place in the list of devices.
    pub fn used(&self, device: usize) -> u64 {
        self.devices.get(device).map_or(0, |(id, _)| self.used[id.index()].load(Relaxed))
    }

    /// How many page words name the slot of an entry, as its own word says; for tests.
    #[cfg(any(test, feature = "simulated"))]
    pub fn count(&self, raw: u64) -> Option<u32> {
        Some(self.slots.look(Entry::from_raw(raw)?).ok()?.1)
    }
}
