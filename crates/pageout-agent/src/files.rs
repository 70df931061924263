//! What is in memory of files that are mapped leaves, too.
//!
//! It has its place already, so nothing is written here: the kernel is asked to reclaim it (MADV_PAGEOUT). That loses nothing,
//! whatever has come to lie there meanwhile, unlike MADV_DONTNEED. The kernel does it for files that the user owns or may write,
//! where no other process has mapped the page; the rest stays, and counts as what cannot go. Of files that are another's that is
//! known beforehand ([`is_refused`]). So do files in memory (tmpfs) stay, of which nothing would be gained.
//!
//! What is new goes first, before any memory of the program's. What comes back soon stays, and counts like the program's own
//! memory; each unit has its turn as often as those ([`pageout::reclaim::files`]). But the least that a process keeps is of its own.
//!
//! The keeper's first thread says what is mapped and when it is time ([`Eye`]); a thread of its own, made when it is first needed,
//! goes round ([`Hand`]), for a disk may take its time.

use crate::keeper::Keeper;
use crate::proc::Maps;
use crate::{sys, task};
use alloc::collections::VecDeque;
use alloc::vec::Vec;
use core::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use linux_raw_sys::general as raw;
use pageout::engine::Engine;
use pageout::kernel::{pagemap_scan, Kernel, Linux, Sought, Statm};
use pageout::reclaim::files::{FileUnit, FileUnits, Seen};
use pageout::space::discover::{mounted, Area, DeviceNumber};
use pageout::space::{BLOCK, PAGE, UNIT, UNIT_PAGES};
use pageout::stats::Stats;
use pageout::sync::{Bell, Lock, FOREVER, OTHER_LOCKS};
use rustix::fs::{Access, AtFlags};

/// Runs of pages that are looked for at once.
const RUNS: usize = 64;
/// Fewer bytes of a file are not looked at.
const SMALLEST: usize = 4 * PAGE;
/// What is new is worth a round if it is so many pages, or this part of what is there: a round looks at all of that.
const WORTH: usize = (4 << 20) / PAGE;
const WORTH_SHARE: usize = 64;
/// This part of what may be there is to be free.
const MARGIN: usize = 32;
/// How often (ns) all are tried while too much is there and none of it may go.
const TURN_EVERY: u64 = 100_000_000;
/// The same of making the thread, where there is no room for it.
const TRY_EVERY: u64 = 1_000_000_000;
/// Files whose names are remembered; then they are looked at anew.
const MOST_KNOWN: usize = 4096;
/// No round; one for what is new and what is cold; one in which each unit has its turn. Either ends when there is room.
const NONE: u32 = 0;
const NEW: u32 = 1;
const TURN: u32 = 2;

/// A file's mapping.
#[derive(Clone, Copy)]
struct Mapped {
    start: usize,
    end: usize,
    /// Where its first byte would be.
    base: usize,
    file: (DeviceNumber, u64),
    is_code: bool,
    is_shared: bool,
}

impl Mapped {
    fn unit(&self, at: usize) -> FileUnit {
        FileUnit { file: self.file, number: at.wrapping_sub(self.base) / UNIT }
    }

    /// The part of the mapping that is in the same 2 MiB of the file as an address.
    fn block(&self, at: usize) -> (usize, usize) {
        let start = at - at.wrapping_sub(self.base) % BLOCK;
        (start.max(self.start), (start + BLOCK).min(self.end))
    }

    /// Where the unit ends that is at an address.
    fn unit_end(&self, at: usize) -> usize {
        at + UNIT - at.wrapping_sub(self.base) % UNIT
    }

    /// A run of pages by units.
    fn parts<'a>(&'a self, run: &raw::page_region) -> impl Iterator<Item = (usize, usize)> + 'a {
        let (start, end) = (run.start as usize, run.end as usize);
        let starts = core::iter::successors(Some(start), |at| Some(self.unit_end(*at)));
        starts.take_while(move |at| *at < end).map(move |at| (at, self.unit_end(at).min(end)))
    }
}

/// A file, and the path where it was mapped from.
type Name = ((DeviceNumber, u64), Vec<u8>);

/// What the first thread and the one that reclaims share.
pub struct Files {
    /// What is mapped, when that has changed.
    found: Lock<Option<Vec<Mapped>>>,
    /// Files that were not there before.
    names: Lock<Vec<Name>>,
    asked: AtomicU32,
    bell: Bell,
    /// Pages of files, and of memory shared on purpose, that stay: there after the last round that came to its end.
    left: AtomicUsize,
    /// Of these, pages that may go at another time.
    movable: AtomicUsize,
    /// So many pages may be resident.
    allowance: AtomicUsize,
}

