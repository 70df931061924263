//! The settings of a run: option beats environment beats file beats default.
//!
//! A value is kept with where it came from until it is understood, so that every complaint names the place to
//! correct. Reads files and the environment; changes nothing.

use std::collections::HashMap;
use std::ffi::OsString;
use std::fmt;
use std::fs::File;
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use anyhow::{anyhow, bail, Context, Result};
use pageout::api::{reason, split_number, Bytes, Spec};
use pageout::stats::MAX_ORDER;
use pageout::wire::ENV_RUN;

use crate::directory::{self, Reach};
use crate::memory;
use crate::options::{SettingOptions, SWAPIN};
use crate::say;
use crate::sys;

/// The least limit that a process can run in: its code, stacks and the engine's own memory.
pub const LEAST_LIMIT: Bytes = Bytes::mib(16);

/// What a run is to be like.
#[derive(Debug)]
pub struct Config {
    /// Resident memory in bytes; `u64::MAX` is no limit.
    pub limit_bytes: u64,
    /// Where pages go; empty for the default.
    pub swap: Vec<Spec>,
    /// As in `pageout::wire::Settings`.
    pub swapin: u32,
    /// Largest order, 0 to 9.
    pub max_order: u32,
    /// Kill what cannot be preloaded.
    pub strict: bool,
    /// Serve what runs as another user.
    pub any_user: bool,
    /// Where the counters go.
    pub stats: Option<PathBuf>,
}

/// Where a value came from, as a complaint names it.
#[derive(Debug, Clone)]
enum Source {
    Option(&'static str),
    Environment(String),
    File(PathBuf, usize, &'static str),
    Default,
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Option(name) => write!(f, "--{name}"),
            Self::Environment(name) => f.write_str(name),
            Self::File(path, line, name) => write!(f, "{}:{line}: {name}", path.display()),
            Self::Default => f.write_str("default"),
        }
    }
}

/// A value as it was written.
#[derive(Debug, Clone)]
struct Written {
    text: String,
    source: Source,
}

impl Written {
    fn complain(&self, takes: &str) -> anyhow::Error {
        anyhow!("{} {}: takes {takes}", self.source, say::shown(&self.text))
    }
}

/// The settings that there are, by their names in files.
const NAMES: [&str; 7] = ["memory", "swap", "swapin", "max-order", "strict", "any-user", "stats"];

/// A part of how much, nobody knows.
#[derive(Debug)]
struct Unseen(String);

impl fmt::Display for Unseen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: /proc/meminfo does not say of how much; give a size with -m, as 4G", self.0)
    }
}

impl std::error::Error for Unseen {}

/// All that was written, the strongest source of each name only.
type Values = HashMap<&'static str, Vec<Written>>;

impl Config {
    /// The settings by the options, the environment and the files.
    pub fn resolve(options: &SettingOptions) -> Result<Self> {
        Self::understand(&gather(options)?)
    }

    /// The same for who only looks: a part of memory that is not to be seen is no limit, and is complained of.
    pub fn look(options: &SettingOptions) -> Result<(Self, Option<anyhow::Error>)> {
        let mut values = gather(options)?;
        match Self::understand(&values) {
            Err(error) if error.is::<Unseen>() => {
                let none = Written { text: "max".into(), source: Source::Default };
                values.insert("memory", vec![none]);
                Ok((Self::understand(&values)?, Some(error)))
            }
            understood => Ok((understood?, None)),
        }
    }

    /// Whose processes are served.
    pub fn reach(&self) -> Reach {
        if self.any_user {
            Reach::Any
        } else {
            Reach::Own
        }
    }

    fn understand(values: &Values) -> Result<Self> {
        let one = |name| values.get(name).and_then(|all| all.last());
        let default_memory = Written { text: "80%".into(), source: Source::Default };
        Ok(Self {
            limit_bytes: limit(one("memory").unwrap_or(&default_memory), memory::available_bytes)?,
            swap: values.get("swap").map_or(Ok(Vec::new()), |all| {
                let spec = |w: &Written| Spec::parse(&w.text).with_context(|| w.source.to_string());
                all.iter().map(spec).collect()
            })?,
            swapin: one("swapin").map_or(Ok(0), swapin)?,
            max_order: one("max-order").map_or(Ok(MAX_ORDER as u32), max_order)?,
            strict: one("strict").map_or(Ok(false), yes_or_no)?,
            any_user: one("any-user").map_or(Ok(false), any_user)?,
            stats: one("stats").map(|w| PathBuf::from(&w.text)),
        })
    }
}

