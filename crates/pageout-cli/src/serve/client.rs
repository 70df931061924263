//! Who is connected to a run, who is served, and what is kept of them.

use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use anyhow::{anyhow, Result};
use pageout::api::{reason, Bytes};
use pageout::slot::Entry;
use pageout::stats::{Stats, STATS_BYTES, UNCOUNTED};
use pageout::wire::Message;

use crate::bequests::Bequest;
use crate::mounts::Mounts;
use crate::report::Counters;
use crate::say;
use crate::seats::Seats;
use crate::sys::{self, Mapping, PidFd};
use crate::tree::{self, Process};
use crate::trunks::Trunk;

/// A keeper that is there.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) socket: OwnedFd,
    /// Number of the process at the other end, as the kernel knows it.
    pub(super) peer: i32,
    /// Its user.
    pub(super) uid: u32,
    /// It is no keeper: it looks, or switches a device.
    pub(super) visits: bool,
    /// Set by `Hello`.
    pub(super) client: Option<Client>,
    /// Reason of the `Bye`, if it came.
    pub(super) bye: Option<u64>,
    /// Serial of the device that it switches off.
    pub(super) switching: Option<u64>,
    /// What it is to inherit, and whether somebody has left that is not known yet.
    pub(super) asks: Option<Asked>,
    /// It can say nothing more.
    pub(super) is_shut: bool,
}

impl Connection {
    /// Whether it could not be answered, and is there.
    pub(super) fn is_over(&self, answered: Result<()>) -> bool {
        let Err(error) = answered else { return false };
        match error.downcast_ref::<io::Error>().map(io::Error::kind) {
            // It ended before it had its answer.
            Some(io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset) => return false,
            // Who visits and does not read is not waited for.
            Some(io::ErrorKind::WouldBlock) if self.visits => {}
            _ => say::warning(format_args!("process {}: {error:#}; no longer served", self.peer)),
        }
        true
    }
}

/// A fork's child came before its parent was heard of what it has left, which was said before the child was made.
#[derive(Debug)]
pub(super) struct Asked {
    pub(super) number: u64,
    /// Whoever had said something by then has had a turn.
    pub(super) is_late: bool,
}

/// A process that is served.
#[derive(Debug)]
pub(super) struct Client {
    /// No other has it, ever; a process that executes another program is another client.
    pub(super) id: u64,
    pub(super) pid: i32,
    pub(super) name: String,
    /// The namespace of process numbers that it is in, if that is not ours.
    pub(super) namespace: Option<PathBuf>,
    pub(super) hold: Hold,
    pub(super) stats: Mapping,
    /// Its place among those that share the limit.
    pub(super) seat: Option<usize>,
    /// (device number, trunk).
    pub(super) lent: Vec<Trunk>,
    /// What it reads from.
    pub(super) inherited: Vec<Rc<Bequest>>,
    /// Devices that it was given and that are not gone from it, by their numbers; and those of them that it was told
    /// to let go.
    pub(super) has: u64,
    pub(super) told: u64,
    /// The registration of its memory, from `Holding` on.
    pub(super) held: Option<OwnedFd>,
    /// It was said that some of its data are lost, by a device or as it was to be unmapped, and that some could not be written.
    pub(super) told_loss: bool,
    pub(super) told_refusal: bool,
    pub(super) told_unwritten: bool,
}

impl Client {
    pub(super) fn has_ended(&self) -> bool {
        self.hold.has_ended()
    }

    /// As it calls itself now.
    pub(super) fn name_now(&self) -> String {
        let now = Process::of(self.pid).map(|process| process.name);
        // Its number may be another's by now.
        now.filter(|_| !self.has_ended()).unwrap_or_else(|| self.name.clone())
    }

    /// Why we cannot kill it, if so: it has become another user's. As long as we have its registration it reads no zeros.
    pub(super) fn why_not_killed(&self) -> Option<String> {
        let error = self.hold.send(0).err()?;
        Some(format!(
            "cannot be killed ({}), and waits where it touches what was swapped out, which reads as zeros once pageout has ended; kill it as root",
            reason(&error)
        ))
    }

