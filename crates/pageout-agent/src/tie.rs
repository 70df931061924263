//! Ties the program's life to its keeper's: without it what is out would read as zeros, once nobody has the registration any
//! more. Run has it too, and kills the program with a word when a keeper dies; but run may have been killed as well, or have
//! ended before a daemon.
//!
//! So the kernel does it: as the keeper ends, however, its sockets are closed, and of a pair that is closed last sends
//! SIGKILL (F_SETSIG) to who it belongs to (F_SETOWN). That must come before the registration goes, which lets everybody go on
//! who waits for a page: whichever way through its descriptors the kernel closes them, there is a pair on this side of it.

use linux_raw_sys::general as raw;
use rustix::fd::{AsRawFd, BorrowedFd, OwnedFd};
use rustix::fs::{fcntl_setfl, OFlags};
use rustix::io::{fcntl_dupfd_cloexec, Errno};
use rustix::net::{socketpair, AddressFamily, SocketFlags, SocketType};

use crate::sys;

/// Connected with each other only.
type Pair = [OwnedFd; 2];

fn pair() -> Result<Pair, Errno> {
    // Not a pipe: what its user may have of these is little, and then all of them are slow.
    let (one, other) = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    Ok([one, other])
}

/// What ties the two; nothing happens before [`Tie::to`].
pub struct Tie {
    before: Pair,
    behind: Option<Pair>,
}

impl Tie {
    /// To be made before the registration.
    pub fn new() -> Result<Self, Errno> {
        Ok(Self { before: pair()?, behind: None })
    }

    /// From here on `program` is killed when this process ends, before what `registration` keeps goes.
    pub fn to(&mut self, program: u32, registration: BorrowedFd<'_>) -> Result<(), Errno> {
        if self.behind.is_none() {
            let behind = |end: &OwnedFd| fcntl_dupfd_cloexec(end, registration.as_raw_fd() + 1);
            let [one, other] = pair()?;
            self.behind = Some([behind(&one)?, behind(&other)?]);
        }
        self.ends().try_for_each(|end| {
            let set = |what: u32, to: usize| {
                // SAFETY: takes numbers.
                unsafe { sys::call(raw::__NR_fcntl, end.as_raw_fd() as usize, what as usize, to, 0) }
            };
            set(raw::F_SETOWN, program as usize)?;
            set(raw::F_SETSIG, raw::SIGKILL as usize)?;
            fcntl_setfl(end, OFlags::from_bits_retain(raw::FASYNC))
        })
    }

    /// Nobody is killed any more.
    pub fn undo(&self) {
        let _ = self.ends().try_for_each(|end| fcntl_setfl(end, OFlags::empty()));
    }

    fn ends(&self) -> impl Iterator<Item = &OwnedFd> {
        self.before.iter().chain(self.behind.iter().flatten())
    }
}
