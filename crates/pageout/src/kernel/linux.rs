//! Linux through userfaultfd, PAGEMAP_SCAN and /proc/self.

use super::{Event, Fault, Found, Growth, Kernel};
use crate::call::call;
use crate::space::{BLOCK, PAGE};
use crate::sync::{timeout, Backoff, Lock, OTHER_LOCKS};
use core::fmt;
use core::sync::atomic::{
    AtomicU32, AtomicUsize,
    Ordering::{Relaxed, SeqCst},
};
use linux_raw_sys::general as raw;
use pageout_uffd::{
    self as uffd, CopyMode, EventBuffer, Features, MoveMode, OpenError, Partial, RegisterMode, Uffd,
};
use rustix::event::{fd_set_insert, poll, select, FdSetElement, PollFd, PollFlags};
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use rustix::fs::{access, open, Access, Mode, OFlags};
use rustix::io::{pread, Errno};
use rustix::mm::{madvise, mprotect, msync, munlock, Advice, MprotectFlags, MsyncFlags};
use rustix::process::Pid;
use rustix::system::uname;
use rustix::thread::{nanosleep, sched_getaffinity, sched_setaffinity, sched_yield, CpuSet};
use rustix::time::Timespec;

/// The running kernel, for the address space of the caller.
pub struct Linux {
    uffd: Uffd,
    pagemap: OwnedFd,
    statm: OwnedFd,
    /// Device and inode of the userfaultfd: each has its own.
    identity: Option<(u64, u64)>,
    /// Where the thread that opened all this may run, where it might, and every CPU that there could be.
    home: CpuSet,
    whole: CpuSet,
    every: CpuSet,
    /// A page that is always mapped in registered memory: copying onto it answers EEXIST, or EAGAIN while
    /// an event is unread.
    probe: usize,
    growths: fn() -> Option<u32>,
    growing: fn() -> Option<Growth>,
    are_ours: fn() -> bool,
    lose_events: fn() -> bool,
    /// See [`Kernel::told_growths`].
    told: AtomicU32,
    /// See [`Kernel::refuses_pinned`].
    refuses_pinned: bool,
    /// Before Linux 6.16 a huge page of zeros is not told from others.
    hides_zeros: bool,
    /// See [`Kernel::frees_tables`].
    frees_tables: bool,
    /// Before Linux 6.14 two calls that MOVE pages of one large folio may try for ever, each because of the other. Blocks need not
    /// keep them apart: `mremap` may have brought it to where it lies in two.
    tangles: bool,
    taking: Lock<()>,
    /// A block of the engine's to put page tables in that the kernel does not free; 0: none.
    attic: AtomicUsize,
}

const NONE_TOLD: u32 = u32::MAX;

/// The administrator's word about huge pages of 2 MiB, in /sys/kernel/mm/transparent_hugepage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HugePages {
    /// Nobody gets any.
    Never,
    /// `madvise`: where they were asked for.
    Asked,
    /// Everywhere but where they were forbidden.
    Always,
}

impl HugePages {
    /// What holds now; without the files there are none.
    pub fn now() -> Self {
        // Since Linux 6.8 each size has a word of its own, which may be to do as is said of all.
        let size = c"/sys/kernel/mm/transparent_hugepage/hugepages-2048kB/enabled";
        let all = c"/sys/kernel/mm/transparent_hugepage/enabled";
        [size, all].into_iter().find_map(Self::said_in).unwrap_or(Self::Never)
    }

    /// The word in brackets: `always [madvise] never`.
    fn said_in(file: &core::ffi::CStr) -> Option<Self> {
        let mut text = [0u8; 64];
        let file = open(file, OFlags::RDONLY, Mode::empty()).ok()?;
        let n = pread(&file, &mut text, 0).ok()?;
        match text[..n].split(|byte| *byte == b'[').nth(1)?.first()? {
            b'a' => Some(Self::Always),
            b'm' => Some(Self::Asked),
            b'n' => Some(Self::Never),
            _ => None,
        }
    }
}

/// Why the kernel cannot carry the engine.
#[derive(Debug)]
pub enum LinuxError {
    /// No userfaultfd, or one that lacks a feature.
    Userfaultfd(OpenError),
    /// A file of /proc/self.
    Proc(&'static str, Errno),
    /// No descriptor in the program's own file table.
    Descriptor(Errno),
}

impl fmt::Display for LinuxError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LinuxError::Userfaultfd(error) => error.fmt(f),
            LinuxError::Proc(file, errno) => {
                let (why, remedy) = match *errno {
                    Errno::MFILE | Errno::NFILE => ("too many open files", "raise ulimit -n"),
                    // Who changes its user is not dumpable, and such files are root's.
                    Errno::ACCESS | Errno::PERM => (
                        "permission denied",
                        "call prctl(PR_SET_DUMPABLE, 1), if the program has changed its user",
                    ),
                    Errno::NOENT => ("not there", "is /proc mounted?"),
                    _ => return write!(f, "/proc/self/{file}: {errno}; is /proc mounted?"),
                };
                write!(f, "/proc/self/{file}: {why}; {remedy}")
            }
            LinuxError::Descriptor(errno) => {
                write!(f, "no descriptor for inline delivery: {errno}; raise ulimit -n")
            }
        }
    }
}

impl core::error::Error for LinuxError {}

/// What the engine needs of userfaultfd. MOVE came with Linux 6.8; without it pinned pages cannot be told.
pub const NEEDED: Features = Features::EVENT_REMAP
    .union(Features::EVENT_REMOVE)
    .union(Features::EVENT_UNMAP)
    .union(Features::THREAD_ID)
    .union(Features::POISON)
    .union(Features::MOVE);

/// A line of a process's statm in /proc, in pages.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Statm {
    /// Addresses that are mapped.
    pub size: usize,
    /// In memory.
    pub resident: usize,
    /// Of these, files and memory shared on purpose.
    pub shared: usize,
    /// Mapped private and writable.
    pub data: usize,
}

impl Statm {
    /// What the file says now; all zeros of a process that has no memory any more.
    pub fn read(file: impl AsFd) -> Self {
        let mut line = [0u8; 128];
        let n = pread(file, &mut line, 0).unwrap_or(0);
        let field = |number| pages_of(&line[..n], number);
        Self { size: field(0), resident: field(1), shared: field(2), data: field(5) }
    }
}

/// Runs that one PAGEMAP_SCAN returns at most.
const SCAN_RUNS: usize = 64;

/// PROCMAP_QUERY: `_IOWR('f', 17, struct procmap_query)`.
const PROCMAP_QUERY: usize = 0xc068_6611;
/// PAGEMAP_SCAN: `_IOWR('f', 16, struct pm_scan_arg)`.
const PAGEMAP_SCAN: usize = 0xc060_6610;
const _: () = assert!(size_of::<raw::procmap_query>() == 0x68 && size_of::<raw::pm_scan_arg>() == 0x60);

