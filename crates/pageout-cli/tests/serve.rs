//! What processes of a run are served: settings, trunks, and an end that never lets them read zeros.
//!
//! The program under `pageout run` is this test itself, which plays its own keeper: a test named `role` that does
//! what PAGEOUT_TEST_ROLE says and exits. With the variable unset it is empty.

mod common;
#[allow(dead_code)]
#[path = "../src/sys.rs"]
mod sys;

use std::ffi::OsStr;
use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::os::fd::{AsFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{exit, Command, Stdio};
use std::sync::atomic::Ordering::Relaxed;
use std::thread;
use std::time::{Duration, Instant};

use common::{finish, wait, Ended, Place};
use pageout::slot::{DeviceId, Entry};
use pageout::stats::STATS_BYTES;
use pageout::swap::heir::AREAS_AT;
use pageout::tree::{SEATS, TREE_BYTES};
use pageout::wire::{
    Kind, Message, Settings, BYE_ASIDE, BYE_ENDED, BYE_EXEC, BYE_STOP, CLUSTER_SLOTS, DISCARDS, ENV_RUN,
    HEADER, NONE, ROTATIONAL, VERSION,
};
use pageout_uffd::fd::IntoRawFd;
use pageout_uffd::{Features, RegisterMode, Uffd};

const ROLE: &str = "PAGEOUT_TEST_ROLE";

/// A keeper's end of the protocol.
struct Keeper {
    socket: OwnedFd,
}

impl Keeper {
    fn connect() -> Self {
        let path = PathBuf::from(std::env::var_os(ENV_RUN).expect("run names its socket"));
        loop {
            match sys::connect_to(&path) {
                // As many as may wait do: a keeper waits in its call.
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    std::thread::sleep(Duration::from_millis(1));
                }
                socket => return Self { socket: socket.unwrap() },
            }
        }
    }

    /// Connects and says hello; what it is told, counters, the tree and devices.
    fn welcomed() -> (Self, Message, sys::Mapping, sys::Mapping, Vec<File>) {
        let keeper = Self::connect();
        keeper.say(Kind::Hello, u64::from(std::process::id()), 0, VERSION);
        let (message, fds) = keeper.hear().expect("a welcome");
        let mut files = fds.into_iter().map(File::from);
        let stats = sys::Mapping::of(&files.next().unwrap(), STATS_BYTES).unwrap();
        let tree = sys::Mapping::of(&files.next().unwrap(), TREE_BYTES).unwrap();
        assert_eq!((tree.tree().used(), tree.tree().resident()), (0, 0));
        (keeper, message, stats, tree, files.collect())
    }

    /// The same; settings, counters and devices.
    fn served() -> (Self, Settings, sys::Mapping, Vec<File>) {
        let (keeper, message, stats, _, devices) = Self::welcomed();
        (keeper, message.settings().unwrap(), stats, devices)
    }

    fn say(&self, kind: Kind, a: u64, b: u64, c: u64) {
        sys::send(self.socket.as_fd(), Message::new(kind, a, b, c).as_bytes(), &[]).unwrap();
    }

    fn hold(&self, fd: &impl AsFd) {
        sys::send(self.socket.as_fd(), Message::new(Kind::Holding, 0, 0, 0).as_bytes(), &[fd.as_fd()])
            .unwrap();
    }

    /// Keeps a bequest for a child of a fork that is about to come.
    fn bequeath(&self, token: u64, file: &File) {
        let message = Message::new(Kind::Bequest, token, 0, 0);
        sys::send(self.socket.as_fd(), message.as_bytes(), &[file.as_fd()]).unwrap();
    }

    /// Asks for it; whether it is there.
    fn inherits(&self, token: u64) -> bool {
        self.say(Kind::Inherit, token, 0, 0);
        self.hear().is_some_and(|(answer, _)| answer.a == token)
    }

    fn log(&self, level: u64, text: &str) {
        let message = Message::with_text(Kind::Log, level, text.as_bytes());
        sys::send(self.socket.as_fd(), message.as_bytes(), &[]).unwrap();
    }

    /// The next message but a call for trunks; none at the end of the connection.
    fn hear(&self) -> Option<(Message, Vec<OwnedFd>)> {
        loop {
            match self.hear_any() {
                Some((message, _)) if message.kind == Kind::Short as u32 => {}
                heard => return heard,
            }
        }
    }

    /// The next message; none at the end of the connection.
    fn hear_any(&self) -> Option<(Message, Vec<OwnedFd>)> {
        sys::poll(&[(self.socket.as_fd(), libc::POLLIN)], Some(Duration::from_secs(10))).unwrap();
        let mut message = Message::new(Kind::Bye, 0, 0, 0);
        let (len, fds) =
            sys::receive(self.socket.as_fd(), message.as_bytes_mut()).expect("an answer in time");
        (len > 0).then_some((message, fds))
    }

    fn lease(&self, device: u64) -> u64 {
        self.say(Kind::Lease, device, 0, 0);
        let (answer, _) = self.hear().unwrap();
        assert_eq!((Kind::from_raw(answer.kind), answer.a), (Some(Kind::Leased), device));
        answer.b
    }

    /// All trunks that are left.
    fn lease_all(&self, device: u64) -> Vec<u64> {
        std::iter::from_fn(|| Some(self.lease(device)).filter(|trunk| *trunk != NONE)).collect()
    }
}

/// What the child does.
#[test]
fn role() {
    let Ok(role) = std::env::var(ROLE) else { return };
    match role.as_str() {
        "settings" => settings_role(),
        "trunks" => trunks_role(),
        "giver" => giver_role(),
        "forker" | "waiter" => forker_role(&role),
        "rester" => rester_role(),
        "fleeting" => fleeting_role(),
        "writer" => writer_role(),
        "successor" => successor_role(),
        "stranded" => stranded_role(),
        "stranded daemon" => stranded_daemon_role(),
        "survivor" => survivor_role(),
        "relay" => relay_role(),
        "leaver" => leaver_role(),
        "hasty" => hasty_role(),
        "quitter" => quitter_role(),
        "daemon" => daemon_role(),
        "killed parent" => killed_parent_role(),
        "cleared" => cleared_role(|program| program.env_clear()),
        "without its run" => cleared_role(|program| program.env_remove(ENV_RUN)),
        "anew" => anew_role(),
        "unusable" => two_say(Kind::Unusable, "permission denied"),
        "cleared and large" => large_role(Command::new("/bin/sh").env_clear()),
        "nested and large" => {
            let mut run = Command::new(env!("CARGO_BIN_EXE_pageout"));
            large_role(run.args(["run", "-q", "-s", "mem,size=64M", "/bin/sh"]))
        }
        "other user" => other_user_role(),
        "other root" => other_root_role(),
        "aside" => aside_role(),
        "unlimited" => two_say(Kind::Unlimited, "because"),
        "bereaved" => bereaved_role(),
        "late parent" => late_parent_role(),
        "two heirs" => two_heirs_role(),
        "nest" => nest_role(),
        "halted" => halted_role(),
        "rude" => rude_role(),
        "loser" => loser_role(),
        other => panic!("no role {other}"),
    }
    std::io::stdout().flush().unwrap();
    exit(0);
}

