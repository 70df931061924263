//! The devices of an engine with the slots on them.
//!
//! Slots come by trunks that are leased (from `pageout run`, or from oneself): when none is left the
//! [`Lessor`] is asked, by whoever lets pages leave: also by a fault that makes room by itself. It asks for no memory.
//!
//! Devices come and go. One that has slots in use stays, so whoever reads or writes slots that a page names finds
//! their device; the lock of its number is held to look, and while one comes, is on its way off, or goes. It comes before all
//! locks of `slot`.

use crate::device::Device;
use crate::flaw::{makes, Flaw};
use crate::slot::{DeviceConfig, DeviceId, Entry, Lack, Memory, NoMemory, Owner, Slots};
use crate::slot::{SwapoffError, SwaponError};
use crate::slot::{CLUSTER_SLOTS, MAX_DEVICES, SLOT_BYTES};
use crate::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use crate::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, AtomicUsize};
use crate::sync::{Lock, OTHER_LOCKS};
use alloc::boxed::Box;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::ops::Range;
use once_cell::race::OnceBox;

const CLUSTER_BYTES: u64 = CLUSTER_SLOTS as u64 * SLOT_BYTES;

/// Neighbouring slots, aligned: what a disk that turns reads at once.
pub const AROUND: usize = 16;

/// Of the names that there are when a page finds no place 1 in this many is to go before it is over.
const OWED: u64 = 4;
/// Free slots with which it is worth while to look for one again.
const SOME: i64 = 64;

/// For so long (ns) what could not be written to is shunned.
const SHUNNED_NS: u64 = 10_000_000_000;

/// Who gives trunks.
pub trait Lessor: Send + Sync {
    /// Trunks of the device of this serial, one at least. `None`: there is no more. May wait; no lock held.
    fn lease(&self, serial: usize) -> Option<Range<u32>>;

    /// A trunk goes back, of which no slot has a name. `false`: nobody takes it.
    fn give_back(&self, serial: usize, trunk: u32) -> bool;
}

/// The cluster of an entry, with its device's number.
fn cluster_of(entry: Entry) -> Option<(usize, u32)> {
    Some((entry.device()?.index(), (entry.slot() / CLUSTER_SLOTS as u64) as u32))
}

/// Devices and slots.
pub struct Place {
    slots: Slots,
    /// By their numbers.
    devices: [Lock<Option<Known>>; MAX_DEVICES],
    lessor: Box<dyn Lessor>,
    /// Clusters of others that this process reads from: device number and cluster, in order.
    foreign: OnceBox<Vec<(usize, u32)>>,
    /// Names of slots there.
    foreign_names: AtomicU64,
    /// Devices that have gone since, by their numbers: what has the number now is nothing of others.
    foreign_gone: AtomicU64,
    /// A slot may have more than one name.
    shares: AtomicBool,
    /// Whose turn it is to get a trunk among devices of equal priority.
    turn: AtomicUsize,
    swapped: AtomicU64,
    /// The same by device number.
    used: [AtomicU64; MAX_DEVICES],
    /// Of `swapped`, what is lent to a fork's child, or was and has not come back.
    bequeathed: AtomicU64,
    full: AtomicBool,
    /// Slots that came free since a page found no place, less those taken: about what there is by now.
    room: AtomicI64,
    /// Those that are to come free before it is over.
    owed: AtomicI64,
    /// A bit for each device number that is a disk that turns.
    turning: AtomicU64,
    /// A bit for each to which writing has failed: it gives slots when no other has any. Until when, ns.
    shunned: AtomicU64,
    shunned_until: AtomicU64,
    /// Until when no other than what is shunned is known to have any.
    failing_until: AtomicU64,
}

/// A device that is on, or on its way off.
struct Known {
    /// Tells it from those that had the number before.
    serial: usize,
    priority: i32,
    leaving: bool,
    device: Arc<dyn Device>,
}

impl Known {
    /// With what keeps it from going while a trunk of it is on its way: it could come again, under its serial.
    fn used_as(&self, id: DeviceId) -> (DeviceId, usize, Arc<dyn Device>) {
        (id, self.serial, self.device.clone())
    }
}

