//! What the engine does with a trace, without the engine: the real policy (`reclaim::policy`) and the real choice
//! of orders (`fault::order`) are told what it tells them, and pages are bits.
//!
//! As in the engine: nothing is known below 80 % of the memory; then what is there is found in the order of
//! addresses. A fault brings in a window of what is out around it; reclaim takes units of 64 KiB and works
//! ahead of faults. Not as in the engine: nothing is mapped huge, a write takes no time (so nobody is rescued), and
//! faults come one after another.

use std::ops::Range;

use pageout::fault::order::{Asked, Orders};
use pageout::fault::stream::{Stream, Streams, UNIT_ORDER};
use pageout::reclaim::policy::{Policy, Turn, FIRST};
use pageout::space::{Usage, BLOCK_PAGES, UNIT_PAGES};

use super::trace::Access;

/// Pages that are free after a fault, at least; and where blocks come in whole.
const ROOM: usize = 32;
/// Pages that one round of reclaim takes where blocks come in whole.
const ROUND: usize = BLOCK_PAGES;
/// What a request to a device takes: RAM.
const REQUEST_NS: u64 = 2_000;

#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Page {
    #[default]
    Untouched,
    Resident,
    Out,
}

/// The engine's part.
pub struct Model {
    frames: usize,
    pages: Vec<Page>,
    usages: Vec<Usage>,
    resident: usize,
    out: usize,
    adopted: bool,
    policy: Policy,
    orders: Orders,
    streams: Streams,
    evictions: u32,
    /// Faults on pages that were out.
    pub faults: u64,
    /// Pages that came in.
    pub brought: u64,
    /// Units that reclaim looked at.
    pub looks: u64,
}

impl Model {
    pub fn new(pages: usize, frames: usize) -> Model {
        Model {
            frames,
            pages: vec![Page::Untouched; pages.next_multiple_of(BLOCK_PAGES)],
            usages: vec![Usage::default(); pages.next_multiple_of(BLOCK_PAGES) / UNIT_PAGES],
            resident: 0,
            out: 0,
            adopted: false,
            policy: Policy::default(),
            orders: Orders::new(),
            streams: Streams::new(),
            evictions: FIRST,
            faults: 0,
            brought: 0,
            looks: 0,
        }
    }

    /// An access; whether it raised no fault.
    pub fn access(&mut self, access: Access) -> bool {
        let page = access.page();
        if self.pages[page] == Page::Resident {
            return true;
        }
        if !self.adopted {
            self.pages[page] = Page::Resident;
            self.resident += 1;
            if self.resident * 5 >= self.frames * 4 {
                self.adopt();
            }
            return false;
        }
        self.fault(page, access.thread());
        false
    }

    fn adopt(&mut self) {
        self.adopted = true;
        for unit in 0..self.usages.len() {
            let pages = self.pages_of(unit, Page::Resident);
            if pages != 0 {
                self.used(unit, pages, false);
            }
        }
    }

    fn used(&mut self, unit: usize, pages: u16, asked: bool) {
        if pages.count_ones() > 1 {
            self.usages[unit].sampled = 0;
        }
        self.policy.used(Turn::new(unit as u32, false), &mut self.usages[unit], self.evictions, pages, asked);
    }

    /// A bit for each page of a unit that is in `state`.
    fn pages_of(&self, unit: usize, state: Page) -> u16 {
        let pages = self.pages[unit * UNIT_PAGES..][..UNIT_PAGES].iter().enumerate();
        pages.filter(|(_, page)| **page == state).fold(0, |pages, (at, _)| pages | 1 << at)
    }

    fn fault(&mut self, page: usize, thread: usize) {
        if let Some(unit) = self.orders.due(thread as u32) {
            self.learn(unit);
        }
        let there =
            |page: usize, end: usize| self.pages[page..end].iter().all(|page| *page == Page::Resident);
        let stream = self.streams.find(thread as u32, page, self.out, there);
        let state = self.pages[page];
        let order = match state {
            Page::Out => self.order(page, thread as u32, stream),
            _ => stream.filter(|stream| stream.is_next).map_or(0, |stream| stream.order + 2),
        };
        let order = order.min(BLOCK_PAGES.ilog2() as u8);
        let low = page & !((1 << order) - 1);
        let came = self.window(page, low..low + (1 << order), state);
        self.make_room(came.len(), order);
        for &at in &came {
            self.pages[at] = Page::Resident;
        }
        self.resident += came.len();
        if state == Page::Out {
            self.faults += 1;
            self.brought += came.len() as u64;
            self.out -= came.len();
        }
        for unit in came.chunk_by(|a, b| a / UNIT_PAGES == b / UNIT_PAGES) {
            let pages = unit.iter().fold(0, |pages, at| pages | 1 << (at % UNIT_PAGES));
            self.used(unit[0] / UNIT_PAGES, pages, came.len() <= UNIT_PAGES);
        }
        self.streams.advance(thread as u32, stream, came[came.len() - 1] + 1, order, 0);
    }

    /// The pages of a window that come in: all that are out, or those around `page` that were never touched.
    fn window(&self, page: usize, window: Range<usize>, state: Page) -> Vec<usize> {
        let same = |at: &usize| self.pages[*at] == state;
        if state == Page::Out {
            return window.filter(same).collect();
        }
        let from = (window.start..page).rev().take_while(same).last().unwrap_or(page);
        (from..window.end).take_while(same).collect()
    }

    /// `Engine::order_of_swapped`.
    fn order(&mut self, page: usize, thread: u32, stream: Option<Stream>) -> u8 {
        let (unit, last) = (page / UNIT_PAGES, stream.map(|stream| stream.order));
        let asked = Asked { thread, unit, at: page % UNIT_PAGES, out: self.pages_of(unit, Page::Out), last };
        self.orders.choose(&mut self.usages[unit], asked)
    }

    /// `Engine::learn`.
    fn learn(&mut self, unit: usize) {
        let out = std::mem::take(&mut self.usages[unit].sampled);
        let used = self.pages_of(unit, Page::Resident) & out;
        self.orders.learn(
            self.usages[unit].sampled_as,
            used,
            out,
            REQUEST_NS,
            self.resident as u64,
            self.out as u64,
        );
    }

    fn make_room(&mut self, pages: usize, order: u8) {
        let streams = order > UNIT_ORDER;
        let room = pages.max(ROOM);
        if self.frames - self.resident >= room {
            return;
        }
        let goal = self.resident - if streams { room.max(ROUND) } else { room }.min(self.resident);
        while self.resident > goal {
            let candidate = self.policy.candidate().expect("something to evict");
            self.looks += 1;
            let unit = candidate.unit() as usize;
            let resident = self.pages_of(unit, Page::Resident);
            let leave = self.policy.judge(candidate, &self.usages[unit], resident);
            if leave != 0 {
                self.learn(unit);
                self.evict(unit, leave);
            }
        }
    }

    fn evict(&mut self, unit: usize, leave: u16) {
        for at in (0..UNIT_PAGES).filter(|at| leave & 1 << at != 0) {
            self.pages[unit * UNIT_PAGES + at] = Page::Out;
        }
        self.resident -= leave.count_ones() as usize;
        self.out += leave.count_ones() as usize;
        let usage = &mut self.usages[unit];
        (usage.left, usage.evicted_at) = (leave, self.evictions);
        self.evictions += 1;
        if self.pages_of(unit, Page::Resident) == 0 {
            self.usages[unit].queued = false;
        } else {
            self.policy.keep(Turn::new(unit as u32, false));
        }
    }
}
