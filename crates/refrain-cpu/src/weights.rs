//! Weights and states in memory.

use crate::pool::Pool;
use crate::simd::{Level, PackedMatrix, WeightError, WeightMatrix, pack};
use refrain_graph::{RunError, SlotLayout, State, StateId, WeightId};
use refrain_tensor::{DType, HostTensor, TensorError};

/// Fresh zero pages take no memory until they are written, one page at a time.
const PAGE_WORDS: usize = 4096 / 8;

/// Weights of a model, ready for matrix products.
pub struct CpuWeights {
    entries: Vec<WeightEntry>,
}

pub(crate) enum WeightEntry {
    /// Norms, biases and tables, as floats.
    Vector(Vec<f32>),
    /// A matrix in the file's bytes, with a repacked copy if that is faster.
    Matrix { tensor: HostTensor, packed: Option<Box<PackedMatrix>> },
}

impl CpuWeights {
    pub(crate) fn new(
        pool: &Pool,
        level: Level,
        repack: bool,
        tensors: Vec<HostTensor>,
    ) -> Result<CpuWeights, TensorError> {
        let entry = |tensor: HostTensor| {
            if tensor.shape().rank() < 2 {
                return tensor.to_f32().map(WeightEntry::Vector);
            }
            let packed = match (repack, matrix_of(&tensor)) {
                (true, Some(Ok(matrix))) => pack(pool, level, &matrix).map(Box::new),
                _ => None,
            };
            if packed.is_some() {
                // One tensor at a time, so that the file and the copies are never both entirely in memory.
                tensor.bytes().release();
            }
            Ok(WeightEntry::Matrix { tensor, packed })
        };
        Ok(CpuWeights { entries: tensors.into_iter().map(entry).collect::<Result<_, _>>()? })
    }

    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(crate) fn entry(&self, id: WeightId) -> &WeightEntry {
        &self.entries[id.idx()]
    }

    /// The weight as a matrix. A weight of three dimensions gives the matrices of all experts, one after
    /// another.
    pub(crate) fn matrix(&self, id: WeightId) -> Option<WeightMatrix<'_>> {
        match self.entry(id) {
            WeightEntry::Matrix { packed: Some(packed), .. } => Some(packed.matrix()),
            WeightEntry::Matrix { tensor, packed: None } => matrix_of(tensor)?.ok(),
            WeightEntry::Vector(_) => None,
        }
    }

    /// Bytes of the repacked copies, in addition to the file.
    pub fn packed_bytes(&self) -> usize {
        self.entries
            .iter()
            .map(|e| match e {
                WeightEntry::Matrix { packed: Some(packed), .. } => packed.n_bytes(),
                WeightEntry::Matrix { packed: None, .. } | WeightEntry::Vector(_) => 0,
            })
            .sum()
    }

    /// Dtype, memory layout and size of each matrix.
    pub(crate) fn layouts(&self) -> impl Iterator<Item = (DType, &'static str, usize)> {
        self.entries.iter().filter_map(|e| match e {
            WeightEntry::Matrix { tensor, packed: Some(packed) } => {
                Some((tensor.dtype(), packed.layout_name(), packed.n_bytes()))
            }
            WeightEntry::Matrix { tensor, packed: None } => {
                let decoded = matrix_of(tensor).is_some_and(|m| m.is_ok_and(|m| m.is_decoded_for_each_use()));
                let layout =
                    if decoded { "as in the file, decoded for each product" } else { "as in the file" };
                Some((tensor.dtype(), layout, tensor.bytes().as_slice().len()))
            }
            WeightEntry::Vector(_) => None,
        })
    }
}

fn matrix_of(tensor: &HostTensor) -> Option<Result<WeightMatrix<'_>, WeightError>> {
    let shape = tensor.shape();
    let (n_rows, k) = match *shape.dims() {
        [n_rows, k] => (n_rows, k),
        // Matrices of the experts, one after another.
        [n_experts, n_rows, k] => (n_experts.checked_mul(n_rows)?, k),
        _ => return None,
    };
    let row_bytes = tensor.dtype().bytes_for(k)?;
    Some(WeightMatrix::new(tensor.dtype(), tensor.bytes().as_slice(), n_rows, k, row_bytes))
}

fn zeros(n_bytes: usize) -> Result<Vec<u64>, usize> {
    // The system's zero pages take no memory until they are written. Unlike `vec![0; n]`, this does not abort
    // when memory runs out.
    bytemuck::try_zeroed_vec(n_bytes.div_ceil(8)).map_err(|()| n_bytes)
}

/// States of a model.
pub struct CpuStates {
    // Words, so that every element type is aligned.
    words: Vec<Vec<u64>>,
    layouts: Vec<SlotLayout>,
}

impl CpuStates {
    /// Fails with the number of bytes that could not be allocated.
    pub(crate) fn new(states: &[State]) -> Result<CpuStates, usize> {
        let layouts: Vec<SlotLayout> = states.iter().map(SlotLayout::of).collect();
        let words = layouts.iter().map(|layout| zeros(layout.bytes())).collect::<Result<_, _>>()?;
        Ok(CpuStates { words, layouts })
    }

