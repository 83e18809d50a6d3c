//! Conversations with tools, in the form that chat templates take, whichever API they came through.

use super::generation::Job;
use super::params::Params;
use crate::app::App;
use crate::error::ApiError;
use crate::fields::{Fields, kind};
use crate::ids;
use crate::served::ServedModel;
use crate::tools::ToolFormat;
use refrain::{Message, RenderOptions, ThinkFilter, ThinkTags};
use refrain_worker::TokenGrammar;
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// A conversation to answer.
#[derive(Clone, Debug, Default)]
pub(crate) struct Conversation {
    pub(crate) messages: Vec<Message>,
    /// Functions in OpenAI's form.
    pub(crate) tools: Vec<Value>,
    pub(crate) tool_choice: ToolChoice,
    pub(crate) options: RenderOptions,
    /// Whether the reply has a format.
    pub(crate) is_constrained: bool,
}

/// Which tools the model may call.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) enum ToolChoice {
    /// As it likes.
    #[default]
    Auto,
    /// None.
    None,
    /// At least one.
    Required,
    /// This one.
    Named(String),
}

/// A rendered conversation.
pub(crate) struct RenderedPrompt {
    pub(crate) tokens: Vec<u32>,
    think: Option<ThinkFilter>,
    tools: Option<ToolFormat>,
    /// The form of a call that the reply must be.
    call: Option<TokenGrammar>,
}

impl Conversation {
    /// The generation of a reply. Blocks.
    pub(crate) fn job(
        mut self,
        app: &App,
        model: Arc<ServedModel>,
        mut params: Params,
        single_call: bool,
    ) -> Result<Job, ApiError> {
        self.constrain(&params)?;
        let context = model.context(&app.backend.status());
        let RenderedPrompt { tokens, think, tools, call } = self.render(&model, context)?;
        params.grammar = params.grammar.or(call);
        Ok(Job { prompts: vec![tokens], think, tools, single_call, model, params })
    }

    /// Renders and tokenizes the conversation. Blocks.
    pub(crate) fn render(mut self, model: &ServedModel, context: usize) -> Result<RenderedPrompt, ApiError> {
        if self.messages.is_empty() {
            return Err(ApiError::invalid("messages", "messages is empty").hint("send at least one message"));
        }
        let offers_tools = !self.tools.is_empty() && self.tool_choice != ToolChoice::None;
        if offers_tools {
            let tools = Value::Array(self.tools.clone());
            self.options.extra.insert("tools".to_owned(), tools);
        }
        let prompt = model.render(&self.messages, &self.options)?;
        let tools = if offers_tools { Some(self.call_format(model, &prompt)?) } else { None };
        let think = ThinkFilter::for_prompt(ThinkTags::of_prompt(&prompt), &prompt);
        if self.is_constrained && think.is_thinking() {
            let message =
                format!("{} always thinks first, and a reply with a format has no room for it", model.name());
            return Err(ApiError::unsupported("response_format", message).hint("use another model"));
        }
        let call = match (&self.tool_choice, &tools) {
            (ToolChoice::Required | ToolChoice::Named(_), Some(format)) => Some(self.forced_call(format)?),
            _ => None,
        };
        Ok(RenderedPrompt { tokens: model.chat_tokens(&prompt, context)?, think: Some(think), tools, call })
    }

    /// Prepares a conversation whose reply has a format: that of the request, or of a tool call. Such a reply has no room for
    /// thinking, so that is switched off.
    fn constrain(&mut self, params: &Params) -> Result<(), ApiError> {
        let is_forced = matches!(self.tool_choice, ToolChoice::Required | ToolChoice::Named(_));
        self.is_constrained = is_forced || params.grammar.is_some();
        if !self.is_constrained {
            return Ok(());
        }
        if params.grammar.is_some() && !self.tools.is_empty() && self.tool_choice != ToolChoice::None {
            let message = "a reply with a format cannot call tools";
            return Err(
                ApiError::invalid("tools", message).hint("set tool_choice to none, or remove the format")
            );
        }
        if is_forced && !params.stop.is_empty() {
            let message = "a stop text would end the tool call before it is complete";
            return Err(ApiError::invalid("stop", message).hint("remove stop"));
        }
        if self.options.thinking == Some(true) {
            let message = "a reply with a format, or a forced tool call, has no room for thinking";
            return Err(ApiError::invalid("thinking", message).hint("switch thinking off"));
        }
        self.options.thinking = Some(false);
        Ok(())
    }

