//! What file system a path or file lies on: its name, its free space, whether it is memory.

use super::Errno;
use core::ffi::CStr;
use rustix::fd::AsFd;
use rustix::fs::{fstatfs, statfs, StatFs, StatVfsMountFlags};

/// A file system, as far as swapping to it is concerned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileSystem {
    /// `tmpfs`, `ext4` and so on; `unknown` for what is not in the table.
    pub name: &'static str,
    /// Bytes that an ordinary user can still write.
    pub free: u64,
    /// Bytes in all.
    pub total: u64,
    /// Its files are memory: swapping to them frees nothing.
    pub in_memory: bool,
    /// Programs there gain no rights by their set-user-ID bits (mounted `nosuid`).
    pub nosuid: bool,
}

/// The kernel's numbers (`linux/magic.h` and, for those that are missing there, the file systems' sources).
const NAMES: [(u32, &str, bool); 16] = [
    (0x0102_1994, "tmpfs", true),
    (0x8584_58f6, "ramfs", true),
    (0x9584_58f6, "hugetlbfs", true),
    (0x0000_ef53, "ext4", false),
    (0x5846_5342, "xfs", false),
    (0x9123_683e, "btrfs", false),
    (0xf2f5_2010, "f2fs", false),
    (0x2fc1_2fc1, "zfs", false),
    (0xca45_1a4e, "bcachefs", false),
    (0x794c_7630, "overlay", false),
    (0x0000_6969, "nfs", false),
    (0xff53_4d42, "cifs", false),
    (0x6573_5546, "fuse", false),
    (0x0102_1997, "9p", false),
    (0x0000_4d44, "vfat", false),
    (0x2011_bab0, "exfat", false),
];

impl FileSystem {
    /// How large a file may grow here unless a size is asked for. Some is left for others, the larger of 1 GiB and 5 %; of a small
    /// file system, half. And it is no larger than 4 TiB: ext4 has none beyond 16.
    pub fn room_unasked(&self) -> u64 {
        (self.free - (self.total / 20).max(1 << 30).min(self.free / 2)).min(4 << 40)
    }

    /// The file system that `path` lies on.
    pub fn of_path(path: &CStr) -> Result<Self, Errno> {
        statfs(path).map(|found| Self::from_statfs(&found))
    }

    /// The file system that an open file lies on.
    pub fn of_file(file: impl AsFd) -> Result<Self, Errno> {
        fstatfs(file).map(|found| Self::from_statfs(&found))
    }

    fn from_statfs(found: &StatFs) -> Self {
        // The kernel's word is as wide as the machine's; the numbers have 32 bits.
        let magic = found.f_type as u32;
        let (name, in_memory) = NAMES
            .iter()
            .find(|entry| entry.0 == magic)
            .map_or(("unknown", false), |&(_, name, in_memory)| (name, in_memory));
        let block = if found.f_frsize > 0 { found.f_frsize } else { found.f_bsize } as u64;
        let bytes = |blocks: u64| blocks.saturating_mul(block);
        let nosuid =
            StatVfsMountFlags::from_bits_retain(found.f_flags as u64).contains(StatVfsMountFlags::NOSUID);
        Self { name, free: bytes(found.f_bavail), total: bytes(found.f_blocks), in_memory, nosuid }
    }
}
