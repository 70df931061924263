//! Forks that nobody tells of: by an instruction of the program's own, past libc. What is out would read as zeros in the
//! child. So it gets no code: while pages may be out, what can be executed is kept from children (MADV_DONTFORK), and
//! such a child ends by SIGSEGV before it has executed anything, its handlers included.
//!
//! Code, and not the memory that is out: it neither grows nor moves, so no mapping that the program is about to extend
//! is split; it is little; and MADV_DONTFORK on memory stays what the program says. Heaps that can be executed are code as
//! well; where libc's `mremap` moves one, or has it grow, the mark is taken off ([`moves`]). Not kept: new code
//! until the next look, milliseconds later. A fork there is refused all the same, as soon as it returns to other code.
//!
//! For a fork that asks while pages are out a twin of the code is lent ([`crate::twin`]); what has none is lent itself,
//! for as long as the clone takes: then another thread that forks past libc in the midst of it gets that too.
//!
//! One page tells that there was another one: it can be moved as long as it is the process's own, until a fork shares it.

use crate::proc::Maps;
use crate::twin::{Original, Pages, Twin};
use crate::{keeper, memory, wrap};
use alloc::vec::Vec;
use core::cell::UnsafeCell;
use core::sync::atomic::{AtomicBool, Ordering};
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
    /// By where their originals begin.
    twins: Vec<Twin>,
    state: State,
    /// How often it was lent.
    loans: u32,
    /// A hole of the engine's own, to move the telltale to.
    aside: Option<usize>,
    /// It told.
    forked: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    /// Every child gets it.
    Given,
    /// None does.
    Kept,
    /// As far as it has a twin, only the child that knows of that.
    Lent,
}

/// Is it code that is not this library's? In that a fork's child begins, and nobody forks there who does not ask. Nor the engine's
/// memory: a child has its own where this lies.
pub fn is_code(area: &Area<'_>) -> bool {
    // All of it: who opens a page of it to write a jump there has cut it into several.
    let own = wrap::own().contains(&area.start);
    // The stack grows at any time, and the heap by brk. The kernel's own: nothing forks there, and one lies beyond the
    // addresses of programs.
    let grows = [&b"[stack]"[..], b"[heap]"].contains(&area.name);
    let is = area.permissions.get(2) == Some(&b'x') && !own && !grows && !area.name.starts_with(b"[v");
    let is = is && !memory::is_own(area.start, area.end);
    if is && area.is_anonymous() {
        IS_MADE.store(true, Ordering::Relaxed);
    }
    is
}

impl Code {
    /// These areas, which children get.
    pub fn new(areas: Vec<(usize, usize)>, kernel: &Linux) -> Self {
        let aside = memory::map(PAGE, PAGE).ok().filter(|aside| kernel.register(*aside, PAGE).is_ok());
        Self { areas, twins: Vec::new(), state: State::Given, loans: 0, aside, forked: false }
    }

    /// To be asked before a look for [`Code::found`].
    pub fn loans(&self) -> u32 {
        self.loans
    }

    /// This is what there is now. False: it was lent since the look began, which may be of no use.
    pub fn found(&mut self, areas: &[(usize, usize)], loans: u32) -> bool {
        if self.state == State::Lent || self.loans != loans {
            return false;
        }
        self.replace(areas);
        if self.state == State::Kept {
            // What is at the same place may be new.
            self.areas.iter().for_each(|area| advise(*area, Advice::LinuxDontFork));
        }
        // A file that is not used any more must not seem to be: it may be on what is to be unmounted.
        self.twins.retain(|twin| areas.binary_search(&twin.place()).is_ok());
        true
    }

    /// An empty list: they could not be read.
    fn replace(&mut self, areas: &[(usize, usize)]) {
        if areas.is_empty() {
            return;
        }
        if self.state == State::Kept {
            // What they were may be anything by now.
            let gone = self.areas.iter().filter(|area| areas.binary_search(area).is_err());
            gone.for_each(|area| advise(*area, Advice::LinuxDoFork));
        }
        self.areas.clear();
        self.areas.extend_from_slice(areas);
    }

