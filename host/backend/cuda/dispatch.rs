//! Which GPU runs what: the one table from compute capability to kernels, recipes and default recipe.
//!
//! `vca doctor` prints it; the device loads what it says, and a plan chooses its entries by it. `docs/gpus.md` says what
//! was shown of each row and how.

use kernels_gpu::kernels::{self, Entry};

use crate::recipe::{QkFormat, Recipe, ScoreType};

/// Compute capability (major, minor).
pub type Capability = (i32, i32);

/// A family of attention kernels: entries of one source, with one list of parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// `attention_sm90`: wgmma, for Hopper.
    Sm90,
    /// `attention_mma`: warp-level products, for any GPU with FP8 Tensor Cores;
    /// [`Device::warp_level`](super::Device::warp_level) has it serve Hopper too.
    Mma,
    /// `attention_sm100`: tcgen05, for B200.
    Sm100,
    /// The same without INT8, whose products B300 has not got.
    Sm103,
    /// `attention_fp4` by block-scaled products, for sm_120a.
    Fp4Native,
    /// `attention_fp4` on operands decoded to f16, for any GPU that the warp-level kernels serve, and Hopper.
    Fp4Decoded,
}

impl Family {
    /// What the names of its entries begin with.
    pub(super) fn prefix(self) -> &'static str {
        match self {
            Family::Sm90 => "attention_sm90",
            Family::Mma => "attention_mma",
            Family::Sm100 | Family::Sm103 => "attention_sm100",
            Family::Fp4Native | Family::Fp4Decoded => "attention",
        }
    }

    /// Its entries.
    pub(super) fn entries(self) -> &'static [Entry] {
        match self {
            Family::Sm90 => kernels::SM90,
            Family::Mma => kernels::MMA,
            Family::Sm100 => kernels::SM100,
            Family::Sm103 => kernels::SM103,
            Family::Fp4Native => kernels::FP4_NATIVE,
            Family::Fp4Decoded => kernels::FP4_DECODED,
        }
    }

    /// Entries that prepare operands for it alone, in its module.
    pub(super) fn prepare(self) -> &'static [Entry] {
        if self.fp4() { kernels::PREPARE_FP4 } else { &[] }
    }

    /// Whether its operands are NVFP4: scores are f32 then, and no head leaves their range.
    pub(super) fn fp4(self) -> bool {
        matches!(self, Family::Fp4Native | Family::Fp4Decoded)
    }

    /// How its entries and those of the quantizers call the recipe's format of Q and K; none where it has not got it.
    pub(super) fn qk(self, recipe: &Recipe) -> Option<&'static str> {
        match (recipe.qk, recipe.scores) {
            (QkFormat::Nvfp4, ScoreType::F32) if !recipe.center_q => match self {
                Family::Fp4Native => Some("fp4_native"),
                Family::Fp4Decoded => Some("fp4_decoded"),
                _ => None,
            },
            _ if self.fp4() => None,
            (QkFormat::F16, ScoreType::F16) => Some("f16"),
            (QkFormat::E4m3PerHead, ScoreType::F16) => Some("e4m3"),
            (QkFormat::Int8, ScoreType::F32) if self != Family::Sm103 => Some("i8"),
            _ => None,
        }
    }

    /// The formats of Q and K that it takes, in words.
    pub(super) fn takes(self) -> &'static str {
        match self {
            Family::Sm103 => "f16 or e4m3-head, with f16 scores",
            Family::Sm90 | Family::Mma | Family::Sm100 => {
                "f16 or e4m3-head, with f16 scores, or int8, with f32 scores"
            }
            Family::Fp4Native | Family::Fp4Decoded => "nvfp4 without centring of Q, with f32 scores",
        }
    }

    /// Whether it has the quadratic encoder of ExpCast beside the packed one.
    pub(super) fn quadratic(self) -> bool {
        matches!(self, Family::Sm90 | Family::Mma)
    }

    /// Query rows of a block of its entries.
    pub(super) fn rows(self) -> usize {
        match self {
            Family::Sm90 | Family::Mma | Family::Fp4Native | Family::Fp4Decoded => 128,
            Family::Sm100 | Family::Sm103 => 256,
        }
    }

    /// The named recipes that it runs.
    pub fn recipes(self) -> &'static [&'static str] {
        match self {
            Family::Sm103 => &["vc8-fp8qk", "vc16", "vc16-expcast"],
            Family::Sm90 | Family::Mma | Family::Sm100 => {
                &["vc8", "vc8-expcast", "vc8-fp8qk", "vc16", "vc16-expcast"]
            }
            Family::Fp4Native | Family::Fp4Decoded => &["vc4"],
        }
    }
}

/// What is known of the kernels of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// They were tested on this GPU.
    Tested(&'static str),
    /// Their logic was tested under emulation, their text was assembled: they have not run on such a GPU.
    Assembled,
}

