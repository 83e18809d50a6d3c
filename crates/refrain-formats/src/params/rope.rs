//! Rotary position embeddings.

use super::{ParamsFault, check_number, check_range};

/// How positions are turned into rotations.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RopeParams {
    /// Base of the frequencies.
    pub theta: f32,
    /// Base in layers that slide, where it is another one (Gemma 3). Those layers are not scaled.
    pub local_theta: Option<f32>,
    /// How the frequencies are stretched beyond the context of the first training.
    pub scaling: RopeScaling,
    /// Whether the file has a tensor `rope_freqs.weight` of divisors of the frequencies (Llama 3 in GGUF).
    pub has_freq_factors: bool,
    /// Elements of a head that are rotated, from the first on.
    pub dims: usize,
    /// The same in layers that slide, where it is another number (Gemma 4).
    pub local_dims: Option<usize>,
    /// Which elements form a pair.
    pub style: RopePairing,
}

/// Which two elements of a head are rotated together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RopePairing {
    /// Element `i` with `i + dims / 2`.
    Neox,
    /// Element `2 i` with `2 i + 1`.
    Norm,
}

/// How rotary frequencies are stretched.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum RopeScaling {
    /// Not at all.
    None,
    /// Every frequency divided by a factor.
    Linear {
        /// The divisor.
        factor: f32,
    },
    /// As in Llama 3.1: low frequencies divided, high ones kept, a ramp between.
    Llama3 {
        /// Divisor of low frequencies.
        factor: f32,
        /// Below this many turns over the original context a frequency is low.
        low_freq_factor: f32,
        /// Above this many it is high.
        high_freq_factor: f32,
        /// Context of the first training.
        n_original_context: usize,
    },
    /// YaRN.
    Yarn(Yarn),
    /// As in Gemma 4: only the first pairs turn, with the frequencies that they have among all of them.
    Proportional {
        /// The share of the pairs that turns.
        share: f32,
        /// Divisor of every frequency.
        factor: f32,
    },
    /// LongRoPE: every frequency has a divisor of its own, another one for sequences longer than the original context.
    /// [`LongRope`] has them.
    Long {
        /// Context of the first training.
        n_original_context: usize,
        /// Factor on the rotated elements, of queries and keys alike.
        attention_factor: f32,
    },
}

/// The divisors of LongRoPE, one for each rotated pair.
#[derive(Debug, Clone, PartialEq)]
pub struct LongRope {
    /// For sequences within the original context.
    pub short: Vec<f32>,
    /// For longer ones.
    pub long: Vec<f32>,
}

impl LongRope {
    /// The factor on rotated elements that the paper recommends.
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

/// The numbers of YaRN.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Yarn {
    /// Divisor of low frequencies.
    pub factor: f32,
    /// Context of the first training.
    pub n_original_context: usize,
    /// Above this many turns a frequency is kept.
    pub beta_fast: f32,
    /// Below this many it is divided.
    pub beta_slow: f32,
    /// Factor on the rotated elements, of queries and keys alike.
    pub attention_factor: f32,
    /// Whether the ends of the ramp are rounded to whole dimensions.
    pub truncate: bool,
}

impl Yarn {
    /// The factor on rotated elements that the paper recommends.
    pub(crate) fn recommended_attention_factor(factor: f32) -> f32 {
        Yarn::magnitude(factor, 1.0)
    }

    /// `0.1 * scale * ln(factor) + 1`, of which files may give a quotient.
    pub(crate) fn magnitude(factor: f32, scale: f32) -> f32 {
        if factor > 1.0 { 0.1 * scale * factor.ln() + 1.0 } else { 1.0 }
    }
}

impl RopeScaling {
    pub(crate) const KNOWN: &str = "linear, llama3, yarn, longrope and proportional";

    /// The factor on rotated elements.
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
    /// Whether two are the same but for the last bits of the factor on rotated elements.
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
