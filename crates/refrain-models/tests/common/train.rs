//! Training steps on the CPU, compared with PyTorch.

use super::folder;
use refrain_cpu::CpuBackend;
use refrain_formats::ModelFiles;
use refrain_graph::{ADAM_PARAMS, Backend, ControlBlock, Graph, Io, StateId};
use refrain_models::{Model, TrainGraph, TrainPhase, TrainSpec, TrainStates};
use refrain_tensor::{DType, HostTensor, quant};
use safetensors::SafeTensors;
use std::path::Path;

/// Results recorded from PyTorch.
pub(crate) struct Golden {
    bytes: Vec<u8>,
}

impl Golden {
    pub(crate) fn of(case: &str) -> Golden {
        Golden::read(&folder(case).join("train.safetensors"))
    }

    pub(crate) fn read(path: &Path) -> Golden {
        Golden { bytes: std::fs::read(path).unwrap() }
    }

    pub(crate) fn floats(&self, name: &str) -> Vec<f32> {
        let tensors = SafeTensors::deserialize(&self.bytes).unwrap();
        let tensor = tensors.tensor(name).unwrap_or_else(|e| panic!("{name}: {e}"));
        match tensor.dtype() {
            safetensors::Dtype::BF16 => {
                let words = tensor.data().as_chunks::<2>().0.iter();
                words.map(|b| half::bf16::from_le_bytes(*b).to_f32()).collect()
            }
            _ => tensor.data().as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
        }
    }

    /// Allowed difference between two F32 runs at each step: `least`, or, where steps amplify rounding, four
    /// times the largest distance so far between PyTorch's F32 and F64 runs.
    pub(crate) fn amplified(&self, name: &str, least: f32) -> Vec<f32> {
        let single = self.floats(&format!("f32.{name}"));
        let tensors = SafeTensors::deserialize(&self.bytes).unwrap();
        if tensors.tensor(&format!("f64.{name}")).is_err() {
            return vec![least; single.len()];
        }
        let mut farthest = 0f32;
        let both = single.iter().zip(self.floats(&format!("f64.{name}")));
        both.map(|(single, double)| {
            farthest = farthest.max((single - double).abs() / double);
            least.max(4.0 * farthest)
        })
        .collect()
    }

    pub(crate) fn ints(&self, name: &str) -> Vec<i32> {
        let tensors = SafeTensors::deserialize(&self.bytes).unwrap();
        let data = tensors.tensor(name).unwrap().data().to_vec();
        data.as_chunks::<8>().0.iter().map(|b| i64::from_le_bytes(*b) as i32).collect()
    }

    /// First row and end of each row's document.
    fn spans(&self) -> Vec<i32> {
        let documents = self.ints("documents");
        let span = |(row, &document): (usize, &i32)| {
            let first = documents.iter().position(|&d| d == document).unwrap_or(row);
            let len = documents.iter().filter(|&&d| d == document).count();
            if document < 0 { [row, row] } else { [first, first + len] }
        };
        documents.iter().enumerate().flat_map(span).map(|row| row as i32).collect()
    }
}

/// A model in training, on the CPU.
pub(crate) struct Bench {
    backend: CpuBackend,
    pub(crate) model: Model,
    pub(crate) states: TrainStates,
    held: <CpuBackend as Backend>::States,
    weights: <CpuBackend as Backend>::Weights,
    compiled: <CpuBackend as Backend>::Compiled,
    pub(crate) step: TrainGraph,
}

fn adam(step: usize) -> [f32; ADAM_PARAMS] {
    let (beta1, beta2) = (0.9f64, 0.95f64);
    let lr = 1e-3 * (1.0 - 0.05 * step as f64);
    [lr, beta1, 1.0 - beta1, beta1.ln(), beta2, 1.0 - beta2, beta2.ln(), 1e-8, 0.1, 1.0].map(|v| v as f32)
}

fn rounded(tensor: &HostTensor, dtype: DType) -> Vec<u8> {
    let values = tensor.to_f32().unwrap();
    match dtype {
        DType::F32 => bytemuck::cast_slice(&values).to_vec(),
        _ => values.iter().flat_map(|&v| half::bf16::from_f32(v).to_le_bytes()).collect(),
    }
}

pub(crate) fn load(case: &str) -> Model {
    Model::load(&ModelFiles::open(folder(case)).unwrap()).unwrap()
}

