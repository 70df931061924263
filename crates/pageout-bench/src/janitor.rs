//! Undoing what a run set up, also when the bench dies.
//!
//! What is to be undone is told to a process of its own, the janitor (`pageout-bench janitor`), over a
//! pipe, before or as soon as it is made. When the pipe closes, because the run is over or because the
//! bench was killed, the janitor undoes all of it, last first, and ends. There is no other way of
//! undoing, so each run tests this one. It touches only what it was told of: swap that the bench did
//! not make is never in the list.
//!
//! One janitor at a time; its end of the pipe lies in `CURRENT`, so that the thread that waits for
//! Ctrl-C can close it while the main thread is anywhere.

use std::fs::{self, File};
use std::io::{BufRead, Read, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::{Mutex, Once};
use std::time::{Duration, Instant};

use anyhow::{bail, ensure, Context, Result};
use serde::{Deserialize, Serialize};

use crate::cgroup;
use crate::sys;
use crate::work::own_path;

/// One thing that was made. Undoing what is no longer there is no error.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Made {
    /// A process group with everything in it.
    Group(i32),
    /// A memory cgroup; what runs in it is killed.
    Cgroup(PathBuf),
    /// Swapping on a device or file.
    Swap(PathBuf),
    /// `/dev/zramN`.
    Zram(u32),
    /// The loop device that is backed by this file, if any is.
    Loop(PathBuf),
    /// A mount.
    Mount(PathBuf),
    /// A file.
    File(PathBuf),
    /// A directory, empty by then.
    Dir(PathBuf),
    /// A setting's old value.
    Setting(PathBuf, String),
    /// The first page of a swap device, which pageout clears.
    Header(PathBuf, Vec<u8>),
}

/// What the bench tells its janitor, a line of JSON each.
#[derive(Serialize, Deserialize)]
enum Word {
    Made(Made),
    /// It is gone already: a process group, whose number may soon be another's.
    Gone(Made),
}

struct Running {
    pipe: Option<ChildStdin>,
    child: Child,
}

static CURRENT: Mutex<Option<Running>> = Mutex::new(None);

/// The time during which things are made for one run; dropping it, or `finish`, undoes them.
pub struct Scope(());

impl Scope {
    /// Starts the janitor. One scope at a time. From the first on, SIGINT, SIGTERM and SIGHUP undo what
    /// was made and then end the process with 130.
    pub fn new() -> Result<Scope> {
        static SIGNALS: Once = Once::new();
        let mut caught = Ok(());
        SIGNALS.call_once(|| caught = end_cleanly_on_signals());
        caught?;
        let mut current = CURRENT.lock().expect("nobody panics under the lock");
        ensure!(current.is_none(), "one run at a time sets things up");
        let mut child = Command::new(own_path()?)
            .arg("janitor")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .process_group(0)
            .spawn()
            .context("starting the janitor")?;
        *current = Some(Running { pipe: child.stdin.take(), child });
        Ok(Scope(()))
    }

    /// Tells of something made, or about to be.
    pub fn made(&self, made: Made) -> Result<()> {
        say(&mut CURRENT.lock().expect("nobody panics under the lock"), &Word::Made(made))
    }

    /// Tells of something and makes it. A signal meanwhile waits: what comes to be after its undoing would stay. What could not be
    /// made is not there to be undone; it may be somebody else's.
    pub fn make<T>(&self, made: Made, make: impl FnOnce() -> Result<T>) -> Result<T> {
        let mut current = CURRENT.lock().expect("nobody panics under the lock");
        say(&mut current, &Word::Made(made.clone()))?;
        let done = make();
        if done.is_err() {
            say(&mut current, &Word::Gone(made))?;
        }
        done
    }

    /// Tells that something is gone by itself.
    pub fn gone(&self, made: Made) -> Result<()> {
        say(&mut CURRENT.lock().expect("nobody panics under the lock"), &Word::Gone(made))
    }

    /// Undoes everything; an error says what could not be undone.
    pub fn finish(self) -> Result<()> {
        // The drop that follows finds nothing left.
        finish()
    }
}

impl Drop for Scope {
    fn drop(&mut self) {
        if let Err(error) = finish() {
            eprintln!("pageout-bench: {error:#}");
        }
    }
}

fn say(current: &mut Option<Running>, word: &Word) -> Result<()> {
    let mut line = serde_json::to_vec(word)?;
    line.push(b'\n');
    let pipe = current.as_mut().and_then(|running| running.pipe.as_mut()).context("the janitor has gone")?;
    pipe.write_all(&line).context("telling the janitor")
}

fn finish() -> Result<()> {
    let mut current = CURRENT.lock().expect("nobody panics under the lock");
    let Some(mut running) = current.take() else { return Ok(()) };
    running.pipe = None;
    let status = running.child.wait().context("waiting for the janitor")?;
    ensure!(status.success(), "not all of what the run made could be undone; see above");
    Ok(())
}