fn myself(role: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["role", "--exact", "--nocapture"]).env(ROLE, role);
    command
}

/// Runs `role` under `pageout run ARGS`; what the role printed is behind the harness's own first lines.
fn run(place: &Place, role: &str, args: &[&str]) -> Ended {
    finish(&mut prepared(place, role, args))
}

fn prepared(place: &Place, role: &str, args: &[&str]) -> Command {
    let program = std::env::current_exe().unwrap();
    let mut command = place.pageout([&["run"], args].concat());
    command.arg(program).args(["role", "--exact", "--nocapture"]).env(ROLE, role);
    command
}

fn settings_role() {
    let (_keeper, settings, stats, devices) = Keeper::served();
    assert_eq!(settings.limit_bytes, 100 << 20);
    assert_eq!((settings.swapin, settings.max_order, devices.len()), (3, 4, 2));
    assert_eq!(settings.device[0].priority, 5);
    assert_eq!(
        (settings.device[0].flags, settings.device[1].flags),
        (ROTATIONAL | DISCARDS, DISCARDS | HEADER)
    );
    assert_eq!((settings.device[1].slots, settings.device[1].trunk_clusters), (100 * CLUSTER_SLOTS, 1));
    devices.iter().for_each(|device| device.write_all_at(b"page", 4096).unwrap());
    stats.stats().pswpout.store(77, Relaxed);
}

#[test]
fn processes_get_settings_counters_and_devices() {
    let place = Place::new();
    let ended = run(
        &place,
        "settings",
        &[
            "-m100M",
            "--swapin=never",
            "--max-order=4",
            "-s",
            "mem,size=64M,pri=5,rotational",
            "-s",
            "x,size=200M",
            "--stats=out",
            "--",
        ],
    );
    assert_eq!((ended.status, ended.err.as_str()), (0, ""), "{}", ended.out);
    let json: serde_json::Value = serde_json::from_reader(File::open(place.path("out")).unwrap()).unwrap();
    assert_eq!(json["pswpout"], 77);
    assert_eq!(json["processes"][0]["pswpout"], 77);
    assert_eq!(json["processes"][0]["pid"], json["pid"]);
}

/// Takes all trunks, gives one back, takes it again, and leaves the rest to whoever comes next.
fn trunks_role() {
    let (keeper, _, _, devices) = Keeper::served();
    assert_eq!(keeper.lease_all(0), (0..96).collect::<Vec<_>>());
    // Each has its room before anything is written; file systems without fallocate give none.
    let room = || devices[0].metadata().unwrap().blocks() * 512;
    assert!(room() == 0 || room() >= 96 * CLUSTER_SLOTS * 4096);
    keeper.say(Kind::Return, 0, 1, 0);
    assert_eq!((keeper.lease(0), keeper.lease(0)), (1, NONE));
    devices[0].write_all_at(&[1; 4096], 4096).unwrap();
    drop(keeper);
    let status = myself("successor").status().unwrap();
    assert!(status.success());
}

fn successor_role() {
    let (keeper, _, _, devices) = Keeper::served();
    let mut lent = keeper.lease_all(0);
    lent.sort_unstable();
    assert_eq!(lent, (0..96).collect::<Vec<_>>());
    let mut page = [2; 4096];
    devices[0].read_exact_at(&mut page, 4096).unwrap();
    assert_eq!(page, [0; 4096], "what the dead left is not for others to read");
}

#[test]
fn trunks_are_lent_once_and_come_back() {
    let place = Place::new();
    let ended = run(&place, "trunks", &["-s", "x,size=192M", "--"]);
    assert_eq!((ended.status, ended.err.as_str()), (0, ""), "{}", ended.out);
}

fn rester_role() {
    let ((rests, welcome, _, tree, _), (grows, other, ..)) = (Keeper::welcomed(), Keeper::welcomed());
    let [first, second] = [welcome, other].map(|welcome| welcome.a as usize);
    let hears = |keeper: &Keeper, millis| {
        let timeout = Some(Duration::from_millis(millis));
        sys::poll(&[(keeper.socket.as_fd(), libc::POLLIN)], timeout).unwrap()[0] != 0
    };
    let lack = || {
        tree.tree().seat(first).tell(100 << 20, 100 << 20, false);
        tree.tree().seat(second).tell(20 << 20, 20 << 20, true);
    };
    let begun = Instant::now();
    while !hears(&rests, 5) {
        lack();
        assert!(begun.elapsed() < Duration::from_secs(5), "nobody says that it is needed");
    }
    // Who is stopped finds one call, whatever the time: they would fill its socket.
    for _ in 0..100 {
        lack();
        thread::sleep(Duration::from_millis(5));
    }
    let mut calls = 0;
    while hears(&rests, 0) {
        assert_eq!(rests.hear_any().unwrap().0.kind, Kind::Needed as u32);
        calls += 1;
    }
    assert!((1..5).contains(&calls), "called {calls} times");
    assert!(!hears(&grows, 100), "who has less than its share gives nothing");
}

#[test]
fn who_rests_is_told_that_others_lack_what_it_has() {
    let ended = run(&Place::new(), "rester", &["-m", "128M", "--"]);
    assert_eq!((ended.status, ended.err.as_str()), (0, ""), "{}", ended.out);
}

