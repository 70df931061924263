//! Faults that a thread answers itself, in the handler of the signal that they raise.
//!
//! The handler runs with all signals blocked on a thread of the program, which may have been interrupted anywhere but in
//! the engine. So it asks for no memory and gives none back (the thread may hold a lock of malloc), reads no
//! events (their regions take memory), and uses no descriptor but the kernel's, which are in the program's file
//! table. What it cannot do under these rules it hands to a server, and waits. It may wait for servers,
//! evictors and other handlers; none of them waits for it but by a lock that it holds while it runs.

use super::{Server, ROOM};
use crate::engine::Engine;
use crate::kernel::{Fault, Kernel};
use crate::page::Tag;
use crate::space::{BLOCK, PAGE};

/// How often, and how long (ns) each time, a thread waits for a server before it takes its fault again.
const WAITS: usize = 8;
const WAIT_NS: u64 = 1_000_000;

impl Server {
    /// One for a thread's own faults.
    pub fn inline() -> Self {
        let mut server = Self { inline: true, ..Self::new() };
        server.incoming.outgoing.of_handler = true;
        server
    }

    /// Answers a fault of the calling thread at `address`: when it returns the page is there, or poisoned, or was
    /// there and the touch is to be tried again. `thread` tells streams of faults apart. False: neither this thread nor a
    /// server has got to it.
    pub fn answer_own<K: Kernel>(&mut self, engine: &Engine<K>, address: usize, thread: u32) -> bool {
        let fault = Fault { address, thread };
        engine.crowd.see(thread);
        if engine.room() < ROOM && engine.may_reclaim_inline() {
            self.make_room(engine);
        }
        let (answered, _) = self.answer_timed(engine, fault, engine.kernel.now());
        if !(answered && engine.is_answered(address)) {
            engine.hand_over(fault);
        }
        answered || engine.is_answered(address)
    }
}

impl<K: Kernel> Engine<K> {
    /// Makes ahead what the fault path takes. Now and then, from a thread that may allocate; no lock held.
    pub fn stock(&self) {
        self.space.spares.refill();
        self.place.refill();
        self.policy.lock().reserve();
    }

    /// May what a thread in its signal handler brings in enter the queues?
    pub(crate) fn has_room_in_queues(&self) -> bool {
        self.policy.lock().has_room()
    }

    /// Do several threads answer themselves just now? Each interrupts the others by MOVE, so they copy, and leave frames filled.
    pub(crate) fn is_crowded_inline(&self) -> bool {
        self.is_inline() && self.crowd.threads() > 1
    }

    /// May a thread in its signal handler let pages leave? With a descriptor that is another's by now it would take
    /// that one's answers for the kernel's.
    pub(crate) fn may_reclaim_inline(&self) -> bool {
        self.self_service && self.has_room_in_queues() && self.kernel.is_ours()
    }

    /// Has a server answer, and waits for it. No lock held.
    fn hand_over(&self, fault: Fault) {
        let mut heard = self.answered.heard();
        // If too many wait already, the fault is taken again.
        self.pending.lock().push(fault, None);
        self.calls.ring();
        for _ in 0..WAITS {
            if self.is_answered(fault.address) {
                return;
            }
            self.answered.wait(heard, WAIT_NS);
            heard = self.answered.heard();
        }
    }

    /// Does the word of a page say that a touch of it raises no fault, or is meant to, or is the page gone?
    fn is_answered(&self, address: usize) -> bool {
        matches!(self.tag(address), Tag::Resident | Tag::Poisoned) || !self.manages(address)
    }

    /// What is known of the page of an address. No lock held.
    pub fn tag(&self, address: usize) -> Tag {
        let block = self.space.block(address);
        block.map_or(Tag::None, |block| block.lock().word(address % BLOCK / PAGE).tag())
    }

    /// Is the address in a region of this engine? No lock held.
    pub fn manages(&self, address: usize) -> bool {
        self.events.read().find(address).is_some()
    }
}
