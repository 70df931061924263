//! System calls that std does not have, as safe functions. Every `unsafe` of the command is here, in `witness`, and in tests.
//!
//! Nothing here decides anything. All descriptors are close-on-exec. Any thread, except where said.

use std::ffi::{CStr, CString, OsStr};
use std::fs::File;
use std::io::{self, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Command, ExitStatus};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering::Relaxed};
use std::time::Duration;

use pageout::device::FileSystem;

/// Minus one means: look at errno.
fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(result)
    }
}

/// A path for a system call.
pub fn c_path(path: &Path) -> io::Result<CString> {
    CString::new(path.as_os_str().as_bytes()).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))
}

/// # Safety
/// `fd` must be open and nobody else's.
unsafe fn own(fd: RawFd) -> OwnedFd {
    // SAFETY: promised by the caller.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

/// The effective user.
pub fn euid() -> u32 {
    // SAFETY: no arguments, cannot fail.
    unsafe { libc::geteuid() }
}

/// The real user and group, by which the kernel tells whether a program gains privileges.
pub fn real_ids() -> (u32, u32) {
    // SAFETY: no arguments, cannot fail.
    unsafe { (libc::getuid(), libc::getgid()) }
}

/// Whether `PR_SET_NO_NEW_PRIVS` is on: no program gains privileges then.
pub fn no_new_privs() -> bool {
    // SAFETY: takes integers only.
    unsafe { libc::prctl(libc::PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0) == 1 }
}

/// Orphans of the tree become our children, so that we learn of their end.
pub fn become_subreaper() -> io::Result<()> {
    // SAFETY: takes integers only.
    check(unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) }).map(drop)
}

/// Has whoever began us said that only memory that asks for huge pages gets them?
pub fn gives_huge_pages_if_asked() -> bool {
    /// That, and except what is advised, since Linux 6.18.
    const DISABLED_EXCEPT_ADVISED: libc::c_int = 3;
    // SAFETY: takes integers only.
    unsafe { libc::prctl(libc::PR_GET_THP_DISABLE, 0, 0, 0, 0) == DISABLED_EXCEPT_ADVISED }
}

/// The release of the running kernel, `6.8.0-arch1`.
pub fn kernel_release() -> String {
    let mut name = MaybeUninit::<libc::utsname>::zeroed();
    // SAFETY: `name` is room for one utsname; zeroed is valid, and strings in it end with zero.
    let release = unsafe {
        libc::uname(name.as_mut_ptr());
        CStr::from_ptr(name.assume_init_ref().release.as_ptr()).to_owned()
    };
    release.to_string_lossy().into_owned()
}

/// The version of the GNU libc that we have been loaded with, `2.36`.
pub fn libc_version() -> String {
    // SAFETY: a text that stays.
    unsafe { CStr::from_ptr(libc::gnu_get_libc_version()) }.to_string_lossy().into_owned()
}

/// Whether the caller (by its effective ids) may do what `mode` (`libc::X_OK`, ...) says.
pub fn may_access(path: &Path, mode: i32) -> io::Result<()> {
    let path = c_path(path)?;
    // SAFETY: `path` is a string that ends with zero.
    check(unsafe { libc::faccessat(libc::AT_FDCWD, path.as_ptr(), mode, libc::AT_EACCESS) }).map(drop)
}

/// Whether the file has an extended attribute of this name.
pub fn has_xattr(path: &Path, name: &CStr) -> bool {
    // SAFETY: both are strings that end with zero; with size 0 nothing is written.
    c_path(path).is_ok_and(
        |path| unsafe { libc::getxattr(path.as_ptr(), name.as_ptr(), std::ptr::null_mut(), 0) } > 0,
    )
}

/// The time since boot in hundredths of a second, as /proc has the start of processes.
pub fn ticks() -> u64 {
    since_boot() / 10_000_000
}

/// The time since boot in nanoseconds: the same for all processes.
pub fn since_boot() -> u64 {
    let mut now = MaybeUninit::<libc::timespec>::zeroed();
    // SAFETY: there is room for what is written; zeroed is valid.
    let now = unsafe {
        libc::clock_gettime(libc::CLOCK_BOOTTIME, now.as_mut_ptr());
        now.assume_init()
    };
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// The file system that `path` lies on.
pub fn file_system(path: &Path) -> io::Result<FileSystem> {
    FileSystem::of_path(&c_path(path)?).map_err(|errno| io::Error::from_raw_os_error(errno.raw_os_error()))
}

/// Refuses a file that is shorter than `len`, or could be cut: reading it where it lies would raise SIGBUS.
pub fn ensure_length(file: &File, len: u64) -> io::Result<()> {
    // SAFETY: takes no argument.
    let seals = check(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS) })?;
    if seals & libc::F_SEAL_SHRINK != 0 && file.metadata()?.len() >= len {
        Ok(())
    } else {
        Err(io::Error::other("not sealed, or too short"))
    }
}

