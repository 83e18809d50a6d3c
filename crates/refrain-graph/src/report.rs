//! How a step ran, and why if not as a graph. One enum serves logs, summaries, metrics and errors.

use std::fmt;
use std::time::Duration;

/// How a step ran.
#[derive(Clone, Debug, PartialEq)]
pub enum Ran {
    /// From recorded graphs alone: everything that runs on the device was replayed. A step that was compared with its eager
    /// run and came out equal counts as well, though the eager run's results are the ones kept.
    Replayed {
        /// Graphs that were launched; 1 for a plan without host steps.
        n_launches: u32,
        /// Host steps that ran between them.
        n_host_steps: u32,
    },
    /// Step by step, for a reason.
    Eager(Reason),
}

impl Ran {
    /// As one launch.
    pub const REPLAYED: Ran = Ran::Replayed { n_launches: 1, n_host_steps: 0 };
}

/// Why a step was not replayed.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Reason {
    /// The backend has no graphs to replay: it calls its kernels directly.
    NoGraphsHere {
        /// Name of the backend.
        backend: &'static str,
    },
    /// Graphs are switched off.
    SwitchedOff,
    /// Per-op timings need the eager path.
    Profiling,
    /// Something that a recording needs is not there yet.
    NotReady {
        /// What is missing.
        what: &'static str,
    },
    /// A step of the plan needs the host, and graphs are required without host steps.
    NotCapturable {
        /// Label of the step.
        label: String,
        /// The op's own reason.
        because: &'static str,
    },
    /// Recording failed.
    CaptureFailed {
        /// The driver's code.
        code: u32,
        /// The last launch before it.
        last_launch: String,
    },
    /// Recording took longer than its deadline and was broken off.
    CaptureTimedOut {
        /// The deadline.
        deadline: Duration,
        /// The last launch before it.
        last_launch: String,
    },
    /// The recording could not be made executable.
    InstantiateFailed {
        /// The driver's code.
        code: u32,
    },
    /// The replay differed from the eager run.
    VerifyMismatch {
        /// The buffer that differed.
        buffer: String,
        /// Its first differing element.
        element: usize,
        /// The launch that wrote it.
        launch: String,
    },
    /// A replay failed.
    ReplayFailed {
        /// The driver's code.
        code: u32,
    },
    /// The step failed for a reason that has nothing to do with graphs.
    StepFailed {
        /// What went wrong.
        what: String,
    },
    /// An earlier failure is being waited out.
    BackingOff {
        /// Steps until the next attempt.
        steps_left: u32,
        /// What had failed.
        after: Box<Reason>,
    },
    /// The device has no memory left for a recording.
    OutOfMemory {
        /// Bytes asked for.
        need_bytes: u64,
        /// Bytes free.
        free_bytes: u64,
    },
    /// The context is lost; nothing runs on this device in this process any more.
    ContextLost {
        /// The driver's code.
        code: u32,
        /// The step at which it was lost.
        step: String,
    },
}

impl Reason {
    /// A failure that has nothing to do with graphs, in the words of the error and of everything behind it.
    pub fn step_failed(error: &(dyn std::error::Error + 'static)) -> Reason {
        let mut what = error.to_string();
        let mut next = error.source();
        while let Some(cause) = next {
            let text = cause.to_string();
            // Some messages end in their cause.
            if !what.contains(&text) {
                what = format!("{what}: {text}");
            }
            next = cause.source();
        }
        Reason::StepFailed { what }
    }

    /// A short fixed word for metrics.
    pub fn label(&self) -> &'static str {
        match self {
            Reason::NoGraphsHere { .. } => "no_graphs_here",
            Reason::SwitchedOff => "switched_off",
            Reason::Profiling => "profiling",
            Reason::NotReady { .. } => "not_ready",
            Reason::NotCapturable { .. } => "not_capturable",
            Reason::CaptureFailed { .. } => "capture_failed",
            Reason::CaptureTimedOut { .. } => "capture_timed_out",
            Reason::InstantiateFailed { .. } => "instantiate_failed",
            Reason::VerifyMismatch { .. } => "verify_mismatch",
            Reason::ReplayFailed { .. } => "replay_failed",
            Reason::StepFailed { .. } => "step_failed",
            Reason::BackingOff { .. } => "backing_off",
            Reason::OutOfMemory { .. } => "out_of_memory",
            Reason::ContextLost { .. } => "context_lost",
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Reason::NoGraphsHere { backend } => write!(f, "{backend} calls its kernels directly"),
            Reason::SwitchedOff => write!(f, "graphs are switched off"),
            Reason::Profiling => write!(f, "profiling times each op, which one launch would hide"),
            Reason::NotReady { what } => write!(f, "{what} is not ready"),
            Reason::NotCapturable { label, because } => write!(f, "{label} cannot be recorded: {because}"),
            Reason::CaptureFailed { code, last_launch } => {
                write!(f, "recording failed with error {code} after {last_launch}")
            }
            Reason::CaptureTimedOut { deadline, last_launch } => {
                write!(f, "recording was broken off after {deadline:?}; the last launch was {last_launch}")
            }
            Reason::InstantiateFailed { code } => {
                write!(f, "instantiating the graph failed with error {code}")
            }
            Reason::VerifyMismatch { buffer, element, launch } => {
                write!(f, "replay differs from eager in {buffer}, element {element}, written by {launch}")
            }
            Reason::ReplayFailed { code } => write!(f, "replay failed with error {code}"),
            Reason::StepFailed { what } => write!(f, "the step failed: {what}"),
            Reason::BackingOff { steps_left: 0, after } => write!(f, "the next step tries again: {after}"),
            Reason::BackingOff { steps_left, after } => {
                let s = if *steps_left == 1 { "" } else { "s" };
                write!(f, "{steps_left} step{s} until the next try: {after}")
            }
            Reason::OutOfMemory { need_bytes, free_bytes } => {
                write!(f, "a recording needs {need_bytes} bytes, {free_bytes} are free")
            }
            Reason::ContextLost { code, step } => {
                write!(f, "the context was lost at {step} with error {code}")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("{0}")]
    struct Layer(&'static str, #[source] Option<Box<Layer>>);

    #[test]
    fn a_failed_step_tells_every_cause_once() {
        let error = Layer(
            "reading",
            Some(Box::new(Layer("the pipe: broken", Some(Box::new(Layer("broken", None)))))),
        );
        assert_eq!(Reason::step_failed(&error).to_string(), "the step failed: reading: the pipe: broken");
    }
}
