//! Parts of states, and edits of states between two steps.
//!
//! The first dimension of a state counts the units that can be read, written, copied and cleared separately:
//! blocks of a paged cache, slots of sequences, rows of other states. [`crate::Backend::read_state`],
//! [`crate::Backend::write_state`] and [`crate::Backend::edit_states`] are the only access to them.

use std::ops::Range;

use crate::backend::RunError;
use crate::graph::{State, StateId};

/// A range of a state's slots, or all of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StatePart {
    /// The state.
    pub state: StateId,
    /// Range of slots: indices along the first dimension. `None` for all.
    pub slots: Option<Range<usize>>,
}

impl StatePart {
    /// Returns a range of a state's slots.
    pub fn slots(state: StateId, slots: Range<usize>) -> StatePart {
        StatePart { state, slots: Some(slots) }
    }
}

impl From<StateId> for StatePart {
    fn from(state: StateId) -> StatePart {
        StatePart { state, slots: None }
    }
}

/// A change of a state that takes effect between two steps: after all steps launched or queued so far, and
/// before all later ones.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StateEdit {
    /// Copies slots to others of the same state; the two ranges must not overlap.
    Copy {
        /// The state.
        state: StateId,
        /// Slots to copy.
        from: Range<usize>,
        /// First slot to copy to.
        to: usize,
    },
    /// Fills slots with zeros.
    Clear(StatePart),
}

/// Layout of slots in a state's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotLayout {
    /// Number of slots.
    pub n_slots: usize,
    /// Bytes per slot.
    pub slot_bytes: usize,
}

/// An edit in terms of a state's bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ByteEdit {
    /// Copies one range to another of the same length; they do not overlap.
    Copy {
        /// Source.
        from: Range<usize>,
        /// Destination.
        to: Range<usize>,
    },
    /// Zeroes a range.
    Clear(Range<usize>),
}

impl SlotLayout {
    /// Layout of a state; no slots if its size overflows.
    pub fn of(state: &State) -> SlotLayout {
        let n_slots = state.ty.shape.dims().first().copied().unwrap_or(1);
        let bytes = state.ty.dtype.bytes_for(state.ty.shape.n_elements()).unwrap_or(0);
        SlotLayout { n_slots, slot_bytes: bytes.checked_div(n_slots).unwrap_or(0) }
    }

    /// Size of the whole state.
    pub fn bytes(self) -> usize {
        self.n_slots * self.slot_bytes
    }

    /// Byte range of some slots; an error if they do not exist.
    pub fn range(self, slots: Option<&Range<usize>>) -> Result<Range<usize>, RunError> {
        let slots = slots.cloned().unwrap_or(0..self.n_slots);
        if slots.start > slots.end || slots.end > self.n_slots {
            let because = format!("one has {} slots, but slots {slots:?} were requested", self.n_slots);
            return Err(RunError::Mismatch { what: "states", because });
        }
        Ok(slots.start * self.slot_bytes..slots.end * self.slot_bytes)
    }

    /// Byte range of a part; an error unless the caller's buffer has that length.
    pub fn range_for(self, part: &StatePart, given: usize) -> Result<Range<usize>, RunError> {
        let range = self.range(part.slots.as_ref())?;
        if range.len() != given {
            let what = if part.slots.is_some() { "the part of one" } else { "one" };
            let because = format!("{what} has {} bytes, but {given} were given", range.len());
            return Err(RunError::Mismatch { what: "states", because });
        }
        Ok(range)
    }
}

impl StateEdit {
    /// State that the edit changes.
    pub fn state(&self) -> StateId {
        match self {
            StateEdit::Copy { state, .. } | StateEdit::Clear(StatePart { state, .. }) => *state,
        }
    }

    /// Converts the edit to byte ranges. An error if the slots do not exist, or if source and destination of a
    /// copy overlap.
    pub fn in_bytes(&self, layout: SlotLayout) -> Result<ByteEdit, RunError> {
        match self {
            StateEdit::Clear(part) => Ok(ByteEdit::Clear(layout.range(part.slots.as_ref())?)),
            StateEdit::Copy { from, to, .. } => {
                let end = to.saturating_add(from.len());
                let apart = from.end <= *to || end <= from.start;
                if !apart && !from.is_empty() {
                    let because = format!("slots {from:?} and {:?} of a copy overlap", *to..end);
                    return Err(RunError::Mismatch { what: "states", because });
                }
                let (from, to) = (layout.range(Some(from))?, layout.range(Some(&(*to..end)))?);
                Ok(ByteEdit::Copy { from, to })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::TensorType;
    use refrain_tensor::DType;

    fn layout() -> SlotLayout {
        SlotLayout::of(&State::whole("slots", TensorType::new(DType::F16, [5, 3])))
    }

    #[test]
    fn slots_are_ranges_of_a_states_bytes() {
        assert_eq!(layout(), SlotLayout { n_slots: 5, slot_bytes: 6 });
        assert_eq!(layout().range(None).unwrap(), 0..30);
        assert_eq!(layout().range(Some(&(2..4))).unwrap(), 12..24);
        let copy = |from, to| StateEdit::Copy { state: StateId::from_idx(0), from, to }.in_bytes(layout());
        assert_eq!(copy(0..2, 3).unwrap(), ByteEdit::Copy { from: 0..12, to: 18..30 });
        assert_eq!(copy(3..5, 1).unwrap(), ByteEdit::Copy { from: 18..30, to: 6..18 });
        assert_eq!(copy(2..2, 2).unwrap(), ByteEdit::Copy { from: 12..12, to: 12..12 });
    }

    #[test]
    fn missing_slots_and_overlapping_copies_are_refused() {
        let copy = |from, to| StateEdit::Copy { state: StateId::from_idx(0), from, to }.in_bytes(layout());
        for refused in [copy(0..3, 2), copy(2..4, 1), copy(4..6, 0), copy(0..2, 4), copy(0..2, usize::MAX)] {
            assert!(matches!(refused, Err(RunError::Mismatch { what: "states", .. })), "{refused:?}");
        }
        #[expect(clippy::reversed_empty_ranges, reason = "a caller's mistake")]
        let reversed = layout().range(Some(&(3..2)));
        assert!(reversed.is_err());
        let part = StatePart::slots(StateId::from_idx(0), 1..3);
        assert!(layout().range_for(&part, 12).is_ok());
        let error = layout().range_for(&part, 13).unwrap_err();
        assert!(error.to_string().contains("12 bytes, but 13 were given"), "{error}");
    }
}
