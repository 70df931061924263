//! A file or disk that is there, for a device of a `Swap` or of `pageout run`: whether it may be one, and what of it is ours.
//!
//! What is written there is a program's memory: keys, passwords, mail. So nobody else may read it, or put another file in its
//! place. And what it holds is not ours to destroy: it is empty, or carries the signature of swap.

use super::error::reason;
use super::header::{self, HeaderError, FOREIGN_PAGE_MAX};
use crate::device::{self, FileSystem};
use rustix::fs::OFlags;
use std::ffi::{CString, OsStr};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Seek, SeekFrom};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::string::{String, ToString};
use std::vec::Vec;
use std::{format, str, vec};

/// A file or disk that may be a device.
#[derive(Debug)]
pub struct Found {
    /// Open for reading and writing, and nobody else's device as long as it is.
    pub file: File,
    /// Whether it is a disk.
    pub is_block_device: bool,
    /// Bytes that it has.
    pub len: u64,
    /// Bytes that its header of swap speaks of, the header's own page among them; `None` if it has none.
    pub header: Option<u64>,
    /// Whether it is a file with less room on its disk than its length.
    pub has_holes: bool,
}

impl Found {
    /// Opens it. The error says why it may not be a device and what to do, to stand behind its name.
    pub fn open(path: &Path) -> Result<Self, String> {
        let (mut file, about) = taken(path)?;
        let name = path.display();
        let is_file = about.is_file();
        let len = file.seek(SeekFrom::End(0)).map_err(|error| cannot("be measured", &error))?;
        if !is_file && len == 0 {
            return Err("has no size: no medium is in it, or nothing is attached; name another".into());
        }
        let header = header_of(&file, len)?;
        if header.is_none() && len > 0 && !(is_file && device::is_hole(&file)) {
            // A run that was killed leaves what it wrote, and no sign of its own.
            return Err(format!(
                "holds data that is not swap, or what a killed run left there; run mkswap {name} if it may go, or \
                 name a new file"
            ));
        }
        // Not before it is known to be swap: who is told to shut a file of the system's may do so.
        if is_file && about.mode() & 0o077 != 0 {
            let mode = about.mode() & 0o7777;
            return Err(format!("others can read or write it (mode {mode:04o}); run chmod 600 {name}"));
        }
        let has_holes = is_file && about.blocks() * 512 < len;
        Ok(Self { file, is_block_device: !is_file, len, header, has_holes })
    }

    /// Bytes that are ours, the header's page among them: what lies behind the swap that it speaks of is somebody else's.
    pub fn room(&self) -> u64 {
        self.header.unwrap_or(self.len)
    }
}

/// Opens a file or block device, if it may be ours, and takes it; what it is.
fn taken(path: &Path) -> Result<(File, fs::Metadata), String> {
    let about = fs::metadata(path).map_err(|error| cannot("be reached", &error))?;
    let kind = about.file_type();
    if kind.is_dir() {
        return Err(format!("is a directory; name a file in it, {}", path.join("swap").display()));
    }
    // Others are not opened even to look closer: that can have effects.
    if !kind.is_file() && !kind.is_block_device() {
        return Err("neither a file nor a block device; name one of these".into());
    }
    let flags = match kind.is_file() {
        // A link to a file could be a trap.
        true => safe_directory(path).map(|_| OFlags::NOFOLLOW)?,
        // Names of disks are links often (/dev/disk/by-id). On a block device O_EXCL fails while it is mounted, swapped on, or
        // open so, by us or another run.
        false => OFlags::EXCL,
    };
    let mut options = OpenOptions::new();
    options.read(true).write(true).custom_flags((flags | OFlags::CLOEXEC | OFlags::NOCTTY).bits() as i32);
    let file = options.open(path).map_err(|error| match error.raw_os_error().unwrap_or(0) {
        libc::ELOOP => "is a symbolic link; name the file itself".into(),
        libc::EBUSY => "in use (mounted, swapped on, or used by a run); name another".into(),
        _ => format!("not writable: {}; name a file of your own", reason(&error)),
    })?;
    // What was opened counts, not what lay there before.
    let about = file.metadata().map_err(|error| cannot("be reached", &error))?;
    if about.file_type() != kind {
        return Err("another has come in its place just now; name it again".into());
    }
    if !kind.is_file() {
        if device::is_read_only(&file) {
            return Err("is read-only; name a disk that can be written".into());
        }
    } else if ![0, rustix::process::geteuid().as_raw()].contains(&about.uid()) {
        return Err(format!("belongs to user {}; name a file of your own", about.uid()));
    } else if is_swapped_on(&about) {
        let name = path.display();
        return Err(format!("swapped on by the kernel; run swapoff {name}, or name another file"));
    }
    // Before it is judged by what it holds, which is another's while it is in use. Not a disk, of which O_EXCL tells: udev locks
    // these for a while after each who had one open (mkswap, the run before).
    match kind.is_file() && device::take(&file) == Ok(false) {
        false => Ok((file, about)),
        true => Err(IN_USE.into()),
    }
}

