//! A model: hyperparameters and weights, from which the graph of any step is built.

use crate::error::ModelError;
use crate::step::{Architecture, Shared, Step};
use crate::weights::{TensorSource, WeightTable};
use crate::{gemma3, llama, qwen2, qwen3};
use refrain_formats::ModelFiles;
use refrain_formats::params::{Arch, ModelConfig};
use refrain_graph::{Graph, GraphError, State, TensorType, Weight};
use refrain_tensor::{DType, HostTensor};

/// What a step computes besides filling the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Head {
    /// Nothing: a piece of a prompt that goes on.
    None,
    /// `logits[n_rows, vocab]` after the tokens that the input `rows` names.
    Logits {
        /// How many rows.
        n_rows: usize,
    },
    /// `token[1]` and `logprob[1]` after the token that the input `rows` names.
    Sample {
        /// Places for recent tokens.
        history: usize,
        /// Places for biases.
        n_bias: usize,
    },
}

impl Head {
    pub(crate) fn n_rows(self) -> usize {
        match self {
            Head::None => 0,
            Head::Logits { n_rows } => n_rows,
            Head::Sample { .. } => 1,
        }
    }
}

/// The size of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StepSpec {
    /// Tokens that go through.
    pub n_tokens: usize,
    /// What comes out.
    pub head: Head,
    /// Element type of activations.
    pub act: DType,
}

/// The measures of the KV cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KvSpec {
    /// Blocks in the pool.
    pub n_blocks: usize,
    /// Positions in a block.
    pub kv_block: usize,
    /// Blocks that one sequence may have.
    pub max_blocks: usize,
    /// Sequences that may run at once.
    pub n_seqs: usize,
    /// Element type.
    pub dtype: DType,
}

/// A model, ready to build graphs.
#[derive(Debug)]
pub struct Model {
    config: ModelConfig,
    weights: Vec<Weight>,
    tensors: Vec<HostTensor>,
    shared: Shared,
    arch: Box<dyn Architecture>,
}

impl Model {
    /// The model in these files.
    pub fn load(files: &ModelFiles) -> Result<Model, ModelError> {
        Model::from_source(files.config()?, files)
    }

    /// A model whose tensors come from anywhere.
    pub fn from_source(config: ModelConfig, source: &dyn TensorSource) -> Result<Model, ModelError> {
        let layer_names = match config.arch {
            Arch::Llama => llama::LAYER_NAMES,
            Arch::Qwen2 => qwen2::LAYER_NAMES,
            Arch::Qwen3 => qwen3::LAYER_NAMES,
            Arch::Gemma3 => gemma3::LAYER_NAMES,
        };
        let mut table = WeightTable::new(&config, source, layer_names);
        let shared = Shared::declare(&mut table)?;
        let arch: Box<dyn Architecture> = match config.arch {
            Arch::Llama => Box::new(llama::Llama::declare(&mut table)?),
            Arch::Qwen2 => Box::new(qwen2::Qwen2::declare(&mut table)?),
            Arch::Qwen3 => Box::new(qwen3::Qwen3::declare(&mut table)?),
            Arch::Gemma3 => Box::new(gemma3::Gemma3::declare(&mut table)?),
        };
        let (weights, tensors) = (table.weights, table.tensors);
        Ok(Model { config, weights, tensors, shared, arch })
    }

    /// Hyperparameters.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Weights, in the order of their ids.
    pub fn weights(&self) -> &[Weight] {
        &self.weights
    }

    /// The weights' values, in the same order.
    pub fn tensors(&self) -> &[HostTensor] {
        &self.tensors
    }

    /// Numbers in all weights.
    pub fn n_parameters(&self) -> usize {
        self.weights.iter().map(|w| w.ty.shape.n_elements()).sum()
    }

    /// Bytes of all weights.
    pub fn weight_bytes(&self) -> usize {
        self.tensors.iter().map(|t| t.bytes().as_slice().len()).sum()
    }

    /// The KV cache of each layer: keys, then values.
    pub fn states(&self, kv: &KvSpec) -> Vec<State> {
        let c = &self.config;
        // [n_blocks, n_kv_heads, kv_block, head_dim]: the rows of one head in one block lie together.
        let ty = TensorType::new(kv.dtype, [kv.n_blocks, c.n_kv_heads, kv.kv_block, c.head_dim]);
        let names = (0..c.n_layers).flat_map(|l| [format!("blk.{l}.k_cache"), format!("blk.{l}.v_cache")]);
        names.map(|name| State { name, ty }).collect()
    }

    /// The graph of one step.
    ///
    /// Inputs: `tokens`, `positions`, `seqs` (`[n_tokens]`), `tables` (`[n_seqs, max_blocks]`); `rows` where fewer rows
    /// come out than go in; `params`, `rng`, `history`, `bias_ids`, `bias` for sampling.
    pub fn graph(&self, spec: &StepSpec, kv: &KvSpec) -> Result<Graph, GraphError> {
        let mut step =
            Step::new(&self.config, &self.shared, self.weights.clone(), self.states(kv), spec, kv)?;
        let mut x = step.embed()?;
        for layer in 0..self.config.n_layers {
            step.scope(format!("blk.{layer}"));
            x = self.arch.layer(&mut step, layer, x)?;
        }
        step.scope("");
        step.head(x)?;
        Ok(step.finish())
    }
}
