//! The server of a run: gives each process its settings and trunks, and looks after what it leaves.
//!
//! One thread, one `poll`. A connection is a keeper's life sign. When it ends, what it was lent goes back, except
//! while the process may still use it or wait for it: then the server holds on, the userfaultfd included, until the
//! process has gone. Giving the userfaultfd up earlier would let the process read zeros where its data was.
//!
//! Never waits for a process: sends and receives do not block, so one that is stopped stops nobody else.

use std::collections::HashSet;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use anyhow::{anyhow, Context, Result};
use pageout::api::Bytes;
use pageout::wire::{Kind, Message, Settings, BYE_ASIDE, BYE_EXEC, BYE_STOP, NONE, VERSION};

use self::client::{new_stats, speaks_for, welcome, Asked, Client, Connection, Leaving};
pub use self::listener::probe_socket;
use self::listener::{is_below_us, listen, Listener};
use self::told::Told;
use crate::bequests::Bequests;
use crate::device::{Device, PAGE};
use crate::directory::Reach;
use crate::memory::{self, OomKills};
use crate::mounts::Mounts;
use crate::report::Report;
use crate::say;
use crate::seats::Seats;
use crate::sys;
use crate::tree::{self, Process};
use crate::trunks::Trunk;
use crate::unlimited::{Unlimited, Why};
use crate::view::{DeviceView, ProcessView, State, View};

mod client;
mod listener;
mod switch;
mod told;

/// Descriptors that a process takes here (socket, pidfd, userfaultfd, and what it leaves to a fork's child), and that the
/// server itself does.
pub const OPEN_FILES_EACH: usize = 4;
pub const OWN_OPEN_FILES: usize = 32;
/// How long a process whose keeper has gone may take to go too, before it is taken for stranded.
const GRACE: Duration = Duration::from_secs(1);
/// So many messages of one keeper are heard, and so many new ones taken in, before the others have their turn.
const IN_TURN: usize = 64;
/// Who finds no room for another connection tries again after so long.
const CROWDED: Duration = Duration::from_millis(100);
/// Between two calls for empty trunks.
const CALL_AGAIN: Duration = Duration::from_millis(100);

/// The server.
#[derive(Debug)]
pub struct Server {
    listener: Listener,
    /// No more connections can be taken, until then or until somebody has gone; those that wait, wait.
    crowded_until: Option<Instant>,
    /// Descriptors that we may have.
    open_files: usize,
    /// What was said to the user.
    told: Told,
    connections: Vec<Connection>,
    leaving: Vec<Leaving>,
    /// How many clients there were.
    welcomed: u64,
    /// All that was said before (in ticks, `sys::ticks`) had been heard when what is being heard now was said.
    heard: u64,
    /// Somebody was not heard to the end.
    has_more: bool,
    unlimited: Unlimited,
    mounts: Mounts,
    bequests: Bequests,
    settings: Settings,
    /// `/dev/userfaultfd`, if any user's processes are served.
    device_for_all: Option<OwnedFd>,
    seats: Seats,
    /// Somebody got no trunk, and when all were last asked for those that they do not need.
    is_short: bool,
    called_in: Instant,
    /// What the kernel has killed for want of memory since the run began.
    oom_kills: Option<OomKills>,
    report: Report,
    /// The program that the run is for: number and name.
    program: (i32, String),
    /// Who is not of the run.
    strangers: HashSet<i32>,
    started: Instant,
}

/// What the server waits for, in the order in which `poll` is asked.
enum Watched {
    Listener,
    Connection(usize),
    Leaving,
}

