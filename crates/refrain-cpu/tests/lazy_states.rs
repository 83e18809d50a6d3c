//! A KV cache takes memory only as it fills.
#![cfg(target_os = "linux")]

use refrain_cpu::CpuBackend;
use refrain_graph::{Backend, State, TensorType};
use refrain_tensor::DType;

fn resident_bytes() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().strip_suffix("kB").unwrap().trim().parse::<usize>().unwrap() * 1024
}

/// Caches of 60 layers, one MiB per 32 blocks each.
fn caches(n_blocks: usize) -> Vec<State> {
    let ty = TensorType::new(DType::F16, [n_blocks, 4, 64, 64]);
    (0..60).map(|i| State::paged(format!("cache {i}"), ty)).collect()
}

#[test]
fn unwritten_states_take_no_memory_and_neither_does_growing_them() {
    let backend = CpuBackend::new(1).unwrap();
    let before = resident_bytes();
    let mut states = backend.allocate(&caches(32)).unwrap();
    let made = resident_bytes().saturating_sub(before);
    assert!(made < 8 << 20, "{made} of {} bytes are resident", 60 << 20);
    for blocks in [64, 96, 160] {
        backend.resize(&mut states, &caches(blocks)).unwrap();
        let grown = resident_bytes().saturating_sub(before);
        assert!(grown < 8 << 20, "{grown} bytes are resident with {blocks} blocks");
    }
}
