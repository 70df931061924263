//! The engine of one process: what the two paths share.
//!
//! Lock order: events → block → everything else, all of which are leaves here (frames, policy, and those of
//! `slot`); the leadership comes before all of them, and is held over I/O of quick devices. No I/O, no wait for another thread's
//! progress, under any of these; but the events lock is held over the clone of a fork, which nobody who needs it may delay, and who
//! has it alone waits for the kernel to be through with an event that is under way.

use crate::fault::crowd::Crowd;
use crate::fault::order::Orders;
use crate::fault::pending::Pending;
use crate::fault::stream::Streams;
use crate::frame::Frames;
use crate::kernel::{Event, Found, Kernel};
use crate::page::Tag;
use crate::reclaim::ahead::Ahead;
use crate::reclaim::budget::Budget;
use crate::reclaim::policy::{Policy, Turn, FIRST};
use crate::space::order::{known, Order};
use crate::space::{
    bits, page_start, BlockState, Region, Regions, Space, Usage, BLOCK, BLOCK_PAGES, PAGE, TOP, UNIT,
    UNIT_PAGES,
};
use crate::stats::Stats;
use crate::swap::Place;
use crate::sync::atomic::{AtomicBool, AtomicI64, AtomicU32, AtomicU64, AtomicUsize, Ordering::Relaxed};
use crate::sync::{Bell, Lock, RwLock, Wait, OTHER_LOCKS};
use alloc::vec::Vec;
use core::ops::Range;
use rustix::io::Errno;

/// Whether and when huge pages come back whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Swapin {
    /// As the faults suggest.
    Auto,
    /// Whenever the whole block is out.
    Always,
    /// As `Auto`; what became huge again is not marked (MADV_HUGEPAGE) where the program has not asked for that.
    Madvise,
    /// By small pages only.
    Never,
}

/// What an engine is told.
#[derive(Clone, Copy)]
pub struct Config {
    /// Units that must stay.
    pub pins: Option<&'static crate::space::pins::Pins>,
    /// Resident pages that the address space may have, until [`Engine::set_limit`].
    pub limit_pages: i64,
    /// The largest order that a fault brings in.
    pub max_order: u8,
    /// Huge pages.
    pub swapin: Swapin,
    /// Huge frames can be had ([`HugePages`](crate::kernel::HugePages) are not forbidden).
    pub huge: bool,
    /// A chunk of mapped zeros of the engine's own ([`CHUNK`](crate::frame::CHUNK) pages).
    pub zeros: usize,
}

/// The key of the checksums: random, so that no program can make two pages with the same sum. A fork's child has its
/// parent's.
#[repr(transparent)]
#[derive(Clone, Copy, Debug)]
pub struct Key([u8; 192]);

impl Key {
    /// A key from the kernel's random numbers.
    pub fn random() -> Self {
        let mut key = [0u8; 192];
        let mut filled = 0;
        while filled < key.len() {
            match rustix::rand::getrandom(&mut key[filled..], rustix::rand::GetRandomFlags::empty()) {
                Ok(n) => filled += n,
                Err(Errno::INTR) => {}
                Err(errno) => panic!("getrandom: {errno}"),
            }
        }
        Self(key)
    }

    /// The sum of a frame's content; never 0.
    ///
    /// # Safety
    /// `address` is a mapped page of the engine's own, which nobody writes now.
    pub unsafe fn sum(&self, address: usize) -> u128 {
        // SAFETY: by contract.
        let bytes = unsafe { core::slice::from_raw_parts(address as *const u8, PAGE) };
        xxhash_rust::xxh3::xxh3_128_with_secret(bytes, &self.0) | 1
    }
}

/// Huge pages that are split in a row before only one of [`TRIED`] blocks is tried.
pub(crate) const MOST_SPLITS: u32 = 4;
/// See [`MOST_SPLITS`].
const TRIED: u32 = 32;

