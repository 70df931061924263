//! The gate between a thread of the program that forks and its keeper: questions and answers, and what the keeper does in between.
//!
//! Questions are asked by who has the turn ([`crate::fork`]); answers are given by the keeper's thread that attends, which lets
//! pages leave while nobody asks.

use crate::keeper::{self, Keeper};
use crate::proc::{self, Maps};
use crate::{fork, heir, program, sys};
use alloc::boxed::Box;
use core::ffi::CStr;
use core::sync::atomic::{fence, AtomicBool, AtomicU32, Ordering};
use linux_raw_sys::general as raw;
use pageout::fault::Server;
use pageout::swap::swapin::Incoming;
use rustix::fs::stat;
use rustix::io::Errno;
use rustix::thread::futex;

/// Nobody asks; somebody asks for a fork; the keeper says yes or no. In the lowest byte of the gate; above it is a number, which each
/// question and whatever ends one changes: an answer is to the question that was asked, whoever asks by then.
pub const FREE: u32 = 0;
pub const ASKED: u32 = 1;
pub const GRANTED: u32 = 2;
const REFUSED: u32 = 3;
/// Somebody asks for [`fork::settle`].
pub const SETTLE: u32 = 4;
/// Yes, but pages are out. Then he asks for all to come home, or, right before the clone, for the bequest.
pub const GRANTED_OUT: u32 = 5;
pub const HOME: u32 = 6;
pub const BEQUEATH: u32 = 7;
pub const BEQUEATHED: u32 = 8;
/// He has a child, or has none.
pub const CLONED: u32 = 9;
pub const CHILDLESS: u32 = 10;
/// Tenths of a second that a keeper waits at its end for a fork that is under way.
const END_TENTHS: usize = 20;
/// A keeper needs less, with any number of devices.
const DESCRIPTORS: u64 = 32;
/// So many pages come home rather than be inherited.
const FEW: usize = 256;

/// What a process has inherited of so many generations is its own before it forks again: run keeps open what each has
/// left, with the slots.
const MOST_GENERATIONS: u32 = 8;
/// How often that is tried in vain, after so many ns each.
const APART_TRIES: usize = 20;
const APART_NAP: i64 = 2_000_000;

const STATE: u32 = 0xff;
const NEXT: u32 = STATE + 1;
static GATE: AtomicU32 = AtomicU32::new(FREE);
/// See [`is_attended`].
static ATTENDED: AtomicBool = AtomicBool::new(false);
/// With [`CLONED`], if he knows it: the child's number, else 0.
pub static BORN: AtomicU32 = AtomicU32::new(0);

/// What came of a clone.
pub enum Child {
    /// There is none.
    None,
    /// There is one, or may be.
    Unknown,
    /// Its number, in the parent's namespace.
    Number(u32),
}

/// Says something to the keeper: for who has the turn. What the gate is then.
pub fn say(what: u32) -> u32 {
    // The keeper may answer meanwhile, and changes no number.
    let number = GATE.load(Ordering::Relaxed) & !STATE;
    let said = number.wrapping_add(NEXT) | what;
    GATE.store(said, Ordering::Release);
    wake_gate();
    said
}

/// The same, and waits for what it says.
pub fn ask(what: u32) -> u32 {
    let asked = say(what);
    loop {
        match GATE.load(Ordering::Acquire) {
            now if now != asked => return now & STATE,
            // A tenth: some kernels forget who waits as the keeper makes its first thread (`fork::HEIR_FLAGS`).
            _ => _ = sys::wait_a_tenth(&GATE, asked, futex::Flags::PRIVATE),
        }
    }
}

/// Is a fork let through just now?
pub fn is_open() -> bool {
    matches!(GATE.load(Ordering::SeqCst) & STATE, GRANTED | GRANTED_OUT | REFUSED)
}

/// In a fork's child, where nobody asks yet, nor answers.
pub fn reset() {
    GATE.store(FREE, Ordering::Relaxed);
    ATTENDED.store(false, Ordering::SeqCst);
}

/// Has the keeper begun to let pages leave? Until then nothing has, and it answers nobody.
pub fn is_attended() -> bool {
    ATTENDED.load(Ordering::SeqCst)
}

