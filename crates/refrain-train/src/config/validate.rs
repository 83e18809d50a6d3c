//! Ranges and contradictions.

use std::fmt::Display;

use refrain_models::{LoraSpec, Targets};

use super::value::ModelShape;
use super::{Clip, ConfigError, EvalSource, Masters, NewModel, Precision, TokenizerSource, TrainConfig};

/// The 256 bytes and the end of text.
const LEAST_VOCAB: usize = 257;
const MOST_VOCAB: usize = 1 << 20;

impl TrainConfig {
    /// Checks every value and every combination. What depends on files or on the device is checked later.
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
                let hint = "name a model to start from with `from`, or one to make with `new`";
                return Err(ConfigError::Missing { what: "the model (`from` or `new`)", hint });
            }
            (Some(_), Some(_)) => {
                let hint = "keep `from` to go on with a model, or `new` to make one";
                return Err(ConfigError::Conflict { first: "`from`", second: "`new`", hint });
            }
            (None, Some(NewModel::Shape(shape))) => check_shape(shape)?,
            (Some(_), None) | (None, Some(NewModel::Named(_))) => {}
        }
        if self.data.is_empty() {
            let hint = "name a text file or a JSONL file, such as data = [\"stories.txt\"]";
            return Err(ConfigError::Missing { what: "the training data (`data`)", hint });
        }
        if let Some(TokenizerSource::Train { train }) = &self.tokenizer {
            let range = LEAST_VOCAB..=MOST_VOCAB;
            let hint = "small models take 4,096 to 32,768";
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
                "hold out a twentieth with eval = 0.05, or name a file",
            ),
            Some(EvalSource::File(_)) | None => Ok(()),
        }
    }

    fn check_sizes(&self) -> Result<(), ConfigError> {
        let at_least_one = |key, value: usize, hint| require(value >= 1, key, value, "at least 1", hint);
        at_least_one("context", self.context, "256 suits small models")?;
        at_least_one("batch", self.batch, "8 is a start; lower it when memory does not suffice")?;
        at_least_one("accumulate", self.accumulate, "1 applies the gradients of each micro-step")?;
        let rows = self.batch.checked_mul(self.context).filter(|&rows| i32::try_from(rows).is_ok());
        require(
            rows.is_some(),
            "batch",
            format!("{} rows of {} tokens", self.batch, self.context),
            "at most 2147483647 tokens together",
            "lower batch and raise accumulate",
        )?;
        require(self.steps >= 1, "steps", self.steps, "at least 1", "1,000 shows whether a model learns")
    }

    fn check_optimiser(&self) -> Result<(), ConfigError> {
        let lr_hint = "3e-4 is a start for small models, 2e-5 for one that was trained already";
        require(self.lr.is_finite() && self.lr > 0.0, "lr", self.lr, "a finite number above 0", lr_hint)?;
        let fits = self.min_lr >= 0.0 && self.min_lr <= self.lr;
        let hint = "a tenth of lr is usual";
        require(fits, "min_lr", self.min_lr, &format!("between 0 and lr, {}", self.lr), hint)?;
        let expected = format!("at most the {} steps", self.steps);
        let hint = "a tenth of the steps, or less, is usual";
        require(self.warmup <= self.steps, "warmup", self.warmup, &expected, hint)?;
        let decay = self.weight_decay;
        let hint = "0.1 is usual, 0 switches it off";
        require(decay.is_finite() && decay >= 0.0, "weight_decay", decay, "a finite number from 0", hint)?;
        for beta in self.betas {
            let hint = "betas = [0.9, 0.95] is usual";
            require((0.0..1.0).contains(&beta), "betas", beta, "from 0 to below 1", hint)?;
        }
        let eps = self.eps;
        require(eps.is_finite() && eps > 0.0, "eps", eps, "a finite number above 0", "1e-8 is usual")?;
        if let Clip::Norm(norm) = self.clip {
            let hint = "1.0 is usual; clip = \"none\" switches it off";
            require(norm.is_finite() && norm > 0.0, "clip", norm, "a finite number above 0", hint)?;
        }
        let hint = "0.1 is usual, 0 switches it off";
        require((0.0..1.0).contains(&self.dropout), "dropout", self.dropout, "from 0 to below 1", hint)?;
        if self.masters == Masters::None && self.dtype == Precision::F32 {
            let hint = "masters are a choice for dtype = \"bf16\"; f32 weights are their own masters";
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
            let hint =
                "an adapter belongs to a model that was trained; name it with `from`, or leave `lora` out";
            return Err(ConfigError::Conflict { first: "`lora`", second: "`new`", hint });
        }
        let LoraSpec { rank, alpha, dropout, targets, .. } = lora.spec();
        require((1..=4096).contains(&rank), "lora.rank", rank, "1 to 4096", "16 is usual")?;
        let hint = "twice the rank is usual";
        require(alpha.is_finite() && alpha > 0.0, "lora.alpha", alpha, "a finite number above 0", hint)?;
        let hint = "0.05 is usual, 0 switches it off";
        require((0.0..1.0).contains(&dropout), "lora.dropout", dropout, "from 0 to below 1", hint)?;
        let is_named = match &targets {
            Targets::Modules(names) => !names.is_empty() && names.iter().all(|name| !name.is_empty()),
            Targets::All | Targets::Attention => true,
        };
        let hint = "say `all`, `attention`, or names such as q_proj,v_proj";
        require(is_named, "lora.targets", targets, "linear layers", hint)
    }

    fn check_intervals(&self) -> Result<(), ConfigError> {
        let intervals = [
            ("eval_every", self.eval_every),
            ("save_every", self.save_every),
            ("sample_every", self.sample_every),
        ];
        for (key, every) in intervals {
            let hint = "leave the key out to switch it off";
            require(every != Some(0), key, 0, "at least 1", hint)?;
        }
        require(self.keep >= 1, "keep", self.keep, "at least 1", "the latest checkpoint is always kept")?;
        if self.eval_every.is_some() && self.eval.is_none() {
            let hint = "name a held-out file, or hold out a share with eval = 0.05";
            return Err(ConfigError::Missing { what: "the held-out data (`eval`) for eval_every", hint });
        }
        if self.save_every.is_some() && self.out.is_none() {
            let hint = "name a folder with `out`";
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
        let hint = "docs/training.md has an example of a table";
        require(size != Some(0), key, 0, "at least 1", hint)?;
    }
    let n_kv_heads = shape.n_kv_heads.unwrap_or(shape.n_heads);
    require(
        shape.n_heads.is_multiple_of(n_kv_heads),
        "new.n_kv_heads",
        n_kv_heads,
        &format!("a divisor of n_heads, {}", shape.n_heads),
        "leave it out to have as many as query heads",
    )?;
    require(
        shape.head_dim.is_some() || shape.hidden.is_multiple_of(shape.n_heads),
        "new.hidden",
        shape.hidden,
        &format!("a multiple of n_heads, {}", shape.n_heads),
        "or give head_dim",
    )?;
    for (key, value) in [("new.rope_theta", shape.rope_theta), ("new.norm_eps", shape.norm_eps)] {
        let fits = value.is_none_or(|value| value.is_finite() && value > 0.0);
        let hint = "leave it out to have the usual value";
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
