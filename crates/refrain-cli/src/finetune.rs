//! `refrain finetune`: training an adapter, or a whole existing model.

use crate::cli::CliContext;
use crate::train::{DataOpts, RunOpts, StepOpts, TrainDeviceOpts, TrainRequest, overlay, train};
use refrain::train::{LoraTable, LoraTargets, Paths, Precision, TrainConfig};
use std::path::{Path, PathBuf};

/// Fine-tune an existing model: train a LoRA adapter, or all of its weights
///
/// By default, low-rank adapters are trained on all linear layers over frozen weights, which may be quantised. The adapter
/// goes to the folder `adapter` in --out, in the format of peft: `refrain run --lora` applies it live, and `refrain merge`
/// merges it. Checkpoints, log and report are those of `refrain train`.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Examples:
  refrain finetune smollm2 chats.jsonl --context 512 --steps 300 --out tuned
  refrain run --lora tuned/adapter smollm2 \"Why is the sky blue?\"
  refrain merge smollm2 --lora tuned/adapter -o tuned.gguf

  refrain finetune ./model-Q4_K_M.gguf notes.txt --rank 32 --alpha 64 --targets attention
  refrain finetune run.toml --lr 1e-4               settings from a file, which may have a table [lora]
  refrain finetune ./folder chats.jsonl --full      every weight, as refrain train --from
  refrain finetune --resume=tuned --steps 600       three hundred more steps")]
pub(crate) struct Args {
    /// A path, a short name such as smollm2, or owner/repo[:QUANT]; or a configuration file that ends in .toml
    #[arg(value_name = "MODEL|CONFIG.toml", required_unless_present = "resume")]
    model: Option<String>,
    /// Training files: text, or JSONL (messages, prompt and completion, instructions)
    #[arg(value_name = "DATA")]
    data: Vec<PathBuf>,
    #[command(flatten)]
    lora: AdapterOpts,
    #[command(flatten)]
    rows: DataOpts,
    #[command(flatten)]
    steps: StepOpts,
    #[command(flatten)]
    run: RunOpts,
    #[command(flatten)]
    device: TrainDeviceOpts,
}

#[derive(clap::Args, Debug)]
#[command(next_help_heading = "Adapter")]
struct AdapterOpts {
    /// Rank of the adapters [default: 16]
    #[arg(long, value_name = "N", conflicts_with = "full")]
    rank: Option<usize>,
    /// Their contribution is multiplied by alpha / rank [default: 32]
    #[arg(long, value_name = "X", allow_negative_numbers = true, conflicts_with = "full")]
    alpha: Option<f64>,
    /// Dropout rate of the adapters' inputs [default: 0]
    #[arg(long, value_name = "P", allow_negative_numbers = true, conflicts_with = "full")]
    lora_dropout: Option<f64>,
    /// Linear layers that get an adapter: all, attention, or names such as q_proj,v_proj [default: all]
    #[arg(long, value_name = "WHICH", conflicts_with = "full")]
    targets: Option<String>,
    /// Divide alpha by the square root of the rank, as in rank-stabilised LoRA
    #[arg(long, conflicts_with = "full")]
    rslora: bool,
    /// Train every weight of the model instead of adapters
    #[arg(long)]
    full: bool,
}

pub(crate) fn run(args: &Args, context: &CliContext) -> anyhow::Result<()> {
    let (lora, is_full) = (&args.lora, args.lora.full);
    let mut overlay = overlay(&args.rows, &args.steps, &args.run, &args.device);
    let is_file = args.model.as_deref().is_some_and(|model| has_ending(model, "toml"));
    let file = args.model.as_deref().filter(|_| is_file).map(Path::new);
    overlay.from = args.model.clone().filter(|_| !is_file);
    overlay.data = (!args.data.is_empty()).then(|| Paths(args.data.clone()));
    let table = LoraTable {
        rank: lora.rank,
        alpha: lora.alpha,
        dropout: lora.lora_dropout,
        targets: lora.targets.clone().map(LoraTargets::Word),
        rslora: lora.rslora.then_some(true),
    };
    // An empty table enables adapters, except when resuming a run that may train the whole model.
    let resumes = args.run.resumes();
    overlay.lora = (!is_full && (!resumes || table != LoraTable::default())).then_some(table);
    let usual = TrainConfig {
        lr: if is_full { 2e-5 } else { 2e-4 },
        weight_decay: 0.0,
        dtype: Precision::Bf16,
        ..TrainConfig::default()
    };
    let (run, device) = (&args.run, &args.device);
    train(&TrainRequest { usual, file, overlay, is_full, run, device }, context)
}

fn has_ending(path: &str, ending: &str) -> bool {
    Path::new(path).extension().is_some_and(|found| found.eq_ignore_ascii_case(ending))
}