    /// Is it in a PID namespace whose init ends? All others there, and its keepers, are killed by the kernel then.
    pub(super) fn ends_with_its_namespace(&self) -> bool {
        self.namespace.as_deref().is_some_and(tree::namespace_ends)
    }

    /// The memory is that of the process that its keeper, `peer`, calls so.
    pub(super) fn is_now(&mut self, said: u64, (peer, uid): (i32, u32)) -> Result<()> {
        let (pid, name, hold, namespace) = identify(said, peer)?;
        speaks_for(pid, uid)?;
        (self.pid, self.name, self.hold, self.namespace) = (pid, name, hold, namespace);
        Ok(())
    }

    /// Says once for each cause why it may get SIGBUS, and once why it may go beyond its limit. `keeper`, if it is there.
    pub(super) fn tell_of_errors(&mut self, keeper: Option<i32>, mounts: &Mounts) {
        let stats = self.stats.stats();
        let (lost, unwritten) = (stats.poisoned.load(Relaxed) > 0, stats.write_errors.load(Relaxed) > 0);
        if unwritten && !std::mem::replace(&mut self.told_unwritten, true) {
            let most = keeper.map(|pid| sys::limit_for(pid, libc::RLIMIT_FSIZE).0);
            let look = match most {
                Some(most) if most != libc::RLIM_INFINITY => {
                    let most = Bytes(most);
                    format!("it may write files up to {most}, and so swap, memory too: raise ulimit -Hf")
                }
                _ if mounts.iter().all(|(_, mount)| mount.device.is_memory()) => {
                    "swap is memory itself, and there may be no more of that: look at what the control group or the \
                     machine has left, or give a file with -s"
                        .into()
                }
                _ => "look whether its file system is full or read-only, and for errors of the disk (dmesg)"
                    .into(),
            };
            say::warning(format_args!(
                "{} ({}): some of its memory could not be written to swap and goes elsewhere, or stays, beyond the \
                 limit if need be; {look}",
                self.pid, self.name
            ));
        }
        if lost && !std::mem::replace(&mut self.told_loss, true) {
            let first = Entry::from_raw(stats.lost_at.load(Relaxed)).and_then(|entry| {
                let name = mounts.name_of(entry.device()?.index())?;
                Some(format!(" (first: {name} at byte {})", entry.offset_bytes()))
            });
            say::error(format_args!(
                "{} ({}): some of its memory cannot be read back from swap as it was{}, and raises SIGBUS where it is \
                 touched; look for errors of the disk (dmesg), and whether somebody changed a swap file",
                self.pid,
                self.name,
                first.unwrap_or_default()
            ));
        }
        let refused = stats.unmap_refused.load(Relaxed) > 0;
        if refused && !std::mem::replace(&mut self.told_refusal, true) {
            say::error(format_args!(
                "{} ({}): some of its memory is lost, and raises SIGBUS where it is touched: it was in swap when the \
                 kernel refused to unmap it; look where it unmaps, or maps over, what it has sealed (mseal), and raise \
                 ulimit -v",
                self.pid, self.name
            ));
        }
    }

    pub(super) fn counters(&self) -> Counters {
        Counters::of(self.stats.stats(), self.pid)
    }
}

/// A process, safe from the reuse of its number.
#[derive(Debug)]
pub(super) enum Hold {
    /// Readable when it has ended.
    Descriptor(PidFd),
    /// There was no room for a descriptor: as it was then.
    Sight(Process),
    /// It had ended already.
    Gone,
}

impl Hold {
    fn on(pid: i32, seen: Option<Process>) -> Result<Self> {
        Ok(match (PidFd::open(pid), seen) {
            (Ok(descriptor), _) => Self::Descriptor(descriptor),
            (Err(error), _) if error.raw_os_error() == Some(libc::ESRCH) => Self::Gone,
            (Err(_), Some(process)) => Self::Sight(process),
            (Err(error), None) => return Err(error.into()),
        })
    }

