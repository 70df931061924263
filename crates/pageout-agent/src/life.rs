//! The keeper's life: watch, take up, follow, end.
//!
//! *Watch*: the first thread looks at the resident memory of the address space, the more often the nearer
//! the limit. Nothing is registered, no other thread runs, no fault is taken. *Take up*, at 80 % of the limit:
//! staging is mapped, servers start, every area that can be managed is adopted. *Follow*: the same
//! thread goes on looking, for new areas and for growth that no fault announces. *End*: when the program exits
//! or executes another one.

use crate::clock::Clock;
use crate::code::{is_code, Code};
use crate::devices::Devices;
use crate::files;
use crate::keeper::{self, give_up, Keeper};
use crate::link::{Link, Welcome};
use crate::part::Part;
use crate::proc::Maps;
use crate::tie::Tie;
use crate::unasked::Unasked;
use crate::{exit, fork, gate, heir, memory, part, program, sys, threads, wrap};
use alloc::boxed::Box;
use alloc::vec::Vec;
use core::sync::atomic::{AtomicBool, Ordering};
use pageout::engine::{Config, Engine, Swapin};
use pageout::frame::{Frames, CHUNK, EXECUTABLE};
use pageout::kernel::{HugePages, Kernel, Linux, Statm};
use pageout::slot::{CLUSTER_LOCKS, LIST_LOCKS};
use pageout::space::discover::{bss_end, Area, Walk};
use pageout::space::{BLOCK, BLOCK_LOCKS, BLOCK_ORDER, PAGE, UNIT};
use pageout::stats::Stats;
use pageout::swap::Place;
use pageout::sync::LockClass;
use pageout::wire::{is_news, Kind, Message, Settings, BYE_ENDED, BYE_EXEC};
use rustix::event::{poll, PollFd, PollFlags, Timespec};
use rustix::fd::{AsFd, OwnedFd};
use rustix::io::Errno;

/// First touches are taken to be at most this fast, in bytes a nanosecond (19 GB/s were measured).
const FASTEST: u64 = 20;
/// Part of the stated slack that a watch may let pass between two looks, in bytes.
const SLACK: u64 = 24 << 20;
/// The same while the engine works, when all that is left to do is to register.
const FOLLOW_SLACK: u64 = 40 << 20;
/// Between two looks there are at most so many ns, but for what [`LOOK_OF_EACH`] says.
const LONGEST_NAP: u64 = 100_000_000;
/// The same near the limit, of a program that hardly runs. Once the engine works, of those that do not run, so many for each
/// that is there, so that all of them together cost little: run tells who rests that others need what it has. Not more than it
/// takes, for some growth does not ring: by a long system call, or by who shares the memory and is no thread (CLONE_VM).
const LONGEST_REST: u64 = 10_000_000;
const REST_OF_EACH: u64 = 1_250_000;
/// Nor do they look more often than once in so many ns for each that is there, also while all together are over the limit: a look
/// takes 25 us where many share the processors, and who is to evict waits behind them.
const LOOK_OF_EACH: u64 = 125_000;
/// Who has run for less than this part of the time hardly runs.
const HARDLY: u64 = 8;
/// So many bytes over the limit no ordinary thread comes before the evictor.
const FAR_OVER: i64 = 16 << 20;
/// After so many looks without new memory that no fault announced.
const CALM: u64 = 4;
/// Areas below this many bytes are not worth a registration, as long as they are not much together.
const SMALLEST_AREA: usize = 4 * PAGE;
/// Nor is what has grown, before it is this part of the limit, between these bytes: the kernel never merges what is
/// registered at different times, and a program has only so many mappings (65,530). Of the stated slack.
const GROWTH_SHARE: u64 = 32;
const LEAST_GROWTH: u64 = 1 << 20;
const MOST_GROWTH: u64 = 16 << 20;
/// Between two looks for areas so many times as long as one takes, while that is not much over the limit: a program may have
/// tens of thousands of mappings, and map and unmap all the time.
const SCAN_SHARE: u64 = 8;
/// An area of at most this many bytes that holds a thread's control block is that thread's stack.
const LARGEST_STACK: usize = 64 << 20;
/// While a look for areas that takes longer (ns) is under way, nobody sees what the program takes meanwhile.
const LONG_SCAN: u64 = 4_000_000;
/// From the page of a thread's control block on so much is its descriptor's.
const ABOVE_BLOCK: usize = 2 * PAGE;
/// Servers of faults. All but one sleep unless faults come together or wait for a slow device.
const SERVERS: usize = 4;
/// How often what cannot go is counted, in ns: it takes a look at every block. Over the limit up to 15 times as
/// often, if the count takes less than a hundredth of that: what grows then may be what cannot go.
const COUNT_EVERY: u64 = 300_000_000;
/// Between two it is at least so many times as long as one takes.
const COUNT_SHARE: u64 = 50;
/// By fewer bytes two counts may differ: rounds of evictors, huge frames, pages that are tried again.
const LEAST_UNEXPLAINED: u64 = 4 << 20;
/// How long (ns) what cannot go must have stayed as it is before the user is told.
const REST: u64 = 2_000_000_000;
/// Or been over the limit without a break, if it never rests.
const RESTLESS: u64 = 2 * REST;
/// Who was found short of memory counts as short for so long (ns): others let what it lacks leave without stopping
/// between two of its faults, which may take 2 MiB each.
const SHORT_FOR: u64 = 20_000_000;
/// So many threads at most allocate slots at once without meeting.
const MOST_SHARDS: usize = 64;
/// This part of the limit may stay where threads have gone: others that begin there find it pinned.
const LEFT_SHARE: usize = 64;

