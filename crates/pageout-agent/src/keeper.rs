//! The keeper's life: watch, take up, follow, end.
//!
//! *Watch*: the first thread looks at the resident memory of the address space, the more often the nearer
//! the limit. Nothing is registered, no other thread runs, no fault is taken. *Take up*, at 80 % of the limit:
//! staging is mapped, servers start, every area that can be managed is adopted. *Follow*: the same
//! thread goes on looking, for new areas and for growth that no fault announces. *End*: when the program exits
//! or executes another one.

use crate::clock::Clock;
use crate::code::{is_code, Code};
use crate::devices::Devices;
use crate::link::{self, Link, Welcome};
use crate::maps::Maps;
use crate::part::Part;
use crate::{exit, fork, heir, memory, part, program, sys, task, wrap};
use alloc::boxed::Box;
use alloc::vec::Vec;
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, Ordering};
use pageout::engine::{Config, Engine, Swapin};
use pageout::fault::Server;
use pageout::frame::{Frames, CHUNK, EXECUTABLE};
use pageout::kernel::{nobody_is_called, HugePages, Kernel, Linux, Statm};
use pageout::reclaim::Round;
use pageout::space::discover::{bss_end, Area, Walk};
use pageout::space::{BLOCK, PAGE};
use pageout::stats::{Stats, STATS_BYTES};
use pageout::swap::swapout::Outgoing;
use pageout::swap::Place;
use pageout::sync::{Bell, Lock, LockClass, FOREVER};
use pageout::wire::{Kind, Message, Settings, BYE_ASIDE, BYE_ENDED, BYE_EXEC};
use rustix::event::{poll, PollFd, PollFlags, Timespec};
use rustix::fd::{AsFd, OwnedFd};
use rustix::io::{fcntl_getfd, Errno};
use rustix::process::{pidfd_open, Pid, PidfdFlags};
use rustix::thread::futex;

/// First touches are taken to be at most this fast, in bytes a nanosecond (19 GB/s were measured).
const FASTEST: u64 = 20;
/// Part of the stated slack that a watch may let pass between two looks, in bytes.
const SLACK: u64 = 24 << 20;
/// The same while the engine works, when all that is left to do is to register.
const FOLLOW_SLACK: u64 = 40 << 20;
/// Between two looks there are at most so many ns, whatever happens.
const LONGEST_NAP: u64 = 100_000_000;
/// The same near the limit, of a program that hardly runs. Once the engine works, of those that do not run, so many for each
/// that is there, so that all of them together cost little: run tells who rests that others need what it has. Not more than it
/// takes, for some growth does not ring: by a long system call, or by who shares the memory and is no thread (CLONE_VM).
const LONGEST_REST: u64 = 10_000_000;
const REST_OF_EACH: u64 = 1_250_000;
/// Nor do they look more often than once in so many ns for each that is there, also while all together are over the limit: a look
/// takes 25 us where many share the processors, and who is to evict waits behind them.
const LOOK_OF_EACH: u64 = 125_000;
/// Who has run for less than this part of the time hardly runs.
const HARDLY: u64 = 8;
/// So many bytes over the limit no ordinary thread comes before the evictor.
const FAR_OVER: i64 = 16 << 20;
/// After so many looks without new memory that no fault announced.
const CALM: u64 = 4;
/// Who lets others run and goes on within so many ns was alone; else he tries again after so many.
const AT_ONCE: u64 = 50_000;
const BUSY_NAP: i64 = 500_000;
/// Areas below this many bytes are not worth a registration.
const SMALLEST_AREA: usize = 4 * PAGE;
/// Nor is what has grown, before it is this part of the limit, between these bytes: the kernel never merges what is
/// registered at different times, and a program has only so many mappings (65,530). Of the stated slack.
const GROWTH_SHARE: u64 = 32;
const LEAST_GROWTH: u64 = 1 << 20;
const MOST_GROWTH: u64 = 16 << 20;
/// An area of at most this many bytes that holds a thread's control block is that thread's stack.
const LARGEST_STACK: usize = 64 << 20;

/// Servers of faults. All but one sleep unless faults come together or wait for a slow device.
const SERVERS: usize = 4;
/// How often what cannot go is counted, in ns: it takes a look at every block. Over the limit up to 15 times as
/// often, if the count takes less than a hundredth of that: what grows then may be what cannot go.
const COUNT_EVERY: u64 = 300_000_000;
/// How long (ns) what cannot go must have stayed as it is before the user is told.
const REST: u64 = 2_000_000_000;
/// Or been over the limit without a break, if it never rests.
const RESTLESS: u64 = 2 * REST;
/// Who was found short of memory counts as short for so long (ns): others let what it lacks leave without stopping
/// between two of its faults, which may take 2 MiB each.
const SHORT_FOR: u64 = 20_000_000;
/// Trunks that go back, and clusters that are discarded, in one rest of the evictor at most.
const GIVEN: usize = 64;
/// Empty trunks of each device that stay: who grows and shrinks by less does not ask for each.
const KEPT: usize = 1;
/// How long (ns) there must have been no room on any device before the user is told: others may give up some.
const FULL_FOR: u64 = 500_000_000;
/// Who cannot do without another process or thread, and finds no room for it, tries again after so many ns, so often.
const HIRE_AGAIN: i64 = 50_000_000;
const HIRE_ATTEMPTS: usize = 200;
/// What to do about that.
const MORE_TASKS: &str = "raise pids.max of its control group, or ulimit -u";
/// How often a connection that run has closed is tried again, after so many ns each.
const RESETS: usize = 5;
const RESET_NAP: i64 = 10_000_000;
/// So many threads at most allocate slots at once without meeting.
const MOST_SHARDS: usize = 64;
/// How often units that could not leave are tried again, in ns; and the more seldom the more there are, so many for each.
const UNPARK_EVERY: u64 = 300_000_000;
const UNPARK_EACH: u64 = 500_000;

