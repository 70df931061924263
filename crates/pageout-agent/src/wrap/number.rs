//! All of them by number: `syscall`.

use super::forks::{begin_child, bring_in_ids, end_clone, keep_word};
use super::limit::{prlimit, setrlimit};
use super::mapping::{
    madvise, mlockall, mmap, mremap, munlockall, process_madvise, setsockopt, shmat, vmsplice,
};
use super::{answer, bring_in, fail, prctl, FILTERED};
use crate::{exit, fork, keeper, sys};
use core::ffi::{c_int, c_long, c_uint};
use core::sync::atomic::Ordering;
use linux_raw_sys::general as raw;
use pageout::kernel::undisturbed;
use rustix::io::Errno;

// What libc's `syscall` does: its variadic arguments lie where those of a function of seven would.
core::arch::global_asm!(
    ".type pageout_bare_syscall, @function",
    ".globl pageout_bare_syscall",
    ".hidden pageout_bare_syscall",
    "pageout_bare_syscall:",
    ".cfi_startproc",
    "mov rax, rdi",
    "mov rdi, rsi",
    "mov rsi, rdx",
    "mov rdx, rcx",
    "mov r10, r8",
    "mov r8, r9",
    "mov r9, [rsp + 8]",
    "syscall",
    "cmp rax, -4095",
    "jae 2f",
    "ret",
    "2:",
    "neg eax",
    "push rax",
    ".cfi_adjust_cfa_offset 8",
    "call __errno_location@PLT",
    "pop rcx",
    ".cfi_adjust_cfa_offset -8",
    "mov [rax], ecx",
    "mov rax, -1",
    "ret",
    ".cfi_endproc",
    ".size pageout_bare_syscall, . - pageout_bare_syscall",
);

// The same after a look at the arguments, with nothing on the stack: the child may return on another.
core::arch::global_asm!(
    ".type pageout_kept_syscall, @function",
    ".globl pageout_kept_syscall",
    ".hidden pageout_kept_syscall",
    "pageout_kept_syscall:",
    ".cfi_startproc",
    "push rdi",
    "push rsi",
    "push rdx",
    "push rcx",
    "push r8",
    "push r9",
    "sub rsp, 8",
    ".cfi_adjust_cfa_offset 56",
    "call {keep}",
    "add rsp, 8",
    "pop r9",
    "pop r8",
    "pop rcx",
    "pop rdx",
    "pop rsi",
    "pop rdi",
    ".cfi_adjust_cfa_offset -56",
    "jmp pageout_bare_syscall",
    ".cfi_endproc",
    ".size pageout_kept_syscall, . - pageout_kept_syscall",
    keep = sym keep_word_by_number,
);

extern "C" {
    #[link_name = "pageout_bare_syscall"]
    fn bare(number: c_long, a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) -> c_long;
    #[link_name = "pageout_kept_syscall"]
    fn kept(number: c_long, a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) -> c_long;
}

/// See the table of [`super`]. Takes what libc's takes in `...`, there or not. A clone's child on a stack of its
/// own returns to what lies on that, as from libc's.
///
/// # Safety
/// As libc's.
#[no_mangle]
pub unsafe extern "C" fn syscall(
    number: c_long,
    a: usize,
    b: usize,
    c: usize,
    d: usize,
    e: usize,
    f: usize,
) -> c_long {
    // SAFETY: as the caller promises.
    unsafe {
        match number as u32 {
            raw::__NR_madvise
            | raw::__NR_process_madvise
            | raw::__NR_mmap
            | raw::__NR_mremap
            | raw::__NR_shmat
            | raw::__NR_mlockall
            | raw::__NR_munlockall
            | raw::__NR_vmsplice
            | raw::__NR_setsockopt
            | raw::__NR_setrlimit
            | raw::__NR_prlimit64
            | raw::__NR_prctl
            | raw::__NR_seccomp => wrapped_by_number(number, a, b, c, d, e, f),
            raw::__NR_fork => fork_by_number(number, a, b, c, d, e, f),
            raw::__NR_clone if a as u32 & raw::CLONE_VM == 0 => fork_by_number(number, a, b, c, d, e, f),
            // Null asks whether there is such a call.
            raw::__NR_clone3
                if a != 0 && b >= CLONE3_STACK + 8 && *(a as *const u64) & u64::from(raw::CLONE_VM) == 0 =>
            {
                fork_by_number(number, a, b, c, d, e, f)
            }
            raw::__NR_clone | raw::__NR_clone3 | raw::__NR_set_tid_address => kept(number, a, b, c, d, e, f),
            raw::__NR_sched_setaffinity
            | raw::__NR_sched_getaffinity
            | raw::__NR_sched_setscheduler
            | raw::__NR_sched_getscheduler
            | raw::__NR_sched_setattr
            | raw::__NR_sched_getattr
            | raw::__NR_setpriority => place_by_number(number, a, b, c, d, e, f),
            raw::__NR_futex if changed_word(b, a, e).is_some() => futex_by_number(a, b, c, d, e, f),
            _ => bare(number, a, b, c, d, e, f),
        }
    }
}

