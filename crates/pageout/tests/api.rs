//! Regions on the running kernel: what is written comes back, the limit holds, everything can be given up.

mod api_support;

use api_support::{fill, mixed, swap_on, verify, LIMIT, MIB, SLACK};
use pageout::{Advice, Bytes, Delivery, Error, Swap};
use std::fs;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// A swap in memory.
fn swap() -> Option<Swap> {
    swap_on("mem,size=256M", |builder| builder)
}

/// What other tests keep is resident in this process too, and counts for each swap's limit.
static ALONE: Mutex<()> = Mutex::new(());

/// Turns a test that hangs into one that fails. One at a time.
fn watched(test: impl FnOnce() + Send + 'static) {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let test = thread::spawn(test);
    let started = Instant::now();
    while !test.is_finished() {
        assert!(started.elapsed() < Duration::from_secs(50), "hangs");
        thread::sleep(Duration::from_millis(5));
    }
    if let Err(panic) = test.join() {
        std::panic::resume_unwind(panic);
    }
}

#[test]
fn four_times_the_limit_by_several_threads() {
    watched(|| {
        let Some(swap) = swap() else { return };
        let mut region = swap.map(4 * LIMIT.0 as usize).unwrap();
        let words = region.as_mut_slice::<u64>();
        let part = words.len() / 4;
        for round in 0..2 {
            thread::scope(|scope| {
                for (thread, words) in words.chunks_mut(part).enumerate() {
                    scope.spawn(move || fill(words, thread * part + round));
                }
            });
            thread::scope(|scope| {
                for (thread, words) in words.chunks(part).enumerate() {
                    scope.spawn(move || verify(words, thread * part + round));
                }
            });
        }
        let peak = swap.stats().resident_peak_bytes.load(Ordering::Relaxed);
        assert!(peak <= LIMIT.0 + SLACK, "peak {}", Bytes(peak));
        let state = region.stats();
        assert!(state.swapped > 2 * LIMIT.0 as usize, "{state:?}");
        assert!(state.resident as u64 <= LIMIT.0 + SLACK, "{state:?}");
        assert_eq!(state.lost, 0);
        assert!(!swap.is_full());
    });
}

#[test]
fn the_kernel_counts_no_more_than_the_engine() {
    watched(|| {
        let Some(swap) = swap() else { return };
        let mut region = swap.map(64 * MIB).unwrap();
        fill(region.as_mut_slice(), 3);
        let start = region.as_ptr() as usize;
        let smaps = fs::read_to_string("/proc/self/smaps").unwrap();
        let mut lines = smaps.lines().skip_while(|line| !line.starts_with(&format!("{start:x}-")));
        let rss = lines.find_map(|line| line.strip_prefix("Rss:")).unwrap();
        let kib: usize = rss.trim().trim_end_matches(" kB").parse().unwrap();
        assert!(kib * 1024 <= LIMIT.0 as usize + SLACK as usize, "{kib} KiB resident");
        let known = region.stats().resident / 1024;
        assert!(known.abs_diff(kib) <= 2048, "{known} KiB known, {kib} KiB there");
    });
}

/// Each request for a region put off the look that keeps the limit: several times as much was there.
#[test]
fn while_regions_are_made_the_limit_holds() {
    watched(|| {
        let Some(swap) = swap() else { return };
        let mut region = swap.map(200 * MIB).unwrap();
        let done = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                let mut regions = Vec::new();
                while !done.load(Ordering::Relaxed) && regions.len() < 20_000 {
                    regions.push(swap.map(8192).unwrap());
                }
            });
            fill(region.as_mut_slice(), 5);
            done.store(true, Ordering::Relaxed);
        });
        let peak = swap.stats().resident_peak_bytes.load(Ordering::Relaxed);
        assert!(peak <= LIMIT.0 + SLACK, "peak {}", Bytes(peak));
        verify(region.as_slice(), 5);
    });
}

