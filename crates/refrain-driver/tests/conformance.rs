//! The capture truth table, row by row, against a driver: what one call made while a stream is being captured does.
//!
//! Each row of `data/capture-truth.tsv` was measured on a real card by the procedure in [`run_row`]. The simulated
//! device must give the same answers; with `gpu-tests` the real driver is asked again.

use std::ffi::c_void;

use refrain_driver::api::{
    Api, CaptureMode, CaptureStatus, Code, CtxHandle, DevicePtr, EventHandle, ExecHandle, FunctionAttribute,
    FunctionHandle, GraphHandle, HostPtr, LaunchConfig, ModuleHandle, Raw, StreamHandle, StreamKind,
};
use refrain_driver::sim::{Schedule, SimDriver, SimOptions};

const TABLE: &str = include_str!("data/capture-truth.tsv");

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

#[derive(Clone, Debug)]
struct Row {
    line: usize,
    fields: Vec<&'static str>,
}

/// The columns after the three that name the row.
const COLUMNS: [&str; 8] =
    ["result", "status_after", "next_launch", "end_capture", "instantiate", "replay", "context_after", "nodes"];

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

fn rows() -> Vec<Row> {
    let lines = TABLE.lines().enumerate().filter(|(_, l)| !l.starts_with('#'));
    lines.skip(1).map(|(i, l)| Row { line: i + 1, fields: l.split('\t').collect() }).collect()
}

/// Makes every row's calls on a device; the mismatches, one line each.
fn check_table(api: &dyn Api, ctx: CtxHandle) -> Vec<String> {
    let mut mismatches = Vec::new();
    for row in rows() {
        let got = run_row(api, ctx, &row);
        for ((column, expected), got) in COLUMNS.iter().zip(&row.fields[3..]).zip(&got) {
            // A dash in the node column means that nobody counted.
            if expected != got && !(*column == "nodes" && *expected == "-") {
                mismatches.push(format!("line {}: {}: {column} is {got}, measured {expected}", row.line, row.name()));
            }
        }
    }
    mismatches
}

fn name<T>(result: &Raw<T>) -> String {
    match result {
        Ok(_) => "OK".to_owned(),
        Err(code) => code.name().to_owned(),
    }
}

/// Begin capture, launch, make the call, read the status, launch again, end, instantiate, replay, synchronise, launch
/// and synchronise.
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

