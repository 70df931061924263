//! A kernel in memory: one address space whose pages, mappings, faults and events are simulated, for tests.
//!
//! The memory is real, so that the engine's reads and checksums work, but which pages are *present* is kept in
//! a table: a page that MOVE took away is overwritten with a pattern that no program writes. What userfaultfd
//! answers (EEXIST, ENOENT, EAGAIN, EBUSY, EINVAL, half done) is answered here by the same rules, in the same
//! order. A system call of the program goes in steps, as in the kernel: the mappings change, the
//! event is queued, it is read, the caller wakes up; EAGAIN holds from the first to the last.
//!
//! The state is under one lock, a leaf. Before each call the hook ([`Simulated::set_meanwhile`]) runs with no
//! lock of this module held: there the test lets other threads of the program go on. Not for production.

use super::{Event, Fault, Found, Kernel};
use crate::frame::{CHUNK, EXECUTABLE};
use crate::space::{BLOCK, BLOCK_PAGES, PAGE};
use crate::sync::{Lock, OTHER_LOCKS};
use alloc::boxed::Box;
use alloc::collections::VecDeque;
use alloc::vec;
use alloc::vec::Vec;
use core::ops::Range;
use once_cell::race::OnceBox;
use pageout_uffd::Partial;
use rustix::io::Errno;
use rustix::mm::{mmap_anonymous, munmap, MapFlags, ProtFlags};

/// What pages that are not there hold.
const JUNK: u8 = 0xdb;

/// One page of the simulated address space.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Page {
    /// The mapping that it belongs to; 0 = none.
    pub mapping: u32,
    /// Registered with the context.
    pub registered: bool,
    /// See [`Kernel::mark`].
    pub marked: bool,
    /// The program may write.
    pub writable: bool,
    /// It can be executed: MOVE wants that of both sides, or of neither.
    pub executable: bool,
    /// The kernel may give huge pages here. Elsewhere a fault makes a page table before the engine hears of it.
    pub advised: bool,
    /// Memory is there.
    pub present: bool,
    /// It is the kernel's page of zeros, which is no memory and goes wherever the page is moved, until somebody writes.
    pub zeros: bool,
    /// Touching it raises SIGBUS.
    pub poisoned: bool,
    /// Pinned by I/O: MOVE refuses it.
    pub pinned: bool,
    /// Shared since a fork: MOVE refuses it until it is written.
    pub shared: bool,
    /// The kernel may drop it until it is written (MADV_FREE).
    pub lazy: bool,
}

/// How an access of the program ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// It was done; what the page held before.
    Done(u64),
    /// The thread waits for the engine.
    Waits,
    /// SIGSEGV.
    Segv,
    /// SIGBUS.
    Sigbus,
}

/// A system call of the program between its start and its return.
#[derive(Debug)]
pub struct Call {
    /// Events to queue, the first last.
    events: Vec<Event>,
    /// Number of the event that waits to be read.
    waits_for: Option<u64>,
}

/// How an `madvise` of the program began.
#[derive(Debug)]
pub enum Advised {
    /// It is done.
    Done,
    /// Its event is to be read first.
    Waits(Call),
    /// Nothing was done: a part of the range is registered, a call for each part is needed.
    Mixed,
}

struct Waiter {
    thread: u32,
    address: usize,
    read: bool,
}

struct State {
    pages: Vec<Page>,
    /// Per block: mapped by one huge page.
    huge: Vec<bool>,
    /// Per block: a page table of small pages is there.
    table: Vec<bool>,
    waiters: Vec<Waiter>,
    events: VecDeque<(u64, Event)>,
    queued: u64,
    /// Calls under way that have an event.
    changing: usize,
    mappings: u32,
    /// How often a mapping has grown; and before the last moment at which no event was unread.
    growths: u32,
    told: u32,
    now: u64,
    random: u64,
    /// So many of 65536 moves and copies stop half-way.
    partial: u32,
    /// So many of 65536 copies find no memory, and of the times that frames are dropped.
    short: u32,
    /// So many of 65536 mappings can be executed.
    executable: u32,
    /// Who works now answers faults: it must not raise one.
    serving: bool,
    /// Faults are not told by events: the thread is sent a signal (`UFFD_FEATURE_SIGBUS`).
    signals: bool,
    /// An event was taken back.
    untold: bool,
    /// See [`Simulated::grew_unseen`].
    unseen: bool,
}

impl State {
    /// Is an event unread? Events lock held.
    fn is_changing(&mut self) -> bool {
        if self.changing == 0 {
            self.told = self.growths;
        }
        self.changing > 0
    }

    /// Is there no memory this time?
    fn is_short(&mut self) -> bool {
        self.short > 0 && splitmix(&mut self.random) & 0xffff < u64::from(self.short)
    }
}

/// The simulated kernel. See the module.
pub struct Simulated {
    base: usize,
    reserved: (usize, usize),
    program: usize,
    small: usize,
    /// First page of the frames that can be executed.
    executable: usize,
    state: Lock<State>,
    meanwhile: OnceBox<Box<dyn Fn() + Send + Sync>>,
    held: OnceBox<Box<dyn Fn(bool) -> bool + Send + Sync>>,
}