/// A file in memory. With `sealed` its size is for good, so that nobody can cut it under a mapping.
pub fn memfd(name: &CStr, len: u64, sealed: bool) -> io::Result<File> {
    let flags = libc::MFD_CLOEXEC | if sealed { libc::MFD_ALLOW_SEALING } else { 0 };
    // SAFETY: `name` ends with zero; the descriptor is new and ours.
    let file = unsafe { File::from(own(check(libc::memfd_create(name.as_ptr(), flags))?)) };
    file.set_len(len)?;
    if sealed {
        let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
        // SAFETY: takes integers only.
        check(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) })?;
    }
    Ok(file)
}

/// A file in memory that holds these bytes, to send to another process.
pub fn file_of(name: &CStr, bytes: &[u8]) -> io::Result<File> {
    let file = memfd(name, bytes.len() as u64, true)?;
    file.write_all_at(bytes, 0)?;
    Ok(file)
}

/// What a file that somebody sent holds, at most `most` bytes. Only of a file in memory that cannot change its size:
/// reading another could take for ever.
pub fn bytes_of(file: &File, most: u64) -> io::Result<Vec<u8>> {
    // SAFETY: takes integers only.
    let seals = check(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS) })?;
    let len = file.metadata()?.len();
    if seals & libc::F_SEAL_GROW == 0 || len > most {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    }
    let mut bytes = vec![0; len as usize];
    file.read_exact_at(&mut bytes, 0)?;
    Ok(bytes)
}

/// A shared, readable and writable mapping of the beginning of a file; unmapped when dropped.
#[derive(Debug)]
pub struct Mapping {
    start: NonNull<u8>,
    len: usize,
}

impl Mapping {
    /// Maps the first `len` bytes of `file`, which must be sealed at that size at least: a file cut short would
    /// raise SIGBUS.
    pub fn of(file: &File, len: usize) -> io::Result<Self> {
        // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
        let start = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                0,
            )
        };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Self { start: NonNull::new(start.cast()).expect("mmap gives no null"), len })
    }

    /// The tree at its start.
    pub fn tree(&self) -> &pageout::tree::Tree {
        assert!(self.len >= size_of::<pageout::tree::Tree>());
        // SAFETY: as below.
        unsafe { self.start.cast().as_ref() }
    }

    /// The bequest at its start.
    pub fn bequest(&self) -> &pageout::swap::heir::Bequest {
        assert!(self.len >= size_of::<pageout::swap::heir::Bequest>());
        // SAFETY: as below.
        unsafe { self.start.cast().as_ref() }
    }

    /// The page of counters at its start.
    pub fn stats(&self) -> &pageout::stats::Stats {
        assert!(self.len >= size_of::<pageout::stats::Stats>());
        // SAFETY: long enough, page-aligned, mapped as long as `self`, and Stats is atomics only: any bytes are
        // valid and others may write at any time.
        unsafe { self.start.cast().as_ref() }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: our mapping, and no reference outlives `self`.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.len) };
    }
}

/// Whether code in this file may be mapped; EPERM on a file system mounted noexec.
pub fn probe_executable(file: &File) -> io::Result<()> {
    const LEN: usize = 4096;
    // SAFETY: a new private mapping, unmapped at once, never touched.
    unsafe {
        let flags = libc::MAP_PRIVATE;
        let prot = libc::PROT_READ | libc::PROT_EXEC;
        let start = libc::mmap(std::ptr::null_mut(), LEN, prot, flags, file.as_raw_fd(), 0);
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        libc::munmap(start, LEN);
    }
    Ok(())
}

/// Gets a range of a file its room on disk. What was written there stays, the rest reads as zeros.
pub fn allocate(file: &File, offset: u64, len: u64) -> io::Result<()> {
    // SAFETY: takes integers only.
    check(unsafe { libc::fallocate(file.as_raw_fd(), 0, offset as _, len as _) }).map(drop)
}

/// The soft and hard limit of a resource.
pub fn limit_of(resource: libc::__rlimit_resource_t) -> (u64, u64) {
    limit_for(0, resource)
}

