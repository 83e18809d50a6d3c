//! Last kernel of a step: the sampled tokens become the next step's inputs, and the host receives the
//! results.
//!
//! Every earlier kernel can run twice. Only this one changes what the next step reads. Between two steps the
//! host changes rows through an edit.

use bytemuck::{Pod, Zeroable};
use refrain_driver::sim::{KernelResult, SimKernel};
use refrain_driver::{Baked, Buf, Launch, LaunchBuilder, RING_HEADER_BYTES, Ring};
use refrain_graph::StepFlags;
use refrain_tensor::DType;

use crate::error::{KernelError, OpCase};
use crate::load::Kernels;
use crate::registry::{KernelEntry, P, W};
use crate::source::KernelFamily;
use crate::twin::count;
use crate::vouch::Vouch;

/// State of one row, in device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct CommitState {
    /// Nonzero once the row has ended. It commits nothing more until the host resets it to 0.
    pub done: u32,
    /// Tokens left to commit; the row ends at 0.
    pub n_left: u32,
    /// Maximum number of positions: the row ends when the next position would reach this.
    pub limit: u32,
    /// History slots in use, from the first; 0 means none.
    pub window: u32,
    /// History slot that the next token goes to.
    pub history_next: u32,
    /// Random position at which logit biases lapse; 0 means never.
    pub bias_until: u32,
    /// Bias slots, from the first, that never lapse.
    pub n_bias_kept: u32,
    /// Nonzero if the row sits out the next commit, which resets it: its token is evaluated once more.
    pub hold: u32,
}

/// One row of a ring entry; an entry has all rows.
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
#[repr(C)]
pub struct CommitEntry {
    /// The committed token; -1 past the end.
    pub token: i32,
    /// Log-probability of the token.
    pub logprob: f32,
    /// The bits of [`StepFlags`].
    pub flags: u32,
    /// The token's position as an input; -1 once the row has ended.
    pub position: i32,
}

/// Destination of the results.
#[derive(Clone, Copy, Debug)]
pub struct CommitRing {
    /// The [`Ring`]; its payload is one [`CommitEntry`] per row, then the lists of [`CommitTop`], if there are any.
    pub ring: Buf,
    /// U64 in device memory: number of entries written; 0 for a new ring.
    pub count: Buf,
    /// Capacity of the ring in entries.
    pub n_entries: u32,
}

/// Lists of the most probable tokens, reported with the choices.
#[derive(Clone, Copy, Debug)]
pub struct CommitTop {
    /// `[n, n_top]` I32.
    pub ids: Buf,
    /// `[n, n_top]` F32: their log-probabilities.
    pub logprobs: Buf,
    /// Tokens per row.
    pub n_top: usize,
}

impl CommitTop {
    /// Bytes of the lists of `n` rows.
    #[must_use]
    pub const fn bytes(n: usize, n_top: usize) -> usize {
        8 * n * n_top
    }
}

/// Arguments of the commit of `token` and `logprob`, row by row.
///
/// A row that has not ended gets `tokens[i] = token[i]` and `positions[i] += 1` (-1 when it ends, so that
/// steps launched ahead are padding). Its random position increases by one, its token enters the history
/// window, and expired biases are dropped. Every launch writes one ring entry, even after all rows have
/// ended: the host counts one entry per step.
#[derive(Clone, Copy, Debug)]
pub struct CommitArgs<'a> {
    /// `[n]` I32: the sampled tokens.
    pub token: Buf,
    /// `[n]` F32.
    pub logprob: Buf,
    /// `[n]` I32: the next step's input.
    pub tokens: Buf,
    /// `[n]` I32: position of the current input, replaced by that of the next.
    pub positions: Buf,
    /// `[n, 4]` U32 (seed low, seed high, position, unused).
    pub rng: Buf,
    /// `[n, n_history]` I32.
    pub history: Buf,
    /// `[n, n_bias]` I32.
    pub bias_ids: Buf,
    /// `[n]` [`CommitState`].
    pub state: Buf,
    /// `[n_eog, n]` I32: the tokens that end each row; negative slots are empty.
    pub eog: Buf,
    /// Destination of the results, if any.
    pub ring: Option<CommitRing>,
    /// Lists to report with them, if any.
    pub top: Option<CommitTop>,
    /// Rows, at most 1024.
    pub n: usize,
    /// Columns of `history`; 0 means none.
    pub n_history: usize,
    /// Columns of `bias_ids`; 0 means none.
    pub n_bias: usize,
    /// Rows of `eog`; 0 means none.
    pub n_eog: usize,
    /// Name of the step that the launch belongs to.
    pub step: &'a str,
}

