//! Shape rules: the refusals of each op, with actual and expected type.

use proptest::prelude::*;
use refrain_graph::{
    ADAM_PARAMS, AdamW, Attention, Binary, Compare, Dropout, ExpertActivation, ExpertGate, Gate, GatedDelta,
    HostBuf, HostCall, HostCallError, HostFn, InferError, KeyHeads, LoraOp, MoeOp, Op, Recurrent, Reduce,
    Rope, RopeStyle, Route, RouteGroups, RouteScore, SAMPLE_PARAMS, ShortConv, SpanAttention, TensorType,
    TrainOp, Unary, View,
};
use refrain_tensor::{DType, Shape};
use std::sync::Arc;

fn t(dtype: DType, dims: &[usize]) -> TensorType {
    TensorType { dtype, shape: Shape::new(dims).unwrap() }
}

fn f(dims: &[usize]) -> TensorType {
    t(DType::F32, dims)
}

fn i(dims: &[usize]) -> TensorType {
    t(DType::I32, dims)
}

fn q(dims: &[usize]) -> TensorType {
    t(DType::Q4_0, dims)
}

const ROUTE: Route = Route {
    n_choices: 2,
    score: RouteScore::Sigmoid,
    biased: true,
    scaled: true,
    groups: Some(RouteGroups { n_groups: 4, n_kept: 2, n_best: 2 }),
    renormalise: true,
    scale: 1.0,
};

const GATE: ExpertGate = ExpertGate { activation: ExpertActivation::Silu, joined: false, biased: true };

struct Never;

