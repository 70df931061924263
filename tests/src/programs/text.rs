//! Filters over large text: `sort`, `xz`, `awk`.

use super::{script, Invocation, Program, Size, MIB};
use anyhow::Result;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

pub(super) fn programs(size: Size) -> Vec<Program> {
    let sort_bytes = size.pick(12, 1024) * MIB;
    let xz_kib = size.pick(512, 64 << 10);
    let xz_block = xz_kib / 2;
    let records = size.pick(150_000, 6_000_000);
    vec![
        sort("sort", sort_bytes),
        Program::new("xz", move |input| {
            Invocation::new("xz")
                .args("-T2 -9 --keep --stdout")
                .arg(format!("--block-size={xz_block}KiB"))
                .arg(input.join("words"))
        })
        .needs(&["xz"])
        .parallel()
        .input(move |dir| words(&dir.join("words"), xz_kib << 10)),
        Program::new("awk", move |_| {
            Invocation::new("awk")
                .arg("-v")
                .arg(format!("count={records}"))
                .arg("-f")
                .arg(script("arrays.awk"))
        })
        .needs(&["awk"]),
    ]
}

/// `sort` of `bytes` of lines, all in memory, by two threads.
pub(super) fn sort(name: &'static str, bytes: u64) -> Program {
    Program::new(name, move |input| {
        Invocation::new("sort")
            .args("--parallel=2 -S")
            .arg(format!("{}M", 4 * bytes / MIB))
            .args("-o sorted")
            .arg(input.join("lines"))
    })
    .needs(&["sort"])
    .parallel()
    .input(move |dir| lines(&dir.join("lines"), bytes))
    .outputs(&["sorted"])
}

/// A small generator of numbers that are the same on every run (xorshift64*).
pub(super) struct Numbers(u64);

impl Numbers {
    pub(super) fn new(seed: u64) -> Self {
        Numbers(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub(super) fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }
}

fn lines(path: &Path, bytes: u64) -> Result<()> {
    let mut numbers = Numbers::new(1);
    let mut out = BufWriter::with_capacity(1 << 20, File::create(path)?);
    let mut written = 0;
    while written < bytes {
        let (first, second) = (numbers.next(), numbers.next());
        let line = format!("{first:016x} line of text {:width$}\n", second, width = (second % 40) as usize);
        out.write_all(line.as_bytes())?;
        written += line.len() as u64;
    }
    Ok(out.flush()?)
}

fn words(path: &Path, bytes: u64) -> Result<()> {
    let mut numbers = Numbers::new(2);
    let vocabulary: Vec<String> = (0..20_000)
        .map(|_| {
            let length = 2 + numbers.next() % 8;
            (0..length).map(|_| (b'a' + (numbers.next() >> 32) as u8 % 16) as char).collect()
        })
        .collect();
    let mut out = BufWriter::with_capacity(1 << 20, File::create(path)?);
    let mut written = 0;
    while written < bytes {
        let word = &vocabulary[(numbers.next() >> 20) as usize % vocabulary.len()];
        out.write_all(word.as_bytes())?;
        out.write_all(b" ")?;
        written += word.len() as u64 + 1;
    }
    Ok(out.flush()?)
}
