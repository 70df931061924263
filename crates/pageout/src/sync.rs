//! The one door to atomics and locks: core and futex in production, loom and shuttle in models.
//!
//! Everything that engine threads agree by goes through here, so that a model checks the code that ships; counters, and what the
//! kernel shares, do not.
//! `Lock` spins briefly (its holder can be preempted, but most sections are tens of instructions),
//! then sleeps on a futex; it neither allocates nor uses thread-local state, so it is fit for the fault
//! path. It counts acquisitions and waits in the [`LockClass`] that it belongs to.

#[cfg(not(any(loom, shuttle)))]
pub use core::sync::atomic;
#[cfg(loom)]
pub use loom::sync::atomic;
#[cfg(shuttle)]
pub use shuttle::sync::atomic;

/// A pointer that is written once. Tables have thousands, so shuttle does not stop at each.
#[cfg(not(shuttle))]
pub use atomic::AtomicPtr as TablePtr;
#[cfg(shuttle)]
pub use core::sync::atomic::AtomicPtr as TablePtr;

use crate::flaw::Flaw;
use alloc::boxed::Box;
use alloc::vec::Vec;
use core::alloc::Layout;
use core::ops::{Deref, DerefMut};

/// What begins as zeros, and is that where all of its bytes are zeros.
///
/// # Safety
/// Bytes of zeros are its [`Default`], unless it is a model's.
pub unsafe trait Zero: Default {}

// SAFETY: plain numbers and pointers.
unsafe impl Zero for u16 {}
unsafe impl Zero for u128 {}
unsafe impl Zero for bool {}
unsafe impl Zero for atomic::AtomicU8 {}
unsafe impl Zero for atomic::AtomicU64 {}
unsafe impl<T> Zero for TablePtr<T> {}

/// `n` of them. Memory that the allocator has as zeros is not touched before somebody uses it: of a large table there is what
/// is in use.
pub fn zeros<T: Zero>(n: usize) -> Box<[T]> {
    if n == 0 || cfg!(any(loom, shuttle)) {
        return (0..n).map(|_| T::default()).collect();
    }
    let layout = Layout::array::<T>(n).expect("tables are small beside addresses");
    // SAFETY: neither `n` nor a T is of no bytes.
    let first = unsafe { alloc::alloc::alloc_zeroed(layout) } as *mut T;
    if first.is_null() {
        alloc::alloc::handle_alloc_error(layout);
    }
    // SAFETY: as many as were asked for, which zeros are; the global allocator's.
    unsafe { Box::from_raw(core::ptr::slice_from_raw_parts_mut(first, n)) }
}

/// Counters of a class, each pair on a line of its own.
const STRIPES: usize = 16;

#[derive(Debug)]
#[repr(align(128))]
struct Stripe {
    acquired: core::sync::atomic::AtomicU64,
    waited: core::sync::atomic::AtomicU64,
}

/// How often a kind of lock was taken and how often somebody had to wait for it.
///
/// Relaxed counters: they are statistics, no decision hangs on them. They are plain `core` atomics
/// also under loom and shuttle, so that they do not multiply the schedules. A thread counts in the
/// stripe that its stack falls to: one shared line would itself be the meeting point that the locks avoid.
#[derive(Debug)]
pub struct LockClass {
    stripes: [Stripe; STRIPES],
}

impl LockClass {
    /// A class with nothing counted.
    pub const fn new() -> Self {
        use core::sync::atomic::AtomicU64;
        Self {
            stripes: [const { Stripe { acquired: AtomicU64::new(0), waited: AtomicU64::new(0) } }; STRIPES],
        }
    }

    /// Acquisitions and, of these, those that had to wait.
    pub fn counts(&self) -> (u64, u64) {
        use core::sync::atomic::Ordering::Relaxed;
        self.stripes.iter().fold((0, 0), |sum, stripe| {
            (sum.0 + stripe.acquired.load(Relaxed), sum.1 + stripe.waited.load(Relaxed))
        })
    }

    /// Nothing was counted so far: a fork's child begins with what its parent had counted.
    pub fn forget(&self) {
        use core::sync::atomic::Ordering::Relaxed;
        for stripe in &self.stripes {
            stripe.acquired.store(0, Relaxed);
            stripe.waited.store(0, Relaxed);
        }
    }

