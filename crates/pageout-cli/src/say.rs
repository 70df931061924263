//! Lines for the user, on standard error, and what was asked for, on standard output. Any thread; the level is set
//! once, before anything is said.
//!
//! Who serves a tree waits for nobody who reads: standard error may be a pipe that a program of the tree has filled, and whose
//! reader comes when that ends; or a terminal that was stopped; or a program of the tree is writing there, has what is locked
//! for that, and waits for its own memory, so for us. From [`wait_for_nobody`] on a thread of its own writes.

use std::collections::VecDeque;
use std::fmt;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use pageout::api::reason;

use crate::{program, sys};

/// How much a line matters; the numbers are those of the `Log` message of keepers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Level {
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
/// Lines that were not taken yet, so many at most: what comes then is lost. With a call when one comes or has been taken.
static KEPT: Mutex<VecDeque<String>> = Mutex::new(VecDeque::new());
static CHANGED: Condvar = Condvar::new();
const MOST_KEPT: usize = 4096;
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
        let mut line = format!("pageout: {}", line.to_string().replace(char::is_control, "?"));
        while line.len() >= AT_ONCE {
            line.pop();
        }
        line.push('\n');
        put(line);
    }
}

/// Says what was asked for on standard error: as it is, by lines.
pub fn table(text: &str) {
    text.split_inclusive('\n').for_each(|line| put(line.to_owned()));
}

fn put(line: String) {
    if WAITS.load(Relaxed) {
        return write(&line);
    }
    let mut kept = kept();
    if kept.len() < MOST_KEPT {
        kept.push_back(line);
    }
    CHANGED.notify_all();
}

/// Writes a line, however long it takes: the program may have made standard error one that does not wait.
fn write(line: &str) {
    while io::stderr()
        .write_all(line.as_bytes())
        .is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock)
    {
        let _ = sys::poll(&[(io::stderr().as_fd(), libc::POLLOUT)], None);
    }
}

fn kept() -> MutexGuard<'static, VecDeque<String>> {
    KEPT.lock().unwrap_or_else(PoisonError::into_inner)
}

/// From here on nothing that is said waits, unless there is no room for a thread that does.
pub fn wait_for_nobody() {
    let thread = thread::Builder::new().name("lines".into()).stack_size(64 << 10);
    // What is sent to us is for who asks for it.
    let started = sys::without_signals(|| thread.spawn(write_all));
    WAITS.store(started.is_err(), Relaxed);
}

/// Writes what is kept, for ever. Not under the lock.
fn write_all() {
    let mut kept = kept();
    loop {
        kept = match kept.front().cloned() {
            None => CHANGED.wait(kept).unwrap_or_else(PoisonError::into_inner),
            Some(line) => {
                drop(kept);
                write(&line);
                let mut kept = self::kept();
                kept.pop_front();
                CHANGED.notify_all();
                kept
            }
        };
    }
}

/// Before the end: lines that were kept wait for somebody to read them, a second at most.
pub fn last_lines() {
    let left = |kept: &mut VecDeque<String>| !kept.is_empty() && !WAITS.load(Relaxed);
    drop(CHANGED.wait_timeout_while(kept(), Duration::from_secs(1), left));
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
    error(format_args!("standard output: {}", reason(why)));
    std::process::exit(program::FAILED)
}