impl Files {
    /// Nothing is mapped.
    pub fn new() -> Self {
        Self {
            found: Lock::new(None, &OTHER_LOCKS),
            names: Lock::new(Vec::new(), &OTHER_LOCKS),
            asked: AtomicU32::new(NONE),
            bell: Bell::new(),
            left: AtomicUsize::new(0),
            movable: AtomicUsize::new(0),
            allowance: AtomicUsize::new(usize::MAX),
        }
    }

    /// With so many pages it is time for what is new to go; until there is room again.
    fn is_full(&self, resident: usize) -> bool {
        let allowance = self.allowance.load(Ordering::Relaxed);
        resident > allowance - allowance / MARGIN
    }

    /// Pages that may go, when that was last looked at.
    pub fn movable(&self) -> usize {
        self.movable.load(Ordering::Relaxed)
    }
}

/// The first thread's part.
pub struct Eye {
    /// The file that this code is in. Who answers faults must not wait for a disk.
    own: Option<(DeviceNumber, u64)>,
    devices: Vec<(DeviceNumber, bool)>,
    found: Vec<Mapped>,
    /// [`Files`] does not know of it yet.
    fresh: bool,
    /// Files whose names it has been told, in order, unless they would all be reclaimed; and those that it is to be told.
    known: Option<Vec<(DeviceNumber, u64)>>,
    names: Vec<Name>,
    /// Of what is there, pages that do not count: they are to go.
    going: usize,
    /// There is a thread that reclaims; and when (ns) it is tried again to make it.
    works: bool,
    next_try: u64,
    /// Pages of its own that had been looked at when each unit had its last turn, and when (ns) the next is due in any case.
    turned: u64,
    next_turn: u64,
}

impl Eye {
    /// Has seen nothing.
    pub fn new() -> Self {
        Self {
            own: None,
            devices: Vec::new(),
            found: Vec::new(),
            fresh: false,
            known: (!sys::owns_all_files()).then(Vec::new),
            names: Vec::new(),
            going: 0,
            works: false,
            next_try: 0,
            turned: 0,
            next_turn: 0,
        }
    }

    /// What is mapped is gone through anew.
    pub fn open(&mut self) {
        self.found.clear();
        self.fresh = true;
    }

    /// The next line of it.
    pub fn see(&mut self, area: &Area<'_>) {
        let Some(file) = area.device().zip(area.inode()).filter(|_| area.name.starts_with(b"/")) else {
            return;
        };
        if (area.start..area.end).contains(&(reclaim as *const () as usize)) {
            self.own = Some(file);
        }
        if area.end - area.start < SMALLEST || !self.is_on_disk(file.0) {
            return;
        }
        let base = area.start.wrapping_sub(area.offset());
        let [is_code, is_shared] =
            [(2, b'x'), (3, b's')].map(|(at, it)| area.permissions.get(at) == Some(&it));
        self.found.push(Mapped { start: area.start, end: area.end, base, file, is_code, is_shared });
        if let Some(known) = &mut self.known {
            if known.len() >= MOST_KNOWN {
                known.clear();
            }
            if let Err(at) = known.binary_search(&file) {
                known.insert(at, file);
                self.names.push((file, area.name.to_vec()));
            }
        }
    }

    /// Do files there take memory only while they are used?
    fn is_on_disk(&mut self, device: DeviceNumber) -> bool {
        // A block device.
        if device.major != 0 {
            return true;
        }
        if let Some((_, known)) = self.devices.iter().find(|(known, _)| *known == device) {
            return *known;
        }
        let mut is_on_disk = false;
        Maps::new().read(c"/proc/self/mountinfo", |line| {
            is_on_disk |= mounted(line).is_some_and(|(at, in_memory)| at == device && !in_memory);
        });
        self.devices.push((device, is_on_disk));
        is_on_disk
    }

    /// Asks for a round if it is time, now that so much is there, of so many pages that may be, and so many (`least`) of the program's
    /// own in any case. Returns how many the engine may have, what is mapped of files included.
    pub fn look(&mut self, keeper: &'static Keeper, now: Statm, allowance: usize, least: usize) -> usize {
        self.going = self.is_going(keeper, now, allowance, least);
        // What may stay of files is for turns to find out, not for the last of the program's own to pay.
        allowance.saturating_add(self.going).max(now.shared + least)
    }

