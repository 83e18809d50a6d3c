//! Device memory of a model: weights, KV cache, arena, scratch and control block, in one planned memory.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use refrain_driver::{
    Buf, Context, DriverError, Launch, Lease, Memory, MemoryLayout, Region, Ring, Staging, Stream,
};
use refrain_graph::{BufferId, Op, Operand, Place, Plan, State, StateKind, Step, Weight};
use refrain_kernels::{Edits, Kernels, PACKED_DTYPES, packed_bytes};
use refrain_tensor::{DType, HostTensor};

use crate::error::{CudaError, DisplayBytes, MemoryRefusal};
use crate::feed::{EDIT_BYTES, FEED_BYTES, MIN_PAYLOAD, RING_BYTES, RING_ENTRIES};
use crate::progress::{LoadEvent, LoadListener};
use crate::queue::MAX_QUEUED;
use crate::states::SCRATCH_SLOTS;
use crate::warm::Space;

mod unified; // GPUs that share the host's memory
mod upload; // uploads weights to the device

pub use upload::Upload;

/// Alignment of everything that kernels read from its start.
const ALIGN: u64 = 256;
/// Pinned slots for control blocks, edits and masks in transit, which bounds the steps in flight: a step with masks may
/// send two pieces of them and two edits.
const CONTROL_SLOTS: usize = MAX_QUEUED + 3;
/// Bytes of pinned memory into which kernels write a step's small results, so that reading them takes no
/// copy.
const RESULT_BYTES: u64 = 4096;
/// Each result gets its own cache line.
const RESULT_ALIGN: u64 = 64;
/// Maximum bytes packed at once, in whole tiles.
const PACK_BYTES: u64 = 32 << 20;
/// Rows of a tile.
const PACK_ROWS: usize = 8;

/// Bytes of the kernels' counters. The sampling state follows them.
pub(crate) const COUNTER_BYTES: u64 = 64 << 10;

/// A model in host memory.
#[derive(Debug, Default)]
pub(crate) struct HostModel {
    pub(crate) weights: Vec<Weight>,
    pub(crate) tensors: Vec<HostTensor>,
    pub(crate) states: Vec<State>,
    /// Names of weights that stay in pinned memory, which kernels read over the bus.
    pub(crate) pinned: Vec<String>,
}

/// Bytes on the device, by use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Accounting {
    /// Weights.
    pub weight_bytes: u64,
    /// KV cache, scratch blocks included.
    pub kv_bytes: u64,
    /// Values between ops.
    pub arena_bytes: u64,
    /// Kernel scratch and the control block.
    pub workspace_bytes: u64,
    /// Bytes that were free on the device before this was allocated.
    pub free_bytes: u64,
    /// Total bytes of the device.
    pub device_bytes: u64,
    /// Whether the device shares the host's memory instead of having its own.
    pub unified: bool,
    /// Bytes of weights in pinned host memory, which kernels read over the bus; they take no device memory.
    pub pinned_bytes: u64,
    /// Bytes of weights that unified memory holds a second time, on the host, because no file backs them; 0
    /// on a GPU with its own memory.
    pub host_weight_bytes: u64,
}

impl Accounting {
    /// Sum of all parts.
    #[must_use]
    pub fn total(&self) -> u64 {
        let parts = [self.weight_bytes, self.kv_bytes, self.arena_bytes, self.workspace_bytes];
        parts.iter().fold(0, |sum, b| sum.saturating_add(*b))
    }
}

/// Sizes of the memory that steps need in addition to weights and cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct StepMemory {
    pub(crate) arena: u64,
    pub(crate) scratch: u64,
    pub(crate) control: u64,
    /// State that sampling keeps between its two launches.
    pub(crate) choices: u64,
}

impl fmt::Display for StepMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (arena, workspace) = (DisplayBytes(self.arena), DisplayBytes(self.scratch + self.choices));
        write!(f, "{arena} of arena, {workspace} of workspace and {} of inputs", DisplayBytes(self.control))
    }
}

impl StepMemory {
    pub(crate) fn holds(&self, other: &StepMemory) -> bool {
        self.arena >= other.arena
            && self.scratch >= other.scratch
            && self.control >= other.control
            && self.choices >= other.choices
    }

