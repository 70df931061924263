//! A context and its requests.
//!
//! Owns [`Uffd`], a descriptor and nothing else: every method but those that open is one system call at most, there is no state and no lock
//! on this side. Any thread of the address space, also in a signal handler.

use core::fmt;

use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;

use crate::{abi, open};
use crate::{CopyMode, EventBuffer, Events, Features, MoveMode, OpenError, RegisterMode};

/// A userfaultfd context: the ranges of one address space whose faults it reports.
///
/// Addresses and lengths are in bytes and multiples of the page size (of the huge page size on hugetlbfs);
/// anything else is EINVAL. All methods may be called on any thread, at the same time, and in a signal handler:
/// none allocates, locks, panics or uses thread-local state.
///
/// Dropping the last descriptor of a context ends all its registrations: threads that wait go on, and what is
/// missing then reads as zeros.
///
/// **EAGAIN**: while an event other than a page fault is unread, every request that maps or protects fails
/// with it. Read the events, act on them, go on.
#[derive(Debug)]
pub struct Uffd {
    fd: OwnedFd,
}

/// A request that ended before its end.
///
/// With [`Errno::AGAIN`] and `done > 0` the kernel stopped half-way without saying why: go on from `done`, and
/// the next call either works or gives the reason. With `AGAIN` and `done == 0` an event is unread, see
/// [`Uffd`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Partial {
    /// Bytes done from the start; a multiple of the page size. Who waited for them is awake, unless asked
    /// otherwise.
    pub done: usize,
    /// Why the rest was not.
    pub errno: Errno,
}

impl fmt::Display for Partial {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let why = match self.errno {
            Errno::AGAIN if self.done > 0 => "stopped half-way; go on from there",
            Errno::AGAIN => "an event is unread; read it and try again",
            Errno::BUSY => "a page is pinned or shared since a fork; leave it where it is",
            Errno::EXIST => "a page is there already; wake who waits for it",
            Errno::FAULT => "the source is not readable, a guard page, or not in the page cache",
            Errno::NOENT => "a hole, or not registered",
            Errno::INVAL => "unaligned, or memory of a kind that this is not for",
            Errno::NOMEM => "out of memory",
            Errno::SRCH => "the process has gone",
            other => return write!(f, "{}K done, then error {}", self.done >> 10, other.raw_os_error()),
        };
        write!(f, "{}K done, then: {why}", self.done >> 10)
    }
}

impl core::error::Error for Partial {}

impl Uffd {
    /// Opens a context for the caller's address space with the features `wanted`, close-on-exec.
    ///
    /// Tries `/dev/userfaultfd` (Linux 6.1), which needs read and write permission on it, then
    /// `userfaultfd(2)`, which needs CAP_SYS_PTRACE or `vm.unprivileged_userfaultfd=1`. A context that is only
    /// for faults in user mode, which anybody gets, is opened with [`Features::SIGBUS`] alone.
    ///
    /// `nonblock`: [`read_events`](Self::read_events) gives EAGAIN instead of waiting. `poll` **needs** it: on
    /// a blocking context it gives POLLERR, always.
    ///
    /// # Errors
    ///
    /// See [`OpenError`]; its text says what to do.
    pub fn open(wanted: Features, nonblock: bool) -> Result<Self, OpenError> {
        open::open(wanted, nonblock).map(|fd| Self { fd })
    }

    /// As [`open`](Self::open), from `/dev/userfaultfd` opened earlier with [`open_device`](Self::open_device),
    /// say before a process gave up its privileges or its file system. The context is for the address space of
    /// the *caller*, whoever opened the device.
    pub fn open_on(device: BorrowedFd<'_>, wanted: Features, nonblock: bool) -> Result<Self, OpenError> {
        open::open_on(device, wanted, nonblock).map(|fd| Self { fd })
    }

    /// Opens `/dev/userfaultfd` (Linux 6.1) for [`open_on`](Self::open_on), close-on-exec.
    ///
    /// # Errors
    ///
    /// Those of `open(2)`: NOENT in older kernels and in containers that were not given it, ACCESS.
    pub fn open_device() -> Result<OwnedFd, Errno> {
        open::device()
    }

    /// What this kernel offers, by opening a context and closing it. Bits that [`Features`] does not name are
    /// kept. EVENT_FORK is offered to all, but given only to CAP_SYS_PTRACE.
    pub fn supported() -> Result<Features, OpenError> {
        open::supported()
    }

