//! `NAME[+MODIFIER=VALUE]...` to a [`Recipe`].

use super::*;
use crate::error::{Error, Result};
use crate::grouping::TokenOrder;

/// Something about a recipe that its text may change: `+NAME=VALUE`.
#[derive(Clone, Copy, Debug)]
pub struct Modifier {
    /// What stands before the `=`.
    pub name: &'static str,
    /// The values, as an error or a help page lists them.
    pub values: &'static str,
    /// What it changes, in a line.
    pub about: &'static str,
    set: Set,
}

/// Applies a value.
type Set = fn(&mut Recipe, &str) -> Result<(), Misfit>;

/// Why a value was not applied.
enum Misfit {
    /// It is none of [`Modifier::values`].
    Value,
    /// The recipe lacks what the modifier changes.
    Needs(&'static str),
}

/// All modifiers, formats first: that is the order in which they take effect, however the text orders them.
pub const MODIFIERS: &[Modifier] = &[
    Modifier {
        name: "qk",
        values: "f32|f16|int8|e4m3|e4m3-head|nvfp4",
        about: "format of Q and K",
        set: |r, v| choose(&mut r.qk, v, QK),
    },
    Modifier {
        name: "p",
        values: "f32|e4m3|e4m3-448|expcast|nvfp4",
        about: "format of the probabilities",
        set: |r, v| choose(&mut r.p, v, P),
    },
    Modifier {
        name: "v",
        values: "f32|e4m3|e4m3-head|nvfp4",
        about: "format of V, or of its residual",
        set: |r, v| choose(&mut r.v, v, V),
    },
    Modifier {
        name: "scores",
        values: "f32|f16",
        about: "accumulator of the scores",
        set: |r, v| choose(&mut r.scores, v, &[("f32", ScoreType::F32), ("f16", ScoreType::F16)]),
    },
    Modifier {
        name: "center",
        values: "on|off",
        about: "subtract the token mean of K",
        set: |r, v| choose(&mut r.center_k, v, SWITCH),
    },
    Modifier {
        name: "center-q",
        values: "on|off",
        about: "subtract the mean of every 128 rows of Q and add its product with K back",
        set: |r, v| choose(&mut r.center_q, v, SWITCH),
    },
    Modifier {
        name: "rotate",
        values: "on|off",
        about: "Hadamard rotation of Q and K",
        set: |r, v| choose(&mut r.rotate_qk, v, SWITCH),
    },
    Modifier {
        name: "rotate-v",
        values: "on|off",
        about: "Hadamard rotation of V, undone on the output",
        set: |r, v| choose(&mut r.rotate_v, v, SWITCH),
    },
    Modifier {
        name: "demean",
        values: "on|off",
        about: "subtract the mean of every 128 value tokens and restore it from the row sums",
        set: |r, v| choose(&mut r.demean, v, SWITCH),
    },
    Modifier {
        name: "order",
        values: "sequence|cube|kmeans|rounded|balanced",
        about: "order of the key and value tokens",
        set: |r, v| choose(&mut r.grouping.order, v, ORDER),
    },
    Modifier {
        name: "k",
        values: "a number from 1 to 1024",
        about: "number of clusters",
        set: |r, v| v.parse().map(|k| r.grouping.clusters = Some(k)).map_err(|_| Misfit::Value),
    },
    Modifier {
        name: "iterations",
        values: "a number from 1 to 1000",
        about: "iterations of the k-means",
        set: |r, v| v.parse().map(|n| r.grouping.iterations = Some(n)).map_err(|_| Misfit::Value),
    },
    Modifier {
        name: "seed",
        values: "a number from 0 to 2^64 - 1",
        about: "seed of the k-means",
        set: |r, v| v.parse().map(|seed| r.grouping.seed = seed).map_err(|_| Misfit::Value),
    },
    Modifier {
        name: "encoder",
        values: "f32|packed|pinned|quadratic",
        about: "arithmetic of ExpCast; quadratic comes with a beta of 0",
        set: |r, v| {
            let (beta, encoder, _) = expcast(r)?;
            choose(encoder, v, ENCODER)?;
            if *encoder == Encoder::Quadratic {
                *beta = 0.0;
            }
            Ok(())
        },
    },
    Modifier {
        name: "beta",
        values: "a number between -1 and 0.5",
        about: "offset of ExpCast, in codes",
        set: |r, v| {
            let given = v.parse().map_err(|_| Misfit::Value)?;
            expcast(r).map(|(beta, ..)| *beta = given)
        },
    },
    Modifier {
        name: "exact",
        values: "none|half|quarter|a number from 1 to 16",
        about: "scores with an exact exponential under ExpCast: a share of the keys, or the blocks with a score \
                within so many octaves of its row's maximum",
        set: |r, v| {
            let (.., exact) = expcast(r)?;
            match v.parse() {
                Ok(octaves) => *exact = ExactScores::Near { octaves },
                Err(_) => choose(exact, v, EXACT)?,
            }
            Ok(())
        },
    },
    Modifier {
        name: "rowsum",
        values: "exact|decoded",
        about: "probabilities that the normalizer and the mean restoration add up",
        set: |r, v| choose(&mut r.row_sums, v, &[("exact", RowSums::Exact), ("decoded", RowSums::Decoded)]),
    },
];

type Names<T> = &'static [(&'static str, T)];

const SWITCH: Names<bool> = &[("on", true), ("off", false)];

const QK: Names<QkFormat> = &[
    ("f32", QkFormat::F32),
    ("f16", QkFormat::F16),
    ("int8", QkFormat::Int8),
    ("e4m3", QkFormat::E4m3PerBlock),
    ("e4m3-head", QkFormat::E4m3PerHead),
    ("nvfp4", QkFormat::Nvfp4),
];

