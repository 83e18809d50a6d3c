//! From a checked request to the choices of its reply.

use super::params::Params;
use crate::app::{App, Caller, OpenGuard, REQUEST_LOG};
use crate::error::ApiError;
use crate::ids;
use crate::keys::KeyUse;
use crate::served::ServedModel;
use crate::text::{Choices, Delta, Finish, TextReply, TextRules, TokenLogprob};
use crate::tools::{ToolCall, ToolFormat};
use refrain::ThinkFilter;
use refrain_worker::TokenRequest;
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Maximum number of choices of a request, over all of its prompts.
const MAX_REPLIES: usize = 1024;

/// A checked request.
pub(crate) struct Job {
    pub(crate) model: Arc<ServedModel>,
    pub(crate) prompts: Vec<Vec<u32>>,
    pub(crate) params: Params,
    pub(crate) think: Option<ThinkFilter>,
    pub(crate) tools: Option<ToolFormat>,
    pub(crate) single_call: bool,
}

/// A reply that is being generated. Dropping it cancels what is left.
pub(crate) struct Generation {
    pub(crate) id: String,
    pub(crate) created: u64,
    pub(crate) model: Arc<ServedModel>,
    pub(crate) choices: Choices,
    pub(crate) n_choices: usize,
    pub(crate) usage: Usage,
    open: OpenGuard,
    key: Option<KeyUse>,
}

impl Drop for Generation {
    fn drop(&mut self) {
        let Usage { n_prompt, n_reply, n_reasoning } = self.usage;
        tracing::info!(
            target: REQUEST_LOG,
            id = self.id,
            model = self.model.name(),
            choices = self.n_choices,
            prompt_tokens = n_prompt,
            reply_tokens = n_reply,
            reasoning_tokens = n_reasoning,
            ms = self.open.elapsed().as_secs_f64() * 1e3,
            "ended"
        );
    }
}

/// Tokens of a request.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Usage {
    pub(crate) n_prompt: usize,
    pub(crate) n_reply: usize,
    pub(crate) n_reasoning: usize,
}

impl Usage {
    fn add(&mut self, delta: &Delta) {
        self.n_reply += delta.n_tokens;
        self.n_reasoning += delta.n_reasoning;
    }

    pub(crate) fn json(&self) -> Value {
        json!({
            "prompt_tokens": self.n_prompt,
            "completion_tokens": self.n_reply,
            "total_tokens": self.n_prompt + self.n_reply,
            "completion_tokens_details": { "reasoning_tokens": self.n_reasoning },
        })
    }
}

impl Job {
    /// Submits a request for each choice.
    pub(crate) fn start(self, app: &Arc<App>, caller: &Caller, prefix: &str) -> Result<Generation, ApiError> {
        let Job { model, prompts, params, think, tools, single_call } = self;
        params.check()?;
        let n_choices = prompts.len() * params.n;
        if n_choices > MAX_REPLIES {
            let message = format!("{n_choices} choices are asked for, the maximum is {MAX_REPLIES}");
            return Err(ApiError::invalid("n", message));
        }
        model.check_generates()?;
        let context = model.context(&app.backend.status());
        check_lengths(&prompts, context)?;
        let n_prompt = prompts.iter().map(Vec::len).sum();
        let key = caller.0.as_ref().map(|key| KeyUse::open(key, n_prompt)).transpose()?;
        let own = if params.ignore_eos { &[] } else { model.tokenizer().end_of_generation() };
        let end: Vec<u32> = own.iter().chain(&params.stop_ids).copied().collect();
        let rules = Arc::new(TextRules {
            model: model.clone(),
            end: end.clone(),
            stop_ids: params.stop_ids.clone(),
            stop: params.stop.clone(),
            min_tokens: params.min_tokens,
            include_stop: params.include_stop,
            with_special: params.with_special,
            think,
            tools,
            single_call,
            logprobs: params.n_top.is_some(),
        });
        let user = caller.user(params.user.as_deref());
        let share_prefix = caller.0.as_ref().is_none_or(|key| key.shares_prefix);
        let open = app.open();
        let mut replies = Vec::with_capacity(n_choices);
        for prompt in prompts {
            for choice in 0..params.n {
                let request = TokenRequest {
                    model: model.name().to_owned(),
                    prompt: prompt.clone(),
                    sampling: params.token_sampling(choice),
                    end: end.clone(),
                    min_tokens: params.min_tokens,
                    max_tokens: params.max_tokens,
                    n_top_logprobs: params.n_top.unwrap_or(0),
                    priority: params.priority,
                    user,
                    grammar: params.grammar.clone(),
                    share_prefix,
                };
                let reply = app.backend.submit(request)?;
                replies.push(TextReply::new(reply, rules.clone(), app.metrics.clone()));
            }
        }
        app.metrics.n_prompt_tokens.fetch_add(n_prompt as u64, Ordering::Relaxed);
        Ok(Generation {
            id: ids::fresh(prefix),
            created: ids::unix_seconds(),
            model,
            choices: Choices::new(replies),
            n_choices,
            usage: Usage { n_prompt, ..Usage::default() },
            open,
            key,
        })
    }
}