#[test]
fn regions_come_and_go_under_load() {
    watched(|| {
        let Some(swap) = swap() else { return };
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            for thread in 0..2 {
                let (swap, stop) = (&swap, &stop);
                scope.spawn(move || {
                    let mut region = swap.map(9 * MIB).unwrap();
                    while !stop.load(Ordering::Relaxed) {
                        fill(region.as_mut_slice(), thread);
                        verify(region.as_slice(), thread);
                    }
                });
            }
            for n in 0..14 {
                let mut region = swap.map((1 + n % 7) * MIB + 5).unwrap();
                assert!(region.as_slice::<u64>().iter().step_by(512).all(|word| *word == 0));
                fill(region.as_mut_slice(), n);
                verify(region.as_slice(), n);
            }
            stop.store(true, Ordering::Relaxed);
        });
        // The last look may be a little old.
        let started = Instant::now();
        while swap.stats().swapped_pages.load(Ordering::Relaxed) != 0 {
            assert!(started.elapsed() < Duration::from_secs(5), "slots of regions that are gone");
            thread::sleep(Duration::from_millis(10));
        }
    });
}

#[test]
fn two_swaps_and_their_ends() {
    watched(|| {
        for n in 0..2 {
            let (Some(one), Some(other)) = (swap(), swap()) else { return };
            let mut a = one.map(24 * MIB).unwrap();
            let mut b = other.map(24 * MIB).unwrap();
            // The region keeps the engine.
            drop(one);
            thread::scope(|scope| {
                scope.spawn(|| fill(a.as_mut_slice(), n));
                fill(b.as_mut_slice(), n + 1);
            });
            verify(a.as_slice(), n);
            verify(b.as_slice(), n + 1);
            drop(other);
            drop(b);
            verify(a.as_slice(), n);
        }
    });
}

#[test]
fn pinned_bytes_stay() {
    watched(|| {
        let Some(swap) = swap() else { return };
        let mut region = swap.map(64 * MIB).unwrap();
        fill(region.as_mut_slice(), 9);
        let range = 3 * MIB + 100..7 * MIB;
        let pinned = region.pin(range.clone()).unwrap();
        let again = region.pin(range.clone()).unwrap();
        drop(again);
        assert_eq!(pinned.range(), range);
        // Everything else goes round; what is pinned stays, by the kernel's own count.
        for round in 0..2 {
            fill(&mut region.as_mut_slice::<u64>()[MIB..], round);
            assert_eq!(resident_pages(&region, range.clone()), 1024);
        }
        verify(&region.as_slice::<u64>()[..MIB], 9);
        drop(pinned);
        // It has its second chances first, as all else; at random, since what only streams come by is in nobody's way.
        let left = (0..10).any(|round| {
            let others = &mut region.as_mut_slice::<u64>()[MIB..];
            for n in 0..others.len() / 512 {
                others[mixed(n + round) as usize % others.len()] = 1;
            }
            resident_pages(&region, range.clone()) < 512
        });
        assert!(left, "what is not pinned any more can leave");
        verify(&region.as_slice::<u64>()[..MIB], 9);

        let too_much = region.pin(0..12 * MIB);
        assert!(matches!(too_much, Err(Error::Pin { .. })), "{too_much:?}");
    });
}

#[test]
fn what_is_not_mapped_any_more_cannot_be_pinned() {
    watched(|| {
        let Some(swap) = swap() else { return };
        let region = swap.map(MIB).unwrap();
        // SAFETY: not looked at any more.
        assert_eq!(unsafe { libc::munmap(region.as_mut_ptr().add(65536).cast(), 65536) }, 0);
        let error = region.pin(0..131072).unwrap_err().to_string();
        assert!(error.ends_with("the program has locked or changed the mapping"), "{error}");
        region.pin(0..65536).unwrap();
    });
}

#[test]
fn pins_of_the_same_bytes_end_before_their_count() {
    watched(|| {
        let built = Swap::builder().memory(Bytes::gib(16)).device("mem,size=64M").build();
        let Ok(swap) = built.inspect_err(|reason| println!("skipped: {reason}")) else { return };
        let region = swap.map(MIB).unwrap();
        let mut pins: Vec<_> = (0..u16::MAX).map(|_| region.pin(65536..65537).unwrap()).collect();
        // The bytes before those are pinned and let go again.
        for range in [65536..65537, 0..65537] {
            let refused = region.pin(range);
            assert!(matches!(refused, Err(Error::Pins { most: u16::MAX, .. })), "{refused:?}");
        }
        pins.pop();
        pins.push(region.pin(0..65537).unwrap());
    });
}