/// The same of another process; none at all where it cannot be asked for.
pub fn limit_for(pid: i32, resource: libc::__rlimit_resource_t) -> (u64, u64) {
    let mut limit = libc::rlimit { rlim_cur: libc::RLIM_INFINITY, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: `limit` is room for one rlimit.
    unsafe { libc::prlimit(pid, resource, std::ptr::null(), &mut limit) };
    (limit.rlim_cur, limit.rlim_max)
}

/// Raises the soft limit of a resource to its hard limit and returns the former soft limit.
pub fn raise_limit(resource: libc::__rlimit_resource_t) -> u64 {
    let (soft, hard) = limit_of(resource);
    set_soft_limit(resource, hard);
    soft
}

/// Sets the soft limit of a resource. Async-signal-safe.
fn set_soft_limit(resource: libc::__rlimit_resource_t, soft: u64) {
    let limit = libc::rlimit { rlim_cur: soft, rlim_max: limit_of(resource).1 };
    // SAFETY: `limit` is one rlimit.
    unsafe { libc::setrlimit(resource, &limit) };
}

/// Descriptors beyond the standard streams that were there before any of ours: the program inherits them too.
pub struct Inherited(Vec<RawFd>);

impl Inherited {
    /// To be called before anything is opened.
    pub fn look() -> Self {
        let listed = std::fs::read_dir("/proc/self/fd").into_iter().flatten();
        let number = |entry: io::Result<std::fs::DirEntry>| entry.ok()?.file_name().to_str()?.parse().ok();
        let all: Vec<RawFd> = listed.filter_map(number).filter(|fd| *fd > 2).collect();
        // Not what they were listed by.
        // SAFETY: takes integers only.
        Self(all.into_iter().filter(|fd| unsafe { libc::fcntl(*fd, libc::F_GETFD) } >= 0).collect())
    }

    /// Closes them.
    pub fn let_go(self) {
        for fd in self.0 {
            // SAFETY: nothing of ours.
            unsafe { libc::close(fd) };
        }
    }
}

/// Ends us by a signal, without a core; returns where it does not.
pub fn die_of(signal: i32) {
    // SAFETY: takes integers, and a mask that is made first.
    unsafe {
        libc::prctl(libc::PR_SET_DUMPABLE, 0);
        libc::signal(signal, libc::SIG_DFL);
        let mut mask = MaybeUninit::uninit();
        libc::sigemptyset(mask.as_mut_ptr());
        libc::sigaddset(mask.as_mut_ptr(), signal);
        libc::sigprocmask(libc::SIG_UNBLOCK, mask.as_ptr(), std::ptr::null_mut());
        libc::raise(signal);
    }
}

/// Another descriptor of what this number stands for.
pub fn copy_of(number: RawFd) -> io::Result<File> {
    // SAFETY: takes numbers; the copy is nobody else's.
    Ok(File::from(unsafe { own(check(libc::fcntl(number, libc::F_DUPFD_CLOEXEC, 3))?) }))
}

/// Points standard input and output at /dev/null: they are the program's now.
pub fn let_go_of_standard_streams() {
    if let Ok(null) = File::options().read(true).write(true).open("/dev/null") {
        for stream in [0, 1] {
            // SAFETY: takes integers only; std's handles of the two streams hold the number, not the file.
            unsafe { libc::dup2(null.as_raw_fd(), stream) };
        }
    }
}

/// Takes from the umask what would shut us and our processes out of what we make; what it was before.
pub fn let_owner_in() -> u32 {
    // SAFETY: takes integers only, cannot fail.
    unsafe {
        let before = libc::umask(0o077);
        libc::umask(before & 0o077);
        before
    }
}

/// Takes SIGPIPE back to its default, which std changes: a reader that has seen enough ends us in silence.
pub fn die_of_broken_pipes() {
    // SAFETY: the default action needs no handler.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
}

/// Whether SIGPIPE was ignored when we were started. std ignores it before `main`, and gives children its default.
static BROKEN_PIPES_IGNORED: AtomicBool = AtomicBool::new(false);

/// A bit for each standard stream that was closed then. std opens /dev/null in its place, where output would be lost
/// in silence.
static CLOSED: AtomicU8 = AtomicU8::new(0);

extern "C" fn look_before_std() {
    BROKEN_PIPES_IGNORED.store(is_ignored(libc::SIGPIPE), Relaxed);
    // SAFETY: takes integers only.
    let is_closed = |stream: &RawFd| unsafe { libc::fcntl(*stream, libc::F_GETFD) } < 0;
    let closed = (0..3).filter(is_closed).fold(0, |closed, stream| closed | 1 << stream);
    CLOSED.store(closed, Relaxed);
}

/// Closes again the standard streams that were closed when we were started. Async-signal-safe.
fn close_streams() {
    for stream in (0..3).filter(|stream| CLOSED.load(Relaxed) & 1 << stream != 0) {
        // SAFETY: /dev/null, by its number only.
        unsafe { libc::close(stream) };
    }
}

/// Called by the C library, before std's runtime is.
#[used]
#[link_section = ".init_array"]
static BEFORE_STD: extern "C" fn() = look_before_std;

/// Whether a signal is ignored.
pub fn is_ignored(number: i32) -> bool {
    let mut now = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: room for one sigaction, for which zeroed is valid; nothing is changed.
    unsafe {
        libc::sigaction(number, std::ptr::null(), now.as_mut_ptr());
        now.assume_init_ref().sa_sigaction == libc::SIG_IGN
    }
}

/// What signals did when we were started, where we want it otherwise.
#[derive(Debug, Clone, Copy)]
pub struct Dispositions([(i32, libc::sighandler_t); 3]);

impl Dispositions {
    /// Takes SIGCHLD back to its default (ignored, the kernel would keep no exit status) and ignores SIGXFSZ: a file
    /// that grows beyond its limit is an error then, and has its line.
    pub fn change() -> Self {
        // SAFETY: neither needs a handler.
        let set = |number, to| (number, unsafe { libc::signal(number, to) });
        let pipe = if BROKEN_PIPES_IGNORED.load(Relaxed) { libc::SIG_IGN } else { libc::SIG_DFL };
        Self([set(libc::SIGCHLD, libc::SIG_DFL), set(libc::SIGXFSZ, libc::SIG_IGN), (libc::SIGPIPE, pipe)])
    }

    /// As it was. Async-signal-safe.
    fn restore(&self) {
        for (number, before) in self.0 {
            // SAFETY: exec left no handlers, so these are none.
            unsafe { libc::signal(number, before) };
        }
    }
}

/// The clocks that were set before we were executed, by their numbers: they go on over exec, but not in a child.
#[derive(Debug, Clone, Copy)]
struct Clocks([libc::itimerval; 3]);

impl Clocks {
    /// Stops them here.
    fn take() -> Self {
        Self([0, 1, 2].map(|number| {
            // SAFETY: zeros stop a clock; room for what it was.
            unsafe {
                let (none, mut before) = (std::mem::zeroed(), std::mem::zeroed());
                libc::setitimer(number, &none, &mut before);
                before
            }
        }))
    }

    /// Lets them go on in the calling process. Async-signal-safe.
    fn go_on(&self) {
        for (number, clock) in (0..).zip(&self.0) {
            // SAFETY: as it was.
            unsafe { libc::setitimer(number, clock, std::ptr::null_mut()) };
        }
    }
}

/// A signal that arrived.
#[derive(Debug, Clone, Copy)]
pub struct Signal {
    /// Its number.
    pub number: i32,
    /// The process that sent it, 0 if it is not to be seen from here; none if the kernel did, which sends a terminal's to the whole
    /// group.
    pub sender: Option<i32>,
    /// What sigqueue(3) sent with it.
    pub value: Option<u64>,
}

impl Signal {
    /// Sends it on.
    pub fn send_to(self, pid: i32) {
        let Some(value) = self.value else {
            let _ = kill(pid, self.number);
            return;
        };
        // As the kernel lays it out: number, errno, code, padding, then pid and user of the sender, and the value.
        let mut info = [0u64; 16];
        info[0] = self.number as u64;
        info[1] = u64::from(libc::SI_QUEUE as u32);
        info[2] = u64::from(std::process::id()) | u64::from(euid()) << 32;
        info[3] = value;
        // SAFETY: a siginfo_t, 128 bytes.
        unsafe { libc::syscall(libc::SYS_rt_sigqueueinfo, pid, self.number, info.as_ptr()) };
    }
}

/// Does what begins a thread that is to have no signal.
pub fn without_signals<T>(work: impl FnOnce() -> T) -> T {
    let (mut all, mut before) = (MaybeUninit::uninit(), MaybeUninit::uninit());
    // SAFETY: sets of this thread's, written before they are read.
    unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr());
    }
    let done = work();
    // SAFETY: as above.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), std::ptr::null_mut()) };
    done
}

