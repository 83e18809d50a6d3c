//! Planned memory: every address is fixed before anything runs.

use std::fmt;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use bytemuck::Pod;

use crate::api::{Code, DevicePtr, HostPtr};
use crate::device::Context;
use crate::error::DriverError;
use crate::protocol::sync::lock;
use crate::shared::{DeviceShared, Garbage};
use crate::stream::StreamProgress;

/// Minimum allocation, so that an empty region has an address too.
const MIN_REGION_BYTES: u64 = 256;

static NEXT_MEMORY: AtomicU32 = AtomicU32::new(1);

/// Plan of a [`Memory`]: named regions, one allocation each.
#[derive(Clone, Debug, Default)]
pub struct MemoryLayout {
    name: String,
    regions: Vec<(String, u64, RegionKind)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RegionKind {
    Device,
    Pinned,
    /// Takes over this region's allocation from the memory that this one succeeds.
    Inherited(Region),
}

/// A region of a [`MemoryLayout`], and of every memory planned from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Region(u32);

impl MemoryLayout {
    /// Creates an empty layout.
    #[must_use]
    pub fn new(name: &str) -> MemoryLayout {
        MemoryLayout { name: name.to_owned(), regions: Vec::new() }
    }

    /// Adds a region of device memory.
    pub fn device(&mut self, name: &str, bytes: u64) -> Region {
        self.add(name, bytes, RegionKind::Device)
    }

    /// Adds a region of pinned host memory, which kernels and copies inside a graph can access.
    pub fn pinned(&mut self, name: &str, bytes: u64) -> Region {
        self.add(name, bytes, RegionKind::Pinned)
    }

    /// Takes over a region with its contents from the memory that this one succeeds; see [`Lease::succeed`].
    pub fn inherit(&mut self, name: &str, region: Region) -> Region {
        self.add(name, 0, RegionKind::Inherited(region))
    }

    fn add(&mut self, name: &str, bytes: u64, kind: RegionKind) -> Region {
        self.regions.push((name.to_owned(), bytes, kind));
        Region(self.regions.len() as u32 - 1)
    }

    /// Bytes of device memory that the layout needs.
    #[must_use]
    pub fn device_bytes(&self) -> u64 {
        self.regions.iter().filter(|r| r.2 == RegionKind::Device).fold(0, |sum, r| sum.saturating_add(r.1))
    }
}

/// A set of allocations with fixed addresses. Graphs share ownership of it (`Arc`), so an address in a recording
/// never dangles. Growing a memory means planning a new one, which may take over regions, and recording again.
pub struct Memory {
    shared: Arc<DeviceShared>,
    id: u32,
    name: String,
    regions: Vec<Arc<Allocation>>,
    leased: AtomicBool,
    /// Set once another memory has taken over regions; this one is never leased again.
    succeeded: AtomicBool,
    /// The last lease's record of the stream that uses the memory.
    last_user: Mutex<Option<(Arc<StreamProgress>, u64)>>,
}

/// A driver allocation, freed with the last [`Memory`] that holds it.
struct Allocation {
    shared: Arc<DeviceShared>,
    name: String,
    bytes: u64,
    base: BufAddress,
    /// Set while a [`crate::Ring`] owns the region.
    owned_by_ring: AtomicBool,
}

impl Drop for Allocation {
    fn drop(&mut self) {
        self.shared.discard(match self.base {
            BufAddress::Device(p) => Garbage::Device(p),
            BufAddress::Host(p) => Garbage::Host(p),
        });
    }
}

/// Resolved address of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BufAddress {
    Device(DevicePtr),
    Host(HostPtr),
}

impl BufAddress {
    /// The address that a kernel uses.
    pub(crate) fn address(self) -> u64 {
        match self {
            BufAddress::Device(p) => p.0,
            BufAddress::Host(p) => p.0,
        }
    }

    fn add(self, bytes: u64) -> BufAddress {
        match self {
            BufAddress::Device(p) => BufAddress::Device(p.add(bytes)),
            BufAddress::Host(p) => BufAddress::Host(HostPtr(p.0 + bytes)),
        }
    }
}

impl Memory {
    /// Allocates every region of the layout, or nothing.
    pub fn plan(ctx: &Context, layout: &MemoryLayout) -> Result<Arc<Memory>, DriverError> {
        Memory::build(ctx.shared(), layout, None)
    }

