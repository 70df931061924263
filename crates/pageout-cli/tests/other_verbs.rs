//! `doctor`, `man`, `completions`, and the help.

mod common;

use std::process::Command;

use common::{finish, is_root, Place};

#[test]
fn doctor_finds_what_run_needs() {
    let place = Place::new();
    let ended = finish(&mut place.pageout(["doctor", "-m", "64M"]));
    assert_eq!((ended.status, ended.err.as_str()), (0, ""), "{}", ended.out);
    for word in
        ["kernel", "userfaultfd", "huge pages", "io_uring", "memory", "limit", "open files", "swap", "agent"]
    {
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
fn doctor_tells_users_what_to_ask_root_for() {
    if !is_root() {
        return;
    }
    let place = Place::new();
    let program = std::env::temp_dir().join(format!("pageout-doctor-{}", std::process::id()));
    std::fs::copy(env!("CARGO_BIN_EXE_pageout"), &program).unwrap();
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
        (vec!["--version"], "pageout "),
    ] {
        let ended = finish(&mut place.pageout(&args));
        assert_eq!((ended.status, ended.err.as_str()), (0, ""), "{args:?}");
        assert!(ended.out.contains(word), "{args:?}");
    }
}

#[test]
fn readers_that_have_seen_enough_are_no_error() {
    let place = Place::new();
    let script = format!("{} man | head -1 >/dev/null", env!("CARGO_BIN_EXE_pageout"));
    let ended = finish(place.prepared("sh").args(["-c", &script]));
    assert_eq!((ended.status, ended.err.as_str()), (0, ""));
}
