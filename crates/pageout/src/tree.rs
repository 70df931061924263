//! One limit for all processes of a run: what each of them uses, in memory that all of them share.
//!
//! A process has a *seat*. Its keeper writes there what the process uses, at each look, and what it lacks; `run`
//! writes its *share*, what it may count on when memory is short. Nobody asks anybody: what a process may have now
//! follows from the seats ([`Tree::look`]).
//!
//! ```text
//! free      = limit − what the others use
//! allowance = free, but who uses more than its share leaves room for what those lack that use less,
//!             in proportion to the excess; and nobody must fall below its share for others' sake
//! ```
//! Memory that is shared on purpose cannot leave: it counts once, each has its part of it, and all of the above is about what is
//! left of the limit: at least an eighth of it beside what else cannot.
//!
//! A page that several share since a fork is gone only when all of them have let it leave. So while all together are
//! clearly over the limit, whoever shares pages lets some leave, whatever its share: about the same at the same time,
//! as their queues are alike.
//!
//! So a process alone has all of the limit, one that needs nothing gives all, and the sum stays within the limit,
//! but for what is touched between two looks. All counts are relaxed: each is a fact of its own, a look that mixes
//! old and new ones is as good as one a little earlier.

use crate::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

/// Processes that have a seat. Those beyond share the limit with nobody, and nobody with them.
pub const SEATS: usize = 2048;
/// The bytes of a tree in shared memory.
pub const TREE_BYTES: usize = (size_of::<Tree>()).next_multiple_of(4096);
/// Who uses less is nobody of whom something can be had: bytes.
const LEAST: u64 = 2 << 20;
/// The [`smallest`] of a large limit that few share: bytes.
const MOST_SMALLEST: u64 = 16 << 20;

/// What no process goes below, and none that uses less is paged: bytes, of a limit of `limit`, where so many have more
/// than the least. Together no more than half of the limit, as long as there is half for the least of all.
pub fn smallest(limit: u64, processes: usize) -> u64 {
    smallest_beside(0, limit, processes)
}

/// The same where so much cannot go (`stuck`), which is no room for others: half of what is left, or an eighth of the limit.
fn smallest_beside(stuck: u64, limit: u64, processes: usize) -> u64 {
    let room = limit.saturating_sub(stuck).max(limit / 4);
    let fair = room / (2 * processes.max(1) as u64);
    (limit / 8).min(MOST_SMALLEST).min(fair.max(LEAST))
}

/// What `limit` leaves beside what is shared on purpose (`fixed`), if so much of the rest cannot go either (`stuck`).
fn left_beside(fixed: u64, stuck: u64, limit: u64) -> u64 {
    limit.saturating_sub(fixed).max((limit / 8).saturating_add(stuck).min(limit))
}

/// What those that have no limit count as at most, beside processes as for [`divide`]: nobody goes below the [`smallest`] for
/// them, and where all have that the tree is not over its limit.
pub fn most_unlimited(limit: u64, processes: &[(u64, u64, u64)]) -> u64 {
    let count = processes.iter().filter(|process| process.0 > LEAST).count();
    limit.saturating_sub(smallest(limit, count) * count as u64)
}

/// What a process finds when it looks: bytes.
#[derive(Debug, Clone, Copy)]
pub struct View {
    /// What the others use.
    pub others: u64,
    /// What it may use now.
    pub allowance: u64,
    /// See [`smallest`].
    pub smallest: u64,
    /// Processes that may grow at the same time, itself among them.
    pub processes: usize,
    /// All that are there.
    pub alive: usize,
}

/// One process. All values but `short` are bytes.
#[repr(C)]
#[derive(Debug, Default)]
pub struct Seat {
    /// Its own memory: without files, and of what it shares with others since a fork only its part.
    used: AtomicU64,
    /// The same, all that it shares included.
    resident: AtomicU64,
    /// Its part of memory that is shared on purpose.
    fixed: AtomicU64,
    /// Of its own memory, what cannot go.
    stuck: AtomicU64,
    /// 1 if it is short of memory, else 0.
    short: AtomicU64,
    share: AtomicU64,
}

impl Seat {
    /// What the process uses; see the fields.
    pub fn tell(&self, used: u64, resident: u64, short: bool) {
        self.used.store(used, Relaxed);
        self.resident.store(resident, Relaxed);
        self.short.store(short.into(), Relaxed);
    }

