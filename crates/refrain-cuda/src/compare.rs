//! Continuous verification: at intervals, a decode or training step is compared with its eager run.
//!
//! A graph is verified before it enters service; this catches later failures. The step runs twice from the
//! same inputs: first as a replay whose result the host ignores, then eagerly. Only the eager results count,
//! so a wrong replay changes nothing: its graph leaves service and the ledger records why.

use std::time::{Duration, Instant};

use refrain_driver::{Buf, DriverError, RING_HEADER_BYTES, Ring};
use refrain_graph::{Feedback, Place, Plan, Ran, Segment, StateKind};

use crate::cache::{GraphMode, Site};
use crate::device_model::{DeviceModel, ProgramId};
use crate::error::CudaError;
use crate::feed::{RING_ENTRIES, payload_bytes};
use crate::resident::ResidentMemory;
use crate::states;
use crate::verify::{LiveRing, LiveStep, VerifyError, compare_live};
use crate::warm::WarmPlan;

/// Counts and cost of continuous verification.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Compared {
    /// Decode and training steps that were run both ways.
    pub n_steps: u64,
    /// Steps whose two runs differed.
    pub n_mismatches: u64,
    /// Total time of both runs and the comparison.
    pub took: Duration,
}

/// A ring count whose entry gets the number 0, which the host never waits for. It is written to the ring's
/// last entry, so nothing else may be in flight.
const UNREPORTED: u64 = u64::MAX;

impl DeviceModel {
    /// Whether the decode step counted last is due for comparison.
    pub(crate) fn is_comparison_due(&self) -> bool {
        self.options.verify_every.is_some_and(|n| self.n_decoded.is_multiple_of(n.get().into()))
    }

    /// Whether the next decode step is due for comparison.
    pub(crate) fn is_next_compared(&self) -> bool {
        self.options.verify_every.is_some_and(|n| (self.n_decoded + 1).is_multiple_of(n.get().into()))
    }

    /// Runs the next decode step both ways. `None` means that there is no graph to compare and that the step
    /// still has to be launched.
    pub(crate) fn send_compared(&mut self, id: ProgramId, part: usize) -> Result<Option<Ran>, CudaError> {
        let (Some(program), Some(resident)) = (self.programs.get(&id), &mut self.resident) else {
            return Err(DeviceModel::gone());
        };
        let (Some((segment, warm)), Some(followed)) = (program.device_part(part), &self.followed) else {
            return Ok(None);
        };
        let Some(feedback) = program.feedback else { return Ok(None) };
        let fed =
            Fed { feedback: &feedback, control: followed.control(), commits: part + 1 == program.n_parts() };
        let step = live_step(&program.plan, segment, warm, resident, Some(fed))
            .map_err(CudaError::driver("preparing a comparison"))?;
        self.compare(id, part, step)
    }

    /// Runs a queued step both ways; its control block is already in place. `None` as for
    /// [`DeviceModel::send_compared`].
    pub(crate) fn send_queued_compared(&mut self, id: ProgramId) -> Result<Option<Ran>, CudaError> {
        let (Some(program), Some(resident)) = (self.programs.get(&id), &mut self.resident) else {
            return Err(DeviceModel::gone());
        };
        let Some((segment, warm)) = program.only_segment() else { return Ok(None) };
        let mut step = live_step(&program.plan, segment, warm, resident, None)
            .map_err(CudaError::driver("preparing a comparison"))?;
        step.digests = Some((self.digester.clone(), resident.scratch));
        self.compare(id, 0, step)
    }

    fn compare(&mut self, id: ProgramId, part: usize, step: LiveStep) -> Result<Option<Ran>, CudaError> {
        let (Some(program), Some(resident)) = (self.programs.get(&id), &mut self.resident) else {
            return Err(DeviceModel::gone());
        };
        let Some((_, warm)) = program.device_part(part) else { return Ok(None) };
        let key = (id, part);
        let Some(graph) = self.cache.graph(&key) else { return Ok(None) };
        self.states_are_zero = false;
        let began = Instant::now();
        let compared = compare_live(graph, &mut self.stream, &mut resident.lease, warm, &step);
        let error = match compared {
            // Nothing was compared: the step still has to be launched and will meet the same failure.
            Err(VerifyError::Driver(source)) if !source.is_final() => return Ok(None),
            Err(VerifyError::Driver(source)) => {
                return Err(CudaError::Driver { step: warm.name().to_owned(), source });
            }
            Ok(()) => None,
            Err(error @ VerifyError::Mismatch { .. }) => Some(error),
        };
        // A step in two parts counts once, with its last.
        self.compared.n_steps += u64::from(part + 1 == program.n_parts());
        self.compared.took += began.elapsed();
        let Some(error) = error else { return Ok(Some(Ran::REPLAYED)) };
        self.compared.n_mismatches += 1;
        let mut site = Site { stream: &mut self.stream, lease: &mut resident.lease };
        let reason = self.cache.demote(&key, &mut site, warm, error.reason())?;
        match self.options.graphs.mode {
            GraphMode::Require => Err(CudaError::Required { step: warm.name().to_owned(), reason }),
            GraphMode::Auto | GraphMode::Off => Ok(Some(Ran::Eager(reason))),
        }
    }
}