/// One process's engine.
pub struct Engine<K: Kernel> {
    /// The kernel.
    pub kernel: K,
    /// What it was told.
    pub config: Config,
    /// Where every page is.
    pub space: Space,
    /// Staging.
    pub frames: Frames,
    /// Devices and their slots.
    pub place: Place,
    /// Exclusive: reading and applying events, adoption. Shared: check a word and act on it.
    pub events: RwLock<Regions>,
    /// Who leaves next.
    pub policy: Lock<Policy>,
    /// Counters.
    pub stats: &'static Stats,
    /// Pages that may still be added before the limit; below 0, pages that must go.
    pub budget: Budget,
    /// Resident pages that the address space may have.
    pub(crate) limit_pages: AtomicI64,
    /// See [`Engine::give_way`].
    pub(crate) stuck_pages: AtomicI64,
    /// Resident pages that the limit gave way to at the last look.
    pub(crate) floor_pages: AtomicI64,
    /// These were less than cannot go, for some of that is to be tried again.
    pub(crate) tries_again: AtomicBool,
    /// How many frames evictors fill.
    pub(crate) ahead: Ahead,
    /// Evictors sleep on it; it rings when there is work.
    pub wanted: Bell,
    /// A fault could have used a huge frame and there was none.
    pub(crate) huge_wanted: AtomicBool,
    /// The same of a small one.
    pub(crate) small_wanted: AtomicBool,
    /// Huge pages that were split when they came in, since the last that was not ([`Engine::comes_whole`]).
    pub(crate) splits: AtomicU32,
    /// A block of small pages, all mapped, that an evictor is to make a huge page; 0: none.
    pub(crate) mend: AtomicUsize,
    /// It was a huge page's turn to leave, but who looked was in a hurry: an evictor is to see to it.
    pub(crate) huge_due: AtomicBool,
    /// Faults that were read, for any server.
    pub(crate) pending: Lock<Pending>,
    /// Who reads events.
    pub(crate) leader: Lock<()>,
    /// Servers that do not lead sleep on it; it rings when one is needed.
    pub(crate) calls: Bell,
    /// Threads that handed a fault to a server sleep on it.
    pub(crate) answered: Bell,
    /// Threads answer their own faults.
    inline: bool,
    /// They may read and write every device: none needs a descriptor.
    pub(crate) self_service: bool,
    /// Little comes in at a time, from a quick device: the server that leads makes room itself, evictors keep off.
    pub(crate) helps_itself: AtomicBool,
    /// How often mappings went or moved, by the events that were read.
    pub unmappings: AtomicU32,
    /// The program has moved mappings: see [`Engine::read_some`].
    moves: AtomicBool,
    /// How long a read from a device takes for each page: moving average, in ns.
    pub(crate) device_ns: AtomicU64,
    /// How long a request to a device takes, whatever its size: moving average, in ns.
    pub(crate) request_ns: AtomicU64,
    /// Until when (ns) what is asked for comes in by itself; 0: no run has failed yet.
    pub(crate) alone_until: AtomicU64,
    /// How long a server's MOVE of few pages takes: moving average, in ns.
    pub(crate) move_ns: AtomicU64,
    /// How much a fault brings in.
    pub(crate) orders: Lock<Orders>,
    /// Who faults.
    pub(crate) crowd: Crowd,
    /// The clock of evictions: units that have left, from [`FIRST`] on. By it a unit knows when it left (`evicted_at`), and the policy
    /// how soon it came back.
    pub(crate) evictions: AtomicU32,
    /// What the checksums are made with.
    pub key: Key,
    /// What threads go through in order.
    pub(crate) streams: Streams,
    /// Units that somebody holds here.
    pub(crate) held: AtomicUsize,
    /// Until when (ns) reclaim pauses because nothing can go.
    pub(crate) stuck_until: AtomicU64,
    /// Until when (ns) it is not looked for pages that have their place meanwhile: they are few.
    pub(crate) rest_until: AtomicU64,
    /// Until when (ns) no block is made huge again, because that took long.
    pub(crate) mend_after: AtomicU64,
    /// How often in a row no huge page could be had, and until when none is asked for.
    pub(crate) huge_failed: AtomicU32,
    pub(crate) huge_after: AtomicU64,
    /// Pages that the program has given up since that was last counted; see [`Engine::credit`].
    pub(crate) given_up: AtomicUsize,
    /// Others have touched holes among the frames, and may have filled them.
    pub(crate) touched: AtomicBool,
    /// Until when (ns) frames are not unlocked again for pages that MOVE refuses: these are locked themselves.
    pub(crate) unlock_after: AtomicU64,
    /// Nothing leaves while it is set ([`Engine::stand_still`]).
    pub(crate) still: AtomicBool,
    /// So many wait for an event to be over.
    held_up: AtomicU32,
    /// The number of the call that moved memory and had it grow ([`Kernel::growing`]) whose faults were read last, and where the
    /// first was.
    grown: AtomicU32,
    grown_from: AtomicUsize,
}

