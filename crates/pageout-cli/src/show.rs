//! `pageout show`: the swap devices, as `swapon --show` and as /proc/swaps.

use std::fmt::Write;

use anyhow::Result;
use pageout::api::Bytes;
use serde_json::{json, Value};

use crate::options::ShowOptions;
use crate::runs;
use crate::say;
use crate::table::{self, Column};
use crate::view::{DeviceView, View};

const COLUMNS: [Column; 6] =
    [("NAME", false), ("TYPE", false), ("SIZE", true), ("USED", true), ("PRIO", true), ("RUN", true)];

/// Prints them.
pub fn show(options: &ShowOptions) -> Result<i32> {
    let runs = runs::chosen(options.which.run.as_deref())?;
    let devices: Vec<(&View, &DeviceView)> =
        runs.iter().flat_map(|(_, view)| view.devices.iter().map(move |device| (view, device))).collect();
    if options.json {
        say::print(format_args!("{}\n", serde_json::to_string_pretty(&as_json(&devices))?));
        return Ok(0);
    }
    if options.summary {
        say::print(summary(devices.iter().map(|(_, device)| *device)));
        return Ok(0);
    }
    // Which tree a device is of is said only where there are several.
    let columns = &COLUMNS[..if runs.len() > 1 { 6 } else { 5 }];
    let size = |bytes: u64| match options.bytes {
        true => bytes.to_string(),
        false => Bytes(bytes).to_string(),
    };
    let rows: Vec<Vec<String>> = devices
        .iter()
        .map(|(view, device)| {
            let mut row = vec![
                device.name.clone(),
                device.kind.clone(),
                size(device.size_bytes),
                size(device.used_bytes),
                device.priority.to_string(),
                view.run.to_string(),
            ];
            row.truncate(columns.len());
            row
        })
        .collect();
    let headings = !options.noheadings && !rows.is_empty();
    let text = match options.raw {
        true => table::raw(columns, &rows, headings),
        false => table::padded(columns, &rows, headings),
    };
    say::print(text);
    Ok(0)
}

fn as_json(devices: &[(&View, &DeviceView)]) -> Value {
    let object = |(view, device): &(&View, &DeviceView)| {
        let mut object = json!(device);
        object["run"] = json!(view.run);
        object
    };
    devices.iter().map(object).collect()
}

/// The text of /proc/swaps, to the blank.
fn summary<'a>(devices: impl Iterator<Item = &'a DeviceView>) -> String {
    let mut text = String::from("Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n");
    for device in devices {
        let (size, used) = (device.size_bytes >> 10, device.used_bytes >> 10);
        let escape = |c: char| match c {
            '\\' | ' ' => format!("\\{:03o}", u32::from(c)),
            c if c.is_control() => format!("\\{:03o}", u32::from(c)),
            c => c.to_string(),
        };
        let name: String = device.name.chars().map(escape).collect();
        let blanks = " ".repeat(40usize.saturating_sub(name.len()).max(1));
        let tab = |number: u64| if number < 10_000_000 { "\t" } else { "" };
        let kind = if device.kind == "partition" { "partition" } else { &format!("{}\t", device.kind) };
        let (after_size, after_used, priority) = (tab(size), tab(used), device.priority);
        let _ = writeln!(text, "{name}{blanks}{kind}\t{size}\t{after_size}{used}\t{after_used}{priority}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn summary_is_as_the_kernel_writes_it() {
        let device = |name: &str, kind: &str, size_bytes, used_bytes, priority| DeviceView {
            name: name.into(),
            kind: kind.into(),
            size_bytes,
            used_bytes,
            priority,
            leaving: false,
        };
        let devices = [
            device("/dev/sda2", "partition", 3_906_556 << 10, 0, -2),
            device("/a b\n", "file", 20_000_000 << 10, 12 << 10, 5),
        ];
        assert_eq!(
            summary(devices.iter()),
            "Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n\
             /dev/sda2                               partition\t3906556\t\t0\t\t-2\n\
             /a\\040b\\012                             file\t\t20000000\t12\t\t5\n"
        );
    }
}
