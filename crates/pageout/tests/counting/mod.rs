//! Counts what is asked for and given back while a thread is in a signal handler, and does nothing else.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

struct Counting;

thread_local! {
    pub static IN_HANDLER: Cell<bool> = const { Cell::new(false) };
}
pub static ALLOCATED: AtomicUsize = AtomicUsize::new(0);

fn count() {
    ALLOCATED.fetch_add(IN_HANDLER.with(Cell::get) as usize, SeqCst);
}

// SAFETY: the system's allocator, with a counter beside it.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count();
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;
