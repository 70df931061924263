//! The way in: read a run of slots into filled frames, MOVE the frames to the pages that wait.
//!
//! ```text
//! fetch    events shared, block lock: word Swapped → Busy for all of the window (others leave it alone)
//! read     no lock: a request for each run of slots, then the checksum of each page
//! arrive   events shared, block lock: still the same word? MOVE, Busy → Resident
//! ```
//! What the program gave up in the meantime is noticed by its changed word; its frame and slot are then
//! ours to give back. Allocates nothing.

use super::place::AROUND;
use super::swapout::Outgoing;
use crate::device::is_passing;
use crate::engine::{Engine, Swapin};
use crate::flaw::{makes, Flaw};
use crate::frame::{Parts, CHUNK, PARTS};
use crate::kernel::{Found, Kernel, Partial};
use crate::page::{Tag, Word};
use crate::space::{BlockState, BLOCK, BLOCK_PAGES, PAGE, UNIT_PAGES};
use crate::stats::Stats;
use crate::sync::atomic::{AtomicU64, Ordering::Relaxed};
use crate::sync::{zeros, Backoff};
use alloc::boxed::Box;
use rustix::io::Errno;

/// A MOVE that takes less has interrupted no other CPU.
const QUICK_MOVE_NS: u64 = 4_000;

/// So many pages take it little more time than one.
const FEW: usize = 4;
/// How often a page is read by itself while the device lacks what it may have in a moment: some ms.
const MOST_READS: usize = 100;
/// For so long (ns) after a run could not be read what is asked for comes in by itself: on a disk it takes half a minute to fail.
const ALONE_NS: u64 = 10_000_000_000;
/// How often it is tried to map what somebody waits for, before it is read once more: each time an event may have come.
const MOST_TRIES: usize = 64;

/// What one server has under way. Made once, a place for each page of a block; most requests are for a few.
pub struct Incoming {
    /// Which pages of the block, ascending.
    pages: Box<[u16]>,
    words: Box<[Word]>,
    sums: Box<[u128]>,
    good: Box<[bool]>,
    /// The device did not read it: the data may be there still.
    unread: Box<[bool]>,
    /// Nor what somebody waits for, but it only lacked memory, or time: it may in a moment.
    passing: bool,
    /// Pages that the last request brought in beside the one asked for.
    pub(crate) ahead: u16,
    pub(crate) outgoing: Outgoing,
}

/// Where the frames for a run come from.
#[expect(
    clippy::large_enum_variant,
    reason = "lives on the stack of one call; the fault path allocates nothing"
)]
enum Buffer {
    /// Small frames.
    Small(Parts),
    /// One huge frame.
    Huge(u32),
}

impl Buffer {
    /// The address of page `index`, and how many pages follow it there, itself included.
    fn locate<K: Kernel>(&self, engine: &Engine<K>, index: usize) -> (usize, usize) {
        match self {
            Buffer::Small(parts) => {
                let (frame, run) = parts.locate(index);
                (engine.frames.address(frame), run)
            }
            Buffer::Huge(huge) => (engine.frames.huge_address(*huge) + index * PAGE, BLOCK_PAGES - index),
        }
    }
}

/// The first `n` pages of what comes in, in a buffer; `asked`: the page of the block that somebody waits for.
struct Read<'a> {
    incoming: &'a Incoming,
    buffer: &'a Buffer,
    block_start: usize,
    n: usize,
    asked: Option<usize>,
}

impl Incoming {
    /// Empty.
    pub fn new() -> Self {
        Self {
            pages: zeros(BLOCK_PAGES),
            words: zeros(BLOCK_PAGES),
            sums: zeros(BLOCK_PAGES),
            good: zeros(BLOCK_PAGES),
            unread: zeros(BLOCK_PAGES),
            passing: false,
            ahead: 0,
            outgoing: Outgoing::new(),
        }
    }