    fn build(
        shared: &Arc<DeviceShared>,
        layout: &MemoryLayout,
        predecessor: Option<&Memory>,
    ) -> Result<Arc<Memory>, DriverError> {
        shared.refuse_while_recording("allocation", layout.device_bytes())?;
        shared.empty_bin();
        let mut memory = Memory {
            shared: Arc::clone(shared),
            id: NEXT_MEMORY.fetch_add(1, Ordering::Relaxed),
            name: layout.name.clone(),
            regions: Vec::with_capacity(layout.regions.len()),
            leased: AtomicBool::new(false),
            succeeded: AtomicBool::new(false),
            last_user: Mutex::new(None),
        };
        for (name, bytes, kind) in &layout.regions {
            let size = crate::pinned::whole_words((*bytes).max(MIN_REGION_BYTES));
            let allocated = match kind {
                RegionKind::Inherited(region) => {
                    let inherited = predecessor.and_then(|m| m.regions.get(region.0 as usize));
                    let Some(inherited) = inherited else {
                        return Err(DriverError::OutOfRange {
                            what: format!("the regions from which {name:?} can be inherited"),
                            offset: region.0.into(),
                            len: 1,
                            bytes: predecessor.map_or(0, |m| m.regions.len()) as u64,
                        });
                    };
                    memory.regions.push(Arc::clone(inherited));
                    continue;
                }
                RegionKind::Device => shared.raw(|api| api.alloc(size).map(BufAddress::Device))?,
                RegionKind::Pinned => shared.raw(|api| api.alloc_host(size).map(BufAddress::Host))?,
            };
            // An error drops the partial memory, which frees it.
            let base = allocated.map_err(|code| allocation_failed(shared, &layout.name, name, size, code))?;
            if let BufAddress::Host(p) = base {
                // SAFETY: `p` is a fresh pinned allocation of `size` bytes that only this function has.
                unsafe { std::ptr::write_bytes(p.as_ptr(), 0, size as usize) };
            }
            memory.regions.push(Arc::new(Allocation {
                shared: Arc::clone(shared),
                name: name.clone(),
                bytes: *bytes,
                base,
                owned_by_ring: AtomicBool::new(false),
            }));
        }
        Ok(Arc::new(memory))
    }

    /// Returns a handle to a whole region. A region of another layout may yield a different region or a handle that
    /// is out of range, which every use rejects.
    #[must_use]
    pub fn buf(&self, region: Region) -> Buf {
        let len = self.regions.get(region.0 as usize).map_or(0, |r| r.bytes);
        Buf { memory: self.id, region: region.0, offset: 0, len }
    }

    /// Takes the memory's only lease. All graphs over this memory are replayed through it.
    pub fn lease(self: &Arc<Self>) -> Result<Lease, DriverError> {
        let taken = || DriverError::LeaseTaken { name: self.name.clone() };
        if self.leased.swap(true, Ordering::AcqRel) {
            return Err(taken());
        }
        // Checked after the swap: a successor sets this flag before it ends the lease that it came from.
        if self.succeeded.load(Ordering::Acquire) {
            self.leased.store(false, Ordering::Release);
            return Err(taken());
        }
        let user = lock(&self.last_user).take();
        Ok(Lease { memory: Arc::clone(self), user })
    }

    /// The name from the layout.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Total bytes of all regions.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.regions.iter().map(|r| r.bytes).sum()
    }

    /// Name, size and address of each region, for reports. Recordings hold these addresses.
    pub fn regions(&self) -> impl Iterator<Item = (&str, u64, u64)> {
        self.regions.iter().map(|r| (r.name.as_str(), r.bytes, r.base.address()))
    }

    pub(crate) fn shared(&self) -> &Arc<DeviceShared> {
        &self.shared
    }

    pub(crate) fn id(&self) -> u32 {
        self.id
    }

    /// Resolves a handle; rejects one of another memory or out of its region's range.
    #[inline]
    pub(crate) fn resolve(&self, buf: Buf) -> Result<BufAddress, DriverError> {
        if buf.memory != self.id {
            return Err(self.foreign("a buffer", buf.memory));
        }
        let Some(region) = self.regions.get(buf.region as usize) else {
            return Err(out_of_range(format!("memory {:?}", self.name), buf, 0));
        };
        match buf.offset.checked_add(buf.len) {
            Some(end) if end <= region.bytes => Ok(region.base.add(buf.offset)),
            _ => Err(out_of_range(format!("region {:?}", region.name), buf, region.bytes)),
        }
    }

    #[cold]
    pub(crate) fn foreign(&self, what: &'static str, given: u32) -> DriverError {
        DriverError::ForeignMemory { what, given, expected: self.id, name: self.name.clone() }
    }

    /// Reserves a pinned region for a ring; false if another ring has it.
    pub(crate) fn reserve_region(&self, buf: Buf) -> bool {
        self.regions.get(buf.region as usize).is_some_and(|r| !r.owned_by_ring.swap(true, Ordering::AcqRel))
    }

    pub(crate) fn release_region(&self, buf: Buf) {
        if let Some(r) = self.regions.get(buf.region as usize) {
            r.owned_by_ring.store(false, Ordering::Release);
        }
    }
}

fn out_of_range(what: String, buf: Buf, bytes: u64) -> DriverError {
    DriverError::OutOfRange { what, offset: buf.offset, len: buf.len, bytes }
}

