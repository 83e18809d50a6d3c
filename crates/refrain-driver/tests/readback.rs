//! Results of steps launched ahead: read in order, without a wait for the whole stream.

use std::time::Duration;

use refrain_driver::sim::{DriverCall, FaultScript, SimDriver, SimOptions, SimSchedule};
use refrain_driver::{Buf, Device, DriverError, Lease, Memory, MemoryLayout, Readback, Staging, Stream};

const LIMIT: Duration = Duration::from_secs(5);

struct Bed {
    stream: Stream,
    lease: Lease,
    staging: Staging,
    readback: Readback,
    x: Buf,
    pinned: Buf,
}

fn bed(sim: &SimDriver) -> Bed {
    let ctx = Device::simulated(sim).unwrap().context().unwrap();
    let mut layout = MemoryLayout::new("results");
    let (x, pinned) = (layout.device("x", 12), layout.pinned("pinned", 8));
    let memory = Memory::plan(&ctx, &layout).unwrap();
    Bed {
        stream: ctx.stream().unwrap(),
        x: memory.buf(x),
        pinned: memory.buf(pinned),
        lease: memory.lease().unwrap(),
        staging: Staging::new(&ctx, 4, 12).unwrap(),
        readback: Readback::new(&ctx, 3, 20).unwrap(),
    }
}

impl Bed {
    /// Imitates a step: sets `x` to `n` three times, then reads back its last word and `x`.
    fn send(&mut self, n: u32) -> Result<(), DriverError> {
        let bytes = n.to_le_bytes().repeat(3);
        self.stream.stage(&mut self.lease, &mut self.staging, self.x, &bytes)?;
        let (part, pinned) = (self.x.slice(8, 4).unwrap(), self.pinned.slice(0, 4).unwrap());
        self.stream.run(&mut self.lease, false, |q| q.copy(pinned, part))?;
        self.stream.start_readback(&mut self.lease, &mut self.readback, &[part, self.x, pinned])
    }

    fn take(&mut self) -> Vec<u8> {
        self.readback.take(LIMIT).unwrap()
    }
}

fn lazy() -> SimDriver {
    SimDriver::new(SimOptions { schedule: SimSchedule::Lazy, ..SimOptions::default() })
}

#[test]
fn each_step_has_its_own_results_even_if_later_steps_were_launched_before_they_were_taken() {
    let sim = lazy();
    let mut bed = bed(&sim);
    for n in 0..3 {
        bed.send(n).unwrap();
    }
    for n in 0..40u32 {
        assert_eq!(bed.readback.n_pending(), 3);
        assert_eq!(bed.take(), n.to_le_bytes().repeat(5));
        bed.send(n + 3).unwrap();
    }
    let stats = sim.stats();
    let waits = [DriverCall::StreamQuery, DriverCall::StreamSynchronize, DriverCall::EventSynchronize]
        .map(|c| stats.n_calls(c));
    assert_eq!(waits, [0; 3], "nothing waits for the whole stream");
    assert_eq!(sim.reports(), Vec::<String>::new());
}

#[test]
fn results_without_a_free_slot_are_refused_and_nothing_is_overwritten() {
    let sim = lazy();
    let mut bed = bed(&sim);
    for n in 7..10 {
        bed.send(n).unwrap();
    }
    assert!(matches!(bed.send(10), Err(DriverError::OutOfRange { len: 4, bytes: 3, .. })));
    let x = bed.x;
    bed.take();
    let large = bed.stream.start_readback(&mut bed.lease, &mut bed.readback, &[x, x, x]);
    assert!(matches!(large, Err(DriverError::OutOfRange { len: 36, bytes: 24, .. })), "{large:?}");
    assert_eq!(bed.take(), 8u32.to_le_bytes().repeat(5));
    assert_eq!(bed.take(), 9u32.to_le_bytes().repeat(5));
}

#[test]
fn taking_without_a_readback_and_a_failing_copy_are_errors() {
    let sim = lazy();
    let mut bed = bed(&sim);
    assert!(matches!(bed.readback.take(LIMIT), Err(DriverError::Timeout { .. })));
    sim.inject(FaultScript::parse("on 1st memcpy_dtoh_async: fail 999").unwrap());
    assert!(bed.send(1).is_err());
    assert_eq!(bed.readback.n_pending(), 0, "a failed readback leaves no slot to wait for");
    bed.send(2).unwrap();
    assert_eq!(bed.take(), 2u32.to_le_bytes().repeat(5));
}

#[test]
fn bytes_are_copied_between_memories_in_both_directions() {
    let sim = lazy();
    let ctx = Device::simulated(&sim).unwrap().context().unwrap();
    let mut stream = ctx.stream().unwrap();
    let memory = |n: u64| {
        let mut layout = MemoryLayout::new("memory");
        let region = layout.device("x", n);
        let memory = Memory::plan(&ctx, &layout).unwrap();
        (memory.buf(region), memory.lease().unwrap())
    };
    let ((a, mut first), (b, mut second)) = (memory(64), memory(96));
    let bytes: Vec<u8> = (0..64).collect();
    stream.upload(&mut first, a, &bytes).unwrap();
    let kept = b.slice(32, 64).unwrap();
    stream.copy_across((&mut second, kept), (&mut first, a)).unwrap();
    stream.run(&mut first, false, |q| q.fill(a, 0xff)).unwrap();
    stream.copy_across((&mut first, a), (&mut second, kept)).unwrap();
    let mut back = vec![0; 64];
    stream.download(&first, a, &mut back).unwrap();
    assert_eq!(back, bytes);
    let unequal = stream.copy_across((&mut first, a), (&mut second, b));
    assert!(matches!(unequal, Err(DriverError::SizeMismatch { expected: 64, given: 96, .. })));
    let foreign = stream.copy_across((&mut first, kept), (&mut second, b.slice(0, 64).unwrap()));
    assert!(matches!(foreign, Err(DriverError::ForeignMemory { .. })));
}
