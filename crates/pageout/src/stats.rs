//! What happened, counted: one page of relaxed counters per process.
//!
//! The page is shared memory that `pageout run` maps too, so that the counters of a process that was
//! killed can still be read. Names are those of /proc/vmstat where the thing is the same, and the JSON
//! keys that `--stats` writes.

use crate::space::BLOCK_ORDER;
use crate::wire::DEVICES;
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Largest order: 512 pages, 2 MiB.
pub const MAX_ORDER: usize = BLOCK_ORDER as usize;
/// Buckets of a histogram: bucket `n` counts values in `[2^n, 2^(n+1))` nanoseconds.
pub const BUCKETS: usize = 48;

macro_rules! counters {
    ($($(#[doc = $doc:literal])* $name:ident),*; $($(#[doc = $of_list:literal])* $list:ident: $len:expr),*;) => {
        /// The counters. All values are since the start of the process; `*_bytes` are bytes,
        /// everything else is a number of pages of 4 KiB or of events.
        #[repr(C)]
        #[derive(Debug)]
        pub struct Stats {
            $($(#[doc = $doc])* pub $name: AtomicU64,)*
            $($(#[doc = $of_list])* pub $list: [AtomicU64; $len],)*
            /// Of `swapped_pages`, those on each device of the run.
            pub device_pages: [AtomicU64; DEVICES],
            /// Where the first of the `poisoned` pages lay that could not be read: its [`Entry`](crate::slot::Entry),
            /// or 0.
            pub lost_at: AtomicU64,
        }

        /// Each counter's and each list's name, and what it counts, for who shows them.
        pub const MEANINGS: &[(&str, &str)] = &[
            $((stringify!($name), concat!($($doc),*)),)*
            $((stringify!($list), concat!($($of_list),*)),)*
        ];

        impl Stats {
            /// Each plain counter with its name.
            pub fn counters(&self) -> impl Iterator<Item = (&'static str, u64)> + '_ {
                [$((stringify!($name), &self.$name)),*].into_iter().map(|(n, c)| (n, c.load(Relaxed)))
            }

            /// Each list of counters with its name.
            pub fn lists(&self) -> impl Iterator<Item = (&'static str, &[AtomicU64])> {
                [$((stringify!($list), &self.$list[..])),*].into_iter()
            }
        }
    };
}

counters! {
    /// Pages read from a device.
    pswpin,
    /// Pages written to a device.
    pswpout,
    /// Pages that came back as zeros without I/O.
    swpin_zero,
    /// Pages that left without I/O because they held only zeros.
    swpout_zero,
    /// Huge pages that came back whole and huge.
    thp_swpin,
    /// Huge pages that came back as small ones.
    thp_swpin_fallback,
    /// Huge pages that left whole.
    thp_swpout,
    /// Huge pages of which a part left as such, and the rest stayed or left in pieces.
    thp_swpout_fallback,
    /// Blocks of small pages that a stream went through and that were made one huge page again.
    thp_collapse_alloc,
    /// Pages brought in beside the one that was asked for.
    swap_ra,
    /// Of these, pages that a stream then went through. Of what else came in nobody sees whether it is used; a sample
    /// of it decides how much comes in.
    swap_ra_hit,
    /// Faults that needed a device.
    pgmajfault,
    /// Faults answered, all kinds.
    pgfault,
    /// Pages looked at by reclaim.
    pgscan,
    /// Pages that reclaim took.
    pgsteal,
    /// Pages of files that left the process: they are where they were mapped from.
    pgsteal_file,
    /// Faults that had to reclaim themselves.
    allocstall,
    /// Pages of units (16 pages) of which nothing was there, when the first came back.
    workingset_refault_anon,
    /// Of these, pages that came back so soon that they were taken for part of the working set.
    workingset_activate_anon,
    /// Pages of files that came back soon.
    workingset_refault_file,
    /// Faults that found the page still in its frame.
    rescued,
    /// Pages that left unchanged and so without a write.
    clean_dropped,
    /// Pages that the kernel would not give: shared with a fork's child or parent, then they are made the process's own and leave, or
    /// pinned. Of a huge page one counts.
    busy_left,
    /// Pages that the kernel discarded without an event, as guard pages do: they read as zeros.
    discarded_unseen,
    /// Pages that could not be brought back: they raise SIGBUS where they are touched.
    poisoned,
    /// Pages that were out when the kernel refused to unmap them, of which it tells as if it had: they raise SIGBUS, too.
    unmap_refused,
    /// Pages that a device did not take.
    write_errors,
    /// Pages that a device did not give, or whose checksum did not match.
    read_errors,
    /// Mappings that were taken up into the engine's care.
    adoptions,
    /// Largest resident memory seen, in bytes.
    resident_peak_bytes,
    /// Resident memory at the last look, in bytes.
    resident_bytes,
    /// Of these, what counts in other processes of the run: shared with them since a fork, or their part of what is shared on
    /// purpose.
    shared_bytes,
    /// The limit, in bytes.
    limit_bytes,
    /// Of the resident memory, what cannot go, in bytes.
    unmanaged_bytes,
    /// Pages that have a place on a device now.
    swapped_pages,
    /// Of these, the ones that are not in memory as well, at the last count.
    out_pages,
    /// 0 until the engine took up its work, then 1.
    active,
    /// The process that these counters belong to.
    pid,
    /// Acquisitions of the lock of a block (2 MiB of addresses).
    lock_block,
    /// Of these, those that waited.
    lock_block_waits,
    /// Acquisitions of the lock of a cluster (512 slots of a device).
    lock_cluster,
    /// Of these, those that waited.
    lock_cluster_waits,
    /// Acquisitions of the lock of a device's lists of clusters.
    lock_lists,
    /// Of these, those that waited.
    lock_lists_waits;
    /// Runs of pages of each order (4 KiB, 8 KiB, ... 2 MiB) brought in at once from a device.
    swpin: MAX_ORDER + 1,
    /// Runs of slots of each order taken for what is to be written.
    swpout: MAX_ORDER + 1,
    /// Runs for which no slots of this order were to be had: smaller ones were taken.
    swpout_fallback: MAX_ORDER + 1,
    /// From taking a fault up, after others that waited, to having answered it: entry n counts times from 2^n to 2^(n+1) ns.
    fault_ns: BUCKETS,
    /// Reads from a device on behalf of a fault, in the same way.
    device_ns: BUCKETS;
}

/// `out_pages` before the first count, where none can be taken for nothing.
pub const UNCOUNTED: u64 = u64::MAX;

/// The bytes that a process's counters take in shared memory.
pub const STATS_BYTES: usize = 4096;
const _: () = assert!(core::mem::size_of::<Stats>() <= STATS_BYTES);

impl Stats {
    /// Adds to a counter.
    pub fn add(counter: &AtomicU64, n: u64) {
        counter.fetch_add(n, Relaxed);
    }

    /// Sets a gauge.
    pub fn set(gauge: &AtomicU64, value: u64) {
        gauge.store(value, Relaxed);
    }

    /// Counts one value of `nanoseconds` in a histogram.
    pub fn observe(histogram: &[AtomicU64; BUCKETS], nanoseconds: u64) {
        let bucket = (63 - (nanoseconds | 1).leading_zeros() as usize).min(BUCKETS - 1);
        histogram[bucket].fetch_add(1, Relaxed);
    }
}
