//! The functions of libc that the agent replaces, each for one hazard. They run in the program's threads,
//! make the call themselves where a raw system call will do, and change nothing else.
//!
//! | function | why |
//! |---|---|
//! | pthread_create, thrd_create | the kernel writes to a thread's memory when it exits: see `exit` |
//! | madvise, process_madvise | `MADV_FREE` leaves pages that raise no fault and no event, `MADV_GUARD_INSTALL` discards without an event; DONTNEED after them has one |
//! | madvise, mmap | what is populated by one call grows by gigabytes while nobody can register it: it is done in pieces |
//! | mmap | a mapping in the place of one that was not found yet changes nothing that the keeper sees: it is counted |
//! | madvise, mmap | while far too much is there who takes more waits a little: what is new grows faster than anything leaves |
//! | mremap | what is registered at different times are several mappings, and who moves memory tells of it late: see `remap` |
//! | realloc | libc's own moves what it has mapped for one object by a call that comes to nobody: so one at a time, too |
//! | prctl | from a filter on nothing is called for a move that the filter may not allow |
//! | mlockall | the engine's memory would be locked as well, populated, and counted |
//! | setrlimit, prlimit | the engine's addresses count, too: so much is added to what limits those of the process |
//! | vmsplice | lends pages to a pipe without a pin: their frames would be reused under the reader |
//! | setsockopt | `SO_ZEROCOPY` does the same to a socket; programs fall back when it is refused |
//! | sched_{get,set}{affinity,scheduler}, pthread_{get,set}{affinity_np,schedparam}, sched_setattr, setpriority | a thread that is called to its server's CPU has others for that time, and gets its own back: see `undisturbed` |
//! | clone, __clone, set_tid_address | the kernel writes to such a thread's memory, too |
//! | fork, _Fork, __fork, daemon, forkpty, clone, __clone | see `fork` |
//! | syscall | any of these by its number |
//!
//! What a program calls without libc, by instructions of its own, is out of reach.

use crate::maps::Maps;
use crate::{dispatch, exit, fork, keeper, memory, part, remap, sys};
use alloc::boxed::Box;
use core::ffi::{c_char, c_int, c_long, c_uint, c_ulong, c_void};
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use linux_raw_sys::general as raw;
use pageout::kernel::undisturbed;
use pageout::space::discover::Area;
use pageout::space::PAGE;
use rustix::io::Errno;

extern "C" {
    fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void;
    fn __errno_location() -> *mut c_int;
    fn pwritev2(fd: c_int, parts: *const c_void, count: c_int, offset: i64, flags: c_int) -> isize;
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
        // SAFETY: a string; the handle asks for the next object.
        let found = unsafe { dlsym(RTLD_NEXT, self.name.as_ptr()) } as usize;
        self.found.store(found, Ordering::Relaxed);
        found
    }
}

static PTHREAD_CREATE: Next = Next::new(c"pthread_create");
static FORK: Next = Next::new(c"fork");
static BARE_FORK: Next = Next::new(c"_Fork");
static FORKPTY: Next = Next::new(c"forkpty");
static CLONE: Next = Next::new(c"clone");

static REALLOC: Next = Next::new(c"realloc");
/// Is it the GNU libc's? Any other moves memory by libc's `mremap`, or not at all.
static IS_GNU: AtomicBool = AtomicBool::new(false);

