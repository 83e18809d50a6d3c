//! Upload speed of weights: with one thread and two slots, and in bulk with several thread counts and slot sizes.

use std::time::Instant;

use refrain_driver::{BulkOptions, Device, DeviceKind, DriverError, Memory, MemoryLayout};

/// About the tensors of a model with 1.2 billion 16-bit weights.
const TENSORS: [(usize, usize); 3] = [(1, 525 << 20), (48, 32 << 20), (32, 8 << 20)];

#[test]
#[cfg_attr(not(feature = "gpu-tests"), ignore = "needs a CUDA device: cargo xtask gpu-bundle")]
fn prints_the_speed_of_bulk_uploads() {
    let device = Device::open(DeviceKind::Cuda(0)).unwrap();
    let ctx = device.context().unwrap();
    let mut stream = ctx.stream().unwrap();
    let tensors: Vec<Vec<u8>> =
        TENSORS.iter().flat_map(|&(n, bytes)| (0..n).map(move |i| vec![i as u8 | 1; bytes])).collect();
    let total: usize = tensors.iter().map(Vec::len).sum();
    let mut layout = MemoryLayout::new("weights");
    let region = layout.device("weights", total as u64);
    let memory = Memory::plan(&ctx, &layout).unwrap();
    let (mut lease, buf) = (memory.lease().unwrap(), memory.buf(region));
    let report = |what: String, began: Instant| {
        let seconds = began.elapsed().as_secs_f64();
        println!("{what:<40} {:>6.1} ms {:>6.1} GB/s", 1e3 * seconds, total as f64 / 1e9 / seconds);
    };
    for round in 0..2 {
        let (began, mut at) = (Instant::now(), 0);
        for tensor in &tensors {
            let part = buf.slice(at, tensor.len() as u64).unwrap();
            stream.upload_ahead(&mut lease, part, tensor).unwrap();
            at += tensor.len() as u64;
        }
        stream.synchronize().unwrap();
        report(format!("one thread, two slots, round {round}"), began);
    }
    let tries = [(0, 1024), (1, 1024), (2, 1024), (4, 1024), (8, 1024), (12, 1024), (16, 1024)];
    for (n_threads, kib) in tries.into_iter().chain([(8, 256), (8, 512), (8, 2048), (8, 4096)]) {
        for round in 0..2 {
            let (began, mut at) = (Instant::now(), 0);
            let options = BulkOptions { n_threads, slot_bytes: kib << 10 };
            let sent: Result<(), DriverError> = stream.bulk(&mut lease, options, |bulk| {
                for tensor in &tensors {
                    bulk.push(buf.slice(at, tensor.len() as u64)?, tensor)?;
                    at += tensor.len() as u64;
                }
                Ok(())
            });
            sent.unwrap();
            stream.synchronize().unwrap();
            report(format!("{n_threads} threads, slots of {kib} KiB, round {round}"), began);
        }
    }
    let mut last = vec![0; 8 << 20];
    stream
        .download(&lease, buf.slice((total - last.len()) as u64, last.len() as u64).unwrap(), &mut last)
        .unwrap();
    assert!(last == tensors[tensors.len() - 1]);
}
