//! What the kernel says in /proc, as text.

use alloc::boxed::Box;
use core::ffi::CStr;
use core::str::from_utf8;
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{open, Mode, OFlags};
use rustix::io::pread;

/// Bytes of a status of /proc: what is looked for comes after the groups of its user, who may be in thousands.
pub const STATUS: usize = 64 << 10;

/// For reading.
pub fn opened(path: &CStr) -> Option<OwnedFd> {
    open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).ok()
}

/// What it says now, as far as there is room.
pub fn read(file: impl AsFd, into: &mut [u8]) -> Option<&[u8]> {
    let len = pread(file, &mut *into, 0).ok()?;
    Some(&into[..len])
}

/// A number among the words of a line; the first is 0.
pub fn word(line: &[u8], index: usize) -> Option<u64> {
    from_utf8(line).ok()?.split_whitespace().nth(index)?.parse().ok()
}

/// A number of `stat`, by its place as proc(5) counts; behind the name, which is in parentheses and may hold anything.
pub fn word_of_stat(line: &[u8], place: usize) -> Option<u64> {
    let behind = line.rsplit(|byte| *byte == b')').next()?;
    word(behind, place - 3)
}

/// What stands on the line that begins so.
pub fn field<'a>(text: &'a [u8], name: &[u8]) -> Option<&'a str> {
    let line = text.split(|byte| *byte == b'\n').find_map(|line| line.strip_prefix(name))?;
    from_utf8(line).ok().map(str::trim_ascii)
}

/// The same as a number of KiB, in bytes.
pub fn bytes(text: &[u8], name: &[u8]) -> Option<u64> {
    word(field(text, name)?.as_bytes(), 0).map(|kib| kib << 10)
}

/// What the last line of `smaps` about a mapping says of its flags: is this one there? `None`: another line.
pub fn flags(line: &[u8]) -> Option<impl Fn(&[u8]) -> bool + '_> {
    let flags = line.strip_prefix(b"VmFlags:")?;
    Some(|name: &[u8]| flags.split(|byte| *byte == b' ').any(|flag| flag == name))
}

/// `/proc/self/maps` and the like, line by line.
pub struct Maps {
    buffer: Box<[u8]>,
}

impl Maps {
    /// Room for some lines.
    pub fn new() -> Self {
        Self { buffer: alloc::vec![0; 64 << 10].into_boxed_slice() }
    }

    /// Calls `each` with every line, without its newline; with none where the file cannot be read.
    pub fn read(&mut self, path: &CStr, mut each: impl FnMut(&[u8])) {
        let Some(file) = opened(path) else { return };
        let mut kept = 0;
        loop {
            let n = match rustix::io::read(&file, &mut self.buffer[kept..]) {
                Ok(n) if n > 0 => n,
                _ => return,
            };
            let filled = kept + n;
            let mut start = 0;
            while let Some(len) = self.buffer[start..filled].iter().position(|byte| *byte == b'\n') {
                each(&self.buffer[start..start + len]);
                start += len + 1;
            }
            self.buffer.copy_within(start..filled, 0);
            kept = filled - start;
        }
    }
}