/// Which pages [`pagemap_scan`] finds: sets of PAGE_IS_*.
#[derive(Debug, Clone, Copy, Default)]
pub struct Sought {
    /// All of these hold.
    pub all: u32,
    /// None of these does.
    pub none: u32,
    /// One of these holds; 0: whatever holds.
    pub any: u32,
    /// Pages that differ in one of these are not of one run, which says them.
    pub told: u32,
}

/// Looks for pages of a process from `start` to `end` by its pagemap (Linux 6.7): how many runs were found, and the address up to
/// which was looked.
///
/// # Errors
/// The kernel's.
pub fn pagemap_scan(
    pagemap: &OwnedFd,
    (start, end): (usize, usize),
    sought: Sought,
    runs: &mut [raw::page_region],
) -> Result<(usize, usize), Errno> {
    let mut arg = raw::pm_scan_arg {
        size: size_of::<raw::pm_scan_arg>() as u64,
        flags: 0,
        start: start as u64,
        end: end as u64,
        walk_end: 0,
        vec: runs.as_mut_ptr() as u64,
        vec_len: runs.len() as u64,
        max_pages: 0,
        category_inverted: sought.none.into(),
        category_mask: (sought.all | sought.none).into(),
        category_anyof_mask: sought.any.into(),
        return_mask: sought.told.into(),
    };
    let (fd, to) = (pagemap.as_raw_fd() as usize, &raw mut arg as usize);
    // SAFETY: the argument is as long as it says, and `runs` have room for what it says.
    let found = unsafe { call(raw::__NR_ioctl, [fd, PAGEMAP_SCAN, to, 0, 0, 0]) }?;
    Ok((found, arg.walk_end as usize))
}

/// Is a release of Linux (`6.18.4-arch1`) as new as that?
fn is_at_least(release: &[u8], version: (u32, u32)) -> bool {
    let mut numbers = release
        .split(|byte| !byte.is_ascii_digit())
        .map(|digits| core::str::from_utf8(digits).ok().and_then(|digits| digits.parse::<u32>().ok()));
    let mut next = || numbers.next().flatten();
    next().zip(next()).is_some_and(|found| found >= version)
}

/// The number in field `field` of a statm line, in pages.
fn pages_of(statm: &[u8], field: usize) -> usize {
    let word = statm.split(|b| *b == b' ').nth(field).unwrap_or(b"");
    word.iter().take_while(|b| b.is_ascii_digit()).fold(0, |n, b| n * 10 + (b - b'0') as usize)
}

/// The mapping around an address, or else the next above it; the end of all addresses where there is none. Before
/// Linux 6.11 the text is read.
fn mapping(at: usize) -> Result<(usize, usize), LinuxError> {
    let maps = open_proc("maps", c"/proc/self/maps")?;
    match query(&maps, at) {
        Ok(found) => Ok((found.vma_start as usize, found.vma_end as usize)),
        Err(Errno::NOENT) => Ok(NO_MAPPING),
        Err(_) => mapping_in_text(&maps, at),
    }
}

/// What the kernel says of that mapping, since Linux 6.11. NOENT: there is none.
fn query(maps: &OwnedFd, at: usize) -> Result<raw::procmap_query, Errno> {
    // SAFETY: integers.
    let mut query: raw::procmap_query = unsafe { core::mem::zeroed() };
    query.size = size_of::<raw::procmap_query>() as u64;
    query.query_flags = raw::procmap_query_flags::PROCMAP_QUERY_COVERING_OR_NEXT_VMA as u64;
    query.query_addr = at as u64;
    let (fd, to) = (maps.as_raw_fd() as usize, &raw mut query as usize);
    // SAFETY: the number belongs to procmap_query, which asks for neither name nor build id.
    unsafe { call(raw::__NR_ioctl, [fd, PROCMAP_QUERY, to, 0, 0, 0]) }.map(|_| query)
}

/// The first part of a range that one mapping has.
fn mapped(start: usize, end: usize) -> Option<(usize, usize)> {
    // Without /proc: who looks at it finds out.
    let (from, to) = mapping(start).unwrap_or((start, start + PAGE));
    let part = (from.max(start), to.min(end));
    (part.0 < part.1).then_some(part)
}

const NO_MAPPING: (usize, usize) = (usize::MAX, usize::MAX);

/// The same from the lines, each of which begins with `start-end`, in hexadecimal digits.
fn mapping_in_text(maps: &OwnedFd, at: usize) -> Result<(usize, usize), LinuxError> {
    let mut text = [0u8; 4096];
    let (mut range, mut field, mut offset) = ([0usize; 2], 0, 0);
    loop {
        let n = pread(maps, &mut text, offset).map_err(|errno| LinuxError::Proc("maps", errno))?;
        for byte in &text[..n] {
            match byte {
                b'\n' => (range, field) = ([0; 2], 0),
                b'-' if field == 0 => field = 1,
                _ if field > 1 => {}
                _ => match (*byte as char).to_digit(16) {
                    Some(digit) => range[field] = range[field] << 4 | digit as usize,
                    None if range[1] > at => return Ok((range[0], range[1])),
                    None => field = 2,
                },
            }
        }
        if n == 0 {
            return Ok(NO_MAPPING);
        }
        offset += n as u64;
    }
}

fn identity(uffd: &Uffd) -> Option<(u64, u64)> {
    rustix::fs::fstat(uffd).ok().map(|file| (file.st_dev, file.st_ino))
}

fn open_proc(name: &'static str, path: &core::ffi::CStr) -> Result<OwnedFd, LinuxError> {
    open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).map_err(|errno| LinuxError::Proc(name, errno))
}

impl Linux {
    /// Opens what the engine needs. [`Linux::set_probe`] comes before anything is looked at by it.
    ///
    /// # Safety
    /// Its methods take addresses as numbers, and move, fill and drop what is there: whoever has it, or an engine on it, may only
    /// be given such as are his to manage.
    ///
    /// # Errors
    /// See [`LinuxError`].
    pub unsafe fn open() -> Result<Self, LinuxError> {
        // SAFETY: by contract.
        unsafe { Self::open_on(None) }
    }

    /// The same by a `/dev/userfaultfd` that somebody has opened, where there is one: it need not be this user's to open.
    ///
    /// # Safety
    /// As for [`Linux::open`].
    ///
    /// # Errors
    /// See [`LinuxError`].
    pub unsafe fn open_on(device: Option<BorrowedFd<'_>>) -> Result<Self, LinuxError> {
        let uffd = match device {
            Some(device) => Uffd::open_on(device, NEEDED, true),
            None => Uffd::open(NEEDED, true),
        };
        let uffd = uffd.map_err(LinuxError::Userfaultfd)?;
        Self::with(uffd, open_proc("pagemap", c"/proc/self/pagemap")?)
    }

