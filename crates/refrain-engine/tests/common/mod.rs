//! A runner that logs steps instead of computing.
#![allow(dead_code)] // Each test file uses a part of it.

use refrain_engine::{
    Chosen, Core, DecodeProgress, Engine, EngineError, EngineOptions, MAX_TOP, RunMember, RunShape, Runner,
    SamplingRow, SlotCopy, StepOut, StepRequest, TokenChoice, VerifyCost, Want,
};
use refrain_formats::ModelFiles;
use refrain_graph::{Committed, CommittedStep, LateRows, Plan, Ran, Reason, RunError, StepFlags};
use refrain_models::{KvSpec, Model};
use refrain_tensor::DType;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

pub(crate) const VOCAB: usize = 128;
pub(crate) const KV_BLOCK: usize = 4;

/// A step as the runner received it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Seen {
    pub(crate) tokens: Vec<u32>,
    pub(crate) start: usize,
    pub(crate) table: Vec<u32>,
}

/// State shared by the runner and its test.
#[derive(Clone, Default)]
pub(crate) struct Script {
    log: Arc<Mutex<Vec<Seen>>>,
    failures: Arc<Mutex<Vec<(usize, EngineError)>>>,
    ahead: Arc<AtomicUsize>,
    /// Locked while a step runs.
    gate: Arc<Mutex<()>>,
    fixed: Arc<AtomicBool>,
    poison: Arc<AtomicUsize>,
    breaks_on: Arc<AtomicUsize>,
}

impl Script {
    /// Blocks all steps while the guard lives.
    pub(crate) fn block(&self) -> MutexGuard<'_, ()> {
        self.gate.lock().unwrap()
    }

    /// Makes the cache unable to grow.
    pub(crate) fn fix_size(&self) {
        self.fixed.store(true, Ordering::Relaxed);
    }

    /// Makes steps that evaluate this token fail.
    pub(crate) fn break_on(&self, token: u32) {
        self.breaks_on.store(token as usize, Ordering::Relaxed);
    }

    /// Makes the logits after this token non-finite.
    pub(crate) fn poison(&self, token: u32) {
        self.poison.store(token as usize, Ordering::Relaxed);
    }

    /// Waits until `n_steps` steps have begun.
    pub(crate) fn wait_for(&self, n_steps: usize) {
        while self.seen().len() < n_steps {
            std::thread::yield_now();
        }
    }

    /// All steps so far.
    pub(crate) fn seen(&self) -> Vec<Seen> {
        self.log.lock().unwrap().clone()
    }

    /// Sets how many steps may be in flight at once.
    pub(crate) fn allow(&self, ahead: usize) {
        self.ahead.store(ahead, Ordering::Relaxed);
    }

    /// Makes a step fail: 0 is the next one.
    pub(crate) fn fail_after(&self, n_steps: usize, error: impl Into<EngineError>) {
        let step = self.log.lock().unwrap().len() + n_steps;
        self.failures.lock().unwrap().push((step, error.into()));
    }
}

struct FakeRunner {
    model: Arc<Model>,
    kv: KvSpec,
    max_tokens: usize,
    script: Script,
    run: Option<FakeRun>,
    /// Tokens covered by each slot, if there are slots.
    slots: Vec<Vec<u32>>,
}

/// A run of the fake runner: steps happen when they are launched.
struct FakeRun {
    rows: Vec<Option<FakeRow>>,
    most: usize,
    ready: std::collections::VecDeque<Result<CommittedStep, EngineError>>,
    progress: DecodeProgress,
}

struct FakeRow {
    next: u32,
    position: usize,
    /// One past its last position.
    end_at: usize,
    row: SamplingRow,
    end: Vec<u32>,
    table: Vec<u32>,
    slots: [i32; 2],
}

impl FakeRow {
    fn new(with: &RunMember<'_>) -> FakeRow {
        let Want::Sample(row) = with.request.want else { panic!("a row without a choice") };
        let position = with.request.start;
        FakeRow {
            next: with.request.tokens[0],
            position,
            end_at: with.n_positions.min(position.saturating_add(with.n_choices)),
            row: row.clone(),
            end: with.end.to_vec(),
            table: with.request.table.to_vec(),
            slots: with.request.slots,
        }
    }
}

pub(crate) fn tiny_model() -> Arc<Model> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../refrain-models/tests/goldens/llama");
    Arc::new(Model::load(&ModelFiles::open(folder).unwrap()).unwrap())
}

