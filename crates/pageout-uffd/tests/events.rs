//! Each event of one address space on the real kernel. Fork has a program of its own: it shares pages.

mod common;

use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;

use common::{context, next, wait, Pages, PAGE};
use pageout_uffd::{Event, EventBuffer, FaultFlags, Features, RegisterMode};

#[test]
fn a_fault_names_address_access_and_thread() {
    let Some(uffd) = context(Features::THREAD_ID | Features::EXACT_ADDRESS) else { return };
    let pages = Pages::registered(2, &uffd, RegisterMode::MISSING);
    let id = AtomicU32::new(0);
    thread::scope(|scope| {
        scope.spawn(|| {
            id.store(rustix::thread::gettid().as_raw_nonzero().get() as u32, Ordering::SeqCst);
            common::peek(pages.page(0) + 123);
            pages.poke(1, 1);
        });
        for (expected, write) in [(pages.page(0) + 123, false), (pages.page(1), true)] {
            let Event::Pagefault { address, flags, thread } = next(&uffd) else { panic!() };
            assert_eq!(address, expected);
            assert_eq!(flags, FaultFlags { write, wp: false, minor: false });
            assert_eq!(thread, id.load(Ordering::SeqCst));
            // SAFETY: the test's own pages.
            unsafe { uffd.zeropage(address & !(PAGE - 1), PAGE, true) }.unwrap();
        }
    });
}

#[test]
fn without_exact_address_the_page_is_named() {
    let Some(uffd) = context(Features::empty()) else { return };
    let pages = Pages::registered(1, &uffd, RegisterMode::MISSING);
    thread::scope(|scope| {
        scope.spawn(|| common::peek(pages.at + 123));
        let Event::Pagefault { address, thread: 0, .. } = next(&uffd) else { panic!() };
        assert_eq!(address, pages.at);
        // SAFETY: the test's own pages.
        unsafe { uffd.zeropage(address, PAGE, true) }.unwrap();
    });
}

#[test]
fn madvise_is_told_before_it_happens() {
    let Some(uffd) = context(Features::EVENT_REMOVE) else { return };
    let pages = Pages::registered(4, &uffd, RegisterMode::MISSING);
    thread::scope(|scope| {
        scope.spawn(|| pages.discard(1..3));
        let Event::Remove { start, end } = next(&uffd) else { panic!() };
        assert_eq!((start, end), (pages.page(1), pages.page(3)));
    });
    // SAFETY: the test's own pages. It is still registered.
    unsafe { uffd.zeropage(pages.at, pages.len, true) }.unwrap();
}

#[test]
fn munmap_is_told() {
    let Some(uffd) = context(Features::EVENT_UNMAP) else { return };
    let pages = Pages::registered(4, &uffd, RegisterMode::MISSING);
    let expected = (pages.at, pages.at + pages.len);
    thread::scope(|scope| {
        scope.spawn(|| pages.unmap());
        let Event::Unmap { start, end } = next(&uffd) else { panic!() };
        assert_eq!((start, end), expected);
    });
}

#[test]
fn mremap_is_told_and_stays_registered() {
    let Some(uffd) = context(Features::EVENT_REMAP) else { return };
    let pages = Pages::registered(4, &uffd, RegisterMode::MISSING);
    let (old, old_len) = (pages.at, pages.len);
    thread::scope(|scope| {
        let remapping = scope.spawn(|| pages.remap());
        let Event::Remap { from, to, len } = next(&uffd) else { panic!() };
        let pages = remapping.join().unwrap();
        assert_eq!((from, to, len), (old, pages.at, old_len));
        // SAFETY: the test's own pages.
        unsafe { uffd.zeropage(pages.at, pages.len, true) }.unwrap();
    });
}

#[test]
fn one_read_gives_faults_first_then_the_rest() {
    let Some(uffd) = context(Features::EVENT_REMOVE) else { return };
    let pages = Pages::registered(4, &uffd, RegisterMode::MISSING);
    thread::scope(|scope| {
        scope.spawn(|| pages.discard(0..1));
        wait(&uffd);
        scope.spawn(|| pages.peek(1));
        // The fault has no sign of its own to wait for: there is something to read already.
        thread::sleep(std::time::Duration::from_millis(50));
        let mut buffer = EventBuffer::new();
        let events: Vec<Event> = uffd.read_events(&mut buffer).unwrap().collect();
        assert!(matches!(events[..], [Event::Pagefault { .. }, Event::Remove { .. }]), "{events:?}");
        // The zero page may still be refused until the discarding thread is through.
        // SAFETY: the test's own pages.
        while unsafe { uffd.zeropage(pages.page(1), PAGE, true) }.is_err() {
            thread::yield_now();
        }
    });
}
