//! Names of libc's by which others find what is in `mapping`, `limit` and [`super`].
//!
//! Apart from that: `syscall` calls the same by its number, and who writes over the first instructions of such a name (UCX) calls
//! the system by `syscall`, and would come back to himself. So what is behind them is not inlined either: the two would be one.

use super::{limit, mapping};
use core::ffi::{c_int, c_uint, c_void};

macro_rules! names {
    ($([$($name:ident),+] $arguments:tt -> $result:ty = $behind:path;)*) => {
        $($(names!(@$name $arguments -> $result, $behind);)+)*
    };
    (@$name:ident ($($argument:ident: $type:ty),*) -> $result:ty, $behind:path) => {
        /// See the table of [`super`].
        ///
        /// # Safety
        /// As libc's.
        #[no_mangle]
        pub unsafe extern "C" fn $name($($argument: $type),*) -> $result {
            // SAFETY: as the caller promises.
            unsafe { $behind($($argument),*) }
        }
    };
}

names! {
    [prlimit, prlimit64](process: c_int, resource: c_uint, new: *const limit::Limit, old: *mut limit::Limit) -> c_int = limit::prlimit;
    [setrlimit, setrlimit64](resource: c_uint, new: *const limit::Limit) -> c_int = limit::setrlimit;
    [madvise](address: *mut c_void, len: usize, advice: c_int) -> c_int = mapping::madvise;
    [mmap, mmap64](address: *mut c_void, len: usize, access: c_int, flags: c_int, fd: c_int, offset: i64) -> *mut c_void
        = mapping::mmap;
    [shmat](id: c_int, address: *const c_void, flags: c_int) -> *mut c_void = mapping::shmat;
    [mremap](old: *mut c_void, old_len: usize, new_len: usize, flags: c_int, new: *mut c_void) -> *mut c_void
        = mapping::mremap;
    [process_madvise](process: c_int, parts: *const c_void, count: usize, advice: c_int, flags: c_uint) -> isize
        = mapping::process_madvise;
    [vmsplice](fd: c_int, parts: *const c_void, count: usize, flags: c_uint) -> isize = mapping::vmsplice;
    [setsockopt](fd: c_int, level: c_int, name: c_int, value: *const c_void, len: c_uint) -> c_int
        = mapping::setsockopt;
    [prctl](what: c_int, a: usize, b: usize, c: usize, d: usize) -> c_int = super::prctl;
}

/// See the table of [`super`].
#[no_mangle]
pub extern "C" fn mlockall(flags: c_int) -> c_int {
    mapping::mlockall(flags)
}

/// See the table of [`super`].
#[no_mangle]
pub extern "C" fn munlockall() -> c_int {
    mapping::munlockall()
}
