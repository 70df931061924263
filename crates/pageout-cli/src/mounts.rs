//! The devices of a run, by their numbers, and who may still have trunks of them. One owner, the server; no locks.
//!
//! A number is used again when its device has gone from all processes; a serial never is, so that what a process says
//! of a device that has gone meanwhile is not taken for the one that came after it.

use std::collections::VecDeque;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;

use anyhow::{anyhow, bail, Result};
use pageout::api::Bytes;
use pageout::wire::{DeviceSettings, Settings, DEVICES};

use crate::device::Device;
use crate::trunks::{Trunk, Trunks};

/// Lent at once, as long as a process gets no more than this part of what is left.
const AT_ONCE: Bytes = Bytes(64 << 20);
const PLENTY: u64 = 64;

/// The devices.
#[derive(Debug)]
pub struct Mounts {
    by_number: [Option<Mount>; DEVICES],
    next_serial: u64,
}

/// One of them.
#[derive(Debug)]
pub struct Mount {
    /// The device; its settings have its serial.
    pub device: Device,
    /// It is on its way off: nobody is given trunks of it.
    pub leaving: bool,
    trunks: Trunks,
    /// Came back, and are to be given back to the device before they are lent again: what it has to do for that may take
    /// long, and others wait for their answers.
    returning: VecDeque<u64>,
}

impl Mount {
    fn new(device: Device) -> Self {
        let trunks = Trunks::new(device.trunks);
        Self { device, leaving: false, trunks, returning: VecDeque::new() }
    }

    /// Tells it from all others that ever were.
    pub fn serial(&self) -> u64 {
        self.device.settings.serial
    }

    /// What processes have of it.
    pub fn lent(&self) -> Bytes {
        Bytes((self.trunks.lent() - self.returning.len() as u64) * self.device.trunk.0)
    }

    /// What can still be lent.
    pub fn free_bytes(&self) -> u64 {
        if self.leaving {
            return 0;
        }
        self.device.trunks * self.device.trunk.0 - self.lent().0
    }

    /// Has what came back been given back?
    pub fn is_settled(&self) -> bool {
        self.returning.is_empty()
    }

    /// Gives one trunk that came back to the device, which also waits for writes of the dead, and then to others; false if
    /// there was none.
    fn settle_one(&mut self) -> bool {
        let Some(trunk) = self.returning.pop_front() else { return false };
        self.device.discard(trunk);
        self.trunks.take_back(trunk);
        true
    }

    /// Lends one that is free, and up to `most` with those that follow it.
    fn lend(&mut self, most: u64) -> Option<Range<u64>> {
        loop {
            match self.trunks.lend(most) {
                None if self.settle_one() => {}
                lent => return lent,
            }
        }
    }
}

impl Mounts {
    /// Those of the start, whose serials are their places in the row.
    pub fn new(devices: Vec<Device>) -> Self {
        let mut mounts = Self { by_number: [const { None }; DEVICES], next_serial: 0 };
        for device in devices {
            mounts.add(device);
        }
        mounts
    }

    /// Each with its number.
    pub fn iter(&self) -> impl Iterator<Item = (usize, &Mount)> {
        self.by_number.iter().enumerate().filter_map(|(number, mount)| Some((number, mount.as_ref()?)))
    }

    /// What the device of a number is called.
    pub fn name_of(&self, number: usize) -> Option<String> {
        self.by_number.get(number)?.as_ref().map(|mount| mount.device.shown())
    }

    /// The serial that the next one has, if there can be another.
    pub fn next_serial(&self) -> Result<u64> {
        match self.by_number.iter().any(Option::is_none) {
            true => Ok(self.next_serial),
            false => bail!("{DEVICES} swap devices are on; swapoff one first"),
        }
    }

    /// Another one, which has the next serial; its number.
    pub fn add(&mut self, mut device: Device) -> usize {
        let number = self.by_number.iter().position(Option::is_none).expect("there is a number");
        assert_eq!(device.settings.serial, self.next_serial);
        if device.path.is_none() {
            let taken = |name: &String| self.iter().any(|(_, other)| other.device.name == *name);
            let numbered = (2..).map(|n| format!("{}{n}", device.name));
            let name = std::iter::once(device.name.clone()).chain(numbered).find(|name| !taken(name));
            device.name = name.expect("there is a name");
        }
        device.is_on = true;
        self.next_serial += 1;
        self.by_number[number] = Some(Mount::new(device));
        number
    }

    /// It has gone from all processes.
    pub fn remove(&mut self, number: usize) -> Option<Mount> {
        self.by_number[number].take()
    }

    /// The number of a device that is there.
    pub fn number_of(&self, serial: u64) -> Option<usize> {
        self.iter().find(|(_, mount)| mount.serial() == serial).map(|(number, _)| number)
    }

    /// The device of this number.
    pub fn get_mut(&mut self, number: usize) -> Option<&mut Mount> {
        self.by_number[number].as_mut()
    }