/// All that was written, by the strongest source.
fn gather(options: &SettingOptions) -> Result<Values> {
    let mut values = Values::new();
    for (path, named) in files(options) {
        let Some(text) = read(&path, named)? else { continue };
        // A later file replaces what an earlier one says, it does not add to it.
        values.extend(parse(&path, text.trim_start_matches('\u{feff}'))?);
    }
    values.extend(from_environment(|name| std::env::var_os(name))?);
    for (name, meant) in misspelled(std::env::vars_os().map(|(name, _)| name)) {
        say::warning(format_args!("{name}: no such setting, and not used; there is {meant}"));
    }
    values.extend(from_options(options));
    Ok(values)
}

/// What a file of settings says; none if there is none and nobody `named` it. One that nobody named may be another user's, left in
/// the environment by su or setpriv: it is opened once, for its name may be another file's the next time, and not waited for.
fn read(path: &Path, named: bool) -> Result<Option<String>> {
    let shown = path.display();
    let failed = |error: io::Error| {
        let remedy = match named {
            true => "; name another with --config or PAGEOUT_CONFIG",
            false => "; make it readable, or set HOME to your own",
        };
        anyhow!("{shown}: cannot be read: {}{remedy}", reason(&error))
    };
    let mut options = File::options();
    if !named {
        options.custom_flags(libc::O_NONBLOCK);
    }
    let mut file = match options.read(true).open(path) {
        Ok(file) => file,
        // A service's HOME may be /dev/null.
        Err(error) if !named && matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
            return Ok(None)
        }
        Err(error) => return Err(failed(error)),
    };
    if !named {
        let about = file.metadata().map_err(failed)?;
        if !directory::is_trusted(about.uid()) {
            bail!("{shown}: belongs to another user; set HOME to your own, or name it with --config");
        }
        // Where there are to be no settings that may be a link to /dev/null.
        if !about.is_file() && about.rdev() != libc::makedev(1, 3) {
            bail!("{shown}: is no file; remove it, or name it with --config");
        }
    }
    let mut text = String::new();
    file.read_to_string(&mut text).map_err(failed)?;
    Ok(Some(text))
}

/// The files to read, weakest first, and whether somebody named it, so that it must be there.
fn files(options: &SettingOptions) -> Vec<(PathBuf, bool)> {
    let from_environment = || std::env::var_os("PAGEOUT_CONFIG").filter(|path| !path.is_empty());
    let named = options.config.clone().or_else(|| from_environment().map(PathBuf::from));
    if let Some(path) = named {
        return vec![(path, true)];
    }
    let home = sys::directory_from("XDG_CONFIG_HOME")
        .or_else(|| sys::directory_from("HOME").map(|home| home.join(".config")));
    let mut files = vec![(PathBuf::from("/etc/pageout.conf"), false)];
    files.extend(home.map(|home| (home.join("pageout.conf"), false)));
    files
}

/// `name = value` lines; `#` opens a comment; `swap` may be repeated.
fn parse(path: &Path, text: &str) -> Result<Values> {
    let mut values = Values::new();
    for (index, line) in text.lines().enumerate() {
        let number = index + 1;
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let at = || format!("{}:{number}", path.display());
        let (name, value) =
            line.split_once('=').with_context(|| format!("{}: takes lines like memory = 512M", at()))?;
        let (name, value) = (name.trim(), value.trim());
        let Some(name) = NAMES.into_iter().find(|known| *known == name) else {
            bail!("{}: {name}: no such setting; there are {}", at(), NAMES.join(", "));
        };
        // As TOML has it, and the shell.
        if value.starts_with(['"', '\'']) {
            bail!("{}: {name} {value}: takes a value without quotes", at());
        }
        if value.contains(" #") || value.contains("\t#") {
            bail!("{}: {name} {value}: takes a value without a comment; give that a line of its own", at());
        }
        let source = Source::File(path.to_owned(), number, name);
        values.entry(name).or_default().push(Written { text: value.to_owned(), source });
    }
    Ok(values)
}

/// A setting's name in the environment.
fn variable(name: &str) -> String {
    format!("PAGEOUT_{}", name.to_ascii_uppercase().replace('-', "_"))
}

