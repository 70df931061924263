//! `mremap`: one at a time, and over several mappings that would be one without us.
//!
//! The kernel tells of a move after it, and of two that two threads make in any order; the later may be to where the
//! earlier came from ([`pageout::space`], order). So a thread that moves or grows memory by libc has the others wait until
//! what it did is told and applied: by `mremap`, and by `realloc`, whose own call nobody else sees.
//!
//! What is registered at different times the kernel never
//! merges, and it lets grow, and moves, what is one mapping. So here it is done mapping by mapping, and all or nothing: the
//! last one, which is what grows, comes first, for what may be refused is refused there.
//!
//! Since Linux 6.17 the kernel itself moves several that keep their length, one by one, and stops with EFAULT at the first that
//! is registered: what it had moved stays moved. So such a call is made only where there is one mapping.
//!
//! Meanwhile the destination is reserved, so that nobody else is given addresses there, and signals and forks wait. What was
//! there before is replaced piece by piece, so that whoever reads there finds the one or the other. Left to the kernel,
//! which refuses: holes, memory that is not alike where it is to grow, and all of it without /proc. MREMAP_DONTUNMAP of
//! several mappings to a chosen address is refused here, as it was by the kernel before Linux 6.17.

use crate::proc::Maps;
use crate::{code, exit, fork, keeper, memory, sys, wrap};
use alloc::vec::Vec;
use core::ptr::null_mut;
use core::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use linux_raw_sys::general as raw;
use pageout::kernel::Growth;
use pageout::space::discover::Area;
use pageout::space::PAGE;
use pageout::sync::{Baton, Wait};
use rustix::io::Errno;
use rustix::mm::{mmap_anonymous, mprotect, munmap, MapFlags, MprotectFlags, ProtFlags};

const MAYMOVE: usize = raw::MREMAP_MAYMOVE as usize;
const FIXED: usize = raw::MREMAP_FIXED as usize;
const DONTUNMAP: usize = raw::MREMAP_DONTUNMAP as usize;
/// No mapping can be so long: the kernel lets none grow to it, whatever it says first.
const ENDLESS: usize = 0x7fff_ffff_f000;
/// Looks at mappings at most: each comes after another thread, or the keeper, has split one.
const LOOKS: usize = 100;
/// How often the way back is tried, 10 ms between: whoever it is refused for may be done by then.
const PATIENCE: u32 = 100;

/// Whose turn it is to move memory: each has a number of its own.
static MOVES: Baton = Baton::new();
static NUMBER: AtomicU32 = AtomicU32::new(0);
/// Who has it for so many looks, a second, does not come back: it was killed, as a process of its own.
const ABANDONED: u32 = 100;
/// Calls by which memory may grow that are under way, and how many have been made that the kernel did not refuse.
static GROWING: AtomicU32 = AtomicU32::new(0);
static GROWN: AtomicU32 = AtomicU32::new(0);
/// Of the last that began its number, by how many bytes, and while it is under way the thread.
static GROWTH: AtomicU32 = AtomicU32::new(0);
static GROWN_BY: AtomicUsize = AtomicUsize::new(0);
static GROWER: AtomicU32 = AtomicU32::new(0);

/// How often memory may have grown, by libc; `None`: it may be doing so.
pub fn growths() -> Option<u32> {
    let grown = GROWN.load(Ordering::SeqCst);
    let none_grows = GROWING.load(Ordering::SeqCst) == 0;
    (none_grows && GROWN.load(Ordering::SeqCst) == grown).then_some(grown)
}

/// The call by which memory grows now; none, or it is not known. Of a thread that is in it all is true.
pub fn growing() -> Option<Growth> {
    let thread = GROWER.load(Ordering::SeqCst);
    (thread != 0).then(|| Growth {
        number: GROWTH.load(Ordering::SeqCst),
        thread,
        by: GROWN_BY.load(Ordering::SeqCst),
    })
}

/// In a fork's child: nobody is here who may be moving memory.
pub fn forget() {
    MOVES.pass_on();
    GROWING.store(0, Ordering::SeqCst);
    GROWER.store(0, Ordering::SeqCst);
}

