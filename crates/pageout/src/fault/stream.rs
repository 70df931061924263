//! Streams: threads that go through memory in order, each through several places in turn.
//!
//! A fault *continues* a stream if it lies in the window right behind, or right before, the last one that the stream brought
//! in: of the same size and aligned as it. So the order within a window does not matter, nor the direction: Python's collector
//! goes through the pools of an arena as they were filled, and through the arenas downwards. A walk through a table of pointers
//! to what lies in order elsewhere is two streams, a merge one for each input.
//!
//! Each thread has eight words. A fault that continues none begins one, in the place of another: one that brings in
//! a lot is passed over as often as its order is above a unit's, and brings in less from then on. Words are hints: any number of
//! servers may write them.

use crate::space::{BLOCK_PAGES, UNIT_PAGES};
use crate::sync::atomic::Ordering::Relaxed;
use crate::sync::atomic::{AtomicU64, AtomicUsize};

/// Threads that are told apart; the others share.
pub const THREADS: usize = 16;
/// Streams of a thread.
const EACH: usize = 8;
/// The order of a unit: the largest but for streams.
pub const UNIT_ORDER: u8 = UNIT_PAGES.ilog2() as u8;
/// Pages that are there already and do not end a stream.
const MOST_SKIPPED: usize = 64 * BLOCK_PAGES;

/// A window reaches over no more than so much of what is out (1 of this), forwards and backwards: faults at random must miss all
/// of a thread's windows clearly more often than not, or what was a stream once would bring in much for ever.
const REACH: usize = 8 * EACH;

/// In one word: the last window's order (8 bits), the pages that came in there, or behind it, beside the one asked for (12), and
/// the page behind it. 0: none.
const AHEAD_SHIFT: u32 = 8;
const PAGE_SHIFT: u32 = 20;
const AHEAD: u64 = (1 << PAGE_SHIFT) - (1 << AHEAD_SHIFT);

/// Where what is known of a thread is.
pub fn place(thread: u32) -> usize {
    thread as usize % THREADS
}

fn order_of(word: u64) -> u8 {
    word as u8
}

/// The streams of all threads.
pub struct Streams {
    words: [[AtomicU64; EACH]; THREADS],
    /// Where the next stream of a thread begins.
    hands: [AtomicUsize; THREADS],
}

/// The stream that a fault continues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stream {
    at: usize,
    /// Of its last window.
    pub order: u8,
    /// The fault is on the page behind that, or on the first that is not there; not only near it.
    pub is_next: bool,
    /// The block, by its number, that this fault leaves behind.
    pub left: Option<usize>,
}

impl Streams {
    /// None.
    pub fn new() -> Self {
        Self {
            words: core::array::from_fn(|_| core::array::from_fn(|_| AtomicU64::new(0))),
            hands: core::array::from_fn(|_| AtomicUsize::new(0)),
        }
    }

    /// The stream that a fault on `page` continues; of several the one that brings in most. `out`: pages that are out in all.
    /// `are_there`: is every page of a range mapped?
    pub fn find(
        &self,
        thread: u32,
        page: usize,
        out: usize,
        are_there: impl Fn(usize, usize) -> bool,
    ) -> Option<Stream> {
        let near = (out / REACH).max(1);
        let words = self.words(thread).iter().enumerate();
        let found = words.filter_map(|(at, word)| continued(word.load(Relaxed), at, page, near, &are_there));
        found.max_by_key(|stream| stream.order)
    }

    /// Whoever comes out of a window went through it: the pages that it brought in beside the one asked for; once.
    pub fn take_ahead(&self, thread: u32, stream: Stream) -> u64 {
        (self.words(thread)[stream.at].fetch_and(!AHEAD, Relaxed) & AHEAD) >> AHEAD_SHIFT
    }

    /// A fault has brought in a window up to page `end`, `ahead` pages beside the one asked for. It continued `stream`, or
    /// begins one.
    pub fn advance(&self, thread: u32, stream: Option<Stream>, end: usize, order: u8, ahead: u16) {
        let at = stream.map_or_else(|| self.victim(thread), |stream| stream.at);
        let word = (end as u64) << PAGE_SHIFT | (ahead as u64) << AHEAD_SHIFT | order as u64;
        self.words(thread)[at].store(word, Relaxed);
    }

    /// So many pages behind the window of a stream came in before they were asked for.
    pub fn went_ahead(&self, thread: u32, stream: Stream, pages: u16) {
        self.words(thread)[stream.at].fetch_add(u64::from(pages) << AHEAD_SHIFT, Relaxed);
    }

    /// Does a thread go through more than a unit at a time somewhere?
    pub fn is_streaming(&self, thread: u32) -> bool {
        self.words(thread).iter().any(|word| order_of(word.load(Relaxed)) > UNIT_ORDER)
    }

    /// The place for a new stream: the oldest's, but for those that bring in a lot.
    fn victim(&self, thread: u32) -> usize {
        let words = self.words(thread);
        let hand = &self.hands[place(thread)];
        for _ in 0..EACH {
            let at = hand.fetch_add(1, Relaxed) % EACH;
            let word = words[at].load(Relaxed);
            if order_of(word) <= UNIT_ORDER {
                return at;
            }
            words[at].store(word - 1, Relaxed);
        }
        hand.fetch_add(1, Relaxed) % EACH
    }

    fn words(&self, thread: u32) -> &[AtomicU64; EACH] {
        &self.words[place(thread)]
    }
}

impl Default for Streams {
    fn default() -> Self {
        Self::new()
    }
}