    /// The form of a call of one of the tools, or of the named one.
    fn forced_call(&self, format: &ToolFormat) -> Result<TokenGrammar, ApiError> {
        let named = |tool: &&Value| match &self.tool_choice {
            ToolChoice::Named(name) => tool["function"]["name"] == name.as_str(),
            _ => true,
        };
        let functions: Vec<&Value> = self.tools.iter().filter(named).map(|tool| &tool["function"]).collect();
        if functions.is_empty() {
            return Err(ApiError::invalid(
                "tool_choice",
                "tool_choice names a function that is not among the tools",
            ));
        }
        format.forced(&functions).ok_or_else(|| {
            let message = "a forced tool call is not supported in the format of this model";
            ApiError::unsupported("tool_choice", message).hint("use auto, and ask for the call in the prompt")
        })
    }

    /// The format of tool calls.
    fn call_format(&self, model: &ServedModel, prompt: &str) -> Result<ToolFormat, ApiError> {
        let mut names = self.tools.iter().filter_map(|tool| tool["function"]["name"].as_str());
        if !names.all(|name| prompt.contains(name)) {
            let message = format!("the chat template of {} does not describe tools", model.name());
            return Err(
                ApiError::unsupported("tools", message).hint("use a model that was trained for tools")
            );
        }
        ToolFormat::of_prompt(prompt).ok_or_else(|| {
            let message = format!("the format of tool calls of {} is not known", model.name());
            ApiError::unsupported("tools", message).hint("use a Qwen, Llama 3, Mistral or Gemma 4 model")
        })
    }
}

/// Reads `tools` in the form of OpenAI's chat completions: `{"type": "function", "function": {…}}`.
pub(crate) fn read_tools(fields: &mut Fields) -> Result<Vec<Value>, ApiError> {
    let list = fields.list("tools")?.unwrap_or_default();
    list.into_iter()
        .enumerate()
        .map(|(idx, tool)| {
            let path = format!("tools[{idx}]");
            let mut tool = Fields::of(tool, &path)?;
            check_type(&mut tool, "function")?;
            let mut function = tool.object("function")?.ok_or_else(|| {
                let path = format!("{path}.function");
                ApiError::invalid(path.clone(), format!("{path} is missing"))
            })?;
            let function = read_function(&mut function, "parameters").and_then(|read| {
                function.finish()?;
                Ok(read)
            })?;
            tool.finish()?;
            Ok(function)
        })
        .collect()
}

/// Refuses a `type` other than the one that is supported.
pub(crate) fn check_type(fields: &mut Fields, want: &str) -> Result<(), ApiError> {
    match fields.string("type")?.as_deref() {
        None => Ok(()),
        Some(found) if found == want => Ok(()),
        Some(found) => {
            let path = fields.path("type");
            let found: String = found.chars().take(64).collect();
            let message = format!("{path} = {found} is not supported");
            Err(ApiError::unsupported(path, message).hint(format!("supported is {want}")))
        }
    }
}

/// Reads a function and returns it as a tool in OpenAI's form. The schema of its arguments has different names.
pub(crate) fn read_function(fields: &mut Fields, schema_name: &'static str) -> Result<Value, ApiError> {
    let name = fields.string("name")?.unwrap_or_default();
    let is_word = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
    if name.is_empty() || name.len() > 128 || !name.chars().all(is_word) {
        let path = fields.path("name");
        let message = format!("{path} must have 1 to 128 letters, digits, dots, dashes or underscores");
        return Err(ApiError::invalid(path, message));
    }
    let mut function = Map::new();
    function.insert("name".into(), name.into());
    if let Some(description) = fields.string("description")? {
        function.insert("description".into(), description.into());
    }
    let schema = fields.map(schema_name)?.unwrap_or_else(|| {
        let empty = json!({ "type": "object", "properties": {} });
        empty.as_object().cloned().unwrap_or_default()
    });
    function.insert("parameters".into(), Value::Object(schema));
    // Arguments follow the schema only where a call is forced.
    fields.without_effect(&["strict"]);
    Ok(json!({ "type": "function", "function": function }))
}

/// Reads OpenAI's `tool_choice`; both forms of a named function.
pub(crate) fn read_tool_choice(fields: &mut Fields, n_tools: usize) -> Result<ToolChoice, ApiError> {
    let name = "tool_choice";
    let choice = match fields.take(name) {
        None => ToolChoice::Auto,
        Some(Value::String(word)) => match word.as_str() {
            "auto" => ToolChoice::Auto,
            "none" => ToolChoice::None,
            "required" => ToolChoice::Required,
            _ => {
                let message = "tool_choice must be auto, none, required or a function";
                return Err(ApiError::invalid(name, message));
            }
        },
        Some(value) => {
            let mut choice = Fields::of(value, name)?;
            check_type(&mut choice, "function")?;
            let function = match choice.object("function")? {
                Some(mut inner) => {
                    let named = inner.string("name")?;
                    inner.finish()?;
                    named
                }
                None => choice.string("name")?,
            };
            choice.finish()?;
            let function =
                function.ok_or_else(|| ApiError::invalid(name, "tool_choice names no function"))?;
            ToolChoice::Named(function)
        }
    };
    if n_tools == 0 && matches!(choice, ToolChoice::Required | ToolChoice::Named(_)) {
        return Err(ApiError::invalid(name, "tool_choice asks for a call, but there are no tools"));
    }
    Ok(choice)
}

