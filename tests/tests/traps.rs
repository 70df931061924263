//! Every trap, as it is and under `pageout run` with a quarter of the memory; and the limit.
//!
//! Pages go to memory (`--swap mem`), so that the time of the tests does not hang on a disk; the traps of
//! [`ON_FILE`] swap to a file.
//!
//! Settings: `PAGEOUT_BIN` (the program to test), `PAGEOUT_RUN_ARGS` (further options of `run`), `TRAP_SWAP`
//! (mem; `file` for a file for all), `TRAP_SIZE` (64M), `TRAP_SECONDS` (0.3), `TRAP_TIMEOUT` (60),
//! `TRAP_TOUCH_SIZE` (512M, for the limit), `TRAP_TORTURE` (15 s) and `TRAP_SEED` for the torture of a tree. Thorough:
//! `TRAP_SWAP=file TRAP_SIZE=256M TRAP_SECONDS=3 TRAP_TOUCH_SIZE=1G`.

use libtest_mimic::{Arguments, Completion, Failed, Trial};
use pageout::device::FileSystem;
use pageout_tests::harness::{self, Done, Sampler, Watched};
use pageout_tests::trap::{self, End, Trap};
use pageout_tests::units::{in_mib, parse_size};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Output, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::RwLock;
use std::time::Duration;

const TRAP: &str = env!("CARGO_BIN_EXE_trap");

/// Traps that swap to a file in `CARGO_TARGET_TMPDIR`: the plain one, one whose direct I/O shares the disk with
/// the engine's, those that limit what files may be, and one whose room is given back.
const ON_FILE: [&str; 5] = ["fill-threads", "direct-read", "rlimit-fsize", "rlimit-late", "let-go"];

fn main() -> ExitCode {
    let arguments = Arguments::from_args();
    let settings: &'static Settings = match Settings::from_env() {
        Ok(settings) => Box::leak(Box::new(settings)),
        Err(why) => {
            eprintln!("traps: {why}");
            return ExitCode::FAILURE;
        }
    };
    let mut trials: Vec<Trial> = trap::ALL
        .iter()
        .copied()
        .flatten()
        .filter(|trap| trap.alone)
        .map(|trap| may_skip(trap.name.into(), move || settings.try_trap(trap)))
        .collect();
    trials.extend([
        may_skip("watch-sees-stuck-faults".into(), || settings.watch_sees_stuck_faults()),
        may_skip("huge-whole".into(), || settings.huge_whole("huge")),
        may_skip("huge-whole-unasked".into(), || settings.huge_whole("huge-unasked")),
        beside_others("discards".into(), || settings.discards()),
        beside_others("streams".into(), || settings.streams()),
        beside_others("run-killed".into(), || settings.run_killed()),
        beside_others("run-killed-forks".into(), || settings.run_killed_forks()),
        beside_others("run-gone".into(), || settings.run_gone()),
        beside_others("term-handled".into(), || settings.terminated("term", 0)),
        beside_others("term-deadly".into(), || settings.terminated("term-default", 128 + libc::SIGTERM)),
    ]);
    for name in ["random", "mremap-race", "dontneed-race", "tree", "huge-entries"] {
        trials.push(beside_others(format!("switch-{name}"), move || settings.switched(name)));
    }
    trials.push(beside_others("switch-few-descriptors".into(), || settings.switched_in_vain()));
    for (how, most) in [
        ("one", 2),
        ("again", 1),
        ("read", 1),
        ("mmap", 2),
        ("executable", 2),
        ("mixed", 2),
        ("malloc", 2),
        ("brk", 1),
        ("huge", 2),
        ("huge-pieces", 2),
        ("populate", 2),
    ] {
        for threads in 1..=most {
            trials.push(Trial::test(format!("limit-{how}-{threads}"), move || settings.limit(how, threads)));
        }
    }
    for how in ["shared", "private", "used"] {
        let name = format!("limit-files-{how}");
        trials.push(Trial::ignorable_test(name, move || settings.files_leave(how)));
    }
    trials.push(Trial::test("limit-small", move || settings.limit_of_small_mappings()));
    trials.push(Trial::test("limit-host", move || settings.host_limit()));
    for count in [2, 24] {
        trials.push(Trial::test(format!("limit-tree-{count}"), move || settings.tree_limit(count)));
    }
    // Both had a swap of 1 GiB full while most of it was unused.
    for (name, size) in [("tree-many", 480 << 20), ("tree-turns", 640 << 20)] {
        trials.push(beside_others(name.into(), move || settings.shares_swap(name, size)));
    }
    trials.push(beside_others("tree-fits".into(), || settings.tree_fits()));
    trials.push(Trial::test("exec-fits", || settings.exec_fits()));
    trials.push(beside_others("threads-places".into(), || settings.threads_at_many_places()));
    trials.push(Trial::test("mapped-thrice", || settings.mapped_thrice()));
    trials.push(Trial::test("tree-torture", move || settings.torture()));
    for name in ["tree-need", "tree-need-slowly"] {
        trials.push(Trial::test(name, move || settings.tree_need(name)));
    }
    libtest_mimic::run(&arguments, trials).exit_code()
}

