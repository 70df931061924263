//! Every mistake has one line that says what to do, and exit status 125 unless the program is at fault.

mod common;

use std::ffi::OsStr;
use std::fs;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::process::Command;

use common::{can_unshare, finish, is_root, set_mode, wait, Place};

/// Runs `pageout run ARGS`, which must fail with `status` and say exactly `line`.
#[track_caller]
fn refused(place: &Place, args: &[&str], status: i32, line: &str) {
    let ended = finish(&mut place.pageout([&["run"], args].concat()));
    assert_eq!(ended.err, format!("pageout: {line}\n"));
    assert_eq!((ended.status, ended.out.as_str()), (status, ""));
}

/// The same with one swap device, whose path stands for `{}` in the line.
#[track_caller]
fn swap_refused(place: &Place, spec: &str, line: &str) {
    let path = spec.split(',').next().unwrap();
    refused(place, &["--swap", spec, "true"], 125, &line.replace("{}", path));
}

#[test]
fn command_lines() {
    let place = Place::new();
    let see = "see pageout run --help";
    refused(
        &place,
        &[],
        125,
        &format!("the following required arguments were not provided: <COMMAND>...; {see}"),
    );
    refused(&place, &["--fast", "true"], 125, &format!("unexpected argument '--fast' found; {see}"));
    refused(&place, &["-q", "-v", "true"], 125, {
        &format!("the argument '--quiet...' cannot be used with '--verbose...'; {see}")
    });
    let see = "a program is run by pageout run [OPTIONS] COMMAND; see pageout --help";
    let says = |first: &OsStr, line: &str| {
        let ended = finish(&mut place.pageout([first]));
        assert_eq!((ended.status, ended.err), (125, format!("pageout: {line}; {see}\n")));
    };
    says("frob".as_ref(), "unrecognized subcommand 'frob'");
    says("--memory=1G".as_ref(), "unexpected argument '--memory' found");
    says(OsStr::from_bytes(b"\xff"), "unrecognized subcommand '\u{fffd}'");
}

#[test]
fn no_room_for_descriptors() {
    let place = Place::new();
    let ended = finish(&mut place.pageout_after("ulimit -n 8", &["run", "/bin/true"]));
    let line = "pageout: open files: at most 8; allow 64 or more (ulimit -n)\n";
    assert_eq!((ended.status, ended.err.as_str()), (125, line));
}

#[test]
fn sizes_and_limits() {
    let place = Place::new();
    let takes = "takes a size like 512M, 4GiB, 50% or max";
    refused(&place, &["--memory", "", "true"], 125, &format!("--memory (empty): {takes}"));
    for size in ["12Q", "-1", "lots", "%", "M"] {
        refused(&place, &["--memory", size, "true"], 125, &format!("--memory {size}: {takes}"));
    }
    refused(&place, &["-m", "8M", "true"], 125, "--memory 8M: too small; the least that works is 16M");
    refused(
        &place,
        &["-m", "300%", "true"],
        125,
        "--memory 300%: takes a percentage above 0% and up to 100%",
    );
}

#[test]
fn other_settings() {
    let place = Place::new();
    refused(
        &place,
        &["--swapin", "often", "true"],
        125,
        "--swapin often: takes auto, always, madvise or never",
    );
    refused(
        &place,
        &["--max-order", "10", "true"],
        125,
        "--max-order 10: takes an order from 0 (4K) to 9 (2M)",
    );
    let nine = ["--swap", "mem"].repeat(9);
    refused(&place, &[nine.as_slice(), &["true"]].concat(), 125, "--swap: 9 devices; takes at most 8");
    let gone = place.path("gone/stats");
    let gone = gone.to_str().unwrap();
    refused(&place, &["--stats", gone, "true"], 125, {
        &format!("--stats {gone}: no such file or directory; name a file that can be written")
    });
    refused(&place, &["--stats", ".", "true"], 125, "--stats .: is a directory; name a file in it");
}

