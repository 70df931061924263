//! What the kernel touches when a thread exits, where it serves no fault: the thread's control block (it
//! clears a word there, for which `pthread_join` waits) and the robust mutexes that the thread still holds.
//! Their units must stay, see `pageout::space::pins`.
//!
//! Control blocks are pinned from the start of their thread until it has gone; mutexes when it ends, which a destructor of
//! thread-specific data learns in time, whether the thread returns, calls `pthread_exit` or is cancelled. A
//! process that is killed tells nobody: then the list of mutexes ends where a page is out.
//!
//! Threads that are made past pthread say where that word is as they are made, or by `set_tid_address`: it is pinned then. What
//! is made by instructions of the program's own is not seen, nor are such threads' lists of mutexes.

use crate::wrap::{pthread_key_create, pthread_setspecific};
use crate::{fork, sys, wrap};
use alloc::vec::Vec;
use core::ffi::{c_uint, c_void};
use core::ptr::null_mut;
use core::sync::atomic::{AtomicBool, AtomicIsize, AtomicPtr, AtomicU32, AtomicUsize, Ordering};
use linux_raw_sys::general as raw;
use pageout::space::pins::{Pinned, Pins};

/// Units that must stay.
pub static PINS: Pins = Pins::new();

/// Control blocks of the threads that there are, and of those on their way out; addresses, with a state below; 0 = free.
/// Those from `USED` on were never taken.
static BLOCKS: [AtomicUsize; MOST] = [const { AtomicUsize::new(0) }; MOST];
static USED: AtomicUsize = AtomicUsize::new(0);
/// The numbers of those that leave.
static THREADS: [AtomicU32; MOST] = [const { AtomicU32::new(0) }; MOST];
/// How many leave, or have left: the next at the same place finds all pinned.
static LEFT: AtomicUsize = AtomicUsize::new(0);

const MOST: usize = 16384;
/// Its thread is about to end, or has.
const LEAVES: usize = 1;
/// Somebody looks whether it has.
const HELD: usize = 2;
/// It could not be pinned, and goes on being a stack.
const LOOSE: usize = 4;
const STATES: usize = LEAVES | HELD | LOOSE;

/// Key of the thread-specific data whose destructor ends a thread.
static KEY: AtomicU32 = AtomicU32::new(u32::MAX);
/// Where a thread's list of robust mutexes begins, from its control block; the same for all.
static ROBUST_LIST: AtomicIsize = AtomicIsize::new(0);
/// Where its number is, which the kernel clears; 0: nobody knows.
static NUMBER: AtomicIsize = AtomicIsize::new(0);

/// Where libc says that there is one thread; null: it does not.
static ONE: AtomicPtr<u8> = AtomicPtr::new(null_mut());
/// Was there a thread, or a process that shares the memory, that libc knows nothing of?
static GUESTS: AtomicUsize = AtomicUsize::new(0);
/// Some of them may be in another PID namespace: their numbers say nothing here, nor ours there.
static GUESTS_ELSEWHERE: AtomicBool = AtomicBool::new(false);

fn used() -> &'static [AtomicUsize] {
    &BLOCKS[..USED.load(Ordering::Acquire)]
}

fn replace(slot: &AtomicUsize, old: usize, new: usize) -> bool {
    slot.compare_exchange(old, new, Ordering::AcqRel, Ordering::Acquire).is_ok()
}

/// The control blocks of the threads that there are.
pub fn control_blocks() -> Vec<usize> {
    let blocks = used().iter().map(|slot| slot.load(Ordering::Acquire));
    blocks.filter(|block| *block != 0 && block & LEAVES == 0).map(|block| block & !STATES).collect()
}

/// Where the kernel touches it. The static thread-local block lies below it, the thread's descriptor above.
fn places(block: usize) -> [usize; 3] {
    [block - 0x1000, block, block + 0x1000]
}

/// Before `main`, in the first thread.
pub fn prepare_process() {
    let (mut head, mut len) = (0usize, 0usize);
    // SAFETY: both words take what the kernel says.
    let known =
        unsafe { sys::call(raw::__NR_get_robust_list, 0, &raw mut head as usize, &raw mut len as usize, 0) };
    // Asked once and here: later a filter may forbid it.
    if known.is_ok() && head != 0 {
        ROBUST_LIST.store(head as isize - control_block() as isize, Ordering::Relaxed);
    }
    /// Of linux/prctl.h.
    const PR_GET_TID_ADDRESS: usize = 40;
    let mut number = 0usize;
    // SAFETY: the word takes what the kernel says.
    let known = unsafe { sys::call(raw::__NR_prctl, PR_GET_TID_ADDRESS, &raw mut number as usize, 0, 0) };
    if known.is_ok() && number != 0 {
        NUMBER.store(number as isize - control_block() as isize, Ordering::Relaxed);
    }
    ONE.store(wrap::find(c"__libc_single_threaded").cast(), Ordering::Relaxed);
    let mut key = 0;
    // SAFETY: the destructor is there as long as the process.
    if unsafe { pthread_key_create(&mut key, Some(leave_thread)) } == 0 {
        KEY.store(key, Ordering::Relaxed);
    }
    enter_thread();
}

