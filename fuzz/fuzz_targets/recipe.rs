//! Arbitrary text as a recipe.
#![no_main]

use libfuzzer_sys::fuzz_target;
use vc_attention::Recipe;

fuzz_target!(|text: &str| {
    match Recipe::parse(text) {
        Ok(recipe) => {
            assert_eq!(recipe.name, text);
            recipe.validate().expect("parsed but not valid");
            assert_eq!(Recipe::parse(&recipe.name).expect("its own name does not parse"), recipe);
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
});
