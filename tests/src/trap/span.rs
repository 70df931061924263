//! Memory with a known content.
//!
//! Every word of a filled span tells its own address and the generation it was written in, mixed so
//! that it does not compress. The mixing can be undone: a wrong word says whose data it is, which is
//! the first thing one wants to know ("zeros", "the page of another address", "an older generation").
//!
//! The functions here take addresses as numbers and are safe to call only on memory that the trap
//! itself mapped; a trap that breaks this dies of SIGSEGV, which is a failure of the test as well.
//! All accesses are volatile: other threads, the kernel and the engine change this memory.

use super::{Outcome, Stop};

/// Bytes in a page.
pub const PAGE: usize = 4096;
/// Bytes in a huge page.
pub const BLOCK: usize = 2 << 20;
const WORD: usize = 8;
const ADDRESS_BITS: u32 = 48;

/// A range of addresses; both ends are multiples of a page unless a trap says otherwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// First address.
    pub start: usize,
    /// Length in bytes.
    pub len: usize,
}

impl Span {
    pub fn new(start: usize, len: usize) -> Self {
        Self { start, len }
    }

    pub fn end(self) -> usize {
        self.start + self.len
    }

    pub fn pages(self) -> usize {
        self.len / PAGE
    }

    /// The `len` bytes from `offset`, which must lie inside.
    pub fn part(self, offset: usize, len: usize) -> Span {
        assert!(offset + len <= self.len, "a part beyond the end of its span");
        Span::new(self.start + offset, len)
    }

    pub fn page(self, index: usize) -> Span {
        self.part(index * PAGE, PAGE)
    }

    /// Whole pieces of `len` bytes; a shorter rest is left out.
    pub fn pieces(self, len: usize) -> impl DoubleEndedIterator<Item = Span> + Clone {
        (0..self.len / len).map(move |i| self.part(i * len, len))
    }

    pub fn halves(self) -> (Span, Span) {
        let middle = self.len / 2 / PAGE * PAGE;
        (self.part(0, middle), self.part(middle, self.len - middle))
    }

    /// Writes the words of `generation`.
    pub fn fill(self, generation: u16) {
        self.fill_as(self.start, generation);
    }

    /// Writes the words that a span at `origin` would have: for memory that will move.
    pub fn fill_as(self, origin: usize, generation: u16) {
        let mut offset = 0;
        while offset < self.len {
            store(self.start + offset, pattern(origin + offset, generation));
            offset += WORD;
        }
    }

    /// Every word must be of `generation`.
    pub fn check(self, generation: u16) -> Outcome {
        self.check_as(self.start, generation)
    }

    /// Every word must be what [`Span::fill_as`] wrote with the same arguments.
    pub fn check_as(self, origin: usize, generation: u16) -> Outcome {
        self.check_words(
            |offset, found| found == pattern(origin + offset, generation),
            || format!("generation {generation} of {origin:#x}"),
        )
    }

    pub fn check_zero(self) -> Outcome {
        self.check_words(|_, found| found == 0, || "zeros".into())
    }

    /// Every word must be zero or of `generation`, as after `MADV_FREE`.
    pub fn check_zero_or(self, generation: u16) -> Outcome {
        self.check_words(
            |offset, found| found == 0 || found == pattern(self.start + offset, generation),
            || format!("zeros or generation {generation}"),
        )
    }

    /// Every word must be its address's own, of a generation among `generations`.
    pub fn check_among(self, generations: std::ops::RangeInclusive<u16>) -> Outcome {
        self.check_words(
            |offset, found| {
                decode(found).is_some_and(|(a, g)| a == self.start + offset && generations.contains(&g))
            },
            || format!("one of the generations {generations:?}"),
        )
    }

    fn check_words(self, right: impl Fn(usize, u64) -> bool, wanted: impl Fn() -> String) -> Outcome {
        let mut offset = 0;
        while offset < self.len {
            let found = load(self.start + offset);
            if !right(offset, found) {
                return Err(self.report(offset, found, right, wanted()));
            }
            offset += WORD;
        }
        Ok(())
    }

    #[cold]
    fn report(self, offset: usize, found: u64, right: impl Fn(usize, u64) -> bool, wanted: String) -> Stop {
        let address = self.start + offset;
        let again = load(address);
        let wrong_in_page = (offset / PAGE * PAGE..(offset / PAGE * PAGE + PAGE).min(self.len))
            .step_by(WORD)
            .filter(|&o| !right(o, load(self.start + o)))
            .count();
        let later = if again == found { "the same".into() } else { describe(again) };
        Stop::Wrong(format!(
            "at {address:#x} (page {} of {} from {:#x}): expected {wanted}, found {} ({found:#018x}); \
             read again: {later}; wrong words in this page: {wrong_in_page}",
            offset / PAGE,
            self.len.div_ceil(PAGE),
            self.start,
            describe(found),
        ))
    }

