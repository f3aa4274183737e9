//! Recipes as text: what is read, what is refused and why, and that the documentation knows all of it.

use proptest::prelude::*;
use vc_attention::grouping::TokenOrder;
use vc_attention::recipe::{
    Encoder, ExactScores, MODIFIERS, Probabilities, QkFormat, RowSums, ScoreType, VFormat, baselines, vc,
};
use vc_attention::{Error, Recipe};

const DOCUMENTATION: &str = include_str!("../docs/recipes.md");

fn parse(text: &str) -> Recipe {
    Recipe::parse(text).unwrap_or_else(|error| panic!("{error}"))
}

/// Why a recipe is refused, without its name, which stands in front.
#[track_caller]
fn reason(text: &str) -> String {
    let error = Recipe::parse(text).expect_err(text);
    assert!(matches!(&error, Error::Recipe { recipe, .. } if recipe == text));
    let message = error.to_string();
    message.strip_prefix(&format!("recipe `{text}`: ")).expect("the message names the recipe").to_owned()
}

#[test]
fn the_eleven_are_valid_and_parse_to_themselves() {
    let names: Vec<_> = Recipe::all().into_iter().map(|recipe| recipe.name).collect();
    assert_eq!(
        names.join(" "),
        "exact fp8 fa3-fp8 sage2 sage3 vc8 vc8-expcast vc8-fp8qk vc16 vc16-expcast vc4"
    );
    for recipe in Recipe::all() {
        recipe.validate().unwrap();
        assert_eq!(parse(&recipe.name), recipe);
    }
    assert_eq!(Recipe::default_for_cpu().name, "vc16-expcast");
}

#[test]
fn the_eleven_are_what_the_table_says() {
    // name, bits of QK and PV, f16 scores, centring of K and Q, rotation, V-Smooth, row sums
    let f32 = RowSums::Exact;
    let decoded = RowSums::Decoded;
    for (name, bits, f16_scores, center, center_q, rotate, smooth, sums) in [
        ("exact", (32, 32), false, false, false, false, false, f32),
        ("fp8", (8, 8), false, false, false, false, false, f32),
        ("fa3-fp8", (8, 8), false, false, false, true, false, f32),
        ("sage2", (8, 8), false, true, false, false, false, f32),
        ("sage3", (4, 4), false, true, true, false, false, f32),
        ("vc8", (8, 8), false, true, false, true, true, f32),
        ("vc8-expcast", (8, 8), false, true, false, true, true, decoded),
        ("vc8-fp8qk", (8, 8), true, true, false, true, true, decoded),
        ("vc16", (16, 8), true, true, false, false, true, f32),
        ("vc16-expcast", (16, 8), true, true, false, false, true, decoded),
        ("vc4", (4, 4), false, true, false, true, true, decoded),
    ] {
        let recipe = parse(name);
        assert_eq!((recipe.bits_qk(), recipe.bits_pv()), bits, "{name}");
        assert_eq!(recipe.scores == ScoreType::F16, f16_scores, "{name}");
        assert_eq!((recipe.center_k, recipe.center_q), (center, center_q), "{name}");
        assert_eq!((recipe.rotate_qk, recipe.rotate_v), (rotate, false), "{name}");
        assert_eq!((recipe.demean, recipe.grouping.order == TokenOrder::KMeans), (smooth, smooth), "{name}");
        assert_eq!(recipe.row_sums, sums, "{name}");
    }
    assert_eq!(baselines::sage2().p, Probabilities::E4m3 { peak: 448.0 });
    assert_eq!(baselines::fp8().p, Probabilities::E4m3 { peak: 256.0 });
    let expcast =
        Probabilities::ExpCast { beta: -0.484375, encoder: Encoder::Packed, exact: ExactScores::None };
    for recipe in [vc::vc8_expcast(), vc::vc8_fp8qk(), vc::vc16_expcast()] {
        assert_eq!(recipe.p, expcast);
    }
}

