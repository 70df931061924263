//! Lines for the user, on standard error, and what was asked for, on standard output. Any thread; the level is set
//! once, before anything is said.
//!
//! Who serves a tree waits for nobody who reads: standard error may be a pipe that a program of the tree has filled, and whose
//! reader comes when that ends; or a terminal that was stopped. From [`wait_for_nobody`] on lines are kept until it takes some.

use std::collections::VecDeque;
use std::fmt;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

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
static WAITS: AtomicBool = AtomicBool::new(true);
/// Lines that were not taken yet, so many at most: what comes then is lost.
static KEPT: Mutex<VecDeque<String>> = Mutex::new(VecDeque::new());
const MOST_KEPT: usize = 256;
/// A pipe that takes anything takes so many bytes without a wait.
const AT_ONCE: usize = libc::PIPE_BUF;

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
        if WAITS.load(Relaxed) {
            let _ = io::stderr().write_all(line.as_bytes());
            return;
        }
        let mut kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.len() < MOST_KEPT {
            kept.push_back(line);
        }
        drop(kept);
        catch_up(Duration::ZERO);
    }
}

/// From here on nothing that is said waits.
pub fn wait_for_nobody() {
    WAITS.store(false, Relaxed);
}

/// Says what was kept; waits until it is taken, or `patience` is over. False: some is left.
pub fn catch_up(patience: Duration) -> bool {
    let until = Instant::now() + patience;
    let mut kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
    while let Some(line) = kept.front() {
        let stderr = io::stderr();
        let left = until.saturating_duration_since(Instant::now());
        // Who has gone is told by the write.
        let ready =
            sys::poll(&[(stderr.as_fd(), libc::POLLOUT)], Some(left)).is_ok_and(|ready| ready[0] != 0);
        match (ready, left.is_zero()) {
            (true, _) => {}
            (false, true) => return false,
            (false, false) => continue,
        }
        let line = line.as_bytes();
        let _ = stderr.lock().write_all(&line[..line.len().min(AT_ONCE)]);
        kept.pop_front();
    }
    true
}

/// Before the end: lines that were kept wait for somebody to read them, a second at most.
pub fn last_lines() {
    catch_up(Duration::from_secs(1));
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
    let mut out = io::stdout();
    out.write_all(text.to_string().as_bytes()).and_then(|()| out.flush()).unwrap_or_else(|why| unheard(&why));
}

/// Standard output takes nothing: nobody would hear the rest either.
pub fn unheard(why: &io::Error) -> ! {
    error(format_args!("standard output: {}", sys::reason(why)));
    std::process::exit(program::FAILED)
}
