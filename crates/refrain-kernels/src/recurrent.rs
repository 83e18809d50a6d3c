//! Recurrent layers: the short convolution and the gated delta rule.

use bytemuck::{Pod, Zeroable};
use refrain_driver::sim::{KernelResult, SimKernel};
use refrain_driver::{Baked, Buf, Launch};
use refrain_graph::{GatedDelta, KeyHeads, Op, Recurrent, ShortConv, TensorType};
use refrain_reference::{In, Out};
use refrain_tensor::{DType, Shape};

use crate::error::{KernelError, OpCase};
use crate::load::Kernels;
use crate::registry::{KernelEntry, P, W};
use crate::source::KernelFamily;
use crate::twin::{Dense, count, fault, read_rows};
use crate::view::{BufView, RowLayout};
use crate::vouch::Vouch;

/// Slots of a recurrent state, and the mapping of rows to slots. All integers are read at run time.
#[derive(Clone, Copy, Debug)]
pub struct SlotArgs {
    /// `[n_slots, ..]` F32, updated in place.
    pub state: Buf,
    /// `[n_tokens]` I32.
    pub positions: Buf,
    /// `[n_tokens]` I32.
    pub seqs: Buf,
    /// `[n_seqs, 2]` I32.
    pub slots: Buf,
    /// Number of rows.
    pub n_tokens: usize,
    /// Number of sequences.
    pub n_seqs: usize,
    /// Number of state slots.
    pub n_slots: usize,
}

/// Arguments of [`Recurrent::ShortConv`].
#[derive(Clone, Copy, Debug)]
pub struct ShortConvArgs<'a> {
    /// State `[n_slots, width - 1, d]`.
    pub slots: SlotArgs,
    /// `[n_tokens, d]` F32 with contiguous rows.
    pub x: BufView,
    /// `[width, d]` F32.
    pub w: Buf,
    /// `[n_tokens, d]` F32.
    pub y: Buf,
    /// Number of channels.
    pub d: usize,
    /// Filter width, from 2 to [`MAX_CONV_WIDTH`].
    pub width: usize,
    /// Op.
    pub conv: ShortConv,
    /// Name of the step that the launch belongs to.
    pub step: &'a str,
}

/// Arguments of [`Recurrent::GatedDelta`].
#[derive(Clone, Copy, Debug)]
pub struct GatedDeltaArgs<'a> {
    /// State `[n_slots, n_heads, v_dim, k_dim]`.
    pub slots: SlotArgs,
    /// `[n_tokens, n_key_heads, k_dim]` F32; each head is contiguous.
    pub q: BufView,
    /// Like `q`.
    pub k: BufView,
    /// `[n_tokens, n_heads, v_dim]` F32; each head is contiguous.
    pub v: BufView,
    /// `[n_tokens, n_heads]` F32 with contiguous rows.
    pub a: BufView,
    /// Like `a`.
    pub b: BufView,
    /// `[n_heads]` F32.
    pub decay: Buf,
    /// `[n_heads]` F32.
    pub dt_bias: Buf,
    /// `[n_tokens, n_heads, v_dim]` F32.
    pub y: Buf,
    /// Query and key heads; divides `n_heads`.
    pub n_key_heads: usize,
    /// Value heads.
    pub n_heads: usize,
    /// Elements per key, at most [`MAX_DELTA_KEY`].
    pub k_dim: usize,
    /// Elements per value.
    pub v_dim: usize,
    /// Op.
    pub delta: GatedDelta,
    /// Name of the step that the launch belongs to.
    pub step: &'a str,
}

/// Maximum filter width.
pub const MAX_CONV_WIDTH: usize = 8;
/// Maximum number of elements per key.
pub const MAX_DELTA_KEY: usize = 256;

const CONV_ROWS: usize = 32;
const CONV_BLOCK: usize = 128;
const DELTA_BLOCK: usize = 16;

#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
struct SlotSizes {
    n_tokens: u32,
    n_seqs: u32,
    n_slots: u32,
}

