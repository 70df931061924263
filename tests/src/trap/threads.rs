//! Threads that come and go, hold locks and wait for each other in memory that is out.

use super::load::{together, Ballast, Churn, Dice};
use super::span::{load, pattern, store, Span, BLOCK, PAGE};
use super::{ensure, sys, Ctx, Outcome, Stop, Trap};
use libc::{c_int, c_void, pthread_t, siginfo_t};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Barrier, Mutex};
use std::time::{Duration, Instant};

pub const TRAPS: &[Trap] = &[
    Trap::new("thread-churn", "threads start, read evicted memory and exit, all the time", thread_churn),
    Trap::new("thread-stacks", "threads on stacks of the program's own, evicted between uses", thread_stacks),
    Trap::new("thread-places", "threads made right after faults may run on every CPU", thread_places),
    Trap::new("thread-places-crowd", "the same where several threads fault at once", thread_places_crowd),
    Trap::new("thread-classes", "threads of other scheduling classes fault, and keep them", thread_classes),
    Trap::new(
        "thread-places-others",
        "others choose the CPUs and classes of threads that fault",
        thread_places_others,
    ),
    Trap::new(
        "thread-places-cpuset",
        "the cpuset changes all the time while a thread faults",
        thread_places_cpuset,
    ),
    Trap::new("stacks-left", "memory where the stacks of threads were that have ended", stacks_left),
    Trap::new("stacks-beside", "memory that is one mapping with the stacks of threads", stacks_beside),
    Trap::new("threads-gone", "what was pinned for threads may leave when they have gone", threads_gone),
    Trap::new(
        "threads-places",
        "20,000 threads one after the other, each at a place of its own",
        threads_places,
    )
    .helper(),
    Trap::new("exit-in-fault", "threads are ended by a signal while their page is being read", exit_in_fault),
    Trap::new("process-exit-in-fault", "the process exits while its threads fault", process_exit_in_fault),
    Trap::new("first-ends", "the first thread ends, another goes on and forks", first_ends).may_log(),
    Trap::new("robust-mutex", "robust mutexes in evicted memory, held by threads that exit", robust_mutex),
    Trap::new("robust-mutex-gone", "a thread exits with a robust mutex that was unmapped", robust_mutex_gone),
    Trap::new(
        "clone-word",
        "words in evicted memory that the kernel clears at the end of clones",
        clone_word,
    ),
    Trap::new("clone-word-huge", "the same in huge pages, most of which leave", clone_word_huge).swaps_huge(),
    Trap::new("futex", "threads wait for each other on words in evicted memory", futex),
    Trap::new("futex-changes", "futex operations that change words in evicted memory", futex_changes),
    Trap::new("condition", "mutexes and conditions in evicted memory", condition),
];

fn thread_churn(ctx: &Ctx) -> Outcome {
    let churn = Churn::start(ctx.half())?;
    let field = sys::map(ctx.half())?;
    field.fill(1);
    let deadline = ctx.deadline();
    let turn = AtomicUsize::new(0);
    while Instant::now() < deadline {
        together(8, |_| {
            let mut dice = Dice::new(turn.fetch_add(1, Ordering::Relaxed));
            let len = 64 << 10;
            field.part(dice.roll((field.len - len) / PAGE) * PAGE, len).check(1)
        })?;
    }
    churn.end()?;
    field.check(1)
}

/// Ends as a program whose `main` calls `pthread_exit`.
fn first_ends(ctx: &Ctx) -> Outcome {
    let (field, mut ballast) = ctx.evicted()?;
    let rest = ctx.time / 4;
    std::thread::spawn(move || {
        let mut go_on = || {
            for generation in 2..6 {
                std::thread::sleep(rest);
                field.check(generation - 1)?;
                field.fill(generation);
                ballast.walk()?;
                let child = sys::fork(|| field.check(generation))?;
                sys::wait_for(child, 0)?;
            }
            field.check(5)
        };
        let outcome = go_on();
        if outcome.is_ok() {
            println!("ok");
        }
        sys::leave(outcome)
    });
    // SAFETY: ends this thread, which nobody waits for.
    unsafe { libc::syscall(libc::SYS_exit, 0) };
    unreachable!("the thread has ended")
}

/// What a raw thread shares with its maker.
struct Shared {
    field: Span,
    right: AtomicUsize,
    wrong: AtomicBool,
    seed: AtomicUsize,
}

impl Shared {
    fn new(field: Span) -> Self {
        let (right, wrong, seed) = (AtomicUsize::new(0), AtomicBool::new(false), AtomicUsize::new(0));
        Self { field, right, wrong, seed }
    }
}

