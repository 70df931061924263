//! The bits: features of a context, modes of its requests. Plain values; any thread.

use core::fmt;

use bitflags::bitflags;

bitflags! {
    /// What a context can be asked for at [`Uffd::open`](crate::Uffd::open); what a kernel offers is told by
    /// [`Uffd::supported`](crate::Uffd::supported). In brackets the Linux version that brought it.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub struct Features: u64 {
        /// Write-protection of anonymous memory (5.7).
        const PAGEFAULT_FLAG_WP = 1 << 0;
        /// Report `fork()` and give the child's context (4.11). Asking for it needs CAP_SYS_PTRACE.
        const EVENT_FORK = 1 << 1;
        /// Report `mremap()` (4.11).
        const EVENT_REMAP = 1 << 2;
        /// Report `madvise(MADV_DONTNEED)`, `MADV_FREE`, `MADV_REMOVE` (4.11).
        const EVENT_REMOVE = 1 << 3;
        /// Missing faults on hugetlbfs (4.11).
        const MISSING_HUGETLBFS = 1 << 4;
        /// Missing faults on shared memory and tmpfs (4.11).
        const MISSING_SHMEM = 1 << 5;
        /// Report `munmap()`, and what is mapped over (4.11).
        const EVENT_UNMAP = 1 << 6;
        /// A fault sends SIGBUS to the faulting thread instead of an event (4.14). System calls given such
        /// memory then fail with EFAULT, so a context with it needs no rights (Linux 5.11).
        const SIGBUS = 1 << 7;
        /// Faults name the faulting thread (4.14).
        const THREAD_ID = 1 << 8;
        /// Minor faults on hugetlbfs (5.13).
        const MINOR_HUGETLBFS = 1 << 9;
        /// Minor faults on shared memory and tmpfs (5.14).
        const MINOR_SHMEM = 1 << 10;
        /// Faults give the address to the byte, not rounded down to the page (5.18).
        const EXACT_ADDRESS = 1 << 11;
        /// Write-protection of hugetlbfs, shared memory and tmpfs (5.19).
        const WP_HUGETLBFS_SHMEM = 1 << 12;
        /// Write-protection also of anonymous pages that are not there yet (6.4).
        const WP_UNPOPULATED = 1 << 13;
        /// `UFFDIO_POISON` (6.6).
        const POISON = 1 << 14;
        /// The kernel lifts write-protection by itself; who wrote is asked by PAGEMAP_SCAN (6.7).
        const WP_ASYNC = 1 << 15;
        /// `UFFDIO_MOVE` (6.8).
        const MOVE = 1 << 16;
    }

    /// Which faults of a range are reported. At least one must be chosen.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub struct RegisterMode: u64 {
        /// Access to a page that is not there.
        const MISSING = 1 << 0;
        /// Write to a page that is write-protected by [`write_protect`](crate::Uffd::write_protect) or
        /// [`CopyMode::WP`].
        const WP = 1 << 1;
        /// Access to a page of shared memory that is in the page cache but not mapped here; answered by
        /// [`continue_pages`](crate::Uffd::continue_pages).
        const MINOR = 1 << 2;
    }

    /// How [`copy`](crate::Uffd::copy) leaves a page.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub struct CopyMode: u64 {
        /// Do not wake who waits for these pages; [`wake`](crate::Uffd::wake) does it later.
        const DONTWAKE = 1 << 0;
        /// Map the page write-protected, so that the first write faults. The range must be registered with
        /// [`RegisterMode::WP`].
        const WP = 1 << 1;
    }

    /// How [`move_pages`](crate::Uffd::move_pages) takes a page.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub struct MoveMode: u64 {
        /// Do not wake who waits for the destination; [`wake`](crate::Uffd::wake) does it later.
        const DONTWAKE = 1 << 0;
        /// Skip holes of the source (they leave a hole in the destination) instead of stopping with ENOENT.
        const ALLOW_SRC_HOLES = 1 << 1;
    }
}

impl Features {
    /// The first Linux version, as (major, minor), that has all of them.
    pub const fn since(self) -> (u8, u8) {
        let mut newest = (4, 3);
        let mut bit = 0;
        while bit < SINCE.len() {
            let version = SINCE[bit];
            if self.bits() & (1 << bit) != 0
                && (version.0 > newest.0 || (version.0 == newest.0 && version.1 > newest.1))
            {
                newest = version;
            }
            bit += 1;
        }
        newest
    }
}

/// The Linux version of each feature, by its bit.
const SINCE: [(u8, u8); 17] = [
    (5, 7),
    (4, 11),
    (4, 11),
    (4, 11),
    (4, 11),
    (4, 11),
    (4, 11),
    (4, 14),
    (4, 14),
    (5, 13),
    (5, 14),
    (5, 18),
    (5, 19),
    (6, 4),
    (6, 6),
    (6, 7),
    (6, 8),
];

/// The names, separated by commas: `POISON, MOVE`.
impl fmt::Display for Features {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut separator = "";
        for (name, _) in self.iter_names() {
            write!(f, "{separator}{name}")?;
            separator = ", ";
        }
        let unknown = self.bits() & !Self::all().bits();
        if unknown != 0 {
            write!(f, "{separator}{unknown:#x}")?;
        }
        Ok(())
    }
}
