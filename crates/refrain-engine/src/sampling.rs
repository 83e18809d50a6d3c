//! Sampling parameters, and their row in the control block.

use refrain_graph::{LapsingBias, SAMPLE_PARAMS, SampleParam};

/// Default capacity of the token history that penalties look at. Longer windows use four times as much,
/// sixteen times, and so on.
pub const HISTORY: usize = 256;
/// Maximum number of tokens with a bias.
pub const MAX_BIAS: usize = 256;
/// Maximum number of top log-probabilities per choice.
pub const MAX_TOP: usize = 20;

/// How the next token is chosen. The filters apply in the order top-k, top-p, min-p; then the temperature.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// Temperature; 0 is greedy.
    pub temperature: f32,
    /// Keep the `top_k` most probable tokens; 0 keeps all.
    pub top_k: usize,
    /// Keep the smallest set of most probable tokens that reaches this probability; 1 keeps all.
    pub top_p: f32,
    /// Keep tokens with at least this probability relative to the most probable one; 0 keeps all.
    pub min_p: f32,
    /// Divides the logits of recent tokens; 1 has no effect.
    pub repeat_penalty: f32,
    /// Subtracted for each recent occurrence of a token.
    pub frequency_penalty: f32,
    /// Subtracted if a token occurred recently.
    pub presence_penalty: f32,
    /// Number of recent tokens that penalties look at, including the prompt; `usize::MAX` for the whole
    /// sequence.
    pub penalty_window: usize,
    /// Added to the logits of individual tokens.
    pub logit_bias: Vec<(u32, f32)>,
    /// The same seed gives the same output.
    pub seed: u64,
}

impl Default for SamplingParams {
    fn default() -> SamplingParams {
        SamplingParams {
            temperature: 0.8,
            top_k: 40,
            top_p: 0.95,
            min_p: 0.05,
            repeat_penalty: 1.0,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            penalty_window: 64,
            logit_bias: Vec::new(),
            seed: 0,
        }
    }
}

/// A sampling parameter that is out of range.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("{name} is {got}, must be {want}")]
pub struct SamplingError {
    /// The parameter.
    pub name: &'static str,
    /// Its value.
    pub got: String,
    /// Its valid values.
    pub want: String,
}

impl SamplingError {
    /// An action that resolves the error.
    pub fn hint(&self) -> String {
        let usual = match self.name {
            "temperature" => "0 always takes the most probable token, 0.6 to 1 is usual",
            "top-p" => "1 keeps all tokens, 0.9 to 0.95 is usual",
            "min-p" => "0 keeps all tokens, 0.05 is usual",
            "repeat penalty" => "1 has no effect, 1.05 to 1.2 is usual",
            "frequency or presence penalty" => "0 has no effect, 0.1 to 1 is usual",
            _ => return format!("use a {} that is {}", self.name, self.want),
        };
        usual.into()
    }
}

impl SamplingParams {
    /// Always the most probable token.
    pub fn greedy() -> SamplingParams {
        SamplingParams { temperature: 0.0, ..SamplingParams::default() }
    }

    fn has_penalties(&self) -> bool {
        self.repeat_penalty != 1.0 || self.frequency_penalty != 0.0 || self.presence_penalty != 0.0
    }

    /// Rejects values that are out of range for a vocabulary of `vocab` tokens.
    pub fn check(&self, vocab: usize) -> Result<(), SamplingError> {
        let refuse = |name, got: String, want: &str| Err(SamplingError { name, got, want: want.into() });
        let finite = |v: f32| v.is_finite();
        if !(finite(self.temperature) && self.temperature >= 0.0) {
            return refuse("temperature", self.temperature.to_string(), "0 or more");
        }
        if !(self.top_p > 0.0 && self.top_p <= 1.0) {
            return refuse("top-p", self.top_p.to_string(), "above 0 and at most 1");
        }
        if !(0.0..=1.0).contains(&self.min_p) {
            return refuse("min-p", self.min_p.to_string(), "between 0 and 1");
        }
        if !(finite(self.repeat_penalty) && self.repeat_penalty > 0.0) {
            return refuse("repeat penalty", self.repeat_penalty.to_string(), "above 0");
        }
        if !finite(self.frequency_penalty) || !finite(self.presence_penalty) {
            let got = format!("{} and {}", self.frequency_penalty, self.presence_penalty);
            return refuse("frequency or presence penalty", got, "a number");
        }
        if self.logit_bias.len() > MAX_BIAS {
            let got = format!("{} entries", self.logit_bias.len());
            return refuse("logit bias", got, &format!("at most {MAX_BIAS} entries"));
        }
        if let Some((id, _)) = self.logit_bias.iter().find(|(id, _)| *id as usize >= vocab) {
            return refuse("logit bias", format!("for token {id}"), &format!("for tokens below {vocab}"));
        }
        // -inf forbids a token; +inf would leave no probability for the others.
        if let Some((_, bias)) = self.logit_bias.iter().find(|(_, b)| b.is_nan() || *b == f32::INFINITY) {
            return refuse("logit bias", bias.to_string(), "a number or -inf");
        }
        Ok(())
    }
}