/// As those that look at or change threads' CPUs and classes. A function of its own: the stack of [`syscall`] is small.
#[inline(never)]
unsafe extern "C" fn place_by_number(
    number: c_long,
    a: usize,
    b: usize,
    c: usize,
    d: usize,
    e: usize,
    f: usize,
) -> c_long {
    // SAFETY: as the caller promises.
    undisturbed(|| unsafe { bare(number, a, b, c, d, e, f) })
}

/// The word that the kernel itself changes in a futex operation on two; `None`: it changes none.
fn changed_word(operation: usize, one: usize, other: usize) -> Option<usize> {
    match operation as u32 & raw::FUTEX_CMD_MASK as u32 {
        raw::FUTEX_LOCK_PI | raw::FUTEX_LOCK_PI2 | raw::FUTEX_TRYLOCK_PI | raw::FUTEX_UNLOCK_PI => Some(one),
        raw::FUTEX_WAKE_OP | raw::FUTEX_WAIT_REQUEUE_PI | raw::FUTEX_CMP_REQUEUE_PI => Some(other),
        _ => None,
    }
}

/// Between two calls of a futex operation its word may have left again, so often at most.
const FUTEX_ATTEMPTS: usize = 16;

/// For operations with a [`changed_word`]: the kernel makes that writable by a fault which nobody may serve, and says EFAULT
/// where it is out, before it has done anything. So it is brought in, and the operation called again. The word may be none
/// that can be touched: the kernel reads it, by a requeue of nobody, whose faults are served, and which a filter that lets
/// the operation through hardly forbids.
#[inline(never)]
unsafe extern "C" fn futex_by_number(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) -> c_long {
    // SAFETY: as the caller promises; the second wakes nobody and moves nobody.
    let call = || unsafe { sys::call6(raw::__NR_futex, [a, b, c, d, e, f]) };
    let bring_in = |word| unsafe {
        let requeue = (raw::FUTEX_CMP_REQUEUE | raw::FUTEX_PRIVATE_FLAG) as usize;
        sys::call6(raw::__NR_futex, [word, requeue, 0, 0, word, 0])
    };
    let mut done = call();
    for _ in 0..FUTEX_ATTEMPTS {
        let is_out = done == Err(Errno::FAULT)
            && keeper::active().is_some()
            && changed_word(b, a, e).is_some_and(|word| bring_in(word) != Err(Errno::FAULT));
        if !is_out {
            break;
        }
        done = call();
    }
    answer(done)
}

/// Where clone3's structure has the child's stack, and where the numbers that it is to have, and how many.
const CLONE3_STACK: usize = 40;
const CLONE3_SET_TID: usize = 64;

/// As [`keep_word`], for what makes a thread, or is the word's own call.
unsafe extern "C" fn keep_word_by_number(number: c_long, a: usize, b: usize, _: usize, d: usize) {
    match number as u32 {
        raw::__NR_clone => keep_word(a as u64, d),
        raw::__NR_set_tid_address => exit::keep_word(a),
        _ if a != 0 && b >= CLONE3_STACK + 8 => {
            // SAFETY: as the caller promises.
            let [flags, _, child] = unsafe { *(a as *const [u64; 3]) };
            keep_word(flags, child as usize);
        }
        _ => {}
    }
}

