//! A model: hyperparameters and weights, from which the graph of any step is built.

use crate::adapter::{Attached, LinearSite};
use crate::bank::Bank;
use crate::error::ModelError;
use crate::layers::{Decoder, Mixture};
use crate::state::{LayerState, StateTable};
use crate::step::{GlobalWeights, StepBuilder};
use crate::weights::{HfNames, TensorSource, WeightTable};
use crate::{bert, cohere2, gemma3, gemma4, glm4, gpt_oss, lfm2, llama, olmo2, phi3, qwen35};
use refrain_formats::ModelFiles;
use refrain_formats::params::{Arch, ModelConfig};
#[cfg(doc)]
use refrain_graph::StepInputs;
use refrain_graph::{Graph, GraphError, State, StepKind, StepShape, ValueId, Weight, WeightId};
use refrain_tensor::{DType, HostTensor};
use std::sync::Arc;

/// Output of a step, besides filling the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Head {
    /// None: a prompt chunk that is not the last.
    None,
    /// `logits[n_choices, vocab]` for the rows in [`StepInputs::rows`].
    Logits,
    /// `token[n_choices]` and `logprob[n_choices]` for those rows.
    Sample(SampleHead),
}

/// Shape of the sampling inputs and outputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SampleHead {
    /// Capacity of the history of recent tokens.
    pub n_history: usize,
    /// Maximum number of biased tokens.
    pub n_bias: usize,
    /// Whether each row has a mask of the allowed tokens.
    pub masked: bool,
    /// Number of top tokens to report.
    pub n_top: usize,
}

/// Specification of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StepSpec {
    /// Numbers of rows, of sequences, and of rows with an output.
    pub shape: StepShape,
    /// The output for those rows.
    pub head: Head,
    /// Element type of activations.
    pub act: DType,
}

impl StepSpec {
    /// A step of one sequence: a decode step for one token and one choice, otherwise a prompt chunk.
    pub fn of_one(n_tokens: usize, n_choices: usize, head: Head) -> StepSpec {
        let is_decode = n_tokens == 1 && matches!(head, Head::Sample(_));
        let kind = if is_decode { StepKind::Decode } else { StepKind::Prompt };
        StepSpec { shape: StepShape { kind, n_tokens, n_seqs: 1, n_choices }, head, act: DType::F32 }
    }
}

/// Dimensions of the KV cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KvSpec {
    /// Blocks in the pool.
    pub n_blocks: usize,
    /// Positions per block.
    pub kv_block: usize,
    /// Maximum number of blocks per sequence.
    pub max_blocks: usize,
    /// Slots in recurrent states: two for each sequence with recurrent states.
    pub n_slots: usize,
    /// Element type.
    pub dtype: DType,
}

/// A model that can build graphs. Clones share the weight values.
#[derive(Clone, Debug)]
pub struct Model {
    config: ModelConfig,
    pub(crate) weights: Vec<Weight>,
    pub(crate) tensors: Vec<HostTensor>,
    hf_names: Vec<String>,
    derived: Vec<WeightId>,
    fixed: Vec<WeightId>,
    sites: Vec<LinearSite>,
    attached: Option<Attached>,
    bank: Option<Arc<Bank>>,
    shared: GlobalWeights,
    decoder: Arc<Decoder>,
    tables_on_host: bool,
}

