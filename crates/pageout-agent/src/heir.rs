//! What goes from a process to the child of its fork, by a file that `run` passes on. See `pageout::swap::heir`.

use crate::{memory, proc, sys, wrap};
use alloc::vec::Vec;
use core::sync::atomic::{AtomicU64, Ordering};
use pageout::engine::{Engine, Key};
use pageout::kernel::{Kernel, Linux};
use pageout::space::discover::Area;
use pageout::space::{Change, Region, Regions, PAGE};
use pageout::swap::heir::{heirlooms_at, Bequest, Heirloom, SlotRun, AREAS_AT, CHANGES_AT, MOST_CHANGES};
use pageout::swap::moved::Moved;
use pageout::sync::WriteGuard;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{
    fallocate, fcntl_add_seals, fstat, ftruncate, memfd_create, FallocateFlags, MemfdFlags, SealFlags,
};
use rustix::thread::futex;

/// The bequest that was made last: what the child asks for.
pub static TOKEN: AtomicU64 = AtomicU64::new(0);
/// More areas and heirlooms than were counted: threads go on until the lock is there, and what has grown in place comes
/// to the areas, page by page if need be.
const MORE_AREAS: usize = 8192;
const MORE_HEIRLOOMS: usize = 4096;

/// A bequest's file, mapped.
pub struct File {
    fd: OwnedFd,
    base: usize,
    len: usize,
    /// In the parent, what was counted once more.
    slots: Vec<SlotRun>,
}

impl File {
    fn map(fd: OwnedFd) -> Option<Self> {
        let len = fstat(&fd).ok()?.st_size as usize;
        let base = memory::map_shared(&fd, len).ok()?;
        Some(Self { fd, base, len, slots: Vec::new() })
    }

    /// What came from `run`.
    pub fn open(fd: OwnedFd) -> Option<Self> {
        let file = Self::map(fd)?;
        let whole = file.len >= AREAS_AT
            && heirlooms_at(file.first().areas as usize)
                + file.first().heirlooms as usize * size_of::<Heirloom>()
                <= file.len;
        whole.then_some(file)
    }

    fn first(&self) -> &Bequest {
        // SAFETY: at the start of the mapping, numbers only.
        unsafe { &*(self.base as *const Bequest) }
    }

    fn areas(&self) -> impl Iterator<Item = Region> + '_ {
        // SAFETY: inside the mapping, numbers only.
        let room: &[[u64; 2]] = unsafe {
            core::slice::from_raw_parts((self.base + AREAS_AT) as *const _, self.first().areas as usize)
        };
        // What is left of the room is empty.
        let areas = room.iter().take_while(|[start, end]| start < end);
        areas.map(|[start, end]| Region { start: *start as usize, end: *end as usize })
    }

    fn heirlooms(&self) -> &[Heirloom] {
        let at = heirlooms_at(self.first().areas as usize);
        // SAFETY: the same.
        unsafe { core::slice::from_raw_parts((self.base + at) as *const _, self.first().heirlooms as usize) }
    }

    /// For the child: the clone is through.
    pub fn is_born(&self) -> bool {
        self.first().born.load(Ordering::Relaxed) != 0
    }

    /// To the child, once it is there: what changed since all was written down.
    pub fn tell(&self, changes: &[Change]) {
        for (i, change) in changes.iter().take(MOST_CHANGES).enumerate() {
            // SAFETY: inside the mapping; the child reads it when it is told.
            unsafe { ((self.base + CHANGES_AT) as *mut Change).add(i).write(*change) };
        }
        let told = &self.first().told;
        told.store(1 + changes.len() as u32, Ordering::Release);
        let _ = futex::wake(told, futex::Flags::empty(), 1);
    }

    /// In the child: says that it is there, and waits for what changed. `None`: there was no room for it, or the parent's
    /// keeper has ended.
    fn changes(&self) -> Option<&[Change]> {
        self.first().born.store(1, Ordering::Relaxed);
        let told = &self.first().told;
        let mut patience = 600;
        loop {
            match told.load(Ordering::Acquire) {
                0 if patience == 0 => return None,
                0 => {
                    patience -= 1;
                    sys::wait_a_tenth(told, 0, futex::Flags::empty());
                }
                count if count as usize > 1 + MOST_CHANGES => return None,
                // SAFETY: inside the mapping, written before.
                count => unsafe {
                    let first = (self.base + CHANGES_AT) as *const Change;
                    return Some(core::slice::from_raw_parts(first, count as usize - 1));
                },
            }
        }
    }

    /// What the parent's checksums were made with.
    pub fn key(&self) -> Key {
        self.first().key
    }

    /// To pass it on.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// It is not read again here.
    pub fn rest(&self) {
        memory::drop_pages(self.base, self.len);
    }

    /// In the child, which has taken over what is out: as long as it lives the names of all that would stay in memory, 8 KiB
    /// for each MiB, and of each child of the same parent.
    pub fn forget(&self) {
        let at = heirlooms_at(self.first().areas as usize).next_multiple_of(PAGE);
        let holes = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let _ = fallocate(&self.fd, holes, at as u64, self.len.saturating_sub(at) as u64);
    }

    /// All who inherited have gone.
    pub fn is_released(&self) -> bool {
        self.first().released.load(Ordering::Relaxed) != 0
    }

    /// The slots are nobody's but the parent's again.
    pub fn give_up(self, engine: &Engine<Linux>) {
        engine.disinherit(&self.slots);
    }
}