#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
struct DeltaSizes {
    n_key_heads: u32,
    n_heads: u32,
    k_dim: u32,
    v_dim: u32,
    is_tiled: u32,
    scale: f32,
    eps: f32,
}

/// Strides of queries, keys, values and the two gates.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
struct DeltaStrides([RowLayout; 5]);

impl SlotArgs {
    fn sizes(&self) -> SlotSizes {
        let [n_tokens, n_seqs, n_slots] = [self.n_tokens, self.n_seqs, self.n_slots].map(|n| n as u32);
        SlotSizes { n_tokens, n_seqs, n_slots }
    }

    /// Returns the checked state, positions, sequences and slots.
    fn check(&self, case: &OpCase<'_>, slot: &[usize]) -> Result<[Buf; 4], KernelError> {
        let state = [&[self.n_slots], slot].concat();
        crate::require!(case, self.n_seqs <= 65_535, "the grid takes at most 65535 sequences");
        Ok([
            case.words("state", self.state, &state)?,
            case.words("positions", self.positions, &[self.n_tokens])?,
            case.words("seqs", self.seqs, &[self.n_tokens])?,
            case.words("slots", self.slots, &[self.n_seqs, 2])?,
        ])
    }
}

impl Kernels {
    /// Builds the launch for [`ShortConvArgs`]. On a GPU, a slot out of range reads as zeros and is not
    /// written.
    pub fn short_conv(&self, a: &ShortConvArgs<'_>) -> Result<Launch, KernelError> {
        let (n, n_seqs) = (a.slots.n_tokens, a.slots.n_seqs);
        let shape =
            [("n", n), ("d", a.d), ("width", a.width), ("n_seqs", n_seqs), ("n_slots", a.slots.n_slots)];
        let case = OpCase { op: "short_conv", dtype: a.x.dtype, shape: &shape };
        case.sizes()?;
        crate::require!(
            case,
            (2..=MAX_CONV_WIDTH).contains(&a.width),
            "the filter width must be from 2 to {MAX_CONV_WIDTH}"
        );
        let (x, rows) = case.rows("x", &a.x, n, a.d)?;
        let [state, positions, seqs, slots] = a.slots.check(&case, &[a.width - 1, a.d])?;
        let n_parts = n.div_ceil(CONV_ROWS);
        crate::require!(case, n_parts <= 65_535, "the grid takes at most {} rows", 65_535 * CONV_ROWS);
        let grid = [a.d.div_ceil(CONV_BLOCK) as u32, n_seqs as u32, n_parts as u32];
        Ok(self
            .launch("recurrent_short_conv_f32", grid, CONV_BLOCK as u32)?
            .step(a.step)
            .write(case.words("y", a.y, &[n, a.d])?)
            .read_write(state)
            .read(x)
            .read(case.words("w", a.w, &[a.width, a.d])?)
            .read(positions)
            .read(seqs)
            .read(slots)
            .baked(Baked(rows))
            .baked(Baked(a.slots.sizes()))
            .baked(Baked(a.d as u32))
            .baked(Baked(a.width as u32))
            .baked(Baked(u32::from(a.conv.silu)))
            .vouch(&case))
    }