    pub(super) fn has_ended(&self) -> bool {
        match self {
            Self::Descriptor(descriptor) => descriptor.has_ended(),
            Self::Sight(process) => process.has_ended(),
            Self::Gone => true,
        }
    }

    /// Kills it, if it is there and may be killed.
    pub(super) fn kill(&self) {
        let _ = self.send(libc::SIGKILL);
    }

    fn send(&self, signal: i32) -> io::Result<()> {
        match self {
            Self::Descriptor(descriptor) => descriptor.kill(signal),
            Self::Sight(process) if !process.has_ended() => sys::kill(process.pid, signal),
            Self::Sight(_) | Self::Gone => Ok(()),
        }
    }

    /// To wait for its end.
    pub(super) fn descriptor(&self) -> Option<&PidFd> {
        match self {
            Self::Descriptor(descriptor) => Some(descriptor),
            Self::Sight(_) | Self::Gone => None,
        }
    }
}

/// A process that has no keeper any more and has not ended yet.
#[derive(Debug)]
pub(super) struct Leaving {
    pub(super) client: Client,
    /// When it is taken for stranded; none when it was killed already.
    pub(super) deadline: Option<Instant>,
}

/// May a keeper of user `uid` speak for a process? It is killed if its keeper ends without a word: another's is not his to kill.
pub(super) fn speaks_for(pid: i32, uid: u32) -> Result<()> {
    match uid == sys::euid() || tree::user_of(pid).is_none_or(|user| user == uid) {
        true => Ok(()),
        false => Err(anyhow!("of user {uid}, speaks for process {pid} of another")),
    }
}

/// The process that `peer` calls so: number, name, a hold on it, and its namespace if that is not ours.
fn identify(said: u64, peer: i32) -> Result<(i32, String, Hold, Option<PathBuf>)> {
    let said = i32::try_from(said).unwrap_or(0);
    // One whose number cannot be found out is watched by the one that speaks for it.
    let pid = tree::translate(said, peer).unwrap_or(peer);
    let process = Process::of(pid);
    let name = process.as_ref().map_or_else(|| "?".into(), |process| process.name.clone());
    // Who is in our namespace calls it as we do.
    let namespace = if pid == said { None } else { tree::namespace(pid) };
    Ok((pid, name, Hold::on(pid, process)?, namespace))
}

/// What is kept of a process that says hello, and the file of its counters.
pub(super) fn welcome(
    hello: &Message,
    peer: i32,
    seats: &mut Seats,
    id: u64,
) -> Result<(Client, std::fs::File)> {
    let (pid, name, hold, namespace) = identify(hello.a, peer)?;
    let (file, stats) = new_stats()?;
    let seat = seats.take();
    let (lent, inherited) = (Vec::new(), Vec::new());
    let client = Client {
        id,
        pid,
        name,
        namespace,
        hold,
        stats,
        seat,
        lent,
        has: 0,
        told: 0,
        inherited,
        held: None,
        told_loss: false,
        told_refusal: false,
        told_unwritten: false,
    };
    Ok((client, file))
}

pub(super) fn new_stats() -> io::Result<(std::fs::File, Mapping)> {
    let file = sys::memfd(c"pageout-stats", STATS_BYTES as u64, true)?;
    let mapping = Mapping::of(&file, STATS_BYTES)?;
    Stats::set(&mapping.stats().out_pages, UNCOUNTED);
    Ok((file, mapping))
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn who_is_held_by_sight_has_not_ended_until_it_has() {
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        let hold = Hold::Sight(Process::of(child.id() as i32).unwrap());
        assert!(!hold.has_ended());
        hold.kill();
        child.wait().unwrap();
        assert!(hold.has_ended());
    }
}
