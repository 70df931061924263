//! The Rust API: memory of one's own program that is larger than what it may take.
//!
//! ```no_run
//! use pageout::{Bytes, Swap};
//!
//! let swap = Swap::builder().memory(Bytes::gib(1)).device("pageout.swap,size=8G").build()?;
//! let mut region = swap.map(4 << 30)?;
//! for (n, word) in region.as_mut_slice::<u64>().iter_mut().enumerate() {
//!     *word = n as u64;
//! }
//! # Ok::<(), pageout::Error>(())
//! ```
//!
//! A [`Swap`] is a limit with devices and an engine; a [`Region`] is memory that it manages. Only regions are: heap,
//! stacks and everything else of the program are as always. What a program does not want to
//! change for, `pageout run` does from outside.
//!
//! | file | owns |
//! |---|---|
//! | swap | `Swap`, its builder, the end of the engine |
//! | region | `Region`: views, advice, pins |
//! | host | the engine's threads in the program |
//! | inline | threads that answer their own faults |
//! | managed | the kernel with an account of managed memory |
//! | spec, bytes | how devices and sizes are written |
//! | devices | what a specification names |
//! | found | which file or disk that is there may be a device |
//! | header | what `mkswap` wrote there |
//! | memory | mappings |
//! | process | whether this is a fork's child |
//! | error | what went wrong, and what to do |
//!
//! Needs Linux 6.8 or later and access to userfaultfd for faults in system calls too: read and write access to
//! `/dev/userfaultfd`, or more rights; neither where threads answer their own faults, see [`Delivery`]. After a `fork` regions are the parent's alone. The engine opens all it needs when
//! it is built, in a file table of its own, where standard error stays open: a program may close descriptors, drop privileges and lower its
//! limits afterwards, but for those on address space, data and the size of files, which are the engine's, too: beyond the last
//! no page can leave to a file. A seccomp filter on all threads is on the engine's too.

mod bytes;
mod devices;
mod error;
mod found;
mod header;
mod host;
mod inline;
mod managed;
mod memory;
mod process;
mod region;
mod spec;
mod swap;

pub use crate::engine::Swapin;
pub use bytes::{split_number, Bytes, NotASize};
pub use error::{reason, Error};
pub use found::{is_missing_disk, safe_directory, Found, IN_USE};
pub use header::page as header_page;
pub use region::{Advice, Pinned, Plain, Region, RegionStats};
pub use spec::{Backing, NotASpec, Spec};
pub use swap::{Builder, Delivery, Swap, LEAST_MEMORY};