impl Server {
    /// A server that listens in the user's runtime directory, or, with `/dev/userfaultfd`, in that for any user's processes.
    pub fn start(devices: Vec<Device>, settings: Settings, device_for_all: Option<OwnedFd>) -> Result<Self> {
        let listener = listen(if device_for_all.is_some() { Reach::Any } else { Reach::Own })?;
        let page = new_stats().context("counters")?.1;
        Ok(Self {
            listener,
            crowded_until: None,
            open_files: sys::limit_of(libc::RLIMIT_NOFILE).0 as usize,
            told: Told::default(),
            connections: Vec::new(),
            leaving: Vec::new(),
            welcomed: 0,
            heard: 0,
            has_more: false,
            unlimited: Unlimited::new(settings.limit_bytes),
            mounts: Mounts::new(devices),
            bequests: Bequests::default(),
            report: Report::new(page.stats(), settings.limit_bytes),
            seats: Seats::new(settings.limit_bytes).context("counters")?,
            settings,
            device_for_all,
            is_short: false,
            called_in: Instant::now(),
            oom_kills: OomKills::watch(),
            program: (0, String::new()),
            strangers: HashSet::new(),
            started: Instant::now(),
        })
    }

    /// What processes find in PAGEOUT_RUN.
    pub fn socket_path(&self) -> &Path {
        &self.listener.path
    }

    /// The program that the run is for.
    pub fn set_main(&mut self, pid: i32, name: String) {
        self.report.set_main(pid);
        self.program = (pid, name);
    }

    /// Processes that are not of the run, though they may be our children.
    pub fn set_strangers(&mut self, strangers: HashSet<i32>) {
        self.strangers = strangers;
    }

    /// All who are served.
    fn clients(&self) -> impl Iterator<Item = &Client> {
        let connected = self.connections.iter().filter_map(|connection| connection.client.as_ref());
        connected.chain(self.leaving.iter().map(|leaving| &leaving.client))
    }

    /// All that there is to see.
    fn view(&self) -> View {
        let used = |index: usize| {
            let pages = self.clients().map(|client| client.stats.stats().device_pages[index].load(Relaxed));
            pages.sum::<u64>() * PAGE
        };
        let of = |client: &Client, state| {
            ProcessView::of(client.pid, client.name_now(), state, client.stats.stats())
        };
        let connected =
            self.connections.iter().filter_map(|c| c.client.as_ref()).map(|client| of(client, None));
        let leaving = self.leaving.iter().map(|leaving| of(&leaving.client, Some(State::Ending)));
        let unlimited = self.unlimited.living(|why| why != Why::Elsewhere);
        let unlimited = unlimited.into_iter().map(ProcessView::unlimited);
        let mut processes: Vec<ProcessView> = connected.chain(leaving).chain(unlimited).collect();
        processes.sort_by_key(ProcessView::pid);
        View {
            run: std::process::id() as i32,
            main: self.program.0,
            program: self.program.1.clone(),
            uptime_seconds: self.started.elapsed().as_secs_f64(),
            limit_bytes: self.settings.limit_bytes,
            devices: self.mounts.iter().map(|(number, mount)| DeviceView::of(mount, used(number))).collect(),
            processes,
            ended: self.report.total().json(),
        }
    }

    /// The counters so far; whole once nobody is served any more.
    pub fn report(&mut self) -> &mut Report {
        &mut self.report
    }

    /// Processes that are accounted for: those that are served or need not be, their keepers, and who is not of the run.
    pub fn known(&self) -> HashSet<i32> {
        let clients = self.clients().map(|client| client.pid);
        let keepers =
            self.connections.iter().filter(|c| c.client.is_some()).map(|connection| connection.peer);
        let aside = self.unlimited.living(|why| why == Why::Aside).into_iter().map(|process| process.pid);
        clients.chain(keepers).chain(aside).chain(self.strangers.iter().copied()).collect()
    }

    /// These have no keeper of ours, and get none: what they have counts.
    pub fn cannot_limit(&self, found: Vec<(Process, Why)>) {
        found.into_iter().for_each(|(process, why)| self.unlimited.add(process, why));
    }

    /// Whether it was said why a program of this name is not limited.
    pub fn has_told_of(&self, name: &str) -> bool {
        self.told.has_told_of(name)
    }

    /// How many processes are served that have not ended.
    pub fn living(&self) -> usize {
        self.clients().filter(|client| !client.has_ended()).count()
    }

