//! Export of the trained model as files that this and other programs read.

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

/// File format of an exported model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExportForm {
    /// A GGUF file.
    Gguf,
    /// A Hugging Face folder.
    Hf,
    /// A LoRA adapter, as `peft` reads it.
    Adapter,
}

/// An exported model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exported {
    /// Its format.
    pub form: ExportForm,
    /// Its file or folder.
    pub path: PathBuf,
}

/// Creates a folder if it does not exist.
fn create(folder: &Path) -> Result<(), FormatError> {
    std::fs::create_dir_all(folder).map_err(|source| FormatError::Io {
        verb: "create",
        path: folder.to_owned(),
        source,
    })
}

/// The files of an exported folder.
pub(crate) const FOLDER_FILES: [&str; 5] =
    ["model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"];

pub(crate) struct Exporter<'e> {
    pub(crate) form: &'e TokenizerForm,
    pub(crate) tokenizer: &'e Tokenizer,
}

impl Exporter<'_> {
    /// Writes the model in the configured formats. If only one of two formats can represent the model, the error of the
    /// other one is returned as well.
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

    /// `notes` identify the base model of an adapter.
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
                // In F32, from the master weights if there are any; the files are small.
                if let Some(adapter) = model.adapter()? {
                    adapter.write(&folder, DType::F32, notes)?;
                }
                Ok(folder)
            }
        }
    }

    /// Writes a Hugging Face folder with its tokenizer.
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

    /// The BOS and EOS tokens, in the file where generating programs look for them.
    fn generation_config(&self) -> String {
        let list = |ids: &[u32]| ids.iter().map(u32::to_string).collect::<Vec<_>>().join(", ");
        let bos = self.tokenizer.bos().map_or_else(String::new, |id| format!("  \"bos_token_id\": {id},\n"));
        let eos = list(self.tokenizer.end_of_generation());
        format!("{{\n{bos}  \"eos_token_id\": [{eos}]\n}}\n")
    }
}
