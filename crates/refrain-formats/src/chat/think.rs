//! Separates thinking from the answer while a reply streams in.

/// Kind of a reply's part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PartKind {
    /// Between the tags.
    Thinking,
    /// Everything else.
    Answer,
}

/// A part of a reply, without the tags.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Part {
    /// Whether it is thinking or the answer.
    pub kind: PartKind,
    /// Its text, never empty.
    pub text: String,
}

/// Texts that open and close a thinking part.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ThinkTags {
    /// Opens the thinking part.
    pub open: String,
    /// Closes it.
    pub close: String,
}

impl ThinkTags {
    /// Returns the tags of the model whose chat template wrote `prompt`, recognised by its turn markers.
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
    /// Only white space so far: a thinking part may still open.
    Start,
    /// After the opening tag; line ends that follow it are dropped.
    Opened,
    Thinking,
    /// After the closing tag; line ends that follow it are dropped.
    Closed,
    Answer,
}

/// Splits a streamed reply into thinking and answer. The result does not depend on how the text is cut into deltas.
///
/// A thinking part is recognised only at the start of the reply: an answer that mentions `<think>` is left unchanged.
/// Line ends next to the tags belong to the markup and are dropped.
#[derive(Debug, Clone)]
pub struct ThinkFilter {
    tags: ThinkTags,
    state: FilterState,
    held: String, // text whose kind depends on the next delta
}

impl ThinkFilter {
    /// Creates a filter for a reply that starts outside a thinking part.
    pub fn new(tags: ThinkTags) -> Self {
        Self { tags, state: FilterState::Start, held: String::new() }
    }

    /// Creates a filter for the reply to `prompt`. Some templates open the thinking part in the prompt.
    pub fn for_prompt(tags: ThinkTags, prompt: &str) -> Self {
        let opened = !tags.open.trim_end().is_empty() && prompt.trim_end().ends_with(tags.open.trim_end());
        let state = if opened { FilterState::Opened } else { FilterState::Start };
        Self { tags, state, held: String::new() }
    }

    /// Returns whether the text so far ends inside a thinking part.
    pub fn is_thinking(&self) -> bool {
        matches!(self.state, FilterState::Opened | FilterState::Thinking)
    }

    /// Takes the next delta of the reply and returns the parts that are decided by now.
    pub fn push(&mut self, text: &str) -> Vec<Part> {
        self.held.push_str(text);
        let mut parts = Vec::new();
        while self.step(&mut parts) {}
        parts
    }

    /// Ends the reply and returns the text that was held back.
    pub fn finish(mut self) -> Option<Part> {
        let kind = match self.state {
            FilterState::Opened | FilterState::Closed => return None,
            FilterState::Thinking => PartKind::Thinking,
            FilterState::Start | FilterState::Answer => PartKind::Answer,
        };
        let text = std::mem::take(&mut self.held);
        (!text.is_empty()).then_some(Part { kind, text })
    }

    /// Advances by one state. Returns false if the remaining text must wait for more.
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
        if let Some(start) = self.held.find(self.tags.close.as_str()) {
            let after = self.held.split_off(start + self.tags.close.len());
            self.held.truncate(start);
            self.held.truncate(self.held.trim_end_matches(['\n', '\r']).len());
            emit(parts, PartKind::Thinking, std::mem::replace(&mut self.held, after));
            self.state = FilterState::Closed;
            return true;
        }
        // Hold back line ends and the start of a closing tag: they may be markup.
        let n_tag = (1..=self.tags.close.len().min(self.held.len()))
            .rev()
            .find(|&n| {
                let start = self.held.len() - n;
                self.held.is_char_boundary(start) && self.tags.close.starts_with(&self.held[start..])
            })
            .unwrap_or(0);
        let decided = self.held[..self.held.len() - n_tag].trim_end_matches(['\n', '\r']).len();
        let undecided = self.held.split_off(decided);
        emit(parts, PartKind::Thinking, std::mem::replace(&mut self.held, undecided));
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