#[test]
fn environment_and_files() {
    let place = Place::new();
    let ended = finish(place.pageout(["run", "true"]).env("PAGEOUT_STRICT", "maybe"));
    assert_eq!(ended.err, "pageout: PAGEOUT_STRICT maybe: takes yes or no\n");
    let ended = finish(place.pageout(["run", "true"]).env("PAGEOUT_MEMORY", OsStr::from_bytes(b"64M\xff")));
    assert_eq!(ended.err, "pageout: PAGEOUT_MEMORY: not UTF-8; write it in UTF-8, or unset it\n");
    assert_eq!(ended.status, 125);
    let ended = finish(place.pageout(["run", "true"]).env("PAGEOUT_CONFIG", ""));
    assert_eq!((ended.status, ended.err.as_str()), (0, ""));
    let file = place.file("conf", b"# limits\nmemory = none\n", 0o600);
    let file = file.to_str().unwrap();
    refused(&place, &["--config", file, "true"], 125, {
        &format!("{file}:2: memory none: takes a size like 512M, 4GiB, 50% or max")
    });
    fs::write(file, "speed = 9").unwrap();
    refused(&place, &["--config", file, "true"], 125, {
        &format!("{file}:1: speed: no such setting; there are memory, swap, swapin, max-order, strict, any-user, stats")
    });
    refused(&place, &["--config", "gone", "true"], 125, {
        "gone: cannot be read: no such file or directory; name another with --config or PAGEOUT_CONFIG"
    });
}

/// Makes a FIFO.
fn pipe(path: &Path) {
    assert!(Command::new("mkfifo").arg(path).status().unwrap().success());
}

#[test]
fn settings_that_nobody_named_are_not_waited_for() {
    let place = Place::new();
    fs::create_dir(place.path(".config")).unwrap();
    let conf = place.path(".config/pageout.conf");
    let line = format!("pageout: {}: is no file; remove it, or name it with --config\n", conf.display());
    let run = |args: &[&str]| finish(place.pageout(args).env("XDG_RUNTIME_DIR", place.path("")));
    pipe(&conf);
    for args in [&["run", "true"][..], &["doctor"]] {
        let ended = run(args);
        assert_eq!((ended.status, &ended.err), (125, &line), "{}", ended.out);
    }
    fs::remove_file(&conf).unwrap();
    std::os::unix::fs::symlink("/dev/zero", &conf).unwrap();
    let ended = run(&["run", "true"]);
    assert_eq!((ended.status, ended.err), (125, line));
    fs::remove_file(&conf).unwrap();
    std::os::unix::fs::symlink("/dev/null", &conf).unwrap();
    let ended = run(&["run", "true"]);
    assert_eq!((ended.status, ended.err.as_str()), (0, ""));
    // Who names one may mean a pipe.
    let mut command = place.prepared("bash");
    let script = "\"$0\" run --config <(sleep 0.1; echo memory = none) true";
    command.args(["-c", script, env!("CARGO_BIN_EXE_pageout")]).current_dir(place.path(""));
    let ended = finish(&mut command);
    assert!(ended.err.contains(":1: memory none: takes "), "{}", ended.err);
}

#[test]
fn what_is_another_users_decides_nothing_for_root() {
    if !is_root() {
        return println!("skipped: not root");
    }
    let place = Place::new();
    let home = place.path("theirs");
    fs::create_dir_all(home.join(".config")).unwrap();
    let conf = home.join(".config/pageout.conf");
    fs::write(&conf, "memory = 64M\n").unwrap();
    for path in [&conf, &home] {
        std::os::unix::fs::chown(path, Some(65533), None).unwrap();
    }
    let run = |script: &str| {
        let mut run = place.pageout(["run", "-m", "64M", "sh", "-c", script]);
        finish(run.env("HOME", &home).env("XDG_RUNTIME_DIR", &home).env_remove("XDG_CONFIG_HOME"))
    };
    let ended = run("true");
    let refused = "belongs to another user; set HOME to your own, or name it with --config";
    assert_eq!((ended.status, ended.err), (125, format!("pageout: {}: {refused}\n", conf.display())));
    fs::remove_file(&conf).unwrap();
    // Whatever comes to its name while root waits for what a pipe says.
    let (mine, victim) = (place.file("mine", b"", 0o600), place.path("victim"));
    pipe(&conf);
    std::os::unix::fs::chown(&conf, Some(65533), None).unwrap();
    let mut command = place.pageout(["run", "-m", "64M", "true"]);
    let mut child = command.env("HOME", &home).env_remove("XDG_CONFIG_HOME").spawn().unwrap();
    let mut writes = fs::File::options();
    writes.write(true).custom_flags(libc::O_NONBLOCK);
    while child.try_wait().unwrap().is_none() {
        let Ok(mut writer) = writes.open(&conf) else { continue };
        std::os::unix::fs::symlink(&mine, home.join("link")).unwrap();
        fs::rename(home.join("link"), &conf).unwrap();
        let _ = writeln!(writer, "stats = {}", victim.display());
        break;
    }
    let ended = wait(child);
    let line = format!("pageout: {}: {refused}\n", conf.display());
    assert_eq!((victim.exists(), ended.status, ended.err), (false, 125, line));
    fs::remove_file(&conf).unwrap();
    // Nor are agent and socket put where that user may put others in their place.
    let ended = run("echo $LD_PRELOAD $PAGEOUT_RUN");
    assert!(ended.status == 0 && !ended.out.contains("theirs"), "{} {}", ended.out, ended.err);
}