/// The keeper's answer to what the gate was; false: who asked is not there any more.
fn answer(asked: u32, state: u32) -> bool {
    let answered =
        GATE.compare_exchange(asked, asked & !STATE | state, Ordering::AcqRel, Ordering::Acquire).is_ok();
    if answered {
        wake_gate();
    }
    answered
}

/// Brings everything home; then any fork is right until pages leave again. False: it does not fit.
fn bring_home(keeper: &Keeper, server: &mut Server) -> bool {
    let home = keeper.engine.bring_home(server);
    if home {
        let _events = keeper.engine.events.read();
        keeper.code.lock().give(&keeper.engine.kernel);
    }
    home
}

/// Has all that was inherited leave to slots of its own.
fn come_apart(keeper: &Keeper) {
    let names = || keeper.engine.place.foreign_names();
    let mut incoming = Box::new(Incoming::new());
    let (mut before, mut tries) = (names(), 0);
    while tries < APART_TRIES && !keeper.engine.vacate_foreign(&mut incoming) {
        let now = names();
        tries = if now < before { 0 } else { tries + 1 };
        before = now;
        sys::nap(APART_NAP);
    }
    keeper.come_apart();
    if names() > 0 {
        // Not each time: it is full, or children live who have inherited the same.
        fork::set_generations(MOST_GENERATIONS / 2);
    }
}

/// Pages may leave.
fn go_on(keeper: &Keeper) {
    keeper.code.lock().keep();
    keeper.engine.stand_still(false);
    keeper.engine.kick();
}

/// Does a child find run, and get an engine? Not that of a program that has become another user, or has another root, or
/// may have hardly any descriptors, or that may not look at itself (PR_SET_DUMPABLE).
fn child_finds_run(keeper: &Keeper, maps: &mut Maps) -> bool {
    // The name of its socket stays when it is killed.
    if !keeper.link.has_run()
        || sys::highest_limit(keeper::program(), raw::RLIMIT_NOFILE).is_some_and(|most| most < DESCRIPTORS)
    {
        return false;
    }
    if proc::opened(c"/proc/self/pagemap").is_none() {
        return false;
    }
    // Of the thread that forks: each may have its own.
    let thread = alloc::format!("task/{}/status", fork::forker());
    let mut users = |path: &CStr| {
        let mut lines = alloc::vec::Vec::new();
        maps.read(path, |line| {
            if line.starts_with(b"Uid:") || line.starts_with(b"Gid:") {
                lines.extend_from_slice(line);
            }
        });
        lines
    };
    let (own, its) = (users(c"/proc/self/status"), users(&program::file(&thread)));
    let same_user = its.is_empty() || own == its;
    let root = |path: &CStr| stat(path).ok().map(|root| (root.st_dev, root.st_ino));
    // Some may not be asked for theirs, and one whose first thread has ended has none.
    same_user && root(&program::file("root")).is_none_or(|its| root(c"/") == Some(its) && sees_socket())
}

/// Is run's socket where it was, also where the program, whose root can be seen, has other mounts by now?
fn sees_socket() -> bool {
    let path = keeper::path();
    let path = core::str::from_utf8(path.as_bytes()).ok().map(|path| alloc::format!("root{path}"));
    let seen = path.map(|path| stat(program::file(&path).as_c_str()));
    !matches!(seen, Some(Err(Errno::NOENT | Errno::NOTDIR)))
}

/// Writes down what is out, for who `asked`, and keeps things so until the clone is through. False: that cannot be.
fn hand_over(keeper: &Keeper, maps: &mut Maps, asked: u32) -> bool {
    {
        let _events = keeper.engine.events.read();
        keeper.code.lock().was_forked(&keeper.engine.kernel);
    }
    keeper.code.lock().pair(maps);
    let Some((mut still, file)) = heir::bequeath(&keeper.engine) else {
        keeper.code.lock().keep();
        return false;
    };
    let Some(token) = keeper.lend(&file) else {
        keeper.engine.cloned(&mut still);
        drop(still);
        keeper.code.lock().keep();
        file.give_up(&keeper.engine);
        return false;
    };
    heir::TOKEN.store(token, Ordering::SeqCst);
    keeper.code.lock().lend();
    // Of the clone before, of which the child spoke first.
    BORN.store(0, Ordering::Relaxed);
    let bequeathed = asked & !STATE | BEQUEATHED;
    let child = match answer(asked, BEQUEATHED).then(|| await_clone(bequeathed, || file.is_born()) & STATE) {
        None | Some(CHILDLESS) => Child::None,
        Some(CLONED) if BORN.load(Ordering::Relaxed) != 0 => Child::Number(BORN.load(Ordering::Relaxed)),
        Some(_) => Child::Unknown,
    };
    keeper.code.lock().keep();
    file.tell(&keeper.engine.cloned(&mut still));
    drop(still);
    keeper.lent(token, file, child);
    if GATE.load(Ordering::Acquire) == bequeathed {
        // The thread waits for its child to become another program (CLONE_VFORK), or was stopped. Others go on.
        keeper.engine.stand_still(false);
        keeper.engine.kick();
        await_clone(bequeathed, || false);
        if GATE.load(Ordering::Acquire) != bequeathed {
            // As it is for the others: a handler of fork may wait for a thread that it makes ([`fork::settle`]).
            keeper.engine.stand_still(true);
        }
    }
    true
}

