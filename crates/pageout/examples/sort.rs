//! Sorts an array that is four times as large as the memory it may take, and checks the result.
//!
//! ```text
//! cargo run --release -p pageout --example sort -- 64M
//! ```

use pageout::{Bytes, Swap};
use std::error::Error;
use std::sync::atomic::Ordering;
use std::time::Instant;

fn main() -> Result<(), Box<dyn Error>> {
    let memory: Bytes = std::env::args().nth(1).as_deref().unwrap_or("64M").parse()?;
    let swap = Swap::builder().memory(memory).build()?;
    let mut region = swap.map(4 * memory.0 as usize)?;
    let array = region.as_mut_slice::<u64>();

    // Numbers in an order that says nothing, and what does not depend on their order.
    let (mut number, mut sum) = (1u64, 0u64);
    for slot in array.iter_mut() {
        number = number.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        *slot = number;
        sum = sum.wrapping_add(number);
    }

    let started = Instant::now();
    array.sort_unstable();
    let took = started.elapsed();

    assert!(array.is_sorted());
    assert_eq!(array.iter().fold(0, |sum: u64, number| sum.wrapping_add(*number)), sum);
    let stats = swap.stats();
    println!(
        "sorted {} in {memory}: {:.1} s, peak {}, {} out, {} in",
        Bytes(region.len() as u64),
        took.as_secs_f64(),
        Bytes(stats.resident_peak_bytes.load(Ordering::Relaxed)),
        Bytes(stats.pswpout.load(Ordering::Relaxed) * 4096),
        Bytes(stats.pswpin.load(Ordering::Relaxed) * 4096),
    );
    Ok(())
}
