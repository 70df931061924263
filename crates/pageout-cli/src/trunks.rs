//! Who has which trunk of a device. One owner, the server; no locks.

use std::ops::Range;

/// A trunk: its device's number, and its own on the device.
pub type Trunk = (usize, u64);

/// The trunks of one device: one bit each, set while it is lent.
///
/// The search goes on behind the trunk lent last, so that one that came back rests as long as possible: of a
/// process that was killed a write may still be under way.
#[derive(Debug)]
pub struct Trunks {
    lent: Vec<u64>,
    count: u64,
    next: u64,
}

impl Trunks {
    /// `count` trunks, all free.
    pub fn new(count: u64) -> Self {
        Self { lent: vec![0; count.div_ceil(64) as usize], count, next: 0 }
    }

    /// Lends one that is free, and up to `most` with those that follow it; which they are.
    pub fn lend(&mut self, most: u64) -> Option<Range<u64>> {
        let first = self.lend_one()?;
        let mut lent = first..first + 1;
        while lent.end - first < most && lent.end < self.count && !self.is_lent(lent.end) {
            self.lent[(lent.end / 64) as usize] |= 1 << (lent.end % 64);
            lent.end += 1;
        }
        self.next = lent.end % self.count;
        Some(lent)
    }

    fn is_lent(&self, trunk: u64) -> bool {
        self.lent[(trunk / 64) as usize] & 1 << (trunk % 64) != 0
    }

    fn lend_one(&mut self) -> Option<u64> {
        let words = self.lent.len() as u64;
        // One word more than there are: the first is looked at again for what lies below `next`.
        for step in 0..=words {
            let index = (self.next / 64 + step) % words.max(1);
            let skipped = if step == 0 { (1 << (self.next % 64)) - 1 } else { 0 };
            let free = !self.lent.get(index as usize)? & !skipped;
            let trunk = index * 64 + u64::from(free.trailing_zeros());
            if free != 0 && trunk < self.count {
                self.lent[index as usize] |= 1 << (trunk % 64);
                return Some(trunk);
            }
        }
        None
    }

    /// Takes back one that was lent.
    pub fn take_back(&mut self, trunk: u64) {
        assert!(self.is_lent(trunk), "trunk {trunk} is not lent");
        self.lent[(trunk / 64) as usize] &= !(1 << (trunk % 64));
    }

    /// How many are lent.
    pub fn lent(&self) -> u64 {
        self.lent.iter().map(|word| u64::from(word.count_ones())).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(trunks: &mut Trunks) -> Option<u64> {
        trunks.lend(1).map(|lent| lent.start)
    }

    #[test]
    fn lends_several_that_follow_each_other() {
        let mut trunks = Trunks::new(70);
        assert_eq!(
            (trunks.lend(60), trunks.lend(8), trunks.lend(8)),
            (Some(0..60), Some(60..68), Some(68..70))
        );
        assert_eq!((trunks.lend(8), trunks.lent()), (None, 70));
        [3, 4, 6, 69].into_iter().for_each(|trunk| trunks.take_back(trunk));
        assert_eq!((trunks.lend(8), trunks.lend(8), trunks.lend(8)), (Some(3..5), Some(6..7), Some(69..70)));
        assert_eq!((trunks.lend(8), trunks.lent()), (None, 70));
    }

    #[test]
    fn lends_each_once_and_ascending() {
        for count in [0, 1, 63, 64, 65, 130] {
            let mut trunks = Trunks::new(count);
            let lent: Vec<u64> = std::iter::from_fn(|| one(&mut trunks)).collect();
            assert_eq!(lent, (0..count).collect::<Vec<_>>());
            assert_eq!((one(&mut trunks), trunks.lent()), (None, count));
        }
    }

    #[test]
    fn one_that_came_back_rests() {
        let mut trunks = Trunks::new(70);
        assert_eq!((one(&mut trunks), one(&mut trunks), one(&mut trunks)), (Some(0), Some(1), Some(2)));
        trunks.take_back(1);
        assert_eq!(one(&mut trunks), Some(3));
        for expected in 4..70 {
            assert_eq!(one(&mut trunks), Some(expected));
        }
        assert_eq!((one(&mut trunks), one(&mut trunks)), (Some(1), None));
        trunks.take_back(69);
        assert_eq!(one(&mut trunks), Some(69));
        trunks.take_back(0);
        assert_eq!(one(&mut trunks), Some(0));
    }

    #[test]
    #[should_panic(expected = "trunk 3 is not lent")]
    fn takes_back_only_what_was_lent() {
        Trunks::new(4).take_back(3);
    }
}
