//! Training steps: the same bits however the work is split, and out-of-range indices are refused.

use refrain_cpu::CpuBackend;
use refrain_cpu::simd::Level;
use refrain_graph::{
    Backend, ControlBlock, GraphBuilder, InputId, Io, Op, RunError, SpanAttention, TensorType, TrainOp,
    Unary, ValueId,
};
use refrain_models::{Model, NamedShape, QuantMix, TrainPhase, TrainSpec};
use refrain_tensor::DType;

/// All states after two steps over three documents and padding.
fn after_two_steps(model: &Model, spec: &TrainSpec, n_threads: usize, level: Level) -> Vec<Vec<u8>> {
    let mut backend = CpuBackend::new(n_threads).unwrap().with_level(level);
    let step = model.train_graph(spec, TrainPhase::Update).unwrap();
    let (weights, tensors) = model.frozen();
    let weights = backend.load(&weights, tensors).unwrap();
    let states = model.train_states(spec);
    let mut held = backend.allocate(&states.states).unwrap();
    for param in &states.params {
        let values = model.tensors()[param.weight.idx()].to_f32().unwrap();
        let wide: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        let short: Vec<u8> = values.iter().flat_map(|&v| half::bf16::from_f32(v).to_le_bytes()).collect();
        let value = if spec.dtype == DType::F32 { &wide } else { &short };
        backend.write_state(&mut held, param.value, value).unwrap();
        if let Some(master) = param.master {
            backend.write_state(&mut held, master, &wide).unwrap();
        }
    }
    let mut compiled = backend.compile(&step.graph).unwrap();
    let mut control = ControlBlock::new(backend.plan(&compiled).control());
    let documents = [0..70, 70..71, 71..93];
    let find = |row: usize| documents.iter().find(|d| d.contains(&row)).cloned().unwrap_or(row..row);
    let column = |f: &dyn Fn(usize) -> i32| (0..spec.n_tokens).map(f).collect::<Vec<i32>>();
    let is_padding = |row: usize| find(row).is_empty();
    let inputs = &step.inputs;
    let token = |i: usize| if is_padding(i) { -1 } else { (i * 7919 % 300) as i32 };
    control.set_i32(inputs.tokens, &column(&token)).unwrap();
    control.set_i32(inputs.targets, &column(&|i| token(i + 1))).unwrap();
    let position = |i: usize| if is_padding(i) { -1 } else { (i - find(i).start) as i32 };
    control.set_i32(inputs.positions, &column(&position)).unwrap();
    let spans: Vec<i32> =
        (0..spec.n_tokens).flat_map(|i| [find(i).start as i32, find(i).end as i32]).collect();
    control.set_i32(inputs.spans, &spans).unwrap();
    control.set_f32(inputs.scale, &[0.01]).unwrap();
    control.set_u32(inputs.rng.unwrap(), &[1, 2, 3, 4]).unwrap();
    let (b1, b2) = (0.9f32, 0.95f32);
    let adam = [1e-3, b1, 1.0 - b1, b1.ln(), b2, 1.0 - b2, b2.ln(), 1e-8, 0.1, 1.0];
    control.set_f32(inputs.adam.unwrap(), &adam).unwrap();
    for _ in 0..2 {
        compiled.poison(f32::NAN);
        let io = Io { weights: &weights, states: &mut held, control: control.bytes() };
        backend.run(&mut compiled, io).unwrap();
    }
    let mut loss = [0f32];
    backend.read(&compiled, inputs.loss, bytemuck::cast_slice_mut(&mut loss)).unwrap();
    assert!(loss[0].is_finite() && loss[0] > 0.0, "loss {}", loss[0]);
    (0..states.states.len()).map(|i| held.bytes(refrain_graph::StateId::from_idx(i)).to_vec()).collect()
}

