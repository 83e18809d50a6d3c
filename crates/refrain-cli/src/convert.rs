//! `refrain convert`: a model in another file format.

use crate::cli::CliContext;
use crate::fail::Hinted;
use crate::out::{Stdout, talk};
use crate::quantize::{PassOpts, find_recipe, write};
use crate::resolve;
use refrain::quant::Options;
use refrain::{DType, ModelFiles};
use std::path::{Path, PathBuf};

/// Convert a model between Hugging Face folders and GGUF files
///
/// Writes one GGUF file with the tensor names, layouts, tokenizer, chat template and metadata that llama.cpp uses, or with
/// --to safetensors a Hugging Face folder. A model with tensors that the result would not have is refused.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Examples:
  refrain convert ./folder -o model.gguf
  refrain convert ./folder --type q8_0 -o model-q8.gguf
  refrain convert model.gguf --to safetensors --type bf16 -o folder")]
pub(crate) struct Args {
    /// A path, a short name such as smollm2, or owner/repo[:QUANT]
    #[arg(value_name = "MODEL")]
    model: String,
    /// The GGUF file to write, or the folder with --to safetensors
    #[arg(short, long, value_name = "OUT")]
    output: PathBuf,
    /// Type of matrices [default: that of most weights, or bf16 if they are quantised]
    #[arg(long = "type", value_name = "TYPE")]
    dtype: Option<TypeArg>,
    /// Format to write
    #[arg(long, value_name = "FORMAT", default_value = "gguf")]
    to: FormatArg,
    #[command(flatten)]
    common: PassOpts,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum TypeArg {
    Bf16,
    F16,
    F32,
    #[value(name = "q8_0")]
    Q8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum FormatArg {
    /// One GGUF file
    Gguf,
    /// A Hugging Face folder
    Safetensors,
}

impl TypeArg {
    fn name(self) -> &'static str {
        match self {
            TypeArg::Bf16 => "BF16",
            TypeArg::F16 => "F16",
            TypeArg::F32 => "F32",
            TypeArg::Q8 => "Q8_0",
        }
    }
}

pub(crate) fn run(args: &Args, context: &CliContext) -> anyhow::Result<()> {
    let files = resolve::find(Some(&args.model), context)?.files()?;
    let name = args.dtype.map_or_else(|| usual_type(&files), TypeArg::name);
    let recipe = find_recipe(name)?;
    if args.to == FormatArg::Safetensors {
        return to_folder(&files, recipe.base(), &args.output, context);
    }
    let options = Options {
        recipe,
        overrides: &[],
        imatrix: None,
        // Converting a quantised file decodes it; only the rounding to 16 bits, if requested, adds an error.
        requantize: recipe.base().is_float(),
        allow_nonfinite: false,
        n_threads: args.common.n_threads(),
    };
    write(&args.model, &options, &args.output, &args.common, "converting", context)
}

fn to_folder(files: &ModelFiles, dtype: DType, output: &Path, context: &CliContext) -> anyhow::Result<()> {
    if !dtype.is_float() {
        let message = format!("a Hugging Face folder cannot have weights of {dtype}");
        return Err(Hinted::new(message, "pass --type with bf16, f16 or f32").into());
    }
    refrain::convert_to_folder(files, output, dtype)?;
    if !context.quiet {
        talk!("written as a Hugging Face folder");
    }
    Stdout::new().line(output.display())
}

/// The float type that holds most of the weights.
fn usual_type(files: &ModelFiles) -> &'static str {
    let bytes = |dtype: DType| -> u64 {
        files.tensors().iter().filter(|t| t.dtype() == dtype).map(|t| t.shape().n_elements() as u64).sum()
    };
    let floats = [DType::BF16, DType::F16, DType::F32].map(|dtype| (bytes(dtype), dtype));
    let total: u64 = files.tensors().iter().map(|t| t.shape().n_elements() as u64).sum();
    match floats.into_iter().max_by_key(|(n, _)| *n) {
        Some((n, dtype)) if n > total / 2 => dtype.name(),
        _ => DType::BF16.name(),
    }
}
