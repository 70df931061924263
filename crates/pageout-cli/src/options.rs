//! The command line: what there is to say, not what it means. One table makes help, manual and completions.

use std::ffi::{OsStr, OsString};
use std::path::PathBuf;

use clap::builder::{PossibleValue, StringValueParser, TypedValueParser};
use clap::{Arg, Args, Command, Parser, Subcommand, ValueHint};
use clap_complete::Shell;

/// Run programs in less memory than they need
#[derive(Debug, Parser)]
#[command(name = "pageout", version, max_term_width = 100, args_override_self = true)]
pub struct Options {
    /// What to do.
    #[command(subcommand)]
    pub verb: Verb,
}

/// The subcommands.
#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Run a program in less memory than it needs
    Run(RunOptions),
    /// Show the processes of running trees
    Ps(PsOptions),
    /// Show the swap devices of running trees
    Show(ShowOptions),
    /// Show what a running tree swaps, again and again
    Stat(StatOptions),
    /// Give a running tree another swap device
    Swapon(SwaponOptions),
    /// Take a swap device from a running tree: what is there comes home or goes to the others
    Swapoff(SwapoffOptions),
    /// Say what this kernel and user may do, with the line that mends each lack
    Doctor(SettingOptions),
    /// Compare with the kernel's swap: becomes pageout-bench
    #[command(disable_help_flag = true)]
    Bench {
        /// What pageout-bench is to do, and its options
        #[arg(value_name = "ARG", trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<OsString>,
    },
    /// Write the completions for a shell to standard output
    Completions {
        /// The shell: bash, elvish, fish, powershell or zsh
        shell: Shell,
    },
    /// Write the manual page to standard output
    Man,
}

/// What `--swapin` takes; the place in it is what keepers are told.
pub const SWAPIN: [&str; 4] = ["auto", "always", "madvise", "never"];

/// Words that shells complete. Any is taken: it is understood, or complained of, like one in a file.
#[derive(Clone)]
struct Listed(&'static [&'static str]);

impl TypedValueParser for Listed {
    type Value = String;

    fn parse_ref(&self, command: &Command, _: Option<&Arg>, value: &OsStr) -> Result<String, clap::Error> {
        StringValueParser::new().parse_ref(command, None, value)
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        Some(Box::new(self.0.iter().map(|word| PossibleValue::new(*word))))
    }
}

/// `pageout run`.
#[derive(Debug, Args)]
pub struct RunOptions {
    #[command(flatten)]
    pub settings: SettingOptions,

    /// Say what would be done, and do nothing
    #[arg(short = 'n', long)]
    pub dry_run: bool,

    /// Say what is done, and at the end what was swapped; twice: much more
    #[arg(short, long, action = clap::ArgAction::Count)]
    pub verbose: u8,

    /// Say errors only
    #[arg(short, long, action = clap::ArgAction::Count, conflicts_with = "verbose")]
    pub quiet: u8,

    /// The program and its arguments
    #[arg(
        value_name = "COMMAND", required = true, trailing_var_arg = true, value_hint = ValueHint::CommandWithArguments
    )]
    pub command: Vec<OsString>,
}

/// What can also stand in the environment and in a file. Kept as text: it is read where it is known where it came
/// from, so that a message can say that. The last of several holds, for aliases.
#[derive(Debug, Default, Args)]
pub struct SettingOptions {
    /// Resident memory that the program and its descendants may keep together: 512M, 4GiB, 50% (of the smaller of RAM and the cgroup's limit),
    /// or max [default: 80%]
    #[arg(short, long, value_name = "SIZE", allow_hyphen_values = true)]
    pub memory: Option<String>,

    /// Where pages go; may be repeated. PATH or mem, then any of ,size=8G ,pri=5 ,discard ,rotational
    /// [default: an unlinked file in $TMPDIR, else in the working directory]
    #[arg(short, long, value_name = "SPEC")]
    pub swap: Vec<String>,

    /// Whether huge pages come back whole: auto (as faults suggest), always (at the first fault), madvise (as auto, and no mapping is
    /// marked for which the program did not ask for them) or never [default: auto]
    #[arg(long, value_name = "WHEN", value_parser = Listed(&SWAPIN), hide_possible_values = true)]
    pub swapin: Option<String>,

    /// Largest order of pages that a fault brings in, 0 (4K) to 9 (2M) [default: 9]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub max_order: Option<String>,

    /// Kill a descendant that would run without a limit, instead of saying so once
    #[arg(long)]
    pub strict: bool,

    /// Limit descendants, too, that execute programs as another user. For root's runs; their users can then read and
    /// change what all have in swap
    #[arg(long)]
    pub any_user: bool,

    /// At exit write the counters to FILE as JSON; - is standard error, as a table
    #[arg(long, value_name = "FILE")]
    pub stats: Option<String>,

    /// Read settings from FILE [default: /etc/pageout.conf, then ~/.config/pageout.conf]
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
}

/// Which running tree is meant.
#[derive(Debug, Default, Args)]
pub struct WhichRun {
    /// The tree: process id of pageout or of a process of the tree, or the name of its program
    #[arg(long, value_name = "ID", allow_hyphen_values = true)]
    pub run: Option<String>,
}

/// `pageout swapon`.
#[derive(Debug, Args)]
pub struct SwaponOptions {
    /// The device, as --swap of run takes it: PATH or mem, then any of ,size=8G ,pri=5 ,discard ,rotational
    #[arg(value_name = "SPEC")]
    pub spec: String,

    #[command(flatten)]
    pub which: WhichRun,
}

/// `pageout swapoff`.
#[derive(Debug, Args)]
pub struct SwapoffOptions {
    /// The device, as pageout show names it, or as swapon took it
    #[arg(value_name = "NAME")]
    pub name: String,

    #[command(flatten)]
    pub which: WhichRun,
}

/// `pageout ps`.
#[derive(Debug, Args)]
pub struct PsOptions {
    #[command(flatten)]
    pub which: WhichRun,

    /// Write all that there is to see of each tree, as a JSON array
    #[arg(long)]
    pub json: bool,
}

/// `pageout show`.
#[derive(Debug, Args)]
pub struct ShowOptions {
    #[command(flatten)]
    pub which: WhichRun,

    /// Write sizes in bytes
    #[arg(long)]
    pub bytes: bool,

    /// Write columns without padding, blanks in names as \x20
    #[arg(long)]
    pub raw: bool,

    /// Leave the heading out
    #[arg(long)]
    pub noheadings: bool,

    /// Write as /proc/swaps does
    #[arg(long, conflicts_with_all = ["bytes", "raw", "noheadings", "json"])]
    pub summary: bool,

    /// Write a JSON array, sizes in bytes
    #[arg(long, conflicts_with_all = ["bytes", "raw", "noheadings"])]
    pub json: bool,
}

/// `pageout stat`.
#[derive(Debug, Args)]
pub struct StatOptions {
    #[command(flatten)]
    pub which: WhichRun,

    /// Write one JSON object a line, sizes in bytes
    #[arg(long)]
    pub json: bool,

    /// Seconds between lines; without it there is one, of the time since the start
    #[arg(value_name = "DELAY", allow_negative_numbers = true)]
    pub delay: Option<String>,

    /// How many lines [default: until the tree ends]
    #[arg(value_name = "COUNT", allow_negative_numbers = true)]
    pub count: Option<String>,
}
