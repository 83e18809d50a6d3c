//! How a step ran, and if it was not replayed, why. Logs, summaries, metrics and errors share one enum.

use std::fmt;
use std::time::Duration;

/// How a step ran.
#[derive(Clone, Debug, PartialEq)]
pub enum Ran {
    /// Replayed from recorded graphs: all device work was in a graph. Includes a step that verification
    /// compared with its eager run and found equal, although the results of the eager run are kept.
    Replayed {
        /// Number of graph launches; 1 for a plan without host steps and late inputs, and 0 for a step that an earlier
        /// launch repeated on the device.
        n_launches: u32,
        /// Number of host steps between them.
        n_host_steps: u32,
    },
    /// Run eagerly, for this reason.
    Eager(Reason),
}

impl Ran {
    /// Replayed as one launch.
    pub const REPLAYED: Ran = Ran::Replayed { n_launches: 1, n_host_steps: 0 };

    /// How a step ran whose first part ran like this and the rest like `rest`.
    #[must_use]
    pub fn then(self, rest: Ran) -> Ran {
        match (self, rest) {
            (
                Ran::Replayed { n_launches, n_host_steps },
                Ran::Replayed { n_launches: more_launches, n_host_steps: more_host_steps },
            ) => Ran::Replayed {
                n_launches: n_launches + more_launches,
                n_host_steps: n_host_steps + more_host_steps,
            },
            (Ran::Eager(reason), _) | (_, Ran::Eager(reason)) => Ran::Eager(reason),
        }
    }
}

/// Why a step was not replayed.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Reason {
    /// The backend has no graphs: it calls its kernels directly.
    NoGraphsHere {
        /// Name of the backend.
        backend: &'static str,
    },
    /// Graphs are switched off.
    SwitchedOff,
    /// Per-op timings need the eager path.
    Profiling,
    /// Something that recording needs is not ready.
    NotReady {
        /// Missing part.
        what: &'static str,
    },
    /// A step of the plan needs the host, and graphs without host steps are required.
    NotCapturable {
        /// Label of the step.
        label: String,
        /// Reason of the op.
        because: &'static str,
    },
    /// Recording failed.
    CaptureFailed {
        /// The driver's code.
        code: u32,
        /// Last launch before the failure.
        last_launch: String,
    },
    /// Recording exceeded its deadline and was aborted.
    CaptureTimedOut {
        /// Deadline.
        deadline: Duration,
        /// Last launch before the deadline.
        last_launch: String,
    },
    /// The recording could not be instantiated.
    InstantiateFailed {
        /// The driver's code.
        code: u32,
    },
    /// The replay differed from the eager run.
    VerifyMismatch {
        /// Buffer that differs.
        buffer: String,
        /// Its first differing element.
        element: usize,
        /// Launch that wrote it.
        launch: String,
    },
    /// A replay failed.
    ReplayFailed {
        /// The driver's code.
        code: u32,
    },
    /// The step failed for a reason unrelated to graphs.
    StepFailed {
        /// Cause.
        what: String,
    },
    /// The device does not repeat the steps of a reply, although that was requested.
    NoLoop {
        /// Cause.
        because: String,
    },
    /// Waiting after an earlier failure.
    BackingOff {
        /// Steps until the next attempt.
        steps_left: u32,
        /// Earlier failure.
        after: Box<Reason>,
    },
    /// The device does not have enough memory for a recording.
    OutOfMemory {
        /// Bytes needed.
        need_bytes: u64,
        /// Bytes free.
        free_bytes: u64,
    },
    /// The context is lost. Nothing can run on this device again in this process.
    ContextLost {
        /// The driver's code.
        code: u32,
        /// Step at which it was lost.
        step: String,
    },
}

impl Reason {
    /// Returns the reason for a failure unrelated to graphs, with the messages of the error and all its
    /// sources.
    pub fn step_failed(error: &(dyn std::error::Error + 'static)) -> Reason {
        let mut what = error.to_string();
        let mut next = error.source();
        while let Some(cause) = next {
            let text = cause.to_string();
            // Some messages already include their source.
            if !what.contains(&text) {
                what = format!("{what}: {text}");
            }
            next = cause.source();
        }
        Reason::StepFailed { what }
    }

    /// Short fixed identifier for metrics.
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
            Reason::NoLoop { .. } => "no_loop",
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
            Reason::Profiling => write!(f, "profiling times each op, which a graph launch would hide"),
            Reason::NotReady { what } => write!(f, "{what} is not ready"),
            Reason::NotCapturable { label, because } => write!(f, "{label} cannot be recorded: {because}"),
            Reason::CaptureFailed { code, last_launch } => {
                write!(f, "recording failed with error {code} after {last_launch}")
            }
            Reason::CaptureTimedOut { deadline, last_launch } => {
                write!(f, "recording was aborted after {deadline:?}; the last launch was {last_launch}")
            }
            Reason::InstantiateFailed { code } => {
                write!(f, "instantiating the graph failed with error {code}")
            }
            Reason::VerifyMismatch { buffer, element, launch } => {
                write!(f, "replay differs from eager in {buffer}, element {element}, written by {launch}")
            }
            Reason::ReplayFailed { code } => write!(f, "replay failed with error {code}"),
            Reason::StepFailed { what } => write!(f, "the step failed: {what}"),
            Reason::NoLoop { because } => write!(f, "{because}"),
            Reason::BackingOff { steps_left: 0, after } => write!(f, "retrying at the next step: {after}"),
            Reason::BackingOff { steps_left, after } => {
                let s = if *steps_left == 1 { "" } else { "s" };
                write!(f, "{steps_left} step{s} until the next attempt: {after}")
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
    fn a_failed_step_reports_every_cause_once() {
        let error = Layer(
            "reading",
            Some(Box::new(Layer("the pipe: broken", Some(Box::new(Layer("broken", None)))))),
        );
        assert_eq!(Reason::step_failed(&error).to_string(), "the step failed: reading: the pipe: broken");
    }
}
