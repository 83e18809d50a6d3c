//! Operations on graphs by handle: adding nodes, looking up children, destroying.

use std::sync::Arc;

use super::graphs::{GraphDef, GraphSlot, NodeWork, SimCondition, SimNode};
use super::state::SimState;
use crate::api::{Code, ConditionHandle, Dependency, EdgeKind, GraphHandle, NodeHandle, NodeKind, RawResult};

impl SimState {
    pub(super) fn graph(&self, handle: GraphHandle) -> RawResult<&GraphSlot> {
        self.graphs.get(&handle).ok_or(Code::INVALID_HANDLE)
    }

    pub(super) fn add_node(
        &mut self,
        graph: GraphHandle,
        deps: &[Dependency],
        work: NodeWork,
    ) -> RawResult<NodeHandle> {
        let slot = self.graph(graph)?;
        if slot.parent.is_some() && !slot.is_body {
            return Err(Code::NOT_SUPPORTED);
        }
        let node = SimNode { handle: NodeHandle(0), work, deps: deps.to_vec() };
        for (i, dep) in deps.iter().enumerate() {
            let on = slot.def.position(dep.on).ok_or(Code::INVALID_VALUE)?;
            let kernels = [slot.def.nodes[on].kind(), node.kind()] == [NodeKind::Kernel; 2];
            if (dep.kind == EdgeKind::Programmatic && !kernels) || deps[..i].iter().any(|d| d.on == dep.on) {
                return Err(Code::INVALID_VALUE);
            }
        }
        let handle = NodeHandle(self.handle());
        if let Some(slot) = self.graphs.get_mut(&graph) {
            Arc::make_mut(&mut slot.def).nodes.push(SimNode { handle, ..node });
        }
        Ok(handle)
    }

    /// A condition for a loop of this graph.
    pub(super) fn create_condition(
        &mut self,
        graph: GraphHandle,
        initial: u32,
    ) -> RawResult<ConditionHandle> {
        self.graph(graph)?;
        let handle = ConditionHandle(self.handle());
        let condition = SimCondition { graph, initial, is_used: false, value: initial };
        self.conditions.insert(handle, condition);
        Ok(handle)
    }

    /// Adds a loop and the graph for its body.
    pub(super) fn add_loop(
        &mut self,
        graph: GraphHandle,
        deps: &[Dependency],
        condition: ConditionHandle,
    ) -> RawResult<(NodeHandle, GraphHandle)> {
        let of_graph = self.conditions.get(&condition).is_some_and(|c| c.graph == graph && !c.is_used);
        if !of_graph {
            return Err(Code::INVALID_VALUE);
        }
        let body = GraphHandle(self.handle());
        let node = self.add_node(graph, deps, NodeWork::Loop(condition, body))?;
        let def = Arc::new(GraphDef::default());
        self.graphs.insert(body, GraphSlot { def, parent: Some(graph), is_body: true });
        self.conditions.get_mut(&condition).into_iter().for_each(|c| c.is_used = true);
        Ok((node, body))
    }

    /// Checks the loops of a graph that is to be instantiated, as measured.
    pub(super) fn check_loops(&self, graph: GraphHandle) -> RawResult<()> {
        if self.conditions.values().any(|c| c.graph == graph && !c.is_used) {
            return Err(Code::INVALID_VALUE);
        }
        if self.execs.values().any(|exec| exec.of_loop == Some(graph)) {
            return Err(Code::NOT_SUPPORTED);
        }
        self.check_bodies(&self.graph(graph)?.def)
    }

    fn check_bodies(&self, def: &GraphDef) -> RawResult<()> {
        for node in &def.nodes {
            let NodeWork::Loop(_, body) = &node.work else { continue };
            let body = &self.graph(*body)?.def;
            if !body.fits_in_a_loop() {
                return Err(Code::INVALID_VALUE);
            }
            self.check_bodies(body)?;
        }
        Ok(())
    }

    pub(super) fn destroy_graph(&mut self, graph: GraphHandle) {
        self.graphs.remove(&graph);
        let borrowed: Vec<GraphHandle> =
            self.graphs.iter().filter(|(_, g)| g.parent == Some(graph)).map(|(&h, _)| h).collect();
        for child in borrowed {
            self.children.retain(|_, h| *h != child);
            self.destroy_graph(child);
        }
    }

    /// The child graph of a node, borrowed from the node's graph.
    pub(super) fn child_graph(&mut self, node: NodeHandle) -> RawResult<GraphHandle> {
        if let Some(&handle) = self.children.get(&node) {
            return Ok(handle);
        }
        let found = self.graphs.iter().find_map(|(&h, g)| {
            let i = g.def.position(node)?;
            match &g.def.nodes[i].work {
                NodeWork::Child(def) => Some((h, def.clone())),
                NodeWork::Op(..) | NodeWork::Loop(..) => None,
            }
        });
        let (parent, def) = found.ok_or(Code::INVALID_VALUE)?;
        let handle = GraphHandle(self.handle());
        self.graphs.insert(handle, GraphSlot { def, parent: Some(parent), is_body: false });
        self.children.insert(node, handle);
        Ok(handle)
    }
}
