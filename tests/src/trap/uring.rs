//! io_uring with registered buffers in memory that the engine would like to evict: the buffers are
//! pinned for as long as they are registered, and must not be moved.

use super::load::{Churn, Dice};
use super::span::{Span, BLOCK, PAGE};
use super::{sys, Ctx, Outcome, Stop, Trap};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

pub const TRAPS: &[Trap] =
    &[Trap::new("uring-fixed", "io_uring with registered buffers in managed memory", uring_fixed)];

const OP_READ_FIXED: u8 = 4;
const OP_WRITE_FIXED: u8 = 5;
const OFFSET_SQ_RING: i64 = 0;
const OFFSET_CQ_RING: i64 = 0x800_0000;
const OFFSET_SQES: i64 = 0x1000_0000;
const ENTER_GETEVENTS: u32 = 1;
const REGISTER_BUFFERS: u32 = 0;

#[repr(C)]
#[derive(Default)]
struct Offsets {
    head: u32,
    tail: u32,
    ring_mask: u32,
    ring_entries: u32,
    /// Flags, dropped and array of the submission ring; overflow, cqes and flags of the other.
    rest: [u32; 4],
    more: [u32; 2],
}

#[repr(C)]
#[derive(Default)]
struct Params {
    sq_entries: u32,
    cq_entries: u32,
    flags: [u32; 8],
    sq: Offsets,
    cq: Offsets,
}

#[repr(C)]
#[derive(Default)]
struct Entry {
    opcode: u8,
    flags: u8,
    priority: u16,
    fd: i32,
    offset: u64,
    address: u64,
    len: u32,
    op_flags: u32,
    user_data: u64,
    buffer: u16,
    rest: [u16; 11],
}

/// A ring for one request at a time.
struct Ring {
    fd: OwnedFd,
    params: Params,
    submissions: Span,
    completions: Span,
    entries: Span,
}

impl Ring {
    fn new() -> Result<Self, Stop> {
        let mut params = Params::default();
        // SAFETY: the kernel writes no more than the structure; the new descriptor is nobody else's.
        let fd = unsafe {
            match libc::syscall(libc::SYS_io_uring_setup, 4, &raw mut params) {
                -1 => {
                    let why = std::io::Error::last_os_error();
                    return Err(Stop::Skip(format!("io_uring is refused: {why}")));
                }
                fd => OwnedFd::from_raw_fd(fd as i32),
            }
        };
        let map = |offset| {
            let flags = libc::MAP_SHARED | libc::MAP_POPULATE;
            // SAFETY: new memory of the ring's.
            let at =
                unsafe { libc::mmap(std::ptr::null_mut(), PAGE, sys::RW, flags, fd.as_raw_fd(), offset) };
            if at == libc::MAP_FAILED {
                return Err(Stop::Wrong(format!("mmap of a ring: {}", std::io::Error::last_os_error())));
            }
            Ok(Span::new(at as usize, PAGE))
        };
        let (submissions, completions, entries) =
            (map(OFFSET_SQ_RING)?, map(OFFSET_CQ_RING)?, map(OFFSET_SQES)?);
        Ok(Ring { fd, params, submissions, completions, entries })
    }

    fn register(&self, buffers: &[libc::iovec]) -> Outcome {
        // SAFETY: the vectors name memory of ours that stays.
        let r = unsafe {
            libc::syscall(
                libc::SYS_io_uring_register,
                self.fd.as_raw_fd(),
                REGISTER_BUFFERS,
                buffers.as_ptr(),
                buffers.len(),
            )
        };
        match r {
            -1 if sys::errno() == libc::ENOMEM => {
                Err(Stop::Skip("too little memory may be locked for io_uring's buffers".into()))
            }
            r => sys::ret("io_uring_register", r).map(drop),
        }
    }

    fn word(ring: Span, offset: u32) -> &'static AtomicU32 {
        // SAFETY: the kernel put a word there; rings stay mapped until the process ends.
        unsafe { &*((ring.start + offset as usize) as *const AtomicU32) }
    }

    /// Runs one request to its end.
    fn run(&self, opcode: u8, fd: i32, span: Span, offset: usize, buffer: u16) -> Outcome {
        let entry = Entry {
            opcode,
            fd,
            offset: offset as u64,
            address: span.start as u64,
            len: span.len as u32,
            buffer,
            ..Entry::default()
        };
        let (sq, cq) = (&self.params.sq, &self.params.cq);
        let tail = Ring::word(self.submissions, sq.tail);
        let mask = Ring::word(self.submissions, sq.ring_mask).load(Ordering::Relaxed);
        let index = tail.load(Ordering::Relaxed) & mask;
        // SAFETY: the entry is free: only one request is under way.
        unsafe { self.entries.as_ptr::<Entry>().add(index as usize).write_volatile(entry) };
        Ring::word(self.submissions, sq.rest[2] + 4 * index).store(index, Ordering::Relaxed);
        tail.fetch_add(1, Ordering::Release);
        // SAFETY: one entry is ready.
        let r = unsafe {
            let fd = self.fd.as_raw_fd();
            libc::syscall(libc::SYS_io_uring_enter, fd, 1, 1, ENTER_GETEVENTS, 0, 0)
        };
        sys::ret("io_uring_enter", r)?;
        let head = Ring::word(self.completions, cq.head);
        while head.load(Ordering::Relaxed) == Ring::word(self.completions, cq.tail).load(Ordering::Acquire) {
            std::thread::yield_now();
        }
        let mask = Ring::word(self.completions, cq.ring_mask).load(Ordering::Relaxed);
        let completion = cq.rest[1] + 16 * (head.load(Ordering::Relaxed) & mask);
        let result = Ring::word(self.completions, completion + 8).load(Ordering::Relaxed) as i32;
        head.fetch_add(1, Ordering::Release);
        if result != span.len as i32 {
            return Err(Stop::Wrong(format!("an io_uring request of {} bytes gave {result}", span.len)));
        }
        Ok(())
    }
}

fn uring_fixed(ctx: &Ctx) -> Outcome {
    let ring = Ring::new()?;
    let churn = Churn::start(ctx.half())?;
    let field = sys::map_aligned(ctx.half(), BLOCK)?;
    field.fill(1);
    // Four buffers of 256 KiB, registered when their pages are out, spread over the field.
    let buffers: Vec<Span> =
        field.pieces(field.len / 4 / PAGE * PAGE).map(|piece| piece.part(3 * PAGE, 256 << 10)).collect();
    let vectors: Vec<_> =
        buffers.iter().map(|b| libc::iovec { iov_base: b.as_ptr(), iov_len: b.len }).collect();
    ring.register(&vectors)?;
    let file = sys::scratch_file(libc::O_DIRECT).or_else(|_| sys::scratch_file(0))?;
    let deadline = ctx.deadline();
    let mut dice = Dice::new(5);
    let mut generation = 1;
    while Instant::now() < deadline {
        generation += 1;
        let (from, to) = (dice.roll(4), dice.roll(4));
        let at = dice.roll(16) * PAGE;
        buffers[from].fill(generation);
        ring.run(OP_WRITE_FIXED, file.as_raw_fd(), buffers[from], at, from as u16)?;
        std::thread::sleep(std::time::Duration::from_millis(5));
        ring.run(OP_READ_FIXED, file.as_raw_fd(), buffers[to], at, to as u16)?;
        buffers[to].check_as(buffers[from].start, generation)?;
    }
    buffers.iter().for_each(|buffer| buffer.fill(1));
    churn.end()?;
    field.check(1)
}
