//! How many frames evictors fill ahead: as few as faults do not run out of, for what lies ready is missing where it would
//! be used.
//!
//! Each fault that finds none (direct reclaim), and each stream that could have been gone ahead of, doubles them; while there
//! are enough they become fewer again. So neither the rate of faults nor the speed of the device need be known.

use crate::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};

/// Fewest, in pages.
const LEAST: usize = 256;
/// How long (ns) there must have been enough before they are an eighth fewer.
const ENOUGH: u64 = 100_000_000;

/// Any thread may call anything: two at once count as one.
pub(crate) struct Ahead {
    pages: AtomicUsize,
    /// Since when there have been enough.
    since: AtomicU64,
}

impl Ahead {
    pub(crate) fn new() -> Self {
        Self { pages: AtomicUsize::new(LEAST), since: AtomicU64::new(0) }
    }

    /// So many pages, `most` at most.
    pub(crate) fn pages(&self, most: usize) -> usize {
        self.pages.load(Relaxed).min(most)
    }

    /// There were too few.
    pub(crate) fn ran_short(&self, now: u64, most: usize) {
        self.pages.store((2 * self.pages(most)).min(most).max(LEAST), Relaxed);
        self.since.store(now, Relaxed);
    }

    /// An evictor looks what there is to do.
    pub(crate) fn look(&self, now: u64) {
        let pages = self.pages.load(Relaxed);
        if pages > LEAST && now.saturating_sub(self.since.load(Relaxed)) >= ENOUGH {
            self.pages.store((pages - pages / 8).max(LEAST), Relaxed);
            self.since.store(now, Relaxed);
        }
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::*;

    #[test]
    fn as_few_as_faults_do_not_run_out_of() {
        let (ahead, most, mut now) = (Ahead::new(), 2048, 0);
        assert_eq!(ahead.pages(most), LEAST);
        for pages in [512, 1024, 2048, 2048] {
            ahead.ran_short(now, most);
            assert_eq!(ahead.pages(most), pages);
        }
        // A fault that takes 600 at once, ten times a second: seldom less than that, and not all there could be.
        let mut short = 0;
        for _ in 0..100 {
            now += ENOUGH;
            ahead.look(now);
            if ahead.pages(most) < 600 {
                ahead.ran_short(now, most);
                short += 1;
            }
        }
        assert!((1..20).contains(&short) && ahead.pages(most) < 1200, "{short}, {}", ahead.pages(most));
        for _ in 0..20 {
            now += ENOUGH;
            ahead.look(now);
            ahead.look(now);
        }
        assert_eq!(ahead.pages(most), LEAST);
        // A small limit has room for fewer.
        assert_eq!(ahead.pages(64), 64);
        ahead.ran_short(now, 64);
        assert_eq!(ahead.pages(2048), LEAST);
    }
}
