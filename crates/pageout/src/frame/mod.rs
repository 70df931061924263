//! Staging: the engine's own frames, through which pages leave and come in.
//!
//! A frame is a page of one registered, never adopted mapping, and is either *filled* (memory is there:
//! somebody can be brought in by it) or *a hole* (somebody can leave into it). MOVE turns one into the other:
//! a page that leaves fills the frame that the next one comes in by. So at steady state the kernel
//! allocates and frees nothing, and resident memory cannot grow by a fault.
//!
//! Frames are kept in chunks of 64 that are filled, respectively emptied, from end to end. A chunk that was not filled
//! to its end is filled on by who comes next; what a fault leaves over of one goes on a list of loose frames.
//! Huge frames (2 MiB) lie in a part of their own: a huge page moved into a block that once held small ones is split
//! by the kernel, at 300 times the cost.
//!
//! MOVE wants the same access on both sides. So what can be executed leaves into chunks of a third part, which is mapped
//! like it, and whose memory is given back as soon as it is written; it comes in by COPY. There is that part once somebody
//! has made it ([`Frames::open_executable`]).
//!
//! Lists are vectors that never grow beyond their first capacity: the fault path allocates nothing.
//! Their locks are leaves: nothing is taken under them.

use crate::space::{BLOCK, BLOCK_PAGES, PAGE, UNIT_PAGES};
use crate::sync::atomic::{AtomicU64, AtomicU8, AtomicUsize};
use crate::sync::atomic::{Ordering::AcqRel, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};
use crate::sync::{zeros, Lock, OTHER_LOCKS};
use alloc::boxed::Box;
use alloc::vec::Vec;

/// Frames of a chunk: as many pages can leave or come in by one MOVE.
pub const CHUNK: usize = 64;
/// Most pieces that one [`Frames::take`] returns: a block's, of loose frames too.
pub const PARTS: usize = BLOCK_PAGES / UNIT_PAGES + 1;

/// Frames for what can be executed: as much as an evictor and the servers have under way together.
pub const EXECUTABLE: usize = 24 * CHUNK;

/// A run of frames: first and how many.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Part {
    /// First frame.
    pub frame: u32,
    /// How many.
    pub count: u32,
}

/// Filled frames handed out together.
#[derive(Clone, Copy)]
pub struct Parts {
    parts: [Part; PARTS],
    len: usize,
}

impl Parts {
    /// No frames.
    pub const fn new() -> Self {
        Self { parts: [Part { frame: 0, count: 0 }; PARTS], len: 0 }
    }

    /// The runs.
    pub fn iter(&self) -> impl Iterator<Item = Part> + '_ {
        self.parts[..self.len].iter().copied()
    }

    /// Frames in all.
    pub fn count(&self) -> usize {
        self.iter().map(|part| part.count as usize).sum()
    }

    fn push(&mut self, part: Part) {
        self.parts[self.len] = part;
        self.len += 1;
    }

    /// The frame that comes `index`-th, and how many follow it without a gap, itself included.
    pub fn locate(&self, mut index: usize) -> (u32, usize) {
        for part in self.iter() {
            if index < part.count as usize {
                return (part.frame + index as u32, part.count as usize - index);
            }
            index -= part.count as usize;
        }
        unreachable!("a frame that was not taken")
    }
}

impl Default for Parts {
    fn default() -> Self {
        Self::new()
    }
}

struct Ready {
    chunks: Vec<u32>,
    /// A chunk in use: its next frame up to its end.
    open: Part,
    /// The filled frames of chunks whose other frames are holes, and counted as emptied.
    begun: Vec<Part>,
    loose: Vec<u32>,
}

