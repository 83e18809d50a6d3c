//! Reference evaluation of graphs: every value gets its own memory.

use refrain_graph::{ControlBlock, ControlLayout, Graph, InputId, Op, TensorType, ValueOrigin, View};
use refrain_reference::{In, Out, ReferenceError};
use refrain_tensor::{Bytes, DType, HostTensor, TensorError};

/// Inputs of a graph, each list in the graph's order.
#[derive(Clone, Debug, Default)]
pub struct Feed {
    /// Weights.
    pub weights: Vec<HostTensor>,
    /// Step inputs, contiguous.
    pub inputs: Vec<HostTensor>,
    /// States before the step, contiguous. Every case of the table starts from zeros, like the states that a
    /// backend creates.
    pub states: Vec<HostTensor>,
}

impl Feed {
    /// Packs the step inputs in a control block.
    ///
    /// # Panics
    /// If they do not match the layout.
    pub fn control(&self, layout: &ControlLayout) -> ControlBlock {
        let mut block = ControlBlock::new(layout);
        for (i, tensor) in self.inputs.iter().enumerate() {
            let id = InputId::from_idx(i);
            let words = || tensor.bytes().as_slice().as_chunks::<4>().0.iter();
            let set = match tensor.dtype() {
                DType::F32 => block.set_f32(id, &words().map(|w| f32::from_le_bytes(*w)).collect::<Vec<_>>()),
                DType::I32 => block.set_i32(id, &words().map(|w| i32::from_le_bytes(*w)).collect::<Vec<_>>()),
                DType::U32 => block.set_u32(id, &words().map(|w| u32::from_le_bytes(*w)).collect::<Vec<_>>()),
                DType::F16
                | DType::BF16
                | DType::I64
                | DType::U8
                | DType::Q4_0
                | DType::Q4_1
                | DType::Q5_0
                | DType::Q5_1
                | DType::Q8_0
                | DType::Q2_K
                | DType::Q3_K
                | DType::Q4_K
                | DType::Q5_K
                | DType::Q6_K
                | DType::IQ4_NL
                | DType::IQ4_XS
                | DType::MXFP4
                | DType::IQ2_XXS
                | DType::IQ2_XS
                | DType::IQ2_S
                | DType::IQ3_XXS
                | DType::IQ3_S => panic!("a control block cannot hold {}", tensor.dtype()),
            };
            set.unwrap_or_else(|e| panic!("{e}"));
        }
        block
    }
}

/// Evaluates the graph's outputs, contiguous and in its order.
pub fn evaluate(graph: &Graph, feed: &Feed) -> Result<Vec<HostTensor>, ReferenceError> {
    let values = evaluate_values(graph, feed)?;
    graph.outputs().iter().map(|o| dense(&values[o.value.idx()])).collect()
}

/// Evaluates every value of the graph, in its order; views keep their own layout.
pub fn evaluate_values(graph: &Graph, feed: &Feed) -> Result<Vec<HostTensor>, ReferenceError> {
    let mut values: Vec<Option<HostTensor>> = vec![None; graph.values().len()];
    for (slot, value) in values.iter_mut().zip(graph.values()) {
        *slot = match value.origin {
            ValueOrigin::Input(id) => Some(feed.inputs[id.idx()].clone()),
            ValueOrigin::Weight(id) => Some(feed.weights[id.idx()].clone()),
            ValueOrigin::State(id) => Some(feed.states[id.idx()].clone()),
            ValueOrigin::Node { .. } => None,
        };
    }
    for node in graph.nodes() {
        let inputs: Vec<HostTensor> = node.inputs.iter().filter_map(|v| values[v.idx()].clone()).collect();
        assert_eq!(
            inputs.len(),
            node.inputs.len(),
            "{} reads a value that no earlier node produces",
            node.label
        );
        let outputs = if let Op::View(view) = &node.op {
            vec![apply(view, &inputs[0])?]
        } else {
            run(&node.op, &inputs, &graph.output_types(node))?
        };
        for (id, output) in node.outputs.iter().zip(outputs) {
            values[id.idx()] = Some(output);
        }
    }
    Ok(values.into_iter().flatten().collect())
}

fn apply(view: &View, x: &HostTensor) -> Result<HostTensor, ReferenceError> {
    match view.apply(x.layout()) {
        Ok(layout) => Ok(x.with_layout(layout)?),
        // The meaning of a view does not depend on whether it needs a copy.
        Err(TensorError::NotAView { .. }) => {
            let x = dense(x)?;
            Ok(x.with_layout(view.apply(x.layout())?)?)
        }
        Err(e) => Err(e.into()),
    }
}

fn run(op: &Op, inputs: &[HostTensor], types: &[TensorType]) -> Result<Vec<HostTensor>, ReferenceError> {
    let ins: Vec<In<'_>> = inputs.iter().map(In::from).collect();
    let size = |ty: &TensorType| {
        let partial = TensorError::PartialBlocks { dtype: ty.dtype, shape: ty.shape };
        ty.dtype.bytes_for(ty.shape.n_elements()).ok_or(partial)
    };
    // NaN in every float, so that an element the op forgets to write is noticed.
    let mut bytes: Vec<Vec<u8>> =
        types.iter().map(|ty| Ok(vec![0xFF; size(ty)?])).collect::<Result<_, TensorError>>()?;
    // The output of a state update starts as a copy of the input state.
    for (output, input) in op.state_updates() {
        bytes[output] = ins[input].to_dense()?;
    }
    let changed = |i: usize| op.state_updates().iter().any(|(_, input)| *input == i);
    let ins: Vec<In<'_>> =
        ins.into_iter().enumerate().filter(|(i, _)| !changed(*i)).map(|(_, x)| x).collect();
    let mut outs: Vec<Out<'_>> = types.iter().zip(&mut bytes).map(|(&ty, bytes)| Out { ty, bytes }).collect();
    refrain_reference::run(op, &ins, &mut outs)?;
    let tensor =
        |(ty, bytes): (&TensorType, Vec<u8>)| Ok(HostTensor::new(ty.dtype, ty.shape, Bytes::new(bytes))?);
    types.iter().zip(bytes).map(tensor).collect()
}

fn dense(x: &HostTensor) -> Result<HostTensor, ReferenceError> {
    Ok(HostTensor::new(x.dtype(), x.shape(), Bytes::new(In::from(x).to_dense()?))?)
}
