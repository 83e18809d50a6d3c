//! Estimates the device memory of a run before it starts, and suggests settings that reduce it.

use std::fmt::{self, Write as _};

use refrain_graph::{CompileError, Plan, PlanOptions};
use refrain_models::{Model, TrainPhase, TrainSpec};

use crate::config::{Masters, Precision, TrainConfig};
use crate::learner::LearnError;
use crate::trainer::train_spec;

/// Inputs of the estimate.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MemoryCounts {
    /// Number of trained parameters.
    pub n_trained: u64,
    /// Bytes of frozen weights: the base of an adapter.
    pub frozen_bytes: u64,
    /// Bytes of activations that a row of `context` tokens keeps for the backward pass.
    pub activation_bytes_per_row: u64,
    /// The same with activation checkpointing.
    pub checkpointed_bytes_per_row: u64,
    /// Bytes of a parameter's gradient: 4 if gradients are accumulated in f32.
    pub gradient_bytes: u64,
    /// Bytes that do not grow with the batch: scratch, workspaces, control block.
    pub fixed_bytes: u64,
}

impl MemoryCounts {
    /// Counts from the plans of steps of one and two rows. A device's own plan may differ slightly.
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

/// One line of the estimate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryPart {
    /// Name of the part.
    pub name: &'static str,
    /// Bytes.
    pub n_bytes: u64,
    /// Bytes per trained parameter, for parts that scale with them.
    pub per_parameter: Option<u64>,
}

/// Memory estimate of a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryEstimate {
    /// Its parts, in table order.
    pub parts: Vec<MemoryPart>,
    counts: MemoryCounts,
    config: Knobs,
}

/// Settings that affect memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Knobs {
    batch: u64,
    context: u64,
    dtype: Precision,
    masters: Masters,
    checkpointed: bool,
}

