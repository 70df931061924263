//! `fork` while pages are out.
//!
//! The child's areas lose their registration, so whatever is out would read as zeros there. Nothing leaves until the
//! clone is done. If little is out it comes home first. Else the child inherits the names of the slots ([`heir`]), and
//! has its engine before it runs one instruction of the program or of libc ([`crate::dispatch`]). Where that cannot be,
//! or the child would not find run, all comes home; when that does not fit the limit, `fork` fails with ENOMEM.
//!
//! A thread that finds no engine announces its fork all the same: an engine that begins meanwhile lets nothing
//! leave before that fork is through. What does not come here at all is refused ([`crate::code`]).

use crate::sys::own_number;
use crate::{dispatch, exit, gate, keeper, life, memory, part, remap, sys, twin, wrap};
use core::ffi::c_void;
use core::sync::atomic::{fence, AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use pageout::call::on_stack;
use pageout::kernel::nobody_is_called;
use pageout::sync::{Baton, Rounds, Wait};
use rustix::thread::futex;

/// What a fork's child waits for: nothing; that its keeper has taken over what it inherits; that has come true, or
/// cannot.
const NONE: u32 = 0;
const WAITING: u32 = 1;
const READY: u32 = 2;
const LOST: u32 = 3;
static HEIR: AtomicU32 = AtomicU32::new(NONE);
/// Not private: Linux 6.17, and 6.18 up to 6.18.32, forget who waits so when the process makes its first thread, as the keeper does
/// meanwhile.
const HEIR_FLAGS: futex::Flags = futex::Flags::empty();

/// Threads that ask take turns.
static TURN: Baton = Baton::new();
/// Those in which somebody asks for [`settle`].
static SETTLED: Rounds = Rounds::new();
/// Threads whose forks under way found no engine to ask, by number; 0: nobody. And how many found no place there.
static UNASKED: [AtomicU32; MOST_AMID] = [const { AtomicU32::new(0) }; MOST_AMID];
static MORE_UNASKED: AtomicU32 = AtomicU32::new(0);
/// Forks of this process that are over.
static FORKS: AtomicU32 = AtomicU32::new(0);
/// See [`generations`].
static GENERATIONS: AtomicU32 = AtomicU32::new(0);
static CHILD: AtomicBool = AtomicBool::new(false);

type Register = unsafe extern "C" fn(
    prepare: Option<extern "C" fn()>,
    parent: Option<extern "C" fn()>,
    child: Option<extern "C" fn()>,
    dso: *const u8,
) -> i32;

/// What the GNU libc has for it; another has not (musl), and then nothing here is right.
pub fn register() -> Option<Register> {
    let found = wrap::find(c"__register_atfork");
    // SAFETY: libc's function of that name, or null.
    unsafe { core::mem::transmute::<*mut core::ffi::c_void, Option<Register>>(found) }
}

/// Has every fork's child start its own keeper.
pub fn prepare_process(register: Register) {
    // SAFETY: runs before main; glibc keeps the function.
    unsafe { register(Some(prepare), Some(parent), Some(child), core::ptr::null()) };
}

/// Threads between [`Turn::handlers_begin`] and [`Turn::handlers_end`], and the signals that each has blocked as it knows: see
/// [`believed_mask`]. Who finds no place knows what is.
static AMID: [Amid; MOST_AMID] = [const { Amid::nobody() }; MOST_AMID];
/// libc has them wait for each other in there.
const MOST_AMID: usize = 256;
/// How many places are taken.
static IN_AMID: AtomicUsize = AtomicUsize::new(0);

/// Changed by its thread alone, and by who comes where that has been killed.
struct Amid {
    /// Its control block (0: nobody), and its number: some of those that share the memory have the control block of their maker.
    block: AtomicUsize,
    thread: AtomicU32,
    mask: AtomicU64,
}

impl Amid {
    const fn nobody() -> Self {
        Self { block: AtomicUsize::new(0), thread: AtomicU32::new(0), mask: AtomicU64::new(0) }
    }

    fn of_caller() -> Option<&'static Self> {
        if IN_AMID.load(Ordering::Relaxed) == 0 {
            return None;
        }
        let block = exit::control_block();
        AMID.iter().find(|amid| {
            amid.block.load(Ordering::Relaxed) == block && amid.thread.load(Ordering::Relaxed) == own_number()
        })
    }

    /// A place for the calling thread: one that is free, else of who has been killed.
    fn take(mask: u64) -> Option<&'static Self> {
        let block = exit::control_block();
        let replaces = |amid: &Self, held| {
            amid.block.compare_exchange(held, block, Ordering::Relaxed, Ordering::Relaxed).is_ok()
        };
        let free = AMID.iter().find(|amid| replaces(amid, 0));
        IN_AMID.fetch_add(usize::from(free.is_some()), Ordering::Relaxed);
        let amid = free.or_else(|| {
            AMID.iter().find(|amid| amid.is_dead() && replaces(amid, amid.block.load(Ordering::Relaxed)))
        })?;
        amid.mask.store(mask, Ordering::Relaxed);
        amid.thread.store(own_number(), Ordering::Relaxed);
        Some(amid)
    }

    /// Was who has it killed?
    fn is_dead(&self) -> bool {
        was_killed(self.thread.load(Ordering::Relaxed))
    }

    fn leave(&self) {
        self.thread.store(0, Ordering::Relaxed);
        self.block.store(0, Ordering::Release);
        IN_AMID.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The mask that the calling thread believes to have, if all signals from elsewhere wait for its fork. No handler of a signal may
/// come amid a fork, which could fork itself, or not come back; but handlers of fork make threads, which inherit the mask, and
/// change it.
pub fn believed_mask() -> Option<u64> {
    Amid::of_caller().map(|amid| amid.mask.load(Ordering::Relaxed))
}

/// Another one, for a thread that has a [`believed_mask`].
pub fn believe_mask(mask: u64) {
    if let Some(amid) = Amid::of_caller() {
        amid.mask.store(mask, Ordering::Relaxed);
    }
}

/// The last thing before libc takes its locks and clones: registered first, it runs last.
extern "C" fn prepare() {
    dispatch::block();
}

/// The first thing behind the clone.
extern "C" fn parent() {
    sys::unblock_for_fork();
}

/// In the child, before it goes on: a process with all its memory and no engine. Calls nothing of libc, so
/// that it may run after a bare system call too.
pub extern "C" fn child() {
    // All was done at the clone.
    if HEIR.swap(NONE, Ordering::Relaxed) != READY {
        set_generations(0);
        begin();
    }
}

/// Where such a child works until it has inherited: the program's stack may be out below what [`touch_stack`] has touched. Room for
/// frames of signals that calls of ours raise. Only such a child, which is alone on its memory, is ever here.
pub static mut CHILD_STACK: [u128; CHILD_STACK_LEN / 16] = [0; CHILD_STACK_LEN / 16];
pub const CHILD_STACK_LEN: usize = 64 << 10;

/// In the child of a clone after [`bequeath`], on its parent's stack: comes back when what was out can be read.
pub fn child_inherits() {
    extern "C" fn inherits(_: *const c_void) {
        inherit();
    }
    let top = &raw const CHILD_STACK as usize + CHILD_STACK_LEN;
    // SAFETY: nobody is on that stack.
    unsafe { on_stack(top, inherits, core::ptr::null()) };
}

/// The same for who is on [`CHILD_STACK`].
pub fn inherit() {
    HEIR.store(WAITING, Ordering::SeqCst);
    GENERATIONS.fetch_add(1, Ordering::Relaxed);
    let has_keeper = twin::come_in() && begin();
    if !has_keeper {
        HEIR.store(LOST, Ordering::SeqCst);
    }
    let mut patience = 600;
    loop {
        match HEIR.load(Ordering::SeqCst) {
            READY => break,
            WAITING if patience > 0 && keeper::is_there() => {
                sys::wait_a_tenth(&HEIR, WAITING, HEIR_FLAGS);
                patience -= 1;
            }
            _ => {
                let (me, more) = (sys::own_process(), keeper::MORE_TASKS);
                let remedy = if has_keeper { format_args!("") } else { format_args!("; {more}") };
                sys::complain_of(format_args!(
                    "process {me}: the child of a fork got no engine of its own; killed, so that it cannot go on with zeros{remedy}"
                ));
                sys::kill_self()
            }
        }
    }
    HEIR.store(NONE, Ordering::Relaxed);
}

/// The same where libc calls [`child`] later on.
pub fn child_in_dispatch() {
    child_inherits();
    HEIR.store(READY, Ordering::Relaxed);
}

/// Does the program wait for its keeper to inherit?
pub fn is_heir() -> bool {
    HEIR.load(Ordering::SeqCst) == WAITING
}

/// The keeper has taken over everything.
pub fn inherited() {
    tell_heir(READY);
}

/// The keeper cannot; whoever waits for it must not go on.
pub fn lost() {
    if is_heir() {
        tell_heir(LOST);
    }
}

fn tell_heir(what: u32) {
    HEIR.store(what, Ordering::SeqCst);
    let _ = futex::wake(&HEIR, HEIR_FLAGS, 1);
}

/// Starts the child's keeper; false: there is none.
fn begin() -> bool {
    memory::reset();
    exit::forget_others();
    keeper::forget();
    life::forget_counts();
    part::let_go();
    nobody_is_called();
    // Others that forked are not here; their control blocks may be those of new threads. The caller has another number.
    let block = exit::control_block();
    let mut own = 0;
    for amid in &AMID {
        if amid.block.load(Ordering::Relaxed) == block {
            amid.thread.store(own_number(), Ordering::Relaxed);
            own += 1;
        } else {
            amid.thread.store(0, Ordering::Relaxed);
            amid.block.store(0, Ordering::Relaxed);
        }
    }
    IN_AMID.store(own, Ordering::Relaxed);
    gate::reset();
    // Nobody is here who may have had them.
    TURN.pass_on();
    remap::forget();
    UNASKED.iter().chain([&MORE_UNASKED]).for_each(|thread| thread.store(0, Ordering::Relaxed));
    wrap::forget_locks();
    CHILD.store(true, Ordering::Relaxed);
    // Else that comes with the library's own beginning.
    keeper::is_prepared() && keeper::start()
}

/// Has the process forked, or is it the child of a fork? Then it may share pages.
pub fn shares() -> bool {
    forks() > 0 || is_child()
}

/// Who has the turn to fork; 0: nobody.
pub fn forker() -> u32 {
    TURN.owner()
}

/// Was who shares the memory killed, as far as its number says so here (0: nobody)?
fn was_killed(thread: u32) -> bool {
    exit::has_one_namespace() && sys::has_ended(thread)
}

/// Was he killed, as a process that shares the memory may be?
pub fn forker_is_dead() -> bool {
    was_killed(forker())
}

/// Is a fork under way that found no engine to ask? Not of who has been killed amid it.
pub fn goes_on_unasked() -> bool {
    let goes_on = |thread: u32| thread != 0 && !was_killed(thread);
    MORE_UNASKED.load(Ordering::SeqCst) != 0
        || UNASKED.iter().any(|thread| goes_on(thread.load(Ordering::SeqCst)))
}

/// From so many generations, one of which forked the next, something may be inherited still.
pub fn generations() -> u32 {
    GENERATIONS.load(Ordering::Relaxed)
}

/// See [`generations`].
pub fn set_generations(count: u32) {
    GENERATIONS.store(count, Ordering::Relaxed);
}

/// How often it has forked, or tried to.
pub fn forks() -> u32 {
    FORKS.load(Ordering::Relaxed)
}

/// Did the process begin as the child of a fork, without another program since?
pub fn is_child() -> bool {
    CHILD.load(Ordering::Relaxed)
}

/// The right to fork now. Signals are blocked while a thread has it: a handler may fork too.
#[must_use]
pub struct Turn {
    mask: u64,
    /// Nobody was there to ask: where that is written down, and by which number.
    unasked: Option<(&'static AtomicU32, u32)>,
    out: bool,
    amid: Option<&'static Amid>,
}

impl Turn {
    /// Are pages out? Then [`bequeath`] comes right before the clone, or [`Turn::bring_home`].
    pub fn is_out(&self) -> bool {
        self.out
    }

    /// Brings everything home; false if it does not fit.
    pub fn bring_home(&mut self) -> bool {
        self.out = self.out && gate::ask(gate::HOME) != gate::GRANTED;
        !self.out
    }

    /// In the parent, whether it forked or not.
    pub fn end(self) {
        match self.unasked {
            None => {
                gate::say(gate::FREE);
                TURN.pass_on();
            }
            Some((place, thread)) => withdraw(place, thread),
        }
        FORKS.fetch_add(1, Ordering::Relaxed);
        self.restore();
    }

    /// What is to be blocked when it is over.
    pub fn signals(&self) -> u64 {
        self.mask
    }

    /// Unblocks signals: all there is to do in the child, and before a clone whose child goes elsewhere.
    pub fn restore(&self) {
        sys::set_signals(self.mask);
    }

    /// From here to [`Turn::handlers_end`] the program's handlers of fork may run.
    pub fn handlers_begin(&mut self) {
        // One that forks itself goes on as it is.
        if Amid::of_caller().is_none() {
            self.amid = Amid::take(self.mask);
        }
    }

    /// In parent and child.
    pub fn handlers_end(&mut self) {
        if let Some(amid) = self.amid.take() {
            self.mask = amid.mask.load(Ordering::Relaxed);
            amid.leave();
        }
    }
}

/// Before a fork of the calling process, or of one that shares its memory. None: not now (EAGAIN), since the calling thread is
/// in a fork already, as a handler of fork is, or another is for ever.
pub fn before() -> Option<Turn> {
    let mask = sys::block_signals_from_elsewhere();
    sys::unblock_for_fork();
    let me = own_number();
    let unasked = announce(me);
    fence(Ordering::SeqCst);
    if keeper::active().is_none() {
        return Some(Turn { mask, unasked: Some((unasked, me)), out: false, amid: None });
    }
    // Not while it waits for its turn: who has the turn may wait for `attend`, which waits for this.
    withdraw(unasked, me);
    if !take_turn(me) {
        sys::set_signals(mask);
        return None;
    }
    let out = gate::ask(gate::ASKED) == gate::GRANTED_OUT;
    Some(Turn { mask, unasked: None, out, amid: None })
}

/// Writes down that a thread forks without asking, and says where.
fn announce(me: u32) -> &'static AtomicU32 {
    let takes =
        |place: &&AtomicU32| place.compare_exchange(0, me, Ordering::SeqCst, Ordering::Relaxed).is_ok();
    UNASKED.iter().find(takes).unwrap_or_else(|| {
        MORE_UNASKED.fetch_add(1, Ordering::SeqCst);
        &MORE_UNASKED
    })
}

/// Its fork is over, or asks after all. Not in the child of another fork that came amid it: there it is forgotten.
fn withdraw(place: &AtomicU32, me: u32) {
    let (ordering, failure) = (Ordering::SeqCst, Ordering::Relaxed);
    if core::ptr::eq(place, &MORE_UNASKED) {
        let _ = place.fetch_update(ordering, failure, |count| count.checked_sub(1));
    } else {
        let _ = place.compare_exchange(me, 0, ordering, failure);
    }
}

/// Waits for the others, a minute for each; false: one has not come to its end by then.
fn take_turn(me: u32) -> bool {
    /// Looks of 10 ms.
    const A_SECOND: u32 = 100;
    if TURN.owner() == me {
        return false;
    }
    let (mut whose, mut seconds) = (0, 0);
    while let Err(now) = TURN.take_within(me, A_SECOND, Wait::Asleep) {
        if exit::has_one_namespace() && take_from_the_dead(now, me) {
            return true;
        }
        seconds = if now == whose { seconds + 1 } else { 0 };
        whose = now;
        if seconds == 60 {
            return false;
        }
    }
    true
}

/// Stack that is needed from [`bequeath`] to [`cloned`], or to where [`child_inherits`] leaves it: 400 bytes, and some to spare.
/// No more: stacks may be as small as libc allows, and hold two frames of signals by then.
const STACK: usize = 640;

/// Writes down what is out, for the child. From here to [`cloned`] nobody gets a page; the stack is touched before, as
/// far as it is needed until then. No handler may come between, which would wait for its page: those of faults that somebody
/// sent are left. False: no memory.
pub fn bequeath() -> bool {
    sys::block_own_signals();
    touch_stack();
    gate::ask(gate::BEQUEATH) == gate::BEQUEATHED
}

/// Not a part of its caller, whose own frame would be as large for as long as it lasts.
#[inline(never)]
fn touch_stack() {
    let mut stack = core::mem::MaybeUninit::<[u8; STACK]>::uninit();
    // SAFETY: our own. The other end is on the same page as the caller's frame, or on this one.
    unsafe { stack.as_mut_ptr().cast::<u8>().write_volatile(1) };
    core::hint::black_box(&stack);
}

/// In the parent after the clone: its child's number, if there is a child.
pub fn cloned(child: Option<u32>) {
    gate::BORN.store(child.unwrap_or(0), Ordering::Relaxed);
    gate::ask(if child.is_some() { gate::CLONED } else { gate::CHILDLESS });
}

/// Returns when every eviction that was decided before the call is done: none that comes later takes a unit that
/// is pinned by now.
pub fn settle() {
    let Some(keeper) = keeper::active() else { return };
    // During a fork that is so, and whoever forks may wait for this thread, in a handler of fork.
    // Before the keeper attends nothing has left, and it may wait for a fork whose handlers wait for this thread.
    fence(Ordering::SeqCst);
    let is_so = || !gate::is_attended() || keeper.engine.stands_still() && gate::is_open();
    const A_MILLISECOND: u64 = 1_000_000;
    // Threads that begin together need no more than one round, or two.
    let round = SETTLED.next();
    let is_settled = || SETTLED.is_over(round) || is_so();
    sys::quietly(|| {
        while !is_settled() {
            if TURN.try_take(own_number()) {
                if !is_settled() {
                    SETTLED.run(|| _ = gate::ask(gate::SETTLE));
                }
                return TURN.pass_on();
            }
            TURN.wait(A_MILLISECOND);
        }
    });
}

/// Does what no fork by another thread should come into. A fork that takes long does not matter: its child may have what is
/// moved in two parts, but what waits in a handler of fork for a lock that the calling thread has clones later.
pub fn undivided<T>(work: impl FnOnce() -> T) -> T {
    const LONG: u32 = 10;
    sys::quietly(|| {
        let me = own_number();
        // The thread that forks does it itself, in a handler of fork.
        let takes_turn = TURN.owner() != me && TURN.take_within(me, LONG, Wait::Asleep).is_ok();
        let done = work();
        if takes_turn {
            TURN.pass(me);
        }
        done
    })
}

/// Ends what who had the turn had begun, if he was killed amid it, as a process that shares the memory may be, and takes it.
fn take_from_the_dead(whose: u32, me: u32) -> bool {
    let takes = sys::has_ended(whose) && TURN.take_from(whose, me);
    if takes {
        gate::end();
        gate::say(gate::FREE);
    }
    takes
}

/// The program has ended, and another process goes on with its memory: what a thread of the program had begun is over.
pub fn program_ended() {
    if take_from_the_dead(TURN.owner(), own_number()) {
        TURN.pass_on();
    }
}

/// The same of who shares the memory, whatever it had the turn for: others wait for that, new threads among them.
pub fn end_orphans() {
    if exit::has_one_namespace() {
        program_ended();
    }
}
