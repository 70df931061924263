//! Code for the child of a fork that asks, and for nobody else's: what was kept from children ([`crate::code`]) could
//! be lent for the time of the clone, but then the child of another thread, which forks past libc just then, has it too.
//!
//! So the code of a file has a twin: the same part of the file mapped once more, without access while it is not lent. It
//! is the twins that are lent. The child begins in this library, whose code is kept from nobody, and moves them to where
//! the code was before it calls anything else; a child that does not know of them has no code to run.
//!
//! Without a twin, and lent as it is: code that is not of a file, that has been written to (a debugger, a hook), or
//! whose file cannot be opened any more or has changed since; and all where what has no access may not be made code.

use crate::{memory, proc, sys};
use alloc::boxed::Box;
use alloc::ffi::CString;
use core::sync::atomic::{AtomicI64, AtomicUsize, Ordering};
use linux_raw_sys::general as raw;
use pageout::kernel::{pagemap_scan, Sought};
use pageout::space::discover::Area;
use rustix::fd::OwnedFd;
use rustix::fs::{fstat, open, Mode, OFlags};
use rustix::io::Errno;
use rustix::mm::{madvise, Advice, MapFlags, ProtFlags};
use rustix::time::ClockId;

/// Most twins that a child can find.
const MOST: usize = 1024;
/// Start and end of the code, its twin's start.
static LENT: [[AtomicUsize; 3]; MOST] = [const { [const { AtomicUsize::new(0) }; 3] }; MOST];
static COUNT: AtomicUsize = AtomicUsize::new(0);
/// When the program began, in ns, by the clock that files are dated by.
static BEGAN: AtomicI64 = AtomicI64::new(0);

/// Before `main`.
pub fn prepare_process() {
    BEGAN.store(sys::time(ClockId::RealtimeCoarse) as i64, Ordering::Relaxed);
}

/// Code of a file, as maps has it.
pub struct Original {
    pub start: usize,
    pub end: usize,
    protection: u32,
    /// Offset, device, inode.
    backing: Box<[u8]>,
    path: CString,
}

impl Original {
    /// `None`: not of a file, or it may be written to.
    pub fn of(area: &Area<'_>) -> Option<Self> {
        let protection = match area.permissions {
            b"r-xp" => raw::PROT_READ | raw::PROT_EXEC,
            b"--xp" => raw::PROT_EXEC,
            _ => return None,
        };
        area.name.starts_with(b"/").then_some(())?;
        let path = CString::new(area.name).ok()?;
        Some(Self { start: area.start, end: area.end, protection, backing: area.backing.into(), path })
    }

    fn len(&self) -> usize {
        self.end - self.start
    }

    /// Where in its file it begins.
    fn offset(&self) -> Option<u64> {
        let digits = self.backing.split(|byte| *byte == b' ').next()?;
        u64::from_str_radix(core::str::from_utf8(digits).ok()?, 16).ok()
    }
}

/// The second mapping of some code. Children do not get it until it is lent.
pub struct Twin {
    pub original: Original,
    at: usize,
}

impl Twin {
    /// `None`: the file cannot be opened, or it has changed since the program began: what is mapped may be what it was
    /// before (overlayfs). What was opened may be another one by now: see [`Twin::is`].
    pub fn new(original: Original) -> Option<Self> {
        // Not to wait for whoever writes to what is no file.
        let how = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let file = open(original.path.as_c_str(), how, Mode::empty()).ok()?;
        let seen = fstat(&file).ok()?;
        let changed = seen.st_ctime as i64 * 1_000_000_000 + seen.st_ctime_nsec as i64;
        if changed >= BEGAN.load(Ordering::Relaxed) {
            return None;
        }
        let len = original.len();
        let (offset, flags) = (original.offset()?, MapFlags::PRIVATE | MapFlags::NORESERVE);
        let at = memory::map_file(&file, offset, len, ProtFlags::empty(), flags).ok()?;
        Some(Self { original, at })
    }

