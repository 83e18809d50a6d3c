//! Placement of buffers with disjoint lifetimes in one arena.

use std::cmp::Reverse;

/// Size and lifetime of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Size in bytes.
    pub bytes: usize,
    /// The first step that touches it.
    pub first: usize,
    /// The last step that touches it.
    pub last: usize,
}

impl Span {
    fn meets(&self, other: &Span) -> bool {
        self.first <= other.last && other.first <= self.last
    }
}

/// Offsets of all buffers in the arena.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Arena {
    /// Offset of each buffer, in the order of the spans.
    pub offsets: Vec<usize>,
    /// Total size.
    pub bytes: usize,
}

impl Arena {
    /// Places each buffer at the lowest offset that is free during its lifetime. Tries three orders (largest
    /// first, longest-lived first, as given) and keeps the smallest arena.
    ///
    /// Offsets are multiples of `align`.
    pub fn place(spans: &[Span], align: usize) -> Arena {
        assert!(align.is_power_of_two(), "alignment {align} is not a power of two");
        let by = |key: &dyn Fn(&Span) -> [usize; 2]| {
            let mut order: Vec<usize> = (0..spans.len()).collect();
            order.sort_by_key(|&i| (Reverse(key(&spans[i])), spans[i].first, i));
            Arena::in_order(spans, align, &order)
        };
        let by_size = by(&|span| [span.bytes, 0]);
        let others = [by(&|span| [span.last - span.first, span.bytes]), by(&|_| [0, 0])];
        others.into_iter().fold(by_size, |best, other| if other.bytes < best.bytes { other } else { best })
    }

    fn in_order(spans: &[Span], align: usize, order: &[usize]) -> Arena {
        let mut offsets = vec![0; spans.len()];
        let mut placed: Vec<usize> = Vec::with_capacity(spans.len()); // by offset
        let mut total = 0;
        for &i in order {
            let size = spans[i].bytes.next_multiple_of(align);
            let mut at = 0;
            for &p in &placed {
                if size == 0 || !spans[p].meets(&spans[i]) {
                    continue;
                }
                if offsets[p] >= at + size {
                    break;
                }
                at = at.max(offsets[p] + spans[p].bytes.next_multiple_of(align));
            }
            offsets[i] = at;
            total = total.max(at + size);
            let pos = placed.partition_point(|&p| offsets[p] <= at);
            placed.insert(pos, i);
        }
        Arena { offsets, bytes: total }
    }
}
