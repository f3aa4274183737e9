//! What both figures are drawn with: a white sheet, text, axes, horizontal bars.
//!
//! The sheet is drawn three times as large and averaged down: letters then sit where they belong, and not on
//! the next whole pixel.

use std::path::Path;
use std::sync::Once;

use epaint_default_fonts::UBUNTU_LIGHT;
use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use plotters::style::{FontFamily, register_font};

use super::super::failure::{Failure, Result};
use super::super::output;

pub const WIDTH: i32 = 1200;

pub const INK: RGBColor = RGBColor(28, 32, 38);
pub const FAINT: RGBColor = RGBColor(96, 104, 114);
pub const LINE: RGBColor = RGBColor(222, 226, 231);
pub const GREY: RGBColor = RGBColor(148, 158, 170);
pub const BLUE: RGBColor = RGBColor(31, 98, 181);
pub const TEAL: RGBColor = RGBColor(44, 157, 146);
pub const ORANGE: RGBColor = RGBColor(221, 120, 37);

const FONT: &str = "vca";

/// Drawn pixels per pixel of the figure, along each axis.
const FINE: i32 = 3;

/// Where a text's given point lies in it.
#[derive(Clone, Copy)]
pub enum Anchor {
    Left,
    Center,
    Right,
}

/// Part of the sheet in pixels.
#[derive(Clone, Copy)]
pub struct Frame {
    pub left: i32,
    pub top: i32,
    pub right: i32,
    pub bottom: i32,
}

/// A bar and its texts.
pub struct Bar {
    /// Left of the axis.
    pub label: String,
    pub value: f64,
    /// Behind the bar's end.
    pub text: String,
    pub color: RGBColor,
    pub bold: bool,
}

/// How values become lengths.
#[derive(Clone, Copy)]
pub enum Scale {
    /// From 0.
    Linear { max: f64 },
    /// From `min`.
    Log { min: f64, max: f64 },
}

impl Scale {
    /// From 0 to a little more than the largest value.
    pub fn linear(values: impl Iterator<Item = f64>) -> Self {
        let max = values.fold(0.0, f64::max);
        Scale::Linear { max: if max > 0.0 { max } else { 1.0 } }
    }

    /// Wide enough for all values that a logarithm has.
    pub fn log(values: impl Iterator<Item = f64> + Clone) -> Self {
        let values = values.filter(|x| *x > 0.0 && x.is_finite());
        let (min, max) = values.fold((f64::MAX, 0.0f64), |(a, b), x| (a.min(x), b.max(x)));
        if max == 0.0 {
            return Scale::Log { min: 1e-4, max: 1.0 };
        }
        let max = max * 1.1;
        // A decade at least: less has hardly a round number in it.
        Scale::Log { min: (min / 3.0).min(max / 10.0), max }
    }

    /// Position of a value, 0 to 1.
    pub fn at(self, x: f64) -> f64 {
        let at = match self {
            Scale::Linear { max } => x / max,
            Scale::Log { min, max } => (x / min).ln() / (max / min).ln(),
        };
        if at.is_nan() { 0.0 } else { at.clamp(0.0, 1.0) }
    }

    /// Round values inside the scale.
    pub fn ticks(self) -> Vec<f64> {
        match self {
            Scale::Linear { max } => {
                let magnitude = 10f64.powf((max / 5.0).log10().floor());
                let step =
                    [1.0, 2.0, 5.0, 10.0].map(|x| x * magnitude).into_iter().find(|step| max / step <= 6.0);
                let step = step.unwrap_or(max);
                (0..).map(|i| f64::from(i) * step).take_while(|x| *x <= max * 1.0001).collect()
            }
            Scale::Log { min, max } => {
                let decades = min.log10().floor() as i32..=max.log10().ceil() as i32;
                decades
                    .flat_map(|exponent| [1.0, 2.0, 5.0].map(|x| x * 10f64.powi(exponent)))
                    .filter(|x| (min..=max).contains(x))
                    .collect()
            }
        }
    }
}

