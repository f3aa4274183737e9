//! A planned call on a GPU: everything that it needs, so that the call itself neither allocates nor synchronizes.

mod fp4;

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use kernels_gpu::kernels::tiles;
use kernels_gpu::layout::scale_groups;
use kernels_gpu::numerics::units;

use super::dispatch::Family;
use super::driver::{Arguments, Device, DevicePtr, Stream};
use super::workspace::{Layout, Section, Workspace};
use crate::error::{Error, Result};
use crate::grouping::{COLD_ITERATIONS, TOKENS_PER_CLUSTER, TokenOrder, WARM_ITERATIONS, default_clusters};
use crate::problem::Shape;
use crate::recipe::vc::{EXPCAST, QUADRATIC};
use crate::recipe::{Probabilities, QkFormat, Recipe, RowSums, VFormat};
use crate::tensor::DType;

/// Channels that the kernels work on; smaller heads are padded with zeros.
const HEAD_DIM: usize = tiles::HEAD_DIM;
/// Key blocks between promotions of the FP8 sums to f32, by default: every one (`docs/performance.md`).
pub const PROMOTE: u32 = 1;

/// Strides in elements along (batch, head, token); the channels lie next to each other.
pub type Strides = [i64; 3];

/// Tensors of a call as device pointers; 0 stands for an absent one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tensors {
    /// Queries, 16-byte aligned.
    pub q: DevicePtr,
    /// Keys, 16-byte aligned.
    pub k: DevicePtr,
    /// Values, 16-byte aligned.
    pub v: DevicePtr,
    /// Output, 16-byte aligned.
    pub o: DevicePtr,
    /// f32 [batch, q_heads, q_tokens], or 0: receives the log-sum-exp.
    pub lse: DevicePtr,
    /// u32 `[batch]`, or 0: valid keys of every batch.
    pub kv_lens: DevicePtr,
    /// Rotary tables of the queries and of the keys.
    pub rope: Rope,
}

/// Rotary embedding of q and k on the way into the operands, in f32 and before everything else: interleaved channels
/// `x[2i]` = a and `x[2i + 1]` = b become a c - b s and a s + b c, with entry i of the token's rows of cosines c and sines s
/// (`kernels_gpu::numerics::rope::apply`).
///
/// A table is f32 `[tokens, head_dim / 2]`, contiguous and 16-byte aligned, for all batches and heads. Its rows follow the
/// tokens, whatever the order of the keys; those from the largest of `kv_lens` on are not read. Both tables of a tensor
/// are 0 where it is rotated already. A model that pairs channel i with i + head_dim / 2 brings channels 0, head_dim / 2, 1,
/// head_dim / 2 + 1, ... of q and k in this order, which changes no score.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rope {
    /// Cosines by query token, `[q_tokens, head_dim / 2]`, or 0.
    pub q_cos: DevicePtr,
    /// Sines by query token, as many.
    pub q_sin: DevicePtr,
    /// Cosines by key token, `[kv_tokens, head_dim / 2]`, or 0.
    pub k_cos: DevicePtr,
    /// Sines by key token, as many.
    pub k_sin: DevicePtr,
}

/// What a device plan is made for.
#[derive(Clone, Debug, PartialEq)]
pub struct Spec {
    /// Sizes.
    pub shape: Shape,
    /// What is quantized how.
    pub recipe: Recipe,
    /// Factor on the scores.
    pub scale: f32,
    /// Element type of q, k and v: binary16 or bfloat16.
    pub input: DType,
    /// Element type of o.
    pub output: DType,
    /// Strides of q.
    pub q: Strides,
    /// Strides of k.
    pub k: Strides,
    /// Strides of v.
    pub v: Strides,
    /// Strides of o.
    pub o: Strides,
    /// Key blocks between promotions of the FP8 sums to f32, at most: the warp-level kernel promotes every one.
    pub promote: u32,
}

impl Spec {
    /// Contiguous (batch, heads, tokens, dim) tensors, promotion as by default.
    pub fn contiguous(shape: Shape, recipe: Recipe, scale: f32, input: DType, output: DType) -> Self {
        let strides = |heads: usize, tokens: usize| {
            [heads * tokens * shape.head_dim, tokens * shape.head_dim, shape.head_dim].map(|s| s as i64)
        };
        let (q, kv) = (strides(shape.q_heads, shape.q_tokens), strides(shape.kv_heads, shape.kv_tokens));
        Self { shape, recipe, scale, input, output, q, k: kv, v: kv, o: q, promote: PROMOTE }
    }
}

/// How the token order of a call comes about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Grouping {
    /// Grouped afresh.
    Cold,
    /// Grouped from the centroids that the plan holds, or from the means under the labels that
    /// [`DevicePlan::load_labels`] brought; afresh where it holds neither.
    Warm,
    /// The order that the plan holds.
    Reuse,
}

/// A call on a GPU, planned: kernels chosen, memory allocated, launches laid out. The methods that take a stream
/// only launch; they neither allocate nor synchronize nor touch another stream, so they may be captured into a
/// graph. A plan serves one call at a time.
#[derive(Debug)]
pub struct DevicePlan {
    device: Arc<Device>,
    spec: Spec,
    sizes: Sizes,
    names: Names,
    memory: Workspace,
    at: Sections,
    /// What of a grouping the plan holds: [`NOTHING`], [`LABELS`] or [`CENTROIDS`].
    held: AtomicU8,
}

/// No order yet.
const NOTHING: u8 = 0;
/// Labels and their order, of another plan; centroids are not theirs.
const LABELS: u8 = 1;
/// Labels, their order and centroids.
const CENTROIDS: u8 = 2;

/// Derived sizes.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    /// (batch, q head) pairs.
    q_heads: usize,
    /// (batch, kv head) pairs.
    kv_heads: usize,
    /// Blocks of 128 keys.
    key_blocks: usize,
    /// Blocks of 128 query rows.
    q_blocks: usize,
    /// Clusters of the k-means; 0 for orders without one.
    clusters: usize,
    /// Tokens a cluster at least, which limits the clusters of a short head; 0 where the number was given.
    per_cluster: u32,
}

