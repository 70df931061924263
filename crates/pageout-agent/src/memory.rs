//! The engine's own memory: parts of one reservation made before `main`, so that it never takes an address that the
//! program has just given up and is about to map again; of another where that is used up. What is given back becomes
//! addresses without access there, never a hole: nothing that was once known is ever unmapped, so nothing of the program's can be,
//! which may map wherever it likes. Known, so that it is never adopted; private to the process, so not in a fork's child.
//!
//! The allocator serves powers of two up to 64 KiB, and one to seven eighths more than each, from free lists over mapped chunks,
//! larger sizes from mappings of their own. It is the global allocator of the agent; nothing here ever calls the program's malloc.

use crate::sys;
use core::alloc::{GlobalAlloc, Layout};
use core::ptr::{null_mut, NonNull};
use pageout::space::{BLOCK, PAGE};
use pageout::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use pageout::sync::{Lock, OTHER_LOCKS};
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use rustix::mm::{self, Advice, MapFlags, MprotectFlags, ProtFlags};

/// Most reservations at once: few, but where addresses are limited each mapping may be one.
const MOST: usize = 1024;

/// Start and end of each reservation; 0, 0 where there is none.
static RANGES: [(AtomicUsize, AtomicUsize); MOST] =
    [const { (AtomicUsize::new(0), AtomicUsize::new(0)) }; MOST];
static RANGES_USED: AtomicUsize = AtomicUsize::new(0);

/// Bytes reserved before `main`: staging of 128 MiB and the tables of 28 GiB. Address space only.
const RESERVATION: usize = 384 << 20;
/// Where that began, in this process or in the parent that it was forked from; 0 without one.
static RESERVED: AtomicUsize = AtomicUsize::new(0);
/// What is reserved at once where more is needed; 0: no more than that.
static STEP: AtomicUsize = AtomicUsize::new(0);

/// What of the reservations nobody has.
static FREE: Lock<Free> = Lock::new(Free::NONE, &OTHER_LOCKS);

/// A page that says 1 in the address space it was made for, and 0 in that of a fork's child, however it came about. Outside
/// the reservation, which such a child does not get; it stays where it is from before `main` on.
static HOME: AtomicUsize = AtomicUsize::new(0);

/// Is this the address space that the engine's memory lies in? Not in the child of a fork, until
/// [`reserve`] was called there; yes in a process that shares the memory (vfork).
pub fn is_home() -> bool {
    let page = HOME.load(Ordering::Acquire) as *const u8;
    // SAFETY: once set it stays mapped.
    !page.is_null() && unsafe { page.read_volatile() } == 1
}

/// Makes the calling process's address space the one that [`is_home`] knows.
fn settle_here() -> Result<(), Errno> {
    let mut page = HOME.load(Ordering::Acquire);
    if page == 0 {
        // SAFETY: a new mapping.
        page = unsafe {
            mm::mmap_anonymous(null_mut(), PAGE, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE)?
        } as usize;
        // SAFETY: as above.
        unsafe { mm::madvise(page as *mut _, PAGE, Advice::LinuxWipeOnFork)? };
    }
    // SAFETY: our own page.
    unsafe { (page as *mut u8).write_volatile(1) };
    HOME.store(page, Ordering::Release);
    claim(page, page + PAGE)
}

/// Reserves addresses. A process whose address space is limited has them reserved as they are needed.
///
/// # Errors
/// The kernel's: there is no memory at all.
pub fn reserve() -> Result<(), Errno> {
    settle_here()?;
    let limit = rustix::process::getrlimit(rustix::process::Resource::As);
    if limit.current.is_some() {
        STEP.store(0, Ordering::Relaxed);
        return Ok(());
    }
    STEP.store(RESERVATION, Ordering::Relaxed);
    let mut free = FREE.lock();
    // A fork's child: where its parent had it, for a hole may be one that the program has made to map there.
    let again = RESERVED.load(Ordering::Relaxed);
    let start = match again {
        0 => free.reserve(0, RESERVATION),
        _ => free.reserve(again, RESERVATION).or_else(|_| free.reserve(0, RESERVATION)),
    };
    // Without one it is tried again when it is needed.
    RESERVED.store(start.unwrap_or(again), Ordering::Relaxed);
    Ok(())
}

/// Parts at most; beyond, what is given back is not given out again.
const PARTS: usize = 512;

/// Addresses that are reserved and not in use: start and end of each part; 0, 0 where there is none.
struct Free {
    parts: [(usize, usize); PARTS],
}

impl Free {
    const NONE: Free = Free { parts: [(0, 0); PARTS] };

