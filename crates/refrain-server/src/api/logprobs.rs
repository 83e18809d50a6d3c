//! Log-probabilities in OpenAI's two forms.

use crate::served::ServedModel;
use crate::text::TokenLogprob;
use serde_json::{Map, Value, json};

/// The form of chat completions.
pub(crate) fn chat(model: &ServedModel, tokens: &[TokenLogprob]) -> Value {
    let entry = |token: u32, logprob: f32| {
        let (text, bytes) = model.token_text(token);
        json!({ "token": text, "logprob": finite(logprob), "bytes": bytes })
    };
    let content: Vec<Value> = tokens
        .iter()
        .map(|t| {
            let mut value = entry(t.token, t.logprob);
            value["top_logprobs"] = t.top.iter().map(|(token, logprob)| entry(*token, *logprob)).collect();
            value
        })
        .collect();
    json!({ "content": content, "refusal": null })
}

/// The form of plain completions. `offset` is the length of the text before these tokens, in characters, and is advanced.
pub(crate) fn plain(model: &ServedModel, tokens: &[TokenLogprob], offset: &mut usize) -> Value {
    let mut lists: [Vec<Value>; 4] = Default::default();
    for t in tokens {
        let (text, _) = model.token_text(t.token);
        let top: Map<String, Value> =
            t.top.iter().map(|(token, logprob)| (model.token_text(*token).0, finite(*logprob))).collect();
        lists[3].push(json!(*offset));
        *offset += text.chars().count();
        lists[0].push(json!(text));
        lists[1].push(finite(t.logprob));
        lists[2].push(Value::Object(top));
    }
    let [texts, logprobs, tops, offsets] = lists;
    json!({ "tokens": texts, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets })
}

/// JSON has no infinity: OpenAI sends this number for what is impossible.
fn finite(logprob: f32) -> Value {
    json!(if logprob.is_finite() { logprob } else { -9999.0 })
}
