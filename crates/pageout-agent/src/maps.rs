//! What the kernel says of the process's mappings.

use alloc::boxed::Box;
use core::ffi::CStr;
use rustix::fs::{open, Mode, OFlags};

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
        let Ok(file) = open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()) else {
            return;
        };
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
