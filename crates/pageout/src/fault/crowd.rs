//! Who faults just now, and where these threads are to wake up: together on their server's CPU, or apart.
//!
//! Together no fault wakes another CPU and no page table is changed under one that runs; apart, what threads do between
//! their faults is done at once on several CPUs. Together they are *called* there, each at each of its faults or only when it
//! may have strayed ([`Called`]): a thread that blocks while a server with more weight is to run next stays in the queue of
//! this CPU (Linux 6.12: DELAY_DEQUEUE), and is woken there. What is the fastest depends on the program, on what it costs
//! here to wake a CPU, and on what the scheduler makes of it, so it is tried ([`Trial`]).
//!
//! Noted by whoever reads faults, so by one at a time; looked at by anybody.

use super::stream;
use super::trial::Trial;
use crate::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// The threads of the last faults, and how fast these come.
pub struct Crowd {
    /// The threads of the last 16 to 32 faults, a bit for each: those of the last faults, those of the 16 before. Two of
    /// which the numbers are multiples of 16 apart count as one.
    recent: AtomicU64,
    /// When the last fault was noted, ns.
    noted: AtomicU64,
    /// What had been brought in by then.
    brought: AtomicU64,
    /// Of one thread, and of several.
    alone: Trial,
    several: Trial,
}

/// Where who faults is to wake up.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Wakes {
    /// Wherever the scheduler puts him.
    Apart,
    /// On the server's CPU: called there at each fault.
    Called,
    /// On the server's CPU: called there when he may have strayed.
    Stays,
}

/// The ways to try. Who faults alone is never better off elsewhere than where he is served.
const ALONE: [Wakes; 2] = [Wakes::Called, Wakes::Stays];
const SEVERAL: [Wakes; 3] = [Wakes::Apart, Wakes::Called, Wakes::Stays];

/// Faults before the older ones are forgotten. Of two threads that fault at random each takes one of so many.
const WINDOW: u64 = 16;
/// Bits for threads; the rest of the word counts faults.
const THREADS: u32 = stream::THREADS as u32;
const MASK: u64 = (1 << THREADS) - 1;

/// What a pause between two faults counts for at most, ns: the program waited for something else.
const PAUSE_NS: u64 = 500_000;

impl Crowd {
    /// Nobody.
    pub fn new() -> Self {
        Self {
            recent: AtomicU64::new(0),
            noted: AtomicU64::new(0),
            brought: AtomicU64::new(0),
            alone: Trial::new(ALONE.len() as u64),
            several: Trial::new(SEVERAL.len() as u64),
        }
    }

    /// A thread faults, at `now` (ns). `brought`: faults that brought something in so far. Only these are progress: where all
    /// want the same page, more of the others are none.
    pub fn note(&self, thread: u32, now: u64, brought: u64) {
        self.see(thread);
        let pause = now.saturating_sub(self.noted.load(Relaxed)).min(PAUSE_NS);
        let pages = brought.saturating_sub(self.brought.load(Relaxed));
        self.noted.store(now, Relaxed);
        self.brought.store(brought, Relaxed);
        self.trial().0.note(pages, pause);
    }

    /// A thread faults that answers itself. Any thread may say so; of two at once one may be forgotten.
    pub fn see(&self, thread: u32) {
        let word = self.recent.load(Relaxed);
        let (last, before, faults) = (word & MASK, word >> THREADS & MASK, word >> (2 * THREADS));
        let last = last | 1 << (thread % THREADS);
        let word = match faults + 1 {
            WINDOW => last << THREADS,
            faults => faults << (2 * THREADS) | before << THREADS | last,
        };
        self.recent.store(word, Relaxed);
    }

    /// Where are those who fault to wake up?
    pub fn wakes(&self) -> Wakes {
        let (trial, ways) = self.trial();
        ways[trial.way() as usize]
    }

