//! `refrain compare`: what a smaller file costs.

use crate::bars::Delayed;
use crate::cli::CliContext;
use crate::fail::Hinted;
use crate::opts::DeviceOpts;
use crate::out::{Stdout, one_line, talk, thousands};
use crate::{prompt, resolve};
use refrain::{Comparison, Model, TensorDifference, tensor_differences};
use refrain_hub::ByteSize;
use refrain_report::{Chart, CurveStyle, PageHeader, Series, page};
use serde_json::json;
use std::num::NonZeroUsize;
use std::path::PathBuf;

const USUAL_WINDOW: usize = 512;
/// Tensors in the table.
const N_WORST: usize = 8;

/// Compare models with a reference: perplexity, KL divergence, agreement
///
/// The first model is the reference, such as the F16 file; the others are files made from it. The text is split into
/// windows of -c tokens as in `refrain perplexity`. KL divergence says how far the predictions of a model are from those of
/// the reference, in nats per token; 0 means that they are equal.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Examples:
  refrain compare model-f16.gguf model-q4.gguf -f wiki.txt
  refrain compare model-f16.gguf q4.gguf q5.gguf q6.gguf -f wiki.txt --html sizes.html
  refrain compare model-f16.gguf model-q4.gguf -f wiki.txt --json | jq .models[0].mean_kl")]
pub(crate) struct Args {
    /// The reference: a path, a short name, or owner/repo[:QUANT]
    #[arg(value_name = "REFERENCE")]
    reference: String,
    /// Models to compare with it
    #[arg(value_name = "MODEL", required = true)]
    models: Vec<String>,
    /// The text; - is standard input
    #[arg(short, long, value_name = "FILE")]
    file: PathBuf,
    /// Tokens in a window [default: the smaller of 512 and the models' limit]
    #[arg(short, long, value_name = "N")]
    context: Option<usize>,
    /// Maximum number of windows to score
    #[arg(long, value_name = "N")]
    chunks: Option<NonZeroUsize>,
    /// Do not compare the tensors themselves
    #[arg(long)]
    no_tensors: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    /// Write a page that draws size against divergence
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    #[command(flatten)]
    device: DeviceOpts,
}

/// One model next to the reference.
struct ComparedModel {
    name: String,
    bytes: u64,
    scores: Comparison,
    tensors: Vec<TensorDifference>,
}

pub(crate) fn run(args: &Args, context: &CliContext) -> anyhow::Result<()> {
    args.device.session(args.context, context)?;
    for name in args.models.iter().chain([&args.reference]) {
        resolve::check(name, context)?;
    }
    let text = prompt::read_file(&args.file)?;
    if text.trim().is_empty() {
        let message = format!("{} contains no text to score", args.file.display());
        return Err(Hinted::new(message, "give a text of at least a few hundred words").into());
    }
    let reference = resolve::find(Some(&args.reference), context)?.open()?;
    let mut compared = Vec::new();
    for name in &args.models {
        compared.push(compare_one(args, &reference, name, &text, context)?);
    }
    if let Some(path) = &args.html {
        let html = to_html(args, &reference, &compared);
        std::fs::write(path, html).map_err(|error| Hinted::io("write", path, error))?;
    }
    let mut out = Stdout::new();
    if args.json {
        return out.json(&to_json(args, &reference, &compared));
    }
    out.text(&to_text(args, &reference, &compared))
}

fn compare_one(
    args: &Args,
    reference: &Model,
    name: &str,
    text: &str,
    context: &CliContext,
) -> anyhow::Result<ComparedModel> {
    let model = resolve::find(Some(name), context)?.open()?;
    let most = reference.config().n_context.min(model.config().n_context);
    let window = args.context.unwrap_or(most.min(USUAL_WINDOW));
    let mut first = args.device.start(reference, Some(window), context)?;
    let mut second = args.device.start(&model, Some(window), context)?;
    let n_chunks = args.chunks.map(NonZeroUsize::get);
    let bar = Delayed::bar(n_chunks.unwrap_or(1) as u64, "comparing");
    let scores = first.compare(&mut second, text, window, n_chunks, |n_windows, so_far| {
        bar.set_len(n_windows as u64);
        bar.set(so_far.n_windows as u64);
        bar.say(format!("{}: KL {:.5}", one_line(name), so_far.mean_kl));
    });
    drop(bar);
    let scores = scores?;
    let tensors = if args.no_tensors { Vec::new() } else { tensor_differences(reference, &model)? };
    if !context.quiet {
        talk!("{}: {} tokens scored on {}", one_line(name), thousands(scores.n_scored), second.backend());
    }
    Ok(ComparedModel { name: name.to_owned(), bytes: file_bytes(&model), scores, tensors })
}

fn file_bytes(model: &Model) -> u64 {
    model.files().files().iter().map(|(_, bytes)| bytes).sum()
}