impl Bench {
    pub(crate) fn new(case: &str, spec: TrainSpec, phase: TrainPhase) -> Bench {
        Bench::with(case, spec, phase, |graph| graph)
    }

    /// The same with a transformation of the step's graph.
    pub(crate) fn with(
        case: &str,
        spec: TrainSpec,
        phase: TrainPhase,
        change: impl FnOnce(Graph) -> Graph,
    ) -> Bench {
        Bench::of(load(case), spec, phase, change)
    }

    /// The same for any model.
    pub(crate) fn of(
        model: Model,
        spec: TrainSpec,
        phase: TrainPhase,
        change: impl FnOnce(Graph) -> Graph,
    ) -> Bench {
        let backend = CpuBackend::new(2).unwrap();
        let mut step = model.train_graph(&spec, phase).unwrap();
        step.graph = change(step.graph);
        let states = model.train_states(&spec);
        let (weights, tensors) = model.frozen();
        let weights = backend.load(&weights, tensors).unwrap();
        let mut held = backend.allocate(&states.states).unwrap();
        let compiled = backend.compile(&step.graph).unwrap();
        for param in &states.params {
            let tensor = &model.tensors()[param.weight.idx()];
            backend.write_state(&mut held, param.value, &rounded(tensor, spec.dtype)).unwrap();
            if let Some(master) = param.master {
                backend.write_state(&mut held, master, &rounded(tensor, DType::F32)).unwrap();
            }
        }
        Bench { backend, model, states, held, weights, compiled, step }
    }

    /// Steps that run the reference implementation of their op.
    pub(crate) fn slow_steps(&self) -> Vec<String> {
        let slow = self.compiled.kernels().filter(|(_, kernel)| *kernel == "reference");
        slow.map(|(label, _)| label.to_owned()).collect()
    }

    /// Runs a step on the golden's batch and returns its loss.
    pub(crate) fn run(&mut self, golden: &Golden, step: usize) -> f32 {
        let inputs = self.step.inputs.clone();
        let mut control = ControlBlock::new(self.backend.plan(&self.compiled).control());
        let targets = golden.ints("targets");
        let n_targets = targets.iter().filter(|&&t| t >= 0).count();
        control.set_i32(inputs.tokens, &golden.ints("tokens")).unwrap();
        control.set_i32(inputs.targets, &targets).unwrap();
        control.set_i32(inputs.positions, &golden.ints("positions")).unwrap();
        control.set_i32(inputs.spans, &golden.spans()).unwrap();
        control.set_f32(inputs.scale, &[1.0 / n_targets as f32]).unwrap();
        if let Some(id) = inputs.adam {
            control.set_f32(id, &adam(step)).unwrap();
        }
        let io = Io { weights: &self.weights, states: &mut self.held, control: control.bytes() };
        self.backend.run(&mut self.compiled, io).unwrap();
        self.output(inputs.loss)
    }

    pub(crate) fn output(&mut self, output: usize) -> f32 {
        let mut value = [0f32];
        self.backend.read(&self.compiled, output, bytemuck::cast_slice_mut(&mut value)).unwrap();
        value[0]
    }

    pub(crate) fn state(&self, id: StateId) -> Vec<f32> {
        let ty = self.states.states[id.idx()].ty;
        let mut bytes = vec![0; ty.dtype.bytes_for(ty.shape.n_elements()).unwrap()];
        self.backend.read_state(&self.held, id, &mut bytes).unwrap();
        let mut values = vec![0.0; ty.shape.n_elements()];
        quant::dequantize(ty.dtype, &bytes, &mut values).unwrap();
        values
    }
}

pub(crate) const SPEC: TrainSpec = TrainSpec {
    n_tokens: 48,
    n_context: 24,
    dtype: DType::F32,
    masters: false,
    accumulates: false,
    dropout: 0.0,
    recompute: false,
};

/// Maximum error of a tensor, relative to its largest magnitude.
pub(crate) fn error(got: &[f32], want: &[f32]) -> f32 {
    assert_eq!(got.len(), want.len());
    let largest = want.iter().fold(0f32, |m, w| m.max(w.abs()));
    let off = got.iter().zip(want).fold(0f32, |m, (g, w)| m.max((g - w).abs()));
    off / largest.max(1e-12)
}
