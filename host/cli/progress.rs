//! A progress bar on standard error for work that turns out to take long.

use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Time after which work counts as long.
const PATIENCE: Duration = Duration::from_secs(1);

/// Counts steps; shows itself only after [`PATIENCE`], only on a terminal, and leaves nothing behind.
pub struct Progress {
    bar: ProgressBar,
    running: Option<(Sender<()>, JoinHandle<()>)>,
}

impl Progress {
    pub fn new(steps: usize) -> Self {
        let style = ProgressStyle::with_template("{spinner} {bar:32} {pos}/{len} {msg} ({elapsed})");
        let bar = ProgressBar::with_draw_target(Some(steps as u64), ProgressDrawTarget::hidden())
            .with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        let (done, wait) = mpsc::channel();
        let shown = bar.clone();
        let waiter = thread::Builder::new().spawn(move || {
            if wait.recv_timeout(PATIENCE) == Err(RecvTimeoutError::Timeout) {
                shown.set_draw_target(ProgressDrawTarget::stderr());
                shown.enable_steady_tick(Duration::from_millis(120));
            }
        });
        // Without a thread there is no bar, and the work goes on.
        Self { bar, running: waiter.ok().map(|waiter| (done, waiter)) }
    }

    /// Says what is being done now.
    pub fn at(&self, what: impl Into<String>) {
        self.bar.set_message(what.into());
    }

    /// One step is done.
    pub fn step(&self) {
        self.bar.inc(1);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some((done, waiter)) = self.running.take() {
            drop(done);
            let _ = waiter.join();
        }
        self.bar.finish_and_clear();
    }
}
