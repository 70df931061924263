//! `Swap`: a limit, its devices and its engine; the builder that makes it.

use super::devices::Asked;
use super::host::{self, Handle, Plan, Request};
use super::inline::{Descriptors, Presence};
use super::managed::Managed;
use super::memory::Mapping;
use super::process::Process;
use super::{Bytes, Error, Region};
use crate::engine::{Engine, Swapin};
use crate::space::BLOCK_ORDER;
use crate::stats::Stats;
use crate::sync::{Lock, OTHER_LOCKS};
use core::fmt;
use core::panic::{RefUnwindSafe, UnwindSafe};
use std::string::String;
use std::sync::mpsc::{channel, sync_channel, Sender};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::vec::Vec;

/// The least limit: frames and watermarks fit in it several times.
pub const LEAST_MEMORY: Bytes = Bytes::mib(16);

/// Memory under one limit: regions are mapped from it.
///
/// Each `Swap` has an engine of its own, on a few threads that sleep when nothing happens; any number of them may be in a process, 64
/// of them with inline delivery. They run
/// until the last region and the last clone of the `Swap` are gone. Cloning is cheap and names the same one.
///
/// Any thread may use it.
#[derive(Clone)]
pub struct Swap {
    pub(super) inner: Arc<Inner>,
}

impl Swap {
    /// Starts saying what is wanted.
    pub fn builder() -> Builder {
        Builder {
            memory: Bytes(0),
            devices: Vec::new(),
            swapin: Swapin::Auto,
            max_order: BLOCK_ORDER,
            delivery: Delivery::Handler,
        }
    }

    /// Maps `len` bytes of zeros, from 1 byte to 64 TiB; the address is a multiple of 2 MiB. Nothing is
    /// resident until it is touched. Waits for the engine's first thread: some 50 us where there is a CPU for it.
    ///
    /// # Errors
    /// [`Error::Length`], [`Error::Memory`] and, in the child of a fork, [`Error::Forked`].
    pub fn map(&self, len: usize) -> Result<Region, Error> {
        Region::new(self.inner.clone(), len)
    }

    /// The counters: live, each by itself. The gauges among them (`resident_bytes`, `swapped_pages`) are as
    /// of the engine's last look, which began at most 64 ms ago, and what it takes. `out_pages`, `unmanaged_bytes`, `shared_bytes`,
    /// `pid` and the counters of locks are of `pageout run` alone, and 0 here.
    pub fn stats(&self) -> &Stats {
        &self.inner.stats
    }

    /// The limit in bytes.
    pub fn memory(&self) -> Bytes {
        self.inner.memory
    }

    /// Whether this is a fork's child, where engine and regions are its parent's.
    pub fn is_forked(&self) -> bool {
        self.inner.is_foreign()
    }

    /// Whether a page has found no room on any device. Then pages stay, and memory grows beyond the limit. Where writes fail,
    /// on a file system without room too, it grows as well: that is told by `write_errors` of [`Swap::stats`]. In a fork's child,
    /// where no engine is, it is false.
    pub fn is_full(&self) -> bool {
        !self.inner.is_foreign() && self.inner.engine().place.is_full()
    }
}

// A panic leaves nothing of the engine's half done.
impl UnwindSafe for Swap {}
impl RefUnwindSafe for Swap {}

impl fmt::Debug for Swap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Swap").field("memory", &self.inner.memory).finish_non_exhaustive()
    }
}

