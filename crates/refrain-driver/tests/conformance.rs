//! Checks a driver against the capture truth table, row by row: the effect of one call made during a capture.
//!
//! Each row of `data/capture-truth.tsv` and `data/capture-more.tsv` was measured on a real GPU by the procedure in
//! [`run_row`]. The simulated device must behave the same; with `gpu-tests` the real driver is measured again.

use std::ffi::c_void;

use refrain_driver::api::{
    Api, CaptureMode, CaptureStatus, Code, CtxHandle, DevicePtr, EventHandle, ExecHandle, FunctionAttribute,
    FunctionHandle, GraphHandle, HostPtr, LaunchConfig, ModuleHandle, RawResult, StreamHandle, StreamKind,
};
use refrain_driver::sim::{SimDriver, SimOptions, SimSchedule};

const TABLE: &str = include_str!("data/capture-truth.tsv");

/// Calls missing from the first table, measured by the same procedure.
const MORE: &str = include_str!("data/capture-more.tsv");

/// `truth_store(u32 *p)`: writes 7 to `p[0]`.
const PTX: &str = "
.version 6.4
.target sm_70
.address_size 64
.visible .entry truth_store(.param .u64 p0)
{
    .reg .b32 %r<2>;
    .reg .b64 %rd<3>;
    ld.param.u64 %rd0, [p0];
    cvta.to.global.u64 %rd1, %rd0;
    mov.u32 %r0, 7;
    st.global.u32 [%rd1], %r0;
    ret;
}
";

const PLAIN: LaunchConfig = LaunchConfig::new([1, 1, 1], [1, 1, 1]);

#[derive(Clone, Debug)]
struct Row {
    line: usize,
    fields: Vec<&'static str>,
}

/// The columns after the three that name the row.
const COLUMNS: [&str; 8] = [
    "result",
    "status_after",
    "next_launch",
    "end_capture",
    "instantiate",
    "replay",
    "context_after",
    "nodes",
];

impl Row {
    fn kind(&self) -> StreamKind {
        match self.fields[0] {
            "blocking" => StreamKind::Blocking,
            "non-blocking" => StreamKind::NonBlocking,
            other => panic!("line {}: stream kind {other}", self.line),
        }
    }

    fn mode(&self) -> CaptureMode {
        match self.fields[1] {
            "GLOBAL" => CaptureMode::Global,
            "THREAD_LOCAL" => CaptureMode::ThreadLocal,
            "RELAXED" => CaptureMode::Relaxed,
            other => panic!("line {}: capture mode {other}", self.line),
        }
    }

    fn name(&self) -> String {
        self.fields[..3].join(" / ")
    }
}

fn rows(table: &'static str) -> Vec<Row> {
    let lines = table.lines().enumerate().filter(|(_, l)| !l.starts_with('#'));
    lines.skip(1).map(|(i, l)| Row { line: i + 1, fields: l.split('\t').collect() }).collect()
}

/// Makes the calls of every row on a device. Returns the mismatches, one line each, and each mismatching row as
/// measured now.
fn check_table(api: &dyn Api, ctx: CtxHandle, table: &'static str) -> Vec<String> {
    let mut mismatches = Vec::new();
    for row in rows(table) {
        let n_before = mismatches.len();
        let got = run_row(api, ctx, &row);
        for ((column, expected), got) in COLUMNS.iter().zip(&row.fields[3..]).zip(&got) {
            // A dash in the node column means that the nodes were not counted.
            if expected != got && !(*column == "nodes" && *expected == "-") {
                mismatches.push(format!(
                    "line {}: {}: {column} is {got}, measured {expected}",
                    row.line,
                    row.name()
                ));
            }
        }
        if mismatches.len() > n_before {
            mismatches.push(format!("{}\t{}", row.fields[..3].join("\t"), got.join("\t")));
        }
    }
    mismatches
}

fn name<T>(result: &RawResult<T>) -> String {
    match result {
        Ok(_) => "OK".to_owned(),
        Err(code) => code.name().to_owned(),
    }
}