/// A sheet to draw on.
pub struct Canvas<'a> {
    area: DrawingArea<BitMapBackend<'a>, Shift>,
}

/// Draws a figure of [`WIDTH`] x `height` pixels and writes it.
pub fn draw(path: &Path, height: i32, figure: impl FnOnce(&Canvas) -> Result<()>) -> Result<()> {
    static FONTS: Once = Once::new();
    FONTS.call_once(|| {
        // A font that cannot be read makes every text fail, with a message.
        let _ = register_font(FONT, FontStyle::Normal, UBUNTU_LIGHT);
    });
    let size = ((WIDTH * FINE) as u32, (height * FINE) as u32);
    let mut fine = vec![255u8; (size.0 * size.1 * 3) as usize];
    {
        let area = BitMapBackend::with_buffer(&mut fine, size).into_drawing_area();
        let canvas = Canvas { area };
        figure(&canvas)?;
        canvas.area.present().map_err(failed)?;
    }
    let pixels = averaged(&fine);
    let mut file = Vec::new();
    let mut encoder = png::Encoder::new(&mut file, WIDTH as u32, height as u32);
    encoder.set_color(png::ColorType::Rgb);
    encoder.set_depth(png::BitDepth::Eight);
    encoder
        .write_header()
        .and_then(|mut writer| writer.write_image_data(&pixels).and_then(|()| writer.finish()))
        .map_err(failed)?;
    output::write(path, &file)
}

/// The mean of every `FINE` x `FINE` pixels.
fn averaged(fine: &[u8]) -> Vec<u8> {
    let (n, width) = (FINE as usize, WIDTH as usize);
    let mut pixels = Vec::with_capacity(fine.len() / (n * n));
    for rows in fine.chunks_exact(n * n * width * 3) {
        for x in 0..width {
            for color in 0..3 {
                let sum: usize = (0..n * n)
                    .map(|i| usize::from(rows[((i / n) * width * n + x * n + i % n) * 3 + color]))
                    .sum();
                pixels.push(((sum + n * n / 2) / (n * n)) as u8);
            }
        }
    }
    pixels
}

fn failed(error: impl std::fmt::Display) -> Failure {
    Failure::failed(format!("plot: {error}"))
}

