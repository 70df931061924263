//! Sizes and times as people write them: `512M`, `4GiB`, `1.5G`, `90s`.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// Bytes in a page of the measurements; the kernel's counters are in pages too.
pub const PAGE: usize = 4096;
/// Bytes in a huge page, and in the pieces that raw speeds are measured in.
pub const HUGE: usize = 2 << 20;
/// Bytes in a KB of throughputs, as vm-scalability has it.
pub const KB: f64 = 1024.0;
/// Bytes in a GiB, for figures per GiB.
pub const GIB: f64 = (1u64 << 30) as f64;

/// A number of bytes, at least a page, read and shown as [`pageout::Bytes`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Bytes(pub u64);

impl Bytes {
    /// As a length of memory in this process.
    pub fn len(self) -> usize {
        self.0 as usize
    }

    /// Whole pages of 4 KiB.
    pub fn pages(self) -> usize {
        self.len() / PAGE
    }

    /// `self` times `factor`, rounded up to whole huge pages.
    pub fn scaled(self, factor: f64) -> Bytes {
        let bytes = (self.0 as f64 * factor) as u64;
        Bytes(bytes.next_multiple_of(HUGE as u64))
    }
}

impl FromStr for Bytes {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let pageout::Bytes(bytes) = text.parse().map_err(|why| format!("{text}: {why}"))?;
        if bytes < PAGE as u64 {
            return Err(format!("{text}: less than a page; give 4K or more"));
        }
        Ok(Bytes(bytes))
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        pageout::Bytes(self.0).fmt(f)
    }
}

/// Reads `90`, `90s`, `1.5` or `250ms` as a time.
pub fn parse_time(text: &str) -> Result<Duration, String> {
    let (number, scale) = match text.strip_suffix("ms") {
        Some(number) => (number, 1e-3),
        None => (text.strip_suffix('s').unwrap_or(text), 1.0),
    };
    let value = number.parse::<f64>().ok();
    let time = value.and_then(|value| Duration::try_from_secs_f64(value * scale).ok());
    time.ok_or_else(|| format!("{text}: not a time; write seconds, as 90, 1.5s or 250ms"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_go_both_ways() {
        for (text, bytes) in [("4096", 4096), ("512M", 512 << 20), ("4GiB", 4 << 30), ("1.5G", 3 << 29)] {
            assert_eq!(text.parse::<Bytes>().unwrap(), Bytes(bytes));
        }
        assert_eq!(Bytes(3 << 29).to_string(), "1.5G");
        assert_eq!(Bytes(512 << 20).to_string(), "512M");
        assert!("12Q".parse::<Bytes>().is_err() && "".parse::<Bytes>().is_err());
    }

    #[test]
    fn times() {
        assert_eq!(parse_time("250ms").unwrap(), Duration::from_millis(250));
        assert_eq!(parse_time("90s").unwrap(), Duration::from_secs(90));
        assert!(parse_time("-1").is_err() && parse_time("soon").is_err());
    }
}
