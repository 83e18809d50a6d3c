//! Numbers that fit kernels to a card. They change how long a launch takes, not what it computes.
//!
//! There is one table for each compute capability that was measured, and one for all others. Numbers that a kernel is compiled
//! with reach it as `tuning.cuh`, which is written from the table: kernels and launchers have them from one place. What
//! results or the sizes of scratch depend on (tiles, splits) is no tuning and stays beside its kernel.

use std::fmt::Write;

use crate::load::GpuArch;

/// One card's numbers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Tuning {
    /// Where they were measured; `None` for numbers that were measured elsewhere.
    pub(crate) measured_on: Option<&'static str>,
    /// What the peak of memory is divided by to get the bandwidth that all multiprocessors see together.
    pub(crate) peak_over_bandwidth: f64,
    pub(crate) product: ProductTuning,
    pub(crate) attend: AttendTuning,
    pub(crate) few: FewTuning,
    pub(crate) batch: BatchTuning,
}

/// `product.cu`: one row times weights.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct ProductTuning {
    /// F16 and BF16; a chunk is 2 rows of 1,024 columns.
    pub(crate) plain: ChunkTuning,
    /// Q8_0.
    pub(crate) q8_0: ChunkTuning,
    /// The other dtypes whose packed units have 128 columns.
    pub(crate) cols_128: ChunkTuning,
    /// Those whose packed units have 256 columns.
    pub(crate) cols_256: ChunkTuning,
    /// Pacing of the initial prefetch, in cycles per 64 bytes. Issuing it all at once saturates memory for 2 µs and delays
    /// the previous kernel's activations.
    pub(crate) pace: usize,
    /// The same for a gated product. It mostly follows a short one, which lasts as long as that delay: slower still.
    pub(crate) gated_pace: usize,
    /// After a long product half of the initial prefetch is issued when that product has requested about all of its weights:
    /// this many cycles for its start, and [`crate::card::Card::cycles_of`] its activations and the weights that did not fit
    /// its rings. It then arrives in the one or two microseconds between the last weights of one launch and the first of the
    /// next, when memory is idle.
    pub(crate) late_cycles: usize,
    /// The latest that may be, whatever a card reports of its clocks.
    pub(crate) late_cycles_max: usize,
    /// Not after products with more bytes left than this: the time of their end is not known well enough, and matters less.
    pub(crate) late_bytes_max: usize,
    /// Products of fewer bytes take no more of a ring than they fill: they last as long as their start, and other launches
    /// should be able to start beside them.
    pub(crate) small_bytes: usize,
}

/// What a warp fetches at once. Few warps with large chunks read faster, many compute faster.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct ChunkTuning {
    /// Packed units of a chunk; 1 for plain weights. Compiled in.
    pub(crate) units: usize,
    /// Warps of a block. Compiled in.
    pub(crate) warps: usize,
    /// Bytes of the rings of all warps: a block should leave half of a multiprocessor to the next launch's.
    pub(crate) ring_bytes: usize,
}

/// `attend.cu`: attention of decoded tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct AttendTuning {
    /// Bytes of each warp's ring for keys and values of 16 bits. Compiled in.
    pub(crate) ring_bytes: usize,
    /// The same where a block can have less shared memory than `large_shared_bytes`. Compiled in.
    pub(crate) small_ring_bytes: usize,
    /// What a block must be able to have for the larger rings, which leave room for a block of another launch. Compute
    /// capability 8.6, 8.9 and 12.0 have 99 KiB, 8.0 has 163.
    pub(crate) large_shared_bytes: usize,
}

/// `few.cu`: a few rows times packed weights.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct FewTuning {
    /// Warps of a block. Compiled in.
    pub(crate) warps: usize,
    /// Pairs of units in a warp's ring. Compiled in.
    pub(crate) stages: usize,
}

/// `batch.cu`: the rows of many sequences times weights.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct BatchTuning {
    /// Shared memory that the stages of a block may take; twice that in the kernels that have a multiprocessor to
    /// themselves. Compiled in.
    pub(crate) shared_bytes: usize,
}

/// Compute capability 9.0. `docs/performance.md` has what was tried beside these.
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
    batch: BatchTuning { shared_bytes: 110 << 10 },
};

/// Every other card: the numbers of 9.0, cut to the shared memory there is. No speed was measured.
const UNMEASURED: Tuning =
    Tuning { measured_on: None, batch: BatchTuning { shared_bytes: 96 << 10 }, ..SM_90 };

impl Tuning {
    /// The numbers for a compute capability.
    pub(crate) fn of(arch: GpuArch) -> &'static Tuning {
        match (arch.major, arch.minor) {
            (9, 0) => &SM_90,
            _ => &UNMEASURED,
        }
    }

    /// Every table.
    pub(crate) const ALL: [&'static Tuning; 2] = [&SM_90, &UNMEASURED];

    /// `tuning.cuh`: what kernels are compiled with.
    pub(crate) fn header(&self) -> String {
        let ProductTuning { plain, q8_0, cols_128, cols_256, .. } = self.product;
        let mut text = "// Written from src/tuning.rs.\n#pragma once\n".to_owned();
        let mut define = |name: &str, value: usize| {
            // Writing to a string does not fail.
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
        text
    }
}

/// The header that kernels for an architecture are compiled with beside those of `cu/`: its name and its text.
#[must_use]
pub fn tuning_header(arch: GpuArch) -> (&'static str, String) {
    ("tuning.cuh", Tuning::of(arch).header())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_card_that_was_never_measured_has_the_numbers_of_the_one_that_was_and_says_so() {
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
    fn kernels_are_compiled_with_the_numbers_that_launchers_use() {
        let (name, text) = tuning_header(GpuArch { major: 9, minor: 0 });
        assert_eq!(name, "tuning.cuh");
        for line in
            ["PRODUCT_Q8_0_UNITS 2", "PRODUCT_256_WARPS 16", "ATTEND_RING_BYTES 12288", "FEW_STAGES 3"]
        {
            assert!(text.contains(&format!("#define {line}\n")), "{line} in {text}");
        }
    }
}