    /// The same for threads that answer their own faults: the two descriptors that such a thread uses.
    ///
    /// # Errors
    /// See [`LinuxError`].
    pub fn open_inline() -> Result<[OwnedFd; 2], LinuxError> {
        let uffd = Uffd::open(NEEDED | Features::SIGBUS, true).map_err(LinuxError::Userfaultfd)?;
        Ok([uffd.into(), open_proc("pagemap", c"/proc/self/pagemap")?])
    }

    /// With what [`Linux::open_inline`] gave.
    ///
    /// # Errors
    /// See [`LinuxError`].
    ///
    /// # Safety
    /// They are what it gave, and as for [`Linux::open`].
    pub unsafe fn with_inline([uffd, pagemap]: [OwnedFd; 2]) -> Result<Self, LinuxError> {
        // SAFETY: by contract.
        Self::with(unsafe { Uffd::from_fd(uffd) }, pagemap)
    }

    fn with(uffd: Uffd, pagemap: OwnedFd) -> Result<Self, LinuxError> {
        let home = sched_getaffinity(None).unwrap_or_default();
        let mut every = CpuSet::new();
        (0..CpuSet::MAX_CPU).for_each(|cpu| every.set(cpu));
        let _ = sched_setaffinity(None, &every);
        let whole = sched_getaffinity(None).unwrap_or_default();
        if home != whole {
            let _ = sched_setaffinity(None, &home);
        }
        let name = uname();
        let is_since = |version| is_at_least(name.release().to_bytes(), version);
        Ok(Self {
            identity: identity(&uffd),
            uffd,
            pagemap,
            statm: open_proc("statm", c"/proc/self/statm")?,
            home,
            whole,
            every,
            probe: 0,
            growths: || None,
            growing: || None,
            are_ours: || true,
            lose_events: || false,
            told: AtomicU32::new(NONE_TOLD),
            refuses_pinned: is_since((6, 18)),
            hides_zeros: !is_since((6, 16)),
            frees_tables: is_since((6, 14)),
            tangles: !is_since((6, 14)),
            taking: Lock::new((), &OTHER_LOCKS),
            attic: AtomicUsize::new(0),
        })
    }

    /// With who knows how often memory has grown, and says `None` while it does: before a call that may have it grow, until
    /// after; and the call that is under way.
    pub fn with_growths(mut self, growths: fn() -> Option<u32>, growing: fn() -> Option<Growth>) -> Self {
        (self.growths, self.growing) = (growths, growing);
        self
    }

    /// With who knows whether there may be other processes that share the memory: of what one does as it is killed the kernel takes
    /// the event back.
    pub fn with_guests(mut self, are_there: fn() -> bool) -> Self {
        self.lose_events = are_there;
        self
    }

    /// With who knows whether the numbers of threads that fault are those by which they are known here: a process that shares the
    /// memory may be in another PID namespace, and its number somebody else's.
    pub fn with_numbers(mut self, are_ours: fn() -> bool) -> Self {
        self.are_ours = are_ours;
        self
    }

    /// Makes a call to which the kernel says neither that it is done nor that a page is there (EEXIST) while an event is
    /// unread. Events lock held.
    fn while_told(&self, call: impl FnOnce() -> Result<(), Partial>) -> Result<(), Partial> {
        let growths = (self.growths)();
        let done = call();
        let told = matches!(done, Ok(()) | Err(Partial { errno: Errno::EXIST, .. }));
        if let Some(growths) = growths.filter(|growths| told && *growths != self.told.load(Relaxed)) {
            self.told.store(growths, Relaxed);
        }
        done
    }

    /// Has the calling thread, and those that it makes, run on any CPU that the process may have, whichever it chose: as the
    /// kernel's own reclaim does.
    pub fn everywhere(mut self) -> Self {
        self.home = self.whole;
        let _ = sched_setaffinity(None, &self.whole);
        self
    }

    /// Names the page that probes for unread events: registered, mapped and touched, for good.
    pub fn set_probe(&mut self, page: usize) {
        self.probe = page;
    }

    /// Names 2 MiB, aligned, of the engine's own memory that nobody uses: what the kernel leaves behind of huge frames goes there.
    pub fn set_attic(&mut self, block: usize) {
        *self.attic.get_mut() = block;
    }

    /// Is a huge page mapped here and nowhere else? Not the kernel's of zeros, nor what is shared since a fork.
    fn is_exclusive(&self, at: usize) -> bool {
        const EXCLUSIVE: u64 = 1 << 56;
        let mut entry = [0; 8];
        let read = pread(&self.pagemap, &mut entry, (at / PAGE * size_of::<u64>()) as u64);
        read.is_ok() && u64::from_le_bytes(entry) & EXCLUSIVE != 0
    }

    /// What was found to be huge is so up to where that may be otherwise.
    fn cut_zeros(&self, found: &mut Found) {
        found.huge = self.is_exclusive(found.start);
        let mut blocks = (found.start.next_multiple_of(BLOCK)..found.end).step_by(BLOCK);
        found.end = blocks.find(|at| self.is_exclusive(*at) != found.huge).unwrap_or(found.end);
    }

    /// Takes the empty page table from a huge frame that is all holes, and not registered: where small pages have been, MOVE splits
    /// what comes, and no huge page is given. What is mapped stays as it is. It goes by `mremap`, which takes the table along,
    /// and frees the one of last time.
    fn clear_table(&self, at: usize) {
        if self.frees_tables {
            return;
        }
        // Who comes meanwhile leaves the table where it is.
        let attic = self.attic.swap(0, Relaxed);
        if attic == 0 {
            return;
        }
        let how = raw::MREMAP_MAYMOVE | raw::MREMAP_FIXED | raw::MREMAP_DONTUNMAP;
        // SAFETY: both are the engine's, nothing is in the one, and nobody uses the other.
        let moved = unsafe { call(raw::__NR_mremap, [at, BLOCK, BLOCK, how as usize, attic, 0]) };
        // Where it is refused (limits on addresses and on what is committed) the kernel may have unmapped the other before it
        // looked, and what is there by now may be the program's.
        let flags = raw::MAP_PRIVATE | raw::MAP_ANONYMOUS | raw::MAP_NORESERVE | raw::MAP_FIXED_NOREPLACE;
        // SAFETY: a new mapping, where there is none; no child's, as the engine's memory.
        let again = || unsafe {
            let place = call(raw::__NR_mmap, [attic, BLOCK, 0, flags as usize, usize::MAX, 0]);
            place.is_ok_and(|at| at == attic)
                && madvise(attic as *mut _, BLOCK, Advice::LinuxDontFork).is_ok()
        };
        if moved.is_ok() || again() {
            self.attic.store(attic, Relaxed);
        }
    }

