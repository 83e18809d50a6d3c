//! `refrain plan`: the plan of a step and its memory.

mod bandwidth;
mod cost;
mod html;
mod text;

use crate::cli::CliContext;
use crate::fail::Hinted;
use crate::opts::{DeviceOpts, GraphArg, LoraOpts};
use crate::out::{Stdout, counted, short_rate, short_time, talk, thousands};
use crate::{profile, resolve, stats};
use bandwidth::Bandwidth;
use refrain::graph::{Buffer, Op, Place, Plan, Step};
use refrain::{DType, Planner, read_bandwidth};
use refrain_hub::ByteSize;
use std::borrow::Cow;
use std::path::{Path, PathBuf};

/// Show the plan of a step: segments, steps, memory, bytes per token
///
/// A step is planned once: every buffer has its address before anything runs. The arena map shows which step uses which
/// bytes. The bytes that a token reads, divided by the memory bandwidth, bound the speed. For a CUDA device it also shows
/// the launches and kernels of a step, the transfers of host segments, and the memory of the whole model.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Examples:
  refrain plan smollm2
  refrain plan smollm2 --tokens 64 --html plan.html
  refrain plan ./model.gguf --dot plan.dot && dot -Tsvg plan.dot -o plan.svg
  refrain plan smollm2 --bandwidth measure
  refrain plan smollm2 --device cuda             launches, kernels and memory on a GPU")]
pub(crate) struct Args {
    /// A path, a short name such as smollm2, or owner/repo[:QUANT]
    #[arg(value_name = "MODEL")]
    model: String,
    /// Tokens in the step: 1 for decode, more for prefill
    #[arg(long, value_name = "N", default_value_t = 1)]
    tokens: usize,
    /// Write the plan as a Graphviz file
    #[arg(long, value_name = "FILE")]
    dot: Option<PathBuf>,
    /// Write a page with the arena map and every step
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Memory bandwidth in GB/s, or `measure`, for the bound on speed
    #[arg(long, value_name = "GB/S")]
    bandwidth: Option<Bandwidth>,
    /// Context size in tokens [default: the smaller of 4096 and the model's limit]
    #[arg(short, long, value_name = "N")]
    context: Option<usize>,
    #[command(flatten)]
    lora: LoraOpts,
    #[command(flatten)]
    device: DeviceOpts,
}

pub(crate) fn run(args: &Args, context: &CliContext) -> anyhow::Result<()> {
    let options = args.device.session(args.context, context)?;
    let files = resolve::find(Some(&args.model), context)?.files()?;
    // Before the model is loaded.
    let bandwidth = match args.bandwidth {
        Some(Bandwidth::Measure) => Some((read_bandwidth(&options.device)?, " (measured)")),
        Some(Bandwidth::Stated(rate)) => Some((rate, "")),
        None => None,
    };
    let planner = args.device.start_with(args.context, context, |options| match &args.lora.lora {
        Some(lora) => Planner::with_lora(&files, &lora.folder, lora.scale, options),
        None => Planner::new(&files, options),
    })?;
    let n_tokens = args.tokens.clamp(1, planner.context());
    if n_tokens != args.tokens {
        talk!("a step has 1 to {} tokens; this is the plan for {n_tokens}", planner.context());
    }
    let title =
        format!("{}, a step of {} on {}", planner.name(), counted(n_tokens, "token"), planner.backend());
    let kernels = planner.kernels(n_tokens)?;
    let mut facts = facts(args, &planner, n_tokens, &kernels, bandwidth)?;
    facts.extend(stats::quantized_line(&files).map(|told| format!("weights  {told}")));
    let plan = &planner.plan(n_tokens)?;
    if let Some(path) = &args.dot {
        write(path, &plan.to_dot())?;
    }
    if let Some(path) = &args.html {
        write(path, &html::page(&title, &profile::origin(), plan, &facts))?;
    }
    let mut out = Stdout::new();
    out.line(&title)?;
    out.text(&text::segments(plan))?;
    out.line("")?;
    out.text(&text::steps(plan, &kernels))?;
    out.line("")?;
    out.text(&text::arena(plan))?;
    out.line("")?;
    for line in facts {
        out.line(line)?;
    }
    Ok(())
}