/// The staging area.
pub struct Frames {
    base: usize,
    huge_base: usize,
    ready: Lock<Ready>,
    holes: Lock<Vec<u32>>,
    huge_ready: Lock<Vec<u32>>,
    huge_holes: Lock<Vec<u32>>,
    /// Those that are filled in part and could not be dropped, and how many of their pages are.
    huge_left: Lock<Vec<(u32, usize)>>,
    /// 0: there is no such part.
    executable_base: AtomicUsize,
    /// Its chunks that are holes, by their first frame; and those that could not be dropped, with how far they are filled.
    executable_holes: Lock<Vec<u32>>,
    executable_left: Lock<Vec<Part>>,
    /// Of each chunk, the frames that became holes since it was filled.
    emptied: Box<[AtomicU8]>,
    /// Of each frame that holds a Cached page, that page's address: `mremap` may change it.
    /// Pages of huge frames too: `mremap` may move a part of what left in one piece.
    owners: Box<[AtomicU64]>,
    /// How many of them are small.
    small: usize,
    /// Filled small frames that nobody holds; changed under the lock of `ready`, and so never below 0.
    ready_pages: AtomicUsize,
    /// The same of huge ones, under the lock of `huge_ready`.
    huge_count: AtomicUsize,
}

impl Frames {
    /// How many small frames, and how many huge ones, an engine with this limit has: an eighth of it each, within bounds.
    pub fn counts(limit_pages: usize) -> (usize, usize) {
        ((limit_pages / 8).clamp(1024, 16384), (limit_pages / 8 / BLOCK_PAGES).clamp(4, 32))
    }

    /// `chunks` chunks of holes from `base` on, `huge` huge holes from `huge_base` on (2 MiB aligned).
    pub fn new(base: usize, chunks: usize, huge_base: usize, huge: usize) -> Self {
        let frames = chunks * CHUNK;
        Self {
            base,
            huge_base,
            ready: Lock::new(
                Ready {
                    chunks: Vec::with_capacity(chunks),
                    open: Part::default(),
                    begun: Vec::with_capacity(chunks),
                    loose: Vec::with_capacity(frames),
                },
                &OTHER_LOCKS,
            ),
            holes: Lock::new((0..chunks as u32).rev().collect(), &OTHER_LOCKS),
            huge_ready: Lock::new(Vec::with_capacity(huge), &OTHER_LOCKS),
            huge_holes: Lock::new((0..huge as u32).rev().collect(), &OTHER_LOCKS),
            huge_left: Lock::new(Vec::with_capacity(huge), &OTHER_LOCKS),
            executable_base: AtomicUsize::new(0),
            executable_holes: Lock::new(Vec::with_capacity(EXECUTABLE / CHUNK), &OTHER_LOCKS),
            executable_left: Lock::new(Vec::with_capacity(EXECUTABLE / CHUNK), &OTHER_LOCKS),
            emptied: zeros(chunks),
            owners: zeros(frames + huge * BLOCK_PAGES + EXECUTABLE),
            small: frames,
            ready_pages: AtomicUsize::new(0),
            huge_count: AtomicUsize::new(0),
        }
    }

    /// Where a frame is. Frames from `first_huge` on are the pages of huge frames, and behind them those for what
    /// can be executed.
    pub fn address(&self, frame: u32) -> usize {
        let frame = frame as usize;
        match frame.checked_sub(self.small) {
            None => self.base + frame * PAGE,
            Some(page) if page < self.huge_pages() => self.huge_base + page * PAGE,
            Some(page) => self.executable_base.load(Relaxed) + (page - self.huge_pages()) * PAGE,
        }
    }

    /// Is this a place of the staging area?
    pub fn has(&self, address: usize) -> bool {
        self.places().any(|(start, len)| address.wrapping_sub(start) < len)
    }

    /// Where the parts of the staging area are, and how many bytes.
    pub fn places(&self) -> impl Iterator<Item = (usize, usize)> {
        let executable =
            self.has_executable().then(|| (self.executable_base.load(Relaxed), EXECUTABLE * PAGE));
        [(self.base, self.small * PAGE), (self.huge_base, self.huge_pages() * PAGE)]
            .into_iter()
            .chain(executable)
    }

    fn huge_pages(&self) -> usize {
        self.owners.len() - self.small - EXECUTABLE
    }

    /// From here on there is a part for what can be executed: [`EXECUTABLE`] holes from `base` on. Once.
    pub fn open_executable(&self, base: usize) {
        let first = self.small + self.huge_pages();
        self.executable_holes
            .lock()
            .extend((first..first + EXECUTABLE).step_by(CHUNK).map(|frame| frame as u32));
        self.executable_base.store(base, Release);
    }

    /// Is there such a part?
    pub fn has_executable(&self) -> bool {
        self.executable_base.load(Acquire) != 0
    }

