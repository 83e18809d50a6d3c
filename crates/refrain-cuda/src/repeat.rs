//! Runs whose steps the device repeats: the step's graph inside a loop, one launch for many tokens.
//!
//! A body of the loop is [`STEPS_PER_BODY`] steps; between two bodies the device is idle for about two microseconds,
//! more than between two launches that follow each other at once. The last commit of a body decides whether there is
//! another one: not if the row has ended, if the requested steps are done, if the host wants it to stop, or if the ring
//! has no space. Results go through the ring, as those of any step.
//!
//! The caller cannot know how many steps a loop runs, so all of them count as launched until it has ended; then those
//! that it did not run are requested again, unless the run is over.

use refrain_graph::{Feedback, Reason};

use crate::cache::{GraphMode, Site};
use crate::device_model::{CudaProgram, DeviceModel, ProgramId};
use crate::error::CudaError;
use crate::feed;
use crate::options::{CudaOptions, LoopMode};
use crate::states;
use crate::warm::WarmPlan;

/// Steps in the body of a loop. With two, the pause between bodies costs no more than the one between launches. More
/// would delay the end of a reply, since a body always runs whole.
pub(crate) const STEPS_PER_BODY: u32 = 2;

/// Offset and size of the ring's word that tells where a loop has ended.
const LOOP_END: [u64; 2] = [16, 8];

/// Key of a program's loop in the graph cache, after its parts.
const fn loop_key(id: ProgramId) -> (ProgramId, usize) {
    (id, usize::MAX)
}

fn no_loop(because: &str) -> Reason {
    Reason::NoLoop { because: because.to_owned() }
}

/// Why the options exclude loops, which were requested.
fn excluded(options: &CudaOptions) -> Option<Reason> {
    match () {
        () if options.profile => Some(Reason::Profiling),
        () if options.graphs.mode == GraphMode::Off => Some(Reason::SwitchedOff),
        () if options.verify_every.is_some() => {
            Some(no_loop("steps are compared with their eager run, which needs the host between them"))
        }
        () => None,
    }
}

/// Why the steps of a program cannot be repeated on the device.
fn refused(program: &CudaProgram) -> Option<Reason> {
    match (&program.feedback, program.only_segment()) {
        (None, _) => {
            Some(program.host_step().unwrap_or_else(|| no_loop("the step does not choose its next input")))
        }
        (Some(Feedback { n_rows, .. }), _) if *n_rows != 1 => {
            Some(no_loop("several sequences are decoded together, and others may join them"))
        }
        (Some(_), None) => Some(no_loop("the step is more than one graph")),
        (Some(_), Some(_)) => None,
    }
}

impl DeviceModel {
    /// Brings the loop over a program's step into service. `Some` is the reason why it is not; steps are then launched
    /// one by one. Verification writes to the ring, so no step may be in flight, unless the loop is in service already.
    pub(crate) fn prepare_loop(&mut self, id: ProgramId) -> Result<Option<Reason>, CudaError> {
        if self.options.loops == LoopMode::Host {
            return Ok(Some(no_loop("it was not requested")));
        }
        if let Some(reason) = excluded(&self.options) {
            return Ok(Some(reason));
        }
        let Some(program) = self.programs.get(&id) else { return Err(DeviceModel::gone()) };
        if let Some(reason) = refused(program) {
            return Ok(Some(reason));
        }
        if !self.bodies.contains_key(&id) {
            match self.describe_body(program) {
                Ok(body) => drop(self.bodies.insert(id, body)),
                Err(error) if error.is_final() => return Err(error),
                Err(error) => return Ok(Some(no_loop(&error.to_string()))),
            }
        }
        let (Some(program), Some(body)) = (self.programs.get(&id), self.bodies.get(&id)) else {
            return Err(DeviceModel::gone());
        };
        let (Some((segment, _)), Some(resident)) = (program.only_segment(), &mut self.resident) else {
            return Err(DeviceModel::gone());
        };
        let key = loop_key(id);
        let check = match self.cache.wants_check(&key) {
            true => {
                let (plan, feedback) = (&program.plan, program.feedback.as_ref());
                let n_body = Some(STEPS_PER_BODY);
                Some(states::check(plan, segment, feedback, resident, &self.digester, n_body)?)
            }
            false => None,
        };
        let mut site = Site { stream: &mut self.stream, lease: &mut resident.lease };
        self.cache.ready_loop(&key, &mut site, body, || check.ok_or_else(DeviceModel::gone))
    }

    /// The launches of one body: those of the steps, but the last commit also decides about the next body.
    fn describe_body(&self, program: &CudaProgram) -> Result<WarmPlan, CudaError> {
        let (Some((_, step)), Some(resident)) = (program.only_segment(), &self.resident) else {
            return Err(DeviceModel::gone());
        };
        let Some(feedback) = &program.feedback else { return Err(DeviceModel::gone()) };
        let loop_end = resident.ring.slice(LOOP_END[0], LOOP_END[1]);
        let loop_end = loop_end.map_err(CudaError::driver("placing a loop"))?;
        self.with_kernels(|| {
            let mut body = WarmPlan::new(&format!("{}, repeated", step.name()), &resident.space);
            (0..STEPS_PER_BODY).for_each(|_| body.append(step));
            body.pop();
            let n_body = Some(STEPS_PER_BODY);
            feed::push_commit(&self.supplies.kernels, &program.plan, resident, feedback, n_body, &mut body)?;
            Ok(body.repeated_until(loop_end))
        })
    }

    pub(crate) fn forget_loop(&mut self, id: ProgramId) {
        self.bodies.remove(&id);
        self.cache.forget(&loop_key(id));
    }

    /// Launches a loop over the next `n` steps; false if they have to be launched one by one.
    pub(crate) fn send_loop(&mut self, id: ProgramId, n: usize) -> Result<bool, CudaError> {
        if let Some(reason) = self.prepare_loop(id)? {
            self.pump.not_repeated(reason);
            return Ok(false);
        }
        let (Some(body), Some(resident)) = (self.bodies.get(&id), &mut self.resident) else {
            return Err(DeviceModel::gone());
        };
        if !self.pump.begin_loop(n) {
            return Ok(false);
        }
        self.states_are_zero = false;
        let mut site = Site { stream: &mut self.stream, lease: &mut resident.lease };
        match self.cache.launch_loop(&loop_key(id), &mut site, body) {
            Ok(None) => {
                self.pump.sent_loop(n);
                Ok(true)
            }
            Ok(Some(reason)) => {
                self.pump.cancel_loop();
                self.pump.not_repeated(reason);
                Ok(false)
            }
            Err(error) => {
                self.pump.cancel_loop();
                Err(error)
            }
        }
    }
}
