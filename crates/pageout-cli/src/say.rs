//! Lines for the user, on standard error, and what was asked for, on standard output. Any thread; the level is set
//! once, before anything is said.

use std::fmt;
use std::io::Write;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use crate::{program, sys};

/// How much a line matters; the numbers are those of the `Log` message of keepers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// Something failed. Always said.
    Error = 0,
    /// Something is not as asked. Not said with `-q`.
    Warning = 1,
    /// What was done. Said with `-v`.
    Info = 2,
    /// How. Said with `-vv`.
    Debug = 3,
}

static LEVEL: AtomicU32 = AtomicU32::new(Level::Warning as u32);

/// From `-v` and `-q`, counted: the largest level that is said.
pub fn set_level(verbose: u8, quiet: u8) {
    let level = (Level::Warning as i32 + i32::from(verbose) - i32::from(quiet)).clamp(0, Level::Debug as i32);
    LEVEL.store(level as u32, Relaxed);
}

/// Says one line, `pageout: ` in front. A standard error that is closed or full is nobody's concern.
pub fn say(level: u32, line: impl fmt::Display) {
    if level <= LEVEL.load(Relaxed) {
        // One line, whatever stands in names; one write, so that lines of several processes do not mix.
        let line = format!("pageout: {}\n", line.to_string().replace(char::is_control, "?"));
        let _ = std::io::stderr().write_all(line.as_bytes());
    }
}

/// A value of the user's as a line shows it.
pub fn shown(value: &str) -> &str {
    match value {
        "" => "(empty)",
        value => value,
    }
}

/// Says an error.
pub fn error(line: impl fmt::Display) {
    say(Level::Error as u32, line);
}

/// Says a warning.
pub fn warning(line: impl fmt::Display) {
    say(Level::Warning as u32, line);
}

/// Says what was done.
pub fn info(line: impl fmt::Display) {
    say(Level::Info as u32, line);
}

/// Says how it was done.
pub fn debug(line: impl fmt::Display) {
    say(Level::Debug as u32, line);
}

/// Writes what was asked for to standard output.
pub fn print(text: impl fmt::Display) {
    let mut out = std::io::stdout();
    out.write_all(text.to_string().as_bytes()).and_then(|()| out.flush()).unwrap_or_else(|why| unheard(&why));
}

/// Standard output takes nothing: nobody would hear the rest either.
pub fn unheard(why: &std::io::Error) -> ! {
    error(format_args!("standard output: {}", sys::reason(why)));
    std::process::exit(program::FAILED)
}
