//! Tool calls in the text of a reply, in the formats of the known model families.
//!
//! The family is recognised by the prompt that its chat template renders for tools. Text before a call is passed on as it
//! arrives; a call is reported once it is complete. Text that looks like a call but cannot be read stays text, so nothing
//! that a model wrote is lost.

use refrain_worker::TokenGrammar;
use serde_json::{Map, Value, json};

/// A call of a tool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ToolCall {
    /// Name of the function.
    pub(crate) name: String,
    /// Its arguments: a JSON object as text.
    pub(crate) arguments: String,
}

/// How a model writes tool calls.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ToolFormat {
    /// `<tool_call>{"name": …, "arguments": …}</tool_call>` (Hermes, Qwen, SmolLM); also Qwen's form with
    /// `<function=name><parameter=key>` inside the tags.
    Tagged,
    /// `[TOOL_CALLS][{…}, …]`, or `[TOOL_CALLS]name[ARGS]{…}` (Mistral).
    Mistral,
    /// The whole reply is `{"name": …, "parameters": …}` (Llama 3).
    Llama,
    /// `<|tool_call>call:name{key:<|"|>text<|"|>}<tool_call|>` (Gemma 4).
    Gemma,
}

impl ToolFormat {
    /// The format of the model whose chat template wrote `prompt` with tools.
    pub(crate) fn of_prompt(prompt: &str) -> Option<ToolFormat> {
        if prompt.contains("[AVAILABLE_TOOLS]") {
            Some(ToolFormat::Mistral)
        } else if prompt.contains("<|tool>") {
            Some(ToolFormat::Gemma)
        } else if prompt.contains("<tool_call>") {
            Some(ToolFormat::Tagged)
        } else if prompt.contains("<|start_header_id|>") || prompt.contains("<|python_tag|>") {
            Some(ToolFormat::Llama)
        } else {
            None
        }
    }

    /// The text that starts a call; `None` where the first character of the reply decides.
    fn open(&self) -> Option<&'static str> {
        match self {
            ToolFormat::Tagged => Some("<tool_call>"),
            ToolFormat::Mistral => Some("[TOOL_CALLS]"),
            ToolFormat::Gemma => Some("<|tool_call>"),
            ToolFormat::Llama => None,
        }
    }

    /// The text that ends a call; `None` where calls last until the end of the reply.
    fn close(&self) -> Option<&'static str> {
        match self {
            ToolFormat::Tagged => Some("</tool_call>"),
            ToolFormat::Gemma => Some("<tool_call|>"),
            ToolFormat::Mistral | ToolFormat::Llama => None,
        }
    }

    /// The form of one call of one of these functions; `None` where it cannot be forced.
    pub(crate) fn forced(&self, functions: &[&Value]) -> Option<TokenGrammar> {
        let arguments = if *self == ToolFormat::Llama { "parameters" } else { "arguments" };
        let mut defs = Map::new();
        let calls: Vec<Value> = functions
            .iter()
            .enumerate()
            .map(|(idx, function)| {
                let name = format!("arguments{idx}");
                let mut schema = function["parameters"].clone();
                move_references(&mut schema, &format!("#/$defs/{name}"));
                defs.insert(name.clone(), schema);
                json!({
                    "type": "object",
                    "properties": {
                        "name": { "const": function["name"] },
                        arguments: { "$ref": format!("#/$defs/{name}") },
                    },
                    "required": ["name", arguments],
                    "additionalProperties": false,
                })
            })
            .collect();
        let call = json!({ "anyOf": calls });
        let (before, schema, after) = match self {
            ToolFormat::Tagged => ("<tool_call>\n", call, "\n</tool_call>"),
            ToolFormat::Llama => ("", call, ""),
            ToolFormat::Mistral => {
                ("[TOOL_CALLS]", json!({ "type": "array", "items": call, "minItems": 1, "maxItems": 1 }), "")
            }
            // Its notation is not JSON.
            ToolFormat::Gemma => return None,
        };
        let mut schema = schema;
        schema["$defs"] = Value::Object(defs);
        let (before, after) = (before.to_owned(), after.to_owned());
        Some(TokenGrammar::JsonBetween { before, schema: schema.to_string(), after })
    }

    /// Reads the text between the markers.
    fn read(&self, text: &str) -> Option<Vec<ToolCall>> {
        let text = text.trim();
        let calls = match self {
            ToolFormat::Tagged if text.starts_with("<function=") => vec![read_xml(text)?],
            ToolFormat::Tagged => read_json(text)?,
            ToolFormat::Mistral => read_mistral(text)?,
            ToolFormat::Llama => read_llama(text)?,
            ToolFormat::Gemma => vec![read_gemma(text)?],
        };
        (!calls.is_empty()).then_some(calls)
    }
}