/// Traffic and bound of a step; for a CUDA device also launches, transfers and memory.
fn facts(
    args: &Args,
    planner: &Planner,
    n_tokens: usize,
    kernels: &[(usize, Cow<'static, str>)],
    bandwidth: Option<(f64, &str)>,
) -> anyhow::Result<Vec<String>> {
    let (holds, status) = (planner.context(), planner.device_status());
    let peak = status.as_ref().and_then(|s| s.peak_bytes_per_second);
    let bandwidth = bandwidth.or(peak.map(|peak| (peak, " (the memory's clock and width)")));
    let plan = &planner.plan(n_tokens)?;
    let mut facts = bounds(plan, n_tokens, holds, bandwidth);
    facts.extend(stats::bits_line(args.device.reproducible, status.as_ref()));
    if let Some(status) = &status {
        facts.extend(cost::kernels(plan, kernels, args.device.graph != GraphArg::Off));
        facts.extend(cost::crossings(plan));
        if let Some((needs, place)) = planner.table() {
            facts.extend(cost::placements(&needs, place));
        }
        if let Some((needs, place)) = planner.experts() {
            facts.extend(cost::expert_placements(&needs, place));
        }
        facts.extend(status.unfused.iter().map(|told| format!("unfused  {told}")));
        facts.push(format!("memory   {}", stats::memory_line(&status.memory)));
    }
    Ok(facts)
}

fn write(path: &Path, text: &str) -> anyhow::Result<()> {
    std::fs::write(path, text).map_err(|error| Hinted::io("write", path, error))?;
    talk!("written: {}", path.display());
    Ok(())
}

/// Traffic of a step, and the bound on its speed.
fn bounds(plan: &Plan, n_tokens: usize, context: usize, bandwidth: Option<(f64, &str)>) -> Vec<String> {
    let traffic = plan.traffic();
    let at_full = traffic.weight_bytes + traffic.kv_bytes(context);
    let per_token = match n_tokens {
        1 => ", which is one token".to_owned(),
        n => format!(", {} per token", ByteSize((traffic.weight_bytes / n) as u64)),
    };
    let mut lines =
        vec![format!("reads    {} of weights per step{per_token}", ByteSize(traffic.weight_bytes as u64))];
    for kv in &traffic.kv {
        let bytes = ByteSize(kv.bytes_per_position as u64);
        let which = match kv.window {
            Some(window) => format!("of the last {} positions", thousands(window)),
            None => "position of the context".into(),
        };
        let dtype = cache_dtype(plan).map_or_else(String::new, |dtype| format!(" in {dtype}"));
        lines.push(format!("         {bytes} of KV cache{dtype} for each {which}"));
    }
    lines.push(format!("         {} per step at a full context of {context}", ByteSize(at_full as u64)));
    if let Some((per_second, source)) = bandwidth {
        let step = traffic.weight_bytes as f64 / per_second;
        let full = at_full as f64 / per_second;
        lines.push(format!(
            "bound    {} tok/s at {:.1} GB/s{source}: {} per step, {} at a full context",
            short_rate(n_tokens as f64 / step.max(f64::MIN_POSITIVE)),
            per_second / 1e9,
            short_time(step),
            short_time(full),
        ));
    }
    lines
}

/// The element type of the KV cache, which is the same in all layers.
fn cache_dtype(plan: &Plan) -> Option<DType> {
    plan.steps().iter().find(|s| matches!(s.op, Op::Attention(_))).map(|step| step.inputs[1].dtype)
}

/// The buffers in the arena, with their offsets.
fn in_arena(plan: &Plan) -> impl Iterator<Item = (usize, usize, &Buffer)> {
    plan.buffers().iter().enumerate().filter_map(|(idx, buffer)| match buffer.place {
        Place::Arena { offset } => Some((idx, offset, buffer)),
        Place::Control { .. } | Place::Weight(_) | Place::State(_) => None,
    })
}

/// The step that first writes a buffer.
fn writer(plan: &Plan, buffer_idx: usize) -> Option<(usize, &Step)> {
    let writes = |step: &Step| step.outputs.iter().any(|o| o.buffer.idx() == buffer_idx);
    plan.steps().iter().enumerate().find(|(_, step)| writes(step))
}

/// The types that a step reads and writes; they select its kernel.
fn kernel(step: &Step) -> String {
    let mut reads: Vec<String> = step.inputs.iter().map(|o| o.dtype.to_string()).collect();
    reads.dedup();
    let writes = step.outputs.first().map_or_else(String::new, |o| format!(" > {}", o.dtype));
    format!("{}{writes}", reads.join(" "))
}

fn shapes(step: &Step) -> String {
    let shapes: Vec<String> = step.outputs.iter().map(|o| o.layout.shape().to_string()).collect();
    shapes.join(" ")
}
