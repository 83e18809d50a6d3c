//! Opened models: files, weights, tokenizer and chat template.

use crate::builtin::Builtin;
use crate::engines::Engines;
use crate::error::Error;
use refrain_engine::SamplingParams;
use refrain_formats::chat::{ChatTemplate, Message, RenderOptions};
use refrain_formats::hf::{AdapterFolder, HfFolder};
use refrain_formats::params::{GenerationDefaults, ModelConfig};
use refrain_formats::tokenizer::{Tokenizer, TokenizerForm, TokenizerSummary, VocabSpec};
use refrain_formats::{FormatError, ModelFiles};
use refrain_grammar::{Grammar, GrammarError, GrammarSource, Vocabulary};
use refrain_models::{Adapter, BankAdapter};
use std::hash::{BuildHasher, Hasher};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

/// A model that was opened and checked. Clones share it.
#[derive(Clone, Debug)]
pub struct Model {
    inner: Arc<ModelInner>,
}

#[derive(Debug)]
struct ModelInner {
    opened: Arc<Opened>,
    weights: Arc<refrain_models::Model>,
    engines: Engines,
}

/// A folder with a LoRA adapter, and the name under which requests choose it.
#[derive(Clone, Debug, PartialEq)]
pub struct NamedLora {
    /// Name that requests use.
    pub name: String,
    /// The folder.
    pub folder: PathBuf,
    /// Multiplies the adapter's contribution; 1 is as trained.
    pub scale: f64,
}

/// The part of a model that is the same with and without an adapter.
#[derive(Debug)]
struct Opened {
    name: String,
    files: ModelFiles,
    tokenizer: Arc<Tokenizer>,
    template: Option<ChatTemplate>,
    defaults: GenerationDefaults,
    /// Bytes of the vocabulary's longest token.
    longest_token: OnceLock<usize>,
    /// The vocabulary as grammars need it.
    vocabulary: OnceLock<Result<Arc<Vocabulary>, GrammarError>>,
}

impl Model {
    /// Opens a GGUF file or a Hugging Face folder.
    pub fn open(path: impl AsRef<Path>) -> Result<Model, Error> {
        Model::from_files(ModelFiles::open(path)?)
    }

    /// The small built-in story model, [`Builtin::Stories`].
    pub fn builtin() -> Result<Model, Error> {
        Builtin::Stories.open()
    }

    /// Opens a model from files that are already open.
    pub fn from_files(files: ModelFiles) -> Result<Model, Error> {
        // Building a large tokenizer takes as long as checking the weights, so both run in parallel.
        let (weights, tokenizer) = std::thread::scope(|scope| {
            let tokenizer = scope.spawn(|| open_tokenizer(&files));
            let weights = refrain_models::Model::load(&files);
            let tokenizer = tokenizer.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            (weights, tokenizer)
        });
        let (weights, mut tokenizer) = (weights?, tokenizer?);
        let defaults = files.generation_defaults()?;
        tokenizer.add_end_of_generation(&defaults.eos);
        tokenizer.add_end_of_generation(&weights.config().eos);
        let n_vocab = weights.config().n_vocab;
        if tokenizer.vocab_size() > n_vocab {
            return Err(Error::Vocabulary { tokenizer: tokenizer.vocab_size(), model: n_vocab });
        }
        let source = template_source(&files, &tokenizer)?;
        // A broken template must not stop raw completion: its error waits until a conversation is rendered.
        let template = source.map(|source| ChatTemplate::deferred(&source, tokenizer.special_texts()));
        let name = weights.config().name.as_deref().map(one_line).filter(|name| !name.is_empty());
        let name = name.unwrap_or_else(|| one_line(&stem(files.path())));
        let opened = Opened {
            name,
            files,
            tokenizer: Arc::new(tokenizer),
            template,
            defaults,
            longest_token: OnceLock::new(),
            vocabulary: OnceLock::new(),
        };
        Ok(Model::of(Arc::new(opened), weights))
    }

    fn of(opened: Arc<Opened>, weights: refrain_models::Model) -> Model {
        Model {
            inner: Arc::new(ModelInner { opened, weights: Arc::new(weights), engines: Engines::default() }),
        }
    }

    /// The model with a live, unmerged LoRA adapter. `scale` multiplies the adapter's contribution; 1 is as trained. Both
    /// models share their files, but not their engines.
    pub fn with_lora(&self, folder: impl AsRef<Path>, scale: f64) -> Result<Model, Error> {
        let weights = adapted(self.weights(), folder.as_ref(), scale)?;
        Ok(Model::of(self.inner.opened.clone(), weights))
    }

