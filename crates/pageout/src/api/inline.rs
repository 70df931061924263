//! Inline delivery: the handler of SIGBUS in which threads of the program answer their own faults.
//!
//! | part | what it is |
//! |---|---|
//! | [`Descriptors`] | the kernel's two descriptors, in the program's file table under the numbers that they have in the engine's |
//! | [`Table`] | engines and taken seats; zeros in a fork's child, which has neither |
//! | [`Seat`] | what answering takes: a [`Server`] and a stack, since the thread's own may be small |
//! | `on_sigbus` | is it ours? then answer, else the program's action as the kernel would have taken it |
//!
//! The handler runs with every signal blocked: a program's handler on top of it could jump out of it, or fault while locks
//! of the engine are held. The kernel blocks them; where a handler of the program's passes on to ours, with a mask of its
//! own, ours does. For the same reason the API blocks signals where it takes such a lock.

use super::managed::Managed;
use super::{Bytes, Error};
use crate::call::{call, on_stack};
use crate::engine::Engine;
use crate::fault::Server;
use crate::kernel::{Linux, LinuxError};
use crate::page::Tag;
use crate::sync::Backoff;
use core::cell::{Cell, UnsafeCell};
use core::ffi::{c_int, c_void};
use core::mem::{ManuallyDrop, MaybeUninit};
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, Ordering::SeqCst};
use linux_raw_sys::general::{__NR_rt_sigaction, __NR_rt_sigprocmask, __NR_rt_tgsigqueueinfo};
use once_cell::race::OnceBox;
use rustix::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use rustix::fs::fstat;
use rustix::io::Errno;
use std::boxed::Box;

use super::memory::{wiped_in_children, Mapping};

/// Descriptors of the program's lie below.
const HIGH: u64 = 900;

/// What the kernel knows a file by.
type Identity = (u64, u64);

fn identity(fd: &OwnedFd) -> Option<Identity> {
    fstat(fd).ok().map(|file| (file.st_dev, file.st_ino))
}

/// Closed with the last of the program's handles, unless the program has closed them: the numbers may be others' then.
pub(super) struct Descriptors([(ManuallyDrop<OwnedFd>, Option<Identity>); 2]);

impl Descriptors {
    pub(super) fn open() -> Result<Self, LinuxError> {
        let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
        let from = (limit.unwrap_or(u64::MAX) / 4 * 3).clamp(3, HIGH) as RawFd;
        let [uffd, pagemap] = Linux::open_inline()?;
        let high = |fd: OwnedFd| rustix::io::fcntl_dupfd_cloexec(&fd, from).map_err(LinuxError::Descriptor);
        let both = [high(uffd)?, high(pagemap)?];
        Ok(Self(both.map(|fd| {
            let known = identity(&fd);
            (ManuallyDrop::new(fd), known)
        })))
    }

    pub(super) fn numbers(&self) -> [RawFd; 2] {
        self.0.each_ref().map(|(fd, _)| fd.as_raw_fd())
    }
}

impl Drop for Descriptors {
    fn drop(&mut self) {
        for (fd, known) in &mut self.0 {
            if known.is_some() && identity(fd) == *known {
                // SAFETY: the last use.
                unsafe { ManuallyDrop::drop(fd) };
            }
        }
    }
}

/// The kernel by the descriptors of these numbers, on a thread with a file table of its own.
///
/// # Safety
/// They are [`Descriptors::numbers`], still open in the caller's table, and nobody else there has them.
pub(super) unsafe fn linux(numbers: [RawFd; 2]) -> Result<Linux, LinuxError> {
    // SAFETY: by contract.
    unsafe { Linux::with_inline(numbers.map(|number| OwnedFd::from_raw_fd(number))) }
}

/// Engines with inline delivery that a process may have at once.
const ENGINES: usize = 64;
const ALL_TAKEN: &str =
    "as many have it as can, 64; close one, or have this one's faults answered by the engine";
/// Threads that may be in the handler at once; more wait.
const SEATS: usize = 16;
/// The fault path takes a few KiB.
const STACK: usize = 64 << 10;

