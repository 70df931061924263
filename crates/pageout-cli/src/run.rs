//! `pageout run`: starts the program with the agent preloaded, serves its processes, ends as it ends.
//!
//! The terminal, the process group and the signals' dispositions are the program's as they were ours. We do not die
//! of signals while it lives: those that are sent to us alone go on to the program, or, from itself, which takes us for its
//! parent, to ours; those that go to the whole group (Ctrl-C, `kill -- -PGID`) reach it without us, unless it has a group of its own.
//! When it has ended and other processes of the tree live on (daemons), we stay to serve them, for without us their limit would be gone;
//! a signal ends us then. Where it ended because it was told to, we end as well: whoever supervises it waits for us, and would have
//! waited for the program alone.

use std::collections::HashSet;
use std::ffi::OsString;
use std::fmt;
use std::io::ErrorKind;
use std::iter;
use std::os::fd::AsFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Command, ExitStatus};
use std::time::{Duration, Instant};

use anyhow::{bail, Context, Result};
use pageout::api::{reason, Bytes, Spec};
use pageout::wire::{DeviceSettings, Settings, ANY_USER, ASKED_HUGE_ONLY, DEVICES, ENV_RUN, PADDED_PID};

use crate::agent;
use crate::config::Config;
use crate::device::Device;
use crate::kernel;
use crate::memory;
use crate::options::RunOptions;
use crate::program::{self, Refused, FAILED, NOT_EXECUTABLE, NOT_FOUND};
use crate::report::Target;
use crate::say;
use crate::serve::Server;
use crate::strays::Strays;
use crate::sys::{self, Signal, Signals};
use crate::tree;
use crate::witness::Witness;

/// Signals that end a program. When there is none left to end they end us.
const ENDING: [i32; 4] = [libc::SIGHUP, libc::SIGINT, libc::SIGQUIT, libc::SIGTERM];
/// Those of clocks, which may have been set before we were executed, and come before the program has them.
const CLOCKS: [i32; 3] = [libc::SIGALRM, libc::SIGVTALRM, libc::SIGPROF];
/// What the kernel says to the first of a session alone when its terminal goes away.
const HANGUP: [i32; 2] = [libc::SIGHUP, libc::SIGCONT];
/// What the kernel says to all of a terminal's foreground group.
const TERMINALS: [i32; 5] = [libc::SIGHUP, libc::SIGCONT, libc::SIGINT, libc::SIGQUIT, libc::SIGWINCH];
/// Other signals that are the program's affair; those of real time are as well. Not those of job control: the
/// terminal stops the whole group, and we must stop with it for the shell to notice. What our own faults raise ends us all the
/// same: the kernel does not wait until that is unblocked, nor does abort(3).
const OTHERS: [i32; 18] = [
    libc::SIGABRT,
    libc::SIGBUS,
    libc::SIGFPE,
    libc::SIGILL,
    libc::SIGPIPE,
    libc::SIGSEGV,
    libc::SIGTRAP,
    libc::SIGURG,
    libc::SIGUSR1,
    libc::SIGUSR2,
    libc::SIGWINCH,
    libc::SIGCONT,
    libc::SIGXCPU,
    libc::SIGXFSZ,
    libc::SIGIO,
    libc::SIGPWR,
    libc::SIGSTKFLT,
    libc::SIGSYS,
];

/// Open files below which nothing works: devices, sockets, and what the first process takes.
pub const LEAST_OPEN_FILES: u64 = 64;

/// After which a fork's child that has not come for what it inherits is stopped, or traced, and run ends if it was told to.
const LAST_HEIRS: Duration = Duration::from_secs(5);

