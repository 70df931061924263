//! The process's part of its run's limit: says what it uses, learns what it may use. See `pageout::tree`.

use crate::{fork, memory, proc, program, sys, wrap};
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use pageout::kernel::{Kernel, Linux, Statm};
use pageout::space::PAGE;
use pageout::tree::{smallest, Seat, Tree, View, TREE_BYTES};
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use rustix::time::ClockId;

/// Share of the limit at which the engines of a tree take up their work, in percent.
const TAKE_UP_PERCENT: u64 = 80;
/// How often (ns) is counted what is shared since a fork. The count walks all pages: between two is so many times as
/// long as it took, and while much changes, so many times.
const COUNT_EVERY: u64 = 200_000_000;
const COUNT_SHARE: u64 = 50;
const COUNT_SHARE_AT_MOST: u64 = 10;
/// Much, in bytes.
const COUNT_AFTER: u64 = 4 << 20;
/// As good as nothing.
const FEW_LEFT: u64 = 256 << 10;
/// While no count differs much from the one before it is up to so many times as long until the next: many that rest are not to
/// be walked through for nothing.
const MOST_PATIENCE: u64 = 4;
/// Who has no more than so much of files and of what is shared on purpose is not asked how much that is.
const FEW_SHARED: u64 = 4 << 20;
/// What each process fills with huge pages, in bytes, before it is looked at, where many begin in the same instant.
const AT_ONCE: u64 = 32 << 20;
const MIB: u64 = 1 << 20;

/// So many bytes over what the process may have (a quarter of a small limit) who takes memory is held up.
const HELD_UP_OVER: u64 = 8 << 20;
/// For how long, in ns for each MiB, if one process may grow, and at most: about as long as it takes to let that much leave. As
/// long again for each so many bytes over: where small mappings leave, or a CPU is slow, it takes longer.
const HELD_UP: u64 = 2_000_000;
const MOST_HELD_UP: u64 = 4 * HELD_UP;
const AGAIN_OVER: u64 = 24 << 20;
/// From so many bytes over on, each time it is so many more, twice as long, so often at most (a MiB a second), and back each time
/// it is so many less: no device is too slow, and the stated slack is 64 MiB. Not while what leaves finds no place.
const STEEP_OVER: u64 = 36 << 20;
const STEP: u64 = 256 << 10;
const MOST_STEPS: u64 = 7;
/// However much is taken at once, unless a MiB takes longer.
const HELD_UP_IN_ALL: u64 = 50_000_000;
/// So many bytes are paid for together.
const PAID_TOGETHER: u64 = 128 << 10;
/// How often (ns) who is held up looks whether he still is.
const LOOK_AGAIN: i64 = 250_000;

/// For how long (ns for each MiB) the program's threads are held up now.
static PENALTY: AtomicU64 = AtomicU64::new(0);
/// It does not help: who takes memory from `malloc` is held up as well. What comes from there may have been there before.
static IS_STEEP: AtomicBool = AtomicBool::new(false);
/// Bytes that were taken and not paid for.
static OWED: AtomicU64 = AtomicU64::new(0);

/// See [`IS_STEEP`].
#[inline]
pub fn is_steep() -> bool {
    IS_STEEP.load(Ordering::Relaxed)
}

/// A thread of the program takes so many bytes, by a mapping or from `malloc`. What is new is not registered before the next
/// look, and comes to be faster than anything leaves, by huge pages most of all. So while there is far too much he waits, as
/// under memory.high of a control group.
pub fn hold_up(bytes: usize) {
    // A filter may not allow to sleep.
    if PENALTY.load(Ordering::Relaxed) == 0 || wrap::is_filtered() {
        return;
    }
    let owed = OWED.fetch_add(bytes as u64, Ordering::Relaxed) + bytes as u64;
    if owed < PAID_TOGETHER {
        return;
    }
    OWED.store(0, Ordering::Relaxed);
    let most = || {
        let penalty = PENALTY.load(Ordering::Relaxed);
        (penalty.saturating_mul(owed) / MIB).min(HELD_UP_IN_ALL.max(penalty))
    };
    let begun = sys::time(ClockId::Monotonic);
    while sys::time(ClockId::Monotonic) - begun < most() {
        sys::nap(LOOK_AGAIN);
    }
}

/// Whoever maps memory is held up from here to the next look.
pub fn hold_all() {
    PENALTY.fetch_max(2 * HELD_UP, Ordering::Relaxed);
}