/// Zeros that a fork's child shares.
pub fn shared(len: usize) -> io::Result<*mut libc::c_void> {
    let (access, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_ANONYMOUS);
    // SAFETY: a mapping of its own.
    match unsafe { libc::mmap(std::ptr::null_mut(), len, access, flags, -1, 0) } {
        libc::MAP_FAILED => Err(io::Error::last_os_error()),
        memory => Ok(memory),
    }
}

/// Where the kernel wrote the command line of this process, and of its forks: start and end.
pub fn command_line() -> [usize; 2] {
    let fields = stat_of("self");
    [48, 49].map(|field| fields.get(field).and_then(|number| number.parse().ok()).unwrap_or(0))
}

/// The fields of a process's stat by their numbers in proc(5), from the state, 3, on; none where it is not there.
fn stat_of(process: impl std::fmt::Display) -> Vec<String> {
    let stat = text_of(format!("/proc/{process}/stat")).unwrap_or_default();
    // The name may hold anything.
    let behind = stat.rsplit(')').next().unwrap_or_default().split_whitespace();
    [""; 3].into_iter().chain(behind).map(str::to_owned).collect()
}

/// Signals as a descriptor: blocked in this thread, read when we please.
#[derive(Debug)]
pub struct Signals {
    fd: OwnedFd,
    before: libc::sigset_t,
}

