//! How much may still come in below the limit.

use crate::sync::atomic::AtomicI64;
use crate::sync::atomic::Ordering::Relaxed;

/// Pages that may still come in; below 0 as many are too many. Whoever takes some, or gives some back, says so; what others
/// do to the memory shows when all is counted. A count takes time, and who counts may be kept from running in the middle:
/// what is said meanwhile is neither lost nor taken twice, whoever else counts.
#[derive(Debug)]
pub struct Budget {
    /// What there was at the last count, less what had moved by then.
    counted: AtomicI64,
    /// The sum of what was given back and taken, ever.
    moved: AtomicI64,
}

/// When a count began.
#[derive(Clone, Copy, Debug)]
pub struct Mark(i64);

impl Budget {
    /// Nothing may come in.
    #[allow(clippy::new_without_default)]
    pub fn new() -> Self {
        Self { counted: AtomicI64::new(0), moved: AtomicI64::new(0) }
    }

    /// What there is now.
    pub fn get(&self) -> i64 {
        self.counted.load(Relaxed) + self.moved.load(Relaxed)
    }

    /// So many pages have come in.
    pub fn sub(&self, pages: usize) {
        self.moved.fetch_sub(pages as i64, Relaxed);
    }

    /// So many have gone.
    pub fn add(&self, pages: usize) {
        self.moved.fetch_add(pages as i64, Relaxed);
    }

    /// Takes so many for what is about to come in, all or none; what does not come is [added](Budget::add) again. Who looks and takes
    /// afterwards may take what many others have seen as well.
    #[must_use]
    pub fn take(&self, pages: usize) -> bool {
        if self.get() < pages as i64 {
            return false;
        }
        self.sub(pages);
        let is_there = self.get() >= 0;
        if !is_there {
            self.add(pages);
        }
        is_there
    }

    /// A count begins.
    pub fn mark(&self) -> Mark {
        Mark(self.moved.load(Relaxed))
    }

    /// When the count began there was so much.
    pub fn set(&self, left: i64, Mark(moved): Mark) {
        self.counted.store(left - moved, Relaxed);
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::*;

    #[test]
    fn what_moves_during_a_count_counts_once() {
        let budget = Budget::new();
        budget.set(100, budget.mark());
        let (one, other) = (budget.mark(), budget.mark());
        budget.sub(30);
        // Both found what was there before.
        budget.set(120, one);
        budget.set(120, other);
        assert_eq!(budget.get(), 90);
        assert!(budget.take(90) && !budget.take(1));
        budget.add(5);
        assert_eq!(budget.get(), 5);
    }
}