/// A core whose model predicts the next higher token, and the script it follows.
pub(crate) fn core(context: usize, max_tokens: usize) -> (Core, Script) {
    let (runner, script) = runner(context, max_tokens);
    (Core::new(runner, context), script)
}

/// The same with a thread of its own.
pub(crate) fn engine(context: usize, max_tokens: usize) -> (Engine, Script) {
    let (runner, script) = runner(context, max_tokens);
    (Engine::new(runner, EngineOptions { max_requests: 4 }).unwrap(), script)
}

/// An engine for requests without sequences of their own, which share `n_positions`.
pub(crate) fn shared_engine(n_positions: usize, max_tokens: usize, max_requests: usize) -> (Engine, Script) {
    let (runner, script) = runner(n_positions, max_tokens);
    (Engine::new(runner, EngineOptions { max_requests }).unwrap(), script)
}

/// Like [`shared_engine`], for a model with `n_slots` recurrent states.
pub(crate) fn recurrent_engine(n_positions: usize, max_tokens: usize, n_slots: usize) -> (Engine, Script) {
    let (runner, script) = runner_with_slots(n_positions, max_tokens, n_slots);
    (Engine::new(runner, EngineOptions { max_requests: 64 }).unwrap(), script)
}

/// Like [`core`], for a model with `n_slots` recurrent states.
pub(crate) fn recurrent_core(context: usize, max_tokens: usize, n_slots: usize) -> (Core, Script) {
    let (runner, script) = runner_with_slots(context, max_tokens, n_slots);
    (Core::new(runner, context), script)
}

fn runner(context: usize, max_tokens: usize) -> (Box<dyn Runner>, Script) {
    runner_with_slots(context, max_tokens, 0)
}

fn runner_with_slots(context: usize, max_tokens: usize, n_slots: usize) -> (Box<dyn Runner>, Script) {
    let script = Script::default();
    let max_blocks = context.div_ceil(KV_BLOCK);
    let kv = KvSpec { n_blocks: max_blocks, kv_block: KV_BLOCK, max_blocks, n_slots, dtype: DType::F16 };
    let runner = FakeRunner {
        model: tiny_model(),
        kv,
        max_tokens,
        script: script.clone(),
        run: None,
        slots: vec![Vec::new(); n_slots],
    };
    (Box::new(runner), script)
}

impl FakeRunner {
    /// Does what a recurrent layer does with slots. A state that does not cover exactly the preceding tokens
    /// is a bug in the engine.
    fn recur(&mut self, request: &StepRequest<'_>) {
        if self.slots.is_empty() {
            return assert_eq!(request.slots, [-1; 2]);
        }
        let [read, write] = [0, 1].map(|i| request.slots[(request.start + i) % 2] as usize);
        assert!(read != write, "{:?}", request.slots);
        let mut state = if request.start == 0 { Vec::new() } else { self.slots[read].clone() };
        assert_eq!(state.len(), request.start, "slot {read} holds {state:?}");
        state.extend_from_slice(request.tokens);
        // All sequences consist of ascending tokens.
        assert!(state.windows(2).all(|pair| pair[0] < pair[1]), "slot {read}: {state:?}");
        self.slots[write] = state;
    }
}

