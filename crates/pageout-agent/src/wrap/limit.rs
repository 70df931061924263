//! Limits of the process.

use super::answer;
use crate::{keeper, memory, sys};
use core::ffi::{c_int, c_uint};
use linux_raw_sys::general as raw;
use rustix::io::Errno;

/// `struct rlimit`: the limit, and what it may be raised to.
pub(super) type Limit = [u64; 2];

/// See the table of [`super`]. What the program reads back is the sum; a highest limit that it read it may set again.
///
/// # Safety
/// As libc's.
#[inline(never)]
pub(super) unsafe fn prlimit(process: c_int, resource: c_uint, new: *const Limit, old: *mut Limit) -> c_int {
    let set = |new: *const Limit| {
        // SAFETY: as the caller promises.
        unsafe {
            sys::call(raw::__NR_prlimit64, process as usize, resource as usize, new as usize, old as usize)
        }
    };
    let me = sys::own_process();
    // Not of a guest in the same memory (vfork), which is about to become another program.
    let ours = (process == 0 || process as u32 == me) && me == keeper::program() && memory::is_home();
    if new.is_null() || !ours || !matches!(resource, raw::RLIMIT_AS | raw::RLIMIT_DATA) {
        return answer(set(new)) as c_int;
    }
    let more = |limit: u64| if limit == u64::MAX { limit } else { limit.saturating_add(memory::reserved()) };
    // SAFETY: as the caller promises.
    let [soft, highest] = unsafe { *new };
    answer(match set(&[soft, highest].map(more)) {
        // The highest may not be raised.
        Err(Errno::PERM) => match sys::highest_limit(0, resource).filter(|present| highest <= *present) {
            Some(present) => set(&[more(soft).min(present), present]),
            None => set(new),
        },
        done => done,
    }) as c_int
}

/// See the table of [`super`].
///
/// # Safety
/// As libc's.
#[inline(never)]
pub(super) unsafe fn setrlimit(resource: c_uint, new: *const Limit) -> c_int {
    // SAFETY: as the caller promises.
    unsafe { prlimit(0, resource, new, core::ptr::null_mut()) }
}
