//! Merging an adapter into its model.

use crate::error::Error;
use crate::model::{adapted, tokenizer_form};
use crate::train::ExportForm;
use crate::train::export::Exporter;
use refrain_formats::ModelFiles;
use refrain_models::Model as Weights;
use refrain_tensor::DType;
use std::path::Path;

/// Merges a LoRA adapter into a model's weights and writes the result: a GGUF file if `out` ends in `.gguf`, otherwise a
/// Hugging Face folder. Quantised weights are decoded; `dtype` is F32, F16 or BF16.
pub fn merge(
    files: &ModelFiles,
    adapter: &Path,
    scale: f64,
    out: &Path,
    dtype: DType,
) -> Result<ExportForm, Error> {
    if !dtype.is_float() {
        return Err(Error::MergeType { got: dtype });
    }
    if out.exists() {
        return Err(Error::MergeExists { path: out.to_owned() });
    }
    let model = adapted(&Weights::load(files)?, adapter, scale)?;
    let form = tokenizer_form(files)?;
    let mut tokenizer = form.build()?;
    tokenizer.add_end_of_generation(&model.config().eos);
    tokenizer.add_end_of_generation(&files.generation_defaults()?.eos);
    if out.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf")) {
        model.write_gguf(out, dtype, &*form.to_spec()?)?;
        return Ok(ExportForm::Gguf);
    }
    Exporter { form: &form, tokenizer: &tokenizer }.write_hf(&model, out, dtype)?;
    Ok(ExportForm::Hf)
}
