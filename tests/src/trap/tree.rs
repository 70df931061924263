//! Several programs under one limit.

use super::load::Dice;
use super::procs::own_program;
use super::span::{Span, PAGE};
use super::{ensure, sys, Ctx, Outcome, Stop, Trap};
use std::ffi::CString;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

pub const TRAPS: &[Trap] = &[
    Trap::new("tree", "three programs that fill and check at the same time", tree),
    Trap::new("tree-fork", "children that inherit memory, change a part of it and read the rest", tree_fork)
        .may_log(),
    Trap::new("tree-touch", "N programs that say their pids and touch --size of new memory together", tree_touch)
        .helper(),
    Trap::new("tree-need", "idle with most of the limit while another program needs as much", tree_need)
        .helper(),
    Trap::new("tree-need-slowly", "the same, and the other takes it little by little", tree_need_slowly).helper(),
    Trap::new("tree-many", "24 programs that have --size of memory together, at the same time", tree_many)
        .helper(),
    Trap::new("tree-fits", "24 programs that have --size of memory together and use it again and again", tree_fits)
        .helper(),
    Trap::new("tree-turns", "three programs that have all of --size in turn, twice, and live on without", tree_turns)
        .helper(),
    Trap::new("holder", "one of them: has --size of memory while it is told to", holder).helper(),
    Trap::new(
        "torture",
        "[SEED]: up to 30 processes that fork, exec, exit, kill, are killed, detach and close at random, for --seconds",
        torture,
    )
    .helper(),
    Trap::new("torture-node", "SEED FILE MILLISECONDS: one of them, after exec", torture_node).helper(),
    Trap::new("member", "one of them: fills and checks --size, again and again", member).helper(),
    Trap::new("needy", "one of them: goes through --size until it keeps nearly all of it", needy).helper(),
    Trap::new("slowly", "one of them: touches --size little by little, and must have most of it then", slowly)
        .helper(),
];

/// This program's trap `name` with `size` bytes, and further words.
fn start(name: &str, size: usize, words: &[&str]) -> Result<Child, Stop> {
    let mut command = Command::new(own_program()?);
    command.args([name, "--size", &format!("{}M", size >> 20), "--seconds", "0.3"]).args(words);
    Ok(command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?)
}

/// What it had left to say must end with `ok`.
fn finish(mut child: Child) -> Outcome {
    let mut said = String::new();
    drop(child.stdin.take());
    if let Some(mut out) = child.stdout.take() {
        out.read_to_string(&mut said)?;
    }
    let status = child.wait()?;
    ensure!(status.success() && said.ends_with("ok\n"), "a program ended with {status}: {said}");
    Ok(())
}

fn tree(ctx: &Ctx) -> Outcome {
    members(3, ctx)
}

fn tree_fits(ctx: &Ctx) -> Outcome {
    members(24, ctx)
}

/// So many that have the memory together, at the same time.
fn members(count: usize, ctx: &Ctx) -> Outcome {
    let members: Vec<Child> =
        (0..count).map(|_| start("member", ctx.size / count, &[])).collect::<Result<_, Stop>>()?;
    members.into_iter().try_for_each(finish)
}

fn member(ctx: &Ctx) -> Outcome {
    let field = sys::map(ctx.size / PAGE * PAGE)?;
    field.fill(1);
    let deadline = ctx.deadline();
    let mut generation = 1;
    while generation < 3 || Instant::now() < deadline {
        field.check(generation)?;
        generation = generation % 1000 + 1;
        field.fill(generation);
    }
    field.check(generation)
}

fn tree_fork(ctx: &Ctx) -> Outcome {
    let field = sys::map(ctx.size / 8)?;
    field.fill(1);
    let (changed, same) = field.halves();
    for generation in 2..5 {
        let mut children = Vec::new();
        for _ in 0..3 {
            let child = sys::fork(|| {
                changed.fill(1000 + generation);
                let own = sys::map(ctx.size / 8)?;
                own.fill(generation);
                same.check(1)?;
                changed.check(1000 + generation)?;
                own.check(generation)
            });
            children.push(child?);
        }
        field.check(1)?;
        children.into_iter().try_for_each(|child| sys::wait_for(child, 0))?;
    }
    let ballast = sys::map(ctx.size / 2)?;
    ballast.fill(9);
    field.check(1)?;
    ballast.check(9)
}

