//! Lines for the user about the run as a whole, each said once, or again when it is news.

use std::collections::HashSet;
use std::path::Path;
use std::time::{Duration, Instant};

use pageout::tree::SEATS;
use pageout::wire::{is_news, Message};

use super::Client;
use crate::say;

/// That the swap is full is said of one process for all, and again after so long.
const FULL_AGAIN: Duration = Duration::from_secs(60);
/// What those without a limit have is told of when it has been too much for so long.
const LASTING: Duration = Duration::from_secs(4);

/// What was said.
#[derive(Debug, Default)]
pub(super) struct Told {
    crowded: bool,
    nameless: bool,
    heirless: bool,
    seatless: bool,
    full: Option<Instant>,
    /// So many bytes were said to be more than the limit.
    over: u64,
    /// Programs that cannot be limited, by their names.
    unlimited: HashSet<String>,
    /// Devices, by their serials, and why somebody cannot use them.
    unusable: HashSet<(u64, String)>,
    /// Since when those without a limit have more than there is room for, and of how much of theirs that was said.
    outgrown: Option<Instant>,
    outgrown_bytes: u64,
}

impl Told {
    /// Was it said why a program of this name is not limited?
    pub(super) fn has_told_of(&self, name: &str) -> bool {
        self.unlimited.contains(name)
    }

    /// No more than so many processes can be served at a time.
    pub(super) fn crowded(&mut self, served: usize) {
        if !std::mem::replace(&mut self.crowded, true) {
            say::warning(format_args!(
                "{served} processes served, others wait until one has ended: too many open files; raise the limit (ulimit -n)"
            ));
        }
    }

    /// The run's socket has lost its name and cannot have it again.
    pub(super) fn nameless(&mut self, path: &Path, why: &anyhow::Error) {
        if !std::mem::replace(&mut self.nameless, true) {
            say::warning(format_args!(
                "{}: somebody has removed the run's socket, and it cannot be made again: {why:#}; what the run's processes \
                 execute from now on has no limit, and a fork brings all memory home",
                path.display()
            ));
        }
    }

    /// There is no seat for another process.
    pub(super) fn seatless(&mut self) {
        if !std::mem::replace(&mut self.seatless, true) {
            say::warning(format_args!(
                "more than {SEATS} processes: each one more may have all of the limit for itself"
            ));
        }
    }

    /// A bequest of this process cannot be kept.
    pub(super) fn heirless(&mut self, client: &Client, why: &anyhow::Error) {
        if !std::mem::replace(&mut self.heirless, true) {
            say::warning(format_args!(
                "{} ({}): the child of a fork cannot be given what is swapped out: {why:#}",
                client.pid, client.name
            ));
        }
    }

    /// `Kind::Unlimited`.
    pub(super) fn cannot_be_limited(&mut self, client: &Client, message: &Message) {
        if self.unlimited.insert(client.name.clone()) {
            let why = String::from_utf8_lossy(message.text());
            say::error(format_args!("{} ({}): cannot be limited: {why}", client.pid, client.name));
        }
    }

    /// `Kind::Unusable`, of the device of this name.
    pub(super) fn unusable(&mut self, client: &Client, message: &Message, device: Option<String>) {
        let why = String::from_utf8_lossy(message.text()).into_owned();
        if self.unusable.insert((message.a, why.clone())) {
            say::error(format_args!(
                "{} ({}): cannot use {}: {why}; what finds no room elsewhere stays, beyond the limit if need be",
                client.pid,
                client.name,
                device.unwrap_or_else(|| "a swap device".into())
            ));
        }
    }

    /// `Kind::Full`.
    pub(super) fn full(&mut self, client: &Client) {
        if self.full.is_none_or(|told| told.elapsed() >= FULL_AGAIN) {
            self.full = Some(Instant::now());
            say::warning(format_args!(
                "swap is full: {} ({}) grows beyond its limit; give more with -s, or pageout swapon",
                client.pid, client.name
            ));
        }
    }

    /// `Kind::Over`. All who have the same shared memory say so.
    pub(super) fn over(&mut self, client: &Client, message: &Message, limit: u64) {
        let has_settled = message.c != 0;
        if !is_news(self.over, message.a, has_settled) {
            return;
        }
        self.over = message.a;
        let so_far = if has_settled { "" } else { ", and more if it still grows" };
        let [stays, limit, least] = [message.a, limit, message.b].map(mib);
        say::warning(format_args!(
            "{} ({}): {stays} cannot go of its memory and of the others' in the run (shared or locked memory, files of others, \
             code, stacks and the like); that is over the limit of {limit}; give at least {least}{so_far}",
            client.pid, client.name
        ));
    }

    /// Of what those without a limit have (`bytes`), so much is more than there is room for.
    pub(super) fn outgrown(&mut self, beyond: u64, bytes: u64, limit: u64) {
        if beyond == 0 {
            self.outgrown = None;
            return;
        }
        let is_lasting = self.outgrown.get_or_insert_with(Instant::now).elapsed() >= LASTING;
        if is_lasting && is_news(self.outgrown_bytes, bytes, true) {
            self.outgrown_bytes = bytes;
            let [stays, limit, least] = [bytes, limit, limit + beyond].map(mib);
            say::warning(format_args!(
                "{stays} is with processes that this run does not limit; beside it the limit of {limit} leaves the others too \
                 little; give at least {least}"
            ));
        }
    }
}

/// In whole MiB, upwards.
fn mib(bytes: u64) -> String {
    format!("{}M", bytes.div_ceil(1 << 20))
}
