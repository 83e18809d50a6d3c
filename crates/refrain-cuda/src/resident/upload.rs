//! Weights to the device, in the order of the model, several threads filling what the device copies from.

use std::sync::Arc;
use std::time::{Duration, Instant};

use refrain_driver::{Buf, Bulk, BulkOptions, DriverError, Stream};
use refrain_graph::Weight;
use refrain_kernels::{KernelError, Kernels, PackArgs, packed_bytes};
use refrain_tensor::HostTensor;

use super::{HostModel, PACK_ROWS, Placed, Resident, matrix, unified};
use crate::error::CudaError;
use crate::progress::{LoadEvent, LoadListener};

/// Bytes of weights that are sent between two reports of how far they are.
const PIECE_BYTES: usize = 64 << 20;

/// How weights came to a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Upload {
    /// Bytes on the device.
    pub bytes: u64,
    /// How long it took, until the last of them was there.
    pub took: Duration,
}

impl Upload {
    /// Bytes per second.
    #[must_use]
    pub fn bytes_per_second(&self) -> f64 {
        self.bytes as f64 / self.took.as_secs_f64().max(f64::MIN_POSITIVE)
    }
}

/// Why an upload failed, before it is known of which weight.
enum Failure {
    Kernel(KernelError),
    Cuda(CudaError),
}

impl From<DriverError> for Failure {
    fn from(error: DriverError) -> Failure {
        Failure::Kernel(error.into())
    }
}

impl From<KernelError> for Failure {
    fn from(error: KernelError) -> Failure {
        Failure::Kernel(error)
    }
}

impl Failure {
    fn of(self, name: &str) -> CudaError {
        match self {
            Failure::Kernel(KernelError::Driver(source)) => {
                CudaError::Driver { step: format!("uploading {name}"), source }
            }
            Failure::Kernel(error) => CudaError::Kernels(Arc::new(error)),
            Failure::Cuda(error) => error,
        }
    }
}

impl Resident {
    pub(super) fn upload(
        &mut self,
        stream: &mut Stream,
        model: &HostModel,
        kernels: &Kernels,
        listener: &LoadListener,
    ) -> Result<(), CudaError> {
        let began = Instant::now();
        let total_bytes = self.places.weights.iter().flatten().map(|place| place.bytes).sum();
        // Vectors become F32 on the host; the rest is sent from where it was mapped.
        let vectors = vectors(model)?;
        let mut done_bytes = 0;
        let (weights, pinned, scratch, places) =
            (self.weights, self.pinned, self.scratch, &self.places.weights);
        let options = BulkOptions::for_bytes(total_bytes);
        // The weight that was named last; what fails may be of one shortly before it.
        let mut name = String::new();
        for group in unified::groups(places, self.places.unified) {
            let sent = stream.bulk(&mut self.lease, options, |bulk| {
                for idx in group.clone() {
                    let (weight, tensor) = (&model.weights[idx], &model.tensors[idx]);
                    let Some(place) = places[idx].as_ref().filter(|place| !is_copied(place)) else {
                        continue;
                    };
                    name.clone_from(&weight.name);
                    // In pieces, so that a large table shows how far it is.
                    let mut hear = |bytes| {
                        listener.hear(LoadEvent::Sent { done_bytes: done_bytes + bytes, total_bytes });
                    };
                    // A packed one in pinned memory is written there by the kernels that pack it.
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
                            &mut hear,
                        )?,
                    }
                    done_bytes += place.bytes;
                    listener.hear(LoadEvent::Sent { done_bytes, total_bytes });
                }
                Ok::<_, Failure>(())
            });
            sent.map_err(|failure| failure.of(&name))?;
            if self.places.unified {
                unified::evict(model.tensors[group.clone()].iter().zip(&places[group]));
            }
        }
        for (idx, place) in self.places.weights.iter().enumerate() {
            let Some(place) = place.as_ref().filter(|place| is_copied(place)) else { continue };
            let (weight, tensor) = (&model.weights[idx], &model.tensors[idx]);
            let copied = (|| {
                let (dst, file) = (pinned.slice(place.offset, place.bytes)?, dense(weight, tensor)?);
                for (i, piece) in file.chunks(PIECE_BYTES).enumerate() {
                    let at = (i * PIECE_BYTES) as u64;
                    stream.write_pinned(&mut self.lease, dst.slice(at, piece.len() as u64)?, piece)?;
                    let done_bytes = done_bytes + at + piece.len() as u64;
                    listener.hear(LoadEvent::Sent { done_bytes, total_bytes });
                }
                Ok::<_, Failure>(())
            })();
            copied.map_err(|failure| failure.of(&weight.name))?;
            done_bytes += place.bytes;
        }
        stream.synchronize().map_err(CudaError::driver("uploading weights"))?;
        self.uploaded = Upload { bytes: done_bytes, took: began.elapsed() };
        let (seconds, rate) = (began.elapsed().as_secs_f64(), self.uploaded.bytes_per_second() / 1e9);
        tracing::info!("{done_bytes} bytes of weights sent in {seconds:.3} s, {rate:.1} GB/s, {options:?}");
        Ok(())
    }
}

/// Whether the host writes a weight to its place itself.
fn is_copied(place: &Placed) -> bool {
    place.pinned && !place.packed
}

/// The values of each weight that is a vector.
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

/// The bytes of a matrix as they lie in the file.
fn dense<'b>(weight: &Weight, tensor: &'b HostTensor) -> Result<&'b [u8], Failure> {
    let start = tensor.dtype().bytes_for(tensor.layout().offset()).unwrap_or(usize::MAX);
    let len = tensor.dtype().bytes_for(tensor.shape().n_elements()).unwrap_or(usize::MAX);
    let bytes = start.checked_add(len).and_then(|end| tensor.bytes().as_slice().get(start..end));
    let dense = bytes.filter(|_| tensor.layout().is_contiguous());
    dense.ok_or_else(|| Failure::Cuda(unfit(format!("{} is not dense", weight.name))))
}

/// Sends a matrix as it is, or rows of it through the scratch, as many as that holds, to be packed into their place.
fn send<'b>(
    bulk: &mut Bulk<'_, 'b>,
    kernels: &Kernels,
    (weight, place): (&Weight, &Placed),
    (dst, scratch): (Buf, Buf),
    file: &'b [u8],
    hear: &mut dyn FnMut(u64),
) -> Result<(), Failure> {
    let mut offset = 0;
    if !place.packed {
        for piece in file.chunks(PIECE_BYTES) {
            bulk.push(dst.slice(offset, piece.len() as u64)?, piece)?;
            offset += piece.len() as u64;
            hear(offset);
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
        hear(offset);
    }
    Ok(())
}
