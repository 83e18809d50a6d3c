//! The CUDA sources, held in the binary.

/// A file of kernels that are compiled together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Family {
    /// `linear.cu`
    Linear,
    /// `gather.cu`
    Gather,
    /// `norm.cu`
    Norm,
    /// `elementwise.cu`
    Elementwise,
    /// `copy.cu`
    Copy,
    /// `rope.cu`
    Rope,
    /// `kv.cu`
    Kv,
    /// `attention.cu`
    Attention,
    /// `attend.cu`
    Attend,
    /// `rows.cu`
    Rows,
    /// `sample.cu`
    Sample,
    /// `commit.cu`
    Commit,
    /// `product.cu`
    Product,
    /// `few.cu`
    Few,
    /// `pack.cu`
    Pack,
    /// `gemm.cu`
    Gemm,
    /// `dequant.cu`
    Dequant,
    /// `narrow.cu`
    Narrow,
    /// `flash.cu`
    Flash,
    /// `digest.cu`
    Digest,
}

impl Family {
    /// Every family.
    pub const ALL: [Family; 20] = [
        Family::Linear,
        Family::Gather,
        Family::Norm,
        Family::Elementwise,
        Family::Copy,
        Family::Rope,
        Family::Kv,
        Family::Attention,
        Family::Attend,
        Family::Rows,
        Family::Sample,
        Family::Commit,
        Family::Product,
        Family::Few,
        Family::Pack,
        Family::Gemm,
        Family::Dequant,
        Family::Narrow,
        Family::Flash,
        Family::Digest,
    ];

    /// The file's name without `.cu`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Family::Linear => "linear",
            Family::Gather => "gather",
            Family::Norm => "norm",
            Family::Elementwise => "elementwise",
            Family::Copy => "copy",
            Family::Rope => "rope",
            Family::Kv => "kv",
            Family::Attention => "attention",
            Family::Attend => "attend",
            Family::Rows => "rows",
            Family::Sample => "sample",
            Family::Commit => "commit",
            Family::Product => "product",
            Family::Few => "few",
            Family::Pack => "pack",
            Family::Gemm => "gemm",
            Family::Dequant => "dequant",
            Family::Narrow => "narrow",
            Family::Flash => "flash",
            Family::Digest => "digest",
        }
    }

    /// The file's text.
    #[must_use]
    pub const fn source(self) -> &'static str {
        match self {
            Family::Linear => include_str!("../cu/linear.cu"),
            Family::Gather => include_str!("../cu/gather.cu"),
            Family::Norm => include_str!("../cu/norm.cu"),
            Family::Elementwise => include_str!("../cu/elementwise.cu"),
            Family::Copy => include_str!("../cu/copy.cu"),
            Family::Rope => include_str!("../cu/rope.cu"),
            Family::Kv => include_str!("../cu/kv.cu"),
            Family::Attention => include_str!("../cu/attention.cu"),
            Family::Attend => include_str!("../cu/attend.cu"),
            Family::Rows => include_str!("../cu/rows.cu"),
            Family::Sample => include_str!("../cu/sample.cu"),
            Family::Commit => include_str!("../cu/commit.cu"),
            Family::Product => include_str!("../cu/product.cu"),
            Family::Few => include_str!("../cu/few.cu"),
            Family::Pack => include_str!("../cu/pack.cu"),
            Family::Gemm => include_str!("../cu/gemm.cu"),
            Family::Dequant => include_str!("../cu/dequant.cu"),
            Family::Narrow => include_str!("../cu/narrow.cu"),
            Family::Flash => include_str!("../cu/flash.cu"),
            Family::Digest => include_str!("../cu/digest.cu"),
        }
    }
}

/// What the families include, by name: no header of a toolkit is needed.
pub(crate) const HEADERS: [(&str, &str); 21] = [
    ("attend_lanes.cuh", include_str!("../cu/attend_lanes.cuh")),
    ("attend_seen.cuh", include_str!("../cu/attend_seen.cuh")),
    ("attend_tiles.cuh", include_str!("../cu/attend_tiles.cuh")),
    ("dtype.cuh", include_str!("../cu/dtype.cuh")),
    ("last.cuh", include_str!("../cu/last.cuh")),
    ("mma.cuh", include_str!("../cu/mma.cuh")),
    ("overlap.cuh", include_str!("../cu/overlap.cuh")),
    ("packed.cuh", include_str!("../cu/packed.cuh")),
    ("paged.cuh", include_str!("../cu/paged.cuh")),
    ("quant.cuh", include_str!("../cu/quant.cuh")),
    ("reduce.cuh", include_str!("../cu/reduce.cuh")),
    ("sample_bins.cuh", include_str!("../cu/sample_bins.cuh")),
    ("sample_choose.cuh", include_str!("../cu/sample_choose.cuh")),
    ("sample_find.cuh", include_str!("../cu/sample_find.cuh")),
    ("sample_keys.cuh", include_str!("../cu/sample_keys.cuh")),
    ("sample_large.cuh", include_str!("../cu/sample_large.cuh")),
    ("sample_list.cuh", include_str!("../cu/sample_list.cuh")),
    ("sample_long.cuh", include_str!("../cu/sample_long.cuh")),
    ("sample_small.cuh", include_str!("../cu/sample_small.cuh")),
    ("turn.cuh", include_str!("../cu/turn.cuh")),
    ("view.cuh", include_str!("../cu/view.cuh")),
];