impl Drop for File {
    fn drop(&mut self) {
        memory::unmap(self.base, self.len);
    }
}

/// Writes down what is out. With it comes the lock that keeps things so until the clone is done. `None`: no memory.
pub fn bequeath(engine: &Engine<Linux>) -> Option<(WriteGuard<'_, Regions>, File)> {
    let areas = engine.events.read().iter().count() + MORE_AREAS;
    let most = engine.out_pages() + MORE_HEIRLOOMS;
    let at = heirlooms_at(areas);
    let len = (at + most * size_of::<Heirloom>()).next_multiple_of(PAGE);
    let fd = memfd_create(c"pageout-heir", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).ok()?;
    ftruncate(&fd, len as u64).ok()?;
    fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL).ok()?;
    let mut file = File::map(fd)?;
    let (mut count, base) = (0, file.base);
    let taken = engine.bequeath(&mut file.slots, |heirloom| {
        if count == most {
            return false;
        }
        // SAFETY: inside the mapping, which is nobody else's yet.
        unsafe { ((base + at) as *mut Heirloom).add(count).write(heirloom) };
        count += 1;
        true
    });
    // SAFETY: the same.
    let first = unsafe { &mut *(file.base as *mut Bequest) };
    (first.areas, first.heirlooms, first.key) = (areas as u32, count as u64, engine.key);
    let regions = taken.and_then(|mut regions| {
        let fits = regions.iter().count() <= areas;
        if !fits {
            engine.cloned(&mut regions);
        }
        fits.then_some(regions)
    });
    let Some(regions) = regions else {
        file.give_up(engine);
        return None;
    };
    for (i, region) in regions.iter().enumerate() {
        // SAFETY: the same.
        unsafe {
            ((file.base + AREAS_AT) as *mut [u64; 2]).add(i).write([region.start as u64, region.end as u64])
        };
    }
    Some((regions, file))
}

/// In the child: registers what the parent had registered and, once that is taken up, inherits what is out. Nobody
/// runs there yet but who waits for this.
pub struct Taking {
    /// What is registered now.
    pub registered: Vec<(usize, usize)>,
    /// Private memory of no file, what the parent had marked of it, and what begins empty in children.
    there: Regions,
    marked: Regions,
    wiped: Regions,
    last: Option<(usize, usize)>,
    moved: Option<Moved>,
}

impl Taking {
    /// Nothing yet.
    pub fn new() -> Self {
        Self {
            registered: Vec::new(),
            there: Regions::default(),
            marked: Regions::default(),
            wiped: Regions::default(),
            last: None,
            moved: None,
        }
    }

    /// A line of /proc/self/smaps.
    pub fn step(&mut self, line: &[u8]) {
        if let Some(area) = Area::parse(line) {
            let private = area.permissions.get(3) == Some(&b'p');
            let is_theirs = private && !area.name.starts_with(b"/") && !memory::is_own(area.start, area.end);
            self.last = is_theirs.then_some((area.start, area.end));
            return;
        }
        let Some(has) = proc::flags(line) else { return };
        let Some((start, end)) = self.last.take() else { return };
        self.there.insert(Region { start, end });
        if has(b"rr") {
            self.marked.insert(Region { start, end });
        }
        if has(b"wf") {
            self.wiped.insert(Region { start, end });
        }
    }

    /// After the last line: registers. False: it is not known what the child has, or something that is out cannot be had.
    #[must_use]
    pub fn register(&mut self, file: &File, kernel: &Linux) -> bool {
        let Some(changes) = file.changes() else { return false };
        let mut areas = Regions::default();
        file.areas().for_each(|area| areas.insert(area));
        let marked = core::mem::take(&mut self.marked);
        let there = core::mem::take(&mut self.there);
        let moved = Moved::new(&areas, there, marked, changes, wrap::keeps_from_children());
        let mut refused = Regions::default();
        // What had grown in place is marked as well. What the program itself gave this advice is like any other.
        for Region { start, end } in moved.parents() {
            let _ = kernel.mark(start, end - start, false);
            if kernel.register(start, end - start).is_ok() {
                self.registered.push((start, end));
            } else {
                refused.insert(Region { start, end });
            }
        }
        let mut all = file.heirlooms().iter().map(|heirloom| moved.place(heirloom.page as usize));
        let is_had = all.all(|place| place.is_ok_and(|at| at.is_none_or(|at| refused.find(at).is_none())));
        self.moved = Some(moved);
        is_had
    }

    /// The last step, once the engine is there and has taken up what is registered. False: see [`Engine::inherit`].
    #[must_use]
    pub fn finish(self, file: &File, engine: &Engine<Linux>) -> bool {
        self.moved.is_none_or(|moved| {
            let place = |page| moved.place(page).ok().flatten();
            engine.inherit(file.heirlooms(), |page| place(page).filter(|at| self.wiped.find(*at).is_none()))
        })
    }
}
