//! `ps`, `show` and `stat`: looking at runs from outside.
//!
//! The program under `pageout run` is this test itself, which plays its own keeper: the test named `role` says what it
//! counted and stays until its standard input ends. With PAGEOUT_TEST_ROLE unset it is empty.

mod common;
#[allow(dead_code)]
#[path = "../src/sys.rs"]
mod sys;

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::process::{exit, Child, Command, Stdio};
use std::sync::atomic::Ordering::Relaxed;
use std::thread;
use std::time::{Duration, Instant};

use common::{finish, is_root, wait, Ended, Place};
use pageout::stats::STATS_BYTES;
use pageout::wire::{Kind, Message, ENV_RUN, VERSION};
use serde_json::Value;

const ROLE: &str = "PAGEOUT_TEST_ROLE";
const MIB: u64 = 1 << 20;

/// A keeper that has counted something. With the role `two` another process has as well, and ends at once; with `shares`
/// it names more than it has.
#[test]
fn role() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let path = PathBuf::from(std::env::var_os(ENV_RUN).expect("run names its socket"));
    let socket = sys::connect_to(&path).unwrap();
    let (_, fds) = ask(&socket, &Message::new(Kind::Hello, u64::from(std::process::id()), 0, VERSION));
    (0..2).for_each(|_| drop(ask(&socket, &Message::new(Kind::Lease, 1, 0, 0))));
    let page = sys::Mapping::of(&File::from(fds.into_iter().next().unwrap()), STATS_BYTES).unwrap();
    let stats = page.stats();
    stats.limit_bytes.store(64 * MIB, Relaxed);
    stats.resident_bytes.store(48 * MIB, Relaxed);
    stats.swapped_pages.store(3 * MIB / 4096, Relaxed);
    let named = if role == "shares" { 300 * MIB } else { 3 * MIB };
    stats.device_pages[1].store(named / 4096, Relaxed);
    stats.pgfault.store(1000, Relaxed);
    stats.pswpin.store(100, Relaxed);
    stats.active.store(1, Relaxed);
    if role == "short" {
        exit(0);
    }
    if role == "two" {
        assert!(myself("short").stdin(Stdio::null()).status().unwrap().success());
    }
    println!("ready");
    std::io::stdout().flush().unwrap();
    let _ = std::io::stdin().read(&mut [0]);
    exit(0);
}

fn myself(role: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["role", "--exact", "--nocapture"]).env(ROLE, role);
    command
}

fn ask(socket: &OwnedFd, question: &Message) -> (Message, Vec<OwnedFd>) {
    sys::send(socket.as_fd(), question.as_bytes(), &[]).unwrap();
    sys::poll(&[(socket.as_fd(), libc::POLLIN)], Some(Duration::from_secs(10))).unwrap();
    let mut answer = Message::new(Kind::Bye, 0, 0, 0);
    let (_, fds) = sys::receive(socket.as_fd(), answer.as_bytes_mut()).expect("an answer in time");
    (answer, fds)
}

/// A place with a runtime directory of its own.
struct Here(Place);

impl Here {
    fn new() -> Self {
        let here = Self(Place::new());
        fs::create_dir(here.runtime()).unwrap();
        common::set_mode(&here.runtime(), 0o700);
        here
    }

    fn runtime(&self) -> PathBuf {
        self.0.path("r")
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = self.0.pageout(args);
        command.env("XDG_RUNTIME_DIR", self.runtime());
        command
    }

    fn look(&self, args: &[&str]) -> Ended {
        finish(&mut self.command(args))
    }

    /// The output, when all went well.
    #[track_caller]
    fn shows(&self, args: &[&str]) -> String {
        let ended = self.look(args);
        assert_eq!((ended.status, ended.err.as_str()), (0, ""), "{args:?}");
        ended.out
    }

    #[track_caller]
    fn refuses(&self, args: &[&str], line: &str) {
        let ended = self.look(args);
        assert_eq!((ended.status, ended.out.as_str()), (125, ""), "{args:?}");
        assert_eq!(ended.err, format!("pageout: {line}\n"));
    }

    /// A run whose program is ready; it ends when its standard input does.
    fn start(&self, role: &str) -> Child {
        let mut command =
            self.command(&["run", "-m64M", "-s", "mem,size=64M,pri=7", "-s", "x,size=192M", "--"]);
        command.arg(std::env::current_exe().unwrap()).args(["role", "--exact", "--nocapture"]);
        let mut run = command.env(ROLE, role).stdin(Stdio::piped()).spawn().unwrap();
        let mut out = String::new();
        while !out.contains("ready\n") {
            let mut byte = [0];
            run.stdout.as_mut().unwrap().read_exact(&mut byte).unwrap();
            out.push(byte[0] as char);
        }
        run
    }
}

