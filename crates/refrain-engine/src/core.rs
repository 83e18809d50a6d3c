//! What an engine does, one step at a time: prompts, tokens and positions.

use crate::blocks::{BlockCounts, BlockPool, SharedPool, Table};
use crate::error::EngineError;
use crate::follow::Following;
use crate::ledger::Ledger;
use crate::request::lock;
use crate::runner::{Choice, Runner, StepOut};
use crate::sampling::SamplingRow;
use crate::slots::SlotCounts;
use crate::step::{StepRequest, Want};
use refrain_graph::{Plan, StepKind};
use refrain_models::Model;
use std::borrow::Cow;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// A token that was chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Chosen {
    /// The token.
    pub token: u32,
    /// The logarithm of its probability under the model.
    pub logprob: f32,
}

/// One sequence of one [`Core`]: what has been evaluated, and where its KV lies. Dropping it gives its blocks back.
#[derive(Debug)]
pub struct SequenceState {
    /// Never used twice.
    pub(crate) id: u64,
    pub(crate) tokens: Vec<u32>,
    pub(crate) table: Table,
    /// Positions that it may have.
    pub(crate) context: usize,
    /// How its steps ran.
    pub(crate) ledger: Arc<Mutex<Ledger>>,
    /// The row of a run that it was in last.
    pub(crate) run_row: usize,
}

impl SequenceState {
    pub(crate) fn new(table: Table, context: usize) -> SequenceState {
        static N_OPENED: AtomicU64 = AtomicU64::new(0);
        SequenceState {
            id: N_OPENED.fetch_add(1, Ordering::Relaxed),
            tokens: Vec::new(),
            table,
            context,
            ledger: Arc::default(),
            run_row: 0,
        }
    }

    /// Tokens whose KV is in the cache.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Forgets all tokens and gives their blocks back.
    pub fn clear(&mut self) {
        self.tokens.clear();
        let Ok(()) = self.table.fit(0) else { unreachable!("no position needs no block") };
    }

    /// Makes another sequence hold the same tokens, as far as they fill blocks, in the same blocks.
    /// A recurrent state is that behind all tokens, so nothing of such a sequence is shared.
    pub(crate) fn share_with(&self, to: &mut SequenceState) {
        if self.table.has_slots() {
            return to.clear();
        }
        let n_tokens = self.table.fork(self.tokens.len().min(to.context), &mut to.table);
        to.tokens = self.tokens[..n_tokens].to_vec();
    }

    /// Tokens behind what it holds, for a step.
    pub(crate) fn request<'a>(&'a self, tokens: &'a [u32], want: Want<'a>) -> StepRequest<'a> {
        let (start, table, slots) = (self.tokens.len(), self.table.blocks(), self.table.slot_row());
        StepRequest { tokens, start, table, slots, want }
    }

    /// Notes that a step has evaluated the next tokens. It holds them once they are added.
    pub(crate) fn evaluated(&mut self, n_tokens: usize) {
        let start = self.tokens.len();
        if let Some(slots) = self.table.slots_mut() {
            slots.evaluated(start, start + n_tokens);
        }
    }

    /// Keeps what it holds of a prompt's beginning, and prepares for writing behind it.
    pub(crate) fn begin(&mut self, prompt: &[u32]) {
        let n_held = self.table.write_from(self.n_cached(prompt));
        self.tokens.truncate(n_held);
        if let Some(slots) = self.table.slots_mut() {
            slots.cut(n_held);
        }
    }

    /// How many tokens of a prompt's beginning are in the cache and need not be evaluated again. Never all of them: the
    /// token after the prompt is chosen from what comes out of its last one.
    pub fn n_cached(&self, prompt: &[u32]) -> usize {
        let shared = self.tokens.iter().zip(prompt).take_while(|(a, b)| a == b).count();
        let n_cached = shared.min(prompt.len().saturating_sub(1));
        // A recurrent state goes on behind all of its tokens, behind its last prompt, or from the beginning.
        self.table.most_kept(n_cached, self.tokens.len())
    }
}