    /// From here on children do not get it.
    pub fn keep(&mut self) {
        match self.state {
            State::Kept => return,
            State::Given => {}
            State::Lent => self.twins.iter().for_each(Twin::keep),
        }
        own_telltale();
        self.state = State::Kept;
        self.areas.iter().for_each(|area| advise(*area, Advice::LinuxDontFork));
    }

    /// From here on they do. Events lock held.
    pub fn give(&mut self, kernel: &Linux) {
        self.was_forked(kernel);
        self.state = State::Given;
        self.areas.iter().for_each(|area| advise(*area, Advice::LinuxDoFork));
    }

    /// Has a twin made of what is there now, as far as it can have one. From here to [`Code::keep`] nothing else counts
    /// as code.
    pub fn pair(&mut self, maps: &mut Maps) {
        let (mut areas, mut originals) = (Vec::new(), Vec::new());
        maps.read(c"/proc/self/maps", |line| {
            if let Some(area) = Area::parse(line).filter(is_code) {
                areas.push((area.start, area.end));
                originals.extend(Original::of(&area));
            }
        });
        self.replace(&areas);
        (self.state, self.loans) = (State::Lent, self.loans.wrapping_add(1));
        let original_of = |twin: &Twin| {
            let at = originals.binary_search_by_key(&twin.original.start, |original| original.start).ok()?;
            twin.is_of(&originals[at]).then_some(at)
        };
        let mut paired = alloc::vec![false; originals.len()];
        self.twins.retain(|twin| original_of(twin).inspect(|at| paired[*at] = true).is_some());
        let lone =
            originals.into_iter().zip(paired).filter_map(|(original, paired)| (!paired).then_some(original));
        let mut new: Vec<Twin> = lone.filter_map(Twin::new).collect();
        if new.is_empty() {
            return;
        }
        maps.read(c"/proc/self/maps", |line| {
            let Some(area) = Area::parse(line) else { return };
            if let Some(at) = new.iter().position(|twin| twin.is(&area)) {
                self.twins.push(new.swap_remove(at));
            }
        });
        self.twins.sort_unstable_by_key(Twin::place);
    }

    /// From here on the child that knows of them gets the twins; after [`Code::pair`]. Code may have been written to, or
    /// have made room for something else, until now.
    pub fn lend(&mut self) {
        let pages = Pages::open();
        for area in &self.areas {
            let twin = self.twins.binary_search_by_key(area, Twin::place).ok().map(|at| &self.twins[at]);
            let alike =
                |twin: &&Twin| pages.as_ref().is_some_and(|pages| pages.are_the_files(&twin.original));
            if !twin.filter(alike).is_some_and(Twin::lend) {
                advise(*area, Advice::LinuxDoFork);
            }
        }
    }

    /// Was there a fork that did not ask, and whose child had to do without, as far as is known? Events lock held.
    pub fn was_forked(&mut self, kernel: &Linux) -> bool {
        if let Some(aside) = self.aside.filter(|_| self.state == State::Kept && !self.forked) {
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

/// There was code of no file once, which may have been marked.
static IS_MADE: AtomicBool = AtomicBool::new(false);

/// What is in this range is about to move, or to grow, or has: it would take along that children do not get it, also when it is
/// code no more. If it is, it is found again. From the program's threads, which may be killed, and whose stacks may be out:
/// no lock is taken.
pub fn moves(start: usize, len: usize) {
    // Not if the mark may be the program's. A filter may not allow the call.
    if IS_MADE.load(Ordering::Relaxed) && !wrap::keeps_from_children() && !wrap::is_filtered() {
        advise((start, start.saturating_add(len)), Advice::LinuxDoFork);
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
