//! Devices that come and go while the run serves.
//!
//! A device comes: it is opened and given to all. A device goes: all who have it are told, and say when nothing of
//! theirs is on it; when nobody has it any more it is closed. Whoever switched it off waits for that; if he does not
//! (Ctrl-C), it stays: who still has it is told, who has let it go is given it again.

use std::cell::RefCell;
use std::fmt;
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::atomic::Ordering::Relaxed;

use anyhow::{anyhow, bail, Context, Result};
use pageout::api::{Backing, Bytes, Spec};
use pageout::wire::{Kind, Message};
use serde_json::Value;

use super::Server;
use crate::device::{Device, PAGE};
use crate::mounts::Mount;
use crate::runs::{DONE, REFUSED, UNDER_WAY};
use crate::say;
use crate::sys;
use crate::trunks::Trunk;

/// The most that somebody says about what to switch.
const MOST: u64 = 64 << 10;

impl Server {
    /// Does what a user asks for, or says why not.
    pub(super) fn switch(&mut self, index: usize, off: u64, fds: Vec<OwnedFd>) -> Result<()> {
        self.check_user(index)?;
        let what = fds.into_iter().next().map(File::from).context("said nothing")?;
        let what: Value = serde_json::from_slice(&sys::bytes_of(&what, MOST)?)?;
        let text = |key: &str| what[key].as_str().ok_or_else(|| anyhow!("said no {key}"));
        let done = match off {
            0 => self.switch_on(text("spec")?, text("path")?.into()).map(|warnings| (DONE, warnings)),
            _ => {
                let begun = self.switch_off(index, text("name")?, text("path")?.into());
                begun.map(|()| (UNDER_WAY, String::new()))
            }
        };
        match done {
            Ok((how, words)) => self.answer_switch(index, how, &words),
            Err(why) => self.answer_switch(index, REFUSED, &format!("{why:#}")),
        }
    }

    fn answer_switch(&self, index: usize, how: u64, words: &str) -> Result<()> {
        let file = sys::file_of(c"pageout-switched", words.as_bytes())?;
        let answer = Message::new(Kind::Switched, how, 0, 0);
        Ok(sys::send(self.connections[index].socket.as_fd(), answer.as_bytes(), &[file.as_fd()])?)
    }

    /// A device more. A path is the user's, from the root on: ours may be another directory. Returns lines for the user.
    fn switch_on(&mut self, spec: &str, path: PathBuf) -> Result<String> {
        let mut spec = Spec::parse(spec)?;
        if let Backing::Path(given) = &mut spec.backing {
            *given = path;
        }
        let serial = self.mounts.next_serial()?;
        let warnings = RefCell::new(String::new());
        let warn = |line: fmt::Arguments<'_>| warnings.borrow_mut().push_str(&format!("{line}\n"));
        let device = Device::open(&spec, self.settings.limit_bytes, serial as usize, &warn)?;
        let number = self.mounts.add(device);
        for index in 0..self.connections.len() {
            self.give(index, number);
        }
        Ok(warnings.into_inner())
    }

    /// Gives a process a device that it does not have.
    fn give(&mut self, index: usize, number: usize) {
        let connection = &mut self.connections[index];
        let (Some(client), Some(mount)) = (&mut connection.client, self.mounts.get_mut(number)) else {
            return;
        };
        if client.has & 1 << number != 0 {
            return;
        }
        let message = Message::on(number, &mount.device.settings);
        match sys::send(connection.socket.as_fd(), message.as_bytes(), &[mount.device.file.as_fd()]) {
            Ok(()) => {
                client.has |= 1 << number;
                client.told &= !(1 << number);
            }
            // It goes on with what it has.
            Err(error) => {
                say::debug(format_args!("{}: given no {}: {error}", client.pid, mount.device.name));
            }
        }
    }

    /// Begins to take a device off.
    fn switch_off(&mut self, index: usize, name: &str, path: PathBuf) -> Result<()> {
        if self.connections[index].switching.is_some() {
            bail!("{name}: one device after the other");
        }
        let number = self.mounts.named(name, &path)?;
        let (used, room) = self.room_without(number);
        if used > room {
            let with = if self.mounts.iter().any(|(_, mount)| mount.leaving) {
                " (with what goes already)"
            } else {
                ""
            };
            bail!(
                "{name}: {} of it in use{with}, and the other devices and the memory below the limit have room for {}; add a \
                 device first (pageout swapon)",
                Bytes(used),
                Bytes(room)
            );
        }
        let mount = self.mounts.get_mut(number).context("it went")?;
        mount.leaving = true;
        self.connections[index].switching = Some(mount.serial());
        Ok(())
    }