#[test]
fn modifiers_change_what_they_name() {
    let recipe = parse("vc8-expcast+order=cube+beta=-0.35");
    assert_eq!(recipe.name, "vc8-expcast+order=cube+beta=-0.35");
    assert_eq!(recipe.grouping.order, TokenOrder::Cube);
    assert_eq!(
        recipe.p,
        Probabilities::ExpCast {
            beta: kernels_gpu::numerics::expcast::PAPER_BETA,
            encoder: Encoder::Packed,
            exact: ExactScores::None
        }
    );

    let recipe = parse("vc8+k=96+iterations=7+seed=18446744073709551615+order=rounded");
    assert_eq!(recipe.grouping.order, TokenOrder::Rounded);
    assert_eq!((recipe.grouping.clusters, recipe.grouping.iterations), (Some(96), Some(7)));
    assert_eq!(recipe.grouping.seed, u64::MAX);

    let recipe = parse("vc8+rotate=off+center=off+rotate-v=on+demean=off");
    assert!(!recipe.rotate_qk && !recipe.center_k && recipe.rotate_v && !recipe.demean);
    assert!(parse("vc8+center-q=on").center_q);
    assert_eq!(parse("vc8+rowsum=decoded").row_sums, RowSums::Decoded);
    assert_eq!(parse("vc4+rowsum=exact").row_sums, RowSums::Exact);
    assert_eq!(parse("vc16+scores=f32").scores, ScoreType::F32);
    assert_eq!(parse("fa3-fp8+scores=f16").scores, ScoreType::F16);
    assert_eq!(parse("exact+v=e4m3-head").v, VFormat::E4m3PerHead);
    assert_eq!(parse("exact+qk=e4m3").qk, QkFormat::E4m3PerBlock);
    assert_eq!(parse("vc8+p=e4m3-448").p, Probabilities::E4m3 { peak: 448.0 });

    // Formats take effect first, wherever they stand.
    let recipe = parse("vc8+beta=-0.25+encoder=f32+p=expcast");
    assert_eq!(
        recipe.p,
        Probabilities::ExpCast { beta: -0.25, encoder: Encoder::F32, exact: ExactScores::None }
    );
    let recipe = parse("vc16+exact=half+encoder=pinned+beta=-0.75+p=expcast");
    assert_eq!(
        recipe.p,
        Probabilities::ExpCast { beta: -0.75, encoder: Encoder::Pinned, exact: ExactScores::Half }
    );
    // The quadratic encoder has a beta of its own, wherever another is given.
    for (text, beta) in [
        ("vc16-expcast+encoder=quadratic+exact=3", 0.0),
        ("vc16-expcast+beta=0.125+encoder=quadratic+exact=3", 0.125),
    ] {
        let exact = ExactScores::Near { octaves: 3 };
        assert_eq!(
            parse(text).p,
            Probabilities::ExpCast { beta, encoder: Encoder::Quadratic, exact },
            "{text}"
        );
    }
    assert_eq!(parse("vc16-expcast+encoder=packed+exact=none").p, vc::EXPCAST);
    let recipe = parse("vc8-fp8qk+qk=f16");
    assert_eq!((recipe.qk, recipe.scores), (QkFormat::F16, ScoreType::F16));
}

#[test]
fn modifiers_turn_one_recipe_into_another() {
    for (text, other) in [
        ("exact+qk=e4m3+p=e4m3+v=e4m3", baselines::fp8()),
        ("exact+qk=e4m3-head+rotate=on+p=e4m3+v=e4m3-head", baselines::fa3_fp8()),
        ("exact+qk=int8+center=on+p=e4m3-448+v=e4m3", baselines::sage2()),
        ("exact+qk=nvfp4+center=on+center-q=on+p=nvfp4+v=nvfp4", baselines::sage3()),
        ("sage2+rotate=on+p=e4m3+order=kmeans+demean=on", vc::vc8()),
        ("vc8+p=expcast+rowsum=decoded", vc::vc8_expcast()),
        ("vc8-expcast+qk=e4m3-head+scores=f16", vc::vc8_fp8qk()),
        ("vc8+qk=f16+scores=f16+rotate=off", vc::vc16()),
        ("vc16+p=expcast+rowsum=decoded", vc::vc16_expcast()),
        ("vc8+qk=nvfp4+p=nvfp4+v=nvfp4+rowsum=decoded", vc::vc4()),
    ] {
        assert_eq!(Recipe { name: other.name.clone(), ..parse(text) }, other, "{text}");
    }
}

