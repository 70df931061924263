//! The program under `pageout run` is as it is without: status, streams, signals, environment.

mod common;

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::{symlink, MetadataExt};
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, sleep};
use std::time::{Duration, Instant};

use common::{can_unshare, finish, is_root, wait, Place};

#[track_caller]
fn status_of(place: &Place, script: &str) -> i32 {
    let ended = finish(&mut place.pageout(["run", "sh", "-c", script]));
    assert_eq!(ended.err, "");
    ended.status
}

#[test]
fn exit_statuses_are_the_programs() {
    let place = Place::new();
    assert_eq!(status_of(&place, "exit 0"), 0);
    assert_eq!(status_of(&place, "exit 42"), 42);
    assert_eq!(status_of(&place, "exit 130"), 130);
}

/// A shell leaves its loop, and a service has not failed, where a signal has ended a program, not for a status.
#[test]
fn run_ends_by_the_signal_that_ended_the_program() {
    let place = Place::new();
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGKILL, libc::SIGSEGV, libc::SIGUSR1] {
        let script = format!("kill -{signal} $$");
        let status = place.pageout(["run", "sh", "-c", &script]).status().unwrap();
        assert_eq!((status.signal(), status.core_dumped()), (Some(signal), false));
    }
}

/// A program is told of the death of whom run was to be told of, or of run's.
#[test]
fn the_signal_of_a_parents_death_passes_through() {
    let place = Place::new();
    let script =
        "import ctypes; n = ctypes.c_int(); ctypes.CDLL(None).prctl(2, ctypes.byref(n)); print(n.value)";
    let mut command = place.pageout(["run", "python3", "-c", script]);
    // SAFETY: takes integers only.
    unsafe {
        command.pre_exec(|| match libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGUSR1) {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        });
    }
    assert_eq!(finish(&mut command).out, format!("{}\n", libc::SIGUSR1));
}

/// As it was, but for what run adds.
#[test]
fn the_environment_keeps_its_order() {
    let place = Place::new();
    let mut command = place.prepared("sh");
    let step = "exec env -i ZEBRA=1 MIDDLE=2 ALPHA=3 PATH=\"$PATH\" PAGEOUT_AGENT=\"$PAGEOUT_AGENT\" HOME=\"$HOME\" \"$0\" run env";
    let ended = finish(command.args(["-c", step, env!("CARGO_BIN_EXE_pageout")]));
    let names: Vec<_> = ended.out.lines().filter_map(|line| line.split('=').next()).collect();
    assert_eq!(names[..3], ["ZEBRA", "MIDDLE", "ALPHA"], "{}", ended.out);
}

#[test]
fn arguments_streams_and_directory_pass_through() {
    let place = Place::new();
    let script = "pwd; echo \"$0 $@\"; cat; echo oops >&2";
    let mut child =
        place.pageout(["run", "sh", "-c", script, "name", "-m", "--"]).stdin(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(b"input\n").unwrap();
    let ended = wait(child);
    let here = place.path(".").canonicalize().unwrap();
    assert_eq!(ended.out, format!("{}\nname -m --\ninput\n", here.display()));
    assert_eq!((ended.err.as_str(), ended.status), ("oops\n", 0));
}

/// One in 240 was left without: what another run had bound and did not listen to yet looked left behind.
#[test]
fn runs_that_start_at_once_leave_each_other_their_sockets() {
    let place = Place::new();
    let script = "test -S $PAGEOUT_RUN";
    thread::scope(|scope| {
        for _ in 0..16 {
            scope.spawn(|| (0..15).for_each(|_| assert_eq!(status_of(&place, script), 0)));
        }
    });
}

#[test]
fn preload_is_appended_to_and_the_socket_is_private() {
    let place = Place::new();
    let first = place
        .pageout(["x"])
        .get_envs()
        .find(|(name, _)| *name == "PAGEOUT_AGENT")
        .unwrap()
        .1
        .unwrap()
        .to_owned();
    // Another name for the same library, so that both can be told apart.
    let other = first.to_str().unwrap().replace("/libm.so.6", "/./libm.so.6");
    let script = "echo $LD_PRELOAD; echo $PAGEOUT_RUN; stat -c %a $(dirname $PAGEOUT_RUN)";
    let ended = finish(place.pageout(["run", "sh", "-c", script]).env("LD_PRELOAD", &other));
    let lines: Vec<&str> = ended.out.lines().collect();
    assert_eq!(lines[0], format!("{other}:{}", first.to_str().unwrap()));
    assert!(lines[1].contains("pageout-"), "{}", lines[1]);
    assert_eq!(lines[2], "700");
    assert!(!fs::exists(lines[1]).unwrap(), "the socket goes with the run");
}

/// With the socket shut to its owner the program ran without a limit, with the directories all later runs failed.
#[test]
fn what_run_makes_is_open_to_its_owner_whatever_the_umask() {
    let place = Place::new();
    let script = "umask; stat -c %a $PAGEOUT_RUN $(dirname $PAGEOUT_RUN)";
    let mut command = place.pageout_after("umask 0777", &["run", "sh", "-c", script]);
    command.env("XDG_RUNTIME_DIR", place.path("."));
    let ended = finish(&mut command);
    assert_eq!((ended.status, ended.err.as_str(), ended.out.as_str()), (0, "", "0777\n700\n700\n"));
}

#[test]
fn signals_from_processes_are_forwarded() {
    let place = Place::new();
    for signal in [
        libc::SIGTERM,
        libc::SIGINT,
        libc::SIGHUP,
        libc::SIGUSR1,
        libc::SIGXCPU,
        libc::SIGVTALRM,
        libc::SIGPROF,
        libc::SIGIO,
        libc::SIGPWR,
        libc::SIGSTKFLT,
        libc::SIGXFSZ,
        libc::SIGSYS,
        libc::SIGRTMIN(),
    ] {
        let child = ready(&mut traps(&place, signal));
        // SAFETY: a child that is not reaped yet.
        unsafe { libc::kill(child.id() as i32, signal) };
        assert_trapped(child, signal);
    }
}

/// A program that waits for a signal, under `pageout run`.
fn traps(place: &Place, signal: i32) -> Command {
    let script =
        format!("trap 'echo got {signal}; exit 3' {signal}; echo ready; while :; do sleep 0.02; done");
    place.pageout(["run", "sh", "-c", &script])
}

#[track_caller]
fn assert_trapped(child: Child, signal: i32) {
    let ended = wait(child);
    assert_eq!((ended.out.as_str(), ended.status), (format!("got {signal}\n").as_str(), 3));
}

/// Starts a program that says when it is ready.
fn ready(command: &mut Command) -> Child {
    let mut child = command.spawn().unwrap();
    child.stdout.as_mut().unwrap().read_exact(&mut [0; 6]).unwrap();
    child
}

/// A clock that was set before `pageout` was executed is the program's, which can stop it.
#[test]
fn clocks_are_the_programs() {
    let place = Place::new();
    let script = "import signal, time\n\
                  print([signal.getitimer(clock)[0] > 100 for clock in range(3)], signal.alarm(0) > 100)";
    let mut command = place.pageout(["run", "python3", "-c", script]);
    let set = || {
        let second = |tv_sec| libc::timeval { tv_sec, tv_usec: 0 };
        for clock in [libc::ITIMER_REAL, libc::ITIMER_VIRTUAL, libc::ITIMER_PROF] {
            let far = libc::itimerval { it_interval: second(0), it_value: second(1000) };
            // SAFETY: a clock of its own.
            unsafe { libc::setitimer(clock, &far, std::ptr::null_mut()) };
        }
        Ok(())
    };
    // SAFETY: what is called between fork and exec are system calls.
    unsafe { command.pre_exec(set) };
    assert_eq!(finish(&mut command).out, "[True, True, True] True\n");
}

#[test]
fn an_alarm_comes() {
    let place = Place::new();
    let mut command = traps(&place, libc::SIGALRM);
    let set = || {
        // SAFETY: takes integers only.
        unsafe { libc::alarm(1) };
        Ok(())
    };
    // SAFETY: what is called between fork and exec is one system call.
    unsafe { command.pre_exec(set) };
    assert_trapped(ready(&mut command), libc::SIGALRM);
}

/// The first of a session is told alone that the terminal goes away.
#[test]
fn a_terminal_that_goes_away_is_told_of() {
    let place = Place::new();
    let mut command = traps(&place, libc::SIGHUP);
    let ends = with_terminal(&mut command);
    let child = ready(&mut command);
    drop(ends);
    assert_trapped(child, libc::SIGHUP);
}

/// A terminal that is the command's, which is the first of a session: the end of who types, and its own.
fn with_terminal(command: &mut Command) -> (OwnedFd, OwnedFd) {
    let (mut terminal, mut side) = (0, 0);
    let none = std::ptr::null_mut();
    // SAFETY: room for two descriptors, which are new and ours; the others may be null.
    let (terminal, side) = unsafe {
        assert_eq!(libc::openpty(&mut terminal, &mut side, none, none.cast(), none.cast()), 0);
        libc::fcntl(terminal, libc::F_SETFD, libc::FD_CLOEXEC);
        (OwnedFd::from_raw_fd(terminal), OwnedFd::from_raw_fd(side))
    };
    let number = side.as_raw_fd();
    // SAFETY: between fork and exec, takes integers only.
    unsafe {
        command.pre_exec(move || {
            libc::setsid();
            libc::ioctl(number, libc::TIOCSCTTY, 0);
            Ok(())
        })
    };
    (terminal, side)
}

#[test]
fn a_file_beyond_the_limit_of_file_sizes_is_refused() {
    let place = Place::new();
    let ended = finish(&mut place.pageout_after("ulimit -f 1000", &["run", "-s", "new,size=64M", "true"]));
    let line = "pageout: new: cannot grow to 64M: file too large; give a smaller one with ,size=\n";
    assert_eq!((ended.status, ended.err.as_str()), (125, line));
    assert!(!place.path("new").exists());
}

#[test]
fn signals_start_as_they_were() {
    let place = Place::new();
    // Blocked, ignored, caught.
    let script = "grep -E '^Sig(Blk|Ign|Cgt)' /proc/self/status";
    let expected = finish(place.prepared("sh").args(["-c", script]));
    let ended = finish(&mut place.pageout(["run", "sh", "-c", script]));
    assert_eq!(ended.out, expected.out);
    let ignored = |run: &str| {
        let script = format!("trap '' PIPE XFSZ CHLD HUP; exec {run} {script}");
        finish(place.prepared("sh").args(["-c", &script])).out
    };
    assert_eq!(ignored(&format!("{} run", env!("CARGO_BIN_EXE_pageout"))), ignored(""));
    let limit = finish(&mut place.pageout(["run", "sh", "-c", "ulimit -Sn"]));
    assert_eq!(limit.out, finish(place.prepared("sh").args(["-c", "ulimit -Sn"])).out);
}

#[test]
fn the_program_has_only_its_own_descriptors() {
    let place = Place::new();
    let script = "ls /proc/$$/fd";
    let expected = finish(place.prepared("sh").args(["-c", script]));
    let ended = finish(&mut place.pageout(["run", "sh", "-c", script]));
    assert_eq!(ended.out, expected.out);
}

#[test]
fn streams_that_are_closed_stay_closed() {
    let place = Place::new();
    let closed = |step: &str| {
        let script = "for fd in 0 1 2; do test -e /proc/$$/fd/$fd && echo $fd; done >open; true";
        finish(&mut place.pageout_after(step, &["run", "sh", "-c", script]));
        fs::read_to_string(place.path("open")).unwrap()
    };
    assert_eq!(closed("true"), "0\n1\n2\n");
    // The shell's own redirection is 1.
    assert_eq!(closed("exec <&- >&- 2>&-"), "1\n");
    assert_eq!(closed("exec 2>&-"), "0\n1\n");
    let ended = finish(&mut place.pageout_after("exec >&-", &["run", "echo", "lost"]));
    assert_eq!((ended.status, ended.err.lines().count()), (1, 1), "{}", ended.err);
}

#[test]
fn output_ends_with_the_program() {
    let place = Place::new();
    let script = "echo done; exec >&- 2>&-; sleep 4";
    let mut child = place.pageout(["run", "sh", "-c", script]).stderr(Stdio::null()).spawn().unwrap();
    let mut out = String::new();
    child.stdout.as_mut().unwrap().read_to_string(&mut out).unwrap();
    assert_eq!(out, "done\n");
    assert!(child.try_wait().unwrap().is_none());
    assert_eq!(wait(child).status, 0);
}

#[test]
fn files_without_a_name_leave_nothing_and_named_ones_go() {
    let place = Place::new();
    let ended = finish(&mut place.pageout(["run", "ls", "-A"]));
    assert_eq!(ended.out, "");
    let ended = finish(&mut place.pageout(["run", "-s", "swap,size=128M", "stat", "-c", "%a %s", "swap"]));
    assert_eq!(ended.out, format!("600 {}\n", 128 << 20));
    assert!(!place.path("swap").exists());
    // But not what somebody else gave that name meanwhile; what had it is emptied.
    let script = "mv swap old; echo mine > swap";
    let ended = finish(&mut place.pageout(["run", "-s", "swap,size=128M", "sh", "-c", script]));
    let swap = place.path("swap");
    let line = format!("pageout: {}: its file is not there any more: emptied; remove it\n", swap.display());
    assert_eq!((ended.status, ended.err), (0, line));
    assert_eq!(fs::read(swap).unwrap(), b"mine\n");
    assert_eq!(fs::metadata(place.path("old")).unwrap().len(), 0);
}

/// What mkswap writes: version, last page, number of bad pages.
fn swap_header(version: u32, last_page: u32, bad_pages: u32) -> Vec<u8> {
    let mut header = vec![0; 4096];
    for (at, number) in [(1024, version), (1028, last_page), (1032, bad_pages), (1536, 5)] {
        header[at..at + 4].copy_from_slice(&number.to_ne_bytes());
    }
    header[4086..].copy_from_slice(b"SWAPSPACE2");
    header
}

#[test]
fn headers_that_are_wrong_are_refused_with_their_reasons() {
    let place = Place::new();
    let path = place.sparse("swap", 64 << 20);
    let pages = (64 << 20) / 4096;
    let mut old = swap_header(1, pages - 1, 0);
    old[4086..].copy_from_slice(b"SWAP-SPACE");
    for (header, reason) in [
        (swap_header(2, pages - 1, 0), "swap header of version 2, not 1; run mkswap on it"),
        (
            swap_header(1, 2 * pages - 1, 0),
            "swap header for 128M, but the device has 64M; enlarge it or run mkswap on it",
        ),
        (swap_header(1, 0, 0), "swap header of a device without pages; run mkswap on it"),
        (swap_header(1, pages - 1, 1000), "its header lists 1000 bad pages; name a device without"),
        (swap_header(1, pages - 1, 1), "its header lists 1 bad pages; name a device without"),
        (old, "swap header of the old format; run mkswap on it"),
    ] {
        let file = fs::File::options().write(true).open(&path).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, &header, 0).unwrap();
        let ended = finish(&mut place.pageout(["run", "-s", "swap", "true"]));
        assert_eq!((ended.status, ended.err), (125, format!("pageout: swap: {reason}\n")));
    }
}

