//! Mixture of experts: routing, and products of rows with their chosen experts.

use bytemuck::{Pod, Zeroable};
use refrain_driver::api::DevicePtr;
use refrain_driver::sim::{KernelResult, SimKernel};
use refrain_driver::{Baked, Buf, Launch};
use refrain_graph::{ExpertActivation, Op, Route, RouteGroups, RouteScore};
use refrain_reference::route_row;
use refrain_tensor::{DType, quant};

use crate::card::Card;
use crate::error::{KernelError, OpCase};
use crate::few::round;
use crate::linear::LINEAR_DTYPES;
use crate::load::Kernels;
use crate::packed::{PACKED_DTYPES, TILE_ROWS, Unit, packed_bytes, unpack_row};
use crate::registry::{KernelEntry, P, W, lowercase};
use crate::source::KernelFamily;
use crate::twin::{Dense, count, fault, run_f32};
use crate::vouch::Vouch;

/// Maximum number of choices per row on a GPU.
pub const MAX_CHOICES: usize = 64;
/// Maximum number of expert groups of a router on a GPU.
pub const MAX_ROUTE_GROUPS: usize = 64;
/// Maximum number of experts of a router on a GPU.
pub const MAX_EXPERTS: usize = 4096;
/// Maximum number of elements of a row of [`Kernels::expert_logits`].
pub const MAX_ROUTED_ROW: usize = 8192;
/// Number of rows from which choices are sorted by expert. One read of a weight then serves up to eight
/// choices.
pub const MIN_SORTED_ROWS: usize = 16;

/// Choices of an expert that share one pass over a tile.
const AT_ONCE: usize = 8;
/// Static shared memory of the compiled code in bytes, rounded up.
const STATIC_BYTES: usize = 4096;
const SUB: usize = 32;

/// Routing: logits to `ids[n, n_choices]` and `weights[n, n_choices]`.
#[derive(Clone, Copy, Debug)]
pub struct RouteArgs<'a> {
    /// Routing rule.
    pub route: Route,
    /// `[n, n_experts]` F32.
    pub logits: Buf,
    /// `[n_experts]` F32, added to the scores when experts are chosen, but not to their weights.
    pub bias: Option<Buf>,
    /// `[n_experts]` F32, multiplied into the weights.
    pub scales: Option<Buf>,
    /// `[n]` I32; a row with a negative one is padding.
    pub positions: Option<Buf>,
    /// `[n, n_choices]` I32.
    pub ids: Buf,
    /// `[n, n_choices]` F32.
    pub weights: Buf,
    /// Number of rows.
    pub n: usize,
    /// Number of experts.
    pub n_experts: usize,
    /// Name of the step that the launch belongs to.
    pub step: &'a str,
}

/// The stacked matrices of all experts.
#[derive(Clone, Copy, Debug)]
pub struct ExpertWeight {
    /// `[n_experts, .., k]`: packed if the dtype has a packed layout, else in its file layout.
    pub w: Buf,
    /// Its dtype.
    pub dtype: DType,
    /// Rows of one expert's matrix. A product uses `n` of them, starting at `first`.
    pub rows: usize,
    /// First row of the product.
    pub first: usize,
    /// `[n_experts, rows]` F32, if any.
    pub bias: Option<Buf>,
}

/// Sizes of an expert product.
#[derive(Clone, Copy, Debug)]
pub struct ExpertSizes {
    /// Rows of the step.
    pub n_rows: usize,
    /// Choices per row.
    pub n_choices: usize,
    /// Number of experts.
    pub n_experts: usize,
    /// Output columns: rows of an expert's product.
    pub n: usize,
    /// Columns of a matrix.
    pub k: usize,
    /// Never sorts choices by expert, so that the same kernels run for any number of rows.
    pub is_fixed: bool,
}

impl ExpertSizes {
    /// Whether choices are sorted by expert, so that each expert is read once for all of its rows.
    const fn is_sorted(&self) -> bool {
        !self.is_fixed && self.n_rows >= MIN_SORTED_ROWS
    }
}

/// `y[row, choice] = f(x[row] . gate[expert]^T, x[row] . up[expert]^T)`.
#[derive(Clone, Copy, Debug)]
pub struct ExpertGateArgs<'a> {
    /// Activation that joins the two products.
    pub activation: ExpertActivation,
    /// `[n_rows, k]` F32.
    pub x: Buf,
    /// `[n_rows, n_choices]` I32.
    pub ids: Buf,
    /// Gate weights.
    pub gate: ExpertWeight,
    /// Up weights, with the dtype and rows of `gate`.
    pub up: ExpertWeight,
    /// `[n_rows, n_choices, n]` F32.
    pub y: Buf,
    /// Sizes.
    pub sizes: ExpertSizes,
    /// Scratch of [`expert_scratch_bytes`] bytes for two products.
    pub scratch: Option<Buf>,
    /// The router, if the launch is to write `ids` itself. Requires fewer than [`MIN_SORTED_ROWS`] rows, and
    /// that no buffer of the launch overlaps another.
    pub router: Option<GateRouter>,
    /// Name of the step that the launch belongs to.
    pub step: &'a str,
}

/// A router that runs within [`Kernels::expert_gate`]; see [`joins_gate`].
#[derive(Clone, Copy, Debug)]
pub struct GateRouter {
    /// Routing rule.
    pub route: Route,
    /// `[n_rows, n_experts]` F32.
    pub logits: Buf,
    /// `[n_experts]` F32, multiplied into the weights.
    pub scales: Option<Buf>,
    /// `[n_rows]` I32; a row with a negative one is padding.
    pub positions: Option<Buf>,
    /// `[n_rows, n_choices]` F32.
    pub weights: Buf,
}