/// Said of what is another device already.
pub const IN_USE: &str = "in use by another device, here or of another pageout; name another file";

/// The directory of a file, refused where others than its owner may put another file in that one's place. The error is as of
/// [`Found::open`].
pub fn safe_directory(path: &Path) -> Result<&Path, String> {
    let directory = match path.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    };
    let about = fs::metadata(directory)
        .map_err(|error| format!("its directory: {}; make it, or name another file", reason(&error)))?;
    if about.mode() & 0o022 == 0 {
        return Ok(directory);
    }
    let shown = directory.display();
    if FileSystem::of_path(&c_path(directory)).is_ok_and(|system| system.in_memory) {
        return Err(format!(
            "others can write {shown}, which is memory anyway; give mem, or name a file on a disk"
        ));
    }
    Err(format!(
        "others can write {shown}; name a file in a directory of your own, or none and set TMPDIR={shown} for a file \
         without a name"
    ))
}

/// Is what is not there a disk by its name? A file in its place would be memory.
pub fn is_missing_disk(path: &Path) -> bool {
    std::path::absolute(path).is_ok_and(|path| path.starts_with("/dev") && !path.starts_with("/dev/shm"))
}

/// Does the kernel swap to this file?
fn is_swapped_on(about: &fs::Metadata) -> bool {
    let swaps = fs::read("/proc/swaps").unwrap_or_default();
    let paths =
        swaps.split(|byte| *byte == b'\n').skip(1).filter_map(|line| line.split(|byte| *byte == b' ').next());
    paths.map(unescaped).any(|path| {
        let other = fs::metadata(OsStr::from_bytes(&path));
        other.is_ok_and(|other| (other.dev(), other.ino()) == (about.dev(), about.ino()))
    })
}

/// A path as the kernel writes it in its lists: spaces and the like as `\040`.
fn unescaped(path: &[u8]) -> Vec<u8> {
    let (mut plain, mut rest) = (Vec::with_capacity(path.len()), path);
    while let Some((first, behind)) = rest.split_first() {
        let digits = behind.first_chunk::<3>().filter(|_| *first == b'\\');
        let byte = digits.and_then(|digits| u8::from_str_radix(str::from_utf8(digits).ok()?, 8).ok());
        plain.push(byte.unwrap_or(*first));
        rest = if byte.is_some() { &behind[3..] } else { behind };
    }
    plain
}

/// The bytes that a header of swap speaks of, if there is one. One that is wrong is refused.
fn header_of(file: &File, len: u64) -> Result<Option<u64>, String> {
    let mut first = vec![0; len.min(FOREIGN_PAGE_MAX as u64) as usize];
    file.read_exact_at(&mut first, 0).map_err(|error| cannot("be read", &error))?;
    match header::bytes_of(&first, len) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(HeaderError::NoSignature) => Ok(None),
        Err(error) => Err(error.to_string()),
    }
}

fn cannot(what: &str, error: &io::Error) -> String {
    format!("cannot {what}: {}; name another", reason(error))
}

/// A path of a specification has no zero byte.
pub(super) fn c_path(path: &Path) -> CString {
    CString::new(path.as_os_str().as_encoded_bytes()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::unescaped;

    #[test]
    fn paths_of_the_kernels_lists_are_read() {
        assert_eq!(unescaped(br"/swap"), b"/swap");
        assert_eq!(unescaped(br"/a\040b\134\012"), b"/a b\\\n");
        assert_eq!(unescaped(br"/\9\04"), br"/\9\04");
    }
}
