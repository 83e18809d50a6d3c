//! Ctrl-C: once stops what is being done, twice the program.

use crate::fail::INTERRUPTED;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// What Ctrl-C sets while somebody listens. While nobody does, it ends the program.
#[derive(Clone)]
pub(crate) struct Interrupt {
    pressed: Arc<AtomicBool>,
    is_heard: Arc<AtomicBool>,
}

impl Interrupt {
    pub(crate) fn install() -> Interrupt {
        let interrupt = Interrupt { pressed: Arc::default(), is_heard: Arc::default() };
        let Interrupt { pressed, is_heard } = interrupt.clone();
        let installed = ctrlc::set_handler(move || {
            let first = is_heard.load(Ordering::SeqCst) && !pressed.swap(true, Ordering::SeqCst);
            if !first {
                std::process::exit(INTERRUPTED.into());
            }
        });
        if let Err(error) = installed {
            tracing::debug!(%error, "Ctrl-C ends the program at once");
        }
        interrupt
    }

    /// Until the guard is dropped, the first Ctrl-C only sets [`Listening::flag`].
    pub(crate) fn listen(&self) -> Listening<'_> {
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