impl Place {
    /// Takes devices on. The configurations say priority and the like; room comes by leases. Number and serial of
    /// each are its place in the row.
    ///
    /// # Errors
    /// As [`Place::swapon`], of the first that is not taken.
    pub fn new(
        cpus: usize,
        devices: impl IntoIterator<Item = (DeviceConfig, Box<dyn Device>)>,
        lessor: Box<dyn Lessor>,
    ) -> Result<Self, SwaponError> {
        let place = Self {
            slots: Slots::new(cpus),
            devices: core::array::from_fn(|_| Lock::new(None, &OTHER_LOCKS)),
            lessor,
            foreign: OnceBox::new(),
            foreign_names: AtomicU64::new(0),
            foreign_gone: AtomicU64::new(0),
            shares: AtomicBool::new(false),
            turn: AtomicUsize::new(0),
            swapped: AtomicU64::new(0),
            bequeathed: AtomicU64::new(0),
            used: core::array::from_fn(|_| AtomicU64::new(0)),
            full: AtomicBool::new(false),
            room: AtomicI64::new(0),
            owed: AtomicI64::new(0),
            turning: AtomicU64::new(0),
            shunned: AtomicU64::new(0),
            shunned_until: AtomicU64::new(0),
            failing_until: AtomicU64::new(0),
        };
        for (number, (config, device)) in devices.into_iter().enumerate() {
            place.swapon(number, number, config, device)?;
        }
        Ok(place)
    }

    /// Takes a device on under a number that no other has; nobody ever had its serial.
    ///
    /// # Errors
    /// As [`Slots::swapon_as`]; `TooManyDevices` also for a number from [`MAX_DEVICES`] on.
    pub fn swapon(
        &self,
        number: usize,
        serial: usize,
        config: DeviceConfig,
        device: Box<dyn Device>,
    ) -> Result<(), SwaponError> {
        let id = DeviceId::new(number).ok_or(SwaponError::TooManyDevices)?;
        let mut known = self.devices[number].lock();
        self.slots.swapon_as(id, config)?;
        match config.rotational {
            true => self.turning.fetch_or(1 << number, Relaxed),
            false => self.turning.fetch_and(!(1 << number), Relaxed),
        };
        self.shunned.fetch_and(!(1 << number), Relaxed);
        *known = Some(Known { serial, priority: config.priority, leaving: false, device: device.into() });
        self.full.store(false, Relaxed);
        Ok(())
    }

    /// From when this returns no slot of the device is given any more. `false`: there is no such device. See
    /// `Engine::vacate` for what is on it.
    pub fn swapoff_begin(&self, number: usize) -> bool {
        self.set_leaving(number, true)
    }

    /// The device goes on as if [`Place::swapoff_begin`] had not been called. `false`: it has gone.
    pub fn swapoff_cancel(&self, number: usize) -> bool {
        self.set_leaving(number, false)
    }

    fn set_leaving(&self, number: usize, leaving: bool) -> bool {
        let Some(id) = DeviceId::new(number) else { return false };
        let mut known = self.devices[number].lock();
        let Some(known) = known.as_mut() else { return false };
        match leaving {
            true if makes(Flaw::LeavingGives) => {}
            true => drop(self.slots.swapoff_begin(id)),
            false => self.slots.swapoff_cancel(id),
        }
        known.leaving = leaving;
        true
    }

    /// A device that is on its way off leaves, if nothing is on it and nobody uses it. Its serial.
    ///
    /// # Errors
    /// Something is on it still; or there is no such device, or it is not on its way off.
    pub fn swapoff_end(&self, number: usize) -> Result<usize, SwapoffError> {
        let id = DeviceId::new(number).ok_or(SwapoffError::NoDevice)?;
        let mut guard = self.devices[number].lock();
        let known = guard.as_ref().filter(|known| known.leaving).ok_or(SwapoffError::NoDevice)?;
        // The slots that are others' are only in the count of names.
        match self.used(number) {
            0 => {}
            used => return Err(SwapoffError::InUse(used)),
        }
        // Who let the last slot go may not have let go of the device yet.
        if Arc::strong_count(&known.device) > 1 {
            return Err(SwapoffError::InUse(0));
        }
        self.slots.swapoff_end(id)?;
        self.foreign_gone.fetch_or(1 << number, Relaxed);
        let gone = guard.take();
        drop(guard);
        // Closes it.
        gone.map(|known| known.serial).ok_or(SwapoffError::NoDevice)
    }