/// Entries that the recipe needs.
#[derive(Clone, Debug)]
struct Names {
    /// Suffix of the input's element type.
    input: &'static str,
    /// Q and K format.
    qk: &'static str,
    /// Family of the attention kernel.
    family: Family,
    attention: String,
}

/// Where everything lies.
#[derive(Clone, Copy, Debug)]
struct Sections {
    order: Section,
    labels: Section,
    centroids: Section,
    targets: Section,
    norms: Section,
    counts: Section,
    starts: Section,
    runs: Section,
    run_starts: Section,
    run_sums: Section,
    distances: Section,
    numbers: Section,
    balance: Section,
    k_sums: Section,
    k_mean: Section,
    flags: Section,
    /// NVFP4 only: largest magnitudes.
    q_amax: Section,
    q: Section,
    q_factor: Section,
    /// NVFP4 only: largest magnitudes.
    k_amax: Section,
    k: Section,
    k_scale: Section,
    v: Section,
    /// NVFP4 only: the scale of a head.
    v_tensor: Section,
    lse_shift: Section,
    block_means: Section,
    mean_tiles: Section,
    v_amax: Section,
    v_scale: Section,
    shares: Section,
    row_max: Section,
}

impl DevicePlan {
    /// Plans a call: checks that the kernels can do it and allocates what it needs.
    ///
    /// # Errors
    /// When the kernels do not cover the recipe or the tensors (each says what they take), or when the device
    /// is out of memory.
    pub fn new(device: &Arc<Device>, spec: Spec) -> Result<Self> {
        let names = checked_names(&spec, device)?;
        let s = &spec.shape;
        let clusters = match spec.recipe.grouping.order {
            TokenOrder::KMeans => spec
                .recipe
                .grouping
                .clusters
                .unwrap_or_else(|| default_clusters(s.kv_tokens))
                .min(s.kv_tokens),
            _ => 0,
        };
        let sizes = Sizes {
            q_heads: s.batch * s.q_heads,
            kv_heads: s.batch * s.kv_heads,
            key_blocks: s.kv_tokens.div_ceil(tiles::KEYS),
            q_blocks: s.q_tokens.div_ceil(2 * tiles::ROWS),
            clusters,
            per_cluster: if spec.recipe.grouping.clusters.is_none() { TOKENS_PER_CLUSTER as u32 } else { 0 },
        };
        let mut layout = Layout::default();
        let at = Sections::new(&mut layout, &spec, &sizes);
        let memory = layout.allocate(device)?;
        Ok(Self { device: device.clone(), spec, sizes, names, memory, at, held: AtomicU8::new(NOTHING) })
    }

    /// Whether a call can be planned on a device; allocates nothing.
    ///
    /// # Errors
    /// When the kernels, or those for this device, do not cover the recipe or the tensors.
    pub fn check(device: &Device, spec: &Spec) -> Result<()> {
        device.function(&checked_names(spec, device)?.attention).map(drop)
    }

    /// Whether the kernels for a device cover a recipe on heads of `head_dim` channels of type `input`, in tensors whose
    /// strides allow it.
    ///
    /// # Errors
    /// As [`DevicePlan::check`].
    pub fn covers(device: &Device, recipe: &Recipe, head_dim: usize, input: DType) -> Result<()> {
        let one = [1, 1, 1, head_dim];
        let spec = Spec::contiguous(Shape::new(one, one, one)?, recipe.clone(), 1.0, input, input);
        Self::check(device, &spec)
    }

    /// Device memory that the plan holds, in bytes.
    pub fn bytes(&self) -> usize {
        self.memory.bytes()
    }

    /// What the plan was made for.
    pub fn spec(&self) -> &Spec {
        &self.spec
    }

    /// The whole call on a stream.
    ///
    /// # Safety
    /// The pointers of `tensors` reach what the plan's [`Spec`] says, and stay valid until the stream is through.
    ///
    /// # Errors
    /// Of the driver, when a launch is refused.
    pub unsafe fn run(&self, stream: Stream, tensors: &Tensors, grouping: Grouping) -> Result<()> {
        // SAFETY: by the caller.
        unsafe {
            self.group(stream, tensors, grouping)?;
            self.prepare(stream, tensors)?;
            self.attend(stream, tensors)
        }
    }

    /// Decides the token order, unless it is reused or the sequence.
    ///
    /// # Safety
    /// As for [`DevicePlan::run`].
    ///
    /// # Errors
    /// Of the driver.
    pub unsafe fn group(&self, stream: Stream, tensors: &Tensors, grouping: Grouping) -> Result<()> {
        check_tensors(tensors)?;
        if self.sizes.clusters == 0 {
            return Ok(());
        }
        let held = self.held.load(Ordering::Relaxed);
        if grouping == Grouping::Reuse {
            return if held == NOTHING {
                Err(Error::Option {
                    option: "grouping",
                    expected: "a plan that has grouped before an order is reused".into(),
                    given: "a new plan".into(),
                })
            } else {
                Ok(())
            };
        }
        let start = if grouping == Grouping::Warm { held } else { NOTHING };
        let default = if start == NOTHING { COLD_ITERATIONS } else { WARM_ITERATIONS };
        let iterations = self.spec.recipe.grouping.iterations.unwrap_or(default);
        // Until everything is launched the plan holds nothing.
        self.held.store(NOTHING, Ordering::Relaxed);
        // SAFETY: by the caller; the sections have the sizes of the kernels' tables.
        unsafe {
            self.start_kmeans(stream, tensors, start == CENTROIDS)?;
            if start == LABELS {
                // Means of the loaded clusters; an empty one keeps its seed.
                self.update(stream, tensors)?;
            }
            // The CPU stops after an assignment that changes no label; here the rest runs, and changes nothing.
            for _ in 0..iterations {
                self.assign(stream, tensors)?;
                self.sort(stream, tensors, 0)?;
                self.update(stream, tensors)?;
            }
            self.number(stream, tensors)?;
            self.sort(stream, tensors, self.ptr(self.at.numbers))?;
        }
        self.held.store(CENTROIDS, Ordering::Relaxed);
        Ok(())
    }