/// Starts a thread without Rust's own book-keeping, on a stack of ours if there is one.
fn start(
    stack: Option<Span>,
    body: extern "C" fn(*mut c_void) -> *mut c_void,
    shared: &Shared,
) -> Result<pthread_t, Stop> {
    // SAFETY: the attributes are initialised first; the callers join before what is shared goes.
    unsafe {
        let mut attributes: libc::pthread_attr_t = std::mem::zeroed();
        libc::pthread_attr_init(&mut attributes);
        if let Some(stack) = stack {
            let r = libc::pthread_attr_setstack(&mut attributes, stack.as_ptr(), stack.len);
            ensure!(r == 0, "pthread_attr_setstack says {r}");
        }
        let mut thread = 0;
        let r = libc::pthread_create(&mut thread, &attributes, body, (&raw const *shared) as *mut c_void);
        libc::pthread_attr_destroy(&mut attributes);
        ensure!(r == 0, "pthread_create says {r}");
        Ok(thread)
    }
}

fn finish(thread: pthread_t) -> Outcome {
    // SAFETY: the thread is ours and is joined once.
    let r = unsafe { libc::pthread_join(thread, std::ptr::null_mut()) };
    ensure!(r == 0, "pthread_join says {r}");
    Ok(())
}

extern "C" fn use_own_stack(shared: *mut c_void) -> *mut c_void {
    // SAFETY: `start` passed it and its caller waits for us.
    let shared = unsafe { &*(shared as *const Shared) };
    let mut words = [0u64; 8192];
    let here = Span::new(words.as_mut_ptr() as usize, std::mem::size_of_val(&words));
    here.fill(2);
    let mut dice = Dice::new(shared.seed.fetch_add(1, Ordering::Relaxed));
    let page = shared.field.page(dice.roll(shared.field.pages()));
    if page.check(1).is_ok() && here.check(2).is_ok() {
        shared.right.fetch_add(1, Ordering::SeqCst);
    }
    std::ptr::null_mut()
}

/// The CPUs that the caller may run on.
fn cpus() -> libc::cpu_set_t {
    // SAFETY: zeroed is an empty set, and there is room for one.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::sched_getaffinity(0, std::mem::size_of_val(&set), &mut set);
        set
    }
}

/// How many CPUs the caller may run on, and its scheduling class.
fn place() -> (usize, c_int) {
    // SAFETY: has no conditions.
    unsafe { (libc::CPU_COUNT(&cpus()) as usize, libc::sched_getscheduler(0)) }
}

/// What [`place`] says, where the caller may run on the first two CPUs.
fn place_on_two() -> Result<(usize, c_int), Stop> {
    let cpus = cpus();
    // SAFETY: a set has room for more.
    let both = (0..2).all(|cpu| unsafe { libc::CPU_ISSET(cpu, &cpus) });
    both.then(place).ok_or_else(|| Stop::Skip("CPUs 0 and 1 are missing".into()))
}

/// Looks at pages at random until it is told to end.
fn look_on(field: Span, seed: usize, ends: &AtomicBool) -> Outcome {
    let mut dice = Dice::new(seed);
    while !ends.load(Ordering::Relaxed) {
        field.page(dice.roll(field.pages())).check(1)?;
    }
    Ok(())
}

fn thread_places(ctx: &Ctx) -> Outcome {
    let (field, _ballast) = ctx.evicted()?;
    make_threads(field, place(), 400, 1)
}

fn thread_places_crowd(ctx: &Ctx) -> Outcome {
    let (field, _ballast) = ctx.evicted()?;
    let all = place();
    together(4, |index| make_threads(field, all, 100, index))
}

/// Looks at pages at random, and makes threads between, which are to be as free as `all`.
fn make_threads(field: Span, all: (usize, c_int), rounds: usize, seed: usize) -> Outcome {
    let mut dice = Dice::new(seed);
    for _ in 0..rounds {
        for _ in 0..20 {
            field.page(dice.roll(field.pages())).check(1)?;
            ensure!(place() == all, "a thread that faults has {:?} instead of {all:?}", place());
        }
        let threads: Vec<_> = (0..4).map(|_| std::thread::spawn(place)).collect();
        for thread in threads {
            let own = thread.join().expect("it only looks");
            ensure!(own == all, "a thread has {own:?} instead of {all:?}");
        }
    }
    Ok(())
}

fn thread_classes(ctx: &Ctx) -> Outcome {
    let (field, _ballast) = ctx.evicted()?;
    let (all, _) = place();
    // Who asks for real time and may not have it goes on as it is.
    let classes = [libc::SCHED_OTHER, libc::SCHED_BATCH, libc::SCHED_IDLE, libc::SCHED_RR];
    together(2 * classes.len(), |index| {
        let class = classes[index % classes.len()];
        // SAFETY: zeroed are no priorities.
        unsafe {
            let mut priority: libc::sched_param = std::mem::zeroed();
            priority.sched_priority = (class == libc::SCHED_RR) as c_int;
            libc::sched_setscheduler(0, class, &priority);
        }
        let own = place();
        let mut dice = Dice::new(index);
        for _ in 0..4000 {
            field.page(dice.roll(field.pages())).check(1)?;
            ensure!(place() == own && own.0 == all, "{:?} instead of {own:?}", place());
        }
        Ok(())
    })
}