    /// Builds the launch for [`GatedDeltaArgs`]. On a GPU, a slot out of range reads as zeros and is not
    /// written.
    pub fn gated_delta(&self, a: &GatedDeltaArgs<'_>) -> Result<Launch, KernelError> {
        let (n, n_seqs) = (a.slots.n_tokens, a.slots.n_seqs);
        let shape = [
            ("n", n),
            ("n_key_heads", a.n_key_heads),
            ("n_heads", a.n_heads),
            ("k_dim", a.k_dim),
            ("v_dim", a.v_dim),
            ("n_seqs", n_seqs),
            ("n_slots", a.slots.n_slots),
        ];
        let case = OpCase { op: "gated_delta", dtype: a.q.dtype, shape: &shape };
        case.sizes()?;
        crate::require!(
            case,
            a.n_heads.is_multiple_of(a.n_key_heads),
            "n_heads must be a multiple of n_key_heads"
        );
        crate::require!(case, a.k_dim <= MAX_DELTA_KEY, "keys have at most {MAX_DELTA_KEY} elements");
        crate::require!(case, a.n_heads <= 65_535, "the grid takes at most 65535 heads");
        let (n_keys, n_values) = (n.saturating_mul(a.n_key_heads), n.saturating_mul(a.n_heads));
        let (q, q_rows) = case.rows("q", &a.q, n_keys, a.k_dim)?;
        let (k, k_rows) = case.rows("k", &a.k, n_keys, a.k_dim)?;
        let (v, v_rows) = case.rows("v", &a.v, n_values, a.v_dim)?;
        let (gate_a, a_rows) = case.rows("a", &a.a, n, a.n_heads)?;
        let (gate_b, b_rows) = case.rows("b", &a.b, n, a.n_heads)?;
        let [state, positions, seqs, slots] = a.slots.check(&case, &[a.n_heads, a.v_dim, a.k_dim])?;
        let grid = [a.v_dim.div_ceil(DELTA_BLOCK) as u32, a.n_heads as u32, n_seqs as u32];
        Ok(self
            .launch(&delta_name(registers(a.k_dim)), grid, 128)?
            .step(a.step)
            .write(case.words("y", a.y, &[n, a.n_heads, a.v_dim])?)
            .read_write(state)
            .read(q)
            .read(k)
            .read(v)
            .read(gate_a)
            .read(gate_b)
            .read(case.words("decay", a.decay, &[a.n_heads])?)
            .read(case.words("dt_bias", a.dt_bias, &[a.n_heads])?)
            .read(positions)
            .read(seqs)
            .read(slots)
            .baked(Baked(DeltaStrides([q_rows, k_rows, v_rows, a_rows, b_rows])))
            .baked(Baked(a.slots.sizes()))
            .baked(Baked(DeltaSizes {
                n_key_heads: a.n_key_heads as u32,
                n_heads: a.n_heads as u32,
                k_dim: a.k_dim as u32,
                v_dim: a.v_dim as u32,
                is_tiled: u32::from(a.delta.key_heads == KeyHeads::Tiled),
                scale: a.delta.scale,
                eps: a.delta.eps,
            }))
            .vouch(&case))
    }
}

/// Elements of a key per lane.
fn registers(k_dim: usize) -> usize {
    k_dim.div_ceil(32).next_power_of_two()
}

fn delta_name(n: usize) -> String {
    format!("recurrent_gated_delta_{n}_f32")
}

pub(crate) fn entries(all: &mut Vec<KernelEntry>) {
    let (rows, sizes) = (size_of::<RowLayout>(), size_of::<SlotSizes>());
    let params = [P, P, P, P, P, P, P, rows, sizes, W, W, W];
    all.push(KernelEntry::new(KernelFamily::Recurrent, "recurrent_short_conv_f32", &params, short_conv));
    let params =
        [P, P, P, P, P, P, P, P, P, P, P, P, size_of::<DeltaStrides>(), sizes, size_of::<DeltaSizes>()];
    for n in [1, 2, 4, 8] {
        all.push(KernelEntry::new(KernelFamily::Recurrent, delta_name(n), &params, gated_delta));
    }
}

fn ints(k: &SimKernel<'_>, param: usize, dims: &[usize]) -> KernelResult<Dense> {
    Dense::read(k, k.ptr(param)?, DType::I32, dims)
}