    fn count(&self, waited: bool) {
        use core::sync::atomic::Ordering::Relaxed;
        let here = 0u8;
        // Stacks are at least 64 KiB apart; the product spreads their addresses over the stripes.
        let stack = (&raw const here as usize as u64 >> 16).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let stripe = &self.stripes[(stack >> 60) as usize];
        // Load and store instead of fetch_add: lost counts, where two threads share a stripe, are accepted.
        stripe.acquired.store(stripe.acquired.load(Relaxed).wrapping_add(1), Relaxed);
        if waited {
            stripe.waited.fetch_add(1, Relaxed);
        }
    }
}

impl Default for LockClass {
    fn default() -> Self {
        Self::new()
    }
}

/// All whose counts nobody reads.
pub static OTHER_LOCKS: LockClass = LockClass::new();

/// About a microsecond: longer than most sections that a running holder executes. Models have no time.
const SPINS: u32 = if cfg!(any(loom, shuttle)) { 0 } else { 100 };

/// No end to a wait, ns.
pub const FOREVER: u64 = u64::MAX;

/// How long to wait, as the kernel takes it; `None`: [`FOREVER`].
pub(crate) fn timeout(ns: u64) -> Option<rustix::time::Timespec> {
    (ns != FOREVER).then_some(rustix::time::Timespec {
        tv_sec: (ns / 1_000_000_000) as i64,
        tv_nsec: (ns % 1_000_000_000) as _,
    })
}

/// Sleeps while a word is what it was, until somebody is woken by it or so many nanoseconds ([`FOREVER`]: without setting a
/// timer): are they over?
fn sleep(word: &atomic::AtomicU32, was: u32, timeout_ns: u64) -> bool {
    #[cfg(not(any(loom, shuttle)))]
    {
        use rustix::thread::futex;
        let slept = futex::wait(word, futex::Flags::PRIVATE, was, timeout(timeout_ns).as_ref());
        slept == Err(rustix::io::Errno::TIMEDOUT)
    }
    #[cfg(any(loom, shuttle))]
    {
        // A model's threads wake each other soon enough.
        let _ = timeout_ns;
        Backoff::new().snooze();
        word.load(atomic::Ordering::Relaxed) == was
    }
}

/// How a thread waits that runs in the program.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Wait {
    /// Asleep, which takes system calls.
    Asleep,
    /// Without any, and the processor, where a filter may not allow them.
    Awake,
}

/// Who waits for another looks again after so long, ns: who was woken, or was to wake it, may have been killed.
const LOOK_NS: u64 = 10_000_000;
/// The same awake: some milliseconds.
const LOOK_SPINS: u32 = 1 << 16;

/// Spins while a word is what it was, so often at most: is it?
fn spin(word: &atomic::AtomicU32, was: u32, spins: u32) -> bool {
    !(0..spins).any(|_| {
        core::hint::spin_loop();
        word.load(atomic::Ordering::Relaxed) != was
    })
}

/// Wakes at most so many who sleep on a word.
fn wake(word: &atomic::AtomicU32, most: u32) {
    #[cfg(not(any(loom, shuttle)))]
    let _ = rustix::thread::futex::wake(word, rustix::thread::futex::Flags::PRIVATE, most);
    #[cfg(any(loom, shuttle))]
    let _ = (word, most);
}

/// As many as there are.
const ALL: u32 = i32::MAX as u32;

/// What threads sleep on until they are called. A call between [`Bell::heard`] and [`Bell::wait`] is not missed.
pub struct Bell(atomic::AtomicU32);

impl Bell {
    /// Nobody was called.
    pub fn new() -> Self {
        Self(atomic::AtomicU32::new(0))
    }

    /// How often it rang: to be read before looking whether there is work.
    pub fn heard(&self) -> u32 {
        self.0.load(atomic::Ordering::Acquire)
    }

    /// Wakes one who sleeps.
    pub fn ring(&self) {
        self.0.fetch_add(1, atomic::Ordering::AcqRel);
        wake(&self.0, 1);
    }

    /// Wakes all who sleep.
    pub fn ring_all(&self) {
        self.0.fetch_add(1, atomic::Ordering::AcqRel);
        wake(&self.0, ALL);
    }