impl Signals {
    /// Blocks `numbers` and those of real time, for the calling thread and those that it makes later.
    pub fn block(numbers: &[i32]) -> io::Result<Self> {
        let mut set = MaybeUninit::zeroed();
        let mut before = MaybeUninit::zeroed();
        // SAFETY: all pointers are to room of the right type, zeroed is valid for both; the descriptor is new.
        unsafe {
            libc::sigemptyset(set.as_mut_ptr());
            for &number in numbers {
                libc::sigaddset(set.as_mut_ptr(), number);
            }
            for number in libc::SIGRTMIN()..=libc::SIGRTMAX() {
                libc::sigaddset(set.as_mut_ptr(), number);
            }
            libc::sigprocmask(libc::SIG_BLOCK, set.as_ptr(), before.as_mut_ptr());
            let fd = own(check(libc::signalfd(-1, set.as_ptr(), libc::SFD_CLOEXEC | libc::SFD_NONBLOCK))?);
            Ok(Self { fd, before: before.assume_init() })
        }
    }

    /// The next signal that waits, if one does.
    pub fn next(&self) -> Option<Signal> {
        let mut info = MaybeUninit::<libc::signalfd_siginfo>::zeroed();
        let len = size_of::<libc::signalfd_siginfo>();
        // SAFETY: room for one signalfd_siginfo, for which zeroed is valid.
        let info = unsafe {
            let got = libc::read(self.fd.as_raw_fd(), info.as_mut_ptr().cast(), len);
            (got == len as isize).then(|| info.assume_init())?
        };
        // SI_USER, SI_QUEUE and SI_TKILL are what processes send; positive codes are the kernel's.
        // But for our own write to a pipe that nobody reads, which looks as if we had sent it.
        let is_sent = info.ssi_code <= 0 && info.ssi_pid != std::process::id();
        let sender = is_sent.then_some(info.ssi_pid as i32);
        let value = (info.ssi_code == libc::SI_QUEUE).then_some(info.ssi_ptr);
        Some(Signal { number: info.ssi_signo as i32, sender, value })
    }

    /// Makes `command` start with the signals, that of a parent's death among them, the clocks, which stop here, the standard
    /// streams and the limit of open files that we were started with.
    pub fn restore_in(&self, command: &mut Command, dispositions: Dispositions, open_files: u64, umask: u32) {
        let before = self.before;
        let mut of_death = 0;
        // SAFETY: room for one int.
        unsafe { libc::prctl(libc::PR_GET_PDEATHSIG, &mut of_death) };
        let clocks = Clocks::take();
        // SAFETY: the closure runs between fork and exec and makes system calls only.
        unsafe {
            command.pre_exec(move || {
                set_soft_limit(libc::RLIMIT_NOFILE, open_files);
                dispositions.restore();
                close_streams();
                libc::umask(umask);
                libc::prctl(libc::PR_SET_PDEATHSIG, of_death);
                clocks.go_on();
                libc::sigprocmask(libc::SIG_SETMASK, &before, std::ptr::null_mut());
                Ok(())
            });
        }
    }
}

impl AsFd for Signals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// A child that has ended, and how.
pub fn reap() -> Option<(i32, ExitStatus)> {
    let mut status = 0;
    // SAFETY: room for one int.
    let pid = unsafe { libc::waitpid(-1, &mut status, libc::WNOHANG) };
    (pid > 0).then(|| (pid, ExitStatus::from_raw(status)))
}

/// Whether we are the first of our session: the kernel tells us alone when its terminal goes away.
pub fn leads_session() -> bool {
    // SAFETY: takes integers only.
    unsafe { libc::getsid(0) == libc::getpid() }
}

