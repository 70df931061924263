//! What of mapped files goes, and what stays: the policy for memory that has its place already, and of which nobody sees whether
//! it is used.
//!
//! What is new goes first: most of a file is read once. What comes back soon stays, and is tried again the more seldom the oftener
//! it did, by the rule that holds for the program's own memory ([`super::policy`]): at its turn a unit of heat `n` leaves with a
//! chance of one in 4ⁿ. *Soon* is before as much has left as may be there, as the kernel's refault distance has it (workingset.c).

use super::policy::Dice;
use crate::space::discover::DeviceNumber;
use alloc::collections::BTreeMap;
use core::num::NonZeroU32;

/// Units whose states are kept together. Not many: of a large file there may be a page here and there.
const TOGETHER: usize = 16;
/// Fewer are not worth to be forgotten.
const FEW: usize = 1024;
/// The most of heat, and that of code which was not tried yet.
const HOTTEST: u8 = 3;
const CODE: u8 = 1;
/// Whether what has left came back is looked at when this part of what may be there has left since. The hand comes there so much
/// later, if a file is larger than that, that what is in use would look like what is read once.
const SOON: u32 = 8;
/// For so many turns what the kernel did not reclaim is left alone.
const STUCK: u8 = 8;

/// What comes of a unit that is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Seen {
    /// It is cold, or was not seen before.
    Leaves,
    /// It is left alone.
    Stays,
    /// It stays, for it came back soon.
    CameBack,
    /// It could not leave.
    Stuck,
}

/// A unit of a file. Its addresses say nothing of it: another file may be mapped there a moment later, and it elsewhere.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileUnit {
    /// The file system, and the file's number there.
    pub file: (DeviceNumber, u64),
    /// Which of the file's units.
    pub number: usize,
}

/// What is known of units.
#[derive(Debug, Default)]
pub struct FileUnits {
    known: BTreeMap<((DeviceNumber, u64), usize), Together>,
    /// How many of them were left when the others were forgotten.
    kept: usize,
    /// Units that have left so far, all kinds of memory together, and how many there may be.
    clock: u32,
    capacity: u32,
    turn: bool,
    /// The unit that was seen last in this round, and what came of it: it may be in parts.
    last: Option<(FileUnit, Seen)>,
    dice: Dice,
}

#[derive(Debug)]
struct Together {
    /// When one of them was seen.
    seen: u32,
    states: [State; TOGETHER],
}

#[derive(Debug, Clone, Copy)]
struct State {
    /// When it left, if it has since it was seen last.
    left: Option<NonZeroU32>,
    /// None: it was not seen yet.
    heat: Option<u8>,
    /// Turns that it is left alone, for it could not leave.
    stuck: u8,
}

impl FileUnits {
    /// A round begins: in a `turn` each unit has its turn. So many units have left so far, all kinds of memory together (`clock`),
    /// and so many may be there.
    pub fn begin(&mut self, clock: u32, capacity: u32, turn: bool) {
        (self.clock, self.capacity, self.turn, self.last) = (clock, capacity, turn, None);
    }

    /// In a round: so many units have left by now.
    pub fn tick(&mut self, clock: u32) {
        self.clock = clock;
    }

    /// Is it time to look whether what `left` when the clock said so came back?
    pub fn is_due(&self, left: u32) -> bool {
        self.clock.wrapping_sub(left) >= self.capacity / SOON
    }

    /// A unit that left a moment ago is there again; false: that was known.
    pub fn came_back(&mut self, unit: FileUnit) -> bool {
        let state = self.state(unit);
        let left = state.left.take().is_some();
        if left {
            state.heat = Some((state.heat.unwrap_or(0) + 1).min(HOTTEST));
        }
        left
    }

    /// A unit is there.
    pub fn visit(&mut self, unit: FileUnit, is_code: bool) -> Seen {
        if let Some((_, seen)) = self.last.filter(|(last, _)| *last == unit) {
            return seen;
        }
        let (clock, capacity, turn, thrown) = (self.clock, self.capacity, self.turn, self.dice.throw());
        let state = self.state(unit);
        let came_back = state.left.take().map(|left| clock.wrapping_sub(left.get()) < capacity);
        let heat = match (state.heat, came_back) {
            (Some(heat), Some(true)) => (heat + 1).min(HOTTEST),
            (Some(heat), Some(false)) => heat.saturating_sub(1),
            (Some(heat), None) => heat,
            (None, _) => u8::from(is_code) * CODE,
        };
        let is_known = state.heat.replace(heat).is_some() && came_back.is_none();
        if turn {
            state.stuck = state.stuck.saturating_sub(1);
        }
        let seen = if state.stuck > 0 {
            Seen::Stuck
        } else if came_back == Some(true) {
            Seen::CameBack
        } else if heat == 0 || turn && is_known && thrown % (1 << (2 * heat)) == 0 {
            state.left = NonZeroU32::new(clock.max(1));
            Seen::Leaves
        } else {
            Seen::Stays
        };
        self.last = Some((unit, seen));
        seen
    }