#[track_caller]
fn over(mut run: Child) {
    drop(run.stdin.take());
    let ended = wait(run);
    assert_eq!((ended.status, ended.err.as_str()), (0, ""));
}

#[test]
fn nothing_runs() {
    let here = Here::new();
    assert_eq!(here.shows(&["ps"]), "PID NAME RESIDENT SWAPPED LIMIT FAULTS STATE RUN\n");
    assert_eq!(here.shows(&["ps", "--json"]), "[]\n");
    assert_eq!(here.shows(&["show"]), "");
    let heading = "Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n";
    assert_eq!(here.shows(&["show", "--summary"]), heading);
    let sockets = here.runtime().join("pageout");
    // Root's may be in that for any user, too, where there is one.
    let any = "/run/pageout";
    let more =
        if is_root() && std::path::Path::new(any).is_dir() { format!(", {any}") } else { String::new() };
    let line = format!("no tree of yours is running (no socket in {}{more})", sockets.display());
    here.refuses(&["stat"], &line);
    let line = "--run 1: no tree of yours has such a process or program; see pageout ps";
    here.refuses(&["ps", "--run", "1"], line);
    here.refuses(&["stat", "x"], "DELAY x: takes seconds, like 1 or 0.5, from 0.01 on");
    here.refuses(&["stat", "1", "0"], "COUNT 0: takes a number of lines, 1 or more");
    here.refuses(&["show", "--fast"], "unexpected argument '--fast' found; see pageout show --help");
    // What a run that was killed left behind, and what is none.
    fs::create_dir_all(&sockets).unwrap();
    common::set_mode(&sockets, 0o700);
    drop(sys::listen_at(&sockets.join("9.sock")).unwrap());
    fs::write(sockets.join("note"), "").unwrap();
    assert_eq!(here.shows(&["show"]), "");
    common::set_mode(&sockets, 0o755);
    let shown = sockets.display();
    here.refuses(&["ps"], &format!("{shown}: others can enter it (mode 0755); run chmod 700 {shown}"));
}

#[test]
fn all_that_there_is_to_see() {
    let here = Here::new();
    let run = here.start("one");
    let id = run.id();
    let view: Value = serde_json::from_str(&here.shows(&["ps", "--json"])).unwrap();
    let main = view[0]["main"].as_u64().unwrap();
    let (name, program) = (&view[0]["processes"][0]["name"], view[0]["program"].as_str().unwrap());
    assert_eq!(
        (view[0]["run"].as_u64(), view[0]["limit_bytes"].as_u64()),
        (Some(u64::from(id)), Some(64 * MIB))
    );
    assert_eq!(view[0]["processes"][0]["pgfault"], 1000);

    let ps = here.shows(&["ps"]);
    let row = format!("{main} {} 48M 3M 64M 1000 swapping {id}", name.as_str().unwrap());
    let lines: Vec<Vec<&str>> = ps.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(lines.iter().skip(1).map(|cells| cells.join(" ")).collect::<Vec<_>>(), [row]);

    let file = here.0.path("x");
    let path = file.display();
    let show = here.shows(&["show", "--raw"]);
    assert_eq!(show, format!("NAME TYPE SIZE USED PRIO\nmem memory 64M 0 7\n{path} file 192M 3M -3\n"));
    let show = here.shows(&["show", "--raw", "--bytes", "--noheadings"]);
    assert_eq!(show, format!("mem memory 67108864 0 7\n{path} file 201326592 3145728 -3\n"));
    assert!(here.shows(&["show"]).starts_with("NAME"));
    assert!(here.shows(&["show", "--summary"]).contains(" file\t\t196608\t\t3072\t\t-3\n"));
    let json: Value = serde_json::from_str(&here.shows(&["show", "--json"])).unwrap();
    assert_eq!((&json[1]["used_bytes"], &json[1]["type"]), (&Value::from(3 * MIB), &Value::from("file")));

    // By the number of run, of the program, of a shell that is not served, and by name.
    for which in [id.to_string(), main.to_string(), program.to_owned()] {
        assert_eq!(here.shows(&["ps", "--run", &which]), ps, "{which}");
    }
    over(run);
    assert_eq!(here.shows(&["show"]), "");
}

/// After forks several processes name the same slots.
#[test]
fn no_more_is_used_than_is_lent() {
    let here = Here::new();
    let run = here.start("shares");
    assert!(here.shows(&["show", "--raw", "--noheadings"]).contains("/x file 192M 4M -3\n"));
    over(run);
}

