//! Uploads through pinned slots: one or more threads fill some slots while others are in flight.

use refrain_driver::sim::{DriverCall, FaultScript, SimDriver, SimOptions, SimSchedule};
use refrain_driver::{
    Baked, BulkOptions, Device, DeviceKind, DriverError, LaunchBuilder, Memory, MemoryLayout, Module,
    Staging, probe,
};

/// The size of a slot.
const SLOT: usize = 4 << 20;

#[test]
fn the_host_fills_one_slot_while_the_device_copies_the_other_and_waits_only_for_a_third() {
    let sim = SimDriver::new(SimOptions { schedule: SimSchedule::Lazy, ..SimOptions::default() });
    let ctx = Device::simulated(&sim).unwrap().context().unwrap();
    let mut stream = ctx.stream().unwrap();
    let mut layout = MemoryLayout::new("uploads");
    let region = layout.device("weights", 5 * SLOT as u64);
    let memory = Memory::plan(&ctx, &layout).unwrap();
    let (mut lease, buf) = (memory.lease().unwrap(), memory.buf(region));
    let bytes: Vec<u8> = (0..5 * SLOT).map(|i| (i % 251) as u8).collect();
    let mut send = |from: usize, to: usize| {
        let part = buf.slice(from as u64, (to - from) as u64).unwrap();
        stream.upload_ahead(&mut lease, part, &bytes[from..to]).unwrap();
        let stats = sim.stats();
        let waits = [DriverCall::EventSynchronize, DriverCall::StreamQuery, DriverCall::StreamSynchronize]
            .map(|c| stats.n_calls(c));
        assert_eq!(waits, [0; 3], "nothing waits for the whole stream");
        (stats.n_calls(DriverCall::MemcpyHtodAsync), stats.n_calls(DriverCall::EventQuery) > 0)
    };
    // Two tensors of one slot each are both in flight; neither was waited for.
    assert_eq!(send(0, SLOT - 5), (1, false));
    assert_eq!(send(SLOT - 5, 2 * SLOT - 5), (2, false));
    // The next upload needs a slot and waits only for the copy out of it.
    assert_eq!(send(2 * SLOT - 5, 5 * SLOT), (6, true));
    let mut back = vec![0; bytes.len()];
    stream.synchronize().unwrap();
    stream.download(&lease, buf, &mut back).unwrap();
    assert!(back == bytes, "every byte is in the right location");
}

/// Uploads pieces of these sizes, one after another, through slots of 1,000 bytes, and reads the device's bytes
/// back.
fn in_bulk(n_threads: usize, sizes: &[usize]) -> (Vec<u8>, Vec<u8>) {
    let sim = SimDriver::new(SimOptions { schedule: SimSchedule::Lazy, ..SimOptions::default() });
    let ctx = Device::simulated(&sim).unwrap().context().unwrap();
    let mut stream = ctx.stream().unwrap();
    let total: usize = sizes.iter().sum();
    let mut layout = MemoryLayout::new("uploads");
    let region = layout.device("weights", total as u64);
    let memory = Memory::plan(&ctx, &layout).unwrap();
    let (mut lease, buf) = (memory.lease().unwrap(), memory.buf(region));
    let bytes: Vec<u8> = (0..total).map(|i| (i * 7 % 251) as u8).collect();
    let options = BulkOptions { n_threads, slot_bytes: 1000 };
    let sent = stream.bulk(&mut lease, options, |bulk| {
        let mut at = 0;
        for &size in sizes {
            bulk.push(buf.slice(at as u64, size as u64)?, &bytes[at..at + size])?;
            at += size;
        }
        Ok::<_, DriverError>(at)
    });
    assert_eq!(sent.unwrap(), total);
    let stats = sim.stats();
    let waits = [DriverCall::StreamQuery, DriverCall::StreamSynchronize].map(|c| stats.n_calls(c));
    assert_eq!(waits, [0; 2], "nothing waits for the whole stream");
    let n_parts: usize = sizes.iter().map(|size| size.div_ceil(1000)).sum();
    assert_eq!(stats.n_calls(DriverCall::MemcpyHtodAsync) as usize, n_parts);
    let mut back = vec![0; total];
    stream.synchronize().unwrap();
    stream.download(&lease, buf, &mut back).unwrap();
    (back, bytes)
}