    /// Sleeps, at most so many nanoseconds ([`FOREVER`]: without setting a timer), unless it rang since it was `heard`.
    pub fn wait(&self, heard: u32, timeout_ns: u64) {
        sleep(&self.0, heard, timeout_ns);
    }
}

impl Default for Bell {
    fn default() -> Self {
        Self::new()
    }
}

/// A mutual exclusion lock around a value.
pub struct Lock<T> {
    #[cfg(not(any(loom, shuttle)))]
    word: atomic::AtomicU32,
    #[cfg(not(any(loom, shuttle)))]
    value: core::cell::UnsafeCell<T>,
    #[cfg(loom)]
    mutex: loom::sync::Mutex<()>,
    #[cfg(loom)]
    held: atomic::AtomicBool,
    #[cfg(loom)]
    value: loom::cell::UnsafeCell<T>,
    #[cfg(shuttle)]
    inner: shuttle::sync::Mutex<T>,
    class: &'static LockClass,
}

#[cfg(not(any(loom, shuttle)))]
mod imp {
    use super::*;
    use atomic::Ordering::{Acquire, Relaxed, Release};
    use core::marker::PhantomData;

    const FREE: u32 = 0;
    const HELD: u32 = 1;
    const CONTENDED: u32 = 2;

    // SAFETY: the word gives exclusive access to the value.
    unsafe impl<T: Send> Send for Lock<T> {}
    unsafe impl<T: Send> Sync for Lock<T> {}

    impl<T> Lock<T> {
        /// A free lock of `class` around `value`.
        pub const fn new(value: T, class: &'static LockClass) -> Self {
            Self { word: atomic::AtomicU32::new(FREE), value: core::cell::UnsafeCell::new(value), class }
        }

        /// Takes the lock; waits for it if need be.
        pub fn lock(&self) -> Guard<'_, T> {
            let fast = self.word.compare_exchange(FREE, HELD, Acquire, Relaxed).is_ok();
            if !fast {
                self.lock_slow();
            }
            self.class.count(!fast);
            Guard { lock: self, _value: PhantomData }
        }

        /// Takes the lock if it is free.
        pub fn try_lock(&self) -> Option<Guard<'_, T>> {
            self.word.compare_exchange(FREE, HELD, Acquire, Relaxed).ok()?;
            self.class.count(false);
            Some(Guard { lock: self, _value: PhantomData })
        }

        #[cold]
        fn lock_slow(&self) {
            for _ in 0..SPINS {
                if self.word.load(Relaxed) == FREE
                    && self.word.compare_exchange(FREE, HELD, Acquire, Relaxed).is_ok()
                {
                    return;
                }
                core::hint::spin_loop();
            }
            while self.word.swap(CONTENDED, Acquire) != FREE {
                sleep(&self.word, CONTENDED, FOREVER);
            }
        }

        pub(super) fn unlock(&self) {
            if self.word.swap(FREE, Release) == CONTENDED {
                wake(&self.word, 1);
            }
        }
    }

    /// The right to the value; gives the lock back when dropped. Several threads may look at it if they may at the value:
    ///
    /// ```compile_fail,E0277
    /// fn by_several<T: Sync>() {}
    /// by_several::<pageout::sync::Guard<'static, std::cell::Cell<u8>>>();
    /// ```
    pub struct Guard<'a, T> {
        pub(super) lock: &'a Lock<T>,
        _value: PhantomData<&'a mut T>,
    }

    impl<T> Drop for Guard<'_, T> {
        fn drop(&mut self) {
            self.lock.unlock();
        }
    }

    impl<T> Deref for Guard<'_, T> {
        type Target = T;
        fn deref(&self) -> &T {
            // SAFETY: the guard is the exclusive access.
            unsafe { &*self.lock.value.get() }
        }
    }

    impl<T> DerefMut for Guard<'_, T> {
        fn deref_mut(&mut self) -> &mut T {
            // SAFETY: the guard is the exclusive access.
            unsafe { &mut *self.lock.value.get() }
        }
    }
}

