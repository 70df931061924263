//! Who tells whether a signal was for all of us or for run alone.
//!
//! A signal that a process sends to run goes on to the program. One that it sends to the process group, or to each of a control
//! group, has reached the program without us, and would come twice: some take a second SIGINT for "at once". Nothing in a
//! signal says which it was, so there is a process beside us, of the same groups, that nobody sends a signal by itself: what
//! it gets all got.
//!
//! A program that makes a process group of its own (`timeout`, `setsid`) does not get what run's group gets, but still what each of
//! the control group does. While it has one there is a second such process, of another group than ours: what that gets
//! the program got.

use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::time::{Duration, Instant};

use crate::sys::{self, Signal};

/// Between the two of one sender there may be so much time: who ends a control group sends to one after the other.
const APART: Duration = Duration::from_millis(20);
/// The witness is looked at again so soon, while it is not asleep.
const AWAKE: Duration = Duration::from_millis(1);

/// When ([`sys::since_boot`]) each signal came last; and, as there is no signal 0, when the program began, or who looks was in
/// a group of its own.
type Seen = [AtomicU64; 65];

/// What is known of signals that came.
#[derive(Debug)]
pub struct Witness {
    /// Of our group.
    beside: Looker,
    /// Of another, once the program is.
    apart: Option<Looker>,
    /// Signals that are to be judged, in their order.
    waiting: Vec<Asked>,
    /// What came before ([`sys::since_boot`]) is not what is read next.
    since: u64,
    /// When run is to look, so that what came last is before that.
    settles: Option<Instant>,
}

/// A process that sees what comes. It ends with us.
#[derive(Debug)]
struct Looker {
    pid: i32,
    seen: &'static Seen,
}

impl Looker {
    /// With the signals blocked that the caller has blocked. `None`: there is no room for it.
    fn start(in_our_group: bool) -> Option<Self> {
        let seen = sys::shared(size_of::<Seen>()).ok()?.cast::<Seen>();
        // SAFETY: zeros are valid for it, and it is never unmapped.
        let seen = unsafe { &*seen };
        let me = std::process::id() as i32;
        let command_line = sys::command_line();
        // SAFETY: the child makes system calls only, as there may be other threads here.
        match unsafe { libc::fork() } {
            0 => watch(me, seen, in_our_group, command_line),
            pid if pid > 0 => Some(Self { pid, seen }),
            _ => {
                // SAFETY: nobody else has it.
                unsafe { libc::munmap(std::ptr::from_ref(seen).cast_mut().cast(), size_of::<Seen>()) };
                None
            }
        }
    }

    /// Has one of this number come since, or does it wait there? `pending`: what waits.
    fn has_seen(&self, number: i32, since: u64, pending: u64) -> bool {
        self.seen[number as usize].load(Acquire) >= since || pending & 1 << (number - 1) != 0
    }
}

impl Drop for Looker {
    fn drop(&mut self) {
        let _ = sys::kill(self.pid, libc::SIGKILL);
        // SAFETY: a child of ours; nothing is written.
        unsafe { libc::waitpid(self.pid, std::ptr::null_mut(), 0) };
    }
}

/// A signal, when it is judged, and what came before was another.
#[derive(Debug)]
struct Asked {
    signal: Signal,
    due: Instant,
    since: u64,
}

impl Witness {
    /// With the signals blocked that the caller has blocked. `None`: there is no room for it.
    pub fn start() -> Option<Self> {
        let beside = Looker::start(true)?;
        Some(Self { beside, apart: None, waiting: Vec::new(), since: 0, settles: None })
    }

    /// The program has a group of its own from now on; the number of a process that has begun.
    pub fn look_apart(&mut self) -> Option<i32> {
        if self.apart.is_some() {
            return None;
        }
        self.apart = Looker::start(false);
        self.apart.as_ref().map(|looker| looker.pid)
    }

    /// As soon as the program is there, which may be long before we go on, it gets what all get.
    pub fn note_beginning_of(&self, command: &mut Command) {
        let begun = &self.beside.seen[0];
        // SAFETY: the closure runs between fork and exec and does no more than to look at the clock.
        unsafe {
            command.pre_exec(move || {
                begun.store(sys::since_boot(), Release);
                Ok(())
            });
        }
    }

    /// Every signal has been read that came before ([`sys::since_boot`]). However late run is, what the witness got since then is
    /// the one that is read next, and what it got before is not.
    pub fn has_read(&mut self, before: u64) {
        self.since = self.since.max(before.saturating_sub(APART.as_nanos() as u64));
        self.settles = self.settles.filter(|at| *at > Instant::now());
    }

    /// One has been read: asked about, or known to be for all of us.
    pub fn came(&mut self) {
        self.settles = Some(Instant::now() + 2 * APART);
    }

    /// Is that one of all of us?
    pub fn ask(&mut self, signal: Signal) {
        let since = self.since.max(self.beside.seen[0].load(Acquire));
        self.waiting.push(Asked { signal, due: Instant::now() + APART, since });
    }

