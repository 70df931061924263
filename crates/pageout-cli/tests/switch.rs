//! `swapon` and `swapoff` on a run, as its keepers see them.
//!
//! The program under `pageout run` is this test itself, which plays its own keeper and switches devices of its own run:
//! a test named `role` that does what PAGEOUT_TEST_ROLE says. With the variable unset it is empty.

mod common;
#[allow(dead_code)]
#[path = "../src/sys.rs"]
mod sys;

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::{exit, Child, Command, Stdio};
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use common::{finish, wait, Ended, Place};
use pageout::stats::STATS_BYTES;
use pageout::swap::heir::AREAS_AT;
use pageout::wire::{
    DeviceSettings, Kind, Message, Settings, CLUSTER_SLOTS, DISCARDS, ENV_RUN, HEADER, NONE, ROTATIONAL,
    VERSION,
};

const ROLE: &str = "PAGEOUT_TEST_ROLE";

/// A keeper's end of the protocol.
struct Keeper {
    socket: OwnedFd,
    settings: Settings,
    stats: sys::Mapping,
}

impl Keeper {
    fn new() -> Self {
        let path = PathBuf::from(std::env::var_os(ENV_RUN).expect("run names its socket"));
        let socket = sys::connect_to(&path).unwrap();
        say(&socket, Kind::Hello, u64::from(std::process::id()), 0, VERSION);
        let (message, fds) = hear(&socket).expect("a welcome");
        let page = File::from(fds.into_iter().next().unwrap());
        let stats = sys::Mapping::of(&page, STATS_BYTES).unwrap();
        Self { socket, settings: message.settings().unwrap(), stats }
    }

    fn lease(&self, serial: u64) -> u64 {
        say(&self.socket, Kind::Lease, serial, 0, 0);
        let (answer, _) = hear(&self.socket).unwrap();
        assert_eq!((Kind::from_raw(answer.kind), answer.a), (Some(Kind::Leased), serial));
        answer.b
    }

    /// All trunks that are left, which are the first so many.
    fn lease_all(&self, serial: u64) -> u64 {
        (0..)
            .find(|trunk| match self.lease(serial) {
                NONE => true,
                lent => {
                    assert_eq!(lent, *trunk);
                    false
                }
            })
            .unwrap()
    }

    /// Number, settings and file of the device that is given now.
    fn given(&self) -> (u64, DeviceSettings, File) {
        let (message, fds) = hear(&self.socket).unwrap();
        (message.a, message.device().expect("a device"), File::from(fds.into_iter().next().unwrap()))
    }

    #[track_caller]
    fn told(&self, kind: Kind, number: u64, serial: u64) {
        let (message, _) = hear(&self.socket).unwrap();
        assert_eq!((Kind::from_raw(message.kind), message.a, message.b), (Some(kind), number, serial));
    }

    fn gone(&self, number: u64, serial: u64) {
        say(&self.socket, Kind::Gone, number, serial, 0);
    }
}

fn say(socket: &OwnedFd, kind: Kind, a: u64, b: u64, c: u64) {
    sys::send(socket.as_fd(), Message::new(kind, a, b, c).as_bytes(), &[]).unwrap();
}

/// The next message but a call for trunks; none at the end of the connection.
fn hear(socket: &OwnedFd) -> Option<(Message, Vec<OwnedFd>)> {
    loop {
        sys::poll(&[(socket.as_fd(), libc::POLLIN)], Some(Duration::from_secs(10))).unwrap();
        let mut message = Message::new(Kind::Bye, 0, 0, 0);
        let (len, fds) = sys::receive(socket.as_fd(), message.as_bytes_mut()).expect("a message in time");
        if len == 0 || message.kind != Kind::Short as u32 {
            return (len > 0).then_some((message, fds));
        }
    }
}

#[test]
fn role() {
    let Ok(role) = std::env::var(ROLE) else { return };
    match role.as_str() {
        "on and off" => on_and_off(),
        "interrupted" => interrupted(),
        "childless" => childless(),
        "crossing" => crossing(),
        "refusals" => refusals(),
        "others" => others(),
        "warned" => warned(),
        "late" => drop(Keeper::new()),
        other => panic!("no role {other}"),
    }
    exit(0);
}

fn myself(role: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["role", "--exact", "--nocapture"]).env(ROLE, role);
    command
}

