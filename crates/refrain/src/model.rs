//! An open model: files, weights, tokenizer and chat template.

use crate::builtin::Builtin;
use crate::engines::Engines;
use crate::error::Error;
use refrain_engine::SamplingParams;
use refrain_formats::chat::{ChatTemplate, Message, RenderOptions};
use refrain_formats::hf::{AdapterFolder, HfFolder};
use refrain_formats::params::{GenerationDefaults, ModelConfig};
use refrain_formats::tokenizer::{Tokenizer, TokenizerForm, TokenizerSummary, VocabSpec};
use refrain_formats::{FormatError, ModelFiles};
use refrain_models::Adapter;
use std::path::Path;
use std::sync::Arc;

/// A model, opened and checked. Cloning shares it.
#[derive(Clone, Debug)]
pub struct Model {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    opened: Arc<Opened>,
    weights: Arc<refrain_models::Model>,
    engines: Engines,
}

/// What models with the same files share, whatever is beside their weights.
#[derive(Debug)]
struct Opened {
    name: String,
    files: ModelFiles,
    tokenizer: Tokenizer,
    template: Option<ChatTemplate>,
    defaults: GenerationDefaults,
}

impl Model {
    /// Opens a GGUF file or a Hugging Face folder.
    pub fn open(path: impl AsRef<Path>) -> Result<Model, Error> {
        Model::from_files(ModelFiles::open(path)?)
    }

    /// The small story model inside the library, [`Builtin::Stories`].
    pub fn builtin() -> Result<Model, Error> {
        Builtin::Stories.open()
    }

    /// A model from files that are open already.
    pub fn from_files(files: ModelFiles) -> Result<Model, Error> {
        // Building a large tokenizer takes as long as checking the weights: one beside the other.
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
        let template =
            source.map(|source| ChatTemplate::new(&source, tokenizer.special_texts())).transpose()?;
        let name = weights.config().name.clone().unwrap_or_else(|| stem(files.path()));
        let opened = Arc::new(Opened { name, files, tokenizer, template, defaults });
        Ok(Model::of(opened, weights))
    }

    fn of(opened: Arc<Opened>, weights: refrain_models::Model) -> Model {
        Model { inner: Arc::new(Inner { opened, weights: Arc::new(weights), engines: Engines::default() }) }
    }

    /// The model with a LoRA adapter beside its weights, live and unmerged. What the adapter adds is multiplied by `scale`:
    /// 1 is as it was trained. The files are shared with this model; engines are not.
    pub fn with_lora(&self, folder: impl AsRef<Path>, scale: f64) -> Result<Model, Error> {
        let weights = adapted(self.weights(), folder.as_ref(), scale)?;
        Ok(Model::of(self.inner.opened.clone(), weights))
    }

    /// The tokenizer of open files, also of files that hold nothing else.
    pub fn open_tokenizer(files: &ModelFiles) -> Result<Tokenizer, Error> {
        open_tokenizer(files)
    }

    /// What the tokenizer of open files is, without building it.
    pub fn summarize_tokenizer(files: &ModelFiles) -> Result<TokenizerSummary, Error> {
        match files {
            ModelFiles::Gguf(gguf) => Ok(TokenizerSummary::from_gguf(gguf.metadata())?),
            ModelFiles::Hf(folder) => {
                let (tokenizer, config) = read_tokenizer(folder)?;
                Ok(TokenizerSummary::from_files(&tokenizer, config.as_deref())?)
            }
        }
    }

    /// The name the files give the model, or the file's.
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

    /// How the authors want the model to be sampled.
    pub fn defaults(&self) -> &GenerationDefaults {
        &self.inner.opened.defaults
    }

    /// The authors' sampling parameters, and the usual ones where they say nothing.
    pub fn sampling(&self) -> SamplingParams {
        let (d, usual) = (self.defaults(), SamplingParams::default());
        let greedy = d.do_sample == Some(false);
        SamplingParams {
            temperature: if greedy { 0.0 } else { d.temperature.unwrap_or(usual.temperature) },
            top_k: d.top_k.unwrap_or(usual.top_k),
            top_p: d.top_p.unwrap_or(usual.top_p),
            min_p: d.min_p.unwrap_or(usual.min_p),
            repeat_penalty: d.repetition_penalty.unwrap_or(usual.repeat_penalty),
            ..usual
        }
    }

    /// The tokens of a text, with what the model wants in front of it.
    pub fn text_tokens(&self, text: &str) -> Result<Vec<u32>, Error> {
        Ok(self.tokenizer().encode(text, true, false)?)
    }

    /// A conversation as the chat template writes it.
    pub fn render(&self, messages: &[Message], options: &RenderOptions) -> Result<String, Error> {
        let no_template = || Error::NoChatTemplate { model: self.name().into() };
        Ok(self.chat_template().ok_or_else(no_template)?.render(messages, options)?)
    }

    pub(crate) fn weights(&self) -> &Arc<refrain_models::Model> {
        &self.inner.weights
    }

    pub(crate) fn engines(&self) -> &Engines {
        &self.inner.engines
    }

    /// Numbers in all weights.
    pub fn n_parameters(&self) -> usize {
        self.inner.weights.n_parameters()
    }

    /// Bytes of all weights.
    pub fn weight_bytes(&self) -> usize {
        self.inner.weights.weight_bytes()
    }
}

/// A model with the adapter of a folder.
pub(crate) fn adapted(
    weights: &refrain_models::Model,
    folder: &Path,
    scale: f64,
) -> Result<refrain_models::Model, Error> {
    if !scale.is_finite() {
        return Err(Error::AdapterScale { got: scale });
    }
    let adapter = Adapter::read(&AdapterFolder::open(folder)?)?;
    Ok(weights.with_live_adapter(&adapter, scale)?)
}

/// The tokenizer of open files, in the form that they have it, with the chat template that belongs to it.
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

/// The contents of `tokenizer.json` and of `tokenizer_config.json`.
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
        return std::fs::read_to_string(&path).map(Some).map_err(|source| cannot_read(&path, source));
    }
    Ok(tokenizer.chat_template().map(Into::into))
}

fn stem(path: &Path) -> String {
    path.file_stem().map_or_else(|| "model".into(), |s| s.to_string_lossy().into_owned())
}