#[test]
fn files_of_the_user_are_left_as_they_were() {
    let place = Place::new();
    let path = place.sparse("swap", 64 << 20);
    let header = swap_header(1, (64 << 20) / 4096 - 1, 0);
    let file = fs::File::options().write(true).open(&path).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, &header, 0).unwrap();
    let script =
        "tr '\\0' x < /dev/zero | dd of=swap bs=4096 count=3 seek=1 iflag=fullblock conv=notrunc 2>/dev/null";
    let run = || {
        let ended = finish(&mut place.pageout(["run", "-s", "swap", "sh", "-c", script]));
        assert_eq!((ended.status, ended.err.as_str()), (0, ""));
        fs::read(&path).unwrap()
    };
    let after = run();
    assert_eq!(after.len(), 64 << 20);
    assert!(after[..4096] == header && after[4096..].iter().all(|byte| *byte == 0));

    // What lies behind the swap is not swap's.
    std::os::unix::fs::FileExt::write_all_at(&file, &[1; 4096], 64 << 20).unwrap();
    let after = run();
    assert!(after[..4096] == header && after[4096..64 << 20].iter().all(|byte| *byte == 0));
    assert!(after[64 << 20..].iter().all(|byte| *byte == 1));
    let ended = finish(&mut place.pageout(["run", "-s", "swap,size=128M", "true"]));
    let line = "pageout: swap: size=128M is more than it has, 64M; leave size= out\n";
    assert_eq!((ended.status, ended.err.as_str()), (125, line));
    assert_eq!(fs::metadata(&path).unwrap().len(), (64 << 20) + 4096);

    // Nor is anything, where nothing begins for another reason.
    std::os::unix::fs::FileExt::write_all_at(&file, &[7; 4096], 4096).unwrap();
    let before = fs::read(&path).unwrap();
    let ended = finish(&mut place.pageout(["run", "-s", "swap", "-s", "no/such/directory", "true"]));
    assert_eq!((ended.status, fs::read(&path).unwrap() == before), (125, true), "{}", ended.err);

    let path = place.file("empty", b"", 0o600);
    let ended = finish(&mut place.pageout(["run", "-s", "empty,size=64M", "stat", "-c", "%s", "empty"]));
    assert_eq!(ended.out, format!("{}\n", 64 << 20));
    assert_eq!(fs::metadata(path).unwrap().len(), 0);
}

/// A sparse file may be longer than its file system: zeros in its holes would fill that for everybody, and the next run
/// would take them for data.
#[test]
fn a_files_holes_are_holes_afterwards() {
    let place = Place::new();
    let (whole, with_header) = (place.sparse("whole", 64 << 20), place.sparse("with-header", 64 << 20));
    let file = fs::File::options().write(true).open(&with_header).unwrap();
    let header = swap_header(1, (64 << 20) / 4096 - 1, 0);
    std::os::unix::fs::FileExt::write_all_at(&file, &header, 0).unwrap();
    for path in [&whole, &whole, &with_header] {
        let script = r#"dd if=/bin/sh of="$0" seek=9 conv=notrunc status=none"#;
        let swap = path.to_str().unwrap();
        let ended = finish(&mut place.pageout(["run", "-s", swap, "sh", "-c", script, swap]));
        assert_eq!((ended.status, ended.err.as_str()), (0, ""));
        let about = fs::metadata(path).unwrap();
        assert_eq!(about.len(), 64 << 20);
        assert!(about.blocks() * 512 <= 64 << 10, "{swap} takes up {} bytes", about.blocks() * 512);
    }
}

