//! Explicit graphs of the real driver.

use cudarc::driver::sys;

use super::{PackedParams, RealDriver, attributes, call, check, out};
use crate::api::{
    Code, ConditionHandle, CopyEnd, Dependency, DevicePtr, Edge, EdgeKind, FunctionHandle, GraphHandle,
    LaunchConfig, NodeHandle, NodeKind, RawResult,
};

/// The edge that lets a kernel start early.
const PROGRAMMATIC: sys::CUgraphEdgeData = sys::CUgraphEdgeData {
    from_port: sys::CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC as u8,
    to_port: 0,
    type_: sys::CUgraphDependencyType::CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC as u8,
    reserved: [0; 5],
};

impl RealDriver {
    /// Adds a node with its full dependencies, then its programmatic ones. A failure removes the node again.
    pub(super) fn add_node(
        &self,
        graph: GraphHandle,
        deps: &[Dependency],
        add: impl FnOnce(*mut u64, &[u64]) -> u32,
    ) -> RawResult<NodeHandle> {
        let of = |kind| -> Vec<u64> { deps.iter().filter(|d| d.kind == kind).map(|d| d.on.0).collect() };
        let full = of(EdgeKind::Full);
        let mut node = 0;
        check(add(&mut node, &full))?;
        let early = of(EdgeKind::Programmatic);
        if !early.is_empty() {
            let to = vec![node; early.len()];
            let data = vec![PROGRAMMATIC; early.len()];
            // SAFETY: the three lists are equally long and outlive the call; all nodes belong to this live graph.
            let code = unsafe {
                (self.table.cuGraphAddDependencies_v2)(
                    graph.0,
                    early.as_ptr(),
                    to.as_ptr(),
                    data.as_ptr(),
                    early.len(),
                )
            };
            self.undo_unless(check(code), node)?;
        }
        Ok(NodeHandle(node))
    }

    fn undo_unless(&self, result: RawResult<()>, node: u64) -> RawResult<()> {
        if result.is_err() {
            let _ = call!(self, cuGraphDestroyNode(node));
        }
        result
    }

    pub(super) fn add_kernel(
        &self,
        graph: GraphHandle,
        deps: &[Dependency],
        function: FunctionHandle,
        config: &LaunchConfig,
        params: &[u8],
    ) -> RawResult<NodeHandle> {
        let mut packed = PackedParams::new(params);
        let kernel = sys::CUDA_KERNEL_NODE_PARAMS {
            func: function.0 as sys::CUfunction,
            gridDimX: config.grid[0],
            gridDimY: config.grid[1],
            gridDimZ: config.grid[2],
            blockDimX: config.block[0],
            blockDimY: config.block[1],
            blockDimZ: config.block[2],
            sharedMemBytes: config.shared_bytes,
            kernelParams: std::ptr::null_mut(),
            extra: packed.list(params),
            kern: std::ptr::null_mut(),
            ctx: std::ptr::null_mut(),
        };
        let node = self.add_node(graph, deps, |node, on| {
            // SAFETY: `kernel`, `packed` and `params` outlive the call, which copies them; graph, function and
            // nodes are live, and the parameters point to live memory (see `raw_driver`; in this crate
            // `Launch::pack`).
            unsafe { (self.table.cuGraphAddKernelNode_v2)(node, graph.0, on.as_ptr(), on.len(), &kernel) }
        })?;
        // In a graph, the edge states that a kernel may start early, not the node.
        let (attrs, n_attrs) = attributes(&LaunchConfig { programmatic: false, ..*config });
        for attribute in &attrs[..n_attrs] {
            // SAFETY: the node is live, and the value outlives the call.
            let code = unsafe {
                (self.table.cuGraphKernelNodeSetAttribute)(node.0, attribute.id as u32, &attribute.value)
            };
            self.undo_unless(check(code), node.0)?;
        }
        Ok(node)
    }