    /// Makes the memory for slots that will be needed soon. From a thread that may allocate; no lock held.
    pub fn refill(&self) {
        self.slots.refill();
    }

    /// Is memory at hand for a fault that takes slots?
    pub(crate) fn is_stocked(&self) -> bool {
        self.slots.is_stocked()
    }

    /// Is this device on its way off?
    pub fn is_leaving(&self, number: usize) -> bool {
        self.devices[number].lock().as_ref().is_some_and(|known| known.leaving)
    }

    /// `n` names of slots from `entry` on came to be.
    fn named(&self, entry: Entry, n: usize) {
        self.swapped.fetch_add(n as u64, Relaxed);
        if let Some(id) = entry.device() {
            self.used[id.index()].fetch_add(n as u64, Relaxed);
        }
    }

    /// A run of up to `n` slots for the pages from `page` (a page number) on, and how many they are: a
    /// power of two, smaller where the devices are fragmented. `None`: all are full, or `memory` is.
    pub fn alloc(&self, cpu: usize, n: usize, page: u64, memory: Memory) -> Option<(u64, usize)> {
        let shunned = self.shunned.load(Relaxed);
        let mut found = self.alloc_but(shunned, cpu, n, page, memory);
        if shunned != 0 && found == Err(Lack::Slots) {
            // No other has any, and to be told so may have taken long.
            self.shunned.store(0, Relaxed);
            self.failing_until.store(self.shunned_until.load(Relaxed), Relaxed);
            found = self.alloc_but(0, cpu, n, page, memory);
        }
        if found.is_err() {
            // A fault may have found no memory only; an evictor finds out.
            if memory == Memory::Asked {
                self.owed.store((self.swapped() / OWED) as i64, Relaxed);
                self.full.store(true, Relaxed);
            }
            if self.is_full() {
                self.found_no_room();
            }
        }
        found.ok()
    }

    /// The same, of devices whose bits are not set in `not`.
    fn alloc_but(
        &self,
        not: u64,
        cpu: usize,
        n: usize,
        page: u64,
        memory: Memory,
    ) -> Result<(u64, usize), Lack> {
        // To be told again that there is none may take long.
        let mut may_grow = !self.is_full() || self.room.load(Relaxed) <= 0;
        let mut lacks_memory = false;
        for order in (0..=n.ilog2() as u8).rev() {
            loop {
                match self.slots.alloc_by(cpu, order, Owner { space: 0, page }, memory, not) {
                    Ok(entry) => {
                        self.room.fetch_sub(1 << order, Relaxed);
                        self.named(entry, 1 << order);
                        return Ok((entry.raw(), 1 << order));
                    }
                    // With more trunks there would be none, either; of a smaller order there may be some.
                    Err(Lack::Memory) => lacks_memory = true,
                    Err(Lack::Slots) => {}
                }
                // A fresh trunk keeps large runs whole; only when there is none are they cut up.
                if !(may_grow || order == 0) || lacks_memory || !self.grow(not, memory) {
                    break;
                }
            }
            may_grow = false;
        }
        Err(if lacks_memory { Lack::Memory } else { Lack::Slots })
    }

    /// What was to be written there (an entry) could not be; `now`: ns.
    pub fn shun(&self, raw: u64, now: u64) {
        if let Some((id, _)) = Self::at(raw) {
            self.shunned_until.store(now + SHUNNED_NS, Relaxed);
            self.shunned.fetch_or(1 << id.index(), Relaxed);
        }
    }

    /// Could something not be written, lately, and had no other device room for it? `now`: ns.
    pub fn fails(&self, now: u64) -> bool {
        now < self.failing_until.load(Relaxed)
    }

    /// Those that were shunned long enough are tried again. `now`: ns; seldom asked.
    pub fn forgive(&self, now: impl FnOnce() -> u64) {
        if self.shunned.load(Relaxed) != 0 && now() >= self.shunned_until.load(Relaxed) {
            self.shunned.store(0, Relaxed);
        }
    }

