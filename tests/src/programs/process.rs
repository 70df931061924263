//! The processes of one run: started in a group of their own, waited for, shown, killed.
//!
//! The test process makes itself the reaper of orphans, so that everything a run started is found
//! below it, also what called `setsid` or lost its parent. Nothing here reads what needs another
//! process's memory (`cmdline`, `environ`) or its map lock (`maps`, `smaps`): with a stuck process
//! the reader would be stuck too.

use super::Invocation;
use anyhow::{Context, Result};
use std::ffi::OsString;
use std::fmt::Write as _;
use std::fs::{self, File};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

pub(super) type Pid = libc::pid_t;

/// What of a process's `status` is shown when it hangs.
const SHOWN_FIELDS: [&str; 11] =
    ["Name", "State", "PPid", "VmPeak", "VmSize", "VmHWM", "VmRSS", "Rss", "VmLck", "Threads", "Sig"];

/// How a process ended.
pub(super) struct Ended {
    pub(super) status: ExitStatus,
    /// Processor time, user and system, of it and of the children that it waited for.
    pub(super) cpu: Duration,
    /// The largest resident memory of it or one of those children, in bytes.
    pub(super) max_rss: u64,
}

/// Orphans of the runs become children of this process.
pub(super) fn adopt_orphans() {
    // SAFETY: a prctl without pointers.
    unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) };
}

/// Starts `wrapper` followed by the command in `dir`, standard output and error in files there.
pub(super) fn spawn(invocation: &Invocation, wrapper: &[OsString], dir: &Path) -> Result<Pid> {
    let mut words = wrapper.iter().chain(&invocation.argv);
    let program = words.next().context("an empty command")?;
    let mut command = Command::new(program);
    command.args(words).current_dir(dir).process_group(0);
    // Settings of cargo, of the tests and of the user are not the program's.
    command.env_clear().env("PATH", std::env::var_os("PATH").unwrap_or_default());
    command.env("LC_ALL", "C").env("HOME", dir).env("TMPDIR", dir);
    command.envs(invocation.env.iter().map(|(name, value)| (name, value)));
    command.stdin(match &invocation.stdin {
        Some(path) => File::open(path).with_context(|| path.display().to_string())?.into(),
        None => Stdio::null(),
    });
    // SAFETY: a prctl without pointers, which is fit for the time between fork and exec.
    unsafe {
        // The group is the run's own, so an interrupt at the terminal does not reach it.
        command.pre_exec(|| match libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        });
    }
    command.stdout(File::create(dir.join("stdout"))?).stderr(File::create(dir.join("stderr"))?);
    let child = command.spawn().with_context(|| format!("start {}", program.to_string_lossy()))?;
    Ok(child.id() as Pid)
}

/// Waits for a process that [`spawn`] started.
pub(super) fn wait(pid: Pid) -> Result<Ended> {
    let mut status = 0;
    // SAFETY: all zeros is a valid rusage.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: both pointers are to live, writable values of the right types.
    while unsafe { libc::wait4(pid, &mut status, 0, &mut usage) } != pid {
        let error = std::io::Error::last_os_error();
        if error.kind() != std::io::ErrorKind::Interrupted {
            return Err(error).context("wait4");
        }
    }
    let duration = |time: libc::timeval| Duration::new(time.tv_sec as u64, time.tv_usec as u32 * 1000);
    Ok(Ended {
        status: ExitStatus::from_raw(status),
        cpu: duration(usage.ru_utime) + duration(usage.ru_stime),
        max_rss: usage.ru_maxrss as u64 * 1024,
    })
}

/// Every living descendant of this process.
pub(super) fn descendants() -> Vec<Pid> {
    let mut found = children(std::process::id() as Pid);
    let mut next = 0;
    while next < found.len() {
        found.extend(children(found[next]));
        next += 1;
    }
    found
}

fn children(pid: Pid) -> Vec<Pid> {
    let mut found = Vec::new();
    for task in tasks(pid) {
        let list = fs::read_to_string(task.join("children")).unwrap_or_default();
        found.extend(list.split_whitespace().filter_map(|word| word.parse::<Pid>().ok()));
    }
    found
}

fn tasks(pid: Pid) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(format!("/proc/{pid}/task")) else { return Vec::new() };
    entries.flatten().map(|entry| entry.path()).collect()
}

/// Kills every descendant; who called [`spawn`] still waits for its own.
pub(super) fn kill_all() {
    for pid in descendants() {
        // SAFETY: a descendant's number is ours to signal; it cannot be reused before it is reaped,
        // and its reaper is this process or dies with it.
        unsafe { libc::kill(pid, libc::SIGKILL) };
    }
}

/// Reaps what a run left behind, and ends what has not ended by itself after a second; at most for 10 s. Says how
/// many those were: a keeper ends a moment after its program.
pub(super) fn sweep() -> usize {
    let begun = Instant::now();
    let mut left = 0;
    loop {
        // SAFETY: a null status pointer is allowed.
        while unsafe { libc::waitpid(-1, std::ptr::null_mut(), libc::WNOHANG) } > 0 {}
        let alive = descendants().len();
        let after = begun.elapsed();
        if alive == 0 || after > Duration::from_secs(10) {
            return left;
        }
        if after > Duration::from_secs(1) {
            left = left.max(alive);
            kill_all();
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// What every thread of every descendant is doing.
pub(super) fn dump() -> String {
    let mut out = String::new();
    for pid in descendants() {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        let _ = writeln!(out, "== process {pid}");
        for line in status.lines().filter(|line| SHOWN_FIELDS.iter().any(|field| line.starts_with(field))) {
            let _ = writeln!(out, "{}", line.replace('\t', " "));
        }
        for task in tasks(pid) {
            dump_thread(&mut out, &task);
        }
    }
    out
}

fn dump_thread(out: &mut String, task: &Path) {
    let read = |name: &str| fs::read_to_string(task.join(name)).unwrap_or_default();
    let status = read("status");
    let field =
        |name: &str| status.lines().find(|line| line.starts_with(name)).unwrap_or_default().to_owned();
    let _ = writeln!(
        out,
        "-- thread {} {} {} wchan {} syscall {}",
        task.file_name().unwrap_or_default().to_string_lossy(),
        field("Name:").replace('\t', " "),
        field("State:").replace('\t', " "),
        read("wchan"),
        read("syscall").trim(),
    );
    out.push_str(&read("stack"));
    // Engine threads have a descriptor table of their own; a context says how many faults wait.
    let Ok(entries) = fs::read_dir(task.join("fd")) else { return };
    for entry in entries.flatten() {
        if fs::read_link(entry.path()).is_ok_and(|target| target.to_string_lossy().contains("userfaultfd")) {
            let info = read(&format!("fdinfo/{}", entry.file_name().to_string_lossy()));
            let _ = writeln!(out, "   userfaultfd {}", info.replace('\n', " "));
        }
    }
}