    /// A unit that was to leave has not.
    pub fn stays(&mut self, unit: FileUnit) {
        let state = self.state(unit);
        (state.left, state.stuck) = (None, STUCK);
    }

    fn state(&mut self, unit: FileUnit) -> &mut State {
        const NEVER: State = State { left: None, heat: None, stuck: 0 };
        let together = self.known.entry((unit.file, unit.number / TOGETHER));
        let together = together.or_insert(Together { seen: 0, states: [NEVER; TOGETHER] });
        together.seen = self.clock;
        &mut together.states[unit.number % TOGETHER]
    }

    /// What was not seen for so long that it would be as if new is not known any more.
    pub fn forget(&mut self) {
        if self.known.len() < 2 * self.kept + FEW {
            return;
        }
        self.known.retain(|_, together| self.clock.wrapping_sub(together.seen) < self.capacity);
        self.kept = self.known.len();
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::*;

    fn unit(number: usize) -> FileUnit {
        FileUnit { file: (DeviceNumber { major: 8, minor: 1 }, 77), number }
    }

    fn round(units: &mut FileUnits, clock: u32, turn: bool, number: usize) -> Seen {
        units.begin(clock, 100, turn);
        units.visit(unit(number), false)
    }

    /// Turns until it leaves, on average of many units of one heat.
    fn turns(heat: u8) -> f64 {
        let mut units = FileUnits::default();
        let many = 1000;
        let mut sum = 0;
        for unit in 0..many {
            for _ in 0..heat {
                while round(&mut units, 0, true, unit) != Seen::Leaves {}
                assert_eq!(round(&mut units, 99, false, unit), Seen::CameBack);
            }
            while round(&mut units, 0, true, unit) != Seen::Leaves {
                sum += 1;
            }
        }
        f64::from(sum) / many as f64
    }

    #[test]
    fn what_is_new_leaves_and_what_came_back_soon_stays_the_longer() {
        assert_eq!(turns(0), 0.0);
        assert!((2.0..4.0).contains(&turns(1)), "{}", turns(1));
        assert!((12.0..18.0).contains(&turns(2)), "{}", turns(2));
        for heat in [3, 4] {
            assert!((50.0..80.0).contains(&turns(heat)), "{}", turns(heat));
        }
    }

    #[test]
    fn only_in_its_turn() {
        let mut units = FileUnits::default();
        assert_eq!(round(&mut units, 0, false, 7), Seen::Leaves);
        assert_eq!(units.visit(unit(7), false), Seen::Leaves, "another part of it");
        assert_eq!(round(&mut units, 50, false, 7), Seen::CameBack);
        (0..1000).for_each(|_| assert_eq!(round(&mut units, 60, false, 7), Seen::Stays));
    }

    #[test]
    fn what_comes_back_late_is_as_if_it_was_new() {
        let mut units = FileUnits::default();
        assert_eq!(round(&mut units, 0, false, 7), Seen::Leaves);
        assert_eq!(round(&mut units, 101, false, 7), Seen::Leaves);
    }

    #[test]
    fn what_is_seen_soon_needs_no_round() {
        let mut units = FileUnits::default();
        assert_eq!(round(&mut units, 1, false, 7), Seen::Leaves);
        assert!(units.came_back(unit(7)) && !units.came_back(unit(7)));
        assert_eq!(round(&mut units, 1000, false, 7), Seen::Stays);
    }

    #[test]
    fn code_stays_at_first_and_what_could_not_leave_for_some_turns() {
        let mut units = FileUnits::default();
        units.begin(0, 100, true);
        assert_eq!(units.visit(unit(1), true), Seen::Stays);
        units.stays(unit(1));
        (1..STUCK).for_each(|_| assert_eq!(round(&mut units, 0, true, 1), Seen::Stuck));
        assert_ne!(round(&mut units, 0, true, 1), Seen::Stuck);
    }

    #[test]
    fn what_was_not_seen_for_long_is_forgotten() {
        let mut units = FileUnits::default();
        (0..FEW).for_each(|number| _ = round(&mut units, 0, false, number * TOGETHER));
        round(&mut units, 90, false, FEW * TOGETHER);
        units.begin(150, 100, false);
        units.forget();
        assert_eq!(units.known.len(), 1);
        let other = FileUnit { file: (DeviceNumber { major: 8, minor: 1 }, 78), number: FEW * TOGETHER };
        assert_eq!(units.visit(other, false), Seen::Leaves, "of another file");
    }
}