    /// Notes the pages of `window` that are swapped, and gives their number; `index` is among them. Where another
    /// request costs more than the fault that it saves: those around `index` that lie on neighbouring slots.
    fn gather(&mut self, block: &BlockState, index: usize, window: (usize, usize), quick: bool) -> usize {
        let entry = block.word(index).payload();
        let swapped = |at: &usize| block.word(*at).tag() == Tag::Swapped;
        let continues = |at: &usize| {
            let word = block.word(*at);
            swapped(at) && word.payload().wrapping_sub(*at as u64) == entry.wrapping_sub(index as u64)
        };
        let (low, high) = if quick {
            window
        } else {
            let low = (window.0..index).rev().take_while(continues).last().unwrap_or(index);
            (low, (index..window.1).take_while(continues).last().unwrap_or(index) + 1)
        };
        let found = (low..high).filter(swapped);
        found.zip(&mut self.pages[..]).map(|(at, page)| *page = at as u16).count()
    }

    /// Keeps `count` of the `n` pages, as many of them as can be from `index` on.
    fn trim(&mut self, n: usize, count: usize, index: usize) {
        let at = self.pages[..n].partition_point(|page| (*page as usize) < index);
        let first = at.min(n - count);
        self.pages.copy_within(first..first + count, 0);
    }

    /// The place in the block of the page that is `i`-th.
    fn at(&self, i: usize) -> usize {
        self.pages[i] as usize
    }

    /// Is it still ours to map?
    fn is_mine(&self, i: usize, block: &BlockState) -> bool {
        block.word(self.at(i)) == self.words[i] || makes(Flaw::ArriveUnsure)
    }
}

impl Default for Incoming {
    fn default() -> Self {
        Self::new()
    }
}

/// Who wants a page to come in, and how.
#[derive(Debug, PartialEq, Eq, Clone, Copy)]
pub(crate) enum Urge {
    /// A fault, with what there is of frames.
    Asked,
    /// A fault; nothing comes in by smaller pieces than it could.
    Whole,
    /// Nobody yet: what cannot be read stays where it is.
    Ahead,
    /// Nobody yet, and by no smaller pieces.
    WholeAhead,
}

impl Urge {
    fn is_whole(self) -> bool {
        matches!(self, Self::Whole | Self::WholeAhead)
    }

    fn is_asked(self) -> bool {
        matches!(self, Self::Asked | Self::Whole)
    }
}

/// How an attempt to bring pages in ended.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Brought {
    /// The fault is answered; pages of the block were mapped up to here.
    Done(usize),
    /// Nobody asked, and the device could not read the page: it is where it was.
    Unread,
    /// An event is unread; it must be applied, then the fault is looked at again.
    Pending,
    /// Too few frames; some must be made.
    NoFrame,
    /// The block could come in whole, but there is no huge frame: one must be made.
    NoHuge,
}

/// Of pages to be mapped: how many were, whether by MOVE, and what stopped it.
pub(crate) type Mapped = (usize, bool, Option<Errno>);

/// Adds a time to a moving average of times.
fn average(of: &AtomicU64, ns: u64) {
    let before = of.load(Relaxed);
    of.store(before - before / 16 + ns / 16, Relaxed);
}

