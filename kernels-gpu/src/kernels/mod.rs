//! The GPU kernels and the facts that a host needs to launch them.

/// How one kernel is launched. `cargo xtask kernels` writes the bounds into the PTX (Rust has no attribute
/// for them), the host launches with the same numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Name of the entry in the PTX module.
    pub name: &'static str,
    /// Threads a block, exactly (`.maxntid`).
    pub threads: u32,
    /// Blocks that must fit on one multiprocessor (`.minnctapersm`): bounds the registers.
    pub min_ctas_per_sm: u32,
    /// Dynamic shared memory a block in bytes.
    pub dynamic_shared: u32,
}

/// Entries of the Hopper module (`vc_attention.sm_90a.ptx`).
pub const SM90: &[Entry] = &[];
