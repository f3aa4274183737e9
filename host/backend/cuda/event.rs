//! Times as the GPU's own clock has them: events along a stream.

use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::{result, sys};

use super::driver::{Device, Stream, failed};
use super::plan::{DevicePlan, Grouping, Tensors};
use super::{Cuda, Session};
use crate::attention::Report;
use crate::error::Result;

/// A point on a stream.
#[derive(Debug)]
struct Event {
    device: Arc<Device>,
    handle: sys::CUevent,
}

impl Event {
    fn new(device: &Arc<Device>) -> Result<Self> {
        device.bind()?;
        let handle = result::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT)
            .map_err(|e| failed("making an event", e))?;
        Ok(Self { device: device.clone(), handle })
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            // SAFETY: made by `new`, destroyed once; the driver lets a pending one finish. An error on the way out
            // has nobody to go to.
            let _ = unsafe { result::event::destroy(self.handle) };
        }
    }
}

/// Marks points on a stream and reads the times between them.
///
/// Recording a mark only launches; nothing waits before [`Stopwatch::times`]. Events are made once and used again,
/// so that making them is in no measurement.
#[derive(Debug)]
pub struct Stopwatch {
    device: Arc<Device>,
    events: Vec<Event>,
    marks: usize,
}

impl Stopwatch {
    /// A stopwatch without marks.
    pub fn new(device: &Arc<Device>) -> Self {
        Self { device: device.clone(), events: Vec::new(), marks: 0 }
    }

    /// Forgets the marks.
    pub fn reset(&mut self) {
        self.marks = 0;
    }

    /// Marks the end of everything that is on the stream so far. All marks have to be on one stream.
    ///
    /// # Errors
    /// Of the driver.
    pub fn mark(&mut self, stream: Stream) -> Result<()> {
        if self.marks == self.events.len() {
            self.events.push(Event::new(&self.device)?);
        }
        self.device.bind()?;
        // SAFETY: the event is alive; the stream's owner keeps it alive while it is passed around.
        unsafe { result::event::record(self.events[self.marks].handle, stream.0.cast()) }
            .map_err(|e| failed("recording an event", e))?;
        self.marks += 1;
        Ok(())
    }

    /// Waits for the last mark and returns the times from each mark to the next.
    ///
    /// # Errors
    /// Of the driver, those of the launches before the last mark among them.
    pub fn times(&self) -> Result<Vec<Duration>> {
        let marked = &self.events[..self.marks];
        let Some(last) = marked.last() else { return Ok(Vec::new()) };
        self.device.bind()?;
        // SAFETY: the event is alive and was recorded.
        unsafe { result::event::synchronize(last.handle) }.map_err(|e| failed("waiting for an event", e))?;
        let between = |pair: &[Event]| {
            // SAFETY: both are alive, were recorded on one stream and have passed.
            let milliseconds = unsafe { result::event::elapsed(pair[0].handle, pair[1].handle) }
                .map_err(|e| failed("reading an event's time", e))?;
            Ok(Duration::from_secs_f64(f64::from(milliseconds.max(0.0)) / 1e3))
        };
        marked.windows(2).map(between).collect()
    }
}

/// Times of the stages of a call on the GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StageTimes {
    /// Grouping.
    pub group: Duration,
    /// Statistics of K, then Q.
    pub q: Duration,
    /// K.
    pub k: Duration,
    /// V.
    pub v: Duration,
    /// The attention loop.
    pub attend: Duration,
}

impl StageTimes {
    /// Time of the whole call.
    pub fn total(&self) -> Duration {
        self.group + self.q + self.k + self.v + self.attend
    }
}

/// Runs all stages of a call on a stream and waits for their times.
///
/// # Safety
/// As for [`DevicePlan::run`].
///
/// # Errors
/// Of the driver.
pub unsafe fn time_stages(
    watch: &mut Stopwatch,
    plan: &DevicePlan,
    stream: Stream,
    tensors: &Tensors,
    grouping: Grouping,
) -> Result<StageTimes> {
    watch.reset();
    watch.mark(stream)?;
    // SAFETY: by the caller.
    unsafe {
        plan.group(stream, tensors, grouping)?;
        watch.mark(stream)?;
        plan.prepare_q(stream, tensors)?;
        watch.mark(stream)?;
        plan.prepare_k(stream, tensors)?;
        watch.mark(stream)?;
        plan.prepare_v(stream, tensors)?;
        watch.mark(stream)?;
        plan.attend(stream, tensors)?;
        watch.mark(stream)?;
    }
    let times = watch.times()?;
    Ok(StageTimes { group: times[0], q: times[1], k: times[2], v: times[3], attend: times[4] })
}

impl Cuda {
    /// Runs the stages of a finished call again on its tensors, grouping from a cold start, and returns the GPU's
    /// own times of the median of `runs`, at least one: without allocating, uploading, downloading or waiting.
    ///
    /// # Errors
    /// Of the driver.
    pub fn time(&self, session: &Session, runs: usize) -> Result<Report> {
        let mut watch = Stopwatch::new(self.gpu());
        let Session { plan, tensors, .. } = session;
        let mut all = (0..runs.max(1))
            .map(|_| {
                // SAFETY: the session's tensors have the sizes of its plan and live as long as it does; the events
                // are waited for before this returns.
                unsafe { time_stages(&mut watch, plan, self.stream(), tensors, Grouping::Cold) }
            })
            .collect::<Result<Vec<_>>>()?;
        all.sort_by_key(StageTimes::total);
        let times = all[all.len() / 2];
        Ok(Report {
            group: times.group,
            prepare: times.q + times.k + times.v,
            attend: times.attend,
            mean_share: plan.observed(self.stream())?.mean_share,
        })
    }
}