pub struct Life {
    watch: OwnedFd,
    sight: program::Sight,
    clock: Option<Clock>,
    /// For how long (ns) a program that hardly runs is left alone now.
    rest: u64,
    /// The last pause ended because the clock told that it runs, or run told something.
    is_called: bool,
    link: &'static Link,
    settings: Settings,
    part: Part,
    /// `None`: it could not be had.
    tie: Option<Tie>,
    unasked: Unasked,
    devices: Devices,
    stats: &'static Stats,
    maps: Maps,
    /// Size and data pages when areas were last looked for, and how often mappings had come or gone: what is unmapped and
    /// mapped again between two looks leaves the sizes as they were.
    scanned: (usize, usize, u32),
    /// When that was (ns), and how long it took.
    scan_ended: u64,
    scan_took: u64,
    areas: Vec<(usize, usize)>,
    files: files::Eye,
    /// What can be executed.
    code: Vec<(usize, usize)>,
    /// Bytes of memory that can be executed, at the last look; whether frames for it were asked for, and are there.
    executable: usize,
    asked_executable: bool,
    takes_executable: bool,
    /// Bytes of areas below [`SMALLEST_AREA`], at the last look; whether they are taken, too.
    small: usize,
    takes_small: bool,
    /// The thread that evicts, and whether it is to hurry.
    evictor: u32,
    hurried: bool,
    /// What could not go at the last count, in bytes; when (ns) it is counted again.
    unmanaged: u64,
    next_count: u64,
    /// What could not go, as far as areas have been looked for since, and what comes on top at two counts in a row: it may be in areas
    /// that had none, for `mprotect` has one instead of another, and no size changes.
    explained: u64,
    unexplained: u64,
    /// Since when (ns) it is over the limit without a break, since when at rest, and how much it was then.
    over: Option<(u64, u64, u64)>,
    /// How much of it was told.
    told_over: u64,
}

/// The classes of locks that are counted, in the order of their counters.
const LOCKS: [&LockClass; 3] = [&BLOCK_LOCKS, &CLUSTER_LOCKS, &LIST_LOCKS];

/// In a fork's child: what was counted is its parent's.
pub fn forget_counts() {
    LOCKS.into_iter().for_each(LockClass::forget);
}

impl Life {
    /// With nothing known yet of the program that `watch` is.
    pub fn new(
        watch: OwnedFd,
        link: &'static Link,
        welcome: Welcome,
        part: Part,
        tie: Option<Tie>,
        stats: &'static Stats,
    ) -> Self {
        Self {
            watch,
            sight: program::Sight::new(),
            clock: Clock::of(keeper::program()),
            rest: 0,
            is_called: false,
            link,
            settings: welcome.settings,
            part,
            tie,
            unasked: Unasked::new(&welcome.settings),
            devices: Devices::new(welcome.settings.device, welcome.devices),
            stats,
            maps: Maps::new(),
            scanned: (0, 0, 0),
            scan_ended: 0,
            scan_took: 0,
            areas: Vec::with_capacity(256),
            files: files::Eye::new(),
            code: Vec::with_capacity(256),
            executable: 0,
            asked_executable: false,
            takes_executable: false,
            small: 0,
            takes_small: false,
            evictor: 0,
            hurried: false,
            unmanaged: 0,
            next_count: 0,
            explained: u64::MAX,
            unexplained: 0,
            over: None,
            told_over: 0,
        }
    }

