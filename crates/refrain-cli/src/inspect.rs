//! `refrain inspect`: the contents of a model's files.

use crate::cli::CliContext;
use crate::out::{Stdout, counted, one_line, short_count, thousands};
use crate::resolve::{self, FoundModel};
use crate::stats;
use refrain::{Model, ModelConfig, ModelFiles, TensorInfo, TokenizerSummary};
use refrain_hub::{ByteSize, Licence};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::io::Read;

/// The part of a model card that is searched for its licence.
const CARD_BYTES: u64 = 16 << 10;

/// Show the contents of a model's files
///
/// Reads headers only, not the weights. Also works with files that contain only a vocabulary.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Examples:
  refrain inspect smollm2
  refrain inspect ./model.gguf --tensors
  refrain inspect ./folder --json | jq .parameters")]
pub(crate) struct Args {
    /// A path, a short name such as smollm2, or owner/repo[:QUANT]
    #[arg(value_name = "MODEL")]
    model: String,
    /// List every tensor
    #[arg(long)]
    tensors: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args, context: &CliContext) -> anyhow::Result<()> {
    let found = resolve::find(Some(&args.model), context)?;
    let files = found.files()?;
    let facts = ModelFacts::gather(&found, &files);
    let mut out = Stdout::new();
    if args.json {
        let mut all = facts.to_json();
        if args.tensors {
            all["tensors"] = files.tensors().iter().map(tensor_json).collect();
        }
        return out.json(&all);
    }
    out.text(&facts.to_text())?;
    if args.tensors {
        out.text(&tensor_table(files.tensors()))?;
    }
    Ok(())
}

pub(crate) struct ModelFacts<'a> {
    files: &'a ModelFiles,
    name: Option<String>,
    /// The architecture in the files, even if Refrain cannot run it.
    arch: Option<String>,
    config: Result<ModelConfig, String>,
    tokenizer: Result<TokenizerSummary, String>,
    has_chat_template: bool,
    licence: Option<Licence>,
}

impl ModelFacts<'_> {
    pub(crate) fn gather<'a>(found: &FoundModel, files: &'a ModelFiles) -> ModelFacts<'a> {
        let config = files.config().map_err(|e| e.to_string());
        let tokenizer = Model::summarize_tokenizer(files).map_err(|e| e.to_string());
        let in_folder = match files {
            ModelFiles::Gguf(_) => false,
            ModelFiles::Hf(folder) => folder.chat_template().is_some(),
        };
        let in_vocabulary = tokenizer.as_ref().is_ok_and(|t| t.has_chat_template);
        let name =
            config.as_ref().ok().and_then(|c| c.name.clone()).or_else(|| text_of(files, "general.name"));
        ModelFacts {
            files,
            name,
            arch: architecture(files),
            config,
            tokenizer,
            has_chat_template: in_folder || in_vocabulary,
            licence: found.licence.clone().or_else(|| licence(files)),
        }
    }

    fn n_parameters(&self) -> u64 {
        self.files.tensors().iter().map(|t| t.shape().n_elements() as u64).sum()
    }

    fn file_bytes(&self) -> u64 {
        self.files.files().iter().map(|(_, bytes)| bytes).sum()
    }

    /// Bytes and tensors by element type, in descending order of size.
    fn by_dtype(&self) -> Vec<(String, u64, usize)> {
        let mut mix: BTreeMap<String, (u64, usize)> = BTreeMap::new();
        for tensor in self.files.tensors() {
            let entry = mix.entry(tensor.dtype().to_string()).or_default();
            entry.0 += tensor.n_bytes();
            entry.1 += 1;
        }
        let mut mix: Vec<_> = mix.into_iter().map(|(dtype, (bytes, n))| (dtype, bytes, n)).collect();
        mix.sort_by_key(|(_, bytes, _)| std::cmp::Reverse(*bytes));
        mix
    }

    pub(crate) fn to_text(&self) -> String {
        let mut lines = FactLines(String::new());
        lines.add("name", self.name.as_deref().unwrap_or("not given"));
        let arch = self.arch.as_deref().unwrap_or("not given");
        lines.add("architecture", arch);
        match &self.config {
            Ok(c) => {
                let heads = match c.n_kv_heads == c.n_heads {
                    true => format!("{} heads", c.n_heads),
                    false => format!("{} heads, {} KV heads", c.n_heads, c.n_kv_heads),
                };
                lines.add(
                    "layers",
                    format!("{} of width {}, {heads} of size {}", c.n_layers, c.hidden, c.head_dim),
                );
                lines.add("feed-forward", format!("width {}", thousands(c.ffn)));
                let window =
                    c.sliding_window.map(|w| format!(", {} in layers with a sliding window", thousands(w)));
                lines.add(
                    "context",
                    format!("{} tokens{}", thousands(c.n_context), window.unwrap_or_default()),
                );
            }
            Err(because) => lines.add("not runnable", because),
        }
        let n_tensors = self.files.tensors().len();
        lines.add(
            "parameters",
            format!("{} in {}", short_count(self.n_parameters()), counted(n_tensors, "tensor")),
        );
        let n_files = match self.files.files().len() {
            1 => String::new(),
            n => format!(" in {n} files"),
        };
        lines.add("size", format!("{}{n_files}", ByteSize(self.file_bytes())));
        for (i, (dtype, bytes, n)) in self.by_dtype().into_iter().enumerate() {
            let key = if i == 0 { "weights" } else { "" };
            lines.add(
                key,
                format!("{dtype:<7}{:>11} in {}", ByteSize(bytes).to_string(), counted(n, "tensor")),
            );
        }
        if let Some(told) = stats::quantized_line(self.files) {
            lines.add("quantised", told);
        }
        match &self.tokenizer {
            Ok(t) => lines.add("tokenizer", format!("{}, {} tokens", t.kind, thousands(t.n_tokens))),
            Err(because) => lines.add("tokenizer", because),
        }
        let is_encoder = self.config.as_ref().is_ok_and(|config| config.arch.is_encoder());
        let template = match (self.has_chat_template, is_encoder) {
            (true, _) => "yes",
            (false, true) => "no: it turns texts into vectors",
            (false, false) => "no: it only continues text",
        };
        lines.add("chat template", template);
        let licence = self.licence.as_ref().map_or_else(|| "not given".to_owned(), Licence::to_string);
        lines.add("licence", licence);
        lines.add("path", self.files.path().display());
        lines.0
    }

    fn quantized_json(&self) -> Option<Value> {
        let ModelFiles::Hf(folder) = self.files else { return None };
        let told = folder.quantized()?;
        Some(json!({
            "stored_as": told.stored_as,
            "weights": told.n_weights,
            "file_bytes": told.file_bytes,
            "memory_bytes": told.memory_bytes,
            "dtypes": told.dtypes.iter().map(ToString::to_string).collect::<Vec<_>>(),
        }))
    }

    pub(crate) fn to_json(&self) -> Value {
        let config = self.config.as_ref().ok().map(|c| {
            json!({
                "n_layers": c.n_layers,
                "hidden": c.hidden,
                "ffn": c.ffn,
                "n_heads": c.n_heads,
                "n_kv_heads": c.n_kv_heads,
                "head_dim": c.head_dim,
                "n_vocab": c.n_vocab,
                "n_context": c.n_context,
                "sliding_window": c.sliding_window,
                "tied_embeddings": c.tied_embeddings,
            })
        });
        let dtypes: Map<String, Value> = self
            .by_dtype()
            .into_iter()
            .map(|(d, bytes, n)| (d, json!({ "bytes": bytes, "tensors": n })))
            .collect();
        json!({
            "name": self.name,
            "path": self.files.path(),
            "architecture": self.arch,
            "config": config,
            "not_runnable": self.config.as_ref().err(),
            "parameters": self.n_parameters(),
            "n_tensors": self.files.tensors().len(),
            "file_bytes": self.file_bytes(),
            "dtypes": dtypes,
            "quantized": self.quantized_json(),
            "tokenizer": {
                "kind": self.tokenizer.as_ref().ok().map(|t| &t.kind),
                "vocab": self.tokenizer.as_ref().ok().map(|t| t.n_tokens),
                "error": self.tokenizer.as_ref().err(),
            },
            "chat_template": self.has_chat_template,
            "licence": self.licence.as_ref().map(|l| json!({ "name": l.name, "url": l.url })),
        })
    }
}