    /// Trunks more, of the device of highest priority that has one and is not among these.
    fn grow(&self, not: u64, memory: Memory) -> bool {
        let mut tried = not;
        while let Some((id, serial, _device)) = self.next_to_grow(tried) {
            tried |= 1 << id.index();
            let Some(trunks) = self.lessor.lease(serial) else { continue };
            let adds = |trunk: &u32| match self.slots.add_trunk_by(id, *trunk, memory) {
                Ok(is_new) => is_new,
                Err(NoMemory) => {
                    self.lessor.give_back(serial, *trunk);
                    false
                }
            };
            if trunks.filter(adds).count() > 0 {
                self.turn.store(id.index() + 1, Relaxed);
                self.full.store(false, Relaxed);
                return true;
            }
        }
        false
    }

    /// An empty trunk goes back to who lent it, of a device that has more than `kept` of them. `false`: there is none, or
    /// nobody takes it.
    pub fn give_back(&self, kept: usize) -> bool {
        (0..MAX_DEVICES).filter_map(DeviceId::new).any(|id| {
            let known = self.devices[id.index()].lock();
            let used = known.as_ref().filter(|known| !known.leaving).map(|known| known.used_as(id));
            drop(known);
            let Some((_, serial, _device)) = used else { return false };
            let Some(trunk) = self.slots.take_empty_trunk(id, kept) else { return false };
            let is_taken = self.lessor.give_back(serial, trunk);
            if !is_taken {
                self.slots.add_trunk(id, trunk);
            }
            is_taken
        })
    }

    /// Number and serial of a device that is not among the `tried` ones: of the highest priority, in turn.
    fn next_to_grow(&self, tried: u64) -> Option<(DeviceId, usize, Arc<dyn Device>)> {
        let turn = self.turn.load(Relaxed);
        let mut best = None;
        for id in (0..MAX_DEVICES).filter_map(|step| DeviceId::new((turn + step) % MAX_DEVICES)) {
            let known = self.devices[id.index()].lock();
            let untried = tried & 1 << id.index() == 0;
            let Some(known) = known.as_ref().filter(|known| untried && !known.leaving) else { continue };
            if best.as_ref().is_none_or(|(priority, _)| known.priority > *priority) {
                best = Some((known.priority, known.used_as(id)));
            }
        }
        best.map(|(_, used)| used)
    }

    /// One page's name of each of `n` slots is gone.
    pub fn put(&self, raw: u64, n: usize) {
        let entry = Entry::from_raw(raw).expect("entry of a page word");
        let freed = if self.is_foreign(entry) {
            self.foreign_names.fetch_sub(n as u64, Release);
            0
        } else {
            self.slots.put(entry, n).unwrap_or_else(|wrong| panic!("slot put twice: {wrong:?}")) as i64
        };
        self.swapped.fetch_sub(n as u64, Relaxed);
        if let Some(id) = entry.device() {
            self.used[id.index()].fetch_sub(n as u64, Relaxed);
        }
        self.room.fetch_add(freed, Relaxed);
        if self.is_full() && self.owed.fetch_sub(freed, Relaxed) <= freed {
            self.full.store(false, Relaxed);
        }
    }

    /// One more page names each of `n` slots.
    pub fn dup(&self, raw: u64, n: usize) {
        self.shares.store(true, Relaxed);
        let entry = Entry::from_raw(raw).expect("entry of a page word");
        if self.is_foreign(entry) {
            self.foreign_names.fetch_add(n as u64, Relaxed);
        } else if let Err(wrong) = self.slots.dup(entry, n) {
            panic!("slot that cannot be counted: {wrong:?}");
        }
        self.named(entry, n);
    }

    /// From here on the clusters of these entries, which are not this process's, are read from, and their slots counted
    /// by who lent them. Once, before there is any entry.
    pub fn read_from_others(&self, entries: impl Iterator<Item = u64>) {
        let mut clusters: Vec<(usize, u32)> = Vec::new();
        for cluster in entries.filter_map(|raw| cluster_of(Entry::from_raw(raw)?)) {
            if clusters.last() != Some(&cluster) {
                clusters.push(cluster);
            }
        }
        clusters.sort_unstable();
        clusters.dedup();
        let _ = self.foreign.set(Box::new(clusters));
    }

    /// Names of slots of others.
    pub fn foreign_names(&self) -> u64 {
        self.foreign_names.load(Acquire)
    }

    /// Has the last name of a slot of others gone? True once, and the clusters are nobody's but who leases them from then on.
    /// Not before what is inherited has its names.
    pub fn comes_apart(&self) -> bool {
        self.foreign.get().is_some()
            && self.foreign_names() == 0
            && self.foreign_gone.swap(u64::MAX, Relaxed) != u64::MAX
    }

