//! Encodes one tensor with all threads, piece by piece.

use refrain_cpu::simd::{self, Level, encode_rows};
use refrain_tensor::{DType, HostTensor, TensorError, quant};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

/// Elements that a thread takes at a time: enough to make the lock cheap, few enough to stay in its cache.
const CHUNK: usize = 1 << 15;
/// Encoded bytes that are collected before they are written.
const SLAB_BYTES: usize = 16 << 20;
/// Tensors with fewer elements are not worth a thread.
const WORTH_THREADS: usize = 1 << 17;

/// A tensor to encode.
pub(crate) struct Encode<'a> {
    pub(crate) tensor: &'a HostTensor,
    pub(crate) dtype: DType,
    /// One factor per column, for each matrix of the tensor one after the other.
    pub(crate) importance: Option<&'a [f32]>,
    pub(crate) n_threads: usize,
}

impl Encode<'_> {
    /// Encodes the tensor; `write` receives its bytes in order.
    pub(crate) fn run<E: From<TensorError>>(
        &self,
        mut write: impl FnMut(&[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let shape = self.tensor.shape();
        let (n, row_len) = (shape.n_elements(), shape.dim_back(0).max(1));
        let n_rows = n / row_len;
        let bytes_of = |dtype: DType, n_rows: usize| {
            let partial = TensorError::PartialBlocks { dtype, shape };
            dtype
                .bytes_for(row_len * n_rows)
                .filter(|_| row_len.is_multiple_of(dtype.block_len()))
                .ok_or(partial)
        };
        let (from_bytes, to_bytes) = (bytes_of(self.tensor.dtype(), 1)?, bytes_of(self.dtype, 1)?);
        let rows_per_matrix = if shape.rank() >= 2 { shape.dim_back(1).max(1) } else { 1 };
        let rows_per_chunk = (CHUNK / row_len).clamp(1, rows_per_matrix);
        let rows_per_slab = (SLAB_BYTES / to_bytes.max(1)).clamp(1, n_rows.max(1));
        let input = self.tensor.bytes().as_slice();
        let mut out = vec![0; rows_per_slab * to_bytes];
        let n_threads = if n < WORTH_THREADS { 1 } else { self.n_threads };
        let level = Level::detect();
        let mut first = 0;
        while first < n_rows {
            let n_now = rows_per_slab.min(n_rows - first);
            let chunks = split(first, n_now, rows_per_chunk, rows_per_matrix);
            let mut rest = &mut out[..n_now * to_bytes];
            let mut jobs = Vec::with_capacity(chunks.len());
            for (row, n_rows) in chunks {
                let (this, next) = rest.split_at_mut(n_rows * to_bytes);
                rest = next;
                jobs.push((row, &input[row * from_bytes..(row + n_rows) * from_bytes], this));
            }
            in_parallel(n_threads, jobs, Vec::new, |values: &mut Vec<f32>, (row, bytes, out)| {
                let values = self.decode(bytes, bytes.len() / from_bytes.max(1) * row_len, values)?;
                let importance = self.importance.map(|all| {
                    let matrix = if all.len() > row_len { row / rows_per_matrix } else { 0 };
                    &all[matrix * row_len..][..row_len]
                });
                let encoded = match self.dtype.is_quantized() {
                    true => encode_rows(level, self.dtype, values, row_len, importance, out),
                    false => quant::quantize(self.dtype, values, out),
                };
                encoded.map_err(|error| at_row(error, row * row_len))
            })?;
            write(&out[..n_now * to_bytes])?;
            first += n_now;
        }
        Ok(())
    }
}

impl Encode<'_> {
    /// The values of `n` elements: the bytes themselves if they are floats at an address for floats.
    fn decode<'b>(
        &self,
        bytes: &'b [u8],
        n: usize,
        values: &'b mut Vec<f32>,
    ) -> Result<&'b [f32], TensorError> {
        let dtype = self.tensor.dtype();
        if let (DType::F32, Ok(floats)) = (dtype, bytemuck::try_cast_slice(bytes)) {
            return Ok(floats);
        }
        values.resize(n, 0.0);
        match (dtype, bytemuck::try_cast_slice(bytes), bytemuck::try_cast_slice(bytes)) {
            (DType::BF16, Ok(halves), _) => simd::bf16_to_f32(Level::detect(), halves, values),
            (DType::F16, _, Ok(halves)) => simd::f16_to_f32(Level::detect(), halves, values),
            _ => quant::dequantize(dtype, bytes, values)?,
        }
        Ok(values)
    }
}

/// Splits rows into chunks that do not cross a matrix: first row and number of rows.
fn split(first: usize, n_rows: usize, per_chunk: usize, per_matrix: usize) -> Vec<(usize, usize)> {
    let (mut chunks, mut row, end) = (Vec::new(), first, first + n_rows);
    while row < end {
        let next = (row + per_chunk).min(end).min((row / per_matrix + 1) * per_matrix);
        chunks.push((row, next - row));
        row = next;
    }
    chunks
}

/// Moves the index of an error from a chunk to its tensor.
fn at_row(error: TensorError, first: usize) -> TensorError {
    match error {
        TensorError::NotFinite { dtype, index, value } => {
            TensorError::NotFinite { dtype, index: first + index, value }
        }
        TensorError::OutOfRange { dtype, index, value } => {
            TensorError::OutOfRange { dtype, index: first + index, value }
        }
        other => other,
    }
}