impl Runner for FakeRunner {
    fn backend(&self) -> &'static str {
        "fake"
    }

    fn step(&mut self, requests: &[StepRequest<'_>], out: &mut StepOut) -> Result<Ran, EngineError> {
        drop(self.script.gate.lock());
        let mut log = self.script.log.lock().unwrap();
        let step = log.len();
        // One entry per request.
        log.extend(requests.iter().map(|request| {
            let (tokens, table) = (request.tokens.to_vec(), request.table.to_vec());
            Seen { tokens, start: request.start, table }
        }));
        let mut failures = self.script.failures.lock().unwrap();
        if let Some(i) = failures.iter().position(|(at, _)| (step..log.len()).contains(at)) {
            let error = failures.swap_remove(i).1;
            assert!(!matches!(error, EngineError::NoFeedback), "the runner is broken");
            return Err(error);
        }
        let breaks_on = self.script.breaks_on.load(Ordering::Relaxed) as u32;
        if breaks_on > 0 && requests.iter().any(|request| request.tokens.contains(&breaks_on)) {
            let source = Box::new(std::io::Error::other("the cable is cut"));
            return Err(RunError::Backend { backend: "fake", label: "blk.0.attn_q".into(), source }.into());
        }
        drop((log, failures));
        requests.iter().for_each(|request| self.recur(request));
        let poison = self.script.poison.load(Ordering::Relaxed) as u32;
        out.choices.clear();
        out.verified.clear();
        for request in requests {
            let after = |token: u32, row: &SamplingRow, position: usize| {
                if token == poison && poison > 0 {
                    return Err(EngineError::NonFinite { position, kv_dtype: DType::F16 });
                }
                let next = (token + 1) % VOCAB as u32;
                // The token after the next one if the next is forbidden.
                let mut biases = row.bias_ids.iter().zip(&row.bias);
                let is_forbidden = biases.any(|(&id, &bias)| id == next as i32 && bias == f32::NEG_INFINITY);
                let chosen = Chosen { token: next + u32::from(is_forbidden), logprob: -1.0 };
                let top = (0..row.n_top as u32).map(|i| (i, -(i as f32))).collect();
                Ok(TokenChoice { chosen, top })
            };
            out.verified.push(match request.want {
                Want::Verify(rows) => {
                    assert_eq!(rows.len(), request.tokens.len());
                    let n_covered = request.table.len() * KV_BLOCK;
                    assert!(n_covered >= request.start + rows.len(), "{n_covered} of {}", request.start);
                    let rows = (request.start..).zip(request.tokens.iter().zip(rows));
                    rows.map(|(position, (&token, row))| after(token, row, position)).collect()
                }
                Want::Nothing | Want::Logits { .. } | Want::Sample(_) => Vec::new(),
            });
            out.choices.push(match request.want {
                Want::Verify(_) => None,
                Want::Nothing => None,
                Want::Logits { n_rows } => {
                    out.logits = vec![0.0; n_rows * VOCAB];
                    None
                }
                Want::Sample(_) if request.tokens.contains(&poison) && poison > 0 => {
                    let (position, kv_dtype) = (request.start + request.tokens.len() - 1, DType::F16);
                    Some(Err(EngineError::NonFinite { position, kv_dtype }))
                }
                Want::Sample(row) => {
                    let position = request.start + request.tokens.len() - 1;
                    Some(after(*request.tokens.last().unwrap(), row, position))
                }
            });
        }
        Ok(Ran::Eager(Reason::NoGraphsHere { backend: "fake" }))
    }

    fn run_shape(&mut self, wanted: RunShape) -> RunShape {
        // Some sizes leave free rows.
        let n_seqs = wanted.n_rows;
        RunShape { n_rows: if n_seqs <= 2 { n_seqs } else { n_seqs.next_multiple_of(4) }, ..wanted }
    }

    fn begin(
        &mut self,
        rows: &[RunMember<'_>],
        RunShape { n_rows, .. }: RunShape,
    ) -> Result<usize, EngineError> {
        assert!(self.run.is_none(), "the previous run must be finished");
        let most = self.script.ahead.load(Ordering::Relaxed).max(1);
        assert!(n_rows >= rows.len());
        let mut rows: Vec<_> = rows.iter().map(|row| Some(FakeRow::new(row))).collect();
        rows.resize_with(n_rows, || None);
        self.run =
            Some(FakeRun { rows, most, ready: Default::default(), progress: DecodeProgress::default() });
        Ok(most)
    }

    fn set_row(&mut self, row: usize, with: &RunMember<'_>) -> Result<(), EngineError> {
        let run = self.run.as_mut().ok_or(EngineError::NoRun)?;
        assert!(run.rows[row].is_none(), "row {row} is in use");
        run.rows[row] = Some(FakeRow::new(with));
        Ok(())
    }

    fn clear_row(&mut self, row: usize) -> Result<(), EngineError> {
        self.run.as_mut().ok_or(EngineError::NoRun)?.rows[row] = None;
        Ok(())
    }

    fn set_table(&mut self, row: usize, table: &[u32]) -> Result<(), EngineError> {
        // A row that has ended by itself is already padding.
        if let Some(row) = &mut self.run.as_mut().ok_or(EngineError::NoRun)?.rows[row] {
            assert!(table.starts_with(&row.table), "{table:?} after {:?}", row.table);
            row.table = table.to_vec();
        }
        Ok(())
    }

    fn launch(&mut self, n: usize) -> Result<(), EngineError> {
        let mut run = self.run.take().ok_or(EngineError::NoRun)?;
        for _ in 0..n {
            let mut out = StepOut::default();
            let live: Vec<&FakeRow> = run.rows.iter().flatten().collect();
            let requests: Vec<StepRequest<'_>> = live
                .iter()
                .map(|row| StepRequest {
                    tokens: std::slice::from_ref(&row.next),
                    start: row.position,
                    table: &row.table,
                    slots: row.slots,
                    adapter: None,
                    want: Want::Sample(&row.row),
                })
                .collect();
            for request in &requests {
                let n_covered = request.table.len() * KV_BLOCK;
                assert!(n_covered > request.start, "position {} of {n_covered}", request.start);
            }
            let ran = self.step(&requests, &mut out);
            drop(requests);
            let mut choices = out.choices.into_iter();
            run.ready.push_back(ran.map(|ran| {
                let rows = run.rows.iter_mut().map(|place| {
                    let row = place.as_mut()?;
                    let (token, logprob) = match choices.next().unwrap().unwrap() {
                        Ok(TokenChoice { chosen: Chosen { token, logprob }, .. }) => (token, logprob),
                        Err(_) => (0, f32::NAN),
                    };
                    let position = row.position;
                    (row.next, row.position) = (token, position + 1);
                    row.row.advance(position + 2, &[]);
                    let flags = StepFlags::default()
                        .with(StepFlags::ENDED, row.end.contains(&token))
                        .with(StepFlags::LENGTH, row.position >= row.end_at)
                        .with(StepFlags::NON_FINITE, !logprob.is_finite());
                    if flags != StepFlags::default() {
                        *place = None;
                    }
                    Some(Committed { token, logprob, position, flags })
                });
                let rows: Vec<_> = rows.collect();
                let top = rows.iter().flat_map(|_| (0..MAX_TOP as u32).map(|i| (i, -(i as f32))));
                CommittedStep { top: top.collect(), rows, ran }
            }));
        }
        run.progress.n_launched += n as u64;
        assert!(run.ready.len() <= run.most);
        self.run = Some(run);
        Ok(())
    }

    fn awaits_masks(&self) -> bool {
        false
    }

    fn supply(&mut self, _: LateRows) -> Result<(), EngineError> {
        Err(EngineError::NoRun)
    }

    fn collect(&mut self) -> Result<CommittedStep, EngineError> {
        let run = self.run.as_mut().ok_or(EngineError::NoRun)?;
        let step = run.ready.pop_front().ok_or(EngineError::NoRun)??;
        run.progress.n_collected += 1;
        Ok(step)
    }

    fn progress(&self) -> DecodeProgress {
        self.run.as_ref().map(|run| run.progress).unwrap_or_default()
    }

    fn finish(&mut self) -> Result<usize, EngineError> {
        Ok(self.run.take().map_or(0, |run| run.ready.len()))
    }

    fn plan(&mut self, _: usize) -> Result<&Plan, EngineError> {
        Err(EngineError::EmptyPrompt)
    }

    fn kernels(&mut self, _: usize) -> Result<Vec<(usize, std::borrow::Cow<'static, str>)>, EngineError> {
        Ok(Vec::new())
    }

    fn layouts(&self) -> Vec<(String, usize)> {
        Vec::new()
    }

    fn kv(&self) -> &KvSpec {
        &self.kv
    }

    fn resize(&mut self, n_blocks: usize, max_blocks: usize, n_slots: usize) -> Result<(), EngineError> {
        assert!(self.run.is_none(), "no step may be in flight");
        if self.script.fixed.load(Ordering::Relaxed) {
            return Err(EngineError::CannotGrow { backend: "fake", has: self.kv.n_blocks, need: n_blocks });
        }
        self.kv = KvSpec { n_blocks, max_blocks, n_slots, ..self.kv };
        self.slots.resize(n_slots, Vec::new());
        Ok(())
    }

    fn copy_slot(&mut self, copy: SlotCopy) -> Result<(), EngineError> {
        self.slots[copy.to] = self.slots[copy.from].clone();
        Ok(())
    }

    fn verify_cost(&self, _: Option<&Model>) -> VerifyCost {
        VerifyCost { fixed: 0.05, row: 0.02, guess: 0.0, is_padded: true }
    }

    fn model(&self) -> &Arc<Model> {
        &self.model
    }

    fn max_tokens(&self) -> usize {
        self.max_tokens
    }

    fn max_seqs(&self) -> usize {
        self.max_tokens
    }
}
