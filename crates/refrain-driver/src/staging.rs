//! Pinned slots for transfers between host and device.

use std::sync::Arc;

use crate::api::{Api, DevicePtr, HostPtr, RawResult};
use crate::device::Context;
use crate::error::DriverError;
use crate::event::Event;
use crate::shared::{DeviceShared, Garbage};
use crate::stream::{Sent, Stream};

/// A few pinned slots of equal size, used in turn. A slot is reused only when the copy out of it is done.
pub struct Staging {
    pinned: Arc<PinnedSlots>,
    slot_bytes: usize,
    slots: Vec<StagingSlot>,
    next: usize,
}

struct StagingSlot {
    /// Recorded after the last copy that used the slot.
    event: Event,
    state: SlotState,
}

/// Condition for reusing a slot.
enum SlotState {
    /// None; the slot is free.
    Idle,
    /// Its event has completed.
    Marked,
    /// All work on that stream up to this point is done: a copy was sent, but its event could not be recorded.
    Unmarked(Sent),
}

/// A pinned allocation, kept alive by every stream that has sent a copy using it.
pub(crate) struct PinnedSlots {
    shared: Arc<DeviceShared>,
    ptr: HostPtr,
}

impl PinnedSlots {
    /// Allocates `n_slots` slots of `slot_bytes`.
    pub(crate) fn new(
        shared: &Arc<DeviceShared>,
        n_slots: usize,
        slot_bytes: usize,
    ) -> Result<Arc<PinnedSlots>, DriverError> {
        let bytes = (n_slots as u64).checked_mul(slot_bytes as u64).filter(|&b| b <= i64::MAX as u64).ok_or(
            DriverError::OutOfRange {
                what: "the address space".to_owned(),
                offset: 0,
                len: u64::MAX,
                bytes: i64::MAX as u64,
            },
        )?;
        shared.refuse_while_recording("pinned allocation", bytes)?;
        let ptr = shared.call("cuMemAllocHost", |api| api.alloc_host(bytes))?;
        Ok(Arc::new(PinnedSlots { shared: Arc::clone(shared), ptr }))
    }

    pub(crate) fn shared(&self) -> &Arc<DeviceShared> {
        &self.shared
    }

    pub(crate) fn ptr(&self) -> HostPtr {
        self.ptr
    }
}

impl Drop for PinnedSlots {
    fn drop(&mut self) {
        self.shared.discard(Garbage::Host(self.ptr));
    }
}

impl Staging {
    /// Allocates `n_slots` slots of `slot_bytes`; at least one of at least one byte.
    pub fn new(ctx: &Context, n_slots: usize, slot_bytes: usize) -> Result<Staging, DriverError> {
        let shared = ctx.shared();
        let (n_slots, slot_bytes) = (n_slots.max(1), slot_bytes.max(1));
        let pinned = PinnedSlots::new(shared, n_slots, slot_bytes)?;
        let slot = |_| Ok(StagingSlot { event: Event::new(shared, false)?, state: SlotState::Idle });
        let slots = (0..n_slots).map(slot).collect::<Result<_, DriverError>>()?;
        Ok(Staging { pinned, slot_bytes, slots, next: 0 })
    }

    /// Slot size in bytes.
    #[must_use]
    pub fn slot_bytes(&self) -> usize {
        self.slot_bytes
    }

    /// Copies `bytes` into the next slot and from there, in stream order, to `to`.
    pub(crate) fn send(
        &mut self,
        stream: &mut Stream,
        to: DevicePtr,
        bytes: &[u8],
    ) -> Result<(), DriverError> {
        if bytes.len() > self.slot_bytes {
            return Err(DriverError::OutOfRange {
                what: "a staging slot".to_owned(),
                offset: 0,
                len: bytes.len() as u64,
                bytes: self.slot_bytes as u64,
            });
        }
        if bytes.is_empty() {
            return Ok(());
        }
        let (slot, from) = self.acquire(stream)?;
        // SAFETY: `from` is a slot of `slot_bytes >= bytes.len()` bytes in our pinned allocation, and `acquire`
        // made sure that its last copy is done, so neither the device nor anyone else uses it.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), from.as_ptr(), bytes.len()) };
        self.send_slot(stream, slot, from, to, bytes.len() as u64)
    }

