//! What the kernel touches when a thread exits, where it serves no fault: the thread's control block (it
//! clears a word there, for which `pthread_join` waits) and the robust mutexes that the thread still holds.
//! Their units must stay, see `pageout::space::pins`.
//!
//! Control blocks are pinned when their thread starts; mutexes when it ends, which a destructor of
//! thread-specific data learns in time, whether the thread returns, calls `pthread_exit` or is cancelled. A
//! process that is killed tells nobody: then the list of mutexes ends where a page is out.
//!
//! Threads that are made past pthread say where that word is as they are made, or by `set_tid_address`: it is pinned then. What
//! is made by instructions of the program's own is not seen, nor are such threads' lists of mutexes.

use crate::{fork, sys, wrap};
use alloc::vec::Vec;
use core::ffi::{c_int, c_uint, c_void};
use core::ptr::null_mut;
use core::sync::atomic::{AtomicBool, AtomicIsize, AtomicPtr, AtomicU32, AtomicUsize, Ordering};
use linux_raw_sys::general as raw;
use pageout::space::pins::Pins;

/// Units that must stay.
pub static PINS: Pins = Pins::new();

/// Control blocks of the threads that there are; addresses, 0 = free. Those from `USED` on were never taken.
static BLOCKS: [AtomicUsize; 16384] = [const { AtomicUsize::new(0) }; 16384];
static USED: AtomicUsize = AtomicUsize::new(0);

/// Key of the thread-specific data whose destructor ends a thread.
static KEY: AtomicU32 = AtomicU32::new(u32::MAX);
/// Where a thread's list of robust mutexes begins, from its control block; the same for all.
static ROBUST_LIST: AtomicIsize = AtomicIsize::new(0);

/// Where libc says that there is one thread; null: it does not.
static ONE: AtomicPtr<u8> = AtomicPtr::new(null_mut());
/// Was there a thread, or a process that shares the memory, that libc knows nothing of?
static GUESTS: AtomicBool = AtomicBool::new(false);
/// Some of them may be in another PID namespace: their numbers say nothing here, nor ours there.
static GUESTS_ELSEWHERE: AtomicBool = AtomicBool::new(false);

extern "C" {
    fn pthread_key_create(key: *mut c_uint, destructor: Option<extern "C" fn(*mut c_void)>) -> c_int;
    fn pthread_setspecific(key: c_uint, value: *const c_void) -> c_int;
}

fn used() -> &'static [AtomicUsize] {
    &BLOCKS[..USED.load(Ordering::Acquire)]
}

/// The control blocks known.
pub fn control_blocks() -> Vec<usize> {
    used().iter().map(|block| block.load(Ordering::Acquire)).filter(|block| *block != 0).collect()
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
    !one.is_null() && unsafe { one.read_volatile() } != 0 && !GUESTS.load(Ordering::Relaxed)
}

/// Before a thread begins, or a process that shares the memory, that libc knows nothing of.
pub fn expect_guest(elsewhere: bool) {
    GUESTS.store(true, Ordering::Relaxed);
    GUESTS_ELSEWHERE.fetch_or(elsewhere, Ordering::Relaxed);
}

/// Are all who share the memory known by numbers of one namespace?
pub fn has_one_namespace() -> bool {
    !GUESTS_ELSEWHERE.load(Ordering::Relaxed)
}

/// Were there any? What makes them past libc is not known of.
pub fn may_have_guests() -> bool {
    GUESTS.load(Ordering::Relaxed)
}

fn control_block() -> usize {
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
    // The static thread-local block lies below it, the thread's descriptor above.
    let known = pin([block - 0x1000, block, block + 0x1000]);
    let takes = |slot: &AtomicUsize| {
        let taken = slot.compare_exchange(0, block, Ordering::AcqRel, Ordering::Acquire);
        taken.map_or_else(|other| other == block, |_| true)
    };
    match BLOCKS.iter().position(takes) {
        Some(place) => _ = USED.fetch_max(place + 1, Ordering::AcqRel),
        None => tell_of_many(),
    }
    if !known {
        fork::settle();
    }
    // If it went out before it was pinned, it comes in now.
    touch(block);
    touch(block + 0x800);
    // SAFETY: our own key; any value but null is taken to the destructor.
    unsafe { pthread_setspecific(key, &raw const KEY as *const c_void) };
}

/// Pins places; whether all of them were.
fn pin<const N: usize>(places: [usize; N]) -> bool {
    let known = places.iter().all(|place| PINS.is_pinned(*place));
    if !places.iter().all(|place| PINS.pin(*place)) {
        tell_of_many();
    }
    known
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
    if address != 0 && !pin([address, address + 3]) {
        fork::settle();
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

/// In a fork's child, whose only thread is the calling one.
pub fn forget_others() {
    let own = control_block();
    forget(|block| block != own);
}

/// Where these were may be any memory from now on.
fn forget(gone: impl Fn(usize) -> bool) {
    for slot in used() {
        let block = slot.load(Ordering::Acquire);
        if block != 0 && gone(block) {
            slot.store(0, Ordering::Release);
        }
    }
}

/// At the end of a thread: brings in the robust mutexes that it holds, for good. Its stack may be managed from here on;
/// what the kernel touches of that is pinned.
extern "C" fn leave_thread(_: *mut c_void) {
    let own = control_block();
    // What could not be pinned goes on being a stack.
    if PINS.is_pinned(own) {
        forget(|block| block == own);
    }
    let offset = ROBUST_LIST.load(Ordering::Relaxed);
    if offset == 0 {
        return;
    }
    let list = own.wrapping_add_signed(offset) as *const RobustList;
    let mut fresh = false;
    each_robust(list, |address| {
        fresh |= !PINS.is_pinned(address);
        PINS.pin(address);
    });
    if fresh {
        // What was being let go when it was pinned is gone now, and comes in for good.
        fork::settle();
    }
    each_robust(list, |address| _ = wrap::can_be_read(address));
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
