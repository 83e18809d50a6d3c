//! Splitting the arena into a call's outputs and read-only remainder.

use std::ops::Range;

/// Maximum number of outputs of a call.
pub(crate) const MAX_OUTS: usize = 4;

/// An arena split at the outputs of a call.
pub(crate) struct Carved<'a> {
    /// Outputs in the requested order; unused entries are empty.
    pub outs: [&'a mut [f32]; MAX_OUTS],
    unwritten: [(usize, &'a [f32]); MAX_OUTS + 1],
}

/// Cuts disjoint ranges out of the arena.
///
/// # Panics
/// If ranges overlap or exceed the arena, which would be a bug in the plan.
pub(crate) fn carve<'a>(arena: &'a mut [f32], outs: &[Range<usize>]) -> Carved<'a> {
    assert!(outs.len() <= MAX_OUTS, "{} outputs", outs.len());
    let mut order = [0, 1, 2, 3];
    let order = &mut order[..outs.len()];
    order.sort_unstable_by_key(|&i| outs[i].start);
    let mut carved = Carved { outs: Default::default(), unwritten: [(0, &[]); MAX_OUTS + 1] };
    let (mut left, mut at) = (arena, 0);
    for (n, &i) in order.iter().enumerate() {
        assert!(outs[i].start >= at, "outputs {outs:?} overlap");
        let (before, from) = std::mem::take(&mut left).split_at_mut(outs[i].start - at);
        let (out, after) = from.split_at_mut(outs[i].len());
        carved.unwritten[n] = (at, before);
        carved.outs[i] = out;
        (left, at) = (after, outs[i].end);
    }
    carved.unwritten[outs.len()] = (at, left);
    carved
}

impl<'a> Carved<'a> {
    /// Returns a range that no output overlaps; `None` otherwise.
    pub(crate) fn read(&self, range: &Range<usize>) -> Option<&'a [f32]> {
        self.unwritten.iter().find_map(|&(start, slice)| {
            let from = range.start.checked_sub(start)?;
            slice.get(from..from + range.len())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outputs_are_in_the_requested_order_and_the_rest_is_readable() {
        let mut arena: Vec<f32> = (0..10).map(|i| i as f32).collect();
        let carved = carve(&mut arena, &[6..8, 1..3]);
        assert_eq!((&*carved.outs[0], &*carved.outs[1]), (&[6.0, 7.0][..], &[1.0, 2.0][..]));
        assert_eq!(carved.read(&(3..6)), Some(&[3.0, 4.0, 5.0][..]));
        assert_eq!(carved.read(&(0..1)), Some(&[0.0][..]));
        assert_eq!(carved.read(&(8..10)), Some(&[8.0, 9.0][..]));
        assert_eq!(carved.read(&(2..4)), None);
        assert_eq!(carved.read(&(6..8)), None);
    }

    #[test]
    #[should_panic(expected = "overlap")]
    fn overlapping_outputs_panic() {
        carve(&mut [0.0; 8], &[0..4, 3..5]);
    }
}