/// Where the agent is put, a service's or root's, is nowhere that somebody else can rename.
#[test]
fn agents_lie_where_nobody_else_can_put_another() {
    use std::os::unix::fs::{chown, symlink};
    if !is_root() {
        return println!("skipped: not root");
    }
    let place = Place::new();
    let work = std::env::temp_dir().join(format!("pageout-reach-{}", std::process::id()));
    let make = |name: &str, (user, group): (u32, u32), mode| {
        fs::create_dir(work.join(name)).unwrap();
        chown(work.join(name), Some(user), Some(group)).unwrap();
        set_mode(&work.join(name), mode);
    };
    const US: (u32, u32) = (65533, 65533);
    make("", (0, 0), 0o755);
    common::copy_program(env!("CARGO_BIN_EXE_pageout"), &work.join("pageout"));
    make("runtime", US, 0o700);
    let (own, runtime) = (|home: &str| format!("{home}/.cache/pageout"), |_: &str| "runtime/pageout".into());
    let lies = |home: &str, place_of: &dyn Fn(&str) -> String| {
        let mut command = Command::new("setpriv");
        command.args(["--reuid=65533", "--regid=65533", "--clear-groups", "./pageout", "doctor"]);
        place.prepare(&mut command);
        command.env("HOME", work.join(home)).env("XDG_RUNTIME_DIR", work.join("runtime"));
        let ended = finish(command.env("TMPDIR", ".").env_remove("PAGEOUT_AGENT").current_dir(&work));
        let line = format!("unpacked as {}/", work.join(place_of(home)).display());
        assert!(ended.out.contains(&line), "{home}: {line}\n{}", ended.out);
    };
    make("home", US, 0o775);
    lies("home", &own);
    make("open", US, 0o777);
    lies("open", &runtime);
    make("sticky", (0, 0), 0o1777);
    lies("sticky", &own);
    make("theirs", (0, 0), 0o1777);
    make("theirs/.cache", (65532, 65532), 0o777);
    lies("theirs", &runtime);
    make("team", (0, 65533), 0o2775);
    lies("team", &runtime);
    make("linked", (65532, 65532), 0o755);
    make("target", US, 0o700);
    symlink(work.join("target"), work.join("linked/.cache")).unwrap();
    lies("linked", &runtime);

    chown(work.join("runtime"), Some(0), Some(0)).unwrap();
    fs::remove_dir_all(work.join("runtime/pageout")).unwrap();
    let mut command = place.pageout(["run", "-m", "64M", "sh", "-c", "echo $LD_PRELOAD"]);
    command.env("HOME", work.join("team")).env("XDG_RUNTIME_DIR", work.join("runtime"));
    let ended = finish(command.env_remove("PAGEOUT_AGENT"));
    assert!(ended.status == 0 && !ended.out.contains("team"), "{}{}", ended.out, ended.err);
    fs::remove_dir_all(&work).unwrap();
}

