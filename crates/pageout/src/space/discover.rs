//! Which mappings of a process can be managed, from the text of `/proc/self/maps`.
//!
//! Managed: private, readable and writable, anonymous, and executable where the caller says so; and private anonymous addresses without
//! access that begin where such an area ends: allocators reserve them and open them piece by piece with mprotect
//! (malloc in every thread but the first), faster than new pieces are found. Not managed, and counted as memory
//! that cannot go: everything else, stacks, the engine's own memory, and the zero-initialised data of shared
//! libraries (libc's own state among it; small).

use super::PAGE;

/// One line of maps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Area<'a> {
    /// First byte.
    pub start: usize,
    /// Past the last byte.
    pub end: usize,
    /// `rw-p` and the like.
    pub permissions: &'a [u8],
    /// Offset, device and inode, as they are written there.
    pub backing: &'a [u8],
    /// Nothing for anonymous memory, else a path or `[name]`.
    pub name: &'a [u8],
}

impl<'a> Area<'a> {
    /// Reads a line without its newline.
    pub fn parse(line: &'a [u8]) -> Option<Self> {
        let mut fields = line.splitn(3, |b| *b == b' ');
        let mut range = fields.next()?.splitn(2, |b| *b == b'-');
        let (start, end) = (hex(range.next()?)?, hex(range.next()?)?);
        let (permissions, rest) = (fields.next()?, fields.next()?);
        let spaces = rest.iter().enumerate().filter(|(_, b)| **b == b' ');
        let (backing, name) = rest.split_at(spaces.map(|(at, _)| at).nth(2).unwrap_or(rest.len()));
        Some(Self { start, end, permissions, backing, name: name.trim_ascii() })
    }

    /// Private anonymous memory that the program reads and writes.
    fn is_adoptable(&self) -> bool {
        self.permissions == b"rw-p" && self.is_anonymous()
    }

    /// The same of memory that can be executed as well.
    pub fn is_executable(&self) -> bool {
        self.permissions == b"rwxp" && self.is_anonymous()
    }

    /// Private anonymous addresses that are not to be touched yet; too many to be a guard.
    fn is_reserve(&self) -> bool {
        self.permissions == b"---p" && self.is_anonymous() && self.end - self.start >= SMALLEST_RESERVE
    }

    /// Memory of no file that can be managed, whatever the access.
    pub fn is_anonymous(&self) -> bool {
        (self.name.is_empty() || self.name == b"[heap]" || self.name.starts_with(b"[anon:"))
            && self.end <= super::TOP
    }

    /// Where in its file it begins, in bytes.
    pub fn offset(&self) -> usize {
        self.backing.split(|b| *b == b' ').next().and_then(hex).unwrap_or(0)
    }

    /// The file system that its file is on.
    pub fn device(&self) -> Option<DeviceNumber> {
        DeviceNumber::parse(self.backing.split(|b| *b == b' ').nth(1)?, 16)
    }

    /// The number of its file there.
    pub fn inode(&self) -> Option<u64> {
        core::str::from_utf8(self.backing.split(|b| *b == b' ').nth(2)?).ok()?.parse().ok()
    }

