//! Errors by recipe, on a logarithmic axis.

use std::path::Path;

use super::super::compare::{Row, lowest};
use super::super::failure::Result;
use super::super::table;
use super::canvas::{Anchor, BLUE, Bar, Canvas, FAINT, Frame, GREY, INK, Scale, WIDTH, draw};

/// Where the bars begin.
const TOP: i32 = 136;

/// Draws the relative errors of `rows`, peers in grey and ours in blue. The exact recipe, whose error is f32
/// rounding, is a remark: its bar would stretch the axis over four more decades.
pub fn compare(path: &Path, title: &str, rows: &[Row]) -> Result<()> {
    let bars = rows.iter().filter(|row| !row.is_exact()).count();
    let bottom = TOP + (56 * bars as i32).clamp(56, 482);
    draw(path, bottom + 82, |canvas| figure(canvas, title, rows, bottom))
}

fn figure(canvas: &Canvas, title: &str, rows: &[Row], bottom: i32) -> Result<()> {
    canvas.title("Error of low-bit attention by recipe", title)?;
    canvas.legend((40, 106), &[("peers", GREY), ("VC-Attention (ours)", BLUE)])?;
    let labels = "recipe, bits of Q and K / P and V | relative L2, PSNR";
    canvas.text(labels, (WIDTH - 40, 106), 16, FAINT, Anchor::Right)?;

    let lowest = lowest(rows.iter().filter(|row| !row.is_exact())).map_or(f64::NAN, |row| row.rel_l2);
    let bars: Vec<Bar> = rows.iter().filter(|row| !row.is_exact()).map(|row| bar(row, lowest)).collect();
    let mut left = 180;
    for bar in &bars {
        left = left.max(60 + canvas.width(&bar.label, 18)?).min(620);
    }
    let frame = Frame { left, top: TOP, right: WIDTH - 230, bottom };
    canvas.bars(frame, Scale::log(bars.iter().map(|bar| bar.value)), &bars, table::short)?;
    let below = "relative L2 error against exact attention in f64 (lower is better, logarithmic)";
    canvas.text(below, (frame.left.min(500), frame.bottom + 42), 16, INK, Anchor::Left)?;
    if let Some(exact) = rows.iter().find(|row| row.is_exact()) {
        let exact = format!("exact in f32: {}", table::ratio(exact.rel_l2));
        canvas.text(&exact, (WIDTH - 40, frame.bottom + 42), 16, FAINT, Anchor::Right)?;
    }
    Ok(())
}

fn bar(row: &Row, lowest: f64) -> Bar {
    Bar {
        label: format!("{}  {}/{}", row.name, row.bits_qk, row.bits_pv),
        value: row.rel_l2,
        text: format!("{}   {}", table::ratio(row.rel_l2), table::decibel(row.psnr_db)),
        color: if row.is_baseline() { GREY } else { BLUE },
        bold: row.rel_l2 == lowest,
    }
}
