//! Clips as a person looks at them: animations, and one sheet of frames with a line for every row.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use anyhow::{Context, Result, ensure};
use candle_core::Tensor;
use epaint_default_fonts::UBUNTU_LIGHT;
use gif::{Encoder, Frame, Repeat};
use plotters::prelude::*;
use plotters::style::{FontStyle, register_font};

use crate::record::replace;
use crate::statistics::{FEWEST, Mean};

/// Pixels of a picture per pixel of a clip.
const ZOOM: usize = 3;
/// Hundredths of a second between frames.
const DELAY: u16 = 12;
/// Frames of a clip on a sheet.
const COLUMNS: usize = 8;
/// Height of a line of text on a sheet.
const TEXT: usize = 22;
const FONT: &str = "testbed";

/// A clip [3, frames, height, width] in [-1, 1] as frames of packed RGB.
struct Frames {
    width: usize,
    height: usize,
    rgb: Vec<Vec<u8>>,
}

impl Frames {
    fn new(clip: &Tensor) -> Result<Self> {
        let (channels, frames, height, width) = clip.dims4()?;
        let shape = [channels, frames, height, width];
        ensure!(channels == 3 && clip.elem_count() > 0, "a clip [3, frames, height, width], given {shape:?}");
        let x = clip.permute([1, 2, 3, 0])?.flatten_all()?.to_vec1::<f32>()?;
        let byte = |x: &f32| ((x.clamp(-1.0, 1.0) / 2.0 + 0.5) * 255.0).round() as u8;
        let rgb = x.chunks_exact(x.len() / frames).map(|frame| frame.iter().map(byte).collect()).collect();
        Ok(Self { width, height, rgb })
    }

    /// A frame with every pixel repeated `ZOOM` times along both axes.
    fn zoomed(&self, frame: usize) -> Vec<u8> {
        let row = |y: usize| {
            let pixels = self.rgb[frame][y * self.width * 3..][..self.width * 3].chunks_exact(3);
            pixels.flat_map(|p| p.repeat(ZOOM)).collect::<Vec<u8>>()
        };
        (0..self.height).flat_map(|y| row(y).repeat(ZOOM)).collect()
    }
}

/// Writes a clip as an animated GIF that repeats.
///
/// # Errors
/// Of the file, or when the clip is none.
pub fn animation(path: &Path, clip: &Tensor) -> Result<()> {
    let frames = Frames::new(clip)?;
    let (width, height) = ((frames.width * ZOOM) as u16, (frames.height * ZOOM) as u16);
    replace(path, |path| {
        let mut encoder = Encoder::new(BufWriter::new(File::create(path)?), width, height, &[])?;
        encoder.set_repeat(Repeat::Infinite)?;
        for i in 0..frames.rgb.len() {
            let mut frame = Frame::from_rgb(width, height, &frames.zoomed(i));
            frame.delay = DELAY;
            encoder.write_frame(&frame)?;
        }
        encoder.into_inner()?.flush()?;
        Ok(())
    })
}

/// Writes frames of several clips, evenly spaced in time, one line a clip with its text above.
///
/// # Errors
/// Of the file, or when a clip is none.
pub fn sheet(path: &Path, clips: &[(String, Tensor)]) -> Result<()> {
    // A font that is registered already stays.
    let _ = register_font(FONT, FontStyle::Normal, UBUNTU_LIGHT);
    let clips: Vec<(&str, Frames)> =
        clips.iter().map(|(text, clip)| Ok((text.as_str(), Frames::new(clip)?))).collect::<Result<_>>()?;
    let zoomed = |f: &Frames| (f.width * ZOOM, f.height * ZOOM);
    let (width, height) = clips.iter().map(|(_, f)| zoomed(f)).max().context("a sheet without clips")?;
    let (gap, line) = (2, TEXT + height + 4);
    let columns = COLUMNS.min(clips.iter().map(|(_, f)| f.rgb.len()).max().unwrap_or(1));
    let sheet = (columns * (width + gap), clips.len() * line);
    let mut rgb = vec![0; sheet.0 * sheet.1 * 3];
    let size = (sheet.0 as u32, sheet.1 as u32);
    let root = BitMapBackend::with_buffer(&mut rgb, size).into_drawing_area();
    root.fill(&WHITE)?;
    for (i, (text, frames)) in clips.iter().enumerate() {
        let top = (i * line) as i32;
        root.draw(&Text::new(*text, (3, top + 3), (FONT, 16).into_font()))?;
        for column in 0..columns {
            let last = frames.rgb.len() - 1;
            let frame = if columns == 1 { 0 } else { (column * last + (columns - 1) / 2) / (columns - 1) };
            let (w, h) = zoomed(frames);
            let at = ((column * (width + gap)) as i32, top + TEXT as i32);
            let picture = BitMapElement::with_owned_buffer(at, (w as u32, h as u32), frames.zoomed(frame));
            root.draw(&picture.context("a frame of its own size")?)?;
        }
    }
    root.present()?;
    drop(root);
    write(path, size, &rgb)
}