/// Moves memory, or has it grow, while nobody else does. Comes back when that is told and applied. No handler of a signal
/// runs meanwhile: it might wait for another thread's move, or not come back.
///
/// Where the program has put up a filter no system call is made, nor does a lone thread make one: there may be few that are
/// allowed. Then a handler that waits for another's move waits until that takes the turn over.
fn one_at_a_time<T>(work: impl FnOnce() -> T) -> T {
    // The child of a fork past us has of a turn only that another thread had it.
    if exit::is_alone() || !memory::is_home() {
        return work();
    }
    let wait = if wrap::is_filtered() { Wait::Awake } else { Wait::Asleep };
    let in_turn = || {
        let me = NUMBER.fetch_add(1, Ordering::Relaxed) % Baton::MOST + 1;
        MOVES.take_over(me, ABANDONED, wait);
        let done = work();
        if let Some(keeper) = keeper::active() {
            keeper.engine.catch_up(wait);
        }
        MOVES.pass(me);
        done
    };
    match wait {
        Wait::Awake => in_turn(),
        Wait::Asleep => sys::quietly(in_turn),
    }
}

/// The same for a call by which memory may grow, of which nothing tells: if it was `done`. Nor does a fork come into it: its child
/// would have what was unmapped where memory has grown to.
pub fn grow<T>(by: usize, work: impl FnOnce() -> T, is_done: impl FnOnce(&T) -> bool) -> T {
    beside_no_fork(|| {
        one_at_a_time(|| {
            GROWING.fetch_add(1, Ordering::SeqCst);
            GROWTH.fetch_add(1, Ordering::SeqCst);
            GROWN_BY.store(by, Ordering::SeqCst);
            GROWER.store(me(), Ordering::SeqCst);
            let done = work();
            GROWER.store(0, Ordering::SeqCst);
            GROWN.fetch_add(is_done(&done).into(), Ordering::SeqCst);
            GROWING.fetch_sub(1, Ordering::SeqCst);
            done
        })
    })
}

/// The calling thread; 0 where it may not ask.
fn me() -> u32 {
    if exit::is_alone() {
        keeper::program()
    } else if wrap::is_filtered() {
        0
    } else {
        sys::own_number()
    }
}

/// Does what another thread's fork is not to come into, where there may be one. As [`one_at_a_time`] it makes no system call of
/// its own for a lone thread, nor under a filter: there a fork may come into it.
fn beside_no_fork<T>(work: impl FnOnce() -> T) -> T {
    if exit::is_alone() || !memory::is_home() || wrap::is_filtered() {
        return work();
    }
    fork::undivided(work)
}

/// As the system call, for what would be one mapping.
///
/// # Safety
/// As the system call.
pub unsafe fn remap(
    old: usize,
    old_len: usize,
    new_len: usize,
    flags: usize,
    new: usize,
) -> Result<usize, Errno> {
    // SAFETY: by contract.
    let direct = || unsafe { call(old, old_len, new_len, flags, new) };
    if keeper::active().is_none() {
        return direct();
    }
    if flags == MAYMOVE | FIXED | DONTUNMAP && old_len != 0 && !is_one(old, old.saturating_add(old_len)) {
        // It would move a part and say that it moved nothing.
        return Err(Errno::FAULT);
    }
    if flags & DONTUNMAP != 0 {
        // Both places are marked alike then: a fork's child could not tell whether it was done.
        return beside_no_fork(direct);
    }
    if flags & !(MAYMOVE | FIXED) != 0 {
        return direct();
    }
    let Some(task) = Task::new(old, old_len, new_len, flags, new) else { return direct() };
    let was_one = !task.only_moves() || is_one(task.old, task.old_end);
    if was_one {
        let done = direct();
        if done != Err(Errno::FAULT) {
            return done;
        }
    }
    // SAFETY: by contract.
    fork::undivided(|| unsafe { task.run(was_one) }).unwrap_or_else(|| {
        if was_one {
            Err(Errno::FAULT)
        } else {
            direct()
        }
    })
}

unsafe fn call(old: usize, old_len: usize, new_len: usize, flags: usize, new: usize) -> Result<usize, Errno> {
    let work = || {
        code::moves(old, old_len);
        // SAFETY: as the caller promises.
        let done = unsafe { sys::call6(raw::__NR_mremap, [old, old_len, new_len, flags, new, 0]) };
        // It may have been marked between.
        done.inspect(|at| code::moves(*at, new_len))
    };
    if new_len > old_len {
        grow((new_len.div_ceil(PAGE) - old_len.div_ceil(PAGE)) * PAGE, work, Result::is_ok)
    } else {
        one_at_a_time(work)
    }
}

