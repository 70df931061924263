//! The program as the kernel and /proc show it to its keeper: is it still the one whose memory this is?
//!
//! What cannot be told is no: a keeper that stays too long costs memory, one that goes too early costs data.

use crate::proc::Maps;
use crate::{exit, keeper, proc, sys};
use alloc::ffi::CString;
use core::ffi::CStr;
use core::mem::MaybeUninit;
use core::sync::atomic::{AtomicUsize, Ordering};
use pageout::kernel::{Kernel, Linux, Statm};
use pageout::space::PAGE;
use rustix::event::{poll, PollFd, PollFlags, Timespec};
use rustix::fd::OwnedFd;
use rustix::fs::{lstat, open, Mode, OFlags, RawDir};
use rustix::io::Errno;
use rustix::process::{pidfd_open, Pid, PidfdFlags};

/// A mapping of a file that is in this memory, and in no other but by another file: ends of it.
static MARK: [AtomicUsize; 2] = [const { AtomicUsize::new(0) }; 2];

/// A shared mapping that stays as long as the keeper.
pub fn mark(start: usize, len: usize) {
    MARK[0].store(start, Ordering::Relaxed);
    MARK[1].store(start + len.next_multiple_of(PAGE), Ordering::Relaxed);
}

/// Has the program become another? `None`: nobody can tell.
fn left() -> Option<bool> {
    let me = sys::own_process();
    // It may have mounted a /proc of its own namespace, as who makes a container does.
    keeper::list_again(me);
    let program = keeper::listed();
    // Seccomp filters of containers refuse to say it in one call.
    let is_here = |id, listed| sys::same_memory(id, me).or_else(|| has_mark(listed));
    if is_here(keeper::program(), program).or_else(has_same_code)? {
        return Some(false);
    }
    // Who has ended has no memory, as the first thread while others go on. Looked at after the other.
    if goes_on(program) {
        return Some(true);
    }
    let thread = numbers(file("task").as_c_str(), |thread| goes_on(thread).then_some(thread))?;
    let is_here = is_here(number_of(thread)?, thread)?;
    (is_here || goes_on(thread)).then_some(!is_here)
}

/// Whether the program has become another costs more to ask than how much it has, and what it has tells that too: another has
/// something else mapped, or less in memory for a while. Asked at least once in so many ns all the same.
const ASK_EVERY: u64 = 100_000_000;

/// A look at the program's memory.
pub struct Sight {
    /// None where it cannot be seen.
    statm: Option<OwnedFd>,
    /// What was there at the last look, when it was the keeper's memory for sure.
    last: Statm,
    /// When it is asked again (ns).
    next: u64,
}

impl Sight {
    /// Of the program as it is now.
    pub fn new() -> Self {
        Self { statm: proc::opened(&file("statm")), last: Statm::default(), next: 0 }
    }

    /// What is there. `None`: the program has become another.
    pub fn look(&mut self, kernel: &Linux) -> Option<Statm> {
        // Nothing: its first thread has ended.
        let seen = self.statm.as_ref().map(Statm::read).filter(|seen| seen.size != 0);
        let now = kernel.now();
        let is_as_before = seen.as_ref().map_or(self.statm.is_some(), |seen| {
            (seen.size, seen.data) == (self.last.size, self.last.data) && seen.resident >= self.last.resident
        });
        if !(now < self.next && is_as_before) {
            match left() {
                Some(true) => return None,
                Some(false) => self.next = now + ASK_EVERY,
                // What is seen may be another's.
                None => {
                    self.next = 0;
                    return Some(kernel.statm());
                }
            }
        }
        self.last = seen.unwrap_or_else(|| kernel.statm());
        Some(self.last)
    }
}

/// A process other than the program that has its memory.
pub struct Guest {
    pub id: u32,
    /// What /proc calls it.
    pub listed: u32,
    pub watch: OwnedFd,
}

/// One that goes on when the program has gone: between `vfork` and its `exec`, or by `clone(CLONE_VM)`. Each may end as it is
/// looked at, and have made the next. Nobody is there only when none was begun during two looks: whom the first missed, as who
/// made him ended, the second meets. And after some looks: what makes them past libc is not counted.
pub fn guest() -> Option<Guest> {
    const LOOKS: usize = 50;
    if !exit::may_have_guests() {
        return look_for_guest();
    }
    let (mut looks, mut quiet, mut expected) = (0, 0, exit::expected_guests());
    while looks < LOOKS || quiet < 2 {
        let found = look_for_guest();
        if found.is_some() {
            return found;
        }
        let before = core::mem::replace(&mut expected, exit::expected_guests());
        looks += 1;
        quiet = if before == expected { quiet + 1 } else { 0 };
    }
    None
}

