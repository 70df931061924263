//! What the program did to its memory, applied to the words.
//!
//! The caller holds the events lock exclusively and has just read the event, which lets the program go on:
//! nothing else may look at a word before this has run. Applying never waits for I/O and never
//! touches managed memory.

use super::{page_start, Change, Region, Regions, BLOCK, PAGE};
use crate::engine::Engine;
use crate::kernel::{Event, Kernel};
use crate::page::{Tag, Word};
use crate::sync::atomic::Ordering::Relaxed;

/// Applies one event, or a part of it. `growths`: see [`Kernel::told_growths`], before it was read.
pub(crate) fn apply<K: Kernel>(
    engine: &Engine<K>,
    regions: &mut Regions,
    growths: Option<u32>,
    Numbered(number, event, whole): Numbered,
) {
    if let Some(change) = change(event, number) {
        engine.unmappings.fetch_add(1, Relaxed);
        regions.changed(change);
    }
    match event {
        Event::Fault(_) => {}
        Event::Remove { start, end } => forget(engine, start, end, Word::discard),
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
                forget(engine, at, from, Word::forget);
                forget(engine, from, to, |word| word.unmap(growths));
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
                    forget(self, start, end, Word::forget);
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

/// What an event changes in the regions.
fn change(event: Event, number: u64) -> Option<Change> {
    let of =
        |from: usize, len: usize, to: u64| Change { from: from as u64, len: len as u64, to, event: number };
    match event {
        Event::Unmap { start, end } => Some(of(start, end - start, Change::GONE)),
        Event::Remap { from, to, len } => Some(of(from, len, to as u64)),
        Event::Fault(_) | Event::Remove { .. } => None,
    }
}

/// The pages of a range are the program's no more: their slots are free, and a frame that still holds one
/// is free once its writer notices.
fn forget<K: Kernel>(engine: &Engine<K>, start: usize, end: usize, verb: impl Fn(Word) -> Word) {
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
                index = (index / super::UNIT_PAGES + 1) * super::UNIT_PAGES;
                continue;
            }
            forget_page(engine, &mut block, index, &verb);
            index += 1;
        }
        engine.given_up.fetch_add((before - block.resident) as usize, Relaxed);
        block.thinned = true;
        if to - from == BLOCK {
            // The page tables of what is unmapped go with it, and since Linux 6.14 those of what is discarded.
            (block.huge, block.table, block.splits) = (false, false, 0);
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
    forget(engine, to, to + len, Word::forget);
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
            let index = (at - block_start) / PAGE;
            let (word, sum) = {
                let mut block = block.lock();
                if block.unit(index).is_none() {
                    at = (at / super::UNIT + 1) * super::UNIT;
                    continue;
                }
                let (word, sum) = (block.word(index), block.sum(index));
                block.set(index, word.forget());
                block.set_sum(index, 0);
                (word, sum)
            };
            if word.tag() != Tag::None {
                settle_moved(engine, page_start(to + (at - from)), word, sum);
            }
            at += PAGE;
        }
        let mut block = block.lock();
        block.thinned = true;
        if block.huge {
            block.became_split();
            engine.requeue_units(&mut block, block_start);
        }
    }
}

/// Gives the page at its new place what was known of it at the old one.
fn settle_moved<K: Kernel>(engine: &Engine<K>, at: usize, word: Word, sum: u128) {
    let block_start = at & !(BLOCK - 1);
    let mut block = engine.space.block_or_new(at).lock();
    let index = (at - block_start) / PAGE;
    block.unit_or_new(index, &engine.space.spares);
    forget_page(engine, &mut block, index, Word::forget);
    let here = block.word(index);
    match word.tag() {
        // Its reader will find the old word changed, and drop what it read and its count of the slot.
        // Here it must be possible to read it again: one more count.
        Tag::Busy => {
            engine.place.dup(word.payload(), 1);
            block.set(index, here.moved_swapped(word));
        }
        _ => block.set(index, here.moved(word)),
    }
    block.set_sum(index, sum);
    if word.tag() == Tag::Cached {
        engine.frames.set_owner(word.payload() as u32, at);
    }
    if word.tag() == Tag::Resident {
        engine.is_here(&mut block, block_start, index..index + 1);
    }
}
