//! Each request on the real kernel: what it does, and the errors that users have to tell apart.

mod common;

use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus};
use std::thread;

use common::{context, next, wait, Pages, PAGE};
use pageout_uffd::{
    CopyMode, Errno, Event, EventBuffer, FaultFlags, Features, MoveMode, Partial, RegisterMode, Uffd,
};
use rustix::fs::{ftruncate, memfd_create, MemfdFlags};
use rustix::mm::{mmap, MapFlags, ProtFlags};

const NOTHING_DONE: usize = 0;

fn failed(done: usize, errno: Errno) -> Result<(), Partial> {
    Err(Partial { done, errno })
}

/// Runs the test `name` of this program again, as a child that `is_child` is true in.
fn rerun(name: &str) -> ExitStatus {
    let program = std::env::current_exe().unwrap();
    let output = Command::new(program).args(["--exact", name]).env("UFFD_TEST_CHILD", name).output();
    output.unwrap().status
}

fn is_child(name: &str) -> bool {
    std::env::var("UFFD_TEST_CHILD").is_ok_and(|child| child == name)
}

#[test]
fn copy_fills_stops_at_what_is_there_and_says_so() {
    let Some(uffd) = context(Features::empty()) else { return };
    let pages = Pages::registered(4, &uffd, RegisterMode::MISSING);
    let source = Pages::filled(4);
    // SAFETY: both are this test's pages, as in all tests here.
    let copy = |page: usize, count: usize| unsafe {
        uffd.copy(pages.page(page), source.page(page), count * PAGE, CopyMode::empty())
    };
    assert_eq!(copy(2, 1), Ok(()));
    assert_eq!(copy(0, 4), failed(2 * PAGE, Errno::AGAIN));
    assert_eq!(copy(2, 2), failed(NOTHING_DONE, Errno::EXIST));
    assert_eq!(copy(3, 1), Ok(()));
    assert_eq!([0, 1, 2, 3].map(|page| pages.peek(page)), [1, 2, 3, 4]);
}

#[test]
fn copy_takes_an_unaligned_source_and_reports_an_unreadable_one() {
    let Some(uffd) = context(Features::empty()) else { return };
    let pages = Pages::registered(2, &uffd, RegisterMode::MISSING);
    let source = Pages::filled(2);
    // SAFETY: see above; page 0 is never readable.
    unsafe {
        assert_eq!(uffd.copy(pages.at, source.at + 1, PAGE, CopyMode::empty()), Ok(()));
        assert_eq!(common::peek(pages.at + PAGE - 1), 2);
        assert_eq!(uffd.copy(pages.page(1), 0, PAGE, CopyMode::empty()), failed(NOTHING_DONE, Errno::FAULT));
    }
}

#[test]
fn what_is_not_registered_or_not_aligned_is_refused() {
    let Some(uffd) = context(Features::empty()) else { return };
    let (pages, source) = (Pages::new(2), Pages::filled(2));
    let (at, from) = (pages.at, source.at);
    // SAFETY: see above.
    unsafe {
        assert_eq!(uffd.copy(at, from, PAGE, CopyMode::empty()), failed(NOTHING_DONE, Errno::NOENT));
        assert_eq!(uffd.zeropage(at, PAGE, true), failed(NOTHING_DONE, Errno::NOENT));
        assert_eq!(uffd.write_protect(at, PAGE, true, true), Err(Errno::NOENT));
        uffd.register(at, pages.len, RegisterMode::MISSING).unwrap();
        assert_eq!(uffd.copy(at + 1, from, PAGE, CopyMode::empty()), failed(NOTHING_DONE, Errno::INVAL));
        assert_eq!(uffd.copy(at, from, 0, CopyMode::empty()), failed(NOTHING_DONE, Errno::INVAL));
        assert_eq!(uffd.copy(at, from, PAGE, CopyMode::WP), failed(NOTHING_DONE, Errno::INVAL));
        assert_eq!(uffd.zeropage(at, 1, true), failed(NOTHING_DONE, Errno::INVAL));
        assert_eq!(uffd.register(at, 1, RegisterMode::MISSING), Err(Errno::INVAL));
        assert_eq!(uffd.register(at, PAGE, RegisterMode::empty()), Err(Errno::INVAL));
    }
    assert_eq!(uffd.wake(at + 1, PAGE), Err(Errno::INVAL));
    assert_eq!(uffd.unregister(at, 0), Err(Errno::INVAL));
}

