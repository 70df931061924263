//! The C interface: the verbs of [`pageout::api`] behind `include/pageout.h`, which documents them.
//!
//! A handle owns its regions, by address, and its pins, by address and length. One lock guards both tables; nothing that waits for
//! a device is done under it.

use pageout::{Advice, Builder, Bytes, Delivery, Error, Pinned, Region, Swap};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ffi::{c_char, c_int, c_void, CStr, CString};
use std::fmt::Display;
use std::ops::Range;
use std::ptr;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

/// `struct pageout` of the header.
pub struct Handle {
    /// Before the swap, which their end needs nothing of; regions keep the engine.
    tables: Mutex<Tables>,
    swap: Swap,
}

#[derive(Default)]
struct Tables {
    pins: BTreeMap<(usize, usize), Vec<Pinned>>,
    regions: BTreeMap<usize, Arc<Region>>,
}

impl Handle {
    fn tables(&self) -> Result<MutexGuard<'_, Tables>, String> {
        // In a fork's child they are as they were at that moment, and their lock, too.
        if self.swap.is_forked() {
            return Err(Error::Forked.to_string());
        }
        Ok(self.tables.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Tables {
    /// The region that has the bytes, and where in it they are.
    fn find(&self, address: usize, length: usize) -> Result<(Arc<Region>, Range<usize>), String> {
        let found = self.regions.range(..=address).next_back().and_then(|(start, region)| {
            let from = address - start;
            let to = from.checked_add(length).filter(|to| *to <= region.len())?;
            Some((region.clone(), from..to))
        });
        found.ok_or_else(|| {
            format!("{length} bytes at {address:#x}: not in one region; take bytes of one region")
        })
    }
}

/// `struct pageout_stats` of the header.
#[repr(C)]
#[derive(Debug, Default, Clone, Copy)]
pub struct Stats {
    limit_bytes: u64,
    resident_bytes: u64,
    resident_peak_bytes: u64,
    swapped_bytes: u64,
    in_bytes: u64,
    out_bytes: u64,
    faults: u64,
    major_faults: u64,
    lost_bytes: u64,
    full: u64,
    write_errors: u64,
}

thread_local! {
    static ERROR: RefCell<CString> = RefCell::default();
}

/// Keeps why a call fails.
fn fail(why: impl Display) {
    let line = CString::new(why.to_string()).unwrap_or_default();
    // At a thread's end it may be gone before what else the thread cleans up.
    let _ = ERROR.try_with(|error| *error.borrow_mut() = line);
}

fn status(result: Result<(), impl Display>) -> c_int {
    match result {
        Ok(()) => 0,
        Err(why) => {
            fail(why);
            -1
        }
    }
}

const NO_HANDLE: &str = "no handle: pass what pageout_open returned";

/// # Safety
/// `swap` is NULL or an open handle.
unsafe fn handle<'a>(swap: *const Handle) -> Result<&'a Handle, String> {
    // SAFETY: by contract.
    unsafe { swap.as_ref() }.ok_or_else(|| NO_HANDLE.into())
}

extern "C" {
    fn pthread_setcancelstate(state: c_int, before: *mut c_int) -> c_int;
}

/// While it lives the calling thread is not cancelled: it opens and closes files, and would leave the rest as it is.
struct Uncancelled {
    before: c_int,
}

impl Uncancelled {
    fn new() -> Self {
        /// PTHREAD_CANCEL_DISABLE.
        const DISABLE: c_int = 1;
        let mut before = 0;
        // SAFETY: changes this thread alone.
        unsafe { pthread_setcancelstate(DISABLE, &mut before) };
        Self { before }
    }
}

impl Drop for Uncancelled {
    fn drop(&mut self) {
        // SAFETY: as it was.
        unsafe { pthread_setcancelstate(self.before, ptr::null_mut()) };
    }
}

/// # Safety
/// `devices` has `count` C strings.
unsafe fn open(
    memory_bytes: u64,
    devices: *const *const c_char,
    count: usize,
    delivery: Delivery,
) -> *mut Handle {
    let _uncancelled = Uncancelled::new();
    // SAFETY: by contract.
    match unsafe { build(Swap::builder().memory(Bytes(memory_bytes)).delivery(delivery), devices, count) } {
        Ok(swap) => Box::into_raw(Box::new(Handle { tables: Mutex::default(), swap })),
        Err(why) => {
            fail(why);
            ptr::null_mut()
        }
    }
}

/// # Safety
/// `devices` has `count` C strings.
unsafe fn build(mut builder: Builder, devices: *const *const c_char, count: usize) -> Result<Swap, String> {
    for n in 0..count {
        // SAFETY: by contract.
        if devices.is_null() || unsafe { *devices.add(n) }.is_null() {
            return Err("a device: NULL; give as many as count says".into());
        }
        // SAFETY: by contract.
        let spec = unsafe { CStr::from_ptr(*devices.add(n)) };
        builder = builder.device(spec.to_str().map_err(|_| "a device: not UTF-8; rename the file")?);
    }
    builder.build().map_err(|error| error.to_string())
}

/// See the header.
///
/// # Safety
/// `devices` has `count` C strings.
#[no_mangle]
pub unsafe extern "C" fn pageout_open(
    memory_bytes: u64,
    devices: *const *const c_char,
    count: usize,
) -> *mut Handle {
    // SAFETY: by contract.
    unsafe { open(memory_bytes, devices, count, Delivery::Handler) }
}

/// See the header.
///
/// # Safety
/// `devices` has `count` C strings.
#[no_mangle]
pub unsafe extern "C" fn pageout_open_inline(
    memory_bytes: u64,
    devices: *const *const c_char,
    count: usize,
) -> *mut Handle {
    // SAFETY: by contract.
    unsafe { open(memory_bytes, devices, count, Delivery::Inline) }
}

/// See the header.
///
/// # Safety
/// `swap` is NULL or an open handle that nobody uses any more.
#[no_mangle]
pub unsafe extern "C" fn pageout_close(swap: *mut Handle) {
    if swap.is_null() {
        return;
    }
    let _uncancelled = Uncancelled::new();
    // SAFETY: made by `pageout_open`.
    let handle = unsafe { Box::from_raw(swap) };
    if matches!(handle.tables.try_lock(), Err(TryLockError::WouldBlock)) {
        // This is a fork's child, and a thread of the parent was at them when it was made.
        std::mem::forget(handle);
    }
}

/// See the header.
///
/// # Safety
/// `swap` is an open handle.
#[no_mangle]
pub unsafe extern "C" fn pageout_map(swap: *mut Handle, length: usize) -> *mut c_void {
    // SAFETY: by contract.
    let mapped = unsafe { handle(swap) }.and_then(|handle| {
        let region = handle.swap.map(length).map_err(|error| error.to_string())?;
        let address = region.as_mut_ptr();
        handle.tables()?.regions.insert(address as usize, Arc::new(region));
        Ok(address)
    });
    match mapped {
        Ok(address) => address.cast(),
        Err(why) => {
            fail(why);
            ptr::null_mut()
        }
    }
}

/// See the header.
///
/// # Safety
/// `swap` is an open handle; nobody uses the region any more.
#[no_mangle]
pub unsafe extern "C" fn pageout_unmap(swap: *mut Handle, address: *mut c_void) -> c_int {
    let address = address as usize;
    // SAFETY: by contract.
    status(unsafe { handle(swap) }.and_then(|handle| {
        let mut tables = handle.tables()?;
        let Some(region) = tables.regions.get(&address) else {
            return Err(format!(
                "unmap {address:#x}: no region starts there; pass what pageout_map returned"
            ));
        };
        let end = address + region.len();
        if tables.pins.range((address, 0)..(end, 0)).next().is_some() {
            return Err(format!("unmap {address:#x}: bytes of it are pinned; call pageout_unpin first"));
        }
        let region = tables.regions.remove(&address);
        // Unmapping waits for the engine: not under the lock.
        drop(tables);
        drop(region);
        Ok(())
    }))
}

/// See the header.
///
/// # Safety
/// `swap` is an open handle; with `PAGEOUT_DONTNEED` nobody uses the bytes meanwhile.
#[no_mangle]
pub unsafe extern "C" fn pageout_advise(
    swap: *mut Handle,
    address: *mut c_void,
    length: usize,
    advice: c_int,
) -> c_int {
    // SAFETY: by contract.
    status(unsafe { handle(swap) }.and_then(|handle| {
        if !(1..=3).contains(&advice) {
            return Err(format!("advice {advice}: takes PAGEOUT_WILLNEED, _DONTNEED or _COLD"));
        }
        let (region, range) = handle.tables()?.find(address as usize, length)?;
        let done = match advice {
            1 => region.advise(range, Advice::WillNeed),
            // SAFETY: by contract.
            2 => unsafe { region.discard_shared(range) },
            _ => region.advise(range, Advice::Cold),
        };
        done.map_err(|error| error.to_string())
    }))
}

/// See the header.
///
/// # Safety
/// `swap` is an open handle.
#[no_mangle]
pub unsafe extern "C" fn pageout_pin(swap: *mut Handle, address: *const c_void, length: usize) -> c_int {
    // SAFETY: by contract.
    status(unsafe { handle(swap) }.and_then(|handle| {
        let (region, range) = handle.tables()?.find(address as usize, length)?;
        if length == 0 {
            return Ok(());
        }
        let pinned = region.pin(range).map_err(|error| error.to_string())?;
        handle.tables()?.pins.entry((address as usize, length)).or_default().push(pinned);
        Ok(())
    }))
}

/// See the header.
///
/// # Safety
/// `swap` is an open handle.
#[no_mangle]
pub unsafe extern "C" fn pageout_unpin(swap: *mut Handle, address: *const c_void, length: usize) -> c_int {
    let key = (address as usize, length);
    // SAFETY: by contract.
    status(unsafe { handle(swap) }.and_then(|handle| {
        let mut tables = handle.tables()?;
        if length == 0 {
            return Ok(());
        }
        let pins = tables.pins.get_mut(&key);
        let Some(pins) = pins else {
            return Err(format!("unpin {length} bytes at {:#x}: not pinned; pass what was pinned", key.0));
        };
        pins.pop();
        if pins.is_empty() {
            tables.pins.remove(&key);
        }
        Ok(())
    }))
}

/// See the header.
///
/// # Safety
/// `swap` is an open handle; `out` has room for `size` bytes.
#[no_mangle]
pub unsafe extern "C" fn pageout_stats(swap: *mut Handle, out: *mut Stats, size: usize) -> c_int {
    const PAGE: u64 = 4096;
    // SAFETY: by contract.
    status(unsafe { handle(swap) }.and_then(|handle| {
        if out.is_null() {
            return Err("stats: no room for them: NULL".into());
        }
        let counters = handle.swap.stats();
        let stats = Stats {
            limit_bytes: handle.swap.memory().0,
            resident_bytes: counters.resident_bytes.load(Relaxed),
            resident_peak_bytes: counters.resident_peak_bytes.load(Relaxed),
            swapped_bytes: counters.swapped_pages.load(Relaxed) * PAGE,
            in_bytes: counters.pswpin.load(Relaxed) * PAGE,
            out_bytes: counters.pswpout.load(Relaxed) * PAGE,
            faults: counters.pgfault.load(Relaxed),
            major_faults: counters.pgmajfault.load(Relaxed),
            lost_bytes: counters.poisoned.load(Relaxed) * PAGE,
            full: handle.swap.is_full().into(),
            write_errors: counters.write_errors.load(Relaxed),
        };
        let known = size.min(size_of::<Stats>());
        // SAFETY: `out` has room for `size`; what is beyond our own is zeros.
        unsafe {
            ptr::copy_nonoverlapping((&raw const stats).cast::<u8>(), out.cast::<u8>(), known);
            ptr::write_bytes(out.cast::<u8>().add(known), 0, size - known);
        }
        Ok(())
    }))
}

/// See the header.
#[no_mangle]
pub extern "C" fn pageout_error() -> *const c_char {
    let gone = c"why a call failed is not known at a thread's end".as_ptr();
    ERROR.try_with(|error| error.borrow().as_ptr()).unwrap_or(gone)
}