/// Begin capture, launch, make the call, read the status, launch again, end, instantiate, replay, synchronise,
/// launch and synchronise.
fn run_row(api: &dyn Api, ctx: CtxHandle, row: &Row) -> [String; 8] {
    let mut bench = Bench::new(api, ctx, row.kind());
    let s = bench.s;
    api.stream_begin_capture(s, row.mode()).expect("begin capture");
    bench.launch(s, bench.buffer(0)).expect("first launch");
    let result = bench.call(row.fields[2]);
    let status = match api.stream_is_capturing(s).expect("capture status") {
        CaptureStatus::None => "NONE",
        CaptureStatus::Active => "ACTIVE",
        CaptureStatus::Invalidated => "INVALIDATED",
    };
    let next = bench.launch(s, bench.buffer(0));
    let end = api.stream_end_capture(s);
    let nodes = end.map_or("-".to_owned(), |g| api.graph_nodes(g).expect("graph nodes").len().to_string());
    let (mut instantiate, mut replay) = ("-".to_owned(), "-".to_owned());
    if let Ok(graph) = end {
        bench.graphs.push(graph);
        let exec = api.graph_instantiate(graph);
        instantiate = name(&exec);
        if let Ok(exec) = exec {
            bench.execs.push(exec);
            replay = name(&api.exec_launch(exec, s).and_then(|()| api.stream_synchronize(s)));
        }
    }
    let after = [name(&bench.launch(s, bench.buffer(0))), name(&api.stream_synchronize(s))].join("/");
    bench.clean_up(replay == "OK");
    [name(&result), status.to_owned(), name(&next), name(&end), instantiate, replay, after, nodes]
}

/// Objects that the calls of a row need, all created before the capture begins.
struct Bench<'a> {
    api: &'a dyn Api,
    ctx: CtxHandle,
    s: StreamHandle,
    other: Option<StreamHandle>,
    module: ModuleHandle,
    store: FunctionHandle,
    memory: DevicePtr,
    spare: Option<DevicePtr>,
    pinned: HostPtr,
    recorded: EventHandle,
    event: EventHandle,
    timed: [EventHandle; 2],
    host: Box<[u8; 256]>,
    // Objects that the call may destroy or create, to be cleaned up.
    streams: Vec<StreamHandle>,
    events: Vec<EventHandle>,
    modules: Vec<ModuleHandle>,
    device: Vec<DevicePtr>,
    node_memory: Option<DevicePtr>,
    pinned_too: Vec<HostPtr>,
    graphs: Vec<GraphHandle>,
    execs: Vec<ExecHandle>,
}

extern "C" fn do_nothing(_: *mut c_void) {}