    /// Does anybody else name the slot of an entry? Then it must not be written again.
    pub fn is_shared(&self, raw: u64) -> bool {
        if !self.shares.load(Relaxed) || makes(Flaw::SharedWritten) {
            return false;
        }
        let entry = Entry::from_raw(raw).expect("entry of a page word");
        self.is_foreign(entry) || self.slots.look(entry).is_ok_and(|(_, count)| count > 1)
    }

    /// On a disk that turns: whose pages (their numbers) the slots around an entry's hold, and the entry of the first.
    pub fn around(&self, raw: u64) -> Option<(u64, [Option<u64>; AROUND])> {
        let entry = Entry::from_raw(raw)?;
        if self.turning.load(Relaxed) & 1 << entry.device()?.index() == 0 || self.is_foreign(entry) {
            return None;
        }
        let first = Entry::from_raw(raw - raw % AROUND as u64)?;
        let mut owners = [None; AROUND];
        self.slots.look_around(first, &mut owners).ok()?;
        Some((first.raw(), owners.map(|owner: Option<Owner>| owner.map(|owner| owner.page))))
    }

    /// Is its slot another's?
    pub(crate) fn is_foreign(&self, entry: Entry) -> bool {
        let Some(clusters) = self.foreign.get() else { return false };
        cluster_of(entry).is_some_and(|cluster| {
            clusters.binary_search(&cluster).is_ok() && self.foreign_gone.load(Relaxed) & 1 << cluster.0 == 0
        })
    }

    /// The device number of an entry and the byte offset there.
    pub fn at(raw: u64) -> Option<(DeviceId, u64)> {
        let entry = Entry::from_raw(raw)?;
        Some((entry.device()?, entry.offset_bytes()))
    }

    /// The device of this number.
    pub fn device(&self, id: DeviceId) -> Option<Arc<dyn Device>> {
        self.devices[id.index()].lock().as_ref().map(|known| known.device.clone())
    }

    /// The device of an entry and the byte offset there.
    pub fn locate(&self, raw: u64) -> Option<(Arc<dyn Device>, u64)> {
        let (id, at) = Self::at(raw)?;
        Some((self.device(id)?, at))
    }

    /// Tells a device that discards about one cluster of 2 MiB that nobody uses any more; `false` when there is
    /// none. May wait for the device; no lock held.
    pub fn discard(&self) -> bool {
        (0..MAX_DEVICES).filter_map(DeviceId::new).any(|id| {
            let Some(device) = self.device(id) else { return false };
            let Some(entry) = self.slots.take_discard(id) else { return false };
            // Advice: what cannot be discarded is only kept longer.
            let _ = device.discard(entry.offset_bytes(), CLUSTER_BYTES);
            self.slots.discarded(entry);
            true
        })
    }

    /// Has a page found no place, and has not much room come since? Then what is in use gives its name up as it comes in, so that
    /// something colder finds a place (the kernel's vm_swap_full, which asks nobody about use).
    pub fn is_full(&self) -> bool {
        self.full.load(Relaxed)
    }

    /// Has some room come since?
    pub fn has_some(&self) -> bool {
        self.room.load(Relaxed) >= SOME
    }

    /// So many pages find a place; as far as is known, any number.
    pub fn free(&self) -> usize {
        match self.is_full() {
            true => self.room.load(Relaxed).max(0) as usize,
            false => usize::MAX,
        }
    }

    /// So many may well find one: some always, for what is known may be old.
    pub fn room(&self) -> usize {
        self.free().max(SOME as usize)
    }

    /// What seemed to be free is of no use.
    pub fn found_no_room(&self) {
        self.room.store(0, Relaxed);
    }

    /// May a thread in a signal handler read and write every device?
    pub(crate) fn is_for_handlers(&self) -> bool {
        let devices = self.devices.iter().map(Lock::lock);
        devices.filter_map(|known| Some(known.as_ref()?.device.is_for_handlers())).all(|is| is)
    }

    /// `n` pages name slots for a fork's child.
    pub(crate) fn bequeath(&self, raw: u64, n: usize) {
        self.dup(raw, n);
        self.bequeathed.fetch_add(n as u64, Relaxed);
    }

