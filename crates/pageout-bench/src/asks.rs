//! What is asked of pageout's speed, and whether it is met: one table, one verdict.
//!
//! An ask is a figure over one comparison and a bound on it. A comparison that failed or could not be
//! made leaves its asks unmeasured, which is not met.

use std::fmt::Write as _;

use crate::compare::{Comparison, Results};
use crate::machine::Machine;
use crate::units::KB;

/// What a figure must be.
#[derive(Clone, Copy, Debug)]
enum Bound {
    AtLeast(f64),
    AtMost(f64),
}

/// How the figure comes from a comparison.
enum Figure {
    /// A metric of pageout's (or its second engine's) over the base's.
    Ratio(&'static str, &'static str, &'static str),
    /// A metric of one engine.
    Value(&'static str, &'static str),
    /// Computed.
    Computed(fn(&Comparison, &Machine) -> Option<f64>),
}

struct Ask {
    plan: &'static str,
    what: &'static str,
    figure: Figure,
    bound: Bound,
    unit: &'static str,
}

/// One line of the verdict.
pub struct Verdict {
    what: &'static str,
    asked: String,
    found: String,
    plan: &'static str,
    pub met: bool,
}

/// The asks, in the order of the table.
fn asks() -> Vec<Ask> {
    use Bound::{AtLeast, AtMost};
    use Figure::{Computed, Ratio, Value};
    const SEQ: &str = "swap-w-seq.throughput";
    const BACK: &str = "swap-w-seq.read_back";
    const RAND: &str = "swap-w-rand.accesses_per_s";
    const TIME: &str = "python.seconds";
    const ZRAM: &str = "kernel-zram";
    const INLINE: &str = "pageout-inline";
    let ask = |plan, what, figure, bound, unit| Ask { plan, what, figure, bound, unit };
    let us = "us";
    vec![
        ask("seq", "seq, 2 threads, over kernel on zram", Ratio("pageout", ZRAM, SEQ), AtLeast(8.0), "x"),
        ask(
            "seq",
            "seq, 2 threads, over kernel on plain RAM",
            Ratio("pageout", "kernel-ram", SEQ),
            AtLeast(6.0),
            "x",
        ),
        ask(
            "seq-processes",
            "seq, 2 processes, over kernel on zram",
            Ratio("pageout", ZRAM, SEQ),
            AtLeast(8.0),
            "x",
        ),
        ask("seq-file", "seq on disk, over the disk's raw speed", Computed(of_raw), AtLeast(90.0), "%"),
        ask(
            "seq-file",
            "seq on disk, over kernel there",
            Ratio("pageout-file", "kernel-file", SEQ),
            AtLeast(6.0),
            "x",
        ),
        ask("seq", "read back, over kernel on zram", Ratio("pageout", ZRAM, BACK), AtLeast(6.0), "x"),
        ask(
            "seq",
            "read back, over kernel on plain RAM",
            Ratio("pageout", "kernel-ram", BACK),
            AtLeast(5.0),
            "x",
        ),
        ask(
            "rand-1",
            "random 4K, 1 thread, over kernel on zram",
            Ratio("pageout", ZRAM, RAND),
            AtLeast(1.3),
            "x",
        ),
        ask(
            "rand-2",
            "random 4K, 2 threads, over kernel on zram",
            Ratio("pageout", ZRAM, RAND),
            AtLeast(1.3),
            "x",
        ),
        ask(
            "rand-file-1",
            "random 4K on disk, 1 thread, over kernel",
            Ratio("pageout-file", "kernel-file", RAND),
            AtLeast(1.0),
            "x",
        ),
        ask(
            "rand-file-2",
            "random 4K on disk, 2 threads, over kernel",
            Ratio("pageout-file", "kernel-file", RAND),
            AtLeast(1.0),
            "x",
        ),
        ask(
            "python-half",
            "Python in half, time over kernel on zram",
            Ratio("pageout", ZRAM, TIME),
            AtMost(0.5),
            "x",
        ),
        ask(
            "python-quarter",
            "Python in a quarter, time over kernel on zram",
            Ratio("pageout", ZRAM, TIME),
            AtMost(0.5),
            "x",
        ),
        ask(
            "redis",
            "Redis, Zipf, requests over kernel on zram",
            Ratio("pageout", ZRAM, "redis.requests_per_s"),
            AtLeast(1.5),
            "x",
        ),
        ask(
            "redis",
            "Redis, Zipf, p99.9 over kernel on zram",
            Ratio("pageout", ZRAM, "redis.p99.9_us"),
            AtMost(1.0),
            "x",
        ),
        ask(
            "zipf",
            "Zipf, hit ratio less LRU's",
            Computed(|c, _| over(c, "zipf.lru_hit_%")),
            AtLeast(-3.0),
            "points",
        ),
        ask(
            "zipf",
            "Zipf, hit ratio less CLOCK's",
            Computed(|c, _| over(c, "zipf.clock_hit_%")),
            AtLeast(0.0),
            "points",
        ),
        ask(
            "zipf",
            "Zipf, hit ratio less CLOCK's in the memory the set had",
            Computed(|c, _| over(c, "zipf.clock_same_hit_%")),
            AtLeast(0.0),
            "points",
        ),
        ask("hotscan", "hot set during a scan, drop", Value("pageout", "hotscan.drop_%"), AtMost(10.0), "%"),
        ask(
            "seq",
            "anonymous memory in huge pages during seq",
            Value("pageout", "anon.huge_%"),
            AtLeast(96.0),
            "%",
        ),
        ask(
            "latency-1",
            "fault, 1 thread, evictors at work, p50",
            Value("pageout", "latency.p50_us"),
            AtMost(15.0),
            us,
        ),
        ask(
            "latency-1",
            "fault, 1 thread, evictors at work, p99.9",
            Value("pageout", "latency.p99.9_us"),
            AtMost(1000.0),
            us,
        ),
        ask(
            "latency-2",
            "fault, 2 threads, evictors at work, p50",
            Value("pageout", "latency.p50_us"),
            AtMost(15.0),
            us,
        ),
        ask(
            "latency-2",
            "fault, 2 threads, evictors at work, p99.9",
            Value("pageout", "latency.p99.9_us"),
            AtMost(1000.0),
            us,
        ),
        ask(
            "latency-idle",
            "fault, 1 thread, evictors idle, p50",
            Value("pageout", "latency.p50_us"),
            AtMost(12.0),
            us,
        ),
        ask(
            "latency-inline",
            "fault inline, 1 thread, p50",
            Value(INLINE, "latency.p50_us"),
            AtMost(6.5),
            us,
        ),
        ask(
            "latency-inline",
            "fault inline, 1 thread, p99.9",
            Value(INLINE, "latency.p99.9_us"),
            AtMost(500.0),
            us,
        ),
        ask(
            "latency-inline",
            "page-ins inline, one thread",
            Value(INLINE, "latency.faults_per_s"),
            AtLeast(150_000.0),
            "/s",
        ),
        ask(
            "seq",
            "CPU per GiB swapped, 2M, over kernel on zram",
            Ratio("pageout", ZRAM, "cpu.s_per_GiB"),
            AtMost(0.2),
            "x",
        ),
        ask(
            "rand-1",
            "CPU per GiB swapped, 4K, over kernel on zram",
            Ratio("pageout", ZRAM, "cpu.s_per_GiB"),
            AtMost(1.0),
            "x",
        ),
        ask(
            "swapin-rand",
            "swapin auto over the better, random",
            Computed(|c, _| auto(c, RAND)),
            AtLeast(0.9),
            "x",
        ),
        ask(
            "swapin-seq",
            "swapin auto over the better, sequential",
            Computed(|c, _| auto(c, SEQ)),
            AtLeast(0.9),
            "x",
        ),
        ask("fits", "CPU time when it fits, more than alone", Computed(extra_cpu), AtMost(1.0), "%"),
        ask("start", "start later than alone", Computed(extra_start), AtMost(5.0), "ms"),
    ]
}

/// What was swapped a second, in percent of the storage's raw speed at half reads, half writes: from ordinary memory
/// or from huge pages, whichever is faster.
fn of_raw(comparison: &Comparison, machine: &Machine) -> Option<f64> {
    let rate = |name| Some(comparison.summary("pageout-file", name)?.median * KB / 1e6);
    let raw = machine.raw?;
    Some(100.0 * (rate("swap.in")? + rate("swap.out")?) / raw.mixed.max(raw.mixed_huge))
}

/// pageout's hit ratio less another's, in points.
fn over(comparison: &Comparison, other: &str) -> Option<f64> {
    let value = |name| Some(comparison.summary("pageout", name)?.median);
    Some(value("zipf.hit_%")? - value(other)?)
}

/// `auto` over the better of `never` and `always`.
fn auto(comparison: &Comparison, metric: &str) -> Option<f64> {
    let value = |how| Some(comparison.summary(&format!("pageout:--swapin {how}"), metric)?.median);
    Some(value("auto")? / value("never")?.max(value("always")?))
}

fn extra_cpu(comparison: &Comparison, _: &Machine) -> Option<f64> {
    Some(100.0 * (comparison.paired("pageout", "none", "time.cpu_s")? - 1.0))
}

fn extra_start(comparison: &Comparison, _: &Machine) -> Option<f64> {
    let value = |engine| Some(comparison.summary(engine, "program.seconds")?.median);
    Some(1e3 * (value("pageout")? - value("none")?))
}

/// Judges all asks whose plan passes `wanted` by what was found.
pub fn judge(results: &Results, wanted: impl Fn(&str) -> bool) -> Vec<Verdict> {
    let chosen = asks().into_iter().filter(|ask| wanted(ask.plan));
    chosen.map(|ask| ask.judge(results)).collect()
}

impl Ask {
    fn judge(self, results: &Results) -> Verdict {
        let comparison = results.comparisons.iter().find(|c| c.id == self.plan);
        let value = match comparison {
            None => Err("not measured".to_owned()),
            Some(comparison) => {
                let value = match &self.figure {
                    Figure::Ratio(changed, base, metric) => comparison.ratio(changed, base, metric),
                    Figure::Value(engine, metric) => comparison.summary(engine, metric).map(|s| s.median),
                    Figure::Computed(compute) => compute(comparison, &results.machine),
                };
                value.ok_or_else(|| "an engine is missing".to_owned())
            }
        };
        let met = match (&value, self.bound) {
            (Ok(value), Bound::AtLeast(least)) => *value >= least,
            (Ok(value), Bound::AtMost(most)) => *value <= most,
            (Err(_), _) => false,
        };
        let asked = match self.bound {
            Bound::AtLeast(least) => format!(">= {least} {}", self.unit),
            Bound::AtMost(most) => format!("<= {most} {}", self.unit),
        };
        let found = value.map_or_else(|why| why, |value| format!("{value:.2} {}", self.unit));
        Verdict { what: self.what, asked, found, plan: self.plan, met }
    }
}

/// The verdict as a table for a terminal.
pub fn text(verdicts: &[Verdict]) -> String {
    let mut text = format!("{:<46} {:>15} {:>26}  {:<4} {}\n", "ask", "asked", "figure", "met", "comparison");
    for v in verdicts {
        let met = if v.met { "yes" } else { "no" };
        let _ = writeln!(text, "{:<46} {:>15} {:>26}  {met:<4} {}", v.what, v.asked, v.found, v.plan);
    }
    let met = verdicts.iter().filter(|v| v.met).count();
    let _ = writeln!(text, "{met} of {} met", verdicts.len());
    text
}

/// The verdict as Markdown.
pub fn markdown(verdicts: &[Verdict]) -> String {
    let mut text = String::from("| ask | asked | figure | met |\n|---|---|---|---|\n");
    for v in verdicts {
        let _ = writeln!(
            text,
            "| {} | {} | {} | {} |",
            v.what,
            v.asked,
            v.found,
            if v.met { "yes" } else { "**no**" }
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compare::Runs;
    use crate::engine::Record;
    use crate::machine::RawSpeed;
    use crate::plans;
    use crate::units::Bytes;

    fn runs(engine: &str, metrics: &[(&str, f64)]) -> Runs {
        let metrics = metrics.iter().map(|(name, value)| ((*name).into(), *value)).collect();
        Runs { engine: engine.into(), rounds: vec![Record { metrics, ..Record::default() }] }
    }

    fn comparison(id: &str, runs: Vec<Runs>) -> Comparison {
        Comparison {
            id: id.into(),
            work: String::new(),
            memory: String::new(),
            command: String::new(),
            runs,
            left_out: Vec::new(),
        }
    }

    fn machine() -> Machine {
        Machine::describe(std::path::Path::new("/")).unwrap()
    }

    fn results(seq_pageout: f64) -> Results {
        let seq = |engine, value| runs(engine, &[("swap-w-seq.throughput", value)]);
        let both = vec![seq("kernel-zram", 1.0), seq("pageout", seq_pageout)];
        Results::new(machine(), vec![comparison("seq", both)])
    }

    #[test]
    fn every_ask_names_a_plan() {
        let plans = plans::all(Bytes(512 << 20));
        for ask in asks() {
            assert!(plans.iter().any(|plan| plan.id == ask.plan), "{}", ask.what);
        }
    }

    #[test]
    fn the_disk_is_asked_for_the_best_it_does() {
        let swapped = runs("pageout-file", &[("swap.in", 1e9 / KB), ("swap.out", 1e9 / KB)]);
        let seq = comparison("seq-file", vec![swapped]);
        let percent = |mixed, mixed_huge| {
            let raw = Some(RawSpeed { write: 1.0, read: 1.0, mixed, mixed_huge });
            of_raw(&seq, &Machine { raw, ..machine() }).map(f64::round)
        };
        assert_eq!(percent(1000.0, 2500.0), Some(80.0));
        assert_eq!(percent(2500.0, 1000.0), Some(80.0));
    }

    #[test]
    fn bounds_decide() {
        assert!(judge(&results(8.0), |plan| plan == "seq")[0].met);
        assert!(!judge(&results(7.9), |plan| plan == "seq")[0].met);
        let unmeasured = judge(&results(8.0), |plan| plan == "redis");
        assert!(unmeasured.iter().all(|v| !v.met && v.found == "not measured"));
    }
}
