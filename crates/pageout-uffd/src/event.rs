//! Messages of a context: the buffer they are read into and what they say.
//!
//! A message that was read is owned by the [`Events`] of that read; each is decoded exactly once, which is what
//! keeps the descriptor of a fork message from being owned twice or lost. Nothing here allocates or locks.

use core::fmt;
use core::mem::size_of;

use linux_raw_sys::general as raw;
use rustix::fd::{FromRawFd, OwnedFd};

/// `struct uffd_msg`: the kind, padding, three words whose meaning depends on the kind.
#[derive(Clone, Copy)]
#[repr(C)]
struct Message {
    kind: u8,
    reserved: [u8; 7],
    words: [u64; 3],
}

const _: () = assert!(size_of::<Message>() == size_of::<raw::uffd_msg>());

/// Room for 32 messages (1 KiB) for [`Uffd::read_events`](crate::Uffd::read_events), in a stack, a static or
/// wherever: it needs no allocation.
///
/// It must not lie in memory whose faults the reading thread itself serves.
pub struct EventBuffer {
    messages: [Message; Self::CAPACITY],
    limit: usize,
}

impl EventBuffer {
    /// Messages that one read takes at most.
    pub const CAPACITY: usize = 32;

    /// An empty buffer.
    pub const fn new() -> Self {
        Self {
            messages: [Message { kind: 0, reserved: [0; 7], words: [0; 3] }; Self::CAPACITY],
            limit: Self::CAPACITY,
        }
    }

    /// At most so many messages are taken by a read from now on: 1 to 32.
    pub const fn limit(mut self, messages: usize) -> Self {
        assert!(messages > 0 && messages <= Self::CAPACITY);
        self.limit = messages;
        self
    }

    /// What the kernel may fill.
    pub(crate) fn bytes(&mut self) -> &mut [u8] {
        let len = self.limit * size_of::<Message>();
        // SAFETY: `len` contiguous bytes of the messages, without padding, and any bytes make valid messages.
        unsafe { core::slice::from_raw_parts_mut(self.messages.as_mut_ptr().cast(), len) }
    }

    /// What a read left in the first `bytes` bytes.
    ///
    /// # Safety
    ///
    /// They must have been read from a userfaultfd just now, and this must be called once for them: fork
    /// messages own descriptors.
    pub(crate) unsafe fn events(&mut self, bytes: usize) -> Events<'_> {
        let count = bytes / size_of::<Message>();
        Events { rest: self.messages.get(..count).unwrap_or_default().iter() }
    }
}

impl Default for EventBuffer {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for EventBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EventBuffer").finish_non_exhaustive()
    }
}

/// The events of one read, in the kernel's order: page faults first, then the others.
///
/// Dropping it closes the descriptors of fork events that were not taken. Kinds of event that this crate does
/// not know (no [`Features`](crate::Features) bit turns one on) are passed over.
pub struct Events<'b> {
    rest: core::slice::Iter<'b, Message>,
}

impl Iterator for Events<'_> {
    type Item = Event;

    fn next(&mut self) -> Option<Event> {
        loop {
            // SAFETY: the iterator gives each message once, and `EventBuffer::events` is called once a read.
            if let Some(event) = unsafe { Event::decode(self.rest.next()?) } {
                return Some(event);
            }
        }
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (0, Some(self.rest.len()))
    }
}

impl core::iter::FusedIterator for Events<'_> {}

impl Drop for Events<'_> {
    fn drop(&mut self) {
        for event in self {
            drop(event);
        }
    }
}

impl fmt::Debug for Events<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Events").field("unread", &self.rest.len()).finish()
    }
}

