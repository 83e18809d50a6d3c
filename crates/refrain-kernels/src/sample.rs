//! Sampling the next token on the device, with the semantics of `refrain_reference::sample_row`.
//!
//! Sampling takes two launches. The first divides the vocabulary into chunks: each block adjusts its chunk's
//! logits and sums its weights. With a small top-k, the second launch lists the best keys (logit, id) of all
//! chunks and applies the filters to that list. Otherwise the first launch also sums the weights by bins of
//! logits. The second launch uses the bins to find where the filters can cut and where the choice can lie,
//! lists the keys in those bins, and resolves both on the list. So at most a short list is sorted, and ties
//! resolve to the smaller id. Two more launches list the most probable tokens if requested.

use refrain_driver::sim::{KernelResult, SimKernel};
use refrain_driver::{Baked, Buf, Launch, LaunchBuilder};
use refrain_graph::{SAMPLE_PARAMS, SampleParam};
use refrain_reference::{Sampling, apply_bias_and_penalties, apply_mask, most_probable, sample_row};

use crate::card::Card;
use crate::error::{KernelError, OpCase};
use crate::load::Kernels;
use crate::registry::{KernelEntry, P, W};
use crate::source::KernelFamily;
use crate::twin::{count, read_rows};
use crate::view::{BufView, RowLayout};
use crate::vouch::Vouch;

/// Tokens per block of the first launch.
const CHUNK: usize = 1024;
/// Threads per block of the first launch: two tokens each.
const CHUNK_THREADS: u32 = 512;
/// Maximum number of chunks per row.
const MAX_CHUNKS: usize = 1024;
/// Chunks per block of the second launch, and its threads.
const SELECT_CHUNKS: usize = 4;
const SELECT_THREADS: u32 = 512;
/// Threads per block of the launches that list the most probable tokens.
const TOP_THREADS: u32 = 512;
/// Key and two weights per token, and its entry in the list.
const TOKEN_BYTES: u64 = 32;
/// Maximum, its id, and the sum per chunk.
const CHUNK_BYTES: u64 = 16;
/// `Tail` in `sample_bins.cuh`: parts of long bins, counts and list ends.
const TAIL_BYTES: u64 = 3 * 6 * 512 * 8 + 32;
/// `State` in `sample_bins.cuh`: two weights and a count for each of 1024 bins, and a chunk count.
const STATE_BYTES: u64 = 3 * 1024 * 8 + 16;
/// Largest top-k that does not use the state.
const SMALL_K: usize = 64;
/// Shared memory of the second launch's blocks, which holds long lists, and the amount on GPUs with less:
/// compute capability 8.6, 8.9 and 12.0 have 99 KiB.
const SELECT_SHARED_BYTES: u32 = 136 << 10;
const SELECT_LEAST_SHARED_BYTES: u32 = 96 << 10;

/// Samples `token[i]` and `logprob[i]` from `logits[i]`.
#[derive(Clone, Copy, Debug)]
pub struct SampleArgs<'a> {
    /// `[n, vocab]` F32 with contiguous rows.
    pub logits: BufView,
    /// `[n, SAMPLE_PARAMS]` F32, read at run time.
    pub params: Buf,
    /// `[n, 4]` U32 (seed low, seed high, position, unused), read at run time.
    pub rng: Buf,
    /// `[n, n_history]` I32, read at run time; negative slots are empty.
    pub history: Buf,
    /// `[n, n_bias]` I32, read at run time; negative slots are empty.
    pub bias_ids: Buf,
    /// `[n, n_bias]` F32, read at run time.
    pub bias: Buf,
    /// `[n, vocab.div_ceil(32)]` U32, read at run time: tokens whose bit is 0 are never sampled.
    pub mask: Option<Buf>,
    /// `[n]` I32.
    pub token: Buf,
    /// `[n]` F32.
    pub logprob: Buf,
    /// Scratch of [`sample_scratch_bytes`] bytes, 16-byte aligned.
    pub scratch: Buf,
    /// [`sample_state_bytes`] bytes, 16-byte aligned, zero before the first launch; every completed sampling
    /// leaves them zero. Leftovers of an aborted sampling cost time but do not change results.
    pub state: Buf,
    /// Number of rows.
    pub n: usize,
    /// Vocabulary size, at most 2^20.
    pub vocab: usize,
    /// Columns of `history`; 0 means none.
    pub n_history: usize,
    /// Columns of `bias`; 0 means none.
    pub n_bias: usize,
    /// Most probable tokens, if requested.
    pub top: Option<SampleTop>,
    /// Name of the step that the launch belongs to.
    pub step: &'a str,
}

