//! Host functions in a plan.

use refrain_cpu::CpuBackend;
use refrain_graph::{
    Backend, ControlBlock, GraphBuilder, HostBuf, HostCall, HostCallError, HostFn, Io, Op, RunError,
};
use refrain_graph::{TensorType, Unary};
use refrain_tensor::DType;
use std::sync::Arc;

/// Answers 42, except to negative numbers.
struct Oracle;

impl HostFn for Oracle {
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, HostCallError> {
        Ok(inputs.to_vec())
    }

    fn call(&self, inputs: &[HostBuf<'_>], outputs: &mut [&mut [u8]]) -> Result<(), HostCallError> {
        let asked = f32::from_le_bytes(inputs[0].bytes.try_into().unwrap());
        if asked < 0.0 {
            return Err(HostCallError(format!("{asked} is not a valid question")));
        }
        outputs[0].copy_from_slice(&42f32.to_le_bytes());
        Ok(())
    }
}

#[test]
fn the_error_of_a_host_function_is_reported_unchanged() {
    let call = HostCall { name: "oracle", because: "it is far away", function: Arc::new(Oracle) };
    let mut builder = GraphBuilder::new(vec![], vec![]);
    builder.scope("blk.2");
    let x = builder.input("x", TensorType::new(DType::F32, [1])).unwrap();
    let x = builder.unary(Unary::Neg, x).unwrap();
    let y = builder.node(Op::HostCall(call), &[x], "ask").unwrap()[0];
    builder.output("y", y).unwrap();

    let mut backend = CpuBackend::new(1).unwrap();
    let weights = backend.load(&[], vec![]).unwrap();
    let mut states = backend.allocate(&[]).unwrap();
    let mut compiled = backend.compile(&builder.finish()).unwrap();
    let mut control = ControlBlock::new(backend.plan(&compiled).control());
    let x = control.layout().find("x").unwrap();
    let mut ask = |value: f32| {
        control.set_f32(x, &[value]).unwrap();
        let io = Io { weights: &weights, states: &mut states, control: control.bytes() };
        backend.run(&mut compiled, io).map(|_| ())
    };
    ask(-1.0).unwrap();
    let error = ask(1.0).unwrap_err();
    assert!(matches!(error, RunError::Host { .. }), "{error}");
    assert_eq!(error.to_string(), "blk.2.ask: -1 is not a valid question");
}
