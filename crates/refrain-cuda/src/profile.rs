//! Time of eager steps, launch by launch.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use refrain_driver::{DriverError, Event, Lease, Stream};

use crate::traffic::Moved;
use crate::warm::WarmPlan;

/// Maximum number of launches in a timeline. A page with more is slow to open, and the table counts all of
/// them.
const MAX_SPANS: usize = 60_000;

/// Totals of one kernel for one plan step.
#[derive(Clone, Debug, PartialEq)]
pub struct ProfileRow {
    /// Label of the step.
    pub step: String,
    /// Name of the kernel, `copy` or `fill`.
    pub kernel: String,
    /// Number of launches.
    pub n: u64,
    /// Total time on the device.
    pub total_ms: f64,
    /// Bytes of the named buffers, counted once per read and per write. Of a cache only the positions read or
    /// added count, of a gathered table only the gathered rows.
    pub bytes: u64,
}

/// One launch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ProfileSpan {
    /// Its row in [`crate::Status::profile`].
    pub row: usize,
    /// Start time, relative to the first profiled launch.
    pub start_ms: f64,
    /// Duration, including the wait for its turn.
    pub ms: f64,
    /// Bytes, as in [`ProfileRow::bytes`].
    pub bytes: u64,
}

/// One step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ProfileStep {
    /// Tokens of its plan.
    pub n_tokens: usize,
    /// Index of its first launch in [`Timeline::spans`]; the step ends where the next one starts.
    pub first_span: usize,
}

/// The first launches of a profile, in order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Timeline {
    /// Steps.
    pub steps: Vec<ProfileStep>,
    /// Launches.
    pub spans: Vec<ProfileSpan>,
    /// Steps that did not fit into the timeline.
    pub n_steps_left_out: u64,
}

/// A timeline that the device thread fills and other threads read.
pub(crate) type SharedTimeline = Arc<Mutex<Timeline>>;

/// Timings so far, in the order of each step's first run.
#[derive(Debug, Default)]
pub(crate) struct Profile {
    rows: Vec<ProfileRow>,
    index: HashMap<(String, String), usize>,
    events: Vec<Event>,
    /// Recorded before the first launch.
    origin: Option<Event>,
    timeline: SharedTimeline,
    /// Whether the current step goes into the timeline.
    is_kept: bool,
}

impl Profile {
    pub(crate) fn new(timeline: SharedTimeline) -> Profile {
        Profile { timeline, ..Profile::default() }
    }

    pub(crate) fn rows(&self) -> &[ProfileRow] {
        &self.rows
    }

    /// Starts a step: a timeline holds whole steps only.
    pub(crate) fn begin_step(&mut self, n_tokens: usize, n_launches: usize) {
        let mut timeline = self.timeline.lock().unwrap_or_else(PoisonError::into_inner);
        let first_span = timeline.spans.len();
        // The first step is kept whatever its size, since an empty timeline helps nobody.
        self.is_kept =
            timeline.n_steps_left_out == 0 && (first_span == 0 || first_span + n_launches <= MAX_SPANS);
        if self.is_kept {
            timeline.steps.push(ProfileStep { n_tokens, first_span });
        } else {
            timeline.n_steps_left_out += 1;
        }
    }

    /// Runs a plan eagerly with an event after each launch, and waits for it.
    pub(crate) fn run(
        &mut self,
        stream: &mut Stream,
        lease: &mut Lease,
        warm: &WarmPlan,
        moved: &Moved,
    ) -> Result<(), DriverError> {
        while self.events.len() <= warm.work().len() {
            self.events.push(stream.context().event()?);
        }
        if self.origin.is_none() {
            let origin = stream.context().event()?;
            stream.record_event(&origin)?;
            self.origin = Some(origin);
        }
        stream.record_event(&self.events[0])?;
        for (i, work) in warm.work().iter().enumerate() {
            stream.run(lease, false, |q| work.enqueue(q))?;
            stream.record_event(&self.events[i + 1])?;
        }
        stream.synchronize()?;
        let mut at_ms = match &self.origin {
            Some(origin) => f64::from(self.events[0].ms_since(origin)?),
            None => 0.0,
        };
        let mut spans = Vec::with_capacity(warm.work().len());
        for (i, work) in warm.work().iter().enumerate() {
            let ms = f64::from(self.events[i + 1].ms_since(&self.events[i])?);
            let (step, kernel) = work.step_and_kernel();
            let bytes = moved.bytes(work);
            let row = self.add(step, kernel, ms, bytes);
            spans.push(ProfileSpan { row, start_ms: at_ms, ms, bytes });
            // Each launch starts where the previous one ended: they share a stream.
            at_ms += ms;
        }
        if self.is_kept {
            self.timeline.lock().unwrap_or_else(PoisonError::into_inner).spans.extend(spans);
        }
        Ok(())
    }

    fn add(&mut self, step: String, kernel: String, ms: f64, bytes: u64) -> usize {
        let key = (step, kernel);
        let row_idx = match self.index.get(&key) {
            Some(&idx) => idx,
            None => {
                let (step, kernel) = key.clone();
                self.rows.push(ProfileRow { step, kernel, n: 0, total_ms: 0.0, bytes: 0 });
                self.index.insert(key, self.rows.len() - 1);
                self.rows.len() - 1
            }
        };
        let row = &mut self.rows[row_idx];
        row.n += 1;
        row.total_ms += ms;
        row.bytes += bytes;
        row_idx
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_timeline_holds_whole_steps_until_it_is_full() {
        let timeline = SharedTimeline::default();
        let mut profile = Profile::new(Arc::clone(&timeline));
        let step = |profile: &mut Profile, n: usize| {
            profile.begin_step(1, n);
            if profile.is_kept {
                let span = ProfileSpan { row: 0, start_ms: 0.0, ms: 0.0, bytes: 0 };
                timeline.lock().unwrap().spans.extend(vec![span; n]);
            }
            profile.is_kept
        };
        assert!(step(&mut profile, MAX_SPANS - 10));
        assert!(step(&mut profile, 10));
        assert!(!step(&mut profile, 1));
        assert!(!step(&mut profile, 0), "no step follows one that was left out");
        let timeline = timeline.lock().unwrap();
        assert_eq!((timeline.steps.len(), timeline.n_steps_left_out), (2, 2));
        assert_eq!(timeline.steps[1].first_span, MAX_SPANS - 10);
    }
}