/// The path of a run's socket, kept where a fork's child and the keeper find it.
#[derive(Clone, Copy)]
pub struct Path {
    bytes: [u8; 108],
    len: usize,
}

impl Path {
    /// `None`: longer than a socket's path can be.
    pub fn new(path: &[u8]) -> Option<Self> {
        let mut bytes = [0; 108];
        bytes.get_mut(..path.len())?.copy_from_slice(path);
        Some(Self { bytes, len: path.len() })
    }

    /// Without a zero at its end.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

/// The engine, once it works.
static ENGINE: AtomicPtr<Keeper> = AtomicPtr::new(core::ptr::null_mut());
/// The process that the keeper keeps; another one's wrappers (vfork) leave everything alone.
static PROGRAM: AtomicU32 = AtomicU32::new(0);
static LISTED: AtomicU32 = AtomicU32::new(0);
/// The keeper; 0 before it runs.
static KEEPER: AtomicU32 = AtomicU32::new(0);
/// 1 when the keeper watches, or never will. The program waits for it: one that is over in 50 ms would else run
/// without a limit on a busy machine.
static BEGUN: AtomicU32 = AtomicU32::new(0);
/// What the messenger passes on.
static mut PATH: Path = Path { bytes: [0; 108], len: 0 };

/// What the keeper's threads share.
pub struct Keeper {
    /// The engine.
    pub engine: Engine<Linux>,
    pub(crate) link: &'static Link,
    /// What children of forks read from.
    bequests: Lock<Vec<heir::File>>,
    /// What the child of a fork that does not ask has to do without. After the events lock.
    pub(crate) code: Lock<Code>,
    /// Where the evictor waits for a CPU.
    queue: Queue,
    /// Rings when a device is to be cleared.
    pub(crate) clearing: Bell,
    /// Others lack trunks.
    pub(crate) is_short: AtomicBool,
}

impl Keeper {
    /// Has `run` keep a bequest for the child; the number that the child asks with. `None`: there is no run any more.
    pub fn lend(&self, file: &heir::File) -> Option<u64> {
        let mut token = [0u8; 8];
        let _ = rustix::rand::getrandom(&mut token, rustix::rand::GetRandomFlags::empty());
        let token = u64::from_ne_bytes(token);
        self.link.give(&Message::new(Kind::Bequest, token, 0, 0), file.fd()).then_some(token)
    }

    /// The clone is through; with a child the bequest is kept until all who inherit it have gone.
    pub fn lent(&self, token: u64, file: heir::File, child: fork::Child) {
        if let fork::Child::None = child {
            self.link.tell(&Message::new(Kind::Cancel, token, 0, 0), None);
            return file.give_up(&self.engine);
        }
        if let fork::Child::Number(pid) = child {
            self.link.tell(&Message::new(Kind::Born, token, u64::from(pid), 0), None);
        }
        file.rest();
        self.bequests.lock().push(file);
    }

    /// Gives up what nobody reads any more.
    fn settle_bequests(&self) {
        loop {
            let mut bequests = self.bequests.lock();
            let Some(index) = bequests.iter().position(heir::File::is_released) else { return };
            let file = bequests.swap_remove(index);
            drop(bequests);
            file.give_up(&self.engine);
        }
    }
}

static BEQUEST_LOCKS: LockClass = LockClass::new();
static CODE_LOCKS: LockClass = LockClass::new();

/// The engine of this address space, if it works. Not the parent's, in the child of a fork.
pub fn active() -> Option<&'static Keeper> {
    // SAFETY: published whole, never freed, and its memory is there when this is its address space.
    unsafe { ENGINE.load(Ordering::SeqCst).as_ref() }.filter(|_| memory::is_home())
}

/// The process whose memory this is.
pub fn program() -> u32 {
    PROGRAM.load(Ordering::Relaxed)
}

/// What /proc calls it: that may list the processes of another namespace. 0 where there is none.
pub fn listed() -> u32 {
    LISTED.load(Ordering::Relaxed)
}

/// Has the keeper not ended?
pub fn is_there() -> bool {
    let keeper = KEEPER.load(Ordering::SeqCst);
    Pid::from_raw(keeper as i32).is_none_or(|pid| {
        // Where it is a child, it is there until it is waited for.
        sys::wait_for_clone(keeper, true).is_none() && rustix::process::test_kill_process(pid).is_ok()
    })
}

/// In a fork's child: the engine was the parent's.
pub fn forget() {
    KEEPER.store(0, Ordering::SeqCst);
    BEGUN.store(0, Ordering::SeqCst);
    ENGINE.store(core::ptr::null_mut(), Ordering::SeqCst);
}