/// Does the kernel give huge pages to who asks?
fn gives_huge_pages() -> bool {
    let enabled = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled");
    enabled.is_ok_and(|enabled| !enabled.contains("[never]"))
}

/// Held exclusively by who must have the machine for itself.
static ALONE: RwLock<()> = RwLock::new(());

/// A test that may run beside others.
fn beside_others(name: String, body: impl FnOnce() -> Result<(), Failed> + Send + 'static) -> Trial {
    may_skip(name, move || body().map(|()| Completion::Completed))
}

/// The same, of what may be missing here.
fn may_skip(name: String, body: impl FnOnce() -> Result<Completion, Failed> + Send + 'static) -> Trial {
    Trial::ignorable_test(name, move || {
        let _beside = ALONE.read();
        body()
    })
}

/// Are files of this directory memory, as far as can be told? Those of an overlay are where it is written to.
fn lies_in_memory(directory: &Path) -> bool {
    use std::os::unix::ffi::OsStrExt;
    let file_system = |directory: &std::ffi::OsStr| {
        FileSystem::of_path(&std::ffi::CString::new(directory.as_bytes()).ok()?).ok()
    };
    match file_system(directory.as_os_str()) {
        Some(found) if found.name == "overlay" => {
            let upper = upper_directory(directory).and_then(|upper| file_system(upper.as_ref()));
            upper.is_none_or(|upper| upper.in_memory)
        }
        found => found.is_some_and(|found| found.in_memory),
    }
}

/// Where what is written to the overlay that the directory lies on goes.
fn upper_directory(directory: &Path) -> Option<String> {
    use std::os::unix::fs::MetadataExt;
    let device = std::fs::metadata(directory).ok()?.dev();
    let device = format!("{}:{}", libc::major(device), libc::minor(device));
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").ok()?;
    let mount = mounts.lines().find(|line| line.split(' ').nth(2) == Some(device.as_str()))?;
    mount
        .rsplit(' ')
        .next()?
        .split(',')
        .find_map(|option| option.strip_prefix("upperdir="))
        .map(str::to_owned)
}

/// How large, how long, with what.
struct Settings {
    size: usize,
    touch_size: usize,
    seconds: String,
    timeout: Duration,
    run_args: Vec<String>,
    /// Every trap swaps to a file.
    on_file: bool,
    /// The program under test, or why there is none.
    pageout: Result<PathBuf, String>,
}

fn setting(name: &str, default: &str) -> String {
    std::env::var(name).unwrap_or(default.into())
}

fn size_setting(name: &str, default: &str) -> Result<usize, String> {
    parse_size(&setting(name, default)).ok_or(format!("{name} takes a size as {default}"))
}

/// A program under `pageout run`, and the file that its statistics go to.
struct Run {
    command: Command,
    stats: PathBuf,
}

impl Settings {
    fn from_env() -> Result<Self, String> {
        let timeout = setting("TRAP_TIMEOUT", "60").parse().map_err(|_| "TRAP_TIMEOUT takes seconds")?;
        Ok(Settings {
            size: size_setting("TRAP_SIZE", "64M")?,
            touch_size: size_setting("TRAP_TOUCH_SIZE", "512M")?,
            seconds: setting("TRAP_SECONDS", "0.3"),
            timeout: Duration::from_secs(timeout),
            run_args: setting("PAGEOUT_RUN_ARGS", "").split_whitespace().map(str::to_owned).collect(),
            on_file: match setting("TRAP_SWAP", "mem").as_str() {
                "mem" => false,
                "file" => true,
                _ => return Err("TRAP_SWAP takes mem or file".into()),
            },
            pageout: harness::pageout(TRAP),
        })
    }

    fn arguments(&self, name: &str, size: usize) -> Vec<String> {
        let size = in_mib(size);
        [name, "--size", &size, "--seconds", &self.seconds].map(str::to_owned).into()
    }

    /// The trap as it is.
    fn natively(&self, arguments: &[String]) -> Command {
        let mut command = Command::new(TRAP);
        command.args(arguments).env("TMPDIR", env!("CARGO_TARGET_TMPDIR"));
        command
    }