/// Reads OpenAI's messages.
pub(crate) fn read_messages(list: Vec<Value>) -> Result<Vec<Message>, ApiError> {
    list.into_iter()
        .enumerate()
        .map(|(idx, value)| read_message(value, &format!("messages[{idx}]")))
        .collect()
}

fn read_message(value: Value, path: &str) -> Result<Message, ApiError> {
    let mut fields = Fields::of(value, path)?;
    let role = fields.string("role")?.unwrap_or_default();
    let role = match role.as_str() {
        // Chat templates know the older name.
        "developer" => "system",
        "system" | "user" | "assistant" | "tool" => role.as_str(),
        _ => {
            let path = format!("{path}.role");
            let message = format!("{path} must be system, developer, user, assistant or tool");
            return Err(ApiError::invalid(path, message));
        }
    };
    let calls = read_calls(&mut fields)?;
    let content = fields.take("content");
    let content = match content {
        None if role == "assistant" => String::new(),
        None => {
            let path = format!("{path}.content");
            return Err(ApiError::invalid(path.clone(), format!("{path} is missing")));
        }
        Some(content) => read_content(content, &format!("{path}.content"))?,
    };
    let mut message = Message::new(role, content);
    if !calls.is_empty() {
        message.extra.insert("tool_calls".into(), Value::Array(calls));
    }
    for name in ["name", "tool_call_id"] {
        if let Some(text) = fields.string(name)? {
            message.extra.insert(name.into(), text.into());
        }
    }
    let (reasoning, older) = (fields.string("reasoning")?, fields.string("reasoning_content")?);
    if let Some(reasoning) = older.or(reasoning) {
        message.extra.insert("reasoning_content".into(), reasoning.into());
    }
    // What OpenAI's own replies contain beside the text.
    for name in ["refusal", "audio", "function_call"] {
        fields.only(name, &[], "remove it")?;
    }
    fields.only("annotations", &[json!([])], "remove it")?;
    fields.finish()?;
    Ok(message)
}

/// Earlier tool calls, with their arguments as objects: templates expect those.
fn read_calls(fields: &mut Fields) -> Result<Vec<Value>, ApiError> {
    let path = fields.path("tool_calls");
    let list = fields.list("tool_calls")?.unwrap_or_default();
    let calls = list.into_iter().enumerate().map(|(idx, call)| {
        let path = format!("{path}[{idx}]");
        let mut call = Fields::of(call, &path)?;
        check_type(&mut call, "function")?;
        let id = call.string("id")?.unwrap_or_else(|| ids::fresh("call_"));
        call.without_effect(&["index"]);
        let function = call.required("function")?;
        call.finish()?;
        let mut function = Fields::of(function, &format!("{path}.function"))?;
        let name = function.required("name")?;
        let arguments = function.take("arguments");
        function.finish()?;
        Ok(tool_call(&id, name, arguments))
    });
    calls.collect()
}

/// A tool call as templates expect it.
pub(crate) fn tool_call(id: &str, name: Value, arguments: Option<Value>) -> Value {
    let arguments = match arguments {
        Some(Value::String(text)) if text.is_empty() => json!({}),
        Some(Value::String(text)) => serde_json::from_str(&text).unwrap_or(Value::String(text)),
        Some(value) => value,
        None => json!({}),
    };
    json!({ "id": id, "type": "function", "function": { "name": name, "arguments": arguments } })
}

/// Content: a text, or a list of parts that are texts.
pub(crate) fn read_content(content: Value, path: &str) -> Result<String, ApiError> {
    let parts = match content {
        Value::String(text) => return Ok(text),
        Value::Array(parts) => parts,
        other => {
            let message = format!("{path} is {}, must be a string or a list of parts", kind(&other));
            return Err(ApiError::invalid(path, message));
        }
    };
    let mut texts = Vec::with_capacity(parts.len());
    for (idx, part) in parts.into_iter().enumerate() {
        let path = format!("{path}[{idx}]");
        let mut part = Fields::of(part, &path)?;
        let part_type = part.string("type")?.unwrap_or_else(|| "text".into());
        if !matches!(part_type.as_str(), "text" | "input_text" | "output_text") {
            let part_type: String = part_type.chars().take(64).collect();
            let message = format!("{path}.type = {part_type} is not supported");
            let error = ApiError::unsupported(format!("{path}.type"), message);
            return Err(error.hint("send text only"));
        }
        match part.string("text")? {
            Some(text) => texts.push(text),
            None => return Err(ApiError::invalid(format!("{path}.text"), format!("{path}.text is missing"))),
        }
        part.without_effect(&["cache_control", "annotations", "citations", "logprobs"]);
        part.finish()?;
    }
    Ok(texts.join("\n"))
}