    /// Reserves `len` bytes, at `start` if that is not 0. Returns where.
    fn reserve(&mut self, start: usize, len: usize) -> Result<usize, Errno> {
        let place = if start == 0 { MapFlags::empty() } else { MapFlags::FIXED_NOREPLACE };
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | place;
        // SAFETY: a new mapping without access, where there is none.
        let start = unsafe { mm::mmap_anonymous(start as *mut _, len, ProtFlags::empty(), flags)? } as usize;
        // What was seen before it is known can be told by the lock, see `is_own`.
        if let Err(errno) = claim(start, start + len) {
            // SAFETY: nobody knows of it.
            let _ = unsafe { mm::munmap(start as *mut _, len) };
            return Err(errno);
        }
        keep_for_us(start, len);
        self.give(start, start + len);
        Ok(start)
    }

    /// `len` bytes between pages without access, of the smallest part that has them.
    fn take(&mut self, len: usize, align: usize) -> Option<usize> {
        let place = |(start, end): &(usize, usize)| {
            let at = (*start + PAGE).next_multiple_of(align);
            (at + len + PAGE <= *end).then_some(at)
        };
        let fit = self.parts.iter_mut().filter_map(|part| place(part).map(|at| (part, at)));
        let (part, at) = fit.min_by_key(|(part, _)| part.1 - part.0)?;
        let (start, end) = core::mem::take(part);
        self.give(start, at - PAGE);
        self.give(at + len + PAGE, end);
        Some(at)
    }

    fn give(&mut self, mut start: usize, mut end: usize) {
        if start == end {
            return;
        }
        for part in &mut self.parts {
            if part.1 == start {
                start = core::mem::take(part).0;
            } else if part.0 == end {
                end = core::mem::take(part).1;
            }
        }
        // What there is no place for is given up: the smallest.
        let least = self.parts.iter_mut().min_by_key(|part| part.1 - part.0);
        if let Some(least) = least.filter(|least| least.1 - least.0 < end - start) {
            *least = (start, end);
        }
    }
}

/// Addresses of the engine's for `len` bytes aligned to `align`.
fn take(len: usize, align: usize) -> Result<usize, Errno> {
    let align = align.max(PAGE);
    let mut free = FREE.lock();
    if let Some(start) = free.take(len, align) {
        return Ok(start);
    }
    let whole = (len + align + 2 * PAGE).next_multiple_of(PAGE);
    let step = whole.max(STEP.load(Ordering::Relaxed));
    free.reserve(0, step).or_else(|_| free.reserve(0, whole))?;
    free.take(len, align).ok_or(Errno::NOMEM)
}

/// Maps `len` bytes (a multiple of 4096) of zeros aligned to `align`, guard pages around them. Not in
/// children.
///
/// # Errors
/// The kernel's; ENOMEM also when there are too many mappings.
pub fn map(len: usize, align: usize) -> Result<usize, Errno> {
    open(len, align, MprotectFlags::READ | MprotectFlags::WRITE)
}

/// The same, to be executed as well.
///
/// # Errors
/// As [`map`]; the kernel's also where nothing may be written and executed.
pub fn map_executable(len: usize) -> Result<usize, Errno> {
    open(len, PAGE, MprotectFlags::READ | MprotectFlags::WRITE | MprotectFlags::EXEC)
}

fn open(len: usize, align: usize, access: MprotectFlags) -> Result<usize, Errno> {
    let start = take(len, align)?;
    // Before there is access: the program may have locked the reservation (mlockall), and all of it would be filled.
    keep_for_us(start, len);
    // SAFETY: nobody else's addresses.
    let opened = unsafe { mm::mprotect(start as *mut _, len, access) };
    opened.map(|()| start).inspect_err(|_| unmap(start, len))
}

/// Maps `len` bytes of a file from `offset` on, where only the engine maps. Not in children.
///
/// # Errors
/// The kernel's.
pub fn map_file(
    file: &OwnedFd,
    offset: u64,
    len: usize,
    protection: ProtFlags,
    flags: MapFlags,
) -> Result<usize, Errno> {
    let len = len.next_multiple_of(PAGE);
    let start = take(len, PAGE)?;
    // SAFETY: nobody else's addresses.
    let mapped = unsafe { mm::mmap(start as *mut _, len, protection, flags | MapFlags::FIXED, file, offset) };
    keep_for_us(start, len);
    mapped.map(|_| start).inspect_err(|_| unmap(start, len))
}

/// Maps the first `len` bytes of a file that run shares, and that is sealed at that length: any bytes may be in it.
///
/// # Errors
/// The kernel's.
pub fn map_shared(file: &OwnedFd, len: usize) -> Result<usize, Errno> {
    map_file(file, 0, len, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED)
}

