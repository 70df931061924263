//! Reads are fit for a signal handler, and neither reads nor batches allocate.

mod device_support;

use device_support::{c, write_all, Memory, Scratch};
use pageout::device::{Device, Errno, FileDevice, FileOptions, Queue, Run, PAGE};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::ffi::c_int;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering::SeqCst};

/// Counts this thread's allocations.
struct Counting;

thread_local! {
    static ALLOCATED: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: the system's allocator, with a counter beside it.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATED.with(|count| count.set(count.get() + 1));
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn allocated() -> usize {
    ALLOCATED.with(Cell::get)
}

static DEVICE: AtomicPtr<FileDevice> = AtomicPtr::new(std::ptr::null_mut());
static ADDRESS: AtomicUsize = AtomicUsize::new(0);
static READ: AtomicUsize = AtomicUsize::new(0);

const PAGES: usize = 600;

extern "C" fn handler(_signal: c_int) {
    let address = ADDRESS.load(SeqCst);
    let mut parts = [(0, PAGE); PAGES];
    for (page, part) in parts.iter_mut().enumerate() {
        part.0 = address + page * PAGE;
    }
    // SAFETY: the test keeps device and memory, and looks at neither meanwhile.
    let answer = unsafe {
        let device = &*DEVICE.load(SeqCst);
        device.read_vectored(0, &parts[..1]).and(device.read_vectored(0, &parts))
    };
    READ.store(1 + usize::from(answer.is_err()), SeqCst);
}

extern "C" {
    fn signal(number: c_int, handler: extern "C" fn(c_int)) -> usize;
    fn raise(number: c_int) -> c_int;
}
const SIGUSR1: c_int = 10;

#[test]
fn reads_run_in_a_signal_handler_and_allocate_nothing() {
    let scratch = Scratch::new("signal");
    let source = Memory::filled(PAGES * PAGE, 31);
    for direct in [true, false] {
        let options = FileOptions { direct, queue: Queue::Always };
        let device = FileDevice::create_unlinked(&c(&scratch.0), source.len as u64, options).unwrap();
        assert_eq!(write_all(&device, &[source.run(0, 0, source.len)]), [Ok(())]);
        let back = Memory::new(source.len);
        DEVICE.store((&raw const device).cast_mut(), SeqCst);
        ADDRESS.store(back.address, SeqCst);
        let before = allocated();
        // SAFETY: the handler does what handlers may.
        unsafe {
            signal(SIGUSR1, handler);
            raise(SIGUSR1);
        }
        assert_eq!((READ.swap(0, SeqCst), allocated() - before), (1, 0));
        assert!(back.words() == source.words());
    }
}

#[test]
fn batches_allocate_nothing() {
    let scratch = Scratch::new("batch-alloc");
    let options = FileOptions { queue: Queue::Always, ..FileOptions::default() };
    let device = FileDevice::create_unlinked(&c(&scratch.0), 8 << 20, options).unwrap();
    let source = Memory::filled(PAGES * PAGE, 37);
    let runs: Vec<Run> =
        (0..PAGES).map(|page| source.run(page * PAGE, (page * 2 * PAGE) as u64, PAGE)).collect();
    let mut results = vec![Err(Errno::NOSYS); PAGES];
    let before = allocated();
    // SAFETY: the memory outlives the call.
    unsafe { device.write_batch(&runs, &mut results) };
    assert_eq!(allocated() - before, 0);
    assert!(results.iter().all(Result::is_ok));
}
