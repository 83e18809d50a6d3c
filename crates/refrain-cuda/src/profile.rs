//! Where the time of eager steps goes, launch by launch.

use std::collections::HashMap;

use refrain_driver::{DriverError, Event, Lease, Stream};

use crate::warm::WarmPlan;

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
    /// Bytes of the buffers that they name, each counted as often as it is read or written. A cache counts whole.
    pub bytes: u64,
}

/// Timings so far, in the order in which steps first ran.
#[derive(Debug, Default)]
pub(crate) struct Profile {
    rows: Vec<ProfileRow>,
    index: HashMap<(String, String), usize>,
    events: Vec<Event>,
}

impl Profile {
    pub(crate) fn rows(&self) -> &[ProfileRow] {
        &self.rows
    }

    /// Runs a plan eagerly, one event after each launch, and waits for it.
    pub(crate) fn run(
        &mut self,
        stream: &mut Stream,
        lease: &mut Lease,
        warm: &WarmPlan,
    ) -> Result<(), DriverError> {
        while self.events.len() <= warm.work().len() {
            self.events.push(stream.context().event()?);
        }
        stream.record_event(&self.events[0])?;
        for (i, work) in warm.work().iter().enumerate() {
            stream.run(lease, false, |q| work.enqueue(q))?;
            stream.record_event(&self.events[i + 1])?;
        }
        stream.synchronize()?;
        for (i, work) in warm.work().iter().enumerate() {
            let ms = self.events[i + 1].ms_since(&self.events[i])?;
            let (step, kernel) = work.step_and_kernel();
            let bytes = work.accesses().iter().map(|(buf, _)| buf.len()).sum();
            self.add(step, kernel, f64::from(ms), bytes);
        }
        Ok(())
    }

    fn add(&mut self, step: String, kernel: String, ms: f64, bytes: u64) {
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
    }
}