#[test]
fn bytes_in_bulk_arrive_whole_with_any_number_of_threads() {
    for n_threads in [0, 1, 2, 5] {
        for sizes in [&[1][..], &[0, 1000, 0], &[2500, 1, 999, 40_000, 7], &[64, 64, 64, 64, 64, 64, 64]] {
            let (back, bytes) = in_bulk(n_threads, sizes);
            assert!(back == bytes, "{n_threads} threads, {sizes:?}");
        }
    }
}

#[test]
fn a_launch_in_a_bulk_upload_sees_bytes_pushed_before_it_and_nothing_later() {
    for n_threads in [0, 3] {
        let device = Device::open(DeviceKind::Sim(SimOptions::default())).unwrap();
        let ctx = device.context().unwrap();
        let mut stream = ctx.stream().unwrap();
        let mut layout = MemoryLayout::new("uploads");
        let [staged, sums] = [("staged", 4096), ("sums", 4 * 4096)].map(|(n, b)| layout.device(n, b));
        let memory = Memory::plan(&ctx, &layout).unwrap();
        let [staged, sums] = [staged, sums].map(|r| memory.buf(r));
        // SAFETY: this crate's own PTX text.
        let module = unsafe { Module::load(&ctx, "probe", probe::PROBE_PTX) }.unwrap();
        let add = module.function("refrain_probe_add").unwrap();
        let rounds: Vec<Vec<u8>> = (1..=4_u32).map(|v| v.to_le_bytes().repeat(1024)).collect();
        let mut lease = memory.lease().unwrap();
        let options = BulkOptions { n_threads, slot_bytes: 1000 };
        let sent: Result<(), DriverError> = stream.bulk(&mut lease, options, |bulk| {
            for (i, bytes) in rounds.iter().enumerate() {
                let to = sums.slice(4096 * i as u64, 4096)?;
                bulk.push(staged, bytes)?;
                let double =
                    LaunchBuilder::new(&add, 4, 256).step("double").write(to).read(staged).read(staged);
                // SAFETY: the kernel accesses 1024 words of each buffer, which is the size of each.
                bulk.launch(unsafe { double.baked(Baked(1024_u32)).build() })?;
            }
            Ok(())
        });
        sent.unwrap();
        let mut back = vec![0; 4 * 4096];
        stream.synchronize().unwrap();
        stream.download(&lease, sums, &mut back).unwrap();
        let want: Vec<u8> = (1..=4_u32).flat_map(|v| (2 * v).to_le_bytes().repeat(1024)).collect();
        assert!(back == want, "{n_threads} threads");
    }
}

#[test]
fn an_upload_that_fails_or_panics_halfway_ends_its_threads_and_the_next_one_works() {
    let sim = SimDriver::new(SimOptions::default());
    let ctx = Device::simulated(&sim).unwrap().context().unwrap();
    let mut stream = ctx.stream().unwrap();
    let mut layout = MemoryLayout::new("uploads");
    let region = layout.device("weights", 10_000);
    let memory = Memory::plan(&ctx, &layout).unwrap();
    let (mut lease, buf) = (memory.lease().unwrap(), memory.buf(region));
    let bytes = vec![3; 10_000];
    let options = BulkOptions { n_threads: 3, slot_bytes: 1000 };
    let short: Result<(), DriverError> = stream.bulk(&mut lease, options, |bulk| {
        bulk.push(buf, &bytes)?;
        bulk.push(buf, &bytes[1..])
    });
    assert!(matches!(short, Err(DriverError::SizeMismatch { .. })), "{short:?}");
    let panicked: Result<(), DriverError> = stream.bulk(&mut lease, options, |bulk| {
        bulk.push(buf, &bytes)?;
        panic!("on purpose")
    });
    assert!(matches!(panicked, Err(DriverError::Panicked { .. })), "{panicked:?}");
    let whole: Result<(), DriverError> = stream.bulk(&mut lease, options, |bulk| bulk.push(buf, &bytes));
    whole.unwrap();
    let mut back = vec![0; bytes.len()];
    stream.synchronize().unwrap();
    stream.download(&lease, buf, &mut back).unwrap();
    assert!(back == bytes);
}