    pub(crate) fn max(&self, other: &StepMemory) -> StepMemory {
        StepMemory {
            arena: self.arena.max(other.arena),
            scratch: self.scratch.max(other.scratch),
            control: self.control.max(other.control),
            choices: self.choices.max(other.choices),
        }
    }
}

#[derive(Clone, Copy, Debug)]
struct WeightPlacement {
    offset: u64,
    bytes: u64,
    dtype: DType,
    /// In the layout that product kernels read, not the file's.
    packed: bool,
    /// In pinned host memory.
    pinned: bool,
    shape: refrain_tensor::Shape,
}

/// Allocations of weights: one on the device, one in pinned memory.
#[derive(Clone, Copy, Debug)]
struct WeightRegions {
    device: Region,
    pinned: Region,
}

impl WeightRegions {
    fn inherit(self, layout: &mut MemoryLayout) -> WeightRegions {
        WeightRegions {
            device: layout.inherit("weights", self.device),
            pinned: layout.inherit("pinned weights", self.pinned),
        }
    }
}

/// Whether a weight is stored packed: a quantised matrix with a packed layout, or matrices of experts if each
/// consists of whole tiles.
pub(crate) fn packs(weight: &Weight) -> bool {
    let is_matrices = match *weight.ty.shape.dims() {
        [_, _] => true,
        [_, n, _] => n.is_multiple_of(PACK_ROWS),
        _ => false,
    };
    is_matrices && PACKED_DTYPES.contains(&weight.ty.dtype)
}

/// Rows and columns of a weight with two or more dimensions. Matrices of experts are stacked.
pub(crate) fn matrix(shape: &refrain_tensor::Shape) -> [usize; 2] {
    let k = shape.dim_back(0);
    [shape.n_elements() / k.max(1), k]
}

/// Bytes of scratch through which weights are packed: rows of a file are uploaded there in chunks.
fn staging_bytes(model: &HostModel) -> u64 {
    let bytes = |w: &Weight| {
        let row = w.ty.dtype.bytes_for(w.ty.shape.dim_back(0)).unwrap_or(0) as u64;
        let all = row.saturating_mul(matrix(&w.ty.shape)[0] as u64);
        all.min(PACK_BYTES).max(row.saturating_mul(PACK_ROWS as u64))
    };
    model.weights.iter().filter(|w| packs(w)).map(bytes).max().unwrap_or(0)
}

/// A state on the device: the pool's blocks, then scratch blocks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PlacedState {
    offset: u64,
    live_bytes: u64,
    scratch_bytes: u64,
    pub(crate) dtype: DType,
    pub(crate) kind: StateKind,
    /// Additional blocks of a paged cache, on which graphs are verified.
    pub(crate) n_scratch: usize,
}

/// Placement of weights and states.
#[derive(Clone, Debug, Default)]
pub(crate) struct Places {
    weights: Vec<Option<WeightPlacement>>,
    states: Vec<PlacedState>,
    weight_bytes: u64,
    pinned_bytes: u64,
    kv_bytes: u64,
    /// Free and total bytes of the device before anything is allocated.
    device: (u64, u64),
    unified: bool,
    host_weight_bytes: u64,
}

/// All device memory of a model. Dropping it frees the memory once no graph uses it.
pub(crate) struct ResidentMemory {
    places: Places,
    pub(crate) step_memory: StepMemory,
    pub(crate) space: Arc<Space>,
    pub(crate) lease: Lease,
    pub(crate) staging: Staging,
    /// Weights and states.
    regions: (WeightRegions, Region),
    weights: Buf,
    pinned: Buf,
    kv: Buf,
    arena: Buf,
    pub(crate) scratch: Buf,
    /// Run header in front of the control block: see the module `feed`.
    pub(crate) feed: Buf,
    pub(crate) control: Buf,
    /// Run header and control block.
    pub(crate) message: Buf,
    /// Staging area for edits of the message.
    pub(crate) edits: Buf,
    pub(crate) ring: Buf,
    /// Zero between launches: counting kernels, and sampling after the first [`COUNTER_BYTES`], leave it so.
    pub(crate) counters: Buf,
    results: Buf,
    /// The host's end of the ring, until it is taken.
    ring_end: Option<Ring>,
    /// Buffer for assembling a message, kept to reuse its memory.
    assembled: Vec<u8>,
    uploaded: Upload,
}