    /// Whether no keeper is connected, and every process that had one is gone.
    pub fn is_idle(&self) -> bool {
        self.connections.iter().all(|connection| connection.visits) && self.leaving.is_empty()
    }

    /// Whether a fork's child may still come for what it inherits: one that was killed meanwhile does not.
    pub fn awaits_heirs(&mut self) -> bool {
        self.bequests.awaited() > 0 && tree::has_children_but(&self.known())
    }

    /// Lets no more children be made that would have something to inherit, at an instant when none is on its way; whether none is.
    /// Their parents take for given what is only sent, and a child that does not get it is killed: a fork fails from here on.
    pub fn has_no_heirs(&mut self) -> bool {
        // Who is connected and is one was made after its parent had sent what it left, and nobody is let in meanwhile.
        if !self.hear_all() || self.bequests.awaited() > 0 {
            return false;
        }
        let served = |connection: &&mut Connection| connection.client.is_some() && !connection.is_shut;
        for connection in self.connections.iter_mut().filter(served) {
            sys::receive_no_more(connection.socket.as_fd());
            connection.is_shut = true;
        }
        // What was sent before that comes with a child that has yet to connect.
        while !self.hear_all() {}
        let is_shut = |connection: &&Connection| connection.is_shut;
        let parents = self.connections.iter().filter(is_shut).filter_map(|c| c.client.as_ref());
        parents.for_each(|client| self.bequests.parent_ended(client.id));
        self.bequests.awaited() == 0
    }

    /// Hears each, as in its turn; whether nobody has said more. Who has ended is parted from when that is heard again.
    fn hear_all(&mut self) -> bool {
        self.has_more = false;
        (0..self.connections.len()).for_each(|index| _ = self.hear(index));
        !self.has_more
    }

    /// Serves until `others` has something to read, or `timeout`; true if `others` has.
    pub fn serve(&mut self, others: BorrowedFd<'_>, timeout: Option<Duration>) -> io::Result<bool> {
        let now = Instant::now();
        let judgement = self.leaving.iter().filter_map(|l| l.deadline).min();
        let judgement = judgement.map(|at| at.saturating_duration_since(now));
        self.crowded_until = self.crowded_until.filter(|until| *until > now);
        let crowded = self.crowded_until.map(|until| until - now);
        let settling = (!self.mounts.are_settled()).then_some(Duration::ZERO);
        let asking = self.connections.iter().any(|c| c.asks.is_some()).then_some(Duration::ZERO);
        let due = [Some(self.seats.due_in()), self.bequests.due_in(), crowded, settling, asking];
        let timeout = timeout.into_iter().chain(judgement).chain(due.into_iter().flatten()).min();

        let mut watched = vec![(others, libc::POLLIN)];
        let mut what = Vec::new();
        if self.crowded_until.is_none() {
            watched.push((self.listener.socket.as_fd(), libc::POLLIN));
            what.push(Watched::Listener);
        }
        for (index, connection) in self.connections.iter().enumerate().filter(|(_, c)| !c.is_shut) {
            watched.push((connection.socket.as_fd(), libc::POLLIN));
            what.push(Watched::Connection(index));
        }
        for pidfd in self.leaving.iter().filter_map(|l| l.client.hold.descriptor()) {
            watched.push((pidfd.as_fd(), libc::POLLIN));
            what.push(Watched::Leaving);
        }
        // What comes from here on is heard at once, or the next time.
        let before = sys::ticks();
        let ready = sys::poll(&watched, timeout)?;

        self.has_more = false;
        let mut ended = Vec::new();
        let mut accept = false;
        for (watched, _) in what.iter().zip(&ready[1..]).filter(|(_, ready)| **ready != 0) {
            match watched {
                Watched::Listener => accept = true,
                Watched::Connection(index) => {
                    if !self.hear(*index) {
                        ended.push(*index);
                    }
                }
                Watched::Leaving => {}
            }
        }
        if !self.has_more {
            self.heard = before;
        }
        self.answer_heirs(&mut ended);
        // From the last to the first, so that the numbers stay right.
        for index in ended.into_iter().rev() {
            let connection = self.connections.swap_remove(index);
            self.part_from(connection);
        }
        self.judge_leaving();
        if self.bequests.due_in().is_some_and(|due| due.is_zero()) {
            self.seek_heirs();
            self.take_back([]);
        }
        self.call_in();
        self.mounts.settle_some();
        self.settle_switches();
        self.share_out();
        if accept {
            self.accept();
        }
        Ok(ready[0] != 0)
    }