impl<K: Kernel> Engine<K> {
    /// Brings in the page `index` of a block, which is Swapped, with what else is swapped of `window` (pages of the
    /// block). No lock is held during I/O.
    pub(crate) fn bring_in(
        &self,
        incoming: &mut Incoming,
        block_start: usize,
        index: usize,
        window: (usize, usize),
        urge: Urge,
    ) -> Brought {
        incoming.ahead = 0;
        let whole = urge.is_whole();
        let window = if urge.is_asked() && self.reads_alone() { (index, index + 1) } else { window };
        let (n, buffer, all) = {
            let _regions = self.events.read();
            let block = self.space.block(block_start).expect("block of a swapped page");
            let mut block = block.lock();
            if block.word(index).tag() != Tag::Swapped {
                // It changed since it was looked at; whoever waits looks again.
                self.kernel.wake(block_start + index * PAGE, PAGE);
                return Brought::Done(index + 1);
            }
            let n = incoming.gather(&block, index, window, self.is_quick());
            let all = n == BLOCK_PAGES;
            let as_one = all && self.comes_whole(&block);
            let (n, buffer) = match as_one.then(|| self.take_huge()).flatten() {
                Some(huge) => (n, Buffer::Huge(huge)),
                None if as_one && whole && self.config.huge => return Brought::NoHuge,
                None => {
                    let Some(parts) = self.take_frames(n, whole) else { return Brought::NoFrame };
                    let count = parts.count();
                    incoming.trim(n, count, index);
                    (count, Buffer::Small(parts))
                }
            };
            for i in 0..n {
                let at = incoming.at(i);
                let word = block.word(at).fetch();
                block.set(at, word);
                incoming.words[i] = word;
                incoming.sums[i] = block.sum(at);
            }
            (n, buffer, all)
        };
        let asked = urge.is_asked().then_some(index);
        self.read(incoming, n, &buffer, asked);
        let (brought, is_huge, came) =
            self.arrive(&Read { incoming, buffer: &buffer, block_start, n, asked });
        let place = incoming.pages[..n].partition_point(|page| (*page as usize) < index);
        let is_unread = asked.is_none() && incoming.unread[place] && brought != Brought::Pending;
        let brought = if is_unread { Brought::Unread } else { brought };
        Stats::add(&self.stats.pswpin, n as u64);
        // What was called off is where it was.
        incoming.ahead = came.saturating_sub(1) as u16;
        if came > 0 {
            if is_huge {
                Stats::add(&self.stats.thp_swpin, 1);
            } else if all {
                Stats::add(&self.stats.thp_swpin_fallback, 1);
            }
            Stats::add(&self.stats.swap_ra, u64::from(incoming.ahead));
            Stats::add(&self.stats.swpin[came.ilog2() as usize], 1);
        }
        brought
    }

    /// Filled frames for up to `n` pages, or none where there are too few: with the few that happen to lie ready each fault
    /// of a stream would bring in as few. Not `whole`: whatever there is.
    pub(crate) fn take_frames(&self, n: usize, whole: bool) -> Option<Parts> {
        if whole && self.frames.ready_pages() < n.min(CHUNK) {
            return None;
        }
        let parts = self.frames.take(n);
        (parts.count() > 0).then_some(parts)
    }

    /// What was read last lies on a disk that turns: what lies around it comes in too, whosever pages they are, as far
    /// as there are frames. The way there is what costs. After the fault was answered; no lock held.
    pub(crate) fn bring_around(&self, incoming: &mut Incoming) {
        let Some((first, pages)) = self.place.around(incoming.words[0].payload()) else { return };
        for (i, page) in pages.into_iter().enumerate() {
            let Some(page) = page.map(|page| page as usize) else { continue };
            let (block_start, index) = (page / BLOCK_PAGES * BLOCK, page % BLOCK_PAGES);
            let is_there = self.space.block(block_start).is_some_and(|block| {
                let word = block.lock().word(index);
                word.tag() == Tag::Swapped && word.payload() == first + i as u64
            });
            if !is_there {
                continue;
            }
            if self.reads_alone() {
                return;
            }
            if self.frames.ready_pages() < AROUND {
                if self.budget.get() < AROUND as i64 {
                    return;
                }
                self.grow_frames();
            }
            let window = (index, (index + AROUND - i).min(BLOCK_PAGES));
            let brought = self.bring_in(incoming, block_start, index, window, Urge::Ahead);
            if matches!(brought, Brought::Pending | Brought::Unread) {
                return;
            }
            Stats::add(&self.stats.swap_ra, 1);
        }
    }