impl Places {
    /// `host_only` are indices of weights that only host steps read; they stay on the host.
    pub(crate) fn new(
        model: &HostModel,
        host_only: &[usize],
        scratch_blocks: usize,
    ) -> Result<Places, CudaError> {
        let too_large = || CudaError::Mismatch { what: "sizes", because: "they overflow".into() };
        let mut places = Places::default();
        for (idx, weight) in model.weights.iter().enumerate() {
            if host_only.contains(&idx) {
                places.weights.push(None);
                continue;
            }
            let dtype = if weight.ty.shape.rank() < 2 { DType::F32 } else { weight.ty.dtype };
            let (shape, packed) = (weight.ty.shape, packs(weight));
            let bytes = match packed {
                true => packed_bytes(dtype, matrix(&shape)[0], matrix(&shape)[1]),
                false => dtype.bytes_for(shape.n_elements()),
            };
            let bytes = bytes.ok_or_else(too_large)? as u64;
            let pinned = shape.rank() >= 2 && model.pinned.contains(&weight.name);
            let end = if pinned { &mut places.pinned_bytes } else { &mut places.weight_bytes };
            places.weights.push(Some(WeightPlacement { offset: *end, bytes, dtype, packed, pinned, shape }));
            *end = end.checked_add(bytes.next_multiple_of(ALIGN)).ok_or_else(too_large)?;
        }
        places.place_states(model, scratch_blocks)?;
        Ok(places)
    }

    /// The same weights, with the model's current states.
    pub(crate) fn with_states(&self, model: &HostModel, scratch_blocks: usize) -> Result<Places, CudaError> {
        let mut places = Places { states: Vec::new(), kv_bytes: 0, ..self.clone() };
        places.place_states(model, scratch_blocks)?;
        Ok(places)
    }

    fn place_states(&mut self, model: &HostModel, scratch_blocks: usize) -> Result<(), CudaError> {
        let too_large = || CudaError::Mismatch { what: "sizes", because: "they overflow".into() };
        let places = self;
        for state in &model.states {
            let (shape, dtype) = (state.ty.shape, state.ty.dtype);
            let live_bytes = dtype.bytes_for(shape.n_elements()).ok_or_else(too_large)? as u64;
            let (blocks, n_scratch) = match state.kind {
                StateKind::Paged => (shape.dims().first().copied(), scratch_blocks),
                StateKind::Slots => (shape.dims().first().copied(), SCRATCH_SLOTS),
                StateKind::Whole => (None, 0),
            };
            let n_scratch = blocks.filter(|n| *n > 0).map_or(0, |_| n_scratch);
            let block_bytes = live_bytes / blocks.unwrap_or(1).max(1) as u64;
            let scratch_bytes = block_bytes.checked_mul(n_scratch as u64).ok_or_else(too_large)?;
            let (offset, kind) = (places.kv_bytes, state.kind);
            places.states.push(PlacedState { offset, live_bytes, scratch_bytes, dtype, kind, n_scratch });
            let bytes = live_bytes.checked_add(scratch_bytes).map(|b| b.next_multiple_of(ALIGN));
            let end = bytes.and_then(|b| places.kv_bytes.checked_add(b));
            places.kv_bytes = end.ok_or_else(too_large)?;
        }
        Ok(())
    }

    /// Whether a weight stays on the host.
    pub(crate) fn is_host_only(&self, weight: usize) -> bool {
        matches!(self.weights.get(weight), Some(None))
    }

    /// Bytes of the states, and of the weights if `weights`.
    pub(crate) fn kept_bytes(&self, weights: bool) -> u64 {
        self.kv_bytes + if weights { self.weight_bytes } else { 0 }
    }

