//! What a step that feeds itself has on the device besides the plan's control block, and the messages that fill it.
//!
//! ```text
//! control region   count u64 | CommitState | ids that end a row | the plan's control block
//! ring region      pinned: one entry for each step that was sent and not taken
//! ```
//!
//! The host writes all of it at once when a run begins. From then on count, state and the changing fields of the control
//! block are the device's, and the host writes nothing but the block table.

use refrain_driver::{Buf, Ring};
use refrain_graph::{Feedback, Plan, SegmentKind};
use refrain_kernels::{CommitArgs, CommitEntry, CommitRing, CommitState, Kernels};

use crate::error::CudaError;
use crate::resident::Resident;
use crate::warm::WarmPlan;

/// Results that may be under way: twice the most steps that are sent ahead.
pub(crate) const RING_ENTRIES: u32 = 64;
/// The most steps that may be under way.
pub(crate) const MAX_AHEAD: usize = RING_ENTRIES as usize / 2;
/// Bytes of the ring.
pub(crate) const RING_BYTES: u64 =
    Ring::bytes(RING_ENTRIES, size_of::<CommitEntry>()).expect("a few entries fit");

const STATE_AT: usize = 32;
const END_AT: usize = STATE_AT + size_of::<CommitState>();
/// Ids that the device knows; the host finds a row's end by any others, and then drops what was sent ahead.
const MAX_END: usize = 64;
/// Bytes in front of the plan's control block.
pub(crate) const FEED_BYTES: u64 = ((END_AT + 4 * MAX_END) as u64).next_multiple_of(256);

/// The feedback of a plan of one sequence whose every step is on the device.
pub(crate) fn feedback(plan: &Plan) -> Option<Feedback> {
    let on_device = plan.segments().iter().all(|s| s.kind == SegmentKind::Recordable);
    Feedback::of(plan).filter(|f| f.n_rows == 1 && on_device && plan.segments().len() == 1)
}

/// Adds the commit of a plan's choice.
pub(crate) fn push_commit(
    kernels: &Kernels,
    plan: &Plan,
    resident: &Resident,
    feedback: &Feedback,
    warm: &mut WarmPlan,
) -> Result<(), CudaError> {
    let failed = |source| CudaError::Driver { step: STEP.into(), source };
    let output = |idx: usize| resident.buffer(plan, plan.outputs()[idx].buffer).map_err(failed);
    let field =
        |f: refrain_graph::Field| resident.control.slice(f.offset as u64, 4 * f.len as u64).map_err(failed);
    let feed = |at: usize, bytes: usize| resident.feed.slice(at as u64, bytes as u64).map_err(failed);
    let args = CommitArgs {
        token: output(feedback.token)?,
        logprob: output(feedback.logprob)?,
        tokens: field(feedback.tokens)?,
        positions: field(feedback.positions)?,
        rng: field(feedback.rng)?,
        history: field(feedback.history)?,
        state: feed(STATE_AT, size_of::<CommitState>())?,
        eog: feed(END_AT, 4 * MAX_END)?,
        ring: Some(CommitRing { ring: resident.ring, count: feed(0, 8)?, n_entries: RING_ENTRIES }),
        n: 1,
        n_history: feedback.history.len,
        n_eog: MAX_END,
        step: STEP,
    };
    let because = |e: refrain_kernels::KernelError| e.to_string();
    let launch = kernels.commit(&args).map_err(|e| CudaError::NoKernel {
        op: "commit",
        label: STEP.into(),
        because: because(e),
    })?;
    let names: [(Buf, &str); 6] = [
        (args.tokens, "the next token"),
        (args.positions, "the next position"),
        (args.rng, "the random position"),
        (args.history, "the recent tokens"),
        (args.state, "the state of the run"),
        (resident.ring, "the ring"),
    ];
    names.into_iter().for_each(|(buf, name)| warm.name_buffer(buf, name, 4));
    warm.push(launch);
    Ok(())
}

const STEP: &str = "commit";

/// What the host writes in front of the control block when a run begins.
pub(crate) fn header(count: u64, state: &CommitState, end: &[u32]) -> [u8; FEED_BYTES as usize] {
    let mut bytes = [0; FEED_BYTES as usize];
    bytes[..8].copy_from_slice(&count.to_le_bytes());
    bytes[STATE_AT..END_AT].copy_from_slice(bytemuck::bytes_of(state));
    let ids = end.iter().copied().chain(std::iter::repeat(u32::MAX));
    for (place, id) in bytes[END_AT..END_AT + 4 * MAX_END].chunks_exact_mut(4).zip(ids) {
        place.copy_from_slice(&id.to_le_bytes());
    }
    bytes
}
