//! Threads: how they begin, and where they run.

use super::{answer, fail, Next};
use crate::{exit, fork, memory, sys};
use alloc::boxed::Box;
use core::cell::UnsafeCell;
use core::ffi::{c_int, c_uint, c_ulong, c_void};
use core::mem::MaybeUninit;
use core::sync::atomic::{AtomicBool, Ordering};
use linux_raw_sys::general as raw;
use pageout::kernel::undisturbed;
use rustix::io::Errno;

static PTHREAD_CREATE: Next = Next::new(c"pthread_create");
static THRD_CREATE: Next = Next::new(c"thrd_create");

/// Before `main`.
pub fn prepare() {
    PTHREAD_CREATE.get();
    THRD_CREATE.get();
    PLACES.iter().for_each(|next| _ = next.get());
}

type Start = extern "C" fn(*mut c_void) -> *mut c_void;

struct Launch {
    start: Start,
    argument: *mut c_void,
    /// Of one that a handler of fork makes, the signals that it inherits.
    mask: Option<u64>,
}

/// What a new thread is told. Without a lock: a thread may be killed wherever it is, by an exec of another's, and the engine
/// that has to end then would wait for it.
struct Record {
    is_taken: AtomicBool,
    words: UnsafeCell<MaybeUninit<[usize; RECORD]>>,
}

// SAFETY: the words are of who took it.
unsafe impl Sync for Record {}

/// In words; what is told has to fit.
const RECORD: usize = 4;
/// So many threads begin at once without the engine's heap. Those that begin while their process forks stay taken in the child.
static RECORDS: [Record; 128] =
    [const { Record { is_taken: AtomicBool::new(false), words: UnsafeCell::new(MaybeUninit::uninit()) } };
        128];

/// A place for what a new thread is told. Where all are taken it is on the engine's heap, whose lock the engine takes too: no
/// handler of the program's may wait for a page meanwhile.
fn keep_for_thread<T>(what: T) -> *mut c_void {
    const { assert!(size_of::<T>() <= RECORD * size_of::<usize>() && align_of::<T>() <= align_of::<usize>()) };
    let free = RECORDS.iter().find(|record| {
        !record.is_taken.load(Ordering::Relaxed) && !record.is_taken.swap(true, Ordering::Acquire)
    });
    let Some(record) = free else { return sys::quietly(|| Box::into_raw(Box::new(what))).cast() };
    let kept = record.words.get().cast::<T>();
    // SAFETY: ours, and large enough.
    unsafe { kept.write(what) };
    kept.cast()
}

/// Takes it back.
///
/// # Safety
/// Of this type, and nobody else has it.
unsafe fn take_for_thread<T>(kept: *mut c_void) -> T {
    let Some(record) = RECORDS.iter().find(|record| record.words.get().cast() == kept) else {
        // SAFETY: by contract.
        return sys::quietly(|| *unsafe { Box::from_raw(kept.cast::<T>()) });
    };
    // SAFETY: by contract.
    let what = unsafe { kept.cast::<T>().read() };
    record.is_taken.store(false, Ordering::Release);
    what
}

extern "C" fn launched(launch: *mut c_void) -> *mut c_void {
    exit::enter_thread();
    // SAFETY: made by `pthread_create` below for this thread alone.
    let Launch { start, argument, mask } = unsafe { take_for_thread(launch) };
    mask.map(sys::set_signals);
    start(argument)
}

/// See the table of [`super`].
///
/// # Safety
/// As libc's.
#[no_mangle]
pub unsafe extern "C" fn pthread_create(
    thread: *mut c_ulong,
    attributes: *const c_void,
    start: Start,
    argument: *mut c_void,
) -> c_int {
    type Create = unsafe extern "C" fn(*mut c_ulong, *const c_void, Start, *mut c_void) -> c_int;
    // SAFETY: libc's function of that name.
    let create: Create = unsafe { core::mem::transmute(PTHREAD_CREATE.get()) };
    if !memory::is_home() {
        // The child of a fork past us: it has neither an engine nor its memory.
        // SAFETY: as the caller promises.
        return unsafe { create(thread, attributes, start, argument) };
    }
    let launch = keep_for_thread(Launch { start, argument, mask: fork::believed_mask() });
    // SAFETY: as the caller promises.
    let result = unsafe { create(thread, attributes, launched, launch) };
    if result != 0 {
        // SAFETY: no thread got it.
        unsafe { take_for_thread::<Launch>(launch) };
    }
    result
}

/// See the table of [`super`].
///
/// # Safety
/// As libc's.
#[no_mangle]
pub unsafe extern "C" fn pthread_sigmask(how: c_int, set: *const u64, old: *mut u64) -> c_int {
    /// SIGCANCEL and SIGSETXID are libc's, SIGKILL and SIGSTOP the kernel's.
    const NEVER: u64 = 1 << 31 | 1 << 32 | 1 << 8 | 1 << 18;
    // SAFETY: a set, as the caller promises; the first word of it is all that there is.
    let asked = (!set.is_null()).then(|| unsafe { set.read() } & !NEVER);
    let Some(mask) = fork::believed_mask() else {
        let asked = asked.as_ref().map_or(core::ptr::null(), |asked| asked as *const u64);
        // SAFETY: sets of 8 bytes, or null.
        let done =
            unsafe { sys::call(raw::__NR_rt_sigprocmask, how as usize, asked as usize, old as usize, 8) };
        return done.map_or_else(|errno| errno.raw_os_error(), |_| 0);
    };
    let next = match (asked, how as u32) {
        (None, _) => mask,
        (Some(asked), raw::SIG_BLOCK) => mask | asked,
        (Some(asked), raw::SIG_UNBLOCK) => mask & !asked,
        (Some(asked), raw::SIG_SETMASK) => asked,
        _ => return Errno::INVAL.raw_os_error(),
    };
    fork::believe_mask(next);
    if !old.is_null() {
        // SAFETY: as the caller promises.
        unsafe { old.write(mask) };
    }
    0
}

