//! Out to the devices and in from them: the place of a page, the way out, the way in, and
//! what a fork's child gets.

pub mod heir;
mod leave;
pub mod moved;
mod place;
pub mod swapin;
pub mod swapout;
pub mod vacate;

pub use place::{Lessor, Place};
