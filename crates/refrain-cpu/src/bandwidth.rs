//! What this machine's memory can deliver: the bound of decoding.

use crate::backend::CpuBackend;
use crate::pool::{Chunks, static_range};
use crate::simd;
use std::time::Instant;

/// Far more than any cache holds.
const BYTES: usize = 512 << 20;
const PASSES: usize = 5;

impl CpuBackend {
    /// Bytes per second that the backend's threads read from memory together, at best.
    pub fn read_bandwidth(&self) -> f64 {
        let mut memory = vec![0.0f32; BYTES / 4];
        // Pages that were never written may all be one page of zeros.
        let chunks = Chunks::new(&mut memory, 1 << 20);
        self.pool().run(|_, _| {
            while let Some((i, chunk)) = chunks.next() {
                chunk.fill(i as f32);
            }
        });
        let memory = &memory;
        let mut best = f64::INFINITY;
        for _ in 0..PASSES {
            let began = Instant::now();
            self.pool().run(|thread_idx, n_threads| {
                let part = &memory[static_range(memory.len(), 1 << 10, thread_idx, n_threads)];
                std::hint::black_box(simd::sum(self.level(), part));
            });
            best = best.min(began.elapsed().as_secs_f64());
        }
        BYTES as f64 / best
    }
}
