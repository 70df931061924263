//! Which process this is: a fork's child is another one, and finds it out whatever numbers it and its parent have. Init of
//! a pid namespace has the number of every other.

use super::memory::wiped_in_children;
use core::sync::atomic::{AtomicU64, Ordering::SeqCst};
use once_cell::race::OnceBox;
use std::boxed::Box;

/// Tells the calling process from all that it descends from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Process(u64);

/// The last that was given, here or in whom this process descends from.
static LAST: AtomicU64 = AtomicU64::new(0);

impl Process {
    /// Any thread, and a signal's handler but for the first time.
    pub(super) fn this() -> Self {
        match own() {
            Some(own) => {
                let new = |known| (known == 0).then(|| LAST.fetch_add(1, SeqCst) + 1);
                let _ = own.fetch_update(SeqCst, SeqCst, new);
                Self(own.load(SeqCst))
            }
            None => Self(std::process::id().into()),
        }
    }
}

/// A word that is 0 in a fork's child. `None`: no memory.
fn own() -> Option<&'static AtomicU64> {
    // Nobody waits for another thread, which a fork's child does not have. Who loses a race leaves a page behind.
    static OWN: OnceBox<&'static AtomicU64> = OnceBox::new();
    // SAFETY: zeros are a number.
    OWN.get_or_try_init(|| unsafe { wiped_in_children() }.map(Box::new)).ok().copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_is_another() {
        let parent = Process::this();
        assert_eq!(Process::this(), parent);
        // SAFETY: the child leaves without cleaning up.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let is_another = Process::this() != parent && Process::this() == Process::this();
            // SAFETY: ends it.
            unsafe { libc::_exit(is_another.into()) };
        }
        let mut status = 0;
        // SAFETY: our own child.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        assert_eq!(libc::WEXITSTATUS(status), 1);
        assert_eq!(Process::this(), parent);
    }
}