    fn is_start_of_file(&self) -> bool {
        self.offset() == 0
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

/// Where a file system is, by its numbers; the first is 0 where that is no block device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct DeviceNumber {
    /// Of the driver.
    pub major: u32,
    /// Of those of one driver.
    pub minor: u32,
}

impl DeviceNumber {
    fn parse(field: &[u8], radix: u32) -> Option<Self> {
        let (major, minor) = core::str::from_utf8(field).ok()?.split_once(':')?;
        let [major, minor] = [major, minor].map(|digits| u32::from_str_radix(digits, radix).ok());
        Some(Self { major: major?, minor: minor? })
    }
}

/// A line of `/proc/self/mountinfo`: the file system's device, and whether its files take as much memory whether they are used or
/// not, or are none.
pub fn mounted(line: &[u8]) -> Option<(DeviceNumber, bool)> {
    const IN_MEMORY: [&[u8]; 7] =
        [b"tmpfs", b"ramfs", b"rootfs", b"devtmpfs", b"hugetlbfs", b"proc", b"sysfs"];
    let mut fields = line.split(|byte| *byte == b' ');
    let device = DeviceNumber::parse(fields.nth(2)?, 10)?;
    fields.find(|field| *field == b"-")?;
    Some((device, IN_MEMORY.contains(&fields.next()?)))
}

/// Goes through the lines in order and finds what can be adopted. `.bss` of shared libraries, which follows
/// their file mapping without a gap, is left out: as much as the library's header says, at most `LIBRARY_BSS` bytes. The
/// agent's own is among it. It may be several areas: the program gave advice for a part.
#[derive(Default)]
pub struct Walk {
    /// Where the last library's file is mapped from its start.
    library: usize,
    /// End of a library's mapping, where its `.bss` would start; and of the areas that follow it without a gap.
    after_library: usize,
    behind: usize,
    /// End of the last area that was taken.
    after_taken: usize,
    /// What can be executed is taken too: there are frames for it.
    executable: bool,
}

/// Zero-initialised data of a shared library are expected to be at most this long; what an area has beyond
/// was mapped by the program next to it and merged.
const LIBRARY_BSS: usize = 1 << 20;
/// For less it is not worth to look at a library's header.
const SMALL_BSS: usize = 64 << 10;
/// Fewer bytes without access behind an area are not for its growth.
const SMALLEST_RESERVE: usize = 64 << 10;

impl Walk {
    /// At the start of maps. `executable`: see [`Area::is_executable`].
    pub fn new(executable: bool) -> Self {
        Self { executable, ..Self::default() }
    }

