//! Where weights and states lie.

use crate::pool::Pool;
use crate::simd::{Level, Packed, WeightError, WeightMatrix, pack};
use refrain_graph::{State, StateId, WeightId};
use refrain_tensor::{DType, HostTensor, TensorError};

/// Fresh zeros take no memory until they are written, a page at a time.
const PAGE_WORDS: usize = 4096 / 8;

/// The weights of a model, ready for products.
pub struct CpuWeights {
    entries: Vec<Entry>,
}

pub(crate) enum Entry {
    /// Norms, biases and tables, as floats.
    Vector(Vec<f32>),
    /// A matrix over the file's bytes, with a repacked copy where products are faster from it.
    Matrix { tensor: HostTensor, packed: Option<Box<Packed>> },
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
                return tensor.to_f32().map(Entry::Vector);
            }
            let packed = match (repack, matrix_of(&tensor)) {
                (true, Some(Ok(matrix))) => pack(pool, level, &matrix).map(Box::new),
                _ => None,
            };
            if packed.is_some() {
                // One tensor at a time, so that file and copy are never both in memory as a whole.
                tensor.bytes().release();
            }
            Ok(Entry::Matrix { tensor, packed })
        };
        Ok(CpuWeights { entries: tensors.into_iter().map(entry).collect::<Result<_, _>>()? })
    }

    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(crate) fn entry(&self, id: WeightId) -> &Entry {
        &self.entries[id.idx()]
    }

    /// The matrix of a product.
    pub(crate) fn matrix(&self, id: WeightId) -> Option<WeightMatrix<'_>> {
        match self.entry(id) {
            Entry::Matrix { packed: Some(packed), .. } => Some(packed.matrix()),
            Entry::Matrix { tensor, packed: None } => matrix_of(tensor)?.ok(),
            Entry::Vector(_) => None,
        }
    }

    /// Bytes that repacked copies take beside the file.
    pub fn packed_bytes(&self) -> usize {
        self.entries
            .iter()
            .map(|e| match e {
                Entry::Matrix { packed: Some(packed), .. } => packed.n_bytes(),
                Entry::Matrix { packed: None, .. } | Entry::Vector(_) => 0,
            })
            .sum()
    }

    /// For each matrix, its type, its layout in memory and its bytes.
    pub(crate) fn layouts(&self) -> impl Iterator<Item = (DType, &'static str, usize)> {
        self.entries.iter().filter_map(|e| match e {
            Entry::Matrix { tensor, packed: Some(packed) } => {
                Some((tensor.dtype(), packed.layout_name(), packed.n_bytes()))
            }
            Entry::Matrix { tensor, packed: None } => {
                Some((tensor.dtype(), "as in the file", tensor.bytes().as_slice().len()))
            }
            Entry::Vector(_) => None,
        })
    }
}

fn matrix_of(tensor: &HostTensor) -> Option<Result<WeightMatrix<'_>, WeightError>> {
    let shape = tensor.shape();
    let &[n_rows, k] = shape.dims() else { return None };
    let row_bytes = tensor.dtype().bytes_for(k)?;
    Some(WeightMatrix::new(tensor.dtype(), tensor.bytes().as_slice(), n_rows, k, row_bytes))
}

fn state_bytes(state: &State) -> usize {
    state.ty.dtype.bytes_for(state.ty.shape.n_elements()).unwrap_or(0)
}

fn zeros(n_bytes: usize) -> Result<Vec<u64>, usize> {
    // Zeros from the system, which take no memory until they are written; `vec![0; n]` would abort where there are none.
    bytemuck::try_zeroed_vec(n_bytes.div_ceil(8)).map_err(|()| n_bytes)
}

/// The states of a model.
pub struct CpuStates {
    // Words, so that every element type is aligned.
    words: Vec<Vec<u64>>,
    bytes: Vec<usize>,
}

impl CpuStates {
    /// Fails with the bytes that could not be had.
    pub(crate) fn new(states: &[State]) -> Result<CpuStates, usize> {
        let (mut words, mut bytes) = (Vec::new(), Vec::new());
        for state in states {
            let n = state_bytes(state);
            words.push(zeros(n)?);
            bytes.push(n);
        }
        Ok(CpuStates { words, bytes })
    }

    /// Gives each state another size and keeps what it holds. Fails with the bytes that could not be had; some states
    /// may be larger then, which no graph minds.
    ///
    /// One state at a time, so that old and new are never both in memory as a whole, and only pages that were written:
    /// the rest of the new memory stays untouched.
    pub(crate) fn resize(&mut self, to: &[State]) -> Result<(), usize> {
        for ((words, bytes), state) in self.words.iter_mut().zip(&mut self.bytes).zip(to) {
            let n = state_bytes(state);
            if n == *bytes {
                continue;
            }
            let mut grown = zeros(n)?;
            for (new, old) in grown.chunks_mut(PAGE_WORDS).zip(words.chunks(PAGE_WORDS)) {
                if old.iter().any(|&word| word != 0) {
                    let n = new.len().min(old.len());
                    new[..n].copy_from_slice(&old[..n]);
                }
            }
            (*words, *bytes) = (grown, n);
        }
        Ok(())
    }

    pub(crate) fn len(&self) -> usize {
        self.words.len()
    }

    /// What a state holds.
    pub fn bytes(&self, id: StateId) -> &[u8] {
        self.get(id.idx())
    }

    pub(crate) fn get(&self, idx: usize) -> &[u8] {
        &bytemuck::cast_slice(&self.words[idx])[..self.bytes[idx]]
    }

    /// Several states at once; `None` when two are the same.
    pub(crate) fn several_mut<const N: usize>(&mut self, idx: [usize; N]) -> Option<[&mut [u8]; N]> {
        let bytes = &self.bytes;
        let mut lens = idx.iter().map(|&idx| bytes[idx]);
        let words = self.words.get_disjoint_mut(idx).ok()?;
        Some(words.map(|words| match lens.next() {
            Some(len) => &mut bytemuck::cast_slice_mut(words)[..len],
            None => unreachable!("as many lengths as states"),
        }))
    }

    pub(crate) fn get_mut(&mut self, idx: usize) -> &mut [u8] {
        &mut bytemuck::cast_slice_mut(&mut self.words[idx])[..self.bytes[idx]]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::CpuBackend;
    use refrain_graph::{Backend, RunError, TensorType};

    /// Two caches; a block has three pages and a half.
    fn caches(n_blocks: usize) -> Vec<State> {
        let ty = TensorType::new(DType::F16, [n_blocks, 7, 16, 64]);
        ["k", "v"].map(|name| State::paged(name, ty)).to_vec()
    }

    #[test]
    fn states_that_grow_keep_what_they_hold_and_are_zero_behind_it() {
        let backend = CpuBackend::new(1).unwrap();
        let mut states = backend.allocate(&caches(3)).unwrap();
        for idx in 0..2 {
            for (i, byte) in states.get_mut(idx).iter_mut().enumerate() {
                // Some pages stay untouched, others are written in part.
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
}
