//! `pageout-bench frag`: the shape of the kernel's `thp_swap_allocator_test`. 60 MiB in pieces of 64 KiB
//! and 4 MiB in single pages fill a device of 64 MiB; in each round some of both are dropped at random and
//! written again. Shown is how many pieces are refused their order and go out in single pages.

use std::fmt::Write as _;

use anyhow::Result;
use clap::Args;
use pageout::slot::*;

use crate::dist::Rng;

const ORDER: u8 = 4;
const RUN: usize = 1 << ORDER;
const DEVICE_SLOTS: usize = (64 << 20) / SLOT_BYTES as usize;
const PIECES: usize = (60 << 20) / SLOT_BYTES as usize / RUN;
const SINGLES: usize = (4 << 20) / SLOT_BYTES as usize;

#[derive(Args)]
pub struct FragArgs {
    /// How many rounds
    #[arg(long, default_value_t = 100)]
    pub rounds: usize,
}

/// Where runs and single pages come from.
trait Places {
    fn alloc(&mut self, order: u8) -> Option<usize>;
    fn free(&mut self, slot: usize, n: usize);
}

/// Prints the table.
pub fn run(args: &FragArgs) -> Result<()> {
    print!("{}", text(&measure(args)));
    Ok(())
}

/// Per round the percentages of pieces refused by the design of 2023, and by pageout.
pub fn measure(args: &FragArgs) -> Vec<(f64, f64)> {
    let old = refused(&mut OnlyFree::new(), args.rounds);
    let new = refused(&mut Shipped::new(), args.rounds);
    old.into_iter().zip(new).collect()
}

/// The table.
pub fn text(rows: &[(f64, f64)]) -> String {
    let mut text =
        format!("pieces of 64K refused, %\n{:>6} {:>12} {:>8}\n", "round", "2023 design", "pageout");
    let step = (rows.len() / 10).max(1);
    for (round, (old, new)) in rows.iter().enumerate().filter(|(round, _)| *round < 5 || round % step == 0) {
        let _ = writeln!(text, "{round:>6} {old:>12.1} {new:>8.1}");
    }
    text
}

/// Per round the share of pieces that were refused.
fn refused(places: &mut impl Places, rounds: usize) -> Vec<f64> {
    let mut random = Rng::new(1);
    // A piece lies in one run, or in single pages.
    let mut pieces: Vec<Vec<(usize, usize)>> = vec![Vec::new(); PIECES];
    let mut singles: Vec<Option<usize>> = vec![None; SINGLES];
    (0..=rounds)
        .map(|round| {
            if round > 0 {
                for _ in 0..PIECES * 16 / 60 {
                    for (slot, n) in pieces[random.below(PIECES as u64) as usize].drain(..) {
                        places.free(slot, n);
                    }
                }
                for _ in 0..SINGLES / 4 {
                    if let Some(slot) = singles[random.below(SINGLES as u64) as usize].take() {
                        places.free(slot, 1);
                    }
                }
            }
            let (mut written, mut refused) = (0, 0);
            for piece in pieces.iter_mut().filter(|piece| piece.is_empty()) {
                written += 1;
                match places.alloc(ORDER) {
                    Some(slot) => piece.push((slot, RUN)),
                    None => {
                        refused += 1;
                        piece.extend((0..RUN).filter_map(|_| places.alloc(0)).map(|slot| (slot, 1)));
                    }
                }
            }
            for single in singles.iter_mut().filter(|single| single.is_none()) {
                *single = places.alloc(0);
            }
            100.0 * refused as f64 / (written as f64).max(1.0)
        })
        .collect()
}

/// The design of 2023: a current cluster per order; when it is used up a free one, or none.
struct OnlyFree {
    used: Vec<bool>,
    in_cluster: Vec<usize>,
    /// The next slot of the current cluster, per order that is used here.
    next: [Option<usize>; 2],
}

impl OnlyFree {
    fn new() -> Self {
        let clusters = DEVICE_SLOTS / CLUSTER_SLOTS;
        Self { used: vec![false; DEVICE_SLOTS], in_cluster: vec![0; clusters], next: [None; 2] }
    }
}

impl Places for OnlyFree {
    fn alloc(&mut self, order: u8) -> Option<usize> {
        let (n, current) = (1 << order, usize::from(order != 0));
        let ahead = self.next[current].and_then(|next| {
            let end = next.next_multiple_of(CLUSTER_SLOTS);
            (next..end).step_by(n).find(|&slot| self.used[slot..slot + n].iter().all(|used| !used))
        });
        let free = || self.in_cluster.iter().position(|&n| n == 0).map(|cluster| cluster * CLUSTER_SLOTS);
        let any = || self.used.iter().position(|used| !used).filter(|_| order == 0);
        let slot = ahead.or_else(free).or_else(any)?;
        self.used[slot..slot + n].fill(true);
        self.in_cluster[slot / CLUSTER_SLOTS] += n;
        self.next[current] = Some(slot + n).filter(|next| next % CLUSTER_SLOTS != 0);
        Some(slot)
    }

    fn free(&mut self, slot: usize, n: usize) {
        self.used[slot..slot + n].fill(false);
        self.in_cluster[slot / CLUSTER_SLOTS] -= n;
    }
}

/// What pageout does.
struct Shipped {
    slots: Slots,
    device: DeviceId,
}

impl Shipped {
    fn new() -> Self {
        let slots = Slots::new(1);
        let size = DEVICE_SLOTS as u64;
        let config = DeviceConfig::new(size);
        let device = slots.swapon(config).expect("a first device");
        Self { slots, device }
    }
}

impl Places for Shipped {
    fn alloc(&mut self, order: u8) -> Option<usize> {
        self.slots.alloc(0, order, Owner { space: 0, page: 0 }).map(|entry| entry.slot() as usize)
    }

    fn free(&mut self, slot: usize, n: usize) {
        self.slots.put(Entry::new(self.device, slot as u64), n).expect("slots in use");
    }
}
