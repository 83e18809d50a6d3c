//! Memory of the simulated device: allocations at private addresses separated by guard zones, and pinned host
//! memory.
//!
//! Device addresses come from a range that no process can map, and are never reused, so a stale address is always
//! detected. Pinned memory is real host memory between guard bytes that are checked when it is freed.

use std::alloc::{Layout, alloc, dealloc};
use std::collections::{BTreeMap, VecDeque};

use crate::api::{Code, CtxHandle, HostPtr};

/// Not a canonical address on any host, so never a valid pointer.
const BASE: u64 = 0x0d00_0000_0000_0000;
const ALIGN: u64 = 512;
/// Minimum number of unmapped bytes on both sides of an allocation.
const GUARD: u64 = 4096;
/// All ones: a NaN in every float type and an out-of-range index, so that reads of unwritten memory show.
const POISON: u8 = 0xff;
const GUARD_BYTE: u8 = 0xa7;
const HOST_GUARD: usize = 256;
/// Number of freed pinned allocations kept, so that a late write by the host does not corrupt the process.
const QUARANTINE: usize = 64;

/// A fault on the device, with the code that a driver would return.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The driver's code.
    pub code: Code,
    /// Description of the faulting access.
    pub what: String,
}

impl Fault {
    /// Creates a fault that a kernel raises itself, such as a failed device-side assertion.
    #[must_use]
    pub fn new(code: Code, what: impl Into<String>) -> Fault {
        Fault { code, what: what.into() }
    }
}

/// Owner of an allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AllocationOwner {
    /// The program: `cuMemAlloc` or managed memory.
    Program,
    /// A stream: live once the stream reaches the allocation.
    Stream,
    /// A memory node of a graph: live from its execution to the free.
    Graph,
}

struct SimAllocation {
    bytes: u64,
    words: Vec<u64>, // backing store, 8-byte aligned so that typed views need no copy
    ctx: CtxHandle,
    owner: AllocationOwner,
    live: bool,
    /// True if its bytes count against the capacity: a graph's only while live, others from the call on.
    counted: bool,
    /// True if a stream-ordered free is queued.
    freeing: bool,
}

struct SimPinned {
    base: *mut u8,
    layout: Layout,
    bytes: usize,
    ctx: CtxHandle,
}

// SAFETY: `base` is a heap allocation that only this value owns. Threads access its bytes under the rules of pinned
// memory, not through this struct.
unsafe impl Send for SimPinned {}

impl Drop for SimPinned {
    fn drop(&mut self) {
        // SAFETY: `base` came from `alloc` with this layout in `SimMemory::alloc_host` and is freed only here.
        unsafe { dealloc(self.base, self.layout) }
    }
}

impl SimPinned {
    fn addr(&self) -> u64 {
        self.base as u64 + HOST_GUARD as u64
    }

    fn guards_intact(&self) -> bool {
        // SAFETY: the allocation holds a guard, `bytes` bytes and another guard. The guards belong to this struct
        // alone, and reading them through a raw slice does not alias the user's bytes.
        let (front, back) = unsafe {
            (
                std::slice::from_raw_parts(self.base, HOST_GUARD),
                std::slice::from_raw_parts(self.base.add(HOST_GUARD + self.bytes), HOST_GUARD),
            )
        };
        front.iter().chain(back).all(|&b| b == GUARD_BYTE)
    }
}

/// Location of a checked access.
#[derive(Clone, Copy)]
pub(super) enum SimLocation {
    /// Byte offset in the allocation that starts at `start`.
    Device { start: u64, offset: usize },
    /// Host address inside pinned memory.
    Pinned { addr: u64 },
}

pub(super) struct SimMemory {
    allocations: BTreeMap<u64, SimAllocation>,
    freed: BTreeMap<u64, u64>, // start -> bytes
    next: u64,
    used: u64,
    capacity: u64,
    pinned: BTreeMap<u64, SimPinned>,
    quarantine: VecDeque<SimPinned>,
    host_used: u64,
    host_capacity: u64,
}

