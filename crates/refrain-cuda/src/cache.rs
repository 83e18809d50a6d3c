//! Graphs by key: recorded on first use, verified, then replayed; out of service for a while when something
//! fails.

use std::collections::HashMap;
use std::fmt::Debug;
use std::hash::Hash;
use std::time::Duration;

use refrain_driver::{Graph, Health, Lease, Method, Queue, RecordOptions, Stream};
use refrain_graph::{Ran, Reason};

use crate::error::CudaError;
use crate::reason::{Stage, is_about_capture, reason_of};
use crate::verify::{Verified, VerifyError, VerifySetup, verify};
use crate::warm::WarmPlan;

/// Whether steps run as graphs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum GraphMode {
    /// Replay where possible; a step that runs eagerly reports why.
    #[default]
    Auto,
    /// A step that cannot be replayed is an error. So is one that needs the host in between, unless
    /// [`CacheOptions::allow_host_steps`] is set.
    Require,
    /// Never record graphs.
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

/// Options of a graph cache.
#[derive(Clone, Copy, Debug)]
pub struct CacheOptions {
    /// Whether steps run as graphs.
    pub mode: GraphMode,
    /// Whether [`GraphMode::Require`] accepts steps that need the host between two graphs. Off by default, so
    /// that a step required to be one launch cannot quietly become several.
    pub allow_host_steps: bool,
    /// Recording method to try first.
    pub method: Method,
    /// Whether to retry with explicit nodes at once when a stream capture fails.
    pub nodes_when_capture_fails: bool,
    /// Maximum number of graphs; the least recently used is evicted first.
    pub capacity: usize,
    /// Steps a key runs eagerly after its first failure; each further failure doubles it.
    pub first_backoff: u32,
    /// Upper limit of that number.
    pub max_backoff: u32,
    /// Time limit of a recording.
    pub record_limit: Duration,
    /// Time limit of a health check after a failure.
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

/// Counters of a graph cache.
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
    /// Keys that returned to service after a failure.
    pub promoted: u64,
    /// Graphs evicted at capacity.
    pub evicted: u64,
}

/// The stream to launch on and the memory that the launches change.
#[derive(Debug)]
pub struct Site<'a> {
    /// The stream.
    pub stream: &'a mut Stream,
    /// The lease of the memory that the plans work on.
    pub lease: &'a mut Lease,
}

/// Verified graphs by key.
#[derive(Debug)]
pub struct GraphCache<K> {
    options: CacheOptions,
    entries: HashMap<K, GraphCacheEntry>,
    stats: CacheStats,
    clock: u64,
    /// Time limit for work launched before a step.
    in_flight: Duration,
}

#[derive(Debug)]
struct GraphCacheEntry {
    graph: Option<Verified<Graph>>,
    /// Why there is no graph, once something has failed.
    failure: Option<Reason>,
    steps_left: u32,
    /// Length of the next backoff; 0 before the first failure.
    backoff: u32,
    /// Replays since it entered service.
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

    /// Sets the time limit for work launched before the next steps. When a step fails, that work is waited
    /// for before the device's health is checked.
    pub fn set_in_flight(&mut self, limit: Duration) {
        self.in_flight = limit;
    }

    /// Counters so far.
    #[must_use]
    pub fn stats(&self) -> CacheStats {
        self.stats
    }

    /// The cache's options.
    #[must_use]
    pub fn options(&self) -> &CacheOptions {
        &self.options
    }

    /// The graph of a key, if it is in service.
    #[must_use]
    pub fn graph(&self, key: &K) -> Option<&Verified<Graph>> {
        self.entries.get(key)?.graph.as_ref()
    }

    /// Whether the next step of a key will try to record a graph, and so needs a [`VerifySetup`].
    #[must_use]
    pub fn wants_check(&self, key: &K) -> bool {
        let idle = |e: &GraphCacheEntry| e.graph.is_none() && e.steps_left == 0;
        self.options.mode != GraphMode::Off && self.entries.get(key).is_none_or(idle)
    }

    /// Removes a key with its graph.
    pub fn forget(&mut self, key: &K) {
        self.entries.remove(key);
    }

    /// Removes all keys: the memory that the graphs work on is going away.
    pub fn clear(&mut self) {
        self.entries.clear();
    }

    /// Records and verifies the graph of a key if it has none, so that no step has to.
    ///
    /// Returns `Ok(Some(reason))` when that fails and steps will run eagerly. It is an error under
    /// [`GraphMode::Require`], and whenever the context is lost. `check` is called only when a graph is to be
    /// verified.
    pub fn prepare(
        &mut self,
        key: &K,
        site: &mut Site<'_>,
        warm: &WarmPlan,
        check: impl FnOnce() -> Result<VerifySetup, CudaError>,
    ) -> Result<Option<Reason>, CudaError> {
        let not_replayed = self.ready(key, site, warm, check, false)?;
        match not_replayed {
            Some(reason) if self.options.mode == GraphMode::Require => {
                Err(CudaError::Required { step: warm.name().to_owned(), reason })
            }
            other => Ok(other),
        }
    }

