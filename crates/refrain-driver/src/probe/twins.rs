//! Twins of the probe kernels for the simulated device.

use crate::api::DevicePtr;
use crate::sim::{KernelResult, SimDriver, SimKernel};

/// Registers the probe kernels with a simulated device.
pub(crate) fn register_twins(sim: &SimDriver) {
    sim.register("refrain_probe_nothing", &[], |_| Ok(()));
    sim.register("refrain_probe_fill", &[8, 4, 4], |k| {
        let (dst, value, n) = (k.ptr(0)?, k.arg::<u32>(1)?, k.arg::<u32>(2)?);
        k.write(dst, &vec![value; n as usize])
    });
    for name in ["refrain_probe_add", "refrain_probe_add_pdl"] {
        sim.register(name, &[8, 8, 8, 4], |k| {
            let (dst, n) = (k.ptr(0)?, k.arg::<u32>(3)? as usize);
            let (a, b) = (k.read::<u32>(k.ptr(1)?, n)?, k.read::<u32>(k.ptr(2)?, n)?);
            let sum: Vec<u32> = a.iter().zip(&b).map(|(a, b)| a.wrapping_add(*b)).collect();
            k.write(dst, &sum)
        });
    }
    sim.register("refrain_probe_read", &[8, 8, 8], |k| {
        let (src, n, sink) = (k.ptr(0)?, k.arg::<u64>(1)?, k.ptr(2)?);
        let sum = k.view::<u32>(src, 4 * n as usize)?.iter().fold(0, |sum, word| sum ^ word);
        if sum == 0x7FC5_AB31 { k.write_one(sink, sum) } else { Ok(()) }
    });
    sim.register("refrain_probe_publish", &[8, 8, 8, 4, 4], |k| publish(k).map(drop));
    sim.register("refrain_probe_repeat", &[8, 8, 8, 4, 4, 8], |k| {
        let ring = k.ptr(0)?;
        let (consumed, until) = (k.load_acquire_u64(ring)?, k.load_acquire_u64(ring.add(8))?);
        let number = publish(k)?;
        let n_entries = u64::from(k.arg::<u32>(3)?);
        let another = number < until && number.wrapping_sub(consumed) < n_entries;
        if !another {
            k.store_release_u64(ring.add(16), number)?;
        }
        match k.arg::<u64>(5)? {
            0 => {}
            condition => k.set_condition(condition, u32::from(another)),
        }
        Ok(())
    });
    sim.register("refrain_probe_spin", &[8], |k| {
        // Simulated kernels take no time. Cap the sleep, so that a test does not wait for long.
        let nanoseconds: u64 = k.arg(0)?;
        std::thread::sleep(std::time::Duration::from_nanos(nanoseconds.min(50_000_000)));
        Ok(())
    });
    sim.register("refrain_probe_poke", &[8, 4], |k| {
        let (address, value) = (DevicePtr(k.arg(0)?), k.arg::<u32>(1)?);
        k.write_one(address, value)
    });
}

/// Writes a word to the next entry of a ring; returns the entry's number.
fn publish(k: &mut SimKernel<'_>) -> KernelResult<u64> {
    let (ring, count, value) = (k.ptr(0)?, k.ptr(1)?, k.ptr(2)?);
    let (n_entries, stride) = (u64::from(k.arg::<u32>(3)?), u64::from(k.arg::<u32>(4)?));
    let n: u64 = k.read_one(count)?;
    let entry = ring.add(crate::ring::RING_HEADER_BYTES + n % n_entries.max(1) * stride);
    let word: u32 = k.read_one(value)?;
    k.write_one(entry.add(8), word)?;
    k.write_one(count, n + 1)?;
    k.store_release_u64(entry, n + 1)?;
    Ok(n + 1)
}
