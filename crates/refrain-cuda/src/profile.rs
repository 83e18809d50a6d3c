//! Where the time of eager steps goes, launch by launch.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use refrain_driver::{DriverError, Event, Lease, Stream};

use crate::traffic::Moved;
use crate::warm::WarmPlan;

/// Launches that a timeline holds; a page of more is slow to open, and the table counts them all.
const MAX_SPANS: usize = 60_000;

/// All launches of one kernel for one step of a plan.
#[derive(Clone, Debug, PartialEq)]
pub struct ProfileRow {
    /// Label of the step.
    pub step: String,
    /// The kernel, `copy` or `fill`.
    pub kernel: String,
    /// Launches.
    pub n: u64,
    /// Their time on the device.
    pub total_ms: f64,
    /// Bytes of the buffers that they name, each counted as often as it is read or written. Of a cache the positions
    /// that were looked back on or added count, of a table the rows that were taken.
    pub bytes: u64,
}

/// One launch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ProfileSpan {
    /// Its row in [`crate::Status::profile`].
    pub row: usize,
    /// When it began, after the first profiled launch.
    pub start_ms: f64,
    /// How long it took, with the wait for its turn.
    pub ms: f64,
    /// Bytes, as in [`ProfileRow::bytes`].
    pub bytes: u64,
}

/// One step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ProfileStep {
    /// Tokens that its plan is for.
    pub n_tokens: usize,
    /// Its first launch in [`Timeline::spans`]; the next step's first ends it.
    pub first_span: usize,
}

/// The first launches of a profile in their order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Timeline {
    /// Steps.
    pub steps: Vec<ProfileStep>,
    /// Launches.
    pub spans: Vec<ProfileSpan>,
    /// Steps that came when the timeline was full.
    pub n_steps_left_out: u64,
}

/// A timeline that the device thread fills and others look at.
pub(crate) type SharedTimeline = Arc<Mutex<Timeline>>;

/// Timings so far, in the order in which steps first ran.
#[derive(Debug, Default)]
pub(crate) struct Profile {
    rows: Vec<ProfileRow>,
    index: HashMap<(String, String), usize>,
    events: Vec<Event>,
    /// Set before the first launch of all.
    origin: Option<Event>,
    timeline: SharedTimeline,
    /// Whether the step under way is in the timeline.
    is_kept: bool,
}

impl Profile {
    pub(crate) fn new(timeline: SharedTimeline) -> Profile {
        Profile { timeline, ..Profile::default() }
    }

    pub(crate) fn rows(&self) -> &[ProfileRow] {
        &self.rows
    }

    /// Says that a step begins: a timeline holds whole steps.
    pub(crate) fn begin_step(&mut self, n_tokens: usize, n_launches: usize) {
        let mut timeline = self.timeline.lock().unwrap_or_else(PoisonError::into_inner);
        let first_span = timeline.spans.len();
        // The first step is kept whatever its size: a timeline of nothing helps nobody.
        self.is_kept =
            timeline.n_steps_left_out == 0 && (first_span == 0 || first_span + n_launches <= MAX_SPANS);
        if self.is_kept {
            timeline.steps.push(ProfileStep { n_tokens, first_span });
        } else {
            timeline.n_steps_left_out += 1;
        }
    }

    /// Runs a plan eagerly, one event after each launch, and waits for it.
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
            // Each launch begins where the one before it ended: they are on one stream.
            at_ms += ms;
        }
        if self.is_kept {
            self.timeline.lock().unwrap_or_else(PoisonError::into_inner).spans.extend(spans);
        }
        Ok(())
    }

    fn add(&mut self, step: String, kernel: String, ms: f64, bytes: u64) -> usize {
        let key = (step, kernel);
        let at = match self.index.get(&key) {
            Some(&at) => at,
            None => {
                let (step, kernel) = key.clone();
                self.rows.push(ProfileRow { step, kernel, n: 0, total_ms: 0.0, bytes: 0 });
                self.index.insert(key, self.rows.len() - 1);
                self.rows.len() - 1
            }
        };
        let row = &mut self.rows[at];
        row.n += 1;
        row.total_ms += ms;
        row.bytes += bytes;
        at
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
        assert!(!step(&mut profile, 0), "once a step is missing, none follows");
        let timeline = timeline.lock().unwrap();
        assert_eq!((timeline.steps.len(), timeline.n_steps_left_out), (2, 2));
        assert_eq!(timeline.steps[1].first_span, MAX_SPANS - 10);
    }
}