fn pageout(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pageout"));
    command.args(args).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

#[track_caller]
fn does(args: &[&str]) -> String {
    let ended = finish(&mut pageout(args));
    assert_eq!((ended.status, ended.err.as_str()), (0, ""), "{args:?}");
    ended.out
}

#[track_caller]
fn refuses(args: &[&str], line: &str) {
    let ended = finish(&mut pageout(args));
    assert_eq!((ended.status, ended.out.as_str()), (125, ""), "{args:?}");
    assert_eq!(ended.err, format!("pageout: {line}\n"));
}

fn show() -> String {
    does(&["show", "--raw", "--noheadings"])
}

/// Runs `role` in a tree with one device of 64 MiB, without a name of its own.
fn run(role: &str) -> Ended {
    let place = Place::new();
    std::fs::create_dir(place.path("r")).unwrap();
    common::set_mode(&place.path("r"), 0o700);
    let mut command = place.pageout(["run", "-m64M", "-s", "mem,size=64M", "--"]);
    command.arg(std::env::current_exe().unwrap()).args(["role", "--exact", "--nocapture"]);
    finish(command.env(ROLE, role).env("XDG_RUNTIME_DIR", place.path("r")))
}

#[track_caller]
fn succeeds(role: &str) {
    let ended = run(role);
    assert_eq!((ended.status, ended.err.as_str()), (0, ""), "{}", ended.out);
}

fn on_and_off() {
    let keeper = Keeper::new();
    let known = keeper.settings.device.iter().filter(|device| device.slots > 0).count();
    assert_eq!((known, keeper.lease(0)), (1, 0));
    does(&["swapon", "x,size=128M,pri=7,rotational"]);
    let (number, settings, file) = keeper.given();
    let expected = DeviceSettings {
        priority: 7,
        flags: ROTATIONAL | DISCARDS | HEADER,
        trunk_clusters: 1,
        slots: 64 * CLUSTER_SLOTS,
        serial: 1,
    };
    assert_eq!((number, settings), (1, expected));
    assert_eq!(keeper.lease_all(1), 64);
    file.write_all_at(&[7; 4096], 0).unwrap();
    let path = std::env::current_dir().unwrap().join("x");
    assert_eq!(show(), format!("mem memory 64M 0 -2\n{} file 128M 0 7\n", path.display()));

    // By the same word.
    let mut off = pageout(&["swapoff", "x,size=128M,pri=7,rotational"]).spawn().unwrap();
    keeper.told(Kind::Off, 1, 1);
    assert_eq!(keeper.lease(1), NONE, "nobody gets more of it");
    let late = myself("late").status().unwrap();
    assert!(late.success(), "who comes now is not given it, and does not keep it");
    assert!(off.try_wait().unwrap().is_none() && path.exists());
    keeper.gone(1, 1);
    assert_eq!(wait(off).status, 0);
    assert_eq!(show(), "mem memory 64M 0 -2\n");
    assert!(!path.exists(), "a name that pageout made goes with the device");
    assert_eq!(keeper.lease(1), NONE, "asked for before it was gone");

    // The number comes again, the serial does not; two of a kind have names of their own.
    does(&["swapon", "mem,size=100M"]);
    let (number, settings, _) = keeper.given();
    assert_eq!((number, settings.serial, settings.priority), (1, 2, -4));
    assert_eq!(show(), "mem memory 64M 0 -2\nmem2 memory 100M 0 -4\n");
    assert_eq!(keeper.lease(2), 0);
    let off = pageout(&["swapoff", "mem"]).spawn().unwrap();
    keeper.told(Kind::Off, 0, 0);
    // Trunks of it go back with it, without a word for each.
    keeper.gone(0, 0);
    assert_eq!(wait(off).status, 0);
    assert_eq!(show(), "mem2 memory 100M 0 -4\n");
}

#[test]
fn devices_come_and_go() {
    succeeds("on and off");
}

#[track_caller]
fn interrupt(mut off: Child) {
    // SAFETY: a child that is not reaped yet.
    unsafe { libc::kill(off.id() as i32, libc::SIGINT) };
    off.wait().unwrap();
}

fn interrupted() {
    let keeper = Keeper::new();
    let off = pageout(&["swapoff", "mem"]).spawn().unwrap();
    keeper.told(Kind::Off, 0, 0);
    assert!(does(&["show", "--json"]).contains("\"leaving\": true"));
    refuses(&["swapoff", "mem"], "mem: on its way off already; wait until it has gone");
    interrupt(off);
    keeper.told(Kind::Stay, 0, 0);
    assert!(does(&["show", "--json"]).contains("\"leaving\": false"));
    assert_eq!(keeper.lease(0), 0, "it is as it was");
    // Taken up again.
    let off = pageout(&["swapoff", "mem"]).spawn().unwrap();
    keeper.told(Kind::Off, 0, 0);
    keeper.gone(0, 0);
    assert_eq!(wait(off).status, 0);
    assert_eq!(show(), "");
}

#[test]
fn who_interrupts_swapoff_leaves_the_device_on() {
    succeeds("interrupted");
}

/// One process has let the device go when it is to stay after all.
fn crossing() {
    let (quick, slow) = (Keeper::new(), Keeper::new());
    let off = pageout(&["swapoff", "mem"]).spawn().unwrap();
    quick.told(Kind::Off, 0, 0);
    slow.told(Kind::Off, 0, 0);
    quick.gone(0, 0);
    // A trunk of it would be lent only to who has it.
    assert_eq!(quick.lease(0), NONE);
    interrupt(off);
    slow.told(Kind::Stay, 0, 0);
    assert_eq!((quick.given().1.serial, quick.lease(0)), (0, 0));
    // Too late to hear that it stays.
    slow.gone(0, 0);
    assert_eq!(slow.given().1.serial, 0);
    let off = pageout(&["swapoff", "mem"]).spawn().unwrap();
    quick.told(Kind::Off, 0, 0);
    slow.told(Kind::Off, 0, 0);
    slow.gone(0, 0);
    // Who ends lets go of everything.
    drop(quick);
    assert_eq!(wait(off).status, 0);
}

#[test]
fn who_let_it_go_is_given_it_again() {
    succeeds("crossing");
}

/// A child that was killed during its fork never comes for what it inherits.
fn childless() {
    let keeper = Keeper::new();
    assert_eq!(keeper.lease(0), 0);
    let bequest = sys::memfd(c"bequest", AREAS_AT as u64, true).unwrap();
    let message = Message::new(Kind::Bequest, 1, 0, 0);
    sys::send(keeper.socket.as_fd(), message.as_bytes(), &[bequest.as_fd()]).unwrap();
    does(&["swapon", "mem,size=64M"]);
    drop(keeper.given());
    let off = pageout(&["swapoff", "mem2"]).spawn().unwrap();
    keeper.told(Kind::Off, 1, 1);
    keeper.gone(1, 1);
    assert_eq!(wait(off).status, 0, "nothing of it is there");
    let mut off = pageout(&["swapoff", "mem"]).spawn().unwrap();
    keeper.told(Kind::Off, 0, 0);
    keeper.gone(0, 0);
    std::thread::sleep(Duration::from_millis(100));
    assert!(off.try_wait().unwrap().is_none(), "it may still come");
    say(&keeper.socket, Kind::Cancel, 1, 0, 0);
    assert_eq!(wait(off).status, 0);
}

#[test]
fn a_child_that_does_not_come_holds_up_only_what_it_would_read() {
    succeeds("childless");
}

fn refusals() {
    let keeper = Keeper::new();
    let takes = "takes PATH or mem, then any of ,size=8G ,pri=5 ,discard ,rotational";
    refuses(&["swapon", "mem,fast"], &format!("mem,fast: fast: {takes}"));
    refuses(&["swapon", "."], &{
        let here = std::env::current_dir().unwrap();
        format!("{0}: is a directory; name a file in it, {0}/swap", here.display())
    });
    for name in ["x", "x,size=64M", "x,y", "mem,size=64M"] {
        let line = format!("{name}: the tree has no such swap device; see pageout show");
        refuses(&["swapoff", name], &line);
    }
    for n in 1..8 {
        does(&["swapon", "mem,size=64M"]);
        assert_eq!((keeper.given().0, n), (n, n));
    }
    refuses(&["swapon", "mem,size=64M"], "8 swap devices are on; swapoff one first");
}

#[test]
fn refused_in_one_line() {
    succeeds("refusals");
}

/// Not whoever reads the program's standard error, which is run's.
fn warned() {
    let keeper = Keeper::new();
    let ended = finish(&mut pageout(&["swapon", "mem,size=1T"]));
    let line = "pageout: mem: size=1T is more than there is of memory for this run, ";
    assert!(ended.err.starts_with(line) && ended.err.lines().count() == 1, "{}", ended.err);
    assert_eq!((ended.status, keeper.given().0), (0, 1));
}

#[test]
fn who_asks_is_warned() {
    succeeds("warned");
}

/// Pages that are there need room elsewhere.
fn others() {
    let keeper = Keeper::new();
    does(&["swapon", "x,size=192M"]);
    drop(keeper.given());
    // Half of them are named by a fork's child as well.
    keeper.stats.stats().device_pages[1].store(2 * 96 * CLUSTER_SLOTS, Relaxed);
    assert_eq!(keeper.lease_all(1), 96);
    let why = "the other devices and the memory below the limit have room for 128M";
    let line = format!("x: 192M of it in use, and {why}; add a device first (pageout swapon)");
    refuses(&["swapoff", "x"], &line);
    // What is in memory as well needs none.
    for out in [32 * CLUSTER_SLOTS, 0] {
        keeper.stats.stats().out_pages.store(out, Relaxed);
        let mut off = pageout(&["swapoff", "x"]).spawn().unwrap();
        keeper.told(Kind::Off, 1, 1);
        off.kill().unwrap();
        off.wait().unwrap();
        keeper.told(Kind::Stay, 1, 1);
    }
    keeper.stats.stats().out_pages.store(96 * CLUSTER_SLOTS, Relaxed);
    does(&["swapon", "mem,size=64M"]);
    drop(keeper.given());
    let off = pageout(&["swapoff", "x"]).spawn().unwrap();
    keeper.told(Kind::Off, 1, 1);
    // What that needs is no room for another.
    let why = "the other devices and the memory below the limit have room for 128M";
    keeper.stats.stats().device_pages[0].store(1, Relaxed);
    let line = format!(
        "mem: 192M of it in use (with what goes already), and {why}; add a device first (pageout swapon)"
    );
    refuses(&["swapoff", "mem"], &line);
    keeper.stats.stats().device_pages[0].store(0, Relaxed);
    keeper.gone(1, 1);
    assert_eq!(wait(off).status, 0);
    assert_eq!(show(), "mem memory 64M 0 -2\nmem2 memory 64M 0 -4\n");
}

#[test]
fn what_has_no_room_elsewhere_stays() {
    succeeds("others");
}
