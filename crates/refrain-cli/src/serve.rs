//! `refrain serve`: OpenAI's and Anthropic's APIs over supervised workers.

use crate::cli::CliContext;
use crate::fail::{Hinted, Interrupted};
use crate::opts::{DeviceOpts, is_name};
use crate::out::{counted, talk, thousands};
use crate::resolve::{self, FoundModel};
use crate::speculate::SpeculateOpts;
use crate::worker;
use refrain::{Builtin, Model, ServiceOptions, SessionOptions};
use refrain_server::{ApiKeys, ServedModel, Server, ServerOptions, TlsFiles};
use refrain_worker::{Deadlines, PoolOptions, Refusal, TokenBackend, WorkerPool};
use std::ffi::OsString;
use std::net::{IpAddr, SocketAddr};
use std::num::{NonZeroU64, NonZeroUsize};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;
use tokio::signal::unix::{SignalKind, signal};

/// Serve models over HTTP: OpenAI's and Anthropic's APIs
///
/// The first model is loaded at the start, further ones by their first request. Devices belong to worker processes: when
/// one fails or hangs, it is replaced, and open replies continue where they stopped. Without a model, the built-in chat
/// model is served.
///
/// Clients use http://127.0.0.1:8080/v1 as the base URL. /health, /ready, /status and /metrics report how the server does.
/// SIGTERM or Ctrl-C lets open replies end first; SIGHUP reads the key file again.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Examples:
  refrain serve
  refrain serve smollm2 --port 9000
  refrain serve small=smollm2 big=./model.gguf --seqs 64
  refrain serve chat=smollm2 embed=./all-MiniLM-L6-v2
  refrain serve ./model.gguf --host 0.0.0.0 --api-key-file keys.txt
  curl http://127.0.0.1:8080/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{\"messages\": [{\"role\": \"user\", \"content\": \"Hello\"}]}'")]
pub(crate) struct Args {
    /// Models, each a path, a short name such as smollm2, or owner/repo[:QUANT]; NAME= sets the name for clients
    #[arg(value_name = "[NAME=]MODEL")]
    models: Vec<String>,
    /// Address to listen on; one that other machines can reach needs an API key
    #[arg(long, value_name = "IP", default_value = "127.0.0.1", help_heading = "Network")]
    host: IpAddr,
    /// Port to listen on; 0 takes any free one
    #[arg(long, value_name = "N", default_value = "8080", help_heading = "Network")]
    port: u16,
    /// Key that clients must send; REFRAIN_API_KEY does the same without showing it in the list of processes
    #[arg(long, value_name = "KEY", help_heading = "Network")]
    api_key: Option<String>,
    /// File with a key per line, each followed by settings: name=WORD concurrent=N requests-per-minute=N
    /// tokens-per-minute=N no-prefix-cache
    #[arg(long, value_name = "FILE", help_heading = "Network")]
    api_key_file: Option<PathBuf>,
    /// PEM file with a certificate: serves HTTPS
    #[arg(long, value_name = "FILE", requires = "tls_key", help_heading = "Network")]
    tls_cert: Option<PathBuf>,
    /// PEM file with the key of the certificate
    #[arg(long, value_name = "FILE", requires = "tls_cert", help_heading = "Network")]
    tls_key: Option<PathBuf>,
    /// Let web pages of this origin send requests and read the answers, such as https://example.com; * is any; may be
    /// repeated
    #[arg(long, value_name = "ORIGIN", help_heading = "Network")]
    cors: Vec<String>,
    /// How the log is written to standard error; json has a line for each request as well, without prompts
    #[arg(long, value_name = "FORMAT", default_value = "text", help_heading = "Network")]
    log: LogFormat,
    /// Serve an address that other machines can reach without any key
    #[arg(long, help_heading = "Network")]
    unprotected: bool,
    /// Maximum size of a request's body in MiB
    #[arg(long, value_name = "MIB", default_value = "16", help_heading = "Network")]
    max_body: NonZeroUsize,
    /// Maximum number of connections
    #[arg(long, value_name = "N", default_value = "16384", help_heading = "Network")]
    max_connections: NonZeroUsize,
    /// Time that open replies have to end after SIGTERM, in seconds
    #[arg(long, value_name = "S", default_value = "30", help_heading = "Network")]
    drain: u64,
    /// Number of worker processes: GPUs from the chosen one on, or shares of the CPU
    #[arg(long, value_name = "N", default_value = "1", help_heading = "Workers")]
    workers: NonZeroUsize,
    /// Replace a worker that makes no progress for this many seconds while it has requests
    #[arg(long, value_name = "S", default_value = "60", help_heading = "Workers")]
    stall: NonZeroU64,
    /// Maximum number of sequences that run at once on a worker
    #[arg(long, value_name = "N", default_value = "32", help_heading = "Workers")]
    seqs: NonZeroUsize,
    /// Maximum number of open requests; further ones are refused
    #[arg(long, value_name = "N", default_value = "1024", help_heading = "Workers")]
    max_requests: NonZeroUsize,
    /// Context size in tokens, prompt and reply of a request together [default: the smaller of 4096 and the model's
    /// limit]. Embedding models take texts as long as their files recommend
    #[arg(short, long, value_name = "N", help_heading = "Workers")]
    context: Option<usize>,
    /// Tokens in the KV cache for all running requests [default: --seqs times -c, at most 32768]
    #[arg(long, value_name = "N", help_heading = "Workers")]
    kv_tokens: Option<usize>,
    /// Memory for loaded models in MiB, weights and caches; idle models are unloaded to stay below it
    #[arg(long, value_name = "MIB", help_heading = "Workers")]
    memory: Option<u64>,
    /// Serve the adapter in DIR over the first model under another name; may be repeated. Adapters share the loaded
    /// model
    #[arg(long, value_name = "NAME=DIR", help_heading = "Workers")]
    lora: Vec<String>,
    /// Serve made-up tokens, one per request every N microseconds, to measure the server itself
    #[arg(long, value_name = "N", hide = true)]
    fake_engine: Option<u64>,
    #[command(flatten)]
    speculate: SpeculateOpts,
    #[command(flatten)]
    device: DeviceOpts,
}

