//! The keeper: a process on the program's memory, with descriptors and a life of its own. Here it is started, says hello to
//! run, and is found by the program's threads; what it does then is its [`Life`].

use crate::code::Code;
use crate::files::Files;
use crate::life::Life;
use crate::link::{self, Link, Welcome};
use crate::part::Part;
use crate::threads::Queue;
use crate::tie::Tie;
use crate::{exit, fork, gate, heir, memory, part, program, remap, sys, task};
use alloc::boxed::Box;
use alloc::vec::Vec;
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, Ordering};
use pageout::engine::Engine;
use pageout::kernel::Linux;
use pageout::stats::{Stats, STATS_BYTES};
use pageout::sync::{Bell, Lock, OTHER_LOCKS};
use pageout::wire::{Kind, Message, BYE_ASIDE};
use rustix::fd::AsFd;
use rustix::io::{fcntl_getfd, Errno};
use rustix::process::{pidfd_open, Pid, PidfdFlags};
use rustix::thread::futex;

/// Who cannot do without another process or thread, and finds no room for it, tries again after so many ns, so often.
const HIRE_AGAIN: i64 = 50_000_000;
const HIRE_ATTEMPTS: usize = 200;
/// What to do about that.
pub const MORE_TASKS: &str = "raise pids.max of its control group, or ulimit -u";
/// The same of memory.
pub const MORE_MEMORY: &str = "raise vm.max_map_count, ulimit -v or ulimit -d";
/// How often a connection that run has closed is tried again, after so many ns each.
const RESETS: usize = 5;
const RESET_NAP: i64 = 10_000_000;
/// How often who inherits looks for a socket that somebody has removed just now, as long each: run makes it again.
const ABSENCES: usize = 300;

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
/// See [`path`].
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
    pub(crate) queue: Queue,
    /// Rings when a device is to be cleared.
    pub(crate) clearing: Bell,
    /// Others lack trunks.
    pub(crate) is_short: AtomicBool,
    /// What leaves of files.
    pub(crate) files: Files,
}

impl Keeper {
    /// There for good.
    pub fn new(engine: Engine<Linux>, link: &'static Link, code: Code) -> &'static Self {
        Box::leak(Box::new(Self {
            engine,
            link,
            bequests: Lock::new(Vec::new(), &OTHER_LOCKS),
            code: Lock::new(code, &OTHER_LOCKS),
            clearing: Bell::new(),
            is_short: AtomicBool::new(false),
            queue: Queue::new(),
            files: Files::new(),
        }))
    }

    /// From here on it is [`active`].
    pub fn publish(&'static self) {
        ENGINE.store(self as *const Self as *mut Self, Ordering::SeqCst);
    }

    /// A thread more of the keeper's; its number.
    pub fn hire(&'static self, main: extern "C" fn(usize) -> !) -> u32 {
        // SAFETY: the keeper lives as long as its process, and none of these returns.
        let start = || unsafe { task::start(task::Kind::Thread, main, self as *const Self as usize) }.ok();
        // Whoever faults waits meanwhile.
        start().or_else(|| patiently(start)).unwrap_or_else(|| {
            give_up(format_args!("no room for threads of the engine of process {}; {MORE_TASKS}", program()))
        })
    }

    /// Has `run` keep a bequest for the child; the number that the child asks with. `None`: there is no run any more, or
    /// the kernel gives no number that nobody else has.
    pub fn lend(&self, file: &heir::File) -> Option<u64> {
        let mut token = [0u8; 8];
        rustix::rand::getrandom(&mut token, rustix::rand::GetRandomFlags::empty()).ok()?;
        let token = u64::from_ne_bytes(token);
        self.link.give(&Message::new(Kind::Bequest, token, 0, 0), file.fd()).then_some(token)
    }

    /// The clone is through; with a child the bequest is kept until all who inherit it have gone.
    pub fn lent(&self, token: u64, file: heir::File, child: gate::Child) {
        if let gate::Child::None = child {
            self.link.tell(&Message::new(Kind::Cancel, token, 0, 0), None);
            return file.give_up(&self.engine);
        }
        if let gate::Child::Number(pid) = child {
            self.link.tell(&Message::new(Kind::Born, token, u64::from(pid), 0), None);
        }
        file.rest();
        self.bequests.lock().push(file);
    }

    /// Tells run once nothing that was inherited is read any more.
    pub fn come_apart(&self) {
        if self.engine.place.comes_apart() {
            self.link.tell(&Message::new(Kind::Apart, 0, 0, 0), None);
            fork::set_generations(0);
        }
    }

    /// Gives up what nobody reads any more.
    pub fn settle_bequests(&self) {
        loop {
            let mut bequests = self.bequests.lock();
            let Some(index) = bequests.iter().position(heir::File::is_released) else { return };
            let file = bequests.swap_remove(index);
            drop(bequests);
            file.give_up(&self.engine);
        }
    }
}

/// The engine of this address space, if it works. Not the parent's, in the child of a fork.
pub fn active() -> Option<&'static Keeper> {
    // SAFETY: published whole, never freed, and its memory is there when this is its address space.
    unsafe { ENGINE.load(Ordering::SeqCst).as_ref() }.filter(|_| memory::is_home())
}

