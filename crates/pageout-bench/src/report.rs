//! The page of results: `docs/results.md` with the verdict, the tables, the plots and the commands.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use crate::asks;
use crate::compare::{Comparison, Results};
use crate::engine::Record;
use crate::frag;
use crate::ladder;
use crate::plot::{draw, Axes, Line};
use crate::slots;
use crate::units::KB;

/// Writes the page to `page`, and its plots beside it under `plots/`.
pub fn write(results: &Results, page: &Path) -> Result<()> {
    let plots = page.with_file_name("plots");
    fs::create_dir_all(&plots).with_context(|| format!("making {}", plots.display()))?;
    let mut text = format!(
        "# Results\n\nMade by `{}`: pageout and the kernel's own swap, same machine, same storage, same \
         limit, in turns. Figures are medians of the rounds that each table names, and the asks' are theirs. \
         The full scale is a limit of 512M and five rounds; sets of data, but Python's, are multiples of the limit. \
         Throughput is in KB/s, as vm-scalability has it; all `_s` and `_us` are times, less is \
         better.\n\n## The machine\n\n",
        results.command
    );
    for line in results.machine.lines() {
        let _ = writeln!(text, "- {line}");
    }
    let _ = writeln!(text, "\n## The asks\n\n`pageout-bench asks`\n");
    text += &asks::markdown(&asks::judge(results, |_| true));
    for failed in &results.failed {
        let _ = writeln!(text, "\nNot measured: {failed}.");
    }
    for comparison in &results.comparisons {
        let _ = writeln!(text, "\n## {}\n\n```\n{}\n```\n", comparison.id, comparison.command);
        for lack in &comparison.left_out {
            let _ = writeln!(text, "Left out: {lack}.\n");
        }
        comparison.table().lines().for_each(|line| {
            let _ = writeln!(text, "    {line}");
        });
        for (name, title) in plots_of(comparison, &plots)? {
            let _ = writeln!(text, "\n![{title}](plots/{name})");
        }
    }
    let ladder = (!results.ladder.is_empty()).then(|| ladder::text(&results.ladder));
    let slots = (!results.slots.is_empty()).then(|| slots::text(&results.slots));
    let frag = (!results.frag.is_empty()).then(|| frag::text(&results.frag));
    for (name, table) in [("ladder", ladder), ("slots", slots), ("frag", frag)] {
        let Some(table) = table else { continue };
        let _ = writeln!(text, "\n## {name}\n\n```\npageout-bench {name}\n```\n");
        table.lines().for_each(|line| {
            let _ = writeln!(text, "    {line}");
        });
        if let Some((name, title)) = plots_of_designs(name, results, &plots)? {
            let _ = writeln!(text, "\n![{title}](plots/{name})");
        }
    }
    // Lines of spaces alone are no lines.
    let text: String = text.lines().map(|line| format!("{}\n", line.trim_end())).collect();
    fs::write(page, text).with_context(|| format!("writing {}", page.display()))
}

/// Draws what there is to draw; gives file names and titles.
fn plots_of(comparison: &Comparison, dir: &Path) -> Result<Vec<(String, String)>> {
    let lines = |of: &dyn Fn(&Record) -> Vec<(f64, f64)>| -> Vec<Line> {
        let last =
            comparison.runs.iter().filter_map(|runs| Some((runs.engine.clone(), of(runs.rounds.last()?))));
        last.filter(|line| !line.1.is_empty()).collect()
    };
    let throughput = lines(&|record| {
        let series = record.series.get("swap-w-seq.throughput").into_iter().flatten();
        (1..).map(f64::from).zip(series.map(|kilobytes| kilobytes * KB / 1e6)).collect()
    });
    let latency = lines(&|record| {
        let all: u64 = record.latency_ns.iter().map(|bucket| bucket.1).sum();
        let share = |count: u64| 100.0 * count as f64 / all as f64;
        record.latency_ns.iter().map(|(ns, count)| (*ns as f64 / 1e3, share(*count))).collect()
    });
    let huge = lines(&|record| record.huge_share.clone());
    let id = &comparison.id;
    let mut drawn = Vec::new();
    let mut plot = |kind: &str, title: String, x, y, log, lines: &[Line]| -> Result<()> {
        let name = format!("{id}-{kind}.svg");
        if draw(&dir.join(&name), &Axes { title: &title, x, y, log }, lines)? {
            drawn.push((name, title));
        }
        Ok(())
    };
    plot("throughput", format!("{id}: throughput of each round"), "round", "MB/s", false, &throughput)?;
    plot("latency", format!("{id}: latency"), "microseconds", "percent of accesses", true, &latency)?;
    if !throughput.is_empty() {
        let title = format!("{id}: anonymous memory in huge pages");
        plot("huge", title, "seconds", "percent", false, &huge)?;
    }
    Ok(drawn)
}

/// The plot of the ladder, and of refused pieces.
fn plots_of_designs(which: &str, results: &Results, dir: &Path) -> Result<Option<(String, String)>> {
    let step = |rows: &[ladder::Row], aged| -> Vec<(f64, f64)> {
        let rows = rows.iter().filter(|row| row.aged == aged);
        (1..).map(f64::from).zip(rows.map(|row| row.pages_per_s / 1e6)).collect()
    };
    let round = |of: fn(&(f64, f64)) -> f64| (0..).map(f64::from).zip(results.frag.iter().map(of)).collect();
    let (title, x, y, lines): (_, _, _, [Line; 2]) = match which {
        "ladder" => (
            "ladder: single pages out and in",
            "step, as in the table",
            "million pages a second",
            [
                ("fresh device".into(), step(&results.ladder, false)),
                ("aged device".into(), step(&results.ladder, true)),
            ],
        ),
        "frag" => (
            "frag: pieces of 64K refused",
            "round",
            "percent",
            [("2023 design".into(), round(|row| row.0)), ("pageout".into(), round(|row| row.1))],
        ),
        _ => return Ok(None),
    };
    let name = format!("{which}.svg");
    draw(&dir.join(&name), &Axes { title, x, y, log: false }, &lines)?;
    Ok(Some((name, title.into())))
}
