//! The devices of the run in this process: they come and go by what run says, whether the engine works or not.
//!
//! The first thread listens; it waits for no page, but for a device that comes to be opened, which is read once. A thread of its
//! own, made when it is first needed, brings home what is on a device that is to go, and tells run when it has gone. So run hears
//! one `Gone` for each device given.

use crate::keeper::Keeper;
use crate::link::{Link, Unasked};
use crate::{sys, task};
use alloc::boxed::Box;
use core::sync::atomic::Ordering;
use pageout::device::{FileDevice, FileOptions};
use pageout::slot::DeviceConfig;
use pageout::swap::swapin::Incoming;
use pageout::swap::vacate::Vacated;
use pageout::swap::Place;
use pageout::wire::{self, DeviceSettings, Kind, Message, DEVICES};
use rustix::fd::OwnedFd;

/// How long (ns) to wait when nothing can come home just now: at first, and at most. It may be long: what children of
/// forks read stays until they have ended.
const STUCK_NS: u64 = 1_000_000;
const LONGEST_NS: u64 = 200_000_000;

/// What run gave, by device number.
pub struct Devices {
    settings: [DeviceSettings; DEVICES],
    state: [State; DEVICES],
    /// There is a thread that clears devices.
    clears: bool,
}

enum State {
    /// None, or one that is the engine's affair.
    None,
    /// The engine does not work yet. Without a descriptor where that did not come: the process may have hardly any.
    Waiting(Option<OwnedFd>),
    /// It could not be used. Run hears of its end all the same.
    Failed,
}

impl Devices {
    /// Those that there are at the start.
    pub fn new(settings: [DeviceSettings; DEVICES], fds: [Option<OwnedFd>; DEVICES]) -> Self {
        let mut fds = fds.into_iter();
        let state = settings.map(|device| {
            let fd = fds.next().flatten();
            if device.slots > 0 {
                State::Waiting(fd)
            } else {
                State::None
            }
        });
        Self { settings, state, clears: false }
    }

    /// The engine begins to work.
    pub fn open_all(&mut self, place: &Place, link: &Link) {
        (0..DEVICES).for_each(|number| self.open(number, place, link));
    }

    fn open(&mut self, number: usize, place: &Place, link: &Link) {
        let State::Waiting(fd) = core::mem::replace(&mut self.state[number], State::None) else { return };
        let settings = &self.settings[number];
        let config = DeviceConfig {
            priority: settings.priority,
            discard: settings.flags & wire::DISCARDS != 0,
            rotational: settings.flags & wire::ROTATIONAL != 0,
            slots: 0,
            first: u64::from(settings.flags & wire::HEADER != 0),
            trunk_clusters: settings.trunk_clusters.into(),
        };
        let failed = match fd.map(|fd| FileDevice::from_fd(fd, FileOptions::default())) {
            None => Some("too many open files; raise the limit (ulimit -n)".into()),
            Some(Ok(device)) => place
                .swapon(number, settings.serial as usize, config, Box::new(device))
                .err()
                .map(|error| alloc::format!("{error}")),
            Some(Err(error)) => Some(alloc::format!("{error}")),
        };
        if let Some(why) = failed {
            self.state[number] = State::Failed;
            link.tell(&Message::with_text(Kind::Unusable, settings.serial, why.as_bytes()), None);
        }
    }

    /// Does what run said. `keeper`: if the engine works.
    pub fn listen(&mut self, (message, fd): Unasked, link: &Link, keeper: Option<&'static Keeper>) {
        if message.kind == Kind::Short as u32 {
            if let Some(keeper) = keeper {
                keeper.is_short.store(true, Ordering::Relaxed);
                keeper.engine.kick();
            }
            return;
        }
        let number = message.a as usize;
        if number >= DEVICES {
            return;
        }
        let is_it = self.settings[number].serial == message.b;
        match (Kind::from_raw(message.kind), fd, message.device()) {
            (Some(Kind::On), fd, Some(settings)) => {
                self.settings[number] = settings;
                self.state[number] = State::Waiting(fd);
                if let Some(keeper) = keeper {
                    self.open(number, &keeper.engine.place, link);
                    keeper.engine.kick();
                }
            }
            (Some(Kind::Off), ..) if is_it => match (&self.state[number], keeper) {
                // If the engine has none, its thread has said so.
                (State::None, Some(keeper)) => {
                    if keeper.engine.place.swapoff_begin(number) {
                        self.clear(keeper);
                    }
                }
                (State::None, None) => {}
                (State::Waiting(_) | State::Failed, _) => {
                    self.state[number] = State::None;
                    link.tell(&Message::new(Kind::Gone, message.a, message.b, 0), None);
                }
            },
            (Some(Kind::Stay), ..) if is_it => {
                if let Some(keeper) = keeper {
                    keeper.engine.place.swapoff_cancel(number);
                }
            }
            // Needed: who hears of it looks, as after each message.
            _ => {}
        }
    }

    fn clear(&mut self, keeper: &'static Keeper) {
        if !self.clears {
            // SAFETY: the keeper lives as long as its process, and `clear` never returns.
            let started = unsafe { task::start(task::Kind::Thread, clear, keeper as *const Keeper as usize) };
            match started {
                Ok(_) => self.clears = true,
                Err(errno) => keeper.link.log(0, format_args!("no thread to clear a swap device: {errno}")),
            }
        }
        keeper.clearing.ring();
    }
}

/// The thread that clears devices.
extern "C" fn clear(keeper: usize) -> ! {
    // SAFETY: see `Devices::clear`.
    let keeper = unsafe { &*(keeper as *const Keeper) };
    let mut incoming = Box::new(Incoming::new());
    sys::go_first();
    let mut patience = STUCK_NS;
    loop {
        let rung = keeper.clearing.heard();
        let (mut moved, mut stuck) = (false, false);
        for number in 0..DEVICES {
            match keeper.engine.vacate(&mut incoming, number) {
                Vacated::Gone(serial) => {
                    keeper.link.tell(&Message::new(Kind::Gone, number as u64, serial as u64, 0), None);
                }
                Vacated::Some => moved = true,
                Vacated::Stuck => stuck = true,
                Vacated::Not => {}
            }
        }
        if moved {
            patience = STUCK_NS;
        } else {
            keeper.clearing.wait(rung, if stuck { patience } else { 1_000_000_000 });
            patience = if stuck { (2 * patience).min(LONGEST_NS) } else { STUCK_NS };
        }
    }
}
