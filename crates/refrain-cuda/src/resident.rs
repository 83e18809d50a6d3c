//! What lies on the device: weights, KV cache, arena, scratch and control block, in one planned memory.

use std::collections::HashMap;
use std::sync::Arc;

use refrain_driver::{Buf, Context, DriverError, Layout, Lease, Memory, Ring, Staging, Stream};
use refrain_graph::{BufferId, Op, Operand, Place, Plan, State, Step, Weight};
use refrain_kernels::{CommitEntry, Kernels, PACKED_DTYPES, packed_bytes};
use refrain_tensor::{DType, HostTensor};

use crate::error::CudaError;
use crate::feed::{FEED_BYTES, RING_BYTES, RING_ENTRIES};
use crate::progress::{LoadEvent, LoadListener};
use crate::warm::Space;

mod unified; // cards that share the host's memory
mod upload; // weights to the device

pub use upload::Upload;

/// Alignment of everything that kernels read whole.
const ALIGN: u64 = 256;
/// Pinned slots that control blocks travel through: as many steps may be under way.
const CONTROL_SLOTS: usize = 4;
/// Pinned bytes into which kernels write a step's few results, so that reading them takes no copy.
const RESULT_BYTES: u64 = 4096;
/// Each result has a cache line to itself.
const RESULT_ALIGN: u64 = 64;
/// What is packed at once, if it is whole tiles.
const PACK_BYTES: u64 = 32 << 20;
/// Rows of a tile.
const PACK_ROWS: usize = 8;

/// Counters of the kernels that have some. What choices keep lies behind them.
pub(crate) const COUNTER_BYTES: u64 = 16 << 10;

/// A model as the host holds it.
#[derive(Debug, Default)]
pub(crate) struct HostModel {
    pub(crate) weights: Vec<Weight>,
    pub(crate) tensors: Vec<HostTensor>,
    pub(crate) states: Vec<State>,
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
    shape: refrain_tensor::Shape,
}

/// Whether a weight is kept in its packed layout: a quantised matrix that has one.
pub(crate) fn packs(weight: &Weight) -> bool {
    weight.ty.shape.rank() == 2 && PACKED_DTYPES.contains(&weight.ty.dtype)
}

/// Bytes of scratch through which weights go to be packed: rows of a file are uploaded there, piece by piece.
fn staging_bytes(model: &HostModel) -> u64 {
    let bytes = |w: &Weight| {
        let row = w.ty.dtype.bytes_for(w.ty.shape.dim_back(0)).unwrap_or(0) as u64;
        let all = row.saturating_mul(w.ty.shape.dims()[0] as u64);
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
    /// Blocks of the pool and scratch blocks; 0 for a state that is no cache.
    pub(crate) n_blocks: usize,
    pub(crate) n_scratch: usize,
}

/// Where everything will lie.
#[derive(Debug, Default)]
struct Places {
    weights: Vec<Option<Placed>>,
    states: Vec<PlacedState>,
    weight_bytes: u64,
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
    weights: Buf,
    kv: Buf,
    arena: Buf,
    pub(crate) scratch: Buf,
    /// What lies in front of the control block: see the module `feed`.
    pub(crate) feed: Buf,
    pub(crate) control: Buf,
    /// Both of them.
    message: Buf,
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
    fn new(model: &HostModel, host_only: &[usize], scratch_blocks: usize) -> Result<Places, CudaError> {
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
                true => packed_bytes(dtype, shape.dims()[0], shape.dims()[1]),
                false => dtype.bytes_for(shape.n_elements()),
            };
            let bytes = bytes.ok_or_else(too_large)? as u64;
            places.weights.push(Some(Placed { offset: places.weight_bytes, bytes, dtype, packed, shape }));
            let end = places.weight_bytes.checked_add(bytes.next_multiple_of(ALIGN));
            places.weight_bytes = end.ok_or_else(too_large)?;
        }
        for state in &model.states {
            let (shape, dtype) = (state.ty.shape, state.ty.dtype);
            let live_bytes = dtype.bytes_for(shape.n_elements()).ok_or_else(too_large)? as u64;
            let is_cache = shape.rank() == 4 && shape.n_elements() > 0;
            let (n_blocks, n_scratch) = if is_cache { (shape.dims()[0], scratch_blocks) } else { (0, 0) };
            let scratch_bytes = if is_cache { live_bytes / n_blocks as u64 * n_scratch as u64 } else { 0 };
            let offset = places.kv_bytes;
            places.states.push(PlacedState { offset, live_bytes, scratch_bytes, dtype, n_blocks, n_scratch });
            let bytes = live_bytes.checked_add(scratch_bytes).map(|b| b.next_multiple_of(ALIGN));
            let end = bytes.and_then(|b| places.kv_bytes.checked_add(b));
            places.kv_bytes = end.ok_or_else(too_large)?;
        }
        Ok(places)
    }

    fn accounting(&self, room: &Room) -> Accounting {
        Accounting {
            weight_bytes: self.weight_bytes,
            kv_bytes: self.kv_bytes,
            arena_bytes: room.arena,
            workspace_bytes: room.scratch + room.control + FEED_BYTES + COUNTER_BYTES + room.choices,
            free_bytes: self.device.0,
            device_bytes: self.device.1,
            unified: self.unified,
            host_weight_bytes: self.host_weight_bytes,
        }
    }
}

