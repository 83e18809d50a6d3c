//! Speed of a training step: `cargo bench -p refrain-cpu --bench train [-- f32|bf16] [steps=N] [threads=N] [rows=N]`.
//!
//! Prints ms per step of a ten-million-parameter Llama over 32 sequences of 256 tokens (or `rows` rows), and
//! the kernels that take the time. `tools/bench_train_torch.py` runs the same step in PyTorch.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use refrain_cpu::CpuBackend;
use refrain_cpu::pool::default_threads;
use refrain_graph::{Backend, ControlBlock, Io};
use refrain_models::{Model, NamedShape, QuantMix, TrainPhase, TrainSpec};
use refrain_tensor::DType;

const CONTEXT: usize = 256;

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let number = |name: &str, default: usize| {
        let found = args.iter().find_map(|a| a.strip_prefix(name)?.parse().ok());
        found.unwrap_or(default)
    };
    let n_tokens = number("rows=", 32 * CONTEXT);
    let dtype = if args.iter().any(|a| a == "bf16") { DType::BF16 } else { DType::F32 };
    let shape = NamedShape::find("llama-10m").expect("a known shape");
    let model = Model::random(shape, QuantMix::All(DType::F32)).expect("a model");
    let spec = TrainSpec {
        n_tokens,
        n_context: n_tokens,
        dtype,
        masters: dtype != DType::F32,
        accumulates: false,
        dropout: 0.0,
        recompute: false,
    };
    let mut backend = CpuBackend::new(number("threads=", default_threads())).expect("threads");
    let step = model.train_graph(&spec, TrainPhase::Update).expect("a step");
    let (weights, tensors) = model.frozen();
    let weights = backend.load(&weights, tensors).expect("weights");
    let states = model.train_states(&spec);
    let mut held = backend.allocate(&states.states).expect("memory");
    for param in &states.params {
        let values = model.tensors()[param.weight.idx()].to_f32().expect("floats");
        let wide: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        let short: Vec<u8> = values.iter().flat_map(|&v| half::bf16::from_f32(v).to_le_bytes()).collect();
        let value = if dtype == DType::F32 { &wide } else { &short };
        backend.write_state(&mut held, param.value, value).expect("a state");
        if let Some(master) = param.master {
            backend.write_state(&mut held, master, &wide).expect("a state");
        }
    }
    let mut compiled = backend.compile(&step.graph).expect("a compiled step");
    let inputs = &step.inputs;
    let mut control = ControlBlock::new(backend.plan(&compiled).control());
    let column = |f: &dyn Fn(usize) -> usize| (0..n_tokens).map(|i| f(i) as i32).collect::<Vec<_>>();
    let document = |i: usize| i / CONTEXT * CONTEXT;
    let spans: Vec<i32> = (0..n_tokens)
        .flat_map(|i| [document(i) as i32, n_tokens.min(document(i) + CONTEXT) as i32])
        .collect();
    control.set_i32(inputs.tokens, &column(&|i| i * 7919 % 8192)).expect("tokens");
    control.set_i32(inputs.targets, &column(&|i| i * 104_729 % 8192)).expect("targets");
    control.set_i32(inputs.positions, &column(&|i| i % CONTEXT)).expect("positions");
    control.set_i32(inputs.spans, &spans).expect("spans");
    control.set_f32(inputs.scale, &[1.0 / n_tokens as f32]).expect("a scale");
    let (b1, b2) = (0.9f64, 0.95f64);
    let adam = [1e-4, b1, 1.0 - b1, b1.ln(), b2, 1.0 - b2, b2.ln(), 1e-8, 0.1, 1.0].map(|v| v as f32);
    control.set_f32(inputs.adam.expect("an optimiser"), &adam).expect("parameters");

    println!("level {}, {} threads, {dtype}, {n_tokens} rows", backend.level(), backend.n_threads());
    let mut by_kernel: HashMap<&str, (usize, Duration)> = HashMap::new();
    let mut best = Duration::MAX;
    for i in 0..number("steps=", 3) {
        let io = Io { weights: &weights, states: &mut held, control: control.bytes() };
        let (start, ran) = (Instant::now(), cpu_ms());
        let times = backend.run_timed(&mut compiled, io).expect("a step");
        let took = start.elapsed();
        let mut loss = [0f32];
        backend.read(&compiled, inputs.loss, bytemuck::cast_slice_mut(&mut loss)).expect("a loss");
        let ran = cpu_ms() - ran;
        println!("step {i}: {:.1} ms ({ran} of CPU), loss {:.4}", took.as_secs_f64() * 1e3, loss[0]);
        if took < best {
            best = took;
            by_kernel.clear();
            for ((_, kernel), took) in compiled.kernels().zip(times) {
                let entry = by_kernel.entry(kernel).or_default();
                *entry = (entry.0 + 1, entry.1 + took);
            }
        }
    }
    let mut table: Vec<_> = by_kernel.into_iter().collect();
    table.sort_by_key(|(_, (_, took))| std::cmp::Reverse(*took));
    println!("{:20} {:>6} {:>9} {:>6}", "kernel", "calls", "ms", "%");
    for (kernel, (n, took)) in table {
        let share = took.as_secs_f64() / best.as_secs_f64() * 100.0;
        println!("{kernel:20} {n:>6} {:>9.1} {share:>6.1}", took.as_secs_f64() * 1e3);
    }
}

/// Returns the CPU time of this process in milliseconds, if the system reports it. With one thread, it is more
/// precise than wall time on a busy machine.
fn cpu_ms() -> u64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let after_name = stat.rsplit(')').next().unwrap_or_default();
    // Fields 14 and 15, in ticks of 10 ms.
    after_name.split(' ').skip(12).take(2).filter_map(|ticks| ticks.parse::<u64>().ok()).sum::<u64>() * 10
}
