//! The counters of a run: kept from processes that ended, added up, written as JSON or as a table.

use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use anyhow::{anyhow, Result};
use pageout::api::{reason, Bytes};
use pageout::stats::{Stats, MAX_ORDER, UNCOUNTED};
use serde_json::{json, Map, Value};

use crate::device::PAGE;
use crate::say;
use crate::sys;

/// Processes that are listed one by one; what others did is in the totals.
const LISTED: usize = 1024;

/// Counters whose total is the largest of them, not the sum: they say what is, or was at most, and the processes were there
/// at different times.
const LARGEST: [&str; 8] = [
    "resident_peak_bytes",
    "resident_bytes",
    "shared_bytes",
    "unmanaged_bytes",
    "swapped_pages",
    "out_pages",
    "limit_bytes",
    "active",
];

/// One process's counters, or the sum of many.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Counters {
    plain: Vec<(&'static str, u64)>,
    lists: Vec<(&'static str, Vec<u64>)>,
}

impl Counters {
    /// What a page of counters says now. The process that it belongs to is `pid`, whatever the page says.
    pub fn of(stats: &Stats, pid: i32) -> Self {
        let load = |list: &[AtomicU64]| list.iter().map(|counter| counter.load(Relaxed)).collect();
        let named = |(name, value)| match (name, value) {
            ("pid", _) => (name, pid as u64),
            ("out_pages", UNCOUNTED) => (name, 0),
            _ => (name, value),
        };
        Self {
            plain: stats.counters().map(named).collect(),
            lists: stats.lists().map(|(name, list)| (name, load(list))).collect(),
        }
    }

    /// Adds those of another process.
    fn add(&mut self, other: &Self) {
        for ((name, sum), (_, value)) in self.plain.iter_mut().zip(&other.plain) {
            match *name {
                "pid" => {}
                name if LARGEST.contains(&name) => *sum = (*sum).max(*value),
                _ => *sum = sum.saturating_add(*value),
            }
        }
        for ((_, sums), (_, values)) in self.lists.iter_mut().zip(&other.lists) {
            sums.iter_mut().zip(values).for_each(|(sum, value)| *sum = sum.saturating_add(*value));
        }
    }

    /// Each by its name.
    pub fn json(&self) -> Map<String, Value> {
        let plain = self.plain.iter().map(|(name, value)| (name.to_string(), json!(value)));
        let lists = self.lists.iter().map(|(name, values)| (name.to_string(), json!(values)));
        plain.chain(lists).collect()
    }
}

/// The counters of all processes that ended.
#[derive(Debug)]
pub struct Report {
    total: Counters,
    /// With their names.
    listed: Vec<(String, Counters)>,
    unlisted: u64,
    lost: u64,
}

impl Report {
    /// Without processes: `zero` is a page of counters that nobody counted in.
    pub fn new(zero: &Stats, limit_bytes: u64) -> Self {
        zero.limit_bytes.store(limit_bytes, Relaxed);
        Self { total: Counters::of(zero, 0), listed: Vec::new(), unlisted: 0, lost: 0 }
    }

    /// The program that the run is for: its number stands in the totals.
    pub fn set_main(&mut self, pid: i32) {
        self.total.plain.iter_mut().filter(|(name, _)| *name == "pid").for_each(|(_, v)| *v = pid as u64);
    }

    /// What all that ended did.
    pub fn total(&self) -> &Counters {
        &self.total
    }

    /// Keeps the counters of a process of this name.
    pub fn keep(&mut self, name: &str, counters: Counters) {
        self.total.add(&counters);
        if self.listed.len() < LISTED {
            self.listed.push((name.into(), counters));
        } else {
            self.unlisted += 1;
        }
    }

    /// All processes together had so much resident at once.
    pub fn set_peak(&mut self, bytes: u64) {
        let peak = self.total.plain.iter_mut().find(|(name, _)| *name == "resident_peak_bytes");
        peak.into_iter().for_each(|(_, value)| *value = bytes.max(*value));
    }

    /// So many bytes of the devices had not come back when all processes had gone: a bug of ours.
    pub fn set_lost(&mut self, bytes: u64) {
        self.lost = bytes;
    }

    /// In a line.
    pub fn summary(&self) -> String {
        let of =
            |wanted| self.total.plain.iter().find(|(name, _)| *name == wanted).map_or(0, |(_, value)| *value);
        let [out, back] = ["pswpout", "pswpin"].map(|name| Bytes(of(name) * PAGE));
        // Without a limit nobody counts.
        let peak = match of("resident_peak_bytes") {
            0 => String::new(),
            peak => format!(" at most {} resident;", Bytes(peak)),
        };
        let processes = self.listed.len() as u64 + self.unlisted;
        let plural = if processes == 1 { "" } else { "es" };
        format!("{processes} process{plural};{peak} {out} written to swap, {back} read back")
    }

    /// Writes it.
    pub fn write(&self, target: Target) -> Result<()> {
        let (shown, written) = match target {
            Target::StandardError => {
                say::table(&self.table());
                return Ok(());
            }
            Target::Stream(path, mut file) => (path, file.write_all(self.json().as_bytes())),
            Target::File(path) => {
                let written = write_over(&path, self.json().as_bytes());
                (path, written)
            }
        };
        written.map_err(|e| complaint(&shown, &e))
    }

    fn json(&self) -> String {
        let mut object = self.total.json();
        let process = |(name, counters): &(String, Counters)| {
            let mut process = counters.json();
            process.insert("name".into(), json!(name));
            Value::Object(process)
        };
        object.insert("processes".into(), self.listed.iter().map(process).collect());
        object.insert("processes_unlisted".into(), json!(self.unlisted));
        object.insert("swap_lost_bytes".into(), json!(self.lost));
        let mut text =
            serde_json::to_string_pretty(&Value::Object(object)).expect("maps of numbers are JSON");
        text.push('\n');
        text
    }

    fn table(&self) -> String {
        let mut text = String::new();
        let processes = self.listed.len() as u64 + self.unlisted;
        let _ = writeln!(text, "{processes:>14}  processes");
        for (name, value) in self.total.plain.iter().filter(|(_, value)| *value != 0) {
            let _ = match (name.ends_with("_bytes"), *value) {
                (true, bytes) => writeln!(text, "{:>14}  {name}", Bytes(bytes).to_string()),
                (false, count) => writeln!(text, "{count:>14}  {name}"),
            };
        }
        for (name, values) in self.total.lists.iter().filter(|(_, values)| values.iter().any(|v| *v != 0)) {
            if values.len() == MAX_ORDER + 1 {
                for (order, value) in values.iter().enumerate().filter(|(_, value)| **value != 0) {
                    let _ = writeln!(text, "{value:>14}  {name} of {}", Bytes(4096 << order));
                }
            } else {
                for (label, part) in [("p50", 50), ("p99", 99)] {
                    let _ = writeln!(text, "{:>14}  {name} {label}, at most", percentile(values, part));
                }
            }
        }
        text
    }
}

/// The upper bound of the bucket that the given part of a hundred of all values is below.
fn percentile(buckets: &[u64], part: u64) -> u64 {
    let wanted = buckets.iter().sum::<u64>().saturating_mul(part).div_ceil(100);
    let mut seen = 0;
    let bucket = buckets.iter().position(|count| {
        seen += count;
        seen >= wanted
    });
    2u64.saturating_pow(bucket.unwrap_or(0) as u32 + 1)
}

/// Where a report goes.
#[derive(Debug)]
pub enum Target {
    /// As a table.
    StandardError,
    /// A pipe or terminal: there is nothing to empty first.
    Stream(PathBuf, File),
    /// A file, or where one can be made. Emptied and written at the end, so that a run that fails leaves what it held.
    File(PathBuf),
}

impl Target {
    /// The place that `--stats` names. Complains now about what would go wrong at the end, when the program has
    /// done its work.
    pub fn of(path: PathBuf) -> Result<Self> {
        if path == Path::new("-") {
            return Ok(Self::StandardError);
        }
        let opened = Self::look(&path).and_then(|is_file| match (is_file, descriptor(&path)) {
            (true, _) => std::path::absolute(&path).map(Self::File),
            // Not opened anew: it would be written from its beginning.
            (false, Some(number)) => sys::copy_of(number).map(|file| Self::Stream(path.clone(), file)),
            (false, None) => {
                File::options().write(true).open(&path).map(|file| Self::Stream(path.clone(), file))
            }
        });
        opened.map_err(|error| complaint(&path, &error))
    }

    /// The same, only looking: who reads a pipe would see its end.
    pub fn check(path: &Path) -> Result<()> {
        match path == Path::new("-") {
            true => Ok(()),
            false => Self::look(path).map(drop).map_err(|error| complaint(path, &error)),
        }
    }

    /// Can it be written, and is it a file, or will be?
    fn look(path: &Path) -> io::Result<bool> {
        match fs::metadata(path) {
            _ if path == Path::new("") => Err(io::Error::from_raw_os_error(libc::ENOENT)),
            Ok(about) if about.is_dir() => Err(io::Error::from_raw_os_error(libc::EISDIR)),
            // A descriptor that we inherited is closed by then.
            Ok(about) if !about.is_file() || descriptor(path).is_some() => {
                sys::may_access(path, libc::W_OK).map(|()| false)
            }
            _ => may_write(path).map(|()| true),
        }
    }
}

fn complaint(path: &Path, error: &io::Error) -> anyhow::Error {
    let shown = path.display();
    match error.kind() {
        _ if path == Path::new("") => anyhow!("--stats: no name; name a file, or - for standard error"),
        io::ErrorKind::IsADirectory => anyhow!("--stats {shown}: is a directory; name a file in it"),
        _ => anyhow!("--stats {shown}: {}; name a file that can be written", reason(error)),
    }
}

/// The descriptor of ours that a path leads to (/dev/fd/3, /dev/stdout).
fn descriptor(path: &Path) -> Option<i32> {
    /// Links as the kernel follows them.
    const LINKS: usize = 40;
    let own = fs::canonicalize("/proc/self/fd").ok()?;
    let mut path = path.to_owned();
    for _ in 0..LINKS {
        if fs::canonicalize(parent_of(&path)).is_ok_and(|list| list == own) {
            return path.file_name()?.to_str()?.parse().ok();
        }
        path = parent_of(&path).join(fs::read_link(&path).ok()?);
    }
    None
}

/// Whether a file can be written there, or made: as the link that leads to it says.
fn may_write(place: &Path) -> io::Result<()> {
    match fs::metadata(place) {
        Ok(_) => sys::may_access(place, libc::W_OK),
        Err(error) if error.kind() == io::ErrorKind::NotFound => match fs::read_link(place) {
            Ok(target) => may_write(&parent_of(place).join(target)),
            Err(_) => sys::may_access(parent_of(place), libc::W_OK | libc::X_OK),
        },
        Err(error) => Err(error),
    }
}

fn parent_of(place: &Path) -> &Path {
    place.parent().filter(|parent| *parent != Path::new("")).unwrap_or(Path::new("."))
}

/// As a shell does: what is there keeps its links, mode and owner, and no other name is written to.
fn write_over(place: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut options = File::options();
    options.write(true).truncate(true);
    // Where others can write (/tmp) the kernel may refuse O_CREAT of a file that is there.
    let mut file = options.open(place).or_else(|error| match error.kind() {
        io::ErrorKind::NotFound => options.create(true).open(place),
        _ => Err(error),
    })?;
    file.write_all(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stats() -> sys::Mapping {
        let len = pageout::stats::STATS_BYTES;
        sys::Mapping::of(&sys::memfd(c"test", len as u64, true).unwrap(), len).unwrap()
    }

    #[test]
    fn adds_up_what_happened_and_takes_the_largest_of_what_is() {
        let page = stats();
        let mut report = Report::new(page.stats(), 1 << 30);
        report.set_main(7);
        for (pid, out, peak) in [(7, 10, 300), (8, 5, 200)] {
            page.stats().pswpout.store(out, Relaxed);
            let now = page.stats();
            for gauge in
                [&now.resident_peak_bytes, &now.resident_bytes, &now.unmanaged_bytes, &now.swapped_pages]
            {
                gauge.store(peak, Relaxed);
            }
            page.stats().swpout[9].store(out, Relaxed);
            page.stats().fault_ns[4].store(1, Relaxed);
            report.keep("x", Counters::of(page.stats(), pid));
        }
        let json: Value = serde_json::from_str(&report.json()).unwrap();
        assert_eq!(json["pswpout"], 15);
        for gauge in ["resident_peak_bytes", "resident_bytes", "unmanaged_bytes", "swapped_pages"] {
            assert_eq!(json[gauge], 300, "{gauge}");
        }
        assert_eq!(json["limit_bytes"], 1 << 30);
        assert_eq!(json["pid"], 7);
        assert_eq!(json["swpout"][9], 15);
        assert_eq!(json["fault_ns"][4], 2);
        assert_eq!(json["processes"][1]["pid"], 8);
        assert_eq!(json["processes"][1]["pswpout"], 5);
        let table = report.table();
        assert!(table.contains("             2  processes\n"), "{table}");
        assert!(table.contains("            15  swpout of 2M\n"), "{table}");
        assert!(table.contains("            1G  limit_bytes\n"), "{table}");
        assert!(table.contains("            32  fault_ns p99, at most\n"), "{table}");
    }

    #[test]
    fn lists_a_bounded_number_of_processes() {
        let page = stats();
        let mut report = Report::new(page.stats(), u64::MAX);
        page.stats().pgfault.store(1, Relaxed);
        (0..LISTED as i32 + 3).for_each(|pid| report.keep("x", Counters::of(page.stats(), pid)));
        let json: Value = serde_json::from_str(&report.json()).unwrap();
        assert_eq!(json["processes"].as_array().unwrap().len(), LISTED);
        assert_eq!(json["processes_unlisted"], 3);
        assert_eq!(json["pgfault"], LISTED + 3);
    }

    #[test]
    fn percentiles_are_upper_bounds() {
        assert_eq!(percentile(&[0, 99, 0, 1], 50), 4);
        assert_eq!(percentile(&[0, 98, 0, 2], 99), 16);
    }
}
