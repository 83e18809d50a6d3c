//! `refrain doctor`: a check of this machine.

use crate::cli::CliContext;
use crate::fail::Hinted;
use crate::out::{BOLD, Stdout, short_time};
use crate::trial;
use anstyle::{AnsiColor, Style};
use clap::ValueEnum;
use refrain::{Device, FaultScript, GraphMode, KernelOrigin, Method, examine_kernels};
use refrain::{NamedShape, SHAPES, TableNeeds, free_memory, host_free_bytes};
use refrain_driver::DeviceKind;
use refrain_driver::doctor::{CheckVerdict, DoctorRow, examine};
use refrain_driver::sim::SimOptions;
use refrain_driver::trial::Finding;
use refrain_hub::ByteSize;
use serde_json::json;
use std::time::Duration;

/// Time limit for the trial of stream capture.
const TRIAL_LIMIT: Duration = Duration::from_secs(20);

/// Check what works on this machine
///
/// Probes the CUDA driver, records, replays and verifies a small step with both methods, and reports the results. A
/// machine without a GPU is not a failure: models run on the CPU. Exits with status 1 if a check fails.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Examples:
  refrain doctor
  refrain doctor --device sim        the simulated device
  refrain doctor --json")]
pub(crate) struct Args {
    /// Device to check; auto is the CPU, and a GPU if there is one
    #[arg(long, value_name = "DEVICE", default_value = "auto")]
    device: Examined,
    /// Index of the GPU
    #[arg(long, value_name = "N", default_value_t = 0)]
    index: u32,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Examined {
    /// The CPU, and a GPU if there is one
    Auto,
    /// A GPU
    Cuda,
    /// The simulated device
    Sim,
}

pub(crate) fn run(args: &Args, context: &CliContext) -> anyhow::Result<()> {
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
    let mut out = Stdout::new();
    if args.json {
        let row = |r: &DoctorRow| {
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
    let n_bad = rows.iter().filter(|row| row.verdict == CheckVerdict::Bad).count();
    match n_bad {
        0 => Ok(()),
        _ => {
            let message = format!("{n_bad} of {} checks failed", rows.len());
            Err(Hinted::new(message, "models still run on the CPU: refrain run --device cpu").into())
        }
    }
}

/// Checks the CPU, and the GPU or why there is none.
fn auto(index: u32, context: &CliContext) -> anyhow::Result<Vec<DoctorRow>> {
    let mut rows = vec![cpu()?];
    match refrain_driver::Device::open(DeviceKind::Cuda(index)) {
        Ok(_) => rows.extend(cuda(index, context)),
        Err(error) => rows.push(DoctorRow {
            name: "cuda",
            verdict: CheckVerdict::Note,
            measured: "none".into(),
            words: format!("no CUDA device is available: {error}"),
            advice: Some(
                "refrain doctor --device cuda explains more, --device sim checks the simulated device".into(),
            ),
        }),
    }
    Ok(rows)
}

fn cuda(index: u32, context: &CliContext) -> Vec<DoctorRow> {
    let kind = DeviceKind::Cuda(index);
    // Before this process opens the GPU: its own captures may lose the context.
    let method = graph_method(&kind, context);
    let mut rows = with_compiler(examine(kind));
    rows.extend(method);
    // Nothing can be loaded without a working GPU; a row above reports that.
    if rows.iter().all(|row| row.verdict != CheckVerdict::Skipped) {
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

/// The choice of `--graph-method auto` and the reason for it; `None` without a device.
fn graph_method(kind: &DeviceKind, context: &CliContext) -> Option<DoctorRow> {
    let choice = trial::choose(kind, TRIAL_LIMIT, context)?;
    let verdict =
        if choice.finding == Some(Finding::Usable) { CheckVerdict::Good } else { CheckVerdict::Note };
    let measured = choice.method.to_string();
    let advice = choice.avoids_capture().then(|| "try another driver version".to_owned());
    Some(DoctorRow { name: "graph method", verdict, measured, words: choice.because, advice })
}

/// The placement of `--ple auto` for each model with per-layer embeddings, with 16-bit weights.
fn tables(device: &Device) -> Option<DoctorRow> {
    let (free, unified) = free_memory(device).ok()??;
    let place = |shape: &NamedShape| {
        let needs = TableNeeds::of_shape(shape)?;
        Some(match needs.rest_fits(free) {
            true => format!("{} {}", shape.name, needs.choose(free, host_free_bytes(), unified)),
            false => format!("{} does not fit even without its table", shape.name),
        })
    };
    let places: Vec<String> = SHAPES.iter().filter_map(place).collect();
    let words =
        format!("placement of per-layer embeddings in 16 bits, with {} of free memory", ByteSize(free));
    let advice = Some("--ple device, pinned or host overrides it".to_owned());
    let measured = places.join(", ");
    Some(DoctorRow { name: "tables", verdict: CheckVerdict::Note, measured, words, advice })
}

/// The origin of the kernels: the binary, the cache or the compiler.
fn kernels(device: &Device) -> DoctorRow {
    let name = "kernels";
    let report = match examine_kernels(device) {
        Ok(Some(report)) => report,
        Ok(None) => unreachable!("a CUDA device has kernels to load"),
        Err(error) => {
            let (words, advice) = (error.to_string(), error.hint());
            return DoctorRow {
                name,
                verdict: CheckVerdict::Bad,
                measured: "not loaded".into(),
                words,
                advice,
            };
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
            (format!("prebuilt for {arch}"), "compiled ahead of time: they need only the driver")
        }
        KernelOrigin::Compiled { .. } => (
            format!("{} of {} units from the cache", report.units.n_ready, report.units.n_all),
            "compiled on this machine by NVRTC when a model first needs them",
        ),
    };
    let measured =
        format!("{from}, in {}; this binary contains {held}", short_time(report.took.as_secs_f64()));
    DoctorRow { name, verdict: CheckVerdict::Good, measured, words: words.into(), advice: None }
}

/// Inserts a row on the kernel compiler after that of the driver.
fn with_compiler(mut rows: Vec<DoctorRow>) -> Vec<DoctorRow> {
    let row = match refrain::Nvrtc::open(None) {
        Ok(nvrtc) => {
            let (major, minor) = nvrtc.version();
            DoctorRow {
                name: "kernel compiler",
                verdict: CheckVerdict::Good,
                measured: format!("NVRTC {major}.{minor}, {}", nvrtc.file()),
                words: "kernels can be compiled for any GPU; the simulated device needs none".into(),
                advice: None,
            }
        }
        Err(error) => DoctorRow {
            name: "kernel compiler",
            verdict: CheckVerdict::Note,
            measured: "none".into(),
            words: format!("only precompiled kernels can be used: {error}"),
            advice: error.hint(),
        },
    };
    rows.insert(1.min(rows.len()), row);
    rows
}

fn cpu() -> anyhow::Result<DoctorRow> {
    let machine = refrain::CpuInfo::measure()?;
    Ok(DoctorRow {
        name: "cpu",
        verdict: CheckVerdict::Good,
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

fn print(out: &mut Stdout, row: &DoctorRow) -> anyhow::Result<()> {
    let style = match row.verdict {
        CheckVerdict::Good => AnsiColor::Green.on_default(),
        CheckVerdict::Note => AnsiColor::Yellow.on_default(),
        CheckVerdict::Bad => AnsiColor::Red.on_default(),
        CheckVerdict::Skipped => Style::new().dimmed(),
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
