//! Uploads weights to the device in the model's order. Several threads fill the staging memory that the
//! device copies from.

use std::sync::Arc;
use std::time::{Duration, Instant};

use refrain_driver::{Buf, Bulk, BulkOptions, DriverError, Stream};
use refrain_graph::Weight;
use refrain_kernels::{KernelError, Kernels, PackArgs, packed_bytes};
use refrain_tensor::HostTensor;

use super::{HostModel, PACK_ROWS, ResidentMemory, WeightPlacement, matrix, unified};
use crate::error::CudaError;
use crate::progress::{LoadEvent, LoadListener};

/// Bytes uploaded between two progress reports.
const PIECE_BYTES: usize = 64 << 20;

/// Statistics of a weight upload.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Upload {
    /// Bytes on the device.
    pub bytes: u64,
    /// Time until the last byte had arrived.
    pub took: Duration,
}

impl Upload {
    /// Bytes per second.
    #[must_use]
    pub fn bytes_per_second(&self) -> f64 {
        self.bytes as f64 / self.took.as_secs_f64().max(f64::MIN_POSITIVE)
    }
}

/// Error of an upload before the name of the weight is attached.
enum UploadFailure {
    Kernel(KernelError),
    Cuda(CudaError),
}

impl From<DriverError> for UploadFailure {
    fn from(error: DriverError) -> UploadFailure {
        UploadFailure::Kernel(error.into())
    }
}

impl From<KernelError> for UploadFailure {
    fn from(error: KernelError) -> UploadFailure {
        UploadFailure::Kernel(error)
    }
}

impl UploadFailure {
    fn of_weight(self, name: &str) -> CudaError {
        match self {
            UploadFailure::Kernel(KernelError::Driver(source)) => {
                CudaError::Driver { step: format!("uploading {name}"), source }
            }
            UploadFailure::Kernel(error) => CudaError::Kernels(Arc::new(error)),
            UploadFailure::Cuda(error) => error,
        }
    }
}

impl ResidentMemory {
    pub(super) fn upload(
        &mut self,
        stream: &mut Stream,
        model: &HostModel,
        kernels: &Kernels,
        listener: &LoadListener,
    ) -> Result<(), CudaError> {
        let began = Instant::now();
        let total_bytes = self.places.weights.iter().flatten().map(|place| place.bytes).sum();
        // Vectors are converted to F32 on the host; everything else is copied from the mapped file.
        let vectors = vectors(model)?;
        let mut done_bytes = 0;
        let (weights, pinned, scratch, places) =
            (self.weights, self.pinned, self.scratch, &self.places.weights);
        let options = BulkOptions::for_bytes(total_bytes);
        // The weight named last. Copies are asynchronous, so an error may belong to one shortly before it.
        let mut name = String::new();
        for group in unified::groups(places, self.places.unified) {
            let sent = stream.bulk(&mut self.lease, options, |bulk| {
                for idx in group.clone() {
                    let (weight, tensor) = (&model.weights[idx], &model.tensors[idx]);
                    let Some(place) = places[idx].as_ref().filter(|place| !is_copied(place)) else {
                        continue;
                    };
                    name.clone_from(&weight.name);
                    // In chunks, so that a large table shows progress.
                    let mut report = |bytes| {
                        listener.report(LoadEvent::Uploaded { done_bytes: done_bytes + bytes, total_bytes });
                    };
                    // Packed weights in pinned memory are written there by the packing kernels.
                    let region = if place.pinned { pinned } else { weights };
                    let dst = region.slice(place.offset, place.bytes)?;
                    match &vectors[idx] {
                        Some(values) => bulk.push(dst, bytemuck::cast_slice(values))?,
                        None => send(
                            bulk,
                            kernels,
                            (weight, place),
                            (dst, scratch),
                            dense(weight, tensor)?,
                            &mut report,
                        )?,
                    }
                    done_bytes += place.bytes;
                    listener.report(LoadEvent::Uploaded { done_bytes, total_bytes });
                }
                Ok::<_, UploadFailure>(())
            });
            sent.map_err(|failure| failure.of_weight(&name))?;
            if self.places.unified {
                unified::evict(model.tensors[group.clone()].iter().zip(&places[group]));
            }
        }
        for (idx, place) in self.places.weights.iter().enumerate() {
            let Some(place) = place.as_ref().filter(|place| is_copied(place)) else { continue };
            let (weight, tensor) = (&model.weights[idx], &model.tensors[idx]);
            let copied = (|| {
                let (dst, file) = (pinned.slice(place.offset, place.bytes)?, dense(weight, tensor)?);
                for (i, chunk) in file.chunks(PIECE_BYTES).enumerate() {
                    let offset = (i * PIECE_BYTES) as u64;
                    stream.write_pinned(&mut self.lease, dst.slice(offset, chunk.len() as u64)?, chunk)?;
                    let done_bytes = done_bytes + offset + chunk.len() as u64;
                    listener.report(LoadEvent::Uploaded { done_bytes, total_bytes });
                }
                Ok::<_, UploadFailure>(())
            })();
            copied.map_err(|failure| failure.of_weight(&weight.name))?;
            done_bytes += place.bytes;
        }
        stream.synchronize().map_err(CudaError::driver("uploading weights"))?;
        self.uploaded = Upload { bytes: done_bytes, took: began.elapsed() };
        let (seconds, rate) = (began.elapsed().as_secs_f64(), self.uploaded.bytes_per_second() / 1e9);
        tracing::info!(
            "{done_bytes} bytes of weights uploaded in {seconds:.3} s, {rate:.1} GB/s, {options:?}"
        );
        Ok(())
    }
}

