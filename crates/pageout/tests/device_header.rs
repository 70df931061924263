//! The header and the tools of util-linux: what they write is read, what we write they read.

mod device_support;

use device_support::{c, Scratch};
use pageout::device::header::{random_uuid, Header, HeaderError};
use pageout::device::{Errno, FileDevice, FileOptions};
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

fn hyphened(uuid: [u8; 16]) -> String {
    let hex: String = uuid.iter().map(|byte| format!("{byte:02x}")).collect();
    [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]].join("-")
}

#[test]
fn mkswap_output_is_accepted() {
    let scratch = Scratch::new("mkswap");
    let path = scratch.0.join("swap");
    const UUID: &str = "01234567-89ab-4def-8123-456789abcdef";
    for direct in [true, false] {
        drop(FileDevice::create(&c(&path), SIZE, FileOptions::default()).unwrap());
        if tool("mkswap", &["-L", "made by mkswap", "-U", UUID], &path).is_none() {
            return;
        }
        let device = FileDevice::open(&c(&path), FileOptions { direct, ..FileOptions::default() }).unwrap();
        let header = Header::read(&device, SIZE).unwrap();
        assert_eq!(header.label(), b"made by mkswap");
        assert_eq!(hyphened(header.uuid()), UUID);
        assert_eq!(u64::from(header.last_page()), SIZE / 4096 - 1);
        assert_eq!(header.bad_pages(), []);
        // The device has become smaller than the header says.
        device.set_size(SIZE / 2).unwrap();
        let smaller = HeaderError::Size { header: SIZE, device: SIZE / 2 };
        assert_eq!(Header::read(&device, SIZE / 2), Err(smaller));
        assert_eq!(Header::read(&device, 4096), Err(HeaderError::TooSmall(4096)));
        std::fs::remove_file(&path).unwrap();
    }
}

#[test]
fn other_page_sizes_are_named() {
    let scratch = Scratch::new("pagesize");
    let path = scratch.0.join("swap");
    let device = FileDevice::create(&c(&path), SIZE, FileOptions::default()).unwrap();
    assert_eq!(Header::read(&device, SIZE), Err(HeaderError::NoSignature));
    drop(device);
    if tool("mkswap", &["-p", "65536"], &path).is_some() {
        let device = FileDevice::open(&c(&path), FileOptions::default()).unwrap();
        assert_eq!(Header::read(&device, SIZE), Err(HeaderError::PageSize(65536)));
    }
}

#[test]
fn blkid_and_swaplabel_read_ours() {
    let scratch = Scratch::new("blkid");
    let path = scratch.0.join("swap");
    let device = FileDevice::create(&c(&path), SIZE, FileOptions::default()).unwrap();
    let uuid = random_uuid().unwrap();
    let header = Header::new(SIZE, uuid, "of pageout").unwrap();
    header.write(&device).unwrap();
    assert_eq!(Header::read(&device, SIZE), Ok(header));
    drop(device);
    if let Some(text) = tool("blkid", &["-p", "-o", "export"], &path) {
        assert!(text.contains("TYPE=swap") && text.contains("VERSION=1"), "{text}");
        assert!(text.contains(&format!("UUID={}", hyphened(uuid))), "{text}");
        assert!(text.contains("LABEL=of"), "{text}");
    }
    if let Some(text) = tool("swaplabel", &[], &path) {
        assert!(text.contains("of pageout") && text.contains(&hyphened(uuid)), "{text}");
        tool("swaplabel", &["-L", "renamed"], &path).unwrap();
        let device = FileDevice::open(&c(&path), FileOptions::default()).unwrap();
        assert_eq!(Header::read(&device, SIZE).unwrap().label(), b"renamed");
    }
}

#[test]
fn a_device_that_cannot_be_read_is_named_so() {
    let device = FileDevice::create_memory(4096).unwrap();
    assert_eq!(Header::read(&device, SIZE), Err(HeaderError::Io(Errno::NXIO)));
}