    /// What is tried with as many threads as there are, and the ways.
    fn trial(&self) -> (&Trial, &'static [Wakes]) {
        match self.threads() {
            0 | 1 => (&self.alone, &ALONE),
            _ => (&self.several, &SEVERAL),
        }
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

/// Whom a server has called to its CPU: nobody, to begin with. The server's own.
#[derive(Default)]
pub struct Called {
    threads: [Caller; THREADS as usize],
}

#[derive(Clone, Copy, Default)]
struct Caller {
    thread: u32,
    /// Faults since.
    faults: u32,
    /// When it was answered last, ns.
    answered: u64,
}

/// Who was answered longer ago than this, for each thread that faults, may have been woken on another CPU: that takes 30 us
/// and more on a virtual machine, and where it takes less there is no harm in it.
const STRAYS_NS: u64 = 25_000;
/// Several threads' times say little: each is called at one of so many faults.
const STRAYS_FAULTS: u32 = 16;

impl Called {
    /// Is a thread that faults, as one of `threads`, likely to be where it was called to?
    pub fn stays(&self, thread: u32, now: u64, threads: usize) -> bool {
        let caller = &self.threads[(thread % THREADS) as usize];
        let since = now.saturating_sub(caller.answered);
        caller.thread == thread
            && since < STRAYS_NS * threads as u64
            && (threads < 2 || caller.faults < STRAYS_FAULTS)
    }

    /// A thread was answered. `was_called`: here, just before; else it had stayed.
    pub fn answered(&mut self, thread: u32, now: u64, was_called: bool) {
        let caller = &mut self.threads[(thread % THREADS) as usize];
        let faults = if was_called { 0 } else { caller.faults + 1 };
        *caller = Caller { thread, faults, answered: now };
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

    #[test]
    fn who_answers_himself_is_seen() {
        let crowd = Crowd::new();
        (0..100).for_each(|_| crowd.see(5));
        assert_eq!(crowd.threads(), 1);
        crowd.see(7);
        assert_eq!(crowd.threads(), 2);
    }

    /// Two threads fault in turn, `pace[way]` ns apart. The share of the faults at which they were not apart.
    fn together(crowd: &Crowd, now: &mut u64, pace: [u64; 3], faults: u64) -> f64 {
        let mut together = 0;
        for fault in 0..faults {
            let wakes = crowd.wakes();
            together += (wakes != Wakes::Apart) as u64;
            *now += pace[SEVERAL.iter().position(|at| *at == wakes).unwrap()];
            crowd.note((fault % 2) as u32, *now, crowd.brought.load(Relaxed) + 1);
        }
        together as f64 / faults as f64
    }

    #[test]
    fn who_faults_alone_is_never_apart() {
        let crowd = Crowd::new();
        (0..100_000).for_each(|fault| {
            crowd.note(3, fault * 10_000, fault);
            assert_ne!(crowd.wakes(), Wakes::Apart);
        });
    }

    #[test]
    fn what_the_program_waits_for_is_not_the_faults() {
        let (crowd, mut now) = (Crowd::new(), 0);
        together(&crowd, &mut now, [40_000, 15_000, 15_000], 1000);
        for _ in 0..1000 {
            now += 1_000_000_000;
            let share = together(&crowd, &mut now, [40_000, 15_000, 15_000], 128);
            assert!(share > 0.8 || crowd.several.is_trying());
        }
    }

    #[test]
    fn who_may_have_strayed_is_called() {
        let mut called = Called::default();
        assert!(!called.stays(3, 0, 1));
        called.answered(3, 1000, true);
        assert!(called.stays(3, 2000, 1));
        assert!(!called.stays(3, 1000 + STRAYS_NS, 1));
        assert!(called.stays(3, 1000 + STRAYS_NS, 2));
        // Another that shares its place.
        assert!(!called.stays(3 + THREADS, 2000, 1));
        (0..STRAYS_FAULTS).for_each(|_| called.answered(3, 1000, false));
        assert!(called.stays(3, 2000, 1));
        assert!(!called.stays(3, 2000, 2));
    }
}
