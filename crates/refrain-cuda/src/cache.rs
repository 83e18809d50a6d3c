//! Graphs by key: recorded on first use, verified, replayed; given up for a while when something fails.

use std::collections::HashMap;
use std::fmt::Debug;
use std::hash::Hash;
use std::time::Duration;

use refrain_driver::{Graph, Health, Lease, Method, RecordOptions, Stream};
use refrain_graph::{Ran, Reason};

use crate::error::CudaError;
use crate::reason::{Stage, is_about_capture, reason_of};
use crate::verify::{Check, Verified, VerifyError, verify};
use crate::warm::WarmPlan;

/// Whether steps run as graphs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum GraphMode {
    /// As graphs where possible; a step that runs eagerly says why.
    #[default]
    Auto,
    /// A step that cannot be replayed is an error, and so is one that needs the host in between unless
    /// [`CacheOptions::allow_host_steps`] says otherwise.
    Require,
    /// Never.
    Off,
}

impl std::fmt::Display for GraphMode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            GraphMode::Auto => "auto",
            GraphMode::Require => "require",
            GraphMode::Off => "off",
        })
    }
}

/// How a cache works.
#[derive(Clone, Copy, Debug)]
pub struct CacheOptions {
    /// Whether steps run as graphs.
    pub mode: GraphMode,
    /// Whether steps that need the host between two graphs pass under [`GraphMode::Require`]. Off, so that a step that
    /// is required to be one launch cannot quietly become several.
    pub allow_host_steps: bool,
    /// How graphs are recorded first.
    pub method: Method,
    /// Whether explicit nodes are tried at once where a stream capture fails.
    pub nodes_when_capture_fails: bool,
    /// Graphs kept; the least recently used goes first.
    pub capacity: usize,
    /// Steps a key runs eagerly after its first failure; each further failure doubles it.
    pub first_backoff: u32,
    /// The most steps it waits.
    pub max_backoff: u32,
    /// How long a recording may take.
    pub record_limit: Duration,
    /// How long a health check after a failure may take.
    pub health_limit: Duration,
}

impl Default for CacheOptions {
    fn default() -> CacheOptions {
        CacheOptions {
            mode: GraphMode::Auto,
            allow_host_steps: false,
            method: Method::Stream,
            nodes_when_capture_fails: true,
            capacity: 64,
            first_backoff: 4,
            max_backoff: 4096,
            record_limit: Duration::from_secs(10),
            health_limit: Duration::from_secs(2),
        }
    }
}

/// What a cache has done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheStats {
    /// Recordings that were made and verified.
    pub recorded: u64,
    /// Recordings or verifications that failed.
    pub failed: u64,
    /// Steps replayed.
    pub replayed: u64,
    /// Steps run eagerly.
    pub eager: u64,
    /// Graphs taken out of service after a failed replay.
    pub demoted: u64,
    /// Keys that came back into service after a failure.
    pub promoted: u64,
    /// Graphs dropped to make room.
    pub evicted: u64,
}

/// Where work is sent and whose memory it changes.
#[derive(Debug)]
pub struct Site<'a> {
    /// The stream.
    pub stream: &'a mut Stream,
    /// The lease of the memory that the plans work on.
    pub lease: &'a mut Lease,
}

/// Graphs by key.
#[derive(Debug)]
pub struct GraphCache<K> {
    options: CacheOptions,
    entries: HashMap<K, Entry>,
    stats: CacheStats,
    clock: u64,
    /// How long work that was sent before a step may still take.
    in_flight: Duration,
}

#[derive(Debug)]
struct Entry {
    graph: Option<Verified<Graph>>,
    /// Why there is no graph, once something has failed.
    failure: Option<Reason>,
    steps_left: u32,
    /// How long the next failure makes it wait; 0 before the first.
    backoff: u32,
    /// Replays since it came into service.
    good: u32,
    used: u64,
}

impl<K: Clone + Eq + Hash + Debug> GraphCache<K> {
    /// An empty cache.
    #[must_use]
    pub fn new(options: CacheOptions) -> GraphCache<K> {
        GraphCache {
            options,
            entries: HashMap::new(),
            stats: CacheStats::default(),
            clock: 0,
            in_flight: Duration::ZERO,
        }
    }

    /// Says how long work that was sent before the next steps may still take. When one fails, that is waited for before the
    /// health of the device is asked after.
    pub fn set_in_flight(&mut self, limit: Duration) {
        self.in_flight = limit;
    }

    /// What it has done so far.
    #[must_use]
    pub fn stats(&self) -> CacheStats {
        self.stats
    }

    /// How it works.
    #[must_use]
    pub fn options(&self) -> &CacheOptions {
        &self.options
    }

    /// The graph of a key, if it is in service.
    #[must_use]
    pub fn graph(&self, key: &K) -> Option<&Verified<Graph>> {
        self.entries.get(key)?.graph.as_ref()
    }

