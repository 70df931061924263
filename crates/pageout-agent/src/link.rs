//! The keeper's end of the connection to `pageout run`. See `pageout::wire` for what is said.
//!
//! One request at a time, under a lock. The socket is read by who has just asked, and by the first thread for what run
//! says unasked; what comes before an answer is kept for it.

use crate::sys::call6;
use crate::{proc, sys};
use alloc::vec::Vec;
use core::ops::Range;
use core::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, Ordering::Relaxed};
use linux_raw_sys as raw;
use pageout::swap::Lessor;
use pageout::sync::{Lock, OTHER_LOCKS};
use pageout::wire::{Kind, Message, Settings, ANY_USER, BYE_STOP, DEVICES, NONE};
use rustix::event::{poll, PollFd, PollFlags, Timespec};
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::{
    self, AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};
use rustix::process::{geteuid, getuid};

/// The connection.
pub struct Link {
    socket: OwnedFd,
    turn: Lock<()>,
    /// What run said unasked while somebody waited for an answer.
    kept: Lock<Vec<Unasked>>,
    /// Run is not there any more.
    deaf: AtomicBool,
}

/// What run says unasked, with the descriptor that came along.
pub type Unasked = (Message, Option<OwnedFd>);

/// What comes with a `Welcome` at most.
const MOST_FDS: usize = DEVICES + 3;

/// Whose run it was that this process, or the one that it was forked from, found: its user, or [`NOBODY`].
static RUN_USER: AtomicU32 = AtomicU32::new(NOBODY);
/// What no user has as number, and what is asked about one that has none in our namespace (the kernel's default).
const NOBODY: u32 = u32::MAX;
const UNMAPPED: u32 = 65534;

/// Whether who listens may have what is in our memory: the name is where others may have made one (another root, /tmp).
fn is_trusted(socket: &OwnedFd) -> bool {
    let Some(user) = listener(socket) else { return false };
    let is_known = user == RUN_USER.load(Relaxed);
    let own = [getuid(), geteuid()].map(|own| own.as_raw());
    // In a namespace without its user nothing more is told of it.
    if !(is_known || user == 0 || own.contains(&user) || user == UNMAPPED && lacks_users()) {
        return false;
    }
    RUN_USER.store(user, Relaxed);
    true
}

/// The user who listens. By hand: the process may be 0, in another namespace, for which the crate's type has no room.
fn listener(socket: &OwnedFd) -> Option<u32> {
    let mut found = [0u32; 3];
    let mut len = size_of_val(&found) as u32;
    let [level, name] = [raw::net::SOL_SOCKET, raw::net::SO_PEERCRED].map(|it| it as usize);
    let into = [&raw mut found as usize, &raw mut len as usize, 0];
    let arguments = [socket.as_raw_fd() as usize, level, name, into[0], into[1], into[2]];
    // SAFETY: the kernel writes a `struct ucred`, three numbers.
    unsafe { call6(raw::general::__NR_getsockopt, arguments) }.ok()?;
    Some(found[1])
}

/// Whether this is a user namespace in which not every user has a number.
fn lacks_users() -> bool {
    let mut text = [0; 64];
    let map = proc::opened(c"/proc/self/uid_map");
    let all = map.as_ref().and_then(|map| proc::word(proc::read(map, &mut text)?, 2));
    all.is_some_and(|all| all < u64::from(u32::MAX))
}

/// The connection's descriptor for a last word from anywhere; -1 without one.
static LAST_WORD: AtomicI32 = AtomicI32::new(-1);

/// What a run told at the start.
pub struct Welcome {
    /// Limit, devices, options.
    pub settings: Settings,
    /// The page of counters.
    pub stats: OwnedFd,
    /// What all processes of the run use, and the seat of this one.
    pub tree: OwnedFd,
    /// See `tree`.
    pub seat: Option<usize>,
    /// `/dev/userfaultfd`, where run serves any user's processes.
    pub userfaultfd: Option<OwnedFd>,
    /// The devices, in the order of the settings.
    pub devices: [Option<OwnedFd>; DEVICES],
}