#[test]
fn several_trees() {
    let here = Here::new();
    let (first, second) = (here.start("one"), here.0.path("y"));
    // Two runs cannot have the same swap file.
    fs::create_dir(&second).unwrap();
    let mut other =
        here.command(&["run", "-s", "mem,size=64M", "--", "sh", "-c", "echo ready; read line; true"]);
    let mut other = other.current_dir(&second).stdin(Stdio::piped()).spawn().unwrap();
    other.stdout.as_mut().unwrap().read_exact(&mut [0; 6]).unwrap();
    let show = here.shows(&["show", "--raw"]);
    assert!(show.starts_with("NAME TYPE SIZE USED PRIO RUN\n"), "{show}");
    assert_eq!(show.lines().count(), 4);
    assert!(show.contains(&format!("mem memory 64M 0 7 {}\n", first.id())), "{show}");
    let refused = here.look(&["stat"]);
    assert!(refused.err.starts_with("pageout: 2 trees are running: "), "{}", refused.err);
    assert!(refused.err.contains(&format!("{} (sh)", other.id())), "{}", refused.err);
    assert!(refused.err.ends_with("; choose one with --run PID\n"), "{}", refused.err);
    assert_eq!(here.shows(&["stat", "--run", "sh"]).lines().count(), 2);
    assert_eq!(here.shows(&["show", "--run", "sh", "--noheadings"]).lines().count(), 1);
    over(first);
    over(other);
}

#[test]
fn stat_counts_on_while_processes_go_and_ends_with_the_tree() {
    let here = Here::new();
    let run = here.start("two");
    let lines = here.shows(&["stat", "0.05", "3"]);
    let lines: Vec<Vec<&str>> = lines.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(lines[0][..7], ["procs", "resident", "unmanaged", "swapped", "si", "so", "faults"]);
    assert_eq!(lines[1][..4], ["1", "48M", "0", "3M"]);
    assert_ne!(lines[1][4], "0", "what the one that ended read counts");
    assert_eq!(lines[2][4..], ["0"; 7]);
    assert_eq!(lines.len(), 4);
    let json = here.shows(&["stat", "--json"]);
    let json: Value = serde_json::from_str(&json).unwrap();
    let faults = json["faults"].as_f64().unwrap() * json["interval_seconds"].as_f64().unwrap();
    assert_eq!((faults.round(), &json["procs"]), (2000.0, &Value::from(1)));

    let forever = here.command(&["stat", "0.05"]).spawn().unwrap();
    thread::sleep(Duration::from_millis(300));
    let begin = Instant::now();
    over(run);
    assert!(begin.elapsed() < Duration::from_millis(1900), "who looks keeps no run from its end");
    let ended = wait(forever);
    assert_eq!((ended.status, ended.err.as_str()), (0, ""));
    assert!(ended.out.lines().count() >= 3, "{}", ended.out);
}

/// What came off came by small pages, and what had to leave for it was huge: a huge frame lay ready, so nothing left.
#[test]
fn swapoff_of_a_process_that_rests() {
    let here = Here::new();
    let program = "import os\n\
        b = bytearray(os.urandom(1 << 20)) * 300\n\
        os.write(1, b'ready\\n')\n\
        os.read(0, 1)\n\
        assert all(b[i << 20:i + 1 << 20] == b[:1 << 20] for i in range(300))";
    let devices = ["-s", "mem,size=500M,pri=5", "-s", "mem,size=600M,pri=0"];
    let arguments = ["run", "-m", "48M"].into_iter().chain(devices).chain(["python3", "-c", program]);
    let mut command = here.command(&arguments.collect::<Vec<_>>());
    let mut run = command.env_remove("PAGEOUT_AGENT").stdin(Stdio::piped()).spawn().unwrap();
    run.stdout.as_mut().unwrap().read_exact(&mut [0; 6]).unwrap();
    let mut off = here.command(&["swapoff", "mem"]).spawn().unwrap();
    let patience = Instant::now() + Duration::from_secs(60);
    while off.try_wait().unwrap().is_none() {
        assert!(Instant::now() < patience, "{}", here.shows(&["show"]));
        thread::sleep(Duration::from_millis(20));
    }
    let ended = wait(off);
    assert_eq!((ended.status, ended.err.as_str()), (0, ""));
    over(run);
}