    /// Takes in who knocks, as long as there are descriptors for all that a process takes: who must wait waits in its
    /// call to connect, or for the welcome, and knows of nothing else. Not all at once: of many that have come and gone
    /// each would have a seat before the first leaves its own.
    fn accept(&mut self) {
        for _ in 0..IN_TURN {
            if self.files_spoken_for(self.bequests.files()) + OPEN_FILES_EACH > self.open_files {
                return self.take_no_more();
            }
            let socket = match sys::accept_on(self.listener.socket.as_fd()) {
                Ok(socket) => socket,
                Err(error) => match error.kind() {
                    io::ErrorKind::WouldBlock => return,
                    io::ErrorKind::ConnectionAborted | io::ErrorKind::Interrupted => continue,
                    _ => return self.take_no_more(),
                },
            };
            let Ok((peer, uid)) = sys::peer_of(socket.as_fd()) else { continue };
            if uid == sys::euid() || is_below_us(socket.as_fd(), peer) {
                self.connections.push(Connection {
                    socket,
                    peer,
                    uid,
                    visits: false,
                    client: None,
                    bye: None,
                    switching: None,
                    asks: None,
                    is_shut: false,
                });
            } else {
                // Anybody may come here as often as he likes.
                say::info(format_args!("process {peer} of user {uid} is not of this run; turned away"));
                // And to find out whose child he is may take long.
                return;
            }
        }
    }

    /// Descriptors that are open or to be had at any time, with so many bequests.
    fn files_spoken_for(&self, bequests: usize) -> usize {
        let served = self.connections.len() + self.leaving.len();
        OWN_OPEN_FILES + served * (OPEN_FILES_EACH - 1) + bequests.max(served)
    }

    fn take_no_more(&mut self) {
        self.crowded_until = Some(Instant::now() + CROWDED);
        self.told.crowded(self.connections.len());
    }

    /// Reads what a keeper says; false when the connection is over. Not by its `Bye`: its other threads may be writing to
    /// a device until its last descriptor is closed, and what it was lent is nobody else's before. Nor because it can hear
    /// nothing any more: what it said before its end is still to be read, and may be all that tells it from a stranded one.
    fn hear(&mut self, index: usize) -> bool {
        for _ in 0..IN_TURN {
            let mut message = Message::new(Kind::Bye, 0, 0, 0);
            let socket = self.connections[index].socket.as_fd();
            let (len, fds) = match sys::receive(socket, message.as_bytes_mut()) {
                Ok(received) => received,
                Err(error) => match error.kind() {
                    io::ErrorKind::WouldBlock => return true,
                    // Reset: it ended and left something of ours unread. Said once, before what it has said itself (unix(7)).
                    io::ErrorKind::Interrupted | io::ErrorKind::ConnectionReset => continue,
                    _ => return false,
                },
            };
            if len == 0 {
                return false;
            }
            let kind = Kind::from_raw(message.kind).filter(|_| len == size_of::<Message>());
            let answered = self.answer(index, kind, &message, fds);
            if self.connections[index].is_over(answered) {
                return false;
            }
        }
        self.has_more = true;
        true
    }

