//! Mistakes that a model can have made on purpose, to show that it would notice them.
//!
//! Outside of loom and shuttle no mistake can be asked for, and the compiler removes the places.

/// A way to get it wrong. Each is one that an earlier design had, or nearly had.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Flaw {
    /// A slot is looked at under one lock section and freed in another.
    PutInTwo,
    /// A cluster is moved to another list after its lock was let go.
    MoveUnlocked,
    /// A hint is believed without a look at the cluster's order and at whether the device is on.
    HintBelieved,
    /// A cluster is discarded as it was when it was found on its list.
    DiscardUnsure,
    /// A device is taken for full without a second look after it was marked so.
    FullUnsure,
    /// A device is taken for off though it had been switched on before it was said to have room.
    OnUnseen,
    /// Swapoff does not wait for allocations that began before it.
    OffAtOnce,
    /// Room for an overflowing count is installed over room that somebody installed meanwhile.
    ContinuedTwice,
    /// Two take up a trunk that nobody used, and both list its clusters.
    AdoptTwice,
    /// A trunk is taken up by the tables that the device before it had needed.
    TablesUnsure,
    /// A trunk is handed back without another look at whether its clusters are free.
    TrunkUnsure,
    /// A device leaves though a slot of it is in use.
    EndUnsure,
    /// A page that was written out is taken for out though a fault took it back meanwhile.
    SettleUnsure,
    /// A page that was read is mapped though the program gave it up meanwhile.
    ArriveUnsure,
    /// Pages come in together, and who waits for one of them is not woken.
    WakeForgotten,
    /// A device that is on its way off goes on giving slots.
    LeavingGives,
    /// A slot that a fork's child reads is written again.
    SharedWritten,
    /// A fork's child looks for everything where it was before.
    MovesUntold,
    /// It is looked whether somebody has the baton, and then taken.
    BatonUnsure,
    /// A round that began before it was asked for is taken for enough.
    RoundUnsure,
    /// Who waits for a reader of events does not wait.
    CaughtUpAtOnce,
    /// Who pins what another has pinned takes it for settled.
    PinUnsettled,
}

#[cfg(any(loom, shuttle))]
mod asked {
    extern crate std;
    use super::Flaw;
    use std::cell::Cell;

    // Both model checkers run all threads of a model on the thread of its test.
    std::thread_local!(static ASKED: Cell<Option<Flaw>> = const { Cell::new(None) });

    /// Has the models on this thread make a mistake from now on, or none.
    pub fn ask(flaw: Option<Flaw>) {
        ASKED.set(flaw);
    }

    pub(crate) fn makes(flaw: Flaw) -> bool {
        ASKED.get() == Some(flaw)
    }
}

#[cfg(any(loom, shuttle))]
pub use asked::ask;
#[cfg(any(loom, shuttle))]
pub(crate) use asked::makes;

#[cfg(not(any(loom, shuttle)))]
pub(crate) const fn makes(_: Flaw) -> bool {
    false
}
