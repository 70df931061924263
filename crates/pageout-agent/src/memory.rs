//! The engine's own memory: parts of one reservation made before `main`, so that it never takes an address that the
//! program has just given up and is about to map again; later mappings between guard pages where that is used up.
//! Known, so that it is never adopted; private to the process, so not in a fork's child.
//!
//! The allocator serves powers of two up to 64 KiB, and a quarter more than each, from free lists over mapped chunks,
//! larger sizes from mappings of their own. It is the global allocator of the agent; nothing here ever calls the program's malloc.

use core::alloc::{GlobalAlloc, Layout};
use core::ptr::{null_mut, NonNull};
use pageout::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use pageout::sync::{Lock, LockClass};
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use rustix::mm::{self, Advice, MapFlags, MprotectFlags, ProtFlags};

const PAGE: usize = 4096;
/// Most mappings at once.
const MOST: usize = 4096;

/// Start and end of each mapping; 0, 0 where there is none.
static RANGES: [(AtomicUsize, AtomicUsize); MOST] =
    [const { (AtomicUsize::new(0), AtomicUsize::new(0)) }; MOST];
static RANGES_USED: AtomicUsize = AtomicUsize::new(0);

/// Bytes reserved before `main`: staging of 128 MiB and the tables of 28 GiB. Address space only.
const RESERVATION: usize = 384 << 20;

/// What is left of the reservation: start and end.
static LEFT: Lock<(usize, usize)> = Lock::new((0, 0), &HEAP_LOCKS);
/// Where it begins; 0 without one.
static RESERVED: AtomicUsize = AtomicUsize::new(0);
/// Held while there is a mapping of ours that is not among the ranges yet.
static MAPPING: Lock<()> = Lock::new((), &HEAP_LOCKS);

/// A page that says 1 in the address space it was made for, and 0 in that of a fork's child, however it came about.
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

/// Reserves addresses. A process whose address space is limited does without.
///
/// # Errors
/// The kernel's: there is no memory at all.
pub fn reserve() -> Result<(), Errno> {
    settle_here()?;
    let limit = rustix::process::getrlimit(rustix::process::Resource::As);
    if limit.current.is_some() {
        return Ok(());
    }
    // SAFETY: a new mapping without access.
    let base = unsafe {
        mm::mmap_anonymous(
            null_mut(),
            RESERVATION,
            ProtFlags::empty(),
            MapFlags::PRIVATE | MapFlags::NORESERVE,
        )
    };
    if let Ok(base) = base {
        // SAFETY: as above.
        let _ = unsafe { mm::madvise(base, RESERVATION, Advice::LinuxDontFork) };
        *LEFT.lock() = (base as usize, base as usize + RESERVATION);
        RESERVED.store(base as usize, Ordering::Release);
    }
    Ok(())
}

/// `len` bytes of the reservation between pages without access.
fn carve(len: usize, align: usize) -> Option<usize> {
    let mut left = LEFT.lock();
    let start = (left.0 + PAGE).next_multiple_of(align.max(PAGE));
    let end = start + len;
    if left.0 == 0 || end + PAGE > left.1 {
        return None;
    }
    left.0 = end;
    Some(start)
}

/// Maps `len` bytes (a multiple of 4096) of zeros aligned to `align`, guard pages around them. Not in
/// children.
///
/// # Errors
/// The kernel's; ENOMEM also when there are too many mappings.
pub fn map(len: usize, align: usize) -> Result<usize, Errno> {
    if let Some(start) = carve(len, align) {
        return open(start, len);
    }
    let _mapping = MAPPING.lock();
    let slack = if align > PAGE { align } else { 0 };
    let whole = len + slack + 2 * PAGE;
    // SAFETY: a new mapping.
    unsafe {
        let base = mm::mmap_anonymous(
            null_mut(),
            whole,
            ProtFlags::empty(),
            MapFlags::PRIVATE | MapFlags::NORESERVE,
        )? as usize;
        let start = (base + PAGE).next_multiple_of(align.max(PAGE));
        let end = start + len;
        // Trim to one guard page each side.
        if start - PAGE > base {
            let _ = mm::munmap(base as *mut _, start - PAGE - base);
        }
        if end + PAGE < base + whole {
            let _ = mm::munmap((end + PAGE) as *mut _, base + whole - end - PAGE);
        }
        open(start, len)
    }
}

