//! A clock that goes while the program runs. What does not run takes no memory and need not be looked at: in a tree of
//! many processes most rest, and those that run share the processors.

use crate::sys;
use linux_raw_sys::general as raw;
use rustix::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};
use rustix::time::{clock_getres, ClockId};

/// What a clock rings by; no handler, and blocked as all are.
const SIGNAL: u64 = 64;
/// In the kernel's number for a process's clock: time on a processor, to the nanosecond.
const SCHEDULED: u32 = 2;

/// The clock of a process's time on processors.
pub struct Clock {
    number: u32,
    timer: usize,
    rings: OwnedFd,
    /// The kernel looks at it so seldom (ns).
    tick: u64,
    /// For how long the program had run when that was last asked, and when that was.
    asked: Option<(u64, u64)>,
}

impl Clock {
    /// That of `program`. `None`: the kernel does not give it.
    pub fn of(program: u32) -> Option<Self> {
        let clock = !program << 3 | SCHEDULED;
        // `struct sigevent`: a value, the signal and how to tell of it (by the signal), nothing more.
        let event = [0, SIGNAL, 0, 0, 0, 0, 0, 0];
        let (mut timer, mask) = (0i32, 1u64 << (SIGNAL - 1));
        // SAFETY: all pointers are to what the calls take; the descriptor is nobody else's.
        unsafe {
            let flags = (raw::O_NONBLOCK | raw::O_CLOEXEC) as usize;
            let rings =
                sys::call(raw::__NR_signalfd4, usize::MAX, &raw const mask as usize, 8, flags).ok()?;
            let rings = OwnedFd::from_raw_fd(rings as i32);
            let at = &raw mut timer as usize;
            sys::call(raw::__NR_timer_create, clock as usize, event.as_ptr() as usize, at, 0).ok()?;
            let tick = clock_getres(ClockId::MonotonicCoarse).tv_nsec as u64;
            Some(Self { number: clock, timer: timer as usize, rings, tick, asked: None })
        }
    }

    /// Rings when the program has run for `nanoseconds` from now. False: the clock is too coarse for that.
    pub fn set(&self, nanoseconds: u64) -> bool {
        // It may ring a tick late.
        nanoseconds >= 3 * self.tick && self.arm(nanoseconds - self.tick)
    }

    /// Rings at the first tick that finds the program running.
    pub fn set_at_once(&self) {
        self.arm(1);
    }

    fn arm(&self, nanoseconds: u64) -> bool {
        let time = [0, 0, 0, nanoseconds];
        // SAFETY: `struct itimerspec`: no interval, and a time under a second.
        unsafe { sys::call(raw::__NR_timer_settime, self.timer, 0, time.as_ptr() as usize, 0).is_ok() }
    }

    /// For how long the program has run since this was last asked, and how long ago that was, in ns; it is `now` by the clock
    /// that goes always. `None`: nobody knows.
    pub fn ran(&mut self, now: u64) -> Option<(u64, u64)> {
        let asked = self.now().map(|run| (run, now));
        let ((before, then), (run, now)) = core::mem::replace(&mut self.asked, asked).zip(asked)?;
        Some((run.saturating_sub(before), now - then))
    }

    /// For how long it has run, in ns.
    fn now(&self) -> Option<u64> {
        let mut time = [0u64; 2];
        // SAFETY: `struct timespec`.
        let read =
            unsafe { sys::call(raw::__NR_clock_gettime, self.number as usize, &raw mut time as usize, 0, 0) };
        read.ok().map(|_| time[0] * 1_000_000_000 + time[1])
    }

    /// Can be read once it has rung.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.rings.as_fd()
    }

    /// It is quiet again.
    pub fn hush(&self) {
        let _ = rustix::io::read(&self.rings, &mut [0u8; 128]);
    }
}

impl Drop for Clock {
    fn drop(&mut self) {
        // SAFETY: takes a number.
        let _ = unsafe { sys::call(raw::__NR_timer_delete, self.timer, 0, 0, 0) };
    }
}
