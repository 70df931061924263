//! System calls, by rustix or raw: no errno, no thread-local state.

use crate::wrap;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use linux_raw_sys::general as raw;
use rustix::fs::fstat;
use rustix::io::Errno;
use rustix::process::{getpid, getrlimit, setrlimit, test_kill_process, Pid, Resource, Rlimit};
use rustix::thread::{futex, gettid, nanosleep, Timespec};
use rustix::time::{clock_gettime, ClockId};

pub use pageout::call::call as call6;

/// A system call with up to four arguments.
///
/// # Safety
/// As the call asks.
pub unsafe fn call(number: u32, a: usize, b: usize, c: usize, d: usize) -> Result<usize, Errno> {
    // SAFETY: by contract.
    unsafe { call6(number, [a, b, c, d, 0, 0]) }
}

/// Ends the calling task and, if it is a thread, its whole process.
pub fn exit_group(status: i32) -> ! {
    loop {
        // SAFETY: no arguments that point anywhere.
        let _ = unsafe { call(raw::__NR_exit_group, status as usize, 0, 0, 0) };
    }
}

/// What the program's standard error was before `main`: device and number of the file, never both 0. By now 2 may be a file of data
/// or a connection of the program's, and in the keeper a device.
static STDERR: [AtomicU64; 2] = [AtomicU64::new(0), AtomicU64::new(0)];

/// The file that has number 2 now; zeros where none has.
fn at_stderr() -> [u64; 2] {
    // SAFETY: asks only.
    fstat(unsafe { rustix::stdio::stderr() }).map_or([0; 2], |file| [file.st_dev, file.st_ino])
}

/// Before `main`.
pub fn note_stderr() {
    STDERR.iter().zip(at_stderr()).for_each(|(word, of)| word.store(of, Ordering::Relaxed));
}

/// Writes a line to standard error, if that is what it was before `main`, for what run cannot be asked to say. Fit for a child that
/// has no engine.
pub fn complain(line: &[u8]) {
    let known = STDERR.each_ref().map(|word| word.load(Ordering::Relaxed));
    // A filter may not allow to ask.
    if known != [0; 2] && (wrap::is_filtered() || at_stderr() == known) {
        // SAFETY: 2 is that file, or the write fails; but for what a filter hides.
        let _ = rustix::io::write(unsafe { rustix::stdio::stderr() }, line);
    }
}

/// The same of what is still to be put together, for which there may be no memory: as far as it fits.
pub fn complain_of(what: core::fmt::Arguments<'_>) {
    let mut line = [0; 512];
    let room = line.len() - 1;
    let len = write_line(&mut line[..room], format_args!("pageout: {what}"));
    line[len] = b'\n';
    complain(&line[..len + 1]);
}

/// Writes one line as far as it fits, without memory; how many bytes that are.
pub fn write_line(to: &mut [u8], what: core::fmt::Arguments<'_>) -> usize {
    struct Line<'a>(&'a mut [u8], usize);
    impl core::fmt::Write for Line<'_> {
        fn write_str(&mut self, text: &str) -> core::fmt::Result {
            for (room, byte) in self.0[self.1..].iter_mut().zip(text.bytes()) {
                *room = if byte == b'\n' { b' ' } else { byte };
                self.1 += 1;
            }
            Ok(())
        }
    }
    let mut line = Line(to, 0);
    let _ = core::fmt::write(&mut line, what);
    line.1
}

/// Do the calling process's descendants become its children when their parents end?
pub fn is_subreaper() -> bool {
    const PR_GET_CHILD_SUBREAPER: usize = 37;
    let mut is = 0i32;
    let to = &raw mut is as usize;
    // SAFETY: the word is written before the call returns.
    let asked = unsafe { call(raw::__NR_prctl, PR_GET_CHILD_SUBREAPER, to, 0, 0) };
    asked.is_ok() && is != 0
}

/// Waits for a child that tells nobody of its end, or only looks whether it has ended; its status if it has.
pub fn wait_for_clone(id: u32, only_look: bool) -> Option<i32> {
    let mut status = 0i32;
    let to = &raw mut status as usize;
    let options = raw::__WCLONE | if only_look { raw::WNOHANG } else { 0 };
    // SAFETY: the status is written before the call returns.
    let waited = unsafe { call(raw::__NR_wait4, id as usize, to, options as usize, 0) };
    (waited == Ok(id as usize)).then_some(status)
}

