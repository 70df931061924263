//! The swap devices of a run: opening what a [`Spec`] names, safely, and what is wrong with it in one line.
//!
//! What is written there is the program's memory, so nobody else may read it: files have mode 0600, names are made
//! without following links, and where others could put a name in our way only a file without a name will do. A file
//! that is there must be the user's own, or root's. What a user's file or disk held before is not ours to destroy: it
//! must be empty or carry the signature of swap.

use std::ffi::OsString;
use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind};
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use anyhow::{anyhow, bail, Result};
use pageout::api::{
    header_page, is_missing_disk, reason, safe_directory, Backing, Bytes, Found, Spec, IN_USE,
};
use pageout::device::{self, OpenError};
use pageout::slot::MAX_SLOTS;
use pageout::wire::{DeviceSettings, CLUSTER_SLOTS, DISCARDS, HEADER, ROTATIONAL, TRUNK_CLUSTERS};

use crate::memory;
use crate::say;
use crate::sys;

/// Bytes of a page, and so of a slot.
pub const PAGE: u64 = device::PAGE as u64;
/// Bytes of the smallest device.
pub const LEAST: Bytes = Bytes(64 << 20);
/// Bytes of the largest: so many slots have names.
const MOST: Bytes = Bytes(MAX_SLOTS * PAGE);
/// Devices are lent to processes in trunks: so many, or more of the largest size. Each process has some that are not
/// full, and what is in them is nobody else's.
const TRUNKS: u64 = 256;

/// A device that is open.
#[derive(Debug)]
pub struct Device {
    /// The file, which processes of the run get too.
    pub file: File,
    /// As users know it.
    pub name: String,
    /// The file or disk that was named, from the root on.
    pub path: Option<PathBuf>,
    /// Whole trunks that it holds, and the size of each.
    pub trunks: u64,
    pub trunk: Bytes,
    /// What processes are told.
    pub settings: DeviceSettings,
    /// Whether freed trunks are given back to it.
    pub discards: bool,
    /// Whether it is a disk.
    pub is_block_device: bool,
    is_memory: bool,
    /// Whether it is a file on a disk, which may have holes.
    grows: bool,
    /// It was said that its file system is full.
    told_full: bool,
    /// The first page is a header of swap, where nobody writes.
    header: bool,
    /// What is ours of a file of the user's: as much as its header speaks of, or all. It is emptied at the end, and one
    /// without a header cut back to it.
    held: Option<u64>,
    /// Processes may have it, and have written there.
    pub is_on: bool,
    /// It had less room on disk than its length: what it is given it gives back.
    has_holes: bool,
    /// A name that we made.
    made: Option<Made>,
}

impl Device {
    /// Opens what `spec` names, for a run of this limit; `index` says how many were opened before it. Whoever asks for it is
    /// told what is not as he may think (`warn`).
    pub fn open(spec: &Spec, limit_bytes: u64, index: usize, warn: Warn<'_>) -> Result<Self> {
        let Opened { file, name, size, discards, is_block_device, header, held, has_holes, made } =
            Opened::of(spec, limit_bytes, false, warn)?;
        let file = file.expect("only a dry run leaves it out");
        let clusters = trunk_clusters(size);
        let trunk = Bytes(clusters * CLUSTER_SLOTS * PAGE);
        let trunks = size.0 / trunk.0;
        let flag = |is_set, flag| if is_set { flag } else { 0 };
        let settings = DeviceSettings {
            // Like the kernel: devices without a priority come after those with one, in the order of their names.
            priority: spec.priority.unwrap_or(-2 - index as i32),
            flags: flag(discards, DISCARDS) | flag(spec.rotational, ROTATIONAL) | flag(header, HEADER),
            trunk_clusters: clusters as u16,
            slots: trunks * clusters * CLUSTER_SLOTS,
            serial: index as u64,
        };
        let path = path_of(spec);
        let is_memory = spec.backing == Backing::Memory;
        let link = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
        let grows = !is_block_device && sys::file_system(&link).is_ok_and(|system| !system.in_memory);
        Ok(Self {
            file,
            name,
            path,
            trunks,
            trunk,
            settings,
            discards,
            is_block_device,
            is_memory,
            grows,
            told_full: false,
            header,
            held,
            is_on: false,
            has_holes,
            made,
        })
    }

