//! Sizes as users write and read them.

use core::fmt;
use core::str::FromStr;
use std::string::String;

/// A number of bytes. Reads `1.5G`, `512MiB`, `2KB` (1000), a plain number; shows as `1.5G`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Bytes(pub u64);

impl Bytes {
    /// `n` times 1024 times 1024.
    pub const fn mib(n: u64) -> Self {
        Self(n << 20)
    }

    /// `n` times 1024 MiB.
    pub const fn gib(n: u64) -> Self {
        Self(n << 30)
    }

    pub(super) const fn pages(self) -> u64 {
        self.0 / crate::space::PAGE as u64
    }
}

/// Units with their powers of 1024, the largest first.
const UNITS: [(char, u32); 4] = [('T', 4), ('G', 3), ('M', 2), ('K', 1)];

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (letter, power) in UNITS {
            let unit = 1u64 << (10 * power);
            if self.0 >= unit {
                return match u128::from(self.0 % unit) * 10 / u128::from(unit) {
                    0 => write!(f, "{}{letter}", self.0 / unit),
                    tenths => write!(f, "{}.{tenths}{letter}", self.0 / unit),
                };
            }
        }
        write!(f, "{}", self.0)
    }
}

/// A text that is no size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NotASize;

impl fmt::Display for NotASize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("not a size; write it like 512M or 1.5G")
    }
}

impl core::error::Error for NotASize {}

impl FromStr for Bytes {
    type Err = NotASize;

    fn from_str(text: &str) -> Result<Self, NotASize> {
        let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
        let (number, unit) = text.split_at(digits);
        if !number.starts_with(|c: char| c.is_ascii_digit()) {
            return Err(NotASize);
        }
        let number: f64 = number.parse().map_err(|_| NotASize)?;
        let unit: String = unit.trim_start().to_ascii_uppercase();
        let mut letters = unit.chars();
        let power = match letters.next() {
            None | Some('B') => 0,
            Some(letter) => UNITS.iter().find(|(known, _)| *known == letter).ok_or(NotASize)?.1,
        };
        let base: f64 = match letters.as_str() {
            "" => 1024.0,
            "IB" if power > 0 => 1024.0,
            "B" if power > 0 => 1000.0,
            _ => return Err(NotASize),
        };
        let bytes = (0..power).fold(number, |bytes, _| bytes * base);
        if bytes >= u64::MAX as f64 {
            return Err(NotASize);
        }
        Ok(Self(bytes as u64))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::string::ToString;

    #[test]
    fn read_and_shown() {
        for (text, bytes, shown) in [
            ("512M", 512 << 20, "512M"),
            ("1.5GiB", 3 << 29, "1.5G"),
            ("2kb", 2000, "1.9K"),
            ("7", 7, "7"),
            ("7B", 7, "7"),
        ] {
            let read: Bytes = text.parse().unwrap();
            assert_eq!((read.0, read.to_string().as_str()), (bytes, shown), "{text}");
        }
        for text in ["", "M", "-1", "1Q", "1Gi", "1BB", "1..2", "99999999T"] {
            assert_eq!(text.parse::<Bytes>(), Err(NotASize), "{text}");
        }
    }
}
