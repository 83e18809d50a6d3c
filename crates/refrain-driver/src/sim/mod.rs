//! A simulated CUDA device with the same interface as the real driver.
//!
//! It implements contexts, streams, events, modules, memory, captures and graphs, returns the driver's codes, and
//! behaves during a capture as `capture-truth.tsv` measured on a real GPU. Kernels run as registered reference
//! functions ([`SimDriver::register`]). It also does what no GPU does: it checks every access against live memory,
//! runs work late (when somebody waits for it, or when the seed decides), runs graphs in random legal orders,
//! reports unordered work on the same bytes, counts live objects, and injects faults from a [`FaultScript`].
//!
//! Invariant: a device address is never a valid pointer in this process; only pinned memory is real host memory.
//! Invariant: after a sticky fault, every call that needs a context returns its code, in every context, for good.

mod calls; // driver calls by name
mod capture; // the capture state machine
mod driver; // the interface
mod edits; // operations on graphs by handle
mod faults; // fault scripts
mod functions; // function attributes and launch limits
mod graphs; // graphs and their legal orders
mod kernels; // reference functions in place of machine code
mod memory; // device and pinned memory
mod modules; // kernel names in module images
mod ops; // a single operation
mod races; // access logs and race checks
mod rng;
mod state; // the state behind the lock
mod streams; // queues of work

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

pub use calls::DriverCall;
pub use faults::{FaultScript, FaultScriptError};
pub use kernels::{KernelResult, SimKernel, Twin};
pub use memory::Fault;

use crate::api::{Api, Census, Code, RawResult, StreamHandle};
use faults::Action;
use ops::WorkFault;
use races::Clock;
use state::SimState;
use streams::StreamStep;

/// When queued work runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SimSchedule {
    /// When somebody waits for it or queries it, and sometimes at random.
    #[default]
    Seeded,
    /// Only when somebody waits for it, queries it, or needs its result: a missing wait always shows.
    Lazy,
    /// Before the call that queues it returns: a missing wait never shows.
    Eager,
}

/// Options of a simulated device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SimOptions {
    /// Seed of schedules, graph orders and corrupted bytes.
    pub seed: u64,
    /// Faults to inject.
    pub faults: FaultScript,
    /// Whether unordered work on the same bytes also loses the context (`LAUNCH_FAILED`), in addition to the
    /// report.
    pub strict: bool,
    /// Device memory in bytes.
    pub memory_bytes: u64,
    /// Pinned host memory in bytes.
    pub host_bytes: u64,
    /// When queued work runs.
    pub schedule: SimSchedule,
    /// Number of devices.
    pub n_devices: u32,
    /// Maximum shared memory per block: 227 KiB on compute capability 9.0, 99 KiB on 8.6, 8.9 and 12.0.
    pub shared_block_bytes: u32,
    /// Whether the device reports that it shares the host's memory.
    pub unified: bool,
}

impl Default for SimOptions {
    fn default() -> SimOptions {
        SimOptions {
            seed: 0,
            faults: FaultScript::default(),
            strict: true,
            memory_bytes: 4 << 30,
            host_bytes: 1 << 30,
            schedule: SimSchedule::Seeded,
            n_devices: 1,
            shared_block_bytes: functions::SHARED_BLOCK_BYTES,
            unified: false,
        }
    }
}

/// Live objects and call counts of a simulated device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SimStats {
    /// Live objects and bytes.
    pub live: Census,
    /// Number of calls of each kind, including failed ones.
    pub calls: Vec<(DriverCall, u64)>,
    /// Bytes copied from the host to the device, including failed copies.
    pub upload_bytes: u64,
    /// Threads inside a call that a fault script makes hang.
    pub n_hung: usize,
}

impl SimStats {
    /// Number of calls of a kind.
    #[must_use]
    pub fn n_calls(&self, call: DriverCall) -> u64 {
        self.calls.iter().find(|(c, _)| *c == call).map_or(0, |(_, n)| *n)
    }