impl Link {
    /// Connects and introduces the keeper of `program`.
    ///
    /// # Errors
    /// The kernel's; PROTO when the answer is none that this version knows.
    pub fn connect(path: &[u8], program: u32) -> Result<(Self, Welcome), Errno> {
        let socket =
            net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        net::connect(&socket, &SocketAddrUnix::new(path)?)?;
        if !is_trusted(&socket) {
            return Err(Errno::ACCESS);
        }
        let kept = Lock::new(Vec::with_capacity(32), &OTHER_LOCKS);
        let link = Self { socket, turn: Lock::new((), &OTHER_LOCKS), kept, deaf: AtomicBool::new(false) };
        let hello = Message::new(Kind::Hello, program as u64, 0, pageout::wire::VERSION);
        link.send(&hello, None)?;
        let mut fds: [Option<OwnedFd>; MOST_FDS] = Default::default();
        let answer = link.receive(&mut fds, RecvFlags::empty())?;
        let settings = answer.settings().ok_or(Errno::PROTO)?;
        let [stats, tree, rest @ ..] = fds;
        let mut rest = rest.into_iter();
        let userfaultfd = if settings.flags & ANY_USER != 0 { rest.next().flatten() } else { None };
        let devices = settings.device.map(|device| if device.slots > 0 { rest.next()? } else { None });
        // What was sent with it found no numbers.
        let (stats, tree) = stats.zip(tree).ok_or(Errno::MFILE)?;
        let seat = (answer.a != NONE).then_some(answer.a as usize);
        LAST_WORD.store(link.socket.as_raw_fd(), Relaxed);
        Ok((link, Welcome { settings, stats, tree, seat, userfaultfd, devices }))
    }