    /// The number of the device that users call so.
    pub fn named(&self, name: &str, path: &Path) -> Result<usize> {
        let real = path.canonicalize().ok();
        let is_it = |device: &Device| {
            let is_path = |own: &Path| own == path || real.is_some() && own.canonicalize().ok() == real;
            device.shown() == name || device.path.as_deref().is_some_and(is_path)
        };
        let found = self.iter().find(|(_, mount)| is_it(&mount.device));
        let found =
            found.ok_or_else(|| anyhow!("{name}: the tree has no such swap device; see pageout show"))?;
        match found.1.leaving {
            true => bail!("{name}: on its way off already; wait until it has gone"),
            false => Ok(found.0),
        }
    }

    /// What a process is told that comes now, and which devices that gives it.
    pub fn settings(&self, settings: &Settings) -> (Settings, u64) {
        let mut settings = Settings { device: [DeviceSettings::default(); DEVICES], ..*settings };
        let mut given = 0;
        // Those that are leaving too: who is a fork's child may have inherited something there. It is told at once.
        for (number, mount) in self.iter() {
            settings.device[number] = mount.device.settings;
            given |= 1 << number;
        }
        (settings, given)
    }

    /// The files of the devices `given`, by number.
    pub fn files(&self, given: u64) -> impl Iterator<Item = BorrowedFd<'_>> {
        let given = self.iter().filter(move |(number, _)| given & 1 << number != 0);
        given.map(|(_, mount)| mount.device.file.as_fd())
    }

    /// Lends trunks of the device of this serial to a process that has the devices `has`: number and trunks. While there
    /// is plenty they are several, so that it need not ask often; what it does not use others are given when they ask.
    pub fn lend(&mut self, serial: u64, has: u64) -> Result<Option<(usize, Range<u64>)>> {
        if serial >= self.next_serial {
            bail!("asked for a device that there is not ({serial})");
        }
        // It may have gone since the process asked.
        let number = self.number_of(serial).filter(|number| has & 1 << number != 0);
        Ok(number.and_then(|number| {
            let mount = self.by_number[number].as_mut().filter(|mount| !mount.leaving)?;
            let size = mount.device.trunk.0;
            let share = (mount.free_bytes() / PLENTY).min(AT_ONCE.0) / size;
            let mut lent = mount.lend(share)?;
            let reserved = mount.device.reserve(&lent);
            (reserved..lent.end).for_each(|trunk| mount.trunks.take_back(trunk));
            lent.end = reserved;
            (!lent.is_empty()).then_some((number, lent))
        }))
    }

    /// Closes them, at the end, without a change to what they hold.
    pub fn leave_as_they_are(&mut self) {
        self.by_number.iter_mut().flatten().for_each(|mount| mount.device.leave_as_it_is());
    }

    /// Takes trunks back that were lent.
    pub fn take_back(&mut self, lent: impl IntoIterator<Item = Trunk>) {
        for (number, trunk) in lent {
            let mount = self.by_number[number].as_mut().expect("a device with trunks lent is there");
            mount.returning.push_back(trunk);
        }
    }

    /// Is there nothing to be given back to a device?
    pub fn are_settled(&self) -> bool {
        self.iter().all(|(_, mount)| mount.is_settled())
    }

    /// Gives to disks, at the end, what came back; files are emptied as a whole, or go.
    pub fn settle_disks(&mut self) {
        let disks = self.by_number.iter_mut().flatten().filter(|mount| mount.device.is_block_device);
        disks.for_each(|mount| while mount.settle_one() {});
    }

    /// Gives a trunk of each that came back to the devices.
    pub fn settle_some(&mut self) {
        self.by_number.iter_mut().flatten().for_each(|mount| {
            mount.settle_one();
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pageout::api::Spec;

    #[test]
    fn what_came_back_is_lent_again_once_it_has_been_given_back() {
        let spec = Spec::parse("mem,size=64M").unwrap();
        let mut mounts = Mounts::new(vec![Device::open(&spec, 1 << 30, 0, &|_| ()).unwrap()]);
        let lend = |mounts: &mut Mounts| mounts.lend(0, 1).unwrap().map(|(_, lent)| lent.start);
        let all: Vec<u64> = std::iter::from_fn(|| lend(&mut mounts)).collect();
        assert_eq!(all.len() as u64, mounts.by_number[0].as_ref().unwrap().device.trunks);
        mounts.take_back([(0, 3), (0, 5)]);
        let mount = mounts.by_number[0].as_ref().unwrap();
        assert_eq!((mount.free_bytes(), mount.is_settled()), (2 * mount.device.trunk.0, false));
        // Who asks does not wait for all of it.
        assert_eq!((lend(&mut mounts), mounts.are_settled()), (Some(3), false));
        mounts.settle_some();
        assert_eq!((mounts.are_settled(), lend(&mut mounts), lend(&mut mounts)), (true, Some(5), None));
    }
}