/// What fallocate(1) made is read as zeros before it is judged, here and by whoever looked at it earlier.
#[test]
fn room_that_nobody_wrote_to_is_no_data() {
    let place = Place::new();
    let path = place.file("swap", b"", 0o600);
    let swap = path.to_str().unwrap();
    if !finish(place.prepared("fallocate").args(["-l", "64M", swap])).err.is_empty() {
        return;
    }
    assert!(fs::read(&path).unwrap().iter().all(|byte| *byte == 0));
    for _ in 0..2 {
        let script = r#"dd if=/bin/sh of="$0" seek=9 conv=notrunc status=none"#;
        let ended = finish(&mut place.pageout(["run", "-s", swap, "sh", "-c", script, swap]));
        assert_eq!((ended.status, ended.err.as_str()), (0, ""));
        assert!(fs::metadata(&path).unwrap().blocks() * 512 >= 64 << 20, "it keeps its room");
    }
}

/// It stayed as long as it was to be: the next run took it for one with holes, and gave its room away.
#[test]
fn a_file_keeps_its_room_where_a_run_that_would_make_it_longer_does_not_begin() {
    let place = Place::new();
    let path = place.file("swap", b"", 0o600);
    if !finish(place.prepared("fallocate").args(["-l", "64M", path.to_str().unwrap()])).err.is_empty() {
        return;
    }
    let longer = ["run", "-s", "swap,size=128M"];
    let script = "dd if=/bin/sh of=swap seek=9 conv=notrunc status=none";
    for (words, status) in [
        ([&longer[..], &["-s", "no/such/directory", "true"]].concat(), 125),
        ([&longer[..], &["sh", "-c", script]].concat(), 0),
        (vec!["run", "-s", "swap", "sh", "-c", script], 0),
    ] {
        let ended = finish(&mut place.pageout(&words));
        let about = fs::metadata(&path).unwrap();
        assert_eq!((ended.status, about.len()), (status, 64 << 20), "{words:?}: {}", ended.err);
        assert!(about.blocks() * 512 >= 64 << 20, "{words:?}: it has {} bytes", about.blocks() * 512);
    }
}

/// What it has of its room need not be free. On tmpfs it loses that at the end.
#[test]
fn a_file_that_has_its_room_grows_by_the_rest() {
    if !can_unshare() {
        return;
    }
    let place = Place::new();
    fs::create_dir(place.path("tmp")).unwrap();
    let script = "mount -t tmpfs -o size=100M,mode=700 none tmp && fallocate -l 64M tmp/swap && chmod 600 tmp/swap
         for size in 128M 96M; do \"$0\" run -s tmp/swap,size=$size stat -c %s tmp/swap 2>&1 | grep -v ' on tmpfs'; done";
    let ended = place.with_own_mounts(script);
    let full = "pageout: tmp/swap: size=128M, but its file system has only 36M free; free some, or give less";
    assert_eq!((ended.err.as_str(), ended.out), ("", format!("{full}\n{}\n", 96 << 20)));
}

/// tmpfs cannot make zeros where there is something, only holes.
#[test]
fn files_on_tmpfs_are_emptied_too() {
    if !can_unshare() {
        return;
    }
    let place = Place::new();
    fs::create_dir(place.path("tmp")).unwrap();
    let script = "mount -t tmpfs -o mode=700 none tmp && truncate -s 64M tmp/swap && chmod 600 tmp/swap &&
         \"$0\" run -s tmp/swap dd if=/bin/sh of=tmp/swap seek=9 conv=notrunc status=none &&
         stat -c %s tmp/swap && tr -d '\\0' < tmp/swap | wc -c";
    let ended = place.with_own_mounts(script);
    assert_eq!((ended.err.as_str(), ended.out), ("", format!("{}\n0\n", 64 << 20)));
}

#[test]
fn statistics() {
    let place = Place::new();
    let ended = finish(&mut place.pageout(["run", "-m", "512M", "--stats", "out.json", "true"]));
    assert_eq!((ended.status, ended.err.as_str()), (0, ""));
    let json: serde_json::Value = serde_json::from_slice(&fs::read(place.path("out.json")).unwrap()).unwrap();
    assert_eq!(json["limit_bytes"], 512 << 20);
    assert_eq!((&json["pswpout"], &json["out_pages"]), (&0.into(), &0.into()));
    assert_eq!(json["swpout"].as_array().unwrap().len(), 10);
    assert_eq!(fs::read_dir(place.path(".")).unwrap().count(), 1, "nothing beside it");
    let table = finish(&mut place.pageout(["run", "-m", "512M", "--stats", "-", "true"]));
    assert!(table.err.contains("          512M  limit_bytes\n"), "{}", table.err);
    let stream = finish(&mut place.pageout(["run", "--stats", "/dev/stdout", "true"]));
    assert!(serde_json::from_str::<serde_json::Value>(&stream.out).is_ok(), "{}", stream.out);
    // Behind what the program has written, and what was there.
    let said = |script: &str| {
        let mut sh = place.prepared("sh");
        finish(sh.args(["-c", script, env!("CARGO_BIN_EXE_pageout")]).current_dir(place.path(""))).out
    };
    for to in ["/dev/stdout", "/dev/fd/1"] {
        let all = said(&format!("echo before > log; \"$0\" run --stats {to} echo amid >> log; cat log"));
        let json = all.strip_prefix("before\namid\n").unwrap_or_else(|| panic!("{all}"));
        assert!(serde_json::from_str::<serde_json::Value>(json).is_ok(), "{to}: {json}");
        let all = said(&format!("\"$0\" run --stats {to} echo amid > log; cat log"));
        assert!(all.starts_with("amid\n{"), "{to}: {all}");
    }
    // What the program ended with is not lost with them.
    let full = finish(&mut place.pageout(["run", "--stats", "/dev/full", "sh", "-c", "exit 3"]));
    let line = "pageout: --stats /dev/full: no space left on device; name a file that can be written\n";
    assert_eq!((full.status, full.err.as_str()), (3, line));
}

/// Who reads a pipe would see its end, and without a reader it would wait for one.
#[test]
fn who_only_looks_opens_no_pipe() {
    let place = Place::new();
    assert!(Command::new("mkfifo").arg(place.path("pipe")).status().unwrap().success());
    let planned = finish(&mut place.pageout(["run", "-n", "--stats", "pipe", "true"]));
    assert_eq!((planned.status, planned.err.as_str()), (0, ""));
    finish(&mut place.pageout(["doctor", "--stats", "pipe"]));
}

/// As a shell writes to it: by its name, which stays what it was.
#[test]
fn statistics_are_written_over_what_is_there() {
    let place = Place::new();
    let is_json = |name: &str| {
        let text = fs::read(place.path(name)).unwrap();
        assert!(serde_json::from_slice::<serde_json::Value>(&text).is_ok(), "{name}");
    };
    let written = |name: &str| {
        let ended = finish(&mut place.pageout(["run", "--stats", name, "true"]));
        assert_eq!((ended.status, ended.err.as_str()), (0, ""), "{name}");
        is_json(name);
    };
    // Longer than what comes.
    place.file("old", &[b'x'; 1 << 16], 0o640);
    fs::hard_link(place.path("old"), place.path("other")).unwrap();
    symlink("old", place.path("link")).unwrap();
    written("link");
    assert!(fs::symlink_metadata(place.path("link")).unwrap().is_symlink());
    is_json("other");
    assert_eq!(fs::metadata(place.path("old")).unwrap().mode() & 0o7777, 0o640);
    symlink("new", place.path("dangling")).unwrap();
    written("dangling");
    is_json("new");
    // Another's trap beside it.
    let beside = "echo kept > victim; ln -s victim out.$$";
    let ended = finish(&mut place.pageout_after(beside, &["run", "--stats", "out", "true"]));
    assert_eq!((ended.status, ended.err.as_str()), (0, ""));
    assert_eq!(fs::read(place.path("victim")).unwrap(), b"kept\n");
    is_json("out");
    if !is_root() || !can_unshare() {
        return;
    }
    // Root may write in every directory but those of a file system that is read-only.
    fs::create_dir(place.path("shut")).unwrap();
    let script = "mount -t tmpfs none shut && touch shut/file file && mount --bind file shut/file && \
                  mount -o remount,ro,bind shut && \"$0\" run --stats shut/file true && cat file && \
                  exec \"$0\" run --stats shut/new true";
    let ended = place.with_own_mounts(script);
    let line = "pageout: --stats shut/new: read-only file system; name a file that can be written\n";
    assert_eq!((ended.status, ended.err.as_str()), (125, line));
    assert!(serde_json::from_str::<serde_json::Value>(&ended.out).is_ok(), "{}", ended.out);
}

