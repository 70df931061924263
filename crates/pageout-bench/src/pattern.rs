//! What every word of the benched memory holds: a function of its index, the round and the seed.
//!
//! Word `i` holds `key + (i & mask) * step`: one addition a word to write or to check, so that what is
//! measured is memory. All eight bytes of neighbouring words differ and no four bytes repeat within a
//! page, so that LZ4 finds nothing; a mask that clears low bits repeats words and makes it
//! compressible. A page found in the wrong place, or as it was a round before, differs in every word.

use anyhow::{bail, Result};

use crate::mem::{look, touch};
use crate::units::PAGE;

/// Words in a page.
pub const WORDS: usize = PAGE / 8;
const ODD: u64 = 0x9e37_79b9_7f4a_7c15;

/// The contents of one round. Copy it freely.
#[derive(Clone, Copy, Debug)]
pub struct Pattern {
    key: u64,
    mask: u64,
    step: u64,
}

/// A well mixed function of `x`.
pub fn mix(x: u64) -> u64 {
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

impl Pattern {
    /// Contents for `round` under `seed`, each word repeated `repeat` times (a power of two; 1 is
    /// incompressible, 4 shrinks to about a quarter under LZ4).
    pub fn new(seed: u64, round: u64, repeat: u64) -> Pattern {
        assert!(repeat.is_power_of_two(), "repeats are powers of two");
        Pattern { key: mix(seed.wrapping_add(round.wrapping_mul(ODD)) ^ ODD), mask: !(repeat - 1), step: ODD }
    }

    /// The same with words that count up by one, as those of vm-scalability's usemem do.
    pub fn counting(self) -> Pattern {
        Pattern { step: 1, ..self }
    }

    /// What word `index` holds.
    #[inline(always)]
    pub fn word(self, index: u64) -> u64 {
        self.key.wrapping_add((index & self.mask).wrapping_mul(self.step))
    }

    /// Writes every word ascending; `first` is the index of `words[0]`, and `words` whole pages.
    ///
    /// Where `before` is given the last word of each page is checked against it after the page's first
    /// word was written: the page comes in by a write, as it would without the check.
    pub fn write(self, words: &mut [u64], first: u64, before: Option<Pattern>) -> Result<()> {
        for (page, words) in words.chunks_exact_mut(WORDS).enumerate() {
            let index = first + (page * WORDS) as u64;
            touch(&mut words[0], self.word(index));
            if let Some(before) = before {
                let last = index + WORDS as u64 - 1;
                expect(look(&words[WORDS - 1]), before.word(last), last)?;
            }
            for (word, offset) in words[1..].iter_mut().zip(1..) {
                *word = self.word(index + offset);
            }
        }
        Ok(())
    }

    /// Checks every word ascending; `first` is the index of `words[0]`.
    pub fn verify(self, words: &[u64], first: u64) -> Result<()> {
        for (page, words) in words.chunks(WORDS).enumerate() {
            let index = first + (page * WORDS) as u64;
            let wrong = words.iter().zip(index..).fold(0, |wrong, (word, i)| wrong | (word ^ self.word(i)));
            if wrong != 0 {
                for (word, i) in words.iter().zip(index..) {
                    expect(*word, self.word(i), i)?;
                }
                bail!("data error in the page of word {index}: it was wrong and then was not");
            }
        }
        Ok(())
    }
}

/// An error that names place and values unless `found` is `wanted`.
#[inline(always)]
pub fn expect(found: u64, wanted: u64, index: u64) -> Result<()> {
    if found != wanted {
        bail!(
            "data error in page {}, word {}: found {found:#018x}, wrote {wanted:#018x}",
            index as usize / WORDS,
            index as usize % WORDS
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_written_verifies_and_nothing_else_does() {
        let mut words = vec![0; 8 * WORDS];
        let (one, two) = (Pattern::new(7, 1, 1), Pattern::new(7, 2, 4));
        one.write(&mut words, 512, None).unwrap();
        one.verify(&words, 512).unwrap();
        assert!(one.verify(&words, 1024).is_err() && two.verify(&words, 512).is_err());
        two.write(&mut words, 512, Some(one)).unwrap();
        let counting = one.counting();
        counting.write(&mut words, 512, Some(two)).unwrap();
        assert!(words.windows(2).all(|pair| pair[1] == pair[0].wrapping_add(1)));
        two.write(&mut words, 512, Some(counting)).unwrap();
        assert!(two.write(&mut words, 512, Some(one)).is_err(), "the check on the way sees a stale round");
        words[700] ^= 1 << 40;
        let error = two.verify(&words, 512).unwrap_err().to_string();
        assert!(error.contains("page 2, word 188"), "{error}");
    }
}
