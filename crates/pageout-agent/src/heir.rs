//! What goes from a process to the child of its fork, by a file that `run` passes on. See `pageout::swap::heir`.

use crate::memory;
use alloc::vec::Vec;
use core::sync::atomic::{AtomicU64, Ordering};
use pageout::engine::{Engine, Key};
use pageout::kernel::{Kernel, Linux};
use pageout::space::discover::Area;
use pageout::space::{Regions, PAGE};
use pageout::swap::heir::{heirlooms_at, Bequest, Heirloom, AREAS_AT};
use pageout::sync::WriteGuard;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{fcntl_add_seals, fstat, ftruncate, memfd_create, MemfdFlags, SealFlags};

/// The bequest that was made last: what the child asks for.
pub static TOKEN: AtomicU64 = AtomicU64::new(0);
/// More areas and heirlooms than were counted: threads go on until the lock is there.
const MORE_AREAS: usize = 256;
const MORE_HEIRLOOMS: usize = 4096;

/// A bequest's file, mapped.
pub struct File {
    fd: OwnedFd,
    base: usize,
    len: usize,
}

impl File {
    fn map(fd: OwnedFd) -> Option<Self> {
        let len = fstat(&fd).ok()?.st_size as usize;
        let base = memory::map_shared(&fd, len).ok()?;
        Some(Self { fd, base, len })
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

    fn areas(&self) -> &[[u64; 2]] {
        // SAFETY: inside the mapping, numbers only.
        unsafe {
            core::slice::from_raw_parts((self.base + AREAS_AT) as *const _, self.first().areas as usize)
        }
    }

    fn heirlooms(&self) -> &[Heirloom] {
        let at = heirlooms_at(self.first().areas as usize);
        // SAFETY: the same.
        unsafe { core::slice::from_raw_parts((self.base + at) as *const _, self.first().heirlooms as usize) }
    }

    /// What the parent's checksums were made with.
    pub fn key(&self) -> Key {
        self.first().key
    }

    /// To pass it on.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// All who inherited have gone.
    pub fn is_released(&self) -> bool {
        self.first().released.load(Ordering::Relaxed) != 0
    }

    /// The slots are nobody's but the parent's again.
    pub fn give_up(self, engine: &Engine<Linux>) {
        engine.disinherit(self.heirlooms());
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
    let file = File::map(fd)?;
    let mut count = 0;
    let taken = engine.bequeath(|heirloom| {
        if count == most {
            return false;
        }
        // SAFETY: inside the mapping, which is nobody else's yet.
        unsafe { ((file.base + at) as *mut Heirloom).add(count).write(heirloom) };
        count += 1;
        true
    });
    // SAFETY: the same.
    let first = unsafe { &mut *(file.base as *mut Bequest) };
    (first.areas, first.heirlooms, first.key) = (areas as u32, count as u64, engine.key);
    let Some(regions) = taken.filter(|regions| regions.iter().count() <= areas) else {
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
    /// Of that, what children keep.
    kept: Vec<(usize, usize)>,
    last: Option<(usize, usize)>,
    failed: bool,
}

impl Taking {
    /// Nothing yet.
    pub fn new() -> Self {
        Self { registered: Vec::new(), kept: Vec::new(), last: None, failed: false }
    }

    /// A line of /proc/self/smaps.
    pub fn step(&mut self, line: &[u8], file: &File, kernel: &Linux) {
        if let Some(area) = Area::parse(line) {
            let private = area.permissions.get(3) == Some(&b'p');
            self.last = (private && !area.name.starts_with(b"/")).then_some((area.start, area.end));
            return;
        }
        let Some(flags) = line.strip_prefix(b"VmFlags:") else { return };
        let Some((start, end)) = self.last.take() else { return };
        let wiped = flags.split(|byte| *byte == b' ').any(|flag| flag == b"wf");
        for [from, to] in file.areas() {
            let (from, to) = (start.max(*from as usize), end.min(*to as usize));
            if from >= to {
                continue;
            }
            if kernel.register(from, to - from).is_ok() {
                self.registered.push((from, to));
                if !wiped {
                    self.kept.push((from, to));
                }
            } else {
                let inside = |heirloom: &Heirloom| (from..to).contains(&(heirloom.page as usize));
                self.failed |= !wiped && file.heirlooms().iter().any(inside);
            }
        }
    }

    /// The last step, once the engine is there and has taken up what is registered. False: something that is out cannot
    /// be had.
    pub fn finish(self, file: &File, engine: &Engine<Linux>) -> bool {
        let kept = &self.kept;
        engine.inherit(file.heirlooms(), |page| {
            let after = kept.partition_point(|(_, end)| *end <= page);
            kept.get(after).is_some_and(|(start, _)| *start <= page)
        });
        !self.failed
    }
}