    /// Is it the process of this number that all goes by?
    pub fn is(&self, pid: i32) -> bool {
        self.beside.pid == pid
    }

    /// Somebody has ended the other, if this is its number, and the caller has waited for it.
    pub fn has_lost(&mut self, pid: i32) {
        self.apart.take_if(|looker| looker.pid == pid).into_iter().for_each(std::mem::forget);
    }

    /// Somebody has ended it, and the caller has waited for it: another may have its number. What was to be judged.
    pub fn has_ended(self) -> Vec<Signal> {
        std::mem::forget(self.beside);
        self.waiting.into_iter().map(|asked| asked.signal).collect()
    }

    /// Its sender has ended, and so has who would get the others. None: there is nothing from it to be judged.
    pub fn only_from(mut self, sender: i32) -> Option<Self> {
        self.waiting.retain(|asked| asked.signal.sender == Some(sender));
        (!self.waiting.is_empty()).then_some(self)
    }

    /// When to look again.
    pub fn due_in(&self) -> Option<Duration> {
        let judged = self.waiting.first().map(|asked| asked.due);
        let next = judged.into_iter().chain(self.settles).min()?;
        Some(next.saturating_duration_since(Instant::now()))
    }

    /// The next of those that can be judged, if it was for us alone, or for our group and `is_apart`, whom it was for, is of
    /// another.
    pub fn next_for_us(&mut self, is_apart: impl Fn(&Signal) -> bool) -> Option<Signal> {
        while let Some(first) = self.waiting.first_mut().filter(|asked| asked.due <= Instant::now()) {
            let looker = match is_apart(&first.signal) {
                true => self.apart.as_ref().filter(|looker| looker.seen[0].load(Acquire) != 0),
                false => Some(&self.beside),
            };
            // As long as there is none: better twice than never.
            let Some(looker) = looker else { return Some(self.waiting.remove(0).signal) };
            let status = sys::text_of(format!("/proc/{}/status", looker.pid)).unwrap_or_default();
            let field = |name| status.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
            let state = field("State:").unwrap_or_default();
            if state.starts_with('T') {
                // Stopped with all of us, and run has been continued alone. What was for all waits in it.
                first.due = Instant::now() + AWAKE;
                let _ = sys::kill(looker.pid, libc::SIGCONT);
                let continued = self.waiting.iter().position(|asked| asked.signal.number == libc::SIGCONT);
                return continued.map(|at| self.waiting.remove(at).signal);
            }
            // By now, and not before; or it waits there. In this order: what came before it was seen asleep, it has told of.
            let pending = field("ShdPnd:").and_then(|bits| u64::from_str_radix(bits, 16).ok()).unwrap_or(0);
            let has_seen = looker.has_seen(first.signal.number, first.since, pending);
            if !has_seen && state.starts_with(['R', 'D']) {
                first.due = Instant::now() + AWAKE;
                return None;
            }
            let asked = self.waiting.remove(0);
            self.came();
            if !has_seen {
                return Some(asked.signal);
            }
        }
        None
    }
}

/// The witness: nothing stays open or in use in it, and who looks for run by its name or its command does not find it.
fn watch(parent: i32, seen: &Seen, in_our_group: bool, [start, end]: [usize; 2]) -> ! {
    // SAFETY: these take numbers and a string; and what the kernel wrote our arguments to, nobody reads any more.
    unsafe {
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
        libc::close_range(0, u32::MAX, 0);
        libc::chdir(c"/".as_ptr());
        std::ptr::write_bytes(start as *mut u8, 0, end.saturating_sub(start));
    }
    let next = |patience: Option<&libc::timespec>| {
        let (all, patience) = (!0u64, patience.map_or(std::ptr::null(), std::ptr::from_ref));
        // SAFETY: a set of signals as the kernel has it, of this size, and a time, or none; nothing is written.
        let got = unsafe {
            libc::syscall(libc::SYS_rt_sigtimedwait, &raw const all, 0, patience, size_of_val(&all))
        };
        usize::try_from(got).ok()
    };
    if !in_our_group {
        // SAFETY: takes numbers.
        unsafe { libc::setpgid(0, 0) };
        // What came before was for our parent's group.
        while next(Some(&libc::timespec { tv_sec: 0, tv_nsec: 0 })).is_some() {}
        seen[0].store(sys::since_boot(), Release);
    }
    // SAFETY: takes a string.
    unsafe { libc::prctl(libc::PR_SET_NAME, c"witness".as_ptr()) };
    // SAFETY: takes nothing.
    while unsafe { libc::getppid() } == parent {
        if let Some(seen) = next(None).and_then(|number| seen.get(number)) {
            seen.store(sys::since_boot(), Release);
        }
    }
    // SAFETY: ends the process.
    unsafe { libc::_exit(0) }
}
