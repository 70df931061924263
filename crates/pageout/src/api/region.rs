//! `Region`: managed memory of the program, its views, and what can be asked for parts of it.

use super::error::MOST_BYTES;
use super::inline;
use super::memory::Mapping;
use super::swap::Inner;
use super::{Bytes, Error};
use crate::engine::Engine;
use crate::page::Tag;
use crate::reclaim::HOLDS_MAX;
use crate::space::{page_start, BLOCK, PAGE, UNIT};
use crate::sync::Wait;
use core::fmt;
use core::ops::Range;
use core::panic::{RefUnwindSafe, UnwindSafe};
use rustix::io::Errno;
use rustix::mm::{madvise, Advice as Madvise};
use std::sync::Arc;

/// Plain old data: what a region can be looked at as.
///
/// # Safety
/// Any bytes, zeros among them, are a valid value; the type has no padding, holds no reference and has no
/// interior mutability; it is aligned to at most 4096 bytes and is not zero-sized.
pub unsafe trait Plain: Copy + 'static {}

macro_rules! plain {
    ($($name:ty)*) => {
        $(
            // SAFETY: a primitive number.
            unsafe impl Plain for $name {}
        )*
    };
}
plain!(u8 u16 u32 u64 u128 usize i8 i16 i32 i64 i128 isize f32 f64);

// SAFETY: as its elements, without padding between them.
unsafe impl<T: Plain, const N: usize> Plain for [T; N] {}

/// What is expected of a part of a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Advice {
    /// It is used soon: what is out of it comes in before the call returns, at most half of the limit.
    WillNeed,
    /// It is not used soon: it leaves when its turn comes, however often it was used.
    Cold,
}

/// Where the bytes of a region are, now.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RegionStats {
    /// Bytes in memory.
    pub resident: usize,
    /// Bytes on their way out, in the engine's frames.
    pub leaving: usize,
    /// Bytes on a device.
    pub swapped: usize,
    /// Bytes that cannot be brought back; touching them raises SIGBUS.
    pub lost: usize,
}

/// Memory that an engine manages: zeros at first, no more of it resident than the limit of its [`Swap`](super::Swap).
///
/// Used like any memory, by any thread, also as a buffer of system calls (but see [`Delivery`](super::Delivery)). A touch of what is out waits until it is
/// back. What a device cannot bring back raises SIGBUS where it is touched, never wrong data.
///
/// * **Fork**: a region is not in the child (`MADV_DONTFORK`). Its slices panic there; what pointers and slices from before the fork
///   name is no memory (SIGSEGV), or what the child has mapped since. Dropping it there does nothing.
///   Do not undo that (`MADV_DOFORK`): the child would read zeros where the parent has pages out.
/// * **`mremap`, `munmap`, `mmap(MAP_FIXED)`** of a part of it: do not. What was moved away and is out when the last handle and
///   region go is lost: SIGBUS. What the program has mapped in its place goes with the region.
/// * **Mappings**: each region is three of `vm.max_map_count` (65,530 in most systems).
/// * **Who looks from outside** (`/proc/PID/mem`, and so debuggers) gets EIO for what is out, and core dumps do not have it.
/// * **Memory that is read-only** (`mprotect`) does not leave, and counts: the kernel moves what can be written.
/// * **Allocators**: do not put the program's global allocator, thread stacks or signal stacks in it.
/// * **Handlers of signals** may touch it, but for one that can interrupt the allocator (`malloc`) where that has one lock for
///   all threads, or fewer than threads (musl; glibc with `MALLOC_ARENA_MAX`, or with more than eight threads a CPU): the engine
///   allocates, and would wait for the lock that the interrupted thread holds, for ever. [Pin](Region::pin) what such a handler
///   touches.
/// * **Robust mutexes** (`PTHREAD_MUTEX_ROBUST`) must be [pinned](Region::pin): when a thread ends with one, the kernel marks it,
///   and waits for no page. So whoever waits for one that is out is not told that its owner has died.
/// * **`mlock`, `mlockall`**: what the program locks stays, and counts. Regions mapped after `mlockall` are not locked.
/// * **Direct I/O** works. `vmsplice`, `MSG_ZEROCOPY` and the like lend pages to the kernel without
///   telling anybody: [`Region::pin`] the bytes as long as they are lent.
///
/// Dropping it unmaps it, and waits until the engine has taken note of that.
pub struct Region {
    area: Arc<Area>,
    len: usize,
}