/// Such a child that has ended, if there is one. It can still be waited for.
pub fn ended_clone() -> Option<u32> {
    let mut about = [0u32; 32];
    let to = about.as_mut_ptr() as usize;
    let options = raw::__WCLONE | raw::WEXITED | raw::WNOHANG | raw::WNOWAIT;
    // SAFETY: there is room for a `siginfo_t`.
    unsafe { call6(raw::__NR_waitid, [raw::P_ALL as usize, 0, to, options as usize, 0, 0]) }.ok()?;
    // Behind three numbers, aligned for pointers. 0: none.
    Some(about[4]).filter(|id| *id != 0)
}

/// Do two processes share their memory? `None`: not to be told (permissions).
pub fn same_memory(one: u32, other: u32) -> Option<bool> {
    const KCMP_VM: usize = 1;
    // SAFETY: no arguments that point anywhere.
    match unsafe { call(raw::__NR_kcmp, one as usize, other as usize, KCMP_VM, 0) } {
        Ok(order) => Some(order == 0),
        Err(Errno::SRCH) => Some(false),
        Err(_) => None,
    }
}

/// What the calling process has at an address, as far as it can be read.
pub fn read_memory(at: usize, into: &mut [u8]) -> Option<&[u8]> {
    let me = own_process() as usize;
    let [from, to] = [[at, into.len()], [into.as_mut_ptr() as usize, into.len()]];
    let [from, to] = [&raw const from as usize, &raw const to as usize];
    // SAFETY: writes at most the slice.
    let len = unsafe { call6(raw::__NR_process_vm_readv, [me, to, 1, from, 1, 0]) }.ok()?;
    into.get(..len)
}

/// Ends the process as by SIGKILL; where a filter forbids that, with the same status.
pub fn kill_self() -> ! {
    let me = own_process() as usize;
    // SAFETY: takes numbers.
    let _ = unsafe { call(raw::__NR_kill, me, raw::SIGKILL as usize, 0, 0) };
    exit_group(128 + raw::SIGKILL as i32)
}

/// Blocks the signals that come from elsewhere; returns the mask before. Those that an instruction raises still
/// reach their handlers, unless the program has blocked them: blocked, they would kill.
pub fn block_signals_from_elsewhere() -> u64 {
    let own = [raw::SIGILL, raw::SIGTRAP, raw::SIGBUS, raw::SIGFPE, raw::SIGSEGV, raw::SIGSYS];
    change_signals(raw::SIG_BLOCK, own.iter().fold(!0, |mask, signal| mask & !bit(*signal)))
}

/// Blocks the rest of them, too, but for SIGSYS, by which the kernel may show what it does not let through.
pub fn block_own_signals() {
    change_signals(raw::SIG_BLOCK, !bit(raw::SIGSYS));
}

/// The GNU libc's own signal, which no program can block: who changes user or group has each thread do so by it, and waits for
/// all of them.
const SIGSETXID: u32 = 33;

/// Lets through what a thread cannot do without while it is in a fork: that, by its handlers, somebody may wait for who waits for
/// it; and SIGSYS, by which the clone is watched.
pub fn unblock_for_fork() {
    change_signals(raw::SIG_UNBLOCK, bit(raw::SIGSYS) | bit(SIGSETXID));
}

/// From here on the first of them waits, too, until [`unblock_for_fork`].
pub fn block_setxid() {
    change_signals(raw::SIG_BLOCK, bit(SIGSETXID));
}

fn bit(signal: u32) -> u64 {
    1 << (signal - 1)
}

/// Does what a handler of the program must not run amid: who faults there would wait for servers, and these may wait for what
/// `work` holds.
pub fn quietly<T>(work: impl FnOnce() -> T) -> T {
    let mask = block_signals_from_elsewhere();
    let done = work();
    set_signals(mask);
    done
}

