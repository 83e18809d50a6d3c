//! The engine's work, one step at a time: prompts, tokens and positions.

use crate::blocks::{BlockCounts, BlockPool, BlockTable, SharedPool};
use crate::decode::ActiveRun;
use crate::error::EngineError;
use crate::ledger::Ledger;
use crate::request::{AdapterId, lock};
use crate::runner::{Runner, StepOut, TokenChoice};
use crate::sampling::SamplingRow;
use crate::slots::SlotCounts;
use crate::step::{StepRequest, Want};
use refrain_graph::{Plan, StepKind};
use refrain_models::Model;
use std::borrow::Cow;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// A chosen token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Chosen {
    /// The token.
    pub token: u32,
    /// Its log-probability under the model.
    pub logprob: f32,
}

/// State of one sequence of a [`Core`]: its evaluated tokens and its KV blocks. Dropping it releases the
/// blocks.
#[derive(Debug)]
pub struct SequenceState {
    /// Unique in the process; never reused.
    pub(crate) id: u64,
    pub(crate) tokens: Vec<u32>,
    pub(crate) table: BlockTable,
    /// Its adapter, if it has one: KV depends on it, so it never changes.
    pub(crate) adapter: Option<AdapterId>,
    /// Maximum number of positions.
    pub(crate) context: usize,
    /// How its steps ran.
    pub(crate) ledger: Arc<Mutex<Ledger>>,
    /// The row of the last run it took part in.
    pub(crate) run_row: usize,
}

impl SequenceState {
    pub(crate) fn new(mut table: BlockTable, context: usize, adapter: Option<AdapterId>) -> SequenceState {
        static N_OPENED: AtomicU64 = AtomicU64::new(0);
        // Sequences of different adapters have nothing in common.
        table.set_root(adapter.map_or(0, |AdapterId(id)| 1 + u64::from(id)));
        SequenceState {
            id: N_OPENED.fetch_add(1, Ordering::Relaxed),
            tokens: Vec::new(),
            table,
            adapter,
            context,
            ledger: Arc::default(),
            run_row: 0,
        }
    }

    /// Tokens whose KV is in the cache.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Forgets all tokens and releases their blocks.
    pub fn clear(&mut self) {
        self.tokens.clear();
        let Ok(()) = self.table.fit(0) else { unreachable!("zero positions need no blocks") };
    }

    /// Makes another sequence share this one's full blocks and their tokens. A recurrent state covers all
    /// tokens, so a sequence with one shares nothing.
    pub(crate) fn share_with(&self, to: &mut SequenceState) {
        if self.table.has_slots() || self.adapter != to.adapter {
            return to.clear();
        }
        let n_tokens = self.table.fork(self.tokens.len().min(to.context), &mut to.table);
        to.tokens = self.tokens[..n_tokens].to_vec();
    }

    /// Step request for tokens that follow those it holds.
    pub(crate) fn request<'a>(&'a self, tokens: &'a [u32], want: Want<'a>) -> StepRequest<'a> {
        let (start, table, slots) = (self.tokens.len(), self.table.blocks(), self.table.slot_row());
        StepRequest { tokens, start, table, slots, adapter: self.adapter, want }
    }

    /// Records that a step has evaluated the next tokens. The caller appends them to `tokens`.
    pub(crate) fn evaluated(&mut self, n_tokens: usize) {
        let start = self.tokens.len();
        if let Some(slots) = self.table.slots_mut() {
            slots.evaluated(start, start + n_tokens);
        }
    }

    /// Keeps the cached prefix of a prompt and prepares for writing after it.
    pub(crate) fn begin(&mut self, prompt: &[u32]) {
        let n_held = self.table.write_from(self.n_cached(prompt));
        self.tokens.truncate(n_held);
        if let Some(slots) = self.table.slots_mut() {
            slots.cut(n_held);
        }
    }

    /// Number of leading prompt tokens that are cached and need not be evaluated again. Never all of them:
    /// the token after the prompt is chosen from the output of its last one.
    pub fn n_cached(&self, prompt: &[u32]) -> usize {
        let shared = self.tokens.iter().zip(prompt).take_while(|(a, b)| a == b).count();
        let n_cached = shared.min(prompt.len().saturating_sub(1));
        // A recurrent state can continue after all of its tokens, after its last prompt, or from the start.
        self.table.max_kept(n_cached, self.tokens.len())
    }
}

