//! Rotary position embeddings.

use super::{ParamsFault, check_number, check_range};

/// Parameters of the rotary embedding.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RopeParams {
    /// Base of the frequencies.
    pub theta: f32,
    /// Base in sliding-window layers, if it differs (Gemma 3). Those layers are not scaled.
    pub local_theta: Option<f32>,
    /// Scaling of the frequencies beyond the original context.
    pub scaling: RopeScaling,
    /// Whether the file has a tensor `rope_freqs.weight` with divisors of the frequencies (Llama 3 in GGUF).
    pub has_freq_factors: bool,
    /// Rotated elements of a head, starting at the first.
    pub dims: usize,
    /// Rotated elements in sliding-window layers, if the number differs (Gemma 4).
    pub local_dims: Option<usize>,
    /// Pairing of the rotated elements.
    pub style: RopePairing,
}

/// Pairing of the elements of a head that are rotated together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RopePairing {
    /// Element `i` with `i + dims / 2`.
    Neox,
    /// Element `2 i` with `2 i + 1`.
    Norm,
}

/// Scaling of rotary frequencies.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum RopeScaling {
    /// No scaling.
    None,
    /// Every frequency divided by a factor.
    Linear {
        /// The divisor.
        factor: f32,
    },
    /// As in Llama 3.1: low frequencies are divided, high ones kept, with a ramp between.
    Llama3 {
        /// Divisor of low frequencies.
        factor: f32,
        /// A frequency with fewer turns over the original context is low.
        low_freq_factor: f32,
        /// A frequency with more turns is high.
        high_freq_factor: f32,
        /// Context of the original training.
        n_original_context: usize,
    },
    /// YaRN.
    Yarn(Yarn),
    /// As in Gemma 4: only the first pairs are rotated, with the frequencies they would have if all were.
    Proportional {
        /// Share of the pairs that is rotated.
        share: f32,
        /// Divisor of every frequency.
        factor: f32,
    },
    /// LongRoPE: every frequency has its own divisors, one for the original context and one for longer sequences. See
    /// [`LongRope`].
    Long {
        /// Context of the original training.
        n_original_context: usize,
        /// Factor on the rotated elements of queries and keys.
        attention_factor: f32,
    },
}

/// Divisors of LongRoPE, one per rotated pair.
#[derive(Debug, Clone, PartialEq)]
pub struct LongRope {
    /// For sequences within the original context.
    pub short: Vec<f32>,
    /// For longer sequences.
    pub long: Vec<f32>,
}

impl LongRope {
    /// Returns the factor on rotated elements that the paper recommends.
    pub(crate) fn recommended_attention_factor(factor: f32, n_original_context: usize) -> f32 {
        let original = n_original_context as f32;
        if factor > 1.0 && original > 1.0 { (1.0 + factor.ln() / original.ln()).sqrt() } else { 1.0 }
    }

    pub(crate) fn validate(&self, dims: usize) -> Result<(), ParamsFault> {
        for (name, list) in [("short", &self.short), ("long", &self.long)] {
            if list.len() != dims / 2 {
                return Err(ParamsFault::RopeFactors { name, found: list.len(), dims });
            }
            for &factor in list {
                check_number("a divisor of rotary frequencies", factor, 0.0, 1e30)?;
            }
        }
        Ok(())
    }
}

/// Parameters of YaRN.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Yarn {
    /// Divisor of low frequencies.
    pub factor: f32,
    /// Context of the original training.
    pub n_original_context: usize,
    /// A frequency with more turns is kept.
    pub beta_fast: f32,
    /// A frequency with fewer turns is divided.
    pub beta_slow: f32,
    /// Factor on the rotated elements of queries and keys.
    pub attention_factor: f32,
    /// Whether the bounds of the ramp are rounded to whole dimensions.
    pub truncate: bool,
}

impl Yarn {
    /// Returns the factor on rotated elements that the paper recommends.
    pub(crate) fn recommended_attention_factor(factor: f32) -> f32 {
        Yarn::magnitude(factor, 1.0)
    }

    /// Returns `0.1 * scale * ln(factor) + 1`. Some files define the factor as a quotient of two of these.
    pub(crate) fn magnitude(factor: f32, scale: f32) -> f32 {
        if factor > 1.0 { 0.1 * scale * factor.ln() + 1.0 } else { 1.0 }
    }
}

impl RopeScaling {
    pub(crate) const KNOWN: &str = "linear, llama3, yarn, longrope and proportional";

    /// Returns the factor on rotated elements.
    pub fn magnitude(&self) -> f32 {
        match *self {
            RopeScaling::Yarn(Yarn { attention_factor, .. }) | RopeScaling::Long { attention_factor, .. } => {
                attention_factor
            }
            RopeScaling::None
            | RopeScaling::Linear { .. }
            | RopeScaling::Llama3 { .. }
            | RopeScaling::Proportional { .. } => 1.0,
        }
    }
}

impl RopeParams {
    /// Returns whether two are equal up to rounding of the factor on rotated elements.
    pub(crate) fn is_near(&self, other: &RopeParams) -> bool {
        let (a, mut b) = (*self, *other);
        let magnitude = a.scaling.magnitude();
        if (magnitude - b.scaling.magnitude()).abs() <= 1e-5 * magnitude
            && let RopeScaling::Yarn(Yarn { attention_factor, .. })
            | RopeScaling::Long { attention_factor, .. } = &mut b.scaling
        {
            *attention_factor = magnitude;
        }
        a == b
    }

    pub(crate) fn validate(&self) -> Result<(), ParamsFault> {
        check_number("the rope base", self.theta, 0.0, 1e15)?;
        check_number("the rope base of sliding layers", self.local_theta.unwrap_or(1.0), 0.0, 1e15)?;
        let (factor, n_original_context) = match self.scaling {
            RopeScaling::None => return Ok(()),
            RopeScaling::Linear { factor } => (factor, 1),
            RopeScaling::Proportional { share, factor } => {
                check_number("the share of rotated pairs", share, 0.0, 1.0)?;
                (factor, 1)
            }
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, n_original_context } => {
                check_number("the low frequency factor", low_freq_factor, 0.0, 1e6)?;
                check_number("the high frequency factor", high_freq_factor, low_freq_factor.into(), 1e6)?;
                (factor, n_original_context)
            }
            RopeScaling::Yarn(yarn) => {
                check_number("beta_slow", yarn.beta_slow, 0.0, 1e6)?;
                check_number("beta_fast", yarn.beta_fast, 0.0, 1e6)?;
                check_number("the attention factor", yarn.attention_factor, 0.0, 1e6)?;
                (yarn.factor, yarn.n_original_context)
            }
            RopeScaling::Long { n_original_context, attention_factor } => {
                check_number("the attention factor", attention_factor, 0.0, 1e6)?;
                (1.0, n_original_context)
            }
        };
        check_number("the rope scaling factor", factor, 0.0, 1e6)?;
        check_range("the original context length", n_original_context, 1 << 31)
    }
}
