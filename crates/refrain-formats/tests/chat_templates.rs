//! Compares chat templates with renderings by `tools/render_templates.py`.

use std::path::{Path, PathBuf};
use std::time::{Duration, UNIX_EPOCH};

use refrain_formats::chat::{ChatError, ChatTemplate, Message, RenderOptions, SpecialTexts};
use serde_json::Value;

fn manifest(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

#[test]
#[cfg_attr(
    not(feature = "shared-data"),
    ignore = "needs ../shared/data: cargo xtask ci turns it on where it exists"
)]
fn real_templates_render_as_transformers_renders_them() {
    let expected: Value = serde_json::from_str(&read(&manifest("tests/data/chat_expected.json"))).unwrap();
    let text_of = |key: &str| expected[key].as_str().map(str::to_owned);
    let specials =
        SpecialTexts { bos: text_of("bos_token"), eos: text_of("eos_token"), ..Default::default() };
    let now = UNIX_EPOCH + Duration::from_secs(expected["now"].as_u64().unwrap());
    let cases = expected["cases"].as_array().unwrap();
    assert!(cases.len() > 100);
    let mut templates = std::collections::BTreeSet::new();
    for case in cases {
        let file = case["template"].as_str().unwrap();
        templates.insert(file);
        let source = read(&manifest("../../../shared/data/templates").join(file));
        let template = ChatTemplate::new(&source, specials.clone()).unwrap();
        let conversation = &expected["conversations"][case["conversation"].as_str().unwrap()];
        let messages: Vec<Message> = serde_json::from_value(conversation["messages"].clone()).unwrap();
        let options = RenderOptions {
            add_generation_prompt: case["add_generation_prompt"].as_bool().unwrap(),
            now: Some(now),
            extra: conversation["variables"].as_object().unwrap().clone(),
            ..Default::default()
        };
        let what = format!("{file}, {}, {}", case["conversation"], case["add_generation_prompt"]);
        let rendered = template.render(&messages, &options);
        match (case["text"].as_str(), rendered) {
            (Some(text), Ok(ours)) => assert_eq!(ours, text, "{what}"),
            (Some(_), Err(error)) => panic!("{what}: {error}"),
            (None, Ok(ours)) => panic!("{what}: rendered {ours:?}, should fail with {}", case["error"]),
            (None, Err(ChatError::Refused { reason, .. })) => assert_eq!(reason, case["error"], "{what}"),
            (None, Err(_)) => {}
        }
    }
    assert_eq!(templates.len(), 8);
}