/// How often, and for how long each time, who is about to raise an event waits for those that wait for one to be over.
const PAUSES: usize = 16;
const PAUSE: rustix::thread::Timespec = rustix::thread::Timespec { tv_sec: 0, tv_nsec: 50_000 };

/// Somebody waits for an event to be over.
pub(crate) struct HeldUp<'a>(&'a AtomicU32);

impl Drop for HeldUp<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Relaxed);
    }
}

impl<K: Kernel> Engine<K> {
    /// An engine that manages nothing yet.
    pub fn new(kernel: K, config: Config, frames: Frames, place: Place, stats: &'static Stats) -> Self {
        let mut policy = Policy::default();
        policy.reserve();
        Self {
            kernel,
            config,
            space: Space::new(),
            frames,
            place,
            events: RwLock::new(Regions::default()),
            policy: Lock::new(policy, &OTHER_LOCKS),
            stats,
            budget: Budget::new(),
            limit_pages: AtomicI64::new(config.limit_pages),
            stuck_pages: AtomicI64::new(0),
            floor_pages: AtomicI64::new(0),
            tries_again: AtomicBool::new(false),
            ahead: Ahead::new(),
            wanted: Bell::new(),
            huge_wanted: AtomicBool::new(false),
            small_wanted: AtomicBool::new(false),
            splits: AtomicU32::new(0),
            mend: AtomicUsize::new(0),
            huge_due: AtomicBool::new(false),
            pending: Lock::new(Pending::new(), &OTHER_LOCKS),
            leader: Lock::new((), &OTHER_LOCKS),
            calls: Bell::new(),
            answered: Bell::new(),
            inline: false,
            self_service: false,
            helps_itself: AtomicBool::new(false),
            unmappings: AtomicU32::new(0),
            moves: AtomicBool::new(false),
            device_ns: AtomicU64::new(0),
            request_ns: AtomicU64::new(0),
            alone_until: AtomicU64::new(0),
            move_ns: AtomicU64::new(u64::MAX / 2),
            orders: Lock::new(Orders::new(), &OTHER_LOCKS),
            crowd: Crowd::new(),
            evictions: AtomicU32::new(FIRST),
            key: Key::random(),
            streams: Streams::new(),
            held: AtomicUsize::new(0),
            stuck_until: AtomicU64::new(0),
            rest_until: AtomicU64::new(0),
            mend_after: AtomicU64::new(0),
            huge_failed: AtomicU32::new(0),
            huge_after: AtomicU64::new(0),
            given_up: AtomicUsize::new(0),
            touched: AtomicBool::new(false),
            unlock_after: AtomicU64::new(0),
            still: AtomicBool::new(false),
            held_up: AtomicU32::new(0),
            grown: AtomicU32::new(0),
            grown_from: AtomicUsize::new(0),
        }
    }

    /// The same with the key of the parent whose pages it inherits.
    #[must_use]
    pub fn with_key(mut self, key: Key) -> Self {
        self.key = key;
        self
    }

