//! Memory made ahead: tables of clusters, and their descriptors.
//!
//! A fault that makes room by itself takes slots, and what memory that needs it takes from here or not at all. What
//! it has left over it leaves here. Others [refill](Slots::refill) it, and drop what is too much. Under the locks
//! nothing is allocated or dropped.

use alloc::vec::Vec;

use super::device::{new_chunk, new_group, Chunk, Device, Group};
use super::table::{Chain, One, Table};
use super::{DeviceId, Slots, MAX_DEVICES};
use crate::sync::{Lock, OTHER_LOCKS};

/// Tables to keep ready: what 64 MiB of pages need.
const TABLES: usize = 32;
const GROUPS: usize = 1;
const CHUNKS: usize = 1;

/// Where an allocation may have memory from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Memory {
    /// From here, else the global allocator is asked.
    Asked,
    /// From here alone: the caller answers a fault.
    AtHand,
}

/// The vectors are never longer than their capacity.
pub(super) struct Spares {
    tables: Lock<Chain>,
    groups: Lock<Vec<One<Group>>>,
    chunks: Lock<Vec<One<Chunk>>>,
}

impl Spares {
    pub(super) fn new() -> Self {
        Self {
            tables: Lock::new(Chain::default(), &OTHER_LOCKS),
            groups: Lock::new(Vec::with_capacity(GROUPS), &OTHER_LOCKS),
            chunks: Lock::new(Vec::with_capacity(CHUNKS), &OTHER_LOCKS),
        }
    }

    /// A table; `None` without memory.
    pub(super) fn table(&self, memory: Memory) -> Option<One<Table>> {
        let spare = self.tables.lock().pop();
        memory.or_new(spare, Table::new)
    }

    /// Puts by a table that was left over.
    pub(super) fn give(&self, table: Option<One<Table>>) {
        if let Some(table) = table {
            self.tables.lock().push(table);
        }
    }

    // What publishes groups and chunks (`OnceBox`) is not loom's: it would not know that who finds one finds it whole,
    // if there were a lock, which it does know, on the way.

    pub(super) fn group(&self, memory: Memory) -> Option<One<Group>> {
        let spare = if cfg!(loom) { None } else { self.groups.lock().pop() };
        memory.or_new(spare, new_group)
    }

    pub(super) fn chunk(&self, memory: Memory) -> Option<One<Chunk>> {
        let spare = if cfg!(loom) { None } else { self.chunks.lock().pop() };
        memory.or_new(spare, new_chunk)
    }
}

impl Slots {
    /// Is there some of each for an allocation that asks for no memory?
    pub fn is_stocked(&self) -> bool {
        let spares = &self.spares;
        spares.tables.lock().len() > 0 && !spares.groups.lock().is_empty() && !spares.chunks.lock().is_empty()
    }

    /// Makes what was used up of the memory that is kept ready, and drops what is too much. From a thread that may
    /// allocate; no lock held.
    pub fn refill(&self) {
        loop {
            let (len, too_much) = {
                let mut tables = self.spares.tables.lock();
                (tables.len(), if tables.len() > TABLES { tables.pop() } else { None })
            };
            match too_much {
                Some(table) => drop(table),
                None if len < TABLES => match Table::new() {
                    Some(table) => self.spares.give(Some(table)),
                    None => break,
                },
                None => break,
            }
        }
        (0..MAX_DEVICES).filter_map(|at| self.device(DeviceId::new(at)?)).for_each(Device::refill);
        self.spares.groups.fill_up(GROUPS, new_group);
        self.spares.chunks.fill_up(CHUNKS, new_chunk);
    }
}

impl Memory {
    /// What was made ahead, else a new one, if that may be.
    pub(crate) fn or_new<T>(self, spare: Option<T>, make: impl FnOnce() -> Option<T>) -> Option<T> {
        match self {
            Memory::Asked => spare.or_else(make),
            Memory::AtHand => spare,
        }
    }
}