fn end_cleanly_on_signals() -> Result<()> {
    let (mut ours, signal) = UnixStream::pair().context("making a pair of sockets")?;
    sys::on_end_signals(&signal).context("catching signals")?;
    std::thread::spawn(move || {
        // Kept open for the handler, for good.
        let _signal = signal;
        let mut byte = [0];
        if ours.read_exact(&mut byte).is_ok() {
            eprintln!("\npageout-bench: interrupted; putting things back");
            if let Err(error) = finish() {
                eprintln!("pageout-bench: {error:#}");
            }
            std::process::exit(130);
        }
    });
    Ok(())
}

/// The janitor's whole life. Returns an error when something could not be undone.
pub fn run() -> Result<()> {
    // It ends with the bench: who ends both by their name (pkill) would leave all of it.
    sys::ignore_end_signals();
    let mut list: Vec<Made> = Vec::new();
    for line in std::io::stdin().lock().lines() {
        // A line cut short by the death of the bench is of something not yet made.
        let Ok(word) = serde_json::from_str(&line.context("reading from the bench")?) else { break };
        match word {
            Word::Made(made) => list.push(made),
            Word::Gone(gone) => list.retain(|made| *made != gone),
        }
    }
    let mut failed = false;
    for made in list.iter().rev() {
        if let Err(error) = undo(made) {
            eprintln!("pageout-bench: putting back {made:?}: {error:#}");
            failed = true;
        }
    }
    if failed {
        bail!("put the rest back by hand");
    }
    Ok(())
}

fn undo(made: &Made) -> Result<()> {
    match made {
        Made::Group(group) => patiently(|| {
            if !group_lives(*group) {
                return Ok(());
            }
            sys::kill_group(*group)?;
            bail!("it is still dying")
        }),
        Made::Cgroup(dir) => patiently(|| {
            for pid in cgroup::members(dir) {
                let _ = sys::kill(pid);
            }
            absent_is_fine(fs::remove_dir(dir))
        }),
        // Other control groups may have swapped to it, and be at their limit. The kernel is asked, not /proc/swaps:
        // that names what a link leads to, and a blank by its number.
        Made::Swap(path) => patiently(|| {
            off_is_fine(sys::swapoff(path)).with_context(|| format!("swapoff {}", path.display()))
        }),
        Made::Zram(number) => patiently(|| {
            if !Path::new(&format!("/sys/block/zram{number}")).exists() {
                return Ok(());
            }
            fs::write("/sys/class/zram-control/hot_remove", number.to_string()).map_err(Into::into)
        }),
        Made::Loop(file) => patiently(|| match loop_over(file) {
            None => Ok(()),
            Some(device) => {
                sys::loop_detach(&File::open(&device)?)?;
                bail!("{} is still in use", device.display())
            }
        }),
        Made::Mount(at) => patiently(|| off_is_fine(sys::unmount(at))),
        Made::File(path) => absent_is_fine(fs::remove_file(path)),
        Made::Dir(path) => absent_is_fine(fs::remove_dir(path)),
        Made::Setting(path, old) => Ok(fs::write(path, old)?),
        Made::Header(path, page) => {
            Ok(fs::OpenOptions::new().write(true).open(path)?.write_all_at(page, 0)?)
        }
    }
}

/// Whether any process of the group still runs; a zombie does not.
fn group_lives(group: i32) -> bool {
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    processes.into_iter().any(|process| {
        let stat = fs::read_to_string(process.path().join("stat")).unwrap_or_default();
        // After the name in parentheses: state, parent, group.
        let mut fields = stat.rsplit_once(") ").map_or("", |(_, rest)| rest).split(' ');
        let state = fields.next().unwrap_or("Z");
        !matches!(state, "" | "Z" | "X") && fields.nth(1).and_then(|g| g.parse().ok()) == Some(group)
    })
}

fn absent_is_fine(result: std::io::Result<()>) -> Result<()> {
    match result {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        result => Ok(result?),
    }
}

/// As well that the kernel does not swap there, or that nothing is mounted there.
fn off_is_fine(result: std::io::Result<()>) -> Result<()> {
    match result {
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Ok(()),
        result => absent_is_fine(result),
    }
}

/// Tries for up to ten seconds: a device is busy until its last user is gone, a cgroup until its
/// last process is.
fn patiently(mut attempt: impl FnMut() -> Result<()>) -> Result<()> {
    let begun = Instant::now();
    loop {
        match attempt() {
            Err(_) if begun.elapsed() < Duration::from_secs(10) => {
                std::thread::sleep(Duration::from_millis(20))
            }
            result => return result,
        }
    }
}

/// The loop device backed by `file`.
fn loop_over(file: &Path) -> Option<PathBuf> {
    let file = file.canonicalize().ok()?;
    let blocks = fs::read_dir("/sys/block").ok()?;
    blocks.flatten().find_map(|block| {
        let backing = fs::read_to_string(block.path().join("loop/backing_file")).ok()?;
        (Path::new(backing.trim_end()) == file).then(|| Path::new("/dev").join(block.file_name()))
    })
}
