//! What is timed: the shape of a model's call, or one of the user's own.

use vc_attention::Shape;

use super::super::input::numbers;

/// Models by name: heads, latent grid (or a grid of as many tokens), head_dim; batch 1.
const MODELS: [(&str, usize, [usize; 3], usize); 4] = [
    ("wan2.2", 40, [21, 45, 80], 128),
    ("longcat", 32, [22, 34, 50], 128),
    ("hunyuan", 16, [4, 25, 1117], 128),
    ("h3", 56, [21, 50, 70], 128),
];

/// Sizes of a call.
#[derive(Clone, Debug)]
pub struct Call {
    pub name: String,
    pub batch: usize,
    pub heads: usize,
    pub grid: [usize; 3],
    pub head_dim: usize,
}

impl Call {
    pub fn tokens(&self) -> usize {
        self.grid.iter().product()
    }

    pub fn shape(&self) -> Shape {
        Shape {
            batch: self.batch,
            q_heads: self.heads,
            kv_heads: self.heads,
            q_tokens: self.tokens(),
            kv_tokens: self.tokens(),
            head_dim: self.head_dim,
        }
    }

    /// One head of `tokens` tokens.
    pub fn cut(&self, tokens: usize) -> Self {
        Self { name: format!("{} cut down", self.name), batch: 1, heads: 1, grid: grid(tokens), ..*self }
    }

    /// All heads, `tokens` tokens.
    pub fn at(&self, tokens: usize) -> Self {
        Self { grid: grid(tokens), ..self.clone() }
    }
}

/// Reads a model's name or B,H,N,D.
pub fn parse(text: &str) -> Result<Call, String> {
    if let Some(&(name, heads, grid, head_dim)) = MODELS.iter().find(|(name, ..)| *name == text) {
        return Ok(Call { name: name.into(), batch: 1, heads, grid, head_dim });
    }
    match numbers(text) {
        Some(sizes) if sizes.contains(&0) => Err("expected sizes of at least 1".into()),
        Some([batch, heads, tokens, head_dim]) => {
            Ok(Call { name: "made up".into(), batch, heads, grid: grid(tokens), head_dim })
        }
        None => {
            let names = MODELS.map(|(name, ..)| name).join(", ");
            Err(format!("expected {names}, or four whole numbers B,H,N,D"))
        }
    }
}

/// A grid of exactly `tokens` places, as close to 4 frames as it divides.
fn grid(tokens: usize) -> [usize; 3] {
    let t = [4, 3, 2, 1].into_iter().find(|t| tokens.is_multiple_of(*t)).unwrap_or(1);
    let frame = tokens / t;
    let h = (1..=frame.isqrt()).rev().find(|h| frame.is_multiple_of(*h)).unwrap_or(1);
    [t, h, frame / h]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models_and_sizes_are_read() {
        for (text, tokens) in [("wan2.2", 75_600), ("longcat", 37_400), ("hunyuan", 111_700), ("h3", 73_500)]
        {
            assert_eq!(parse(text).unwrap().tokens(), tokens);
        }
        let own = parse("2,3,1000,64").unwrap();
        assert_eq!((own.batch, own.heads, own.tokens(), own.head_dim), (2, 3, 1000, 64));
        for wrong in ["wan", "1,2,3", "1,2,0,4", "1,2,3,-4", "1,2,3,4,5", ""] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_grid_has_exactly_the_tokens() {
        for tokens in [1, 2, 7, 128, 1000, 8192, 9973] {
            assert_eq!(grid(tokens).iter().product::<usize>(), tokens);
        }
    }
}
