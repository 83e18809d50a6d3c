//! RoPE, the paged KV cache, and attention over it.

use crate::dense::{In, Out, ReferenceError, store_one};
use refrain_graph::{Attention, AttentionInputs, Rope, RopeStyle};
use refrain_tensor::{row_from_bytes, row_scale, row_to_bytes};

pub(crate) fn rope(rope: &Rope, inputs: &[In<'_>], out: &mut Out<'_>) -> Result<(), ReferenceError> {
    let [x, positions, inv_freq] = [&inputs[0], &inputs[1], &inputs[2]];
    let (n_heads, head_dim) = (x.dim(1), x.dim(2));
    let (positions, inv_freq) = (positions.to_i32()?, inv_freq.to_f32()?);
    let mut y = x.to_f32()?;
    for (head, values) in y.chunks_exact_mut(head_dim).enumerate() {
        let position = positions[head / n_heads];
        if position < 0 {
            continue;
        }
        for (i, &freq) in inv_freq.iter().enumerate() {
            let (a, b) = match rope.style {
                RopeStyle::Neox => (i, i + rope.n_dims / 2),
                RopeStyle::Interleaved => (2 * i, 2 * i + 1),
            };
            let angle = f64::from(position) * f64::from(freq);
            let (sin, cos) =
                (angle.sin() * f64::from(rope.magnitude), angle.cos() * f64::from(rope.magnitude));
            let (u, v) = (f64::from(values[a]), f64::from(values[b]));
            values[a] = (u * cos - v * sin) as f32;
            values[b] = (u * sin + v * cos) as f32;
        }
    }
    out.store(&y)
}

/// Block tables that map positions to rows of a cache `[n_blocks, n_kv_heads, kv_block, head_dim]`.
struct CachePages {
    tables: Vec<i32>,
    max_blocks: usize,
    n_blocks: usize,
    kv_block: usize,
}

impl CachePages {
    fn new(cache: &[usize], tables: &In<'_>) -> Result<CachePages, ReferenceError> {
        let max_blocks = tables.dim(1);
        Ok(CachePages { tables: tables.to_i32()?, max_blocks, n_blocks: cache[0], kv_block: cache[2] })
    }

    /// Returns the KV block of a position, and the row within it.
    fn find(&self, seq: i32, position: usize) -> Result<(usize, usize), ReferenceError> {
        let n_seqs = self.tables.len() / self.max_blocks.max(1);
        let seq_idx = usize::try_from(seq).unwrap_or(usize::MAX);
        if seq_idx >= n_seqs {
            return Err(ReferenceError::OutOfRange { index: "sequence", got: seq.into(), limit: n_seqs });
        }
        let column = position / self.kv_block;
        if column >= self.max_blocks {
            let limit = self.max_blocks * self.kv_block;
            return Err(ReferenceError::OutOfRange { index: "position", got: position as i64, limit });
        }
        let block = self.tables[seq_idx * self.max_blocks + column];
        let block_idx = usize::try_from(block).unwrap_or(usize::MAX);
        if block_idx >= self.n_blocks {
            return Err(ReferenceError::OutOfRange {
                index: "KV block",
                got: block.into(),
                limit: self.n_blocks,
            });
        }
        Ok((block_idx, position % self.kv_block))
    }
}

pub(crate) fn kv_append(inputs: &[In<'_>], cache: &mut Out<'_>) -> Result<(), ReferenceError> {
    let [x, positions, seqs, tables] = [&inputs[0], &inputs[1], &inputs[2], &inputs[3]];
    let dims = cache.ty.shape.dims().to_vec();
    let (n_heads, kv_block, head_dim) = (dims[1], dims[2], dims[3]);
    let pages = CachePages::new(&dims, tables)?;
    let (positions, seqs, x) = (positions.to_i32()?, seqs.to_i32()?, x.to_f32()?);
    let size = cache.ty.dtype.block_bytes();
    for (row, &position) in positions.iter().enumerate() {
        let Ok(position) = usize::try_from(position) else { continue };
        let (block, at) = pages.find(seqs[row], position)?;
        for head in 0..n_heads {
            for i in 0..head_dim {
                let to = ((block * n_heads + head) * kv_block + at) * head_dim + i;
                let v = x[(row * n_heads + head) * head_dim + i];
                store_one(cache.ty.dtype, &mut cache.bytes[to * size..][..size], v)?;
            }
        }
    }
    Ok(())
}

pub(crate) fn kv_append_bytes(inputs: &[In<'_>], outputs: &mut [Out<'_>]) -> Result<(), ReferenceError> {
    let [x, positions, seqs, tables] = [&inputs[0], &inputs[1], &inputs[2], &inputs[3]];
    let [cache, scales] = outputs else {
        return Err(ReferenceError::Unsupported {
            op: "kv_append_bytes",
            because: "it has two outputs".into(),
        });
    };
    let dims = cache.ty.shape.dims().to_vec();
    let (n_heads, kv_block, head_dim) = (dims[1], dims[2], dims[3]);
    let pages = CachePages::new(&dims, tables)?;
    let (positions, seqs, x) = (positions.to_i32()?, seqs.to_i32()?, x.to_f32()?);
    for (row, &position) in positions.iter().enumerate() {
        let Ok(position) = usize::try_from(position) else { continue };
        let (block, at) = pages.find(seqs[row], position)?;
        for head in 0..n_heads {
            let to = (block * n_heads + head) * kv_block + at;
            let x = &x[(row * n_heads + head) * head_dim..][..head_dim];
            row_to_bytes(x, &mut cache.bytes[to * head_dim..][..head_dim]);
            store_one(scales.ty.dtype, &mut scales.bytes[4 * to..][..4], row_scale(x))?;
        }
    }
    Ok(())
}

/// The rows of a cache as numbers; those of an 8-bit cache are bytes times a scale.
fn cache_values(cache: &In<'_>, scales: Option<&In<'_>>) -> Result<Vec<f32>, ReferenceError> {
    let Some(scales) = scales else { return Ok(cache.to_f32()?) };
    let (bytes, scales) = (cache.to_dense()?, scales.to_f32()?);
    let head_dim = cache.dim(3);
    let mut values = vec![0.0; bytes.len()];
    for ((to, bytes), scale) in
        values.chunks_exact_mut(head_dim).zip(bytes.chunks_exact(head_dim)).zip(scales)
    {
        row_from_bytes(bytes, scale, to);
    }
    Ok(values)
}

pub(crate) fn attention(
    attention: &Attention,
    inputs: &[In<'_>],
    out: &mut Out<'_>,
) -> Result<(), ReferenceError> {
    let [q, k, v, positions, seqs, tables] = std::array::from_fn(|i| &inputs[i]);
    let AttentionInputs { scales, sinks } = AttentionInputs::of(inputs.len());
    let sinks = sinks.map(|i| inputs[i].to_f32()).transpose()?;
    let [k_scales, v_scales] = scales.map_or([None; 2], |scales| scales.map(|i| Some(&inputs[i])));
    let (n_heads, head_dim) = (q.dim(1), q.dim(2));
    let cache = k.layout.shape();
    let (n_kv_heads, kv_block) = (cache.dims()[1], cache.dims()[2]);
    let pages = CachePages::new(cache.dims(), tables)?;
    let (positions, seqs) = (positions.to_i32()?, seqs.to_i32()?);
    let q = q.to_f32()?;
    let (k, v) = (cache_values(k, k_scales)?, cache_values(v, v_scales)?);
    let mut y = vec![0.0; q.len()];
    for (row, &position) in positions.iter().enumerate() {
        let Ok(position) = usize::try_from(position) else { continue };
        let first = attention.window.map_or(0, |w| (position + 1).saturating_sub(w));
        for head in 0..n_heads {
            let kv_head = head / (n_heads / n_kv_heads);
            let q = &q[(row * n_heads + head) * head_dim..][..head_dim];
            let mut scores = Vec::with_capacity(position + 1 - first);
            let mut rows = Vec::with_capacity(position + 1 - first);
            for p in first..=position {
                let (block, at) = pages.find(seqs[row], p)?;
                let start = ((block * n_kv_heads + kv_head) * kv_block + at) * head_dim;
                let dot: f64 =
                    q.iter().zip(&k[start..][..head_dim]).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum();
                let score = dot * f64::from(attention.scale);
                scores.push(match attention.softcap {
                    Some(cap) => f64::from(cap) * (score / f64::from(cap)).tanh(),
                    None => score,
                });
                rows.push(start);
            }
            let sink = sinks.as_ref().map_or(f64::NEG_INFINITY, |sinks| f64::from(sinks[head]));
            let max = scores.iter().copied().fold(sink, f64::max);
            let weights: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
            let total: f64 = weights.iter().sum::<f64>() + (sink - max).exp();
            for i in 0..head_dim {
                let sum: f64 = rows.iter().zip(&weights).map(|(&r, w)| w * f64::from(v[r + i])).sum();
                y[(row * n_heads + head) * head_dim + i] = (sum / total) as f32;
            }
        }
    }
    out.store(&y)
}