    /// The same for threads that answer their own faults ([`fault::inline`](crate::fault::inline)).
    #[must_use]
    pub fn with_inline(mut self) -> Self {
        self.inline = true;
        self.self_service = self.place.is_for_handlers();
        // They make room themselves, too.
        self.helps_itself = AtomicBool::new(self.self_service);
        self
    }

    pub(crate) fn is_inline(&self) -> bool {
        self.inline
    }

    /// Takes up a mapping: from here on its pages leave and come in. Parts that are managed already are left
    /// alone. Not from a thread that holds any lock.
    ///
    /// # Errors
    /// The kernel's refusal to register; nothing has changed then.
    pub fn adopt(&self, start: usize, end: usize) -> Result<(), Errno> {
        let mut regions = self.events.write();
        let register = |regions: &Regions| self.register_new(regions, start, end);
        self.adopt_by(register, &mut regions, &mut Regions::default(), start, end)
    }

    /// The same with what is to be registered before; `false`: events come first. `discarded`: what was by the events that
    /// were read since the lock is held.
    fn adopt_by(
        &self,
        register: impl Fn(&Regions) -> Result<bool, Errno>,
        regions: &mut Regions,
        discarded: &mut Regions,
        start: usize,
        end: usize,
    ) -> Result<(), Errno> {
        let (mut unmapped, mut asked) = (Regions::default(), Regions::default());
        loop {
            // An event about an older mapping of the same addresses would take the new one for gone.
            self.read_all(regions, |event| match event {
                Event::Remove { start, end } => discarded.insert(Region { start, end }),
                Event::Unmap { start, end } => unmapped.insert(Region { start, end }),
                Event::Remap { .. } | Event::Fault(_) => {}
            });
            for part in asked.iter() {
                unmapped.within(part.start, part.end).for_each(|part| self.forget_gone(part.start, part.end));
            }
            (unmapped, asked) = (Regions::default(), Regions::default());
            if register(regions)? {
                match self.take_up(regions, discarded, start, end) {
                    Ok(()) => return Ok(()),
                    Err(parts) => asked = parts,
                }
            }
        }
    }

    /// Registers what is managed not yet of a range. Where pages were known, what is not registered has come since they went
    /// from there: that can be asked only before. `false`: a mapping is changing.
    fn register_new(&self, regions: &Regions, start: usize, end: usize) -> Result<bool, Errno> {
        let mut gaps = Vec::new();
        regions.gaps(start, end, |from, to| gaps.push((from, to)));
        for (mut at, end) in gaps {
            while at < end {
                let known = self.space.any(at, end, |tag| tag != Tag::None);
                let registered = if known { self.kernel.next_registered(at, end) } else { None };
                if known && self.kernel.event_pending() {
                    return Ok(false);
                }
                let (from, to) = registered.unwrap_or((end, end));
                if at < from {
                    self.forget_gone(at, from);
                    let registered = self.kernel.register(at, from - at);
                    // Beside what was there before may be holes.
                    registered.or_else(|errno| if known { Ok(()) } else { Err(errno) })?;
                }
                at = to;
            }
        }
        Ok(true)
    }

    /// Takes up mappings that were registered before there was an engine: from then on nothing in them grew
    /// unseen. Not from a thread that holds any lock.
    pub fn adopt_registered(&self, ranges: &[(usize, usize)]) {
        let mut regions = self.events.write();
        let mut discarded = Regions::default();
        for (start, end) in ranges {
            // Nothing is registered, so nothing is refused.
            let _ = self.adopt_by(|_| Ok(true), &mut regions, &mut discarded, *start, *end);
        }
    }