/// A registered mapping; the last of region and pins unmaps it.
struct Area {
    mapping: Option<Mapping>,
    inner: Arc<Inner>,
}

impl Area {
    fn mapping(&self) -> &Mapping {
        self.mapping.as_ref().expect("mapped until dropped")
    }
}

impl Drop for Area {
    fn drop(&mut self) {
        let mapping = self.mapping.take();
        if self.inner.is_foreign() {
            // A fork's child: the addresses may be somebody else's here.
            core::mem::forget(mapping);
            return;
        }
        drop(mapping);
        self.inner.look();
    }
}

impl Region {
    pub(super) fn new(inner: Arc<Inner>, len: usize) -> Result<Self, Error> {
        if len == 0 || len > MOST_BYTES {
            return Err(Error::Length(len));
        }
        let mapping = Mapping::new(len).map_err(|errno| Error::Memory {
            what: "a region",
            len: Bytes(len as u64),
            errno,
        })?;
        inner.adopt(&mapping)?;
        Ok(Self { area: Arc::new(Area { mapping: Some(mapping), inner }), len })
    }

    /// The first byte; a multiple of 2 MiB. Good until the region is dropped.
    pub fn as_ptr(&self) -> *const u8 {
        self.as_mut_ptr()
    }

    /// The same, to write. Whoever writes through it while a slice is borrowed breaks Rust's rules.
    pub fn as_mut_ptr(&self) -> *mut u8 {
        self.area.mapping().start() as *mut u8
    }