/// Ranges of memory that the host changes between two steps, in one launch.
#[derive(Clone, Debug, Default)]
pub struct Edits {
    ranges: Vec<[u32; 4]>,
    words: Vec<u32>,
}

/// Header words of the message, and of each range.
const EDIT_WORDS: usize = 4;

impl Edits {
    /// Size in words of this message plus one more range of `n` words.
    #[must_use]
    pub fn n_words_with(&self, n: usize) -> usize {
        EDIT_WORDS * (self.ranges.len() + 2) + self.words.len() + n
    }

    /// Adds a range: `words` are written from word `to` on. Ranges must not overlap.
    pub fn push(&mut self, to: u32, words: &[u32]) {
        self.ranges.push([to, self.words.len() as u32, words.len() as u32, 0]);
        self.words.extend_from_slice(words);
    }

    /// Whether there is nothing to change.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// The ranges, each with its destination and words.
    pub fn ranges(&self) -> impl Iterator<Item = (usize, &[u32])> {
        let words = |from: u32, n: u32| &self.words[from as usize..(from + n) as usize];
        self.ranges.iter().map(move |&[to, from, n, _]| (to as usize, words(from, n)))
    }

    /// The message in the kernel's format.
    #[must_use]
    pub fn message(&self) -> Vec<u32> {
        let first = (EDIT_WORDS * (self.ranges.len() + 1)) as u32;
        let mut message = vec![self.ranges.len() as u32, 0, 0, 0];
        message.extend(self.ranges.iter().flat_map(|&[to, from, n, _]| [to, first + from, n, 0]));
        message.extend_from_slice(&self.words);
        message
    }
}

impl Kernels {
    /// Builds the launch that writes the [`Edits`] of a buffer to their destinations.
    pub fn edit(&self, words: Buf, edits: Buf, step: &str) -> Result<Launch, KernelError> {
        let [n_words, n_edits] =
            [words, edits].map(|buf| usize::try_from(buf.len() / 4).unwrap_or(usize::MAX));
        let shape = [("n_words", n_words), ("n_edits", n_edits)];
        let case = OpCase { op: "edit", dtype: DType::U32, shape: &shape };
        case.sizes()?;
        crate::require!(case, n_edits >= EDIT_WORDS, "edits need a header of {EDIT_WORDS} words");
        let sizes = [case.u32("n_words", n_words)?, case.u32("n_edits", n_edits)?];
        Ok(self
            .launch("edit_u32", 16, 256)?
            .step(step)
            .read_write(case.words("words", words, &[n_words])?)
            .read(case.words("edits", edits, &[n_edits])?)
            .baked(Baked(sizes[0]))
            .baked(Baked(sizes[1]))
            .vouch(&case))
    }

    /// Builds the launch for [`CommitArgs`].
    pub fn commit(&self, a: &CommitArgs<'_>) -> Result<Launch, KernelError> {
        let shape = [("n", a.n)];
        let case = OpCase { op: "commit", dtype: DType::I32, shape: &shape };
        Ok(self.commit_launch("commit_i32", a, &case)?.vouch(&case))
    }

    /// Builds the launch for [`CommitArgs`] that also decides whether the steps go on, as [`Ring::begin_loop`] and the
    /// rows demand. If it is recorded in a loop whose body has `n_body` steps, the decision becomes the loop's
    /// condition. Needs a ring.
    pub fn commit_loop(&self, a: &CommitArgs<'_>, n_body: u32) -> Result<Launch, KernelError> {
        let shape = [("n", a.n)];
        let case = OpCase { op: "commit_loop", dtype: DType::I32, shape: &shape };
        crate::require!(case, a.ring.is_some(), "a loop reports its results through a ring");
        crate::require!(case, n_body > 0, "a body has at least one step");
        let launch = self.commit_launch("commit_loop_i32", a, &case)?;
        Ok(launch.baked(Baked(n_body)).condition().vouch(&case))
    }