fn thread_places_others(ctx: &Ctx) -> Outcome {
    let (field, _ballast) = ctx.evicted()?;
    place_on_two()?;
    let ends = AtomicBool::new(false);
    let ids: Vec<AtomicU64> = (0..2).map(|_| AtomicU64::new(0)).collect();
    together(ids.len() + 1, |index| {
        let Some(id) = ids.get(index) else {
            let result = choose_places(&ids);
            ends.store(true, Ordering::Relaxed);
            return result;
        };
        // SAFETY: has no conditions.
        id.store(unsafe { libc::pthread_self() }, Ordering::Release);
        look_on(field, index, &ends)
    })
}

/// Chooses for each of some threads one CPU or two, and a class, and looks whether it is so.
fn choose_places(ids: &[AtomicU64]) -> Outcome {
    let threads: Vec<pthread_t> = ids
        .iter()
        .map(|id| loop {
            match id.load(Ordering::Acquire) {
                0 => std::thread::yield_now(),
                id => break id,
            }
        })
        .collect();
    let mut lost = [0, 0];
    for round in 0..10_000 {
        let thread = threads[round % threads.len()];
        std::thread::sleep(Duration::from_micros(20));
        // SAFETY: the threads go on until this function has returned; zeroed are empty sets and no priorities.
        unsafe {
            let (mut asked, mut set): (libc::cpu_set_t, libc::cpu_set_t) = std::mem::zeroed();
            let len = std::mem::size_of_val(&set);
            (0..1 + round / 3 % 2).for_each(|cpu| libc::CPU_SET(cpu, &mut asked));
            ensure!(libc::pthread_setaffinity_np(thread, len, &asked) == 0, "its CPUs cannot be chosen");
            libc::pthread_getaffinity_np(thread, len, &mut set);
            lost[0] += !libc::CPU_EQUAL(&asked, &set) as usize;
            let class = [libc::SCHED_OTHER, libc::SCHED_BATCH][round / 2 % 2];
            let (mut own, mut priority): (c_int, libc::sched_param) = std::mem::zeroed();
            ensure!(libc::pthread_setschedparam(thread, class, &priority) == 0, "its class cannot be chosen");
            libc::pthread_getschedparam(thread, &mut own, &mut priority);
            lost[1] += (own != class) as usize;
        }
    }
    ensure!(lost == [0, 0], "{} of 10000 choices of CPUs were not so, and {} of classes", lost[0], lost[1]);
    Ok(())
}

/// A cpuset of its own, which the process is in until this is dropped.
struct Cpuset(std::path::PathBuf);

impl Cpuset {
    const ROOT: &'static str = "/sys/fs/cgroup/cpuset";

    fn enter() -> Result<Self, Stop> {
        let missing = |error| Stop::Skip(format!("a cpuset (root, cgroup v1) is missing: {error}"));
        let own = Self(format!("{}/pageout-trap-{}", Self::ROOT, std::process::id()).into());
        std::fs::create_dir(&own.0).map_err(missing)?;
        let all = std::fs::read_to_string(format!("{}/cpuset.cpus", Self::ROOT))?;
        own.write("cpuset.mems", "0")?;
        own.write("cpuset.cpus", all.trim())?;
        own.write("cgroup.procs", "0")?;
        Ok(own)
    }

    fn write(&self, file: &str, what: &str) -> std::io::Result<()> {
        std::fs::write(self.0.join(file), what)
    }
}

impl Drop for Cpuset {
    fn drop(&mut self) {
        let _ = std::fs::write(format!("{}/cgroup.procs", Self::ROOT), "0");
        let _ = std::fs::remove_dir(&self.0);
    }
}

fn thread_places_cpuset(ctx: &Ctx) -> Outcome {
    let (field, _ballast) = ctx.evicted()?;
    let all = place_on_two()?;
    let cpuset = Cpuset::enter()?;
    let ends = AtomicBool::new(false);
    together(2, |index| {
        if index == 0 {
            let flap = || {
                (0..100).try_for_each(|_| {
                    ["0", "1", "0-1"].iter().try_for_each(|cpus| {
                        std::thread::sleep(Duration::from_millis(3));
                        cpuset.write("cpuset.cpus", cpus)
                    })
                })
            };
            let result = flap();
            ends.store(true, Ordering::Relaxed);
            return Ok(result?);
        }
        look_on(field, 1, &ends)?;
        ensure!(place() == (2, all.1), "{:?} is left of {all:?}", place());
        Ok(())
    })
}