/// The engine's work, one step at a time on the caller's thread.
///
/// An [`Engine`](crate::Engine) drives one from its own thread. It is public for callers that already have
/// such a thread, and for tests that must observe every step.
pub struct Core {
    pub(crate) runner: Box<dyn Runner>,
    blocks: SharedPool,
    pub(crate) ledger: Ledger,
    context: usize,
    pub(crate) out: StepOut,
    /// The current run of self-feeding steps, if steps are in flight or the run can continue.
    pub(crate) active_run: Option<ActiveRun>,
}

impl Core {
    /// A core whose sequences hold at most `context` positions by default.
    pub fn new(runner: Box<dyn Runner>, context: usize) -> Core {
        let kv = *runner.kv();
        let pool = BlockPool::new(kv.n_blocks, kv.kv_block);
        let blocks = SharedPool::with_slots(pool, kv.max_blocks, kv.n_slots)
            .windowed(runner.model().attention_window());
        let context = context.min(kv.max_blocks * kv.kv_block);
        let out = StepOut::default();
        Core { runner, blocks, ledger: Ledger::new(), context, out, active_run: None }
    }

    /// Default number of positions per sequence.
    pub fn context(&self) -> usize {
        self.context
    }

    /// The model.
    pub fn model(&self) -> &Arc<Model> {
        self.runner.model()
    }