/// Addresses without access for an engine in the program (the API, which looks for this name): the keeper never takes up
/// what that one manages. The first, or an error as the kernel says it.
#[no_mangle]
pub extern "C" fn pageout_agent_map(len: usize, align: usize) -> isize {
    let taken = sys::quietly(|| take(len, align));
    taken.map_or_else(|errno| -(errno.raw_os_error() as isize), |start| start as isize)
}

/// Takes back what [`pageout_agent_map`] gave.
///
/// # Safety
/// Nobody has addresses in it any more.
#[no_mangle]
pub unsafe extern "C" fn pageout_agent_unmap(start: usize, len: usize) {
    sys::quietly(|| unmap(start, len));
}

/// What was just mapped is neither locked (mlockall(MCL_FUTURE) of the program) nor in children.
fn keep_for_us(start: usize, len: usize) {
    // SAFETY: our own mapping.
    unsafe {
        let _ = mm::munlock(start as *mut _, len);
        let _ = mm::madvise(start as *mut _, len, Advice::LinuxDontFork);
    }
}

/// Gives back what [`map`], [`map_file`] or [`map_shared`] gave.
pub fn unmap(start: usize, len: usize) {
    let len = len.next_multiple_of(PAGE);
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED;
    // SAFETY: our own mapping.
    let closed = unsafe { mm::mmap_anonymous(start as *mut _, len, ProtFlags::empty(), flags) };
    // What cannot be closed stays as it is; nobody gets it again.
    if closed.is_ok() {
        keep_for_us(start, len);
        FREE.lock().give(start - PAGE, start + len + PAGE);
    }
}

/// Takes the pages of a mapping of a file out of this memory; the file keeps them.
pub fn drop_pages(start: usize, len: usize) {
    // SAFETY: our own mapping, and what was written is in its file.
    let _ = unsafe { mm::madvise(start as *mut _, len.next_multiple_of(PAGE), mm::Advice::LinuxDontNeed) };
}

/// Takes `start..end` down as the engine's.
fn claim(start: usize, end: usize) -> Result<(), Errno> {
    let slot = (0..MOST)
        .find(|slot| RANGES[*slot].0.compare_exchange(0, start, Ordering::AcqRel, Ordering::Acquire).is_ok())
        .ok_or(Errno::NOMEM)?;
    RANGES[slot].1.store(end, Ordering::Release);
    RANGES_USED.fetch_max(slot + 1, Ordering::AcqRel);
    Ok(())
}

/// Bytes that are reserved.
pub fn reserved() -> u64 {
    let len = |range: &(AtomicUsize, AtomicUsize)| {
        // An end that is not written down yet counts as none.
        range.1.load(Ordering::Acquire).saturating_sub(range.0.load(Ordering::Acquire)) as u64
    };
    RANGES[..RANGES_USED.load(Ordering::Acquire)].iter().map(len).sum()
}

/// Does `start..end` touch addresses of the engine?
pub fn is_own(start: usize, end: usize) -> bool {
    // What was seen before this call and is ours is known once the lock was free.
    drop(FREE.lock());
    RANGES[..RANGES_USED.load(Ordering::Acquire)].iter().any(|(from, to)| {
        let (from, to) = (from.load(Ordering::Acquire), to.load(Ordering::Acquire));
        start < to && from < end
    })
}

const SMALLEST: usize = 4; // 16 bytes
const LARGEST: usize = 16; // 64 KiB
/// The heap grows by these, seldom: where the program has as many mappings as it may, there is none for the heap. By huge
/// pages, if the system has some; not at first, nor where that would be felt (parts of them are never
/// touched): a small process stays small, and there may be many.
const CHUNK: usize = 16 << 20;
const SMALL_CHUNK: usize = 8 << 20;
const LEAST_LIMIT: u64 = 256 << 20;
/// The limit is at least [`LEAST_LIMIT`].
static LARGE: AtomicBool = AtomicBool::new(false);

/// Tells the heap the limit, in bytes.
pub fn set_limit(limit: u64) {
    LARGE.store(limit >= LEAST_LIMIT, Ordering::Relaxed);
}

/// Sizes that are served: each power of two, and what is one to seven eighths more. What there is most of are units of
/// 416 bytes and tables of slots, a little more than 4 KiB.
const CLASSES: usize = STEPS * LARGEST + 1;
const STEPS: usize = 8;

/// Bytes of a class's pieces, and what they are aligned to.
fn pieces_of(class: usize) -> (usize, usize) {
    let power = 1usize << (class / STEPS);
    let size = power + class % STEPS * power / STEPS;
    (size, 1 << size.trailing_zeros())
}

