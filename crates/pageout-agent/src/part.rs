//! The process's part of its run's limit: says what it uses, learns what it may use. See `pageout::tree`.

use crate::{fork, memory};
use pageout::kernel::{Kernel, Linux, Statm};
use pageout::space::PAGE;
use pageout::tree::{smallest, Seat, Tree, TREE_BYTES};
use rustix::fd::OwnedFd;
use rustix::fs::{open, Mode, OFlags};
use rustix::io::{pread, Errno};

/// Share of the limit at which the engines of a tree take up their work, in percent.
const TAKE_UP_PERCENT: u64 = 80;
/// How often (ns) is counted what is shared since a fork; less often where the count takes long: it walks all pages.
const COUNT_EVERY: u64 = 200_000_000;
const COUNT_SHARE: u64 = 50;

/// The process among the others.
pub struct Part {
    /// None where all seats were taken: such a process has the limit for itself.
    place: Option<(&'static Tree, &'static Seat)>,
    limit: u64,
    /// Of what is resident, the part that is counted elsewhere: pages shared since a fork, in bytes.
    elsewhere: u64,
    rollup: Option<OwnedFd>,
    next_count: u64,
    /// What others use, as of the last look.
    others: u64,
}

impl Part {
    /// The part of the process in `seat`, if it has one, of `limit` bytes. `now`: what is resident.
    ///
    /// # Errors
    /// The kernel's, where there is no memory.
    pub fn new(tree: &OwnedFd, seat: Option<usize>, limit: u64, now: Statm) -> Result<Self, Errno> {
        let tree = memory::map_shared(tree, TREE_BYTES)?;
        // SAFETY: any bytes are a valid tree; it stays mapped.
        let tree: &'static Tree = unsafe { &*(tree as *const Tree) };
        let rollup = open(c"/proc/self/smaps_rollup", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty());
        Ok(Self {
            place: seat.map(|seat| (tree, tree.seat(seat))),
            limit,
            // All that a fork's child begins with is its parent's.
            elsewhere: if fork::is_child() { own(now) } else { 0 },
            rollup: rollup.ok(),
            next_count: 0,
            others: 0,
        })
    }

    /// Says what is resident, and whether the process is `short` of memory; returns how much of it there may be, in
    /// bytes.
    pub fn look(&mut self, now: Statm, short: bool, kernel: &Linux) -> u64 {
        let Some((tree, seat)) = self.place else { return self.limit };
        let own = own(now);
        if fork::shares() {
            let begun = kernel.now();
            if begun >= self.next_count && tree.resident() >= self.threshold() {
                self.elsewhere = self.count();
                self.next_count = begun + COUNT_EVERY.max(COUNT_SHARE * (kernel.now() - begun));
            }
        }
        let elsewhere = self.elsewhere.min(own);
        seat.tell(own - elsewhere, own, short);
        let (others, allowance) = tree.look(seat, self.limit);
        self.others = others;
        allowance + elsewhere
    }

    /// Of what is resident, what others have as well.
    fn count(&self) -> u64 {
        let mut text = [0u8; 2048];
        let n = self.rollup.as_ref().and_then(|file| pread(file, &mut text, 0).ok()).unwrap_or(0);
        let text = &text[..n];
        field(text, b"\nAnonymous:").saturating_sub(field(text, b"\nPss_Anon:"))
    }

    fn threshold(&self) -> u64 {
        self.limit / 100 * TAKE_UP_PERCENT
    }

    /// Is it time for the engine? Memory is getting short, and the process has enough to give.
    pub fn is_due(&self, now: Statm) -> bool {
        let resident = (now.resident * PAGE) as u64;
        let threshold = self.threshold();
        self.others + resident >= threshold && resident >= smallest(self.limit)
    }

    /// How much may grow before it is time for the engine, or all together are over the limit. Where others use nearly
    /// all, a process is let alone while it is small, the more so the longer (`still`: looks) it stays as it is.
    pub fn left(&self, now: Statm, still: u32) -> u64 {
        let resident = (now.resident * PAGE) as u64;
        let all = self.limit.saturating_sub(self.others + resident);
        all.max(smallest(self.limit).saturating_sub(resident) << still.min(4))
    }

    /// Leaves the seat.
    pub fn leave(&self) {
        if let Some((_, seat)) = self.place {
            seat.clear();
        }
    }
}

/// What is the process's own: all but files and memory shared on purpose.
fn own(now: Statm) -> u64 {
    (now.resident.saturating_sub(now.shared) * PAGE) as u64
}

/// The number of KiB behind `name`, in bytes.
fn field(text: &[u8], name: &[u8]) -> u64 {
    let Some(at) = text.windows(name.len()).position(|window| window == name) else { return 0 };
    let number = text[at + name.len()..].iter().skip_while(|byte| **byte == b' ');
    let digits = number.take_while(|byte| byte.is_ascii_digit());
    digits.fold(0, |n, byte| n * 10 + u64::from(byte - b'0')) << 10
}
