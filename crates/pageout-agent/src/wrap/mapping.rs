//! Memory: advice, mappings, moves, locks, and what lends pages.

use super::{answer, fail, Next};
use crate::proc::{self, Maps};
use crate::{keeper, memory, part, remap, sys};
use alloc::vec::Vec;
use core::ffi::{c_int, c_uint, c_ulong, c_void};
use core::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use linux_raw_sys::general as raw;
use pageout::space::discover::Area;
use pageout::space::PAGE;
use rustix::io::Errno;
use rustix::mm::{mmap_anonymous, MapFlags, ProtFlags};

static PWRITEV2: Next = Next::new(c"pwritev2");
static POLL: Next = Next::new(c"poll");
static MALLOC: Next = Next::new(c"malloc");
static REALLOC: Next = Next::new(c"realloc");
/// Is it the GNU libc's? Any other moves memory by libc's `mremap`, or not at all.
static IS_GNU: AtomicBool = AtomicBool::new(false);

/// Before `main`.
pub fn prepare() {
    for next in [&MALLOC, &PWRITEV2, &POLL] {
        next.get();
    }
    IS_GNU.store(REALLOC.get() == Next::new(c"__libc_realloc").get(), Ordering::Relaxed);
}

/// See the table of [`super`].
///
/// # Safety
/// As libc's.
#[inline(never)]
pub(super) unsafe fn madvise(address: *mut c_void, len: usize, advice: c_int) -> c_int {
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

/// See the table of [`super`].
///
/// # Safety
/// As libc's.
#[inline(never)]
pub(super) unsafe fn mmap(
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
    // A filter may not allow madvise.
    let in_pieces = asked && len > POPULATED && !super::is_filtered();
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

/// See the table of [`super`].
///
/// # Safety
/// As libc's.
#[inline(never)]
pub(super) unsafe fn shmat(id: c_int, address: *const c_void, flags: c_int) -> *mut c_void {
    let attach = |address: usize, flags: c_int| {
        // SAFETY: as the caller promises; elsewhere a new mapping.
        unsafe { sys::call(raw::__NR_shmat, id as usize, address, flags as usize, 0) }
    };
    // At any other the kernel refuses it.
    let fits = address as usize % PAGE == 0 || flags & SHM_RND != 0;
    let replaces = flags & SHM_REMAP != 0 && !address.is_null() && fits && keeper::active().is_some();
    // Where it cannot be had, what is there stays.
    let tried = if replaces { attach(0, flags & !SHM_REMAP).map(Some) } else { Ok(None) };
    let attached = tried.and_then(|elsewhere| {
        if let Some(elsewhere) = elsewhere {
            // SAFETY: attached just now; what is at the address goes, as the caller wants.
            unsafe {
                let len = segment_len(id);
                sys::call(raw::__NR_shmdt, elsewhere, 0, 0, 0)?;
                let start = address as usize & !(PAGE - 1);
                let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED;
                mmap_anonymous(start as *mut _, len?, ProtFlags::empty(), flags)?;
            }
        }
        attach(address as usize, flags)
    });
    answer(attached) as *mut c_void
}

const SHM_RND: c_int = 0o20000;
const SHM_REMAP: c_int = 0o40000;

/// The bytes of a segment of shared memory, in whole pages.
fn segment_len(id: c_int) -> Result<usize, Errno> {
    const IPC_STAT: usize = 2;
    /// `struct shmid_ds`: after `struct ipc_perm`, of 48 bytes, the size.
    const SIZE: usize = 6;
    let mut about = [0usize; 16];
    // SAFETY: larger than the structure.
    unsafe { sys::call(raw::__NR_shmctl, id as usize, IPC_STAT, about.as_mut_ptr() as usize, 0)? };
    Ok(about[SIZE].next_multiple_of(PAGE))
}

/// See the table of [`super`]. Takes what libc's takes in `...`, there or not.
///
/// # Safety
/// As libc's.
#[inline(never)]
pub(super) unsafe fn mremap(
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

/// See the table of [`super`]. Not `calloc`, which the loader of an old libc calls where it looks up what is behind ours.
///
/// # Safety
/// As libc's.
#[no_mangle]
pub unsafe extern "C" fn malloc(len: usize) -> *mut c_void {
    if part::is_steep() {
        part::hold_up(len);
    }
    type Malloc = unsafe extern "C" fn(usize) -> *mut c_void;
    // SAFETY: libc's function of that name, or the program's, and as the caller promises.
    unsafe { core::mem::transmute::<usize, Malloc>(MALLOC.get())(len) }
}

/// See the table of [`super`].
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
    part::hold_up(len.saturating_sub(usable));
    if remap::is_one(header as usize - (before & !FLAGS), object as usize + usable) {
        return remap::grow(0, direct, |object| !object.is_null());
    }
    // What are several mappings the kernel would not move: libc would copy, too, and nobody is to wait for that.
    // SAFETY: objects of libc's; without one to begin with it allocates, without a length it frees.
    unsafe {
        let new = bare_realloc(core::ptr::null_mut(), len);
        if !new.is_null() {
            new.cast::<u8>().copy_from_nonoverlapping(object.cast(), usable.min(len));
            bare_realloc(object, 0);
        }
        new
    }
}

/// See the table of [`super`].
///
/// # Safety
/// As libc's.
#[inline(never)]
pub(super) unsafe fn process_madvise(
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
    const DONTNEED_LOCKED: c_int = raw::MADV_DONTNEED_LOCKED as c_int;
    const REMOVE: c_int = raw::MADV_REMOVE as c_int;
    const GUARD_INSTALL: c_int = 102;
    if advice == raw::MADV_DONTFORK as c_int {
        DONT_FORK.store(true, Ordering::Relaxed);
    }
    if matches!(advice, FREE | DONTNEED | DONTNEED_LOCKED | REMOVE | GUARD_INSTALL) {
        // A filter may not allow to sleep.
        if let Some(keeper) = keeper::active().filter(|_| !super::is_filtered()) {
            keeper.engine.let_others_pass();
        }
    }
    let given = call(advice);
    // A hole stops neither the first nor the second.
    let all = matches!(advice, FREE | GUARD_INSTALL)
        && match given {
            Ok(done) => done == whole(),
            Err(errno) => errno == Errno::NOMEM,
        };
    if all {
        let _ = call(DONTNEED);
        // What came in between the two has taken the place of a guard.
        if advice == GUARD_INSTALL {
            let _ = call(GUARD_INSTALL);
        }
    }
    given
}

const MCL_CURRENT: c_int = raw::MCL_CURRENT as c_int;
const MCL_FUTURE: c_int = raw::MCL_FUTURE as c_int;
const MCL_ONFAULT: c_int = raw::MCL_ONFAULT as c_int;

/// Has the program asked that what is to come is locked?
static LOCKS_WHAT_COMES: AtomicBool = AtomicBool::new(false);

/// See the table of [`super`].
#[inline(never)]
pub(super) fn mlockall(flags: c_int) -> c_int {
    let known = flags & !(MCL_CURRENT | MCL_FUTURE | MCL_ONFAULT) == 0;
    let by_mapping = flags & MCL_CURRENT != 0 && known && memory::is_home();
    answer(if by_mapping { sys::quietly(|| lock_all(flags)) } else { lock_by(flags) }) as c_int
}

/// In a fork's child, whose memory is not locked.
pub fn forget_locks() {
    LOCKS_WHAT_COMES.store(false, Ordering::Relaxed);
}

/// See the table of [`super`].
#[inline(never)]
pub(super) fn munlockall() -> c_int {
    answer(unlock_all()) as c_int
}

fn lock_by(flags: c_int) -> Result<usize, Errno> {
    // SAFETY: takes a number.
    unsafe { sys::call(raw::__NR_mlockall, flags as usize, 0, 0, 0) }
        .inspect(|_| LOCKS_WHAT_COMES.store(flags & MCL_FUTURE != 0, Ordering::Relaxed))
}

fn unlock_all() -> Result<usize, Errno> {
    // SAFETY: takes nothing.
    unsafe { sys::call(raw::__NR_munlockall, 0, 0, 0, 0) }
        .inspect(|_| LOCKS_WHAT_COMES.store(false, Ordering::Relaxed))
}

/// Locks what there is, mapping by mapping, and leaves the engine's out. Where it may not be, nothing has changed.
fn lock_all(flags: c_int) -> Result<usize, Errno> {
    let mut taken = Vec::new();
    let before = locked_areas();
    let may = each_area(|area| lock(area).inspect(|_| taken.push(area)));
    match may {
        // Without /proc.
        None => return lock_by(flags),
        Some(Ok(())) => {}
        Some(Err(errno)) => {
            let is_new =
                |(start, end): &(usize, usize)| !before.iter().any(|had| had.0 <= *start && *end <= had.1);
            for (start, end) in taken.into_iter().filter(is_new) {
                // SAFETY: changes no content.
                let _ = unsafe { sys::call(raw::__NR_munlock, start, end - start, 0, 0) };
            }
            return Err(errno);
        }
    }
    if flags & MCL_FUTURE != 0 {
        lock_by(flags & !MCL_CURRENT)?;
    } else if LOCKS_WHAT_COMES.load(Ordering::Relaxed) {
        // Without MCL_FUTURE what is to come is not locked any more. That takes an instant in which nothing is, so not without
        // need: what leaves in it lies on a device.
        unlock_all()?;
    }
    // With what has come meanwhile.
    let locked = each_area(|area| {
        lock(area)?;
        if flags & MCL_ONFAULT == 0 {
            // Brings it in, as far as it can be read.
            // SAFETY: changes no content.
            let _ = unsafe { sys::call(raw::__NR_mlock, area.0, area.1 - area.0, 0, 0) };
        }
        Ok(())
    });
    locked.unwrap_or(Ok(())).map(|()| 0)
}

/// Does something with each of the program's mappings, until that is refused; `None`: without /proc nobody knows them.
fn each_area(mut each: impl FnMut((usize, usize)) -> Result<(), Errno>) -> Option<Result<(), Errno>> {
    let mut done = None;
    Maps::new().read(c"/proc/self/maps", |line| {
        let so_far = *done.get_or_insert(Ok(()));
        let Some(Area { start, end, name, .. }) = Area::parse(line) else { return };
        // The kernel's own is none of the program's memory.
        if so_far.is_ok() && !name.starts_with(b"[v") && !memory::is_own(start, end) {
            done = Some(each((start, end)));
        }
    });
    done
}

/// Locks what is there and what comes in of an area, if that has not gone meanwhile.
fn lock((start, end): (usize, usize)) -> Result<(), Errno> {
    let call = |number, last: u32| {
        // SAFETY: changes no content.
        unsafe { sys::call(number, start, end - start, last as usize, 0) }
    };
    match call(raw::__NR_mlock2, raw::MLOCK_ONFAULT) {
        Err(Errno::NOMEM) if call(raw::__NR_msync, raw::MS_ASYNC).is_err() => Ok(()),
        done => done.map(|_| ()),
    }
}

/// What is locked.
fn locked_areas() -> Vec<(usize, usize)> {
    let (mut last, mut found) = (None, Vec::new());
    Maps::new().read(c"/proc/self/smaps", |line| match Area::parse(line) {
        Some(area) => last = Some((area.start, area.end)),
        None if proc::flags(line).is_some_and(|has| has(b"lo")) => found.extend(last),
        None => {}
    });
    found
}

/// See the table of [`super`].
///
/// # Safety
/// As libc's.
#[inline(never)]
pub(super) unsafe fn vmsplice(fd: c_int, parts: *const c_void, count: usize, flags: c_uint) -> isize {
    const F_GETFL: usize = 3;
    const ACCESS: usize = 3;
    const READ_ONLY: usize = 0;
    const F_GETPIPE_SZ: usize = 1032;
    const SPLICE_FLAGS: c_uint = 15;
    const NONBLOCK: c_uint = 2;
    const RWF_NOWAIT: c_int = 8;
    /// PIPE_BUF: one free place in the pipe takes as much without a wait.
    const PLACE: usize = 4096;
    const FOREVER: c_int = -1;
    // SAFETY: as the caller promises.
    unsafe {
        let reads = sys::call(raw::__NR_fcntl, fd as usize, F_GETFL, 0, 0)
            .is_ok_and(|flags| flags & ACCESS == READ_ONLY);
        if reads {
            // Out of the pipe into memory: a copy already.
            return answer(sys::call(raw::__NR_vmsplice, fd as usize, parts as usize, count, flags as usize))
                as isize;
        }
        // What the kernel refuses before it looks at anything is refused.
        if flags & !SPLICE_FLAGS != 0 {
            return fail(Errno::INVAL) as isize;
        }
        if let Err(errno) = sys::call(raw::__NR_fcntl, fd as usize, F_GETPIPE_SZ, 0, 0) {
            return fail(errno) as isize;
        }
        let Ok(count) = c_int::try_from(count) else { return fail(Errno::INVAL) as isize };
        // libc's, since it waits: a thread can be cancelled there, as in its vmsplice.
        type Write = unsafe extern "C" fn(c_int, *const c_void, c_int, i64, c_int) -> isize;
        let write = match PWRITEV2.get() {
            0 => return fail(Errno::NOSYS) as isize,
            write => core::mem::transmute::<usize, Write>(write),
        };
        const HERE: i64 = -1;
        // As much as there is room for, and it waits only while there is none: who splices it on by the same thread would wait for
        // itself.
        let written = write(fd, parts, count, HERE, RWF_NOWAIT);
        if written >= 0 {
            return written;
        }
        let waits = flags & NONBLOCK == 0;
        match Errno::from_raw_os_error(*super::__errno_location()) {
            Errno::AGAIN if waits => {}
            // A pipe with a name.
            Errno::OPNOTSUPP if waits || has_room(fd) => {}
            _ => return written,
        }
        let parts = core::slice::from_raw_parts(parts.cast::<[usize; 2]>(), count as usize);
        let [start, len] = parts.iter().find(|part| part[1] > 0).copied().unwrap_or_default();
        let first = [start, len.min(PLACE)];
        loop {
            let written = write(fd, (&raw const first).cast(), 1, HERE, 0);
            // The kernel's goes by its flags alone, whatever the pipe is.
            if written >= 0 || !waits || Errno::from_raw_os_error(*super::__errno_location()) != Errno::AGAIN
            {
                return written;
            }
            type Poll = unsafe extern "C" fn(*mut raw::pollfd, c_ulong, c_int) -> c_int;
            let mut room = raw::pollfd { fd, events: raw::POLLOUT as i16, revents: 0 };
            // By libc's, too.
            if core::mem::transmute::<usize, Poll>(POLL.get())(&mut room, 1, FOREVER) < 0 {
                return -1;
            }
        }
    }
}

/// See the table of [`super`].
///
/// # Safety
/// As libc's.
#[inline(never)]
pub(super) unsafe fn setsockopt(
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *const c_void,
    len: c_uint,
) -> c_int {
    const SOL_SOCKET: c_int = 1;
    const SO_ZEROCOPY: c_int = 60;
    // What is no number is the kernel's to refuse, and who sets none wants none.
    let is_number = !value.is_null() && len as usize >= size_of::<c_int>();
    // SAFETY: as the caller promises.
    if level == SOL_SOCKET
        && name == SO_ZEROCOPY
        && is_number
        && unsafe { value.cast::<c_int>().read_unaligned() } != 0
    {
        return fail(Errno::OPNOTSUPP);
    }
    let arguments = [fd as usize, level as usize, name as usize, value as usize, len as usize, 0];
    // SAFETY: as the caller promises.
    let set = || unsafe { sys::call6(raw::__NR_setsockopt, arguments) };
    let pins = level == SOL_XDP && name == XDP_UMEM_REG && keeper::active().is_some();
    answer(if pins { pin_area(value as usize, set) } else { set() }) as c_int
}

/// Has a pipe a place that is free?
fn has_room(pipe: c_int) -> bool {
    let mut asked = raw::pollfd { fd: pipe, events: raw::POLLOUT as i16, revents: 0 };
    // SAFETY: one of them, which outlives the call.
    let found = unsafe { sys::call(raw::__NR_poll, (&raw mut asked) as usize, 1, 0, 0) };
    found == Ok(1) && asked.revents & raw::POLLOUT as i16 != 0
}

const SOL_XDP: c_int = 283;
const XDP_UMEM_REG: c_int = 4;

/// Has `call` pin an area, of which start and length lie at `told`. The kernel says NOMEM where its end is out, and FAULT
/// where all of it is: what was brought in may have left again before the call.
fn pin_area(told: usize, call: impl Fn() -> Result<usize, Errno>) -> Result<usize, Errno> {
    const ATTEMPTS: usize = 4;
    let mut done = call();
    for _ in 0..ATTEMPTS {
        let Err(Errno::FAULT | Errno::NOMEM) = done else { break };
        let mut area = [0; 16];
        let area = sys::read_memory(told, &mut area).and_then(|area| area.split_first_chunk::<8>());
        let Some((start, Ok(len))) = area.map(|(start, len)| (start, len.try_into())) else { break };
        bring_in(usize::from_ne_bytes(*start), usize::from_ne_bytes(len));
        done = call();
    }
    done
}

/// Brings a word in; false where there is none that the program may read.
pub fn can_be_read(address: usize) -> bool {
    // SAFETY: changes no content.
    unsafe { populate(address & !(PAGE - 1), PAGE, POPULATE_READ) }.is_ok()
}

/// Brings in what the kernel reads or writes where nobody gets a page: in a clone after `fork::bequeath`, until it is done;
/// and what it pins by a call that has no faults served.
pub fn bring_in(address: usize, len: usize) {
    let start = address & !(PAGE - 1);
    let len = address.wrapping_add(len).wrapping_sub(start);
    // SAFETY: changes no content. What is not memory is the call's to refuse.
    let _ = unsafe { populate(start, len, POPULATE_WRITE) };
}
