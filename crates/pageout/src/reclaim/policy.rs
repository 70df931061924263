//! Which unit leaves next: queues with a second chance, and a memory of what left when.
//!
//! The kernel shows user space no accessed bits, so recency comes from events alone: a unit's first fault, faults
//! on more of its pages, a rescue, and a refault soon after it left. Units enter a short trial queue; those
//! that show a second sign of use there, or come back before as many others left as are resident, go to
//! the main queue, where each sign buys one more round. One long scan thus passes through the trial
//! queue and leaves the main one alone (the idea of S3-FIFO, Yang et al., SOSP 2023, with refault
//! distances as in the kernel's workingset.c instead of a ghost queue).
//!
//! Sees unit numbers and [`Usage`], never pages. Its lock is a leaf.

use crate::space::Usage;
use alloc::collections::VecDeque;

/// Units that may enter without the queues growing, kept by [`Policy::reserve`].
const SPARE: usize = 4096;
/// Signs of use that count.
const MOST: u8 = 3;

/// What a unit that reclaim looks at should do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Turn {
    /// Leave.
    Evict,
    /// Stay; it was queued again.
    Stay,
}

/// The queues.
#[derive(Default)]
pub struct Policy {
    trial: VecDeque<u32>,
    main: VecDeque<u32>,
    /// Units that could not leave (pinned, read-only, locked); not offered until [`Policy::unpark`].
    parked: VecDeque<u32>,
    /// Units whose turn it is, passed over until [`Policy::rejoin`].
    passed: VecDeque<u32>,
    /// The queue that the last candidate came from.
    from_trial: bool,
}

impl Policy {
    /// Makes room ahead. From a thread that may allocate.
    pub fn reserve(&mut self) {
        for queue in [&mut self.trial, &mut self.main, &mut self.parked, &mut self.passed] {
            let spare = SPARE.max(queue.len() / 2);
            if queue.capacity() - queue.len() < SPARE {
                queue.reserve(spare);
            }
        }
    }

    /// Can some dozens of units enter or change queues without memory being asked for?
    pub fn has_room(&self) -> bool {
        let queues = [&self.trial, &self.main, &self.parked, &self.passed];
        queues.iter().all(|queue| queue.capacity() - queue.len() >= SPARE / 16)
    }

    /// Units that can be offered.
    pub fn len(&self) -> usize {
        self.trial.len() + self.main.len()
    }

    /// Units that could not leave when they were last tried.
    pub fn parked(&self) -> usize {
        self.parked.len()
    }