#[test]
fn what_was_moved_out_of_a_region_is_there_or_lost_after_the_end() {
    const PAGES: usize = 8 * MIB / 4096;
    watched(|| {
        let Some(swap) = swap() else { return };
        let mut region = swap.map(64 * MIB).unwrap();
        fill(region.as_mut_slice(), 9);
        let moved = unsafe {
            let (none, flags) = (std::ptr::null_mut(), libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
            let place = libc::mmap(none, 8 * MIB, libc::PROT_NONE, flags, -1, 0);
            let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
            libc::mremap(region.as_mut_ptr().cast(), 8 * MIB, 8 * MIB, flags, place)
        };
        assert_ne!(moved, libc::MAP_FAILED);
        (0..2).for_each(|round| fill(&mut region.as_mut_slice::<u64>()[MIB..], round));
        drop(region);
        drop(swap);
        let file = unsafe { libc::memfd_create(c"pages".as_ptr(), 0) };
        let (mut lost, mut words) = (0, [0u64; 512]);
        for page in 0..PAGES {
            // Fails where a touch would raise SIGBUS.
            match unsafe { libc::pwrite(file, moved.byte_add(page * 4096), 4096, 0) } {
                4096 => {
                    assert_eq!(unsafe { libc::pread(file, words.as_mut_ptr().cast(), 4096, 0) }, 4096);
                    verify(&words, 9 + page);
                }
                _ => lost += 1,
            }
        }
        assert!(lost > 0, "{lost} of {PAGES} pages");
        unsafe { libc::munmap(moved, 8 * MIB) };
    });
}

/// Pages of bytes `range` that are in memory.
fn resident_pages(region: &pageout::Region, range: std::ops::Range<usize>) -> usize {
    let start = (region.as_ptr() as usize + range.start) & !4095;
    let end = (region.as_ptr() as usize + range.end + 4095) & !4095;
    let mut map = vec![0u8; (end - start) / 4096];
    assert_eq!(unsafe { libc::mincore(start as *mut _, end - start, map.as_mut_ptr()) }, 0);
    map.iter().filter(|page| **page & 1 == 1).count()
}

#[test]
fn advice() {
    watched(|| {
        let Some(swap) = swap() else { return };
        let mut region = swap.map(48 * MIB + 10).unwrap();
        let len = region.len();
        fill(region.as_mut_slice(), 5);
        region.advise(0..8 * MIB, Advice::Cold).unwrap();
        region.advise(0..4 * MIB, Advice::WillNeed).unwrap();
        assert_eq!(resident_pages(&region, 0..4 * MIB), 1024);
        // Whole pages inside go; the rest stays.
        region.discard(4 * MIB + 1..6 * MIB - 1).unwrap();
        let bytes = region.as_slice::<u8>();
        assert!(bytes[4 * MIB + 4096..6 * MIB - 4096].iter().all(|byte| *byte == 0));
        verify(&region.as_slice::<u64>()[..MIB / 2], 5);
        assert_eq!(region.as_slice::<u64>()[4 * MIB / 8], mixed(5 + 1024));
        region.discard(0..len).unwrap();
        assert!(region.as_slice::<u8>().iter().all(|byte| *byte == 0));
    });
}

#[test]
fn system_calls_read_and_write_what_is_out() {
    watched(|| {
        use std::io::{Read, Seek, Write};
        let Some(swap) = swap() else { return };
        let mut region = swap.map(40 * MIB).unwrap();
        fill(region.as_mut_slice(), 2);
        let path = std::env::temp_dir().join(format!("pageout-api-{}", std::process::id()));
        let mut file = fs::File::options().read(true).write(true).create_new(true).open(&path).unwrap();
        fs::remove_file(&path).unwrap();
        file.write_all(region.as_slice()).unwrap();
        region.as_mut_slice::<u8>().fill(0);
        file.rewind().unwrap();
        file.read_exact(region.as_mut_slice()).unwrap();
        verify(region.as_slice(), 2);
    });
}

#[test]
fn the_engines_descriptors_are_not_the_programs() {
    watched(|| {
        let Some(swap) = swap() else { return };
        let mut region = swap.map(40 * MIB).unwrap();
        fill(region.as_mut_slice(), 4);
        // So a daemon that closes everything closes nothing of the engine's.
        let links =
            fs::read_dir("/proc/self/fd").unwrap().filter_map(|fd| fs::read_link(fd.ok()?.path()).ok());
        let names: Vec<_> = links.map(|link| link.to_string_lossy().into_owned()).collect();
        assert!(!names.iter().any(|name| name.contains("userfaultfd") || name.contains("memfd:pageout")));
        verify(region.as_slice(), 4);
    });
}

#[test]
fn a_child_has_no_regions() {
    watched(|| {
        let Some(swap) = swap() else { return };
        let mut region = swap.map(40 * MIB).unwrap();
        fill(region.as_mut_slice(), 8);
        // SAFETY: the child needs nothing that another thread could have locked, and leaves without cleaning up.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let refused = matches!(region.advise(0..1, Advice::Cold), Err(Error::Forked));
            // What may lie there by now is somebody else's.
            let first = || region.as_slice::<u8>()[0];
            let shows = std::panic::catch_unwind(first).is_ok();
            let refused = refused && !shows;
            drop(region);
            drop(swap);
            unsafe { libc::_exit(if refused { 7 } else { 1 }) };
        }
        let mut status = 0;
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        assert_eq!(libc::WEXITSTATUS(status), 7);
        verify(region.as_slice(), 8);
    });
}

