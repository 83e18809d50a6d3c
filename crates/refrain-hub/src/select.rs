//! Selects the files of a model in a repository.
//!
//! Only names matter, so the same rules apply to the hub's listing and to the local cache.

use std::collections::BTreeMap;

use crate::error::HubError;

/// File format of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// A GGUF file, possibly split into several.
    Gguf,
    /// A folder with `config.json` and safetensors.
    Safetensors,
}

/// The files of one model in a repository.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Selection {
    pub(crate) format: Format,
    /// GGUF: the splits in order. Safetensors: `config.json` first.
    pub(crate) files: Vec<String>,
    /// Text after the colon of a name that means this selection.
    pub(crate) quant: Option<String>,
}

/// Quantisations in order of preference when none is requested: small and good first.
const PREFERENCE: &[&str] = &[
    "Q4_K_M", "Q4_K_S", "Q4_K_L", "Q5_K_M", "Q5_K_S", "Q4_1", "Q4_0", "IQ4_NL", "IQ4_XS", "Q5_1", "Q5_0",
    "Q6_K", "Q6_K_L", "Q8_0", "Q3_K_L", "Q3_K_M", "Q3_K_S", "Q2_K", "BF16", "F16", "FP16", "F32", "FP32",
];

/// Other quantisations, recognised in file names.
const OTHERS: &[&str] = &[
    "Q4_K_XL", "Q5_K_XL", "Q6_K_XL", "Q8_K_XL", "Q3_K_XL", "Q2_K_XL", "Q2_K_L", "Q2_K_S", "Q5_K_L", "IQ1_S",
    "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ2_M", "IQ3_XXS", "IQ3_XS", "IQ3_S", "IQ3_M", "TQ1_0", "TQ2_0",
    "Q4_K", "Q5_K", "Q3_K", "MXFP4",
];

/// Text after the colon that requests the safetensors folder even if there is a GGUF file.
const SAFETENSORS: &str = "safetensors";

const TOKENIZER_AND_CONFIG: &[&str] = &[
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
    "model.safetensors.index.json",
];

/// Selects the files of the requested quantisation, or of the preferred one.
pub(crate) fn select(repo: &str, files: &[String], quant: Option<&str>) -> Result<Selection, HubError> {
    let ggufs = gguf_models(files);
    if quant.is_some_and(|quant| quant.eq_ignore_ascii_case(SAFETENSORS)) {
        return safetensors(repo, files);
    }
    match quant {
        Some(quant) => select_quant(repo, &ggufs, quant),
        None if ggufs.is_empty() => safetensors(repo, files),
        None => select_preferred(repo, &ggufs),
    }
}

/// Returns every complete model among the files.
pub(crate) fn all(files: &[String]) -> Vec<Selection> {
    let ggufs = gguf_models(files);
    let mut found: Vec<_> = ggufs.iter().filter_map(|model| model.selection("").ok()).collect();
    found.extend(safetensors("", files));
    found
}

/// A GGUF model: one file or its splits.
struct GgufModel<'a> {
    /// The name without the split's number and without `.gguf`.
    stem: &'a str,
    n_splits: usize,
    /// By the number of the split, from 1.
    files: BTreeMap<usize, &'a String>,
}

impl GgufModel<'_> {
    fn selection(&self, repo: &str) -> Result<Selection, HubError> {
        let complete = (1..=self.n_splits).eq(self.files.keys().copied());
        if !complete {
            return Err(HubError::MissingSplit {
                repo: repo.to_owned(),
                file: self.stem.to_owned(),
                have: self.files.len(),
                want: self.n_splits,
            });
        }
        let files: Vec<String> = self.files.values().map(|file| (*file).clone()).collect();
        let quant = quant_of(self.stem).map(str::to_owned).or_else(|| files.first().cloned());
        Ok(Selection { format: Format::Gguf, files, quant })
    }
}

/// Returns the language models among the GGUF files. A split model counts once.
fn gguf_models(files: &[String]) -> Vec<GgufModel<'_>> {
    let mut models: BTreeMap<(&str, usize), GgufModel<'_>> = BTreeMap::new();
    for file in files {
        let Some(stem) = strip_suffix_ignore_case(file, ".gguf") else {
            continue;
        };
        let base = stem.rsplit('/').next().unwrap_or(stem).to_ascii_lowercase();
        // Image encoders and importance matrices have the same extension.
        if base.starts_with("mmproj") || base.contains("imatrix") {
            continue;
        }
        let (stem, split_idx, n_splits) = split_number(stem).unwrap_or((stem, 1, 1));
        let new = || GgufModel { stem, n_splits, files: BTreeMap::new() };
        models.entry((stem, n_splits)).or_insert_with(new).files.insert(split_idx, file);
    }
    models.into_values().collect()
}