impl State {
    /// In words.
    pub fn describe(self) -> String {
        match self {
            State::Tested(on) => format!("tested on {on}"),
            State::Assembled => "logic emulated, instruction text assembled only".into(),
        }
    }
}

/// A family of attention kernels in the module that holds it.
#[derive(Clone, Copy, Debug)]
pub struct Module {
    /// Architecture of the module ([`Image::arch`](super::Image::arch)).
    pub arch: &'static str,
    /// Attention kernels that are taken from it.
    pub family: Family,
    /// What is known of them on these GPUs.
    pub state: State,
}

/// The kernels of a row.
#[derive(Clone, Copy, Debug)]
pub struct Kernels {
    /// The first whose family has a recipe's format of Q and K runs it. The first of all also prepares the operands, and is
    /// loaded with the device; another is loaded with the first plan that needs it.
    pub modules: &'static [Module],
    /// The recipe to start with. The same everywhere: which is fastest on GPUs that nobody had is not known, and this is the
    /// most accurate of the fast ones.
    pub default_recipe: &'static str,
}

impl Kernels {
    /// The module that runs a recipe's format of Q and K, as its place in [`Kernels::modules`].
    pub(super) fn module_for(&self, recipe: &Recipe) -> Option<usize> {
        self.modules.iter().position(|module| module.family.qk(recipe).is_some())
    }

    /// Attention kernels that are taken from a module of [`Kernels::modules`]: those whose work none before it does.
    pub(super) fn entries(&self, module: usize) -> impl Iterator<Item = &'static Entry> {
        let (before, own) = (&self.modules[..module], self.modules[module].family);
        let work = |family: Family, entry: &'static Entry| entry.name.strip_prefix(family.prefix());
        let done = move |entry: &&Entry| {
            let mut all = before.iter().flat_map(|m| m.family.entries().iter().map(|e| work(m.family, e)));
            all.any(|other| other == entry.name.strip_prefix(own.prefix()))
        };
        own.entries().iter().filter(move |entry| !done(entry))
    }

    /// The named recipes that a module of [`Kernels::modules`] runs: those that none before it does.
    pub fn recipes(&self, module: usize) -> Vec<&'static str> {
        let (before, rest) = self.modules.split_at(module);
        let own = rest.first().map_or(&[][..], |module| module.family.recipes());
        let new = |name: &&&str| before.iter().all(|module| !module.family.recipes().contains(name));
        own.iter().filter(new).copied().collect()
    }

    /// The formats of Q and K that they take, in words.
    pub(super) fn takes(&self) -> String {
        let each: Vec<_> = self.modules.iter().map(|module| module.family.takes()).collect();
        each.join("; or ")
    }
}

/// GPUs that are served alike.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    /// Their compute capabilities.
    pub capabilities: &'static [Capability],
    /// Some of them by name.
    pub gpus: &'static str,
    /// What runs there, or what would be needed.
    pub kernels: Result<Kernels, &'static str>,
}

/// The default recipe of every row; see [`Kernels::default_recipe`].
const DEFAULT: &str = "vc16-expcast";

const fn assembled(arch: &'static str, family: Family) -> Module {
    Module { arch, family, state: State::Assembled }
}

const fn tested(arch: &'static str, family: Family) -> Module {
    Module { arch, family, state: State::Tested("an H200") }
}

