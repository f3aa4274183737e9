//! Times on a GPU, by its own clock, of the plan that an application embeds.

use std::time::Duration;

use vc_attention::backend::cuda::{
    Buffer, Cuda, DevicePlan, Grouping, PROMOTE, Spec, StageTimes, Stopwatch, Tensors, time_stages,
};
use vc_attention::grouping::{COLD_ITERATIONS, TokenOrder, WARM_ITERATIONS, default_clusters};
use vc_attention::{DType, Recipe};

use super::super::failure::{Failure, Result};
use super::super::machine::is_limit_of_gpu;
use super::super::progress::Progress;
use super::Arguments;
use super::call::Call;
use super::floor::{H200, floors};
use super::report::{GroupingSizes, Stage, Timed, stage};
use super::values::{Source, Which};

/// Time that the calls of one recipe take together, unless their number is given, which then lies between these.
const BUDGET: Duration = Duration::from_secs(3);
const RUNS: (usize, usize) = (5, 50);

/// The tensors of a call on the GPU.
struct Uploaded {
    q: Buffer,
    k: Buffer,
    v: Buffer,
    o: Buffer,
}

impl Uploaded {
    fn new(gpu: &Cuda, source: &Source, call: &Call) -> Result<Self> {
        let upload = |which| Buffer::from_slice(gpu.gpu(), &source.tensor(call, which));
        let (q, k, v) = (upload(Which::Q)?, upload(Which::K)?, upload(Which::V)?);
        let o = Buffer::new(gpu.gpu(), q.bytes())?;
        Ok(Self { q, k, v, o })
    }

    fn tensors(&self) -> Tensors {
        let Self { q, k, v, o } = self;
        Tensors { q: q.ptr(), k: k.ptr(), v: v.ptr(), o: o.ptr(), ..Tensors::default() }
    }
}

/// Times of one round: a call from a cold start, one from a warm start, one on the order of those.
struct Round {
    cold: StageTimes,
    warm: StageTimes,
    reuse: Duration,
}

impl Round {
    fn total(&self) -> Duration {
        self.cold.total() + self.warm.total() + self.reuse
    }
}

/// Times every recipe at every length.
pub fn run(gpu: &Cuda, arguments: &Arguments, source: &Source, recipes: &[Recipe]) -> Result<Vec<Timed>> {
    let promote = arguments.promote.unwrap_or(PROMOTE);
    // What the kernels do not take is said before the long work.
    for recipe in recipes {
        plan(gpu, &arguments.shape.cut(128), recipe, promote)?;
    }
    let asked = &arguments.shape;
    let calls: Vec<Call> = match &arguments.lengths[..] {
        [] => vec![asked.clone()],
        lengths => lengths.iter().map(|&tokens| asked.at(tokens as usize)).collect(),
    };
    let progress = Progress::new(calls.len() * (1 + recipes.len()));
    let mut timed = Vec::new();
    for call in &calls {
        progress.at("values");
        let uploaded = Uploaded::new(gpu, source, call)?;
        progress.step();
        for recipe in recipes {
            progress.at(&recipe.name);
            timed.push(measure(gpu, call, recipe, &uploaded, promote, arguments.runs)?);
            progress.step();
        }
    }
    Ok(timed)
}

fn plan(gpu: &Cuda, call: &Call, recipe: &Recipe, promote: u32) -> Result<DevicePlan> {
    let scale = 1.0 / (call.head_dim as f32).sqrt();
    let spec = Spec::contiguous(call.shape(), recipe.clone(), scale, DType::Bf16, DType::Bf16);
    let spec = Spec { promote, ..spec };
    DevicePlan::new(gpu.gpu(), spec).map_err(|error| {
        if is_limit_of_gpu(&error) {
            return Failure::usage(error.to_string()).with_hint("--backend cpu times its emulation");
        }
        error.into()
    })
}

fn measure(
    gpu: &Cuda,
    call: &Call,
    recipe: &Recipe,
    uploaded: &Uploaded,
    promote: u32,
    runs: Option<u16>,
) -> Result<Timed> {
    let plan = plan(gpu, call, recipe, promote)?;
    let (stream, tensors) = (gpu.stream(), uploaded.tensors());
    let mut watch = Stopwatch::new(gpu.gpu());
    let mut round = || -> Result<Round> {
        // SAFETY: the tensors have the sizes and strides of the plan and outlive it; every time is waited for.
        unsafe {
            let cold = time_stages(&mut watch, &plan, stream, &tensors, Grouping::Cold)?;
            let warm = time_stages(&mut watch, &plan, stream, &tensors, Grouping::Warm)?;
            watch.reset();
            watch.mark(stream)?;
            plan.run(stream, &tensors, Grouping::Reuse)?;
            watch.mark(stream)?;
            Ok(Round { cold, warm, reuse: watch.times()?.into_iter().sum() })
        }
    };
    round()?; // the first pays for loading code and touching memory
    let expected = round()?.total();
    let fitting = (BUDGET.as_secs_f64() / expected.as_secs_f64()) as usize;
    let runs = runs.map_or(fitting.clamp(RUNS.0, RUNS.1), usize::from);
    let rounds = (0..runs).map(|_| round()).collect::<Result<Vec<_>>>()?;

    let observed = plan.observed(stream)?;
    let mut timed = Timed::new(call, &recipe.name, runs);
    timed.promote = Some(promote);
    timed.mean_share = observed.mean_share;
    timed.max_score = observed.max_score;
    timed.grouping = grouping(call, recipe);
    timed.stages = stages(call, recipe, timed.grouping, &rounds);
    Ok(timed)
}