#[test]
fn dry_runs_do_nothing() {
    let place = Place::new();
    let ended = finish(&mut place.pageout([
        "run",
        "-n",
        "-m",
        "1.5G",
        "-s",
        "new,size=100M",
        "-s",
        "mem,size=64M",
        "true",
    ]));
    let lines: Vec<&str> = ended.out.lines().collect();
    assert!(lines[0].starts_with("program  ") && lines[0].ends_with("/true"), "{}", lines[0]);
    assert_eq!(lines[1..4], ["memory   1.5G", "swap     new, up to 100M", "swap     mem, up to 64M"]);
    assert!(lines[4].starts_with("agent    /"));
    assert_eq!(fs::read_dir(place.path(".")).unwrap().count(), 0);
}

#[test]
fn a_limit_that_no_memory_reaches_is_warned_of() {
    let place = Place::new();
    let run = |limit: &str| finish(&mut place.pageout(["run", "-m", limit, "-s", "mem,size=64M", "true"]));
    let ended = run("900T");
    let (start, end) = (
        "pageout: the limit of 900T is more than the ",
        " before anything is swapped; give less with --memory\n",
    );
    assert!(ended.err.starts_with(start) && ended.err.ends_with(end), "{}", ended.err);
    assert_eq!((ended.status, ended.err.lines().count()), (0, 1));
    let ended = run("max");
    assert_eq!((ended.status, ended.err.as_str()), (0, ""));
}

#[test]
fn settings_come_from_everywhere() {
    let place = Place::new();
    fs::create_dir_all(place.path(".config")).unwrap();
    fs::write(place.path(".config/pageout.conf"), "memory = 100M\nswap = mem,size=64M\n").unwrap();
    let memory = |args: &[&str], variable: &str| {
        let mut command = place.pageout([&["run", "-n"], args, &["true"]].concat());
        let ended = finish(command.env("PAGEOUT_MEMORY", variable));
        ended.out.lines().nth(1).unwrap().to_owned()
    };
    assert_eq!(memory(&[], ""), "memory   100M");
    assert_eq!(memory(&[], "200M"), "memory   200M");
    assert_eq!(memory(&["-m", "300M"], "200M"), "memory   300M");
}

#[test]
fn stops_and_goes_on_with_its_group() {
    let place = Place::new();
    let script = "echo ready; sleep 0.3; echo on";
    let child = ready(place.pageout(["run", "sh", "-c", script]).process_group(0));
    let state = |pid: u32| {
        fs::read_to_string(format!("/proc/{pid}/stat")).unwrap().rsplit_once(") ").unwrap().1[..1].to_owned()
    };
    let group = -(child.id() as i32);
    // SAFETY: the group of a child that is not reaped yet.
    unsafe { libc::kill(group, libc::SIGTSTP) };
    thread::sleep(Duration::from_millis(100));
    assert_eq!(state(child.id()), "T", "the shell must see it stop");
    // SAFETY: as above.
    unsafe { libc::kill(group, libc::SIGCONT) };
    let ended = wait(child);
    assert_eq!((ended.out.as_str(), ended.status), ("on\n", 0));
}

/// As what begins in a container does (gosu, su-exec): root makes ready and becomes somebody else.
#[test]
fn who_becomes_another_user_is_limited_if_any_may_be() {
    if !common::is_root() {
        eprintln!("skipped: not root");
        return;
    }
    let place = Place::new();
    let open = std::env::temp_dir().join(format!("pageout-any-{}", std::process::id()));
    fs::create_dir(&open).unwrap();
    common::set_mode(&open, 0o755);
    let work = "BEGIN { for (i = 0; i < 900000; i++) a[i] = i \" of many\"; for (i = 0; i < 900000; i++) n += a[i] == i \" of many\"; \
                print n; system(\"id -u\"); while ((getline line < \"/proc/self/status\") > 0) if (line ~ /VmHWM/) print line }";
    let user = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "awk", work];
    let few = "--bounding-set=-all,+setuid,+setgid,+setpcap,+kill,+dac_override,+chown";
    for (around, settings) in
        [(&[][..], ""), (&["setpriv", few], ""), (&[], "strict = yes\nany-user = yes\n")]
    {
        let config = place.file("settings", settings.as_bytes(), 0o600);
        let mut command = place.prepared("env");
        command.args(around).args([env!("CARGO_BIN_EXE_pageout"), "run", "-m", "32M", "-s", "mem,size=1G"]);
        command.arg("--config").arg(config);
        command.args((settings.is_empty()).then_some("--any-user")).args(user);
        let ended = finish(
            command.current_dir(place.path("")).env("XDG_RUNTIME_DIR", &open).env_remove("PAGEOUT_AGENT"),
        );
        let peak =
            ended.out.lines().nth(2).and_then(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok());
        assert!(ended.out.starts_with("900000\n65534\nVmHWM:"), "{}{}", ended.out, ended.err);
        assert!(peak.is_some_and(|kib| kib < 96 << 10), "{}", ended.out);
        assert_eq!((ended.status, ended.err.as_str()), (0, ""));
    }
    fs::remove_dir_all(&open).unwrap();
}

#[test]
fn the_embedded_agent_is_unpacked_for_the_user_alone() {
    use std::os::unix::fs::PermissionsExt;
    let place = Place::new();
    for _ in 0..2 {
        let script = "/bin/true; (exit 3); sleep 0.5";
        let mut command = place.pageout(["run", "--strict", "-m", "64M", "sh", "-c", script]);
        let ended = finish(command.env_remove("PAGEOUT_AGENT"));
        assert_eq!((ended.status, ended.err.as_str()), (0, ""));
    }
    let cache = place.path(".cache/pageout");
    assert_eq!(fs::metadata(&cache).unwrap().permissions().mode() & 0o777, 0o700);
    let names: Vec<_> = fs::read_dir(&cache).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names.len(), 1);
    let name = names[0].to_str().unwrap();
    assert!(name.starts_with("libpageout_agent-") && name.ends_with(".so"), "{name}");
}

/// Its own data are never taken for the program's: as when it is removed on NFS, which renames it, while it is mapped.
#[test]
fn the_agent_may_be_called_anything() {
    let place = Place::new();
    let mut command = place.pageout(["run", "-m", "64M", "sh", "-c", "echo ${LD_PRELOAD%%:*}"]);
    let ended = finish(command.env_remove("PAGEOUT_AGENT"));
    let agent = place.path("agent");
    fs::copy(ended.out.trim(), &agent).unwrap();
    let fill = "for (i = 0; i < 40000; i++) a[i] = sprintf(\"%1000d\", i); for (i in a) n += a[i] + 0 == i; print n }";
    for first in ["", "system(\"mv agent other\"); "] {
        let words = format!("BEGIN {{ {first}{fill}");
        let words = ["run", "-m", "24M", "-s", "mem,size=1G", "awk", &words];
        let mut command = place.pageout(words);
        let ended = finish(command.current_dir(place.path("")).env("PAGEOUT_AGENT", &agent));
        assert_eq!((ended.status, ended.out.as_str(), ended.err.as_str()), (0, "40000\n", ""));
    }
}

/// A program of this source in C.
fn compile(place: &Place, name: &str, options: &[&str], source: &[u8]) {
    let source = place.file(&format!("{name}.c"), source, 0o600);
    let mut compiler = place.prepared("cc");
    compiler.args(options).arg("-o").arg(place.path(name)).arg(source);
    assert_eq!(finish(&mut compiler).status, 0);
}

#[test]
fn a_program_without_libc_has_the_agent_too() {
    let place = Place::new();
    compile(
        &place,
        "bare",
        &["-pie", "-nostdlib"],
        br#"void _start(void) { __asm__("mov $60, %eax; mov $7, %edi; syscall"); }"#,
    );
    let mut command = place.pageout(["run", "--strict", "-m", "64M", "./bare"]);
    let ended = finish(command.env_remove("PAGEOUT_AGENT"));
    assert_eq!((ended.status, ended.err.as_str()), (7, ""));
}

/// The loader has no interpreter, as static programs, but preloads into what it runs.
#[test]
fn the_loader_runs_programs_with_the_agent() {
    let place = Place::new();
    let loader = "/lib64/ld-linux-x86-64.so.2";
    let script = "grep -q libpageout_agent- /proc/$$/maps; exit $?";
    let command = ["run", "--strict", "-m", "64M", loader, "/bin/sh", "-c", script];
    let ended = finish(place.pageout(command).env_remove("PAGEOUT_AGENT"));
    assert_eq!((ended.status, ended.err.as_str()), (0, ""));
    // A copy may be anything.
    common::copy_program(loader, &place.path("copy"));
    let ended = finish(&mut place.pageout(["run", "-m", "64M", "./copy", "/bin/true"]));
    assert_eq!(ended.status, 125, "{}", ended.err);
    assert!(ended.err.starts_with("pageout: ./copy: statically linked"), "{}", ended.err);
}

