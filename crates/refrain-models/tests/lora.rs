//! LoRA against PyTorch and peft: losses, gradients and logits recorded by `tools/lora_goldens.py`, over
//! float and quantised weights; and adapters as files.

mod common;

use common::train::{Bench, Golden, SPEC, error};
use common::{folder, logits};
use refrain_cpu::CpuBackend;
use refrain_engine::{BackendRunner, Core, RunnerOptions};
use refrain_formats::ModelFiles;
use refrain_formats::hf::AdapterFolder;
use refrain_graph::{Op, Plan, PlanOptions, ValueOrigin, fuse, join_sums};
use refrain_models::{Adapter, LoraSpec, Model, ModelError, Targets, TrainPhase, TrainSpec};
use refrain_tensor::{DType, Shape};
use std::path::Path;
use std::sync::Arc;

const FLOATS: [&str; 4] = ["llama", "qwen3", "gemma3", "phi3-short"];
const QUANTISED: [&str; 2] = ["llama-q8_0", "llama-q4_k_m"];

fn golden(case: &str) -> Golden {
    Golden::read(&folder(case).join("lora/train.safetensors"))
}

fn base(case: &str) -> Model {
    let file = folder(case).join("model.gguf");
    let files = ModelFiles::open(if file.exists() { file } else { folder(case) }).unwrap();
    Model::load(&files).unwrap()
}

fn adapter(case: &str) -> Adapter {
    Adapter::read(&AdapterFolder::open(folder(case).join("lora")).unwrap()).unwrap()
}

fn adapted(case: &str) -> Model {
    base(case).with_adapter(&adapter(case)).unwrap()
}

/// First gradients of A and B, under the names of an adapter file.
fn gradients(bench: &Bench) -> Vec<(String, Vec<f32>)> {
    let sums = bench.states.params.iter().map(|param| {
        let values = bench.state(param.sum.unwrap());
        let shape = bench.states.states[param.value.idx()].ty.shape;
        (param.weight, refrain_tensor::HostTensor::from_f32(shape, &values).unwrap())
    });
    // Put the gradients in place of the weights, and read them back in the layout of an adapter file.
    let gradients = bench.model.with_values(sums).unwrap().adapter().unwrap().unwrap();
    assert!(!gradients.parts.is_empty());
    let halves = gradients.parts.iter().flat_map(|part| {
        [("lora_A", &part.a), ("lora_B", &part.b)].map(|(half, tensor)| {
            let name = format!("base_model.model.{}.{half}.weight", part.module);
            (name, tensor.to_f32().unwrap())
        })
    });
    halves.collect()
}

fn check_gradients(case: &str, bench: &Bench, golden: &Golden) {
    for (name, values) in gradients(bench) {
        let off = error(&values, &golden.floats(&format!("f32.grad.{name}")));
        assert!(off < 1e-5, "{case}: gradient of {name} is off by {off:.2e}");
    }
}

/// Norm of the difference of two tensors, relative to that of the second.
fn distance(got: &[f32], want: &[f32]) -> f32 {
    let norm = |values: &mut dyn Iterator<Item = f32>| values.map(|v| v * v).sum::<f32>().sqrt();
    norm(&mut got.iter().zip(want).map(|(g, w)| g - w)) / norm(&mut want.iter().copied())
}

#[test]
fn gradients_of_adapters_agree_with_pytorch() {
    for case in FLOATS.into_iter().chain(QUANTISED) {
        let golden = golden(case);
        for recompute in [false, true] {
            let spec = TrainSpec { accumulates: true, recompute, ..SPEC };
            let mut bench = Bench::of(adapted(case), spec, TrainPhase::Accumulate, |graph| graph);
            let loss = bench.run(&golden, 0);
            let want = golden.floats("f32.losses")[0];
            assert!((loss - want).abs() < 1e-5 * want, "{case}: loss {loss}, PyTorch has {want}");
            check_gradients(case, &bench, &golden);
        }
    }
}