    /// Resizes each state and keeps its content. Fails with the number of bytes that could not be allocated;
    /// some states may have grown by then, which does not affect any graph.
    ///
    /// Copies one state at a time, so that old and new states are never both entirely in memory, and only pages
    /// that were written: the rest of the new memory stays untouched.
    pub(crate) fn resize(&mut self, to: &[State]) -> Result<(), usize> {
        for ((words, layout), state) in self.words.iter_mut().zip(&mut self.layouts).zip(to) {
            let other = SlotLayout::of(state);
            if other.bytes() == layout.bytes() {
                *layout = other;
                continue;
            }
            let mut grown = zeros(other.bytes())?;
            for (new, old) in grown.chunks_mut(PAGE_WORDS).zip(words.chunks(PAGE_WORDS)) {
                if old.iter().any(|&word| word != 0) {
                    let n = new.len().min(old.len());
                    new[..n].copy_from_slice(&old[..n]);
                }
            }
            (*words, *layout) = (grown, other);
        }
        Ok(())
    }

    pub(crate) fn len(&self) -> usize {
        self.words.len()
    }

    /// Slot layout of a state.
    pub(crate) fn layout(&self, id: StateId) -> Result<SlotLayout, RunError> {
        self.layouts.get(id.idx()).copied().ok_or_else(|| {
            let because = format!("there are {}, but state {} was requested", self.len(), id.idx());
            RunError::Mismatch { what: "states", because }
        })
    }

    /// Content of a state.
    pub fn bytes(&self, id: StateId) -> &[u8] {
        self.get(id.idx())
    }

    pub(crate) fn get(&self, idx: usize) -> &[u8] {
        &bytemuck::cast_slice(&self.words[idx])[..self.layouts[idx].bytes()]
    }

    /// Several states at once; `None` if two are the same.
    pub(crate) fn several_mut<const N: usize>(&mut self, idx: [usize; N]) -> Option<[&mut [u8]; N]> {
        let layouts = &self.layouts;
        let mut lens = idx.iter().map(|&idx| layouts[idx].bytes());
        let words = self.words.get_disjoint_mut(idx).ok()?;
        Some(words.map(|words| match lens.next() {
            Some(len) => &mut bytemuck::cast_slice_mut(words)[..len],
            None => unreachable!("one length per state"),
        }))
    }

    pub(crate) fn get_mut(&mut self, idx: usize) -> &mut [u8] {
        &mut bytemuck::cast_slice_mut(&mut self.words[idx])[..self.layouts[idx].bytes()]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::CpuBackend;
    use refrain_graph::{Backend, StateEdit, StatePart, TensorType};

    /// Two caches; a block is three and a half pages.
    fn caches(n_blocks: usize) -> Vec<State> {
        let ty = TensorType::new(DType::F16, [n_blocks, 7, 16, 64]);
        ["k", "v"].map(|name| State::paged(name, ty)).to_vec()
    }

    #[test]
    fn grown_states_keep_their_content_and_are_zero_after_it() {
        let backend = CpuBackend::new(1).unwrap();
        let mut states = backend.allocate(&caches(3)).unwrap();
        for idx in 0..2 {
            for (i, byte) in states.get_mut(idx).iter_mut().enumerate() {
                // Leaves some pages untouched and writes parts of others.
                *byte = if i % 9000 < 3000 { (i % 251) as u8 + idx as u8 } else { 0 };
            }
        }
        let before = [0, 1].map(|idx| states.get(idx).to_vec());
        backend.resize(&mut states, &caches(8)).unwrap();
        for (idx, before) in before.iter().enumerate() {
            let (kept, added) = states.get(idx).split_at(before.len());
            assert_eq!(states.get(idx).len(), 8 * 7 * 16 * 64 * 2);
            assert!(kept == &before[..], "state {idx} changed");
            assert!(added.iter().all(|&byte| byte == 0));
        }
        backend.resize(&mut states, &caches(1)).unwrap();
        assert!(states.get(1) == &before[1][..7 * 16 * 64 * 2]);
        let error = backend.resize(&mut states, &caches(4)[..1]).unwrap_err();
        assert!(matches!(error, RunError::Mismatch { what: "states", .. }), "{error}");
    }

    #[test]
    fn slots_are_copied_and_cleared_and_a_refused_edit_changes_nothing() {
        let mut backend = CpuBackend::new(1).unwrap();
        let state = State::whole("slots", TensorType::new(DType::F16, [4, 3]));
        let id = StateId::from_idx(0);
        let mut states = backend.allocate(&[state]).unwrap();
        let values: Vec<u8> = (0..24).collect();
        backend.write_state(&mut states, id, &values).unwrap();
        backend.write_state(&mut states, StatePart::slots(id, 1..2), &[60; 6]).unwrap();
        let copy = StateEdit::Copy { state: id, from: 0..2, to: 2 };
        let clear = StateEdit::Clear(StatePart::slots(id, 0..1));
        backend.edit_states(&mut states, &[copy, clear.clone()]).unwrap();
        let want = [&[0; 6][..], &[60; 6], &[0, 1, 2, 3, 4, 5], &[60; 6]].concat();
        assert_eq!(states.bytes(id), want);
        let mut part = [0; 12];
        backend.read_state(&states, StatePart::slots(id, 2..4), &mut part).unwrap();
        assert_eq!(part, want[12..]);
        let beyond = StateEdit::Copy { state: id, from: 1..3, to: 3 };
        let unknown = StateEdit::Clear(StateId::from_idx(1).into());
        let all = StateEdit::Clear(id.into());
        for bad in [beyond, unknown] {
            let refused = backend.edit_states(&mut states, &[all.clone(), bad]);
            assert!(matches!(refused, Err(RunError::Mismatch { what: "states", .. })), "{refused:?}");
        }
        assert_eq!(states.bytes(id), want);
        assert!(backend.read_state(&states, StatePart::slots(id, 3..5), &mut part).is_err());
    }
}