#[test]
fn a_range_belongs_to_one_context() {
    let (Some(uffd), Some(other)) = (context(Features::empty()), context(Features::empty())) else { return };
    let pages = Pages::registered(1, &uffd, RegisterMode::MISSING);
    // SAFETY: see above.
    unsafe {
        assert_eq!(other.register(pages.at, PAGE, RegisterMode::MISSING), Err(Errno::BUSY));
        assert_eq!(uffd.register(pages.at, PAGE, RegisterMode::MISSING), Ok(()));
        assert_eq!(uffd.unregister(pages.at, PAGE), Ok(()));
        assert_eq!(other.register(pages.at, PAGE, RegisterMode::MISSING), Ok(()));
    }
}

#[test]
fn move_takes_pages_away() {
    let Some(uffd) = context(Features::MOVE) else { return };
    let pages = Pages::registered(2, &uffd, RegisterMode::MISSING);
    let source = Pages::filled(2);
    // SAFETY: see above.
    let moving = || unsafe { uffd.move_pages(pages.at, source.at, 2 * PAGE, MoveMode::empty()) };
    assert_eq!(moving(), Ok(()));
    assert_eq!([0, 1].map(|page| pages.peek(page)), [1, 2]);
    assert_eq!(moving(), failed(NOTHING_DONE, Errno::EXIST), "looked at before the source's hole");
    pages.discard(0..2);
    assert_eq!(moving(), failed(NOTHING_DONE, Errno::NOENT));
    source.poke(0, 9);
    assert_eq!(moving(), failed(PAGE, Errno::AGAIN));
    source.poke(0, 9);
    let elsewhere = Pages::new(1);
    // SAFETY: see above.
    let result = unsafe { uffd.move_pages(elsewhere.at, source.at, PAGE, MoveMode::empty()) };
    assert_eq!(result, failed(NOTHING_DONE, Errno::INVAL), "the destination is not registered");
}

#[test]
fn move_stops_at_a_hole_unless_allowed() {
    let Some(uffd) = context(Features::MOVE) else { return };
    let pages = Pages::registered(4, &uffd, RegisterMode::MISSING);
    let source = Pages::filled(4);
    source.discard(1..2);
    // SAFETY: see above.
    let moving = |page: usize, count: usize, mode| unsafe {
        uffd.move_pages(pages.page(page), source.page(page), count * PAGE, mode)
    };
    assert_eq!(moving(0, 4, MoveMode::empty()), failed(PAGE, Errno::AGAIN));
    assert_eq!(moving(1, 3, MoveMode::empty()), failed(NOTHING_DONE, Errno::NOENT));
    assert_eq!(moving(1, 3, MoveMode::ALLOW_SRC_HOLES), Ok(()));
    assert_eq!([0, 2, 3].map(|page| pages.peek(page)), [1, 3, 4]);
    // SAFETY: see above. The hole went along: the page is missing.
    assert_eq!(unsafe { uffd.zeropage(pages.page(1), PAGE, true) }, Ok(()));
}

/// Nothing moves, and what is refused tells whose a page is.
#[test]
fn a_move_to_itself_tells_with_whom_a_page_is_registered() {
    let (Some(uffd), Some(other)) = (context(Features::MOVE), context(Features::MOVE)) else { return };
    let pages = Pages::registered(2, &uffd, RegisterMode::MISSING);
    // SAFETY: a page is moved to where it is.
    let ask = |uffd: &Uffd, at| unsafe { uffd.move_pages(at, at, PAGE, MoveMode::empty()) };
    // SAFETY: see above.
    unsafe { uffd.zeropage(pages.page(0), PAGE, true).unwrap() };
    assert_eq!(ask(&uffd, pages.page(0)), failed(NOTHING_DONE, Errno::EXIST), "it is there");
    assert_eq!(ask(&uffd, pages.page(1)), failed(NOTHING_DONE, Errno::NOENT), "it is missing");
    for page in [0, 1] {
        assert_eq!(ask(&other, pages.page(page)), failed(NOTHING_DONE, Errno::INVAL), "another's");
    }
    let elsewhere = Pages::new(1);
    assert_eq!(ask(&uffd, elsewhere.at), failed(NOTHING_DONE, Errno::INVAL), "nobody's");
}

