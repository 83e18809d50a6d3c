//! Embedders: a model on a device that turns texts into vectors.

use crate::engines::with_session;
use crate::error::Error;
use crate::model::Model;
use crate::session::SessionOptions;
use refrain_cpu::CpuBackend;
use refrain_cuda::{CudaBackend, Monitor, Status};
use refrain_engine::{EmbedderOptions, Ledger, VectorStream};
use refrain_formats::params::Pooling;

/// Options of an embedder.
#[derive(Clone, Debug)]
pub struct EmbedOptions {
    /// The device. The context is the maximum number of tokens of a text; without one it is the length that the files
    /// recommend, or the model's limit up to 8,192. The options of the KV cache have no effect.
    pub session: SessionOptions,
    /// How the vector of a text follows from those of its tokens; as the files recommend when `None`. An encoder without
    /// a recommendation takes the mean.
    pub pooling: Option<Pooling>,
    /// Whether vectors are scaled to length 1, so that their dot product is the cosine of the angle between them.
    pub normalizes: bool,
    /// Whether longer texts are cut at their end. Otherwise they are refused.
    pub cuts: bool,
}

impl Default for EmbedOptions {
    fn default() -> EmbedOptions {
        EmbedOptions { session: SessionOptions::default(), pooling: None, normalizes: true, cuts: true }
    }
}

/// The vector of a text.
#[derive(Clone, Debug, PartialEq)]
pub struct Embedding {
    /// The vector.
    pub vector: Vec<f32>,
    /// Tokens that were evaluated, including special ones.
    pub n_tokens: usize,
    /// Tokens that were cut off.
    pub n_cut: usize,
}

/// How a model embeds texts, as its files recommend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EmbeddingUse {
    /// How the vector of a text follows from those of its tokens.
    pub pooling: Pooling,
    /// Maximum number of tokens of a text, including special ones.
    pub max_tokens: usize,
}

/// Longer texts need an explicit context: the memory of a step grows with its longest text.
const USUAL_MAX_TOKENS: usize = 8192;
/// Tokens per step on the CPU, where larger steps are no faster.
const CPU_STEP: usize = 512;
/// Tokens per step on a CUDA device.
const CUDA_STEP: usize = 4096;

/// A model on a device that turns texts into vectors, from any thread. Clones are handles to the same embedder.
///
/// Texts of all callers share steps, without padding between them.
///
/// ```no_run
/// # fn main() -> Result<(), refrain::Error> {
/// use refrain::{EmbedOptions, Embedder, Model};
///
/// let embedder = Embedder::new(&Model::open("all-MiniLM-L6-v2")?, &EmbedOptions::default())?;
/// let texts = embedder.embed(&["A cat sleeps.", "A kitten naps."])?;
/// let cosine: f32 = texts[0].vector.iter().zip(&texts[1].vector).map(|(a, b)| a * b).sum();
/// println!("{cosine}");
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Embedder {
    model: Model,
    inner: refrain_engine::Embedder,
    pooling: Pooling,
    cuts: bool,
    monitor: Option<Monitor>,
}

impl Embedder {
    /// Loads a model onto a device.
    pub fn new(model: &Model, options: &EmbedOptions) -> Result<Embedder, Error> {
        let (recommended, most) = (model.embedding()?, model.config().n_context);
        let pooling = options.pooling.or(recommended.map(|r| r.pooling));
        let pooling = pooling.ok_or_else(|| Error::NoPooling { model: model.name().into() })?;
        let usual = recommended.map_or(USUAL_MAX_TOKENS.min(most), |r| r.max_tokens);
        let max_tokens = options.session.context.unwrap_or(usual);
        if max_tokens == 0 || max_tokens > most {
            return Err(Error::Context { got: max_tokens, most, model: model.name().into() });
        }
        let normalizes = options.normalizes;
        let of = |step_tokens| EmbedderOptions { pooling, normalizes, max_tokens, step_tokens };
        let weights = model.weights().clone();
        let (inner, monitor) = match options.session.device.cuda_options() {
            Err(threads) => {
                let backend = CpuBackend::shared(threads)?;
                (refrain_engine::Embedder::new(backend, weights, of(CPU_STEP))?, None)
            }
            Ok((kind, cuda)) => {
                let backend = CudaBackend::open(kind, with_session(cuda, model.name(), &options.session))?;
                let monitor = backend.monitor();
                (refrain_engine::Embedder::new(backend, weights, of(CUDA_STEP))?, Some(monitor))
            }
        };
        model.files().release();
        Ok(Embedder { model: model.clone(), inner, pooling, cuts: options.cuts, monitor })
    }

