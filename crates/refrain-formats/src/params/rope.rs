//! Rotary position embeddings.

use super::{ParamsFault, check_number, check_range};

/// How positions are turned into rotations.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rope {
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
    pub style: RopeStyle,
}

/// Which two elements of a head are rotated together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RopeStyle {
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
        if factor > 1.0 { 0.1 * factor.ln() + 1.0 } else { 1.0 }
    }
}

impl RopeScaling {
    pub(crate) const KNOWN: &str = "linear, llama3, yarn and proportional";
}

impl Rope {
    /// Whether two are the same but for the last bits of YaRN's factor.
    pub(crate) fn is_near(&self, other: &Rope) -> bool {
        let (mut a, mut b) = (*self, *other);
        if let (RopeScaling::Yarn(x), RopeScaling::Yarn(y)) = (&mut a.scaling, &mut b.scaling)
            && (x.attention_factor - y.attention_factor).abs() <= 1e-5 * x.attention_factor
        {
            y.attention_factor = x.attention_factor;
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
        };
        check_number("the rope scaling factor", factor, 0.0, 1e6)?;
        check_range("the original context length", n_original_context, 1 << 31)
    }
}