#[test]
fn ten_steps_of_adapters_have_the_losses_and_norms_of_pytorch() {
    for case in FLOATS.into_iter().chain(QUANTISED) {
        let golden = golden(case);
        let mut bench = Bench::of(adapted(case), SPEC, TrainPhase::Update, |graph| graph);
        assert_eq!(bench.slow_steps(), Vec::<String>::new(), "{case}");
        let norms = golden.floats("f32.norms");
        for (step, (want, norm)) in golden.floats("f32.losses").into_iter().zip(norms).enumerate() {
            let loss = bench.run(&golden, step);
            assert!(
                (loss - want).abs() < 1e-5 * want,
                "{case}, step {step}: loss {loss}, PyTorch has {want}"
            );
            let found = bench.output(bench.step.inputs.sum_squares.unwrap()).sqrt();
            assert!((found - norm).abs() < 1e-4 * norm, "{case}, step {step}: {found} {norm}");
        }
    }
}

#[test]
fn ten_steps_of_adapters_in_bf16_have_the_losses_of_pytorch() {
    for case in FLOATS.into_iter().chain(QUANTISED) {
        let golden = golden(case);
        let spec = TrainSpec { dtype: DType::BF16, masters: true, ..SPEC };
        let mut bench = Bench::of(adapted(case), spec, TrainPhase::Update, |graph| graph);
        assert_eq!(bench.slow_steps(), Vec::<String>::new(), "{case}");
        for (step, want) in golden.floats("bf16.losses").into_iter().enumerate() {
            let loss = bench.run(&golden, step);
            assert!(
                (loss - want).abs() < 1e-2 * want,
                "{case}, step {step}: loss {loss}, PyTorch has {want}"
            );
        }
    }
}

#[test]
fn gradients_over_weights_decoded_to_bf16_are_as_exact_as_those_of_pytorch() {
    for case in QUANTISED {
        let golden = golden(case);
        let spec = TrainSpec { dtype: DType::BF16, masters: true, accumulates: true, ..SPEC };
        let mut bench = Bench::of(adapted(case), spec, TrainPhase::Accumulate, |graph| graph);
        bench.run(&golden, 0);
        for (name, values) in gradients(&bench) {
            let exact = golden.floats(&format!("f32.grad.{name}"));
            let off = distance(&values, &exact);
            let pytorch = distance(&golden.floats(&format!("bf16.grad.{name}")), &exact);
            assert!(off < 1.25 * pytorch, "{case}: {name} is off by {off:.2e}, in PyTorch by {pytorch:.2e}");
        }
    }
}

/// Backends that can accumulate into a destination compile this.
#[test]
fn an_adapters_output_is_accumulated_into_the_product_it_is_added_to() {
    let spec = TrainSpec { accumulates: true, ..SPEC };
    let golden = golden("llama-q8_0");
    let mut n_joined = 0;
    let mut bench = Bench::of(adapted("llama-q8_0"), spec, TrainPhase::Accumulate, |graph| {
        let joined = join_sums(&fuse(&graph).unwrap()).unwrap();
        let adds =
            |node: &&refrain_graph::Node| matches!(node.op, Op::Train(refrain_graph::TrainOp::AddProduct));
        n_joined = joined.nodes().iter().filter(adds).count();
        joined
    });
    assert!(n_joined >= 14, "{n_joined} sums are joined, expected at least 14");
    bench.run(&golden, 0);
    check_gradients("llama-q8_0", &bench, &golden);
}