/// Whether the launch of the gate can run a router.
#[must_use]
pub fn joins_gate(route: &Route) -> bool {
    !route.biased && route.groups.is_none()
}

/// A router's logits of one row, and the norm before them: with `s = a + b` or `a`, `x = rms_norm(s) * norm` and
/// `logits = x . w^T`. No two buffers overlap.
#[derive(Clone, Copy, Debug)]
pub struct ExpertLogitsArgs<'a> {
    /// `[k]` F32.
    pub a: Buf,
    /// `[k]` F32.
    pub b: Option<Buf>,
    /// `[k]` F32.
    pub norm: Buf,
    /// `[n_experts, k]` F32: a weight.
    pub w: Buf,
    /// `[k]` F32: receives `s`.
    pub sum: Option<Buf>,
    /// `[k]` F32.
    pub x: Buf,
    /// `[n_experts]` F32.
    pub logits: Buf,
    /// Number of experts.
    pub n_experts: usize,
    /// Elements of the row: a multiple of 4, at most [`MAX_ROUTED_ROW`].
    pub k: usize,
    /// Epsilon of the norm.
    pub eps: f32,
    /// Name of the step that the launch belongs to.
    pub step: &'a str,
}

/// `y[row] = sum over choices of weight * (x[row, choice] . down[expert]^T)`.
#[derive(Clone, Copy, Debug)]
pub struct ExpertSumArgs<'a> {
    /// `[n_rows, n_choices, k]` F32.
    pub x: Buf,
    /// `[n_rows, n_choices]` I32.
    pub ids: Buf,
    /// `[n_rows, n_choices]` F32.
    pub weights: Buf,
    /// Down weights.
    pub down: ExpertWeight,
    /// `[n_rows, n]` F32.
    pub y: Buf,
    /// Sizes.
    pub sizes: ExpertSizes,
    /// Scratch of [`expert_scratch_bytes`] bytes for one product.
    pub scratch: Option<Buf>,
    /// Name of the step that the launch belongs to.
    pub step: &'a str,
}

/// Scratch size of [`Kernels::expert_gate`] (two products) and [`Kernels::expert_sum`] (one); 0 if choices
/// are not sorted. `None` on overflow.
#[must_use]
pub fn expert_scratch_bytes(s: &ExpertSizes, n_products: usize) -> Option<u64> {
    if !s.is_sorted() {
        return Some(0);
    }
    let pairs = s.n_rows.checked_mul(s.n_choices)?;
    let products = pairs.checked_mul(s.n)?.checked_mul(4 * n_products)?;
    Some(products.checked_add(list_bytes(pairs, s.n_experts))? as u64)
}

/// Bytes of the sorted list of choices and the start offsets of the experts, rounded up to 16.
const fn list_bytes(pairs: usize, n_experts: usize) -> usize {
    (4 * (pairs + n_experts + 1)).next_multiple_of(16)
}

/// Whether expert kernels support this dtype.
#[must_use]
pub fn has_experts(dtype: DType) -> bool {
    LINEAR_DTYPES.contains(&dtype) || PACKED_DTYPES.contains(&dtype)
}

#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct ExpertParams {
    expert_bytes: u64,
    k: u32,
    n: u32,
    n_experts: u32,
    n_choices: u32,
    n_pairs: u32,
    bias_stride: u32,
    x_stride: u32,
    activation: ActivationParams,
}

/// The activation that joins gate and up, as `joined.cuh` takes it.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct ActivationParams {
    kind: u32,
    alpha: f32,
    limit: f32,
}

impl ActivationParams {
    pub(crate) fn of(activation: ExpertActivation) -> ActivationParams {
        match activation {
            ExpertActivation::Silu => ActivationParams { kind: 0, alpha: 0.0, limit: 0.0 },
            ExpertActivation::GeluTanh => ActivationParams { kind: 1, alpha: 0.0, limit: 0.0 },
            ExpertActivation::ClampedSilu { alpha, limit } => ActivationParams { kind: 2, alpha, limit },
        }
    }

    /// Joins the products of gate and up, for twins.
    pub(crate) fn join(self, gate: &[f32], up: &[f32]) -> Vec<f32> {
        let activation = match self.kind {
            0 => ExpertActivation::Silu,
            1 => ExpertActivation::GeluTanh,
            _ => ExpertActivation::ClampedSilu { alpha: self.alpha, limit: self.limit },
        };
        gate.iter().zip(up).map(|(&g, &u)| activation.apply(g.into(), u.into()) as f32).collect()
    }
}

/// Buffers of [`Kernels::expert_combine`].
pub(crate) struct Combined {
    /// `[n_rows, n]` F32.
    pub(crate) y: Buf,
    /// `[n_rows, n_choices, n]` F32.
    pub(crate) z: Buf,
    /// `[n_rows, n_choices]` I32.
    pub(crate) ids: Buf,
    /// `[n_rows, n_choices]` F32.
    pub(crate) weights: Buf,
    /// `[n_experts, n]` F32.
    pub(crate) bias: Option<Buf>,
}

#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
struct RouteParams {
    n_experts: u32,
    n_choices: u32,
    score: u32,
    n_groups: u32,
    n_kept: u32,
    n_best: u32,
    renormalise: u32,
    scale: f32,
}

/// A weight as kernel arguments: whole buffer, offset of the first row, and stride between experts.
pub(crate) struct PlacedExperts {
    pub(crate) all: Buf,
    pub(crate) start: u64,
    pub(crate) expert_bytes: u64,
}

/// Bytes of a row of x in shared memory.
fn row_bytes(dtype: DType, k: usize) -> usize {
    match Unit::of(dtype) {
        Some(unit) => k.next_multiple_of(unit.cols) / 4 * 5,
        None => 4 * k.next_multiple_of(8),
    }
}

