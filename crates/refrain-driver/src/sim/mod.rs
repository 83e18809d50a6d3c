//! A simulated CUDA device behind the same interface as the real driver.
//!
//! It keeps contexts, streams, events, modules, memory, captures and graphs, answers with the driver's codes, and
//! behaves during a capture as `capture-truth.tsv` measured on a real card. Kernels run as registered reference
//! functions ([`SimDriver::register`]). What it adds over a card: every access is checked against live memory, work
//! really is late (it runs when somebody waits or when the seed says so), graphs run in random legal orders, unordered
//! work on the same bytes is reported, objects are counted, and faults happen where a [`FaultScript`] says.
//!
//! Invariant: a device address is never a pointer of this process; only pinned memory is real host memory.
//! Invariant: after a sticky fault every call that needs a context returns it, in every context, for good.

mod calls; // the driver's calls by name
mod capture; // the capture state machine
mod driver; // the interface
mod edits; // graphs by handle
mod faults; // what goes wrong, and when
mod functions; // attributes and limits of a launch
mod graphs; // graphs and their orders
mod kernels; // reference functions in place of machine code
mod memory; // device and pinned memory
mod modules; // which kernels an image holds
mod ops; // one piece of device work
mod races; // who touched which bytes
mod rng;
mod state; // everything behind the lock
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
use streams::StepOutcome;

/// When queued work runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SimSchedule {
    /// When somebody waits for it or asks after it, and now and then by chance.
    #[default]
    Seeded,
    /// Only what somebody waits for or asks after, and what that needs: a missing wait always shows.
    Lazy,
    /// Before the call that queued it returns: a missing wait never shows.
    Eager,
}

/// How a simulated device is made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SimOptions {
    /// Names the run: schedules, orders of graphs and falsified bytes follow from it.
    pub seed: u64,
    /// What goes wrong.
    pub faults: FaultScript,
    /// Whether unordered work on the same bytes loses the context (`LAUNCH_FAILED`) besides being reported.
    pub strict: bool,
    /// Device memory in bytes.
    pub memory_bytes: u64,
    /// Pinned host memory in bytes.
    pub host_bytes: u64,
    /// When queued work runs.
    pub schedule: SimSchedule,
    /// Number of devices.
    pub n_devices: u32,
    /// The most shared memory that a block can have: 227 KiB on compute capability 9.0, 99 KiB on 8.6, 8.9 and 12.0.
    pub shared_block_bytes: u32,
    /// Whether the device says that it uses the host's memory.
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

/// What is alive on the device and what it was asked to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SimStats {
    /// Live objects and bytes.
    pub live: Census,
    /// Calls sent, by kind; those that failed count too.
    pub calls: Vec<(DriverCall, u64)>,
    /// Bytes that were copied from the host to the device; those of copies that failed count too.
    pub upload_bytes: u64,
    /// Threads inside a call that a script keeps from returning.
    pub n_hung: usize,
}

impl SimStats {
    /// How often a call was sent.
    #[must_use]
    pub fn n_calls(&self, call: DriverCall) -> u64 {
        self.calls.iter().find(|(c, _)| *c == call).map_or(0, |(_, n)| *n)
    }

    /// Calls of all kinds.
    #[must_use]
    pub fn n_calls_total(&self) -> u64 {
        self.calls.iter().map(|(_, n)| n).sum()
    }
}

struct SimShared {
    state: Mutex<SimState>,
    /// A hung call was released, a call began to hang, or a host function returned.
    changed: Condvar,
    /// Pieces of work done, readable while a call holds the state.
    n_steps: AtomicU64,
}

impl Drop for SimShared {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        for (rule, n_seen) in state.faults.unused() {
            tracing::warn!("the fault rule `{rule}` never happened: its call was made {n_seen} times");
        }
    }
}

/// A simulated driver. Clones are the same device.
#[derive(Clone)]
pub struct SimDriver {
    shared: Arc<SimShared>,
}

