//! Which unit leaves next, and which of its pages stay: two queues, and what is known of each page by its coming back.
//!
//! The kernel shows user space no accessed bits: that a page is in use is seen only when it comes back soon after
//! it left. So each page has a heat of 0 to 3, one step up when it comes back soon, one down when late, and at its unit's
//! turn it leaves with a chance of 1, 1/4, 1/16, 1/64: a page in use is asked the more seldom, the surer it is. *Soon*:
//! since the last turn of its unit, and before as many units left as twice those that are queued (refault distances
//! as in the kernel's workingset.c, kept in the unit instead of a ghost queue).
//!
//! New units wait in a short trial queue, a fortieth of all, which is served first; those that come back soon, or keep
//! a page, go to the main queue (S3-FIFO, Yang et al., SOSP 2023). What was there before anything left is in the
//! main queue too: it is as good as what comes after. What a stream brings in is no sign of use: one block in four that
//! comes back soon goes to the main queue, so that a loop may settle and one scan cannot.
//!
//! A huge page waits as one and counts as all of its units, in the queues as on the clock of evictions.
//!
//! Sees unit numbers, [`Usage`] and bits for pages. Its lock is a leaf.

use crate::space::{Usage, BLOCK_UNITS};
use alloc::collections::VecDeque;

/// Units that may enter without the queues growing, kept by [`Policy::reserve`].
const SPARE: usize = 4096;
/// The trial queue's share of all: 1 of this.
const TRIAL: usize = 40;
/// Units for which it has room besides, if that is no more than a third of all (else for a tenth): what two streams
/// bring in at once must not leave before it is used.
const WINDOWS: usize = 2 * BLOCK_UNITS;
/// Times that the queues may go round before a page that comes back does so late.
const SOON: usize = 2;
/// Candidates in vain by which the next is taken for one step less hot.
const PATIENCE: u32 = 2;
/// How often some of the units that could not leave are offered again, in ns, or all if they are few; and for how many turns of
/// them, each of so many ns, all are.
const UNPARK_EVERY: u64 = 300_000_000;
const UNPARK_EACH: u64 = 500_000;
/// So many units are some; after most of them have left, so many times as many, and so on: it is over what kept them.
const SAMPLE: usize = 16;
const SAMPLE_GROWS: usize = 16;
/// The clock of evictions before any.
pub const FIRST: u32 = 1;
/// Blocks of a stream that come back soon, of which one settles.
const SETTLES: u32 = 4;

impl Usage {
    /// One step up for each of `pages`.
    fn warm(&mut self, pages: u16) {
        let [low, high] = self.heat;
        let pages = pages & !(low & high);
        self.heat = [low ^ pages, high | low & pages];
    }

    /// One step down.
    fn cool(&mut self, pages: u16) {
        let [low, high] = self.heat;
        let pages = pages & (low | high);
        self.heat = [low ^ pages, high & !(pages & !low)];
    }
}

/// Chance that is the same each time.
#[derive(Default, Debug)]
pub(super) struct Dice(u64);

impl Dice {
    pub(super) fn throw(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 32) as u32
    }
}

/// A unit in a queue, or the whole huge page that it stands for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Turn(u32);

impl Turn {
    /// In the number of a unit, which is below 2^31 as addresses are below 2^47.
    const WHOLE: u32 = 1 << 31;

    /// Of a unit, or of a huge page.
    pub fn new(unit: u32, whole: bool) -> Self {
        Self(unit | if whole { Self::WHOLE } else { 0 })
    }

    /// The unit, by its number.
    pub fn unit(self) -> u32 {
        self.0 & !Self::WHOLE
    }

    fn units(self) -> usize {
        if self.0 & Self::WHOLE == 0 {
            1
        } else {
            BLOCK_UNITS
        }
    }
}

/// In the order of their turns.
#[derive(Default)]
struct Queue {
    turns: VecDeque<Turn>,
    /// All of them together.
    units: usize,
}

impl Queue {
    fn push(&mut self, turn: Turn) {
        self.units += turn.units();
        self.turns.push_back(turn);
    }

    fn push_first(&mut self, turn: Turn) {
        self.units += turn.units();
        self.turns.push_front(turn);
    }

    fn pop(&mut self) -> Option<Turn> {
        let turn = self.turns.pop_front()?;
        self.units -= turn.units();
        Some(turn)
    }

