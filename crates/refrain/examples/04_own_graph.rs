//! A graph of your own with a host step in the middle, and its plan.
//!
//! `cargo run --release -p refrain --example 04_own_graph`

use refrain::DType;
use refrain::graph::{
    GraphBuilder, HostBuf, HostCall, HostCallError, HostFn, Plan, PlanOptions, TensorType, Unary,
};
use std::sync::Arc;

/// Doubles its input on the host.
struct Double;

impl HostFn for Double {
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, HostCallError> {
        Ok(inputs.to_vec())
    }

    fn call(&self, inputs: &[HostBuf<'_>], outputs: &mut [&mut [u8]]) -> Result<(), HostCallError> {
        for (to, from) in outputs[0].chunks_exact_mut(4).zip(inputs[0].bytes.chunks_exact(4)) {
            let value = f32::from_le_bytes([from[0], from[1], from[2], from[3]]);
            to.copy_from_slice(&(2.0 * value).to_le_bytes());
        }
        Ok(())
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut b = GraphBuilder::new(Vec::new(), Vec::new());
    let x = b.input("x", TensorType::new(DType::F32, [2, 8]))?;
    let y = b.unary(Unary::Silu, x)?;
    let call = HostCall { name: "double", because: "it is a Rust function", function: Arc::new(Double) };
    let z = b.host_call(call, &[y])?[0];
    let out = b.unary(Unary::Tanh, z)?;
    b.output("out", out)?;

    let plan = Plan::new(&b.finish(), PlanOptions::default())?;
    for (i, segment) in plan.segments().iter().enumerate() {
        println!("segment {i}: {:?}, steps {:?}", segment.kind, segment.steps);
    }
    println!("arena: {} bytes, boundary buffers: {}", plan.arena_bytes(), plan.boundaries().len());
    Ok(())
}