/// Those of the environment that have nearly the name of a setting, with that. Others that begin like one may be anybody's.
fn misspelled(environment: impl Iterator<Item = OsString>) -> Vec<(String, String)> {
    let others = [ENV_RUN, "PAGEOUT_CONFIG", "PAGEOUT_AGENT", "PAGEOUT_BIN"].map(String::from);
    let known: Vec<String> = NAMES.into_iter().map(variable).chain(others).collect();
    let written = environment.filter_map(|name| name.into_string().ok());
    let unknown = written.filter(|name| name.starts_with("PAGE") && !known.contains(name));
    let meant = |name: &String| {
        let near = known.iter().map(|known| (strsim::osa_distance(name, known), known)).min()?;
        (near.0 <= 2).then(|| (name.clone(), near.1.clone()))
    };
    unknown.filter_map(|name| meant(&name)).collect()
}

/// `PAGEOUT_MEMORY` and so on; in `PAGEOUT_SWAP` several devices stand with `;` between them.
fn from_environment(get: impl Fn(&str) -> Option<OsString>) -> Result<Values> {
    let mut values = Values::new();
    for name in NAMES {
        let variable = variable(name);
        let Some(text) = get(&variable).filter(|text| !text.is_empty()) else { continue };
        let Ok(text) = text.into_string() else {
            bail!("{variable}: not UTF-8; write it in UTF-8, or unset it")
        };
        let separator = if name == "swap" { ';' } else { '\0' };
        let written = text
            .split(separator)
            .filter(|part| separator == '\0' || !part.trim().is_empty())
            .map(|part| Written { text: part.trim().into(), source: Source::Environment(variable.clone()) });
        values.insert(name, written.collect());
    }
    Ok(values)
}

fn from_options(options: &SettingOptions) -> Values {
    let mut values = Values::new();
    let mut put = |name: &'static str, text: &String| {
        let written = Written { text: text.clone(), source: Source::Option(name) };
        values.entry(name).or_default().push(written);
    };
    options.memory.iter().for_each(|text| put("memory", text));
    options.swap.iter().for_each(|text| put("swap", text));
    options.swapin.iter().for_each(|text| put("swapin", text));
    options.max_order.iter().for_each(|text| put("max-order", text));
    options.stats.iter().for_each(|text| put("stats", text));
    for (name, is_set) in [("strict", options.strict), ("any-user", options.any_user)] {
        if is_set {
            put(name, &"yes".to_owned());
        }
    }
    values
}

fn limit(written: &Written, available: impl Fn() -> u64) -> Result<u64> {
    const TAKES: &str = "a size like 512M, 4GiB, 50% or max";
    // As control groups say it, and systemd.
    if ["max", "infinity"].contains(&written.text.as_str()) {
        return Ok(u64::MAX);
    }
    let bytes = match written.text.strip_suffix('%') {
        Some(percent) => {
            let number = split_number(percent).filter(|(_, rest)| rest.is_empty());
            let (percent, _) = number.ok_or_else(|| written.complain(TAKES))?;
            if !(percent > 0.0 && percent <= 100.0) {
                return Err(written.complain("a percentage above 0% and up to 100%"));
            }
            let available = available();
            if available == u64::MAX {
                bail!(Unseen(format!("{} {}", written.source, written.text)));
            }
            (available as f64 * percent / 100.0) as u64
        }
        None => written.text.parse::<Bytes>().map_err(|_| written.complain(TAKES))?.0,
    };
    if bytes < LEAST_LIMIT.0 {
        let source = &written.source;
        let bytes = if written.text.ends_with(|c: char| c.is_ascii_digit()) { " bytes" } else { "" };
        bail!("{source} {}{bytes}: too small; the least that works is {LEAST_LIMIT}", written.text);
    }
    Ok(bytes)
}

fn swapin(written: &Written) -> Result<u32> {
    let index = SWAPIN.iter().position(|word| *word == written.text);
    index.map(|index| index as u32).ok_or_else(|| written.complain("auto, always, madvise or never"))
}

fn max_order(written: &Written) -> Result<u32> {
    let order = written.text.parse().ok().filter(|order| *order <= MAX_ORDER as u32);
    order.ok_or_else(|| written.complain("an order from 0 (4K) to 9 (2M)"))
}

fn yes_or_no(written: &Written) -> Result<bool> {
    match written.text.as_str() {
        "yes" | "true" | "1" | "on" => Ok(true),
        "no" | "false" | "0" | "off" => Ok(false),
        _ => Err(written.complain("yes or no")),
    }
}

