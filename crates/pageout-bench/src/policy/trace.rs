//! Traces of accesses to pages: made by rule, or recorded from programs.

use std::collections::HashSet;

use anyhow::Result;

use super::record;
use crate::dist::{Rng, Sampler, Spread};

/// One access: a page, by which of two threads, and whether it counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access(u32);

const COUNTS: u32 = 1 << 31;
const SECOND: u32 = 1 << 30;

impl Access {
    pub fn new(page: usize) -> Access {
        Access(page as u32)
    }

    fn second(self) -> Access {
        Access(self.0 | SECOND)
    }

    pub fn counted(self) -> Access {
        Access(self.0 | COUNTS)
    }

    pub fn page(self) -> usize {
        (self.0 & !(COUNTS | SECOND)) as usize
    }

    pub fn thread(self) -> usize {
        usize::from(self.0 & SECOND != 0)
    }

    /// Is it part of the hit ratio?
    pub fn counts(self) -> bool {
        self.0 & COUNTS != 0
    }
}

/// A trace and the memory that it is to run in.
pub struct Trace {
    pub name: String,
    pub frames: usize,
    pub accesses: Vec<Access>,
}

impl Trace {
    /// One more than the highest page.
    pub fn pages(&self) -> usize {
        self.accesses.iter().map(|access| access.page() + 1).max().unwrap_or(0)
    }
}

const RECORDED: [(&str, &[u8]); 2] = [
    ("python", include_bytes!("../../traces/python.trace")),
    ("sort", include_bytes!("../../traces/sort.trace")),
];

/// Those made by rule, for a memory of so many frames.
pub fn made(frames: usize) -> Vec<Trace> {
    let trace = |name: &str, accesses| Trace { name: name.into(), frames, accesses };
    vec![
        trace("zipf", random(frames * 4, Spread::Zipf(0.99))),
        trace("uniform", random(frames * 2, Spread::Uniform)),
        trace("hotscan", hotscan(frames)),
        trace("loop", (0..6).flat_map(|_| ordered(0, frames * 3 / 2)).collect()),
        trace("phases", phases(frames)),
        trace("columns", columns(frames)),
    ]
}

/// Those recorded from programs, each in a half and in a quarter of the pages that it touches.
pub fn recorded() -> Result<Vec<Trace>> {
    let mut traces = Vec::new();
    for (name, bytes) in RECORDED {
        let accesses = record::decode(bytes)?;
        let touched: HashSet<usize> = accesses.iter().map(|access| access.page()).collect();
        for part in [2, 4] {
            let frames = touched.len() / part;
            traces.push(Trace { name: format!("{name} 1/{part}"), frames, accesses: accesses.clone() });
        }
    }
    Ok(traces)
}

fn ordered(from: usize, pages: usize) -> impl Iterator<Item = Access> {
    (from..from + pages).map(|page| Access::new(page).counted())
}

fn uncounted(access: Access) -> Access {
    Access(access.0 & !COUNTS)
}

/// Filled in order, then 16 accesses for each page, the first half of them to warm up.
fn random(pages: usize, spread: Spread) -> Vec<Access> {
    let (sampler, mut rng) = (Sampler::new(spread, pages as u64), Rng::new(1));
    let draws = (0..pages * 16).map(|n| {
        let access = Access::new(sampler.draw(&mut rng) as usize);
        if n < pages * 8 {
            access
        } else {
            access.counted()
        }
    });
    ordered(0, pages).map(uncounted).chain(draws).collect()
}

/// Four times the memory filled, then a half beside it, which is used at random; then a second thread reads the first
/// once, and accesses to the half count.
fn hotscan(frames: usize) -> Vec<Access> {
    let (cold, hot) = (frames * 4, frames / 2);
    let mut rng = Rng::new(1);
    let mut draw = || Access::new(cold + rng.below(hot as u64) as usize).second();
    let mut accesses: Vec<Access> = ordered(0, cold + hot).map(uncounted).collect();
    accesses.extend((0..hot * 64).map(|_| draw()));
    for page in 0..cold {
        accesses.push(Access::new(page));
        accesses.extend((0..16).map(|_| draw().counted()));
    }
    accesses
}

/// A matrix with eight pages a row, three and a half times the memory, filled, and read in order twice; then two threads go down
/// columns of it, 64 in a page, each a half. The pages of two columns fit.
fn columns(frames: usize) -> Vec<Access> {
    const ROW: usize = 8;
    let rows = frames * 7 / 16;
    let scans = (0..3).flat_map(|_| ordered(0, rows * ROW).map(uncounted));
    let columns = (0..ROW / 2 * 64).flat_map(|column| {
        let page = move |row: usize| row * ROW + column / 64;
        let both = move |row| [Access::new(page(row)), Access::new(page(row) + ROW / 2).second()];
        (0..rows).flat_map(both).map(Access::counted)
    });
    scans.chain(columns).collect()
}

/// The memory filled, then half as much beside it read in order, again and again: the first is not used any more.
fn phases(frames: usize) -> Vec<Access> {
    let second = (0..16).flat_map(|_| ordered(frames, frames / 2));
    ordered(0, frames).map(uncounted).chain(second).collect()
}