    pub fn run(&mut self, kernel: Linux) -> ! {
        let heir = fork::is_heir().then(|| self.bequest());
        // It may be one of many.
        self.unasked.keep_back(heir.is_none());
        keeper::begun();
        let (mut last, mut still) = (0, 0);
        while heir.is_none() {
            let now = self.look(&kernel);
            let resident = (now.resident * PAGE) as u64;
            Stats::set(&self.stats.resident_bytes, resident);
            self.stats.resident_peak_bytes.fetch_max(resident, Ordering::Relaxed);
            self.look_at_part(now, false, &kernel);
            if self.part.is_due(now) {
                break;
            }
            self.keep_unasked_back(now);
            still = if resident == last { still + 1 } else { 0 };
            last = resident;
            let left = self.part.left(now, still);
            let growth = (left + self.part.of_slack(SLACK)) / self.part.growers(now, still);
            let wanted = (growth / FASTEST).clamp(500_000, LONGEST_NAP);
            let is_set = self.clock.as_ref().is_some_and(|clock| clock.set(wanted));
            let nap = if is_set { LONGEST_NAP } else { self.nap(wanted, LONGEST_REST, kernel.now()) };
            self.pause(nap);
        }
        // It takes its time, and nobody looks meanwhile.
        part::hold_all();
        let keeper = self.take_up(kernel, heir);
        self.follow(keeper)
    }

    /// [`Part::look`], and in the counters what counts elsewhere.
    fn look_at_part(&mut self, now: Statm, short: bool, kernel: &Linux) -> u64 {
        let allowance = self.part.look(now, short, kernel);
        Stats::set(&self.stats.shared_bytes, self.part.shared_out(now));
        allowance
    }

    /// What is new and not registered yet is filled by huge pages faster than anything leaves, so none are given that nobody
    /// asked for while others may do the same. To what is registered the engine gives them.
    fn keep_unasked_back(&mut self, now: Statm) {
        let crowded = self.part.is_crowded(now, self.unasked.are_kept_back());
        self.unasked.keep_back(crowded);
    }

    /// What the parent left.
    fn bequest(&self) -> heir::File {
        let file = self.link.inherit(heir::TOKEN.load(Ordering::SeqCst));
        file.and_then(heir::File::open).unwrap_or_else(|| {
            // Nothing is kept for one that is killed before it comes.
            let ending = Timespec { tv_sec: 1, tv_nsec: 0 };
            if poll(&mut [PollFd::new(&self.watch, PollFlags::IN)], Some(&ending)) == Ok(1) {
                keeper::leave(0);
            }
            give_up(format_args!(
                "process {}, the child of a fork, did not get what its parent had swapped out; killed, so that it \
                 cannot go on with zeros",
                keeper::program()
            ))
        })
    }

    /// How long (ns) until the next look, if `wanted` is right for a program that runs: one that has hardly run since the last,
    /// at `now`, takes hardly any memory. It is `longest` at most for one that has not run at all. Between two looks it may begin
    /// to, which the clock tells.
    fn nap(&mut self, wanted: u64, longest: u64, now: u64) -> u64 {
        let Some(clock) = &mut self.clock else { return wanted };
        let longest = match clock.ran(now) {
            Some((0, _)) if !self.part.shares_much() => longest,
            Some((ran, passed)) if ran <= passed / HARDLY => LONGEST_REST,
            _ => wanted,
        };
        self.rest = if self.is_called { wanted } else { (2 * self.rest).clamp(wanted, wanted.max(longest)) };
        if longest != wanted {
            clock.set_at_once();
        }
        self.rest
    }