    /// Of what was there, pages of files that are to go at once: they do not count any more, or the program's own memory would
    /// go for them.
    pub fn going(&self) -> usize {
        self.going
    }

    fn is_going(&mut self, keeper: &'static Keeper, now: Statm, allowance: usize, least: usize) -> usize {
        let (files, engine) = (&keeper.files, &keeper.engine);
        files.allowance.store(allowance, Ordering::Relaxed);
        if core::mem::take(&mut self.fresh) {
            self.found.retain(|mapped| Some(mapped.file) != self.own);
            files.names.lock().append(&mut self.names);
            *files.found.lock() = Some(self.found.clone());
        }
        if self.found.is_empty() {
            return 0;
        }
        // What a round has left is known once it is over.
        let rests = files.asked.load(Ordering::Acquire) == NONE;
        let new = now.shared.saturating_sub(files.left.load(Ordering::Relaxed));
        if rests {
            let scanned = engine.stats.pgscan.load(Ordering::Relaxed);
            let own = now.resident.saturating_sub(now.shared);
            let time = engine.kernel.now();
            // All of the program's own had its turn, as far as it goes by this count: a stream may go by many times meanwhile. Or hardly
            // any of that is left.
            let has_turned =
                time >= self.next_turn && scanned - self.turned >= own.max(now.resident / 8) as u64;
            let over = now.resident.saturating_sub(allowance);
            let is_last = own < 2 * least.max(now.shared / 16) && over > WORTH;
            // What could not go may have been written to the disk since.
            let is_due = is_last && (files.movable() + new >= over || time >= self.next_turn);
            let is_turn = has_turned || is_due;
            let is_new = new >= WORTH.max(now.shared / WORTH_SHARE) && files.is_full(now.resident);
            if !is_turn && !is_new {
                return if self.works { new } else { 0 };
            }
            if is_turn {
                (self.turned, self.next_turn) = (scanned, time + TURN_EVERY);
            }
            if !self.works {
                if time < self.next_try {
                    return 0;
                }
                // SAFETY: the keeper lives as long as its process, and `reclaim` never returns.
                let started =
                    unsafe { task::start(task::Kind::Thread, reclaim, keeper as *const Keeper as usize) };
                self.works = started.is_ok();
                // There may be no room for its stack in a program that has all mappings that it may: until then, all stays.
                if !self.works {
                    self.next_try = time + TRY_EVERY;
                    return 0;
                }
            }
            files.asked.store(if is_turn { TURN } else { NEW }, Ordering::Release);
            files.bell.ring();
        }
        new
    }
}

/// Pages that have been taken from the program so far, of its own memory and of files.
fn taken(engine: &Engine<Linux>) -> u64 {
    engine.stats.pgsteal.load(Ordering::Relaxed) + engine.stats.pgsteal_file.load(Ordering::Relaxed)
}

/// The thread that has the kernel reclaim.
extern "C" fn reclaim(keeper: usize) -> ! {
    // SAFETY: see `Eye::is_going`.
    let keeper = unsafe { &*(keeper as *const Keeper) };
    sys::go_first();
    let files = &keeper.files;
    let mut hand = Hand::new(keeper);
    loop {
        let heard = files.bell.heard();
        let asked = files.asked.load(Ordering::Acquire);
        if asked == NONE {
            files.bell.wait(heard, FOREVER);
            continue;
        }
        let found = files.found.lock().take();
        let names = core::mem::take(&mut *files.names.lock());
        hand.judge(names);
        if let Some(found) = found {
            hand.take(found);
        }
        hand.round(asked == TURN);
        files.asked.store(NONE, Ordering::Release);
    }
}

/// Goes round over all that is mapped, as the hand of a clock.
struct Hand {
    files: &'static Files,
    engine: &'static Engine<Linux>,
    mapped: Vec<Mapped>,
    /// What the kernel does not reclaim for us, and the files of that, in order.
    staying: Vec<Mapped>,
    refused: Vec<(DeviceNumber, u64)>,
    units: FileUnits,
    /// Where it stands.
    at: usize,
    /// What has left, and when, by the units' clock.
    left: VecDeque<(Mapped, u32)>,
    /// Pages that have gone in this round; that were met, and stay; and of these, that may go another time.
    gone: usize,
    met: usize,
    movable: usize,
}

impl Hand {
    fn new(keeper: &'static Keeper) -> Self {
        let (files, engine) = (&keeper.files, &keeper.engine);
        Self {
            files,
            engine,
            mapped: Vec::new(),
            staying: Vec::new(),
            refused: Vec::new(),
            units: FileUnits::default(),
            at: 0,
            left: VecDeque::new(),
            gone: 0,
            met: 0,
            movable: 0,
        }
    }