    unsafe fn start_kmeans(&self, stream: Stream, tensors: &Tensors, warm: bool) -> Result<()> {
        let (s, blocks) = (&self.spec.shape, self.sizes.clusters.div_ceil(8) * self.sizes.kv_heads);
        let (name, arguments) = if warm {
            let arguments = Arguments::new()
                .with(tensors.kv_lens)
                .with(self.ptr(self.at.centroids))
                .with(self.ptr(self.at.targets))
                .with(self.ptr(self.at.norms))
                .with(s.kv_tokens as u32)
                .with(s.kv_heads as u32)
                .with(self.sizes.clusters as u32)
                .with(self.sizes.per_cluster);
            (format!("kmeans_targets_{}", self.names.input), arguments)
        } else {
            let arguments = Arguments::new()
                .with(tensors.v)
                .with(tensors.kv_lens)
                .with(self.ptr(self.at.centroids))
                .with(self.ptr(self.at.targets))
                .with(self.ptr(self.at.norms));
            let arguments = self
                .kv_sizes(self.strides(arguments, self.spec.v))
                .with(self.sizes.clusters as u32)
                .with(self.sizes.per_cluster)
                .with(self.spec.recipe.grouping.seed);
            (format!("kmeans_seed_{}", self.names.input), arguments)
        };
        // SAFETY: by the caller.
        unsafe { self.launch(stream, &name, blocks, arguments) }
    }

    /// Labels of all tokens.
    unsafe fn assign(&self, stream: Stream, tensors: &Tensors) -> Result<()> {
        let chunks = self.spec.shape.kv_tokens.div_ceil(1024) * self.sizes.kv_heads;
        let arguments = Arguments::new()
            .with(tensors.v)
            .with(tensors.kv_lens)
            .with(self.ptr(self.at.targets))
            .with(self.ptr(self.at.norms))
            .with(self.ptr(self.at.labels));
        let arguments = self
            .kv_sizes(self.strides(arguments, self.spec.v))
            .with(self.sizes.clusters as u32)
            .with(self.sizes.per_cluster);
        // SAFETY: by the caller.
        unsafe { self.launch(stream, &format!("kmeans_assign_{}", self.names.input), chunks, arguments) }
    }

    /// The order that sorts the labels; every label is replaced by its cluster's entry of `numbers` first, unless
    /// that is 0.
    unsafe fn sort(&self, stream: Stream, tensors: &Tensors, numbers: DevicePtr) -> Result<()> {
        let s = &self.spec.shape;
        let chunks = s.kv_tokens.div_ceil(1024) * self.sizes.kv_heads;
        let clusters = self.sizes.clusters as u32;
        // SAFETY: by the caller.
        unsafe {
            let arguments = Arguments::new()
                .with(self.ptr(self.at.labels))
                .with(numbers)
                .with(tensors.kv_lens)
                .with(self.ptr(self.at.counts))
                .with(s.kv_tokens as u32)
                .with(s.kv_heads as u32)
                .with(clusters);
            self.launch(stream, "order_count", chunks, arguments)?;
            let arguments = Arguments::new()
                .with(self.ptr(self.at.counts))
                .with(self.ptr(self.at.starts))
                .with(self.ptr(self.at.runs))
                .with(self.ptr(self.at.run_starts))
                .with(s.kv_tokens as u32)
                .with(clusters);
            self.launch(stream, "order_scan", self.sizes.kv_heads, arguments)?;
            let arguments = Arguments::new()
                .with(self.ptr(self.at.labels))
                .with(tensors.kv_lens)
                .with(self.ptr(self.at.counts))
                .with(self.ptr(self.at.starts))
                .with(self.ptr(self.at.order))
                .with(s.kv_tokens as u32)
                .with(s.kv_heads as u32)
                .with(clusters);
            self.launch(stream, "order_scatter", chunks, arguments)
        }
    }

    /// Centroids of the sorted tokens.
    unsafe fn update(&self, stream: Stream, tensors: &Tensors) -> Result<()> {
        let clusters = self.sizes.clusters;
        let runs = (self.sizes.key_blocks + clusters).div_ceil(8) * self.sizes.kv_heads;
        let arguments = Arguments::new()
            .with(tensors.v)
            .with(tensors.kv_lens)
            .with(self.ptr(self.at.order))
            .with(self.ptr(self.at.runs))
            .with(self.ptr(self.at.run_starts))
            .with(self.ptr(self.at.run_sums));
        let arguments = self
            .kv_sizes(self.strides(arguments, self.spec.v))
            .with(clusters as u32)
            .with(self.sizes.per_cluster);
        // SAFETY: by the caller.
        unsafe {
            self.launch(stream, &format!("kmeans_sums_{}", self.names.input), runs, arguments)?;
            let arguments = Arguments::new()
                .with(tensors.kv_lens)
                .with(self.ptr(self.at.run_sums))
                .with(self.ptr(self.at.run_starts))
                .with(self.ptr(self.at.starts))
                .with(self.ptr(self.at.centroids))
                .with(self.ptr(self.at.targets))
                .with(self.ptr(self.at.norms))
                .with(self.spec.shape.kv_tokens as u32)
                .with(self.spec.shape.kv_heads as u32)
                .with(clusters as u32)
                .with(self.sizes.per_cluster);
            let blocks = clusters.div_ceil(8) * self.sizes.kv_heads;
            self.launch(stream, &format!("kmeans_update_{}", self.names.input), blocks, arguments)
        }
    }

