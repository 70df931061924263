//! The table printed after all runs.

use super::MIB;
use std::sync::Mutex;

/// One program's figures; bytes and seconds.
pub(super) struct Row {
    pub(super) name: &'static str,
    pub(super) natural_bytes: u64,
    pub(super) fixed_bytes: u64,
    pub(super) limit_bytes: u64,
    pub(super) natural_seconds: f64,
    /// None when the run was not finished.
    pub(super) paged_seconds: Option<f64>,
    pub(super) resident_bytes: u64,
    pub(super) swapped_out: u64,
    pub(super) verdict: &'static str,
}

static ROWS: Mutex<Vec<Row>> = Mutex::new(Vec::new());
static NOTES: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// Keeps a row for the table.
pub(super) fn add(row: Row) {
    ROWS.lock().unwrap_or_else(|error| error.into_inner()).push(row);
}

/// Keeps a line to be printed under the table.
pub(super) fn note(line: String) {
    NOTES.lock().unwrap_or_else(|error| error.into_inner()).push(line);
}

/// Prints what was kept.
pub fn print() {
    let rows = ROWS.lock().unwrap_or_else(|error| error.into_inner());
    if !rows.is_empty() {
        println!(
            "{:<16} {:>10} {:>9} {:>9} {:>11} {:>10} {:>9} {:>7} {:>9}  verdict",
            "program",
            "natural MB",
            "fixed MB",
            "limit MB",
            "resident MB",
            "natural s",
            "paged s",
            "ratio",
            "pswpout"
        );
    }
    let megabytes = |bytes: u64| format!("{:.0}", bytes as f64 / MIB as f64);
    for row in rows.iter() {
        let seconds = row.paged_seconds.map_or("-".to_owned(), |seconds| format!("{seconds:.2}"));
        let ratio = row
            .paged_seconds
            .map_or("-".to_owned(), |seconds| format!("{:.1}", seconds / row.natural_seconds));
        println!(
            "{:<16} {:>10} {:>9} {:>9} {:>11} {:>10.2} {:>9} {:>7} {:>9}  {}",
            row.name,
            megabytes(row.natural_bytes),
            megabytes(row.fixed_bytes),
            megabytes(row.limit_bytes),
            megabytes(row.resident_bytes),
            row.natural_seconds,
            seconds,
            ratio,
            row.swapped_out,
            row.verdict,
        );
    }
    for note in NOTES.lock().unwrap_or_else(|error| error.into_inner()).iter() {
        println!("{note}");
    }
}
