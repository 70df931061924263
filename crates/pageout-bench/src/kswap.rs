//! Swap of the kernel's for one run: on zram, on a loop device over ramfs, on a file, on a block device
//! that was named. The janitor takes all of it away again.
//!
//! Never a loop device over tmpfs: its pages are themselves swapped out, to the device that they back,
//! and the machine stands still for good. ramfs pages cannot be swapped; its file is written in full
//! beforehand, so that writing to it later needs no memory.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use anyhow::{bail, ensure, Context, Result};

use crate::engine::Setting;
use crate::janitor::{Made, Scope};
use crate::machine::available_memory;
use crate::sys;
use crate::units::{Bytes, HUGE, PAGE};

/// What the first page of swap space ends with.
const MAGIC: &[u8] = b"SWAPSPACE2";

/// Where the kernel swaps to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backing {
    /// Compressed memory, by LZ4.
    Zram,
    /// Plain memory: a loop device over a filled ramfs file, its writeback throttling off.
    Ram,
    /// A file in the working directory.
    File,
    /// The block device given by `--device`.
    Device,
}

/// Swap that is on, at the highest priority.
pub struct Swap {
    zram: Option<u32>,
}

/// Makes `size` of swap on `backing`.
pub fn make(scope: &Scope, backing: Backing, size: Bytes, setting: &Setting) -> Result<Swap> {
    ensure!(sys::is_root(), "kernel swap: only root may; run as root, or leave out the kernel engines");
    refuse_rivals()?;
    if matches!(backing, Backing::Zram | Backing::Ram) {
        let available = available_memory()?;
        ensure!(
            available.0 > size.0 + (512 << 20),
            "swap of {size} in memory: only {available} available; use --memory and a set that are smaller"
        );
    }
    match backing {
        Backing::Zram => zram(scope, size),
        Backing::Ram => ram(scope, size),
        Backing::File => file(scope, size, &setting.dir),
        Backing::Device => {
            swap_on(scope, &device(scope, setting)?)?;
            Ok(Swap { zram: None })
        }
    }
}

/// The block device to swap to: one that `mkswap` made for swap, and that nobody uses. What is on any other
/// is not ours to write over.
pub fn device(scope: &Scope, setting: &Setting) -> Result<PathBuf> {
    let path = setting.device.as_deref().context("no --device")?;
    // A block device that is mounted or swapped on is busy for whoever wants it alone.
    let device = OpenOptions::new().read(true).custom_flags(libc::O_EXCL).open(path);
    let device = device.with_context(|| format!("--device {}", path.display()))?;
    ensure!(
        device.metadata()?.file_type().is_block_device(),
        "--device {}: not a block device",
        path.display()
    );
    let mut page = [0; PAGE];
    device.read_exact_at(&mut page, 0).with_context(|| format!("reading {}", path.display()))?;
    ensure!(
        page.ends_with(MAGIC),
        "--device {}: not made for swap, and left alone; if nothing on it is of use, run mkswap on it",
        path.display()
    );
    scope.made(Made::Header(path.to_owned(), page.to_vec()))?;
    Ok(path.to_owned())
}

/// Other swap at our priority would take its share of the pages, and the figures would be of both.
fn refuse_rivals() -> Result<()> {
    let swaps = fs::read_to_string("/proc/swaps").context("/proc/swaps")?;
    for line in swaps.lines().skip(1) {
        let fields: Vec<&str> = line.split_whitespace().collect();
        if let [name, .., priority] = fields[..] {
            ensure!(
                priority.parse::<i32>().is_ok_and(|p| p < 32767),
                "{name}: swaps at the highest priority, as the bench does, and is not its own; lower it or run later"
            );
        }
    }
    Ok(())
}

fn zram(scope: &Scope, size: Bytes) -> Result<Swap> {
    let control = "/sys/class/zram-control/hot_add";
    let number = fs::read_to_string(control)
        .with_context(|| format!("{control}: no zram; load the module zram, or leave out kernel-zram"))?;
    let number: u32 = number.trim().parse().context("the number of the new zram device")?;
    scope.made(Made::Zram(number))?;
    let sys = PathBuf::from(format!("/sys/block/zram{number}"));
    put(&sys.join("comp_algorithm"), "lz4")?;
    put(&sys.join("disksize"), &size.0.to_string())?;
    let device = PathBuf::from(format!("/dev/zram{number}"));
    enable(scope, &device, size)?;
    Ok(Swap { zram: Some(number) })
}

