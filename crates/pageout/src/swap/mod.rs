//! Out to the devices and in from them.
//!
//! | file | owns |
//! |---|---|
//! | place | the place of a page: devices and their slots, as the engine uses them |
//! | leave | which pages of a unit or a block leave, and their MOVE into frames |
//! | swapout | what becomes of them there: zeros, unchanged, or written |
//! | swapin | the way in |
//! | vacate | the way off a device |
//! | heir, moved | what a fork's child gets, and what moved meanwhile |

pub mod heir;
mod leave;
pub mod moved;
mod place;
pub mod swapin;
pub mod swapout;
pub mod vacate;

pub use place::{Lessor, Place};
