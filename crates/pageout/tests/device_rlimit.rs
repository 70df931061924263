//! `RLIMIT_FSIZE`: a limit of the whole process, so this is the only test of its binary.

mod device_support;

use device_support::{c, read, write_all, Memory, Scratch};
use pageout::device::{Errno, FileDevice, FileOptions, OpenError, Queue, Run, PAGE};
use rustix::process::{getrlimit, setrlimit, Resource, Rlimit};
use std::ffi::c_int;

extern "C" {
    fn pthread_sigmask(how: c_int, set: *const [u64; 16], old: *mut [u64; 16]) -> c_int;
    fn sigpending(set: *mut [u64; 16]) -> c_int;
}

const SIGXFSZ: u64 = 1 << (25 - 1);
const BLOCK: c_int = 0;

#[test]
fn writes_beyond_the_limit_on_file_sizes_say_so() {
    let scratch = Scratch::new("rlimit");
    let mut set = [0; 16];
    set[0] = SIGXFSZ;
    // SAFETY: both sets are as large as the C library's.
    assert_eq!(unsafe { pthread_sigmask(BLOCK, &set, std::ptr::null_mut()) }, 0);

    let memory = Memory::filled(16 * PAGE, 29);
    let runs: Vec<Run> =
        (0..8).map(|run| memory.run(run * 2 * PAGE, (run * 4 * PAGE) as u64, 2 * PAGE)).collect();
    let before = getrlimit(Resource::Fsize);
    for direct in [true, false] {
        for queue in [Queue::Never, Queue::Always] {
            // Within the fifth run, and not at a page's end.
            for limit in [17 * PAGE as u64, 17 * PAGE as u64 + 1024, 17 * PAGE as u64 + 100] {
                let device =
                    FileDevice::create_unlinked(&c(&scratch.0), 1 << 20, FileOptions { direct, queue })
                        .unwrap();
                setrlimit(Resource::Fsize, Rlimit { current: Some(limit), maximum: before.maximum }).unwrap();
                let results = write_all(&device, &runs);
                let larger = FileDevice::create_memory(1 << 20).map(|_| ());
                setrlimit(Resource::Fsize, before).unwrap();
                println!("direct {direct}, {queue:?}, limit {limit}: {results:?}");
                assert_eq!(results[..4], [Ok(()); 4]);
                assert_eq!(results[5..], [Err(Errno::FBIG); 3]);
                // With O_DIRECT the file system cannot write up to the middle of a sector.
                assert!(matches!(results[4], Err(Errno::FBIG | Errno::INVAL)), "{:?}", results[4]);
                assert_eq!(larger, Err(OpenError::Refused(Errno::FBIG)));
                let back = Memory::new(2 * PAGE);
                read(&device, back.run(0, runs[3].at, 2 * PAGE)).unwrap();
                assert!(back.words() == &memory.words()[6 * PAGE / 8..][..2 * PAGE / 8]);
            }
        }
    }
    // SAFETY: the set is as large as the C library's.
    assert_eq!(unsafe { sigpending(&mut set) }, 0);
    assert_ne!(set[0] & SIGXFSZ, 0, "the signal came and was held back");
}