    /// A sum that any changed word changes: for content that no pattern made.
    pub fn digest(self) -> u64 {
        (0..self.len)
            .step_by(WORD)
            .fold(0, |sum: u64, o| sum.rotate_left(5).wrapping_add(mix(load(self.start + o))))
    }

    pub fn as_ptr<T>(self) -> *mut T {
        self.start as *mut T
    }
}

/// The word that belongs at `address` in `generation`; never zero for mapped addresses.
#[inline(always)]
pub fn pattern(address: usize, generation: u16) -> u64 {
    mix(address as u64 | (u64::from(generation) << ADDRESS_BITS))
}

/// Whose word this is: address and generation, when it looks like a pattern at all.
pub fn decode(word: u64) -> Option<(usize, u16)> {
    let plain = unmix(word);
    let address = (plain & ((1 << ADDRESS_BITS) - 1)) as usize;
    let generation = (plain >> ADDRESS_BITS) as u16;
    let plausible = address % WORD == 0 && (1 << 16..1 << 47).contains(&address);
    plausible.then_some((address, generation))
}

/// The words of a span at `origin` as bytes, for files and pipes.
pub fn bytes_of(origin: usize, len: usize, generation: u16) -> Vec<u8> {
    (0..len).step_by(WORD).flat_map(|o| pattern(origin + o, generation).to_ne_bytes()).collect()
}

fn describe(word: u64) -> String {
    match (word, decode(word)) {
        (0, _) => "zero".into(),
        (_, Some((address, generation))) => format!("generation {generation} of {address:#x}"),
        _ => "no pattern".into(),
    }
}

#[inline(always)]
pub fn load(address: usize) -> u64 {
    // SAFETY: the trap mapped this memory and words are aligned (see the module comment).
    unsafe { std::ptr::read_volatile(address as *const u64) }
}

#[inline(always)]
pub fn store(address: usize, word: u64) {
    // SAFETY: the trap mapped this memory and words are aligned (see the module comment).
    unsafe { std::ptr::write_volatile(address as *mut u64, word) }
}

const MULTIPLIERS: [u64; 2] = [0xff51_afd7_ed55_8ccd, 0xc4ce_b9fe_1a85_ec53];
const INVERSES: [u64; 2] = [inverse(MULTIPLIERS[0]), inverse(MULTIPLIERS[1])];

/// A bijection on words in which every bit depends on every other; `mix(0)` is 0.
#[inline(always)]
fn mix(mut word: u64) -> u64 {
    word = (word ^ (word >> 33)).wrapping_mul(MULTIPLIERS[0]);
    word = (word ^ (word >> 33)).wrapping_mul(MULTIPLIERS[1]);
    word ^ (word >> 33)
}

#[inline(always)]
fn unmix(mut word: u64) -> u64 {
    // A shift by more than half of the bits is its own inverse.
    word = (word ^ (word >> 33)).wrapping_mul(INVERSES[1]);
    word = (word ^ (word >> 33)).wrapping_mul(INVERSES[0]);
    word ^ (word >> 33)
}

/// The inverse of an odd number modulo 2^64, by Newton's iteration: each step doubles the right bits.
const fn inverse(odd: u64) -> u64 {
    let mut x = odd;
    let mut step = 0;
    while step < 5 {
        x = x.wrapping_mul(2u64.wrapping_sub(odd.wrapping_mul(x)));
        step += 1;
    }
    x
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_tells_its_address_and_generation() {
        for address in [0x7fff_1234_5678usize, 0x5555_0000_0008, 1 << 16] {
            for generation in [0, 1, 77, u16::MAX] {
                assert_eq!(decode(pattern(address, generation)), Some((address, generation)));
            }
        }
        assert_eq!(mix(0), 0);
    }

    fn field() -> Span {
        let field = super::super::sys::map(4 * PAGE).unwrap();
        field.fill(3);
        field
    }

    fn why(outcome: Outcome) -> String {
        match outcome {
            Err(Stop::Wrong(why)) => why,
            other => panic!("a wrong word was not seen: {other:?}"),
        }
    }

    #[test]
    fn a_wrong_word_is_found_and_named() {
        let field = field();
        field.check(3).unwrap();
        field.check_zero_or(3).unwrap();
        field.check_among(2..=3).unwrap();
        assert!(why(field.check(4)).contains("generation 3"));
        assert!(why(field.check_among(4..=9)).contains("generation 3"));
        store(field.end() - 8, 0);
        assert!(why(field.check(3)).contains("found zero"));
        assert!(why(field.check_zero()).contains("page 0 of 4"));
        store(field.end() - 8, pattern(field.start, 3));
        assert!(why(field.check(3)).contains(&format!("generation 3 of {:#x}", field.start)));
        store(field.end() - 8, 12345);
        assert!(why(field.check_zero_or(3)).contains("wrong words in this page: 1"));
    }
}
