//! Limits on one rendering: steps, live memory and depth.

use std::cell::Cell;
use std::rc::Rc;

use super::error::{Stop, StopKind};

/// Steps of a rendering. A long conversation takes some ten thousand.
const MAX_STEPS: u64 = 1_000_000;
/// Live bytes of a rendering, on top of what the conversation adds.
const MAX_BYTES: usize = 64 << 20;
/// Templates copy a conversation a few times: into stripped turns, into captures, into the output.
const BYTES_PER_INPUT_BYTE: usize = 16;
/// Bytes that an operation may read or write for one step.
const BYTES_PER_STEP: usize = 1024;
/// Expressions, statements and macro calls inside each other.
const MAX_DEPTH: usize = 1000;
/// Lists and dictionaries inside each other. `serde_json` reads at most 128 levels.
pub(super) const MAX_VALUE_DEPTH: usize = 256;

/// What one rendering may use and has used.
///
/// Every value that a template creates holds a [`Charge`] for its bytes, which its drop returns. Charges are taken
/// before memory is: no operation can allocate more than what is left.
pub(super) struct Budget {
    live_bytes: Rc<Cell<usize>>,
    max_bytes: usize,
    steps: Cell<u64>,
    bytes_of_step: Cell<usize>, // bytes of work that are no whole step yet
    max_steps: u64,
    depth: Cell<usize>,
}

impl Budget {
    /// A budget for a conversation of `input_bytes` bytes.
    pub(super) fn new(input_bytes: usize) -> Self {
        let input_steps = (input_bytes / BYTES_PER_STEP).saturating_mul(BYTES_PER_INPUT_BYTE) as u64;
        Self {
            live_bytes: Rc::default(),
            max_bytes: MAX_BYTES.saturating_add(input_bytes.saturating_mul(BYTES_PER_INPUT_BYTE)),
            steps: Cell::new(0),
            bytes_of_step: Cell::new(0),
            max_steps: MAX_STEPS.saturating_add(input_steps),
            depth: Cell::new(0),
        }
    }

    /// Counts one step.
    pub(super) fn step(&self) -> Result<(), Stop> {
        self.steps(1)
    }

    /// Counts the steps of an operation that reads or writes `n_bytes` bytes.
    pub(super) fn work(&self, n_bytes: usize) -> Result<(), Stop> {
        let n_bytes = self.bytes_of_step.get().saturating_add(n_bytes);
        self.bytes_of_step.set(n_bytes % BYTES_PER_STEP);
        self.steps((n_bytes / BYTES_PER_STEP) as u64)
    }

    fn steps(&self, n: u64) -> Result<(), Stop> {
        let steps = self.steps.get().saturating_add(n);
        self.steps.set(steps);
        if steps > self.max_steps { Err(StopKind::Steps { limit: self.max_steps }.into()) } else { Ok(()) }
    }

    /// Takes memory for a new value.
    pub(super) fn charge(&self, n_bytes: usize) -> Result<Charge, Stop> {
        let mut charge = Charge { live_bytes: self.live_bytes.clone(), n_bytes: 0 };
        self.grow(&mut charge, n_bytes)?;
        Ok(charge)
    }

    /// Takes more memory for a value.
    pub(super) fn grow(&self, charge: &mut Charge, n_bytes: usize) -> Result<(), Stop> {
        self.work(n_bytes)?;
        let live = self.live_bytes.get().saturating_add(n_bytes);
        if live > self.max_bytes {
            return Err(StopKind::Memory { limit_bytes: self.max_bytes }.into());
        }
        self.live_bytes.set(live);
        charge.n_bytes += n_bytes;
        Ok(())
    }

    /// Runs `work` one level deeper.
    pub(super) fn deeper<T>(&self, work: impl FnOnce() -> Result<T, Stop>) -> Result<T, Stop> {
        let depth = self.depth.get() + 1;
        if depth > MAX_DEPTH {
            return Err(StopKind::Depth { limit: MAX_DEPTH }.into());
        }
        self.depth.set(depth);
        let result = work();
        self.depth.set(depth - 1);
        result
    }
}

/// Bytes of a live value.
pub(super) struct Charge {
    live_bytes: Rc<Cell<usize>>,
    n_bytes: usize,
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.live_bytes.set(self.live_bytes.get() - self.n_bytes);
    }
}