/// Makes a copy out of the only slot without recording its event, directly followed by another copy.
fn copies_when_an_event_fails(nth: u64) -> [Vec<u8>; 2] {
    let sim = SimDriver::new(SimOptions { schedule: SimSchedule::Lazy, ..SimOptions::default() });
    let ctx = Device::simulated(&sim).unwrap().context().unwrap();
    let mut stream = ctx.stream().unwrap();
    let mut layout = MemoryLayout::new("uploads");
    let regions = ["first", "second"].map(|name| layout.device(name, 64));
    let memory = Memory::plan(&ctx, &layout).unwrap();
    let (mut lease, [first, second]) = (memory.lease().unwrap(), regions.map(|r| memory.buf(r)));
    let mut staging = Staging::new(&ctx, 1, 64).unwrap();
    for _ in 1..nth {
        stream.stage(&mut lease, &mut staging, first, &[9; 64]).unwrap();
    }
    sim.inject(FaultScript::parse("on 1st event_record: fail 999").unwrap());
    let failed = stream.stage(&mut lease, &mut staging, first, &[1; 64]);
    assert!(matches!(failed, Err(DriverError::Driver { call: "cuEventRecord", .. })), "{failed:?}");
    stream.stage(&mut lease, &mut staging, second, &[2; 64]).unwrap();
    assert_eq!(sim.unused_faults(), Vec::<String>::new());
    [first, second].map(|buf| {
        let mut back = vec![0; 64];
        stream.download(&lease, buf, &mut back).unwrap();
        back
    })
}

#[test]
fn a_slot_whose_event_was_not_recorded_is_not_written_before_its_copy_has_run() {
    // The first copy out of the slot, whose event was never recorded, and a later one, whose event is stale.
    for nth in [1, 2] {
        assert_eq!(copies_when_an_event_fails(nth), [[1; 64], [2; 64]], "copy {nth}");
    }
}

#[test]
fn a_slot_that_is_in_flight_on_another_stream_without_an_event_is_refused() {
    let sim = SimDriver::new(SimOptions { schedule: SimSchedule::Lazy, ..SimOptions::default() });
    let ctx = Device::simulated(&sim).unwrap().context().unwrap();
    let [mut one, mut other] = [(); 2].map(|()| ctx.stream().unwrap());
    let [a, b] = ["a", "b"].map(|name| {
        let mut layout = MemoryLayout::new(name);
        let region = layout.device("bytes", 64);
        let memory = Memory::plan(&ctx, &layout).unwrap();
        (memory.lease().unwrap(), memory.buf(region))
    });
    let ((mut a_lease, a), (mut b_lease, b)) = (a, b);
    let mut staging = Staging::new(&ctx, 1, 64).unwrap();
    sim.inject(FaultScript::parse("on 1st event_record: fail 999").unwrap());
    one.stage(&mut a_lease, &mut staging, a, &[1; 64]).unwrap_err();
    let refused = other.stage(&mut b_lease, &mut staging, b, &[2; 64]);
    assert!(matches!(refused, Err(DriverError::LeaseBusy { .. })), "{refused:?}");
    one.synchronize().unwrap();
    other.stage(&mut b_lease, &mut staging, b, &[2; 64]).unwrap();
    let mut back = [0; 64];
    other.download(&b_lease, b, &mut back).unwrap();
    assert_eq!(back, [2; 64]);
}