    /// Whether the next step of a key will try to make a graph, and so needs something to verify it with.
    #[must_use]
    pub fn wants_check(&self, key: &K) -> bool {
        let idle = |e: &Entry| e.graph.is_none() && e.steps_left == 0;
        self.options.mode != GraphMode::Off && self.entries.get(key).is_none_or(idle)
    }

    /// Drops what is known of a key, its graph included.
    pub fn forget(&mut self, key: &K) {
        self.entries.remove(key);
    }

    /// Drops everything: the memory that the graphs work on is going away.
    pub fn clear(&mut self) {
        self.entries.clear();
    }

    /// Records and verifies the graph of a key if it has none, so that no step has to.
    ///
    /// `Ok(Some(reason))` when it did not work and steps will run eagerly; an error under [`GraphMode::Require`], and
    /// when the context is lost. `check` is asked for only when a graph is to be verified.
    pub fn prepare(
        &mut self,
        key: &K,
        site: &mut Site<'_>,
        warm: &WarmPlan,
        check: impl FnOnce() -> Result<Check, CudaError>,
    ) -> Result<Option<Reason>, CudaError> {
        let not_replayed = self.ready(key, site, warm, check, false)?;
        match not_replayed {
            Some(reason) if self.options.mode == GraphMode::Require => {
                Err(CudaError::Required { step: warm.name().to_owned(), reason })
            }
            other => Ok(other),
        }
    }

    /// Runs a step: as a replay if the key has a verified graph or one can be made now, else eagerly.
    pub fn step(
        &mut self,
        key: &K,
        site: &mut Site<'_>,
        warm: &WarmPlan,
        check: impl FnOnce() -> Result<Check, CudaError>,
    ) -> Result<Ran, CudaError> {
        let reason = match self.ready(key, site, warm, check, true)? {
            None => match self.replay(key, site, warm)? {
                None => return Ok(Ran::REPLAYED),
                Some(reason) => reason,
            },
            Some(reason) => reason,
        };
        if self.options.mode == GraphMode::Require {
            return Err(CudaError::Required { step: warm.name().to_owned(), reason });
        }
        let ran = site.stream.run(site.lease, true, |q| warm.enqueue(q)).map(|_| ());
        ran.map_err(CudaError::driver(warm.name()))?;
        self.stats.eager += 1;
        Ok(Ran::Eager(reason))
    }

    /// Brings a key's graph into service; `Some` says why it is not. A step counts down a back-off.
    fn ready(
        &mut self,
        key: &K,
        site: &mut Site<'_>,
        warm: &WarmPlan,
        check: impl FnOnce() -> Result<Check, CudaError>,
        is_step: bool,
    ) -> Result<Option<Reason>, CudaError> {
        if self.options.mode == GraphMode::Off {
            return Ok(Some(Reason::SwitchedOff));
        }
        let entry = self.entry(key);
        if entry.graph.is_some() {
            return Ok(None);
        }
        if entry.steps_left > 0 {
            entry.steps_left -= u32::from(is_step);
            let after = Box::new(entry.failure.clone().unwrap_or(Reason::NotReady { what: "the graph" }));
            return Ok(Some(Reason::BackingOff { steps_left: entry.steps_left, after }));
        }
        let check = check()?;
        match self.make(site, warm, &check) {
            Ok(graph) => {
                let entry = self.entry(key);
                let again = entry.failure.take().is_some();
                entry.good = 0;
                let info = graph.info();
                let (nodes, took, method) = (info.nodes.len(), info.record_time, info.method);
                tracing::debug!(
                    "{}: {nodes} nodes by {method} in {took:?}, verified in {:?}",
                    warm.name(),
                    graph.report().took
                );
                entry.graph = Some(graph);
                self.stats.recorded += 1;
                self.stats.promoted += u64::from(again);
                Ok(None)
            }
            Err(reason) => {
                self.stats.failed += 1;
                self.give_up(key, site, warm, reason).map(Some)
            }
        }
    }

    /// Records and verifies. A failed attempt leaves nothing behind: the recording ends itself, and verification puts
    /// back what it touched.
    fn make(&self, site: &mut Site<'_>, warm: &WarmPlan, check: &Check) -> Result<Verified<Graph>, Reason> {
        let first = self.options.method;
        match self.make_by(first, site, warm, check) {
            Err(reason)
                if first == Method::Stream
                    && self.options.nodes_when_capture_fails
                    && is_about_capture(&reason) =>
            {
                // One warning for each failure: here when the other method helps, else when the key is given up.
                match self.make_by(Method::Nodes, site, warm, check) {
                    Ok(graph) => {
                        tracing::warn!("{}: {reason}; recorded by {} instead", warm.name(), Method::Nodes);
                        Ok(graph)
                    }
                    // The capture's failure is the one to report: it is what has to be repaired.
                    Err(second) => {
                        let graver =
                            matches!(second, Reason::ContextLost { .. } | Reason::VerifyMismatch { .. });
                        Err(if graver { second } else { reason })
                    }
                }
            }
            other => other,
        }
    }

