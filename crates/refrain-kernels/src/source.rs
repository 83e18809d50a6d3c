//! The embedded CUDA sources and their compilation units.

use std::fmt;
use std::sync::OnceLock;

use refrain_tensor::quant::grid;

/// A file of kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum KernelFamily {
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
    /// `batch.cu`
    Batch,
    /// `batch_plain.cu`
    BatchPlain,
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
    /// `map.cu`
    Map,
    /// `train_rows.cu`
    TrainRows,
    /// `moves.cu`
    Moves,
    /// `experts.cu`
    Experts,
    /// `grouped.cu`
    Grouped,
    /// `scatter.cu`
    Scatter,
    /// `loss.cu`
    Loss,
    /// `adamw.cu`
    AdamW,
    /// `matmul.cu`
    MatMul,
    /// `span.cu`
    Span,
    /// `span_grad.cu`
    SpanGrad,
    /// `recurrent.cu`
    Recurrent,
    /// `lora.cu`
    Lora,
}

impl KernelFamily {
    /// Every family.
    pub const ALL: [KernelFamily; 35] = [
        KernelFamily::Linear,
        KernelFamily::Gather,
        KernelFamily::Norm,
        KernelFamily::Elementwise,
        KernelFamily::Copy,
        KernelFamily::Rope,
        KernelFamily::Kv,
        KernelFamily::Attention,
        KernelFamily::Attend,
        KernelFamily::Rows,
        KernelFamily::Sample,
        KernelFamily::Commit,
        KernelFamily::Product,
        KernelFamily::Few,
        KernelFamily::Batch,
        KernelFamily::BatchPlain,
        KernelFamily::Pack,
        KernelFamily::Gemm,
        KernelFamily::Dequant,
        KernelFamily::Narrow,
        KernelFamily::Flash,
        KernelFamily::Digest,
        KernelFamily::Map,
        KernelFamily::TrainRows,
        KernelFamily::Moves,
        KernelFamily::Experts,
        KernelFamily::Grouped,
        KernelFamily::Scatter,
        KernelFamily::Loss,
        KernelFamily::AdamW,
        KernelFamily::MatMul,
        KernelFamily::Span,
        KernelFamily::SpanGrad,
        KernelFamily::Recurrent,
        KernelFamily::Lora,
    ];

