//! The tensors of a model, found by name, whatever format they are stored in.

use refrain_tensor::{Bytes, DType, HostTensor, Shape};

/// Which of a model's files.
pub(crate) type FileIdx = u32;

/// What is known of a tensor before its bytes are touched.
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

    /// Where its bytes begin, from the start of its file.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// How many bytes it takes.
    pub fn n_bytes(&self) -> u64 {
        self.n_bytes
    }

    /// The tensor over the bytes of its file; `None` when it does not lie in them.
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
    /// Sorts the names; the error is the first pair of one name.
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