/// Is the calling thread the only one that has this memory? Some are made where nobody sees it, by libc itself.
pub fn is_alone() -> bool {
    let one = ONE.load(Ordering::Relaxed);
    // SAFETY: a byte of libc's.
    !one.is_null() && unsafe { one.read_volatile() } != 0 && GUESTS.load(Ordering::Relaxed) == 0
}

/// Before a thread begins, or a process that shares the memory, that libc knows nothing of.
pub fn expect_guest(elsewhere: bool) {
    GUESTS.fetch_add(1, Ordering::SeqCst);
    GUESTS_ELSEWHERE.fetch_or(elsewhere, Ordering::Relaxed);
}

/// Are all who share the memory known by numbers of one namespace?
pub fn has_one_namespace() -> bool {
    !GUESTS_ELSEWHERE.load(Ordering::Relaxed)
}

/// Were there any? What makes them past libc is not known of.
pub fn may_have_guests() -> bool {
    GUESTS.load(Ordering::Relaxed) != 0
}

/// How many were begun, the one that is being made just now among them.
pub fn expected_guests() -> usize {
    GUESTS.load(Ordering::SeqCst)
}

/// The calling thread's: its address tells threads of one process apart, without a system call.
pub fn control_block() -> usize {
    let block: usize;
    // SAFETY: the first word of the block points to itself.
    unsafe { core::arch::asm!("mov {}, fs:0", out(reg) block, options(nostack, readonly, pure)) };
    block
}

/// At the start of a thread: pins its control block and remembers where it is.
pub fn enter_thread() {
    let key = KEY.load(Ordering::Relaxed);
    // Nothing was prepared: of another libc than GNU's nobody knows what lies where.
    if key == u32::MAX {
        return;
    }
    let block = control_block();
    // Of an earlier thread at the same place all is pinned, unless it is being let go.
    let takes_over = |slot: &AtomicUsize| {
        let held = slot.load(Ordering::Acquire);
        match held & !LOOSE {
            is if is == block => true,
            leaves if leaves == block | LEAVES && replace(slot, held, held & !LEAVES) => {
                LEFT.fetch_sub(1, Ordering::Relaxed);
                true
            }
            _ => false,
        }
    };
    if !used().iter().any(takes_over) {
        let state = if pin(places(block), Pins::pin) { 0 } else { LOOSE };
        let takes = |slot: &AtomicUsize| slot.load(Ordering::Relaxed) == 0 && replace(slot, 0, block | state);
        match BLOCKS.iter().position(takes) {
            Some(place) => _ = USED.fetch_max(place + 1, Ordering::AcqRel),
            None => tell_of_many(),
        }
    }
    // If it went out before it was pinned, it comes in now.
    touch(block);
    touch(block + 0x800);
    leave_by(key, 1);
}

/// Has [`leave_thread`] called for the calling thread, for the `turn`th time.
fn leave_by(key: c_uint, turn: usize) {
    // SAFETY: our own key; any value but null is taken to the destructor.
    unsafe { pthread_setspecific(key, turn as *const c_void) };
}

/// Pins places one way or the other, and waits for what is letting them go. Whether there was room for all.
fn pin<const N: usize>(places: [usize; N], by: fn(&Pins, usize) -> Pinned) -> bool {
    let pinned = places.map(|place| by(&PINS, place));
    if pinned.contains(&Pinned::Fresh) {
        fork::settle();
        places.iter().for_each(|place| PINS.settled(*place));
    }
    let all = !pinned.contains(&Pinned::Not);
    if !all {
        tell_of_many();
    }
    all
}

/// There have been more threads than there is room for.
fn tell_of_many() {
    static TOLD: AtomicBool = AtomicBool::new(false);
    if !TOLD.swap(true, Ordering::Relaxed) {
        sys::complain(
            b"pageout: more threads than it can look after (about 14000): one that ends may never be joined; use fewer, or \
              run it without pageout\n",
        );
    }
}

/// Has a word stay that the kernel clears when a thread ends, if it can be written.
pub fn keep_word(address: usize) {
    if address != 0 {
        pin([address, address + 3], Pins::keep);
    }
    // If it went out before it was pinned, it comes in now. What is no memory is the kernel's to refuse.
    wrap::bring_in(address, 4);
}

fn touch(address: usize) {
    // SAFETY: the callers name mapped memory.
    unsafe { (address as *const u8).read_volatile() };
}

/// `struct robust_list_head` of linux/futex.h.
#[repr(C)]
struct RobustList {
    first: usize,
    /// From an entry to its futex.
    futex: isize,
    pending: usize,
}

