//! `stress-ng`, which checks the memory that it wrote by itself.

use super::{Invocation, Limit, Program, Size, MIB};

pub(super) fn programs(size: Size) -> Vec<Program> {
    let bytes = size.pick("256m", "1g");
    let seconds = size.pick(3, 60);
    // The bytes are shared by the two workers, and so is the limit.
    let limit = size.pick(64, 256) * MIB;
    let stress = Program::new("stress-ng", move |_| {
        Invocation::new("stress-ng")
            .args("--vm 2 --vm-method all --verify --vm-bytes")
            .arg(bytes)
            .args("--no-rand-seed --timeout")
            .arg(format!("{seconds}s"))
    });
    vec![stress.needs(&["stress-ng"]).normalise(findings).limit(Limit::Fixed(limit)).parallel().together()]
}

/// The lines that report an error; everything else is process numbers, times and what was chosen.
fn findings(output: Vec<u8>) -> Vec<u8> {
    let text = String::from_utf8_lossy(&output);
    let bad = |line: &&str| {
        ["fail:", "error:", "bit error", "unsuccessful", "corrupt"].iter().any(|word| line.contains(word))
    };
    text.lines().filter(bad).map(|line| format!("{line}\n")).collect::<String>().into_bytes()
}