#[test]
fn text_that_is_no_recipe() {
    let names = "exact, fp8, fa3-fp8, sage2, sage3, vc8, vc8-expcast, vc8-fp8qk, vc16, vc16-expcast, vc4";
    for (name, meant) in
        [("", None), ("vc9", Some("vc8")), ("VC8", Some("vc8")), (" vc8", Some("vc8")), ("flashinfer", None)]
    {
        let meant = meant.map_or(String::new(), |meant| format!(" (did you mean `{meant}`?)"));
        assert_eq!(reason(name), format!("expected one of {names}, given `{name}`{meant}"));
    }
    assert_eq!(reason("+k=4"), format!("expected one of {names}, given ``"));
    assert_eq!(reason("vc8+"), "expected `+MODIFIER=VALUE` after the name, given `+`");
    assert_eq!(reason("vc8+cube"), "expected `+MODIFIER=VALUE` after the name, given `+cube`");
    assert_eq!(reason("vc8+k=4+k=4"), "expected every modifier once, given `k` twice");
    let unknown = reason("vc8+clusters=4");
    assert!(unknown.starts_with("expected one of the modifiers qk, p, v, "), "{unknown}");
    assert!(unknown.ends_with(", given `clusters`"), "{unknown}");
    assert_eq!(
        reason("vc8+order=random"),
        "`order`: expected sequence|cube|kmeans|rounded|balanced, given `random`"
    );
    assert_eq!(reason("vc8+rotate=true"), "`rotate`: expected on|off, given `true`");
    assert_eq!(reason("vc8+k=many"), "`k`: expected a number from 1 to 1024, given `many`");
    assert_eq!(reason("vc8+k=-1"), "`k`: expected a number from 1 to 1024, given `-1`");
    assert_eq!(reason("vc8+seed="), "`seed`: expected a number from 0 to 2^64 - 1, given ``");
    assert_eq!(reason("vc8-expcast+beta=x"), "`beta`: expected a number between -1 and 0.5, given `x`");
    // A value cannot hold a plus sign.
    assert_eq!(reason("vc8-expcast+beta=+0.2"), "expected `+MODIFIER=VALUE` after the name, given `+0.2`");
    // Every modifier says what it takes.
    for modifier in MODIFIERS {
        let base = if ["beta", "encoder", "exact"].contains(&modifier.name) { "vc8-expcast" } else { "vc8" };
        let reason = reason(&format!("{base}+{}=?", modifier.name));
        assert_eq!(reason, format!("`{}`: expected {}, given `?`", modifier.name, modifier.values));
    }
}

#[test]
fn choices_that_do_not_go_together() {
    for (text, expected) in [
        ("vc8+beta=-0.4", "`beta` needs ExpCast: a recipe that has it, or `p=expcast`"),
        ("vc4+encoder=f32", "`encoder` needs ExpCast"),
        ("vc8+scores=f16", "f16 scores need Q and K in f16 or in e4m3 with one scale per head"),
        ("fp8+scores=f16", "f16 scores need Q and K in f16 or in e4m3 with one scale per head"),
        ("exact+scores=f16", "given `qk=f32`; `scores=f32` goes with every format"),
        ("vc16+qk=int8", "given `qk=int8`; `scores=f32` goes with every format"),
        ("vc16+center-q=on", "a centred Q adds the product of its mean in f32 and needs `scores=f32`"),
        (
            "vc8-expcast+v=nvfp4",
            "ExpCast writes E4M3 probabilities and needs an E4M3 (or f32) V, given `v=nvfp4`",
        ),
        ("vc8+v=nvfp4", "E4M3 probabilities need an E4M3 (or f32) V, given `v=nvfp4`"),
        ("vc8+p=nvfp4", "NVFP4 probabilities need an NVFP4 (or f32) V, given `v=e4m3`"),
        ("vc8+k=0", "the number of clusters `k` is 1 to 1024, given 0"),
        ("vc8+k=1025", "the number of clusters `k` is 1 to 1024, given 1025"),
        ("vc8+order=cube+k=64", "(`order=kmeans` or `order=rounded`), given `k=64` with `order=cube`"),
        ("vc8+order=balanced+k=64", "given `k=64` with `order=balanced`"),
        ("sage2+k=64", "given `k=64` with `order=sequence`"),
        ("vc8+iterations=0", "`iterations` is 1 to 1000, given 0"),
        ("vc8+iterations=1001", "`iterations` is 1 to 1000, given 1001"),
        ("vc8+order=sequence+iterations=4", "iterations need an order that clusters"),
        ("vc8-expcast+beta=-0.5", "beta: expected -0.5 < beta < 0.5 with the packed encoder"),
        ("vc8-expcast+beta=0.5", "beta: expected -0.5 < beta < 0.5 with the packed encoder"),
        ("vc8-expcast+beta=-0.6+encoder=f32", "beta: expected -0.5 <= beta < 0.5 with the f32 encoder"),
        ("vc8-expcast+beta=-1.01+encoder=pinned", "beta: expected -1 <= beta < 0.5 with the pinned encoder"),
        ("vc8-expcast+beta=0.5+encoder=pinned", "beta: expected -1 <= beta < 0.5 with the pinned encoder"),
        ("vc8-expcast+beta=-0.2+encoder=quadratic", "expected -0.2 < beta < 0.5 with the quadratic encoder"),
        ("vc8-expcast+beta=0.5+encoder=quadratic", "expected -0.2 < beta < 0.5 with the quadratic encoder"),
        ("vc8-expcast+beta=NaN+encoder=quadratic", "given NaN"),
        ("vc8+exact=half", "`exact` needs ExpCast"),
        ("vc8-expcast+exact=0", "`exact` is 1 to 16 octaves, given 0"),
        ("vc8-expcast+exact=17", "`exact` is 1 to 16 octaves, given 17"),
        ("vc8-expcast+beta=NaN", "given NaN"),
        ("vc8-expcast+beta=-inf", "given -inf"),
    ] {
        let reason = reason(text);
        assert!(reason.contains(expected), "{text}: {reason}");
    }
    for text in [
        "vc8-expcast+beta=-0.5+encoder=f32",
        "vc8-expcast+beta=-0.499",
        "vc8-expcast+beta=0.499",
        "vc8-expcast+beta=-1+encoder=pinned",
        "vc16-expcast+encoder=quadratic",
        "vc8-expcast+exact=1",
        "vc8-expcast+exact=16",
        "vc8-fp8qk+exact=quarter",
        "vc8-expcast+v=f32",
        "vc4+v=f32",
        "vc8+p=f32",
        "vc8+p=f32+v=nvfp4",
        "vc16+scores=f32+center-q=on",
        "vc8+k=1",
        "vc8+k=1024",
        "vc8+order=balanced+iterations=3",
        "sage3+demean=on",
        "exact+order=cube",
    ] {
        parse(text);
    }
    let mut recipe = baselines::fp8();
    recipe.p = Probabilities::E4m3 { peak: 100.0 };
    assert_eq!(
        recipe.validate().unwrap_err().to_string(),
        "recipe `fp8`: E4M3 probabilities peak at 256 or 448, given 100"
    );
}