/// Who answers the faults of regions: which thread brings a page back that is touched.
///
/// | | `Handler` | `Inline` |
/// |---|---|---|
/// | who | a thread of the engine, which the touch waits for | the thread itself, in a handler of SIGBUS |
/// | a fault from memory | 7 to 14 us | three fifths of it; up to 16 threads at once, as far as there are CPUs |
/// | a system call given memory that is out | served | **fails with EFAULT**, or stops short: [pin](Region::pin) what it is given |
/// | rights | `/dev/userfaultfd`, or more | none |
/// | a class or CPUs that another thread sets for one that faults just then | may be lost | as set |
/// | what the program must mind | nothing else | the rules below |
///
/// It is a property of a whole [`Swap`], since the kernel knows it of a whole userfaultfd; a program may have one of each.
/// Devices that are not `mem` are read and written by the engine's threads either way, and then little is gained.
///
/// Rules for a program with a `Swap` whose delivery is `Inline`:
///
/// * **System calls**: whatever the kernel reads or writes for the program must be pinned, or be elsewhere:
///   buffers, paths, `struct`s, futex words (locks) too. The standard library's `read` and `write` are system calls.
/// * **SIGBUS** must not be blocked in a thread that touches a region, nor in the `sa_mask` of a handler that does: the
///   kernel ends the process then. In the program's own handler of SIGBUS that means `SA_NODEFER`.
/// * **A handler of SIGBUS** that the program had before [`Builder::build`] is called for everything that is not a fault of
///   a region, as the kernel would (mask, `SA_SIGINFO`, `SA_RESETHAND`; `SIG_DFL` and `SIG_IGN` as well), and for bytes
///   that are lost; but on the stack for signals, if there is one, without `SA_ONSTACK` too: that must have room for it.
///   One that is installed later must pass on what it does not know to the one that `sigaction` returned, and be
///   installed with all signals blocked (`sigfillset` of its `sa_mask`) where handlers of other signals touch regions:
///   until it has passed on, SIGBUS is blocked. The next `Swap` comes before it.
/// * **Other signals** wait while a thread answers its fault. Their handlers may touch regions, whatever they interrupted
///   but an allocator that they share a lock of with the engine ([`Region`]).
/// * **Stacks**: 4 KiB and the kernel's signal frame are used of the stack that signals are taken on (`sigaltstack`, if
///   there is one). Neither kind of stack may lie in a region.
/// * **Descriptors**: two of the program's file table, high numbers and close-on-exec. If the program closes them, its faults
///   are answered by threads of the engine.
/// * **Debuggers**: `handle SIGBUS nostop noprint pass`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Delivery {
    /// A thread of the engine.
    #[default]
    Handler,
    /// The thread that touched it.
    Inline,
}

/// What a [`Swap`] is to be.
#[derive(Clone, Debug)]
#[must_use = "nothing happens before build()"]
pub struct Builder {
    memory: Bytes,
    devices: Vec<String>,
    swapin: Swapin,
    max_order: u8,
    delivery: Delivery,
}

impl Builder {
    /// The limit: resident memory that all regions together may have, the engine's frames included. At least
    /// [`LEAST_MEMORY`]. What else the program has is not counted, nor what the engine knows of pages: 0.7 % of what
    /// was touched, up to 13 KiB for a page far from all others, and some MiB. Faults may go beyond the limit by some MiB for some
    /// milliseconds.
    pub fn memory(mut self, limit: Bytes) -> Self {
        self.memory = limit;
        self
    }

    /// Adds a device: `PATH[,size=8G][,pri=5][,discard][,rotational]`, or `mem[,...]` for memory of the
    /// process that does not count. A file that is not there is made and unlinked at once; one that is there must be empty, or
    /// hold nothing that was written, or carry the signature of `mkswap`, and have mode 0600, and does not grow unless it is
    /// empty; an empty one is empty again at the end, but not where the process ends before the last handle and region are dropped, as those in a `static` are not: then it holds what was in
    /// memory, and is refused the next time (`mkswap` makes it fit again). What lies
    /// behind the room that `mkswap` was told of is left alone, and others must not be able to write to its directory, as to
    /// `/tmp`. Its room counts in whole 64 MiB, one at least. Devices of higher priority are used first. At most 63.
    ///
    /// What is not needed any more is given back to the device only with `,discard`; of `mem`, and of the file that is made where
    /// none is named, always.
    ///
    /// Without any: an unlinked file in `$TMPDIR`, else in the working directory, grown as needed. That must not be memory, as
    /// `/tmp` may be: an error where the engine starts.
    pub fn device(mut self, spec: impl Into<String>) -> Self {
        self.devices.push(spec.into());
        self
    }