    /// Says how much is its part of what is shared on purpose, which comes on top of what it uses.
    pub fn tell_fixed(&self, bytes: u64) {
        self.fixed.store(bytes, Relaxed);
    }

    /// Says how much of what it uses cannot go.
    pub fn tell_stuck(&self, bytes: u64) {
        self.stuck.store(bytes, Relaxed);
    }

    /// What it said last.
    pub fn used(&self) -> u64 {
        self.used.load(Relaxed)
    }

    /// Is it short of memory, as it said last?
    pub fn is_short(&self) -> bool {
        self.short.load(Relaxed) != 0
    }

    /// What it would take up to its share, if it is short of memory.
    fn lacks(&self) -> u64 {
        if self.is_short() {
            self.share().saturating_sub(self.used())
        } else {
            0
        }
    }

    /// What it counts as in [`divide`]: who is short gets a share, however little it has.
    pub fn claims(&self) -> u64 {
        if self.is_short() {
            self.used().max(MOST_SMALLEST)
        } else {
            self.used()
        }
    }

    /// What it may count on.
    pub fn share(&self) -> u64 {
        self.share.load(Relaxed)
    }

    /// Says what it may count on. The shares of all seats are at most the limit.
    pub fn set_share(&self, bytes: u64) {
        self.share.store(bytes, Relaxed);
    }

    /// Does it use more than its share? Who has none uses so little that nothing can be had of it ([`divide`]).
    pub fn is_above(&self) -> bool {
        (1..self.used()).contains(&self.share())
    }

    /// Nobody's any more.
    pub fn clear(&self) {
        self.tell(0, 0, false);
        self.tell_fixed(0);
        self.tell_stuck(0);
        self.set_share(0);
    }
}

/// All of them.
#[repr(C)]
#[derive(Debug)]
pub struct Tree {
    /// Seats that were ever taken: the first so many.
    taken: AtomicU32,
    _room: u32,
    /// Most that all have used together at a look.
    peak: AtomicU64,
    seats: [Seat; SEATS],
}

impl Tree {
    /// A seat, by its number; from then on it counts.
    pub fn seat(&self, number: usize) -> &Seat {
        self.taken.fetch_max(number as u32 + 1, Relaxed);
        &self.seats[number]
    }

    fn seats(&self) -> impl Iterator<Item = &Seat> {
        self.seats[..(self.taken.load(Relaxed) as usize).min(SEATS)].iter()
    }

    /// What all use together.
    pub fn used(&self) -> u64 {
        self.seats().map(Seat::used).sum::<u64>() + self.fixed()
    }

    /// Of that, what cannot go.
    pub fn stuck(&self) -> u64 {
        self.own_stuck() + self.fixed()
    }

    /// The same without what is shared on purpose.
    fn own_stuck(&self) -> u64 {
        self.seats().map(|seat| seat.stuck.load(Relaxed)).sum()
    }

    /// Of that, what is shared on purpose.
    fn fixed(&self) -> u64 {
        self.seats().map(|seat| seat.fixed.load(Relaxed)).sum()
    }

    /// What `limit` leaves for memory that can go.
    pub fn left_of(&self, limit: u64) -> u64 {
        left_beside(self.fixed(), self.own_stuck(), limit)
    }

    /// What all use together, with all that they share since a fork counted for each.
    pub fn resident(&self) -> u64 {
        self.seats().map(|seat| seat.resident.load(Relaxed)).sum::<u64>() + self.fixed()
    }

    /// Is one short of memory that it may count on?
    pub fn is_short(&self) -> bool {
        self.seats().any(|seat| seat.lacks() > 0)
    }

    /// The most that all have used together at a look.
    pub fn peak(&self) -> u64 {
        self.peak.load(Relaxed)
    }

