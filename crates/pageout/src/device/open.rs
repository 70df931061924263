//! The files that devices live on: making those that nobody else may read, or find after the program has gone; taking,
//! emptying, giving back what is in them.

use super::{raw, Errno};
use core::ffi::CStr;
use core::fmt;
use core::ops::Range;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{self, AtFlags, FallocateFlags, Mode, OFlags};
use rustix::ioctl;

/// Why a file cannot be a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum OpenError {
    /// The system call says so.
    Refused(Errno),
    /// A directory, a pipe, a terminal: neither regular file nor block device.
    NotAFile,
    /// Some file systems do not heed the mode or the owner that are asked for (vfat, NFS for root).
    Shared,
}

impl fmt::Display for OpenError {
    /// The reason and what to do, to stand behind the path in a message.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Refused(Errno::NOENT) => write!(f, "no such file; create it or name another"),
            Self::Refused(Errno::ACCESS | Errno::PERM) => {
                write!(f, "permission denied; name a file that you may read and write")
            }
            Self::Refused(Errno::ISDIR) => write!(f, "is a directory; name a file in it"),
            Self::Refused(Errno::ROFS) => write!(f, "read-only file system; name a file on another"),
            Self::Refused(Errno::NOSPC | Errno::DQUOT) => {
                write!(f, "no space left; free some or name another place")
            }
            Self::Refused(Errno::NOTDIR) => write!(f, "is not a directory; name one"),
            Self::Refused(Errno::EXIST) => write!(f, "exists; remove it or name another"),
            Self::Refused(Errno::MFILE | Errno::NFILE) => {
                write!(f, "too many open files; raise the limit (ulimit -n)")
            }
            Self::Refused(Errno::FBIG) => {
                write!(f, "larger than the limit on file sizes; raise it (ulimit -f) or ask for less")
            }
            Self::Refused(Errno::NOMEM) => write!(f, "no memory for it; ask for less"),
            Self::Refused(errno) => write!(f, "{errno}; name another place"),
            Self::NotAFile => {
                write!(f, "neither a regular file nor a block device; name one of those")
            }
            Self::Shared => write!(f, "others could read it on that file system; name a place on another"),
        }
    }
}

impl core::error::Error for OpenError {}

impl From<Errno> for OpenError {
    fn from(errno: Errno) -> Self {
        Self::Refused(errno)
    }
}

const FLAGS: OFlags = OFlags::RDWR.union(OFlags::CLOEXEC).union(OFlags::NOCTTY);
const OWNER_ONLY: Mode = Mode::RUSR.union(Mode::WUSR);

/// Creates an empty file in `directory`, mode 0600, that never has a name, or loses it at once.
pub fn unlinked(directory: &CStr) -> Result<OwnedFd, OpenError> {
    // With O_EXCL nobody can give it a name later.
    let nameless = OFlags::RDWR | OFlags::CLOEXEC | OFlags::TMPFILE | OFlags::EXCL;
    let made = match fs::openat(fs::CWD, directory, nameless, OWNER_ONLY) {
        // What file systems without O_TMPFILE answer (overlayfs, NFS, FUSE of old, vfat).
        Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::INVAL) => named_then_unlinked(directory),
        answer => answer,
    }?;
    if !is_private(&made) {
        return Err(OpenError::Shared);
    }
    write_in_place(&made);
    Ok(made)
}

/// Is it ours alone?
pub fn is_private(file: impl AsFd) -> bool {
    let own = rustix::process::geteuid().as_raw();
    fs::fstat(file).is_ok_and(|about| about.st_mode & 0o077 == 0 && about.st_uid == own)
}

/// Has a file that is empty yet overwritten where it is, on a file system that writes elsewhere each time (btrfs): that takes room
/// for each write, of which there is none once it is full, and half the speed.
pub fn write_in_place(empty: impl AsFd) {
    let empty = empty.as_fd();
    // The others have no such flag.
    let _ = fs::ioctl_getflags(empty).and_then(|flags| fs::ioctl_setflags(empty, flags | fs::IFlags::NOCOW));
}

/// Creates `size` bytes of memory behind a descriptor. For tests.
#[cfg(any(test, feature = "simulated"))]
pub(super) fn memory(size: u64) -> Result<OwnedFd, OpenError> {
    let fd = fs::memfd_create(c"pageout", fs::MemfdFlags::CLOEXEC | fs::MemfdFlags::NOEXEC_SEAL)?;
    fs::ftruncate(&fd, size)?;
    Ok(fd)
}