    fn accounting(&self, step_memory: &StepMemory) -> Accounting {
        Accounting {
            weight_bytes: self.weight_bytes,
            kv_bytes: self.kv_bytes,
            arena_bytes: step_memory.arena,
            workspace_bytes: step_memory.scratch
                + step_memory.control
                + FEED_BYTES
                + EDIT_BYTES
                + COUNTER_BYTES
                + step_memory.choices,
            free_bytes: self.device.0,
            device_bytes: self.device.1,
            unified: self.unified,
            pinned_bytes: self.pinned_bytes,
            host_weight_bytes: self.host_weight_bytes,
        }
    }
}

/// Weights and states that outlive a memory plan, in place. The next plan takes them over, so that a session
/// keeps its KV cache when a step needs more memory, and weights are not uploaded again.
pub(crate) struct RetainedModel {
    pub(crate) places: Places,
    lease: Lease,
    /// `None` if they have to be uploaded again.
    weights: Option<WeightRegions>,
    kv: Region,
    uploaded: Upload,
}

impl RetainedModel {
    /// Bytes that the next plan takes over.
    pub(crate) fn bytes(&self) -> u64 {
        self.places.kept_bytes(self.weights.is_some())
    }
}

impl RetainedModel {
    /// Moves the states to an allocation of another size. Contents are kept and added space is zero. On
    /// failure everything stays where it was.
    pub(crate) fn resize(
        self,
        ctx: &Context,
        stream: &mut Stream,
        places: Places,
        step_memory: StepMemory,
    ) -> Result<RetainedModel, (CudaError, Option<RetainedModel>)> {
        let failed = CudaError::driver("allocating states");
        let (free, total) = match ctx.mem_info() {
            Ok(info) => info,
            Err(error) => return Err((failed(error), Some(self))),
        };
        let weights_there = self.bytes() - self.places.kv_bytes;
        // Old and new states coexist during the copy; afterwards steps need their previous memory.
        let none = StepMemory::default();
        let both = fitting_memory(ctx, &places, [none, none], (weights_there, free, total));
        let after = free.saturating_add(self.places.kv_bytes);
        let fits = both.and_then(|_| {
            fitting_memory(ctx, &places, [step_memory, step_memory], (weights_there, after, total))
        });
        if let Err(error) = fits {
            return Err((error, Some(self)));
        }
        let mut layout = MemoryLayout::new("states of two sizes");
        let weights = self.weights.map(|regions| regions.inherit(&mut layout));
        let old = layout.inherit("old states", self.kv);
        let new = layout.device("kv", places.kv_bytes);
        let RetainedModel { places: old_places, lease, weights: old_weights, kv: old_kv, uploaded } = self;
        let mut lease = match lease.succeed(&layout) {
            Ok(lease) => lease,
            Err((lease, error)) => {
                let kept =
                    RetainedModel { places: old_places, lease, weights: old_weights, kv: old_kv, uploaded };
                return Err((failed(error), Some(kept)));
            }
        };
        let (from, to) = (lease.memory().buf(old), lease.memory().buf(new));
        let moved = stream
            .run(&mut lease, false, |q| {
                q.fill(to, 0)?;
                for (a, b) in old_places.states.iter().zip(&places.states) {
                    let bytes = a.live_bytes.min(b.live_bytes);
                    q.copy(to.slice(b.offset, bytes)?, from.slice(a.offset, bytes)?)?;
                }
                Ok(())
            })
            .map(|_| ())
            .and_then(|()| stream.synchronize());
        let (places, kv) = if moved.is_ok() { (places, new) } else { (old_places, old) };
        let kept = ResidentMemory::keep_regions(places, lease, weights, kv, uploaded);
        match (moved, kept) {
            (Ok(()), Ok(kept)) => Ok(kept),
            (Err(error), kept) => Err((CudaError::driver("moving states")(error), kept.ok())),
            (Ok(()), Err(error)) => Err((CudaError::driver("moving states")(error), None)),
        }
    }
}

