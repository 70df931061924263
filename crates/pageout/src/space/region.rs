//! The registered mappings, as disjoint ranges in order. Guarded by the events lock: events and adoption
//! change it exclusively, everybody else reads it shared.

use alloc::vec::Vec;

/// A registered range, in bytes, page-aligned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Region {
    /// First byte.
    pub start: usize,
    /// Past the last byte.
    pub end: usize,
}

/// What became of a range of addresses: it went to another place, or is gone. Plain numbers: it crosses a process border.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Change {
    /// First byte.
    pub from: u64,
    /// Bytes.
    pub len: u64,
    /// First byte where it is now; [`Change::GONE`].
    pub to: u64,
    /// The number of the event that told of it. Several may tell parts of one, which happened at once.
    pub event: u64,
}

impl Change {
    /// Unmapped.
    pub const GONE: u64 = u64::MAX;

    /// From where, and to where it went: first byte and past the last.
    pub fn sides(self) -> ((usize, usize), Option<(usize, usize)>) {
        let at = |start: u64| (start as usize, (start + self.len) as usize);
        (at(self.from), (self.to != Self::GONE).then(|| at(self.to)))
    }
}

/// Disjoint regions in ascending order.
#[derive(Debug, Default)]
pub struct Regions {
    list: Vec<Region>,
    changes: Option<Vec<Change>>,
    /// Events that were read.
    events: u64,
}

impl Regions {
    /// From here on what changes is written down, in the order in which it happened.
    pub(crate) fn write_down(&mut self) {
        self.changes = Some(Vec::new());
    }

    /// What was written down, which ends.
    pub(crate) fn written_down(&mut self) -> Vec<Change> {
        self.changes.take().unwrap_or_default()
    }

    /// A number for an event.
    pub(crate) fn number(&mut self) -> u64 {
        self.events += 1;
        self.events
    }

    pub(crate) fn changed(&mut self, change: Change) {
        self.changes.as_mut().into_iter().for_each(|changes| changes.push(change));
    }

    /// The region that has `address`.
    pub fn find(&self, address: usize) -> Option<Region> {
        let after = self.list.partition_point(|region| region.end <= address);
        self.list.get(after).copied().filter(|region| region.start <= address)
    }

    /// Adds a range, which is not empty; parts that are there already stay as they are.
    pub fn insert(&mut self, region: Region) {
        debug_assert!(region.start < region.end);
        // Of tens of thousands those behind would move, twice.
        if self.find(region.start).is_some_and(|there| there.end >= region.end) {
            return;
        }
        self.remove(region.start, region.end);
        let at = self.list.partition_point(|other| other.start < region.start);
        self.list.insert(at, region);
    }

    /// Takes a range out, splitting what sticks out of it.
    pub fn remove(&mut self, start: usize, end: usize) {
        let first = self.list.partition_point(|region| region.end <= start);
        let last = self.list.partition_point(|region| region.start < end);
        if first >= last {
            return;
        }
        let head = Region { start: self.list[first].start, end: start };
        let tail = Region { start: end, end: self.list[last - 1].end };
        let keep = [head, tail];
        self.list.splice(first..last, keep.into_iter().filter(|region| region.start < region.end));
    }

    /// The parts of `start..end` that no region has.
    pub fn gaps(&self, start: usize, end: usize, mut each: impl FnMut(usize, usize)) {
        let mut at = start;
        let first = self.list.partition_point(|region| region.end <= start);
        for region in &self.list[first..] {
            if region.start >= end {
                break;
            }
            if at < region.start {
                each(at, region.start);
            }
            at = at.max(region.end);
        }
        if at < end {
            each(at, end);
        }
    }

    /// The parts of `start..end` that regions have.
    pub fn within(&self, start: usize, end: usize) -> impl Iterator<Item = Region> + '_ {
        let first = self.list.partition_point(|region| region.end <= start);
        let inside = self.list[first..].iter().take_while(move |region| region.start < end);
        inside.map(move |region| Region { start: region.start.max(start), end: region.end.min(end) })
    }

    /// All of them.
    pub fn iter(&self) -> impl Iterator<Item = Region> + '_ {
        self.list.iter().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn as_a_set_of_pages(ops in prop::collection::vec((any::<bool>(), 0usize..64, 1usize..32), 0..60)) {
            let mut regions = Regions::default();
            let mut model = [false; 96];
            for (insert, start, len) in ops {
                if insert {
                    regions.insert(Region { start, end: start + len });
                } else {
                    regions.remove(start, start + len);
                }
                model[start..start + len].fill(insert);
                for (at, in_model) in model.iter().enumerate() {
                    prop_assert_eq!(regions.find(at).is_some(), *in_model);
                }
                let mut gaps = [false; 96];
                regions.gaps(0, 96, |from, to| gaps[from..to].fill(true));
                prop_assert!(gaps.iter().zip(&model).all(|(gap, held)| gap != held));
                let mut parts = [false; 96];
                regions.within(5, 70).for_each(|part| parts[part.start..part.end].fill(true));
                prop_assert!((0..96).all(|at| parts[at] == (model[at] && (5..70).contains(&at))));
                let mut last = 0;
                for region in regions.iter() {
                    prop_assert!(last <= region.start && region.start < region.end);
                    last = region.end;
                }
            }
        }
    }
}