pub(crate) fn weight_bytes(dtype: DType, n: usize, k: usize) -> Option<usize> {
    match PACKED_DTYPES.contains(&dtype) {
        true => packed_bytes(dtype, n, k),
        false => dtype.bytes_for(n.checked_mul(k)?).filter(|_| k.is_multiple_of(dtype.block_len())),
    }
}

impl Kernels {
    /// Builds the launch for [`RouteArgs`].
    pub fn route(&self, a: &RouteArgs<'_>) -> Result<Launch, KernelError> {
        let route = &a.route;
        let k = route.n_choices;
        let shape = [("n", a.n), ("n_experts", a.n_experts), ("n_choices", k)];
        let case = OpCase { op: "route", dtype: DType::F32, shape: &shape };
        case.sizes()?;
        crate::require!(case, k <= MAX_CHOICES, "a row has at most {MAX_CHOICES} choices");
        crate::require!(case, k <= a.n_experts, "{k} choices need at least {k} experts, got {}", a.n_experts);
        crate::require!(case, a.n_experts <= MAX_EXPERTS, "a router has at most {MAX_EXPERTS} experts");
        let groups = route.groups.unwrap_or(RouteGroups { n_groups: 0, n_kept: 0, n_best: 0 });
        crate::require!(
            case,
            groups.n_groups <= MAX_ROUTE_GROUPS,
            "a router has at most {MAX_ROUTE_GROUPS} groups"
        );
        let vector =
            |name, buf: Option<Buf>| buf.map(|buf| case.words(name, buf, &[a.n_experts])).transpose();
        let params = route_params(&case, route, a.n_experts)?;
        let mut launch = self
            .launch("expert_route_f32", case.u32("n", a.n)?, 128)?
            .shared(8 * a.n_experts as u32)
            .step(a.step)
            .write(case.words("ids", a.ids, &[a.n, k])?)
            .write(case.words("weights", a.weights, &[a.n, k])?)
            .read(case.words("logits", a.logits, &[a.n, a.n_experts])?);
        let positions = a.positions.map(|buf| case.words("positions", buf, &[a.n])).transpose()?;
        for vector in [vector("bias", a.bias)?, vector("scales", a.scales)?, positions] {
            launch = match vector {
                Some(vector) => launch.read(vector),
                None => launch.null(),
            };
        }
        Ok(launch.baked(Baked(params)).vouch(&case))
    }

    /// Pushes the launches for [`ExpertGateArgs`].
    pub fn expert_gate(&self, a: &ExpertGateArgs<'_>, launches: &mut Vec<Launch>) -> Result<(), KernelError> {
        let s = &a.sizes;
        let shape = shape(s);
        let case = OpCase { op: "expert_gate", dtype: a.gate.dtype, shape: &shape };
        self.check(&case, s, &[a.gate, a.up])?;
        let (gate, up) = (locate(&case, s, &a.gate)?, locate(&case, s, &a.up)?);
        let pairs = [s.n_rows, s.n_choices];
        let (n, dtype) = (s.n, a.gate.dtype);
        let x = case.buf("x", a.x, s.n_rows.checked_mul(s.k).and_then(|n| n.checked_mul(4)), 16)?;
        let ids = case.words("ids", a.ids, &pairs)?;
        let y = case.words("y", a.y, &[s.n_rows, s.n_choices, n])?;
        let mut params = params(&case, s, &a.gate, gate.expert_bytes, s.k)?;
        params.activation = ActivationParams::of(a.activation);
        let biases = [bias(&case, s, &a.gate)?, bias(&case, s, &a.up)?];
        if let Some(router) = &a.router {
            self.check_router(&case, s, dtype, router)?;
        }
        let tiles = n.div_ceil(TILE_ROWS);
        if !s.is_sorted() {
            let grid = [tiles.div_ceil(2) as u32, s.n_choices as u32, s.n_rows as u32];
            let logits = a.router.as_ref().map_or(0, |_| logits_bytes(s.n_experts));
            let mut launch = self
                .launch(&name("expert_gate", dtype), grid, 128)?
                .shared((row_bytes(dtype, s.k).next_multiple_of(16) + logits) as u32)
                .step(a.step)
                .write(y);
            launch = match &a.router {
                Some(router) => launch.write(ids).write(case.words("weights", router.weights, &pairs)?),
                None => launch.read(ids).null(),
            };
            launch = launch.read(x);
            launch = match &a.router {
                Some(router) => launch.read(case.words("logits", router.logits, &[s.n_rows, s.n_experts])?),
                None => launch.null(),
            };
            for w in [&gate, &up] {
                launch = launch.read(w.all.slice(w.start, w.all.len() - w.start)?);
            }
            let scales = a.router.as_ref().and_then(|router| router.scales);
            let scales = scales.map(|scales| case.words("scales", scales, &[s.n_experts])).transpose()?;
            let positions = a.router.as_ref().and_then(|router| router.positions);
            let positions = positions.map(|buf| case.words("positions", buf, &[s.n_rows])).transpose()?;
            for vector in [biases[0], biases[1], scales, positions] {
                launch = match vector {
                    Some(vector) => launch.read(vector),
                    None => launch.null(),
                };
            }
            let route = match &a.router {
                Some(router) => route_params(&case, &router.route, s.n_experts)?,
                None => RouteParams::zeroed(),
            };
            launches.push(launch.baked(Baked(route)).baked(Baked(params)).vouch(&case));
            return Ok(());
        }
        let z = self.sorted_rows(
            &case,
            s,
            (dtype, [Some(&gate), Some(&up)]),
            (x, ids, a.scratch),
            params,
            a.step,
            launches,
        )?;
        let grid = [n.div_ceil(256) as u32, params.n_pairs];
        let mut launch = self.launch("expert_join_f32", grid, 256)?.step(a.step).write(y).read(z).read(ids);
        for bias in biases {
            launch = match bias {
                Some(bias) => launch.read(bias),
                None => launch.null(),
            };
        }
        launches.push(launch.baked(Baked(params)).vouch(&case));
        Ok(())
    }

