//! userfaultfd for Rust: a thread decides what a page holds when another first touches it.
//!
//! `no_std`, no allocation, no libc: each method of [`Uffd`] but those that open is one system call at most, fit for a signal handler.
//!
//! | you want | you call | Linux |
//! |---|---|---|
//! | a context, or one line that says why there is none | [`Uffd::open`], [`OpenError`] | 4.11 |
//! | to know what the kernel offers | [`Uffd::supported`] | |
//! | faults of a range reported | [`Uffd::register`], [`Uffd::unregister`] | |
//! | to read what happened | [`Uffd::read_events`] into an [`EventBuffer`] | |
//! | to answer with bytes, or with zeros | [`Uffd::copy`], [`Uffd::zeropage`] | |
//! | to answer with a page you have, or to take one away | [`Uffd::move_pages`] | 6.8 |
//! | to hold back writes | [`Uffd::write_protect`], [`CopyMode::WP`] | 5.7 |
//! | to answer a minor fault of shared memory | [`Uffd::continue_pages`] | 5.13 |
//! | to say that the contents are lost | [`Uffd::poison`] | 6.6 |
//! | to let waiting threads look again | [`Uffd::wake`] | |
//!
//! Addresses, lengths and what is `done` are in bytes; addresses and lengths are multiples of the page size.
//!
//! # Example
//!
//! A region whose page `n` holds the byte `n`, made when it is first touched.
//!
//! ```
//! use std::{error::Error, ptr, thread};
//!
//! use pageout_uffd::{CopyMode, Errno, Event, EventBuffer, Features, RegisterMode, Uffd};
//! use rustix::mm::{mmap_anonymous, MapFlags, ProtFlags};
//!
//! const PAGE: usize = 4096;
//! const PAGES: usize = 8;
//!
//! /// Answers faults until each page has come.
//! fn serve(uffd: &Uffd, base: usize) -> Result<(), Box<dyn Error + Send + Sync>> {
//!     let mut buffer = EventBuffer::new();
//!     let mut served = 0;
//!     while served < PAGES {
//!         // A blocking context waits here.
//!         for event in uffd.read_events(&mut buffer)? {
//!             let Event::Pagefault { address, .. } = event else { continue };
//!             let contents = [((address - base) / PAGE) as u8; PAGE];
//!             // SAFETY: the page is ours, missing, and nobody else says what it holds.
//!             match unsafe { uffd.copy(address, contents.as_ptr() as usize, PAGE, CopyMode::empty()) } {
//!                 Ok(()) => served += 1,
//!                 // Two threads waited for one page: the first answer woke both.
//!                 Err(stopped) if stopped.errno == Errno::EXIST => uffd.wake(address, PAGE)?,
//!                 Err(stopped) => return Err(stopped.into()),
//!             }
//!         }
//!     }
//!     Ok(())
//! }
//!
//! # fn main() -> Result<(), Box<dyn Error + Send + Sync>> {
//! let uffd = match Uffd::open(Features::empty(), false) {
//!     Ok(uffd) => uffd,
//!     Err(why) => {
//!         eprintln!("{why}");
//!         return Ok(());
//!     }
//! };
//! let access = ProtFlags::READ | ProtFlags::WRITE;
//! // SAFETY: a new mapping where the kernel likes.
//! let base = unsafe { mmap_anonymous(ptr::null_mut(), PAGES * PAGE, access, MapFlags::PRIVATE)? };
//! // SAFETY: nobody uses the region yet, and `serve` never touches it.
//! unsafe { uffd.register(base as usize, PAGES * PAGE, RegisterMode::MISSING)? };
//!
//! let region = base as usize;
//! let handler = thread::spawn(move || serve(&uffd, region));
//! for page in 0..PAGES {
//!     // SAFETY: mapped and readable; the first access waits for the handler.
//!     let byte = unsafe { ((region + page * PAGE + 100) as *const u8).read_volatile() };
//!     assert_eq!(byte, page as u8);
//! }
//! handler.join().unwrap()
//! # }
//! ```
//!
//! # What has cost others data
//!
//! * **Reading an event acknowledges it**, see [`Event`]: a late reader acts on a mapping that is no longer.
//! * **After [`Event::Remove`] the pages are still there** for a while.
//! * **While an event is unread** all that maps or protects is refused with EAGAIN, for the context it is
//!   unread in only. A handler that does `munmap` or `madvise` on its own registered memory waits for itself.
//! * **EAGAIN with `done > 0`** is not an event: go on from there, see [`Partial`].
//! * **A `fork` without [`Features::EVENT_FORK`]** leaves the child unregistered: what is missing reads as
//!   zeros there. In the parent [`Uffd::move_pages`] is refused with EBUSY until a shared page is written.
//! * **The last descriptor closed** ends all registrations, with the same zeros.
//! * **A page that MOVE refused** is not to be copied and dropped: somebody writes to it by I/O.
//!
//! # Threads
//!
//! Any thread may call any method at any time. Every reader that waits is woken by every fault, and each
//! message goes to one of them. A handler that runs on the CPU of the thread that faults answers several times
//! faster than one elsewhere.
//!
//! # Minimum kernel
//!
//! Linux 4.11; more by what is used, see [`Features`] and [`Features::since`].
#![no_std]
#![cfg(target_os = "linux")]

mod abi;
mod event;
mod features;
mod open;
mod uffd;

pub use event::{Event, EventBuffer, Events, FaultFlags};
pub use features::{CopyMode, Features, MoveMode, RegisterMode};
pub use open::OpenError;
pub use rustix::fd;
pub use rustix::io::Errno;
pub use uffd::{Partial, Uffd};
