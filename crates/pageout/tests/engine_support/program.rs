//! A model program: threads that use memory on the simulated kernel, and what every page must hold.
//!
//! A page holds one token, all of it, or zeros. The model is exact but for the time between the first and the
//! second half of `madvise`, in which a page may read as the token or as zeros. Calls that change mappings do
//! not overlap; accesses race with everything. Who moves or grows memory has others that would wait until the engine has
//! caught up, as the agent's `mremap` and `realloc` do.

use pageout::kernel::sim::{Access, Advised, Call, Simulated};
use std::collections::VecDeque;

pub const PAGE: usize = 4096;

/// Numbers from a seed (splitmix64).
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    pub fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }
}

/// What a page of the program must hold.
#[derive(Clone, Copy, Debug, Default)]
pub struct Value {
    pub mapped: bool,
    pub writable: bool,
    pub token: u64,
    /// Removals under way: it may read as zeros.
    pub removing: u32,
    /// It was written meanwhile, before or after it was removed.
    pub late: bool,
    /// Freed: it may read as zeros until it is written.
    pub lazy: bool,
    /// Raised SIGBUS.
    pub lost: bool,
    /// It was to be unmapped, which was refused: it may raise SIGBUS, and be zeros once memory has grown.
    pub doubtful: bool,
}

enum Doing {
    Nothing,
    Touch {
        page: usize,
        write: Option<u64>,
        left: usize,
    },
    /// Until it has returned; then the engine has to catch up.
    Call {
        call: Option<Call>,
        range: (usize, usize),
        then: Then,
    },
}

#[derive(Clone, Copy, PartialEq)]
enum Then {
    Return,
    /// Nothing was done.
    Refused,
    /// The range was unmapped: the kernel may give it to others before the call returns.
    Unmapped,
    /// Something came to the range from another one, which the kernel may give to others as well.
    Moved {
        from: (usize, usize),
    },
    Zap {
        free: bool,
    },
}

/// What a program does, by weight.
#[derive(Clone, Copy, Debug)]
pub struct Habits {
    pub touch: usize,
    pub run: usize,
    pub mmap: usize,
    pub munmap: usize,
    /// `munmap` that is refused.
    pub refuse: usize,
    pub dontneed: usize,
    pub free: usize,
    pub mremap: usize,
    /// Growth, which is in place but for some that moves as well.
    pub grow: usize,
    pub mprotect: usize,
    pub pin: usize,
    pub share: usize,
    /// Data may be lost: SIGBUS is an answer.
    pub faulty: bool,
    /// Huge pages.
    pub huge: bool,
    /// Memory is moved past libc, by several threads at once.
    pub bare: bool,
}

impl Habits {
    pub const ALL: Habits = Habits {
        touch: 60,
        run: 20,
        mmap: 3,
        munmap: 2,
        refuse: 1,
        dontneed: 3,
        free: 1,
        mremap: 3,
        grow: 2,
        mprotect: 1,
        pin: 2,
        share: 0,
        faulty: false,
        huge: false,
        bare: false,
    };

    pub const ACCESS: Habits = Habits {
        mmap: 0,
        munmap: 0,
        refuse: 0,
        dontneed: 0,
        free: 0,
        mremap: 0,
        grow: 0,
        mprotect: 0,
        pin: 0,
        ..Self::ALL
    };

    /// Nothing but the engine gives or takes memory.
    pub fn is_access_alone(&self) -> bool {
        self.mmap + self.munmap + self.dontneed + self.free + self.mremap == 0
    }
}

pub struct Program {
    pub random: Random,
    pub values: Vec<Value>,
    pub habits: Habits,
    threads: Vec<Doing>,
    tokens: u64,
    /// Accesses and system calls that came to an end.
    pub done: u64,
    /// No new work is begun.
    pub ending: bool,
    /// A fork is under way.
    pub forking: bool,
    /// Zeros are written too.
    pub zeros: bool,
    base: usize,
    log: VecDeque<String>,
}

impl Program {
    /// `pages` pages, nothing mapped, `threads` threads.
    pub fn new(base: usize, pages: usize, threads: usize, habits: Habits, seed: u64) -> Self {
        Self {
            random: Random(seed),
            values: vec![Value::default(); pages],
            habits,
            threads: (0..threads).map(|_| Doing::Nothing).collect(),
            tokens: 0,
            done: 0,
            ending: false,
            forking: false,
            zeros: true,
            base,
            log: VecDeque::new(),
        }
    }

    pub fn at(&self, page: usize) -> usize {
        self.base + page * PAGE
    }

