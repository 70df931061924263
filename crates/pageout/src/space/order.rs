//! What happened to mappings, in the order in which it happened.
//!
//! The kernel queues an event only after it has let go of the address space. A thread that unmaps X, or moves it
//! away, and is preempted just then tells of it late: another thread may have moved Y to X meanwhile, since the
//! address was free, and its event is read first. Applied as read, the words of pages that are alive would go.
//!
//! So once a REMAP was read, reading goes on until the kernel says that no event is pending: every change that had begun
//! is told then, and nothing could be mapped before anyway. Then the log is applied by three rules:
//!
//! 1. What comes to addresses that are still known waits until what was there has left: the first departure
//!    from there in the log is that of the old mapping.
//! 2. An UNMAP of addresses to which something came since reading began is about what was there before, if that
//!    leaves from there later in the log, or if the newcomer is still there. It is about the newcomer if the next thing
//!    in the log is that something else comes there, or what that grew by, or if the newcomer was seen to be gone.
//! 3. All else is applied as read.
//!
//! Is the newcomer still there? The kernel knows where something is registered; but a mapping grows in place without an
//! event, so what has gone may be there again, and empty. So events are read one by one, and before each is looked
//! whether what came is there: who waits for an event of his to be read has done nothing since. One case is left: another
//! thread has its own mapping grow to where the newcomer was, before the event of that is read.
//!
//! What libc moves, or has grow, in a program under `pageout run`, it moves one at a time, and nobody goes on before that is
//! applied (the agent's `remap`): a log has one such change then, and all else in it about its place is older. The rules do not
//! know all orders that threads make past libc: what grew unseen is taken for nothing, and of two departures that fit, the
//! one that was read first for the first.
//!
//! Under the events lock, exclusively, from the first event to the last.

use super::event::{apply, Numbered};
use super::{Region, Regions, PAGE};
use crate::engine::Engine;
use crate::kernel::{Event, Kernel};
use alloc::collections::VecDeque;
use alloc::vec::Vec;

/// Departures that may be brought forward for one log: more than any program has threads. It is a bound on what a
/// log that contradicts itself costs before the engine stops.
const MOST: usize = 100_000;

/// Events that were read and not applied yet.
pub(crate) struct Order {
    /// See [`Kernel::told_growths`], before the first was read.
    growths: Option<u32>,
    log: VecDeque<Numbered>,
    /// Where something came to since reading began and was not seen to leave, as far as the log is applied.
    fresh: Regions,
    /// The same as far as it is read; what was there at the last look, and what was missing at one.
    there: Regions,
    gone: Regions,
    brought: usize,
}

impl Order {
    /// Before events are read.
    pub(crate) fn new(kernel: &impl Kernel) -> Self {
        let none = Regions::default;
        Self {
            growths: kernel.told_growths(),
            log: VecDeque::new(),
            fresh: none(),
            there: none(),
            gone: none(),
            brought: 0,
        }
    }

    /// Takes an event; those that nothing can have overtaken are applied at once.
    pub(crate) fn take<K: Kernel>(&mut self, engine: &Engine<K>, regions: &mut Regions, event: Event) {
        let whole = if let Event::Unmap { start, .. } = event { start } else { 0 };
        let numbered = Numbered(regions.number(), event, whole);
        match event {
            Event::Fault(_) => return,
            Event::Remap { from, to, len } => {
                for gone in [(from, from + len), (to, to + len)] {
                    self.there.remove(gone.0, gone.1);
                    self.gone.remove(gone.0, gone.1);
                }
                self.there.insert(Region { start: to, end: to + len });
            }
            _ if !self.is_empty() => {}
            _ => return apply(engine, regions, self.growths, numbered),
        }
        self.log.push_back(numbered);
    }

    /// Looks whether what came is there, before an event is read that is there to be read.
    pub(crate) fn look<K: Kernel>(&mut self, kernel: &K) {
        let mut gone = Vec::new();
        for Region { start, end } in self.there.iter() {
            let mut at = start;
            while at < end {
                let (from, to) = kernel.next_mapped(at, end).unwrap_or((end, end));
                gone.extend((at < from).then_some((at, from)));
                at = to;
            }
        }
        for (start, end) in gone {
            self.there.remove(start, end);
            self.gone.insert(Region { start, end });
        }
    }