    fn make_by(
        &self,
        method: Method,
        site: &mut Site<'_>,
        warm: &WarmPlan,
        check: &Check,
    ) -> Result<Verified<Graph>, Reason> {
        let options = RecordOptions { limit: self.options.record_limit, ..RecordOptions::named(warm.name()) };
        // While something records, the driver does not know what is sent last; this does.
        let mut last = None;
        let recorded = site.stream.record(warm.space().memory(), method, &options, |q| {
            warm.work().iter().try_for_each(|work| {
                last = Some(work);
                work.enqueue(q)
            })
        });
        let graph = recorded.map_err(|e| {
            let mut reason = reason_of(&e, Stage::Record);
            if let (Reason::CaptureFailed { code, last_launch }, Some(last)) = (&mut reason, last)
                && *code != 0
            {
                *last_launch = last.name();
            }
            reason
        })?;
        verify(graph, site.stream, site.lease, warm, check).map_err(|e: VerifyError| {
            tracing::debug!("{}: {e}", warm.name());
            e.reason()
        })
    }

    /// `None` when it was sent.
    fn replay(&mut self, key: &K, site: &mut Site<'_>, warm: &WarmPlan) -> Result<Option<Reason>, CudaError> {
        let entry = self.entry(key);
        let Some(graph) = &entry.graph else {
            return Ok(Some(Reason::NotReady { what: "the graph" }));
        };
        match graph.replay(site.lease, site.stream) {
            Ok(()) => {
                entry.good = entry.good.saturating_add(1);
                if entry.good >= entry.backoff {
                    entry.backoff = 0;
                }
                self.stats.replayed += 1;
                Ok(None)
            }
            Err(error) if error.is_final() => {
                Err(CudaError::Driver { step: warm.name().to_owned(), source: error })
            }
            Err(error) => {
                self.stats.demoted += 1;
                let reason = reason_of(&error, Stage::Replay);
                self.give_up(key, site, warm, reason).map(Some)
            }
        }
    }

    /// Takes a graph that came out wrong out of service for a while; gives the reason back.
    pub(crate) fn demote(
        &mut self,
        key: &K,
        site: &mut Site<'_>,
        warm: &WarmPlan,
        reason: Reason,
    ) -> Result<Reason, CudaError> {
        self.stats.demoted += 1;
        self.give_up(key, site, warm, reason)
    }

    /// Takes a key out of service for a while, after asking whether the device is still good.
    fn give_up(
        &mut self,
        key: &K,
        site: &mut Site<'_>,
        warm: &WarmPlan,
        reason: Reason,
    ) -> Result<Reason, CudaError> {
        let options = self.options;
        let entry = self.entry(key);
        entry.graph = None;
        entry.backoff = match entry.backoff {
            0 => options.first_backoff.max(1),
            before => before.saturating_mul(2).min(options.max_backoff.max(1)),
        };
        entry.steps_left = entry.backoff;
        entry.failure = Some(reason.clone());
        let (n, s) = (entry.steps_left, if entry.steps_left == 1 { "" } else { "s" });
        tracing::warn!("{}: {reason}; eager for {n} step{s}", warm.name());
        let failed = |source| CudaError::Driver { step: warm.name().to_owned(), source };
        if !self.in_flight.is_zero()
            && let Err(error) = site.stream.wait(self.in_flight)
        {
            tracing::debug!("{}: waiting for the steps before: {error}", warm.name());
        }
        let health = site.stream.health(options.health_limit).map_err(failed)?;
        if let Health::ContextLost(lost) = health {
            return Err(failed(refrain_driver::DriverError::ContextLost(lost)));
        }
        if health != Health::Healthy {
            tracing::warn!("{}: {health:?}; a new stream takes its place", warm.name());
            let ctx = site.stream.context().clone();
            *site.stream = ctx.stream().map_err(failed)?;
        }
        Ok(reason)
    }

    /// The entry of a key, most recently used from now on. A new one may push the oldest out.
    fn entry(&mut self, key: &K) -> &mut Entry {
        self.clock += 1;
        if !self.entries.contains_key(key) && self.entries.len() >= self.options.capacity.max(1) {
            let oldest = self.entries.iter().min_by_key(|(_, e)| e.used).map(|(k, _)| k.clone());
            if let Some(gone) = oldest.and_then(|k| self.entries.remove(&k)) {
                self.stats.evicted += u64::from(gone.graph.is_some());
            }
        }
        let used = self.clock;
        let fresh = || Entry { graph: None, failure: None, steps_left: 0, backoff: 0, good: 0, used };
        let entry = self.entries.entry(key.clone()).or_insert_with(fresh);
        entry.used = used;
        entry
    }
}
