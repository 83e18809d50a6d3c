//! `docs/reference/support.md`: which architectures run from which files on which device, found by running them.
//!
//! Golden models are read as folders and as GGUF files, and their logits compared with those of `transformers`. Larger
//! random ones are written in every type, read again, and compared with what their decoded weights give in F32.

#[path = "../../refrain-models/tests/common/gguf.rs"]
mod gguf;
#[path = "../../refrain-cuda/tests/rig/mod.rs"]
mod rig;

use refrain_cpu::CpuBackend;
use refrain_cuda::{CudaBackend, GraphMode};
use refrain_driver::{Device, Method};
use refrain_engine::{BackendRunner, Core, Embedder, EmbedderOptions, RunnerOptions, StepKind};
use refrain_formats::ModelFiles;
use refrain_formats::params::Arch;
use refrain_formats::tokenizer::VocabSpec;
use refrain_models::{Model, NamedShape, Pooling};
use refrain_tensor::quant::can_encode;
use refrain_tensor::{DType, HostTensor};
use rig::goldens::{CASES, EMBED_CASES, embed_golden, golden, relative_error};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Tolerance of the logits of a golden model, compared with those of `transformers`.
const GOLDEN: f64 = 1e-4;
/// A model of each architecture whose rows are whole blocks of every type.
const SIZES: ([usize; 4], [usize; 3]) = ([64, 256, 256, 2], [4, 2, 64]);
const TOKENS: [u32; 8] = [1, 17, 5, 60, 3, 4, 8, 15];

/// Tolerance of logits, compared with those of the decoded weights in F32: products round activations to 8 or 16 bits,
/// and unscaled scores amplify the difference.
fn near(arch: Arch) -> f64 {
    if arch == Arch::Gemma4 { 1.5e-1 } else { 5e-2 }
}