/// Whether a process has another process group than we.
pub fn has_other_group(pid: i32) -> bool {
    // SAFETY: take numbers; nothing is written.
    let (its, ours) = unsafe { (libc::getpgid(pid), libc::getpgrp()) };
    its > 0 && its != ours
}

/// Whether a process is of another session than we.
pub fn has_other_session(pid: i32) -> bool {
    // SAFETY: take numbers; nothing is written.
    let (its, ours) = unsafe { (libc::getsid(pid), libc::getsid(0)) };
    its > 0 && its != ours
}

/// Whether a process is of the group that its terminal is for.
pub fn is_in_foreground(pid: i32) -> bool {
    let fields = stat_of(pid);
    let (group, of_terminal) = (fields.get(5), fields.get(8));
    group.is_some() && group == of_terminal
}

/// Our parent, if it is not to be taken for the first process: that has those whose parents have ended.
pub fn parent() -> Option<i32> {
    // SAFETY: takes nothing, cannot fail.
    Some(unsafe { libc::getppid() }).filter(|pid| *pid > 1)
}

/// Sends a signal to the process that has this number now; no error if none has.
pub fn kill(pid: i32, signal: i32) -> io::Result<()> {
    // SAFETY: takes integers only.
    sent(unsafe { libc::kill(pid, signal) })
}

/// A signal was sent, or there is nobody any more.
fn sent(result: libc::c_int) -> io::Result<()> {
    match check(result) {
        Err(error) if error.raw_os_error() != Some(libc::ESRCH) => Err(error),
        _ => Ok(()),
    }
}

/// A process, safe from the reuse of its number; readable when it has ended.
#[derive(Debug)]
pub struct PidFd(OwnedFd);

impl PidFd {
    /// The process that has this number now.
    pub fn open(pid: i32) -> io::Result<Self> {
        // SAFETY: takes integers only; the descriptor is new and ours.
        unsafe { Ok(Self(own(check(libc::syscall(libc::SYS_pidfd_open, pid, 0) as i32)?))) }
    }

    /// The process that connected at the other end of a socket (Linux 6.5).
    pub fn of_peer(socket: BorrowedFd<'_>) -> io::Result<Self> {
        const SO_PEERPIDFD: i32 = 77;
        let mut fd: RawFd = -1;
        let mut len = size_of::<RawFd>() as libc::socklen_t;
        let (socket, level) = (socket.as_raw_fd(), libc::SOL_SOCKET);
        // SAFETY: room for one descriptor, and its length; it is new and ours.
        unsafe {
            check(libc::getsockopt(socket, level, SO_PEERPIDFD, (&raw mut fd).cast(), &mut len))?;
            Ok(Self(own(fd)))
        }
    }

    /// Sends it a signal; no error if it has ended.
    pub fn kill(&self, signal: i32) -> io::Result<()> {
        let none = std::ptr::null::<libc::siginfo_t>();
        // SAFETY: a null siginfo is allowed.
        sent(unsafe { libc::syscall(libc::SYS_pidfd_send_signal, self.0.as_raw_fd(), signal, none, 0) } as i32)
    }

    /// Whether it has ended (a zombie has).
    pub fn has_ended(&self) -> bool {
        poll(&[(self.0.as_fd(), libc::POLLIN)], Some(Duration::ZERO)).is_ok_and(|ready| ready[0] != 0)
    }
}

impl AsFd for PidFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Waits until a descriptor has what is asked of it; returns what each has. A signal ends the wait early.
pub fn poll(fds: &[(BorrowedFd<'_>, i16)], timeout: Option<Duration>) -> io::Result<Vec<i16>> {
    let mut polled: Vec<_> = fds
        .iter()
        .map(|(fd, events)| libc::pollfd { fd: fd.as_raw_fd(), events: *events, revents: 0 })
        .collect();
    // Rounded up: a wait that ends just before its time would be repeated with no time at all.
    let millis = timeout.map_or(-1, |t| t.as_nanos().div_ceil(1_000_000).min(i32::MAX as u128) as i32);
    // SAFETY: as many pollfd as said.
    let result = check(unsafe { libc::poll(polled.as_mut_ptr(), polled.len() as _, millis) });
    match result {
        Err(error) if error.kind() != io::ErrorKind::Interrupted => Err(error),
        _ => Ok(polled.into_iter().map(|p| p.revents).collect()),
    }
}

/// Puts us before ordinary processes, where that is allowed: what we do is short, and engines wait for it.
pub fn go_first() {
    // SAFETY: takes numbers.
    unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, -15) };
}

