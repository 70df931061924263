//! Whole programs and kernel traps under pageout.
//!
//! [`trap`] holds the programs that set traps, [`harness`] starts programs, watches over them, and
//! shows what they were doing when they do not end.

pub mod harness;
pub mod trap;
pub mod units;