    /// The registration, for who keeps it alive.
    pub fn uffd(&self) -> BorrowedFd<'_> {
        self.uffd.as_fd()
    }

    /// For [`pagemap_scan`].
    pub fn pagemap(&self) -> &OwnedFd {
        &self.pagemap
    }

    /// What the kernel says of the address space.
    pub fn statm(&self) -> Statm {
        Statm::read(&self.statm)
    }
}

/// Calls of threads to servers' CPUs in this memory: those under way, and, times `ENDED`, those that have ended.
static CALLS: AtomicU32 = AtomicU32::new(0);
const ENDED: u32 = 1 << 16;

/// Looks at or changes the CPUs or the class of another thread, once more if one was being called meanwhile
/// ([`Kernel::call_here`]): what a server finds it puts back, so that a change would be lost. `act`: what may be done twice. No lock,
/// no memory; where a call does not end it gives up after a tenth of a second.
pub fn undisturbed<T>(mut act: impl FnMut() -> T) -> T {
    for turn in 0..1000 {
        let before = CALLS.load(SeqCst);
        if before % ENDED == 0 {
            let done = act();
            if CALLS.load(SeqCst) == before {
                return done;
            }
        }
        if turn < 16 {
            sched_yield();
        } else {
            // The server is not running; a caller of a real-time class could keep it from that.
            let _ = nanosleep(&Timespec { tv_sec: 0, tv_nsec: 100_000 });
        }
    }
    act()
}

/// In the child of a fork: whom its parent's servers called then is not here.
pub fn nobody_is_called() {
    CALLS.store(0, SeqCst);
}

/// Is a thread of the class that threads have who asked for none?
fn is_ordinary(thread: u32) -> bool {
    // SAFETY: asks only.
    let class = unsafe { call(raw::__NR_sched_getscheduler, [thread as usize, 0, 0, 0, 0, 0]) };
    class == Ok(raw::SCHED_NORMAL as usize)
}

/// Gives a thread a scheduling class that has no priorities; its nice value stays.
fn set_class(thread: u32, class: u32) -> bool {
    let priority = 0i32;
    let arguments = [thread as usize, class as usize, &raw const priority as usize, 0, 0, 0];
    // SAFETY: reads the priority.
    unsafe { call(raw::__NR_sched_setscheduler, arguments) }.is_ok()
}

impl Linux {
    /// Lets a thread run where it was free to. Who could run everywhere can also where its cpuset gets larger.
    fn let_go(&self, thread: Option<Pid>, free: &CpuSet) {
        let free = if *free == self.whole { &self.every } else { free };
        // While its cpuset is being changed that fails; if the two have nothing in common it has all of the cpuset.
        let is_done = (0..8).any(|_| sched_setaffinity(thread, free) != Err(Errno::INVAL));
        if !is_done {
            let _ = sched_setaffinity(thread, &self.every);
        }
    }

    /// See [`Kernel::call_here`].
    fn call_blocked(&self, thread: u32, at: usize) -> bool {
        let pid = Pid::from_raw(thread as i32);
        let (Ok(free), Some((here, only))) = (sched_getaffinity(pid), self.here()) else { return true };
        if free.count() < 2 || !free.is_set(here) {
            return free.is_set(here);
        }
        match sched_setaffinity(pid, &only) {
            Ok(()) => {
                // A thread of the ordinary class would run at once, having had less of this CPU than we, find its page
                // missing still, and be woken by the answer: elsewhere. One of the batch class waits for its turn.
                let ordinary = is_ordinary(thread) && set_class(thread, raw::SCHED_BATCH);
                // Should it run before we do again all the same, it finds its page missing: of the program only a
                // signal's handler runs while it is held here, and no thread that it makes elsewhere inherits that.
                self.wake(at, PAGE);
                if ordinary {
                    set_class(thread, raw::SCHED_NORMAL);
                }
            }
            // Its cpuset is being changed, and it may have been given this set all the same.
            Err(Errno::INVAL) => {}
            Err(_) => return true,
        }
        self.let_go(pid, &free);
        true
    }

    /// The caller's CPU, and a set of it alone; none where it has a number that no set holds.
    fn here(&self) -> Option<(usize, CpuSet)> {
        let here = self.cpu();
        let mut only = CpuSet::new();
        (here < CpuSet::MAX_CPU).then(|| only.set(here))?;
        Some((here, only))
    }

    /// Linux 6.18 can move pages and then answer EEXIST, or fewer than it moved: when it has to try again inside (a
    /// page was touched at that moment) it forgets that the second try went well, tries a third time, and meets the
    /// pages that it put there itself. So a page is moved if it is at the destination and gone from the source,
    /// whatever the answer was: nobody but the caller can have done that, who owns the frames on one side.
    #[cold]
    fn moved_after_all(
        &self,
        to: usize,
        from: usize,
        len: usize,
        wake: bool,
        answer: Partial,
    ) -> Result<(), Partial> {
        if answer.done == 0 && answer.errno != Errno::EXIST {
            return Err(answer);
        }
        let (to_rest, from_rest, rest) = (to + answer.done, from + answer.done, len - answer.done);
        let mut found = [Found::NONE; 1];
        let there = match self.scan(to_rest, to_rest + rest, &mut found).0 {
            1 if found[0].start == to_rest => found[0].end - to_rest,
            _ => 0,
        };
        let more = match self.scan(from_rest, from_rest + there, &mut found).0 {
            1 => found[0].start - from_rest,
            _ => there,
        };
        if more == 0 {
            return Err(answer);
        }
        if wake {
            self.wake(to_rest, more);
        }
        match answer.done + more {
            all if all == len => Ok(()),
            done => Err(Partial { done, errno: Errno::AGAIN }),
        }
    }

    /// Waits where no descriptor may be polled that the process could not open (RLIMIT_NOFILE is 0 by now); select(2) asks
    /// for no such right. A function of its own, for its frame is large.
    #[cold]
    #[inline(never)]
    fn is_selected(&self, timeout: Option<&Timespec>) -> bool {
        let (fd, mut set) = (self.uffd.as_fd().as_raw_fd(), [FdSetElement::default(); 1024]);
        fd_set_insert(&mut set, fd);
        // SAFETY: our own descriptor.
        matches!(unsafe { select(fd + 1, Some(&mut set), None, None, timeout) }, Ok(1))
    }