#[test]
fn zeropage_gives_zeros_once() {
    let Some(uffd) = context(Features::empty()) else { return };
    let pages = Pages::registered(2, &uffd, RegisterMode::MISSING);
    // SAFETY: see above.
    unsafe {
        assert_eq!(uffd.zeropage(pages.page(1), PAGE, true), Ok(()));
        assert_eq!(uffd.zeropage(pages.at, 2 * PAGE, true), failed(PAGE, Errno::AGAIN));
        assert_eq!(uffd.zeropage(pages.page(1), PAGE, true), failed(NOTHING_DONE, Errno::EXIST));
    }
    assert_eq!([0, 1].map(|page| pages.peek(page)), [0, 0]);
}

#[test]
fn a_write_to_a_protected_page_waits() {
    let Some(uffd) = context(Features::PAGEFAULT_FLAG_WP) else { return };
    let pages = Pages::registered(2, &uffd, RegisterMode::MISSING | RegisterMode::WP);
    let source = Pages::filled(2);
    // SAFETY: see above.
    unsafe {
        uffd.copy(pages.page(0), source.at, PAGE, CopyMode::WP).unwrap();
        uffd.copy(pages.page(1), source.at, PAGE, CopyMode::empty()).unwrap();
        uffd.write_protect(pages.page(1), PAGE, true, false).unwrap();
    }
    for page in [0, 1] {
        thread::scope(|scope| {
            let writer = scope.spawn(|| pages.poke(page, 7));
            let Event::Pagefault { address, flags, thread: 0 } = next(&uffd) else { panic!() };
            assert_eq!(address, pages.page(page));
            assert_eq!(flags, FaultFlags { write: true, wp: true, minor: false });
            assert_eq!(pages.peek(page), 1);
            // SAFETY: see above.
            unsafe { uffd.write_protect(address, PAGE, false, false) }.unwrap();
            uffd.wake(address, PAGE).unwrap();
            writer.join().unwrap();
            assert_eq!(pages.peek(page), 7);
        });
    }
}

#[test]
fn who_waits_is_woken_when_asked() {
    let Some(uffd) = context(Features::empty()) else { return };
    let pages = Pages::registered(1, &uffd, RegisterMode::MISSING);
    let source = Pages::filled(1);
    thread::scope(|scope| {
        let reader = scope.spawn(|| pages.peek(0));
        assert!(matches!(next(&uffd), Event::Pagefault { .. }));
        uffd.wake(pages.at, PAGE).unwrap();
        assert!(matches!(next(&uffd), Event::Pagefault { .. }), "still missing, so it faults again");
        // SAFETY: see above.
        unsafe { uffd.copy(pages.at, source.at, PAGE, CopyMode::DONTWAKE) }.unwrap();
        thread::sleep(std::time::Duration::from_millis(20));
        assert!(!reader.is_finished());
        uffd.wake(pages.at, PAGE).unwrap();
        assert_eq!(reader.join().unwrap(), 1);
    });
}

#[test]
fn unregister_lets_go_who_waits() {
    let Some(uffd) = context(Features::empty()) else { return };
    let pages = Pages::registered(1, &uffd, RegisterMode::MISSING);
    thread::scope(|scope| {
        let reader = scope.spawn(|| pages.peek(0));
        wait(&uffd);
        uffd.unregister(pages.at, PAGE).unwrap();
        assert_eq!(reader.join().unwrap(), 0);
    });
}

