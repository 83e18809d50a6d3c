//! Measurements of the server: counters, histograms and recent samples, and their Prometheus form.

mod histogram;
mod prometheus;

use crate::text::Finish;
pub(crate) use histogram::{Histogram, RecentSamples};
pub(crate) use prometheus::render;
use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The generation rate is that of this many last seconds.
const RATE_WINDOW: Duration = Duration::from_secs(5);

/// What the server counts about itself.
pub(crate) struct Metrics {
    started: Instant,
    /// Generation requests that are being served.
    pub(crate) n_open: AtomicUsize,
    /// Of those, how many have not received their first token.
    pub(crate) n_waiting: AtomicUsize,
    pub(crate) n_prompt_tokens: AtomicU64,
    pub(crate) n_generated_tokens: AtomicU64,
    pub(crate) first_token: Histogram,
    pub(crate) inter_token: Histogram,
    pub(crate) duration: Histogram,
    pub(crate) recent_first: RecentSamples,
    pub(crate) recent_inter: RecentSamples,
    /// Responses by endpoint and status.
    responses: Mutex<BTreeMap<(&'static str, u16), u64>>,
    /// Ended choices by reason.
    finished: Mutex<BTreeMap<&'static str, u64>>,
    /// Milliseconds after the start when a worker last made progress, or when the server last had nothing to do.
    progress_ms: AtomicU64,
    rate: Mutex<VecDeque<(Instant, u64)>>,
}

impl Metrics {
    pub(crate) fn new() -> Metrics {
        let short = &[0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 1.0, 2.5];
        let long = &[0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0];
        Metrics {
            started: Instant::now(),
            n_open: AtomicUsize::new(0),
            n_waiting: AtomicUsize::new(0),
            n_prompt_tokens: AtomicU64::new(0),
            n_generated_tokens: AtomicU64::new(0),
            first_token: Histogram::new(long),
            inter_token: Histogram::new(short),
            duration: Histogram::new(long),
            recent_first: RecentSamples::new(),
            recent_inter: RecentSamples::new(),
            responses: Mutex::default(),
            finished: Mutex::default(),
            progress_ms: AtomicU64::new(0),
            rate: Mutex::default(),
        }
    }

    pub(crate) fn uptime(&self) -> Duration {
        self.started.elapsed()
    }

    /// A worker has delivered something.
    pub(crate) fn progress(&self, now: Instant) {
        let ms = u64::try_from(now.saturating_duration_since(self.started).as_millis()).unwrap_or(u64::MAX);
        self.progress_ms.fetch_max(ms, Ordering::Relaxed);
    }

    /// How long open requests have waited for any progress; zero while none is open.
    pub(crate) fn stalled(&self) -> Duration {
        if self.n_open.load(Ordering::Relaxed) == 0 {
            return Duration::ZERO;
        }
        self.uptime().saturating_sub(Duration::from_millis(self.progress_ms.load(Ordering::Relaxed)))
    }

    pub(crate) fn responded(&self, endpoint: &'static str, status: u16) {
        *lock(&self.responses).entry((endpoint, status)).or_default() += 1;
    }

    pub(crate) fn finished(&self, finish: &Finish) {
        let reason = match finish {
            Finish::EndToken | Finish::StopText(_) | Finish::StopToken(_) => "stop",
            Finish::MaxTokens | Finish::ContextFull => "length",
            Finish::ToolCalls => "tool_calls",
        };
        self.ended(reason);
    }

    pub(crate) fn ended(&self, reason: &'static str) {
        *lock(&self.finished).entry(reason).or_default() += 1;
    }

    pub(crate) fn responses(&self) -> BTreeMap<(&'static str, u16), u64> {
        lock(&self.responses).clone()
    }

    pub(crate) fn finish_reasons(&self) -> BTreeMap<&'static str, u64> {
        lock(&self.finished).clone()
    }

    /// Notes how many tokens there are now; called once a second.
    pub(crate) fn sample_rate(&self, now: Instant) {
        let mut samples = lock(&self.rate);
        samples.push_back((now, self.n_generated_tokens.load(Ordering::Relaxed)));
        while samples.len() > 2 && samples.get(1).is_some_and(|(at, _)| *at + RATE_WINDOW <= now) {
            samples.pop_front();
        }
    }

    /// Tokens per second now.
    pub(crate) fn tokens_per_second(&self) -> f64 {
        let samples = lock(&self.rate);
        let (Some(first), Some(last)) = (samples.front(), samples.back()) else { return 0.0 };
        let seconds = last.0.saturating_duration_since(first.0).as_secs_f64();
        if seconds > 0.0 { last.1.saturating_sub(first.1) as f64 / seconds } else { 0.0 }
    }
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Each critical section leaves the value whole, also if it panics.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_covers_only_the_last_seconds() {
        let metrics = Metrics::new();
        let start = Instant::now();
        for second in 0..20u64 {
            let rate = if second < 10 { 100 } else { 10 };
            metrics.n_generated_tokens.fetch_add(rate, Ordering::Relaxed);
            metrics.sample_rate(start + Duration::from_secs(second));
        }
        assert_eq!(metrics.tokens_per_second(), 10.0);
    }

    #[test]
    fn requests_stall_only_while_one_is_open() {
        let metrics = Metrics { started: Instant::now() - Duration::from_secs(90), ..Metrics::new() };
        assert_eq!(metrics.stalled(), Duration::ZERO);
        metrics.n_open.store(1, Ordering::Relaxed);
        assert!(metrics.stalled() >= Duration::from_secs(90));
        metrics.progress(Instant::now());
        assert!(metrics.stalled() < Duration::from_secs(60));
    }
}