    pub(super) fn add_memcpy(
        &self,
        graph: GraphHandle,
        deps: &[Dependency],
        dst: CopyEnd,
        src: CopyEnd,
        bytes: u64,
    ) -> RawResult<NodeHandle> {
        use sys::CUmemorytype::{CU_MEMORYTYPE_DEVICE, CU_MEMORYTYPE_HOST};
        let split = |end| match end {
            CopyEnd::Device(p) => (CU_MEMORYTYPE_DEVICE, std::ptr::null_mut(), p.0),
            CopyEnd::Host(p) => (CU_MEMORYTYPE_HOST, p.as_ptr().cast(), 0),
        };
        let (src_type, src_host, src_device) = split(src);
        let (dst_type, dst_host, dst_device) = split(dst);
        let copy = sys::CUDA_MEMCPY3D {
            srcXInBytes: 0,
            srcY: 0,
            srcZ: 0,
            srcLOD: 0,
            srcMemoryType: src_type,
            srcHost: src_host,
            srcDevice: src_device,
            srcArray: std::ptr::null_mut(),
            reserved0: std::ptr::null_mut(),
            srcPitch: 0,
            srcHeight: 0,
            dstXInBytes: 0,
            dstY: 0,
            dstZ: 0,
            dstLOD: 0,
            dstMemoryType: dst_type,
            dstHost: dst_host,
            dstDevice: dst_device,
            dstArray: std::ptr::null_mut(),
            reserved1: std::ptr::null_mut(),
            dstPitch: 0,
            dstHeight: 0,
            WidthInBytes: bytes as usize,
            Height: 1,
            Depth: 1,
        };
        let ctx: u64 = out!(self, cuCtxGetCurrent())?;
        self.add_node(graph, deps, |node, on| {
            // SAFETY: `copy` outlives the call, which copies it; host ends outlive the graph (`graph_add_memcpy`'s
            // contract), the handles are live.
            unsafe { (self.table.cuGraphAddMemcpyNode)(node, graph.0, on.as_ptr(), on.len(), &copy, ctx) }
        })
    }

    pub(super) fn add_memset(
        &self,
        graph: GraphHandle,
        deps: &[Dependency],
        dst: DevicePtr,
        byte: u8,
        bytes: u64,
    ) -> RawResult<NodeHandle> {
        let fill = sys::CUDA_MEMSET_NODE_PARAMS {
            dst: dst.0,
            pitch: 0,
            value: u32::from(byte),
            elementSize: 1,
            width: bytes as usize,
            height: 1,
        };
        let ctx: u64 = out!(self, cuCtxGetCurrent())?;
        self.add_node(graph, deps, |node, on| {
            // SAFETY: `fill` outlives the call, which copies it; the handles are live (see `raw_driver`).
            unsafe { (self.table.cuGraphAddMemsetNode)(node, graph.0, on.as_ptr(), on.len(), &fill, ctx) }
        })
    }

    pub(super) fn condition(&self, graph: GraphHandle, initial: u32) -> RawResult<ConditionHandle> {
        let ctx: u64 = out!(self, cuCtxGetCurrent())?;
        let flags = sys::CU_GRAPH_COND_ASSIGN_DEFAULT;
        out!(self, cuGraphConditionalHandleCreate(graph.0, ctx, initial, flags)).map(ConditionHandle)
    }