/// Is a range in one mapping? The kernel looks at that before all else that keeps it from growing.
pub fn is_one(start: usize, end: usize) -> bool {
    grow_endlessly(start, end - start) != Err(Errno::FAULT)
}

/// Is the mapping that begins there sealed? The kernel looks at that before all but whether it is there.
fn is_sealed(start: usize) -> bool {
    grow_endlessly(start, PAGE) == Err(Errno::PERM)
}

/// Asks for what is refused always: why.
fn grow_endlessly(start: usize, len: usize) -> Result<usize, Errno> {
    // SAFETY: it is never done.
    unsafe { sys::call(raw::__NR_mremap, start, len, ENDLESS, 0) }
}

/// What is to be done, in whole pages.
struct Task {
    old: usize,
    old_end: usize,
    new_len: usize,
    flags: usize,
    new: usize,
}

impl Task {
    /// `None`: the kernel will refuse it, or there is nothing to do by pieces.
    fn new(old: usize, old_len: usize, new_len: usize, flags: usize, new: usize) -> Option<Self> {
        let old_len = old_len.checked_next_multiple_of(PAGE).filter(|len| *len != 0)?;
        let new_len = new_len.checked_next_multiple_of(PAGE).filter(|len| *len != 0)?;
        let old_end = old.checked_add(old_len).filter(|end| *end <= ENDLESS)?;
        if flags & FIXED != 0 {
            let new_end = new.checked_add(new_len).filter(|end| *end <= ENDLESS)?;
            if flags & MAYMOVE == 0 || new % PAGE != 0 || (new < old_end && old < new_end) {
                return None;
            }
        } else if new_len <= old_len {
            return None;
        }
        (old % PAGE == 0).then_some(Self { old, old_end, new_len, flags, new })
    }

    fn is_fixed(&self) -> bool {
        self.flags & FIXED != 0
    }

    fn only_moves(&self) -> bool {
        self.is_fixed() && self.old_end - self.old == self.new_len
    }

    /// Does it mapping by mapping. `None`: that is not for us, and nothing is done. What was one mapping may have been
    /// split, and its first part moved by the kernel.
    ///
    /// # Safety
    /// As the system call.
    unsafe fn run(&self, was_one: bool) -> Option<Result<usize, Errno>> {
        let Self { old, old_end, new_len, .. } = *self;
        let pieces = look(old, old_end, self.only_moves())?;
        let first = pieces[0].0;
        let is_one = self.only_moves() && pieces.len() == 1 && first == old;
        if is_one || (first != old && !(self.only_moves() && was_one)) {
            return None;
        }
        if pieces.iter().any(|piece| is_sealed(piece.0)) {
            // What is sealed in part only is several mappings to the kernel.
            return Some(Err(if self.only_moves() { Errno::PERM } else { Errno::FAULT }));
        }
        // SAFETY: by contract.
        unsafe {
            let grown = old + new_len;
            if old_end < grown && !self.is_fixed() {
                let in_place = with_last(old, old_end, |last| call(last, old_end - last, grown - last, 0, 0));
                match in_place {
                    Ok(_) => return Some(Ok(old)),
                    Err(Errno::NOMEM) if self.flags & MAYMOVE != 0 => {}
                    Err(errno) => return Some(Err(errno)),
                }
            }
            let aside = match Aside::new() {
                Ok(aside) => aside,
                Err(errno) => return Some(Err(errno)),
            };
            let fixed = self.new.wrapping_add(first - old);
            let reserved = match self.is_fixed() {
                true => reserve_holes(fixed, fixed + (grown - first)).map(|holes| (fixed, holes)),
                false => reserve(0, grown - first, MapFlags::empty())
                    .map(|to| (to, alloc::vec![(to, to + (grown - first))])),
            };
            Some(
                reserved.and_then(|(to, holes)| {
                    self.move_to(first, to, &holes, aside).map(|()| to - (first - old))
                }),
            )
        }
    }