    /// The trap in `limit` bytes.
    fn under_pageout(&self, limit: usize, arguments: &[String]) -> Result<Run, Failed> {
        static TURN: AtomicUsize = AtomicUsize::new(0);
        let directory = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
        let turn = TURN.fetch_add(1, Ordering::Relaxed);
        let stats = directory.join(format!("stats-{}-{turn}.json", std::process::id()));
        let mut command = Command::new(self.pageout.clone()?);
        command.args(["run", "--memory", &in_mib(limit), "--stats"]).arg(&stats).args(&self.run_args);
        // Without `--swap` it is a file in TMPDIR.
        let name = arguments[0].as_str();
        if ["tree-many", "tree-turns"].contains(&name) {
            command.args(["--swap", "mem,size=1G"]);
        } else if !self.on_file && !ON_FILE.contains(&name) {
            command.args(["--swap", "mem"]);
        }
        command.args(["--", TRAP]).args(arguments).env("TMPDIR", directory);
        Ok(Run { command, stats })
    }

    fn finish(&self, command: Command, input: Vec<u8>) -> Result<Done, Failed> {
        Ok(Watched::start(command, input)?.finish(self.timeout)?)
    }

    fn try_trap(&self, trap: &Trap) -> Result<Completion, Failed> {
        let size = self.size.max(trap.least_size);
        let arguments = self.arguments(trap.name, size);
        let run = self.under_pageout(size / 4, &arguments)?;
        let native = self.finish(self.natively(&arguments), Vec::new())?;
        check_end(trap, &native).map_err(|why| format!("without pageout: {why}"))?;
        if let Some(why) = native.stdout.strip_prefix("skip: ") {
            return Ok(Completion::ignored_with(why.trim()));
        }
        let done = self.finish(run.command, Vec::new())?;
        if trap.may_refuse && done.code() != 0 && done.stderr.starts_with("pageout: ") {
            eprintln!("{}: given up aloud: {}", trap.name, done.stderr.trim());
            return Ok(Completion::Completed);
        }
        check_end(trap, &done)?;
        if !trap.may_log && !done.stderr.is_empty() {
            return Err(format!("said on standard error: {}", done.stderr).into());
        }
        if let Some(why) = done.stdout.strip_prefix("skip: ") {
            if trap.may_skip {
                return Ok(Completion::ignored_with(format!("under pageout: {}", why.trim())));
            }
            return Err(format!("what works without pageout does not under it: {}", why.trim()).into());
        }
        let [out, huge] = counters(&run.stats, ["pswpout", "thp_swpout"])?;
        if trap.swaps && out == 0 || trap.swaps_huge && huge == 0 && gives_huge_pages() {
            return Err(format!("{out} pages and {huge} huge pages went out: the trap was none").into());
        }
        eprintln!(
            "{}: {:.1?} natively, {:.1?} under pageout, {out} pages out",
            trap.name, native.wall, done.wall
        );
        // What it counted, if it says so.
        for (how, done) in [("natively", &native), ("under pageout", &done)] {
            let said = done.stdout.lines().filter(|line| line.starts_with("met: "));
            said.for_each(|line| eprintln!("{}: {how} {line}", trap.name));
        }
        Ok(Completion::Completed)
    }

    /// The watch itself: a program that waits for a page for ever is found, described and ended.
    fn watch_sees_stuck_faults(&self) -> Result<Completion, Failed> {
        let watched = Watched::start(self.natively(&self.arguments("stuck", self.size)), Vec::new())?;
        match watched.fault_limit(Duration::from_secs(1)).finish(self.timeout) {
            Err(why) if why.contains("has waited for a page") && why.contains("handle_userfault") => {
                Ok(Completion::Completed)
            }
            Err(why) => Err(why.into()),
            Ok(done) => match done.stdout.strip_prefix("skip: ") {
                Some(why) => Ok(Completion::ignored_with(why.trim())),
                None => Err(format!("ended with {}: {}", done.code(), done.stdout).into()),
            },
        }
    }

