//! The allocator looks at itself: every invariant of the module, checked one by one.

use super::cluster::NOBODY;
use super::device::Device;
use super::lists::Listed;
use super::{Slots, MAX_DEVICES};
use crate::sync::atomic::Ordering::Relaxed;

impl Slots {
    /// Panics with what is wrong, if anything is. Nobody else may work with the allocator meanwhile. For
    /// tests and models; takes as long as there are clusters.
    pub fn audit(&self) {
        for device in (0..MAX_DEVICES).filter_map(|i| self.devices[i].get()) {
            self.audit_device(&device[0]);
        }
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
