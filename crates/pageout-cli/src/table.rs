//! Tables as util-linux prints them. Pure functions.

/// A column: its heading, and whether it is of numbers, which stand at the right.
pub type Column = (&'static str, bool);

/// The rows under the headings, a blank between columns; columns are as wide as they must be. What cannot be seen is
/// written as `?`.
pub fn padded(columns: &[Column], rows: &[Vec<String>], headings: bool) -> String {
    let seen = |row: &Vec<String>| row.iter().map(|cell| cell.replace(char::is_control, "?")).collect();
    let rows: &[Vec<String>] = &rows.iter().map(seen).collect::<Vec<_>>();
    let width = |at: usize| {
        let cells = rows.iter().map(|row| row[at].chars().count());
        cells.chain(headings.then_some(columns[at].0.len())).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..columns.len()).map(width).collect();
    let line = |cells: Vec<&str>| {
        let cells = cells.iter().zip(&widths).zip(columns).map(|((cell, width), (_, right))| match right {
            true => format!("{cell:>width$}"),
            false => format!("{cell:<width$}"),
        });
        format!("{}\n", cells.collect::<Vec<_>>().join(" ").trim_end())
    };
    each(columns, rows, headings).map(line).collect()
}

/// The same without padding; blanks and what cannot be seen are written as `\x20`.
pub fn raw(columns: &[Column], rows: &[Vec<String>], headings: bool) -> String {
    let line = |cells: Vec<&str>| {
        let cells: Vec<String> = cells.into_iter().map(escaped).collect();
        format!("{}\n", cells.join(" "))
    };
    each(columns, rows, headings).map(line).collect()
}

fn each<'a>(
    columns: &'a [Column],
    rows: &'a [Vec<String>],
    headings: bool,
) -> impl Iterator<Item = Vec<&'a str>> {
    let headings = headings.then(|| columns.iter().map(|(heading, _)| *heading).collect());
    headings.into_iter().chain(rows.iter().map(|row| row.iter().map(String::as_str).collect()))
}

fn escaped(cell: &str) -> String {
    let escape = |c: char| match c {
        ' ' | '\\' => format!("\\x{:02x}", u32::from(c)),
        // A terminal may take those beyond ASCII for its own, too.
        c if c.is_control() => format!("\\x{:02x}", u32::from(c)),
        c => c.to_string(),
    };
    cell.chars().map(escape).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const COLUMNS: [Column; 3] = [("NAME", false), ("SIZE", true), ("X", false)];

    fn rows() -> Vec<Vec<String>> {
        [["a file", "1.5G", "y"], ["b", "12", ""]].map(|row| row.map(str::to_owned).into()).into()
    }

    #[test]
    fn pads_to_the_widest() {
        assert_eq!(padded(&COLUMNS, &rows(), true), "NAME   SIZE X\na file 1.5G y\nb        12\n");
        assert_eq!(padded(&COLUMNS, &[], true), "NAME SIZE X\n");
        assert_eq!(padded(&COLUMNS, &[], false), "");
    }

    #[test]
    fn a_row_is_one_line() {
        let rows = [["a\n\x1b[1mb", "1", ""].map(str::to_owned).into()];
        assert_eq!(padded(&COLUMNS, &rows, false), "a??[1mb 1\n");
        assert_eq!(raw(&COLUMNS, &rows, false), "a\\x0a\\x1b[1mb 1 \n");
    }

    #[test]
    fn raw_has_no_blanks_but_between_columns() {
        assert_eq!(raw(&COLUMNS, &rows()[..1], true), "NAME SIZE X\na\\x20file 1.5G y\n");
        assert_eq!(raw(&COLUMNS, &rows()[..1], false), "a\\x20file 1.5G y\n");
    }
}
