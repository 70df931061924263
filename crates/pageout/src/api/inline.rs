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
//! of the engine are held. For the same reason the API blocks signals where it takes such a lock.

use super::managed::Managed;
use crate::call::call;
use crate::engine::Engine;
use crate::fault::Server;
use crate::kernel::{Linux, LinuxError};
use crate::page::Tag;
use crate::sync::Backoff;
use core::cell::UnsafeCell;
use core::ffi::{c_int, c_void};
use core::mem::{size_of, ManuallyDrop};
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, Ordering::SeqCst};
use linux_raw_sys::general::{__NR_rt_sigprocmask, __NR_rt_tgsigqueueinfo};
use rustix::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use rustix::fs::fstat;
use rustix::io::Errno;
use rustix::mm::{madvise, mmap_anonymous, Advice, MapFlags, ProtFlags};
use std::boxed::Box;
use std::sync::OnceLock;

use super::memory::Mapping;

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
        let high = |fd: OwnedFd| {
            let fd = rustix::io::fcntl_dupfd_cloexec(&fd, from).map_err(LinuxError::Descriptor)?;
            let known = identity(&fd);
            Ok((ManuallyDrop::new(fd), known))
        };
        Ok(Self([high(uffd)?, high(pagemap)?]))
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
    Linux::with_inline(numbers.map(|number| unsafe { OwnedFd::from_raw_fd(number) }))
}

/// Engines with inline delivery that a process may have at once.
const ENGINES: usize = 64;
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
    /// A bit for each seat that is taken.
    taken: AtomicU64,
    slots: [Slot; ENGINES],
}

/// Seats may have been left by threads of the parent, in the middle of something.
const WIPED: u32 = 0;
const CLEANING: u32 = 1;
const CLEAN: u32 = 2;

struct Seat {
    server: Box<Server>,
    stack: Mapping,
}