    pub fn say(&mut self, what: String) {
        if self.log.len() == 5000 {
            self.log.pop_front();
        }
        self.log.push_back(what);
    }

    pub fn print_log(&self) {
        for line in &self.log {
            eprintln!("  {line}");
        }
        for (thread, doing) in self.threads.iter().enumerate() {
            match doing {
                Doing::Nothing => {}
                Doing::Touch { page, write, left } => {
                    eprintln!("  thread {thread}: page {page} write {write:?}, {left} more")
                }
                Doing::Call { call, range, .. } => eprintln!("  thread {thread}: {call:?} on {range:?}"),
            }
        }
    }

    pub fn idle(&self) -> bool {
        self.threads.iter().all(|doing| matches!(doing, Doing::Nothing))
    }

    /// Maps all pages `first..first + n`.
    pub fn map(&mut self, kernel: &Simulated, first: usize, n: usize) {
        let huge = self.habits.huge && self.random.one_in(2);
        let mut call = kernel.mmap(self.at(first), n * PAGE, huge);
        assert!(kernel.advance_call(&mut call), "the first mmap");
        self.mapped(first, n);
    }

    fn mapped(&mut self, first: usize, n: usize) {
        for value in &mut self.values[first..first + n] {
            *value = Value {
                mapped: true,
                writable: true,
                token: 0,
                lazy: false,
                lost: false,
                doubtful: false,
                ..*value
            };
        }
    }

    /// One thread goes on a little.
    pub fn step(&mut self, kernel: &Simulated) {
        let thread = self.random.below(self.threads.len());
        self.step_thread(kernel, thread);
    }

    pub fn step_thread(&mut self, kernel: &Simulated, thread: usize) {
        match std::mem::replace(&mut self.threads[thread], Doing::Nothing) {
            Doing::Nothing if self.ending => {}
            Doing::Nothing => self.begin(kernel, thread),
            Doing::Touch { page, write, left } => self.touch(kernel, thread, page, write, left),
            Doing::Call { mut call, range, then } => {
                let is_over = call.is_none();
                if call.as_mut().is_some_and(|call| kernel.advance_call(call)) {
                    call = None;
                    self.done += 1;
                    if matches!(then, Then::Zap { .. }) {
                        // What is discarded goes later than the kernel says that nothing changes any more.
                        self.threads[thread] = Doing::Call { call, range, then };
                        return;
                    }
                }
                if is_over {
                    self.returned(kernel, range, then);
                }
                let catches_up = matches!(then, Then::Moved { .. }) && !self.habits.bare;
                if call.is_some() || catches_up && kernel.is_held(true) {
                    self.threads[thread] = Doing::Call { call, range, then };
                }
            }
        }
    }

    /// All system calls go on a little.
    pub fn step_calls(&mut self, kernel: &Simulated) {
        for thread in 0..self.threads.len() {
            if matches!(self.threads[thread], Doing::Call { .. }) {
                self.step_thread(kernel, thread);
            }
        }
    }

    fn touch(&mut self, kernel: &Simulated, thread: usize, page: usize, write: Option<u64>, left: usize) {
        match kernel.access(thread as u32, self.at(page), write) {
            Access::Waits => {
                self.threads[thread] = Doing::Touch { page, write, left };
                return;
            }
            Access::Done(old) => {
                self.done += 1;
                self.saw(page, old, write)
            }
            Access::Sigbus => {
                assert!(self.habits.faulty || self.values[page].doubtful, "SIGBUS on page {page}");
                self.values[page].lost = true;
            }
            Access::Segv => {
                let value = self.values[page];
                assert!(!value.mapped || (write.is_some() && !value.writable), "SIGSEGV on page {page}");
                return;
            }
        }
        if left > 0 && page + 1 < self.values.len() {
            let write = write.map(|_| self.token());
            self.threads[thread] = Doing::Touch { page: page + 1, write, left: left - 1 };
        }
    }

    fn token(&mut self) -> u64 {
        self.tokens += 1;
        // Sometimes zeros are written, as programs do.
        if self.zeros && self.random.one_in(8) {
            0
        } else {
            self.tokens
        }
    }

    /// The program found `old` in a page, and wrote.
    fn saw(&mut self, page: usize, old: u64, write: Option<u64>) {
        let value = &mut self.values[page];
        let zero = old == 0 && (value.removing > 0 || value.lazy);
        let right = if value.lost { value.removing > 0 } else { old == value.token || zero };
        let value = *value;
        assert!(right, "page {page} ({:#x}) holds {old:#x}, should be {value:?}", self.at(page));
        (self.values[page].lost, self.values[page].doubtful) = (false, false);
        if zero {
            self.values[page].token = 0;
        }
        if let Some(token) = write {
            self.say(format!("wrote {token} to page {page}"));
            let value = &mut self.values[page];
            (value.token, value.lazy, value.late) = (token, false, value.removing > 0);
        }
    }