/// Nobody is held up before the next look.
pub fn let_go() {
    PENALTY.store(0, Ordering::Relaxed);
    IS_STEEP.store(false, Ordering::Relaxed);
}

/// The process among the others.
pub struct Part {
    /// None where all seats were taken: such a process has the limit for itself.
    place: Option<(&'static Tree, &'static Seat)>,
    limit: u64,
    /// Of what is resident, the part that is counted elsewhere: pages shared since a fork, in bytes. As it was at the
    /// last count, when this was the process's own memory and these its faults without I/O. What others took over since
    /// the count before that is believed at the next: until then they may not have counted.
    elsewhere: u64,
    found: u64,
    /// What of it was believed to be counted elsewhere at the last look.
    believed: u64,
    counted: (u64, u64),
    /// Forks until then: each shares anew.
    forks: u32,
    /// What is there that is shared on purpose, in bytes, and its part of that, at the last count. When it is counted again
    /// (ns), and when if much has changed: files and that were so much then.
    shared: (u64, u64),
    next_shared: u64,
    soonest_shared: u64,
    shared_then: u64,
    rollup: Option<OwnedFd>,
    stat: Option<OwnedFd>,
    status: Option<OwnedFd>,
    /// When it is counted again (ns), when if much has changed, and when if much has with others; how many these were at the last
    /// count, and what they had; and how many times as long as at first it is until the next.
    next_count: u64,
    soonest: u64,
    early: u64,
    alive: usize,
    others: u64,
    patience: u64,
    /// What was found at the last look.
    view: View,
    /// How often who takes memory is held up twice as long, and how much was too much when that last changed.
    steps: u64,
    step_at: u64,
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
        let mut part = Self {
            place: seat.map(|seat| (tree, tree.seat(seat))),
            limit,
            // All that a fork's child begins with is its parent's.
            elsewhere: if fork::is_child() { own(now) } else { 0 },
            found: 0,
            believed: 0,
            counted: (own(now), 0),
            forks: 0,
            shared: (0, 0),
            next_shared: 0,
            soonest_shared: 0,
            shared_then: 0,
            rollup: proc::opened(c"/proc/self/smaps_rollup"),
            stat: None,
            status: proc::opened(c"/proc/self/status"),
            next_count: 0,
            soonest: 0,
            early: 0,
            alive: 0,
            others: 0,
            patience: 1,
            view: View { others: 0, allowance: limit, smallest: smallest(limit, 1), processes: 1, alive: 1 },
            steps: 0,
            step_at: 0,
        };
        part.follow_program();
        Ok(part)
    }

    /// From here on the faults of whoever is the program now are counted.
    pub fn follow_program(&mut self) {
        self.stat = proc::opened(&program::file("stat"));
        self.counted.1 = self.faults();
    }

    /// Says what is resident, and whether the process is `short` of memory; returns how much of it there may be, in
    /// bytes.
    pub fn look(&mut self, now: Statm, short: bool, kernel: &Linux) -> u64 {
        let Some((tree, seat)) = self.place else { return self.limit };
        let own = own(now);
        let mut elsewhere = 0;
        if fork::shares() {
            if tree.resident() >= self.threshold() {
                self.count_in_time(own, kernel.now());
            }
            elsewhere = self.elsewhere.saturating_sub(self.changed(own)).min(own);
        }
        self.count_shared_in_time(now, kernel.now());
        let (_, part) = self.shared_now(now);
        seat.tell(own - elsewhere, own, short);
        seat.tell_fixed(part);
        self.view = tree.look(seat, self.limit, elsewhere > 0);
        self.believed = elsewhere;
        self.view.allowance + self.shared_out(now)
    }

    /// It has said that it is short of memory, and has no share of it yet.
    pub fn lacks_share(&self) -> bool {
        self.place.is_some_and(|(_, seat)| seat.is_short() && seat.share() == 0)
    }

    /// Of what was resident at the last look, `now`, what is counted in other processes, in bytes.
    pub fn shared_out(&self, now: Statm) -> u64 {
        self.believed + self.of_others(now)
    }

    /// So many bytes of the process cannot go, `files` of them of files or shared on purpose; how many of all processes together,
    /// with the files of this one.
    pub fn stuck(&self, bytes: u64, files: u64, now: Statm) -> u64 {
        let Some((tree, seat)) = self.place else { return bytes };
        // Of what is shared since a fork it is not known where it counts.
        seat.tell_stuck(bytes.saturating_sub(files).saturating_sub(self.believed));
        let (there, _) = self.shared_now(now);
        bytes.min(files).saturating_sub(there) + tree.stuck()
    }

    /// What is there that is shared on purpose, and its part of it: no more than there is of that and of files.
    fn shared_now(&self, now: Statm) -> (u64, u64) {
        let most = (now.shared * PAGE) as u64;
        (self.shared.0.min(most), self.shared.1.min(most))
    }

    /// Of that, the part of others, for whom it counts.
    fn of_others(&self, now: Statm) -> u64 {
        let (all, part) = self.shared_now(now);
        all.saturating_sub(part)
    }

    /// Counts what is shared on purpose, if it is time. Who is alone shares it with himself only, where it is mapped several
    /// times, as a collector does (ZGC); that matters near the limit.
    fn count_shared_in_time(&mut self, all: Statm, now: u64) {
        let most = (all.shared * PAGE) as u64;
        let has_changed = most.abs_diff(self.shared_then) > COUNT_AFTER;
        if !(now >= self.next_shared || has_changed && now >= self.soonest_shared) {
            return;
        }
        self.shared_then = most;
        let matters = self.view.alive > 1 || resident(all) >= self.threshold();
        if !matters || most <= FEW_SHARED {
            self.shared = (0, 0);
            return;
        }
        let spent = || sys::time(ClockId::ThreadCPUTime);
        let begun = spent();
        let [there] = fields(&self.status, [b"RssShmem:"]);
        // A walk over all pages.
        let [part] = if there > FEW_SHARED { fields(&self.rollup, [b"Pss_Shmem:"]) } else { [0] };
        self.shared = if part > 0 { (there, part) } else { (0, 0) };
        let cost = spent() - begun;
        self.soonest_shared = now + COUNT_SHARE_AT_MOST * cost;
        self.next_shared = now + COUNT_EVERY.max(COUNT_SHARE * cost);
    }

    /// So many bytes too much are there that can leave, and what leaves finds a place, or not (`has_place`): whether who takes
    /// memory is held up.
    pub fn tell_excess(&mut self, bytes: u64, has_place: bool) {
        if bytes < STEEP_OVER || !has_place {
            (self.steps, self.step_at) = (0, bytes);
        } else if bytes > self.step_at + STEP {
            (self.steps, self.step_at) = ((self.steps + 1).min(MOST_STEPS), bytes);
        } else if bytes + STEP < self.step_at {
            (self.steps, self.step_at) = (self.steps.saturating_sub(1), bytes);
        }
        let is_over = bytes > HELD_UP_OVER.min(self.limit / 4);
        let times = self.view.processes.min(2) as u64 + bytes / AGAIN_OVER;
        let penalty = (HELD_UP * times).min(MOST_HELD_UP) << self.steps;
        PENALTY.store(if is_over { penalty } else { 0 }, Ordering::Relaxed);
        IS_STEEP.store(self.steps > 0, Ordering::Relaxed);
    }

    /// What the process may have in any case, in bytes.
    pub fn smallest(&self) -> u64 {
        self.view.smallest
    }

    /// By so many bytes all together were over the limit at the last look.
    pub fn over(&self) -> u64 {
        let own = self.place.map_or(0, |(_, seat)| seat.used());
        (self.view.others + own + self.shared.1).saturating_sub(self.limit)
    }

    /// What each process of the tree may grow between two looks, if all together may grow by so many bytes.
    pub fn of_slack(&self, bytes: u64) -> u64 {
        bytes / self.view.processes as u64
    }

    /// Counts what is shared, if it is time.
    fn count_in_time(&mut self, own: u64, now: u64) {
        let forks = fork::forks();
        let changed = || forks != self.forks || self.changed(own) > COUNT_AFTER;
        let much = (self.elsewhere / 4).max(COUNT_AFTER);
        let others_changed = self.next_count != u64::MAX
            && (self.alive != self.view.alive || self.others.abs_diff(self.view.others) > much);
        let due =
            now >= self.next_count || now >= self.early && others_changed || now >= self.soonest && changed();
        if !due {
            return;
        }
        // On a busy machine the time that passes says nothing about what the count costs.
        let spent = || sys::time(ClockId::ThreadCPUTime);
        let begun = spent();
        let then = self.found;
        let before = match then {
            0 => u64::MAX,
            found => found.saturating_sub(self.changed(own)),
        };
        (self.counted, self.forks) = ((own, self.faults()), forks);
        (self.alive, self.others) = (self.view.alive, self.view.others);
        self.found = self.count();
        self.elsewhere = self.found.min(before);
        let cost = spent() - begun;
        self.soonest = now + COUNT_SHARE_AT_MOST * cost;
        // Who has said that it ends may have its memory still.
        let rests = !others_changed && self.found.abs_diff(then) < COUNT_AFTER;
        self.patience = if rests { (2 * self.patience).min(MOST_PATIENCE) } else { 1 };
        let wait = COUNT_EVERY.max(COUNT_SHARE * cost);
        (self.early, self.next_count) = (now + wait, now + self.patience * wait);
        if self.found < FEW_LEFT {
            // Nothing is, and nothing will be, before there is a fork.
            (self.elsewhere, self.next_count) = (0, u64::MAX);
        }
    }

    /// At most so many bytes that were shared at the last count are not any more: each copy on write is a fault that
    /// takes no new memory, and what has left may have been shared.
    fn changed(&self, own: u64) -> u64 {
        if self.elsewhere.max(self.found) == 0 {
            return 0;
        }
        let (before, faults) = self.counted;
        let faults = self.faults().saturating_sub(faults) * PAGE as u64;
        faults.saturating_sub(own.saturating_sub(before)) + before.saturating_sub(own)
    }

    /// The program's faults without I/O so far.
    fn faults(&self) -> u64 {
        let mut line = [0u8; 512];
        const MINFLT: usize = 10;
        let line = self.stat.as_ref().and_then(|file| proc::read(file, &mut line));
        line.and_then(|line| proc::word_of_stat(line, MINFLT)).unwrap_or(0)
    }

    /// Of what is resident, what others have as well.
    fn count(&self) -> u64 {
        let [all, part] = fields(&self.rollup, [b"Anonymous:", b"Pss_Anon:"]);
        all.saturating_sub(part)
    }

    fn threshold(&self) -> u64 {
        self.limit / 100 * TAKE_UP_PERCENT
    }

    /// Much of what is there is shared since a fork, and may become the process's own while it does nothing.
    pub fn shares_much(&self) -> bool {
        self.found.max(self.elsewhere) > COUNT_AFTER
    }

    /// Processes that are there.
    pub fn alive(&self) -> u64 {
        self.view.alive as u64
    }

    /// What all together use.
    fn used(&self, now: Statm) -> u64 {
        self.view.others + resident(now) - self.of_others(now).min(resident(now))
    }

    /// So many processes may take what is left before any of them looks again: others too, if it grows itself (`still`), as
    /// those do that were begun together. While more than half is used all look often.
    pub fn growers(&self, now: Statm, still: u32) -> u64 {
        if still == 0 && self.view.alive > 1 && self.used(now) < self.limit / 2 {
            2
        } else {
            1
        }
    }

    /// Is it time for the engine? Memory is getting short, and the process has enough to give.
    pub fn is_due(&self, now: Statm) -> bool {
        self.used(now) >= self.threshold() && resident(now) >= self.smallest()
    }

    /// May it not be left to each of those that are there to fill huge pages as fast as it can? If it `was` so, there must be
    /// twice as much.
    pub fn is_crowded(&self, now: Statm, was: bool) -> bool {
        let left = self.threshold().saturating_sub(self.used(now));
        self.alive() > 1 && left / self.alive() < if was { 2 * AT_ONCE } else { AT_ONCE }
    }

    /// How much may grow before it is time for the engine, or all together are over the limit. Where others use nearly
    /// all, a process is let alone while it is small, the more so the longer (`still`: looks) it stays as it is.
    pub fn left(&self, now: Statm, still: u32) -> u64 {
        let all = self.limit.saturating_sub(self.used(now));
        all.max(self.smallest().saturating_sub(resident(now)) << still.min(4))
    }

    /// Leaves the seat.
    pub fn leave(&self) {
        if let Some((_, seat)) = self.place {
            seat.clear();
        }
    }
}

/// The numbers of KiB behind these names in a file of /proc, in bytes.
fn fields<const N: usize>(file: &Option<OwnedFd>, names: [&[u8]; N]) -> [u64; N] {
    let mut text = alloc::vec![0; proc::STATUS];
    let text = file.as_ref().and_then(|file| proc::read(file, &mut text)).unwrap_or(&[]);
    names.map(|name| proc::bytes(text, name).unwrap_or(0))
}

/// What is the process's own: all but files and memory shared on purpose.
fn own(now: Statm) -> u64 {
    (now.resident.saturating_sub(now.shared) * PAGE) as u64
}

fn resident(now: Statm) -> u64 {
    (now.resident * PAGE) as u64
}
