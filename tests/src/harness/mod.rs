//! Starts programs under test and watches over them.
//!
//! A program that hangs must not hang the tests, and must show where it hangs: [`Watched::finish`] has a
//! time limit, looks for threads that wait for a page for longer than any page may take, and writes down
//! the state of every thread of the tree before it kills it. Of processes nothing is read here that
//! would touch their memory: a stuck process would catch its reader.

mod sampler;
mod tree;

pub use sampler::{Peak, Sampler};

use std::io::{Read, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tree::Tree;

/// How long a thread may wait for a page before that is a failure.
pub const FAULT_LIMIT: Duration = Duration::from_secs(10);
/// How long the processes of a tree may take to go when its first one has ended.
const AFTERMATH: Duration = Duration::from_secs(5);
const POLL: Duration = Duration::from_millis(10);
const SCAN: Duration = Duration::from_millis(200);

/// The program `pageout` that is to be tested: `PAGEOUT_BIN`, else the one beside `neighbour`, a program
/// that cargo built in the same directory.
pub fn pageout(neighbour: &str) -> Result<PathBuf, String> {
    let path = match std::env::var_os("PAGEOUT_BIN") {
        Some(path) => PathBuf::from(path),
        None => Path::new(neighbour).with_file_name("pageout"),
    };
    if path.is_file() {
        return Ok(path);
    }
    Err(format!(
        "{}: not there; build it with `cargo build -p pageout-cli` or set PAGEOUT_BIN",
        path.display()
    ))
}

/// What a program left.
#[derive(Debug)]
pub struct Done {
    /// Its exit status.
    pub status: ExitStatus,
    /// All of its standard output.
    pub stdout: String,
    /// All of its standard error.
    pub stderr: String,
    /// How long it ran.
    pub wall: Duration,
}

impl Done {
    /// The exit status as a shell would say it: 128 and the signal for a program that died of one.
    pub fn code(&self) -> i32 {
        self.status.code().unwrap_or_else(|| 128 + self.status.signal().unwrap_or(0))
    }
}

/// A running program whose output is being read.
pub struct Watched {
    child: Child,
    tree: Tree,
    started: Instant,
    stdout: Pipe,
    stderr: Pipe,
    feeder: Option<JoinHandle<()>>,
    fault_limit: Duration,
}

impl Watched {
    /// Starts the command with `input` on its standard input.
    pub fn start(mut command: Command, input: Vec<u8>) -> Result<Self, String> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child =
            command.spawn().map_err(|e| format!("{}: {e}", command.get_program().to_string_lossy()))?;
        let taken = (child.stdin.take(), child.stdout.take(), child.stderr.take());
        let (Some(mut stdin), Some(stdout), Some(stderr)) = taken else {
            return Err("a standard stream is missing".into());
        };
        let feeder = std::thread::spawn(move || {
            // A program that ends without reading all of it is right, too.
            let _ = stdin.write_all(&input);
        });
        Ok(Watched {
            tree: Tree::new(child.id()),
            child,
            started: Instant::now(),
            stdout: Pipe::read(stdout),
            stderr: Pipe::read(stderr),
            feeder: Some(feeder),
            fault_limit: FAULT_LIMIT,
        })
    }

    /// Lets no thread wait for a page for longer than this, instead of [`FAULT_LIMIT`].
    pub fn fault_limit(self, fault_limit: Duration) -> Self {
        Watched { fault_limit, ..self }
    }

    /// The process that was started.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Waits until a line of the output begins with `prefix` and returns the rest of it.
    pub fn line(&mut self, prefix: &str, limit: Duration) -> Result<String, String> {
        self.stdout.line(prefix, limit).ok_or_else(|| {
            let why = format!("no line \"{prefix}\" came in {limit:.0?}");
            self.give_up(&why)
        })
    }

    /// Waits for the end: of the first process, and of all who hold its output. Fails when that takes
    /// longer than `limit`, when a thread waits for a page for longer than [`FAULT_LIMIT`], and when
    /// processes stay behind; then the message has all states, and nothing is left running.
    pub fn finish(mut self, limit: Duration) -> Result<Done, String> {
        let mut status = None;
        let mut next_scan = Instant::now();
        loop {
            if status.is_none() {
                status = self.child.try_wait().map_err(|e| e.to_string())?;
            }
            if status.is_some() && self.stdout.ended() && self.stderr.ended() {
                break;
            }
            if Instant::now() >= next_scan {
                self.tree.scan();
                if let Some(stuck) = self.tree.stuck(self.fault_limit) {
                    return Err(self.give_up(&stuck));
                }
                next_scan = Instant::now() + SCAN;
            }
            if self.started.elapsed() > limit {
                let what = match status {
                    None => "the program did not end".into(),
                    Some(status) => {
                        format!("somebody holds the output of the program, which ended ({status})")
                    }
                };
                return Err(self.give_up(&format!("{what} in {limit:.0?}")));
            }
            std::thread::sleep(POLL);
        }
        let wall = self.started.elapsed();
        self.wait_for_aftermath()?;
        if let Some(feeder) = self.feeder.take() {
            let _ = feeder.join();
        }
        let status = status.ok_or("no status")?;
        Ok(Done { status, stdout: self.stdout.text(), stderr: self.stderr.text(), wall })
    }

    fn wait_for_aftermath(&mut self) -> Result<(), String> {
        let begin = Instant::now();
        while self.tree.is_alive() {
            if begin.elapsed() > AFTERMATH {
                return Err(self.give_up("processes stayed behind when the program had ended"));
            }
            std::thread::sleep(POLL);
        }
        Ok(())
    }

    /// Writes down all states, kills the tree, and makes one message of it.
    fn give_up(&mut self, why: &str) -> String {
        self.tree.scan();
        let states = self.tree.states();
        self.tree.kill();
        let _ = self.child.kill();
        let _ = self.child.wait();
        let (stdout, stderr) = (self.stdout.text(), self.stderr.text());
        format!("{why}\n--- standard output:\n{stdout}\n--- standard error:\n{stderr}\n--- states:\n{states}")
    }
}

