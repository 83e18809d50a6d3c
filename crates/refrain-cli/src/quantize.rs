//! `refrain quantize`: a smaller file of a model.

use crate::bars::Delayed;
use crate::cli::CliContext;
use crate::fail::Hinted;
use crate::out::{Stdout, counted, one_line, short_time, talk};
use crate::resolve;
use refrain::Loss;
use refrain::quant::{Imatrix, Options, Override, QuantReport, Recipe, quantize_file};
use refrain_hub::ByteSize;
use serde_json::json;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Write a smaller file of a model
///
/// From a GGUF file or a Hugging Face folder with F32, F16 or BF16 weights to a GGUF file of TYPE: Q2_K, Q2_K_S, Q3_K_S,
/// Q3_K_M, Q3_K_L, Q4_0, Q4_1, IQ4_NL, IQ4_XS, Q4_K_S, Q4_K_M, Q5_0, Q5_1, Q5_K_S, Q5_K_M, Q6_K, Q8_0, F16, BF16 or F32.
/// Mixes give sensitive tensors more bits, by the rules that llama.cpp uses for the same name.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Examples:
  refrain quantize ./folder Q4_K_M -o model-q4.gguf
  refrain quantize model-f16.gguf Q5_K_M --imatrix imatrix.gguf -o model-q5.gguf
  refrain quantize model-f16.gguf Q4_K_M --tensor-type 'attn_(q|k)=q8_0' -o model-q4.gguf")]
pub(crate) struct Args {
    /// A path, a short name such as smollm2, or owner/repo[:QUANT]
    #[arg(value_name = "MODEL")]
    model: String,
    /// The file type, such as Q4_K_M
    #[arg(value_name = "TYPE")]
    recipe: String,
    /// The GGUF file to write; an existing one is replaced once the new one is complete
    #[arg(short, long, value_name = "OUT")]
    output: PathBuf,
    /// Type of tensors whose name matches a regular expression; the last match counts
    #[arg(long = "tensor-type", value_name = "PATTERN=TYPE")]
    tensor_types: Vec<String>,
    /// Weigh errors by this importance matrix, made by `refrain imatrix` or llama.cpp
    #[arg(long, value_name = "FILE")]
    imatrix: Option<PathBuf>,
    /// Accept a model that is already quantised, and its added error
    #[arg(long)]
    requantize: bool,
    /// Keep tensors with NaN or infinite weights as they are instead of refusing them
    #[arg(long)]
    allow_nonfinite: bool,
    #[command(flatten)]
    common: PassOpts,
}

/// Options of commands that write a GGUF file.
#[derive(clap::Args, Debug)]
pub(crate) struct PassOpts {
    /// Leave out the parts of a multimodal model that are not text
    #[arg(long)]
    text_only: bool,
    /// Threads [default: all cores]
    #[arg(long, value_name = "N")]
    threads: Option<std::num::NonZeroUsize>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

impl PassOpts {
    pub(crate) fn loss(&self) -> Loss {
        if self.text_only { Loss::TextOnly } else { Loss::Refused }
    }