    /// Pushes the launches for [`ExpertSumArgs`].
    pub fn expert_sum(&self, a: &ExpertSumArgs<'_>, launches: &mut Vec<Launch>) -> Result<(), KernelError> {
        let s = &a.sizes;
        let shape = shape(s);
        let case = OpCase { op: "expert_sum", dtype: a.down.dtype, shape: &shape };
        self.check(&case, s, &[a.down])?;
        let down = locate(&case, s, &a.down)?;
        let (n, dtype, pairs) = (s.n, a.down.dtype, s.n_rows * s.n_choices);
        let x = case.buf("x", a.x, pairs.checked_mul(s.k).and_then(|n| n.checked_mul(4)), 16)?;
        let ids = case.words("ids", a.ids, &[pairs])?;
        let weights = case.words("weights", a.weights, &[pairs])?;
        let y = case.words("y", a.y, &[s.n_rows, n])?;
        let params = params(&case, s, &a.down, down.expert_bytes, s.k)?;
        let bias = bias(&case, s, &a.down)?;
        if !s.is_sorted() {
            let grid = [n.div_ceil(TILE_ROWS) as u32, s.n_rows as u32];
            let launch = self
                .launch(&name("expert_sum", dtype), grid, 256)?
                .shared((s.n_choices * row_bytes(dtype, s.k)) as u32)
                .step(a.step)
                .write(y)
                .read(x)
                .read(ids)
                .read(weights)
                .read(down.all);
            let launch = match bias {
                Some(bias) => launch.read(bias),
                None => launch.null(),
            };
            launches.push(launch.baked(Baked(params)).vouch(&case));
            return Ok(());
        }
        let each = ExpertParams { n_choices: 1, ..params };
        let z = self.sorted_rows(
            &case,
            s,
            (dtype, [Some(&down), None]),
            (x, ids, a.scratch),
            each,
            a.step,
            launches,
        )?;
        launches.push(self.expert_combine(
            &case,
            &Combined { y, z, ids, weights, bias },
            s,
            params,
            a.step,
        )?);
        Ok(())
    }

    /// Adds the products of the choices of each row.
    pub(crate) fn expert_combine(
        &self,
        case: &OpCase<'_>,
        of: &Combined,
        s: &ExpertSizes,
        params: ExpertParams,
        step: &str,
    ) -> Result<Launch, KernelError> {
        let grid = [s.n.div_ceil(256) as u32, case.u32("n_rows", s.n_rows)?];
        let launch = self
            .launch("expert_combine_f32", grid, 256)?
            .step(step)
            .write(of.y)
            .read(of.z)
            .read(of.ids)
            .read(of.weights);
        let launch = match of.bias {
            Some(bias) => launch.read(bias),
            None => launch.null(),
        };
        Ok(launch.baked(Baked(params)).vouch(case))
    }

    /// Multiplies all choices, sorted by expert: `[weights, pairs, n]`.
    #[expect(clippy::too_many_arguments, reason = "shared by two launchers")]
    fn sorted_rows(
        &self,
        case: &OpCase<'_>,
        s: &ExpertSizes,
        (dtype, weights): (DType, [Option<&PlacedExperts>; 2]),
        (x, ids, scratch): (Buf, Buf, Option<Buf>),
        params: ExpertParams,
        step: &str,
        launches: &mut Vec<Launch>,
    ) -> Result<Buf, KernelError> {
        let n_weights = weights.iter().flatten().count();
        let Some(bytes) = expert_scratch_bytes(s, n_weights) else {
            return Err(case.refuse("the scratch size overflows".to_owned()));
        };
        let Some(scratch) = scratch else {
            return Err(case.refuse(format!("{bytes} bytes of scratch are needed, none were passed")));
        };
        let scratch = case.buf("scratch", scratch, usize::try_from(bytes).ok(), 16)?;
        let pairs = s.n_rows * s.n_choices;
        let lists = list_bytes(pairs, s.n_experts) as u64;
        let order = scratch.slice(0, 4 * pairs as u64)?;
        let begin = scratch.slice(4 * pairs as u64, 4 * (s.n_experts as u64 + 1))?;
        let z = scratch.slice(lists, bytes - lists)?;
        let experts = case.u32("n_experts", s.n_experts)?;
        launches.push(
            self.launch("expert_sort_i32", experts, 256)?
                .step(step)
                .write(order)
                .write(begin)
                .read(ids)
                .baked(Baked(params.n_pairs))
                .vouch(case),
        );
        let grid = [s.n.div_ceil(8 * TILE_ROWS) as u32, experts, n_weights as u32];
        let mut launch = self
            .launch(&name("expert_rows", dtype), grid, 256)?
            .shared((AT_ONCE * row_bytes(dtype, s.k)) as u32)
            .step(step)
            .write(z)
            .read(x)
            .read(order)
            .read(begin);
        for w in weights {
            launch = match w {
                Some(w) => launch.read(w.all.slice(w.start, w.all.len() - w.start)?),
                None => launch.null(),
            };
        }
        launches.push(launch.baked(Baked(params)).vouch(case));
        Ok(z)
    }