/// See the table of [`super`].
///
/// # Safety
/// As libc's.
#[no_mangle]
pub unsafe extern "C" fn sigprocmask(how: c_int, set: *const u64, old: *mut u64) -> c_int {
    // SAFETY: as the caller promises.
    match unsafe { pthread_sigmask(how, set, old) } {
        0 => 0,
        errno => fail(Errno::from_raw_os_error(errno)),
    }
}

type Start11 = extern "C" fn(*mut c_void) -> c_int;

struct Launch11 {
    start: Start11,
    argument: *mut c_void,
}

extern "C" fn launched11(launch: *mut c_void) -> *mut c_void {
    // SAFETY: made by `thrd_create` below for this thread alone.
    let Launch11 { start, argument } = unsafe { take_for_thread(launch) };
    // What `thrd_join` takes for the result.
    start(argument) as usize as *mut c_void
}

/// See the table of [`super`]: libc's makes its threads past `pthread_create`.
///
/// # Safety
/// As libc's.
#[no_mangle]
pub unsafe extern "C" fn thrd_create(thread: *mut c_ulong, start: Start11, argument: *mut c_void) -> c_int {
    const ERROR: c_int = 2;
    const NO_MEMORY: c_int = 3;
    if !memory::is_home() {
        type Create = unsafe extern "C" fn(*mut c_ulong, Start11, *mut c_void) -> c_int;
        // SAFETY: libc's function of that name; arguments as the caller promises.
        return unsafe { core::mem::transmute::<usize, Create>(THRD_CREATE.get())(thread, start, argument) };
    }
    let launch = keep_for_thread(Launch11 { start, argument });
    // SAFETY: as the caller promises.
    let result = unsafe { pthread_create(thread, core::ptr::null(), launched11, launch) };
    if result == 0 {
        return 0;
    }
    // SAFETY: no thread got it.
    unsafe { take_for_thread::<Launch11>(launch) };
    if result == Errno::NOMEM.raw_os_error() {
        NO_MEMORY
    } else {
        ERROR
    }
}

/// What looks at or changes other threads' CPUs and classes: its place in [`PLACES`], with its name there.
macro_rules! places {
    ($($index:literal $function:ident $name:literal),*) => {
        static PLACES: [Next; [$($index),*].len()] = [$(Next::new($name)),*];
        $(
            /// See the table of [`super`].
            ///
            /// # Safety
            /// As libc's.
            #[no_mangle]
            pub unsafe extern "C" fn $function(thread: usize, what: usize, to: usize) -> c_int {
                type Place = unsafe extern "C" fn(usize, usize, usize) -> c_int;
                // SAFETY: libc's function of that name; arguments as the caller promises.
                undisturbed(|| unsafe {
                    core::mem::transmute::<usize, Place>(PLACES[$index].get())(thread, what, to)
                })
            }
        )*
    };
}

places! {
    0 sched_setaffinity c"sched_setaffinity",
    1 sched_getaffinity c"sched_getaffinity",
    2 sched_setscheduler c"sched_setscheduler",
    3 sched_getscheduler c"sched_getscheduler",
    4 pthread_setaffinity_np c"pthread_setaffinity_np",
    5 pthread_getaffinity_np c"pthread_getaffinity_np",
    6 pthread_setschedparam c"pthread_setschedparam",
    7 pthread_getschedparam c"pthread_getschedparam",
    8 setpriority c"setpriority"
}

/// See the table of [`super`]. By number: libc has it since 2.41 only, and to look for what is not there asks the program's
/// malloc for the error's text, and frees it, which may not work before `main` (GCL's).
///
/// # Safety
/// As libc's.
#[no_mangle]
pub unsafe extern "C" fn sched_setattr(thread: c_int, attributes: *const c_void, flags: c_uint) -> c_int {
    // SAFETY: as the caller promises.
    unsafe { place(raw::__NR_sched_setattr, [thread as usize, attributes as usize, flags as usize, 0]) }
}

/// See the table of [`super`]. As [`sched_setattr`].
///
/// # Safety
/// As libc's.
#[no_mangle]
pub unsafe extern "C" fn sched_getattr(
    thread: c_int,
    attributes: *mut c_void,
    size: c_uint,
    flags: c_uint,
) -> c_int {
    let arguments = [thread as usize, attributes as usize, size as usize, flags as usize];
    // SAFETY: as the caller promises.
    unsafe { place(raw::__NR_sched_getattr, arguments) }
}

/// By number.
unsafe fn place(number: u32, [a, b, c, d]: [usize; 4]) -> c_int {
    // SAFETY: as the caller promises.
    answer(undisturbed(|| unsafe { sys::call(number, a, b, c, d) })) as c_int
}
