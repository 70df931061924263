//! Models of the locks, and of pins: `RUSTFLAGS="--cfg loom" cargo test --release -p pageout --test sync_models`; see `model_support`.
#![cfg(loom)]

mod model_support;

use loom::sync::atomic::{AtomicU32, Ordering::Relaxed};
use loom::sync::{Arc, Mutex};
use loom::thread;
use model_support::passes_and_would_notice;
use pageout::flaw::Flaw;
use pageout::space::pins::{Pinned, Pins};
use pageout::sync::{Backoff, Baton, Rounds, RwLock, Wait};

/// One at a time has it.
#[test]
fn baton() {
    passes_and_would_notice(Flaw::BatonUnsure, None, || {
        let shared = Arc::new((Baton::new(), AtomicU32::new(0)));
        let threads: Vec<_> = (1..=2)
            .map(|me| {
                let shared = shared.clone();
                thread::spawn(move || {
                    let (baton, inside) = &*shared;
                    while baton.take_within(me, u32::MAX, Wait::Asleep).is_err() {}
                    inside.store(me, Relaxed);
                    assert_eq!(inside.load(Relaxed), me);
                    baton.pass(me);
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!(shared.0.owner(), 0);
    });
}

/// Of two that find it abandoned one has it, and who comes back after all passes nothing that is not his.
#[test]
fn baton_abandoned() {
    passes_and_would_notice(Flaw::BatonUnsure, Some(3), || {
        let shared = Arc::new((Baton::new(), AtomicU32::new(0)));
        assert!(shared.0.try_take(3));
        let threads: Vec<_> = (1..=2)
            .map(|me| {
                let shared = shared.clone();
                thread::spawn(move || {
                    let (baton, inside) = &*shared;
                    while let Err(whose) = baton.take_within(me, 0, Wait::Asleep) {
                        // Who has it and is alive is waited for.
                        if whose == 3 && baton.take_from(whose, me) {
                            break;
                        }
                    }
                    inside.store(me, Relaxed);
                    assert_eq!(inside.load(Relaxed), me);
                    baton.pass(me);
                })
            })
            .collect();
        shared.0.pass(3);
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!(shared.0.owner(), 0);
    });
}

/// Who moved memory goes on when the event that was read is applied.
#[test]
fn catch_up() {
    passes_and_would_notice(Flaw::CaughtUpAtOnce, None, || {
        let events = Arc::new(RwLock::new(()));
        let (read, applied) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicU32::new(0)));
        let reader = {
            let (events, read, applied) = (events.clone(), read.clone(), applied.clone());
            thread::spawn(move || {
                let _guard = events.write();
                // The kernel lets the thread go on.
                read.store(1, loom::sync::atomic::Ordering::Release);
                applied.store(1, Relaxed);
            })
        };
        let mut backoff = Backoff::new();
        while read.load(loom::sync::atomic::Ordering::Acquire) == 0 {
            backoff.snooze();
        }
        events.wait_for_writer(Wait::Asleep);
        assert_eq!(applied.load(Relaxed), 1);
        reader.join().unwrap();
    });
}

/// What was said before a round was asked for is seen by all that goes on when it is over.
#[test]
fn rounds() {
    passes_and_would_notice(Flaw::RoundUnsure, Some(3), || {
        struct Shared {
            rounds: Rounds,
            turn: Mutex<()>,
            /// Held while pages leave.
            leaving: Mutex<()>,
            said: [AtomicU32; 2],
            has_left: [AtomicU32; 2],
        }
        impl Shared {
            fn stays_when_said(&self, me: usize) {
                self.said[me].store(1, Relaxed);
                let round = self.rounds.next();
                if !self.rounds.is_over(round) {
                    let _turn = self.turn.lock();
                    if !self.rounds.is_over(round) {
                        self.rounds.run(|| drop(self.leaving.lock()));
                    }
                }
                // A fault brings it in.
                self.has_left[me].store(0, Relaxed);
                thread::yield_now();
                assert_eq!(self.has_left[me].load(Relaxed), 0);
            }
        }
        let pair = || [AtomicU32::new(0), AtomicU32::new(0)];
        let shared = Arc::new(Shared {
            rounds: Rounds::new(),
            turn: Mutex::new(()),
            leaving: Mutex::new(()),
            said: pair(),
            has_left: pair(),
        });
        let other = {
            let shared = shared.clone();
            thread::spawn(move || shared.stays_when_said(1))
        };
        let evictor = {
            let shared = shared.clone();
            thread::spawn(move || {
                let _guard = shared.leaving.lock();
                for (said, has_left) in shared.said.iter().zip(&shared.has_left) {
                    if said.load(Relaxed) == 0 {
                        has_left.store(1, Relaxed);
                    }
                }
            })
        };
        shared.stays_when_said(0);
        other.join().unwrap();
        evictor.join().unwrap();
    });
}

/// What was pinned, and brought in when that was settled, stays until it is unpinned, though neighbours come and go.
#[test]
fn pins() {
    const UNIT: usize = 0x7f00_0001_0000;
    const OTHER: usize = 0x7f00_0002_0000;
    passes_and_would_notice(Flaw::PinUnsettled, Some(3), || {
        struct Shared {
            pins: Pins,
            /// Held while pages leave.
            leaving: Mutex<()>,
            out: AtomicU32,
        }
        impl Shared {
            fn stays_while_pinned(&self) {
                if self.pins.pin(UNIT) == Pinned::Fresh {
                    drop(self.leaving.lock());
                    self.pins.settled(UNIT);
                }
                // A fault brings it in.
                self.out.store(0, Relaxed);
                thread::yield_now();
                assert_eq!(self.out.load(Relaxed), 0);
                self.pins.unpin(UNIT);
            }
        }
        let shared = Arc::new(Shared { pins: Pins::new(), leaving: Mutex::new(()), out: AtomicU32::new(0) });
        // A place to be taken again.
        shared.pins.pin(OTHER);
        shared.pins.unpin(OTHER);
        let neighbour = {
            let shared = shared.clone();
            thread::spawn(move || shared.stays_while_pinned())
        };
        let evictor = {
            let shared = shared.clone();
            thread::spawn(move || {
                let _guard = shared.leaving.lock();
                if !shared.pins.is_pinned(UNIT) {
                    shared.out.store(1, Relaxed);
                }
            })
        };
        shared.stays_while_pinned();
        neighbour.join().unwrap();
        evictor.join().unwrap();
        assert!(!shared.pins.is_pinned(UNIT));
    });
}
