//! File tensors of recurrent layers. A step keeps their weights in other layouts than files: small maps stacked, filters
//! by lag, gates apart from queries. GGUF files also order value heads in tiles, and folders store the logarithm of decays.

use crate::error::ModelError;
use crate::model::Model;
use refrain_formats::params::{DeltaNetSizes, RecurrentLayers, VHeads};
use refrain_graph::WeightId;
use refrain_tensor::Shape;

/// How the values of a tensor are made from one or two weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RecurrentForm {
    /// Rows of a part of a stacked weight.
    Rows { first: usize, n_rows: usize },
    /// Filters stored by lag, written by channel.
    Filters { n_channels: usize, width: usize },
    /// Heads of two weights in turn: the query's, then the gate's.
    Interleaved { head_dim: usize },
    /// As it is.
    Plain,
}

/// A tensor of a recurrent model.
#[derive(Clone, Debug)]
pub(crate) struct RecurrentTensor {
    pub(crate) name: String,
    pub(crate) shape: Shape,
    pub(crate) ids: Vec<WeightId>,
    pub(crate) form: RecurrentForm,
}

impl Model {
    /// The tensors that a weight of a recurrent model becomes: none if another weight's tensors include it. `None` if it is
    /// written like any other weight.
    pub(crate) fn recurrent_tensors(&self, id: WeightId) -> Option<Vec<RecurrentTensor>> {
        let recurrent = self.config().recurrent?;
        let weight = &self.weights()[id.idx()];
        let (layer, part) = weight.name.strip_prefix("blk.")?.split_once('.')?;
        let tensor = |part: &str, dims: &[usize], ids: Vec<WeightId>, form| {
            let shape = Shape::new(dims).unwrap_or(weight.ty.shape);
            RecurrentTensor { name: format!("blk.{layer}.{part}"), shape, ids, form }
        };
        let dims = weight.ty.shape.dims();
        let filters = |n_channels, width| {
            let form = RecurrentForm::Filters { n_channels, width };
            vec![tensor(part, &[n_channels, width], vec![id], form)]
        };
        match (recurrent, part) {
            (RecurrentLayers::ShortConv { width }, "shortconv.conv.weight") => {
                Some(filters(self.config().hidden, width))
            }
            (RecurrentLayers::DeltaNet(sizes), "ssm_conv1d.weight") => {
                Some(filters(sizes.conv_dim(), sizes.conv_width))
            }
            (RecurrentLayers::DeltaNet(sizes), "ssm_alpha.weight") => {
                let rows = |part, first| {
                    let form = RecurrentForm::Rows { first, n_rows: sizes.n_heads };
                    tensor(part, &[sizes.n_heads, dims[1]], vec![id], form)
                };
                Some(vec![rows("ssm_alpha.weight", 0), rows("ssm_beta.weight", sizes.n_heads)])
            }
            (RecurrentLayers::DeltaNet(_), "attn_q.weight") => {
                let gate_name = format!("blk.{layer}.attn_q_gate.weight");
                let gate = self.weights().iter().position(|other| other.name == gate_name)?;
                let head_dim = self.config().layer_sizes(layer.parse().unwrap_or(0)).head_dim;
                let form = RecurrentForm::Interleaved { head_dim };
                let ids = vec![id, WeightId::from_idx(gate)];
                Some(vec![tensor("attn_q.weight", &[2 * dims[0], dims[1]], ids, form)])
            }
            (RecurrentLayers::DeltaNet(_), "attn_q_gate.weight") => Some(Vec::new()),
            (
                RecurrentLayers::DeltaNet(_),
                "attn_qkv.weight" | "attn_gate.weight" | "ssm_a" | "ssm_dt.bias" | "ssm_out.weight",
            ) => Some(vec![tensor(part, dims, vec![id], RecurrentForm::Plain)]),
            // A mixture of one expert.
            (_, "ffn_gate_shexp.weight" | "ffn_up_shexp.weight" | "ffn_down_shexp.weight") => {
                Some(vec![tensor(part, &dims[1..], vec![id], RecurrentForm::Plain)])
            }
            (_, "ffn_gate_inp_shexp.weight") => {
                Some(vec![tensor(part, &dims[1..], vec![id], RecurrentForm::Plain)])
            }
            _ => None,
        }
    }

