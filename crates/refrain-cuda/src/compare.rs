//! Continuous verification: every so often a step of a running text or of a training run is compared with its eager run.
//!
//! A graph is verified before it serves; this looks for what goes wrong later. The step runs twice from the same
//! inputs: first as a replay that the host does not hear of, then eagerly. The eager run is the one whose results count,
//! so a replay that came out wrong changes nothing: it costs the graph its service, and the ledger says so.

use std::time::{Duration, Instant};

use refrain_driver::{Buf, DriverError, RING_HEADER_BYTES, Ring};
use refrain_graph::{Feedback, Place, Plan, Ran, Segment, StateKind};

use crate::cache::{GraphMode, Site};
use crate::error::CudaError;
use crate::feed::{RING_ENTRIES, payload_bytes};
use crate::machine::{Machine, ProgramId};
use crate::resident::Resident;
use crate::verify::{LiveRing, LiveStep, VerifyError, compare_live};
use crate::warm::WarmPlan;

/// What continuous verification has done and cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Compared {
    /// Decode and training steps that were run both ways.
    pub n_steps: u64,
    /// Those among them that differed.
    pub n_mismatches: u64,
    /// How long they took, both runs and the comparison.
    pub took: Duration,
}

/// A ring count whose entry has the number 0, which the host never waits for. It goes to the ring's last place, so
/// nothing else may be in flight.
const UNHEARD: u64 = u64::MAX;

impl Machine {
    /// Whether the decode step that was counted last is one to compare.
    pub(crate) fn is_comparison_due(&self) -> bool {
        self.options.verify_every.is_some_and(|n| self.n_decoded.is_multiple_of(n.get().into()))
    }

    /// Whether the next one is.
    pub(crate) fn is_next_compared(&self) -> bool {
        self.options.verify_every.is_some_and(|n| (self.n_decoded + 1).is_multiple_of(n.get().into()))
    }

    /// Runs the next decode step both ways. `None` when there is no graph to compare: then it still has to be sent.
    pub(crate) fn send_compared(&mut self, id: ProgramId) -> Result<Option<Ran>, CudaError> {
        let (Some(program), Some(resident)) = (self.programs.get(&id), &mut self.resident) else {
            return Err(Machine::gone());
        };
        let (Some((segment, warm)), Some(followed)) = (program.only_segment(), &self.followed) else {
            return Ok(None);
        };
        let Some(feedback) = program.feedback else { return Ok(None) };
        let step = live_step(&program.plan, segment, warm, resident, Some((&feedback, followed.control())))
            .map_err(CudaError::driver("preparing a comparison"))?;
        self.compare(id, step)
    }

    /// Runs a step both ways whose control block is in place and which is not a step of a run. `None` as above.
    pub(crate) fn send_queued_compared(&mut self, id: ProgramId) -> Result<Option<Ran>, CudaError> {
        let (Some(program), Some(resident)) = (self.programs.get(&id), &mut self.resident) else {
            return Err(Machine::gone());
        };
        let Some((segment, warm)) = program.only_segment() else { return Ok(None) };
        let mut step = live_step(&program.plan, segment, warm, resident, None)
            .map_err(CudaError::driver("preparing a comparison"))?;
        step.digests = Some((self.digester.clone(), resident.scratch));
        self.compare(id, step)
    }

    fn compare(&mut self, id: ProgramId, step: LiveStep) -> Result<Option<Ran>, CudaError> {
        let (Some(program), Some(resident)) = (self.programs.get(&id), &mut self.resident) else {
            return Err(Machine::gone());
        };
        let Some((_, warm)) = program.only_segment() else { return Ok(None) };
        let key = (id, 0);
        let Some(graph) = self.cache.graph(&key) else { return Ok(None) };
        self.states_are_zero = false;
        let began = Instant::now();
        let compared = compare_live(graph, &mut self.stream, &mut resident.lease, warm, &step);
        let error = match compared {
            // Nothing was compared: the step is still to be sent, and meets the same failure as any other would.
            Err(VerifyError::Driver(source)) if !source.is_final() => return Ok(None),
            Err(VerifyError::Driver(source)) => {
                return Err(CudaError::Driver { step: warm.name().to_owned(), source });
            }
            Ok(()) => None,
            Err(error @ VerifyError::Mismatch { .. }) => Some(error),
        };
        self.compared.n_steps += 1;
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

/// What the step at hand changes and what comes out of it. A step that feeds itself comes with the control block as the host
/// knows it and its position.
fn live_step(
    plan: &Plan,
    segment: &Segment,
    warm: &WarmPlan,
    resident: &Resident,
    fed: Option<(&Feedback, &[u8])>,
) -> Result<LiveStep, DriverError> {
    let mut step = LiveStep { inputs: Vec::new(), ring: None, results: Vec::new(), digests: None };
    if let Some((feedback, _)) = fed {
        let feed = resident.feed_of(feedback.n_rows)?;
        step.inputs.extend([feed, resident.control]);
        let unheard = (feed.slice(0, 8)?, UNHEARD);
        step.ring = Some(LiveRing { unheard, entries: ring_entries(resident, feedback.n_rows)? });
        step.results.extend([feed.slice(8, feed.len() - 8)?, resident.control]);
    }
    let in_arena = |buf: &Buf| warm.space().contains(resident.arena(), *buf);
    step.results
        .extend(warm.work().iter().flat_map(|work| work.writes().collect::<Vec<_>>()).filter(in_arena));
    let written = plan.steps()[segment.steps.clone()].iter().flat_map(|step| &step.outputs);
    for operand in written {
        let Place::State(id) = plan.buffer(operand.buffer).place else { continue };
        match resident.state(id.idx()).kind {
            // A row is written before it is read, so nothing of it has to be put back.
            StateKind::Paged => {
                if let Some((_, control)) = fed {
                    step.results.extend(written_blocks(plan, resident, id.idx(), control)?);
                }
            }
            // What is read is not written.
            StateKind::Slots => {
                if let Some((_, control)) = fed {
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

fn ring_entries(resident: &Resident, n_rows: usize) -> Result<Vec<Buf>, DriverError> {
    let payload = payload_bytes(n_rows);
    let stride = Ring::stride(payload).unwrap_or(0);
    let entry = |i: u32| resident.ring.slice(RING_HEADER_BYTES + u64::from(i) * stride + 8, payload as u64);
    (0..RING_ENTRIES).map(entry).collect()
}

/// The slots that the step's rows write to.
fn written_slots(
    plan: &Plan,
    resident: &Resident,
    state: usize,
    control: &[u8],
) -> Result<Vec<Buf>, DriverError> {
    let Some(slots) = plan.bounds().slots.first() else { return Ok(Vec::new()) };
    let whole = resident.state_live(state)?;
    let bytes = whole.len() / slots.n_slots.max(1) as u64;
    let mut written = Vec::new();
    // A step that feeds itself has one row of each sequence.
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

/// The blocks of a cache that the step's rows write to. A row that has ended writes nothing: then its block is the same
/// both times.
fn written_blocks(
    plan: &Plan,
    resident: &Resident,
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