/// Starts the keeper of the calling process; false: there is none. Without one the program runs unlimited, and `run`
/// says so.
pub fn start(path: Path) -> bool {
    // SAFETY: nobody else is here yet, in a new program as in a fork's child.
    unsafe { PATH = path };
    if memory::reserve().is_err() {
        return false;
    }
    let mut name = [const { core::mem::MaybeUninit::uninit() }; 16];
    let name = rustix::fs::readlinkat_raw(rustix::fs::CWD, c"/proc/self", &mut name).ok();
    let listed = name.and_then(|(name, _)| core::str::from_utf8(name).ok()?.parse().ok());
    LISTED.store(listed.unwrap_or(0), Ordering::Relaxed);
    PROGRAM.store(rustix::process::getpid().as_raw_nonzero().get() as u32, Ordering::Relaxed);
    let mask = sys::block_signals();
    let sent = send_messenger();
    // Who inherits cannot do without.
    let started = sent.is_ok() || fork::is_heir() && patiently(|| send_messenger().ok()).is_some();
    if let (Err(errno), false) = (sent, fork::is_heir()) {
        let process = program();
        let line = match errno {
            Errno::AGAIN | Errno::NOMEM => alloc::format!(
                "pageout: process {process} runs without a limit: no room for its keeper; {MORE_TASKS}\n"
            ),
            errno => alloc::format!(
                "pageout: process {process} runs without a limit: this kernel, a filter or an emulator refuses it a \
                 keeper on the same memory ({errno})\n"
            ),
        };
        sys::complain(line.as_bytes());
    }
    while started && BEGUN.load(Ordering::SeqCst) == 0 && is_there() {
        sys::wait_a_tenth(&BEGUN, 0, futex::Flags::PRIVATE);
    }
    sys::set_signals(mask);
    started
}

/// Starts a messenger, which starts the keeper.
///
/// # Errors
/// The kernel's for either of them; AGAIN where the messenger was killed.
fn send_messenger() -> Result<(), Errno> {
    let gets_orphans = rustix::process::getpid().is_init() || sys::is_subreaper();
    if gets_orphans {
        reap_earlier();
    }
    // SAFETY: the messenger never returns; its stack is its own.
    let id = unsafe { task::start(task::Kind::Messenger, messenger, gets_orphans as usize)? };
    match sys::wait_for_clone(id, false) {
        Some(0) => Ok(()),
        Some(status) if status & 0x7f == 0 => Err(Errno::from_raw_os_error(status >> 8)),
        _ => Err(Errno::AGAIN),
    }
}

/// The keepers of what this process was before it became another program, where they were its children: nobody else
/// waits for them.
fn reap_earlier() {
    while let Some(id) = sys::ended_clone() {
        let mut name = [0; 16];
        if program::read_of(id, "comm", &mut name) != Some(b"pageout\n")
            || sys::wait_for_clone(id, true).is_none()
        {
            return;
        }
    }
}

/// Tries `work` until it is done, for ten seconds.
fn patiently<T>(mut work: impl FnMut() -> Option<T>) -> Option<T> {
    (0..HIRE_ATTEMPTS).find_map(|_| {
        let _ = rustix::thread::nanosleep(&Timespec { tv_sec: 0, tv_nsec: HIRE_AGAIN });
        work()
    })
}

fn begun() {
    BEGUN.store(1, Ordering::SeqCst);
    let _ = futex::wake(&BEGUN, futex::Flags::PRIVATE, 1);
}

/// Starts the keeper and ends, so that the keeper is a child of `run` and not of the program. Whose own orphans come to
/// itself would wait for such a keeper, as for all its children: it has one that it does not see.
extern "C" fn messenger(gets_orphans: usize) -> ! {
    sys::note_rank();
    // The keeper is born as its maker is: among busy threads a short program was over before it began.
    sys::go_before_all();
    let kind = if gets_orphans != 0 { task::Kind::Sibling } else { task::Kind::Process };
    // SAFETY: the keeper never returns.
    let started = unsafe { task::start(kind, keeper, 0) };
    sys::exit_group(started.map_or_else(Errno::raw_os_error, |_| 0))
}

