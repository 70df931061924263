//! Several writes in flight: a small io_uring of our own.
//!
//! Owns the ring's descriptor and its two mappings. One thread at a time uses a ring (the device's lock
//! sees to that); each use submits a plan's I/Os, waits for all of them and leaves nothing in flight, so
//! no memory is touched by the kernel after the call, whatever went wrong in it.
//!
//! A ring belongs to the process that made it: a forked child has the device's memory but must not feed
//! the parent's ring, so its mappings do not go into children and [`Uring::is_ours`] says no there. The
//! descriptor lies in the file table of the thread that made the ring, as the device's own does.
//!
//! When it pays, measured on a virtual disk (ext4, O_DIRECT, 2 CPUs, Linux 6.18) for 32 scattered runs by
//! `cargo test --release -p pageout --test device_batch -- --ignored --nocapture`: at 4 KiB 4 to 6 times as
//! fast as `pwritev` after `pwritev`, at 64 KiB about 3 times, at 256 KiB 1.4 times, from 512 KiB on the same.
//! Into tmpfs or the page cache it is at best as fast, often half. So the device uses it with O_DIRECT up to
//! 256 KiB. Where a write must allocate blocks the kernel gives it to worker threads of the ring's, which
//! appear among the process's threads (`iou-wrk`) and leave after seconds without work.
//!
//! The indices are shared with the kernel, not with threads: they are plain `core` atomics, since there is
//! nothing in them that a model could check.

use super::batch::Plan;
use super::Errno;
use core::ffi::c_void;
use core::mem::{size_of, MaybeUninit};
use core::ptr;
use core::sync::atomic::{AtomicU32, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};
use rustix::fd::{AsRawFd, BorrowedFd, OwnedFd};
use rustix::io_uring::{
    io_uring_enter, io_uring_params, io_uring_ptr, io_uring_setup, io_uring_sqe, io_uring_user_data,
    IoringEnterFlags, IoringFeatureFlags, IoringOp, IoringSetupFlags, IORING_OFF_SQES, IORING_OFF_SQ_RING,
};
use rustix::mm::{madvise, mmap, munmap, Advice, MapFlags, ProtFlags};
use rustix::process::{getpid, Pid};
use rustix::thread::sched_yield;

/// The most requests in flight: enough for an NVMe disk to run at full speed with 64 KiB requests.
const DEPTH: usize = 32;

/// What the kernel says of a request (`struct io_uring_cqe`).
#[repr(C)]
#[derive(Clone, Copy)]
struct Completion {
    user_data: u64,
    result: i32,
    flags: u32,
}

/// A mapping of the ring's.
struct Mapping {
    start: *mut c_void,
    len: usize,
}

impl Mapping {
    fn new(fd: &OwnedFd, offset: u64, len: usize) -> Result<Self, Errno> {
        let flags = MapFlags::SHARED | MapFlags::POPULATE;
        // SAFETY: a new mapping where the kernel has room.
        let start =
            unsafe { mmap(ptr::null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, flags, fd, offset) }?;
        let mapping = Self { start, len };
        // SAFETY: the mapping was made above; a child goes without it.
        unsafe { madvise(start, len, Advice::LinuxDontFork) }?;
        Ok(mapping)
    }

    /// The 32-bit word at a byte offset that the kernel named.
    fn word(&self, offset: u32) -> *const AtomicU32 {
        self.start.wrapping_byte_add(offset as usize) as *const AtomicU32
    }
}

/// A ring with its queues mapped.
pub(super) struct Uring {
    fd: OwnedFd,
    owner: Pid,
    rings: Mapping,
    requests: Mapping,
    submit_tail: *const AtomicU32,
    submit_mask: u32,
    complete_head: *const AtomicU32,
    complete_tail: *const AtomicU32,
    complete_mask: u32,
    completions: *const Completion,
}

// SAFETY: the pointers lead into the mappings that the ring owns; no thread is tied to them.
unsafe impl Send for Uring {}

/// Whether the ring can be used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum After {
    Usable,
    /// The kernel refuses it now (a seccomp filter came, the descriptor went): drop it.
    Broken,
}

impl Uring {
    /// Makes a ring; an error where io_uring is refused (sysctl, seccomp) or too old.
    pub fn new() -> Result<Self, Errno> {
        // SAFETY: a structure of integers and a null pointer, which all zeros is.
        let mut params: io_uring_params = unsafe { MaybeUninit::zeroed().assume_init() };
        // Completions run when this thread enters the kernel: it waits there anyhow, no interrupt is needed.
        params.flags = IoringSetupFlags::SUBMIT_ALL | IoringSetupFlags::COOP_TASKRUN;
        // SAFETY: the parameters are valid and outlive the call.
        let fd = unsafe { io_uring_setup(DEPTH as u32, &mut params) }?;
        if !params.features.contains(IoringFeatureFlags::SINGLE_MMAP | IoringFeatureFlags::NODROP) {
            return Err(Errno::NOSYS);
        }
        let (submit, complete) = (params.sq_off, params.cq_off);
        let submit_len = submit.array as usize + params.sq_entries as usize * size_of::<u32>();
        let complete_len = complete.cqes as usize + params.cq_entries as usize * size_of::<Completion>();
        let rings = Mapping::new(&fd, IORING_OFF_SQ_RING, submit_len.max(complete_len))?;
        let requests =
            Mapping::new(&fd, IORING_OFF_SQES, params.sq_entries as usize * size_of::<io_uring_sqe>())?;
        let ring = Self {
            owner: getpid(),
            submit_tail: rings.word(submit.tail),
            submit_mask: params.sq_entries - 1,
            complete_head: rings.word(complete.head),
            complete_tail: rings.word(complete.tail),
            complete_mask: params.cq_entries - 1,
            completions: rings.start.wrapping_byte_add(complete.cqes as usize).cast(),
            fd,
            rings,
            requests,
        };
        for place in 0..params.sq_entries {
            // Place n of the queue names request n, for good.
            // SAFETY: the array has `sq_entries` words within the mapping.
            unsafe { (*ring.rings.word(submit.array).add(place as usize)).store(place, Relaxed) };
        }
        Ok(ring)
    }