    /// Reads the pages and says of each whether it is what was written. Of a run that cannot be read as one each page is read by
    /// itself, or only the one that is `asked` for: each may take as long as the device takes to fail.
    fn read(&self, incoming: &mut Incoming, n: usize, buffer: &Buffer, asked: Option<usize>) {
        let started = self.kernel.now();
        let (mut read, mut fails) = (0, false);
        while read < n {
            let entry = incoming.words[read].payload();
            let follows = |i: &usize| incoming.words[*i].payload() == entry + (*i - read) as u64;
            let run = (read..n).take_while(follows).count();
            let result = self.read_run(entry, read, run, buffer);
            incoming.good[read..read + run].fill(result.is_ok());
            fails |= result.is_err_and(|errno| !is_passing(errno));
            read += run;
        }
        let now = self.kernel.now();
        let took = now - started;
        Stats::observe(&self.stats.device_ns, took);
        if incoming.good[..n].iter().all(|good| *good) {
            average(&self.device_ns, took / n as u64);
            average(&self.request_ns, took);
        }
        if fails && n > 1 {
            self.alone_until.store(now + ALONE_NS, Relaxed);
        }
        incoming.passing = false;
        for index in 0..n {
            let (address, _) = buffer.locate(self, index);
            let mut read = incoming.good[index];
            let tries = !read && asked.is_none_or(|asked| asked == incoming.at(index));
            if tries {
                let alone = self.read_alone(incoming.words[index].payload(), address);
                read = alone.is_ok();
                incoming.passing |= asked.is_some() && alone.is_err_and(is_passing);
            }
            // SAFETY: the frames were taken: filled, and nobody else's.
            let good = read && unsafe { self.key.sum(address) } == incoming.sums[index];
            if !good && (read || tries) {
                Stats::add(&self.stats.read_errors, 1);
            }
            (incoming.good[index], incoming.unread[index]) = (good, !read);
        }
    }

    /// Does each page that is asked for come in by itself, since a run could not be read a moment ago? Each of its neighbours would
    /// wait for it to fail again.
    fn reads_alone(&self) -> bool {
        let until = self.alone_until.load(Relaxed);
        until != 0 && self.kernel.now() < until
    }

    /// `run` neighbouring slots from `entry` on, into the frames of `buffer` from its page `first` on.
    fn read_run(&self, entry: u64, first: usize, run: usize, buffer: &Buffer) -> Result<(), Errno> {
        let (device, at) = self.place.locate(entry).ok_or(Errno::NODEV)?;
        let mut parts = [(0usize, 0usize); PARTS];
        let (mut used, mut index) = (0, first);
        while index < first + run {
            let (address, pages) = buffer.locate(self, index);
            let pages = pages.min(first + run - index);
            parts[used] = (address, pages * PAGE);
            (used, index) = (used + 1, index + pages);
        }
        // SAFETY: the frames were taken: filled, and nobody else's.
        unsafe { device.read_vectored(at, &parts[..used]) }
    }

    /// One page by itself, after the whole run could not be read: only what is really lost is given up.
    #[cold]
    fn read_alone(&self, entry: u64, address: usize) -> Result<(), Errno> {
        let (device, at) = self.place.locate(entry).ok_or(Errno::NODEV)?;
        let mut backoff = Backoff::new();
        // SAFETY: as in `read_run`.
        let read = || unsafe { device.read_vectored(at, &[(address, PAGE)]) };
        for _ in 1..MOST_READS {
            match read() {
                Err(errno) if is_passing(errno) => backoff.snooze(),
                done => return done,
            }
        }
        read()
    }