    /// Number of calls of all kinds.
    #[must_use]
    pub fn n_calls_total(&self) -> u64 {
        self.calls.iter().map(|(_, n)| n).sum()
    }
}

struct SimShared {
    state: Mutex<SimState>,
    /// Signals that a hung call was released, a call began to hang, or a host function returned.
    changed: Condvar,
    /// Units of work done, readable while a call holds the state.
    n_steps: AtomicU64,
}

impl Drop for SimShared {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        for (rule, n_calls) in state.faults.unused() {
            tracing::warn!("fault rule `{rule}` never fired; matching calls: {n_calls}");
        }
    }
}

/// A simulated driver. Clones refer to the same device.
#[derive(Clone)]
pub struct SimDriver {
    shared: Arc<SimShared>,
}

/// Driver interface of a simulated device. A separate type, because holding a [`SimDriver`] must not grant the
/// right to free memory that others use.
struct SimApi(SimDriver);

impl std::ops::Deref for SimApi {
    type Target = SimDriver;

    fn deref(&self) -> &SimDriver {
        &self.0
    }
}

impl Default for SimDriver {
    fn default() -> SimDriver {
        SimDriver::new(SimOptions::default())
    }
}

impl std::fmt::Debug for SimDriver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SimDriver").field("live", &self.stats().live).finish_non_exhaustive()
    }
}

impl SimDriver {
    /// Creates a device without objects or registered kernels.
    #[must_use]
    pub fn new(options: SimOptions) -> SimDriver {
        SimDriver {
            shared: Arc::new(SimShared {
                state: Mutex::new(SimState::new(options)),
                changed: Condvar::new(),
                n_steps: AtomicU64::new(0),
            }),
        }
    }

    /// Returns the raw driver interface of this device, for tests of the simulation itself.
    ///
    /// ```compile_fail,E0133
    /// # use refrain_driver::{Memory, api::HostPtr, sim::SimDriver};
    /// fn free_under_its_owner(sim: &SimDriver, memory: &Memory) {
    ///     for (_, _, address) in memory.regions() {
    ///         let _ = sim.api().free_host(HostPtr(address)); // rings and leases would still read there
    ///     }
    /// }
    /// ```
    ///
    /// ```compile_fail,E0599
    /// # use refrain_driver::{api::{Api, HostPtr}, sim::SimDriver};
    /// fn without_unsafe(sim: &SimDriver, address: HostPtr) {
    ///     let _ = sim.free_host(address);
    /// }
    /// ```
    ///
    /// # Safety
    /// As for [`crate::raw_driver`]: the caller uses only handles and addresses returned by this value, and none
    /// after it was freed or destroyed. The device checks handles and device memory itself, but pinned memory is
    /// memory of this process, which others use through [`crate::Memory`], [`crate::Ring`] and [`crate::Staging`].
    #[must_use]
    pub unsafe fn api(&self) -> Arc<dyn Api> {
        self.interface()
    }

    /// The driver interface for [`crate::Device`], which upholds that contract.
    pub(crate) fn interface(&self) -> Arc<dyn Api> {
        Arc::new(SimApi(self.clone()))
    }

