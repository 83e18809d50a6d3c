//! Measurement of the memory bandwidth, which bounds decoding.

use crate::backend::CpuBackend;
use crate::pool::{Chunks, static_range};
use crate::simd;
use std::time::Instant;

/// Much larger than any cache.
const BYTES: usize = 512 << 20;
const PASSES: usize = 5;

impl CpuBackend {
    /// Returns the best measured read bandwidth of all the backend's threads together, in bytes per second.
    pub fn read_bandwidth(&self) -> f64 {
        let mut memory = vec![0.0f32; BYTES / 4];
        // Touch the pages: until written, all of them may map to one page of zeros.
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