    /// Is nothing left to apply?
    pub(crate) fn is_empty(&self) -> bool {
        self.log.is_empty()
    }

    /// Applies all, after the kernel said that no event was pending. `false`: something has begun since that must be
    /// read first.
    pub(crate) fn settle<K: Kernel>(&mut self, engine: &Engine<K>, regions: &mut Regions) -> bool {
        while let Some(numbered) = self.log.front().copied() {
            match numbered.1 {
                Event::Remap { from, to, len } => {
                    let known = known(engine, regions, (to, to + len));
                    if known.is_some_and(|known| self.bring_forward(known, (from, from + len))) {
                        continue;
                    }
                    apply(engine, regions, self.growths, numbered);
                    self.fresh.remove(from, from + len);
                    self.fresh.insert(Region { start: to, end: to + len });
                }
                Event::Unmap { start, end } => {
                    if !self.unmap(engine, regions, start, end) {
                        return false;
                    }
                }
                _ => apply(engine, regions, self.growths, numbered),
            }
            self.log.pop_front();
        }
        true
    }

    /// Puts the first departure from a range that is known, as far as it is about that range, in front of the log;
    /// whether there is one. What was to come there comes `from` where it is still known.
    fn bring_forward(&mut self, known: (usize, usize), from: (usize, usize)) -> bool {
        let leaves = |numbered: &Numbered| {
            let (source, target) = numbered.change()?.sides();
            // What goes back to where the newcomer came from is the newcomer.
            let newcomer = target.is_some_and(|target| overlap(target, from).is_some());
            overlap(source, known).filter(|_| !newcomer)
        };
        let first = (1..self.log.len()).find_map(|at| Some((at, leaves(&self.log[at])?)));
        let Some((at, part)) = first else { return false };
        self.brought += 1;
        assert!(self.brought < MOST, "events about mappings that no order explains");
        let departure = self.log.remove(at).expect("an event of the log");
        let Numbered(number, event, whole) = departure;
        let (source, _) = departure.change().expect("a departure").sides();
        for rest in [(part.1, source.1), (source.0, part.0)].into_iter().filter(|rest| rest.0 < rest.1) {
            self.log.insert(at, Numbered(number, cut(event, rest), whole));
        }
        self.log.push_front(Numbered(number, cut(event, part), whole));
        true
    }

    /// Applies an UNMAP to what it is about. `false`: the kernel cannot say it now; what was applied may be again.
    fn unmap<K: Kernel>(
        &mut self,
        engine: &Engine<K>,
        regions: &mut Regions,
        start: usize,
        end: usize,
    ) -> bool {
        let mut at = start;
        while at < end {
            let newcomer = self.fresh.iter().find(|fresh| fresh.end > at && fresh.start < end);
            let old = newcomer.map_or(end, |newcomer| newcomer.start.max(at));
            if at < old {
                self.apply_part(engine, regions, at, old);
            }
            let Some(newcomer) = newcomer else { return true };
            let stop = newcomer.end.min(end);
            if !self.unmap_newcomer(engine, regions, old, stop) {
                return false;
            }
            at = stop;
        }
        true
    }

    /// The same for addresses to which something came.
    fn unmap_newcomer<K: Kernel>(
        &mut self,
        engine: &Engine<K>,
        regions: &mut Regions,
        start: usize,
        end: usize,
    ) -> bool {
        match self.next((start, end)) {
            Next::Leaves => {}
            Next::Taken => self.newcomer_left(engine, regions, start, end),
            Next::Nothing if self.grows_over(start) => self.newcomer_left(engine, regions, start, end),
            Next::Nothing => {
                let mut at = start;
                while at < end {
                    let (from, to) = engine.kernel.next_registered(at, end).unwrap_or((end, end));
                    if engine.kernel.event_pending() {
                        return false;
                    }
                    self.newcomer_left(engine, regions, at, from);
                    for gone in self.gone_of(from, to) {
                        self.newcomer_left(engine, regions, gone.0, gone.1);
                    }
                    at = to;
                }
            }
            Next::Several => {
                let middle = start + (end - start) / PAGE / 2 * PAGE;
                return self.unmap_newcomer(engine, regions, start, middle)
                    && self.unmap_newcomer(engine, regions, middle, end);
            }
        }
        true
    }

