//! Linux through userfaultfd, PAGEMAP_SCAN and /proc/self.

use super::{Event, Fault, Found, Kernel, Place};
use core::fmt;
use linux_raw_sys::general as raw;
use pageout_uffd::{
    self as uffd, CopyMode, EventBuffer, Features, MoveMode, OpenError, Partial, RegisterMode, Uffd,
};
use rustix::event::{poll, PollFd, PollFlags};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{open, Mode, OFlags};
use rustix::io::{pread, Errno};
use rustix::mm::{madvise, mprotect, Advice, MprotectFlags};
use rustix::process::Pid;
use rustix::thread::{sched_getaffinity, sched_setaffinity};

/// The running kernel, for the address space of the caller.
pub struct Linux {
    uffd: Uffd,
    pagemap: OwnedFd,
    statm: OwnedFd,
    /// A page that is always mapped in registered memory: copying onto it answers EEXIST, or EAGAIN while
    /// an event is unread.
    probe: usize,
}

/// Why the kernel cannot carry the engine.
#[derive(Debug)]
pub enum LinuxError {
    /// No userfaultfd, or one that lacks a feature.
    Userfaultfd(OpenError),
    /// A file of /proc/self.
    Proc(&'static str, Errno),
    /// No memory for the engine itself.
    Memory(Errno),
}

impl fmt::Display for LinuxError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LinuxError::Userfaultfd(error) => error.fmt(f),
            LinuxError::Proc(file, errno) => write!(f, "/proc/self/{file}: {errno}; is /proc mounted?"),
            LinuxError::Memory(errno) => write!(f, "no memory for the engine: {errno}"),
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

const PAGE: usize = 4096;
const HUGE: usize = 2 << 20;

/// `struct pm_scan_arg` of linux/fs.h.
#[repr(C)]
#[derive(Default)]
struct ScanArg {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

/// `struct page_region` of linux/fs.h.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct PageRegion {
    start: u64,
    end: u64,
    categories: u64,
}

/// Runs that one PAGEMAP_SCAN returns at most.
const SCAN_RUNS: usize = 64;

/// PAGEMAP_SCAN: `_IOWR('f', 16, struct pm_scan_arg)`.
struct Scan<'a>(&'a mut ScanArg);

// SAFETY: the opcode belongs to pm_scan_arg, whose vec points to memory that outlives the call.
unsafe impl rustix::ioctl::Ioctl for Scan<'_> {
    type Output = usize;
    const IS_MUTATING: bool = true;
    fn opcode(&self) -> rustix::ioctl::Opcode {
        0xC060_6610
    }
    fn as_ptr(&mut self) -> *mut core::ffi::c_void {
        (self.0 as *mut ScanArg).cast()
    }
    unsafe fn output_from_ptr(
        out: rustix::ioctl::IoctlOutput,
        _: *mut core::ffi::c_void,
    ) -> rustix::io::Result<usize> {
        Ok(out as usize)
    }
}

/// The number in field `field` of a statm line, in pages.
pub fn pages_of(statm: &[u8], field: usize) -> usize {
    let word = statm.split(|b| *b == b' ').nth(field).unwrap_or(b"");
    word.iter().take_while(|b| b.is_ascii_digit()).fold(0, |n, b| n * 10 + (b - b'0') as usize)
}

impl Linux {
    /// Opens what the engine needs. `probe` is one mapped page of registered memory, known after
    /// [`Linux::set_probe`].
    ///
    /// # Errors
    /// See [`LinuxError`].
    pub fn open() -> Result<Self, LinuxError> {
        let uffd = Uffd::open(NEEDED, true).map_err(LinuxError::Userfaultfd)?;
        let proc = |name: &'static str, path: &core::ffi::CStr| {
            open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
                .map_err(|errno| LinuxError::Proc(name, errno))
        };
        Ok(Self {
            uffd,
            pagemap: proc("pagemap", c"/proc/self/pagemap")?,
            statm: proc("statm", c"/proc/self/statm")?,
            probe: 0,
        })
    }

    /// Names the page that probes for unread events: registered and mapped for good.
    pub fn set_probe(&mut self, page: usize) {
        self.probe = page;
    }

    /// The registration, for who keeps it alive.
    pub fn uffd(&self) -> BorrowedFd<'_> {
        self.uffd.as_fd()
    }

    /// Size, resident and data pages of the address space.
    pub fn statm(&self) -> (usize, usize, usize) {
        let mut line = [0u8; 128];
        let n = pread(&self.statm, &mut line, 0).unwrap_or(0);
        let line = &line[..n];
        (pages_of(line, 0), pages_of(line, 1), pages_of(line, 5))
    }
}

impl Kernel for Linux {
    fn register(&self, start: usize, len: usize) -> Result<(), Errno> {
        // SAFETY: registering changes no content; whoever faults there is answered by the engine.
        unsafe { self.uffd.register(start, len, RegisterMode::MISSING) }
    }

    fn move_pages(&self, to: usize, from: usize, len: usize, wake: bool) -> Result<(), Partial> {
        let mode = if wake { MoveMode::empty() } else { MoveMode::DONTWAKE };
        // SAFETY: one side is a frame, the other a managed page whose word the caller holds.
        unsafe { self.uffd.move_pages(to, from, len, mode) }
    }