/// Do two processes share their memory? Not if they cannot be looked at. Where the kernel may not say it, as in
/// containers, a fork's child counts as sharing its parent's.
pub fn same_memory(one: i32, other: i32) -> bool {
    const KCMP_VM: libc::c_int = 1;
    // SAFETY: takes numbers.
    let order = unsafe { libc::syscall(libc::SYS_kcmp, one, other, KCMP_VM, 0, 0) };
    // What each program is told at its start, with addresses of its own.
    let told = |pid: i32| std::fs::read(format!("/proc/{pid}/auxv")).ok().filter(|told| !told.is_empty());
    order == 0 || order < 0 && told(one).is_some_and(|its| told(other) == Some(its))
}

/// Who is at the other end of a socket: process and user, as they were when it connected.
pub fn peer_of(socket: BorrowedFd<'_>) -> io::Result<(i32, u32)> {
    let mut credentials = libc::ucred { pid: 0, uid: u32::MAX, gid: u32::MAX };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: room for one ucred, and its length.
    check(unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut credentials).cast(),
            &mut len,
        )
    })?;
    Ok((credentials.pid, credentials.uid))
}

fn socket_address(path: &Path) -> io::Result<(libc::sockaddr_un, libc::socklen_t)> {
    // SAFETY: zeroed is a valid sockaddr_un.
    let mut address = unsafe { MaybeUninit::<libc::sockaddr_un>::zeroed().assume_init() };
    address.sun_family = libc::AF_UNIX as _;
    let bytes = path.as_os_str().as_bytes();
    if bytes.len() >= address.sun_path.len() {
        return Err(io::Error::from_raw_os_error(libc::ENAMETOOLONG));
    }
    for (to, from) in address.sun_path.iter_mut().zip(bytes) {
        *to = *from as _;
    }
    let len = std::mem::offset_of!(libc::sockaddr_un, sun_path) + bytes.len() + 1;
    Ok((address, len as _))
}

fn seqpacket() -> io::Result<OwnedFd> {
    let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: takes integers only; the descriptor is new and ours.
    unsafe { Ok(own(check(libc::socket(libc::AF_UNIX, kind, 0))?)) }
}

/// A listening `SOCK_SEQPACKET` socket at `path`, non-blocking.
pub fn listen_at(path: &Path) -> io::Result<OwnedFd> {
    let (address, len) = socket_address(path)?;
    let socket = seqpacket()?;
    // SAFETY: `address` is a sockaddr_un of `len` bytes.
    check(unsafe { libc::bind(socket.as_raw_fd(), (&raw const address).cast(), len) })?;
    // SAFETY: takes integers only.
    check(unsafe { libc::listen(socket.as_raw_fd(), 1024) })?;
    Ok(socket)
}

/// Waits for a lock on a file or directory (flock), which goes with what is returned; not for long, since whoever may read it may
/// have it.
pub fn lock(path: &Path) -> io::Result<File> {
    const TRIES: usize = 100;
    let file = File::open(path)?;
    let mut tries = 1..TRIES;
    loop {
        // SAFETY: takes integers only.
        match check(unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) }) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock && tries.next().is_some() => {
                std::thread::sleep(Duration::from_millis(10));
            }
            done => return done.map(|_| file),
        }
    }
}

/// Connects to a `SOCK_SEQPACKET` socket, non-blocking.
pub fn connect_to(path: &Path) -> io::Result<OwnedFd> {
    let (address, len) = socket_address(path)?;
    let socket = seqpacket()?;
    // SAFETY: `address` is a sockaddr_un of `len` bytes.
    check(unsafe { libc::connect(socket.as_raw_fd(), (&raw const address).cast(), len) })?;
    Ok(socket)
}

/// The next connection that waits, non-blocking.
pub fn accept_on(socket: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let flags = libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    let none = std::ptr::null_mut();
    // SAFETY: null addresses are allowed; the descriptor is new and ours.
    unsafe { Ok(own(check(libc::accept4(socket.as_raw_fd(), none, std::ptr::null_mut(), flags))?)) }
}

/// Most descriptors in one message.
const FDS: usize = 16;
/// Room for the control message that carries them, in words so that it is aligned.
type Control = [u64; 16];
const _: () = assert!(size_of::<Control>() >= 16 + FDS * size_of::<RawFd>());

/// Whether what was sent was not read yet, some of it.
pub fn has_unread(socket: BorrowedFd<'_>) -> bool {
    let mut bytes = 0;
    // SAFETY: the kernel writes one number.
    let told = unsafe { libc::ioctl(socket.as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) };
    told == 0 && bytes > 0
}

