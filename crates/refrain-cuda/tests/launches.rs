//! Launches of model steps: as few as possible, in whatever order a model builds its nodes.

mod rig;

use std::collections::BTreeSet;

use refrain_cuda::{CudaBackend, GraphMode};
use refrain_driver::Method;
use refrain_formats::FormatError;
use refrain_formats::params::{Arch, ModelConfig};
use refrain_graph::{Backend, Graph, fuse};
use refrain_models::{Head, KvSpec, Model, NamedShape, QuantMix, SampleHead, StepSpec, TensorSource};
use refrain_tensor::{Bytes, DType, HostTensor, Shape};
use refrain_testkit::{Rng, reordered};

const N_LAYERS: usize = 2;
const SAMPLE: Head = Head::Sample(SampleHead { n_history: 8, n_bias: 4, masked: false, n_top: 0 });

/// Dtype of a matrix, by its name.
type Mix = fn(&str) -> DType;

const MIXES: [(&str, Mix); 4] = [
    ("BF16", |_| DType::BF16),
    ("F32", |_| DType::F32),
    ("Q4_K with Q6_K", |name| if name.contains("attn_v") { DType::Q6_K } else { DType::Q4_K }),
    ("BF16 with F32", |name| if name.contains("attn_v") { DType::F32 } else { DType::BF16 }),
];

/// Zeros in every tensor that a model requests.
struct Zeros {
    config: ModelConfig,
    mix: Mix,
}

impl TensorSource for Zeros {
    fn find(&self, gguf_name: &str, _: &str) -> Result<Option<HostTensor>, FormatError> {
        let c = &self.config;
        let (q, kv) = (c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim);
        let name =
            gguf_name.split_once('.').filter(|(blk, _)| *blk == "blk").map_or(gguf_name, |(_, rest)| rest);
        let name =
            name.split_once('.').filter(|(layer, _)| layer.parse::<u32>().is_ok()).map_or(name, |(_, n)| n);
        let dims: &[usize] = match name {
            "token_embd.weight" => &[c.n_vocab, c.hidden],
            "attn_q.weight" => &[q, c.hidden],
            "attn_k.weight" | "attn_v.weight" => &[kv, c.hidden],
            "attn_output.weight" => &[c.hidden, q],
            "ffn_gate.weight" | "ffn_up.weight" => &[c.ffn, c.hidden],
            "ffn_down.weight" => &[c.hidden, c.ffn],
            "attn_q.bias" => &[q],
            "attn_k.bias" | "attn_v.bias" => &[kv],
            "attn_q_norm.weight" | "attn_k_norm.weight" => &[c.head_dim],
            "output_norm.weight"
            | "attn_norm.weight"
            | "ffn_norm.weight"
            | "post_attention_norm.weight"
            | "post_ffw_norm.weight" => &[c.hidden],
            _ => return Ok(None),
        };
        let dtype = if dims.len() == 1 { DType::F32 } else { (self.mix)(name) };
        let bytes = vec![0; dtype.bytes_for(dims.iter().product()).unwrap()];
        Ok(Some(HostTensor::new(dtype, Shape::new(dims).unwrap(), Bytes::new(bytes)).unwrap()))
    }

    fn name<'n>(&self, gguf_name: &'n str, _: &'n str) -> &'n str {
        gguf_name
    }
}

/// A few thin layers of an architecture.
fn model(shape: &str, mix: Mix) -> Model {
    let mut config = NamedShape::find(shape).unwrap().config();
    (config.n_layers, config.n_vocab, config.hidden, config.ffn) = (N_LAYERS, 512, 512, 768);
    (config.n_heads, config.n_kv_heads) = (4, 2);
    config.layers.truncate(N_LAYERS);
    Model::from_source(config.clone(), &Zeros { config, mix }).unwrap()
}

const KV: KvSpec = KvSpec { n_blocks: 16, kv_block: 32, max_blocks: 16, n_slots: 0, dtype: DType::F16 };