    /// The part of the next line's area that can be adopted, unless the caller knows why it must not be. `bss_end`:
    /// see [`bss_end`], of the library at the first address whose file's part ends at the second.
    pub fn step(
        &mut self,
        area: &Area<'_>,
        refused: impl FnOnce(usize, usize) -> bool,
        bss_end: impl FnOnce(usize, usize) -> Option<usize>,
    ) -> Option<(usize, usize)> {
        if area.is_library() {
            if area.is_start_of_file() {
                self.library = area.start;
            }
            (self.after_library, self.behind) = (area.end, area.end);
            return None;
        }
        let mut start = area.start;
        let is_memory = area.is_adoptable() || self.executable && area.is_executable();
        if start == self.behind {
            self.behind = area.end;
            let most = self.after_library + LIBRARY_BSS;
            let asks = is_memory && start < most && area.end - self.after_library > SMALL_BSS;
            let end = if asks { bss_end(self.library, self.after_library) } else { None };
            start = start.max(end.map_or(most, |end| end.min(most)));
        }
        let fit = is_memory || (area.start == self.after_taken && area.is_reserve());
        let taken = fit && start < area.end && !refused(start, area.end);
        if taken && is_memory {
            self.after_taken = area.end;
        }
        taken.then_some((start, area.end))
    }
}

/// Where the zero-initialised data end of a library mapped `at` an address, that begins with `header`, if the memory
/// of its file ends where its last segment's does: at `file_end`. Program headers of 64 bits; anything may stand there.
pub fn bss_end(header: &[u8], at: usize, file_end: usize) -> Option<usize> {
    const LOAD: usize = 1;
    let number = |offset: usize, len: usize| {
        let bytes = header.get(offset..offset.checked_add(len)?)?;
        Some(bytes.iter().rev().fold(0, |n, byte| n << 8 | *byte as usize))
    };
    if header.get(..5)? != b"\x7fELF\x02" {
        return None;
    }
    let (table, size, count) = (number(32, 8)?, number(54, 2)?, number(56, 2)?);
    let (mut first, mut last) = (None, None);
    for index in 0..count {
        let segment = table.checked_add(index * size)?;
        if number(segment, 4)? == LOAD {
            let field = |offset| number(segment.checked_add(offset)?, 8);
            let (offset, address, in_file, in_memory) = (field(8)?, field(16)?, field(32)?, field(40)?);
            first.get_or_insert((offset, address));
            last = Some((address, in_file, in_memory));
        }
    }
    let ((offset, base), (address, in_file, in_memory)) = (first?, last?);
    let end = |len: usize| {
        let start = at.checked_add(address.checked_sub(base & !(PAGE - 1))?)?;
        start.checked_add(len)?.checked_next_multiple_of(PAGE)
    };
    let is_it = offset < PAGE && end(in_file)? == file_end;
    end(in_memory).filter(|end| is_it && *end >= file_end)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_maps() {
        let area = Area::parse(b"55d0-55e0 rw-p 00000000 00:00 0                          [heap]").unwrap();
        assert_eq!((area.start, area.end, area.name), (0x55d0, 0x55e0, &b"[heap]"[..]));
        assert!(area.is_adoptable());
        assert_eq!((area.permissions, area.backing), (&b"rw-p"[..], &b"00000000 00:00 0"[..]));
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
        let mut walk = Walk::new(false);
        let mut step = |area: &Area<'_>| walk.step(area, |_, _| false, |_, _| None);
        let lib = Area::parse(b"100000-200000 rw-p 00001000 08:01 77 /usr/lib/libc.so.6").unwrap();
        assert_eq!(step(&lib), None);
        assert_eq!(step(&Area::parse(b"200000-210000 rw-p 0 00:00 0 ").unwrap()), None);
        step(&lib);
        let merged = Area::parse(b"200000-900000 rw-p 0 00:00 0 ").unwrap();
        assert_eq!(step(&merged), Some((0x30_0000, 0x90_0000)));
        assert_eq!(
            step(&Area::parse(b"a00000-b00000 rw-p 0 00:00 0 ").unwrap()),
            Some((0xa0_0000, 0xb0_0000))
        );
    }

    #[test]
    fn library_bss_in_pieces_is_left_out() {
        let area = |line: &'static [u8]| Area::parse(line).unwrap();
        let mut walk = Walk::new(false);
        let mut step = |area: &Area<'_>| walk.step(area, |_, _| false, |_, _| Some(0x20_3000));
        assert_eq!(step(&area(b"100000-200000 rw-p 00001000 08:01 77 /usr/lib/libc.so.6")), None);
        assert_eq!(step(&area(b"200000-201000 rw-p 0 00:00 0 ")), None);
        assert_eq!(step(&area(b"201000-202000 r--p 0 00:00 0 ")), None);
        assert_eq!(step(&area(b"202000-222000 rw-p 0 00:00 0 ")), Some((0x20_3000, 0x22_2000)));
        assert_eq!(step(&area(b"222000-223000 rw-p 0 00:00 0 ")), Some((0x22_2000, 0x22_3000)));
        assert_eq!(step(&area(b"224000-225000 rw-p 0 00:00 0 ")), Some((0x22_4000, 0x22_5000)));
    }

    #[test]
    fn a_library_says_how_much_is_its_own() {
        let area = |line: &'static [u8]| Area::parse(line).unwrap();
        let code = area(b"100000-140000 r-xp 00000000 08:01 77 /usr/lib/libc.so.6");
        let data = area(b"140000-142000 rw-p 0003f000 08:01 77 /usr/lib/libc.so.6");
        let behind = area(b"142000-342000 rw-p 00000000 00:00 0 ");
        let step = |end: Option<usize>| {
            let mut walk = Walk::new(false);
            [code, data].iter().for_each(|area| assert_eq!(walk.step(area, |_, _| false, |_, _| None), None));
            let asked = |at, file_end| {
                assert_eq!((at, file_end), (code.start, data.end));
                end
            };
            walk.step(&behind, |_, _| false, asked)
        };
        assert_eq!(step(None), Some((0x24_2000, 0x34_2000)));
        assert_eq!(step(Some(0x14_5000)), Some((0x14_5000, 0x34_2000)));
        assert_eq!(step(Some(0x14_2000)), Some((0x14_2000, 0x34_2000)));
        assert_eq!(step(Some(usize::MAX)), Some((0x24_2000, 0x34_2000)));

        // Two segments, other headers before, between and behind them.
        let mut header = [0u8; 64 + 5 * 56];
        let mut set = |at: usize, value: u64| header[at..at + 8].copy_from_slice(&value.to_le_bytes());
        set(0, 0x02_464c_457f);
        set(32, 64);
        set(54, 56 | 5 << 16);
        for (index, values) in
            [(1, [1, 0, 0, 0, 0x40000, 0x40000]), (3, [1, 0x3f100, 0x40100, 0, 0x1801, 0x4f01])]
        {
            values.iter().enumerate().for_each(|(i, value)| set(64 + index * 56 + i * 8, *value));
        }
        assert_eq!(bss_end(&header, 0x10_0000, 0x14_2000), Some(0x14_6000));
        // Not where its file's part ends, or not its start; cut off; no header.
        assert_eq!(bss_end(&header, 0x10_0000, 0x14_3000), None);
        assert_eq!(bss_end(&header, 0x14_0000, 0x14_2000), None);
        for len in 0..64 + 3 * 56 + 48 {
            assert_eq!(bss_end(&header[..len], 0x10_0000, 0x14_2000), None);
        }
        for at in 0..header.len() {
            let mut other = header;
            other[at] = 0xff;
            let _ = bss_end(&other, usize::MAX - 0xfff, 0x14_2000);
        }
    }

    #[test]
    fn what_an_area_will_grow_into_is_taken_with_it() {
        let area = |line: &'static [u8]| Area::parse(line).unwrap();
        let heap = area(b"7f0000000000-7f0000021000 rw-p 00000000 00:00 0 ");
        let reserve = area(b"7f0000021000-7f0004000000 ---p 00000000 00:00 0 ");
        let mut walk = Walk::new(false);
        assert_eq!(walk.step(&reserve, |_, _| false, |_, _| None), None);
        assert!(walk.step(&heap, |_, _| false, |_, _| None).is_some());
        assert_eq!(walk.step(&reserve, |_, _| false, |_, _| None), Some((reserve.start, reserve.end)));
        // Not behind what is not taken, not a guard page, not somebody's file, not behind another reserve.
        walk = Walk::new(false);
        assert_eq!(walk.step(&heap, |_, _| true, |_, _| None), None);
        assert_eq!(walk.step(&reserve, |_, _| false, |_, _| None), None);
        for other in [
            &b"7f0000021000-7f0000022000 ---p 00000000 00:00 0 "[..],
            b"7f0000021000-7f0004000000 ---p 00000000 08:01 77 /usr/share/fonts",
            b"7f0000021000-7f0004000000 ---s 00000000 00:01 5 /dev/zero (deleted)",
            b"7f0004000000-7f0008000000 ---p 00000000 00:00 0 ",
        ] {
            walk.step(&heap, |_, _| false, |_, _| None);
            assert_eq!(walk.step(&area(other), |_, _| false, |_, _| None), None);
        }
    }

    #[test]
    fn files_in_memory_are_told_by_their_file_system() {
        let area = Area::parse(b"7f00-7f01 r--s 00020000 fe:1a 77 /data").unwrap();
        assert_eq!((area.offset(), area.inode()), (0x2_0000, Some(77)));
        assert_eq!(area.device(), Some(DeviceNumber { major: 0xfe, minor: 0x1a }));
        let shm = DeviceNumber { major: 0, minor: 41 };
        assert_eq!(mounted(b"36 35 0:41 / /dev/shm rw,nosuid shared:4 - tmpfs tmpfs rw"), Some((shm, true)));
        assert_eq!(mounted(b"36 35 0:41 / /mnt rw - btrfs /dev/vda rw"), Some((shm, false)));
        assert_eq!(mounted(b"36 35 0:41 / /mnt rw"), None);
        assert_eq!(mounted(b"36 35"), None);
    }
}
