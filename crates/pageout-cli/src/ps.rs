//! `pageout ps`: one row a process.

use anyhow::Result;
use pageout::api::Bytes;

use crate::device::PAGE;
use crate::options::PsOptions;
use crate::runs;
use crate::say;
use crate::table::{self, Column};
use crate::view::View;

const COLUMNS: [Column; 8] = [
    ("PID", true),
    ("NAME", false),
    ("RESIDENT", true),
    ("SWAPPED", true),
    ("LIMIT", true),
    ("FAULTS", true),
    ("STATE", false),
    ("RUN", true),
];

/// Prints them.
pub fn ps(options: &PsOptions) -> Result<i32> {
    let views = runs::chosen(options.which.run.as_deref())?.into_iter().map(|(_, view)| view);
    let views: Vec<View> = views.collect();
    if options.json {
        say::print(format_args!("{}\n", serde_json::to_string_pretty(&views)?));
        return Ok(0);
    }
    let rows: Vec<Vec<String>> = views.iter().flat_map(rows).collect();
    say::print(table::padded(&COLUMNS, &rows, true));
    Ok(0)
}

fn rows(view: &View) -> impl Iterator<Item = Vec<String>> + '_ {
    view.processes.iter().map(|process| {
        let bytes = |name| Bytes(process.counter(name)).to_string();
        vec![
            process.pid().to_string(),
            process.name.clone(),
            bytes("resident_bytes"),
            Bytes(process.counter("swapped_pages") * PAGE).to_string(),
            bytes("limit_bytes"),
            process.counter("pgfault").to_string(),
            format!("{:?}", process.state).to_lowercase(),
            view.run.to_string(),
        ]
    })
}
