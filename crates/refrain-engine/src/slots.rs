//! Slots of recurrent layers: which sequence owns which, and what they hold.
//!
//! A sequence has two slots of each recurrent state. A step reads one and writes the other, so it can be
//! repeated. The state after `n` tokens is in slot `n % 2` of the pair passed to the step ([`Slots::row`]).
//! Self-feeding steps of one token keep that invariant; a step with an even number of tokens swaps the pair.
//!
//! A state covers exactly the evaluated tokens and cannot be truncated. If launched steps are discarded, the
//! device has advanced past the sequence: the state is lost, and the sequence's tokens are evaluated again
//! before it continues. An opened sequence has a third slot, which saves the state after its last prompt: a
//! conversation whose last answer is regenerated or edited continues from there.

/// The slots of an engine.
#[derive(Clone, Debug, Default)]
pub(crate) struct SlotPool {
    n_slots: usize,
    free: Vec<u32>,
    /// Slots reserved for sequences, held or not.
    n_reserved: usize,
    /// Reserved slots that sequences already hold.
    n_reserved_held: usize,
}

/// Slot counts of recurrent states at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotCounts {
    /// Slots that no sequence holds.
    pub free: usize,
    /// Total number of slots; 0 for a model without recurrent layers.
    pub total: usize,
}

/// No slots are left.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct OutOfSlots {
    pub(crate) free: usize,
    pub(crate) total: usize,
}

/// Slots of a sequence with a reservation: a pair, and one for the state after its last prompt.
const N_RESERVED: usize = 3;
/// Slots of any other sequence.
pub(crate) const N_PAIR: usize = 2;

impl SlotPool {
    /// A pool of `n_slots` slots; 0 for a model without recurrent layers.
    pub(crate) fn new(n_slots: usize) -> SlotPool {
        let mut pool = SlotPool::default();
        pool.extend(n_slots);
        pool
    }

    /// Whether sequences have slots at all.
    pub(crate) fn is_used(&self) -> bool {
        self.n_slots > 0
    }

    /// Grows the pool to `n_slots`.
    pub(crate) fn extend(&mut self, n_slots: usize) {
        let added = self.n_slots as u32..n_slots.max(self.n_slots) as u32;
        self.n_slots = added.end as usize;
        // Slots are popped from the back: those that were free before the growth come first, lowest first.
        self.free.splice(0..0, added.rev());
    }

    pub(crate) fn counts(&self) -> SlotCounts {
        SlotCounts { free: self.free.len(), total: self.n_slots }
    }

    /// Number of slots required for one more reservation.
    pub(crate) fn size_for_reservation(&self) -> usize {
        if self.is_used() { self.n_slots.max(self.n_reserved + N_RESERVED) } else { 0 }
    }

    /// Whether a sequence without a reservation can ever get a pair.
    pub(crate) fn has_pair(&self) -> bool {
        !self.is_used() || self.n_reserved + N_PAIR <= self.n_slots
    }

    /// Reserves slots; returns false if too many are already reserved.
    pub(crate) fn reserve(&mut self) -> bool {
        if !self.is_used() {
            return true;
        }
        let may = self.n_reserved + N_RESERVED <= self.n_slots;
        self.n_reserved += if may { N_RESERVED } else { 0 };
        may
    }

    /// Cancels a reservation.
    pub(crate) fn cancel_reservation(&mut self) {
        self.n_reserved -= if self.is_used() { N_RESERVED } else { 0 };
    }

    /// Allocates slots for a sequence with or without a reservation.
    pub(crate) fn take(&mut self, is_reserved: bool) -> Result<Slots, OutOfSlots> {
        let kept_back = if is_reserved { 0 } else { self.n_reserved - self.n_reserved_held };
        let (left, need) =
            (self.free.len().saturating_sub(kept_back), if is_reserved { N_RESERVED } else { N_PAIR });
        let out = OutOfSlots { free: left, total: self.n_slots };
        if left < need {
            return Err(out);
        }
        let mut next = || self.free.pop().ok_or(out);
        let pair = [next()?, next()?];
        let spare = if is_reserved { Some(next()?) } else { None };
        self.n_reserved_held += if is_reserved { need } else { 0 };
        Ok(Slots { pair, spare, n_reached: 0, kept: None, needs_restore: false })
    }

