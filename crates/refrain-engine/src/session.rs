//! Prompts, tokens and positions.

use crate::blocks::{BlockPool, SharedPool, Table};
use crate::error::EngineError;
use crate::follow::Following;
use crate::ledger::Ledger;
use crate::runner::{Runner, StepOut, StepRequest, Want};
use crate::sampling::SamplingRow;
use refrain_graph::{Plan, StepKind};
use refrain_models::Model;
use std::borrow::Cow;
use std::time::Instant;

/// A token that was chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Chosen {
    /// The token.
    pub token: u32,
    /// The logarithm of its probability under the model.
    pub logprob: f32,
}

/// One sequence of one engine: what has been evaluated, and where its KV lies. Dropping it gives its blocks back.
#[derive(Debug)]
pub struct Session {
    /// Never used twice by an engine.
    pub(crate) id: u64,
    pub(crate) tokens: Vec<u32>,
    pub(crate) table: Table,
}

impl Session {
    /// Tokens whose KV is in the cache.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }
}

/// A model on a device, with the cache its sessions share.
pub struct Engine {
    pub(crate) runner: Box<dyn Runner>,
    blocks: SharedPool,
    pub(crate) ledger: Ledger,
    pub(crate) context: usize,
    out: StepOut,
    /// The steps that feed themselves, if some are under way or could go on.
    pub(crate) following: Option<Following>,
    n_opened: std::cell::Cell<u64>,
}

impl Engine {
    /// An engine whose sessions hold at most `context` positions.
    pub fn new(runner: Box<dyn Runner>, context: usize) -> Engine {
        let kv = *runner.kv();
        let blocks = SharedPool::new(BlockPool::new(kv.n_blocks, kv.kv_block));
        let context = context.min(kv.max_blocks * kv.kv_block);
        let out = StepOut::default();
        Engine { runner, blocks, ledger: Ledger::new(), context, out, following: None, n_opened: 0.into() }
    }

    /// Positions a session may have.
    pub fn context(&self) -> usize {
        self.context
    }

    /// The model.
    pub fn model(&self) -> &Model {
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

    /// A new session.
    pub fn open(&self) -> Session {
        self.n_opened.set(self.n_opened.get() + 1);
        Session { id: self.n_opened.get(), tokens: Vec::new(), table: self.blocks.table() }
    }

    /// Ends a session, as dropping it does.
    pub fn close(&mut self, session: Session) {
        drop(session);
    }

    /// Brings a session to hold exactly `prompt` and chooses the token after it.
    ///
    /// What the session already holds of the prompt's beginning is not evaluated again. `go_on` hears how many tokens
    /// of the prompt are in the cache after each piece but the last; when it answers false the prompt is broken off
    /// with [`EngineError::Cancelled`], and what was evaluated stays.
    pub fn prompt(
        &mut self,
        session: &mut Session,
        prompt: &[u32],
        row: &mut SamplingRow,
        mut go_on: impl FnMut(usize) -> bool,
    ) -> Result<Chosen, EngineError> {
        self.check_session(session)?;
        self.check_prompt(prompt)?;
        self.settle();
        let shared = session.tokens.iter().zip(prompt).take_while(|(a, b)| a == b).count();
        // The last token is always evaluated: the next one is chosen from what comes out of it.
        session.tokens.truncate(shared.min(prompt.len() - 1));
        session.table.fit(prompt.len())?;
        row.advance(prompt.len(), prompt);
        loop {
            let start = session.tokens.len();
            let end = prompt.len().min(start + self.runner.max_tokens());
            let is_last = end == prompt.len();
            let want = if is_last { Want::Sample(row) } else { Want::Nothing };
            let request =
                StepRequest { tokens: &prompt[start..end], start, table: session.table.blocks(), want };
            Self::step(&mut *self.runner, &mut self.ledger, &mut self.out, StepKind::Prompt, &request)?;
            session.tokens.extend_from_slice(&prompt[start..end]);
            if is_last {
                return self.chosen();
            }
            if !go_on(end) {
                return Err(EngineError::Cancelled);
            }
        }
    }

    /// Evaluates tokens behind what a session holds, at most [`Engine::max_tokens`] of them, and gives the logits after
    /// the last `n_rows`. With no rows it only fills the cache.
    pub fn logits(
        &mut self,
        session: &mut Session,
        tokens: &[u32],
        n_rows: usize,
    ) -> Result<&[f32], EngineError> {
        self.check_session(session)?;
        self.check_logits(session.tokens.len(), tokens, n_rows)?;
        self.settle();
        let start = session.tokens.len();
        session.table.fit(start + tokens.len())?;
        let want = if n_rows == 0 { Want::Nothing } else { Want::Logits { n_rows } };
        let request = StepRequest { tokens, start, table: session.table.blocks(), want };
        Self::step(&mut *self.runner, &mut self.ledger, &mut self.out, StepKind::Prompt, &request)?;
        session.tokens.extend_from_slice(tokens);
        Ok(if n_rows == 0 { &[] } else { &self.out.logits })
    }

    /// The most tokens that one step takes.
    pub fn max_tokens(&self) -> usize {
        self.runner.max_tokens()
    }

    pub(crate) fn check_session(&self, session: &Session) -> Result<(), EngineError> {
        match session.table.belongs_to(&self.blocks) {
            true => Ok(()),
            false => Err(EngineError::ForeignSession),
        }
    }

    fn check_logits(&self, start: usize, tokens: &[u32], n_rows: usize) -> Result<(), EngineError> {
        let (n_tokens, context, max_tokens) = (tokens.len(), self.context, self.max_tokens());
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
        self.check_tokens(tokens)
    }

    fn check_prompt(&self, prompt: &[u32]) -> Result<(), EngineError> {
        if prompt.is_empty() {
            return Err(EngineError::EmptyPrompt);
        }
        if prompt.len() > self.context {
            return Err(EngineError::PromptTooLong { n_tokens: prompt.len(), context: self.context });
        }
        self.check_tokens(prompt)
    }

    pub(crate) fn check_tokens(&self, tokens: &[u32]) -> Result<(), EngineError> {
        let vocab = self.model().config().n_vocab;
        match tokens.iter().find(|&&t| t as usize >= vocab) {
            Some(&token) => Err(EngineError::UnknownToken { token, vocab }),
            None => Ok(()),
        }
    }

    pub(crate) fn non_finite(&self, position: usize) -> EngineError {
        EngineError::NonFinite { position, kv_dtype: self.runner.kv().dtype }
    }

    fn chosen(&self) -> Result<Chosen, EngineError> {
        let Some((token, logprob)) = self.out.chosen else { unreachable!("the step was asked to sample") };
        Ok(Chosen { token, logprob })
    }

    fn step(
        runner: &mut dyn Runner,
        ledger: &mut Ledger,
        out: &mut StepOut,
        kind: StepKind,
        request: &StepRequest<'_>,
    ) -> Result<(), EngineError> {
        let began = Instant::now();
        match runner.step(request, out) {
            Ok(ran) => {
                ledger.ran(kind, request.tokens.len(), began.elapsed(), &ran);
                Ok(())
            }
            Err(error) => {
                ledger.failed(kind, began.elapsed(), &error.reason());
                Err(error)
            }
        }
    }
}