fn backend(model: &Model) -> CudaBackend {
    let backend = CudaBackend::on(&rig::sim("").1, rig::options(GraphMode::Off, Method::Stream)).unwrap();
    backend.load(model.weights(), model.tensors().to_vec()).unwrap();
    backend.allocate(&model.states(&KV)).unwrap();
    backend
}

fn graph(model: &Model, n_tokens: usize, head: Head) -> Graph {
    let n_choices = if head == SAMPLE { 1 } else { n_tokens };
    model.graph(&StepSpec::of_one(n_tokens, n_choices, head), &KV).unwrap()
}

/// Kernels of a step in launch order, and the labels of each group.
fn launches(backend: &CudaBackend, graph: &Graph) -> (Vec<String>, BTreeSet<String>) {
    let compiled = backend.compile(&fuse(graph).unwrap()).unwrap();
    let plan = backend.plan(&compiled);
    let labels = |steps: std::ops::Range<usize>| {
        plan.steps()[steps].iter().map(|s| s.label.as_str()).collect::<Vec<_>>().join(" + ")
    };
    let groups = plan.groups().iter().map(|group| labels(group.steps.clone())).collect();
    (backend.kernels(&compiled).into_iter().map(|(_, kernel)| kernel.into_owned()).collect(), groups)
}

/// Checks that groups and launches of several step sizes are the same for any node order.
fn keeps_its_launches_in_any_order(model: &Model, what: &str, rng: &mut Rng) {
    let backend = backend(model);
    for (n_tokens, head) in [(32, SAMPLE), (8, Head::Logits), (1, SAMPLE)] {
        let graph = graph(model, n_tokens, head);
        let want = launches(&backend, &graph);
        for _ in 0..8 {
            let other = reordered(&graph, rng).unwrap();
            assert_eq!(launches(&backend, &other), want, "{what}, {n_tokens} tokens");
        }
    }
}

#[test]
fn the_order_of_nodes_in_a_model_changes_neither_groups_nor_launches() {
    let mut rng = Rng::new(7);
    for shape in ["llama-3.2-1b", "qwen2.5-0.5b", "qwen3-0.6b", "gemma3-1b"] {
        for (name, mix) in MIXES {
            keeps_its_launches_in_any_order(&model(shape, mix), &format!("{shape} {name}"), &mut rng);
        }
    }
    for case in ["gemma4-e2b", "gemma4-dense"] {
        keeps_its_launches_in_any_order(&rig::goldens::model(case), case, &mut rng);
    }
}

#[test]
fn a_decoded_token_takes_five_launches_a_layer() {
    for shape in ["llama-3.2-1b", "qwen2.5-0.5b", "qwen3-0.6b", "gemma3-1b"] {
        for (mix, dtype, [qkv, table]) in
            [(MIXES[0].1, "bf16", ["bf16"; 2]), (MIXES[2].1, "q4_k", ["q4_k_q6_k", "packed_q4_k"])]
        {
            let model = model(shape, mix);
            let (kernels, _) = launches(&backend(&model), &graph(&model, 1, SAMPLE));
            let attend = kernels.iter().find(|k| k.starts_with("attend_")).unwrap();
            let several = |dtype: &str| format!("product_several_{dtype}");
            let (bare, gated) = (format!("product_bare_{dtype}"), format!("product_gated_{dtype}"));
            let layer = [several(qkv), attend.clone(), bare.clone(), gated, bare];
            let scale = if shape.starts_with("gemma") { vec!["unary_affine_f32".to_owned()] } else { vec![] };
            let head =
                [several(dtype), "sample_chunks_f32".into(), "sample_select_f32".into(), "commit_i32".into()];
            let want =
                [vec![format!("gather_rows_{table}")], scale, vec![layer; N_LAYERS].concat(), head.to_vec()]
                    .concat();
            assert_eq!(kernels, want, "{shape}");
        }
    }
}