    fn copy(&self, to: usize, from: usize, len: usize, wake: bool) -> Result<(), Partial> {
        let mode = if wake { CopyMode::empty() } else { CopyMode::DONTWAKE };
        // SAFETY: fills holes only; the caller holds the word.
        unsafe { self.uffd.copy(to, from, len, mode) }
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

    fn call_here(&self, thread: u32) -> Option<Place> {
        // The thread is blocked in its fault, so it does not change its own affinity meanwhile.
        let thread = Pid::from_raw(thread as i32);
        let free = sched_getaffinity(thread).ok()?;
        let here = self.cpu();
        if free.count() < 2 || here >= Place::MAX_CPU || !free.is_set(here) {
            return None;
        }
        let mut only = Place::new();
        only.set(here);
        sched_setaffinity(thread, &only).ok()?;
        Some(free)
    }

    fn let_go(&self, thread: u32, place: Place) {
        let _ = sched_setaffinity(Pid::from_raw(thread as i32), &place);
    }

    fn event_pending(&self) -> bool {
        // SAFETY: the probe page is mapped, so nothing is ever copied.
        let probe = unsafe { self.uffd.copy(self.probe, self.probe, PAGE, CopyMode::DONTWAKE) };
        matches!(probe, Err(Partial { errno: Errno::AGAIN, .. }))
    }

    fn wait_event(&self, timeout_ns: u64) -> bool {
        let timeout = rustix::event::Timespec {
            tv_sec: (timeout_ns / 1_000_000_000) as i64,
            tv_nsec: (timeout_ns % 1_000_000_000) as _,
        };
        let mut fds = [PollFd::new(&self.uffd, PollFlags::IN)];
        matches!(poll(&mut fds, Some(&timeout)), Ok(1))
    }

    fn read_events(&self, out: &mut [Event]) -> usize {
        let mut buffer = EventBuffer::new();
        let mut n = 0;
        if let Ok(events) = self.uffd.read_events(&mut buffer) {
            for event in events {
                out[n] = match event {
                    uffd::Event::Pagefault { address, flags, thread } => {
                        Event::Fault(Fault { address, write: flags.write, thread })
                    }
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
        let mut runs = [PageRegion::default(); SCAN_RUNS];
        let want = out.len().min(SCAN_RUNS);
        let mut arg = ScanArg {
            size: size_of::<ScanArg>() as u64,
            start: start as u64,
            end: end as u64,
            vec: runs.as_mut_ptr() as u64,
            vec_len: want as u64,
            category_mask: raw::PAGE_IS_PRESENT as u64,
            return_mask: (raw::PAGE_IS_PRESENT | raw::PAGE_IS_HUGE) as u64,
            ..ScanArg::default()
        };
        // SAFETY: see Scan; `runs` has room for vec_len entries.
        let n = unsafe { rustix::ioctl::ioctl(&self.pagemap, Scan(&mut arg)) };
        match n {
            Ok(n) => {
                for (to, run) in out.iter_mut().zip(&runs[..n]) {
                    *to = Found {
                        start: run.start as usize,
                        end: run.end as usize,
                        huge: run.categories & raw::PAGE_IS_HUGE as u64 != 0,
                    };
                }
                (n, arg.walk_end as usize)
            }
            // Nothing is mapped there any more.
            Err(_) => (0, end),
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
        unsafe { madvise(at as *mut _, len, Advice::LinuxDontNeed)? };
        self.register(at, len)
    }

    fn make_huge(&self, at: usize) -> Result<(), Errno> {
        self.uffd.unregister(at, HUGE)?;
        // SAFETY: frames belong to the engine, and this one is a hole.
        let made = unsafe {
            mprotect(at as *mut _, HUGE, MprotectFlags::READ | MprotectFlags::WRITE)
                .and_then(|()| madvise(at as *mut _, HUGE, Advice::LinuxHugepage))
                .and_then(|()| madvise(at as *mut _, PAGE, Advice::LinuxPopulateWrite))
        };
        let mut found = [Found { start: 0, end: 0, huge: false }; 1];
        let (n, _) = self.scan(at, at + HUGE, &mut found);
        let whole = made.is_ok() && n == 1 && found[0].huge && found[0].end - found[0].start == HUGE;
        if !whole {
            // SAFETY: as above.
            unsafe { madvise(at as *mut _, HUGE, Advice::LinuxDontNeed)? };
        }
        self.register(at, HUGE)?;
        if whole {
            Ok(())
        } else {
            Err(Errno::NOMEM)
        }
    }

    fn resident_pages(&self) -> usize {
        self.statm().1
    }

    fn now(&self) -> u64 {
        let t = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
    }

    fn cpu(&self) -> usize {
        rustix::thread::sched_getcpu()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statm_is_read_by_field() {
        assert_eq!(pages_of(b"10 2 3 4 0 77 0\n", 1), 2);
        assert_eq!(pages_of(b"10 2 3 4 0 77 0\n", 5), 77);
        assert_eq!(pages_of(b"", 5), 0);
    }

    #[test]
    fn a_huge_page_and_a_hole() {
        let Ok(kernel) = Linux::open() else {
            println!("skipped: no userfaultfd");
            return;
        };
        // SAFETY: a fresh mapping.
        let base = unsafe {
            rustix::mm::mmap_anonymous(
                core::ptr::null_mut(),
                2 * HUGE,
                rustix::mm::ProtFlags::READ | rustix::mm::ProtFlags::WRITE,
                rustix::mm::MapFlags::PRIVATE | rustix::mm::MapFlags::NORESERVE,
            )
            .unwrap() as usize
        };
        let at = (base + HUGE - 1) & !(HUGE - 1);
        kernel.register(at, HUGE).unwrap();
        let mut found = [Found { start: 0, end: 0, huge: false }; 4];
        assert_eq!(kernel.scan(at, at + HUGE, &mut found).0, 0);
        if kernel.make_huge(at).is_ok() {
            assert_eq!(kernel.scan(at, at + HUGE, &mut found).0, 1);
            assert!(found[0].huge);
            kernel.drop_frames(at, HUGE).unwrap();
            assert_eq!(kernel.scan(at, at + HUGE, &mut found).0, 0);
        }
        assert!(kernel.resident_pages() > 0);
    }
}