/// How long the keepers of ended processes may take to say what they have to say: longer than it takes to know who has
/// none.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// Runs the program; our exit status.
pub fn run(options: &RunOptions) -> Result<i32> {
    let inherited = sys::Inherited::look();
    // What else there is to say may be for want of it.
    kernel::check_proc()?;
    let config = Config::resolve(&options.settings)?;
    let program = program::resolve(&options.command[0])?;
    let specs = match config.swap.as_slice() {
        [] => &[Spec::unnamed()],
        specs if specs.len() > DEVICES => bail!("--swap: {} devices; takes at most {DEVICES}", specs.len()),
        specs => specs,
    };
    if options.dry_run {
        config.stats.as_deref().map(Target::check).transpose()?;
        return dry_run(&config, specs, &program);
    }
    let target = config.stats.clone().map(Target::of).transpose()?;
    say::wait_for_nobody();
    let all = memory::available_bytes();
    if all < config.limit_bytes && config.limit_bytes < u64::MAX {
        let who_kills = match memory::cgroup_limit() {
            Some(_) => "control group, which kills",
            None => "machine, whose kernel kills",
        };
        say::warning(format_args!(
            "the limit of {} is more than the {} of this {who_kills} before anything is swapped; give less with --memory",
            Bytes(config.limit_bytes),
            Bytes(all)
        ));
    }
    // From here on what we have made goes when we are told to end.
    let watched: Vec<i32> = ENDING.into_iter().chain(CLOCKS).chain(OTHERS).chain([libc::SIGCHLD]).collect();
    let signals = Signals::block(&watched).context("signals")?;
    let dispositions = sys::Dispositions::change();
    let umask = sys::let_owner_in();
    let open_files = raise_open_files()?;
    let warn = |line: fmt::Arguments<'_>| say::warning(line);
    let open = |(index, spec)| Device::open(spec, config.limit_bytes, index, &warn);
    let devices = specs.iter().enumerate().map(open);
    let devices = devices.collect::<Result<Vec<_>>>()?;
    kernel::check()?;
    let device_for_all = kernel::device_for_all(config.reach())?;
    let agent = agent::ready(config.reach(), false)?;
    let settings = settings(&config);
    let names: Vec<String> = devices.iter().map(Device::shown).collect();
    say::info(format_args!("limit {}, swap to {}", Bytes(config.limit_bytes), names.join(", ")));
    let mut server = Server::start(devices, settings, device_for_all)?;

    sys::become_subreaper().context("subreaper")?;
    let mut command = command(&program, &options.command, &agent, &server);
    let witness = Witness::start();
    witness.iter().for_each(|witness| witness.note_beginning_of(&mut command));
    signals.restore_in(&mut command, dispositions, open_files, umask);
    // Of what we were before: a shell that had begun them executed us. And the witness.
    let earlier = tree::descendants_but(std::process::id() as i32, &HashSet::new());
    // Nobody else got what came so far.
    let early: Vec<Signal> = iter::from_fn(|| signals.next()).collect();
    if let Some(signal) = early.iter().find(|signal| is_to_end(signal)) {
        return Ok(end_as(ExitStatus::from_raw(signal.number), server));
    }
    let main = command.spawn().map_err(|error| not_started(&program, &error))?.id() as i32;
    // Not before: the program stays as it is.
    sys::go_first();
    // What the program closes, or leaves, must be closed, and left: a pipe has an end, a lock is free, a file system can be
    // unmounted.
    sys::let_go_of_standard_streams();
    let _ = std::env::set_current_dir("/");
    inherited.let_go();

    let name = Path::new(&options.command[0]).file_name().unwrap_or(&options.command[0]);
    server.set_main(main, name.to_string_lossy().into_owned());
    let strays = Strays::new(&config, &agent, server.socket_path(), &earlier);
    server.set_strangers(strays.strangers());
    let status = look_after(main, (&signals, early, witness), &mut server, strays);
    server.close();
    let status = status?;
    say::info(server.report().summary());
    if let Some(Err(error)) = target.map(|target| server.report().write(target)) {
        // The program's status says how it went, which may have taken days.
        say::error(format_args!("{error:#}"));
    }
    Ok(end_as(status, server))
}

/// How the program is started. In our own environment, which it inherits as it is: one made for it would be in another order, and
/// without what is no variable.
fn command(program: &Path, words: &[OsString], agent: &Path, server: &Server) -> Command {
    std::env::set_var("LD_PRELOAD", agent::preload(std::env::var_os("LD_PRELOAD"), agent));
    std::env::set_var(ENV_RUN, server.socket_path());
    // Who is told by its number that something is for it is the program; the agent writes its own there.
    let own = std::process::id();
    for name in ["LISTEN_PID", "WATCHDOG_PID"] {
        if std::env::var(name).is_ok_and(|pid| pid.parse() == Ok(own)) {
            std::env::set_var(name, format!("{own:0PADDED_PID$}"));
        }
    }
    let mut command = Command::new(program);
    command.arg0(&words[0]).args(&words[1..]);
    command
}