impl Resident {
    /// Allocates everything, or refuses with the numbers before it allocates anything. `wanted` is what it would be
    /// good to have, `needed` what there must be.
    pub(crate) fn plan(
        ctx: &Context,
        stream: &mut Stream,
        model: &HostModel,
        host_only: &[usize],
        scratch_blocks: usize,
        mut rooms: [Room; 2],
        (kernels, listener): (&Kernels, &LoadListener),
    ) -> Result<Resident, CudaError> {
        let mut places = Places::new(model, host_only, scratch_blocks)?;
        rooms.iter_mut().for_each(|room| room.scratch = room.scratch.max(staging_bytes(model)));
        let [needed, wanted] = rooms;
        let free = || ctx.mem_info().map_err(CudaError::driver("asking for free memory"));
        places.device = free()?;
        if ctx.device().info().unified {
            places.unified = true;
            places.host_weight_bytes = unified::kept_bytes(model, &places.weights);
            if places.accounting(&needed).total() > places.device.0 {
                // What the system keeps of the file does not count as free there.
                unified::evict(model.tensors.iter().zip(&places.weights));
                places.device = free()?;
            }
        }
        let (free_bytes, total_bytes) = places.device;
        let fits = |room: &Room| places.accounting(room).total() <= free_bytes;
        let room = if fits(&wanted) { wanted } else { needed };
        let accounting = places.accounting(&room);
        listener.hear(LoadEvent::Planned(accounting));
        if !fits(&room) {
            let device = ctx.device();
            return Err(CudaError::DoesNotFit {
                need_bytes: accounting.total(),
                weight_bytes: accounting.weight_bytes,
                kv_bytes: accounting.kv_bytes,
                arena_bytes: accounting.arena_bytes,
                workspace_bytes: accounting.workspace_bytes,
                free_bytes,
                total_bytes,
                device: format!("{}:{}", device.backend(), device.ordinal()),
            });
        }
        tracing::info!(
            "device memory: weights {}, KV cache {}, arena {}, workspace {} bytes of {free_bytes} free",
            accounting.weight_bytes,
            accounting.kv_bytes,
            accounting.arena_bytes,
            accounting.workspace_bytes
        );
        let mut resident =
            Resident::allocate(ctx, places, room).map_err(CudaError::driver("allocating device memory"))?;
        resident.upload(stream, model, kernels, listener)?;
        Ok(resident)
    }

