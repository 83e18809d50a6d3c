//! The life of an adapter: trained, resumed, applied live on every device, and merged.

use refrain::train::{ConfigOverlay, ExportForm, TrainConfig, TrainEvent, TrainOptions, Training};
use refrain::{
    Builtin, DType, Device, Error, FaultScript, Generate, GraphMode, Method, Model, ModelFiles, NamedLora,
    Prompt, SamplingParams, Service, ServiceOptions, Session, SessionOptions, StepKind,
};
use std::path::{Path, PathBuf};

const BUILTIN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/assets/stories.gguf");
const TEXT: &str = "The old clock on the wall said five, and the five small mice said nothing at all. ";

fn cpu() -> Device {
    Device::Cpu { threads: Some(2) }
}

fn sim(graph: GraphMode) -> Device {
    let faults = FaultScript::parse("").unwrap();
    Device::Sim { seed: 1, faults, graph, method: Method::Stream, profile: false }
}

fn text_file(folder: &Path) -> PathBuf {
    let path = folder.join("text.txt");
    std::fs::write(&path, TEXT.repeat(12)).unwrap();
    path
}

/// A run over the built-in model.
fn config(folder: &Path, out: &str, more: &str) -> TrainConfig {
    let (text, out) = (text_file(folder), folder.join(out));
    let toml = format!(
        "from = 'stories'\ndata = {text:?}\nout = {out:?}\ncontext = 32\nbatch = 2\nlr = 1e-2\n\
         weight_decay = 0.0"
    );
    let usual = TrainConfig::default().overlay(ConfigOverlay::from_toml(&toml).unwrap());
    usual.overlay(ConfigOverlay::from_toml(more).unwrap())
}

fn options(device: Device) -> TrainOptions {
    TrainOptions { device, files: Some(Builtin::Stories.files().unwrap()), ..TrainOptions::default() }
}

fn train(config: TrainConfig, device: Device) -> Result<(Vec<f64>, PathBuf), Error> {
    let training = Training::prepare(config, options(device), &mut |_| {})?;
    let mut losses = Vec::new();
    let finished = training.run(&|| false, &mut |event| {
        if let TrainEvent::Step { record, .. } = event {
            losses.push(record.loss);
        }
    })?;
    assert!(finished.not_exported.is_empty(), "{:?}", finished.not_exported);
    assert_eq!(finished.exports.len(), 1);
    assert_eq!(finished.exports[0].form, ExportForm::Adapter);
    Ok((losses, finished.exports[0].path.clone()))
}

fn perplexity(model: &Model, device: Device) -> f64 {
    let options = SessionOptions { device, context: Some(32), ..SessionOptions::default() };
    let mut session = Session::new(model, &options).unwrap();
    session.perplexity(&TEXT.repeat(4), 32, Some(1), |_, _| {}).unwrap().perplexity
}

fn tensors(adapter: &Path) -> Vec<u8> {
    std::fs::read(adapter.join("adapter_model.safetensors")).unwrap()
}