/// Our exit status is the program's. What a signal ended ends us by that signal: a shell leaves its loop only then, and a service
/// that was stopped so has not failed.
fn end_as(status: ExitStatus, server: Server) -> i32 {
    let Some(signal) = status.signal() else { return status.code().unwrap_or_default() };
    drop(server);
    say::last_lines();
    sys::die_of(signal);
    // As the first of its namespace nobody dies of one.
    128 + signal
}

/// Serves until the program has ended, and those that it left; how it ended. `early`: signals that came before it was there.
fn look_after(
    main: i32,
    (signals, early, witness): (&Signals, Vec<Signal>, Option<Witness>),
    server: &mut Server,
    mut strays: Strays,
) -> Result<ExitStatus> {
    let (told, leaves, deserted) = (Vec::new(), None, None);
    let parent = sys::parent();
    let mut watch =
        Watch { main, parent, witness, begins: true, ended: None, told, leaves, deserted, said: false };
    early.into_iter().for_each(|signal| watch.pass_on_early(signal));
    let mut has_just_ended = false;
    loop {
        // What it has sent right before its end is read first.
        if let Some(status) = watch.ended.filter(|_| !has_just_ended && watch.is_over(server, &strays)) {
            return Ok(status);
        }
        let at_once = has_just_ended.then_some(Duration::ZERO);
        let timeout = at_once.into_iter().chain(watch.due_in()).chain([strays.due_in()]).min();
        server.serve(signals.as_fd(), timeout).context("serving")?;
        let looked = sys::since_boot();
        for signal in iter::from_fn(|| signals.next()) {
            match watch.ended {
                None => watch.pass_on(signal),
                Some(_) if has_just_ended && watch.is_for_parent(&signal) => watch.send_on(signal),
                // nohup(1) wants what was left to stay as well.
                Some(_) if is_to_end(&signal) => {
                    watch.leave(Duration::ZERO, format!("ended by signal {}", signal.number));
                }
                Some(_) => {}
            }
        }
        watch.pass_on_judged(looked);
        if let Some(pid) = watch.look_apart() {
            strays.pass_over(pid);
            server.set_strangers(strays.strangers());
        }
        has_just_ended = watch.reap();
        if has_just_ended {
            strays.look_soon();
        }
        if strays.due_in().is_zero() {
            let found = strays.look(&server.known(), |name| server.has_told_of(name));
            server.cannot_limit(found);
            server.set_strangers(strays.strangers());
        }
    }
}

/// What is known of the program, and of those that it leaves.
struct Watch {
    main: i32,
    /// Ours as the program began, if we had one.
    parent: Option<i32>,
    witness: Option<Witness>,
    /// What is read came, or may have come, before the program was there.
    begins: bool,
    /// How the program ended.
    ended: Option<ExitStatus>,
    /// What was to end it.
    told: Vec<i32>,
    /// From when on we end, whoever is left, and why.
    leaves: Option<(Instant, String)>,
    /// Since when nobody who is served lives any more, and the program neither.
    deserted: Option<Instant>,
    /// That we stay.
    said: bool,
}

impl Watch {
    /// The program has ended: is there nobody to stay for?
    fn is_over(&mut self, server: &mut Server, strays: &Strays) -> bool {
        // It has told its parent something.
        if self.witness.is_some() {
            return false;
        }
        let now = Instant::now();
        if let Some((due, why)) = self.leaves.as_ref().filter(|(due, _)| *due <= now) {
            // A fork's child on the way to what it inherits would be killed.
            if server.has_no_heirs() || *due + LAST_HEIRS <= now {
                leave_behind(server, why);
                return true;
            }
        }
        if server.living() > 0 {
            self.deserted = None;
            if !std::mem::replace(&mut self.said, true) {
                say::info("the program has ended; staying for the processes that it left");
            }
            return false;
        }
        let patience = strays.patience().unwrap_or(LAST_WORDS);
        let patient = self.deserted.get_or_insert_with(Instant::now).elapsed() < patience;
        // Some of what was left may be about to say hello. A fork's child that has something to inherit cannot
        // do without us, however long it takes.
        let more = server.awaits_heirs() || patient && tree::has_children_but(&server.known());
        !more && (server.is_idle() || !patient)
    }

    /// We end so soon, if not sooner.
    fn leave(&mut self, after: Duration, why: String) {
        let due = Instant::now() + after;
        if self.leaves.as_ref().is_none_or(|(before, _)| due < *before) {
            self.leaves = Some((due, why));
        }
    }