#[test]
fn the_documentation_names_every_recipe_modifier_and_value() {
    for recipe in Recipe::all() {
        assert!(DOCUMENTATION.contains(&format!("| `{}` |", recipe.name)), "{}", recipe.name);
    }
    for modifier in MODIFIERS {
        let row = DOCUMENTATION
            .lines()
            .find(|line| line.starts_with(&format!("| `{}=`", modifier.name)))
            .unwrap_or_else(|| panic!("no row for `{}`", modifier.name));
        for value in modifier.values.split('|').filter(|value| !value.contains(' ')) {
            assert!(row.contains(&format!("`{value}`")), "`{}={value}`", modifier.name);
        }
        assert!(!modifier.about.is_empty());
    }
}

/// Any value of any modifier, sensible or not.
fn modifier() -> impl Strategy<Value = String> {
    (prop::sample::select(MODIFIERS), any::<prop::sample::Index>(), "[0-9.e-]{0,6}").prop_map(
        |(modifier, index, number)| {
            let values: Vec<_> = modifier.values.split('|').filter(|value| !value.contains(' ')).collect();
            let value = if values.is_empty() { &number } else { values[index.index(values.len())] };
            format!("+{}={value}", modifier.name)
        },
    )
}

fn text() -> impl Strategy<Value = String> {
    let names: Vec<_> = Recipe::all().into_iter().map(|recipe| recipe.name).collect();
    (prop::sample::select(names), prop::collection::vec(modifier(), 0..5))
        .prop_map(|(name, modifiers)| name + &modifiers.concat())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4096, ..ProptestConfig::default() })]

    #[test]
    fn what_parses_is_valid_and_parses_to_itself(text in text()) {
        match Recipe::parse(&text) {
            Ok(recipe) => {
                prop_assert_eq!(&recipe.name, &text);
                prop_assert!(recipe.validate().is_ok());
                prop_assert_eq!(Recipe::parse(&recipe.name).unwrap(), recipe);
            }
            Err(error) => {
                let start = format!("recipe `{text}`: ");
                prop_assert!(error.to_string().starts_with(&start));
            }
        }
    }

    #[test]
    fn the_order_of_modifiers_does_not_matter(text in text()) {
        let (name, modifiers) = text.split_once('+').unwrap_or((&text, ""));
        let mut parts: Vec<_> = modifiers.split('+').collect();
        parts.reverse();
        let reversed = if modifiers.is_empty() { name.to_owned() } else { format!("{name}+{}", parts.join("+")) };
        match (Recipe::parse(&text), Recipe::parse(&reversed)) {
            (Ok(one), Ok(other)) => prop_assert_eq!(Recipe { name: other.name.clone(), ..one }, other),
            (one, other) => prop_assert!(one.is_err() && other.is_err()),
        }
    }

    #[test]
    fn any_text_is_survived(text in "\\PC{0,40}", tail in ".{0,40}") {
        let _ = Recipe::parse(&text);
        let _ = Recipe::parse(&format!("vc8+{tail}"));
    }
}