/// One row of the control block's sampling inputs. Built once, updated for every token that is chosen
/// individually.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingRow {
    /// Laid out by [`SampleParam`].
    pub params: [f32; SAMPLE_PARAMS],
    /// Seed low, seed high, position, unused.
    pub rng: [u32; 4],
    /// Tokens that penalties look at, oldest first; empty without penalties.
    pub history: Vec<i32>,
    /// Tokens with a bias; -1 for unused entries.
    pub bias_ids: [i32; MAX_BIAS],
    /// Their biases.
    pub bias: [f32; MAX_BIAS],
    /// Number of top log-probabilities returned with the choice, at most [`MAX_TOP`].
    pub n_top: usize,
    /// One bit per token: whether it may be chosen. Empty if every token may.
    pub mask: Vec<u32>,
    /// Whether the mask of the next choice is still being computed.
    pub is_late: bool,
    /// Maximum number of tokens that penalties look at.
    window: usize,
    /// Bias entries in use.
    n_bias: usize,
    /// The last of those entries forbid tokens only for the first choices.
    lapsing: Option<LapsingBias>,
}

impl SamplingRow {
    /// Builds the row from parameters that passed [`SamplingParams::check`].
    pub fn new(params: &SamplingParams) -> SamplingRow {
        let mut row = SamplingRow {
            params: [0.0; SAMPLE_PARAMS],
            rng: [params.seed as u32, (params.seed >> 32) as u32, 0, 0],
            history: Vec::new(),
            bias_ids: [-1; MAX_BIAS],
            bias: [0.0; MAX_BIAS],
            n_top: 0,
            mask: Vec::new(),
            is_late: false,
            window: if params.has_penalties() { params.penalty_window } else { 0 },
            n_bias: params.logit_bias.len().min(MAX_BIAS),
            lapsing: None,
        };
        row.params[SampleParam::Temperature as usize] = params.temperature;
        // Above 2^24, f32 cannot represent every integer; no vocabulary is that large.
        row.params[SampleParam::TopK as usize] = params.top_k.min(1 << 24) as f32;
        row.params[SampleParam::TopP as usize] = params.top_p;
        row.params[SampleParam::MinP as usize] = params.min_p;
        row.params[SampleParam::RepeatPenalty as usize] = params.repeat_penalty;
        row.params[SampleParam::FrequencyPenalty as usize] = params.frequency_penalty;
        row.params[SampleParam::PresencePenalty as usize] = params.presence_penalty;
        for (i, &(id, bias)) in params.logit_bias.iter().take(MAX_BIAS).enumerate() {
            row.bias_ids[i] = id as i32;
            row.bias[i] = bias;
        }
        row
    }

    /// Forbids tokens for all choices before the position `until`. Positions only increase from here on.
    /// Fails if the tokens exceed the bias entries.
    pub fn forbid(&mut self, tokens: &[u32], until: usize) -> Result<(), SamplingError> {
        let (n_kept, n_bias) = (self.n_bias, self.n_bias + tokens.len());
        if n_bias > MAX_BIAS {
            let (got, want) = (format!("{n_bias} entries"), format!("at most {MAX_BIAS} entries"));
            return Err(SamplingError { name: "logit bias", got, want });
        }
        for (place, token) in (n_kept..).zip(tokens) {
            (self.bias_ids[place], self.bias[place]) = (*token as i32, f32::NEG_INFINITY);
        }
        self.n_bias = n_bias;
        self.lapsing = Some(LapsingBias { n_kept, until: u32::try_from(until.max(1)).unwrap_or(u32::MAX) });
        Ok(())
    }

    /// Whether its choices depend on masks.
    pub(crate) fn is_masked(&self) -> bool {
        self.is_late || !self.mask.is_empty()
    }

    /// Tokens that may not be chosen at a position, because of their bias.
    pub(crate) fn banned(&self, position: usize) -> impl Iterator<Item = u32> + '_ {
        let n = match self.lapsing {
            Some(lapsing) if position >= lapsing.until as usize => lapsing.n_kept,
            _ => self.n_bias,
        };
        let banned = self.bias_ids[..n].iter().zip(&self.bias[..n]);
        banned.filter(|(id, bias)| **id >= 0 && **bias == f32::NEG_INFINITY).map(|(id, _)| *id as u32)
    }

    /// History length that penalties need in a sequence of `n_positions`.
    pub(crate) fn n_history(&self, n_positions: usize) -> usize {
        self.window.min(n_positions)
    }

    /// Number of history entries in use at `n_positions`, and the entry that is written next.
    pub(crate) fn window(&self, n_positions: usize) -> (usize, usize) {
        let (window, n) = (self.n_history(n_positions), self.history.len());
        (window, if n >= window { 0 } else { n })
    }

    /// Biases that expire.
    pub(crate) fn lapsing(&self) -> Option<LapsingBias> {
        self.lapsing.filter(|lapsing| self.rng[2] < lapsing.until)
    }

    /// Whether another row samples by the same rules, regardless of position and recent tokens.
    pub(crate) fn has_rules_of(&self, other: &SamplingRow) -> bool {
        let rules = |row: &SamplingRow| {
            let seed = [row.rng[0], row.rng[1]];
            (row.params.map(f32::to_bits), row.window, seed, row.n_top, row.n_bias, row.lapsing)
        };
        let n_kept = self.lapsing.map_or(self.n_bias, |lapsing| lapsing.n_kept);
        rules(self) == rules(other)
            && self.bias_ids[..n_kept] == other.bias_ids[..n_kept]
            && self.bias[..self.n_bias] == other.bias[..self.n_bias]
    }

    /// Sets the per-token inputs: the position that is chosen, and the tokens before it.
    pub fn advance(&mut self, position: usize, tokens: &[u32]) {
        self.rng[2] = position as u32;
        if let Some(LapsingBias { n_kept, until }) = self.lapsing
            && self.rng[2] >= until
        {
            self.bias_ids[n_kept..self.n_bias].fill(-1);
        }
        let recent = &tokens[tokens.len().saturating_sub(self.window)..];
        self.history.clear();
        self.history.extend(recent.iter().map(|&t| t as i32));
    }
}
