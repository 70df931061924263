//! What the device tests share: page-aligned memory, a directory on the disk, a round trip.
// Each test binary uses its part of it.
#![allow(dead_code)]

use pageout::device::{Device, Errno, Run, PAGE};
use std::ffi::CString;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

pub const MIB: usize = 1 << 20;

/// Page-aligned memory that no Rust object lies in.
pub struct Memory {
    pub address: usize,
    pub len: usize,
}

impl Memory {
    pub fn new(len: usize) -> Self {
        use rustix::mm::{mmap_anonymous, MapFlags, ProtFlags};
        // SAFETY: a new mapping.
        let address = unsafe {
            mmap_anonymous(std::ptr::null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE)
        };
        Self { address: address.expect("mmap") as usize, len }
    }

    /// Pages whose every word says where it lies and which filling this was.
    pub fn filled(len: usize, seed: u64) -> Self {
        let memory = Self::new(len);
        for (place, word) in memory.words().iter_mut().enumerate() {
            *word = (place as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ seed;
        }
        memory
    }

    #[allow(clippy::mut_from_ref)]
    pub fn words(&self) -> &mut [u64] {
        // SAFETY: the tests use one slice at a time, and not while a device writes there.
        unsafe { std::slice::from_raw_parts_mut(self.address as *mut u64, self.len / 8) }
    }

    pub fn run(&self, offset: usize, at: u64, len: usize) -> Run {
        assert!(offset + len <= self.len);
        Run { at, address: self.address + offset, len }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: the mapping made in `new`.
        unsafe { rustix::mm::munmap(self.address as *mut _, self.len) }.expect("munmap");
    }
}

pub fn c(path: &Path) -> CString {
    CString::new(path.as_os_str().as_encoded_bytes()).unwrap()
}

/// A directory on the disk that the project is built on, mode 0700, removed at the end.
pub struct Scratch(pub PathBuf);

impl Scratch {
    pub fn new(name: &str) -> Self {
        let path =
            Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("device-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o700)).unwrap();
        Self(path)
    }

    pub fn file(&self, name: &str) -> CString {
        c(&self.0.join(name))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

pub fn write_all(device: &dyn Device, runs: &[Run]) -> Vec<Result<(), Errno>> {
    let mut results = vec![Err(Errno::NOSYS); runs.len()];
    // SAFETY: the tests' memory outlives the call.
    unsafe { device.write_batch(runs, &mut results) };
    results
}

pub fn read(device: &dyn Device, run: Run) -> Result<(), Errno> {
    // SAFETY: the tests' memory, which nobody looks at meanwhile.
    unsafe { device.read_vectored(run.at, &[(run.address, run.len)]) }
}

/// Writes runs of many lengths in a mixed order, reads them back whole and scattered.
pub fn round_trip(device: &dyn Device) {
    let source = Memory::filled(8 * MIB, 7);
    let mut runs = Vec::new();
    let mut offset = 0;
    for pages in [1, 16, 512, 1, 2, 7, 256, 1, 1, 64, 512].iter().cycle() {
        let len = (pages * PAGE).min(source.len - offset);
        runs.push(source.run(offset, (3 * MIB + offset) as u64, len));
        offset += len;
        if offset == source.len {
            break;
        }
    }
    // Every other run far from its neighbour; the order is not the device's.
    for (place, run) in runs.iter_mut().enumerate() {
        run.at += (place / 2 % 2 * 16 * MIB) as u64;
    }
    let half = runs.len() / 2;
    runs.rotate_left(half);
    runs.reverse();
    assert!(write_all(device, &runs).iter().all(Result::is_ok));

    let back = Memory::new(source.len);
    for run in &runs {
        let offset = run.address - source.address;
        read(device, back.run(offset, run.at, run.len)).unwrap();
    }
    assert!(back.words() == source.words());

    // The same run read into its pages in reverse order.
    let run = *runs.iter().find(|run| run.len == 512 * PAGE).unwrap();
    let scattered = Memory::new(run.len);
    let parts: Vec<_> = (0..512).rev().map(|page| (scattered.address + page * PAGE, PAGE)).collect();
    // SAFETY: the memory is this test's.
    unsafe { device.read_vectored(run.at, &parts) }.unwrap();
    let offset = run.address - source.address;
    for page in 0..512 {
        let expected = &source.words()[(offset + page * PAGE) / 8..][..PAGE / 8];
        assert!(&scattered.words()[(511 - page) * PAGE / 8..][..PAGE / 8] == expected);
    }
}