/// Destination of the most probable tokens, best first.
#[derive(Clone, Copy, Debug)]
pub struct SampleTop {
    /// `[n, n_top]` I32.
    pub ids: Buf,
    /// `[n, n_top]` F32.
    pub logprobs: Buf,
    /// Tokens per row, at most the vocabulary size.
    pub n_top: usize,
}

/// Scratch size of [`Kernels::sample`].
#[must_use]
pub fn sample_scratch_bytes(n: usize, vocab: usize) -> u64 {
    (n as u64).saturating_mul(row_bytes(vocab))
}

/// Size of the state of [`Kernels::sample`], which must be zero before the first launch and reserved for it.
#[must_use]
pub fn sample_state_bytes(n: usize) -> u64 {
    (n as u64).saturating_mul(STATE_BYTES)
}

fn row_bytes(vocab: usize) -> u64 {
    (vocab.div_ceil(CHUNK) as u64).saturating_mul(CHUNK as u64 * TOKEN_BYTES + CHUNK_BYTES) + TAIL_BYTES
}

impl Kernels {
    /// Pushes the launches of [`SampleArgs`].
    pub fn sample(&self, a: &SampleArgs<'_>, launches: &mut Vec<Launch>) -> Result<(), KernelError> {
        let shape = [("n", a.n), ("vocab", a.vocab)];
        let case = OpCase { op: "sample", dtype: a.logits.dtype, shape: &shape };
        case.sizes()?;
        let n_chunks = a.vocab.div_ceil(CHUNK);
        crate::require!(
            case,
            n_chunks <= MAX_CHUNKS,
            "the vocabulary has at most {} tokens",
            CHUNK * MAX_CHUNKS
        );
        crate::require!(case, a.n <= 65_535, "the grid takes at most 65535 rows");
        let (logits, rows) = case.rows("logits", &a.logits, a.n, a.vocab)?;
        let params = case.words("params", a.params, &[a.n, SAMPLE_PARAMS])?;
        let scratch =
            case.buf("scratch", a.scratch, usize::try_from(sample_scratch_bytes(a.n, a.vocab)).ok(), 16)?;
        let state = case.buf("state", a.state, usize::try_from(sample_state_bytes(a.n)).ok(), 16)?;
        let (n_history, n_bias) = (case.u32("n_history", a.n_history)?, case.u32("n_bias", a.n_bias)?);
        let history = case.words("history", a.history, &[a.n, a.n_history])?;
        let bias_ids = case.words("bias_ids", a.bias_ids, &[a.n, a.n_bias])?;
        let bias = case.words("bias", a.bias, &[a.n, a.n_bias])?;
        let n_words = a.vocab.div_ceil(32);
        let mask = a.mask.map(|mask| case.words("mask", mask, &[a.n, n_words])).transpose()?;
        // Without a mask, kernels without mask support run.
        let chunks = |plain: &'static str, masked: &'static str| -> Result<Launch, KernelError> {
            let launch = self
                .launch(
                    if mask.is_some() { masked } else { plain },
                    [n_chunks as u32, a.n as u32],
                    CHUNK_THREADS,
                )?
                .step(a.step)
                .write(scratch)
                .read_write(state)
                .read(logits)
                .read(params)
                .read(history)
                .read(bias_ids)
                .read(bias)
                .baked(Baked(rows))
                .baked(Baked(a.vocab as u32))
                .baked(Baked(n_history))
                .baked(Baked(n_bias));
            Ok(mask.into_iter().fold(launch, LaunchBuilder::read).vouch(&case))
        };
        launches.push(chunks("sample_chunks_f32", "sample_masked_chunks_f32")?);
        launches.push(
            self.launch(
                "sample_select_f32",
                [n_chunks.div_ceil(SELECT_CHUNKS) as u32, a.n as u32],
                SELECT_THREADS,
            )?
            .step(a.step)
            .shared(select_shared(self.card()))
            .write(case.words("token", a.token, &[a.n])?)
            .write(case.words("logprob", a.logprob, &[a.n])?)
            .read_write(scratch)
            .read_write(state)
            .read(params)
            .read(case.words("rng", a.rng, &[a.n, 4])?)
            .baked(Baked(a.vocab as u32))
            .baked(Baked(select_shared(self.card())))
            .vouch(&case),
        );
        if let Some(SampleTop { ids, logprobs, n_top }) = a.top {
            crate::require!(case, (1..=a.vocab).contains(&n_top), "n_top must be from 1 to {}", a.vocab);
            launches.push(chunks("sample_list_f32", "sample_masked_list_f32")?);
            launches.push(
                self.launch("sample_top_f32", a.n as u32, TOP_THREADS)?
                    .step(a.step)
                    .write(case.words("ids", ids, &[a.n, n_top])?)
                    .write(case.words("logprobs", logprobs, &[a.n, n_top])?)
                    .read_write(scratch)
                    .baked(Baked(a.vocab as u32))
                    .baked(Baked(n_top as u32))
                    .vouch(&case),
            );
        }
        Ok(())
    }
}