/// Makes reserved addresses memory of the engine.
fn open(start: usize, len: usize) -> Result<usize, Errno> {
    let end = start + len;
    // Known before it can be seen: the watcher adopts what it sees and does not know, and an engine whose own
    // memory is managed waits for itself.
    let opened = claim(start, end).and_then(|()| {
        // SAFETY: nobody else's addresses.
        unsafe { mm::mprotect(start as *mut _, len, MprotectFlags::READ | MprotectFlags::WRITE) }
    });
    if let Err(errno) = opened {
        unmap(start, len);
        return Err(errno);
    }
    // SAFETY: as above.
    unsafe {
        // Under mlockall(MCL_FUTURE) of the program it would be locked and never move.
        let _ = mm::munlock(start as *mut _, len);
        let _ = mm::madvise(start as *mut _, len, Advice::LinuxDontFork);
    }
    Ok(start)
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

/// Unmaps what [`map`] gave. It is known until it cannot be seen any more.
fn unmap(start: usize, len: usize) {
    // Looked for before: as soon as it is unmapped another thread may be given the same addresses.
    let ranges = &RANGES[..RANGES_USED.load(Ordering::Acquire)];
    let known = ranges.iter().find(|range| range.0.load(Ordering::Acquire) == start);
    // SAFETY: mapped by `map` with these guards.
    unsafe {
        let _ = mm::munmap((start - PAGE) as *mut _, len + 2 * PAGE);
    }
    if let Some(range) = known {
        range.1.store(0, Ordering::Release);
        range.0.store(0, Ordering::Release);
    }
}

/// Maps the first `len` bytes of a file that run shares, and that is sealed at that length: any bytes may be in it.
///
/// # Errors
/// The kernel's.
pub fn map_shared(file: &OwnedFd, len: usize) -> Result<usize, Errno> {
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping.
    unsafe { mm::mmap(null_mut(), len, protection, MapFlags::SHARED, file, 0) }.map(|start| start as usize)
}

/// Does `start..end`, which has no access, touch addresses that the engine keeps for itself?
pub fn is_reserved(start: usize, end: usize) -> bool {
    let reserved = RESERVED.load(Ordering::Acquire);
    reserved != 0 && start < reserved + RESERVATION && reserved < end
}

/// Does `start..end` touch memory of the engine?
pub fn is_own(start: usize, end: usize) -> bool {
    // What was seen before this call and is ours is known once the lock was free.
    drop(MAPPING.lock());
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
/// What a huge page is aligned to.
const HUGE: usize = 2 << 20;
const LEAST_LIMIT: u64 = 256 << 20;
/// The limit is at least [`LEAST_LIMIT`].
static LARGE: AtomicBool = AtomicBool::new(false);

/// Tells the heap the limit, in bytes.
pub fn set_limit(limit: u64) {
    LARGE.store(limit >= LEAST_LIMIT, Ordering::Relaxed);
}

/// Sizes that are served: for each power of two itself, and a quarter more than it (tables of slots are that).
const CLASSES: usize = 2 * (LARGEST + 1);

/// Bytes of a class's pieces, and what they are aligned to.
fn pieces_of(class: usize) -> (usize, usize) {
    let power = 1 << (class / 2);
    if class % 2 == 0 {
        (power, power)
    } else {
        (power + power / 4, power / 4)
    }
}

struct Heap {
    free: [*mut u8; CLASSES],
    chunk: usize,
    left: usize,
}

// SAFETY: plain addresses, guarded by the lock around the heap.
unsafe impl Send for Heap {}

static HEAP_LOCKS: LockClass = LockClass::new();
static HEAP: Lock<Heap> = Lock::new(Heap::EMPTY, &HEAP_LOCKS);

impl Heap {
    const EMPTY: Heap = Heap { free: [null_mut(); CLASSES], chunk: 0, left: 0 };

    fn take(&mut self, class: usize) -> *mut u8 {
        let found = self.free[class];
        if !found.is_null() {
            // SAFETY: free pieces hold the link to the next one.
            self.free[class] = unsafe { found.cast::<*mut u8>().read() };
            return found;
        }
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
            true => (CHUNK, HUGE, Advice::LinuxHugepage),
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
    RESERVED.store(0, Ordering::Relaxed);
    // SAFETY: as below.
    unsafe {
        (&raw const LEFT).cast_mut().write(Lock::new((0, 0), &HEAP_LOCKS));
        (&raw const MAPPING).cast_mut().write(Lock::new((), &HEAP_LOCKS));
    }
    // SAFETY: the child has one thread; whoever held the lock is not in it.
    unsafe {
        let heap: *const Lock<Heap> = &raw const HEAP;
        heap.cast_mut().write(Lock::new(Heap::EMPTY, &HEAP_LOCKS));
    }
}

struct Own;

#[global_allocator]
static OWN: Own = Own;

/// The smallest class that fits. Free pieces hold a link, so all are aligned for one.
fn class_of(layout: &Layout) -> usize {
    let size = layout.size().max(layout.align()).max(1 << SMALLEST);
    let class = 2 * size.next_power_of_two().trailing_zeros() as usize;
    let smaller = class - 1;
    let (most, align) = pieces_of(smaller);
    if size <= most && layout.align() <= align && align >= 1 << SMALLEST {
        smaller
    } else {
        class
    }
}

// SAFETY: pieces are as large and aligned as asked, and handed out once.
unsafe impl GlobalAlloc for Own {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let class = class_of(&layout);
        if class < CLASSES - 1 {
            return HEAP.lock().take(class);
        }
        let len = layout.size().next_multiple_of(PAGE);
        map(len, layout.align()).map_or(null_mut(), |start| start as *mut u8)
    }

    unsafe fn dealloc(&self, piece: *mut u8, layout: Layout) {
        debug_assert!(NonNull::new(piece).is_some());
        let class = class_of(&layout);
        if class < CLASSES - 1 {
            HEAP.lock().give(piece, class);
        } else {
            unmap(piece as usize, layout.size().next_multiple_of(PAGE));
        }
    }
}