    /// A context from its descriptor: one that came through a socket, or the child's of
    /// [`Event::Fork`](crate::Event::Fork). The handshake must have been done, else all requests fail.
    ///
    /// # Safety
    ///
    /// It must be a userfaultfd. What is read from anything else is taken for events, too, and a descriptor that such an
    /// event names for the reader's own.
    pub const unsafe fn from_fd(fd: OwnedFd) -> Self {
        Self { fd }
    }

    /// The descriptor; registrations stay.
    pub fn into_fd(self) -> OwnedFd {
        self.fd
    }

    /// `UFFDIO_REGISTER`: from now on faults of `start..start + len` are reported. What is there stays there.
    /// The range may span several mappings; it may be registered before with the same context, which sets
    /// `mode` anew.
    ///
    /// # Safety
    ///
    /// Who uses the memory waits for whoever serves its faults: the threads that read this context must not
    /// touch the range, nor pass it to the kernel, and a page's contents are what they answer, not what was
    /// there before.
    ///
    /// # Errors
    ///
    /// * INVAL: unaligned or empty; nothing is mapped there; a mapping of a kind that this is not for (private
    ///   file mapping) or not in this mode (MINOR on anonymous memory, WP without its feature).
    /// * BUSY: a part is registered with another context.
    /// * PERM: shared memory that can not be written.
    /// * NOMEM: the limit of mappings (`vm.max_map_count`), or no memory.
    pub unsafe fn register(&self, start: usize, len: usize, mode: RegisterMode) -> Result<(), Errno> {
        let mut request = abi::Register { range: range(start, len), mode: mode.bits(), ioctls: 0 };
        // SAFETY: by the caller's promise.
        unsafe { abi::call(self.as_fd(), &mut request) }
    }

    /// `UFFDIO_UNREGISTER`: faults of `start..start + len` are the kernel's again and who waits goes on.
    /// Missing pages read as zeros, write-protected ones become writable, poison stays. Parts that are not
    /// registered are no error; parts of *another* context are INVAL, but older kernels unregister them too.
    ///
    /// # Errors
    ///
    /// INVAL: unaligned or empty; nothing is mapped there, or a mapping that could never be registered.
    pub fn unregister(&self, start: usize, len: usize) -> Result<(), Errno> {
        // SAFETY: missing pages become what the kernel gives for them, zeros, which whoever may use the memory
        // may read.
        unsafe { abi::call(self.as_fd(), &mut abi::Unregister(range(start, len))) }
    }

    /// `UFFDIO_COPY`: fills the missing pages of `to..to + len` with the bytes at `from`, and wakes who waits
    /// for them. Atomic by page: nobody sees one half filled. Always makes small pages, except on hugetlbfs.
    /// Works whatever the protection of the destination is. `from` needs no alignment. `from` is in the
    /// caller's address space, `to` in the context's, which is another one for a child's context.
    ///
    /// # Safety
    ///
    /// `from..from + len` must be readable (if it is not, that is FAULT), must not be changed meanwhile by
    /// somebody who counts on it, and must not itself be served by the calling thread; `to..to + len` must be
    /// memory whose contents are the caller's to say.
    ///
    /// # Errors
    ///
    /// The pages before `done` are there. EXIST: a page (or a marker: poison, protection) is there already:
    /// somebody else answered, wake or skip. NOENT: not registered, or no longer mapped, or the range spans
    /// two mappings. FAULT: the source is not readable. AGAIN: see [`Partial`]. INVAL: unaligned or empty, or
    /// [`CopyMode::WP`] without [`RegisterMode::WP`]. NOMEM. SRCH: the process is exiting.
    pub unsafe fn copy(&self, to: usize, from: usize, len: usize, mode: CopyMode) -> Result<(), Partial> {
        let mut request =
            abi::Copy { dst: to as u64, src: from as u64, len: len as u64, mode: mode.bits(), copy: 0 };
        // SAFETY: by the caller's promise.
        let result = unsafe { abi::call(self.as_fd(), &mut request) };
        partial(result, request.copy)
    }

