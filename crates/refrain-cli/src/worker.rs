//! `refrain __worker`: the process that owns a device for `refrain serve`.

use crate::cli::CliContext;
use crate::serve::{self, LogFormat, NamedModel};
use refrain::{Device, GuessSource, NamedLora, ServiceOptions, SessionOptions, SpeculationOptions};
use refrain_worker::fake::{FakeOptions, FakeShelf};
use refrain_worker::{ModelShelf, ModelSpec, WorkerOptions, run_worker};
use std::path::PathBuf;

/// The name of the hidden command.
pub(crate) const COMMAND: &str = "__worker";

/// Serve the requests of one server, with the flags of `serve`
#[derive(clap::Args, Debug)]
#[group(id = "worker")]
pub(crate) struct Args {
    /// The server's socket
    #[arg(long)]
    socket: PathBuf,
    /// Index of the worker, which decides its device
    #[arg(long)]
    worker_idx: u32,
    #[command(flatten)]
    serve: serve::Args,
}

impl Args {
    pub(crate) fn log_format(&self) -> LogFormat {
        self.serve.log_format()
    }
}

pub(crate) fn run(args: &Args, context: &CliContext) -> anyhow::Result<()> {
    let options =
        WorkerOptions { memory_budget: args.serve.memory_budget(), ..WorkerOptions::new(&args.socket) };
    if let Some(step) = args.serve.fake_step() {
        let model = args.serve.models(context)?.remove(0);
        let n_vocab = model.found.open()?.config().n_vocab as u32;
        let fake = FakeOptions { name: model.name, n_vocab, step, ..FakeOptions::default() };
        return Ok(run_worker(FakeShelf::new(fake), &options)?);
    }
    Ok(run_worker(ModelShelf::new(specs(args, context)?), &options)?)
}

/// The models to serve, on this worker's device.
fn specs(args: &Args, context: &CliContext) -> anyhow::Result<Vec<ModelSpec>> {
    let mut options = args.serve.service(context)?;
    let n_workers = args.serve.n_workers();
    match &mut options.session.device {
        Device::Cuda { ordinal, .. } => *ordinal += args.worker_idx,
        Device::Cpu { threads: threads @ None } if n_workers > 1 => {
            let n_cores = std::thread::available_parallelism().map_or(1, usize::from);
            *threads = Some((n_cores / n_workers).max(1));
        }
        _ => {}
    }
    let mut specs: Vec<ModelSpec> = Vec::new();
    for NamedModel { name, found, adapter, .. } in args.serve.models(context)? {
        let at_start = specs.is_empty();
        if let (Some(folder), Some(first)) = (adapter, specs.first_mut()) {
            // As it was trained.
            first.adapters.push(NamedLora { name, folder, scale: 1.0 });
            continue;
        }
        // A draft model guesses for the first model and its adapters.
        let options = match &options.session.speculation.source {
            GuessSource::Model(_) if !at_start => {
                let speculation = SpeculationOptions::default();
                ServiceOptions {
                    session: SessionOptions { speculation, ..options.session.clone() },
                    ..options.clone()
                }
            }
            _ => options.clone(),
        };
        specs.push(ModelSpec { name, source: found.source(), adapters: Vec::new(), options, at_start });
    }
    Ok(specs)
}