/// What a clock says, in ns.
pub fn time(clock: ClockId) -> u64 {
    let now = clock_gettime(clock);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// Counts the calling thread as the owner of every file, where it has come to?
pub fn owns_all_files() -> bool {
    let sets = rustix::thread::capabilities(None);
    sets.is_ok_and(|sets| sets.effective.contains(rustix::thread::CapabilitySet::FOWNER))
}

/// The calling process's number.
pub fn own_process() -> u32 {
    getpid().as_raw_nonzero().get() as u32
}

/// The calling thread's number.
pub fn own_number() -> u32 {
    gettid().as_raw_nonzero().get() as u32
}

/// Has the thread of this number (0: nobody) ended? Then the kernel touches nothing of it any more.
pub fn has_ended(thread: u32) -> bool {
    // Another user's is there, too.
    Pid::from_raw(thread as i32).is_some_and(|thread| test_kill_process(thread) == Err(Errno::SRCH))
}

/// Waits until somebody is woken by `word`, which is `was`, or a tenth of a second. Is that over?
pub fn wait_a_tenth(word: &AtomicU32, was: u32, flags: futex::Flags) -> bool {
    let tenth = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
    futex::wait(word, flags, was, Some(&tenth)) == Err(Errno::TIMEDOUT)
}

/// Sleeps for so many nanoseconds, less than a second, or until a handler has run.
pub fn nap(ns: i64) {
    let _ = nanosleep(&Timespec { tv_sec: 0, tv_nsec: ns });
}

/// Blocks every signal for the calling task; returns the mask before.
pub fn block_signals() -> u64 {
    set_signals(!0)
}

/// Sets the mask of blocked signals; returns the mask before.
pub fn set_signals(mask: u64) -> u64 {
    change_signals(raw::SIG_SETMASK, mask)
}

fn change_signals(how: u32, mask: u64) -> u64 {
    let mut old = 0u64;
    let (how, mask) = (how as usize, &raw const mask as usize);
    // SAFETY: both masks are 8 bytes.
    let _ = unsafe { call(raw::__NR_rt_sigprocmask, how, mask, &raw mut old as usize, 8) };
    old
}

/// The calling process may read the counter of cycles, by which the vDSO tells the time: its program may have forbidden it to
/// itself (PR_SET_TSC), and a child of that inherits it.
pub fn let_read_clocks() {
    const PR_SET_TSC: usize = 26;
    const PR_TSC_ENABLE: usize = 1;
    // SAFETY: takes numbers.
    let _ = unsafe { call(raw::__NR_prctl, PR_SET_TSC, PR_TSC_ENABLE, 0, 0) };
}

/// The calling process is limited as little as it may be: its limits were meant for the program.
pub fn raise_limits() {
    for resource in [
        Resource::Cpu,
        Resource::Rttime,
        Resource::Fsize,
        Resource::As,
        Resource::Data,
        Resource::Memlock,
        Resource::Nofile,
    ] {
        let maximum = getrlimit(resource).maximum;
        if setrlimit(resource, Rlimit { current: None, maximum: None }).is_err() {
            let _ = setrlimit(resource, Rlimit { current: maximum, maximum });
        }
    }
}

/// What `process`, 0 for the calling one, may raise a limit to, if it says so.
pub fn highest_limit(process: u32, resource: u32) -> Option<u64> {
    let mut limit = [0u64; 2];
    let at = &raw mut limit as usize;
    // SAFETY: both limits are 8 bytes.
    unsafe { call(raw::__NR_prlimit64, process as usize, resource as usize, 0, at) }.ok()?;
    Some(limit[1])
}

/// `struct sched_attr` of linux/sched/types.h, first version.
#[repr(C)]
struct Scheduling {
    size: u32,
    policy: u32,
    flags: u64,
    nice: i32,
    priority: u32,
    runtime: u64,
    deadline: u64,
    period: u64,
}

impl Scheduling {
    const ORDINARY: Self = Self {
        size: size_of::<Self>() as u32,
        policy: raw::SCHED_NORMAL,
        flags: 0,
        nice: 0,
        priority: 0,
        runtime: 100_000,
        deadline: 0,
        period: 0,
    };

    const FIRST: Self = Self { nice: -15, ..Self::ORDINARY };

    /// As threads that asked for nothing.
    const UNASKED: Self = Self { runtime: 0, ..Self::ORDINARY };

    const LAST: Self = Self { nice: 19, ..Self::ORDINARY };

    const fn real_time(priority: u32) -> Self {
        Self { policy: raw::SCHED_RR, priority, runtime: 0, ..Self::ORDINARY }
    }

    /// Asks it for a thread of the caller's; 0 is the calling one.
    fn is_granted(&self, thread: u32) -> bool {
        // SAFETY: the structure is as long as it says.
        unsafe { call(raw::__NR_sched_setattr, thread as usize, self as *const Self as usize, 0, 0) }.is_ok()
    }
}

/// Puts the calling thread before ordinary ones, as far as it may: what it does is short, and others wait for
/// it. Needs CAP_SYS_NICE; without it the thread stays as it is, with a short slice, so that it is at least
/// woken soon (Linux 6.12), and it says false. Not a real-time class: an engine that thrashes must not stop the machine.
pub fn go_first() -> bool {
    first_or(&Scheduling::ORDINARY)
}

/// For a server, which shares its CPU with whom it answers. Without the right to go first it takes slices as long as
/// his: at the end of each one he runs before he is answered, and is answered elsewhere then.
pub fn go_first_or_even() {
    first_or(&Scheduling::UNASKED);
}

fn first_or(other: &Scheduling) -> bool {
    let first = Scheduling::FIRST.is_granted(0);
    if !first {
        let _ = other.is_granted(0);
    }
    first
}

/// The real-time priority of the program's first thread when the keeper was made; 0 for the other classes.
static RANK: AtomicU32 = AtomicU32::new(0);

/// Notes the class of the program's first thread. Not that of the caller, who is of its maker's but where that one said
/// SCHED_RESET_ON_FORK.
pub fn note_rank(program: u32) {
    let mut priority = 0i32;
    // SAFETY: `struct sched_param` is this number.
    let _ = unsafe { call(raw::__NR_sched_getparam, program as usize, &raw mut priority as usize, 0, 0) };
    RANK.store(priority as u32, Ordering::Relaxed);
}

/// Is the program of a real-time class? Then it may keep all of the CPUs that it has.
pub fn serves_real_time() -> bool {
    RANK.load(Ordering::Relaxed) != 0
}

/// For the watch, which sleeps between any two looks: a real-time class, the lowest but one, or right above the
/// program's. As an ordinary thread it was woken up to 90 ms late while four threads were busy on two CPUs: 200 MB of new
/// memory. Where that is not allowed, as [`go_first`].
pub fn go_before_all() {
    let above = RANK.load(Ordering::Relaxed) + 1;
    if !Scheduling::real_time(above.clamp(2, 99)).is_granted(0) {
        go_first();
    }
}

/// Is the calling thread of class SCHED_DEADLINE, in which nobody is born, and its children are to be, too?
pub fn may_have_no_children() -> bool {
    // SAFETY: takes a number.
    let class = unsafe { call(raw::__NR_sched_getscheduler, 0, 0, 0, 0) };
    // Without the flag that gives children another.
    class == Ok(raw::SCHED_DEADLINE as usize)
}

/// Are the caller's children to be in another PID namespace? The first of them is its init, and all end with it.
pub fn children_are_elsewhere() -> bool {
    let of = |path| rustix::fs::stat(path).map(|namespace| namespace.st_ino);
    match of(c"/proc/self/ns/pid") {
        // There is none as long as it has no init.
        Ok(own) => of(c"/proc/self/ns/pid_for_children").map_or_else(|e| e == Errno::NOENT, |its| its != own),
        Err(_) => false,
    }
}

/// Lets others run that want to, and comes back before ordinary threads if nobody else calls the thread `first`. Only for
/// who may come first: anybody else would stay behind.
pub fn wait_behind(first: impl FnOnce() -> bool) {
    let _ = Scheduling::LAST.is_granted(0);
    rustix::thread::sched_yield();
    if first() {
        go_first();
    }
}

/// Has another thread of the keeper come before ordinary ones; before all of them: only while there is an end to it in
/// sight.
pub fn call_first(thread: u32, before_all: bool) {
    let _ = if before_all { Scheduling::real_time(1) } else { Scheduling::FIRST }.is_granted(thread);
}
