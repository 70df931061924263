//! Sizes as users write and read them.

use core::fmt;
use core::str::FromStr;
use std::string::String;

/// A number of bytes. Reads a number, a fraction allowed, and a unit: `K`, `Ki`, `KiB` = 1024, `KB` = 1000, and so for M, G, T, P;
/// without a unit bytes; case does not matter. Shows as `1.5G`, exact multiples of a unit without a fraction, and the
/// largest, which is no limit, as `max`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Bytes(pub u64);

impl Bytes {
    /// `n` times 1024 times 1024; what is more than can be counted is `u64::MAX`.
    pub const fn mib(n: u64) -> Self {
        Self(n.saturating_mul(1 << 20))
    }

    /// `n` times 1024 MiB; what is more than can be counted is `u64::MAX`.
    pub const fn gib(n: u64) -> Self {
        Self(n.saturating_mul(1 << 30))
    }

    pub(super) const fn pages(self) -> u64 {
        self.0 / crate::space::PAGE as u64
    }
}

/// Units with their powers of 1024, the largest first.
const UNITS: [(char, u32); 5] = [('P', 5), ('T', 4), ('G', 3), ('M', 2), ('K', 1)];

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 == u64::MAX {
            return f.pad("max");
        }
        for (letter, power) in UNITS {
            let unit = 1u64 << (10 * power);
            if self.0 >= unit {
                // In 128 bits: ten times what is left of a unit of P fits, of the largest number it would not.
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

/// The number that a text begins with, digits and a point between them or behind, and what follows it.
pub fn split_number(text: &str) -> Option<(f64, &str)> {
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, rest) = text.split_at(digits);
    let number = number.starts_with(|c: char| c.is_ascii_digit()).then_some(number)?;
    Some((number.parse().ok()?, rest))
}

impl FromStr for Bytes {
    type Err = NotASize;

    fn from_str(text: &str) -> Result<Self, NotASize> {
        let (number, unit) = split_number(text).ok_or(NotASize)?;
        let unit: String = unit.trim_start().to_ascii_uppercase();
        let mut letters = unit.chars();
        let power = match letters.next() {
            None | Some('B') => 0,
            Some(letter) => UNITS.iter().find(|(known, _)| *known == letter).ok_or(NotASize)?.1,
        };
        let base: f64 = match letters.as_str() {
            "" => 1024.0,
            "I" | "IB" if power > 0 => 1024.0,
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
    fn reads_what_users_write() {
        for (text, bytes) in [
            ("512M", 512 << 20),
            ("4GiB", 4 << 30),
            ("4Gi", 4 << 30),
            ("1.5G", 3 << 29),
            ("1.5g", 3 << 29),
            ("4 GiB", 4 << 30),
            ("1000", 1000),
            ("7B", 7),
            ("2KB", 2000),
            ("1mb", 1_000_000),
            ("2T", 2 << 40),
            ("0", 0),
        ] {
            assert_eq!(text.parse(), Ok(Bytes(bytes)), "{text}");
        }
    }

    #[test]
    fn refuses_the_rest() {
        for text in [
            "",
            "M",
            "-1M",
            "12Q",
            "1..5G",
            "1G5",
            "1Gib2",
            "1KiBs",
            "1BB",
            ".5G",
            "inf",
            "1e3",
            "99999999P",
            "%",
        ] {
            assert_eq!(text.parse::<Bytes>(), Err(NotASize), "{text}");
        }
    }

    #[test]
    fn shows_them_as_users_write_them() {
        for (bytes, text) in [
            (0, "0"),
            (1023, "1023"),
            (2000, "1.9K"),
            (16 << 20, "16M"),
            (3 << 29, "1.5G"),
            ((3 << 29) + 1, "1.5G"),
            ((1 << 30) - 1, "1023.9M"),
            (2 << 40, "2T"),
            (u64::MAX, "max"),
        ] {
            assert_eq!(Bytes(bytes).to_string(), text);
        }
    }
}
