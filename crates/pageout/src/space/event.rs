//! What the program did to its memory, applied to the words.
//!
//! The caller holds the events lock exclusively and has just read the event, which lets the program go on:
//! nothing else may look at a word before this has run. Applying never waits for I/O and never
//! touches managed memory.

use super::{Change, Region, Regions, BLOCK, PAGE, UNIT, UNIT_PAGES};
use crate::engine::Engine;
use crate::kernel::{Event, Kernel};
use crate::page::{Tag, Word};
use crate::sync::atomic::Ordering::Relaxed;

/// Applies one event, or a part of it. `growths`: see [`Kernel::told_growths`], before it was read.
pub(crate) fn apply<K: Kernel>(
    engine: &Engine<K>,
    regions: &mut Regions,
    growths: Option<u32>,
    numbered: Numbered,
) {
    let Numbered(_, event, whole) = numbered;
    if let Some(change) = numbered.change() {
        engine.unmappings.fetch_add(1, Relaxed);
        regions.changed(change);
    }
    match event {
        Event::Fault(_) => {}
        Event::Remove { start, end } => {
            forget(engine, start, end, !engine.kernel.frees_tables(), Word::discard)
        }
        Event::Unmap { start, end } => {
            regions.remove(start, end);
            let is_out = |tag| matches!(tag, Tag::Cached | Tag::Swapped | Tag::Busy | Tag::Gone);
            let may_be_lost = engine.space.any(start, end, is_out);
            let mut at = start;
            while at < end {
                // The kernel tells after the call. Where it refuses, it has split by then what begins before.
                let mapping = if may_be_lost { engine.kernel.mapping(at) } else { None };
                let (begin, to) = mapping.unwrap_or((end, end));
                let (from, to) = (begin.clamp(at, end), to.min(end));
                let growths = if begin < whole { None } else { growths };
                forget(engine, at, from, false, Word::forget);
                forget(engine, from, to, false, |word| word.unmap(growths));
                at = to;
            }
        }
        Event::Remap { from, to, len } => remap(engine, regions, from, to, len),
    }
}

impl<K: Kernel> Engine<K> {
    /// Forgets what is not mapped any more without having been told of: a child would not get it, or get what is out of it where
    /// something else is by now. For what asks whether all is there.
    pub(crate) fn forget_untold(&self, regions: &mut Regions) {
        const TRIES: usize = 100;
        if !self.kernel.loses_events() {
            return;
        }
        for _ in 0..TRIES {
            let mut untold = alloc::vec::Vec::new();
            for Region { start, end } in regions.iter() {
                let mut at = start;
                while at < end {
                    let (from, to) = self.kernel.next_registered(at, end).unwrap_or((end, end));
                    if at < from {
                        untold.push(Region { start: at, end: from });
                    }
                    at = to;
                }
            }
            // Else that may be what the event tells of.
            if !self.kernel.event_pending() {
                for Region { start, end } in untold {
                    self.unmappings.fetch_add(1, Relaxed);
                    regions.remove(start, end);
                    forget(self, start, end, false, Word::forget);
                }
                return;
            }
            self.read_all(regions, |_| ());
        }
    }
}

/// An event, or a part of it, its number, and where all of an UNMAP starts.
#[derive(Clone, Copy)]
pub(crate) struct Numbered(pub u64, pub Event, pub usize);

impl Numbered {
    /// What it changes in the regions.
    pub(crate) fn change(self) -> Option<Change> {
        let Self(number, event, _) = self;
        let (from, len, to) = match event {
            Event::Unmap { start, end } => (start, end - start, Change::GONE),
            Event::Remap { from, to, len } => (from, len, to as u64),
            Event::Fault(_) | Event::Remove { .. } => return None,
        };
        Some(Change { from: from as u64, len: len as u64, to, event: number })
    }
}

/// The pages of a range are the program's no more: their slots are free, and a frame that still holds one
/// is free once its writer notices. `keeps_tables`: where small pages were, no huge one can come in whole.
fn forget<K: Kernel>(
    engine: &Engine<K>,
    start: usize,
    end: usize,
    keeps_tables: bool,
    verb: impl Fn(Word) -> Word,
) {
    if start >= end {
        return;
    }
    for (block_start, block) in engine.space.blocks(start, end) {
        let mut block = block.lock();
        let from = start.max(block_start);
        let to = end.min(block_start + BLOCK);
        let split = block.huge && to - from < BLOCK;
        let (mut index, stop) = ((from - block_start) / PAGE, (to - block_start) / PAGE);
        let before = block.resident;
        while index < stop {
            if block.unit(index).is_none() {
                index = (index / UNIT_PAGES + 1) * UNIT_PAGES;
                continue;
            }
            forget_page(engine, &mut block, index, &verb);
            index += 1;
        }
        engine.given_up.fetch_add((before - block.resident) as usize, Relaxed);
        block.thinned = true;
        if to - from == BLOCK {
            (block.huge, block.splits) = (false, 0);
            block.table &= keeps_tables;
        }
        if split {
            block.became_split();
            engine.requeue_units(&mut block, block_start);
        }
    }
}