    /// Name and size of what would be opened after those of `earlier`; nothing is made.
    pub fn plan(spec: &Spec, limit_bytes: u64, earlier: &[Spec]) -> Result<(String, Bytes)> {
        let opened = Opened::of(spec, limit_bytes, true, &|line| say::warning(line))?;
        let file = identity(spec);
        match file.is_some() && earlier.iter().any(|other| identity(other) == file) {
            true => Err(wrong(&opened.name, IN_USE)),
            false => Ok((opened.name, opened.size)),
        }
    }

    /// Its path, or what it is.
    pub fn shown(&self) -> String {
        self.path.as_ref().map_or_else(|| self.name.clone(), |path| path.display().to_string())
    }

    /// Is it memory, which counts elsewhere?
    pub fn is_memory(&self) -> bool {
        self.is_memory
    }

    /// What `swapon --show` would call its type.
    pub fn kind(&self) -> &'static str {
        match (self.is_block_device, &self.path) {
            (true, _) => "partition",
            (false, None) if self.is_memory => "memory",
            _ => "file",
        }
    }

    /// Gets trunks their room on disk before somebody writes there: a write into a hole has the file to itself while
    /// its room is found, and room that there is not is better known now. The first that has none: the file system is
    /// full.
    pub fn reserve(&mut self, trunks: &Range<u64>) -> u64 {
        if !self.grows {
            return trunks.end;
        }
        let has_room = |of: Range<u64>| {
            let (at, len) = (of.start * self.trunk.0, (of.end - of.start) * self.trunk.0);
            sys::allocate(&self.file, at, len)
                .map_or_else(|e| !matches!(e.raw_os_error(), Some(libc::ENOSPC | libc::EDQUOT)), |()| true)
        };
        let reserved = match has_room(trunks.clone()) {
            true => trunks.end,
            false => trunks.clone().find(|trunk| !has_room(*trunk..trunk + 1)).unwrap_or(trunks.end),
        };
        let full = reserved == trunks.start;
        if full && !self.told_full {
            say::warning(format_args!(
                "{}: its file system is full; free some, or add swap with pageout swapon",
                self.name
            ));
        }
        self.told_full = full;
        // Part of their room may have been found.
        (reserved..trunks.end).for_each(|trunk| self.discard(trunk));
        reserved
    }

    /// Processes that outlive us read from it: it is not emptied at the end.
    pub fn leave_as_it_is(&mut self) {
        self.held = None;
        self.made.iter_mut().for_each(|made| made.file = None);
    }

    /// Gives back what a trunk that nobody uses holds. What cannot be given back is only kept longer.
    pub fn discard(&self, trunk: u64) {
        if self.discards {
            let kept = if trunk == 0 && self.header { PAGE } else { 0 };
            let at = trunk * self.trunk.0 + kept;
            let done = device::discard(&self.file, self.is_block_device, at, self.trunk.0 - kept);
            if let Err(error) = done.map_err(io::Error::from) {
                say::debug(format_args!("{}: discard: {}", self.name, reason(&error)));
            }
        }
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        let Some(held) = self.held else { return };
        if !self.is_on {
            // What nobody wrote to is as it was; longer, it would be taken for one with holes, and lose its room.
            if !self.header && self.file.metadata().is_ok_and(|about| about.len() > held) {
                let _ = self.file.set_len(held);
            }
            return;
        }
        // Leaves it as it was, empty, and nothing of the program's memory in it. Whose room cannot be kept loses it.
        let first = if self.header { PAGE } else { 0 };
        if let Err(error) = device::empty(&self.file, first..held, self.has_holes).map_err(io::Error::from) {
            say::warning(format_args!(
                "{}: not emptied: {}; it holds what was the program's memory, overwrite it",
                self.name,
                reason(&error)
            ));
        }
    }
}

/// A name that we made and take away, also when something goes wrong on the way. Not what has that name by then: it is
/// somebody else's.
#[derive(Debug)]
struct Made {
    path: PathBuf,
    /// Device and number of our file.
    id: (u64, u64),
    /// The file, unless others read there still.
    file: Option<File>,
}

