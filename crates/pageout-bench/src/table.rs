//! The table that kernel developers paste (lkp): the base left, each changed engine right of it, the
//! metric's name last. Values are medians; the spread is shown where it is above 2 %.

use std::collections::BTreeSet;
use std::fmt::Write;

use crate::counters::Figures;

/// All rounds of one engine.
pub struct Column<'a> {
    pub name: String,
    pub rounds: Vec<&'a Figures>,
}

/// Median, and standard deviation in percent of the mean.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Summary {
    pub median: f64,
    pub spread: f64,
}

/// Summarises `values`; `None` for none.
pub fn summary(mut values: Vec<f64>) -> Option<Summary> {
    values.sort_by(f64::total_cmp);
    let n = values.len();
    if n == 0 {
        return None;
    }
    let median = if n % 2 == 1 { values[n / 2] } else { (values[n / 2 - 1] + values[n / 2]) / 2.0 };
    let mean = values.iter().sum::<f64>() / n as f64;
    let variance = values.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / n as f64;
    let spread = if mean == 0.0 { 0.0 } else { 100.0 * variance.sqrt() / mean.abs() };
    Some(Summary { median, spread })
}

impl Column<'_> {
    /// The summary of one metric, over the rounds that have it.
    pub fn summary(&self, metric: &str) -> Option<Summary> {
        summary(self.rounds.iter().filter_map(|figures| figures.get(metric).copied()).collect())
    }
}

/// The table of all metrics that any column has; those that are zero everywhere are left out.
pub fn table(columns: &[Column<'_>]) -> String {
    let Some(base) = columns.first() else { return String::new() };
    let mut text = String::new();
    let line = |text: &mut String, cells: &dyn Fn(usize) -> String| {
        let joined: String = (0..columns.len()).map(cells).collect();
        let _ = writeln!(text, "{}", joined.trim_end());
    };
    line(&mut text, &|i| match i {
        0 => format!("{:^16}", shorten(&base.name, 16)),
        _ => format!("{:^28}", shorten(&columns[i].name, 27)),
    });
    line(&mut text, &|i| if i == 0 { "----------------".into() } else { format!(" {}", "-".repeat(27)) });
    line(&mut text, &|i| {
        if i == 0 {
            "         %stddev".into()
        } else {
            "     %change         %stddev".into()
        }
    });
    line(&mut text, &|i| {
        if i == 0 {
            "             \\  ".into()
        } else {
            "        |                \\  ".into()
        }
    });
    let names: BTreeSet<&String> =
        columns.iter().flat_map(|c| c.rounds.iter().flat_map(|r| r.keys())).collect();
    for name in names {
        let summaries: Vec<_> = columns.iter().map(|column| column.summary(name)).collect();
        if summaries.iter().flatten().all(|summary| summary.median == 0.0) {
            continue;
        }
        let mut row = value(summaries[0], 10);
        for changed in &summaries[1..] {
            let change = match (summaries[0], changed) {
                (Some(base), Some(changed)) if base.median != 0.0 => change(base.median, changed.median),
                _ => String::new(),
            };
            let _ = write!(row, "{change:>11}{}", value(*changed, 11));
        }
        let _ = writeln!(text, "{row}  {name}");
    }
    text
}

/// A value in `width` columns and its spread in six.
fn value(summary: Option<Summary>, width: usize) -> String {
    let Some(Summary { median, spread }) = summary else { return format!("{:>width$}      ", "-") };
    let spread = if spread > 2.0 { format!(" ±{:>3.0}%", spread.min(999.0)) } else { " ".repeat(6) };
    format!("{:>width$}{spread}", number(median))
}

fn number(value: f64) -> String {
    match value.abs() {
        v if v >= 1000.0 || v == 0.0 => format!("{value:.0}"),
        v if v >= 10.0 => format!("{value:.1}"),
        v if v >= 0.1 => format!("{value:.2}"),
        _ => format!("{value:.4}"),
    }
}

/// As lkp: percent up to tenfold and beyond, and factors where percents no longer tell anything.
fn change(base: f64, changed: f64) -> String {
    let percent = 100.0 * (changed / base - 1.0);
    if percent.abs() >= 10_000.0 {
        format!("{:+.0}x", changed / base)
    } else {
        format!("{percent:+.1}%")
    }
}

fn shorten(name: &str, most: usize) -> String {
    if name.chars().count() <= most {
        return name.into();
    }
    let kept: String = name.chars().take(most - 1).collect();
    kept + "…"
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figures(value: f64) -> Figures {
        Figures::from([("swap-w-seq.throughput".into(), value), ("nothing".into(), 0.0)])
    }

    #[test]
    fn medians_and_spread() {
        let odd = summary(vec![3.0, 1.0, 2.0]).unwrap();
        assert_eq!(odd.median, 2.0);
        assert!((odd.spread - 40.8).abs() < 0.1);
        assert_eq!(summary(vec![1.0, 2.0]).unwrap().median, 1.5);
        assert_eq!(summary(vec![]), None);
    }

    #[test]
    fn looks_like_lkp() {
        let (base, changed) = ([figures(1_390_000.0), figures(1_446_000.0)], [figures(15_494_673.0)]);
        let columns = [
            Column { name: "base".into(), rounds: base.iter().collect() },
            Column { name: "pageout".into(), rounds: changed.iter().collect() },
        ];
        let expected = "      base                pageout
---------------- ---------------------------
         %stddev     %change         %stddev
             \\          |                \\
   1418000          +992.7%   15494673        swap-w-seq.throughput
";
        assert_eq!(table(&columns), expected);
    }
}