    fn answer(
        &mut self,
        index: usize,
        kind: Option<Kind>,
        message: &Message,
        fds: Vec<OwnedFd>,
    ) -> Result<()> {
        if self.connections[index].client.is_none() {
            match kind {
                Some(Kind::Look) => return self.show(index),
                Some(Kind::Switch) => return self.switch(index, message.a, fds),
                _ => {}
            }
        }
        let connection = &mut self.connections[index];
        match (kind, &mut connection.client) {
            (Some(Kind::Hello), None) => return self.let_in(index, message),
            (Some(Kind::Lease), Some(client)) => {
                let lent = self.mounts.lend(message.a, client.has)?;
                self.is_short |= lent.is_none();
                let (number, trunks) = lent.unwrap_or((0, NONE..NONE));
                let answer = Message::new(Kind::Leased, message.a, trunks.start, trunks.end - trunks.start);
                client.lent.extend(trunks.map(|trunk| (number, trunk)));
                sys::send(connection.socket.as_fd(), answer.as_bytes(), &[])?;
            }
            (Some(Kind::Return), Some(client)) => {
                let number = self.mounts.number_of(message.a);
                let lent = client.lent.iter().position(|lent| Some(lent.0) == number && lent.1 == message.b);
                let lent = lent.ok_or_else(|| anyhow!("gave back a trunk that it did not have"))?;
                let lent = client.lent.swap_remove(lent);
                self.bequests.forget(&[lent]);
                self.mounts.take_back([lent]);
            }
            (Some(Kind::Bequest), Some(_)) => self.keep_bequest(index, message.a, fds),
            (Some(Kind::Cancel), Some(_)) => {
                self.bequests.cancel(message.a);
                self.take_back([]);
            }
            (Some(Kind::Born), Some(_)) => {
                let parent = connection.peer;
                self.is_born(message.a, message.b, parent);
            }
            (Some(Kind::Inherit), Some(_)) => {
                connection.asks = Some(Asked { number: message.a, is_late: false });
            }
            (Some(Kind::Apart), Some(client)) => {
                client.inherited.clear();
                self.take_back([]);
            }
            (Some(Kind::Gone), Some(_)) => self.gone_from(index, message.b),
            (Some(Kind::Holding), Some(client)) => {
                let context = fds.into_iter().next();
                client.held = Some(context.ok_or_else(|| anyhow!("sent no userfaultfd"))?);
                say::info(format_args!("{} ({}): near the limit; pages may leave", client.pid, client.name));
            }
            (Some(Kind::Log), client) => {
                let text = String::from_utf8_lossy(message.text());
                let who = client.as_ref().map(|client| client.pid).unwrap_or(connection.peer);
                say::debug(format_args!("next line is from process {who}"));
                say::say(message.a.min(u64::from(u32::MAX)) as u32, text);
            }
            (Some(Kind::Unlimited), Some(client)) => self.told.cannot_be_limited(client, message),
            (Some(Kind::Unusable), Some(client)) => {
                let device = self.mounts.number_of(message.a).and_then(|number| self.mounts.name_of(number));
                self.told.unusable(client, message, device);
            }
            (Some(Kind::Needed), Some(_)) => self.seats.hasten(),
            (Some(Kind::Full), Some(client)) => self.told.full(client),
            (Some(Kind::Over), Some(client)) => self.told.over(client, message, self.settings.limit_bytes),
            (Some(Kind::Guest), Some(client)) => {
                client.is_now(message.a, (connection.peer, connection.uid))?;
                self.unlimited.forget(client.pid);
            }
            (Some(Kind::Bye), _) => connection.bye = Some(message.a),
            _ => return Err(anyhow!("said something that makes no sense here ({})", message.kind)),
        }
        Ok(())
    }

    /// Gives those who ask what they inherit. Who asks for what nobody has left is told so once all have been heard. Those
    /// who cannot be answered are over, and join those who have `ended`.
    fn answer_heirs(&mut self, ended: &mut Vec<usize>) {
        for (index, connection) in self.connections.iter_mut().enumerate() {
            let (Some(asked), Some(client)) = (&mut connection.asks, &mut connection.client) else {
                continue;
            };
            let bequest = self.bequests.inherit(asked.number);
            if bequest.is_none() && (self.has_more || !asked.is_late) {
                asked.is_late = true;
                continue;
            }
            let answer = Message::new(Kind::Bequest, bequest.as_ref().map_or(NONE, |_| asked.number), 0, 0);
            let files: Vec<_> = bequest.iter().map(|bequest| bequest.file().as_fd()).collect();
            let answered = sys::send(connection.socket.as_fd(), answer.as_bytes(), &files);
            client.inherited.extend(bequest);
            connection.asks = None;
            if connection.is_over(answered.map_err(Into::into)) && !ended.contains(&index) {
                ended.push(index);
            }
        }
        ended.sort_unstable();
    }

