//! The engine's thread: what it is sent, and in which order it serves it.

use crate::core::{Chosen, Core};
use crate::error::{EngineError, Stopped};
use crate::follow::Ahead;
use crate::request::{FinishReason, HeldSequence, Request, RequestId, TokenEvent, lock};
use crate::sampling::SamplingRow;
use crate::stream::{Channel, Demand};
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Something to do between two steps.
pub(crate) type Call = Box<dyn FnOnce(&mut Core) + Send>;

/// What handles and the engine's thread share.
pub(crate) struct Mailbox {
    mail: Mutex<Mail>,
    came: Condvar,
    stopped: Condvar,
    /// Whether there is anything new. Looked at after every step, so without the lock.
    is_new: AtomicBool,
}

/// Channels of requests that have not ended.
type OpenChannels = Vec<(RequestId, Arc<Channel>)>;

#[derive(Default)]
struct Mail {
    jobs: Vec<Job>,
    calls: Vec<Call>,
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

    /// Adds a request if fewer than `most` are open.
    pub(crate) fn submit(
        &self,
        most: usize,
        job: impl FnOnce() -> Result<Job, EngineError>,
    ) -> Result<(), EngineError> {
        self.send(|mail| {
            let n_requests = mail.open.len();
            if n_requests >= most {
                return Err(EngineError::QueueFull { n_requests, most });
            }
            let job = job()?;
            mail.open.push((job.id, job.channel.clone()));
            mail.jobs.push(job);
            Ok(())
        })
    }

    pub(crate) fn call(&self, call: Call) -> Result<(), EngineError> {
        self.send(|mail| {
            mail.calls.push(call);
            Ok(())
        })
    }