    /// To unregister a part of a mapping may take a mapping more than there may be; this takes none, unless what lies beside it is
    /// unregistered just now, too, and has become one with it. If that cannot be registered by itself either, both are at once.
    fn register_again(&self, at: usize, len: usize) {
        const TRIES: usize = 10_000;
        let mut backoff = Backoff::new();
        for tries in 0..TRIES {
            let both = if tries < TRIES / 2 { None } else { mapping(at).ok() };
            let both = both.filter(|(start, end)| *start <= at && at + len <= *end);
            let (start, end) = both.unwrap_or((at, at + len));
            match self.register(start, end - start) {
                Err(Errno::NOMEM) => backoff.snooze(),
                done => return done.expect("what was registered until now can be registered"),
            }
        }
        panic!("no mapping is left to register what was registered until now");
    }

    /// Is all of a range in one mapping for which faults are delivered? Nothing is registered for write protection, so
    /// the kernel refuses to copy with it: after it has found the mapping, before it looks at a page. The source is
    /// never read. While an event is pending it looks at nothing.
    fn is_registered(&self, start: usize, end: usize) -> bool {
        let mode = CopyMode::DONTWAKE | CopyMode::WP;
        // SAFETY: never done.
        let refused = unsafe { self.uffd.copy(start, start, end - start, mode) };
        matches!(refused.map_err(|partial| partial.errno), Err(Errno::INVAL | Errno::AGAIN))
    }
}

// SAFETY: by the calls of the kernel for it, on addresses that the caller of `Linux::open` answers for.
unsafe impl Kernel for Linux {
    fn register(&self, start: usize, len: usize) -> Result<(), Errno> {
        // SAFETY: registering changes no content; whoever faults there is answered by the engine.
        unsafe { self.uffd.register(start, len, RegisterMode::MISSING) }
    }

    fn mark(&self, start: usize, len: usize, on: bool) -> Result<(), Errno> {
        let advice = if on { Advice::Random } else { Advice::Normal };
        // SAFETY: about reading ahead, of which there is none in anonymous memory, and, should the kernel itself need
        // memory just then, about what it takes first.
        unsafe { madvise(start as *mut _, len, advice) }
    }

    fn move_pages(&self, to: usize, from: usize, len: usize, wake: bool) -> Result<(), Partial> {
        let mode = if wake { MoveMode::empty() } else { MoveMode::DONTWAKE };
        // SAFETY: one side is a frame, the other a managed page whose word the caller holds.
        let moved = self.while_told(|| unsafe { self.uffd.move_pages(to, from, len, mode) });
        moved.or_else(|partial| self.moved_after_all(to, from, len, wake, partial))
    }

    fn take_pages(&self, frames: usize, from: usize, len: usize) -> Result<(), Partial> {
        // Of what was mapped there since, nobody would see that it is out.
        if self.loses_events() && !self.is_registered(from, from + len) {
            return Err(Partial { done: 0, errno: Errno::INVAL });
        }
        let one_at_a_time = (self.tangles && len < BLOCK).then(|| self.taking.lock());
        let taken = self.move_pages(frames, from, len, false);
        drop(one_at_a_time);
        taken
    }

    fn copy(&self, to: usize, from: usize, len: usize, wake: bool) -> Result<(), Partial> {
        let mode = if wake { CopyMode::empty() } else { CopyMode::DONTWAKE };
        // SAFETY: fills holes only; the caller holds the word.
        self.while_told(|| unsafe { self.uffd.copy(to, from, len, mode) })
    }

    fn zero(&self, at: usize, len: usize, wake: bool) -> Result<(), Partial> {
        // SAFETY: fills holes only; the caller holds the word.
        unsafe { self.uffd.zeropage(at, len, wake) }
    }

    fn poison(&self, at: usize, len: usize) -> Result<(), Partial> {
        // SAFETY: fills holes only; the caller holds the word.
        unsafe { self.uffd.poison(at, len, true) }
    }

    fn wake(&self, at: usize, len: usize) {
        let _ = self.uffd.wake(at, len);
    }

    fn is_own(&self, thread: u32) -> bool {
        access(alloc::format!("/proc/self/task/{thread}").as_str(), Access::EXISTS).is_ok()
    }

    fn call_here(&self, thread: u32, at: usize) -> bool {
        if !(self.are_ours)() {
            return true;
        }
        // The thread is blocked in its fault, so it changes neither its affinity nor its class meanwhile; who changes
        // another's looks whether a call came between (`undisturbed`).
        CALLS.fetch_add(1, SeqCst);
        let may = self.call_blocked(thread, at);
        CALLS.fetch_add(ENDED - 1, SeqCst);
        may
    }

    fn follow(&self, thread: u32) {
        if !(self.are_ours)() {
            return;
        }
        if let Ok(there) = sched_getaffinity(Pid::from_raw(thread as i32)) {
            let _ = sched_setaffinity(None, &there);
        }
    }

    fn settle_here(&self) {
        if let Some((_, only)) = self.here() {
            let _ = sched_setaffinity(None, &only);
        }
    }

    fn roam(&self) {
        self.let_go(None, &self.home);
    }

    fn is_ours(&self) -> bool {
        self.identity.is_some() && identity(&self.uffd) == self.identity
    }

    fn growing(&self) -> Option<Growth> {
        (self.growing)()
    }

    fn unregister(&self, start: usize, len: usize) {
        let _ = self.uffd.unregister(start, len);
    }

    fn event_pending(&self) -> bool {
        // SAFETY: the probe page is mapped, so nothing is ever copied.
        let probe =
            self.while_told(|| unsafe { self.uffd.copy(self.probe, self.probe, PAGE, CopyMode::DONTWAKE) });
        matches!(probe, Err(Partial { errno: Errno::AGAIN, .. }))
    }

    fn next_registered(&self, start: usize, end: usize) -> Option<(usize, usize)> {
        let mut at = start;
        while at < end {
            // In most cases it is one mapping.
            if self.is_registered(at, end) {
                return Some((at, end));
            }
            let (from, to) = mapped(at, end)?;
            if self.is_registered(from, to) {
                return Some((from, to));
            }
            at = to;
        }
        None
    }

    fn loses_events(&self) -> bool {
        (self.lose_events)()
    }

    fn growths(&self) -> Option<u32> {
        (self.growths)()
    }

    fn told_growths(&self) -> Option<u32> {
        Some(self.told.load(Relaxed)).filter(|growths| *growths != NONE_TOLD)
    }

    fn next_mapped(&self, start: usize, end: usize) -> Option<(usize, usize)> {
        // Does nothing but to look for holes.
        // SAFETY: as it says.
        let whole = start < end && unsafe { msync(start as *mut _, end - start, MsyncFlags::ASYNC) }.is_ok();
        if whole {
            return Some((start, end));
        }
        mapped(start, end)
    }