    /// Memory that a trap walks through, again and again, in a quarter of it: huge pages leave whole and come back whole.
    fn huge_whole(&self, trap: &str) -> Result<Completion, Failed> {
        let size = self.size.max(256 << 20);
        let run = self.under_pageout(size / 4, &self.arguments(trap, size))?;
        let done = self.finish(run.command, Vec::new())?;
        if done.code() != 0 {
            return Err(format!("ended with {}: {}{}", done.code(), done.stdout, done.stderr).into());
        }
        let [out, whole, fallback, pages] =
            counters(&run.stats, ["thp_swpout", "thp_swpin", "thp_swpin_fallback", "pswpin"])?;
        if out == 0 && !gives_huge_pages() {
            return Ok(Completion::ignored_with("this kernel gives no huge pages"));
        }
        let found = format!("{whole} huge pages came back whole, {fallback} in pieces; {pages} pages in all");
        eprintln!("{trap}: {found}");
        if out == 0 || whole < 10 * fallback || 512 * whole < pages / 10 * 9 {
            return Err(found.into());
        }
        Ok(Completion::Completed)
    }

    /// Room on the swap file that nobody uses any more is given back to the file system while the program lives.
    fn discards(&self) -> Result<(), Failed> {
        let run = self.under_pageout(self.size / 4, &self.arguments("let-go", self.size))?;
        let mut watched = Watched::start(run.command, Vec::new())?;
        watched.line("filled", self.timeout)?;
        let held = blocks_held(watched.pid());
        watched.line("gone", self.timeout)?;
        let patience = std::time::Instant::now() + Duration::from_secs(8);
        let mut left = blocks_held(watched.pid());
        while left > held / 4 && std::time::Instant::now() < patience {
            std::thread::sleep(Duration::from_millis(20));
            left = blocks_held(watched.pid());
        }
        check_ok(&watched.finish(self.timeout)?)?;
        some_out(&run.stats)?;
        eprintln!("discards: {} of {} are left", in_mib(left as usize * 512), in_mib(held as usize * 512));
        if held * 512 < self.size as u64 / 2 || left > held / 4 {
            return Err(format!("{left} of {held} blocks are left").into());
        }
        Ok(())
    }

    /// Standard streams pass through, all of them.
    fn streams(&self) -> Result<(), Failed> {
        let arguments = self.arguments("cat", self.size);
        let input: Vec<u8> = (0..self.size / 8).map(|byte| b'a' + (byte / 7 % 26) as u8).collect();
        let run = self.under_pageout(self.size / 4, &arguments)?;
        for command in [self.natively(&arguments), run.command] {
            let done = self.finish(command, input.clone())?;
            let copied = done.stdout.strip_suffix("ok\n").ok_or(format!("ended with {}", done.code()))?;
            if copied.as_bytes() != input {
                return Err(format!("{} of {} bytes came out, or others", copied.len(), input.len()).into());
            }
            if done.stderr != "copied\n" {
                return Err(format!("standard error was {:?}", done.stderr).into());
            }
        }
        Ok(())
    }

    /// SIGTERM reaches the program, and what it does of it is what `run` ends with.
    fn terminated(&self, name: &str, code: i32) -> Result<(), Failed> {
        let arguments = self.arguments(name, self.size);
        let run = self.under_pageout(self.size / 4, &arguments)?;
        for command in [self.natively(&arguments), run.command] {
            let mut watched = Watched::start(command, Vec::new())?;
            watched.line("ready", self.timeout)?;
            // SAFETY: the process is our child and was not waited for.
            unsafe { libc::kill(watched.pid() as libc::pid_t, libc::SIGTERM) };
            let done = watched.finish(self.timeout)?;
            if done.code() != code {
                return Err(format!(
                    "ended with {}, not {code}: {}{}",
                    done.code(),
                    done.stdout,
                    done.stderr
                )
                .into());
            }
        }
        Ok(())
    }

    /// Its swap device goes and another comes, again and again, to a file and to memory in turn: the program, which
    /// checks all of its memory, notices nothing.
    fn switched(&self, name: &str) -> Result<(), Failed> {
        let trap = trap::find(name).ok_or("no such trap")?;
        let mut arguments = self.arguments(name, self.size);
        *arguments.last_mut().ok_or("no seconds")? = "3".into();
        let run = self.under_pageout(self.size / 4, &arguments)?;
        let pageout = self.pageout.clone()?;
        let watched = Watched::start(run.command, Vec::new())?;
        let id = watched.pid().to_string();
        let switches = std::thread::spawn(move || switch_until_it_ends(&pageout, &id));
        let done = watched.finish(self.timeout);
        let switches = switches.join().map_err(|_| "the thread that switches panicked")?;
        check_end(trap, &done?)?;
        let switches = switches?;
        let out = swapped_out(&run.stats)?;
        eprintln!("switch-{name}: {switches} devices went, {out} pages out");
        if out == 0 || switches == 0 {
            return Err(format!("{switches} devices went, {out} pages out: this tested nothing").into());
        }
        Ok(())
    }