/// The driver interface of a simulated device. Apart from it, so that holding a device does not give the right to free what
/// others use on it.
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
    /// A device with nothing on it and no kernels registered.
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

    /// The same device as the raw driver interface, for tests of the simulation itself.
    ///
    /// ```compile_fail,E0133
    /// # use refrain_driver::{Memory, api::HostPtr, sim::SimDriver};
    /// fn free_behind_its_back(sim: &SimDriver, memory: &Memory) {
    ///     for (_, _, address) in memory.regions() {
    ///         let _ = sim.api().free_host(HostPtr(address)); // rings and leases still read there
    ///     }
    /// }
    /// ```
    ///
    /// ```compile_fail,E0599
    /// # use refrain_driver::{api::{Api, HostPtr}, sim::SimDriver};
    /// fn without_asking(sim: &SimDriver, address: HostPtr) {
    ///     let _ = sim.free_host(address);
    /// }
    /// ```
    ///
    /// # Safety
    /// As for [`crate::raw_driver`]: the caller uses only handles and addresses that calls on the returned value gave it, and
    /// none of them after it was freed or destroyed. The device checks handles and device memory itself, but pinned memory
    /// is memory of this process, which others use through [`crate::Memory`], [`crate::Ring`] and [`crate::Staging`].
    #[must_use]
    pub unsafe fn api(&self) -> Arc<dyn Api> {
        self.interface()
    }

    /// The driver interface for [`crate::Device`], which keeps that contract.
    pub(crate) fn interface(&self) -> Arc<dyn Api> {
        Arc::new(SimApi(self.clone()))
    }

    /// Registers the reference function of a kernel, with the sizes of its parameters. A later one of the same name
    /// serves functions looked up from then on.
    pub fn register(
        &self,
        name: &str,
        param_sizes: &[usize],
        body: impl Fn(&mut SimKernel<'_>) -> KernelResult + Send + Sync + 'static,
    ) {
        self.register_twin(Twin::new(name, param_sizes, body));
    }

    /// Registers a twin with properties of its own.
    pub fn register_twin(&self, twin: Twin) {
        self.lock().twins.insert(twin.name.clone(), Arc::new(twin));
    }

    /// Adds faults; their counts start now.
    pub fn inject(&self, faults: FaultScript) {
        self.lock().faults.extend(faults);
    }

    /// The rules of the fault scripts that have not come to happen so far, as they were written.
    #[must_use]
    pub fn unused_faults(&self) -> Vec<String> {
        self.lock().faults.unused().map(|(rule, _)| rule.to_owned()).collect()
    }

    /// What is alive and what was asked.
    #[must_use]
    pub fn stats(&self) -> SimStats {
        let state = self.lock();
        let calls =
            DriverCall::ALL.iter().map(|&call| (call, state.n_calls[call as usize])).filter(|(_, n)| *n > 0);
        let (upload_bytes, n_hung) = (state.upload_bytes, state.n_hung);
        SimStats { live: state.census(), calls: calls.collect(), upload_bytes, n_hung }
    }

    /// Diagnostics so far, left in place; [`crate::Device::take_reports`] takes them.
    #[must_use]
    pub fn reports(&self) -> Vec<String> {
        self.lock().reports.clone()
    }

    /// Lets every call return that a script keeps from returning.
    pub fn release_hung(&self) {
        self.lock().n_releases += 1;
        self.shared.changed.notify_all();
    }

    /// Waits until a call hangs; false when none did in time.
    #[must_use]
    pub fn wait_until_hung(&self, timeout: Duration) -> bool {
        let state = self.lock();
        let waited = self.shared.changed.wait_timeout_while(state, timeout, |s| s.n_hung == 0);
        !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
    }

    fn lock(&self) -> MutexGuard<'_, SimState> {
        self.shared.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a call and lets scripted faults happen to it.
    fn enter(&self, call: DriverCall) -> RawResult<MutexGuard<'_, SimState>> {
        self.enter_or(call, |_| ())
    }

    /// As [`SimDriver::enter`]; `on_fail` runs when a script makes the call fail.
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
                    // Codes that break a capture do so when scripted, too.
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
            // A plain wait where there is no limit: the largest duration overflows some clocks.
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

    /// Runs steps of the streams that `pick` names until it names none or the context is lost. Host functions are
    /// called without the lock.
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
                StepOutcome::Ran | StepOutcome::Idle | StepOutcome::Blocked => {}
                StepOutcome::Busy => {
                    state = self.shared.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                }
                StepOutcome::HostCall(call) => {
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

    /// Waits for an item; `clock` is what the host then has seen.
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
            // Now and then something else runs first, as it would on a card.
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
                // What is left waits for a host function that another thread is calling.
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

    /// Brings an item a few steps closer, for a query; whether it is done.
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
            // A host function that another thread is calling is not waited for by a query.
            s.toward(item).filter(|h| s.streams.get(h).is_some_and(|stream| !stream.busy))
        });
        state.check_lost()?;
        if state.pending.contains_key(&item) {
            return Err(Code::NOT_READY);
        }
        state.host_saw(clock);
        Ok(state)
    }

    /// Work was queued: perhaps some of it runs before the call returns.
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
        // What fails now is the next call's error, as on a card.
        Ok(())
    }
}