    /// Name of the backend.
    pub fn backend(&self) -> &'static str {
        self.runner.backend()
    }

    /// Records of every step.
    pub fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// Resets the ledger.
    pub fn reset_ledger(&mut self) {
        self.ledger = Ledger::new();
    }

    /// Plan of a step over `n_tokens` tokens.
    pub fn plan(&mut self, n_tokens: usize) -> Result<&Plan, EngineError> {
        self.drain();
        self.runner.plan(n_tokens)
    }

    /// Kernels of that plan, each with the index of the (first) step it runs.
    pub fn kernels(&mut self, n_tokens: usize) -> Result<Vec<(usize, Cow<'static, str>)>, EngineError> {
        self.drain();
        self.runner.kernels(n_tokens)
    }

    /// Layouts of the weights on the device, with the bytes of each.
    pub fn layouts(&self) -> Vec<(String, usize)> {
        self.runner.layouts()
    }

    /// A new sequence that allocates blocks as it grows; it fails if others have taken them all.
    pub fn open(&self) -> SequenceState {
        self.open_with(None)
    }

    /// Like [`Core::open`], with an adapter of the model.
    pub fn open_with(&self, adapter: Option<AdapterId>) -> SequenceState {
        SequenceState::new(self.blocks.table(), self.context, adapter)
    }

    /// A new sequence with reserved blocks; grows the cache if necessary.
    pub(crate) fn open_reserved(
        &mut self,
        context: usize,
        adapter: Option<AdapterId>,
    ) -> Result<SequenceState, EngineError> {
        // Other threads reserve concurrently and may take the blocks that were just added.
        let table = loop {
            if let Some(table) = self.blocks.reserve(context) {
                break table;
            }
            let (n_blocks, max_blocks, n_slots) = self.blocks.size_for(context);
            self.drain();
            self.runner.resize(n_blocks, max_blocks, n_slots)?;
            self.blocks.extend(n_blocks, max_blocks, n_slots);
        };
        Ok(SequenceState::new(table, context, adapter))
    }

    /// Counts of free, cached and used KV blocks.
    pub fn block_counts(&self) -> BlockCounts {
        self.blocks.counts()
    }

    /// Number of free slots of recurrent states.
    pub fn slot_counts(&self) -> SlotCounts {
        self.blocks.slot_counts()
    }

    pub(crate) fn blocks(&self) -> &SharedPool {
        &self.blocks
    }

    /// Ends a sequence; the same as dropping it.
    pub fn close(&mut self, sequence: SequenceState) {
        drop(sequence);
    }

    /// Makes a sequence hold exactly `prompt` and chooses the token after it.
    ///
    /// The prefix that the sequence already holds is not evaluated again. After each chunk except the last,
    /// `go_on` receives the number of prompt tokens in the cache. If it returns false, the prompt is aborted
    /// with [`EngineError::Cancelled`]; the chunks evaluated so far stay cached.
    pub fn prompt(
        &mut self,
        sequence: &mut SequenceState,
        prompt: &[u32],
        row: &mut SamplingRow,
        mut go_on: impl FnMut(usize) -> bool,
    ) -> Result<Chosen, EngineError> {
        self.begin_prompt(sequence, prompt)?;
        loop {
            if let Some(chosen) = self.prompt_chunk(sequence, prompt, row)? {
                return Ok(chosen);
            }
            if !go_on(sequence.tokens.len()) {
                return Err(EngineError::Cancelled);
            }
        }
    }

    /// Keeps the cached prefix of the prompt and allocates blocks for all of it.
    pub(crate) fn begin_prompt(
        &mut self,
        sequence: &mut SequenceState,
        prompt: &[u32],
    ) -> Result<(), EngineError> {
        self.check_sequence(sequence)?;
        check_prompt(self.model(), prompt, sequence.context)?;
        self.drain();
        sequence.begin(prompt);
        sequence.table.fit(prompt.len())?;
        self.restore(sequence)
    }

    /// Evaluates the next chunk of a started prompt, and chooses a token after the last chunk.
    pub(crate) fn prompt_chunk(
        &mut self,
        sequence: &mut SequenceState,
        prompt: &[u32],
        row: &mut SamplingRow,
    ) -> Result<Option<Chosen>, EngineError> {
        self.drain();
        row.advance(prompt.len(), prompt);
        let start = sequence.tokens.len();
        let end = prompt.len().min(start + self.runner.max_tokens());
        let is_last = end == prompt.len();
        let want = if is_last { Want::Sample(row) } else { Want::Nothing };
        let request = sequence.request(&prompt[start..end], want);
        self.step(StepKind::Prompt, &[request], &[&sequence.ledger])?;
        sequence.evaluated(end - start);
        let choice = self.take_choices().next().flatten().transpose()?;
        sequence.tokens.extend_from_slice(&prompt[start..end]);
        Ok(choice.map(|choice| choice.chosen))
    }

    /// Evaluates tokens after those a sequence holds, at most [`Core::max_tokens`] of them, and returns the
    /// logits of the last `n_rows`. With 0 rows it only fills the cache.
    pub fn logits(
        &mut self,
        sequence: &mut SequenceState,
        tokens: &[u32],
        n_rows: usize,
    ) -> Result<&[f32], EngineError> {
        self.check_sequence(sequence)?;
        self.check_logits(sequence, tokens, n_rows)?;
        self.drain();
        let start = sequence.tokens.len();
        sequence.table.fit(start + tokens.len())?;
        self.restore(sequence)?;
        let want = if n_rows == 0 { Want::Nothing } else { Want::Logits { n_rows } };
        let request = sequence.request(tokens, want);
        self.step(StepKind::Prompt, &[request], &[&sequence.ledger])?;
        sequence.evaluated(tokens.len());
        sequence.tokens.extend_from_slice(tokens);
        Ok(if n_rows == 0 { &[] } else { &self.out.logits })
    }

    /// Like [`Core::logits`], but writes into the caller's buffer instead of the core's own.
    pub(crate) fn logits_into(
        &mut self,
        sequence: &mut SequenceState,
        tokens: &[u32],
        n_rows: usize,
        into: &mut Vec<f32>,
    ) -> Result<(), EngineError> {
        std::mem::swap(&mut self.out.logits, into);
        let done = self.logits(sequence, tokens, n_rows).map(|_| ());
        std::mem::swap(&mut self.out.logits, into);
        if n_rows == 0 {
            into.clear();
        }
        done
    }

    /// Saves the recurrent state after a prompt, if the sequence has a slot for it: a conversation whose
    /// answer is regenerated or edited continues from there.
    pub(crate) fn keep_state(&mut self, sequence: &mut SequenceState) -> Result<(), EngineError> {
        let n_tokens = sequence.tokens.len();
        match sequence.table.slots_mut().and_then(|slots| slots.keep(n_tokens)) {
            Some(copy) => self.runner.copy_slot(copy),
            None => Ok(()),
        }
    }

    /// Restores a saved recurrent state. If the recurrent state has advanced past the sequence, because
    /// launched steps were discarded, evaluates the sequence's tokens again. No step may be in flight, and
    /// the sequence must have its blocks.
    pub(crate) fn restore(&mut self, sequence: &mut SequenceState) -> Result<(), EngineError> {
        let n_tokens = sequence.tokens.len();
        if let Some(copy) = sequence.table.slots_mut().and_then(|slots| slots.resume(n_tokens)) {
            self.runner.copy_slot(copy)?;
        }
        if sequence.table.holds_state(n_tokens) {
            return Ok(());
        }
        let tokens = std::mem::take(&mut sequence.tokens);
        for chunk in tokens.chunks(self.max_tokens()) {
            let request = sequence.request(chunk, Want::Nothing);
            if let Err(error) = self.step(StepKind::Prompt, &[request], &[&sequence.ledger]) {
                // It keeps its tokens, but still lacks its state.
                sequence.tokens = tokens;
                return Err(error);
            }
            sequence.evaluated(chunk.len());
            sequence.tokens.extend_from_slice(chunk);
        }
        Ok(())
    }

    /// Maximum number of tokens per step.
    pub fn max_tokens(&self) -> usize {
        self.runner.max_tokens()
    }

    /// Maximum number of sequences per step.
    pub fn max_seqs(&self) -> usize {
        self.runner.max_seqs()
    }

    pub(crate) fn check_sequence(&self, sequence: &SequenceState) -> Result<(), EngineError> {
        match sequence.table.belongs_to(&self.blocks) {
            true => Ok(()),
            false => Err(EngineError::ForeignSequence),
        }
    }

    fn check_logits(
        &self,
        sequence: &SequenceState,
        tokens: &[u32],
        n_rows: usize,
    ) -> Result<(), EngineError> {
        let (start, context) = (sequence.tokens.len(), sequence.context);
        let (n_tokens, max_tokens) = (tokens.len(), self.max_tokens());
        if n_tokens == 0 {
            return Err(EngineError::EmptyPrompt);
        }
        if n_tokens > max_tokens {
            return Err(EngineError::StepTooLarge { n_tokens, max_tokens });
        }
        if n_rows > n_tokens {
            return Err(EngineError::TooManyRows { n_rows, n_tokens });
        }
        if start + n_tokens > context {
            return Err(EngineError::PromptTooLong { n_tokens: start + n_tokens, context });
        }
        check_tokens(self.model(), tokens)
    }

    /// Runs one step over any number of sequences, records it in the core's ledger and in theirs, and returns
    /// its duration. No step that was launched ahead may be in flight.
    pub(crate) fn step(
        &mut self,
        kind: StepKind,
        requests: &[StepRequest<'_>],
        of: &[&Arc<Mutex<Ledger>>],
    ) -> Result<Duration, EngineError> {
        let began = Instant::now();
        let ran = self.runner.step(requests, &mut self.out);
        let took = began.elapsed();
        match ran {
            Ok(ran) => {
                let n_tokens = requests.iter().map(|r| r.tokens.len()).sum();
                self.ledger.ran(kind, n_tokens, took, &ran);
                for (request, of) in requests.iter().zip(of) {
                    lock(of).ran(kind, request.tokens.len(), took, &ran);
                }
                Ok(took)
            }
            Err(error) => {
                let reason = error.reason();
                self.ledger.failed(kind, took, &reason);
                // Which request caused the failure of a shared step shows when they run one by one.
                if let ([of], [_]) = (of, requests) {
                    lock(of).failed(kind, took, &reason);
                }
                Err(error)
            }
        }
    }

    /// The choices of the last step, one per request.
    pub(crate) fn take_choices(
        &mut self,
    ) -> impl Iterator<Item = Option<Result<TokenChoice, EngineError>>> + use<> {
        std::mem::take(&mut self.out.choices).into_iter()
    }
}

pub(crate) fn check_prompt(model: &Model, prompt: &[u32], context: usize) -> Result<(), EngineError> {
    if prompt.is_empty() {
        return Err(EngineError::EmptyPrompt);
    }
    if prompt.len() > context {
        return Err(EngineError::PromptTooLong { n_tokens: prompt.len(), context });
    }
    check_tokens(model, prompt)
}

pub(crate) fn check_tokens(model: &Model, tokens: &[u32]) -> Result<(), EngineError> {
    let vocab = model.config().n_vocab;
    match tokens.iter().find(|&&t| t as usize >= vocab) {
        Some(&token) => Err(EngineError::UnknownToken { token, vocab }),
        None => Ok(()),
    }
}