#[test]
fn an_adapter_is_trained_resumed_used_and_merged() {
    let folder = tempfile::tempdir().unwrap();
    let lora = "dtype = 'bf16'\n[lora]\nrank = 4\nalpha = 8\ndropout = 0.05";
    let (losses, adapter) =
        train(config(folder.path(), "whole", &format!("steps = 6\n{lora}")), cpu()).unwrap();
    assert!(losses[5] < 0.8 * losses[0], "{losses:?}");

    // An interrupted and resumed run gives the same bits.
    let half = format!("steps = 3\nschedule = 'constant'\n{lora}");
    let all = format!("steps = 6\nschedule = 'constant'\n{lora}");
    let (want, whole) = train(config(folder.path(), "all", &all), cpu()).unwrap();
    let (first, _) = train(config(folder.path(), "parts", &half), cpu()).unwrap();
    let (second, parts) =
        train(config(folder.path(), "parts", &format!("resume = true\n{all}")), cpu()).unwrap();
    assert_eq!([first, second].concat(), want);
    assert!(tensors(&parts) == tensors(&whole), "a resumed run gives another adapter");

    // Live on both devices, and merged, it predicts the text it was trained on.
    let base = Model::builtin().unwrap();
    let tuned = base.with_lora(&adapter, 1.0).unwrap();
    let (before, after) = (perplexity(&base, cpu()), perplexity(&tuned, cpu()));
    assert!(after < 0.5 * before, "{before} {after}");
    let near = |got: f64, want: f64| (got / want - 1.0).abs() < 0.03;
    let on_device = perplexity(&tuned, sim(GraphMode::Require));
    assert!(near(on_device, after), "{on_device} {after}");
    assert_eq!(perplexity(&base.with_lora(&adapter, 0.0).unwrap(), cpu()), before);

    let files = Builtin::Stories.files().unwrap();
    let (gguf, hf) = (folder.path().join("merged.gguf"), folder.path().join("merged"));
    for (path, form) in [(gguf, ExportForm::Gguf), (hf, ExportForm::Hf)] {
        match refrain::merge(&files, &adapter, 1.0, &path, DType::F32) {
            Ok(found) => assert_eq!(found, form),
            // The vocabulary of the built-in model can be written in one of the formats only.
            Err(Error::Tokenizer(_)) if form == ExportForm::Hf => continue,
            Err(error) => panic!("{error}"),
        }
        let merged = Model::open(&path).unwrap();
        let found = perplexity(&merged, cpu());
        assert!(near(found, after), "{}: {found} {after}", path.display());
        let error = refrain::merge(&files, &adapter, 1.0, &path, DType::F32).unwrap_err();
        assert!(matches!(error, Error::MergeExists { .. }) && error.hint().is_some(), "{error}");
    }
    let nowhere = folder.path().join("never");
    let error = refrain::merge(&files, &adapter, 1.0, &nowhere, DType::Q8_0).unwrap_err();
    assert!(error.to_string().contains("Q8_0") && !nowhere.exists(), "{error}");
}

/// The built-in model with one bit of one of its weights changed.
fn changed_files(folder: &Path) -> ModelFiles {
    let files = Builtin::Stories.files().unwrap();
    let mut bytes = std::fs::read(BUILTIN).unwrap();
    // The last tensor is a Q8_0 matrix at the end of the file: every bit there belongs to a weight or a scale.
    let last = files.tensors().iter().next_back().unwrap();
    assert_eq!((last.name(), last.dtype()), ("blk.7.ffn_down.weight", DType::Q8_0));
    let at = bytes.len() - 64;
    bytes[at] ^= 1;
    let path = folder.join("changed.gguf");
    std::fs::write(&path, bytes).unwrap();
    ModelFiles::open(path).unwrap()
}

#[test]
fn a_checkpoint_of_an_adapter_is_refused_over_other_frozen_weights_with_both_names() {
    let folder = tempfile::tempdir().unwrap();
    let with = |more: &str| config(folder.path(), "run", &format!("{more}\n[lora]\nrank = 2"));
    let (_, adapter) = train(with("steps = 1"), cpu()).unwrap();
    let state = folder.path().join("run/step-00000001/state.json");
    let state: serde_json::Value = serde_json::from_slice(&std::fs::read(state).unwrap()).unwrap();
    let base = &state["state"]["base"];
    assert_eq!(base["name"], "stories");
    let sha256 = base["sha256"].as_str().unwrap();
    assert_eq!(sha256.len(), 64);

    // The metadata of the adapter has it as well, under keys that `peft` ignores.
    let bytes = tensors(&adapter);
    let n_header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: serde_json::Value = serde_json::from_slice(&bytes[8..8 + n_header]).unwrap();
    let notes = &header["__metadata__"];
    assert_eq!((&notes["format"], &notes["base_model"]), (&"pt".into(), &"stories".into()));
    assert_eq!(notes["base_sha256"], sha256);

    let resume = |name: &str, files: ModelFiles| {
        let mut config = with("steps = 2\nresume = true");
        config.from = Some(name.into());
        let options = TrainOptions { files: Some(files), ..options(cpu()) };
        Training::prepare(config, options, &mut |_| {}).unwrap().run(&|| false, &mut |_| {})
    };
    let error = resume("other.gguf", changed_files(folder.path())).unwrap_err();
    let said = error.to_string();
    assert!(said.contains(&format!("was trained on stories (sha256 {}...)", &sha256[..12])), "{said}");
    assert!(said.contains("is on other.gguf (sha256 "), "{said}");
    assert_eq!(error.hint().unwrap(), "resume with the base model stories");
    let error = resume("stories", changed_files(folder.path())).unwrap_err();
    assert!(error.hint().unwrap().contains("the model has changed"), "{error}");

    // The same weights under another name are accepted.
    resume("copy.gguf", Builtin::Stories.files().unwrap()).unwrap();
}