    /// A keeper says hello: it is served from here on.
    fn let_in(&mut self, index: usize, hello: &Message) -> Result<()> {
        let connection = &mut self.connections[index];
        if hello.c != VERSION {
            return Err(anyhow!("its agent speaks version {}, this one {VERSION}", hello.c));
        }
        let (client, page) = welcome(hello, connection.peer, &mut self.seats, self.welcomed)?;
        self.welcomed += 1;
        // From here on it is parted from, and leaves its seat, also if it has gone before its answer.
        let client = connection.client.insert(client);
        speaks_for(client.pid, connection.uid)?;
        self.unlimited.forget(client.pid);
        let shared = [page.as_fd(), self.seats.file()]
            .into_iter()
            .chain(self.device_for_all.as_ref().map(AsFd::as_fd));
        if client.seat.is_none() {
            self.told.seatless();
        }
        let (settings, given) = self.mounts.settings(&self.settings);
        client.has = given;
        let files: Vec<_> = shared.chain(self.mounts.files(given)).collect();
        let answer = Message::welcome(client.seat, &settings);
        sys::send(connection.socket.as_fd(), answer.as_bytes(), &files)?;
        say::debug(format_args!("{} ({}): served", client.pid, client.name));
        Ok(())
    }

    /// The child that a bequest is for is there, by its parent's word: `pid` is its number where that is.
    fn is_born(&mut self, number: u64, pid: u64, parent: i32) {
        // One whose number cannot be found out is waited for as long as it may take.
        let pid = i32::try_from(pid).ok();
        let Some(pid) = pid.and_then(|pid| tree::translate(pid, parent)) else { return };
        match Process::of(pid) {
            Some(heir) => self.bequests.is_born(number, heir),
            None if tree::exists(pid) => {}
            None => {
                self.bequests.cancel(number);
                self.take_back([]);
            }
        }
    }

    /// Keeps what a process has out for a child of its fork, if there is room for it.
    fn keep_bequest(&mut self, index: usize, number: u64, fds: Vec<OwnedFd>) {
        // What others are to bring has room only if this leaves it, and so do those who are to inherit.
        let heirs = (self.bequests.awaited() + 1) * OPEN_FILES_EACH;
        let has_room = self.files_spoken_for(self.bequests.files() + 1) + heirs <= self.open_files;
        let Some(client) = &self.connections[index].client else { return };
        let kept = match fds.into_iter().next().filter(|_| has_room) {
            Some(file) => {
                let forks = (client.id, self.heard);
                self.bequests.keep(number, forks, file, &client.lent, &client.inherited)
            }
            None => Err(anyhow!("too many open files; raise the limit (ulimit -n)")),
        };
        // The child, if it comes, is told that there is nothing; its parent goes on.
        kept.unwrap_or_else(|why| self.told.heirless(client, &why));
    }

    /// Answers who looks. The processes of the tree may be another user's; they see nothing.
    fn show(&mut self, index: usize) -> Result<()> {
        self.check_user(index)?;
        let file = self.view().file()?;
        let answer = Message::new(Kind::View, 0, 0, 0);
        Ok(sys::send(self.connections[index].socket.as_fd(), answer.as_bytes(), &[file.as_fd()])?)
    }

    /// Who is no keeper must be of the same user.
    fn check_user(&mut self, index: usize) -> Result<()> {
        let connection = &mut self.connections[index];
        connection.visits = true;
        match connection.uid == sys::euid() {
            true => Ok(()),
            false => Err(anyhow!("of user {}: not of this run's user", connection.uid)),
        }
    }