#[test]
fn a_training_step_has_the_same_bits_with_any_threads_and_instruction_set() {
    let model = Model::random(NamedShape::find("llama-10m").unwrap(), QuantMix::All(DType::F32)).unwrap();
    for dtype in [DType::F32, DType::BF16] {
        let spec = TrainSpec {
            n_tokens: 96,
            n_context: 96,
            dtype,
            masters: dtype != DType::F32,
            accumulates: false,
            dropout: 0.1,
            recompute: false,
        };
        let one = after_two_steps(&model, &spec, 1, Level::detect());
        // The portable level would take half a minute; the op cases cover it.
        let narrow = Level::available().into_iter().find(|level| *level != Level::PORTABLE);
        for (n_threads, level) in [(3, Level::detect()), (2, narrow.unwrap_or(Level::detect()))] {
            let other = after_two_steps(&model, &spec, n_threads, level);
            let differs = one.iter().zip(&other).filter(|(a, b)| a != b).count();
            assert_eq!(differs, 0, "{dtype}: states differ with {n_threads} threads at {level}");
        }
    }
}

/// Runs one node with these integer inputs; float inputs are ones.
fn run(op: Op, types: &[TensorType], ints: &[i32]) -> Result<(), RunError> {
    let mut builder = GraphBuilder::new(Vec::new(), Vec::new());
    let (mut values, mut ids): (Vec<ValueId>, Vec<(InputId, TensorType)>) = Default::default();
    for (i, ty) in types.iter().enumerate() {
        let input = builder.input(&format!("in{i}"), *ty).unwrap();
        ids.push((builder.input_id(input), *ty));
        let is_float = ty.dtype == DType::F32;
        values.push(if is_float { builder.unary(Unary::Neg, input).unwrap() } else { input });
    }
    for (i, value) in builder.node(op, &values, "node").unwrap().into_iter().enumerate() {
        builder.output(&format!("out{i}"), value).unwrap();
    }
    let mut backend = CpuBackend::new(2).unwrap();
    let weights = backend.load(&[], Vec::new()).unwrap();
    let mut states = backend.allocate(&[]).unwrap();
    let mut compiled = backend.compile(&builder.finish()).unwrap();
    assert!(compiled.kernels().all(|(_, kernel)| kernel != "reference"));
    let mut control = ControlBlock::new(backend.plan(&compiled).control());
    for (id, ty) in ids {
        match ty.dtype {
            DType::F32 => control.set_f32(id, &vec![1.0; ty.shape.n_elements()]).unwrap(),
            _ => control.set_i32(id, ints).unwrap(),
        }
    }
    let io = Io { weights: &weights, states: &mut states, control: control.bytes() };
    backend.run(&mut compiled, io).map(|_| ())
}

#[test]
fn out_of_range_ids_targets_and_spans_are_refused() {
    let float = |dims: &[usize]| TensorType::new(DType::F32, refrain_tensor::Shape::new(dims).unwrap());
    let ints = |dims: &[usize]| TensorType::new(DType::I32, refrain_tensor::Shape::new(dims).unwrap());
    let loss = || (Op::Train(TrainOp::CrossEntropy), vec![float(&[2, 5]), ints(&[2]), float(&[1])]);
    let scatter = || (Op::ScatterAddRows { n_rows: 3 }, vec![ints(&[2]), float(&[2, 4])]);
    let attention = SpanAttention { scale: 1.0, causal: true, window: None, softcap: None };
    let heads = float(&[2, 1, 16]);
    let attend = || (Op::SpanAttention(attention), vec![heads, heads, heads, ints(&[2, 2])]);
    let refused = |(op, types): (Op, Vec<TensorType>), given: &[i32]| match run(op, &types, given) {
        Err(RunError::OutOfRange { what, got, limit, .. }) => (what, got, limit),
        other => panic!("{given:?}: {other:?}"),
    };
    assert_eq!(refused(loss(), &[-1, 5]), ("row", 5, 5));
    assert_eq!(refused(scatter(), &[3, 0]), ("row", 3, 3));
    // Past the last row, before the first, and a document that does not contain the row.
    assert_eq!(refused(attend(), &[0, 2, 0, 3]), ("span", 3, 3));
    assert_eq!(refused(attend(), &[-1, 2, 0, 2]), ("span", 2, 3));
    assert_eq!(refused(attend(), &[0, 2, 0, 1]), ("span", 1, 3));
    for (given, call) in [(&[-1, 4][..], loss()), (&[-1, 2], scatter()), (&[0, 2, 0, 2], attend())] {
        assert!(run(call.0, &call.1, given).is_ok(), "{given:?}");
    }
}