    /// Maps what was read where it still belongs. Whether that is a huge page now, and how many of the pages were seen to.
    fn arrive(&self, read: &Read<'_>) -> (Brought, bool, usize) {
        let &Read { incoming, buffer, block_start, n, asked } = read;
        let mut regions = self.events.read();
        let of_page = self.space.block(block_start).expect("block of a busy page");
        let mut block = of_page.lock();
        let mut brought = Brought::Done(incoming.at(n - 1) + 1);
        let mut i = 0;
        let mut whole = false;
        let mut consumed = 0;
        let mut tries = 0;
        let mut backoff = Backoff::new();
        let mut held_up = None;
        while i < n {
            if self.events.is_wanted() {
                // Faults are read under it: who waits for one page does not wait for all of these.
                drop(block);
                drop(regions);
                regions = self.events.read();
                block = of_page.lock();
            }
            if self.turns_away(read, &mut block, i) {
                i += 1;
                continue;
            }
            let (address, contiguous) = buffer.locate(self, i);
            let mut run = 1;
            let follows = |j: usize| incoming.at(j) == incoming.at(i) + (j - i) && incoming.good[j];
            while run < contiguous && i + run < n && follows(i + run) && incoming.is_mine(i + run, &block) {
                run += 1;
            }
            let to = block_start + incoming.at(i) * PAGE;
            let asked_at = asked.map(|index| block_start + index * PAGE);
            let (done, moved, errno) = self.map(to, address, run, asked_at);
            for j in i..i + done {
                block.set(incoming.at(j), incoming.words[j].arrive());
            }
            if moved {
                self.consumed(buffer, i, done);
                consumed += done;
                whole |= done == BLOCK_PAGES
                    && matches!(buffer, Buffer::Huge(_))
                    && self.came_whole(&mut block, to);
            } else {
                self.unused(buffer, i, done);
            }
            i += done;
            let Some(errno) = errno else { continue };
            let is_awaited = asked.is_some_and(|asked| asked >= incoming.at(i));
            if errno == Errno::AGAIN && is_awaited && tries < MOST_TRIES && !self.is_inline() {
                // What has been read is still good if the event is about something else, as it is beside threads that discard.
                tries += 1;
                drop(block);
                drop(regions);
                held_up.get_or_insert_with(|| self.holds_events_up());
                self.pump();
                backoff.snooze();
                regions = self.events.read();
                block = of_page.lock();
                continue;
            }
            if errno == Errno::AGAIN {
                brought = self.calls_off(read, &mut block, i);
                break;
            }
            let word = match errno {
                // Mapped already, by somebody who writes around us: theirs is the newer.
                Errno::EXIST => incoming.words[i].arrive(),
                // Not to be mapped here and now (the mapping goes, or changed). It stays on the device.
                _ => incoming.words[i].abandon(),
            };
            block.set(incoming.at(i), word);
            self.unused(buffer, i, 1);
            self.kernel.wake(to + done * PAGE, PAGE);
            i += 1;
        }
        // Not as part of a stream; by `always` all that comes is large.
        let alone = n <= UNIT_PAGES || self.config.swapin == Swapin::Always;
        // One unit stands for a block that is huge.
        let pages = &incoming.pages[..if whole { UNIT_PAGES } else { i }];
        for run in pages.chunk_by(|a, b| a + 1 == *b) {
            let first = run[0] as usize;
            self.used(&mut block, block_start, first..first + run.len(), alone);
        }
        drop(block);
        drop(regions);
        match buffer {
            Buffer::Huge(huge) if whole => self.frames.huge_emptied(*huge),
            // Nothing was tried with a part of it, which would have split it.
            Buffer::Huge(huge) if i == 0 => self.frames.huge_filled(*huge),
            Buffer::Huge(huge) => _ = self.give_up_huge(*huge, BLOCK_PAGES - consumed),
            Buffer::Small(_) => {}
        }
        (brought, whole, i)
    }

    /// Page `i` is not to be mapped: the program gave it up meanwhile, or what was read is not its data.
    fn turns_away(&self, read: &Read<'_>, block: &mut BlockState, i: usize) -> bool {
        let (at, word) = (read.incoming.at(i), read.incoming.words[i]);
        if !read.incoming.is_mine(i, block) {
            // Its count of the slot fell to us, and who touched it since waits for us.
            self.place.put(word.payload(), 1);
        } else if read.incoming.unread[i] && (Some(at) != read.asked || read.incoming.passing) {
            // Whoever asks for it, or asks again, may meet the device in a better moment.
            block.set(at, word.abandon());
        } else if !read.incoming.good[i] {
            self.poison(block, read.block_start, at, word);
            self.unused(read.buffer, i, 1);
            return true;
        } else {
            return false;
        }
        self.unused(read.buffer, i, 1);
        self.kernel.wake(read.block_start + at * PAGE, PAGE);
        true
    }

