//! The functions of libc that the agent replaces, each for one hazard. They run in the program's threads,
//! make the call themselves where a raw system call will do, and change nothing else.
//!
//! `mapping`, `thread`, `limit` and `forks` have them by what they are about, `number` has `syscall`, `names` what it calls by
//! their names.
//!
//! | function | why |
//! |---|---|
//! | pthread_create, thrd_create | the kernel writes to a thread's memory when it exits: see `exit` |
//! | madvise, process_madvise | `MADV_FREE` leaves pages that raise no fault and no event, `MADV_GUARD_INSTALL` discards without an event; DONTNEED after them has one |
//! | madvise, mmap | what is populated by one call grows by gigabytes while nobody can register it: it is done in pieces |
//! | mmap | a mapping in the place of one that was not found yet changes nothing that the keeper sees: it is counted |
//! | madvise, mmap, malloc, realloc | while far too much is there who takes more waits: what is new grows faster than anything leaves |
//! | shmat | with SHM_REMAP it takes the place of memory without an event: what is there is unmapped first |
//! | mremap | what is registered at different times are several mappings, and who moves memory tells of it late: see `remap` |
//! | realloc | libc's own moves what it has mapped for one object by a call that comes to nobody: so one at a time, too |
//! | prctl | from a filter on nothing is called for a move that the filter may not allow |
//! | mlockall, munlockall | the engine's memory would be locked as well, populated, and counted; whether what comes is locked is to be known |
//! | setrlimit, prlimit | the engine's addresses count, too: so much is added to what limits those of the process |
//! | vmsplice | lends pages to a pipe without a pin: their frames would be reused under the reader |
//! | setsockopt | `SO_ZEROCOPY` does the same to a socket; programs fall back when it is refused |
//! | setsockopt | `XDP_UMEM_REG` pins memory, and fails where that is out: it is brought in |
//! | sched_{get,set}{affinity,scheduler}, pthread_{get,set}{affinity_np,schedparam}, sched_{get,set}attr, setpriority | a thread that is called to its server's CPU has others for that time, and gets its own back: see `undisturbed` |
//! | pthread_sigmask, sigprocmask | amid a fork all signals are blocked, and a handler of fork is to know of none of it: see `fork` |
//! | clone, __clone; set_tid_address by its number | the kernel writes to such a thread's memory, too |
//! | fork, _Fork, __fork, daemon, forkpty, clone, __clone | see `fork` |
//! | syscall | any of these by its number |
//! | syscall | futex operations that change a word fail where that is out: it is brought in, and they are called again |
//!
//! What a program calls without libc, by instructions of its own, is out of reach.

mod forks;
mod limit;
mod mapping;
mod names;
mod number;
mod thread;

use crate::sys;
use core::ffi::{c_char, c_int, c_long, c_uint, c_void};
use core::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use linux_raw_sys::general as raw;
use rustix::io::Errno;

extern "C" {
    fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void;
    fn __errno_location() -> *mut c_int;
}

// Thread-specific data of libc's.
extern "C" {
    pub fn pthread_key_create(key: *mut c_uint, destructor: Option<extern "C" fn(*mut c_void)>) -> c_int;
    pub fn pthread_setspecific(key: c_uint, value: *const c_void) -> c_int;
}

pub use mapping::{bring_in, can_be_read, forget_locks, keeps_from_children, mappings};

// Where the agent begins and ends, by the linker.
extern "C" {
    static __ehdr_start: u8;
    static _end: u8;
}
core::arch::global_asm!(".hidden __ehdr_start, _end");

/// Where the agent's code and data lie.
pub fn own() -> core::ops::Range<usize> {
    &raw const __ehdr_start as usize..&raw const _end as usize
}

const RTLD_NEXT: *mut c_void = -1isize as *mut c_void;

/// What the program finds by this name; null: nothing.
pub fn find(name: &core::ffi::CStr) -> *mut c_void {
    // SAFETY: a string; null asks the objects in their order.
    unsafe { dlsym(core::ptr::null_mut(), name.as_ptr()) }
}

/// A function of libc that lies behind ours.
struct Next {
    name: &'static core::ffi::CStr,
    found: AtomicUsize,
}

impl Next {
    const fn new(name: &'static core::ffi::CStr) -> Self {
        Self { name, found: AtomicUsize::new(0) }
    }

    /// Its address. Looked up at the start where possible: looking up is not for signal handlers.
    fn get(&self) -> usize {
        let known = self.found.load(Ordering::Relaxed);
        if known != 0 {
            return known;
        }
        let found = behind_us(self.name) as usize;
        self.found.store(found, Ordering::Relaxed);
        found
    }
}

/// What the objects behind this one have by a name; null: nothing.
fn behind_us(name: &core::ffi::CStr) -> *mut c_void {
    type Dlsym = unsafe extern "C" fn(*mut c_void, *const c_char) -> *mut c_void;
    let ours = own();
    // So many may each pass on to the next.
    const MOST: usize = 8;
    let mut asked: Option<Dlsym> = Some(dlsym);
    for _ in 0..MOST {
        let Some(ask) = asked else { break };
        // SAFETY: strings, and a handle that asks for the next object; what is found by this name is such a function.
        unsafe {
            let found = ask(RTLD_NEXT, name.as_ptr());
            if !ours.contains(&(found as usize)) {
                return found;
            }
            // Not libc's, but one of the program, or of what is preloaded before us (MangoHud): we are what lies behind that.
            asked = core::mem::transmute::<*mut c_void, Option<Dlsym>>(ask(RTLD_NEXT, c"dlsym".as_ptr()));
        }
    }
    core::ptr::null_mut()
}

/// Before `main`: finds what the wrappers will call.
pub fn prepare_process() {
    mapping::prepare();
    thread::prepare();
    forks::prepare();
}

fn fail(errno: Errno) -> c_int {
    // SAFETY: libc's own thread-local.
    unsafe { *__errno_location() = errno.raw_os_error() };
    -1
}

fn answer(result: Result<usize, Errno>) -> c_long {
    match result {
        Ok(value) => value as c_long,
        Err(errno) => fail(errno) as c_long,
    }
}

/// Did the program put up a filter of system calls? Said for good.
static FILTERED: AtomicBool = AtomicBool::new(false);

/// See [`FILTERED`].
pub fn is_filtered() -> bool {
    FILTERED.load(Ordering::Relaxed)
}

/// See the table of this module. Takes what libc's takes in `...`, there or not.
///
/// # Safety
/// As libc's.
#[inline(never)]
pub(super) unsafe fn prctl(what: c_int, a: usize, b: usize, c: usize, d: usize) -> c_int {
    const SET_SECCOMP: c_int = 22;
    const STRICT: usize = 1;
    // Without a filter it only asks whether there could be one.
    if what == SET_SECCOMP && (a == STRICT || b != 0) {
        FILTERED.store(true, Ordering::SeqCst);
    }
    // SAFETY: as the caller promises.
    answer(unsafe { sys::call6(raw::__NR_prctl, [what as usize, a, b, c, d, 0]) }) as c_int
}