struct Slot {
    engine: AtomicPtr<Engine<Managed>>,
    /// Handlers that use the engine, or look whether it is still there.
    users: AtomicU32,
}

/// What handlers find. The mapping that it lies in is wiped in a fork's child; all zeros is an empty table.
struct Table {
    /// Whether the seats are as new: [`WIPED`], [`CLEANING`] or [`CLEAN`].
    seats: AtomicU32,
    /// Somebody looks at the action for SIGBUS, and may change it.
    installing: AtomicBool,
    /// A bit for each seat that is taken.
    taken: AtomicU64,
    slots: [Slot; ENGINES],
}

/// Seats may have been left by threads of the parent, in the middle of something.
const WIPED: u32 = 0;
const CLEANING: u32 = 1;
const CLEAN: u32 = 2;

struct Seat {
    server: Server,
    stack: Mapping,
}

impl Seat {
    fn new() -> Result<Self, Errno> {
        Ok(Self { server: Server::inline(), stack: Mapping::new(STACK)? })
    }
}

struct Shared {
    table: &'static Table,
    seats: Box<[UnsafeCell<Seat>]>,
}

// SAFETY: a seat is used by who set its bit in the table.
unsafe impl Sync for Shared {}
// SAFETY: the mappings are nobody's in particular.
unsafe impl Send for Shared {}

/// Made with the first engine, and there for good: a handler may be about to look. Nobody waits for another thread, which a fork's
/// child does not have.
static SHARED: OnceBox<Shared> = OnceBox::new();

impl Shared {
    fn new() -> Result<Self, Errno> {
        // SAFETY: zeros are a valid table.
        let table: &Table = unsafe { wiped_in_children()? };
        let seats = (0..SEATS).map(|_| Seat::new().map(UnsafeCell::new)).collect::<Result<_, Errno>>()?;
        table.seats.store(CLEAN, SeqCst);
        Ok(Self { table, seats })
    }

    /// Gives a fork's child seats of its own.
    fn clean(&self) -> Result<(), Errno> {
        let state = &self.table.seats;
        let mut backoff = Backoff::new();
        // Who cleans may find no memory: then the next tries.
        while let Err(now) = state.compare_exchange(WIPED, CLEANING, SeqCst, SeqCst) {
            if now == CLEAN {
                return Ok(());
            }
            backoff.snooze();
        }
        for seat in &self.seats {
            let new = Seat::new().inspect_err(|_| state.store(WIPED, SeqCst))?;
            // SAFETY: no engine is here yet, and so nobody sits. What was there is not dropped: the stack is not
            // in this process.
            unsafe { seat.get().write(new) };
        }
        state.store(CLEAN, SeqCst);
        Ok(())
    }

    /// The program may have changed the action for SIGBUS since the last engine.
    fn install(&self) -> Result<(), Error> {
        let mut backoff = Backoff::new();
        while self.table.installing.swap(true, SeqCst) {
            backoff.snooze();
        }
        let installed = install();
        self.table.installing.store(false, SeqCst);
        installed
    }

    /// A free seat; waits for one. Signals are blocked.
    fn sit(&self) -> (usize, *mut Seat) {
        let mut backoff = Backoff::new();
        loop {
            let free = !self.table.taken.load(SeqCst) & ((1 << SEATS) - 1);
            let number = free.trailing_zeros() as usize;
            if free == 0 {
                backoff.snooze();
            } else if self.table.taken.fetch_or(1 << number, SeqCst) & 1 << number == 0 {
                return (number, self.seats[number].get());
            }
        }
    }

    fn stand(&self, number: usize) {
        self.table.taken.fetch_and(!(1 << number), SeqCst);
    }

    /// Answers a fault of the calling thread, on a stack of ours; false: nobody has yet. Signals are blocked, no lock held.
    fn answer(&self, engine: &Engine<Managed>, address: usize) -> bool {
        let (number, seat) = self.sit();
        let task = Task { engine, seat, address, answered: Cell::new(false) };
        // SAFETY: the seat is ours, and with it the stack, whose top is aligned to a page.
        unsafe { on_stack((*seat).stack.end(), run, (&raw const task).cast()) };
        self.stand(number);
        task.answered.get()
    }
}