    /// A range on which no call is under way; `unmapped`: or only one that has unmapped it.
    fn range(&mut self, unmapped: bool) -> Option<(usize, usize)> {
        let most = match self.random.below(4) {
            0 => 4,
            1 => 40,
            2 => 200,
            _ => 1100,
        };
        let n = 1 + self.random.below(most.min(self.values.len()));
        let mut first = self.random.below(self.values.len() - n + 1);
        let mut n = n;
        if self.random.one_in(4) {
            first = first / 512 * 512;
            n = n.next_multiple_of(512).min(self.values.len() - first);
        }
        self.is_free((first, n), unmapped).then_some((first, n))
    }

    fn is_free(&self, (first, n): (usize, usize), unmapped: bool) -> bool {
        let apart = |range: &(usize, usize)| range.0 >= first + n || range.0 + range.1 <= first;
        self.threads.iter().all(|doing| match doing {
            Doing::Call { range, then: Then::Unmapped, .. } => unmapped || apart(range),
            Doing::Call { range, then: Then::Moved { from }, .. } => {
                apart(range) && (unmapped || apart(from))
            }
            Doing::Call { range, .. } => apart(range),
            _ => true,
        })
    }

    fn all(&self, (first, n): (usize, usize), what: impl Fn(&Value) -> bool) -> bool {
        self.values[first..first + n].iter().all(what)
    }

    fn begin(&mut self, kernel: &Simulated, thread: usize) {
        let h = self.habits;
        let weights = [
            h.touch, h.run, h.mmap, h.munmap, h.dontneed, h.free, h.mremap, h.mprotect, h.pin, h.share,
            h.refuse, h.grow,
        ];
        let mut chosen = self.random.below(weights.iter().sum());
        let mut which = 0;
        while chosen >= weights[which] {
            chosen -= weights[which];
            which += 1;
        }
        match which {
            0 | 1 => {
                let page = self.random.below(self.values.len());
                let write = self.random.one_in(2).then(|| self.token());
                let left = if which == 1 { self.random.below(300) } else { 0 };
                if self.values[page].mapped {
                    self.threads[thread] = Doing::Touch { page, write, left };
                }
            }
            2 => {
                let Some(range) = self.range(true) else { return };
                let quiet = self.is_free(range, false);
                if !quiet && !self.all(range, |value| !value.mapped) {
                    return;
                }
                self.say(format!("mmap {range:?}"));
                let huge = h.huge && self.random.one_in(2);
                let call = kernel.mmap(self.at(range.0), range.1 * PAGE, huge);
                self.mapped(range.0, range.1);
                self.threads[thread] = Doing::Call { call: Some(call), range, then: Then::Return };
            }
            3 => {
                let Some(range) = self.range(false) else { return };
                self.say(format!("munmap {range:?}"));
                self.start_munmap(kernel, thread, range);
            }
            4 | 5 => {
                let Some(range) = self.range(false) else { return };
                if !self.all(range, |value| value.mapped) {
                    return;
                }
                let free = which == 5;
                let advised = kernel.madvise(self.at(range.0), range.1 * PAGE, free);
                if !matches!(advised, Advised::Mixed) {
                    self.say(format!("{} {range:?}: {advised:?}", if free { "free" } else { "dontneed" }));
                    for value in &mut self.values[range.0..range.0 + range.1] {
                        value.removing += 1;
                    }
                }
                match advised {
                    Advised::Waits(call) => {
                        self.threads[thread] =
                            Doing::Call { call: Some(call), range, then: Then::Zap { free } };
                    }
                    Advised::Done => self.removed(range, free),
                    Advised::Mixed => {}
                }
            }
            6 => self.mremap(kernel, thread),
            7 => {
                let Some(range) = self.range(false) else { return };
                let writable = self.random.one_in(3);
                self.say(format!("mprotect {range:?} writable {writable}"));
                kernel.mprotect(self.at(range.0), range.1 * PAGE, writable);
                for value in &mut self.values[range.0..range.0 + range.1] {
                    value.writable = writable && value.mapped;
                }
            }
            8 => {
                let page = self.random.below(self.values.len());
                kernel.pin(self.at(page), self.random.one_in(2));
                for _ in 0..20 {
                    let page = self.random.below(self.values.len());
                    kernel.pin(self.at(page), false);
                }
            }
            9 => {
                self.say("fork".into());
                kernel.share();
            }
            10 => {
                let Some(range) = self.range(false) else { return };
                self.start_refused_munmap(kernel, thread, range);
            }
            _ => self.grow(kernel),
        }
    }

