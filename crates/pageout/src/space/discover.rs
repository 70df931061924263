//! Which mappings of a process can be managed, from the text of `/proc/self/maps`.
//!
//! Managed: private, readable and writable, not executable, anonymous. Not managed, and counted as memory that
//! cannot go: everything else, stacks, the engine's own memory, and the zero-initialised data of shared
//! libraries (libc's own state among it; small).

/// One line of maps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Area<'a> {
    /// First byte.
    pub start: usize,
    /// Past the last byte.
    pub end: usize,
    /// `rw-p` and the like.
    pub permissions: &'a [u8],
    /// Nothing for anonymous memory, else a path or `[name]`.
    pub name: &'a [u8],
}

impl<'a> Area<'a> {
    /// Reads a line without its newline.
    pub fn parse(line: &'a [u8]) -> Option<Self> {
        let mut fields = line.splitn(6, |b| *b == b' ');
        let mut range = fields.next()?.splitn(2, |b| *b == b'-');
        let (start, end) = (hex(range.next()?)?, hex(range.next()?)?);
        let permissions = fields.next()?;
        let name = fields.nth(3).unwrap_or(b"").trim_ascii();
        Some(Self { start, end, permissions, name })
    }

    /// Private anonymous memory that the program reads and writes.
    pub fn is_adoptable(&self) -> bool {
        self.permissions == b"rw-p"
            && (self.name.is_empty() || self.name == b"[heap]" || self.name.starts_with(b"[anon:"))
            && self.end <= super::TOP
    }

    /// Part of a shared library's file.
    pub fn is_library(&self) -> bool {
        self.name.starts_with(b"/") && self.name.windows(3).any(|part| part == b".so")
    }
}

fn hex(digits: &[u8]) -> Option<usize> {
    digits.iter().try_fold(0usize, |n, digit| {
        let value = (*digit as char).to_digit(16)?;
        Some(n << 4 | value as usize)
    })
}

/// Calls `each` for every adoptable area of the lines in order. `.bss` of shared libraries, which follows
/// their file mapping without a gap, is left out up to `LIBRARY_BSS` bytes.
pub struct Walk {
    /// End of a library's mapping, where its `.bss` would start.
    after_library: usize,
}

/// Zero-initialised data of a shared library are expected to be at most this long; what an area has beyond
/// was mapped by the program next to it and merged.
const LIBRARY_BSS: usize = 1 << 20;

impl Walk {
    /// At the start of maps.
    pub fn new() -> Self {
        Self { after_library: 0 }
    }

    /// The part of the next line's area that can be adopted.
    pub fn step(&mut self, area: &Area<'_>) -> Option<(usize, usize)> {
        if area.is_library() {
            self.after_library = area.end;
            return None;
        }
        let start = if area.start == self.after_library { area.start + LIBRARY_BSS } else { area.start };
        (area.is_adoptable() && start < area.end).then_some((start, area.end))
    }
}

impl Default for Walk {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_maps() {
        let area = Area::parse(b"55d0-55e0 rw-p 00000000 00:00 0                          [heap]").unwrap();
        assert_eq!((area.start, area.end, area.name), (0x55d0, 0x55e0, &b"[heap]"[..]));
        assert!(area.is_adoptable());
        let area = Area::parse(b"7f0000000000-7f0000001000 rw-p 00000000 00:00 0 ").unwrap();
        assert!(area.is_adoptable());
        for other in [
            &b"7ffc0000-7ffd0000 rw-p 00000000 00:00 0 [stack]"[..],
            b"1000-2000 rwxp 00000000 00:00 0 ",
            b"1000-2000 rw-s 00000000 00:01 5 /dev/zero (deleted)",
            b"1000-2000 r--p 00000000 00:00 0 ",
            b"1000-2000 rw-p 00001000 08:01 77 /usr/lib/libc.so.6",
        ] {
            assert!(!Area::parse(other).unwrap().is_adoptable());
        }
    }

    #[test]
    fn library_bss_is_left_out_and_what_follows_is_not() {
        let mut walk = Walk::new();
        let lib = Area::parse(b"100000-200000 rw-p 00001000 08:01 77 /usr/lib/libc.so.6").unwrap();
        assert_eq!(walk.step(&lib), None);
        assert_eq!(walk.step(&Area::parse(b"200000-210000 rw-p 0 00:00 0 ").unwrap()), None);
        walk.step(&lib);
        let merged = Area::parse(b"200000-900000 rw-p 0 00:00 0 ").unwrap();
        assert_eq!(walk.step(&merged), Some((0x30_0000, 0x90_0000)));
        assert_eq!(
            walk.step(&Area::parse(b"a00000-b00000 rw-p 0 00:00 0 ").unwrap()),
            Some((0xa0_0000, 0xb0_0000))
        );
    }
}
