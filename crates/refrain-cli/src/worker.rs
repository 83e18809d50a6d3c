//! `refrain __worker`: the process that owns a device for `refrain serve`.

use crate::cli::CliContext;
use crate::serve::{self, LogFormat};
use refrain::{Device, GuessSource, ServiceOptions, SessionOptions, SpeculationOptions};
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
    let models = args.serve.models(context)?;
    Ok(models
        .into_iter()
        .enumerate()
        .map(|(idx, model)| ModelSpec {
            source: model.found.source(),
            name: model.name,
            // A draft model guesses for the first model and its adapters.
            options: match (&options.session.speculation.source, &model.adapter) {
                (GuessSource::Model(_), None) if idx > 0 => {
                    let session = SessionOptions {
                        speculation: SpeculationOptions::default(),
                        ..options.session.clone()
                    };
                    ServiceOptions { session, ..options.clone() }
                }
                _ => options.clone(),
            },
            adapter: model.adapter,
            at_start: idx == 0,
        })
        .collect())
}