/// Writes packed RGB as a PNG.
fn write(path: &Path, (width, height): (u32, u32), rgb: &[u8]) -> Result<()> {
    replace(path, |path| {
        let mut encoder = png::Encoder::new(BufWriter::new(File::create(path)?), width, height);
        encoder.set_color(png::ColorType::Rgb);
        encoder.set_depth(png::BitDepth::Eight);
        let mut writer = encoder.write_header()?;
        writer.write_image_data(rgb)?;
        Ok(writer.finish()?)
    })
}

/// A row of a plot: mean PSNR with the ends of its interval, and the lowest.
#[derive(Clone, Debug)]
pub struct Dot {
    /// Name.
    pub text: String,
    /// Mean in dB and the interval, where there is one.
    pub mean: Mean,
    /// Lowest of a prompt in dB.
    pub lowest: f64,
}

/// Draws rows of PSNR with their intervals.
///
/// # Errors
/// Of the file.
pub fn plot(path: &Path, title: &str, dots: &[Dot]) -> Result<()> {
    let _ = register_font(FONT, FontStyle::Normal, UBUNTU_LIGHT);
    let (left, right, top, step) = (560, 40, 70, 30);
    let size = (1230, (top + step * dots.len() as i32 + 60) as u32);
    let mut rgb = vec![0; size.0 as usize * size.1 as usize * 3];
    let root = BitMapBackend::with_buffer(&mut rgb, size).into_drawing_area();
    root.fill(&WHITE)?;
    let low = dots.iter().map(|d| d.lowest).fold(f64::INFINITY, f64::min).floor() - 1.0;
    let upper = |d: &Dot| d.mean.interval.map_or(d.mean.mean, |[_, upper]| upper);
    let high = dots.iter().map(upper).fold(f64::NEG_INFINITY, f64::max).ceil() + 1.0;
    let x = |db: f64| left + ((db - low) / (high - low) * f64::from(size.0 as i32 - left - right)) as i32;
    let bottom = top + step * dots.len() as i32;
    root.draw(&Text::new(title, (16, 14), (FONT, 22).into_font()))?;
    let note = format!(
        "dot: mean, bar: 95% interval of the mean (from {FEWEST} prompts on), cross: lowest prompt; PSNR in dB against \
         exact attention"
    );
    root.draw(&Text::new(note.as_str(), (16, 42), (FONT, 15).into_font().color(&BLACK.mix(0.6))))?;
    let stride = if high - low > 30.0 { 5.0 } else { 2.0 };
    let mut tick = (low / stride).ceil() * stride;
    while tick <= high {
        root.draw(&PathElement::new(vec![(x(tick), top), (x(tick), bottom)], BLACK.mix(0.12)))?;
        root.draw(&Text::new(format!("{tick}"), (x(tick) - 8, bottom + 8), (FONT, 15).into_font()))?;
        tick += stride;
    }
    for (i, dot) in dots.iter().enumerate() {
        let y = top + step * i as i32 + step / 2;
        root.draw(&Text::new(dot.text.as_str(), (16, y - 9), (FONT, 17).into_font()))?;
        if let Some([lower, upper]) = dot.mean.interval {
            root.draw(&Rectangle::new([(x(lower), y - 2), (x(upper), y + 2)], BLUE.mix(0.35).filled()))?;
        }
        root.draw(&Circle::new((x(dot.mean.mean), y), 5, BLUE.filled()))?;
        root.draw(&Cross::new((x(dot.lowest), y), 4, BLACK.mix(0.5)))?;
    }
    root.present()?;
    drop(root);
    write(path, size, &rgb)
}
