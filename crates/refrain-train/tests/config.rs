//! Configuration files, flags that override them, and invalid values.

use refrain_models::{LoraSpec, Targets};
use refrain_train::config::{
    Clip, ConfigError, EvalSource, KEYS, LoraTable, Masters, NewModel, Order, Paths, Precision, Resume,
    ScheduleKind, TokenizerSource,
};
use refrain_train::{ConfigOverlay, TrainConfig};

const WHOLE: &str = r#"
new = { arch = "llama", n_layers = 6, hidden = 320, ffn = 896, n_heads = 5 }
data = ["a.txt", "b.jsonl"]
tokenizer = { train = { vocab_size = 8192 } }
context = 512
batch = 4
accumulate = 2
steps = 2000
lr = 6e-4
min_lr = 6e-5
schedule = "linear"
warmup = 100
weight_decay = 0
betas = [0.9, 0.98]
eps = 1e-9
clip = "none"
dtype = "bf16"
masters = "none"
order = "file"
seed = 7
dropout = 0.1
checkpoint_activations = true
device = "cpu"
graph = "off"
log = "run.jsonl"
out = "run"
eval = 0.05
eval_every = 100
save_every = 200
keep = 2
sample_every = 500
sample_prompt = "Once"
resume = true
export = "gguf"
on_long = "drop"
"#;

fn parse(text: &str) -> Result<TrainConfig, ConfigError> {
    let config = TrainConfig::default().overlay(ConfigOverlay::from_toml(text)?);
    config.validate()?;
    Ok(config)
}

fn with(line: &str) -> Result<TrainConfig, ConfigError> {
    parse(&format!("from = \"model.gguf\"\ndata = \"a.txt\"\n{line}"))
}

#[test]
fn a_file_with_every_key_is_read() {
    let config = parse(WHOLE).unwrap();
    assert_eq!(config.data, Paths::from_iter(["a.txt", "b.jsonl"]));
    assert_eq!((config.context, config.batch, config.accumulate), (512, 4, 2));
    assert_eq!(config.tokens_per_step(), 4096);
    assert_eq!((config.lr, config.min_lr, config.schedule), (6e-4, 6e-5, ScheduleKind::Linear));
    assert_eq!((config.clip, config.betas), (Clip::None, [0.9, 0.98]));
    assert_eq!((config.dtype, config.masters), (Precision::Bf16, Masters::None));
    assert_eq!((config.order, config.resume), (Order::File, Resume::Switch(true)));
    assert_eq!(config.eval, Some(EvalSource::Share(0.05)));
    let Some(NewModel::Shape(shape)) = &config.new else { panic!("{:?}", config.new) };
    assert_eq!((shape.n_layers, shape.n_kv_heads), (6, None));
    // The file above has every key except `from` and those that require it, so a new key must be added there.
    let keys = toml_keys(WHOLE);
    let missing: Vec<_> = KEYS.iter().filter(|key| !keys.contains(&key.name)).map(|key| key.name).collect();
    assert_eq!(missing, ["from", "lora"]);
}