    /// Devices go from a process that had no descriptors left to take them.
    fn switched_in_vain(&self) -> Result<(), Failed> {
        let script = "ulimit -n 14; exec \"$0\" member --size 64M --seconds 4";
        let pageout = self.pageout.clone()?;
        let mut command = Command::new(&pageout);
        command.args(["run", "-m", "32M", "-s", "mem,size=256M", "--", "sh", "-c", script, TRAP]);
        let watched = Watched::start(command, Vec::new())?;
        let run = watched.pid().to_string();
        // It works by then, and has its devices open.
        std::thread::sleep(Duration::from_secs(1));
        let call = |verb: &str, device: &str| {
            let mut command = Command::new("timeout");
            command.arg("5").arg(&pageout).args([verb, device, "--run", &run]);
            let said = command.output().map_err(|e| e.to_string())?;
            match said.status.success() {
                true => Ok(()),
                false => Err(format!(
                    "{verb} {device}: {}, {}",
                    said.status,
                    String::from_utf8_lossy(&said.stderr)
                )),
            }
        };
        (0..6).try_for_each(|_| call("swapon", "mem,size=64M"))?;
        (2..8).rev().try_for_each(|number| call("swapoff", &format!("mem{number}")))?;
        let done = watched.finish(self.timeout)?;
        check_ok(&done)?;
        if !done.stderr.contains("too many open files") {
            return Err(format!("nobody says that a device could not be opened: {}", done.stderr).into());
        }
        Ok(())
    }

    /// However fast the program takes new memory, it has no more than the limit and the stated slack. While nothing
    /// else runs: what is stated is for as many busy threads as there are CPUs.
    fn limit(&self, how: &str, threads: usize) -> Result<(), Failed> {
        let _alone = ALONE.write();
        let mut arguments = self.arguments("touch", self.touch_size);
        arguments.extend(["--threads".into(), threads.to_string(), how.into()]);
        self.keeps_to_limit(&format!("limit-{how}-{threads}"), arguments, threads)
    }

    /// Of half of the size, for no process has many more mappings than these are. On a busy machine they are found late; while they were
    /// not managed two thirds of them stayed.
    fn limit_of_small_mappings(&self) -> Result<(), Failed> {
        let _alone = ALONE.write();
        let size = self.touch_size / 2;
        let mut arguments = self.arguments("touch", size);
        arguments.push("small".into());
        self.keeps_to_limit_of(size / 4, size / 8 * 3, "limit-small", arguments)
    }

    /// What was read of a file leaves, and nothing of the program's own for it.
    fn files_leave(&self, how: &str) -> Result<Completion, Failed> {
        if lies_in_memory(Path::new(env!("CARGO_TARGET_TMPDIR"))) {
            return Ok(Completion::ignored_with("the directory of the tests is in memory"));
        }
        let _alone = ALONE.write();
        let (size, limit) = (self.touch_size, self.touch_size / 4);
        let mut arguments = self.arguments("scan", size);
        arguments.push(how.into());
        let run = self.under_pageout(limit, &arguments)?;
        let done = self.finish(run.command, Vec::new())?;
        check_ok(&done)?;
        let [files, out, back] = counters(&run.stats, ["pgsteal_file", "pswpout", "pswpin"])?;
        let resident = done.stdout.split_whitespace().nth(1).and_then(|kib| kib.parse::<usize>().ok());
        let resident = resident.ok_or_else(|| format!("said {:?}", done.stdout))? << 10;
        let found = format!(
            "{} of {} resident, {files} pages of files left, {out} others, of which {back} came back",
            in_mib(resident),
            in_mib(limit)
        );
        eprintln!("limit-files-{how}: {found}");
        // Half of what it has of its own and uses, or a quarter of what it has and does not.
        let few = if how == "used" { 1024 } else { (size / 64 / 4096) as u64 };
        if files == 0 || resident > limit + limit / 16 || out > few || back > few {
            return Err(found.into());
        }
        Ok(Completion::Completed)
    }

    /// Also one that does nothing itself: another process has its memory, too, and takes more.
    fn host_limit(&self) -> Result<(), Failed> {
        let _alone = ALONE.write();
        self.keeps_to_limit("limit-host", self.arguments("host", self.touch_size), 1)
    }

    /// So do programs that run at the same time, also many small ones.
    fn tree_limit(&self, count: usize) -> Result<(), Failed> {
        let _alone = ALONE.write();
        let mut arguments = self.arguments("tree-touch", self.touch_size * 2);
        arguments.push(count.to_string());
        self.keeps_to_limit(&format!("limit-tree-{count}"), arguments, 2)
    }