/// Returns the larger of two sizes that fits, or an error if neither does. `taken_over` bytes are already on
/// the device.
pub(crate) fn fitting_memory(
    ctx: &Context,
    places: &Places,
    [needed, wanted]: [StepMemory; 2],
    (taken_over, free_bytes, total_bytes): (u64, u64, u64),
) -> Result<StepMemory, CudaError> {
    let fits = |step_memory: &StepMemory| {
        places.accounting(step_memory).total().saturating_sub(taken_over) <= free_bytes
    };
    if fits(&wanted) {
        return Ok(wanted);
    }
    if fits(&needed) {
        return Ok(needed);
    }
    let device = ctx.device();
    Err(CudaError::DoesNotFit(Box::new(MemoryRefusal {
        need: places.accounting(&needed),
        free_bytes: free_bytes.saturating_add(taken_over),
        total_bytes,
        device: format!("{}:{}", device.backend(), device.ordinal()),
        others: Vec::new(),
    })))
}

impl ResidentMemory {
    /// Allocates everything that is not retained, or refuses with the sizes before it allocates anything. The
    /// first of `candidates` is required, the second preferred. On failure, what was retained is returned.
    pub(crate) fn plan(
        ctx: &Context,
        stream: &mut Stream,
        model: &HostModel,
        mut places: Places,
        mut candidates: [StepMemory; 2],
        (kernels, listener): (&Kernels, &LoadListener),
        kept: Option<RetainedModel>,
    ) -> Result<ResidentMemory, (CudaError, Option<RetainedModel>)> {
        let staging =
            if kept.as_ref().is_some_and(|k| k.weights.is_some()) { 0 } else { staging_bytes(model) };
        candidates.iter_mut().for_each(|step_memory| step_memory.scratch = step_memory.scratch.max(staging));
        let taken_over = kept.as_ref().map_or(0, RetainedModel::bytes);
        let free = || ctx.mem_info().map_err(CudaError::driver("querying free memory"));
        let (mut free_bytes, total_bytes) = match free() {
            Ok(info) => info,
            Err(error) => return Err((error, kept)),
        };
        if ctx.device().info().unified {
            places.unified = true;
            places.host_weight_bytes = unified::kept_bytes(model, &places.weights);
            if places.accounting(&candidates[0]).total().saturating_sub(taken_over) > free_bytes {
                // The file's pages in the page cache do not count as free there.
                unified::evict(model.tensors.iter().zip(&places.weights));
                free_bytes = free().map_or(free_bytes, |info| info.0);
            }
        }
        places.device = (free_bytes.saturating_add(taken_over), total_bytes);
        let step_memory =
            match fitting_memory(ctx, &places, candidates, (taken_over, free_bytes, total_bytes)) {
                Ok(step_memory) => step_memory,
                Err(error) => {
                    listener.report(LoadEvent::Planned(places.accounting(&candidates[0])));
                    return Err((error, kept));
                }
            };
        let accounting = places.accounting(&step_memory);
        listener.report(LoadEvent::Planned(accounting));
        tracing::info!(
            "device memory: weights {}, KV cache {}, arena {}, workspace {} bytes; {taken_over} bytes in place, \
                        {free_bytes} free",
            accounting.weight_bytes,
            accounting.kv_bytes,
            accounting.arena_bytes,
            accounting.workspace_bytes
        );
        let has_weights = kept.as_ref().is_some_and(|k| k.weights.is_some());
        let has_states = kept.is_some();
        let mut resident = ResidentMemory::allocate(ctx, places, step_memory, kept)
            .map_err(|(error, kept)| (CudaError::driver("allocating device memory")(error), kept))?;
        let filled = resident.clear(stream, !has_states).and_then(|()| match has_weights {
            true => Ok(()),
            false => resident.upload(stream, model, kernels, listener),
        });
        match filled {
            Ok(()) => Ok(resident),
            // Without weights, only the states remain to continue with.
            Err(error) if has_states => Err((error, resident.keep(has_weights).ok())),
            Err(error) => Err((error, None)),
        }
    }