    /// Copies the first `bytes` of an acquired and filled slot to `to`.
    pub(crate) fn send_slot(
        &mut self,
        stream: &mut Stream,
        slot: usize,
        from: HostPtr,
        to: DevicePtr,
        bytes: u64,
    ) -> Result<(), DriverError> {
        let handle = stream.handle();
        self.use_slot(stream, slot, "cuMemcpyHtoDAsync", |api| {
            // SAFETY: the slot is not written until this copy is known to be done (`acquire`), and the stream keeps
            // the allocation alive until it has waited for its work.
            unsafe { api.memcpy_htod_async(to, from, bytes, handle) }
        })
    }

    /// Copies device bytes to the host through the slots, and waits for them.
    pub(crate) fn receive(
        &mut self,
        stream: &mut Stream,
        from: DevicePtr,
        bytes: &mut [u8],
    ) -> Result<(), DriverError> {
        let mut next = from;
        for chunk in bytes.chunks_mut(self.slot_bytes) {
            let (slot, to) = self.acquire(stream)?;
            let handle = stream.handle();
            // SAFETY: `acquire` made sure that the slot is idle, it is at least as large as `chunk`, and the stream
            // keeps the allocation alive until it has waited for its work.
            self.use_slot(stream, slot, "cuMemcpyDtoHAsync", |api| unsafe {
                api.memcpy_dtoh_async(to, next, chunk.len() as u64, handle)
            })?;
            self.slots[slot].event.wait(stream.limit())?;
            // SAFETY: the copy into the slot is done (its event has completed), and nobody else writes the slot.
            unsafe { std::ptr::copy_nonoverlapping(to.as_ptr(), chunk.as_mut_ptr(), chunk.len()) };
            next = next.add(chunk.len() as u64);
        }
        stream.synchronize()
    }

    /// Number of slots.
    pub(crate) fn n_slots(&self) -> usize {
        self.slots.len()
    }

    /// Waits for the next slot to become free and returns it. The previous user must have sent its copy.
    pub(crate) fn acquire(&mut self, stream: &mut Stream) -> Result<(usize, HostPtr), DriverError> {
        if !Arc::ptr_eq(&self.pinned.shared, stream.shared()) {
            return Err(DriverError::ForeignDevice { what: "the staging memory" });
        }
        let index = self.next;
        let slot = &mut self.slots[index];
        match &slot.state {
            SlotState::Idle => {}
            SlotState::Marked => slot.event.wait(stream.limit())?,
            SlotState::Unmarked(sent) => stream.wait_for_sent(sent, "the staging memory")?,
        }
        slot.state = SlotState::Idle;
        self.next = (index + 1) % self.slots.len();
        stream.keep.add(&self.pinned);
        Ok((index, HostPtr(self.pinned.ptr.0 + (index * self.slot_bytes) as u64)))
    }

    /// Sends a copy that uses an acquired slot, and records its event.
    fn use_slot(
        &mut self,
        stream: &mut Stream,
        slot: usize,
        call: &'static str,
        copy: impl FnOnce(&dyn Api) -> RawResult<()>,
    ) -> Result<(), DriverError> {
        let slot = &mut self.slots[slot];
        // Marked in use before the call: a failing call may still have sent the copy, and an event that is not
        // recorded again would only report the end of the previous copy.
        slot.state = SlotState::Unmarked(stream.next_sent());
        stream.shared().call(call, copy)?;
        stream.record_event(&slot.event)?;
        slot.state = SlotState::Marked;
        Ok(())
    }
}

impl std::fmt::Debug for Staging {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Staging ({} slots of {} bytes)", self.slots.len(), self.slot_bytes)
    }
}
