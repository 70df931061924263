//! What the tests of the API share: a small swap, and contents that are checked.
// Each test binary uses its part of it.
#![allow(dead_code)]

use pageout::{Builder, Bytes, Error, Swap};

pub const LIMIT: Bytes = Bytes::mib(16);
/// Frames in flight and faults that found no frame.
pub const SLACK: u64 = 16 << 20;
pub const MIB: usize = 1 << 20;

/// A swap of [`LIMIT`] on a device, or `None` with the reason where the kernel does not allow it.
pub fn swap_on(device: &str, asked: impl FnOnce(Builder) -> Builder) -> Option<Swap> {
    match asked(Swap::builder().memory(LIMIT).device(device)).build() {
        Ok(swap) => Some(swap),
        Err(Error::Kernel(reason)) => {
            println!("skipped: {reason}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

pub fn mixed(n: usize) -> u64 {
    (n as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// Writes two words of each page; the engine moves and sums whole pages whatever they hold.
pub fn fill(words: &mut [u64], seed: usize) {
    for (n, page) in words.chunks_mut(512).enumerate() {
        page[0] = mixed(seed + n);
        page[page.len() - 1] = mixed(seed + n) ^ 1;
    }
}

pub fn verify(words: &[u64], seed: usize) {
    for (n, page) in words.chunks(512).enumerate() {
        assert_eq!(page[0], mixed(seed + n), "page {n}");
        assert_eq!(page[page.len() - 1], mixed(seed + n) ^ 1, "page {n}");
    }
}