    fn allocate(
        ctx: &Context,
        places: Places,
        step_memory: StepMemory,
        kept: Option<RetainedModel>,
    ) -> Result<ResidentMemory, (DriverError, Option<RetainedModel>)> {
        let mut layout = MemoryLayout::new("model");
        let weights = match kept.as_ref().and_then(|k| k.weights) {
            Some(regions) => regions.inherit(&mut layout),
            None => WeightRegions {
                device: layout.device("weights", places.weight_bytes),
                pinned: layout.pinned("pinned weights", places.pinned_bytes),
            },
        };
        let kv = match &kept {
            Some(kept) => layout.inherit("kv", kept.kv),
            None => layout.device("kv", places.kv_bytes),
        };
        let sizes = [
            ("arena", step_memory.arena),
            ("scratch", step_memory.scratch),
            ("control", FEED_BYTES + step_memory.control),
            ("counters", COUNTER_BYTES + step_memory.choices),
            ("edits", EDIT_BYTES),
        ];
        let regions = sizes.map(|(name, bytes)| layout.device(name, bytes));
        let results = layout.pinned("results", RESULT_BYTES);
        let ring_region = layout.pinned("ring", RING_BYTES);
        let uploaded = kept.as_ref().map(|k| k.uploaded).unwrap_or_default();
        let has_states = kept.is_some();
        let has_weights = kept.as_ref().is_some_and(|k| k.weights.is_some());
        let lease = match kept {
            None => Memory::plan(ctx, &layout).and_then(|memory| memory.lease()).map_err(|e| (e, None))?,
            Some(kept) => {
                let RetainedModel { places, lease, weights, kv, uploaded } = kept;
                lease.succeed(&layout).map_err(|(lease, error)| {
                    (error, Some(RetainedModel { places, lease, weights, kv, uploaded }))
                })?
            }
        };
        let memory = Arc::clone(lease.memory());
        let [weights_buf, pinned_buf, kv_buf] = [weights.device, weights.pinned, kv].map(|r| memory.buf(r));
        let bufs = regions.map(|r| memory.buf(r));
        let results = memory.buf(results);
        let held = [("weights", weights_buf), ("pinned weights", pinned_buf), ("kv", kv_buf)];
        let others = sizes.iter().zip(bufs).map(|((name, _), buf)| (*name, buf));
        let names = held.into_iter().chain(others).map(|(name, buf)| (name.to_owned(), buf)).collect();
        let [arena, scratch, message, counters, edits] = bufs;
        let made = || -> Result<_, DriverError> {
            let ring_end = Ring::new(&memory, ring_region, RING_ENTRIES, MIN_PAYLOAD)?;
            let staging = Staging::new(ctx, CONTROL_SLOTS, (FEED_BYTES + step_memory.control) as usize)?;
            Ok((
                ring_end,
                staging,
                message.slice(0, FEED_BYTES)?,
                message.slice(FEED_BYTES, step_memory.control)?,
            ))
        };
        let (ring_end, staging, feed, control) = match made() {
            Ok(made) => made,
            Err(error) => {
                let weights = has_weights.then_some(weights);
                let kept =
                    has_states.then(|| ResidentMemory::keep_regions(places, lease, weights, kv, uploaded));
                return Err((error, kept.and_then(Result::ok)));
            }
        };
        let (ring, space) = (ring_end.buf(), Space::new(&memory, names));
        Ok(ResidentMemory {
            places,
            step_memory,
            space: Arc::new(space.with_results("results", results).with_ring("ring", ring)),
            lease,
            staging,
            regions: (weights, kv),
            weights: weights_buf,
            pinned: pinned_buf,
            kv: kv_buf,
            arena,
            scratch,
            feed,
            control,
            message,
            edits,
            ring,
            counters,
            results,
            ring_end: Some(ring_end),
            assembled: Vec::new(),
            uploaded,
        })
    }

    /// Releases everything but weights and states. Nothing may be in flight, and the other end of the ring
    /// must be gone.
    pub(crate) fn keep(self, weights: bool) -> Result<RetainedModel, DriverError> {
        let (weights_region, kv) = self.regions;
        let uploaded = if weights { self.uploaded } else { Upload::default() };
        let weights = weights.then_some(weights_region);
        ResidentMemory::keep_regions(self.places, self.lease, weights, kv, uploaded)
    }