#[test]
fn programs() {
    let place = Place::new();
    refused(&place, &["no-such-program"], 127, "no-such-program: not found; check its name and PATH");
    refused(&place, &[""], 127, "(empty): not found; name a program");
    refused(&place, &["/no/such"], 127, "/no/such: not found; check its name and PATH");
    refused(&place, &["/"], 126, "/: is a directory; name a program");
    refused(&place, &["/bin/true/x"], 126, "/bin/true/x: not a directory; name a program");
    place.file("notes", b"text", 0o600);
    refused(&place, &["./notes"], 126, "./notes: not executable; chmod +x ./notes if it is a program");
    place.file("script", b"#!/no/such/interpreter\n", 0o700);
    let no_interpreter = "its interpreter was not found; check its first line, or its loader (file(1))";
    refused(&place, &["./script"], 127, &format!("./script: {no_interpreter}"));

    let mut elf = fs::read("/bin/true").unwrap();
    let mut program = |name: &str, change: &dyn Fn(&mut Vec<u8>)| {
        let before = elf.clone();
        change(&mut elf);
        place.file(name, &elf, 0o700);
        elf = before;
    };
    // The segment that names the interpreter is none.
    program("static", &|elf| {
        let at = (64..).step_by(56).find(|at| elf[*at..at + 4] == [3, 0, 0, 0]).unwrap();
        elf[at] = 0;
    });
    program("narrow", &|elf| elf[4] = 1);
    program("plain", &|_| {});
    program("unloadable", &|elf| {
        let at = elf.windows(10).position(|name| name == b"/ld-linux-").unwrap();
        elf[at + 1] = b'x';
    });
    place.file("ld-musl-x86_64.so.1", b"", 0o700);
    program("musl", &|elf| {
        let loader = b"/lib64/ld-linux-x86-64.so.2";
        let at = elf.windows(loader.len()).position(|name| name == loader).unwrap();
        elf[at..at + loader.len()].copy_from_slice(b"./ld-musl-x86_64.so.1\0\0\0\0\0\0");
    });
    program("short", &|elf| elf.truncate(100));
    program("shorter", &|elf| elf.truncate(40));
    program("garbage", &|elf| elf[4..].fill(b'x'));
    program("empty", &|elf| elf[56..58].fill(0));
    refused(&place, &["./unloadable"], 127, &format!("./unloadable: {no_interpreter}"));
    refused(&place, &["./short"], 126, "./short: is cut short; name a whole program");
    refused(&place, &["./shorter"], 126, "./shorter: is cut short; name a whole program");
    for none in ["./garbage", "./empty"] {
        refused(&place, &[none], 126, &format!("{none}: is not a valid program; name another"));
    }
    refused(&place, &["./static"], 125, {
        "./static: statically linked, so pageout cannot be preloaded; use a dynamically linked build"
    });
    refused(&place, &["./musl"], 125, {
        "./musl: linked with another libc than GNU's, so pageout cannot be preloaded; use a build for glibc"
    });
    refused(&place, &["./narrow"], 125, {
        "./narrow: for another machine than this 64-bit one, so pageout cannot be preloaded; \
         use a 64-bit build for this machine"
    });
    place.file("wrapper", b"#!./static -x\n", 0o700);
    refused(&place, &["./wrapper"], 125, {
        "./wrapper: ./static: statically linked, so pageout cannot be preloaded; use a dynamically linked build"
    });
    if is_root() {
        let path = place.path("plain");
        std::os::unix::fs::chown(&path, Some(65534), None).unwrap();
        set_mode(&path, 0o4755);
        refused(&place, &["./plain"], 125, {
            "./plain: setuid or setgid, so pageout cannot be preloaded; run a copy without these bits, \
             or run it as its owner"
        });
    }
}

#[test]
fn programs_that_may_not_be_run_where_they_are() {
    if !can_unshare() {
        return;
    }
    let place = Place::new();
    fs::create_dir(place.path("data")).unwrap();
    let script = "mount -t tmpfs -o noexec none data && cp /bin/true data && \"$0\" run data/true
                  chmod -x data/true && exec \"$0\" run data/true";
    let ended = place.with_own_mounts(script);
    let lines = "pageout: data/true: on a file system mounted noexec; run a copy on another\n\
                 pageout: data/true: not executable; chmod +x data/true if it is a program\n";
    assert_eq!((ended.status, ended.err.as_str()), (126, lines));
}

