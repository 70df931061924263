//! The user's running trees: finding them by their sockets, and asking them.
//!
//! Only the user's own runtime directories are looked into, and only if nobody else can change what is there.

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use anyhow::{anyhow, bail, Context, Result};
use pageout::wire::{Kind, Message};
use serde_json::Value;

use crate::directory;
use crate::say;
use crate::sys;
use crate::tree;
use crate::view::View;

/// How long a run may take to answer. It answers at once unless it is stopped.
const PATIENCE: Duration = Duration::from_secs(2);

/// What became of a switch, as a run says it.
pub const DONE: u64 = 0;
pub const REFUSED: u64 = 1;
pub const UNDER_WAY: u64 = 2;

/// The same, understood.
#[derive(Debug)]
pub enum Switched {
    /// It is done, and lines about it.
    Done(String),
    /// It is begun.
    UnderWay,
    /// It is not done, and why.
    Refused(String),
}

/// A connection to a run.
#[derive(Debug)]
pub struct Run {
    socket: OwnedFd,
    /// Its process number.
    pub pid: i32,
}

impl Run {
    /// Says what to switch; the answers come by [`Run::switched`].
    pub fn switch(&self, off: bool, what: &Value) -> Result<()> {
        let file = sys::file_of(c"pageout-switch", what.to_string().as_bytes())?;
        let message = Message::new(Kind::Switch, off.into(), 0, 0);
        match self.send(&message, &[file.as_fd()])? {
            true => Ok(()),
            false => bail!("the tree has ended"),
        }
    }

    /// What became of it so far; waits.
    pub fn switched(&self) -> Result<Switched> {
        let (message, fds) = match self.hear(None)? {
            Some((Kind::Switched, message, fds)) => (message, fds),
            _ => bail!("the tree has ended, or is of another version of pageout"),
        };
        let mut words = String::new();
        File::from(fds.into_iter().next().context("no answer")?).read_to_string(&mut words)?;
        Ok(match message.a {
            DONE => Switched::Done(words),
            UNDER_WAY => Switched::UnderWay,
            _ => Switched::Refused(words),
        })
    }

    /// What there is to see; none once the run has ended.
    pub fn look(&self) -> Result<Option<View>> {
        let Some((Kind::View, _, fds)) = self.ask(&Message::new(Kind::Look, 0, 0, 0))? else {
            return Ok(None);
        };
        let file = fds.into_iter().next().context("no answer")?;
        View::read(File::from(file)).map(Some)
    }

    /// Asks, and waits for the answer; none once the run has ended.
    fn ask(&self, question: &Message) -> Result<Option<(Kind, Message, Vec<OwnedFd>)>> {
        match self.send(question, &[])? {
            true => self.hear(Some(Instant::now() + PATIENCE)),
            false => Ok(None),
        }
    }

    /// Says something; false if the run has ended, also if it did before it knew of this connection (a reset).
    fn send(&self, message: &Message, fds: &[BorrowedFd<'_>]) -> Result<bool> {
        match sys::send(self.socket.as_fd(), message.as_bytes(), fds) {
            Ok(()) => Ok(true),
            Err(error) => match error.kind() {
                io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => Ok(false),
                _ => Err(error.into()),
            },
        }
    }

    /// The next message.
    fn hear(&self, deadline: Option<Instant>) -> Result<Option<(Kind, Message, Vec<OwnedFd>)>> {
        loop {
            let patience = deadline.map(|at| at.saturating_duration_since(Instant::now()));
            sys::poll(&[(self.socket.as_fd(), libc::POLLIN)], patience)?;
            let mut message = Message::new(Kind::Bye, 0, 0, 0);
            return match sys::receive(self.socket.as_fd(), message.as_bytes_mut()) {
                Ok((0, _)) => Ok(None),
                Ok((_, fds)) => {
                    let kind = Kind::from_raw(message.kind).ok_or_else(|| anyhow!("another version"))?;
                    Ok(Some((kind, message, fds)))
                }
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => Ok(None),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    if deadline.is_some_and(|at| Instant::now() >= at) {
                        bail!(
                            "no answer: it is stopped (continue it: kill -CONT {}), or serves as many processes as it may have \
                             open files for (ulimit -n)",
                            self.pid
                        );
                    }
                    continue;
                }
                Err(error) => Err(error.into()),
            };
        }
    }

    /// Waits, at most until `deadline`, for the run to say something unasked, or to end; whether it did.
    pub fn stirs_before(&self, deadline: Instant) -> Result<bool> {
        let patience = deadline.saturating_duration_since(Instant::now());
        let ready = sys::poll(&[(self.socket.as_fd(), libc::POLLIN)], Some(patience))?;
        Ok(ready[0] != 0)
    }
}

/// Those that answer; of those that do not, the process number and what to say.
type Found = (Vec<(Run, View)>, Vec<(i32, String)>);