/// Waits for what the program says of its clone, or for the child to be there; what the gate is then. Where who forks was killed
/// before it could say, which leaves the gate as it is, nobody can tell whether it has a child.
fn await_clone(gate: u32, is_born: impl Fn() -> bool) -> u32 {
    loop {
        let now = GATE.load(Ordering::Acquire);
        if now != gate {
            return now;
        }
        let is_over = sys::wait_a_tenth(&GATE, gate, futex::Flags::PRIVATE);
        if is_over && (is_born() || program::is_gone() || fork::forker_is_dead()) {
            return gate;
        }
    }
}

/// Before the keeper ends: the program says no more of a clone that was under way, and its child, if there is one, waits
/// for what it is told.
pub fn end() {
    let now = GATE.load(Ordering::Acquire);
    // Not stored again: by then there may be an answer.
    if now & STATE == BEQUEATHED {
        answer(now, CLONED);
    }
    for _ in 0..END_TENTHS {
        let now = GATE.load(Ordering::Acquire);
        if now & STATE != CLONED {
            break;
        }
        sys::wait_a_tenth(&GATE, now, futex::Flags::PRIVATE);
    }
}

fn wake_gate() {
    let _ = futex::wake(&GATE, futex::Flags::PRIVATE, u32::MAX >> 1);
}

/// The keeper's thread that lets forks through, and pages leave when there is none.
pub extern "C" fn attend(keeper: usize) -> ! {
    // SAFETY: the keeper lives as long as its process.
    let keeper = unsafe { &*(keeper as *const Keeper) };
    let engine = &keeper.engine;
    let mut server = Server::new();
    let mut maps = Maps::new();
    // Does the child of the fork that asks?
    let mut finds_run = true;
    // Forks that found no engine: new ones find it.
    while fork::goes_on_unasked() {
        sys::nap(50_000);
    }
    ATTENDED.store(true, Ordering::SeqCst);
    // What was pinned by who saw that it is not attended is seen by whoever lets pages leave.
    fence(Ordering::SeqCst);
    go_on(keeper);
    loop {
        let gate = GATE.load(Ordering::Acquire);
        match gate & STATE {
            ASKED => {
                if fork::generations() >= MOST_GENERATIONS {
                    go_on(keeper);
                    come_apart(keeper);
                }
                engine.stand_still(true);
                let mut home = engine.out_pages() <= FEW && bring_home(keeper, &mut server);
                if !home {
                    finds_run = child_finds_run(keeper, &mut maps);
                    home = !finds_run && bring_home(keeper, &mut server);
                }
                answer(gate, if home { GRANTED } else { GRANTED_OUT });
            }
            HOME => {
                let home = bring_home(keeper, &mut server);
                answer(gate, if home { GRANTED } else { REFUSED });
            }
            BEQUEATH => {
                // What is said of the clone is answered next.
                if !(finds_run && hand_over(keeper, &mut maps, gate)) {
                    answer(gate, REFUSED);
                }
            }
            CLONED | CHILDLESS => _ = answer(gate, GRANTED),
            SETTLE => {
                engine.settled();
                answer(gate, FREE);
            }
            state => {
                if state == FREE && engine.stands_still() {
                    go_on(keeper);
                }
                let _ = futex::wait(&GATE, futex::Flags::PRIVATE, gate, None);
            }
        }
    }
}