/// A change that reduces memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Advice {
    /// The setting.
    pub setting: String,
    /// Bytes saved.
    pub saved_bytes: u64,
    /// Whether the change alone is enough.
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

    /// Total bytes.
    pub fn total_bytes(&self) -> u64 {
        total(&self.parts)
    }

    /// Changes that save memory if `available_bytes` are not enough, from the least to the most costly. Empty
    /// if they are enough.
    pub fn advice(&self, available_bytes: u64) -> Vec<Advice> {
        let needed = self.total_bytes();
        if needed <= available_bytes {
            return Vec::new();
        }
        let now = self.config;
        let mut changes = Vec::new();
        if let Some(batch) = self.largest_batch(available_bytes) {
            let rest = if now.batch.is_multiple_of(batch) {
                format!(" and {} times the current accumulate, for the same step", now.batch / batch)
            } else {
                String::new()
            };
            changes.push((format!("batch = {batch}{rest}"), Knobs { batch, ..now }));
        } else if now.batch > 1 {
            changes.push(("batch = 1".to_owned(), Knobs { batch: 1, ..now }));
        }
        if !now.checkpointed && self.counts.checkpointed_bytes_per_row < self.counts.activation_bytes_per_row
        {
            let setting = "checkpoint_activations = true (about a third slower)".to_owned();
            changes.push((setting, Knobs { checkpointed: true, ..now }));
        }
        if now.dtype == Precision::F32 {
            let setting = "dtype = \"bf16\"".to_owned();
            changes.push((setting, Knobs { dtype: Precision::Bf16, ..now }));
        } else if now.masters == Masters::F32 {
            let setting = "masters = \"none\" (less precise)".to_owned();
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

    /// The estimate and the free memory, as lines for a terminal.
    pub fn table(&self, available_bytes: u64) -> String {
        let mut out = String::new();
        for part in &self.parts {
            let per = part.per_parameter.map_or_else(String::new, |n| format!("  {n} B per parameter"));
            let _ = writeln!(out, "{:<22} {:>10}{per}", part.name, MemorySize(part.n_bytes).to_string());
        }
        let total = self.total_bytes();
        let _ = writeln!(out, "{:<22} {:>10}", "needed", MemorySize(total).to_string());
        let _ = writeln!(out, "{:<22} {:>10}", "free", MemorySize(available_bytes).to_string());
        for advice in self.advice(available_bytes) {
            let enough = if advice.suffices { "" } else { ", which is not enough by itself" };
            let _ = writeln!(out, "{} saves {}{enough}", advice.setting, MemorySize(advice.saved_bytes));
        }
        out
    }

    /// The largest smaller batch that fits.
    fn largest_batch(&self, available_bytes: u64) -> Option<u64> {
        let one = Knobs { batch: 1, ..self.config };
        let per_row = activation_bytes(one, self.counts);
        let fixed = self.with(one).saturating_sub(per_row);
        let available = available_bytes.checked_sub(fixed)?;
        let batch = (available / per_row.max(1)).min(self.config.batch.saturating_sub(1));
        (batch >= 1).then_some(batch)
    }

    fn with(&self, knobs: Knobs) -> u64 {
        let mut counts = self.counts;
        // Activations scale with the tokens of a row and with the element size.
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
    // Without masters, the moments also have the type of the weights.
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

/// A number of bytes, displayed with a unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemorySize(pub u64);

impl fmt::Display for MemorySize {
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
    fn bytes_per_parameter_match_each_mode() {
        let per =
            |toml: &str| -> u64 { estimate(toml).parts.iter().filter_map(|part| part.per_parameter).sum() };
        assert_eq!(per("dtype = \"f32\""), 16);
        assert_eq!(per("dtype = \"bf16\""), 18);
        assert_eq!(per("dtype = \"bf16\"\nmasters = \"none\""), 10);
    }

    #[test]
    fn the_parts_add_up_and_scale_with_the_batch() {
        let of = |toml: &str| estimate(toml).total_bytes();
        assert_eq!(of("batch = 8"), (1600 + 8 * 64 + 10) * MIB);
        assert_eq!(of("batch = 8\ncheckpoint_activations = true"), (1600 + 8 * 8 + 10) * MIB);
        assert_eq!(of("batch = 16") - of("batch = 8"), 8 * 64 * MIB);
    }

    #[test]
    fn a_run_that_fits_needs_no_advice() {
        let estimate = estimate("batch = 8");
        assert_eq!(estimate.advice(estimate.total_bytes()), []);
        assert!(!estimate.advice(estimate.total_bytes() - 1).is_empty());
    }

    #[test]
    fn advice_marked_as_sufficient_is_sufficient() {
        let before = estimate("batch = 8");
        let available = (1600 + 10 + 4 * 64 + 20) * MIB;
        let advice = before.advice(available);
        let found: Vec<_> = advice.iter().map(|a| (a.setting.as_str(), a.saved_bytes, a.suffices)).collect();
        assert_eq!(
            found,
            [
                ("batch = 4 and 2 times the current accumulate, for the same step", 256 * MIB, true),
                ("checkpoint_activations = true (about a third slower)", 448 * MIB, true),
                ("dtype = \"bf16\"", 56 * MIB, false),
                ("context = 128 (half)", 256 * MIB, true),
            ]
        );
        assert!(estimate("batch = 4").total_bytes() <= available);
        assert!(estimate("batch = 5").total_bytes() > available);
        assert!(estimate("batch = 8\ncheckpoint_activations = true").total_bytes() <= available);
    }

    #[test]
    fn a_model_that_cannot_fit_gets_advice_marked_as_insufficient() {
        let estimate = estimate("batch = 8\ndtype = \"bf16\"");
        let advice = estimate.advice(100 * MIB);
        assert!(advice.iter().all(|advice| !advice.suffices), "{advice:?}");
        assert!(advice.iter().any(|advice| advice.setting.starts_with("masters")));
        let table = estimate.table(100 * MIB);
        assert!(table.contains("needed") && table.contains("not enough by itself"), "{table}");
    }

    #[test]
    fn huge_counts_do_not_overflow() {
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