fn thread_stacks(ctx: &Ctx) -> Outcome {
    let stack_len = 256 << 10;
    let (field, mut ballast) = ctx.evicted()?;
    let (low, high) = field.halves();
    // Half of the stacks in a mapping, half in objects of malloc.
    let mut stacks: Vec<Span> = high.pieces(stack_len).take(32).collect();
    for _ in 0..32 {
        let mut at = std::ptr::null_mut();
        // SAFETY: the object is never freed.
        let r = unsafe { libc::posix_memalign(&mut at, PAGE, stack_len) };
        ensure!(r == 0, "posix_memalign says {r}");
        stacks.push(Span::new(at as usize, stack_len));
    }
    let shared = Shared::new(low);
    let rounds = 3;
    for _ in 0..rounds {
        ballast.walk()?;
        for group in stacks.chunks(4) {
            let threads: Result<Vec<_>, _> =
                group.iter().map(|stack| start(Some(*stack), use_own_stack, &shared)).collect();
            threads?.into_iter().try_for_each(finish)?;
        }
    }
    let right = shared.right.load(Ordering::SeqCst);
    ensure!(right == rounds * stacks.len(), "{right} of {} threads found all right", rounds * stacks.len());
    Ok(())
}

/// What is mapped where threads once had their stacks is memory like any other.
fn stacks_left(ctx: &Ctx) -> Outcome {
    let mut ballast = Ballast::new(ctx.half())?;
    let places = Mutex::new(Vec::new());
    let barrier = Barrier::new(64);
    together(64, |_| {
        // SAFETY: has no conditions. It is where the thread's control block lies.
        places
            .lock()
            .map_err(|_| Stop::Wrong("a thread panicked".into()))?
            .push(unsafe { libc::pthread_self() });
        barrier.wait();
        Ok(())
    })?;
    let part = ctx.half() / 32;
    let mut areas = Vec::new();
    for place in places.into_inner().map_err(|_| Stop::Wrong("a thread panicked".into()))? {
        let start = place as usize / PAGE * PAGE - part / 2;
        // Some stacks are kept.
        areas.extend(sys::map_at(start, part, sys::RW, sys::ANON | libc::MAP_FIXED_NOREPLACE));
    }
    ensure!(areas.len() > 16, "only {} of 64 stacks have gone", areas.len());
    areas.truncate(32);
    most_leave(&areas, &mut ballast)
}

/// Fills areas, which are to leave for the ballast like any memory.
fn most_leave(areas: &[Span], ballast: &mut Ballast) -> Outcome {
    areas.iter().for_each(|area| area.fill(1));
    ballast.walk()?;
    ballast.walk()?;
    let there: usize = areas.iter().map(|area| sys::resident(*area).unwrap_or(0)).sum();
    let all: usize = areas.iter().map(|area| area.pages()).sum();
    ensure!(!sys::under_pageout() || there < all / 2, "{there} of {all} pages stay in memory");
    areas.iter().try_for_each(|area| area.check(1))
}

/// What has the same advice as a stack and lies above it becomes one mapping with it.
fn stacks_beside(ctx: &Ctx) -> Outcome {
    extern "C" fn rest(shared: *mut c_void) -> *mut c_void {
        // SAFETY: what is shared outlives its threads.
        let shared = unsafe { &*shared.cast::<Shared>() };
        while shared.right.load(Ordering::SeqCst) == 0 {
            std::thread::sleep(Duration::from_millis(10));
        }
        std::ptr::null_mut()
    }
    const THREADS: usize = 8;
    let len = (ctx.half() / THREADS).next_multiple_of(BLOCK);
    // However this ends.
    let shared: &Shared = Box::leak(Box::new(Shared::new(Span::new(0, 0))));
    let (mut areas, mut threads) = (Vec::new(), Vec::new());
    for _ in 0..THREADS {
        let area = sys::map(len)?;
        sys::advise(area, libc::MADV_NOHUGEPAGE)?;
        areas.push(area);
        threads.push(start(None, rest, shared)?);
    }
    let lines = sys::mappings(|line| line.contains(" rw-p "))?;
    let merged =
        areas.iter().filter(|area| lines.iter().any(|line| line.end() == area.end() && line.len > len));
    if merged.count() < THREADS / 2 {
        return Err(Stop::Skip("this kernel keeps stacks apart from what lies above them".into()));
    }
    most_leave(&areas, &mut Ballast::new(ctx.half())?)?;
    shared.right.store(1, Ordering::SeqCst);
    threads.into_iter().try_for_each(finish)
}