#[test]
fn the_lora_table_has_optional_keys_that_are_merged_one_by_one() {
    let whole =
        "lora = { rank = 8, alpha = 4, dropout = 0.1, targets = ['q_proj', 'attn_v'], rslora = true }";
    let config = with(whole).unwrap();
    let spec = config.lora.as_ref().unwrap().spec();
    let names = Targets::Modules(vec!["q_proj".into(), "attn_v".into()]);
    let want = LoraSpec { rank: 8, alpha: 4.0, rslora: true, dropout: 0.1, targets: names };
    assert_eq!(spec, want);
    let flags = LoraTable { rank: Some(2), ..LoraTable::default() };
    let after = config.clone().overlay(ConfigOverlay { lora: Some(flags), ..ConfigOverlay::default() });
    assert_eq!(after.lora.as_ref().unwrap().spec(), LoraSpec { rank: 2, ..want });
    assert_eq!(config.clone().overlay(ConfigOverlay::default()), config);
    let usual = with("[lora]").unwrap().lora.unwrap().spec();
    assert_eq!((usual.rank, usual.alpha, usual.targets), (16, 32.0, Targets::All));
    let attention = with("lora = { targets = 'attention' }").unwrap().lora.unwrap().spec();
    assert_eq!(attention.targets, Targets::Attention);
    // As in checkpoints and reports.
    let json = serde_json::to_string(&config).unwrap();
    assert_eq!(serde_json::from_str::<TrainConfig>(&json).unwrap(), config);
    let toml = toml::to_string_pretty(&config).unwrap();
    assert_eq!(TrainConfig::default().overlay(ConfigOverlay::from_toml(&toml).unwrap()), config);
    let error = with("[lora]\nrnk = 3").unwrap_err();
    assert!(error.to_string().contains("lora.rnk"), "{error}");
    assert!(error.hint().unwrap().contains("lora.rank"), "{:?}", error.hint());
    assert!(with("lora = { targets = [] }").is_err() && with("lora = { targets = 'a,,b' }").is_err());
}

fn toml_keys(text: &str) -> Vec<&str> {
    text.lines().filter_map(|line| Some(line.split_once(" = ")?.0)).collect()
}

#[test]
fn defaults_are_valid_and_one_path_is_a_list() {
    let config = with("").unwrap();
    assert_eq!(config.data, Paths::from_iter(["a.txt"]));
    assert_eq!(
        config,
        TrainConfig { from: Some("model.gguf".into()), data: config.data.clone(), ..TrainConfig::default() }
    );
}

#[test]
fn flags_override_the_file_key_by_key() {
    let file = ConfigOverlay::from_toml(WHOLE).unwrap();
    let flags = ConfigOverlay { lr: Some(1e-3), out: Some("other".into()), ..ConfigOverlay::default() };
    let before = TrainConfig::default().overlay(file);
    let after = before.clone().overlay(flags);
    assert_eq!((after.lr, after.out.as_deref()), (1e-3, Some("other".as_ref())));
    assert_eq!(TrainConfig { lr: before.lr, out: before.out.clone(), ..after }, before);
}

#[test]
fn a_model_from_the_flags_replaces_the_files() {
    let file = TrainConfig::default().overlay(ConfigOverlay::from_toml(WHOLE).unwrap());
    let flags = ConfigOverlay { from: Some("model.gguf".into()), ..ConfigOverlay::default() };
    let config = file.overlay(flags);
    assert_eq!((config.from.as_deref(), &config.new), (Some("model.gguf"), &None));
    config.validate().unwrap();
}

#[test]
fn a_configuration_round_trips_through_json_bit_for_bit() {
    for text in
        [WHOLE, "from = \"m\"\ndata = \"d\"\nlr = 0.00012345678901234567\nresume = \"x\"\neval = \"e.txt\""]
    {
        let config = parse(text).unwrap();
        let json = serde_json::to_string(&config).unwrap();
        let back: TrainConfig = serde_json::from_str(&json).unwrap();
        assert_eq!(back, config);
        assert_eq!(back.lr.to_bits(), config.lr.to_bits());
    }
}

#[test]
fn an_unknown_key_is_reported_with_its_line_and_a_suggestion() {
    let cases = [
        ("warm_up = 3", "line 3: unknown key `warm_up`", Some("did you mean `warmup`?")),
        ("learning_rate = 3", "line 3: unknown key `learning_rate`", None),
        ("\n\nsave-every = 3", "line 5: unknown key `save-every`", Some("did you mean `save_every`?")),
        (
            "tokenizer = { trains = 1 }",
            "unknown key `tokenizer.trains`",
            Some("did you mean `tokenizer.train`?"),
        ),
        (
            "tokenizer.train.vocabsize = 3",
            "unknown key `tokenizer.train.vocabsize`",
            Some("did you mean `tokenizer.train.vocab_size`?"),
        ),
    ];
    for (line, message, hint) in cases {
        let error = with(line).unwrap_err();
        assert!(error.to_string().contains(message), "{error}");
        if let Some(hint) = hint {
            assert_eq!(error.hint().as_deref(), Some(hint));
        }
    }
    let text = WHOLE.replace("n_heads", "heads");
    let error = parse(&text).unwrap_err();
    assert_eq!(error.to_string(), "line 2: unknown key `new.heads`");
    assert_eq!(error.hint().unwrap(), "did you mean `new.n_heads`?");
}

