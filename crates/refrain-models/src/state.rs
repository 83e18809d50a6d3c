//! States that layers keep between steps.

use crate::model::KvSpec;
use refrain_graph::{State, StateId, TensorType};
use refrain_tensor::DType;

/// Shape of a layer's keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvGeometry {
    /// Number of KV heads.
    pub n_kv_heads: usize,
    /// Elements per head.
    pub head_dim: usize,
}

/// A recurrent state of one sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlotSpec {
    /// Name within its layer.
    pub name: &'static str,
    /// Its shape.
    pub dims: Vec<usize>,
    /// Its element type.
    pub dtype: DType,
}

/// State that one layer keeps between steps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LayerState {
    /// Its own keys and values in blocks of a paged cache; an 8-bit cache also has a scale per row.
    Kv(KvGeometry),
    /// None: it reads the keys and values of an earlier layer.
    SharedKv {
        /// The layer that writes them.
        layer: usize,
    },
    /// One slot per sequence for each of these states.
    Slots(Vec<SlotSpec>),
}

/// Scales of a layer's 8-bit keys and values, one per head and position: a value is its byte times the scale
/// of its row. Scales are paged like the rows, so a block and its scales are allocated, copied and freed
/// together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvScales {
    /// Scales of keys.
    pub k: StateId, // [n_blocks, n_kv_heads, kv_block] F32
    /// Scales of values.
    pub v: StateId, // [n_blocks, n_kv_heads, kv_block] F32
}

/// States that hold a layer's keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerKv {
    /// Keys.
    pub k: StateId,
    /// Values.
    pub v: StateId,
    /// Scales, if rows are stored in 8 bits.
    pub scales: Option<KvScales>,
    /// Shape of the rows.
    pub geometry: KvGeometry,
    /// Whether this layer writes them; otherwise an earlier layer does.
    pub is_own: bool,
}

/// The states of a model, and which of them each layer uses.
#[derive(Clone, Debug, PartialEq)]
pub struct StateTable {
    states: Vec<State>,
    layers: Vec<LayerStates>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum LayerStates {
    Kv(LayerKv),
    Slots(Vec<StateId>),
}

impl StateTable {
    /// Declares the layers' states for a pool of blocks and `n_slots` slots.
    ///
    /// # Panics
    /// Panics if a layer shares the cache of a layer that does not precede it or has none: architectures are
    /// code, not input.
    pub fn new(layers: &[LayerState], kv: &KvSpec, n_slots: usize) -> StateTable {
        let mut table = StateTable { states: Vec::new(), layers: Vec::with_capacity(layers.len()) };
        for (layer, state) in layers.iter().enumerate() {
            let placed = match state {
                LayerState::Kv(geometry) => {
                    let [k, v] =
                        ["k_cache", "v_cache"].map(|name| table.add_cache(layer, name, *geometry, kv));
                    let scales = (kv.dtype == DType::U8).then(|| {
                        let [k, v] =
                            ["k_scale", "v_scale"].map(|name| table.add_scales(layer, name, *geometry, kv));
                        KvScales { k, v }
                    });
                    LayerStates::Kv(LayerKv { k, v, scales, geometry: *geometry, is_own: true })
                }
                LayerState::SharedKv { layer: with } => match table.layers.get(*with) {
                    Some(LayerStates::Kv(shared)) => LayerStates::Kv(LayerKv { is_own: false, ..*shared }),
                    other => panic!("layer {layer} shares the cache of layer {with}, which has {other:?}"),
                },
                LayerState::Slots(slots) => {
                    let ids = slots.iter().map(|slot| table.add_slots(layer, slot, n_slots)).collect();
                    LayerStates::Slots(ids)
                }
            };
            table.layers.push(placed);
        }
        table
    }

    /// All states, in order of their ids.
    pub fn states(&self) -> &[State] {
        &self.states
    }

    /// States of a layer's keys and values; `None` for a layer without attention.
    pub fn kv(&self, layer: usize) -> Option<LayerKv> {
        match self.layers.get(layer)? {
            LayerStates::Kv(kv) => Some(*kv),
            LayerStates::Slots(_) => None,
        }
    }

    /// Whether any layer keeps its state in slots.
    pub fn has_slots(&self) -> bool {
        self.layers.iter().any(|layer| matches!(layer, LayerStates::Slots(_)))
    }

    /// Recurrent states of a layer, in the order of its specification.
    pub fn slots(&self, layer: usize) -> &[StateId] {
        match self.layers.get(layer) {
            Some(LayerStates::Slots(ids)) => ids,
            Some(LayerStates::Kv(_)) | None => &[],
        }
    }

