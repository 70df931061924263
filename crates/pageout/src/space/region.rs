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

/// Disjoint regions in ascending order.
#[derive(Debug, Default)]
pub struct Regions {
    list: Vec<Region>,
}

impl Regions {
    /// The region that has `address`.
    pub fn find(&self, address: usize) -> Option<Region> {
        let after = self.list.partition_point(|region| region.end <= address);
        self.list.get(after).copied().filter(|region| region.start <= address)
    }

    /// Adds a range; parts that are there already stay as they are.
    pub fn insert(&mut self, region: Region) {
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
                let mut last = 0;
                for region in regions.iter() {
                    prop_assert!(last <= region.start && region.start < region.end);
                    last = region.end;
                }
            }
        }
    }
}
