//! Forking. One test in a program of its own: a fork shares every page of the process, which other tests' MOVE
//! would refuse, and descriptors are counted.

mod common;

use std::os::unix::process::CommandExt;
use std::process::Command;
use std::{fs, io, thread};

use common::{context, next, peek, wait, Pages, PAGE};
use pageout_uffd::{CopyMode, Errno, Event, EventBuffer, Features, MoveMode, RegisterMode, Uffd};
use rustix::mm::{madvise, Advice};

/// What a forked child of this process finds at `address`.
fn read_in_child(address: usize) -> u8 {
    let mut command = Command::new("true");
    // SAFETY: the closure reads one byte; it says which by the error that travels back, 0 being no error.
    unsafe {
        command.pre_exec(move || match peek(address) {
            0 => Ok(()),
            byte => Err(io::Error::from_raw_os_error(byte.into())),
        });
    }
    match command.spawn() {
        Ok(mut child) => {
            child.wait().unwrap();
            0
        }
        Err(error) => error.raw_os_error().unwrap() as u8,
    }
}

fn descriptors() -> usize {
    fs::read_dir("/proc/self/fd").unwrap().count()
}

#[test]
fn forking() {
    the_child_is_served_by_its_own_context();
    an_event_that_is_not_taken_is_closed();
    a_page_shared_by_fork_is_busy_until_written();
}

fn the_child_is_served_by_its_own_context() {
    let Some(uffd) = context(Features::EVENT_FORK) else { return };
    let pages = Pages::registered(1, &uffd, RegisterMode::MISSING);
    let source = Pages::filled(1);
    source.poke(0, 42);
    let address = pages.at;
    thread::scope(|scope| {
        let found = scope.spawn(move || read_in_child(address));
        let Event::Fork { child } = next(&uffd) else { panic!() };
        // SAFETY: the child's context.
        let child = unsafe { Uffd::from_fd(child) };
        let Event::Pagefault { address, .. } = next(&child) else { panic!() };
        // SAFETY: the child waits for this very page.
        unsafe { child.copy(address, source.at, PAGE, CopyMode::empty()) }.unwrap();
        assert_eq!(found.join().unwrap(), 42);
    });
}

fn an_event_that_is_not_taken_is_closed() {
    let Some(uffd) = context(Features::EVENT_FORK) else { return };
    let pages = Pages::registered(1, &uffd, RegisterMode::MISSING);
    let (address, before) = (pages.at, descriptors());
    thread::scope(|scope| {
        let found = scope.spawn(move || read_in_child(address));
        wait(&uffd);
        let mut buffer = EventBuffer::new();
        drop(uffd.read_events(&mut buffer).unwrap());
        // Nobody serves the child: registration has ended there.
        assert_eq!(found.join().unwrap(), 0);
    });
    assert_eq!(descriptors(), before);
}

fn a_page_shared_by_fork_is_busy_until_written() {
    let Some(uffd) = context(Features::MOVE) else { return };
    let pages = Pages::registered(1, &uffd, RegisterMode::MISSING);
    let source = Pages::filled(1);
    assert_eq!(read_in_child(source.at), 1);
    // SAFETY: the test's own pages.
    let moving = || unsafe { uffd.move_pages(pages.at, source.at, PAGE, MoveMode::empty()) };
    let refused = moving().unwrap_err();
    assert_eq!((refused.done, refused.errno), (0, Errno::BUSY));
    // SAFETY: as above.
    unsafe { madvise(source.at as *mut _, PAGE, Advice::LinuxPopulateWrite) }.unwrap();
    assert_eq!(moving(), Ok(()));
    assert_eq!(pages.peek(0), 1);
}
