//! The replacement of the books, on pages numbered from 0: what pageout's hit ratios are held against.

use std::collections::{BinaryHeap, VecDeque};

/// Something that keeps a fixed number of pages.
pub trait Cache {
    /// An access; whether the page was there.
    fn access(&mut self, page: u32) -> bool;
}

const NONE: u32 = u32::MAX;

/// First in, first out.
pub struct Fifo {
    capacity: usize,
    queue: VecDeque<u32>,
    present: Vec<bool>,
}

impl Fifo {
    pub fn new(pages: usize, capacity: usize) -> Fifo {
        Fifo { capacity: capacity.max(1), queue: VecDeque::new(), present: vec![false; pages] }
    }
}

impl Cache for Fifo {
    fn access(&mut self, page: u32) -> bool {
        if std::mem::replace(&mut self.present[page as usize], true) {
            return true;
        }
        if self.queue.len() == self.capacity {
            let oldest = self.queue.pop_front().expect("it is full");
            self.present[oldest as usize] = false;
        }
        self.queue.push_back(page);
        false
    }
}

/// Who was used least recently leaves. A list by index, `NONE` at its ends.
pub struct Lru {
    capacity: usize,
    used: usize,
    newer: Vec<u32>,
    older: Vec<u32>,
    newest: u32,
    oldest: u32,
    present: Vec<bool>,
}

impl Lru {
    pub fn new(pages: usize, capacity: usize) -> Lru {
        Lru {
            capacity: capacity.max(1),
            used: 0,
            newer: vec![NONE; pages],
            older: vec![NONE; pages],
            newest: NONE,
            oldest: NONE,
            present: vec![false; pages],
        }
    }

    fn unlink(&mut self, page: u32) {
        let (newer, older) = (self.newer[page as usize], self.older[page as usize]);
        match newer {
            NONE => self.newest = older,
            newer => self.older[newer as usize] = older,
        }
        match older {
            NONE => self.oldest = newer,
            older => self.newer[older as usize] = newer,
        }
    }
}

impl Cache for Lru {
    fn access(&mut self, page: u32) -> bool {
        let hit = self.present[page as usize];
        if hit {
            self.unlink(page);
        } else if self.used == self.capacity {
            let oldest = self.oldest;
            self.unlink(oldest);
            self.present[oldest as usize] = false;
        } else {
            self.used += 1;
        }
        (self.newer[page as usize], self.older[page as usize]) = (NONE, self.newest);
        match self.newest {
            NONE => self.oldest = page,
            newest => self.newer[newest as usize] = page,
        }
        self.newest = page;
        self.present[page as usize] = true;
        hit
    }
}

/// A hand goes round; who was used since it came by last stays for one more round.
pub struct Clock {
    capacity: usize,
    slots: Vec<u32>,
    hand: usize,
    referenced: Vec<bool>,
    present: Vec<bool>,
}

impl Clock {
    pub fn new(pages: usize, capacity: usize) -> Clock {
        Clock {
            capacity: capacity.max(1),
            slots: Vec::with_capacity(capacity),
            hand: 0,
            referenced: vec![false; pages],
            present: vec![false; pages],
        }
    }
}

impl Cache for Clock {
    fn access(&mut self, page: u32) -> bool {
        if self.present[page as usize] {
            self.referenced[page as usize] = true;
            return true;
        }
        self.present[page as usize] = true;
        if self.slots.len() < self.capacity {
            self.slots.push(page);
            return false;
        }
        while std::mem::take(&mut self.referenced[self.slots[self.hand] as usize]) {
            self.hand = (self.hand + 1) % self.capacity;
        }
        let victim = std::mem::replace(&mut self.slots[self.hand], page);
        self.present[victim as usize] = false;
        self.hand = (self.hand + 1) % self.capacity;
        false
    }
}

/// Belady's optimum: who is used again last leaves. It must know what comes.
pub struct Optimum {
    capacity: usize,
    used: usize,
    /// By access: when the same page is used next.
    next: Vec<u32>,
    now: usize,
    /// By page: when it is used next, if it is present; else 0.
    due: Vec<u32>,
    /// The same as pairs, some of them of the past.
    heap: BinaryHeap<(u32, u32)>,
}

impl Optimum {
    pub fn new(pages: usize, capacity: usize, accesses: &[u32]) -> Optimum {
        let mut seen = vec![NONE; pages];
        let mut next = vec![NONE; accesses.len()];
        for (now, &page) in accesses.iter().enumerate().rev() {
            next[now] = std::mem::replace(&mut seen[page as usize], now as u32);
        }
        let heap = BinaryHeap::new();
        Optimum { capacity: capacity.max(1), used: 0, next, now: 0, due: vec![0; pages], heap }
    }
}

impl Cache for Optimum {
    fn access(&mut self, page: u32) -> bool {
        let hit = self.due[page as usize] != 0;
        if !hit && self.used == self.capacity {
            loop {
                let (due, last) = self.heap.pop().expect("every page that is present is in it");
                if self.due[last as usize] == due {
                    self.due[last as usize] = 0;
                    break;
                }
            }
        } else if !hit {
            self.used += 1;
        }
        let due = self.next[self.now];
        self.due[page as usize] = due;
        self.heap.push((due, page));
        self.now += 1;
        hit
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hits(cache: &mut impl Cache, accesses: &[u32]) -> Vec<bool> {
        accesses.iter().map(|&page| cache.access(page)).collect()
    }

    #[test]
    fn by_hand() {
        let accesses = [0, 1, 2, 1, 0, 3, 1, 0];
        let found = hits(&mut Lru::new(4, 3), &accesses);
        assert_eq!(found, [false, false, false, true, true, false, true, true], "3 took 2's place");
        let found = hits(&mut Fifo::new(4, 3), &accesses);
        assert_eq!(found, [false, false, false, true, true, false, true, false], "3 took 0's place");
        let found = hits(&mut Clock::new(4, 2), &[0, 1, 0, 2, 0, 1]);
        assert_eq!(found, [false, false, true, false, true, false], "0 had its second chance");
        let loops = [0, 1, 2, 0, 1, 2, 0, 1, 2];
        assert!(!hits(&mut Lru::new(3, 2), &loops).contains(&true));
        let found = hits(&mut Optimum::new(3, 2, &loops), &loops);
        assert_eq!(found, [false, false, false, true, false, true, false, true, false]);
    }
}