    pub(super) fn add_loop(
        &self,
        graph: GraphHandle,
        deps: &[Dependency],
        condition: ConditionHandle,
    ) -> RawResult<(NodeHandle, GraphHandle)> {
        let ctx: u64 = out!(self, cuCtxGetCurrent())?;
        let mut params = sys::CUgraphNodeParams {
            type_: sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_CONDITIONAL,
            reserved0: [0; 3],
            __bindgen_anon_1: sys::CUgraphNodeParams_st__bindgen_ty_1 { reserved1: [0; 29] },
            reserved2: 0,
        };
        params.__bindgen_anon_1.conditional = sys::CUDA_CONDITIONAL_NODE_PARAMS {
            handle: condition.0,
            type_: sys::CUgraphConditionalNodeType::CU_GRAPH_COND_TYPE_WHILE,
            size: 1,
            phGraph_out: std::ptr::null_mut(),
            ctx: ctx as sys::CUcontext,
        };
        let node = self.add_node(graph, deps, |node, on| {
            // Without edge data, all edges are full.
            let data = std::ptr::null();
            // SAFETY: `params`, `node` and `on` outlive the call; the graph, its nodes and the condition are live (see
            // `raw_driver`).
            unsafe { (self.table.cuGraphAddNode_v2)(node, graph.0, on.as_ptr(), data, on.len(), &mut params) }
        })?;
        // SAFETY: this member of the union was written above, and the driver has only filled in the list of bodies.
        let bodies = unsafe { params.__bindgen_anon_1.conditional }.phGraph_out;
        self.undo_unless(if bodies.is_null() { Err(Code::UNKNOWN) } else { Ok(()) }, node.0)?;
        // SAFETY: the list is not null; it is the driver's, has `size` = 1 entry and lives as long as the node.
        Ok((node, GraphHandle(unsafe { *bodies } as u64)))
    }

    pub(super) fn nodes(&self, graph: GraphHandle) -> RawResult<Vec<(NodeHandle, NodeKind)>> {
        let mut n = 0;
        // SAFETY: with a null list the driver only returns the count.
        check(unsafe { (self.table.cuGraphGetNodes)(graph.0, std::ptr::null_mut(), &mut n) })?;
        let mut nodes = vec![0_u64; n];
        if n > 0 {
            // SAFETY: `nodes` has space for the `n` entries passed to the driver.
            check(unsafe { (self.table.cuGraphGetNodes)(graph.0, nodes.as_mut_ptr(), &mut n) })?;
        }
        nodes
            .into_iter()
            .take(n)
            .map(|node| {
                let mut kind = 0;
                // SAFETY: `kind` outlives the call; the node belongs to a live graph.
                check(unsafe { (self.table.cuGraphNodeGetType)(node, &mut kind) })?;
                Ok((NodeHandle(node), node_kind(kind)))
            })
            .collect()
    }

    pub(super) fn edges(&self, graph: GraphHandle) -> RawResult<Vec<Edge>> {
        let null = std::ptr::null_mut();
        let mut n = 0;
        // SAFETY: with null lists the driver only returns the count.
        check(unsafe { (self.table.cuGraphGetEdges_v2)(graph.0, null, null, null.cast(), &mut n) })?;
        if n == 0 {
            return Ok(Vec::new());
        }
        let (mut from, mut to) = (vec![0_u64; n], vec![0_u64; n]);
        let mut data = vec![sys::CUgraphEdgeData { from_port: 0, to_port: 0, type_: 0, reserved: [0; 5] }; n];
        // SAFETY: the three lists have space for the `n` entries passed to the driver.
        check(unsafe {
            (self.table.cuGraphGetEdges_v2)(
                graph.0,
                from.as_mut_ptr(),
                to.as_mut_ptr(),
                data.as_mut_ptr(),
                &mut n,
            )
        })?;
        if n > from.len() {
            return Err(Code::UNKNOWN);
        }
        let edge = |i: usize| Edge {
            from: NodeHandle(from[i]),
            to: NodeHandle(to[i]),
            kind: if data[i].type_ == PROGRAMMATIC.type_ { EdgeKind::Programmatic } else { EdgeKind::Full },
        };
        Ok((0..n).map(edge).collect())
    }
}

fn node_kind(value: u32) -> NodeKind {
    match value {
        0 => NodeKind::Kernel,
        1 => NodeKind::Memcpy,
        2 => NodeKind::Memset,
        3 => NodeKind::Host,
        4 => NodeKind::Child,
        5 => NodeKind::Empty,
        6 => NodeKind::EventWait,
        7 => NodeKind::EventRecord,
        10 => NodeKind::MemAlloc,
        11 => NodeKind::MemFree,
        13 => NodeKind::Loop,
        _ => NodeKind::Other,
    }
}
