//! The thinking part of a reply, told apart while the reply streams in.

/// Whether a piece of a reply is thinking or the answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PartKind {
    /// Between the tags.
    Thinking,
    /// Everything else.
    Answer,
}

/// A piece of a reply; the tags themselves are in no part.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Part {
    /// Which side of the tags the text was on.
    pub kind: PartKind,
    /// Its text, never empty.
    pub text: String,
}

/// The texts that open and close a thinking part.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ThinkTags {
    /// Opens the thinking part.
    pub open: String,
    /// Closes it.
    pub close: String,
}

impl ThinkTags {
    /// The tags of the model whose chat template wrote a prompt, known by what the template puts around turns.
    pub fn of_prompt(prompt: &str) -> ThinkTags {
        match prompt.contains("<|turn>") {
            // Gemma 4.
            true => ThinkTags { open: "<|channel>thought".to_owned(), close: "<channel|>".to_owned() },
            false => ThinkTags::default(),
        }
    }
}

impl Default for ThinkTags {
    fn default() -> Self {
        Self { open: "<think>".to_owned(), close: "</think>".to_owned() }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum FilterState {
    /// Nothing but white space so far: a thinking part may still open.
    Start,
    /// After the opening tag; line ends right behind it are dropped.
    Opened,
    Thinking,
    /// After the closing tag; line ends right behind it are dropped.
    Closed,
    Answer,
}

/// Splits a streamed reply into thinking and answer, however the text is cut into pieces.
///
/// A thinking part is recognised only at the start of the reply: an answer that talks about `<think>` stays as it is.
/// Line ends between the tags and their texts belong to the markup and are dropped.
#[derive(Debug, Clone)]
pub struct ThinkFilter {
    tags: ThinkTags,
    state: FilterState,
    held: String, // text whose meaning the next piece decides
}

impl ThinkFilter {
    /// A filter for a reply that starts outside a thinking part.
    pub fn new(tags: ThinkTags) -> Self {
        Self { tags, state: FilterState::Start, held: String::new() }
    }

    /// A filter for the reply to `prompt`: templates of some models open the thinking part in the prompt already.
    pub fn for_prompt(tags: ThinkTags, prompt: &str) -> Self {
        let opened = !tags.open.trim_end().is_empty() && prompt.trim_end().ends_with(tags.open.trim_end());
        let state = if opened { FilterState::Opened } else { FilterState::Start };
        Self { tags, state, held: String::new() }
    }

    /// Whether the text so far ends inside a thinking part.
    pub fn is_thinking(&self) -> bool {
        matches!(self.state, FilterState::Opened | FilterState::Thinking)
    }

    /// Takes the next piece of the reply and returns what can be told by now.
    pub fn push(&mut self, text: &str) -> Vec<Part> {
        self.held.push_str(text);
        let mut parts = Vec::new();
        while self.step(&mut parts) {}
        parts
    }

    /// Ends the reply and returns what was still held back.
    pub fn finish(mut self) -> Option<Part> {
        let kind = match self.state {
            FilterState::Opened | FilterState::Closed => return None,
            FilterState::Thinking => PartKind::Thinking,
            FilterState::Start | FilterState::Answer => PartKind::Answer,
        };
        let text = std::mem::take(&mut self.held);
        (!text.is_empty()).then_some(Part { kind, text })
    }

    /// Moves on by one state; false when the rest has to wait for more text.
    fn step(&mut self, parts: &mut Vec<Part>) -> bool {
        match self.state {
            FilterState::Start => {
                let body = self.held.trim_start();
                if self.tags.open.is_empty() {
                    self.state = FilterState::Answer;
                } else if let Some(rest) = body.strip_prefix(self.tags.open.as_str()) {
                    self.held = rest.to_owned();
                    self.state = FilterState::Opened;
                } else if self.tags.open.starts_with(body) {
                    return false;
                } else {
                    self.state = FilterState::Answer;
                }
                true
            }
            FilterState::Opened | FilterState::Closed => {
                let n_line_ends = self.held.len() - self.held.trim_start_matches(['\n', '\r']).len();
                self.held.drain(..n_line_ends);
                if self.held.is_empty() {
                    return false;
                }
                self.state = if self.state == FilterState::Opened {
                    FilterState::Thinking
                } else {
                    FilterState::Answer
                };
                true
            }
            FilterState::Thinking => self.step_thinking(parts),
            FilterState::Answer => {
                emit(parts, PartKind::Answer, std::mem::take(&mut self.held));
                false
            }
        }
    }

    fn step_thinking(&mut self, parts: &mut Vec<Part>) -> bool {
        if let Some(at) = self.held.find(self.tags.close.as_str()) {
            let rest = self.held.split_off(at + self.tags.close.len());
            self.held.truncate(at);
            self.held.truncate(self.held.trim_end_matches(['\n', '\r']).len());
            emit(parts, PartKind::Thinking, std::mem::replace(&mut self.held, rest));
            self.state = FilterState::Closed;
            return true;
        }
        // Line ends and the start of a closing tag wait: together they may be markup.
        let n_tag = (1..=self.tags.close.len().min(self.held.len()))
            .rev()
            .find(|&n| {
                let at = self.held.len() - n;
                self.held.is_char_boundary(at) && self.tags.close.starts_with(&self.held[at..])
            })
            .unwrap_or(0);
        let sure = self.held[..self.held.len() - n_tag].trim_end_matches(['\n', '\r']).len();
        let rest = self.held.split_off(sure);
        emit(parts, PartKind::Thinking, std::mem::replace(&mut self.held, rest));
        false
    }
}

impl Default for ThinkFilter {
    fn default() -> Self {
        Self::new(ThinkTags::default())
    }
}

fn emit(parts: &mut Vec<Part>, kind: PartKind, text: String) {
    if !text.is_empty() {
        parts.push(Part { kind, text });
    }
}