#[test]
fn of_two_pins_that_do_not_both_fit_one_is_made() {
    watched(|| {
        let Some(swap) = swap() else { return };
        let region = swap.map(LIMIT.0 as usize).unwrap();
        let each = LIMIT.0 as usize / 16 * 5;
        let together = std::sync::Barrier::new(2);
        thread::scope(|scope| {
            let pins = |from: usize| {
                let (region, together) = (&region, &together);
                move || -> Vec<bool> {
                    let rounds = (0..200).map(|_| {
                        together.wait();
                        let pinned = region.pin(from..from + each);
                        together.wait();
                        pinned.is_ok()
                    });
                    rounds.collect()
                }
            };
            let other = scope.spawn(pins(LIMIT.0 as usize / 2));
            let made: Vec<bool> = pins(0)();
            let other = other.join().unwrap();
            assert!(made.iter().zip(&other).all(|(one, other)| one ^ other));
        });
    });
}

/// An empty directory of a test's own.
fn directory(name: &str) -> PathBuf {
    let directory = std::env::temp_dir().join(format!("pageout-api-{name}-{}", std::process::id()));
    fs::create_dir(&directory).unwrap();
    fs::set_permissions(&directory, fs::Permissions::from_mode(0o700)).unwrap();
    directory
}

#[test]
fn what_lies_behind_the_room_of_a_header_stays() {
    watched(|| {
        if swap().is_none() {
            return;
        }
        const ROOM: u64 = 64 << 20;
        let directory = directory("header");
        let path = directory.join("swap");
        let file =
            fs::File::options().read(true).write(true).create_new(true).mode(0o600).open(&path).unwrap();
        let mut header = [0; 4096];
        // As mkswap does: the version, the last page, the signature.
        header[1024..1028].copy_from_slice(&1u32.to_ne_bytes());
        header[1028..1032].copy_from_slice(&(ROOM as u32 / 4096 - 1).to_ne_bytes());
        header[4086..].copy_from_slice(b"SWAPSPACE2");
        file.write_all_at(&header, 0).unwrap();
        for at in (ROOM..3 * ROOM).step_by(MIB) {
            file.write_all_at(&header, at).unwrap();
        }
        file.set_len(3 * ROOM).unwrap();
        let spec = path.to_str().unwrap();
        let refused = Swap::builder().memory(LIMIT).device(format!("{spec},size=192M")).build();
        assert!(refused.unwrap_err().to_string().ends_with("its swap header is for 64M; give less, or none"));
        let swap = swap_on(spec, |builder| builder).unwrap();
        let mut region = swap.map(ROOM as usize + 4 * LIMIT.0 as usize).unwrap();
        fill(region.as_mut_slice(), 6);
        let state = region.stats();
        assert!(state.swapped as u64 > ROOM / 4 * 3, "{state:?}");
        verify(region.as_slice(), 6);
        drop((region, swap));
        let mut found = vec![0; 3 * ROOM as usize];
        file.read_exact_at(&mut found, 0).unwrap();
        let (room, behind) = found.split_at(ROOM as usize);
        assert!(room[..4096] == header);
        assert!(room[4096..].iter().all(|byte| *byte == 0), "what was in memory is found there");
        for page in behind.chunks(4096).step_by(MIB / 4096) {
            assert!(page == header, "changed behind the room");
        }
        fs::remove_dir_all(&directory).unwrap();
    });
}