/// Has handlers answer faults for an engine, until it is dropped.
pub(super) struct Presence(&'static Slot);

impl Presence {
    /// # Safety
    /// The engine is there as long as this lives.
    pub(super) unsafe fn of(engine: &Engine<Managed>) -> Result<Self, Error> {
        let len = Bytes((size_of::<Table>() + SEATS * STACK) as u64);
        let refused = |errno| Error::Memory { what: "inline delivery", len, errno };
        let shared = SHARED.get_or_try_init(|| Shared::new().map(Box::new)).map_err(refused)?;
        shared.clean().map_err(refused)?;
        shared.install()?;
        let pointer = engine as *const _ as *mut _;
        let enters = |slot: &&Slot| {
            slot.engine.compare_exchange(core::ptr::null_mut(), pointer, SeqCst, SeqCst).is_ok()
        };
        shared.table.slots.iter().find(enters).map(Self).ok_or(Error::Inline(ALL_TAKEN))
    }
}

impl Drop for Presence {
    fn drop(&mut self) {
        self.0.engine.store(core::ptr::null_mut(), SeqCst);
        let mut backoff = Backoff::new();
        while self.0.users.load(SeqCst) > 0 {
            backoff.snooze();
        }
    }
}

/// Answers a fault at `address` as if this thread had taken it; false: nobody has yet. All signals are blocked, no lock held.
pub(super) fn answer(engine: &Engine<Managed>, address: usize) -> bool {
    let Some(shared) = SHARED.get() else { unreachable!("an engine without handlers") };
    shared.answer(engine, address)
}

/// Tells threads apart, without a system call.
fn thread() -> u32 {
    // SAFETY: reads a register, or thread-local state that is there as long as the thread.
    ((unsafe { libc::pthread_self() } as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as u32
}

/// In the handler: answers the fault if the address is in a region, on a stack of ours.
fn is_ours(address: usize) -> bool {
    let Some(shared) = SHARED.get() else { return false };
    for slot in &shared.table.slots {
        if slot.engine.load(SeqCst).is_null() {
            continue;
        }
        slot.users.fetch_add(1, SeqCst);
        // SAFETY: whoever takes it away waits for its users.
        let engine = unsafe { slot.engine.load(SeqCst).as_ref() };
        // What is lost is the program's to hear. The signal tells it apart (BUS_MCEERR_AR) only where the kernel was
        // built with CONFIG_MEMORY_FAILURE.
        let engine = engine.filter(|engine| engine.manages(address) && engine.tag(address) != Tag::Poisoned);
        if let Some(engine) = engine {
            shared.answer(engine, address);
        }
        slot.users.fetch_sub(1, SeqCst);
        if engine.is_some() {
            return true;
        }
    }
    false
}

struct Task<'a> {
    engine: &'a Engine<Managed>,
    seat: *mut Seat,
    address: usize,
    answered: Cell<bool>,
}

extern "C" fn run(task: *const c_void) {
    // SAFETY: who sits there waits for this call; the seat is its own.
    let (task, server) = unsafe {
        let task = &*task.cast::<Task<'_>>();
        (task, &mut (*task.seat).server)
    };
    task.answered.set(server.answer_own(task.engine, task.address, thread()));
}

/// How often the program may have put another handler before ours, between two engines.
const ENTRIES: usize = 8;

/// Our handlers. Each passes on to the action that it was put before.
static HANDLERS: [Handler; ENTRIES] = [
    on_sigbus::<0>,
    on_sigbus::<1>,
    on_sigbus::<2>,
    on_sigbus::<3>,
    on_sigbus::<4>,
    on_sigbus::<5>,
    on_sigbus::<6>,
    on_sigbus::<7>,
];
static BEFORE: [Before; ENTRIES] = [const { Before::none() }; ENTRIES];

type Handler = unsafe extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void);

/// The action for SIGBUS that was there before one of ours.
struct Before {
    /// Never freed, since a handler may look at it; null where ours was never put before another.
    action: AtomicPtr<Action>,
    /// It was to be taken once (SA_RESETHAND), and has been; or has set the default, as std's does for a fault that is none of a
    /// stack's.
    spent: AtomicBool,
}

impl Before {
    const fn none() -> Self {
        Self { action: AtomicPtr::new(core::ptr::null_mut()), spent: AtomicBool::new(false) }
    }

    fn get(&self) -> Option<&'static Action> {
        // SAFETY: never freed.
        unsafe { self.action.load(SeqCst).as_ref() }
    }

    fn set(&self, action: Action) {
        self.action.store(Box::into_raw(Box::new(action)), SeqCst);
        self.spent.store(false, SeqCst);
    }
}