    /// New numbers of the clusters, along a path through their centroids, which are brought into its order.
    unsafe fn number(&self, stream: Stream, tensors: &Tensors) -> Result<()> {
        let clusters = self.sizes.clusters;
        let sizes = |arguments| self.kv_sizes(arguments).with(clusters as u32).with(self.sizes.per_cluster);
        let arguments = Arguments::new()
            .with(tensors.kv_lens)
            .with(self.ptr(self.at.centroids))
            .with(self.ptr(self.at.distances));
        let tiles = clusters.div_ceil(32) * clusters.div_ceil(32) * self.sizes.kv_heads;
        // SAFETY: by the caller.
        unsafe {
            self.launch(stream, "kmeans_distances", tiles, sizes(arguments))?;
            let arguments = Arguments::new()
                .with(tensors.kv_lens)
                .with(self.ptr(self.at.starts))
                .with(self.ptr(self.at.distances))
                .with(self.ptr(self.at.centroids))
                .with(self.ptr(self.at.numbers));
            self.launch(stream, "kmeans_tour", self.sizes.kv_heads, sizes(arguments))
        }
    }

    /// Bytes of the labels of a call, u16 [batch, kv_heads, kv_tokens]; 0 for an order without clusters.
    pub fn labels_bytes(&self) -> usize {
        self.at.labels.bytes()
    }

    /// Copies the labels of the order that the plan holds to `to`, from where [`DevicePlan::load_labels`] brings
    /// the order back: one plan serves many layers that way, and what is kept of each is its labels.
    ///
    /// # Safety
    /// [`DevicePlan::labels_bytes`] bytes at `to` may be written until the stream is through.
    ///
    /// # Errors
    /// When the plan has not grouped, or of the driver.
    pub unsafe fn save_labels(&self, stream: Stream, to: DevicePtr) -> Result<()> {
        if self.sizes.clusters > 0 && self.held.load(Ordering::Relaxed) == NOTHING {
            return Err(Error::Option {
                option: "grouping",
                expected: "a plan that has grouped before its labels are saved".into(),
                given: "a new plan".into(),
            });
        }
        self.device.bind()?;
        // SAFETY: by the caller.
        unsafe { self.memory.copy_out(self.at.labels, to, stream) }
    }

    /// Makes the order of saved labels the plan's; a later [`Grouping::Warm`] starts from their clusters.
    ///
    /// # Safety
    /// `from` holds labels that a plan of the same shape and recipe saved, for the lengths in `tensors`, and stays
    /// valid until the stream is through; `tensors` as for [`DevicePlan::run`].
    ///
    /// # Errors
    /// Of the driver.
    pub unsafe fn load_labels(&self, stream: Stream, tensors: &Tensors, from: DevicePtr) -> Result<()> {
        if self.sizes.clusters == 0 {
            return Ok(());
        }
        self.held.store(NOTHING, Ordering::Relaxed);
        self.device.bind()?;
        // SAFETY: by the caller.
        unsafe {
            self.memory.copy_in(self.at.labels, from, stream)?;
            self.sort(stream, tensors, 0)?;
        }
        self.held.store(LABELS, Ordering::Relaxed);
        Ok(())
    }

    /// Makes the order that another plan holds this one's, with all that a later [`Grouping::Warm`] starts from;
    /// `other` keeps its own.
    ///
    /// # Safety
    /// `other` lives until the stream is through and what made its order is done or on the same stream; `tensors` as
    /// for [`DevicePlan::run`], with the lengths that the order was made for.
    ///
    /// # Errors
    /// Of the driver.
    pub(super) unsafe fn take_over(&self, stream: Stream, tensors: &Tensors, other: &Self) -> Result<()> {
        debug_assert!(self.groups_like(other));
        let held = other.held.load(Ordering::Relaxed);
        if held == NOTHING {
            return Ok(());
        }
        // SAFETY: by the caller; plans that group alike have sections of the same sizes.
        unsafe {
            self.load_labels(stream, tensors, other.ptr(other.at.labels))?;
            if held == CENTROIDS {
                self.memory.copy_in(self.at.centroids, other.ptr(other.at.centroids), stream)?;
            }
        }
        self.held.store(held, Ordering::Relaxed);
        Ok(())
    }

    /// Whether an order of `other` can be this plan's: the keys have the same sizes and are grouped in the same way, on
    /// the same device.
    pub(super) fn groups_like(&self, other: &Self) -> bool {
        let keys = |s: &Shape| [s.batch, s.kv_heads, s.kv_tokens, s.head_dim];
        Arc::ptr_eq(&self.device, &other.device)
            && keys(&self.spec.shape) == keys(&other.spec.shape)
            && self.spec.recipe.grouping == other.spec.recipe.grouping
    }

    /// Quantizes Q, K and V on the order that the plan holds.
    ///
    /// # Safety
    /// As for [`DevicePlan::run`].
    ///
    /// # Errors
    /// Of the driver.
    pub unsafe fn prepare(&self, stream: Stream, tensors: &Tensors) -> Result<()> {
        // SAFETY: by the caller.
        unsafe {
            self.prepare_q(stream, tensors)?;
            self.prepare_k(stream, tensors)?;
            self.prepare_v(stream, tensors)
        }
    }

    /// Statistics of K and the balance of the scales, then Q; comes before the other two.
    ///
    /// # Safety
    /// As for [`DevicePlan::run`].
    ///
    /// # Errors
    /// Of the driver.
    pub unsafe fn prepare_q(&self, stream: Stream, tensors: &Tensors) -> Result<()> {
        check_tensors(tensors)?;
        self.memory.fill(self.at.flags, 0, stream)?;
        // SAFETY: by the caller.
        unsafe {
            self.k_statistics(stream, tensors)?;
            self.quantize_q(stream, tensors)
        }
    }