/// The process whose memory this is.
pub fn program() -> u32 {
    PROGRAM.load(Ordering::Relaxed)
}

/// Another process has the memory from here on.
pub fn set_program(guest: &program::Guest) {
    PROGRAM.store(guest.id, Ordering::Relaxed);
    LISTED.store(guest.listed, Ordering::Relaxed);
}

/// What /proc calls it: that may list the processes of another namespace. 0 where there is none.
pub fn listed() -> u32 {
    LISTED.load(Ordering::Relaxed)
}

/// The calling process's.
fn listed_self() -> Option<u32> {
    let mut name = [const { core::mem::MaybeUninit::uninit() }; 16];
    let (name, _) = rustix::fs::readlinkat_raw(rustix::fs::CWD, c"/proc/self", &mut name).ok()?;
    core::str::from_utf8(name).ok()?.parse().ok()
}

/// Looks whether /proc is that of the keeper's namespace by now, `me` its number there, which has the program's, too.
pub fn list_again(me: u32) {
    if listed() != program() && listed_self() == Some(me) {
        LISTED.store(program(), Ordering::Relaxed);
    }
}

/// Has the keeper not ended?
pub fn is_there() -> bool {
    let keeper = KEEPER.load(Ordering::SeqCst);
    Pid::from_raw(keeper as i32).is_none_or(|pid| {
        // Where it is a child, it is there until it is waited for.
        sys::wait_for_clone(keeper, true).is_none()
            && rustix::process::test_kill_process(pid) != Err(Errno::SRCH)
    })
}

/// In a fork's child: the engine was the parent's.
pub fn forget() {
    KEEPER.store(0, Ordering::SeqCst);
    BEGUN.store(0, Ordering::SeqCst);
    ENGINE.store(core::ptr::null_mut(), Ordering::SeqCst);
}

/// Before main: keepers of this process, and of its forks, find the run there.
pub fn prepare_process(path: Path) {
    // SAFETY: nobody else is here yet.
    unsafe { PATH = path };
}

/// Where the run is.
pub fn path() -> Path {
    // SAFETY: written before main.
    unsafe { PATH }
}

/// Has [`prepare_process`] been called? What is initialised before this library may fork before that.
pub fn is_prepared() -> bool {
    path().len > 0
}

/// Starts the keeper of the calling process; false: there is none. Without one the program runs unlimited, and `run`
/// says so.
pub fn start() -> bool {
    if memory::reserve().is_err() {
        return false;
    }
    LISTED.store(listed_self().unwrap_or(0), Ordering::Relaxed);
    PROGRAM.store(sys::own_process(), Ordering::Relaxed);
    let mask = sys::block_signals();
    let sent = send_messenger();
    // Who inherits cannot do without.
    let started = sent.is_ok() || fork::is_heir() && patiently(|| send_messenger().ok()).is_some();
    if let (Err(errno), false) = (sent, fork::is_heir()) {
        match errno {
            Errno::AGAIN if sys::may_have_no_children() => goes_without(format_args!(
                "its class, SCHED_DEADLINE, allows it no children, so no keeper; have them get another class \
                 (SCHED_RESET_ON_FORK, chrt -R -d)"
            )),
            Errno::AGAIN => goes_without(format_args!("no room for its keeper; {MORE_TASKS}")),
            Errno::NOMEM => goes_without(format_args!(
                "the kernel has no memory for its keeper, or its process namespace has ended"
            )),
            errno => goes_without(format_args!(
                "this kernel, a filter or an emulator refuses it a keeper on the same memory ({errno})"
            )),
        }
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
        // Nobody may wait here. Another messenger would start another keeper.
        None if patiently(|| (KEEPER.load(Ordering::SeqCst) != 0).then_some(())).is_some() => Ok(()),
        _ => Err(Errno::AGAIN),
    }
}

/// The keepers of what this process was before it became another program, where they were its children: nobody else
/// waits for them.
fn reap_earlier() {
    while let Some(id) = sys::ended_clone() {
        if !program::is_keeper(id) || sys::wait_for_clone(id, true).is_none() {
            return;
        }
    }
}

/// Tries `work` until it is done, for ten seconds.
fn patiently<T>(mut work: impl FnMut() -> Option<T>) -> Option<T> {
    (0..HIRE_ATTEMPTS).find_map(|_| {
        sys::nap(HIRE_AGAIN);
        work()
    })
}

