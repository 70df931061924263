//! Real programs of the distribution, run with and without pageout and compared.
//!
//! A [`Program`] says how its input is made, how it is started and what it leaves behind; [`harness`]
//! runs it natively, derives the limit from what it measured, runs it again under `pageout run`, and
//! compares. Each file of programs owns a few of them and nothing else. Runs are serial: the harness
//! takes every descendant of the test process for part of the run at hand.

pub mod overhead;
pub mod report;

mod allocators;
mod compare;
mod compile;
mod databases;
mod harness;
mod process;
mod redis;
mod runtimes;
mod sample;
mod stress;
mod text;
mod trees;

use anyhow::Result;
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

pub use harness::{check, unsupported, Bench};

/// A mebibyte.
pub const MIB: u64 = 1 << 20;

/// How big the inputs are.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Size {
    /// A natural peak of 30 to 300 MiB, and at most about ten seconds each: what CI runs.
    Small,
    /// About 1 to 1.5 GiB each.
    Full,
}

impl Size {
    /// `PAGEOUT_TESTS_FULL=1` asks for the full sizes.
    pub fn from_env() -> Self {
        match std::env::var_os("PAGEOUT_TESTS_FULL") {
            Some(value) if !value.is_empty() && value != "0" => Size::Full,
            _ => Size::Small,
        }
    }

    /// One of two values.
    pub fn pick<T>(self, small: T, full: T) -> T {
        match self {
            Size::Small => small,
            Size::Full => full,
        }
    }
}

/// A command line with its environment, before it is decided where and under what it runs.
#[derive(Clone)]
pub struct Invocation {
    /// The program and its arguments.
    pub argv: Vec<OsString>,
    /// Variables set for it.
    pub env: Vec<(OsString, OsString)>,
    /// What it reads as standard input; nothing when absent.
    pub stdin: Option<PathBuf>,
}

impl Invocation {
    /// A command without arguments.
    pub fn new(program: impl Into<OsString>) -> Self {
        Invocation { argv: vec![program.into()], env: Vec::new(), stdin: None }
    }

    /// Appends an argument.
    pub fn arg(mut self, arg: impl Into<OsString>) -> Self {
        self.argv.push(arg.into());
        self
    }

    /// Appends arguments, separated by blanks.
    pub fn args(mut self, args: &str) -> Self {
        self.argv.extend(args.split_whitespace().map(OsString::from));
        self
    }

    /// Sets a variable.
    pub fn env(mut self, name: &str, value: impl AsRef<OsStr>) -> Self {
        self.env.push((name.into(), value.as_ref().to_owned()));
        self
    }

    /// Reads `path` as standard input.
    pub fn stdin(mut self, path: PathBuf) -> Self {
        self.stdin = Some(path);
        self
    }
}

/// Where the limit of the second run comes from.
#[derive(Clone, Copy)]
pub enum Limit {
    /// A quarter of the natural peak of anonymous memory, plus what cannot go.
    Quarter,
    /// So many bytes.
    Fixed(u64),
    /// A part of the natural peak of the anonymous memory of all processes together, plus what cannot go.
    Tree(u64),
}

type Prepare = Box<dyn Fn(&Path) -> Result<()> + Send>;
type Command = Box<dyn Fn(&Path) -> Invocation + Send>;
type Driver = Box<dyn Fn(&Path) -> Result<Vec<u8>> + Send + Sync>;
type Verify = Box<dyn Fn(&Path) -> Result<()> + Send>;
type Normalise = fn(Vec<u8>) -> Vec<u8>;

/// One program: input, command, and what must be the same.
pub struct Program {
    name: &'static str,
    needs: Vec<&'static str>,
    prepare: Prepare,
    command: Command,
    outputs: &'static [&'static str],
    normalise: Normalise,
    driver: Option<Driver>,
    limit: Limit,
    parallel: bool,
    on_file: bool,
    together: bool,
    verify: Option<Verify>,
}

impl Program {
    /// A program that `command` starts. `command` is given the directory of the input; the working
    /// directory is one of the run's own.
    fn new(name: &'static str, command: impl Fn(&Path) -> Invocation + Send + 'static) -> Self {
        Program {
            name,
            needs: Vec::new(),
            prepare: Box::new(|_| Ok(())),
            command: Box::new(command),
            outputs: &[],
            normalise: |bytes| bytes,
            driver: None,
            limit: Limit::Quarter,
            parallel: false,
            on_file: false,
            together: false,
            verify: None,
        }
    }

    /// Commands (looked for in `PATH`) and files (absolute paths) without which the test is skipped.
    fn needs(mut self, needs: &[&'static str]) -> Self {
        self.needs.extend_from_slice(needs);
        self
    }

    /// Makes the input in the directory that it is given, once for both runs.
    fn input(mut self, prepare: impl Fn(&Path) -> Result<()> + Send + 'static) -> Self {
        self.prepare = Box::new(prepare);
        self
    }

    /// Files that the program leaves in its working directory and that must be the same, beside
    /// standard output and standard error.
    fn outputs(mut self, outputs: &'static [&'static str]) -> Self {
        self.outputs = outputs;
        self
    }

    /// Removes from standard output and standard error what differs between any two runs.
    fn normalise(mut self, normalise: Normalise) -> Self {
        self.normalise = normalise;
        self
    }

    /// For servers: talks to the program, given its working directory, until it ends. What it returns
    /// must be the same too.
    fn driver(mut self, driver: impl Fn(&Path) -> Result<Vec<u8>> + Send + Sync + 'static) -> Self {
        self.driver = Some(Box::new(driver));
        self
    }

    /// A limit other than a quarter.
    fn limit(mut self, limit: Limit) -> Self {
        self.limit = limit;
        self
    }

    /// Several of its threads touch new memory at once.
    fn parallel(mut self) -> Self {
        self.parallel = true;
        self
    }

    /// Swaps to a file at the small size too.
    fn on_file(mut self) -> Self {
        self.on_file = true;
        self
    }

    /// Several processes: the limit is a `part`th of what all have together, and what all have is held against it.
    fn tree(self, part: u64) -> Self {
        self.limit(Limit::Tree(part)).together().parallel()
    }

    /// What all processes have together is held against the limit.
    fn together(mut self) -> Self {
        self.together = true;
        self
    }

    /// Looks at what a run left in its directory, once nothing of it runs any more.
    fn verify(mut self, verify: impl Fn(&Path) -> Result<()> + Send + 'static) -> Self {
        self.verify = Some(Box::new(verify));
        self
    }

    /// The name of the test.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// What is not installed here.
    pub fn missing(&self) -> Vec<&'static str> {
        self.needs.iter().copied().filter(|need| !installed(need)).collect()
    }
}

fn installed(need: &str) -> bool {
    if need.starts_with('/') {
        return Path::new(need).exists();
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|dir| dir.join(need).is_file())
}

/// The path of a script that the repository keeps for these tests.
fn script(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("programs").join(name)
}

/// Every program, at the given size.
pub fn all(size: Size) -> Vec<Program> {
    let mut programs = Vec::new();
    programs.extend(text::programs(size));
    programs.extend(runtimes::programs(size));
    programs.extend(databases::programs(size));
    programs.extend(compile::programs(size));
    programs.extend(allocators::programs(size));
    programs.extend(stress::programs(size));
    programs.extend(trees::programs(size));
    programs
}