/// Each layer's weights are decoded where they are used, in the forward and backward pass, and freed in
/// between.
#[test]
fn decoded_weights_are_not_kept_for_the_backward_pass() {
    let model = adapted("llama-q4_k_m");
    let spec = TrainSpec { dtype: DType::BF16, masters: true, ..SPEC };
    let step = model.train_graph(&spec, TrainPhase::Update).unwrap();
    let graph = &fuse(&step.graph).unwrap();
    let of_weight = |node: &&refrain_graph::Node| {
        matches!(node.op, Op::Cast(_))
            && matches!(graph.value(node.inputs[0]).origin, ValueOrigin::Weight(_))
            && graph.value(node.inputs[0]).ty.dtype.is_quantized()
    };
    let decoded: Vec<_> = graph.nodes().iter().filter(of_weight).collect();
    // Seven maps in two layers and the output, each forward and backward. The inputs of the first layer's
    // queries, keys and values do not depend on any adapter, so their gradients are not needed.
    assert_eq!(decoded.len(), 2 * 15 - 3);
    for node in &decoded {
        let readers = graph.nodes().iter().filter(|other| other.inputs.contains(&node.outputs[0])).count();
        assert!(readers <= 1, "{} is read {readers} times", node.label);
    }
    // All of them at once would take 1.7 MB. In a step of one row, only the two largest of 131 KB each
    // matter.
    let small = model.train_graph(&TrainSpec { n_tokens: 1, ..spec }, TrainPhase::Update).unwrap();
    let plan = Plan::new(&fuse(&small.graph).unwrap(), PlanOptions::default()).unwrap();
    assert!(plan.arena_bytes() < 500_000, "{}", plan.arena_bytes());
}

#[test]
fn only_the_adapter_is_a_state_and_the_base_keeps_its_file_layout() {
    let model = adapted("llama-q4_k_m");
    let states = model.train_states(&SPEC);
    assert!(states.states[1..].iter().all(|state| state.name.contains(".lora_")));
    assert_eq!(states.params.len(), 2 * 7 * 2);
    let (frozen, tensors) = model.frozen();
    let quantised = frozen.iter().filter(|w| w.ty.dtype.is_quantized()).count();
    assert_eq!(quantised, 2 * 7 + 2);
    let own = base("llama-q4_k_m");
    for (weight, tensor) in frozen.iter().zip(&tensors) {
        let idx = own.weights().iter().position(|w| w.name == weight.name).unwrap();
        assert_eq!(own.tensors()[idx].bytes().as_slice(), tensor.bytes().as_slice(), "{}", weight.name);
    }
    let sizes = states.params.iter().map(|p| states.states[p.value.idx()].ty.shape.n_elements());
    assert_eq!(model.n_trained(), sizes.sum::<usize>());
}

fn engine(model: Model) -> Core {
    let options =
        RunnerOptions { context: 64, kv_block: 32, kv_dtype: DType::F32, ..RunnerOptions::default() };
    let runner = BackendRunner::new(CpuBackend::new(2).unwrap(), Arc::new(model), options).unwrap();
    Core::new(Box::new(runner), 64)
}

fn logits_of(model: Model, golden: &Golden) -> Vec<f32> {
    let tokens: Vec<u32> = golden.ints("tokens")[..10].iter().map(|&token| token as u32).collect();
    logits(&mut engine(model), &tokens)
}

#[test]
fn a_live_adapter_has_the_logits_of_peft() {
    for case in FLOATS {
        let golden = golden(case);
        let off = error(&logits_of(adapted(case), &golden), &golden.floats("f32.logits"));
        assert!(off < 1e-4, "{case}: {off:.2e}");
        let moved = error(&golden.floats("base.logits"), &golden.floats("f32.logits"));
        assert!(moved > 1e-2, "{case}: the adapter changes the logits by only {moved:.2e}");
        // With the scale folded into its matrices the result is the same, with one op less per adapter.
        let live = base(case).with_live_adapter(&adapter(case), 1.0).unwrap();
        let off = error(&logits_of(live.clone(), &golden), &golden.floats("f32.logits"));
        assert!(off < 1e-4, "{case} live: {off:.2e}");
        assert!(live.adapter().unwrap().is_none());
        // At scale 0 it has no effect.
        let without = base(case).with_live_adapter(&adapter(case), 0.0).unwrap();
        let off = error(&logits_of(without, &golden), &golden.floats("base.logits"));
        assert!(off < 1e-4, "{case} without its adapter: {off:.2e}");
    }
    for case in QUANTISED {
        // Matrix products with quantised weights round their input rows to 8 bits.
        let golden = golden(case);
        let off = error(&logits_of(adapted(case), &golden), &golden.floats("f32.logits"));
        assert!(off < 5e-2, "{case}: {off:.2e}");
    }
}