/// What a row's calls need, all made before the capture begins.
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
    host: Box<[u8; 256]>,
    // What the call made, to be given back.
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
        let bench = Bench {
            api,
            ctx,
            s: api.stream_create(kind).expect("stream"),
            other: Some(other),
            module,
            store,
            memory: api.alloc(4096).expect("memory"),
            spare: Some(api.alloc(4096).expect("memory")),
            pinned: api.alloc_host(256).expect("pinned memory"),
            recorded,
            event: api.event_create(false).expect("event"),
            host: Box::new([0; 256]),
            streams: Vec::new(),
            events: Vec::new(),
            modules: Vec::new(),
            device: Vec::new(),
            node_memory: None,
            pinned_too: Vec::new(),
            graphs: Vec::new(),
            execs: Vec::new(),
        };
        // Everything lazy is loaded, and the event is past, before the capture begins.
        bench.launch(bench.s, bench.buffer(0)).expect("warm-up launch");
        api.ctx_synchronize().expect("synchronise");
        bench
    }

    /// Disjoint pieces of memory: one for the captured work, one for each other party.
    fn buffer(&self, i: u64) -> DevicePtr {
        self.memory.add(512 * i)
    }

    fn launch(&self, stream: StreamHandle, ptr: DevicePtr) -> Raw<()> {
        launch(self.api, self.store, stream, ptr)
    }

    /// Runs something on another thread, with the same context current.
    fn elsewhere<T: Send>(&self, f: impl FnOnce(&dyn Api) -> Raw<T> + Send) -> Raw<T> {
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

    fn call(&mut self, call: &str) -> Raw<()> {
        match call.strip_prefix("other thread ") {
            Some(call) => self.call_elsewhere(call),
            None if call.starts_with("cuMem") => self.memory_call(call),
            None => self.stream_call(call),
        }
    }

    fn memory_call(&mut self, call: &str) -> Raw<()> {
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
            // SAFETY (both): the source lives in the bench, longer than the graph, and is not written.
            "cuMemcpyHtoDAsync pageable on s" => unsafe {
                api.memcpy_htod_async(dst, HostPtr::of(self.host.as_ptr()), 256, s)
            },
            "cuMemcpyHtoDAsync pinned on s" => unsafe { api.memcpy_htod_async(dst, self.pinned, 256, s) },
            "cuMemAllocHost" => api.alloc_host(1024).map(|p| self.pinned_too.push(p)),
            "cuMemAllocAsync on s" => api.alloc_async(1024, s).map(|p| self.node_memory = Some(p)),
            "cuMemAllocManaged" => api.alloc_managed(1024).map(|p| self.device.push(p)),
            "cuMemsetD8Async on s" => api.memset_async(dst, 3, 256, s),
            other => panic!("the table names a call this test does not know: {other}"),
        }
    }

    fn stream_call(&mut self, call: &str) -> Raw<()> {
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
            // SAFETY: the function does nothing, with nothing.
            "cuLaunchHostFunc on s" => unsafe { api.launch_host_func(s, do_nothing, std::ptr::null_mut()) },
            "fork to o, joined" => {
                self.fork(o)?;
                api.event_record(event, o)?;
                api.stream_wait_event(s, event)
            }
            "fork to o, not joined" => self.fork(o),
            other => panic!("the table names a call this test does not know: {other}"),
        }
    }

    fn fork(&self, o: StreamHandle) -> Raw<()> {
        self.api.event_record(self.event, self.s)?;
        self.api.stream_wait_event(o, self.event)?;
        self.launch(o, self.buffer(3))
    }

    fn call_elsewhere(&mut self, call: &str) -> Raw<()> {
        let (s, store, captured, dst) = (self.s, self.store, self.buffer(0), self.buffer(1));
        let spare = self.spare.expect("still there");
        match call {
            "cuMemAlloc" => self.elsewhere(|api| api.alloc(1024)).map(|p| self.device.push(p)),
            "cuMemFree" => self.elsewhere(move |api| api.free(spare)).map(|()| self.spare = None),
            "sync HtoD" => self.elsewhere(move |api| api.memcpy_htod(dst, &[1; 256])),
            "end-capture(s)" => {
                self.elsewhere(move |api| api.stream_end_capture(s)).map(|g| self.graphs.push(g))
            }
            "cuStreamQuery(s)" => self.elsewhere(move |api| api.stream_query(s)),
            "cuStreamSynchronize(s)" => self.elsewhere(move |api| api.stream_synchronize(s)),
            "cuStreamIsCapturing(s)" => self.elsewhere(move |api| api.stream_is_capturing(s)).map(drop),
            "launch on s" => self.elsewhere(move |api| launch(api, store, s, captured)),
            "cuCtxSynchronize" => self.elsewhere(|api| api.ctx_synchronize()),
            other => panic!("the table names a call this test does not know: {other}"),
        }
    }

    fn clean_up(self, replayed: bool) {
        let api = self.api;
        api.ctx_synchronize().expect("synchronise");
        self.execs.iter().for_each(|&e| api.exec_destroy(e).expect("exec"));
        self.graphs.iter().for_each(|&g| api.graph_destroy(g).expect("graph"));
        self.events.iter().chain([&self.event, &self.recorded]).for_each(|&e| {
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

fn launch(api: &dyn Api, store: FunctionHandle, stream: StreamHandle, ptr: DevicePtr) -> Raw<()> {
    api.launch(store, &LaunchConfig::new([1, 1, 1], [1, 1, 1]), stream, &ptr.0.to_ne_bytes())
}

fn simulated(seed: u64, schedule: Schedule) -> SimDriver {
    let sim = SimDriver::new(SimOptions { seed, schedule, memory_bytes: 1 << 20, ..SimOptions::default() });
    sim.register("truth_store", &[8], |k| k.write_one(k.ptr(0)?, 7u32));
    sim
}

#[test]
fn the_table_has_all_its_rows_and_every_code_has_a_name() {
    let rows = rows();
    assert_eq!(rows.len(), 138);
    for row in rows {
        assert_eq!(row.fields.len(), 3 + COLUMNS.len(), "line {}", row.line);
        for field in row.fields[3..].iter().filter(|f| f.contains('_') && !f.contains('/')) {
            assert!(Code::from_name(field).is_some(), "line {}: {field}", row.line);
        }
    }
}

#[test]
fn the_simulated_device_answers_every_row_as_measured() {
    for (seed, schedule) in [(1, Schedule::Seeded), (2, Schedule::Lazy), (3, Schedule::Eager), (4, Schedule::Seeded)] {
        let sim = simulated(seed, schedule);
        let ctx = sim.primary_ctx_retain(0).expect("context");
        let mismatches = check_table(&sim, ctx);
        assert!(mismatches.is_empty(), "{} with {schedule:?}:\n{}", mismatches.len(), mismatches.join("\n"));
        sim.primary_ctx_release(0).expect("release");
        assert_eq!(sim.stats().live, Default::default(), "something leaked with {schedule:?}");
        assert_eq!(sim.take_reports(), Vec::<String>::new());
    }
}