impl SimMemory {
    pub(super) fn new(capacity: u64, host_capacity: u64) -> SimMemory {
        SimMemory {
            allocations: BTreeMap::new(),
            freed: BTreeMap::new(),
            next: BASE,
            used: 0,
            capacity,
            pinned: BTreeMap::new(),
            quarantine: VecDeque::new(),
            host_used: 0,
            host_capacity,
        }
    }

    pub(super) fn info(&self) -> (u64, u64) {
        (self.capacity - self.used, self.capacity)
    }

    /// Live device allocations and their bytes.
    pub(super) fn device_census(&self) -> (usize, u64) {
        (self.allocations.values().filter(|a| a.counted).count(), self.used)
    }

    /// Live pinned allocations and their bytes.
    pub(super) fn host_census(&self) -> (usize, u64) {
        (self.pinned.len(), self.host_used)
    }

    /// Reserves the address of an allocation, which has no bytes until it is brought to life.
    pub(super) fn reserve(
        &mut self,
        ctx: CtxHandle,
        bytes: u64,
        owner: AllocationOwner,
    ) -> Result<u64, Code> {
        if bytes == 0 {
            return Err(Code::INVALID_VALUE);
        }
        if bytes > self.capacity - self.used {
            return Err(Code::OUT_OF_MEMORY);
        }
        let start = (self.next + GUARD).next_multiple_of(ALIGN);
        self.next = start + bytes;
        let counted = owner != AllocationOwner::Graph;
        self.used += if counted { bytes } else { 0 };
        let a = SimAllocation { bytes, words: Vec::new(), ctx, owner, live: false, counted, freeing: false };
        self.allocations.insert(start, a);
        Ok(start)
    }

    /// Backs a reserved address with poison bytes.
    pub(super) fn bring_to_life(&mut self, start: u64) -> Result<(), Code> {
        let free = self.capacity - self.used;
        let a = self.allocations.get_mut(&start).ok_or(Code::INVALID_VALUE)?;
        if a.live {
            return Err(Code::INVALID_VALUE);
        }
        let n_words = usize::try_from(a.bytes.div_ceil(8)).map_err(|_| Code::OUT_OF_MEMORY)?;
        let extra = if a.counted { 0 } else { a.bytes };
        if extra > free || a.words.try_reserve_exact(n_words).is_err() {
            return Err(Code::OUT_OF_MEMORY);
        }
        a.words.resize(n_words, u64::from_ne_bytes([POISON; 8]));
        a.live = true;
        a.counted = true;
        self.used += extra;
        Ok(())
    }

    pub(super) fn alloc(&mut self, ctx: CtxHandle, bytes: u64) -> Result<u64, Code> {
        let start = self.reserve(ctx, bytes, AllocationOwner::Program)?;
        match self.bring_to_life(start) {
            Ok(()) => Ok(start),
            Err(code) => {
                self.allocations.remove(&start);
                self.used -= bytes;
                Err(code)
            }
        }
    }

    /// Owner of the allocation that starts exactly at `start`, and whether it is live.
    pub(super) fn owner(&self, start: u64) -> Option<(AllocationOwner, bool)> {
        self.allocations.get(&start).map(|a| (a.owner, a.live))
    }

    /// Records a queued stream-ordered free; refuses a second one.
    pub(super) fn mark_freeing(&mut self, start: u64) -> Result<(), Code> {
        let a = self.allocations.get_mut(&start).filter(|a| !a.freeing).ok_or(Code::INVALID_VALUE)?;
        a.freeing = true;
        Ok(())
    }

    /// Size of an allocation that a graph's memory node makes.
    pub(super) fn reserved_bytes(&self, start: u64) -> u64 {
        self.allocations.get(&start).map_or(0, |a| a.bytes)
    }

    /// Checks the range of a copy or fill as the driver does at the time of the call, when stream-ordered memory
    /// need not be live yet.
    pub(super) fn check_named(&self, addr: u64, bytes: u64) -> Result<(), String> {
        let later = self.allocations.range(..=addr).next_back().is_some_and(|(&start, a)| {
            a.owner != AllocationOwner::Program
                && addr - start <= a.bytes
                && bytes <= a.bytes - (addr - start)
        });
        if later { Ok(()) } else { self.locate(addr, bytes).map(drop).map_err(|fault| fault.what) }
    }