/// Lines of a key and its value.
struct FactLines(String);

impl FactLines {
    fn add(&mut self, key: &str, value: impl std::fmt::Display) {
        // Metadata may hold escape sequences and line breaks.
        let value = one_line(&value.to_string());
        self.0.push_str(&format!("{key:<14} {value}\n"));
    }
}

fn text_of(files: &ModelFiles, key: &str) -> Option<String> {
    match files {
        ModelFiles::Gguf(gguf) => gguf.metadata().str(key).ok().map(str::to_owned),
        ModelFiles::Hf(_) => None,
    }
}

fn architecture(files: &ModelFiles) -> Option<String> {
    match files {
        ModelFiles::Gguf(_) => text_of(files, "general.architecture"),
        ModelFiles::Hf(folder) => Some(folder.config().get("model_type")?.as_str()?.to_owned()),
    }
}

/// The licence in the GGUF metadata, or in the head of a folder's model card.
fn licence(files: &ModelFiles) -> Option<Licence> {
    match files {
        ModelFiles::Gguf(_) => Some(Licence {
            name: text_of(files, "general.license")?,
            url: text_of(files, "general.license.link"),
        }),
        ModelFiles::Hf(folder) => {
            let mut head = Vec::new();
            let card = std::fs::File::open(folder.file("README.md")?).ok()?;
            card.take(CARD_BYTES).read_to_end(&mut head).ok()?;
            let head = String::from_utf8_lossy(&head);
            let front = head.strip_prefix("---")?;
            let mut lines = front.lines().take_while(|line| line.trim() != "---" || line.is_empty());
            let name = lines.find_map(|line| line.strip_prefix("license:"))?.trim();
            (!name.is_empty()).then(|| Licence { name: name.to_owned(), url: None })
        }
    }
}

fn tensor_table(tensors: &[TensorInfo]) -> String {
    let names: Vec<String> = tensors.iter().map(|t| one_line(t.name())).collect();
    let width = names.iter().map(|name| name.chars().count()).max().unwrap_or(0);
    let row = |(t, name): (&TensorInfo, &String)| {
        let (shape, dtype) = (t.shape().to_string(), t.dtype().to_string());
        format!("{name:<width$}  {shape:<18} {dtype:<7} {:>11}\n", ByteSize(t.n_bytes()).to_string())
    };
    std::iter::once("\n".to_owned()).chain(tensors.iter().zip(&names).map(row)).collect()
}

fn tensor_json(t: &TensorInfo) -> Value {
    json!({
        "name": t.name(),
        "shape": t.shape().dims(),
        "dtype": t.dtype().to_string(),
        "bytes": t.n_bytes(),
        "offset": t.offset(),
    })
}