    /// When to look again.
    fn due_in(&self) -> Option<Duration> {
        // A child that says nothing ends without a word to us, too.
        let soon = self.deserted.or(self.leaves.as_ref().map(|(due, _)| *due));
        let soon = soon.map(|_| Duration::from_millis(20));
        soon.into_iter().chain(self.witness.as_ref().and_then(Witness::due_in)).min()
    }

    /// A signal from before the program was there goes on to it.
    fn pass_on_early(&mut self, signal: Signal) {
        self.note(&signal);
        if signal.number != libc::SIGCHLD {
            signal.send_to(self.main);
        }
    }

    /// A signal goes on to the program, unless it has got it.
    fn pass_on(&mut self, mut signal: Signal) {
        // What it begins may know its parent's number too (a shell's `$PPID`), and may have ended when the signal is judged. To be ended
        // is meant the program: our number is known as its own, too.
        let is_below = |pid| pid != self.main && tree::descends_from(pid, self.main);
        let is_from_below = signal.sender.is_some_and(is_below);
        if is_from_below && !is_to_end(&signal) {
            signal.sender = Some(self.main);
        }
        // What the program's own send to all of a group does not end us.
        if !is_from_below && !self.is_for_parent(&signal) {
            self.note(&signal);
        }
        if signal.number != libc::SIGCHLD {
            self.witness.iter_mut().for_each(Witness::came);
        }
        // The terminal's own go to all; the program may not have been there yet.
        let may_be_ours = signal.sender.is_some() || self.begins;
        let is_missed = signal.sender.is_none() && self.misses(signal.number);
        let is_beyond = || signal.sender.is_none() && is_beyond(self.main, signal.number);
        let is_nobodys = signal.number == libc::SIGCHLD || is_beyond();
        match &mut self.witness {
            _ if is_nobodys => {}
            _ if is_missed => self.send_on(signal),
            Some(witness) if may_be_ours => witness.ask(signal),
            None if may_be_ours => self.send_on(signal),
            _ => {}
        }
    }

    /// The program has a group of its own, as by `timeout` or `setsid`: what goes to ours does not reach it.
    fn is_apart(&self) -> bool {
        self.ended.is_none() && sys::has_other_group(self.main)
    }

    /// Has a signal that the kernel sent to us not gone to the program as well?
    fn misses(&self, number: i32) -> bool {
        let is_for_first = HANGUP.contains(&number) && sys::leads_session();
        // Unless it is its group that the terminal is for.
        let passes_by =
            || TERMINALS.contains(&number) && self.is_apart() && !sys::is_in_foreground(self.main);
        CLOCKS.contains(&number) || is_for_first || passes_by()
    }

    /// Who sees what such a program gets besides, if that has begun just now.
    fn look_apart(&mut self) -> Option<i32> {
        if !self.is_apart() {
            return None;
        }
        self.witness.as_mut()?.look_apart()
    }

    /// Is what we got from the program, and nobody else, for whom it takes us? As the first of our namespace we are not known as
    /// its parent only: who ends a container knows that number.
    fn is_for_parent(&self, signal: &Signal) -> bool {
        signal.sender == Some(self.main) && std::process::id() != 1
    }

    /// Who has started us. Who has those whose parents have ended, as the first process or a session's manager, has not.
    fn parent(&self) -> Option<i32> {
        self.parent.filter(|parent| sys::parent() == Some(*parent))
    }

    /// One that was for us alone.
    fn send_on(&mut self, signal: Signal) {
        let to = if self.is_for_parent(&signal) {
            self.parent()
        } else {
            self.note(&signal);
            Some(self.main).filter(|_| self.ended.is_none())
        };
        to.into_iter().for_each(|pid| signal.send_to(pid));
    }

    /// What is to end the program is remembered.
    fn note(&mut self, signal: &Signal) {
        if is_to_end(signal) && !self.told.contains(&signal.number) {
            self.told.push(signal.number);
        }
    }

    /// What the witness has not got goes on. All has been read that came before `looked`.
    fn pass_on_judged(&mut self, looked: u64) {
        self.begins = false;
        let Some(witness) = &mut self.witness else { return };
        witness.has_read(looked);
        let is_apart = self.is_apart();
        let next = |watch: &mut Self| {
            // What the program has sent is for our parent. A shell, too, tells its jobs when the terminal goes away.
            let is_missed = |signal: &Signal| {
                is_apart && signal.sender != Some(watch.main) && !is_beyond(watch.main, signal.number)
            };
            watch.witness.as_mut()?.next_for_us(is_missed)
        };
        while let Some(signal) = next(self) {
            self.send_on(signal);
        }
        if self.ended.is_some() {
            self.let_witness_go();
        }
    }