    /// The model with several LoRA adapters, of which each request ([`Generate::adapter`]) or session
    /// ([`SessionOptions::adapter`]) chooses one or none. They share the model's weights, its engines and its steps. Both
    /// models share their files, but not their engines.
    ///
    /// [`Generate::adapter`]: crate::Generate::adapter
    /// [`SessionOptions::adapter`]: crate::SessionOptions::adapter
    pub fn with_loras(&self, adapters: &[NamedLora]) -> Result<Model, Error> {
        let read = |lora: &NamedLora| {
            let adapter = read_adapter(&lora.folder, lora.scale).map_err(|source| Error::Adapter {
                name: lora.name.clone(),
                folder: lora.folder.display().to_string(),
                source: Box::new(source),
            })?;
            Ok(BankAdapter { name: lora.name.clone(), adapter, scale: lora.scale })
        };
        let bank = adapters.iter().map(read).collect::<Result<Vec<_>, Error>>()?;
        Ok(Model::of(self.inner.opened.clone(), self.weights().with_adapter_bank(&bank)?))
    }

    /// Names of the adapters of [`Model::with_loras`].
    pub fn adapter_names(&self) -> &[String] {
        self.inner.weights.adapter_names()
    }

    /// Builds the tokenizer of open files, which may hold nothing else.
    pub fn open_tokenizer(files: &ModelFiles) -> Result<Tokenizer, Error> {
        open_tokenizer(files)
    }

    /// Describes the tokenizer of open files without building it.
    pub fn summarize_tokenizer(files: &ModelFiles) -> Result<TokenizerSummary, Error> {
        match files {
            ModelFiles::Gguf(gguf) => Ok(TokenizerSummary::from_gguf(gguf.metadata())?),
            ModelFiles::Hf(folder) => {
                let (tokenizer, config) = read_tokenizer(folder)?;
                Ok(TokenizerSummary::from_files(&tokenizer, config.as_deref())?)
            }
        }
    }

    /// The model's name from its metadata, or the name of its file. It has no control characters.
    pub fn name(&self) -> &str {
        &self.inner.opened.name
    }

    /// The files.
    pub fn files(&self) -> &ModelFiles {
        &self.inner.opened.files
    }

    /// Hyperparameters.
    pub fn config(&self) -> &ModelConfig {
        self.inner.weights.config()
    }

    /// The tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.inner.opened.tokenizer
    }

    /// The chat template, if the model has one.
    pub fn chat_template(&self) -> Option<&ChatTemplate> {
        self.inner.opened.template.as_ref()
    }

    /// The sampling parameters that the authors recommend.
    pub fn defaults(&self) -> &GenerationDefaults {
        &self.inner.opened.defaults
    }

    /// The sampling parameters that the authors recommend, with defaults for the others, and a random seed.
    pub fn sampling(&self) -> SamplingParams {
        let (d, usual) = (self.defaults(), SamplingParams::default());
        let greedy = d.do_sample == Some(false);
        SamplingParams {
            temperature: if greedy { 0.0 } else { d.temperature.unwrap_or(usual.temperature) },
            top_k: d.top_k.unwrap_or(usual.top_k),
            top_p: d.top_p.unwrap_or(usual.top_p),
            min_p: d.min_p.unwrap_or(usual.min_p),
            repeat_penalty: d.repetition_penalty.unwrap_or(usual.repeat_penalty),
            seed: random_seed(),
            ..usual
        }
    }

    /// Tokenizes a text and adds the tokens that the model expects before it, such as BOS.
    pub fn text_tokens(&self, text: &str) -> Result<Vec<u32>, Error> {
        Ok(self.tokenizer().encode(text, true, false)?)
    }

    /// Compiles a grammar, a schema or an expression that generated text must follow ([`Generate::grammar`]). The first one
    /// also prepares the vocabulary, which takes up to two seconds for the largest ones.
    ///
    /// [`Generate::grammar`]: crate::Generate::grammar
    pub fn grammar(&self, source: &GrammarSource) -> Result<Grammar, Error> {
        Ok(self.vocabulary()?.compile(source)?)
    }

    /// The vocabulary, prepared for grammars when it is first needed.
    pub fn vocabulary(&self) -> Result<Arc<Vocabulary>, Error> {
        let opened = &self.inner.opened;
        let made = opened.vocabulary.get_or_init(|| Vocabulary::of(&opened.tokenizer).map(Arc::new));
        Ok(made.clone()?)
    }

    /// Renders a conversation with the chat template.
    pub fn render(&self, messages: &[Message], options: &RenderOptions) -> Result<String, Error> {
        let no_template = || Error::NoChatTemplate { model: self.name().into() };
        Ok(self.chat_template().ok_or_else(no_template)?.render(messages, options)?)
    }

    /// Refuses a prompt that cannot fit a context of this many tokens, by its length alone: tokenizing a large file takes
    /// minutes and gigabytes. The bound is loose, so that it never refuses a prompt that fits.
    pub fn check_length(&self, n_bytes: usize, context: usize) -> Result<(), Error> {
        // Normalizers may shorten a text; none known halves it, and added tokens may be longer than the others.
        const SLACK: usize = 4;
        // Runs of spaces in code and in tables are single tokens in most vocabularies.
        const MIN_TOKEN_BYTES: usize = 64;
        let longest = *self.inner.opened.longest_token.get_or_init(|| {
            let ids = 0..u32::try_from(self.tokenizer().vocab_size()).unwrap_or(u32::MAX);
            let longest = ids.filter_map(|id| self.tokenizer().piece(id)).map(<[u8]>::len).max();
            longest.unwrap_or(0).max(MIN_TOKEN_BYTES)
        });
        let max_bytes = context.saturating_mul(longest).saturating_mul(SLACK);
        match n_bytes > max_bytes {
            true => Err(Error::PromptBytes { n_bytes, max_bytes, context }),
            false => Ok(()),
        }
    }

    pub(crate) fn weights(&self) -> &Arc<refrain_models::Model> {
        &self.inner.weights
    }

    pub(crate) fn engines(&self) -> &Engines {
        &self.inner.engines
    }

    /// Number of parameters.
    pub fn n_parameters(&self) -> usize {
        self.inner.weights.n_parameters()
    }

    /// Size of all weights in bytes.
    pub fn weight_bytes(&self) -> usize {
        self.inner.weights.weight_bytes()
    }
}