    fn check(&self, case: &OpCase<'_>, s: &ExpertSizes, weights: &[ExpertWeight]) -> Result<(), KernelError> {
        case.sizes()?;
        let dtype = weights[0].dtype;
        crate::require!(case, has_experts(dtype), "no kernel supports experts of this dtype");
        crate::require!(case, s.n_choices <= MAX_CHOICES, "a row has at most {MAX_CHOICES} choices");
        crate::require!(case, s.n_experts <= 65_535, "the grid takes at most 65535 experts");
        let pairs = s.n_rows.saturating_mul(s.n_choices);
        crate::require!(case, pairs <= 65_535, "{pairs} choices in total, at most 65535 fit in one launch");
        let same_shape = weights.iter().all(|w| w.dtype == dtype && w.rows == weights[0].rows);
        crate::require!(case, same_shape, "both matrices must be of one dtype and shape");
        let need = self.shared_need(dtype, s);
        let limit = self.card().shared_limit.saturating_sub(STATIC_BYTES);
        crate::require!(
            case,
            need <= limit,
            "a block needs {need} bytes of shared memory, the GPU has {limit}"
        );
        Ok(())
    }

    fn check_router(
        &self,
        case: &OpCase<'_>,
        s: &ExpertSizes,
        dtype: DType,
        router: &GateRouter,
    ) -> Result<(), KernelError> {
        let route = &router.route;
        crate::require!(case, joins_gate(route), "a router with a bias or groups needs a launch of its own");
        crate::require!(case, s.n_rows < MIN_SORTED_ROWS, "sorted choices need a router of their own");
        crate::require!(case, s.n_experts <= MAX_EXPERTS, "a router has at most {MAX_EXPERTS} experts");
        crate::require!(
            case,
            route.n_choices == s.n_choices && s.n_choices <= s.n_experts,
            "the router makes {} choices among {} experts, the gate takes {}",
            route.n_choices,
            s.n_experts,
            s.n_choices
        );
        let need = row_bytes(dtype, s.k).next_multiple_of(16) + logits_bytes(s.n_experts);
        let limit = self.card().shared_limit.saturating_sub(STATIC_BYTES);
        crate::require!(
            case,
            need <= limit,
            "a block needs {need} bytes of shared memory, the GPU has {limit}"
        );
        Ok(())
    }

    /// Builds the launch for [`ExpertLogitsArgs`].
    pub fn expert_logits(&self, a: &ExpertLogitsArgs<'_>) -> Result<Launch, KernelError> {
        let shape = [("n_experts", a.n_experts), ("k", a.k)];
        let case = OpCase { op: "expert_logits", dtype: DType::F32, shape: &shape };
        case.sizes()?;
        crate::require!(
            case,
            a.k.is_multiple_of(4) && a.k <= MAX_ROUTED_ROW,
            "k must be a multiple of 4, at most {MAX_ROUTED_ROW}"
        );
        let row = |name, buf: Buf| case.buf(name, buf, Some(4 * a.k), 16);
        let mut launch = self
            .launch("expert_logits_f32", case.u32("n_experts", a.n_experts)?.div_ceil(4), 128)?
            .shared(4 * a.k as u32)
            .step(a.step)
            .write(case.words("logits", a.logits, &[a.n_experts])?)
            .write(row("x", a.x)?);
        launch = match a.sum {
            Some(sum) => launch.write(row("sum", sum)?),
            None => launch.null(),
        };
        launch = launch.read(row("a", a.a)?);
        launch = match a.b {
            Some(b) => launch.read(row("b", b)?),
            None => launch.null(),
        };
        let bytes = a.n_experts.checked_mul(a.k).and_then(|n| n.checked_mul(4));
        Ok(launch
            .read(row("norm", a.norm)?)
            .read(case.buf("w", a.w, bytes, 16)?)
            .baked(Baked(a.n_experts as u32))
            .baked(Baked(a.k as u32))
            .baked(Baked(a.eps))
            .vouch(&case))
    }

    fn shared_need(&self, dtype: DType, s: &ExpertSizes) -> usize {
        let rows = if !s.is_sorted() { s.n_choices } else { AT_ONCE };
        rows * row_bytes(dtype, s.k)
    }
}