#[test]
fn continue_maps_what_the_page_cache_has() {
    let Some(uffd) = context(Features::MINOR_SHMEM) else { return };
    let file = memfd_create("uffd-test", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, PAGE as u64).unwrap();
    rustix::io::write(&file, &[5]).unwrap();
    let (access, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
    // SAFETY: a new mapping where the kernel likes.
    let at = unsafe { mmap(std::ptr::null_mut(), PAGE, access, flags, &file, 0) }.unwrap() as usize;
    // SAFETY: see above.
    unsafe { uffd.register(at, PAGE, RegisterMode::MINOR) }.unwrap();
    thread::scope(|scope| {
        let reader = scope.spawn(|| common::peek(at));
        let Event::Pagefault { flags, .. } = next(&uffd) else { panic!() };
        assert_eq!(flags, FaultFlags { write: false, wp: false, minor: true });
        // SAFETY: see above.
        unsafe {
            assert_eq!(uffd.continue_pages(at, PAGE, true), Ok(()));
            assert_eq!(uffd.continue_pages(at, PAGE, true), failed(NOTHING_DONE, Errno::EXIST));
        }
        assert_eq!(reader.join().unwrap(), 5);
    });
}

#[test]
fn poison_gives_sigbus() {
    let name = "poison_gives_sigbus";
    let Some(uffd) = context(Features::POISON) else { return };
    if !is_child(name) {
        assert_eq!(rerun(name).signal(), Some(7));
        return;
    }
    let pages = Pages::registered(2, &uffd, RegisterMode::MISSING);
    // SAFETY: see above.
    unsafe {
        uffd.zeropage(pages.page(1), PAGE, true).unwrap();
        assert_eq!(uffd.poison(pages.at, 2 * PAGE, true), failed(PAGE, Errno::AGAIN));
        assert_eq!(uffd.poison(pages.page(1), PAGE, true), failed(NOTHING_DONE, Errno::EXIST));
    }
    assert_eq!(pages.peek(1), 0, "a page that is there stays");
    pages.peek(0);
}

#[test]
fn discarding_takes_poison_away() {
    let Some(uffd) = context(Features::POISON) else { return };
    let pages = Pages::registered(1, &uffd, RegisterMode::MISSING);
    // SAFETY: see above.
    unsafe {
        uffd.poison(pages.at, PAGE, true).unwrap();
        assert_eq!(uffd.zeropage(pages.at, PAGE, true), failed(NOTHING_DONE, Errno::EXIST));
        pages.discard(0..1);
        assert_eq!(uffd.zeropage(pages.at, PAGE, true), Ok(()));
    }
    assert_eq!(pages.peek(0), 0);
}

#[test]
fn sigbus_feature_gives_a_signal_for_an_event() {
    let name = "sigbus_feature_gives_a_signal_for_an_event";
    let Some(uffd) = context(Features::SIGBUS) else { return };
    if !is_child(name) {
        assert_eq!(rerun(name).signal(), Some(7));
        return;
    }
    Pages::registered(1, &uffd, RegisterMode::MISSING).peek(0);
}

#[test]
fn nothing_maps_while_an_event_is_unread() {
    let wanted = Features::EVENT_REMOVE | Features::PAGEFAULT_FLAG_WP | Features::MOVE | Features::POISON;
    let Some(uffd) = context(wanted) else { return };
    let pages = Pages::registered(2, &uffd, RegisterMode::MISSING | RegisterMode::WP);
    let source = Pages::filled(2);
    thread::scope(|scope| {
        let discarding = scope.spawn(|| pages.discard(0..1));
        wait(&uffd);
        let (to, from) = (pages.page(1), source.at);
        let unread = failed(NOTHING_DONE, Errno::AGAIN);
        // SAFETY: see above.
        unsafe {
            assert_eq!(uffd.copy(to, from, PAGE, CopyMode::empty()), unread);
            assert_eq!(uffd.move_pages(to, from, PAGE, MoveMode::empty()), unread);
            assert_eq!(uffd.zeropage(to, PAGE, true), unread);
            assert_eq!(uffd.poison(to, PAGE, true), unread);
            assert_eq!(uffd.write_protect(to, PAGE, true, true), Err(Errno::AGAIN));
            assert_eq!(uffd.wake(to, PAGE), Ok(()));
            assert!(matches!(next(&uffd), Event::Remove { .. }));
            discarding.join().unwrap();
            assert_eq!(uffd.copy(to, from, PAGE, CopyMode::empty()), Ok(()));
        }
    });
}

#[test]
fn nothing_to_read_is_again() {
    let Some(uffd) = context(Features::empty()) else { return };
    assert_eq!(uffd.read_events(&mut EventBuffer::new()).unwrap_err(), Errno::AGAIN);
}

#[test]
fn a_context_survives_its_trip_as_a_descriptor() {
    let Some(uffd) = context(Features::empty()) else { return };
    let pages = Pages::registered(1, &uffd, RegisterMode::MISSING);
    // SAFETY: it was one.
    let uffd = unsafe { Uffd::from_fd(uffd.into_fd()) };
    // SAFETY: see above.
    unsafe { uffd.zeropage(pages.at, PAGE, true) }.unwrap();
    assert_eq!(pages.peek(0), 0);
}
