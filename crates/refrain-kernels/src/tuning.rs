//! Performance parameters of kernels per GPU. They change how long a launch takes, not what it computes, except
//! where a parameter says so.
//!
//! There is one table per measured compute capability, and one for all others. Parameters that are compiled
//! into kernels reach them as `tuning.cuh`, which is generated from the table, so kernels and launchers share
//! one source. Anything that affects results or scratch sizes (tiles, splits) is not tuning and stays in the
//! kernel's module.

use std::fmt::Write;

use crate::load::GpuArch;
use crate::source::grids;

/// Parameters for one GPU.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Tuning {
    /// The GPU they were measured on; `None` if they were not measured on this architecture.
    pub(crate) measured_on: Option<&'static str>,
    /// Ratio of peak memory bandwidth to the bandwidth that all SMs reach together.
    pub(crate) peak_over_bandwidth: f64,
    pub(crate) product: ProductTuning,
    pub(crate) attend: AttendTuning,
    pub(crate) few: FewTuning,
    pub(crate) batch: BatchTuning,
    pub(crate) grouped: GroupedTuning,
}

/// `product.cu`: decode GEMV.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct ProductTuning {
    /// F16 and BF16: a chunk is 2 rows of 1,024 columns.
    pub(crate) plain: ChunkTuning,
    /// Q8_0.
    pub(crate) q8_0: ChunkTuning,
    /// Other dtypes whose packed units have 128 columns.
    pub(crate) cols_128: ChunkTuning,
    /// Dtypes whose packed units have 256 columns.
    pub(crate) cols_256: ChunkTuning,
    /// Pacing of the initial prefetch, in cycles per 64 bytes. Issuing it all at once saturates memory for 2 µs and delays
    /// the previous kernel's activations.
    pub(crate) pace: usize,
    /// Pacing for a gated product, which mostly follows a short launch that ends within that delay. It is
    /// therefore slower.
    pub(crate) gated_pace: usize,
    /// After a long product, half of the initial prefetch is delayed until that product has requested almost
    /// all of its weights: this many cycles for its start, plus [`crate::card::Card::cycles_of`] its
    /// activations and the weights that did not fit its rings. The prefetch then arrives in the one or two
    /// microseconds between the last weights of one launch and the first of the next, when memory is idle.
    pub(crate) late_cycles: usize,
    /// Upper limit of that delay, whatever clocks a GPU reports.
    pub(crate) late_cycles_max: usize,
    /// No delay after products with more remaining bytes than this: the end of such a product is too
    /// uncertain, and matters less.
    pub(crate) late_bytes_max: usize,
    /// Products of fewer bytes use no more ring slots than they fill. They last as long as their start, and
    /// other launches should be able to start next to them.
    pub(crate) small_bytes: usize,
}

/// Chunk size of a warp. Few warps with large chunks load faster, many warps compute faster.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct ChunkTuning {
    /// Packed units per chunk; 1 for plain weights. Compiled into the kernel.
    pub(crate) units: usize,
    /// Warps per block. Compiled into the kernel.
    pub(crate) warps: usize,
    /// Bytes of all warps' rings. A block should leave half of an SM to a block of the next launch.
    pub(crate) ring_bytes: usize,
}

/// `attend.cu`: decode attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct AttendTuning {
    /// Ring bytes per warp for 16-bit keys and values. Compiled into the kernel.
    pub(crate) ring_bytes: usize,
    /// The same for GPUs with less shared memory per block than `large_shared_bytes`. Compiled into the
    /// kernel.
    pub(crate) small_ring_bytes: usize,
    /// Shared memory per block required for the larger rings, which leave space for a block of another
    /// launch. Compute capability 8.6, 8.9 and 12.0 have 99 KiB, 8.0 has 163 KiB.
    pub(crate) large_shared_bytes: usize,
}

/// `few.cu`: several rows times packed weights.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct FewTuning {
    /// Warps per block. Compiled into the kernel.
    pub(crate) warps: usize,
    /// Unit pairs per warp's ring. Compiled into the kernel.
    pub(crate) stages: usize,
}

/// `batch.cu`: batched-decode GEMM.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct BatchTuning {
    /// Shared memory for the stages of a block, doubled in the kernels that occupy a whole SM. Compiled into
    /// the kernel.
    pub(crate) shared_bytes: usize,
    /// The same for 16-bit weights, which no GPU of less shared memory multiplies there.
    pub(crate) plain_shared_bytes: usize,
    /// Blocks per SM that take one tile of 16-bit weights after another. A single one leaves space for the next
    /// launch to prefetch, but with one producer warp it read half as fast.
    pub(crate) plain_blocks: usize,
}

/// `grouped.cu`: expert layers on tensor cores.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct GroupedTuning {
    /// Minimum number of rows of a step; fewer take the kernels of `experts.cu`. Must be at least
    /// [`crate::MIN_SORTED_ROWS`]. This is the one parameter that affects results: the tensor cores multiply
    /// activations of 16 bits, the others of 8 bits or F32.
    pub(crate) min_rows: usize,
}