/// What an engine does, one step at a time and on the caller's thread.
///
/// An [`Engine`](crate::Engine) drives one from a thread of its own. It is public for those who have such a thread
/// already, and for tests that must see every step.
pub struct Core {
    pub(crate) runner: Box<dyn Runner>,
    blocks: SharedPool,
    pub(crate) ledger: Ledger,
    context: usize,
    out: StepOut,
    /// The steps that feed themselves, if some are under way or could go on.
    pub(crate) following: Option<Following>,
}

impl Core {
    /// A core whose sequences hold at most `context` positions.
    pub fn new(runner: Box<dyn Runner>, context: usize) -> Core {
        let kv = *runner.kv();
        let pool = BlockPool::new(kv.n_blocks, kv.kv_block);
        let blocks = SharedPool::with_slots(pool, kv.max_blocks, kv.n_slots);
        let context = context.min(kv.max_blocks * kv.kv_block);
        let out = StepOut::default();
        Core { runner, blocks, ledger: Ledger::new(), context, out, following: None }
    }

    /// Positions that a sequence has unless it is given others.
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

    /// How every step ran.
    pub fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// Forgets the steps so far.
    pub fn reset_ledger(&mut self) {
        self.ledger = Ledger::new();
    }

    /// The plan of a step over `n_tokens` tokens.
    pub fn plan(&mut self, n_tokens: usize) -> Result<&Plan, EngineError> {
        self.settle();
        self.runner.plan(n_tokens)
    }

    /// The kernels of that plan, each with the (first) step it runs.
    pub fn kernels(&mut self, n_tokens: usize) -> Result<Vec<(usize, Cow<'static, str>)>, EngineError> {
        self.settle();
        self.runner.kernels(n_tokens)
    }

    /// How weights lie on the device, with the bytes of each layout.
    pub fn layouts(&self) -> Vec<(String, usize)> {
        self.runner.layouts()
    }

    /// A new sequence, which takes blocks as it grows: others may have taken the last one.
    pub fn open(&self) -> SequenceState {
        SequenceState::new(self.blocks.table(), self.context)
    }

    /// A new sequence whose blocks are reserved, after the cache has grown where it must.
    pub(crate) fn open_reserved(&mut self, context: usize) -> Result<SequenceState, EngineError> {
        // Other threads reserve meanwhile: what was made for this sequence may be taken by then.
        let table = loop {
            if let Some(table) = self.blocks.reserve(context) {
                break table;
            }
            let (n_blocks, max_blocks, n_slots) = self.blocks.size_for(context);
            self.settle();
            self.runner.resize(n_blocks, max_blocks, n_slots)?;
            self.blocks.extend(n_blocks, max_blocks, n_slots);
        };
        Ok(SequenceState::new(table, context))
    }

    /// How many KV blocks are free, cached and used.
    pub fn block_counts(&self) -> BlockCounts {
        self.blocks.counts()
    }

    /// How many slots of recurrent states are free.
    pub fn slot_counts(&self) -> SlotCounts {
        self.blocks.slot_counts()
    }

    pub(crate) fn blocks(&self) -> &SharedPool {
        &self.blocks
    }

    /// Ends a sequence, as dropping it does.
    pub fn close(&mut self, sequence: SequenceState) {
        drop(sequence);
    }

    /// Brings a sequence to hold exactly `prompt` and chooses the token after it.
    ///
    /// What the sequence already holds of the prompt's beginning is not evaluated again. `go_on` hears how many tokens
    /// of the prompt are in the cache after each piece but the last; when it answers false the prompt is broken off
    /// with [`EngineError::Cancelled`], and what was evaluated stays.
    pub fn prompt(
        &mut self,
        sequence: &mut SequenceState,
        prompt: &[u32],
        row: &mut SamplingRow,
        mut go_on: impl FnMut(usize) -> bool,
    ) -> Result<Chosen, EngineError> {
        self.begin_prompt(sequence, prompt)?;
        loop {
            if let Some(chosen) = self.prompt_piece(sequence, prompt, row)? {
                return Ok(chosen);
            }
            if !go_on(sequence.tokens.len()) {
                return Err(EngineError::Cancelled);
            }
        }
    }