    /// What a connection that ended means for its process.
    fn part_from(&mut self, connection: Connection) {
        self.crowded_until = None;
        if let Some(serial) = connection.switching {
            self.stay(serial);
        }
        let Some(client) = connection.client else { return };
        if connection.bye == Some(BYE_EXEC) {
            self.bequests.parent_ended(client.id);
        }
        if connection.bye == Some(BYE_ASIDE) {
            if let Some(process) = Process::of(client.pid) {
                self.unlimited.add(process, Why::Aside);
            }
        }
        // Nothing is missed then.
        let harmless = client.held.is_none() || matches!(connection.bye, Some(BYE_EXEC | BYE_ASIDE));
        // Where a keeper dies the kernel kills its program (`tie` in the agent), or both were killed.
        if !harmless && connection.bye.is_none() && !client.ends_with_its_namespace() {
            // The engine has as much as the program, by itself, and is killed when that is used up.
            let why = match sys::limit_for(client.pid, libc::RLIMIT_CPU).1 {
                libc::RLIM_INFINITY if self.oom_kills.as_ref().is_some_and(OomKills::are_more) => {
                    let in_memory = self.mounts.iter().any(|(_, mount)| mount.device.is_memory());
                    let (what, remedy) = match in_memory {
                        true => ("what is in mem", "give a file with -s"),
                        false => ("what may be over that for a moment", "give less with --memory"),
                    };
                    format!(
                        " (the kernel has killed for want of memory: what may stay and {what} have to fit into {}; {remedy})",
                        Bytes(memory::available_bytes())
                    )
                }
                libc::RLIM_INFINITY => String::new(),
                seconds => format!(" (it may use {seconds} s of CPU time, no more: raise ulimit -Ht)"),
            };
            let end = client.why_not_killed();
            say::error(format_args!(
                "{} ({}): its engine ended without a word while memory was swapped out{why}; {}",
                client.pid,
                client.name,
                end.as_deref().unwrap_or("killed, so that it cannot go on with zeros")
            ));
        }
        if harmless || client.has_ended() {
            return self.bury(client);
        }
        let deadline = match connection.bye {
            Some(BYE_STOP) => {
                if let Some(why) = client.why_not_killed() {
                    say::error(format_args!("{} ({}): {why}", client.pid, client.name));
                }
                client.hold.kill();
                None
            }
            _ => Some(Instant::now() + GRACE),
        };
        self.leaving.push(Leaving { client, deadline });
    }

    /// Lets those go that have ended, and ends those that are stranded.
    fn judge_leaving(&mut self) {
        let now = Instant::now();
        for leaving in &mut self.leaving {
            let client = &leaving.client;
            if leaving.deadline.is_none_or(|deadline| deadline > now) || client.has_ended() {
                continue;
            }
            leaving.deadline = None;
            client.hold.kill();
        }
        for leaving in std::mem::take(&mut self.leaving) {
            match leaving.client.has_ended() {
                true => self.bury(leaving.client),
                false => self.leaving.push(leaving),
            }
        }
    }

    /// Has its name again, where somebody has removed that: what begins would find nobody there.
    fn keep_name(&mut self) {
        if self.listener.is_nameless() {
            match self.listener.again() {
                Ok(()) => say::warning(
                    "somebody had removed the run's socket, which is there again; what was executed meanwhile has no limit",
                ),
                Err(why) => self.told.nameless(&self.listener.path, &why),
            }
        }
    }

    /// Divides the limit among those who are served.
    fn share_out(&mut self) {
        if !self.seats.due_in().is_zero() {
            return;
        }
        self.keep_name();
        for connection in &mut self.connections {
            if let Some(client) = &mut connection.client {
                client.tell_of_errors(Some(connection.peer), &self.mounts);
            }
        }
        let clients = self.connections.iter().filter_map(|connection| connection.client.as_ref());
        let refaults = |client: &Client| client.stats.stats().workingset_refault_anon.load(Relaxed);
        let processes = clients.filter_map(|client| Some((client.seat?, refaults(client))));
        let beyond = self.seats.divide(processes, self.unlimited.bytes());
        self.told.outgrown(beyond, self.unlimited.bytes(), self.settings.limit_bytes);
        self.call_on();
    }