impl Made {
    /// The name is elsewhere, or not to be reached any more: the file is emptied at least, if it has one.
    fn empty(&self) {
        let Some(file) = &self.file else { return };
        let emptied = match file.metadata() {
            Ok(about) if about.nlink() == 0 => return,
            Ok(_) => file.set_len(0).map(|()| "emptied; remove it".to_owned()),
            Err(error) => Err(error),
        };
        let what = emptied.unwrap_or_else(|error| {
            format!("not emptied: {}; it holds what was the program's memory, remove it", reason(&error))
        });
        say::warning(format_args!("{}: its file is not there any more: {what}", self.path.display()));
    }
}

impl Drop for Made {
    fn drop(&mut self) {
        let is_ours = |about: fs::Metadata| (about.dev(), about.ino()) == self.id;
        if !fs::symlink_metadata(&self.path).is_ok_and(is_ours) {
            return self.empty();
        }
        // It may have other names by now.
        self.file.iter().for_each(|file| drop(file.set_len(0)));
        if let Err(error) = fs::remove_file(&self.path) {
            say::warning(format_args!(
                "{}: not removed: {}; it holds what was the program's memory, remove it",
                self.path.display(),
                reason(&error)
            ));
        }
    }
}

/// Takes a line for whoever asks for a device.
pub type Warn<'a> = &'a dyn Fn(fmt::Arguments<'_>);

/// A device before its size is judged.
struct Opened {
    /// None in a dry run, where it would have to be made.
    file: Option<File>,
    name: String,
    size: Bytes,
    discards: bool,
    is_block_device: bool,
    header: bool,
    held: Option<u64>,
    has_holes: bool,
    made: Option<Made>,
}

impl Opened {
    /// With `dry` nothing is made.
    fn of(spec: &Spec, limit_bytes: u64, dry: bool, warn: Warn<'_>) -> Result<Self> {
        if let Some(size) = spec.size.filter(|size| *size > MOST) {
            bail!("--swap: size={size}: too large; the most that works is {MOST}");
        }
        let mut opened = match &spec.backing {
            Backing::Memory => Self::memory(spec, limit_bytes, dry, warn)?,
            Backing::Unnamed => Self::unnamed(&unnamed_directory()?, spec, dry, warn)?,
            Backing::Path(path) => match fs::symlink_metadata(path) {
                Ok(_) => Self::existing(path, spec, dry, warn)?,
                Err(error) if error.kind() == ErrorKind::NotFound => Self::new(path, spec, dry, warn)?,
                Err(error) => return Err(cannot(&path.display().to_string(), "be reached", &error)),
            },
        };
        is_enough(&opened.name, opened.size)?;
        opened.size = opened.size.min(MOST);
        let trunk = trunk_clusters(opened.size) * CLUSTER_SLOTS * PAGE;
        opened.size = Bytes(opened.size.0 / trunk * trunk);
        Ok(opened)
    }

    fn memory(spec: &Spec, limit_bytes: u64, dry: bool, warn: Warn<'_>) -> Result<Self> {
        let available = Bytes(memory::available_bytes());
        // What stays is there, too.
        let beside = Bytes(available.0.saturating_sub(limit_bytes).max(LEAST.0));
        let size = spec.size.unwrap_or(if limit_bytes == u64::MAX { available } else { beside });
        if size > available {
            warn(format_args!("mem: size={size} is more than there is of memory for this run, {available}"));
        }
        let file = match dry {
            true => None,
            false => {
                Some(sys::memfd(c"pageout-swap", size.0, false).map_err(|e| cannot("mem", "be made", &e))?)
            }
        };
        Ok(Self::ours(file, "mem".into(), size, None))
    }

    /// A file that only we can reach, by its descriptor.
    fn unnamed(directory: &Path, spec: &Spec, dry: bool, warn: Warn<'_>) -> Result<Self> {
        let name = format!("{} (unlinked file)", directory.display());
        let size = room_for(directory, &directory.display().to_string(), spec, 0, warn)?;
        let advice = "set TMPDIR to a directory on a disk, or name a file with --swap";
        let file = match dry {
            // A file may be written as well, but has nothing in it.
            true => sys::may_access(&directory.join("."), libc::W_OK | libc::X_OK).map(|()| None),
            false => unlinked(directory).and_then(|file| file.set_len(size.0).map(|()| Some(file))),
        };
        let file = file.map_err(|e| {
            anyhow!("{name}: cannot be made: {}; {}", reason(&e), too_large(&e).unwrap_or(advice))
        })?;
        Ok(Self::ours(file, name, size, None))
    }

    /// A file that is not there yet.
    fn new(path: &Path, spec: &Spec, dry: bool, warn: Warn<'_>) -> Result<Self> {
        let name = path.display().to_string();
        if is_missing_disk(path) {
            bail!("{name}: no such device; name one that lsblk shows, or a file elsewhere");
        }
        let directory = safe_directory(path).map_err(|why| wrong(&name, why))?;
        let size = room_for(directory, &name, spec, 0, warn)?;
        if dry {
            sys::may_access(directory, libc::W_OK).map_err(|e| cannot(&name, "be made", &e))?;
            return Ok(Self::ours(None, name, size, None));
        }
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .mode(0o600)
            .custom_flags(libc::O_NOFOLLOW | libc::O_CLOEXEC)
            .open(path)
            .map_err(|e| cannot(&name, "be made", &e))?;
        let about = file.metadata()?;
        device::write_in_place(&file);
        let made = Made {
            path: std::path::absolute(path)?,
            id: (about.dev(), about.ino()),
            file: Some(file.try_clone()?),
        };
        let taken = device::take(&file);
        if taken == Ok(false) {
            return Err(wrong(&name, IN_USE));
        }
        if !device::is_private(&file) {
            return Err(wrong(
                &name,
                format_args!("{SHARED}; mount that with umask=077, or name a file elsewhere"),
            ));
        }
        let size = Bytes(size.0.next_multiple_of(PAGE));
        if let Err(error) = file.set_len(size.0) {
            bail!("{name}: cannot grow to {size}: {}; give a smaller one with ,size=", reason(&error));
        }
        // Who is started again after we were killed takes what is left of it, unless nothing tells whether somebody uses it still.
        let header = taken.is_ok();
        if header {
            file.write_all_at(&header_page(size.0), 0).map_err(|e| cannot(&name, "be written", &e))?;
        }
        Ok(Self { header, ..Self::ours(Some(file), name, size, Some(made)) })
    }

    fn ours(file: Option<File>, name: String, size: Bytes, made: Option<Made>) -> Self {
        Self {
            file,
            name,
            size,
            discards: true,
            is_block_device: false,
            header: false,
            held: None,
            has_holes: false,
            made,
        }
    }

    /// A file or block device of the user's.
    fn existing(path: &Path, spec: &Spec, dry: bool, warn: Warn<'_>) -> Result<Self> {
        let name = path.display().to_string();
        let found = Found::open(path).map_err(|why| wrong(&name, why))?;
        let room = found.room();
        let Found { file, is_block_device, len, header, has_holes } = found;
        let header = header.is_some();
        if len == 0 && !dry {
            device::write_in_place(&file);
        }
        let size = match spec.size {
            Some(size) if (header || is_block_device) && size.0 > room => {
                bail!("{name}: size={size} is more than it has, {}; leave size= out", Bytes(room))
            }
            Some(size) if size.0 <= room => size,
            None if len > 0 => Bytes(room),
            _ => {
                let has = file.metadata()?.blocks() * 512;
                let size = room_for(path, &name, spec, has, warn)?;
                // What is refused stays as it was.
                is_enough(&name, size)?;
                if !dry {
                    file.set_len(size.0).map_err(|e| cannot(&name, "grow", &e))?;
                }
                size
            }
        };
        Ok(Self {
            file: Some(file),
            name,
            size,
            // A file that was given its room for good keeps it.
            discards: spec.discard || len == 0 || has_holes,
            is_block_device,
            header,
            held: (!is_block_device).then_some(room),
            has_holes,
            made: None,
        })
    }
}

/// Of a file that would not be ours alone.
const SHARED: &str = "others could read it on that file system";

/// Which file or disk it is, whatever its names: of one that is not there yet its directory, and its name there.
fn identity(spec: &Spec) -> Option<(u64, u64, Option<OsString>)> {
    let path = path_of(spec)?;
    if let Ok(about) = fs::metadata(&path) {
        let disk = about.file_type().is_block_device().then(|| about.rdev());
        return Some(disk.map_or((about.dev(), about.ino(), None), |disk| (disk, 0, None)));
    }
    let directory = fs::metadata(path.parent()?).ok()?;
    Some((directory.dev(), directory.ino(), path.file_name().map(OsString::from)))
}

/// The path of what has one.
fn path_of(spec: &Spec) -> Option<PathBuf> {
    match &spec.backing {
        Backing::Path(path) => std::path::absolute(path).ok(),
        Backing::Memory | Backing::Unnamed => None,
    }
}

/// How many clusters are in each trunk of a device of this size: a power of two.
fn trunk_clusters(size: Bytes) -> u64 {
    let share = size.0 / TRUNKS / (CLUSTER_SLOTS * PAGE);
    1 << share.clamp(1, TRUNK_CLUSTERS).ilog2()
}

fn is_enough(name: &str, size: Bytes) -> Result<()> {
    match size < LEAST {
        true => bail!("{name}: too small: {size}; the least that works is {LEAST}"),
        false => Ok(()),
    }
}

/// `NAME: why; what to do`.
fn wrong(name: &str, why: impl fmt::Display) -> anyhow::Error {
    anyhow!("{name}: {why}")
}

/// `NAME: cannot WHAT: why`.
fn cannot(name: &str, what: &str, error: &io::Error) -> anyhow::Error {
    let remedy = too_large(error).unwrap_or("name another with --swap");
    anyhow!("{name}: cannot {what}: {}; {remedy}", reason(error))
}

/// What to do about files that may be only so large.
fn too_large(error: &io::Error) -> Option<&'static str> {
    (error.raw_os_error() == Some(libc::EFBIG)).then_some("raise ulimit -f, or give less with size=")
}