#[test]
fn an_adapter_fits_a_gguf_file_of_its_model_too() {
    let golden = golden("llama");
    let files = common::gguf::convert("llama", |_| {});
    let model = Model::load(&files).unwrap().with_adapter(&adapter("llama")).unwrap();
    let off = error(&logits_of(model.clone(), &golden), &golden.floats("f32.logits"));
    assert!(off < 1e-4, "{off:.2e}");
    // The rows of queries and keys are returned in the order of the file.
    for (got, want) in model.adapter().unwrap().unwrap().parts.iter().zip(&adapter("llama").parts) {
        assert_eq!(got.module, want.module);
        assert_eq!(got.b.to_f32().unwrap(), want.b.to_f32().unwrap(), "{}", want.module);
    }
}

#[test]
fn an_adapter_is_written_as_it_was_read() {
    let (folder, before) = (tempfile::tempdir().unwrap(), adapter("qwen3"));
    before.write(folder.path(), DType::F32, &[]).unwrap();
    let after = Adapter::read(&AdapterFolder::open(folder.path()).unwrap()).unwrap();
    assert_eq!(after.config, before.config);
    assert_eq!(after.parts.len(), before.parts.len());
    for (a, b) in after.parts.iter().zip(&before.parts) {
        assert_eq!((&a.module, a.a.to_f32().unwrap()), (&b.module, b.a.to_f32().unwrap()));
        assert_eq!(a.b.to_f32().unwrap(), b.b.to_f32().unwrap());
    }
}

#[test]
fn merged_weights_have_the_logits_of_the_adapter() {
    for case in ["llama", "gemma3", "llama-q4_k_m"] {
        let (golden, folder) = (golden(case), tempfile::tempdir().unwrap());
        adapted(case).write_hf(folder.path(), DType::F32).unwrap();
        let merged = Model::load(&ModelFiles::open(folder.path()).unwrap()).unwrap();
        assert!(merged.weights().iter().all(|w| !w.name.contains("lora")));
        let off = error(&logits_of(merged, &golden), &golden.floats("f32.logits"));
        assert!(off < 1e-4, "{case}: {off:.2e}");
    }
}

#[test]
fn a_fresh_adapter_changes_nothing_and_depends_only_on_its_seed() {
    let model = base("llama");
    let spec = LoraSpec { rank: 8, alpha: 16.0, rslora: false, dropout: 0.0, targets: Targets::All };
    let made = model.fresh_adapter(&spec, 7).unwrap();
    assert_eq!(made.parts.len(), 14);
    assert_eq!(
        made.config.targets,
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    );
    for (part, again) in made.parts.iter().zip(model.fresh_adapter(&spec, 7).unwrap().parts) {
        let a = part.a.to_f32().unwrap();
        assert_eq!(a, again.a.to_f32().unwrap());
        // Variance of a uniform distribution: a third of the squared bound, which is one over the square root
        // of its number of inputs.
        let n_in = part.a.shape().dims()[1];
        let square = a.iter().map(|v| v * v).sum::<f32>() / a.len() as f32;
        assert!((square * 3.0 * n_in as f32 - 1.0).abs() < 0.15, "{}: {square}", part.module);
        assert!(a.iter().all(|v| v.abs() <= 1.0 / (n_in as f32).sqrt()));
        assert!(part.b.to_f32().unwrap().iter().all(|&v| v == 0.0));
    }
    assert_ne!(
        made.parts[0].a.to_f32().unwrap(),
        model.fresh_adapter(&spec, 8).unwrap().parts[0].a.to_f32().unwrap()
    );
    let golden = golden("llama");
    let off = error(&logits_of(model.with_adapter(&made).unwrap(), &golden), &golden.floats("base.logits"));
    assert!(off < 1e-4, "{off:.2e}");
}