    /// What the process of `seat` finds, and what it may use of `limit` now; `shares`: pages, with other processes.
    pub fn look(&self, seat: &Seat, limit: u64, shares: bool) -> View {
        let (mut others, mut lacks, mut excess, mut count, mut alive) = (0u64, 0u64, 0u64, 0, 0);
        let (mut fixed, mut stuck) = (0, 0);
        for other in self.seats() {
            let used = other.used();
            count += (used > LEAST) as usize;
            alive += (used > 0) as usize;
            fixed += other.fixed.load(Relaxed);
            stuck += other.stuck.load(Relaxed);
            excess += used.saturating_sub(other.share());
            if !core::ptr::eq(other, seat) {
                others += used;
                lacks += other.lacks();
            }
        }
        let (used, share) = (seat.used(), seat.share());
        let limit = left_beside(fixed, stuck, limit);
        self.peak.fetch_max(others + used + fixed, Relaxed);
        let free = limit.saturating_sub(others);
        let over = used.saturating_sub(share);
        let leave = (lacks as u128 * over as u128 / excess.max(1) as u128) as u64;
        let (smallest, processes) = (smallest_beside(stuck, limit, count), count.max(1));
        let mut allowance = free.saturating_sub(leave).max(used.min(share));
        let too_much = (others + used).saturating_sub(limit.saturating_add(limit / 64));
        if shares && too_much > 0 {
            allowance = allowance.min(used - used.min(too_much / processes as u64));
        }
        let own_fixed = seat.fixed.load(Relaxed);
        let allowance = allowance.max(smallest) + own_fixed;
        View { others: others + fixed.saturating_sub(own_fixed), allowance, smallest, processes, alive }
    }
}

/// New shares of `limit` for processes with ([`Seat::claims`], share so far, pages that came back since the last time). Those that
/// need more than they have are those whose pages come back; a third of the way is gone each time. Nobody is brought
/// below a quarter of an equal share, and who is below it comes up while pages come back.
pub fn divide(limit: u64, processes: &mut [(u64, u64, u64)]) {
    let least = smallest(limit, processes.iter().filter(|process| process.0 > LEAST).count());
    let small: u64 = processes.iter().map(|(used, _, _)| *used).filter(|used| *used < least).sum();
    let large = |process: &&mut (u64, u64, u64)| process.0 >= least;
    let count = processes.iter_mut().filter(large).count() as u64;
    processes.iter_mut().filter(|process| process.0 < least).for_each(|process| process.1 = 0);
    if count == 0 {
        return;
    }
    let whole = limit.saturating_sub(small);
    let equal = whole / count;
    // Who is new begins with an equal share, for which the others make room.
    let old: u64 = processes.iter_mut().filter(large).map(|process| process.1).sum();
    let new = processes.iter_mut().filter(large).filter(|process| process.1 == 0).count() as u64;
    for (_, share, _) in processes.iter_mut().filter(large) {
        *share = if *share == 0 { equal } else { scale(*share, whole - equal * new, old) };
    }
    let came_back: u64 = processes.iter_mut().filter(large).map(|process| process.2).sum();
    if came_back == 0 {
        return;
    }
    let floor = equal / 4;
    let spare = whole - floor * count;
    for (_, share, refaults) in processes.iter_mut().filter(large) {
        let due = floor + scale(*refaults, spare, came_back);
        *share = (2 * *share + due) / 3;
    }
}

