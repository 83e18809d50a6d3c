//! Cards that share the host's memory: what is on the device must not stay mapped as well.

use std::ops::Range;

use refrain_tensor::HostTensor;

use super::{HostModel, Placed};

/// Weights that are sent before the host's copies of them are given up: what the two take together beyond the model.
const GROUP_BYTES: u64 = 256 << 20;

/// The weights in groups that are sent one after the other: on a card with memory of its own, one group of all.
pub(super) fn groups(places: &[Option<Placed>], unified: bool) -> Vec<Range<usize>> {
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

/// Gives up the host's copies of weights that are on the device.
pub(super) fn evict<'a>(tensors: impl Iterator<Item = (&'a HostTensor, &'a Option<Placed>)>) {
    tensors.filter(|(_, place)| place.is_some()).for_each(|(tensor, _)| tensor.bytes().evict());
}

/// Bytes of weights that the host holds besides the device, since they have no file to come back from.
pub(super) fn kept_bytes(model: &HostModel, places: &[Option<Placed>]) -> u64 {
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
    fn groups_cover_every_weight_once_and_are_bounded_where_memory_is_shared() {
        let place = |mib: u64| {
            let (dtype, shape) = (DType::F32, Shape::from([1, 1]));
            Some(Placed { offset: 0, bytes: mib << 20, dtype, packed: false, pinned: false, shape })
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
