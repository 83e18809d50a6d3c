//! Small tokenizers and files for tests.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use refrain_formats::tokenizer::{SpecialIds, Tokenizer, VocabSpec};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;

use super::encode::Encoder;

pub(crate) const EOS: &str = "<|endoftext|>";

/// A byte-level vocabulary with a few merges and control tokens at the end; `pre` names the pre-tokenizer.
pub(crate) fn byte_level(pre: &str, template: Option<&str>, add_bos: bool) -> Arc<Tokenizer> {
    let mut tokens: Vec<String> = ByteLevel::alphabet().into_iter().map(String::from).collect();
    tokens.sort();
    let merges = ["h e", "l l", "Ġ t", "Ġt he", "he ll", "Ġ Ġ", "Ċ Ċ", "a a", "aa aa", ". Ċ", "Ġ a", "a n"];
    tokens.extend(merges.iter().map(|merge| merge.replace(' ', "")));
    let mut types = vec![1; tokens.len()];
    let control = [EOS, "<|im_start|>", "<|im_end|>", "<s>"];
    let id = |i: usize| Some((types.len() + i) as u32);
    let specials = SpecialIds { bos: id(3), eos: id(0), ..SpecialIds::default() };
    tokens.extend(control.map(str::to_owned));
    types.extend([3; 4]);
    let spec = VocabSpec {
        model: "gpt2".into(),
        pre: Some(pre.into()),
        tokens: tokens.into_iter().collect(),
        token_types: Some(types),
        merges: Some(merges.into_iter().collect()),
        specials,
        add_bos: Some(add_bos),
        chat_template: template.map(str::to_owned),
        ..VocabSpec::default()
    };
    Arc::new(Tokenizer::from_spec(&spec).unwrap())
}

/// An encoder over [`byte_level`] with a BOS.
pub(crate) fn encoder(template: Option<&str>) -> Encoder {
    Encoder::new(byte_level("gpt-2", template, true)).unwrap()
}

pub(crate) fn write(folder: &Path, name: &str, content: &str) -> PathBuf {
    let path = folder.join(name);
    std::fs::write(&path, content).unwrap();
    path
}
