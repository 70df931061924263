//! The page of results: `docs/results.md` with the verdict, the tables, the plots and the commands.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use crate::asks;
use crate::compare::{Comparison, Results};
use crate::engine::Record;
use crate::plot::{draw, Axes, Line};
use crate::units::KB;

/// Writes the page to `page`, and its plots beside it under `plots/`.
pub fn write(results: &Results, page: &Path) -> Result<()> {
    let plots = page.with_file_name("plots");
    fs::create_dir_all(&plots).with_context(|| format!("making {}", plots.display()))?;
    let mut text = String::from(
        "# Results\n\nMade by `pageout-bench report`: pageout and the kernel's own swap, same machine, same \
         storage, same limit, in turns. Figures are medians; throughput is in KB/s, as vm-scalability has \
         it. `python.seconds` and all `_us` and `_s` are times: less is better.\n\n## The machine\n\n",
    );
    for line in results.machine.lines() {
        let _ = writeln!(text, "- {line}");
    }
    let _ = writeln!(text, "\n## The asks\n\n`pageout-bench asks`\n");
    text += &asks::markdown(&asks::judge(results, |_| true));
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