    /// What quantizing Q and K needs to know first.
    unsafe fn k_statistics(&self, stream: Stream, tensors: &Tensors) -> Result<()> {
        let s = &self.spec.shape;
        // SAFETY: by the caller.
        unsafe {
            if self.spec.recipe.qk == QkFormat::E4m3PerHead {
                let arguments = Arguments::new().with(tensors.q).with(self.ptr(self.at.balance));
                let arguments = self
                    .q_sizes(self.strides(arguments, self.spec.q))
                    .with(units::code_unit_factor(self.spec.scale));
                let name = format!("balance_{}", self.names.input);
                self.launch(stream, &name, self.sizes.kv_heads, arguments)?;
            }
            let arguments = Arguments::new()
                .with(tensors.k)
                .with(tensors.rope.k_cos)
                .with(tensors.rope.k_sin)
                .with(tensors.kv_lens)
                .with(self.ptr(self.at.k_sums))
                .with(self.poisoned());
            let arguments = self.kv_sizes(self.strides(arguments, self.spec.k));
            let blocks = self.sizes.key_blocks.div_ceil(8) * self.sizes.kv_heads;
            self.launch(stream, &format!("k_stats_{}", self.names.input), blocks, arguments)?;
            let arguments = Arguments::new()
                .with(self.ptr(self.at.k_sums))
                .with(tensors.kv_lens)
                .with(self.ptr(self.at.k_mean))
                .with(s.kv_tokens as u32)
                .with(s.kv_heads as u32);
            self.launch(stream, "k_mean", self.sizes.kv_heads, arguments)
        }
    }

    unsafe fn quantize_q(&self, stream: Stream, tensors: &Tensors) -> Result<()> {
        if self.names.family.fp4() {
            // SAFETY: by the caller.
            return unsafe { self.quantize_q_fp4(stream, tensors) };
        }
        let centred = self.spec.recipe.center_k;
        let shift = if centred && tensors.lse != 0 { self.ptr(self.at.lse_shift) } else { 0 };
        let arguments = Arguments::new()
            .with(tensors.q)
            .with(tensors.rope.q_cos)
            .with(tensors.rope.q_sin)
            .with(self.balance())
            .with(if centred { self.ptr(self.at.k_mean) } else { 0 })
            .with(self.ptr(self.at.q))
            .with(self.ptr(self.at.q_factor))
            .with(shift)
            .with(self.saturated());
        let side = units::code_unit_factor(self.spec.scale).copysign(self.spec.scale);
        let arguments = self
            .q_sizes(self.strides(arguments, self.spec.q))
            .with(self.rotation())
            .with(side)
            .with(self.spec.scale);
        let name = format!("quantize_q_{}_from_{}", self.names.qk, self.names.input);
        // SAFETY: by the caller.
        unsafe { self.launch(stream, &name, 2 * self.sizes.q_blocks * self.sizes.q_heads, arguments) }
    }

    /// K, on the order that the plan holds.
    ///
    /// # Safety
    /// As for [`DevicePlan::run`].
    ///
    /// # Errors
    /// Of the driver.
    pub unsafe fn prepare_k(&self, stream: Stream, tensors: &Tensors) -> Result<()> {
        check_tensors(tensors)?;
        if self.names.family.fp4() {
            // SAFETY: by the caller.
            return unsafe { self.prepare_k_fp4(stream, tensors) };
        }
        let arguments = Arguments::new()
            .with(tensors.k)
            .with(self.order())
            .with(tensors.rope.k_cos)
            .with(tensors.rope.k_sin)
            .with(if self.spec.recipe.center_k { self.ptr(self.at.k_mean) } else { 0 })
            .with(self.balance())
            .with(tensors.kv_lens)
            .with(self.ptr(self.at.k))
            .with(self.ptr(self.at.k_scale))
            .with(self.saturated());
        let arguments = self
            .kv_sizes(self.strides(arguments, self.spec.k))
            .with(self.rotation())
            .with(units::code_unit_factor(self.spec.scale));
        let name = format!("quantize_k_{}_from_{}", self.names.qk, self.names.input);
        // Keys of a tile share their INT8 scales, so that one block has them all.
        let blocks = if self.spec.recipe.qk == QkFormat::Int8 { 1 } else { 2 };
        // SAFETY: by the caller.
        unsafe { self.launch(stream, &name, blocks * self.sizes.key_blocks * self.sizes.kv_heads, arguments) }
    }

    /// V and its block means, on the order that the plan holds.
    ///
    /// # Safety
    /// As for [`DevicePlan::run`].
    ///
    /// # Errors
    /// Of the driver.
    pub unsafe fn prepare_v(&self, stream: Stream, tensors: &Tensors) -> Result<()> {
        check_tensors(tensors)?;
        let (means, fp4) = (self.block_means(), self.names.family.fp4());
        let arguments = Arguments::new()
            .with(tensors.v)
            .with(self.order())
            .with(tensors.kv_lens)
            .with(means)
            .with(self.ptr(self.at.v_amax))
            .with(if self.spec.recipe.demean { self.ptr(self.at.shares) } else { 0 })
            .with(self.poisoned());
        let arguments = self.kv_sizes(self.strides(arguments, self.spec.v));
        let blocks = self.sizes.key_blocks.div_ceil(8) * self.sizes.kv_heads;
        // SAFETY: by the caller.
        unsafe {
            self.memory.fill(self.at.v_amax, 0, stream)?;
            let name = if fp4 { "v_stats_fp4" } else { "v_stats" };
            self.launch(stream, &format!("{name}_{}", self.names.input), blocks, arguments)?;
            if fp4 {
                return self.smooth_v_fp4(stream, tensors);
            }
            let arguments = Arguments::new().with(self.ptr(self.at.v_amax)).with(self.ptr(self.at.v_scale));
            self.launch(stream, "v_scale", self.sizes.kv_heads, arguments)?;
            let arguments = Arguments::new()
                .with(tensors.v)
                .with(self.order())
                .with(tensors.kv_lens)
                .with(means)
                .with(self.ptr(self.at.v_scale))
                .with(self.ptr(self.at.v))
                .with(self.ptr(self.at.mean_tiles));
            let arguments = self.kv_sizes(self.strides(arguments, self.spec.v));
            let blocks = 16 * self.sizes.key_blocks.div_ceil(16) * self.sizes.kv_heads;
            self.launch(stream, &format!("smooth_v_{}", self.names.input), blocks, arguments)
        }
    }

