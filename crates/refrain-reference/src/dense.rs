//! Operands, and ops that move data or multiply matrices.

use half::{bf16, f16};
use refrain_graph::{HostCallError, TensorType};
use refrain_tensor::{Bytes, DType, HostTensor, Layout, TensorError, quant};

/// Reason why the reference refused an op.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ReferenceError {
    /// The op has no reference implementation.
    #[error("{op} has no reference: {because}")]
    Unsupported {
        /// Name of the op.
        op: &'static str,
        /// Reason.
        because: String,
    },
    /// An index is out of range.
    #[error("{index} is {got}, must be below {limit}")]
    OutOfRange {
        /// Name of the index.
        index: &'static str,
        /// Its value.
        got: i64,
        /// Its exclusive upper bound.
        limit: usize,
    },
    /// The bytes do not match their type.
    #[error(transparent)]
    Tensor(#[from] TensorError),
    /// A host function failed.
    #[error(transparent)]
    Host(HostCallError),
}

/// An input: bytes with a layout.
#[derive(Clone, Copy, Debug)]
pub struct In<'a> {
    /// Element type.
    pub dtype: DType,
    /// Layout of the elements.
    pub layout: Layout,
    /// Bytes of the whole buffer.
    pub bytes: &'a [u8],
}

/// A contiguous output.
#[derive(Debug)]
pub struct Out<'a> {
    /// Type of the output.
    pub ty: TensorType,
    /// Bytes of the output.
    pub bytes: &'a mut [u8],
}

impl In<'_> {
    /// Type of the input.
    pub fn ty(&self) -> TensorType {
        TensorType { dtype: self.dtype, shape: self.layout.shape() }
    }

    /// Size of a dimension.
    pub fn dim(&self, axis: usize) -> usize {
        self.layout.shape().dims()[axis]
    }

    /// All elements in row-major order of the shape.
    pub fn to_f32(&self) -> Result<Vec<f32>, TensorError> {
        let n = self.bytes.len() / self.dtype.block_bytes() * self.dtype.block_len();
        let whole = &self.bytes[..n / self.dtype.block_len() * self.dtype.block_bytes()];
        let mut flat = vec![0.0; n];
        quant::dequantize(self.dtype, whole, &mut flat)?;
        Ok(self.layout.indices().map(|i| flat[i]).collect())
    }

    /// All elements of an I32 input.
    pub fn to_i32(&self) -> Result<Vec<i32>, TensorError> {
        if self.dtype != DType::I32 {
            return Err(TensorError::Unsupported { dtype: self.dtype, verb: "read as I32" });
        }
        Ok(self.words().into_iter().map(|w| w as i32).collect())
    }

    /// All elements of a U32 input.
    pub fn to_u32(&self) -> Result<Vec<u32>, TensorError> {
        if self.dtype != DType::U32 {
            return Err(TensorError::Unsupported { dtype: self.dtype, verb: "read as U32" });
        }
        Ok(self.words())
    }

    fn words(&self) -> Vec<u32> {
        let word = |i: usize| u32::from_le_bytes(std::array::from_fn(|b| self.bytes[4 * i + b]));
        self.layout.indices().map(word).collect()
    }

    /// The raw elements, contiguous. Quantised types are copied block by block, so the view must consist of
    /// whole blocks.
    pub fn to_dense(&self) -> Result<Vec<u8>, TensorError> {
        let (len, size) = (self.dtype.block_len(), self.dtype.block_bytes());
        let shape = self.layout.shape();
        let whole = shape.dim_back(0).is_multiple_of(len)
            && (len == 1 || self.layout.rows_are_contiguous())
            && self.layout.indices().step_by(len).all(|i| i.is_multiple_of(len));
        if !whole {
            return Err(TensorError::PartialBlocks { dtype: self.dtype, shape });
        }
        let firsts = self.layout.indices().step_by(len);
        Ok(firsts.flat_map(|i| self.bytes[i / len * size..][..size].iter().copied()).collect())
    }
}

impl Out<'_> {
    /// Rounds values into the output.
    pub fn store(&mut self, values: &[f32]) -> Result<(), ReferenceError> {
        let dtype = self.ty.dtype;
        let n = self.ty.shape.n_elements();
        debug_assert_eq!(values.len(), n);
        let size = dtype.block_bytes();
        for (bytes, &v) in self.bytes.chunks_exact_mut(size).zip(values) {
            store_one(dtype, bytes, v)?;
        }
        Ok(())
    }
}

