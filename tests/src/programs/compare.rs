//! Byte for byte comparison of what two runs left, with the place of the first difference.

use anyhow::{bail, Context, Result};
use std::fs::{self, File};
use std::io::Read;
use std::path::Path;

const CHUNK_BYTES: usize = 1 << 20;
/// How much of each side is shown.
const SHOWN_BYTES: usize = 80;

/// Compares two files of any size.
pub(super) fn files(plain: &Path, paged: &Path) -> Result<()> {
    let name = plain.file_name().unwrap_or_default().to_string_lossy();
    let open = |path: &Path| File::open(path).with_context(|| format!("{}: not written", path.display()));
    let (mut first, mut second) = (open(plain)?, open(paged)?);
    let (mut left, mut right) = (Vec::new(), Vec::new());
    let mut offset = 0;
    loop {
        left.clear();
        right.clear();
        (&mut first).take(CHUNK_BYTES as u64).read_to_end(&mut left)?;
        (&mut second).take(CHUNK_BYTES as u64).read_to_end(&mut right)?;
        bytes(&name, offset, &left, &right)?;
        if left.is_empty() {
            return Ok(());
        }
        offset += left.len() as u64;
    }
}

/// Compares two files after `normalise`.
pub(super) fn normalised(plain: &Path, paged: &Path, normalise: fn(Vec<u8>) -> Vec<u8>) -> Result<()> {
    let name = plain.file_name().unwrap_or_default().to_string_lossy();
    bytes(&name, 0, &normalise(fs::read(plain)?), &normalise(fs::read(paged)?))
}

/// Compares two pieces that start at `offset` of `name`.
pub(super) fn bytes(name: &str, offset: u64, plain: &[u8], paged: &[u8]) -> Result<()> {
    if plain == paged {
        return Ok(());
    }
    let common = plain.iter().zip(paged).take_while(|(a, b)| a == b).count();
    let show = |side: &[u8]| {
        let rest = &side[common..side.len().min(common + SHOWN_BYTES)];
        if rest.is_empty() {
            "(end)".to_owned()
        } else {
            format!("{:?}", String::from_utf8_lossy(rest))
        }
    };
    bail!(
        "{name} differs at byte {}: natively {}, paged {}",
        offset + common as u64,
        show(plain),
        show(paged)
    )
}