    /// Registers the reference function of a kernel, with the sizes of its parameters. Registering a name again
    /// affects only later lookups.
    pub fn register(
        &self,
        name: &str,
        param_sizes: &[usize],
        body: impl Fn(&mut SimKernel<'_>) -> KernelResult + Send + Sync + 'static,
    ) {
        self.register_twin(Twin::new(name, param_sizes, body));
    }

    /// Registers a twin.
    pub fn register_twin(&self, twin: Twin) {
        self.lock().twins.insert(twin.name.clone(), Arc::new(twin));
    }

    /// Adds fault rules; they count calls from now on.
    pub fn inject(&self, faults: FaultScript) {
        self.lock().faults.extend(faults);
    }

    /// The fault rules that have not fired so far, as written.
    #[must_use]
    pub fn unused_faults(&self) -> Vec<String> {
        self.lock().faults.unused().map(|(rule, _)| rule.to_owned()).collect()
    }

    /// Live objects and call counts.
    #[must_use]
    pub fn stats(&self) -> SimStats {
        let state = self.lock();
        let calls =
            DriverCall::ALL.iter().map(|&call| (call, state.n_calls[call as usize])).filter(|(_, n)| *n > 0);
        let (upload_bytes, n_hung) = (state.upload_bytes, state.n_hung);
        SimStats { live: state.census(), calls: calls.collect(), upload_bytes, n_hung }
    }

    /// Reports so far, without removing them; see [`crate::Device::take_reports`].
    #[must_use]
    pub fn reports(&self) -> Vec<String> {
        self.lock().reports.clone()
    }

    /// Releases every call that a fault script makes hang.
    pub fn release_hung(&self) {
        self.lock().n_releases += 1;
        self.shared.changed.notify_all();
    }

    /// Waits until a call hangs; false on timeout.
    #[must_use]
    pub fn wait_until_hung(&self, timeout: Duration) -> bool {
        let state = self.lock();
        let waited = self.shared.changed.wait_timeout_while(state, timeout, |s| s.n_hung == 0);
        !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
    }

    fn lock(&self) -> MutexGuard<'_, SimState> {
        self.shared.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a call and applies scripted faults to it.
    fn enter(&self, call: DriverCall) -> RawResult<MutexGuard<'_, SimState>> {
        self.enter_or(call, |_| ())
    }

