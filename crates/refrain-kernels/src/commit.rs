//! The last kernel of a step: the chosen token becomes the next step's input, and the host hears of it.
//!
//! Everything before it can run twice; this is the one place where a step changes what the next one reads.

use bytemuck::{Pod, Zeroable};
use refrain_driver::sim::{KernelResult, SimKernel};
use refrain_driver::{Baked, Buf, Launch, RING_HEADER_BYTES, Ring};
use refrain_graph::StepFlags;
use refrain_tensor::DType;

use crate::error::{Case, KernelError};
use crate::load::Kernels;
use crate::registry::{Entry, P, W};
use crate::source::Family;
use crate::twin::count;
use crate::vouch::Vouch;

/// One row's state, in device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct CommitState {
    /// Not 0 once the row has ended: it commits nothing more until the host sets 0.
    pub done: u32,
    /// Tokens that may still be committed; at 0 the row ends.
    pub n_left: u32,
    /// Positions the row may have: it ends when the next position would reach this.
    pub limit: u32,
    /// How many places of its history the row uses, from the first; 0 is none.
    pub window: u32,
    /// Which of them the next token goes to.
    pub history_next: u32,
    /// Nothing.
    pub unused: [u32; 3],
}

/// One row of a ring entry, which has one for each row.
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
#[repr(C)]
pub struct CommitEntry {
    /// The committed token; -1 past the end.
    pub token: i32,
    /// Its log-probability.
    pub logprob: f32,
    /// The bits of [`StepFlags`].
    pub flags: u32,
    /// The position the token will have as an input; -1 past the end.
    pub position: i32,
}

/// Where results go.
#[derive(Clone, Copy, Debug)]
pub struct CommitRing {
    /// The whole [`Ring`], with a payload of one [`CommitEntry`] for each row.
    pub ring: Buf,
    /// U64 in device memory: entries written so far; 0 when the ring is new.
    pub count: Buf,
    /// Entries of the ring.
    pub n_entries: u32,
}

/// Commits `token` and `logprob`, row by row.
///
/// A row that is not done gets `tokens[i] = token[i]`, `positions[i] += 1` (-1 when it ends, so that steps launched
/// ahead are padding), its random position plus one, and its token in the window of its history. Every launch writes one ring entry,
/// past the end too: the host counts one entry for each step it sends.
#[derive(Clone, Copy, Debug)]
pub struct CommitArgs<'a> {
    /// `[n]` I32: what was chosen.
    pub token: Buf,
    /// `[n]` F32.
    pub logprob: Buf,
    /// `[n]` I32: the next step's input.
    pub tokens: Buf,
    /// `[n]` I32: the position of the current input, then of the next.
    pub positions: Buf,
    /// `[n, 4]` U32 (seed low, seed high, position, unused).
    pub rng: Buf,
    /// `[n, n_history]` I32.
    pub history: Buf,
    /// `[n]` [`CommitState`].
    pub state: Buf,
    /// `[n_eog]` I32: the tokens that end generation; negative places are empty.
    pub eog: Buf,
    /// Where results go, if anywhere.
    pub ring: Option<CommitRing>,
    /// Rows, at most 1024.
    pub n: usize,
    /// Columns of `history`; 0 is none.
    pub n_history: usize,
    /// Entries of `eog`; 0 is none.
    pub n_eog: usize,
    /// Names the step.
    pub step: &'a str,
}

