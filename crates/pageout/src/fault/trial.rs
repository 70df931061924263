//! Which of a few ways is the fastest, found out by trying: what it depends on (the program, the machine, the kernel's
//! scheduler) cannot be asked. Now and then another way than the usual one is taken for a *lap*, and kept if that is
//! clearly faster.
//!
//! Noted by one at a time; looked at by anybody.

use crate::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Ways, by number; 0 is the usual one to begin with.
pub struct Trial {
    ways: u64,
    usual: AtomicU64,
    /// The way that is taken just now.
    way: AtomicU64,
    /// What was done on this lap, and the time that it took, ns.
    done: AtomicU64,
    took: AtomicU64,
    /// The last whole lap's time, the usual way, ns.
    usual_took: AtomicU64,
    /// Laps until another way is tried, and how many there are between two trials in vain of all of them.
    wait: AtomicU64,
    patience: AtomicU64,
    /// The way that was tried last.
    last: AtomicU64,
}

/// What is done on a lap: so many faults take a few ms.
const LAP: u64 = 128;
/// Laps between two trials: so many after a change, four times as many after each in vain, so many at most. The last bounds
/// what trials cost.
const SOON: u64 = 8;
const LATE: u64 = 256;

impl Trial {
    /// Nothing is known yet.
    pub fn new(ways: u64) -> Self {
        Self {
            ways,
            usual: AtomicU64::new(0),
            way: AtomicU64::new(0),
            done: AtomicU64::new(0),
            took: AtomicU64::new(0),
            usual_took: AtomicU64::new(0),
            wait: AtomicU64::new(1),
            patience: AtomicU64::new(SOON),
            last: AtomicU64::new(0),
        }
    }

    /// The way to take.
    pub fn way(&self) -> u64 {
        self.way.load(Relaxed)
    }

    /// Is that another than the usual one?
    #[cfg(test)]
    pub fn is_trying(&self) -> bool {
        self.way() != self.usual.load(Relaxed)
    }

    /// `done` more was done, in `took` ns.
    pub fn note(&self, done: u64, took: u64) {
        let done = self.done.load(Relaxed) + done;
        let took = self.took.load(Relaxed) + took;
        let is_done = done >= LAP;
        self.done.store(if is_done { 0 } else { done }, Relaxed);
        self.took.store(if is_done { 0 } else { took }, Relaxed);
        if is_done {
            self.end_lap(took);
        }
    }

    fn end_lap(&self, took: u64) {
        let (usual, way) = (self.usual.load(Relaxed), self.way.load(Relaxed));
        if way == usual {
            self.usual_took.store(took, Relaxed);
            let wait = self.wait.load(Relaxed) - 1;
            self.wait.store(wait, Relaxed);
            if wait == 0 {
                let other = self.after(self.last.load(Relaxed), usual);
                self.last.store(other, Relaxed);
                self.way.store(other, Relaxed);
            }
            return;
        }
        let patience = self.patience.load(Relaxed);
        let wait = if took < self.usual_took.load(Relaxed) / 8 * 7 {
            self.usual.store(way, Relaxed);
            self.patience.store(SOON, Relaxed);
            SOON
        } else {
            self.way.store(usual, Relaxed);
            if self.after(way, usual) > way {
                // The next one has its turn at once.
                1
            } else {
                self.patience.store((patience * 4).min(LATE), Relaxed);
                (patience * 4).min(LATE)
            }
        };
        self.wait.store(wait, Relaxed);
    }

    /// The way after `way` that is not the usual one.
    fn after(&self, way: u64, usual: u64) -> u64 {
        let next = (way + 1) % self.ways;
        if next == usual {
            (next + 1) % self.ways
        } else {
            next
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is done takes `pace[way]` ns each. The share of it that was done in each way.
    fn shares<const WAYS: usize>(trial: &Trial, pace: [u64; WAYS], laps: u64) -> [f64; WAYS] {
        let mut done = [0; WAYS];
        for _ in 0..laps * LAP {
            let way = trial.way() as usize;
            done[way] += 1;
            trial.note(1, pace[way]);
        }
        done.map(|done| done as f64 / (laps * LAP) as f64)
    }

    #[test]
    fn the_faster_way_is_found_and_kept() {
        let trial = Trial::new(2);
        shares(&trial, [40_000, 15_000], 4);
        assert!(shares(&trial, [40_000, 15_000], 1000)[1] > 0.98);
        // What is fast changes.
        shares(&trial, [20_000, 40_000], 2 * LATE);
        assert!(shares(&trial, [20_000, 40_000], 1000)[1] < 0.02);
        // No difference is no reason to change.
        assert!(shares(&trial, [20_000, 19_000], 1000)[1] < 0.02);
    }

    #[test]
    fn the_fastest_of_three_is_found_and_kept() {
        for fastest in 0..3 {
            let mut pace = [20_000, 30_000, 25_000];
            pace[fastest] = 10_000;
            let trial = Trial::new(3);
            shares(&trial, pace, 16);
            assert!(shares(&trial, pace, 1000)[fastest] > 0.97, "{fastest}");
        }
    }
}
