//! `refrain doctor`: what works on this machine.

use crate::cli::Context;
use crate::fail::Hinted;
use crate::out::{BOLD, Out, short_time};
use crate::trial;
use anstyle::{AnsiColor, Style};
use clap::ValueEnum;
use refrain::{Device, FaultScript, GraphMode, KernelOrigin, Method, examine_kernels};
use refrain::{NamedShape, SHAPES, TableNeeds, free_memory, host_free_bytes};
use refrain_driver::DeviceKind;
use refrain_driver::doctor::{Row, Verdict, examine};
use refrain_driver::sim::SimOptions;
use refrain_driver::trial::Finding;
use refrain_hub::Bytes;
use serde_json::json;
use std::time::Duration;

/// How long the trial of stream capture may take.
const TRIAL_LIMIT: Duration = Duration::from_secs(20);

/// Find out what works on this machine
///
/// Probes the CUDA driver, records, replays and verifies a small step with both methods, and says in plain words what
/// it found. On a machine without a GPU it says so, and that is not bad: the CPU needs none. Ends with status 1 if
/// something is bad.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Examples:
  refrain doctor
  refrain doctor --device sim        the simulated device
  refrain doctor --json")]
pub(crate) struct Args {
    /// What to examine; auto is a CUDA card if there is one, and the CPU
    #[arg(long, value_name = "DEVICE", default_value = "auto")]
    device: Examined,
    /// Number of the CUDA device
    #[arg(long, value_name = "N", default_value_t = 0)]
    index: u32,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Examined {
    /// A CUDA card if there is one, and the CPU
    Auto,
    /// A CUDA card
    Cuda,
    /// The simulated device
    Sim,
}

pub(crate) fn run(args: &Args, context: &Context) -> anyhow::Result<()> {
    let rows = match args.device {
        Examined::Auto => auto(args.index, context)?,
        Examined::Cuda => cuda(args.index, context),
        Examined::Sim => {
            let kind = DeviceKind::Sim(SimOptions::default());
            let mut rows = with_compiler(examine(kind.clone()));
            rows.extend(graph_method(&kind, context));
            let (graph, method) = (GraphMode::Off, Method::Stream);
            let device =
                Device::Sim { seed: 0, faults: FaultScript::default(), graph, method, profile: false };
            rows.push(kernels(&device));
            rows.extend(tables(&device));
            rows
        }
    };
    let mut out = Out::new();
    if args.json {
        let row = |r: &Row| {
            json!({
                "name": r.name,
                "verdict": r.verdict.word(),
                "measured": r.measured,
                "words": r.words,
                "advice": r.advice,
            })
        };
        out.json(&json!({ "rows": rows.iter().map(row).collect::<Vec<_>>() }))?;
    } else {
        rows.iter().try_for_each(|row| print(&mut out, row))?;
    }
    let n_bad = rows.iter().filter(|row| row.verdict == Verdict::Bad).count();
    match n_bad {
        0 => Ok(()),
        _ => {
            let message = format!("{n_bad} of {} checks went badly", rows.len());
            Err(Hinted::new(message, "models still run on the CPU: refrain run --device cpu").into())
        }
    }
}

/// The CPU, and the card or why there is none.
fn auto(index: u32, context: &Context) -> anyhow::Result<Vec<Row>> {
    let mut rows = vec![cpu()?];
    match refrain_driver::Device::open(DeviceKind::Cuda(index)) {
        Ok(_) => rows.extend(cuda(index, context)),
        Err(error) => rows.push(Row {
            name: "cuda",
            verdict: Verdict::Note,
            measured: "none".into(),
            words: format!("no CUDA device can be used: {error}"),
            advice: Some(
                "refrain doctor --device cuda tells more, --device sim shows what it would do".into(),
            ),
        }),
    }
    Ok(rows)
}

fn cuda(index: u32, context: &Context) -> Vec<Row> {
    let kind = DeviceKind::Cuda(index);
    // Before this process looks at the card: its own captures may lose the context.
    let method = graph_method(&kind, context);
    let mut rows = with_compiler(examine(kind));
    rows.extend(method);
    // Nothing loads where there is no card, or a card that is lost; a row above says so.
    if rows.iter().all(|row| row.verdict != Verdict::Skipped) {
        let env = context.store.env();
        let device = Device::Cuda {
            ordinal: index,
            graph: GraphMode::Off,
            method: Method::Stream,
            profile: false,
            kernel_cache: Some(env.refrain_home.join("kernels")),
            nvrtc: env.nvrtc.clone(),
        };
        rows.push(kernels(&device));
        rows.extend(tables(&device));
    }
    rows
}

/// What `--graph-method auto` takes, and why; nothing where there is no device.
fn graph_method(kind: &DeviceKind, context: &Context) -> Option<Row> {
    let choice = trial::choose(kind, TRIAL_LIMIT, context)?;
    let verdict = if choice.finding == Some(Finding::Usable) { Verdict::Good } else { Verdict::Note };
    let measured = choice.method.to_string();
    let advice = choice.avoids_capture().then(|| "another driver version may do better".to_owned());
    Some(Row { name: "graph method", verdict, measured, words: choice.because, advice })
}

/// Where `--ple auto` puts the per-layer embeddings of the models that have some, with weights in 16 bits.
fn tables(device: &Device) -> Option<Row> {
    let (free, unified) = free_memory(device).ok()??;
    let place = |shape: &NamedShape| {
        let needs = TableNeeds::of_shape(shape)?;
        Some(match needs.rest_fits(free) {
            true => format!("{} {}", shape.name, needs.choose(free, host_free_bytes(), unified)),
            false => format!("{} does not fit without its table either", shape.name),
        })
    };
    let places: Vec<String> = SHAPES.iter().filter_map(place).collect();
    let words = format!("where per-layer embeddings in 16 bits go, by {} of free memory", Bytes(free));
    let advice = Some("--ple device, pinned or host says otherwise".to_owned());
    let measured = places.join(", ");
    Some(Row { name: "tables", verdict: Verdict::Note, measured, words, advice })
}

/// Where the kernels come from: the binary, the cache or the compiler.
fn kernels(device: &Device) -> Row {
    let name = "kernels";
    let report = match examine_kernels(device) {
        Ok(Some(report)) => report,
        Ok(None) => unreachable!("a CUDA device has kernels to load"),
        Err(error) => {
            let (words, advice) = (error.to_string(), error.hint());
            return Row { name, verdict: Verdict::Bad, measured: "not loaded".into(), words, advice };
        }
    };
    let archs: Vec<String> = report.prebuilt.iter().map(ToString::to_string).collect();
    let held = match archs.as_slice() {
        [] => "no prebuilt kernels".to_owned(),
        archs => format!("kernels for {}", archs.join(", ")),
    };
    let (from, words) = match report.origin {
        KernelOrigin::Twins => {
            ("reference functions".to_owned(), "the simulated device runs no machine code")
        }
        KernelOrigin::Prebuilt(arch) => {
            (format!("prebuilt for {arch}"), "compiled ahead of time: only the driver is needed")
        }
        KernelOrigin::Compiled { .. } => (
            format!("{} of {} units from the cache", report.units.n_ready, report.units.n_all),
            "compiled on this machine by NVRTC: those that a model needs, when it first needs them",
        ),
    };
    let measured = format!("{from}, in {}; this binary holds {held}", short_time(report.took.as_secs_f64()));
    Row { name, verdict: Verdict::Good, measured, words: words.into(), advice: None }
}

/// Puts the kernels' compiler behind the driver: which library was found, and where.
fn with_compiler(mut rows: Vec<Row>) -> Vec<Row> {
    let row = match refrain::Nvrtc::open(None) {
        Ok(nvrtc) => {
            let (major, minor) = nvrtc.version();
            Row {
                name: "kernel compiler",
                verdict: Verdict::Good,
                measured: format!("NVRTC {major}.{minor}, {}", nvrtc.file()),
                words: "kernels can be compiled for any card; the simulated device needs none".into(),
                advice: None,
            }
        }
        Err(error) => Row {
            name: "kernel compiler",
            verdict: Verdict::Note,
            measured: "none".into(),
            words: format!("only kernels that are compiled already can be used: {error}"),
            advice: error.hint(),
        },
    };
    rows.insert(1.min(rows.len()), row);
    rows
}

fn cpu() -> anyhow::Result<Row> {
    let machine = refrain::CpuInfo::measure()?;
    Ok(Row {
        name: "cpu",
        verdict: Verdict::Good,
        measured: format!(
            "{}, {} threads, {:.1} GB/s read",
            machine.level,
            machine.threads,
            machine.read_bandwidth / 1e9
        ),
        words: "models run here; decoding reads every weight once per token, so the bandwidth bounds it"
            .into(),
        advice: None,
    })
}

fn print(out: &mut Out, row: &Row) -> anyhow::Result<()> {
    let style = match row.verdict {
        Verdict::Good => AnsiColor::Green.on_default(),
        Verdict::Note => AnsiColor::Yellow.on_default(),
        Verdict::Bad => AnsiColor::Red.on_default(),
        Verdict::Skipped => Style::new().dimmed(),
    };
    out.styled(style, &format!("{:<8}", row.verdict.word()))?;
    out.styled(BOLD, row.name)?;
    let measured = if row.measured.is_empty() { String::new() } else { format!("  {}", row.measured) };
    out.line(measured)?;
    out.line(format_args!("        {}", row.words))?;
    match &row.advice {
        Some(advice) => out.line(format_args!("        hint: {advice}")),
        None => Ok(()),
    }
}
