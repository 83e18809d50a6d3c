//! `refrain merge`: merging an adapter into its model.

use crate::bars::Delayed;
use crate::cli::CliContext;
use crate::opts::LoraArg;
use crate::out::{Stdout, talk};
use crate::resolve;
use refrain::DType;
use refrain::train::ExportForm;
use std::path::PathBuf;

/// Write a model with a LoRA adapter merged into its weights
///
/// Writes a GGUF file if OUT ends in .gguf, otherwise a Hugging Face folder. Quantised weights are decoded to the float
/// type of --type.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Examples:
  refrain merge smollm2 --lora tuned/adapter -o tuned.gguf
  refrain merge ./folder --lora tuned/adapter=0.5 -o merged --type f16")]
pub(crate) struct Args {
    /// A path, a short name such as smollm2, or owner/repo[:QUANT]
    #[arg(value_name = "MODEL")]
    model: String,
    /// Folder of the adapter, optionally with a scale
    #[arg(long, value_name = "DIR[=SCALE]")]
    lora: LoraArg,
    /// A file that ends in .gguf, or a folder for a Hugging Face model
    #[arg(short, long, value_name = "OUT")]
    output: PathBuf,
    /// Element type of matrices: f32, f16 or bf16
    #[arg(long = "type", value_name = "TYPE", default_value = "bf16")]
    dtype: TypeArg,
}

/// Element type of a merged model.
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum TypeArg {
    F32,
    F16,
    Bf16,
}

pub(crate) fn run(args: &Args, context: &CliContext) -> anyhow::Result<()> {
    let files = resolve::find(Some(&args.model), context)?.files()?;
    let dtype = match args.dtype {
        TypeArg::F32 => DType::F32,
        TypeArg::F16 => DType::F16,
        TypeArg::Bf16 => DType::BF16,
    };
    let is_quantised = files.tensors().iter().any(|tensor| tensor.dtype().is_quantized());
    let spinner = Delayed::spinner("merging");
    let form = refrain::merge(&files, &args.lora.folder, args.lora.scale, &args.output, dtype)?;
    drop(spinner);
    if !context.quiet {
        if is_quantised {
            talk!("{} is quantised: its weights were decoded, the merged model has {dtype}", args.model);
        }
        let kind = match form {
            ExportForm::Gguf => "a GGUF file",
            ExportForm::Hf | ExportForm::Adapter => "a Hugging Face folder",
        };
        talk!("written as {kind}");
    }
    Stdout::new().line(args.output.display())
}