    pub(crate) fn n_threads(&self) -> usize {
        let cores = || std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        self.threads.map_or_else(cores, std::num::NonZero::get)
    }
}

pub(crate) fn run(args: &Args, context: &CliContext) -> anyhow::Result<()> {
    let recipe = find_recipe(&args.recipe)?;
    let overrides = args.tensor_types.iter().map(|text| Override::parse(text));
    let overrides = overrides.collect::<Result<Vec<_>, _>>().map_err(refrain::Error::from)?;
    let imatrix = args.imatrix.as_deref().map(Imatrix::open).transpose().map_err(refrain::Error::from)?;
    let options = Options {
        recipe,
        overrides: &overrides,
        imatrix: imatrix.as_ref(),
        requantize: args.requantize,
        allow_nonfinite: args.allow_nonfinite,
        n_threads: args.common.n_threads(),
    };
    write(&args.model, &options, &args.output, &args.common, "quantising", context)
}

/// Parses the name of a file type.
pub(crate) fn find_recipe(name: &str) -> Result<Recipe, refrain::Error> {
    Recipe::from_name(name)
        .ok_or_else(|| refrain::quant::QuantError::UnknownType { name: name.to_owned() }.into())
}

/// Runs the pass over a model and reports it.
pub(crate) fn write(
    model: &str,
    options: &Options<'_>,
    output: &Path,
    common: &PassOpts,
    verb: &str,
    context: &CliContext,
) -> anyhow::Result<()> {
    if output.is_dir() {
        let message = format!("{} is a folder", output.display());
        return Err(Hinted::new(message, "name a file that ends in .gguf").into());
    }
    let files = resolve::find(Some(model), context)?.files()?;
    let input = refrain::quant_input(&files, common.loss())?;
    let total = input.tensors.iter().map(|tensor| tensor.shape.n_elements() as u64).sum();
    let bar = Delayed::bar(total, verb);
    let report = quantize_file(&input, options, output, |progress| {
        bar.set(progress.done);
        bar.say(format!("{verb} {}", one_line(progress.tensor)));
    });
    drop(bar);
    let report = report.map_err(refrain::Error::from)?;
    let mut out = Stdout::new();
    if common.json {
        return out.json(&to_json(&report, output));
    }
    if !context.quiet {
        summarise(&report, context.verbose);
    }
    out.line(output.display())
}

fn summarise(report: &QuantReport, verbose: bool) {
    let mut types: BTreeMap<String, (usize, u64)> = BTreeMap::new();
    for tensor in &report.tensors {
        let entry = types.entry(tensor.choice.dtype.to_string()).or_default();
        *entry = (entry.0 + 1, entry.1 + tensor.n_bytes);
    }
    if verbose {
        for tensor in &report.tensors {
            let reason = tensor.choice.reason.as_ref().map_or_else(String::new, |r| format!("  {r}"));
            let (name, to) = (one_line(&tensor.name), tensor.choice.dtype);
            talk!("{name}  {}  {} -> {to}{reason}", tensor.shape, tensor.from);
        }
    }
    let mut types: Vec<_> = types.into_iter().collect();
    types.sort_by_key(|(_, (_, bytes))| std::cmp::Reverse(*bytes));
    for (dtype, (n, bytes)) in types {
        talk!("{dtype:<7}{:>11} in {}", ByteSize(bytes).to_string(), counted(n, "tensor"));
    }
    for (reason, n, names) in exceptions(report) {
        talk!("{}: {reason} ({names})", counted(n, "tensor"));
    }
    let [before, after] = report.bytes;
    let elements: u64 = report.tensors.iter().map(|t| t.shape.n_elements() as u64).sum();
    let bits = after as f64 * 8.0 / elements.max(1) as f64;
    let took = short_time(report.took.as_secs_f64());
    talk!("{} -> {}, {bits:.2} bits per weight, {took}", ByteSize(before), ByteSize(after));
}

/// Reasons that a user must know: shapes that do not fit, and values that are not finite.
fn exceptions(report: &QuantReport) -> Vec<(String, usize, String)> {
    use refrain::quant::Reason;
    let mut reasons: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    for tensor in &report.tensors {
        match &tensor.choice.reason {
            Some(reason @ Reason::Rows { .. }) => {
                let text = format!("{}, since {reason}", tensor.choice.dtype);
                reasons.entry(text).or_default().push(&tensor.name);
            }
            Some(reason @ Reason::NonFinite) => {
                let text = format!("kept as {}, since it {reason}", tensor.choice.dtype);
                reasons.entry(text).or_default().push(&tensor.name);
            }
            _ => {}
        }
    }
    let list = |(text, names): (String, Vec<&str>)| {
        let more = if names.len() > 1 { format!(" and {} more", names.len() - 1) } else { String::new() };
        (text, names.len(), format!("{}{more}", one_line(names[0])))
    };
    reasons.into_iter().map(list).collect()
}

fn to_json(report: &QuantReport, output: &Path) -> serde_json::Value {
    let tensor = |t: &refrain::quant::QuantTensor| {
        json!({
            "name": t.name,
            "shape": t.shape.dims(),
            "from": t.from.name(),
            "to": t.choice.dtype.name(),
            "reason": t.choice.reason.as_ref().map(ToString::to_string),
            "bytes": t.n_bytes,
            "importance": t.is_weighted,
        })
    };
    json!({
        "path": output,
        "bytes_before": report.bytes[0],
        "bytes": report.bytes[1],
        "seconds": report.took.as_secs_f64(),
        "tensors": report.tensors.iter().map(tensor).collect::<Vec<_>>(),
    })
}