    /// What is on a device, and on those that are on their way off, and not in memory as well; in whole trunks where it is more
    /// than who has it can put elsewhere. And how much of that there is room for: on other devices, and below the limit.
    fn room_without(&self, number: usize) -> (u64, u64) {
        let mut needed = 0;
        let goes = |(of, mount): &(usize, &Mount)| *of == number || mount.leaving;
        let others = || self.mounts.iter().filter(|mount| !goes(mount));
        let whole = others().map(|(_, mount)| mount.device.trunk.0).max().unwrap_or(PAGE);
        for client in self.clients() {
            let pages = &client.stats.stats().device_pages;
            let on = |number: usize| pages[number].load(Relaxed) * PAGE;
            let spare: u64 = others()
                .map(|(other, mount)| {
                    let lent = client.lent.iter().filter(|(of, _)| *of == other).count() as u64;
                    (lent * mount.device.trunk.0).saturating_sub(on(other))
                })
                .sum();
            let there: u64 = self.mounts.iter().filter(goes).map(|(of, _)| on(of)).sum();
            // What is in memory as well needs no place elsewhere.
            let out = client.stats.stats().out_pages.load(Relaxed);
            needed += there.min(out.saturating_mul(PAGE)).saturating_sub(spare).next_multiple_of(whole);
        }
        // Processes that share slots since a fork name the same more than once.
        let lent: u64 = self.mounts.iter().filter(goes).map(|(_, mount)| mount.lent().0).sum();
        let free: u64 = others().map(|(_, mount)| mount.free_bytes()).sum();
        let below = self.settings.limit_bytes.saturating_sub(self.seats.tree().used());
        (needed.min(lent), free.saturating_add(below))
    }

    /// A process says that nothing of it is on a device, and that it is closed there.
    pub(super) fn gone_from(&mut self, index: usize, serial: u64) {
        let Some(number) = self.mounts.number_of(serial) else { return };
        let Some(client) = &mut self.connections[index].client else { return };
        client.has &= !(1 << number);
        client.told &= !(1 << number);
        let (gone, kept): (Vec<Trunk>, _) = client.lent.iter().partition(|(of, _)| *of == number);
        client.lent = kept;
        self.bequests.forget(&gone);
        self.mounts.take_back(gone);
        if self.mounts.get_mut(number).is_some_and(|mount| !mount.leaving) {
            // It was too late to tell it that the device stays.
            self.give(index, number);
        }
    }

    /// A device that was on its way off stays.
    pub(super) fn stay(&mut self, serial: u64) {
        let Some(number) = self.mounts.number_of(serial) else { return };
        if let Some(mount) = self.mounts.get_mut(number) {
            mount.leaving = false;
        }
        for index in 0..self.connections.len() {
            let connection = &mut self.connections[index];
            let Some(client) = &mut connection.client else { continue };
            if client.told & 1 << number != 0 {
                client.told &= !(1 << number);
                // If it cannot be told it lets the device go, says so, and is given it again.
                let message = Message::new(Kind::Stay, number as u64, serial, 0);
                let _ = sys::send(connection.socket.as_fd(), message.as_bytes(), &[]);
            }
            self.give(index, number);
        }
    }

    /// Tells who has a device that is on its way off, and closes what nobody has any more.
    pub(super) fn settle_switches(&mut self) {
        let leaving: Vec<(usize, u64)> = self
            .mounts
            .iter()
            .filter(|(_, mount)| mount.leaving)
            .map(|(number, mount)| (number, mount.serial()))
            .collect();
        for (number, serial) in leaving {
            let bit = 1 << number;
            for connection in &mut self.connections {
                let Some(client) = &mut connection.client else { continue };
                if client.has & !client.told & bit != 0 {
                    let message = Message::new(Kind::Off, number as u64, serial, 0);
                    // Who does not listen now is told the next time.
                    if sys::send(connection.socket.as_fd(), message.as_bytes(), &[]).is_ok() {
                        client.told |= bit;
                    }
                }
            }
            // A fork's child that has not come yet may inherit something there.
            if self.clients().any(|client| client.has & bit != 0) || self.bequests.is_awaited_on(number) {
                continue;
            }
            // Trunks of the dead from which children read, who have nothing there any more either.
            self.mounts.take_back(self.bequests.give_up(number));
            if self.mounts.get_mut(number).is_some_and(|mount| !mount.is_settled()) {
                continue;
            }
            drop(self.mounts.remove(number));
            for index in 0..self.connections.len() {
                if self.connections[index].switching == Some(serial) {
                    self.connections[index].switching = None;
                    // It may have gone just now.
                    let _ = self.answer_switch(index, DONE, "");
                }
            }
        }
    }
}