extern "C" fn keeper(_: usize) -> ! {
    let me = rustix::process::getpid().as_raw_nonzero().get() as u32;
    KEEPER.store(me, Ordering::SeqCst);
    let _ = rustix::thread::set_name(c"pageout");
    // Whoever kills the group, or waits for its end, means the program, which may be in another by then. Not a session of
    // its own: where the scheduler shares CPUs out among sessions, it would not be weighed against the program any more.
    let _ = rustix::process::setpgid(None, None);
    sys::raise_limits();
    sys::go_before_all();
    // SAFETY: written before the clone.
    let path = unsafe { PATH };
    // The program's descriptors were copied with everything else: pipes must end when the program ends.
    // 2 stays until the connection is there, for a word to the user.
    // SAFETY: nothing here uses them.
    unsafe {
        let _ = sys::call(linux_raw_sys::general::__NR_close_range, 0, 1, 0, 0);
        let _ = sys::call(linux_raw_sys::general::__NR_close_range, 3, u32::MAX as usize, 0, 0);
    }
    let _ = rustix::process::chdir(c"/");
    let program = program();
    let Some(watch) = Pid::from_raw(program as i32).and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok())
    else {
        leave(0)
    };
    // Where the program has closed 2 nothing of ours may get that number.
    // SAFETY: whether it is there is asked only.
    if fcntl_getfd(unsafe { rustix::stdio::stderr() }).is_err() {
        let _ = rustix::stdio::dup2_stderr(&watch);
    }
    let (link, welcome) = match connect(path, program, me) {
        Ok(met) => met,
        Err(errno) => {
            // Run has ended, which it said or its user saw, and with it the limit; every program that a shell starts would
            // say it again. Or another mount hides the socket, which run itself tells of: once for each program.
            if !matches!(errno, Errno::NOENT | Errno::CONNREFUSED) {
                let why = match errno {
                    // Run is called by a path. SRCH: the root is in what was the /proc of a process (Chromium's sandbox).
                    Errno::SRCH | Errno::ACCESS => "its run cannot be reached from its root or by its user",
                    _ => "its run does not answer",
                };
                let line =
                    alloc::format!("pageout: process {program} runs without a limit: {why} ({errno})\n");
                sys::complain(line.as_bytes());
            }
            leave(0)
        }
    };
    // SAFETY: nothing here uses it.
    let _ = unsafe { sys::call(linux_raw_sys::general::__NR_close, 2, 0, 0, 0) };
    let link: &'static Link = Box::leak(Box::new(link));
    let Ok(stats) = memory::map_shared(&welcome.stats, STATS_BYTES) else { leave(0) };
    program::mark(stats, STATS_BYTES);
    // SAFETY: zeros are valid counters, and the page stays mapped.
    let stats: &'static Stats = unsafe { &*(stats as *const Stats) };
    Stats::set(&stats.pid, program as u64);
    Stats::set(&stats.limit_bytes, welcome.settings.limit_bytes);
    memory::set_limit(welcome.settings.limit_bytes);
    if welcome.settings.limit_bytes == u64::MAX {
        link.tell(&Message::new(Kind::Bye, BYE_ASIDE, 0, 0), None);
        leave(0)
    }
    nobody_is_called();
    let kernel = match Linux::open() {
        Ok(kernel) if sys::serves_real_time() => kernel.everywhere(),
        Ok(kernel) => kernel,
        Err(error) => {
            let why = alloc::format!("{error}");
            link.tell(&Message::with_text(Kind::Unlimited, 0, why.as_bytes()), None);
            leave(1)
        }
    };
    let Ok(part) = Part::new(&welcome.tree, welcome.seat, welcome.settings.limit_bytes, kernel.statm())
    else {
        give_up(format_args!("no memory for the keeper of process {program}"))
    };
    let mut life = Life {
        watch,
        sight: program::Sight::new(),
        clock: Clock::of(program),
        rest: 0,
        is_called: false,
        link,
        settings: welcome.settings,
        part,
        devices: Devices::new(welcome.settings.device, welcome.devices),
        stats,
        maps: Maps::new(),
        scanned: (0, 0, 0),
        areas: Vec::with_capacity(256),
        code: Vec::with_capacity(256),
        executable: 0,
        asked_executable: false,
        takes_executable: false,
        evictor: 0,
        hurried: false,
        unmanaged: 0,
        over: None,
        told_over: false,
    };
    life.run(kernel)
}

/// Says hello. A run that ends just then has closed the connection, and soon its socket: that is what its absence looks like.
fn connect(path: Path, program: u32, me: u32) -> Result<(Link, Welcome), Errno> {
    let mut resets = 0;
    loop {
        match Link::connect(path.as_bytes(), program, me) {
            Err(Errno::CONNRESET | Errno::PIPE) if resets < RESETS => resets += 1,
            met => return met,
        }
        let _ = rustix::thread::nanosleep(&Timespec { tv_sec: 0, tv_nsec: RESET_NAP });
    }
}

/// Ends the keeper after a bug or when the engine cannot go on; the program is ended by `run`.
pub fn give_up(why: core::fmt::Arguments<'_>) -> ! {
    link::last_word(why);
    leave(1)
}

/// Ends the keeper. A program that waits to inherit ends with it.
fn leave(status: i32) -> ! {
    fork::lost();
    begun();
    sys::exit_group(status)
}

struct Life {
    watch: OwnedFd,
    sight: program::Sight,
    clock: Option<Clock>,
    /// For how long (ns) a program that hardly runs is left alone now.
    rest: u64,
    /// The last pause ended because the clock told that it runs, or run told something.
    is_called: bool,
    link: &'static Link,
    settings: Settings,
    part: Part,
    devices: Devices,
    stats: &'static Stats,
    maps: Maps,
    /// Size and data pages when areas were last looked for, and how often mappings had come or gone: what is unmapped and
    /// mapped again between two looks leaves the sizes as they were.
    scanned: (usize, usize, u32),
    areas: Vec<(usize, usize)>,
    /// What can be executed.
    code: Vec<(usize, usize)>,
    /// Bytes of memory that can be executed, at the last look; whether frames for it were asked for, and are there.
    executable: usize,
    asked_executable: bool,
    takes_executable: bool,
    /// The thread that evicts, and whether it is to hurry.
    evictor: u32,
    hurried: bool,
    /// What could not go at the last count, in bytes.
    unmanaged: u64,
    /// Since when (ns) it is over the limit without a break, since when at rest, and how much it was then.
    over: Option<(u64, u64, u64)>,
    told_over: bool,
}

impl Life {
    fn run(&mut self, kernel: Linux) -> ! {
        let heir = fork::is_heir().then(|| self.bequest());
        begun();
        let (mut last, mut still) = (0, 0);
        while heir.is_none() {
            let now = self.look(&kernel);
            let resident = (now.resident * PAGE) as u64;
            Stats::set(&self.stats.resident_bytes, resident);
            self.stats.resident_peak_bytes.fetch_max(resident, Ordering::Relaxed);
            self.part.look(now, false, &kernel);
            if self.part.is_due(now) {
                break;
            }
            still = if resident == last { still + 1 } else { 0 };
            last = resident;
            let left = self.part.left(now, still);
            let growth = (left + self.part.of_slack(SLACK)) / self.part.growers(now, still);
            let wanted = (growth / FASTEST).clamp(500_000, LONGEST_NAP);
            let is_set = self.clock.as_ref().is_some_and(|clock| clock.set(wanted));
            let nap = if is_set { LONGEST_NAP } else { self.nap(wanted, LONGEST_REST, kernel.now()) };
            self.pause(nap);
        }
        // It takes its time, and nobody looks meanwhile.
        part::hold_all();
        let keeper = self.take_up(kernel, heir);
        self.follow(keeper)
    }

