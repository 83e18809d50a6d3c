//! Maps driver errors to [`Reason`]s, here only.

use refrain_driver::{DriverError, WorkOrigin};
use refrain_graph::Reason;

/// The operation during which the driver failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// A recording, up to a graph that can be replayed.
    Record,
    /// The comparison of a new graph with the eager run.
    Verify,
    /// A replay.
    Replay,
    /// An eager run.
    Eager,
}

/// The reason why a step was not replayed, for a driver error.
#[must_use]
#[expect(
    clippy::wildcard_enum_match_arm,
    reason = "the driver's error is non-exhaustive; all other variants differ only by stage"
)]
pub fn reason_of(error: &DriverError, stage: Stage) -> Reason {
    match error {
        DriverError::ContextLost(lost) => Reason::ContextLost {
            code: lost.code.map_or(0, |c| c.0),
            step: lost.origin.as_ref().map_or_else(|| lost.call.to_owned(), WorkOrigin::to_string),
        },
        DriverError::OutOfMemory { need_bytes, free_bytes, .. } => {
            Reason::OutOfMemory { need_bytes: *need_bytes, free_bytes: *free_bytes }
        }
        DriverError::RecordingDeadline { limit, last, .. } => {
            Reason::CaptureTimedOut { deadline: *limit, last_launch: launch_name(last.as_ref()) }
        }
        DriverError::Driver { call: "cuGraphInstantiate" | "cuGraphUpload", code, .. }
            if stage == Stage::Record =>
        {
            Reason::InstantiateFailed { code: code.0 }
        }
        DriverError::Driver { code, origin, .. } if stage == Stage::Record => {
            Reason::CaptureFailed { code: code.0, last_launch: launch_name(origin.as_ref()) }
        }
        other => {
            let code = other.code().map_or(0, |c| c.0);
            match stage {
                // Without a driver code, only the text remains.
                Stage::Record => Reason::CaptureFailed { code, last_launch: other.to_string() },
                Stage::Replay | Stage::Verify => Reason::ReplayFailed { code },
                Stage::Eager => Reason::StepFailed { what: other.to_string() },
            }
        }
    }
}

/// Whether explicit nodes may work where stream capture failed for this reason.
#[must_use]
pub(crate) fn is_about_capture(reason: &Reason) -> bool {
    matches!(reason, Reason::CaptureFailed { .. })
}

fn launch_name(origin: Option<&WorkOrigin>) -> String {
    origin.map_or_else(|| "nothing".to_owned(), WorkOrigin::to_string)
}
