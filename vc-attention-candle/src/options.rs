//! What a caller chooses besides the tensors.

use vc_attention::Recipe;

/// The choices of an attention that do not change from call to call.
///
/// ```
/// use vc_attention_candle::{Options, Recipe};
///
/// let recipe = Recipe::parse("vc16-expcast+order=cube")?;
/// let options = Options::new(recipe).with_grid([2, 4, 8]).with_kv_lens(vec![64, 60]);
/// # Ok::<(), vc_attention_candle::vc_attention::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Options {
    /// What is quantized how; `vc16-expcast` by default.
    pub recipe: Recipe,
    /// Valid keys of every batch, the rest of the key axis takes part in nothing; all of them when absent.
    pub kv_lens: Option<Vec<usize>>,
    /// Latent grid [t, h, w] of the key tokens, in raster order; the token order `cube` needs it.
    pub grid: Option<[usize; 3]>,
}

impl Default for Options {
    fn default() -> Self {
        Self::new(Recipe::default_for_cpu())
    }
}

impl Options {
    /// All keys valid, no grid.
    pub fn new(recipe: Recipe) -> Self {
        Self { recipe, kv_lens: None, grid: None }
    }

    /// With valid keys for every batch.
    #[must_use]
    pub fn with_kv_lens(self, kv_lens: Vec<usize>) -> Self {
        Self { kv_lens: Some(kv_lens), ..self }
    }

    /// With the latent grid [t, h, w] of the keys.
    #[must_use]
    pub fn with_grid(self, grid: [usize; 3]) -> Self {
        Self { grid: Some(grid), ..self }
    }
}