fn select_shared(card: &Card) -> u32 {
    if card.shared_limit >= SELECT_SHARED_BYTES as usize {
        SELECT_SHARED_BYTES
    } else {
        SELECT_LEAST_SHARED_BYTES
    }
}

pub(crate) fn entries(all: &mut Vec<KernelEntry>) {
    let params = [P, P, P, P, P, P, P, size_of::<RowLayout>(), W, W, W];
    all.push(KernelEntry::new(KernelFamily::Sample, "sample_chunks_f32", &params, chunks).unit("chunks"));
    let entry =
        KernelEntry::new(KernelFamily::Sample, "sample_select_f32", &[P, P, P, P, P, P, W, W], select);
    all.push(entry.unit("select").shared(select_shared).releasing_next_after_wait());
    all.push(KernelEntry::new(KernelFamily::Sample, "sample_list_f32", &params, chunks).unit("top"));
    all.push(KernelEntry::new(KernelFamily::Sample, "sample_top_f32", &[P, P, P, W, W], top).unit("top"));
    let params = [P, P, P, P, P, P, P, size_of::<RowLayout>(), W, W, W, P];
    for name in ["sample_masked_chunks_f32", "sample_masked_list_f32"] {
        all.push(KernelEntry::new(KernelFamily::Sample, name, &params, masked_chunks).unit("masked"));
    }
}

fn top(k: &mut SimKernel<'_>) -> KernelResult {
    let (n, vocab, n_top) = (k.config().grid[0] as usize, count(k, 3)?, count(k, 4)?);
    for row in 0..n {
        let mut logits: Vec<f32> = k.read(k.ptr(2)?.add(row as u64 * row_bytes(vocab)), vocab)?;
        logits.iter_mut().filter(|l| l.is_nan()).for_each(|l| *l = f32::INFINITY);
        let (ids, logprobs): (Vec<i32>, Vec<f32>) =
            most_probable(&logits, n_top).into_iter().map(|(id, logprob)| (id as i32, logprob)).unzip();
        let at = 4 * (row * n_top) as u64;
        k.write(k.ptr(0)?.add(at), &ids)?;
        k.write(k.ptr(1)?.add(at), &logprobs)?;
    }
    Ok(())
}