fn tree_touch(ctx: &Ctx) -> Outcome {
    let count = ctx.args.first().and_then(|count| count.parse().ok()).unwrap_or(2);
    // All at once.
    let mut children: Vec<Child> = (0..count)
        .map(|_| start("touch", ctx.size / count, &["mmap", "stay"]))
        .collect::<Result<_, Stop>>()?;
    let mut pids = String::new();
    for child in &mut children {
        let mut line = String::new();
        let out = child.stdout.take().map(|out| BufReader::with_capacity(1, out));
        let mut out = out.ok_or_else(|| Stop::Wrong("no standard output".into()))?;
        out.read_line(&mut line)?;
        pids += line.trim_end().trim_start_matches("pid");
        child.stdout = Some(out.into_inner());
    }
    println!("pid{pids}");
    std::io::stdout().flush()?;
    std::thread::sleep(ctx.time);
    children.into_iter().try_for_each(finish)
}

/// A program that has memory while it is told to.
struct Holder {
    child: Child,
    says: BufReader<std::process::ChildStdout>,
}

impl Holder {
    fn start(size: usize) -> Result<Self, Stop> {
        let mut child = start("holder", size, &[])?;
        let says = child.stdout.take().map(BufReader::new);
        let says = says.ok_or_else(|| Stop::Wrong("no standard output".into()))?;
        Ok(Self { child, says })
    }

    /// Has it take memory, or check it and let it go.
    fn tell(&mut self) -> Outcome {
        self.child.stdin.as_mut().map_or(Ok(()), |stdin| stdin.write_all(b"\n"))?;
        Ok(())
    }

    /// It has done what it was told.
    fn wait(&mut self) -> Outcome {
        let mut line = String::new();
        self.says.read_line(&mut line)?;
        ensure!(line == "done\n", "a program said {line:?}");
        Ok(())
    }

    fn finish(mut self) -> Outcome {
        drop(self.child.stdin.take());
        let mut said = String::new();
        self.says.read_to_string(&mut said)?;
        let status = self.child.wait()?;
        ensure!(status.success() && said == "ok\n", "a program ended with {status}: {said}");
        Ok(())
    }
}

fn holder(ctx: &Ctx) -> Outcome {
    let mut held = None;
    for line in std::io::stdin().lines() {
        line?;
        match held.take() {
            None => {
                let field = sys::map(ctx.size / PAGE * PAGE)?;
                field.fill(1);
                held = Some(field);
            }
            Some(field) => {
                field.check(1)?;
                sys::unmap(field)?;
            }
        }
        println!("done");
    }
    Ok(())
}

fn tree_many(ctx: &Ctx) -> Outcome {
    let mut holders: Vec<Holder> =
        (0..24).map(|_| Holder::start(ctx.size / 24)).collect::<Result<_, Stop>>()?;
    for _ in 0..2 {
        holders.iter_mut().try_for_each(Holder::tell)?;
        holders.iter_mut().try_for_each(Holder::wait)?;
    }
    holders.into_iter().try_for_each(Holder::finish)
}

fn tree_turns(ctx: &Ctx) -> Outcome {
    let mut holders: Vec<Holder> = (0..3).map(|_| Holder::start(ctx.size)).collect::<Result<_, Stop>>()?;
    for turn in 0..6 {
        for _ in 0..2 {
            holders[turn % 3].tell()?;
            holders[turn % 3].wait()?;
        }
    }
    holders.into_iter().try_for_each(Holder::finish)
}

fn tree_need(ctx: &Ctx) -> Outcome {
    let limit = ctx.size / 4;
    let field = sys::map(limit / 10 * 9 / PAGE * PAGE)?;
    field.fill(1);
    // Idle, and no longer new.
    std::thread::sleep(Duration::from_millis(300));
    finish(start("needy", limit / 10 * 6, &[])?)?;
    field.check(1)
}