    fn mapping(&self, at: usize) -> Option<(usize, usize)> {
        mapping(at).ok().filter(|found| *found != NO_MAPPING)
    }

    fn is_anonymous(&self, at: usize) -> bool {
        const SHARED: u64 = raw::procmap_query_flags::PROCMAP_QUERY_VMA_SHARED as u64;
        let Ok(maps) = open_proc("maps", c"/proc/self/maps") else { return true };
        query(&maps, at).map_or(true, |found| found.inode == 0 && found.vma_flags & SHARED == 0)
    }

    fn refuses_pinned(&self) -> bool {
        self.refuses_pinned
    }

    fn frees_tables(&self) -> bool {
        self.frees_tables
    }

    fn unlock(&self, start: usize, len: usize) {
        // SAFETY: changes no content.
        let _ = unsafe { munlock(start as *mut _, len) };
    }

    fn prefer_huge(&self, at: usize) {
        if HugePages::now() != HugePages::Asked {
            return;
        }
        // Not beyond the mapping: in the next one they may be forbidden.
        let (start, end) = mapping(at).ok().filter(|(start, _)| *start <= at).unwrap_or((at, at + BLOCK));
        // SAFETY: changes nothing in memory. What is missing in registered memory is asked of the engine: the kernel
        // gives no huge page of its own.
        let _ = unsafe { madvise(start as *mut _, end - start, Advice::LinuxHugepage) };
    }

    fn wait_event(&self, timeout_ns: u64) -> bool {
        let timeout = timeout(timeout_ns);
        match poll(&mut [PollFd::new(&self.uffd, PollFlags::IN)], timeout.as_ref()) {
            Err(Errno::INVAL) => self.is_selected(timeout.as_ref()),
            polled => polled == Ok(1),
        }
    }

    fn read_events(&self, out: &mut [Event]) -> usize {
        let mut buffer = EventBuffer::new().limit(out.len().min(EventBuffer::CAPACITY));
        let mut n = 0;
        if let Ok(events) = self.uffd.read_events(&mut buffer) {
            for event in events {
                out[n] = match event {
                    uffd::Event::Pagefault { address, thread, .. } => Event::Fault(Fault { address, thread }),
                    uffd::Event::Remap { from, to, len } => Event::Remap { from, to, len },
                    uffd::Event::Remove { start, end } => Event::Remove { start, end },
                    uffd::Event::Unmap { start, end } => Event::Unmap { start, end },
                    // Forks are not asked for.
                    _ => continue,
                };
                n += 1;
            }
        }
        n
    }

    fn scan(&self, start: usize, end: usize, out: &mut [Found]) -> (usize, usize) {
        let mut runs = [raw::page_region { start: 0, end: 0, categories: 0 }; SCAN_RUNS];
        let runs = &mut runs[..out.len().min(SCAN_RUNS)];
        // Swapped: by the kernel, or while it moves the page to another place in memory. Its data are there.
        let there = raw::PAGE_IS_PRESENT | raw::PAGE_IS_SWAPPED;
        let told = raw::PAGE_IS_HUGE | raw::PAGE_IS_PFNZERO;
        let sought = Sought { any: there, told, ..Sought::default() };
        let mut found = pagemap_scan(&self.pagemap, (start, end), sought, runs);
        if let Err(Errno::BADF | Errno::NOTTY) = found {
            // A thread that answers its own fault, in a program that closes what it does not know.
            if let Ok(pagemap) = open_proc("pagemap", c"/proc/self/pagemap") {
                found = pagemap_scan(&pagemap, (start, end), sought, runs);
            }
        }
        match found {
            Ok((n, upto)) => {
                for (i, (to, run)) in out.iter_mut().zip(&runs[..n]).enumerate() {
                    *to = Found {
                        start: run.start as usize,
                        end: run.end as usize,
                        // MOVE of the whole huge page of zeros maps physical memory from 0 on, on Linux 6.16 to 6.18.
                        huge: run.categories & told as u64 == raw::PAGE_IS_HUGE as u64,
                    };
                    if to.huge && self.hides_zeros {
                        self.cut_zeros(to);
                        if to.end < run.end as usize {
                            return (i + 1, to.end);
                        }
                    }
                }
                (n, upto)
            }
            // Nothing is mapped there any more.
            Err(_) => (0, end),
        }
    }

    fn count_zeros(&self, start: usize, len: usize) -> usize {
        const RUNS: usize = 32;
        let sought = Sought { any: raw::PAGE_IS_PFNZERO, ..Sought::default() };
        let mut found = [raw::page_region { start: 0, end: 0, categories: 0 }; RUNS];
        let (mut at, mut count) = (start, 0);
        while at < start + len {
            let Ok((n, upto)) = pagemap_scan(&self.pagemap, (at, start + len), sought, &mut found) else {
                break;
            };
            count += found[..n].iter().map(|run| (run.end - run.start) as usize / PAGE).sum::<usize>();
            at = upto;
        }
        count
    }

    fn holds_zeros(&self, start: usize, len: usize) -> bool {
        let (none, any, told) = (raw::PAGE_IS_PFNZERO, raw::PAGE_IS_PRESENT, raw::PAGE_IS_HUGE);
        let sought = Sought { none, any, told, all: 0 };
        let mut found = [raw::page_region { start: 0, end: 0, categories: 0 }; 1];
        match pagemap_scan(&self.pagemap, (start, start + len), sought, &mut found) {
            Ok((0, _)) => true,
            // Frames are shared with nobody.
            Ok(_) => {
                self.hides_zeros && found[0].categories != 0 && !self.is_exclusive(found[0].start as usize)
            }
            Err(_) => false,
        }
    }

    fn populate_write(&self, at: usize, len: usize) -> Result<(), Errno> {
        // SAFETY: as a write of the program that changes nothing.
        unsafe { madvise(at as *mut _, len, Advice::LinuxPopulateWrite) }
    }

    fn drop_frames(&self, at: usize, len: usize) -> Result<(), Errno> {
        // Without registration no REMOVE event is raised, for which the caller would have to wait.
        self.uffd.unregister(at, len)?;
        // SAFETY: frames belong to the engine.
        let dropped = unsafe { madvise(at as *mut _, len, Advice::LinuxDontNeed) };
        if dropped.is_ok() && len == BLOCK {
            self.clear_table(at);
        }
        self.register_again(at, len);
        dropped
    }