#[test]
fn values_out_of_range_are_refused_with_a_hint() {
    let cases = [
        ("lr = 0", "lr is 0, it must be a finite number above 0"),
        ("lr = -1e-3", "lr is -0.001"),
        ("lr = nan", "lr is NaN"),
        ("lr = inf", "lr is inf"),
        ("min_lr = 1", "min_lr is 1, it must be between 0 and lr, 0.0003"),
        ("min_lr = nan", "min_lr is NaN"),
        ("betas = [0.9, 1.0]", "betas is 1, it must be at least 0 and below 1"),
        ("betas = [-0.1, 0.9]", "betas is -0.1"),
        ("betas = [nan, 0.9]", "betas is NaN"),
        ("eps = 0", "eps is 0"),
        ("clip = 0", "clip is 0, it must be a finite number above 0"),
        ("clip = -1", "clip is -1"),
        ("clip = nan", "clip is NaN"),
        ("weight_decay = -0.1", "weight_decay is -0.1"),
        ("dropout = 1", "dropout is 1, it must be at least 0 and below 1"),
        ("context = 0", "context is 0, it must be at least 1"),
        ("batch = 0", "batch is 0"),
        ("accumulate = 0", "accumulate is 0"),
        ("steps = 0", "steps is 0"),
        ("steps = 10\nwarmup = 11", "warmup is 11, it must be at most the 10 steps"),
        ("batch = 65536\ncontext = 65536", "batch is 65536 rows of 65536 tokens"),
        ("eval = 1.0", "eval is 1, it must be a share between 0 and 1"),
        ("eval = 0", "eval is 0"),
        ("eval = 0.1\neval_every = 0", "eval_every is 0"),
        ("eval_every = 5", "the held-out data (`eval`) for eval_every is missing"),
        ("save_every = 5", "the folder (`out`) for save_every is missing"),
        ("keep = 0", "keep is 0"),
        ("masters = \"none\"", "masters = \"none\" and dtype = \"f32\" cannot be combined"),
        ("tokenizer = { train = { vocab_size = 256 } }", "tokenizer.train.vocab_size is 256"),
        ("new = \"tiny\"", "`from` and `new` cannot be combined"),
    ];
    for (line, message) in cases {
        let error = with(line).expect_err(line);
        assert!(error.to_string().contains(message), "{line}: {error}");
        let hint = error.hint().expect("a hint");
        assert!(!hint.is_empty() && !hint.ends_with('.'), "{hint}");
    }
}

#[test]
fn a_shape_must_fit_together() {
    let shape = |more: &str| {
        parse(&format!("data = \"a\"\nnew = {{ arch = \"llama\", n_layers = 2, ffn = 8, {more} }}"))
    };
    shape("hidden = 12, n_heads = 4, n_kv_heads = 2").unwrap();
    shape("hidden = 13, n_heads = 4, head_dim = 8").unwrap();
    for (more, message) in [
        ("hidden = 13, n_heads = 4", "new.hidden is 13, it must be a multiple of n_heads, 4"),
        (
            "hidden = 12, n_heads = 4, n_kv_heads = 3",
            "new.n_kv_heads is 3, it must be a divisor of n_heads, 4",
        ),
        ("hidden = 0, n_heads = 4", "new.hidden is 0"),
        ("hidden = 12, n_heads = 0", "new.n_heads is 0"),
        ("hidden = 12, n_heads = 4, n_kv_heads = 0", "new.n_kv_heads is 0"),
        ("hidden = 12, n_heads = 4, rope_theta = nan", "new.rope_theta is NaN"),
    ] {
        let error = shape(more).expect_err(more);
        assert!(error.to_string().contains(message), "{error}");
    }
}

