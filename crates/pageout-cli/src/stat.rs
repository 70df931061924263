//! `pageout stat`: what a tree swaps, in the manner of vmstat. Ends with the tree.

use std::time::{Duration, Instant};

use anyhow::{bail, Result};
use pageout::api::Bytes;
use serde_json::{json, Map, Value};

use crate::device::PAGE;
use crate::options::StatOptions;
use crate::runs;
use crate::say;
use crate::tree;
use crate::view::{ProcessView, View};

/// Lines after which the heading comes again: what a small terminal shows.
const LINES: u64 = 22;

/// What is counted since the last line, a second: heading and counter; `si` and `so` are pages, shown as bytes.
const RATES: [(&str, &str); 7] = [
    ("si", "pswpin"),
    ("so", "pswpout"),
    ("faults", "pgfault"),
    ("major", "pgmajfault"),
    ("rescued", "rescued"),
    ("refaults", "workingset_refault_anon"),
    ("stalls", "allocstall"),
];

/// Prints lines until the tree ends or there were enough.
pub fn stat(options: &StatOptions) -> Result<i32> {
    let delay = options.delay.as_deref().map(delay).transpose()?;
    let count = match (&options.count, delay) {
        (Some(text), _) => count(text)?,
        (None, Some(_)) => u64::MAX,
        (None, None) => 1,
    };
    let (run, mut view) = runs::one(options.which.run.as_deref())?;
    let mut due = Instant::now();
    let mut before = None;
    for line in 0..count {
        let rates = Rates::between(before.as_ref(), &view);
        match options.json {
            true => say::print(format_args!("{}\n", as_json(&view, &rates))),
            false => {
                if line % LINES == 0 {
                    say::print(format_args!("{}\n", heading()));
                }
                say::print(format_args!("{}\n", row(&view, &rates)));
            }
        }
        let Some(delay) = delay.filter(|_| line + 1 < count) else { break };
        due += delay;
        // Whoever was stopped meanwhile does not catch up on the lines that were missed.
        due = due.max(Instant::now());
        if run.stirs_before(due)? {
            break;
        }
        let Some(now) = run.look()? else { break };
        before = Some(std::mem::replace(&mut view, now));
    }
    Ok(0)
}

fn delay(text: &str) -> Result<Duration> {
    match text.parse::<f64>() {
        Ok(seconds) if (0.01..=1e9).contains(&seconds) => Ok(Duration::from_secs_f64(seconds)),
        _ => bail!("DELAY {}: takes seconds, like 1 or 0.5, from 0.01 on", say::shown(text)),
    }
}

fn count(text: &str) -> Result<u64> {
    match text.parse() {
        Ok(lines) if lines > 0 => Ok(lines),
        _ => bail!("COUNT {}: takes a number of lines, 1 or more", say::shown(text)),
    }
}

/// What happened a second, in the order of [`RATES`].
struct Rates {
    seconds: f64,
    each: [f64; RATES.len()],
}

impl Rates {
    /// Between two views, or since the start.
    fn between(before: Option<&View>, now: &View) -> Self {
        let seconds = now.uptime_seconds - before.map_or(0.0, |view| view.uptime_seconds);
        let each = RATES.map(|(_, counter)| {
            let was = before.map_or(0, |view| view.total(counter));
            now.total(counter).saturating_sub(was) as f64 / seconds.max(1e-9)
        });
        Self { seconds, each }
    }
}

/// What processes have in memory together, and of that what cannot go, in bytes: what several have, such as files, counts once.
struct Resident {
    all: u64,
    unmanaged: u64,
}

impl Resident {
    fn of(view: &View) -> Self {
        let (each, unmanaged) = (view.resident(), view.now("unmanaged_bytes"));
        // A file that several have mapped is in each one's figure, and does not go.
        let more: u64 = match view.processes.len() {
            0 | 1 => 0,
            _ => view.processes.iter().map(counted_elsewhere).sum(),
        };
        let all = each.saturating_sub(more);
        Self { all, unmanaged: unmanaged.saturating_sub(more).min(all) }
    }
}

