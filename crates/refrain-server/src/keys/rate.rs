//! What a key may send per minute.
//!
//! A limit of N per minute is a bucket of N that refills evenly: up to N at once, then N per minute. Prompts are counted
//! when they arrive, replies as they are generated. A reply is never cut: it takes the bucket below zero, and further
//! requests wait until it is full enough again.

use super::limited;
use crate::error::ApiError;
use crate::metrics::lock;
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// The limits of a key.
#[derive(Debug, Default)]
pub(super) struct KeyRates {
    pub(super) requests: Option<Limit>,
    pub(super) tokens: Option<Limit>,
}

/// A limit with what is left of it.
#[derive(Debug)]
pub(super) struct Limit {
    per_minute: f64,
    level: Arc<Mutex<Level>>,
}

#[derive(Debug)]
struct Level {
    left: f64,
    at: Instant,
}

impl Limit {
    pub(super) fn new(per_minute: u32) -> Limit {
        let per_minute = f64::from(per_minute);
        Limit { per_minute, level: Arc::new(Mutex::new(Level { left: per_minute, at: Instant::now() })) }
    }

    /// What is left now.
    fn refill(&self, level: &mut Level, now: Instant) -> f64 {
        let seconds = now.saturating_duration_since(level.at).as_secs_f64();
        level.left = (level.left + seconds * self.per_minute / 60.0).min(self.per_minute);
        level.at = level.at.max(now);
        level.left
    }

    /// Takes `n` if that much is left; otherwise the time until it is.
    fn take(&self, n: f64, now: Instant) -> Result<(), Duration> {
        let mut level = lock(&self.level);
        let left = self.refill(&mut level, now);
        if left < n {
            return Err(self.time_for(n - left));
        }
        level.left -= n;
        Ok(())
    }

    /// Takes `n`, also if less is left.
    pub(super) fn charge(&self, n: usize, now: Instant) {
        let mut level = lock(&self.level);
        self.refill(&mut level, now);
        level.left -= n as f64;
    }

    fn time_for(&self, n: f64) -> Duration {
        Duration::try_from_secs_f64(n * 60.0 / self.per_minute).unwrap_or(Duration::MAX)
    }

    fn write(&self, kind: &str, headers: &mut HeaderMap, now: Instant) {
        let left = self.refill(&mut lock(&self.level), now);
        let reset = self.time_for((self.per_minute - left).max(0.0)).as_secs_f64();
        let values = [
            ("limit", format!("{}", self.per_minute)),
            ("remaining", format!("{}", left.max(0.0).floor())),
            ("reset", format!("{reset:.3}s")),
        ];
        for (what, value) in values {
            let name = HeaderName::try_from(format!("x-ratelimit-{what}-{kind}"));
            if let (Ok(name), Ok(value)) = (name, HeaderValue::try_from(value)) {
                headers.insert(name, value);
            }
        }
    }
}

impl KeyRates {
    /// Counts a request, or says when there will be room for it.
    pub(super) fn take(&self, key: &str, n_tokens: usize, now: Instant) -> Result<(), ApiError> {
        if let Some(tokens) = &self.tokens
            && n_tokens as f64 > tokens.per_minute
        {
            let message = format!(
                "the request has {n_tokens} tokens, the key {key} may send {} per minute",
                tokens.per_minute
            );
            let error = ApiError::new(StatusCode::BAD_REQUEST, "request_too_large", message);
            return Err(error.hint("shorten the request, or raise tokens-per-minute in the key file"));
        }
        let refused = |what: &str, limit: &Limit, wait: Duration| {
            let message = format!("the key {key} has used its {} {what} per minute", limit.per_minute);
            limited(message, "wait as long as the header retry-after says", wait)
        };
        if let Some(requests) = &self.requests {
            requests.take(1.0, now).map_err(|wait| refused("requests", requests, wait))?;
        }
        if let Some(tokens) = &self.tokens
            && let Err(wait) = tokens.take(n_tokens as f64, now)
        {
            // The request is not served.
            self.requests.iter().for_each(|requests| lock(&requests.level).left += 1.0);
            return Err(refused("tokens", tokens, wait));
        }
        Ok(())
    }

    /// Continues with what is left of earlier limits.
    pub(super) fn continues(&mut self, before: &KeyRates) {
        let pairs = [(&mut self.requests, &before.requests), (&mut self.tokens, &before.tokens)];
        for (limit, before) in pairs {
            if let (Some(limit), Some(before)) = (limit, before) {
                limit.level = before.level.clone();
            }
        }
    }

    /// Writes OpenAI's headers.
    pub(super) fn write_headers(&self, headers: &mut HeaderMap, now: Instant) {
        for (kind, limit) in [("requests", &self.requests), ("tokens", &self.tokens)] {
            if let Some(limit) = limit {
                limit.write(kind, headers, now);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_refills_evenly_and_never_above_its_limit() {
        let (limit, start) = (Limit::new(60), Instant::now());
        let after = |seconds: u64| start + Duration::from_secs(seconds);
        assert!((0..60).all(|_| limit.take(1.0, start).is_ok()));
        let wait = limit.take(1.0, start).unwrap_err();
        assert!(wait > Duration::ZERO && wait <= Duration::from_secs(1), "{wait:?}");
        assert!(limit.take(10.0, after(11)).is_ok());
        assert!(limit.take(60.0, after(1000)).is_ok() && limit.take(1.0, after(1000)).is_err());
        limit.charge(120, after(2000));
        assert_eq!(limit.take(1.0, after(2000)).unwrap_err().as_secs(), 61, "a debt of 60 and one more");
    }

    #[test]
    fn a_request_that_is_refused_for_its_tokens_is_not_counted() {
        let rates = KeyRates { requests: Some(Limit::new(2)), tokens: Some(Limit::new(100)) };
        let now = Instant::now();
        assert!(rates.take("k", 90, now).is_ok());
        assert_eq!(rates.take("k", 50, now).unwrap_err().status, StatusCode::TOO_MANY_REQUESTS);
        assert!(rates.take("k", 5, now).is_ok());
        let error = rates.take("k", 5, now).unwrap_err();
        assert!(error.message.contains("2 requests per minute") && error.retry_after.is_some(), "{error}");
        assert_eq!(rates.take("k", 101, now).unwrap_err().status, StatusCode::BAD_REQUEST);
        let mut headers = HeaderMap::new();
        rates.write_headers(&mut headers, now);
        assert_eq!(headers["x-ratelimit-limit-requests"], "2");
        assert_eq!(headers["x-ratelimit-remaining-tokens"], "5");
    }
}
