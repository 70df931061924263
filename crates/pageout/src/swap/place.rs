//! The devices of an engine with the slots on them.
//!
//! Slots come by trunks that are leased (from `pageout run`, or from oneself): when none is left the
//! [`Lessor`] is asked, by reclaim only, never on the fault path.

use crate::device::Device;
use crate::slot::{DeviceConfig, DeviceId, Entry, Owner, Slots, CLUSTER_SLOTS, SLOT_BYTES};
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use alloc::boxed::Box;
use alloc::vec::Vec;

const CLUSTER_BYTES: u64 = CLUSTER_SLOTS as u64 * SLOT_BYTES;

/// Who gives trunks.
pub trait Lessor: Send + Sync {
    /// A trunk of device `device` (by its place in the list of devices). `None`: there is no more. May
    /// wait; no lock held.
    fn lease(&self, device: usize) -> Option<u32>;

    /// A wholly free trunk goes back.
    fn give_back(&self, device: usize, trunk: u32);
}

/// Devices and slots.
pub struct Place {
    slots: Slots,
    devices: Vec<(DeviceId, Box<dyn Device>)>,
    lessor: Box<dyn Lessor>,
    swapped: AtomicU64,
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
        Self { slots, devices, lessor, swapped: AtomicU64::new(0), full: AtomicBool::new(false) }
    }

    /// A run of up to `n` slots for the pages from `page` (a page number) on, and how many they are: a
    /// power of two, smaller where the devices are fragmented. `None`: all are full.
    pub fn alloc(&self, cpu: usize, n: usize, page: u64) -> Option<(u64, usize)> {
        let mut order = (usize::BITS - 1 - n.leading_zeros()) as u8;
        loop {
            if let Some(entry) = self.slots.alloc(cpu, order, Owner { space: 0, page }) {
                self.swapped.fetch_add(1 << order, Relaxed);
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
        if let Err(wrong) = self.slots.put(entry, n) {
            panic!("slot put twice: {wrong:?}");
        }
        self.swapped.fetch_sub(n as u64, Relaxed);
    }

    /// One more page names each of `n` slots.
    pub fn dup(&self, raw: u64, n: usize) {
        let entry = Entry::from_raw(raw).expect("entry of a page word");
        if let Err(wrong) = self.slots.dup(entry, n) {
            panic!("slot counted though free: {wrong:?}");
        }
        self.swapped.fetch_add(n as u64, Relaxed);
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

    /// How many page words name the slot of an entry, as its own word says; for tests.
    #[cfg(any(test, feature = "simulated"))]
    pub fn count(&self, raw: u64) -> Option<u32> {
        Some(self.slots.look(Entry::from_raw(raw)?).ok()?.1)
    }
}