    fn keep_regions(
        places: Places,
        lease: Lease,
        weights: Option<WeightRegions>,
        kv: Region,
        uploaded: Upload,
    ) -> Result<RetainedModel, DriverError> {
        let mut layout = MemoryLayout::new("weights and states");
        let weights = weights.map(|regions| regions.inherit(&mut layout));
        let kv = layout.inherit("kv", kv);
        // Nothing is allocated, so this fails only when the context is unusable.
        let lease = lease.succeed(&layout).map_err(|(_, error)| error)?;
        Ok(RetainedModel { places, lease, weights, kv, uploaded })
    }

    /// Zeroes newly allocated memory.
    fn clear(&mut self, stream: &mut Stream, states: bool) -> Result<(), CudaError> {
        let fresh = [self.arena, self.scratch, self.message, self.counters, self.edits];
        let kv = states.then_some(self.kv);
        let cleared = stream
            .run(&mut self.lease, false, |q| fresh.into_iter().chain(kv).try_for_each(|buf| q.fill(buf, 0)));
        cleared.map(|_| ()).map_err(CudaError::driver("clearing device memory"))
    }

    /// Bytes that are released when only weights and states are kept.
    pub(crate) fn transient_bytes(&self) -> u64 {
        let accounting = self.accounting();
        accounting.arena_bytes.saturating_add(accounting.workspace_bytes)
    }

    pub(crate) fn places(&self) -> &Places {
        &self.places
    }

    /// The host's end of the ring; can be taken once.
    pub(crate) fn ring_end(&mut self) -> Option<Ring> {
        self.ring_end.take()
    }

    /// Uploads a control block in stream order, preceded by a run's header if one is given.
    pub(crate) fn send_control(
        &mut self,
        stream: &mut Stream,
        header: Option<&[u8]>,
        control: &[u8],
    ) -> Result<(), DriverError> {
        let Some(header) = header else {
            let to = self.control.slice(0, control.len() as u64)?;
            return stream.stage(&mut self.lease, &mut self.staging, to, control);
        };
        self.assembled.clear();
        self.assembled.extend_from_slice(header);
        self.assembled.extend_from_slice(control);
        let start = FEED_BYTES.saturating_sub(header.len() as u64);
        let to = self.message.slice(start, self.assembled.len() as u64)?;
        stream.stage(&mut self.lease, &mut self.staging, to, &self.assembled)
    }

    /// Uploads edits and launches the kernel that applies them, in stream order. A single contiguous edit,
    /// such as the next block of a lone sequence, is copied directly to its destination.
    pub(crate) fn send_edits(
        &mut self,
        stream: &mut Stream,
        launch: &Launch,
        edits: &Edits,
    ) -> Result<(), DriverError> {
        let mut ranges = edits.ranges();
        if let (Some((to, words)), None) = (ranges.next(), ranges.next()) {
            let bytes: &[u8] = bytemuck::cast_slice(words);
            let to = self.message.slice(4 * to as u64, bytes.len() as u64)?;
            return stream.stage(&mut self.lease, &mut self.staging, to, bytes);
        }
        let message = edits.message();
        let bytes: &[u8] = bytemuck::cast_slice(&message);
        let to = self.edits.slice(0, bytes.len() as u64)?;
        stream.stage(&mut self.lease, &mut self.staging, to, bytes)?;
        stream.run(&mut self.lease, false, |q| q.launch(launch)).map(|_| ())
    }

    pub(crate) fn accounting(&self) -> Accounting {
        self.places.accounting(&self.step_memory)
    }

    /// Statistics of the weight upload.
    pub(crate) fn uploaded(&self) -> Upload {
        self.uploaded
    }

    /// The arena, which holds values between ops.
    pub(crate) fn arena(&self) -> Buf {
        self.arena
    }

    /// All states.
    pub(crate) fn states(&self) -> Buf {
        self.kv
    }

    /// Scratch blocks of each cache.
    pub(crate) fn n_scratch(&self) -> usize {
        let paged = self.places.states.iter().filter(|s| s.kind == StateKind::Paged);
        paged.map(|s| s.n_scratch).max().unwrap_or(0)
    }

    pub(crate) fn state(&self, idx: usize) -> PlacedState {
        self.places.states[idx]
    }