    /// File name without `.cu`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            KernelFamily::Linear => "linear",
            KernelFamily::Gather => "gather",
            KernelFamily::Norm => "norm",
            KernelFamily::Elementwise => "elementwise",
            KernelFamily::Copy => "copy",
            KernelFamily::Rope => "rope",
            KernelFamily::Kv => "kv",
            KernelFamily::Attention => "attention",
            KernelFamily::Attend => "attend",
            KernelFamily::Rows => "rows",
            KernelFamily::Sample => "sample",
            KernelFamily::Commit => "commit",
            KernelFamily::Product => "product",
            KernelFamily::Few => "few",
            KernelFamily::Batch => "batch",
            KernelFamily::BatchPlain => "batch_plain",
            KernelFamily::Pack => "pack",
            KernelFamily::Gemm => "gemm",
            KernelFamily::Dequant => "dequant",
            KernelFamily::Narrow => "narrow",
            KernelFamily::Flash => "flash",
            KernelFamily::Digest => "digest",
            KernelFamily::Map => "map",
            KernelFamily::TrainRows => "train_rows",
            KernelFamily::Moves => "moves",
            KernelFamily::Experts => "experts",
            KernelFamily::Grouped => "grouped",
            KernelFamily::Scatter => "scatter",
            KernelFamily::Loss => "loss",
            KernelFamily::AdamW => "adamw",
            KernelFamily::MatMul => "matmul",
            KernelFamily::Span => "span",
            KernelFamily::SpanGrad => "span_grad",
            KernelFamily::Recurrent => "recurrent",
            KernelFamily::Lora => "lora",
        }
    }

    /// Contents of the file.
    #[must_use]
    pub const fn source(self) -> &'static str {
        match self {
            KernelFamily::Linear => include_str!("../cu/linear.cu"),
            KernelFamily::Gather => include_str!("../cu/gather.cu"),
            KernelFamily::Norm => include_str!("../cu/norm.cu"),
            KernelFamily::Elementwise => include_str!("../cu/elementwise.cu"),
            KernelFamily::Copy => include_str!("../cu/copy.cu"),
            KernelFamily::Rope => include_str!("../cu/rope.cu"),
            KernelFamily::Kv => include_str!("../cu/kv.cu"),
            KernelFamily::Attention => include_str!("../cu/attention.cu"),
            KernelFamily::Attend => include_str!("../cu/attend.cu"),
            KernelFamily::Rows => include_str!("../cu/rows.cu"),
            KernelFamily::Sample => include_str!("../cu/sample.cu"),
            KernelFamily::Commit => include_str!("../cu/commit.cu"),
            KernelFamily::Product => include_str!("../cu/product.cu"),
            KernelFamily::Few => include_str!("../cu/few.cu"),
            KernelFamily::Batch => include_str!("../cu/batch.cu"),
            KernelFamily::BatchPlain => include_str!("../cu/batch_plain.cu"),
            KernelFamily::Pack => include_str!("../cu/pack.cu"),
            KernelFamily::Gemm => include_str!("../cu/gemm.cu"),
            KernelFamily::Dequant => include_str!("../cu/dequant.cu"),
            KernelFamily::Narrow => include_str!("../cu/narrow.cu"),
            KernelFamily::Flash => include_str!("../cu/flash.cu"),
            KernelFamily::Digest => include_str!("../cu/digest.cu"),
            KernelFamily::Map => include_str!("../cu/map.cu"),
            KernelFamily::TrainRows => include_str!("../cu/train_rows.cu"),
            KernelFamily::Moves => include_str!("../cu/moves.cu"),
            KernelFamily::Experts => include_str!("../cu/experts.cu"),
            KernelFamily::Grouped => include_str!("../cu/grouped.cu"),
            KernelFamily::Scatter => include_str!("../cu/scatter.cu"),
            KernelFamily::Loss => include_str!("../cu/loss.cu"),
            KernelFamily::AdamW => include_str!("../cu/adamw.cu"),
            KernelFamily::MatMul => include_str!("../cu/matmul.cu"),
            KernelFamily::Span => include_str!("../cu/span.cu"),
            KernelFamily::SpanGrad => include_str!("../cu/span_grad.cu"),
            KernelFamily::Recurrent => include_str!("../cu/recurrent.cu"),
            KernelFamily::Lora => include_str!("../cu/lora.cu"),
        }
    }
}

/// Kernels of one file that are compiled together.
///
/// A line `// unit NAME` begins a unit, which ends at the next such line. Everything above the first such
/// line belongs to every unit. A file without such lines is one unit. So a file as a whole is plain CUDA, and
/// a unit is the file with some lines left out.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct KernelUnit {
    family: KernelFamily,
    /// Unit name; empty for a whole file.
    name: &'static str,
}

impl KernelUnit {
    /// All units, ordered by file.
    #[must_use]
    pub fn all() -> &'static [KernelUnit] {
        static ALL: OnceLock<Vec<KernelUnit>> = OnceLock::new();
        ALL.get_or_init(|| KernelFamily::ALL.into_iter().flat_map(KernelUnit::of_file).collect())
    }

    fn of_file(family: KernelFamily) -> Vec<KernelUnit> {
        let names: Vec<&str> = family.source().lines().filter_map(named_by).collect();
        let names = if names.is_empty() { vec![""] } else { names };
        names.into_iter().map(|name| KernelUnit { family, name }).collect()
    }

    /// The unit of a single-unit file.
    pub(crate) const fn whole(family: KernelFamily) -> KernelUnit {
        KernelUnit { family, name: "" }
    }

    /// The unit of this name, which must occur in the file.
    pub(crate) fn named(family: KernelFamily, name: &str) -> KernelUnit {
        let found = KernelUnit::all().iter().find(|unit| unit.family == family && unit.name == name);
        *found.unwrap_or_else(|| panic!("{}.cu has no unit {name:?}", family.name()))
    }

    /// The file that the unit belongs to.
    #[must_use]
    pub fn family(self) -> KernelFamily {
        self.family
    }

    /// The file's text with other units blanked out. Line numbers are preserved.
    pub(crate) fn source(self) -> String {
        let mut is_mine = true;
        let mut text = String::with_capacity(self.family.source().len());
        for line in self.family.source().lines() {
            is_mine = named_by(line).map_or(is_mine, |name| name == self.name);
            text += if is_mine { line } else { "" };
            text.push('\n');
        }
        text
    }
}