    /// Looks at files that are new. It may take a disk's time.
    fn judge(&mut self, names: Vec<Name>) {
        for (file, path) in names {
            if self.refused.len() >= MOST_KNOWN {
                self.refused.clear();
            }
            match (self.refused.binary_search(&file), is_refused(&path, file.1)) {
                (Err(at), true) => self.refused.insert(at, file),
                // Another file has that number now.
                (Ok(at), false) => _ = self.refused.remove(at),
                _ => {}
            }
        }
    }

    /// These are mapped.
    fn take(&mut self, found: Vec<Mapped>) {
        let stays = |area: &Mapped| self.refused.binary_search(&area.file).is_ok();
        (self.staying, self.mapped) = found.into_iter().partition(stays);
    }

    /// One round, until there is room; in a `turn` each unit has its turn, else what is cold goes.
    fn round(&mut self, turn: bool) {
        let before = self.engine.kernel.statm().shared;
        let capacity = self.files.allowance.load(Ordering::Relaxed) / UNIT_PAGES;
        self.units.begin(self.clock(), capacity.try_into().unwrap_or(u32::MAX), turn);
        self.look_back();
        let staying = self.staying.iter().map(|area| self.count(area, area.start, area.end)).sum();
        (self.gone, self.met, self.movable) = (0, staying, 0);
        let (mapped, at) = (core::mem::take(&mut self.mapped), self.at);
        let first = mapped.partition_point(|area| area.end <= at);
        let ahead = mapped[first..].iter().map(|area| (area, area.start.max(at), area.end));
        // The one that it stands in has a part that comes last.
        let behind = mapped.iter().take(first + 1).map(|area| (area, area.start, area.end.min(at)));
        let is_whole = ahead.chain(behind).all(|(area, from, to)| self.pass(area, from, to));
        self.mapped = mapped;
        self.units.forget();
        let shared = self.engine.kernel.statm().shared;
        if !is_whole {
            self.files.left.fetch_min(shared, Ordering::Relaxed);
            self.files.left.fetch_max(staying.min(shared), Ordering::Relaxed);
            return;
        }
        // What has come meanwhile was not looked at.
        let left = before.saturating_sub(self.gone).max(self.met).min(shared);
        self.files.left.store(left, Ordering::Relaxed);
        self.files.movable.store(self.movable, Ordering::Relaxed);
    }

    /// Units that have left so far, all kinds of memory together.
    fn clock(&self) -> u32 {
        (taken(self.engine) / UNIT_PAGES as u64) as u32
    }

    /// Looks whether what has left came back, where it is time.
    fn look_back(&mut self) {
        self.units.tick(self.clock());
        while let Some((part, _)) = self.left.front().copied().filter(|(_, left)| self.units.is_due(*left)) {
            self.left.pop_front();
            each_part(self.engine, &part, part.start, part.end, |from, to| {
                if self.units.came_back(part.unit(from)) {
                    let pages = (to - from) / PAGE;
                    Stats::add(&self.engine.stats.workingset_refault_file, pages as u64);
                }
            });
        }
    }

    /// Goes through a part of a mapping; false: it stopped there, for there is room.
    fn pass(&mut self, area: &Mapped, mut at: usize, end: usize) -> bool {
        let mut leaving = (0, 0);
        while at < end {
            let mut runs = NO_RUNS;
            let (found, next) = find(self.engine, at, end, &mut runs);
            for (from, to) in runs[..found].iter().flat_map(|run| area.parts(run)) {
                // More than a block the kernel is not asked for at once: it holds the lock of the program's mappings meanwhile.
                if leaving.0 < leaving.1 && area.block(leaving.0) != area.block(from) {
                    self.leave(area, core::mem::replace(&mut leaving, (from, from)));
                    if self.has_room(from) {
                        return false;
                    }
                }
                let seen = self.units.visit(area.unit(from), area.is_code);
                let pages = (to - from) / PAGE;
                match seen {
                    Seen::Leaves => {}
                    Seen::Stuck => self.met += pages,
                    Seen::Stays => self.stays(pages),
                    Seen::CameBack => {
                        Stats::add(&self.engine.stats.workingset_refault_file, pages as u64);
                        self.stays(pages);
                    }
                }
                // Only what is there of a file: what was written in its place would go to the kernel's own swap.
                if seen != Seen::Leaves || leaving.1 != from {
                    self.leave(area, core::mem::replace(&mut leaving, (from, from)));
                }
                leaving.1 = if seen == Seen::Leaves { to } else { from };
            }
            at = next.max(at + PAGE);
        }
        self.leave(area, leaving);
        leaving.0 == leaving.1 || !self.has_room(end)
    }

