//! Forks that nobody tells of: by an instruction of the program's own, past libc. What is out would read as zeros in the
//! child. So it gets no code: while pages may be out, what can be executed is kept from children (MADV_DONTFORK), and
//! such a child ends by SIGSEGV before it has executed anything, its handlers included.
//!
//! Code, and not the memory that is out: it neither grows nor moves, so no mapping that the program is about to extend
//! is split; it is little; and MADV_DONTFORK on memory stays what the program says. Not kept: anonymous memory that can
//! be written to as well, which is like any other; and new code until the next look, milliseconds later. A fork there
//! is refused all the same, as soon as it returns to other code.
//!
//! For a fork that asks ([`crate::fork`]) the code is lent, for as long as the clone takes or nothing is out. Another
//! thread that forks past libc in the midst of such a clone gets it too.
//!
//! One page tells that there was another one: it can be moved as long as it is the process's own, until a fork shares it.

use crate::{keeper, memory};
use alloc::vec::Vec;
use core::cell::UnsafeCell;
use pageout::kernel::{Kernel, Linux};
use pageout::space::discover::Area;
use pageout::space::PAGE;
use rustix::io::Errno;
use rustix::mm::{madvise, Advice};

/// The page that tells: in the data of a library, which children get and nobody manages.
#[repr(align(4096))]
struct Page(UnsafeCell<[u8; PAGE]>);

// SAFETY: written under the lock around `Code` only, and never read.
unsafe impl Sync for Page {}

static TELLTALE: Page = Page(UnsafeCell::new([0; PAGE]));

/// What can be executed, and whether children get it.
pub struct Code {
    /// Start and end, ascending.
    areas: Vec<(usize, usize)>,
    kept: bool,
    /// A hole of the engine's own, to move the telltale to.
    aside: Option<usize>,
    /// It told.
    forked: bool,
}

/// Is it code?
pub fn is_code(area: &Area<'_>) -> bool {
    let [_, write, execute, _] = *area.permissions else { return false };
    let is_data = write == b'w' && !area.name.starts_with(b"/");
    // The kernel's own: nothing forks there, and one lies beyond the addresses of programs.
    execute == b'x' && !is_data && !area.name.starts_with(b"[v")
}

impl Code {
    /// These areas, which children get.
    pub fn new(areas: Vec<(usize, usize)>, kernel: &Linux) -> Self {
        let aside = memory::map(PAGE, PAGE).ok().filter(|aside| kernel.register(*aside, PAGE).is_ok());
        Self { areas, kept: false, aside, forked: false }
    }

    /// This is what there is now. Nothing: it could not be read.
    pub fn found(&mut self, areas: &[(usize, usize)]) {
        if self.areas == areas || areas.is_empty() {
            return;
        }
        if self.kept {
            // What they were may be anything by now.
            let gone = self.areas.iter().filter(|area| areas.binary_search(area).is_err());
            gone.for_each(|area| advise(*area, Advice::LinuxDoFork));
            let new = areas.iter().filter(|area| self.areas.binary_search(area).is_err());
            new.for_each(|area| advise(*area, Advice::LinuxDontFork));
        }
        self.areas.clear();
        self.areas.extend_from_slice(areas);
    }

    /// From here on children do not get it.
    pub fn keep(&mut self) {
        if self.kept {
            return;
        }
        own_telltale();
        self.kept = true;
        self.areas.iter().for_each(|area| advise(*area, Advice::LinuxDontFork));
    }

    /// From here on they do. Events lock held.
    pub fn lend(&mut self, kernel: &Linux) {
        self.was_forked(kernel);
        self.kept = false;
        self.areas.iter().for_each(|area| advise(*area, Advice::LinuxDoFork));
    }

    /// Was there a fork that did not ask, and whose child had to do without, as far as is known? Events lock held.
    pub fn was_forked(&mut self, kernel: &Linux) -> bool {
        if let Some(aside) = self.aside.filter(|_| self.kept && !self.forked) {
            match kernel.move_pages(aside, TELLTALE.0.get() as usize, PAGE, false) {
                Ok(()) => {
                    let _ = kernel.drop_frames(aside, PAGE);
                    own_telltale();
                }
                Err(partial) => self.forked = partial.errno == Errno::BUSY,
            }
        }
        self.forked
    }
}

/// Whoever it was shared with.
fn own_telltale() {
    // Like no other's: the kernel may share pages that are the same.
    let content = keeper::program();
    // SAFETY: nobody reads it.
    unsafe { TELLTALE.0.get().cast::<u32>().write_volatile(content) };
}

fn advise((start, end): (usize, usize), advice: Advice) {
    // SAFETY: changes what children get, and nothing else.
    let _ = unsafe { madvise(start as *mut _, end - start, advice) };
}