/// What has a wrapper that comes back like any function.
#[inline(never)]
unsafe extern "C" fn wrapped_by_number(
    number: c_long,
    a: usize,
    b: usize,
    c: usize,
    d: usize,
    e: usize,
    f: usize,
) -> c_long {
    // SAFETY: as the caller promises.
    unsafe {
        match number as u32 {
            raw::__NR_madvise => madvise(a as *mut _, b, c as c_int).into(),
            raw::__NR_process_madvise => {
                process_madvise(a as c_int, b as *const _, c, d as c_int, e as c_uint) as c_long
            }
            raw::__NR_mmap => mmap(a as *mut _, b, c as c_int, d as c_int, e as c_int, f as i64) as c_long,
            raw::__NR_mremap => mremap(a as *mut _, b, c, d as c_int, e as *mut _) as c_long,
            raw::__NR_shmat => shmat(a as c_int, b as *const _, c as c_int) as c_long,
            raw::__NR_mlockall => mlockall(a as c_int).into(),
            raw::__NR_munlockall => munlockall().into(),
            raw::__NR_prctl => prctl(a as c_int, b, c, d, e).into(),
            raw::__NR_seccomp => {
                const SET_STRICT: usize = 0;
                const SET_FILTER: usize = 1;
                // The others, and one without a filter or that is refused, only ask (libseccomp does so).
                if a == SET_STRICT && b == 0 && c == 0 || a == SET_FILTER && c != 0 {
                    FILTERED.store(true, Ordering::SeqCst);
                }
                answer(sys::call(number as u32, a, b, c, 0))
            }
            raw::__NR_vmsplice => vmsplice(a as c_int, b as *const _, c, d as c_uint) as c_long,
            raw::__NR_setsockopt => {
                setsockopt(a as c_int, b as c_int, c as c_int, d as *const _, e as c_uint).into()
            }
            raw::__NR_setrlimit => setrlimit(a as c_uint, b as *const _).into(),
            raw::__NR_prlimit64 => prlimit(a as c_int, b as c_uint, c as *const _, d as *mut _).into(),
            _ => bare(number, a, b, c, d, e, f),
        }
    }
}

/// Forks, whose child may have a stack of its own.
#[inline(never)]
unsafe extern "C" fn fork_by_number(
    number: c_long,
    a: usize,
    b: usize,
    c: usize,
    d: usize,
    e: usize,
    f: usize,
) -> c_long {
    // SAFETY: as the caller promises.
    unsafe {
        let stack = match number as u32 {
            raw::__NR_clone => b,
            raw::__NR_clone3 => *((a + CLONE3_STACK) as *const usize),
            _ => 0,
        };
        let Some(mut turn) = fork::before() else { return fail(Errno::AGAIN).into() };
        match number as u32 {
            raw::__NR_clone if turn.is_out() => bring_in_ids(a as u64, c, d),
            raw::__NR_clone3 if turn.is_out() => {
                bring_in(a, b);
                let [flags, pidfd, child, parent] = *(a as *const [u64; 4]);
                bring_in_ids(flags, parent as usize, child as usize);
                bring_in(pidfd as usize, 4);
                if b >= CLONE3_SET_TID + 16 {
                    let [ids, count] = *((a + CLONE3_SET_TID) as *const [usize; 2]);
                    bring_in(ids, count.wrapping_mul(4));
                }
            }
            _ => {}
        }
        // The child returns elsewhere if it has a stack of its own.
        if turn.is_out() && !(if stack == 0 { fork::bequeath() } else { turn.bring_home() }) {
            turn.end();
            return fail(Errno::NOMEM).into();
        }
        if stack != 0 {
            turn.restore();
        }
        let id = bare(number, a, b, c, d, e, f);
        if id == 0 {
            begin_child(&turn);
            turn.restore();
        } else {
            end_clone(turn, id);
        }
        id
    }
}
