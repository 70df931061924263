//! Huge pages that nobody asks for: the kernel gives them where `transparent_hugepage/enabled` is `always`, and a program fills
//! them faster than anybody looks. Many that begin in the same instant do without until there is room for that.

use crate::sys;
use linux_raw_sys::general as raw;
use pageout::wire::{Settings, ASKED_HUGE_ONLY};

const PR_SET_THP_DISABLE: usize = 41;
const PR_GET_THP_DISABLE: usize = 42;
/// Memory that asks for them gets them still. Since Linux 6.18: before, nothing is kept back.
const EXCEPT_ADVISED: usize = 1 << 1;
const KEPT_BACK: usize = 1 | EXCEPT_ADVISED;

/// Whether the kernel gives them to the program's memory. The program's own word comes first (PR_SET_THP_DISABLE), that of whoever
/// began the run, too.
pub struct Unasked {
    is_ours: bool,
    kept_back: bool,
}

impl Unasked {
    /// As the program was born: what it was before, or its parent, may have been kept from them.
    pub fn new(settings: &Settings) -> Self {
        let state = state();
        let kept_back = state == Some(KEPT_BACK);
        let is_ours = state == Some(0) || kept_back && settings.flags & ASKED_HUGE_ONLY == 0;
        Self { is_ours, kept_back }
    }

    /// Are they?
    pub fn are_kept_back(&self) -> bool {
        self.kept_back
    }

    /// Keeps them back, or no more.
    pub fn keep_back(&mut self, whether: bool) {
        if !self.is_ours || whether == self.kept_back {
            return;
        }
        let expected = if self.kept_back { KEPT_BACK } else { 0 };
        // What the program has said in the meantime holds from there on.
        self.is_ours = state() == Some(expected) && set(whether);
        self.kept_back = whether;
    }
}

fn state() -> Option<usize> {
    // SAFETY: takes numbers.
    unsafe { sys::call(raw::__NR_prctl, PR_GET_THP_DISABLE, 0, 0, 0) }.ok()
}

fn set(kept_back: bool) -> bool {
    let flags = if kept_back { EXCEPT_ADVISED } else { 0 };
    // SAFETY: takes numbers; whoever shares the memory is meant, so the program.
    unsafe { sys::call(raw::__NR_prctl, PR_SET_THP_DISABLE, kept_back.into(), flags, 0) }.is_ok()
}