/// It was killed: a large program on a busy machine takes as long.
#[test]
fn who_is_loaded_slowly_is_no_stray() {
    let place = Place::new();
    compile(
        &place,
        "slow",
        &["-O1", "-fno-stack-protector", "-Wl,-z,now"],
        br#"
        #include <unistd.h>
        static int real(void) { return 7; }
        static int (*resolve(void))(void) {
            long three[2] = {3, 0}, out;
            __asm__ volatile("syscall" : "=a"(out) : "a"(35L), "D"(three), "S"(0L) : "rcx", "r11", "memory");
            return real;
        }
        int chosen(void) __attribute__((ifunc("resolve")));
        int main(void) { usleep(2600000); return chosen(); }
        "#,
    );
    for program in [&["./slow"][..], &["sh", "-c", "./slow; exit $?"]] {
        let command = [&["run", "--strict", "-m", "64M"], program].concat();
        let ended = finish(place.pageout(command).env_remove("PAGEOUT_AGENT"));
        assert_eq!((ended.status, ended.err.as_str()), (7, ""));
    }
}

/// As in a sandbox with a /tmp of its own.
#[test]
fn who_does_not_see_the_socket_is_told_of_once() {
    if !can_unshare() {
        return;
    }
    let place = Place::new();
    let runtime = place.path("runtime");
    fs::create_dir(&runtime).unwrap();
    let script = "mount -t tmpfs none runtime; for i in 1 2 3; do env true; done; sleep 3";
    let mut command = place.pageout(["run", "-m", "64M", "unshare", "-m", "sh", "-c", script]);
    let ended = finish(command.env_remove("PAGEOUT_AGENT").env("XDG_RUNTIME_DIR", &runtime));
    let why = format!(" (sleep): run's socket, {}/pageout/", runtime.display());
    assert!(ended.err.contains(&why), "{}", ended.err);
    assert!(ended.err.ends_with("that it sees; its memory is not limited, but counts\n"), "{}", ended.err);
    assert_eq!((ended.status, ended.err.lines().count()), (0, 1), "{}", ended.err);
}

#[test]
fn valgrind_runs_without_the_agent() {
    let place = Place::new();
    if !place.prepared("valgrind").arg("--version").status().is_ok_and(|status| status.success()) {
        eprintln!("skipped: no valgrind");
        return;
    }
    // Its tool is told of if it runs for more than a second: here it always does.
    let script = ["sh", "-c", "echo one; (echo two); sleep 2; exit 7"];
    let command = ["run", "-m", "64M", "valgrind", "-q", "--leak-check=full"];
    let ended = finish(place.pageout(command.into_iter().chain(script)).env_remove("PAGEOUT_AGENT"));
    assert_eq!((ended.status, ended.out.as_str()), (7, "one\ntwo\n"));
    let told =
        "): statically linked, so pageout cannot be preloaded; its memory is not limited, but counts\n";
    assert!(ended.err.contains(" (memcheck-") && ended.err.ends_with(told), "{}", ended.err);
    assert_eq!(ended.err.lines().count(), 1, "{}", ended.err);
}

#[test]
fn who_is_refused_a_keeper_is_told_so_and_runs() {
    let place = Place::new();
    let refuse = || {
        let step = |code: u32, k, jt, jf| libc::sock_filter { code: code as u16, jt, jf, k };
        let load = libc::BPF_LD | libc::BPF_W | libc::BPF_ABS;
        let errno = libc::SECCOMP_RET_ERRNO | libc::EINVAL as u32;
        let mut steps = [
            step(load, 0, 0, 0),
            step(libc::BPF_JMP | libc::BPF_JEQ, libc::SYS_clone as u32, 0, 3),
            step(load, 16, 0, 0),
            step(libc::BPF_JMP | libc::BPF_JSET, libc::CLONE_UNTRACED as u32, 0, 1),
            step(libc::BPF_RET, errno, 0, 0),
            step(libc::BPF_RET, libc::SECCOMP_RET_ALLOW, 0, 0),
        ];
        let filter = libc::sock_fprog { len: steps.len() as u16, filter: steps.as_mut_ptr() };
        // SAFETY: the filter is read during the call.
        unsafe {
            libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
            libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const filter);
        }
        Ok(())
    };
    let mut command = place.pageout(["run", "-m", "64M", "true"]);
    // SAFETY: may be called between fork and exec.
    unsafe { command.env_remove("PAGEOUT_AGENT").pre_exec(refuse) };
    let ended = finish(&mut command);
    let why =
        "runs without a limit: this kernel, a filter or an emulator refuses it a keeper on the same memory";
    assert_eq!((ended.status, ended.err.lines().count()), (0, 1), "{}", ended.err);
    assert!(ended.err.contains(why), "{}", ended.err);
}

#[test]
fn who_may_have_no_children_is_told_what_to_do() {
    let place = Place::new();
    let deadline = ["-d", "-T", "5000000", "-P", "10000000", "-D", "10000000", "0", "true"];
    if !place.prepared("chrt").args(deadline).status().is_ok_and(|status| status.success()) {
        eprintln!("skipped: no chrt, or no class SCHED_DEADLINE here");
        return;
    }
    let run = |options: &[&str]| {
        let command = [&["run", "-m", "64M", "chrt"], options, &deadline].concat();
        finish(place.pageout(command).env_remove("PAGEOUT_AGENT"))
    };
    let ended = run(&[]);
    assert_eq!((ended.status, ended.err.lines().count()), (0, 1), "{}", ended.err);
    assert!(ended.err.contains("runs without a limit: its class, SCHED_DEADLINE"), "{}", ended.err);
    let ended = run(&["-R"]);
    assert_eq!((ended.status, ended.err.as_str()), (0, ""));
}

/// A line to a stream that is full made run wait, and the tree with it, until somebody read: who waits for the end first never did.
#[test]
fn who_reads_no_lines_holds_nobody_up() {
    let place = Place::new();
    let (mut reader, mut writer) = UnixStream::pair().unwrap();
    writer.set_nonblocking(true).unwrap();
    while writer.write(&[0; 4096]).is_ok() {}
    writer.set_nonblocking(false).unwrap();
    let mut command = place.pageout(["run", "-vv", "sh", "-c", "exit 7"]);
    let child = command.stderr(OwnedFd::from(writer)).spawn().unwrap();
    drop(command);
    assert_eq!(wait(child).status, 7);
    let mut heard = Vec::new();
    reader.read_to_end(&mut heard).unwrap();
    assert!(heard.iter().all(|byte| *byte == 0), "{}", String::from_utf8_lossy(&heard));
}

/// A control group of version 1 that is removed in the end.
struct Group(PathBuf);

impl Group {
    /// One of this controller with a limit; `None`: not here.
    fn new(controller: &str, limit: &str, is: &str) -> Option<Self> {
        let name = format!("pageout-test-{}", std::process::id());
        let group = Path::new("/sys/fs/cgroup").join(controller).join(name);
        fs::create_dir(&group).ok()?;
        let group = Self(group);
        fs::write(group.0.join(limit), is).ok()?;
        Some(group)
    }

    /// What is executed goes into it.
    fn holds(&self, command: &mut Command) {
        let procs = self.0.join("cgroup.procs");
        // SAFETY: writes a file.
        unsafe { command.pre_exec(move || fs::write(&procs, "0")) };
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // Who was in it may still be ending.
        for _ in 0..100 {
            if fs::remove_dir(&self.0).is_ok() {
                return;
            }
            thread::sleep(Duration::from_millis(20));
        }
    }
}

/// What `malloc` gives is filled before it is registered, and nothing waited for a device that is slower: a limit of 64M
/// had 1500M after 2 GB, 200M and more after what is here.
#[test]
fn who_takes_memory_waits_for_a_slow_device() {
    let place = Place::new();
    let here = place.path(".").canonicalize().unwrap();
    let device = fs::metadata(&here).unwrap().dev();
    let limit = format!("{}:{} 20000000", libc::major(device), libc::minor(device));
    let Some(group) = Group::new("blkio", "blkio.throttle.write_bps_device", &limit) else {
        println!("skipped: no control group of block I/O can be made here");
        return;
    };
    let script = "a = [bytes([k % 251 + 1]) * (1 << 18) for k in range(1000)]\n\
        print(next(int(l.split()[1]) for l in open('/proc/self/status') if l.startswith('VmHWM')))";
    let mut command = place.pageout(["run", "-m", "64M", "-s", "swap,size=1G", "python3", "-c", script]);
    command.env_remove("PAGEOUT_AGENT");
    group.holds(&mut command);
    let ended = finish(&mut command);
    assert_eq!((ended.err.as_str(), ended.status), ("", 0));
    let most: u64 = ended.out.trim().parse().unwrap();
    assert!(most <= 128 << 10, "{most} KiB");
}

