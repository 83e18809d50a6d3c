//! Creates the model of a configuration.

use refrain_formats::params::{Arch, ModelConfig};
use refrain_models::{NamedShape, SHAPES};

use crate::config::{ConfigError, ModelShape, NewModel, nearest};

/// Vocabulary size if neither the shape nor the tokenizer gives one.
const USUAL_VOCAB: usize = 4096;
/// Vocabularies are padded to whole rows of the matrix units.
const VOCAB_MULTIPLE: usize = 64;
/// Maximum of any size in a shape: far above all models, far below an overflow.
const MOST: usize = 1 << 24;

impl NewModel {
    /// Vocabulary size for training a tokenizer, if none is given.
    pub fn usual_vocab(&self) -> Result<usize, ConfigError> {
        match self {
            NewModel::Named(name) => Ok(find(name)?.config().n_vocab),
            NewModel::Shape(shape) => Ok(shape.n_vocab.unwrap_or(USUAL_VOCAB)),
        }
    }

    /// Hyperparameters of the model, for a tokenizer with `n_tokens` tokens and rows of `context`.
    pub fn model_config(&self, n_tokens: usize, context: usize) -> Result<ModelConfig, ConfigError> {
        let padded = n_tokens.next_multiple_of(VOCAB_MULTIPLE);
        let config = match self {
            NewModel::Named(name) => {
                let shape = find(name)?;
                learns(shape.arch().name())?;
                let mut config = shape.fresh_config(context);
                config.n_vocab = padded;
                config
            }
            NewModel::Shape(shape) => shape.model_config(padded, context)?,
        };
        let refuse =
            |fault: refrain_formats::params::ParamsFault| ConfigError::Shape { reason: fault.to_string() };
        config.validate().map_err(refuse)
    }
}

impl ModelShape {
    fn model_config(&self, usual_vocab: usize, context: usize) -> Result<ModelConfig, ConfigError> {
        let arch = learns(&self.arch)?;
        let ModelShape { n_layers, hidden, ffn, n_heads, .. } = *self;
        let n_kv_heads = self.n_kv_heads.unwrap_or(n_heads);
        let head_dim = self.head_dim.unwrap_or(hidden / n_heads.max(1));
        let n_vocab = self.n_vocab.unwrap_or(usual_vocab);
        let sizes = [
            ("new.n_vocab", n_vocab),
            ("new.hidden", hidden),
            ("new.ffn", ffn),
            ("new.n_layers", n_layers),
            ("new.n_heads", n_heads),
            ("new.head_dim", head_dim),
        ];
        // Checked before a list of that length is allocated, or two sizes are multiplied.
        if let Some((key, found)) = sizes.into_iter().find(|(_, size)| *size > MOST) {
            let expected = format!("at most {MOST}");
            let hint = "see docs/training.md for an example of a table";
            return Err(ConfigError::Value { key, found: found.to_string(), expected, hint });
        }
        let sizes = [n_vocab, hidden, ffn, n_layers.min(1 << 13)];
        let shape = NamedShape::new("model", arch, sizes, [n_heads, n_kv_heads, head_dim]);
        let mut config = shape.fresh_config(context);
        config.name = None;
        config.tied_embeddings = self.tied_embeddings.unwrap_or(true);
        if let Some(theta) = self.rope_theta {
            config.rope.theta = theta as f32;
        }
        if let Some(eps) = self.norm_eps {
            config.norm_eps = eps as f32;
        }
        Ok(config)
    }
}

/// Architectures that can be trained: experts and recurrent layers have no gradients.
fn learning() -> impl Iterator<Item = Arch> {
    Arch::ALL.into_iter().filter(|arch| {
        use Arch as A;
        let others = matches!(arch, A::Qwen3Moe | A::GptOss | A::Lfm2 | A::Bert);
        !others && !arch.is_qwen35()
    })
}

/// The architecture with that name, if it can be trained.
fn learns(name: &str) -> Result<Arch, ConfigError> {
    let arch = Arch::from_name(name).filter(|arch| learning().any(|known| known == *arch));
    arch.ok_or_else(|| ConfigError::Value {
        key: "new.arch",
        found: name.to_owned(),
        expected: format!("one of {}", learning().map(Arch::name).collect::<Vec<_>>().join(", ")),
        hint: "use llama",
    })
}

fn find(name: &str) -> Result<&'static NamedShape, ConfigError> {
    NamedShape::find(name).ok_or_else(|| ConfigError::UnknownShape {
        name: name.to_owned(),
        known: SHAPES.map(|shape| shape.name).join(", "),
        nearest: nearest(name, SHAPES.iter().map(|shape| shape.name)).map(str::to_owned),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use refrain_models::Model;

    fn table(arch: &str) -> ModelShape {
        let text =
            format!("arch = {arch:?}\nn_layers = 2\nhidden = 32\nffn = 64\nn_heads = 4\nn_kv_heads = 2");
        toml::from_str(&text).unwrap()
    }

    #[test]
    fn a_table_creates_a_model_of_each_architecture() {
        for arch in learning() {
            let config = NewModel::Shape(table(arch.name())).model_config(300, 64).unwrap();
            assert_eq!((config.n_vocab, config.head_dim, config.n_context), (320, 8, 64), "{arch}");
            let model = Model::fresh(config, 1).unwrap();
            assert_eq!(model.config().arch, arch);
        }
    }

    #[test]
    fn a_named_shape_uses_the_tokenizers_vocabulary() {
        let new = NewModel::Named("llama-10m".into());
        assert_eq!(new.usual_vocab().unwrap(), 8192);
        let config = new.model_config(1000, 128).unwrap();
        assert_eq!((config.n_vocab, config.hidden, config.n_context), (1024, 320, 128));
    }

    #[test]
    fn invalid_models_are_refused_with_a_hint() {
        let error = NewModel::Named("lama-10m".into()).usual_vocab().unwrap_err();
        assert!(error.to_string().contains("lama-10m"), "{error}");
        assert!(error.hint().unwrap().contains("llama-10m"), "{error:?}");
        for arch in ["mamba", "qwen3moe", "qwen35", "lfm2", "bert"] {
            let error = NewModel::Shape(table(arch)).model_config(300, 64).unwrap_err();
            assert!(error.to_string().contains("one of llama, qwen2, qwen3, gemma3"), "{error}");
        }
        let named = NewModel::Named("qwen3-30b-a3b".into()).model_config(300, 64).unwrap_err();
        assert!(named.to_string().contains("qwen3moe"), "{named}");
        for change in [
            |s: &mut ModelShape| s.hidden = usize::MAX,
            |s: &mut ModelShape| s.n_layers = 1 << 23,
            |s: &mut ModelShape| s.head_dim = Some(7),
            |s: &mut ModelShape| s.n_vocab = Some(usize::MAX),
        ] {
            let mut shape = table("llama");
            change(&mut shape);
            assert!(NewModel::Shape(shape.clone()).model_config(300, 64).is_err(), "{shape:?}");
        }
    }
}