#[test]
fn an_adapter_on_a_device_is_part_of_the_graph_and_the_plan_says_what_it_costs() {
    let folder = tempfile::tempdir().unwrap();
    let lora = "steps = 2\ndtype = 'bf16'\n[lora]\nrank = 4";
    let (_, adapter) = train(config(folder.path(), "run", lora), cpu()).unwrap();
    let model = Model::builtin().unwrap().with_lora(&adapter, 1.0).unwrap();
    let text = |device: Device| {
        let options = SessionOptions { device, context: Some(64), ..SessionOptions::default() };
        let mut session = Session::new(&model, &options).unwrap();
        let greedy = Some(SamplingParams::greedy());
        let generate = Generate { max_tokens: Some(6), sampling: greedy, ..Generate::default() };
        let pieces = session.generate(Prompt::Text("Once upon a time"), &generate).unwrap();
        (pieces.map(|piece| piece.unwrap().text).collect::<String>(), session)
    };
    let (want, _) = text(cpu());
    let (got, session) = text(sim(GraphMode::Require));
    assert_eq!(got, want);
    let ledger = session.ledger();
    let decode = ledger.tally(StepKind::Decode);
    assert!(decode.replayed > 0 && decode.eager == 0, "{decode}");
    let status = session.device_status().unwrap();
    assert!(status.graphs.iter().all(|graph| graph.bit_exact), "{status:?}");
    let apart = status.unfused.join("\n");
    assert!(apart.contains("an adapter adds to it"), "{apart}");
}

#[test]
fn a_step_over_quantised_weights_is_replayed_on_a_device_and_refused_in_f32() {
    let folder = tempfile::tempdir().unwrap();
    let files = Builtin::Stories.files().unwrap();
    assert!(files.tensors().iter().any(|tensor| tensor.dtype().is_quantized()));
    // Few rows: kernels on the simulated device are slow.
    let lora = "steps = 2\ncontext = 8\nbatch = 1\ngraph = 'require'\n[lora]\nrank = 4";
    let bf16 = |out| config(folder.path(), out, &format!("dtype = 'bf16'\n{lora}"));
    let (on_cpu, _) = train(bf16("cpu"), cpu()).unwrap();
    let (on_device, _) = train(bf16("sim"), sim(GraphMode::Require)).unwrap();
    for (a, b) in on_cpu.iter().zip(&on_device) {
        assert!((a / b - 1.0).abs() < 1e-2, "{on_cpu:?} {on_device:?}");
    }
    let error = train(config(folder.path(), "f32", lora), sim(GraphMode::Require)).unwrap_err();
    assert!(error.to_string().contains("which a GPU decodes to bf16"), "{error}");
    assert!(error.hint().unwrap().contains("bf16"));
}

#[test]
fn settings_of_adapters_are_checked() {
    let folder = tempfile::tempdir().unwrap();
    let refused = |more: &str| {
        let error = train(config(folder.path(), "run", more), cpu()).unwrap_err();
        assert!(error.hint().is_some(), "{error}");
        error.to_string()
    };
    assert!(refused("[lora]\nrank = 0").contains("lora.rank is 0"));
    assert!(refused("[lora]\nalpha = -1").contains("lora.alpha"));
    assert!(refused("[lora]\ndropout = 1").contains("lora.dropout"));
    assert!(
        refused("[lora]\ntargets = ['q_proj', 'moe']")
            .contains("no linear layer of the model is named \"moe\"")
    );
    let error = ConfigOverlay::from_toml("[lora]\nranks = 4").unwrap_err().to_string();
    assert!(error.contains("lora.ranks"), "{error}");
    let new = TrainConfig {
        new: Some(refrain::train::NewModel::Named("llama-1m".into())),
        from: None,
        ..config(folder.path(), "run", "[lora]")
    };
    assert!(new.validate().unwrap_err().to_string().contains("`lora`"));
    assert!(matches!(
        Model::builtin().unwrap().with_lora(folder.path(), f64::NAN),
        Err(Error::AdapterScale { .. })
    ));
    assert!(ModelFiles::open(folder.path()).is_err());
}