struct Heap {
    free: [*mut u8; CLASSES],
    chunk: usize,
    left: usize,
}

// SAFETY: plain addresses, guarded by the lock around the heap.
unsafe impl Send for Heap {}

static HEAP: Lock<Heap> = Lock::new(Heap::EMPTY, &OTHER_LOCKS);

impl Heap {
    const EMPTY: Heap = Heap { free: [null_mut(); CLASSES], chunk: 0, left: 0 };

    /// A piece, and whether nobody has had it: then it is zeros.
    fn take(&mut self, class: usize) -> (*mut u8, bool) {
        let found = self.free[class];
        if found.is_null() {
            return (self.take_new(class), true);
        }
        // SAFETY: free pieces hold the link to the next one.
        self.free[class] = unsafe { found.cast::<*mut u8>().read() };
        (found, false)
    }

    fn take_new(&mut self, class: usize) -> *mut u8 {
        let (size, align) = pieces_of(class);
        // Chunks are aligned to the largest.
        let skip = self.chunk.next_multiple_of(align) - self.chunk;
        if self.left < skip + size {
            let Ok((chunk, len)) = self.grow() else { return null_mut() };
            (self.chunk, self.left) = (chunk, len);
        } else {
            self.chunk += skip;
            self.left -= skip;
        }
        let piece = self.chunk;
        self.chunk += size;
        self.left -= size;
        piece as *mut u8
    }

    /// Another chunk: where, and how large.
    fn grow(&self) -> Result<(usize, usize), Errno> {
        let huge = self.chunk != 0 && LARGE.load(Ordering::Relaxed);
        let (len, align, advice) = match huge {
            true => (CHUNK, BLOCK, Advice::LinuxHugepage),
            false => (SMALL_CHUNK, 1 << LARGEST, Advice::LinuxNoHugepage),
        };
        let chunk = map(len, align)?;
        // SAFETY: just mapped, and ours.
        let _ = unsafe { mm::madvise(chunk as *mut _, len, advice) };
        Ok((chunk, len))
    }

    fn give(&mut self, piece: *mut u8, class: usize) {
        // SAFETY: the piece is at least 16 bytes and nobody's.
        unsafe { piece.cast::<*mut u8>().write(self.free[class]) };
        self.free[class] = piece;
    }
}

/// Forgets everything, as the child of a fork must: the mappings are not there.
pub fn reset() {
    for range in &RANGES {
        range.0.store(0, Ordering::Relaxed);
        range.1.store(0, Ordering::Relaxed);
    }
    RANGES_USED.store(0, Ordering::Relaxed);
    // SAFETY: the child has one thread; whoever held a lock is not in it.
    unsafe {
        (&raw const FREE).cast_mut().write(Lock::new(Free::NONE, &OTHER_LOCKS));
        let heap: *const Lock<Heap> = &raw const HEAP;
        heap.cast_mut().write(Lock::new(Heap::EMPTY, &OTHER_LOCKS));
    }
}

struct Own;

#[global_allocator]
static OWN: Own = Own;

/// The smallest class that fits. Free pieces hold a link, so all are aligned for one.
fn class_of(layout: &Layout) -> usize {
    let align = layout.align().max(1 << SMALLEST);
    let size = layout.size().max(align);
    let power = STEPS * size.next_power_of_two().trailing_zeros() as usize;
    let fits = |class: &usize| {
        let (most, aligned) = pieces_of(*class);
        size <= most && align <= aligned
    };
    (power - STEPS + 1..power).find(fits).unwrap_or(power)
}

// SAFETY: pieces are as large and aligned as asked, and handed out once.
unsafe impl GlobalAlloc for Own {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let class = class_of(&layout);
        if class < CLASSES {
            return HEAP.lock().take(class).0;
        }
        let len = layout.size().next_multiple_of(PAGE);
        map(len, layout.align()).map_or(null_mut(), |start| start as *mut u8)
    }

    /// What is new is not touched: large tables are used in part.
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        let class = class_of(&layout);
        if class >= CLASSES {
            // SAFETY: the caller's layout. A new mapping is zeros.
            return unsafe { self.alloc(layout) };
        }
        let (piece, is_new) = HEAP.lock().take(class);
        if !is_new {
            // SAFETY: at least as large as the layout says.
            unsafe { piece.write_bytes(0, layout.size()) };
        }
        piece
    }

    unsafe fn dealloc(&self, piece: *mut u8, layout: Layout) {
        debug_assert!(NonNull::new(piece).is_some());
        let class = class_of(&layout);
        if class < CLASSES {
            HEAP.lock().give(piece, class);
        } else {
            unmap(piece as usize, layout.size());
        }
    }
}
