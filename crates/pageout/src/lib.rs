//! Swap in user space: the engine of pageout and its Rust API.
//!
//! The engine is `no_std`: it runs inside processes whose allocator and thread-local state it must never
//! touch. Only [`api`], behind the feature `std` (on by default), runs it on threads of its own: see
//! [`api::Swap`]. Tests and models link `std`.
#![cfg_attr(not(any(test, loom, shuttle)), no_std)]
#[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
compile_error!("pageout is for Linux on x86-64");

extern crate alloc;
#[cfg(feature = "std")]
extern crate std;

#[cfg(all(feature = "std", not(any(loom, shuttle))))]
pub mod api;
pub mod call;
pub mod device;
pub mod engine;
pub mod fault;
#[cfg(not(any(loom, shuttle)))]
mod flaw;
#[cfg(any(loom, shuttle))]
pub mod flaw;
pub mod frame;
pub mod kernel;
pub mod page;
pub mod reclaim;
pub mod slot;
pub mod space;
pub mod stats;
pub mod swap;
pub mod sync;
pub mod tree;
pub mod wire;

#[cfg(all(feature = "std", not(any(loom, shuttle))))]
pub use api::{Advice, Builder, Bytes, Delivery, Error, Pinned, Plain, Region, Swap};