/// A trunk that comes back while its process lives is another's, whoever reads from the others that it had when it forked.
fn giver_role() {
    let ((giver, ..), (taker, ..), (heir, ..)) = (Keeper::served(), Keeper::served(), Keeper::served());
    assert_eq!(giver.lease_all(0).len(), 32);
    giver.bequeath(1, &sys::memfd(c"bequest", AREAS_AT as u64, true).unwrap());
    assert!(heir.inherits(1));
    thread::sleep(Duration::from_millis(100));
    assert_eq!(taker.lease(0), NONE);
    let (call, _) = giver.hear_any().unwrap();
    assert_eq!(call.kind, Kind::Short as u32, "whoever has trunks is asked for those that are empty");
    giver.say(Kind::Return, 0, 7, 0);
    let begun = Instant::now();
    while taker.lease(0) != 7 {
        assert!(begun.elapsed() < Duration::from_secs(5), "the trunk that came back is lent");
    }
    assert_eq!(taker.lease(0), NONE);
    for gone in [taker, giver] {
        drop(gone);
        let (next, ..) = Keeper::served();
        let begun = Instant::now();
        while next.lease(0) != 7 {
            assert!(begun.elapsed() < Duration::from_secs(5), "nobody reads from it");
        }
        assert_eq!(next.lease(0), NONE, "but from the others");
    }
    heir.say(Kind::Apart, 0, 0, 0);
    let (next, ..) = Keeper::served();
    let begun = Instant::now();
    let mut leased = 0;
    while leased < 31 {
        leased += next.lease_all(0).len();
        assert!(begun.elapsed() < Duration::from_secs(5), "nobody reads from the others");
    }
}

#[test]
fn trunks_come_back_while_their_process_lives() {
    let place = Place::new();
    let ended = run(&place, "giver", &["-s", "mem,size=64M", "--"]);
    assert_eq!((ended.status, ended.err.as_str()), (0, ""), "{}", ended.out);
}

/// One who says that he ends may have writes under way until he is gone.
fn writer_role() {
    let ((writer, ..), (next, ..)) = (Keeper::served(), Keeper::served());
    assert_eq!(writer.lease_all(0).len(), 32);
    writer.say(Kind::Bye, BYE_EXEC, 0, 0);
    thread::sleep(Duration::from_millis(100));
    assert_eq!(next.lease(0), NONE);
    drop(writer);
    let begun = Instant::now();
    while next.lease(0) == NONE {
        assert!(begun.elapsed() < Duration::from_secs(5), "nobody writes there any more");
    }
}

#[test]
fn trunks_come_back_when_nobody_writes_there_any_more() {
    let place = Place::new();
    let ended = run(&place, "writer", &["-s", "mem,size=64M", "--"]);
    assert_eq!((ended.status, ended.err.as_str()), (0, ""), "{}", ended.out);
}

/// Its keeper dies while a page is out: it must not read that page as zeros.
fn stranded_role() {
    println!("read {}", stranded(|| ()));
}

/// The same, once it is `served`; says `alone` by a file before it reads. What it read, if it ever does.
fn stranded(served: impl FnOnce()) -> u8 {
    let len = 4096;
    // SAFETY: a new private mapping.
    let page = unsafe {
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        libc::mmap(std::ptr::null_mut(), len, prot, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0)
    };
    let uffd = Uffd::open(Features::empty(), true).unwrap();
    // SAFETY: our mapping, which nobody uses yet.
    unsafe { uffd.register(page as usize, len, RegisterMode::MISSING).unwrap() };
    // SAFETY: a descriptor that is open and only ours.
    let uffd = unsafe { OwnedFd::from_raw_fd(uffd.into_fd().into_raw_fd()) };
    let (keeper, ..) = Keeper::served();
    keeper.hold(&uffd);
    served();
    // What a keeper that is killed does: everything of its own is closed, in whatever order.
    drop(keeper);
    drop(uffd);
    File::create("alone").unwrap();
    // SAFETY: our mapping.
    unsafe { page.cast::<u8>().read_volatile() }
}

#[test]
fn a_process_whose_keeper_died_is_killed_and_never_reads_zeros() {
    let place = Place::new();
    let begin = Instant::now();
    let ended = run(&place, "stranded", &["-s", "mem,size=64M", "--"]);
    assert_eq!(ended.status, 1009);
    assert!(!ended.out.contains("read"), "{}", ended.out);
    let line = "its engine ended without a word while memory was swapped out; killed, so that it cannot go on with zeros\n";
    assert!(ended.err.starts_with("pageout: ") && ended.err.ends_with(line), "{}", ended.err);
    assert_eq!(ended.err.lines().count(), 1);
    assert!(begin.elapsed() < Duration::from_secs(5));
}

/// A keeper has as much CPU time as its program, and is killed when that is used up.
#[test]
fn where_cpu_time_is_limited_the_line_says_so() {
    let place = Place::new();
    let program = std::env::current_exe().unwrap();
    let run = ["run", "-s", "mem,size=64M", program.to_str().unwrap(), "role", "--exact", "--nocapture"];
    let ended = finish(place.pageout_after("ulimit -t 1000", &run).env(ROLE, "stranded"));
    let line = "out (it may use 1000 s of CPU time, no more: raise ulimit -Ht); killed, so that it cannot go on with zeros\n";
    assert!(ended.err.ends_with(line), "{}", ended.err);
    assert_eq!((ended.status, ended.err.lines().count()), (1009, 1), "{}", ended.err);
}

/// Ends, which its keeper says.
fn leaver_role() {
    let (keeper, ..) = Keeper::served();
    keeper.hold(&File::open("/dev/null").unwrap());
    keeper.log(1, "a warning");
    keeper.log(2, "unheard");
    keeper.say(Kind::Bye, BYE_ENDED, 0, 0);
    exit(9);
}

#[test]
fn a_process_that_ends_is_not_stranded() {
    let place = Place::new();
    let ended = run(&place, "leaver", &["-s", "mem,size=64M", "--"]);
    assert_eq!((ended.status, ended.err.as_str()), (9, "pageout: a warning\n"));
}

/// Says why it ends while run answers it: an answer lies there unread when the connection ends, or finds nobody.
fn hasty_role() {
    for round in 0..50 {
        let (keeper, ..) = Keeper::served();
        keeper.hold(&File::open("/dev/null").unwrap());
        for _ in 0..4 {
            keeper.say(Kind::Lease, 0, 0, 0);
        }
        if round % 2 == 0 {
            sys::poll(&[(keeper.socket.as_fd(), libc::POLLIN)], Some(Duration::from_secs(10))).unwrap();
        }
        keeper.say(Kind::Bye, BYE_EXEC, 0, 0);
    }
    // Longer than the grace of those that are stranded.
    thread::sleep(Duration::from_millis(1500));
    exit(7);
}

#[test]
fn what_a_keeper_said_before_its_end_is_heard() {
    let place = Place::new();
    let ended = run(&place, "hasty", &["-s", "mem,size=64M", "--"]);
    assert_eq!((ended.status, ended.err.as_str()), (7, ""));
}

