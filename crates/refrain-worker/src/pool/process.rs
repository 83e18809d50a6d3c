//! One worker process: its start, its connection and its end.

use super::options::{Deadlines, WorkerCommand};
use crate::protocol::{self, FrameBuffer, FromWorker, LastWords, MAX_FROM_WORKER_BYTES, ProtocolError};
use rustix::process::{Pid, Signal, kill_process_group};
use std::fmt;
use std::io;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;
use tokio::io::AsyncWriteExt;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{UnixListener, UnixStream};
use tokio::process::{Child, Command};
use tokio::sync::mpsc;
use tokio::time::timeout;

/// What happens in a worker process.
#[derive(Debug)]
pub(super) enum Notice {
    /// The process runs.
    Started { pid: u32 },
    /// It has said hello.
    Connected,
    /// It has sent a message.
    Message(FromWorker),
    /// It has ended, and nothing of it is left.
    Gone(Failure),
}

/// What a worker process is told.
#[derive(Debug)]
pub(super) enum Control {
    /// Send a frame.
    Send(Vec<u8>),
    /// End the process for this reason.
    Kill(Failure),
    /// Close the connection, so that the process ends by itself.
    Close,
}

/// Why a worker process has ended.
#[derive(Debug)]
pub(super) enum Failure {
    NotStarted(io::Error),
    NoHello { within: Duration },
    NotUnderstood(ProtocolError),
    Socket(io::Error),
    Exited(Option<ExitStatus>),
    LastWords(LastWords),
    NotLoaded { within: Duration },
    Silent { within: Duration },
    Stalled { within: Duration, n_open: usize },
    ReadsNothing { within: Duration },
    BrokeRules(&'static str),
    Closed,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::NotStarted(error) => write!(f, "it could not be started: {error}"),
            Failure::NoHello { within } => write!(f, "it sent no hello within {within:?}"),
            Failure::NotUnderstood(error) => write!(f, "{error}"),
            Failure::Socket(error) => write!(f, "its socket failed: {error}"),
            Failure::Exited(None) => f.write_str("it closed its socket"),
            Failure::Exited(Some(status)) => match (status.signal(), status.code()) {
                (Some(signal), _) => write!(f, "it was killed by signal {signal}"),
                (None, Some(code)) => write!(f, "it exited with status {code}"),
                (None, None) => write!(f, "it ended: {status}"),
            },
            Failure::LastWords(LastWords { lost_device: true, message, .. }) => {
                write!(f, "it lost its device: {message}")
            }
            Failure::LastWords(LastWords { message, .. }) => f.write_str(message),
            Failure::NotLoaded { within } => write!(f, "it loaded no model within {within:?}"),
            Failure::Silent { within } => write!(f, "it sent nothing for {within:?}"),
            Failure::Stalled { within, n_open } => {
                let s = if *n_open == 1 { "" } else { "s" };
                write!(f, "it made no progress for {within:?} with {n_open} open request{s}")
            }
            Failure::ReadsNothing { within } => write!(f, "it read nothing for {within:?}"),
            Failure::BrokeRules(how) => write!(f, "it broke the rules of the protocol: {how}"),
            Failure::Closed => f.write_str("it was stopped"),
        }
    }
}

impl Failure {
    /// An action that may resolve it.
    pub(super) fn hint(&self) -> Option<String> {
        match self {
            Failure::LastWords(words) => words.hint.clone(),
            Failure::NotUnderstood(error) => error.hint(),
            _ => None,
        }
    }
}

/// What starts a worker process.
pub(super) struct Launch {
    pub(super) idx: usize,
    pub(super) socket: PathBuf,
    pub(super) command: WorkerCommand,
    pub(super) build: String,
    pub(super) deadlines: Deadlines,
}