    /// Runs a step: as a replay if the key has a verified graph or one can be recorded, otherwise eagerly.
    pub fn step(
        &mut self,
        key: &K,
        site: &mut Site<'_>,
        warm: &WarmPlan,
        check: impl FnOnce() -> Result<VerifySetup, CudaError>,
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

    /// Brings the graph of a loop into service; `Some` is the reason why it is not. Its steps then run one by one.
    pub(crate) fn ready_loop(
        &mut self,
        key: &K,
        site: &mut Site<'_>,
        warm: &WarmPlan,
        check: impl FnOnce() -> Result<VerifySetup, CudaError>,
    ) -> Result<Option<Reason>, CudaError> {
        self.ready(key, site, warm, check, true)
    }

    /// Launches the graph of a loop, which must be in service; `Some` is the reason why it was not launched.
    pub(crate) fn launch_loop(
        &mut self,
        key: &K,
        site: &mut Site<'_>,
        warm: &WarmPlan,
    ) -> Result<Option<Reason>, CudaError> {
        self.replay(key, site, warm)
    }

    /// Brings a key's graph into service; `Some` is the reason why it is not. Only a step counts down the
    /// backoff.
    fn ready(
        &mut self,
        key: &K,
        site: &mut Site<'_>,
        warm: &WarmPlan,
        check: impl FnOnce() -> Result<VerifySetup, CudaError>,
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
                self.suspend(key, site, warm, reason).map(Some)
            }
        }
    }

    /// Records and verifies. A failed attempt leaves no trace: the recording ends itself, and verification
    /// restores what it changed.
    fn make(
        &self,
        site: &mut Site<'_>,
        warm: &WarmPlan,
        check: &VerifySetup,
    ) -> Result<Verified<Graph>, Reason> {
        let first = self.options.method;
        match self.make_by(first, site, warm, check) {
            Err(reason)
                if first == Method::Stream
                    && self.options.nodes_when_capture_fails
                    && is_about_capture(&reason) =>
            {
                // One warning per failure: here if the second method works, otherwise in `suspend`.
                match self.make_by(Method::Nodes, site, warm, check) {
                    Ok(graph) => {
                        tracing::warn!("{}: {reason}; recorded by {} instead", warm.name(), Method::Nodes);
                        Ok(graph)
                    }
                    // Report the failure of the capture: that is the one to fix.
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
        check: &VerifySetup,
    ) -> Result<Verified<Graph>, Reason> {
        let options = RecordOptions { limit: self.options.record_limit, ..RecordOptions::named(warm.name()) };
        // During a recording the driver does not track the last launch, so track it here.
        let mut last = None;
        let enqueue = |q: &mut dyn Queue| {
            warm.work().iter().try_for_each(|work| {
                last = Some(work);
                work.enqueue(q)
            })
        };
        let memory = warm.space().memory();
        let recorded = match warm.loop_end() {
            None => site.stream.record(memory, method, &options, enqueue),
            Some(_) => site.stream.record_loop(memory, method, &options, enqueue),
        };
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

    /// Replays the graph; `None` means that it was launched.
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
                self.suspend(key, site, warm, reason).map(Some)
            }
        }
    }

    /// Takes a graph whose results were wrong out of service for a while; returns the reason.
    pub(crate) fn demote(
        &mut self,
        key: &K,
        site: &mut Site<'_>,
        warm: &WarmPlan,
        reason: Reason,
    ) -> Result<Reason, CudaError> {
        self.stats.demoted += 1;
        self.suspend(key, site, warm, reason)
    }

    /// Takes a key out of service for a while and checks the device's health.
    fn suspend(
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
            tracing::debug!("{}: waiting for earlier steps: {error}", warm.name());
        }
        let health = site.stream.health(options.health_limit).map_err(failed)?;
        if let Health::ContextLost(lost) = health {
            return Err(failed(refrain_driver::DriverError::ContextLost(lost)));
        }
        if health != Health::Healthy {
            tracing::warn!("{}: {health:?}; replaced the stream", warm.name());
            let ctx = site.stream.context().clone();
            *site.stream = ctx.stream().map_err(failed)?;
        }
        Ok(reason)
    }

    /// The entry of a key, marked as most recently used. A new entry may evict the least recently used one.
    fn entry(&mut self, key: &K) -> &mut GraphCacheEntry {
        self.clock += 1;
        if !self.entries.contains_key(key) && self.entries.len() >= self.options.capacity.max(1) {
            let oldest = self.entries.iter().min_by_key(|(_, e)| e.used).map(|(k, _)| k.clone());
            if let Some(gone) = oldest.and_then(|k| self.entries.remove(&k)) {
                self.stats.evicted += u64::from(gone.graph.is_some());
            }
        }
        let used = self.clock;
        let fresh =
            || GraphCacheEntry { graph: None, failure: None, steps_left: 0, backoff: 0, good: 0, used };
        let entry = self.entries.entry(key.clone()).or_insert_with(fresh);
        entry.used = used;
        entry
    }
}