/// The next of a row of numbers from a seed.
pub(crate) fn splitmix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mixed = (*state ^ (*state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

impl Simulated {
    /// An address space of `blocks` blocks for the program (nothing mapped), `chunks` chunks of small frames
    /// and `huge` huge ones (all holes, registered).
    ///
    /// # Panics
    /// Without memory.
    pub fn new(blocks: usize, chunks: usize, huge: usize, seed: u64) -> Self {
        let small = (chunks * CHUNK * PAGE).next_multiple_of(BLOCK);
        let executable = (EXECUTABLE * PAGE).next_multiple_of(BLOCK);
        let len = blocks * BLOCK + small + huge * BLOCK + executable + BLOCK;
        // SAFETY: a fresh mapping.
        let start = unsafe {
            mmap_anonymous(
                core::ptr::null_mut(),
                len + BLOCK,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )
        };
        let start = start.expect("memory for a simulation") as usize;
        let mut pages = vec![Page::default(); len / PAGE];
        let frame = Page { mapping: 1, registered: true, writable: true, ..Page::default() };
        let executable = (len - BLOCK - executable) / PAGE;
        pages[blocks * BLOCK_PAGES..executable].fill(frame);
        pages[executable..(len - BLOCK) / PAGE].fill(Page { executable: true, ..frame });
        let state = State {
            pages,
            huge: vec![false; len / BLOCK],
            table: vec![false; len / BLOCK],
            waiters: Vec::new(),
            events: VecDeque::new(),
            queued: 0,
            changing: 0,
            mappings: 1,
            growths: 0,
            told: 0,
            now: 1,
            random: seed,
            partial: 0,
            short: 0,
            executable: 0,
            serving: false,
            signals: false,
            untold: false,
            unseen: false,
        };
        Self {
            base: start.next_multiple_of(BLOCK),
            reserved: (start, len + BLOCK),
            program: blocks * BLOCK,
            small,
            executable,
            state: Lock::new(state, &OTHER_LOCKS),
            meanwhile: OnceBox::new(),
            held: OnceBox::new(),
        }
    }

    /// What runs before each call of the engine; set once. It must not call the engine.
    pub fn set_meanwhile(&self, hook: impl Fn() + Send + Sync + 'static) {
        let _ = self.meanwhile.set(Box::new(Box::new(hook)));
    }

    /// Says whether the events lock is held (exclusively, if so asked), as the calls that need it require; set
    /// once.
    pub fn set_held(&self, held: impl Fn(bool) -> bool + Send + Sync + 'static) {
        let _ = self.held.set(Box::new(Box::new(held)));
    }

    /// So many of 65536 moves and copies of several pages stop half-way.
    pub fn set_partial(&self, of_65536: u32) {
        self.state.lock().partial = of_65536;
    }

    /// From here on nobody reads faults: who plays the thread's handler finds them by [`Simulated::waiting`].
    pub fn set_signals(&self) {
        self.state.lock().signals = true;
    }

    /// So many of 65536 copies find no memory, and of the times that frames are dropped (MADV_DONTNEED of a part, where the
    /// process has as many mappings as it may).
    pub fn set_short(&self, of_65536: u32) {
        self.state.lock().short = of_65536;
    }

    /// So many of 65536 mappings can be executed.
    pub fn set_executable(&self, of_65536: u32) {
        self.state.lock().executable = of_65536;
    }

    /// Says whether who works from now on answers faults, and so must not raise one; returns what held before.
    pub fn set_serving(&self, serving: bool) -> bool {
        core::mem::replace(&mut self.state.lock().serving, serving)
    }

    /// The program's first address.
    pub fn program_base(&self) -> usize {
        self.base
    }

    /// Where small frames start.
    pub fn frames_base(&self) -> usize {
        self.base + self.program
    }

    /// Where huge frames start.
    pub fn huge_base(&self) -> usize {
        self.frames_base() + self.small
    }

    /// Where frames start that can be executed.
    pub fn executable_base(&self) -> usize {
        self.address(self.executable)
    }

    /// A chunk of zeros.
    pub fn zeros(&self) -> usize {
        self.base + self.reserved.1 - 2 * BLOCK
    }

    /// Lets time pass.
    pub fn advance(&self, ns: u64) {
        self.state.lock().now += ns;
    }

    /// What is known of the page of `address`.
    pub fn page(&self, address: usize) -> Page {
        self.state.lock().pages[self.index(address)]
    }

    /// Is the block of `address` mapped by one huge page?
    pub fn is_huge(&self, address: usize) -> bool {
        self.state.lock().huge[(address - self.base) / BLOCK]
    }

    fn index(&self, address: usize) -> usize {
        assert!(
            address % PAGE == 0 && address >= self.base && address < self.zeros(),
            "{address:#x} is not of this address space"
        );
        (address - self.base) / PAGE
    }

    fn range(&self, at: usize, len: usize) -> Range<usize> {
        assert!(len > 0 && len % PAGE == 0, "a range of {len} bytes");
        let first = self.index(at);
        first..self.index(at + len - PAGE) + 1
    }

    fn address(&self, index: usize) -> usize {
        self.base + index * PAGE
    }

    fn meanwhile(&self) {
        if let Some(hook) = self.meanwhile.get() {
            hook();
        }
    }

    /// The events lock must be held here.
    fn under_lock(&self, exclusively: bool) {
        assert!(self.held.get().is_none_or(|held| held(exclusively)), "a call without the events lock");
    }

    /// Does somebody hold the events lock?
    pub fn is_held(&self, exclusively: bool) -> bool {
        self.held.get().is_some_and(|held| held(exclusively))
    }

    // The program's side.

    /// Pages `start..start + len` are mapped anew and hold nothing; what was there is gone.
    pub fn mmap(&self, start: usize, len: usize, huge: bool) -> Call {
        let mut state = self.state.lock();
        let range = self.range(start, len);
        let registered = state.pages[range.clone()].iter().any(|page| page.registered);
        state.mappings += 1;
        let mapping = state.mappings;
        let executable =
            state.executable > 0 && splitmix(&mut state.random) % 65536 < state.executable.into();
        for index in range.clone() {
            self.drop_page(&mut state, index);
            state.pages[index] =
                Page { mapping, writable: true, executable, advised: huge, ..Page::default() };
        }
        if huge {
            for block in range.start.div_ceil(BLOCK_PAGES)..range.end / BLOCK_PAGES {
                state.table[block] = false;
                state.huge[block] = true;
                for index in block * BLOCK_PAGES..(block + 1) * BLOCK_PAGES {
                    state.pages[index].present = true;
                    // SAFETY: memory of this simulation.
                    unsafe { core::ptr::write_bytes(self.address(index) as *mut u8, 0, PAGE) };
                }
            }
        }
        let unmap = Event::Unmap { start, end: start + len };
        Self::begin(&mut state, registered.then_some(unmap).into_iter().collect())
    }

    /// Pages are unmapped.
    pub fn munmap(&self, start: usize, len: usize) -> Call {
        let mut state = self.state.lock();
        let range = self.range(start, len);
        let registered = state.pages[range.clone()].iter().any(|page| page.registered);
        for index in range {
            self.drop_page(&mut state, index);
            state.pages[index] = Page::default();
        }
        let unmap = Event::Unmap { start, end: start + len };
        Self::begin(&mut state, registered.then_some(unmap).into_iter().collect())
    }

    /// Pages are unmapped by who is killed before the event is read, so that nobody ever reads it.
    pub fn munmap_untold(&self, start: usize, len: usize) {
        let mut call = self.munmap(start, len);
        let mut state = self.state.lock();
        state.changing -= core::mem::take(&mut call.events).len();
        state.untold = true;
    }

    /// Pages were to be unmapped, and what is registered tells of it; but that is refused: something behind them is sealed.
    pub fn refuse_munmap(&self, start: usize, len: usize) -> Call {
        let mut state = self.state.lock();
        let range = self.range(start, len);
        let registered = state.pages[range.clone()].iter().any(|page| page.registered);
        // Where it begins, and ends, mappings are split by then.
        for range in [range.clone(), range.end..state.pages.len()] {
            let id = state.pages.get(range.start).map_or(0, |page| page.mapping);
            state.mappings += 1;
            let split = state.mappings;
            let rest = state.pages[range].iter_mut().take_while(|page| id != 0 && page.mapping == id);
            rest.for_each(|page| page.mapping = split);
        }
        let unmap = Event::Unmap { start, end: start + len };
        Self::begin(&mut state, registered.then_some(unmap).into_iter().collect())
    }

    /// Pages, present or not, and their mappings go from `from` to `to`; `len` is that of the old place, the
    /// mapping at the new one is `grown` longer. What was mapped at `to` is gone.
    pub fn mremap(&self, from: usize, to: usize, len: usize, grown: usize) -> Call {
        let mut state = self.state.lock();
        let (source, target) = (self.range(from, len), self.range(to, len + grown));
        assert!(source.end <= target.start || target.end <= source.start, "mremap onto itself");
        let over = state.pages[target.clone()].iter().any(|page| page.registered);
        // Each mapping tells of itself: what is registered moves with an event, the rest without.
        let registered: Vec<bool> = state.pages[source.clone()].iter().map(|page| page.registered).collect();
        for index in target.clone() {
            self.drop_page(&mut state, index);
        }
        state.mappings += 1;
        state.growths += (grown > 0) as u32;
        let mapping = state.mappings;
        for (i, index) in target.enumerate() {
            let Some(source) = (i < source.len()).then(|| source.start + i) else {
                let Page { registered, marked, writable, executable, .. } = state.pages[index - 1];
                state.pages[index] =
                    Page { mapping, registered, marked, writable, executable, ..Page::default() };
                continue;
            };
            let page = state.pages[source];
            if page.present {
                self.carry(source, index);
                self.split(&mut state, index);
            }
            state.pages[index] = Page { mapping, ..page };
        }
        for index in source {
            self.drop_page(&mut state, index);
            state.pages[index] = Page::default();
        }
        let mut events = Vec::new();
        let mut first = 0;
        for run in registered.chunk_by(|a, b| a == b) {
            let (at, len) = (first * PAGE, run.len() * PAGE);
            first += run.len();
            if run[0] {
                events.push(Event::Unmap { start: from + at, end: from + at + len });
                events.push(Event::Remap { from: from + at, to: to + at, len });
            }
        }
        if over {
            events.push(Event::Unmap { start: to, end: to + len + grown });
        }
        Self::begin(&mut state, events)
    }

    /// A mapping grows in place, by what is not mapped from `end` on. Raises no event.
    pub fn grow(&self, end: usize, len: usize) {
        let mut state = self.state.lock();
        let range = self.range(end, len);
        let Page { mapping, registered, marked, writable, executable, .. } = state.pages[range.start - 1];
        state.growths += 1;
        for index in range {
            assert_eq!(state.pages[index].mapping, 0, "grows over another mapping");
            state.pages[index] =
                Page { mapping, registered, marked, writable, executable, ..Page::default() };
        }
    }

    /// Has a mapping grown, and was there always an event unread since?
    pub fn has_grown(&self) -> bool {
        let state = self.state.lock();
        state.signals || state.growths != state.told
    }

    /// `madvise(DONTNEED)` or `FREE`. Without registration it is done at once, under the lock of the mappings;
    /// with it the event comes first, and [`Simulated::zap`] after the call has returned.
    pub fn madvise(&self, start: usize, len: usize, free: bool) -> Advised {
        let mut state = self.state.lock();
        let range = self.range(start, len);
        let registered = state.pages[range.clone()].iter().filter(|page| page.registered).count();
        if registered == 0 {
            self.zap_range(&mut state, range, free);
            Advised::Done
        } else if registered < range.len() {
            Advised::Mixed
        } else {
            let remove = Event::Remove { start, end: start + len };
            Advised::Waits(Self::begin(&mut state, [remove].into()))
        }
    }

    /// The second half of `madvise`: mapped pages are dropped, or may be (`free`).
    pub fn zap(&self, start: usize, len: usize, free: bool) {
        self.zap_range(&mut self.state.lock(), self.range(start, len), free);
    }

    fn zap_range(&self, state: &mut State, range: Range<usize>, free: bool) {
        for index in range {
            if free {
                let present = state.pages[index].present;
                state.pages[index].lazy |= present;
            } else if state.pages[index].mapping != 0 {
                self.drop_page(state, index);
            }
        }
    }

    /// `madvise(GUARD_INSTALL)` and `GUARD_REMOVE`: pages are discarded, and no event says so.
    pub fn guard(&self, start: usize, len: usize) {
        self.zap(start, len, false);
    }

    /// The kernel drops a page that MADV_FREE gave it. Whether there was one.
    pub fn drop_lazy(&self, at: usize) -> bool {
        let mut state = self.state.lock();
        let index = self.index(at);
        let lazy = state.pages[index].lazy && state.pages[index].present;
        if lazy {
            self.drop_page(&mut state, index);
        }
        lazy
    }

    /// Changes the protection: the pages become a mapping of their own. Raises no event.
    pub fn mprotect(&self, start: usize, len: usize, writable: bool) {
        let mut state = self.state.lock();
        state.mappings += 1;
        let mapping = state.mappings;
        for index in self.range(start, len) {
            if state.pages[index].mapping != 0 {
                self.split(&mut state, index);
                state.pages[index].mapping = mapping;
                state.pages[index].writable = writable;
            }
        }
    }

    /// Pins a page that is there, or lets it go. Whether it is there.
    pub fn pin(&self, at: usize, pinned: bool) -> bool {
        let mut state = self.state.lock();
        let index = self.index(at);
        let present = state.pages[index].present;
        state.pages[index].pinned = pinned && present;
        present
    }

    /// The address space of a fork's child, as large and elsewhere: nothing is registered there, and marks stay.
    pub fn fork_to(&self, child: &Self) {
        self.share();
        let state = self.state.lock();
        let mut other = child.state.lock();
        for index in 0..self.program / PAGE {
            let page = Page { registered: false, pinned: false, ..state.pages[index] };
            if page.present {
                // SAFETY: memory of both simulations.
                unsafe {
                    let (from, to) = (self.address(index), child.address(index));
                    core::ptr::copy_nonoverlapping(from as *const u8, to as *mut u8, PAGE);
                }
            }
            other.pages[index] = page;
            (other.huge[index / BLOCK_PAGES], other.table[index / BLOCK_PAGES]) = (false, true);
        }
        other.mappings = state.mappings;
    }

    /// All present pages are shared, as after a fork.
    pub fn share(&self) {
        let mut state = self.state.lock();
        for page in &mut state.pages[..self.program / PAGE] {
            page.shared = page.present && !page.zeros;
        }
    }

    /// `thread` reads a page, or writes `write` to all of its words. A page whose words differ reads as
    /// `u64::MAX`.
    pub fn access(&self, thread: u32, at: usize, write: Option<u64>) -> Access {
        let mut state = self.state.lock();
        if state.waiters.iter().any(|waiter| waiter.thread == thread) {
            return Access::Waits;
        }
        let index = self.index(at);
        let page = state.pages[index];
        if page.mapping == 0 || (write.is_some() && !page.writable) {
            return Access::Segv;
        }
        if page.poisoned {
            return Access::Sigbus;
        }
        if !page.present {
            if page.registered {
                state.table[index / BLOCK_PAGES] |= !page.advised;
                let read = state.signals;
                state.waiters.push(Waiter { thread, address: at, read });
                return Access::Waits;
            }
            self.bring(&mut state, index);
            state.pages[index].zeros = write.is_none();
            // SAFETY: memory of this simulation.
            unsafe { core::ptr::write_bytes(at as *mut u8, 0, PAGE) };
        }
        // SAFETY: the same; only calls under the state's lock change pages of the program.
        let words = unsafe { core::slice::from_raw_parts_mut(at as *mut u64, PAGE / 8) };
        let old = if words.iter().all(|word| *word == words[0]) { words[0] } else { u64::MAX };
        if let Some(value) = write {
            words.fill(value);
            state.pages[index].lazy = false;
            state.unseen |= core::mem::take(&mut state.pages[index].zeros);
            self.own(&mut state, index);
        }
        Access::Done(old)
    }

    /// Goes on with a system call; whether it has returned. Not while the program should stand still.
    pub fn advance_call(&self, call: &mut Call) -> bool {
        let mut state = self.state.lock();
        if let Some(number) = call.waits_for {
            if state.events.iter().any(|(queued, _)| *queued == number) {
                return false;
            }
            // As the kernel counts: down only when the caller runs again.
            state.changing -= 1;
            call.waits_for = None;
        } else if let Some(event) = call.events.pop() {
            state.queued += 1;
            let number = state.queued;
            state.events.push_back((number, event));
            call.waits_for = Some(number);
            return false;
        }
        call.events.is_empty()
    }

    /// Has a page of zeros become memory by a write that is none of the engine's to a frame? Nobody hears of that.
    pub fn grew_unseen(&self) -> bool {
        self.state.lock().unseen
    }

    /// Threads that wait for the engine: thread, address, whether the engine has read of it.
    pub fn waiting(&self) -> Vec<(u32, usize, bool)> {
        let state = self.state.lock();
        state.waiters.iter().map(|waiter| (waiter.thread, waiter.address, waiter.read)).collect()
    }

    /// Calls under way that have an event.
    pub fn changing(&self) -> usize {
        self.state.lock().changing
    }

    fn begin(state: &mut State, events: Vec<Event>) -> Call {
        state.changing += events.len();
        Call { events, waits_for: None }
    }

    // What pages go through.

    /// The memory of a page goes; its mapping stays.
    fn drop_page(&self, state: &mut State, index: usize) {
        self.split(state, index);
        let page = &mut state.pages[index];
        if page.present {
            // SAFETY: memory of this simulation.
            unsafe { core::ptr::write_bytes(self.address(index) as *mut u8, JUNK, PAGE) };
        }
        (page.present, page.zeros, page.lazy) = (false, false, false);
        (page.poisoned, page.pinned, page.shared) = (false, false, false);
    }

    /// Does a page take memory? One of zeros that the engine has written to does.
    fn is_memory(&self, state: &State, index: usize) -> bool {
        // SAFETY: memory of this simulation.
        let words = || unsafe { core::slice::from_raw_parts(self.address(index) as *const u64, PAGE / 8) };
        let page = state.pages[index];
        page.present && (!page.zeros || words().iter().any(|word| *word != 0))
    }

    /// A small page appears.
    fn bring(&self, state: &mut State, index: usize) {
        state.table[index / BLOCK_PAGES] = true;
        state.pages[index].present = true;
    }

    /// What is mapped huge around a page is mapped small from now on.
    fn split(&self, state: &mut State, index: usize) {
        let block = index / BLOCK_PAGES;
        state.table[block] |= core::mem::take(&mut state.huge[block]);
    }

    /// A write makes a shared page the process's own: the one, of a huge page too.
    fn own(&self, state: &mut State, index: usize) {
        if core::mem::take(&mut state.pages[index].shared) {
            self.split(state, index);
        }
    }

    fn carry(&self, from: usize, to: usize) {
        // SAFETY: different pages of this simulation.
        unsafe {
            core::ptr::copy_nonoverlapping(
                self.address(from) as *const u8,
                self.address(to) as *mut u8,
                PAGE,
            );
        }
    }

    fn wake_range(state: &mut State, at: usize, len: usize) {
        state.waiters.retain(|waiter| waiter.address < at || waiter.address >= at + len);
    }

    /// How many of `pages` pages are done this time.
    fn stop_after(state: &mut State, pages: usize) -> usize {
        let random = splitmix(&mut state.random);
        if pages > 1 && random & 0xffff < u64::from(state.partial) {
            1 + (random >> 16) as usize % (pages - 1)
        } else {
            pages
        }
    }

    /// All of a range is in one mapping that is registered.
    fn check_target(state: &State, range: &Range<usize>) -> Result<(), Errno> {
        let first = state.pages[range.start];
        let one = state.pages[range.clone()].iter().all(|page| page.mapping == first.mapping);
        if first.mapping == 0 || !first.registered || !one {
            return Err(Errno::NOENT);
        }
        Ok(())
    }

    /// The first part of a range that is so, as far as one mapping has it.
    fn next(&self, start: usize, end: usize, is: impl Fn(&Page) -> bool) -> Option<(usize, usize)> {
        let state = self.state.lock();
        let (first, last) = ((start - self.base) / PAGE, (end - self.base) / PAGE);
        let first = (first..last).find(|index| is(&state.pages[*index]))?;
        let one = |page: &Page| is(page) && page.mapping == state.pages[first].mapping;
        let len = state.pages[first..last].iter().take_while(|page| one(page)).count();
        Some((self.address(first), self.address(first + len)))
    }

    /// Does `each` for the pages of a range until one refuses or chance stops it.
    fn step(
        &self,
        at: usize,
        len: usize,
        wake: bool,
        state: &mut State,
        mut each: impl FnMut(&mut State, usize) -> Result<(), Errno>,
    ) -> Result<(), Partial> {
        let pages = len / PAGE;
        let stop = Self::stop_after(state, pages);
        for i in 0..stop {
            if let Err(errno) = each(state, i) {
                if wake && i > 0 {
                    Self::wake_range(state, at, i * PAGE);
                }
                let errno = if i > 0 { Errno::AGAIN } else { errno };
                return Err(Partial { done: i * PAGE, errno });
            }
        }
        if wake {
            Self::wake_range(state, at, stop * PAGE);
        }
        if stop < pages {
            return Err(Partial { done: stop * PAGE, errno: Errno::AGAIN });
        }
        Ok(())
    }

    fn copy_or_zero(&self, to: usize, from: Option<usize>, len: usize, wake: bool) -> Result<(), Partial> {
        self.under_lock(false);
        self.meanwhile();
        let refused = |errno| Err(Partial { done: 0, errno });
        if self.state.lock().is_changing() {
            return refused(Errno::AGAIN);
        }
        // The kernel looks twice, and at the mapping between: one that goes now is not there, and not yet changing.
        self.meanwhile();
        let mut state = self.state.lock();
        let range = self.range(to, len);
        if let Err(errno) = Self::check_target(&state, &range) {
            return refused(errno);
        }
        if state.is_changing() {
            return refused(Errno::AGAIN);
        }
        if state.is_short() {
            return refused(Errno::NOMEM);
        }
        self.step(to, len, wake, &mut state, |state, i| {
            let index = range.start + i;
            let page = state.pages[index];
            if page.present || page.poisoned {
                return Err(Errno::EXIST);
            }
            self.split(state, index);
            self.bring(state, index);
            let from = from.map(|from| from + i * PAGE);
            if let Some(from) = from.filter(|from| *from < self.zeros()) {
                assert!(state.pages[self.index(from)].present, "a copy from a frame that is a hole");
            }
            // SAFETY: memory of this simulation; source and target differ.
            unsafe {
                let at = self.address(index) as *mut u8;
                match from {
                    Some(from) => core::ptr::copy_nonoverlapping(from as *const u8, at, PAGE),
                    None => core::ptr::write_bytes(at, 0, PAGE),
                }
            }
            Ok(())
        })
    }

    /// MOVE of a whole huge page in one piece, if it can be done; as in the kernel it is refused as a whole where a part of it
    /// is pinned or shared.
    fn move_huge(&self, state: &mut State, target: usize, source: usize) -> Result<bool, Errno> {
        let (to, from) = (target / BLOCK_PAGES, source / BLOCK_PAGES);
        let aligned = target % BLOCK_PAGES == 0 && source % BLOCK_PAGES == 0;
        let free =
            (target..target + BLOCK_PAGES).all(|i| !state.pages[i].present && !state.pages[i].poisoned);
        let stuck = (source..source + BLOCK_PAGES).any(|i| state.pages[i].pinned || state.pages[i].shared);
        if !aligned || !state.huge[from] || state.table[to] || !free {
            return Ok(false);
        }
        if stuck {
            return Err(Errno::BUSY);
        }
        (state.huge[from], state.huge[to]) = (false, true);
        for i in 0..BLOCK_PAGES {
            self.carry(source + i, target + i);
            self.drop_page(state, source + i);
            state.pages[target + i].present = true;
        }
        state.table[from] = false;
        Ok(true)
    }
}

impl Drop for Simulated {
    fn drop(&mut self) {
        // SAFETY: its own mapping.
        let _ = unsafe { munmap(self.reserved.0 as *mut _, self.reserved.1) };
    }
}

// SAFETY: on memory of its own.
unsafe impl Kernel for Simulated {
    fn register(&self, start: usize, len: usize) -> Result<(), Errno> {
        self.under_lock(true);
        self.meanwhile();
        let mut state = self.state.lock();
        let range = self.range(start, len);
        if state.pages[range.start].mapping == 0 {
            return Err(Errno::INVAL);
        }
        // Holes in the range are no reason to refuse, as in the kernel.
        for page in &mut state.pages[range] {
            page.registered |= page.mapping != 0;
        }
        Ok(())
    }

    fn mark(&self, start: usize, len: usize, on: bool) -> Result<(), Errno> {
        self.under_lock(true);
        self.meanwhile();
        let mut state = self.state.lock();
        let mut result = Ok(());
        for index in self.range(start, len) {
            if state.pages[index].mapping == 0 {
                result = Err(Errno::NOMEM);
            } else {
                state.pages[index].marked = on;
            }
        }
        result
    }

    fn move_pages(&self, to: usize, from: usize, len: usize, wake: bool) -> Result<(), Partial> {
        self.under_lock(false);
        self.meanwhile();
        let refused = |errno| Err(Partial { done: 0, errno });
        if self.state.lock().is_changing() {
            return refused(Errno::AGAIN);
        }
        self.meanwhile();
        let mut state = self.state.lock();
        let (target, source) = (self.range(to, len), self.range(from, len));
        if state.pages[target.start].mapping == 0 || state.pages[source.start].mapping == 0 {
            return refused(Errno::NOENT);
        }
        if state.is_changing() {
            return refused(Errno::AGAIN);
        }
        let of_one = |range: &Range<usize>| {
            let first = state.pages[range.start];
            first.mapping != 0 && state.pages[range.clone()].iter().all(|page| page.mapping == first.mapping)
        };
        if !of_one(&target) || !of_one(&source) {
            return refused(Errno::INVAL);
        }
        let (first, last) = (state.pages[target.start], state.pages[source.start]);
        let alike = first.executable == last.executable;
        if !first.registered || !first.writable || !last.writable || !alike {
            return refused(Errno::INVAL);
        }
        let moved = len == BLOCK
            && self
                .move_huge(&mut state, target.start, source.start)
                .map_err(|errno| Partial { done: 0, errno })?;
        if moved {
            if wake {
                Self::wake_range(&mut state, to, len);
            }
            return Ok(());
        }
        self.step(to, len, wake, &mut state, |state, i| {
            let (target, source) = (target.start + i, source.start + i);
            let page = state.pages[target];
            if page.present || page.poisoned {
                return Err(Errno::EXIST);
            }
            let page = state.pages[source];
            if !page.present {
                return Err(Errno::NOENT);
            }
            if page.pinned || page.shared {
                return Err(Errno::BUSY);
            }
            self.split(state, target);
            self.bring(state, target);
            state.pages[target].zeros = !self.is_memory(state, source);
            self.carry(source, target);
            self.drop_page(state, source);
            Ok(())
        })
    }

    fn copy(&self, to: usize, from: usize, len: usize, wake: bool) -> Result<(), Partial> {
        self.copy_or_zero(to, Some(from), len, wake)
    }

    fn zero(&self, at: usize, len: usize, wake: bool) -> Result<(), Partial> {
        self.copy_or_zero(at, None, len, wake)
    }

    fn poison(&self, at: usize, len: usize) -> Result<(), Partial> {
        self.under_lock(false);
        self.meanwhile();
        let mut state = self.state.lock();
        let refused = |errno| Err(Partial { done: 0, errno });
        if state.is_changing() {
            return refused(Errno::AGAIN);
        }
        let range = self.range(at, len);
        if let Err(errno) = Self::check_target(&state, &range) {
            return refused(errno);
        }
        self.step(at, len, true, &mut state, |state, i| {
            let page = &mut state.pages[range.start + i];
            if page.present || page.poisoned {
                return Err(Errno::EXIST);
            }
            page.poisoned = true;
            Ok(())
        })
    }

    fn wake(&self, at: usize, len: usize) {
        Self::wake_range(&mut self.state.lock(), at, len);
    }

    fn event_pending(&self) -> bool {
        self.meanwhile();
        self.state.lock().changing > 0
    }

    fn loses_events(&self) -> bool {
        self.state.lock().untold
    }

    fn next_registered(&self, start: usize, end: usize) -> Option<(usize, usize)> {
        self.under_lock(true);
        self.meanwhile();
        // The kernel looks at nothing then.
        if self.state.lock().changing > 0 {
            return Some((start, end));
        }
        self.next(start, end, |page| page.registered)
    }

    fn mapping(&self, at: usize) -> Option<(usize, usize)> {
        self.meanwhile();
        let state = self.state.lock();
        let id = |index: usize| state.pages[index].mapping;
        let first = ((at - self.base) / PAGE..state.pages.len()).find(|index| id(*index) != 0)?;
        let is_one = |index: &usize| id(*index) == id(first);
        let start = (0..=first).rev().take_while(is_one).last()?;
        let end = (first..state.pages.len()).take_while(is_one).last()? + 1;
        Some((self.address(start), self.address(end)))
    }

    fn growths(&self) -> Option<u32> {
        self.meanwhile();
        let state = self.state.lock();
        // Nobody counts them in a program with regions.
        (!state.signals).then_some(state.growths)
    }

    fn told_growths(&self) -> Option<u32> {
        self.meanwhile();
        let state = self.state.lock();
        (!state.signals).then_some(state.told)
    }

    fn next_mapped(&self, start: usize, end: usize) -> Option<(usize, usize)> {
        self.meanwhile();
        self.next(start, end, |page| page.mapping != 0)
    }

    fn wait_event(&self, _timeout_ns: u64) -> bool {
        self.meanwhile();
        let state = self.state.lock();
        !state.events.is_empty() || state.waiters.iter().any(|waiter| !waiter.read)
    }

    fn read_events(&self, out: &mut [Event]) -> usize {
        self.under_lock(true);
        self.meanwhile();
        let mut state = self.state.lock();
        let mut n = 0;
        for waiter in state.waiters.iter_mut().filter(|waiter| !waiter.read) {
            if n == out.len() {
                break;
            }
            waiter.read = true;
            out[n] = Event::Fault(Fault { address: waiter.address, thread: waiter.thread });
            n += 1;
        }
        while n < out.len() {
            let Some((_, event)) = state.events.pop_front() else { break };
            out[n] = event;
            n += 1;
        }
        n
    }

    fn scan(&self, start: usize, end: usize, out: &mut [Found]) -> (usize, usize) {
        self.meanwhile();
        let state = self.state.lock();
        let mut n = 0;
        let mut at = start;
        while at < end {
            let index = self.index(at);
            let huge = state.huge[index / BLOCK_PAGES];
            if state.pages[index].present {
                if n > 0 && out[n - 1].end == at && out[n - 1].huge == huge {
                    out[n - 1].end += PAGE;
                } else if n == out.len() {
                    return (n, at);
                } else {
                    out[n] = Found { start: at, end: at + PAGE, huge };
                    n += 1;
                }
            }
            at += PAGE;
        }
        (n, end)
    }

    fn populate_write(&self, at: usize, len: usize) -> Result<(), Errno> {
        self.meanwhile();
        let mut state = self.state.lock();
        assert!(!state.serving, "who answers faults populates a page: it may wait for itself");
        for index in self.range(at, len) {
            let page = &mut state.pages[index];
            if page.mapping == 0 || !page.writable || !page.present {
                return Err(Errno::FAULT);
            }
            page.lazy = false;
            state.unseen |= core::mem::take(&mut state.pages[index].zeros);
            self.own(&mut state, index);
        }
        Ok(())
    }

    fn drop_frames(&self, at: usize, len: usize) -> Result<(), Errno> {
        self.under_lock(false);
        self.meanwhile();
        let mut state = self.state.lock();
        assert!(at >= self.frames_base(), "managed memory dropped");
        let range = self.range(at, len);
        if state.is_short() {
            // Nobody sees the engine write to its frames; those that stay it has to.
            state.pages[range].iter_mut().for_each(|page| page.zeros = false);
            return Err(Errno::NOMEM);
        }
        for index in range.clone() {
            self.drop_page(&mut state, index);
        }
        for block in range.start.div_ceil(BLOCK_PAGES)..range.end / BLOCK_PAGES {
            state.table[block] = false;
        }
        Ok(())
    }

    fn make_huge(&self, at: usize) -> Result<(), Errno> {
        self.meanwhile();
        let mut state = self.state.lock();
        let range = self.range(at, BLOCK);
        assert!(at % BLOCK == 0 && state.pages[range.clone()].iter().all(|page| !page.present));
        if splitmix(&mut state.random) % 4 == 0 {
            return Err(Errno::NOMEM);
        }
        for index in range {
            state.pages[index].present = true;
            // SAFETY: memory of this simulation.
            unsafe { core::ptr::write_bytes(self.address(index) as *mut u8, 0, PAGE) };
        }
        state.huge[(at - self.base) / BLOCK] = true;
        state.table[(at - self.base) / BLOCK] = false;
        Ok(())
    }

    fn collapse(&self, at: usize) -> Result<(), Errno> {
        self.meanwhile();
        let mut state = self.state.lock();
        let range = self.range(at, BLOCK);
        let first = state.pages[range.start];
        let whole = state.pages[range].iter().all(|page| {
            page.present && !page.zeros && !page.pinned && !page.shared && page.mapping == first.mapping
        });
        if !whole || first.mapping == 0 || splitmix(&mut state.random) % 4 == 0 {
            return Err(Errno::INVAL);
        }
        let block = (at - self.base) / BLOCK;
        (state.huge[block], state.table[block]) = (true, false);
        Ok(())
    }

    fn resident_pages(&self) -> usize {
        self.meanwhile();
        let state = self.state.lock();
        (0..state.pages.len()).filter(|index| self.is_memory(&state, *index)).count()
    }

    fn count_zeros(&self, start: usize, len: usize) -> usize {
        self.meanwhile();
        let state = self.state.lock();
        let is_zeros = |index: &usize| state.pages[*index].present && !self.is_memory(&state, *index);
        self.range(start, len).filter(is_zeros).count()
    }

    fn now(&self) -> u64 {
        let mut state = self.state.lock();
        state.now += 1000;
        state.now
    }

    fn cpu(&self) -> usize {
        0
    }

    fn cpus(&self) -> usize {
        2
    }
}