    /// Embeds texts and waits for their vectors, in the same order. If one of them cannot be embedded, none is.
    pub fn embed<T: AsRef<str>>(&self, texts: &[T]) -> Result<Vec<Embedding>, Error> {
        let (n_texts, max_tokens) = (texts.len(), self.max_tokens());
        let mut tokens = Vec::with_capacity(n_texts);
        let mut n_cut = Vec::with_capacity(n_texts);
        for (idx, text) in texts.iter().enumerate() {
            let (ids, cut) = self.model.tokenizer().encode_cut(text.as_ref(), max_tokens)?;
            let (number, model) = (idx + 1, self.model.name());
            if ids.is_empty() {
                return Err(Error::EmptyText { number, n_texts, model: model.into() });
            }
            if cut > 0 && !self.cuts {
                let n_tokens = max_tokens + cut;
                return Err(Error::TextTooLong {
                    number,
                    n_texts,
                    n_tokens,
                    max_tokens,
                    model: model.into(),
                });
            }
            tokens.push(ids);
            n_cut.push(cut);
        }
        let n_tokens: Vec<usize> = tokens.iter().map(Vec::len).collect();
        let vectors = self.inner.embed(tokens)?;
        let all = vectors.into_iter().zip(n_tokens).zip(n_cut);
        Ok(all.map(|((vector, n_tokens), n_cut)| Embedding { vector, n_tokens, n_cut }).collect())
    }

    /// Embeds texts that are given as tokens, including special ones.
    pub fn embed_tokens(&self, texts: Vec<Vec<u32>>) -> Result<Vec<Vec<f32>>, Error> {
        Ok(self.inner.embed(texts)?)
    }

    /// Submits texts that are given as tokens. Texts that can never be embedded are refused here; later errors arrive
    /// through the stream.
    pub fn submit_tokens(&self, texts: Vec<Vec<u32>>) -> Result<VectorStream, Error> {
        Ok(self.inner.submit(texts)?)
    }

    /// The bytes that the weights of an embedder take. Activations and kernels come on top.
    pub fn memory_needs(model: &Model) -> u64 {
        model.weight_bytes() as u64
    }

    /// The model.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// Name of the backend.
    pub fn backend(&self) -> &'static str {
        self.inner.backend()
    }

    /// How tokens are pooled.
    pub fn pooling(&self) -> Pooling {
        self.pooling
    }

    /// Elements of a vector.
    pub fn dimensions(&self) -> usize {
        self.model.config().hidden
    }

    /// Maximum number of tokens of a text, including special ones.
    pub fn max_tokens(&self) -> usize {
        self.inner.max_tokens()
    }

    /// The ledger of all steps: how many were replayed, and why others were not.
    pub fn ledger(&self) -> Ledger {
        self.inner.ledger()
    }

    /// Memory, graphs and timings of a CUDA device, real or simulated; `None` on the CPU.
    pub fn device_status(&self) -> Option<Status> {
        self.monitor.as_ref().map(Monitor::status)
    }
}

impl Model {
    /// How the model embeds texts; `None` if nothing in its files says that it does, as for models that generate text.
    pub fn embedding(&self) -> Result<Option<EmbeddingUse>, Error> {
        let (config, defaults) = (self.config(), self.files().embedding_defaults()?);
        let usual = config.arch.is_encoder().then_some(Pooling::Mean);
        let max_tokens = defaults.max_tokens.unwrap_or(USUAL_MAX_TOKENS).min(config.n_context);
        Ok(defaults.pooling.or(usual).map(|pooling| EmbeddingUse { pooling, max_tokens }))
    }
}