    /// The program has ended: what it has sent before may be for its parent.
    fn let_witness_go(&mut self) {
        self.witness = self.witness.take().and_then(|witness| witness.only_from(self.main));
    }

    /// Waits for who has ended; true if the program has.
    fn reap(&mut self) -> bool {
        let had_ended = self.ended.is_some();
        while let Some((pid, status)) = sys::reap() {
            // Another may have its number by now.
            if pid == self.main && self.ended.is_none() {
                self.ended = Some(status);
                self.let_witness_go();
                // SIGTERM asks for nothing else; the others may have asked for something long ago.
                let was_told = |signal| signal == libc::SIGTERM || status.signal() == Some(signal);
                if self.told.iter().copied().any(was_told) {
                    self.leave(LAST_WORDS, "the program has ended as it was told".into());
                }
            } else if let Some(witness) = self.witness.take_if(|witness| witness.is(pid)) {
                witness.has_ended().into_iter().for_each(|signal| self.send_on(signal));
            } else {
                self.witness.iter_mut().for_each(|witness| witness.has_lost(pid));
            }
        }
        !had_ended && self.ended.is_some()
    }
}

/// Who is served still, if anybody is, will be no longer.
fn leave_behind(server: &Server, why: &str) {
    let left = server.living();
    if left > 0 {
        say::warning(format_args!(
            "{why}; processes that the program left ({left}) go on with what they have, and what they execute has no limit"
        ));
    }
}

/// Whether a signal ends us where there is no program to end.
fn is_to_end(signal: &Signal) -> bool {
    ENDING.contains(&signal.number) && !sys::is_ignored(signal.number)
}

/// A terminal goes away, which the program, of this number, is to outlive: it has left the session.
fn is_beyond(main: i32, number: i32) -> bool {
    HANGUP.contains(&number) && sys::has_other_session(main)
}

/// Each process of the tree takes descriptors here. The limit as it was; the program gets that.
fn raise_open_files() -> Result<u64> {
    let most = sys::limit_of(libc::RLIMIT_NOFILE).1;
    if most < LEAST_OPEN_FILES {
        bail!("open files: at most {most}; allow {LEAST_OPEN_FILES} or more (ulimit -n)");
    }
    Ok(sys::raise_limit(libc::RLIMIT_NOFILE))
}

/// All but the devices, which come and go.
fn settings(config: &Config) -> Settings {
    // Within another run that one may have said so.
    let is_asked_only = std::env::var_os(ENV_RUN).is_none() && sys::gives_huge_pages_if_asked();
    let flag = |flag, is_set| if is_set { flag } else { 0 };
    Settings {
        limit_bytes: config.limit_bytes,
        swapin: config.swapin,
        max_order: config.max_order,
        flags: flag(ASKED_HUGE_ONLY, is_asked_only) | flag(ANY_USER, config.any_user),
        device: [DeviceSettings::default(); DEVICES],
    }
}

fn not_started(program: &Path, error: &std::io::Error) -> Refused {
    let shown = program.display();
    match error.kind() {
        // It was there a moment ago.
        ErrorKind::NotFound => {
            Refused::new(NOT_FOUND, format!("{shown}: not found; check its name and PATH"))
        }
        // Not by the program, but on the way to it.
        _ if error.raw_os_error() == Some(libc::EAGAIN) => {
            let remedy = "raise ulimit -u, or pids.max of the control group";
            Refused::new(FAILED, format!("{shown}: no room for another process; {remedy}"))
        }
        _ => Refused::new(NOT_EXECUTABLE, format!("{shown}: {}; name a program", reason(error))),
    }
}

/// Says what would be done, and leaves nothing behind. What would be refused is, as far as that can be seen.
fn dry_run(config: &Config, specs: &[Spec], program: &Path) -> Result<i32> {
    raise_open_files()?;
    kernel::check()?;
    say::print(format_args!("program  {}\n", program.display()));
    say::print(format_args!("memory   {}\n", Bytes(config.limit_bytes)));
    for (index, spec) in specs.iter().enumerate() {
        let (name, size) = Device::plan(spec, config.limit_bytes, &specs[..index])?;
        say::print(format_args!("swap     {name}, up to {size}\n"));
    }
    say::print(format_args!("agent    {}\n", agent::ready(config.reach(), true)?.display()));
    Ok(0)
}
