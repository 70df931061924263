//! A batch of runs to write, put in the device's order and merged into few I/Os.
//!
//! A plan lives on the stack of the thread that writes (about 5 KiB) and owns nothing else. The merged
//! I/Os go out in whatever way the device has; [`Plan::settle`] then says of each *run* how it went.

use super::raw::{self, Part};
use super::{is_passing, Errno, Run};
use rustix::fd::BorrowedFd;

/// The most runs in one plan. Larger batches are cut.
pub(super) const BATCH: usize = 128;

/// Bytes beyond which an I/O takes no further run: devices cut larger ones anyhow, and two of this size
/// can go at the same time.
const MERGED_MAX: usize = 2 << 20;

/// Runs that lie next to each other on the device.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Io {
    /// Byte offset on the device.
    pub at: u64,
    /// Bytes of all its runs.
    pub len: usize,
    /// Its runs: places in the plan's order.
    first: usize,
    count: usize,
}

/// The order and the I/Os of at most [`BATCH`] runs.
pub(super) struct Plan {
    order: [u8; BATCH],
    parts: [Part; BATCH],
    ios: [Io; BATCH],
    io_count: usize,
}

impl Plan {
    /// Sorts and merges; looks at no more than [`BATCH`] runs.
    pub fn new(runs: &[Run]) -> Self {
        debug_assert!(runs.len() <= BATCH);
        let count = runs.len().min(BATCH);
        let mut plan =
            Self { order: [0; BATCH], parts: [(0, 0); BATCH], ios: [Io::default(); BATCH], io_count: 0 };
        for (place, entry) in plan.order[..count].iter_mut().enumerate() {
            *entry = place as u8;
        }
        plan.order[..count].sort_unstable_by_key(|&entry| runs[entry as usize].at);
        for place in 0..count {
            let run = runs[plan.order[place] as usize];
            plan.parts[place] = (run.address, run.len);
            if let Some(io) = plan.io_count.checked_sub(1).map(|last| &mut plan.ios[last]) {
                if io.at + io.len as u64 == run.at && io.len + run.len <= MERGED_MAX {
                    io.len += run.len;
                    io.count += 1;
                    continue;
                }
            }
            plan.ios[plan.io_count] = Io { at: run.at, len: run.len, first: place, count: 1 };
            plan.io_count += 1;
        }
        plan
    }

    /// The I/Os in the device's order.
    pub fn ios(&self) -> &[Io] {
        &self.ios[..self.io_count]
    }

    /// Bytes of all I/Os.
    pub fn len(&self) -> usize {
        self.ios().iter().map(|io| io.len).sum()
    }

    /// The memory of an I/O.
    pub fn parts(&self, io: &Io) -> &[Part] {
        &self.parts[io.first..io.first + io.count]
    }

    /// Turns the outcome of an I/O, the bytes written, into the results of its runs.
    ///
    /// What a short or failed I/O left is written again run by run, so that a bad sector fails the run
    /// that it lies in and no neighbour.
    ///
    /// # Safety
    /// The memory of the runs is readable.
    pub unsafe fn settle(
        &self,
        fd: BorrowedFd<'_>,
        io: &Io,
        outcome: Result<usize, Errno>,
        runs: &[Run],
        results: &mut [Result<(), Errno>],
    ) {
        let mut written = outcome.unwrap_or(0);
        let alone = io.count == 1;
        for &entry in &self.order[io.first..io.first + io.count] {
            let run = runs[entry as usize];
            results[entry as usize] = match outcome {
                _ if written >= run.len => {
                    written -= run.len;
                    Ok(())
                }
                Err(errno) if alone && !is_passing(errno) => Err(errno),
                _ => {
                    written = 0;
                    // SAFETY: the caller's promise.
                    unsafe { raw::write_all(fd, run.at, &[(run.address, run.len)]) }
                }
            };
        }
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::super::PAGE;
    use super::*;
    use rustix::fd::AsFd;

    #[test]
    fn what_fails_for_want_of_memory_is_written_once_more() {
        let file = rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let bytes = [7u8; PAGE];
        let runs = [Run { at: 0, address: bytes.as_ptr() as usize, len: PAGE }];
        let plan = Plan::new(&runs);
        for (errno, goes) in [(Errno::NOMEM, Ok(())), (Errno::IO, Err(Errno::IO))] {
            let mut results = [Ok(())];
            // SAFETY: `bytes` outlive it.
            unsafe { plan.settle(file.as_fd(), &plan.ios()[0], Err(errno), &runs, &mut results) };
            assert_eq!(results, [goes]);
        }
        assert_eq!(rustix::fs::fstat(&file).unwrap().st_size, PAGE as i64);
    }
}