fn any_user(written: &Written) -> Result<bool> {
    let any = yes_or_no(written)?;
    if any && sys::euid() != 0 {
        bail!("{}: for root's runs; others' processes stay their user's, so leave it out", written.source);
    }
    Ok(any)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(text: &str) -> Written {
        Written { text: text.into(), source: Source::Option("memory") }
    }

    #[test]
    fn what_is_nearly_a_setting_is_told_of() {
        let names = "PAGEOUT_MEMROY PAGEOUT_MEMORY PAGEOUT_STRCT PAGEOUT_SERVICE_HOST PAGEOUT_RUN PAGEOUT_TESTS_FULL PAGER PATH";
        let found = misspelled(names.split(' ').map(OsString::from));
        let expected = [("PAGEOUT_MEMROY", "PAGEOUT_MEMORY"), ("PAGEOUT_STRCT", "PAGEOUT_STRICT")];
        assert_eq!(found, expected.map(|(name, meant)| (name.to_owned(), meant.to_owned())));
    }

    #[test]
    fn limits() {
        let available = || 8 << 30;
        assert_eq!(limit(&written("max"), available).unwrap(), u64::MAX);
        assert_eq!(limit(&written("infinity"), available).unwrap(), u64::MAX);
        assert_eq!(limit(&written("50%"), available).unwrap(), 4 << 30);
        assert_eq!(limit(&written("12.5%"), available).unwrap(), 1 << 30);
        assert_eq!(limit(&written("16M"), available).unwrap(), 16 << 20);
    }

    #[test]
    fn complaints_name_the_place_and_what_it_takes() {
        let available = || 8 << 30;
        let says = |text| limit(&written(text), available).unwrap_err().to_string();
        assert_eq!(says("12Q"), "--memory 12Q: takes a size like 512M, 4GiB, 50% or max");
        assert_eq!(says("0%"), "--memory 0%: takes a percentage above 0% and up to 100%");
        assert_eq!(says("101%"), "--memory 101%: takes a percentage above 0% and up to 100%");
        for text in [".5%", "+50%", "-1%", "1e1%", "NaN%", "5_0%", ".1G", "+64M", "1e9"] {
            assert_eq!(says(text), format!("--memory {text}: takes a size like 512M, 4GiB, 50% or max"));
        }
        assert_eq!(says("15M"), "--memory 15M: too small; the least that works is 16M");
        assert_eq!(says("512"), "--memory 512 bytes: too small; the least that works is 16M");
        let file = parse(Path::new("/etc/pageout.conf"), "# ours\n\nmax-order = 10\n").unwrap();
        let error = Config::understand(&file).unwrap_err().to_string();
        assert_eq!(error, "/etc/pageout.conf:3: max-order 10: takes an order from 0 (4K) to 9 (2M)");
    }

    #[test]
    fn files_take_known_names_only() {
        let says = |text| parse(Path::new("f"), text).unwrap_err().to_string();
        assert_eq!(says("colour = red"), {
            "f:1: colour: no such setting; there are memory, swap, swapin, max-order, strict, any-user, stats"
        });
        assert_eq!(says("\nmemory"), "f:2: takes lines like memory = 512M");
        assert_eq!(
            says("swap = /x/swap  # the fast disk"),
            "f:1: swap /x/swap  # the fast disk: takes a value without a comment; give that a line of its own"
        );
        assert_eq!(says("swap = \"mem,size=4G\""), "f:1: swap \"mem,size=4G\": takes a value without quotes");
    }

    #[test]
    fn option_beats_environment_beats_file() {
        let mut values =
            parse(Path::new("f"), "memory = 32M\nmax-order = 1\nswap = mem\nswap = /x\n").unwrap();
        assert_eq!(values["swap"].len(), 2);
        values.extend(
            from_environment(|name| match name {
                "PAGEOUT_MEMORY" => Some("64M".into()),
                "PAGEOUT_MAX_ORDER" => Some("2".into()),
                "PAGEOUT_SWAP" => Some("mem,size=1G; /a;/b".into()),
                "PAGEOUT_STRICT" => Some("".into()),
                _ => None,
            })
            .unwrap(),
        );
        let options = SettingOptions { memory: Some("128M".into()), ..Default::default() };
        values.extend(from_options(&options));
        let config = Config::understand(&values).unwrap();
        assert_eq!((config.limit_bytes, config.max_order, config.swap.len()), (128 << 20, 2, 3));
        assert!(!config.strict);
    }
}
