//! Streams: sending work, waiting for it and reading results back.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytemuck::Pod;

use crate::api::{CaptureStatus, Code, StreamHandle, StreamKind};
use crate::device::Context;
use crate::error::{DriverError, panic_message};
use crate::event::Event;
use crate::graph::Outputs;
use crate::health::Health;
use crate::memory::{Buf, BufAddress, DeviceSlot, Lease};
use crate::queue::{Keep, Queue, StreamSink};
use crate::shared::{DeviceShared, Garbage};
use crate::staging::Staging;

/// Default time limit of a wait; see [`Stream::set_limit`].
const DEFAULT_LIMIT: Duration = Duration::from_secs(30);
/// Size and number of the pinned slots for uploads and downloads.
const TRANSFER_SLOT_BYTES: usize = 4 << 20;
const TRANSFER_SLOTS: usize = 2;

/// A sequence of work on the device. A stream has a single owner: it is neither `Clone` nor `Send` and is
/// independent of the legacy stream, so only its owner can put work on it.
pub struct Stream {
    ctx: Context,
    handle: StreamHandle,
    progress: Arc<StreamProgress>,
    n_sent: u64,
    limit: Duration,
    broken: Option<Code>,
    pub(crate) keep: Keep,
    transfers: Option<Staging>,
}

/// A point in the work sent to a stream.
#[derive(Clone, Debug)]
pub(crate) struct Sent {
    progress: Arc<StreamProgress>,
    n: u64,
}

/// The known progress of a stream, shared with everything that must know whether its work is done.
#[derive(Debug, Default)]
pub(crate) struct StreamProgress {
    n_done: AtomicU64,
}

impl Stream {
    pub(crate) fn new(ctx: &Context) -> Result<Stream, DriverError> {
        let shared = ctx.shared();
        shared.refuse_while_recording("creating a stream", 0)?;
        let handle = shared.call("cuStreamCreate", |api| api.stream_create(StreamKind::NonBlocking))?;
        Ok(Stream {
            ctx: ctx.clone(),
            handle,
            progress: Arc::default(),
            n_sent: 0,
            limit: DEFAULT_LIMIT,
            broken: None,
            keep: Keep::default(),
            transfers: None,
        })
    }

    /// The context that it was created from.
    #[must_use]
    pub fn context(&self) -> &Context {
        &self.ctx
    }

    /// Sets the time limit of a wait on this stream.
    pub fn set_limit(&mut self, limit: Duration) {
        self.limit = limit;
    }

    /// Waits until everything sent so far is done.
    pub fn synchronize(&mut self) -> Result<(), DriverError> {
        self.wait(self.limit)
    }

    /// Waits until everything sent so far is done, for at most `limit`.
    pub fn wait(&mut self, limit: Duration) -> Result<(), DriverError> {
        self.check_usable("waiting for a stream", 0)?;
        let handle = self.handle;
        self.shared().poll("cuStreamQuery", limit, |api| api.stream_query(handle))?;
        self.progress.n_done.store(self.n_sent, Ordering::Release);
        self.keep.clear();
        // A good moment to free what other threads have dropped: no work of this stream is delayed by it.
        self.shared().empty_bin();
        Ok(())
    }