    /// Sleeps, or ends with the program.
    fn pause(&mut self, nanoseconds: u64) {
        let timeout = Timespec { tv_sec: 0, tv_nsec: nanoseconds as _ };
        let socket = self.link.fd();
        let clock = self.clock.as_ref().map_or(self.watch.as_fd(), Clock::fd);
        let mut fds =
            [self.watch.as_fd(), clock, socket].map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
        // What another thread waits for is not ours to read, and this one, which runs before all, must not wait for
        // that thread without a sleep.
        let asked = if self.link.is_quiet() { 3 } else { 2 };
        let [ended, rings, said] = match poll(&mut fds[..asked], Some(&timeout)) {
            Ok(_) => fds.each_ref().map(|fd| !fd.revents().is_empty()),
            Err(_) => [false; 3],
        };
        self.is_called = rings || said;
        if let (true, Some(clock)) = (rings, &self.clock) {
            clock.hush();
        }
        if ended {
            self.end(BYE_ENDED);
        }
        while let Some(said) = self.link.heard(said) {
            self.devices.listen(said, self.link, keeper::active());
        }
    }

    /// What is there of the program's memory. Ends with the program.
    fn look(&mut self, kernel: &Linux) -> Statm {
        exit::let_go(self.settings.limit_bytes as usize / LEFT_SHARE / (2 * UNIT));
        self.sight.look(kernel).unwrap_or_else(|| {
            self.end(BYE_EXEC);
            kernel.statm()
        })
    }

    /// The program has gone, and with it the keeper, unless somebody else has its memory.
    fn end(&mut self, reason: u64) {
        let keeper = keeper::active();
        if keeper.is_some() || exit::may_have_guests() {
            if let Some(guest) = program::guest() {
                return self.stay_for(guest);
            }
        }
        if let Some(keeper) = keeper {
            gate::end();
            self.tell_of_forks(keeper);
        }
        // What it has become goes on.
        self.tie.iter().for_each(Tie::undo);
        self.part.leave();
        self.link.tell(&Message::new(Kind::Bye, reason, 0, 0), None);
        // Who waits for the program's end wants to find its files unlocked, and its executable not in use: the last of our threads
        // to end lets them go, and the evictor comes after all others in calm times.
        if self.evictor != 0 {
            sys::call_first(self.evictor, true);
        }
        sys::exit_group(0)
    }

    /// The program has gone, and somebody else has its memory.
    fn stay_for(&mut self, guest: program::Guest) {
        keeper::set_program(&guest);
        self.watch = guest.watch;
        self.sight = program::Sight::new();
        self.clock = Clock::of(guest.id);
        self.part.follow_program();
        self.tie_to_program(keeper::active());
        fork::program_ended();
        self.link.tell(&Message::new(Kind::Guest, guest.id.into(), 0, 0), None);
    }

    /// From here on whoever is the program now goes with the keeper, which has memory out.
    fn tie_to_program(&mut self, keeper: Option<&Keeper>) {
        if let Some((tie, keeper)) = self.tie.as_mut().zip(keeper) {
            // Without it run kills the program.
            let _ = tie.to(keeper::program(), keeper.engine.kernel.uffd());
        }
    }

