//! The [`Backend`] implementation for the CPU.

use crate::compile::{CpuProgram, fuses, is_cache_dtype};
use crate::experts::Sorted;
use crate::pool::{Pool, PoolError};
use crate::run::{AlignedLine, Executor, RunScratch};
use crate::simd::{ActError, Level};
use crate::weights::{CpuStates, CpuWeights};
use refrain_graph::{
    Backend, ByteEdit, CompileError, Fusion, Graph, GroupQuery, Io, Op, Place, Plan, PlanOptions, Query, Ran,
    Reason, RunError, State, StateEdit, StatePart, Support, Weight,
};
use refrain_reference::ReferenceError;
use refrain_tensor::{DType, HostTensor, TensorError};
use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

/// Errors within the backend.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CpuError {
    /// Activations of the wrong size or format for a matrix product.
    #[error(transparent)]
    Acts(#[from] ActError),
    /// A weight that must be a matrix but is not.
    #[error("the weight is not a matrix")]
    NotAMatrix,
    /// The reference implementation refused the operands.
    #[error(transparent)]
    Reference(#[from] ReferenceError),
    /// Bytes that do not match their type.
    #[error(transparent)]
    Tensor(#[from] TensorError),
    /// Not enough memory for a state.
    #[error("cannot allocate {bytes} bytes for a state")]
    NoMemory {
        /// Requested size.
        bytes: usize,
    },
}

/// Runs graphs on the CPU.
pub struct CpuBackend {
    pool: Arc<Pool>,
    level: Level,
    repack: bool,
}

impl CpuBackend {
    /// Returns a backend with `n_threads` threads, including the caller, and the best instruction set of this
    /// processor.
    pub fn new(n_threads: usize) -> Result<CpuBackend, PoolError> {
        Ok(CpuBackend::with_pool(Arc::new(Pool::new(n_threads)?)))
    }

    /// Like [`CpuBackend::new`], but on the pool of that size that the process shares ([`Pool::shared`]).
    pub fn shared(n_threads: usize) -> Result<CpuBackend, PoolError> {
        Ok(CpuBackend::with_pool(Pool::shared(n_threads)?))
    }

    fn with_pool(pool: Arc<Pool>) -> CpuBackend {
        CpuBackend { pool, level: Level::detect(), repack: true }
    }

    /// Uses another instruction set that this processor supports.
    pub fn with_level(mut self, level: Level) -> CpuBackend {
        self.level = level;
        self
    }

    /// Sets whether to repack weights when they are loaded.
    pub fn with_repacking(mut self, repack: bool) -> CpuBackend {
        self.repack = repack;
        self
    }

    /// Number of threads in use.
    pub fn n_threads(&self) -> usize {
        self.pool.n_threads()
    }

    pub(crate) fn pool(&self) -> &Pool {
        &self.pool
    }

    /// Runs a compiled graph and returns the time of each call, in the order of [`CpuCompiled::kernels`].
    pub fn run_timed(
        &mut self,
        compiled: &mut CpuCompiled,
        io: Io<'_, CpuBackend>,
    ) -> Result<Vec<Duration>, RunError> {
        check_io(compiled, &io)?;
        let pool = self.pool.clone();
        let _step = pool.step();
        let mut times = Vec::with_capacity(compiled.program.calls.len());
        let (weights, states, control) = (io.weights, io.states, io.control);
        let mut machine = Executor { pool: &pool, level: self.level, weights, states, control };
        machine.run(compiled, Some(&mut times))?;
        Ok(times)
    }

    /// Instruction set in use.
    pub fn level(&self) -> Level {
        self.level
    }
}

/// A graph compiled for the CPU.
pub struct CpuCompiled {
    pub(crate) plan: Plan,
    pub(crate) program: CpuProgram,
    pub(crate) arena: Vec<AlignedLine>,
    pub(crate) scratch: RunScratch,
}

impl CpuCompiled {
    /// Each call's kernel, with the label of its (first) step.
    pub fn kernels(&self) -> impl Iterator<Item = (&str, &'static str)> {
        self.program.calls.iter().map(|c| (self.plan.steps()[c.step].label.as_str(), c.kernel.name()))
    }

    /// Fills the arena with a value. Results do not change, because no step depends on the arena's previous
    /// content.
    pub fn poison(&mut self, value: f32) {
        bytemuck::cast_slice_mut(&mut self.arena).fill(value);
    }
}

impl Backend for CpuBackend {
    type Weights = CpuWeights;
    type States = CpuStates;
    type Compiled = CpuCompiled;

    fn name(&self) -> &'static str {
        "cpu"
    }

    fn supports(&self, query: &Query<'_>) -> Support {
        // Values between ops are floats or 32-bit integers; weights may have any dtype.
        let is_value = |dtype: DType| is_cache_dtype(dtype) || dtype.block_bytes() == 4;
        match query.outputs.iter().find(|t| !is_value(t.dtype)) {
            Some(_) if matches!(query.op, Op::KvAppendBytes) => Support::Yes,
            Some(t) if matches!(query.op, Op::KvAppend) => {
                Support::No(format!("the cache is {t}, but only F16, BF16 and F32 have kernels"))
            }
            Some(t) if !matches!(query.op, Op::View(_)) => Support::No(format!(
                "its output is {t}, but values between ops must be floats or 32-bit integers"
            )),
            _ => Support::Yes,
        }
    }

    fn fuses(&self, query: &GroupQuery<'_>) -> Fusion {
        fuses(query)
    }

    fn load(&self, weights: &[Weight], tensors: Vec<HostTensor>) -> Result<CpuWeights, RunError> {
        if weights.len() != tensors.len() {
            let because = format!("the model has {}, but {} were passed", weights.len(), tensors.len());
            return Err(RunError::Mismatch { what: "weights", because });
        }
        for (weight, tensor) in weights.iter().zip(&tensors) {
            if !tensor.layout().is_contiguous() || tensor.layout().offset() != 0 {
                let because = format!("{} is a view, but must be a contiguous tensor", weight.name);
                return Err(RunError::Mismatch { what: "weights", because });
            }
            if weight.ty.dtype != tensor.dtype() || weight.ty.shape != tensor.shape() {
                let because = format!("{} is {} {}", weight.name, tensor.dtype(), tensor.shape());
                return Err(RunError::Mismatch { what: "weights", because });
            }
        }
        CpuWeights::new(&self.pool, self.level, self.repack, tensors).map_err(|e| RunError::Backend {
            backend: "cpu",
            label: "loading weights".into(),
            source: Box::new(CpuError::Tensor(e)),
        })
    }

    fn allocate(&self, states: &[State]) -> Result<CpuStates, RunError> {
        CpuStates::new(states).map_err(|bytes| no_memory("allocating states", bytes))
    }

    fn resize(&self, states: &mut CpuStates, to: &[State]) -> Result<(), RunError> {
        if states.len() != to.len() {
            let because = format!("there are {}, but sizes were passed for {}", states.len(), to.len());
            return Err(RunError::Mismatch { what: "states", because });
        }
        states.resize(to).map_err(|bytes| no_memory("resizing states", bytes))
    }

    fn read_state(
        &self,
        states: &CpuStates,
        part: impl Into<StatePart>,
        into: &mut [u8],
    ) -> Result<(), RunError> {
        let part = part.into();
        let range = states.layout(part.state)?.range_for(&part, into.len())?;
        into.copy_from_slice(&states.get(part.state.idx())[range]);
        Ok(())
    }

    fn write_state(
        &self,
        states: &mut CpuStates,
        part: impl Into<StatePart>,
        from: &[u8],
    ) -> Result<(), RunError> {
        let part = part.into();
        let range = states.layout(part.state)?.range_for(&part, from.len())?;
        states.get_mut(part.state.idx())[range].copy_from_slice(from);
        Ok(())
    }

    fn edit_states(&mut self, states: &mut CpuStates, edits: &[StateEdit]) -> Result<(), RunError> {
        let in_bytes =
            |edit: &StateEdit| Ok((edit.state().idx(), edit.in_bytes(states.layout(edit.state())?)?));
        let edits: Vec<(usize, ByteEdit)> = edits.iter().map(in_bytes).collect::<Result<_, RunError>>()?;
        for (state, edit) in edits {
            match edit {
                ByteEdit::Copy { from, to } => states.get_mut(state).copy_within(from, to.start),
                ByteEdit::Clear(range) => states.get_mut(state)[range].fill(0),
            }
        }
        Ok(())
    }

    fn compile(&self, graph: &Graph) -> Result<CpuCompiled, CompileError> {
        self.check(graph)?;
        let plan = Plan::fused(graph, PlanOptions::default(), &|query| self.fuses(query))?;
        let program = CpuProgram::new(&plan, graph.weights(), self.n_threads());
        let lines = |bytes: usize| vec![AlignedLine::default(); bytes.div_ceil(64)];
        let angles = program.tables.iter().map(|t| vec![0.0; t.positions.len() * t.n_dims]).collect();
        let (acts, values) = (lines(program.acts_bytes), lines(4 * program.value_floats));
        let mut sorted = Sorted::default();
        sorted.reserve(program.choices[0], program.choices[1]);
        let scratch = RunScratch { acts, angles, values, sorted, ..RunScratch::default() };
        let arena = lines(plan.arena_bytes());
        Ok(CpuCompiled { plan, program, arena, scratch })
    }

    fn kernels(&self, compiled: &CpuCompiled) -> Vec<(usize, Cow<'static, str>)> {
        compiled.program.calls.iter().map(|c| (c.step, c.kernel.name().into())).collect()
    }

    fn layouts(&self, weights: &CpuWeights) -> Vec<(String, usize)> {
        let mut layouts: Vec<(String, usize)> = Vec::new();
        for (dtype, layout, bytes) in weights.layouts() {
            let name = format!("{dtype}, {layout}");
            match layouts.iter_mut().find(|(n, _)| *n == name) {
                Some((_, sum)) => *sum += bytes,
                None => layouts.push((name, bytes)),
            }
        }
        layouts
    }

    fn plan<'c>(&self, compiled: &'c CpuCompiled) -> &'c Plan {
        &compiled.plan
    }

    fn run(&mut self, compiled: &mut CpuCompiled, io: Io<'_, CpuBackend>) -> Result<Ran, RunError> {
        check_io(compiled, &io)?;
        let pool = self.pool.clone();
        let _step = pool.step();
        let level = self.level;
        let mut machine =
            Executor { pool: &pool, level, weights: io.weights, states: io.states, control: io.control };
        machine.run(compiled, None)?;
        Ok(Ran::Eager(Reason::NoGraphsHere { backend: "cpu" }))
    }

    fn read(&mut self, compiled: &CpuCompiled, output: usize, into: &mut [u8]) -> Result<(), RunError> {
        let mismatch = |because| RunError::Mismatch { what: "outputs", because };
        let Some(operand) = compiled.plan.outputs().get(output) else {
            return Err(mismatch(format!("the plan has no output {output}")));
        };
        let buffer = compiled.plan.buffer(operand.buffer);
        let Place::Arena { offset } = buffer.place else {
            return Err(mismatch(format!("output {output} is not computed by the plan")));
        };
        let size = operand.dtype.block_bytes();
        let n = operand.layout.shape().n_elements() * size;
        if into.len() != n {
            return Err(mismatch(format!(
                "output {output} has {n} bytes, but {} were requested",
                into.len()
            )));
        }
        let bytes: &[u8] = &bytemuck::cast_slice(&compiled.arena)[offset..offset + buffer.bytes];
        if operand.layout.is_contiguous() {
            let start = operand.layout.offset() * size;
            into.copy_from_slice(&bytes[start..start + n]);
        } else {
            // The output is a view: gather its elements.
            for (to, i) in into.chunks_exact_mut(size).zip(operand.layout.indices()) {
                to.copy_from_slice(&bytes[size * i..][..size]);
            }
        }
        Ok(())
    }
}