#[test]
fn an_empty_file_is_empty_again() {
    watched(|| {
        if swap().is_none() {
            return;
        }
        let directory = directory("empty");
        let path = directory.join("swap");
        let file = fs::File::options().write(true).create_new(true).mode(0o600).open(&path).unwrap();
        for len in [0, 128 << 20] {
            file.set_len(len).unwrap();
            for seed in 0..2 {
                let swap = swap_on(path.to_str().unwrap(), |builder| builder).unwrap();
                let mut region = swap.map(32 * MIB).unwrap();
                fill(region.as_mut_slice(), seed);
                verify(region.as_slice(), seed);
                assert!(file.metadata().unwrap().blocks() > 0);
                drop((region, swap));
                let left = file.metadata().unwrap();
                assert_eq!((left.len(), left.blocks()), (len, 0));
            }
        }
        fs::remove_dir_all(&directory).unwrap();
    });
}

#[test]
fn a_thread_that_is_to_be_cancelled_ends_it_first() {
    extern "C" {
        fn pthread_cancel(thread: libc::pthread_t) -> libc::c_int;
    }
    extern "C" fn end(swap: *mut libc::c_void) -> *mut libc::c_void {
        // SAFETY: this thread, and what it was given.
        unsafe {
            assert_eq!(pthread_cancel(libc::pthread_self()), 0);
            drop(Box::from_raw(swap.cast::<Swap>()));
        }
        swap
    }
    watched(|| {
        let Some(swap) = swap() else { return };
        let (argument, mut ended) = (Box::into_raw(Box::new(swap)).cast(), std::ptr::null_mut());
        // SAFETY: as libc asks.
        unsafe {
            let mut thread = 0;
            assert_eq!(libc::pthread_create(&mut thread, std::ptr::null(), end, argument), 0);
            assert_eq!(libc::pthread_join(thread, &mut ended), 0);
        }
        assert_eq!(ended, argument, "it went on until its end");
    });
}

#[test]
fn errors_say_what_to_do() {
    let build = |spec: &str| Swap::builder().memory(LIMIT).device(spec).build().unwrap_err().to_string();
    let nothing = Swap::builder().build().unwrap_err().to_string();
    assert!(nothing.contains("at least 16M"), "{nothing}");
    let little = Swap::builder().memory(Bytes(5000)).build().unwrap_err().to_string();
    assert!(little.contains("least that works is 16M"), "{little}");
    assert!(build("mem,size=lots").contains("takes a size like 8G"));

    if swap().is_none() {
        return;
    }
    let directory = directory("errors");
    let name = |name: &str| directory.join(name).to_str().unwrap().to_owned();
    for (spec, says) in [
        (name(""), "name a file in it"),
        (name("no/such"), "no such file"),
        (name("small") + ",size=1M", "give at least 64M"),
        (name("huge") + ",size=900T", "give less"),
        ("mem,size=1M".into(), "give at least 64M"),
        (format!("mem,size={}", u64::MAX - 0x1f_ffff), "no memory for it; ask for less"),
        ("/dev/nosuchdisk,size=64M".into(), "no such device"),
        ("UUID=no-such-disk".into(), "no such device"),
        ("/dev/null".into(), "neither a file nor a block device"),
    ] {
        let error = build(&spec);
        assert!(error.contains(says) && !error.contains('\n'), "{spec}: {error}");
    }
    fs::write(name("data"), vec![7u8; 1 << 20]).unwrap();
    fs::set_permissions(name("data"), fs::Permissions::from_mode(0o600)).unwrap();
    let data = name("data");
    assert!(build(&data).contains(&format!("left there; run mkswap {data} if it may go, or name a new file")));
    fs::write(&data, "").unwrap();
    fs::set_permissions(&data, fs::Permissions::from_mode(0o644)).unwrap();
    assert!(build(&data).contains(&format!("run chmod 600 {data}")));
    fs::remove_file(name("data")).unwrap();

    // A file that is not there serves, and leaves nothing behind.
    let swap = Swap::builder().memory(LIMIT).device(name("swap") + ",size=128M").build().unwrap();
    let mut region = swap.map(32 * MIB).unwrap();
    fill(region.as_mut_slice(), 1);
    verify(region.as_slice(), 1);
    assert!(matches!(swap.map(0), Err(Error::Length(0))));
    assert!(matches!(swap.map(usize::MAX), Err(Error::Length(_))));
    assert!(matches!(region.pin(5..region.len() + 1), Err(Error::Range { .. })));
    fs::remove_dir(&directory).unwrap();
}