/// Name of the unit that a line begins.
fn named_by(line: &str) -> Option<&str> {
    line.strip_prefix("// unit ")
}

impl fmt::Display for KernelUnit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name {
            "" => write!(f, "{}.cu", self.family.name()),
            name => write!(f, "{}.cu ({name})", self.family.name()),
        }
    }
}

impl fmt::Debug for KernelUnit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Headers that the files include, by name; no toolkit header is needed.
pub(crate) const HEADERS: [(&str, &str); 31] = [
    ("attend_lanes.cuh", include_str!("../cu/attend_lanes.cuh")),
    ("attend_seen.cuh", include_str!("../cu/attend_seen.cuh")),
    ("attend_tiles.cuh", include_str!("../cu/attend_tiles.cuh")),
    ("batch.cuh", include_str!("../cu/batch.cuh")),
    ("batch_direct.cuh", include_str!("../cu/batch_direct.cuh")),
    ("cluster.cuh", include_str!("../cu/cluster.cuh")),
    ("dtype.cuh", include_str!("../cu/dtype.cuh")),
    ("eight.cuh", include_str!("../cu/eight.cuh")),
    ("functions.cuh", include_str!("../cu/functions.cuh")),
    ("joined.cuh", include_str!("../cu/joined.cuh")),
    ("last.cuh", include_str!("../cu/last.cuh")),
    ("mma.cuh", include_str!("../cu/mma.cuh")),
    ("overlap.cuh", include_str!("../cu/overlap.cuh")),
    ("packed.cuh", include_str!("../cu/packed.cuh")),
    ("paged.cuh", include_str!("../cu/paged.cuh")),
    ("plain.cuh", include_str!("../cu/plain.cuh")),
    ("planes.cuh", include_str!("../cu/planes.cuh")),
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
    ("span.cuh", include_str!("../cu/span.cuh")),
    ("turn.cuh", include_str!("../cu/turn.cuh")),
    ("view.cuh", include_str!("../cu/view.cuh")),
    ("wgmma.cuh", include_str!("../cu/wgmma.cuh")),
];

/// `grids.cuh`: the grids of the IQ2 and IQ3 types, from refrain-tensor.
pub(crate) fn grids() -> &'static str {
    static TEXT: OnceLock<String> = OnceLock::new();
    TEXT.get_or_init(|| {
        let tables: [(&str, &[u16]); 5] = [
            ("IQ2_XXS_GRID", &grid::IQ2_XXS_GRID),
            ("IQ2_XS_GRID", &grid::IQ2_XS_GRID),
            ("IQ2_S_GRID", &grid::IQ2_S_GRID),
            ("IQ3_XXS_GRID", &grid::IQ3_XXS_GRID),
            ("IQ3_S_GRID", &grid::IQ3_S_GRID),
        ];
        let table = |(name, points): (&str, &[u16])| {
            let points: Vec<String> = points.iter().map(u16::to_string).collect();
            format!("static __device__ const u16 {name}[{}] = {{{}}};\n", points.len(), points.join(","))
        };
        let tables: String = tables.into_iter().map(table).collect();
        format!("// grids.cuh: points of the IQ2 and IQ3 types (refrain-tensor)\n#pragma once\n#include \"dtype.cuh\"\n{tables}")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_units_of_a_file_contain_each_line_once_after_the_shared_lines() {
        for family in KernelFamily::ALL {
            let whole: Vec<&str> = family.source().lines().collect();
            let shared = whole.iter().position(|line| named_by(line).is_some()).unwrap_or(whole.len());
            let units = KernelUnit::of_file(family);
            let sources: Vec<String> = units.iter().map(|unit| unit.source()).collect();
            for (at, line) in whole.iter().enumerate() {
                let having = sources.iter().filter(|s| s.lines().nth(at) == Some(line)).count();
                let expected = if at < shared || line.is_empty() { units.len() } else { 1 };
                assert_eq!(having, expected, "{}.cu:{}", family.name(), at + 1);
            }
        }
    }

    #[test]
    fn a_name_identifies_one_unit() {
        let mut units = KernelUnit::all().to_vec();
        units.sort();
        units.dedup();
        assert_eq!(units.len(), KernelUnit::all().len());
        assert_eq!(KernelUnit::named(KernelFamily::Product, "q4_k").to_string(), "product.cu (q4_k)");
        assert_eq!(KernelUnit::whole(KernelFamily::Digest).to_string(), "digest.cu");
    }
}