impl Seat {
    fn new() -> Result<Self, Errno> {
        Ok(Self { server: Box::new(Server::inline()), stack: Mapping::new(STACK)? })
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

/// Made with the first engine, and there for good: a handler may be about to look.
static SHARED: OnceLock<Result<Shared, Errno>> = OnceLock::new();
/// The action for SIGBUS that was there before ours.
static BEFORE: AtomicPtr<libc::sigaction> = AtomicPtr::new(core::ptr::null_mut());
/// It was to be taken once (SA_RESETHAND), and has been.
static SPENT: AtomicBool = AtomicBool::new(false);

impl Shared {
    fn new() -> Result<Self, Errno> {
        // SAFETY: a new mapping, never unmapped; zeros are a valid table.
        let table = unsafe {
            let (access, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
            let table = mmap_anonymous(core::ptr::null_mut(), size_of::<Table>(), access, flags)?;
            madvise(table, size_of::<Table>(), Advice::LinuxWipeOnFork)?;
            &*table.cast::<Table>()
        };
        let seats = (0..SEATS).map(|_| Seat::new().map(UnsafeCell::new)).collect::<Result<_, Errno>>()?;
        table.seats.store(CLEAN, SeqCst);
        install();
        Ok(Self { table, seats })
    }

    /// Gives a fork's child seats of its own.
    fn clean(&self) -> Result<(), Errno> {
        let state = &self.table.seats;
        if state.compare_exchange(WIPED, CLEANING, SeqCst, SeqCst).is_ok() {
            for seat in &self.seats {
                let new = Seat::new().inspect_err(|_| state.store(WIPED, SeqCst))?;
                // SAFETY: no engine is here yet, and so nobody sits. What was there is not dropped: the stack is not
                // in this process.
                unsafe { seat.get().write(new) };
            }
            state.store(CLEAN, SeqCst);
        }
        let mut backoff = Backoff::new();
        while state.load(SeqCst) == CLEANING {
            backoff.snooze();
        }
        Ok(())
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
}

/// Has handlers answer faults for an engine, until it is dropped.
pub(super) struct Presence(&'static Slot);

impl Presence {
    /// # Safety
    /// The engine is there as long as this lives.
    pub(super) unsafe fn of(engine: &Engine<Managed>) -> Result<Self, Errno> {
        let shared = SHARED.get_or_init(Shared::new).as_ref().map_err(|errno| *errno)?;
        shared.clean()?;
        let pointer = engine as *const _ as *mut _;
        let enters = |slot: &&Slot| {
            slot.engine.compare_exchange(core::ptr::null_mut(), pointer, SeqCst, SeqCst).is_ok()
        };
        shared.table.slots.iter().find(enters).map(Self).ok_or(Errno::NOSPC)
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

/// Answers a fault at `address` as if this thread had taken it. All signals are blocked, no lock held.
pub(super) fn answer(engine: &Engine<Managed>, address: usize) {
    let Some(Ok(shared)) = SHARED.get() else { unreachable!("an engine without handlers") };
    let (number, seat) = shared.sit();
    // SAFETY: the seat is ours.
    unsafe { &mut (*seat).server }.answer_own(engine, address, thread());
    shared.stand(number);
}

/// Tells threads apart, without a system call.
fn thread() -> u32 {
    // SAFETY: reads a register, or thread-local state that is there as long as the thread.
    ((unsafe { libc::pthread_self() } as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as u32
}

/// In the handler: answers the fault if the address is in a region, on a stack of ours.
fn is_ours(address: usize) -> bool {
    let Some(Ok(shared)) = SHARED.get() else { return false };
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
            let (number, seat) = shared.sit();
            let task = Task { engine, seat, address };
            // SAFETY: the seat is ours, and with it the stack, whose top is aligned to a page.
            unsafe { on_stack((*seat).stack.end(), run, (&raw const task).cast()) };
            shared.stand(number);
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
}

extern "C" fn run(task: *const c_void) {
    // SAFETY: `is_ours` waits for this call; the seat is its own.
    let (task, server) = unsafe {
        let task = &*task.cast::<Task<'_>>();
        (task, &mut (*task.seat).server)
    };
    server.answer_own(task.engine, task.address, thread());
}

/// Calls `function(argument)` on the stack that ends at `top`.
///
/// # Safety
/// Nobody else uses the stack; `top` is aligned to 16 bytes; the function does not unwind.
unsafe fn on_stack(top: usize, function: extern "C" fn(*const c_void), argument: *const c_void) {
    // SAFETY: the register that keeps the stack pointer is one that functions save.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        core::arch::asm!(
            "mov r12, rsp", "mov rsp, {top}", "call {function}", "mov rsp, r12",
            top = in(reg) top, function = in(reg) function, in("rdi") argument, out("r12") _,
            clobber_abi("C"),
        );
    }
    // SAFETY: as above.
    #[cfg(target_arch = "aarch64")]
    unsafe {
        core::arch::asm!(
            "mov x20, sp", "mov sp, {top}", "blr {function}", "mov sp, x20",
            top = in(reg) top, function = in(reg) function, in("x0") argument, out("x20") _,
            clobber_abi("C"),
        );
    }
    // SAFETY: as above.
    #[cfg(target_arch = "riscv64")]
    unsafe {
        core::arch::asm!(
            "mv s2, sp", "mv sp, {top}", "jalr {function}", "mv sp, s2",
            top = in(reg) top, function = in(reg) function, in("a0") argument, out("s2") _,
            clobber_abi("C"),
        );
    }
}

/// Puts our handler before the program's. Once.
fn install() {
    // SAFETY: actions are plain data, and zeros a valid one; the handler follows the rules of handlers.
    unsafe {
        let mut before = Box::new(core::mem::zeroed::<libc::sigaction>());
        // Should a signal come before the next call but one has returned, it is passed on all the same.
        libc::sigaction(libc::SIGBUS, core::ptr::null(), &mut *before);
        BEFORE.store(Box::into_raw(before), SeqCst);
        let mut ours = core::mem::zeroed::<libc::sigaction>();
        ours.sa_sigaction = on_sigbus as *const () as usize;
        // A thread may be on a stack with no room but have another for signals.
        ours.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_RESTART;
        // All of them, also those that the C library keeps for itself.
        core::ptr::write_bytes(&mut ours.sa_mask, 0xff, 1);
        let mut before = Box::new(core::mem::zeroed::<libc::sigaction>());
        libc::sigaction(libc::SIGBUS, &ours, &mut *before);
        BEFORE.store(Box::into_raw(before), SeqCst);
    }
}

unsafe extern "C" fn on_sigbus(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel's arguments; errno is this thread's.
    unsafe {
        let errno = *libc::__errno_location();
        let ours = (*info).si_code == libc::BUS_ADRERR && is_ours((*info).si_addr() as usize);
        if !ours {
            pass_on(signal, info, context);
        }
        *libc::__errno_location() = errno;
    }
}

/// Does with a signal what the kernel would have done if we had not been before it.
///
/// # Safety
/// The arguments are those of a handler of SIGBUS, all signals blocked.
unsafe fn pass_on(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: stored before our handler was installed, and never freed.
    let before = unsafe { &*BEFORE.load(SeqCst) };
    let once = before.sa_flags & libc::SA_RESETHAND != 0;
    // SAFETY: as above.
    let was_sent = unsafe { (*info).si_code } <= 0;
    match before.sa_sigaction {
        libc::SIG_IGN if was_sent => {}
        libc::SIG_IGN | libc::SIG_DFL => unsafe { end_by(signal, info) },
        // SAFETY: the same.
        _ if once && SPENT.swap(true, SeqCst) => unsafe { end_by(signal, info) },
        // SAFETY: the program's handler, called as the kernel would.
        handler => unsafe {
            let own = if before.sa_flags & libc::SA_NODEFER != 0 { 0 } else { 1 << (signal - 1) };
            let interrupted = (&raw const (*context.cast::<libc::ucontext_t>()).uc_sigmask).cast::<u64>();
            let mask = interrupted.read() | (&raw const before.sa_mask).cast::<u64>().read() | own;
            set_mask(mask);
            if before.sa_flags & libc::SA_SIGINFO != 0 {
                let handler: extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void) =
                    core::mem::transmute(handler);
                handler(signal, info, context);
            } else {
                let handler: extern "C" fn(c_int) = core::mem::transmute(handler);
                handler(signal);
            }
            set_mask(u64::MAX);
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
        let _ = call(__NR_rt_tgsigqueueinfo, [process, thread, signal as usize, info as usize, 0]);
    }
}

/// The thread's signal mask, as the kernel has it.
unsafe fn set_mask(mask: u64) {
    const SET: usize = libc::SIG_SETMASK as usize;
    // SAFETY: a mask of eight bytes.
    let _ = unsafe { call(__NR_rt_sigprocmask, [SET, &raw const mask as usize, 0, 8, 0]) };
}