/// Every run of the user; if the process of a number is in one by birth, that one alone: another may be stopped.
fn all(number: Option<i32>) -> Result<Found> {
    let (mut connected, mut runs, mut silent) = (Vec::new(), Vec::new(), Vec::new());
    let mut entries = Vec::new();
    for (directory, reach) in directory::runtimes().into_iter().filter(|(directory, _)| directory.exists()) {
        directory::check(&directory, reach)?;
        entries.extend(fs::read_dir(&directory).with_context(|| directory.display().to_string())?);
    }
    for entry in entries {
        let path = entry?.path();
        // What refuses is left of a run that was killed.
        let Ok(socket) = sys::connect_to(&path) else { continue };
        let Ok((pid, uid)) = sys::peer_of(socket.as_fd()) else { continue };
        if uid == sys::euid() {
            connected.push(Run { socket, pid });
        }
    }
    let bore = |run: &Run| number.is_some_and(|pid| tree::descends_from(pid, run.pid));
    if connected.iter().any(bore) {
        connected.retain(bore);
    }
    for run in connected {
        let pid = run.pid;
        match run.look() {
            Ok(Some(view)) => runs.push((run, view)),
            // It ended just now, or is of a version that knows no such question.
            Ok(None) => say::info(format_args!("run {pid}: has ended, or is of another version")),
            Err(error) => silent.push((pid, format!("run {pid}: {error:#}"))),
        }
    }
    runs.sort_by_key(|(run, _)| run.pid);
    Ok((runs, silent))
}

/// The runs that `--run` means: all without it, else those that the number or name fits, at least one.
pub fn chosen(id: Option<&str>) -> Result<Vec<(Run, View)>> {
    let (runs, silent) = choose(id)?;
    leave_out(&silent);
    Ok(runs)
}

fn leave_out(silent: &[String]) {
    silent.iter().for_each(|why| say::warning(format_args!("{why}; left out")));
}

/// Runs that are meant, and what to say of those that do not answer.
type Chosen = (Vec<(Run, View)>, Vec<String>);

fn choose(id: Option<&str>) -> Result<Chosen> {
    let number = id.and_then(|id| id.parse::<i32>().ok());
    let (runs, silent) = all(number)?;
    let is_meant = |run: i32| number.is_some_and(|pid| tree::descends_from(pid, run));
    if let Some((_, why)) = silent.iter().find(|(run, _)| is_meant(*run)) {
        bail!("{why}");
    }
    let silent: Vec<String> = silent.into_iter().map(|(_, why)| why).collect();
    let Some(id) = id else { return Ok((runs, silent)) };
    let is_number = |run: &(Run, View)| number.is_some_and(|pid| has(run, pid));
    let is_outer =
        |run: i32, all: &[i32]| all.iter().any(|inner| *inner != run && tree::descends_from(*inner, run));
    let found: Vec<_> = match runs.iter().any(is_number) {
        // What is in a run inside a run is in both.
        true => {
            let both: Vec<_> = runs.iter().filter(|run| is_number(run)).map(|(run, _)| run.pid).collect();
            runs.into_iter().filter(|(run, _)| both.contains(&run.pid) && !is_outer(run.pid, &both)).collect()
        }
        false => runs.into_iter().filter(|(_, view)| view.is_named(id)).collect(),
    };
    if found.is_empty() {
        leave_out(&silent);
        bail!("--run {}: no tree of yours has such a process or program; see pageout ps", say::shown(id));
    }
    Ok((found, silent))
}

/// The one run that `--run` means, or the only one.
pub fn one(id: Option<&str>) -> Result<(Run, View)> {
    let (mut runs, silent) = choose(id)?;
    if let ([], [why]) = (&runs[..], &silent[..]) {
        bail!("{why}");
    }
    leave_out(&silent);
    if runs.len() > 1 {
        let names: Vec<String> =
            runs.iter().map(|(run, view)| format!("{} ({})", run.pid, view.program)).collect();
        bail!("{} trees are running: {}; choose one with --run PID", runs.len(), names.join(", "));
    }
    runs.pop().ok_or_else(|| {
        let looked: Vec<String> =
            directory::runtimes().iter().map(|(directory, _)| directory.display().to_string()).collect();
        anyhow!("no tree of yours is running (no socket in {})", looked.join(", "))
    })
}

/// Whether a process is of this tree, or runs it. A tree in a container may have other numbers.
fn has((run, view): &(Run, View), pid: i32) -> bool {
    let known = [run.pid, view.run, view.main].contains(&pid);
    known || view.processes.iter().any(|process| process.pid() == pid) || tree::descends_from(pid, run.pid)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_that_ends_before_it_takes_a_connection_has_ended() {
        let path = std::env::temp_dir().join(format!("pageout-runs-{}", std::process::id()));
        let listener = sys::listen_at(&path).unwrap();
        let run = || Run { socket: sys::connect_to(&path).unwrap(), pid: 1 };
        let (looks, switches) = (run(), run());
        drop(listener);
        fs::remove_file(&path).unwrap();
        assert!(looks.look().unwrap().is_none());
        let why = switches.switch(true, &serde_json::json!({})).unwrap_err();
        assert_eq!(why.to_string(), "the tree has ended");
    }
}
