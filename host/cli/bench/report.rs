//! What was timed, as tables and as JSON.

use std::time::Duration;

use comfy_table::Table;
use serde::Serialize;
use vc_attention::Shape;

use super::super::input::title;
use super::super::table::{figure, milliseconds, percent, table, thousands, time};
use super::call::Call;
use super::floor::Ceilings;

/// Names of the stages.
pub mod stage {
    pub const COLD: &str = "group, cold";
    pub const WARM: &str = "group, warm";
    pub const Q: &str = "K statistics, Q";
    pub const K: &str = "K";
    pub const V: &str = "V";
    pub const PREPARE: &str = "prepare Q, K, V";
    pub const ATTENTION: &str = "attention";
    pub const WHOLE_COLD: &str = "whole call, cold";
    pub const WHOLE_WARM: &str = "whole call, warm";
    pub const WHOLE: &str = "whole call, order reused";
    pub const AVERAGE: &str = "average of 40 steps";
}

/// The JSON file.
#[derive(Serialize)]
pub struct Report {
    pub backend: &'static str,
    pub device: String,
    pub data: String,
    pub ceilings: Option<Ceilings>,
    pub calls: Vec<Timed>,
}

/// A recipe on a shape.
#[derive(Serialize)]
pub struct Timed {
    pub name: String,
    pub batch: usize,
    pub heads: usize,
    pub tokens: usize,
    pub head_dim: usize,
    pub recipe: String,
    /// Calls whose median counts.
    pub runs: usize,
    /// Key blocks between promotions of the FP8 sums to f32, on a GPU.
    pub promote: Option<u32>,
    pub grouping: Option<GroupingSizes>,
    /// Share of the value energy that the block means hold.
    pub mean_share: Option<f64>,
    /// Largest |row maximum| of the centred scores, in code units.
    pub max_score: f32,
    pub stages: Vec<Stage>,
}

/// What a k-means does.
#[derive(Clone, Copy, Serialize)]
pub struct GroupingSizes {
    pub clusters: usize,
    pub cold_iterations: usize,
    pub warm_iterations: usize,
}

/// A stage's time.
#[derive(Serialize)]
pub struct Stage {
    pub stage: &'static str,
    pub median_ms: f64,
    pub fastest_ms: f64,
    pub floor_ms: Option<f64>,
    pub ratio: Option<f64>,
    /// 4 B H N N D over the median, where the attention is part of the stage.
    pub tflops: Option<f64>,
}

impl Stage {
    /// From its times, at least one.
    pub fn new(stage: &'static str, times: impl IntoIterator<Item = Duration>) -> Self {
        let mut times: Vec<Duration> = times.into_iter().collect();
        times.sort();
        let pick = |i: usize| times.get(i).map_or(f64::NAN, |&time| milliseconds(time));
        Self {
            stage,
            median_ms: pick(times.len() / 2),
            fastest_ms: pick(0),
            floor_ms: None,
            ratio: None,
            tflops: None,
        }
    }

    /// Beside the time that the hardware needs at least.
    pub fn above(self, floor: Duration) -> Self {
        let floor_ms = milliseconds(floor);
        Self { floor_ms: Some(floor_ms), ratio: Some(self.median_ms / floor_ms), ..self }
    }

    /// With the operations of the attention in it.
    pub fn with_flops(self, flops: f64) -> Self {
        Self { tflops: Some(flops / self.median_ms / 1e9), ..self }
    }

    fn time(&self) -> String {
        duration(self.median_ms)
    }
}

fn duration(milliseconds: f64) -> String {
    Duration::try_from_secs_f64(milliseconds / 1e3).map_or_else(|_| "-".into(), time)
}

impl Timed {
    /// Without stages yet.
    pub fn new(call: &Call, recipe: &str, runs: usize) -> Self {
        Self {
            name: call.name.clone(),
            batch: call.batch,
            heads: call.heads,
            tokens: call.tokens(),
            head_dim: call.head_dim,
            recipe: recipe.into(),
            runs,
            promote: None,
            grouping: None,
            mean_share: None,
            max_score: 0.0,
            stages: Vec::new(),
        }
    }

