//! Plots as SVG: one function draws lines, on axes that may be logarithmic.

use std::path::Path;

use anyhow::{anyhow, Result};
use plotters::prelude::*;

/// One line: its name and points.
pub type Line = (String, Vec<(f64, f64)>);

/// What a plot shows besides its lines.
pub struct Axes<'a> {
    pub title: &'a str,
    pub x: &'a str,
    pub y: &'a str,
    /// Both axes logarithmic; what is not positive is left out.
    pub log: bool,
}

const COLOURS: [RGBColor; 6] = [
    RGBColor(0x1f, 0x77, 0xb4),
    RGBColor(0xd6, 0x27, 0x28),
    RGBColor(0x2c, 0xa0, 0x2c),
    RGBColor(0x94, 0x67, 0xbd),
    RGBColor(0xff, 0x7f, 0x0e),
    RGBColor(0x8c, 0x56, 0x4b),
];

/// Draws `lines` into `file`. Nothing is drawn, and false returned, when there is no point.
pub fn draw(file: &Path, axes: &Axes<'_>, lines: &[Line]) -> Result<bool> {
    let scale = |value: f64| if axes.log { value.log10() } else { value };
    let shown: Vec<Line> = lines
        .iter()
        .map(|(name, points)| {
            let points = points.iter().filter(|(x, y)| !axes.log || (*x > 0.0 && *y > 0.0));
            (name.clone(), points.map(|(x, y)| (scale(*x), scale(*y))).collect())
        })
        .collect();
    let points = || shown.iter().flat_map(|(_, points)| points.iter());
    if points().next().is_none() {
        return Ok(false);
    }
    let (mut left, mut right) = range(points().map(|p| p.0));
    let (mut bottom, mut top) = range(points().map(|p| p.1));
    if axes.log {
        (left, right, bottom, top) = (left.floor(), right.ceil(), bottom.floor(), top.ceil());
    } else {
        bottom = bottom.min(0.0);
        top += (top - bottom) * 0.05;
    }
    // A range of nothing cannot be drawn.
    right = right.max(left + 1e-9);
    top = top.max(bottom + 1e-9);
    let failed = |error: &dyn std::fmt::Display| anyhow!("drawing {}: {error}", file.display());
    let root = SVGBackend::new(file, (800, 420)).into_drawing_area();
    root.fill(&WHITE).map_err(|e| failed(&e))?;
    let mut chart = ChartBuilder::on(&root)
        .caption(axes.title, ("sans-serif", 18))
        .margin(12)
        .x_label_area_size(42)
        .y_label_area_size(72)
        .build_cartesian_2d(left..right, bottom..top)
        .map_err(|e| failed(&e))?;
    let label = |value: &f64| if axes.log { powers(*value) } else { short(*value) };
    chart
        .configure_mesh()
        .x_desc(axes.x)
        .y_desc(axes.y)
        .x_label_formatter(&label)
        .y_label_formatter(&label)
        .light_line_style(WHITE)
        .draw()
        .map_err(|e| failed(&e))?;
    for ((name, points), colour) in shown.iter().zip(COLOURS.iter().cycle()) {
        let style = colour.stroke_width(2);
        let series = LineSeries::new(points.iter().copied(), style).point_size(3);
        let drawn = chart.draw_series(series).map_err(|e| failed(&e))?;
        drawn.label(name).legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], style));
    }
    chart.configure_series_labels().background_style(WHITE.mix(0.8)).draw().map_err(|e| failed(&e))?;
    root.present().map_err(|e| failed(&e))?;
    Ok(true)
}

fn range(values: impl Iterator<Item = f64>) -> (f64, f64) {
    values.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| (low.min(value), high.max(value)))
}

/// The label of a power of ten.
fn powers(exponent: f64) -> String {
    if (exponent - exponent.round()).abs() > 1e-6 {
        return String::new();
    }
    short(10f64.powf(exponent))
}

/// A number in few characters.
fn short(value: f64) -> String {
    let shown = |value: f64, unit: &str| {
        let text = format!("{value:.1}");
        format!("{}{unit}", text.trim_end_matches('0').trim_end_matches('.'))
    };
    match value.abs() {
        v if v >= 1e9 => shown(value / 1e9, "G"),
        v if v >= 1e6 => shown(value / 1e6, "M"),
        v if v >= 1e3 => shown(value / 1e3, "k"),
        v if v >= 0.1 || v == 0.0 => shown(value, ""),
        _ => format!("{value:.4}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_lines_and_nothing() {
        let file = std::env::temp_dir().join(format!("pageout-bench.{}.svg", std::process::id()));
        let axes = Axes { title: "t", x: "ns", y: "count", log: true };
        assert!(!draw(&file, &axes, &[("none".into(), vec![])]).unwrap());
        let lines = [("some".into(), vec![(1e3, 5.0), (1e5, 1.0), (0.0, 2.0)])];
        assert!(draw(&file, &axes, &lines).unwrap());
        let text = std::fs::read_to_string(&file).unwrap();
        std::fs::remove_file(&file).unwrap();
        assert!(text.contains("polyline") && text.contains("100k"), "{text}");
    }

    #[test]
    fn labels_are_short() {
        let labels = [0.0, 0.25, 1500.0, 2e6].map(short);
        assert_eq!(labels, ["0", "0.2", "1.5k", "2M"]);
    }
}
