//! Which files and disks may be devices.

mod device_support;

use device_support::Scratch;
use pageout::api::{Found, IN_USE};
use std::fs::{set_permissions, File, OpenOptions, Permissions};
use std::os::unix::fs::{FileExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;
use std::process::Command;
use std::sync::{Mutex, PoisonError};

const SIZE: u64 = 1 << 20;

/// One test at a time: the child in which one begins a tool has all that is open here until it executes that, locks too.
static ALONE: Mutex<()> = Mutex::new(());

/// Runs a tool; what it printed, or nothing, and a line that says so, where it is not installed.
fn tool(name: &str, arguments: &[&str], file: &Path) -> Option<String> {
    let path = std::env::var("PATH").unwrap_or_default() + ":/usr/sbin:/sbin";
    match Command::new(name).args(arguments).arg(file).env("PATH", path).output() {
        Err(error) => {
            println!("skipped: {name}: {error}");
            None
        }
        Ok(output) => {
            assert!(output.status.success(), "{name}: {output:?}");
            Some(String::from_utf8(output.stdout).unwrap())
        }
    }
}

fn create(path: &Path) -> File {
    let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path).unwrap();
    file.set_len(SIZE).unwrap();
    file
}

fn refused(path: &Path) -> String {
    let why = Found::open(path).unwrap_err();
    println!("{}: {why}", path.display());
    why
}

#[test]
fn what_mkswap_writes_is_read() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let scratch = Scratch::new("mkswap");
    let path = scratch.0.join("swap");
    let file = create(&path);
    if tool("mkswap", &["-L", "made by mkswap"], &path).is_none() {
        return;
    }
    let found = Found::open(&path).unwrap();
    assert_eq!((found.header, found.room(), found.len), (Some(SIZE), SIZE, SIZE));
    assert!(found.has_holes && !found.is_block_device);
    drop(found);
    // What lies behind is not swap's.
    file.write_all_at(b"theirs", SIZE).unwrap();
    let found = Found::open(&path).unwrap();
    assert_eq!((found.room(), found.len), (SIZE, SIZE + 6));
    drop(found);
    // It has become smaller than the header says.
    file.set_len(SIZE / 2).unwrap();
    assert_eq!(refused(&path), "swap header for 1M, but the device has 512K; enlarge it or run mkswap on it");
}

#[test]
fn other_page_sizes_are_named() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let scratch = Scratch::new("pagesize");
    let path = scratch.0.join("swap");
    create(&path);
    if tool("mkswap", &["-p", "65536"], &path).is_some() {
        assert_eq!(refused(&path), "swap header for pages of 64K, not 4K; run mkswap on it");
    }
}

#[test]
fn files_that_others_may_use_are_refused() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let scratch = Scratch::new("rights");
    let path = scratch.0.join("swap");
    let name = path.display();
    let file = create(&path);
    let found = Found::open(&path).unwrap();
    assert_eq!((found.header, found.room()), (None, SIZE));
    assert_eq!(refused(&path), IN_USE);
    drop(found);
    set_permissions(&path, Permissions::from_mode(0o644)).unwrap();
    assert_eq!(refused(&path), format!("others can read or write it (mode 0644); run chmod 600 {name}"));
    // Somebody may do what the line says.
    file.write_all_at(b"data", 0).unwrap();
    assert!(refused(&path).starts_with("holds data that is not swap"));
    file.set_len(0).unwrap();
    set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
    assert_eq!(Found::open(&path).unwrap().room(), 0);

    std::os::unix::fs::symlink(&path, scratch.0.join("link")).unwrap();
    assert_eq!(refused(&scratch.0.join("link")), "is a symbolic link; name the file itself");
    assert!(refused(&scratch.0).starts_with("is a directory; name a file in it, "));
    assert!(refused(&scratch.0.join("none")).starts_with("cannot be reached: no such file or directory"));
    assert!(refused(Path::new("/dev/null")).starts_with("neither a file nor a block device"));

    set_permissions(&scratch.0, Permissions::from_mode(0o777)).unwrap();
    assert!(refused(&path).starts_with(&format!("others can write {}", scratch.0.display())));
    set_permissions(&scratch.0, Permissions::from_mode(0o700)).unwrap();
    if rustix::process::geteuid().is_root() {
        std::os::unix::fs::chown(&path, Some(65533), None).unwrap();
        assert_eq!(refused(&path), "belongs to user 65533; name a file of your own");
    } else {
        println!("skipped: a file of another owner needs root");
    }
}