    fn make_huge(&self, at: usize) -> Result<(), Errno> {
        self.uffd.unregister(at, BLOCK)?;
        // SAFETY: frames belong to the engine, and this one is a hole.
        let made = unsafe {
            mprotect(at as *mut _, BLOCK, MprotectFlags::READ | MprotectFlags::WRITE)
                .and_then(|()| madvise(at as *mut _, BLOCK, Advice::LinuxHugepage))
                .and_then(|()| madvise(at as *mut _, PAGE, Advice::LinuxPopulateWrite))
        };
        let mut found = [Found::NONE; 1];
        let (n, _) = self.scan(at, at + BLOCK, &mut found);
        let whole = made.is_ok() && n == 1 && found[0].huge && found[0].end - found[0].start == BLOCK;
        if !whole {
            // Locked, too (mlockall). Where that is refused (a filter of a thread that answers itself) it is emptied when it
            // is needed.
            // SAFETY: as above.
            let emptied =
                unsafe { call(raw::__NR_madvise, [at, BLOCK, raw::MADV_DONTNEED_LOCKED as usize, 0, 0, 0]) };
            if emptied.is_ok() {
                self.clear_table(at);
            }
        }
        self.register_again(at, BLOCK);
        if whole {
            Ok(())
        } else {
            Err(Errno::NOMEM)
        }
    }

    fn collapse(&self, at: usize) -> Result<(), Errno> {
        // SAFETY: the program's memory has the same content after it. Where a page is missing in registered memory the
        // kernel refuses; where the mapping is another one by now, and not registered, it adds zeros that a touch
        // would have added.
        unsafe { call(raw::__NR_madvise, [at, BLOCK, raw::MADV_COLLAPSE as usize, 0, 0, 0]) }.map(drop)
    }

    fn resident_pages(&self) -> usize {
        self.statm().resident
    }

    fn now(&self) -> u64 {
        let t = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
    }

    fn cpu(&self) -> usize {
        rustix::thread::sched_getcpu()
    }