/// The engine gives up and says so.
fn quitter_role() {
    let (keeper, ..) = Keeper::served();
    keeper.hold(&File::open("/dev/null").unwrap());
    keeper.log(0, "swap: the device is gone");
    keeper.say(Kind::Bye, BYE_STOP, 0, 0);
    drop(keeper);
    thread::sleep(Duration::from_secs(30));
}

#[test]
fn a_process_whose_engine_stops_is_stopped() {
    let place = Place::new();
    let ended = run(&place, "quitter", &["-s", "mem,size=64M", "--"]);
    assert_eq!((ended.status, ended.err.as_str()), (1009, "pageout: swap: the device is gone\n"));
}

/// Leaves a process behind that is served for a while.
fn daemon_role() {
    if is_child() {
        let (keeper, ..) = Keeper::served();
        println!("serving");
        std::io::stdout().flush().unwrap();
        thread::sleep(Duration::from_millis(600));
        assert_eq!(keeper.lease(0), 0);
        File::create("daemon-was-served").unwrap();
        return;
    }
    leave("daemon");
}

/// Ends and leaves a child that is served: only when it says so may we end.
fn leave(role: &str) -> ! {
    let mut child = myself(role);
    let child = child.env("PAGEOUT_TEST_CHILD", "1").stdout(Stdio::piped()).spawn().unwrap();
    read_until(child.stdout.unwrap(), "serving");
    exit(5);
}

fn read_until(mut from: impl Read, word: &str) {
    let mut read = String::new();
    while !read.contains(word) {
        let mut byte = [0];
        from.read_exact(&mut byte).unwrap();
        read.push(byte[0] as char);
    }
}

fn is_child() -> bool {
    generation() > 0
}

/// How many have handed over before this one.
fn generation() -> u32 {
    std::env::var("PAGEOUT_TEST_CHILD").map_or(0, |number| number.parse().unwrap())
}

#[test]
fn processes_that_the_program_left_are_served_to_their_end() {
    let place = Place::new();
    let begin = Instant::now();
    let ended = run(&place, "daemon", &["-v", "-m", "64M", "-s", "mem,size=64M", "--"]);
    assert_eq!(ended.status, 5);
    let lines =
        "pageout: limit 64M, swap to mem\npageout: the program has ended; staying for the processes that it \
                 left\npageout: 1 process; 0 written to swap, 0 read back\n";
    assert_eq!(ended.err, lines);
    assert!(place.path("daemon-was-served").exists());
    assert!(begin.elapsed() >= Duration::from_millis(600));
}

/// Each leaves another and ends at once: the second is served when the first second is over; the third has something
/// to inherit and takes longer than a second to come.
fn relay_role() {
    let next = || -> ! {
        let number = (generation() + 1).to_string();
        let _next = myself("relay").env("PAGEOUT_TEST_CHILD", number).stdout(Stdio::null()).spawn().unwrap();
        exit(0);
    };
    match generation() {
        0 => leave("relay"),
        1 => {
            let (_keeper, ..) = Keeper::served();
            println!("serving");
            std::io::stdout().flush().unwrap();
            thread::sleep(Duration::from_millis(1100));
            next()
        }
        2 => {
            thread::sleep(Duration::from_millis(200));
            let (keeper, ..) = Keeper::served();
            keeper.bequeath(1, &sys::memfd(c"bequest", AREAS_AT as u64, true).unwrap());
            next()
        }
        _ => {
            thread::sleep(Duration::from_millis(1200));
            assert!(Keeper::served().0.inherits(1));
            File::create("inherited").unwrap();
        }
    }
}

#[test]
fn a_run_stays_while_processes_hand_over() {
    let place = Place::new();
    // Quiet: who takes longer than a second is told of.
    let ended = run(&place, "relay", &["-q", "-s", "mem,size=64M", "--"]);
    assert_eq!((ended.status, ended.err.as_str()), (5, ""));
    assert!(place.path("inherited").exists());
}

/// Forks on while run ends, which was told to: what it has sent for a child is there for the child. Or the child does not come.
fn forker_role(role: &str) {
    if !is_child() {
        // Told to end while it waits.
        return drop(myself(role).env("PAGEOUT_TEST_CHILD", "1").status());
    }
    let (parent, ..) = Keeper::served();
    let bequest = sys::memfd(c"bequest", AREAS_AT as u64, true).unwrap();
    let mut heirs = 0;
    let mut leave = || {
        heirs += 1;
        let message = Message::new(Kind::Bequest, heirs, 0, 0);
        sys::send(parent.socket.as_fd(), message.as_bytes(), &[bequest.as_fd()]).map(|()| heirs)
    };
    let first = leave().unwrap();
    File::create("ready").unwrap();
    if role == "waiter" {
        return assert!(parent.hear().is_none(), "run ends");
    }
    // Longer than run would stay.
    thread::sleep(Duration::from_millis(2500));
    assert!(Keeper::served().0.inherits(first));
    while let Ok(next) = leave() {
        assert!(Keeper::served().0.inherits(next), "{next}");
    }
    File::create("done").unwrap();
}

/// How long a run takes to end, once its program was told to, which has left who does so.
fn time_to_end(place: &Place, role: &str) -> Duration {
    let mut command = prepared(place, role, &["-s", "mem,size=64M", "--"]);
    let mut run = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    await_file(place.path("ready"));
    let begin = Instant::now();
    // SAFETY: a child that is not reaped yet.
    unsafe { libc::kill(run.id() as i32, libc::SIGTERM) };
    assert_eq!(run.wait().unwrap().signal(), Some(libc::SIGTERM));
    begin.elapsed()
}

#[test]
fn a_run_that_was_told_to_end_waits_for_a_forks_child() {
    let place = Place::new();
    assert!(time_to_end(&place, "forker") < Duration::from_secs(6));
    await_file(place.path("done"));
}

#[test]
fn a_run_that_was_told_to_end_does_not_wait_for_ever() {
    let took = time_to_end(&Place::new(), "waiter");
    assert!((6..15).contains(&took.as_secs()), "{took:?}");
}