    pub fn stage(&self, name: &str) -> Option<&Stage> {
        self.stages.iter().find(|stage| stage.stage == name)
    }

    /// Median of a stage in milliseconds; 0 for a stage that the recipe does not have.
    pub fn median(&self, name: &str) -> f64 {
        self.stage(name).map_or(0.0, |stage| stage.median_ms)
    }

    fn title(&self) -> String {
        let shape = Shape {
            batch: self.batch,
            q_heads: self.heads,
            kv_heads: self.heads,
            q_tokens: self.tokens,
            kv_tokens: self.tokens,
            head_dim: self.head_dim,
        };
        title(&self.name, &shape)
    }
}

/// The whole report as text.
pub fn text(report: &Report) -> String {
    let mut text = format!("{} ({}), {}\n", report.backend, report.device, report.data);
    let shapes: Vec<&[Timed]> = report.calls.chunk_by(|a, b| a.tokens == b.tokens).collect();
    if report.ceilings.is_none() {
        for calls in shapes {
            let runs = calls[0].runs;
            text += &format!("\n{}, median of {runs} calls\n\n{}\n", calls[0].title(), by_recipe(calls));
        }
        text += "Times are of an emulation on the CPU: they say nothing about speed on a GPU.\n";
        return text;
    }
    if let [calls] = shapes[..] {
        text.extend(calls.iter().map(|call| format!("\n{}\n", by_stage(call))));
    }
    text += &format!("\n{}\n", overview(&report.calls));
    text
}

/// On a GPU: every stage of a call.
fn by_stage(call: &Timed) -> String {
    let mut table = table(&[&call.recipe, "time", "floor", "ratio", "TFLOP/s"]);
    let or = |x: Option<String>| figure(x.unwrap_or_else(|| "-".into()));
    for stage in &call.stages {
        table.add_row(vec![
            stage.stage.into(),
            figure(stage.time()),
            or(stage.floor_ms.map(duration)),
            or(stage.ratio.map(|x| format!("{x:.2}"))),
            or(stage.tflops.map(|x| format!("{x:.0}"))),
        ]);
    }
    let grouping = call.grouping.map_or("tokens as they come".into(), |g| {
        let GroupingSizes { clusters, cold_iterations, warm_iterations } = g;
        format!(
            "k-means with {clusters} clusters, {cold_iterations} iterations cold and {warm_iterations} warm"
        )
    });
    let share = call.mean_share.map_or(String::new(), |s| format!("; block means hold {}", percent(Some(s))));
    let promotion = match call.promote {
        Some(1) => "every key block".into(),
        other => format!("every {} key blocks", other.unwrap_or_default()),
    };
    format!(
        "{}, median of {} calls\n{grouping}{share}; sums to f32 {promotion}; largest score {:.0} code units\n\n{table}",
        call.title(),
        call.runs,
        call.max_score,
    )
}

/// On a GPU: a line a call.
fn overview(calls: &[Timed]) -> Table {
    #[rustfmt::skip]
    let mut table = table(&[
        "recipe", "tokens", stage::COLD, stage::WARM, "prepare", "attention", "TFLOP/s", stage::AVERAGE, "TFLOP/s",
    ]);
    for call in calls {
        let stage = |name: &str| call.stage(name).map_or_else(|| "-".into(), Stage::time);
        let tflops = |name: &str| {
            let tflops = call.stage(name).and_then(|stage| stage.tflops);
            tflops.map_or_else(|| "-".into(), |x| format!("{x:.0}"))
        };
        let mut row = vec![(&call.recipe).into(), figure(thousands(call.tokens))];
        row.extend([stage::COLD, stage::WARM, stage::PREPARE, stage::ATTENTION].map(|s| figure(stage(s))));
        row.push(figure(tflops(stage::ATTENTION)));
        row.push(figure(stage(stage::AVERAGE)));
        row.push(figure(tflops(stage::AVERAGE)));
        table.add_row(row);
    }
    table
}

