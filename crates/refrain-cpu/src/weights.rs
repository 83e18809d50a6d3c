//! Where weights and states lie.

use crate::pool::Pool;
use crate::simd::{Level, Packed, WeightError, WeightMatrix, pack};
use refrain_graph::{State, StateId, WeightId};
use refrain_tensor::{DType, HostTensor, TensorError};

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

/// The states of a model.
pub struct CpuStates {
    // Words, so that every element type is aligned. Fresh zeros take no memory until they are touched.
    words: Vec<Vec<u64>>,
    bytes: Vec<usize>,
}

impl CpuStates {
    /// Fails with the bytes that could not be had.
    pub(crate) fn new(states: &[State]) -> Result<CpuStates, usize> {
        let (mut words, mut bytes) = (Vec::new(), Vec::new());
        for state in states {
            let n = state.ty.dtype.bytes_for(state.ty.shape.n_elements()).unwrap_or(0);
            // Asked for before the zeros are, which would abort the program instead of failing.
            Vec::<u64>::new().try_reserve_exact(n.div_ceil(8)).map_err(|_| n)?;
            words.push(vec![0u64; n.div_ceil(8)]);
            bytes.push(n);
        }
        Ok(CpuStates { words, bytes })
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

    pub(crate) fn get_mut(&mut self, idx: usize) -> &mut [u8] {
        &mut bytemuck::cast_slice_mut(&mut self.words[idx])[..self.bytes[idx]]
    }
}