    fn append(&mut self, other: &mut Self) {
        self.units += core::mem::take(&mut other.units);
        self.turns.append(&mut other.turns);
    }
}

/// The queues.
#[derive(Default)]
pub struct Policy {
    trial: Queue,
    main: Queue,
    /// Units that could not leave (pinned, read-only, locked); not offered until [`Policy::unpark`].
    parked: Queue,
    /// Units that were parked and have not been offered again yet, and the turns before theirs in the main queue.
    untried: usize,
    before_untried: usize,
    /// Units whose turn it is, passed over until [`Policy::rejoin`]; the last first. Those of the trial queue, and of the main.
    passed: [Queue; 2],
    /// The last candidate came from the trial queue.
    on_trial: bool,
    /// Units of streams that came back soon.
    streamed: u32,
    dice: Dice,
    /// Candidates since one left.
    in_vain: u32,
    /// When some of the parked units are offered again, in ns, and when all are.
    next_sample: u64,
    next_unpark: u64,
    /// How many some are; how many units were offered last, and how many have been parked since.
    sample: usize,
    offered: usize,
    parked_since: usize,
}

impl Policy {
    /// Makes room ahead. From a thread that may allocate.
    pub fn reserve(&mut self) {
        let [from_trial, from_main] = &mut self.passed;
        let queues = [&mut self.trial, &mut self.main, &mut self.parked, from_trial, from_main];
        for queue in queues.map(|queue| &mut queue.turns) {
            let spare = SPARE.max(queue.len() / 2);
            if queue.capacity() - queue.len() < SPARE {
                queue.reserve(spare);
            }
        }
    }

    /// Can a thousand units, a block of each thread that may be in a handler at once, enter or change queues without memory being
    /// asked for?
    pub fn has_room(&self) -> bool {
        self.queues().all(|queue| queue.turns.capacity() - queue.turns.len() >= SPARE / 4)
    }

    /// How often something can be offered before all was.
    pub fn turns(&self) -> usize {
        self.trial.turns.len() + self.main.turns.len()
    }

    /// Units that can be offered.
    pub fn len(&self) -> usize {
        self.trial.units + self.main.units
    }

    /// Units that could not leave when they were last tried.
    pub fn parked(&self) -> usize {
        self.parked.units + self.untried
    }

    /// Those of them that are offered again, but have not had their turn.
    pub fn untried(&self) -> usize {
        self.untried
    }