    /// `UFFDIO_MOVE` (Linux 6.8, [`Features::MOVE`]): takes the pages of `from..from + len` away and maps them
    /// at `to`, where they are missing, without a copy, and wakes who waits there. The source is left missing.
    /// A huge page stays huge if both addresses are aligned to it and the destination's block has no page
    /// table. Moved pages arrive writable. No write to the source is lost: a page is unmapped before it moves.
    ///
    /// Both ranges: private anonymous memory of this process, writable, with the same access and the same lock
    /// (`mlock`) flags, each within one mapping. The destination must be registered with this context; whether
    /// the source is registered, or with which context, does not matter.
    ///
    /// # Safety
    ///
    /// The contents of both ranges change: both must be the caller's to change, and no reference to either may
    /// be in use.
    ///
    /// # Errors
    ///
    /// The pages before `done` are moved.
    /// * NOENT: a hole in the source, or an end of a mapping. With [`MoveMode::ALLOW_SRC_HOLES`] holes count as
    ///   done.
    /// * EXIST: a page or a marker is at the destination; looked at before the source is, so it hides NOENT.
    /// * BUSY: the page is pinned (direct I/O, io_uring buffers), or shared since a `fork`. The latter ends
    ///   when it is written (`MADV_POPULATE_WRITE`). **Never copy and drop a page instead that MOVE refused**:
    ///   what I/O writes into it then is lost.
    /// * INVAL: unaligned or empty, overlapping, another address space, or ranges that differ as said above.
    /// * AGAIN: see [`Partial`]. FAULT: a guard page. NOMEM. SRCH: the process is exiting.
    pub unsafe fn move_pages(
        &self,
        to: usize,
        from: usize,
        len: usize,
        mode: MoveMode,
    ) -> Result<(), Partial> {
        let mut request =
            abi::Move { dst: to as u64, src: from as u64, len: len as u64, mode: mode.bits(), move_: 0 };
        // SAFETY: by the caller's promise.
        let result = unsafe { abi::call(self.as_fd(), &mut request) };
        partial(result, request.move_)
    }

    /// `UFFDIO_ZEROPAGE`: fills the missing pages of `at..at + len` with zeros, without taking memory until
    /// they are written, and wakes who waits unless `wake` is false.
    ///
    /// # Safety
    ///
    /// `at..at + len` must be memory whose contents are the caller's to say.
    ///
    /// # Errors
    ///
    /// As [`copy`](Self::copy). INVAL on hugetlbfs.
    pub unsafe fn zeropage(&self, at: usize, len: usize, wake: bool) -> Result<(), Partial> {
        let mut request = abi::ZeroPage { range: range(at, len), mode: dontwake(wake), zeropage: 0 };
        // SAFETY: by the caller's promise.
        let result = unsafe { abi::call(self.as_fd(), &mut request) };
        partial(result, request.zeropage)
    }

    /// `UFFDIO_CONTINUE` (5.13): maps the pages of `at..at + len` that are in the page cache, the answer to a
    /// minor fault, and wakes who waits unless `wake` is false.
    ///
    /// # Safety
    ///
    /// The contents of those pages must be what the users of the memory may see.
    ///
    /// # Errors
    ///
    /// As [`copy`](Self::copy), and FAULT: a page is not in the page cache. INVAL on anonymous memory.
    pub unsafe fn continue_pages(&self, at: usize, len: usize, wake: bool) -> Result<(), Partial> {
        let mut request = abi::Continue { range: range(at, len), mode: dontwake(wake), mapped: 0 };
        // SAFETY: by the caller's promise.
        let result = unsafe { abi::call(self.as_fd(), &mut request) };
        partial(result, request.mapped)
    }

    /// `UFFDIO_WRITEPROTECT` (5.7): with `protect` the pages of `at..at + len` that are there fault when they
    /// are written (missing ones too, with [`Features::WP_UNPOPULATED`] or on shared memory); without it they
    /// become writable again and who waits goes on, unless `wake` is false. With `protect` nobody is woken:
    /// `wake` is then not looked at.
    ///
    /// # Safety
    ///
    /// A write then waits for whoever serves it, as with [`register`](Self::register), or goes through that
    /// was to be held back.
    ///
    /// # Errors
    ///
    /// NOENT: not registered with [`RegisterMode::WP`], or no longer mapped. AGAIN: an event is unread, see
    /// [`Uffd`]. INVAL: unaligned or empty. All or nothing cannot be told: repeat the whole.
    pub unsafe fn write_protect(
        &self,
        at: usize,
        len: usize,
        protect: bool,
        wake: bool,
    ) -> Result<(), Errno> {
        let mode = match (protect, wake) {
            (true, _) => abi::WRITEPROTECT_WP,
            (false, true) => 0,
            (false, false) => abi::WRITEPROTECT_DONTWAKE,
        };
        let mut request = abi::WriteProtect { range: range(at, len), mode };
        // SAFETY: by the caller's promise.
        unsafe { abi::call(self.as_fd(), &mut request) }
    }

