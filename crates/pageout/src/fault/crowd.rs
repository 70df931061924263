//! Who faults just now, and where these threads are to wake up: together on their server's CPU, or apart.
//!
//! Together no fault wakes another CPU and no page table is changed under one that runs; apart, what threads do between
//! their faults is done at once on several CPUs. What weighs more depends on the program and on what it costs here to wake a CPU, so it
//! is measured: now and then the other way is tried for a *lap* of faults, and kept if it is clearly faster. A thread
//! that faults alone is always called.
//!
//! Noted by whoever reads faults, so by one at a time; looked at by anybody.

use super::stream;
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

/// The threads of the last faults, and how fast these come.
pub struct Crowd {
    /// The threads of the last 16 to 32 faults, a bit for each: those of the last faults, those of the 16 before. Two of
    /// which the numbers are multiples of 16 apart count as one.
    recent: AtomicU64,
    together: AtomicBool,
    /// The way that is not the usual one is being tried.
    trying: AtomicBool,
    /// When the last fault was noted, ns.
    noted: AtomicU64,
    /// What had been brought in by then.
    brought: AtomicU64,
    /// What was brought in on this lap, and the time that it took, ns.
    pages: AtomicU64,
    took: AtomicU64,
    /// The last whole lap's time, the usual way, ns.
    usual: AtomicU64,
    /// Laps until the other way is tried, and how many there were to be.
    wait: AtomicU64,
    patience: AtomicU64,
}

/// Faults before the older ones are forgotten. Of two threads that fault at random each takes one of so many.
const WINDOW: u64 = 16;
/// Bits for threads; the rest of the word counts faults.
const THREADS: u32 = stream::THREADS as u32;
const MASK: u64 = (1 << THREADS) - 1;

/// Faults of several threads that are timed together: a few ms. Those that bring something in: where all want the same
/// page, more of the others are no progress.
const LAP: u64 = 128;
/// What a pause between two faults counts for at most, ns: the program waited for something else.
const PAUSE_NS: u64 = 500_000;
/// Laps between two trials: so many after a change, four times as many after each in vain, so many at most. The last bounds
/// what trials cost.
const SOON: u64 = 8;
const LATE: u64 = 256;

impl Crowd {
    /// Nobody.
    pub fn new() -> Self {
        Self {
            recent: AtomicU64::new(0),
            together: AtomicBool::new(false),
            trying: AtomicBool::new(false),
            noted: AtomicU64::new(0),
            brought: AtomicU64::new(0),
            pages: AtomicU64::new(0),
            took: AtomicU64::new(0),
            usual: AtomicU64::new(0),
            wait: AtomicU64::new(1),
            patience: AtomicU64::new(SOON),
        }
    }

    /// A thread faults, at `now` (ns). `brought`: faults that brought something in so far.
    pub fn note(&self, thread: u32, now: u64, brought: u64) {
        let word = self.recent.load(Relaxed);
        let (last, before, faults) = (word & MASK, word >> THREADS & MASK, word >> (2 * THREADS));
        let last = last | 1 << (thread % THREADS);
        let word = match faults + 1 {
            WINDOW => last << THREADS,
            faults => faults << (2 * THREADS) | before << THREADS | last,
        };
        self.recent.store(word, Relaxed);
        let pause = now.saturating_sub(self.noted.load(Relaxed)).min(PAUSE_NS);
        let pages = brought.saturating_sub(self.brought.load(Relaxed));
        self.noted.store(now, Relaxed);
        self.brought.store(brought, Relaxed);
        if self.threads() > 1 {
            self.time(pages, pause);
        }
    }

    /// Several threads brought in `pages` in `pause` ns.
    fn time(&self, pages: u64, pause: u64) {
        let pages = self.pages.load(Relaxed) + pages;
        let took = self.took.load(Relaxed) + pause;
        let is_done = pages >= LAP;
        self.pages.store(if is_done { 0 } else { pages }, Relaxed);
        self.took.store(if is_done { 0 } else { took }, Relaxed);
        if is_done {
            self.end_lap(took);
        }
    }