/// How the log is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum LogFormat {
    /// Lines to read
    Text,
    /// A JSON object per line
    Json,
}

/// A model with its name for clients.
pub(crate) struct NamedModel {
    pub(crate) name: String,
    pub(crate) found: FoundModel,
    pub(crate) adapter: Option<PathBuf>,
    base: Option<String>,
}

impl Args {
    pub(crate) fn log_format(&self) -> LogFormat {
        self.log
    }

    /// Says what the server is doing.
    fn say(&self, context: &CliContext, text: &str) {
        match self.log {
            _ if context.quiet => {}
            LogFormat::Text => talk!("{text}"),
            LogFormat::Json => tracing::info!("{text}"),
        }
    }

    pub(crate) fn n_workers(&self) -> usize {
        self.workers.get()
    }

    pub(crate) fn memory_budget(&self) -> Option<u64> {
        self.memory.map(|mebibytes| mebibytes << 20)
    }

    pub(crate) fn fake_step(&self) -> Option<Duration> {
        self.fake_engine.map(Duration::from_micros)
    }

    /// Device, context and cache of each model.
    pub(crate) fn service(&self, context: &CliContext) -> anyhow::Result<ServiceOptions> {
        Ok(ServiceOptions {
            session: SessionOptions {
                speculation: self.speculate.options(context)?,
                ..self.device.tried_session(self.context, context)?
            },
            max_seqs: self.seqs.get(),
            // The pool refuses first, with a better reason.
            max_requests: self.max_requests.get().saturating_mul(2),
            kv_tokens: self.kv_tokens,
        })
    }

    /// Finds the models, and pulls those that are not here.
    pub(crate) fn models(&self, context: &CliContext) -> anyhow::Result<Vec<NamedModel>> {
        let mut models = Vec::new();
        if self.models.is_empty() {
            let found = resolve::find_or(None, Builtin::Chat, context)?;
            models.push(NamedModel { name: found.name.clone(), found, adapter: None, base: None });
        }
        for text in &self.models {
            let (name, text) = match text.split_once('=') {
                // A path may contain an equals sign.
                Some((name, model)) if is_name(name) && !Path::new(text).exists() => (Some(name), model),
                _ => (None, text.as_str()),
            };
            let found = resolve::find_or(Some(text), Builtin::Chat, context)?;
            let name = name.map_or_else(|| served_name(&found.name), str::to_owned);
            models.push(NamedModel { name, found, adapter: None, base: None });
        }
        for text in &self.lora {
            let Some((name, folder)) = text.split_once('=').filter(|(name, _)| is_name(name)) else {
                let message = format!("--lora {text} has no name");
                return Err(Hinted::new(message, "give NAME=DIR, such as --lora poems=./poems-lora").into());
            };
            let (base, found) = (models[0].name.clone(), models[0].found.clone());
            let adapter = Some(PathBuf::from(folder));
            models.push(NamedModel { name: name.to_owned(), found, adapter, base: Some(base) });
        }
        Ok(models)
    }