fn folder(case: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../refrain-models/tests/goldens").join(case)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Format {
    Safetensors,
    Gguf,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum On {
    Cpu,
    Cuda,
}

/// Result of a model on a device: its logits, and whether every step was a replay.
struct Ran {
    logits: Vec<f32>,
    replayed: bool,
}

fn run(on: On, device: &Device, model: Model, tokens: &[u32]) -> Ran {
    let options = RunnerOptions {
        context: 64,
        kv_block: 16,
        kv_dtype: DType::F32,
        max_tokens: 64,
        ..RunnerOptions::default()
    };
    let model = Arc::new(model);
    match on {
        On::Cpu => {
            let runner = BackendRunner::new(CpuBackend::new(2).unwrap(), model, options).unwrap();
            let mut engine = Core::new(Box::new(runner), 64);
            Ran { logits: logits(&mut engine, tokens, tokens.len()), replayed: false }
        }
        On::Cuda => {
            let backend = CudaBackend::on(device, rig::options(GraphMode::Require, Method::Stream)).unwrap();
            let runner = BackendRunner::new(backend, model, options).unwrap();
            let mut engine = Core::new(Box::new(runner), 64);
            // Steps of 8 rows, some of them padding, then of one.
            let logits = logits(&mut engine, tokens, 6);
            let tally = engine.ledger().tally(StepKind::Prompt);
            assert_eq!(device.take_reports(), Vec::<String>::new());
            Ran { logits, replayed: tally.eager == 0 && tally.failed == 0 && tally.replayed > 1 }
        }
    }
}

/// The logits after every token, evaluated `n` at a time, and at the end one by one.
fn logits(engine: &mut Core, tokens: &[u32], n: usize) -> Vec<f32> {
    let mut sequence = engine.open();
    let (pieces, rest) = tokens.split_at(tokens.len().saturating_sub(3) / n * n);
    let pieces =
        if n == tokens.len() { vec![tokens] } else { pieces.chunks(n).chain(rest.chunks(1)).collect() };
    let mut all = Vec::new();
    for piece in pieces {
        all.extend_from_slice(engine.logits(&mut sequence, piece, piece.len()).unwrap());
    }
    all
}

/// The same model with all weights decoded.
fn decoded(model: &Model) -> Model {
    let ids = (0..model.weights().len()).map(refrain_graph::WeightId::from_idx);
    let values = ids
        .zip(model.tensors())
        .map(|(id, tensor)| (id, HostTensor::from_f32(tensor.shape(), &tensor.to_f32().unwrap()).unwrap()));
    model.with_values(values.collect::<Vec<_>>()).unwrap()
}

fn vocabulary() -> VocabSpec {
    VocabSpec {
        model: "gpt2".into(),
        pre: Some("gpt-2".into()),
        tokens: ["a", "b"].into_iter().collect(),
        token_types: Some(vec![1, 1]),
        merges: Some(["a b"].iter().filter(|_| false).copied().collect()),
        ..VocabSpec::default()
    }
}

/// Result of one architecture in one format on one device.
#[derive(Default)]
struct Found {
    goldens: Vec<String>,
    dtypes: Vec<DType>,
    replayed: bool,
}

type Table = BTreeMap<(usize, Format, On), Found>;

fn position(arch: Arch) -> usize {
    Arch::ALL.iter().position(|known| *known == arch).unwrap()
}

/// Golden models, in F32.
fn goldens(device: &Device, table: &mut Table) {
    for case in CASES {
        let (tokens, want) = golden(case);
        for format in [Format::Safetensors, Format::Gguf] {
            let files = match format {
                Format::Safetensors => ModelFiles::open(folder(case)).unwrap(),
                Format::Gguf => gguf::convert(case, |_| {}),
            };
            for on in [On::Cpu, On::Cuda] {
                let model = Model::load(&files).unwrap();
                let arch = model.config().arch;
                let ran = run(on, device, model, &tokens);
                let error = relative_error(&ran.logits, &want);
                assert!(error < GOLDEN, "{case} as {format:?} on {on:?}: relative error {error:.2e}");
                let found = table.entry((position(arch), format, on)).or_insert_with(|| Found {
                    replayed: true,
                    dtypes: vec![DType::F32],
                    ..Found::default()
                });
                found.goldens.push((*case).to_owned());
                found.replayed &= ran.replayed;
            }
        }
    }
}

/// Golden encoders, in F32: vectors instead of logits.
fn encoders(device: &Device, table: &mut Table) {
    let options =
        EmbedderOptions { pooling: Pooling::Mean, normalizes: true, max_tokens: 64, step_tokens: 64 };
    for case in EMBED_CASES {
        let (texts, want) = embed_golden(case, options.pooling);
        for format in [Format::Safetensors, Format::Gguf] {
            let files = match format {
                Format::Safetensors => ModelFiles::open(folder(case)).unwrap(),
                // GGUF files do not say which GELU they use.
                Format::Gguf if *case == "bert-odd" => continue,
                Format::Gguf => gguf::convert(case, |_| {}),
            };
            let model = Arc::new(Model::load(&files).unwrap());
            let arch = model.config().arch;
            if !arch.is_encoder() {
                continue;
            }
            for on in [On::Cpu, On::Cuda] {
                let model = model.clone();
                let embedder = match on {
                    On::Cpu => Embedder::new(CpuBackend::new(2).unwrap(), model, options).unwrap(),
                    On::Cuda => {
                        let options_of_device = rig::options(GraphMode::Require, Method::Stream);
                        let backend = CudaBackend::on(device, options_of_device).unwrap();
                        Embedder::new(backend, model, options).unwrap()
                    }
                };
                for (got, want) in embedder.embed(texts.clone()).unwrap().iter().zip(&want) {
                    let error = relative_error(got, want);
                    assert!(error < GOLDEN, "{case} as {format:?} on {on:?}: relative error {error:.2e}");
                }
                let ledger = embedder.ledger();
                let tally = ledger.tally(StepKind::Embed);
                let found = table.entry((position(arch), format, on)).or_insert_with(|| Found {
                    replayed: true,
                    dtypes: vec![DType::F32],
                    ..Found::default()
                });
                found.goldens.push((*case).to_owned());
                found.replayed &=
                    on == On::Cpu || (tally.eager == 0 && tally.failed == 0 && tally.replayed > 1);
            }
        }
    }
    assert_eq!(device.take_reports(), Vec::<String>::new());
}

/// Types that are tried with every architecture. Kernels differ by type, not by architecture: one has all of them.
const FEW: [DType; 6] = [DType::F32, DType::F16, DType::BF16, DType::Q8_0, DType::Q4_K, DType::Q6_K];

/// Types that files of an architecture may have.
fn types(device: &Device, arch: Arch, table: &mut Table) {
    let at = tempfile::tempdir().unwrap();
    let (sizes, heads) = SIZES;
    let shape = NamedShape::new(arch.name(), arch, sizes, heads);
    // Every token uses all experts, so rounding cannot change the choice.
    let shape = if matches!(arch, Arch::Qwen3Moe | Arch::Qwen35Moe | Arch::GptOss) {
        shape.with_experts([4, 4, 256])
    } else {
        shape
    };
    let config = shape.fresh_config(64);
    // These have golden models only.
    if config.recurrent.is_some() {
        return;
    }
    // Folders with experts are tried by the golden models.
    let has_experts = config.experts.is_some();
    let fresh = Model::fresh(config, 3).unwrap();
    let is_tried = |dtype: &DType| can_encode(*dtype) && (arch == Arch::Llama || FEW.contains(dtype));
    for dtype in DType::ALL.into_iter().filter(is_tried) {
        for format in [Format::Safetensors, Format::Gguf] {
            if dtype == DType::F32 || format == Format::Safetensors && (!dtype.is_float() || has_experts) {
                continue;
            }
            let path = at.path().join(format!("{format:?}-{dtype}"));
            match format {
                Format::Safetensors => {
                    std::fs::create_dir(&path).unwrap();
                    fresh.write_hf(&path, dtype).unwrap();
                }
                Format::Gguf => fresh.write_gguf(&path, dtype, &vocabulary()).unwrap(),
            }
            let load = || Model::load(&ModelFiles::open(&path).unwrap()).unwrap();
            let want = run(On::Cpu, device, decoded(&load()), &TOKENS).logits;
            for on in [On::Cpu, On::Cuda] {
                let ran = run(on, device, load(), &TOKENS);
                let error = relative_error(&ran.logits, &want);
                assert!(error < near(arch), "{arch} in {dtype} on {on:?}: relative error {error:.2e}");
                let found = table.get_mut(&(position(arch), format, on));
                let found = found.unwrap_or_else(|| panic!("{arch} has no golden model"));
                found.dtypes.push(dtype);
                found.replayed &= ran.replayed;
            }
        }
    }
}

const HEADER: &str = "\
# Supported models

Generated by `cargo test -p refrain --test support`, which also fails if this page is out of date. Every row was run.

- *Golden*: small random models of this architecture whose logits (vectors of texts for encoders) are within 1e-4 of those of
  `transformers`, with weights in F32. They are in `crates/refrain-models/tests/goldens`.
- *Types*: a random model was written in this type, read again, and gave the logits of its decoded weights within 5e-2 (15e-2
  for Gemma 4, whose scores are not scaled). Encoders, models with recurrent layers and folders with experts are tried as they
  are read, so their rows list F32 only. Matrices have the type; vectors in GGUF files are F32. Kernels differ by type, not by
  architecture, so all types were tried with llama and a few with each other architecture.
- *Replayed*: every step was the replay of a recorded graph.
- *CUDA* is the simulated device here, which runs reference functions instead of kernels; `docs/gpu.md` lists runs on a GPU.

| architecture | files | device | golden | types | replayed |
|---|---|---|---|---|---|
";

fn page(table: &Table) -> String {
    let mut page = HEADER.to_owned();
    for ((arch, format, on), found) in table {
        let format = if *format == Format::Gguf { "GGUF" } else { "safetensors" };
        let types: Vec<&str> = found.dtypes.iter().map(|dtype| dtype.name()).collect();
        let (on, replayed) = match (on, found.replayed) {
            (On::Cpu, _) => ("CPU", ""),
            (On::Cuda, true) => ("CUDA", "yes"),
            (On::Cuda, false) => ("CUDA", "no"),
        };
        let (arch, goldens, types) = (Arch::ALL[*arch], found.goldens.join(", "), types.join(", "));
        writeln!(page, "| {arch} | {format} | {on} | {goldens} | {types} | {replayed} |").unwrap();
    }
    page
}

#[test]
fn the_table_of_supported_models_says_what_runs() {
    let (_sim, device) = rig::sim("");
    let mut table = Table::new();
    goldens(&device, &mut table);
    encoders(&device, &mut table);
    // Encoders are read, not written.
    for arch in Arch::ALL.into_iter().filter(|arch| !arch.is_encoder()) {
        types(&device, arch, &mut table);
    }
    let page = page(&table);
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/reference/support.md");
    let fresh = std::env::temp_dir().join("refrain-support.md");
    std::fs::write(&fresh, &page).unwrap();
    assert_eq!(
        std::fs::read_to_string(&path).unwrap_or_default(),
        page,
        "docs/reference/support.md is out of date\nhint: cp {} docs/reference/support.md",
        fresh.display()
    );
}