/// The directory for files without a name.
fn unnamed_directory() -> Result<PathBuf> {
    match std::env::var_os("TMPDIR").filter(|dir| !dir.is_empty()) {
        Some(dir) => Ok(dir.into()),
        None => std::env::current_dir().map_err(|e| {
            anyhow!("working directory: {}; set TMPDIR, or name a file with --swap", reason(&e))
        }),
    }
}

fn unlinked(directory: &Path) -> io::Result<File> {
    device::unlinked(&sys::c_path(directory)?).map(File::from).map_err(|error| match error {
        OpenError::Refused(errno) => errno.into(),
        _ => io::Error::other(SHARED),
    })
}

/// How far a file at `place` may grow, by what it `has` of its room, the file system's free space and `size=`. Warns where that is
/// memory. `shown`: what the user named, which may not be there yet.
fn room_for(place: &Path, shown: &str, spec: &Spec, has: u64, warn: Warn<'_>) -> Result<Bytes> {
    let room = sys::file_system(place)
        .map_err(|e| anyhow!("{shown}: {}; name another place with --swap or TMPDIR", reason(&e)))?;
    if room.in_memory {
        let remedy = match spec.backing {
            Backing::Path(_) => "name a file on a disk",
            _ => "set TMPDIR to a directory on a disk, or name a file with --swap",
        };
        warn(format_args!("{shown}: on {}, so what is swapped out stays in memory; {remedy}", room.name));
    }
    let free = Bytes(room.free);
    if let Some(size) = spec.size {
        if size.0.saturating_sub(has) > free.0 {
            bail!("{shown}: size={size}, but its file system has only {free} free; free some, or give less");
        }
        return Ok(size);
    }
    let size = Bytes(room.room_unasked() / LEAST.0 * LEAST.0);
    if size < LEAST {
        let how = if free < LEAST { "free some" } else { "free some, or give size=64M" };
        bail!("{shown}: its file system has only {free} free; {how}, or name another place with --swap or TMPDIR");
    }
    Ok(size)
}
