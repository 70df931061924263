//! System calls for traps: results instead of -1, and the name of the call in every error.
//!
//! Addresses are numbers here, and the functions are safe to call only with memory that the trap owns;
//! see the comment of [`super::span`].

use super::span::{Span, PAGE};
use super::{Outcome, Stop};
use libc::{c_int, pid_t};
use std::ffi::CString;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

pub const RW: c_int = libc::PROT_READ | libc::PROT_WRITE;
pub const ANON: c_int = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;

/// Turns the -1 of a call into an error that names it.
pub fn ret<T: Into<i64> + Copy>(what: &str, value: T) -> Result<T, Stop> {
    if value.into() == -1 {
        return Err(Stop::Wrong(format!("{what}: {}", io::Error::last_os_error())));
    }
    Ok(value)
}

/// The last error's number.
pub fn errno() -> c_int {
    io::Error::last_os_error().raw_os_error().unwrap_or(0)
}

/// Maps private anonymous memory that can be read and written.
pub fn map(len: usize) -> Result<Span, Stop> {
    map_at(0, len, RW, ANON)
}

pub fn map_at(address: usize, len: usize, prot: c_int, flags: c_int) -> Result<Span, Stop> {
    map_file(address, len, prot, flags, -1)
}

pub fn map_file(address: usize, len: usize, prot: c_int, flags: c_int, fd: RawFd) -> Result<Span, Stop> {
    // SAFETY: new memory, or memory of the trap's own that it means to replace.
    let at = unsafe { libc::mmap(address as *mut _, len, prot, flags, fd, 0) };
    if at == libc::MAP_FAILED {
        return Err(Stop::Wrong(format!("mmap of {len} bytes: {}", io::Error::last_os_error())));
    }
    Ok(Span::new(at as usize, len))
}

/// Replaces the span by fresh memory.
pub fn map_over(span: Span, prot: c_int, flags: c_int) -> Outcome {
    map_at(span.start, span.len, prot, ANON | libc::MAP_FIXED | flags).map(drop)
}

/// Maps `len` bytes that start at a multiple of `align`.
pub fn map_aligned(len: usize, align: usize) -> Result<Span, Stop> {
    let whole = map(len + align)?;
    let start = whole.start.next_multiple_of(align);
    if start > whole.start {
        unmap(Span::new(whole.start, start - whole.start))?;
    }
    if whole.end() > start + len {
        unmap(Span::new(start + len, whole.end() - start - len))?;
    }
    Ok(Span::new(start, len))
}

pub fn unmap(span: Span) -> Outcome {
    // SAFETY: the trap owns the span and does not use it afterwards.
    ret("munmap", unsafe { libc::munmap(span.as_ptr(), span.len) }).map(drop)
}

/// The mappings whose lines in /proc/self/maps are as asked for.
pub fn mappings(is: impl Fn(&str) -> bool) -> Result<Vec<Span>, Stop> {
    let maps = std::fs::read_to_string("/proc/self/maps")?;
    let span = |line: &str| {
        let mut ends = line.split([' ', '-']).map(|number| usize::from_str_radix(number, 16).ok());
        let (start, end) = (ends.next()??, ends.next()??);
        Some(Span::new(start, end - start))
    };
    Ok(maps.lines().filter(|line| is(line)).filter_map(span).collect())
}

pub fn protect(span: Span, prot: c_int) -> Outcome {
    // SAFETY: the trap owns the span.
    ret("mprotect", unsafe { libc::mprotect(span.as_ptr(), span.len, prot) }).map(drop)
}

/// Advice of Linux 6.13 that libc does not name: guard pages are put up, and taken down.
pub const GUARD_INSTALL: c_int = 102;
pub const GUARD_REMOVE: c_int = 103;

pub fn advise(span: Span, advice: c_int) -> Outcome {
    // SAFETY: the trap owns the span and expects what the advice does to its content.
    ret("madvise", unsafe { libc::madvise(span.as_ptr(), span.len, advice) }).map(drop)
}

/// `madvise` without the C library, as runtimes of other languages call it.
pub fn advise_raw(span: Span, advice: c_int) -> Outcome {
    // SAFETY: as `advise`.
    ret("madvise", unsafe { libc::syscall(libc::SYS_madvise, span.start, span.len, advice) }).map(drop)
}

pub fn lock(span: Span) -> Outcome {
    // SAFETY: the trap owns the span.
    ret("mlock", unsafe { libc::mlock(span.as_ptr(), span.len) }).map(drop)
}

pub fn unlock(span: Span) -> Outcome {
    // SAFETY: the trap owns the span.
    ret("munlock", unsafe { libc::munlock(span.as_ptr(), span.len) }).map(drop)
}

/// Of [`remap`]: to that very place.
pub const FIXED: c_int = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;

/// `mremap`; `to` is the new address for `MREMAP_FIXED` and `MREMAP_DONTUNMAP`.
pub fn remap(span: Span, new_len: usize, flags: c_int, to: usize) -> Result<Span, Stop> {
    // SAFETY: the trap owns both ranges.
    let at = unsafe { libc::mremap(span.as_ptr(), span.len, new_len, flags, to as *mut libc::c_void) };
    if at == libc::MAP_FAILED {
        return Err(Stop::Wrong(format!("mremap: {}", io::Error::last_os_error())));
    }
    Ok(Span::new(at as usize, new_len))
}

