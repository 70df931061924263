//! What can go wrong, in one line each: what failed, on what, why, what to do.

use super::Bytes;
use crate::kernel::LinuxError;
use core::fmt;
use rustix::io::Errno;
use std::io;
use std::string::{String, ToString};

/// The system's words for an error, short and lower-case, as they stand in the middle of a line.
pub fn reason(error: &io::Error) -> String {
    let text = error.to_string();
    // Without std's "(os error N)".
    let text = text.split(" (os error").next().unwrap_or_default();
    let mut letters = text.chars();
    match letters.next() {
        Some(first) => first.to_lowercase().chain(letters).collect(),
        None => String::new(),
    }
}

/// Why a call of this API did not do what it was asked. Nothing has changed then, but where bytes were to come in or be given up:
/// some may have been.
#[derive(Debug)]
#[non_exhaustive]
pub enum Error {
    /// No limit was given, or one that the engine cannot work in.
    Limit {
        /// What was asked for; nothing asked is 0.
        asked: Bytes,
        /// The least that works.
        least: Bytes,
    },
    /// A device specification that cannot be read.
    Spec {
        /// As it was given.
        spec: String,
        /// What is wrong with it and what it takes.
        why: String,
    },
    /// A device that cannot be used.
    Device {
        /// The name as it was given, or the directory of an unlinked file.
        name: String,
        /// The reason and what to do.
        why: String,
    },
    /// This kernel, or what this user may do on it, is not enough.
    Kernel(LinuxError),
    /// The kernel refused memory, or an advice about it.
    Memory {
        /// What it was for.
        what: &'static str,
        /// How much.
        len: Bytes,
        /// The reason.
        errno: Errno,
    },
    /// Threads cannot answer their own faults; why, and what to do.
    Inline(&'static str),
    /// A thread of the engine could not be started or set apart from the program.
    Thread(io::Error),
    /// A region of no bytes, or of more than an address space has.
    Length(usize),
    /// Bytes that are not all in the region.
    Range {
        /// The first byte asked for.
        start: usize,
        /// Past the last byte asked for.
        end: usize,
        /// The bytes of the region.
        len: usize,
    },
    /// More would be pinned than leaves room to work.
    Pin {
        /// What was asked for.
        asked: Bytes,
        /// What is pinned.
        pinned: Bytes,
        /// What may be pinned at once: half of the limit.
        most: Bytes,
    },
    /// The same bytes would be pinned more often than can be counted.
    Pins {
        /// The first byte asked for.
        start: usize,
        /// Past the last byte asked for.
        end: usize,
        /// How often 64 KiB can be pinned at once.
        most: u16,
    },
    /// The calling process is a fork's child: engine and regions are its parent's.
    Forked,
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Limit { asked: Bytes(0), least } => {
                write!(f, "memory: no limit given; say how much with memory(), at least {least}")
            }
            Self::Limit { asked, least } => {
                write!(f, "memory: {asked} is too little to work in; the least that works is {least}")
            }
            Self::Spec { spec, why } => write!(f, "device \"{spec}\": {why}"),
            Self::Device { name, why } => write!(f, "device {name}: {why}"),
            Self::Kernel(error) => error.fmt(f),
            Self::Memory { what, len, errno: Errno::HWPOISON | Errno::FAULT } => write!(
                f,
                "{what} ({len}): a device has lost some of it; discard these bytes to use them again"
            ),
            Self::Memory { what, len, errno: Errno::INVAL | Errno::NXIO } => {
                write!(f, "{what} ({len}): the kernel refuses; the program has locked or changed the mapping")
            }
            Self::Memory { what, len, errno } => write!(
                f,
                "no memory for {what} ({len}): {errno}; ask for less, or raise ulimit -v or vm.max_map_count"
            ),
            Self::Inline(why) => write!(f, "inline delivery: {why}"),
            Self::Thread(error) => {
                let what = match error.raw_os_error().map(Errno::from_raw_os_error) {
                    Some(Errno::MFILE | Errno::NFILE) => "raise ulimit -n",
                    _ => "raise ulimit -u, or allow unshare(CLONE_FILES)",
                };
                write!(f, "no thread for the engine: {}; {what}", reason(error))
            }
            Self::Length(len) => {
                let (len, most) = (Bytes(*len as u64), Bytes(MOST_BYTES as u64));
                write!(f, "a region of {len}: takes 1 byte to {most}")
            }
            Self::Range { start, end, len } => {
                write!(f, "bytes {start} to {end} of a region of {len}: take a range inside the region")
            }
            Self::Pin { asked, pinned, most } => write!(
                f,
                "cannot pin {asked} beside the {pinned} that are pinned: {most} of this limit can be; unpin some, or \
                 give more memory"
            ),
            Self::Pins { start, end, most } => {
                write!(f, "cannot pin bytes {start} to {end} once more: {most} pins have them; unpin some")
            }
            Self::Forked => f.write_str(
                "this is the child of a fork, and the regions are its parent's; open a Swap of its own here",
            ),
        }
    }
}

impl core::error::Error for Error {}

/// The largest region: what is left of 47 bits of addresses with room for everything else.
pub(super) const MOST_BYTES: usize = 1 << 46;