    fn cpus(&self) -> usize {
        self.home.count() as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::mm::{MapFlags, ProtFlags};

    #[test]
    fn releases_are_compared_by_number() {
        let is_new = |release: &str| is_at_least(release.as_bytes(), (6, 18));
        assert!(["6.18.0-rc1", "6.18+", "7.0", "6.100.2-generic"].into_iter().all(is_new));
        assert!(!["6.8.0-45-generic", "6.17.9", "5.19", "", "linux"].into_iter().any(is_new));
    }

    #[test]
    fn statm_is_read_by_field() {
        assert_eq!(pages_of(b"10 2 3 4 0 77 0\n", 1), 2);
        assert_eq!(pages_of(b"10 2 3 4 0 77 0\n", 5), 77);
        assert_eq!(pages_of(b"", 5), 0);
    }

    /// Memory that no child shares: another test of this process forks, and what is shared cannot move.
    fn reserve(len: usize) -> usize {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a fresh mapping.
        unsafe {
            let start = rustix::mm::mmap_anonymous(core::ptr::null_mut(), len, protection, flags).unwrap();
            madvise(start, len, Advice::LinuxDontFork).unwrap();
            start as usize
        }
    }

    #[test]
    fn a_mapping_ends_where_the_next_begins() {
        let start = reserve(5 * PAGE);
        // SAFETY: our own pages.
        unsafe {
            mprotect((start + PAGE) as *mut _, PAGE, MprotectFlags::READ).unwrap();
            rustix::mm::munmap((start + 2 * PAGE) as *mut _, PAGE).unwrap();
            mprotect((start + 4 * PAGE) as *mut _, PAGE, MprotectFlags::empty()).unwrap();
        }
        let maps = open_proc("maps", c"/proc/self/maps").unwrap();
        for (at, found) in [(PAGE + 100, (PAGE, 2 * PAGE)), (2 * PAGE, (3 * PAGE, 4 * PAGE))] {
            let found = (start + found.0, start + found.1);
            assert_eq!(mapping(start + at).unwrap(), found);
            assert_eq!(mapping_in_text(&maps, start + at).unwrap(), found);
        }
        assert_eq!(mapping(usize::MAX - PAGE).unwrap(), NO_MAPPING);
        assert_eq!(mapping_in_text(&maps, usize::MAX - PAGE).unwrap(), NO_MAPPING);
    }

    #[test]
    fn what_was_moved_counts_whatever_the_answer_was() {
        // SAFETY: gets addresses of our own mappings only.
        let Ok(kernel) = (unsafe { Linux::open() }) else {
            println!("skipped: no userfaultfd");
            return;
        };
        let (from, to, len) = (reserve(8 * PAGE), reserve(8 * PAGE), 8 * PAGE);
        kernel.register(from, len).unwrap();
        kernel.register(to, len).unwrap();
        let data = [7u8; 8 * PAGE];
        let fill = |at, len| kernel.copy(at, data.as_ptr() as usize, len, true).unwrap();
        fill(from, len);
        let after_all = |done, errno| kernel.moved_after_all(to, from, len, true, Partial { done, errno });
        let partial = |pages, errno| Err(Partial { done: pages * PAGE, errno });
        // Nothing was moved, and nothing is at the destination: then the answer stands.
        assert_eq!(after_all(0, Errno::EXIST), partial(0, Errno::EXIST));
        // Three were, and the answer says so, or does not.
        kernel.move_pages(to, from, 3 * PAGE, true).unwrap();
        assert_eq!(after_all(3 * PAGE, Errno::AGAIN), partial(3, Errno::AGAIN));
        assert_eq!(after_all(PAGE, Errno::AGAIN), partial(3, Errno::AGAIN));
        assert_eq!(after_all(0, Errno::EXIST), partial(3, Errno::AGAIN));
        // A fourth is at the destination, but not by a move.
        fill(to + 3 * PAGE, PAGE);
        assert_eq!(after_all(0, Errno::EXIST), partial(3, Errno::AGAIN));
        assert_eq!(after_all(3 * PAGE, Errno::EXIST), partial(3, Errno::EXIST));
        kernel.drop_frames(to + 3 * PAGE, PAGE).unwrap();
        kernel.move_pages(to + 3 * PAGE, from + 3 * PAGE, 5 * PAGE, true).unwrap();
        assert_eq!(after_all(0, Errno::EXIST), Ok(()));
    }

    #[test]
    fn what_is_registered_is_told_from_what_is_not() {
        // SAFETY: gets addresses of our own mappings only.
        let Ok(mut kernel) = (unsafe { Linux::open() }) else {
            println!("skipped: no userfaultfd");
            return;
        };
        let base = reserve(16 * PAGE);
        let page = |n: usize| base + n * PAGE;
        kernel.register(page(0), 12 * PAGE).unwrap();
        kernel.copy(page(0), [7u8; PAGE].as_ptr() as usize, PAGE, true).unwrap();
        kernel.set_probe(page(0));
        // SAFETY: pages of this test.
        unsafe {
            mprotect(page(2) as *mut _, PAGE, MprotectFlags::READ).unwrap();
            mprotect(page(4) as *mut _, PAGE, MprotectFlags::empty()).unwrap();
            rustix::mm::munmap(page(14) as *mut _, PAGE).unwrap();
        }
        // 2 and 4 are mappings of their own, 12 and 13 are not registered, 14 is none.
        let parts = [(0, 2), (2, 3), (3, 4), (4, 5), (5, 12)];
        let mut at = page(0);
        for (from, to) in parts {
            let found = kernel.next_registered(at, page(16));
            assert_eq!(found, Some((page(from), page(to))));
            at = page(to);
        }
        for (from, to) in [(12, 16), (13, 15), (14, 15)] {
            assert_eq!(kernel.next_registered(page(from), page(to)), None);
        }
        assert_eq!(kernel.next_registered(page(6), page(8)), Some((page(6), page(8))));
        // Nothing was done.
        let mut found = [Found::NONE; 4];
        assert_eq!(kernel.scan(base, page(12), &mut found).0, 1);
        assert_eq!((found[0].start, found[0].end), (page(0), page(1)));
        // SAFETY: mapped.
        assert_eq!(unsafe { (page(0) as *const u8).read() }, 7);
        std::thread::scope(|scope| {
            // SAFETY: pages of this test.
            scope.spawn(|| unsafe { rustix::mm::munmap(page(8) as *mut _, PAGE).unwrap() });
            while !kernel.event_pending() {
                std::thread::yield_now();
            }
            // Before the event is read.
            assert_eq!(kernel.next_mapped(page(5), page(8)), Some((page(5), page(8))));
            assert_eq!(kernel.next_mapped(page(5), page(12)), Some((page(5), page(8))));
            assert_eq!(kernel.next_mapped(page(8), page(12)), Some((page(9), page(12))));
            assert_eq!(kernel.next_mapped(page(8), page(9)), None);
            let mut events = [Event::Unmap { start: 0, end: 0 }; 4];
            while kernel.event_pending() {
                kernel.read_events(&mut events);
            }
        });
    }

    /// 2 MiB that nothing is in, as a frame is.
    fn registered_block() -> Option<(Linux, usize)> {
        // SAFETY: gets addresses of our own mappings only.
        let Ok(kernel) = (unsafe { Linux::open() }) else {
            println!("skipped: no userfaultfd");
            return None;
        };
        let at = reserve(2 * BLOCK).next_multiple_of(BLOCK);
        kernel.register(at, BLOCK).unwrap();
        Some((kernel, at))
    }

    #[test]
    fn a_huge_page_and_a_hole() {
        let Some((kernel, at)) = registered_block() else { return };
        let mut found = [Found::NONE; 4];
        assert_eq!(kernel.scan(at, at + BLOCK, &mut found).0, 0);
        if kernel.make_huge(at).is_ok() {
            assert_eq!(kernel.scan(at, at + BLOCK, &mut found).0, 1);
            assert!(found[0].huge);
            kernel.drop_frames(at, BLOCK).unwrap();
            assert_eq!(kernel.scan(at, at + BLOCK, &mut found).0, 0);
        }
        assert!(kernel.resident_pages() > 0);
    }

    #[test]
    fn huge_pages_of_zeros_are_told() {
        let Some((kernel, _)) = registered_block() else { return };
        let at = reserve(5 * BLOCK).next_multiple_of(BLOCK);
        // SAFETY: our own pages.
        unsafe {
            madvise(at as *mut _, 4 * BLOCK, Advice::LinuxHugepage).unwrap();
            for (block, is_written) in [false, true, true, false].into_iter().enumerate() {
                let byte = (at + block * BLOCK) as *mut u8;
                assert_eq!(byte.read_volatile(), 0);
                if is_written {
                    byte.write_volatile(1);
                }
            }
        }
        let (mut from, mut huge) = (at, Vec::new());
        while from < at + 4 * BLOCK {
            let mut found = [Found::NONE; 4];
            let (n, upto) = kernel.scan(from, at + 4 * BLOCK, &mut found);
            huge.extend(found[..n].iter().filter(|run| run.huge).map(|run| (run.start - at, run.end - at)));
            from = upto;
        }
        if !huge.is_empty() {
            assert_eq!(huge, [(BLOCK, 3 * BLOCK)]);
        }
        assert!(kernel.holds_zeros(at, BLOCK) && !kernel.holds_zeros(at + BLOCK, BLOCK));
    }

    /// Before Linux 6.14 the page table of the small pages would stay, and no huge page would fit any more.
    #[test]
    fn a_huge_frame_that_was_split_takes_a_huge_page_again() {
        let Some((mut kernel, at)) = registered_block() else { return };
        kernel.set_attic(reserve(2 * BLOCK).next_multiple_of(BLOCK));
        let to = reserve(2 * BLOCK).next_multiple_of(BLOCK);
        kernel.register(to, BLOCK).unwrap();
        let mut found = [Found::NONE; 1];
        for _ in 0..3 {
            if kernel.make_huge(at).is_err() {
                println!("skipped: no huge page to be had");
                return;
            }
            kernel.move_pages(to, at, PAGE, false).unwrap();
            kernel.drop_frames(at, BLOCK).unwrap();
            kernel.drop_frames(to, BLOCK).unwrap();
            kernel.make_huge(to).unwrap();
            kernel.move_pages(at, to, BLOCK, false).unwrap();
            assert_eq!(kernel.scan(at, at + BLOCK, &mut found).0, 1);
            assert!(found[0].huge && found[0].end - found[0].start == BLOCK);
            kernel.drop_frames(at, BLOCK).unwrap();
        }
        // Nothing of what goes there is lost to others.
        kernel.copy(at, [7u8; PAGE].as_ptr() as usize, PAGE, false).unwrap();
        // SAFETY: mapped.
        assert_eq!(unsafe { (at as *const u8).read() }, 7);
    }

    #[test]
    fn a_huge_page_that_cannot_be_had_leaves_a_locked_hole_empty() {
        let Some((kernel, at)) = registered_block() else { return };
        // SAFETY: our own pages. As mlockall(MCL_CURRENT | MCL_ONFAULT) does it; where they end within the block none is huge.
        unsafe {
            rustix::mm::mlock_with(at as *mut _, BLOCK / 2, rustix::mm::MlockFlags::ONFAULT).unwrap();
        }
        assert_eq!(kernel.make_huge(at), Err(Errno::NOMEM));
        assert_eq!(kernel.scan(at, at + BLOCK, &mut [Found::NONE; 4]).0, 0);
    }
}