    /// May a thread move memory now?
    fn has_turn(&self) -> bool {
        self.habits.bare
            || !self.threads.iter().any(|doing| matches!(doing, Doing::Call { then: Then::Moved { .. }, .. }))
    }

    /// May memory grow now? Libc's waits for a fork.
    fn may_grow(&self) -> bool {
        self.habits.bare || !self.forking
    }

    /// Memory grows by pages, in a mapping that has others before them.
    fn grown(&mut self, (first, n): (usize, usize)) {
        if n == 0 {
            return;
        }
        self.values.iter_mut().filter(|value| value.doubtful).for_each(|value| value.lazy = true);
        let writable = self.values[first - 1].writable;
        self.mapped(first, n);
        self.values[first..first + n].iter_mut().for_each(|value| value.writable = writable);
    }

    /// A mapping grows in place: as a rule over what was just cut off.
    fn grow(&mut self, kernel: &Simulated) {
        if !self.has_turn() || !self.may_grow() {
            return;
        }
        let Some((first, n)) = self.range(true) else { return };
        let ends = |page: &usize| self.values[page - 1].mapped && !self.values[*page].mapped;
        let Some(end) = (first.max(1)..first + n).find(ends) else { return };
        // The kernel may have been told of what was there, or not yet.
        let free = |page: &usize| !self.values[*page].mapped && self.is_free((*page, 1), true);
        let n = (end..first + n).take_while(free).count();
        self.start_grow(kernel, (end, n));
    }

    /// What is mapped before the range grows over it.
    pub fn start_grow(&mut self, kernel: &Simulated, (first, n): (usize, usize)) {
        self.say(format!("grow {first}+{n}"));
        kernel.grow(self.at(first), n * PAGE);
        self.grown((first, n));
    }

    fn mremap(&mut self, kernel: &Simulated, thread: usize) {
        if !self.has_turn() {
            return;
        }
        let Some((from, mut n)) = self.range(false) else { return };
        let grows = self.habits.grow > 0 && self.may_grow() && self.random.one_in(3);
        let grown = if grows { self.random.below(40) } else { 0 };
        let mapped = |value: &Value| value.mapped && value.writable;
        if !self.all((from, n), mapped) || n + grown > self.values.len() {
            return;
        }
        let mut to = self.random.below(self.values.len() - n - grown + 1);
        // The kernel likes the highest addresses that are free: often those that were left last.
        if let Some(left) = self.left_last().filter(|left| left.1 > grown) {
            n = n.min(left.1 - grown);
            to = left.0 + left.1 - grown - n;
        }
        let target = (to, n + grown);
        let apart = from + n <= to || to + n + grown <= from;
        // The kernel may choose what others have left, before it has told of that.
        let left = self.is_free(target, true) && self.all(target, |value| !value.mapped);
        if !apart || !(left || self.is_free(target, false)) {
            return;
        }
        self.say(format!("mremap {from}+{n} to {to}+{}", n + grown));
        self.start_mremap_grown(kernel, thread, (from, n), to, grown);
    }

    /// A range that somebody has left and not returned yet.
    fn left_last(&mut self) -> Option<(usize, usize)> {
        let thread = self.random.below(self.threads.len());
        match &self.threads[thread] {
            Doing::Call { range, then: Then::Unmapped, .. } => Some(*range),
            Doing::Call { then: Then::Moved { from }, .. } => Some(*from),
            _ => None,
        }
    }

    fn unmapped(&mut self, (first, n): (usize, usize)) {
        self.values[first..first + n].fill(Value::default());
    }

    fn returned(&mut self, kernel: &Simulated, range: (usize, usize), then: Then) {
        if let Then::Zap { free } = then {
            self.say(format!("zap {range:?}"));
            kernel.zap(self.at(range.0), range.1 * PAGE, free);
            self.removed(range, free);
        }
    }

    fn removed(&mut self, (first, n): (usize, usize), free: bool) {
        for value in &mut self.values[first..first + n] {
            value.removing -= 1;
            if free || value.late {
                value.lazy = true;
                value.late &= value.removing > 0;
            } else {
                (value.token, value.lazy, value.lost, value.doubtful) = (0, false, false, false);
            }
        }
    }

    /// The kernel takes a page that was freed.
    pub fn reclaim_lazy(&mut self, kernel: &Simulated) {
        let page = self.random.below(self.values.len());
        if self.values[page].lazy && kernel.drop_lazy(self.at(page)) {
            self.values[page].token = 0;
            self.values[page].lazy = false;
        }
    }

