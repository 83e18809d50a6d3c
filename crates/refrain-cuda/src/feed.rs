//! Device memory of steps that feed themselves, in addition to the plan's control block, and the messages
//! that fill it.
//!
//! ```text
//! control region   .. | count u64 | CommitState per row | end ids per row | the plan's control block
//! ring region      pinned: one entry per step in flight or not collected, with a result per row
//! edits region     edits of rows, on the way into the control region
//! ```
//!
//! The header of a run ends where the control block starts, for any number of rows. The host writes both at
//! once when a run starts. From then on, the count, the states and the changing fields of the control block
//! belong to the device. The host edits rows and block tables through [`Edits`], which take effect between
//! two steps.

use refrain_driver::{Buf, DriverError, Launch, Ring};
use refrain_graph::{Feedback, Field, Plan, RowLimits, Run, RunEdits, SegmentKind, TopLists};
use refrain_kernels::{CommitArgs, CommitEntry, CommitRing, CommitState, CommitTop, Edits, Kernels};

use crate::error::CudaError;
use crate::resident::ResidentMemory;
use crate::warm::WarmPlan;

/// Maximum number of uncollected results: twice the maximum number of steps launched ahead.
pub(crate) const RING_ENTRIES: u32 = 64;
/// Maximum number of steps in flight.
pub(crate) const MAX_AHEAD: usize = RING_ENTRIES as usize / 2;
/// Maximum number of steps of several rows in flight: a sequence that joins waits for them.
pub(crate) const MAX_AHEAD_OF_ROWS: usize = 4;
/// Maximum number of steps with masks in flight: while the masks of one are computed, its body runs, and the next one is
/// launched together with its choice.
pub(crate) const MAX_AHEAD_WITH_MASKS: usize = 2;
/// Maximum number of rows that feed themselves.
pub(crate) const MAX_ROWS: usize = 512;
/// Maximum bytes of the results of one step: those of the most rows, or of 93 rows with lists of 20 probable tokens.
const MAX_PAYLOAD: usize = 16 << 10;
/// Bytes of the ring.
pub(crate) const RING_BYTES: u64 = ring_bytes(MAX_PAYLOAD);
/// Bytes of the edits region: about ten rows at once.
pub(crate) const EDIT_BYTES: u64 = 64 << 10;

/// End ids per row that the device checks. The host detects all others, and then discards the steps launched
/// ahead.
const MAX_END: usize = 16;
/// Bytes of the largest header.
pub(crate) const FEED_BYTES: u64 = (FeedLayout { n_rows: MAX_ROWS }.bytes() as u64).next_multiple_of(256);

/// Layout of a run header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FeedLayout {
    pub(crate) n_rows: usize,
}

impl FeedLayout {
    const STATES: usize = 32;

    /// Size of the header.
    pub(crate) const fn bytes(self) -> usize {
        self.ends() + 4 * MAX_END * self.n_rows
    }

    const fn ends(self) -> usize {
        FeedLayout::STATES + size_of::<CommitState>() * self.n_rows
    }

    const fn state(self, row: usize) -> usize {
        FeedLayout::STATES + size_of::<CommitState>() * row
    }

    /// Word of the control region that holds a row, in a region whose control block starts at `FEED_BYTES`.
    pub(crate) const fn hold_word(self, row: usize) -> usize {
        let hold = std::mem::offset_of!(CommitState, hold);
        (FEED_BYTES as usize - self.bytes() + self.state(row) + hold) / 4
    }

    /// End ids of the same rank are contiguous, so that neighbouring rows read neighbouring words.
    const fn end(self, row: usize, idx: usize) -> usize {
        self.ends() + 4 * (idx * self.n_rows + row)
    }

    /// Header that the host writes in front of the control block when a run starts.
    pub(crate) fn header(self, count: u64, rows: &[(CommitState, &[u32])]) -> Vec<u8> {
        let mut bytes = vec![0; self.bytes()];
        bytes[..8].copy_from_slice(&count.to_le_bytes());
        bytes[self.ends()..].fill(0xFF);
        for (row, (state, ends)) in rows.iter().enumerate().take(self.n_rows) {
            let start = self.state(row);
            bytes[start..start + size_of::<CommitState>()].copy_from_slice(bytemuck::bytes_of(state));
            for (idx, id) in ends.iter().enumerate().take(MAX_END) {
                bytes[self.end(row, idx)..][..4].copy_from_slice(&id.to_le_bytes());
            }
        }
        bytes
    }
}

