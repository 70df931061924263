//! The command `pageout`: runs programs in less memory than they need.
//!
//! | file | owns |
//! |---|---|
//! | options, config | what was written, on the command line, in the environment and the file of settings |
//! | run, program | the run: starts the program, which is looked up and judged, passes signals on, ends |
//! | serve | the server of the run's processes: one thread; `serve/client.rs`: who is served, `serve/listener.rs`: where they connect, `serve/switch.rs`: devices that come and go, `serve/told.rs`: lines for the user |
//! | mounts, trunks, device | the devices by their numbers, who has which trunk, what a specification opens |
//! | seats, unlimited | who has which share of the limit; who has none |
//! | bequests, strays, witness | what forks leave to their children; who runs without an agent; whom a signal was for |
//! | tree, memory, kernel | what /proc says of processes, of memory, and what the kernel may do |
//! | report, say, table | counters at the end, lines for the user, tables |
//! | agent, directory | what is preloaded; where sockets and the agent lie |
//! | runs, view | runs that are there, and all that a run shows of itself |
//! | ps, show, stat, swap, doctor, man | the verbs |
//! | sys | system calls |

mod agent;
mod bequests;
mod config;
mod device;
mod directory;
mod doctor;
mod kernel;
mod man;
mod memory;
mod mounts;
mod options;
mod program;
mod ps;
mod report;
mod run;
mod runs;
mod say;
mod seats;
mod serve;
mod show;
mod stat;
mod strays;
mod swap;
mod sys;
mod table;
mod tree;
mod trunks;
mod unlimited;
mod view;
mod witness;

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::process::Command;

use anyhow::{bail, Result};
use clap::error::ErrorKind;
use clap::{CommandFactory, Parser};
use pageout::api::reason;

use options::{Options, Verb};

fn main() {
    end_on_panic();
    let status = match Options::try_parse() {
        Ok(options) => carry_out(&options.verb).unwrap_or_else(|error| {
            say::error(format_args!("{error:#}"));
            error.downcast_ref::<program::Refused>().map_or(program::FAILED, |refused| refused.status)
        }),
        Err(error) if !error.use_stderr() => {
            sys::die_of_broken_pipes();
            error.print().unwrap_or_else(|why| say::unheard(&why));
            0
        }
        Err(error) => {
            say::error(one_line(&error));
            program::FAILED
        }
    };
    say::last_lines();
    std::process::exit(status);
}

/// A thread that is gone, as the server's, would leave others waiting for ever: a bug in one ends them all.
fn end_on_panic() {
    let tell = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        tell(info);
        std::process::abort();
    }));
}

fn carry_out(verb: &Verb) -> Result<i32> {
    if !matches!(verb, Verb::Run(options) if !options.dry_run) {
        sys::die_of_broken_pipes();
    }
    match verb {
        Verb::Run(options) => {
            say::set_level(options.verbose, options.quiet);
            run::run(options)
        }
        Verb::Ps(options) => ps::ps(options),
        Verb::Show(options) => show::show(options),
        Verb::Stat(options) => stat::stat(options),
        Verb::Swapon(options) => swap::on(options),
        Verb::Swapoff(options) => swap::off(options),
        Verb::Doctor(options) => doctor::doctor(options),
        Verb::Bench { args } => bench(args),
        Verb::Completions { shell } => {
            let mut text = Vec::new();
            clap_complete::generate(*shell, &mut Options::command(), "pageout", &mut text);
            say::print(String::from_utf8_lossy(&text));
            Ok(0)
        }
        Verb::Man => {
            let mut page = Vec::new();
            man::write(&mut page)?;
            say::print(String::from_utf8_lossy(&page));
            Ok(0)
        }
    }
}

/// Becomes `pageout-bench`, a program of its own: the one beside us, else by PATH.
fn bench(args: &[OsString]) -> Result<i32> {
    const NAME: &str = "pageout-bench";
    let beside =
        std::env::current_exe().map(|own| own.with_file_name(NAME)).ok().filter(|path| path.is_file());
    let why = Command::new(beside.unwrap_or_else(|| NAME.into())).args(args).exec();
    bail!("{NAME}: {}; in pageout's source: cargo install --locked --path crates/{NAME}", reason(&why))
}

/// What is wrong with the command line and where help is, in one line.
fn one_line(error: &clap::Error) -> String {
    let text = error.render().to_string();
    // Its first paragraph says what is wrong; in it, lines are the names that are missing.
    let paragraph = text.split("\n\n").next().unwrap_or_default();
    let words: Vec<&str> = paragraph.split_whitespace().collect();
    let line = match error.kind() {
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => "no command is given".into(),
        _ => words.join(" "),
    };
    let verb = std::env::args_os().nth(1).and_then(|verb| verb.into_string().ok());
    let verb = verb.filter(|verb| Options::command().find_subcommand(verb).is_some());
    let help = match (verb, error.kind()) {
        (Some(verb), _) => format!("see pageout {verb} --help"),
        // As with `time` and `nice`, which have no verbs.
        (None, ErrorKind::InvalidSubcommand | ErrorKind::UnknownArgument) => {
            "a program is run by pageout run [OPTIONS] COMMAND; see pageout --help".into()
        }
        (None, _) => "see pageout --help".into(),
    };
    format!("{}; {help}", line.strip_prefix("error: ").unwrap_or(&line))
}