    /// A thread that is idle touches a run of pages.
    pub fn start_touch(&mut self, thread: usize, page: usize, n: usize, write: bool) {
        assert!(matches!(self.threads[thread], Doing::Nothing));
        let write = write.then(|| self.token());
        self.threads[thread] = Doing::Touch { page, write, left: n - 1 };
    }

    /// A thread that is idle discards pages.
    pub fn start_dontneed(&mut self, kernel: &Simulated, thread: usize, range: (usize, usize)) {
        assert!(matches!(self.threads[thread], Doing::Nothing));
        let Advised::Waits(call) = kernel.madvise(self.at(range.0), range.1 * PAGE, false) else {
            panic!("{range:?} is not registered")
        };
        for value in &mut self.values[range.0..range.0 + range.1] {
            value.removing += 1;
        }
        self.threads[thread] = Doing::Call { call: Some(call), range, then: Then::Zap { free: false } };
        // The event is queued.
        self.step_thread(kernel, thread);
    }

    /// A thread that is idle maps pages anew.
    pub fn start_mmap(&mut self, kernel: &Simulated, thread: usize, range: (usize, usize)) {
        assert!(matches!(self.threads[thread], Doing::Nothing));
        let call = kernel.mmap(self.at(range.0), range.1 * PAGE, false);
        self.mapped(range.0, range.1);
        self.threads[thread] = Doing::Call { call: Some(call), range, then: Then::Return };
    }

    /// Pages are guarded for a moment.
    pub fn guard(&mut self, kernel: &Simulated, (first, n): (usize, usize)) {
        kernel.guard(self.at(first), n * PAGE);
        self.values[first..first + n].iter_mut().for_each(|value| value.token = 0);
    }

    /// A thread that is idle unmaps pages.
    pub fn start_munmap(&mut self, kernel: &Simulated, thread: usize, range: (usize, usize)) {
        assert!(matches!(self.threads[thread], Doing::Nothing));
        let call = kernel.munmap(self.at(range.0), range.1 * PAGE);
        self.unmapped(range);
        self.threads[thread] = Doing::Call { call: Some(call), range, then: Then::Unmapped };
    }

    /// Another process unmaps pages, and is killed before that is told.
    pub fn munmap_untold(&mut self, kernel: &Simulated, range: (usize, usize)) {
        kernel.munmap_untold(self.at(range.0), range.1 * PAGE);
        self.unmapped(range);
    }

    /// A thread that is idle is refused to unmap pages.
    pub fn start_refused_munmap(&mut self, kernel: &Simulated, thread: usize, range: (usize, usize)) {
        assert!(matches!(self.threads[thread], Doing::Nothing));
        self.say(format!("munmap {range:?} is refused"));
        for value in self.values[range.0..range.0 + range.1].iter_mut().filter(|value| value.mapped) {
            value.doubtful = true;
            value.lazy |= kernel.has_grown();
        }
        let call = kernel.refuse_munmap(self.at(range.0), range.1 * PAGE);
        self.threads[thread] = Doing::Call { call: Some(call), range, then: Then::Refused };
    }

    /// A thread that is idle moves pages, with their mapping.
    pub fn start_mremap(&mut self, kernel: &Simulated, thread: usize, (from, n): (usize, usize), to: usize) {
        self.start_mremap_grown(kernel, thread, (from, n), to, 0);
    }

    /// The same, by `grown` pages larger there.
    pub fn start_mremap_grown(
        &mut self,
        kernel: &Simulated,
        thread: usize,
        (from, n): (usize, usize),
        to: usize,
        grown: usize,
    ) {
        assert!(matches!(self.threads[thread], Doing::Nothing));
        let then = Then::Moved { from: (from, n) };
        let call = kernel.mremap(self.at(from), self.at(to), n * PAGE, grown * PAGE);
        for i in 0..n {
            self.values[to + i] = self.values[from + i];
            // It may be moved before it is applied that it was to be unmapped: it is not there any more, then.
            self.values[to + i].lazy |= self.values[to + i].doubtful;
        }
        self.grown((to + n, grown));
        self.unmapped((from, n));
        self.threads[thread] = Doing::Call { call: Some(call), range: (to, n + grown), then };
    }

    /// Thread 0, idle, reads a run of pages.
    pub fn read_run(&mut self, page: usize, n: usize) {
        assert!(matches!(self.threads[0], Doing::Nothing));
        self.threads[0] = Doing::Touch { page, write: None, left: n - 1 };
    }
}
