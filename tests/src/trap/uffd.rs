//! A program that uses userfaultfd itself, on a region of its own: not the engine's to take.

use super::load::{together, Ballast, Churn, Dice, Tally};
use super::span::{Span, BLOCK, PAGE};
use super::{ensure, sys, Ctx, Outcome, Stop, Trap};
use pageout::{Bytes, Delivery, Error, Region, Swap};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Instant;

pub const TRAPS: &[Trap] = &[
    Trap::new("own-uffd", "serves its own faults on its own region", own_uffd),
    Trap::new(
        "own-uffd-ahead",
        "takes for its own what lies ahead of where it goes through new memory",
        own_uffd_ahead,
    ),
    Trap::new("api", "uses the API: engines of its own, on memory that they manage", api).at_least(256 << 20),
    Trap::new("stuck", "waits for ever for a page: what the watch over all traps must notice", stuck)
        .helper(),
];

/// Regions come and go, and frames are given back, while the keeper looks around: what it finds then is not its own.
fn api(ctx: &Ctx) -> Outcome {
    let wrong = |why: Error| match why {
        Error::Kernel(why) => Stop::Skip(why.to_string()),
        why => Stop::Wrong(why.to_string()),
    };
    let churn = Churn::start(ctx.size)?;
    let until = Instant::now() + ctx.time;
    together(2, |index| {
        let delivery = [Delivery::Handler, Delivery::Inline][index];
        let swap = Swap::builder().memory(Bytes::mib(16)).device("mem,size=128M").delivery(delivery);
        let swap = swap.build().map_err(wrong)?;
        let map = |len: usize| -> Result<(Span, Region), Stop> {
            let region = swap.map(len).map_err(wrong)?;
            Ok((Span::new(region.as_mut_ptr() as usize, len), region))
        };
        let (large, _kept) = map(12 * BLOCK)?;
        let mut generation = 0;
        while Instant::now() < until {
            generation += 1;
            large.fill(generation);
            for _ in 0..8 {
                let (small, _region) = map(BLOCK)?;
                small.fill(generation);
                small.check(generation)?;
            }
            large.check(generation)?;
        }
        Ok(())
    })?;
    churn.end()
}

const USER_MODE_ONLY: libc::c_int = 1;
const WAKE: libc::c_ulong = 0x8010_aa02;
const API: libc::c_ulong = 0xc018_aa3f;
const REGISTER: libc::c_ulong = 0xc020_aa00;
const UNREGISTER: libc::c_ulong = 0x8010_aa01;
const COPY: libc::c_ulong = 0xc028_aa03;
const MODE_MISSING: u64 = 1;
const EVENT_PAGEFAULT: u8 = 0x12;
const MESSAGE_LEN: usize = 32;

fn control(fd: &OwnedFd, what: &str, request: libc::c_ulong, words: &mut [u64]) -> Outcome {
    // SAFETY: the callers pass as many words as the request's structure has.
    sys::ret(what, unsafe { libc::ioctl(fd.as_raw_fd(), request, words.as_mut_ptr()) }).map(drop)
}

fn open(flags: libc::c_int) -> Result<OwnedFd, Stop> {
    // SAFETY: the new descriptor is nobody else's.
    let fd = unsafe {
        match libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | USER_MODE_ONLY | flags) {
            -1 => {
                let why = std::io::Error::last_os_error();
                return Err(Stop::Skip(format!("userfaultfd is refused: {why}")));
            }
            fd => OwnedFd::from_raw_fd(fd as i32),
        }
    };
    control(&fd, "UFFDIO_API", API, &mut [0xaa, 0, 0])?;
    Ok(fd)
}

fn register(fd: &OwnedFd, region: Span) -> Outcome {
    let words = &mut [region.start as u64, region.len as u64, MODE_MISSING, 0];
    control(fd, "UFFDIO_REGISTER", REGISTER, words)
}

fn unregister(fd: &OwnedFd, region: Span) -> Outcome {
    control(fd, "UFFDIO_UNREGISTER", UNREGISTER, &mut [region.start as u64, region.len as u64])
}

/// A region whose faults come to the descriptor.
fn region(len: usize) -> Result<(OwnedFd, Span), Stop> {
    let fd = open(0)?;
    let region = sys::map(len.next_multiple_of(PAGE))?;
    register(&fd, region)?;
    Ok((fd, region))
}

fn stuck(_: &Ctx) -> Outcome {
    let (_fd, region) = region(PAGE)?;
    region.check_zero()
}

fn own_uffd(ctx: &Ctx) -> Outcome {
    let (fd, region) = region(ctx.size / 32)?;
    let churn = Churn::start(ctx.size)?;
    let served = AtomicUsize::new(0);
    together(2, |index| if index == 0 { serve(&fd, region, &served) } else { region.check(3) })?;
    ensure!(served.load(Ordering::Relaxed) == region.pages(), "not every fault came to its handler");
    std::thread::sleep(ctx.time / 4);
    region.check(3)?;
    unregister(&fd, region)?;
    drop(fd);
    // From here on it is memory like any other.
    region.fill(4);
    std::thread::sleep(ctx.time / 4);
    churn.end()?;
    region.check(4)
}