fn shape(s: &ExpertSizes) -> [(&'static str, usize); 5] {
    [("n_rows", s.n_rows), ("n_choices", s.n_choices), ("n_experts", s.n_experts), ("n", s.n), ("k", s.k)]
}

pub(crate) fn locate(
    case: &OpCase<'_>,
    s: &ExpertSizes,
    w: &ExpertWeight,
) -> Result<PlacedExperts, KernelError> {
    let packed = PACKED_DTYPES.contains(&w.dtype);
    let whole_tiles = w.rows.is_multiple_of(TILE_ROWS) && w.first.is_multiple_of(TILE_ROWS);
    crate::require!(case, !packed || whole_tiles, "the rows of an expert must be a multiple of {TILE_ROWS}");
    let inside = w.first.checked_add(s.n).is_some_and(|end| end <= w.rows);
    crate::require!(case, inside, "{} rows from row {} exceed the {} of an expert", s.n, w.first, w.rows);
    let bytes = |rows| weight_bytes(w.dtype, rows, s.k);
    let (Some(expert), Some(start)) = (bytes(w.rows), bytes(w.first)) else {
        return Err(case.refuse("a row ends inside a quantisation block".to_owned()));
    };
    let all = case.buf("w", w.w, s.n_experts.checked_mul(expert), 16)?;
    Ok(PlacedExperts { all, start: start as u64, expert_bytes: expert as u64 })
}

pub(crate) fn bias(case: &OpCase<'_>, s: &ExpertSizes, w: &ExpertWeight) -> Result<Option<Buf>, KernelError> {
    let Some(bias) = w.bias else { return Ok(None) };
    let all = case.words("bias", bias, &[s.n_experts, w.rows])?;
    Ok(Some(all.slice(4 * w.first as u64, all.len() - 4 * w.first as u64)?))
}

pub(crate) fn params(
    case: &OpCase<'_>,
    s: &ExpertSizes,
    w: &ExpertWeight,
    expert_bytes: u64,
    x_stride: usize,
) -> Result<ExpertParams, KernelError> {
    Ok(ExpertParams {
        expert_bytes,
        k: case.u32("k", s.k)?,
        n: case.u32("n", s.n)?,
        n_experts: case.u32("n_experts", s.n_experts)?,
        n_choices: case.u32("n_choices", s.n_choices)?,
        n_pairs: case.u32("n_pairs", s.n_rows * s.n_choices)?,
        bias_stride: case.u32("rows", w.rows)?,
        x_stride: case.u32("k", x_stride)?,
        activation: ActivationParams::of(ExpertActivation::Silu),
    })
}

fn route_params(case: &OpCase<'_>, route: &Route, n_experts: usize) -> Result<RouteParams, KernelError> {
    let groups = route.groups.unwrap_or(RouteGroups { n_groups: 0, n_kept: 0, n_best: 0 });
    Ok(RouteParams {
        n_experts: case.u32("n_experts", n_experts)?,
        n_choices: case.u32("n_choices", route.n_choices)?,
        score: match route.score {
            RouteScore::Softmax => 0,
            RouteScore::Sigmoid => 1,
            RouteScore::SoftmaxOfChosen => 2,
        },
        n_groups: groups.n_groups as u32,
        n_kept: groups.n_kept as u32,
        n_best: groups.n_best as u32,
        renormalise: u32::from(route.renormalise),
        scale: route.scale,
    })
}

/// Bytes of a row's logits in shared memory.
const fn logits_bytes(n_experts: usize) -> usize {
    4 * n_experts.next_multiple_of(4)
}

fn name(kernel: &str, dtype: DType) -> String {
    format!("{kernel}_{}", lowercase(dtype))
}

pub(crate) fn entries(all: &mut Vec<KernelEntry>) {
    const R: usize = size_of::<RouteParams>();
    const S: usize = size_of::<ExpertParams>();
    let shared = |card: &Card| card.shared_limit.saturating_sub(STATIC_BYTES) as u32;
    let entry = |name: &str, params: &[usize], twin: fn(&mut SimKernel<'_>) -> KernelResult| {
        KernelEntry::new(KernelFamily::Experts, name, params, twin)
    };
    all.push(
        entry("expert_route_f32", &[P, P, P, P, P, P, R], route_twin)
            .unit("route")
            .shared(|_| 8 * MAX_EXPERTS as u32),
    );
    all.push(
        entry("expert_logits_f32", &[P, P, P, P, P, P, P, W, W, W], logits_twin)
            .unit("route")
            .shared(|_| 4 * MAX_ROUTED_ROW as u32),
    );
    all.push(entry("expert_sort_i32", &[P, P, P, W], sort_twin).unit("sort"));
    all.push(entry("expert_join_f32", &[P, P, P, P, P, S], join_twin).unit("finish"));
    all.push(entry("expert_combine_f32", &[P, P, P, P, P, S], combine_twin).unit("finish"));
    for dtype in LINEAR_DTYPES.into_iter().chain(PACKED_DTYPES) {
        let unit = lowercase(dtype);
        let gate = KernelEntry::new(
            KernelFamily::Experts,
            name("expert_gate", dtype),
            &[P, P, P, P, P, P, P, P, P, P, P, R, S],
            move |k| gate_twin(k, dtype),
        );
        let sum = KernelEntry::new(
            KernelFamily::Experts,
            name("expert_sum", dtype),
            &[P, P, P, P, P, P, S],
            move |k| sum_twin(k, dtype),
        );
        let rows = KernelEntry::new(
            KernelFamily::Experts,
            name("expert_rows", dtype),
            &[P, P, P, P, P, P, S],
            move |k| rows_twin(k, dtype),
        );
        all.extend([gate, sum, rows].map(|entry| entry.unit(&unit).shared(shared)));
    }
}

fn route_twin(k: &mut SimKernel<'_>) -> KernelResult {
    let (p, n): (RouteParams, usize) = (k.arg(6)?, k.config().grid[0] as usize);
    let at = RouteOperands { ids: 0, weights: 1, logits: 2, bias: Some(3), scales: 4, positions: 5 };
    write_routes(k, p, n, at)
}

/// Arguments of a router.
struct RouteOperands {
    ids: usize,
    weights: usize,
    logits: usize,
    bias: Option<usize>,
    scales: usize,
    positions: usize,
}

fn write_routes(k: &mut SimKernel<'_>, p: RouteParams, n: usize, at: RouteOperands) -> KernelResult {
    let (n_experts, n_choices) = (p.n_experts as usize, p.n_choices as usize);
    let vector = |k: &SimKernel<'_>, i: usize| -> KernelResult<Option<Vec<f32>>> {
        let at = k.ptr(i)?;
        if at.0 == 0 { Ok(None) } else { k.read(at, n_experts).map(Some) }
    };
    let bias = at.bias.map(|bias| vector(k, bias)).transpose()?.flatten();
    let scales = vector(k, at.scales)?;
    let groups =
        RouteGroups { n_groups: p.n_groups as usize, n_kept: p.n_kept as usize, n_best: p.n_best as usize };
    let route = Route {
        n_choices,
        score: [RouteScore::Softmax, RouteScore::Sigmoid, RouteScore::SoftmaxOfChosen][p.score as usize % 3],
        biased: bias.is_some(),
        scaled: scales.is_some(),
        groups: (p.n_groups > 0).then_some(groups),
        renormalise: p.renormalise != 0,
        scale: p.scale,
    };
    let logits: Vec<f32> = k.read(k.ptr(at.logits)?, n * n_experts)?;
    let positions: Vec<i32> = match k.ptr(at.positions)? {
        DevicePtr(0) => vec![0; n],
        positions => k.read(positions, n)?,
    };
    let (mut ids, mut weights) = (Vec::new(), Vec::new());
    for (row, position) in logits.chunks_exact(n_experts).zip(positions) {
        let chosen = route_row(&route, row, bias.as_deref(), scales.as_deref());
        let is_padding = position < 0;
        ids.extend(chosen.iter().map(|(id, _)| if is_padding { -1 } else { *id as i32 }));
        weights.extend(chosen.iter().map(|(_, weight)| if is_padding { 0.0 } else { *weight }));
    }
    k.write(k.ptr(at.ids)?, &ids)?;
    k.write(k.ptr(at.weights)?, &weights)
}