/// `struct sigaction` as the kernel has it.
#[repr(C)]
#[derive(Clone, Copy)]
struct Action {
    handler: usize,
    flags: usize,
    restorer: usize,
    mask: u64,
}

impl Action {
    fn ours(handler: Handler) -> Self {
        // A thread may be on a stack with no room but have another for signals.
        let flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_RESTART;
        Self {
            handler: handler as *const () as usize,
            flags: flags as usize | direct::FLAGS,
            restorer: direct::restorer(),
            // All of them, also those that the C library keeps for itself.
            mask: u64::MAX,
        }
    }

    /// Makes it the action for SIGBUS; what was there before. With `None` nothing changes.
    fn exchange(new: Option<&Self>) -> Result<Self, Error> {
        let mut before = MaybeUninit::<Self>::uninit();
        let new = new.map_or(0, |new| new as *const _ as usize);
        // SAFETY: as the kernel has it; the handlers follow the rules of handlers.
        unsafe {
            call(__NR_rt_sigaction, [libc::SIGBUS as usize, new, before.as_mut_ptr() as usize, 8, 0, 0])
                .map_err(|_| Error::Inline("no handler of SIGBUS can be set; allow rt_sigaction"))?;
            Ok(before.assume_init())
        }
    }
}

/// Puts a handler of ours before the program's, unless one is there. One thread at a time.
fn install() -> Result<(), Error> {
    let found = Action::exchange(None)?;
    if let Some(ours) = HANDLERS.iter().find(|ours| **ours as *const () as usize == found.handler) {
        // With flags and mask as we need them: the program may have put it back as it puts its own.
        return Action::exchange(Some(&Action::ours(*ours))).map(|_| ());
    }
    // A handler of the program's may pass on to one of ours, and that one must not pass on to it: so it is one that nobody
    // has seen, unless it was before the same one already.
    let ends = found.handler == libc::SIG_DFL || found.handler == libc::SIG_IGN;
    let is_free = |before: &Before| before.get().is_none_or(|known| ends || known.handler == found.handler);
    let too_often =
        "others put their handler of SIGBUS before ours too often; build the Swap before the last of them";
    let entry = BEFORE.iter().position(is_free).ok_or(Error::Inline(too_often))?;
    // Should a signal come before the next call but one has returned, it is passed on all the same.
    BEFORE[entry].set(found);
    BEFORE[entry].set(Action::exchange(Some(&Action::ours(HANDLERS[entry])))?);
    Ok(())
}

/// Tells whether the kernel has called our handler, and so with all signals blocked, or a handler of the program's that
/// passes on to it. By where the frame of the signal returns to: for our action it is code of ours.
mod direct {
    use core::ffi::c_void;

    /// SA_RESTORER.
    pub(super) const FLAGS: usize = 0x0400_0000;

    // What every C library has, to the byte and without a name: debuggers know frames of signals by it. The NOP keeps
    // unwinders, which look at the byte before, from the function that lies there.
    core::arch::global_asm!(
        ".pushsection .text.pageout_restorer, \"ax\", @progbits",
        ".balign 16",
        "nop",
        ".Lpageout_restorer:",
        "mov rax, 15",
        "syscall",
        ".popsection",
        ".pushsection .data.rel.ro.pageout_restorer, \"aw\", @progbits",
        ".balign 8",
        ".globl pageout_restorer",
        ".hidden pageout_restorer",
        "pageout_restorer: .quad .Lpageout_restorer",
        ".popsection",
    );
    extern "C" {
        static pageout_restorer: usize;
    }

