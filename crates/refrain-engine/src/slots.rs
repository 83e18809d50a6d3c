//! Slots of recurrent layers: which sequence has which, and what is in them.
//!
//! A sequence has two slots of each recurrent state. A step reads one and writes the other, so it can run twice. The state
//! behind `n` tokens is in slot `n % 2` of the pair as a step is given it ([`Slots::row`]): steps of one token, which feed
//! themselves, change nothing in that; a step of an even number of tokens leaves the pair the other way round.
//!
//! A state holds exactly the tokens that were evaluated and cannot be cut shorter. Where steps were sent ahead that
//! nobody took, the device has gone further than the sequence: then the state is lost, and what the sequence holds is
//! evaluated again before it goes on. A sequence that was opened has a third slot, which keeps the state behind its last
//! prompt: a conversation whose last answer is told differently goes on from there.

/// Slots of an engine.
#[derive(Clone, Debug, Default)]
pub(crate) struct SlotPool {
    n_slots: usize,
    free: Vec<u32>,
    /// Slots promised to sequences, held or not.
    n_promised: usize,
    /// Slots that such sequences hold.
    n_kept: usize,
}

/// Slots of recurrent states at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotCounts {
    /// Those that no sequence holds.
    pub free: usize,
    /// All of them; 0 for a model without recurrent layers.
    pub total: usize,
}

/// All slots are taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct OutOfSlots {
    pub(crate) free: usize,
    pub(crate) total: usize,
}

/// Slots of a sequence that was promised some: a pair, and one for the state behind its last prompt.
const N_PROMISED: usize = 3;
/// Slots of any other.
pub(crate) const N_PAIR: usize = 2;

impl SlotPool {
    /// A pool of `n_slots`; of none for a model without recurrent layers.
    pub(crate) fn new(n_slots: usize) -> SlotPool {
        let mut pool = SlotPool::default();
        pool.extend(n_slots);
        pool
    }

    /// Whether sequences have slots at all.
    pub(crate) fn is_used(&self) -> bool {
        self.n_slots > 0
    }

    /// Adds slots until there are `n_slots`.
    pub(crate) fn extend(&mut self, n_slots: usize) {
        let added = self.n_slots as u32..n_slots.max(self.n_slots) as u32;
        self.n_slots = added.end as usize;
        // In front of those that are free already, which are handed out first, from the lowest.
        self.free.splice(0..0, added.rev());
    }

    pub(crate) fn counts(&self) -> SlotCounts {
        SlotCounts { free: self.free.len(), total: self.n_slots }
    }

    /// Slots there must be for one more promise.
    pub(crate) fn size_for_promise(&self) -> usize {
        if self.is_used() { self.n_slots.max(self.n_promised + N_PROMISED) } else { 0 }
    }

    /// Whether a sequence that is promised nothing can ever have a pair.
    pub(crate) fn has_pair(&self) -> bool {
        !self.is_used() || self.n_promised + N_PAIR <= self.n_slots
    }

    /// Promises slots; false when too many are promised already.
    pub(crate) fn promise(&mut self) -> bool {
        if !self.is_used() {
            return true;
        }
        let may = self.n_promised + N_PROMISED <= self.n_slots;
        self.n_promised += if may { N_PROMISED } else { 0 };
        may
    }

    /// Takes a promise back.
    pub(crate) fn forget_promise(&mut self) {
        self.n_promised -= if self.is_used() { N_PROMISED } else { 0 };
    }

    /// Slots for a sequence that was promised some or not.
    pub(crate) fn take(&mut self, is_promised: bool) -> Result<Slots, OutOfSlots> {
        let kept_back = if is_promised { 0 } else { self.n_promised - self.n_kept };
        let (left, need) =
            (self.free.len().saturating_sub(kept_back), if is_promised { N_PROMISED } else { N_PAIR });
        let out = OutOfSlots { free: left, total: self.n_slots };
        if left < need {
            return Err(out);
        }
        let mut next = || self.free.pop().ok_or(out);
        let pair = [next()?, next()?];
        let spare = if is_promised { Some(next()?) } else { None };
        self.n_kept += if is_promised { need } else { 0 };
        Ok(Slots { pair, spare, reached: 0, kept: None, is_behind: false })
    }

    /// Takes slots back.
    ///
    /// # Panics
    /// When one is free already: two sequences would end up sharing it.
    pub(crate) fn give_back(&mut self, slots: &Slots) {
        for slot in slots.spare.into_iter().chain(slots.pair.into_iter().rev()) {
            assert!(!self.free.contains(&slot), "slot {slot} is released twice");
            self.free.push(slot);
        }
        self.n_kept -= if slots.spare.is_some() { N_PROMISED } else { 0 };
    }
}

/// A copy of one slot onto another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotCopy {
    /// The slot that is read.
    pub from: usize,
    /// The slot that is written.
    pub to: usize,
}

/// The slots of one sequence.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Slots {
    pair: [u32; 2],
    spare: Option<u32>,
    /// Tokens that the device may have put into the state.
    reached: usize,
    /// Tokens behind which the state is kept in the spare slot.
    kept: Option<usize>,
    /// The sequence was cut to what is kept, and the state was not yet put back.
    is_behind: bool,
}

impl Slots {
    /// The pair as a step is given it.
    pub(crate) fn row(&self) -> [i32; 2] {
        self.pair.map(|slot| slot as i32)
    }