/// What had been registered was unmapped with nobody to read of it: the error never came.
#[test]
fn one_device_too_many_is_an_error() {
    watched(|| {
        let Some(_) = swap() else { return };
        let devices =
            (0..64).fold(Swap::builder().memory(LIMIT), |builder, _| builder.device("mem,size=64M"));
        assert!(devices.clone().build().is_err());
        // With inline delivery the program has the descriptor, too.
        assert!(devices.delivery(Delivery::Inline).build().is_err());
    });
}

/// What is refused later than the file was opened emptied it at once, and nobody had written there.
#[test]
fn a_file_that_nobody_wrote_to_is_as_it_was() {
    if swap().is_none() {
        return;
    }
    let directory = directory("refused");
    let path = directory.join("swap").to_str().unwrap().to_owned();
    let mut header = vec![0; 4096];
    let last_page = (64 << 20) / 4096 - 1u32;
    header[1024..1028].copy_from_slice(&1u32.to_ne_bytes());
    header[1028..1032].copy_from_slice(&last_page.to_ne_bytes());
    header[4086..].copy_from_slice(b"SWAPSPACE2");
    fs::write(&path, [header, vec![7; (64 << 20) - 4096]].concat()).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    let before = fs::read(&path).unwrap();
    let with = |devices: &[&str]| {
        let builder = Swap::builder().memory(LIMIT);
        devices.iter().fold(builder, |builder, device| builder.device(*device)).build()
    };
    assert!(with(&[&format!("{path},size=1G")]).is_err());
    assert!(with(&[&path, "/no/such/directory/file"]).is_err());
    drop(with(&[&path]).unwrap());
    assert!(fs::read(&path).unwrap() == before);
    let swap = with(&[&path]).unwrap();
    let mut region = swap.map(32 * MIB).unwrap();
    fill(region.as_mut_slice(), 1);
    verify(region.as_slice(), 1);
    drop((region, swap));
    let after = fs::read(&path).unwrap();
    assert!(after[..4096] == before[..4096] && after[4096..].iter().all(|byte| *byte == 0));
    fs::remove_dir_all(&directory).unwrap();
}

/// Who reads all memory by /proc/PID/mem raises no fault: a frame that had just been dropped held zeros, and the engine ended.
#[test]
fn all_memory_is_read_while_frames_are_dropped() {
    let ranges = || -> Vec<(u64, u64)> {
        let maps = fs::read_to_string("/proc/self/maps").unwrap();
        let lines = maps.lines().filter(|line| line.contains("rw-p 00000000 00:00 0") && !line.contains('['));
        let number = |text| u64::from_str_radix(text, 16).unwrap();
        let ends = lines.map(|line| line.split_once(' ').unwrap().0.split_once('-').unwrap());
        ends.map(|(start, end)| (number(start), number(end))).collect()
    };
    watched(move || {
        let before = ranges();
        let Some(swap) = swap() else { return };
        let staging: Vec<_> = ranges().into_iter().filter(|range| !before.contains(range)).collect();
        let mut region = swap.map(64 * MIB).unwrap();
        fill(region.as_mut_slice(), 1);
        let words = region.as_slice::<u64>();
        let expected: Vec<u64> = words.iter().step_by(512).copied().collect();
        let started = Instant::now();
        let goes_on = || started.elapsed() < Duration::from_secs(4);
        thread::scope(|scope| {
            scope.spawn(|| {
                let mem = fs::File::open("/proc/self/mem").unwrap();
                let mut page = [0; 4096];
                while goes_on() {
                    let pages = staging.iter().flat_map(|(start, end)| (*start..*end).step_by(4096));
                    pages.for_each(|at| _ = mem.read_at(&mut page, at));
                }
            });
            for seed in [7, 8] {
                let expected = &expected;
                scope.spawn(move || {
                    for round in (0..).take_while(|_| goes_on()) {
                        let page = mixed(seed << 32 | round) as usize % expected.len();
                        // SAFETY: a word of the region.
                        let word = unsafe { words.as_ptr().add(512 * page).read_volatile() };
                        assert_eq!(word, expected[page]);
                    }
                });
            }
        });
    });
}