    /// What the parent left.
    fn bequest(&self) -> heir::File {
        let file = self.link.inherit(heir::TOKEN.load(Ordering::SeqCst));
        file.and_then(heir::File::open).unwrap_or_else(|| {
            give_up(format_args!(
                "process {}, the child of a fork, did not get what its parent had swapped out; killed, so that it \
                 cannot go on with zeros",
                program()
            ))
        })
    }

    /// How long (ns) until the next look, if `wanted` is right for a program that runs: one that has hardly run since the last,
    /// at `now`, takes hardly any memory. It is `longest` at most for one that has not run at all. Between two looks it may begin
    /// to, which the clock tells.
    fn nap(&mut self, wanted: u64, longest: u64, now: u64) -> u64 {
        let Some(clock) = &mut self.clock else { return wanted };
        let longest = match clock.ran(now) {
            Some((0, _)) if !self.part.shares_much() => longest,
            Some((ran, passed)) if ran <= passed / HARDLY => LONGEST_REST,
            _ => wanted,
        };
        self.rest = if self.is_called { wanted } else { (2 * self.rest).clamp(wanted, wanted.max(longest)) };
        if longest != wanted {
            clock.set_at_once();
        }
        self.rest
    }

    /// Sleeps, or ends with the program.
    fn pause(&mut self, nanoseconds: u64) {
        let timeout = Timespec { tv_sec: 0, tv_nsec: nanoseconds as _ };
        let socket = self.link.fd();
        let clock = self.clock.as_ref().map_or(self.watch.as_fd(), Clock::fd);
        let mut fds =
            [self.watch.as_fd(), clock, socket].map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
        // What another thread waits for is not ours to read, and this one, which runs before all, must not wait for
        // that thread without a sleep.
        let asked = if self.link.is_quiet() { 3 } else { 2 };
        let [ended, rings, said] = match poll(&mut fds[..asked], Some(&timeout)) {
            Ok(_) => fds.each_ref().map(|fd| !fd.revents().is_empty()),
            Err(_) => [false; 3],
        };
        self.is_called = rings || said;
        if let (true, Some(clock)) = (rings, &self.clock) {
            clock.hush();
        }
        if ended {
            self.end(BYE_ENDED);
        }
        while let Some(said) = self.link.heard(said) {
            self.devices.listen(said, self.link, active());
        }
    }

    /// What is there of the program's memory. Ends with the program.
    fn look(&mut self, kernel: &Linux) -> Statm {
        self.sight.look(kernel).unwrap_or_else(|| {
            self.end(BYE_EXEC);
            kernel.statm()
        })
    }

    /// The program has gone, and with it the keeper, unless somebody else has its memory.
    fn end(&mut self, reason: u64) {
        if let Some(keeper) = active() {
            if let Some(guest) = program::guest() {
                return self.stay_for(guest);
            }
            fork::end();
            self.tell_of_forks(keeper);
        }
        self.part.leave();
        self.link.tell(&Message::new(Kind::Bye, reason, 0, 0), None);
        sys::exit_group(0)
    }

    /// The program has gone, and somebody else has its memory.
    fn stay_for(&mut self, guest: program::Guest) {
        PROGRAM.store(guest.id, Ordering::Relaxed);
        LISTED.store(guest.listed, Ordering::Relaxed);
        self.watch = guest.watch;
        self.sight = program::Sight::new();
        self.clock = Clock::of(guest.id);
        fork::program_ended();
        self.link.tell(&Message::new(Kind::Guest, guest.id.into(), 0, 0), None);
    }