fn logits_twin(k: &mut SimKernel<'_>) -> KernelResult {
    let (n_experts, cols, eps) = (count(k, 7)?, count(k, 8)?, k.arg(9)?);
    k.before_wait(|k| k.view::<f32>(k.ptr(6)?, n_experts * cols).map(|_| ()))?;
    let mut sum: Vec<f32> = k.read(k.ptr(3)?, cols)?;
    if k.ptr(4)?.0 != 0 {
        let b: Vec<f32> = k.read(k.ptr(4)?, cols)?;
        sum.iter_mut().zip(&b).for_each(|(a, b)| *a += b);
    }
    if k.ptr(2)?.0 != 0 {
        k.write(k.ptr(2)?, &sum)?;
    }
    let norm = Dense::read(k, k.ptr(5)?, DType::F32, &[cols])?;
    let x = run_f32(&Op::RmsNorm { eps }, &[&Dense::f32(&sum, &[1, cols])?, &norm], &[1, cols])?;
    let w: Vec<f32> = k.read(k.ptr(6)?, n_experts * cols)?;
    let dot = |w: &[f32]| x.iter().zip(w).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum::<f64>() as f32;
    k.write(k.ptr(0)?, &w.chunks_exact(cols).map(dot).collect::<Vec<f32>>())?;
    k.write(k.ptr(1)?, &x)
}

/// Returns the expert of a choice if the id is valid.
fn chosen(id: i32, p: &ExpertParams) -> Option<usize> {
    usize::try_from(id).ok().filter(|id| *id < p.n_experts as usize)
}

/// Returns a row as the kernel multiplies it: rounded to 8 bits for packed weights.
fn as_multiplied(dtype: DType, x: &[f32]) -> Vec<f32> {
    if !PACKED_DTYPES.contains(&dtype) {
        return x.to_vec();
    }
    let blocks = x.chunks(SUB).flat_map(|block| {
        let (q, d) = round(block);
        q.map(|q| f32::from(q) * d)
    });
    blocks.take(x.len()).collect()
}

/// Products of one row with an expert.
fn products(
    k: &SimKernel<'_>,
    dtype: DType,
    w: usize,
    p: &ExpertParams,
    expert: usize,
    x: &[f32],
) -> KernelResult<Vec<f32>> {
    let (n, cols) = (p.n as usize, p.k as usize);
    let partial = || fault("a row ends inside a quantisation block");
    let bytes = weight_bytes(dtype, n, cols).ok_or_else(partial)?;
    let w = k.view::<u8>(k.ptr(w)?.add(expert as u64 * p.expert_bytes), bytes)?;
    let x = as_multiplied(dtype, x);
    let mut row = vec![0.0; cols];
    let mut y = Vec::with_capacity(n);
    for i in 0..n {
        match PACKED_DTYPES.contains(&dtype) {
            true => unpack_row(dtype, &w, i, cols, &mut row).ok_or_else(partial)?,
            false => {
                let size = bytes / n;
                quant::dequantize(dtype, &w[i * size..(i + 1) * size], &mut row).map_err(fault)?;
            }
        }
        let dot: f64 = x.iter().zip(&row).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum();
        y.push(dot as f32);
    }
    Ok(y)
}

fn add_bias(k: &SimKernel<'_>, arg: usize, p: &ExpertParams, expert: usize, y: &mut [f32]) -> KernelResult {
    add_bias_at(k, arg, expert * p.bias_stride as usize, y)
}

/// Adds elements `at` and following of argument `arg`, unless that is null.
pub(crate) fn add_bias_at(k: &SimKernel<'_>, arg: usize, at: usize, y: &mut [f32]) -> KernelResult {
    let bias = k.ptr(arg)?;
    if bias.0 == 0 {
        return Ok(());
    }
    let bias: Vec<f32> = k.read(bias.add(4 * at as u64), y.len())?;
    y.iter_mut().zip(&bias).for_each(|(y, b)| *y += b);
    Ok(())
}

fn gate_twin(k: &mut SimKernel<'_>, dtype: DType) -> KernelResult {
    let p: ExpertParams = k.arg(12)?;
    let (n, cols) = (p.n as usize, p.k as usize);
    if k.ptr(4)?.0 != 0 {
        let at = RouteOperands { ids: 1, weights: 2, logits: 4, bias: None, scales: 9, positions: 10 };
        write_routes(k, k.arg(11)?, k.config().grid[2] as usize, at)?;
    }
    let ids: Vec<i32> = k.read(k.ptr(1)?, p.n_pairs as usize)?;
    let mut y = vec![0.0_f32; ids.len() * n];
    for (pair, (&id, y)) in ids.iter().zip(y.chunks_exact_mut(n)).enumerate() {
        let Some(expert) = chosen(id, &p) else { continue };
        let row = pair / p.n_choices as usize * p.x_stride as usize;
        let x: Vec<f32> = k.read(k.ptr(3)?.add(4 * row as u64), cols)?;
        let mut gate = products(k, dtype, 5, &p, expert, &x)?;
        let mut up = products(k, dtype, 6, &p, expert, &x)?;
        add_bias(k, 7, &p, expert, &mut gate)?;
        add_bias(k, 8, &p, expert, &mut up)?;
        y.copy_from_slice(&p.activation.join(&gate, &up));
    }
    k.write(k.ptr(0)?, &y)
}