/// One output of a program, read by a thread as it comes.
struct Pipe(Arc<(Mutex<Received>, Condvar)>);

#[derive(Default)]
struct Received {
    bytes: Vec<u8>,
    ended: bool,
}

impl Pipe {
    fn read(mut from: impl Read + Send + 'static) -> Self {
        let shared = Arc::new((Mutex::new(Received::default()), Condvar::new()));
        let mine = shared.clone();
        std::thread::spawn(move || {
            let mut buffer = [0; 65536];
            loop {
                let n = from.read(&mut buffer).unwrap_or(0);
                let mut received = lock(&mine.0);
                received.bytes.extend_from_slice(&buffer[..n]);
                received.ended = n == 0;
                mine.1.notify_all();
                if n == 0 {
                    return;
                }
            }
        });
        Pipe(shared)
    }

    fn ended(&self) -> bool {
        lock(&self.0 .0).ended
    }

    fn text(&self) -> String {
        String::from_utf8_lossy(&lock(&self.0 .0).bytes).into_owned()
    }

    fn line(&self, prefix: &str, limit: Duration) -> Option<String> {
        let until = Instant::now() + limit;
        let mut received = lock(&self.0 .0);
        loop {
            let text = String::from_utf8_lossy(&received.bytes);
            let whole = text.rfind('\n').map_or("", |end| &text[..end]);
            if let Some(rest) = whole.lines().find_map(|line| line.strip_prefix(prefix)) {
                return Some(rest.to_owned());
            }
            let left = until.checked_duration_since(Instant::now())?;
            if received.ended {
                return None;
            }
            received = match self.0 .1.wait_timeout(received, left) {
                Ok((guard, _)) => guard,
                Err(poisoned) => poisoned.into_inner().0,
            };
        }
    }
}

/// What is behind these locks is whole at any time, also after a panic.
fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// The number that belongs to `name` in the statistics of `pageout run --stats`: the largest, where the
/// total and the processes' own are told.
pub fn counter(json: &str, name: &str) -> Option<u64> {
    let number = |after: &str| -> Option<u64> {
        let value = after.trim_start().strip_prefix(':')?.trim_start();
        value[..value.find(|c: char| !c.is_ascii_digit()).unwrap_or(value.len())].parse().ok()
    };
    json.split(&format!("\"{name}\"")).skip(1).filter_map(number).max()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_found_by_their_whole_name() {
        let json = r#"{"pswpout_zero": 3, "processes":[{"pswpout": 5}], "pswpout": 17,"x":{"fault": 2}}"#;
        assert_eq!(counter(json, "pswpout"), Some(17));
        assert_eq!(counter(json, "fault"), Some(2));
        assert_eq!(counter(json, "swpout"), None);
    }

    #[test]
    fn a_program_that_does_not_end_is_described_and_killed() {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", "echo here; sleep 1000 & echo $!; wait"]);
        let watched = Watched::start(command, Vec::new()).unwrap();
        let why = watched.finish(Duration::from_millis(600)).unwrap_err();
        assert!(why.contains("did not end") && why.contains("here") && why.contains("sleep"), "{why}");
        let sleeps = why.lines().find_map(|line| line.trim().parse::<i32>().ok()).expect("its number");
        // Its new parent may not have waited for it yet.
        let state = || std::fs::read_to_string(format!("/proc/{sleeps}/stat")).unwrap_or_default();
        let has_ended = || state().is_empty() || state().contains(") Z ");
        let since = std::time::Instant::now();
        while !has_ended() {
            assert!(since.elapsed() < Duration::from_secs(20), "{}", state());
        }
    }

    #[test]
    fn output_held_by_a_child_is_waited_for() {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", "(sleep 0.3; echo late) & exit 5"]);
        let done = Watched::start(command, Vec::new()).unwrap().finish(Duration::from_secs(5)).unwrap();
        assert_eq!((done.code(), done.stdout.as_str()), (5, "late\n"));
    }
}
