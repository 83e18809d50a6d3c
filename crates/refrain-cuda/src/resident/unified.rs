//! GPUs that share the host's memory: weights on the device must not stay mapped on the host as well.

use std::ops::Range;

use refrain_tensor::HostTensor;

use super::{HostModel, WeightPlacement};

/// Bytes uploaded before the host's copies are evicted: the amount by which the two copies may exceed the
/// model.
const GROUP_BYTES: u64 = 256 << 20;

/// Groups of weights to upload one after another; a single group on a GPU with its own memory.
pub(super) fn groups(places: &[Option<WeightPlacement>], unified: bool) -> Vec<Range<usize>> {
    let mut groups = Vec::new();
    let (mut start, mut bytes) = (0, 0);
    for (idx, place) in places.iter().enumerate() {
        bytes += place.map_or(0, |place| place.bytes);
        if unified && bytes >= GROUP_BYTES {
            groups.push(start..idx + 1);
            (start, bytes) = (idx + 1, 0);
        }
    }
    if start < places.len() {
        groups.push(start..places.len());
    }
    groups
}

/// Evicts the host's copies of weights that are on the device.
pub(super) fn evict<'a>(tensors: impl Iterator<Item = (&'a HostTensor, &'a Option<WeightPlacement>)>) {
    tensors.filter(|(_, place)| place.is_some()).for_each(|(tensor, _)| tensor.bytes().evict());
}

/// Bytes of weights that stay on the host as well as on the device, because no file backs them.
pub(super) fn kept_bytes(model: &HostModel, places: &[Option<WeightPlacement>]) -> u64 {
    let both = model.tensors.iter().zip(places).filter(|(_, place)| place.is_some());
    both.filter(|(tensor, _)| !tensor.bytes().can_evict())
        .map(|(t, _)| t.bytes().as_slice().len() as u64)
        .sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use refrain_tensor::{DType, Shape};

    #[test]
    fn groups_cover_each_weight_once_and_are_bounded_with_unified_memory() {
        let place = |mib: u64| {
            let (dtype, shape) = (DType::F32, Shape::from([1, 1]));
            Some(WeightPlacement { offset: 0, bytes: mib << 20, dtype, packed: false, pinned: false, shape })
        };
        let places = [place(100), None, place(200), place(10), place(300), None, place(1)];
        let of = |places: &[_], unified| -> Vec<(usize, usize)> {
            groups(places, unified).into_iter().map(|group| (group.start, group.end)).collect()
        };
        assert_eq!(of(&places, false), [(0, 7)]);
        assert_eq!(of(&places, true), [(0, 3), (3, 5), (5, 7)]);
        assert_eq!(of(&places[..3], true), [(0, 3)]);
        assert_eq!(of(&[], true), []);
    }
}