    /// Releases slots.
    ///
    /// # Panics
    /// Panics if a slot is already free: two sequences would end up sharing it.
    pub(crate) fn release(&mut self, slots: &Slots) {
        for slot in slots.spare.into_iter().chain(slots.pair.into_iter().rev()) {
            assert!(!self.free.contains(&slot), "slot {slot} is released twice");
            self.free.push(slot);
        }
        self.n_reserved_held -= if slots.spare.is_some() { N_RESERVED } else { 0 };
    }
}

/// A copy from one slot to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotCopy {
    /// Source slot.
    pub from: usize,
    /// Destination slot.
    pub to: usize,
}

/// The slots of one sequence.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Slots {
    pair: [u32; 2],
    spare: Option<u32>,
    /// Number of tokens that the device may have put into the state.
    n_reached: usize,
    /// Number of tokens covered by the state saved in the spare slot.
    kept: Option<usize>,
    /// The sequence was cut to the saved state, which is not restored yet.
    needs_restore: bool,
}

impl Slots {
    /// The pair, as passed to a step.
    pub(crate) fn row(&self) -> [i32; 2] {
        self.pair.map(|slot| slot as i32)
    }

    /// Whether the state covers exactly `n_tokens`. Zero tokens need no state.
    pub(crate) fn holds(&self, n_tokens: usize) -> bool {
        n_tokens == 0 || (self.n_reached == n_tokens && !self.needs_restore)
    }

    /// How many of the sequence's tokens the state can continue after, if at most `n_shared` of `n_tokens`
    /// are kept.
    pub(crate) fn max_kept(&self, n_shared: usize, n_tokens: usize) -> usize {
        match self.kept {
            _ if n_shared == n_tokens && self.holds(n_tokens) => n_shared,
            Some(kept) if kept <= n_shared => kept,
            _ => 0,
        }
    }

    /// Truncates the sequence to `n_tokens`, a result of [`Slots::max_kept`].
    pub(crate) fn cut(&mut self, n_tokens: usize) {
        self.needs_restore = !self.holds(n_tokens) && self.kept == Some(n_tokens);
        self.kept = self.kept.filter(|&kept| kept <= n_tokens);
    }

    /// Records that a step has put the tokens from `start` to `end` into the state.
    pub(crate) fn evaluated(&mut self, start: usize, end: usize) {
        if (end - start).is_multiple_of(2) && end > start {
            self.pair.swap(0, 1);
        }
        (self.n_reached, self.needs_restore) = (end, false);
    }

    /// Records that single-token steps were launched that may advance up to this position.
    pub(crate) fn may_reach(&mut self, end: usize) {
        self.n_reached = self.n_reached.max(end);
    }

    /// Records that the launched steps ended after `end` tokens.
    pub(crate) fn ended_at(&mut self, end: usize) {
        self.n_reached = end;
    }

    /// Saves the state after `n_tokens`: returns the copy to make, if there is a spare slot and the state is
    /// valid.
    pub(crate) fn keep(&mut self, n_tokens: usize) -> Option<SlotCopy> {
        let spare = self.spare.filter(|_| n_tokens > 0 && self.holds(n_tokens))?;
        self.kept = Some(n_tokens);
        Some(SlotCopy { from: self.pair[n_tokens % 2] as usize, to: spare as usize })
    }

