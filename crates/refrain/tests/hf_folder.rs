//! A Hugging Face folder: a tiny golden model with its own tokenizer, chat template and defaults.

use refrain::{
    Error, Finish, Generate, Message, Model, Prompt, RenderOptions, SamplingParams, Session, SessionOptions,
};
use serde_json::{Map, Value, json};
use std::path::Path;

/// A folder with weights, to which the test adds other files.
fn folder() -> tempfile::TempDir {
    let at = tempfile::tempdir().unwrap();
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../refrain-models/tests/goldens/llama");
    for name in ["config.json", "model.safetensors"] {
        std::fs::copy(golden.join(name), at.path().join(name)).unwrap();
    }
    at
}

fn write(at: &tempfile::TempDir, name: &str, value: &Value) {
    std::fs::write(at.path().join(name), value.to_string()).unwrap();
}

/// The printable characters of ASCII and the first byte of some others, one token each, after `special`.
fn tokenizer(special: &[&str], n_more: usize) -> Value {
    // Byte-level vocabularies write a blank as U+0120 and the byte C3 as U+00C3.
    let characters = ('!'..='~').chain(['\u{120}', HALF]).map(String::from);
    let more = (0..n_more).map(|i| format!("<extra{i}>"));
    let texts = special.iter().map(|s| s.to_string()).chain(characters).chain(more);
    let vocab: Map<String, Value> = texts.zip((0..).map(Value::from)).collect();
    let added: Vec<Value> = special
        .iter()
        .enumerate()
        .map(|(id, content)| {
            json!({
                "id": id, "content": content, "special": true, "single_word": false,
                "lstrip": false, "rstrip": false, "normalized": false,
            })
        })
        .collect();
    let bytes =
        json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true });
    json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added, "normalizer": null,
        "pre_tokenizer": bytes, "post_processor": null, "decoder": bytes,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocab, "merges": [],
        },
    })
}

const HALF: char = '\u{c3}';
const SPECIAL: [&str; 5] = ["<unk>", "<s>", "</s>", "<|a|>", "<|z|>"];

fn greedy(max_tokens: usize) -> Generate {
    Generate { sampling: Some(SamplingParams::greedy()), max_tokens: Some(max_tokens), ..Generate::default() }
}

#[test]
fn a_folder_with_a_tokenizer_generates_and_chats() {
    let at = folder();
    write(&at, "tokenizer.json", &tokenizer(&SPECIAL, 0));
    let template = "{% for m in messages %}<|a|>{{ m.content }}<|z|>{% endfor %}";
    write(&at, "tokenizer_config.json", &json!({ "chat_template": template, "eos_token": "</s>" }));
    write(
        &at,
        "generation_config.json",
        &json!({ "do_sample": true, "temperature": 0.6, "top_k": 5, "top_p": 0.9 }),
    );
    let model = Model::open(at.path()).unwrap();
    let sampling = model.sampling();
    assert_eq!((sampling.temperature, sampling.top_k, sampling.top_p), (0.6, 5, 0.9));
    assert_eq!(model.tokenizer().end_of_generation(), [2]);

    let mut session = Session::new(&model, &SessionOptions::default()).unwrap();
    let mut generation = session.generate(Prompt::Text("Hi there"), &greedy(6)).unwrap();
    let tokens: Vec<u32> = generation.by_ref().filter_map(|p| p.unwrap().token).collect();
    let finish = generation.summary().finish;
    assert!(tokens.len() == 6 || finish == Some(Finish::EndOfTurn), "{finish:?}");
    assert_eq!(generation.summary().n_prompt, 8);
    drop(generation);

    let messages = [Message::new("user", "Hi")];
    let render = RenderOptions::default();
    assert_eq!(model.render(&messages, &render).unwrap(), "<|a|>Hi<|z|>");
    let mut generation = session.generate(Prompt::Chat(&messages, &render), &greedy(1)).unwrap();
    generation.by_ref().for_each(|piece| drop(piece.unwrap()));
    assert_eq!(generation.summary().n_prompt, 4, "control tokens are one token each");
}

#[test]
fn a_folder_without_a_tokenizer_or_a_template_says_so() {
    let at = folder();
    let error = Model::open(at.path()).unwrap_err();
    assert!(matches!(error, Error::NoTokenizer { .. }), "{error}");
    assert!(error.hint().is_some_and(|hint| hint.contains("tokenizer.json")));

    write(&at, "tokenizer.json", &tokenizer(&SPECIAL, 0));
    let model = Model::open(at.path()).unwrap();
    let error = model.render(&[Message::new("user", "Hi")], &RenderOptions::default()).unwrap_err();
    assert!(matches!(error, Error::NoChatTemplate { .. }), "{error}");
}

#[test]
fn a_tokenizer_with_more_tokens_than_the_model_is_refused() {
    let at = folder();
    write(&at, "tokenizer.json", &tokenizer(&SPECIAL, 28));
    let error = Model::open(at.path()).unwrap_err();
    assert_eq!(error.to_string(), "the tokenizer has 129 tokens, the model has only 128");
}

#[test]
fn a_stop_text_in_the_remaining_text_at_the_end_is_the_finish_reason() {
    let at = folder();
    write(&at, "tokenizer.json", &tokenizer(&SPECIAL, 0));
    let model = Model::open(at.path()).unwrap();
    let half = model.tokenizer().token_id(&HALF.to_string()).unwrap();
    let mut session = Session::new(&model, &SessionOptions::default()).unwrap();
    let sampling = Some(SamplingParams { logit_bias: vec![(half, 1e6)], ..SamplingParams::greedy() });
    // Half a character is shown as U+FFFD once nothing can complete it.
    for (stop, shown, finish) in [("#", "\u{fffd}", Finish::MaxTokens), ("\u{fffd}", "", Finish::StopText)] {
        let options = Generate { sampling: sampling.clone(), stop: vec![stop.into()], ..greedy(1) };
        let mut generation = session.generate(Prompt::Text("Hi"), &options).unwrap();
        let text: String = generation.by_ref().map(|piece| piece.unwrap().text).collect();
        assert_eq!((text.as_str(), generation.summary().finish), (shown, Some(finish)));
    }
}
