//! The trained model as files that this program and others read.

use crate::error::Error;
use refrain_formats::FormatError;
use refrain_formats::hf::write_whole;
use refrain_formats::tokenizer::{Tokenizer, TokenizerFiles, TokenizerForm};
use refrain_graph::Backend;
use refrain_models::Model as Weights;
use refrain_tensor::DType;
use refrain_train::config::Export;
use refrain_train::trainer::Trainer;
use std::path::{Path, PathBuf};

/// A form of a model on the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExportForm {
    /// A GGUF file.
    Gguf,
    /// A Hugging Face folder.
    Hf,
    /// A LoRA adapter, as `peft` reads it.
    Adapter,
}

/// A model that was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exported {
    /// In which form.
    pub form: ExportForm,
    /// The file or folder.
    pub path: PathBuf,
}

/// A folder, made where it is not there.
fn create(folder: &Path) -> Result<(), FormatError> {
    std::fs::create_dir_all(folder).map_err(|source| FormatError::Io {
        verb: "create",
        path: folder.to_owned(),
        source,
    })
}

pub(crate) struct Exporter<'e> {
    pub(crate) form: &'e TokenizerForm,
    pub(crate) tokenizer: &'e Tokenizer,
}

impl Exporter<'_> {
    /// Writes the model in the forms that the configuration asks for. Where both were asked for and only one of them can
    /// hold it, the other one comes with the reason.
    pub(super) fn export<B: Backend>(
        &self,
        trainer: &Trainer<B>,
    ) -> Result<(Vec<Exported>, Vec<Error>), Error> {
        let config = trainer.config();
        let forms: &[ExportForm] = match config.export {
            Export::None => &[],
            _ if config.lora.is_some() => &[ExportForm::Adapter],
            Export::Both => &[ExportForm::Gguf, ExportForm::Hf],
            Export::Gguf => &[ExportForm::Gguf],
            Export::Hf => &[ExportForm::Hf],
        };
        let Some(out) = config.out.as_deref().filter(|_| !forms.is_empty()) else {
            return Ok((Vec::new(), Vec::new()));
        };
        let model = trainer.learner().trained()?;
        let dtype = trainer.learner().spec().dtype;
        let base = trainer.base();
        let notes: Vec<(&str, &str)> = base
            .iter()
            .flat_map(|base| [("base_model", base.name.as_str()), ("base_sha256", base.sha256.as_str())])
            .collect();
        let (mut written, mut failed) = (Vec::new(), Vec::new());
        for &form in forms {
            match self.write(&model, form, dtype, out, &notes) {
                Ok(path) => written.push(Exported { form, path }),
                Err(error) => failed.push(error),
            }
        }
        match (written.is_empty(), failed.len()) {
            (true, 1..) => Err(failed.swap_remove(0)),
            _ => Ok((written, failed)),
        }
    }

    /// `notes` are for an adapter: the weights it was trained over.
    fn write(
        &self,
        model: &Weights,
        form: ExportForm,
        dtype: DType,
        out: &Path,
        notes: &[(&str, &str)],
    ) -> Result<PathBuf, Error> {
        match form {
            ExportForm::Gguf => {
                let path = out.join("model.gguf");
                model.write_gguf(&path, dtype, &*self.form.to_spec()?)?;
                Ok(path)
            }
            ExportForm::Hf => {
                let folder = out.join("model");
                self.write_hf(model, &folder, dtype)?;
                Ok(folder)
            }
            ExportForm::Adapter => {
                let folder = out.join("adapter");
                create(&folder)?;
                // From the masters, where there are some; the files are small.
                if let Some(adapter) = model.adapter()? {
                    adapter.write(&folder, DType::F32, notes)?;
                }
                Ok(folder)
            }
        }
    }

    /// Writes a Hugging Face folder, tokenizer included.
    pub(crate) fn write_hf(&self, model: &Weights, folder: &Path, dtype: DType) -> Result<(), Error> {
        let TokenizerFiles { json, config } = self.form.to_files()?;
        create(folder)?;
        model.write_hf(folder, dtype)?;
        write_whole(&folder.join("tokenizer.json"), &json)?;
        if let Some(config) = config {
            write_whole(&folder.join("tokenizer_config.json"), &config)?;
        }
        Ok(write_whole(&folder.join("generation_config.json"), self.generation_config().as_bytes())?)
    }

    /// The tokens that begin and end a text, as generating programs look for them.
    fn generation_config(&self) -> String {
        let list = |ids: &[u32]| ids.iter().map(u32::to_string).collect::<Vec<_>>().join(", ");
        let bos = self.tokenizer.bos().map_or_else(String::new, |id| format!("  \"bos_token_id\": {id},\n"));
        let eos = list(self.tokenizer.end_of_generation());
        format!("{{\n{bos}  \"eos_token_id\": [{eos}]\n}}\n")
    }
}