    fn send(&self, add: impl FnOnce(&mut Mail) -> Result<(), EngineError>) -> Result<(), EngineError> {
        let mut mail = lock(&self.mail);
        mail.check()?;
        add(&mut mail)?;
        self.notify();
        Ok(())
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

    fn is_new(&self) -> bool {
        self.is_new.load(Ordering::Acquire)
    }

    /// Waits until there is something new.
    fn wait(&self) {
        let mut mail = lock(&self.mail);
        while !self.is_new() {
            mail = self.came.wait(mail).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// All that is new, and whether the engine is to end.
    fn take(&self) -> (Vec<Job>, Vec<Call>, bool) {
        let mut mail = lock(&self.mail);
        self.is_new.store(false, Ordering::Release);
        (std::mem::take(&mut mail.jobs), std::mem::take(&mut mail.calls), mail.is_closed)
    }

    fn ended(&self, id: RequestId) {
        lock(&self.mail).open.retain(|(open, _)| *open != id);
    }

    /// From here on nothing is taken in; gives what nobody has looked at, and the channels of all that has not ended.
    fn stop(&self, why: &Stopped) -> (Vec<Job>, Vec<Call>, OpenChannels) {
        let mut mail = lock(&self.mail);
        mail.stopped = Some(why.clone());
        self.stopped.notify_all();
        let open = std::mem::take(&mut mail.open);
        (std::mem::take(&mut mail.jobs), std::mem::take(&mut mail.calls), open)
    }
}

/// The life of the engine's thread.
pub(crate) fn serve(mut core: Core, mailbox: &Mailbox) {
    let mut jobs = Vec::new();
    let served = catch_unwind(AssertUnwindSafe(|| serve_all(&mut core, mailbox, &mut jobs)));
    let why = served.unwrap_or_else(|panic| Stopped::Panicked { message: message_of(&*panic) });
    let (unseen, calls, mut open) = mailbox.stop(&why);
    for job in jobs.drain(..).chain(unseen) {
        open.retain(|(id, _)| *id != job.id);
        job.fail(why.clone().into());
    }
    // A panic in the middle of a job's end leaves a channel whose job is gone: its consumer must hear of it too.
    for (_, channel) in open {
        channel.push(Err(why.clone().into()));
    }
    // Callers hear of it when what would have answered them is dropped.
    drop(calls);
    // What is left of a device after a panic may throw once more, and nobody is left to hear it.
    let _ = catch_unwind(AssertUnwindSafe(|| drop(core)));
}

fn message_of(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".into())
}

/// Serves until nobody is left, or until the device is lost.
fn serve_all(core: &mut Core, mailbox: &Mailbox, jobs: &mut Vec<Job>) -> Stopped {
    let mut current = None;
    loop {
        let (new, calls, is_closed) = mailbox.take();
        jobs.extend(new);
        if is_closed {
            return Stopped::Closed;
        }
        calls.into_iter().for_each(|call| call(core));
        let cancelled = jobs.extract_if(.., |job| job.channel.demand() == Demand::Cancel);
        for job in cancelled {
            job.end(core, mailbox, FinishReason::Cancelled);
        }
        // The one that has the device keeps it while its consumer wants more: a step of another request would throw away
        // what was sent ahead. Then the oldest goes first.
        let goes_on = |job: &Job| job.channel.demand() == Demand::GoOn;
        let same = jobs.iter().position(|job| Some(job.id) == current && goes_on(job));
        let Some(idx) = same.or_else(|| jobs.iter().position(goes_on)) else {
            mailbox.wait();
            continue;
        };
        current = Some(jobs[idx].id);
        match run(core, mailbox, &mut jobs[idx]) {
            Ok(None) => {}
            Ok(Some(finish)) => jobs.remove(idx).end(core, mailbox, finish),
            Err(error) => {
                let (job, stops) = (jobs.remove(idx), error.stops());
                mailbox.ended(job.id);
                job.fail(error);
                if let Some(stopped) = stops {
                    return stopped;
                }
            }
        }
    }
}

/// Steps of one request, until it ends, has enough for now, or something new has come.
fn run(core: &mut Core, mailbox: &Mailbox, job: &mut Job) -> Result<Option<FinishReason>, EngineError> {
    loop {
        let (demand, finish) = job.step(core)?;
        if finish.is_some() {
            return Ok(finish);
        }
        if demand != Demand::GoOn || mailbox.is_new() {
            return Ok(None);
        }
    }
}

/// A request that is being served or waits for it.
pub(crate) struct Job {
    id: RequestId,
    sequence: HeldSequence,
    request: Request,
    row: SamplingRow,
    /// How the first tokens are chosen, where no end token may be among them.
    endless: Option<SamplingRow>,
    channel: Arc<Channel>,
    has_begun: bool,
    /// Time that the prompt's steps took.
    prefill: Duration,
    /// The last token chosen, which is not evaluated yet.
    last: Option<u32>,
    n_chosen: usize,
}

impl Job {
    pub(crate) fn new(
        id: RequestId,
        sequence: HeldSequence,
        request: Request,
        (row, endless): (SamplingRow, Option<SamplingRow>),
        channel: Arc<Channel>,
    ) -> Job {
        Job {
            id,
            sequence,
            request,
            row,
            endless,
            channel,
            has_begun: false,
            prefill: Duration::ZERO,
            last: None,
            n_chosen: 0,
        }
    }

    /// One step; what the consumer wants after it, and whether the request has ended.
    fn step(&mut self, core: &mut Core) -> Result<(Demand, Option<FinishReason>), EngineError> {
        match self.last {
            _ if self.request.max_tokens == 0 => Ok((Demand::GoOn, Some(FinishReason::MaxTokens))),
            None => self.prompt_step(core),
            Some(last) => self.decode_step(core, last),
        }
    }

    fn prompt_step(&mut self, core: &mut Core) -> Result<(Demand, Option<FinishReason>), EngineError> {
        let began = Instant::now();
        let (sequence, prompt) = (self.sequence.state(), &self.request.prompt);
        if !self.has_begun {
            core.begin_prompt(sequence, prompt)?;
            self.has_begun = true;
        }
        let row = self.endless.as_mut().unwrap_or(&mut self.row);
        let chosen = core.prompt_piece(sequence, prompt, row)?;
        self.prefill += began.elapsed();
        Ok(match chosen {
            Some(chosen) => self.chosen(chosen, self.prefill),
            None => {
                let (n_done, n_tokens) = (sequence.tokens.len(), prompt.len());
                (self.channel.push(Ok(TokenEvent::Prompt { n_done, n_tokens })), None)
            }
        })
    }

    fn decode_step(
        &mut self,
        core: &mut Core,
        last: u32,
    ) -> Result<(Demand, Option<FinishReason>), EngineError> {
        let min_left = self.request.min_tokens.saturating_sub(self.n_chosen);
        let left = self.request.max_tokens - self.n_chosen;
        let (row, n_tokens) = match &mut self.endless {
            // Other rules begin where end tokens may be chosen: nothing is sent ahead beyond that.
            Some(endless) if min_left > 0 => (endless, min_left),
            _ => (&mut self.row, left),
        };
        let ahead = Ahead { n_tokens, end: &self.request.end };
        let (chosen, took) = core.follow_timed(self.sequence.state(), last, row, &ahead)?;
        Ok(self.chosen(chosen, took))
    }

    fn chosen(&mut self, chosen: Chosen, took: Duration) -> (Demand, Option<FinishReason>) {
        self.last = Some(chosen.token);
        self.n_chosen += 1;
        let sequence = self.sequence.state();
        let finish = if self.request.end.contains(&chosen.token) {
            Some(FinishReason::EndToken)
        } else if self.n_chosen >= self.request.max_tokens {
            Some(FinishReason::MaxTokens)
        } else if sequence.tokens.len() >= sequence.context {
            // The token in hand needs a position before the next can be chosen.
            Some(FinishReason::ContextFull)
        } else {
            None
        };
        let event = TokenEvent::Token { token: chosen.token, logprob: chosen.logprob, took };
        (self.channel.push(Ok(event)), finish)
    }

    /// Ends the request. Whoever hears of it finds no step of it under way, a complete ledger, and the sequence free.
    fn end(self, core: &mut Core, mailbox: &Mailbox, finish: FinishReason) {
        let Job { id, mut sequence, request, channel, .. } = self;
        core.settle_of(sequence.state());
        drop((sequence, request));
        mailbox.ended(id);
        channel.push(Ok(TokenEvent::End(finish)));
    }

    fn fail(self, error: EngineError) {
        let Job { sequence, request, channel, .. } = self;
        drop((sequence, request));
        channel.push(Err(error));
    }
}
