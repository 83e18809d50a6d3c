//! Slots of recurrent layers: which sequence has which pair, and what is in it.
//!
//! A sequence has two slots of each recurrent state. A step reads one and writes the other, so it can run twice. The
//! state behind `n` tokens is in slot `n % 2` of the pair as a step is given it ([`Slots::row`]): steps of one token,
//! which feed themselves, change nothing in that; a step of an even number of tokens leaves the pair the other way round.
//!
//! A state holds exactly the tokens that were evaluated and cannot be cut shorter. Where steps were sent ahead that
//! nobody took, the device has gone further than the sequence: then the state is lost, and what the sequence holds is
//! evaluated again before it goes on.

/// Pairs of slots.
#[derive(Clone, Debug, Default)]
pub(crate) struct SlotPool {
    n_pairs: usize,
    free: Vec<u32>,
    /// Pairs promised to sequences, held or not.
    n_promised: usize,
    /// Pairs that such sequences hold.
    n_kept: usize,
}

/// All pairs of slots are taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct OutOfSlots {
    pub(crate) free: usize,
    pub(crate) total: usize,
}

impl SlotPool {
    /// A pool of `n_pairs`; of none for a model without recurrent layers.
    pub(crate) fn new(n_pairs: usize) -> SlotPool {
        let mut pool = SlotPool::default();
        pool.extend(n_pairs);
        pool
    }

    /// Whether sequences have slots at all.
    pub(crate) fn is_used(&self) -> bool {
        self.n_pairs > 0
    }

    /// Adds pairs until there are `n_pairs`.
    pub(crate) fn extend(&mut self, n_pairs: usize) {
        let added = self.n_pairs as u32..n_pairs.max(self.n_pairs) as u32;
        self.n_pairs = added.end as usize;
        // In front of those that are free already, which are handed out first, from the lowest.
        self.free.splice(0..0, added.rev());
    }

    /// Pairs in all.
    pub(crate) fn n_pairs(&self) -> usize {
        self.n_pairs
    }

    /// Pairs that nobody holds.
    pub(crate) fn n_free(&self) -> usize {
        self.free.len()
    }

    /// Pairs that are promised to nobody.
    pub(crate) fn n_unpromised(&self) -> usize {
        self.n_pairs - self.n_promised
    }

    /// Promises a pair; false when all are promised.
    pub(crate) fn promise(&mut self) -> bool {
        let may = !self.is_used() || self.n_unpromised() > 0;
        self.n_promised += usize::from(may && self.is_used());
        may
    }

    /// Takes a promise back.
    pub(crate) fn forget_promise(&mut self) {
        self.n_promised -= usize::from(self.is_used());
    }

    /// A pair for a sequence that was promised one or not.
    pub(crate) fn take(&mut self, is_promised: bool) -> Result<Slots, OutOfSlots> {
        let left = self.free.len().saturating_sub(self.n_promised - self.n_kept);
        let out = OutOfSlots { free: if is_promised { self.free.len() } else { left }, total: self.n_pairs };
        if !is_promised && left == 0 {
            return Err(out);
        }
        let pair = self.free.pop().ok_or(out)?;
        self.n_kept += usize::from(is_promised);
        Ok(Slots { pair, is_swapped: false, reached: 0 })
    }

    /// Takes a pair back.
    ///
    /// # Panics
    /// When it is free already: two sequences would end up sharing it.
    pub(crate) fn give_back(&mut self, slots: &Slots, is_promised: bool) {
        assert!(!self.free.contains(&slots.pair), "pair {} of slots is released twice", slots.pair);
        self.free.push(slots.pair);
        self.n_kept -= usize::from(is_promised);
    }
}

/// The pair of one sequence.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Slots {
    pair: u32,
    is_swapped: bool,
    /// Tokens that the device may have put into the state.
    reached: usize,
}

impl Slots {
    /// The pair as a step is given it.
    pub(crate) fn row(&self) -> [i32; 2] {
        let first = 2 * self.pair as i32;
        if self.is_swapped { [first + 1, first] } else { [first, first + 1] }
    }

    /// Whether the state is that behind `n_tokens`. Nothing needs no state.
    pub(crate) fn holds(&self, n_tokens: usize) -> bool {
        n_tokens == 0 || self.reached == n_tokens
    }

    /// A step has put the tokens from `start` to `end` into the state.
    pub(crate) fn evaluated(&mut self, start: usize, end: usize) {
        if (end - start).is_multiple_of(2) && end > start {
            self.is_swapped = !self.is_swapped;
        }
        self.reached = end;
    }

    /// Steps of one token each were sent that may come to this position, and not further.
    pub(crate) fn may_reach(&mut self, end: usize) {
        self.reached = self.reached.max(end);
    }

    /// The steps that were sent have ended with these tokens.
    pub(crate) fn ended_at(&mut self, end: usize) {
        self.reached = end;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_state_behind_n_tokens_is_in_slot_n_mod_2_whatever_pieces_they_came_in() {
        let mut pool = SlotPool::new(3);
        let mut slots = pool.take(false).unwrap();
        // Where the state really is, by what a step does.
        let (mut at, mut n) = (None, 0);
        for len in [5, 4, 1, 1, 2, 1, 6, 6, 3, 1, 1] {
            let row = slots.row();
            assert!(at.is_none_or(|at| at == row[n % 2]), "behind {n} tokens");
            at = Some(row[(n + 1) % 2]);
            slots.evaluated(n, n + len);
            n += len;
            assert!(slots.holds(n) && !slots.holds(n - 1));
        }
        pool.give_back(&slots, false);
        assert_eq!(pool.n_free(), 3);
    }

    #[test]
    fn promised_pairs_are_kept_and_others_take_the_rest() {
        let mut pool = SlotPool::new(3);
        assert!(pool.promise() && pool.promise());
        let held = pool.take(false).unwrap();
        assert_eq!(pool.take(false), Err(OutOfSlots { free: 0, total: 3 }));
        let first = pool.take(true).unwrap();
        assert_eq!(pool.take(false), Err(OutOfSlots { free: 0, total: 3 }));
        let second = pool.take(true).unwrap();
        assert_eq!([&held, &first, &second].map(|s| s.row()[0] / 2), [0, 1, 2]);
        assert!(pool.promise() && !pool.promise());
        pool.forget_promise();
        pool.extend(4);
        pool.give_back(&first, true);
        assert_eq!(pool.take(false).unwrap().row(), [6, 7]);
        let whole = SlotPool::new(0);
        assert!(!whole.is_used() && whole.clone().promise());
    }

    #[test]
    fn steps_that_nobody_took_leave_a_state_that_holds_too_much() {
        let mut slots = SlotPool::new(1).take(false).unwrap();
        slots.evaluated(0, 4);
        slots.may_reach(7);
        assert!(!slots.holds(4) && !slots.holds(5) && slots.holds(0));
        slots.ended_at(5);
        assert!(slots.holds(5));
    }
}
