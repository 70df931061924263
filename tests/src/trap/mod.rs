//! The traps: one small program for each thing that programs do and that could go wrong while their
//! memory is out. Each is right without pageout, checks every byte itself, prints `ok` and exits 0, or
//! says what is wrong and exits 1. A trap that cannot run here prints `skip:` and why.
//!
//! [`ALL`] is the table; the program `trap` runs one of them, the test `traps` runs all, once as they
//! are and once under `pageout run`.

mod advice;
mod basic;
mod files;
mod forks;
mod huge;
mod io;
mod limit;
mod load;
mod procs;
mod remap;
mod rights;
mod signals;
pub(crate) mod span;
mod sys;
mod threads;
mod tree;
mod uffd;
mod uring;

use std::time::{Duration, Instant};

/// Why a trap did not end with `ok`.
#[derive(Debug)]
pub enum Stop {
    /// Something is wrong; says what.
    Wrong(String),
    /// The trap needs what is missing here; says what.
    Skip(String),
}

impl From<std::io::Error> for Stop {
    fn from(error: std::io::Error) -> Self {
        Stop::Wrong(error.to_string())
    }
}

/// What a trap, or a part of it, found.
pub type Outcome = Result<(), Stop>;

/// Fails with a message unless the condition holds.
macro_rules! ensure {
    ($condition:expr, $($message:tt)+) => {
        if !$condition {
            return Err($crate::trap::Stop::Wrong(format!($($message)+)));
        }
    };
}
pub(crate) use ensure;

/// What a trap is told.
#[derive(Clone, Debug)]
pub struct Ctx {
    /// Bytes that the trap may have in memory at once; the limit it runs under is a quarter of it.
    pub size: usize,
    /// How long the traps that race go on.
    pub time: Duration,
    /// Threads of those traps that can be told.
    pub threads: usize,
    /// Further words of the command line.
    pub args: Vec<String>,
}

impl Ctx {
    /// Half of the memory, in whole huge pages: what the trap is about; the other half is ballast.
    fn half(&self) -> usize {
        (self.size / 2).next_multiple_of(span::BLOCK)
    }

    /// Half of the memory filled with generation 1 and then pushed out, as far as it will go, by ballast
    /// of the other half.
    fn evicted(&self) -> Result<(span::Span, load::Ballast), Stop> {
        let field = sys::map_aligned(self.half(), span::BLOCK)?;
        field.fill(1);
        Ok((field, load::Ballast::new(self.half())?))
    }

    fn deadline(&self) -> Instant {
        Instant::now() + self.time
    }
}

/// How a trap ends when all is well.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// By exit with this status.
    Exit(i32),
    /// By this signal; under `pageout run` the status is 128 and the signal.
    Signal(i32),
}

/// One trap and what a test may ask of it.
#[derive(Clone, Copy)]
pub struct Trap {
    /// Its name on the command line.
    pub name: &'static str,
    /// What it does, in a line.
    pub about: &'static str,
    /// The trap itself.
    pub run: fn(&Ctx) -> Outcome,
    /// How it ends.
    pub end: End,
    /// The least `--size`, in bytes, whose quarter has room for what of it cannot be swapped out.
    pub least_size: usize,
    /// Whether pages must have been swapped out when it ran under pageout.
    pub swaps: bool,
    /// Whether huge pages must have been among them, where the kernel gives any.
    pub swaps_huge: bool,
    /// Whether pageout may say something on standard error, as about the child of a fork.
    pub may_log: bool,
    /// Whether pageout may give up, if it does so aloud and at once: the trap takes from it what it needs
    /// before it started.
    pub may_refuse: bool,
    /// Whether what it needs may be missing under pageout alone, which docs/hazards.md has.
    pub may_skip: bool,
    /// Whether the tests start it by themselves: not a part of other traps or in need of company.
    pub alone: bool,
}

impl Trap {
    const fn new(name: &'static str, about: &'static str, run: fn(&Ctx) -> Outcome) -> Self {
        let end = End::Exit(0);
        let swaps_huge = false;
        Trap {
            name,
            about,
            run,
            end,
            least_size: 0,
            swaps: true,
            swaps_huge,
            may_log: false,
            may_refuse: false,
            may_skip: false,
            alone: true,
        }
    }

    /// For traps whose pages need not leave, or do so where the counters do not tell.
    const fn need_not_swap(self) -> Self {
        Trap { swaps: false, ..self }
    }

    const fn at_least(self, size: usize) -> Self {
        Trap { least_size: size, ..self }
    }

    const fn swaps_huge(self) -> Self {
        Trap { swaps_huge: true, ..self }
    }

    const fn may_log(self) -> Self {
        Trap { may_log: true, ..self }
    }

    const fn may_refuse(self) -> Self {
        Trap { may_refuse: true, may_log: true, swaps: false, ..self }
    }

    const fn may_skip(self) -> Self {
        Trap { may_skip: true, ..self }
    }

    const fn ends(self, end: End) -> Self {
        Trap { end, ..self }
    }

    const fn helper(self) -> Self {
        Trap { alone: false, ..self }
    }
}

/// All traps, by what they are about.
pub const ALL: &[&[Trap]] = &[
    basic::TRAPS,
    huge::TRAPS,
    remap::TRAPS,
    advice::TRAPS,
    io::TRAPS,
    files::TRAPS,
    uring::TRAPS,
    uffd::TRAPS,
    signals::TRAPS,
    threads::TRAPS,
    forks::TRAPS,
    procs::TRAPS,
    rights::TRAPS,
    limit::TRAPS,
    tree::TRAPS,
];

/// The trap of this name.
pub fn find(name: &str) -> Option<&'static Trap> {
    ALL.iter().copied().flatten().find(|trap| trap.name == name)
}