/// Fills its memory, and goes through it again and again until nearly all of it stays.
fn needy(ctx: &Ctx) -> Outcome {
    let field = sys::map(ctx.size / NEEDY_PIECE * NEEDY_PIECE)?;
    let begun = Instant::now();
    // When half of it had been asked for, and was there.
    let (mut asked, mut half) = (None, None);
    for turn in 0.. {
        for (n, piece) in field.pieces(NEEDY_PIECE).enumerate() {
            match turn {
                0 => piece.fill(1),
                _ => piece.check(1)?,
            }
            let (resident, waited) = (sys::resident(field)?, begun.elapsed());
            if turn > 0 || (n + 1) * NEEDY_PIECE * 2 >= field.len {
                asked.get_or_insert(waited);
            }
            if resident * 2 >= field.pages() {
                half.get_or_insert(waited);
            }
            if let (Some(asked), Some(half), true) =
                (asked, half, turn > 0 && resident * 10 >= field.pages() * 9)
            {
                eprintln!(
                    "needy: half of its memory was asked for after {asked:.0?}, and is there after {half:.0?}, nine tenths \
                     after {waited:.0?}"
                );
                return field.check(1);
            }
            ensure!(waited < NEEDY, "has {resident} of its {} pages after {waited:?}", field.pages());
        }
    }
    Ok(())
}

/// It is looked at this often: each takes nearly a millisecond.
const NEEDY_PIECE: usize = 4 << 20;
/// How long it may take: 60 to 300 ms where nothing else runs; no test of speed.
const NEEDY: Duration = Duration::from_secs(2);

/// The others take a MiB at a time: what they have is hardly more than the least, of which nobody has a share.
fn tree_need_slowly(ctx: &Ctx) -> Outcome {
    let limit = ctx.size / 4;
    let field = sys::map(limit / 16 * 15)?;
    field.fill(1);
    std::thread::sleep(Duration::from_secs(1));
    for _ in 0..3 {
        finish(start("slowly", limit / 4, &[])?)?;
    }
    field.check(1)
}

