//! Who tells whether a signal was for all of us or for run alone.
//!
//! A signal that a process sends to run goes on to the program. One that it sends to the process group, or to each of a control
//! group, has reached the program without us, and would come twice: some take a second SIGINT for "at once". Nothing in a
//! signal says which it was, so there is a process beside us, of the same groups, that nobody sends a signal by itself: what
//! it gets all got.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use crate::sys::{self, Signal};

/// Between the two of one sender there may be so much time: who ends a control group sends to one after the other.
const APART: Duration = Duration::from_millis(20);
/// What came so long before is another: in ticks.
const BEFORE: u64 = 10;

/// When ([`sys::ticks`]) each signal came last.
type Seen = [AtomicU64; 65];

/// The process. It ends with us.
#[derive(Debug)]
pub struct Witness {
    pid: i32,
    seen: &'static Seen,
    /// Signals that are to be judged, in their order, and when they came.
    waiting: Vec<(Signal, Instant, u64)>,
}

impl Witness {
    /// With the signals blocked that the caller has blocked. `None`: there is no room for it.
    pub fn start() -> Option<Self> {
        let seen = sys::shared(size_of::<Seen>()).ok()?.cast::<Seen>();
        // SAFETY: zeros are valid for it, and it is never unmapped.
        let seen = unsafe { &*seen };
        let me = std::process::id() as i32;
        let command_line = sys::command_line();
        // SAFETY: the child makes system calls only, as there may be other threads here.
        match unsafe { libc::fork() } {
            0 => watch(me, seen, command_line),
            pid => (pid > 0).then(|| Self { pid, seen, waiting: Vec::new() }),
        }
    }

    /// A signal that a process has sent.
    pub fn ask(&mut self, signal: Signal) {
        self.waiting.push((signal, Instant::now(), sys::ticks()));
    }

    /// Is it the process of this number?
    pub fn is(&self, pid: i32) -> bool {
        self.pid == pid
    }

    /// Somebody has ended it, and the caller has waited for it: another may have its number. What was to be judged.
    pub fn has_ended(mut self) -> Vec<Signal> {
        let waiting = std::mem::take(&mut self.waiting);
        std::mem::forget(self);
        waiting.into_iter().map(|(signal, ..)| signal).collect()
    }

    /// When the next is judged.
    pub fn due_in(&self) -> Option<Duration> {
        self.waiting.first().map(|(_, came, _)| APART.saturating_sub(came.elapsed()))
    }

    /// The next of those that can be judged, if it was for us alone.
    pub fn next_for_us(&mut self) -> Option<Signal> {
        while self.due_in().is_some_and(|due| due.is_zero()) {
            let (signal, _, at) = self.waiting.remove(0);
            if !self.has_seen(signal.number, at) {
                return Some(signal);
            }
        }
        None
    }

    /// Did it get that signal, too, by now and not long before `at`?
    fn has_seen(&self, number: i32, at: u64) -> bool {
        let seen = self.seen[number as usize].load(Relaxed);
        // Or it has had no time yet.
        let is_pending = || {
            let status = sys::text_of(format!("/proc/{}/status", self.pid)).unwrap_or_default();
            let pending = status.lines().find_map(|line| line.strip_prefix("ShdPnd:"));
            let pending = pending.and_then(|bits| u64::from_str_radix(bits.trim(), 16).ok());
            pending.is_some_and(|bits| bits & 1 << (number - 1) != 0)
        };
        seen + BEFORE >= at || is_pending()
    }
}

impl Drop for Witness {
    fn drop(&mut self) {
        sys::kill(self.pid, libc::SIGKILL);
        // SAFETY: a child of ours; nothing is written.
        unsafe { libc::waitpid(self.pid, std::ptr::null_mut(), 0) };
    }
}

/// The witness: nothing stays open in it, and who looks for run by its name or its command does not find it.
fn watch(parent: i32, seen: &Seen, [start, end]: [usize; 2]) -> ! {
    // SAFETY: these take numbers and a string; and what the kernel wrote our arguments to, nobody reads any more.
    unsafe {
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
        libc::prctl(libc::PR_SET_NAME, c"witness".as_ptr());
        libc::close_range(0, u32::MAX, 0);
        std::ptr::write_bytes(start as *mut u8, 0, end.saturating_sub(start));
    }
    // SAFETY: takes nothing.
    while unsafe { libc::getppid() } == parent {
        let all = !0u64;
        // SAFETY: a set of signals as the kernel has it, of this size; nothing is written.
        let got =
            unsafe { libc::syscall(libc::SYS_rt_sigtimedwait, &raw const all, 0, 0, size_of_val(&all)) };
        if let Some(seen) = usize::try_from(got).ok().and_then(|number| seen.get(number)) {
            seen.store(sys::ticks(), Relaxed);
        }
    }
    // SAFETY: ends the process.
    unsafe { libc::_exit(0) }
}
