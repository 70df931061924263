//! What of mapped files goes, and what stays: the policy for memory that has its place already, and of which nobody sees whether
//! it is used.
//!
//! What is new goes first: most of a file is read once. What comes back soon stays, and is tried again the more seldom the oftener
//! it did, as a page of the second chance that has earned more than one. *Soon* is before as much has left as may be there, as
//! the kernel's refault distance has it (workingset.c).

use alloc::boxed::Box;
use alloc::collections::BTreeMap;

/// Units whose states are kept together.
const TOGETHER: usize = 512;
/// So many turns a unit is left alone that came back soon, so many times as often when it does again, and at most.
const WARM: u8 = 2;
const WARMER: u8 = 4;
const HOT: u8 = 32;
/// The same for code that was not tried yet, and for what the kernel did not reclaim.
const CODE: u8 = 1;
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

/// What is known of units, by their number: their address by their size.
#[derive(Debug, Default)]
pub struct Units {
    known: BTreeMap<usize, Box<Together>>,
    /// Units that have left so far, all kinds of memory together, and how many there may be.
    clock: u32,
    capacity: u32,
    turn: bool,
    /// The unit that was seen last in this round, and what came of it: it may be in parts.
    last: Option<(usize, Seen)>,
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
    left: Option<u32>,
    /// Turns that it is left alone, still, and for how many when it came back last; none: it was not seen yet.
    turns: u8,
    warmth: Option<u8>,
    is_stuck: bool,
}

impl Units {
    /// A round begins: in a `turn` each unit has its turn. So many units have left so far, all kinds of memory together (`clock`), and
    /// so many may be there.
    pub fn begin(&mut self, clock: u32, capacity: u32, turn: bool) {
        (self.clock, self.capacity, self.turn, self.last) = (clock, capacity, turn, None);
    }

    /// A unit is there.
    pub fn visit(&mut self, unit: usize, is_code: bool) -> Seen {
        if let Some((_, seen)) = self.last.filter(|(last, _)| *last == unit) {
            return seen;
        }
        let (clock, capacity, turn) = (self.clock, self.capacity, self.turn);
        let state = self.state(unit);
        let mut seen = Seen::Stays;
        if let Some(left) = state.left.take() {
            let warmth = state.warmth.unwrap_or(0);
            // Later it is as if it was new: what is read once more.
            let soon = clock.wrapping_sub(left) < capacity;
            let warmer = if soon { (warmth.saturating_mul(WARMER)).clamp(WARM, HOT) } else { 0 };
            (state.turns, state.warmth) = (warmer, Some(warmer));
            if soon {
                seen = Seen::CameBack;
            }
        } else if state.warmth.is_none() {
            let turns = if is_code { CODE } else { 0 };
            (state.turns, state.warmth) = (turns, Some(0));
        } else if turn {
            state.turns = state.turns.saturating_sub(1);
        }
        if state.turns == 0 {
            (state.left, state.is_stuck) = (Some(clock), false);
            seen = Seen::Leaves;
        } else if state.is_stuck {
            seen = Seen::Stuck;
        }
        self.last = Some((unit, seen));
        seen
    }

    /// A unit that was to leave has not.
    pub fn stays(&mut self, unit: usize) {
        let state = self.state(unit);
        (state.left, state.turns, state.is_stuck) = (None, STUCK, true);
    }

    fn state(&mut self, unit: usize) -> &mut State {
        const NEVER: State = State { left: None, turns: 0, warmth: None, is_stuck: false };
        let together = self.known.entry(unit / TOGETHER);
        let together = together.or_insert_with(|| Box::new(Together { seen: 0, states: [NEVER; TOGETHER] }));
        together.seen = self.clock;
        &mut together.states[unit % TOGETHER]
    }

    /// What was not seen for so long that it would be as if new is not known any more.
    pub fn forget(&mut self) {
        self.known.retain(|_, together| self.clock.wrapping_sub(together.seen) < self.capacity);
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::*;

    fn round(units: &mut Units, clock: u32, turn: bool, unit: usize) -> Seen {
        units.begin(clock, 100, turn);
        units.visit(unit, false)
    }

    #[test]
    fn what_is_new_leaves_and_what_came_back_soon_stays_the_longer() {
        let mut units = Units::default();
        assert_eq!(round(&mut units, 0, false, 7), Seen::Leaves);
        assert_eq!(units.visit(7, false), Seen::Leaves, "another part of it");
        assert_eq!(round(&mut units, 50, false, 7), Seen::CameBack);
        for times in [WARM, WARM * WARMER] {
            // Only a turn counts.
            assert_eq!(round(&mut units, 60, false, 7), Seen::Stays);
            (1..times).for_each(|_| assert_eq!(round(&mut units, 60, true, 7), Seen::Stays));
            assert_eq!(round(&mut units, 60, true, 7), Seen::Leaves);
            assert_eq!(round(&mut units, 61, true, 7), Seen::CameBack);
        }
        assert_eq!(round(&mut units, 70, true, 8), Seen::Leaves);
        assert_eq!(round(&mut units, 170, false, 8), Seen::Leaves, "that was not soon");
    }

    #[test]
    fn code_has_a_turn_first_and_what_stays_many() {
        let mut units = Units::default();
        units.begin(0, 100, false);
        assert_eq!(units.visit(1, true), Seen::Stays);
        assert_eq!(round(&mut units, 0, true, 1), Seen::Leaves);
        units.stays(1);
        assert_eq!(round(&mut units, 0, true, 1), Seen::Stuck);
        (2..STUCK).for_each(|_| assert_eq!(round(&mut units, 0, true, 1), Seen::Stuck));
        assert_eq!(round(&mut units, 0, true, 1), Seen::Leaves);
    }

    #[test]
    fn what_was_not_seen_for_long_is_forgotten() {
        let mut units = Units::default();
        round(&mut units, 0, false, 1);
        round(&mut units, 90, false, TOGETHER);
        units.begin(150, 100, false);
        units.forget();
        assert_eq!(units.known.len(), 1);
    }
}
