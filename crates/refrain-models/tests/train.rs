//! Training steps against PyTorch: ten losses and every gradient, which `tools/train_goldens.py` recorded.

mod common;

use common::folder;
use common::train::{Bench, Golden, SPEC, error};
use refrain_formats::ModelFiles;
use refrain_graph::{Graph, Op, TrainOp, fuse, join_sums};
use refrain_models::{Model, TrainPhase, TrainSpec};
use refrain_tensor::DType;

const CASES: [&str; 6] = ["llama", "llama-tied", "mistral-window", "qwen2", "qwen3", "gemma3"];

fn golden(case: &str) -> Golden {
    Golden::read(&folder(case).join("train.safetensors"))
}

fn model(case: &str) -> Model {
    Model::load(&ModelFiles::open(folder(case)).unwrap()).unwrap()
}

#[test]
fn gradients_of_every_architecture_agree_with_pytorch() {
    for case in CASES {
        let golden = golden(case);
        for recompute in [false, true] {
            let spec = TrainSpec { accumulates: true, recompute, ..SPEC };
            let mut bench = Bench::new(model(case), spec, TrainPhase::Accumulate);
            let loss = bench.run(&golden, 0);
            let want = golden.floats("f32.losses")[0];
            assert!((loss - want).abs() < 1e-5 * want, "{case}: loss {loss}, PyTorch has {want}");
            for param in &bench.states.params {
                let name = bench.model.hf_name(param.weight);
                let off =
                    error(&bench.state(param.sum.unwrap()), &golden.floats(&format!("f32.grad.{name}")));
                assert!(off < 1e-5, "{case}: gradient of {name} is off by {off:.2e}");
            }
        }
    }
}

/// What backends that add to what is there compile; the reference runs the joined ops here.
#[test]
fn joined_sums_have_the_gradients_of_pytorch() {
    for case in ["llama-tied", "gemma3"] {
        let golden = golden(case);
        let spec = TrainSpec { accumulates: true, ..SPEC };
        let join = |graph: Graph| {
            let joined = join_sums(&fuse(&graph).unwrap()).unwrap();
            let count = |of: fn(&TrainOp) -> bool| {
                joined.nodes().iter().filter(|n| matches!(&n.op, Op::Train(op) if of(op))).count()
            };
            assert!(count(|op| matches!(op, TrainOp::AddProduct)) > 0, "{case}");
            assert!(count(|op| matches!(op, TrainOp::RmsNormGrad { adds: true, .. })) > 0, "{case}");
            joined
        };
        let mut bench = Bench::with(model(case), spec, TrainPhase::Accumulate, join);
        bench.run(&golden, 0);
        for param in &bench.states.params {
            let name = bench.model.hf_name(param.weight);
            let off = error(&bench.state(param.sum.unwrap()), &golden.floats(&format!("f32.grad.{name}")));
            assert!(off < 1e-5, "{case}: gradient of {name} is off by {off:.2e}");
        }
    }
}

#[test]
fn ten_steps_have_the_losses_and_norms_of_pytorch() {
    for case in CASES {
        let golden = golden(case);
        let mut bench = Bench::new(model(case), SPEC, TrainPhase::Update);
        for (step, (want, norm)) in
            golden.floats("f32.losses").into_iter().zip(golden.floats("f32.norms")).enumerate()
        {
            let loss = bench.run(&golden, step);
            assert!(
                (loss - want).abs() < 1e-5 * want,
                "{case}, step {step}: loss {loss}, PyTorch has {want}"
            );
            let squares = bench.output(bench.step.inputs.sum_squares.unwrap());
            assert!(
                (squares.sqrt() - norm).abs() < 1e-4 * norm,
                "{case}, step {step}: {} {norm}",
                squares.sqrt()
            );
        }
        if case == "llama" {
            for param in &bench.states.params {
                let name = bench.model.hf_name(param.weight);
                let (got, want) = (bench.state(param.value), golden.floats(&format!("f32.last.{name}")));
                let off = error(&got, &want);
                // A gradient that is a millionth of the largest one is rounding, and AdamW takes a step by it all the same:
                // of a thousand weights one may differ by that, and none by more than a tenth of a step.
                let largest = want.iter().fold(0f32, |m, w| m.max(w.abs()));
                let n_off = got.iter().zip(&want).filter(|(g, w)| (*g - *w).abs() >= 1e-5 * largest).count();
                let few = n_off * 1000 <= got.len();
                assert!(
                    few && off < 1e-4,
                    "{case}: {n_off} of {name} are off, by {off:.2e}, after ten steps"
                );
            }
        }
    }
}

#[test]
fn ten_steps_in_bf16_have_the_losses_of_pytorch() {
    for case in CASES {
        let golden = golden(case);
        let spec = TrainSpec { dtype: DType::BF16, masters: true, ..SPEC };
        let mut bench = Bench::new(model(case), spec, TrainPhase::Update);
        for (step, want) in golden.floats("bf16.losses").into_iter().enumerate() {
            let loss = bench.run(&golden, step);
            assert!(
                (loss - want).abs() < 1e-2 * want,
                "{case}, step {step}: loss {loss}, PyTorch has {want}"
            );
        }
    }
}