#[test]
fn swap_paths() {
    let place = Place::new();
    let takes = "takes PATH or mem, then any of ,size=8G ,pri=5 ,discard ,rotational";
    swap_refused(&place, "", &format!("--swap: (empty): {takes}"));
    swap_refused(&place, "mem,fast", &format!("--swap: mem,fast: fast: {takes}"));
    swap_refused(&place, ".", "{}: is a directory; name a file in it, ./swap");
    swap_refused(&place, "/dev/null", "{}: neither a file nor a block device; name one of these");
    swap_refused(
        &place,
        "gone/swap",
        "{}: its directory: no such file or directory; make it, or name another file",
    );
    let no_device = "no such device; name one that lsblk shows, or a file elsewhere";
    swap_refused(&place, "/dev/pageout0,size=64M", &format!("{{}}: {no_device}"));
    swap_refused(&place, "LABEL=none", &format!("/dev/disk/by-label/none: {no_device}"));
    swap_refused(&place, "new,size=1M", "{}: too small: 1M; the least that works is 64M");
    swap_refused(&place, "new,size=65T", "--swap: size=65T: too large; the most that works is 64T");
    swap_refused(&place, "mem,size=1M", "{}: too small: 1M; the least that works is 64M");
    assert!(!place.path("new").exists());

    place.file("none", b"", 0o600);
    swap_refused(&place, "none,size=32M", "{}: too small: 32M; the least that works is 64M");
    assert_eq!(fs::metadata(place.path("none")).unwrap().len(), 0);

    place.sparse("small", 4 << 20);
    swap_refused(&place, "small", "{}: too small: 4M; the least that works is 64M");
    place.file("letters", &[b'x'; 8192], 0o600);
    swap_refused(&place, "letters", {
        "{}: holds data that is not swap, or what a killed run left there; run mkswap {} if it may go, or name a new file"
    });
    assert_eq!(fs::read(place.path("letters")).unwrap(), [b'x'; 8192]);
    place.file("open", b"", 0o644);
    swap_refused(&place, "open", "{}: others can read or write it (mode 0644); run chmod 600 {}");
    // Somebody may do what the line says.
    place.file("public", &[b'x'; 8192], 0o644);
    swap_refused(&place, "public", {
        "{}: holds data that is not swap, or what a killed run left there; run mkswap {} if it may go, or name a new file"
    });
    std::os::unix::fs::symlink("small", place.path("link")).unwrap();
    swap_refused(&place, "link", "{}: is a symbolic link; name the file itself");

    fs::create_dir(place.path("shared")).unwrap();
    set_mode(&place.path("shared"), 0o1777);
    swap_refused(&place, "shared/swap", {
        "{}: others can write shared; name a file in a directory of your own, or none and set TMPDIR=shared for a \
         file without a name"
    });
    // Nor one that is there: another could be put in its place.
    place.sparse("shared/there", 64 << 20);
    swap_refused(&place, "shared/there", {
        "{}: others can write shared; name a file in a directory of your own, or none and set TMPDIR=shared for a \
         file without a name"
    });
    if is_root() {
        let theirs = place.sparse("theirs", 64 << 20);
        std::os::unix::fs::chown(theirs, Some(65534), None).unwrap();
        swap_refused(&place, "theirs", "{}: belongs to user 65534; name a file of your own");
    }
    // Whatever another run has written there by now.
    let busy = std::fs::File::open(place.file("busy", &[b'x'; 8192], 0o600)).unwrap();
    // SAFETY: takes integers only.
    unsafe { libc::flock(busy.as_raw_fd(), libc::LOCK_EX) };
    swap_refused(&place, "busy", {
        "{}: in use by another device, here or of another pageout; name another file"
    });
    refused(&place, &["-s", "twice,size=64M", "-s", "twice,size=64M", "true"], 125, {
        "twice: in use by another device, here or of another pageout; name another file"
    });
    assert!(!place.path("twice").exists());
    let ended = finish(&mut place.pageout(["run", "-s", "new,size=60T", "true"]));
    assert!(ended.err.starts_with("pageout: new: size=60T, but its file system has only "), "{}", ended.err);
    assert!(ended.err.ends_with(" free; free some, or give less\n"), "{}", ended.err);
}