    /// The socket.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    fn send(&self, message: &Message, with: Option<BorrowedFd<'_>>) -> Result<(), Errno> {
        let mut space = [core::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        let fds = with.map(|fd| [fd]);
        if let Some(fds) = &fds {
            ancillary.push(SendAncillaryMessage::ScmRights(fds));
        }
        let bytes = [rustix::io::IoSlice::new(message.as_bytes())];
        loop {
            match net::sendmsg(self.fd(), &bytes, &mut ancillary, SendFlags::NOSIGNAL) {
                Ok(_) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno),
            }
        }
    }

    fn receive(&self, fds: &mut [Option<OwnedFd>], flags: RecvFlags) -> Result<Message, Errno> {
        let mut message = Message::new(Kind::Bye, 0, 0, 0);
        let mut space = [core::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_FDS))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let mut bytes = [rustix::io::IoSliceMut::new(message.as_bytes_mut())];
        let got = loop {
            match net::recvmsg(self.fd(), &mut bytes, &mut ancillary, flags | RecvFlags::CMSG_CLOEXEC) {
                // Run has ended and left something of ours unread: said once, before what it has said itself (unix(7)).
                Err(Errno::INTR | Errno::CONNRESET) => {}
                got => break got?,
            }
        };
        let mut slots = fds.iter_mut();
        for part in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = part {
                for fd in rights {
                    if let Some(slot) = slots.next() {
                        *slot = Some(fd);
                    }
                }
            }
        }
        if got.bytes != size_of::<Message>() {
            return Err(Errno::CONNRESET);
        }
        Ok(message)
    }

    /// Tells something that needs no answer.
    pub fn tell(&self, message: &Message, with: Option<BorrowedFd<'_>>) {
        let _turn = self.turn.lock();
        // A run that is gone does not mind.
        let _ = self.send(message, with);
    }

    /// Gives something away; false if nobody is there to take it.
    pub fn give(&self, message: &Message, what: BorrowedFd<'_>) -> bool {
        let _turn = self.turn.lock();
        self.send(message, Some(what)).is_ok()
    }

    /// Asks for what the parent left.
    pub fn inherit(&self, token: u64) -> Option<OwnedFd> {
        let (answer, file) = self.ask(&Message::new(Kind::Inherit, token, 0, 0), Kind::Bequest)?;
        file.filter(|_| answer.a == token)
    }

    /// Asks, and waits for the answer; what run says unasked before it is kept.
    fn ask(&self, question: &Message, answer: Kind) -> Option<Unasked> {
        let _turn = self.turn.lock();
        self.send(question, None).ok()?;
        loop {
            let mut fds = [None];
            let message = self.receive(&mut fds, RecvFlags::empty()).ok()?;
            if Kind::from_raw(message.kind) == Some(answer) {
                return Some((message, fds[0].take()));
            }
            self.kept.lock().push((message, fds[0].take()));
        }
    }

    /// Is run there, to be asked and to be found?
    pub fn has_run(&self) -> bool {
        let gone = PollFlags::HUP | PollFlags::ERR;
        let mut socket = [PollFd::new(&self.socket, gone)];
        let seen = poll(&mut socket, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }));
        seen.is_ok() && !socket[0].revents().intersects(gone)
    }

    /// Would what comes now be unasked? Not while somebody waits for an answer, nor when run is gone.
    pub fn is_quiet(&self) -> bool {
        !self.deaf.load(Relaxed) && self.turn.try_lock().is_some()
    }

    /// The next that run said unasked, if there is any; `is_some`: there may be some to be read. Waits for nobody.
    pub fn heard(&self, is_some: bool) -> Option<Unasked> {
        // What is kept came before what is still to be read.
        let turn = self.turn.try_lock();
        {
            let mut kept = self.kept.lock();
            if !kept.is_empty() {
                return Some(kept.remove(0));
            }
        }
        // Who waits for an answer keeps what comes first.
        let _turn = turn.filter(|_| is_some)?;
        let mut fds = [None];
        match self.receive(&mut fds, RecvFlags::DONTWAIT) {
            Ok(message) => Some((message, fds[0].take())),
            Err(Errno::AGAIN) => None,
            Err(_) => {
                self.deaf.store(true, Relaxed);
                None
            }
        }
    }

    /// Logs a line at a level (0 error to 3 debug).
    pub fn log(&self, level: u64, text: core::fmt::Arguments<'_>) {
        let line = alloc::fmt::format(text);
        self.tell(&Message::with_text(Kind::Log, level, line.as_bytes()), None);
    }
}

/// Sends a line and the end from wherever a bug was found; takes no lock and allocates nothing. False: there is no connection yet.
pub fn last_word(text: core::fmt::Arguments<'_>) -> bool {
    let fd = LAST_WORD.load(Relaxed);
    if fd < 0 {
        return false;
    }
    let mut message = Message::with_text(Kind::Log, 0, b"");
    message.len = sys::write_line(&mut message.text, text) as u32;
    // SAFETY: open as long as the keeper lives.
    let socket = unsafe { BorrowedFd::borrow_raw(fd) };
    for part in [message, Message::new(Kind::Bye, BYE_STOP, 0, 0)] {
        let _ = net::send(socket, part.as_bytes(), SendFlags::NOSIGNAL);
    }
    true
}

impl Lessor for &'static Link {
    fn lease(&self, serial: usize) -> Option<Range<u32>> {
        let question = Message::new(Kind::Lease, serial as u64, 0, 0);
        let (answer, _) = self.ask(&question, Kind::Leased)?;
        (answer.a == serial as u64 && answer.b != NONE)
            .then_some(answer.b as u32..(answer.b + answer.c) as u32)
    }

    fn give_back(&self, serial: usize, trunk: u32) -> bool {
        let _turn = self.turn.lock();
        self.send(&Message::new(Kind::Return, serial as u64, trunk as u64, 0), None).is_ok()
    }
}
