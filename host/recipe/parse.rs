//! `NAME[+MODIFIER=VALUE]...` to a [`Recipe`].

use super::Recipe;
use crate::error::{Error, Result};

impl Recipe {
    /// Reads a recipe as the command line writes it.
    ///
    /// # Errors
    /// When the name does not exist.
    pub fn parse(text: &str) -> Result<Recipe> {
        Recipe::all()
            .into_iter()
            .find(|r| r.name == text)
            .ok_or_else(|| Error::Recipe { recipe: text.into(), reason: "unknown".into() })
    }
}
