//! What a run needs on its device, before it starts, and which knob to turn when that is too much.

use std::fmt::{self, Write as _};

use refrain_graph::{CompileError, Plan, PlanOptions};
use refrain_models::{Model, TrainPhase, TrainSpec};

use crate::config::{Masters, Precision, TrainConfig};
use crate::learner::LearnError;
use crate::trainer::train_spec;

/// What is counted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MemoryCounts {
    /// Parameters that are trained.
    pub n_trained: u64,
    /// Bytes of weights that stay as they are: the base of an adapter.
    pub frozen_bytes: u64,
    /// Bytes of activations that a row of `context` tokens keeps for the backward pass.
    pub activation_bytes_per_row: u64,
    /// The same where layers are computed again in the backward pass.
    pub checkpointed_bytes_per_row: u64,
    /// Bytes of the gradient of a parameter: 4 where gradients are added up in f32.
    pub gradient_bytes: u64,
    /// Bytes that do not grow with the batch: scratch, workspaces, control block.
    pub fixed_bytes: u64,
}

impl MemoryCounts {
    /// Counts by planning steps of one row and of two. A device's own plan may need a little more or less.
    pub fn of(model: &Model, config: &TrainConfig) -> Result<Self, LearnError> {
        let spec = train_spec(config);
        let arena = |n_rows: usize, recompute: bool| -> Result<u64, LearnError> {
            let spec = TrainSpec { n_tokens: n_rows * config.context, recompute, ..spec };
            let step = model.train_graph(&spec, TrainPhase::Update)?;
            let plan = Plan::new(&step.graph, PlanOptions::default()).map_err(CompileError::from)?;
            Ok(plan.arena_bytes() as u64)
        };
        let one = arena(1, false)?;
        let activation_bytes_per_row = arena(2, false)?.saturating_sub(one);
        let checkpointed_bytes_per_row = arena(2, true)?.saturating_sub(arena(1, true)?);
        let (frozen, tensors) = model.frozen();
        let n_frozen: u64 = frozen.iter().map(|weight| weight.ty.shape.n_elements() as u64).sum();
        let n_trained = (model.n_parameters() as u64).saturating_sub(n_frozen);
        let gradient = spec.dtype.block_bytes() as u64;
        let others = activation_bytes_per_row.saturating_add(n_trained.saturating_mul(gradient));
        Ok(Self {
            n_trained,
            frozen_bytes: tensors.iter().map(|tensor| tensor.bytes().as_slice().len() as u64).sum(),
            activation_bytes_per_row,
            checkpointed_bytes_per_row,
            gradient_bytes: gradient + if spec.accumulates { 4 } else { 0 },
            fixed_bytes: one.saturating_sub(others),
        })
    }
}

/// A line of the estimate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryPart {
    /// What it is.
    pub name: &'static str,
    /// Bytes.
    pub n_bytes: u64,
    /// Bytes for each trained parameter, where it grows with them.
    pub per_parameter: Option<u64>,
}

/// What a run needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryEstimate {
    /// Its parts, in the order of the table.
    pub parts: Vec<MemoryPart>,
    counts: MemoryCounts,
    config: Knobs,
}

/// What the user can change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Knobs {
    batch: u64,
    context: u64,
    dtype: Precision,
    masters: Masters,
    checkpointed: bool,
}

/// A change that makes a run smaller.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Advice {
    /// What to set.
    pub setting: String,
    /// Bytes that it saves.
    pub saved_bytes: u64,
    /// Whether it suffices alone.
    pub suffices: bool,
}

impl MemoryEstimate {
    /// The estimate of a run.
    pub fn new(config: &TrainConfig, counts: MemoryCounts) -> Self {
        let knobs = Knobs {
            batch: config.batch as u64,
            context: config.context as u64,
            dtype: config.dtype,
            masters: config.masters,
            checkpointed: config.checkpoint_activations,
        };
        Self { parts: parts(knobs, counts), counts, config: knobs }
    }

    /// Bytes in all.
    pub fn total_bytes(&self) -> u64 {
        total(&self.parts)
    }