    /// Nothing can be offered.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// All units, parked ones too; for tests.
    #[cfg(any(test, feature = "simulated"))]
    pub fn queued(&self) -> impl Iterator<Item = u32> + '_ {
        self.trial.iter().chain(&self.main).chain(&self.parked).chain(&self.passed).copied()
    }

    /// Pages of a unit came in or were found. `now`: the clock of evictions. True if it came back so soon
    /// that it counts as part of the working set.
    pub fn used(&mut self, unit: u32, usage: &mut Usage, now: u32) -> bool {
        if usage.queued {
            usage.frequency = (usage.frequency + 1).min(MOST);
            return false;
        }
        usage.queued = true;
        usage.frequency = 0;
        let soon = usage.evicted_at != 0 && (now.wrapping_sub(usage.evicted_at) as usize) < self.len();
        if soon {
            self.main.push_back(unit);
        } else {
            self.trial.push_back(unit);
        }
        soon
    }

    /// The next to look at. Its caller asks [`Policy::judge`] under the unit's lock and, if it leaves or
    /// turns out to be gone, takes `queued` away.
    pub fn candidate(&mut self) -> Option<u32> {
        let trial_share = self.len() / 10;
        self.from_trial = self.trial.len() > trial_share || self.main.is_empty();
        let queue = if self.from_trial { &mut self.trial } else { &mut self.main };
        queue.pop_front()
    }

    /// Decides about a candidate.
    pub fn judge(&mut self, unit: u32, usage: &mut Usage) -> Turn {
        if usage.frequency == 0 {
            return Turn::Evict;
        }
        usage.frequency -= 1;
        self.main.push_back(unit);
        Turn::Stay
    }

    /// A unit did not leave this time: it goes to the end of the main queue.
    pub fn keep(&mut self, unit: u32) {
        self.main.push_back(unit);
    }

    /// It is a unit's turn, but it is not what is looked for: the next are offered until [`Policy::rejoin`].
    pub fn pass(&mut self, unit: u32) {
        self.passed.push_back(unit);
    }

    /// Units that were passed over are the first again, in their order.
    pub fn rejoin(&mut self) {
        while let Some(unit) = self.passed.pop_back() {
            self.trial.push_front(unit);
        }
    }

    /// A unit cannot leave: it is not offered for a while, so that reclaim does not try it again and again.
    pub fn park(&mut self, unit: u32) {
        self.parked.push_back(unit);
    }

    /// Offers parked units again.
    pub fn unpark(&mut self) {
        self.main.append(&mut self.parked);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    /// Runs accesses to units through a cache of `room` units; returns the hits.
    fn hits(room: usize, accesses: impl Iterator<Item = u32>) -> usize {
        let mut policy = Policy::default();
        let mut usages: HashMap<u32, (Usage, bool)> = HashMap::new();
        let (mut now, mut resident, mut hits) = (1u32, 0, 0);
        for unit in accesses {
            let entry = usages.entry(unit).or_default();
            if entry.1 {
                hits += 1;
                continue;
            }
            while resident >= room {
                let candidate = policy.candidate().unwrap();
                let victim = usages.get_mut(&candidate).unwrap();
                if policy.judge(candidate, &mut victim.0) == Turn::Evict {
                    *victim = (Usage { evicted_at: now, ..Usage::default() }, false);
                    now += 1;
                    resident -= 1;
                }
            }
            let entry = usages.get_mut(&unit).unwrap();
            policy.used(unit, &mut entry.0, now);
            entry.1 = true;
            resident += 1;
        }
        hits
    }

    #[test]
    fn a_scan_does_not_wash_out_what_came_back() {
        let hot = |n: u32| n % 50;
        // The hot set is established by coming back; then a long scan with the hot set between.
        let warm = (0..2000u32).map(|n| if n % 2 == 0 { hot(n / 2) } else { 1000 + n % 400 });
        let scan = (0..10_000u32).map(|n| if n % 4 == 0 { hot(n / 4) } else { 10_000 + n });
        let got = hits(100, warm.chain(scan));
        assert!(got > 2600, "{got} hits");
    }

    #[test]
    fn who_is_passed_over_is_first_again() {
        let mut policy = Policy::default();
        let mut usages = [Usage::default(); 4];
        (0..4).for_each(|unit| _ = policy.used(unit, &mut usages[unit as usize], 1));
        for _ in 0..2 {
            let unit = policy.candidate().unwrap();
            policy.pass(unit);
        }
        assert_eq!(policy.candidate(), Some(2));
        policy.rejoin();
        let order: Vec<u32> = core::iter::from_fn(|| policy.candidate()).collect();
        assert_eq!(order, [0, 1, 3]);
    }

    #[test]
    fn everything_queued_is_offered_once() {
        let mut policy = Policy::default();
        let mut usages = [Usage::default(); 100];
        for unit in 0..100 {
            policy.used(unit, &mut usages[unit as usize], 1);
            policy.used(unit, &mut usages[unit as usize], 1);
        }
        let mut left = 0;
        while let Some(unit) = policy.candidate() {
            if policy.judge(unit, &mut usages[unit as usize]) == Turn::Evict {
                left += 1;
            }
        }
        assert_eq!((left, policy.len()), (100, 0));
    }
}