    /// Moves what is there from `first` on to where it is reserved for it: these holes, and what is mapped between them. The
    /// way back may take what is set `aside`.
    unsafe fn move_to(
        &self,
        first: usize,
        to: usize,
        holes: &[(usize, usize)],
        aside: Aside,
    ) -> Result<(), Errno> {
        let Self { old, old_end, new_len, .. } = *self;
        let grown = old + new_len;
        let place = |at: usize| to + (at - first);
        // What is cut off goes at the end, when nothing can be refused any more.
        let kept = old_end.min(grown);
        // SAFETY: as the caller promises.
        unsafe {
            let mut last = kept;
            if kept < grown {
                last = with_last(first, kept, |last| {
                    call(last, kept - last, grown - last, MAYMOVE | FIXED, place(last))
                })
                .inspect_err(|_| unmap_parts(holes, to, place(grown)))?;
            }
            if let Err((errno, at)) = shift(first, last, to) {
                // As it was. Where others were given addresses that have been left, nobody can go on with what there is.
                unmap_parts(holes, place(at), place(last));
                unmap(place(kept), place(grown));
                drop(aside);
                for (start, end) in [(first, at), (last, kept)].into_iter().filter(|part| part.0 < part.1) {
                    if let Err(errno) = bring_back(place(start), place(end), start) {
                        refuse_to_go_on(errno);
                    }
                }
                return Err(errno);
            }
            unmap(kept, old_end);
        }
        Ok(())
    }
}

/// As many mappings as the way back may take, set aside before the first is moved: whoever has as many as he may is refused
/// then, and not halfway.
struct Aside(usize);

impl Aside {
    const LEN: usize = 16 * PAGE;

    fn new() -> Result<Self, Errno> {
        // Where the program has nothing: what is moved may go to any other place.
        let aside = Self(memory::map(Self::LEN, PAGE)?);
        for page in (aside.0..aside.0 + Self::LEN).step_by(2 * PAGE) {
            // SAFETY: ours, and nobody knows of it. Neighbours that differ are mappings of their own.
            unsafe { mprotect(page as *mut _, PAGE, MprotectFlags::READ)? };
        }
        Ok(aside)
    }
}

impl Drop for Aside {
    fn drop(&mut self) {
        memory::unmap(self.0, Self::LEN);
    }
}