    /// Not any more.
    pub(crate) fn disinherit(&self, raw: u64, n: usize) {
        self.put(raw, n);
        self.bequeathed.fetch_sub(n as u64, Relaxed);
    }

    /// Pages of the process itself that have a place on a device.
    pub fn own(&self) -> u64 {
        self.swapped().saturating_sub(self.bequeathed.load(Relaxed))
    }

    /// Names of slots in use.
    pub fn swapped(&self) -> u64 {
        self.swapped.load(Relaxed)
    }

    /// The same of the device of this number.
    pub fn used(&self, number: usize) -> u64 {
        self.used[number].load(Relaxed)
    }

    /// Panics with what is wrong with the slots, if anything is; see [`Slots::audit`]. For tests.
    #[cfg(any(test, feature = "simulated"))]
    pub fn audit(&self) {
        self.slots.audit();
    }

    /// Slots in use on the device of this number, as its clusters say; for tests.
    #[cfg(any(test, feature = "simulated"))]
    pub fn taken(&self, number: usize) -> u64 {
        DeviceId::new(number).and_then(|id| self.slots.usage(id)).map_or(0, |usage| usage.used)
    }

    /// How many page words name the slot of an entry, as its own word says; for tests.
    #[cfg(any(test, feature = "simulated"))]
    pub fn count(&self, raw: u64) -> Option<u32> {
        Some(self.slots.look(Entry::from_raw(raw)?).ok()?.1)
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::*;
    use crate::device::{FileDevice, FileOptions};
    use std::sync::atomic::AtomicU32;
    use std::sync::{Mutex, Weak};

    /// Lends trunks of each serial from 0 on, does something first, and notes whom it was asked for.
    #[derive(Default)]
    struct Office {
        next: [AtomicU32; 8],
        asked: Mutex<std::vec::Vec<usize>>,
        returned: Mutex<std::vec::Vec<(usize, u32)>>,
        has_gone: AtomicBool,
        first: Mutex<Option<Box<dyn FnOnce() + Send>>>,
    }

    impl Lessor for Arc<Office> {
        fn lease(&self, serial: usize) -> Option<Range<u32>> {
            self.asked.lock().unwrap().push(serial);
            let first = self.first.lock().unwrap().take();
            if let Some(first) = first {
                first();
            }
            let trunk = self.next[serial].fetch_add(1, Relaxed);
            (trunk < 1).then_some(trunk..trunk + 1)
        }

        fn give_back(&self, serial: usize, trunk: u32) -> bool {
            let first = self.first.lock().unwrap().take();
            if let Some(first) = first {
                first();
            }
            self.returned.lock().unwrap().push((serial, trunk));
            !self.has_gone.load(Relaxed)
        }
    }

    fn device(priority: i32) -> (DeviceConfig, Box<dyn Device>) {
        let file = rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, 64 << 20).unwrap();
        let device = FileDevice::from_fd(file, FileOptions::default()).unwrap();
        let config = DeviceConfig { priority, ..DeviceConfig::new(0) };
        (config, Box::new(device))
    }

    fn number_of(entry: u64) -> usize {
        Place::at(entry).unwrap().0.index()
    }

    #[test]
    fn trunks_come_by_priority_and_in_turn() {
        let office = Arc::new(Office::default());
        let place = Place::new(1, [device(-2), device(5), device(5)], Box::new(office.clone())).unwrap();
        let taken: std::vec::Vec<usize> = std::iter::from_fn(|| place.alloc(0, 512, 0, Memory::Asked))
            .map(|(entry, n)| number_of(entry) * 1000 + n)
            .collect();
        let devices: std::vec::Vec<usize> =
            [1, 2, 0].iter().flat_map(|number| [number * 1000 + 512; 32]).collect();
        assert_eq!(taken, devices);
        assert!(place.is_full());
        assert_eq!((place.used(0), place.swapped()), (16384, 3 * 16384));
    }

    #[test]
    fn what_a_fork_names_takes_no_room() {
        let place = Place::new(1, [device(1)], Box::new(Arc::new(Office::default()))).unwrap();
        let taken: std::vec::Vec<u64> =
            std::iter::from_fn(|| place.alloc(0, 512, 0, Memory::Asked)).map(|(entry, _)| entry).collect();
        assert!(place.is_full() && place.free() == 0);
        place.bequeath(taken[0], 512);
        place.put(taken[1], 256);
        assert_eq!(place.free(), 256);
        place.disinherit(taken[0], 512);
        assert!(place.is_full() && place.free() == 256);
    }