/// Whether all pages of the span are mapped: by the map, without touching it.
pub fn is_mapped(span: Span) -> bool {
    let mut residency = vec![0u8; span.pages()];
    // SAFETY: the vector has a byte a page.
    unsafe { libc::mincore(span.as_ptr(), span.len, residency.as_mut_ptr()) == 0 }
}

/// Whether any page of the span is mapped: in the same way. Allocates nothing.
pub fn is_mapped_anywhere(span: Span) -> bool {
    let mut residency = 0u8;
    span.pieces(PAGE).any(|page| {
        // SAFETY: a byte for a page.
        unsafe { libc::mincore(page.as_ptr(), page.len, &mut residency) == 0 }
    })
}

/// How many pages of the span are in memory.
pub fn resident(span: Span) -> Result<usize, Stop> {
    let mut residency = vec![0u8; span.pages()];
    // SAFETY: the vector has a byte a page.
    ret("mincore", unsafe { libc::mincore(span.as_ptr(), span.len, residency.as_mut_ptr()) })?;
    Ok(residency.iter().filter(|&&byte| byte & 1 == 1).count())
}

/// Whether the kernel can read the word there for us; false where a program would get SIGSEGV.
pub fn is_readable(address: usize) -> Result<bool, Stop> {
    let (_read, write) = pipe()?;
    // SAFETY: the kernel checks the address.
    let n = unsafe { libc::write(write.as_raw_fd(), address as *const _, 8) };
    Ok(n == 8)
}

/// Whether the kernel can write the word there for us; writes zeros when it can.
pub fn is_writable(address: usize) -> Result<bool, Stop> {
    let (read, write) = pipe()?;
    write_all(write.as_raw_fd(), &[0; 8])?;
    // SAFETY: the kernel checks the address, and the trap owns it.
    let n = unsafe { libc::read(read.as_raw_fd(), address as *mut _, 8) };
    Ok(n == 8)
}

pub fn pipe() -> Result<(OwnedFd, OwnedFd), Stop> {
    let mut ends = [0; 2];
    // SAFETY: the array takes two descriptors, which then belong to nobody else.
    unsafe {
        ret("pipe", libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC))?;
        Ok((OwnedFd::from_raw_fd(ends[0]), OwnedFd::from_raw_fd(ends[1])))
    }
}

/// An unlinked file in the temporary directory, opened with more `flags`.
pub fn scratch_file(flags: c_int) -> Result<OwnedFd, Stop> {
    let directory = CString::new(std::env::temp_dir().as_os_str().as_encoded_bytes())
        .map_err(|_| Stop::Wrong("TMPDIR with a NUL".into()))?;
    // SAFETY: a C string, and the new descriptor belongs to nobody else.
    unsafe {
        let flags = libc::O_TMPFILE | libc::O_RDWR | libc::O_CLOEXEC | flags;
        let fd = ret("open O_TMPFILE", libc::open(directory.as_ptr(), flags, 0o600))?;
        Ok(OwnedFd::from_raw_fd(fd))
    }
}

/// Writes all of the bytes; a signal in between is an error like any other.
pub fn write_all(fd: RawFd, bytes: &[u8]) -> Outcome {
    write_span(fd, Span::new(bytes.as_ptr() as usize, bytes.len()))
}

pub fn write_span(fd: RawFd, span: Span) -> Outcome {
    let mut done = 0;
    while done < span.len {
        // SAFETY: the span is the trap's.
        let n = unsafe { libc::write(fd, (span.start + done) as *const _, span.len - done) };
        done += ret("write", n as i64)? as usize;
    }
    Ok(())
}

/// Reads until the span is full.
pub fn read_span(fd: RawFd, span: Span) -> Outcome {
    let mut done = 0;
    while done < span.len {
        // SAFETY: the span is the trap's.
        let n = unsafe { libc::read(fd, (span.start + done) as *mut _, span.len - done) };
        if ret("read", n as i64)? == 0 {
            return Err(Stop::Wrong("read: end of file too early".into()));
        }
        done += n as usize;
    }
    Ok(())
}

pub fn pread_span(fd: RawFd, span: Span, offset: usize) -> Outcome {
    // SAFETY: the span is the trap's.
    let n = unsafe { libc::pread(fd, span.as_ptr(), span.len, offset as i64) };
    whole("pread", n, span.len)
}

pub fn pwrite_span(fd: RawFd, span: Span, offset: usize) -> Outcome {
    // SAFETY: the span is the trap's.
    let n = unsafe { libc::pwrite(fd, span.as_ptr(), span.len, offset as i64) };
    whole("pwrite", n, span.len)
}

/// A transfer must have been whole.
pub fn whole(what: &str, n: isize, wanted: usize) -> Outcome {
    let n = ret(what, n as i64)? as usize;
    if n != wanted {
        return Err(Stop::Wrong(format!("{what}: {n} of {wanted} bytes")));
    }
    Ok(())
}