const P: Names<Probabilities> = &[
    ("f32", Probabilities::F32),
    ("e4m3", Probabilities::E4m3 { peak: 256.0 }),
    ("e4m3-448", Probabilities::E4m3 { peak: 448.0 }),
    ("expcast", vc::EXPCAST),
    ("nvfp4", Probabilities::Nvfp4),
];

const ENCODER: Names<Encoder> = &[
    ("f32", Encoder::F32),
    ("packed", Encoder::Packed),
    ("pinned", Encoder::Pinned),
    ("quadratic", Encoder::Quadratic),
];

const EXACT: Names<ExactScores> =
    &[("none", ExactScores::None), ("half", ExactScores::Half), ("quarter", ExactScores::Quarter)];

const V: Names<VFormat> = &[
    ("f32", VFormat::F32),
    ("e4m3", VFormat::E4m3PerChannel),
    ("e4m3-head", VFormat::E4m3PerHead),
    ("nvfp4", VFormat::Nvfp4),
];

const ORDER: Names<TokenOrder> = &[
    ("sequence", TokenOrder::Sequence),
    ("cube", TokenOrder::Cube),
    ("kmeans", TokenOrder::KMeans),
    ("rounded", TokenOrder::Rounded),
    ("balanced", TokenOrder::Balanced),
];

fn choose<T: Copy>(field: &mut T, value: &str, names: &[(&str, T)]) -> Result<(), Misfit> {
    let (_, chosen) = names.iter().find(|(name, _)| *name == value).ok_or(Misfit::Value)?;
    *field = *chosen;
    Ok(())
}

fn expcast(recipe: &mut Recipe) -> Result<(&mut f32, &mut Encoder, &mut ExactScores), Misfit> {
    match &mut recipe.p {
        Probabilities::ExpCast { beta, encoder, exact } => Ok((beta, encoder, exact)),
        _ => Err(Misfit::Needs("ExpCast: a recipe that has it, or `p=expcast`")),
    }
}

fn name_of<T: PartialEq>(value: T, names: Names<T>) -> &'static str {
    names.iter().find(|(_, other)| *other == value).map_or("?", |(name, _)| name)
}

/// A format of Q and K as `qk=` spells it.
pub(super) fn name_of_qk(qk: QkFormat) -> &'static str {
    name_of(qk, QK)
}

/// A format of V as `v=` spells it.
pub(super) fn name_of_v(v: VFormat) -> &'static str {
    name_of(v, V)
}

/// A token order as `order=` spells it.
pub(super) fn name_of_order(order: TokenOrder) -> &'static str {
    name_of(order, ORDER)
}

/// A question about the name nearest to a mistyped one; nothing where none is near.
fn meant(given: &str, names: &[impl AsRef<str>]) -> String {
    let distance = |name: &str| strsim::damerau_levenshtein(&given.to_lowercase(), name);
    let nearest = names.iter().map(AsRef::as_ref).min_by_key(|name| distance(name));
    match nearest.filter(|name| distance(name) <= (name.len() / 3).max(1)) {
        Some(name) => format!(" (did you mean `{name}`?)"),
        None => String::new(),
    }
}

impl Recipe {
    /// Reads a recipe as the command line writes it: a name, then any of [`MODIFIERS`] in any order, each once.
    ///
    /// ```
    /// use vc_attention::Recipe;
    ///
    /// let recipe = Recipe::parse("vc8-expcast+order=cube+beta=-0.35")?;
    /// assert_eq!(recipe.name, "vc8-expcast+order=cube+beta=-0.35");
    /// # Ok::<(), vc_attention::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Recipe`] when name, modifier or value do not exist, and as [`Recipe::validate`].
    pub fn parse(text: &str) -> Result<Recipe> {
        let fail = |reason: String| Error::Recipe { recipe: text.into(), reason };
        let mut parts = text.split('+');
        let name = parts.next().unwrap_or_default();
        let mut recipe = Recipe::all().into_iter().find(|recipe| recipe.name == name).ok_or_else(|| {
            let names: Vec<_> = Recipe::all().into_iter().map(|recipe| recipe.name).collect();
            fail(format!("expected one of {}, given `{name}`{}", names.join(", "), meant(name, &names)))
        })?;
        recipe.name = text.into();

        let mut given = [None; MODIFIERS.len()];
        for part in parts {
            let (name, value) = part
                .split_once('=')
                .ok_or_else(|| fail(format!("expected `+MODIFIER=VALUE` after the name, given `+{part}`")))?;
            let index = MODIFIERS.iter().position(|modifier| modifier.name == name).ok_or_else(|| {
                let names: Vec<_> = MODIFIERS.iter().map(|modifier| modifier.name).collect();
                let meant = meant(name, &names);
                fail(format!("expected one of the modifiers {}, given `{name}`{meant}", names.join(", ")))
            })?;
            if given[index].replace(value).is_some() {
                return Err(fail(format!("expected every modifier once, given `{name}` twice")));
            }
        }
        for (modifier, value) in MODIFIERS.iter().zip(given) {
            let Some(value) = value else { continue };
            (modifier.set)(&mut recipe, value).map_err(|misfit| {
                fail(match misfit {
                    Misfit::Value => {
                        format!("`{}`: expected {}, given `{value}`", modifier.name, modifier.values)
                    }
                    Misfit::Needs(what) => format!("`{}` needs {what}", modifier.name),
                })
            })?;
        }
        recipe.validate()?;
        Ok(recipe)
    }
}
