//! Tables for text output.

use std::fmt::Write;

/// Formats rows below their headings, indented. Returns an empty text without rows. Headings are separated by `|`. A
/// column whose heading begins with `<` is left-aligned.
pub(crate) fn columns<R: AsRef<[String]>>(heads: &str, rows: impl IntoIterator<Item = R>) -> String {
    let rows: Vec<R> = rows.into_iter().collect();
    let mut text = String::new();
    if rows.is_empty() {
        return text;
    }
    let heads: Vec<&str> = heads.split('|').collect();
    let titles: Vec<String> = heads.iter().map(|head| head.trim_start_matches('<').into()).collect();
    let lines = || std::iter::once(&titles[..]).chain(rows.iter().map(AsRef::as_ref));
    let width = |column: usize| {
        lines().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..heads.len()).map(width).collect();
    for row in lines() {
        let mut line = String::new();
        for ((cell, head), width) in row.iter().zip(&heads).zip(&widths) {
            let _ = match head.starts_with('<') {
                true => write!(line, "  {cell:<width$}"),
                false => write!(line, "  {cell:>width$}"),
            };
        }
        text += line.trim_end();
        text.push('\n');
    }
    text
}

/// Wraps text for a terminal of 100 columns. Continuation lines are indented.
pub(crate) fn wrapped(text: &str) -> String {
    let options = textwrap::Options::new(100).subsequent_indent("    ");
    text.lines().map(|line| textwrap::fill(line, &options) + "\n").collect()
}

/// Formats a value, or a dash for `None` or an empty text.
pub(crate) fn or_dash(value: Option<impl ToString>) -> String {
    value.map(|value| value.to_string()).filter(|text| !text.is_empty()).unwrap_or("-".into())
}

/// Formats a number with `digits` decimal places.
pub(crate) fn digits(value: Option<f64>, digits: usize) -> String {
    or_dash(value.map(|value| format!("{value:.digits$}")))
}

/// Minimum time in seconds for a meaningful rate.
pub(crate) const SHORTEST: f64 = 0.1;

/// Formats a rate in a suitable unit: 0.4, 980, 12.500 k, 1.250 M. Returns a dash if `seconds` is too short.
pub(crate) fn rate(rate: f64, seconds: f64) -> String {
    match rate {
        _ if seconds < SHORTEST => "-".into(),
        0.0 => "0".into(),
        ..9.95 => format!("{rate:.1}"),
        ..999.5 => format!("{rate:.0}"),
        ..999_999.5 => format!("{:.3} k", rate / 1e3),
        ..999_999_500.0 => format!("{:.3} M", rate / 1e6),
        _ => format!("{:.3} G", rate / 1e9),
    }
}

/// Formats nanoseconds as microseconds.
pub(crate) fn us(ns: Option<f64>) -> String {
    digits(ns.map(|ns| ns / 1e3), 1)
}

/// Formats a ratio.
pub(crate) fn times(ratio: Option<f64>) -> String {
    or_dash(ratio.map(|ratio| format!("{ratio:.2}x")))
}