/// Runs a worker process to its end, which is reported last. Nothing of it is left then: no process, socket or file.
pub(super) async fn run(
    launch: Launch,
    mut control: mpsc::UnboundedReceiver<Control>,
    report: impl Fn(Notice),
) {
    let failure = match start(&launch) {
        Err(error) => Failure::NotStarted(error),
        Ok((listener, mut child)) => {
            if let Some(pid) = child.id() {
                report(Notice::Started { pid });
            }
            let failure = serve(&launch, listener, &mut child, &mut control, &report).await;
            end(child, failure, launch.deadlines.exit).await
        }
    };
    // It was removed as soon as the worker had connected, if it had.
    let _ = std::fs::remove_file(&launch.socket);
    report(Notice::Gone(failure));
}

fn start(launch: &Launch) -> io::Result<(UnixListener, Child)> {
    let listener = UnixListener::bind(&launch.socket)?;
    let mut command = (launch.command)(launch.idx, &launch.socket);
    // In a group of its own, a worker survives the Ctrl-C that lets its server drain.
    std::os::unix::process::CommandExt::process_group(&mut command, 0);
    command.stdin(Stdio::null());
    let child = Command::from(command).kill_on_drop(true).spawn()?;
    Ok((listener, child))
}

async fn serve(
    launch: &Launch,
    listener: UnixListener,
    child: &mut Child,
    control: &mut mpsc::UnboundedReceiver<Control>,
    report: &impl Fn(Notice),
) -> Failure {
    let mut buffer = FrameBuffer::new(MAX_FROM_WORKER_BYTES);
    let within = launch.deadlines.hello;
    let connected = tokio::select! {
        connected = timeout(within, connect(&listener, launch, &mut buffer)) => connected,
        status = child.wait() => return Failure::Exited(status.ok()),
        failure = until_ended(control) => return failure,
    };
    drop(listener);
    let (mut read, mut write) = match connected {
        Err(_) => return Failure::NoHello { within },
        Ok(Err(failure)) => return failure,
        Ok(Ok(stream)) => stream.into_split(),
    };
    let _ = std::fs::remove_file(&launch.socket);
    report(Notice::Connected);
    let failure = tokio::select! {
        failure = receive(&mut read, &mut buffer, report) => return failure,
        failure = send(&mut write, control, launch.deadlines.write) => failure,
    };
    if let Failure::Socket(_) = &failure {
        // The worker is gone; what it said before explains why.
        let drained = receive(&mut read, &mut buffer, report);
        return timeout(launch.deadlines.exit, drained).await.unwrap_or(failure);
    }
    failure
}

/// Waits for an order to end while there is no connection. Nothing else is sent before the hello.
async fn until_ended(control: &mut mpsc::UnboundedReceiver<Control>) -> Failure {
    loop {
        match control.recv().await {
            Some(Control::Send(_)) => {}
            Some(Control::Kill(failure)) => return failure,
            Some(Control::Close) | None => return Failure::Closed,
        }
    }
}

/// Accepts the connection of the worker and exchanges hellos.
async fn connect(
    listener: &UnixListener,
    launch: &Launch,
    buffer: &mut FrameBuffer,
) -> Result<UnixStream, Failure> {
    let (mut stream, _) = listener.accept().await.map_err(Failure::Socket)?;
    // Sent before the check, so that a worker of another version can say what is wrong as well. What it said itself
    // explains more than that it is gone.
    let written = stream.write_all(&protocol::hello(&launch.build)).await;
    while !buffer.next_hello(&launch.build).map_err(Failure::NotUnderstood)? {
        stream.readable().await.map_err(Failure::Socket)?;
        match stream.try_read(buffer.spare()) {
            Ok(0) => return Err(Failure::Exited(None)),
            Ok(n) => buffer.filled(n),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(Failure::Socket(error)),
        }
    }
    written.map_err(Failure::Socket)?;
    Ok(stream)
}

