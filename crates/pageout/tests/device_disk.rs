//! Full file systems and block devices. They need root; each test says when it is skipped.

mod device_support;

use device_support::{c, read, round_trip, write_all, Memory, Scratch, MIB};
use pageout::api::Found;
use pageout::device::{Access, Device, Errno, FileDevice, FileOptions, FileSystem, Queue, Run, PAGE};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// Runs a command line; its output, or nothing, and a line that says so, if it cannot.
fn system(arguments: &[&str]) -> Option<String> {
    match Command::new(arguments[0]).args(&arguments[1..]).output() {
        Ok(output) if output.status.success() => Some(String::from_utf8_lossy(&output.stdout).trim().into()),
        other => {
            println!("skipped: {arguments:?}: {other:?}");
            None
        }
    }
}

fn can_mount() -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        println!("skipped: mounting needs root");
    }
    root
}

/// A mount that goes with the test.
struct Mount(PathBuf);

impl Mount {
    fn new(on: PathBuf, arguments: &[&str]) -> Option<Self> {
        std::fs::create_dir_all(&on).unwrap();
        let line = [&["mount"], arguments, &[on.to_str().unwrap()]].concat();
        system(&line).map(|_| Self(on))
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = system(&["umount", self.0.to_str().unwrap()]);
    }
}

/// A loop device over a file on a disk that goes with the test.
struct Loop(String);

impl Loop {
    /// Never over tmpfs: its pages could be swapped out to the device that they back.
    fn new(scratch: &Scratch, size: u64) -> Option<Self> {
        if FileSystem::of_path(&c(&scratch.0)).unwrap().in_memory {
            println!("skipped: a loop device needs a file on a disk");
            return None;
        }
        let image = scratch.0.join("image");
        std::fs::File::create(&image).unwrap().set_len(size).unwrap();
        system(&["losetup", "--find", "--show", "--direct-io=on", image.to_str().unwrap()]).map(Self)
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = system(&["losetup", "--detach", &self.0]);
    }
}

/// Fills a small file system: what fits is kept, the rest says NOSPC, and later there is room again.
fn fill(directory: &Path, options: FileOptions) {
    let size = 64 * MIB as u64;
    let device = FileDevice::create_unlinked(&c(directory), size, options).unwrap();
    println!("{:?} {options:?}: {:?}", FileSystem::of_path(&c(directory)).unwrap(), device.access());
    let pieces = 2048;
    let len = 4 * PAGE;
    let memory = Memory::filled(pieces * len, 19);
    let runs: Vec<Run> =
        (0..pieces).map(|piece| memory.run(piece * len, (piece * 2 * len) as u64, len)).collect();
    let results = write_all(&device, &runs);
    let kept = results.iter().filter(|result| result.is_ok()).count();
    assert!(kept > 0 && kept < pieces, "{kept} of {pieces}");
    let back = Memory::new(len);
    for (piece, result) in results.iter().enumerate() {
        match result {
            Ok(()) => {
                read(&device, back.run(0, runs[piece].at, len)).unwrap();
                assert!(back.words() == &memory.words()[piece * len / 8..][..len / 8], "piece {piece}");
            }
            Err(errno) => assert_eq!(*errno, Errno::NOSPC),
        }
    }
    let last = results.iter().rposition(Result::is_err).unwrap();
    // A good part of it: the file system takes some for itself.
    device.discard(0, runs[kept / 2].at).unwrap();
    rustix::fs::fdatasync(&device).unwrap();
    assert_eq!(write_all(&device, &[runs[last]]), [Ok(())], "room was made");
}

#[test]
fn a_full_tmpfs_is_no_space() {
    let scratch = Scratch::new("full-tmpfs");
    if !can_mount() {
        return;
    }
    let Some(mount) = Mount::new(scratch.0.join("on"), &["-t", "tmpfs", "-o", "size=4m", "tmpfs"]) else {
        return;
    };
    fill(&mount.0, FileOptions::default());
    fill(&mount.0, FileOptions { queue: Queue::Always, ..FileOptions::default() });
}

#[test]
fn a_full_disk_is_no_space() {
    let scratch = Scratch::new("full-disk");
    if !can_mount() {
        return;
    }
    let image = scratch.0.join("image");
    std::fs::File::create(&image).unwrap().set_len(16 << 20).unwrap();
    if FileSystem::of_path(&c(&image)).unwrap().in_memory {
        return println!("skipped: a loop device needs a file on a disk");
    }
    let image = image.to_str().unwrap();
    if system(&["mkfs.ext4", "-q", "-m", "0", "-O", "^has_journal", image]).is_none() {
        return;
    }
    let Some(mount) = Mount::new(scratch.0.join("on"), &["-o", "loop", image]) else { return };
    for queue in [Queue::Never, Queue::Always] {
        fill(&mount.0, FileOptions { queue, ..FileOptions::default() });
        fill(&mount.0, FileOptions { direct: false, queue });
    }
}

#[test]
fn block_devices_work_and_end() {
    let scratch = Scratch::new("block");
    if !can_mount() {
        return;
    }
    let size = 32 * MIB as u64;
    let Some(disk) = Loop::new(&scratch, size) else { return };
    // By a name as udev gives it.
    let link = scratch.0.join("by-uuid");
    std::os::unix::fs::symlink(&disk.0, &link).unwrap();
    // The child in which another test begins a tool has all that is open here until it executes that.
    let open = || {
        let is_free =
            |found: &Result<Found, String>| !found.as_ref().is_err_and(|why| why.starts_with("in use"));
        (0..500)
            .map(|_| Found::open(&link))
            .inspect(|_| std::thread::sleep(Duration::from_millis(10)))
            .find(is_free)
    };
    assert!(open().expect("free").unwrap_err().starts_with("holds data that is not swap"));
    if system(&["mkswap", &disk.0]).is_none() {
        return;
    }
    let found = open().expect("free").unwrap();
    assert_eq!((found.is_block_device, found.len, found.header), (true, size, Some(size)));
    assert!(Found::open(&link).unwrap_err().starts_with("in use"));
    // As udev does, of each disk that somebody has closed.
    let shared = || {
        let disk = std::fs::File::open(&disk.0).unwrap();
        rustix::fs::flock(&disk, rustix::fs::FlockOperation::NonBlockingLockShared).unwrap();
        disk
    };
    drop(shared());
    drop(found);
    let locked = shared();
    let found = open().expect("free").unwrap();
    drop(locked);
    let device = FileDevice::from_fd(found.file.into(), FileOptions::default()).unwrap();
    assert_eq!((device.access(), device.size()), (Access::Direct, Ok(size)));
    round_trip(&device);
    let memory = Memory::filled(2 * PAGE, 23);
    assert_eq!(read(&device, memory.run(0, size - PAGE as u64, 2 * PAGE)), Err(Errno::NXIO));
    assert_eq!(read(&device, memory.run(0, size, PAGE)), Err(Errno::NXIO));
    assert_eq!(write_all(&device, &[memory.run(0, size, PAGE)]), [Err(Errno::NOSPC)]);
    match device.discard(0, size) {
        Err(Errno::OPNOTSUPP) => println!("skipped: {} cannot discard", disk.0),
        answer => answer.unwrap(),
    }
    assert_eq!(device.set_size(size / 2), Err(Errno::INVAL));
}