/// Function that declares the layers of an architecture.
type Declare = fn(&mut WeightTable<'_>) -> Result<Decoder, ModelError>;

/// Tensor names of an architecture, and the function that declares its layers.
fn architecture(arch: Arch) -> (HfNames, Declare) {
    match arch {
        Arch::Llama
        | Arch::Qwen2
        | Arch::Qwen3
        | Arch::Qwen3Moe
        | Arch::Mistral3
        | Arch::SmolLm3
        | Arch::Granite => (llama::NAMES, llama::declare),
        Arch::Phi3 => (phi3::NAMES, phi3::declare),
        Arch::Olmo2 => (olmo2::NAMES, olmo2::declare),
        Arch::Glm4 => (glm4::NAMES, glm4::declare),
        Arch::Cohere2 => (cohere2::NAMES, cohere2::declare),
        Arch::Gemma2 | Arch::Gemma3 => (gemma3::NAMES, gemma3::declare),
        Arch::Gemma4 => (gemma4::NAMES, gemma4::declare),
        Arch::Qwen35 | Arch::Qwen35Moe => (qwen35::NAMES, qwen35::declare),
        Arch::Lfm2 => (lfm2::NAMES, lfm2::declare),
        Arch::GptOss => (gpt_oss::NAMES, gpt_oss::declare),
        Arch::Bert => (bert::NAMES, bert::declare),
    }
}

impl Model {
    /// Loads a model from its files.
    pub fn load(files: &ModelFiles) -> Result<Model, ModelError> {
        Model::from_source(files.config()?, files)
    }

    /// Builds a model whose tensors come from any source.
    pub fn from_source(config: ModelConfig, source: &dyn TensorSource) -> Result<Model, ModelError> {
        let (names, declare) = architecture(config.arch);
        let mut table = WeightTable::new(&config, source, names);
        let shared = GlobalWeights::declare(&mut table)?;
        let decoder = Arc::new(declare(&mut table)?);
        let WeightTable { weights, tensors, hf_names, derived, fixed, sites, .. } = table;
        let (attached, bank, tables_on_host) = (None, None, false);
        Ok(Model {
            config,
            weights,
            tensors,
            hf_names,
            derived,
            fixed,
            sites,
            attached,
            bank,
            shared,
            decoder,
            tables_on_host,
        })
    }

    /// The table besides the embedding of which a step reads one row per token, if there is one; it need not
    /// be on the device.
    pub fn token_table(&self) -> Option<WeightId> {
        self.decoder.token_table()
    }

    /// The matrices of experts that routers choose from, of which a token reads few; they need not be on the device.
    pub fn expert_matrices(&self) -> Vec<WeightId> {
        self.decoder
            .blocks
            .iter()
            .filter_map(|block| block.ffn.routed())
            .flat_map(Mixture::matrices)
            .collect()
    }

    /// Returns the same model, with steps that first gather the rows of [`Model::token_table`] on the host.
    #[must_use]
    pub fn with_table_on_host(&self) -> Model {
        Model { tables_on_host: true, ..self.clone() }
    }

    /// Hyperparameters.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Weights, in order of their ids.
    pub fn weights(&self) -> &[Weight] {
        &self.weights
    }

    /// Values of the weights, in the same order.
    pub fn tensors(&self) -> &[HostTensor] {
        &self.tensors
    }

    /// Name of a weight in Hugging Face folders.
    pub fn hf_name(&self, weight: WeightId) -> &str {
        &self.hf_names[weight.idx()]
    }

    /// Whether a weight is computed from hyperparameters, such as rotary frequencies.
    pub(crate) fn is_derived(&self, weight: usize) -> bool {
        self.derived.iter().any(|id| id.idx() == weight)
    }

    /// Whether a weight belongs to an attached adapter.
    pub(crate) fn is_of_adapter(&self, weight: usize) -> bool {
        let is_of_bank = self.bank.as_ref().is_some_and(|bank| bank.owns(weight));
        is_of_bank || self.attached.as_ref().is_some_and(|attached| attached.owns(weight))
    }

    /// Whether a weight is trained: with an adapter only the adapter's weights, otherwise all except tables
    /// and constants of the graph.
    pub fn is_trained(&self, weight: WeightId) -> bool {
        match &self.attached {
            Some(attached) => attached.owns(weight.idx()),
            None => {
                let is_frozen = self.is_derived(weight.idx()) || self.fixed.contains(&weight);
                !is_frozen && !self.is_of_adapter(weight.idx())
            }
        }
    }

    /// The linear maps of all layers.
    pub(crate) fn sites(&self) -> &[LinearSite] {
        &self.sites
    }

    pub(crate) fn attached(&self) -> Option<&Attached> {
        self.attached.as_ref()
    }

    pub(crate) fn attach(&mut self, attached: Attached) {
        self.attached = Some(attached);
    }

    pub(crate) fn bank(&self) -> Option<&Bank> {
        self.bank.as_deref()
    }

    pub(crate) fn attach_bank(&mut self, bank: Bank) {
        self.bank = Some(Arc::new(bank));
    }

    /// Appends a weight.
    pub(crate) fn push(&mut self, weight: Weight, hf_name: String, tensor: HostTensor) -> WeightId {
        self.weights.push(weight);
        self.hf_names.push(hf_name);
        self.tensors.push(tensor);
        WeightId::from_idx(self.weights.len() - 1)
    }

    /// Number of trained parameters.
    pub fn n_trained(&self) -> usize {
        let trained =
            self.weights.iter().enumerate().filter(|(idx, _)| self.is_trained(WeightId::from_idx(*idx)));
        trained.map(|(_, weight)| weight.ty.shape.n_elements()).sum()
    }

    pub(crate) fn shared(&self) -> &GlobalWeights {
        &self.shared
    }

    /// Builds the input of the first layer.
    pub(crate) fn begin(&self, step: &mut StepBuilder<'_>) -> Result<ValueId, GraphError> {
        step.begin(&self.decoder)
    }

    /// Builds one layer of a step.
    pub(crate) fn layer(
        &self,
        step: &mut StepBuilder<'_>,
        layer: usize,
        x: ValueId,
    ) -> Result<ValueId, GraphError> {
        self.decoder.blocks[layer].build(step, layer, x)
    }

    /// Number of parameters in all weights.
    pub fn n_parameters(&self) -> usize {
        self.weights.iter().map(|w| w.ty.shape.n_elements()).sum()
    }

    /// Size of all weights in bytes.
    pub fn weight_bytes(&self) -> usize {
        self.tensors.iter().map(|t| t.bytes().as_slice().len()).sum()
    }

    /// States that the layers keep between steps.
    pub fn state_table(&self, kv: &KvSpec) -> StateTable {
        let layers: Vec<LayerState> =
            (0..self.config.n_layers).map(|layer| self.decoder.state(&self.config, layer)).collect();
        StateTable::new(&layers, kv, kv.n_slots)
    }

    /// Whether the model has recurrent states, which live in slots and cannot be shared like KV.
    pub fn has_slots(&self) -> bool {
        let is_recurrent = |layer| matches!(self.decoder.state(&self.config, layer), LayerState::Slots(_));
        (0..self.config.n_layers).any(is_recurrent)
    }

    /// The most positions that any layer attends to, its own included; `None` if some layer attends to all.
    ///
    /// One block table serves all layers, so a block is not needed any more only once every layer's window has left
    /// it.
    pub fn attention_window(&self) -> Option<usize> {
        let attends =
            |&layer: &usize| !matches!(self.decoder.state(&self.config, layer), LayerState::Slots(_));
        let windows = (0..self.config.n_layers).filter(attends).map(|layer| self.config.window(layer));
        windows.collect::<Option<Vec<usize>>>()?.into_iter().max()
    }

    /// The states, in order of their ids.
    pub fn states(&self, kv: &KvSpec) -> Vec<State> {
        self.state_table(kv).states().to_vec()
    }

    /// Builds the graph of one step.
    ///
    /// [`Graph::step`] describes its inputs.
    ///
    /// # Panics
    ///
    /// Panics if the model is an encoder, whose steps [`Model::embed_graph`] builds.
    pub fn graph(&self, spec: &StepSpec, kv: &KvSpec) -> Result<Graph, GraphError> {
        let mut step = self.step_builder(spec, kv)?;
        let x = self.build_layers(&mut step)?;
        step.head(x)?;
        Ok(step.finish())
    }

    pub(crate) fn step_builder(&self, spec: &StepSpec, kv: &KvSpec) -> Result<StepBuilder<'_>, GraphError> {
        let (weights, states) = (self.weights.clone(), self.state_table(kv));
        let mut step =
            StepBuilder::new(&self.config, &self.shared, weights, states, spec, kv, self.bank.as_deref())?;
        step.tables_on_host = self.tables_on_host;
        step.attached = self.attached.as_ref();
        Ok(step)
    }

    /// Builds everything before the output head.
    pub(crate) fn build_layers(&self, step: &mut StepBuilder<'_>) -> Result<ValueId, GraphError> {
        let mut x = self.begin(step)?;
        for layer in 0..self.config.n_layers {
            step.scope(format!("blk.{layer}"));
            x = self.layer(step, layer, x)?;
        }
        step.scope("");
        Ok(x)
    }
}
