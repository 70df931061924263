//! Has the agent ask for `libc.so.6` by name: a program that is linked dynamically but without libc (a Go program
//! built as PIE) would not bring it, and the loader would end it for the functions that the agent lacks.
//!
//! Only by name, through a library of nothing: linked with the real one the agent would ask for the versions of the
//! libc that it was built with, and programs that bring an older one (2.34 at least) would not start.

use std::env;
use std::path::PathBuf;
use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let name = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR")).join("libc-name.so");
    let linker = env::var_os("RUSTC_LINKER").unwrap_or_else(|| "cc".into());
    let status = Command::new(&linker)
        .args(["-shared", "-nostdlib", "-Wl,-soname,libc.so.6", "-x", "c", "/dev/null", "-o"])
        .arg(&name)
        .status()
        .unwrap_or_else(|error| panic!("{linker:?}: {error}"));
    assert!(status.success(), "{linker:?} makes no shared library");
    // What one wrapper calls of another is our own, not what the program defines of the same name: that would come back by
    // libc's `syscall`, for ever.
    println!("cargo::rustc-link-arg-cdylib=-Wl,-Bsymbolic-functions");
    // Nothing refers to it, so it would be left out.
    for argument in ["-Wl,--no-as-needed", &name.display().to_string(), "-Wl,--as-needed"] {
        println!("cargo::rustc-link-arg-cdylib={argument}");
    }
}