/// Leaves a process that has a page on a device and a child that reads from there, as after a fork.
fn survivor_role() {
    if !is_child() {
        leave("survivor");
    }
    let (parent, _, _, devices) = Keeper::served();
    assert_eq!(parent.lease(0), 0);
    devices[0].write_all_at(&[7; 4096], 4096).unwrap();
    let bequest = sys::memfd(c"bequest", AREAS_AT as u64, true).unwrap();
    let page = sys::Mapping::of(&bequest, AREAS_AT).unwrap();
    parent.bequeath(1, &bequest);
    let (heir, ..) = Keeper::served();
    assert!(heir.inherits(1));
    println!("serving");
    std::io::stdout().flush().unwrap();
    assert!(parent.hear().is_none(), "the run ends");
    // All that it does has been done when it has gone.
    thread::sleep(Duration::from_millis(200));
    let mut kept = [0; 4096];
    devices[0].read_exact_at(&mut kept, 4096).unwrap();
    let released = page.bequest().released.load(Relaxed);
    let len = devices[0].metadata().unwrap().len();
    std::fs::write("kept", format!("{} {released} {len}", kept[0])).unwrap();
}

/// Runs `role` until it has ended and `sign`, a file, is there, and ends the run's wait.
#[track_caller]
fn interrupted(place: &Place, role: &str, sign: Option<&str>, args: &[&str]) -> Ended {
    let mut command = prepared(place, role, &[&["-v"], args].concat());
    // SAFETY: between fork and exec, takes integers only.
    let mut run = unsafe { command.pre_exec(ignore_hangups).spawn().unwrap() };
    read_until(
        run.stderr.as_mut().unwrap(),
        "the program has ended; staying for the processes that it left\n",
    );
    File::create(place.path("staying")).unwrap();
    sign.into_iter().for_each(|sign| await_file(place.path(sign)));
    let id = run.id() as i32;
    // SAFETY: a child that is not reaped yet.
    let send = |signal| unsafe { libc::kill(id, signal) };
    send(libc::SIGHUP);
    thread::sleep(Duration::from_millis(50));
    assert!(run.try_wait().unwrap().is_none(), "ignored at the start, it ends nothing");
    send(libc::SIGTERM);
    wait(run)
}

#[track_caller]
fn await_file(path: impl AsRef<Path>) {
    let patience = Instant::now() + Duration::from_secs(30);
    while !path.as_ref().exists() {
        assert!(Instant::now() < patience);
        thread::sleep(Duration::from_millis(1));
    }
}

fn ignore_hangups() -> std::io::Result<()> {
    // SAFETY: needs no handler.
    unsafe { libc::signal(libc::SIGHUP, libc::SIG_IGN) };
    Ok(())
}

#[test]
fn those_who_outlive_the_run_keep_what_they_have_out() {
    let place = Place::new();
    place.file("empty", b"", 0o600);
    for (spec, len) in
        [("mem,size=64M", 64 << 20), ("new,size=64M", 64 << 20), ("empty,size=128M", 128 << 20)]
    {
        let ended = interrupted(&place, "survivor", None, &["-s", spec, "--stats=out", "--"]);
        let told = "pageout: ended by signal 15; processes that the program left (2) go on with what they have, and what \
            they execute has no limit\n\
            pageout: 2 processes; 0 written to swap, 0 read back\n";
        assert_eq!((ended.status, ended.err.as_str()), (5, told), "{spec}");
        let kept = std::fs::read_to_string(place.path("kept")).unwrap();
        assert_eq!(kept, format!("7 0 {len}"), "{spec}");
        let json: serde_json::Value =
            serde_json::from_reader(File::open(place.path("out")).unwrap()).unwrap();
        assert_eq!(json["processes"].as_array().unwrap().len(), 2);
        assert_eq!(json["swap_lost_bytes"], 0);
    }
    assert!(!place.path("new").exists());
}

/// Ends after a fork whose child was killed before it came.
fn bereaved_role() {
    let (keeper, _, _, devices) = Keeper::served();
    assert_eq!(keeper.lease(0), 0);
    devices[0].write_all_at(&[7; 4096], 4096).unwrap();
    keeper.bequeath(1, &sys::memfd(c"bequest", AREAS_AT as u64, true).unwrap());
}

#[test]
fn a_child_that_never_came_leaves_nothing_in_files() {
    let place = Place::new();
    let swap = place.sparse("swap", 64 << 20);
    let ended = run(&place, "bereaved", &["-s", "swap", "--stats=out", "--"]);
    assert_eq!((ended.status, ended.err.as_str()), (0, ""));
    assert!(std::fs::read(swap).unwrap().iter().all(|byte| *byte == 0));
    let json: serde_json::Value = serde_json::from_reader(File::open(place.path("out")).unwrap()).unwrap();
    assert_eq!(json["swap_lost_bytes"], 0);
}

/// Says who its children are: one that has ended, and one that lives.
fn two_heirs_role() {
    let (keeper, ..) = Keeper::served();
    let mut ended = Command::new("true").spawn().unwrap();
    ended.wait().unwrap();
    for (token, child) in [(1, ended.id()), (2, std::process::id())] {
        keeper.bequeath(token, &sys::memfd(c"bequest", AREAS_AT as u64, true).unwrap());
        keeper.say(Kind::Born, token, child.into(), 0);
    }
    // Longer than until it is looked again whether they live.
    thread::sleep(Duration::from_millis(1200));
    std::fs::write("kept", format!("{} {}", keeper.inherits(1), keeper.inherits(2))).unwrap();
}

#[test]
fn nothing_is_kept_for_a_child_that_has_ended() {
    let place = Place::new();
    let ended = run(&place, "two heirs", &["-s", "mem,size=64M", "--"]);
    assert_eq!((ended.status, ended.err.as_str()), (0, ""));
    assert_eq!(std::fs::read_to_string(place.path("kept")).unwrap(), "false true");
}

/// Run falls behind, and hears of a child before all that its parent has said before it was made.
fn late_parent_role() {
    let ((parent, ..), (child, ..)) = (Keeper::served(), Keeper::served());
    let run = std::os::unix::process::parent_id() as i32;
    sys::kill(run, libc::SIGSTOP).unwrap();
    // Until it waits for nothing any more.
    thread::sleep(Duration::from_millis(100));
    // More than is heard of one in a turn.
    (0..100).for_each(|_| parent.log(3, ""));
    parent.bequeath(1, &sys::memfd(c"bequest", AREAS_AT as u64, true).unwrap());
    child.say(Kind::Inherit, 1, 0, 0);
    sys::kill(run, libc::SIGCONT).unwrap();
    let (answer, files) = child.hear().unwrap();
    std::fs::write("got", format!("{} {} {}", answer.a, files.len(), child.inherits(2))).unwrap();
}