/// Compute capability 9.0. `docs/performance.md` lists the alternatives that were tried.
const SM_90: Tuning = Tuning {
    measured_on: Some("H200"),
    peak_over_bandwidth: 1.1,
    product: ProductTuning {
        plain: ChunkTuning { units: 1, warps: 8, ring_bytes: 96 << 10 },
        q8_0: ChunkTuning { units: 2, warps: 8, ring_bytes: 96 << 10 },
        cols_128: ChunkTuning { units: 2, warps: 16, ring_bytes: 80 << 10 },
        cols_256: ChunkTuning { units: 1, warps: 16, ring_bytes: 80 << 10 },
        pace: 4,
        gated_pace: 5,
        late_cycles: 2000,
        late_cycles_max: 100_000,
        late_bytes_max: 1 << 20,
        small_bytes: 4 << 20,
    },
    attend: AttendTuning { ring_bytes: 12 << 10, small_ring_bytes: 8 << 10, large_shared_bytes: 200 << 10 },
    few: FewTuning { warps: 8, stages: 3 },
    batch: BatchTuning { shared_bytes: 110 << 10, plain_shared_bytes: 113 << 10, plain_blocks: 2 },
    grouped: GroupedTuning { min_rows: 16 },
};

/// All other GPUs: the parameters of 9.0, limited to their shared memory. Speed was not measured.
const UNMEASURED: Tuning =
    Tuning { measured_on: None, batch: BatchTuning { shared_bytes: 96 << 10, ..SM_90.batch }, ..SM_90 };

impl Tuning {
    /// Parameters for a compute capability.
    pub(crate) fn of(arch: GpuArch) -> &'static Tuning {
        match (arch.major, arch.minor) {
            (9, 0) => &SM_90,
            _ => &UNMEASURED,
        }
    }

    /// All tables.
    pub(crate) const ALL: [&'static Tuning; 2] = [&SM_90, &UNMEASURED];

    /// `tuning.cuh`: the parameters that kernels are compiled with.
    pub(crate) fn header(&self) -> String {
        let ProductTuning { plain, q8_0, cols_128, cols_256, .. } = self.product;
        let mut text = "// Written from src/tuning.rs.\n#pragma once\n".to_owned();
        let mut define = |name: &str, value: usize| {
            // Writing to a string cannot fail.
            let _ = writeln!(text, "#define {name} {value}");
        };
        define("PRODUCT_PLAIN_WARPS", plain.warps);
        for (name, chunk) in [("Q8_0", q8_0), ("128", cols_128), ("256", cols_256)] {
            define(&format!("PRODUCT_{name}_UNITS"), chunk.units);
            define(&format!("PRODUCT_{name}_WARPS"), chunk.warps);
        }
        define("ATTEND_RING_BYTES", self.attend.ring_bytes);
        define("ATTEND_SMALL_RING_BYTES", self.attend.small_ring_bytes);
        define("FEW_WARPS", self.few.warps);
        define("FEW_STAGES", self.few.stages);
        define("BATCH_SHARED_BYTES", self.batch.shared_bytes);
        define("BATCH_PLAIN_SHARED_BYTES", self.batch.plain_shared_bytes);
        text
    }
}

/// Names and texts of the generated headers that kernels for an architecture are compiled with, in addition to
/// those in `cu/`.
#[must_use]
pub fn generated_headers(arch: GpuArch) -> [(&'static str, String); 2] {
    [("tuning.cuh", Tuning::of(arch).header()), ("grids.cuh", grids().to_owned())]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unmeasured_gpu_uses_the_measured_parameters_and_reports_it() {
        let h200 = Tuning::of(GpuArch { major: 9, minor: 0 });
        assert_eq!(h200.measured_on, Some("H200"));
        for (major, minor) in [(8, 0), (8, 6), (8, 9), (10, 0), (12, 0)] {
            let other = Tuning::of(GpuArch { major, minor });
            assert_eq!(*other, Tuning { measured_on: None, batch: other.batch, ..*h200 });
            assert!(other.batch.shared_bytes < h200.batch.shared_bytes);
        }
        assert!(Tuning::ALL.contains(&h200));
    }

    #[test]
    fn kernels_are_compiled_with_the_parameters_that_launchers_use() {
        let [(name, text), (grids, points)] = generated_headers(GpuArch { major: 9, minor: 0 });
        assert_eq!([name, grids], ["tuning.cuh", "grids.cuh"]);
        assert!(points.contains("IQ2_XXS_GRID[256]") && points.contains("IQ3_S_GRID[512]"), "{points}");
        for line in
            ["PRODUCT_Q8_0_UNITS 2", "PRODUCT_256_WARPS 16", "ATTEND_RING_BYTES 12288", "FEW_STAGES 3"]
        {
            assert!(text.contains(&format!("#define {line}\n")), "{line} in {text}");
        }
    }
}
