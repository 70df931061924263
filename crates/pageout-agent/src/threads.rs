//! The keeper's other threads: servers, and the one that evicts ahead.

use crate::keeper::Keeper;
use crate::sys;
use alloc::boxed::Box;
use core::sync::atomic::{AtomicBool, Ordering};
use pageout::fault::Server;
use pageout::kernel::{Kernel, Linux};
use pageout::reclaim::Round;
use pageout::swap::swapout::Outgoing;
use pageout::sync::FOREVER;
use pageout::wire::{Kind, Message};

/// Who lets others run and goes on within so many ns was alone; else he tries again after so many.
const AT_ONCE: u64 = 50_000;
const BUSY_NAP: i64 = 500_000;
/// Trunks that go back, and clusters that are discarded, in one rest of the evictor at most.
const GIVEN: usize = 64;
/// Empty trunks of each device that stay: who grows and shrinks by less does not ask for each.
const KEPT: usize = 1;
/// How long (ns) there must have been no room on any device before the user is told: others may give up some.
const FULL_FOR: u64 = 500_000_000;

/// The thread that answers faults.
pub extern "C" fn serve(keeper: usize) -> ! {
    // SAFETY: see `Keeper::hire`.
    let keeper = unsafe { &*(keeper as *const Keeper) };
    let mut server = Server::new();
    sys::go_first_or_even();
    loop {
        server.serve(&keeper.engine, FOREVER);
    }
}

/// Who evicts ahead does so when nobody else wants the CPU: a fault that finds nothing ready lets pages leave itself, at
/// the cost of who faults. Not while the limit is endangered. It waits between its rounds only, never with a lock.
pub struct Queue {
    calm: AtomicBool,
    waits: AtomicBool,
}

impl Queue {
    pub const fn new() -> Self {
        Self { calm: AtomicBool::new(false), waits: AtomicBool::new(false) }
    }

    /// From `evictor`, if it may come first: comes back when a CPU is idle, or the limit in danger, or others `lack` what
    /// it has to give.
    pub fn wait(&self, kernel: &Linux, lack: &AtomicBool) {
        while self.calm.load(Ordering::Relaxed) && !lack.load(Ordering::Relaxed) {
            self.waits.store(true, Ordering::SeqCst);
            let asked = kernel.now();
            sys::wait_behind(|| self.waits.swap(false, Ordering::SeqCst));
            if kernel.now() - asked < AT_ONCE {
                break;
            }
            sys::nap(BUSY_NAP);
        }
    }

    /// The limit is in danger, or not: in danger `evictor` waits no longer. Said at each look, for it may have begun to wait
    /// meanwhile.
    pub fn set_calm(&self, evictor: u32, calm: bool) {
        self.calm.store(calm, Ordering::Relaxed);
        if !calm && self.waits.swap(false, Ordering::SeqCst) {
            sys::call_first(evictor, false);
        }
    }
}

/// The thread that evicts ahead.
pub extern "C" fn evict(keeper: usize) -> ! {
    // SAFETY: see `Keeper::hire`.
    let keeper = unsafe { &*(keeper as *const Keeper) };
    let engine = &keeper.engine;
    let mut out = Box::new(Outgoing::new());
    let is_first = sys::go_first();
    let (mut full_since, mut told) = (None, false);
    loop {
        let wanted = engine.wanted.heard();
        if is_first {
            keeper.queue.wait(&engine.kernel, &keeper.is_short);
        }
        let round = engine.balance(&mut out);
        if keeper.is_short.swap(false, Ordering::Relaxed) {
            for _ in 0..GIVEN {
                if !engine.place.give_back(0) {
                    break;
                }
            }
        }
        let (is_full, is_idle) = (engine.place.is_full(), round == Round::Idle);
        // There has been room since, and it was enough.
        told &= is_full || !is_idle;
        if !is_full || is_idle {
            full_since = None;
        } else if round == Round::Stuck && !told {
            let now = engine.kernel.now();
            told = now - *full_since.get_or_insert(now) >= FULL_FOR;
            if told {
                keeper.link.tell(&Message::new(Kind::Full, 0, 0, 0), None);
            }
        }
        let Some(nap) = round.nap_ns() else { continue };
        engine.wanted.wait(wanted, nap);
        // Nobody has called for so long: what is free is given back. Under load it is written again at once.
        let rests = || is_idle && engine.wanted.heard() == wanted;
        if rests() {
            engine.shed();
        }
        for _ in 0..GIVEN {
            if !rests() || !engine.place.give_back(KEPT) && !engine.place.discard() {
                break;
            }
        }
    }
}
