//! The file device on disks, in memory, at the end of the file.

mod device_support;

use device_support::{c, read, round_trip, write_all, Memory, Scratch, MIB};
use pageout::device::{Access, Device, Errno, FileDevice, FileOptions, FileSystem, Run, PAGE};
use std::ffi::CStr;

const SIZE: u64 = 32 << 20;

#[test]
fn memory_round_trip() {
    let device = FileDevice::create_memory(SIZE).unwrap();
    assert_eq!(device.access(), Access::Buffered);
    assert_eq!(device.size(), Ok(SIZE));
    round_trip(&device);
}

#[test]
fn disk_round_trip_direct_and_buffered() {
    let scratch = Scratch::new("disk");
    let create = |options| FileDevice::create_unlinked(&c(&scratch.0), SIZE, options).unwrap();
    let direct = create(FileOptions::default());
    println!("{:?}: {:?}", FileSystem::of_path(&c(&scratch.0)).unwrap(), direct.access());
    round_trip(&direct);
    let buffered = create(FileOptions { direct: false, ..FileOptions::default() });
    assert_eq!(buffered.access(), Access::Buffered);
    round_trip(&buffered);
}

#[test]
fn unlinked_files_have_no_name_and_mode_0600() {
    let scratch = Scratch::new("unlinked");
    let device = FileDevice::create_unlinked(&c(&scratch.0), SIZE, FileOptions::default()).unwrap();
    assert_eq!(std::fs::read_dir(&scratch.0).unwrap().count(), 0);
    let status = rustix::fs::fstat(&device).unwrap();
    assert_eq!((status.st_nlink, status.st_mode & 0o7777), (0, 0o600));
    assert_eq!(status.st_blocks, 0, "nothing written takes up nothing");
    let flags = rustix::io::fcntl_getfd(&device).unwrap();
    assert!(flags.contains(rustix::io::FdFlags::CLOEXEC));
    round_trip(&device);
}

#[test]
fn tmpfs_is_told_and_works() {
    const SHM: &CStr = c"/dev/shm";
    match FileSystem::of_path(SHM) {
        Ok(found) if found.in_memory => assert_eq!(found.name, "tmpfs"),
        other => return println!("skipped: /dev/shm is no tmpfs here: {other:?}"),
    }
    let device = FileDevice::create_unlinked(SHM, SIZE, FileOptions::default()).unwrap();
    assert_eq!(device.access(), Access::Buffered);
    round_trip(&device);
}

#[test]
fn a_read_beyond_the_end_is_an_error() {
    let scratch = Scratch::new("end");
    let memory = Memory::new(4 * PAGE);
    for direct in [true, false] {
        let device = FileDevice::create_unlinked(
            &c(&scratch.0),
            3 * PAGE as u64,
            FileOptions { direct, ..FileOptions::default() },
        )
        .unwrap();
        assert_eq!(read(&device, memory.run(0, 0, 3 * PAGE)), Ok(()));
        assert_eq!(read(&device, memory.run(0, 0, 4 * PAGE)), Err(Errno::NXIO));
        assert_eq!(read(&device, memory.run(0, 3 * PAGE as u64, PAGE)), Err(Errno::NXIO));
        assert_eq!(read(&device, memory.run(0, 1 << 40, PAGE)), Err(Errno::NXIO));
        // An end inside a page.
        device.set_size(PAGE as u64 + 100).unwrap();
        assert_eq!(read(&device, memory.run(0, 0, 2 * PAGE)), Err(Errno::NXIO));
        assert_eq!(read(&device, memory.run(0, PAGE as u64, PAGE)), Err(Errno::NXIO));
        device.set_size(PAGE as u64 + 512).unwrap();
        assert_eq!(read(&device, memory.run(0, PAGE as u64, PAGE)), Err(Errno::NXIO));
    }
}

/// The kernel moves less than 2 GiB by a call. Of the memory all but the end is the same over and over.
#[test]
fn what_takes_several_calls_is_read_to_its_place() {
    use rustix::mm::{mmap, mmap_anonymous, munmap, MapFlags, ProtFlags};
    const MOST: usize = 0x7fff_f000;
    let len = 2 * MOST + 2 * PAGE;
    let end = len - 2 * PAGE;
    let device = FileDevice::create_memory((len + PAGE) as u64).unwrap();
    let memory = Memory::filled(3 * PAGE, 29);
    assert_eq!(write_all(&device, &[memory.run(0, end as u64, 3 * PAGE)]), [Ok(())]);
    let window = rustix::fs::memfd_create(c"window", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&window, 2 * MIB as u64).unwrap();
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping, others in its place, and reads into it.
    unsafe {
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        let start = mmap_anonymous(std::ptr::null_mut(), len + PAGE, access, flags).unwrap() as usize;
        for at in (0..end).step_by(2 * MIB) {
            let (at, len) = ((start + at) as *mut _, (end - at).min(2 * MIB));
            mmap(at, len, access, MapFlags::SHARED | MapFlags::FIXED, &window, 0).unwrap();
        }
        assert_eq!(device.read_vectored(0, &[(start, len), (start + len, PAGE)]), Ok(()));
        let found = std::slice::from_raw_parts((start + end) as *const u64, 3 * PAGE / 8);
        assert!(found == memory.words());
        munmap(start as *mut _, len + PAGE).unwrap();
    }
}

#[test]
fn memory_that_is_not_there_is_an_error() {
    let device = FileDevice::create_memory(SIZE).unwrap();
    // Page 1 is below what anybody may map.
    let memory = Memory::filled(2 * PAGE, 1);
    let hole = Run { at: PAGE as u64, address: PAGE, len: PAGE };
    assert_eq!(read(&device, Run { at: 0, ..hole }), Err(Errno::FAULT));
    let runs = [memory.run(0, 0, PAGE), hole, memory.run(PAGE, 2 * PAGE as u64, PAGE)];
    assert_eq!(write_all(&device, &runs), [Ok(()), Err(Errno::FAULT), Ok(())], "neighbours do not suffer");
}

#[test]
fn discard_gives_the_room_back() {
    let scratch = Scratch::new("discard");
    let memory = Memory::filled(4 * MIB, 3);
    for device in [
        FileDevice::create_memory(SIZE).unwrap(),
        FileDevice::create_unlinked(&c(&scratch.0), SIZE, FileOptions::default()).unwrap(),
    ] {
        assert_eq!(write_all(&device, &[memory.run(0, 0, 4 * MIB)]), [Ok(())]);
        rustix::fs::fdatasync(&device).unwrap();
        let before = rustix::fs::fstat(&device).unwrap().st_blocks;
        match device.discard(0, 2 * MIB as u64) {
            Err(Errno::OPNOTSUPP) => println!("skipped: no holes here"),
            answer => {
                answer.unwrap();
                assert!(rustix::fs::fstat(&device).unwrap().st_blocks <= before / 2 + 16);
            }
        }
        assert_eq!(device.size(), Ok(SIZE));
        let back = Memory::new(2 * MIB);
        read(&device, back.run(0, 2 * MIB as u64, 2 * MIB)).unwrap();
        assert!(back.words() == &memory.words()[2 * MIB / 8..]);
    }
}