#[test]
fn missing_keys_are_named() {
    let error = parse("data = \"a.txt\"").unwrap_err();
    assert!(error.to_string().contains("the model (`from` or `new`) is missing"), "{error}");
    let error = parse("from = \"m\"").unwrap_err();
    assert!(error.to_string().contains("the training data (`data`) is missing"), "{error}");
}

#[test]
fn wrong_types_and_broken_toml_are_errors_with_a_line() {
    for (line, part) in [
        ("context = \"big\"", "line 3"),
        ("context = -3", "line 3"),
        ("betas = [0.9]", "line 3"),
        ("schedule = \"cosin\"", "cosin"),
        ("new = 3", "the name of a shape"),
        ("clip = \"maybe\"", "a number above 0, or \"none\""),
        ("eval = true", "a file, or a share"),
        ("lr = ", "line 3"),
        ("lr = 1\nlr = 2", "line 4"),
    ] {
        let error = with(line).expect_err(line);
        assert!(matches!(error, ConfigError::Syntax { .. }), "{error}");
        assert!(error.to_string().contains(part), "{line}: {error}");
    }
}

#[test]
fn words_and_values_of_flags_are_parsed() {
    assert_eq!("cosine".parse(), Ok(ScheduleKind::Cosine));
    let error = "cosin".parse::<ScheduleKind>().unwrap_err().to_string();
    assert_eq!(error, "`cosin` is not one of cosine, linear, constant; did you mean `cosine`?");
    assert_eq!("none".parse(), Ok(Clip::None));
    assert_eq!("0.5".parse(), Ok(Clip::Norm(0.5)));
    assert!("x".parse::<Clip>().is_err());
    assert_eq!("0.1".parse(), Ok(EvalSource::Share(0.1)));
    assert_eq!("held.txt".parse(), Ok(EvalSource::File("held.txt".into())));
    assert!(matches!("train:300".parse(), Ok(TokenizerSource::Train { train }) if train.vocab_size == 300));
    assert!("train:x".parse::<TokenizerSource>().is_err());
    assert_eq!("true".parse(), Ok(Resume::Switch(true)));
    assert_eq!("run/step-00000100".parse(), Ok(Resume::From("run/step-00000100".into())));
    assert_eq!("smollm2-135m".parse(), Ok(NewModel::Named("smollm2-135m".into())));
}

#[test]
fn files_that_are_not_configurations_are_refused_without_reading_all_of_them() {
    let folder = tempfile::tempdir().unwrap();
    let missing = ConfigOverlay::read(&folder.path().join("none.toml")).unwrap_err();
    assert!(matches!(missing, ConfigError::Read { .. }));
    let large = folder.path().join("data.txt");
    std::fs::File::create(&large).unwrap().set_len(1 << 40).unwrap();
    let error = ConfigOverlay::read(&large).unwrap_err();
    assert!(matches!(error, ConfigError::TooLarge { bytes, .. } if bytes == 1 << 40), "{error}");
    let binary = folder.path().join("model.gguf");
    std::fs::write(&binary, b"GGUF\x03\0\xff\xff").unwrap();
    assert!(matches!(ConfigOverlay::read(&binary), Err(ConfigError::Read { .. })));
}

#[test]
fn the_training_page_describes_every_key_as_the_code_does() {
    let page = include_str!("../../../docs/training.md");
    for key in KEYS {
        let row = format!("| `{}` | {} |", key.name, key.about.trim_end_matches('.'));
        assert!(page.contains(&row), "docs/training.md lacks:\n{row}");
    }
}