/// Rounds one value to its bytes.
#[expect(clippy::wildcard_enum_match_arm, reason = "only the three float types are stored one by one")]
pub(crate) fn store_one(dtype: DType, bytes: &mut [u8], v: f32) -> Result<(), TensorError> {
    match dtype {
        DType::F32 => bytes.copy_from_slice(&v.to_le_bytes()),
        DType::F16 => bytes.copy_from_slice(&f16::from_f32(v).to_le_bytes()),
        DType::BF16 => bytes.copy_from_slice(&bf16::from_f32(v).to_le_bytes()),
        other => return Err(TensorError::Unsupported { dtype: other, verb: "written element by element" }),
    }
    Ok(())
}

pub(crate) fn copy(x: &In<'_>, out: &mut Out<'_>) -> Result<(), ReferenceError> {
    out.bytes.copy_from_slice(&x.to_dense()?);
    Ok(())
}

pub(crate) fn gather_rows(table: &In<'_>, ids: &In<'_>, out: &mut Out<'_>) -> Result<(), ReferenceError> {
    let (n_rows, d) = (table.dim(0), table.dim(1));
    let mut rows = Vec::with_capacity(ids.dim(0) * d);
    for id in ids.to_i32()? {
        if id < 0 {
            rows.extend(std::iter::repeat_n(0.0, d));
            continue;
        }
        let row = usize::try_from(id).unwrap_or(usize::MAX);
        if row >= n_rows {
            return Err(ReferenceError::OutOfRange { index: "row", got: id.into(), limit: n_rows });
        }
        let one = In { layout: table.layout.slice(0, row, 1)?, ..*table };
        rows.extend(one.row_f32()?);
    }
    out.store(&rows)
}

impl In<'_> {
    /// Like [`In::to_f32`], but decodes only the blocks that a single contiguous row touches.
    fn row_f32(&self) -> Result<Vec<f32>, TensorError> {
        let (len, size) = (self.dtype.block_len(), self.dtype.block_bytes());
        let (start, end) = (self.layout.offset(), self.layout.end());
        if self.layout.shape().n_elements() == 0 {
            return Ok(Vec::new());
        }
        if !self.layout.rows_are_contiguous() || start % len != 0 || end % len != 0 {
            return self.to_f32();
        }
        let mut out = vec![0.0; end - start];
        quant::dequantize(self.dtype, &self.bytes[start / len * size..end / len * size], &mut out)?;
        Ok(out)
    }
}

pub(crate) fn matmul(a: &In<'_>, b: &In<'_>, out: &mut Out<'_>) -> Result<(), ReferenceError> {
    let dims = out.ty.shape.dims().to_vec();
    let rank = dims.len();
    let (m, n, k) = (dims[rank - 2], dims[rank - 1], a.layout.shape().dim_back(0));
    let batched = |x: &In<'_>, rows: usize, cols: usize| -> Result<Vec<f32>, ReferenceError> {
        let mut shape = dims.clone();
        (shape[rank - 2], shape[rank - 1]) = (rows, cols);
        let layout = x.layout.broadcast_to(refrain_tensor::Shape::new(&shape)?)?;
        Ok(In { layout, ..*x }.to_f32()?)
    };
    // `b` is a [k, n] matrix here and read column by column.
    let (a, b) = (batched(a, m, k)?, batched(b, k, n)?);
    let n_batches: usize = dims[..rank - 2].iter().product();
    let mut y = vec![0.0; n_batches * m * n];
    for batch in 0..n_batches {
        for i in 0..m {
            for j in 0..n {
                let row = &a[(batch * m + i) * k..][..k];
                let sum: f64 = row
                    .iter()
                    .enumerate()
                    .map(|(l, &x)| f64::from(x) * f64::from(b[(batch * k + l) * n + j]))
                    .sum();
                y[(batch * m + i) * n + j] = sum as f32;
            }
        }
    }
    out.store(&y)
}

/// A host tensor as an input.
impl<'a> From<&'a HostTensor> for In<'a> {
    fn from(t: &'a HostTensor) -> In<'a> {
        In { dtype: t.dtype(), layout: *t.layout(), bytes: Bytes::as_slice(t.bytes()) }
    }
}
