//! Progress on standard error: nothing for what is quick, nothing where there is no terminal.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

/// What takes less is not worth a bar.
const PATIENCE: Duration = Duration::from_secs(1);
const TICK: Duration = Duration::from_millis(120);

const BYTES: &str = "{msg} {wide_bar} {binary_bytes}/{binary_total_bytes} {binary_bytes_per_sec}, {eta} left";

static IS_SILENT: AtomicBool = AtomicBool::new(false);

/// No bar is shown from now on.
pub(crate) fn silence() {
    IS_SILENT.store(true, Ordering::Relaxed);
}

/// A bar that shows itself when the work takes longer than a second, and goes when it is dropped.
pub(crate) struct Delayed {
    bar: ProgressBar,
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Delayed {
    /// For work whose end is not known.
    pub(crate) fn spinner(what: &str) -> Delayed {
        Delayed::new(ProgressBar::hidden().with_style(style("{spinner} {msg} {elapsed}")), what)
    }

    /// For `n` pieces of work.
    pub(crate) fn bar(n: u64, what: &str) -> Delayed {
        let style = style("{msg} {wide_bar} {human_pos}/{human_len} {per_sec}, {eta} left");
        let bar = ProgressBar::hidden().with_style(style);
        bar.set_length(n);
        Delayed::new(bar, what)
    }

    /// For bytes of which the number is told later.
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
    }
}

fn show_later(bar: &ProgressBar, stopped: &Receiver<()>) {
    let is_slow = stopped.recv_timeout(PATIENCE) == Err(RecvTimeoutError::Timeout);
    if is_slow && !IS_SILENT.load(Ordering::Relaxed) {
        bar.set_draw_target(ProgressDrawTarget::stderr());
        bar.enable_steady_tick(TICK);
    }
}

/// A bar over bytes, shown at once; for those who are not quiet.
pub(crate) fn bytes(total: u64, done: u64, what: &str) -> ProgressBar {
    let bar = ProgressBar::new(total).with_style(style(BYTES)).with_message(what.to_owned());
    bar.set_position(done);
    // The rate is that of this download, not of what an earlier one left.
    bar.reset_eta();
    bar
}

fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar())
}
