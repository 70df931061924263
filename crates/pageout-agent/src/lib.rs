//! What `pageout run` preloads into a program.
//!
//! Before `main` it starts the *keeper*: a process of its own (own pid, own descriptors, own credentials and
//! limits) that shares the program's address space and nothing else. The keeper watches how much memory is
//! resident; only when that nears the limit does it start the engine: registers memory, serves faults, evicts.
//! A separate process instead of threads in the program, because what a program does to its threads and
//! descriptors then does not reach the engine: closing everything, dropping privileges, a seccomp
//! filter on all threads, rlimits, a stop by a debugger, counting one's threads before `fork`.
//!
//! In the program itself there is only what [`wrap`] replaces. Everything here is `no_std`, allocates from its
//! own memory ([`memory`]) and calls libc nowhere but at the start and in what runs in the program's threads ([`wrap`], [`exit`]).
//!
//! | file | owns |
//! |---|---|
//! | memory | the engine's own memory: mappings at known addresses, the allocator |
//! | mem | `memcpy` and its like |
//! | sys | raw system calls |
//! | task | raw clones: the keeper and its threads |
//! | link | the connection to `pageout run` |
//! | keeper | the keeper: started, and found by the program's threads |
//! | tie | whoever kills the keeper kills the program |
//! | life | its life: watch, take up, follow, end |
//! | program | whose memory it is: found, looked at, gone |
//! | proc | what the kernel says in /proc, as text |
//! | devices | swap devices as they come and go |
//! | threads | its other threads: servers, the evictor |
//! | files | files that are mapped leave, too |
//! | part | the process's part of the run's limit |
//! | clock | how long the program has run |
//! | unasked | huge pages that nobody asks for, kept back where many programs begin at once |
//! | fork | `fork` while pages are out: who may when |
//! | gate | what the keeper does for it |
//! | heir | what goes to the child |
//! | dispatch | libc's clone under our control |
//! | code | what a fork past libc does not get |
//! | twin | how one that asks gets it all the same |
//! | remap | `mremap` over what would be one mapping without us |
//! | exit | what the kernel touches when a thread exits |
//! | wrap | the functions of libc that are replaced |
#![no_std]
extern crate alloc;

mod clock;
mod code;
mod devices;
mod dispatch;
mod exit;
mod files;
mod fork;
mod gate;
mod heir;
mod keeper;
mod life;
mod link;
mod mem;
mod memory;
mod part;
mod proc;
mod program;
mod remap;
mod sys;
mod task;
mod threads;
mod tie;
mod twin;
mod unasked;
mod wrap;

use core::ffi::{c_char, c_int, CStr};
use pageout::wire::PADDED_PID;
use rustix::path::DecInt;

/// Runs before `main`, in the program's first thread, single-threaded or nearly so.
#[used]
#[link_section = ".init_array"]
static START: extern "C" fn(c_int, *const *const c_char, *const *const c_char) = start;

extern "C" fn start(_: c_int, _: *const *const c_char, environment: *const *const c_char) {
    let Some(register) = fork::register() else { return };
    // SAFETY: glibc calls constructors with a null-terminated environment.
    let Some(path) = (unsafe { variable(environment, pageout::wire::ENV_RUN.as_bytes()) }) else { return };
    // Valgrind, which the kernel and `run` see as a static program, has what it preloads itself named there. It hides the
    // vDSO that rustix reads its clocks by, and lets no other process share the memory.
    // SAFETY: as above.
    let preloads = unsafe { variable(environment, b"LD_PRELOAD") };
    let is_valgrind = |list: &CStr| list.to_bytes().windows(10).any(|part| part == b"vgpreload_");
    if preloads.is_some_and(is_valgrind) {
        return;
    }
    for name in [c"LISTEN_PID", c"WATCHDOG_PID"] {
        // SAFETY: as above; nobody else has begun.
        unsafe { name_us(environment, name.to_bytes()) };
    }
    if let Some(path) = keeper::Path::new(path.to_bytes()) {
        sys::note_stderr();
        keeper::prepare_process(path);
        fork::prepare_process(register);
        wrap::prepare_process();
        twin::prepare_process();
        exit::prepare_process();
        if sys::children_are_elsewhere() {
            return sys::complain(
                b"pageout: a program that was executed after unshare(CLONE_NEWPID) runs without a limit itself: a keeper \
                of its memory would be its first child\n",
            );
        }
        keeper::start();
    }
}

/// What systemd tells its main process, whose number stands there: that is run, which writes its own with zeros before it for the
/// program that it starts, and leaves room for that one's. Nobody else does, nor the program, of what it starts in its turn.
///
/// # Safety
/// As for [`variable`], and nobody reads it meanwhile.
unsafe fn name_us(environment: *const *const c_char, name: &[u8]) {
    // SAFETY: by contract.
    let Some(value) = (unsafe { variable(environment, name) }) else { return };
    if value.count_bytes() != PADDED_PID || value.to_bytes()[0] != b'0' {
        return;
    }
    // Nothing is allocated here yet.
    let own = DecInt::new(sys::own_process());
    let own = own.as_bytes_with_nul();
    if own.len() <= value.count_bytes() + 1 {
        // SAFETY: what the kernel gave the program of its own; there is room.
        unsafe { value.as_ptr().cast_mut().cast::<u8>().copy_from(own.as_ptr(), own.len()) };
    }
}

/// The value of an environment variable.
///
/// # Safety
/// `environment` is a null-terminated array of strings.
unsafe fn variable<'a>(mut environment: *const *const c_char, name: &[u8]) -> Option<&'a CStr> {
    // SAFETY: by contract.
    unsafe {
        while !(*environment).is_null() {
            let entry = CStr::from_ptr(*environment);
            let bytes = entry.to_bytes_with_nul();
            if bytes.len() > name.len() && bytes.starts_with(name) && bytes[name.len()] == b'=' {
                return CStr::from_bytes_with_nul(&bytes[name.len() + 1..]).ok();
            }
            environment = environment.add(1);
        }
    }
    None
}

/// A bug: the program must not run on with memory that nobody keeps. The keeper's death closes its
/// connection, and `pageout run` ends the program, if anything of it is out; the line below says why.
#[panic_handler]
fn panic(info: &core::panic::PanicInfo<'_>) -> ! {
    /// As `alloc` says it.
    const NO_MEMORY: &[u8] = b"memory allocation of";
    let mut words = [0; NO_MEMORY.len()];
    sys::write_line(&mut words, format_args!("{}", info.message()));
    if words == NO_MEMORY {
        let (of, more) = (keeper::program(), keeper::MORE_MEMORY);
        keeper::give_up(format_args!("process {of}: no memory for its engine; {more}"))
    }
    keeper::give_up(format_args!("{info}"))
}

// The prebuilt `alloc` asks for an unwinder, though nothing here unwinds (panic = "abort"). Hidden, so that a
// program that has the real ones keeps them.
core::arch::global_asm!(
    ".globl rust_eh_personality, _Unwind_Resume",
    ".hidden rust_eh_personality, _Unwind_Resume",
    "rust_eh_personality:",
    "_Unwind_Resume:",
    "ud2",
);