/// Whether the host itself writes a weight to its location.
fn is_copied(place: &WeightPlacement) -> bool {
    place.pinned && !place.packed
}

/// Values of each weight that is a vector.
fn vectors(model: &HostModel) -> Result<Vec<Option<Vec<f32>>>, CudaError> {
    let each = model.weights.iter().zip(&model.tensors);
    let of = |(weight, tensor): (&Weight, &HostTensor)| match weight.ty.shape.rank() < 2 {
        true => tensor.to_f32().map(Some).map_err(|e| unfit(format!("{}: {e}", weight.name))),
        false => Ok(None),
    };
    each.map(of).collect()
}

fn unfit(because: String) -> CudaError {
    CudaError::Mismatch { what: "weights", because }
}

/// Bytes of a matrix in their file layout.
fn dense<'b>(weight: &Weight, tensor: &'b HostTensor) -> Result<&'b [u8], UploadFailure> {
    let start = tensor.dtype().bytes_for(tensor.layout().offset()).unwrap_or(usize::MAX);
    let len = tensor.dtype().bytes_for(tensor.shape().n_elements()).unwrap_or(usize::MAX);
    let bytes = start.checked_add(len).and_then(|end| tensor.bytes().as_slice().get(start..end));
    let dense = bytes.filter(|_| tensor.layout().is_contiguous());
    dense.ok_or_else(|| UploadFailure::Cuda(unfit(format!("{} is not dense", weight.name))))
}

/// Uploads a matrix unchanged, or uploads as many rows as fit into the scratch at a time and packs them into
/// place.
fn send<'b>(
    bulk: &mut Bulk<'_, 'b>,
    kernels: &Kernels,
    (weight, place): (&Weight, &WeightPlacement),
    (dst, scratch): (Buf, Buf),
    file: &'b [u8],
    report: &mut dyn FnMut(u64),
) -> Result<(), UploadFailure> {
    let mut offset = 0;
    if !place.packed {
        for chunk in file.chunks(PIECE_BYTES) {
            bulk.push(dst.slice(offset, chunk.len() as u64)?, chunk)?;
            offset += chunk.len() as u64;
            report(offset);
        }
        return Ok(());
    }
    let (dtype, [n, k]) = (weight.ty.dtype, matrix(&weight.ty.shape));
    let row_bytes = (file.len() / n.max(1)).max(1);
    let most = (scratch.len() as usize / row_bytes / PACK_ROWS * PACK_ROWS).max(PACK_ROWS);
    for rows in file.chunks(most * row_bytes) {
        let n = rows.len() / row_bytes;
        let staged = scratch.slice(0, rows.len() as u64)?;
        bulk.push(staged, rows)?;
        let bytes = packed_bytes(dtype, n, k).unwrap_or(0) as u64;
        let packed = dst.slice(offset, bytes)?;
        bulk.launch(kernels.pack(&PackArgs { file: staged, dtype, packed, n, k, step: &weight.name })?)?;
        offset += bytes;
        report(offset);
    }
    Ok(())
}