    /// Is there room again? Then the hand stops there.
    fn has_room(&mut self, at: usize) -> bool {
        let has_room = !self.files.is_full(self.engine.kernel.statm().resident);
        if has_room {
            self.at = at;
        }
        has_room
    }

    /// So many pages stay, and may go another time.
    fn stays(&mut self, pages: usize) {
        self.met += pages;
        self.movable += pages;
    }

    /// Has the kernel reclaim what is there.
    fn leave(&mut self, area: &Mapped, (start, end): (usize, usize)) {
        if start == end {
            return;
        }
        // All of it is there.
        let mut gone = self.reclaimed(area, start, end, (end - start) / PAGE);
        // The kernel has files in pieces of up to 2 MiB, and does not divide one that is to be written yet. So all of it goes; not
        // of what is private: what was written there would go to the kernel's own swap.
        let (first, last) = area.block(start);
        if gone == 0 && area.is_shared && (first, last) != (start, end) {
            gone = self.reclaimed(area, first, last, self.count(area, first, last));
        }
        let stays = ((end - start) / PAGE).saturating_sub(gone);
        if stays > 0 {
            self.stuck(area, start, end);
        }
        self.gone += gone;
        self.met += stays;
        Stats::add(&self.engine.stats.pgsteal_file, gone as u64);
        if gone > 0 {
            self.left.push_back((Mapped { start, end, ..*area }, self.clock()));
        }
        self.look_back();
    }

    /// The same of so many pages; how many have gone.
    fn reclaimed(&self, area: &Mapped, start: usize, end: usize, pages: usize) -> usize {
        // SAFETY: not a byte of it changes, whatever is mapped there.
        // Where it is refused, locked memory, all is there still.
        let _ = unsafe { sys::call(raw::__NR_madvise, start, end - start, raw::MADV_PAGEOUT as usize, 0) };
        pages.saturating_sub(self.count(area, start, end))
    }

    /// Pages that are there.
    fn count(&self, area: &Mapped, start: usize, end: usize) -> usize {
        let mut pages = 0;
        each_part(self.engine, area, start, end, |from, to| pages += (to - from) / PAGE);
        pages
    }

    /// What is there did not leave. Single pages may have been on their way to the kernel's lists.
    fn stuck(&mut self, area: &Mapped, start: usize, end: usize) {
        each_part(self.engine, area, start, end, |from, to| {
            let is_first = from == start || area.unit(from) != area.unit(from - 1);
            if is_first && (to == end || to == area.unit_end(from)) {
                self.units.stays(area.unit(from));
            }
        });
    }
}

/// Does the kernel reclaim a file, of this path and number, for who owns it or may write it, and we are neither? Where that cannot
/// be told it is tried.
fn is_refused(path: &[u8], number: u64) -> bool {
    let Ok(about) = rustix::fs::stat(path) else { return false };
    let may_write =
        || rustix::fs::accessat(rustix::fs::CWD, path, Access::WRITE_OK, AtFlags::EACCESS).is_ok();
    about.st_ino == number && about.st_uid != rustix::process::geteuid().as_raw() && !may_write()
}

/// Calls `each` with what is there of each unit.
fn each_part(
    engine: &Engine<Linux>,
    area: &Mapped,
    start: usize,
    end: usize,
    mut each: impl FnMut(usize, usize),
) {
    let mut at = start;
    while at < end {
        let mut runs = NO_RUNS;
        let (found, next) = find(engine, at, end, &mut runs);
        runs[..found].iter().flat_map(|run| area.parts(run)).for_each(|(from, to)| each(from, to));
        at = next.max(at + PAGE);
    }
}

/// Pages of files that are there, and where the search has come to.
fn find(
    engine: &Engine<Linux>,
    start: usize,
    end: usize,
    runs: &mut [raw::page_region; RUNS],
) -> (usize, usize) {
    pagemap_scan(engine.kernel.pagemap(), (start, end), FILES, runs).unwrap_or((0, end))
}

const FILES: Sought =
    Sought { all: raw::PAGE_IS_FILE | raw::PAGE_IS_PRESENT, none: 0, any: 0, told: raw::PAGE_IS_PRESENT };
const NO_RUNS: [raw::page_region; RUNS] = [raw::page_region { start: 0, end: 0, categories: 0 }; RUNS];
