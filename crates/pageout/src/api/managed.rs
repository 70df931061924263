//! The kernel as an engine of this API sees it: Linux, but for the count of resident memory.
//!
//! `pageout run` limits a whole program, so its engine asks the kernel for the resident memory of the address
//! space. Here only regions are limited: what counts is their resident pages, which the page words tell,
//! and the frames that are filled. Frames are filled and emptied by this trait alone, so a counter beside the
//! calls is exact and costs no system call.

use crate::kernel::{Event, Found, Kernel, Linux, Partial};
use crate::space::PAGE;
use crate::sync::atomic::{AtomicIsize, AtomicU32, AtomicUsize, Ordering::Relaxed};
use core::ops::Range;
use rustix::io::Errno;
use rustix::thread::gettid;

const RUNS: usize = 64;

/// Linux with an account of managed memory.
pub(super) struct Managed {
    linux: Linux,
    /// Where frames are: small ones, huge ones.
    staging: [Range<usize>; 2],
    /// Frames that have memory, in pages.
    filled: AtomicIsize,
    /// Resident pages of regions at the last look.
    resident: AtomicUsize,
    /// The engine's threads, by number. The program's are of the same process.
    threads: [AtomicU32; THREADS],
}

/// As many as the engine may have, with the first.
pub(super) const THREADS: usize = 6;

impl Managed {
    pub(super) fn new(linux: Linux, staging: [Range<usize>; 2]) -> Self {
        let threads = [const { AtomicU32::new(0) }; THREADS];
        Self { linux, staging, filled: AtomicIsize::new(0), resident: AtomicUsize::new(0), threads }
    }

    /// The caller is a thread of the engine from here on.
    pub(super) fn enlist(&self) {
        let number = gettid().as_raw_nonzero().get() as u32;
        let enters = |own: &AtomicU32| own.compare_exchange(0, number, Relaxed, Relaxed).is_ok();
        assert!(self.threads.iter().any(enters), "more threads than an engine has");
    }

    /// Takes the result of a walk over the page words.
    pub(super) fn set_resident(&self, pages: usize) {
        self.resident.store(pages, Relaxed);
    }

    fn is_staging(&self, at: usize) -> bool {
        self.staging.iter().any(|range| range.contains(&at))
    }

    /// `pages` came to be at `at`.
    fn came(&self, at: usize, pages: usize) {
        if self.is_staging(at) {
            self.filled.fetch_add(pages as isize, Relaxed);
        }
    }

    fn went(&self, at: usize, pages: usize) {
        if self.is_staging(at) {
            self.filled.fetch_sub(pages as isize, Relaxed);
        }
    }
}

/// Pages that a call has done.
fn done(result: &Result<(), Partial>, len: usize) -> usize {
    result.as_ref().map_or_else(|partial| partial.done, |()| len) / PAGE
}

// SAFETY: as `Linux`, which does it.
unsafe impl Kernel for Managed {
    fn register(&self, start: usize, len: usize) -> Result<(), Errno> {
        self.linux.register(start, len)
    }

    fn unregister(&self, start: usize, len: usize) {
        self.linux.unregister(start, len);
    }

    fn mark(&self, start: usize, len: usize, on: bool) -> Result<(), Errno> {
        self.linux.mark(start, len, on)
    }

    fn move_pages(&self, to: usize, from: usize, len: usize, wake: bool) -> Result<(), Partial> {
        let result = self.linux.move_pages(to, from, len, wake);
        let pages = done(&result, len);
        self.came(to, pages);
        self.went(from, pages);
        result
    }

    fn copy(&self, to: usize, from: usize, len: usize, wake: bool) -> Result<(), Partial> {
        let result = self.linux.copy(to, from, len, wake);
        self.came(to, done(&result, len));
        result
    }

    fn zero(&self, at: usize, len: usize, wake: bool) -> Result<(), Partial> {
        let result = self.linux.zero(at, len, wake);
        self.came(at, done(&result, len));
        result
    }

    fn poison(&self, at: usize, len: usize) -> Result<(), Partial> {
        self.linux.poison(at, len)
    }

    fn wake(&self, at: usize, len: usize) {
        self.linux.wake(at, len);
    }

    fn is_own(&self, thread: u32) -> bool {
        self.threads.iter().any(|own| own.load(Relaxed) == thread)
    }

    fn call_here(&self, thread: u32, at: usize) -> bool {
        self.linux.call_here(thread, at)
    }

    fn follow(&self, thread: u32) {
        self.linux.follow(thread);
    }

    fn settle_here(&self) {
        self.linux.settle_here();
    }

    fn roam(&self) {
        self.linux.roam();
    }

    fn is_ours(&self) -> bool {
        self.linux.is_ours()
    }

    fn event_pending(&self) -> bool {
        self.linux.event_pending()
    }

    fn next_registered(&self, start: usize, end: usize) -> Option<(usize, usize)> {
        self.linux.next_registered(start, end)
    }

    fn next_mapped(&self, start: usize, end: usize) -> Option<(usize, usize)> {
        self.linux.next_mapped(start, end)
    }

    fn refuses_pinned(&self) -> bool {
        self.linux.refuses_pinned()
    }

    fn frees_tables(&self) -> bool {
        self.linux.frees_tables()
    }

    fn counts_at_once(&self) -> bool {
        false
    }

    fn count_zeros(&self, start: usize, len: usize) -> usize {
        self.linux.count_zeros(start, len)
    }

    fn unlock(&self, start: usize, len: usize) {
        self.linux.unlock(start, len);
    }

    fn prefer_huge(&self, at: usize) {
        self.linux.prefer_huge(at);
    }

    fn wait_event(&self, timeout_ns: u64) -> bool {
        self.linux.wait_event(timeout_ns)
    }

    fn read_events(&self, out: &mut [Event]) -> usize {
        self.linux.read_events(out)
    }

    fn scan(&self, start: usize, end: usize, out: &mut [Found]) -> (usize, usize) {
        self.linux.scan(start, end, out)
    }

    fn populate_write(&self, at: usize, len: usize) -> Result<(), Errno> {
        self.linux.populate_write(at, len)
    }

    fn holds_zeros(&self, start: usize, len: usize) -> bool {
        self.linux.holds_zeros(start, len)
    }

    fn drop_frames(&self, at: usize, len: usize) -> Result<(), Errno> {
        // A huge frame of which a part was moved away is not whole.
        let (mut pages, mut from) = (0, at);
        let mut found = [Found::NONE; RUNS];
        while from < at + len {
            let (n, walked) = self.linux.scan(from, at + len, &mut found);
            pages += found[..n].iter().map(|run| (run.end - run.start) / PAGE).sum::<usize>();
            if walked <= from {
                break;
            }
            from = walked;
        }
        self.linux.drop_frames(at, len)?;
        self.went(at, pages);
        Ok(())
    }

    fn make_huge(&self, at: usize) -> Result<(), Errno> {
        self.linux.make_huge(at)?;
        self.came(at, crate::space::BLOCK_PAGES);
        Ok(())
    }

    fn collapse(&self, at: usize) -> Result<(), Errno> {
        self.linux.collapse(at)
    }

    fn resident_pages(&self) -> usize {
        self.resident.load(Relaxed) + self.filled.load(Relaxed).max(0) as usize
    }

    fn now(&self) -> u64 {
        self.linux.now()
    }

    fn cpu(&self) -> usize {
        self.linux.cpu()
    }

    fn cpus(&self) -> usize {
        self.linux.cpus()
    }
}
