//! Messages from handles to the engine's thread.

use crate::error::{EngineError, Stopped};
use crate::request::{RequestId, lock};
use crate::serve::{Server, Submitted};
use crate::stream::Channel;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

/// A closure to run between two steps.
pub(crate) type ServerCall = Box<dyn FnOnce(&mut Server) + Send>;

/// State shared by the handles and the engine's thread.
pub(crate) struct Mailbox {
    mail: Mutex<Mail>,
    arrived: Condvar,
    stopped: Condvar,
    /// Whether there is new mail. Checked after every step, hence without the lock.
    is_new: AtomicBool,
}

/// Channels of requests that have not ended.
pub(crate) type OpenChannels = Vec<(RequestId, Arc<Channel>)>;

#[derive(Default)]
struct Mail {
    submitted: Vec<Submitted>,
    calls: Vec<ServerCall>,
    n_submitted: u64,
    /// Channels of requests that have not ended, oldest first.
    open: OpenChannels,
    is_closed: bool,
    stopped: Option<Stopped>,
}

impl Mail {
    fn check(&self) -> Result<(), EngineError> {
        self.stopped.clone().map_or(Ok(()), |stopped| Err(stopped.into()))
    }
}

impl Mailbox {
    pub(crate) fn new() -> Mailbox {
        Mailbox {
            mail: Mutex::new(Mail::default()),
            arrived: Condvar::new(),
            stopped: Condvar::new(),
            is_new: AtomicBool::new(false),
        }
    }

    /// Adds a request if fewer than `max` are open. Requests are numbered in order of arrival.
    pub(crate) fn submit(
        &self,
        max: usize,
        make: impl FnOnce(RequestId) -> Result<Submitted, EngineError>,
    ) -> Result<RequestId, EngineError> {
        self.send(|mail| {
            let n_requests = mail.open.len();
            if n_requests >= max {
                return Err(EngineError::QueueFull { n_requests, max });
            }
            let id = RequestId(mail.n_submitted);
            let submitted = make(id)?;
            mail.n_submitted += 1;
            mail.open.push((id, submitted.channel().clone()));
            mail.submitted.push(submitted);
            Ok(id)
        })
    }

    pub(crate) fn call(&self, call: ServerCall) -> Result<(), EngineError> {
        self.send(|mail| {
            mail.calls.push(call);
            Ok(())
        })
    }

    fn send<R>(&self, add: impl FnOnce(&mut Mail) -> Result<R, EngineError>) -> Result<R, EngineError> {
        let mut mail = lock(&self.mail);
        mail.check()?;
        let added = add(&mut mail)?;
        self.notify();
        Ok(added)
    }

    /// Fails if the engine has stopped.
    pub(crate) fn check(&self) -> Result<(), EngineError> {
        lock(&self.mail).check()
    }

    pub(crate) fn cancel(&self, id: RequestId) {
        let mail = lock(&self.mail);
        if let Some((_, channel)) = mail.open.iter().find(|(open, _)| *open == id) {
            channel.cancel();
            self.notify();
        }
    }

    pub(crate) fn close(&self) {
        lock(&self.mail).is_closed = true;
        self.wake();
    }

    /// Makes the thread check the demand of its requests.
    pub(crate) fn wake(&self) {
        let _mail = lock(&self.mail);
        self.notify();
    }

    /// Call only with the lock held: the thread holds it from its last check until it sleeps.
    fn notify(&self) {
        self.is_new.store(true, Ordering::Release);
        self.arrived.notify_one();
    }

    /// Returns why the thread has ended, waiting for the end if necessary.
    pub(crate) fn why_stopped(&self) -> Stopped {
        let mut mail = lock(&self.mail);
        loop {
            match &mail.stopped {
                Some(stopped) => return stopped.clone(),
                None => mail = self.stopped.wait(mail).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }

    pub(crate) fn is_new(&self) -> bool {
        self.is_new.load(Ordering::Acquire)
    }

    /// Waits for new mail.
    pub(crate) fn wait(&self) {
        let mut mail = lock(&self.mail);
        while !self.is_new() {
            mail = self.arrived.wait(mail).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Takes all new mail, if any, and whether the engine is to shut down.
    pub(crate) fn take(&self) -> Option<(Vec<Submitted>, Vec<ServerCall>, bool)> {
        if !self.is_new() {
            return None;
        }
        let mut mail = lock(&self.mail);
        self.is_new.store(false, Ordering::Release);
        Some((std::mem::take(&mut mail.submitted), std::mem::take(&mut mail.calls), mail.is_closed))
    }

    pub(crate) fn ended(&self, id: RequestId) {
        lock(&self.mail).open.retain(|(open, _)| *open != id);
    }

    /// Rejects all mail from here on. Returns the unread requests and calls, and the channels of all open
    /// requests.
    pub(crate) fn stop(&self, why: &Stopped) -> (Vec<Submitted>, Vec<ServerCall>, OpenChannels) {
        let mut mail = lock(&self.mail);
        mail.stopped = Some(why.clone());
        self.stopped.notify_all();
        let open = std::mem::take(&mut mail.open);
        (std::mem::take(&mut mail.submitted), std::mem::take(&mut mail.calls), open)
    }
}