fn slowly(ctx: &Ctx) -> Outcome {
    const STEP: usize = 1 << 20;
    let field = sys::map(ctx.size / STEP * STEP)?;
    for piece in field.pieces(STEP) {
        for page in 0..piece.pages() {
            piece.page(page).part(0, 8).fill(1);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    let resident = sys::resident(field)?;
    ensure!(resident * 4 >= field.pages() * 3, "has {resident} of its {} pages", field.pages());
    (0..field.pages()).try_for_each(|page| field.page(page).part(0, 8).check(1))
}

/// Processes at once.
const NODES: usize = 30;
/// How long the last may take to end.
const AFTERMATH: Duration = Duration::from_secs(20);

/// What all processes of a torture share: a word of a mapped file for each process that lives, and one for errors.
struct Board(&'static [AtomicU32]);

impl Board {
    fn open(path: &str) -> Result<Self, Stop> {
        let file = std::fs::OpenOptions::new().read(true).write(true).open(path)?;
        let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
        let span = sys::map_file(0, PAGE, protection, flags, std::os::fd::AsRawFd::as_raw_fd(&file))?;
        // SAFETY: one page of numbers that stays mapped.
        Ok(Board(unsafe { std::slice::from_raw_parts(span.as_ptr::<AtomicU32>().cast_const(), PAGE / 4) }))
    }

    fn nodes(&self) -> &[AtomicU32] {
        &self.0[1..=NODES]
    }

    fn has_failed(&self) -> bool {
        self.0[0].load(Ordering::SeqCst) != 0
    }

    fn enter(&self, pid: u32) -> bool {
        self.nodes()
            .iter()
            .any(|node| node.compare_exchange(0, pid, Ordering::SeqCst, Ordering::SeqCst).is_ok())
    }

    fn leave(&self, pid: u32) {
        for node in self.nodes() {
            let _ = node.compare_exchange(pid, 0, Ordering::SeqCst, Ordering::SeqCst);
        }
    }

    /// Is `pid` one of ours? Numbers go round: that of one that is gone may be another's by now, a keeper's too.
    fn lives(&self, pid: u32) -> bool {
        let name = |of: &str| std::fs::read_to_string(format!("/proc/{of}/comm")).ok();
        let there = pid != 0 && name(&pid.to_string()).is_some_and(|it| Some(it) == name("self"));
        if !there {
            self.leave(pid);
        }
        there
    }

    fn living(&self) -> usize {
        self.nodes().iter().filter(|node| self.lives(node.load(Ordering::SeqCst))).count()
    }
}

fn torture(ctx: &Ctx) -> Outcome {
    let seed = ctx.args.first().and_then(|seed| seed.parse().ok()).unwrap_or(std::process::id() as usize);
    println!("seed {seed}");
    let path = std::env::temp_dir().join(format!("torture-{}", std::process::id()));
    let path = path.to_str().ok_or_else(|| Stop::Wrong("an odd TMPDIR".into()))?.to_owned();
    std::fs::write(&path, [0u8; PAGE])?;
    let board = Board::open(&path)?;
    let until = SystemTime::now() + ctx.time;
    let mut dice = Dice::new(seed);
    while SystemTime::now() < until && !board.has_failed() {
        let victim = board.nodes()[dice.roll(NODES)].load(Ordering::SeqCst);
        if victim != 0 && dice.roll(16) == 0 && board.lives(victim) {
            // SAFETY: one of ours.
            unsafe { libc::kill(victim as libc::pid_t, libc::SIGKILL) };
            board.leave(victim);
        }
        let mut turn = seed;
        while board.living() < 3 {
            turn += 7919;
            let node = Node { seed: turn, size: ctx.size / 8, path: path.clone(), until };
            sys::fork(|| node.live())?;
        }
        std::thread::sleep(Duration::from_millis(20));
        // SAFETY: asks for any child.
        while unsafe { libc::waitpid(-1, std::ptr::null_mut(), libc::WNOHANG) } > 0 {}
    }
    let last = Instant::now() + AFTERMATH;
    while board.living() > 0 && Instant::now() < last {
        std::thread::sleep(Duration::from_millis(10));
    }
    let left = board.living();
    let _ = std::fs::remove_file(&path);
    ensure!(!board.has_failed(), "a process found something wrong; seed {seed}");
    ensure!(left == 0, "{left} processes did not end; seed {seed}");
    Ok(())
}

fn torture_node(ctx: &Ctx) -> Outcome {
    let [seed, path, until] = ctx.args.as_slice() else {
        return Err(Stop::Wrong("torture-node SEED FILE UNTIL".into()));
    };
    let number = |text: &String| text.parse::<u64>().map_err(|_| Stop::Wrong(format!("no number: {text}")));
    let until = UNIX_EPOCH + Duration::from_millis(number(until)?);
    Node { seed: number(seed)? as usize, size: ctx.size, path: path.clone(), until }.live()
}

/// One process of a torture.
struct Node {
    seed: usize,
    size: usize,
    path: String,
    /// By the clock of all: what is left when a process executes itself is less when it is there.
    until: SystemTime,
}

impl Node {
    fn live(&self) -> Outcome {
        // Without it all is over: whoever looked did not see this one coming.
        let Ok(board) = Board::open(&self.path) else { return Ok(()) };
        let me = std::process::id();
        // After exec it is there already.
        let known = board.nodes().iter().any(|node| node.load(Ordering::SeqCst) == me);
        if !known && !board.enter(me) {
            return Ok(());
        }
        let lived = self.act(&board);
        if let Err(stop) = &lived {
            let why = match stop {
                Stop::Wrong(why) | Stop::Skip(why) => why,
            };
            eprintln!("wrong: process {me}, seed {}: {why}", self.seed);
            board.0[0].store(1, Ordering::SeqCst);
        }
        board.leave(me);
        lived
    }

    fn act(&self, board: &Board) -> Outcome {
        let mut dice = Dice::new(self.seed);
        let field = sys::map(self.size / PAGE * PAGE)?;
        field.fill(1);
        let mut generation = 1;
        let mut children: Vec<libc::pid_t> = Vec::new();
        while SystemTime::now() < self.until && !board.has_failed() {
            match dice.roll(16) {
                0..=3 => field.check(generation)?,
                4..=7 => {
                    field.check(generation)?;
                    generation = generation % 1000 + 1;
                    field.fill(generation);
                }
                8..=10 => children.extend(self.bear(board, &mut dice, field, generation)?),
                11 if board.living() < NODES - 2 => {
                    // One that goes on by itself.
                    let seed = dice.roll(1 << 30);
                    let between = sys::fork(|| {
                        // SAFETY: no arguments.
                        unsafe { libc::setsid() };
                        let child = sys::fork(|| Node { seed, path: self.path.clone(), ..*self }.live())?;
                        board.enter(child as u32);
                        Ok(())
                    })?;
                    sys::wait_for(between, 0)?;
                }
                12 => {
                    if let Some(child) = children.pop() {
                        // SAFETY: a child that was not waited for.
                        unsafe { libc::kill(child, libc::SIGKILL) };
                        let mut status = 0;
                        // SAFETY: the integer takes the status.
                        sys::ret("waitpid", unsafe { libc::waitpid(child, &mut status, 0) })?;
                        board.leave(child as u32);
                    }
                }
                // SAFETY: nothing of ours is beyond the third.
                13 => unsafe {
                    libc::close_range(3, libc::c_uint::MAX, 0);
                },
                14 if dice.roll(3) == 0 => self.become_another(dice.roll(1 << 30))?,
                15 if dice.roll(4) == 0 => break,
                _ => std::thread::sleep(Duration::from_millis(dice.roll(10) as u64)),
            }
            children.retain(|child| {
                let mut status = 0;
                // SAFETY: the integer takes the status.
                let ended = unsafe { libc::waitpid(*child, &mut status, libc::WNOHANG) } == *child;
                // By whom it was killed, `run` would say.
                let killed = libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGKILL;
                if ended && !killed && (!libc::WIFEXITED(status) || libc::WEXITSTATUS(status) != 0) {
                    eprintln!("wrong: a child of seed {} ended with {status:#x}", self.seed);
                    board.0[0].store(1, Ordering::SeqCst);
                }
                !ended
            });
        }
        field.check(generation)
    }

    /// A child that checks what it inherits, and then lives.
    fn bear(
        &self,
        board: &Board,
        dice: &mut Dice,
        field: Span,
        generation: u16,
    ) -> Result<Option<libc::pid_t>, Stop> {
        if board.living() >= NODES - 2 {
            return Ok(None);
        }
        let seed = dice.roll(1 << 30);
        let again = dice.roll(2) == 0;
        let child = sys::fork(|| {
            field.check(generation)?;
            field.fill(generation + 1);
            if again {
                std::thread::sleep(Duration::from_millis(5));
            }
            field.check(generation + 1)?;
            sys::unmap(field)?;
            Node { seed, path: self.path.clone(), ..*self }.live()
        })?;
        // One that is about to live counts, too.
        let known = board.nodes().iter().any(|node| node.load(Ordering::SeqCst) == child as u32);
        if !known {
            board.enter(child as u32);
        }
        Ok(Some(child))
    }

    fn become_another(&self, seed: usize) -> Outcome {
        let program = CString::new(own_program()?.as_os_str().as_bytes()).expect("no zero in a path");
        let until = self.until.duration_since(UNIX_EPOCH).expect("later than 1970").as_millis();
        let words = [
            "torture-node",
            "--size",
            &format!("{}K", self.size >> 10),
            &seed.to_string(),
            &self.path,
            &until.to_string(),
        ];
        let words: Vec<CString> = words.iter().map(|word| CString::new(*word).expect("no zero")).collect();
        let mut argv = vec![program.as_ptr()];
        argv.extend(words.iter().map(|word| word.as_ptr()));
        argv.push(std::ptr::null());
        // SAFETY: strings that end with zero, and a null behind them.
        unsafe { libc::execv(program.as_ptr(), argv.as_ptr()) };
        Err(Stop::Wrong(format!("execv: errno {}", sys::errno())))
    }
}