impl<'a> Bench<'a> {
    fn new(api: &'a dyn Api, ctx: CtxHandle, kind: StreamKind) -> Bench<'a> {
        let module = api.module_load(PTX.as_bytes()).expect("module");
        let store = api.module_function(module, "truth_store").expect("function");
        let other = api.stream_create(StreamKind::NonBlocking).expect("stream");
        let recorded = api.event_create(false).expect("event");
        api.event_record(recorded, other).expect("record");
        let timed = [(); 2].map(|()| api.event_create(true).expect("event"));
        timed.iter().for_each(|&e| api.event_record(e, other).expect("record"));
        let graph = api.graph_create().expect("graph");
        let memory = api.alloc(4096).expect("memory");
        let params = memory.add(512 * 3).0.to_ne_bytes();
        api.graph_add_kernel(graph, &[], store, &PLAIN, &params).expect("node");
        let exec = api.graph_instantiate(graph).expect("exec");
        let bench = Bench {
            api,
            ctx,
            s: api.stream_create(kind).expect("stream"),
            other: Some(other),
            module,
            store,
            memory,
            spare: Some(api.alloc(4096).expect("memory")),
            pinned: api.alloc_host(256).expect("pinned memory"),
            recorded,
            event: api.event_create(false).expect("event"),
            timed,
            host: Box::new([0; 256]),
            streams: Vec::new(),
            events: Vec::new(),
            modules: vec![api.module_load(PTX.as_bytes()).expect("module")],
            device: Vec::new(),
            node_memory: None,
            pinned_too: vec![api.alloc_host(256).expect("pinned memory")],
            graphs: vec![graph],
            execs: vec![exec],
        };
        // Load everything lazy, and complete the event, before the capture begins.
        bench.launch(bench.s, bench.buffer(0)).expect("warm-up launch");
        api.ctx_synchronize().expect("synchronise");
        bench
    }

    /// Disjoint buffers: one for the captured work and one for each other participant.
    fn buffer(&self, i: u64) -> DevicePtr {
        self.memory.add(512 * i)
    }

    fn launch(&self, stream: StreamHandle, ptr: DevicePtr) -> RawResult<()> {
        launch(self.api, self.store, stream, ptr)
    }

    /// Runs something on another thread, with the same context current.
    fn on_other_thread<T: Send>(&self, f: impl FnOnce(&dyn Api) -> RawResult<T> + Send) -> RawResult<T> {
        let (api, ctx) = (self.api, self.ctx);
        std::thread::scope(|scope| {
            let thread = scope.spawn(move || {
                api.ctx_set_current(Some(ctx))?;
                let result = f(api);
                api.ctx_set_current(None)?;
                result
            });
            thread.join().expect("the other thread")
        })
    }

    fn call(&mut self, call: &str) -> RawResult<()> {
        match call.strip_prefix("other thread ") {
            Some(call) => self.call_on_other_thread(call),
            None if call.starts_with("then ") => {
                // A second call after one that broke the capture.
                let broke = self.call("cuStreamQuery(s)");
                assert_eq!(broke, Err(Code::STREAM_CAPTURE_UNSUPPORTED));
                self.call(&call["then ".len()..])
            }
            None if call.starts_with("cuMem") => self.memory_call(call),
            None => self.stream_call(call),
        }
    }

    fn memory_call(&mut self, call: &str) -> RawResult<()> {
        let api = self.api;
        let (s, dst) = (self.s, self.buffer(1));
        match call {
            "cuMemAlloc" => api.alloc(1024).map(|p| self.device.push(p)),
            "cuMemFree" => {
                let spare = self.spare.expect("still there");
                api.free(spare).map(|()| self.spare = None)
            }
            "cuMemcpyHtoD sync pageable" => api.memcpy_htod(dst, &self.host[..]),
            "cuMemcpyHtoD sync pinned" => {
                // SAFETY: 256 pinned bytes that nobody else uses while the slice lives.
                let pinned = unsafe { std::slice::from_raw_parts(self.pinned.as_ptr(), 256) };
                api.memcpy_htod(dst, pinned)
            }
            "cuMemcpyDtoH sync" => api.memcpy_dtoh(&mut self.host[..], dst),
            // SAFETY: the source is part of the bench, outlives the graph and is not written.
            "cuMemcpyHtoDAsync pageable on s" => unsafe {
                api.memcpy_htod_async(dst, HostPtr::of(self.host.as_ptr()), 256, s)
            },
            // SAFETY: as above.
            "cuMemcpyHtoDAsync pinned on s" => unsafe { api.memcpy_htod_async(dst, self.pinned, 256, s) },
            "cuMemAllocHost" => api.alloc_host(1024).map(|p| self.pinned_too.push(p)),
            "cuMemAllocAsync on s" => api.alloc_async(1024, s).map(|p| self.node_memory = Some(p)),
            "cuMemAllocManaged" => api.alloc_managed(1024).map(|p| self.device.push(p)),
            "cuMemFreeHost" => {
                let spare = self.pinned_too.pop().expect("made with the bench");
                api.free_host(spare).inspect_err(|_| self.pinned_too.push(spare))
            }
            "cuMemFreeAsync(plain memory) on s" => {
                let spare = self.spare.expect("still there");
                // On success it is a node, which frees the memory when it runs.
                api.free_async(spare, s).map(|()| self.spare = None)
            }
            "cuMemFreeAsync(plain memory) on o" => {
                let spare = self.spare.expect("still there");
                api.free_async(spare, self.other.expect("still there")).map(|()| self.spare = None)
            }
            "cuMemAllocAsync on o" => {
                api.alloc_async(1024, self.other.expect("still there")).map(|p| self.device.push(p))
            }
            "cuMemAllocAsync and cuMemFreeAsync on s" => {
                let p = api.alloc_async(1024, s)?;
                api.free_async(p, s)
            }
            "cuMemGetInfo" => api.mem_info().map(drop),
            // SAFETY: the destination is part of the bench and outlives the graph.
            "cuMemcpyDtoHAsync pinned on s" => unsafe { api.memcpy_dtoh_async(self.pinned, dst, 256, s) },
            "cuMemcpyDtoDAsync on s" => api.memcpy_dtod_async(dst, self.buffer(4), 256, s),
            "cuMemsetD8Async on s" => api.memset_async(dst, 3, 256, s),
            other => panic!("the table has a call that this test does not know: {other}"),
        }
    }

    fn stream_call(&mut self, call: &str) -> RawResult<()> {
        let api = self.api;
        let (s, event) = (self.s, self.event);
        let o = self.other.expect("still there");
        match call {
            "nothing" => Ok(()),
            "cuStreamSynchronize(s)" => api.stream_synchronize(s),
            "cuStreamQuery(s)" => api.stream_query(s),
            "cuCtxSynchronize" => api.ctx_synchronize(),
            "legacy-stream kernel" => self.launch(StreamHandle::LEGACY, self.buffer(2)),
            "cuStreamCreate nonblocking" => {
                api.stream_create(StreamKind::NonBlocking).map(|s| self.streams.push(s))
            }
            "cuStreamDestroy(other)" => api.stream_destroy(o).map(|()| self.other = None),
            "cuStreamBeginCapture(s) again" => api.stream_begin_capture(s, CaptureMode::ThreadLocal),
            "cuStreamWaitEvent(s, pre-recorded)" => api.stream_wait_event(s, self.recorded),
            "cuEventCreate" => api.event_create(false).map(|e| self.events.push(e)),
            "cuEventQuery other" => api.event_query(self.recorded),
            "cuEventSynchronize(pre-recorded)" => api.event_synchronize(self.recorded),
            "cuEventRecord(ev,s)" => api.event_record(event, s),
            "cuEventRecord(ev,s); cuEventQuery(ev)" => {
                api.event_record(event, s)?;
                api.event_query(event)
            }
            "cuModuleLoadData (PTX)" => api.module_load(PTX.as_bytes()).map(|m| self.modules.push(m)),
            "cuFuncSetAttribute" => {
                api.function_set_attribute(self.store, FunctionAttribute::MaxDynamicSharedBytes, 64 * 1024)
            }
            "launch busy work on o (uncaptured)" => self.launch(o, self.buffer(3)),
            // SAFETY: the function does nothing and ignores its argument.
            "cuLaunchHostFunc on s" => unsafe { api.launch_host_func(s, do_nothing, std::ptr::null_mut()) },
            "fork to o, joined" => {
                self.fork(o)?;
                api.event_record(event, o)?;
                api.stream_wait_event(s, event)
            }
            "fork to o, not joined" => self.fork(o),
            "fork to o, cuStreamEndCapture(o)" => {
                self.fork(o)?;
                api.stream_end_capture(o).map(|g| self.graphs.push(g))
            }
            "cuStreamWaitEvent(o, event of s), o captured too" => {
                api.event_record(event, s)?;
                api.stream_begin_capture(o, CaptureMode::ThreadLocal)?;
                let result = api.stream_wait_event(o, event);
                self.graphs.extend(api.stream_end_capture(o));
                result
            }
            "cuStreamWaitEvent(s, never recorded)" => api.stream_wait_event(s, event),
            "cuStreamWaitEvent(o, pre-recorded)" => api.stream_wait_event(o, self.recorded),
            "cuStreamSynchronize(o)" => api.stream_synchronize(o),
            "cuStreamQuery(o)" => api.stream_query(o),
            "cuStreamSynchronize(legacy)" => api.stream_synchronize(StreamHandle::LEGACY),
            "cuStreamQuery(legacy)" => api.stream_query(StreamHandle::LEGACY),
            "cuStreamIsCapturing(legacy)" => api.stream_is_capturing(StreamHandle::LEGACY).map(drop),
            "cuStreamBeginCapture(legacy)" => {
                api.stream_begin_capture(StreamHandle::LEGACY, CaptureMode::ThreadLocal)
            }
            "cuStreamCreate blocking" => {
                api.stream_create(StreamKind::Blocking).map(|s| self.streams.push(s))
            }
            "cuEventRecord(ev,legacy)" => api.event_record(event, StreamHandle::LEGACY),
            "cuEventRecord(ev,o)" => api.event_record(event, o),
            "cuEventQuery never recorded" => api.event_query(event),
            "cuEventDestroy" => {
                let spare = api.event_create(false)?;
                api.event_destroy(spare)
            }
            "cuEventElapsedTime(pre-recorded)" => api.event_elapsed(self.timed[0], self.timed[1]).map(drop),
            "cuModuleUnload(other)" => {
                let spare = self.modules.pop().expect("made with the bench");
                api.module_unload(spare).inspect_err(|_| self.modules.push(spare))
            }
            "cuGraphInstantiate(other)" => api.graph_instantiate(self.graphs[0]).map(|e| self.execs.push(e)),
            "cuGraphLaunch(other) on s" => api.exec_launch(self.execs[0], s),
            "cuGraphLaunch(other) on o" => api.exec_launch(self.execs[0], o),
            "cuGraphUpload(other) on s" => api.exec_upload(self.execs[0], s),
            "cuGraphUpload(other) on o" => api.exec_upload(self.execs[0], o),
            "cuGraphExecDestroy(other)" => {
                let spare = self.execs.pop().expect("made with the bench");
                api.exec_destroy(spare).inspect_err(|_| self.execs.push(spare))
            }
            "cuGraphDestroy(other)" => {
                let spare = self.graphs.pop().expect("made with the bench");
                api.graph_destroy(spare).inspect_err(|_| self.graphs.push(spare))
            }
            "launch on another blocking stream" => {
                let blocking = api.stream_create(StreamKind::Blocking)?;
                self.streams.push(blocking);
                self.launch(blocking, self.buffer(3))
            }
            other => panic!("the table has a call that this test does not know: {other}"),
        }
    }

    fn fork(&self, o: StreamHandle) -> RawResult<()> {
        self.api.event_record(self.event, self.s)?;
        self.api.stream_wait_event(o, self.event)?;
        self.launch(o, self.buffer(3))
    }

    fn call_on_other_thread(&mut self, call: &str) -> RawResult<()> {
        let (s, store, captured, dst) = (self.s, self.store, self.buffer(0), self.buffer(1));
        let spare = self.spare.expect("still there");
        match call {
            "cuMemAlloc" => self.on_other_thread(|api| api.alloc(1024)).map(|p| self.device.push(p)),
            "cuMemFree" => self.on_other_thread(move |api| api.free(spare)).map(|()| self.spare = None),
            "sync HtoD" => self.on_other_thread(move |api| api.memcpy_htod(dst, &[1; 256])),
            "end-capture(s)" => {
                self.on_other_thread(move |api| api.stream_end_capture(s)).map(|g| self.graphs.push(g))
            }
            "cuStreamQuery(s)" => self.on_other_thread(move |api| api.stream_query(s)),
            "cuStreamSynchronize(s)" => self.on_other_thread(move |api| api.stream_synchronize(s)),
            "cuStreamIsCapturing(s)" => self.on_other_thread(move |api| api.stream_is_capturing(s)).map(drop),
            "launch on s" => self.on_other_thread(move |api| launch(api, store, s, captured)),
            "cuCtxSynchronize" => self.on_other_thread(|api| api.ctx_synchronize()),
            "cuEventQuery other" => {
                let recorded = self.recorded;
                self.on_other_thread(move |api| api.event_query(recorded))
            }
            "cuStreamSynchronize(o)" => {
                let o = self.other.expect("still there");
                self.on_other_thread(move |api| api.stream_synchronize(o))
            }
            "cuStreamQuery(o)" => {
                let o = self.other.expect("still there");
                self.on_other_thread(move |api| api.stream_query(o))
            }
            "cuModuleUnload(other)" => {
                let spare = self.modules.pop().expect("made with the bench");
                let result = self.on_other_thread(move |api| api.module_unload(spare));
                result.inspect_err(|_| self.modules.push(spare))
            }
            "cuMemAllocHost" => {
                self.on_other_thread(|api| api.alloc_host(1024)).map(|p| self.pinned_too.push(p))
            }
            "cuMemFreeHost" => {
                let spare = self.pinned_too.pop().expect("made with the bench");
                let result = self.on_other_thread(move |api| api.free_host(spare));
                result.inspect_err(|_| self.pinned_too.push(spare))
            }
            "cuStreamBeginCapture(s) again" => {
                self.on_other_thread(move |api| api.stream_begin_capture(s, CaptureMode::ThreadLocal))
            }
            other => panic!("the table has a call that this test does not know: {other}"),
        }
    }

    fn clean_up(self, replayed: bool) {
        let api = self.api;
        api.ctx_synchronize().expect("synchronise");
        self.execs.iter().for_each(|&e| api.exec_destroy(e).expect("exec"));
        self.graphs.iter().for_each(|&g| api.graph_destroy(g).expect("graph"));
        self.events.iter().chain([&self.event, &self.recorded]).chain(&self.timed).for_each(|&e| {
            api.event_destroy(e).expect("event");
        });
        self.modules.iter().chain([&self.module]).for_each(|&m| api.module_unload(m).expect("module"));
        self.streams.iter().chain(&self.other).chain([&self.s]).for_each(|&s| {
            api.stream_destroy(s).expect("stream");
        });
        let from_node = self.node_memory.filter(|_| replayed);
        self.device.iter().chain(&self.spare).chain(&from_node).chain([&self.memory]).for_each(|&p| {
            api.free(p).expect("memory");
        });
        self.pinned_too.iter().chain([&self.pinned]).for_each(|&p| api.free_host(p).expect("pinned memory"));
    }
}

fn launch(api: &dyn Api, store: FunctionHandle, stream: StreamHandle, ptr: DevicePtr) -> RawResult<()> {
    api.launch(store, &PLAIN, stream, &ptr.0.to_ne_bytes())
}

fn simulated(seed: u64, schedule: SimSchedule) -> SimDriver {
    let sim = SimDriver::new(SimOptions { seed, schedule, memory_bytes: 1 << 20, ..SimOptions::default() });
    sim.register("truth_store", &[8], |k| k.write_one(k.ptr(0)?, 7u32));
    sim
}

#[test]
fn the_table_has_all_its_rows_and_every_code_has_a_name() {
    assert_eq!((rows(TABLE).len(), rows(MORE).len()), (138, 204));
    for row in rows(TABLE).into_iter().chain(rows(MORE)) {
        assert_eq!(row.fields.len(), 3 + COLUMNS.len(), "line {}", row.line);
        for field in row.fields[3..].iter().filter(|f| f.contains('_') && !f.contains('/')) {
            assert!(Code::from_name(field).is_some(), "line {}: {field}", row.line);
        }
    }
}

#[test]
fn the_simulated_device_behaves_as_measured_in_every_row() {
    for (seed, schedule) in
        [(1, SimSchedule::Seeded), (2, SimSchedule::Lazy), (3, SimSchedule::Eager), (4, SimSchedule::Seeded)]
    {
        let sim = simulated(seed, schedule);
        // SAFETY: the handles passed are those the device returned, and each is destroyed once, in
        // `Bench::clean_up`.
        let api = unsafe { sim.api() };
        let ctx = api.primary_ctx_retain(0).expect("context");
        let mismatches = [check_table(&*api, ctx, TABLE), check_table(&*api, ctx, MORE)].concat();
        assert!(mismatches.is_empty(), "{} with {schedule:?}:\n{}", mismatches.len(), mismatches.join("\n"));
        api.primary_ctx_release(0).expect("release");
        assert_eq!(sim.stats().live, Default::default(), "something leaked with {schedule:?}");
        assert_eq!(api.take_reports(), Vec::<String>::new());
    }
}

#[test]
fn a_device_that_behaves_differently_is_noticed_in_every_affected_row() {
    let sim = simulated(5, SimSchedule::Seeded);
    sim.inject("on every alloc during capture: fail 1".parse().expect("script"));
    // SAFETY: as above.
    let api = unsafe { sim.api() };
    let ctx = api.primary_ctx_retain(0).expect("context");
    let mismatches = check_table(&*api, ctx, TABLE);
    // Own and foreign allocation: three modes on a non-blocking stream, and foreign ones on a blocking stream.
    let rows: std::collections::BTreeSet<&str> =
        mismatches.iter().filter_map(|m| m.split_once(": ").map(|(line, _)| line)).collect();
    assert_eq!(rows.len(), 9, "{}", mismatches.join("\n"));
}

#[test]
#[cfg_attr(not(feature = "gpu-tests"), ignore = "needs a CUDA device: cargo xtask gpu-bundle")]
fn the_real_driver_behaves_as_measured_in_every_row() {
    // SAFETY: the handles passed are those the driver returned, and each is destroyed once, in `Bench::clean_up`.
    let api = unsafe { refrain_driver::raw_driver() }.expect("a CUDA driver");
    let ctx = api.primary_ctx_retain(0).expect("context");
    let mismatches = [check_table(api.as_ref(), ctx, TABLE), check_table(api.as_ref(), ctx, MORE)].concat();
    assert!(mismatches.is_empty(), "{} mismatches:\n{}", mismatches.len(), mismatches.join("\n"));
    api.primary_ctx_release(0).expect("release");
}
