//! What lies on the device: weights, KV cache, arena, scratch and control block, in one planned memory.

use std::collections::HashMap;
use std::sync::Arc;

use refrain_driver::{
    Buf, Context, DriverError, Launch, Layout, Lease, Memory, Region, Ring, Staging, Stream,
};
use refrain_graph::{BufferId, Op, Operand, Place, Plan, State, StateKind, Step, Weight};
use refrain_kernels::{Edits, Kernels, PACKED_DTYPES, packed_bytes};
use refrain_tensor::{DType, HostTensor};

use crate::error::{CudaError, MemoryRefusal};
use crate::feed::{EDIT_BYTES, FEED_BYTES, RING_BYTES, RING_ENTRIES, payload_bytes};
use crate::progress::{LoadEvent, LoadListener};
use crate::queue::MAX_QUEUED;
use crate::states::SCRATCH_SLOTS;
use crate::warm::Space;

mod unified; // cards that share the host's memory
mod upload; // weights to the device

pub use upload::Upload;

/// Alignment of everything that kernels read whole.
const ALIGN: u64 = 256;
/// Pinned slots that control blocks travel through: as many steps may be under way.
const CONTROL_SLOTS: usize = MAX_QUEUED + 1;
/// Pinned bytes into which kernels write a step's few results, so that reading them takes no copy.
const RESULT_BYTES: u64 = 4096;
/// Each result has a cache line to itself.
const RESULT_ALIGN: u64 = 64;
/// What is packed at once, if it is whole tiles.
const PACK_BYTES: u64 = 32 << 20;
/// Rows of a tile.
const PACK_ROWS: usize = 8;

/// Counters of the kernels that have some. What choices keep lies behind them.
pub(crate) const COUNTER_BYTES: u64 = 64 << 10;

/// A model as the host holds it.
#[derive(Debug, Default)]
pub(crate) struct HostModel {
    pub(crate) weights: Vec<Weight>,
    pub(crate) tensors: Vec<HostTensor>,
    pub(crate) states: Vec<State>,
    /// Names of weights that stay in pinned memory, which kernels read over the bus.
    pub(crate) pinned: Vec<String>,
}

/// Bytes on the device, by what they are for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Accounting {
    /// Weights.
    pub weight_bytes: u64,
    /// KV cache, scratch blocks included.
    pub kv_bytes: u64,
    /// Values between ops.
    pub arena_bytes: u64,
    /// Scratch of kernels, and the control block.
    pub workspace_bytes: u64,
    /// Bytes that were free on the device when this was planned.
    pub free_bytes: u64,
    /// Bytes of the device.
    pub device_bytes: u64,
    /// Whether they are the host's: the device has no memory of its own.
    pub unified: bool,
    /// Bytes of weights in pinned memory of the host, which kernels read over the bus; none of the device's.
    pub pinned_bytes: u64,
    /// Bytes of weights that the host holds there besides, since no file backs them; 0 on a card with its own memory.
    pub host_weight_bytes: u64,
}

impl Accounting {
    /// All of it.
    #[must_use]
    pub fn total(&self) -> u64 {
        let parts = [self.weight_bytes, self.kv_bytes, self.arena_bytes, self.workspace_bytes];
        parts.iter().fold(0, |sum, b| sum.saturating_add(*b))
    }
}

/// How much room steps need besides weights and cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Room {
    pub(crate) arena: u64,
    pub(crate) scratch: u64,
    pub(crate) control: u64,
    /// What choices keep between their two launches.
    pub(crate) choices: u64,
}

impl Room {
    pub(crate) fn holds(&self, other: &Room) -> bool {
        self.arena >= other.arena
            && self.scratch >= other.scratch
            && self.control >= other.control
            && self.choices >= other.choices
    }

    pub(crate) fn max(&self, other: &Room) -> Room {
        Room {
            arena: self.arena.max(other.arena),
            scratch: self.scratch.max(other.scratch),
            control: self.control.max(other.control),
            choices: self.choices.max(other.choices),
        }
    }
}