fn to_text(args: &Args, reference: &Model, compared: &[ComparedModel]) -> String {
    let names: Vec<String> =
        [&args.reference].into_iter().chain(compared.iter().map(|m| &m.name)).map(|n| one_line(n)).collect();
    let width = names.iter().map(|name| name.chars().count()).max().unwrap_or(0).max("model".len());
    let heads = ["size", "perplexity", "KL mean", "KL 99 %", "KL worst", "same top"];
    let row = |name: &str, cells: [String; 6]| {
        let cells: String = cells.iter().map(|cell| format!("  {cell:>10}")).collect();
        format!("{name:<width$}{cells}\n")
    };
    let mut text = row("model", heads.map(str::to_owned));
    let size = |bytes| ByteSize(bytes).to_string();
    if let Some(first) = compared.first() {
        let perplexity = format!("{:.4}", first.scores.perplexity[0]);
        let none = || "-".to_owned();
        text += &row(&names[0], [size(file_bytes(reference)), perplexity, none(), none(), none(), none()]);
    }
    for (name, model) in names[1..].iter().zip(compared) {
        let s = &model.scores;
        let cells = [
            size(model.bytes),
            format!("{:.4}", s.perplexity[1]),
            format!("{:.5}", s.mean_kl),
            format!("{:.5}", s.p99_kl),
            format!("{:.5}", s.worst_kl),
            format!("{:.2} %", 100.0 * s.same_top),
        ];
        text += &row(name, cells);
    }
    for (name, model) in names[1..].iter().zip(compared) {
        text += &worst_tensors(name, &model.tensors);
    }
    text
}

/// The tensors with the largest relative errors.
fn worst_tensors(name: &str, tensors: &[TensorDifference]) -> String {
    let mut worst: Vec<&TensorDifference> = tensors.iter().filter(|t| t.relative > 0.0).collect();
    if worst.is_empty() {
        return String::new();
    }
    worst.sort_by(|a, b| b.relative.total_cmp(&a.relative));
    let mut text = format!("\nlargest relative errors of {name}, of {} tensors\n", tensors.len());
    let shown = &worst[..worst.len().min(N_WORST)];
    let width = shown.iter().map(|t| t.name.chars().count()).max().unwrap_or(0);
    for tensor in shown {
        let (name, [from, to]) = (one_line(&tensor.name), tensor.dtypes);
        text += &format!("{name:<width$}  {from:<5} {to:<7} {:>8.4} %\n", 100.0 * tensor.relative);
    }
    text
}

fn to_json(args: &Args, reference: &Model, compared: &[ComparedModel]) -> serde_json::Value {
    let model = |m: &ComparedModel| {
        let tensor = |t: &TensorDifference| {
            let types = t.dtypes.map(refrain::DType::name);
            json!({ "name": t.name, "types": types, "relative_error": t.relative, "elements": t.n_elements })
        };
        json!({
            "model": m.name,
            "bytes": m.bytes,
            "perplexity": m.scores.perplexity[1],
            "mean_kl": m.scores.mean_kl,
            "p99_kl": m.scores.p99_kl,
            "worst_kl": m.scores.worst_kl,
            "worst_token": m.scores.worst_token,
            "same_top": m.scores.same_top,
            "n_scored": m.scores.n_scored,
            "n_windows": m.scores.n_windows,
            "tensors": m.tensors.iter().map(tensor).collect::<Vec<_>>(),
        })
    };
    json!({
        "reference": {
            "model": args.reference,
            "bytes": file_bytes(reference),
            "perplexity": compared.first().map(|m| m.scores.perplexity[0]),
        },
        "models": compared.iter().map(model).collect::<Vec<_>>(),
    })
}

/// A model's name without its folder and ending.
fn file_stem(name: &str) -> String {
    let stem = std::path::Path::new(name).file_stem();
    one_line(&stem.map_or_else(|| name.to_owned(), |stem| stem.to_string_lossy().into_owned()))
}

fn to_html(args: &Args, reference: &Model, compared: &[ComparedModel]) -> String {
    // Points are whole numbers of the unit: it is small next to the differences.
    const FINE: u64 = 64 << 20;
    let sizes = || compared.iter().map(|m| m.bytes);
    let spread = sizes().max().unwrap_or(0) - sizes().min().unwrap_or(0);
    let (unit, unit_name) = if spread >= FINE { (1 << 20, "MiB") } else { (1 << 10, "KiB") };
    let mut compared_by_size: Vec<&ComparedModel> = compared.iter().collect();
    compared_by_size.sort_by_key(|m| m.bytes);
    let points = |value: fn(&Comparison) -> f64| -> Vec<(u64, f64)> {
        compared_by_size.iter().map(|m| (m.bytes / unit, value(&m.scores))).collect()
    };
    let names = |value: fn(&Comparison) -> f64| -> Vec<(u64, f64, String)> {
        let name = |m: &&ComparedModel| (m.bytes / unit, value(&m.scores), file_stem(&m.name));
        compared_by_size.iter().map(name).collect()
    };
    let series = vec![
        Series::new("mean", CurveStyle::Curve, points(|s| s.mean_kl)),
        Series::new("99 %", CurveStyle::Second, points(|s| s.p99_kl)),
    ];
    let chart =
        Chart::new("divergence", "KL divergence from the reference, in nats", unit_name, true, series)
            .with_names(names(|s| s.mean_kl));
    let perplexity = vec![Series::new("perplexity", CurveStyle::Curve, points(|s| s.perplexity[1]))];
    let perplexity = Chart::new("perplexity", "Perplexity", unit_name, false, perplexity)
        .with_names(names(|s| s.perplexity[1]));
    let mut facts = vec![
        ("reference".to_owned(), one_line(&args.reference)),
        ("its size".to_owned(), ByteSize(file_bytes(reference)).to_string()),
        ("text".to_owned(), args.file.display().to_string()),
    ];
    if let Some(first) = compared.first() {
        facts.push(("tokens scored".to_owned(), thousands(first.scores.n_scored)));
    }
    let details = ("Table".to_owned(), to_text(args, reference, compared));
    let header =
        PageHeader { title: one_line(reference.name()), kind: "size and divergence".into(), facts, details };
    page(&header, &[chart, perplexity])
}