    /// Frees an allocation; one of a graph keeps its address for the next execution.
    pub(super) fn free(&mut self, start: u64) -> Result<(), Code> {
        let a = self.allocations.get_mut(&start).filter(|a| a.live).ok_or(Code::INVALID_VALUE)?;
        a.live = false;
        a.counted = false;
        a.freeing = false;
        a.words = Vec::new();
        self.used -= a.bytes;
        let bytes = a.bytes;
        if a.owner != AllocationOwner::Graph {
            self.allocations.remove(&start);
            self.freed.insert(start, bytes);
        }
        Ok(())
    }

    pub(super) fn alloc_host(&mut self, ctx: CtxHandle, bytes: u64) -> Result<u64, Code> {
        if bytes == 0 {
            return Err(Code::INVALID_VALUE);
        }
        if bytes > self.host_capacity - self.host_used {
            return Err(Code::OUT_OF_MEMORY);
        }
        let n = usize::try_from(bytes).map_err(|_| Code::OUT_OF_MEMORY)?;
        let layout =
            Layout::from_size_align(n + 2 * HOST_GUARD, HOST_GUARD).map_err(|_| Code::OUT_OF_MEMORY)?;
        // SAFETY: the layout is not empty, since it includes two guards.
        let base = unsafe { alloc(layout) };
        if base.is_null() {
            return Err(Code::OUT_OF_MEMORY);
        }
        // SAFETY: `base` points to `layout.size()` fresh bytes, which the two guards and the user's `n` bytes
        // cover.
        unsafe {
            base.write_bytes(GUARD_BYTE, layout.size());
            base.add(HOST_GUARD).write_bytes(POISON, n);
        }
        let pinned = SimPinned { base, layout, bytes: n, ctx };
        let addr = pinned.addr();
        self.host_used += bytes;
        self.pinned.insert(addr, pinned);
        Ok(addr)
    }

    /// Frees pinned memory. Returns a report if its guard zones were overwritten.
    pub(super) fn free_host(&mut self, addr: u64) -> Result<Option<String>, Code> {
        let pinned = self.pinned.remove(&addr).ok_or(Code::INVALID_VALUE)?;
        self.host_used -= pinned.bytes as u64;
        let report = (!pinned.guards_intact())
            .then(|| format!("guard zone overwritten around {} pinned bytes at {addr:#x}", pinned.bytes));
        self.freed.insert(addr, pinned.bytes as u64);
        self.quarantine.push_back(pinned);
        if self.quarantine.len() > QUARANTINE {
            self.quarantine.pop_front();
        }
        Ok(report)
    }

    /// Frees everything of a context.
    pub(super) fn drop_context(&mut self, ctx: CtxHandle) {
        let gone: Vec<u64> =
            self.allocations.iter().filter(|(_, a)| a.ctx == ctx).map(|(&start, _)| start).collect();
        for start in gone {
            if let Some(a) = self.allocations.remove(&start) {
                self.used -= if a.counted { a.bytes } else { 0 };
                self.freed.insert(start, a.bytes);
            }
        }
        let gone: Vec<u64> =
            self.pinned.iter().filter(|(_, p)| p.ctx == ctx).map(|(&addr, _)| addr).collect();
        for addr in gone {
            let _ = self.free_host(addr);
        }
    }

    /// True if the whole range lies in pinned memory.
    pub(super) fn is_pinned(&self, addr: u64, bytes: u64) -> bool {
        matches!(self.locate(addr, bytes), Ok(SimLocation::Pinned { .. }))
    }

    /// Looks a range up in live memory.
    pub(super) fn locate(&self, addr: u64, bytes: u64) -> Result<SimLocation, Fault> {
        if let Some((&start, a)) = self.allocations.range(..=addr).next_back()
            && a.live
            && addr - start <= a.bytes
            && bytes <= a.bytes - (addr - start)
        {
            return Ok(SimLocation::Device { start, offset: (addr - start) as usize });
        }
        if let Some((&start, p)) = self.pinned.range(..=addr).next_back()
            && addr - start <= p.bytes as u64
            && bytes <= p.bytes as u64 - (addr - start)
        {
            return Ok(SimLocation::Pinned { addr });
        }
        Err(Fault::new(Code::ILLEGAL_ADDRESS, self.describe_miss(addr, bytes)))
    }

