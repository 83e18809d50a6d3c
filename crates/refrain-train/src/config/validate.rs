//! Checks ranges and conflicts.

use std::fmt::Display;

use refrain_models::{LoraSpec, Targets};

use super::value::ModelShape;
use super::{Clip, ConfigError, EvalSource, Masters, NewModel, Precision, TokenizerSource, TrainConfig};

/// 256 bytes and the end-of-text token.
const LEAST_VOCAB: usize = 257;
const MOST_VOCAB: usize = 1 << 20;

impl TrainConfig {
    /// Checks every value and every combination. Values that depend on files or on the device are checked
    /// later.
    pub fn validate(&self) -> Result<(), ConfigError> {
        self.check_sources()?;
        self.check_sizes()?;
        self.check_optimiser()?;
        self.check_lora()?;
        self.check_intervals()
    }

    fn check_sources(&self) -> Result<(), ConfigError> {
        match (&self.from, &self.new) {
            (None, None) => {
                let hint = "set `from` to a model to start from, or `new` to a model to create";
                return Err(ConfigError::Missing { what: "the model (`from` or `new`)", hint });
            }
            (Some(_), Some(_)) => {
                let hint = "keep `from` to continue from a model, or `new` to create one";
                return Err(ConfigError::Conflict { first: "`from`", second: "`new`", hint });
            }
            (None, Some(NewModel::Shape(shape))) => check_shape(shape)?,
            (Some(_), None) | (None, Some(NewModel::Named(_))) => {}
        }
        if self.data.is_empty() {
            let hint = "give a text file or a JSONL file, such as data = [\"stories.txt\"]";
            return Err(ConfigError::Missing { what: "the training data (`data`)", hint });
        }
        if let Some(TokenizerSource::Train { train }) = &self.tokenizer {
            let range = LEAST_VOCAB..=MOST_VOCAB;
            let hint = "use 4,096 to 32,768 for a small model";
            require(
                range.contains(&train.vocab_size),
                "tokenizer.train.vocab_size",
                train.vocab_size,
                "257 to 1048576",
                hint,
            )?;
        }
        match self.eval {
            Some(EvalSource::Share(share)) => require(
                share > 0.0 && share < 1.0,
                "eval",
                share,
                "a share between 0 and 1",
                "hold out 5 % with eval = 0.05, or give a file",
            ),
            Some(EvalSource::File(_)) | None => Ok(()),
        }
    }

    fn check_sizes(&self) -> Result<(), ConfigError> {
        let at_least_one = |key, value: usize, hint| require(value >= 1, key, value, "at least 1", hint);
        at_least_one("context", self.context, "use 256 for a small model")?;
        at_least_one("batch", self.batch, "start with 8, and lower it if memory runs out")?;
        at_least_one("accumulate", self.accumulate, "use 1 to apply the gradients of each micro-step")?;
        let rows = self.batch.checked_mul(self.context).filter(|&rows| i32::try_from(rows).is_ok());
        require(
            rows.is_some(),
            "batch",
            format!("{} rows of {} tokens", self.batch, self.context),
            "at most 2147483647 tokens in total",
            "lower batch and raise accumulate",
        )?;
        require(self.steps >= 1, "steps", self.steps, "at least 1", "start with 1,000")
    }

    fn check_optimiser(&self) -> Result<(), ConfigError> {
        let lr_hint = "start with 3e-4 for a small model, or 2e-5 for a pretrained one";
        require(self.lr.is_finite() && self.lr > 0.0, "lr", self.lr, "a finite number above 0", lr_hint)?;
        let fits = self.min_lr >= 0.0 && self.min_lr <= self.lr;
        let hint = "use a tenth of lr";
        require(fits, "min_lr", self.min_lr, &format!("between 0 and lr, {}", self.lr), hint)?;
        let expected = format!("at most the {} steps", self.steps);
        let hint = "use at most a tenth of the steps";
        require(self.warmup <= self.steps, "warmup", self.warmup, &expected, hint)?;
        let decay = self.weight_decay;
        let hint = "use 0.1, or 0 to disable it";
        require(
            decay.is_finite() && decay >= 0.0,
            "weight_decay",
            decay,
            "a finite number, at least 0",
            hint,
        )?;
        for beta in self.betas {
            let hint = "use betas = [0.9, 0.95]";
            require((0.0..1.0).contains(&beta), "betas", beta, "at least 0 and below 1", hint)?;
        }
        let eps = self.eps;
        require(eps.is_finite() && eps > 0.0, "eps", eps, "a finite number above 0", "use 1e-8")?;
        if let Clip::Norm(norm) = self.clip {
            let hint = "use 1.0, or disable it with clip = \"none\"";
            require(norm.is_finite() && norm > 0.0, "clip", norm, "a finite number above 0", hint)?;
        }
        let hint = "use 0.1, or 0 to disable it";
        require((0.0..1.0).contains(&self.dropout), "dropout", self.dropout, "at least 0 and below 1", hint)?;
        if self.masters == Masters::None && self.dtype == Precision::F32 {
            let hint = "remove `masters`, or use dtype = \"bf16\"; f32 weights need no masters";
            return Err(ConfigError::Conflict {
                first: "masters = \"none\"",
                second: "dtype = \"f32\"",
                hint,
            });
        }
        Ok(())
    }

