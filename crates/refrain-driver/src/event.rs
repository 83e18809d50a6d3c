//! Events: points on a stream to wait for or measure time between.

use std::sync::Arc;
use std::time::Duration;

use crate::api::EventHandle;
use crate::error::DriverError;
use crate::shared::{DeviceShared, Garbage};

/// A point on a stream, set by [`crate::Stream::record_event`].
pub struct Event {
    pub(crate) shared: Arc<DeviceShared>,
    pub(crate) handle: EventHandle,
}

impl Event {
    pub(crate) fn new(shared: &Arc<DeviceShared>, timing: bool) -> Result<Event, DriverError> {
        shared.refuse_while_recording("creating an event", 0)?;
        let handle = shared.call("cuEventCreate", |api| api.event_create(timing))?;
        Ok(Event { shared: Arc::clone(shared), handle })
    }

    /// Waits until the work before the event is done, for at most `limit`.
    pub fn wait(&self, limit: Duration) -> Result<(), DriverError> {
        self.shared.refuse_while_recording("waiting for an event", 0)?;
        self.shared.poll("cuEventQuery", limit, |api| api.event_query(self.handle))
    }

    /// Device time from `start` to this event in milliseconds. Both events must have completed.
    pub fn ms_since(&self, start: &Event) -> Result<f32, DriverError> {
        if !Arc::ptr_eq(&self.shared, &start.shared) {
            return Err(DriverError::ForeignDevice { what: "an event" });
        }
        self.shared.call("cuEventElapsedTime", |api| api.event_elapsed(start.handle, self.handle))
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        self.shared.discard(Garbage::Event(self.handle));
    }
}

impl std::fmt::Debug for Event {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.handle.fmt(f)
    }
}
