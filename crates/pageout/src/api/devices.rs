//! The devices of a `Swap`: what a specification says, opened.
//!
//! Everything is opened on the engine's thread, into the engine's own file table: what the program closes does not reach it.

use super::found::{c_path, is_missing_disk, Found};
use super::memory::MemoryDevice;
use super::spec::{Backing, NotASpec, Spec};
use super::{Bytes, Error};
use crate::device::{write_in_place, Device, FileDevice, FileOptions, FileSystem, OpenError};
use crate::slot::{DeviceConfig, SLOT_BYTES, TRUNK_SLOTS};
use crate::swap::Lessor;
use crate::sync::{Lock, OTHER_LOCKS};
use core::ops::Range;
use std::boxed::Box;
use std::path::{Path, PathBuf};
use std::string::{String, ToString};
use std::vec::Vec;
use std::{env, format, fs};

/// Room is given out in pieces of this size; a device has at least one.
const TRUNK_BYTES: u64 = TRUNK_SLOTS * SLOT_BYTES;

/// A device that is asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Asked {
    /// As users know it.
    text: String,
    spec: Spec,
}

impl Asked {
    /// A file without a name in `$TMPDIR`, else in the working directory.
    pub(super) fn unnamed() -> Self {
        Self { text: "(unlinked file)".into(), spec: Spec::unnamed() }
    }

    pub(super) fn parse(text: &str) -> Result<Self, Error> {
        let spec = Spec::parse(text).map_err(|NotASpec { spec, why }| Error::Spec { spec, why })?;
        Ok(Self { text: text.into(), spec })
    }

    /// Opens what the specification names; `index` is its place in the row of devices.
    pub(super) fn open(&self, index: usize) -> Result<Opened, Error> {
        let (device, header) = match &self.spec.backing {
            Backing::Memory => {
                let size = self.spec.size.unwrap_or_else(available_memory);
                self.is_enough(size.0)?;
                let device =
                    MemoryDevice::new(size.0 as usize).map_err(|errno| self.refused(errno.into()))?;
                let size = device.len() as u64;
                return self.opened(index, Box::new(device), size, 0);
            }
            Backing::Unnamed => (self.create_temporary()?, None),
            Backing::Path(path) if path.symlink_metadata().is_ok() => self.open_existing(path)?,
            Backing::Path(path) => (self.create(path)?, None),
        };
        let room = match header {
            Some(room) => room,
            None => device.size().map_err(|errno| self.refused(errno.into()))?,
        };
        let size = self.spec.size.unwrap_or(Bytes(room));
        if size.0 > room {
            let of = if header.is_some() { "its swap header is for" } else { "it has" };
            return Err(self.wrong(format!("size={size}, but {of} {}; give less, or none", Bytes(room))));
        }
        self.opened(index, Box::new(device), size.0, header.is_some().into())
    }

    fn opened(&self, index: usize, device: Box<dyn Device>, size: u64, first: u64) -> Result<Opened, Error> {
        self.is_enough(size)?;
        let config = DeviceConfig {
            // Like the kernel: devices without a priority come after those with one, in their order.
            priority: self.spec.priority.unwrap_or(-2 - index as i32),
            rotational: self.spec.rotational,
            discard: self.spec.discard || self.spec.backing == Backing::Memory,
            first,
            ..DeviceConfig::new(0)
        };
        Ok(Opened { config, device, trunks: (size / TRUNK_BYTES).min(u32::MAX.into()) as u32 })
    }

    fn is_enough(&self, size: u64) -> Result<(), Error> {
        if size < TRUNK_BYTES {
            let (size, least) = (Bytes(size), Bytes(TRUNK_BYTES));
            return Err(self.wrong(format!("has room for {size}; give at least {least}")));
        }
        Ok(())
    }

    fn create_temporary(&self) -> Result<FileDevice, Error> {
        let directory = match env::var_os("TMPDIR").filter(|directory| !directory.is_empty()) {
            Some(directory) => PathBuf::from(directory),
            None => PathBuf::from("."),
        };
        self.create_unlinked(&directory, directory.display().to_string(), true)
    }