/// Passes messages on until the connection or the worker fails.
async fn receive(socket: &mut OwnedReadHalf, buffer: &mut FrameBuffer, report: &impl Fn(Notice)) -> Failure {
    loop {
        loop {
            match buffer.next() {
                Ok(None) => break,
                Ok(Some(FromWorker::Failed(words))) => return Failure::LastWords(words),
                Ok(Some(message)) => report(Notice::Message(message)),
                Err(error) => return Failure::NotUnderstood(error),
            }
        }
        if let Err(error) = socket.readable().await {
            return Failure::Socket(error);
        }
        match socket.try_read(buffer.spare()) {
            Ok(0) => return Failure::Exited(None),
            Ok(n) => buffer.filled(n),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return Failure::Exited(None),
            Err(error) => return Failure::Socket(error),
        }
    }
}

/// Writes frames until there is an order to end.
async fn send(
    socket: &mut OwnedWriteHalf,
    control: &mut mpsc::UnboundedReceiver<Control>,
    within: Duration,
) -> Failure {
    loop {
        match control.recv().await {
            Some(Control::Kill(failure)) => return failure,
            Some(Control::Close) | None => return Failure::Closed,
            Some(Control::Send(frame)) => match timeout(within, socket.write_all(&frame)).await {
                Err(_) => return Failure::ReadsNothing { within },
                Ok(Err(error)) => return Failure::Socket(error),
                Ok(Ok(())) => {}
            },
        }
    }
}

/// Ends the process, if it has not ended, and reaps it. Completes the failure with how it ended.
async fn end(mut child: Child, failure: Failure, within: Duration) -> Failure {
    let ends_by_itself = matches!(
        failure,
        Failure::Closed | Failure::Exited(None) | Failure::LastWords(_) | Failure::Socket(_)
    );
    if ends_by_itself && let Ok(Ok(status)) = timeout(within, child.wait()).await {
        return match failure {
            Failure::Exited(None) | Failure::Socket(_) => Failure::Exited(Some(status)),
            other => other,
        };
    }
    if let Some(pid) = child.id().and_then(|pid| Pid::from_raw(pid.cast_signed())) {
        // The whole group: a worker may have children. It cannot be another group, since the worker is not reaped yet.
        let killed = kill_process_group(pid, Signal::KILL).map_err(io::Error::from);
        if let Err(error) = killed.or_else(|_| child.start_kill()) {
            tracing::warn!(%error, "a worker cannot be killed");
        }
    }
    match timeout(within.max(Duration::from_secs(5)), child.wait()).await {
        Ok(Ok(_)) => {}
        Ok(Err(error)) => tracing::warn!(%error, "a worker cannot be reaped"),
        Err(_) => tracing::warn!("a worker was killed and has not ended: its driver may hang"),
    }
    failure
}

/// Removes the folder of the sockets, when it is dropped.
pub(super) struct SocketFolder {
    path: PathBuf,
    is_ours: bool,
}

impl SocketFolder {
    /// The given folder, or a new one that only this user can enter.
    pub(super) fn make(path: Option<&Path>) -> Result<SocketFolder, (PathBuf, io::Error)> {
        use std::os::unix::fs::DirBuilderExt;
        if let Some(path) = path {
            return Ok(SocketFolder { path: path.to_owned(), is_ours: false });
        }
        for attempt in 0_u32.. {
            // Short: the path of a socket has at most 107 bytes.
            let path = std::env::temp_dir().join(format!("refrain-{}-{attempt}", std::process::id()));
            match std::fs::DirBuilder::new().mode(0o700).create(&path) {
                Ok(()) => return Ok(SocketFolder { path, is_ours: true }),
                // Another pool of this process, or a process that had this id.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists && attempt < 10_000 => {}
                Err(error) => return Err((path, error)),
            }
        }
        unreachable!("the last attempt returns")
    }

    /// The path of a new socket.
    pub(super) fn socket(&self, idx: usize, generation: u64) -> PathBuf {
        self.path.join(format!("{}-{idx}-{generation}", std::process::id()))
    }
}

impl Drop for SocketFolder {
    fn drop(&mut self) {
        if self.is_ours {
            let _ = std::fs::remove_dir(&self.path);
        }
    }
}
