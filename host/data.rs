//! The input that the program carries along, so that `vca compare` has real values to run on anywhere.

use vc_attention::Result;
use vc_attention::io::InputFile;

/// Where the bundled input lies in the source tree; its provenance is in `data/README.md`.
pub const NAME: &str = "data/tiny-dit/qkv_07.safetensors";

static BYTES: &[u8] = include_bytes!("../data/tiny-dit/qkv_07.safetensors");

/// Layer 7 of the tiny video DiT: 2 heads, 16 x 16 x 16 tokens, 128 channels, BF16.
pub fn open() -> Result<InputFile> {
    InputFile::from_bytes(NAME, BYTES)
}