    fn add_cache(&mut self, layer: usize, name: &str, geometry: KvGeometry, kv: &KvSpec) -> StateId {
        // [n_blocks, n_kv_heads, kv_block, head_dim]: the rows of one head in one block are contiguous.
        let KvGeometry { n_kv_heads, head_dim } = geometry;
        let ty = TensorType::new(kv.dtype, [kv.n_blocks, n_kv_heads, kv.kv_block, head_dim]);
        self.add(State::paged(format!("blk.{layer}.{name}"), ty))
    }

    fn add_scales(&mut self, layer: usize, name: &str, geometry: KvGeometry, kv: &KvSpec) -> StateId {
        let ty = TensorType::new(DType::F32, [kv.n_blocks, geometry.n_kv_heads, kv.kv_block]);
        self.add(State::paged(format!("blk.{layer}.{name}"), ty))
    }

    fn add_slots(&mut self, layer: usize, slot: &SlotSpec, n_slots: usize) -> StateId {
        let dims: Vec<usize> = std::iter::once(n_slots).chain(slot.dims.iter().copied()).collect();
        let shape = refrain_tensor::Shape::new(&dims)
            .unwrap_or_else(|e| panic!("slots {} of layer {layer}: {e}", slot.name));
        let ty = TensorType { dtype: slot.dtype, shape };
        self.add(State::slots(format!("blk.{layer}.{}", slot.name), ty))
    }

    fn add(&mut self, state: State) -> StateId {
        self.states.push(state);
        StateId::from_idx(self.states.len() - 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use refrain_graph::StateKind;

    const KV: KvSpec = KvSpec { n_blocks: 6, kv_block: 16, max_blocks: 3, n_slots: 0, dtype: DType::F16 };

    #[test]
    fn layers_may_differ_in_geometry_share_a_cache_or_keep_slots() {
        let [wide, narrow] =
            [(2, 64), (1, 32)].map(|(n_kv_heads, head_dim)| KvGeometry { n_kv_heads, head_dim });
        let conv = SlotSpec { name: "conv", dims: vec![3, 8], dtype: DType::F32 };
        let layers = [
            LayerState::Kv(wide),
            LayerState::Kv(narrow),
            LayerState::SharedKv { layer: 0 },
            LayerState::Slots(vec![conv]),
        ];
        let table = StateTable::new(&layers, &KV, 5);
        let names: Vec<&str> = table.states().iter().map(|s| s.name.as_str()).collect();
        let caches = ["blk.0.k_cache", "blk.0.v_cache", "blk.1.k_cache", "blk.1.v_cache"];
        assert_eq!(names, [&caches[..], &["blk.3.conv"]].concat());
        assert_eq!(table.states()[2].ty.shape.dims(), [6, 1, 16, 32]);
        let (own, shared) = (table.kv(0).unwrap(), table.kv(2).unwrap());
        assert_eq!((shared.k, shared.v, shared.geometry), (own.k, own.v, wide));
        assert!(own.is_own && !shared.is_own);
        assert_eq!(table.states()[4].ty.shape.dims(), [5, 3, 8]);
        assert_eq!((table.kv(3), table.slots(3)), (None, &[StateId::from_idx(4)][..]));
    }

    #[test]
    fn an_8_bit_cache_has_a_scale_for_each_head_and_position() {
        let geometry = KvGeometry { n_kv_heads: 2, head_dim: 64 };
        let layers = [LayerState::Kv(geometry), LayerState::SharedKv { layer: 0 }];
        assert_eq!(StateTable::new(&layers, &KV, 0).kv(0).unwrap().scales, None);
        let table = StateTable::new(&layers, &KvSpec { dtype: DType::U8, ..KV }, 0);
        let LayerKv { k, v, scales: Some(scales), .. } = table.kv(0).unwrap() else { panic!() };
        assert_eq!(table.kv(1).unwrap().scales, Some(scales));
        let state = |id: StateId| &table.states()[id.idx()];
        for (rows, scales) in [(k, scales.k), (v, scales.v)] {
            assert_eq!(state(rows).ty, TensorType::new(DType::U8, [6, 2, 16, 64]));
            assert_eq!(state(scales).ty, TensorType::new(DType::F32, [6, 2, 16]));
            assert_eq!(state(scales).kind, StateKind::Paged);
        }
    }

    #[test]
    #[should_panic(expected = "layer 0 shares the cache of layer 1")]
    fn a_cache_cannot_be_shared_with_a_later_layer() {
        StateTable::new(&[LayerState::SharedKv { layer: 1 }], &KV, 1);
    }
}
