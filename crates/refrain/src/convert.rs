//! Models as input of the quantiser: GGUF files as they are, Hugging Face folders as the GGUF file they convert to.

use crate::error::Error;
use crate::model::tokenizer_form;
use crate::train::export::Exporter;
use refrain_formats::tokenizer::TokenizerForm;
use refrain_formats::{FormatError, ModelFiles};
use refrain_models::{GgufContents, Model as Weights, TensorSource};
use refrain_quant::{InputTensor, ModelInput, QuantError};
use refrain_tensor::{DType, HostTensor};
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// What a conversion may leave out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loss {
    /// Nothing.
    Refused,
    /// The parts of a multimodal model that are not text.
    TextOnly,
}

/// Opens a model as input of the quantiser.
pub fn quant_input(files: &ModelFiles, loss: Loss) -> Result<ModelInput<'_>, Error> {
    match files {
        ModelFiles::Gguf(gguf) => Ok(ModelInput::of_gguf(gguf)),
        ModelFiles::Hf(_) => of_folder(files, loss),
    }
}

fn of_folder(files: &ModelFiles, loss: Loss) -> Result<ModelInput<'_>, Error> {
    let source = Recorder { files, used: RefCell::default() };
    let model = Weights::from_source(files.config()?, &source)?;
    let mut lost = lost_tensors(files, &source.used.into_inner());
    if loss == Loss::TextOnly {
        lost.retain(|name| !is_of_another_modality(name));
    }
    if !lost.is_empty() {
        return Err(Error::Lost { names: lost });
    }
    let form = tokenizer_form(files)?;
    let GgufContents { writer, tensors } = model.gguf_contents(&*form.to_spec()?)?;
    let input = |tensor: &refrain_models::GgufTensor| InputTensor {
        name: tensor.name.clone(),
        dtype: tensor.dtype,
        shape: tensor.shape,
    };
    Ok(ModelInput {
        metadata: writer.entries().to_vec(),
        tensors: tensors.iter().map(input).collect(),
        fetch: Box::new(move |idx| {
            let tensor = &tensors[idx];
            let values = model.gguf_values(tensor).map_err(|error| QuantError::Source(Box::new(error)))?;
            let wrap = |source| QuantError::Tensor { name: tensor.name.clone(), source };
            HostTensor::from_f32(tensor.shape, &values).map_err(wrap)
        }),
        files: files.files().into_iter().map(|(path, _)| path.to_owned()).collect(),
    })
}

/// A source that remembers which tensors were taken.
struct Recorder<'a> {
    files: &'a ModelFiles,
    used: RefCell<BTreeSet<String>>,
}

impl TensorSource for Recorder<'_> {
    fn find(&self, gguf_name: &str, hf_name: &str) -> Result<Option<HostTensor>, FormatError> {
        let found = self.files.find(gguf_name, hf_name)?;
        if found.is_some() {
            self.used.borrow_mut().insert(self.name(gguf_name, hf_name).to_owned());
        }
        Ok(found)
    }

    fn name<'n>(&self, gguf_name: &'n str, hf_name: &'n str) -> &'n str {
        self.files.name(gguf_name, hf_name)
    }
}

/// Names of tensors that the model does not use and that cannot be computed from others.
fn lost_tensors(files: &ModelFiles, used: &BTreeSet<String>) -> Vec<String> {
    let is_tied = !used.contains("lm_head.weight");
    let is_redundant = |name: &str| {
        // Tables that old versions of `transformers` saved, and a copy of the embedding.
        name.ends_with("rotary_emb.inv_freq") || is_tied && name.ends_with("lm_head.weight")
    };
    let plain = |name: &str| match name.strip_prefix("model.language_model.") {
        Some(rest) => format!("model.{rest}"),
        None => name.strip_prefix("language_model.").unwrap_or(name).to_owned(),
    };
    let tensors = files.tensors().iter().map(|tensor| tensor.name());
    tensors
        .filter(|name| !used.contains(*name) && !used.contains(&plain(name)) && !is_redundant(name))
        .map(str::to_owned)
        .collect()
}

fn is_of_another_modality(name: &str) -> bool {
    ["vision", "visual", "audio", "multi_modal_projector", "embed_vision", "embed_audio"]
        .iter()
        .any(|part| name.contains(part))
}

/// Writes a model as a new Hugging Face folder. Quantised weights are decoded; `dtype` is F32, F16 or BF16.
pub fn convert_to_folder(files: &ModelFiles, out: &Path, dtype: DType) -> Result<(), Error> {
    if !dtype.is_float() {
        return Err(Error::MergeType { got: dtype });
    }
    if out.exists() {
        return Err(Error::MergeExists { path: out.to_owned() });
    }
    let model = Weights::load(files)?;
    let form = tokenizer_form(files)?;
    let mut tokenizer = form.build()?;
    tokenizer.add_end_of_generation(&model.config().eos);
    tokenizer.add_end_of_generation(&files.generation_defaults()?.eos);
    // Written under another name: a folder of this name is always complete.
    let mut part = out.as_os_str().to_owned();
    part.push(".part");
    let part = PathBuf::from(part);
    // What an interrupted conversion left.
    remove_part(&part);
    if part.exists() {
        return Err(Error::MergeExists { path: part });
    }
    let exporter = Exporter { form: &form, tokenizer: &tokenizer };
    let written = exporter.write_hf(&model, &part, dtype).and_then(|()| {
        let rename = std::fs::rename(&part, out);
        Ok(rename.map_err(|source| FormatError::Io { verb: "create", path: out.to_owned(), source })?)
    });
    if written.is_err() {
        remove_part(&part);
    }
    written
}

/// Removes the files that an unfinished conversion wrote, and nothing else.
fn remove_part(part: &Path) {
    for name in crate::train::export::FOLDER_FILES {
        std::fs::remove_file(part.join(name)).ok();
    }
    std::fs::remove_dir(part).ok();
}

/// The chat template of open files, if they have one.
pub fn chat_template_of(files: &ModelFiles) -> Result<Option<String>, Error> {
    Ok(match tokenizer_form(files)? {
        TokenizerForm::Vocab(spec) => spec.chat_template,
        form @ TokenizerForm::Files { .. } => form.build()?.chat_template().map(str::to_owned),
    })
}