/// What the kernel touches when a thread ends stays until it has, and no longer: elsewhere as well as where the next begins.
fn threads_gone(ctx: &Ctx) -> Outcome {
    const PATIENCE: Duration = Duration::from_secs(20);
    const PLACE: usize = 128 << 10;
    let (field, mut ballast) = ctx.evicted()?;
    let (low, high) = field.halves();
    let places: Vec<Span> = high.pieces(PLACE).collect();
    let shared = Shared::new(low);
    for round in 1..=2 {
        for group in places.chunks(16) {
            let threads: Result<Vec<_>, _> =
                group.iter().map(|place| start(Some(*place), use_own_stack, &shared)).collect();
            threads?.into_iter().try_for_each(finish)?;
        }
        high.fill(round);
        let begun = Instant::now();
        loop {
            ballast.walk()?;
            let there = sys::resident(high)?;
            if !sys::under_pageout() || there < high.pages() / 4 {
                break;
            }
            ensure!(begun.elapsed() < PATIENCE, "{there} of {} pages stay in memory", high.pages());
        }
        high.check(round)?;
    }
    let (right, all) = (shared.right.load(Ordering::SeqCst), 2 * places.len());
    ensure!(right == all, "{right} of {all} threads found all right");
    Ok(())
}

extern "C" fn do_nothing(argument: *mut c_void) -> *mut c_void {
    argument
}

fn threads_places(_: &Ctx) -> Outcome {
    const PLACE: usize = 64 << 10;
    let field = sys::map(20_000 * PLACE)?;
    let shared = Shared::new(field);
    field.pieces(PLACE).try_for_each(|place| finish(start(Some(place), do_nothing, &shared)?))
}

/// Ends the thread on the spot, wherever it is, without the C library's help.
extern "C" fn end_thread(_: c_int, _: *mut siginfo_t, _: *mut c_void) {
    // SAFETY: the threads that get the signal hold nothing.
    unsafe { libc::syscall(libc::SYS_exit, 0) };
}

extern "C" fn read_until_ended(shared: *mut c_void) -> *mut c_void {
    // SAFETY: `start` passed it and its caller waits for us.
    let shared = unsafe { &*(shared as *const Shared) };
    let mut dice = Dice::new(shared.seed.fetch_add(1, Ordering::Relaxed));
    loop {
        let page = shared.field.page(dice.roll(shared.field.pages()));
        if page.check(1).is_err() {
            shared.wrong.store(true, Ordering::SeqCst);
        }
        shared.right.fetch_add(1, Ordering::SeqCst);
    }
}

fn exit_in_fault(ctx: &Ctx) -> Outcome {
    let churn = Churn::start(ctx.half())?;
    let field = sys::map(ctx.half())?;
    field.fill(1);
    sys::handle(libc::SIGUSR1, 0, end_thread)?;
    let shared = Shared {
        field,
        right: AtomicUsize::new(0),
        wrong: AtomicBool::new(false),
        seed: AtomicUsize::new(1),
    };
    let mut dice = Dice::new(7);
    let deadline = ctx.deadline();
    while Instant::now() < deadline {
        let before = shared.right.load(Ordering::SeqCst);
        let threads = [start(None, read_until_ended, &shared)?, start(None, read_until_ended, &shared)?];
        while shared.right.load(Ordering::SeqCst) == before {
            std::thread::yield_now();
        }
        std::thread::sleep(Duration::from_micros(dice.roll(2000) as u64));
        for thread in threads {
            // SAFETY: the thread lives until it is joined.
            unsafe { libc::pthread_kill(thread, libc::SIGUSR1) };
        }
        threads.into_iter().try_for_each(finish)?;
        ensure!(!shared.wrong.load(Ordering::SeqCst), "a thread read wrong data");
    }
    churn.end()?;
    field.check(1)
}

fn process_exit_in_fault(ctx: &Ctx) -> Outcome {
    let field: Span = sys::map(ctx.size)?;
    field.fill(1);
    for index in 0..4 {
        std::thread::spawn(move || {
            let mut dice = Dice::new(index);
            loop {
                if let Err(Stop::Wrong(why)) = field.page(dice.roll(field.pages())).check(1) {
                    println!("wrong: {why}");
                    std::process::exit(1);
                }
            }
        });
    }
    std::thread::sleep(ctx.time / 2);
    Ok(())
}

/// Who takes mutexes, and ends.
struct Holder<'a> {
    mutexes: &'a [usize],
    ballast: Ballast,
    holds: Outcome,
}