    /// Whether this process made the ring, and may use it.
    pub fn is_ours(&self) -> bool {
        getpid() == self.owner
    }

    /// Writes the I/Os of `plan` to `target`, up to `DEPTH` at a time, and waits for all of them.
    ///
    /// `outcomes` gets the bytes written or the error of each; `AGAIN` for one that was not tried.
    ///
    /// # Safety
    /// The memory that the plan names is readable.
    pub unsafe fn write(
        &mut self,
        target: BorrowedFd<'_>,
        plan: &Plan,
        outcomes: &mut [Result<usize, Errno>],
    ) -> After {
        let total = plan.ios().len();
        outcomes.fill(Err(Errno::AGAIN));
        // Each counts I/Os: put into the queue, taken from it by the kernel, answered.
        let (mut queued, mut taken, mut answered) = (0, 0, 0);
        while answered < total {
            while queued < total && queued - answered < DEPTH {
                self.queue(target, plan, queued);
                queued += 1;
            }
            let wanted = if queued == total { queued - answered } else { 1 };
            match self.enter(queued - taken, wanted) {
                Ok(count) => taken += count,
                Err(Errno::INTR) => {}
                Err(errno) => {
                    self.unqueue(queued - taken);
                    while answered < taken {
                        answered += self.reap(outcomes);
                        // Any system call lets this thread take note of completions.
                        sched_yield();
                    }
                    let short_of_memory = matches!(errno, Errno::AGAIN | Errno::BUSY | Errno::NOMEM);
                    return if short_of_memory { After::Usable } else { After::Broken };
                }
            }
            answered += self.reap(outcomes);
        }
        After::Usable
    }

    fn enter(&self, submit: usize, wait_for: usize) -> Result<usize, Errno> {
        // SAFETY: what was queued names memory that stays until it is answered.
        let taken =
            unsafe { io_uring_enter(&self.fd, submit as u32, wait_for as u32, IoringEnterFlags::GETEVENTS) };
        taken.map(|count| count as usize)
    }

    /// Puts I/O `number` of the plan into the queue, which has room.
    fn queue(&mut self, target: BorrowedFd<'_>, plan: &Plan, number: usize) {
        let io = &plan.ios()[number];
        let parts = plan.parts(io);
        // SAFETY: a structure of integers, null pointers and unions of those.
        let mut request: io_uring_sqe = unsafe { MaybeUninit::zeroed().assume_init() };
        request.fd = target.as_raw_fd();
        request.off_or_addr2.off = io.at;
        request.user_data = io_uring_user_data::from_u64(number as u64);
        if let [(address, len)] = *parts {
            request.opcode = IoringOp::Write;
            request.addr_or_splice_off_in.addr = io_uring_ptr::new(address as *mut c_void);
            request.len.len = len as u32;
        } else {
            request.opcode = IoringOp::Writev;
            request.addr_or_splice_off_in.addr = io_uring_ptr::new(parts.as_ptr() as *mut c_void);
            request.len.len = parts.len() as u32;
        }
        // SAFETY: the words and the request lie in the mappings; the kernel looks at neither before the
        // tail has moved and `enter` was called.
        unsafe {
            let tail = (*self.submit_tail).load(Relaxed);
            let place = (tail & self.submit_mask) as usize;
            self.requests.start.cast::<io_uring_sqe>().add(place).write(request);
            (*self.submit_tail).store(tail.wrapping_add(1), Release);
        }
    }

    /// Takes back the last `count` queued requests, which the kernel has not taken.
    fn unqueue(&mut self, count: usize) {
        // SAFETY: the word lies in the mapping; the kernel reads it in `enter` alone.
        unsafe {
            let tail = (*self.submit_tail).load(Relaxed);
            (*self.submit_tail).store(tail.wrapping_sub(count as u32), Release);
        }
    }

    /// Takes the answers that are there; how many.
    fn reap(&mut self, outcomes: &mut [Result<usize, Errno>]) -> usize {
        // SAFETY: the words and the completions lie in the mapping; the kernel has written those up to the
        // tail and writes none of them again before the head has passed.
        unsafe {
            let mut head = (*self.complete_head).load(Relaxed);
            let tail = (*self.complete_tail).load(Acquire);
            let count = tail.wrapping_sub(head) as usize;
            while head != tail {
                let completion = *self.completions.add((head & self.complete_mask) as usize);
                if let Some(outcome) = outcomes.get_mut(completion.user_data as usize) {
                    *outcome = match completion.result {
                        result if result < 0 => Err(Errno::from_raw_os_error(-result)),
                        result => Ok(result as usize),
                    };
                }
                head = head.wrapping_add(1);
            }
            (*self.complete_head).store(head, Release);
            count
        }
    }
}

impl Drop for Uring {
    fn drop(&mut self) {
        // In a forked child the mappings are not there, and something else may be in their place.
        if self.is_ours() {
            for mapping in [&self.rings, &self.requests] {
                // SAFETY: made by this ring, used by nobody else.
                let _ = unsafe { munmap(mapping.start, mapping.len) };
            }
        }
    }
}
