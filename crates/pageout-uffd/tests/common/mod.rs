//! What the tests share: pages to work on, contexts or the reason why there is none, waiting with a limit.
#![allow(dead_code)] // each test program uses its part

use std::ops::Range;

use pageout_uffd::{Event, EventBuffer, Features, RegisterMode, Uffd};
use rustix::event::{poll, PollFd, PollFlags, Timespec};
use rustix::mm::{self, Advice, MapFlags, MremapFlags, ProtFlags};

pub const PAGE: usize = 4096;

/// A private anonymous mapping of small pages.
pub struct Pages {
    pub at: usize,
    pub len: usize,
}

impl Pages {
    pub fn new(count: usize) -> Self {
        let len = count * PAGE;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping where the kernel likes.
        let at = unsafe { mm::mmap_anonymous(std::ptr::null_mut(), len, access, MapFlags::PRIVATE) }.unwrap();
        // SAFETY: our own mapping. Kernels without huge pages refuse, and need it not.
        let _ = unsafe { mm::madvise(at, len, Advice::LinuxNoHugepage) };
        Self { at: at as usize, len }
    }

    /// As `new`, page `i` filled with `i + 1`.
    pub fn filled(count: usize) -> Self {
        let pages = Self::new(count);
        (0..count).for_each(|page| pages.poke(page, page as u8 + 1));
        pages
    }

    pub fn registered(count: usize, uffd: &Uffd, mode: RegisterMode) -> Self {
        let pages = Self::new(count);
        // SAFETY: nobody has used the pages yet; the test serves them.
        unsafe { uffd.register(pages.at, pages.len, mode) }.unwrap();
        pages
    }

    pub fn page(&self, index: usize) -> usize {
        assert!(index * PAGE < self.len);
        self.at + index * PAGE
    }

    pub fn peek(&self, page: usize) -> u8 {
        peek(self.page(page))
    }

    pub fn poke(&self, page: usize, byte: u8) {
        // SAFETY: within our own mapping; a test lets one thread at a time touch a page.
        unsafe { (self.page(page) as *mut u8).write_volatile(byte) }
    }

    /// Drops the contents of the pages.
    pub fn discard(&self, pages: Range<usize>) {
        let len = pages.len() * PAGE;
        // SAFETY: our own mapping, to which there is no reference.
        unsafe { mm::madvise(self.page(pages.start) as *mut _, len, Advice::LinuxDontNeed) }.unwrap();
    }

    /// Unmaps it.
    pub fn unmap(self) {
        // SAFETY: our own mapping, to which there is no reference.
        unsafe { mm::munmap(self.at as *mut _, self.len) }.unwrap();
    }

    /// Moves the mapping elsewhere.
    pub fn remap(self) -> Self {
        let target = Self::new(self.len / PAGE);
        let flags = MremapFlags::MAYMOVE;
        // SAFETY: both are our own mappings, to which there is no reference.
        unsafe { mm::mremap_fixed(self.at as *mut _, self.len, self.len, flags, target.at as *mut _) }
            .unwrap();
        target
    }
}

pub fn peek(address: usize) -> u8 {
    // SAFETY: the tests' addresses are mapped and readable.
    unsafe { (address as *const u8).read_volatile() }
}

/// A non-blocking context, or `None` with the reason printed.
pub fn context(wanted: Features) -> Option<Uffd> {
    Uffd::open(wanted, true).map_err(|error| println!("skipped: {error}")).ok()
}

/// Waits until there is something to read.
pub fn wait(uffd: &Uffd) {
    let limit = Timespec { tv_sec: 20, tv_nsec: 0 };
    let mut fds = [PollFd::new(uffd, PollFlags::IN)];
    assert_eq!(poll(&mut fds, Some(&limit)).unwrap(), 1, "no event within 20 s");
}

/// Waits for events that are expected to be one.
pub fn next(uffd: &Uffd) -> Event {
    wait(uffd);
    let mut buffer = EventBuffer::new();
    let mut events = uffd.read_events(&mut buffer).unwrap();
    let event = events.next().unwrap();
    assert!(events.next().is_none());
    event
}
