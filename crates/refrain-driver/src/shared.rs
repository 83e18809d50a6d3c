//! State shared by all handles of an open device: access to the driver, whether a recording is in progress, objects
//! waiting to be freed, and whether the context is lost.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use crate::api::{
    Api, CaptureStatus, Code, CtxHandle, DeviceInfo, DevicePtr, EventHandle, ExecHandle, HostPtr,
    ModuleHandle, RawResult, StreamHandle,
};
use crate::current_call::CurrentCall;
use crate::error::{DriverError, Lost, WorkOrigin};
use crate::probe::Probe;
use crate::protocol::gate::RecordingGate;
use crate::protocol::sync::lock;
use crate::watchdog::Watchdog;

/// State of one open device. Every driver call goes through [`DeviceShared::call`].
pub(crate) struct DeviceShared {
    pub(crate) api: Arc<dyn Api>,
    pub(crate) ctx: CtxHandle,
    pub(crate) ordinal: u32,
    pub(crate) info: DeviceInfo,
    pub(crate) driver_version: u32,
    id: u64,
    lost: OnceLock<Arc<Lost>>,
    last: Mutex<Option<WorkOrigin>>,
    gate: RecordingGate<Garbage>,
    recorded_stream: Mutex<Option<StreamHandle>>,
    pub(crate) watchdog: Watchdog,
    /// The driver call that the device thread is in.
    pub(crate) current_call: CurrentCall,
    /// Set once, right after the device is opened.
    pub(crate) probe: OnceLock<Probe>,
}

/// A driver object that is no longer needed.
#[derive(Debug)]
pub(crate) enum Garbage {
    Device(DevicePtr),
    Host(HostPtr),
    Module(ModuleHandle),
    Exec(ExecHandle),
    Event(EventHandle),
    Stream(StreamHandle),
}

static NEXT_TAG: AtomicU64 = AtomicU64::new(1);

thread_local! {
    static THREAD_TAG: u64 = NEXT_TAG.fetch_add(1, Ordering::Relaxed);
    /// The device whose context is current on this thread, to avoid redundant `cuCtxSetCurrent` calls.
    static CURRENT: Cell<u64> = const { Cell::new(0) };
}

impl DeviceShared {
    pub(crate) fn new(
        api: Arc<dyn Api>,
        ctx: CtxHandle,
        ordinal: u32,
        info: DeviceInfo,
        driver_version: u32,
    ) -> DeviceShared {
        // Retaining the context made it current, so the cached value is stale.
        CURRENT.set(0);
        DeviceShared {
            api,
            ctx,
            ordinal,
            info,
            driver_version,
            id: NEXT_TAG.fetch_add(1, Ordering::Relaxed),
            lost: OnceLock::new(),
            last: Mutex::new(None),
            gate: RecordingGate::new(),
            recorded_stream: Mutex::new(None),
            watchdog: Watchdog::new(),
            current_call: CurrentCall::new(),
            probe: OnceLock::new(),
        }
    }

    /// Makes a driver call with the context current, unless the context is lost.
    #[inline]
    pub(crate) fn call<T>(
        &self,
        what: &'static str,
        f: impl FnOnce(&dyn Api) -> RawResult<T>,
    ) -> Result<T, DriverError> {
        let _call = self.current_call.enter(what);
        self.raw(f)?.map_err(|code| self.fail(what, code))
    }

    /// Like [`DeviceShared::call`], for a caller that interprets the code itself. Also for calls that may
    /// legitimately take long (allocation, module compilation): they are not tracked as the current call, so they
    /// never count as hung.
    #[inline]
    pub(crate) fn raw<T>(
        &self,
        f: impl FnOnce(&dyn Api) -> RawResult<T>,
    ) -> Result<RawResult<T>, DriverError> {
        self.check_lost()?;
        if CURRENT.get() != self.id {
            if let Err(code) = self.api.ctx_set_current(Some(self.ctx)) {
                return Err(self.fail("cuCtxSetCurrent", code));
            }
            CURRENT.set(self.id);
        }
        Ok(f(&*self.api))
    }

    /// Polls until `ready` no longer returns `NOT_READY`, for at most `limit`. Polling instead of blocking in the
    /// driver bounds the wait. It spins first, since a step is shorter than a sleep.
    pub(crate) fn poll(
        &self,
        what: &'static str,
        limit: Duration,
        mut ready: impl FnMut(&dyn Api) -> RawResult<()>,
    ) -> Result<(), DriverError> {
        let start = Instant::now();
        loop {
            let call = self.current_call.enter(what);
            let result = self.raw(&mut ready)?;
            drop(call);
            match result {
                Ok(()) => return Ok(()),
                Err(Code::NOT_READY) => {}
                Err(code) => return Err(self.fail(what, code)),
            }
            let waited = start.elapsed();
            if waited >= limit {
                return Err(DriverError::Timeout { what, waited, origin: self.last() });
            }
            match waited.as_micros() {
                0..200 => std::hint::spin_loop(),
                200..5_000 => std::thread::yield_now(),
                _ => std::thread::sleep(Duration::from_micros(100)),
            }
        }
    }

    /// Turns a code into an error; a sticky code marks the context lost.
    #[cold]
    pub(crate) fn fail(&self, call: &'static str, code: Code) -> DriverError {
        let origin = self.last();
        if code.is_sticky() {
            return self.lose(Lost { code: Some(code), call, origin });
        }
        DriverError::Driver { call, code, origin }
    }

    /// Marks the context lost; only the first cause is kept.
    #[cold]
    pub(crate) fn lose(&self, lost: Lost) -> DriverError {
        let mut first = false;
        let lost = self.lost.get_or_init(|| {
            first = true;
            Arc::new(lost)
        });
        if first {
            tracing::error!(device = self.ordinal, "{lost}");
        }
        DriverError::ContextLost(Arc::clone(lost))
    }