/// Under loom the lock is loom's mutex, where two that lock have two orders: a word that one spins on has three, and
/// each lock that two meet on multiplies them. Who only tries asks a word beside it: loom takes a thread that would try
/// a held mutex for one that waits for it. Mutex and word change in one step.
#[cfg(loom)]
mod imp {
    use super::*;
    use atomic::Ordering::{Acquire, Relaxed, Release};
    use loom::sync::MutexGuard;

    // SAFETY: the mutex gives exclusive access to the value; loom's cell checks that it does.
    unsafe impl<T: Send> Send for Lock<T> {}
    unsafe impl<T: Send> Sync for Lock<T> {}

    /// Runs `step` without a look at what others could do in the midst of it.
    fn at_once<R>(step: impl FnOnce() -> R) -> R {
        loom::stop_exploring();
        let result = step();
        loom::explore();
        result
    }

    impl<T> Lock<T> {
        /// A free lock of `class` around `value`.
        pub fn new(value: T, class: &'static LockClass) -> Self {
            let value = loom::cell::UnsafeCell::new(value);
            Self { mutex: loom::sync::Mutex::new(()), held: atomic::AtomicBool::new(false), value, class }
        }

        /// Takes the lock; waits for it if need be.
        pub fn lock(&self) -> Guard<'_, T> {
            let mutex = self.mutex.lock().unwrap();
            at_once(|| self.held.store(true, Relaxed));
            self.guard(mutex)
        }

        /// Takes the lock if it is free.
        pub fn try_lock(&self) -> Option<Guard<'_, T>> {
            self.held.compare_exchange(false, true, Acquire, Relaxed).ok()?;
            let mutex = at_once(|| self.mutex.try_lock()).expect("what the word says");
            Some(self.guard(mutex))
        }

        fn guard<'a>(&'a self, mutex: MutexGuard<'a, ()>) -> Guard<'a, T> {
            self.class.count(false);
            Guard { lock: self, value: Some(self.value.get_mut()), _mutex: mutex }
        }
    }

    /// The right to the value; gives the lock back when dropped.
    pub struct Guard<'a, T> {
        lock: &'a Lock<T>,
        value: Option<loom::cell::MutPtr<T>>,
        _mutex: MutexGuard<'a, ()>,
    }

    impl<T> Drop for Guard<'_, T> {
        fn drop(&mut self) {
            self.value = None;
            // The mutex follows, and nobody comes between.
            self.lock.held.store(false, Release);
        }
    }

    impl<T> Deref for Guard<'_, T> {
        type Target = T;
        fn deref(&self) -> &T {
            let value = self.value.as_ref().expect("held until dropped");
            // SAFETY: the guard is the exclusive access.
            unsafe { value.deref() }
        }
    }

    impl<T> DerefMut for Guard<'_, T> {
        fn deref_mut(&mut self) -> &mut T {
            let value = self.value.as_ref().expect("held until dropped");
            // SAFETY: the guard is the exclusive access.
            unsafe { value.deref() }
        }
    }
}

#[cfg(shuttle)]
mod imp {
    use super::*;
    use shuttle::sync as model;

    impl<T> Lock<T> {
        /// A free lock of `class` around `value`.
        pub fn new(value: T, class: &'static LockClass) -> Self {
            Self { inner: model::Mutex::new(value), class }
        }

        /// Takes the lock; waits for it if need be.
        pub fn lock(&self) -> Guard<'_, T> {
            let guard = self.inner.lock().unwrap();
            self.class.count(false);
            Guard { inner: guard }
        }

        /// Takes the lock if it is free.
        pub fn try_lock(&self) -> Option<Guard<'_, T>> {
            let guard = self.inner.try_lock().ok()?;
            self.class.count(false);
            Some(Guard { inner: guard })
        }
    }

    /// The right to the value; gives the lock back when dropped.
    pub struct Guard<'a, T> {
        inner: model::MutexGuard<'a, T>,
    }

    impl<T> Deref for Guard<'_, T> {
        type Target = T;
        fn deref(&self) -> &T {
            &self.inner
        }
    }

    impl<T> DerefMut for Guard<'_, T> {
        fn deref_mut(&mut self) -> &mut T {
            &mut self.inner
        }
    }
}

pub use imp::Guard;