    /// Nothing can be offered.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// All units, parked ones too; for tests.
    #[cfg(any(test, feature = "simulated"))]
    pub fn queued(&self) -> impl Iterator<Item = u32> + '_ {
        self.queues().flat_map(|queue| queue.turns.iter().map(|turn| turn.unit()))
    }

    fn queues(&self) -> impl Iterator<Item = &Queue> {
        [&self.trial, &self.main, &self.parked].into_iter().chain(&self.passed)
    }

    /// Pages of a unit came in or were found, a bit for each; `asked`: by a fault, and not as part of a stream. `now`:
    /// the clock of evictions. True if the unit, or what of it was out, came back so soon that it counts as part of the working set.
    pub fn used(&mut self, turn: Turn, usage: &mut Usage, now: u32, pages: u16, asked: bool) -> bool {
        let away = now.wrapping_sub(usage.evicted_at) as usize;
        let soon = usage.evicted_at != 0 && away < SOON * self.len();
        if asked {
            let back = if soon { pages & usage.left } else { 0 };
            usage.warm(back);
            usage.cool(pages & !back);
        }
        usage.left &= !pages;
        if !core::mem::replace(&mut usage.queued, true) {
            let settles = now == FIRST || soon && (asked || self.settles());
            if settles { &mut self.main } else { &mut self.trial }.push(turn);
        }
        soon
    }

    fn settles(&mut self) -> bool {
        self.streamed = self.streamed.wrapping_add(1);
        // Whole blocks, so that what is left for the stream is not cut to pieces. Of huge pages so many in a row, for the same
        // reason: one in four would have the stream begin anew behind each.
        self.streamed / BLOCK_UNITS as u32 % SETTLES == 0
    }

    /// The next to look at. Its caller asks [`Policy::judge`] under the unit's lock and, if it leaves or
    /// turns out to be gone, takes `queued` away.
    pub fn candidate(&mut self) -> Option<Turn> {
        self.on_trial = self.serves_trial();
        if self.on_trial {
            return self.trial.pop();
        }
        let turn = self.main.pop()?;
        match self.before_untried {
            0 => self.untried = self.untried.saturating_sub(turn.units()),
            _ => self.before_untried -= 1,
        }
        Some(turn)
    }

    /// The same if it is this one.
    pub fn candidate_is(&mut self, turn: Turn) -> bool {
        let queue = if self.serves_trial() { &self.trial } else { &self.main };
        queue.turns.front() == Some(&turn) && self.candidate().is_some()
    }

    fn serves_trial(&self) -> bool {
        let windows = if self.len() >= 3 * WINDOWS { WINDOWS } else { self.len() / 10 };
        let room = windows.max(self.len() / TRIAL);
        self.trial.units > room || self.main.turns.is_empty()
    }

    /// Decides which of a candidate's pages leave. 0: it was queued again.
    pub fn judge(&mut self, turn: Turn, usage: &Usage, resident: u16) -> u16 {
        if usage.sampled != 0 && self.on_trial {
            // Watched for longer than a trial lasts.
            self.main.push(turn);
            return 0;
        }
        let [low, high] = usage.heat;
        // One throw for all pages, so that those of one heat stay together. Where most are hot heat says little, and
        // to look long is in vain.
        let leave = resident
            & match self.dice.throw().trailing_zeros() / 2 + self.in_vain / PATIENCE {
                0 => !(low | high),
                1 => !high,
                2 => !(low & high),
                _ => u16::MAX,
            };
        self.in_vain += 1;
        if leave == 0 {
            self.main.push(turn);
        } else {
            self.in_vain = 0;
        }
        leave
    }

    /// A unit, or some of its pages, did not leave this time: it goes to the end of the main queue.
    pub fn keep(&mut self, turn: Turn) {
        self.main.push(turn);
    }

    /// It is a unit's turn, but it is not what is looked for: the next are offered until [`Policy::rejoin`].
    pub fn pass(&mut self, turn: Turn) {
        self.passed[usize::from(!self.on_trial)].push_first(turn);
    }

    /// Units that were passed over are the first again, in their order, each in the queue that it was in: in the other one they
    /// would not be served next.
    pub fn rejoin(&mut self) {
        let [from_trial, from_main] = &mut self.passed;
        while let Some(turn) = from_trial.pop() {
            self.trial.push_first(turn);
        }
        while let Some(turn) = from_main.pop() {
            self.main.push_first(turn);
            // They have had their turn.
            self.before_untried += 1;
        }
    }

    /// A unit cannot leave: it is not offered for a while, so that reclaim does not try it again and again.
    pub fn park(&mut self, turn: Turn) {
        self.parked_since += turn.units();
        self.parked.push(turn);
    }

    /// Offers parked units again, if it is time at `now` (ns): all of them where they are few, or have long not been; else some,
    /// and the more, the more of those could leave. What was locked, and is no more, is soon noticed so, however much it is;
    /// what still cannot leave costs little.
    pub fn unpark_in_time(&mut self, now: u64) {
        if now < self.next_sample || self.untried > 0 {
            return;
        }
        let has_left = 2 * self.parked_since < self.offered;
        self.sample = if has_left { self.sample.saturating_mul(SAMPLE_GROWS) } else { SAMPLE };
        self.next_sample = now + UNPARK_EVERY;
        if now >= self.next_unpark && self.parked.units > self.sample {
            self.next_unpark = now + UNPARK_EACH * self.parked.turns.len() as u64;
            self.unpark();
        } else {
            self.unpark_sample();
        }
        (self.offered, self.parked_since) = (self.untried, 0);
    }

    /// Offers parked units again, once those of the last time have had their turn.
    pub fn unpark(&mut self) {
        if self.untried == 0 {
            (self.untried, self.before_untried) = (self.parked.units, self.main.turns.len());
            self.main.append(&mut self.parked);
        }
    }

    /// Offers some of them next: were it behind all others, those would leave to find out. None of the last time is untried.
    fn unpark_sample(&mut self) {
        let before = self.parked.units;
        while before - self.parked.units < self.sample {
            let Some(turn) = self.parked.pop() else { break };
            self.main.push_first(turn);
        }
        (self.untried, self.before_untried) = (before - self.parked.units, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    /// A cache of `room` units of one page each.
    #[derive(Default)]
    struct Units {
        policy: Policy,
        usages: HashMap<u32, (Usage, bool)>,
        now: u32,
        resident: usize,
    }

    impl Units {
        /// The hits of accesses, those of a stream marked.
        fn hits(&mut self, room: usize, accesses: impl Iterator<Item = (u32, bool)>) -> usize {
            accesses.filter(|(unit, streamed)| self.access(room, *unit, *streamed)).count()
        }

        fn access(&mut self, room: usize, unit: u32, streamed: bool) -> bool {
            self.now = self.now.max(FIRST);
            if self.usages.entry(unit).or_default().1 {
                return true;
            }
            while self.resident >= room {
                let candidate = self.policy.candidate().unwrap();
                let (usage, there) = self.usages.get_mut(&candidate.unit()).unwrap();
                if self.policy.judge(candidate, usage, 1) != 0 {
                    (usage.queued, usage.left, usage.evicted_at, *there) = (false, 1, self.now, false);
                    self.now += 1;
                    self.resident -= 1;
                }
            }
            let (usage, there) = self.usages.get_mut(&unit).unwrap();
            self.policy.used(Turn::new(unit, false), usage, self.now, 1, !streamed);
            *there = true;
            self.resident += 1;
            false
        }
    }

    #[test]
    fn a_scan_does_not_wash_out_what_came_back() {
        let hot = |n: u32| n % 50;
        let mut units = Units::default();
        let warm = (0..4000u32).map(|n| (if n % 2 == 0 { hot(n / 2) } else { 1000 + n % 400 }, false));
        units.hits(100, warm);
        let scan = |n: u32| if n % 4 == 0 { (hot(n / 4), false) } else { (10_000 + n, true) };
        let got = units.hits(100, (0..10_000).map(scan));
        assert!(got > 2400, "{got} hits of 2500");
    }

    #[test]
    fn what_was_there_first_is_not_washed_out() {
        let mut units = Units::default();
        units.hits(1000, (0..900).map(|unit| (unit, false)));
        units.hits(1000, (10_000..50_000).map(|unit| (unit, true)));
        let hits = units.hits(1000, (0..900).map(|unit| (unit, false)));
        assert!(hits >= 830, "{hits} hits of 900: two windows went");
    }

    #[test]
    fn a_loop_settles() {
        let mut units = Units::default();
        units.hits(100, (0..100).map(|unit| (unit, false)));
        let mut round = || units.hits(100, (1000..1080).map(|unit| (unit, true)));
        (0..40).for_each(|_| _ = round());
        assert!(round() > 70, "the first hundred are not used any more");
    }

    #[test]
    fn heat_goes_up_and_down() {
        let mut usage = Usage::default();
        let heat = |usage: &Usage, page: u16| (usage.heat[0] >> page & 1) + 2 * (usage.heat[1] >> page & 1);
        for expected in [1, 2, 3, 3] {
            usage.warm(0b10);
            assert_eq!((heat(&usage, 1), heat(&usage, 0)), (expected, 0));
        }
        for expected in [2, 1, 0, 0] {
            usage.cool(0b11);
            assert_eq!((heat(&usage, 1), heat(&usage, 0)), (expected, 0));
        }
    }

    #[test]
    fn hot_pages_stay_beside_cold_ones() {
        let (mut policy, mut usage) = (Policy::default(), Usage::default());
        usage.heat = [0xff00, 0xff00];
        let mut stayed = 0;
        for _ in 0..1000 {
            let leave = policy.judge(Turn::new(1, false), &usage, u16::MAX);
            assert_eq!(leave & 0xff, 0xff, "cold pages leave");
            stayed += (!leave).count_ones();
        }
        assert!((7800..7950).contains(&stayed), "{stayed} of 8000: 63 of 64");
    }

    /// The units 0 to 3 in their order.
    fn of_four() -> Policy {
        let mut policy = Policy::default();
        (0..4)
            .for_each(|unit| _ = policy.used(Turn::new(unit, false), &mut Usage::default(), FIRST, 1, true));
        policy
    }

    #[test]
    fn who_is_parked_counts_until_it_is_tried_again() {
        let mut policy = of_four();
        for _ in 0..2 {
            let turn = policy.candidate().unwrap();
            policy.park(turn);
        }
        let mut counts = vec![policy.parked()];
        for _ in 0..4 {
            policy.unpark();
            counts.push(policy.parked());
            policy.candidate().unwrap();
        }
        counts.push(policy.parked());
        assert_eq!(counts, [2, 2, 2, 2, 1, 0]);
    }

    #[test]
    fn who_was_parked_is_offered_again_in_time() {
        let mut policy = of_four();
        let first = policy.candidate().unwrap();
        policy.unpark_in_time(0);
        policy.park(first);
        policy.unpark_in_time(UNPARK_EVERY - 1);
        assert_eq!(policy.untried(), 0);
        policy.unpark_in_time(UNPARK_EVERY);
        assert_eq!(policy.untried(), 1);
    }

    /// How many turns are tried in the `n` periods from the `first` on; those of which it `stays` still cannot leave.
    fn tried(policy: &mut Policy, first: u64, n: u64, stays: impl Fn(u32) -> bool) -> usize {
        let tries = (first..first + n).map(|period| {
            policy.unpark_in_time(period * UNPARK_EVERY);
            let tried: Vec<Turn> = core::iter::from_fn(|| policy.candidate()).collect();
            tried.iter().filter(|turn| stays(turn.unit())).for_each(|turn| policy.park(*turn));
            tried.len()
        });
        tries.sum()
    }

    #[test]
    fn many_that_cannot_leave_are_tried_seldom_and_leave_soon_when_they_can() {
        let all = 1 << 20;
        let mut policy = Policy::default();
        (0..all).for_each(|unit| policy.park(Turn::new(unit, false)));
        assert_eq!(tried(&mut policy, 0, 1, |_| true), all as usize);
        // All of them are 524 s later. Of a CPU, at 25 us each, a thousandth.
        assert_eq!(tried(&mut policy, 1, 1000, |_| true), 1000 * SAMPLE);
        assert_eq!(policy.parked(), all as usize);
        // A part that is not met at once is found in that time.
        let last = |unit: u32| unit < all - 1000;
        assert_eq!(tried(&mut policy, 1001, 1000, last) / all as usize, 1);
        let rest = policy.parked();
        assert_eq!(rest, all as usize - 1000);
        // Two seconds.
        assert_eq!(tried(&mut policy, 2001, 7, |_| false), rest);
        assert_eq!(policy.parked(), 0);
    }

    #[test]
    fn a_huge_page_that_cannot_leave_is_one_to_try() {
        let mut policy = Policy::default();
        (0..1000).for_each(|huge| policy.park(Turn::new(huge * BLOCK_UNITS as u32, true)));
        // Half a second for all.
        assert_eq!(tried(&mut policy, 0, 3, |_| true), 1000 + 1 + 1000);
    }

    #[test]
    fn who_is_passed_over_is_first_again() {
        let pass_two = |policy: &mut Policy| -> Vec<u32> {
            let unit = |turn: Option<Turn>| turn.unwrap().unit();
            let passed = [(); 2].map(|()| policy.candidate().unwrap());
            passed.into_iter().for_each(|turn| policy.pass(turn));
            let third = unit(policy.candidate());
            policy.rejoin();
            [third].into_iter().chain([(); 2].map(|()| unit(policy.candidate()))).collect()
        };
        assert_eq!(pass_two(&mut of_four()), [2, 0, 1]);
        // Where the trial queue has room for more, too.
        let mut policy = Policy::default();
        let enter = |policy: &mut Policy, unit, now| {
            policy.used(Turn::new(unit, false), &mut Usage::default(), now, 1, true);
        };
        (0..1000).for_each(|unit| enter(&mut policy, unit, FIRST));
        assert_eq!(pass_two(&mut policy), [2, 0, 1]);
        // And of the trial queue itself.
        (1000..1200).for_each(|unit| enter(&mut policy, unit, FIRST + 1));
        assert_eq!(pass_two(&mut policy), [1002, 1000, 1001]);
    }

    #[test]
    fn who_is_passed_over_is_not_taken_for_one_that_was_parked() {
        let mut policy = of_four();
        let first = policy.candidate().unwrap();
        policy.park(first);
        policy.unpark();
        let second = policy.candidate().unwrap();
        policy.pass(second);
        policy.rejoin();
        let counts = [(); 4].map(|()| {
            policy.candidate();
            policy.parked()
        });
        assert_eq!(counts, [1, 1, 1, 0]);
    }
}