/// In a fork's child, whose only thread is the calling one: of the others the kernel touches nothing here.
pub fn forget_others() {
    let own = control_block();
    for slot in used() {
        let held = slot.load(Ordering::Acquire);
        if held & !STATES != own {
            slot.store(0, Ordering::Release);
            unpin(held);
        } else if held & LEAVES != 0 {
            // It forks on its way out, and will not be asked again. The number that it had is another's.
            slot.store(own, Ordering::Release);
        }
    }
    LEFT.store(0, Ordering::Relaxed);
    // Who shared the parent's memory does not share this.
    GUESTS.store(0, Ordering::SeqCst);
    GUESTS_ELSEWHERE.store(false, Ordering::Relaxed);
}

fn unpin(held: usize) {
    // What is loose may have some.
    if held != 0 && held & LOOSE == 0 {
        places(held & !STATES).iter().for_each(|place| PINS.unpin(*place));
    }
}

/// Lets go of what the kernel touched of threads that have gone, if more than `kept` have (or an eighth of those that there is room
/// for): others will begin where they were. Looks at some each time, for the end of a thread may take long. For the keeper's watch.
pub fn let_go(kept: usize) {
    const SOME: usize = 512;
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    // Of the number of one elsewhere nobody knows here whose it is.
    if LEFT.load(Ordering::Relaxed) <= kept.min(MOST / 8) || !has_one_namespace() {
        return;
    }
    let first = NEXT.load(Ordering::Relaxed);
    NEXT.store(if first + SOME < used().len() { first + SOME } else { 0 }, Ordering::Relaxed);
    for (slot, thread) in used().iter().zip(&THREADS).skip(first).take(SOME) {
        let block = slot.load(Ordering::Acquire);
        // No other can come to its place and leave while it is held.
        if block & (LEAVES | HELD) != LEAVES || !replace(slot, block, block | HELD) {
            continue;
        }
        if sys::has_ended(thread.load(Ordering::Relaxed)) {
            slot.store(0, Ordering::Release);
            LEFT.fetch_sub(1, Ordering::Relaxed);
            unpin(block);
        } else {
            slot.store(block, Ordering::Release);
        }
    }
}

/// At the end of a thread: brings in the robust mutexes that it holds, for good. Its stack may be managed from here on;
/// what the kernel touches of that is pinned. `turn`: destructors of the program's that come after may take mutexes, too, so
/// it is called as often as libc does that.
extern "C" fn leave_thread(turn: *mut c_void) {
    /// PTHREAD_DESTRUCTOR_ITERATIONS.
    const TURNS: usize = 4;
    if (turn as usize) < TURNS {
        leave_by(KEY.load(Ordering::Relaxed), turn as usize + 1);
    }
    let own = control_block();
    if turn as usize == 1 {
        begin_to_leave(own);
    }
    let offset = ROBUST_LIST.load(Ordering::Relaxed);
    if offset == 0 {
        return;
    }
    let list = own.wrapping_add_signed(offset) as *const RobustList;
    let mut fresh = false;
    each_robust(list, |address| fresh |= PINS.keep(address) == Pinned::Fresh);
    if fresh {
        // What was being let go when it was pinned is gone now, and comes in for good.
        fork::settle();
    }
    each_robust(list, |address| {
        PINS.settled(address);
        wrap::can_be_read(address);
    });
}

/// The calling thread is about to end, whose control block that is.
fn begin_to_leave(own: usize) {
    let number = NUMBER.load(Ordering::Relaxed);
    // Where nobody can ask later whether it has gone it goes on being a stack.
    if number == 0 {
        return;
    }
    // No system call: a filter may allow few.
    // SAFETY: the thread's own descriptor.
    let number = unsafe { (own.wrapping_add_signed(number) as *const u32).read() };
    for (slot, thread) in used().iter().zip(&THREADS) {
        let held = slot.load(Ordering::Acquire);
        if held & !LOOSE == own {
            thread.store(number, Ordering::Relaxed);
            LEFT.fetch_add(1, Ordering::Relaxed);
            slot.store(held | LEAVES, Ordering::Release);
        }
    }
}

/// Shows the addresses that the kernel will touch on its way through a list. It ends, as there, where a mutex has been
/// unmapped.
fn each_robust(list: *const RobustList, mut each: impl FnMut(usize)) {
    /// As far as the kernel goes.
    const LONGEST: usize = 2048;
    // SAFETY: the calling thread's own list, kept by libc; the kernel follows the same pointers.
    unsafe {
        let mut entry = (*list).first & !1;
        for _ in 0..LONGEST {
            if entry == 0 || entry == list as usize || !wrap::can_be_read(entry) {
                return;
            }
            each(entry);
            each(entry.wrapping_add_signed((*list).futex));
            entry = *(entry as *const usize) & !1;
        }
    }
}