    fn describe_miss(&self, addr: u64, bytes: u64) -> String {
        let below = self.allocations.range(..=addr).next_back().map(|(&s, a)| (s, a.bytes, a.live));
        let above = self.allocations.range(addr..).next().map(|(&s, _)| s);
        let freed = self.freed.range(..=addr).next_back().map(|(&s, &n)| (s, n));
        if let Some((start, n)) = freed
            && addr - start < n
        {
            let offset = addr - start;
            return format!(
                "use after free: {bytes} bytes at offset {offset} of {n} bytes freed at {start:#x}"
            );
        }
        match (below, above) {
            (Some((start, n, false)), _) if addr - start < n => {
                format!(
                    "{bytes} bytes at {addr:#x}, in {n} stream-ordered bytes that are not allocated at this point"
                )
            }
            (Some((start, n, true)), _) if addr - start < n + GUARD => format!(
                "guard zone: bytes {}..{} of an allocation of {n} bytes at {start:#x}",
                addr - start,
                (addr - start).saturating_add(bytes)
            ),
            (_, Some(start)) if start - addr <= GUARD => {
                format!(
                    "guard zone: {bytes} bytes at {} bytes before the allocation at {start:#x}",
                    start - addr
                )
            }
            _ => format!("wild address: {bytes} bytes at {addr:#x}, where nothing was ever allocated"),
        }
    }

    /// The bytes of a device allocation.
    pub(super) fn device(&self, start: u64) -> &[u8] {
        let a = &self.allocations[&start];
        &bytemuck::cast_slice(&a.words)[..a.bytes as usize]
    }

    pub(super) fn device_mut(&mut self, start: u64) -> &mut [u8] {
        let a = self.allocations.get_mut(&start).expect("the location was looked up under the same lock");
        &mut bytemuck::cast_slice_mut(&mut a.words)[..a.bytes as usize]
    }

    pub(super) fn read(&self, addr: u64, out: &mut [u8]) -> Result<(), Fault> {
        match self.locate(addr, out.len() as u64)? {
            SimLocation::Device { start, offset } => {
                out.copy_from_slice(&self.device(start)[offset..offset + out.len()]);
            }
            SimLocation::Pinned { addr } => read_pinned(addr, out),
        }
        Ok(())
    }

    pub(super) fn write(&mut self, addr: u64, bytes: &[u8]) -> Result<(), Fault> {
        match self.locate(addr, bytes.len() as u64)? {
            SimLocation::Device { start, offset } => {
                self.device_mut(start)[offset..offset + bytes.len()].copy_from_slice(bytes);
            }
            // SAFETY: the range was just located in live pinned memory; the last word extends at most into its
            // guard zone.
            SimLocation::Pinned { addr } => unsafe { crate::pinned::write(HostPtr(addr), bytes) },
        }
        Ok(())
    }
}

/// Reads located pinned memory as a device does, while others may be writing it.
pub(super) fn read_pinned(addr: u64, out: &mut [u8]) {
    // SAFETY: callers have located the range in live pinned memory, under the lock that they hold; the last word
    // extends at most into its guard zone.
    unsafe { crate::pinned::read(HostPtr(addr), out) }
}

/// Reads pageable host memory.
pub(super) fn read_host(addr: u64, out: &mut [u8]) {
    // SAFETY: the caller of an `unsafe` copy vouched for the range; `out` is a separate host buffer of that length.
    unsafe { std::ptr::copy_nonoverlapping(addr as *const u8, out.as_mut_ptr(), out.len()) }
}

/// Writes pageable host memory.
pub(super) fn write_host(addr: u64, bytes: &[u8]) {
    // SAFETY: as for `read_host`, with the range writable.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), addr as *mut u8, bytes.len()) }
}