    /// Starts the engine and adopts what there is.
    fn take_up(&mut self, kernel: Linux, heir: Option<heir::File>) -> &'static Keeper {
        // First of all nothing more may grow unseen. Whoever faults waits for the servers, whoever unmaps for
        // the reader of events.
        let mut taking = heir::Taking::new();
        let executable;
        match &heir {
            Some(file) => {
                let (code, found) = (&mut self.code, &mut self.executable);
                self.maps.read(c"/proc/self/smaps", |line| {
                    if let Some(area) = Area::parse(line) {
                        code.extend(is_code(&area).then_some((area.start, area.end)));
                        *found += if area.is_executable() { area.end - area.start } else { 0 };
                    }
                    taking.step(line);
                });
                executable = self.executable_frames(&kernel);
                if !taking.register(file, &kernel) {
                    give_up(format_args!(
                        "process {}: what it inherits cannot be registered, or was moved by another thread during the \
                         fork and cannot be found; killed",
                        keeper::program()
                    ));
                }
            }
            None => {
                executable = self.find_areas(&kernel);
                let register =
                    |(start, end): &&(usize, usize)| kernel.register(*start, *end - *start).is_ok();
                taking.registered.extend(self.areas.iter().filter(register));
            }
        }
        // The rest takes its time, and the threads that are started are as their maker.
        sys::go_first();
        let engine = self.engine(kernel, executable, heir.as_ref());
        let code = Code::new(self.code.clone(), &engine.kernel);
        let keeper = Keeper::new(engine, self.link, code);
        keeper.engine.adopt_registered(&taking.registered);
        if heir.as_ref().is_some_and(|file| !taking.finish(file, &keeper.engine)) {
            give_up(format_args!(
                "process {}, the child of a fork: another process wrote to its memory before it had its engine; killed, so \
                 that it cannot go on with what is wrong",
                keeper::program()
            ));
        }
        heir.iter().for_each(heir::File::forget);
        // No page leaves before forks that found no engine are through; `attend` sees to that.
        keeper.engine.stand_still(true);
        self.tie_to_program(Some(keeper));
        keeper.publish();
        self.link.tell(&Message::new(Kind::Holding, 0, 0, 0), Some(keeper.engine.kernel.uffd()));
        Stats::set(&self.stats.active, 1);
        self.evictor = keeper.hire(threads::evict);
        keeper.hire(gate::attend);
        for _ in 0..SERVERS {
            keeper.hire(threads::serve);
        }
        sys::go_before_all();
        if heir.is_some() {
            // What it inherits is out already.
            keeper.code.lock().keep();
            fork::inherited();
        }
        keeper
    }

    /// The engine: what it works with, and the devices of the run.
    fn engine(
        &mut self,
        mut kernel: Linux,
        executable: Option<usize>,
        heir: Option<&heir::File>,
    ) -> Engine<Linux> {
        let fate = if heir.is_some() { "killed" } else { "it runs without a limit" };
        let (of, more) = (keeper::program(), keeper::MORE_MEMORY);
        let need = |what: Result<usize, Errno>| match what {
            Ok(address) => address,
            Err(errno) => {
                give_up(format_args!("process {of}: no memory for its engine ({errno}): {fate}; {more}"))
            }
        };
        let limit_pages = (self.settings.limit_bytes as usize) / PAGE;
        let (frames, huge) = Frames::counts(limit_pages);
        let zeros = need(memory::map(CHUNK * PAGE, PAGE));
        let base = need(memory::map(frames * PAGE, BLOCK));
        let huge_base = need(memory::map(huge * BLOCK, BLOCK));
        let probe = need(memory::map(PAGE, PAGE));
        // SAFETY: our own page.
        unsafe { (probe as *mut u8).write_volatile(1) };
        for (start, len) in [(base, frames * PAGE), (huge_base, huge * BLOCK), (probe, PAGE)] {
            if let Err(errno) = kernel.register(start, len) {
                give_up(format_args!("cannot register memory of process {}: {errno}", keeper::program()));
            }
        }
        kernel.set_probe(probe);
        if !kernel.frees_tables() {
            kernel.set_attic(need(memory::map(BLOCK, BLOCK)));
        }
        let config = Config {
            pins: Some(&exit::PINS),
            limit_pages: limit_pages as i64,
            max_order: self.settings.max_order.min(BLOCK_ORDER.into()) as u8,
            swapin: match self.settings.swapin {
                1 => Swapin::Always,
                2 => Swapin::Madvise,
                3 => Swapin::Never,
                _ => Swapin::Auto,
            },
            huge: self.settings.max_order >= BLOCK_ORDER.into() && HugePages::now() != HugePages::Never,
            zeros,
        };
        let place = Place::new(kernel.cpus().min(MOST_SHARDS), [], Box::new(self.link))
            .expect("no device, no refusal");
        self.devices.open_all(&place, self.link);
        let frames = Frames::new(base, frames / CHUNK, huge_base, huge);
        executable.into_iter().for_each(|base| frames.open_executable(base));
        let engine = Engine::new(kernel, config, frames, place, self.stats);
        match heir {
            Some(file) => engine.with_key(file.key()),
            None => engine,
        }
    }

    /// Looks after the program from then on.
    fn follow(&mut self, keeper: &'static Keeper) -> ! {
        let engine = &keeper.engine;
        let (mut still, mut last) = (0, 0);
        let (mut came, mut short_until, mut lacked) = ((0, 0), 0, false);
        loop {
            engine.stock();
            let mark = engine.budget.mark();
            let seen = self.look(&engine.kernel);
            let now = engine.kernel.now();
            // Short: it faults, and has no room for what comes, or pages of its own leave for that, which may come without a fault
            // where nothing is registered yet. Not every look meets one of few large faults.
            let [faults, left] =
                [&self.stats.pgfault, &self.stats.pgsteal].map(|count| count.load(Ordering::Relaxed));
            let before = core::mem::replace(&mut came, (faults, left));
            if (faults != before.0 || seen.resident > last) && engine.is_full() || left != before.1 {
                short_until = now + SHORT_FOR;
            }
            let allowance = self.look_at_part(seen, now < short_until, &engine.kernel);
            let lacks = self.part.lacks_share();
            if lacks && !lacked {
                self.link.tell(&Message::new(Kind::Needed, 0, 0, 0), None);
            }
            lacked = lacks;
            self.keep_unasked_back(seen);
            let [allowed, least] = [allowance, self.part.smallest()].map(|bytes| bytes as usize / PAGE);
            engine.set_limit(self.files.look(keeper, seen, allowed, least));
            engine.measured(seen.resident, mark);
            self.count_in_time(keeper, seen, allowance, now);
            {
                let mut policy = engine.policy.lock();
                policy.reserve();
                policy.unpark_in_time(now);
            }
            let over = -engine.budget.get() * PAGE as i64;
            // A device that failed may fail for long.
            let has_place = !engine.place.is_full() && !engine.place.fails(now);
            self.part.tell_excess(over.max(0) as u64, has_place);
            let is_over = over.max(self.part.over() as i64);
            // The closer the watch, the more it costs: it is close while mappings change, or while memory grows
            // that no fault announces.
            let changes = self.scan_in_time(keeper, seen, is_over, now) || seen.resident > last + 1024;
            (still, last) = (if changes { 0 } else { (still + 1).min(12) }, seen.resident);
            let holds = is_over < self.settings.limit_bytes as i64 / 128;
            self.lead_evictor(keeper, over, holds && still >= CALM);
            self.count_locks();
            keeper.settle_bequests();
            keeper.come_apart();
            fork::end_orphans();
            let far = (self.part.left(seen, 0) + self.part.of_slack(FOLLOW_SLACK)) / FASTEST;
            let nap = (500_000 * (1 + still)).min(far.max(1_000_000));
            let longest = (REST_OF_EACH * self.part.alive()).clamp(LONGEST_REST, LONGEST_NAP);
            let nap = if holds { self.nap(nap, longest, now) } else { nap };
            self.pause(nap.max(LOOK_OF_EACH * self.part.alive()));
        }
    }

    /// Counts what cannot go, if it is time.
    fn count_in_time(&mut self, keeper: &Keeper, seen: Statm, allowance: u64, now: u64) {
        if now < self.next_count {
            return;
        }
        self.count_unmanaged(keeper, seen);
        self.tell_of_forks(keeper);
        let counted = keeper.engine.kernel.now();
        let over = (seen.resident * PAGE) as u64 > allowance;
        // Or there seems to be more than was found.
        let close = over || self.unmanaged.saturating_sub(self.explained) >= self.worth_a_look();
        let rest = if close { 100 * (counted - now).max(COUNT_EVERY / 1500) } else { COUNT_EVERY };
        self.next_count = counted + rest.min(COUNT_EVERY).max(COUNT_SHARE * (counted - now));
    }

    /// Looks for what is new, if mappings have changed, or seem to have, and it is time; `over`: so many bytes are too much.
    fn scan_in_time(&mut self, keeper: &'static Keeper, seen: Statm, over: i64, now: u64) -> bool {
        let changes = keeper.engine.unmappings.load(Ordering::Relaxed).wrapping_add(wrap::mappings());
        let mappings = (seen.size, seen.data, changes);
        let rest = if over < self.worth() as i64 { SCAN_SHARE * self.scan_took } else { self.scan_took };
        let is_explained = self.unexplained < self.worth_a_look();
        if mappings == self.scanned && is_explained || now < self.scan_ended + rest {
            return false;
        }
        self.scanned = mappings;
        if self.scan_took > LONG_SCAN && keeper.engine.is_full() {
            part::hold_all();
        }
        self.look_around(keeper, over);
        if !is_explained {
            // What of it was not found cannot go.
            (self.explained, self.unexplained) = (self.unmanaged, 0);
        }
        self.scan_ended = keeper.engine.kernel.now();
        self.scan_took = self.scan_ended - now;
        true
    }

    /// How the evictor is to go to work: calm or not, or before others, by how many bytes are too much.
    fn lead_evictor(&mut self, keeper: &Keeper, over: i64, calm: bool) {
        keeper.queue.set_calm(self.evictor, calm);
        // Beside threads that are as busy it may wait for a CPU longer than the slack lasts.
        let far_over = over > FAR_OVER;
        if far_over || self.hurried {
            self.hurried = far_over;
            sys::call_first(self.evictor, far_over);
        }
        if keeper.engine.pressed() {
            keeper.engine.kick();
        }
    }

    /// Says in the counters how much cannot go. Where that leaves the rest no room, the limit gives way, and run
    /// is told, and again when it is news ([`wire::is_news`]).
    fn count_unmanaged(&mut self, keeper: &Keeper, seen: Statm) {
        let (engine, limit) = (&keeper.engine, self.settings.limit_bytes);
        let may_go = keeper.files.movable() + self.files.going();
        let bytes = (engine.unmanaged(seen.resident).saturating_sub(may_go) * PAGE) as u64;
        Stats::set(&self.stats.unmanaged_bytes, bytes);
        // New memory that was not found yet is among it, but not twice.
        let before = core::mem::replace(&mut self.unmanaged, bytes);
        let stays = bytes.min(before);
        self.explained = self.explained.min(bytes.max(before));
        self.unexplained = stays.saturating_sub(self.explained);
        let room = self.part.smallest();
        engine.give_way(((stays + room) as usize) / PAGE);
        let files = (seen.shared.saturating_sub(may_go) * PAGE) as u64;
        let stays = self.part.stuck(stays, files, seen);
        let now = engine.kernel.now();
        let (from, since, then) = *self.over.get_or_insert((now, now, stays));
        if stays <= limit {
            self.over = None;
            return;
        }
        let rests = stays.abs_diff(then) < limit / 64;
        if !rests {
            self.over = Some((from, now, stays));
        }
        // Told when it has come to rest: the figure is to be of use, and what is found late can go after all. A locked heap that is
        // collected never does.
        let has_settled = rests && now - since >= REST;
        if (has_settled || now - from >= RESTLESS) && is_news(self.told_over, stays, has_settled) {
            self.told_over = stays;
            let least = stays + room * self.part.alive();
            self.link.tell(&Message::new(Kind::Over, stays, least, has_settled.into()), None);
        }
    }

    /// Says why children of the program end, unless it or a parent of it has.
    fn tell_of_forks(&self, keeper: &Keeper) {
        static TOLD: AtomicBool = AtomicBool::new(false);
        if TOLD.load(Ordering::Relaxed) {
            return;
        }
        let _events = keeper.engine.events.read();
        if keeper.code.lock().was_forked(&keeper.engine.kernel) {
            TOLD.store(true, Ordering::Relaxed);
            let line = format_args!(
                "process {} forks past libc: what is swapped out would be zeros in such a child, so it ends with \
                 SIGSEGV at once",
                keeper::program()
            );
            self.link.log(1, line);
        }
    }

    fn count_locks(&self) {
        let stats = self.stats;
        let counters = [
            (&stats.lock_block, &stats.lock_block_waits),
            (&stats.lock_cluster, &stats.lock_cluster_waits),
            (&stats.lock_lists, &stats.lock_lists_waits),
        ];
        for (class, (taken, waits)) in LOCKS.into_iter().zip(counters) {
            let (acquired, waited) = class.counts();
            Stats::set(taken, acquired);
            Stats::set(waits, waited);
        }
    }

    /// Looks for areas that can be managed. Those that can be executed are found once there is room for frames for them,
    /// which is returned when it is new.
    fn find_areas(&mut self, kernel: &Linux) -> Option<usize> {
        self.read_areas();
        let executable = self.executable_frames(kernel);
        let small = !self.takes_small && self.small as u64 >= self.worth();
        self.takes_small |= small;
        if executable.is_some() || small {
            self.read_areas();
        }
        executable
    }

    fn read_areas(&mut self) {
        self.areas.clear();
        let mut stacks = exit::control_blocks();
        stacks.sort_unstable();
        let (takes_small, mut small) = (self.takes_small, 0);
        // A stack ends above its thread's control block; what lies there has become one mapping with it.
        let beyond_stacks = |(start, end): (usize, usize)| {
            let last = stacks[..stacks.partition_point(|block| *block < end)].last();
            let stack = last.filter(|block| **block >= start && end - start <= LARGEST_STACK);
            (stack.map_or(start, |block| (block & !(PAGE - 1)) + ABOVE_BLOCK), end)
        };
        let mut refused = |start: usize, end: usize| {
            let (from, _) = beyond_stacks((start, end));
            let is_small = end.saturating_sub(from) < SMALLEST_AREA;
            small += if is_small && from == start { end - start } else { 0 };
            is_small && (from != start || !takes_small)
        };
        // Read by the kernel: it may be unmapped meanwhile, or its file be cut.
        let bss_end_of = |at, file_end| {
            let mut header = [0; 1024];
            bss_end(sys::read_memory(at, &mut header)?, at, file_end)
        };
        let mut walk = Walk::new(self.takes_executable);
        // Ours whatever its file is called by now; what comes behind it without a gap is the program's.
        let own = wrap::own();
        let own_end = own.end.next_multiple_of(PAGE);
        let (areas, code, executable) = (&mut self.areas, &mut self.code, &mut self.executable);
        let files = &mut self.files;
        files.open();
        code.clear();
        *executable = 0;
        self.maps.read(c"/proc/self/maps", |line| {
            let Some(area) = Area::parse(line) else { return };
            files.see(&area);
            code.extend(is_code(&area).then_some((area.start, area.end)));
            if memory::is_own(area.start, area.end) {
                return;
            }
            *executable += if area.is_executable() { area.end - area.start } else { 0 };
            let found = walk.step(&area, &mut refused, bss_end_of).map(beyond_stacks);
            let beyond = found.map(|(start, end)| match own.start < end {
                true => (start.max(own_end), end),
                false => (start, end),
            });
            areas.extend(beyond.filter(|(start, end)| start < end));
        });
        self.small = small;
    }

    /// New memory of so many bytes is worth to be taken up.
    fn worth(&self) -> u64 {
        (self.settings.limit_bytes / GROWTH_SHARE).clamp(LEAST_GROWTH, MOST_GROWTH)
    }

    /// So many bytes more that cannot go are worth to look for areas that were not found.
    fn worth_a_look(&self) -> u64 {
        self.worth().max(LEAST_UNEXPLAINED)
    }

    /// Room for frames for memory that can be executed, once there is much of that. From here on it is found.
    fn executable_frames(&mut self, kernel: &Linux) -> Option<usize> {
        if (self.executable as u64) < self.worth() || core::mem::replace(&mut self.asked_executable, true) {
            return None;
        }
        // Refused where nothing may be written and executed: then there is no more of the program's, either.
        let base = memory::map_executable(EXECUTABLE * PAGE).ok()?;
        if kernel.register(base, EXECUTABLE * PAGE).is_err() {
            memory::unmap(base, EXECUTABLE * PAGE);
            return None;
        }
        self.takes_executable = true;
        Some(base)
    }

    /// Adopts areas that are there and not managed yet, if it is worth it, or much is `over` the limit, in bytes: what grows
    /// fast is slowed down by it.
    fn look_around(&mut self, keeper: &'static Keeper, over: i64) {
        let engine = &keeper.engine;
        let loans = keeper.code.lock().loans();
        let executable = self.find_areas(&engine.kernel);
        executable.into_iter().for_each(|base| engine.frames.open_executable(base));
        if !keeper.code.lock().found(&self.code, loans) {
            self.scanned = (0, 0, 0);
        }
        let mut gaps: Vec<(usize, usize)> = Vec::new();
        // Where there are as many mappings as there may be (`vm.max_map_count`) there is none for a long list.
        if gaps.try_reserve(self.areas.len()).is_err() {
            return;
        }
        {
            let regions = engine.events.read();
            for (start, end) in &self.areas {
                // What has no room is found the next time.
                regions.gaps(*start, *end, |from, to| {
                    if gaps.len() < gaps.capacity() {
                        gaps.push((from, to));
                    }
                });
            }
        }
        let grown: usize = gaps.iter().map(|(start, end)| end - start).sum();
        let worth = self.worth();
        if over < worth as i64 && (grown as u64) < self.part.of_slack(worth) {
            return;
        }
        // The program may have unmapped it since, and a thread of the engine may have got the addresses.
        let adopt = |start, end| !memory::is_own(start, end) && engine.adopt(start, end).is_ok();
        for areas in gaps.chunk_by(|(_, end), (start, _)| end == start) {
            let (first, last) = (areas[0], areas[areas.len() - 1]);
            if !adopt(first.0, last.1) && areas.len() > 1 {
                // One is refused: somebody else's userfaultfd, or gone already. It counts as memory that cannot go.
                areas.iter().for_each(|(start, end)| _ = adopt(*start, *end));
            }
        }
    }
}
