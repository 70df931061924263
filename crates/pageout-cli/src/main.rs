//! The command `pageout`: runs programs in less memory than they need.
//!
//! `run` is the parent of the program and the server of its processes: [`run`] starts and ends, [`serve`] serves,
//! [`device`] owns where pages go, [`agent`] what is preloaded. [`runs`] finds what runs already, and a [`view`] is
//! all that a run shows of itself; the verbs print parts of it.

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
mod size;
mod spec;
mod stat;
mod strays;
mod swap;
mod sys;
mod table;
mod tree;
mod trunks;
mod view;

use anyhow::Result;
use clap::{CommandFactory, Parser};

use options::{Options, Verb};

fn main() {
    let status = match Options::try_parse() {
        Ok(options) => carry_out(&options.verb).unwrap_or_else(|error| {
            say::error(format_args!("{error:#}"));
            error.downcast_ref::<program::Refused>().map_or(program::FAILED, |refused| refused.status)
        }),
        Err(error) if !error.use_stderr() => {
            let _ = error.print();
            0
        }
        Err(error) => {
            say::error(one_line(&error));
            program::FAILED
        }
    };
    std::process::exit(status);
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
        Verb::Completions { shell } => {
            clap_complete::generate(*shell, &mut Options::command(), "pageout", &mut std::io::stdout());
            Ok(0)
        }
        Verb::Man => man::write(&mut std::io::stdout()).map(|()| 0),
    }
}

/// What is wrong with the command line and where help is, in one line.
fn one_line(error: &clap::Error) -> String {
    let text = error.render().to_string();
    // Its first paragraph says what is wrong; in it, lines are the names that are missing.
    let paragraph = text.split("\n\n").next().unwrap_or_default();
    let words: Vec<&str> = paragraph.split_whitespace().collect();
    let line = words.join(" ");
    let verb = std::env::args().nth(1).filter(|verb| Options::command().find_subcommand(verb).is_some());
    let help = verb.map_or_else(|| "pageout --help".into(), |verb| format!("pageout {verb} --help"));
    format!("{}; see {help}", line.strip_prefix("error: ").unwrap_or(&line))
}