    fn allocate(ctx: &Context, places: Places, room: Room) -> Result<Resident, DriverError> {
        let mut layout = Layout::new("model");
        let sizes = [
            ("weights", places.weight_bytes),
            ("kv", places.kv_bytes),
            ("arena", room.arena),
            ("scratch", room.scratch),
            ("control", FEED_BYTES + room.control),
            ("counters", COUNTER_BYTES + room.choices),
        ];
        let regions = sizes.map(|(name, bytes)| layout.device(name, bytes));
        let results = layout.pinned("results", RESULT_BYTES);
        let ring_region = layout.pinned("ring", RING_BYTES);
        let memory = Memory::plan(ctx, &layout)?;
        let bufs = regions.map(|r| memory.buf(r));
        let results = memory.buf(results);
        let names = sizes.iter().zip(bufs).map(|((name, _), buf)| ((*name).to_owned(), buf)).collect();
        let [weights, kv, arena, scratch, message, counters] = bufs;
        let ring_end = Ring::new(&memory, ring_region, RING_ENTRIES, size_of::<CommitEntry>())?;
        let (ring, space) = (ring_end.buf(), Space::new(&memory, names));
        Ok(Resident {
            places,
            room,
            space: Arc::new(space.with_results("results", results).with_ring("ring", ring)),
            lease: memory.lease()?,
            staging: Staging::new(ctx, CONTROL_SLOTS, (FEED_BYTES + room.control) as usize)?,
            weights,
            kv,
            arena,
            scratch,
            feed: message.slice(0, FEED_BYTES)?,
            control: message.slice(FEED_BYTES, room.control)?,
            message,
            ring,
            counters,
            results,
            ring_end: Some(ring_end),
            assembled: Vec::new(),
            uploaded: Upload::default(),
        })
    }

    /// The host's end of the ring; once.
    pub(crate) fn ring_end(&mut self) -> Option<Ring> {
        self.ring_end.take()
    }

    /// Sends a control block, with what lies in front of it if that is given, in stream order.
    pub(crate) fn send_control(
        &mut self,
        stream: &mut Stream,
        header: Option<[u8; FEED_BYTES as usize]>,
        control: &[u8],
    ) -> Result<(), DriverError> {
        let Some(header) = header else {
            let to = self.control.slice(0, control.len() as u64)?;
            return stream.stage(&mut self.lease, &mut self.staging, to, control);
        };
        self.assembled.clear();
        self.assembled.extend_from_slice(&header);
        self.assembled.extend_from_slice(control);
        let to = self.message.slice(0, self.assembled.len() as u64)?;
        stream.stage(&mut self.lease, &mut self.staging, to, &self.assembled)
    }

    /// Sends a part of the control block.
    pub(crate) fn send_field(
        &mut self,
        stream: &mut Stream,
        offset: usize,
        bytes: &[u8],
    ) -> Result<(), DriverError> {
        let to = self.control.slice(offset as u64, bytes.len() as u64)?;
        stream.stage(&mut self.lease, &mut self.staging, to, bytes)
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

    /// True when a weight was left on the host.
    pub(crate) fn is_host_only(&self, weight: usize) -> bool {
        matches!(self.places.weights.get(weight), Some(None))
    }

    /// Scratch blocks of each cache.
    pub(crate) fn n_scratch(&self) -> usize {
        self.places.states.iter().map(|s| s.n_scratch).max().unwrap_or(0)
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

    fn state_live(&self, idx: usize) -> Result<Buf, DriverError> {
        let s = self.places.states[idx];
        self.kv.slice(s.offset, s.live_bytes)
    }

    /// A plan's buffer on the device; a state without its scratch blocks.
    pub(crate) fn buffer(&self, plan: &Plan, id: BufferId) -> Result<Buf, DriverError> {
        let buffer = plan.buffer(id);
        match buffer.place {
            Place::Arena { offset } => self.arena.slice(offset as u64, buffer.bytes as u64),
            Place::Control { offset, .. } => self.control.slice(offset as u64, buffer.bytes as u64),
            Place::Weight(w) => match self.places.weights.get(w.idx()) {
                Some(Some(place)) => self.weights.slice(place.offset, place.bytes),
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

    /// The pools' contents, to survive a new plan.
    pub(crate) fn save_states(&self, stream: &mut Stream) -> Result<Vec<Vec<u8>>, DriverError> {
        let mut save = |idx: usize| {
            let buf = self.state_live(idx)?;
            let mut bytes = vec![0; buf.len() as usize];
            stream.download(&self.lease, buf, &mut bytes)?;
            Ok(bytes)
        };
        (0..self.places.states.len()).map(&mut save).collect()
    }

    pub(crate) fn restore_states(
        &mut self,
        stream: &mut Stream,
        saved: &[Vec<u8>],
    ) -> Result<(), DriverError> {
        saved.iter().enumerate().try_for_each(|(idx, bytes)| {
            let buf = self.state_live(idx)?;
            stream.upload(&mut self.lease, buf, bytes)
        })
    }
}
