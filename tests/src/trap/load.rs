//! Pressure: memory that is written so that other memory has to leave.

use super::span::{Span, BLOCK, PAGE};
use super::{ensure, sys, Outcome, Stop};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Memory written over and over; owned by one thread at a time.
pub struct Ballast {
    span: Span,
    generation: u16,
}

impl Ballast {
    /// Maps `len` bytes and fills them.
    pub fn new(len: usize) -> Result<Self, Stop> {
        let mut ballast = Ballast { span: sys::map(len / PAGE * PAGE)?, generation: 0 };
        ballast.walk()?;
        Ok(ballast)
    }

    /// Walks until a quarter of `field`, which is older, has left.
    pub fn push_out(&mut self, field: Span) -> Outcome {
        let since = Instant::now();
        while sys::resident(field)? > field.pages() / 4 * 3 {
            ensure!(since.elapsed() < Duration::from_secs(10), "nothing leaves");
            self.walk()?;
        }
        Ok(())
    }

    /// Gives it up.
    pub fn unmap(self) -> Outcome {
        sys::unmap(self.span)
    }

    /// Checks what the last walk wrote and writes the next generation: whatever else the program has
    /// is then the older memory and leaves.
    pub fn walk(&mut self) -> Outcome {
        if self.generation > 0 {
            self.span.check(self.generation)?;
        }
        self.generation = self.generation.wrapping_add(1).max(1);
        self.span.fill(self.generation);
        Ok(())
    }
}

/// Memory of generation 1 that is moved to and fro between two places.
#[derive(Clone, Copy)]
pub struct Mover {
    span: Span,
    origin: usize,
    places: (Span, Span),
}

impl Mover {
    /// Where nobody else is given addresses: so many others, each with room for two places.
    pub fn place(which: usize) -> usize {
        0x2800_0000_0000 + which * (1 << 30)
    }

    /// Takes what is filled already; its places begin at `at`.
    pub fn new(span: Span, at: usize) -> Self {
        Mover { span, origin: span.start, places: Span::new(at, 2 * span.len).halves() }
    }

    /// Maps `len` bytes at the first of its places, and fills them.
    pub fn map(at: usize, len: usize) -> Result<Self, Stop> {
        let span = sys::map_at(at, len, sys::RW, sys::ANON | libc::MAP_FIXED_NOREPLACE)?;
        span.fill(1);
        Ok(Mover::new(span, at))
    }

    /// Moves it to its other place. Calls nothing that keeps state.
    pub fn go(&mut self) -> Outcome {
        let (one, other) = self.places;
        let to = if self.span.start == one.start { other } else { one };
        self.span = sys::remap(self.span, self.span.len, sys::FIXED, to.start)?;
        Ok(())
    }

    /// Is all of it there?
    pub fn check(&self) -> Outcome {
        self.span.check_as(self.origin, 1)
    }

    /// Is this page of it?
    pub fn check_page(&self, page: usize) -> Outcome {
        self.span.page(page).check_as(self.origin + page * PAGE, 1)
    }
}

/// A thread that walks its ballast until it is told to end.
pub struct Churn {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Outcome>,
}

impl Churn {
    /// Fills `len` bytes of ballast, then goes on in a thread.
    pub fn start(len: usize) -> Result<Self, Stop> {
        let ballast = Ballast::new(len)?;
        let stop = Arc::new(AtomicBool::new(false));
        let thread = std::thread::spawn({
            let stop = stop.clone();
            move || churn(ballast, &stop)
        });
        Ok(Churn { stop, thread })
    }

    /// Ends the thread and says whether its own memory was right all the time.
    pub fn end(self) -> Outcome {
        self.stop.store(true, Ordering::Relaxed);
        join(self.thread)
    }
}

fn churn(ballast: Ballast, stop: &AtomicBool) -> Outcome {
    let Ballast { span, mut generation } = ballast;
    loop {
        for piece in span.pieces(BLOCK.min(span.len)) {
            if stop.load(Ordering::Relaxed) {
                return Ok(());
            }
            piece.check(generation)?;
            piece.fill(generation.wrapping_add(1));
        }
        generation = generation.wrapping_add(1);
        if span.len % BLOCK != 0 && span.len > BLOCK {
            let done = span.len / BLOCK * BLOCK;
            span.part(done, span.len - done).fill(generation);
        }
    }
}

/// Waits for a thread and hands on what it found.
pub fn join(thread: JoinHandle<Outcome>) -> Outcome {
    thread.join().map_err(|_| Stop::Wrong("a thread panicked".into()))?
}

/// Runs `work(0)` to `work(count - 1)` on a thread each and waits for all.
pub fn together(count: usize, work: impl Fn(usize) -> Outcome + Sync) -> Outcome {
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..count)
            .map(|index| {
                let work = &work;
                scope.spawn(move || work(index))
            })
            .collect();
        threads
            .into_iter()
            .try_for_each(|thread| thread.join().map_err(|_| Stop::Wrong("a thread panicked".into()))?)
    })
}

/// How often what a trap is about was met, by all of its processes.
#[derive(Clone, Copy)]
pub struct Tally(&'static AtomicU64);

impl Tally {
    pub fn new() -> Result<Self, Stop> {
        let page = sys::map_at(0, PAGE, sys::RW, libc::MAP_SHARED | libc::MAP_ANONYMOUS)?;
        // SAFETY: a page of zeros that stays.
        Ok(Tally(unsafe { &*page.as_ptr() }))
    }

    /// Calls nothing that keeps state.
    pub fn add(self, n: usize) {
        self.0.fetch_add(n as u64, Ordering::SeqCst);
    }

    pub fn count(self) -> u64 {
        self.0.load(Ordering::SeqCst)
    }

    /// Says how often `what` was met.
    pub fn say(self, what: &str) -> u64 {
        let count = self.count();
        println!("met: {count} {what}");
        count
    }

    /// The same; it must have been.
    pub fn some(self, what: &str) -> Outcome {
        ensure!(self.say(what) > 0, "no {what}: this tested nothing");
        Ok(())
    }
}

/// A small generator of pseudo-random numbers: the same seed gives the same run.
pub struct Dice(u64);

impl Dice {
    pub fn new(seed: usize) -> Self {
        Dice(0x9e37_79b9_7f4a_7c15 ^ (seed as u64).wrapping_mul(0xd134_2543_de82_ef95))
    }

    pub fn roll(&mut self, below: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % below as u64) as usize
    }
}
