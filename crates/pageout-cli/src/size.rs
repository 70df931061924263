//! Sizes: how users write them and how they are shown. Pure functions.

use std::fmt;
use std::str::FromStr;

/// One KiB, MiB, GiB in bytes.
pub const KIB: u64 = 1 << 10;
/// One MiB in bytes.
pub const MIB: u64 = 1 << 20;
/// One GiB in bytes.
pub const GIB: u64 = 1 << 30;

/// A number of bytes; shows as `1.5G`, exact multiples of a unit without a fraction, and the largest, which is no limit,
/// as `max`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Bytes(pub u64);

/// The units, largest first, as (letter, power of 1024).
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
                let tenths = u128::from(self.0 % unit) * 10 / u128::from(unit);
                return match tenths {
                    0 => write!(f, "{}{letter}", self.0 / unit),
                    _ => write!(f, "{}.{tenths}{letter}", self.0 / unit),
                };
            }
        }
        write!(f, "{}", self.0)
    }
}

/// Why a text is no size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NotASize;

impl FromStr for Bytes {
    type Err = NotASize;

    /// A number, a fraction allowed, and a unit: `K`, `KiB` = 1024, `KB` = 1000, and so for M, G, T, P; without
    /// a unit bytes. Case does not matter.
    fn from_str(text: &str) -> Result<Self, NotASize> {
        let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
        let (number, unit) = text.split_at(digits);
        if !number.starts_with(|c: char| c.is_ascii_digit()) {
            return Err(NotASize);
        }
        let number: f64 = number.parse().map_err(|_| NotASize)?;
        let unit = unit.trim_start().to_ascii_uppercase();
        let (letter, suffix) = match unit.chars().next() {
            None | Some('B') => (None, unit.as_str()),
            Some(letter) => (Some(letter), &unit[letter.len_utf8()..]),
        };
        let base: f64 = match (letter, suffix) {
            (None, "" | "B") | (Some(_), "" | "IB") => 1024.0,
            (Some(_), "B") => 1000.0,
            _ => return Err(NotASize),
        };
        let power = match letter {
            None => 0,
            Some(letter) => UNITS.iter().find(|(l, _)| *l == letter).ok_or(NotASize)?.1,
        };
        let bytes = number * base.powi(power as i32);
        if bytes >= u64::MAX as f64 {
            return Err(NotASize);
        }
        Ok(Bytes(bytes as u64))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_users_write() {
        for (text, bytes) in [
            ("512M", 512 * MIB),
            ("4GiB", 4 * GIB),
            ("1.5G", 3 * GIB / 2),
            ("1.5g", 3 * GIB / 2),
            ("4 GiB", 4 * GIB),
            ("1000", 1000),
            ("7B", 7),
            ("2KB", 2000),
            ("1MB", 1_000_000),
            ("2T", 2048 * GIB),
            ("0", 0),
        ] {
            assert_eq!(text.parse(), Ok(Bytes(bytes)), "{text}");
        }
    }

    #[test]
    fn refuses_the_rest() {
        for text in
            ["", "M", "-1M", "12Q", "1..5G", "1G5", "1Gi", "1KiBs", ".5G", "inf", "1e3", "99999999P", "%"]
        {
            assert_eq!(text.parse::<Bytes>(), Err(NotASize), "{text}");
        }
    }

    #[test]
    fn shows_them_as_users_write_them() {
        for (bytes, text) in [
            (0, "0"),
            (1023, "1023"),
            (KIB, "1K"),
            (16 * MIB, "16M"),
            (3 * GIB / 2, "1.5G"),
            (3 * GIB / 2 + 1, "1.5G"),
            (GIB - 1, "1023.9M"),
            (2048 * GIB, "2T"),
        ] {
            assert_eq!(Bytes(bytes).to_string(), text);
        }
    }
}
