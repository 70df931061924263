//! `doctor`, `man`, `completions`, and the help.

mod common;

use std::process::Command;

use common::{can_unshare, finish, is_root, Place};

#[test]
fn doctor_finds_what_run_needs() {
    let place = Place::new();
    let ended = finish(&mut place.pageout(["doctor", "-m", "64M"]));
    assert_eq!((ended.status, ended.err.as_str()), (0, ""), "{}", ended.out);
    for word in [
        "kernel",
        "userfaultfd",
        "huge pages",
        "io_uring",
        "memory",
        "limit",
        "open files",
        "swap",
        "socket",
        "agent",
    ] {
        assert!(ended.out.lines().any(|line| line.contains(word)), "{word}");
    }
    assert!(ended.out.ends_with("\npageout run works here\n"));
}

#[test]
fn doctor_says_what_lacks_and_mends_it() {
    let place = Place::new();
    let ended = finish(&mut place.pageout(["doctor", "-s", "/dev/null"]));
    assert_eq!(ended.status, 1);
    let lack = "LACKS  swap         /dev/null: neither a file nor a block device\n                    name one of these\n";
    assert!(ended.out.contains(lack), "{}", ended.out);
    assert!(ended.out.ends_with("pageout run does not work here: one thing is lacking\n"));
}

#[test]
fn doctor_counts_devices() {
    let place = Place::new();
    let devices = ["--swap", "mem,size=64M"].repeat(9);
    let ended = finish(&mut place.pageout([&["doctor"], devices.as_slice()].concat()));
    assert!(ended.out.contains("LACKS  swap         9 devices\n"), "{}", ended.out);
    assert_eq!(ended.status, 1);
}

#[test]
fn doctor_sees_that_a_file_is_no_directory() {
    let place = Place::new();
    let file = place.file("file", b"", 0o700);
    let lack = "cannot be made: not a directory";
    let doctor = finish(place.pageout(["doctor"]).env("TMPDIR", &file));
    assert!(
        doctor.out.lines().any(|line| line.starts_with("LACKS  swap ") && line.ends_with(lack)),
        "{}",
        doctor.out
    );
    let run = finish(place.pageout(["run", "true"]).env("TMPDIR", &file));
    assert!(run.err.contains(lack), "{}", run.err);
    assert_eq!((doctor.status, run.status), (1, 125));
}

#[test]
fn doctor_sees_what_is_read_only() {
    if !is_root() || !can_unshare() {
        return;
    }
    let place = Place::new();
    for name in ["swap", "runtime"] {
        std::fs::create_dir(place.path(name)).unwrap();
    }
    let script = "mount -t tmpfs -o ro none swap && mount -t tmpfs -o ro none runtime && \
                  TMPDIR=$PWD/swap XDG_RUNTIME_DIR=$PWD/runtime \"$0\" doctor";
    let ended = place.with_own_mounts(script);
    assert_eq!(ended.status, 1, "{}", ended.out);
    for line in ["LACKS  swap ", "LACKS  socket "] {
        let said = ended.out.lines().find(|said| said.starts_with(line));
        assert!(
            said.is_some_and(|said| said.ends_with("cannot be made: read-only file system")),
            "{}",
            ended.out
        );
    }
    let remedies = ["set TMPDIR to a directory on a disk", "set XDG_RUNTIME_DIR to a directory of your own"];
    assert!(remedies.iter().all(|remedy| ended.out.contains(remedy)), "{}", ended.out);
}

/// Nothing was found, and the advice was for another thing: the size of memory was looked for first.
#[test]
fn without_proc_doctor_and_run_say_to_mount_it() {
    if !is_root() || !can_unshare() {
        return println!("skipped: needs root, and mounts of its own");
    }
    let place = Place::new();
    let said = |mount: &str, settings: &str| {
        // A limit of a control group would do, too.
        let script = format!("mount -t tmpfs none /sys/fs/cgroup && mount {mount} none /proc && {{ \"$0\" doctor {settings}; echo $?; exec \"$0\" run {settings} true; }}");
        place.with_own_mounts(&script)
    };
    let ended = said("-t tmpfs", "");
    let lack = "LACKS  /proc        not mounted\n                    mount it: mount -t proc proc /proc\n";
    assert!(ended.out.starts_with(lack) && ended.out.ends_with(" things are lacking\n1\n"), "{}", ended.out);
    assert!(ended.out.contains(" agent "), "{}", ended.out);
    let line = "pageout: /proc: not mounted; mount it: mount -t proc proc /proc\n";
    assert_eq!((ended.status, ended.err.as_str()), (125, line));
    // Processes only. A size is as good as all of it.
    let ended = said("-t proc -o subset=pid", "");
    let lack =
        "LACKS  limit        default 80%: /proc/meminfo does not say of how much\n                    \
                mount all of /proc: mount -t proc proc /proc; or give a size with -m, as 4G\n";
    assert!(ended.out.contains(lack) && ended.out.ends_with("one thing is lacking\n1\n"), "{}", ended.out);
    let line = "pageout: default 80%: /proc/meminfo does not say of how much; give a size with -m, as 4G\n";
    assert_eq!((ended.status, ended.err.as_str()), (125, line));
    let ended = said("-t proc -o subset=pid", "-m 64M");
    assert!(ended.out.contains("weak   memory ") && ended.out.ends_with("works here\n0\n"), "{}", ended.out);
    assert_eq!((ended.status, ended.err.as_str()), (0, ""));
}