fn named_then_unlinked(directory: &CStr) -> Result<OwnedFd, Errno> {
    const ATTEMPTS: usize = 16;
    let directory =
        fs::openat(fs::CWD, directory, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    for _ in 0..ATTEMPTS {
        let name = random_name()?;
        // The array ends with a zero byte and has no other.
        let name = CStr::from_bytes_until_nul(&name).map_err(|_| Errno::INVAL)?;
        let flags = FLAGS | OFlags::NOFOLLOW | OFlags::CREATE | OFlags::EXCL;
        match fs::openat(&directory, name, flags, OWNER_ONLY) {
            Ok(fd) => {
                fs::unlinkat(&directory, name, AtFlags::empty())?;
                return Ok(fd);
            }
            Err(Errno::EXIST) => {}
            Err(errno) => return Err(errno),
        }
    }
    Err(Errno::EXIST)
}

/// `.pageout-` and twelve random letters, with the zero byte that ends it.
fn random_name() -> Result<[u8; 22], Errno> {
    let mut name = *b".pageout-............\0";
    rustix::rand::getrandom(&mut name[9..21], rustix::rand::GetRandomFlags::empty())?;
    for byte in &mut name[9..21] {
        *byte = b'a' + *byte % 26;
    }
    Ok(name)
}

/// Marks the file as taken for as long as the descriptor is open, by an advisory lock. `Ok(false)` where another has it.
///
/// # Errors
/// The kernel's, where files cannot be locked (some network file systems): no worse than without asking.
pub fn take(fd: impl AsFd) -> Result<bool, Errno> {
    match fs::flock(fd, fs::FlockOperation::NonBlockingLockExclusive) {
        Err(Errno::WOULDBLOCK) => Ok(false),
        answer => answer.map(|()| true),
    }
}

/// Is it a disk that cannot be written? It can be opened for that all the same.
pub fn is_read_only(disk: impl AsFd) -> bool {
    const BLKROGET: ioctl::Opcode = 0x125e;
    // SAFETY: BLKROGET writes one int.
    let read_only = unsafe { ioctl::ioctl(disk, ioctl::Getter::<BLKROGET, i32>::new()) };
    read_only.is_ok_and(|read_only| read_only != 0)
}

/// Has the room of a file read as zeros, so that nothing of what was written there is left, and end with it if the file is nothing
/// else. Holes, if it has any, stay such: zeros would take room that it had not. Else it keeps its room, where the file system can
/// (tmpfs cannot).
pub fn empty(file: impl AsFd, room: Range<u64>, has_holes: bool) -> Result<(), Errno> {
    let file = file.as_fd();
    let len = room.end.saturating_sub(room.start);
    let be = |mode| fs::fallocate(file, mode | FallocateFlags::KEEP_SIZE, room.start, len);
    let emptied = match has_holes {
        _ if len == 0 => Ok(()),
        true => be(FallocateFlags::PUNCH_HOLE),
        false => be(FallocateFlags::ZERO_RANGE).or_else(|_| be(FallocateFlags::PUNCH_HOLE)),
    };
    match room.start {
        0 => emptied.or_else(|_| fs::ftruncate(file, 0)).and_then(|()| fs::ftruncate(file, room.end)),
        // Some file systems can do neither (sshfs, NFS before 4.2).
        _ => emptied.or_else(|_| write_zeros(file, room)),
    }
}

/// Gives back what a range of a file or block device holds: it reads as zeros afterwards, or as anything. On file systems it
/// also waits for direct I/O to that file that is under way.
pub fn discard(file: impl AsFd, is_block_device: bool, at: u64, len: u64) -> Result<(), Errno> {
    let file = file.as_fd();
    loop {
        let answer = match is_block_device {
            true => raw::discard_blocks(file, at, len),
            false => fs::fallocate(file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, at, len),
        };
        if answer != Err(Errno::INTR) {
            return answer;
        }
    }
}

/// Overwrites what data there are.
fn write_zeros(file: BorrowedFd<'_>, room: Range<u64>) -> Result<(), Errno> {
    /// As direct I/O wants it.
    #[repr(align(4096))]
    struct Zeros([u8; 1 << 16]);
    static ZEROS: Zeros = Zeros([0; 1 << 16]);
    let mut at = room.start;
    while at < room.end {
        at = match fs::seek(file, fs::SeekFrom::Data(at)) {
            Ok(data) => data,
            Err(Errno::NXIO) => return Ok(()),
            Err(_) => at,
        };
        let hole = fs::seek(file, fs::SeekFrom::Hole(at)).unwrap_or(room.end).min(room.end);
        while at < hole {
            let most = ZEROS.0.len().min((hole - at) as usize);
            at += rustix::io::pwrite(file, &ZEROS.0[..most], at)? as u64;
        }
    }
    Ok(())
}

/// Has a file no data at all, only holes, or room that nobody wrote to?
pub fn is_hole(fd: impl AsFd) -> bool {
    // Such room that was only read is in the page cache, as zeros, and would be data.
    let _ = fs::fadvise(&fd, 0, None, fs::Advice::DontNeed);
    fs::seek(&fd, fs::SeekFrom::Data(0)) == Err(Errno::NXIO)
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::*;

    #[test]
    fn zeros_are_written_where_there_are_data_and_nowhere_else() {
        const PAGE: u64 = 4096;
        let file = memory(64 * PAGE).unwrap();
        for at in [0, 3, 40, 63] {
            rustix::io::pwrite(&file, &[7; PAGE as usize], at * PAGE).unwrap();
        }
        let before = fs::fstat(&file).unwrap().st_blocks;
        write_zeros(file.as_fd(), PAGE..63 * PAGE).unwrap();
        assert_eq!(fs::fstat(&file).unwrap().st_blocks, before);
        let mut first = [0; 1];
        let left = (0..64).filter(|at| {
            rustix::io::pread(&file, &mut first, at * PAGE).unwrap();
            first[0] != 0
        });
        assert!(left.eq([0, 63]));
    }
}
