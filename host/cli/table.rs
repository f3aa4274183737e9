//! Tables and figures as text.

use std::time::Duration;

use comfy_table::{
    Attribute, Cell, CellAlignment, Color, ContentArrangement, Table, TableComponent, presets,
};

/// A table whose first column is text and whose other columns are figures.
pub fn table(header: &[&str]) -> Table {
    let mut table = Table::new();
    // Colours are always written here and taken out where standard output is not a terminal.
    table.load_preset(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled);
    table
        .set_style(TableComponent::HeaderLines, '─')
        .set_style(TableComponent::MiddleHeaderIntersections, '─');
    table.enforce_styling();
    table.set_header(header.iter().enumerate().map(|(i, text)| {
        let cell = Cell::new(text).add_attribute(Attribute::Bold);
        if i == 0 { cell } else { cell.set_alignment(CellAlignment::Right) }
    }));
    table
}

/// A cell with a figure.
pub fn figure(text: impl Into<String>) -> Cell {
    Cell::new(text.into()).set_alignment(CellAlignment::Right)
}

/// A cell that stands out.
pub fn best(cell: Cell) -> Cell {
    cell.fg(Color::Green).add_attribute(Attribute::Bold)
}

/// A ratio such as a relative error: five decimals, or a power of ten where those would hide it.
pub fn ratio(x: f64) -> String {
    match x {
        x if !x.is_finite() => "-".into(),
        x if x == 0.0 || x >= 1e-4 => format!("{x:.5}"),
        x => format!("{x:.1e}"),
    }
}

/// A round number on a logarithmic axis.
pub fn short(x: f64) -> String {
    if x >= 1e-4 { format!("{x}") } else { format!("{x:e}") }
}

/// A cosine: how many nines it has is what matters.
pub fn cosine(x: f64) -> String {
    if x.is_finite() { format!("{x:.6}") } else { "-".into() }
}

/// Decibels.
pub fn decibel(x: f64) -> String {
    if x.is_finite() { format!("{x:.2} dB") } else { "-".into() }
}

/// A share as a percentage.
pub fn percent(x: Option<f64>) -> String {
    x.filter(|x| x.is_finite()).map_or_else(|| "-".into(), |x| format!("{:.1}%", 100.0 * x))
}

/// A duration to three digits.
pub fn time(x: Duration) -> String {
    match x.as_secs_f64() {
        s if s < 1e-3 => format!("{:.0} us", s * 1e6),
        s if s < 0.01 => format!("{:.2} ms", s * 1e3),
        s if s < 0.1 => format!("{:.1} ms", s * 1e3),
        s if s < 1.0 => format!("{:.0} ms", s * 1e3),
        s if s < 100.0 => format!("{s:.2} s"),
        s if s < 6000.0 => format!("{:.0} min", s / 60.0),
        s => format!("{:.1} h", s / 3600.0),
    }
}

/// Milliseconds, as the JSON files have them.
pub fn milliseconds(x: Duration) -> f64 {
    x.as_secs_f64() * 1e3
}

/// A number with its thousands apart.
pub fn thousands(n: usize) -> String {
    let digits = n.to_string();
    let mut out = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_read_well() {
        assert_eq!(
            [ratio(0.0), ratio(0.00412), ratio(4.2e-8), ratio(f64::NAN)],
            ["0.00000", "0.00412", "4.2e-8", "-"]
        );
        assert_eq!([percent(Some(0.4584)), percent(None)], ["45.8%", "-"]);
        assert_eq!(
            [thousands(7), thousands(4096), thousands(75_600), thousands(1_000_000)],
            ["7", "4,096", "75,600", "1,000,000"]
        );
        let texts =
            [40e-6, 0.00123, 0.0123, 0.234, 1.5, 300.0, 9000.0].map(|s| time(Duration::from_secs_f64(s)));
        assert_eq!(texts, ["40 us", "1.23 ms", "12.3 ms", "234 ms", "1.50 s", "5 min", "2.5 h"]);
    }
}
