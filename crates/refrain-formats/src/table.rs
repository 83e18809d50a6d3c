//! Tensors of a model by name, in any format.

use refrain_tensor::{Bytes, DType, HostTensor, Shape};

/// Index of one of a model's files.
pub(crate) type FileIdx = u32;

/// Entry of the tensor table.
#[derive(Debug, Clone)]
pub struct TensorInfo {
    pub(crate) name: Box<str>,
    pub(crate) dtype: DType,
    pub(crate) shape: Shape,
    pub(crate) offset: u64,
    pub(crate) n_bytes: u64,
    pub(crate) file_idx: FileIdx,
}

impl TensorInfo {
    /// Name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Shape, outermost dimension first.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Offset of its bytes from the start of its file; of its codes if it is stored in parts.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Size in bytes, once loaded.
    pub fn n_bytes(&self) -> u64 {
        self.n_bytes
    }

    /// Returns the tensor as a view of its file; `None` if it is out of bounds.
    pub(crate) fn view(&self, file: &Bytes) -> Option<HostTensor> {
        let start = usize::try_from(self.offset).ok()?;
        let end = start.checked_add(usize::try_from(self.n_bytes).ok()?)?;
        let bytes = crate::aligned::aligned(file.slice(start..end)?, self.dtype);
        HostTensor::new(self.dtype, self.shape, bytes).ok()
    }
}

/// Tensors in the order of their files, with an index by name.
#[derive(Debug, Default)]
pub(crate) struct TensorTable {
    tensors: Vec<TensorInfo>,
    by_name: Vec<u32>, // indices of `tensors`, sorted by name
}

impl TensorTable {
    /// Builds the index by name. The error is the first pair of tensors with the same name.
    pub(crate) fn new(tensors: Vec<TensorInfo>) -> Result<TensorTable, Box<[TensorInfo; 2]>> {
        let mut by_name: Vec<u32> = (0..tensors.len() as u32).collect();
        let name = |i: u32| &tensors[i as usize].name;
        by_name.sort_unstable_by(|&a, &b| name(a).cmp(name(b)).then(a.cmp(&b)));
        if let Some(pair) = by_name.windows(2).find(|pair| name(pair[0]) == name(pair[1])) {
            return Err(Box::new([pair[0], pair[1]].map(|i| tensors[i as usize].clone())));
        }
        Ok(TensorTable { tensors, by_name })
    }

    pub(crate) fn all(&self) -> &[TensorInfo] {
        &self.tensors
    }

    pub(crate) fn find(&self, name: &str) -> Option<&TensorInfo> {
        let found = self.by_name.binary_search_by(|&i| (*self.tensors[i as usize].name).cmp(name)).ok()?;
        Some(&self.tensors[self.by_name[found] as usize])
    }
}