/// Has a page of the program's own region hold generation 3.
fn fill(fd: &OwnedFd, page: usize, source: Span) -> Outcome {
    source.fill_as(page, 3);
    control(fd, "UFFDIO_COPY", COPY, &mut [page as u64, source.start as u64, PAGE as u64, 0, 0])
}

/// Answers the fault of each page of the region once.
fn serve(fd: &OwnedFd, region: Span, served: &AtomicUsize) -> Outcome {
    let source = sys::map(PAGE)?;
    let mut message = [0u64; MESSAGE_LEN / 8];
    while served.load(Ordering::Relaxed) < region.pages() {
        // SAFETY: the array takes one message.
        let n = unsafe { libc::read(fd.as_raw_fd(), message.as_mut_ptr().cast(), MESSAGE_LEN) };
        sys::whole("read of a fault", n, MESSAGE_LEN)?;
        ensure!(message[0] as u8 == EVENT_PAGEFAULT, "an event that nobody asked for: {message:x?}");
        fill(fd, message[2] as usize / PAGE * PAGE, source)?;
        served.fetch_add(1, Ordering::Relaxed);
    }
    Ok(())
}

/// One thread goes through new memory; what the engine fills around its faults must not reach to where another has just mapped
/// anew, and registered that with a descriptor of the program's own.
fn own_uffd_ahead(ctx: &Ctx) -> Outcome {
    const BLOCKS: usize = 16;
    const WALKED: usize = 300;
    const CUT: usize = 320;
    let fd = open(libc::O_NONBLOCK)?;
    let own = Tally::new()?;
    let area = sys::map_aligned(BLOCKS * BLOCK, BLOCK)?;
    let mut ballast = Ballast::new(ctx.size)?;
    let deadline = ctx.deadline();
    // The block that is gone through, by a number that grows, and how far.
    let (round, at, ends) = (AtomicUsize::new(0), AtomicUsize::new(0), AtomicBool::new(false));
    let ended = || ends.load(Ordering::SeqCst);
    let block = |round: usize| area.part(round % BLOCKS * BLOCK, BLOCK);
    let walk = || -> Outcome {
        let mut last = 0;
        while !ended() {
            let now = round.load(Ordering::SeqCst);
            if now == last {
                std::hint::spin_loop();
                continue;
            }
            last = now;
            let walked = block(now).part(0, WALKED * PAGE);
            for page in 0..WALKED {
                walked.page(page).fill(now as u16 | 1);
                at.store(page + 1, Ordering::SeqCst);
            }
            walked.check(now as u16 | 1)?;
            at.store(usize::MAX, Ordering::SeqCst);
        }
        Ok(())
    };
    let wait_until = |page: usize| {
        while at.load(Ordering::SeqCst) < page && !ended() {
            std::hint::spin_loop();
        }
    };
    let mut cut = || -> Outcome {
        let mut dice = Dice::new(1);
        let mut now = 0;
        while Instant::now() < deadline && !ended() {
            now += 1;
            if now % BLOCKS == 0 {
                sys::map_over(area, sys::RW, libc::MAP_NORESERVE)?;
                ballast.walk()?;
            }
            at.store(0, Ordering::SeqCst);
            round.store(now, Ordering::SeqCst);
            // The next window reaches to the end of the block.
            wait_until(255 + dice.roll(3));
            (0..dice.roll(4000)).for_each(|_| std::hint::spin_loop());
            let rest = block(now).part(CUT * PAGE, BLOCK - CUT * PAGE);
            sys::map_over(rest, sys::RW, libc::MAP_NORESERVE)?;
            // Not if the keeper had taken it up by then.
            let is_own = register(&fd, rest).is_ok();
            wait_until(usize::MAX);
            for page in (0..rest.pages()).step_by(3).filter(|_| is_own) {
                rest.page(page).check(3)?;
            }
            if is_own {
                own.add(1);
                unregister(&fd, rest)?;
            }
        }
        Ok(())
    };
    let done = std::thread::scope(|scope| {
        let threads = [scope.spawn(walk), scope.spawn(|| serve_until(&fd, ended))];
        let done = cut();
        ends.store(true, Ordering::SeqCst);
        let threads = threads.map(|thread| thread.join().expect("a thread of the trap"));
        threads.into_iter().fold(done, Outcome::and)
    });
    done.and_then(|()| ballast.walk())?;
    own.some("areas of its own")
}

/// Answers faults with generation 3.
fn serve_until(fd: &OwnedFd, ended: impl Fn() -> bool) -> Outcome {
    let source = sys::map(PAGE)?;
    let mut message = [0u64; MESSAGE_LEN / 8];
    while !ended() {
        // SAFETY: the array takes one message.
        let n = unsafe { libc::read(fd.as_raw_fd(), message.as_mut_ptr().cast(), MESSAGE_LEN) };
        if n != MESSAGE_LEN as isize {
            std::thread::yield_now();
            continue;
        }
        let page = message[2] as usize / PAGE * PAGE;
        if fill(fd, page, source).is_err() {
            control(fd, "UFFDIO_WAKE", WAKE, &mut [page as u64, PAGE as u64])?;
        }
    }
    Ok(())
}
