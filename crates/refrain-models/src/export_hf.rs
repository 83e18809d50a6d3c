//! Tensors of Hugging Face folders that are not a weight of the step as it is: a tensor for each expert, the joined and
//! transposed experts of gpt-oss, and those of recurrent layers.

use crate::error::ModelError;
use crate::export::{FileTensor, Form};
use crate::export_recurrent::{RecurrentForm, RecurrentTensor};
use crate::model::Model;
use crate::weights::rows_of;
use refrain_formats::params::{Arch, VHeads};
use refrain_graph::WeightId;
use refrain_tensor::Shape;

/// A tensor of a folder to be written.
#[derive(Clone, Debug)]
pub(crate) struct HfTensor {
    pub(crate) name: String,
    pub(crate) shape: Shape,
    source: HfSource,
}

#[derive(Clone, Debug)]
enum HfSource {
    Weights(FileTensor),
    /// One of a stack of matrices.
    Expert {
        id: WeightId,
        expert: usize,
    },
    /// Experts `[n_experts, n_in, n_out]`, the columns of all parts in turn; vectors without `n_in`.
    Columns(Vec<WeightId>),
    Recurrent(RecurrentTensor),
}

impl Model {
    /// The tensors of a folder, in the order of the weights.
    pub(crate) fn hf_tensors(&self) -> Vec<HfTensor> {
        let mut tensors: Vec<HfTensor> = Vec::new();
        for file in self.file_tensors(Form::Hf) {
            let id = file.parts[0];
            let weight = &self.weights()[id.idx()];
            if let Some(recurrent) = self.recurrent_tensors(id) {
                tensors.extend(recurrent.into_iter().map(|tensor| self.hf_recurrent(&file.name, tensor)));
            } else if let ([n_experts, rows @ ..], true) = (weight.ty.shape.dims(), file.name.contains("{}"))
            {
                let shape = Shape::new(rows).unwrap_or(weight.ty.shape);
                tensors.extend((0..*n_experts).map(|expert| HfTensor {
                    name: file.name.replace("{}", &expert.to_string()),
                    shape,
                    source: HfSource::Expert { id, expert },
                }));
            } else if self.config().arch == Arch::GptOss && weight.name.contains("_exps.") {
                self.add_columns(&mut tensors, &file.name, id);
            } else {
                let (name, shape) = (file.name.clone(), self.shape_of(&file));
                tensors.push(HfTensor { name, shape, source: HfSource::Weights(file) });
            }
        }
        tensors
    }

    /// Adds experts of gpt-oss, or joins them with those of the same tensor.
    fn add_columns(&self, tensors: &mut Vec<HfTensor>, name: &str, id: WeightId) {
        let of_name = tensors.iter().position(|tensor| tensor.name == name);
        let mut ids = vec![id];
        if let Some(HfTensor { source: HfSource::Columns(first), .. }) = of_name.map(|idx| &tensors[idx]) {
            ids.splice(0..0, first.iter().copied());
        }
        let shape = match *self.weights()[id.idx()].ty.shape.dims() {
            [n_experts, n_out, n_in] => Shape::from([n_experts, n_in, ids.len() * n_out]),
            [n_experts, n_out] => Shape::from([n_experts, ids.len() * n_out]),
            _ => self.weights()[id.idx()].ty.shape,
        };
        let tensor = HfTensor { name: name.to_owned(), shape, source: HfSource::Columns(ids) };
        match of_name {
            Some(idx) => tensors[idx] = tensor,
            None => tensors.push(tensor),
        }
    }

    fn hf_recurrent(&self, name: &str, tensor: RecurrentTensor) -> HfTensor {
        // The second of two stacked maps has no weight of its own.
        let name = match tensor.name.contains("ssm_beta") {
            true => name.replace("in_proj_a", "in_proj_b"),
            false => name.to_owned(),
        };
        let shape = match tensor.form {
            RecurrentForm::Filters { n_channels, width } => Shape::from([n_channels, 1, width]),
            RecurrentForm::Rows { .. } | RecurrentForm::Interleaved { .. } | RecurrentForm::Plain => {
                tensor.shape
            }
        };
        HfTensor { name, shape, source: HfSource::Recurrent(tensor) }
    }

    /// The values of a tensor of [`Model::hf_tensors`].
    pub(crate) fn hf_values(&self, tensor: &HfTensor) -> Result<Vec<f32>, ModelError> {
        match &tensor.source {
            HfSource::Weights(file) => self.values_of(file, Form::Hf),
            HfSource::Expert { id, expert } => {
                let wrap = |source| ModelError::Tensor { name: tensor.name.clone(), source };
                let n_rows = tensor.shape.dims()[0];
                let rows = expert * n_rows..(expert + 1) * n_rows;
                rows_of(&tensor.name, &self.tensors()[id.idx()], rows)?.to_f32().map_err(wrap)
            }
            HfSource::Columns(ids) => self.columns_of(tensor, ids),
            HfSource::Recurrent(recurrent) => {
                let mut values = self.recurrent_values(recurrent, VHeads::Grouped)?;
                if recurrent.name.ends_with(".ssm_a") {
                    values.iter_mut().for_each(|a| *a = (-*a).ln());
                }
                Ok(values)
            }
        }
    }

    fn columns_of(&self, tensor: &HfTensor, ids: &[WeightId]) -> Result<Vec<f32>, ModelError> {
        let wrap = |source| ModelError::Tensor { name: tensor.name.clone(), source };
        let n_parts = ids.len();
        let mut values = vec![0.0; tensor.shape.n_elements()];
        for (part, id) in ids.iter().enumerate() {
            let weight = &self.tensors()[id.idx()];
            let of_weight = weight.to_f32().map_err(wrap)?;
            let (n_out, n_in) = match *weight.shape().dims() {
                [_, n_out, n_in] => (n_out, n_in),
                _ => (weight.shape().dim_back(0), 1),
            };
            let experts = of_weight.chunks_exact((n_out * n_in).max(1));
            for (values, of_weight) in values.chunks_exact_mut((n_parts * n_out * n_in).max(1)).zip(experts) {
                for (i, &value) in of_weight.iter().enumerate() {
                    let (row, column) = (i / n_in, i % n_in);
                    values[(column * n_out + row) * n_parts + part] = value;
                }
            }
        }
        Ok(values)
    }
}