    /// A program that needs memory gets it from another that only has it.
    fn tree_need(&self, name: &str) -> Result<(), Failed> {
        let _alone = ALONE.write();
        let arguments = self.arguments(name, self.touch_size);
        let run = self.under_pageout(self.touch_size / 4, &arguments)?;
        let done = self.finish(run.command, Vec::new())?;
        check_ok(&done)?;
        some_out(&run.stats).map(drop)
    }

    /// However large the limit is, there is room for those who come.
    fn threads_at_many_places(&self) -> Result<(), Failed> {
        let run = self.under_pageout(128 << 30, &self.arguments("threads-places", self.touch_size))?;
        let done = self.finish(run.command, Vec::new())?;
        check_ok(&done)?;
        match done.stderr.contains("threads") {
            true => Err(done.stderr.into()),
            false => Ok(()),
        }
    }

    /// Many small programs that fit in the limit, with what their engines take: hardly anything comes in again.
    fn tree_fits(&self) -> Result<(), Failed> {
        let pages = (96 << 20) / 4096;
        let run = self.under_pageout(128 << 20, &self.arguments("tree-fits", 96 << 20))?;
        let done = self.finish(run.command, Vec::new())?;
        check_ok(&done)?;
        let [pages_in] = counters(&run.stats, ["pswpin"])?;
        eprintln!("tree-fits: {:.1?}, {pages} pages, {pages_in} in again", done.wall);
        if pages_in > pages {
            return Err(format!("{pages} pages that fit, and {pages_in} came in again").into());
        }
        Ok(())
    }

    /// One that fits, and becomes itself again and again: what each of them had has gone before the next has as much, and is
    /// not taken for the next one's. While nothing else runs: that is found at the next look.
    fn exec_fits(&self) -> Result<(), Failed> {
        let _alone = ALONE.write();
        let size = 44 << 20;
        let mut arguments = self.arguments("exec-fits", size);
        arguments.push("60".into());
        let run = self.under_pageout(64 << 20, &arguments)?;
        let done = self.finish(run.command, Vec::new())?;
        check_ok(&done)?;
        let [out] = counters(&run.stats, ["pswpout"])?;
        eprintln!("exec-fits: {:.1?}, {out} pages out", done.wall);
        if out > 512 {
            return Err(format!("{size} bytes fit, and {out} pages left").into());
        }
        Ok(())
    }

    /// One that fits, though what it has in all its mappings does not: what is shared is counted a little later than filled.
    fn mapped_thrice(&self) -> Result<(), Failed> {
        let run = self.under_pageout(128 << 20, &self.arguments("mapped-thrice", 96 << 20))?;
        let done = self.finish(run.command, Vec::new())?;
        check_ok(&done)?;
        let [out] = counters(&run.stats, ["pswpout"])?;
        eprintln!("mapped-thrice: {:.1?}, {out} pages out", done.wall);
        if out > 2048 || !done.stderr.is_empty() {
            return Err(format!("all of it fits, and {out} pages left: {}", done.stderr).into());
        }
        Ok(())
    }

    /// Programs whose memory fits into the swap, `size` at a time: none finds it full.
    fn shares_swap(&self, name: &str, size: usize) -> Result<(), Failed> {
        let run = self.under_pageout(64 << 20, &self.arguments(name, size))?;
        let done = self.finish(run.command, Vec::new())?;
        check_ok(&done)?;
        if !done.stderr.is_empty() {
            return Err(format!("said on standard error: {}", done.stderr).into());
        }
        eprintln!("{name}: {:.1?}, {} pages out", done.wall, some_out(&run.stats)?);
        Ok(())
    }

    /// Processes that do to each other whatever comes, and check their memory; `TRAP_TORTURE` seconds.
    fn torture(&self) -> Result<(), Failed> {
        let _alone = ALONE.write();
        let mut arguments = self.arguments("torture", self.size);
        let seed =
            std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(1, |t| t.as_secs());
        arguments.extend(["--seconds".into(), setting("TRAP_TORTURE", "15")]);
        arguments.push(setting("TRAP_SEED", &seed.to_string()));
        let run = self.under_pageout(self.size / 2, &arguments)?;
        let time: u64 = setting("TRAP_TORTURE", "15").parse().map_err(|_| "TRAP_TORTURE takes seconds")?;
        let watched = Watched::start(run.command, Vec::new())?;
        let done = watched.finish(self.timeout + Duration::from_secs(time))?;
        check_ok(&done)?;
        if done.stderr.contains("wrong:") || done.stderr.contains("killed") {
            return Err(done.stderr.into());
        }
        let [out, lost] = counters(&run.stats, ["pswpout", "swap_lost_bytes"])?;
        let said = done.stdout.lines().next().unwrap_or_default();
        eprintln!("tree-torture: {said}, {out} pages out");
        if out == 0 || lost != 0 {
            return Err(format!("{said}: {out} pages out, {lost} bytes of swap were lost").into());
        }
        Ok(())
    }

