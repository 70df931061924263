//! Traces of real programs: recorded by valgrind, kept in a file.
//!
//! `lackey` prints every read and write of the program (not its instructions, not what the kernel reads and writes for
//! it). An access to one of the last [`RECENT`] pages is left out: no memory of more pages than that misses there
//! under LRU, and few do under others. So a trace stays small, and its hit ratios are those of the accesses that are left.
//! Blocks of 2 MiB are numbered anew, in their order; what is beside what within a block stays.
//!
//! A file is [`MAGIC`], then for each access the difference to the page before: zigzag, 7 bits a byte, low first.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{bail, ensure, Context, Result};

use super::trace::Access;

const MAGIC: &[u8] = b"pageout trace 1\n";
/// Pages whose accesses are left out.
const RECENT: usize = 256;
/// Pages of a block of 2 MiB.
const BLOCK_PAGES: u64 = 512;

/// Runs a program and writes its trace.
pub fn record(file: &Path, command: &[String]) -> Result<()> {
    let mut child = Command::new("valgrind")
        .args(["--tool=lackey", "--trace-mem=yes", "--log-fd=2"])
        .args(command)
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .context("valgrind, which records")?;
    let lines = BufReader::with_capacity(1 << 20, child.stderr.take().expect("a pipe"));
    let pages = condensed(lines)?;
    ensure!(child.wait()?.success(), "{command:?} failed");
    std::fs::write(file, encode(&renumbered(&pages))).with_context(|| file.display().to_string())
}

/// The pages of the lines ` L 1fff000638,8`, where L is a load, S a store, M both; without the recent ones.
fn condensed(mut lines: impl BufRead) -> Result<Vec<u64>> {
    let (mut recent, mut pages, mut line) = (Vec::with_capacity(RECENT + 1), Vec::new(), Vec::new());
    loop {
        line.clear();
        if lines.read_until(b'\n', &mut line)? == 0 {
            return Ok(pages);
        }
        let Some(page) = page_of(&line) else { continue };
        match recent.iter().rposition(|known| *known == page) {
            Some(at) => recent[at..].rotate_left(1),
            None => {
                recent.push(page);
                pages.push(page);
                if recent.len() > RECENT {
                    recent.remove(0);
                }
            }
        }
    }
}

fn page_of(line: &[u8]) -> Option<u64> {
    let line = std::str::from_utf8(line).ok()?;
    let (address, _) = line
        .strip_prefix(" L ")
        .or(line.strip_prefix(" S "))
        .or(line.strip_prefix(" M "))?
        .split_once(',')?;
    Some(u64::from_str_radix(address, 16).ok()? >> 12)
}

fn renumbered(pages: &[u64]) -> Vec<u32> {
    let mut blocks: BTreeMap<u64, u64> = pages.iter().map(|page| (page / BLOCK_PAGES, 0)).collect();
    blocks.values_mut().enumerate().for_each(|(number, new)| *new = number as u64);
    pages
        .iter()
        .map(|page| (blocks[&(page / BLOCK_PAGES)] * BLOCK_PAGES + page % BLOCK_PAGES) as u32)
        .collect()
}

fn encode(pages: &[u32]) -> Vec<u8> {
    let (mut bytes, mut before) = (MAGIC.to_vec(), 0);
    for &page in pages {
        let difference = i64::from(page) - before;
        before = i64::from(page);
        let mut rest = ((difference << 1) ^ (difference >> 63)) as u64;
        while rest >= 0x80 {
            bytes.push(rest as u8 | 0x80);
            rest >>= 7;
        }
        bytes.push(rest as u8);
    }
    bytes
}

/// The accesses of a file; all count.
pub fn decode(bytes: &[u8]) -> Result<Vec<Access>> {
    let Some(bytes) = bytes.strip_prefix(MAGIC) else { bail!("not a trace of this program") };
    let (mut accesses, mut page, mut rest, mut shift) = (Vec::new(), 0i64, 0u64, 0);
    for byte in bytes {
        ensure!(shift < 42, "the trace is damaged");
        rest |= u64::from(byte & 0x7f) << shift;
        shift += 7;
        if byte & 0x80 == 0 {
            page += (rest >> 1) as i64 ^ -((rest & 1) as i64);
            ensure!((0..1 << 28).contains(&page), "the trace is damaged");
            accesses.push(Access::new(page as usize).counted());
            (rest, shift) = (0, 0);
        }
    }
    Ok(accesses)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trace_is_read_as_it_was_written() {
        let text = "==1== Lackey\n L 1fff000638,8\nI  0401ab70,3\n S 1fff000630,8\n M 04200000,4\nhello\n L 1fff201000,1\n";
        let pages = renumbered(&condensed(text.as_bytes()).unwrap());
        assert_eq!(pages, [512, 0, 1025]);
        let accesses = decode(&encode(&pages)).unwrap();
        assert_eq!(accesses.iter().map(|access| access.page()).collect::<Vec<_>>(), [512, 0, 1025]);
        assert!(
            decode(b"pageout trace 1\n\xff\xff\xff\xff\xff\xff\xff\x01").is_err() && decode(b"").is_err()
        );
    }
}
