//! Huge pages that the kernel makes by itself (khugepaged), or because another process asks for them. Where nothing is mapped they
//! hold zeros. Memory that is registered is left alone where something is missing; that of a fork's child is not registered
//! yet when it comes to be, and what is out there would read as zeros.
//!
//! So none are made while a clone takes place, nor in the child before its memory is registered: the kernel asks that of
//! each process (PR_SET_THP_DISABLE), and a child begins as its parent is.

use crate::sys;
use core::sync::atomic::{AtomicUsize, Ordering};
use linux_raw_sys::general as raw;
use linux_raw_sys::prctl::{PR_GET_THP_DISABLE, PR_SET_THP_DISABLE};
use rustix::io::Errno;

/// What the kernel answers where all are forbidden. Above it, since Linux 6.18, what is allowed all the same.
const FORBIDDEN: usize = 1;

/// What it was before, also for the child.
static BEFORE: AtomicUsize = AtomicUsize::new(FORBIDDEN);

/// None are made as long as it lasts, in this process's memory.
pub struct Forbidden(());

impl Forbidden {
    /// From here on. `None`: it cannot be.
    pub fn now() -> Option<Self> {
        let before = prctl([PR_GET_THP_DISABLE as usize, 0, 0]).ok()?;
        BEFORE.store(before, Ordering::Relaxed);
        prctl([PR_SET_THP_DISABLE as usize, FORBIDDEN, 0]).ok().map(|_| Self(()))
    }

    /// In the child of a process in which they are: they are here, too.
    pub fn inherited() -> Self {
        Self(())
    }
}

impl Drop for Forbidden {
    fn drop(&mut self) {
        let before = BEFORE.load(Ordering::Relaxed);
        let _ = prctl([PR_SET_THP_DISABLE as usize, before & FORBIDDEN, before & !FORBIDDEN]);
    }
}

fn prctl([what, a, b]: [usize; 3]) -> Result<usize, Errno> {
    // SAFETY: takes numbers.
    unsafe { sys::call6(raw::__NR_prctl, [what, a, b, 0, 0, 0]) }
}