    /// For a file that is not there, one without a name: it would go again at once, and who opens the same meanwhile would find it
    /// in use.
    fn create(&self, path: &Path) -> Result<FileDevice, Error> {
        if is_missing_disk(path) {
            return Err(self.wrong("no such device; name one that lsblk shows, or a file elsewhere".into()));
        }
        let directory = match path.parent() {
            Some(parent) if parent != Path::new("") => parent,
            _ => Path::new("."),
        };
        self.create_unlinked(directory, self.text.clone(), false)
    }

    /// A file without a name, which is called `name` if it is refused.
    fn create_unlinked(&self, directory: &Path, name: String, unasked: bool) -> Result<FileDevice, Error> {
        let size = self.room_in(directory, unasked)?;
        FileDevice::create_unlinked(&c_path(directory), size, FileOptions::default())
            .map_err(|error| Error::Device { name, why: error.to_string() })
    }

    /// A user's file or disk, and the bytes that its header speaks of.
    fn open_existing(&self, path: &Path) -> Result<(FileDevice, Option<u64>), Error> {
        let found = Found::open(path).map_err(|why| self.wrong(why))?;
        let (room, header, has_holes) = (found.room(), found.header, found.has_holes);
        let is_file = !found.is_block_device;
        if room == 0 {
            write_in_place(&found.file);
        }
        let mut device = FileDevice::from_fd(found.file.into(), FileOptions::default())
            .map_err(|error| self.refused(error))?;
        if is_file {
            // What was in memory is not to be found there, and would be taken for its owner's data the next time.
            let first = header.map_or(0, |_| SLOT_BYTES);
            device.empty_at_end(first..room, has_holes);
        }
        if room == 0 {
            let size = self.room_in(path, false)?;
            device.set_size(size).map_err(|errno| self.refused(errno.into()))?;
        }
        Ok((device, header))
    }

    /// How large a file of ours may be on the file system of `path`.
    fn room_in(&self, path: &Path, unasked: bool) -> Result<u64, Error> {
        let shown = path.display().to_string();
        let wrong = |why: String| Error::Device { name: shown.clone(), why };
        let system =
            FileSystem::of_path(&c_path(path)).map_err(|errno| wrong(OpenError::from(errno).to_string()))?;
        if unasked && system.in_memory {
            let why = format!("is {}, so memory too; name a file on a disk, or mem", system.name);
            return Err(wrong(why));
        }
        match self.spec.size {
            Some(Bytes(size)) if size > system.free => {
                let (size, free) = (Bytes(size), Bytes(system.free));
                Err(wrong(format!("size={size}, but only {free} are free; free some, or give less")))
            }
            Some(Bytes(size)) => Ok(size),
            None => Ok(system.room_unasked()),
        }
    }

    fn wrong(&self, why: String) -> Error {
        Error::Device { name: self.text.clone(), why }
    }

    fn refused(&self, error: OpenError) -> Error {
        self.wrong(error.to_string())
    }
}

/// A device that is open.
pub(super) struct Opened {
    pub(super) config: DeviceConfig,
    pub(super) device: Box<dyn Device>,
    pub(super) trunks: u32,
}

/// Nobody shares our devices: trunks are given in order until the end.
pub(super) struct Trunks {
    devices: Lock<Vec<Room>>,
}

struct Room {
    next: u32,
    end: u32,
    returned: Vec<u32>,
}

impl Trunks {
    pub(super) fn of(devices: &[Opened]) -> Self {
        let room = |device: &Opened| Room { next: 0, end: device.trunks, returned: Vec::new() };
        Self { devices: Lock::new(devices.iter().map(room).collect(), &OTHER_LOCKS) }
    }
}

impl Lessor for Trunks {
    fn lease(&self, device: usize) -> Option<Range<u32>> {
        let room = &mut self.devices.lock()[device];
        let trunk = room.returned.pop().or_else(|| {
            let trunk = (room.next < room.end).then_some(room.next)?;
            room.next += 1;
            Some(trunk)
        })?;
        Some(trunk..trunk + 1)
    }

    fn give_back(&self, device: usize, trunk: u32) -> bool {
        self.devices.lock()[device].returned.push(trunk);
        true
    }
}

/// What the machine could give without harm, by the kernel's guess.
fn available_memory() -> Bytes {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let kib = text
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))
        .and_then(|rest| rest.trim().trim_end_matches(" kB").parse::<u64>().ok());
    Bytes(kib.unwrap_or(TRUNK_BYTES >> 10) << 10)
}