    /// Keeps what a sequence holds of the prompt's beginning, and has blocks for all of it.
    pub(crate) fn begin_prompt(
        &mut self,
        sequence: &mut SequenceState,
        prompt: &[u32],
    ) -> Result<(), EngineError> {
        self.check_sequence(sequence)?;
        check_prompt(self.model(), prompt, sequence.context)?;
        self.settle();
        sequence.begin(prompt);
        sequence.table.fit(prompt.len())?;
        self.restore(sequence)
    }

    /// Evaluates the next piece of a prompt that was begun, and chooses a token after the last one.
    pub(crate) fn prompt_piece(
        &mut self,
        sequence: &mut SequenceState,
        prompt: &[u32],
        row: &mut SamplingRow,
    ) -> Result<Option<Chosen>, EngineError> {
        self.settle();
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

    /// Evaluates tokens behind what a sequence holds, at most [`Core::max_tokens`] of them, and gives the logits after
    /// the last `n_rows`. With no rows it only fills the cache.
    pub fn logits(
        &mut self,
        sequence: &mut SequenceState,
        tokens: &[u32],
        n_rows: usize,
    ) -> Result<&[f32], EngineError> {
        self.check_sequence(sequence)?;
        self.check_logits(sequence, tokens, n_rows)?;
        self.settle();
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

    /// As [`Core::logits`], into memory that the caller brings: it takes the place of the core's own.
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

    /// Keeps the recurrent state behind a prompt, in a sequence that has room for that: a conversation whose answer is told
    /// differently goes on from here.
    pub(crate) fn keep_state(&mut self, sequence: &mut SequenceState) -> Result<(), EngineError> {
        let n_tokens = sequence.tokens.len();
        match sequence.table.slots_mut().and_then(|slots| slots.keep(n_tokens)) {
            Some(copy) => self.runner.copy_slot(copy),
            None => Ok(()),
        }
    }

    /// Puts a kept recurrent state back, and evaluates what a sequence holds again where its recurrent state has gone further: steps were sent ahead that nobody
    /// took. Nothing may be under way, and the sequence has its blocks.
    pub(crate) fn restore(&mut self, sequence: &mut SequenceState) -> Result<(), EngineError> {
        let n_tokens = sequence.tokens.len();
        if let Some(copy) = sequence.table.slots_mut().and_then(|slots| slots.resume(n_tokens)) {
            self.runner.copy_slot(copy)?;
        }
        if sequence.table.holds_state(n_tokens) {
            return Ok(());
        }
        let tokens = std::mem::take(&mut sequence.tokens);
        for piece in tokens.chunks(self.max_tokens()) {
            let request = sequence.request(piece, Want::Nothing);
            if let Err(error) = self.step(StepKind::Prompt, &[request], &[&sequence.ledger]) {
                // It holds what it did, and still without its state.
                sequence.tokens = tokens;
                return Err(error);
            }
            sequence.evaluated(piece.len());
            sequence.tokens.extend_from_slice(piece);
        }
        Ok(())
    }

    /// The most tokens that one step takes.
    pub fn max_tokens(&self) -> usize {
        self.runner.max_tokens()
    }

    /// The most sequences that one step takes.
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

    /// Runs one step of any number of sequences, enters it in the ledger of all steps and in theirs, and says how long it
    /// took. Nothing may be under way that was sent ahead.
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
                // Whose fault a step of several is shows when they run one by one.
                if let ([of], [_]) = (of, requests) {
                    lock(of).failed(kind, took, &reason);
                }
                Err(error)
            }
        }
    }

    /// The choices of the last step, one for each request.
    pub(crate) fn take_choices(
        &mut self,
    ) -> impl Iterator<Item = Option<Result<Choice, EngineError>>> + use<> {
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