#[test]
fn targets_choose_linear_maps_by_either_name() {
    let model = base("llama");
    let spec = |targets: &str| LoraSpec {
        rank: 2,
        alpha: 4.0,
        rslora: false,
        dropout: 0.0,
        targets: Targets::of_word(targets),
    };
    let modules = |targets: &str| -> Vec<String> {
        let made = model.fresh_adapter(&spec(targets), 0).unwrap();
        made.parts
            .into_iter()
            .filter(|part| part.module.contains("layers.1."))
            .map(|part| part.module)
            .collect()
    };
    let of = |names: &[&str]| names.iter().map(|n| format!("model.layers.1.{n}")).collect::<Vec<_>>();
    assert_eq!(
        modules("attention"),
        of(&["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"])
    );
    assert_eq!(modules("attn_q, v_proj"), of(&["self_attn.q_proj", "self_attn.v_proj"]));
    let error = model.fresh_adapter(&spec("q_proj,qproj"), 0).unwrap_err();
    assert_eq!(
        error.to_string(),
        "no linear layer of the model is named \"qproj\"; its linear layers are q_proj, k_proj, v_proj, o_proj, gate_proj, \
         up_proj, down_proj"
    );
    for rank in [0, 65] {
        let error = model.fresh_adapter(&LoraSpec { rank, ..spec("all") }, 0).unwrap_err();
        assert!(
            matches!(
                error,
                ModelError::AdapterRank { largest: 32, .. } | ModelError::AdapterRank { largest: 64, .. }
            ),
            "{error}"
        );
    }
}

/// An adapter folder with one changed setting.
fn with_setting(key: &str, value: serde_json::Value) -> tempfile::TempDir {
    let out = tempfile::tempdir().unwrap();
    let from = folder("llama").join("lora");
    std::fs::copy(from.join(AdapterFolder::WEIGHTS), out.path().join(AdapterFolder::WEIGHTS)).unwrap();
    let text = std::fs::read(from.join(AdapterFolder::CONFIG)).unwrap();
    let mut json: serde_json::Value = serde_json::from_slice(&text).unwrap();
    json[key] = value;
    std::fs::write(out.path().join(AdapterFolder::CONFIG), json.to_string()).unwrap();
    out
}

fn attach(folder: &Path) -> Result<Model, ModelError> {
    base("llama").with_live_adapter(&Adapter::read(&AdapterFolder::open(folder)?)?, 1.0)
}

#[test]
fn rank_stabilised_adapters_are_divided_by_the_root_of_the_rank() {
    let folder = with_setting("use_rslora", true.into());
    let golden = golden("llama");
    let stabilised = logits_of(attach(folder.path()).unwrap(), &golden);
    // The rank is 4, so this equals twice the usual scale.
    let twice = base("llama").with_live_adapter(&adapter("llama"), 2.0).unwrap();
    assert_eq!(stabilised, logits_of(twice, &golden), "4 / sqrt(4) is twice 4 / 4");
    assert!(error(&stabilised, &golden.floats("f32.logits")) > 1e-2);
}

#[test]
fn unsupported_kinds_of_adapters_are_refused_by_name() {
    let refused = [
        ("use_dora", true.into(), "DoRA"),
        ("peft_type", "IA3".into(), "only LoRA"),
        ("bias", "all".into(), "biases"),
        ("modules_to_save", vec!["lm_head"].into(), "fully trained modules"),
        ("fan_in_fan_out", true.into(), "transposed"),
        ("alpha_pattern", serde_json::json!({ "q_proj": 3 }), "a separate alpha per module"),
        ("init_lora_weights", "pissa_niter_4".into(), "changes the base weights"),
        ("r", 0.into(), "between 1 and"),
        ("r", serde_json::json!(1u64 << 40), "between 1 and"),
        ("r", serde_json::json!(-3), "whole number"),
        ("lora_alpha", "much".into(), "a number"),
    ];
    for (key, value, says) in refused {
        let folder = with_setting(key, value);
        let error = attach(folder.path()).unwrap_err();
        assert!(error.to_string().contains(says) && error.to_string().contains(key), "{error}");
        assert!(error.hint().is_some(), "{error}");
    }
}