    /// Changes that save memory, from the one that costs least to the one that costs most, where `available_bytes` do
    /// not suffice. Empty where they do.
    pub fn advice(&self, available_bytes: u64) -> Vec<Advice> {
        let needed = self.total_bytes();
        if needed <= available_bytes {
            return Vec::new();
        }
        let now = self.config;
        let mut changes = Vec::new();
        if let Some(batch) = self.largest_batch(available_bytes) {
            let rest = if now.batch.is_multiple_of(batch) {
                format!(" and accumulate = {} times what it is, for the same step", now.batch / batch)
            } else {
                String::new()
            };
            changes.push((format!("batch = {batch}{rest}"), Knobs { batch, ..now }));
        } else if now.batch > 1 {
            changes.push(("batch = 1".to_owned(), Knobs { batch: 1, ..now }));
        }
        if !now.checkpointed && self.counts.checkpointed_bytes_per_row < self.counts.activation_bytes_per_row
        {
            let setting = "checkpoint_activations = true (about a third more time)".to_owned();
            changes.push((setting, Knobs { checkpointed: true, ..now }));
        }
        if now.dtype == Precision::F32 {
            let setting = "dtype = \"bf16\"".to_owned();
            changes.push((setting, Knobs { dtype: Precision::Bf16, ..now }));
        } else if now.masters == Masters::F32 {
            let setting = "masters = \"none\" (less exact)".to_owned();
            changes.push((setting, Knobs { masters: Masters::None, ..now }));
        }
        if now.context > 1 {
            let setting = format!("context = {} (half)", now.context / 2);
            changes.push((setting, Knobs { context: now.context / 2, ..now }));
        }
        let advice = changes.into_iter().map(|(setting, knobs)| {
            let after = self.with(knobs);
            Advice { setting, saved_bytes: needed.saturating_sub(after), suffices: after <= available_bytes }
        });
        advice.filter(|advice| advice.saved_bytes > 0).collect()
    }

    /// The estimate with what is free, as lines for a terminal.
    pub fn table(&self, available_bytes: u64) -> String {
        let mut out = String::new();
        for part in &self.parts {
            let per = part.per_parameter.map_or_else(String::new, |n| format!("  {n} B a parameter"));
            let _ = writeln!(out, "{:<22} {:>10}{per}", part.name, Size(part.n_bytes).to_string());
        }
        let total = self.total_bytes();
        let _ = writeln!(out, "{:<22} {:>10}", "needed", Size(total).to_string());
        let _ = writeln!(out, "{:<22} {:>10}", "free", Size(available_bytes).to_string());
        for advice in self.advice(available_bytes) {
            let enough = if advice.suffices { "" } else { ", which is not enough alone" };
            let _ = writeln!(out, "{} saves {}{enough}", advice.setting, Size(advice.saved_bytes));
        }
        out
    }

    /// The largest batch that fits and is smaller.
    fn largest_batch(&self, available_bytes: u64) -> Option<u64> {
        let one = Knobs { batch: 1, ..self.config };
        let per_row = activation_bytes(one, self.counts);
        let fixed = self.with(one).saturating_sub(per_row);
        let room = available_bytes.checked_sub(fixed)?;
        let batch = (room / per_row.max(1)).min(self.config.batch.saturating_sub(1));
        (batch >= 1).then_some(batch)
    }

    fn with(&self, knobs: Knobs) -> u64 {
        let mut counts = self.counts;
        // What is kept grows with the tokens of a row, and halves with the size of an element.
        let scale = |bytes: u64| {
            let scaled =
                u128::from(bytes) * u128::from(knobs.context) / u128::from(self.config.context.max(1));
            let halves = self.config.dtype == Precision::F32 && knobs.dtype == Precision::Bf16;
            u64::try_from(if halves { scaled / 2 } else { scaled }).unwrap_or(u64::MAX)
        };
        counts.activation_bytes_per_row = scale(counts.activation_bytes_per_row);
        counts.checkpointed_bytes_per_row = scale(counts.checkpointed_bytes_per_row);
        total(&parts(knobs, counts))
    }
}

fn total(parts: &[MemoryPart]) -> u64 {
    parts.iter().fold(0, |sum, part| sum.saturating_add(part.n_bytes))
}

fn activation_bytes(knobs: Knobs, counts: MemoryCounts) -> u64 {
    let per_row =
        if knobs.checkpointed { counts.checkpointed_bytes_per_row } else { counts.activation_bytes_per_row };
    per_row.saturating_mul(knobs.batch)
}

fn parts(knobs: Knobs, counts: MemoryCounts) -> Vec<MemoryPart> {
    let (weight, master) = match (knobs.dtype, knobs.masters) {
        (Precision::F32, _) => (4, 0),
        (Precision::Bf16, Masters::F32) => (2, 4),
        (Precision::Bf16, Masters::None) => (2, 0),
    };
    // Without masters the moments have the type of the weights, too.
    let moments = if knobs.dtype == Precision::Bf16 && knobs.masters == Masters::None { 4 } else { 8 };
    let gradient = counts.gradient_bytes;
    let by_parameter =
        [("weights", weight), ("master weights", master), ("moments", moments), ("gradients", gradient)];
    let mut parts: Vec<MemoryPart> = by_parameter
        .into_iter()
        .filter(|(_, per)| *per > 0)
        .map(|(name, per)| MemoryPart {
            name,
            n_bytes: counts.n_trained.saturating_mul(per),
            per_parameter: Some(per),
        })
        .collect();
    let others = [
        ("frozen weights", counts.frozen_bytes),
        ("activations", activation_bytes(knobs, counts)),
        ("scratch", counts.fixed_bytes),
    ];
    let others = others.into_iter().filter(|(_, n_bytes)| *n_bytes > 0);
    parts.extend(others.map(|(name, n_bytes)| MemoryPart { name, n_bytes, per_parameter: None }));
    parts
}