/// Where root can have a loop device. Swap is what it holds, so that nothing else is wrong with it.
#[test]
fn disks_that_can_only_be_read() {
    let place = Place::new();
    let image = place.sparse("image", 80 << 20);
    let made = finish(place.prepared("mkswap").arg(&image)).status == 0;
    let attached = finish(place.prepared("losetup").args(["--find", "--show", "--read-only"]).arg(&image));
    if !made || attached.status != 0 {
        return;
    }
    let disk = attached.out.trim();
    let run = finish(&mut place.pageout(["run", "--swap", disk, "true"]));
    let doctor = finish(&mut place.pageout(["doctor", "--swap", disk]));
    finish(place.prepared("losetup").args(["--detach", disk]));
    let line = format!("pageout: {disk}: is read-only; name a disk that can be written\n");
    assert_eq!((run.status, run.err), (125, line));
    assert!(doctor.out.contains(&format!("LACKS  swap         {disk}: is read-only\n")), "{}", doctor.out);
    assert_eq!(doctor.status, 1);
}

#[test]
fn full_file_systems_and_tmpfs() {
    if !can_unshare() {
        return;
    }
    let place = Place::new();
    fs::create_dir(place.path("tmp")).unwrap();
    let run = |size: &str| {
        let mount = format!("mount -t tmpfs -o size={size},mode=700 none tmp");
        place.with_own_mounts(&format!("{mount} && TMPDIR=tmp exec \"$0\" run true"))
    };
    let warning = "pageout: tmp: on tmpfs, so what is swapped out stays in memory; set TMPDIR to a directory on a disk, \
                   or name a file with --swap\n";
    let ended = run("8M");
    let full = "pageout: tmp: its file system has only 8M free; free some, or name another place with --swap or TMPDIR\n";
    assert_eq!((ended.status, ended.err.as_str()), (125, format!("{warning}{full}").as_str()));
    let ended = run("1G");
    assert_eq!((ended.status, ended.err.as_str()), (0, warning));
}

#[test]
fn a_list_of_other_processes() {
    if !can_unshare() {
        return;
    }
    let place = Place::new();
    let mut command = Command::new("unshare");
    command.args(["-p", "-f", env!("CARGO_BIN_EXE_pageout"), "run", "true"]);
    place.prepare(&mut command);
    let ended = finish(&mut command);
    let line = "pageout: /proc: of another PID namespace; mount this one's: mount -t proc proc /proc\n";
    assert_eq!((ended.status, ended.err.as_str()), (125, line));
}

#[test]
fn a_home_that_is_not_there_is_not_made() {
    let place = Place::new();
    let home = place.path("nonexistent");
    fs::create_dir(place.path("runtime")).unwrap();
    let mut command = place.pageout(["run", "true"]);
    command.env_remove("PAGEOUT_AGENT").env("HOME", &home).env("XDG_RUNTIME_DIR", place.path("runtime"));
    let ended = finish(&mut command);
    assert_eq!((ended.status, ended.err.as_str()), (0, ""));
    assert!(!home.exists());
}

/// As that of a service, or of a user who may not log in: every run was refused.
#[test]
fn a_home_that_is_no_directory_has_no_settings() {
    let place = Place::new();
    fs::create_dir(place.path("runtime")).unwrap();
    for variable in ["HOME", "XDG_CONFIG_HOME"] {
        let mut command = place.pageout(["run", "-m", "64M", "true"]);
        command.env_remove("PAGEOUT_AGENT").env("XDG_RUNTIME_DIR", place.path("runtime"));
        let ended = finish(command.env(variable, "/dev/null"));
        assert_eq!((ended.status, ended.err.as_str()), (0, ""), "{variable}");
    }
    let line =
        "/dev/null/conf: cannot be read: not a directory; name another with --config or PAGEOUT_CONFIG";
    refused(&place, &["--config", "/dev/null/conf", "true"], 125, line);
}

#[test]
fn agent_directories() {
    if !can_unshare() {
        return;
    }
    let place = Place::new();
    fs::create_dir(place.path("cache")).unwrap();
    let directory = place.path("cache");
    let shown = directory.display();
    let ended = place.with_own_mounts(&format!(
        "mount -t tmpfs -o noexec,mode=700 none cache && unset PAGEOUT_AGENT &&
         PAGEOUT_AGENT_DIR='{shown}' exec \"$0\" run true"
    ));
    assert_eq!(
        ended.err,
        format!(
            "pageout: agent: {shown}: on a file system mounted noexec; set PAGEOUT_AGENT_DIR to another directory\n"
        )
    );
    assert_eq!(ended.status, 125);
}