impl Kernels {
    /// The launch of [`CommitArgs`].
    pub fn commit(&self, a: &CommitArgs<'_>) -> Result<Launch, KernelError> {
        let shape = [("n", a.n)];
        let case = Case { op: "commit", dtype: DType::I32, shape: &shape };
        case.sizes()?;
        crate::require!(case, a.n <= 1024, "at most 1024 rows");
        let (n_history, n_eog) = (case.u32("n_history", a.n_history)?, case.u32("n_eog", a.n_eog)?);
        let launch = self
            .launch("commit_i32", 1, a.n.next_multiple_of(32) as u32)?
            .step(a.step)
            .read_write(case.words("tokens", a.tokens, &[a.n])?)
            .read_write(case.words("positions", a.positions, &[a.n])?)
            .read_write(case.words("rng", a.rng, &[a.n, 4])?)
            .read_write(case.words("history", a.history, &[a.n, a.n_history])?)
            .read_write(case.buf("state", a.state, a.n.checked_mul(size_of::<CommitState>()), 16)?);
        let payload = a.n * size_of::<CommitEntry>();
        let stride = Ring::stride(payload).and_then(|bytes| u32::try_from(bytes).ok());
        let stride = stride.ok_or_else(|| case.refuse("the entries of the ring are too large".to_owned()))?;
        let launch = match a.ring {
            None => launch.null().null(),
            Some(ring) => {
                crate::require!(case, ring.n_entries > 0, "the ring has no entries");
                let bytes =
                    Ring::bytes(ring.n_entries, payload).and_then(|bytes| usize::try_from(bytes).ok());
                launch
                    .read_write(case.buf("count", ring.count, Some(8), 8)?)
                    .read_write(case.buf("ring", ring.ring, bytes, 16)?)
            }
        };
        Ok(launch
            .read(case.words("token", a.token, &[a.n])?)
            .read(case.words("logprob", a.logprob, &[a.n])?)
            .read(case.words("eog", a.eog, &[a.n_eog])?)
            .baked(Baked(a.n as u32))
            .baked(Baked(n_history))
            .baked(Baked(n_eog))
            .baked(Baked(a.ring.map_or(1, |r| r.n_entries)))
            .baked(Baked(stride))
            .vouch(&case))
    }
}

pub(crate) fn entries(all: &mut Vec<Entry>) {
    let params = [P, P, P, P, P, P, P, P, P, P, W, W, W, W, W];
    all.push(Entry::new(Family::Commit, "commit_i32", &params, twin));
}

fn twin(k: &mut SimKernel<'_>) -> KernelResult {
    let (n, width, n_eog) = (count(k, 10)?, count(k, 11)?, count(k, 12)?);
    let eog: Vec<i32> = k.read(k.ptr(9)?, n_eog)?;
    let mut entries = Vec::with_capacity(n);
    for row in 0..n {
        entries.push(commit_row(k, row, width, &eog)?);
    }
    let (count_at, ring) = (k.ptr(5)?, k.ptr(6)?);
    if ring.0 == 0 {
        return Ok(());
    }
    let (n_entries, stride) = (u64::from(k.arg::<u32>(13)?), u64::from(k.arg::<u32>(14)?));
    let seq: u64 = k.read_one(count_at)?;
    let entry = ring.add(RING_HEADER_BYTES + seq % n_entries * stride);
    k.write(entry.add(8), &entries)?;
    k.write_one(count_at, seq.wrapping_add(1))?;
    k.store_release_u64(entry, seq.wrapping_add(1))
}

fn commit_row(k: &mut SimKernel<'_>, row: usize, width: usize, eog: &[i32]) -> KernelResult<CommitEntry> {
    let at = |i: usize, bytes: u64| -> KernelResult<_> { Ok(k.ptr(i)?.add(row as u64 * bytes)) };
    let (tokens, positions, rng) = (at(0, 4)?, at(1, 4)?, at(2, 16)?.add(8));
    let (history, state_at) = (at(3, 4 * width as u64)?, at(4, size_of::<CommitState>() as u64)?);
    let (token, logprob) = (k.read_one::<i32>(at(7, 4)?)?, k.read_one::<f32>(at(8, 4)?)?);
    let mut state: CommitState = k.read_one(state_at)?;
    let position: i32 = k.read_one(positions)?;
    if state.done != 0 || position < 0 {
        return Ok(CommitEntry { token: -1, logprob: 0.0, flags: StepFlags::PAST_END.0, position: -1 });
    }
    let next = position + 1;
    state.n_left = state.n_left.saturating_sub(1);
    let flags = StepFlags::default()
        .with(StepFlags::ENDED, token >= 0 && eog.contains(&token))
        .with(StepFlags::LENGTH, state.n_left == 0 || next as u32 >= state.limit)
        .with(StepFlags::NON_FINITE, !logprob.is_finite())
        .0;
    k.write_one(tokens, token)?;
    k.write_one(positions, if flags == 0 { next } else { -1 })?;
    k.update::<u32>(rng, 1, |p| p[0] = p[0].wrapping_add(1))?;
    let window = width.min(state.window as usize);
    if window > 0 {
        let slot = state.history_next as usize % window;
        k.write_one(history.add(4 * slot as u64), token)?;
        state.history_next = ((slot + 1) % window) as u32;
    }
    state.done = u32::from(flags != 0);
    k.write_one(state_at, state)?;
    Ok(CommitEntry { token, logprob, flags, position: next })
}