#[test]
fn doctor_tells_users_what_to_ask_root_for() {
    if !is_root() {
        return;
    }
    let place = Place::new();
    let program = std::env::temp_dir().join(format!("pageout-doctor-{}", std::process::id()));
    common::copy_program(env!("CARGO_BIN_EXE_pageout"), &program);
    let mut command = Command::new("setpriv");
    command.args(["--reuid=65534", "--regid=65534", "--clear-groups"]).arg(&program).arg("doctor");
    place.prepare(&mut command);
    let ended = finish(command.current_dir("/").env("HOME", "/nonexistent").env("TMPDIR", "/tmp"));
    std::fs::remove_file(&program).unwrap();
    assert!(ended.out.contains("LACKS  userfaultfd  /dev/userfaultfd: permission denied"), "{}", ended.out);
    assert!(ended.out.contains("as root: setfacl -m u:USER:rw /dev/userfaultfd"), "{}", ended.out);
    assert_eq!(ended.status, 1);
}

#[test]
fn manual_completions_help_and_version() {
    let place = Place::new();
    for (args, word) in [
        (vec!["man"], ".SH \"SWAP DEVICES\""),
        (vec!["completions", "bash"], "--max-order"),
        (vec!["completions", "zsh"], "#compdef pageout"),
        (vec!["completions", "fish"], "complete -c pageout"),
        (vec!["run", "--help"], "--swapin <WHEN>"),
        (vec!["help", "run"], "--swapin <WHEN>"),
        (vec!["--version"], "pageout "),
    ] {
        let ended = finish(&mut place.pageout(&args));
        assert_eq!((ended.status, ended.err.as_str()), (0, ""), "{args:?}");
        assert!(ended.out.contains(word), "{args:?}");
    }
}

#[test]
fn who_cannot_write_says_so() {
    let place = Place::new();
    for verb in ["ps", "show --summary", "doctor", "man", "completions bash", "--help", "run -n true"] {
        let script = format!("exec {} {verb} >/dev/full", env!("CARGO_BIN_EXE_pageout"));
        let ended = finish(place.prepared("sh").args(["-c", &script]));
        let line = "pageout: standard output: no space left on device\n";
        assert_eq!((ended.status, ended.err.as_str()), (125, line), "{verb}");
    }
}

#[test]
fn bench_is_the_program_beside() {
    let place = Place::new();
    let beside = place.path("pageout");
    // By another process: a child of another test may hold open what this one has written.
    let sh = |script: &str| {
        let to = ["-c", script, "sh", env!("CARGO_BIN_EXE_pageout"), beside.to_str().unwrap()];
        assert_eq!(finish(place.prepared("sh").args(to)).status, 0, "{script}");
    };
    sh(r#"cp "$1" "$2""#);
    let ended = finish(place.prepared(beside.to_str().unwrap()).args(["bench", "quick"]).env("PATH", "/"));
    let line = "pageout: pageout-bench: no such file or directory; \
                in pageout's source: cargo install --locked --path crates/pageout-bench\n";
    assert_eq!((ended.status, ended.err.as_str()), (125, line));
    sh(r##"printf '#!/bin/sh\necho "$@"\nexit 3\n' > "$2-bench" && chmod 700 "$2-bench""##);
    let ended = finish(place.prepared(beside.to_str().unwrap()).args(["bench", "quick", "--help"]));
    assert_eq!((ended.status, ended.out.as_str()), (3, "quick --help\n"));
}

#[test]
fn readers_that_have_seen_enough_are_no_error() {
    let place = Place::new();
    let script = format!("{} man | head -1 >/dev/null", env!("CARGO_BIN_EXE_pageout"));
    let ended = finish(place.prepared("sh").args(["-c", &script]));
    assert_eq!((ended.status, ended.err.as_str()), (0, ""));
}
