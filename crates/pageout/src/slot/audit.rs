//! For tests and models: the allocator looks at itself, every invariant of the module, one by one; and what is in use.

use super::cluster::NOBODY;
use super::device::Device;
use super::lists::Listed;
use super::{DeviceId, Entry, Owner, Slots, CLUSTER_SLOTS, MAX_DEVICES, MAX_SLOTS};
use crate::sync::atomic::Ordering::Relaxed;

/// How full a device is. Taken while others work: each number held at some time, not all at the same.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct DeviceUsage {
    /// Slots that the device has, those of a header and bad ones included.
    pub slots: u64,
    /// Slots in use.
    pub used: u64,
    /// Clusters that serve no order now, those of trunks never used included.
    pub free_clusters: u64,
}

/// Where a walk over used slots is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Cursor(Option<Entry>);

impl Slots {
    /// Panics with what is wrong, if anything is. Nobody else may work with the allocator meanwhile.
    pub fn audit(&self) {
        for device in (0..MAX_DEVICES).filter_map(|i| self.devices[i].get()) {
            self.audit_device(&device[0]);
        }
    }

    /// A walk over the used slots of a device, from its start.
    pub fn walk(&self, id: DeviceId) -> Cursor {
        Cursor(Some(Entry::new(id, 0)))
    }

    /// The next used slot on the walk, ascending, with its first owner and how many name it. It may be
    /// allocated a moment ago and not be written yet, and may be free when the caller looks. After the
    /// walk's end, where swapoff has begun, what was left in use is found by another walk.
    pub fn next_used(&self, cursor: &mut Cursor) -> Option<(Entry, Owner, u32)> {
        let from = cursor.0?;
        let device = self.device(from.device()?)?;
        for (index, cluster) in device.clusters(from.cluster()) {
            let start = if index == from.cluster() { from.offset_in_cluster() } else { 0 };
            let found = cluster.lock().next_used(start);
            if let Some((at, owner, count)) = found {
                let entry = device.base(index).at(at);
                let next = entry.slot() + 1;
                cursor.0 = (next < MAX_SLOTS).then(|| Entry::new(device.id, next));
                return Some((entry, owner, count));
            }
        }
        cursor.0 = None;
        None
    }

    /// How full a device is. Looks at every cluster that was ever used.
    pub fn usage(&self, id: DeviceId) -> Option<DeviceUsage> {
        let device = self.device_on(id)?;
        let free = device.clusters(0).filter(|(_, cluster)| cluster.listed().is_bare()).count() as u64;
        let trunk = device.trunk_slots();
        let (slots, fresh) = {
            let trunks = device.trunks();
            // Not before: a trunk that comes moves it.
            let end = device.end();
            let slots = trunks.owned.iter().map(|number| (end - u64::from(number) * trunk).min(trunk)).sum();
            (slots, trunks.fresh.iter().count() as u64)
        };
        Some(DeviceUsage {
            slots,
            used: self.count_used(device),
            free_clusters: free + fresh * trunk / CLUSTER_SLOTS as u64,
        })
    }

    fn audit_device(&self, device: &Device) {
        for (index, cluster) in device.clusters(0) {
            let mut state = cluster.lock();
            state.audit();
            let listed = cluster.listed();
            let bare = listed.is_bare() || !listed.is_list();
            assert_eq!(bare, state.is_empty() && !state.has_table(), "cluster {index} at {listed:?}");
            if listed.is_list() && !bare {
                let home = state.home(listed, false);
                assert_eq!(listed, home, "cluster {index} is not where it belongs");
            }
        }
        let listed: usize = (0..device.spread()).map(|shard| device.audit_shard(shard)).sum();
        let placed = device.clusters(0).filter(|(_, cluster)| cluster.listed().is_list()).count();
        assert_eq!(listed, placed, "lists hold what says it is on them");
        let available = self.available.load(Relaxed) & device.id.bit() != 0;
        assert!(available || !device.is_on() || !device.has_room(), "{:?} hides its room", device.id);
    }
}

impl Device {
    /// Follows each list of a shard; returns how many clusters are on them.
    fn audit_shard(&self, shard: usize) -> usize {
        let shard = self.shard(shard);
        let lists = shard.lock();
        let mut total = 0;
        for listed in Listed::all() {
            let (mut index, mut last, mut n) = (lists.first(listed), NOBODY, 0);
            while index != NOBODY {
                let cluster = self.get(index).expect("a cluster on a list was made");
                assert_eq!(cluster.listed(), listed, "cluster {index} is on a list that it does not name");
                assert_eq!(cluster.prev.load(Relaxed), last, "cluster {index} knows who is before it");
                (last, index, n) = (index, cluster.next.load(Relaxed), n + 1);
                assert!(n <= lists.len(listed), "{listed:?} is a circle or longer than it says");
            }
            assert_eq!(n, lists.len(listed), "{listed:?} is shorter than it says");
            assert_eq!(n != 0, shard.may_have(listed), "{listed:?} is not told of as it is");
            total += n as usize;
        }
        total
    }
}