/// What is in memory counts in a control group as what stays does. The line spoke of an engine that had ended.
#[test]
fn whoever_is_killed_for_want_of_memory_is_told_so() {
    let Some(group) = Group::new("memory", "memory.limit_in_bytes", "128M") else {
        println!("skipped: no control group of memory can be made here");
        return;
    };
    // What the kernel's own swap takes, where there is one, counts elsewhere.
    fs::write(group.0.join("memory.swappiness"), "0").unwrap();
    let place = Place::new();
    let script = "a = [bytes([k % 251 + 1]) * (1 << 18) for k in range(1000)]; print('all of it')";
    let mut command = place.pageout(["run", "-m", "32M", "-s", "mem", "python3", "-c", script]);
    command.env_remove("PAGEOUT_AGENT");
    group.holds(&mut command);
    let ended = finish(&mut command);
    assert_eq!((ended.out.as_str(), ended.status), ("", 1009), "{}", ended.err);
    let why =
        "(the kernel has killed for want of memory: what may stay and what is in mem have to fit into 128M; give a file with -s)";
    assert!(ended.err.contains(why), "{}", ended.err);

    // Who comes to the group later has lost nobody there.
    let script = "import time; a = [bytes([k % 251 + 1]) * (1 << 18) for k in range(300)]; print(flush=True); time.sleep(20)";
    let mut command = place.pageout(["run", "-m", "32M", "-s", "mem", "python3", "-c", script]);
    let mut run = command.env_remove("PAGEOUT_AGENT").spawn().unwrap();
    run.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
    fs::write(group.0.join("cgroup.procs"), run.id().to_string()).unwrap();
    let keeper = child_of(run.id(), "pageout").unwrap();
    // SAFETY: a child of one that is not reaped yet.
    unsafe { libc::kill(keeper, libc::SIGKILL) };
    let ended = wait(run);
    let why = "its engine ended without a word while memory was swapped out; killed";
    assert!(ended.err.contains(why) && ended.status == 1009, "{}", ended.err);
}

/// Nobody is left who has what is out, or says so: it read zeros.
#[test]
fn whoever_kills_run_and_keeper_kills_the_program() {
    let place = Place::new();
    compile(
        &place,
        "hold",
        &["-O1"],
        br#"
        #include <stdio.h>
        #include <stdlib.h>
        int main(void) {
            size_t len = 100 << 17;
            size_t *all = malloc(8 * len);
            for (size_t at = 0; at < len; at += 512) all[at] = at + 1;
            for (int round = 0;; round++) {
                for (size_t at = 0; at < len; at += 512)
                    if (all[at] != at + 1) { puts("wrong"); return 3; }
                if (round == 0) { puts("full"); fflush(stdout); }
            }
        }
        "#,
    );
    for run_first in [true, false] {
        let mut command = place.pageout(["run", "-m", "32M", "-s", "mem,size=256M", "./hold"]);
        let mut run = command.env_remove("PAGEOUT_AGENT").stdout(Stdio::piped()).spawn().unwrap();
        let mut out = BufReader::new(run.stdout.take().unwrap());
        let mut line = String::new();
        out.read_line(&mut line).unwrap();
        assert_eq!(line, "full\n");
        let me = i32::try_from(run.id()).unwrap();
        let keeper = child_of(run.id(), "pageout").unwrap();
        for victim in if run_first { [me, keeper] } else { [keeper, me] } {
            // SAFETY: a child that is not reaped yet, and its.
            unsafe { libc::kill(victim, libc::SIGKILL) };
        }
        line.clear();
        // The end of the program, who alone has the other end by now.
        out.read_line(&mut line).unwrap();
        assert_eq!(line, "");
        run.wait().unwrap();
    }
}

/// A reader saw no end, a lock stayed, an address stayed in use, as long as the run did.
#[test]
fn what_the_program_closes_is_closed() {
    let place = Place::new();
    let mut ends = [0; 2];
    // SAFETY: room for two descriptors, which are new and ours.
    let [read, write] = unsafe {
        assert_eq!(libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC), 0);
        ends.map(|end| OwnedFd::from_raw_fd(end))
    };
    let mut command = place.pageout(["run", "sh", "-c", "exec 3>&-; pwd -P > /dev/null; cd /; exec sleep 4"]);
    let number = write.as_raw_fd();
    // SAFETY: takes integers only.
    unsafe {
        command.pre_exec(move || match libc::dup2(number, 3) {
            3 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        });
    }
    let mut child = command.spawn().unwrap();
    drop(write);
    fs::File::from(read).read_to_end(&mut Vec::new()).unwrap();
    assert!(child.try_wait().unwrap().is_none());
    for pid in [child.id()].into_iter().chain(child_of(child.id(), "witness").map(|pid| pid as u32)) {
        assert_eq!(fs::read_link(format!("/proc/{pid}/cwd")).unwrap(), Path::new("/"));
    }
    assert!(child.wait().unwrap().success());
}

/// The first child of a run that is called so.
fn child_of(run: u32, name: &str) -> Option<i32> {
    children_of(run, name).first().copied()
}

fn children_of(run: u32, name: &str) -> Vec<i32> {
    let children = fs::read_to_string(format!("/proc/{run}/task/{run}/children")).unwrap();
    let name_of = |pid: &&str| fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    let named = children.split_whitespace().filter(|pid| name_of(pid).trim_end() == name);
    named.map(|pid| pid.parse().unwrap()).collect()
}

/// The witness stayed stopped, a signal to all waited in it, and none of that number to run alone went on any more.
#[test]
fn one_to_run_alone_comes_after_the_group_was_stopped() {
    let place = Place::new();
    let script = "import os, signal\n\
        signal.signal(signal.SIGUSR1, lambda *_: os.write(1, b'got\\n'))\n\
        os.write(1, b'up\\n')\n\
        while True: signal.pause()";
    let mut command = place.pageout(["run", "python3", "-c", script]);
    let mut run = command.process_group(0).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(run.stdout.take().unwrap()).lines();
    let mut next = || lines.next().unwrap().unwrap();
    let me = i32::try_from(run.id()).unwrap();
    // SAFETY: a child that is not reaped yet, and its group.
    let send = |to: i32, signal| assert_eq!(unsafe { libc::kill(to, signal) }, 0);
    assert_eq!(next(), "up");
    let witness = child_of(run.id(), "witness").unwrap();
    let is = |state: &str| {
        let status = fs::read_to_string(format!("/proc/{witness}/status")).unwrap();
        status.lines().any(|line| line.strip_prefix("State:").is_some_and(|is| is.trim().starts_with(state)))
    };
    send(-me, libc::SIGSTOP);
    while !is("T") {
        sleep(Duration::from_millis(5));
    }
    send(me, libc::SIGCONT);
    send(-me, libc::SIGUSR1);
    assert_eq!(next(), "got");
    // Once more until it comes: of two that come close together one may go.
    let comes = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..100 {
                if comes.load(Ordering::Relaxed) {
                    return;
                }
                send(me, libc::SIGUSR1);
                sleep(Duration::from_millis(200));
            }
            send(-me, libc::SIGKILL);
        });
        assert_eq!(next(), "got");
        comes.store(true, Ordering::Relaxed);
    });
    assert!(!is("T"));
    send(-me, libc::SIGKILL);
    run.wait().unwrap();
}

/// It came twice: from who sent it, and from run.
#[test]
fn a_signal_to_the_group_comes_once_and_one_to_run_as_well() {
    let place = Place::new();
    let script = "trap 'n=$((n + 1))' TERM; echo up; for i in 1 2 3 4 5 6 7 8; do sleep 0.1; done; echo $n";
    for group in [true, false] {
        let mut command = place.pageout(["run", "sh", "-c", script]);
        let mut run = command.process_group(0).stdout(Stdio::piped()).spawn().unwrap();
        let mut out = BufReader::new(run.stdout.take().unwrap());
        let mut line = String::new();
        out.read_line(&mut line).unwrap();
        let me = i32::try_from(run.id()).unwrap();
        // SAFETY: a child that is not reaped yet, and its group.
        unsafe { libc::kill(if group { -me } else { me }, libc::SIGTERM) };
        out.read_to_string(&mut line).unwrap();
        assert_eq!(line, "up\n1\n", "to the group: {group}");
        assert!(run.wait().unwrap().success());
    }
}

/// What went to run's group, from a process or from the terminal, was lost: the program was taken for one of that.
#[test]
fn a_signal_to_the_group_reaches_a_program_with_a_group_of_its_own() {
    let place = Place::new();
    for leaves in [&["timeout", "60"][..], &["setsid"]] {
        // Before that `timeout` may not know yet whom to end, and leaves that one behind.
        let script = "until grep -q '^State:.S' /proc/$PPID/status; do :; done; echo ready; exec sleep 60";
        let script = ["sh", "-c", script];
        let words = [&["run", "-s", "mem,size=64M"], leaves, &script].concat();
        let run = ready(place.pageout(&words).process_group(0));
        // SAFETY: the group of a child that is not reaped yet.
        unsafe { libc::kill(-(run.id() as i32), libc::SIGTERM) };
        assert_eq!(wait(run).status, 1000 + libc::SIGTERM, "{leaves:?}");

        let mut command = place.pageout(&words);
        let (terminal, _side) = with_terminal(&mut command);
        let run = ready(&mut command);
        fs::File::from(terminal.try_clone().unwrap()).write_all(b"\x03").unwrap();
        assert_eq!(wait(run).status, 1000 + libc::SIGINT, "{leaves:?}");
    }
}

/// The kernel says so to the leader of a session, and to the terminal's foreground group.
#[test]
fn who_has_a_session_of_its_own_outlives_the_terminal() {
    let place = Place::new();
    let script = "trap 'echo gone; exit' HUP; echo ready; for i in 1 2 3 4 5; do sleep 0.1; done; echo lived";
    let run = ["run", "-s", "mem,size=64M"];
    for (leaves, last) in [(&["timeout", "60"][..], "gone"), (&["setsid"], "lived")] {
        let mut command = place.pageout([&run[..], leaves, &["sh", "-c", script]].concat());
        let (terminal, side) = with_terminal(&mut command);
        let run = ready(&mut command);
        drop((terminal, side));
        assert_eq!(
            String::from_utf8(run.wait_with_output().unwrap().stdout).unwrap().trim(),
            last,
            "{leaves:?}"
        );
    }
}