fn no_memory(label: &str, bytes: usize) -> RunError {
    RunError::Backend { backend: "cpu", label: label.into(), source: Box::new(CpuError::NoMemory { bytes }) }
}

fn check_io(compiled: &CpuCompiled, io: &Io<'_, CpuBackend>) -> Result<(), RunError> {
    let mismatch = |what, because| Err(RunError::Mismatch { what, because });
    let need = compiled.plan.control().bytes();
    if io.control.len() != need {
        return mismatch("inputs", format!("need {need} bytes, got {}", io.control.len()));
    }
    if bytemuck::try_cast_slice::<u8, u32>(io.control).is_err() {
        return mismatch("inputs", "they are not 4-byte aligned".into());
    }
    let in_plan = |f: fn(Place) -> Option<usize>| {
        compiled.plan.buffers().iter().filter_map(|b| f(b.place)).max().map_or(0, |n| n + 1)
    };
    let n_weights = in_plan(|p| if let Place::Weight(id) = p { Some(id.idx()) } else { None });
    if io.weights.len() < n_weights {
        return mismatch("weights", format!("need {n_weights}, got {}", io.weights.len()));
    }
    let n_states = in_plan(|p| if let Place::State(id) = p { Some(id.idx()) } else { None });
    if io.states.len() < n_states {
        return mismatch("states", format!("need {n_states}, got {}", io.states.len()));
    }
    Ok(())
}
