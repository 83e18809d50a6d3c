//! Cost of host steps: bytes copied between device and host.

use crate::op::Op;
use crate::plan::{Operand, Place, Plan};
use crate::schedule::Segment;

/// Copies between device and host for a segment's host steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Crossing {
    /// Bytes from the device to the host.
    pub to_host_bytes: usize,
    /// Bytes from the host to the device.
    pub to_device_bytes: usize,
    /// Copies in both directions; the host waits for each.
    pub n_copies: usize,
}

impl Plan {
    /// Returns the copies that one run of a segment's host steps needs; none for a recordable segment. Step
    /// inputs and weights are already on the host.
    pub fn crossing(&self, segment: &Segment) -> Crossing {
        let mut crossing = Crossing::default();
        let on_device = |operand: &&Operand| match self.buffer(operand.buffer).place {
            Place::Arena { .. } | Place::State(_) => true,
            Place::Control { .. } | Place::Weight(_) => false,
        };
        let bytes = |operand: &Operand| self.buffer(operand.buffer).bytes;
        for step in self.steps()[segment.steps.clone()].iter().filter(|s| matches!(s.op, Op::HostCall(_))) {
            for operand in step.inputs.iter().filter(on_device) {
                crossing.to_host_bytes += bytes(operand);
                crossing.n_copies += 1;
            }
            for operand in &step.outputs {
                crossing.to_device_bytes += bytes(operand);
                crossing.n_copies += 1;
            }
        }
        crossing
    }
}