/// Has the references of a schema work where the schema is part of another one.
fn move_references(schema: &mut Value, to: &str) {
    match schema {
        Value::Object(keys) => {
            for (key, value) in keys {
                match value {
                    Value::String(reference) if key == "$ref" => {
                        if let Some(pointer) = reference.strip_prefix('#') {
                            *reference = format!("{to}{pointer}");
                        }
                    }
                    value => move_references(value, to),
                }
            }
        }
        Value::Array(values) => values.iter_mut().for_each(|value| move_references(value, to)),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

/// What the parser found in a delta.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ToolDelta {
    /// Text outside of calls.
    pub(crate) text: String,
    /// Complete calls.
    pub(crate) calls: Vec<ToolCall>,
}

/// Finds tool calls in streamed text.
#[derive(Debug)]
pub(crate) struct ToolParser {
    format: ToolFormat,
    /// Text whose meaning depends on what follows.
    held: String,
    /// White space before a call. It belongs to the markup, unless the call turns out to be text.
    gap: String,
    state: ToolState,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ToolState {
    /// Only white space so far.
    Start,
    /// Plain text.
    Text,
    /// Within a call.
    Call,
}

impl ToolParser {
    pub(crate) fn new(format: ToolFormat) -> ToolParser {
        ToolParser { format, held: String::new(), gap: String::new(), state: ToolState::Start }
    }

    /// Adds the next text delta.
    pub(crate) fn push(&mut self, text: &str) -> ToolDelta {
        self.held.push_str(text);
        let mut delta = ToolDelta::default();
        while self.step(&mut delta) {}
        delta
    }

    /// Ends the reply. A call without its end marker is read all the same: the model ended its turn instead.
    pub(crate) fn finish(mut self) -> ToolDelta {
        let mut delta = ToolDelta::default();
        match self.state {
            ToolState::Call => self.end_call(&mut delta, ""),
            ToolState::Start | ToolState::Text => delta.text = std::mem::take(&mut self.held),
        }
        delta
    }

    /// Advances by one state. Returns false if the remaining text must wait for more.
    fn step(&mut self, delta: &mut ToolDelta) -> bool {
        match (self.state, self.format.open()) {
            (ToolState::Start, None) => {
                let Some(first) = self.held.trim_start().chars().next() else { return false };
                let is_call = first == '{' || first == '[';
                let python = "<|python_tag|>";
                let body = self.held.trim_start();
                if !is_call && body.len() < python.len() && python.starts_with(body) {
                    return false;
                }
                self.state =
                    if is_call || body.starts_with(python) { ToolState::Call } else { ToolState::Text };
                true
            }
            (ToolState::Text, None) => {
                delta.text.push_str(&std::mem::take(&mut self.held));
                false
            }
            (ToolState::Start | ToolState::Text, Some(open)) => self.find_open(open, delta),
            (ToolState::Call, _) => self.find_close(delta),
        }
    }

    fn find_open(&mut self, open: &str, delta: &mut ToolDelta) -> bool {
        if let Some(start) = self.held.find(open) {
            let n_text = self.held[..start].trim_end().len();
            delta.text.push_str(&self.held[..n_text]);
            self.gap = self.held[n_text..start].to_owned();
            self.held.drain(..start + open.len());
            self.state = ToolState::Call;
            return true;
        }
        let marker = overlap_start(&self.held, open);
        let keep_from = self.held[..marker].trim_end().len();
        delta.text.push_str(&self.held[..keep_from]);
        self.held.drain(..keep_from);
        false
    }

    fn find_close(&mut self, delta: &mut ToolDelta) -> bool {
        let Some(close) = self.format.close() else { return false };
        let Some(end) = self.held.find(close) else { return false };
        let after = self.held.split_off(end + close.len());
        self.held.truncate(end);
        self.end_call(delta, close);
        self.held = after;
        self.state = ToolState::Start;
        true
    }

    fn end_call(&mut self, delta: &mut ToolDelta, close: &str) {
        let body = std::mem::take(&mut self.held);
        match self.format.read(&body) {
            Some(calls) => delta.calls.extend(calls),
            None => {
                delta.text.push_str(&self.gap);
                delta.text.push_str(self.format.open().unwrap_or_default());
                delta.text.push_str(&body);
                delta.text.push_str(close);
            }
        }
    }
}

/// Where the longest end of `text` starts that is a beginning of `marker`.
fn overlap_start(text: &str, marker: &str) -> usize {
    let n = (1..marker.len().min(text.len() + 1))
        .rev()
        .find(|&n| marker.is_char_boundary(n) && text.ends_with(&marker[..n]))
        .unwrap_or(0);
    text.len() - n
}

/// `{"name": …, "arguments": …}`, or a list of them. Some models call the arguments parameters, or write them as a string.
fn read_json(text: &str) -> Option<Vec<ToolCall>> {
    match serde_json::from_str(text).ok()? {
        Value::Array(calls) => calls.into_iter().map(call_of).collect(),
        call => Some(vec![call_of(call)?]),
    }
}

fn call_of(value: Value) -> Option<ToolCall> {
    let Value::Object(mut call) = value else { return None };
    if let Some(Value::Object(function)) = call.remove("function") {
        return call_of(Value::Object(function));
    }
    let Value::String(name) = call.remove("name")? else { return None };
    let arguments = match call.remove("arguments").or_else(|| call.remove("parameters")) {
        None | Some(Value::Null) => "{}".to_owned(),
        Some(Value::String(text)) => {
            serde_json::from_str::<Map<String, Value>>(&text).ok()?;
            text
        }
        Some(object @ Value::Object(_)) => object.to_string(),
        Some(_) => return None,
    };
    Some(ToolCall { name, arguments })
}

/// `<function=name><parameter=key>value</parameter></function>`. A value that is JSON is one; other values are text.
fn read_xml(text: &str) -> Option<ToolCall> {
    let (name, mut body) = text.strip_prefix("<function=")?.split_once('>')?;
    let mut arguments = Map::new();
    while let Some(start) = body.find("<parameter=") {
        let (key, after) = body[start + "<parameter=".len()..].split_once('>')?;
        let (value, after) = after.split_once("</parameter>")?;
        let value = value.strip_prefix('\n').unwrap_or(value);
        let value = value.strip_suffix('\n').unwrap_or(value);
        let value = serde_json::from_str(value).unwrap_or_else(|_| Value::String(value.to_owned()));
        arguments.insert(key.trim().to_owned(), value);
        body = after;
    }
    Some(ToolCall { name: name.trim().to_owned(), arguments: Value::Object(arguments).to_string() })
}

fn read_mistral(text: &str) -> Option<Vec<ToolCall>> {
    if text.starts_with(['[', '{']) {
        return read_json(text);
    }
    text.split("[TOOL_CALLS]")
        .map(|call| {
            let (name, arguments) = call.split_at(call.find('{')?);
            let name = name.trim().trim_end_matches("[ARGS]");
            // An id may stand between name and arguments.
            let name = name.split("[CALL_ID]").next()?.trim();
            let arguments: Map<String, Value> = serde_json::from_str(arguments.trim()).ok()?;
            let is_name = !name.is_empty();
            is_name
                .then(|| ToolCall { name: name.to_owned(), arguments: Value::Object(arguments).to_string() })
        })
        .collect()
}

/// JSON objects, several of them separated by semicolons.
fn read_llama(text: &str) -> Option<Vec<ToolCall>> {
    let mut rest = text.strip_prefix("<|python_tag|>").unwrap_or(text).trim();
    if let Some(calls) = read_json(rest) {
        return Some(calls);
    }
    let mut calls = Vec::new();
    while !rest.is_empty() {
        let mut values = serde_json::Deserializer::from_str(rest).into_iter::<Value>();
        calls.push(call_of(values.next()?.ok()?)?);
        rest = rest.get(values.byte_offset()..)?.trim_start_matches([';', ' ', '\n']);
    }
    Some(calls)
}

/// `call:name{key:<|"|>text<|"|>,other:[1,2]}`.
fn read_gemma(text: &str) -> Option<ToolCall> {
    let (name, arguments) = text.strip_prefix("call:")?.split_once('{')?;
    let mut reader = GemmaReader { rest: arguments };
    let arguments = reader.object(0)?;
    let is_whole = reader.rest.trim().is_empty() && !name.is_empty();
    is_whole.then(|| ToolCall { name: name.to_owned(), arguments: arguments.to_string() })
}

/// Reads Gemma's notation: JSON with bare keys and with `<|"|>` as the quote.
struct GemmaReader<'a> {
    rest: &'a str,
}

impl<'a> GemmaReader<'a> {
    const QUOTE: &'static str = "<|\"|>";
    const MAX_DEPTH: usize = 64;

    fn eat(&mut self, token: &str) -> bool {
        let rest = self.rest.trim_start().strip_prefix(token);
        self.rest = rest.unwrap_or(self.rest);
        rest.is_some()
    }

    fn until(&mut self, end: &str) -> Option<&'a str> {
        let (text, rest) = self.rest.split_once(end)?;
        self.rest = rest;
        Some(text)
    }

    /// An object whose opening brace was read.
    fn object(&mut self, depth: usize) -> Option<Value> {
        let mut map = Map::new();
        if self.eat("}") {
            return Some(Value::Object(map));
        }
        loop {
            let key = if self.eat(Self::QUOTE) {
                let key = self.until(Self::QUOTE)?;
                self.eat(":").then_some(key)?
            } else {
                self.until(":")?.trim()
            };
            map.insert(key.to_owned(), self.value(depth + 1)?);
            if !self.eat(",") {
                return self.eat("}").then_some(Value::Object(map));
            }
        }
    }

    fn value(&mut self, depth: usize) -> Option<Value> {
        if depth > Self::MAX_DEPTH {
            return None;
        }
        if self.eat(Self::QUOTE) {
            return Some(Value::String(self.until(Self::QUOTE)?.to_owned()));
        }
        if self.eat("{") {
            return self.object(depth);
        }
        if self.eat("[") {
            let mut list = Vec::new();
            if self.eat("]") {
                return Some(Value::Array(list));
            }
            loop {
                list.push(self.value(depth + 1)?);
                if !self.eat(",") {
                    return self.eat("]").then_some(Value::Array(list));
                }
            }
        }
        let end = self.rest.find([',', '}', ']'])?;
        let (word, rest) = self.rest.split_at(end);
        self.rest = rest;
        serde_json::from_str(word.trim()).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The result of a text, which must not depend on how it is cut.
    fn parse(format: &ToolFormat, text: &str) -> (String, Vec<(String, String)>) {
        let run = |deltas: &[&str]| {
            let mut parser = ToolParser::new(format.clone());
            let mut whole = ToolDelta::default();
            for delta in deltas {
                let delta = parser.push(delta);
                whole.text += &delta.text;
                whole.calls.extend(delta.calls);
            }
            let last = parser.finish();
            whole.text += &last.text;
            whole.calls.extend(last.calls);
            whole
        };
        let whole = run(&[text]);
        let starts: Vec<usize> = text.char_indices().map(|(i, _)| i).skip(1).collect();
        for size in [1, 2, 3, 7] {
            let mut deltas = Vec::new();
            let mut from = 0;
            for cut in starts.iter().copied().step_by(size).chain([text.len()]) {
                deltas.push(&text[from..cut]);
                from = cut;
            }
            assert_eq!(run(&deltas), whole, "in deltas of {size}");
        }
        (whole.text, whole.calls.into_iter().map(|call| (call.name, call.arguments)).collect())
    }

    fn call(name: &str, arguments: &str) -> (String, String) {
        (name.to_owned(), arguments.to_owned())
    }

    #[test]
    fn tagged_calls_are_found_between_text() {
        let text = "Let me look.\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": 1}}\n</tool_call>\n\
                    <tool_call>{\"name\": \"g\"}</tool_call>";
        let calls = vec![call("f", r#"{"a":1}"#), call("g", "{}")];
        assert_eq!(parse(&ToolFormat::Tagged, text), ("Let me look.".into(), calls));
    }

    #[test]
    fn a_tagged_call_may_be_written_as_xml() {
        let text = "<tool_call>\n<function=f>\n<parameter=city>\nParis\n</parameter>\n<parameter=n>\n3\n\
                    </parameter>\n</function>\n</tool_call>";
        let calls = vec![call("f", r#"{"city":"Paris","n":3}"#)];
        assert_eq!(parse(&ToolFormat::Tagged, text), (String::new(), calls));
    }

    #[test]
    fn a_call_without_its_end_is_read_and_a_broken_one_stays_text() {
        let calls = vec![call("f", "{}")];
        assert_eq!(parse(&ToolFormat::Tagged, "<tool_call>{\"name\": \"f\"}"), (String::new(), calls));
        let broken = "a <tool_call>{\"name\": </tool_call> b";
        assert_eq!(parse(&ToolFormat::Tagged, broken).1, []);
        assert_eq!(parse(&ToolFormat::Tagged, broken).0, broken);
        assert_eq!(parse(&ToolFormat::Tagged, "1 < 2 <tool"), ("1 < 2 <tool".into(), vec![]));
    }

    #[test]
    fn mistral_writes_a_list_or_names_with_arguments() {
        let list = "[TOOL_CALLS][{\"name\": \"f\", \"arguments\": {\"a\": [1]}}, {\"name\": \"g\"}]";
        let calls = vec![call("f", r#"{"a":[1]}"#), call("g", "{}")];
        assert_eq!(parse(&ToolFormat::Mistral, list), (String::new(), calls));
        let named = "Hm. [TOOL_CALLS]f[ARGS]{\"a\": 1}[TOOL_CALLS]g{}";
        let calls = vec![call("f", r#"{"a":1}"#), call("g", "{}")];
        assert_eq!(parse(&ToolFormat::Mistral, named), ("Hm.".into(), calls));
    }

    #[test]
    fn llama_writes_nothing_but_the_call() {
        let one = "{\"name\": \"f\", \"parameters\": {\"a\": \"b\"}}";
        let calls = vec![call("f", r#"{"a":"b"}"#)];
        assert_eq!(parse(&ToolFormat::Llama, one), (String::new(), calls.clone()));
        let tagged = format!("<|python_tag|>{one}; {one}");
        assert_eq!(parse(&ToolFormat::Llama, &tagged).1, [calls.clone(), calls].concat());
        assert_eq!(parse(&ToolFormat::Llama, "{not json"), ("{not json".into(), vec![]));
        assert_eq!(parse(&ToolFormat::Llama, "<b>Hi</b>"), ("<b>Hi</b>".into(), vec![]));
    }

    #[test]
    fn gemma_has_its_own_notation() {
        let text =
            "Yes.<|tool_call>call:f{city:<|\"|>São, {x}<|\"|>,n:-2.5,deep:{ok:true,l:[1,null]}}<tool_call|>";
        let calls = vec![call("f", r#"{"city":"São, {x}","n":-2.5,"deep":{"ok":true,"l":[1,null]}}"#)];
        assert_eq!(parse(&ToolFormat::Gemma, text), ("Yes.".into(), calls));
        let deep = format!("<|tool_call>call:f{{a:{}", "[".repeat(100_000));
        assert_eq!(ToolParser::new(ToolFormat::Gemma).push(&deep), ToolDelta::default());
    }
}