/// Runs the reference implementation over the state at parameter 1, and writes results and state.
fn run(
    k: &mut SimKernel<'_>,
    op: Recurrent,
    inputs: &[&Dense],
    y_dims: &[usize],
    state_dims: &[usize],
) -> KernelResult {
    let inputs: Vec<In<'_>> = inputs.iter().map(|input| input.input()).collect();
    let [y_shape, state_shape] = [Shape::new(y_dims), Shape::new(state_dims)].map(|s| s.map_err(fault));
    let (y_shape, state_shape) = (y_shape?, state_shape?);
    let mut y = vec![0f32; y_shape.n_elements()];
    let mut state: Vec<f32> = k.read(k.ptr(1)?, state_shape.n_elements())?;
    let out = |shape| TensorType { dtype: DType::F32, shape };
    let mut outputs = [
        Out { ty: out(y_shape), bytes: bytemuck::cast_slice_mut(&mut y) },
        Out { ty: out(state_shape), bytes: bytemuck::cast_slice_mut(&mut state) },
    ];
    refrain_reference::run(&Op::Recurrent(op), &inputs, &mut outputs).map_err(fault)?;
    k.write(k.ptr(0)?, &y)?;
    k.write(k.ptr(1)?, &state)
}

fn short_conv(k: &mut SimKernel<'_>) -> KernelResult {
    let (sizes, d, width) = (k.arg::<SlotSizes>(8)?, count(k, 9)?, count(k, 10)?);
    let [n, n_seqs, n_slots] = [sizes.n_tokens, sizes.n_seqs, sizes.n_slots].map(|n| n as usize);
    let x = Dense::f32(&read_rows(k, k.ptr(2)?, k.arg(7)?, n, d)?, &[n, d])?;
    let w = Dense::read(k, k.ptr(3)?, DType::F32, &[width, d])?;
    let (positions, seqs, slots) = (ints(k, 4, &[n])?, ints(k, 5, &[n])?, ints(k, 6, &[n_seqs, 2])?);
    let conv = ShortConv { silu: count(k, 11)? != 0 };
    let inputs = [&x, &w, &positions, &seqs, &slots];
    run(k, Recurrent::ShortConv(conv), &inputs, &[n, d], &[n_slots, width - 1, d])
}

fn gated_delta(k: &mut SimKernel<'_>) -> KernelResult {
    let (strides, sizes, s) = (k.arg::<DeltaStrides>(12)?, k.arg::<SlotSizes>(13)?, k.arg::<DeltaSizes>(14)?);
    let [n, n_seqs, n_slots] = [sizes.n_tokens, sizes.n_seqs, sizes.n_slots].map(|n| n as usize);
    let [n_key_heads, n_heads, k_dim, v_dim] =
        [s.n_key_heads, s.n_heads, s.k_dim, s.v_dim].map(|n| n as usize);
    let rows = |i: usize, heads: usize, dim: usize, dims: &[usize]| {
        Dense::f32(&read_rows(k, k.ptr(2 + i)?, strides.0[i], n * heads, dim)?, dims)
    };
    let (keys, values) = ([n, n_key_heads, k_dim], [n, n_heads, v_dim]);
    let (q, key, v) = (
        rows(0, n_key_heads, k_dim, &keys)?,
        rows(1, n_key_heads, k_dim, &keys)?,
        rows(2, n_heads, v_dim, &values)?,
    );
    let (a, b) = (rows(3, 1, n_heads, &[n, n_heads])?, rows(4, 1, n_heads, &[n, n_heads])?);
    let vector = |i: usize| Dense::read(k, k.ptr(i)?, DType::F32, &[n_heads]);
    let (decay, dt_bias) = (vector(7)?, vector(8)?);
    let (positions, seqs, slots) = (ints(k, 9, &[n])?, ints(k, 10, &[n])?, ints(k, 11, &[n_seqs, 2])?);
    let key_heads = if s.is_tiled != 0 { KeyHeads::Tiled } else { KeyHeads::Grouped };
    let delta = GatedDelta { scale: s.scale, eps: s.eps, key_heads };
    let inputs = [&q, &key, &v, &a, &b, &decay, &dt_bias, &positions, &seqs, &slots];
    run(k, Recurrent::GatedDelta(delta), &inputs, &values, &[n_slots, n_heads, v_dim, k_dim])
}