fn allocation_failed(
    shared: &DeviceShared,
    memory: &str,
    region: &str,
    size: u64,
    code: Code,
) -> DriverError {
    if code != Code::OUT_OF_MEMORY {
        return shared.fail("cuMemAlloc", code);
    }
    let (free_bytes, total_bytes) = shared.call("cuMemGetInfo", |api| api.mem_info()).unwrap_or((0, 0));
    DriverError::OutOfMemory {
        what: format!("region {region:?} of memory {memory:?}"),
        need_bytes: size,
        free_bytes,
        total_bytes,
    }
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "Memory {} {:?} ({} bytes in {} regions)",
            self.id,
            self.name,
            self.bytes(),
            self.regions.len()
        )
    }
}

/// Handle to a range of a [`Memory`]. It is `Copy`, holds no borrow, and is resolved where it is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Buf {
    memory: u32,
    region: u32,
    offset: u64,
    len: u64,
}

impl Buf {
    /// Length in bytes.
    #[must_use]
    pub const fn len(self) -> u64 {
        self.len
    }

    /// True if the length is 0.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.len == 0
    }

    /// Byte offset within its region.
    #[must_use]
    pub const fn offset(self) -> u64 {
        self.offset
    }

    /// Id of its memory, as error messages print it.
    #[must_use]
    pub const fn memory(self) -> u32 {
        self.memory
    }

    /// Returns a subrange.
    pub fn slice(self, offset: u64, len: u64) -> Result<Buf, DriverError> {
        match offset.checked_add(len) {
            Some(end) if end <= self.len => Ok(Buf { offset: self.offset + offset, len, ..self }),
            _ => Err(DriverError::OutOfRange { what: "the buffer".to_owned(), offset, len, bytes: self.len }),
        }
    }

    /// Returns the value at a byte offset as a [`DeviceSlot`].
    pub fn slot<T: Pod>(self, offset: u64) -> Result<DeviceSlot<T>, DriverError> {
        Ok(DeviceSlot { buf: self.slice(offset, size_of::<T>() as u64)?, _type: PhantomData })
    }
}

/// A typed value in device memory that may change between replays. Kernels read it from memory.
///
/// The counterpart is [`crate::Baked`], a value that is fixed when the launch is recorded.
pub struct DeviceSlot<T> {
    buf: Buf,
    _type: PhantomData<fn() -> T>,
}

impl<T: Pod> DeviceSlot<T> {
    /// The bytes that hold the value.
    #[must_use]
    pub const fn buf(self) -> Buf {
        self.buf
    }
}

impl<T> Clone for DeviceSlot<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for DeviceSlot<T> {}

impl<T> fmt::Debug for DeviceSlot<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceSlot<{}> at {:?}", std::any::type_name::<T>(), self.buf)
    }
}

/// The right to modify a memory's contents. There is one per memory, and the outputs of a replay borrow it, so no
/// replay can overwrite results that are still being read.
#[derive(Debug)]
pub struct Lease {
    memory: Arc<Memory>,
    /// The stream that last received work on this memory, and its work count at that time.
    user: Option<(Arc<StreamProgress>, u64)>,
}

impl Lease {
    /// The memory.
    #[must_use]
    pub fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    /// Plans a new memory that takes over regions of this one, with their contents and addresses, and returns its
    /// lease. Work in flight on the old memory continues, but nothing can be replayed on it any more. If an
    /// allocation fails, the old lease is returned and nothing has changed.
    pub fn succeed(mut self, layout: &MemoryLayout) -> Result<Lease, (Lease, DriverError)> {
        let shared = Arc::clone(self.memory.shared());
        let memory = match Memory::build(&shared, layout, Some(&self.memory)) {
            Ok(memory) => memory,
            Err(error) => return Err((self, error)),
        };
        memory.leased.store(true, Ordering::Release);
        // Set before this lease ends, so that no other lease can be taken in between.
        self.memory.succeeded.store(true, Ordering::Release);
        // The last user of the old memory may still be using the regions taken over.
        Ok(Lease { memory, user: self.user.take() })
    }

    /// Records a use by a stream. Fails while work of another stream may still be running, since nothing orders the
    /// two.
    #[inline]
    pub(crate) fn begin_use(&mut self, stream: &Arc<StreamProgress>, n_sent: u64) -> Result<(), DriverError> {
        if let Some((user, n)) = &mut self.user
            && Arc::ptr_eq(user, stream)
        {
            *n = n_sent;
            return Ok(());
        }
        self.check_stream(stream)?;
        self.user = Some((Arc::clone(stream), n_sent));
        Ok(())
    }

    pub(crate) fn check_stream(&self, stream: &Arc<StreamProgress>) -> Result<(), DriverError> {
        match &self.user {
            Some((user, n)) if !Arc::ptr_eq(user, stream) && !user.reached(*n) => {
                Err(DriverError::LeaseBusy { name: self.memory.name.clone() })
            }
            _ => Ok(()),
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        *lock(&self.memory.last_user) = self.user.take();
        self.memory.leased.store(false, Ordering::Release);
    }
}