    #[inline]
    pub(crate) fn check_lost(&self) -> Result<(), DriverError> {
        match self.lost.get() {
            None => Ok(()),
            Some(lost) => Err(DriverError::ContextLost(Arc::clone(lost))),
        }
    }

    /// The last work sent.
    pub(crate) fn last(&self) -> Option<WorkOrigin> {
        lock(&self.last).clone()
    }

    pub(crate) fn set_last(&self, origin: WorkOrigin) {
        *lock(&self.last) = Some(origin);
    }

    /// Refuses a call that conflicts with a recording, from any thread.
    #[inline]
    pub(crate) fn refuse_while_recording(&self, what: &'static str, bytes: u64) -> Result<(), DriverError> {
        self.check_lost()?;
        if self.gate.is_recording() {
            return Err(DriverError::CaptureIncompatible { what, bytes });
        }
        Ok(())
    }

    /// Begins a recording. A device has at most one at a time.
    pub(crate) fn begin_recording(self: &Arc<Self>) -> Result<RecordingFlag, DriverError> {
        self.refuse_while_recording("a second recording", 0)?;
        self.empty_bin();
        self.gate.set_recording(true);
        Ok(RecordingFlag { shared: Arc::clone(self) })
    }

    /// Sets the stream that the driver is capturing, for [`DeviceShared::capture_status`].
    pub(crate) fn set_recorded_stream(&self, stream: Option<StreamHandle>) {
        *lock(&self.recorded_stream) = stream;
    }

    /// Capture status of the stream that is being recorded. Can be called from any thread.
    pub(crate) fn capture_status(&self) -> Result<CaptureStatus, DriverError> {
        self.check_lost()?;
        // The lock is held during the call, so that the stream cannot be destroyed: its recording ends under this
        // lock.
        let stream = lock(&self.recorded_stream);
        match *stream {
            None => Ok(CaptureStatus::None),
            Some(s) => self.probe_status(s),
        }
    }

    /// Queries the capture status of a stream. Some codes of the capture family are themselves an answer.
    pub(crate) fn probe_status(&self, stream: StreamHandle) -> Result<CaptureStatus, DriverError> {
        let call = self.current_call.enter("cuStreamIsCapturing");
        let result = self.raw(|api| api.stream_is_capturing(stream))?;
        drop(call);
        match result {
            Ok(status) => Ok(status),
            Err(Code::STREAM_CAPTURE_INVALIDATED | Code::STREAM_CAPTURE_ISOLATION) => {
                Ok(CaptureStatus::Invalidated)
            }
            Err(code) => Err(self.fail("cuStreamIsCapturing", code)),
        }
    }

    /// Makes the calling thread the owner; false if there is an owner already.
    pub(crate) fn claim(&self) -> bool {
        self.gate.claim(THREAD_TAG.with(|t| *t))
    }

    /// Releases ownership.
    pub(crate) fn unclaim(&self) {
        self.empty_bin();
        self.gate.unclaim();
    }

    /// Frees an object now, or later if a recording is in progress or this is not the owner's thread.
    pub(crate) fn discard(&self, garbage: Garbage) {
        if self.lost.get().is_some() {
            return;
        }
        if let Some(garbage) = self.gate.discard(garbage, THREAD_TAG.with(|t| *t)) {
            self.destroy(garbage);
        }
    }

    /// Number of objects waiting to be freed.
    pub(crate) fn bin_len(&self) -> usize {
        self.gate.n_kept()
    }

    pub(crate) fn empty_bin(&self) {
        let mut garbage = self.gate.empty().into_iter();
        while self.lost.get().is_none() {
            let Some(garbage) = garbage.next() else { return };
            self.destroy(garbage);
        }
        // The loss has been reported; its objects are gone with it, so one message covers them all.
        if garbage.len() > 0 {
            tracing::debug!("the lost context took {} driver objects with it", garbage.len());
        }
    }

    fn destroy(&self, garbage: Garbage) {
        let result = self.call("freeing a driver object", |api| match garbage {
            Garbage::Device(p) => api.free(p),
            Garbage::Host(p) => api.free_host(p),
            Garbage::Module(m) => api.module_unload(m),
            Garbage::Exec(e) => api.exec_destroy(e),
            Garbage::Event(e) => api.event_destroy(e),
            Garbage::Stream(s) => api.stream_destroy(s),
        });
        match result {
            // A loss is reported where it is detected.
            Ok(()) | Err(DriverError::ContextLost(_)) => {}
            Err(error) => tracing::warn!(?garbage, "{error}"),
        }
    }
}

impl Drop for DeviceShared {
    fn drop(&mut self) {
        self.gate.set_recording(false);
        if let Some(probe) = self.probe.take() {
            self.gate.keep(probe.into_garbage());
        }
        self.empty_bin();
        if self.lost.get().is_none()
            && let Err(code) = self.api.primary_ctx_release(self.ordinal)
        {
            tracing::warn!("cannot release the context of device {}: {code}", self.ordinal);
        }
        if CURRENT.try_with(Cell::get) == Ok(self.id) {
            CURRENT.set(0);
        }
    }
}

/// Marks a recording in progress while it lives; dropping it frees deferred objects.
pub(crate) struct RecordingFlag {
    shared: Arc<DeviceShared>,
}

impl Drop for RecordingFlag {
    fn drop(&mut self) {
        self.shared.set_recorded_stream(None);
        self.shared.gate.set_recording(false);
        self.shared.empty_bin();
    }
}
