//! Faults that were read and wait for a server.

use crate::engine::Engine;
use crate::kernel::{Fault, Kernel};
use crate::space::{page_start, PAGE};
use crate::sync::atomic::Ordering::Relaxed;
use alloc::collections::VecDeque;
use core::ops::Range;

/// So many faults are known while they wait; there is room for them from the start.
const KNOWN: usize = 4096;

/// Faults that were read and not answered yet, the oldest first, with the [`Engine::unmappings`] before they were. None is woken
/// to come again while others wait: the kernel gives out faults before events, so those of hundreds of threads would keep an event
/// from being read for ever, and while one is unread no page can be mapped.
pub struct Pending {
    faults: VecDeque<(Fault, Option<u32>)>,
    /// The pages of those that found no room are somewhere here.
    missed: Range<usize>,
}

impl Pending {
    /// None.
    pub fn new() -> Self {
        Self { faults: VecDeque::with_capacity(KNOWN), missed: 0..0 }
    }

    pub(super) fn push(&mut self, fault: Fault, since: Option<u32>) {
        if self.faults.len() < KNOWN {
            return self.faults.push_back((fault, since));
        }
        let page = page_start(fault.address);
        self.missed = match self.missed.is_empty() {
            true => page..page + PAGE,
            false => self.missed.start.min(page)..self.missed.end.max(page + PAGE),
        };
    }

    fn is_empty(&self) -> bool {
        self.faults.is_empty()
    }

    /// Does one wait for a page?
    pub(super) fn has(&self, page: usize) -> bool {
        self.faults.iter().any(|(fault, _)| page_start(fault.address) == page)
    }

    /// The oldest, and how many wait after it.
    pub(super) fn pop(&mut self) -> Option<(Fault, Option<u32>, usize)> {
        let (fault, since) = self.faults.pop_front()?;
        Some((fault, since, self.faults.len()))
    }

    /// Where those are that found no room, once nobody else waits: they are to come again.
    fn take_missed(&mut self) -> Option<Range<usize>> {
        let missed = if self.is_empty() { core::mem::take(&mut self.missed) } else { 0..0 };
        (!missed.is_empty()).then_some(missed)
    }
}

impl Default for Pending {
    fn default() -> Self {
        Self::new()
    }
}

impl<K: Kernel> Engine<K> {
    /// A fault that was read waits for a server.
    pub(crate) fn hear(&self, fault: Fault, since: Option<u32>) {
        self.crowd.note(fault.thread, self.kernel.now(), self.stats.pgmajfault.load(Relaxed));
        self.pending.lock().push(fault, since);
    }

    /// Does nobody wait who is known? Those who are not come again then.
    pub(super) fn is_through(&self) -> bool {
        let mut pending = self.pending.lock();
        let (through, missed) = (pending.is_empty(), pending.take_missed());
        drop(pending);
        if let Some(pages) = missed {
            self.kernel.wake(pages.start, pages.end - pages.start);
        }
        through
    }
}