fn look_for_guest() -> Option<Guest> {
    let me = sys::own_process();
    numbers(c"/proc", |listed| {
        let id = number_of(listed).filter(|id| *id != me)?;
        // A fork's child may have its own counters where its parent has some.
        let has_same_mark = || {
            has_mark(listed)
                .map(|has| has && mark_of(&file_of(listed, "maps")) == mark_of(c"/proc/self/maps"))
        };
        // Nobody keeps memory for a keeper.
        if sys::same_memory(id, me).or_else(has_same_mark) != Some(true) || is_keeper(listed) {
            return None;
        }
        let watch = Pid::from_raw(id as i32).and_then(|id| pidfd_open(id, PidfdFlags::empty()).ok())?;
        Some(Guest { id, listed, watch })
    })
}

/// The first of the processes or threads in a directory of /proc for which there is an answer.
fn numbers<T>(directory: &CStr, mut of: impl FnMut(u32) -> Option<T>) -> Option<T> {
    let all = open(directory, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()).ok()?;
    let mut buffer = [const { MaybeUninit::uninit() }; 8192];
    let mut all = RawDir::new(all, &mut buffer);
    while let Some(entry) = all.next() {
        let number = entry.ok()?.file_name().to_str().ok().and_then(|name| name.parse().ok());
        if let Some(found) = number.and_then(&mut of) {
            return Some(found);
        }
    }
    None
}

/// Which file the mark is of in a process's memory, by its mappings in /proc.
fn mark_of(maps: &CStr) -> Option<u64> {
    let [start, end] = [0, 1].map(|end| MARK[end].load(Ordering::Relaxed));
    let (range, mut file) = (alloc::format!("{start:x}-{end:x} "), None);
    Maps::new().read(maps, |line| {
        if line.starts_with(range.as_bytes()) {
            file = proc::word(line, 4);
        }
    });
    file
}

/// Is it a keeper, by its name and because no signal reaches it? A program may be called so, too.
pub fn is_keeper(listed: u32) -> bool {
    // SIGKILL and SIGSTOP cannot be blocked.
    const UNBLOCKED: u64 = 1 << 8 | 1 << 18;
    let mut status = alloc::vec![0; proc::STATUS];
    let Some(status) = read_of(listed, "status", &mut status) else { return false };
    let blocked = proc::field(status, b"SigBlk:").and_then(|mask| u64::from_str_radix(mask, 16).ok());
    proc::field(status, b"Name:") == Some("pageout") && blocked.is_some_and(|mask| mask | UNBLOCKED == !0)
}

/// What we call the process that /proc calls so, which may list those of another namespace.
fn number_of(listed: u32) -> Option<u32> {
    if keeper::listed() == keeper::program() {
        return Some(listed);
    }
    let mut status = alloc::vec![0; proc::STATUS];
    let status = read_of(listed, "status", &mut status)?;
    proc::field(status, b"NSpid:")?.split_whitespace().last()?.parse().ok()
}

/// Has it ended, or become another?
pub fn is_gone() -> bool {
    let program = Pid::from_raw(keeper::program() as i32);
    let ended =
        program.and_then(|program| pidfd_open(program, PidfdFlags::empty()).ok()).is_none_or(|pidfd| {
            let now = Timespec { tv_sec: 0, tv_nsec: 0 };
            poll(&mut [PollFd::new(&pidfd, PollFlags::IN)], Some(&now)) == Ok(1)
        });
    ended || left() == Some(true)
}

/// `None`: another user's, which is not to be looked at.
fn has_mark(listed: u32) -> Option<bool> {
    let [start, end] = [0, 1].map(|end| MARK[end].load(Ordering::Relaxed));
    match lstat(file_of(listed, &alloc::format!("map_files/{start:x}-{end:x}")).as_c_str()) {
        Ok(_) => Some(true),
        Err(Errno::NOENT) => Some(false),
        Err(_) => None,
    }
}

/// The size of a program's code is no secret, and never changes.
fn has_same_code() -> Option<bool> {
    let pages = |path: &CStr| {
        let mut line = [0; 128];
        proc::word(proc::read(proc::opened(path)?, &mut line)?, 3)
    };
    Some(pages(&file("statm"))? == pages(c"/proc/self/statm")?)
}

/// Has this thread, or the first of this process, not ended?
fn goes_on(listed: u32) -> bool {
    const FLAGS: usize = 9;
    const PF_EXITING: u64 = 0x4;
    let mut line = [0; 512];
    let flags = read_of(listed, "stat", &mut line).and_then(|line| proc::word_of_stat(line, FLAGS));
    flags.is_some_and(|flags| flags & PF_EXITING == 0)
}

/// The path of what /proc has on the program.
pub fn file(name: &str) -> CString {
    file_of(keeper::listed(), name)
}

fn file_of(listed: u32, name: &str) -> CString {
    CString::new(alloc::format!("/proc/{listed}/{name}")).unwrap_or_default()
}

/// What /proc says of a process that it names as the calling one does.
fn read_of<'a>(id: u32, name: &str, into: &'a mut [u8]) -> Option<&'a [u8]> {
    proc::read(proc::opened(&file_of(id, name))?, into)
}