fn check_lengths(prompts: &[Vec<u32>], context: usize) -> Result<(), ApiError> {
    for prompt in prompts {
        if prompt.is_empty() {
            return Err(ApiError::invalid("prompt", "the prompt has no tokens").hint("send some text"));
        }
        if prompt.len() >= context {
            let message = format!("the prompt has {} tokens, the context holds {context}", prompt.len());
            let error =
                ApiError::invalid("prompt", message).hint("shorten the prompt, or serve a longer context");
            return Err(ApiError { code: Some("context_length_exceeded"), ..error });
        }
    }
    Ok(())
}

/// A whole choice.
#[derive(Default)]
pub(crate) struct WholeChoice {
    pub(crate) reasoning: String,
    pub(crate) text: String,
    pub(crate) calls: Vec<ToolCall>,
    pub(crate) logprobs: Vec<TokenLogprob>,
    pub(crate) finish: Option<Finish>,
}

impl Generation {
    /// Open requests of the server.
    pub(crate) fn n_open(&self) -> usize {
        self.open.n_open()
    }

    /// Counts the tokens of a delta.
    pub(crate) fn count(&mut self, delta: &Delta) {
        self.usage.add(delta);
        if let Some(key) = &self.key {
            key.count(delta.n_tokens);
        }
    }

    /// Waits for all choices.
    pub(crate) async fn collect(mut self) -> Result<(Vec<WholeChoice>, Generation), ApiError> {
        let mut whole: Vec<WholeChoice> = (0..self.n_choices).map(|_| WholeChoice::default()).collect();
        while let Some((idx, delta)) = self.choices.next().await {
            let delta = delta?;
            self.count(&delta);
            let choice = &mut whole[idx];
            choice.reasoning.push_str(&delta.reasoning);
            choice.text.push_str(&delta.text);
            choice.calls.extend(delta.calls);
            choice.logprobs.extend(delta.logprobs);
            choice.finish = delta.finish.or(choice.finish.take());
        }
        Ok((whole, self))
    }
}

/// OpenAI's word for the end of a choice.
pub(crate) fn finish_reason(finish: Option<&Finish>) -> Option<&'static str> {
    finish.map(|finish| match finish {
        Finish::EndToken | Finish::StopToken(_) | Finish::StopText(_) => "stop",
        Finish::MaxTokens | Finish::ContextFull => "length",
        Finish::ToolCalls => "tool_calls",
    })
}

/// vLLM's `stop_reason`: which stop text or token it was.
pub(crate) fn stop_reason(finish: Option<&Finish>) -> Value {
    match finish {
        Some(Finish::StopText(text)) => json!(text),
        Some(Finish::StopToken(token)) => json!(token),
        _ => Value::Null,
    }
}