    fn end_lap(&self, took: u64) {
        let turn = || self.together.store(!self.together.load(Relaxed), Relaxed);
        if self.trying.load(Relaxed) {
            self.trying.store(false, Relaxed);
            let patience = if took < self.usual.load(Relaxed) / 8 * 7 {
                SOON
            } else {
                turn();
                (self.patience.load(Relaxed) * 4).min(LATE)
            };
            self.patience.store(patience, Relaxed);
            self.wait.store(patience, Relaxed);
            return;
        }
        self.usual.store(took, Relaxed);
        let wait = self.wait.load(Relaxed) - 1;
        self.wait.store(wait, Relaxed);
        if wait == 0 {
            self.trying.store(true, Relaxed);
            turn();
        }
    }

    /// Is who faults to be called to the server's CPU?
    pub fn is_together(&self) -> bool {
        self.threads() == 1 || self.together.load(Relaxed)
    }

    /// How many there are.
    pub fn threads(&self) -> usize {
        self.bits().count_ones() as usize
    }

    /// A number for each of them, as good as its own to tell streams apart.
    pub fn each(&self) -> impl Iterator<Item = u32> {
        let bits = self.bits();
        (0..THREADS).filter(move |thread| bits & 1 << thread != 0)
    }

    fn bits(&self) -> u64 {
        let word = self.recent.load(Relaxed);
        (word | word >> THREADS) & MASK
    }
}

impl Default for Crowd {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_stops_is_forgotten() {
        let crowd = Crowd::new();
        assert_eq!(crowd.threads(), 0);
        for thread in [5, 7, 9, 7] {
            crowd.note(thread, 0, 0);
        }
        assert_eq!(crowd.threads(), 3);
        assert!(crowd.each().eq([5, 7, 9]));
        (0..WINDOW).for_each(|_| crowd.note(7, 0, 0));
        assert_eq!(crowd.threads(), 3);
        (0..WINDOW).for_each(|_| crowd.note(7, 0, 0));
        assert_eq!(crowd.threads(), 1);
    }

    /// Two threads fault in turn, `pace[together]` ns apart. The share of the faults at which they were together.
    fn together(crowd: &Crowd, now: &mut u64, pace: [u64; 2], faults: u64) -> f64 {
        let mut together = 0;
        for fault in 0..faults {
            let is = crowd.is_together() as u64;
            together += is;
            *now += pace[is as usize];
            crowd.note((fault % 2) as u32, *now, crowd.brought.load(Relaxed) + 1);
        }
        together as f64 / faults as f64
    }

    #[test]
    fn the_faster_way_is_found_and_kept() {
        let (crowd, mut now) = (Crowd::new(), 0);
        together(&crowd, &mut now, [40_000, 15_000], LAP * 4);
        assert!(together(&crowd, &mut now, [40_000, 15_000], LAP * 1000) > 0.98);
        // The program changes.
        together(&crowd, &mut now, [20_000, 40_000], LAP * 2 * LATE);
        assert!(together(&crowd, &mut now, [20_000, 40_000], LAP * 1000) < 0.02);
        // No difference is no reason to change.
        assert!(together(&crowd, &mut now, [20_000, 19_000], LAP * 1000) < 0.02);
    }

    #[test]
    fn who_faults_alone_is_called() {
        let crowd = Crowd::new();
        (0..100_000).for_each(|fault| {
            crowd.note(3, fault * 10_000, fault);
            assert!(crowd.is_together());
        });
    }

    #[test]
    fn what_the_program_waits_for_is_not_the_faults() {
        let (crowd, mut now) = (Crowd::new(), 0);
        together(&crowd, &mut now, [40_000, 15_000], LAP * 4);
        for _ in 0..1000 {
            now += 1_000_000_000;
            assert!(together(&crowd, &mut now, [40_000, 15_000], LAP) > 0.8 || crowd.trying.load(Relaxed));
        }
    }
}