    #[test]
    fn who_finds_no_memory_does_not_find_it_full() {
        let place = Place::new(1, [device(1)], Box::new(Arc::new(Office::default()))).unwrap();
        assert!(!place.is_stocked());
        assert_eq!(place.alloc(0, 4, 0, Memory::AtHand), None);
        assert!(!place.is_full());
        place.refill();
        assert!(place.is_stocked() && place.alloc(0, 4, 0, Memory::AtHand).is_some());
    }

    #[test]
    fn who_finds_no_memory_asks_for_no_trunk() {
        let trunks = Arc::new(Trunks(Mutex::new((0..1000).collect())));
        let place = Place::new(1, [device(1)], Box::new(trunks.clone())).unwrap();
        place.refill();
        // A table for each cluster that is begun.
        let alloc = || place.alloc(0, 512, 0, Memory::AtHand);
        assert!(std::iter::from_fn(alloc).count() >= 32);
        assert_eq!(trunks.0.lock().unwrap().len(), 998);
        assert!(!place.is_full());
    }

    #[test]
    fn a_trunk_that_finds_no_memory_goes_back() {
        let trunks = Trunks(Mutex::new([100_000].to_vec()));
        let place = Place::new(1, [device(0)], Box::new(Arc::new(trunks))).unwrap();
        place.refill();
        assert_eq!(place.alloc(0, 1, 0, Memory::AtHand), None);
        assert!(!place.is_full());
        assert!(place.alloc(0, 1, 0, Memory::Asked).is_some(), "it was given back, and is lent again");
    }

    #[test]
    fn a_device_goes_when_nothing_is_on_it_and_its_number_comes_again() {
        let office = Arc::new(Office::default());
        let place = Place::new(1, [device(1), device(0)], Box::new(office.clone())).unwrap();
        let (first, n) = place.alloc(0, 4, 0, Memory::Asked).unwrap();
        assert_eq!((number_of(first), n), (0, 4));
        assert_eq!(place.swapoff_end(0), Err(SwapoffError::NoDevice), "it is not on its way off");
        assert!(place.swapoff_begin(0));
        assert_eq!((place.is_leaving(0), place.swapoff_end(0)), (true, Err(SwapoffError::InUse(4))));
        let (elsewhere, _) = place.alloc(0, 4, 8, Memory::Asked).unwrap();
        assert_eq!(number_of(elsewhere), 1, "it gives no slot any more");
        let used = place.locate(first).unwrap();
        place.put(first, 4);
        assert_eq!(place.swapoff_end(0), Err(SwapoffError::InUse(0)), "somebody uses it");
        drop(used);
        assert!(place.swapoff_cancel(0) && !place.is_leaving(0));
        assert!(place.swapoff_begin(0));
        assert_eq!(place.swapoff_end(0), Ok(0));
        assert!(!place.swapoff_cancel(0) && place.locate(first).is_none());
        let (config, again) = device(7);
        assert_eq!(place.swapon(1, 2, config, device(7).1), Err(SwaponError::TooManyDevices));
        assert_eq!(place.swapon(0, 2, config, again), Ok(()));
        // What was leased before is used up first; a new trunk is of the highest priority.
        while number_of(place.alloc(0, 512, 0, Memory::Asked).unwrap().0) == 1 {}
        assert_eq!(office.asked.lock().unwrap().last(), Some(&2));
    }

    #[test]
    fn a_trunk_of_a_device_comes_before_the_device_goes() {
        let office = Arc::new(Office::default());
        let place = Arc::new(Place::new(1, [device(1)], Box::new(office.clone())).unwrap());
        *office.first.lock().unwrap() = Some(goes_not(&place));
        // It is on its way off by then, and gives no slot.
        assert_eq!(place.alloc(0, 512, 0, Memory::Asked), None);
        assert_eq!(place.swapoff_end(0), Ok(0));
        let (config, again) = device(1);
        place.swapon(0, 5, config, again).unwrap();
        assert!(place.alloc(0, 512, 0, Memory::Asked).is_some());
        assert_eq!(*office.asked.lock().unwrap(), [0, 5]);
    }