/// A step that feeds itself, or a part of one.
#[derive(Clone, Copy)]
struct Fed<'a> {
    feedback: &'a Feedback,
    /// The control block as the host knows it.
    control: &'a [u8],
    /// Whether this part ends with the commit.
    commits: bool,
}

/// The current step's inputs that have to be restored and the results to compare. A step that feeds itself
/// comes with the control block as the host knows it.
fn live_step(
    plan: &Plan,
    segment: &Segment,
    warm: &WarmPlan,
    resident: &ResidentMemory,
    fed: Option<Fed<'_>>,
) -> Result<LiveStep, DriverError> {
    let mut step = LiveStep { inputs: Vec::new(), ring: None, results: Vec::new(), digests: None };
    for (buffer, _) in states::live_in(plan, segment) {
        step.inputs.push(resident.buffer(plan, buffer)?);
    }
    if let Some(Fed { feedback, commits: true, .. }) = fed {
        let feed = resident.feed_of(feedback.n_rows)?;
        step.inputs.extend([feed, resident.control]);
        let unreported = (feed.slice(0, 8)?, UNREPORTED);
        step.ring = Some(LiveRing { unreported, entries: ring_entries(resident, payload_bytes(feedback))? });
        step.results.extend([feed.slice(8, feed.len() - 8)?, resident.control]);
    }
    let in_arena = |buf: &Buf| warm.space().contains(resident.arena(), *buf);
    step.results
        .extend(warm.work().iter().flat_map(|work| work.writes().collect::<Vec<_>>()).filter(in_arena));
    let written = plan.steps()[segment.steps.clone()].iter().flat_map(|step| &step.outputs);
    for operand in written {
        let Place::State(id) = plan.buffer(operand.buffer).place else { continue };
        match resident.state(id.idx()).kind {
            // A row is written before it is read, so nothing has to be restored.
            StateKind::Paged => {
                if let Some(Fed { control, .. }) = fed {
                    step.results.extend(written_blocks(plan, resident, id.idx(), control)?);
                }
            }
            // A step reads one slot of the pair and writes the other.
            StateKind::Slots => {
                if let Some(Fed { control, .. }) = fed {
                    step.results.extend(written_slots(plan, resident, id.idx(), control)?);
                }
            }
            StateKind::Whole => {
                let whole = resident.state_buf(id.idx())?;
                step.inputs.push(whole);
                step.results.push(whole);
            }
        }
    }
    Ok(step)
}

fn ring_entries(resident: &ResidentMemory, payload: usize) -> Result<Vec<Buf>, DriverError> {
    let stride = Ring::stride(payload).unwrap_or(0);
    let entry = |i: u32| resident.ring.slice(RING_HEADER_BYTES + u64::from(i) * stride + 8, payload as u64);
    (0..RING_ENTRIES).map(entry).collect()
}

/// Slots that the step's rows write.
fn written_slots(
    plan: &Plan,
    resident: &ResidentMemory,
    state: usize,
    control: &[u8],
) -> Result<Vec<Buf>, DriverError> {
    let Some(slots) = plan.bounds().slots.first() else { return Ok(Vec::new()) };
    let whole = resident.state_live(state)?;
    let bytes = whole.len() / slots.n_slots.max(1) as u64;
    let mut written = Vec::new();
    // A step that feeds itself has one row per sequence.
    for (row, position) in slots.positions.read(control).enumerate() {
        let (Ok(position), Ok(seq)) =
            (usize::try_from(position), usize::try_from(slots.seqs.at(control, row)))
        else {
            continue;
        };
        if let Ok(slot) = u64::try_from(slots.written(control, seq, position)) {
            written.push(whole.slice(slot * bytes, bytes)?);
        }
    }
    Ok(written)
}

/// Cache blocks that the step's rows write. A finished row writes nothing, so its block is the same in both
/// runs.
fn written_blocks(
    plan: &Plan,
    resident: &ResidentMemory,
    state: usize,
    control: &[u8],
) -> Result<Vec<Buf>, DriverError> {
    let Some(paged) = plan.bounds().paged.first() else { return Ok(Vec::new()) };
    let whole = resident.state_live(state)?;
    let bytes = whole.len() / paged.n_blocks.max(1) as u64;
    let mut blocks = Vec::new();
    for (row, position) in paged.positions.read(control).enumerate() {
        let (Ok(position), Ok(seq)) =
            (usize::try_from(position), usize::try_from(paged.seqs.at(control, row)))
        else {
            continue;
        };
        let column = (position / paged.kv_block).min(paged.max_blocks.saturating_sub(1));
        if let Ok(block) = u64::try_from(paged.tables.at(control, seq * paged.max_blocks + column)) {
            blocks.push(whole.slice(block * bytes, bytes)?);
        }
    }
    Ok(blocks)
}
