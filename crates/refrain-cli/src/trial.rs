//! `--graph-method auto`: a trial of stream capture in a separate process.

use crate::cli::CliContext;
use crate::out::Stdout;
use refrain::FaultScript;
use refrain_driver::DeviceKind;
use refrain_driver::sim::SimOptions;
use refrain_driver::trial::{self, Findings, MethodChoice, Outcome, Subject};
use std::io::Read;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// Prefix of the reason why a trial could not be made.
const NOT_RUN: &str = "no trial: ";
/// The name of the hidden command.
pub(crate) const COMMAND: &str = "__try-capture";
/// Time to wait for a killed process. One that hangs in the driver may never end.
const GRACE: Duration = Duration::from_secs(1);

/// Try stream capture in this process, which may lose the device
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// The CUDA device; the simulated one by default
    #[arg(long)]
    cuda: Option<u32>,
    /// Faults to inject on the simulated device
    #[arg(long, default_value = "")]
    faults: String,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let kind = match args.cuda {
        Some(ordinal) => DeviceKind::Cuda(ordinal),
        None => simulated(FaultScript::parse(&args.faults)?),
    };
    let line = match trial::run(kind) {
        Ok(finding) => finding.to_string(),
        Err(error) => format!("{NOT_RUN}{error}"),
    };
    Stdout::new().line(line)
}

pub(crate) fn simulated(faults: FaultScript) -> DeviceKind {
    DeviceKind::Sim(SimOptions { faults, ..SimOptions::default() })
}

/// Chooses the recording method for a device: from an earlier trial, or from one that takes at most `limit`.
pub(crate) fn choose(kind: &DeviceKind, limit: Duration, context: &CliContext) -> Option<MethodChoice> {
    // A device that cannot be queried reports its error when it is opened.
    let subject = Subject::of(kind).ok()?;
    let findings = Findings::new(context.store.env().refrain_home.join("drivers"));
    Some(trial::choose(&subject, Some(&findings), || start(kind, limit)))
}

/// Runs the trial in a second process of this program.
fn start(kind: &DeviceKind, limit: Duration) -> Outcome {
    let program = match std::env::current_exe() {
        Ok(program) => program,
        Err(error) => return Outcome::NotRun(format!("this program cannot be found: {error}")),
    };
    let mut command = Command::new(program);
    command.args([COMMAND, "--quiet"]);
    match kind {
        DeviceKind::Cuda(ordinal) => command.args(["--cuda", &ordinal.to_string()]),
        DeviceKind::Sim(options) => command.args(["--faults", &options.faults.to_string()]),
    };
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    match command.spawn() {
        Ok(child) => outcome(child, limit),
        Err(error) => Outcome::NotRun(format!("a second process cannot be started: {error}")),
    }
}

fn outcome(mut child: Child, limit: Duration) -> Outcome {
    let status = match wait(&mut child, limit) {
        Ok(Some(status)) => status,
        Ok(None) => {
            if let Err(error) = child.kill().and_then(|()| wait(&mut child, GRACE)) {
                tracing::debug!("the trial cannot be killed: {error}");
            }
            return Outcome::Hung(limit);
        }
        Err(error) => return Outcome::NotRun(format!("the trial cannot be waited for: {error}")),
    };
    // It has ended, and its output fits into the pipe.
    let mut text = String::new();
    if let Some(mut stdout) = child.stdout.take()
        && let Err(error) = stdout.read_to_string(&mut text)
    {
        return Outcome::Died(format!("{status}, with unreadable output: {error}"));
    }
    match (text.parse(), text.strip_prefix(NOT_RUN)) {
        (Ok(finding), _) if status.success() => Outcome::Found(finding),
        (_, Some(why)) if status.success() => Outcome::NotRun(why.to_owned()),
        _ => Outcome::Died(status.to_string()),
    }
}

/// Waits for a process; `None` if it has not ended in time.
fn wait(child: &mut Child, limit: Duration) -> std::io::Result<Option<ExitStatus>> {
    let end = Instant::now() + limit;
    let mut pause = Duration::from_millis(1);
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(None);
        }
        std::thread::sleep(pause.min(left));
        pause = (pause * 2).min(Duration::from_millis(20));
    }
}