    /// While this is done the device that comes or goes by trunks is wanted off, and stays: it could come again, under its
    /// serial, before the trunk is there or given back.
    fn goes_not(place: &Arc<Place>) -> Box<dyn FnOnce() + Send> {
        let weak: Weak<Place> = Arc::downgrade(place);
        Box::new(move || {
            let place = weak.upgrade().unwrap();
            assert!(place.swapoff_begin(0));
            assert_eq!(place.swapoff_end(0), Err(SwapoffError::InUse(0)));
        })
    }

    #[test]
    fn empty_trunks_go_back_but_those_that_are_kept() {
        let office = Arc::new(Office::default());
        let place = Place::new(1, [device(1), device(0)], Box::new(office.clone())).unwrap();
        assert!(!place.give_back(0), "there is none");
        let all: std::vec::Vec<u64> =
            std::iter::from_fn(|| place.alloc(0, 512, 0, Memory::Asked)).map(|(entry, _)| entry).collect();
        assert!(all.len() == 64 && place.is_full() && !place.give_back(0));
        all[1..].iter().for_each(|entry| place.put(*entry, 512));
        assert!(!place.give_back(1), "the one that is empty is kept");
        assert!(place.give_back(0) && !place.give_back(0));
        assert_eq!(*office.returned.lock().unwrap(), [(1, 0)]);
        // Who lends has gone: what there is, is used.
        place.put(all[0], 512);
        office.has_gone.store(true, Relaxed);
        assert!(!place.give_back(0));
        assert_eq!(place.alloc(0, 512, 0, Memory::Asked).map(|(entry, _)| number_of(entry)), Some(0));
    }

    #[test]
    fn a_device_does_not_go_before_its_trunk_is_given_back() {
        let office = Arc::new(Office::default());
        let place = Arc::new(Place::new(1, [device(1)], Box::new(office.clone())).unwrap());
        let (entry, n) = place.alloc(0, 512, 0, Memory::Asked).unwrap();
        place.put(entry, n);
        *office.first.lock().unwrap() = Some(goes_not(&place));
        assert!(place.give_back(0));
        assert_eq!(place.swapoff_end(0), Ok(0));
        assert!(!place.give_back(0));
    }

    /// Gives the trunks that it was told to, and those that came back.
    struct Trunks(Mutex<Vec<u32>>);

    impl Lessor for Arc<Trunks> {
        fn lease(&self, _: usize) -> Option<Range<u32>> {
            self.0.lock().unwrap().pop().map(|trunk| trunk..trunk + 1)
        }

        fn give_back(&self, _: usize, trunk: u32) -> bool {
            self.0.lock().unwrap().push(trunk);
            true
        }
    }

    fn place(trunks: &[u32]) -> Place {
        Place::new(1, [device(0)], Box::new(Arc::new(Trunks(Mutex::new(trunks.to_vec()))))).unwrap()
    }

    #[test]
    fn a_slot_with_two_names_is_known() {
        let parent = place(&[3]);
        let (one, _) = parent.alloc(0, 1, 7, Memory::Asked).unwrap();
        assert!(!parent.is_shared(one));
        parent.dup(one, 1);
        assert!(parent.is_shared(one));
        parent.put(one, 1);
        assert!(!parent.is_shared(one));
        assert_eq!(parent.swapped(), 1);
    }

    #[test]
    fn a_child_never_counts_what_its_parent_counts() {
        let parent = place(&[3]);
        let (theirs, n) = parent.alloc(0, 16, 7, Memory::Asked).unwrap();
        let child = place(&[4]);
        child.read_from_others((0..n as u64).map(|i| theirs + i));
        child.dup(theirs, n);
        assert!(child.is_shared(theirs) && !child.comes_apart());
        let (own, _) = child.alloc(0, 1, 7, Memory::Asked).unwrap();
        assert_ne!(cluster_of(Entry::from_raw(own).unwrap()), cluster_of(Entry::from_raw(theirs).unwrap()));
        assert!(!child.is_shared(own));
        // And gives it up as often as it likes.
        child.put(theirs, n);
        assert_eq!((child.swapped(), parent.count(theirs)), (1, Some(1)));
        assert!(child.locate(theirs).is_some());
        // What was theirs may be leased from then on.
        assert!(child.comes_apart() && !child.comes_apart());
        assert!(!child.is_foreign(Entry::from_raw(theirs).unwrap()));
    }
}