    /// Is this its line of maps, and of the same file as the original's?
    pub fn is(&self, area: &Area<'_>) -> bool {
        (area.start, area.end) == (self.at, self.at + self.original.len())
            && *area.backing == *self.original.backing
    }

    /// Is it still the twin of this?
    pub fn is_of(&self, other: &Original) -> bool {
        let key = |one: &Original| (one.start, one.end, one.protection);
        key(&self.original) == key(other) && self.original.backing == other.backing
    }

    /// Start and end of its original.
    pub fn place(&self) -> (usize, usize) {
        (self.original.start, self.original.end)
    }

    /// From here on children get it. False: they would not find it, or it must not be code. The child itself changes no
    /// protection: it may be forbidden to, and then it is too late.
    pub fn lend(&self) -> bool {
        let count = COUNT.load(Ordering::Relaxed);
        let Some(entry) = LENT.get(count).filter(|_| self.protect(self.original.protection)) else {
            return false;
        };
        for (word, value) in entry.iter().zip([self.original.start, self.original.end, self.at]) {
            word.store(value, Ordering::Relaxed);
        }
        COUNT.store(count + 1, Ordering::Relaxed);
        self.advise(Advice::LinuxDoFork);
        true
    }

    /// From here on they do not.
    pub fn keep(&self) {
        self.advise(Advice::LinuxDontFork);
        self.protect(raw::PROT_NONE);
        COUNT.store(0, Ordering::Relaxed);
    }

    fn protect(&self, protection: u32) -> bool {
        // SAFETY: our own mapping.
        unsafe { sys::call(raw::__NR_mprotect, self.at, self.original.len(), protection as usize, 0) }.is_ok()
    }

    fn advise(&self, advice: Advice) {
        // SAFETY: changes what children get, and nothing else.
        let _ = unsafe { madvise(self.at as *mut _, self.original.len(), advice) };
    }
}

impl Drop for Twin {
    fn drop(&mut self) {
        memory::unmap(self.at, self.original.len());
    }
}

/// Tells pages of a file from what was written in their place.
pub struct Pages(OwnedFd);

impl Pages {
    /// Of this process.
    pub fn open() -> Option<Self> {
        proc::opened(c"/proc/self/pagemap").map(Self)
    }

    /// Is all of it as in the file?
    pub fn are_the_files(&self, original: &Original) -> bool {
        let there = raw::PAGE_IS_PRESENT | raw::PAGE_IS_SWAPPED;
        let others = Sought { none: raw::PAGE_IS_FILE, any: there, told: there, all: 0 };
        let mut found = [raw::page_region { start: 0, end: 0, categories: 0 }];
        let found = pagemap_scan(&self.0, (original.start, original.end), others, &mut found);
        found.is_ok_and(|(found, _)| found == 0)
    }
}

/// In the child, before anything else: puts the code where it was. Calls nothing, for there is no other code. False:
/// it cannot be.
pub fn come_in() -> bool {
    for entry in &LENT[..COUNT.swap(0, Ordering::Relaxed).min(MOST)] {
        let [start, end, at] = [0, 1, 2].map(|word: usize| entry[word].load(Ordering::Relaxed));
        let len = end - start;
        let flags = raw::MAP_PRIVATE | raw::MAP_ANONYMOUS | raw::MAP_NORESERVE | raw::MAP_FIXED_NOREPLACE;
        let how = raw::MREMAP_MAYMOVE | raw::MREMAP_FIXED;
        // SAFETY: the addresses are free, or were just taken for this; the twin is ours.
        let there = unsafe {
            match sys::call6(raw::__NR_mmap, [start, len, 0, flags as usize, usize::MAX, 0]) {
                Ok(_) => sys::call6(raw::__NR_mremap, [at, len, len, how as usize, start, 0]),
                // Something else has come there meanwhile, which was not kept from the child.
                Err(Errno::EXIST) => sys::call(raw::__NR_munmap, at, len, 0, 0),
                Err(errno) => Err(errno),
            }
        };
        if there.is_err() {
            return false;
        }
    }
    true
}
