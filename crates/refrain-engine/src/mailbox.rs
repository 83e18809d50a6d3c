//! What handles send to the engine's thread.

use crate::error::{EngineError, Stopped};
use crate::request::{RequestId, lock};
use crate::serve::{Server, Submitted};
use crate::stream::Channel;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

/// Something to do between two steps.
pub(crate) type Call = Box<dyn FnOnce(&mut Server) + Send>;

/// What handles and the engine's thread share.
pub(crate) struct Mailbox {
    mail: Mutex<Mail>,
    came: Condvar,
    stopped: Condvar,
    /// Whether there is anything new. Looked at after every step, so without the lock.
    is_new: AtomicBool,
}

/// Channels of requests that have not ended.
pub(crate) type OpenChannels = Vec<(RequestId, Arc<Channel>)>;

#[derive(Default)]
struct Mail {
    submitted: Vec<Submitted>,
    calls: Vec<Call>,
    n_submitted: u64,
    /// Channels of the requests that have not ended, from the oldest.
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
            came: Condvar::new(),
            stopped: Condvar::new(),
            is_new: AtomicBool::new(false),
        }
    }

    /// Adds a request if fewer than `most` are open. They are numbered in the order they come.
    pub(crate) fn submit(
        &self,
        most: usize,
        make: impl FnOnce(RequestId) -> Result<Submitted, EngineError>,
    ) -> Result<RequestId, EngineError> {
        self.send(|mail| {
            let n_requests = mail.open.len();
            if n_requests >= most {
                return Err(EngineError::QueueFull { n_requests, most });
            }
            let id = RequestId(mail.n_submitted);
            let submitted = make(id)?;
            mail.n_submitted += 1;
            mail.open.push((id, submitted.channel().clone()));
            mail.submitted.push(submitted);
            Ok(id)
        })
    }

    pub(crate) fn call(&self, call: Call) -> Result<(), EngineError> {
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

    /// Fails when the engine serves nobody any more.
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

    /// Makes the thread look at what its requests want.
    pub(crate) fn wake(&self) {
        let _mail = lock(&self.mail);
        self.notify();
    }

    /// Only with the lock held: between its last look and its sleep the thread holds it.
    fn notify(&self) {
        self.is_new.store(true, Ordering::Release);
        self.came.notify_one();
    }

    /// Why the thread has ended; waits for the end if it is near.
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

    /// Waits until there is something new.
    pub(crate) fn wait(&self) {
        let mut mail = lock(&self.mail);
        while !self.is_new() {
            mail = self.came.wait(mail).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// All that is new, if anything is, and whether the engine is to end.
    pub(crate) fn take(&self) -> Option<(Vec<Submitted>, Vec<Call>, bool)> {
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

    /// From here on nothing is taken in; gives what nobody has looked at, and the channels of all that has not ended.
    pub(crate) fn stop(&self, why: &Stopped) -> (Vec<Submitted>, Vec<Call>, OpenChannels) {
        let mut mail = lock(&self.mail);
        mail.stopped = Some(why.clone());
        self.stopped.notify_all();
        let open = std::mem::take(&mut mail.open);
        (std::mem::take(&mut mail.submitted), std::mem::take(&mut mail.calls), open)
    }
}