/// Bytes of the ring that a run with results of this size uses.
const fn ring_bytes(payload: usize) -> u64 {
    Ring::bytes(RING_ENTRIES, payload).expect("a ring of a few entries fits")
}

/// Bytes of the results of one step: of each row, then the lists of probable tokens.
pub(crate) fn payload_bytes(feedback: &Feedback) -> usize {
    let n_top = feedback.top.map_or(0, |top| top.n);
    feedback.n_rows * size_of::<CommitEntry>() + CommitTop::bytes(feedback.n_rows, n_top)
}

/// Bytes of the results of the smallest step.
pub(crate) const MIN_PAYLOAD: usize = size_of::<CommitEntry>();

/// Feedback of a plan that runs entirely on the device: in one segment, or in two if its choices need masks.
pub(crate) fn feedback(plan: &Plan) -> Option<Feedback> {
    let on_device = plan.segments().iter().all(|s| s.kind == SegmentKind::Recordable);
    let n_parts = |f: &Feedback| 1 + usize::from(f.mask.is_some());
    Feedback::of(plan).filter(|f| {
        f.n_rows <= MAX_ROWS
            && payload_bytes(f) <= MAX_PAYLOAD
            && on_device
            && plan.segments().len() == n_parts(f)
    })
}

/// Initial state of a row. Padding starts as ended.
pub(crate) fn commit_state(limits: Option<&RowLimits>) -> CommitState {
    let word = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    let Some(limits) = limits else { return CommitState { done: 1, ..bytemuck::Zeroable::zeroed() } };
    CommitState {
        done: 0,
        n_left: word(limits.n_choices),
        limit: word(limits.n_positions),
        window: word(limits.window),
        history_next: word(limits.history_next),
        bias_until: limits.lapsing.map_or(0, |lapsing| lapsing.until),
        n_bias_kept: limits.lapsing.map_or(0, |lapsing| word(lapsing.n_kept)),
        hold: 0,
    }
}

/// Adds the commit of a plan's choices to `warm`; with `n_body`, the last one of a loop's body of so many steps.
pub(crate) fn push_commit(
    kernels: &Kernels,
    plan: &Plan,
    resident: &ResidentMemory,
    feedback: &Feedback,
    n_body: Option<u32>,
    warm: &mut WarmPlan,
) -> Result<(), CudaError> {
    let failed = |source| CudaError::Driver { step: STEP.into(), source };
    let output = |idx: usize| resident.buffer(plan, plan.outputs()[idx].buffer).map_err(failed);
    let field = |f: Field| resident.control.slice(f.offset as u64, 4 * f.len as u64).map_err(failed);
    let layout = FeedLayout { n_rows: feedback.n_rows };
    let header = resident.feed_of(feedback.n_rows).map_err(failed)?;
    let feed = |start: usize, bytes: usize| header.slice(start as u64, bytes as u64).map_err(failed);
    let ring = resident.ring.slice(0, ring_bytes(payload_bytes(feedback))).map_err(failed)?;
    let args = CommitArgs {
        token: output(feedback.token)?,
        logprob: output(feedback.logprob)?,
        tokens: field(feedback.tokens)?,
        positions: field(feedback.positions)?,
        rng: field(feedback.rng)?,
        history: field(feedback.history)?,
        bias_ids: field(feedback.bias_ids)?,
        state: feed(FeedLayout::STATES, layout.ends() - FeedLayout::STATES)?,
        eog: feed(layout.ends(), layout.bytes() - layout.ends())?,
        top: match feedback.top {
            Some(TopLists { ids, logprobs, n }) => {
                Some(CommitTop { ids: output(ids)?, logprobs: output(logprobs)?, n_top: n })
            }
            None => None,
        },
        ring: Some(CommitRing { ring, count: feed(0, 8)?, n_entries: RING_ENTRIES }),
        n: feedback.n_rows,
        n_history: feedback.history.len / feedback.n_rows.max(1),
        n_bias: feedback.bias_ids.len / feedback.n_rows.max(1),
        n_eog: MAX_END,
        step: STEP,
    };
    let launch = match n_body {
        None => kernels.commit(&args),
        Some(n_body) => kernels.commit_loop(&args, n_body),
    };
    let launch = launch.map_err(|e| no_kernel("commit", &e))?;
    let names: [(Buf, &str); 7] = [
        (args.tokens, "the next tokens"),
        (args.positions, "the next positions"),
        (args.rng, "the random positions"),
        (args.history, "the recent tokens"),
        (args.bias_ids, "the biased tokens"),
        (args.state, "the state of the run"),
        (ring, "the ring"),
    ];
    names.into_iter().for_each(|(buf, name)| warm.name_buffer(buf, name, 4));
    warm.push(launch);
    Ok(())
}