    /// Takes up again what is Gone and is there still: to be lost for a fork's child, too, it has to be poisoned before the
    /// clone. What was Gone.
    pub(crate) fn adopt_gone(&self, regions: &mut Regions) -> Vec<Region> {
        let mut gone: Vec<Region> = Vec::new();
        self.space.each_gone(0, TOP, |_, block_start, index| {
            let start = block_start + index * PAGE;
            match gone.last_mut() {
                Some(last) if last.end == start => last.end += PAGE,
                _ => gone.push(Region { start, end: start + PAGE }),
            }
        });
        let mut discarded = Regions::default();
        for Region { start, end } in &gone {
            // The same.
            let _ = self.adopt_by(|_| Ok(true), regions, &mut discarded, *start, *end);
        }
        gone
    }

    /// Until it is dropped, who may raise an event lets those pass that wait for one to be over.
    pub(crate) fn holds_events_up(&self) -> HeldUp<'_> {
        self.held_up.fetch_add(1, Relaxed);
        HeldUp(&self.held_up)
    }

    /// Before an event is raised: lets those go first that wait for one to be over, a millisecond or two. Who raises one after the
    /// other (MADV_DONTNEED in a loop) leaves a microsecond between two. From a thread of the program, which may sleep; no lock
    /// held.
    pub fn let_others_pass(&self) {
        for _ in 0..PAUSES {
            if self.held_up.load(Relaxed) == 0 {
                return;
            }
            let _ = rustix::thread::nanosleep(&PAUSE);
        }
    }

    /// Reads and applies events until none is pending; faults wait for a server. Shows each to `each`: what the program is about to
    /// discard may still be mapped for a while.
    pub(crate) fn read_all(&self, regions: &mut Regions, mut each: impl FnMut(Event)) {
        let mut backoff = crate::sync::Backoff::new();
        let mut held_up = None;
        while self.kernel.event_pending() {
            let (read, heard) = self.read_and_hear(regions, &mut each);
            held_up.get_or_insert_with(|| self.holds_events_up());
            if heard {
                self.calls.ring();
            }
            // Who caused an event that was read has to run before it is pending no more; it may be on this CPU, and the
            // caller come before it.
            if read == 0 {
                backoff.snooze();
            }
        }
    }

    /// What locked memory has grown by is filled by the kernel before it tells of the move: it waits for us, who can map nothing
    /// until that is told. So there no faults are delivered any more. Where libc does not say how much it is, to the end of the
    /// mapping or to what is known. Not of a call that is over: anything may be there by now, and what is out would be zeros.
    fn let_grow(&self, regions: &Regions) {
        let (number, at) = (self.grown.load(Relaxed), self.grown_from.load(Relaxed));
        let Some(growth) = self.kernel.growing().filter(|growth| growth.number == number) else { return };
        // Where it grew in place that is not told, and its faults are answered.
        if !self.kernel.event_pending() || self.is_mapped(at) {
            return;
        }
        let end = match growth.by {
            0 => {
                let mapping = self.kernel.mapping(at).filter(|(start, _)| *start <= at);
                let Some((_, end)) = mapping else { return };
                known(self, regions, (at, end)).map_or(end, |known| known.0)
            }
            by => at + by,
        };
        if at < end {
            self.kernel.unregister(at, end - at);
        }
    }

    /// Takes up what is registered of a range: the caller looked at the mappings a while ago, and where there was a
    /// hole when it was registered the program can have mapped what raises no event, and would be zeros once it
    /// left.
    ///
    /// # Errors
    /// A mapping is changing; its event comes first. The parts of which was asked whose they are: if they go by that event, what
    /// has come there may be registered by the question. Not what was Gone before: it may have been refused once more.
    fn take_up(
        &self,
        regions: &mut Regions,
        discarded: &Regions,
        start: usize,
        end: usize,
    ) -> Result<(), Regions> {
        let mut at = start;
        while let Some((from, to)) = self.kernel.next_registered(at, end) {
            // Else that may not be so, and what is new would be registered and taken for what is Gone.
            if self.kernel.event_pending() {
                return Err(Regions::default());
            }
            // Perhaps with another: the program may have mapped it and registered it with its own, in a hole. To register
            // what is ours already changes nothing.
            let is_ours = self.kernel.register(from, to - from).is_ok();
            // Huge pages of hugetlbfs, private memory of /dev/zero: they can be registered, and are not to be managed. They came
            // in the place of what was listed.
            let is_anonymous = !is_ours || self.kernel.is_anonymous(from);
            if self.kernel.event_pending() {
                let mut asked = Regions::default();
                asked.insert(Region { start: from, end: to });
                self.space.each_gone(from, to, |_, block_start, index| {
                    let page = block_start + index * PAGE;
                    asked.remove(page, page + PAGE);
                });
                return Err(asked);
            }
            match (is_ours, is_anonymous) {
                (true, true) => self.take_up_mapping(regions, discarded, from, to),
                (true, false) => self.kernel.unregister(from, to - from),
                (false, _) => {}
            }
            at = to;
        }
        if self.kernel.event_pending() {
            return Err(Regions::default());
        }
        Ok(())
    }

    /// The same for one mapping, of which no event is unread.
    fn take_up_mapping(&self, regions: &mut Regions, discarded: &Regions, start: usize, end: usize) {
        // What the program does since the registration raises events. They are read after the words below are made,
        // and before any page of them can be moved: so the region must be known and looked at first.
        regions.insert(Region { start, end });
        let mut found = [Found::NONE; 64];
        let mut at = start;
        while at < end {
            let (n, walked) = self.kernel.scan(at, end, &mut found);
            for run in &found[..n] {
                // What leaves before it is discarded would come back.
                discarded.gaps(run.start, run.end, |from, to| {
                    self.adopt_pages(from, to, run.huge);
                });
            }
            if walked <= at {
                break;
            }
            at = walked;
        }
        self.space
            .each_gone(start, end, |block, block_start, index| self.settle_gone(block, block_start, index));
        Stats::add(&self.stats.adoptions, 1);
    }

    /// What is in a range was mapped since pages went from there.
    fn forget_gone(&self, start: usize, end: usize) {
        self.space.each_gone(start, end, |block, _, index| block.set(index, block.word(index).forget()));
    }

    /// A page is there that is Gone: that it was unmapped was refused, and its data are lost. Unless it may be what has grown
    /// to here since, of which no event tells. Events lock held, at least shared.
    pub(crate) fn settle_gone(&self, block: &mut BlockState, block_start: usize, index: usize) {
        let (word, at) = (block.word(index), block_start + index * PAGE);
        if self.kernel.growths().is_none_or(|growths| word.payload() != growths.into()) {
            block.set(index, word.forget());
        } else if self.loses(at, &self.stats.unmap_refused) {
            block.set(index, word.poison());
        }
    }

    /// From here on a page raises SIGBUS, and counts as lost; `false`: it cannot now. Counted first: the program may end by it at
    /// once, and the engine with it, and all that can be told then is what was counted.
    pub(crate) fn loses(&self, at: usize, counter: &core::sync::atomic::AtomicU64) -> bool {
        Stats::add(counter, 1);
        let is_lost = self.kernel.poison(at, PAGE).is_ok();
        if !is_lost {
            counter.fetch_sub(1, core::sync::atomic::Ordering::Relaxed);
        }
        is_lost
    }

    /// At the engine's end, when nobody else is at work: what is out, and is mapped still, raises SIGBUS from here on.
    pub fn abandon(&self) {
        let is_out = |tag| matches!(tag, Tag::Cached | Tag::Swapped | Tag::Busy);
        for (block_start, block) in self.space.blocks(0, TOP) {
            let block = block.lock();
            for index in (0..BLOCK_PAGES).filter(|index| is_out(block.word(*index).tag())) {
                // Refused where nothing is mapped any more.
                let _ = self.kernel.poison(block_start + index * PAGE, PAGE);
            }
        }
    }

    fn adopt_pages(&self, start: usize, end: usize, huge: bool) {
        let mut at = start;
        while at < end {
            let mut block = self.space.block_or_new(at).lock();
            let block_start = at & !(BLOCK - 1);
            let stop = end.min(block_start + BLOCK);
            let whole = huge && at == block_start && stop == block_start + BLOCK;
            while at < stop {
                let index = (at - block_start) / PAGE;
                block.unit_or_new(index, &self.space.spares);
                let word = block.word(index);
                if word.is_unknown() {
                    block.set(index, word.adopt());
                }
                at += PAGE;
                if !whole && (at % UNIT == 0 || at == stop) {
                    self.is_here(&mut block, block_start, index & !(UNIT_PAGES - 1)..index + 1);
                }
            }
            if whole {
                block.became_whole();
                self.is_here(&mut block, block_start, 0..UNIT_PAGES);
            }
        }
    }

    /// Can a block come in by a huge page that stays one? Where several in a row were split, most that nothing is known
    /// of are as those were.
    pub(crate) fn comes_whole(&self, block: &BlockState) -> bool {
        if block.table || block.splits > 1 || self.config.swapin == Swapin::Never {
            return false;
        }
        let splits = self.splits.load(Relaxed);
        splits < MOST_SPLITS || {
            self.splits.store(splits.wrapping_add(1).max(MOST_SPLITS), Relaxed);
            splits % TRIED == 0
        }
    }

    /// A huge page came in to where no small one was known. Under the block's lock.
    pub(crate) fn came_whole(&self, block: &mut BlockState, start: usize) -> bool {
        let whole = self.is_one_page(start);
        if whole {
            block.became_whole();
            self.splits.store(0, Relaxed);
        } else {
            block.splits = block.splits.saturating_add(1);
            self.splits.fetch_add(1, Relaxed);
        }
        whole
    }

    /// Is a block mapped by one huge page? The kernel knows; under the block's lock.
    pub(crate) fn is_one_page(&self, start: usize) -> bool {
        let mut found = [Found::NONE; 1];
        let n = self.kernel.scan(start, start + BLOCK, &mut found).0;
        n == 1 && found[0].huge && found[0].end - found[0].start == BLOCK
    }

    /// Tells the policy that pages of a block came in; `asked`: by a fault, and not as part of a stream. One unit stands for a
    /// huge page.
    pub(crate) fn used(&self, block: &mut BlockState, block_start: usize, pages: Range<usize>, asked: bool) {
        let huge = block.huge;
        self.wait_in_line(block, block_start, pages, asked, |usage, soon| {
            if !usage.queued && usage.evicted_at != 0 {
                let pages = if huge { BLOCK_PAGES } else { UNIT_PAGES } as u64;
                Stats::add(&self.stats.workingset_refault_anon, pages);
                if soon {
                    Stats::add(&self.stats.workingset_activate_anon, pages);
                }
            }
        });
    }

    /// Tells it of pages that were here all the time, or are found, and wait in line from now on.
    pub(crate) fn is_here(&self, block: &mut BlockState, block_start: usize, pages: Range<usize>) {
        self.wait_in_line(block, block_start, pages, false, |_, _| ());
    }

    /// `each` sees a unit's usage as it was, and whether it came back soon.
    fn wait_in_line(
        &self,
        block: &mut BlockState,
        block_start: usize,
        pages: Range<usize>,
        asked: bool,
        each: impl Fn(Usage, bool),
    ) {
        let now = self.evictions.load(Relaxed);
        // What a stream brings in is no sign of use.
        let gives_up = asked && self.gives_up();
        for first in (pages.start & !(UNIT_PAGES - 1)..pages.end).step_by(UNIT_PAGES) {
            let turn = Turn::new(((block_start + first * PAGE) / UNIT) as u32, block.huge);
            let Some(unit) = block.unit_mut(first) else { continue };
            if pages.len() > 1 {
                // What came with others says nothing of which of its pages are used.
                unit.usage.sampled = 0;
            }
            let came = bits(pages.start.saturating_sub(first)..(pages.end - first).min(UNIT_PAGES)) as u16;
            let before = unit.usage;
            let soon = self.policy.lock().used(turn, &mut unit.usage, now, came, asked);
            each(before, soon);
            if gives_up && soon {
                // One unit stands for a huge page.
                let part = pages.start.max(first)..pages.end.min(first + UNIT_PAGES);
                let part = if block.huge { 0..BLOCK_PAGES } else { part };
                part.for_each(|index| self.give_up(block, index));
            }
        }
    }

    /// Reads events, one batch or what it takes to know their order, and applies all but the faults; shows each to
    /// `each`, which answers no fault itself. Exclusive.
    fn read_and_apply(&self, regions: &mut Regions, mut each: impl FnMut(Event)) -> usize {
        let mut events = [Event::Remove { start: 0, end: 0 }; 32];
        let mut order = Order::new(&self.kernel);
        let mut backoff = crate::sync::Backoff::new();
        let mut read = 0;
        loop {
            let n = self.read_some(&mut order, &mut events);
            read += n;
            for event in &events[..n] {
                // Faults first in a read are older than nothing: they are served after the events anyway.
                order.take(self, regions, *event);
            }
            for event in &events[..n] {
                if let Event::Fault(fault) = event {
                    let growth = self.kernel.growing().filter(|growth| growth.thread == fault.thread);
                    if let Some(growth) = growth.filter(|growth| growth.number != self.grown.load(Relaxed)) {
                        self.grown.store(growth.number, Relaxed);
                        self.grown_from.store(page_start(fault.address), Relaxed);
                    }
                }
                each(*event);
            }
            if n == 0 {
                self.let_grow(regions);
            }
            if order.is_empty() || (!self.kernel.event_pending() && order.settle(self, regions)) {
                return read;
            }
            backoff.snooze();
        }
    }

    /// Reads events, the last of which was caused by a thread that has done nothing since: nor has any other whose event
    /// was read, where order matters. Exclusive.
    fn read_some(&self, order: &mut Order, events: &mut [Event]) -> usize {
        let waits = !order.is_empty();
        if waits {
            self.moves.store(true, Relaxed);
        } else if !self.moves.load(Relaxed) {
            return self.kernel.read_events(events);
        }
        // Faults are read first. Who caused them waits until they are answered, so an event is reached.
        for n in 0..events.len() {
            if waits {
                // What is read was there when this looked.
                if !self.kernel.wait_event(0) {
                    return n;
                }
                order.look(&self.kernel);
            }
            match self.kernel.read_events(&mut events[n..n + 1]) {
                0 => return n,
                _ if matches!(events[n], Event::Fault(_)) => {}
                _ => return n + 1,
            }
        }
        events.len()
    }

    /// Reads and applies what is pending; faults that turn up wait for a server. From any thread that holds no lock.
    pub fn pump(&self) {
        let (_, heard) = self.read_and_hear(&mut self.events.write(), |_| ());
        if heard {
            self.calls.ring();
        }
    }

    /// As [`Engine::read_and_apply`]; faults wait for a server. Whether there were some: who answers none calls one.
    pub(crate) fn read_and_hear(&self, regions: &mut Regions, mut each: impl FnMut(Event)) -> (usize, bool) {
        let since = Some(self.unmappings.load(Relaxed));
        let mut heard = false;
        let read = self.read_and_apply(regions, |event| {
            if let Event::Fault(fault) = event {
                self.hear(fault, since);
                heard = true;
            }
            each(event);
        });
        (read, heard)
    }

    /// Returns when the events that were read before the call are applied. Takes no lock; any thread, with any lock but that
    /// of the events.
    pub fn catch_up(&self, wait: Wait) {
        self.events.wait_for_writer(wait);
    }

    /// Does a server hold the leadership? For tests.
    #[cfg(any(test, feature = "simulated"))]
    pub fn is_led(&self) -> bool {
        self.leader.try_lock().is_none()
    }

    /// Wakes an evictor.
    pub fn kick(&self) {
        self.wanted.ring();
    }
}
