//! Dependencies between launches, derived from the bytes they read and write.
//!
//! Ranges are device addresses, so handles that overlap are recognised as such. For every byte range the table
//! holds the last writer and everyone who has read the range since. A new piece of work waits for the writer of
//! what it reads (read after write), for the readers of what it writes (write after read) and for its previous
//! writer (write after write). A dependency that another one already implies is omitted.

use std::collections::BTreeMap;

/// A byte range that is read or written. Work that does both has two touches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Touch {
    pub(crate) start: u64,
    pub(crate) end: u64,
    pub(crate) write: bool,
}

/// The last writer of a range and the readers since. Keyed by the range's start.
#[derive(Clone, Debug)]
struct HazardSpan {
    end: u64,
    writer: Option<usize>,
    readers: Vec<usize>,
}

/// The hazard table. Work is numbered in the order in which it is added.
#[derive(Debug, Default)]
pub(crate) struct Hazards {
    spans: BTreeMap<u64, HazardSpan>,
    /// For each piece of work, everything it waits for, directly or indirectly, as a bit set.
    ancestors: Vec<Vec<u64>>,
}

impl Hazards {
    /// Adds the next piece of work and returns the work it must wait for, in ascending order.
    pub(crate) fn add(&mut self, touches: &[Touch]) -> Vec<usize> {
        let work = self.ancestors.len();
        let mut deps = Vec::new();
        for touch in touches.iter().filter(|t| t.start < t.end) {
            self.cut(touch.start);
            self.cut(touch.end);
            for (_, span) in self.spans.range(touch.start..touch.end) {
                deps.extend(span.writer);
                if touch.write {
                    deps.extend(&span.readers);
                }
            }
        }
        deps.retain(|&d| d != work);
        deps.sort_unstable();
        deps.dedup();
        // Reads first, so that work that reads and writes a range ends up as its writer.
        for touch in touches.iter().filter(|t| t.start < t.end && !t.write) {
            self.note_read(work, *touch);
        }
        for touch in touches.iter().filter(|t| t.start < t.end && t.write) {
            self.note_write(work, *touch);
        }
        self.reduce(deps)
    }

    /// Splits the span that contains `at`.
    fn cut(&mut self, at: u64) {
        let Some((&start, span)) = self.spans.range_mut(..at).next_back() else { return };
        if span.end > at && start < at {
            let right = span.clone();
            span.end = at;
            self.spans.insert(at, right);
        }
    }

    fn note_read(&mut self, work: usize, touch: Touch) {
        // Cut again: an earlier touch of the same work may have added a span across these ends.
        self.cut(touch.start);
        self.cut(touch.end);
        let mut at = touch.start;
        let mut gaps = Vec::new();
        for (&start, span) in self.spans.range_mut(touch.start..touch.end) {
            if start > at {
                gaps.push((at, start));
            }
            if span.readers.last() != Some(&work) {
                span.readers.push(work);
            }
            at = span.end;
        }
        if at < touch.end {
            gaps.push((at, touch.end));
        }
        for (start, end) in gaps {
            self.spans.insert(start, HazardSpan { end, writer: None, readers: vec![work] });
        }
    }

    fn note_write(&mut self, work: usize, touch: Touch) {
        self.cut(touch.start);
        self.cut(touch.end);
        let covered: Vec<u64> = self.spans.range(touch.start..touch.end).map(|(&start, _)| start).collect();
        for start in covered {
            self.spans.remove(&start);
        }
        let span = HazardSpan { end: touch.end, writer: Some(work), readers: Vec::new() };
        self.spans.insert(touch.start, span);
    }

    /// Drops implied dependencies and stores the transitive closure.
    fn reduce(&mut self, deps: Vec<usize>) -> Vec<usize> {
        let words = self.ancestors.len().div_ceil(64);
        let mut closure = vec![0_u64; words];
        let mut kept = Vec::new();
        // Newest first, so that an older dependency is found among the ancestors of a newer one.
        for &dep in deps.iter().rev() {
            if closure[dep / 64] >> (dep % 64) & 1 == 1 {
                continue;
            }
            kept.push(dep);
            closure[dep / 64] |= 1 << (dep % 64);
            for (word, theirs) in closure.iter_mut().zip(&self.ancestors[dep]) {
                *word |= theirs;
            }
        }
        self.ancestors.push(closure);
        kept.reverse();
        kept
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(start: u64, end: u64) -> Touch {
        Touch { start, end, write: false }
    }

    fn write(start: u64, end: u64) -> Touch {
        Touch { start, end, write: true }
    }

    #[test]
    fn a_reader_waits_for_the_writer_and_a_writer_for_the_readers() {
        let mut h = Hazards::default();
        assert_eq!(h.add(&[write(0, 8)]), []);
        assert_eq!(h.add(&[read(0, 4), write(100, 104)]), [0]);
        assert_eq!(h.add(&[read(4, 8), write(200, 204)]), [0], "readers do not wait for each other");
        assert_eq!(
            h.add(&[write(0, 8)]),
            [1, 2],
            "write after read; the first write is implied by the reads"
        );
        assert_eq!(h.add(&[write(2, 3)]), [3], "write after write");
    }

    #[test]
    fn disjoint_work_does_not_wait() {
        let mut h = Hazards::default();
        h.add(&[write(0, 8)]);
        assert_eq!(h.add(&[write(8, 16)]), []);
        assert_eq!(h.add(&[read(7, 9)]), [0, 1], "a range that spans both waits for both");
    }

    #[test]
    fn a_later_writer_waits_for_readers_of_unwritten_bytes() {
        let mut h = Hazards::default();
        h.add(&[read(0, 100)]);
        h.add(&[read(50, 150)]);
        assert_eq!(h.add(&[write(60, 70)]), [0, 1]);
        assert_eq!(h.add(&[write(120, 130)]), [1]);
        assert_eq!(h.add(&[write(0, 10)]), [0]);
    }

    #[test]
    fn work_that_reads_and_writes_its_own_bytes_does_not_wait_for_itself() {
        let mut h = Hazards::default();
        assert_eq!(h.add(&[read(0, 8), write(0, 8)]), []);
        assert_eq!(h.add(&[read(0, 8), write(0, 8)]), [0]);
    }

    /// Checks against a quadratic reference that the kept dependencies order every conflicting pair.
    #[test]
    fn every_conflicting_pair_is_ordered_in_random_programs() {
        let mut seed = 0x9E37_79B9_7F4A_7C15_u64;
        let mut next = move |n: u64| {
            seed ^= seed << 13;
            seed ^= seed >> 7;
            seed ^= seed << 17;
            seed % n
        };
        for _ in 0..200 {
            let mut h = Hazards::default();
            let mut all: Vec<Vec<Touch>> = Vec::new();
            let mut before: Vec<Vec<bool>> = Vec::new();
            for work in 0..40 {
                let touches: Vec<Touch> = (0..1 + next(3))
                    .map(|_| {
                        let start = next(64);
                        Touch { start, end: start + 1 + next(16), write: next(2) == 0 }
                    })
                    .collect();
                let deps = h.add(&touches);
                let mut mine = vec![false; work];
                for d in deps {
                    mine[d] = true;
                    (0..d).for_each(|a| mine[a] |= before[d][a]);
                }
                for (earlier, theirs) in all.iter().enumerate() {
                    let conflict = theirs.iter().any(|a| {
                        touches.iter().any(|b| (a.write || b.write) && a.start < b.end && b.start < a.end)
                    });
                    assert!(!conflict || mine[earlier], "work {work} is not ordered after {earlier}");
                }
                all.push(touches);
                before.push(mine);
            }
        }
    }
}