/// The mappings that have addresses in a range, in order.
fn each_mapping(start: usize, end: usize, mut each: impl FnMut(&Area<'_>)) {
    Maps::new().read(c"/proc/self/maps", |line| {
        if let Some(area) = Area::parse(line).filter(|area| area.start < end && start < area.end) {
            each(&area);
        }
    });
}

/// The parts of a range by mappings, in order; the first may begin late. `None`: there is a hole, or they are not alike, if
/// they must be: private anonymous memory with the same access.
fn look(start: usize, end: usize, any: bool) -> Option<Vec<(usize, usize)>> {
    let mut parts: Vec<(usize, usize)> = Vec::with_capacity(64);
    let mut access = [0; 4];
    let mut alike = true;
    each_mapping(start, end, |area| {
        if parts.is_empty() {
            access.copy_from_slice(area.permissions);
        }
        alike &= any || (area.is_anonymous() && area.permissions == access);
        let before = parts.last().map_or(area.start.max(start), |last| last.1);
        // One that begins earlier has been merged since the last was read.
        alike &= area.start <= before;
        parts.push((before, area.end.min(end)));
    });
    let ends = parts.last().is_some_and(|last| last.1 == end);
    (alike && ends).then_some(parts)
}

/// Makes a call for the last mapping of a range: where that begins.
fn with_last(start: usize, end: usize, call: impl Fn(usize) -> Result<usize, Errno>) -> Result<usize, Errno> {
    for _ in 0..LOOKS {
        let last = look(start, end, true).and_then(|parts| parts.last().copied()).ok_or(Errno::FAULT)?.0;
        match call(last) {
            Err(Errno::FAULT) => {}
            done => return done.map(|_| last),
        }
    }
    Err(Errno::FAULT)
}

/// Moves a range, which is there, to where it is reserved for it. An error, and how far it came.
unsafe fn shift(start: usize, end: usize, to: usize) -> Result<(), (Errno, usize)> {
    let mut at = start;
    let mut split = (0, 0);
    for _ in 0..LOOKS {
        if at == end {
            return Ok(());
        }
        let parts = look(at, end, true).ok_or((Errno::FAULT, at))?;
        for (from, stop) in parts {
            // What is not there any more was moved by the kernel, before it met what had just been split off.
            at = from;
            // What stays as it is may never grow, for another reason.
            if !is_one(from, stop) && split != (from, stop) {
                split = (from, stop);
                break;
            }
            let len = stop - from;
            // SAFETY: as the caller promises.
            match unsafe { call(from, len, len, MAYMOVE | FIXED, to + (from - start)) } {
                Ok(_) => at = stop,
                Err(Errno::FAULT) => break,
                Err(errno) => return Err((errno, at)),
            }
        }
    }
    if at == end {
        Ok(())
    } else {
        Err((Errno::FAULT, at))
    }
}

/// Moves what was moved to where it was, while others may be given what it left as soon as they ask. Waits for a mapping
/// more where the program has as many as it may: to be refused one is what brings it here.
unsafe fn bring_back(start: usize, end: usize, to: usize) -> Result<(), Errno> {
    const NAP: i64 = 10_000_000;
    let (mut at, mut reserved) = (start, false);
    let mut patience = PATIENCE;
    loop {
        // SAFETY: as the caller promises.
        let failed = unsafe {
            if !reserved {
                reserved = match reserve(to, end - start, MapFlags::FIXED_NOREPLACE) {
                    Ok(_) => true,
                    Err(Errno::NOMEM) => false,
                    Err(errno) => return Err(errno),
                };
            }
            match reserved {
                true => shift(at, end, to + (at - start)),
                false => Err((Errno::NOMEM, at)),
            }
        };
        match failed {
            Err((Errno::NOMEM, stopped)) if patience > 0 => (at, patience) = (stopped, patience - 1),
            done => return done.map_err(|(errno, _)| errno),
        }
        sys::nap(NAP);
    }
}

/// Ends the program, a part of whose memory is not where it looks for it.
fn refuse_to_go_on(errno: Errno) -> ! {
    let line = alloc::format!(
        "pageout: mremap was refused by the kernel halfway, and then the way back ({errno}); process {} is killed, so that it \
        cannot go on without a part of its memory\n",
        keeper::program()
    );
    sys::complain(line.as_bytes());
    sys::kill_self()
}

/// Addresses without access; anywhere, or as a flag says.
unsafe fn reserve(at: usize, len: usize, place: MapFlags) -> Result<usize, Errno> {
    let at = if at == 0 { null_mut() } else { at as *mut _ };
    // SAFETY: as the caller promises.
    let there = unsafe {
        mmap_anonymous(at, len, ProtFlags::empty(), MapFlags::PRIVATE | MapFlags::NORESERVE | place)
    };
    there.map(|start| start as usize)
}

/// The same for what is not mapped of a range: others may read what is, until something comes in its place. Returns what
/// it was. Nothing comes where something is sealed.
unsafe fn reserve_holes(start: usize, end: usize) -> Result<Vec<(usize, usize)>, Errno> {
    let mut holes: Vec<(usize, usize)> = Vec::with_capacity(64);
    let mut at = start;
    let mut sealed = false;
    each_mapping(start, end, |area| {
        holes.extend((at < area.start).then_some((at, area.start)));
        sealed |= is_sealed(area.start);
        at = area.end;
    });
    if sealed {
        return Err(Errno::PERM);
    }
    holes.extend((at < end).then_some((at, end)));
    for at in 0..holes.len() {
        let (from, to) = holes[at];
        // SAFETY: as the caller promises.
        match unsafe { reserve(from, to - from, MapFlags::FIXED_NOREPLACE) } {
            Ok(_) => {}
            // Somebody has mapped there since.
            Err(Errno::EXIST) => holes[at] = (from, from),
            Err(errno) => {
                // SAFETY: reserved above.
                unsafe { unmap_parts(&holes[..at], start, end) };
                return Err(errno);
            }
        }
    }
    Ok(holes)
}

/// Unmaps what of these lies in a range.
unsafe fn unmap_parts(parts: &[(usize, usize)], start: usize, end: usize) {
    for part in parts {
        // SAFETY: as the caller promises.
        unsafe { unmap(part.0.max(start), part.1.min(end)) };
    }
}

unsafe fn unmap(start: usize, end: usize) {
    if start < end {
        // SAFETY: as the caller promises.
        let _ = unsafe { munmap(start as *mut _, end - start) };
    }
}
