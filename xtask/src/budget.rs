//! The budget file: registers and shared memory of every kernel, by architecture. A change of either
//! shows as a diff in review.

use std::collections::BTreeMap;

use anyhow::Result;
use serde::{Deserialize, Serialize};

/// What one kernel takes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cost {
    /// Registers a thread at launch.
    pub registers: u32,
    /// Shared memory a block in bytes, static and dynamic.
    pub shared: u32,
}

/// Costs by architecture and kernel.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Budget {
    /// The assembler that the figures are from.
    pub ptxas: String,
    /// Architecture -> kernel -> cost.
    pub kernels: BTreeMap<String, BTreeMap<String, Cost>>,
}

impl Budget {
    /// Reads the file's text.
    pub fn parse(text: &str) -> Result<Self> {
        Ok(toml::from_str(text)?)
    }

    /// The file's text.
    pub fn to_text(&self) -> Result<String> {
        Ok(format!("# Written by `cargo xtask kernels`.\n{}", toml::to_string(self)?))
    }

    /// One line for every kernel whose cost differs from `old`, empty if none does.
    pub fn diff(&self, old: &Budget) -> Vec<String> {
        let flat = |b: &Budget| -> BTreeMap<String, String> {
            let costs = b.kernels.iter().flat_map(|(arch, kernels)| kernels.iter().map(move |k| (arch, k)));
            costs
                .map(|(arch, (name, c))| {
                    (format!("{arch} {name}"), format!("{} registers, {} B shared", c.registers, c.shared))
                })
                .collect()
        };
        let (old, new) = (flat(old), flat(self));
        let names: std::collections::BTreeSet<&String> = old.keys().chain(new.keys()).collect();
        let side =
            |costs: &BTreeMap<String, String>, name: &str| costs.get(name).map_or("-".into(), String::clone);
        names
            .into_iter()
            .filter(|name| old.get(*name) != new.get(*name))
            .map(|name| format!("{name}: {} -> {}", side(&old, name), side(&new, name)))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn budget(registers: u32) -> Budget {
        let kernels = BTreeMap::from([("one".to_string(), Cost { registers, shared: 64 })]);
        Budget { ptxas: "V13".into(), kernels: BTreeMap::from([("sm_90a".to_string(), kernels)]) }
    }

    #[test]
    fn text_round_trips_and_differences_show() {
        let b = budget(168);
        assert_eq!(Budget::parse(&b.to_text().unwrap()).unwrap(), b);
        assert!(b.diff(&budget(168)).is_empty());
        assert_eq!(
            budget(170).diff(&b),
            ["sm_90a one: 168 registers, 64 B shared -> 170 registers, 64 B shared"]
        );
        assert_eq!(b.diff(&Budget::default()), ["sm_90a one: - -> 168 registers, 64 B shared"]);
    }
}
