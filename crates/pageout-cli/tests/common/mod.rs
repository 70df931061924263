//! What the tests of the command share: a place to work in and a way to run `pageout` with a time limit.
//!
//! The library preloaded here does nothing (a part of the C library that every program has): these tests are about
//! the command. A test that needs a keeper plays it itself.
#![allow(dead_code, missing_docs)]

use std::env;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// A directory of the test's own (mode 0700), removed at the end.
pub struct Place(PathBuf);

impl Place {
    pub fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{}-{number}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        set_mode(&path, 0o700);
        Self(path)
    }

    pub fn path(&self, name: impl AsRef<Path>) -> PathBuf {
        self.0.join(name)
    }

    /// A file with this content and mode.
    pub fn file(&self, name: &str, content: &[u8], mode: u32) -> PathBuf {
        let path = self.path(name);
        fs::write(&path, content).unwrap();
        set_mode(&path, mode);
        path
    }

    /// A sparse file of this length, mode 0600.
    pub fn sparse(&self, name: &str, len: u64) -> PathBuf {
        let path = self.file(name, b"", 0o600);
        fs::File::options().write(true).open(&path).unwrap().set_len(len).unwrap();
        path
    }

    /// `pageout`, working here, blind to the settings of whoever runs the tests.
    pub fn pageout<S: AsRef<OsStr>>(&self, args: impl IntoIterator<Item = S>) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pageout"));
        command.args(args).current_dir(&self.0);
        self.prepare(&mut command);
        command
    }

    /// The same by a shell, after something that lasts: `ulimit`, `umask`.
    pub fn pageout_after(&self, step: &str, args: &[&str]) -> Command {
        let mut command = self.prepared("sh");
        let script = format!("{step}; exec \"$0\" \"$@\"");
        command.args(["-c", &script, env!("CARGO_BIN_EXE_pageout")]).args(args).current_dir(&self.0);
        command
    }

    /// Another program, in the same place and environment.
    pub fn prepared(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        self.prepare(&mut command);
        command
    }

    /// A shell's script here, which may mount what it likes and finds `pageout` as `$0`; see [`can_unshare`].
    pub fn with_own_mounts(&self, script: &str) -> Ended {
        let mut command = self.prepared("unshare");
        command.args(["-m", "sh", "-c", script, env!("CARGO_BIN_EXE_pageout")]).current_dir(&self.0);
        finish(&mut command)
    }

    pub fn prepare(&self, command: &mut Command) {
        // Whoever runs the tests by `nohup` or in the background of a script ignores these, and so would the program.
        let start = || {
            for signal in [libc::SIGHUP, libc::SIGINT, libc::SIGQUIT] {
                // SAFETY: no handler.
                unsafe { libc::signal(signal, libc::SIG_DFL) };
            }
            Ok(())
        };
        // SAFETY: `signal` may be called between fork and exec.
        unsafe { command.pre_exec(start) };
        let settings = env::vars_os().map(|(name, _)| name);
        settings.filter(|name| name.as_encoded_bytes().starts_with(b"PAGEOUT_")).for_each(|name| {
            command.env_remove(name);
        });
        command
            .env_remove("LD_PRELOAD")
            .env("HOME", &self.0)
            .env_remove("XDG_CONFIG_HOME")
            .env_remove("XDG_CACHE_HOME")
            .env_remove("XDG_RUNTIME_DIR")
            .env("TMPDIR", &self.0)
            .env("PAGEOUT_AGENT", harmless_library())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

pub fn set_mode(path: &Path, mode: u32) {
    use std::os::unix::fs::PermissionsExt;
    fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
}

/// Copies a program. Not by ourselves: what another test's thread forks meanwhile would have the copy open, and nobody could
/// execute it.
pub fn copy_program(from: &str, to: &Path) {
    assert!(Command::new("cp").arg(from).arg(to).status().unwrap().success());
}

/// A library that is mapped into every program anyway.
fn harmless_library() -> String {
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let libc = maps.lines().find(|line| line.ends_with("/libc.so.6")).expect("tests run on glibc");
    // Not that one: it is there in whom nothing is preloaded.
    libc[libc.find('/').unwrap()..].replace("libc.so.6", "libm.so.6")
}

pub fn is_root() -> bool {
    use std::os::unix::fs::MetadataExt;
    fs::metadata("/proc/self").unwrap().uid() == 0
}

/// Whether a command in a mount namespace of its own can be had.
pub fn can_unshare() -> bool {
    Command::new("unshare").args(["-m", "true"]).output().is_ok_and(|output| output.status.success())
}

/// How a run ended.
#[derive(Debug)]
pub struct Ended {
    /// 1000 + N when a signal ended `pageout` itself.
    pub status: i32,
    pub out: String,
    pub err: String,
}

/// Runs to the end, which must come within 20 seconds.
pub fn finish(command: &mut Command) -> Ended {
    wait(command.spawn().unwrap())
}

pub fn wait(mut child: Child) -> Ended {
    use std::os::unix::process::ExitStatusExt;
    let deadline = Instant::now() + Duration::from_secs(20);
    while child.try_wait().unwrap().is_none() {
        if Instant::now() > deadline {
            let _ = child.kill();
            panic!("still running after 20 s");
        }
        thread::sleep(Duration::from_millis(5));
    }
    let Output { status, stdout, stderr } = child.wait_with_output().unwrap();
    Ended {
        status: status.code().unwrap_or_else(|| 1000 + status.signal().unwrap()),
        out: String::from_utf8(stdout).unwrap(),
        err: String::from_utf8(stderr).unwrap(),
    }
}