/// As an interactive shell tells its jobs that the terminal has gone.
#[test]
fn who_has_a_session_of_its_own_is_hung_up_by_itself_only() {
    let place = Place::new();
    let script =
        "trap 'echo gone; exit' HUP; echo ready; for i in 1 2 3 4 5 6 7 8; do sleep 0.1; done; echo lived";
    for (group, last) in [(true, "lived"), (false, "gone")] {
        let mut command = place.pageout(["run", "-s", "mem,size=64M", "setsid", "sh", "-c", script]);
        let run = ready(command.process_group(0));
        let me = run.id() as i32;
        // SAFETY: a child that is not reaped yet, and its group.
        unsafe { libc::kill(if group { -me } else { me }, libc::SIGHUP) };
        let said = String::from_utf8(run.wait_with_output().unwrap().stdout).unwrap();
        assert_eq!(said.trim(), last, "to the group: {group}");
    }
}

/// As who ends a control group sends it.
#[test]
fn a_signal_to_each_of_a_control_group_comes_once_to_a_program_with_a_group_of_its_own() {
    let place = Place::new();
    let script =
        "trap 'n=$((n + 1))' TERM; echo up; echo $$; for i in 1 2 3 4 5 6 7 8 9 10 11 12; do sleep 0.1; done; echo $n";
    let mut run = place.pageout(["run", "-s", "mem,size=64M", "setsid", "sh", "-c", script]).spawn().unwrap();
    let mut lines = BufReader::new(run.stdout.take().unwrap()).lines();
    let mut next = || lines.next().unwrap().unwrap();
    assert_eq!(next(), "up");
    let program: i32 = next().parse().unwrap();
    let me = run.id();
    let witnesses = || children_of(me, "witness");
    while witnesses().len() < 2 {
        assert!(run.try_wait().unwrap().is_none());
        sleep(Duration::from_millis(5));
    }
    for pid in witnesses().into_iter().chain([me as i32, program]) {
        // SAFETY: a child that is not reaped yet, and its.
        unsafe { libc::kill(pid, libc::SIGTERM) };
    }
    assert_eq!(next(), "1");
    assert!(run.wait().unwrap().success());
}

/// As "I am ready" is said. It came back to the program, which knows run as its parent, and ended it.
#[test]
fn what_the_program_tells_its_parent_comes_to_runs() {
    let place = Place::new();
    let counts = "import signal, subprocess, sys\n\
        got = []\n\
        signal.signal(signal.SIGUSR1, lambda *_: got.append(1))\n\
        ended = subprocess.run(sys.argv[1:])\n\
        print(len(got), ended.returncode)";
    for script in [
        "kill -USR1 $PPID; sleep 0.3; exit 3",
        "kill -USR1 $PPID; exit 3",
        "(kill -USR1 $PPID; sleep 0.3); exit 3",
        // It comes without run.
        "trap '' USR1; kill -USR1 0; sleep 0.3; exit 3",
        // Who wants to end the program by the number that starts it.
        "trap 'kill -USR1 $PPID; exit 3' TERM; (kill -TERM $PPID; sleep 2); exit 4",
    ] {
        let mut parent = place.prepared("python3");
        parent.args(["-c", counts, env!("CARGO_BIN_EXE_pageout"), "run", "sh", "-c", script]);
        let ended = finish(parent.process_group(0));
        assert_eq!((ended.out.as_str(), ended.err.as_str()), ("1 3\n", ""), "{script}");
    }
}

/// Who ends a container sends to that.
#[test]
fn what_is_sent_to_the_first_process_comes_to_the_program() {
    if !is_root() || !can_unshare() {
        return println!("skipped: needs root, and namespaces of its own");
    }
    let place = Place::new();
    let script = "trap 'echo told' USR1; kill -USR1 1; sleep 0.3; (kill -USR1 1; sleep 0.3); exit 3";
    let mut command = place.prepared("unshare");
    command.args([
        "-m",
        "-p",
        "-f",
        "--mount-proc",
        env!("CARGO_BIN_EXE_pageout"),
        "run",
        "sh",
        "-c",
        script,
    ]);
    let ended = finish(&mut command);
    assert_eq!((ended.out.as_str(), ended.err.as_str(), ended.status), ("told\ntold\n", "", 3));
}

/// What sigqueue(3) sent with a signal was lost on its way through run.
#[test]
fn what_is_sent_with_a_signal_arrives() {
    let place = Place::new();
    let script = "import signal, sys\n\
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])\n\
        print('up', flush=True)\n\
        got = signal.sigwaitinfo([signal.SIGUSR1])\n\
        print(got.si_code)";
    let mut command = place.pageout(["run", "python3", "-c", script]);
    let mut run = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut out = BufReader::new(run.stdout.take().unwrap());
    let mut line = String::new();
    out.read_line(&mut line).unwrap();
    let value = libc::sigval { sival_ptr: std::ptr::null_mut() };
    // SAFETY: a child that is not reaped yet.
    unsafe { libc::sigqueue(i32::try_from(run.id()).unwrap(), libc::SIGUSR1, value) };
    out.read_to_string(&mut line).unwrap();
    assert_eq!(line, format!("up\n{}\n", libc::SI_QUEUE));
    assert!(run.wait().unwrap().success());
}

/// Memory that one shares on purpose was nothing to the others: beside 100M of it another kept 100M of a limit of 112M.
#[test]
fn what_is_shared_on_purpose_is_gone_for_the_others() {
    let place = Place::new();
    let shared = "import mmap, time\n\
        m = mmap.mmap(-1, 100 << 20)\n\
        for i in range(0, 100 << 20, 4096): m[i] = 1\n\
        time.sleep(4)";
    let own = "import time\n\
        a, end = bytearray(100 << 20), time.time() + 3\n\
        while time.time() < end:\n    for i in range(0, 100 << 20, 4096): a[i] = (a[i] + 1) & 255\n\
        print(next(int(l.split()[1]) for l in open('/proc/self/status') if l.startswith('VmRSS')))";
    let script = "python3 -c \"$1\" & python3 -c \"$2\"; wait";
    let arguments = ["run", "-m", "136M", "-s", "mem,size=256M", "sh", "-c", script, "sh", shared, own];
    let ended = finish(place.pageout(arguments).env_remove("PAGEOUT_AGENT"));
    assert_eq!((ended.err.as_str(), ended.status), ("", 0));
    let resident: u64 = ended.out.trim().parse().unwrap();
    assert!(resident <= 64 << 10, "{resident} KiB");
}

/// Each of those who have it said so, with figures that were nearly the same, and none where each had little.
#[test]
fn what_is_shared_on_purpose_and_over_the_limit_is_told_of_once() {
    let place = Place::new();
    let program = "import mmap, os, time\n\
        maps = [mmap.mmap(-1, 40 << 20) for _ in range(3)]\n\
        for m in maps:\n    if os.fork() == 0: break\n\
        else: os.wait(); os.wait(); os.wait(); os._exit(0)\n\
        end = time.time() + 7\n\
        while time.time() < end:\n    for i in range(0, 40 << 20, 4096): m[i] = 1\n    time.sleep(0.05)\n\
        os._exit(0)";
    let arguments = ["run", "-m", "64M", "-s", "mem,size=256M", "python3", "-c", program];
    let ended = finish(place.pageout(arguments).env_remove("PAGEOUT_AGENT"));
    let told = " cannot go of its memory and of the others' in the run (";
    assert!(ended.err.contains(told) && ended.err.contains("over the limit of 64M"), "{}", ended.err);
    assert_eq!((ended.err.lines().count(), ended.status), (1, 0), "{}", ended.err);
}

/// What systemd tells its main process (sockets that it has opened, that it wants a sign of life) is for the program.
#[test]
fn what_is_for_the_main_process_is_for_the_program() {
    let place = Place::new();
    // What it starts is not meant, and must not take it for its own.
    let script = "echo $LISTEN_PID $WATCHDOG_PID $$ $(sh -c 'echo $LISTEN_PID $WATCHDOG_PID')";
    let mut outer = place.prepared("sh");
    let command = "LISTEN_PID=$$ WATCHDOG_PID=$$ exec \"$0\" run -s mem,size=64M -- sh -c \"$1\"";
    outer.args(["-c", command, env!("CARGO_BIN_EXE_pageout"), script]).env_remove("PAGEOUT_AGENT");
    let ended = finish(&mut outer);
    let numbers: Vec<&str> = ended.out.split_whitespace().collect();
    assert!(numbers.len() == 5 && numbers.iter().all(|number| *number == numbers[2]), "{}", ended.out);
}