    /// Nothing from page `i` on can be mapped before an event is applied.
    fn calls_off(&self, read: &Read<'_>, block: &mut BlockState, i: usize) -> Brought {
        let incoming = read.incoming;
        for j in i..read.n {
            match incoming.is_mine(j, block) {
                true => block.set(incoming.at(j), incoming.words[j].abandon()),
                false => self.place.put(incoming.words[j].payload(), 1),
            }
            self.unused(read.buffer, j, 1);
        }
        // Others than who asked may wait for these pages: they take their faults again.
        let (next, end) = (incoming.at(i), incoming.at(read.n - 1) + 1);
        self.kernel.wake(read.block_start + next * PAGE, (end - next) * PAGE);
        match read.asked.is_none_or(|asked| asked >= next) {
            true => Brought::Pending,
            false => Brought::Done(next),
        }
    }

    /// MOVE, or COPY of a single page below the limit or where that has been faster, and where MOVE cannot (a read-only mapping, a
    /// frame that a device has just let go of); of half as many where neither can, for they may lie over a border of mappings.
    /// `asked`: the address of the page that somebody waits for.
    pub(crate) fn map(&self, to: usize, from: usize, pages: usize, asked: Option<usize>) -> Mapped {
        if pages == 1 && (!self.is_full() || self.is_copied()) {
            return self.map_copy(to, from, 1, asked);
        }
        let wake = pages == 1 || !makes(Flaw::WakeForgotten);
        match self.move_timed(to, from, pages, wake) {
            Ok(()) => (pages, true, None),
            Err(partial) if partial.done > 0 => {
                let done = partial.done / PAGE;
                // The rest is taken up by the next round, which meets the reason itself.
                self.kernel.wake(to, partial.done);
                (done, true, None)
            }
            Err(partial) if matches!(partial.errno, Errno::AGAIN | Errno::EXIST) => {
                (0, true, Some(partial.errno))
            }
            Err(Partial { errno, .. }) => {
                if errno == Errno::INVAL {
                    self.unlock_for_refused();
                }
                // It can be executed, as the frames cannot.
                let copied = match errno == Errno::INVAL && self.frames.has_executable() {
                    true => self.map_by_copy(to, from, pages, asked),
                    false => self.map_copy(to, from, pages, asked),
                };
                match copied {
                    (0, _, Some(Errno::AGAIN | Errno::EXIST)) => copied,
                    (0, _, Some(_)) if pages > 1 => self.map(to, from, pages / 2, asked),
                    _ => copied,
                }
            }
        }
    }

    /// What MOVE does, by COPY: the frames are holes afterwards.
    fn map_by_copy(&self, to: usize, from: usize, pages: usize, asked: Option<usize>) -> Mapped {
        let (done, _, errno) = self.map_copy(to, from, pages, asked);
        let emptied = done > 0 && self.drop_frames(from, done * PAGE).is_ok();
        if emptied {
            self.budget.add(done);
        }
        (done, emptied, errno)
    }

    /// Does a single page come in by COPY, with memory full? MOVE interrupts each other CPU that the program runs on, which costs
    /// more than the copy; where there is none, the frames that COPY leaves filled, and that are given back many at a time,
    /// cost more. Not while much lies over the limit. Of those who serve themselves each interrupts the others; one alone would
    /// wait for the giving back.
    fn is_copied(&self) -> bool {
        let most = self.much() as i64 / 4;
        let interrupts = match self.is_inline() {
            true => self.is_crowded_inline(),
            false => self.move_ns.load(Relaxed) > QUICK_MOVE_NS,
        };
        interrupts && self.budget.get() > -most
    }