impl HostFn for Never {
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, HostCallError> {
        Err(HostCallError(format!("takes no inputs, got {}", inputs.len())))
    }
    fn call(&self, _: &[HostBuf<'_>], _: &mut [&mut [u8]]) -> Result<(), HostCallError> {
        Ok(())
    }
}

/// Every op with valid inputs and the expected outputs.
fn good() -> Vec<(Op, Vec<TensorType>, Vec<TensorType>)> {
    let rope = Rope { style: RopeStyle::Neox, n_dims: 6, magnitude: 1.0 };
    let attention = Attention { scale: 1.0, window: None, softcap: None };
    let span = SpanAttention { scale: 1.0, causal: true, window: None, softcap: None };
    let delta = GatedDelta { scale: 1.0, eps: 1e-6, key_heads: KeyHeads::Grouped };
    let bf = t(DType::BF16, &[3, 4]);
    let cache = t(DType::F16, &[9, 2, 16, 8]);
    let (bytes, scales) = (t(DType::U8, &[9, 2, 16, 8]), f(&[9, 2, 16]));
    let sample =
        [f(&[2, 50]), f(&[2, SAMPLE_PARAMS]), t(DType::U32, &[2, 4]), i(&[2, 7]), i(&[2, 3]), f(&[2, 3])];
    vec![
        (Op::View(View::Reshape(Shape::from([6]))), vec![i(&[2, 3])], vec![i(&[6])]),
        (Op::View(View::Permute(vec![1, 0])), vec![t(DType::Q8_0, &[3, 32])], vec![t(DType::Q8_0, &[32, 3])]),
        (Op::View(View::Slice { axis: 0, start: 1, len: 2 }), vec![f(&[3, 4])], vec![f(&[2, 4])]),
        (Op::View(View::Broadcast(Shape::from([5, 4]))), vec![f(&[1, 4])], vec![f(&[5, 4])]),
        (Op::Copy, vec![t(DType::Q4_K, &[2, 256])], vec![t(DType::Q4_K, &[2, 256])]),
        (Op::Cast(DType::BF16), vec![t(DType::Q8_0, &[2, 32])], vec![t(DType::BF16, &[2, 32])]),
        (Op::Unary(Unary::Tanh), vec![f(&[])], vec![f(&[])]),
        (Op::Binary(Binary::Add), vec![f(&[3, 1]), f(&[4])], vec![f(&[3, 4])]),
        (Op::Reduce { kind: Reduce::Sum, axis: 1 }, vec![f(&[3, 4])], vec![f(&[3, 1])]),
        (Op::Softmax, vec![f(&[3, 4])], vec![f(&[3, 4])]),
        (Op::MatMul, vec![f(&[7, 2, 3]), t(DType::Q8_0, &[3, 32])], vec![f(&[7, 2, 32])]),
        (Op::GatherRows(DType::F16), vec![t(DType::Q4_0, &[9, 32]), i(&[5])], vec![t(DType::F16, &[5, 32])]),
        (Op::RmsNorm { eps: 1e-5 }, vec![f(&[2, 3, 4]), t(DType::F16, &[4])], vec![f(&[2, 3, 4])]),
        (Op::AddRmsNorm { eps: 1e-5 }, vec![f(&[3, 4]), f(&[3, 4]), f(&[4])], vec![f(&[3, 4]), f(&[3, 4])]),
        (Op::Gate(Gate::Silu), vec![f(&[3, 4]), f(&[3, 4])], vec![f(&[3, 4])]),
        (Op::Rope(rope), vec![f(&[5, 2, 8]), i(&[5]), f(&[3])], vec![f(&[5, 2, 8])]),
        (
            Op::Recurrent(Recurrent::ShortConv(ShortConv { silu: true })),
            vec![f(&[7, 3, 6]), f(&[5, 6]), f(&[4, 6]), i(&[5]), i(&[5]), i(&[3, 2])],
            vec![f(&[5, 6]), f(&[7, 3, 6])],
        ),
        (
            Op::Recurrent(Recurrent::GatedDelta(delta)),
            vec![
                f(&[7, 4, 3, 8]),
                f(&[5, 2, 8]),
                f(&[5, 2, 8]),
                f(&[5, 4, 3]),
                f(&[5, 4]),
                f(&[5, 4]),
                f(&[4]),
                f(&[4]),
                i(&[5]),
                i(&[5]),
                i(&[3, 2]),
            ],
            vec![f(&[5, 4, 3]), f(&[7, 4, 3, 8])],
        ),
        (Op::KvAppend, vec![cache, f(&[5, 2, 8]), i(&[5]), i(&[5]), i(&[3, 4])], vec![cache]),
        (
            Op::KvAppendBytes,
            vec![bytes, scales, f(&[5, 2, 8]), i(&[5]), i(&[5]), i(&[3, 4])],
            vec![bytes, scales],
        ),
        (
            Op::Attention(attention),
            vec![f(&[5, 6, 8]), cache, cache, i(&[5]), i(&[5]), i(&[3, 4]), f(&[6])],
            vec![f(&[5, 6, 8])],
        ),
        (Op::Sample(refrain_graph::Sample::default()), sample.to_vec(), vec![i(&[2]), f(&[2])]),
        (Op::Compare(Compare::Less), vec![f(&[3, 1]), f(&[4])], vec![i(&[3, 4])]),
        (Op::Select, vec![i(&[3, 1]), f(&[3, 4]), f(&[4])], vec![f(&[3, 4])]),
        (Op::Pick, vec![f(&[3, 4]), i(&[3])], vec![f(&[3, 1])]),
        (Op::PlaceColumns { width: 4 }, vec![i(&[3]), f(&[3, 1])], vec![f(&[3, 4])]),
        (Op::Pad { axis: 0, before: 1, after: 2 }, vec![f(&[3, 4])], vec![f(&[6, 4])]),
        (Op::ScatterAddRows { n_rows: 9 }, vec![i(&[3]), f(&[3, 4])], vec![f(&[9, 4])]),
        (
            Op::SpanAttention(span),
            vec![f(&[5, 6, 8]), f(&[5, 2, 8]), f(&[5, 2, 8]), i(&[5, 2])],
            vec![f(&[5, 6, 8]), f(&[5, 6])],
        ),
        (Op::Moe(MoeOp::Route(ROUTE)), vec![f(&[3, 8]), f(&[8]), f(&[8])], vec![i(&[3, 2]), f(&[3, 2])]),
        (
            Op::Moe(MoeOp::Gated(GATE)),
            vec![f(&[3, 32]), i(&[3, 2]), q(&[8, 5, 32]), q(&[8, 5, 32]), f(&[8, 5]), f(&[8, 5])],
            vec![f(&[3, 2, 5])],
        ),
        (
            Op::Moe(MoeOp::Gated(ExpertGate { joined: true, ..GATE })),
            vec![f(&[3, 32]), i(&[3, 2]), q(&[8, 10, 32]), f(&[8, 10])],
            vec![f(&[3, 2, 5])],
        ),
        (
            Op::Moe(MoeOp::Summed { biased: true }),
            vec![f(&[3, 2, 32]), i(&[3, 2]), f(&[3, 2]), q(&[8, 7, 32]), f(&[8, 7])],
            vec![f(&[3, 7])],
        ),
        (
            Op::Lora(LoraOp::Down),
            vec![f(&[5, 8]), t(DType::BF16, &[3, 2, 8]), i(&[5]), i(&[4])],
            vec![f(&[5, 2])],
        ),
        (
            Op::Lora(LoraOp::Up),
            vec![f(&[5, 6]), f(&[5, 2]), t(DType::BF16, &[3, 2, 6]), i(&[5]), i(&[4])],
            vec![f(&[5, 6])],
        ),
        (Op::Train(TrainOp::UnaryGrad(Unary::Tanh)), vec![f(&[3]), f(&[3])], vec![f(&[3])]),
        (
            Op::Train(TrainOp::GateGrad(Gate::Silu)),
            vec![f(&[3, 4]), f(&[3, 4]), f(&[3, 4])],
            vec![f(&[3, 4]), f(&[3, 4])],
        ),
        (Op::Train(TrainOp::SoftmaxGrad), vec![f(&[3, 4]), f(&[3, 4])], vec![f(&[3, 4])]),
        (
            Op::Train(TrainOp::RmsNormGrad { eps: 1e-5, adds: false }),
            vec![f(&[3, 4]), f(&[3, 4]), t(DType::BF16, &[4])],
            vec![f(&[3, 4]), t(DType::BF16, &[4])],
        ),
        (Op::Train(TrainOp::AddProduct), vec![f(&[2, 4]), f(&[2, 3]), f(&[3, 4])], vec![f(&[2, 4])]),
        (Op::Train(TrainOp::RopeGrad(rope)), vec![f(&[5, 2, 8]), i(&[5]), f(&[3])], vec![f(&[5, 2, 8])]),
        (
            Op::Train(TrainOp::SpanAttentionGrad(span)),
            vec![
                f(&[5, 6, 8]),
                f(&[5, 6, 8]),
                f(&[5, 2, 8]),
                f(&[5, 2, 8]),
                i(&[5, 2]),
                f(&[5, 6, 8]),
                f(&[5, 6]),
            ],
            vec![f(&[5, 6, 8]), f(&[5, 2, 8]), f(&[5, 2, 8])],
        ),
        (
            Op::Train(TrainOp::CrossEntropy),
            vec![t(DType::BF16, &[3, 50]), i(&[3]), f(&[1])],
            vec![f(&[3]), t(DType::BF16, &[3, 50])],
        ),
        (
            Op::Train(TrainOp::Dropout(Dropout { p: 0.1, site: 0 })),
            vec![f(&[3, 4]), t(DType::U32, &[4])],
            vec![f(&[3, 4])],
        ),
        (
            Op::Train(TrainOp::AdamW(AdamW { decays: vec![true].into(), masters: true, clears: false })),
            vec![i(&[1]), f(&[ADAM_PARAMS]), f(&[1]), bf, bf, f(&[3, 4]), f(&[3, 4]), f(&[3, 4])],
            vec![i(&[1]), bf, f(&[3, 4]), f(&[3, 4]), f(&[3, 4])],
        ),
    ]
}

#[test]
fn every_op_accepts_its_inputs_and_refuses_fewer_or_more() {
    for (op, inputs, outputs) in good() {
        assert_eq!(op.infer(&inputs).as_ref(), Ok(&outputs), "{}", op.name());
        for n in 0..inputs.len() + 3 {
            // The sinks of an attention are optional.
            let without_sinks = matches!(op, Op::Attention(_)) && n + 1 == inputs.len();
            // So are the positions of a router.
            let with_positions = matches!(op, Op::Moe(MoeOp::Route(_))) && n == inputs.len() + 1;
            if n == inputs.len() || without_sinks || with_positions {
                continue;
            }
            let given: Vec<TensorType> = inputs.iter().cycle().copied().take(n).collect();
            let error = op.infer(&given).unwrap_err();
            assert_eq!(error, InferError::Arity { op: op.name(), want: inputs.len(), got: n });
            assert_eq!(error.to_string(), format!("{} takes {} inputs, got {n}", op.name(), inputs.len()));
        }
    }
}

#[test]
fn every_op_refuses_each_input_of_an_unsupported_dtype_or_rank() {
    for (op, inputs, _) in good() {
        if matches!(op, Op::View(_) | Op::Copy | Op::Cast(_)) {
            continue;
        }
        for index in 0..inputs.len() {
            for wrong in [t(DType::U8, inputs[index].shape.dims()), t(inputs[index].dtype, &[32; 6])] {
                let is_elementwise = matches!(
                    op,
                    Op::Unary(_)
                        | Op::Softmax
                        | Op::Reduce { .. }
                        | Op::Pad { .. }
                        | Op::Train(TrainOp::Dropout(_))
                );
                // The cache of an append of bytes is U8.
                if is_elementwise && wrong.shape.rank() == 6 || wrong == inputs[index] {
                    continue;
                }
                let mut given = inputs.clone();
                given[index] = wrong;
                let error = op.infer(&given).unwrap_err();
                let text = error.to_string();
                assert!(text.starts_with(op.name()), "{text}");
                let names_a_side =
                    text.contains(&wrong.to_string()) || text.contains(&inputs[index].to_string());
                assert!(names_a_side || matches!(error, InferError::Input { .. }), "{text}");
                assert!(text.contains(", expected "), "{text}");
            }
        }
    }
}

fn refusal(op: Op, inputs: &[TensorType]) -> String {
    op.infer(inputs).unwrap_err().to_string()
}

#[test]
fn attention_over_bytes_takes_their_scales() {
    let attention = Op::Attention(Attention { scale: 1.0, window: None, softcap: None });
    let (bytes, scales) = (t(DType::U8, &[9, 2, 16, 8]), f(&[9, 2, 16]));
    let inputs = [f(&[5, 6, 8]), bytes, bytes, i(&[5]), i(&[5]), i(&[3, 4]), scales, scales];
    assert_eq!(attention.infer(&inputs).unwrap(), [f(&[5, 6, 8])]);
    assert!(attention.infer(&inputs[..6]).is_err());
    let mut wrong = inputs;
    wrong[7] = f(&[9, 2, 8]);
    assert!(attention.infer(&wrong).is_err());
    wrong = inputs;
    (wrong[1], wrong[2]) = (t(DType::F16, &[9, 2, 16, 8]), t(DType::F16, &[9, 2, 16, 8]));
    assert!(attention.infer(&wrong).is_err());
}

#[test]
fn refusals_name_both_sides() {
    let q = |dims: &[usize]| t(DType::Q8_0, dims);
    let rope = Rope { style: RopeStyle::Neox, n_dims: 16, magnitude: 1.0 };
    let attention = Attention { scale: 1.0, window: None, softcap: None };
    let cache = f(&[9, 2, 16, 8]);
    let cases = [
        (
            refusal(Op::MatMul, &[f(&[5, 64]), f(&[63, 10])]),
            "matmul: input 1 is F32[63, 10], expected 64 rows",
        ),
        (
            refusal(Op::MatMul, &[f(&[64]), f(&[64, 10])]),
            "matmul: input 0 is F32[64], expected at least two dimensions",
        ),
        (
            refusal(Op::MatMul, &[q(&[2, 32]), f(&[32, 10])]),
            "matmul: input 0 is Q8_0[2, 32], expected F32, F16 or BF16",
        ),
        (
            refusal(Op::MatMul, &[f(&[3, 2, 4]), f(&[2, 4, 5])]),
            "matmul: input 1 is F32[2, 4, 5], expected outer dimensions that broadcast with [3, 2, 4]",
        ),
        (
            refusal(Op::Binary(Binary::Add), &[f(&[3]), t(DType::F16, &[3])]),
            "add: input 1 is F16[3], expected F32",
        ),
        (
            refusal(Op::Binary(Binary::Mul), &[f(&[3]), f(&[4])]),
            "mul: input 1 is F32[4], expected a shape that broadcasts with [3]",
        ),
        (refusal(Op::Unary(Unary::Exp), &[i(&[3])]), "exp: input 0 is I32[3], expected F32, F16 or BF16"),
        (
            refusal(Op::Cast(DType::Q8_0), &[f(&[32])]),
            "cast: input 0 is F32[32], expected a cast to floats or I32, not Q8_0",
        ),
        (
            refusal(Op::Cast(DType::F32), &[t(DType::U32, &[32])]),
            "cast: input 0 is U32[32], expected F32, F16, BF16, a quantised dtype, or I32 cast to floats",
        ),
        (refusal(Op::Copy, &[q(&[32, 3])]), "copy: input 0 is Q8_0[32, 3], expected rows of whole blocks"),
        (
            refusal(Op::RmsNorm { eps: 0.0 }, &[f(&[2, 8]), f(&[7])]),
            "rms_norm: input 1 is F32[7], expected one weight per column",
        ),
        (
            refusal(Op::Gate(Gate::Silu), &[f(&[2, 8]), f(&[8])]),
            "silu_gate: input 1 is F32[8], expected F32[2, 8]",
        ),
        (
            refusal(Op::Rope(rope), &[f(&[5, 2, 8]), i(&[5]), f(&[8])]),
            "rope: input 0 is F32[5, 2, 8], expected heads of at least 16 elements",
        ),
        (
            refusal(
                Op::KvAppendBytes,
                &[t(DType::U8, &[9, 2, 16, 8]), f(&[9, 2, 8]), f(&[5, 2, 8]), i(&[5]), i(&[5]), i(&[1, 9])],
            ),
            "kv_append_bytes: input 1 is F32[9, 2, 8], expected F32[9, 2, 16]",
        ),
        (
            refusal(Op::KvAppend, &[cache, f(&[5, 2, 4]), i(&[5]), i(&[5]), i(&[1, 9])]),
            "kv_append: input 1 is F32[5, 2, 4], expected [n, 2, 8]",
        ),
        (
            refusal(Op::KvAppend, &[f(&[9, 2, 0, 8]), f(&[5, 2, 8]), i(&[5]), i(&[5]), i(&[1, 9])]),
            "kv_append: input 0 is F32[9, 2, 0, 8], expected blocks of at least one position",
        ),
        (
            refusal(Op::Attention(attention), &[f(&[5, 3, 8]), cache, cache, i(&[5]), i(&[5]), i(&[1, 9])]),
            "attention: input 0 is F32[5, 3, 8], expected heads in groups of 2 of 8 elements",
        ),
        (
            refusal(Op::GatherRows(DType::F32), &[f(&[9, 4]), f(&[3])]),
            "gather_rows: input 1 is F32[3], expected I32",
        ),
        (
            refusal(Op::View(View::Reshape(Shape::from([7]))), &[f(&[2, 3])]),
            "reshape: cannot reshape [2, 3] (6 elements) to [7] (7 elements)",
        ),
        (
            refusal(Op::View(View::Slice { axis: 1, start: 2, len: 2 }), &[f(&[2, 3])]),
            "slice: slice 2..2+2 of dimension 1 lies outside [2, 3]",
        ),
        (
            refusal(
                Op::HostCall(HostCall { name: "never", because: "test", function: Arc::new(Never) }),
                &[f(&[1])],
            ),
            "never: takes no inputs, got 1",
        ),
    ];
    for (got, want) in cases {
        assert_eq!(got, want);
    }
}

#[test]
fn a_result_with_too_many_elements_is_refused() {
    let inputs = [t(DType::F32, &[0, 32]), t(DType::I32, &[usize::MAX])];
    let refusal = Op::GatherRows(DType::F32).infer(&inputs).unwrap_err().to_string();
    assert!(refusal.contains("[18446744073709551615, 32] has too many elements"), "{refusal}");
}

fn any_type() -> impl Strategy<Value = TensorType> {
    let dims = prop::collection::vec(prop::sample::select(vec![0usize, 1, 2, 3, 32, usize::MAX]), 0..=6);
    (prop::sample::select(DType::ALL.to_vec()), dims).prop_filter_map("too large", |(dtype, dims)| {
        Some(TensorType { dtype, shape: Shape::new(&dims).ok()? })
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(5000))]

    #[test]
    fn no_types_make_a_rule_panic(which in 0usize..19, inputs in prop::collection::vec(any_type(), 0..8), fit in any::<bool>()) {
        let (op, good, _) = good().swap_remove(which);
        let inputs: Vec<TensorType> = match fit {
            true => good.iter().enumerate().map(|(i, g)| if i % 2 == 0 { *g } else { *inputs.get(i).unwrap_or(g) }).collect(),
            false => inputs,
        };
        let _ = op.infer(&inputs);
    }
}

#[test]
fn a_router_with_more_choices_than_experts_is_refused_with_both_numbers() {
    let refused = |route: Route, n_experts: usize| {
        let inputs = [f(&[3, n_experts]), f(&[n_experts]), f(&[n_experts])];
        Op::Moe(MoeOp::Route(route)).infer(&inputs).unwrap_err().to_string()
    };
    let of = |n_groups, n_kept, n_best| Some(RouteGroups { n_groups, n_kept, n_best });
    for (route, n_experts, want) in [
        (
            Route { n_choices: 9, groups: None, ..ROUTE },
            8,
            "F32[3, 8], expected at least the 9 experts to choose",
        ),
        (
            Route { n_choices: 0, groups: None, ..ROUTE },
            8,
            "F32[3, 8], expected at least the 0 experts to choose",
        ),
        (Route { groups: of(3, 1, 1), ..ROUTE }, 8, "F32[3, 8], expected 3 groups of one size"),
        (
            Route { groups: of(4, 5, 1), ..ROUTE },
            8,
            "F32[3, 8], expected groups of which 5 can stay, judged by 1 experts",
        ),
        (
            Route { groups: of(4, 2, 3), ..ROUTE },
            8,
            "F32[3, 8], expected groups of which 2 can stay, judged by 3 experts",
        ),
        (
            Route { n_choices: 5, groups: of(4, 2, 2), ..ROUTE },
            8,
            "F32[3, 8], expected 2 groups with at least 5 experts",
        ),
    ] {
        assert_eq!(refused(route, n_experts), format!("route: input 0 is {want}"));
    }
}

#[test]
fn experts_of_unequal_shapes_are_refused() {
    let op = Op::Moe(MoeOp::Gated(ExpertGate { biased: false, ..GATE }));
    let refused = |gate: &[usize], up: &[usize]| {
        op.infer(&[f(&[3, 32]), i(&[3, 2]), q(gate), q(up)]).unwrap_err().to_string()
    };
    assert_eq!(
        refused(&[8, 5, 32], &[7, 5, 32]),
        "expert_gate: input 3 is Q4_0[7, 5, 32], expected [8, 5, 32]"
    );
    assert_eq!(
        refused(&[8, 5, 32], &[8, 6, 32]),
        "expert_gate: input 3 is Q4_0[8, 6, 32], expected [8, 5, 32]"
    );
    assert_eq!(
        refused(&[8, 5, 64], &[8, 5, 64]),
        "expert_gate: input 2 is Q4_0[8, 5, 64], expected [8, 5, 32]"
    );
}
