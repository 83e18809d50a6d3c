//! Ctrl-C: the first one stops the current work, the second one ends the program.

use crate::fail::INTERRUPTED;
use crate::out::talk;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// Work that stops at once needs no message; a step that hangs does.
const PATIENCE: Duration = Duration::from_millis(500);

/// The flag that Ctrl-C sets while a command listens. While none does, Ctrl-C ends the program.
#[derive(Clone)]
pub(crate) struct Interrupt {
    pressed: Arc<AtomicBool>,
    is_heard: Arc<AtomicBool>,
    /// Counts listeners, so that a late message never concerns the wrong one.
    listener: Arc<AtomicU64>,
}

impl Interrupt {
    pub(crate) fn install() -> Interrupt {
        let interrupt =
            Interrupt { pressed: Arc::default(), is_heard: Arc::default(), listener: Arc::default() };
        let handler = interrupt.clone();
        let installed = ctrlc::set_handler(move || {
            let is_first =
                handler.is_heard.load(Ordering::SeqCst) && !handler.pressed.swap(true, Ordering::SeqCst);
            if !is_first {
                std::process::exit(INTERRUPTED.into());
            }
            handler.clone().explain_if_slow();
        });
        if let Err(error) = installed {
            tracing::debug!(%error, "Ctrl-C ends the program at once");
        }
        interrupt
    }

    /// Says how to quit if the work has not stopped after a moment.
    fn explain_if_slow(self) {
        std::thread::spawn(move || {
            let listener = self.listener.load(Ordering::SeqCst);
            std::thread::sleep(PATIENCE);
            let is_same = listener == self.listener.load(Ordering::SeqCst);
            if is_same && self.is_heard.load(Ordering::SeqCst) {
                talk!("stopping after the current step; press Ctrl-C again to quit at once");
            }
        });
    }

    /// Until the guard is dropped, the first Ctrl-C only sets [`Listening::flag`].
    pub(crate) fn listen(&self) -> Listening<'_> {
        self.listener.fetch_add(1, Ordering::SeqCst);
        self.pressed.store(false, Ordering::SeqCst);
        self.is_heard.store(true, Ordering::SeqCst);
        Listening(self)
    }
}

pub(crate) struct Listening<'a>(&'a Interrupt);

impl Listening<'_> {
    /// Becomes true at the first Ctrl-C.
    pub(crate) fn flag(&self) -> Arc<AtomicBool> {
        self.0.pressed.clone()
    }
}

impl Drop for Listening<'_> {
    fn drop(&mut self) {
        self.0.is_heard.store(false, Ordering::SeqCst);
    }
}