fn sum_twin(k: &mut SimKernel<'_>, dtype: DType) -> KernelResult {
    let p: ExpertParams = k.arg(6)?;
    let (n, cols, n_choices) = (p.n as usize, p.k as usize, p.n_choices as usize);
    let ids: Vec<i32> = k.read(k.ptr(2)?, p.n_pairs as usize)?;
    let weights: Vec<f32> = k.read(k.ptr(3)?, ids.len())?;
    let mut y = vec![0.0_f32; ids.len() / n_choices.max(1) * n];
    for (pair, &id) in ids.iter().enumerate() {
        let Some(expert) = chosen(id, &p) else { continue };
        let x: Vec<f32> = k.read(k.ptr(1)?.add(4 * (pair * p.x_stride as usize) as u64), cols)?;
        let mut part = products(k, dtype, 4, &p, expert, &x)?;
        add_bias(k, 5, &p, expert, &mut part)?;
        let y = &mut y[pair / n_choices * n..][..n];
        y.iter_mut().zip(&part).for_each(|(y, part)| *y = weights[pair].mul_add(*part, *y));
    }
    k.write(k.ptr(0)?, &y)
}

fn sort_twin(k: &mut SimKernel<'_>) -> KernelResult {
    let (n_pairs, n_experts) = (count(k, 3)?, k.config().grid[0] as usize);
    let ids: Vec<i32> = k.read(k.ptr(2)?, n_pairs)?;
    let is_expert = |pair: &u32| usize::try_from(ids[*pair as usize]).is_ok_and(|id| id < n_experts);
    let mut order: Vec<u32> = (0..n_pairs as u32).filter(is_expert).collect();
    order.sort_by_key(|&pair| ids[pair as usize]);
    let begin = |expert: usize| order.partition_point(|&pair| (ids[pair as usize] as usize) < expert) as u32;
    let begin: Vec<u32> = (0..=n_experts).map(begin).collect();
    k.write(k.ptr(0)?, &order)?;
    k.write(k.ptr(1)?, &begin)
}

fn rows_twin(k: &mut SimKernel<'_>, dtype: DType) -> KernelResult {
    let p: ExpertParams = k.arg(6)?;
    let (n, cols) = (p.n as usize, p.k as usize);
    let begin: Vec<u32> = k.read(k.ptr(3)?, p.n_experts as usize + 1)?;
    let order: Vec<u32> = k.read(k.ptr(2)?, begin[p.n_experts as usize] as usize)?;
    for weight in 0..k.config().grid[2] as usize {
        for expert in 0..p.n_experts as usize {
            for &pair in &order[begin[expert] as usize..begin[expert + 1] as usize] {
                let row = pair as usize / p.n_choices as usize * p.x_stride as usize;
                let x: Vec<f32> = k.read(k.ptr(1)?.add(4 * row as u64), cols)?;
                let y = products(k, dtype, 4 + weight, &p, expert, &x)?;
                let at = (weight * p.n_pairs as usize + pair as usize) * n;
                k.write(k.ptr(0)?.add(4 * at as u64), &y)?;
            }
        }
    }
    Ok(())
}

fn join_twin(k: &mut SimKernel<'_>) -> KernelResult {
    let p: ExpertParams = k.arg(5)?;
    let n = p.n as usize;
    let ids: Vec<i32> = k.read(k.ptr(2)?, p.n_pairs as usize)?;
    let mut y = vec![0.0_f32; ids.len() * n];
    for (pair, (&id, y)) in ids.iter().zip(y.chunks_exact_mut(n)).enumerate() {
        let Some(expert) = chosen(id, &p) else { continue };
        let at = |weight: usize| 4 * ((weight * ids.len() + pair) * n) as u64;
        let mut gate: Vec<f32> = k.read(k.ptr(1)?.add(at(0)), n)?;
        let mut up: Vec<f32> = k.read(k.ptr(1)?.add(at(1)), n)?;
        add_bias(k, 3, &p, expert, &mut gate)?;
        add_bias(k, 4, &p, expert, &mut up)?;
        y.copy_from_slice(&p.activation.join(&gate, &up));
    }
    k.write(k.ptr(0)?, &y)
}

fn combine_twin(k: &mut SimKernel<'_>) -> KernelResult {
    let p: ExpertParams = k.arg(5)?;
    let (n, n_choices) = (p.n as usize, p.n_choices as usize);
    let ids: Vec<i32> = k.read(k.ptr(2)?, p.n_pairs as usize)?;
    let weights: Vec<f32> = k.read(k.ptr(3)?, ids.len())?;
    let mut y = vec![0.0_f32; ids.len() / n_choices.max(1) * n];
    for (pair, &id) in ids.iter().enumerate() {
        let Some(expert) = chosen(id, &p) else { continue };
        let mut part: Vec<f32> = k.read(k.ptr(1)?.add(4 * (pair * n) as u64), n)?;
        add_bias(k, 4, &p, expert, &mut part)?;
        let y = &mut y[pair / n_choices * n..][..n];
        y.iter_mut().zip(&part).for_each(|(y, part)| *y = weights[pair].mul_add(*part, *y));
    }
    k.write(k.ptr(0)?, &y)
}