/// `part` × `to` / `of`.
fn scale(part: u64, to: u64, of: u64) -> u64 {
    (part as u128 * to as u128 / of.max(1) as u128) as u64
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::boxed::Box;
    use std::vec::Vec;

    const MIB: u64 = 1 << 20;

    fn tree_of(seats: &[(u64, u64, bool)]) -> Box<Tree> {
        let empty = core::array::from_fn(|_| Seat::default());
        let tree =
            Box::new(Tree { taken: AtomicU32::new(0), _room: 0, peak: AtomicU64::new(0), seats: empty });
        for (number, (used, share, short)) in seats.iter().enumerate() {
            let seat = tree.seat(number);
            seat.set_share(share * MIB);
            seat.tell(used * MIB, used * MIB, *short);
        }
        tree
    }

    fn allowances(tree: &Tree, n: usize, limit: u64) -> Vec<u64> {
        (0..n).map(|number| tree.look(tree.seat(number), limit * MIB, false).allowance / MIB).collect()
    }

    #[test]
    fn who_is_alone_has_all_and_who_needs_nothing_gives_all() {
        let tree = tree_of(&[(100, 0, false)]);
        assert_eq!(allowances(&tree, 1, 512), [512]);
        let tree = tree_of(&[(412, 256, true), (100, 256, false)]);
        assert_eq!(allowances(&tree, 2, 512), [412, 100]);
    }

    #[test]
    fn who_lacks_gets_its_share_from_those_above_theirs() {
        // The first gives what the second lacks, and not more; the second grows as the first shrinks.
        let tree = tree_of(&[(412, 256, false), (100, 256, true)]);
        assert_eq!(allowances(&tree, 2, 512), [256, 100]);
        tree.seat(0).tell(300 * MIB, 300 * MIB, false);
        assert_eq!(allowances(&tree, 2, 512), [256, 212]);
        // Two above their shares give in proportion to what they have too much.
        let tree = tree_of(&[(220, 100, false), (160, 100, false), (132, 312, true)]);
        assert_eq!(allowances(&tree, 3, 512), [100, 100, 132]);
        let tree = tree_of(&[(200, 100, false), (150, 100, false), (162, 192, true)]);
        assert_eq!(allowances(&tree, 3, 512), [180, 140, 162]);
    }

    #[test]
    fn all_who_share_pages_let_some_leave() {
        let tree = tree_of(&[(300, 100, false), (112, 206, false), (140, 206, false)]);
        assert_eq!(allowances(&tree, 3, 512), [260, 112, 140]);
        let shares = |n| tree.look(tree.seat(n), 512 * MIB, true).allowance;
        assert_eq!([0, 1, 2].map(shares), [260 * MIB, 112 * MIB - 32 * MIB / 3, 140 * MIB - 32 * MIB / 3]);
        tree.seat(0).tell(260 * MIB, 260 * MIB, false);
        assert_eq!([0, 1, 2].map(shares), [260 * MIB, 112 * MIB, 140 * MIB]);
        // What is free is for them as well.
        tree.seat(0).tell(160 * MIB, 160 * MIB, false);
        assert_eq!([0, 1, 2].map(shares), [260 * MIB, 212 * MIB, 240 * MIB]);
    }

    #[test]
    fn what_is_shared_on_purpose_is_gone_from_the_limit() {
        // 140 of 150 are shared by both: what is left is divided, an eighth of the limit at least.
        let tree = tree_of(&[(5, 0, false), (140, 100, false)]);
        [0, 1].into_iter().for_each(|number| tree.seat(number).tell_fixed(70 * MIB));
        assert_eq!(tree.used(), 285 * MIB);
        tree.seat(0).tell_stuck(3 * MIB);
        assert_eq!(tree.stuck(), 143 * MIB);
        assert_eq!(tree.left_of(150 * MIB), 150 * MIB / 8 + 3 * MIB);
        tree.seat(0).tell_stuck(0);
        let look = |number| tree.look(tree.seat(number), 150 * MIB, false);
        let left = tree.left_of(150 * MIB);
        assert_eq!(left, 150 * MIB / 8);
        assert_eq!(look(1).others, 75 * MIB);
        tree.seat(1).set_share(left);
        assert_eq!(look(1).allowance, left + 70 * MIB);
        assert!(look(0).smallest <= left / 4);
        [0, 1].into_iter().for_each(|number| tree.seat(number).tell_fixed(20 * MIB));
        assert_eq!(tree.left_of(150 * MIB), 110 * MIB);
        assert_eq!(look(1).allowance, (110 - 5 + 20) * MIB);
    }

    #[test]
    fn a_small_process_is_never_squeezed() {
        let tree = tree_of(&[(508, 500, false), (4, 0, false)]);
        assert_eq!(allowances(&tree, 2, 512), [508, 16]);
    }

    #[test]
    fn what_one_has_locked_is_no_room_for_the_others() {
        let mut seats = [(8, 2, false); 9];
        seats[0] = (82, 82, false);
        let tree = tree_of(&seats);
        tree.seat(0).tell_stuck(80 * MIB);
        for number in 1..seats.len() {
            let view = tree.look(tree.seat(number), 100 * MIB, false);
            tree.seat(number).tell(view.allowance, view.allowance, false);
        }
        assert!(tree.used() <= 100 * MIB, "{} MiB", tree.used() / MIB);
    }

    #[test]
    fn many_small_ones_keep_to_the_limit_too() {
        let seats = [(14, 0, false); 40];
        let tree = tree_of(&seats);
        for number in 0..seats.len() {
            let view = tree.look(tree.seat(number), 256 * MIB, false);
            tree.seat(number).tell(view.allowance, view.allowance, false);
        }
        assert!(tree.used() <= 256 * MIB, "{} MiB", tree.used() / MIB);
        assert_eq!(smallest(256 * MIB, 1000), LEAST);
        assert_eq!(smallest(8 * MIB, 1000), MIB);
    }

    #[test]
    fn who_has_no_limit_leaves_the_smallest_to_others() {
        let processes = [(40 * MIB, 0, 0), (3 * MIB, 0, 0), (MIB, 0, 0)];
        let most = most_unlimited(128 * MIB, &processes);
        assert_eq!(most, 96 * MIB);
        let tree = tree_of(&[(96, 96, false), (16, 0, true), (16, 0, true)]);
        assert_eq!(allowances(&tree, 3, 128)[1..], [16, 16]);
        assert_eq!(most_unlimited(u64::MAX, &[]), u64::MAX);
    }

    #[test]
    fn who_is_short_gets_a_share_however_little_it_has() {
        let tree = tree_of(&[(240, 256, false), (12, 0, true)]);
        let claims = |seat: &Seat| (seat.claims(), seat.share(), 0);
        let mut processes = [0, 1].map(|number| claims(tree.seat(number)));
        divide(256 * MIB, &mut processes);
        assert_eq!(processes.map(|p| p.1 / MIB), [128, 128]);
        // What it lacks is known as soon as it has one.
        [0, 1].into_iter().for_each(|number| tree.seat(number).set_share(processes[number].1));
        assert!(tree.is_short());
        assert_eq!(allowances(&tree, 2, 256), [128, 16]);
    }

    #[test]
    fn shares_follow_what_comes_back() {
        let mut processes = [(300 * MIB, 0, 0), (200 * MIB, 0, 0), (3 * MIB, 0, 9)];
        divide(512 * MIB, &mut processes);
        assert_eq!(processes.map(|p| p.1 / MIB), [254, 254, 0]);
        for _ in 0..20 {
            processes[0].2 = 900;
            processes[1].2 = 100;
            divide(512 * MIB, &mut processes);
        }
        assert!(processes[0].1 > 2 * processes[1].1, "{processes:?}");
        assert!(processes[1].1 >= 509 * MIB / 8, "{processes:?}");
        // Nothing comes back: they stay.
        let before = processes.map(|p| p.1);
        (processes[0].2, processes[1].2) = (0, 0);
        divide(512 * MIB, &mut processes);
        assert!(processes.iter().zip(before).all(|(p, before)| p.1.abs_diff(before) <= 2));
    }

    proptest! {
        /// The shares of all are never more than the limit, however often they are divided, and nobody starves.
        #[test]
        fn shares_stay_within_the_limit(
            limit in 64u64..4096,
            rounds in prop::collection::vec(prop::collection::vec((0u64..4096, 0u64..100_000), 1..12), 1..6),
        ) {
            let mut shares: Vec<u64> = Vec::new();
            for round in rounds {
                shares.resize(round.len(), 0);
                let joined = round.iter().zip(&shares).map(|((used, back), share)| (used * MIB, *share, *back));
                let mut processes: Vec<_> = joined.collect();
                divide(limit * MIB, &mut processes);
                shares = processes.iter().map(|p| p.1).collect();
                prop_assert!(shares.iter().sum::<u64>() <= limit * MIB);
                let least = smallest(limit * MIB, processes.iter().filter(|p| p.0 > LEAST).count());
                let large = processes.iter().filter(|p| p.0 >= least).count() as u64;
                let small: u64 = processes.iter().map(|p| p.0).filter(|used| *used < least).sum();
                for process in processes.iter().filter(|p| p.0 >= least) {
                    prop_assert!(process.1 + 8 >= (limit * MIB).saturating_sub(small) / large / 8);
                }
            }
        }

        /// If each takes no more than its allowance, one after the other, the sum stays within the limit, and what
        /// was over it comes down to it.
        #[test]
        fn allowances_keep_the_limit(
            seats in prop::collection::vec((16u64..2000, any::<bool>()), 1..10),
            order in prop::collection::vec((0usize..10, any::<bool>()), 50..100),
        ) {
            let limit = 2048 * MIB;
            let share = limit / MIB / seats.len() as u64;
            let n = seats.len();
            let tree = tree_of(&seats.iter().map(|(used, short)| (*used, share, *short)).collect::<Vec<_>>());
            for (number, short) in order.into_iter().chain((0..2 * n).map(|number| (number, true))) {
                let seat = tree.seat(number % n);
                let (before, allowed) = (tree.used(), tree.look(seat, limit, false).allowance);
                seat.tell(allowed, allowed, short);
                prop_assert!(tree.used() <= before.max(limit));
            }
            prop_assert!(tree.used() <= limit, "{} of {}", tree.used() / MIB, limit / MIB);
        }
    }
}