/// What the user named may be another's: nothing is said of shutting or removing it.
#[test]
fn agents_that_are_none() {
    let place = Place::new();
    let refused = |variable: &str, value: &str, why: &str| {
        let mut command = place.pageout(["run", "true"]);
        let ended = finish(command.env_remove("PAGEOUT_AGENT").env(variable, value));
        assert_eq!((ended.status, ended.err), (125, format!("pageout: {why}\n")));
    };
    fs::create_dir(place.path("open")).unwrap();
    set_mode(&place.path("open"), 0o755);
    let open = place.path("open").canonicalize().unwrap().display().to_string();
    let text = place.file("text", b"text", 0o644).canonicalize().unwrap().display().to_string();
    let program = fs::canonicalize("/bin/true").unwrap().display().to_string();
    for none in [&text, &program, &open] {
        refused(
            "PAGEOUT_AGENT",
            none,
            &format!("PAGEOUT_AGENT {none}: no library of this machine; unset it"),
        );
    }
    let remedy = "set PAGEOUT_AGENT_DIR to another directory";
    refused("PAGEOUT_AGENT_DIR", &open, {
        &format!("agent: {open}: others can enter it (mode 0755); {remedy}")
    });
    refused("PAGEOUT_AGENT_DIR", &text, &format!("agent: {text}: is not a directory; {remedy}"));
}

/// As a user who may not use userfaultfd, nor write what belongs to others.
#[test]
fn without_privileges() {
    if !is_root() {
        return;
    }
    let place = Place::new();
    place.sparse("swap", 64 << 20);
    let work = std::env::temp_dir().join(format!("pageout-nobody-{}", std::process::id()));
    fs::create_dir(&work).unwrap();
    std::os::unix::fs::chown(&work, Some(65534), Some(65534)).unwrap();
    common::copy_program(env!("CARGO_BIN_EXE_pageout"), &work.join("pageout"));
    let theirs = work.join("theirs");
    fs::write(&theirs, "").unwrap();
    set_mode(&theirs, 0o600);
    let run = |args: &[&str]| {
        let mut command = Command::new("setpriv");
        command.args(["--reuid=65534", "--regid=65534", "--clear-groups", "./pageout", "run"]).args(args);
        place.prepare(&mut command);
        finish(command.env("TMPDIR", ".").env("HOME", &work).current_dir(&work))
    };
    let no_write = run(&["-s", "theirs", "true"]);
    let no_directory = run(&["-s", "/root-only-in-name/../swap", "true"]);
    let no_fault = run(&["true"]);
    fs::remove_dir_all(&work).unwrap();
    assert_eq!(no_write.err, "pageout: theirs: not writable: permission denied; name a file of your own\n");
    assert_eq!(no_directory.status, 125);
    let denied = "pageout: userfaultfd: /dev/userfaultfd: permission denied, ";
    assert!(no_fault.err.starts_with(denied), "{}", no_fault.err);
    assert!(no_fault.err.ends_with("or run \"pageout doctor\"\n"), "{}", no_fault.err);
    assert_eq!((no_fault.err.lines().count(), no_fault.status), (1, 125));
}

/// As vfat and CIFS do, this one shows modes of its own.
#[test]
fn a_file_system_without_modes_gets_no_swap_file_that_others_read() {
    let place = Place::new();
    ["real", "seen"].iter().for_each(|name| fs::create_dir(place.path(name)).unwrap());
    for (modes, is_refused) in [("a=r,u+w", true), ("go=,u=rw", false)] {
        let script = format!(
            "bindfs -p {modes},u+D real seen || exit 77; cd seen
             \"$0\" run -s swap,size=64M true; echo $?; TMPDIR=. \"$0\" run true; echo $?; ls -A; cd ..; umount seen"
        );
        let ended = place.with_own_mounts(&script);
        if ended.status == 77 || ended.err.starts_with("unshare: ") {
            return println!("skipped: cannot mount by bindfs: {}", ended.err);
        }
        let statuses = if is_refused { "125\n125\n" } else { "0\n0\n" };
        assert_eq!(ended.out, statuses, "{}", ended.err);
        let lines = "pageout: swap: others could read it on that file system; mount that with umask=077, or name a file elsewhere\n\
            pageout: . (unlinked file): cannot be made: others could read it on that file system; set TMPDIR to a directory on a \
            disk, or name a file with --swap\n";
        assert_eq!(ended.err, if is_refused { lines } else { "" });
    }
}
