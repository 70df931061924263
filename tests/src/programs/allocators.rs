//! Programs under allocators other than the C library's, preloaded before the agent; and of ours in C, which do what has hung.

use super::runtimes::{perl, python};
use super::text::sort;
use super::{Invocation, Program, Size, MIB};
use anyhow::{ensure, Result};
use std::path::Path;
use std::process::Command;

const LIBRARY_DIRS: [&str; 3] = ["/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib"];

pub(super) fn programs(size: Size) -> Vec<Program> {
    let mib = size.pick(32, 1024);
    vec![
        under(python("jemalloc-python", mib), "libjemalloc.so.2"),
        under(sort("jemalloc-sort", size.pick(12, 512) * MIB), "libjemalloc.so.2"),
        under(perl("mimalloc-perl", size.pick(64, 1024)), "libmimalloc.so.2"),
        under(python("mimalloc-python", mib), "libmimalloc.so.2"),
        // Exports `memcpy` and its like.
        own("own-memory", "own_memory.c", &["-O1", "-fno-builtin", "-rdynamic"]),
        own("patched", "patched.c", &["-O1"]),
        own("code-moves", "code_moves.c", &["-O1", "-pthread"]),
    ]
}

/// A program of ours in C, built with these flags.
fn own(name: &'static str, source: &'static str, flags: &'static [&'static str]) -> Program {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("programs").join(source);
    let build = move |dir: &Path| -> Result<()> {
        let mut compile = Command::new("cc");
        let built = compile.args(flags).arg("-o").arg(dir.join("own")).arg(&source);
        ensure!(built.status()?.success(), "cc refuses {}", source.display());
        Ok(())
    };
    Program::new(name, |input| Invocation::new(input.join("own"))).needs(&["cc"]).input(build)
}

/// The program with `library` preloaded, and Python's own allocator out of its way.
fn under(program: Program, library: &'static str) -> Program {
    let found = LIBRARY_DIRS.iter().map(|dir| Path::new(dir).join(library)).find(|path| path.exists());
    let path: &'static str = match found {
        Some(path) => path.to_string_lossy().into_owned().leak(),
        // Names what is missing: the test is skipped for it.
        None => format!("{}/{library}", LIBRARY_DIRS[0]).leak(),
    };
    let Program { command, .. } = program;
    let command = move |input: &Path| command(input).env("LD_PRELOAD", path).env("PYTHONMALLOC", "malloc");
    Program { command: Box::new(command), ..program }.needs(&[path])
}