#[test]
fn requests_of_different_adapters_share_the_steps_of_one_service() {
    let folder = tempfile::tempdir().unwrap();
    let loras = [("small", 2), ("large", 5)].map(|(name, rank)| {
        let lora = format!("steps = 5\nseed = {rank}\ndtype = 'bf16'\n[lora]\nrank = {rank}\nalpha = 16");
        let (_, folder) = train(config(folder.path(), name, &lora), cpu()).unwrap();
        NamedLora { name: name.into(), folder, scale: 1.0 }
    });
    let base = Model::builtin().unwrap();
    let model = base.with_loras(&loras).unwrap();
    assert_eq!(model.adapter_names(), ["small", "large"]);
    let generate = |adapter: Option<&str>, max_tokens| Generate {
        max_tokens: Some(max_tokens),
        sampling: Some(SamplingParams::greedy()),
        adapter: adapter.map(str::to_owned),
        ..Generate::default()
    };
    // What each gives alone: the adapter on the whole model.
    let alone = |model: &Model, n| {
        let options = SessionOptions { device: cpu(), context: Some(64), ..SessionOptions::default() };
        let mut session = Session::new(model, &options).unwrap();
        let pieces = session.generate(Prompt::Text("Once upon"), &generate(None, n)).unwrap();
        pieces.map(|piece| piece.unwrap().text).collect::<String>()
    };
    let lengths = [7, 3, 9];
    let mut want = vec![alone(&base, lengths[0])];
    for (lora, n) in loras.iter().zip(&lengths[1..]) {
        want.push(alone(&base.with_lora(&lora.folder, 1.0).unwrap(), *n));
    }
    let names = [None, Some("small"), Some("large")];
    for device in [cpu(), sim(GraphMode::Require)] {
        let session = SessionOptions { device, context: Some(32), ..SessionOptions::default() };
        let options = ServiceOptions { session, max_seqs: 3, ..ServiceOptions::default() };
        let service = Service::new(&model, &options).unwrap();
        // Twice: rows of other adapters take the places of those that end first.
        let ask = |idx: usize| {
            service.submit(Prompt::Text("Once upon"), &generate(names[idx % 3], lengths[idx % 3])).unwrap()
        };
        let replies: Vec<_> = (0..6).map(ask).collect();
        for (idx, reply) in replies.into_iter().enumerate() {
            assert_eq!(
                reply.text().unwrap().0,
                want[idx % 3],
                "{:?} on {}",
                names[idx % 3],
                service.backend()
            );
        }
        if let Some(status) = service.device_status() {
            let decode = service.ledger().unwrap().tally(StepKind::Decode).clone();
            assert!(decode.replayed > 0 && decode.eager == 0, "{decode}");
            assert!(status.graphs.iter().all(|graph| graph.bit_exact), "{status:?}");
            let apart = status.unfused.join("\n");
            assert!(apart.contains("an adapter adds to it"), "{apart}");
        }
        let error = service.submit(Prompt::Text("A"), &generate(Some("poems"), 1)).err().unwrap();
        assert_eq!(error.to_string(), "the model has no adapter \"poems\"");
        assert_eq!(error.hint().unwrap(), "its adapters are small, large");
    }
    // A session has one adapter.
    let options =
        SessionOptions { device: cpu(), adapter: Some("large".into()), ..SessionOptions::default() };
    let mut session = Session::new(&model, &options).unwrap();
    let pieces = session.generate(Prompt::Text("Once upon"), &generate(None, lengths[2])).unwrap();
    assert_eq!(pieces.map(|piece| piece.unwrap().text).collect::<String>(), want[2]);
    let error = session.generate(Prompt::Text("A"), &generate(Some("small"), 1)).err().unwrap();
    assert!(error.to_string().contains("small was requested for a sequence with adapter large"), "{error}");
    let options = SessionOptions { adapter: Some("poems".into()), ..options };
    assert!(Session::new(&model, &options).is_err());
}