/// On the CPU: a line a recipe.
fn by_recipe(calls: &[Timed]) -> Table {
    #[rustfmt::skip]
    let mut table = table(&[
        "recipe", "group", "Q", "K", "V", "attend", "whole call", "TFLOP/s attend", "whole", "vs exact",
    ]);
    let exact = calls.iter().find(|call| call.recipe == "exact").map(|call| call.median(stage::WHOLE_COLD));
    for call in calls {
        let times = [stage::COLD, stage::Q, stage::K, stage::V, stage::ATTENTION, stage::WHOLE_COLD];
        let mut row = vec![(&call.recipe).into()];
        row.extend(times.map(|name| figure(duration(call.median(name)))));
        row.extend([stage::ATTENTION, stage::WHOLE_COLD].map(|name| {
            let tflops = call.stage(name).and_then(|stage| stage.tflops);
            figure(tflops.map_or_else(|| "-".into(), |x| format!("{x:.4}")))
        }));
        row.push(figure(
            exact.map_or_else(
                || "-".into(),
                |exact| format!("{:.2}x", exact / call.median(stage::WHOLE_COLD)),
            ),
        ));
        table.add_row(row);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::super::call::parse;
    use super::super::floor::H200;
    use super::*;

    fn ms(x: f64) -> Duration {
        Duration::from_secs_f64(x / 1e3)
    }

    fn report(tokens: &[usize]) -> Report {
        let call = parse("wan2.2").unwrap();
        let calls = tokens.iter().map(|&tokens| {
            let mut timed = Timed::new(&call.at(tokens), "vc16-expcast", 10);
            timed.promote = Some(1);
            timed.grouping = Some(GroupingSizes { clusters: 128, cold_iterations: 4, warm_iterations: 2 });
            timed.stages = vec![
                Stage::new(stage::COLD, [ms(5.0), ms(4.0), ms(4.5)]).above(ms(0.75)),
                Stage::new(stage::ATTENTION, [ms(117.0)]).above(ms(88.7)).with_flops(1.1706e14),
                Stage::new(stage::AVERAGE, [ms(120.0)]).with_flops(1.1706e14),
            ];
            timed
        });
        Report {
            backend: "cuda",
            device: "a GPU".into(),
            data: "N(0,1)".into(),
            ceilings: Some(H200),
            calls: calls.collect(),
        }
    }

    fn line<'a>(text: &'a str, start: &str) -> Vec<&'a str> {
        text.lines()
            .find(|line| line.trim_start().starts_with(start))
            .unwrap_or_default()
            .split_whitespace()
            .collect()
    }

    #[test]
    fn the_median_stands_beside_floor_ratio_and_speed() {
        let text = anstream::adapter::strip_str(&text(&report(&[75_600]))).to_string();
        assert_eq!(line(&text, "group, cold"), ["group,", "cold", "4.50", "ms", "750", "us", "6.00", "-"]);
        assert_eq!(line(&text, "attention"), ["attention", "117", "ms", "88.7", "ms", "1.32", "1001"]);
        assert!(text.contains("40 heads, 75,600 tokens, head_dim 128"), "{text}");
        assert!(text.contains("128 clusters, 4 iterations cold and 2 warm"), "{text}");
    }

    #[test]
    fn several_lengths_are_lines_of_one_table() {
        let text = anstream::adapter::strip_str(&text(&report(&[4096, 16_384]))).to_string();
        for tokens in ["4,096", "16,384"] {
            let found = text.lines().find(|line| line.contains(&format!(" {tokens} "))).unwrap_or_default();
            assert!(found.contains("vc16-expcast") && found.contains(" 1001 "), "{text}");
        }
        assert!(!text.contains("88.7"), "{text}");
    }

    #[test]
    fn json_names_what_it_has() {
        let json = serde_json::to_value(report(&[75_600])).unwrap();
        let call = &json["calls"][0];
        assert_eq!((&call["recipe"], &call["tokens"]), (&"vc16-expcast".into(), &75_600.into()));
        assert_eq!(call["stages"][0]["fastest_ms"], 4.0);
        assert_eq!(json["ceilings"]["memory_bytes_per_s"], 4.3e12);
    }
}
