//! `fork` while pages are out.
//!
//! The child's areas lose their registration, so whatever is out would read as zeros there. Until process
//! trees share their slots, everything comes home before the clone, and nothing leaves until it is done; when
//! that does not fit the limit, `fork` fails with ENOMEM. The child has all of its memory then, and its
//! own keeper.
//!
//! A thread that finds no engine announces its fork all the same: an engine that begins meanwhile lets nothing
//! leave before that fork is through.

use crate::keeper::{self, Keeper};
use crate::{memory, sys};
use core::sync::atomic::{fence, AtomicBool, AtomicU32, Ordering};
use pageout::fault::Server;
use rustix::thread::futex;

/// Nobody asks; somebody asks for a fork; the keeper says yes or no.
const FREE: u32 = 0;
const ASKED: u32 = 1;
const GRANTED: u32 = 2;
const REFUSED: u32 = 3;
/// Somebody asks for [`settle`].
const SETTLE: u32 = 4;

static GATE: AtomicU32 = AtomicU32::new(FREE);
/// Threads that ask take turns.
static TURN: AtomicU32 = AtomicU32::new(0);
/// Forks under way that found no engine to ask.
static UNASKED: AtomicU32 = AtomicU32::new(0);
/// Pages are shared with a child since a fork, or were: in both from then on.
static SHARES: AtomicBool = AtomicBool::new(false);
static CHILD: AtomicBool = AtomicBool::new(false);
static mut PATH: Option<keeper::Path> = None;

extern "C" {
    fn __register_atfork(
        prepare: Option<extern "C" fn()>,
        parent: Option<extern "C" fn()>,
        child: Option<extern "C" fn()>,
        dso: *const u8,
    ) -> i32;
}

/// Has every fork's child start its own keeper, which finds the run at `path`.
pub fn prepare_process(path: keeper::Path) {
    // SAFETY: runs before main; glibc keeps the function.
    unsafe {
        PATH = Some(path);
        __register_atfork(None, None, Some(child), core::ptr::null());
    }
}

/// In the child, before it goes on: a process with all its memory and no engine. Calls nothing of libc, so
/// that it may run after a bare system call too.
pub extern "C" fn child() {
    memory::reset();
    keeper::forget();
    GATE.store(FREE, Ordering::Relaxed);
    TURN.store(0, Ordering::Relaxed);
    UNASKED.store(0, Ordering::Relaxed);
    CHILD.store(true, Ordering::Relaxed);
    // SAFETY: written before main.
    if let Some(path) = unsafe { PATH } {
        keeper::start(path);
    }
}

/// Has the process forked, or is it the child of a fork? Then it may share pages.
pub fn shares() -> bool {
    SHARES.load(Ordering::Relaxed)
}

/// Did the process begin as the child of a fork, without another program since?
pub fn is_child() -> bool {
    CHILD.load(Ordering::Relaxed)
}

/// The right to fork now. Signals are blocked while a thread has it: a handler may fork too.
#[must_use]
pub struct Turn {
    mask: u64,
    asked: bool,
}

impl Turn {
    /// In the parent, whether it forked or not.
    pub fn end(self) {
        if self.asked {
            answer(FREE);
            let_next();
        } else {
            UNASKED.fetch_sub(1, Ordering::SeqCst);
        }
        self.restore();
    }

    /// Unblocks signals: all there is to do in the child, and before a clone whose child goes elsewhere.
    pub fn restore(&self) {
        sys::set_signals(self.mask);
    }
}

/// Before a fork of the calling process, or of one that shares its memory. `None`: it cannot be had
/// now (ENOMEM).
pub fn before() -> Option<Turn> {
    let mask = sys::block_signals_from_elsewhere();
    SHARES.store(true, Ordering::Relaxed);
    UNASKED.fetch_add(1, Ordering::SeqCst);
    fence(Ordering::SeqCst);
    if keeper::active().is_none() {
        return Some(Turn { mask, asked: false });
    }
    // Not while it waits for its turn: who has the turn may wait for `attend`, which waits for this.
    UNASKED.fetch_sub(1, Ordering::SeqCst);
    take_turn();
    let turn = Turn { mask, asked: true };
    if ask(ASKED) == GRANTED {
        return Some(turn);
    }
    turn.end();
    None
}

/// Returns when every eviction that was decided before the call is done: none that comes later takes a unit that
/// is pinned by now.
pub fn settle() {
    if keeper::active().is_none() {
        return;
    }
    let mask = sys::block_signals_from_elsewhere();
    take_turn();
    ask(SETTLE);
    let_next();
    sys::set_signals(mask);
}

fn take_turn() {
    while TURN.compare_exchange(0, 1, Ordering::AcqRel, Ordering::Acquire).is_err() {
        let _ = futex::wait(&TURN, futex::Flags::PRIVATE, 1, None);
    }
}

fn let_next() {
    TURN.store(0, Ordering::Release);
    let _ = futex::wake(&TURN, futex::Flags::PRIVATE, 1);
}

/// Asks the keeper and waits for another state.
fn ask(what: u32) -> u32 {
    answer(what);
    loop {
        match GATE.load(Ordering::Acquire) {
            state if state != what => return state,
            _ => {
                let _ = futex::wait(&GATE, futex::Flags::PRIVATE, what, None);
            }
        }
    }
}

fn answer(state: u32) {
    GATE.store(state, Ordering::Release);
    let _ = futex::wake(&GATE, futex::Flags::PRIVATE, u32::MAX >> 1);
}

/// The keeper's thread that lets forks through, and pages leave when there is none.
pub extern "C" fn attend(keeper: usize) -> ! {
    // SAFETY: the keeper lives as long as its process.
    let Keeper { engine, .. } = unsafe { &*(keeper as *const Keeper) };
    let mut server = alloc::boxed::Box::new(Server::new());
    // Forks that found no engine: new ones find it.
    while UNASKED.load(Ordering::SeqCst) != 0 {
        let _ = rustix::thread::nanosleep(&rustix::thread::Timespec { tv_sec: 0, tv_nsec: 50_000 });
    }
    engine.stand_still(false);
    engine.kick();
    loop {
        match GATE.load(Ordering::Acquire) {
            ASKED => {
                engine.stand_still(true);
                let granted = engine.bring_home(&mut server);
                answer(if granted { GRANTED } else { REFUSED });
            }
            SETTLE => {
                engine.settled();
                answer(FREE);
            }
            state => {
                if state == FREE && engine.stands_still() {
                    engine.stand_still(false);
                    engine.kick();
                }
                let _ = futex::wait(&GATE, futex::Flags::PRIVATE, state, None);
            }
        }
    }
}