    /// Whether the state is that behind `n_tokens`. Nothing needs no state.
    pub(crate) fn holds(&self, n_tokens: usize) -> bool {
        n_tokens == 0 || (self.reached == n_tokens && !self.is_behind)
    }

    /// How many of the sequence's tokens its state can go on behind, if it is to keep at most `n_shared` of `n_tokens`.
    pub(crate) fn most(&self, n_shared: usize, n_tokens: usize) -> usize {
        match self.kept {
            _ if n_shared == n_tokens && self.holds(n_tokens) => n_shared,
            Some(kept) if kept <= n_shared => kept,
            _ => 0,
        }
    }

    /// The sequence keeps `n_tokens` of its tokens, as [`Slots::most`] says.
    pub(crate) fn cut(&mut self, n_tokens: usize) {
        self.is_behind = !self.holds(n_tokens) && self.kept == Some(n_tokens);
        self.kept = self.kept.filter(|&kept| kept <= n_tokens);
    }

    /// A step has put the tokens from `start` to `end` into the state.
    pub(crate) fn evaluated(&mut self, start: usize, end: usize) {
        if (end - start).is_multiple_of(2) && end > start {
            self.pair.swap(0, 1);
        }
        (self.reached, self.is_behind) = (end, false);
    }

    /// Steps of one token each were sent that may come to this position, and not further.
    pub(crate) fn may_reach(&mut self, end: usize) {
        self.reached = self.reached.max(end);
    }

    /// The steps that were sent have ended with these tokens.
    pub(crate) fn ended_at(&mut self, end: usize) {
        self.reached = end;
    }

    /// What keeps the state behind `n_tokens`, where there is a slot for it and the state is there.
    pub(crate) fn keep(&mut self, n_tokens: usize) -> Option<SlotCopy> {
        let spare = self.spare.filter(|_| n_tokens > 0 && self.holds(n_tokens))?;
        self.kept = Some(n_tokens);
        Some(SlotCopy { from: self.pair[n_tokens % 2] as usize, to: spare as usize })
    }

    /// What puts the kept state back, where the sequence was cut to it.
    pub(crate) fn resume(&mut self, n_tokens: usize) -> Option<SlotCopy> {
        let spare = self.spare.filter(|_| self.is_behind && self.kept == Some(n_tokens))?;
        (self.reached, self.is_behind) = (n_tokens, false);
        Some(SlotCopy { from: spare as usize, to: self.pair[n_tokens % 2] as usize })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_state_behind_n_tokens_is_in_slot_n_mod_2_whatever_pieces_they_came_in() {
        let mut pool = SlotPool::new(6);
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
        pool.give_back(&slots);
        assert_eq!(pool.counts(), SlotCounts { free: 6, total: 6 });
    }

    #[test]
    fn promised_slots_are_kept_and_others_take_the_rest() {
        let mut pool = SlotPool::new(8);
        assert!(pool.promise() && pool.promise() && !pool.promise());
        assert_eq!(pool.size_for_promise(), 9);
        let held = pool.take(false).unwrap();
        assert_eq!(pool.take(false), Err(OutOfSlots { free: 0, total: 8 }));
        let first = pool.take(true).unwrap();
        assert_eq!(pool.take(false), Err(OutOfSlots { free: 0, total: 8 }));
        let second = pool.take(true).unwrap();
        assert_eq!([&held, &first, &second].map(Slots::row), [[0, 1], [2, 3], [5, 6]]);
        assert_eq!((first.spare, second.spare, held.spare), (Some(4), Some(7), None));
        assert!(pool.has_pair());
        pool.extend(9);
        assert!(pool.promise() && !pool.has_pair());
        pool.forget_promise();
        pool.give_back(&first);
        assert!(pool.take(false).is_err(), "what was given back is still promised");
        pool.extend(10);
        assert!(pool.take(false).is_ok());
        assert!(SlotPool::new(0).promise() && SlotPool::new(0).has_pair());
    }

    #[test]
    fn steps_that_nobody_took_leave_a_state_that_holds_too_much() {
        let mut slots = SlotPool::new(2).take(false).unwrap();
        slots.evaluated(0, 4);
        slots.may_reach(7);
        assert!(!slots.holds(4) && !slots.holds(5) && slots.holds(0));
        slots.ended_at(5);
        assert!(slots.holds(5));
        assert_eq!(slots.keep(5), None, "there is no slot for it");
    }

    #[test]
    fn a_kept_state_is_put_back_where_the_tokens_before_it_are_the_same() {
        let mut pool = SlotPool::new(3);
        assert!(pool.promise());
        let mut slots = pool.take(true).unwrap();
        slots.evaluated(0, 4);
        let [even, _] = slots.row();
        assert_eq!(slots.keep(4), Some(SlotCopy { from: even as usize, to: 2 }));
        (4..7).for_each(|n| slots.evaluated(n, n + 1));
        assert_eq!([(7, 7), (6, 7), (4, 7), (3, 7)].map(|(shared, n)| slots.most(shared, n)), [7, 4, 4, 0]);
        slots.cut(4);
        assert!(!slots.holds(4));
        assert_eq!(slots.resume(4), Some(SlotCopy { from: 2, to: even as usize }));
        assert!(slots.holds(4) && slots.resume(4).is_none());
        // Other tokens in front of it: what is kept is of no use any more.
        slots.cut(0);
        slots.evaluated(0, 9);
        assert_eq!(slots.most(8, 9), 0);
    }
}