    /// Restores the saved state: returns the copy to make, if the sequence was cut to it.
    pub(crate) fn resume(&mut self, n_tokens: usize) -> Option<SlotCopy> {
        let spare = self.spare.filter(|_| self.needs_restore && self.kept == Some(n_tokens))?;
        (self.n_reached, self.needs_restore) = (n_tokens, false);
        Some(SlotCopy { from: spare as usize, to: self.pair[n_tokens % 2] as usize })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_state_after_n_tokens_is_in_slot_n_mod_2_for_any_chunking() {
        let mut pool = SlotPool::new(6);
        let mut slots = pool.take(false).unwrap();
        // Index of the slot that really holds the state, tracked by what a step does.
        let (mut at, mut n) = (None, 0);
        for len in [5, 4, 1, 1, 2, 1, 6, 6, 3, 1, 1] {
            let row = slots.row();
            assert!(at.is_none_or(|at| at == row[n % 2]), "after {n} tokens");
            at = Some(row[(n + 1) % 2]);
            slots.evaluated(n, n + len);
            n += len;
            assert!(slots.holds(n) && !slots.holds(n - 1));
        }
        pool.release(&slots);
        assert_eq!(pool.counts(), SlotCounts { free: 6, total: 6 });
    }

    #[test]
    fn reserved_slots_are_kept_and_others_take_the_remaining_ones() {
        let mut pool = SlotPool::new(8);
        assert!(pool.reserve() && pool.reserve() && !pool.reserve());
        assert_eq!(pool.size_for_reservation(), 9);
        let held = pool.take(false).unwrap();
        assert_eq!(pool.take(false), Err(OutOfSlots { free: 0, total: 8 }));
        let first = pool.take(true).unwrap();
        assert_eq!(pool.take(false), Err(OutOfSlots { free: 0, total: 8 }));
        let second = pool.take(true).unwrap();
        assert_eq!([&held, &first, &second].map(Slots::row), [[0, 1], [2, 3], [5, 6]]);
        assert_eq!((first.spare, second.spare, held.spare), (Some(4), Some(7), None));
        assert!(pool.has_pair());
        pool.extend(9);
        assert!(pool.reserve() && !pool.has_pair());
        pool.cancel_reservation();
        pool.release(&first);
        assert!(pool.take(false).is_err(), "released slots are still reserved");
        pool.extend(10);
        assert!(pool.take(false).is_ok());
        assert!(SlotPool::new(0).reserve() && SlotPool::new(0).has_pair());
    }

    #[test]
    fn discarded_steps_leave_a_state_that_is_too_far_ahead() {
        let mut slots = SlotPool::new(2).take(false).unwrap();
        slots.evaluated(0, 4);
        slots.may_reach(7);
        assert!(!slots.holds(4) && !slots.holds(5) && slots.holds(0));
        slots.ended_at(5);
        assert!(slots.holds(5));
        assert_eq!(slots.keep(5), None, "there is no spare slot");
    }

    #[test]
    fn a_saved_state_is_restored_for_the_same_prefix() {
        let mut pool = SlotPool::new(3);
        assert!(pool.reserve());
        let mut slots = pool.take(true).unwrap();
        slots.evaluated(0, 4);
        let [even, _] = slots.row();
        assert_eq!(slots.keep(4), Some(SlotCopy { from: even as usize, to: 2 }));
        (4..7).for_each(|n| slots.evaluated(n, n + 1));
        assert_eq!(
            [(7, 7), (6, 7), (4, 7), (3, 7)].map(|(shared, n)| slots.max_kept(shared, n)),
            [7, 4, 4, 0]
        );
        slots.cut(4);
        assert!(!slots.holds(4));
        assert_eq!(slots.resume(4), Some(SlotCopy { from: 2, to: even as usize }));
        assert!(slots.holds(4) && slots.resume(4).is_none());
        // Different tokens come before it: the saved state is useless.
        slots.cut(0);
        slots.evaluated(0, 9);
        assert_eq!(slots.max_kept(8, 9), 0);
    }
}