#[test]
fn adapters_that_do_not_fit_are_refused_with_a_reason() {
    let case = |folder: &Path, says: &[&str]| {
        let error = attach(folder).unwrap_err();
        assert!(says.iter().all(|part| error.to_string().contains(part)), "{error}");
        assert!(error.hint().is_some(), "{error}");
    };
    case(with_setting("r", 8.into()).path(), &["lora_a has shape [4, 96]", "[8, 96]"]);
    // From a model with other sizes.
    case(&folder("llama-q4_k_m").join("lora"), &["lora_a has shape [4, 256]", "[4, 96]"]);
    // From a model with more layers, and one with other modules.
    let change = |from: &str, to: &str| {
        let mut other = adapter("llama");
        other.parts.iter_mut().for_each(|part| part.module = part.module.replace(from, to));
        let out = tempfile::tempdir().unwrap();
        other.write(out.path(), DType::F32, &[]).unwrap();
        out
    };
    case(change("layers.1", "layers.7").path(), &["model.layers.7.mlp.down_proj", "2 layers", "q_proj, "]);
    case(change("mlp.up_proj", "mlp.experts").path(), &["mlp.experts", "llama"]);
    // Broken files.
    let out = tempfile::tempdir().unwrap();
    case(out.path(), &["no adapter_config.json"]);
    std::fs::copy(folder("llama").join("lora/adapter_config.json"), out.path().join("adapter_config.json"))
        .unwrap();
    case(out.path(), &["no adapter_model.safetensors"]);
    let weights = std::fs::read(folder("llama").join("lora/adapter_model.safetensors")).unwrap();
    for cut in [0, 7, 100, weights.len() - 1] {
        std::fs::write(out.path().join("adapter_model.safetensors"), &weights[..cut]).unwrap();
        assert!(attach(out.path()).unwrap_err().hint().is_some());
    }
    std::fs::write(out.path().join("adapter_config.json"), "{").unwrap();
    case(out.path(), &["invalid JSON"]);
}

#[test]
fn missing_factors_and_foreign_tensors_are_refused() {
    let write = |names: &[&str]| {
        let out = with_setting("r", 4.into());
        let tensors: Vec<refrain_formats::hf::NewTensor> = names
            .iter()
            .map(|name| refrain_formats::hf::NewTensor {
                name: (*name).into(),
                dtype: DType::F32,
                shape: Shape::from([4, 64]),
            })
            .collect();
        let path = out.path().join(AdapterFolder::WEIGHTS);
        let bytes = |_| Ok::<_, refrain_formats::FormatError>(vec![0; 4 * 64 * 4]);
        refrain_formats::hf::write_safetensors(&path, &tensors, &[], bytes).unwrap();
        attach(out.path()).unwrap_err().to_string()
    };
    let q = "base_model.model.model.layers.0.self_attn.q_proj";
    assert!(
        write(&[&format!("{q}.lora_A.weight")]).contains("no lora_B for model.layers.0.self_attn.q_proj")
    );
    assert!(write(&[&format!("{q}.lora_magnitude_vector")]).contains("neither lora_A nor lora_B"));
    assert!(write(&[]).contains("no tensors"));
}

#[test]
fn damaged_adapters_are_errors_not_panics() {
    let from = folder("llama").join("lora");
    let files = [AdapterFolder::CONFIG, AdapterFolder::WEIGHTS]
        .map(|name| (name, std::fs::read(from.join(name)).unwrap()));
    let (out, model) = (tempfile::tempdir().unwrap(), base("llama"));
    let mut state = 9u64;
    let mut random = |below: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % below
    };
    let mut n_refused = 0;
    for round in 0..400 {
        for (i, (name, bytes)) in files.iter().enumerate() {
            let mut bytes = bytes.clone();
            // Damage to the header of the weights has the widest effect.
            let reach = if i == 0 { bytes.len() } else { 4096 };
            for _ in 0..usize::from(round % 2 == i) * 3 {
                let at = random(reach);
                bytes[at] = random(256) as u8;
            }
            std::fs::write(out.path().join(name), bytes).unwrap();
        }
        let read = AdapterFolder::open(out.path()).map_err(ModelError::from);
        let attached = read.and_then(|read| model.with_live_adapter(&Adapter::read(&read)?, 1.0));
        n_refused += usize::from(attached.is_err());
    }
    assert!(n_refused > 200, "{n_refused}");
}