#[test]
fn a_child_gets_what_its_parent_left_however_late_that_is_heard() {
    let place = Place::new();
    let ended = run(&place, "late parent", &["-s", "mem,size=64M", "--"]);
    assert_eq!((ended.status, ended.err.as_str()), (0, ""));
    assert_eq!(std::fs::read_to_string(place.path("got")).unwrap(), "1 1 false");
}

/// One is killed as it forks, and has all trunks: another gets them.
fn killed_parent_role() {
    let (keeper, ..) = Keeper::served();
    if is_child() {
        assert!(!keeper.lease_all(0).is_empty());
        // Nobody else has begun since run last looked whether anybody said something: half a second at most.
        thread::sleep(Duration::from_millis(700));
        keeper.hold(&File::open("/dev/null").unwrap());
        keeper.bequeath(1, &sys::memfd(c"bequest", AREAS_AT as u64, true).unwrap());
        // What its keeper says right after.
        keeper.say(Kind::Bye, BYE_ENDED, 0, 0);
        sys::kill(std::process::id() as i32, libc::SIGKILL).unwrap();
    }
    let killed = myself("killed parent").env("PAGEOUT_TEST_CHILD", "1").status().unwrap();
    assert_eq!(killed.signal(), Some(libc::SIGKILL));
    let patience = Instant::now() + Duration::from_secs(30);
    while keeper.lease(0) == NONE {
        assert!(Instant::now() < patience);
        thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn the_child_of_who_was_killed_as_it_forked_is_not_waited_for() {
    let ended = run(&Place::new(), "killed parent", &["-s", "mem,size=64M", "--"]);
    assert_eq!((ended.status, ended.err.as_str()), (0, ""), "{}", ended.out);
}

/// Leaves a process whose keeper dies.
fn stranded_daemon_role() {
    if !is_child() {
        leave("stranded daemon");
    }
    println!("serving");
    std::io::stdout().flush().unwrap();
    // What run says of it comes after what it says of the program.
    std::fs::write("read", [stranded(|| await_file("staying"))]).unwrap();
}

#[test]
fn who_has_no_keeper_does_not_outlive_the_run() {
    let place = Place::new();
    let ended = interrupted(&place, "stranded daemon", Some("alone"), &["-s", "mem,size=64M", "--"]);
    assert_eq!(ended.status, 5);
    assert!(ended.err.contains("killed, so that it cannot go on with zeros\n"), "{}", ended.err);
    assert!(!place.path("read").exists());
}

/// Its keeper finds nothing to do.
fn aside_role() {
    let (keeper, ..) = Keeper::served();
    keeper.say(Kind::Bye, BYE_ASIDE, 0, 0);
    drop(keeper);
    thread::sleep(Duration::from_millis(1500));
}

#[test]
fn a_process_whose_keeper_stepped_aside_is_no_stray() {
    let place = Place::new();
    let ended = run(&place, "aside", &["--strict", "-m", "max", "-s", "mem,size=64M", "--"]);
    assert_eq!((ended.status, ended.err.as_str()), (0, ""));
}

/// Its keepers, as those of forks, say this.
fn two_say(kind: Kind, why: &str) {
    for _ in 0..2 {
        let (keeper, ..) = Keeper::served();
        let message = Message::with_text(kind, 0, why.as_bytes());
        sys::send(keeper.socket.as_fd(), message.as_bytes(), &[]).unwrap();
    }
    thread::sleep(Duration::from_millis(1500));
}

#[test]
fn who_cannot_be_limited_is_told_of_once() {
    let ended = run(&Place::new(), "unlimited", &["-s", "mem,size=64M", "--"]);
    assert!(ended.err.ends_with("): cannot be limited: because\n"), "{}", ended.err);
    assert_eq!((ended.status, ended.err.lines().count()), (0, 1), "{}", ended.err);
}

/// Names are any bytes.
const ODD: &[u8] = b"./sl\xffp";

/// Starts a program that no library is preloaded into, or that does not know its run.
fn cleared_role(clear: fn(&mut Command) -> &mut Command) {
    let (_keeper, ..) = Keeper::served();
    let status = clear(Command::new(OsStr::from_bytes(ODD)).arg("3")).status().unwrap();
    println!("{status}");
}

#[test]
fn descendants_without_the_agent_are_told_of_or_killed() {
    let place = Place::new();
    std::os::unix::fs::symlink("/bin/sleep", place.path(OsStr::from_bytes(ODD))).unwrap();
    let tried = &|(role, effect)| {
        let line = format!(
            "(sl\u{fffd}p): its environment was cleared, so {effect} (keep LD_PRELOAD and PAGEOUT_RUN); "
        );
        let told = run(&place, role, &["-s", "mem,size=64M", "--"]);
        assert!(told.err.contains(&format!("{line}its memory is not limited, but counts\n")), "{}", told.err);
        assert_eq!((told.err.lines().count(), told.status), (1, 0));
        let killed = run(&place, role, &["--strict", "-s", "mem,size=64M", "--"]);
        assert!(killed.err.contains(&format!("{line}killed (--strict)\n")), "{}", killed.err);
        assert!(killed.out.contains("signal: 9"), "{}", killed.out);
    };
    let cases = [
        ("cleared", "pageout was not preloaded"),
        // It was taken for one that is being loaded, for half a minute.
        ("without its run", "pageout's agent has no run there"),
    ];
    thread::scope(|scope| cases.map(|case| scope.spawn(move || tried(case))).map(drop));
}

/// With `--strict` it was said to be killed, and did not count.
#[test]
fn who_may_not_be_killed_is_told_of_and_counts() {
    let caps = ["--inh-caps=+sys_ptrace,+setuid", "--ambient-caps=+sys_ptrace,+setuid"];
    let may = || Command::new("setpriv").args(caps).arg("true").status().is_ok_and(|status| status.success());
    if !common::is_root() || !may() {
        return println!("skipped: not root, or without CAP_SYS_PTRACE or CAP_SETUID");
    }
    let place = Place::new();
    let open = std::env::temp_dir().join(format!("pageout-strict-{}", std::process::id()));
    std::fs::create_dir(&open).unwrap();
    std::os::unix::fs::chown(&open, Some(65534), Some(65534)).unwrap();
    common::copy_program(env!("CARGO_BIN_EXE_pageout"), &open.join("program"));
    // What becomes root for good, as by su or sudo: here whoever runs it may do both, and use userfaultfd.
    let script = "(setpriv --reuid=0 env -i sleep 30 & for i in $(seq 100); do sleep 0.1; ./program ps | grep -q unlimited && break; done; ./program ps; setpriv --reuid=0 kill $!; wait)";
    let mut command = place.prepared("setpriv");
    command.args(["--reuid=65534", "--regid=65534", "--clear-groups"]);
    command.args(caps);
    command.args(["./program", "run", "--strict", "-m", "64M", "-s", "mem,size=64M", "sh", "-c", script]);
    command.current_dir(&open).env("HOME", &open).env("XDG_RUNTIME_DIR", &open).env("TMPDIR", &open);
    let ended = finish(command.env_remove("PAGEOUT_AGENT"));
    std::fs::remove_dir_all(&open).unwrap();
    let line = "(sleep): runs as another user than pageout (0), who cannot reach its run (run pageout as that user); cannot be \
                killed (operation not permitted); its memory is not limited, but counts\n";
    assert!(ended.err.ends_with(line), "{}", ended.err);
    assert_eq!((ended.status, ended.err.lines().count()), (0, 1), "{}", ended.err);
    let is_shown = |shown: &str| shown.contains(" sleep ") && shown.contains(" unlimited ");
    assert!(ended.out.lines().any(is_shown), "{}", ended.out);
}

/// Starts a program that another library is preloaded into.
fn anew_role() {
    let (_keeper, ..) = Keeper::served();
    let status = Command::new("sleep").arg("3").env("LD_PRELOAD", "libdl.so.2").status().unwrap();
    assert!(status.success());
}

#[test]
fn who_sets_ld_preload_anew_is_told_how_to_add_to_it() {
    let ended = run(&Place::new(), "anew", &["-s", "mem,size=64M", "--"]);
    let line = "(sleep): LD_PRELOAD was set anew, so pageout was not preloaded (add to it: LD_PRELOAD=LIBRARY:$LD_PRELOAD); its \
                memory is not limited, but counts\n";
    assert!(ended.err.ends_with(line), "{}", ended.err);
    assert_eq!((ended.err.lines().count(), ended.status), (1, 0));
}

#[test]
fn a_device_that_cannot_be_used_is_told_of_once_by_its_name() {
    let ended = run(&Place::new(), "unusable", &["-s", "mem,size=64M", "--"]);
    let line = "cannot use mem: permission denied; what finds no room elsewhere stays, beyond the limit if need be\n";
    assert!(ended.err.ends_with(line), "{}", ended.err);
    assert_eq!((ended.err.lines().count(), ended.status), (1, 0), "{}", ended.err);
}

/// A shell without a keeper of this run, with 30 MiB, until its input ends.
fn large_role(shell: &mut Command) {
    const LARGE: u64 = 30 << 20;
    let (_keeper, _, _, tree, _) = Keeper::welcomed();
    let script = format!("x=$(head -c {LARGE} /dev/zero | tr '\\0' x); read y");
    let mut child = shell.arg("-c").arg(script).stdin(Stdio::piped()).spawn().unwrap();
    let patience = Instant::now() + Duration::from_secs(30);
    let until = |is_so: &dyn Fn(u64) -> bool| {
        while !is_so(tree.tree().used()) {
            assert!(Instant::now() < patience, "{}", tree.tree().used());
            thread::sleep(Duration::from_millis(10));
        }
    };
    until(&|used| used >= LARGE);
    let shown = Command::new(env!("CARGO_BIN_EXE_pageout")).args(["ps"]).output().unwrap();
    println!("{}{}", String::from_utf8_lossy(&shown.stdout), String::from_utf8_lossy(&shown.stderr));
    drop(child.stdin.take());
    child.wait().unwrap();
    until(&|used| used == 0);
}

#[test]
fn what_descendants_without_the_agent_have_counts() {
    let ended = run(&Place::new(), "cleared and large", &["-s", "mem,size=64M", "--"]);
    assert_eq!(ended.status, 0, "{}", ended.err);
    assert!(
        ended.out.lines().any(|line| line.contains(" sh ") && line.contains(" unlimited ")),
        "{}",
        ended.out
    );
}

#[test]
fn what_descendants_of_another_run_have_counts() {
    let ended = run(&Place::new(), "nested and large", &["-s", "mem,size=64M", "--"]);
    assert_eq!((ended.status, ended.err.as_str()), (0, ""), "{}", ended.out);
}

/// As an entrypoint of a container does.
fn other_user_role() {
    let (_keeper, ..) = Keeper::served();
    let user = ["--reuid=65534", "--regid=65534", "--clear-groups"];
    Command::new("setpriv").args(user).args(["sleep", "2"]).status().unwrap();
}

/// Whether run says of a descendant that it is not limited; how the line ends. Needs root.
fn is_told_of(role: &str, line: &str) {
    if !common::is_root() {
        println!("skipped: not root");
        return;
    }
    let ended = run(&Place::new(), role, &["-s", "mem,size=64M", "--"]);
    assert!(ended.err.contains(&format!("{line}; its memory is not limited, but counts\n")), "{}", ended.err);
}

#[test]
fn descendants_of_another_user_are_told_of() {
    let line = "(sleep): runs as another user than pageout (65534), who cannot reach its run (run pageout as that user, \
                or with --any-user)";
    is_told_of("other user", line);
}

/// As a sandbox does (Chromium's): another root, in which nothing is executed any more.
fn other_root_role() {
    let (_keeper, ..) = Keeper::served();
    // SAFETY: the child is alone in its memory, and only calls the kernel.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: as above.
        unsafe {
            let done = libc::chroot(c"/tmp".as_ptr());
            libc::sleep(2);
            libc::_exit(done)
        }
    }
    let mut status = 0;
    // SAFETY: a child of ours.
    unsafe { libc::waitpid(child, &raw mut status, 0) };
    exit(status);
}

#[test]
fn descendants_with_another_root_are_told_of() {
    is_told_of("other root", "): has another root than pageout, where neither agent nor run can be reached");
}

/// Starts another run.
fn nest_role() {
    let (_keeper, ..) = Keeper::served();
    let mut run = Command::new(env!("CARGO_BIN_EXE_pageout"));
    let status = run.args(["run", "-q", "-s", "mem,size=64M", "sleep", "1.6"]).status().unwrap();
    exit(status.code().unwrap_or(1));
}

/// Starts a program and stops it for a while.
fn halted_role() {
    let (_keeper, ..) = Keeper::served();
    let mut child = Command::new("sleep").arg("0.1").env_clear().spawn().unwrap();
    // SAFETY: a child that is not reaped yet.
    let send = |signal| unsafe { libc::kill(child.id() as i32, signal) };
    send(libc::SIGSTOP);
    thread::sleep(Duration::from_millis(1600));
    send(libc::SIGCONT);
    exit(child.wait().unwrap().code().unwrap_or(1));
}

#[test]
fn who_is_stopped_or_of_another_run_is_no_stray() {
    let place = Place::new();
    let tried = &|role| {
        let ended = run(&place, role, &["--strict", "-s", "mem,size=64M", "--"]);
        assert_eq!((ended.status, ended.err.as_str()), (0, ""), "{role}");
    };
    thread::scope(|scope| ["nest", "halted"].map(|role| scope.spawn(move || tried(role))).map(drop));
}

/// Its keeper finds that pages cannot be written, and that others cannot be brought back.
fn loser_role() {
    let (_keeper, _, stats, _) = Keeper::served();
    stats.stats().write_errors.store(3, Relaxed);
    let first = Entry::new(DeviceId::new(0).unwrap(), 5);
    stats.stats().lost_at.store(first.raw(), Relaxed);
    stats.stats().poisoned.store(3, Relaxed);
    stats.stats().unmap_refused.store(3, Relaxed);
    thread::sleep(Duration::from_millis(if std::env::var_os("AT_ONCE").is_some() { 0 } else { 500 }));
    stats.stats().write_errors.store(4, Relaxed);
    stats.stats().poisoned.store(4, Relaxed);
}

#[test]
fn data_that_are_lost_or_stay_are_told_of_once() {
    let place = Place::new();
    for at_once in [false, true] {
        let mut command = prepared(&place, "loser", &["-s", "mem,size=64M", "--"]);
        let ended = finish(command.envs(at_once.then_some(("AT_ONCE", "1"))));
        assert!(ended.err.contains("could not be written to swap"), "{}", ended.err);
        assert!(ended.err.contains("swap is memory itself"), "{}", ended.err);
        let lost = "cannot be read back from swap as it was (first: mem at byte 20480), and raises SIGBUS";
        assert!(ended.err.contains(lost), "{}", ended.err);
        assert!(ended.err.contains("refused to unmap it"), "{}", ended.err);
        assert_eq!((ended.status, ended.err.lines().count()), (0, 3), "{}", ended.err);
    }
}

/// Keepers say hello and end, most of them before they have their answer: more than there are seats.
fn fleeting_role() {
    for _ in 0..4 * SEATS {
        let keeper = Keeper::connect();
        keeper.say(Kind::Hello, u64::from(std::process::id()), 0, VERSION);
    }
    let (_keeper, welcome, ..) = Keeper::welcomed();
    assert_ne!(welcome.a, NONE, "no seat is left");
}

#[test]
fn who_ends_before_the_welcome_leaves_the_seat() {
    let ended = run(&Place::new(), "fleeting", &["-s", "mem,size=64M", "--"]);
    assert_eq!(ended.status, 0, "{}{}", ended.out, ended.err);
}

/// Says what nobody understands; others are served all the same.
fn rude_role() {
    let old = Keeper::connect();
    old.say(Kind::Hello, 1, 0, VERSION + 1);
    assert!(old.hear().is_none());
    let early = Keeper::connect();
    early.say(Kind::Lease, 0, 0, 0);
    assert!(early.hear().is_none());
    let (wrong, ..) = Keeper::served();
    wrong.say(Kind::Return, 0, 5, 0);
    assert!(wrong.hear().is_none());
    let short = Keeper::connect();
    sys::send(short.socket.as_fd(), b"hello", &[]).unwrap();
    assert!(short.hear().is_none());
    let (polite, ..) = Keeper::served();
    polite.say(Kind::Lease, 99, 0, 0);
    assert!(polite.hear().is_none());
    assert_eq!(Keeper::served().0.lease(0), 0);
}

#[test]
fn nonsense_ends_a_connection_and_nothing_else() {
    let place = Place::new();
    let ended = run(&place, "rude", &["-s", "mem,size=64M", "--"]);
    assert_eq!(ended.status, 0, "{}{}", ended.out, ended.err);
    assert_eq!(ended.err.lines().count(), 5, "{}", ended.err);
}

/// Where run's socket was, somebody else's may be: in another root, or once its directory is gone.
#[test]
fn who_listens_as_another_user_is_told_nothing() {
    if !common::is_root() {
        return println!("skipped: not root");
    }
    let place = Place::new();
    let agent = finish(place.pageout(["run", "sh", "-c", "echo $LD_PRELOAD"]).env_remove("PAGEOUT_AGENT"));
    assert_eq!((agent.status, agent.err.as_str()), (0, ""));
    let open = std::env::temp_dir().join(format!("pageout-other-{}", std::process::id()));
    std::fs::create_dir(&open).unwrap();
    common::set_mode(&open, 0o777);
    for (user, is_told) in [(0, true), (65533, false)] {
        let path = open.join(user.to_string());
        thread::scope(|scope| {
            let (ready, is_ready) = std::sync::mpsc::channel();
            let listener = scope.spawn({
                let path = &path;
                move || {
                    // SAFETY: numbers only; of this thread alone.
                    assert_eq!(unsafe { libc::syscall(libc::SYS_setresuid, user, user, user) }, 0);
                    let socket = sys::listen_at(path).unwrap();
                    ready.send(()).unwrap();
                    let patient = |act: &mut dyn FnMut() -> std::io::Result<usize>| loop {
                        match act() {
                            Err(e) if e.kind() == ErrorKind::WouldBlock => {
                                thread::sleep(Duration::from_millis(1))
                            }
                            done => return done.unwrap_or(0),
                        }
                    };
                    let mut met = None;
                    patient(&mut || {
                        sys::accept_on(socket.as_fd()).map(|it| met.replace(it).map_or(0, |_| 1))
                    });
                    let met = met.unwrap();
                    patient(&mut || Ok(sys::receive(met.as_fd(), &mut [0; 1024])?.0))
                }
            });
            is_ready.recv().unwrap();
            let mut program = place.prepared("true");
            let ended = finish(program.env("LD_PRELOAD", agent.out.trim_end()).env(ENV_RUN, &path));
            assert_eq!((listener.join().unwrap() > 0, ended.status), (is_told, 0), "{user}: {}", ended.err);
        });
    }
    std::fs::remove_dir_all(&open).unwrap();
}