    /// A chunk of it to fill: its first frame.
    pub fn take_executable_holes(&self) -> Option<u32> {
        self.executable_holes.lock().pop()
    }

    /// A huge frame of which so many pages are filled cannot be dropped now.
    pub fn huge_left(&self, huge: u32, filled: usize) {
        self.huge_left.lock().push((huge, filled));
    }

    /// One that could not be dropped, and how many of its pages are filled.
    pub fn take_huge_left(&self) -> Option<(u32, usize)> {
        self.huge_left.lock().pop()
    }

    /// Such a chunk, filled so far, cannot be dropped now.
    pub fn executable_left(&self, chunk: Part) {
        self.executable_left.lock().push(chunk);
    }

    /// One that could not be dropped.
    pub fn take_executable_left(&self) -> Option<Part> {
        self.executable_left.lock().pop()
    }

    /// Such a chunk is all holes again.
    pub fn executable_dropped(&self, first: u32) {
        self.executable_holes.lock().push(first);
    }

    /// The number of the first page of the first huge frame.
    fn first_huge(&self) -> u32 {
        self.small as u32
    }

    /// The frame number of page 0 of a huge frame.
    pub fn of_huge(&self, huge: u32) -> u32 {
        self.first_huge() + huge * BLOCK_PAGES as u32
    }

    /// Where a huge frame is.
    pub fn huge_address(&self, huge: u32) -> usize {
        self.huge_base + huge as usize * BLOCK
    }

    /// Filled small frames that wait to be used.
    pub fn ready_pages(&self) -> usize {
        self.ready_pages.load(Relaxed)
    }

    /// Filled huge frames that wait to be used.
    pub fn huge_ready(&self) -> usize {
        self.huge_count.load(Relaxed)
    }

    /// Takes up to `n` filled frames in as few runs as there are; all `n` or, if `n` is above 1 and fewer
    /// are there, those. Their content is whatever it was.
    pub fn take(&self, n: usize) -> Parts {
        let mut parts = Parts::new();
        let mut ready = self.ready.lock();
        let mut left = n;
        while left > 0 && parts.len < PARTS {
            if left == 1 {
                if let Some(frame) = ready.loose.pop() {
                    parts.push(Part { frame, count: 1 });
                    left = 0;
                    continue;
                }
            }
            if ready.open.count == 0 || (left >= CHUNK && !ready.chunks.is_empty()) {
                match ready.chunks.pop() {
                    Some(chunk) if left >= CHUNK => {
                        parts.push(Part { frame: chunk * CHUNK as u32, count: CHUNK as u32 });
                        left -= CHUNK;
                        continue;
                    }
                    Some(chunk) => ready.open = Part { frame: chunk * CHUNK as u32, count: CHUNK as u32 },
                    None => {
                        if let Some(frame) = ready.loose.pop() {
                            parts.push(Part { frame, count: 1 });
                            left -= 1;
                            continue;
                        }
                        let Some(begun) = ready.begun.pop() else { break };
                        ready.open = begun;
                    }
                }
            }
            let count = (left as u32).min(ready.open.count);
            parts.push(Part { frame: ready.open.frame, count });
            ready.open.frame += count;
            ready.open.count -= count;
            left -= count as usize;
        }
        self.ready_pages.fetch_sub(n - left, Relaxed);
        parts
    }

    /// A filled frame goes back unused.
    pub fn give_back(&self, frame: u32) {
        let mut ready = self.ready.lock();
        ready.loose.push(frame);
        self.ready_pages.fetch_add(1, Relaxed);
    }

    /// A filled frame that went back unused: while it waits its chunk is no hole.
    pub fn take_loose(&self) -> Option<u32> {
        let mut ready = self.ready.lock();
        let frame = ready.loose.pop()?;
        self.ready_pages.fetch_sub(1, Relaxed);
        Some(frame)
    }

    /// `count` frames from `frame` on, all of one chunk, have become holes.
    pub fn emptied(&self, frame: u32, count: usize) {
        let chunk = frame as usize / CHUNK;
        debug_assert!((frame as usize + count - 1) / CHUNK == chunk);
        let before = self.emptied[chunk].fetch_add(count as u8, AcqRel) as usize;
        debug_assert!(before + count <= CHUNK);
        if before + count == CHUNK {
            self.emptied[chunk].store(0, Relaxed);
            self.holes.lock().push(chunk as u32);
        }
    }