/// Ends a trap whose fork was refused for lack of memory: that is honest, if not what one hopes for.
pub fn may_lack_memory(what: &str, pid: impl Into<i64>) -> Outcome {
    if pid.into() == -1 && errno() == libc::ENOMEM {
        return Err(Stop::Skip(format!("{what} said ENOMEM")));
    }
    Ok(())
}

/// Forks; the child runs `work` and exits 0 or, with its reason on standard error, 1. The work must not
/// allocate when all is well: other threads may hold the allocator's locks at the fork.
pub fn fork(work: impl FnOnce() -> Outcome) -> Result<pid_t, Stop> {
    // SAFETY: see above; the child leaves by `_exit`.
    let pid = unsafe { libc::fork() };
    if ret("fork", pid)? == 0 {
        leave(work());
    }
    Ok(pid)
}

/// The same by `clone`, the child on a stack of its own.
pub fn fork_on(stack: &mut [u8], work: &dyn Fn() -> Outcome) -> Result<pid_t, Stop> {
    extern "C" fn main(work: *mut libc::c_void) -> libc::c_int {
        // SAFETY: what is given below; the child has a copy of it.
        leave(unsafe { *work.cast::<&dyn Fn() -> Outcome>() }())
    }
    let top = stack.as_mut_ptr_range().end;
    // SAFETY: the child goes down from the stack's end, and leaves by `_exit`.
    let pid = unsafe { libc::clone(main, top.cast(), libc::SIGCHLD, (&raw const work).cast_mut().cast()) };
    ret("clone", pid)
}

/// Ends the process, without destructors, with the status that tells the outcome.
pub fn leave(outcome: Outcome) -> ! {
    let status = match &outcome {
        Err(Stop::Wrong(why)) => {
            eprintln!("wrong: in process {}: {why}", std::process::id());
            1
        }
        _ => 0,
    };
    // SAFETY: ends the process.
    unsafe { libc::_exit(status) }
}

/// Waits for the child and tells its wait status.
pub fn wait_status(pid: pid_t) -> Result<c_int, Stop> {
    let mut raw = 0;
    // SAFETY: the integer takes the status.
    ret("waitpid", unsafe { libc::waitpid(pid, &mut raw, 0) })?;
    Ok(raw)
}

/// Waits for the child, which must exit with `status`.
pub fn wait_for(pid: pid_t, status: c_int) -> Outcome {
    let raw = wait_status(pid)?;
    if !libc::WIFEXITED(raw) || libc::WEXITSTATUS(raw) != status {
        return Err(Stop::Wrong(format!("the child ended with wait status {raw:#x}, not exit {status}")));
    }
    Ok(())
}

pub fn set_limit(resource: libc::__rlimit_resource_t, limit: u64) -> Outcome {
    let limit = libc::rlimit { rlim_cur: limit, rlim_max: limit };
    // SAFETY: the structure is whole.
    ret("setrlimit", unsafe { libc::setrlimit(resource, &limit) }).map(drop)
}

pub fn limit(resource: libc::__rlimit_resource_t) -> Result<libc::rlimit, Stop> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: room for one.
    ret("getrlimit", unsafe { libc::getrlimit(resource, &mut limit) }).map(|_| limit)
}

/// Leaves what it may be raised to as it was read.
pub fn set_soft_limit(resource: libc::__rlimit_resource_t, soft: u64) -> Outcome {
    let limit = libc::rlimit { rlim_cur: soft, ..limit(resource)? };
    // SAFETY: the structure is whole.
    ret("setrlimit", unsafe { libc::setrlimit(resource, &limit) }).map(drop)
}

/// Gives up one of the rights that root has (capabilities(7)), for good.
pub fn give_up_right(number: u32) -> Outcome {
    // The third version, of this process; effective, permitted and inheritable rights, twice.
    let mut head = [0x2008_0522, 0];
    let mut rights = [[0u32; 3]; 2];
    // SAFETY: room for what the version has.
    ret("capget", unsafe { libc::syscall(libc::SYS_capget, &mut head, &mut rights) })?;
    rights[number as usize / 32].iter_mut().for_each(|set| *set &= !(1 << (number % 32)));
    // SAFETY: as before.
    ret("capset", unsafe { libc::syscall(libc::SYS_capset, &mut head, &rights) }).map(drop)
}

/// Installs a signal handler with `SA_SIGINFO` and more `flags`.
pub fn handle(
    signal: c_int,
    flags: c_int,
    handler: extern "C" fn(c_int, *mut libc::siginfo_t, *mut libc::c_void),
) -> Outcome {
    // SAFETY: zero is a valid action; the handlers of this crate are fit to run in signals.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handler as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO | flags;
        ret("sigaction", libc::sigaction(signal, &action, std::ptr::null_mut())).map(drop)
    }
}

/// Whether it is under `pageout run`: to look for what only that must bring about.
pub fn under_pageout() -> bool {
    std::env::var_os(pageout::wire::ENV_RUN).is_some()
}

pub fn is_root() -> bool {
    // SAFETY: has no conditions.
    unsafe { libc::geteuid() == 0 }
}
