//! Language runtimes with collectors and heaps of their own: Python, NumPy, Perl, Node, Java.

use super::{script, Invocation, Program, Size};

/// The distribution's Python: others may lack NumPy.
pub(super) const PYTHON: &str = "/usr/bin/python3";

pub(super) fn programs(size: Size) -> Vec<Program> {
    let python_mib = size.pick(44, 1760);
    let numpy_mib = size.pick(80, 768);
    // Every access of its is to another page, and takes a fault in a quarter of the memory.
    let perl_mib = size.pick(64, 1024);
    let node_mib = size.pick(80, 1024);
    let java_mib = size.pick(64, 1024);
    vec![
        python("python", python_mib),
        Program::new("numpy", move |_| {
            Invocation::new(PYTHON).arg(script("numpy_sort.py")).arg(numpy_mib.to_string())
        })
        .needs(&[PYTHON, "/usr/lib/python3/dist-packages/numpy"])
        .outputs(&["sorted.bin"])
        .on_file(),
        perl("perl", perl_mib),
        Program::new("node", move |_| {
            Invocation::new("node")
                .arg("--max-old-space-size=4096")
                .arg(script("heap.js"))
                .arg(node_mib.to_string())
        })
        .needs(&["node"])
        .parallel(),
        java("java-g1", "-XX:+UseG1GC", java_mib),
        java("java-serial", "-XX:+UseSerialGC", java_mib),
    ]
}

/// Dictionaries, lists and strings of about `mib`.
pub(super) fn python(name: &'static str, mib: u64) -> Program {
    Program::new(name, move |_| {
        Invocation::new(PYTHON).arg(script("dicts.py")).arg(mib.to_string()).env("PYTHONHASHSEED", "0")
    })
    .needs(&[PYTHON])
}

/// Hashes of strings of about `mib`.
pub(super) fn perl(name: &'static str, mib: u64) -> Program {
    Program::new(name, move |_| {
        Invocation::new("perl").arg(script("hashes.pl")).arg(mib.to_string()).env("PERL_HASH_SEED", "0")
    })
    .needs(&["perl"])
}

/// An object graph of about `mib` in a heap that reserves 8 GiB. The source is compiled in the same
/// process, so `javac` must be there.
fn java(name: &'static str, collector: &'static str, mib: u64) -> Program {
    Program::new(name, move |_| {
        Invocation::new("java").args("-Xmx8g").arg(collector).arg(script("Heap.java")).arg(mib.to_string())
    })
    .needs(&["java", "javac"])
    .parallel()
}