    /// Starts the engine and adopts what there is.
    fn take_up(&mut self, mut kernel: Linux, heir: Option<heir::File>) -> &'static Keeper {
        let need = |what: Result<usize, Errno>| match what {
            Ok(address) => address,
            Err(errno) => give_up(format_args!("no memory for the engine of process {}: {errno}", program())),
        };
        // First of all nothing more may grow unseen. Whoever faults waits for the servers, whoever unmaps for
        // the reader of events.
        let mut taking = heir::Taking::new();
        let executable;
        match &heir {
            Some(file) => {
                let (code, found) = (&mut self.code, &mut self.executable);
                self.maps.read(c"/proc/self/smaps", |line| {
                    if let Some(area) = Area::parse(line) {
                        code.extend(is_code(&area).then_some((area.start, area.end)));
                        *found += if area.is_executable() { area.end - area.start } else { 0 };
                    }
                    taking.step(line);
                });
                executable = self.executable_frames(&kernel);
                if !taking.register(file, &kernel) {
                    give_up(format_args!(
                        "process {}: what it inherits cannot be registered, or was moved by another thread during the \
                         fork and cannot be found; killed",
                        program()
                    ));
                }
            }
            None => {
                executable = self.find_areas(&kernel);
                let register =
                    |(start, end): &&(usize, usize)| kernel.register(*start, *end - *start).is_ok();
                taking.registered.extend(self.areas.iter().filter(register));
            }
        }
        // The rest takes its time, and the threads that are started are as their maker.
        sys::go_first();
        let limit_pages = (self.settings.limit_bytes as usize) / PAGE;
        let frames = (limit_pages / 8).clamp(1024, 16384);
        let huge = (limit_pages / 8 / 512).clamp(4, 32);
        let zeros = need(memory::map(CHUNK * PAGE, PAGE));
        let base = need(memory::map(frames * PAGE, BLOCK));
        let huge_base = need(memory::map(huge * BLOCK, BLOCK));
        let probe = need(memory::map(PAGE, PAGE));
        // SAFETY: our own page.
        unsafe { (probe as *mut u8).write_volatile(1) };
        for (start, len) in [(base, frames * PAGE), (huge_base, huge * BLOCK), (probe, PAGE)] {
            if let Err(errno) = kernel.register(start, len) {
                give_up(format_args!("cannot register memory of process {}: {errno}", program()));
            }
        }
        kernel.set_probe(probe);
        let config = Config {
            pins: Some(&exit::PINS),
            limit_pages: limit_pages as i64,
            max_order: self.settings.max_order.min(9) as u8,
            swapin: match self.settings.swapin {
                1 => Swapin::Always,
                2 => Swapin::Madvise,
                3 => Swapin::Never,
                _ => Swapin::Auto,
            },
            huge: self.settings.max_order >= 9 && HugePages::now() != HugePages::Never,
            zeros,
        };
        let place = Place::new(kernel.cpus().min(MOST_SHARDS), [], Box::new(self.link));
        self.devices.open_all(&place, self.link);
        let frames = Frames::new(base, frames / CHUNK, huge_base, huge);
        executable.into_iter().for_each(|base| frames.open_executable(base));
        let mut engine = Engine::new(kernel, config, frames, place, self.stats);
        if let Some(file) = &heir {
            engine = engine.with_key(file.key());
        }
        let bequests = Lock::new(Vec::new(), &BEQUEST_LOCKS);
        let code = Lock::new(Code::new(self.code.clone(), &engine.kernel), &CODE_LOCKS);
        let keeper: &'static Keeper = Box::leak(Box::new(Keeper {
            engine,
            link: self.link,
            bequests,
            code,
            clearing: Bell::new(),
            is_short: AtomicBool::new(false),
            queue: Queue::new(),
        }));
        keeper.engine.adopt_registered(&taking.registered);
        if heir.as_ref().is_some_and(|file| !taking.finish(file, &keeper.engine)) {
            give_up(format_args!(
                "process {}, the child of a fork: another process wrote to its memory before it had its engine; killed, so \
                 that it cannot go on with what is wrong",
                program()
            ));
        }
        // No page leaves before forks that found no engine are through; `attend` sees to that.
        keeper.engine.stand_still(true);
        ENGINE.store(keeper as *const Keeper as *mut Keeper, Ordering::SeqCst);
        self.link.tell(&Message::new(Kind::Holding, 0, 0, 0), Some(keeper.engine.kernel.uffd()));
        Stats::set(&self.stats.active, 1);
        let start = |main: extern "C" fn(usize) -> !| {
            // SAFETY: the keeper lives as long as its process, and none of these returns.
            let start =
                || unsafe { task::start(task::Kind::Thread, main, keeper as *const Keeper as usize) }.ok();
            // Whoever faults waits meanwhile.
            start().or_else(|| patiently(start)).unwrap_or_else(|| {
                give_up(format_args!(
                    "no room for threads of the engine of process {}; {MORE_TASKS}",
                    program()
                ))
            })
        };
        self.evictor = start(evict);
        start(crate::fork::attend);
        for _ in 0..SERVERS {
            start(serve);
        }
        sys::go_before_all();
        if heir.is_some() {
            // What it inherits is out already.
            keeper.code.lock().keep();
            fork::inherited();
        }
        keeper
    }

    fn follow(&mut self, keeper: &'static Keeper) -> ! {
        let engine = &keeper.engine;
        let mut still = 0u64;
        let mut last = 0;
        let mut faults = 0;
        let mut short_until = 0;
        let mut next_unpark = 0;
        let mut next_count = 0;
        loop {
            engine.stock();
            let seen = self.look(&engine.kernel);
            let resident = seen.resident;
            let now = engine.kernel.now();
            // Short: it faults, and has no room for what comes. Not every look meets one of few large faults.
            let before = core::mem::replace(&mut faults, self.stats.pgfault.load(Ordering::Relaxed));
            if faults != before && engine.is_full() {
                short_until = now + SHORT_FOR;
            }
            let allowance = self.part.look(seen, now < short_until, &engine.kernel);
            engine.set_limit((allowance as usize) / PAGE);
            engine.measured(resident);
            if now >= next_count {
                self.count_unmanaged(engine, resident);
                self.tell_of_forks(keeper);
                let counted = engine.kernel.now();
                let over = (resident * PAGE) as u64 > allowance;
                let rest = if over { 100 * (counted - now).max(COUNT_EVERY / 1500) } else { COUNT_EVERY };
                next_count = counted + rest.min(COUNT_EVERY);
            }
            {
                let mut policy = engine.policy.lock();
                policy.reserve();
                if now >= next_unpark {
                    next_unpark = now + UNPARK_EVERY.max(UNPARK_EACH * policy.parked() as u64);
                    policy.unpark();
                }
            }
            // The closer the watch, the more it costs: it is close while mappings change, or while memory grows
            // that no fault announces.
            still = (still + 1).min(12);
            let over = -engine.budget.load(Ordering::Relaxed) * PAGE as i64;
            self.part.tell_excess(over.max(0) as u64);
            let changes = engine.unmappings.load(Ordering::Relaxed).wrapping_add(wrap::mappings());
            let mappings = (seen.size, seen.data, changes);
            if mappings != self.scanned {
                self.scanned = mappings;
                self.look_around(keeper, over.max(self.part.over() as i64));
                still = 0;
            } else if resident > last + 1024 {
                still = 0;
            }
            let holds = over.max(self.part.over() as i64) < self.settings.limit_bytes as i64 / 128;
            let calm = holds && still >= CALM;
            keeper.queue.set_calm(self.evictor, calm);
            // Beside threads that are as busy the evictor may wait for a CPU longer than the slack lasts.
            let far_over = over > FAR_OVER;
            if far_over || self.hurried {
                self.hurried = far_over;
                sys::call_first(self.evictor, far_over);
            }
            if engine.pressed() {
                engine.kick();
            }
            last = resident;
            self.count_locks();
            keeper.settle_bequests();
            let far = (self.part.left(seen, 0) + self.part.of_slack(FOLLOW_SLACK)) / FASTEST;
            let nap = (500_000 * (1 + still)).min(far.max(1_000_000));
            let longest = (REST_OF_EACH * self.part.alive()).clamp(LONGEST_REST, LONGEST_NAP);
            let nap = if holds { self.nap(nap, longest, now) } else { nap };
            self.pause(nap.max(LOOK_OF_EACH * self.part.alive()));
        }
    }

    /// Says in the counters how much cannot go. Where that leaves the rest no room, the limit gives way, and the
    /// user is told once.
    fn count_unmanaged(&mut self, engine: &Engine<Linux>, resident: usize) {
        let limit = self.settings.limit_bytes;
        let bytes = (engine.unmanaged(resident) * PAGE) as u64;
        Stats::set(&self.stats.unmanaged_bytes, bytes);
        // New memory that was not found yet is among it, but not twice.
        let before = core::mem::replace(&mut self.unmanaged, bytes);
        let stays = bytes.min(before);
        let room = self.part.smallest();
        engine.give_way(((stays + room) as usize) / PAGE);
        let now = engine.kernel.now();
        let (from, since, then) = *self.over.get_or_insert((now, now, stays));
        // A locked heap that is collected never is.
        let settled = stays.abs_diff(then) < limit / 64 || now - from >= RESTLESS;
        if stays <= limit {
            self.over = None;
        } else if now - since < REST {
            // Told when it has come to rest: the figure is to be of use, and what is found late can go after all.
        } else if !settled {
            self.over = Some((from, now, stays));
        } else if !self.told_over {
            self.told_over = true;
            let mebibytes = |bytes: u64| bytes.div_ceil(1 << 20);
            self.link.log(
                1,
                format_args!(
                    "process {}: {}M of its memory cannot go (files, code, shared or locked memory, stacks and \
                     the like); it stays over its limit of {}M; give at least {}M",
                    program(),
                    mebibytes(stays),
                    mebibytes(limit),
                    mebibytes(stays + room)
                ),
            );
        }
    }

    /// Says why children of the program end, unless it or a parent of it has.
    fn tell_of_forks(&self, keeper: &Keeper) {
        static TOLD: AtomicBool = AtomicBool::new(false);
        if TOLD.load(Ordering::Relaxed) {
            return;
        }
        let _events = keeper.engine.events.read();
        if keeper.code.lock().was_forked(&keeper.engine.kernel) {
            TOLD.store(true, Ordering::Relaxed);
            let line = format_args!(
                "process {} forks past libc: what is swapped out would be zeros in such a child, so it ends with \
                 SIGSEGV at once",
                program()
            );
            self.link.log(1, line);
        }
    }

    fn count_locks(&self) {
        use pageout::slot::{CLUSTER_LOCKS, LIST_LOCKS};
        use pageout::space::BLOCK_LOCKS;
        let stats = self.stats;
        for (class, taken, waits) in [
            (&BLOCK_LOCKS, &stats.lock_block, &stats.lock_block_waits),
            (&CLUSTER_LOCKS, &stats.lock_cluster, &stats.lock_cluster_waits),
            (&LIST_LOCKS, &stats.lock_lists, &stats.lock_lists_waits),
        ] {
            let (acquired, waited) = class.counts();
            Stats::set(taken, acquired);
            Stats::set(waits, waited);
        }
    }

    /// Looks for areas that can be managed. Those that can be executed are found once there is room for frames for them,
    /// which is returned when it is new.
    fn find_areas(&mut self, kernel: &Linux) -> Option<usize> {
        self.read_areas();
        let executable = self.executable_frames(kernel);
        if executable.is_some() {
            self.read_areas();
        }
        executable
    }

    fn read_areas(&mut self) {
        self.areas.clear();
        let mut stacks = exit::control_blocks();
        stacks.sort_unstable();
        let refused = |start: usize, end: usize| {
            let first = stacks.partition_point(|block| *block < start);
            let stack = end - start <= LARGEST_STACK && stacks.get(first).is_some_and(|block| *block < end);
            stack || end - start < SMALLEST_AREA
        };
        // Read by the kernel: it may be unmapped meanwhile, or its file be cut.
        let bss_end_of = |at, file_end| {
            let mut header = [0; 1024];
            bss_end(sys::read_memory(at, &mut header)?, at, file_end)
        };
        let mut walk = Walk::new(self.takes_executable);
        let (areas, code, executable) = (&mut self.areas, &mut self.code, &mut self.executable);
        code.clear();
        *executable = 0;
        self.maps.read(c"/proc/self/maps", |line| {
            let Some(area) = Area::parse(line) else { return };
            code.extend(is_code(&area).then_some((area.start, area.end)));
            if memory::is_own(area.start, area.end) {
                return;
            }
            *executable += if area.is_executable() { area.end - area.start } else { 0 };
            areas.extend(walk.step(&area, refused, bss_end_of));
        });
    }

    /// New memory of so many bytes is worth to be taken up.
    fn worth(&self) -> u64 {
        (self.settings.limit_bytes / GROWTH_SHARE).clamp(LEAST_GROWTH, MOST_GROWTH)
    }

    /// Room for frames for memory that can be executed, once there is much of that. From here on it is found.
    fn executable_frames(&mut self, kernel: &Linux) -> Option<usize> {
        if (self.executable as u64) < self.worth() || core::mem::replace(&mut self.asked_executable, true) {
            return None;
        }
        // Refused where nothing may be written and executed: then there is no more of the program's, either.
        let base = memory::map_executable(EXECUTABLE * PAGE).ok()?;
        if kernel.register(base, EXECUTABLE * PAGE).is_err() {
            memory::unmap(base, EXECUTABLE * PAGE);
            return None;
        }
        self.takes_executable = true;
        Some(base)
    }

    /// Adopts areas that are there and not managed yet, if it is worth it, or much is `over` the limit, in bytes: what grows
    /// fast is slowed down by it.
    fn look_around(&mut self, keeper: &'static Keeper, over: i64) {
        let engine = &keeper.engine;
        let loans = keeper.code.lock().loans();
        let executable = self.find_areas(&engine.kernel);
        executable.into_iter().for_each(|base| engine.frames.open_executable(base));
        if !keeper.code.lock().found(&self.code, loans) {
            self.scanned = (0, 0, 0);
        }
        let mut gaps: Vec<(usize, usize)> = Vec::with_capacity(self.areas.len());
        {
            let regions = engine.events.read();
            for (start, end) in &self.areas {
                regions.gaps(*start, *end, |from, to| gaps.push((from, to)));
            }
        }
        let grown: usize = gaps.iter().map(|(start, end)| end - start).sum();
        let worth = self.worth();
        if over < worth as i64 && (grown as u64) < self.part.of_slack(worth) {
            return;
        }
        for (start, end) in gaps {
            // The program may have unmapped it since, and a thread of the engine may have got the addresses.
            if memory::is_own(start, end) {
                continue;
            }
            // Refused: somebody else's userfaultfd, or gone already. It counts as memory that cannot go.
            let _ = engine.adopt(start, end);
        }
    }
}