    /// `run` is killed while pages are out: its processes go on, check all of their memory, and end.
    fn run_killed(&self) -> Result<(), Failed> {
        let mut arguments = self.arguments("tree", self.size);
        *arguments.last_mut().ok_or("no seconds")? = "2".into();
        let watched = Watched::start(self.under_pageout(self.size / 4, &arguments)?.command, Vec::new())?;
        let id = watched.pid().to_string();
        let begun = std::time::Instant::now();
        let used = || {
            let show = ["show", "--raw", "--noheadings", "--bytes", "--run", &id];
            let output =
                Command::new(self.pageout.clone()?).args(show).output().map_err(|e| e.to_string())?;
            let line = String::from_utf8_lossy(&output.stdout).into_owned();
            Ok::<u64, String>(line.split(' ').nth(3).and_then(|used| used.parse().ok()).unwrap_or(0))
        };
        while used()? == 0 && begun.elapsed() < Duration::from_secs(1) {
            std::thread::sleep(Duration::from_millis(20));
        }
        let out = used()?;
        // SAFETY: the process is our child and was not waited for.
        unsafe { libc::kill(watched.pid() as libc::pid_t, libc::SIGKILL) };
        let done = watched.finish(self.timeout)?;
        eprintln!("run-killed: {} out when it was", in_mib(out as usize));
        if out == 0 || done.code() != 128 + libc::SIGKILL || !done.stdout.ends_with("ok\n") {
            let (code, said) = (done.code(), done.stdout + &done.stderr);
            return Err(format!("{out} bytes out, run ended with {code}; said: {said}").into());
        }
        Ok(())
    }

    /// Forks go on without run, where what is out fits.
    fn run_killed_forks(&self) -> Result<(), Failed> {
        let run = self.under_pageout(self.size / 4, &self.arguments("forks-on", self.size))?;
        let done = self.finish(run.command, Vec::new())?;
        match (done.code(), done.stdout.as_str()) {
            (code, "ok\n") if code == 128 + libc::SIGKILL => Ok(()),
            (code, _) => Err(format!("run ended with {code}; said: {}{}", done.stdout, done.stderr).into()),
        }
    }

    /// When run has gone, what is executed later has no limit, and says nothing of it.
    fn run_gone(&self) -> Result<(), Failed> {
        let script = "echo ready; read line; true | cat; echo over";
        let mut run = Command::new(self.pageout.clone()?)
            .args(["run", "-m", "64M", "-s", "mem,size=64M", "sh", "-c", script])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        let (mut input, mut output) = run.stdin.take().zip(run.stdout.take()).ok_or("no pipes")?;
        output.read_exact(&mut [0; 6])?;
        run.kill()?;
        input.write_all(b"\n")?;
        let Output { stderr, .. } = run.wait_with_output()?;
        let mut rest = String::new();
        output.read_to_string(&mut rest)?;
        let said = String::from_utf8_lossy(&stderr);
        match (rest.as_str(), said.as_ref()) {
            ("over\n", "") => Ok(()),
            _ => Err(format!("said {rest:?} and {said:?}").into()),
        }
    }

    /// A program that says `pid` and the processes to look at, and then takes memory by `threads` threads in all.
    fn keeps_to_limit(&self, name: &str, arguments: Vec<String>, threads: usize) -> Result<(), Failed> {
        let limit = self.touch_size / 4;
        let slack = (limit / 20).max(if threads == 1 { 64 << 20 } else { 128 << 20 });
        self.keeps_to_limit_of(limit, slack, name, arguments)
    }

    fn keeps_to_limit_of(
        &self,
        limit: usize,
        slack: usize,
        name: &str,
        arguments: Vec<String>,
    ) -> Result<(), Failed> {
        let run = self.under_pageout(limit, &arguments)?;
        let mut watched = Watched::start(run.command, Vec::new())?;
        let said = watched.line("pid ", self.timeout)?;
        let pids = said.split_whitespace().map(str::parse).collect::<Result<Vec<u32>, _>>();
        let sampler = Sampler::start(&pids.map_err(|_| format!("no numbers: {said}"))?)?;
        let done = watched.finish(self.timeout);
        let peak = sampler.stop();
        let done = done?;
        check_ok(&done)?;
        let measured = format!(
            "peak {} under a limit of {} and {} of slack; {} samples, longest gap {:.1?}, {:.1?} in all",
            in_mib(peak.bytes),
            in_mib(limit),
            in_mib(slack),
            peak.samples,
            peak.longest_gap,
            done.wall
        );
        eprintln!("{name}: {measured}");
        if peak.bytes >= limit + slack {
            return Err(measured.into());
        }
        some_out(&run.stats).map(drop)
    }
}