    /// True if everything sent so far is done. Also reports errors of earlier work.
    pub fn is_done(&mut self) -> Result<bool, DriverError> {
        match self.wait(Duration::ZERO) {
            Ok(()) => Ok(true),
            Err(DriverError::Timeout { .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Capture status of this stream. Always [`CaptureStatus::None`] for a healthy stream, since recording borrows
    /// it; use [`crate::Device::capture_status`] to query it during a recording.
    pub fn capture_status(&self) -> Result<CaptureStatus, DriverError> {
        self.shared().probe_status(self.handle)
    }

    /// Runs the work that `f` enqueues, in order. The same closure can be recorded. If it fails halfway, the work
    /// enqueued before still runs.
    ///
    /// `overlap` states whether [`crate::LaunchBuilder::pdl`] is honoured; reference runs turn it off.
    pub fn run<'l>(
        &mut self,
        lease: &'l mut Lease,
        overlap: bool,
        f: impl FnOnce(&mut dyn Queue) -> Result<(), DriverError>,
    ) -> Result<Outputs<'l>, DriverError> {
        self.shared().check_lost()?;
        self.begin_use(lease)?;
        let shared = Arc::clone(self.shared());
        let mut sink = StreamSink {
            shared: &shared,
            memory: lease.memory(),
            stream: self.handle,
            keep: &mut self.keep,
            overlap,
            recording: None,
            params: Vec::new(),
        };
        // Unwind safety: after a panic the sink is dropped; work already sent runs, as after any error.
        catch_unwind(AssertUnwindSafe(|| f(&mut sink))).unwrap_or_else(|payload| {
            let message = panic_message(&*payload);
            Err(DriverError::Panicked { what: "enqueueing".to_owned(), message })
        })?;
        Ok(Outputs::new(lease))
    }

    /// Writes bytes to the memory and waits until they have arrived.
    pub fn upload(&mut self, lease: &mut Lease, dst: Buf, bytes: &[u8]) -> Result<(), DriverError> {
        self.upload_ahead(lease, dst, bytes)?;
        self.synchronize()
    }

    /// Like [`Stream::upload`], but returns once all of `bytes` has been copied to pinned slots; the last copies
    /// may still be in flight. The host fills one slot while the device copies another, also across successive
    /// calls.
    pub fn upload_ahead(&mut self, lease: &mut Lease, dst: Buf, bytes: &[u8]) -> Result<(), DriverError> {
        self.check_usable("upload", bytes.len() as u64)?;
        check_len("an upload", dst, bytes.len())?;
        let mut transfers = self.take_transfers()?;
        let result = self.upload_in_chunks(lease, &mut transfers, dst, bytes);
        self.transfers = Some(transfers);
        result
    }

    fn upload_in_chunks(
        &mut self,
        lease: &mut Lease,
        transfers: &mut Staging,
        dst: Buf,
        bytes: &[u8],
    ) -> Result<(), DriverError> {
        let mut offset = 0;
        for chunk in bytes.chunks(transfers.slot_bytes()) {
            self.stage(lease, transfers, dst.slice(offset, chunk.len() as u64)?, chunk)?;
            offset += chunk.len() as u64;
        }
        Ok(())
    }

    /// Writes bytes to the memory in stream order, from a pinned slot, without waiting for the copy. Waits only if
    /// all slots of `staging` are in use.
    pub fn stage(
        &mut self,
        lease: &mut Lease,
        staging: &mut Staging,
        dst: Buf,
        bytes: &[u8],
    ) -> Result<(), DriverError> {
        self.check_usable("upload", bytes.len() as u64)?;
        check_len("a staged write", dst, bytes.len())?;
        let to = lease.memory().resolve(dst)?.address();
        self.begin_use(lease)?;
        staging.send(self, crate::api::DevicePtr(to), bytes)
    }

    /// Waits for the stream, then lets the host write to a pinned region directly, without a copy engine. For a
    /// device region this is an ordinary upload.
    pub fn write_pinned(&mut self, lease: &mut Lease, dst: Buf, bytes: &[u8]) -> Result<(), DriverError> {
        self.check_usable("upload", bytes.len() as u64)?;
        check_len("a write", dst, bytes.len())?;
        let BufAddress::Host(to) = lease.memory().resolve(dst)? else {
            return self.upload(lease, dst, bytes);
        };
        self.begin_use(lease)?;
        self.synchronize()?;
        // SAFETY: `resolve` found the range in a pinned region, which consists of whole words, is kept alive by the
        // lease and is accessed by the host only through `pinned`.
        unsafe { crate::pinned::write(to, bytes) };
        Ok(())
    }

    /// Writes one value in stream order.
    pub fn set<T: Pod>(
        &mut self,
        lease: &mut Lease,
        staging: &mut Staging,
        slot: DeviceSlot<T>,
        value: T,
    ) -> Result<(), DriverError> {
        self.stage(lease, staging, slot.buf(), bytemuck::bytes_of(&value))
    }

    /// Copies a buffer to an equally long one of another memory, in stream order.
    pub fn copy_across(
        &mut self,
        (to, dst): (&mut Lease, Buf),
        (from, src): (&mut Lease, Buf),
    ) -> Result<(), DriverError> {
        self.check_usable("copy", src.len())?;
        if dst.len() != src.len() {
            let what = "a copy".to_owned();
            return Err(DriverError::SizeMismatch { what, expected: dst.len(), given: src.len() });
        }
        let ends = (to.memory().resolve(dst)?.address(), from.memory().resolve(src)?.address());
        self.begin_use(to)?;
        self.begin_use(from)?;
        if src.is_empty() {
            return Ok(());
        }
        let (handle, [to, from]) = (self.handle, [ends.0, ends.1].map(crate::api::DevicePtr));
        self.shared().call("cuMemcpyAsync", |api| api.memcpy_dtod_async(to, from, src.len(), handle))
    }

    /// Waits for the stream and copies bytes of the memory to the host.
    pub fn download(&mut self, lease: &Lease, src: Buf, bytes: &mut [u8]) -> Result<(), DriverError> {
        self.check_usable("readback", bytes.len() as u64)?;
        check_len("a readback", src, bytes.len())?;
        let from = lease.memory().resolve(src)?;
        lease.check_stream(&self.progress)?;
        self.keep.add(lease.memory());
        match from {
            BufAddress::Device(from) => {
                let mut transfers = self.take_transfers()?;
                let result = transfers.receive(self, from, bytes);
                self.transfers = Some(transfers);
                result
            }
            BufAddress::Host(from) => {
                self.synchronize()?;
                // SAFETY: `resolve` found the range in a pinned region, which consists of whole words, is kept
                // alive by the lease and is accessed by the host only through `pinned`.
                unsafe { crate::pinned::read(from, bytes) };
                Ok(())
            }
        }
    }

    /// Records an event on the stream.
    pub fn record_event(&mut self, event: &Event) -> Result<(), DriverError> {
        self.check_usable("recording an event", 0)?;
        self.same_device(&event.shared, "an event")?;
        let handle = self.handle;
        self.shared().call("cuEventRecord", |api| api.event_record(event.handle, handle))
    }

    /// Makes later work of this stream wait for an event of another stream.
    pub fn wait_event(&mut self, event: &Event) -> Result<(), DriverError> {
        self.check_usable("waiting for an event", 0)?;
        self.same_device(&event.shared, "an event")?;
        let handle = self.handle;
        self.shared().call("cuStreamWaitEvent", |api| api.stream_wait_event(handle, event.handle))
    }

    /// After a failure, checks the device and then this stream.
    pub fn health(&mut self, limit: Duration) -> Result<Health, DriverError> {
        match self.ctx.device().health(limit)? {
            Health::Healthy => {}
            other => return Ok(other),
        }
        if let Some(code) = self.broken {
            return Ok(Health::StreamLost { code });
        }
        match self.wait(limit) {
            Ok(()) => Ok(Health::Healthy),
            Err(DriverError::Timeout { .. }) => Ok(Health::StreamLost { code: Code::NOT_READY }),
            Err(DriverError::Driver { code, .. }) => Ok(Health::StreamLost { code }),
            Err(error) => Err(error),
        }
    }

    pub(crate) fn shared(&self) -> &Arc<DeviceShared> {
        self.ctx.shared()
    }

    pub(crate) fn handle(&self) -> StreamHandle {
        self.handle
    }

    pub(crate) fn limit(&self) -> Duration {
        self.limit
    }

    /// Marks the stream unusable, because it is stuck in capture mode.
    pub(crate) fn set_broken(&mut self, code: Code) {
        self.broken = Some(code);
    }

    pub(crate) fn check_broken(&self) -> Result<(), DriverError> {
        self.broken.map_or(Ok(()), |code| Err(DriverError::StreamLost { code }))
    }

    /// Refuses a call during a recording on any stream of the device, and on a broken stream.
    pub(crate) fn check_usable(&self, what: &'static str, bytes: u64) -> Result<(), DriverError> {
        self.shared().refuse_while_recording(what, bytes)?;
        self.check_broken()
    }

    pub(crate) fn same_device(
        &self,
        other: &Arc<DeviceShared>,
        what: &'static str,
    ) -> Result<(), DriverError> {
        if Arc::ptr_eq(self.shared(), other) { Ok(()) } else { Err(DriverError::ForeignDevice { what }) }
    }

    /// Records that work on the lease's memory is about to be sent.
    #[inline]
    pub(crate) fn begin_use(&mut self, lease: &mut Lease) -> Result<(), DriverError> {
        self.check_broken()?;
        self.same_device(lease.memory().shared(), "the memory")?;
        self.n_sent += 1;
        lease.begin_use(&self.progress, self.n_sent)?;
        self.keep.add(lease.memory());
        Ok(())
    }

    /// Returns the point after the work that is about to be sent.
    pub(crate) fn next_sent(&mut self) -> Sent {
        self.n_sent += 1;
        Sent { progress: Arc::clone(&self.progress), n: self.n_sent }
    }

    /// Waits until a point is reached. If it belongs to another stream, that stream must have been waited for
    /// already; this one cannot wait for it.
    pub(crate) fn wait_for_sent(&mut self, sent: &Sent, what: &str) -> Result<(), DriverError> {
        if sent.progress.reached(sent.n) {
            return Ok(());
        }
        if !Arc::ptr_eq(&sent.progress, &self.progress) {
            return Err(DriverError::LeaseBusy { name: what.to_owned() });
        }
        self.synchronize()
    }

    fn take_transfers(&mut self) -> Result<Staging, DriverError> {
        match self.transfers.take() {
            Some(t) => Ok(t),
            None => Staging::new(&self.ctx, TRANSFER_SLOTS, TRANSFER_SLOT_BYTES),
        }
    }
}

impl StreamProgress {
    /// True if the stream is known to have finished its first `n` pieces of work.
    #[inline]
    pub(crate) fn reached(&self, n: u64) -> bool {
        self.n_done.load(Ordering::Acquire) >= n
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.shared().check_lost().is_err() {
            return;
        }
        let handle = self.handle;
        // Running work must not outlive what it points to. If the work does not end, those objects are leaked.
        if !self.keep.is_empty() {
            match self.shared().poll("cuStreamQuery", self.limit, |api| api.stream_query(handle)) {
                Ok(()) => self.progress.n_done.store(self.n_sent, Ordering::Release),
                Err(error) => {
                    tracing::warn!("a dropped stream has work that does not end: {error}");
                    self.keep.leak();
                }
            }
        }
        self.shared().discard(Garbage::Stream(handle));
    }
}

impl std::fmt::Debug for Stream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?} of {:?}", self.handle, self.ctx.device())
    }
}

pub(crate) fn check_len(what: &str, buf: Buf, given: usize) -> Result<(), DriverError> {
    if buf.len() == given as u64 {
        return Ok(());
    }
    Err(DriverError::SizeMismatch { what: what.to_owned(), expected: buf.len(), given: given as u64 })
}
