//! Operations on graphs by handle: adding nodes, looking up children, destroying.

use std::sync::Arc;

use super::graphs::{GraphSlot, NodeWork, SimNode};
use super::state::SimState;
use crate::api::{Code, Dependency, EdgeKind, GraphHandle, NodeHandle, NodeKind, RawResult};

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
        if slot.parent.is_some() {
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
                NodeWork::Op(..) => None,
            }
        });
        let (parent, def) = found.ok_or(Code::INVALID_VALUE)?;
        let handle = GraphHandle(self.handle());
        self.graphs.insert(handle, GraphSlot { def, parent: Some(parent) });
        self.children.insert(node, handle);
        Ok(handle)
    }
}