impl Holder<'_> {
    /// Lets their pages leave before it exits: the kernel, in the exit, has to read and write them.
    fn hold(&mut self) {
        self.holds = self.take();
    }

    fn take(&mut self) -> Outcome {
        for &mutex in self.mutexes {
            // SAFETY: whoever has a holder has initialised them.
            let r = unsafe { libc::pthread_mutex_lock(mutex as *mut _) };
            ensure!(r == 0, "a robust mutex says {r}");
        }
        self.ballast.walk()?;
        self.ballast.walk()
    }
}

/// As a destructor of thread-specific data, after all others.
unsafe extern "C" fn hold_late(holder: *mut c_void) {
    // SAFETY: who set it waits for the thread's end.
    unsafe { (*holder.cast::<Holder>()).hold() }
}

fn robust_mutex(ctx: &Ctx) -> Outcome {
    let count = 64;
    let field = sys::map(ctx.half())?;
    field.fill(1);
    let stride = field.len / count / PAGE * PAGE;
    let mutexes: Vec<usize> = (0..count).map(|index| field.start + index * stride).collect();
    for &mutex in &mutexes {
        // SAFETY: a page of the field is larger than a mutex; it is initialised before use.
        unsafe {
            let mut attributes: libc::pthread_mutexattr_t = std::mem::zeroed();
            libc::pthread_mutexattr_init(&mut attributes);
            libc::pthread_mutexattr_setrobust(&mut attributes, libc::PTHREAD_MUTEX_ROBUST);
            libc::pthread_mutex_init(mutex as *mut _, &attributes);
        }
    }
    let mut holder = Holder { mutexes: &mutexes, ballast: Ballast::new(ctx.half())?, holds: Ok(()) };
    let mut key = 0;
    // SAFETY: the destructor is there as long as the process.
    sys::ret("pthread_key_create", unsafe { libc::pthread_key_create(&mut key, Some(hold_late)) })?;
    for late in [false, true] {
        let holds = std::thread::scope(|scope| {
            let thread = scope.spawn(|| match late {
                // SAFETY: what the destructor gets is there until the thread has been joined.
                true => unsafe { _ = libc::pthread_setspecific(key, (&raw mut holder).cast()) },
                false => holder.hold(),
            });
            thread.join().map_err(|_| Stop::Wrong("a thread panicked".into()))
        });
        holds?;
        std::mem::replace(&mut holder.holds, Ok(()))?;
        for (index, &mutex) in mutexes.iter().enumerate() {
            let mut until = libc::timespec { tv_sec: 0, tv_nsec: 0 };
            // SAFETY: initialised above.
            let r = unsafe {
                libc::clock_gettime(libc::CLOCK_REALTIME, &mut until);
                until.tv_sec += 5;
                libc::pthread_mutex_timedlock(mutex as *mut _, &until)
            };
            ensure!(
                r == libc::EOWNERDEAD,
                "the robust mutex {index} of a thread that exited says {r}, not EOWNERDEAD"
            );
            // SAFETY: we hold it.
            unsafe {
                pthread_mutex_consistent(mutex as *mut _);
                libc::pthread_mutex_unlock(mutex as *mut _);
            }
        }
    }
    mutexes.iter().try_for_each(|&mutex| Span::new(mutex + 64, PAGE - 64).check(1))
}

/// The kernel ends its walk there and says nothing.
fn robust_mutex_gone(ctx: &Ctx) -> Outcome {
    let (field, mut ballast) = ctx.evicted()?;
    for _ in 0..4 {
        let page = sys::map(PAGE)?;
        let holder = std::thread::spawn(move || {
            // SAFETY: a page is larger than a mutex; nobody looks at it after it was unmapped but the kernel.
            unsafe {
                let mut attributes: libc::pthread_mutexattr_t = std::mem::zeroed();
                libc::pthread_mutexattr_init(&mut attributes);
                libc::pthread_mutexattr_setrobust(&mut attributes, libc::PTHREAD_MUTEX_ROBUST);
                libc::pthread_mutex_init(page.as_ptr(), &attributes);
                libc::pthread_mutex_lock(page.as_ptr());
            }
            sys::unmap(page)
        });
        holder.join().map_err(|_| Stop::Wrong("a thread panicked".into()))??;
        ballast.walk()?;
    }
    field.check(1)
}

extern "C" {
    fn pthread_mutex_consistent(mutex: *mut libc::pthread_mutex_t) -> c_int;
}

fn wait(word: &AtomicU32, while_it_is: u32) {
    while word.load(Ordering::SeqCst) == while_it_is {
        // SAFETY: the word lives as long as the field.
        unsafe {
            let no_time = std::ptr::null::<libc::timespec>();
            libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAIT, while_it_is, no_time)
        };
    }
}

fn wake(word: &AtomicU32) {
    // SAFETY: the word lives as long as the field.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, 1) };
}