const fn kernels(modules: &'static [Module]) -> Result<Kernels, &'static str> {
    Ok(Kernels { modules, default_recipe: DEFAULT })
}

/// Probabilities and values are E4M3 in every kernel.
const NO_FP8: &str = "it has no FP8 Tensor Cores, and every kernel multiplies E4M3 probabilities with E4M3 values: INT8 or \
     FP16 Q and K would need a quantizer and a product for BF16 values beside them";

/// The table. A GPU later than sm_89 whose capability is not in it is served as those of the last row.
pub const TABLE: &[Row] = &[
    Row { capabilities: &[(8, 0), (8, 6), (8, 7)], gpus: "A100, RTX 3090", kernels: Err(NO_FP8) },
    Row { capabilities: &[(8, 9)], gpus: "L40S, RTX 4090", kernels: WARP_LEVEL },
    Row {
        capabilities: &[(9, 0)],
        gpus: "H100, H200",
        kernels: kernels(&[tested("sm_90a", Family::Sm90), tested("sm_90a", Family::Fp4Decoded)]),
    },
    Row { capabilities: &[(10, 0)], gpus: "B200", kernels: kernels(&[assembled("sm_100a", Family::Sm100)]) },
    Row { capabilities: &[(10, 3)], gpus: "B300", kernels: kernels(&[assembled("sm_103a", Family::Sm103)]) },
    Row {
        capabilities: &[(12, 0)],
        gpus: "RTX PRO 6000, RTX 5090",
        kernels: kernels(&[assembled("sm_120a", Family::Mma), assembled("sm_120a", Family::Fp4Native)]),
    },
    FALLBACK,
];

/// The warp-level kernels for everything.
const WARP_LEVEL: Result<Kernels, &str> =
    kernels(&[assembled("sm_89", Family::Mma), assembled("sm_89", Family::Fp4Decoded)]);

/// GPUs later than sm_89 without kernels of their own: PTX for sm_89 runs on all of them.
const FALLBACK: Row =
    Row { capabilities: &[(11, 0), (12, 1)], gpus: "Thor, GB10, later ones", kernels: WARP_LEVEL };

/// The oldest capability that PTX for sm_89 runs on.
const OLDEST: Capability = (8, 9);

/// The warp-level kernels for sm_89, on any GPU that runs them.
///
/// # Errors
/// In words, what would be needed where it does not.
pub(super) fn warp_level_kernels(name: &str, capability: Capability) -> Result<Kernels, String> {
    kernels_for(name, capability)?;
    Ok(WARP_LEVEL.expect("the fallback has kernels"))
}

/// What serves a GPU.
///
/// # Errors
/// In words, what would be needed where nothing does.
pub fn kernels_for(name: &str, capability: Capability) -> Result<Kernels, String> {
    let row = TABLE.iter().find(|row| row.capabilities.contains(&capability));
    let found = match row {
        Some(row) => row.kernels,
        None if capability > OLDEST => FALLBACK.kernels,
        None => Err(NO_FP8),
    };
    found.map_err(|why| {
        let (major, minor) = capability;
        format!("{name} has compute capability {major}.{minor}: {why}; use the CPU backend there")
    })
}

#[cfg(test)]
mod tests {
    use super::super::embedded::images;
    use super::*;
    use crate::recipe::{Probabilities, VFormat};

    #[test]
    fn every_row_names_a_module_that_has_its_kernels() {
        for row in TABLE {
            let Ok(kernels) = row.kernels else { continue };
            for Module { arch, family, .. } in kernels.modules {
                let image = images().iter().find(|image| image.arch == *arch);
                let image = image.unwrap_or_else(|| panic!("no module for {arch}"));
                for entry in family.entries().iter().chain(family.prepare()).chain(kernels::PREPARE) {
                    let declared = format!(".visible .entry {}(", entry.name);
                    assert!(image.ptx().contains(&declared), "{arch}: {}", entry.name);
                }
            }
            assert!(kernels.recipes(0).contains(&kernels.default_recipe));
        }
    }

    #[test]
    fn a_recipe_has_one_module() {
        let hopper = kernels_for("x", (9, 0)).expect("covered");
        assert_eq!(hopper.recipes(0), ["vc8", "vc8-expcast", "vc8-fp8qk", "vc16", "vc16-expcast"]);
        assert_eq!(hopper.recipes(1), ["vc4"]);
        assert_eq!(hopper.entries(1).count(), Family::Fp4Decoded.entries().len());
        for (name, module) in [("vc16", Some(0)), ("vc8", Some(0)), ("vc4", Some(1)), ("sage3", None)] {
            assert_eq!(hopper.module_for(&Recipe::parse(name).expect("a recipe")), module, "{name}");
        }
    }

    #[test]
    fn a_capability_has_one_row() {
        let mut all: Vec<_> = TABLE.iter().flat_map(|row| row.capabilities).collect();
        let count = all.len();
        all.sort();
        all.dedup();
        assert_eq!(all.len(), count);
    }

    #[test]
    fn recipes_are_those_that_the_entries_cover() {
        for family in [Family::Fp4Native, Family::Fp4Decoded] {
            let covered = Recipe::all().into_iter().filter(|recipe| family.qk(recipe).is_some());
            assert_eq!(covered.map(|r| r.name).collect::<Vec<_>>(), family.recipes());
        }
        for family in [Family::Sm90, Family::Mma, Family::Sm100, Family::Sm103] {
            let covered = Recipe::all().into_iter().filter(|recipe| {
                // Of E4M3 values with ours the named recipes differ from the baselines in demeaning and peak.
                family.qk(recipe).is_some()
                    && recipe.demean
                    && recipe.v == VFormat::E4m3PerChannel
                    && matches!(recipe.p, Probabilities::ExpCast { .. } | Probabilities::E4m3 { peak: 256.0 })
            });
            assert_eq!(covered.map(|r| r.name).collect::<Vec<_>>(), family.recipes());
        }
    }

    #[test]
    fn later_gpus_fall_back_and_earlier_ones_are_told_what_is_missing() {
        for capability in [(8, 9), (11, 0), (12, 1), (13, 0)] {
            assert_eq!(kernels_for("x", capability).expect("covered").modules[0].family, Family::Mma);
        }
        assert_eq!(kernels_for("x", (9, 0)).expect("covered").modules[0].family, Family::Sm90);
        for capability in [(7, 5), (8, 0), (8, 6)] {
            let message = kernels_for("Some GPU", capability).expect_err("not covered");
            assert!(message.starts_with("Some GPU has compute capability"), "{message}");
            assert!(message.contains("no FP8 Tensor Cores"), "{message}");
        }
    }
}