fn ram(scope: &Scope, size: Bytes) -> Result<Swap> {
    let at = std::env::temp_dir().join(format!("pageout-bench.{}.ramfs", std::process::id()));
    scope.made(Made::Dir(at.clone()))?;
    fs::create_dir(&at).with_context(|| format!("making {}", at.display()))?;
    scope.make(Made::Mount(at.clone()), || {
        sys::mount_ramfs(&at).with_context(|| format!("mounting ramfs on {}", at.display()))
    })?;
    let path = at.join("swap");
    let backing = filled(&path, size)?;
    let device = scope.make(Made::Loop(path), || attach(&backing))?;
    let name = device.file_name().expect("a device has a name");
    let queue = Path::new("/sys/block").join(name).join("queue");
    put(&queue.join("wbt_lat_usec"), "0")?;
    put(&queue.join("rotational"), "0")?;
    enable(scope, &device, size)?;
    Ok(Swap { zram: None })
}

fn file(scope: &Scope, size: Bytes, dir: &Path) -> Result<Swap> {
    let path = dir.join(format!(".pageout-bench.{}.swap", std::process::id()));
    scope.made(Made::File(path.clone()))?;
    let file = filled(&path, size)?;
    file.sync_all().with_context(|| format!("writing {}", path.display()))?;
    enable(scope, &path, size)?;
    Ok(Swap { zram: None })
}

/// A new file of `size` zeros, each of them written.
fn filled(path: &Path, size: Bytes) -> Result<File> {
    let mut file = OpenOptions::new()
        .read(true)
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)
        .with_context(|| format!("making {}", path.display()))?;
    let zeros = vec![0; HUGE];
    let mut left = size.len();
    while left > 0 {
        let now = left.min(HUGE);
        file.write_all(&zeros[..now]).with_context(|| format!("writing {size} to {}", path.display()))?;
        left -= now;
    }
    Ok(file)
}

/// A loop device over `file`.
fn attach(file: &File) -> Result<PathBuf> {
    let control = File::open("/dev/loop-control").context("/dev/loop-control: no loop devices")?;
    for _ in 0..16 {
        let number = sys::loop_free(&control).context("finding a free loop device")?;
        let path = PathBuf::from(format!("/dev/loop{number}"));
        let device = OpenOptions::new().read(true).write(true).open(&path);
        match sys::loop_attach(&device.with_context(|| path.display().to_string())?, file) {
            Ok(()) => return Ok(path),
            // Somebody else was faster.
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) => continue,
            Err(error) => return Err(error).with_context(|| format!("attaching {}", path.display())),
        }
    }
    bail!("no loop device stays free; try again when others have settled")
}

/// Writes the header that `mkswap` would and swaps on it.
fn enable(scope: &Scope, path: &Path, size: Bytes) -> Result<()> {
    let device = OpenOptions::new().write(true).open(path).with_context(|| path.display().to_string())?;
    device.write_all_at(&header(size), 0).with_context(|| format!("writing to {}", path.display()))?;
    device.sync_all()?;
    drop(device);
    swap_on(scope, path)
}

fn swap_on(scope: &Scope, path: &Path) -> Result<()> {
    scope.make(Made::Swap(path.into()), || {
        sys::swapon(path).with_context(|| format!("swapping on {}", path.display()))
    })
}

/// The first page of swap space of `size` bytes.
fn header(size: Bytes) -> [u8; PAGE] {
    let mut page = [0; PAGE];
    let last_page = (size.pages() - 1) as u32;
    page[1024..1028].copy_from_slice(&1u32.to_ne_bytes());
    page[1028..1032].copy_from_slice(&last_page.to_ne_bytes());
    page[PAGE - MAGIC.len()..].copy_from_slice(MAGIC);
    page
}

impl Swap {
    /// The file that tells how well a zram device compresses.
    pub fn mm_stat(&self) -> Option<PathBuf> {
        self.zram.map(|number| PathBuf::from(format!("/sys/block/zram{number}/mm_stat")))
    }
}

fn put(file: &Path, value: &str) -> Result<()> {
    fs::write(file, value).with_context(|| format!("writing {value} to {}", file.display()))
}