/// Runs all jobs. After an error no new job starts; of several errors the one of the first job is returned, so that the
/// message does not depend on the number of threads.
pub(crate) fn in_parallel<J: Send, S, E: Send>(
    n_threads: usize,
    jobs: Vec<J>,
    scratch: impl Fn() -> S + Sync,
    run: impl Fn(&mut S, J) -> Result<(), E> + Sync,
) -> Result<(), E> {
    let n_threads = n_threads.clamp(1, jobs.len().max(1));
    let queue = Mutex::new(jobs.into_iter().enumerate());
    let failed: Mutex<Option<(usize, E)>> = Mutex::new(None);
    let stop = AtomicBool::new(false);
    let work = || {
        let mut scratch = scratch();
        while !stop.load(Ordering::Relaxed) {
            let next = queue.lock().unwrap_or_else(PoisonError::into_inner).next();
            let Some((idx, job)) = next else { break };
            if let Err(error) = run(&mut scratch, job) {
                stop.store(true, Ordering::Relaxed);
                let mut failed = failed.lock().unwrap_or_else(PoisonError::into_inner);
                if failed.as_ref().is_none_or(|(first, _)| idx < *first) {
                    *failed = Some((idx, error));
                }
            }
        }
    };
    std::thread::scope(|scope| {
        // If a thread cannot be started, the others do its work.
        for _ in 1..n_threads {
            if std::thread::Builder::new().spawn_scoped(scope, work).is_err() {
                break;
            }
        }
        work();
    });
    let failed = failed.into_inner().unwrap_or_else(PoisonError::into_inner);
    failed.map_or(Ok(()), |(_, error)| Err(error))
}

/// Whether all values are finite. Types other than floats are checked by decoding them.
pub(crate) fn is_finite(tensor: &HostTensor, n_threads: usize) -> Result<bool, TensorError> {
    let (dtype, bytes) = (tensor.dtype(), tensor.bytes().as_slice());
    let per_job = CHUNK / dtype.block_len() * dtype.block_bytes();
    let found = AtomicBool::new(false);
    let jobs: Vec<&[u8]> = bytes.chunks(per_job).collect();
    in_parallel(n_threads, jobs, Vec::new, |values: &mut Vec<f32>, bytes| {
        values.resize(bytes.len() / dtype.block_bytes() * dtype.block_len(), 0.0);
        quant::dequantize(dtype, bytes, values)?;
        if !values.iter().all(|v| v.is_finite()) {
            found.store(true, Ordering::Relaxed);
        }
        Ok::<(), TensorError>(())
    })?;
    Ok(!found.load(Ordering::Relaxed))
}

#[cfg(test)]
mod tests {
    use super::*;
    use refrain_tensor::Shape;

    fn tensor(dims: &[usize], seed: u32) -> HostTensor {
        let shape = Shape::new(dims).unwrap();
        let mut state = seed;
        let values: Vec<f32> = (0..shape.n_elements())
            .map(|_| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (state >> 8) as f32 / (1 << 23) as f32 - 1.0
            })
            .collect();
        HostTensor::from_f32(shape, &values).unwrap()
    }

    fn encode(tensor: &HostTensor, dtype: DType, importance: Option<&[f32]>, n_threads: usize) -> Vec<u8> {
        let mut all = Vec::new();
        let run = Encode { tensor, dtype, importance, n_threads }.run(|bytes| {
            all.extend_from_slice(bytes);
            Ok::<(), TensorError>(())
        });
        run.unwrap();
        all
    }

    #[test]
    fn bytes_do_not_depend_on_the_number_of_threads() {
        let tensor = tensor(&[300, 768], 1);
        let importance: Vec<f32> = (0..768).map(|i| 0.1 + (i % 17) as f32).collect();
        for dtype in [DType::Q4_K, DType::Q6_K, DType::Q4_0, DType::IQ4_XS, DType::F16] {
            let alone = encode(&tensor, dtype, Some(&importance), 1);
            for n_threads in [2, 3, 16] {
                assert_eq!(
                    encode(&tensor, dtype, Some(&importance), n_threads),
                    alone,
                    "{dtype} {n_threads}"
                );
            }
        }
    }

    #[test]
    fn each_expert_has_its_own_importance() {
        let experts = tensor(&[3, 5, 256], 2);
        let importance: Vec<f32> = (0..3 * 256).map(|i| (1 + i % 7 * (i / 256)) as f32).collect();
        let all = encode(&experts, DType::Q3_K, Some(&importance), 2);
        let one = experts.bytes().as_slice().len() / 3;
        for expert in 0..3 {
            let bytes = experts.bytes().slice(expert * one..(expert + 1) * one).unwrap();
            let alone = HostTensor::new(DType::F32, Shape::from([5, 256]), bytes).unwrap();
            let want = encode(&alone, DType::Q3_K, Some(&importance[expert * 256..][..256]), 1);
            assert_eq!(&all[expert * want.len()..][..want.len()], &want[..]);
        }
    }

    #[test]
    fn an_error_names_the_element_of_the_tensor() {
        let mut values = vec![0.5f32; 2000 * 256];
        values[1234 * 256 + 7] = f32::NAN;
        let tensor = HostTensor::from_f32(Shape::from([2000, 256]), &values).unwrap();
        for n_threads in [1, 4] {
            let run = Encode { tensor: &tensor, dtype: DType::Q4_K, importance: None, n_threads };
            let error = run.run(|_| Ok::<(), TensorError>(())).unwrap_err();
            assert!(
                matches!(error, TensorError::NotFinite { index, .. } if index == 1234 * 256 + 7),
                "{error}"
            );
        }
        assert!(!is_finite(&tensor, 3).unwrap());
    }
}