impl<T> Lock<Vec<T>> {
    /// Makes what lacks of `most`, until `make` gives no more. Never beyond the capacity if that is `most`: nothing is
    /// allocated under the lock.
    pub fn fill_up(&self, most: usize, make: impl Fn() -> Option<T>) {
        while self.lock().len() < most {
            let Some(made) = make() else { return };
            let mut kept = self.lock();
            if kept.len() < most {
                kept.push(made);
            }
        }
    }
}

/// What one thread at a time has, by a number of its own; who finds it abandoned may pass it on, or take it over. Shared by
/// all that share the memory, other processes too. Makes system calls only where somebody waits.
pub struct Baton(atomic::AtomicU32);

/// Besides the number of who has it: somebody sleeps until it is passed.
const SOUGHT: u32 = 1 << 31;

impl Baton {
    /// Numbers are from 1 to this.
    pub const MOST: u32 = SOUGHT - 1;

    /// Nobody has it.
    #[cfg(not(any(loom, shuttle)))]
    pub const fn new() -> Self {
        Self(atomic::AtomicU32::new(0))
    }

    /// Nobody has it.
    #[cfg(any(loom, shuttle))]
    pub fn new() -> Self {
        Self(atomic::AtomicU32::new(0))
    }

    /// Takes it if nobody has it.
    pub fn try_take(&self, me: u32) -> bool {
        self.replace(0, me)
    }

    /// Waits until nobody has it, and takes it; or from who has had it for so many looks: he is dead, or does not come back.
    pub fn take_over(&self, me: u32, looks: u32, wait: Wait) {
        while let Err(whose) = self.take_within(me, looks, wait) {
            if self.take_from(whose, me) {
                return;
            }
        }
    }

    /// Takes it from who has it.
    pub fn take_from(&self, whose: u32, me: u32) -> bool {
        self.replace(whose | SOUGHT, me | SOUGHT) || self.replace(whose, me)
    }

    /// Waits until nobody has it, and takes it, for so many looks at one who has it, 10 ms each, or some if awake: who that is.
    /// Looks, not time: all may have been stopped for long.
    pub fn take_within(&self, me: u32, looks: u32, wait: Wait) -> Result<(), u32> {
        if self.try_take(me) {
            return Ok(());
        }
        // Others may sleep until it is passed, too.
        let mine = if wait == Wait::Asleep { me | SOUGHT } else { me };
        let (mut whose, mut left) = (0, looks);
        while !self.replace(0, mine) {
            let Some(now) = self.stays(wait, LOOK_NS) else { continue };
            if now != whose {
                (whose, left) = (now, looks);
            }
            if left == 0 {
                return Err(now);
            }
            left -= 1;
        }
        Ok(())
    }

    /// Waits until it is passed, or so many nanoseconds.
    pub fn wait(&self, timeout_ns: u64) {
        self.stays(Wait::Asleep, timeout_ns);
    }

    /// Waits so long, if asleep, else until the next look is due: who had it all the time.
    fn stays(&self, wait: Wait, timeout_ns: u64) -> Option<u32> {
        let now = self.0.load(atomic::Ordering::Relaxed);
        let is_over = match wait {
            _ if now == 0 => false,
            Wait::Awake => spin(&self.0, now, LOOK_SPINS),
            Wait::Asleep => {
                let sought = now | SOUGHT;
                (now == sought || self.replace(now, sought)) && sleep(&self.0, sought, timeout_ns)
            }
        };
        is_over.then_some(now & !SOUGHT)
    }

    /// Gives it back, if it is still the caller's.
    pub fn pass(&self, me: u32) {
        if !self.replace(me, 0) && self.replace(me | SOUGHT, 0) {
            wake(&self.0, 1);
        }
    }

    /// Nobody has it from here on.
    pub fn pass_on(&self) {
        self.0.store(0, atomic::Ordering::Release);
        wake(&self.0, 1);
    }

    fn replace(&self, was: u32, is: u32) -> bool {
        use atomic::Ordering::{AcqRel, Acquire, Relaxed};
        if crate::flaw::makes(Flaw::BatonUnsure) {
            let is_so = self.0.fetch_add(0, Acquire) == was;
            if is_so {
                self.0.swap(is, AcqRel);
            }
            return is_so;
        }
        self.0.compare_exchange(was, is, AcqRel, Relaxed).is_ok()
    }