    fn keys(&self, context: &CliContext) -> anyhow::Result<ApiKeys> {
        let mut keys = ApiKeys::default();
        if let Some(key) = &self.api_key {
            keys.add("--api-key", key);
        }
        if let Some(key) = &context.store.env().api_key {
            keys.add("REFRAIN_API_KEY", key.secret());
        }
        if let Some(path) = &self.api_key_file {
            keys.read(path).map_err(refused)?;
            if keys.is_empty() {
                let message = format!("{} has no keys", path.display());
                return Err(Hinted::new(message, "write one key per line").into());
            }
        }
        Ok(keys)
    }
}

/// The name for clients: that of the file or folder, if the model is one.
fn served_name(text: &str) -> String {
    let path = Path::new(text);
    let is_path = path.exists() || text.starts_with(['.', '/']);
    let name = path.file_stem().filter(|_| is_path).map(|name| name.to_string_lossy().into_owned());
    match path.is_dir() {
        true => path.file_name().map_or_else(|| text.to_owned(), |name| name.to_string_lossy().into_owned()),
        false => name.unwrap_or_else(|| text.to_owned()),
    }
}

pub(crate) fn run(args: &Args, context: &CliContext) -> anyhow::Result<()> {
    args.speculate.check(args.device.verify.is_some())?;
    if let Some(draft) = &args.speculate.draft {
        resolve::check(draft, context)?;
    }
    for name in &args.models {
        let bare = name.split_once('=').map_or(name.as_str(), |(_, model)| model);
        if !Path::new(name).exists() {
            resolve::check(bare, context)?;
        }
    }
    let keys = args.keys(context)?;
    let named = args.models(context)?;
    let mut served = Vec::with_capacity(named.len());
    let mut first: Option<Model> = None;
    for model in &named {
        // Adapters are those of the first model, and share its tokenizer.
        let opened = match (&model.base, &first) {
            (Some(_), Some(first)) => first.clone(),
            _ => model.found.open()?,
        };
        first.get_or_insert_with(|| opened.clone());
        let opened = ServedModel::new(&model.name, opened)?;
        served.push(match &model.base {
            Some(base) => opened.with_base(base),
            None => opened,
        });
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(std::thread::available_parallelism().map_or(2, usize::from).clamp(2, 4))
        .max_blocking_threads(16)
        .thread_name("refrain-http")
        .enable_all()
        .build()
        .map_err(|source| {
            Hinted::new(format!("cannot start threads: {source}"), "raise the limit on processes")
        })?;
    let listening = context.interrupt.listen();
    let n_cut = runtime.block_on(serve(args, context, keys, served, &named))?;
    drop(listening);
    // A blocked thread must not keep the process.
    runtime.shutdown_timeout(Duration::from_secs(1));
    match n_cut {
        0 => Ok(()),
        n => {
            talk!("{} did not end within {} s", counted(n, "request"), args.drain);
            Err(Interrupted.into())
        }
    }
}

async fn serve(
    args: &Args,
    context: &CliContext,
    keys: ApiKeys,
    served: Vec<ServedModel>,
    named: &[NamedModel],
) -> anyhow::Result<usize> {
    let names: Vec<String> = named.iter().map(|model| model.name.clone()).collect();
    let pool = Arc::new(WorkerPool::start(pool_options(args, context, names.clone())?).map_err(with_hint)?);
    let mut options = ServerOptions::new(SocketAddr::new(args.host, args.port));
    options.keys = keys;
    options.unprotected = args.unprotected;
    if let (Some(cert), Some(key)) = (&args.tls_cert, &args.tls_key) {
        options.tls = Some(TlsFiles { cert: cert.clone(), key: key.clone() });
    }
    options.cors.clone_from(&args.cors);
    options.max_body_bytes = args.max_body.get() << 20;
    options.max_connections = args.max_connections.get();
    options.drain = Duration::from_secs(args.drain);
    options.stall = Duration::from_secs(2 * args.stall.get());
    let backend: Arc<dyn TokenBackend> = pool.clone();
    let server = Server::bind(served, backend, options).await.map_err(refused)?;
    let (addr, replacer) = (server.addr(), server.key_replacer());
    let scheme = if args.tls_cert.is_some() { "https" } else { "http" };
    args.say(context, &format!("serving {} at {scheme}://{addr}", names.join(", ")));
    let (mut term, mut int, mut hup) =
        (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?, signal(SignalKind::hangup())?);
    let mut failed = None;
    let stop = async {
        let mut started = Some(Box::pin(pool.started()));
        loop {
            let ready = async {
                match &mut started {
                    Some(started) => started.await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                _ = term.recv() => break,
                _ = int.recv() => break,
                _ = hup.recv() => match args.keys(context) {
                    Ok(keys) => replacer.replace(keys),
                    // The old keys stay: a typo must not open the server.
                    Err(error) => tracing::error!("the keys were not replaced: {error:#}"),
                },
                ready = ready => match ready {
                    Ok(()) => {
                        started = None;
                        say_ready(&*pool, args, context);
                    }
                    Err(refusal) => {
                        failed = Some(refusal);
                        break;
                    }
                },
            }
        }
        if failed.is_none() {
            args.say(context, &format!("stopping: open requests have {} s to end", args.drain));
        }
    };
    let n_cut = server.run(stop).await;
    if let Some(Refusal { message, hint, .. }) = failed {
        let hint = hint.unwrap_or_else(|| "the log above may say more".to_owned());
        return Err(Hinted::new(message, hint).into());
    }
    // Ends the workers, which takes a moment.
    tokio::task::spawn_blocking(move || drop(pool)).await?;
    Ok(n_cut)
}

fn say_ready(backend: &dyn TokenBackend, args: &Args, context: &CliContext) {
    let status = backend.status();
    let Some(worker) = status.workers.iter().find(|worker| !worker.backend.is_empty()) else { return };
    let holds = worker.models.first().map(|load| format!(", context {}", thousands(load.context)));
    args.say(context, &format!("ready on {}{}", worker.backend, holds.unwrap_or_default()));
}

fn pool_options(args: &Args, context: &CliContext, names: Vec<String>) -> anyhow::Result<PoolOptions> {
    let program = std::env::current_exe().map_err(|error| {
        Hinted::new(format!("this program cannot be found: {error}"), "start it by its path")
    })?;
    let flags = worker_flags(std::env::args_os().skip(1));
    let is_offline = context.store.env().offline;
    let mut options = PoolOptions::new(names, move |idx, socket| {
        let mut command = Command::new(&program);
        command.arg(worker::COMMAND).arg("--socket").arg(socket).args(["--worker-idx", &idx.to_string()]);
        if is_offline {
            command.arg("--offline");
        }
        command.args(&flags);
        command
    });
    options.n_workers = args.workers.get();
    options.max_requests = args.max_requests.get();
    let (stall, usual) = (Duration::from_secs(args.stall.get()), options.deadlines);
    // A worker sends several messages a second, whatever the length of its steps.
    options.deadlines = Deadlines { stall, silence: usual.silence.min(stall), ..usual };
    Ok(options)
}

/// The arguments of this process without the name of the command: workers take the same ones, except for the key.
fn worker_flags(args: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let mut flags = Vec::new();
    let mut args = args.peekable();
    let mut is_named = false;
    while let Some(arg) = args.next() {
        if !is_named && arg == "serve" {
            is_named = true;
        } else if arg == "--api-key" {
            args.next();
        } else if !arg.to_string_lossy().starts_with("--api-key=") {
            flags.push(arg);
        }
    }
    flags
}

fn refused(error: refrain_server::ServeError) -> anyhow::Error {
    match error.hint() {
        Some(hint) => Hinted::new(chain(&error), hint).into(),
        None => error.into(),
    }
}

fn with_hint(error: refrain_worker::WorkerError) -> anyhow::Error {
    match error.hint() {
        Some(hint) => Hinted::new(chain(&error), hint).into(),
        None => error.into(),
    }
}

fn chain(error: &dyn std::error::Error) -> String {
    match error.source() {
        Some(source) => format!("{error}: {}", chain(source)),
        None => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workers_get_the_flags_of_the_server_without_its_key() {
        let args = [
            "-q",
            "serve",
            "serve",
            "--api-key",
            "secret",
            "--port",
            "1",
            "--api-key=s",
            "--api-key-file",
            "f",
        ];
        let flags = worker_flags(args.map(OsString::from).into_iter());
        assert_eq!(flags, ["-q", "serve", "--port", "1", "--api-key-file", "f"].map(OsString::from));
    }

    #[test]
    fn the_name_for_clients_is_that_of_the_file_or_the_one_given() {
        assert_eq!(served_name("./models/a.b.gguf"), "a.b");
        assert_eq!(served_name("owner/repo:Q4_K_M"), "owner/repo:Q4_K_M");
        assert!(is_name("gpt-4o-mini") && !is_name("") && !is_name("a b"));
    }
}