/// What happened in the address space. Addresses and lengths in bytes.
///
/// Reading an event other than a page fault **is its acknowledgement**: the thread that caused it goes on, and
/// may map the same addresses again before the reader has acted on what it read. Where that matters, one thread
/// at a time reads, and acts before it lets another read.
#[derive(Debug)]
#[non_exhaustive]
pub enum Event {
    /// A thread waits for a page. It goes on when the page comes by one of the requests that wake, or by
    /// [`wake`](crate::Uffd::wake); if the page is still missing then, it faults again.
    Pagefault {
        /// Where: rounded down to the page unless [`EXACT_ADDRESS`](crate::Features::EXACT_ADDRESS).
        address: usize,
        /// What kind of access.
        flags: FaultFlags,
        /// The faulting thread's id as its own pid namespace knows it, with
        /// [`THREAD_ID`](crate::Features::THREAD_ID), else 0.
        thread: u32,
    },
    /// The process forked.
    Fork {
        /// The child's context, with the parent's features and registrations, for
        /// [`Uffd::from_fd`](crate::Uffd::from_fd). It is in the descriptor table of the thread that read the
        /// event. Dropping it ends registration in the child: pages that were missing then read as zeros.
        child: OwnedFd,
    },
    /// `mremap` moved a range; its registration went along.
    Remap {
        /// The old start.
        from: usize,
        /// The new start.
        to: usize,
        /// The *old* length.
        len: usize,
    },
    /// `madvise` is **about to** discard `start..end` (`MADV_DONTNEED`, `MADV_FREE`, `MADV_REMOVE`): pages may
    /// still be there after this was read. The range stays registered.
    Remove {
        /// First byte.
        start: usize,
        /// First byte after.
        end: usize,
    },
    /// `start..end` was unmapped, by `munmap` or by something mapped over it. It is no longer registered.
    Unmap {
        /// First byte.
        start: usize,
        /// First byte after.
        end: usize,
    },
}

/// The kind of access of a page fault.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FaultFlags {
    /// It was a write.
    pub write: bool,
    /// The page is there, write-protected; answer with [`write_protect`](crate::Uffd::write_protect).
    pub wp: bool,
    /// The page is in the page cache; answer with [`continue_pages`](crate::Uffd::continue_pages).
    pub minor: bool,
}

impl FaultFlags {
    const fn decode(bits: u64) -> Self {
        Self {
            write: bits & raw::UFFD_PAGEFAULT_FLAG_WRITE as u64 != 0,
            wp: bits & raw::UFFD_PAGEFAULT_FLAG_WP as u64 != 0,
            minor: bits & raw::UFFD_PAGEFAULT_FLAG_MINOR as u64 != 0,
        }
    }
}

impl Event {
    /// # Safety
    ///
    /// The message comes from the kernel and is decoded once: the descriptor in it becomes owned.
    unsafe fn decode(message: &Message) -> Option<Self> {
        let [first, second, third] = message.words;
        match message.kind.into() {
            raw::UFFD_EVENT_PAGEFAULT => Some(Self::Pagefault {
                address: second as usize,
                flags: FaultFlags::decode(first),
                thread: leading(third),
            }),
            raw::UFFD_EVENT_FORK => {
                let fd = i32::try_from(leading(first)).ok()?;
                // SAFETY: the kernel put the descriptor into our table for us, and by the caller's promise
                // nobody has taken it yet. It is not negative.
                Some(Self::Fork { child: unsafe { OwnedFd::from_raw_fd(fd) } })
            }
            raw::UFFD_EVENT_REMAP => {
                Some(Self::Remap { from: first as usize, to: second as usize, len: third as usize })
            }
            raw::UFFD_EVENT_REMOVE => Some(Self::Remove { start: first as usize, end: second as usize }),
            raw::UFFD_EVENT_UNMAP => Some(Self::Unmap { start: first as usize, end: second as usize }),
            _ => None,
        }
    }
}

/// The 32-bit field at a word's first four bytes, on either endianness.
const fn leading(word: u64) -> u32 {
    let [a, b, c, d, ..] = word.to_ne_bytes();
    u32::from_ne_bytes([a, b, c, d])
}
