//! Health check of a device.

use std::sync::Arc;
use std::sync::mpsc;
use std::time::Duration;

use crate::api::Code;
use crate::error::{DriverError, Lost};
use crate::shared::DeviceShared;

/// Result of a health check.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Health {
    /// A launch, a copy and a wait succeed.
    Healthy,
    /// The device works, but this stream does not.
    StreamLost {
        /// The driver's code for the stream; `NOT_READY` if its work does not finish.
        code: Code,
    },
    /// The context is lost. Final in this process.
    ContextLost(Arc<Lost>),
}

/// Runs the probe on a thread of its own, so that a driver call that does not return cannot block the caller.
pub(crate) fn check(shared: &Arc<DeviceShared>, limit: Duration) -> Result<Health, DriverError> {
    match shared.refuse_while_recording("a health check", 0) {
        Err(DriverError::ContextLost(lost)) => return Ok(Health::ContextLost(lost)),
        other => other?,
    }
    let (tx, rx) = mpsc::channel();
    let probed = Arc::clone(shared);
    let thread = std::thread::Builder::new().name("refrain-health".to_owned()).spawn(move || {
        let result = probed.probe.get().map_or(Ok(true), |probe| probe.run(&probed, limit));
        // Dropped before the reply is sent: once the caller has it, this thread no longer holds the device.
        drop(probed);
        // The caller may have given up.
        let _ = tx.send(result);
    });
    if let Err(error) = thread {
        return Err(DriverError::caller(error));
    }
    // A little longer than the probe's own limit, so that the probe's result wins.
    let lost = |code, call| {
        let DriverError::ContextLost(lost) = shared.lose(Lost { code, call, origin: shared.last() }) else {
            unreachable!("`lose` returns `ContextLost`")
        };
        Ok(Health::ContextLost(lost))
    };
    match rx.recv_timeout(limit + limit / 2 + Duration::from_millis(50)) {
        Ok(Ok(true)) => Ok(Health::Healthy),
        Ok(Ok(false)) => lost(None, "a health check, which read back different bytes than it wrote,"),
        Ok(Err(DriverError::ContextLost(lost))) => Ok(Health::ContextLost(lost)),
        Ok(Err(DriverError::Timeout { what, .. })) => lost(None, what),
        Ok(Err(DriverError::Driver { call, code, .. })) => lost(Some(code), call),
        Ok(Err(error)) => Err(error),
        Err(_) => lost(None, "the health check"),
    }
}