#[derive(Clone, Copy, Debug)]
struct Placed {
    offset: u64,
    bytes: u64,
    dtype: DType,
    /// In the layout that products read, not the file's.
    packed: bool,
    /// In pinned memory of the host.
    pinned: bool,
    shape: refrain_tensor::Shape,
}

/// The two allocations of weights: on the device, and in pinned memory.
#[derive(Clone, Copy, Debug)]
struct WeightRegions {
    device: Region,
    pinned: Region,
}

impl WeightRegions {
    fn inherit(self, layout: &mut Layout) -> WeightRegions {
        WeightRegions {
            device: layout.inherit("weights", self.device),
            pinned: layout.inherit("pinned weights", self.pinned),
        }
    }
}

/// Whether a weight is kept in its packed layout: a quantised matrix that has one, or the matrices of experts, if each is
/// whole tiles.
pub(crate) fn packs(weight: &Weight) -> bool {
    let is_matrices = match *weight.ty.shape.dims() {
        [_, _] => true,
        [_, n, _] => n.is_multiple_of(PACK_ROWS),
        _ => false,
    };
    is_matrices && PACKED_DTYPES.contains(&weight.ty.dtype)
}

/// Rows and columns of a weight of two dimensions or more, the matrices of experts one after another.
pub(crate) fn matrix(shape: &refrain_tensor::Shape) -> [usize; 2] {
    let k = shape.dim_back(0);
    [shape.n_elements() / k.max(1), k]
}

/// Bytes of scratch through which weights go to be packed: rows of a file are uploaded there, piece by piece.
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
    /// Blocks of a paged cache beyond its pool, on which graphs are verified.
    pub(crate) n_scratch: usize,
}

/// Where everything will lie.
#[derive(Clone, Debug, Default)]
pub(crate) struct Places {
    weights: Vec<Option<Placed>>,
    states: Vec<PlacedState>,
    weight_bytes: u64,
    pinned_bytes: u64,
    kv_bytes: u64,
    /// Free bytes of the device and all of them, before anything is allocated.
    device: (u64, u64),
    unified: bool,
    host_weight_bytes: u64,
}

/// Everything on the device. Dropping it frees it, once the graphs over it are gone.
pub(crate) struct Resident {
    places: Places,
    pub(crate) room: Room,
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
    /// What lies in front of the control block: see the module `feed`.
    pub(crate) feed: Buf,
    pub(crate) control: Buf,
    /// Both of them.
    pub(crate) message: Buf,
    /// Changes of both on their way there.
    pub(crate) edits: Buf,
    pub(crate) ring: Buf,
    /// Zero between launches: kernels that count their blocks, and choices behind [`COUNTER_BYTES`], leave it so.
    pub(crate) counters: Buf,
    results: Buf,
    /// The host's end of the ring, until somebody takes it.
    ring_end: Option<Ring>,
    /// A message before it is sent, kept so that its memory is used again.
    assembled: Vec<u8>,
    uploaded: Upload,
}

impl Places {
    /// `host_only` names weights that only host steps read; they stay on the host.
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
            let pinned = shape.rank() == 2 && model.pinned.contains(&weight.name);
            let end = if pinned { &mut places.pinned_bytes } else { &mut places.weight_bytes };
            places.weights.push(Some(Placed { offset: *end, bytes, dtype, packed, pinned, shape }));
            *end = end.checked_add(bytes.next_multiple_of(ALIGN)).ok_or_else(too_large)?;
        }
        places.place_states(model, scratch_blocks)?;
        Ok(places)
    }

    /// The same weights with the states as the model has them now.
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

    /// True when a weight was left on the host.
    pub(crate) fn is_host_only(&self, weight: usize) -> bool {
        matches!(self.weights.get(weight), Some(None))
    }

    /// Bytes of states, and of weights where they are kept.
    pub(crate) fn kept_bytes(&self, weights: bool) -> u64 {
        self.kv_bytes + if weights { self.weight_bytes } else { 0 }
    }

    fn accounting(&self, room: &Room) -> Accounting {
        Accounting {
            weight_bytes: self.weight_bytes,
            kv_bytes: self.kv_bytes,
            arena_bytes: room.arena,
            workspace_bytes: room.scratch
                + room.control
                + FEED_BYTES
                + EDIT_BYTES
                + COUNTER_BYTES
                + room.choices,
            free_bytes: self.device.0,
            device_bytes: self.device.1,
            unified: self.unified,
            pinned_bytes: self.pinned_bytes,
            host_weight_bytes: self.host_weight_bytes,
        }
    }
}

