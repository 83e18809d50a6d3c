//! Saves memory contents before a graph is verified on them, and restores them afterwards.
//!
//! Large contents are kept in separate device memory if it can be allocated, otherwise on the host.

use refrain_driver::{Buf, DriverError, Lease, Memory, MemoryLayout, Stream};

use crate::warm::{Range, Space};

/// Smaller contents are saved on the host: a separate device allocation is not worth it.
const SPARE_FROM: u64 = 4 << 20;
/// Alignment of saved contents.
const ALIGN: u64 = 256;

/// Saved contents of ranges.
pub(crate) struct Saved {
    parts: Vec<(Range, SavedContents)>,
    spare: Option<Lease>,
}

enum SavedContents {
    /// Only zeros.
    Zero,
    Host(Vec<u8>),
    /// In the spare memory.
    Device(Buf),
}

impl Saved {
    /// Saves the contents of ranges. Ranges inside `zero` are known to hold zeros.
    pub(crate) fn take(
        stream: &mut Stream,
        lease: &mut Lease,
        space: &Space,
        ranges: &[Range],
        zero: Option<Buf>,
    ) -> Result<Saved, DriverError> {
        let zero = zero.and_then(|buf| space.range(buf));
        let is_zero =
            |r: &Range| zero.is_some_and(|z| z.region == r.region && z.start <= r.start && r.end <= z.end);
        let bytes = |r: &Range| (r.end - r.start).next_multiple_of(ALIGN);
        let moves = |r: &Range| !is_zero(r) && !space.is_pinned(r);
        let total = ranges.iter().filter(|r| moves(r)).map(bytes).sum();
        let mut spare = spare_memory(stream, total)?;
        let (mut parts, mut end) = (Vec::with_capacity(ranges.len()), 0);
        for range in ranges {
            let buf = space.buf(*range)?;
            let kept = match &mut spare {
                _ if is_zero(range) => SavedContents::Zero,
                Some((spare, whole)) if moves(range) => {
                    let to = whole.slice(end, buf.len())?;
                    end += bytes(range);
                    stream.copy_across((spare, to), (lease, buf))?;
                    SavedContents::Device(to)
                }
                _ => {
                    let mut bytes = vec![0; buf.len() as usize];
                    stream.download(lease, buf, &mut bytes)?;
                    SavedContents::Host(bytes)
                }
            };
            parts.push((*range, kept));
        }
        Ok(Saved { parts, spare: spare.map(|(lease, _)| lease) })
    }

    /// Restores everything and waits for it. Pinned memory comes first: it is written through device memory,
    /// which is restored afterwards.
    pub(crate) fn restore(
        &mut self,
        stream: &mut Stream,
        lease: &mut Lease,
        space: &Space,
    ) -> Result<(), DriverError> {
        let on_device = self.parts.iter().map(|(range, _)| *range).filter(|range| !space.is_pinned(range));
        let way = on_device.max_by_key(|range| range.end - range.start);
        for (range, kept) in self.parts.iter().filter(|(range, _)| space.is_pinned(range)) {
            let (SavedContents::Host(bytes), Some(way)) = (kept, way) else { continue };
            let way = space.buf(way)?;
            for part in chunks(*range, way.len()) {
                let (from, to) = ((part.start - range.start) as usize, (part.end - range.start) as usize);
                let (way, part) = (way.slice(0, part.end - part.start)?, space.buf(part)?);
                stream.upload(lease, way, &bytes[from..to])?;
                stream.run(lease, false, |q| q.copy(part, way))?;
            }
        }
        for (range, kept) in self.parts.iter().filter(|(range, _)| !space.is_pinned(range)) {
            let buf = space.buf(*range)?;
            match (kept, &mut self.spare) {
                (SavedContents::Zero, _) => stream.run(lease, false, |q| q.fill(buf, 0)).map(|_| ())?,
                (SavedContents::Host(bytes), _) => stream.upload(lease, buf, bytes)?,
                (SavedContents::Device(from), Some(spare)) => {
                    stream.copy_across((lease, buf), (spare, *from))?
                }
                (SavedContents::Device(_), None) => {
                    unreachable!("saved on the device without spare memory")
                }
            }
        }
        stream.synchronize()
    }
}

/// Allocates spare device memory if the size is worth it and it fits.
fn spare_memory(stream: &Stream, bytes: u64) -> Result<Option<(Lease, Buf)>, DriverError> {
    if bytes < SPARE_FROM {
        return Ok(None);
    }
    let mut layout = MemoryLayout::new("saved while a graph is verified");
    let region = layout.device("saved", bytes);
    match Memory::plan(stream.context(), &layout) {
        Ok(memory) => {
            let lease = memory.lease()?;
            Ok(Some((lease, memory.buf(region))))
        }
        Err(error) if error.is_final() => Err(error),
        Err(error) => {
            tracing::debug!("saving {bytes} bytes on the host while a graph is verified: {error}");
            Ok(None)
        }
    }
}

/// Splits a range into chunks of at most `len` bytes.
pub(crate) fn chunks(range: Range, len: u64) -> impl Iterator<Item = Range> {
    let starts = (range.start..range.end).step_by(len.max(1) as usize);
    starts.map(move |start| Range { start, end: range.end.min(start + len), ..range })
}