/// Of what a process says that it has in memory, what others have as well, each its part. None where that cannot be seen.
fn counted_elsewhere(process: &ProcessView) -> u64 {
    /// With fewer files in memory, a sixteenth, it is not worth it to walk all that the process has.
    const FEW: u64 = 16;
    let pid = process.pid();
    let (_, files) = tree::resident(pid).unwrap_or_default();
    let said = process.resident();
    if files < said / FEW {
        return 0;
    }
    tree::proportional(pid, "Pss:").map_or(0, |part| said.saturating_sub(part).min(files))
}

fn heading() -> String {
    let columns =
        ["procs", "resident", "unmanaged", "swapped"].into_iter().chain(RATES.map(|(heading, _)| heading));
    line(columns.map(str::to_owned))
}

fn row(view: &View, rates: &Rates) -> String {
    let rates = rates.each.iter().zip(RATES).map(|(rate, (heading, _))| match heading {
        "si" | "so" => Bytes((rate * PAGE as f64) as u64).to_string(),
        _ => format!("{rate:.0}"),
    });
    let resident = Resident::of(view);
    let now = [
        view.processes.len().to_string(),
        Bytes(resident.all).to_string(),
        Bytes(resident.unmanaged).to_string(),
        Bytes(view.now("swapped_pages") * PAGE).to_string(),
    ];
    line(now.into_iter().chain(rates))
}

fn line(cells: impl Iterator<Item = String>) -> String {
    let widths = [5, 8, 9].into_iter().chain(std::iter::repeat(8));
    let cells: Vec<String> = cells.zip(widths).map(|(cell, width)| format!("{cell:>width$}")).collect();
    cells.join(" ")
}

fn as_json(view: &View, rates: &Rates) -> Value {
    let mut object = Map::new();
    let mut say = |name: &str, value: Value| object.insert(name.to_owned(), value);
    say("uptime_seconds", json!(view.uptime_seconds));
    say("interval_seconds", json!(rates.seconds));
    say("procs", json!(view.processes.len()));
    let resident = Resident::of(view);
    say("resident_bytes", json!(resident.all));
    say("unmanaged_bytes", json!(resident.unmanaged));
    say("swapped_bytes", json!(view.now("swapped_pages") * PAGE));
    for (rate, (heading, _)) in rates.each.iter().zip(RATES) {
        match heading {
            "si" | "so" => say(&format!("{heading}_bytes"), json!(rate * PAGE as f64)),
            _ => say(heading, json!(rate)),
        };
    }
    Value::Object(object)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn view(uptime_seconds: f64, pages_in: u64) -> View {
        let ended = [("pswpin".to_owned(), json!(pages_in))].into_iter().collect();
        View {
            run: 1,
            main: 2,
            program: "x".into(),
            uptime_seconds,
            limit_bytes: 0,
            devices: Vec::new(),
            processes: Vec::new(),
            ended,
        }
    }

    #[test]
    fn counts_a_second() {
        let (first, second) = (view(2.0, 512), view(4.0, 1024));
        assert!(row(&first, &Rates::between(None, &first))
            .starts_with("    0        0         0        0       1M"));
        let rates = Rates::between(Some(&first), &second);
        assert!(
            row(&second, &rates).starts_with("    0        0         0        0       1M        0        0")
        );
        assert_eq!(as_json(&second, &rates)["si_bytes"], 1048576.0);
        assert_eq!(heading().len(), row(&second, &rates).len());
    }

    #[test]
    fn delays_and_counts() {
        assert_eq!(delay("0.5").unwrap(), Duration::from_millis(500));
        assert_eq!(
            delay("0").unwrap_err().to_string(),
            "DELAY 0: takes seconds, like 1 or 0.5, from 0.01 on"
        );
        assert_eq!(
            delay("inf").unwrap_err().to_string(),
            "DELAY inf: takes seconds, like 1 or 0.5, from 0.01 on"
        );
        assert_eq!(count("0").unwrap_err().to_string(), "COUNT 0: takes a number of lines, 1 or more");
    }
}