/// The thread that answers faults.
extern "C" fn serve(keeper: usize) -> ! {
    // SAFETY: see `take_up`.
    let keeper = unsafe { &*(keeper as *const Keeper) };
    let mut server = Server::new();
    sys::go_first_or_even();
    loop {
        server.serve(&keeper.engine, FOREVER);
    }
}

/// Who evicts ahead does so when nobody else wants the CPU: a fault that finds nothing ready lets pages leave itself, at
/// the cost of who faults. Not while the limit is endangered. It waits between its rounds only, never with a lock.
struct Queue {
    calm: AtomicBool,
    waits: AtomicBool,
}

impl Queue {
    const fn new() -> Self {
        Self { calm: AtomicBool::new(false), waits: AtomicBool::new(false) }
    }

    /// From `evictor`, if it may come first: comes back when a CPU is idle, or the limit in danger, or others `lack` what
    /// it has to give.
    fn wait(&self, kernel: &Linux, lack: &AtomicBool) {
        while self.calm.load(Ordering::Relaxed) && !lack.load(Ordering::Relaxed) {
            self.waits.store(true, Ordering::SeqCst);
            let asked = kernel.now();
            sys::wait_behind(|| self.waits.swap(false, Ordering::SeqCst));
            if kernel.now() - asked < AT_ONCE {
                break;
            }
            let _ = rustix::thread::nanosleep(&rustix::thread::Timespec { tv_sec: 0, tv_nsec: BUSY_NAP });
        }
    }

