//! Text sampled from the model during a run.
//!
//! Samples are always generated on the CPU from a copy of the weights, so that the run's memory and graphs on its device
//! stay unchanged.

use crate::engines::{EngineCapacity, MonitoredEngine, lone_engine};
use crate::error::Error;
use crate::session::{Device, SessionOptions};
use refrain_engine::{Request, SamplingParams, TokenEvent};
use refrain_formats::tokenizer::Tokenizer;
use refrain_graph::Backend;
use refrain_tensor::DType;
use refrain_train::TrainConfig;
use refrain_train::learner::Learner;
use std::sync::Arc;

/// Tokens in a sample.
const N_TOKENS: usize = 64;

pub(super) struct Sampler {
    every: Option<u64>,
    prompt: String,
    seed: u64,
    context: usize,
    tokenizer: Arc<Tokenizer>,
}

impl Sampler {
    pub(super) fn new(config: &TrainConfig, tokenizer: &Arc<Tokenizer>) -> Sampler {
        Sampler {
            every: config.sample_every,
            prompt: config.sample_prompt.clone().unwrap_or_default(),
            seed: config.seed,
            context: config.context,
            tokenizer: tokenizer.clone(),
        }
    }

    /// Whether a sample is due after `n_done` steps: after every n-th and after the last one.
    pub(super) fn is_due(&self, n_done: u64, is_last: bool) -> bool {
        self.every.is_some_and(|n| n > 0 && (n_done.is_multiple_of(n) || is_last))
    }

    /// The prompt and its continuation.
    pub(super) fn text<B: Backend>(&self, learner: &Learner<B>) -> Result<String, Error> {
        let model = Arc::new(learner.trained()?);
        let mut prompt = self.tokenizer.encode(&self.prompt, true, false)?;
        if prompt.is_empty() {
            // A model without a BOS token still needs a token to continue.
            prompt.extend(self.tokenizer.eos().or(Some(0)));
        }
        prompt.truncate(self.context.saturating_sub(1).max(1));
        let n_tokens = N_TOKENS.min(self.context.saturating_sub(prompt.len()));
        let options = SessionOptions {
            device: Device::Cpu { threads: None },
            context: Some(self.context),
            kv_dtype: DType::F32,
            ..SessionOptions::default()
        };
        let (MonitoredEngine { engine, .. }, room) =
            lone_engine(&model, "the model", &options, EngineCapacity::of_one)?;
        let sequence = engine.open(room.context)?;
        let mut request = Request::new(&sequence, prompt);
        request.sampling = SamplingParams { seed: self.seed, ..SamplingParams::default() };
        request.max_tokens = n_tokens;
        request.end = self.tokenizer.end_of_generation().to_vec();
        let mut text = self.prompt.clone();
        // A model may have more rows than the tokenizer has tokens; such ids have no text.
        let mut stream = self.tokenizer.stream();
        for event in engine.submit(request)? {
            if let TokenEvent::Token { token, .. } = event? {
                text.push_str(stream.push(token));
            }
        }
        text.push_str(stream.finish());
        Ok(text)
    }
}
