//! Who has which seat among the processes that share the limit, and what each may count on. See `pageout::tree`.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use pageout::tree::{divide, most_unlimited, Tree, SEATS, TREE_BYTES};

use crate::sys::{self, Mapping};

/// Between two divisions of the limit, while it is scarce; while it is not; while there is nobody to share it with.
const OFTEN: Duration = Duration::from_millis(30);
/// The same, where one that has no share lacks memory.
const SOON: Duration = Duration::from_millis(10);
const SELDOM: Duration = Duration::from_millis(100);
const ALONE: Duration = Duration::from_millis(500);

/// The seats of a run.
#[derive(Debug)]
pub struct Seats {
    file: File,
    mapping: Mapping,
    limit: u64,
    taken: Vec<bool>,
    /// The seat of all that have no limit, while they have something.
    unlimited: Option<usize>,
    /// By seat: pages that had come back at the last division.
    came_back: Vec<u64>,
    last: Instant,
    next: Instant,
}

impl Seats {
    /// All free.
    pub fn new(limit: u64) -> io::Result<Self> {
        let file = sys::memfd(c"pageout-tree", TREE_BYTES as u64, true)?;
        let mapping = Mapping::of(&file, TREE_BYTES)?;
        Ok(Self {
            file,
            mapping,
            limit,
            taken: Vec::new(),
            unlimited: None,
            came_back: Vec::new(),
            last: Instant::now(),
            next: Instant::now() + ALONE,
        })
    }

    /// What processes map.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// What they say.
    pub fn tree(&self) -> &Tree {
        self.mapping.tree()
    }

    /// The first free seat.
    pub fn take(&mut self) -> Option<usize> {
        let seat = self.taken.iter().position(|taken| !taken).unwrap_or(self.taken.len());
        if seat == SEATS {
            return None;
        }
        if seat == self.taken.len() {
            self.taken.push(true);
            self.came_back.push(0);
        }
        self.taken[seat] = true;
        self.came_back[seat] = 0;
        // It has no share before.
        self.next = self.next.min(Instant::now() + OFTEN);
        Some(seat)
    }

    /// One that has no share lacks memory.
    pub fn hasten(&mut self) {
        self.next = self.next.min(self.last + SOON);
    }

    /// Its process has gone.
    pub fn leave(&mut self, seat: Option<usize>) {
        let Some(seat) = seat else { return };
        self.tree().seat(seat).clear();
        self.taken[seat] = false;
    }

    /// Until the next division.
    pub fn due_in(&self) -> Duration {
        self.next.saturating_duration_since(Instant::now())
    }

    /// Divides the limit by what came back since the last time. `processes`: seat, and pages that have come back;
    /// `unlimited`: what those have together that have no limit. Returns how much of that there is no room for.
    pub fn divide(&mut self, processes: impl Iterator<Item = (usize, u64)>, unlimited: u64) -> u64 {
        let (mut seats, mut parts) = (Vec::new(), Vec::new());
        for (seat, came_back) in processes {
            let before = std::mem::replace(&mut self.came_back[seat], came_back);
            let told = self.tree().seat(seat);
            seats.push(seat);
            parts.push((told.claims(), told.share(), came_back.saturating_sub(before)));
        }
        let limit = self.tree().left_of(self.limit);
        let all = unlimited;
        let unlimited = all.min(most_unlimited(limit, &parts));
        self.tell_unlimited(unlimited);
        divide(limit - unlimited, &mut parts);
        for (seat, (_, share, _)) in seats.iter().zip(&parts) {
            self.tree().seat(*seat).set_share(*share);
        }
        self.last = Instant::now();
        self.next = self.last
            + match seats.len() {
                0 | 1 if self.unlimited.is_none() => ALONE,
                _ if self.tree().used() < self.limit / 2 => SELDOM,
                _ => OFTEN,
            };
        all - unlimited
    }

    /// Nothing can be had of those that have no limit: their share is what they use.
    fn tell_unlimited(&mut self, bytes: u64) {
        if bytes == 0 {
            let seat = self.unlimited.take();
            return self.leave(seat);
        }
        if self.unlimited.is_none() {
            self.unlimited = self.take();
        }
        if let Some(seat) = self.unlimited.map(|seat| self.tree().seat(seat)) {
            seat.set_share(bytes);
            seat.tell(bytes, bytes, false);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_comes_to_another_gets_a_share_soon() {
        const MIB: u64 = 1 << 20;
        let mut seats = Seats::new(256 * MIB).unwrap();
        let first = seats.take().unwrap();
        seats.tree().seat(first).tell(230 * MIB, 230 * MIB, false);
        seats.divide([(first, 0)].into_iter(), 0);
        assert_eq!((seats.due_in() > OFTEN, seats.tree().seat(first).share()), (true, 256 * MIB));
        let second = seats.take().unwrap();
        assert!(seats.due_in() <= OFTEN);
        seats.hasten();
        assert!(seats.due_in() <= SOON);
        seats.tree().seat(second).tell(20 * MIB, 20 * MIB, true);
        let mut shares = |unlimited| {
            seats.divide([(first, 0), (second, 0)].into_iter(), unlimited * MIB);
            let used = seats.tree().used() / MIB;
            (used, [first, second].map(|seat| seats.tree().seat(seat).share() / MIB))
        };
        assert_eq!(shares(0), (250, [128, 128]));
        assert_eq!(shares(56), (306, [100, 100]));
        // All but what nobody goes below.
        assert_eq!(shares(500), (474, [16, 16]));
        assert_eq!(shares(0), (250, [128, 128]));
    }
}