/// What the plan's k-means does; none for an order without one.
fn grouping(call: &Call, recipe: &Recipe) -> Option<GroupingSizes> {
    let config = recipe.grouping;
    let tokens = call.tokens();
    (config.order == TokenOrder::KMeans).then(|| GroupingSizes {
        clusters: config.clusters.unwrap_or_else(|| default_clusters(tokens)).min(tokens),
        cold_iterations: config.iterations.unwrap_or(COLD_ITERATIONS),
        warm_iterations: config.iterations.unwrap_or(WARM_ITERATIONS),
    })
}

fn stages(call: &Call, recipe: &Recipe, grouping: Option<GroupingSizes>, rounds: &[Round]) -> Vec<Stage> {
    let floors = floors(&call.shape(), recipe, &H200);
    let flops = call.shape().flops();
    let stage = |name, time: fn(&Round) -> Duration| Stage::new(name, rounds.iter().map(time));
    // Preparation and attention do not depend on where the order came from, so every call of a round counts.
    let both = |name, time: fn(&StageTimes) -> Duration| {
        Stage::new(name, rounds.iter().flat_map(|round| [time(&round.cold), time(&round.warm)]))
    };
    let (cold, warm) = grouping.map_or((Duration::ZERO, Duration::ZERO), |g| {
        (floors.group(g.cold_iterations), floors.group(g.warm_iterations))
    });
    let whole = floors.prepare() + floors.attention;

    let mut stages = Vec::new();
    if grouping.is_some() {
        stages.push(stage(stage::COLD, |r| r.cold.group).above(cold));
        stages.push(stage(stage::WARM, |r| r.warm.group).above(warm));
    }
    stages.extend([
        both(stage::Q, |t| t.q).above(floors.q),
        both(stage::K, |t| t.k).above(floors.k),
        both(stage::V, |t| t.v).above(floors.v),
        both(stage::PREPARE, |t| t.q + t.k + t.v).above(floors.prepare()),
        both(stage::ATTENTION, |t| t.attend).above(floors.attention).with_flops(flops),
        stage(stage::WHOLE_COLD, |r| r.cold.total()).above(whole + cold).with_flops(flops),
        stage(stage::WHOLE_WARM, |r| r.warm.total()).above(whole + warm).with_flops(flops),
        stage(stage::WHOLE, |r| r.reuse).above(whole).with_flops(flops),
    ]);
    stages.push(average(&stages, whole + (cold + 2 * warm) / 40).with_flops(flops));
    stages
}

/// A step of the schedule over 40 steps, from the medians of the stages.
fn average(stages: &[Stage], floor: Duration) -> Stage {
    let sum = |time: fn(&Stage) -> f64| {
        let of = |name| stages.iter().find(|stage| stage.stage == name).map_or(0.0, time);
        (of(stage::COLD) + 2.0 * of(stage::WARM)) / 40.0 + of(stage::PREPARE) + of(stage::ATTENTION)
    };
    let mut average = Stage::new(stage::AVERAGE, []);
    average.median_ms = sum(|stage| stage.median_ms);
    average.fastest_ms = sum(|stage| stage.fastest_ms);
    average.above(floor)
}

#[cfg(test)]
mod tests {
    use super::super::call;
    use super::*;

    fn ms(x: f64) -> Duration {
        Duration::from_secs_f64(x / 1e3)
    }

    #[test]
    fn the_average_step_follows_the_schedule() {
        let call = call::parse("wan2.2").unwrap();
        let recipe = Recipe::parse("vc16-expcast").unwrap();
        let times =
            |group| StageTimes { group: ms(group), q: ms(0.6), k: ms(0.4), v: ms(0.5), attend: ms(117.0) };
        let rounds = [Round { cold: times(8.0), warm: times(4.0), reuse: ms(119.0) }];
        let stages = stages(&call, &recipe, grouping(&call, &recipe), &rounds);
        let find = |name| stages.iter().find(|stage| stage.stage == name).unwrap();
        approx::assert_relative_eq!(find(stage::AVERAGE).median_ms, 118.5 + 16.0 / 40.0, max_relative = 1e-6);
        approx::assert_relative_eq!(find(stage::WHOLE_COLD).median_ms, 126.5, max_relative = 1e-6);
        approx::assert_relative_eq!(find(stage::ATTENTION).tflops.unwrap(), 1000.5, max_relative = 1e-3);
        approx::assert_relative_eq!(find(stage::PREPARE).ratio.unwrap(), 1.5 / 0.99, max_relative = 0.01);
    }

    #[test]
    fn an_order_without_a_kmeans_has_no_grouping() {
        let call = call::parse("1,1,1000,128").unwrap();
        let recipe = Recipe::parse("vc16+order=sequence").unwrap();
        assert!(grouping(&call, &recipe).is_none());
        let own = Recipe::parse("vc16+k=64+iterations=3").unwrap();
        let sizes = grouping(&call, &own).unwrap();
        assert_eq!((sizes.clusters, sizes.cold_iterations, sizes.warm_iterations), (64, 3, 3));
    }
}