    fn commit_launch(
        &self,
        kernel: &str,
        a: &CommitArgs<'_>,
        case: &OpCase<'_>,
    ) -> Result<LaunchBuilder, KernelError> {
        case.sizes()?;
        crate::require!(case, a.n <= 1024, "the kernel takes at most 1024 rows");
        let (n_history, n_eog) = (case.u32("n_history", a.n_history)?, case.u32("n_eog", a.n_eog)?);
        let n_bias = case.u32("n_bias", a.n_bias)?;
        let launch = self
            .launch(kernel, 1, a.n.next_multiple_of(32) as u32)?
            .step(a.step)
            .read_write(case.words("tokens", a.tokens, &[a.n])?)
            .read_write(case.words("positions", a.positions, &[a.n])?)
            .read_write(case.words("rng", a.rng, &[a.n, 4])?)
            .read_write(case.words("history", a.history, &[a.n, a.n_history])?)
            .read_write(case.words("bias_ids", a.bias_ids, &[a.n, a.n_bias])?)
            .read_write(case.buf("state", a.state, a.n.checked_mul(size_of::<CommitState>()), 16)?);
        let n_top = a.top.map_or(0, |top| top.n_top);
        let lists = a.n.checked_mul(n_top).filter(|n| u32::try_from(*n).is_ok());
        crate::require!(case, lists.is_some(), "lists of {n_top} tokens are too long");
        let payload = a.n * size_of::<CommitEntry>() + CommitTop::bytes(a.n, n_top);
        let stride = Ring::stride(payload).and_then(|bytes| u32::try_from(bytes).ok());
        let stride = stride.ok_or_else(|| case.refuse("the size of a ring entry overflows".to_owned()))?;
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
        let launch = launch
            .read(case.words("token", a.token, &[a.n])?)
            .read(case.words("logprob", a.logprob, &[a.n])?)
            .read(case.words("eog", a.eog, &[a.n_eog, a.n])?);
        let launch = match a.top {
            None => launch.null().null(),
            Some(top) => launch.read(case.words("top_ids", top.ids, &[a.n, n_top])?).read(case.words(
                "top_logprobs",
                top.logprobs,
                &[a.n, n_top],
            )?),
        };
        Ok(launch
            .baked(Baked(a.n as u32))
            .baked(Baked(n_history))
            .baked(Baked(n_bias))
            .baked(Baked(n_eog))
            .baked(Baked(a.ring.map_or(1, |r| r.n_entries)))
            .baked(Baked(stride))
            .baked(Baked(case.u32("n_top", n_top)?)))
    }
}

pub(crate) fn entries(all: &mut Vec<KernelEntry>) {
    let params = [P, P, P, P, P, P, P, P, P, P, P, P, P, W, W, W, W, W, W, W];
    let entry = |name: &str, params: &[usize], twin: fn(&mut SimKernel<'_>) -> KernelResult| {
        KernelEntry::new(KernelFamily::Commit, name, params, twin)
    };
    all.push(entry("commit_i32", &params, twin).unit("step"));
    all.push(entry("edit_u32", &[P, P, W, W], edit_twin).unit("step"));
    all.push(entry("commit_loop_i32", &[&params[..], &[W, P]].concat(), loop_twin).unit("loop"));
}

fn edit_twin(k: &mut SimKernel<'_>) -> KernelResult {
    let (n_words, n_edits) = (count(k, 2)?, count(k, 3)?);
    let edits: Vec<u32> = k.read(k.ptr(1)?, n_edits)?;
    for piece in edits[EDIT_WORDS..].chunks_exact(EDIT_WORDS).take(edits[0] as usize) {
        let [to, from, n] = [piece[0], piece[1], piece[2]].map(|word| word as usize);
        let n = n.min(n_words.saturating_sub(to)).min(n_edits.saturating_sub(from));
        if n > 0 {
            k.write(k.ptr(0)?.add(4 * to as u64), &edits[from..from + n])?;
        }
    }
    Ok(())
}

fn twin(k: &mut SimKernel<'_>) -> KernelResult {
    commit_rows(k).map(drop)
}