    /// Who has it; 0: nobody.
    pub fn owner(&self) -> u32 {
        self.0.load(atomic::Ordering::Relaxed) & !SOUGHT
    }
}

impl Default for Baton {
    fn default() -> Self {
        Self::new()
    }
}

/// Rounds of some work, one at a time, each of which is as good for all who asked before it began: where many ask at once, one
/// or two rounds do.
pub struct Rounds {
    begun: atomic::AtomicU32,
    ended: atomic::AtomicU32,
}

impl Rounds {
    /// There was none.
    #[cfg(not(any(loom, shuttle)))]
    pub const fn new() -> Self {
        Self { begun: atomic::AtomicU32::new(0), ended: atomic::AtomicU32::new(0) }
    }

    /// There was none.
    #[cfg(any(loom, shuttle))]
    pub fn new() -> Self {
        Self { begun: atomic::AtomicU32::new(0), ended: atomic::AtomicU32::new(0) }
    }

    /// The next that begins: what the caller has done before this is seen there.
    pub fn next(&self) -> u32 {
        atomic::fence(atomic::Ordering::SeqCst);
        let begun = self.begun.load(atomic::Ordering::Relaxed);
        begun.wrapping_add(u32::from(!crate::flaw::makes(Flaw::RoundUnsure)))
    }

    /// Is that one over?
    pub fn is_over(&self, round: u32) -> bool {
        self.ended.load(atomic::Ordering::Acquire).wrapping_sub(round) as i32 >= 0
    }

    /// The next one. By one thread at a time, which the caller sees to.
    pub fn run(&self, work: impl FnOnce()) {
        let round = self.begun.load(atomic::Ordering::Relaxed).wrapping_add(1);
        self.begun.store(round, atomic::Ordering::Relaxed);
        atomic::fence(atomic::Ordering::SeqCst);
        work();
        self.ended.store(round, atomic::Ordering::Release);
    }
}

impl Default for Rounds {
    fn default() -> Self {
        Self::new()
    }
}

/// Many readers or one writer; a waiting writer stops new readers.
///
/// Readers hold it around [check a page word + ioctl], the writer around [read events + apply them].
/// Neither side does I/O under it, so waits are short; the writer must not starve, because while it
/// waits every ioctl answers EAGAIN.
pub struct RwLock<T> {
    /// Readers inside.
    readers: atomic::AtomicU32,
    /// How many writers were inside, times [`ONE`], and of the next [`WANTED`] and [`AWAITED`].
    writers: atomic::AtomicU32,
    value: core::cell::UnsafeCell<T>,
}

/// A writer waits or is inside.
const WANTED: u32 = 1;
/// Somebody sleeps until it is out.
const AWAITED: u32 = 2;
const ONE: u32 = 4;

// SAFETY: `readers` and `writers` give shared or exclusive access to the value.
unsafe impl<T: Send> Send for RwLock<T> {}
unsafe impl<T: Send + Sync> Sync for RwLock<T> {}

impl<T> RwLock<T> {
    /// A free lock around `value`.
    pub fn new(value: T) -> Self {
        Self {
            readers: atomic::AtomicU32::new(0),
            writers: atomic::AtomicU32::new(0),
            value: core::cell::UnsafeCell::new(value),
        }
    }