    fn check_lora(&self) -> Result<(), ConfigError> {
        let Some(lora) = &self.lora else { return Ok(()) };
        if self.new.is_some() {
            let hint = "an adapter needs a pretrained model: give it with `from`, or remove `lora`";
            return Err(ConfigError::Conflict { first: "`lora`", second: "`new`", hint });
        }
        let LoraSpec { rank, alpha, dropout, targets, .. } = lora.spec();
        require((1..=4096).contains(&rank), "lora.rank", rank, "1 to 4096", "use 16")?;
        let hint = "use twice the rank";
        require(alpha.is_finite() && alpha > 0.0, "lora.alpha", alpha, "a finite number above 0", hint)?;
        let hint = "use 0.05, or 0 to disable it";
        require((0.0..1.0).contains(&dropout), "lora.dropout", dropout, "at least 0 and below 1", hint)?;
        let is_named = match &targets {
            Targets::Modules(names) => !names.is_empty() && names.iter().all(|name| !name.is_empty()),
            Targets::All | Targets::Attention => true,
        };
        let hint = "use `all`, `attention`, or names such as q_proj,v_proj";
        require(is_named, "lora.targets", targets, "linear layers", hint)
    }

    fn check_intervals(&self) -> Result<(), ConfigError> {
        let intervals = [
            ("eval_every", self.eval_every),
            ("save_every", self.save_every),
            ("sample_every", self.sample_every),
        ];
        for (key, every) in intervals {
            let hint = "remove the key to disable it";
            require(every != Some(0), key, 0, "at least 1", hint)?;
        }
        require(self.keep >= 1, "keep", self.keep, "at least 1", "use 1 to keep only the latest checkpoint")?;
        if self.eval_every.is_some() && self.eval.is_none() {
            let hint = "give a held-out file, or hold out a share with eval = 0.05";
            return Err(ConfigError::Missing { what: "the held-out data (`eval`) for eval_every", hint });
        }
        if self.save_every.is_some() && self.out.is_none() {
            let hint = "give a folder with `out`";
            return Err(ConfigError::Missing { what: "the folder (`out`) for save_every", hint });
        }
        Ok(())
    }
}

fn check_shape(shape: &ModelShape) -> Result<(), ConfigError> {
    let sizes = [
        ("new.n_layers", Some(shape.n_layers)),
        ("new.hidden", Some(shape.hidden)),
        ("new.ffn", Some(shape.ffn)),
        ("new.n_heads", Some(shape.n_heads)),
        ("new.n_kv_heads", shape.n_kv_heads),
        ("new.head_dim", shape.head_dim),
        ("new.n_vocab", shape.n_vocab),
    ];
    for (key, size) in sizes {
        let hint = "see docs/training.md for an example of a table";
        require(size != Some(0), key, 0, "at least 1", hint)?;
    }
    let n_kv_heads = shape.n_kv_heads.unwrap_or(shape.n_heads);
    require(
        shape.n_heads.is_multiple_of(n_kv_heads),
        "new.n_kv_heads",
        n_kv_heads,
        &format!("a divisor of n_heads, {}", shape.n_heads),
        "remove it to use as many as query heads",
    )?;
    require(
        shape.head_dim.is_some() || shape.hidden.is_multiple_of(shape.n_heads),
        "new.hidden",
        shape.hidden,
        &format!("a multiple of n_heads, {}", shape.n_heads),
        "change hidden, or give head_dim",
    )?;
    for (key, value) in [("new.rope_theta", shape.rope_theta), ("new.norm_eps", shape.norm_eps)] {
        let fits = value.is_none_or(|value| value.is_finite() && value > 0.0);
        let hint = "remove it to use the default";
        require(fits, key, value.unwrap_or_default(), "a finite number above 0", hint)?;
    }
    Ok(())
}

fn require(
    holds: bool,
    key: &'static str,
    found: impl Display,
    expected: &str,
    hint: &'static str,
) -> Result<(), ConfigError> {
    if holds {
        return Ok(());
    }
    Err(ConfigError::Value { key, found: found.to_string(), expected: expected.to_owned(), hint })
}
