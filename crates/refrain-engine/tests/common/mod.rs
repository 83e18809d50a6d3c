//! A runner that keeps a log instead of computing.
#![allow(dead_code)] // Each test file uses its part.

use refrain_engine::{Engine, EngineError, Runner, StepOut, StepRequest, Want};
use refrain_formats::ModelFiles;
use refrain_graph::{Plan, Ran, Reason};
use refrain_models::{KvSpec, Model};
use refrain_tensor::DType;
use std::path::Path;
use std::sync::{Arc, Mutex};

pub(crate) const VOCAB: usize = 128;
pub(crate) const KV_BLOCK: usize = 4;

/// A step as the runner saw it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Seen {
    pub(crate) tokens: Vec<u32>,
    pub(crate) start: usize,
    pub(crate) table: Vec<u32>,
}

/// What the runner and its test share.
#[derive(Clone, Default)]
pub(crate) struct Script {
    log: Arc<Mutex<Vec<Seen>>>,
    failures: Arc<Mutex<Vec<(usize, EngineError)>>>,
}

impl Script {
    /// Every step so far.
    pub(crate) fn seen(&self) -> Vec<Seen> {
        self.log.lock().unwrap().clone()
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
}

pub(crate) fn tiny_model() -> Arc<Model> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../refrain-models/tests/goldens/llama");
    Arc::new(Model::load(&ModelFiles::open(folder).unwrap()).unwrap())
}

/// An engine whose model predicts the next higher token, and the script that it follows.
pub(crate) fn engine(context: usize, max_tokens: usize) -> (Engine, Script) {
    let script = Script::default();
    let max_blocks = context.div_ceil(KV_BLOCK);
    let kv = KvSpec { n_blocks: max_blocks, kv_block: KV_BLOCK, max_blocks, n_seqs: 1, dtype: DType::F16 };
    let runner = FakeRunner { model: tiny_model(), kv, max_tokens, script: script.clone() };
    (Engine::new(Box::new(runner), context), script)
}

impl Runner for FakeRunner {
    fn backend(&self) -> &'static str {
        "fake"
    }

    fn step(&mut self, request: &StepRequest<'_>, out: &mut StepOut) -> Result<Ran, EngineError> {
        let mut log = self.script.log.lock().unwrap();
        let step = log.len();
        let (tokens, table) = (request.tokens.to_vec(), request.table.to_vec());
        log.push(Seen { tokens, start: request.start, table });
        let mut failures = self.script.failures.lock().unwrap();
        if let Some(i) = failures.iter().position(|(at, _)| *at == step) {
            return Err(failures.swap_remove(i).1);
        }
        match request.want {
            Want::Nothing => {}
            Want::Logits { n_rows } => out.logits = vec![0.0; n_rows * VOCAB],
            Want::Sample(_) => out.chosen = request.tokens.last().map(|&t| ((t + 1) % VOCAB as u32, -1.0)),
        }
        Ok(Ran::Eager(Reason::NoGraphsHere { backend: "fake" }))
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

    fn model(&self) -> &Model {
        &self.model
    }

    fn max_tokens(&self) -> usize {
        self.max_tokens
    }
}