/// Blocks of 512 bytes that the files without a name hold which a process has open.
fn blocks_held(pid: u32) -> u64 {
    use std::os::unix::fs::MetadataExt;
    let Ok(files) = std::fs::read_dir(format!("/proc/{pid}/fd")) else { return 0 };
    let files = files.flatten().filter_map(|file| std::fs::metadata(file.path()).ok());
    files.filter(|about| about.is_file() && about.nlink() == 0).map(|about| about.blocks()).sum()
}

/// How often a device of the run went before it ended.
fn switch_until_it_ends(pageout: &Path, run: &str) -> Result<usize, String> {
    let call = |arguments: &[&str]| -> Result<Option<String>, String> {
        let output = Command::new(pageout).args(arguments).args(["--run", run]).output();
        let output = output.map_err(|e| e.to_string())?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        match output.status.success() {
            true => Ok(Some(String::from_utf8_lossy(&output.stdout).into_owned())),
            false if said.contains("no tree of yours") || said.contains("tree has ended") => Ok(None),
            false => Err(format!("pageout {}: {said}", arguments.join(" "))),
        }
    };
    let file = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("switch-{run}"));
    let file = format!("{},size=1G", file.display());
    // The run may not listen yet.
    let patience = std::time::Instant::now() + Duration::from_secs(5);
    while call(&["show"])?.is_none() && std::time::Instant::now() < patience {
        std::thread::sleep(Duration::from_millis(5));
    }
    for turn in 0.. {
        let Some(before) = call(&["show", "--raw", "--noheadings"])? else { return Ok(turn) };
        let spec = if turn % 2 == 0 { file.as_str() } else { "mem,size=1G" };
        let Some(_) = call(&["swapon", spec])? else { return Ok(turn) };
        std::thread::sleep(Duration::from_millis(20));
        let name = before.split(' ').next().unwrap_or_default();
        let Some(_) = call(&["swapoff", name])? else { return Ok(turn) };
    }
    unreachable!("it ends")
}

/// Pages out, by the statistics of a run; the file is removed.
fn swapped_out(stats: &PathBuf) -> Result<u64, Failed> {
    counters(stats, ["pswpout"]).map(|[out]| out)
}

/// The same; there must be some.
fn some_out(stats: &PathBuf) -> Result<u64, Failed> {
    match swapped_out(stats)? {
        0 => Err("nothing was swapped out".into()),
        out => Ok(out),
    }
}

/// Counters by the statistics of a run; the file is removed.
fn counters<const N: usize>(stats: &PathBuf, names: [&str; N]) -> Result<[u64; N], Failed> {
    let json = std::fs::read_to_string(stats).map_err(|e| format!("{}: {e}", stats.display()))?;
    let _ = std::fs::remove_file(stats);
    let mut values = [0; N];
    for (value, name) in values.iter_mut().zip(names) {
        *value = harness::counter(&json, name).ok_or(format!("no {name} in the statistics: {json}"))?;
    }
    Ok(values)
}

/// It ended well and said so.
fn check_ok(done: &Done) -> Result<(), Failed> {
    if done.code() != 0 || !done.stdout.ends_with("ok\n") {
        return Err(format!("ended with {}: {}{}", done.code(), done.stdout, done.stderr).into());
    }
    Ok(())
}

fn check_end(trap: &Trap, done: &Done) -> Result<(), String> {
    let code = match trap.end {
        End::Exit(code) => code,
        End::Signal(signal) => 128 + signal,
    };
    let last = match trap.end {
        End::Exit(_) => "ok",
        // Who ends so cannot say more.
        End::Signal(_) => "checked",
    };
    let says_enough = done.stdout.lines().next_back() == Some(last) || done.stdout.starts_with("skip: ");
    if done.code() != code || !says_enough || done.stdout.contains("wrong: ") {
        return Err(format!(
            "ended with {} instead of {code}\n--- standard output:\n{}\n--- standard error:\n{}",
            done.code(),
            done.stdout,
            done.stderr
        ));
    }
    Ok(())
}