/// Before `main`: finds what the wrappers will call.
pub fn prepare_process() {
    IS_GNU.store(REALLOC.get() == Next::new(c"__libc_realloc").get(), Ordering::Relaxed);
    for next in [&PTHREAD_CREATE, &FORK, &BARE_FORK, &FORKPTY, &CLONE] {
        next.get();
    }
    PLACES.iter().for_each(|next| _ = next.get());
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

type Start = extern "C" fn(*mut c_void) -> *mut c_void;

struct Launch {
    start: Start,
    argument: *mut c_void,
}

/// Memory of the engine's for what a new thread is told. Its heap has a lock that the engine takes too: no handler of the
/// program's may wait for a page meanwhile.
fn keep_for_thread<T>(what: T) -> *mut c_void {
    sys::quietly(|| Box::into_raw(Box::new(what))).cast()
}

/// Takes it back.
///
/// # Safety
/// Of this type, and nobody else has it.
unsafe fn take_for_thread<T>(kept: *mut c_void) -> T {
    // SAFETY: by contract.
    sys::quietly(|| *unsafe { Box::from_raw(kept.cast::<T>()) })
}

extern "C" fn launched(launch: *mut c_void) -> *mut c_void {
    exit::enter_thread();
    // SAFETY: made by `pthread_create` below for this thread alone.
    let Launch { start, argument } = unsafe { take_for_thread(launch) };
    start(argument)
}

/// See the table of this module.
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
    let launch = keep_for_thread(Launch { start, argument });
    // SAFETY: as the caller promises.
    let result = unsafe { create(thread, attributes, launched, launch) };
    if result != 0 {
        // SAFETY: no thread got it.
        unsafe { take_for_thread::<Launch>(launch) };
    }
    result
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

/// See the table of this module: libc's makes its threads past `pthread_create`.
///
/// # Safety
/// As libc's.
#[no_mangle]
pub unsafe extern "C" fn thrd_create(thread: *mut c_ulong, start: Start11, argument: *mut c_void) -> c_int {
    const ERROR: c_int = 2;
    const NO_MEMORY: c_int = 3;
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

/// See the table of this module.
///
/// # Safety
/// As libc's.
#[no_mangle]
pub unsafe extern "C" fn madvise(address: *mut c_void, len: usize, advice: c_int) -> c_int {
    let advised = |advice: c_int| {
        // SAFETY: as the caller promises.
        unsafe { sys::call(raw::__NR_madvise, address as usize, len, advice as usize, 0) }
    };
    answer(match advice {
        // SAFETY: as the caller promises.
        POPULATE_READ | POPULATE_WRITE => unsafe { populate(address as usize, len, advice) },
        _ => advise(advice, || 0, advised),
    }) as c_int
}

/// Does the program keep memory from its children? Said for good.
static DONT_FORK: AtomicBool = AtomicBool::new(false);

/// See [`DONT_FORK`].
pub fn keeps_from_children() -> bool {
    DONT_FORK.load(Ordering::Relaxed)
}

/// Memory that the kernel populates without letting anybody else change mappings: bytes, a millisecond.
const POPULATED: usize = 4 << 20;
const POPULATE_READ: c_int = raw::MADV_POPULATE_READ as c_int;
const POPULATE_WRITE: c_int = raw::MADV_POPULATE_WRITE as c_int;

/// Populates memory as madvise does, [`POPULATED`] at a time.
///
/// # Safety
/// As madvise.
unsafe fn populate(start: usize, len: usize, advice: c_int) -> Result<usize, Errno> {
    let advised = |from: usize, len: usize| {
        // SAFETY: as the caller promises.
        unsafe { sys::call(raw::__NR_madvise, from, len, advice as usize, 0) }
    };
    let Some(end) = start.checked_add(len).filter(|_| len > POPULATED) else { return advised(start, len) };
    let mut pieces = (start..end).step_by(POPULATED).map(|from| {
        part::hold_up(POPULATED);
        advised(from, POPULATED.min(end - from))
    });
    pieces.find(Result::is_err).unwrap_or(Ok(0))
}

/// Mappings that the program made here. One that takes the place of another of its size, which was not found yet,
/// changes nothing else that the keeper sees: no size, and no event.
static MAPPINGS: AtomicU32 = AtomicU32::new(0);

/// How many mappings the program made by libc's `mmap`.
pub fn mappings() -> u32 {
    MAPPINGS.load(Ordering::Relaxed)
}

/// See the table of this module.
///
/// # Safety
/// As libc's.
#[no_mangle]
pub unsafe extern "C" fn mmap(
    address: *mut c_void,
    len: usize,
    access: c_int,
    flags: c_int,
    fd: c_int,
    offset: i64,
) -> *mut c_void {
    const POPULATE: c_int = raw::MAP_POPULATE as c_int;
    const ANONYMOUS: c_int = (raw::MAP_PRIVATE | raw::MAP_ANONYMOUS) as c_int;
    const LEFT_ALONE: c_int = (raw::MAP_NONBLOCK | raw::MAP_LOCKED | raw::MAP_HUGETLB) as c_int;
    let asked = flags & (POPULATE | ANONYMOUS | LEFT_ALONE) == POPULATE | ANONYMOUS;
    let in_pieces = asked && len > POPULATED;
    let flags = if in_pieces { flags & !POPULATE } else { flags };
    let arguments = [address as usize, len, access as usize, flags as usize, fd as usize, offset as usize];
    // SAFETY: as the caller promises.
    let mapped = unsafe { sys::call6(raw::__NR_mmap, arguments) };
    MAPPINGS.fetch_add(1, Ordering::Relaxed);
    let writes = access as u32 & raw::PROT_WRITE != 0;
    match mapped {
        Ok(start) if in_pieces => {
            // SAFETY: what was just mapped. That it could not be populated is nobody's to know.
            let _ = unsafe { populate(start, len, if writes { POPULATE_WRITE } else { POPULATE_READ }) };
        }
        Ok(_) if writes && flags & ANONYMOUS == ANONYMOUS => part::hold_up(len),
        _ => {}
    }
    answer(mapped) as *mut c_void
}

/// See the table of this module.
///
/// # Safety
/// As libc's.
#[no_mangle]
pub unsafe extern "C" fn mmap64(
    address: *mut c_void,
    len: usize,
    access: c_int,
    flags: c_int,
    fd: c_int,
    offset: i64,
) -> *mut c_void {
    // SAFETY: as the caller promises.
    unsafe { mmap(address, len, access, flags, fd, offset) }
}

/// See the table of this module. Takes what libc's takes in `...`, there or not.
///
/// # Safety
/// As libc's.
#[no_mangle]
pub unsafe extern "C" fn mremap(
    old: *mut c_void,
    old_len: usize,
    new_len: usize,
    flags: c_int,
    new: *mut c_void,
) -> *mut c_void {
    // SAFETY: as the caller promises.
    answer(unsafe { remap::remap(old as usize, old_len, new_len, flags as usize, new as usize) })
        as *mut c_void
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
#[no_mangle]
pub unsafe extern "C" fn prctl(what: c_int, a: usize, b: usize, c: usize, d: usize) -> c_int {
    const SET_SECCOMP: c_int = 22;
    if what == SET_SECCOMP {
        FILTERED.store(true, Ordering::SeqCst);
    }
    // SAFETY: as the caller promises.
    answer(unsafe { sys::call6(raw::__NR_prctl, [what as usize, a, b, c, d, 0]) }) as c_int
}

/// See the table of this module.
///
/// # Safety
/// As libc's.
#[no_mangle]
pub unsafe extern "C" fn realloc(object: *mut c_void, len: usize) -> *mut c_void {
    // SAFETY: as the caller promises. libc's own has such a header before each object.
    unsafe {
        let may_move = IS_GNU.load(Ordering::Relaxed)
            && !object.is_null()
            && (*object.cast::<Header>().sub(1)).size & MAPPED != 0;
        if may_move {
            return realloc_mapped(object, len);
        }
        bare_realloc(object, len)
    }
}

/// Libc's.
unsafe fn bare_realloc(object: *mut c_void, len: usize) -> *mut c_void {
    type Realloc = unsafe extern "C" fn(*mut c_void, usize) -> *mut c_void;
    // SAFETY: libc's function of that name, and as the caller promises.
    unsafe { core::mem::transmute::<usize, Realloc>(REALLOC.get())(object, len) }
}

/// What the GNU libc has right before an object; each with flags in its lowest bits.
#[repr(C)]
struct Header {
    /// How much of the mapping comes first, where the object has one of its own.
    before: usize,
    /// With the header, and to the end of the mapping.
    size: usize,
}

const FLAGS: usize = 7;
/// Of the size: the object has a mapping of its own.
const MAPPED: usize = 2;

/// For an object that has a mapping of its own.
#[cold]
unsafe fn realloc_mapped(object: *mut c_void, len: usize) -> *mut c_void {
    let header = object.cast::<Header>().wrapping_sub(1);
    // SAFETY: as the caller promises.
    let Header { before, size } = unsafe { header.read() };
    let usable = (size & !FLAGS).wrapping_sub(size_of::<Header>());
    // SAFETY: as the caller promises.
    let direct = || unsafe { bare_realloc(object, len) };
    // With as much as its size takes, which another object of its size would not need.
    if len.saturating_add(size_of::<usize>()) <= usable {
        return direct();
    }
    if remap::is_one(header as usize - (before & !FLAGS), object as usize + usable) {
        return remap::one_at_a_time(direct);
    }
    // What are several mappings the kernel would not move: libc would copy, too, and nobody is to wait for that.
    // SAFETY: objects of libc's; without one to begin with it allocates, without a length it frees.
    unsafe {
        let new = bare_realloc(core::ptr::null_mut(), len);
        if !new.is_null() {
            new.cast::<u8>().copy_from_nonoverlapping(object.cast(), usable);
            bare_realloc(object, 0);
        }
        new
    }
}

/// See the table of this module.
///
/// # Safety
/// As libc's.
#[no_mangle]
pub unsafe extern "C" fn process_madvise(
    process: c_int,
    parts: *const c_void,
    count: usize,
    advice: c_int,
    flags: c_uint,
) -> isize {
    let advised = |advice: c_int| {
        let arguments = [process as usize, parts as usize, count, advice as usize, flags as usize, 0];
        // SAFETY: as the caller promises.
        unsafe { sys::call6(raw::__NR_process_madvise, arguments) }
    };
    let lens = || {
        // SAFETY: as the caller promises; asked only after the kernel has read them.
        let part = |i| unsafe { parts.cast::<[usize; 2]>().add(i).read() };
        (0..count).map(|i| part(i)[1]).sum()
    };
    answer(advise(advice, lens, advised)) as isize
}

/// Has `call` give advice, and tell of what it discarded; `whole` is what it answers if it gave all of it. Only then: what
/// the kernel has refused it must not lose (memory of a file, by `MADV_FREE`).
fn advise(
    advice: c_int,
    whole: impl Fn() -> usize,
    call: impl Fn(c_int) -> Result<usize, Errno>,
) -> Result<usize, Errno> {
    const FREE: c_int = raw::MADV_FREE as c_int;
    const DONTNEED: c_int = raw::MADV_DONTNEED as c_int;
    const GUARD_INSTALL: c_int = 102;
    if advice == raw::MADV_DONTFORK as c_int {
        DONT_FORK.store(true, Ordering::Relaxed);
    }
    let given = call(advice);
    // A hole stops neither the first nor the second.
    let all = matches!(advice, FREE | GUARD_INSTALL)
        && match given {
            Ok(done) => done == whole(),
            Err(errno) => errno == Errno::NOMEM,
        };
    if all {
        // Guard pages stay.
        let _ = call(DONTNEED);
    }
    given
}

const MCL_CURRENT: c_int = raw::MCL_CURRENT as c_int;
const MCL_FUTURE: c_int = raw::MCL_FUTURE as c_int;
const MCL_ONFAULT: c_int = raw::MCL_ONFAULT as c_int;

/// See the table of this module.
#[no_mangle]
pub extern "C" fn mlockall(flags: c_int) -> c_int {
    let known = flags & !(MCL_CURRENT | MCL_FUTURE | MCL_ONFAULT) == 0;
    if flags & MCL_CURRENT == 0 || !known || !memory::is_home() {
        return answer(lock_by(flags)) as c_int;
    }
    let locked = sys::quietly(|| lock_all(flags));
    if locked.is_err() {
        // As if it had not been tried, but for what was locked before.
        let _ = unlock_all();
    }
    answer(locked) as c_int
}

fn lock_by(flags: c_int) -> Result<usize, Errno> {
    // SAFETY: takes a number.
    unsafe { sys::call(raw::__NR_mlockall, flags as usize, 0, 0, 0) }
}

fn unlock_all() -> Result<usize, Errno> {
    // SAFETY: takes nothing.
    unsafe { sys::call(raw::__NR_munlockall, 0, 0, 0, 0) }
}

/// Locks what there is, mapping by mapping, and leaves the engine's out.
fn lock_all(flags: c_int) -> Result<usize, Errno> {
    // What is to come first; without it, it is not locked any more.
    match flags & MCL_FUTURE {
        0 => unlock_all()?,
        _ => lock_by(flags & !MCL_CURRENT)?,
    };
    let (mut seen, mut failed) = (false, None);
    Maps::new().read(c"/proc/self/maps", |line| {
        seen = true;
        let Some(Area { start, end, name, .. }) = Area::parse(line) else { return };
        // The kernel's own is none of the program's memory.
        if failed.is_some() || name.starts_with(b"[v") || memory::is_own(start, end) {
            return;
        }
        let call = |number, last: u32| {
            // SAFETY: changes no content.
            unsafe { sys::call(number, start, end - start, last as usize, 0) }
        };
        // The first says whether it may be; the second brings it in, as far as it can be read.
        match call(raw::__NR_mlock2, raw::MLOCK_ONFAULT) {
            Ok(_) if flags & MCL_ONFAULT == 0 => drop(call(raw::__NR_mlock, 0)),
            Ok(_) => {}
            // It has gone meanwhile.
            Err(Errno::NOMEM) if call(raw::__NR_msync, raw::MS_ASYNC).is_err() => {}
            Err(errno) => failed = Some(errno),
        }
    });
    match failed {
        Some(errno) => Err(errno),
        None if seen => Ok(0),
        // Without /proc.
        None => lock_by(flags),
    }
}

/// `struct rlimit`: the limit, and what it may be raised to.
type Limit = [u64; 2];

/// See the table of this module. What the program reads back is the sum.
///
/// # Safety
/// As libc's.
#[no_mangle]
pub unsafe extern "C" fn prlimit(
    process: c_int,
    resource: c_uint,
    new: *const Limit,
    old: *mut Limit,
) -> c_int {
    let set = |new: *const Limit| {
        // SAFETY: as the caller promises.
        unsafe {
            sys::call(raw::__NR_prlimit64, process as usize, resource as usize, new as usize, old as usize)
        }
    };
    let me = rustix::process::getpid().as_raw_nonzero().get();
    // Not of a guest in the same memory (vfork), which is about to become another program.
    let ours = (process == 0 || process == me) && me as u32 == keeper::program() && memory::is_home();
    if new.is_null() || !ours || !matches!(resource, raw::RLIMIT_AS | raw::RLIMIT_DATA) {
        return answer(set(new)) as c_int;
    }
    let more = |limit: u64| if limit == u64::MAX { limit } else { limit.saturating_add(memory::reserved()) };
    // SAFETY: as the caller promises.
    let raised = unsafe { *new }.map(more);
    answer(match set(&raised) {
        // More than it may be raised to.
        Err(Errno::PERM) => set(new),
        done => done,
    }) as c_int
}

/// See the table of this module: another name of `prlimit`.
///
/// # Safety
/// As libc's.
#[no_mangle]
pub unsafe extern "C" fn prlimit64(
    process: c_int,
    resource: c_uint,
    new: *const Limit,
    old: *mut Limit,
) -> c_int {
    // SAFETY: as the caller promises.
    unsafe { prlimit(process, resource, new, old) }
}

/// See the table of this module.
///
/// # Safety
/// As libc's.
#[no_mangle]
pub unsafe extern "C" fn setrlimit(resource: c_uint, new: *const Limit) -> c_int {
    // SAFETY: as the caller promises.
    unsafe { prlimit(0, resource, new, core::ptr::null_mut()) }
}

/// See the table of this module: another name of `setrlimit`.
///
/// # Safety
/// As libc's.
#[no_mangle]
pub unsafe extern "C" fn setrlimit64(resource: c_uint, new: *const Limit) -> c_int {
    // SAFETY: as the caller promises.
    unsafe { setrlimit(resource, new) }
}

/// See the table of this module.
///
/// # Safety
/// As libc's.
#[no_mangle]
pub unsafe extern "C" fn vmsplice(fd: c_int, parts: *const c_void, count: usize, flags: c_uint) -> isize {
    const F_GETFL: usize = 3;
    const ACCESS: usize = 3;
    const READ_ONLY: usize = 0;
    const NONBLOCK: c_uint = 2;
    const RWF_NOWAIT: c_int = 8;
    // SAFETY: as the caller promises.
    unsafe {
        let reads = sys::call(raw::__NR_fcntl, fd as usize, F_GETFL, 0, 0)
            .is_ok_and(|flags| flags & ACCESS == READ_ONLY);
        if reads {
            // Out of the pipe into memory: a copy already.
            return answer(sys::call(raw::__NR_vmsplice, fd as usize, parts as usize, count, flags as usize))
                as isize;
        }
        let nowait = if flags & NONBLOCK != 0 { RWF_NOWAIT } else { 0 };
        const HERE: i64 = -1;
        let Ok(count) = c_int::try_from(count) else { return fail(Errno::INVAL) as isize };
        // libc's, since it waits: a thread can be cancelled there, as in its vmsplice.
        pwritev2(fd, parts, count, HERE, nowait)
    }
}

/// See the table of this module.
///
/// # Safety
/// As libc's.
#[no_mangle]
pub unsafe extern "C" fn setsockopt(
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *const c_void,
    len: c_uint,
) -> c_int {
    const SOL_SOCKET: c_int = 1;
    const SO_ZEROCOPY: c_int = 60;
    if level == SOL_SOCKET && name == SO_ZEROCOPY {
        return fail(Errno::OPNOTSUPP);
    }
    let arguments = [fd as usize, level as usize, name as usize, value as usize, len as usize, 0];
    // SAFETY: as the caller promises.
    answer(unsafe { sys::call6(raw::__NR_setsockopt, arguments) }) as c_int
}

type Fork = unsafe extern "C" fn() -> c_int;

/// A fork by libc. Its child is ours from the clone on.
fn fork_by(libc: impl FnOnce() -> c_int) -> c_int {
    let mut turn = fork::before();
    let dispatched = turn.is_out() && dispatch::begin();
    if turn.is_out() && !dispatched && !turn.bring_home() {
        turn.end();
        return fail(Errno::NOMEM);
    }
    let child = libc();
    if dispatched {
        dispatch::end();
    }
    if child == 0 {
        turn.restore();
    } else {
        turn.end();
    }
    child
}

/// See the table of this module.
#[no_mangle]
pub extern "C" fn fork() -> c_int {
    // SAFETY: libc's function of that name.
    fork_by(|| unsafe { core::mem::transmute::<usize, Fork>(FORK.get())() })
}

/// See the table of this module: another name of `fork`.
#[no_mangle]
pub extern "C" fn __fork() -> c_int {
    fork()
}

/// See the table of this module. Runs no handlers of its own, so the child's keeper is started here.
#[no_mangle]
pub extern "C" fn _Fork() -> c_int {
    let child = fork_by(|| {
        dispatch::block();
        // SAFETY: libc's function of that name.
        unsafe { core::mem::transmute::<usize, Fork>(BARE_FORK.get())() }
    });
    if child == 0 {
        fork::child();
    }
    child
}

/// See the table of this module: as libc's, by our `fork`.
#[no_mangle]
pub extern "C" fn daemon(keep_directory: c_int, keep_streams: c_int) -> c_int {
    match fork() {
        -1 => return -1,
        0 => {}
        _ => sys::exit_group(0),
    }
    if rustix::process::setsid().is_err() {
        return -1;
    }
    if keep_directory == 0 {
        let _ = rustix::process::chdir(c"/");
    }
    if keep_streams == 0 {
        let Ok(null) = rustix::fs::open(c"/dev/null", rustix::fs::OFlags::RDWR, rustix::fs::Mode::empty())
        else {
            return fail(Errno::NODEV);
        };
        let _ = rustix::stdio::dup2_stdin(&null);
        let _ = rustix::stdio::dup2_stdout(&null);
        let _ = rustix::stdio::dup2_stderr(&null);
    }
    0
}

/// What looks at or changes other threads' CPUs and classes: its place in [`PLACES`], with its name there.
macro_rules! places {
    ($($index:literal $function:ident $name:literal),*) => {
        static PLACES: [Next; [$($index),*].len()] = [$(Next::new($name)),*];
        $(
            /// See the table of this module.
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

/// See the table of this module. By number: libc has it since 2.41 only, and to look for what is not there asks the program's
/// malloc for the error's text, and frees it, which may not work before `main` (GCL's).
///
/// # Safety
/// As libc's.
#[no_mangle]
pub unsafe extern "C" fn sched_setattr(thread: c_int, attributes: *const c_void, flags: c_uint) -> c_int {
    let arguments = [thread as usize, attributes as usize, flags as usize, 0, 0, 0];
    // SAFETY: as the caller promises.
    let done = undisturbed(|| unsafe { sys::call6(raw::__NR_sched_setattr, arguments) });
    answer(done) as c_int
}

type ForkPty = unsafe extern "C" fn(*mut c_int, *mut c_char, *const c_void, *const c_void) -> c_int;

/// See the table of this module.
///
/// # Safety
/// As libc's.
#[no_mangle]
pub unsafe extern "C" fn forkpty(
    master: *mut c_int,
    name: *mut c_char,
    terminal: *const c_void,
    window: *const c_void,
) -> c_int {
    // SAFETY: libc's function of that name; arguments as the caller promises.
    fork_by(|| unsafe {
        core::mem::transmute::<usize, ForkPty>(FORKPTY.get())(master, name, terminal, window)
    })
}

/// In the child of a clone of our own.
fn begin_child(turn: &fork::Turn) {
    if turn.is_out() {
        fork::child_inherits();
    } else {
        fork::child();
    }
}

/// In its parent, or where there is no child.
fn end_clone(turn: fork::Turn, id: c_long) {
    if turn.is_out() {
        fork::cloned((id > 0).then_some(id as u32));
    }
    turn.end();
}

type Main = extern "C" fn(*mut c_void) -> c_int;
type Clone = unsafe extern "C" fn(
    Option<Main>,
    *mut c_void,
    c_int,
    *mut c_void,
    *mut c_void,
    *mut c_void,
    *mut c_void,
) -> c_int;

struct Cloned {
    main: Main,
    argument: *mut c_void,
    turn: fork::Turn,
}

extern "C" fn cloned(child: *mut c_void) -> c_int {
    // SAFETY: on the stack of the caller of `clone`, of which this process has a copy.
    let child = unsafe { &*child.cast::<Cloned>() };
    begin_child(&child.turn);
    child.turn.restore();
    (child.main)(child.argument)
}

// What libc's `clone` does, with the child's argument for [`cloned`]. Not libc's: its code may not be there yet.
// Global within the library, as the others: who calls it may be compiled into another object.
core::arch::global_asm!(
    ".type pageout_bare_clone, @function",
    ".globl pageout_bare_clone",
    ".hidden pageout_bare_clone",
    "pageout_bare_clone:",
    "and rsi, -16",
    "sub rsi, 16",
    "mov [rsi], r9",
    "mov r10, rcx",
    "mov eax, 56",
    "syscall",
    "test rax, rax",
    "jz 2f",
    "ret",
    "2:",
    "xor ebp, ebp",
    "mov rdi, [rsp]",
    "call {cloned}",
    "mov edi, eax",
    "mov eax, 60",
    "syscall",
    "ud2",
    ".size pageout_bare_clone, . - pageout_bare_clone",
    cloned = sym cloned,
);

extern "C" {
    fn pageout_bare_clone(
        flags: c_long,
        stack: *mut c_void,
        parent: *mut c_void,
        child: *mut c_void,
        tls: *mut c_void,
        argument: *mut c_void,
    ) -> c_long;
}

/// Brings a word in; false where there is none that the program may read.
pub fn can_be_read(address: usize) -> bool {
    // SAFETY: changes no content.
    unsafe { populate(address & !(PAGE - 1), PAGE, POPULATE_READ) }.is_ok()
}

/// Brings in what the kernel reads or writes where nobody gets a page: in a clone after [`fork::bequeath`], until it is done.
pub fn bring_in(address: usize, len: usize) {
    let start = address & !(PAGE - 1);
    let len = address.wrapping_add(len).wrapping_sub(start);
    // SAFETY: changes no content. What is not memory is the clone's to refuse.
    let _ = unsafe { populate(start, len, POPULATE_WRITE) };
}

/// The same for where it says who the child is.
fn bring_in_ids(flags: u64, parent: usize, child: usize) {
    if flags & u64::from(raw::CLONE_PARENT_SETTID | raw::CLONE_PIDFD) != 0 {
        bring_in(parent, 4);
    }
    if flags & u64::from(raw::CLONE_CHILD_SETTID) != 0 {
        bring_in(child, 4);
    }
}

/// Before a clone: has the word stay that the kernel clears when the child ends, if that shares the memory.
fn keep_word(flags: u64, child: usize) {
    if flags & u64::from(raw::CLONE_VM) == 0 {
        return;
    }
    exit::expect_guest();
    if flags & u64::from(raw::CLONE_CHILD_CLEARTID) != 0 {
        exit::keep_word(child);
    }
}

/// See the table of this module. Takes what libc's takes in `...`, there or not.
///
/// # Safety
/// As libc's.
#[no_mangle]
pub unsafe extern "C" fn clone(
    main: Option<Main>,
    stack: *mut c_void,
    flags: c_int,
    argument: *mut c_void,
    parent: *mut c_void,
    tls: *mut c_void,
    child: *mut c_void,
) -> c_int {
    // SAFETY: libc's function of that name.
    let next: Clone = unsafe { core::mem::transmute(CLONE.get()) };
    let (Some(start), false, false) = (main, stack.is_null(), flags as u32 & raw::CLONE_VM != 0) else {
        keep_word(flags as u64, child as usize);
        // SAFETY: as the caller promises.
        return unsafe { next(main, stack, flags, argument, parent, tls, child) };
    };
    let turn = fork::before();
    if turn.is_out() {
        bring_in((stack as usize).wrapping_sub(fork::STACK), fork::STACK);
        bring_in_ids(flags as u64, parent as usize, child as usize);
        if !fork::bequeath() {
            turn.end();
            return fail(Errno::NOMEM);
        }
    }
    let mut both = Cloned { main: start, argument, turn };
    // SAFETY: as the caller promises; the child reads its own copy of `both`.
    let id = unsafe { pageout_bare_clone(flags.into(), stack, parent, child, tls, (&raw mut both).cast()) };
    end_clone(both.turn, id);
    if id < 0 {
        return fail(Errno::from_raw_os_error(-id as i32));
    }
    id as c_int
}

/// See the table of this module: another name of `clone`.
///
/// # Safety
/// As libc's.
#[no_mangle]
pub unsafe extern "C" fn __clone(
    main: Option<Main>,
    stack: *mut c_void,
    flags: c_int,
    argument: *mut c_void,
    parent: *mut c_void,
    tls: *mut c_void,
    child: *mut c_void,
) -> c_int {
    // SAFETY: as the caller promises.
    unsafe { clone(main, stack, flags, argument, parent, tls, child) }
}

// What libc's `syscall` does: its variadic arguments lie where those of a function of seven would.
core::arch::global_asm!(
    ".type pageout_bare_syscall, @function",
    ".globl pageout_bare_syscall",
    ".hidden pageout_bare_syscall",
    "pageout_bare_syscall:",
    "mov rax, rdi",
    "mov rdi, rsi",
    "mov rsi, rdx",
    "mov rdx, rcx",
    "mov r10, r8",
    "mov r8, r9",
    "mov r9, [rsp + 8]",
    "syscall",
    "cmp rax, -4095",
    "jae 2f",
    "ret",
    "2:",
    "neg eax",
    "push rax",
    "call __errno_location@PLT",
    "pop rcx",
    "mov [rax], ecx",
    "mov rax, -1",
    "ret",
    ".size pageout_bare_syscall, . - pageout_bare_syscall",
);

// The same after a look at the arguments, with nothing on the stack: the child may return on another.
core::arch::global_asm!(
    ".type pageout_kept_syscall, @function",
    ".globl pageout_kept_syscall",
    ".hidden pageout_kept_syscall",
    "pageout_kept_syscall:",
    "push rdi",
    "push rsi",
    "push rdx",
    "push rcx",
    "push r8",
    "push r9",
    "sub rsp, 8",
    "call {keep}",
    "add rsp, 8",
    "pop r9",
    "pop r8",
    "pop rcx",
    "pop rdx",
    "pop rsi",
    "pop rdi",
    "jmp pageout_bare_syscall",
    ".size pageout_kept_syscall, . - pageout_kept_syscall",
    keep = sym keep_word_by_number,
);

extern "C" {
    #[link_name = "pageout_bare_syscall"]
    fn bare(number: c_long, a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) -> c_long;
    #[link_name = "pageout_kept_syscall"]
    fn kept(number: c_long, a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) -> c_long;
}

/// See the table of this module. Takes what libc's takes in `...`, there or not. A clone's child on a stack of its
/// own returns to what lies on that, as from libc's.
///
/// # Safety
/// As libc's.
#[no_mangle]
pub unsafe extern "C" fn syscall(
    number: c_long,
    a: usize,
    b: usize,
    c: usize,
    d: usize,
    e: usize,
    f: usize,
) -> c_long {
    // SAFETY: as the caller promises.
    unsafe {
        match number as u32 {
            raw::__NR_madvise
            | raw::__NR_process_madvise
            | raw::__NR_mremap
            | raw::__NR_mlockall
            | raw::__NR_vmsplice
            | raw::__NR_setsockopt
            | raw::__NR_prctl
            | raw::__NR_seccomp
            | raw::__NR_fork => by_number(number, a, b, c, d, e, f),
            raw::__NR_clone if a as u32 & raw::CLONE_VM == 0 => by_number(number, a, b, c, d, e, f),
            // Null asks whether there is such a call.
            raw::__NR_clone3
                if a != 0 && b >= CLONE3_STACK + 8 && *(a as *const u64) & u64::from(raw::CLONE_VM) == 0 =>
            {
                by_number(number, a, b, c, d, e, f)
            }
            raw::__NR_clone | raw::__NR_clone3 | raw::__NR_set_tid_address => kept(number, a, b, c, d, e, f),
            raw::__NR_sched_setaffinity
            | raw::__NR_sched_getaffinity
            | raw::__NR_sched_setscheduler
            | raw::__NR_sched_getscheduler
            | raw::__NR_sched_setattr
            | raw::__NR_sched_getattr
            | raw::__NR_setpriority => place_by_number(number, a, b, c, d, e, f),
            _ => bare(number, a, b, c, d, e, f),
        }
    }
}

/// As the functions of [`PLACES`]. A function of its own: nothing lies on the stack of [`syscall`].
#[inline(never)]
unsafe extern "C" fn place_by_number(
    number: c_long,
    a: usize,
    b: usize,
    c: usize,
    d: usize,
    e: usize,
    f: usize,
) -> c_long {
    // SAFETY: as the caller promises.
    undisturbed(|| unsafe { bare(number, a, b, c, d, e, f) })
}

/// Where clone3's structure has the child's stack, and where the numbers that it is to have, and how many.
const CLONE3_STACK: usize = 40;
const CLONE3_SET_TID: usize = 64;

/// As [`keep_word`], for what makes a thread, or is the word's own call.
unsafe extern "C" fn keep_word_by_number(number: c_long, a: usize, b: usize, _: usize, d: usize) {
    match number as u32 {
        raw::__NR_clone => keep_word(a as u64, d),
        raw::__NR_set_tid_address => exit::keep_word(a),
        _ if a != 0 && b >= CLONE3_STACK + 8 => {
            // SAFETY: as the caller promises.
            let [flags, _, child] = unsafe { *(a as *const [u64; 3]) };
            keep_word(flags, child as usize);
        }
        _ => {}
    }
}

#[inline(never)]
unsafe extern "C" fn by_number(
    number: c_long,
    a: usize,
    b: usize,
    c: usize,
    d: usize,
    e: usize,
    f: usize,
) -> c_long {
    // SAFETY: as the caller promises.
    unsafe {
        let stack = match number as u32 {
            raw::__NR_madvise => return madvise(a as *mut _, b, c as c_int).into(),
            raw::__NR_process_madvise => {
                return process_madvise(a as c_int, b as *const _, c, d as c_int, e as c_uint) as c_long
            }
            raw::__NR_mremap => return mremap(a as *mut _, b, c, d as c_int, e as *mut _) as c_long,
            raw::__NR_mlockall => return mlockall(a as c_int).into(),
            raw::__NR_prctl => return prctl(a as c_int, b, c, d, e).into(),
            raw::__NR_seccomp => {
                FILTERED.store(true, Ordering::SeqCst);
                return answer(sys::call(number as u32, a, b, c, 0));
            }
            raw::__NR_vmsplice => return vmsplice(a as c_int, b as *const _, c, d as c_uint) as c_long,
            raw::__NR_setsockopt => {
                return setsockopt(a as c_int, b as c_int, c as c_int, d as *const _, e as c_uint).into()
            }
            raw::__NR_clone => b,
            raw::__NR_clone3 => *((a + CLONE3_STACK) as *const usize),
            _ => 0,
        };
        let mut turn = fork::before();
        match number as u32 {
            raw::__NR_clone if turn.is_out() => bring_in_ids(a as u64, c, d),
            raw::__NR_clone3 if turn.is_out() => {
                bring_in(a, b);
                let [flags, pidfd, child, parent] = *(a as *const [u64; 4]);
                bring_in_ids(flags, parent as usize, child as usize);
                bring_in(pidfd as usize, 4);
                if b >= CLONE3_SET_TID + 16 {
                    let [ids, count] = *((a + CLONE3_SET_TID) as *const [usize; 2]);
                    bring_in(ids, count.wrapping_mul(4));
                }
            }
            _ => {}
        }
        // The child returns elsewhere if it has a stack of its own.
        if turn.is_out() && !(if stack == 0 { fork::bequeath() } else { turn.bring_home() }) {
            turn.end();
            return fail(Errno::NOMEM).into();
        }
        if stack != 0 {
            turn.restore();
        }
        let id = bare(number, a, b, c, d, e, f);
        if id == 0 {
            begin_child(&turn);
            turn.restore();
        } else {
            end_clone(turn, id);
        }
        id
    }
}