/// Adds the adapter of a folder to a model.
pub(crate) fn adapted(
    weights: &refrain_models::Model,
    folder: &Path,
    scale: f64,
) -> Result<refrain_models::Model, Error> {
    Ok(weights.with_live_adapter(&read_adapter(folder, scale)?, scale)?)
}

/// Reads an adapter that will be applied at this scale.
fn read_adapter(folder: &Path, scale: f64) -> Result<Adapter, Error> {
    match scale.is_finite() {
        true => Ok(Adapter::read(&AdapterFolder::open(folder)?)?),
        false => Err(Error::AdapterScale { got: scale }),
    }
}

/// The tokenizer of open files in its original form, with its chat template.
pub(crate) fn tokenizer_form(files: &ModelFiles) -> Result<TokenizerForm, Error> {
    match files {
        ModelFiles::Gguf(gguf) => Ok(TokenizerForm::Vocab(Box::new(VocabSpec::from_gguf(gguf.metadata())?))),
        ModelFiles::Hf(folder) => {
            let (json, config) = read_tokenizer(folder)?;
            let form = TokenizerForm::Files { json, config };
            match folder.chat_template() {
                None => Ok(form),
                Some(path) => {
                    let template =
                        std::fs::read_to_string(&path).map_err(|source| cannot_read(&path, source))?;
                    Ok(form.with_chat_template(&template)?)
                }
            }
        }
    }
}

fn open_tokenizer(files: &ModelFiles) -> Result<Tokenizer, Error> {
    match files {
        ModelFiles::Gguf(gguf) => Ok(Tokenizer::from_gguf(gguf.metadata())?),
        ModelFiles::Hf(folder) => {
            let (tokenizer, config) = read_tokenizer(folder)?;
            Ok(Tokenizer::from_files(&tokenizer, config.as_deref())?)
        }
    }
}

/// Reads `tokenizer.json` and `tokenizer_config.json`.
fn read_tokenizer(folder: &HfFolder) -> Result<(Vec<u8>, Option<Vec<u8>>), Error> {
    let read = |path: &Path| std::fs::read(path).map_err(|source| cannot_read(path, source));
    let missing = || Error::NoTokenizer { folder: folder.path().display().to_string() };
    let tokenizer = read(&folder.tokenizer().ok_or_else(missing)?)?;
    let config = folder.tokenizer_config().map(|path| read(&path)).transpose()?;
    Ok((tokenizer, config))
}

fn cannot_read(path: &Path, source: std::io::Error) -> Error {
    Error::Format(FormatError::Io { verb: "read", path: path.to_owned(), source })
}

fn template_source(files: &ModelFiles, tokenizer: &Tokenizer) -> Result<Option<String>, Error> {
    if let ModelFiles::Hf(folder) = files
        && let Some(path) = folder.chat_template()
    {
        let bytes = std::fs::read(&path).map_err(|source| cannot_read(&path, source))?;
        // A broken template must not keep a model from continuing texts.
        let source = String::from_utf8(bytes);
        return Ok(Some(
            source.unwrap_or_else(|_| ChatTemplate::unusable("chat_template.jinja is not UTF-8")),
        ));
    }
    Ok(tokenizer.chat_template().map(Into::into))
}

fn stem(path: &Path) -> String {
    path.file_stem().map_or_else(|| "model".into(), |s| s.to_string_lossy().into_owned())
}

/// Text from a file's metadata as one line: control characters become spaces.
pub(crate) fn one_line(text: &str) -> String {
    let text = text.replace(char::is_control, " ");
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// A seed of 32 bits: short enough to be typed again.
pub(crate) fn random_seed() -> u64 {
    std::hash::RandomState::new().build_hasher().finish() >> 32
}
