//! A device for tests that fails, tears and delays on command, by countdown, by place or by seed.
//!
//! It stands before another device, usually memory, and owns the rules. Each run that is written and each
//! call otherwise is one operation; the first rule that strikes decides what happens to it. The same seed
//! and the same operations in the same order give the same faults.
//!
//! Rules are looked up under a lock that is not held across I/O or a delay. Reads take it too, so this
//! device is not fit for signal handlers.

use super::{Device, Errno, FileDevice, OpenError, Run};
use crate::kernel::sim::splitmix;
use crate::sync::{Lock, OTHER_LOCKS};
use alloc::vec::Vec;
use core::time::Duration;
use rustix::thread::{nanosleep, NanosleepRelativeResult, Timespec};

/// What a rule is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// [`Device::read_vectored`].
    Read,
    /// Each run of [`Device::write_batch`].
    Write,
    /// [`Device::discard`].
    Discard,
}

/// When a rule strikes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    /// Once: lets this many operations pass and takes the next.
    After(u64),
    /// Lets this many operations pass and takes all that follow: the device has died.
    Since(u64),
    /// Whenever the operation touches the byte at this offset: a bad sector.
    At(u64),
    /// By chance, in so many of 65536 operations.
    Chance(u32),
}

/// What happens to the operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Nothing is done, and the error says so.
    Fail(Errno),
    /// The first half is done, and the error reported.
    Tear(Errno),
    /// The first half is done, and success reported.
    TearSilently,
    /// Everything is done, this much later.
    Delay(Duration),
}

/// A rule: which operations it takes, when, and what it does to them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rule {
    /// The operations it is for.
    pub operation: Operation,
    /// When it strikes.
    pub when: When,
    /// What it does.
    pub fault: Fault,
}

struct State {
    rules: Vec<Rule>,
    random: u64,
    struck: u64,
}

/// A device that behaves as its rules say and otherwise as the device behind it.
pub struct FaultyDevice<D = FileDevice> {
    inner: D,
    state: Lock<State>,
}

impl FaultyDevice {
    /// Memory of `size` bytes behind rules of which there are none yet.
    pub fn memory(size: u64, seed: u64) -> Result<Self, OpenError> {
        Ok(Self::new(FileDevice::create_memory(size)?, seed))
    }
}

impl<D: Device> FaultyDevice<D> {
    /// Puts rules, of which there are none yet, before `inner`. It must take lengths of half a page, as
    /// [`FileDevice`] does, for a page to be torn.
    pub fn new(inner: D, seed: u64) -> Self {
        Self { inner, state: Lock::new(State { rules: Vec::new(), random: seed, struck: 0 }, &OTHER_LOCKS) }
    }

    /// Adds a rule, behind those that are there. Any thread, at any time.
    pub fn arm(&self, rule: Rule) {
        self.state.lock().rules.push(rule);
    }

    /// Takes all rules away.
    pub fn disarm(&self) {
        self.state.lock().rules.clear();
    }

    /// How often a rule has struck.
    pub fn struck(&self) -> u64 {
        self.state.lock().struck
    }

    /// The device behind the rules.
    pub fn inner(&self) -> &D {
        &self.inner
    }

    /// What happens to an operation on these bytes; sits out a delay.
    fn fate(&self, operation: Operation, at: u64, len: u64) -> Option<Fault> {
        let fault = self.state.lock().decide(operation, at, len);
        if let Some(Fault::Delay(time)) = fault {
            sleep(time);
            return None;
        }
        fault
    }

    /// # Safety
    /// As for [`Device::write_batch`].
    unsafe fn write(&self, run: Run) -> Result<(), Errno> {
        let (len, answer) = match self.fate(Operation::Write, run.at, run.len as u64) {
            Some(Fault::Fail(errno)) => return Err(errno),
            Some(Fault::Tear(errno)) => (run.len / 2, Err(errno)),
            Some(Fault::TearSilently) => (run.len / 2, Ok(())),
            Some(Fault::Delay(_)) | None => (run.len, Ok(())),
        };
        let mut result = [Ok(())];
        // SAFETY: the caller's promise.
        unsafe { self.inner.write_batch(&[Run { len, ..run }], &mut result) };
        result[0].and(answer)
    }
}

impl State {
    fn decide(&mut self, operation: Operation, at: u64, len: u64) -> Option<Fault> {
        let mut spent = None;
        let mut fault = None;
        for (place, rule) in self.rules.iter_mut().enumerate() {
            if rule.operation != operation {
                continue;
            }
            let strikes = match &mut rule.when {
                When::After(passes) | When::Since(passes) if *passes > 0 => {
                    *passes -= 1;
                    false
                }
                When::After(_) => {
                    if fault.is_none() {
                        spent = Some(place);
                    }
                    true
                }
                When::Since(_) => true,
                When::At(byte) => (at..at + len).contains(byte),
                When::Chance(of_65536) => splitmix(&mut self.random) & 0xffff < u64::from(*of_65536),
            };
            if strikes && fault.is_none() {
                fault = Some(rule.fault);
            }
        }
        if let Some(place) = spent {
            self.rules.remove(place);
        }
        self.struck += u64::from(fault.is_some());
        fault
    }
}

fn sleep(time: Duration) {
    let mut left = Timespec { tv_sec: time.as_secs() as i64, tv_nsec: i64::from(time.subsec_nanos()) };
    while let NanosleepRelativeResult::Interrupted(rest) = nanosleep(&left) {
        left = rest;
    }
}

impl<D: Device> Device for FaultyDevice<D> {
    unsafe fn read_vectored(&self, at: u64, parts: &[(usize, usize)]) -> Result<(), Errno> {
        let len: usize = parts.iter().map(|part| part.1).sum();
        let (mut left, answer) = match self.fate(Operation::Read, at, len as u64) {
            Some(Fault::Fail(errno)) => return Err(errno),
            Some(Fault::Tear(errno)) => (len / 2, Err(errno)),
            Some(Fault::TearSilently) => (len / 2, Ok(())),
            // SAFETY: the caller's promise.
            Some(Fault::Delay(_)) | None => return unsafe { self.inner.read_vectored(at, parts) },
        };
        let mut place = at;
        for &(address, len) in parts {
            let len = len.min(left);
            // SAFETY: the caller's promise.
            unsafe { self.inner.read_vectored(place, &[(address, len)]) }?;
            place += len as u64;
            left -= len;
        }
        answer
    }

    unsafe fn write_batch(&self, runs: &[Run], results: &mut [Result<(), Errno>]) {
        for (&run, result) in runs.iter().zip(results) {
            // SAFETY: the caller's promise.
            *result = unsafe { self.write(run) };
        }
    }

    fn discard(&self, at: u64, len: u64) -> Result<(), Errno> {
        match self.fate(Operation::Discard, at, len) {
            Some(Fault::Fail(errno)) => Err(errno),
            Some(Fault::Tear(errno)) => self.inner.discard(at, len / 2).and(Err(errno)),
            Some(Fault::TearSilently) => self.inner.discard(at, len / 2),
            Some(Fault::Delay(_)) | None => self.inner.discard(at, len),
        }
    }
}
