//! Folders of adapters as `peft` writes them: `adapter_config.json` and `adapter_model.safetensors`.

use super::{HfFault, JsonObject, Weights};
use crate::FormatError;
use refrain_tensor::HostTensor;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// Limit on ranks. A larger one means a broken file.
const MAX_RANK: usize = 1 << 16;

/// Unsupported settings that change what an adapter computes, with the reason for the error.
const REFUSED: &[(&str, &str)] = &[
    ("use_dora", "DoRA adapters, which rescale the weights, are not supported"),
    ("use_qalora", "QA-LoRA adapters are not supported"),
    ("use_bdlora", "BD-LoRA adapters are not supported"),
    ("velora_config", "VeLoRA adapters are not supported"),
    ("kasa_config", "KaSA adapters are not supported"),
    ("monteclora_config", "MonteCLoRA adapters are not supported"),
    ("arrow_config", "Arrow, which routes between several adapters, is not supported"),
    ("alora_invocation_tokens", "activated LoRA, which depends on tokens, is not supported"),
    ("layer_replication", "replicated layers are not supported"),
    ("fan_in_fan_out", "weights that are stored transposed are not supported"),
    ("lora_bias", "adapters with biases are not supported"),
    ("modules_to_save", "fully trained modules are not supported"),
    ("trainable_token_indices", "trained tokens are not supported"),
    ("target_parameters", "adapters on bare parameters are not supported"),
    ("alpha_pattern", "a separate alpha per module is not supported"),
];

/// LoRA settings of `adapter_config.json`.
#[derive(Clone, Debug, PartialEq)]
pub struct AdapterConfig {
    /// Rank of the two factors.
    pub rank: usize,
    /// Whether some modules may have another rank.
    pub ranks_vary: bool,
    /// Numerator of the scale of the adapter's output.
    pub alpha: f64,
    /// Whether the denominator is the square root of the rank (rank-stabilised LoRA).
    pub rslora: bool,
    /// Dropout probability of the adapter's inputs in training.
    pub dropout: f64,
    /// Names of the adapted modules, such as `q_proj`.
    pub targets: Vec<String>,
    /// Base model.
    pub base: Option<String>,
}

impl AdapterConfig {
    /// Returns the scale of the adapter's output for a module of this rank.
    pub fn scale(&self, rank: usize) -> f64 {
        let rank = rank.max(1) as f64;
        self.alpha / if self.rslora { rank.sqrt() } else { rank }
    }

    fn read(json: &JsonObject) -> Result<AdapterConfig, FormatError> {
        let refuse = |key: &str, found: String, because| {
            FormatError::hf(json.path(), HfFault::Adapter { key: key.into(), found, because })
        };
        let kind = json.optional::<&str>("peft_type")?.unwrap_or("LORA");
        if kind != "LORA" {
            return Err(refuse("peft_type", kind.into(), "only LoRA adapters are supported"));
        }
        for &(key, because) in REFUSED {
            if let Some(value) = json.get(key).filter(|value| is_set(value)) {
                return Err(refuse(key, value.to_string(), because));
            }
        }
        let bias = json.optional::<&str>("bias")?.unwrap_or("none");
        if bias != "none" {
            return Err(refuse("bias", bias.into(), "trained biases are not supported"));
        }
        if let Some(Value::String(init)) = json.get("init_lora_weights")
            && ["pissa", "olora", "corda", "loftq"].iter().any(|known| init.starts_with(known))
        {
            let because = "this initialisation changes the base weights, which the adapter does not contain";
            return Err(refuse("init_lora_weights", init.clone(), because));
        }
        let rank = json.required::<usize>("r")?;
        if rank == 0 || rank > MAX_RANK {
            return Err(refuse("r", rank.to_string(), "a rank is between 1 and 65536"));
        }
        let alpha = json.required::<f64>("lora_alpha")?;
        if !alpha.is_finite() {
            return Err(refuse("lora_alpha", alpha.to_string(), "it must be finite"));
        }
        let targets = match json.get("target_modules") {
            Some(Value::String(pattern)) => vec![pattern.clone()],
            _ => json
                .optional::<Vec<&str>>("target_modules")?
                .unwrap_or_default()
                .iter()
                .map(|t| (*t).into())
                .collect(),
        };
        Ok(AdapterConfig {
            rank,
            ranks_vary: json.get("rank_pattern").is_some_and(is_set),
            alpha,
            rslora: json.optional("use_rslora")?.unwrap_or(false),
            dropout: json.optional("lora_dropout")?.unwrap_or(0.0),
            targets,
            base: json.optional::<&str>("base_model_name_or_path")?.map(str::to_owned),
        })
    }

    /// Returns the content of `adapter_config.json` as `peft` reads it.
    pub fn to_json(&self) -> String {
        let json = json!({
            "alpha_pattern": {},
            "auto_mapping": null,
            "base_model_name_or_path": self.base,
            "bias": "none",
            "fan_in_fan_out": false,
            "inference_mode": true,
            "init_lora_weights": true,
            "layers_pattern": null,
            "layers_to_transform": null,
            "lora_alpha": self.alpha,
            "lora_dropout": self.dropout,
            "modules_to_save": null,
            "peft_type": "LORA",
            "r": self.rank,
            "rank_pattern": {},
            "revision": null,
            "target_modules": self.targets,
            "task_type": "CAUSAL_LM",
            "use_dora": false,
            "use_rslora": self.rslora,
        });
        format!("{json:#}\n")
    }
}

/// Returns whether a setting is neither null, false nor empty.
fn is_set(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => false,
        Value::Array(all) => !all.is_empty(),
        Value::Object(all) => !all.is_empty(),
        Value::Bool(true) | Value::Number(_) | Value::String(_) => true,
    }
}

/// An open adapter: parsed configuration and mapped weights. The model interprets them.
#[derive(Debug)]
pub struct AdapterFolder {
    path: PathBuf,
    config: AdapterConfig,
    weights: Weights,
}

impl AdapterFolder {
    /// File name of the configuration.
    pub const CONFIG: &str = "adapter_config.json";
    /// File name of the weights.
    pub const WEIGHTS: &str = "adapter_model.safetensors";

    /// Opens a folder.
    pub fn open(path: impl AsRef<Path>) -> Result<AdapterFolder, FormatError> {
        let path = path.as_ref();
        let (config, weights) = (path.join(Self::CONFIG), path.join(Self::WEIGHTS));
        // Fails with the right error if the path is not a folder.
        let names = crate::source::names_in(path)?;
        if !config.exists() {
            return Err(FormatError::hf(path, HfFault::NoAdapter { found: names }));
        }
        if !weights.exists() {
            let other = names.into_iter().find(|name| name.ends_with(".bin"));
            let fault = other.map_or(HfFault::NoAdapterWeights, |found| HfFault::OtherWeights { found });
            return Err(FormatError::hf(path, fault));
        }
        let config = AdapterConfig::read(&JsonObject::read(&config)?)?;
        Ok(AdapterFolder { path: path.to_owned(), config, weights: Weights::read(vec![weights], None)? })
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// `adapter_config.json`.
    pub fn config(&self) -> &AdapterConfig {
        &self.config
    }

    /// Iterates over the names of all tensors in file order, including those with unsupported dtypes.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        let known = self.weights.tensors.all().iter().map(|info| &*info.name);
        known.chain(self.weights.unsupported.iter().map(|(name, _)| name.as_str()))
    }

    /// Returns a tensor as a view of its file.
    pub fn tensor(&self, name: &str) -> Result<HostTensor, FormatError> {
        self.weights.tensor(&self.path, name)
    }
}