const STEP: &str = "commit";

/// Launch that applies edits.
pub(crate) fn edit_launch(kernels: &Kernels, resident: &ResidentMemory) -> Result<Launch, CudaError> {
    kernels.edit(resident.message, resident.edits, "edit").map_err(|e| no_kernel("edit", &e))
}

fn no_kernel(op: &'static str, error: &refrain_kernels::KernelError) -> CudaError {
    CudaError::NoKernel { op, label: op.into(), because: error.to_string() }
}

/// Edits of a run, as messages that each fit into the edits region.
pub(crate) fn messages(run: &Run, edits: &RunEdits) -> Vec<Edits> {
    let control = run.control();
    let n_rows = run.feedback().n_rows;
    let layout = FeedLayout { n_rows };
    let control_start = FEED_BYTES as usize;
    let header_start = control_start - layout.bytes();
    // Merge overlapping ranges: words are read from the current control block, so the latest value is sent
    // once.
    let mut pieces: Vec<(usize, usize)> = edits.fields.iter().map(|f| (f.offset / 4, f.len)).collect();
    pieces.sort_unstable();
    let mut messages = Messages(vec![Edits::default()]);
    let mut done = 0;
    for (start, n) in pieces {
        let (from, end) = (start.max(done), start + n);
        if from < end {
            let words: Vec<u32> = (from..end)
                .map(|i| control.get(4 * i..4 * i + 4).map_or(u32::MAX, bytemuck::pod_read_unaligned))
                .collect();
            messages.push(control_start / 4 + from, &words);
            done = end;
        }
    }
    let mut rows = edits.rows.clone();
    rows.sort_unstable();
    rows.dedup();
    for row in rows {
        let limits = run.limits(row);
        messages.push((header_start + layout.state(row)) / 4, bytemuck::cast_slice(&[commit_state(limits)]));
        let ends = limits.map_or(&[][..], |limits| &limits.end);
        let ids = ends.iter().copied().chain(std::iter::repeat(u32::MAX)).take(MAX_END);
        ids.enumerate().for_each(|(idx, id)| messages.push((header_start + layout.end(row, idx)) / 4, &[id]));
    }
    messages.0.retain(|edits| !edits.is_empty());
    messages.0
}

struct Messages(Vec<Edits>);

impl Messages {
    fn push(&mut self, to: usize, mut words: &[u32]) {
        const MOST: usize = EDIT_BYTES as usize / 4;
        let mut to = to as u32;
        while !words.is_empty() {
            let Some(last) = self.0.last_mut() else { unreachable!("there is always one") };
            // A range longer than a message is split.
            let n = words.len().min(MOST / 2);
            if last.n_words_with(n) > MOST {
                self.0.push(Edits::default());
                continue;
            }
            last.push(to, &words[..n]);
            (to, words) = (to + n as u32, &words[n..]);
        }
    }
}

impl ResidentMemory {
    /// Header of a run with `n_rows` rows.
    pub(crate) fn feed_of(&self, n_rows: usize) -> Result<Buf, DriverError> {
        let bytes = FeedLayout { n_rows }.bytes() as u64;
        self.feed.slice(FEED_BYTES.saturating_sub(bytes), bytes)
    }
}