    /// `UFFDIO_POISON` (Linux 6.6, [`Features::POISON`]): whoever touches a missing page of `at..at + len` from
    /// now on gets SIGBUS (`BUS_MCEERR_AR`), a system call EFAULT (or EHWPOISON); also who waits, unless `wake`
    /// is false. `MADV_DONTNEED` of the page takes the poison away.
    ///
    /// # Safety
    ///
    /// `at..at + len` must be memory whose contents are the caller's to say: it has none any more.
    ///
    /// # Errors
    ///
    /// As [`copy`](Self::copy): EXIST where a page is, which stays as it is.
    pub unsafe fn poison(&self, at: usize, len: usize, wake: bool) -> Result<(), Partial> {
        let mut request = abi::Poison { range: range(at, len), mode: dontwake(wake), updated: 0 };
        // SAFETY: by the caller's promise.
        let result = unsafe { abi::call(self.as_fd(), &mut request) };
        partial(result, request.updated)
    }

    /// `UFFDIO_WAKE`: threads that wait for pages of `at..at + len` go on; those whose page is still missing
    /// fault again. Works also while an event is unread.
    ///
    /// # Errors
    ///
    /// INVAL: unaligned or empty.
    pub fn wake(&self, at: usize, len: usize) -> Result<(), Errno> {
        // SAFETY: waking changes no memory.
        unsafe { abi::call(self.as_fd(), &mut abi::Wake(range(at, len))) }
    }

    /// Reads what happened, with one `read(2)`: at least one event, at most 32, as [`EventBuffer::limit`] has it. A
    /// blocking context waits.
    ///
    /// Who caused an event goes on as soon as it is copied: what it does next can be in the same read, but for the last
    /// event of it.
    ///
    /// In one read the kernel gives page faults before other events; events acknowledge (see
    /// [`Event`](crate::Event)). So apply the other events first, then answer the faults. Two readers each get
    /// some of the messages, in no order between them.
    ///
    /// # Errors
    ///
    /// AGAIN: nothing to read, in a context with `nonblock`. INTR: a signal came. INVAL: no handshake.
    pub fn read_events<'b>(&self, buffer: &'b mut EventBuffer) -> Result<Events<'b>, Errno> {
        let bytes = rustix::io::read(&self.fd, buffer.bytes())?;
        // SAFETY: read just now, and this is the only call for it.
        Ok(unsafe { buffer.events(bytes) })
    }
}

impl AsFd for Uffd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl From<Uffd> for OwnedFd {
    fn from(uffd: Uffd) -> Self {
        uffd.fd
    }
}

const fn range(start: usize, len: usize) -> abi::Range {
    abi::Range { start: start as u64, len: len as u64 }
}

const fn dontwake(wake: bool) -> u64 {
    if wake {
        0
    } else {
        abi::DONTWAKE
    }
}

/// The kernel's answer field holds bytes done, or a negated error, or still 0 if it refused early.
fn partial(result: Result<(), Errno>, answer: i64) -> Result<(), Partial> {
    result.map_err(|errno| Partial { done: usize::try_from(answer).unwrap_or(0), errno })
}

#[cfg(test)]
mod tests {
    extern crate std;
    use std::string::ToString;

    use super::*;

    #[test]
    fn the_answer_field_is_bytes_done_or_an_error() {
        let failed = |answer| partial(Err(Errno::AGAIN), answer).unwrap_err().done;
        assert_eq!([failed(8192), failed(0), failed(-11)], [8192, 0, 0]);
        assert_eq!(partial(Ok(()), 4096), Ok(()));
    }

    #[test]
    fn a_partial_request_says_how_far_and_why() {
        let text = |done, errno| Partial { done, errno }.to_string();
        assert_eq!(text(8192, Errno::AGAIN), "8K done, then: stopped half-way; go on from there");
        assert_eq!(text(0, Errno::AGAIN), "0K done, then: an event is unread; read it and try again");
        assert_eq!(text(0, Errno::IO), "0K done, then error 5");
    }
}