fn loop_twin(k: &mut SimKernel<'_>) -> KernelResult {
    let ring = k.ptr(7)?;
    let [consumed, until] =
        k.before_wait(|k| Ok([k.load_acquire_u64(ring)?, k.load_acquire_u64(ring.add(8))?]))?;
    let (number, goes_on) = commit_rows(k)?;
    let [n_entries, n_body] = [k.arg::<u32>(17)?, k.arg::<u32>(20)?].map(u64::from);
    let pending = number.wrapping_sub(consumed).wrapping_add(n_body);
    let another = goes_on && number < until && pending <= n_entries;
    if !another {
        k.store_release_u64(ring.add(16), number)?;
    }
    match k.arg::<u64>(21)? {
        0 => {}
        condition => k.set_condition(condition, u32::from(another)),
    }
    Ok(())
}

/// Commits all rows. Returns the number of the ring's entry, and whether a row goes on.
fn commit_rows(k: &mut SimKernel<'_>) -> KernelResult<(u64, bool)> {
    let (n, widths, n_eog) = (count(k, 13)?, [count(k, 14)?, count(k, 15)?], count(k, 16)?);
    let eog: Vec<i32> = k.read(k.ptr(10)?, n_eog * n)?;
    let mut entries = Vec::with_capacity(n);
    for row in 0..n {
        let ends: Vec<i32> = (0..n_eog).map(|i| eog[i * n + row]).collect();
        entries.push(commit_row(k, row, widths, &ends)?);
    }
    let (count_at, ring) = (k.ptr(6)?, k.ptr(7)?);
    let goes_on = entries.iter().any(|entry| entry.flags == 0);
    if ring.0 == 0 {
        return Ok((0, goes_on));
    }
    let (n_entries, stride) = (u64::from(k.arg::<u32>(17)?), u64::from(k.arg::<u32>(18)?));
    let seq: u64 = k.read_one(count_at)?;
    let entry = ring.add(RING_HEADER_BYTES + seq % n_entries * stride);
    k.write(entry.add(8), &entries)?;
    let n_listed = n * count(k, 19)?;
    if n_listed > 0 {
        let ids = entry.add(8 + (n * size_of::<CommitEntry>()) as u64);
        let (top_ids, top_logprobs): (Vec<i32>, Vec<f32>) =
            (k.read(k.ptr(11)?, n_listed)?, k.read(k.ptr(12)?, n_listed)?);
        k.write(ids, &top_ids)?;
        k.write(ids.add(4 * n_listed as u64), &top_logprobs)?;
    }
    let number = seq.wrapping_add(1);
    k.write_one(count_at, number)?;
    k.store_release_u64(entry, number)?;
    Ok((number, goes_on))
}

fn commit_row(
    k: &mut SimKernel<'_>,
    row: usize,
    [n_history, n_bias]: [usize; 2],
    eog: &[i32],
) -> KernelResult<CommitEntry> {
    let at = |i: usize, bytes: u64| -> KernelResult<_> { Ok(k.ptr(i)?.add(row as u64 * bytes)) };
    let (tokens, positions, rng) = (at(0, 4)?, at(1, 4)?, at(2, 16)?.add(8));
    let (history, bias_ids) = (at(3, 4 * n_history as u64)?, at(4, 4 * n_bias as u64)?);
    let state_at = at(5, size_of::<CommitState>() as u64)?;
    let (token, logprob) = (k.read_one::<i32>(at(8, 4)?)?, k.read_one::<f32>(at(9, 4)?)?);
    let mut state: CommitState = k.read_one(state_at)?;
    let position: i32 = k.read_one(positions)?;
    let nothing = CommitEntry { token: -1, logprob: 0.0, flags: StepFlags::PAST_END.0, position: -1 };
    if state.hold != 0 {
        k.write_one(state_at, CommitState { hold: 0, ..state })?;
        return Ok(nothing);
    }
    if state.done != 0 || position < 0 {
        return Ok(nothing);
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
    let random = k.read_one::<u32>(rng)?.wrapping_add(1);
    k.write_one(rng, random)?;
    if state.bias_until != 0 && random >= state.bias_until {
        let n_kept = n_bias.min(state.n_bias_kept as usize);
        k.write(bias_ids.add(4 * n_kept as u64), &vec![-1_i32; n_bias - n_kept])?;
        state.bias_until = 0;
    }
    let window = n_history.min(state.window as usize);
    if window > 0 {
        let slot = state.history_next as usize % window;
        k.write_one(history.add(4 * slot as u64), token)?;
        state.history_next = ((slot + 1) % window) as u32;
    }
    state.done = u32::from(flags != 0);
    k.write_one(state_at, state)?;
    Ok(CommitEntry { token, logprob, flags, position: next })
}
