//! Bulk uploads through the pinned slots: one is filled while the other is on its way.

use refrain_driver::sim::{Call, Schedule, SimDriver, SimOptions};
use refrain_driver::{Device, Layout, Memory};

/// The size of a slot.
const SLOT: usize = 4 << 20;

#[test]
fn the_host_fills_one_slot_while_the_device_copies_the_other_and_waits_only_for_a_third() {
    let sim = SimDriver::new(SimOptions { schedule: Schedule::Lazy, ..SimOptions::default() });
    let ctx = Device::simulated(&sim).unwrap().context().unwrap();
    let mut stream = ctx.stream().unwrap();
    let mut layout = Layout::new("uploads");
    let region = layout.device("weights", 5 * SLOT as u64);
    let memory = Memory::plan(&ctx, &layout).unwrap();
    let (mut lease, buf) = (memory.lease().unwrap(), memory.buf(region));
    let bytes: Vec<u8> = (0..5 * SLOT).map(|i| (i % 251) as u8).collect();
    let mut send = |from: usize, to: usize| {
        let part = buf.slice(from as u64, (to - from) as u64).unwrap();
        stream.upload_ahead(&mut lease, part, &bytes[from..to]).unwrap();
        let stats = sim.stats();
        let waits =
            [Call::EventSynchronize, Call::StreamQuery, Call::StreamSynchronize].map(|c| stats.n_calls(c));
        assert_eq!(waits, [0; 3], "nothing waits for the whole stream");
        (stats.n_calls(Call::MemcpyHtodAsync), stats.n_calls(Call::EventQuery) > 0)
    };
    // Two tensors of a slot each: both are on their way, neither was waited for.
    assert_eq!(send(0, SLOT - 5), (1, false));
    assert_eq!(send(SLOT - 5, 2 * SLOT - 5), (2, false));
    // What comes next needs a slot: it waits for the copy out of that one alone.
    assert_eq!(send(2 * SLOT - 5, 5 * SLOT), (6, true));
    let mut back = vec![0; bytes.len()];
    stream.synchronize().unwrap();
    stream.download(&lease, buf, &mut back).unwrap();
    assert!(back == bytes, "every byte is where it belongs");
}