fn select_quant(repo: &str, models: &[GgufModel<'_>], quant: &str) -> Result<Selection, HubError> {
    if strip_suffix_ignore_case(quant, ".gguf").is_some() {
        let named =
            models.iter().find(|model| model.files.values().any(|file| file.eq_ignore_ascii_case(quant)));
        return match named {
            Some(model) => {
                let selection = model.selection(repo)?;
                Ok(Selection { quant: selection.files.first().cloned(), ..selection })
            }
            None => Err(no_such_quant(repo, models, quant)),
        };
    }
    let fitting: Vec<_> = models.iter().filter(|model| has_word(model.stem, quant)).collect();
    match fitting.as_slice() {
        [] => Err(no_such_quant(repo, models, quant)),
        [model] => model.selection(repo),
        several => Err(ambiguous(repo, several)),
    }
}

fn select_preferred(repo: &str, models: &[GgufModel<'_>]) -> Result<Selection, HubError> {
    if let [model] = models {
        return model.selection(repo);
    }
    for quant in PREFERENCE {
        let fitting: Vec<_> = models.iter().filter(|model| has_word(model.stem, quant)).collect();
        match fitting.as_slice() {
            [] => {}
            [model] => return model.selection(repo),
            several => return Err(ambiguous(repo, several)),
        }
    }
    Err(ambiguous(repo, &models.iter().collect::<Vec<_>>()))
}

fn safetensors(repo: &str, files: &[String]) -> Result<Selection, HubError> {
    let here = |name: &str| files.iter().any(|file| file == name);
    let mut weights: Vec<&String> =
        files.iter().filter(|file| file.ends_with(".safetensors") && !file.contains('/')).collect();
    // Some repositories hold the weights twice, once under a vendor's own file name.
    if weights.iter().any(|file| file.starts_with("model")) {
        weights.retain(|file| file.starts_with("model"));
    }
    weights.retain(|file| !file.starts_with("adapter"));
    if !here("config.json") || weights.is_empty() {
        return Err(HubError::NoModelFiles { repo: repo.to_owned() });
    }
    if let Some((stem, _, want)) =
        weights.iter().find_map(|file| split_number(file.strip_suffix(".safetensors")?))
    {
        let have = weights.len();
        if have != want {
            return Err(HubError::MissingSplit { repo: repo.to_owned(), file: stem.to_owned(), have, want });
        }
    }
    let mut chosen = vec!["config.json".to_owned()];
    chosen.extend(TOKENIZER_AND_CONFIG.iter().filter(|name| here(name)).map(|name| (*name).to_owned()));
    chosen.extend(weights.into_iter().cloned());
    Ok(Selection { format: Format::Safetensors, files: chosen, quant: Some(SAFETENSORS.to_owned()) })
}

fn no_such_quant(repo: &str, models: &[GgufModel<'_>], quant: &str) -> HubError {
    if models.is_empty() {
        return HubError::NoModelFiles { repo: repo.to_owned() };
    }
    let name = |model: &GgufModel<'_>| match quant_of(model.stem) {
        Some(quant) => quant.to_owned(),
        None => model.files.values().next().map_or_else(String::new, |file| (*file).clone()),
    };
    let mut available: Vec<_> = models.iter().map(name).collect();
    available.sort();
    available.dedup();
    HubError::NoSuchQuant { repo: repo.to_owned(), quant: quant.to_owned(), available }
}

fn ambiguous(repo: &str, models: &[&GgufModel<'_>]) -> HubError {
    let files = models.iter().filter_map(|model| model.files.values().next().map(|file| (*file).clone()));
    HubError::Ambiguous { repo: repo.to_owned(), files: files.collect() }
}

/// Returns the quantisation in a file name.
fn quant_of(stem: &str) -> Option<&'static str> {
    PREFERENCE.iter().chain(OTHERS).copied().find(|quant| has_word(stem, quant))
}

/// Returns whether `text` contains `word` as a whole word, ignoring case: `Q4_0` is not in `x-Q4_0_4_4`, nor in `IQ4_0`.
fn has_word(text: &str, word: &str) -> bool {
    let (text, word) = (text.to_ascii_lowercase(), word.to_ascii_lowercase());
    text.match_indices(&word).any(|(start, _)| {
        let before = text[..start].chars().next_back();
        let after = text[start + word.len()..].chars().next();
        !before.is_some_and(char::is_alphanumeric) && !after.is_some_and(|c| c.is_alphanumeric() || c == '_')
    })
}

/// Parses the number of a split: `model-00002-of-00005` is the second of five.
fn split_number(stem: &str) -> Option<(&str, usize, usize)> {
    let (numbered, n_splits) = stem.rsplit_once("-of-")?;
    let (base, split_idx) = numbered.rsplit_once('-')?;
    let number = |digits: &str| (digits.len() == 5).then(|| digits.parse::<usize>().ok()).flatten();
    let (split_idx, n_splits) = (number(split_idx)?, number(n_splits)?);
    (1 <= split_idx && split_idx <= n_splits).then_some((base, split_idx, n_splits))
}

fn strip_suffix_ignore_case<'a>(text: &'a str, suffix: &str) -> Option<&'a str> {
    let end = text.len().checked_sub(suffix.len())?;
    text.get(end..)?.eq_ignore_ascii_case(suffix).then(|| &text[..end])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    fn pick(names: &[&str], quant: Option<&str>) -> Result<Vec<String>, HubError> {
        select("o/r", &files(names), quant).map(|selection| selection.files)
    }

    #[test]
    fn the_requested_quantisation_is_found_in_any_spelling() {
        let names =
            ["m-Q4_0.gguf", "m-Q4_0_4_4.gguf", "m-IQ4_XS.gguf", "m.q4_k_m.gguf", "m_Q8_0.gguf", "README.md"];
        assert_eq!(pick(&names, Some("q4_0")).unwrap(), ["m-Q4_0.gguf"]);
        assert_eq!(pick(&names, Some("Q4_K_M")).unwrap(), ["m.q4_k_m.gguf"]);
        assert_eq!(pick(&names, Some("Q8_0")).unwrap(), ["m_Q8_0.gguf"]);
        assert_eq!(pick(&names, None).unwrap(), ["m.q4_k_m.gguf"]);
        assert_eq!(pick(&names, Some("m_q8_0.gguf")).unwrap(), ["m_Q8_0.gguf"]);
    }

    #[test]
    fn the_error_of_a_missing_quantisation_lists_the_others() {
        let error = pick(&["m-Q4_0.gguf", "m-Q8_0.gguf", "odd.gguf"], Some("Q4_K_M")).unwrap_err();
        assert_eq!(error.to_string(), "o/r has no Q4_K_M; it has Q4_0, Q8_0, odd.gguf");
        assert!(matches!(pick(&["m-Q4_K_M.gguf"], Some("Q4_K")), Err(HubError::NoSuchQuant { .. })));
    }

    #[test]
    fn split_files_are_complete_and_in_order() {
        let names = ["b/m-Q8_0-00002-of-00002.gguf", "b/m-Q8_0-00001-of-00002.gguf", "m-Q4_0.gguf"];
        assert_eq!(pick(&names, Some("Q8_0")).unwrap(), [names[1], names[0]]);
        let error = pick(&names[..1], None).unwrap_err();
        assert_eq!(error.to_string(), "b/m-Q8_0 is split into 2 files, but o/r has only 1");
    }

    #[test]
    fn two_models_of_one_quantisation_are_ambiguous() {
        let names = ["a-Q4_0.gguf", "b-Q4_0.gguf"];
        assert!(matches!(pick(&names, None), Err(HubError::Ambiguous { files, .. }) if files.len() == 2));
        assert_eq!(pick(&names, Some("b-Q4_0.gguf")).unwrap(), ["b-Q4_0.gguf"]);
    }

    #[test]
    fn a_single_model_may_have_any_name_and_image_encoders_are_skipped() {
        assert_eq!(pick(&["model.gguf", "mmproj-F16.gguf", "x.imatrix.gguf"], None).unwrap(), ["model.gguf"]);
    }

    #[test]
    fn a_folder_is_config_tokenizer_and_one_set_of_weights() {
        let names = [
            "README.md",
            "config.json",
            "consolidated.safetensors",
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "model.safetensors.index.json",
            "onnx/model.onnx",
            "original/model.safetensors",
            "pytorch_model.bin",
            "tokenizer.json",
        ];
        let expected = ["config.json", "tokenizer.json", "model.safetensors.index.json", names[3], names[4]];
        assert_eq!(pick(&names, None).unwrap(), expected);
        assert!(matches!(pick(&["config.json", names[3]], None), Err(HubError::MissingSplit { .. })));
        assert!(matches!(pick(&["model.safetensors"], None), Err(HubError::NoModelFiles { .. })));
        let both = ["config.json", "model.safetensors", "m-Q4_0.gguf"];
        assert_eq!(pick(&both, Some("safetensors")).unwrap(), ["config.json", "model.safetensors"]);
        assert_eq!(all(&files(&both)).len(), 2);
    }
}
