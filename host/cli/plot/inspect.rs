//! What block means remove in each token order, and the heaviest tokens and channels.

use std::path::Path;

use plotters::style::RGBColor;

use super::super::failure::Result;
use super::super::inspect::{Head, head_name, heaviest, token_name};
use super::canvas::{Anchor, BLUE, Bar, Canvas, FAINT, Frame, GREY, INK, LINE, ORANGE, Scale, TEAL, draw};

/// A token order: its name, its colour, the share that the means remove in it.
type Order = (&'static str, RGBColor, fn(&Head) -> Option<f64>);

/// Most heads whose bars are drawn.
const HEADS: usize = 16;

/// Draws the figures of `heads`.
pub fn inspect(path: &Path, title: &str, heads: &[Head]) -> Result<()> {
    draw(path, 700, |canvas| {
        canvas.title("Value outliers and what block means remove", title)?;
        shares(canvas, heads)?;
        let tokens = heaviest(heads, |head| &head.tokens, |token| token.over_median);
        let tokens = tokens.iter().map(|(head, token, ratio)| bar(heads, head, token_name(token), *ratio));
        let frame = Frame { left: 870, top: 140, right: 1120, bottom: 360 };
        heavy(canvas, frame, "Heaviest tokens: norm over median", &tokens.collect::<Vec<_>>())?;
        let channels = heaviest(heads, |head| &head.channels, |channel| channel.over_median);
        let channels = channels
            .iter()
            .map(|(head, channel, ratio)| bar(heads, head, format!("channel {}", channel.channel), *ratio));
        let frame = Frame { left: 870, top: 436, right: 1120, bottom: 656 };
        heavy(canvas, frame, "Heaviest channels: RMS over median", &channels.collect::<Vec<_>>())
    })
}

fn bar(heads: &[Head], head: &Head, name: String, ratio: f64) -> Bar {
    Bar {
        label: format!("{name}, head {}", head_name(head, heads)),
        value: ratio,
        text: format!("{ratio:.2}x"),
        color: ORANGE,
        bold: false,
    }
}

fn heavy(canvas: &Canvas, frame: Frame, title: &str, bars: &[Bar]) -> Result<()> {
    canvas.bold(title, (frame.left - 200, frame.top - 24), 19, INK, Anchor::Left)?;
    canvas.bars(frame, Scale::linear(bars.iter().map(|bar| bar.value)), bars, |x| format!("{x}x"))
}

/// Upright bars, three a head.
fn shares(canvas: &Canvas, heads: &[Head]) -> Result<()> {
    let frame = Frame { left: 90, top: 180, right: 610, bottom: 610 };
    let orders: [Order; 3] = [
        ("sequence", GREY, |head| Some(head.mean_share.sequence)),
        ("cube", TEAL, |head| head.mean_share.cube),
        ("k-means", BLUE, |head| Some(head.mean_share.kmeans)),
    ];
    let here: Vec<_> =
        orders.into_iter().filter(|(_, _, share)| heads.iter().any(|h| share(h).is_some())).collect();
    canvas.bold("Energy of the values in block means, by token order", (40, 116), 19, INK, Anchor::Left)?;
    canvas.legend((40, 146), &here.iter().map(|(name, color, _)| (*name, *color)).collect::<Vec<_>>())?;

    let shown = &heads[..heads.len().min(HEADS)];
    let scale =
        Scale::linear(shown.iter().flat_map(|head| here.iter().filter_map(|(_, _, share)| share(head))));
    let y = |value| frame.bottom - (scale.at(value) * f64::from(frame.bottom - frame.top)).round() as i32;
    for tick in scale.ticks() {
        canvas.line((frame.left, y(tick)), (frame.right, y(tick)), LINE)?;
        canvas.text(
            &format!("{:.0}%", tick * 100.0),
            (frame.left - 10, y(tick)),
            15,
            FAINT,
            Anchor::Right,
        )?;
    }
    let pitch = f64::from(frame.right - frame.left) / shown.len() as f64;
    let width = (pitch * 0.78 / here.len() as f64).min(70.0);
    for (i, head) in shown.iter().enumerate() {
        let center = f64::from(frame.left) + (i as f64 + 0.5) * pitch;
        let first = center - width * here.len() as f64 / 2.0;
        for (j, (_, color, share)) in here.iter().enumerate() {
            let Some(share) = share(head) else { continue };
            let left = (first + width * j as f64) as i32;
            let bar =
                Frame { left: left + 1, top: y(share), right: left + width as i32 - 1, bottom: frame.bottom };
            canvas.rectangle(bar, *color)?;
            if width > 30.0 {
                let above = (left + width as i32 / 2, y(share) - 12);
                canvas.text(&format!("{:.1}%", share * 100.0), above, 15, INK, Anchor::Center)?;
            }
        }
        let name = head_name(head, heads);
        canvas.text(&name, (center as i32, frame.bottom + 16), 16, INK, Anchor::Center)?;
    }
    canvas.line((frame.left, frame.bottom), (frame.right, frame.bottom), FAINT)?;
    let axis = match heads.len() {
        n if n > HEADS => format!("head (the first {HEADS} of {n})"),
        _ => "head".into(),
    };
    canvas.text(&axis, ((frame.left + frame.right) / 2, frame.bottom + 44), 16, FAINT, Anchor::Center)
}