/// As a browser's processes have its program: it was in the figure once for each.
#[test]
fn stat_counts_a_file_once() {
    let here = Here::new();
    fs::write(here.0.path("file"), vec![1; 40 * MIB as usize]).unwrap();
    let program = "import mmap, os\n\
        m = mmap.mmap(os.open('file', os.O_RDONLY), 0, prot=mmap.PROT_READ)\n\
        for w in range(2):\n    if os.fork() == 0: break\n\
        sum(m[::4096])\n\
        os.write(1, b'ready\\n')\n\
        os.read(0, 1)";
    let mut command =
        here.command(&["run", "-m", "1G", "-s", "mem,size=64M", "--", "python3", "-c", program]);
    let mut run = command.env_remove("PAGEOUT_AGENT").stdin(Stdio::piped()).spawn().unwrap();
    run.stdout.as_mut().unwrap().read_exact(&mut [0; 3 * 6]).unwrap();
    // What each has is as it was at its last look.
    let patience = Instant::now() + Duration::from_secs(30);
    let each = || {
        let all: Value = serde_json::from_str(&here.shows(&["ps", "--json"])).unwrap();
        let processes = all[0]["processes"].as_array().unwrap().clone();
        processes.iter().map(|process| process["resident_bytes"].as_u64().unwrap()).sum::<u64>()
    };
    while each() < 3 * 40 * MIB {
        assert!(Instant::now() < patience, "{}", each());
        thread::sleep(Duration::from_millis(50));
    }
    let json: Value = serde_json::from_str(&here.shows(&["stat", "--json"])).unwrap();
    let resident = json["resident_bytes"].as_u64().unwrap();
    assert!((40 * MIB..80 * MIB).contains(&resident), "{resident}");
    over(run);
}

#[test]
fn a_process_is_found_by_what_it_calls_itself_now() {
    let here = Here::new();
    let program = "import ctypes, os\n\
        os.write(1, b'ready\\n')\n\
        os.read(0, 1)\n\
        ctypes.CDLL(None).prctl(15, b'renamed')\n\
        os.write(1, b'ready\\n')\n\
        os.read(0, 1)";
    let mut command = here.command(&["run", "-s", "mem,size=64M", "--", "python3", "-c", program]);
    let mut run = command.env_remove("PAGEOUT_AGENT").stdin(Stdio::piped()).spawn().unwrap();
    run.stdout.as_mut().unwrap().read_exact(&mut [0; 6]).unwrap();
    run.stdin.as_mut().unwrap().write_all(b".").unwrap();
    run.stdout.as_mut().unwrap().read_exact(&mut [0; 6]).unwrap();
    let shown = here.shows(&["ps", "--run", "renamed"]);
    assert!(shown.contains(" renamed "), "{shown}");
    over(run);
}

#[test]
fn who_does_not_read_holds_nobody_up() {
    let here = Here::new();
    let run = here.start("one");
    let path = here.runtime().join(format!("pageout/{}.sock", run.id()));
    let deaf = sys::connect_to(&path).unwrap();
    let look = Message::new(Kind::Look, 0, 0, 0);
    let mut asked = 0;
    while asked < 10_000 && sys::send(deaf.as_fd(), look.as_bytes(), &[]).is_ok() {
        asked += 1;
        thread::sleep(Duration::from_micros(100));
    }
    assert!(asked < 10_000, "it is given up");
    assert_eq!(here.shows(&["ps"]).lines().count(), 2);
    over(run);
}

#[test]
fn a_run_that_is_stopped_is_left_out() {
    let here = Here::new();
    let run = here.start("one");
    // SAFETY: a child that is not reaped yet.
    unsafe { libc::kill(run.id() as i32, libc::SIGSTOP) };
    let ended = here.look(&["ps"]);
    let id = run.id();
    let line = format!("run {id}: no answer: it is stopped (continue it: kill -CONT {id}), or serves as many processes as it may have open files for (ulimit -n); left out");
    assert_eq!((ended.status, ended.err), (0, format!("pageout: {line}\n")));
    let line = format!("run {id}: no answer: it is stopped (continue it: kill -CONT {id}), or serves as many processes as it may have open files for (ulimit -n)");
    here.refuses(&["show", "--run", &id.to_string()], &line);
    here.refuses(&["stat"], &line);
    // SAFETY: as above.
    unsafe { libc::kill(run.id() as i32, libc::SIGCONT) };
    assert_eq!(here.shows(&["ps"]).lines().count(), 2);
    over(run);
}

#[test]
fn other_users_see_nothing() {
    if !is_root() {
        println!("skipped: not root");
        return;
    }
    let here = Here::new();
    let run = here.start("one");
    let program = std::env::temp_dir().join(format!("pageout-look-{}", std::process::id()));
    common::copy_program(env!("CARGO_BIN_EXE_pageout"), &program);
    for ancestor in [here.runtime(), here.0.path("")] {
        common::set_mode(&ancestor, 0o755);
    }
    let mut command = Command::new("setpriv");
    command.args(["--reuid=65534", "--regid=65534", "--clear-groups"]).arg(&program).arg("ps");
    here.0.prepare(&mut command);
    let ended = finish(command.current_dir("/").env("XDG_RUNTIME_DIR", here.runtime()));
    fs::remove_file(&program).unwrap();
    let sockets = here.runtime().join("pageout");
    let advice = "belongs to another user; remove it, or set XDG_RUNTIME_DIR to a directory of your own";
    assert_eq!((ended.status, ended.err), (125, format!("pageout: {}: {advice}\n", sockets.display())));
    over(run);
}