    /// Tells those who may rest that others lack what they have.
    fn call_on(&self) {
        let tree = self.seats.tree();
        if tree.is_short() {
            self.call(Kind::Needed, |client| client.seat.is_some_and(|seat| tree.seat(seat).is_above()));
        }
    }

    fn call(&self, kind: Kind, whom: impl Fn(&Client) -> bool) {
        let message = Message::new(kind, 0, 0, 0);
        for connection in self.connections.iter().filter(|c| c.client.as_ref().is_some_and(&whom)) {
            // Who does not listen now (it is stopped) is called again, if it is still so. Calls must not fill its socket, which
            // is to take what it asks for.
            if sys::has_unread(connection.socket.as_fd()) {
                continue;
            }
            let _ = sys::send(connection.socket.as_fd(), message.as_bytes(), &[]);
        }
    }

    /// Takes back all that a process was lent and keeps its counters.
    fn bury(&mut self, mut client: Client) {
        client.tell_of_errors(None, &self.mounts);
        if client.has_ended() {
            self.bequests.parent_ended(client.id);
        }
        let Client { lent, inherited, .. } = &mut client;
        drop(std::mem::take(inherited));
        self.take_back(std::mem::take(lent));
        self.seats.leave(client.seat);
        self.report.keep(&client.name, client.counters());
        say::debug(format_args!("{} ({}): ended", client.pid, client.name));
    }

    /// Asks all for their empty trunks, if somebody got none. Not often: who has none to give is asked too.
    fn call_in(&mut self) {
        if !std::mem::take(&mut self.is_short) || self.called_in.elapsed() < CALL_AGAIN {
            return;
        }
        self.called_in = Instant::now();
        self.call(Kind::Short, |client| !client.lent.is_empty());
    }

    /// Looks whether children are there whose parents ended before they told of them.
    fn seek_heirs(&mut self) {
        let mut all = None;
        self.bequests.seek(|begun| {
            let all = all.get_or_insert_with(tree::all_descendants);
            // Where /proc cannot be read anybody may be there.
            all.as_ref().is_none_or(|all| all.iter().any(|p| !p.ending && begun.contains(&p.started)))
        });
    }

    /// Takes trunks back that a process has no more, as far as no heir reads from them.
    fn take_back(&mut self, lent: impl IntoIterator<Item = Trunk>) {
        self.mounts.take_back(self.bequests.release(lent));
    }

    /// Lets go of those that are still served, and keeps their counters: the run is over for us. Those that live on
    /// keep the room that they have.
    pub fn close(&mut self) {
        self.report.set_peak(self.seats.tree().peak());
        // Who has no keeper any more is held by us alone, and would read zeros.
        let now = Instant::now();
        self.leaving.iter_mut().for_each(|leaving| leaving.deadline = leaving.deadline.map(|_| now));
        self.judge_leaving();
        let awaits_heirs = self.awaits_heirs();
        let mut clients: Vec<Client> =
            self.connections.drain(..).filter_map(|connection| connection.client).collect();
        let some_live = clients.iter().any(|client| !client.has_ended()) || awaits_heirs;
        clients.extend(self.leaving.drain(..).map(|leaving| leaving.client));
        if some_live {
            // All stays as it is if we are killed: which trunks the living read from, their own, those of parents
            // and those that parents wait to use again, none of them can tell us any more.
            clients.iter().for_each(|client| self.report.keep(&client.name, client.counters()));
            return self.mounts.leave_as_they_are();
        }
        clients.into_iter().for_each(|client| self.bury(client));
        self.bequests.close();
        self.take_back([]);
        self.mounts.settle_disks();
        self.report.set_lost(self.mounts.iter().map(|(_, mount)| mount.lent().0).sum());
    }
}
