//! `refrain show`: a model for the person who will use it.

use crate::cli::CliContext;
use crate::inspect::ModelFacts;
use crate::out::{Stdout, one_line, printable, thousands};
use crate::resolve;
use refrain::{Device, Model, ModelConfig, ModelFiles, TokenizerSummary, free_memory, host_free_bytes};
use refrain_hub::ByteSize;
use serde_json::{Map, Value, json};

/// Show a model: chat template, tokenizer, metadata, size by type, what it needs
///
/// Reads headers only. `refrain inspect --tensors` lists the tensors.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Examples:
  refrain show smollm2
  refrain show ./model.gguf --template
  refrain show ./folder --json | jq .needs")]
pub(crate) struct Args {
    /// A path, a short name such as smollm2, or owner/repo[:QUANT]
    #[arg(value_name = "MODEL")]
    model: String,
    /// Print only the chat template
    #[arg(long)]
    template: bool,
    /// Print one JSON object
    #[arg(long, conflicts_with = "template")]
    json: bool,
}

/// Tokens of the context that the memory is estimated for.
const USUAL_CONTEXT: usize = 4096;
/// The metadata that is printed; arrays are vocabularies.
const MAX_VALUE: usize = 100;

pub(crate) fn run(args: &Args, context: &CliContext) -> anyhow::Result<()> {
    let found = resolve::find(Some(&args.model), context)?;
    let files = found.files()?;
    let template = chat_template(&files);
    let mut out = Stdout::new();
    if args.template {
        let Some(template) = template else {
            let message = format!("{} has no chat template", args.model);
            return Err(crate::fail::Hinted::new(message, "it only continues text").into());
        };
        return out.text(&printable(&format!("{}\n", template.trim_end())));
    }
    let facts = ModelFacts::gather(&found, &files);
    let needs = files.config().ok().map(|config| MemoryNeeds::of(&config, &files));
    if args.json {
        let mut all = facts.to_json();
        all["template"] = json!(template);
        all["metadata"] = metadata(&files);
        all["needs"] = json!(needs.as_ref().map(MemoryNeeds::to_json));
        return out.json(&all);
    }
    out.text(&facts.to_text())?;
    if let Ok(summary) = Model::summarize_tokenizer(&files) {
        out.text(&tokenizer_lines(&summary))?;
    }
    if let Some(needs) = &needs {
        out.text(&needs.to_text())?;
    }
    out.text(&metadata_lines(&files))?;
    if let Some(template) = template {
        out.text(&format!("\nchat template\n{}\n", printable(template.trim_end())))?;
    }
    Ok(())
}

fn chat_template(files: &ModelFiles) -> Option<String> {
    let in_folder = match files {
        ModelFiles::Gguf(_) => None,
        ModelFiles::Hf(folder) => folder.chat_template().and_then(|path| std::fs::read_to_string(path).ok()),
    };
    in_folder.or_else(|| refrain::chat_template_of(files).ok().flatten())
}

fn tokenizer_lines(summary: &TokenizerSummary) -> String {
    format!(
        "\ntokenizer\n  kind          {}\n  tokens        {}\n",
        one_line(&summary.kind),
        thousands(summary.n_tokens)
    )
}

/// What a model needs on this machine.
struct MemoryNeeds {
    weight_bytes: u64,
    kv_bytes: u64,
    n_context: usize,
    host_free: Option<u64>,
    card_free: Option<u64>,
}

impl MemoryNeeds {
    fn of(config: &ModelConfig, files: &ModelFiles) -> MemoryNeeds {
        let n_context = config.n_context.min(USUAL_CONTEXT);
        let card_free = match Device::auto() {
            device @ Device::Cuda { .. } => free_memory(&device).ok().flatten().map(|(free, _)| free),
            _ => None,
        };
        MemoryNeeds {
            weight_bytes: files.tensors().iter().map(|tensor| tensor.n_bytes()).sum(),
            kv_bytes: config.kv_bytes(n_context),
            n_context,
            host_free: host_free_bytes(),
            card_free,
        }
    }

    fn total(&self) -> u64 {
        self.weight_bytes + self.kv_bytes
    }

    fn to_text(&self) -> String {
        let [weights, kv, total] = [self.weight_bytes, self.kv_bytes, self.total()].map(ByteSize);
        let context = thousands(self.n_context);
        let mut text = format!(
            "\nneeds\n  weights       {weights}\n  KV cache      {kv} for {context} tokens in F16\n  together      {total} and some for activations\n"
        );
        for (name, free) in [("memory", self.host_free), ("GPU 0", self.card_free)] {
            let Some(free) = free else { continue };
            let fits = if free > self.total() { "fits" } else { "does not fit" };
            text += &format!("  {name:<13} {} free: {fits}\n", ByteSize(free));
        }
        if self.card_free.is_none() {
            text += "  GPU           none that can be used\n";
        }
        text
    }

    fn to_json(&self) -> Value {
        json!({
            "weight_bytes": self.weight_bytes,
            "kv_bytes": self.kv_bytes,
            "context": self.n_context,
            "host_free_bytes": self.host_free,
            "gpu_free_bytes": self.card_free,
        })
    }
}

/// Metadata with its values as text; long ones are cut.
fn entries(files: &ModelFiles) -> Vec<(String, String)> {
    let cut = |text: String| match text.char_indices().nth(MAX_VALUE) {
        Some((at, _)) => format!("{}...", &text[..at]),
        None => text,
    };
    match files {
        ModelFiles::Gguf(gguf) => gguf
            .metadata()
            .iter()
            .filter(|(key, _)| *key != "tokenizer.chat_template")
            .map(|(key, value)| (key.to_owned(), cut(value.short_text())))
            .collect(),
        ModelFiles::Hf(folder) => {
            folder.config().map().iter().map(|(key, value)| (key.clone(), cut(value.to_string()))).collect()
        }
    }
}

fn metadata(files: &ModelFiles) -> Value {
    entries(files).into_iter().map(|(key, value)| (key, value.into())).collect::<Map<_, _>>().into()
}

fn metadata_lines(files: &ModelFiles) -> String {
    let lines = entries(files).into_iter();
    let lines = lines.map(|(key, value)| format!("  {} = {}\n", one_line(&key), one_line(&value)));
    format!("\nmetadata\n{}", lines.collect::<String>())
}