/// Weights and states that outlive a new plan, where they are. A new plan takes them over, so that nothing a session
/// has evaluated is lost when a step needs more room, and nothing is sent again.
pub(crate) struct Kept {
    pub(crate) places: Places,
    lease: Lease,
    /// `None` when they have to be sent again.
    weights: Option<WeightRegions>,
    kv: Region,
    uploaded: Upload,
}

impl Kept {
    /// Bytes that a new plan takes over.
    pub(crate) fn bytes(&self) -> u64 {
        self.places.kept_bytes(self.weights.is_some())
    }
}

impl Kept {
    /// Moves the states to places of other sizes; what they hold goes along, what is added is zero. After a failure
    /// everything is where it was.
    pub(crate) fn resize(
        self,
        ctx: &Context,
        stream: &mut Stream,
        places: Places,
        room: Room,
    ) -> Result<Kept, (CudaError, Option<Kept>)> {
        let failed = CudaError::driver("making room for states");
        let (free, total) = match ctx.mem_info() {
            Ok(info) => info,
            Err(error) => return Err((failed(error), Some(self))),
        };
        let weights_there = self.bytes() - self.places.kv_bytes;
        // Old and new are there at once while one is copied to the other; behind that steps need the room they had.
        let none = Room::default();
        let beside = fitting_room(ctx, &places, [none, none], (weights_there, free, total));
        let after = free.saturating_add(self.places.kv_bytes);
        let fits =
            beside.and_then(|_| fitting_room(ctx, &places, [room, room], (weights_there, after, total)));
        if let Err(error) = fits {
            return Err((error, Some(self)));
        }
        let mut layout = Layout::new("states of two sizes");
        let weights = self.weights.map(|regions| regions.inherit(&mut layout));
        let old = layout.inherit("old states", self.kv);
        let new = layout.device("kv", places.kv_bytes);
        let Kept { places: old_places, lease, weights: old_weights, kv: old_kv, uploaded } = self;
        let mut lease = match lease.succeed(&layout) {
            Ok(lease) => lease,
            Err((lease, error)) => {
                let kept = Kept { places: old_places, lease, weights: old_weights, kv: old_kv, uploaded };
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
        let kept = Resident::keep_regions(places, lease, weights, kv, uploaded);
        match (moved, kept) {
            (Ok(()), Ok(kept)) => Ok(kept),
            (Err(error), kept) => Err((CudaError::driver("moving states")(error), kept.ok())),
            (Ok(()), Err(error)) => Err((CudaError::driver("moving states")(error), None)),
        }
    }
}

/// The roomier of two rooms that fits, or why neither does. `taken_over` bytes are on the device already.
pub(crate) fn fitting_room(
    ctx: &Context,
    places: &Places,
    [needed, wanted]: [Room; 2],
    (taken_over, free_bytes, total_bytes): (u64, u64, u64),
) -> Result<Room, CudaError> {
    let fits = |room: &Room| places.accounting(room).total().saturating_sub(taken_over) <= free_bytes;
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

impl Resident {
    /// Allocates everything that is not kept, or refuses with the numbers before it allocates anything. The first of
    /// `rooms` is what there must be, the second what it would be good to have. After a failure what was kept comes back.
    pub(crate) fn plan(
        ctx: &Context,
        stream: &mut Stream,
        model: &HostModel,
        mut places: Places,
        mut rooms: [Room; 2],
        (kernels, listener): (&Kernels, &LoadListener),
        kept: Option<Kept>,
    ) -> Result<Resident, (CudaError, Option<Kept>)> {
        let staging =
            if kept.as_ref().is_some_and(|k| k.weights.is_some()) { 0 } else { staging_bytes(model) };
        rooms.iter_mut().for_each(|room| room.scratch = room.scratch.max(staging));
        let taken_over = kept.as_ref().map_or(0, Kept::bytes);
        let free = || ctx.mem_info().map_err(CudaError::driver("asking for free memory"));
        let (mut free_bytes, total_bytes) = match free() {
            Ok(info) => info,
            Err(error) => return Err((error, kept)),
        };
        if ctx.device().info().unified {
            places.unified = true;
            places.host_weight_bytes = unified::kept_bytes(model, &places.weights);
            if places.accounting(&rooms[0]).total().saturating_sub(taken_over) > free_bytes {
                // What the system keeps of the file does not count as free there.
                unified::evict(model.tensors.iter().zip(&places.weights));
                free_bytes = free().map_or(free_bytes, |info| info.0);
            }
        }
        places.device = (free_bytes.saturating_add(taken_over), total_bytes);
        let room = match fitting_room(ctx, &places, rooms, (taken_over, free_bytes, total_bytes)) {
            Ok(room) => room,
            Err(error) => {
                listener.hear(LoadEvent::Planned(places.accounting(&rooms[0])));
                return Err((error, kept));
            }
        };
        let accounting = places.accounting(&room);
        listener.hear(LoadEvent::Planned(accounting));
        tracing::info!(
            "device memory: weights {}, KV cache {}, arena {}, workspace {} bytes; {taken_over} bytes are there, \
             {free_bytes} free",
            accounting.weight_bytes,
            accounting.kv_bytes,
            accounting.arena_bytes,
            accounting.workspace_bytes
        );
        let has_weights = kept.as_ref().is_some_and(|k| k.weights.is_some());
        let has_states = kept.is_some();
        let mut resident = Resident::allocate(ctx, places, room, kept)
            .map_err(|(error, kept)| (CudaError::driver("allocating device memory")(error), kept))?;
        let filled = resident.clear(stream, !has_states).and_then(|()| match has_weights {
            true => Ok(()),
            false => resident.upload(stream, model, kernels, listener),
        });
        match filled {
            Ok(()) => Ok(resident),
            // Without weights there is nothing but the states to go on with.
            Err(error) if has_states => Err((error, resident.keep(has_weights).ok())),
            Err(error) => Err((error, None)),
        }
    }

    fn allocate(
        ctx: &Context,
        places: Places,
        room: Room,
        kept: Option<Kept>,
    ) -> Result<Resident, (DriverError, Option<Kept>)> {
        let mut layout = Layout::new("model");
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
            ("arena", room.arena),
            ("scratch", room.scratch),
            ("control", FEED_BYTES + room.control),
            ("counters", COUNTER_BYTES + room.choices),
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
                let Kept { places, lease, weights, kv, uploaded } = kept;
                lease
                    .succeed(&layout)
                    .map_err(|(lease, error)| (error, Some(Kept { places, lease, weights, kv, uploaded })))?
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
            let ring_end = Ring::new(&memory, ring_region, RING_ENTRIES, payload_bytes(1))?;
            let staging = Staging::new(ctx, CONTROL_SLOTS, (FEED_BYTES + room.control) as usize)?;
            Ok((ring_end, staging, message.slice(0, FEED_BYTES)?, message.slice(FEED_BYTES, room.control)?))
        };
        let (ring_end, staging, feed, control) = match made() {
            Ok(made) => made,
            Err(error) => {
                let weights = has_weights.then_some(weights);
                let kept = has_states.then(|| Resident::keep_regions(places, lease, weights, kv, uploaded));
                return Err((error, kept.and_then(Result::ok)));
            }
        };
        let (ring, space) = (ring_end.buf(), Space::new(&memory, names));
        Ok(Resident {
            places,
            room,
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

    /// Gives up everything but weights and states. Nothing is in flight, and the ring's other end is gone.
    pub(crate) fn keep(self, weights: bool) -> Result<Kept, DriverError> {
        let (weights_region, kv) = self.regions;
        let uploaded = if weights { self.uploaded } else { Upload::default() };
        let weights = weights.then_some(weights_region);
        Resident::keep_regions(self.places, self.lease, weights, kv, uploaded)
    }

    fn keep_regions(
        places: Places,
        lease: Lease,
        weights: Option<WeightRegions>,
        kv: Region,
        uploaded: Upload,
    ) -> Result<Kept, DriverError> {
        let mut layout = Layout::new("weights and states");
        let weights = weights.map(|regions| regions.inherit(&mut layout));
        let kv = layout.inherit("kv", kv);
        // Nothing is allocated: this fails only where nothing works any more.
        let lease = lease.succeed(&layout).map_err(|(_, error)| error)?;
        Ok(Kept { places, lease, weights, kv, uploaded })
    }

    /// Zeroes what was allocated.
    fn clear(&mut self, stream: &mut Stream, states: bool) -> Result<(), CudaError> {
        let fresh = [self.arena, self.scratch, self.message, self.counters, self.edits];
        let kv = states.then_some(self.kv);
        let cleared = stream
            .run(&mut self.lease, false, |q| fresh.into_iter().chain(kv).try_for_each(|buf| q.fill(buf, 0)));
        cleared.map(|_| ()).map_err(CudaError::driver("clearing device memory"))
    }

    /// Bytes that are given back when only weights and states are kept.
    pub(crate) fn transient_bytes(&self) -> u64 {
        let accounting = self.accounting();
        accounting.arena_bytes.saturating_add(accounting.workspace_bytes)
    }

    pub(crate) fn places(&self) -> &Places {
        &self.places
    }

    /// The host's end of the ring; once.
    pub(crate) fn ring_end(&mut self) -> Option<Ring> {
        self.ring_end.take()
    }

    /// Sends a control block, with the header of a run in front of it if that is given, in stream order.
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

    /// Sends edits, and puts them in place with the launch for that, in stream order. A single piece, such as the next
    /// block of a sequence that is alone, goes straight to its place.
    pub(crate) fn send_edits(
        &mut self,
        stream: &mut Stream,
        launch: &Launch,
        edits: &Edits,
    ) -> Result<(), DriverError> {
        let mut pieces = edits.pieces();
        if let (Some((to, words)), None) = (pieces.next(), pieces.next()) {
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
        self.places.accounting(&self.room)
    }

    /// How its weights came here.
    pub(crate) fn uploaded(&self) -> Upload {
        self.uploaded
    }

    /// Where values between ops lie.
    pub(crate) fn arena(&self) -> Buf {
        self.arena
    }

    /// Where all states lie.
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

    /// The whole of a state, scratch blocks included.
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

    /// Where a weight lies.
    fn weight(&self, place: &Placed) -> Result<Buf, DriverError> {
        let region = if place.pinned { self.pinned } else { self.weights };
        region.slice(place.offset, place.bytes)
    }

    /// A plan's buffer on the device; a state without its scratch blocks.
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

    /// Places in pinned memory for small outputs that device steps make and nobody else on the device reads.
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
        matches!(self.places.weights.get(w.idx()), Some(Some(Placed { packed: true, .. })))
    }

    /// The shape that a packed weight was declared with.
    pub(crate) fn packed_shape(&self, plan: &Plan, operand: &Operand) -> Option<refrain_tensor::Shape> {
        let Place::Weight(w) = plan.buffer(operand.buffer).place else { return None };
        self.places.weights.get(w.idx()).copied().flatten().filter(|p| p.packed).map(|p| p.shape)
    }

    /// The element type of an operand as it lies on the device: vectors of weights are F32 there.
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