fn continued(
    word: u64,
    at: usize,
    page: usize,
    near: usize,
    are_there: impl Fn(usize, usize) -> bool,
) -> Option<Stream> {
    if word == 0 {
        return None;
    }
    let (order, end) = (order_of(word), (word >> PAGE_SHIFT) as usize);
    let size = 1 << order;
    let near = size.min(near);
    let first = (end - 1) & !(size - 1);
    let skipped = page.wrapping_sub(end);
    let is_next = skipped == 0 || order > UNIT_ORDER && skipped <= MOST_SKIPPED && are_there(end, page);
    let is_before = first.wrapping_sub(page + 1) < near;
    let block = page / BLOCK_PAGES;
    let left = if is_before { block + 1 } else { block.wrapping_sub(1) };
    let is_left = order > UNIT_ORDER && block != if is_before { first } else { end - 1 } / BLOCK_PAGES;
    (is_next || skipped < near || is_before).then_some(Stream {
        at,
        order,
        is_next,
        left: is_left.then_some(left),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const HERE: usize = 0x10_0000;
    const MANY: usize = 1 << 20;

    /// Orders of the windows for faults on pages, each of a stream one larger than the last, from 2 on.
    fn orders(streams: &Streams, pages: impl IntoIterator<Item = usize>) -> std::vec::Vec<u8> {
        let fault = |page| {
            let stream = streams.find(1, page, MANY, |_, _| false);
            let order = stream.map_or(2, |stream| (stream.order + 1).min(9));
            streams.advance(1, stream, (page | ((1 << order) - 1)) + 1, order, 0);
            order
        };
        pages.into_iter().map(fault).collect()
    }

    #[test]
    fn what_goes_on_behind_a_window_or_before_it_doubles() {
        assert_eq!(orders(&Streams::new(), [0, 4, 8, 16, 32].map(|page| HERE + page)), [2, 3, 4, 5, 6]);
        // Downwards.
        assert_eq!(orders(&Streams::new(), [64, 63, 55, 47, 31].map(|page| HERE + page)), [2, 3, 4, 5, 6]);
        // Not the first page of the next window.
        assert_eq!(orders(&Streams::new(), [1, 6, 11, 30].map(|page| HERE + page)), [2, 3, 4, 5]);
        assert_eq!(orders(&Streams::new(), [0, 8, 20, 70].map(|page| HERE + page)), [2, 2, 2, 2]);
    }

    #[test]
    fn streams_beside_each_other_are_told_apart() {
        let at = |stream: usize, page: usize| HERE + stream * 0x1_0000 + page;
        let pages = [0, 4, 8, 16, 32].into_iter().flat_map(|page| (0..4).map(move |stream| at(stream, page)));
        assert_eq!(orders(&Streams::new(), pages)[16..], [6, 6, 6, 6]);
    }

    #[test]
    fn faults_at_random_end_a_stream_and_not_at_once() {
        let streams = Streams::new();
        orders(&streams, [0, 4, 8, 16, 32, 64, 128, 256].map(|page| HERE + page));
        let far = |n: usize| HERE + (n + 1) * 0x1000;
        orders(&streams, (0..EACH).map(far));
        assert!(streams.is_streaming(1) && !streams.is_streaming(2));
        assert!(streams.find(1, HERE + 512, MANY, |_, _| false).is_some());
        orders(&streams, (EACH..6 * EACH).map(far));
        assert!(!streams.is_streaming(1));
        assert_eq!(streams.find(1, HERE + 512, MANY, |_, _| false), None);
    }

    #[test]
    fn a_fault_says_which_block_it_leaves_and_whether_it_is_the_next() {
        let streams = Streams::new();
        let found =
            |page| streams.find(1, page, MANY, |_, _| false).map(|stream| (stream.is_next, stream.left));
        let block = HERE / BLOCK_PAGES;
        streams.advance(1, None, HERE + 512, 9, 511);
        assert_eq!(found(HERE + 512), Some((true, Some(block))));
        assert_eq!(found(HERE + 700), Some((false, Some(block))));
        assert_eq!(found(HERE - 1), Some((false, Some(block))));
        assert_eq!(found(HERE + 100), None);
        // What is there is passed over, but not for ever.
        assert_eq!(streams.find(1, HERE + 5000, MANY, |_, _| true).map(|stream| stream.is_next), Some(true));
        assert_eq!(streams.find(1, HERE + 512 + MOST_SKIPPED + 1, MANY, |_, _| true), None);
        let stream = streams.find(1, HERE + 512, MANY, |_, _| false).unwrap();
        assert_eq!((streams.take_ahead(1, stream), streams.take_ahead(1, stream)), (511, 0));
        assert_eq!(streams.find(2, HERE + 512, MANY, |_, _| true), None, "another thread's");
    }

    #[test]
    fn a_stream_does_not_outlast_its_end_where_little_is_out() {
        let streams = Streams::new();
        for stream in 0..EACH {
            orders(&streams, [0, 4, 8, 16, 32, 64, 128, 256].map(|page| HERE + stream * 512 + page));
        }
        // At random in the same 4096 pages.
        let mut random = 1u64;
        let mut large = 0;
        for _ in 0..1000 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let page = HERE + (random >> 33) as usize % 4096;
            let stream = streams.find(1, page, 4096, |_, _| false);
            let order = stream.map_or(0, |stream| (stream.order + 1).min(9));
            streams.advance(1, stream, (page | ((1 << order) - 1)) + 1, order, 0);
            large += (order > UNIT_ORDER) as usize;
        }
        assert!(large < 60 && !streams.is_streaming(1), "{large} of 1000");
    }
}