/// A server that gives up root and forks said it of each child; who is executed by two users was told to try what does not help.
#[test]
fn why_there_is_no_limit_is_said_once_and_rightly() {
    if !is_root() {
        return println!("skipped: not root");
    }
    let place = Place::new();
    let forks = "import os, time\nos.setgid(65534); os.setuid(65534)\n\
        for i in range(4):\n    if os.fork() == 0: time.sleep(8); os._exit(0)\n\
        for i in range(4): os.wait()";
    let two_users = "import os\n\
        if os.fork() == 0: os.setresuid(0, 65534, 0); os.execvp('sleep', ['sleep', '8'])\n\
        os.wait()";
    let another = "runs as another user than pageout (65534), who cannot reach its run";
    let is_told = |script: &str, any_user: Option<&'static str>, why: &str| {
        let arguments = ["run", "-m", "60M", "-s", "mem,size=64M"].into_iter().chain(any_user);
        let arguments = arguments.chain(["python3", "-c", script]);
        let ended = finish(place.pageout(arguments).env_remove("PAGEOUT_AGENT"));
        assert_eq!((ended.status, ended.err.lines().count()), (0, 1), "{}", ended.err);
        assert!(ended.err.contains(why), "{}", ended.err);
    };
    std::thread::scope(|scope| {
        scope.spawn(|| is_told(forks, None, another));
        is_told(two_users, Some("--any-user"), "two users");
    });
}

/// Of a user of many groups the kernel says what is shared behind these.
#[test]
fn what_is_shared_counts_for_a_user_of_many_groups_too() {
    if !is_root() {
        return println!("skipped: not root");
    }
    let place = Place::new();
    let script = "import mmap, os, time\n\
        m = mmap.mmap(-1, 64 << 20)\n\
        for o in range(0, 64 << 20, 4096): m[o] = 1\n\
        if os.fork() == 0: sum(m[o] for o in range(0, 64 << 20, 4096)); time.sleep(1.5); os._exit(0)\n\
        os.wait()";
    let groups: Vec<_> = (2_000_000_000..2_000_000_200).map(|group: u32| group.to_string()).collect();
    let mut command = place.prepared("setpriv");
    command.arg(format!("--groups={}", groups.join(","))).arg(env!("CARGO_BIN_EXE_pageout"));
    command.args(["run", "-m", "128M", "-s", "mem,size=1G", "--stats"]).arg(place.path("out"));
    command.args(["python3", "-c", script]);
    let ended = finish(command.env_remove("PAGEOUT_AGENT"));
    assert_eq!((ended.status, ended.err.as_str()), (0, ""));
    let stats: serde_json::Value = serde_json::from_slice(&fs::read(place.path("out")).unwrap()).unwrap();
    let shared = |process: &serde_json::Value| process["shared_bytes"].as_u64().unwrap_or(0);
    let most = stats["processes"].as_array().unwrap().iter().map(shared).max();
    assert!(most.is_some_and(|most| most > 16 << 20), "{most:?}");
}

/// The kernel kills all who are in a namespace of process numbers when its first process ends, their keepers too.
#[test]
fn who_ends_with_its_namespace_has_not_lost_its_engine() {
    if !is_root() || !can_unshare() {
        return println!("skipped: needs root, and namespaces of its own");
    }
    let place = Place::new();
    let program = "import os, time\n\
        b = bytearray(os.urandom(1 << 20) * 24)\n\
        for w in range(3):\n    if os.fork() == 0: break\n\
        else: time.sleep(1); os._exit(7)\n\
        while True:\n    for i in range(0, len(b), 4096): b[i] = w\n    time.sleep(0.05)";
    let unshare = ["unshare", "-m", "-p", "-f", "--mount-proc", "python3", "-c", program];
    let arguments = ["run", "-m", "24M", "-s", "mem,size=1G"].into_iter().chain(unshare);
    let ended = finish(place.pageout(arguments).env_remove("PAGEOUT_AGENT"));
    assert_eq!((ended.err.as_str(), ended.status), ("", 7));
}

#[test]
fn who_is_left_without_a_limit_is_told_of() {
    let place = Place::new();
    let script = "sleep 5 & exec >&- 2>&-";
    let mut command = place.pageout(["run", "-s", "mem,size=64M", "sh", "-c", script]);
    let child = command.env_remove("PAGEOUT_AGENT").spawn().unwrap();
    let pid = child.id() as i32;
    std::thread::sleep(Duration::from_secs(1));
    // SAFETY: a child of ours that has not been waited for.
    unsafe { libc::kill(pid, libc::SIGTERM) };
    let ended = wait(child);
    let told = "pageout: ended by signal 15; processes that the program left (1) go on with what they have, and what \
            they execute has no limit\n";
    assert_eq!((ended.err.as_str(), ended.status), (told, 0));
}

/// Who stops the program waits for run, as a supervisor does, and not for what the program has left.
#[test]
fn run_ends_with_a_program_that_was_told_to_end() {
    let place = Place::new();
    let told = "pageout: the program has ended as it was told; processes that the program left (1) go on with what they have, and what \
            they execute has no limit\n";
    for (signal, trap, status) in
        [(libc::SIGTERM, "trap 'exit 3' TERM", 3), (libc::SIGTERM, ":", 1015), (libc::SIGINT, ":", 1002)]
    {
        let script =
            format!("setsid sleep 60 >&- 2>&- & echo ready; echo $!; {trap}; while :; do sleep 0.02; done");
        let mut command = place.pageout(["run", "-s", "mem,size=64M", "sh", "-c", &script]);
        let run = ready(command.env_remove("PAGEOUT_AGENT"));
        // SAFETY: a child of ours that has not been waited for.
        unsafe { libc::kill(run.id() as i32, signal) };
        let ended = wait(run);
        let left = ended.out.trim().parse().unwrap();
        // SAFETY: a process that the program left.
        assert_eq!(unsafe { libc::kill(left, libc::SIGKILL) }, 0, "what is left goes on");
        assert_eq!((ended.err.as_str(), ended.status), (told, status), "{signal}");
    }
}

/// A service that is begun again after it was killed, or the machine has lost power.
#[test]
fn what_a_killed_run_left_is_taken_by_the_next() {
    let place = Place::new();
    let arguments = ["run", "-s", "swap,size=64M", "sh", "-c", "echo $$; exec sleep 100"];
    let mut killed = place.pageout(arguments).stdout(Stdio::piped()).spawn().unwrap();
    let mut told = String::new();
    BufReader::new(killed.stdout.take().unwrap()).read_line(&mut told).unwrap();
    killed.kill().unwrap();
    killed.wait().unwrap();
    // SAFETY: takes integers only.
    assert_eq!(unsafe { libc::kill(told.trim().parse().unwrap(), libc::SIGKILL) }, 0);
    let swap = place.path("swap");
    assert_eq!(fs::metadata(&swap).unwrap().len(), 64 << 20);
    if let Ok(seen) = Command::new("blkid").args(["-p", "-o", "export"]).arg(&swap).output() {
        let seen = String::from_utf8_lossy(&seen.stdout).into_owned();
        assert!(seen.contains("TYPE=swap\n") && seen.contains("LABEL=pageout\n"), "{seen}");
    }
    for size in ["swap,size=64M", "swap"] {
        let again = finish(&mut place.pageout(["run", "-s", size, "true"]));
        assert_eq!((again.status, again.err.as_str()), (0, ""));
    }
}

/// As `cp -al` makes it.
#[test]
fn another_name_of_a_new_file_keeps_nothing() {
    let place = Place::new();
    let ended = finish(&mut place.pageout(["run", "-s", "swap,size=64M", "ln", "swap", "other"]));
    assert_eq!((ended.status, ended.err.as_str()), (0, ""));
    assert!(!place.path("swap").exists());
    assert_eq!(fs::metadata(place.path("other")).unwrap().len(), 0);
}

/// Run alone is killed: its program and keeper go on, and what is out lies in the file, whose header would have it taken.
#[test]
fn the_file_of_a_killed_run_is_its_processes_while_they_live() {
    let place = Place::new();
    let script = "import sys; a = [bytes([k % 251 + 1]) * (1 << 18) for k in range(400)]; print(flush=True); sys.stdin.read(1)\n\
        assert all(c == bytes([k % 251 + 1]) * (1 << 18) for k, c in enumerate(a)); print('right', flush=True); sys.stdin.read()";
    let mut command = place.pageout(["run", "-m", "32M", "-s", "swap,size=256M", "python3", "-c", script]);
    command.env_remove("PAGEOUT_AGENT").stdin(Stdio::piped());
    let mut killed = command.spawn().unwrap();
    let (mut to, mut from) = (killed.stdin.take().unwrap(), killed.stdout.take().unwrap());
    from.read_exact(&mut [0]).unwrap();
    killed.kill().unwrap();
    killed.wait().unwrap();
    let again = || finish(&mut place.pageout(["run", "-s", "swap", "true"]));
    let in_use = "pageout: swap: in use by another device, here or of another pageout; name another file\n";
    let refused = again();
    assert_eq!((refused.status, refused.err.as_str()), (125, in_use));
    to.write_all(b"x").unwrap();
    let mut told = [0; 6];
    from.read_exact(&mut told).unwrap();
    assert_eq!(&told, b"right\n");
    // It ends, and a moment later its keeper.
    drop(to);
    let patience = Instant::now() + Duration::from_secs(20);
    loop {
        let taken = again();
        if taken.status == 0 {
            break;
        }
        assert_eq!(taken.err, in_use);
        assert!(Instant::now() < patience);
    }
    // Nothing of it is left.
    assert!(fs::read(place.path("swap")).unwrap()[4096..].iter().all(|byte| *byte == 0));
}