    /// The attention loop on the operands that the plan holds.
    ///
    /// # Safety
    /// As for [`DevicePlan::run`].
    ///
    /// # Errors
    /// Of the driver.
    pub unsafe fn attend(&self, stream: Stream, tensors: &Tensors) -> Result<()> {
        check_tensors(tensors)?;
        self.device.bind()?;
        let s = &self.spec.shape;
        self.memory.fill(self.at.row_max, 0, stream)?;
        let shift =
            if self.spec.recipe.center_k && tensors.lse != 0 { self.ptr(self.at.lse_shift) } else { 0 };
        let [batch, head, token] = self.spec.o;
        let out_type = match self.spec.output {
            DType::F32 => 0u32,
            DType::F16 => 1,
            DType::Bf16 => 2,
        };
        let family = self.names.family;
        // The means of NVFP4 lie in the tiles of V, and the scale of its values takes their place.
        let means = if family.fp4() { self.at.v_tensor } else { self.at.mean_tiles };
        let arguments = Arguments::new()
            .with(self.ptr(self.at.q))
            .with(self.ptr(self.at.k))
            .with(self.ptr(self.at.v))
            .with(self.ptr(means))
            .with(self.ptr(self.at.q_factor))
            .with(self.ptr(self.at.k_scale))
            .with(self.ptr(self.at.v_scale))
            .with(tensors.kv_lens)
            .with(self.poisoned())
            .with(tensors.o)
            .with(tensors.lse)
            .with(shift)
            .with(self.ptr(self.at.row_max))
            .with(s.q_tokens as u32)
            .with(s.kv_tokens as u32)
            .with(s.q_heads as u32)
            .with(s.kv_heads as u32)
            .with((s.q_heads / s.kv_heads) as u32)
            .with(s.head_dim as u32)
            .with(batch)
            .with(head)
            .with(token)
            .with(self.spec.promote)
            .with(out_type);
        let grid = [s.q_tokens.div_ceil(family.rows()) as u32, s.q_heads as u32, s.batch as u32];
        // SAFETY: by the caller.
        unsafe { self.device.function(&self.names.attention)?.launch(stream, grid, arguments) }
    }

    /// What the last call on the plan observed; waits for the stream.
    ///
    /// # Errors
    /// Of the driver, those of the call's launches among them.
    pub fn observed(&self, stream: Stream) -> Result<DeviceObserved> {
        stream.synchronize()?;
        let row_max: Vec<f32> = self.memory.read(self.at.row_max)?;
        let shares: Vec<f32> =
            if self.spec.recipe.demean { self.memory.read(self.at.shares)? } else { Vec::new() };
        let counted: Vec<f64> = shares.iter().filter(|s| **s >= 0.0).map(|&s| f64::from(s)).collect();
        let flags: Vec<u32> = self.memory.read(self.at.flags)?;
        Ok(DeviceObserved {
            saturated: flags[self.sizes.kv_heads..].iter().any(|&f| f != 0),
            max_score: row_max.iter().copied().fold(0.0, |a, b| if b <= a { a } else { b }),
            mean_share: (!counted.is_empty()).then(|| counted.iter().sum::<f64>() / counted.len() as f64),
        })
    }

    /// The operands of the last [`DevicePlan::prepare`], as they lie on the device: for tests of the stages.
    ///
    /// # Errors
    /// Of the driver.
    pub fn operands(&self, stream: Stream) -> Result<DeviceOperands> {
        stream.synchronize()?;
        Ok(DeviceOperands {
            order: if self.sizes.clusters > 0 { self.memory.read(self.at.order)? } else { Vec::new() },
            labels: if self.sizes.clusters > 0 { self.memory.read(self.at.labels)? } else { Vec::new() },
            centroids: if self.sizes.clusters > 0 {
                self.memory.read(self.at.centroids)?
            } else {
                Vec::new()
            },
            q: self.memory.read(self.at.q)?,
            k: self.memory.read(self.at.k)?,
            k_mean: self.memory.read(self.at.k_mean)?,
            v: self.memory.read(self.at.v)?,
            mean_tiles: self.memory.read(self.at.mean_tiles)?,
            v_scale: self.memory.read(self.at.v_scale)?,
            tensor_scales: self.tensor_scales()?,
        })
    }

    /// The labels that the plan holds, u16 [batch, kv_heads, kv_tokens]; waits for the stream.
    ///
    /// # Errors
    /// Of the driver.
    pub(super) fn labels(&self, stream: Stream) -> Result<Vec<u16>> {
        stream.synchronize()?;
        self.memory.read(self.at.labels)
    }

    /// Clusters of the k-means; 0 for an order without one.
    pub(super) fn clusters(&self) -> usize {
        self.sizes.clusters
    }

    fn ptr(&self, section: Section) -> DevicePtr {
        self.memory.ptr(section)
    }

    /// u32 [batch, kv_heads]: keys or values that are not finite.
    fn poisoned(&self) -> DevicePtr {
        self.ptr(self.at.flags)
    }

    /// u32 [batch, kv_heads]: operands beyond their format.
    fn saturated(&self) -> DevicePtr {
        self.ptr(self.at.flags) + (self.sizes.kv_heads * size_of::<u32>()) as u64
    }

    fn balance(&self) -> DevicePtr {
        if self.spec.recipe.qk == QkFormat::E4m3PerHead { self.ptr(self.at.balance) } else { 0 }
    }

    /// Where the block means lie before they are stored; 0 without demeaning.
    fn block_means(&self) -> DevicePtr {
        if self.spec.recipe.demean { self.ptr(self.at.block_means) } else { 0 }
    }

    fn order(&self) -> DevicePtr {
        if self.sizes.clusters > 0 { self.ptr(self.at.order) } else { 0 }
    }

    fn rotation(&self) -> u32 {
        if self.spec.recipe.rotate_qk {
            self.spec.shape.head_dim.next_power_of_two().max(16) as u32
        } else {
            0
        }
    }

    fn strides(&self, arguments: Arguments, [batch, head, token]: Strides) -> Arguments {
        arguments.with(batch).with(head).with(token)
    }

    fn q_sizes(&self, arguments: Arguments) -> Arguments {
        let s = &self.spec.shape;
        [s.q_tokens, s.q_heads, s.kv_heads, s.head_dim].iter().fold(arguments, |a, &x| a.with(x as u32))
    }

