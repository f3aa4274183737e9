//! A tiny video diffusion transformer in Rust, on which low-bit attention is measured the way the VC-Attention paper
//! measures it: same weights, same start noise, same schedule; only the attention differs.
//!
//! [`bundle`] holds the trained weights and the reference that the port is checked against, [`model`] the network,
//! [`sampler`] the denoising loop, [`row`] what a line of a table stands for, [`attention`] what the network calls for
//! it, [`clip`] the distance between two clips, [`record`] measurements on disk, [`statistics`] what they say
//! together, [`probe`] where a
//! recipe loses, [`picture`] what a person looks at.

pub mod attention;
pub mod bundle;
pub mod clip;
pub mod model;
pub mod picture;
pub mod probe;
pub mod prompt;
pub mod record;
pub mod row;
pub mod sampler;
pub mod statistics;