    /// What of a range was seen to be gone.
    fn gone_of(&self, start: usize, end: usize) -> Vec<(usize, usize)> {
        self.gone.iter().filter_map(|gone| overlap((gone.start, gone.end), (start, end))).collect()
    }

    fn newcomer_left<K: Kernel>(
        &mut self,
        engine: &Engine<K>,
        regions: &mut Regions,
        start: usize,
        end: usize,
    ) {
        if start < end {
            self.fresh.remove(start, end);
            self.apply_part(engine, regions, start, end);
        }
    }

    /// A part of the UNMAP at hand.
    fn apply_part<K: Kernel>(&self, engine: &Engine<K>, regions: &mut Regions, start: usize, end: usize) {
        let (number, whole) = self.log.front().map_or((0, start), |numbered| (numbered.0, numbered.2));
        apply(engine, regions, self.growths, Numbered(number, Event::Unmap { start, end }, whole));
    }

    /// Is the UNMAP at hand that of an `mremap` to a fixed place, and what is from `at` on what that grew by? Its REMAP,
    /// which comes next to tell of that place, has the length from before.
    fn grows_over(&self, at: usize) -> bool {
        let Some(Numbered(_, Event::Unmap { start: place, .. }, _)) = self.log.front().copied() else {
            return false;
        };
        let next = self.log.iter().skip(1).find_map(|numbered| match numbered.1 {
            Event::Remap { to, len, .. } if to == place => Some(to + len <= at),
            // Somebody else's: what comes there next need not have made room for itself.
            _ => {
                let (source, _) = numbered.change()?.sides();
                overlap(source, (place, place + PAGE)).map(|_| false)
            }
        });
        next == Some(true)
    }

    /// What the next REMAP of the log that has to do with a range does to it.
    fn next(&self, range: (usize, usize)) -> Next {
        for numbered in self.log.iter().skip(1) {
            let Event::Remap { from, to, len } = numbered.1 else { continue };
            let leaves = overlap((from, from + len), range);
            let taken = overlap((to, to + len), range);
            match (leaves, taken) {
                (None, None) => {}
                (Some(part), None) if part == range => return Next::Leaves,
                (None, Some(part)) if part == range => return Next::Taken,
                _ => return Next::Several,
            }
        }
        Next::Nothing
    }
}

/// What becomes of a range by a REMAP.
enum Next {
    Nothing,
    /// It is moved away.
    Leaves,
    /// Something comes there.
    Taken,
    /// Not the same for all of it.
    Several,
}

/// The first part of a range that is managed, or of which pages are known: what grew in place is no region yet.
pub(crate) fn known<K: Kernel>(
    engine: &Engine<K>,
    regions: &Regions,
    range: (usize, usize),
) -> Option<(usize, usize)> {
    let region = regions.within(range.0, range.1).next().map(|region| (region.start, region.end));
    region.or_else(|| engine.space.first_known(range.0, range.1))
}

fn overlap(a: (usize, usize), b: (usize, usize)) -> Option<(usize, usize)> {
    let both = (a.0.max(b.0), a.1.min(b.1));
    (both.0 < both.1).then_some(both)
}

/// The part of a departure that is about `part` of the addresses that it empties.
fn cut(event: Event, part: (usize, usize)) -> Event {
    match event {
        Event::Remap { from, to, .. } => {
            Event::Remap { from: part.0, to: to + (part.0 - from), len: part.1 - part.0 }
        }
        _ => Event::Unmap { start: part.0, end: part.1 },
    }
}