    fn kv_sizes(&self, arguments: Arguments) -> Arguments {
        let s = &self.spec.shape;
        [s.kv_tokens, s.kv_heads, s.head_dim].iter().fold(arguments, |a, &x| a.with(x as u32))
    }

    unsafe fn launch(&self, stream: Stream, name: &str, blocks: usize, arguments: Arguments) -> Result<()> {
        self.device.bind()?;
        let blocks =
            u32::try_from(blocks).ok().filter(|&b| b <= i32::MAX as u32).ok_or_else(|| Error::Device {
                reason: format!("kernel `{name}` would need {blocks} blocks, more than a grid holds"),
            })?;
        // SAFETY: by the caller.
        unsafe { self.device.function(name)?.launch(stream, [blocks, 1, 1], arguments) }
    }
}

/// What a call noticed about its data.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DeviceObserved {
    /// Largest |row maximum| of the centred scores, in code units; NaN where scores were. From
    /// [`F16_SCORE_LIMIT`](crate::backend::cpu::F16_SCORE_LIMIT) on f16 scores are too coarse.
    pub max_score: f32,
    /// Whether a value of Q or K left the range of its format.
    pub saturated: bool,
    /// Share of the value energy that the block means hold, averaged over the blocks; absent without demeaning.
    pub mean_share: Option<f64>,
}

/// Operands as they lie on the device; the layouts are those of `kernels_gpu::kernels::tiles`.
#[derive(Clone, Debug)]
pub struct DeviceOperands {
    /// u32 [batch, kv_heads, kv_tokens]: position -> token; empty without grouping.
    pub order: Vec<u32>,
    /// u16 [batch, kv_heads, kv_tokens]: cluster of every token; empty without grouping.
    pub labels: Vec<u16>,
    /// f32 [batch, kv_heads, clusters, 128]; empty without grouping.
    pub centroids: Vec<f32>,
    /// Q tiles.
    pub q: Vec<u8>,
    /// K tiles.
    pub k: Vec<u8>,
    /// f32 [batch, kv_heads, 128]: token mean of K.
    pub k_mean: Vec<f32>,
    /// V^T tiles.
    pub v: Vec<u8>,
    /// Tiles of block means.
    pub mean_tiles: Vec<u8>,
    /// f32 [batch, kv_heads, 128].
    pub v_scale: Vec<f32>,
    /// Of NVFP4 the scales of the heads of Q, K and V; otherwise empty.
    pub tensor_scales: [Vec<f32>; 3],
}

impl Sections {
    fn new(layout: &mut Layout, spec: &Spec, sizes: &Sizes) -> Self {
        let Sizes { q_heads, kv_heads, key_blocks, q_blocks, clusters, .. } = *sizes;
        let tokens = spec.shape.kv_tokens;
        let grouped = |count: usize| if clusters > 0 { count * kv_heads } else { 0 };
        let fp4 = spec.recipe.qk == QkFormat::Nvfp4;
        let (q_tile, k_tile, v_tile) = match spec.recipe.qk {
            QkFormat::Nvfp4 => (tiles::Q_FP4_BYTES, tiles::K_FP4_BYTES, tiles::V_FP4_BYTES),
            QkFormat::F16 => (tiles::Q_F16_BYTES, tiles::K_F16_BYTES, tiles::V_BYTES),
            _ => (tiles::Q_E4M3_BYTES, tiles::K_E4M3_BYTES, tiles::V_BYTES),
        };
        // Scales of INT8 are many a head, of NVFP4 one.
        let scaled = |count: usize, heads: usize| match spec.recipe.qk {
            QkFormat::Int8 => count,
            QkFormat::Nvfp4 => heads,
            _ => 0,
        };
        let of_fp4 = |count: usize| if fp4 { count } else { 0 };
        let demeaned = |count: usize| if spec.recipe.demean { count * kv_heads } else { 0 };
        let runs = key_blocks + clusters;
        Self {
            order: layout.section::<u32>(grouped(tokens)),
            labels: layout.section::<u16>(grouped(tokens)),
            centroids: layout.section::<f32>(grouped(clusters * HEAD_DIM)),
            targets: layout.section::<u16>(grouped(clusters * HEAD_DIM)),
            norms: layout.section::<f32>(grouped(clusters)),
            counts: layout.section::<u32>(grouped(tokens.div_ceil(1024) * clusters)),
            starts: layout.section::<u32>(grouped(clusters + 1)),
            runs: layout.section::<u32>(grouped(2 * runs)),
            run_starts: layout.section::<u32>(grouped(clusters + 1)),
            run_sums: layout.section::<f32>(grouped(runs * HEAD_DIM)),
            distances: layout.section::<f32>(grouped(clusters * clusters)),
            numbers: layout.section::<u16>(grouped(clusters)),
            balance: layout.section::<f32>(kv_heads),
            k_sums: layout.section::<f32>(kv_heads * key_blocks * HEAD_DIM),
            k_mean: layout.section::<f32>(kv_heads * HEAD_DIM),
            flags: layout.section::<u32>(2 * kv_heads),
            q_amax: layout.section::<u32>(of_fp4(q_heads)),
            q: layout.section::<u8>(q_heads * q_blocks * 2 * q_tile),
            q_factor: layout.section::<f32>(scaled(q_heads * q_blocks * 2 * tiles::ROWS, q_heads)),
            k_amax: layout.section::<u32>(of_fp4(kv_heads)),
            k: layout.section::<u8>(kv_heads * key_blocks * k_tile),
            k_scale: layout.section::<f32>(scaled(kv_heads * key_blocks * scale_groups::K_GROUPS, kv_heads)),
            v: layout.section::<u8>(kv_heads * key_blocks * v_tile),
            v_tensor: layout.section::<f32>(of_fp4(kv_heads)),
            lse_shift: layout.section::<f32>(q_heads * spec.shape.q_tokens),
            block_means: layout.section::<f32>(demeaned(key_blocks * HEAD_DIM)),
            mean_tiles: layout.section::<u8>(demeaned(if fp4 {
                0
            } else {
                key_blocks.div_ceil(tiles::MEAN_BLOCKS) * tiles::MEAN_BYTES
            })),
            v_amax: layout.section::<u32>(kv_heads * 2 * HEAD_DIM),
            v_scale: layout.section::<f32>(kv_heads * HEAD_DIM),
            shares: layout.section::<f32>(demeaned(key_blocks)),
            row_max: layout.section::<u32>(q_heads),
        }
    }
}