    /// The values of a tensor of [`Model::recurrent_tensors`], with its value heads in an order.
    pub(crate) fn recurrent_values(
        &self,
        tensor: &RecurrentTensor,
        order: VHeads,
    ) -> Result<Vec<f32>, ModelError> {
        let values = |id: WeightId| {
            let wrap = |source| ModelError::Tensor { name: tensor.name.clone(), source };
            self.tensors()[id.idx()].to_f32().map_err(wrap)
        };
        let first = values(tensor.ids[0])?;
        let n_cols = tensor.shape.dim_back(0);
        let mut values = match tensor.form {
            RecurrentForm::Plain => first,
            RecurrentForm::Rows { first: row, n_rows } => first[row * n_cols..][..n_rows * n_cols].to_vec(),
            RecurrentForm::Filters { n_channels, width } => {
                let of = |i: usize| first[i % width * n_channels + i / width];
                (0..n_channels * width).map(of).collect()
            }
            RecurrentForm::Interleaved { head_dim } => {
                let gate = values(tensor.ids[1])?;
                let head = head_dim * n_cols;
                first.chunks(head).zip(gate.chunks(head)).flat_map(|(q, gate)| [q, gate].concat()).collect()
            }
        };
        if let Some(RecurrentLayers::DeltaNet(sizes)) = self.config().recurrent
            && sizes.v_heads != order
        {
            let part = tensor.name.split('.').nth(2).unwrap_or_default();
            reorder_heads(part, &sizes, order, n_cols, &mut values);
        }
        Ok(values)
    }
}

/// Brings the value heads of a tensor into another order.
fn reorder_heads(part: &str, sizes: &DeltaNetSizes, order: VHeads, n_cols: usize, values: &mut [f32]) {
    let DeltaNetSizes { n_key_heads, n_heads, key_dim, value_dim, .. } = *sizes;
    let keys = 2 * n_key_heads * key_dim;
    let each = n_heads / n_key_heads;
    // Grouped by key head, or in tiles: the first of every key head, then the second of every one. The way back is the
    // way of a table with as many columns as this one has rows.
    let n_tiled = match order {
        VHeads::Tiled => n_key_heads,
        VHeads::Grouped => each,
    };
    let move_heads = |values: &mut [f32], head_len| interleave(values, n_tiled, n_heads, head_len);
    match part {
        "attn_qkv" | "ssm_conv1d" => move_heads(&mut values[keys * n_cols..], value_dim * n_cols),
        "attn_gate" => move_heads(values, value_dim * n_cols),
        "ssm_alpha" | "ssm_beta" => move_heads(values, n_cols),
        "ssm_a" | "ssm_dt" => move_heads(values, 1),
        "ssm_out" => values.chunks_exact_mut(n_cols).for_each(|row| move_heads(row, value_dim)),
        _ => {}
    }
}

/// From `n` groups of heads one after the other to the first head of every group, then the second of every one.
fn interleave(values: &mut [f32], n: usize, n_heads: usize, head_len: usize) {
    let grouped = values.to_vec();
    let each = n_heads / n;
    for (to, head) in values.chunks_exact_mut(head_len).enumerate().take(n_heads) {
        let from = to % n * each + to / n;
        head.copy_from_slice(&grouped[from * head_len..][..head_len]);
    }
}

#[cfg(test)]
mod tests {
    use super::interleave;

    #[test]
    fn heads_in_tiles_are_grouped_again_by_the_other_number() {
        let grouped: Vec<f32> = (0..12).map(|v| v as f32).collect();
        let mut values = grouped.clone();
        // Six heads of two, grouped by two key heads.
        interleave(&mut values, 2, 6, 2);
        assert_eq!(values, [0., 1., 6., 7., 2., 3., 8., 9., 4., 5., 10., 11.]);
        interleave(&mut values, 3, 6, 2);
        assert_eq!(values, grouped);
    }
}
