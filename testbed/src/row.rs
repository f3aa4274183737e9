//! What a line of a table stands for: a recipe, a schedule, and where another recipe takes its place.
//!
//! Written as `RECIPE[@KEY=VALUE]...`, for example `vc16-expcast@window=all@refresh=2` or
//! `vc8-fp8qk@steps=0-9:vc16-expcast` (the first ten steps run another recipe on the same token orders).

use std::ops::RangeInclusive;
use std::str::FromStr;

use anyhow::{Context, Result, anyhow, bail, ensure};
use vc_attention::schedule::{Demeaning, ScheduleConfig, Sites, Window};
use vc_attention::{Error, Recipe};

/// The keys of a row and their values, for help texts.
pub const KEYS: &str = "\
window=first:N|every:N|all  steps that group: the first N (default: a quarter), every Nth, all
refresh=N                   steps that one order serves (default 4; with every:N it is N)
demean=always|window        steps that subtract block means (default always)
warm=on|off                 refreshes start from the clusters before (default on)
drift=F                     refresh early once the means' energy falls below F of what it was (default off)
steps=A-B:RECIPE            another recipe on steps A to B
layers=A-B:RECIPE           another recipe on layers A to B
io=bf16|f32                 type of q, k, v and o at the attention (default bf16)";

/// A line of a table.
#[derive(Clone, Debug)]
pub struct Row {
    /// As it was written.
    pub name: String,
    /// The recipe.
    pub recipe: Recipe,
    /// Whether q, k, v and o are rounded to bf16, as a pipeline in bf16 has them.
    pub narrow: bool,
    window: Option<Window>,
    refresh: Option<usize>,
    demeaning: Demeaning,
    warm: bool,
    drift: Option<f64>,
    instead: Vec<Instead>,
}

#[derive(Clone, Debug)]
struct Instead {
    steps: Option<RangeInclusive<usize>>,
    layers: Option<RangeInclusive<usize>>,
    recipe: Recipe,
}

impl Row {
    /// The schedule of a clip of `steps` steps.
    pub fn schedule(&self, steps: usize) -> ScheduleConfig {
        let paper = ScheduleConfig::paper(steps);
        ScheduleConfig {
            window: self.window.unwrap_or(paper.window),
            refresh: self.refresh.unwrap_or(paper.refresh),
            demeaning: self.demeaning,
            warm: self.warm,
            drift: self.drift,
            ..paper
        }
    }

    /// Whether every step and layer that the row names is one of a clip of `steps` steps and a model of `layers` layers.
    ///
    /// # Errors
    /// Of the first range that goes beyond.
    pub fn fits(&self, steps: usize, layers: usize) -> vc_attention::Result<()> {
        for instead in &self.instead {
            for (option, range, count) in
                [("steps", &instead.steps, steps), ("layers", &instead.layers, layers)]
            {
                if let Some(range) = range.as_ref().filter(|range| *range.end() >= count) {
                    return Err(Error::Option {
                        option,
                        expected: format!("{option} below {count} in row `{}`", self.name),
                        given: format!("{}-{}", range.start(), range.end()),
                    });
                }
            }
        }
        Ok(())
    }

    /// Every recipe that takes part.
    pub fn recipes(&self) -> impl Iterator<Item = &Recipe> {
        std::iter::once(&self.recipe).chain(self.instead.iter().map(|i| &i.recipe))
    }

    /// The recipe of a step and layer: that of the last key that covers both, or the row's own.
    pub fn recipe_at(&self, step: usize, layer: usize) -> &Recipe {
        let covers =
            |range: &Option<RangeInclusive<usize>>, at| range.as_ref().is_none_or(|r| r.contains(&at));
        let instead = self.instead.iter().rev().find(|i| covers(&i.steps, step) && covers(&i.layers, layer));
        instead.map_or(&self.recipe, |i| &i.recipe)
    }
}

impl FromStr for Row {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        let mut parts = text.split('@');
        let recipe = Recipe::parse(parts.next().unwrap_or_default())?;
        let mut row = Self {
            name: text.into(),
            recipe,
            narrow: true,
            window: None,
            refresh: None,
            demeaning: Demeaning::Always,
            warm: true,
            drift: None,
            instead: Vec::new(),
        };
        for part in parts {
            // In one message: clap shows no causes.
            row.set(part).map_err(|e| anyhow!("`@{part}` of row `{text}`: {e:#}"))?;
        }
        // Whatever is out of range is said now, not in the middle of a clip.
        Sites::<()>::new(row.schedule(1))?;
        Ok(row)
    }
}

impl Row {
    fn set(&mut self, part: &str) -> Result<()> {
        let (key, value) = part.split_once('=').with_context(|| format!("KEY=VALUE, with one of\n{KEYS}"))?;
        let number = |text: &str| text.parse::<usize>().with_context(|| format!("a number, given `{text}`"));
        match (key, value) {
            ("window", "all") => self.window = Some(Window::All),
            ("window", _) => {
                self.window = Some(match value.split_once(':') {
                    Some(("first", n)) => Window::First(number(n)?),
                    Some(("every", n)) => Window::Every(number(n)?),
                    _ => bail!("first:N, every:N or all, given `{value}`"),
                });
            }
            ("refresh", _) => self.refresh = Some(number(value)?),
            ("demean", "always") => self.demeaning = Demeaning::Always,
            ("demean", "window") => self.demeaning = Demeaning::InWindow,
            ("warm", "on" | "off") => self.warm = value == "on",
            ("io", "bf16" | "f32") => self.narrow = value == "bf16",
            ("drift", _) => {
                self.drift = Some(value.parse().with_context(|| format!("a fraction, given `{value}`"))?);
            }
            ("steps" | "layers", _) => {
                let (range, recipe) = value.split_once(':').context("A-B:RECIPE")?;
                let (from, to) = range.split_once('-').unwrap_or((range, range));
                let (from, to) = (number(from)?, number(to)?);
                ensure!(from <= to, "a range from low to high, given `{range}`");
                let recipe = Recipe::parse(recipe)?;
                ensure!(
                    recipe.grouping == self.recipe.grouping,
                    "a recipe with the token order of `{}`, given `{}`",
                    self.recipe.name,
                    recipe.name
                );
                let range = Some(from..=to);
                let (steps, layers) = if key == "steps" { (range, None) } else { (None, range) };
                self.instead.push(Instead { steps, layers, recipe });
            }
            _ => bail!("one of\n{KEYS}"),
        }
        Ok(())
    }
}
