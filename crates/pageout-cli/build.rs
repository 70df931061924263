//! Builds the agent (`libpageout_agent.so`) by a cargo of its own, so that the command can embed it.
//!
//! A build of its own, because the agent is `no_std` with its own panic handler: built in one go with crates that
//! enable `std` in shared dependencies it would not link. Its target directory lies in `OUT_DIR`, so the two
//! cargos never wait for each other's lock.

use std::collections::hash_map::DefaultHasher;
use std::env;
use std::fs;
use std::hash::{Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// What the agent is made of, relative to this crate.
const SOURCES: [&str; 3] = ["../pageout-agent", "../pageout", "../pageout-uffd"];

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=../../Cargo.toml");
    for crate_dir in SOURCES {
        for part in ["src", "Cargo.toml", "build.rs"] {
            let path = Path::new(crate_dir).join(part);
            if path.exists() {
                println!("cargo::rerun-if-changed={}", path.display());
            }
        }
    }

    let agent = build();
    let bytes = fs::read(&agent).unwrap_or_else(|error| panic!("{}: {error}", agent.display()));
    // A name, not a seal: whoever unpacks it compares the bytes.
    let mut hasher = DefaultHasher::new();
    bytes.hash(&mut hasher);
    println!("cargo::rustc-env=PAGEOUT_AGENT_FILE={}", agent.display());
    println!("cargo::rustc-env=PAGEOUT_AGENT_HASH={:016x}", hasher.finish());
}

/// Builds the agent and returns where it lies.
fn build() -> PathBuf {
    let target_dir = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR")).join("agent");
    let target = env::var("TARGET").expect("cargo sets TARGET");
    // Everything that the agent needs is there already, since this crate needs it too; so ask the network only
    // when that turns out wrong. This is also how `cargo --offline`, which no variable tells, is honoured.
    let mut output = cargo(&target_dir, &target, true);
    if !output.status.success() && String::from_utf8_lossy(&output.stderr).contains("--offline") {
        output = cargo(&target_dir, &target, false);
    }
    if !output.status.success() {
        eprintln!("{}", String::from_utf8_lossy(&output.stderr));
        panic!("pageout-agent does not build");
    }
    target_dir.join(target).join("agent/libpageout_agent.so")
}

fn cargo(target_dir: &Path, target: &str, offline: bool) -> Output {
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command
        .args(["build", "--profile", "agent", "--lib", "--manifest-path", "../pageout-agent/Cargo.toml"])
        // With a target named, no flags of the outer build leak into build scripts and the layout is known.
        .args(["--target", target])
        .arg("--target-dir")
        .arg(target_dir);
    if offline {
        command.arg("--offline");
    }
    // Flags for the outer build (`--cfg loom`, sanitizers, coverage, clippy as the compiler) would break a cdylib
    // without std.
    for variable in [
        "RUSTFLAGS",
        "CARGO_ENCODED_RUSTFLAGS",
        "CARGO_BUILD_RUSTFLAGS",
        "RUSTC_WORKSPACE_WRAPPER",
        "CARGO_BUILD_TARGET",
        "CARGO_TARGET_DIR",
    ] {
        command.env_remove(variable);
    }
    command.output().unwrap_or_else(|error| panic!("cargo: {error}"))
}
