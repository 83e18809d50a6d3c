//! Progress bars on standard error, for slow work on a terminal only.

use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// Work that takes less time gets no bar.
const PATIENCE: Duration = Duration::from_secs(1);
const TICK: Duration = Duration::from_millis(120);

const BYTES: &str = "{msg} {wide_bar} {binary_bytes}/{binary_total_bytes} {binary_bytes_per_sec}, {eta} left";

static IS_SILENT: AtomicBool = AtomicBool::new(false);
/// Bars that are visible at the same time have separate lines.
static SHOWN: LazyLock<MultiProgress> = LazyLock::new(MultiProgress::new);

/// Disables all bars.
pub(crate) fn silence() {
    IS_SILENT.store(true, Ordering::Relaxed);
}

/// A bar that appears when the work takes longer than a second, and disappears when it is dropped.
pub(crate) struct Delayed {
    bar: ProgressBar,
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Delayed {
    /// A spinner for work of unknown length.
    pub(crate) fn spinner(what: &str) -> Delayed {
        Delayed::new(ProgressBar::hidden().with_style(style("{spinner} {msg} {elapsed}")), what)
    }

    /// A bar for `n` units of work.
    pub(crate) fn bar(n: u64, what: &str) -> Delayed {
        let style = style("{msg} {wide_bar} {human_pos}/{human_len} {per_sec}, {eta} left");
        let bar = ProgressBar::hidden().with_style(style);
        bar.set_length(n);
        Delayed::new(bar, what)
    }

    /// A bar for `n` steps of a run, of which `done` are already done.
    pub(crate) fn steps(n: u64, done: u64) -> Delayed {
        let style = style("{human_pos}/{human_len} {bar:24} {msg}, {eta} left");
        let bar = ProgressBar::hidden().with_style(style);
        bar.set_length(n);
        bar.set_position(done);
        // The rate counts only the steps of this run.
        bar.reset_eta();
        Delayed::new(bar, "")
    }

    /// Prints a line above the bar.
    pub(crate) fn above(&self, say: impl FnOnce()) {
        self.bar.suspend(say);
    }

    /// A bar for bytes; the total is set later.
    pub(crate) fn bytes(what: &str) -> Delayed {
        Delayed::new(ProgressBar::hidden().with_style(style(BYTES)), what)
    }

    fn new(bar: ProgressBar, what: &str) -> Delayed {
        bar.set_message(what.to_owned());
        let (stop, stopped) = channel();
        let thread = std::thread::Builder::new().spawn({
            let bar = bar.clone();
            move || show_later(&bar, &stopped)
        });
        // Without a thread there is no bar; the work goes on.
        Delayed { bar, stop: Some(stop), thread: thread.ok() }
    }

    /// The bar itself, for a closure that outlives the borrow.
    pub(crate) fn handle(&self) -> ProgressBar {
        self.bar.clone()
    }

    pub(crate) fn set(&self, position: u64) {
        self.bar.set_position(position);
    }

    pub(crate) fn set_len(&self, n: u64) {
        self.bar.set_length(n);
    }

    pub(crate) fn say(&self, message: String) {
        self.bar.set_message(message);
    }
}

impl Drop for Delayed {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        self.bar.finish_and_clear();
        SHOWN.remove(&self.bar);
    }
}

/// Progress of a device before its first step, with one bar per phase: uploading weights, compiling kernels.
#[derive(Clone, Default)]
pub(crate) struct Phases(Arc<Mutex<Option<(Phase, Delayed)>>>);

/// A phase of starting a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Weights are uploaded to the device.
    Weights,
    /// Kernels are compiled.
    Kernels,
}

impl Phases {
    /// Sets the progress of a phase. Its bar disappears when the phase is done, or when another one starts.
    pub(crate) fn set(&self, phase: Phase, done: u64, total: u64) {
        let mut current = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if done >= total || current.as_ref().is_some_and(|(shown, _)| *shown != phase) {
            *current = None;
        }
        if done < total {
            let (_, bar) = current.get_or_insert_with(|| (phase, phase.bar(total)));
            bar.set_len(total);
            bar.set(done);
        }
    }

    /// Ends the current phase.
    pub(crate) fn end(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// The phase whose bar is visible.
    #[cfg(test)]
    fn current(&self) -> Option<(Phase, u64, Option<u64>)> {
        let current = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        current.as_ref().map(|(phase, bar)| (*phase, bar.bar.position(), bar.bar.length()))
    }
}

impl Phase {
    fn bar(self, total: u64) -> Delayed {
        match self {
            Phase::Weights => Delayed::bytes("uploading weights to the device"),
            Phase::Kernels => Delayed::bar(total, "compiling kernels for the device, once"),
        }
    }
}

fn show_later(bar: &ProgressBar, stopped: &Receiver<()>) {
    let is_slow = stopped.recv_timeout(PATIENCE) == Err(RecvTimeoutError::Timeout);
    if is_slow && !IS_SILENT.load(Ordering::Relaxed) {
        SHOWN.add(bar.clone()).enable_steady_tick(TICK);
    }
}

/// A bar for bytes that appears at once.
pub(crate) fn bytes(total: u64, done: u64, what: &str) -> ProgressBar {
    let bar = ProgressBar::new(total).with_style(style(BYTES)).with_message(what.to_owned());
    bar.set_position(done);
    // The rate counts only the bytes of this download.
    bar.reset_eta();
    bar
}

fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_phase_has_a_bar_until_it_is_done_or_another_starts() {
        let phases = Phases::default();
        phases.set(Phase::Kernels, 0, 3);
        phases.set(Phase::Kernels, 2, 3);
        assert_eq!(phases.current(), Some((Phase::Kernels, 2, Some(3))));
        phases.set(Phase::Weights, 10, 100);
        assert_eq!(phases.current(), Some((Phase::Weights, 10, Some(100))));
        phases.set(Phase::Weights, 100, 100);
        assert_eq!(phases.current(), None);
        phases.set(Phase::Kernels, 3, 3);
        assert_eq!(phases.current(), None, "a phase that is done at once has no bar");
        phases.set(Phase::Kernels, 1, 3);
        phases.end();
        assert_eq!(phases.current(), None);
    }
}
