//! Writes a folder without a tokenizer, such as a golden model of the tests, as a GGUF file in F32 with a small vocabulary,
//! for other programs to read (`tools/logits_llama.py`).
//!
//! `cargo run --profile ci -p refrain-models --example golden_gguf -- FOLDER out.gguf`

use refrain_formats::ModelFiles;
use refrain_formats::tokenizer::VocabSpec;
use refrain_models::Model;
use refrain_tensor::DType;
use std::error::Error;
use std::path::Path;

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [folder, out] = args.as_slice() else {
        return Err("usage: golden_gguf FOLDER FILE".into());
    };
    let model = Model::load(&ModelFiles::open(folder)?)?;
    let letters: Vec<String> = ('!'..='~').map(String::from).collect();
    let tokens = letters.iter().map(String::as_str).chain(["<|endoftext|>"]);
    let types = (0..=letters.len()).map(|idx| if idx < letters.len() { 1 } else { 3 }).collect();
    let vocabulary = VocabSpec {
        model: "gpt2".into(),
        pre: Some("gpt-2".into()),
        tokens: tokens.collect(),
        token_types: Some(types),
        // llama.cpp needs a list of merges.
        merges: Some(["! !"].into_iter().collect()),
        ..VocabSpec::default()
    };
    model.write_gguf(Path::new(out), DType::F32, &vocabulary)?;
    Ok(())
}
