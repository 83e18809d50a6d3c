//! What memory held before something was tried out on it, kept so that it can be put back.
//!
//! Many bytes are kept on the device, in a memory of their own, while there is room for that; the others on the host.

use refrain_driver::{Buf, DriverError, Layout, Lease, Memory, Stream};

use crate::warm::{Range, Space};

/// Fewer bytes than this go to the host: a memory of their own is not worth its allocation.
const SPARE_FROM: u64 = 4 << 20;
/// Alignment of what is kept.
const ALIGN: u64 = 256;

/// The contents of ranges.
pub(crate) struct Saved {
    parts: Vec<(Range, Kept)>,
    spare: Option<Lease>,
}

enum Kept {
    /// Nothing but zeros.
    Zero,
    Host(Vec<u8>),
    /// In the spare memory.
    Device(Buf),
}

impl Saved {
    /// Keeps what ranges hold. What lies in `zero` is known to be zeros.
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
                _ if is_zero(range) => Kept::Zero,
                Some((spare, whole)) if moves(range) => {
                    let to = whole.slice(end, buf.len())?;
                    end += bytes(range);
                    stream.copy_across((spare, to), (lease, buf))?;
                    Kept::Device(to)
                }
                _ => {
                    let mut bytes = vec![0; buf.len() as usize];
                    stream.download(lease, buf, &mut bytes)?;
                    Kept::Host(bytes)
                }
            };
            parts.push((*range, kept));
        }
        Ok(Saved { parts, spare: spare.map(|(lease, _)| lease) })
    }

    /// Puts everything back and waits for it. Pinned memory comes first, by way of device memory that is put back after it.
    pub(crate) fn put_back(
        &mut self,
        stream: &mut Stream,
        lease: &mut Lease,
        space: &Space,
    ) -> Result<(), DriverError> {
        let on_device = self.parts.iter().map(|(range, _)| *range).filter(|range| !space.is_pinned(range));
        let way = on_device.max_by_key(|range| range.end - range.start);
        for (range, kept) in self.parts.iter().filter(|(range, _)| space.is_pinned(range)) {
            let (Kept::Host(bytes), Some(way)) = (kept, way) else { continue };
            let way = space.buf(way)?;
            for part in pieces(*range, way.len()) {
                let (from, to) = ((part.start - range.start) as usize, (part.end - range.start) as usize);
                let (way, part) = (way.slice(0, part.end - part.start)?, space.buf(part)?);
                stream.upload(lease, way, &bytes[from..to])?;
                stream.run(lease, false, |q| q.copy(part, way))?;
            }
        }
        for (range, kept) in self.parts.iter().filter(|(range, _)| !space.is_pinned(range)) {
            let buf = space.buf(*range)?;
            match (kept, &mut self.spare) {
                (Kept::Zero, _) => stream.run(lease, false, |q| q.fill(buf, 0)).map(|_| ())?,
                (Kept::Host(bytes), _) => stream.upload(lease, buf, bytes)?,
                (Kept::Device(from), Some(spare)) => stream.copy_across((lease, buf), (spare, *from))?,
                (Kept::Device(_), None) => unreachable!("kept on the device without a memory for it"),
            }
        }
        stream.synchronize()
    }
}

/// A memory of so many bytes, where it is worth it and there is room.
fn spare_memory(stream: &Stream, bytes: u64) -> Result<Option<(Lease, Buf)>, DriverError> {
    if bytes < SPARE_FROM {
        return Ok(None);
    }
    let mut layout = Layout::new("kept while a graph is verified");
    let region = layout.device("kept", bytes);
    match Memory::plan(stream.context(), &layout) {
        Ok(memory) => {
            let lease = memory.lease()?;
            Ok(Some((lease, memory.buf(region))))
        }
        Err(error) if error.is_final() => Err(error),
        Err(error) => {
            tracing::debug!("{bytes} bytes are kept on the host while a graph is verified: {error}");
            Ok(None)
        }
    }
}

/// A range in pieces of at most `len` bytes.
pub(crate) fn pieces(range: Range, len: u64) -> impl Iterator<Item = Range> {
    let starts = (range.start..range.end).step_by(len.max(1) as usize);
    starts.map(move |start| Range { start, end: range.end.min(start + len), ..range })
}
