//! `--graph-method auto`: whether stream capture can be used, tried in a process of its own.

use crate::cli::Context;
use crate::out::Out;
use refrain::FaultScript;
use refrain_driver::DeviceKind;
use refrain_driver::sim::SimOptions;
use refrain_driver::trial::{self, Choice, Findings, Outcome, Subject};
use std::io::Read;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// What a trial prints in front of why it could not be made.
const NOT_RUN: &str = "no trial: ";
/// The name of the hidden command.
pub(crate) const COMMAND: &str = "__try-capture";
/// How long a process that was told to end is waited for. One that hangs in the driver may never end.
const GRACE: Duration = Duration::from_secs(1);

/// Try stream capture in this process, which may lose the device
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// The CUDA device; the simulated one unless given
    #[arg(long)]
    cuda: Option<u32>,
    /// What shall go wrong on the simulated device
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
    Out::new().line(line)
}

pub(crate) fn simulated(faults: FaultScript) -> DeviceKind {
    DeviceKind::Sim(SimOptions { faults, ..SimOptions::default() })
}

/// How graphs are to be recorded on a device: by what an earlier start found, or by a trial that takes at most `limit`.
pub(crate) fn choose(kind: &DeviceKind, limit: Duration, context: &Context) -> Option<Choice> {
    // A device that does not even say what it is will say why when it is opened.
    let subject = Subject::of(kind).ok()?;
    let findings = Findings::new(context.store.env().refrain_home.join("drivers"));
    Some(trial::choose(&subject, Some(&findings), || start(kind, limit)))
}

/// Runs the trial in this program, started again.
fn start(kind: &DeviceKind, limit: Duration) -> Outcome {
    let program = match std::env::current_exe() {
        Ok(program) => program,
        Err(error) => return Outcome::NotRun(format!("this program is not found: {error}")),
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
                tracing::debug!("the trial could not be ended: {error}");
            }
            return Outcome::Hung(limit);
        }
        Err(error) => return Outcome::NotRun(format!("the trial was lost sight of: {error}")),
    };
    // It has ended, and what it prints fits into the pipe.
    let mut text = String::new();
    if let Some(mut stdout) = child.stdout.take()
        && let Err(error) = stdout.read_to_string(&mut text)
    {
        return Outcome::Died(format!("{status}, and unreadable words: {error}"));
    }
    match (text.parse(), text.strip_prefix(NOT_RUN)) {
        (Ok(finding), _) if status.success() => Outcome::Found(finding),
        (_, Some(why)) if status.success() => Outcome::NotRun(why.to_owned()),
        _ => Outcome::Died(status.to_string()),
    }
}

/// `None` when it has not ended in time.
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