impl Canvas<'_> {
    pub fn text(&self, text: &str, at: (i32, i32), size: i32, color: RGBColor, anchor: Anchor) -> Result<()> {
        self.text_at(text, (at.0 * FINE, at.1 * FINE), size, color, anchor)
    }

    /// The font has one weight: bold is the same text twice more, a fraction of a pixel on.
    pub fn bold(&self, text: &str, at: (i32, i32), size: i32, color: RGBColor, anchor: Anchor) -> Result<()> {
        (0..3).try_for_each(|i| self.text_at(text, (at.0 * FINE + i, at.1 * FINE), size, color, anchor))
    }

    /// Text at a place in drawn pixels.
    fn text_at(&self, text: &str, at: (i32, i32), size: i32, color: RGBColor, anchor: Anchor) -> Result<()> {
        let h = match anchor {
            Anchor::Left => HPos::Left,
            Anchor::Center => HPos::Center,
            Anchor::Right => HPos::Right,
        };
        let font = (FontFamily::Name(FONT), size * FINE).into_font();
        let style = font.color(&color).pos(Pos::new(h, VPos::Center));
        self.area.draw(&Text::new(text.to_string(), at, style)).map_err(failed)
    }

    /// What the figure shows, and of what; the latter loses its beginning (folders) where it is too long.
    pub fn title(&self, title: &str, of: &str) -> Result<()> {
        self.bold(title, (40, 38), 27, INK, Anchor::Left)?;
        let mut shown = of.to_string();
        while self.width(&shown, 18)? > WIDTH - 80 {
            shown = format!("...{}", shown.chars().skip(13).collect::<String>());
        }
        self.text(&shown, (40, 72), 18, FAINT, Anchor::Left)
    }

    /// Width of a text in pixels.
    pub fn width(&self, text: &str, size: i32) -> Result<i32> {
        let style = (FontFamily::Name(FONT), size * FINE).into_font().color(&INK);
        Ok(self.area.estimate_text_size(text, &style).map_err(failed)?.0 as i32 / FINE)
    }

    pub fn rectangle(&self, frame: Frame, color: RGBColor) -> Result<()> {
        // plotters counts the last pixel in.
        let first = (frame.left * FINE, frame.top * FINE);
        let last = ((frame.right * FINE - 1).max(first.0), (frame.bottom * FINE - 1).max(first.1));
        self.area.draw(&Rectangle::new([first, last], color.filled())).map_err(failed)
    }

    /// A level or upright line, a pixel wide.
    pub fn line(&self, from: (i32, i32), to: (i32, i32), color: RGBColor) -> Result<()> {
        self.rectangle(Frame { left: from.0, top: from.1, right: to.0 + 1, bottom: to.1 + 1 }, color)
    }

    /// Coloured squares with names, from `at` to the right.
    pub fn legend(&self, (mut x, y): (i32, i32), entries: &[(&str, RGBColor)]) -> Result<()> {
        for (name, color) in entries {
            self.rectangle(Frame { left: x, top: y - 6, right: x + 12, bottom: y + 6 }, *color)?;
            self.text(name, (x + 20, y), 16, INK, Anchor::Left)?;
            x += 44 + self.width(name, 16)?;
        }
        Ok(())
    }

    /// Horizontal bars on an axis at the left edge of `frame`, which leaves room for labels and for the ticks
    /// below it; `tick` writes a value of the axis.
    pub fn bars(&self, frame: Frame, scale: Scale, bars: &[Bar], tick: impl Fn(f64) -> String) -> Result<()> {
        let x = |value| frame.left + (scale.at(value) * f64::from(frame.right - frame.left)).round() as i32;
        for value in scale.ticks() {
            self.line((x(value), frame.top), (x(value), frame.bottom), LINE)?;
            self.text(&tick(value), (x(value), frame.bottom + 14), 15, FAINT, Anchor::Center)?;
        }
        let pitch = f64::from(frame.bottom - frame.top) / bars.len().max(1) as f64;
        let half = (pitch * 0.36).clamp(1.0, 17.0) as i32;
        let size = (pitch * 0.62).clamp(9.0, 18.0) as i32;
        for (i, bar) in bars.iter().enumerate() {
            let y = frame.top + ((i as f64 + 0.5) * pitch) as i32;
            let end = x(bar.value);
            let write = if bar.bold { Self::bold } else { Self::text };
            write(self, &bar.label, (frame.left - 12, y), size, INK, Anchor::Right)?;
            if bar.value.is_finite() {
                self.rectangle(
                    Frame { left: frame.left, top: y - half, right: end, bottom: y + half },
                    bar.color,
                )?;
            }
            // The lines of the axis must not run through figures.
            let width = self.width(&bar.text, size)?;
            let behind = Frame { left: end + 4, top: y - half, right: end + 16 + width, bottom: y + half };
            self.rectangle(behind, WHITE)?;
            write(self, &bar.text, (end + 10, y), size, INK, Anchor::Left)?;
        }
        self.line((frame.left, frame.top), (frame.left, frame.bottom), FAINT)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scales_place_their_ends_and_have_a_few_ticks() {
        let log = Scale::log([0.002, 0.05, f64::NAN, 0.0].into_iter());
        assert!(log.at(0.002) > 0.1 && log.at(0.05) < 1.0 && log.at(f64::NAN) == 0.0);
        assert!((3..10).contains(&log.ticks().len()));
        for narrow in [[0.03564, 0.0384], [0.2, 0.2], [1e-7, 1.01e-7]] {
            assert!(Scale::log(narrow.into_iter()).ticks().len() >= 3, "{narrow:?}");
        }
        for max in [0.037, 0.5, 1.0, 4.2, 61.0, 950.0] {
            let ticks = Scale::linear([max].into_iter()).ticks();
            assert!((3..=7).contains(&ticks.len()), "{max}: {ticks:?}");
        }
    }
}