#[test]
fn every_layer_of_gemma_4_attends_in_one_launch_even_with_a_shared_cache() {
    for (case, n_layers) in [("gemma4-e2b", 9), ("gemma4-dense", 5), ("gemma4-heads", 4)] {
        let model = rig::goldens::model(case);
        let (kernels, groups) = launches(&backend(&model), &graph(&model, 1, SAMPLE));
        let n = |start: &str| kernels.iter().filter(|kernel| kernel.starts_with(start)).count();
        assert_eq!(
            (n("attend_"), n("attention_"), n("rope_"), n("kv_append")),
            (n_layers, 0, 0, 0),
            "{case}"
        );
        if case == "gemma4-e2b" {
            let own = "blk.0.attn_q_norm + blk.0.attn_k_norm + blk.0.attn_v_norm";
            assert!(groups.iter().any(|group| group.starts_with(own)), "{groups:?}");
            let shared = "blk.8.attn_q_norm + blk.8.rope + blk.8.attention";
            assert!(groups.contains(shared), "{groups:?}");
        }
    }
}

#[test]
fn groups_without_a_fused_kernel_are_reported_and_others_are_not() {
    let told = |mix: Mix, n_tokens: usize| {
        let model = model("qwen3-0.6b", mix);
        let backend = backend(&model);
        launches(&backend, &graph(&model, n_tokens, Head::Logits));
        backend.monitor().status().unfused
    };
    for (_, mix) in [MIXES[0], MIXES[2]] {
        assert_eq!(told(mix, 1), Vec::<String>::new());
        assert_eq!(told(mix, 32), Vec::<String>::new(), "steps of several rows are never fused");
    }
    let because = "no fused single-row kernel supports F32 weights";
    let [line] = &told(MIXES[1].1, 1)[..] else { panic!("one reason for all") };
    assert_eq!(
        *line,
        format!("blk.0.attn_q and 3 more run as separate steps instead of one launch: {because}")
    );
    // Only the value weights are F32, so only products with them are reported.
    let [line] = &told(MIXES[3].1, 1)[..] else { panic!("one reason for all") };
    assert_eq!(
        *line,
        format!("blk.0.attn_q and 1 more run as separate steps instead of one launch: {because}")
    );
}

#[test]
fn architecture_variations_add_no_launches_around_attention() {
    let n_of = |model: &Model, start: &str| {
        let (kernels, _) = launches(&backend(model), &graph(model, 1, SAMPLE));
        kernels.iter().filter(|kernel| kernel.starts_with(start)).count()
    };
    // Layers without rope, partial rope, soft caps, and queries scaled by position.
    for (case, n_layers) in
        [("phi3", 2), ("smollm3", 5), ("cohere2", 5), ("gemma2", 4), ("mistral3", 2), ("glm4", 2)]
    {
        let model = rig::goldens::model(case);
        let counts = ["attend_", "attention_", "rope_", "kv_append"].map(|start| n_of(&model, start));
        assert_eq!(counts, [n_layers, 0, 0, 0], "{case}");
    }
    // The factor on branches is folded into the epsilon of norms; the ones on embedding and logits remain.
    let granite = rig::goldens::model("granite");
    assert_eq!(n_of(&granite, "unary_affine"), 2, "embedding and logits");
    let phi = NamedShape::new("phi", Arch::Phi3, [512, 512, 768, N_LAYERS], [4, 2, 128]);
    for mix in [QuantMix::All(DType::BF16), QuantMix::Q4KM] {
        let phi = Model::random(&phi, mix).unwrap();
        let (kernels, _) = launches(&backend(&phi), &graph(&phi, 1, SAMPLE));
        // Five per layer, plus the embedding, the logits and the choice.
        assert_eq!(kernels.len(), 5 * N_LAYERS + 5, "{kernels:?}");
    }
}