    /// Whether and when huge pages come back whole; `Auto` unless it is said.
    pub fn swapin(mut self, swapin: Swapin) -> Self {
        self.swapin = swapin;
        self
    }

    /// The largest order (a power of two of pages) that a fault brings in, 0 to 9; more counts as 9.
    pub fn max_order(mut self, order: u8) -> Self {
        self.max_order = order.min(BLOCK_ORDER);
        self
    }

    /// Who answers faults; a thread of the engine unless it is said. See [`Delivery`] for what comes with the other.
    pub fn delivery(mut self, delivery: Delivery) -> Self {
        self.delivery = delivery;
        self
    }

    /// Opens the devices and starts the engine. Its threads may run where the caller may, and are of its class: not what is bound to
    /// a CPU that it keeps busy. Not in a constructor of a library that is loaded at run time (`dlopen`): libc has a thread wait
    /// until that is over, and this waits for the thread.
    ///
    /// # Errors
    /// [`Error::Limit`], [`Error::Spec`], [`Error::Device`], [`Error::Kernel`] (no userfaultfd with MOVE: Linux before 6.8, or
    /// no access to `/dev/userfaultfd`), [`Error::Memory`], [`Error::Inline`] and [`Error::Thread`].
    pub fn build(self) -> Result<Swap, Error> {
        if self.memory < LEAST_MEMORY {
            return Err(Error::Limit { asked: self.memory, least: LEAST_MEMORY });
        }
        let mut devices =
            self.devices.iter().map(|text| Asked::parse(text)).collect::<Result<Vec<_>, _>>()?;
        if devices.is_empty() {
            devices.push(Asked::unnamed());
        }
        // SAFETY: counters are plain atomic integers; zeros are valid.
        let stats: Arc<Stats> = Arc::new(unsafe { core::mem::zeroed() });
        let descriptors = match self.delivery {
            Delivery::Inline => Some(Descriptors::open().map_err(Error::Kernel)?),
            Delivery::Handler => None,
        };
        let plan = Plan {
            memory: self.memory,
            devices,
            swapin: self.swapin,
            max_order: self.max_order,
            stats: stats.clone(),
            inline: descriptors.as_ref().map(Descriptors::numbers),
        };
        let (requests, inbox) = channel();
        let (ready, answer) = channel();
        let thread = host::start(plan, inbox, ready).map_err(Error::Thread)?;
        match answer.recv().expect("the first thread answers once, or the process ends") {
            Ok(handle) => {
                let mut inner = Inner {
                    handle,
                    first: Some(First { requests, thread }),
                    stats,
                    memory: self.memory,
                    process: Process::this(),
                    pinning: Lock::new((), &OTHER_LOCKS),
                    presence: None,
                    _descriptors: descriptors,
                };
                if self.delivery == Delivery::Inline {
                    // SAFETY: its end, in `drop`, comes before the engine's.
                    let presence = unsafe { Presence::of(inner.handle.engine()) };
                    inner.presence = Some(presence?);
                }
                Ok(Swap { inner: Arc::new(inner) })
            }
            Err(error) => {
                join(thread);
                Err(error)
            }
        }
    }
}

/// What regions and handles share. The last of them to go ends the engine's threads.
pub(super) struct Inner {
    handle: Handle,
    /// Until it is told to end.
    first: Option<First>,
    stats: Arc<Stats>,
    memory: Bytes,
    /// Whose threads they are: a fork's child has none.
    process: Process,
    /// Held while bytes are pinned and counted.
    pub(super) pinning: Lock<()>,
    /// With inline delivery; ends before the engine does.
    presence: Option<Presence>,
    /// With inline delivery; closed when the engine has ended.
    _descriptors: Option<Descriptors>,
}

/// The engine's first thread.
struct First {
    requests: Sender<Request>,
    thread: JoinHandle<()>,
}

impl Inner {
    /// For what needs no descriptor of the engine's: words, locks, counters. Not in a fork's child: it lay on the stack of a thread
    /// that is not there.
    pub(super) fn engine(&self) -> &Engine<Managed> {
        debug_assert!(!self.is_foreign());
        // SAFETY: Stop is sent in `drop`, and nowhere else.
        unsafe { self.handle.engine() }
    }