/// The entries for a spec that the kernels for the device cover, loaded.
fn checked_names(spec: &Spec, device: &Device) -> Result<Names> {
    spec.recipe.validate()?;
    let names = names(spec, device)?;
    check_layout(spec)?;
    Ok(names)
}

/// Chooses the entries of a recipe, or says which part of it no kernel for the device covers.
fn names(spec: &Spec, device: &Device) -> Result<Names> {
    let recipe = &spec.recipe;
    let refuse = |what: &str| {
        Err(Error::Recipe {
            recipe: recipe.name.clone(),
            reason: format!("the GPU kernels do not cover {what}; the CPU backend does"),
        })
    };
    let family = device.family(recipe)?;
    let Some((family, qk)) = family.and_then(|family| Some((family, family.qk(recipe)?))) else {
        return refuse(&format!("this format of Q and K (they take {})", device.kernels().takes()));
    };
    let p = if family.fp4() {
        if recipe.p != Probabilities::Nvfp4 || recipe.row_sums != RowSums::Decoded {
            return refuse(
                "these probabilities (beside NVFP4 Q and K they take NVFP4 with decoded row sums)",
            );
        }
        if recipe.v != VFormat::Nvfp4 || recipe.rotate_v {
            return refuse("this format of V (beside NVFP4 Q and K they take NVFP4, not rotated)");
        }
        ""
    } else {
        let p = match recipe.p {
            p if p == EXPCAST && recipe.row_sums == RowSums::Decoded => "_expcast",
            p if p == QUADRATIC && recipe.row_sums == RowSums::Decoded && family.quadratic() => "_quadratic",
            Probabilities::E4m3 { peak: 256.0 } if recipe.row_sums == RowSums::Exact => "_exp2",
            _ => {
                return refuse(
                    "these probabilities (they take packed ExpCast at its own beta, on some GPUs quadratic ExpCast at a beta of 0, with decoded row sums; or exact exponentials with a peak of 256 and exact row sums)",
                );
            }
        };
        if recipe.v != VFormat::E4m3PerChannel || recipe.rotate_v {
            return refuse("this format of V (they take E4M3 with a scale per channel, not rotated)");
        }
        p
    };
    if !matches!(recipe.grouping.order, TokenOrder::Sequence | TokenOrder::KMeans) {
        return refuse("this token order (they take `sequence` and `kmeans`)");
    }
    let means = if recipe.demean { "smooth" } else { "plain" };
    let input = match spec.input {
        DType::F16 => "f16",
        DType::Bf16 => "bf16",
        DType::F32 => {
            return Err(Error::Tensor {
                tensor: "q",
                expected: "f16 or bf16 on the GPU".into(),
                given: "f32 (convert it, or use the CPU backend)".into(),
            });
        }
    };
    Ok(Names { input, qk, family, attention: format!("{}_{qk}{p}_{means}", family.prefix()) })
}

/// What the kernels ask of shapes and strides.
fn check_layout(spec: &Spec) -> Result<()> {
    let d = spec.shape.head_dim;
    if !d.is_multiple_of(8) || d > HEAD_DIM {
        return Err(Error::Tensor {
            tensor: "q",
            expected: format!("a head_dim that is a multiple of 8 and at most {HEAD_DIM} on the GPU"),
            given: format!("head_dim {d}"),
        });
    }
    for (tensor, strides) in [("q", spec.q), ("k", spec.k), ("v", spec.v)] {
        if strides.iter().any(|s| s % 8 != 0) {
            return Err(Error::Tensor {
                tensor,
                expected: "strides that are multiples of 8 elements (16 bytes) on the GPU".into(),
                given: format!("strides {strides:?}"),
            });
        }
    }
    if spec.o.iter().any(|s| s % 2 != 0) {
        return Err(Error::Tensor {
            tensor: "o",
            expected: "even strides on the GPU".into(),
            given: format!("strides {:?}", spec.o),
        });
    }
    if spec.shape.q_heads > 65_535 || spec.shape.batch > 65_535 {
        return Err(Error::Tensor {
            tensor: "q",
            expected: "at most 65,535 heads and batches on the GPU".into(),
            given: format!("{} heads, batch {}", spec.shape.q_heads, spec.shape.batch),
        });
    }
    if spec.promote == 0 {
        return Err(Error::Option { option: "promote", expected: "at least 1".into(), given: "0".into() });
    }
    Ok(())
}

/// Whole vectors are read and written.
fn check_tensors(tensors: &Tensors) -> Result<()> {
    for (tensor, ptr) in [("q", tensors.q), ("k", tensors.k), ("v", tensors.v), ("o", tensors.o)] {
        if ptr == 0 || ptr % 16 != 0 {
            return Err(Error::Tensor {
                tensor,
                expected: "a device pointer that is a multiple of 16".into(),
                given: format!("{ptr:#x}"),
            });
        }
    }
    let Rope { q_cos, q_sin, k_cos, k_sin } = tensors.rope;
    for (tensor, ptr, other) in
        [("q_cos", q_cos, q_sin), ("q_sin", q_sin, q_cos), ("k_cos", k_cos, k_sin), ("k_sin", k_sin, k_cos)]
    {
        if ptr == 0 && other != 0 || ptr % 16 != 0 {
            return Err(Error::Tensor {
                tensor,
                expected: "a device pointer that is a multiple of 16, or 0 for cosines and sines alike"
                    .into(),
                given: format!("{ptr:#x}"),
            });
        }
    }
    Ok(())
}