    pub(super) fn restorer() -> usize {
        // SAFETY: never written.
        unsafe { pageout_restorer }
    }

    /// # Safety
    /// A handler's third argument, or what a handler of the program's passes on as such.
    pub(super) unsafe fn is(context: *const c_void) -> bool {
        // SAFETY: the frame begins with the address, and the context follows.
        !context.is_null() && unsafe { context.cast::<usize>().sub(1).read() } == restorer()
    }
}

unsafe extern "C" fn on_sigbus<const ENTRY: usize>(
    signal: c_int,
    info: *mut libc::siginfo_t,
    context: *mut c_void,
) {
    // SAFETY: the kernel's arguments; errno is this thread's.
    unsafe {
        let errno = *libc::__errno_location();
        let mask = (!direct::is(context)).then(|| set_mask(u64::MAX));
        let ours = (*info).si_code == libc::BUS_ADRERR && is_ours((*info).si_addr() as usize);
        if !ours {
            pass_on(ENTRY, signal, info, context);
        }
        if let Some(mask) = mask {
            set_mask(mask);
        }
        *libc::__errno_location() = errno;
    }
}

/// Does with a signal what the kernel would have done if we had not been before it.
///
/// # Safety
/// The arguments are those of a handler of SIGBUS, all signals blocked.
unsafe fn pass_on(entry: usize, signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    let before = &BEFORE[entry];
    let action = before.get().expect("known before our handler was put there");
    let has = |flag: c_int| action.flags & flag as u32 as usize != 0;
    // SAFETY: as above.
    let was_sent = unsafe { (*info).si_code } <= 0;
    match action.handler {
        libc::SIG_IGN if was_sent => {}
        libc::SIG_IGN | libc::SIG_DFL => unsafe { end_by(signal, info) },
        // SAFETY: the same.
        _ if before.spent.fetch_or(has(libc::SA_RESETHAND), SeqCst) => unsafe { end_by(signal, info) },
        // SAFETY: the program's handler, called as the kernel would.
        handler => unsafe {
            let own = if has(libc::SA_NODEFER) { 0 } else { 1 << (signal - 1) };
            let interrupted = (&raw const (*context.cast::<libc::ucontext_t>()).uc_sigmask).cast::<u64>();
            set_mask(interrupted.read() | action.mask | own);
            if has(libc::SA_SIGINFO) {
                let handler: extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void) =
                    core::mem::transmute(handler);
                handler(signal, info, context);
            } else {
                let handler: extern "C" fn(c_int) = core::mem::transmute(handler);
                handler(signal);
            }
            set_mask(u64::MAX);
            if Action::exchange(None).is_ok_and(|now| now.handler == libc::SIG_DFL) {
                // Faults of regions are ours still.
                before.spent.store(true, SeqCst);
                let _ = Action::exchange(Some(&Action::ours(HANDLERS[entry])));
            }
        },
    }
}

/// The default: the process ends by this signal, as soon as the handler has returned.
///
/// # Safety
/// As [`pass_on`].
unsafe fn end_by(signal: c_int, info: *mut libc::siginfo_t) {
    // SAFETY: plain data; the signal is sent to this thread as it came.
    unsafe {
        let default = core::mem::zeroed::<libc::sigaction>();
        libc::sigaction(signal, &default, core::ptr::null_mut());
        let (process, thread) = (libc::getpid() as usize, libc::syscall(libc::SYS_gettid) as usize);
        let _ = call(__NR_rt_tgsigqueueinfo, [process, thread, signal as usize, info as usize, 0, 0]);
    }
}

/// Sets the thread's signal mask, as the kernel has it; what it was.
unsafe fn set_mask(mask: u64) -> u64 {
    const SET: usize = libc::SIG_SETMASK as usize;
    let mut before = 0u64;
    // SAFETY: masks of eight bytes.
    let _ = unsafe {
        call(__NR_rt_sigprocmask, [SET, &raw const mask as usize, &raw mut before as usize, 8, 0, 0])
    };
    before
}
