//! Memory taken while reading a damaged file is bounded by its size.
//!
//! One test in a program of its own: the counter counts every thread.

use refrain_formats::gguf::{Array, Gguf, GgufWriter, StrArray};
use refrain_formats::hf::check_safetensors;
use refrain_tensor::{Bytes, DType, Shape};
use stats_alloc::{INSTRUMENTED_SYSTEM, Region, StatsAlloc};
use std::alloc::System;

#[global_allocator]
static COUNTER: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

/// Bytes allocated while `work` ran, whether they were freed again or not.
fn allocated(work: impl FnOnce()) -> usize {
    let region = Region::new(COUNTER);
    work();
    region.change().bytes_allocated
}

fn model() -> Vec<u8> {
    let mut w = GgufWriter::new();
    w.set("general.architecture", "llama").unwrap();
    w.set("tokens", (0..50).map(|i| i.to_string()).collect::<StrArray>()).unwrap();
    w.set("empty", Array::Array(vec![Array::U8([].into()); 40].into())).unwrap();
    w.set("scores", Array::F32([0.5; 50].into())).unwrap();
    for i in 0..10 {
        w.tensor(&format!("w{i}"), DType::F32, Shape::from([8]), Bytes::new(vec![0; 32])).unwrap();
    }
    w.to_vec()
}

#[test]
fn readers_take_no_more_memory_than_a_small_multiple_of_the_file() {
    let intact = model();
    let mut worst = 0;
    for at in 0..intact.len() {
        for value in [u64::MAX, 1 << 62, 1 << 40, 0xffff_ffff, 1 << 20, 1 << 8] {
            let mut bytes = intact.clone();
            let n = bytes.len();
            let width = 8.min(n - at);
            bytes[at..at + width].copy_from_slice(&value.to_le_bytes()[..width]);
            let bytes = Bytes::new(bytes);
            worst = worst.max(allocated(|| drop(Gguf::from_bytes(bytes))));
        }
    }
    // The tables of the tensors and keys are a few times as large as in the file; messages take a little more.
    let limit = 16 * intact.len() + 4096;
    assert!(worst <= limit, "{worst} bytes for a file of {}, at most {limit} expected", intact.len());

    let header = br#"{"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}}"#;
    let intact = [&(header.len() as u64).to_le_bytes()[..], header, &[0; 24]].concat();
    for at in 0..intact.len() {
        for value in [0, b'0', b'9', b'[', 0xff] {
            let mut bytes = intact.clone();
            bytes[at] = value;
            let taken = allocated(|| drop(check_safetensors(&bytes)));
            assert!(taken <= 64 * intact.len() + 4096, "{taken} bytes with byte {at} set to {value}");
        }
    }
}