    /// Shared access; waits while a writer waits or works.
    pub fn read(&self) -> ReadGuard<'_, T> {
        use atomic::Ordering::SeqCst;
        let mut backoff = Backoff::new();
        loop {
            self.readers.fetch_add(1, SeqCst);
            if self.writers.load(SeqCst) & WANTED == 0 {
                return ReadGuard { lock: self };
            }
            self.readers.fetch_sub(1, SeqCst);
            while self.writers.load(SeqCst) & WANTED != 0 {
                backoff.snooze();
            }
        }
    }

    /// Does a writer wait? Who holds it shared for long lets go of it then.
    pub fn is_wanted(&self) -> bool {
        self.writers.load(atomic::Ordering::Relaxed) & WANTED != 0
    }

    /// Returns when who has it exclusively, or waits for that, has let go of it. Nobody waits for the caller meanwhile, or after.
    pub fn wait_for_writer(&self, wait: Wait) {
        use atomic::Ordering::SeqCst;
        let writer = self.writers.load(SeqCst);
        if writer & WANTED == 0 || crate::flaw::makes(Flaw::CaughtUpAtOnce) {
            return;
        }
        let mut spins = SPINS;
        loop {
            let now = self.writers.load(SeqCst);
            if now / ONE != writer / ONE {
                return;
            }
            if wait == Wait::Awake || spins > 0 {
                spins = spins.saturating_sub(1);
                core::hint::spin_loop();
            } else if self.writers.compare_exchange(now, now | AWAITED, SeqCst, SeqCst).is_ok() {
                sleep(&self.writers, now | AWAITED, LOOK_NS);
            }
        }
    }

    /// Does somebody hold it, as said? For tests.
    #[cfg(any(test, feature = "simulated"))]
    pub fn is_held(&self, exclusively: bool) -> bool {
        use atomic::Ordering::SeqCst;
        self.writers.load(SeqCst) & WANTED != 0 || !exclusively && self.readers.load(SeqCst) > 0
    }

    /// Exclusive access; waits for the readers inside.
    pub fn write(&self) -> WriteGuard<'_, T> {
        use atomic::Ordering::SeqCst;
        let mut backoff = Backoff::new();
        loop {
            let before = self.writers.load(SeqCst);
            let is_ours = before & WANTED == 0
                && self.writers.compare_exchange(before, before | WANTED, SeqCst, SeqCst).is_ok();
            if is_ours {
                break;
            }
            backoff.snooze();
        }
        while self.readers.load(SeqCst) != 0 {
            backoff.snooze();
        }
        WriteGuard { lock: self }
    }
}

/// Shared access to what a [`RwLock`] holds.
pub struct ReadGuard<'a, T> {
    lock: &'a RwLock<T>,
}

impl<T> Deref for ReadGuard<'_, T> {
    type Target = T;
    fn deref(&self) -> &T {
        // SAFETY: while a reader is counted no writer is inside.
        unsafe { &*self.lock.value.get() }
    }
}

impl<T> Drop for ReadGuard<'_, T> {
    fn drop(&mut self) {
        self.lock.readers.fetch_sub(1, atomic::Ordering::SeqCst);
    }
}

/// Exclusive access to what a [`RwLock`] holds.
pub struct WriteGuard<'a, T> {
    lock: &'a RwLock<T>,
}

impl<T> Deref for WriteGuard<'_, T> {
    type Target = T;
    fn deref(&self) -> &T {
        // SAFETY: the one writer.
        unsafe { &*self.lock.value.get() }
    }
}

impl<T> DerefMut for WriteGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: the one writer.
        unsafe { &mut *self.lock.value.get() }
    }
}

impl<T> Drop for WriteGuard<'_, T> {
    fn drop(&mut self) {
        use atomic::Ordering::{Relaxed, SeqCst};
        let writers = &self.lock.writers;
        // Others change nothing of the count meanwhile.
        let out = (writers.load(Relaxed) & !(ONE - 1)).wrapping_add(ONE);
        if writers.swap(out, SeqCst) & AWAITED != 0 {
            wake(writers, ALL);
        }
    }
}

/// Waiting in growing steps: spin, then give the CPU away (the holder may be preempted on it).
pub struct Backoff {
    #[cfg(not(loom))]
    step: u32,
}

impl Backoff {
    /// No wait yet.
    #[allow(clippy::new_without_default)]
    pub fn new() -> Self {
        Self {
            #[cfg(not(loom))]
            step: 0,
        }
    }

    /// Waits a little, longer each time.
    pub fn snooze(&mut self) {
        #[cfg(loom)]
        loom::thread::yield_now();
        #[cfg(shuttle)]
        {
            self.step += 1;
            assert!(self.step < 10_000, "hang: what is waited for does not come");
            shuttle::thread::yield_now();
        }
        #[cfg(not(any(loom, shuttle)))]
        {
            self.step += 1;
            if self.step < 50 {
                core::hint::spin_loop();
            } else if self.step < 70 {
                rustix::thread::sched_yield();
            } else {
                let pause = rustix::thread::Timespec { tv_sec: 0, tv_nsec: 50_000 };
                let _ = rustix::thread::nanosleep(&pause);
            }
        }
    }
}