fn forget_page<K: Kernel>(
    engine: &Engine<K>,
    block: &mut super::BlockState,
    index: usize,
    verb: impl Fn(Word) -> Word,
) {
    let word = block.word(index);
    match word.tag() {
        Tag::Resident | Tag::Swapped if word.payload() != 0 => engine.place.put(word.payload(), 1),
        // The reader of a Busy page uses its slot; it puts it when it finds the word changed.
        _ => {}
    }
    block.set(index, verb(word));
    block.set_sum(index, 0);
}

/// `mremap`: pages, words and the mapping itself are at `to` now. What was known there is gone, whether its leaving was
/// told or not: the kernel puts nothing where something is.
fn remap<K: Kernel>(engine: &Engine<K>, regions: &mut Regions, from: usize, to: usize, len: usize) {
    regions.remove(to, to + len);
    forget(engine, to, to + len, false, Word::forget);
    let moved: alloc::vec::Vec<Region> = regions.within(from, from + len).collect();
    regions.remove(from, from + len);
    for Region { start, end } in moved {
        regions.insert(Region { start: to + (start - from), end: to + (end - from) });
    }
    for (block_start, block) in engine.space.blocks(from, from + len) {
        let first = from.max(block_start);
        let last = (from + len).min(block_start + BLOCK);
        let mut at = first;
        while at < last {
            // A unit at a time, where it was: what is moved may be large, and all who fault wait meanwhile.
            let end = last.min((at / UNIT + 1) * UNIT);
            let mut pages = [(Word::default(), 0); UNIT_PAGES];
            let pages = &mut pages[..(end - at) / PAGE];
            {
                let mut block = block.lock();
                let index = (at - block_start) / PAGE;
                if block.unit(index).is_some() {
                    for (index, page) in (index..).zip(pages.iter_mut()) {
                        let word = block.word(index);
                        *page = (word, block.sum(index));
                        block.set(index, word.forget());
                        block.set_sum(index, 0);
                    }
                }
            }
            settle_moved(engine, to + (at - from), pages);
            at = end;
        }
        let mut block = block.lock();
        block.thinned = true;
        if block.huge {
            block.became_split();
            engine.requeue_units(&mut block, block_start);
        }
    }
}

/// Gives pages at their new place, from `start` on, what was known of them at the old one: no more than of a unit.
fn settle_moved<K: Kernel>(engine: &Engine<K>, start: usize, mut pages: &[(Word, u128)]) {
    let mut at = start;
    while !pages.is_empty() {
        let here;
        let in_unit = UNIT_PAGES - at / PAGE % UNIT_PAGES;
        (here, pages) = pages.split_at(in_unit.min(pages.len()));
        if here.iter().any(|(word, _)| word.tag() != Tag::None) {
            settle_moved_in_unit(engine, at, here);
        }
        at += here.len() * PAGE;
    }
}

/// The same of pages that are in one unit by now.
fn settle_moved_in_unit<K: Kernel>(engine: &Engine<K>, at: usize, pages: &[(Word, u128)]) {
    let block_start = at & !(BLOCK - 1);
    let mut block = engine.space.block_or_new(at).lock();
    let first = (at - block_start) / PAGE;
    block.unit_or_new(first, &engine.space.spares);
    for (index, (word, sum)) in (first..).zip(pages) {
        if word.tag() == Tag::None {
            continue;
        }
        forget_page(engine, &mut block, index, Word::forget);
        let here = block.word(index);
        match word.tag() {
            // Its reader will find the old word changed, and drop what it read and its count of the slot.
            // Here it must be possible to read it again: one more count.
            Tag::Busy => {
                engine.place.dup(word.payload(), 1);
                block.set(index, here.moved_swapped(*word));
            }
            _ => block.set(index, here.moved(*word)),
        }
        block.set_sum(index, *sum);
        if word.tag() == Tag::Cached {
            engine.frames.set_owner(word.payload() as u32, block_start + index * PAGE);
        }
    }
    let resident = |index: &usize| pages[*index].0.tag() == Tag::Resident;
    if let Some(one) = (0..pages.len()).find(resident) {
        let last = (0..pages.len()).rfind(resident).unwrap_or(one);
        engine.is_here(&mut block, block_start, first + one..first + last + 1);
    }
}