    /// Like [`SimDriver::enter`]; `on_fail` runs if a script makes the call fail.
    fn enter_or(
        &self,
        call: DriverCall,
        on_fail: impl FnOnce(&mut SimState),
    ) -> RawResult<MutexGuard<'_, SimState>> {
        let mut state = self.lock();
        state.n_calls[call as usize] += 1;
        state.armed = None;
        let capturing = !state.captures.is_empty();
        let actions = state.faults.fire(call, capturing);
        for action in &actions {
            if let Action::Hang(time) = action {
                state = self.hang(state, *time);
                state.armed = None;
            }
        }
        if !call.survives_sticky() {
            state.check_lost()?;
        }
        for action in actions {
            match action {
                Action::Hang(_) => {}
                Action::Fail(code) => {
                    // Codes that break a capture also do so when scripted.
                    if matches!(code.0, 900 | 902 | 905..=907) {
                        state.break_all_captures();
                    }
                    on_fail(&mut state);
                    return Err(code);
                }
                Action::Sticky(code) if call.runs_later() => state.armed = Some(WorkFault::Sticky(code)),
                Action::Sticky(code) => {
                    state.lose(code, format!("scripted fault: {code} in {}", call.name()));
                    return Err(code);
                }
                Action::WrongByte => state.armed = Some(WorkFault::WrongByte),
                Action::Invalidate => state.break_all_captures(),
            }
        }
        Ok(state)
    }

    fn hang<'a>(
        &'a self,
        mut state: MutexGuard<'a, SimState>,
        time: Option<Duration>,
    ) -> MutexGuard<'a, SimState> {
        let until = time.map(|t| Instant::now() + t);
        let n_releases = state.n_releases;
        state.n_hung += 1;
        self.shared.changed.notify_all();
        while state.n_releases == n_releases {
            let left = until.map_or(Duration::MAX, |u| u.saturating_duration_since(Instant::now()));
            if left.is_zero() {
                break;
            }
            // Without a limit, use a plain wait: the largest duration overflows some clocks.
            state = match until {
                Some(_) => {
                    self.shared.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0
                }
                None => self.shared.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            };
        }
        state.n_hung -= 1;
        state
    }

    /// Runs steps of the streams that `pick` selects, until it selects none or the context is lost. Calls host
    /// functions without holding the lock.
    fn drive<'a>(
        &'a self,
        mut state: MutexGuard<'a, SimState>,
        mut pick: impl FnMut(&mut SimState) -> Option<StreamHandle>,
    ) -> MutexGuard<'a, SimState> {
        while state.lost.is_none()
            && let Some(stream) = pick(&mut state)
        {
            self.shared.n_steps.fetch_add(1, Ordering::Relaxed);
            match state.step(stream) {
                StreamStep::Ran | StreamStep::Idle | StreamStep::Blocked => {}
                StreamStep::Busy => {
                    state = self.shared.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                }
                StreamStep::HostCall(call) => {
                    drop(state);
                    (call.f)(call.user);
                    state = self.lock();
                    state.host_call_done(stream);
                    self.shared.changed.notify_all();
                }
            }
        }
        state
    }

    /// Waits for a queue item; the host has then seen `clock`.
    fn wait_for<'a>(
        &'a self,
        state: MutexGuard<'a, SimState>,
        item: u64,
        clock: &Clock,
    ) -> RawResult<MutexGuard<'a, SimState>> {
        let mut state = self.drive(state, |s| {
            if !s.pending.contains_key(&item) {
                return None;
            }
            // Sometimes other work runs first, as it would on a GPU.
            if s.schedule != SimSchedule::Lazy
                && s.rng.one_in(4)
                && let Some(other) = s.any_runnable()
            {
                return Some(other);
            }
            s.toward(item)
        });
        state.check_lost()?;
        state.host_saw(clock);
        Ok(state)
    }

    /// Waits for everything of the current context.
    fn drain<'a>(&'a self, state: MutexGuard<'a, SimState>) -> RawResult<MutexGuard<'a, SimState>> {
        let ctx = state.ctx()?;
        let mut state = self.drive(state, |s| {
            s.any_runnable().or_else(|| {
                // The remaining work waits for a host function that another thread is calling.
                let left = s.streams.values().find(|stream| stream.ctx == ctx && !stream.queue.is_empty());
                left.and_then(|stream| s.toward(stream.last))
            })
        });
        state.check_lost()?;
        let clocks: Vec<Clock> =
            state.streams.values().filter(|s| s.ctx == ctx).map(|s| s.clock.clone()).collect();
        clocks.iter().for_each(|clock| state.host_saw(clock));
        Ok(state)
    }

    /// Runs a few steps towards an item, for a query; `NOT_READY` if it is not done.
    fn poll<'a>(
        &'a self,
        state: MutexGuard<'a, SimState>,
        item: u64,
        clock: &Clock,
    ) -> RawResult<MutexGuard<'a, SimState>> {
        let mut n_left = 0;
        let mut first = true;
        let mut state = self.drive(state, |s| {
            if std::mem::take(&mut first) {
                n_left = 1 + s.rng.below(64);
            }
            if n_left == 0 || !s.pending.contains_key(&item) {
                return None;
            }
            n_left -= 1;
            // A query does not wait for a host function that another thread is calling.
            s.toward(item).filter(|h| s.streams.get(h).is_some_and(|stream| !stream.busy))
        });
        state.check_lost()?;
        if state.pending.contains_key(&item) {
            return Err(Code::NOT_READY);
        }
        state.host_saw(clock);
        Ok(state)
    }

    /// Called after queueing work, some of which may run before the call returns.
    fn queued(&self, mut state: MutexGuard<'_, SimState>) -> RawResult<()> {
        let schedule = state.schedule;
        let mut n_left = match schedule {
            SimSchedule::Lazy => 0,
            SimSchedule::Eager => usize::MAX,
            SimSchedule::Seeded if state.rng.one_in(3) => 1 + state.rng.below(8),
            SimSchedule::Seeded => 0,
        };
        drop(self.drive(state, |s| {
            n_left = n_left.checked_sub(1)?;
            s.any_runnable()
        }));
        // An error here is reported by the next call, as on a GPU.
        Ok(())
    }
}