    /// Bytes asked for.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.len
    }

    /// The region as whole `T`s.
    ///
    /// # Panics
    /// In a fork's child, which has no regions.
    pub fn as_slice<T: Plain>(&self) -> &[T] {
        let n = self.elements::<T>();
        // SAFETY: mapped and aligned, any bytes are a T; writers need the region mutably, or promise.
        unsafe { core::slice::from_raw_parts(self.as_ptr().cast(), n) }
    }

    /// The region as whole `T`s, to change.
    ///
    /// # Panics
    /// As [`Region::as_slice`].
    pub fn as_mut_slice<T: Plain>(&mut self) -> &mut [T] {
        let n = self.elements::<T>();
        // SAFETY: as above, and nobody else has it.
        unsafe { core::slice::from_raw_parts_mut(self.as_mut_ptr().cast(), n) }
    }

    /// Says what is expected of bytes `range`, rounded outwards to whole pages.
    ///
    /// # Errors
    /// [`Error::Range`], [`Error::Forked`], [`Error::Memory`].
    pub fn advise(&self, range: Range<usize>, advice: Advice) -> Result<(), Error> {
        let (start, end) = self.pages(&range)?;
        match advice {
            Advice::WillNeed => {
                let most = self.area.inner.memory_bytes() / 2;
                self.bring_in(start, end.min(start + page_start(most)))
            }
            Advice::Cold => {
                self.area.inner.quietly(|engine| engine.cool(start, end));
                Ok(())
            }
        }
    }

    /// Gives up bytes `range`, rounded inwards to whole pages: they read as zeros from here on, and take neither memory nor room on a
    /// device. What is pinned goes, too, and is as if it had never been touched: pin it anew.
    ///
    /// # Errors
    /// [`Error::Range`], [`Error::Forked`], and [`Error::Memory`], of locked memory: what lies before that may be given up by then.
    pub fn discard(&mut self, range: Range<usize>) -> Result<(), Error> {
        // SAFETY: nobody else has it.
        unsafe { self.discard_shared(range) }
    }

    /// The same of a region that others use, too.
    ///
    /// # Safety
    /// Nobody has a slice of the range or uses its bytes meanwhile.
    ///
    /// # Errors
    /// As [`Region::discard`].
    pub unsafe fn discard_shared(&self, range: Range<usize>) -> Result<(), Error> {
        let (_, end) = self.pages(&range)?;
        let base = self.area.mapping().start();
        let start = (base + range.start).next_multiple_of(PAGE);
        // The last page of the region ends with it.
        let end = if range.end == self.len { end } else { page_start(base + range.end) };
        if start >= end {
            return Ok(());
        }
        self.area.inner.engine().let_others_pass();
        // SAFETY: ours, and nobody else looks at it.
        unsafe { madvise(start as *mut _, end - start, Madvise::LinuxDontNeed) }
            .map_err(|errno| self.refused("giving up pages", end - start, errno))?;
        // Others may have the room at once.
        self.area.inner.look();
        Ok(())
    }

    /// Brings bytes `range` in and keeps them in until the guard is dropped: no touch of them waits. Counts by
    /// 64 KiB, each once; at most half of the limit can be pinned. Buffers for system calls and direct I/O need a pin with
    /// [`Delivery::Inline`](super::Delivery::Inline) only.
    ///
    /// # Errors
    /// [`Error::Range`], [`Error::Pin`], [`Error::Pins`], [`Error::Forked`], [`Error::Memory`].
    pub fn pin(&self, range: Range<usize>) -> Result<Pinned, Error> {
        let (start, end) = self.pages(&range)?;
        let inner = &self.area.inner;
        let asked = (end.next_multiple_of(UNIT) - (start & !(UNIT - 1))) as u64;
        let most = inner.most_pinned();
        let refused =
            |held: u64| Err(Error::Pin { asked: Bytes(asked), pinned: Bytes(held), most: Bytes(most) });
        if asked > most {
            return refused(inner.quietly(Engine::held_bytes));
        }
        let held = inner.quietly(|engine| {
            // One after the other: of two that do not both fit, one does.
            let _turn = inner.pinning.lock();
            if !engine.hold(start, end) {
                return Err(Error::Pins { start: range.start, end: range.end, most: HOLDS_MAX });
            }
            let held = engine.held_bytes();
            if held > most {
                engine.release_hold(start, end);
            }
            Ok(held)
        })?;
        if held > most {
            return refused(inner.quietly(Engine::held_bytes));
        }
        let pinned = Pinned { area: self.area.clone(), start, end, range };
        self.bring_in(start, end)?;
        Ok(pinned)
    }

    /// Where the bytes are; nowhere in a fork's child. Walks what is known of the region: microseconds per 100 MiB.
    pub fn stats(&self) -> RegionStats {
        let mut stats = RegionStats::default();
        if self.area.inner.is_foreign() {
            // A thread of the parent may have had a lock when the child was made.
            return stats;
        }
        let (start, end) = (self.area.mapping().start(), self.area.mapping().end());
        self.area.inner.quietly(|engine| {
            for (block_start, block) in engine.space.blocks(start, end) {
                let block = block.lock();
                for index in 0..(end - block_start).min(BLOCK) / PAGE {
                    match block.word(index).tag() {
                        Tag::None | Tag::Zero | Tag::Gone => {}
                        Tag::Resident => stats.resident += PAGE,
                        Tag::Cached => stats.leaving += PAGE,
                        Tag::Swapped | Tag::Busy => stats.swapped += PAGE,
                        Tag::Poisoned => stats.lost += PAGE,
                    }
                }
            }
        });
        stats
    }

    /// Whole `T`s in it.
    fn elements<T: Plain>(&self) -> usize {
        const { assert!(size_of::<T>() > 0 && align_of::<T>() <= PAGE) };
        assert!(!self.area.inner.is_foreign(), "the child of a fork has no regions");
        self.len / size_of::<T>()
    }

    /// The pages of `range`, outwards, as addresses; none for an empty one.
    fn pages(&self, range: &Range<usize>) -> Result<(usize, usize), Error> {
        if self.area.inner.is_foreign() {
            return Err(Error::Forked);
        }
        let Range { start, end } = *range;
        if start > end || end > self.len {
            return Err(Error::Range { start, end, len: self.len });
        }
        let base = self.area.mapping().start();
        let first = page_start(base + start);
        Ok((first, if start == end { first } else { (base + end).next_multiple_of(PAGE) }))
    }

    /// Has every page of a range come in, as a touch by this thread would.
    fn bring_in(&self, start: usize, end: usize) -> Result<(), Error> {
        if start >= end {
            return Ok(());
        }
        if self.area.inner.is_inline() {
            return self.bring_in_inline(start, end);
        }
        loop {
            // SAFETY: reads our own pages.
            match unsafe { madvise(start as *mut _, end - start, Madvise::LinuxPopulateRead) } {
                Ok(()) => return Ok(()),
                Err(Errno::INTR | Errno::AGAIN) => {}
                Err(errno) => {
                    let is_ours =
                        |engine: &Engine<_>| (start..end).step_by(PAGE).all(|at| engine.manages(at));
                    // The kernel says no memory where nothing is mapped.
                    let is_gone = errno == Errno::NOMEM && !self.area.inner.quietly(is_ours);
                    let errno = if is_gone { Errno::NXIO } else { errno };
                    return Err(self.refused("bringing pages in", end - start, errno));
                }
            }
        }
    }

    /// The same where the kernel cannot have it done: page by page, as a fault of this thread would be answered.
    fn bring_in_inline(&self, mut start: usize, end: usize) -> Result<(), Error> {
        let mut refusal = Ok(());
        // The page that was answered last, if it was: if it is nowhere still, it is mapped, or holds nothing that could come in
        // (MADV_FREE, MADV_GUARD_INSTALL).
        let mut answered = None;
        // What has been discarded is known once the event of it, which was read before the call came back, is applied.
        self.area.inner.quietly(|engine| engine.catch_up(Wait::Asleep));
        while start < end && refusal.is_ok() {
            refusal = self.area.inner.quietly(|engine| {
                let is_out = |at: &usize| match engine.tag(*at) {
                    Tag::Resident => false,
                    Tag::None | Tag::Zero => answered != Some(*at),
                    _ => true,
                };
                start = (start..end).step_by(PAGE).find(is_out).unwrap_or(end);
                match start {
                    _ if start == end => Ok(()),
                    _ if !engine.manages(start) => Err(Errno::NXIO),
                    _ if engine.tag(start) == Tag::Poisoned => Err(Errno::HWPOISON),
                    _ => {
                        answered = inline::answer(engine, start).then_some(start);
                        Ok(())
                    }
                }
            });
        }
        refusal.map_err(|errno| self.refused("bringing pages in", end - start, errno))
    }

    fn refused(&self, what: &'static str, len: usize, errno: Errno) -> Error {
        Error::Memory { what, len: Bytes(len as u64), errno }
    }
}

// A panic leaves nothing of the engine's half done, and what the program's bytes mean is for whoever wrote them to know.
impl UnwindSafe for Region {}
impl RefUnwindSafe for Region {}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Region").field("start", &self.as_ptr()).field("len", &self.len).finish()
    }
}

/// Bytes of a region that stay in memory as long as this lives. The region stays mapped as long, too. Pins of the
/// same bytes add up. Any thread may drop it.
pub struct Pinned {
    area: Arc<Area>,
    start: usize,
    end: usize,
    range: Range<usize>,
}

impl UnwindSafe for Pinned {}
impl RefUnwindSafe for Pinned {}

impl Pinned {
    /// The bytes of the region that were asked for.
    pub fn range(&self) -> Range<usize> {
        self.range.clone()
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let inner = &self.area.inner;
        if !inner.is_foreign() {
            inner.quietly(|engine| engine.release_hold(self.start, self.end));
        }
    }
}

impl fmt::Debug for Pinned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pinned").field("range", &self.range).finish_non_exhaustive()
    }
}
