//! The whole command, against a stand-in for pageout and, where root allows it, the kernel's swap.

use std::collections::BTreeSet;
use std::fs;
use std::io::Write;
use std::os::unix::fs::{symlink, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

const BENCH: &str = env!("CARGO_BIN_EXE_pageout-bench");

/// A directory of the test's own, gone at its end.
struct Dir(PathBuf);

impl Dir {
    fn new(name: &str) -> Dir {
        let dir = std::env::temp_dir().join(format!("pageout-bench-test.{}.{name}", std::process::id()));
        fs::create_dir(&dir).unwrap();
        Dir(dir)
    }

    /// A `pageout` that runs the command without any limit and says it swapped `pages`.
    fn stand_in(&self, pages: u32) -> PathBuf {
        let path = self.0.join("pageout");
        let script = format!(
            r#"#!/bin/sh
while [ "$1" != -- ]; do [ "$1" = --stats ] && stats=$2; shift; done
shift
"$@"
status=$?
echo '{{"pswpin": {pages}, "pswpout": {pages}, "locks": {{"cluster": {{"waits": 1}}}}}}' > "$stats"
exit $status
"#
        );
        executable(&path, script.as_bytes());
        path
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let gone = fs::remove_dir_all(&self.0);
        // What a test that has failed left on says why it cannot go.
        assert!(gone.is_ok() || std::thread::panicking(), "{gone:?}");
    }
}

/// A program. Not written by us: what another test's thread forks meanwhile would have it open, and nobody could execute it.
fn executable(path: &Path, content: &[u8]) {
    let script = r#"cat > "$1" && chmod 755 "$1""#;
    let mut writer =
        Command::new("sh").args(["-c", script, "sh"]).arg(path).stdin(Stdio::piped()).spawn().unwrap();
    writer.stdin.take().unwrap().write_all(content).unwrap();
    assert!(writer.wait().unwrap().success());
}

fn bench(args: &[&str]) -> Output {
    Command::new(BENCH).args(args).stdin(Stdio::null()).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn is_root() -> bool {
    fs::metadata("/proc/self").map(|m| std::os::unix::fs::MetadataExt::uid(&m) == 0).unwrap_or(false)
}

#[test]
fn workloads_verify_and_print_one_line() {
    let works: [(&[&str], &str); 6] = [
        (&["seq", "--size", "8M", "--threads", "2", "--rounds", "2"], "swap-w-seq.throughput"),
        (
            &["seq", "--size", "8M", "--processes", "2", "--rounds", "2", "--repeat", "4"],
            "swap-w-seq.read_back",
        ),
        (&["readback", "--size", "8M", "--counting"], "readback.throughput"),
        (&["overhead", "--size", "8M", "--text", "1M"], "overhead.seconds"),
        (
            &["rand", "--size", "8M", "--threads", "2", "--seconds", "100ms", "--spread", "zipf"],
            "swap-w-rand.p99_us",
        ),
        (&["zipf", "--size", "8M", "--memory", "2M", "--accesses", "20000"], "zipf.lru_hit_%"),
    ];
    for (work, metric) in works {
        let output = bench(&[&["work"], work].concat());
        assert!(output.status.success(), "{work:?}: {}", text(&output.stderr));
        let value: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        assert!(value["metrics"][metric].as_f64().unwrap() > 0.0, "{work:?}");
    }
}

#[test]
fn compares_with_a_stand_in() {
    let dir = Dir::new("compare");
    let (pageout, json) = (dir.stand_in(1000), dir.0.join("out.json"));
    let output = bench(&[
        "compare",
        "--engines",
        "none,pageout:--swapin never",
        "--rounds",
        "2",
        "--memory",
        "16M",
        "--pageout",
        pageout.to_str().unwrap(),
        "--dir",
        dir.0.to_str().unwrap(),
        "--json",
        json.to_str().unwrap(),
        "seq",
        "--size",
        "8M",
        "--rounds",
        "2",
    ]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let table = text(&output.stdout);
    assert!(table.contains("%change") && table.contains("swap-w-seq.throughput"), "{table}");
    assert!(table.contains("locks.cluster.waits") && table.contains("pageout:--swapin never"), "{table}");

    let page = dir.0.join("docs/results.md");
    fs::create_dir(page.parent().unwrap()).unwrap();
    let output = bench(&["report", "--from", json.to_str().unwrap(), "--out", page.to_str().unwrap()]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let page = fs::read_to_string(page).unwrap();
    assert!(page.contains("swap-w-seq-throughput.svg") && page.contains("pageout-bench compare"), "{page}");
    assert!(dir.0.join("docs/plots/swap-w-seq-throughput.svg").exists());
}

#[test]
fn a_run_that_swapped_nothing_fails() {
    let dir = Dir::new("nothing");
    let pageout = dir.stand_in(0);
    let args = |fits: &'static str| {
        let common = ["compare", "--rounds", "1", "--memory", "16M", "--engines", "pageout", "--pageout"];
        let mut args: Vec<String> = common.map(String::from).to_vec();
        args.extend([pageout.display().to_string(), "--dir".into(), dir.0.display().to_string()]);
        args.extend(
            [fits, "seq", "--size", "4M", "--rounds", "1"]
                .iter()
                .filter(|a| !a.is_empty())
                .map(|a| a.to_string()),
        );
        args
    };
    let run = |args: Vec<String>| bench(&args.iter().map(String::as_str).collect::<Vec<_>>());
    let output = run(args(""));
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("measured nothing"), "{}", text(&output.stderr));
    assert!(run(args("--fits")).status.success());
}

#[test]
fn says_what_is_wrong() {
    let missing = bench(&["compare", "--engines", "pageout", "--pageout", "/no/such", "seq"]);
    assert_eq!(missing.status.code(), Some(2));
    assert!(text(&missing.stderr).contains("left out pageout: /no/such"), "{}", text(&missing.stderr));
    let engine = bench(&["compare", "--engines", "zram", "seq"]);
    assert!(text(&engine.stderr).contains("not an engine"), "{}", text(&engine.stderr));
    let work = bench(&["compare", "--engines", "none", "sequence"]);
    assert!(text(&work.stderr).contains("unrecognized subcommand"), "{}", text(&work.stderr));
    let crash = bench(&["program", "--engines", "none", "--rounds", "1", "sh", "-c", "kill -9 $$"]);
    assert!(text(&crash.stderr).contains("ended with status 137"), "{}", text(&crash.stderr));
    let slow =
        bench(&["program", "--engines", "none", "--rounds", "1", "--time-limit", "200ms", "sleep", "60"]);
    assert!(text(&slow.stderr).contains("--time-limit"), "{}", text(&slow.stderr));
}

/// Programs of UMap's and vmcache's that print what the real ones do.
fn peers(dir: &Dir) -> PathBuf {
    let built = dir.0.join("built");
    fs::create_dir(&built).unwrap();
    for (name, script) in [
        ("pfbenchmark-write", "echo umap,seq,write,1,2,99"),
        (
            "pfbenchmark-readmodifywrite",
            "[ $1 = --noinit ] && [ $UMAP_BUFSIZE = 262144 ] && echo umap,shuffle,rmw,1,2,20000",
        ),
        (
            "vmcache",
            "[ $PHYSGB = 1 ] && [ -f $BLOCK ] && printf 'ts,tx\\n0,100,2,1,vmcache\\n1,300,4,0,vmcache\\n'",
        ),
    ] {
        executable(&built.join(name), format!("#!/bin/sh\n{script}\n").as_bytes());
    }
    built
}

#[test]
fn peers_run_their_own_benchmarks() {
    let dir = Dir::new("peers");
    let built = peers(&dir).display().to_string();
    let engines = format!("umap:{built},vmcache:{built}");
    let compare = |work: &[&str]| {
        bench(&[&["compare", "--engines", &engines, "--rounds", "1", "--memory", "1G"], work].concat())
    };
    let both = compare(&["rand", "--size", "2G", "--seconds", "1"]);
    let table = text(&both.stdout);
    assert!(both.status.success(), "{}", text(&both.stderr));
    assert!(table.contains("50000                           -        umap.pages_per_s"), "{table}");
    assert!(table.contains("vmcache.lookups_per_s") && table.contains("200.0"), "{table}");
    let one = text(&compare(&["seq", "--size", "2G"]).stderr);
    assert!(one.contains("left out vmcache") && one.contains("nothing like this workload"), "{one}");
    let none = compare(&["rand", "--size", "1G"]);
    assert!(text(&none.stderr).contains("measure nothing") && !none.status.success());
}

#[test]
fn without_root_the_rest_runs() {
    use std::os::unix::process::CommandExt;
    let dir = Dir::new("nobody");
    let own = dir.0.join("pageout-bench");
    executable(&own, &fs::read(BENCH).unwrap());
    fs::set_permissions(&dir.0, fs::Permissions::from_mode(0o777)).unwrap();
    let mut command = Command::new(&own);
    command.args([
        "compare",
        "--engines",
        "kernel-zram,pageout,none",
        "--rounds",
        "1",
        "--memory",
        "16M",
        "--fits",
    ]);
    command.arg("--pageout").arg(dir.stand_in(1)).args(["seq", "--size", "4M", "--rounds", "1"]);
    if is_root() {
        command.uid(65534).gid(65534);
    }
    let output = command.env("TMPDIR", &dir.0).current_dir(&dir.0).stdin(Stdio::null()).output().unwrap();
    let said = text(&output.stderr);
    assert!(output.status.success() && said.contains("left out kernel-zram: only root"), "{said}");
    assert!(text(&output.stdout).contains("swap-w-seq.throughput"), "{}", text(&output.stdout));
}

#[test]
fn pageout_that_may_not_run_is_left_out() {
    let dir = Dir::new("refused");
    let path = dir.stand_in(1);
    executable(&path, b"#!/bin/sh\necho 'pageout: userfaultfd: permission denied' >&2; exit 125\n");
    let output = bench(&[
        "program",
        "--engines",
        "none,pageout",
        "--rounds",
        "1",
        "--pageout",
        path.to_str().unwrap(),
        "true",
    ]);
    let said = text(&output.stderr);
    assert!(
        output.status.success() && said.contains("left out pageout: pageout: userfaultfd: permission"),
        "{said}"
    );
}

#[test]
fn the_page_has_what_is_not_compared() {
    let dir = Dir::new("page");
    let page = dir.0.join("results.md");
    let output = bench(&[
        "report",
        "--only",
        "frag",
        "--dir",
        dir.0.to_str().unwrap(),
        "--out",
        page.to_str().unwrap(),
    ]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let written = fs::read_to_string(&page).unwrap();
    assert!(
        written.contains("Made by `pageout-bench report --only frag") && written.contains("plots/frag.svg"),
        "{written}"
    );
    assert!(dir.0.join("plots/frag.svg").exists());
}

#[test]
fn asks_answer_by_their_status() {
    let dir = Dir::new("asks");
    let pageout = dir.stand_in(1000);
    let output = bench(&[
        "asks",
        "--only",
        "start",
        "--rounds",
        "1",
        "--memory",
        "16M",
        "--dir",
        dir.0.to_str().unwrap(),
        "--pageout",
        pageout.to_str().unwrap(),
    ]);
    let verdict = text(&output.stdout);
    assert!(verdict.contains("start later than alone") && verdict.contains("of 1 met"), "{verdict}");
    let is_met = verdict.contains("1 of 1 met");
    assert_eq!(output.status.code(), Some(i32::from(!is_met)), "{}", text(&output.stderr));
}

/// Marks the processes of one test, by their environment.
const MARK: &str = "PAGEOUT_BENCH_TEST";

/// Swap that is on, and zram devices: none has a name by which to know who made it.
fn unnamed() -> BTreeSet<String> {
    let swaps = fs::read_to_string("/proc/swaps").unwrap_or_default();
    let swaps = swaps.lines().skip(1).filter_map(|line| line.split_whitespace().next());
    let mut unnamed: BTreeSet<String> = swaps.map(|path| format!("swap on {path}")).collect();
    for block in fs::read_dir("/sys/block").into_iter().flatten().flatten() {
        if let Ok(bytes) = fs::read_to_string(block.path().join("disksize")) {
            unnamed.insert(format!("{} of {} bytes", block.path().display(), bytes.trim()));
        }
    }
    unnamed
}

/// What the bench may leave behind of the process `pid` and of processes marked `mark`; `before` was unnamed
/// before it began.
fn left_behind(pid: u32, mark: &str, dir: &Path, before: &BTreeSet<String>) -> Vec<String> {
    let mut left: Vec<String> = unnamed().difference(before).cloned().collect();
    for process in fs::read_dir("/proc").unwrap().flatten() {
        // A zombie's environment is empty: it is gone but for a parent that looks.
        let environment = fs::read(process.path().join("environ")).unwrap_or_default();
        if environment.split(|byte| *byte == 0).any(|entry| entry == format!("{MARK}={mark}").as_bytes()) {
            left.push(format!("process {}", process.file_name().to_string_lossy()));
        }
    }
    let name = format!("pageout-bench.{pid}");
    for place in [dir, &std::env::temp_dir(), Path::new("/dev/shm")] {
        for entry in fs::read_dir(place).into_iter().flatten().flatten() {
            if entry.file_name().to_string_lossy().contains(&name) {
                left.push(entry.path().display().to_string());
            }
        }
    }
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    left.extend(mounts.lines().filter(|line| line.contains(&name)).map(String::from));
    for block in fs::read_dir("/sys/block").into_iter().flatten().flatten() {
        let backing = fs::read_to_string(block.path().join("loop/backing_file")).unwrap_or_default();
        if backing.contains(&name) {
            left.push(format!("{} over {}", block.path().display(), backing.trim()));
        }
    }
    let cgroups = Command::new("find").args(["/sys/fs/cgroup", "-name", &name]).output().unwrap();
    left.extend(text(&cgroups.stdout).lines().map(String::from));
    left
}

/// Runs a program that swaps and then kills itself, and looks for what is left. Every path is one that the kernel
/// writes otherwise than it is given, through a link or with a blank.
fn crashed(engine: &str, device: Option<&Path>) {
    let mark = format!("{engine} crash.{}", std::process::id());
    let dir = Dir::new(&mark);
    let pageout = dir.stand_in(1);
    let link = |name: &str, to: &Path| {
        let path = dir.0.join(name);
        symlink(to, &path).unwrap();
        path
    };
    let crash = format!("{BENCH} work seq --size 64M --rounds 1; kill -SEGV $$");
    let mut command = Command::new(BENCH);
    command
        .env(MARK, &mark)
        .env("TMPDIR", link("tmp", &dir.0))
        .args(["program", "--engines", engine, "--rounds", "1", "--memory", "32M", "--swap-size", "128M"])
        .arg("--pageout")
        .arg(&pageout)
        .arg("--dir")
        .arg(&dir.0);
    if let Some(device) = device {
        command.arg("--device").arg(link("device", device));
    }
    let before = unnamed();
    let child =
        command.args(["sh", "-c", &crash]).stdin(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let pid = child.id();
    let output = child.wait_with_output().unwrap();
    assert!(text(&output.stderr).contains("ended with status 139"), "{engine}: {}", text(&output.stderr));
    assert_eq!(left_behind(pid, &mark, &dir.0, &before), Vec::<String>::new(), "{engine}");
}

/// A block device that mkswap has made for swap, gone at the test's end.
struct Device {
    number: String,
    path: PathBuf,
}

impl Device {
    fn new() -> Device {
        let number = fs::read_to_string("/sys/class/zram-control/hot_add").unwrap().trim().to_owned();
        let device = Device { path: format!("/dev/zram{number}").into(), number };
        fs::write(format!("/sys/block/zram{}/disksize", device.number), "128M").unwrap();
        assert!(Command::new("mkswap").arg(&device.path).output().unwrap().status.success());
        device
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // On only where the test has failed.
        let _ = Command::new("swapoff").arg(&self.path).output();
        let gone = fs::write("/sys/class/zram-control/hot_remove", &self.number);
        assert!(gone.is_ok() || std::thread::panicking(), "{gone:?}");
    }
}

/// The kernel's swap is one for all: a bench that finds another's refuses.
static KERNEL_SWAP: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    KERNEL_SWAP.lock().unwrap_or_else(PoisonError::into_inner)
}

#[test]
fn nothing_is_left_after_a_crash_of_the_program() {
    let _alone = alone();
    crashed("pageout", None);
    crashed("pageout-file", None);
    if is_root() {
        crashed("kernel-file", None);
        crashed("kernel-ram", None);
        if Path::new("/sys/class/zram-control").exists() {
            crashed("kernel-zram", None);
            crashed("kernel-device", Some(&Device::new().path));
        }
    }
}

/// Starts a long run, kills the bench by `signal` in the middle, and waits for all to be gone.
fn killed_in_the_middle(engine: &str, signal: &str) {
    let mark = format!("{engine}-{signal}.{}", std::process::id());
    let dir = Dir::new(&mark);
    let pageout = dir.stand_in(1);
    let before = unnamed();
    let mut child = Command::new(BENCH)
        .env(MARK, &mark)
        .args(["compare", "--engines", engine, "--rounds", "1", "--memory", "32M", "--pageout"])
        .arg(&pageout)
        .arg("--dir")
        .arg(&dir.0)
        .args(["--time-limit", "60", "seq", "--size", "64M", "--rounds", "100000"])
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let pid = child.id();
    std::thread::sleep(Duration::from_millis(700));
    assert!(child.try_wait().unwrap().is_none(), "{engine}: it ended before it was killed");
    let mut ended = vec![pid.to_string()];
    if signal != "KILL" {
        // Its janitor too, as pkill does, which goes by the name.
        let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
        let is_janitor = |child: &&str| {
            fs::read_to_string(format!("/proc/{child}/cmdline"))
                .is_ok_and(|line| line.contains("\0janitor\0"))
        };
        ended.extend(children.split_whitespace().find(is_janitor).map(String::from));
        assert_eq!(ended.len(), 2, "{engine}: no janitor");
    }
    assert!(Command::new("kill").arg(format!("-{signal}")).args(ended).status().unwrap().success());
    child.wait().unwrap();
    let begun = Instant::now();
    loop {
        let left = left_behind(pid, &mark, &dir.0, &before);
        if left.is_empty() {
            break;
        }
        // Killed outright, the bench cannot wait for its janitor; interrupted it does.
        assert!(
            signal == "KILL" && begun.elapsed() < Duration::from_secs(10),
            "{engine} {signal}: left {left:?}"
        );
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn nothing_is_left_after_an_end_in_the_middle() {
    let _alone = alone();
    for signal in ["INT", "KILL"] {
        killed_in_the_middle("pageout", signal);
        killed_in_the_middle("pageout-file", signal);
        if is_root() {
            killed_in_the_middle("kernel-file", signal);
            if Path::new("/sys/class/zram-control").exists() {
                killed_in_the_middle("kernel-zram", signal);
            }
        }
    }
}
