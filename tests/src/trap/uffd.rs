//! A program that uses userfaultfd itself, on a region of its own: not the engine's to take.

use super::load::{together, Churn};
use super::span::{Span, BLOCK, PAGE};
use super::{ensure, sys, Ctx, Outcome, Stop, Trap};
use pageout::{Bytes, Delivery, Error, Region, Swap};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

pub const TRAPS: &[Trap] = &[
    Trap::new("own-uffd", "serves its own faults on its own region", own_uffd),
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

/// A region whose faults come to the descriptor.
fn region(len: usize) -> Result<(OwnedFd, Span), Stop> {
    // SAFETY: the new descriptor is nobody else's.
    let fd = unsafe {
        match libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | USER_MODE_ONLY) {
            -1 => {
                let why = std::io::Error::last_os_error();
                return Err(Stop::Skip(format!("userfaultfd is refused: {why}")));
            }
            fd => OwnedFd::from_raw_fd(fd as i32),
        }
    };
    control(&fd, "UFFDIO_API", API, &mut [0xaa, 0, 0])?;
    let region = sys::map(len.next_multiple_of(PAGE))?;
    let words = &mut [region.start as u64, region.len as u64, MODE_MISSING, 0];
    control(&fd, "UFFDIO_REGISTER", REGISTER, words)?;
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
    control(&fd, "UFFDIO_UNREGISTER", UNREGISTER, &mut [region.start as u64, region.len as u64])?;
    drop(fd);
    // From here on it is memory like any other.
    region.fill(4);
    std::thread::sleep(ctx.time / 4);
    churn.end()?;
    region.check(4)
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
        let page = message[2] as usize / PAGE * PAGE;
        source.fill_as(page, 3);
        control(fd, "UFFDIO_COPY", COPY, &mut [page as u64, source.start as u64, PAGE as u64, 0, 0])?;
        served.fetch_add(1, Ordering::Relaxed);
    }
    Ok(())
}