    /// A chunk to fill: its first frame, and how many are filled already.
    pub fn take_holes(&self) -> Option<(u32, usize)> {
        let begun = {
            let mut ready = self.ready.lock();
            let begun = ready.begun.pop();
            self.ready_pages.fetch_sub(begun.map_or(0, |begun| begun.count as usize), Relaxed);
            begun
        };
        if let Some(Part { frame, count }) = begun {
            self.emptied[frame as usize / CHUNK].store(0, Relaxed);
            return Some((frame, count as usize));
        }
        self.holes.lock().pop().map(|chunk| (chunk * CHUNK as u32, 0))
    }

    /// A chunk got from [`Frames::take_holes`] has its first `filled` frames filled; the rest are holes.
    pub fn filled(&self, first: u32, filled: usize) {
        debug_assert!(first as usize % CHUNK == 0 && filled <= CHUNK);
        if filled < CHUNK {
            self.emptied(first + filled as u32, CHUNK - filled);
        }
        if filled == 0 {
            return;
        }
        let mut ready = self.ready.lock();
        match filled {
            CHUNK => ready.chunks.push(first / CHUNK as u32),
            _ => ready.begun.push(Part { frame: first, count: filled as u32 }),
        }
        self.ready_pages.fetch_add(filled, Relaxed);
    }

    /// A whole ready chunk, to drop its memory: its first frame.
    pub fn take_ready_chunk(&self) -> Option<u32> {
        let mut ready = self.ready.lock();
        let chunk = ready.chunks.pop()?;
        self.ready_pages.fetch_sub(CHUNK, Relaxed);
        Some(chunk * CHUNK as u32)
    }

    /// A chunk from [`Frames::take_ready_chunk`] was dropped and is all holes.
    pub fn dropped(&self, first: u32) {
        self.holes.lock().push(first / CHUNK as u32);
    }

    /// A huge hole to move a huge page into.
    pub fn take_huge_hole(&self) -> Option<u32> {
        self.huge_holes.lock().pop()
    }

    /// A filled huge frame.
    pub fn take_huge(&self) -> Option<u32> {
        let mut ready = self.huge_ready.lock();
        let huge = ready.pop()?;
        self.huge_count.fetch_sub(1, Relaxed);
        Some(huge)
    }

    /// A huge frame is filled and nobody's.
    pub fn huge_filled(&self, huge: u32) {
        let mut ready = self.huge_ready.lock();
        ready.push(huge);
        self.huge_count.fetch_add(1, Relaxed);
    }

    /// A huge frame is a hole again.
    pub fn huge_emptied(&self, huge: u32) {
        self.huge_holes.lock().push(huge);
    }

    /// Says whose page a frame holds. Under that page's block lock.
    pub fn set_owner(&self, frame: u32, page: usize) {
        self.owners[frame as usize].store(page as u64, Relaxed);
    }

    /// The page that a frame holds, as of the last `set_owner`. Under the events lock.
    pub fn owner(&self, frame: u32) -> usize {
        self.owners[frame as usize].load(Relaxed) as usize
    }
}

/// Where every frame is, as the lists say; for tests, while nobody works.
#[cfg(any(test, feature = "simulated"))]
#[derive(Debug, Default)]
pub struct Census {
    /// Filled small frames.
    pub ready: Vec<u32>,
    /// Chunks that are holes, by their first frame.
    pub holes: Vec<u32>,
    /// Of each chunk, frames that became holes since it was filled.
    pub emptied: Vec<usize>,
    /// Filled huge frames.
    pub huge_ready: Vec<u32>,
    /// Huge frames that are holes.
    pub huge_holes: Vec<u32>,
    /// Huge frames filled in part that could not be dropped, and how many of their pages are.
    pub huge_left: Vec<(u32, usize)>,
    /// Chunks for what can be executed that are holes, by their first frame.
    pub executable_holes: Vec<u32>,
    /// Those that could not be dropped, with how far they are filled.
    pub executable_left: Vec<Part>,
}