    /// A whole state, scratch blocks included.
    pub(crate) fn state_buf(&self, idx: usize) -> Result<Buf, DriverError> {
        let s = self.places.states[idx];
        self.kv.slice(s.offset, s.live_bytes + s.scratch_bytes)
    }

    pub(crate) fn state_scratch(&self, idx: usize) -> Result<Buf, DriverError> {
        let s = self.places.states[idx];
        self.kv.slice(s.offset + s.live_bytes, s.scratch_bytes)
    }

    pub(crate) fn state_live(&self, idx: usize) -> Result<Buf, DriverError> {
        let s = self.places.states[idx];
        self.kv.slice(s.offset, s.live_bytes)
    }

    /// Buffer of a weight.
    fn weight(&self, place: &WeightPlacement) -> Result<Buf, DriverError> {
        let region = if place.pinned { self.pinned } else { self.weights };
        region.slice(place.offset, place.bytes)
    }

    /// Buffer of a plan on the device; for a state, without its scratch blocks.
    pub(crate) fn buffer(&self, plan: &Plan, id: BufferId) -> Result<Buf, DriverError> {
        let buffer = plan.buffer(id);
        match buffer.place {
            Place::Arena { offset } => self.arena.slice(offset as u64, buffer.bytes as u64),
            Place::Control { offset, .. } => self.control.slice(offset as u64, buffer.bytes as u64),
            Place::Weight(w) => match self.places.weights.get(w.idx()) {
                Some(Some(place)) => self.weight(place),
                Some(None) | None => Err(DriverError::OutOfRange {
                    what: "the weights on the device".into(),
                    offset: w.idx() as u64,
                    len: 1,
                    bytes: self.places.weights.len() as u64,
                }),
            },
            Place::State(s) => self.state_live(s.idx()),
        }
    }

    /// Pinned locations for small outputs that device steps produce and nothing else on the device reads.
    pub(crate) fn results(&self, plan: &Plan) -> Result<HashMap<BufferId, Buf>, DriverError> {
        let on_host = |step: &Step| matches!(step.op, Op::HostCall(_));
        let mut places = HashMap::new();
        let mut end = 0;
        for operand in plan.outputs() {
            let (id, buffer) = (operand.buffer, plan.buffer(operand.buffer));
            let read = plan.steps().iter().any(|step| step.inputs.iter().any(|i| i.buffer == id));
            let mut makers = plan.steps().iter().filter(|step| step.outputs.iter().any(|o| o.buffer == id));
            let bytes = buffer.bytes as u64;
            let fits = end + bytes <= RESULT_BYTES && matches!(buffer.place, Place::Arena { .. });
            if fits && bytes > 0 && !read && !makers.any(on_host) && !places.contains_key(&id) {
                places.insert(id, self.results.slice(end, bytes)?);
                end = (end + bytes).next_multiple_of(RESULT_ALIGN);
            }
        }
        Ok(places)
    }

    /// Whether an operand is a weight in its packed layout.
    pub(crate) fn is_packed(&self, plan: &Plan, operand: &Operand) -> bool {
        let Place::Weight(w) = plan.buffer(operand.buffer).place else { return false };
        matches!(self.places.weights.get(w.idx()), Some(Some(WeightPlacement { packed: true, .. })))
    }

    /// Declared shape of a packed weight.
    pub(crate) fn packed_shape(&self, plan: &Plan, operand: &Operand) -> Option<refrain_tensor::Shape> {
        let Place::Weight(w) = plan.buffer(operand.buffer).place else { return None };
        self.places.weights.get(w.idx()).copied().flatten().filter(|p| p.packed).map(|p| p.shape)
    }

    /// Element type of an operand as stored on the device, where weight vectors are F32.
    pub(crate) fn dtype(&self, plan: &Plan, operand: &Operand) -> DType {
        match plan.buffer(operand.buffer).place {
            Place::Weight(w) => match self.places.weights.get(w.idx()) {
                Some(Some(place)) => place.dtype,
                Some(None) | None => operand.dtype,
            },
            Place::Arena { .. } | Place::Control { .. } | Place::State(_) => operand.dtype,
        }
    }
}