/// The program need not wait for the keeper any longer.
pub fn begun() {
    BEGUN.store(1, Ordering::SeqCst);
    let _ = futex::wake(&BEGUN, futex::Flags::PRIVATE, 1);
}

/// Starts the keeper and ends, so that the keeper is a child of `run` and not of the program. Whose own orphans come to
/// itself would wait for such a keeper, as for all its children: it has one that it does not see.
extern "C" fn messenger(gets_orphans: usize) -> ! {
    sys::note_rank(program());
    // The keeper is born as its maker is: among busy threads a short program was over before it began.
    sys::go_before_all();
    let kind = if gets_orphans != 0 { task::Kind::Sibling } else { task::Kind::Process };
    // SAFETY: the keeper never returns.
    let started = unsafe { task::start(kind, keeper, 0) };
    sys::exit_group(started.map_or_else(Errno::raw_os_error, |_| 0))
}

extern "C" fn keeper(_: usize) -> ! {
    let me = sys::own_process();
    KEEPER.store(me, Ordering::SeqCst);
    let _ = rustix::thread::set_name(c"pageout");
    // Whoever kills the group, or waits for its end, means the program, which may be in another by then. Not a session of
    // its own: where the scheduler shares CPUs out among sessions, it would not be weighed against the program any more.
    let _ = rustix::process::setpgid(None, None);
    sys::raise_limits();
    sys::go_before_all();
    sys::let_read_clocks();
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
    let (link, welcome) = match connect(program) {
        Ok(met) => met,
        Err(errno) => {
            // Run has ended, which it said or its user saw, and with it the limit; every program that a shell starts would
            // say it again. Or it is called by a path that another mount hides, or another root, or that another user may not
            // go (each child of a server that gave up root would say so): run itself tells of these, once for each program. SRCH:
            // the root is in what was the /proc of a process (Chromium's sandbox).
            if !matches!(errno, Errno::NOENT | Errno::CONNREFUSED | Errno::SRCH | Errno::ACCESS) {
                let why = match errno {
                    Errno::MFILE => "what its keeper opens is more than it may; raise ulimit -n",
                    _ => "its run does not answer",
                };
                goes_without(format_args!("{why} ({errno})"));
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
    let tie = Tie::new().ok();
    // SAFETY: it manages what leaves and comes back as it was.
    let kernel = match unsafe { Linux::open_on(welcome.userfaultfd.as_ref().map(AsFd::as_fd)) } {
        Ok(kernel) => match sys::serves_real_time() {
            true => kernel.everywhere(),
            false => kernel,
        },
        Err(error) => {
            let why = alloc::format!("{error}");
            link.tell(&Message::with_text(Kind::Unlimited, 0, why.as_bytes()), None);
            leave(1)
        }
    };
    let kernel = kernel
        .with_growths(remap::growths, remap::growing)
        .with_numbers(exit::has_one_namespace)
        .with_guests(exit::may_have_guests);
    let Ok(part) = Part::new(&welcome.tree, welcome.seat, welcome.settings.limit_bytes, kernel.statm())
    else {
        give_up(format_args!("no memory for the keeper of process {program}"))
    };
    Life::new(watch, link, welcome, part, tie, stats).run(kernel)
}

/// Says hello. A run that ends just then has closed the connection, and soon its socket: that is what its absence looks like.
fn connect(program: u32) -> Result<(Link, Welcome), Errno> {
    let (mut resets, mut absences) = (0, 0);
    loop {
        match Link::connect(path().as_bytes(), program) {
            Err(Errno::CONNRESET | Errno::PIPE) if resets < RESETS => resets += 1,
            Err(Errno::NOENT | Errno::CONNREFUSED) if absences < ABSENCES && fork::is_heir() => absences += 1,
            met => return met,
        }
        sys::nap(RESET_NAP);
    }
}

/// Ends the keeper after a bug or when the engine cannot go on; the program is ended by `run`, if anything is held. In a thread of the
/// program, it.
pub fn give_up(why: core::fmt::Arguments<'_>) -> ! {
    let me = sys::own_process();
    if me != KEEPER.load(Ordering::SeqCst) {
        sys::complain_of(format_args!("process {me}: {why}; killed"));
        sys::kill_self();
    }
    if !link::last_word(why) {
        goes_without(why);
    }
    leave(1)
}

/// Says why the program has no limit, where run cannot be asked to.
fn goes_without(why: core::fmt::Arguments<'_>) {
    sys::complain_of(format_args!("process {} runs without a limit: {why}", program()));
}

/// Ends the keeper. A program that waits to inherit ends with it.
pub fn leave(status: i32) -> ! {
    fork::lost();
    // Who goes on without it is held up by nobody.
    part::let_go();
    begun();
    sys::exit_group(status)
}
