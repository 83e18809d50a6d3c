//! Places buffers that live at different times into one arena.

/// When a buffer lives and how large it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Size.
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

/// An offset for each buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Arena {
    /// Where each buffer begins, in the order in which they were given.
    pub offsets: Vec<usize>,
    /// Bytes needed for all.
    pub bytes: usize,
}

impl Arena {
    /// Places the largest buffers first, each at the lowest offset where nothing that lives at the same time lies.
    ///
    /// Offsets are multiples of `align`.
    pub fn place(spans: &[Span], align: usize) -> Arena {
        assert!(align.is_power_of_two(), "alignment {align} is not a power of two");
        let mut by_size: Vec<usize> = (0..spans.len()).collect();
        by_size.sort_by_key(|&i| (std::cmp::Reverse(spans[i].bytes), spans[i].first, i));
        let mut offsets = vec![0; spans.len()];
        let mut placed: Vec<usize> = Vec::with_capacity(spans.len()); // by offset
        let mut total = 0;
        for i in by_size {
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