/// Who sends something there is told from here on that nobody takes it (EPIPE). What was sent before can still be read.
pub fn receive_no_more(socket: BorrowedFd<'_>) {
    // SAFETY: takes integers only.
    unsafe { libc::shutdown(socket.as_raw_fd(), libc::SHUT_RD) };
}

/// Sends one packet with descriptors beside it, without waiting.
pub fn send(socket: BorrowedFd<'_>, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    assert!(fds.len() <= FDS);
    let raw: Vec<RawFd> = fds.iter().map(|fd| fd.as_raw_fd()).collect();
    let payload = size_of_val(raw.as_slice());
    let mut control: Control = [0; 16];
    let mut part = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    // SAFETY: zeroed is a valid msghdr; the pointers in it are to locals that outlive the call; the control buffer
    // is aligned and has room for `payload` bytes behind its header.
    check(unsafe {
        let mut header = MaybeUninit::<libc::msghdr>::zeroed().assume_init();
        header.msg_iov = &mut part;
        header.msg_iovlen = 1;
        if !raw.is_empty() {
            header.msg_control = control.as_mut_ptr().cast();
            header.msg_controllen = libc::CMSG_SPACE(payload as u32) as _;
            let first = libc::CMSG_FIRSTHDR(&header);
            (*first).cmsg_level = libc::SOL_SOCKET;
            (*first).cmsg_type = libc::SCM_RIGHTS;
            (*first).cmsg_len = libc::CMSG_LEN(payload as u32) as _;
            std::ptr::copy_nonoverlapping(raw.as_ptr().cast::<u8>(), libc::CMSG_DATA(first), payload);
        }
        libc::sendmsg(socket.as_raw_fd(), &header, libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT) as i32
    })
    .map(drop)
}

/// Receives one packet without waiting: its length (0 at the end of the connection) and the descriptors beside it.
pub fn receive(socket: BorrowedFd<'_>, bytes: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
    let mut control: Control = [0; 16];
    let mut part = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    let mut fds = Vec::new();
    // SAFETY: zeroed is a valid msghdr; the pointers in it are to locals that outlive the call. The control messages
    // are walked as the kernel left them; descriptors in them are new and ours.
    unsafe {
        let mut header = MaybeUninit::<libc::msghdr>::zeroed().assume_init();
        header.msg_iov = &mut part;
        header.msg_iovlen = 1;
        header.msg_control = control.as_mut_ptr().cast();
        header.msg_controllen = size_of::<Control>() as _;
        let flags = libc::MSG_CMSG_CLOEXEC | libc::MSG_DONTWAIT;
        let len = check(libc::recvmsg(socket.as_raw_fd(), &mut header, flags) as i32)?;
        let mut message = libc::CMSG_FIRSTHDR(&header);
        while !message.is_null() {
            if (*message).cmsg_level == libc::SOL_SOCKET && (*message).cmsg_type == libc::SCM_RIGHTS {
                let payload = (*message).cmsg_len as usize - libc::CMSG_LEN(0) as usize;
                let data = libc::CMSG_DATA(message).cast::<RawFd>();
                for index in 0..payload / size_of::<RawFd>() {
                    fds.push(own(data.add(index).read_unaligned()));
                }
            }
            message = libc::CMSG_NXTHDR(&header, message);
        }
        Ok((len as usize, fds))
    }
}

/// Whether io_uring may be used: asks for a ring with wrong arguments, which a permitted caller is told with EFAULT.
pub fn probe_io_uring() -> io::Result<()> {
    let none = std::ptr::null_mut::<libc::c_void>();
    // SAFETY: the kernel refuses the null pointer before it makes anything.
    let result = unsafe { libc::syscall(libc::SYS_io_uring_setup, 1, none) };
    match io::Error::last_os_error() {
        error if result < 0 && error.raw_os_error() != Some(libc::EFAULT) => Err(error),
        _ => Ok(()),
    }
}

/// What a file of the kernel's says. The names in it may be of any bytes.
pub fn text_of(path: impl AsRef<Path>) -> Option<String> {
    // Such a file has no size: by the one that it tells it would be read in small pieces.
    let mut bytes = Vec::with_capacity(4096);
    File::open(path).ok()?.take(u64::MAX).read_to_end(&mut bytes).ok()?;
    Some(String::from_utf8_lossy(&bytes).into_owned())
}

/// An absolute path from the environment.
pub fn directory_from(variable: impl AsRef<OsStr>) -> Option<std::path::PathBuf> {
    let path = std::path::PathBuf::from(std::env::var_os(variable)?);
    path.is_absolute().then_some(path)
}