/// Writes the adjusted logits to scratch.
fn chunks(k: &mut SimKernel<'_>) -> KernelResult {
    adjust(k, |_, _| Ok(Vec::new()))
}

/// The same with a mask.
fn masked_chunks(k: &mut SimKernel<'_>) -> KernelResult {
    adjust(k, |k, n_words| k.read(k.ptr(11)?, n_words))
}

fn adjust(
    k: &mut SimKernel<'_>,
    mask: impl FnOnce(&mut SimKernel<'_>, usize) -> KernelResult<Vec<u32>>,
) -> KernelResult {
    let (n, vocab, width, n_bias) = (k.config().grid[1] as usize, count(k, 8)?, count(k, 9)?, count(k, 10)?);
    // No kernel of a step writes the parameters, so they may be read before the wait.
    let params: Vec<f32> = k.before_wait(|k| k.read(k.ptr(3)?, n * SAMPLE_PARAMS))?;
    let mut logits = read_rows(k, k.ptr(2)?, k.arg(7)?, n, vocab)?;
    let history: Vec<i32> = k.read(k.ptr(4)?, n * width)?;
    let bias_ids: Vec<i32> = k.read(k.ptr(5)?, n * n_bias)?;
    let bias: Vec<f32> = k.read(k.ptr(6)?, n * n_bias)?;
    let n_words = vocab.div_ceil(32);
    let mask = mask(k, n * n_words)?;
    for (row, logits) in logits.chunks_exact_mut(vocab).enumerate() {
        if let Some(mask) = mask.get(row * n_words..(row + 1) * n_words) {
            apply_mask(logits, mask);
        }
        let sampling = Sampling {
            params: &params[row * SAMPLE_PARAMS..][..SAMPLE_PARAMS],
            history: &history[row * width..][..width],
            bias_ids: &bias_ids[row * n_bias..][..n_bias],
            bias: &bias[row * n_bias..][..n_bias],
            seed: 0,
            position: 0,
        };
        apply_bias_and_penalties(logits, &sampling);
        k.write(k.ptr(0)?.add(row as u64 * row_bytes(vocab)), logits)?;
    }
    Ok(())
}

fn select(k: &mut SimKernel<'_>) -> KernelResult {
    let (n, vocab) = (k.config().grid[1] as usize, count(k, 6)?);
    // Read early as in `chunks`.
    let params: Vec<f32> = k.before_wait(|k| k.read(k.ptr(4)?, n * SAMPLE_PARAMS))?;
    let rng: Vec<[u32; 4]> = k.read(k.ptr(5)?, n)?;
    for row in 0..n {
        let mut logits: Vec<f32> = k.read(k.ptr(2)?.add(row as u64 * row_bytes(vocab)), vocab)?;
        let mut params = params[row * SAMPLE_PARAMS..][..SAMPLE_PARAMS].to_vec();
        // The logits already include bias and penalties.
        params[SampleParam::RepeatPenalty as usize] = 1.0;
        params[SampleParam::FrequencyPenalty as usize] = 0.0;
        params[SampleParam::PresencePenalty as usize] = 0.0;
        let [low, high, position, _] = rng[row];
        let seed = u64::from(low) | u64::from(high) << 32;
        let sampling = Sampling { params: &params, history: &[], bias_ids: &[], bias: &[], seed, position };
        let (token, logprob) = sample_row(&mut logits, &sampling);
        k.write_one(k.ptr(0)?.add(4 * row as u64), token as i32)?;
        k.write_one(k.ptr(1)?.add(4 * row as u64), logprob)?;
        let is_large = !matches!(params[SampleParam::TopK as usize] as usize, 1..=SMALL_K);
        if params[SampleParam::Temperature as usize] > 0.0 && is_large {
            k.write(k.ptr(3)?.add(row as u64 * STATE_BYTES), &[0_u8; STATE_BYTES as usize])?;
        }
    }
    Ok(())
}