/// Bytes with a unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Size(pub u64);

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
        if self.0 < 1024 {
            return write!(f, "{} B", self.0);
        }
        let (mut value, mut unit) = (self.0 as f64 / 1024.0, 0);
        while value >= 1024.0 && unit + 1 < UNITS.len() {
            (value, unit) = (value / 1024.0, unit + 1);
        }
        write!(f, "{value:.1} {}", UNITS[unit])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn counts() -> MemoryCounts {
        MemoryCounts {
            n_trained: 100 * MIB,
            frozen_bytes: 0,
            activation_bytes_per_row: 64 * MIB,
            checkpointed_bytes_per_row: 8 * MIB,
            gradient_bytes: 4,
            fixed_bytes: 10 * MIB,
        }
    }

    fn estimate(toml: &str) -> MemoryEstimate {
        let overlay = crate::ConfigOverlay::from_toml(toml).unwrap();
        MemoryEstimate::new(&TrainConfig::default().overlay(overlay), counts())
    }

    #[test]
    fn bytes_a_parameter_are_those_of_each_mode() {
        let per =
            |toml: &str| -> u64 { estimate(toml).parts.iter().filter_map(|part| part.per_parameter).sum() };
        assert_eq!(per("dtype = \"f32\""), 16);
        assert_eq!(per("dtype = \"bf16\""), 18);
        assert_eq!(per("dtype = \"bf16\"\nmasters = \"none\""), 10);
    }

    #[test]
    fn the_parts_add_up_and_follow_the_batch() {
        let of = |toml: &str| estimate(toml).total_bytes();
        assert_eq!(of("batch = 8"), (1600 + 8 * 64 + 10) * MIB);
        assert_eq!(of("batch = 8\ncheckpoint_activations = true"), (1600 + 8 * 8 + 10) * MIB);
        assert_eq!(of("batch = 16") - of("batch = 8"), 8 * 64 * MIB);
    }

    #[test]
    fn what_fits_needs_no_advice() {
        let estimate = estimate("batch = 8");
        assert_eq!(estimate.advice(estimate.total_bytes()), []);
        assert!(!estimate.advice(estimate.total_bytes() - 1).is_empty());
    }

    #[test]
    fn advice_that_says_it_suffices_does() {
        let before = estimate("batch = 8");
        let available = (1600 + 10 + 4 * 64 + 20) * MIB;
        let advice = before.advice(available);
        let found: Vec<_> = advice.iter().map(|a| (a.setting.as_str(), a.saved_bytes, a.suffices)).collect();
        assert_eq!(
            found,
            [
                ("batch = 4 and accumulate = 2 times what it is, for the same step", 256 * MIB, true),
                ("checkpoint_activations = true (about a third more time)", 448 * MIB, true),
                ("dtype = \"bf16\"", 56 * MIB, false),
                ("context = 128 (half)", 256 * MIB, true),
            ]
        );
        assert!(estimate("batch = 4").total_bytes() <= available);
        assert!(estimate("batch = 5").total_bytes() > available);
        assert!(estimate("batch = 8\ncheckpoint_activations = true").total_bytes() <= available);
    }

    #[test]
    fn a_model_that_cannot_fit_is_told_what_helps_and_that_it_is_not_enough() {
        let estimate = estimate("batch = 8\ndtype = \"bf16\"");
        let advice = estimate.advice(100 * MIB);
        assert!(advice.iter().all(|advice| !advice.suffices), "{advice:?}");
        assert!(advice.iter().any(|advice| advice.setting.starts_with("masters")));
        let table = estimate.table(100 * MIB);
        assert!(table.contains("needed") && table.contains("not enough alone"), "{table}");
    }

    #[test]
    fn absurd_counts_do_not_overflow() {
        let counts = MemoryCounts {
            n_trained: u64::MAX,
            frozen_bytes: u64::MAX,
            activation_bytes_per_row: u64::MAX,
            checkpointed_bytes_per_row: 1,
            gradient_bytes: u64::MAX,
            fixed_bytes: u64::MAX,
        };
        let estimate = MemoryEstimate::new(&TrainConfig::default(), counts);
        assert_eq!(estimate.total_bytes(), u64::MAX);
        assert!(!estimate.table(1 << 40).is_empty());
    }
}
