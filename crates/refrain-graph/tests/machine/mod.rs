//! Runs plans over one arena, as a backend does, and checks each step against values in separate memory.

use proptest::prelude::*;
use refrain_graph::{Graph, Op, Operand, Place, Plan, Step};
use refrain_reference::{In, Out};
use refrain_tensor::{HostTensor, Layout};
use refrain_testkit::{Feed, evaluate_values};

pub(crate) struct Machine<'a> {
    plan: &'a Plan,
    feed: &'a Feed,
    arena: Vec<u8>,
    control: Vec<u8>,
    states: Vec<Vec<u8>>,
}

impl<'a> Machine<'a> {
    pub(crate) fn new(plan: &'a Plan, feed: &'a Feed) -> Machine<'a> {
        Machine {
            plan,
            feed,
            // NaN in every float dtype.
            arena: vec![0xFF; plan.arena_bytes()],
            control: feed.control(plan.control()).bytes().to_vec(),
            states: feed.states.iter().map(|s| s.bytes().as_slice().to_vec()).collect(),
        }
    }

    /// Runs every step. Before a step all its inputs must be intact; after it, every buffer that no later step
    /// needs is poisoned.
    pub(crate) fn run(&mut self, graph: &Graph) -> Result<(), TestCaseError> {
        let want = evaluate_values(graph, self.feed).map_err(|e| TestCaseError::fail(e.to_string()))?;
        let plan = self.plan;
        for (s, step) in plan.steps().iter().enumerate() {
            let node = graph.node(step.node);
            for (i, (operand, value)) in step.inputs.iter().zip(&node.inputs).enumerate() {
                let what = format!("input {i} of step {s}, {}", step.label);
                same(&self.dense(operand)?, &want[value.idx()], &what)?;
            }
            self.run_step(step, s % 2 == 1)?;
            for (i, (operand, value)) in step.outputs.iter().zip(&node.outputs).enumerate() {
                let what = format!("output {i} of step {s}, {}", step.label);
                same(&self.dense(operand)?, &want[value.idx()], &what)?;
            }
            self.poison_after(s);
        }
        for (operand, output) in plan.outputs().iter().zip(graph.outputs()) {
            same(&self.dense(operand)?, &want[output.value.idx()], &output.name)?;
        }
        Ok(())
    }

    fn bytes(&self, operand: &Operand) -> &[u8] {
        let buffer = self.plan.buffer(operand.buffer);
        match buffer.place {
            Place::Arena { offset } => &self.arena[offset..offset + buffer.bytes],
            Place::Control { offset, .. } => &self.control[offset..offset + buffer.bytes],
            Place::Weight(id) => self.feed.weights[id.idx()].bytes().as_slice(),
            Place::State(id) => &self.states[id.idx()],
        }
    }

    fn write(&mut self, operand: &Operand, at: usize, bytes: &[u8]) {
        let buffer = self.plan.buffer(operand.buffer);
        let whole = match buffer.place {
            Place::Arena { offset } => &mut self.arena[offset..offset + buffer.bytes],
            Place::State(id) => &mut self.states[id.idx()],
            Place::Control { .. } | Place::Weight(_) => panic!("a step writes to {:?}", buffer.place),
        };
        whole[at..at + bytes.len()].copy_from_slice(bytes);
    }

    fn dense(&self, operand: &Operand) -> Result<Vec<u8>, TestCaseError> {
        let view = In { dtype: operand.dtype, layout: operand.layout, bytes: self.bytes(operand) };
        view.to_dense().map_err(|e| TestCaseError::fail(e.to_string()))
    }

    fn run_step(&mut self, step: &Step, backwards: bool) -> Result<(), TestCaseError> {
        let shares = |out: &Operand| step.inputs.iter().any(|i| i.buffer == out.buffer);
        if matches!(step.op, Op::KvAppend) || !step.outputs.iter().any(shares) {
            let whole = |o: &Operand| o.layout;
            return self.run_part(
                step,
                &step.inputs.iter().map(whole).collect::<Vec<_>>(),
                &whole_of(step),
                0,
            );
        }
        // In place: row by row, each read to its end before it is written, in an order that is not guaranteed.
        let shape = step.outputs[0].layout.shape();
        let outer = shape.dims()[..shape.rank().saturating_sub(1)].to_vec();
        let n_rows: usize = outer.iter().product();
        for r in 0..n_rows {
            let row = if backwards { n_rows - 1 - r } else { r };
            let mut index = vec![0; outer.len()];
            let mut left = row;
            for axis in (0..outer.len()).rev() {
                (index[axis], left) = (left % outer[axis], left / outer[axis]);
            }
            let at = |layout: Layout| {
                let cut = |l: Layout, (axis, &i): (usize, &usize)| l.slice(axis, i, 1).unwrap();
                index.iter().enumerate().fold(layout, cut)
            };
            let n_by_row = match step.op {
                Op::Binary(_) | Op::Gate(_) | Op::AddRmsNorm { .. } => 2,
                _ => 1,
            };
            let layouts: Vec<Layout> = (step.inputs.iter().enumerate())
                .map(|(i, o)| match &step.op {
                    _ if i < n_by_row => at(o.layout.broadcast_to(shape).unwrap()),
                    Op::Rope(_) if i == 1 => o.layout.slice(0, index[0], 1).unwrap(),
                    // The first product and the sequence of the row.
                    Op::Lora(_) if i == 1 || i == 3 => o.layout.slice(0, index[0], 1).unwrap(),
                    _ => o.layout,
                })
                .collect();
            let outs: Vec<Layout> = step.outputs.iter().map(|o| at(o.layout)).collect();
            self.run_part(step, &layouts, &outs, row * shape.dim_back(0))?;
        }
        Ok(())
    }

    fn run_part(
        &mut self,
        step: &Step,
        inputs: &[Layout],
        outputs: &[Layout],
        first: usize,
    ) -> Result<(), TestCaseError> {
        let part = |(o, &layout): (&Operand, &Layout)| In { dtype: o.dtype, layout, bytes: self.bytes(o) };
        let ins: Vec<In<'_>> = step.inputs.iter().zip(inputs).map(part).collect();
        let changes_a_state = matches!(step.op, Op::KvAppend);
        let types: Vec<_> = step
            .outputs
            .iter()
            .zip(outputs)
            .map(|(o, l)| refrain_graph::TensorType::new(o.dtype, l.shape()))
            .collect();
        let size = |ty: &refrain_graph::TensorType| ty.dtype.bytes_for(ty.shape.n_elements()).unwrap();
        let mut made: Vec<Vec<u8>> = types.iter().map(|ty| vec![0xEE; size(ty)]).collect();
        if changes_a_state {
            made[0] = ins[0].to_dense().unwrap();
        }
        let mut outs: Vec<Out<'_>> =
            types.iter().zip(&mut made).map(|(&ty, bytes)| Out { ty, bytes }).collect();
        refrain_reference::run(&step.op, &ins[usize::from(changes_a_state)..], &mut outs)
            .map_err(|e| TestCaseError::fail(format!("{}: {e}", step.label)))?;
        for (operand, bytes) in step.outputs.iter().zip(&made) {
            self.write(operand, first * operand.dtype.block_bytes(), bytes);
        }
        Ok(())
    }

    fn poison_after(&mut self, s: usize) {
        let mut needed = vec![false; self.arena.len()];
        for buffer in self.plan.buffers() {
            if let Place::Arena { offset } = buffer.place
                && buffer.first <= s
                && buffer.last > s
            {
                needed[offset..offset + buffer.bytes].fill(true);
            }
        }
        for (byte, needed) in self.arena.iter_mut().zip(needed) {
            if !needed {
                *byte = 0xFF;
            }
        }
    }
}

fn whole_of(step: &Step) -> Vec<Layout> {
    step.outputs.iter().map(|o| o.layout).collect()
}

fn same(got: &[u8], want: &HostTensor, what: &str) -> Result<(), TestCaseError> {
    let want = In::from(want).to_dense().map_err(|e| TestCaseError::fail(e.to_string()))?;
    let at = got.iter().zip(&want).position(|(g, w)| g != w);
    prop_assert_eq!(at, None, "{} differs", what);
    prop_assert_eq!(got.len(), want.len(), "{}", what);
    Ok(())
}