/// What a clone of [`clear_at_end`] is told.
struct ClonedThread {
    /// The word that it names itself, or 0.
    word: usize,
    goes_on: AtomicBool,
    may_end: AtomicBool,
}

/// It has no thread-local state of its own.
extern "C" fn cloned(told: *mut c_void) -> c_int {
    // SAFETY: outlives the clone.
    let told = unsafe { &*told.cast::<ClonedThread>() };
    if told.word != 0 {
        // SAFETY: a word of the trap's.
        unsafe { libc::syscall(libc::SYS_set_tid_address, told.word) };
    }
    told.goes_on.store(true, Ordering::Release);
    while !told.may_end.load(Ordering::Acquire) {
        std::hint::spin_loop();
    }
    0
}

fn clone_word(ctx: &Ctx) -> Outcome {
    let (field, mut ballast) = ctx.evicted()?;
    let words = [field.page(100).start, field.page(field.pages() / 2).start];
    words
        .into_iter()
        .zip([false, true])
        .try_for_each(|(word, itself)| clear_at_end(word, itself, &mut ballast))
}

fn clone_word_huge(ctx: &Ctx) -> Outcome {
    // The older: what comes after it leaves before it.
    let mut ballast = Ballast::new(ctx.half())?;
    for itself in [false, true] {
        let field = sys::map_aligned(4 * BLOCK, BLOCK)?;
        sys::advise(field, libc::MADV_HUGEPAGE)?;
        field.fill(1);
        clear_at_end(field.page(100).start, itself, &mut ballast)?;
        field.part(0, 100 * PAGE).check(1)?;
        field.part(101 * PAGE, field.len - 101 * PAGE).check(1)?;
    }
    Ok(())
}

/// The kernel clears a word, which was filled, at the end of a clone that names it `itself`, or whose maker does.
fn clear_at_end(word: usize, itself: bool, ballast: &mut Ballast) -> Outcome {
    const STACK: usize = 64 << 10;
    const THREAD: c_int = libc::CLONE_VM
        | libc::CLONE_FS
        | libc::CLONE_FILES
        | libc::CLONE_SIGHAND
        | libc::CLONE_THREAD
        | libc::CLONE_SYSVSEM;
    let stack = sys::map(STACK)?;
    let told = ClonedThread {
        word: if itself { word } else { 0 },
        goes_on: AtomicBool::new(false),
        may_end: AtomicBool::new(false),
    };
    let (flags, child) = if itself { (THREAD, 0) } else { (THREAD | libc::CLONE_CHILD_CLEARTID, word) };
    let (top, told_at) = (stack.end() as *mut c_void, (&raw const told).cast_mut().cast::<c_void>());
    let none = std::ptr::null_mut::<c_void>();
    // SAFETY: the stack is the clone's own, and what it is told outlives it.
    let id = unsafe { libc::clone(cloned, top, flags, told_at, none, none, child as *mut c_void) };
    sys::ret("clone", id)?;
    while !told.goes_on.load(Ordering::Acquire) {
        std::thread::yield_now();
    }
    ballast.walk()?;
    told.may_end.store(true, Ordering::Release);
    // Not by its word: that would bring it in.
    let task = format!("/proc/self/task/{id}");
    while std::path::Path::new(&task).exists() {
        std::thread::yield_now();
    }
    let left = load(word);
    ensure!(left as u32 == 0, "the word was not cleared: {left:#x}");
    ensure!(left == pattern(word, 1) >> 32 << 32, "the word's neighbour changed: {left:#x}");
    Ok(())
}

fn futex(ctx: &Ctx) -> Outcome {
    let field = sys::map(ctx.half())?;
    let mut ballast = Ballast::new(ctx.half())?;
    let words: Vec<&AtomicU32> = field
        .pieces(field.len / 512 / PAGE * PAGE)
        // SAFETY: mapped, zero, and never unmapped.
        .map(|piece| unsafe { &*(piece.start as *const AtomicU32) })
        .collect();
    for round in 0..3 {
        together(2, |index| {
            for word in &words {
                if index == 0 {
                    word.store(3 * round + 1, Ordering::SeqCst);
                    wake(word);
                    wait(word, 3 * round + 1);
                } else {
                    wait(word, 3 * round);
                    word.store(3 * round + 2, Ordering::SeqCst);
                    wake(word);
                }
            }
            Ok(())
        })?;
        words.iter().for_each(|word| word.store(3 * round + 3, Ordering::SeqCst));
        ballast.walk()?;
    }
    Ok(())
}