    /// The limit is in danger, or not: in danger `evictor` waits no longer. Said at each look, for it may have begun to wait
    /// meanwhile.
    fn set_calm(&self, evictor: u32, calm: bool) {
        self.calm.store(calm, Ordering::Relaxed);
        if !calm && self.waits.swap(false, Ordering::SeqCst) {
            sys::call_first(evictor, false);
        }
    }
}

/// The thread that evicts ahead.
extern "C" fn evict(keeper: usize) -> ! {
    // SAFETY: see `take_up`.
    let keeper = unsafe { &*(keeper as *const Keeper) };
    let engine = &keeper.engine;
    let mut out = Box::new(Outgoing::new());
    let is_first = sys::go_first();
    let (mut full_since, mut told) = (None, false);
    loop {
        let wanted = engine.wanted.heard();
        if is_first {
            keeper.queue.wait(&engine.kernel, &keeper.is_short);
        }
        let round = engine.balance(&mut out);
        if keeper.is_short.swap(false, Ordering::Relaxed) {
            for _ in 0..GIVEN {
                if !engine.place.give_back(0) {
                    break;
                }
            }
        }
        let (is_full, is_idle) = (engine.place.is_full(), round == Round::Idle);
        // There has been room since, and it was enough.
        told &= is_full || !is_idle;
        if !is_full || is_idle {
            full_since = None;
        } else if round == Round::Stuck && !told {
            let now = engine.kernel.now();
            told = now - *full_since.get_or_insert(now) >= FULL_FOR;
            if told {
                keeper.link.log(
                    1,
                    format_args!(
                        "swap is full: process {} grows beyond its limit; give more with -s",
                        program()
                    ),
                );
            }
        }
        let Some(nap) = round.nap_ns() else { continue };
        engine.wanted.wait(wanted, nap);
        // Nobody has called for so long: what is free is given back. Under load it is written again at once.
        let rests = || is_idle && engine.wanted.heard() == wanted;
        if rests() {
            engine.shed();
        }
        for _ in 0..GIVEN {
            if !rests() || !engine.place.give_back(KEPT) && !engine.place.discard() {
                break;
            }
        }
    }
}