    /// A MOVE by a server.
    fn move_timed(&self, to: usize, from: usize, pages: usize, wake: bool) -> Result<(), Partial> {
        self.timed(pages, || self.kernel.move_pages(to, from, pages * PAGE, wake))
    }

    /// The same, out of the program's memory.
    pub(crate) fn take_timed(&self, frames: usize, from: usize, pages: usize) -> Result<(), Partial> {
        self.timed(pages, || self.kernel.take_pages(frames, from, pages * PAGE))
    }

    /// If it is of few pages its time is noted, where that is asked for.
    fn timed(&self, pages: usize, moves: impl FnOnce() -> Result<(), Partial>) -> Result<(), Partial> {
        if pages > FEW || self.is_inline() {
            return moves();
        }
        let started = self.kernel.now();
        let moved = moves();
        average(&self.move_ns, self.kernel.now() - started);
        moved
    }

    /// Pages by COPY. The frames stay filled: these are so many more pages.
    fn map_copy(&self, to: usize, from: usize, pages: usize, asked: Option<usize>) -> Mapped {
        let (done, errno) = match self.copy(to, from, pages, asked) {
            Ok(()) => (pages, None),
            // The rest is taken up by the next round.
            Err(partial) if partial.done > 0 => {
                self.kernel.wake(to, partial.done);
                (partial.done / PAGE, None)
            }
            Err(partial) => (0, Some(partial.errno)),
        };
        self.budget.sub(done);
        (done, false, errno)
    }

    /// COPY, as far as there is nothing: it goes over guard pages (MADV_GUARD_INSTALL), as MOVE does not. Where one page is `asked`
    /// for there is none.
    pub(crate) fn copy(
        &self,
        to: usize,
        from: usize,
        pages: usize,
        asked: Option<usize>,
    ) -> Result<(), Partial> {
        let len = pages * PAGE;
        let clear = match asked {
            Some(at) if pages == 1 && at == to => len,
            _ => {
                let mut found = [Found::NONE; 1];
                match self.kernel.scan(to, to + len, &mut found).0 {
                    0 => len,
                    _ => found[0].start - to,
                }
            }
        };
        let stopped = Err(Partial { done: clear, errno: Errno::EXIST });
        if clear == 0 {
            return stopped;
        }
        self.kernel.copy(to, from, clear, true)?;
        if clear < len {
            return stopped;
        }
        Ok(())
    }

    /// Frames `index..index + count` of a buffer were moved away.
    fn consumed(&self, buffer: &Buffer, index: usize, count: usize) {
        if let Buffer::Small(parts) = buffer {
            let mut at = index;
            while at < index + count {
                let (frame, run) = parts.locate(at);
                let in_chunk = CHUNK - frame as usize % CHUNK;
                let run = run.min(in_chunk).min(index + count - at);
                self.frames.emptied(frame, run);
                at += run;
            }
        }
    }

    /// Frames of a buffer that were not needed.
    fn unused(&self, buffer: &Buffer, index: usize, count: usize) {
        if let Buffer::Small(parts) = buffer {
            for at in index..index + count {
                self.frames.give_back(parts.locate(at).0);
            }
        }
    }

    /// The data of a page are lost: touching it raises SIGBUS, and nothing else is harmed.
    #[cold]
    fn poison(&self, block: &mut BlockState, block_start: usize, index: usize, word: Word) {
        let at = block_start + index * PAGE;
        if self.stats.lost_at.load(Relaxed) == 0 {
            self.stats.lost_at.store(word.payload(), Relaxed);
        }
        if self.loses(at, &self.stats.poisoned) {
            self.place.put(word.payload(), 1);
            block.set(index, word.poison());
        } else {
            // Tried again at the next fault; the data stay where they are.
            block.set(index, word.abandon());
            self.kernel.wake(at, PAGE);
        }
    }
}
