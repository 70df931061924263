//! What mkswap writes is read.

mod device_support;

use device_support::{c, Scratch};
use pageout::api::{Header, HeaderError};
use pageout::device::{Errno, FileDevice, FileOptions};
use std::fs::OpenOptions;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::process::Command;

const SIZE: u64 = 1 << 20;

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

fn create(path: &Path) {
    let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path).unwrap();
    file.set_len(SIZE).unwrap();
}

#[test]
fn mkswap_output_is_accepted() {
    let scratch = Scratch::new("mkswap");
    let path = scratch.0.join("swap");
    for direct in [true, false] {
        create(&path);
        if tool("mkswap", &["-L", "made by mkswap"], &path).is_none() {
            return;
        }
        let device = FileDevice::open(&c(&path), FileOptions { direct, ..FileOptions::default() }).unwrap();
        let header = Header::read(&device, SIZE).unwrap();
        assert_eq!((header.bytes(), header.bad_pages()), (SIZE, [].as_slice()));
        // The device has become smaller than the header says.
        device.set_size(SIZE / 2).unwrap();
        let smaller = HeaderError::Size { header: SIZE, device: SIZE / 2 };
        assert_eq!(Header::read(&device, SIZE / 2), Err(smaller));
        assert_eq!(Header::read(&device, 4095), Err(HeaderError::TooSmall(4095)));
        std::fs::remove_file(&path).unwrap();
    }
}

#[test]
fn other_page_sizes_are_named() {
    let scratch = Scratch::new("pagesize");
    let path = scratch.0.join("swap");
    create(&path);
    let device = FileDevice::open(&c(&path), FileOptions::default()).unwrap();
    assert_eq!(Header::read(&device, SIZE), Err(HeaderError::NoSignature));
    drop(device);
    if tool("mkswap", &["-p", "65536"], &path).is_some() {
        let device = FileDevice::open(&c(&path), FileOptions::default()).unwrap();
        assert_eq!(Header::read(&device, SIZE), Err(HeaderError::PageSize(65536)));
    }
}

#[test]
fn a_device_that_cannot_be_read_is_named_so() {
    let device = FileDevice::create_memory(4096).unwrap();
    assert_eq!(Header::read(&device, SIZE), Err(HeaderError::Io(Errno::NXIO)));
}