#[cfg(any(test, feature = "simulated"))]
impl Frames {
    /// Counts the frames. Nobody holds any.
    pub fn census(&self) -> Census {
        let ready = self.ready.lock();
        let chunks = ready.chunks.iter().flat_map(|chunk| chunk * CHUNK as u32..(chunk + 1) * CHUNK as u32);
        let open = ready.open.frame..ready.open.frame + ready.open.count;
        let begun = ready.begun.iter().flat_map(|begun| begun.frame..begun.frame + begun.count);
        Census {
            ready: chunks.chain(open).chain(begun).chain(ready.loose.iter().copied()).collect(),
            holes: self.holes.lock().iter().map(|chunk| chunk * CHUNK as u32).collect(),
            emptied: self.emptied.iter().map(|emptied| emptied.load(Relaxed) as usize).collect(),
            huge_ready: self.huge_ready.lock().clone(),
            huge_holes: self.huge_holes.lock().clone(),
            huge_left: self.huge_left.lock().clone(),
            executable_holes: self.executable_holes.lock().clone(),
            executable_left: self.executable_left.lock().clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filled(chunks: usize) -> Frames {
        let frames = Frames::new(0x10_0000, chunks, 0x20_0000, 2);
        for _ in 0..chunks {
            let (first, _) = frames.take_holes().unwrap();
            frames.filled(first, CHUNK);
        }
        frames
    }

    #[test]
    fn what_is_taken_and_emptied_comes_back_as_holes() {
        let frames = filled(4);
        assert!(frames.take_holes().is_none());
        let parts = frames.take(CHUNK + 4);
        assert_eq!(parts.count(), CHUNK + 4);
        assert_eq!(frames.ready_pages(), 3 * CHUNK - 4);
        for part in parts.iter() {
            frames.emptied(part.frame, part.count as usize);
        }
        assert!(frames.take_holes().is_some());
        assert!(frames.take_holes().is_none());
        let rest = frames.take(CHUNK - 4);
        for part in rest.iter() {
            frames.emptied(part.frame, part.count as usize);
        }
        assert!(frames.take_holes().is_some());
    }

    #[test]
    fn a_partly_filled_chunk_loses_nothing() {
        let frames = Frames::new(0, 1, 0, 0);
        let (first, _) = frames.take_holes().unwrap();
        frames.filled(first, 5);
        assert_eq!(frames.ready_pages(), 5);
        // It is filled on.
        assert_eq!(frames.take_holes(), Some((first, 5)));
        assert_eq!(frames.ready_pages(), 0);
        frames.filled(first, 7);
        let parts = frames.take(8);
        assert_eq!(parts.count(), 7);
        for part in parts.iter() {
            frames.emptied(part.frame, part.count as usize);
        }
        assert_eq!(frames.take_holes(), Some((first, 0)));
    }

    #[test]
    fn the_counts_never_say_more_than_there_is() {
        let frames = Frames::new(0, 1, BLOCK, 1);
        let (chunk, huge) = (frames.take_holes().unwrap().0, frames.take_huge_hole().unwrap());
        frames.filled(chunk, CHUNK);
        frames.huge_filled(huge);
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    for _ in 0..100_000 {
                        let parts = frames.take(CHUNK);
                        assert!(frames.ready_pages() <= CHUNK && frames.huge_ready() <= 1);
                        for part in parts.iter() {
                            (part.frame..part.frame + part.count).for_each(|frame| frames.give_back(frame));
                        }
                        if let Some(huge) = frames.take_huge() {
                            frames.huge_filled(huge);
                        }
                    }
                });
            }
        });
        assert_eq!((frames.ready_pages(), frames.huge_ready()), (CHUNK, 1));
    }

    #[test]
    fn parts_are_found_by_index() {
        let frames = filled(2);
        frames.take(3);
        let parts = frames.take(CHUNK + 4);
        let mut seen = Vec::new();
        let mut index = 0;
        while index < parts.count() {
            let (frame, run) = parts.locate(index);
            seen.extend(frame..frame + run as u32);
            index += run;
        }
        assert_eq!(seen.len(), parts.count());
        seen.sort();
        seen.dedup();
        assert_eq!(seen.len(), parts.count());
    }
}
