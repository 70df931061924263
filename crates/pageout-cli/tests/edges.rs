//! A run as it begins and ends, and who is not of it.

mod common;

use std::fs;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::Stdio;
use std::thread;
use std::time::{Duration, Instant};

use common::{finish, wait, Place};

/// What came before the program was there was dropped, and the program ran to its end; or it left a named swap file.
#[test]
fn a_signal_of_the_first_milliseconds_ends_the_run() {
    let place = Place::new();
    let swap = place.path("swap");
    let spec = format!("{},size=64M", swap.display());
    for millis in 0..40 {
        let mut command = place.pageout(["run", "-s", &spec, "sleep", "60"]);
        let mut run = command.process_group(0).stderr(Stdio::null()).spawn().unwrap();
        thread::sleep(Duration::from_micros(500 * millis));
        let (me, signal) =
            (i32::try_from(run.id()).unwrap(), [libc::SIGINT, libc::SIGTERM][millis as usize % 2]);
        // SAFETY: a child that is not reaped yet, and its group.
        unsafe { libc::kill(if millis % 4 < 2 { -me } else { me }, signal) };
        assert_eq!(run.wait().unwrap().signal(), Some(signal), "after {millis} half milliseconds");
        assert!(!fs::exists(&swap).unwrap(), "after {millis} half milliseconds");
    }
}

/// With `--strict` run killed what its shell's earlier jobs had begun, once they had ended and left it to run.
#[test]
fn what_earlier_jobs_leave_is_not_the_runs() {
    let place = Place::new();
    let script = "(sleep 61 >/dev/null 2>&1 & echo $! > job; sleep 0.5) & until test -s job; do sleep 0.01; done; exec \"$0\" run --strict sleep 3";
    let mut command = place.prepared("sh");
    command.args(["-c", script, env!("CARGO_BIN_EXE_pageout")]).current_dir(place.path(""));
    let ended = finish(&mut command);
    assert_eq!((ended.status, ended.err.as_str()), (0, ""));
    let job: i32 = fs::read_to_string(place.path("job")).unwrap().trim().parse().unwrap();
    // SAFETY: takes numbers; it sleeps still.
    assert_eq!(unsafe { libc::kill(job, libc::SIGKILL) }, 0);
}

/// Who tidies `/tmp`, or ends the last session, removes the directory of the socket: nobody found the run any more.
#[test]
fn a_socket_that_was_removed_is_there_again() {
    let place = Place::new();
    let script =
        "rm -r \"$(dirname \"$PAGEOUT_RUN\")\"; until test -S \"$PAGEOUT_RUN\"; do sleep 0.05; done; \
                  exec \"$0\" show --noheadings --run $PPID";
    let runtime = place.path("runtime");
    fs::create_dir(&runtime).unwrap();
    let mut command =
        place.pageout(["run", "timeout", "20", "sh", "-c", script, env!("CARGO_BIN_EXE_pageout")]);
    let ended = finish(command.env("XDG_RUNTIME_DIR", &runtime));
    let line = "pageout: somebody had removed the run's socket, which is there again; what was executed meanwhile has no limit\n";
    assert_eq!((ended.status, ended.err.as_str()), (0, line));
    assert_eq!(ended.out.lines().count(), 1, "{}", ended.out);
    assert_eq!(fs::read_dir(runtime.join("pageout")).unwrap().count(), 0, "the socket goes with the run");
}

/// The table of the statistics waited for whoever began run and reads once that has ended.
#[test]
fn who_reads_no_table_holds_nobody_up() {
    let place = Place::new();
    for waits in [true, false] {
        let (reader, mut writer) = UnixStream::pair().unwrap();
        writer.set_nonblocking(true).unwrap();
        while writer.write(&[0; 4096]).is_ok() {}
        writer.set_nonblocking(!waits).unwrap();
        let mut command = place.pageout(["run", "--stats", "-", "sh", "-c", "exit 7"]);
        let begun = Instant::now();
        let child = command.stderr(OwnedFd::from(writer)).spawn().unwrap();
        drop(command);
        assert_eq!(wait(child).status, 7);
        assert!(begun.elapsed() < Duration::from_secs(20));
        drop(reader);
    }
}
