//! The token order of one place in a model, kept from one denoising step to the next.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use candle_core::DeviceLocation;
use vc_attention::Error;
use vc_attention::grouping::{GroupingConfig, KeptOrder};

use crate::options::Options;

/// How the order of the key and value tokens comes about, for recipes whose order comes from a k-means; the others
/// do not care.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Grouping {
    /// Grouped afresh.
    #[default]
    Cold,
    /// Grouped from the clusters of the kept order, at half the iterations; afresh where none is kept, or one of
    /// other shapes or lengths.
    Warm,
    /// The kept order as it is.
    Reuse,
}

/// Keeps the token order of one call site: a layer and a guidance branch of one model. Clones share it.
///
/// It holds a label of one or two bytes for every (batch, kv head, token), where the call ran: in host memory or in
/// the GPU's.
#[derive(Clone, Debug, Default)]
pub struct Order(Arc<Mutex<Option<Kept>>>);

/// A kept order and what it was made for.
#[derive(Clone, Debug)]
pub(crate) struct Kept {
    pub made: Made,
    pub labels: Labels,
}

/// What an order is valid for.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Made {
    location: DeviceLocation,
    grouping: GroupingConfig,
    keys: [usize; 4],
    kv_lens: Option<Vec<usize>>,
}

#[derive(Clone, Debug)]
pub(crate) enum Labels {
    Cpu(Arc<Vec<KeptOrder>>),
    /// As [`DevicePlan::save_labels`](vc_attention::backend::cuda::DevicePlan::save_labels) writes them.
    #[cfg(feature = "cuda")]
    Cuda(Arc<candle_core::cuda_backend::cudarc::driver::CudaSlice<u8>>),
}

impl Made {
    /// `keys` are batch, kv heads, kv tokens and head_dim.
    pub(crate) fn new(location: DeviceLocation, keys: [usize; 4], options: &Options) -> Self {
        Self { location, grouping: options.recipe.grouping, keys, kv_lens: options.kv_lens.clone() }
    }
}

impl Order {
    /// Nothing kept yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Whether an order is kept.
    pub fn is_kept(&self) -> bool {
        self.lock().is_some()
    }

    /// Forgets the order, as between two clips.
    pub fn clear(&self) {
        *self.lock() = None;
    }

    /// Memory that the kept order takes, in bytes.
    pub fn bytes(&self) -> usize {
        match self.lock().as_ref().map(|kept| &kept.labels) {
            None => 0,
            Some(Labels::Cpu(orders)) => KeptOrder::bytes_of(orders),
            #[cfg(feature = "cuda")]
            Some(Labels::Cuda(labels)) => labels.len(),
        }
    }

    /// Whether an order is kept that was made for this.
    pub(crate) fn fits(&self, made: &Made) -> bool {
        self.lock().as_ref().is_some_and(|kept| kept.made == *made)
    }

    /// The same order in a place of its own: what is kept there next does not change this one.
    pub(crate) fn fork(&self) -> Self {
        Self(Arc::new(Mutex::new(self.lock().clone())))
    }

    /// The kept labels that `grouping` starts from: none for a cold start.
    pub(crate) fn start(&self, grouping: Grouping, made: &Made) -> Result<Option<Labels>, Error> {
        let kept = self.lock();
        let labels = kept.as_ref().filter(|kept| kept.made == *made).map(|kept| kept.labels.clone());
        match (grouping, labels) {
            (Grouping::Cold, _) => Ok(None),
            (Grouping::Reuse, None) => Err(Error::Option {
                option: "grouping",
                expected: "an order that was kept before it is reused".into(),
                given: if kept.is_some() {
                    "one of another shape, device, recipe or other lengths".into()
                } else {
                    "none".into()
                },
            }),
            (_, labels) => Ok(labels),
        }
    }

    pub(crate) fn keep(&self, made: Made, labels: Labels) {
        *self.lock() = Some(Kept { made, labels });
    }

    fn lock(&self) -> MutexGuard<'_, Option<Kept>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