/// A futex operation on a word of its own, which is 0, and another.
fn operate(operation: c_int, one: usize, other: usize) -> Result<(), c_int> {
    const ADD_ONE: c_int = 1 << 28 | 1 << 12;
    let last = if operation == libc::FUTEX_WAKE_OP { ADD_ONE } else { 0 };
    // SAFETY: the kernel looks whether it may touch the words. Nobody waits on them.
    let done = unsafe {
        libc::syscall(libc::SYS_futex, one, operation | libc::FUTEX_PRIVATE_FLAG, 1, 0, other, last)
    };
    if done == -1 {
        Err(sys::errno())
    } else {
        Ok(())
    }
}

fn futex_changes(ctx: &Ctx) -> Outcome {
    const CMP_REQUEUE_PI: c_int = 12;
    const LOCK_PI2: c_int = 13;
    // SAFETY: takes nothing.
    let me = unsafe { libc::gettid() } as u32;
    let here = AtomicU32::new(0);
    let here = here.as_ptr() as usize;
    let field = sys::map(ctx.half())?;
    // The words are where there was never anything, and where something is beside them.
    let words: Vec<usize> = field.pieces(field.len / 128 / PAGE * PAGE).map(|piece| piece.start).collect();
    field.pieces(PAGE).step_by(2).for_each(|page| store(page.start + 8, 1));
    let mut ballast = Ballast::new(ctx.half())?;
    for (operation, left) in [
        (libc::FUTEX_LOCK_PI, me),
        (libc::FUTEX_UNLOCK_PI, 0),
        (libc::FUTEX_TRYLOCK_PI, me),
        (libc::FUTEX_UNLOCK_PI, 0),
        (LOCK_PI2, me),
        (libc::FUTEX_UNLOCK_PI, 0),
        (CMP_REQUEUE_PI, 0),
        (libc::FUTEX_WAKE_OP, 1),
    ] {
        for &word in &words {
            let of_two = matches!(operation, CMP_REQUEUE_PI | libc::FUTEX_WAKE_OP);
            let (one, other) = if of_two { (here, word) } else { (word, 0) };
            let done = operate(operation, one, other);
            ensure!(done == Ok(()), "futex operation {operation}: error {done:?}");
            ensure!(load(word) == left.into(), "futex operation {operation} left {:#x}", load(word));
        }
        ballast.walk()?;
    }
    // What may not be written, may not be read, is not there.
    let page = sys::map(PAGE)?;
    let refused = |what: &str| {
        let done =
            [operate(libc::FUTEX_LOCK_PI, page.start, 0), operate(libc::FUTEX_WAKE_OP, here, page.start)];
        ensure!(done == [Err(libc::EFAULT); 2], "on memory that {what}: {done:?}");
        Ok(())
    };
    sys::protect(page, libc::PROT_READ)?;
    refused("may be read only")?;
    sys::protect(page, libc::PROT_NONE)?;
    refused("may not be read")?;
    sys::unmap(page)?;
    refused("is not there")
}

/// A mutex and a condition of the C library at the start of a page, and a counter that they guard.
#[repr(C)]
struct Monitor {
    mutex: libc::pthread_mutex_t,
    condition: libc::pthread_cond_t,
    turn: u64,
}

fn condition(ctx: &Ctx) -> Outcome {
    let churn = Churn::start(ctx.half())?;
    let field = sys::map(ctx.half())?;
    let monitors: Vec<usize> = field.pieces(field.len / 128 / PAGE * PAGE).map(|piece| piece.start).collect();
    for &at in &monitors {
        let monitor = at as *mut Monitor;
        // SAFETY: a page of the field is larger than a monitor.
        unsafe {
            (&raw mut (*monitor).mutex).write(libc::PTHREAD_MUTEX_INITIALIZER);
            (&raw mut (*monitor).condition).write(libc::PTHREAD_COND_INITIALIZER);
        }
    }
    let deadline = ctx.deadline();
    let last = AtomicU64::new(u64::MAX);
    together(2, |index| {
        for turn in (index as u64..).step_by(2) {
            // Who has the even turns says which is the last; the one before it is then the other's last.
            if index == 0 && Instant::now() > deadline {
                last.store(turn, Ordering::SeqCst);
            }
            for &at in &monitors {
                let monitor = at as *mut Monitor;
                // SAFETY: initialised above; the mutex guards the turn.
                unsafe {
                    libc::pthread_mutex_lock(&raw mut (*monitor).mutex);
                    while (&raw const (*monitor).turn).read_volatile() != turn {
                        libc::pthread_cond_wait(&raw mut (*monitor).condition, &raw mut (*monitor).mutex);
                    }
                    (*monitor).turn += 1;
                    libc::pthread_cond_broadcast(&raw mut (*monitor).condition);
                    libc::pthread_mutex_unlock(&raw mut (*monitor).mutex);
                }
            }
            if turn + 1 >= last.load(Ordering::SeqCst) {
                break;
            }
        }
        Ok(())
    })?;
    churn.end()
}