    /// The same where locks are taken: no signal comes meanwhile, whose handler could fault and wait for them.
    pub(super) fn quietly<T>(&self, work: impl FnOnce(&Engine<Managed>) -> T) -> T {
        struct Quiet(libc::sigset_t);
        impl Drop for Quiet {
            fn drop(&mut self) {
                host::restore_signals(&self.0);
            }
        }
        let _quiet = Quiet(host::block_signals());
        work(self.engine())
    }

    pub(super) fn is_inline(&self) -> bool {
        self.presence.is_some()
    }

    /// Is this a fork's child?
    pub(super) fn is_foreign(&self) -> bool {
        Process::this() != self.process
    }

    /// Has the engine manage a fresh mapping.
    pub(super) fn adopt(&self, mapping: &Mapping) -> Result<(), Error> {
        if self.is_foreign() {
            return Err(Error::Forked);
        }
        let (answer, answered) = sync_channel(1);
        self.ask(Request::Adopt { start: mapping.start(), end: mapping.end(), answer });
        answered.recv().expect("the engine answers, or the process ends").map_err(|errno| Error::Memory {
            what: "a region (registering)",
            len: Bytes(mapping.len() as u64),
            errno,
        })
    }

    /// Memory went: there is room again.
    pub(super) fn look(&self) {
        self.ask(Request::Look);
    }

    fn ask(&self, request: Request) {
        let first = self.first.as_ref().expect("there until dropped");
        let _ = first.requests.send(request);
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.memory.0 as usize
    }

    /// So many bytes may be pinned.
    pub(super) fn most_pinned(&self) -> u64 {
        self.memory.0 / 2
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let Some(first) = self.first.take() else { return };
        if self.is_foreign() {
            // The thread is in the parent, and so is who may have had the queue's lock when the child was made. No
            // handler finds the engine here.
            core::mem::forget((first, self.presence.take()));
            return;
        }
        self.presence = None;
        let _ = first.requests.send(Request::Stop);
        join(first.thread);
    }
}

/// Waits for a thread's end. Is the caller to be cancelled (pthread_cancel(3)), then not here: it would unwind.
fn join(thread: JoinHandle<()>) {
    extern "C" {
        fn pthread_setcancelstate(state: libc::c_int, old: *mut libc::c_int) -> libc::c_int;
    }
    const DISABLE: libc::c_int = 1;
    let mut state = 0;
    // SAFETY: the calling thread's own state, put back as it was.
    unsafe { pthread_setcancelstate(DISABLE, &mut state) };
    let _ = thread.join();
    // SAFETY: the same.
    unsafe { pthread_setcancelstate(state, &mut state) };
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::sync::atomic::{AtomicBool, Ordering::Relaxed};

    #[test]
    fn a_child_waits_for_no_thread_of_its_parent() {
        let built = Swap::builder().memory(LEAST_MEMORY).device("mem,size=64M").build();
        let Ok(swap) = built.inspect_err(|reason| std::println!("skipped: {reason}")) else { return };
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    while !stop.load(Relaxed) {
                        drop(swap.map(1).unwrap());
                    }
                });
            }
            let hangs = |_: &i32| {
                // SAFETY: the child gives up its handles, and leaves without cleaning up.
                let child = unsafe { libc::fork() };
                if child == 0 {
                    // SAFETY: the parent's threads are not here, and so their handles are nobody's.
                    unsafe {
                        libc::alarm(1);
                        for _ in 1..Arc::strong_count(&swap.inner) {
                            Arc::decrement_strong_count(Arc::as_ptr(&swap.inner));
                        }
                        drop(core::ptr::read(&swap));
                        libc::_exit(0);
                    }
                }
                let mut status = 0;
                // SAFETY: our own child.
                assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
                status != 0
            };
            let hung = (0..1000).find(hangs);
            stop.store(true, Relaxed);
            assert_eq!(hung, None);
        });
    }
}
