//! Who has which trunk of a device. One owner, the server; no locks.

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

    /// Lends one, if one is free.
    pub fn lend(&mut self) -> Option<u64> {
        let words = self.lent.len() as u64;
        // One word more than there are: the first is looked at again for what lies below `next`.
        for step in 0..=words {
            let index = (self.next / 64 + step) % words.max(1);
            let skipped = if step == 0 { (1 << (self.next % 64)) - 1 } else { 0 };
            let free = !self.lent.get(index as usize)? & !skipped;
            let trunk = index * 64 + u64::from(free.trailing_zeros());
            if free != 0 && trunk < self.count {
                self.lent[index as usize] |= 1 << (trunk % 64);
                self.next = (trunk + 1) % self.count;
                return Some(trunk);
            }
        }
        None
    }

    /// Takes back one that was lent.
    pub fn take_back(&mut self, trunk: u64) {
        let bit = 1 << (trunk % 64);
        let word = &mut self.lent[(trunk / 64) as usize];
        assert!(*word & bit != 0, "trunk {trunk} is not lent");
        *word &= !bit;
    }

    /// How many are lent.
    pub fn lent(&self) -> u64 {
        self.lent.iter().map(|word| u64::from(word.count_ones())).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lends_each_once_and_ascending() {
        for count in [0, 1, 63, 64, 65, 130] {
            let mut trunks = Trunks::new(count);
            let lent: Vec<u64> = std::iter::from_fn(|| trunks.lend()).collect();
            assert_eq!(lent, (0..count).collect::<Vec<_>>());
            assert_eq!((trunks.lend(), trunks.lent()), (None, count));
        }
    }

    #[test]
    fn one_that_came_back_rests() {
        let mut trunks = Trunks::new(70);
        assert_eq!((trunks.lend(), trunks.lend(), trunks.lend()), (Some(0), Some(1), Some(2)));
        trunks.take_back(1);
        assert_eq!(trunks.lend(), Some(3));
        for expected in 4..70 {
            assert_eq!(trunks.lend(), Some(expected));
        }
        assert_eq!((trunks.lend(), trunks.lend()), (Some(1), None));
        trunks.take_back(69);
        assert_eq!(trunks.lend(), Some(69));
        trunks.take_back(0);
        assert_eq!(trunks.lend(), Some(0));
    }

    #[test]
    #[should_panic(expected = "trunk 3 is not lent")]
    fn takes_back_only_what_was_lent() {
        Trunks::new(4).take_back(3);
    }
}
