//! The individual checks.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{CheckVerdict, DoctorRow};
use crate::api::CaptureStatus;
use crate::device::{Context, Device};
use crate::error::DriverError;
use crate::graph::Outputs;
use crate::health::Health;
use crate::launch::{Baked, LaunchBuilder};
use crate::memory::{Buf, Lease, Memory, MemoryLayout};
use crate::module::{Function, Module};
use crate::probe::{PROBE_LOOP_PTX, PROBE_PTX};
use crate::queue::Queue;
use crate::record::{Method, RecordOptions};
use crate::ring::Ring;
use crate::stream::Stream;

/// Words in each buffer of the small step.
const N: u32 = 1024;
/// Number of launches in the step whose cost is measured: about a decode step of a 28-layer model without fusion.
const LAUNCHES: usize = 280;
/// Steps launched per wait. A batch this long makes its start-up and tail (the first step reaching the GPU, the
/// host waking up) negligible per step.
const BATCH_STEPS: usize = 50;
/// Number of batches timed; the median counts.
const N_BATCHES: usize = 7;
const RING_ENTRIES: u32 = 4;
const RING_BYTES: u64 = Ring::bytes(RING_ENTRIES, 4).expect("a few entries fit");
const RING_STRIDE: u64 = Ring::stride(4).expect("a few bytes fit");

/// Resources of the checks.
pub(super) struct Bench {
    ctx: Context,
    stream: Stream,
    memory: Arc<Memory>,
    lease: Lease,
    step: ProbeStep,
    nothing: Function,
    publish: Function,
    read: Function,
    ring: Ring,
    count: Buf,
    /// Seconds per replay of the graph of empty launches, measured first.
    first_cost: Option<f64>,
}

/// A small step: `b = a + a; c = b + a; d = c`, with `b` and `e = fill` independent of each other.
#[derive(Clone)]
struct ProbeStep {
    fill: Function,
    add: Function,
    a: Buf,
    b: Buf,
    c: Buf,
    d: Buf,
    e: Buf,
}

impl ProbeStep {
    fn enqueue(&self, q: &mut dyn Queue) -> Result<(), DriverError> {
        let add = |dst, x, y| {
            let add = LaunchBuilder::new(&self.add, N / 256, 256).step("doctor");
            // SAFETY: `add` accesses `N` words of three buffers, and every buffer of a `ProbeStep` has that many.
            unsafe { add.write(dst).read(x).read(y).baked(Baked(N)).build() }
        };
        q.launch(&add(self.b, self.a, self.a))?;
        let fill = LaunchBuilder::new(&self.fill, N / 256, 256).step("doctor").write(self.e);
        // SAFETY: `fill` writes `N` words, and `e` has that many.
        q.launch(&unsafe { fill.baked(Baked(7_u32)).baked(Baked(N)).build() })?;
        q.launch(&add(self.c, self.b, self.a))?;
        q.copy(self.d, self.c)?;
        q.launch(&add(self.c, self.d, self.e))
    }

    /// Value of `c` after the step, computed by hand.
    fn expected(a: u32) -> u32 {
        a.wrapping_mul(3).wrapping_add(7)
    }
}

impl Bench {
    pub(super) fn new(ctx: &Context) -> Result<Bench, DriverError> {
        // SAFETY: this crate's own PTX text.
        let module = unsafe { Module::load(ctx, "probe", PROBE_PTX) }?;
        let function = |name: &str| module.function(&format!("refrain_probe_{name}"));
        let mut layout = MemoryLayout::new("doctor");
        let bytes = u64::from(N) * 4;
        let regions = ["a", "b", "c", "d", "e"].map(|name| layout.device(name, bytes));
        let count = layout.device("count", 8);
        let ring = layout.pinned("ring", RING_BYTES);
        let memory = Memory::plan(ctx, &layout)?;
        let [a, b, c, d, e] = regions.map(|r| memory.buf(r));
        let step = ProbeStep { fill: function("fill")?, add: function("add")?, a, b, c, d, e };
        Ok(Bench {
            stream: ctx.stream()?,
            lease: memory.lease()?,
            ring: Ring::new(&memory, ring, RING_ENTRIES, 4)?,
            count: memory.buf(count),
            nothing: function("nothing")?,
            publish: function("publish")?,
            read: function("read")?,
            step,
            memory,
            ctx: ctx.clone(),
            first_cost: None,
        })
    }
}

pub(super) fn driver(device: &Device) -> DoctorRow {
    let v = device.driver_version();
    let from = device.library_path().map_or_else(String::new, |p| format!(", {}", p.display()));
    let words = match device.backend() {
        "sim" => "the simulated device: no GPU is used",
        _ => "the driver is loaded",
    };
    DoctorRow::new("driver", CheckVerdict::Good, format!("CUDA {}.{}{from}", v / 1000, v % 1000 / 10), words)
}

pub(super) fn gpu(device: &Device) -> DoctorRow {
    let i = device.info();
    let measured = format!(
        "{}, compute {}.{}, {} SMs, {} MiB L2, {} KiB shared per block{}{}",
        i.name,
        i.compute.0,
        i.compute.1,
        i.n_sms,
        i.l2_bytes >> 20,
        i.shared_block_bytes >> 10,
        if i.pci.is_empty() { "" } else { ", " },
        i.pci
    );
    if device.backend() == "cuda" && i.compute < (7, 0) {
        let mut row = DoctorRow::new(
            "gpu",
            CheckVerdict::Bad,
            measured,
            "the GPU is older than compute capability 7.0",
        );
        row.advice = Some("use the CPU backend on this machine".to_owned());
        return row;
    }
    let words = if i.compute >= (9, 0) {
        "kernels can overlap (programmatic dependent launch)"
    } else {
        "works; kernels overlap only from compute capability 9.0 on"
    };
    DoctorRow::new("gpu", CheckVerdict::Good, measured, words)
}

pub(super) fn memory(bench: &mut Bench) -> Result<DoctorRow, DriverError> {
    let (free, total) = bench.ctx.mem_info()?;
    let gib = |bytes: u64| bytes as f64 / (1_u64 << 30) as f64;
    let shared = if bench.ctx.device().info().unified { ", shared with the host" } else { "" };
    let measured = format!("{:.1} of {:.1} GiB free{shared}", gib(free), gib(total));
    if free < total / 2 {
        let mut row = DoctorRow::new(
            "memory",
            CheckVerdict::Note,
            measured,
            "more than half of the GPU's memory is in use",
        );
        row.advice = Some("`nvidia-smi` shows which processes use it".to_owned());
        return Ok(row);
    }
    Ok(DoctorRow::new("memory", CheckVerdict::Good, measured, "most of the GPU's memory is free"))
}

pub(super) fn record_stream(bench: &mut Bench) -> Result<DoctorRow, DriverError> {
    record(bench, Method::Stream, "record by stream capture")
}

pub(super) fn record_nodes(bench: &mut Bench) -> Result<DoctorRow, DriverError> {
    record(bench, Method::Nodes, "record by explicit nodes")
}

/// Records the small step and compares replays with eager runs, for inputs that differ from those of the recording.
fn record(bench: &mut Bench, method: Method, name: &'static str) -> Result<DoctorRow, DriverError> {
    let step = bench.step.clone();
    let options = RecordOptions::named(name);
    let graph = bench.stream.record(&bench.memory, method, &options, |q| step.enqueue(q))?;
    let written = [("b", step.b), ("c", step.c), ("d", step.d), ("e", step.e)];
    for input in [1_u32, 40, u32::MAX] {
        let values = [input].repeat(N as usize);
        bench.stream.upload(&mut bench.lease, step.a, bytemuck::cast_slice(&values))?;
        let read = |out: Outputs<'_>, stream: &mut Stream| -> Result<Vec<Vec<u32>>, DriverError> {
            written.iter().map(|(_, buf)| out.values(stream, *buf)).collect()
        };
        let eager = read(bench.stream.run(&mut bench.lease, false, |q| step.enqueue(q))?, &mut bench.stream)?;
        // Poison the outputs, so that a replay that writes nothing does not pass for a correct one.
        bench
            .stream
            .run(&mut bench.lease, false, |q| written.iter().try_for_each(|(_, buf)| q.fill(*buf, 0xA5)))?;
        let replayed = read(graph.replay(&mut bench.lease, &mut bench.stream)?, &mut bench.stream)?;
        let expected = ProbeStep::expected(input);
        let wrong = (0..written.len()).find_map(|i| {
            let idx = (0..N as usize).find(|&idx| replayed[i][idx] != eager[i][idx])?;
            Some(format!("{}[{idx}]: replay {}, eager {}", written[i].0, replayed[i][idx], eager[i][idx]))
        });
        let wrong = wrong.or_else(|| {
            let idx = replayed[1].iter().position(|&v| v != expected)?;
            Some(format!("c[{idx}]: {}, expected {expected}", replayed[1][idx]))
        });
        if let Some(measured) = wrong {
            let mut row = DoctorRow::new(
                name,
                CheckVerdict::Bad,
                measured,
                "a replay gives different bytes than the eager run",
            );
            row.advice = Some("do not use graphs recorded this way on this machine".to_owned());
            return Ok(row);
        }
    }
    let info = graph.info();
    let measured = format!(
        "{} nodes, {} edges, recorded in {:.2} ms, 3 replays equal to eager",
        info.nodes.len(),
        info.edges.len(),
        info.record_time.as_secs_f64() * 1e3
    );
    Ok(DoctorRow::new(name, CheckVerdict::Good, measured, "works; replays equal eager runs bit for bit"))
}

pub(super) fn ring(bench: &mut Bench) -> Result<DoctorRow, DriverError> {
    let name = "results without a wait";
    bench.stream.upload(&mut bench.lease, bench.count, &[0; 8])?;
    let launch = LaunchBuilder::new(&bench.publish, 1, 1)
        .step("ring")
        .read_write(bench.ring.buf())
        .read_write(bench.count)
        .read(bench.step.a)
        .baked(Baked(RING_ENTRIES))
        .baked(Baked(RING_STRIDE as u32));
    // SAFETY: `publish` writes the entries of a ring of these sizes, which `Bench::new` created, and a count of 8
    // bytes, and reads one word.
    let launch = unsafe { launch.build() };
    let options = RecordOptions::named(name);
    let graph = bench.stream.record(&bench.memory, Method::Nodes, &options, |q| q.launch(&launch))?;
    let n_results = u64::from(RING_ENTRIES) * 8;
    let (mut sent, mut taken) = (0_u64, 0_u64);
    let mut payload = [0; 4];
    while taken < n_results {
        while sent < n_results && bench.ring.reserve() {
            graph.replay(&mut bench.lease, &mut bench.stream)?;
            sent += 1;
        }
        taken = bench.ring.take(&mut bench.stream, Duration::from_secs(5), &mut payload)?;
    }
    bench.stream.synchronize()?;
    let measured = format!("{taken} results through {RING_ENTRIES} entries");
    Ok(DoctorRow::new(
        name,
        CheckVerdict::Good,
        measured,
        "kernels pass results to the host through pinned memory",
    ))
}

/// Number of results that the loop is allowed, far more than it may write before it is stopped.
const ENDLESS: u64 = 1 << 40;
/// Number of results after which such a loop is stopped.
const N_BEFORE_STOP: u64 = 1000;

/// Runs loops that report through a ring of few entries: to their limit, against a ring that nobody reads, and until
/// the host stops them.
pub(super) fn device_loop(bench: &mut Bench) -> Result<DoctorRow, DriverError> {
    let name = "loop on the device";
    // SAFETY: this crate's own PTX text.
    let module = match unsafe { Module::load(&bench.ctx, "loop", PROBE_LOOP_PTX) } {
        Ok(module) => module,
        Err(error @ DriverError::ModuleLoad { .. }) => return Ok(no_loop(name, &error)),
        Err(error) => return Err(error),
    };
    let repeat = LaunchBuilder::new(&module.function("refrain_probe_repeat")?, 1, 1)
        .step("loop")
        .read_write(bench.ring.buf())
        .read_write(bench.count)
        .read(bench.step.a)
        .baked(Baked(RING_ENTRIES))
        .baked(Baked(RING_STRIDE as u32))
        .condition();
    // SAFETY: `repeat` writes the header and the entries of a ring of these sizes, which `Bench::new` created, and a
    // count of 8 bytes, and reads one word.
    let repeat = unsafe { repeat.build() };
    let options = RecordOptions::named(name);
    let recorded = bench.stream.record_loop(&bench.memory, Method::Nodes, &options, |q| q.launch(&repeat));
    let graph = match recorded {
        Ok(graph) => graph,
        Err(error @ DriverError::Driver { .. }) => return Ok(no_loop(name, &error)),
        Err(error) => return Err(error),
    };
    bench.stream.upload(&mut bench.lease, bench.count, &[0; 8])?;
    bench.ring.restart();
    let n_asked = u64::from(RING_ENTRIES) * 8;
    let (n_results, n_launches) = run_loops(bench, &graph, n_asked)?;
    let (n_more, _) = run_loops(bench, &graph, ENDLESS)?;
    let measured = format!("{n_results} results in {n_launches} launches, stopped after {n_more} more");
    if n_results != n_asked || n_more < N_BEFORE_STOP {
        let words = "a loop ended early or late: replies are generated step by step";
        return Ok(DoctorRow::new(name, CheckVerdict::Bad, measured, words));
    }
    let words = "a reply can run as one launch: kernels repeat a step and the host can end it";
    Ok(DoctorRow::new(name, CheckVerdict::Good, measured, words))
}

fn no_loop(name: &'static str, error: &DriverError) -> DoctorRow {
    let words = format!("{error}: replies are generated step by step");
    let measured = error.code().map_or_else(|| "refused".to_owned(), |code| code.to_string());
    DoctorRow::new(name, CheckVerdict::Note, measured, &words)
}

/// Runs loops until `n` results are collected, or stops an endless one. Returns how many results and
/// launches there were.
fn run_loops(bench: &mut Bench, graph: &crate::Graph, n: u64) -> Result<(u64, u64), DriverError> {
    let (mut n_results, mut n_launches, mut n_ended) = (0, 0, 0);
    let mut payload = [0; 4];
    let began = Instant::now();
    while n_results < n {
        if n_results == n_ended {
            if !bench.ring.begin_loop(n - n_results, 1) {
                break;
            }
            graph.replay(&mut bench.lease, &mut bench.stream)?;
            n_launches += 1;
            n_ended = u64::MAX;
        }
        if bench.ring.try_take(&mut payload)?.is_some() {
            n_results += 1;
            if n == ENDLESS && n_results == N_BEFORE_STOP {
                bench.ring.stop_loop();
            }
        } else if bench.ring.n_pending() == 0 && bench.ring.end_loop().is_some() {
            n_ended = n_results;
            if n == ENDLESS && n_results >= N_BEFORE_STOP {
                break;
            }
        } else {
            bench.stream.is_done()?;
            if began.elapsed() > LOOP_LIMIT {
                bench.ring.stop_loop();
                let (what, waited) = ("a loop on the device", began.elapsed());
                return Err(DriverError::Timeout { what, waited, origin: bench.stream.shared().last() });
            }
        }
    }
    bench.stream.synchronize()?;
    bench.ring.end_loop();
    Ok((n_results, n_launches))
}

/// Time limit of the loops.
const LOOP_LIMIT: Duration = Duration::from_secs(2);

pub(super) fn allocate_under_capture(bench: &mut Bench) -> Result<DoctorRow, DriverError> {
    let name = "allocate while recording";
    let (ctx, step) = (bench.ctx.clone(), bench.step.clone());
    let mut refused = None;
    let mut status = None;
    let options = RecordOptions::named(name);
    let graph = bench.stream.record(&bench.memory, Method::Stream, &options, |q| {
        let mut layout = MemoryLayout::new("too late");
        layout.device("region", 1 << 20);
        refused = Some(Memory::plan(&ctx, &layout));
        status = Some(ctx.device().capture_status()?);
        step.enqueue(q)
    });
    Ok(match (refused, status, graph) {
        (Some(Err(DriverError::CaptureIncompatible { bytes, .. })), Some(CaptureStatus::Active), Ok(_)) => {
            DoctorRow::new(
                name,
                CheckVerdict::Good,
                format!("{bytes} bytes refused"),
                "an allocation during a recording is refused at once, and the recording continues",
            )
        }
        (_, _, Err(error)) => DoctorRow::failed(name, &error),
        (refused, status, Ok(_)) => DoctorRow::new(
            name,
            CheckVerdict::Bad,
            format!("status {status:?}, refused {}", matches!(refused, Some(Err(_)))),
            "an allocation during a recording was not refused",
        ),
    })
}

pub(super) fn watchdog(bench: &mut Bench) -> Result<DoctorRow, DriverError> {
    let name = "abort a recording";
    let step = bench.step.clone();
    let limit = Duration::from_millis(40);
    let options = RecordOptions { limit, ..RecordOptions::named(name) };
    let start = Instant::now();
    let aborted = bench.stream.record(&bench.memory, Method::Stream, &options, |q| {
        // A recording that does not end; bounded, in case the watchdog does not act.
        while start.elapsed() < Duration::from_secs(5) {
            step.enqueue(q)?;
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    });
    let after = start.elapsed();
    let measured = format!("limit {limit:?}, ended after {:.1} ms", after.as_secs_f64() * 1e3);
    match aborted {
        Err(DriverError::RecordingDeadline { last: Some(_), .. }) => {
            let status = bench.stream.capture_status()?;
            let again =
                bench
                    .stream
                    .record(&bench.memory, Method::Stream, &RecordOptions::named(name), |q| step.enqueue(q));
            let good = status == CaptureStatus::None && again.is_ok();
            let verdict = if good { CheckVerdict::Good } else { CheckVerdict::Bad };
            let words = if good {
                "a recording that does not end is aborted, and the next one works"
            } else {
                "a recording was aborted, but the stream cannot be recorded on any more"
            };
            Ok(DoctorRow::new(name, verdict, measured, words))
        }
        Err(error) => Ok(DoctorRow::failed(name, &error)),
        Ok(_) => {
            Ok(DoctorRow::new(name, CheckVerdict::Bad, measured, "the watchdog did not abort the recording"))
        }
    }
}

pub(super) fn survived(bench: &mut Bench) -> Result<DoctorRow, DriverError> {
    let name = "context survived";
    let start = Instant::now();
    let health = bench.stream.health(Duration::from_secs(5))?;
    let measured = format!("{:.2} ms", start.elapsed().as_secs_f64() * 1e3);
    Ok(match health {
        Health::Healthy => DoctorRow::new(
            name,
            CheckVerdict::Good,
            measured,
            "a launch, a copy and a wait work after the failures above",
        ),
        Health::StreamLost { code } => {
            DoctorRow::new(name, CheckVerdict::Bad, code.to_string(), "the stream is lost, the context works")
        }
        Health::ContextLost(lost) => {
            let mut row = DoctorRow::new(name, CheckVerdict::Bad, measured, &lost.to_string());
            row.advice = Some("run without graphs on this driver, and report its version".to_owned());
            row
        }
    })
}

/// Average time of a step within a batch.
#[derive(Clone, Copy)]
struct StepTime {
    /// Measured by the device, between events.
    device_s: f64,
    /// Measured by the host, including the final wait.
    wall_s: f64,
}

impl StepTime {
    /// The device time; the host time on the simulated device, which has no clock.
    fn seconds(self, on_gpu: bool) -> f64 {
        if on_gpu { self.device_s } else { self.wall_s }
    }
}

fn time_batches(
    bench: &mut Bench,
    mut send: impl FnMut(&mut Bench) -> Result<(), DriverError>,
) -> Result<StepTime, DriverError> {
    let (begin, end) = (bench.ctx.event()?, bench.ctx.event()?);
    // The simulated device runs each launch on the host; one short batch is enough to show that it works.
    let on_gpu = bench.ctx.device().backend() != "sim";
    let (n_batches, n_steps) = if on_gpu { (N_BATCHES, BATCH_STEPS) } else { (1, 4) };
    (0..5.min(n_steps)).try_for_each(|_| send(bench))?;
    bench.stream.synchronize()?;
    let (mut device, mut wall) = (Vec::new(), Vec::new());
    for _ in 0..n_batches {
        let start = Instant::now();
        bench.stream.record_event(&begin)?;
        (0..n_steps).try_for_each(|_| send(bench))?;
        bench.stream.record_event(&end)?;
        bench.stream.synchronize()?;
        wall.push(start.elapsed().as_secs_f64() / n_steps as f64);
        device.push(f64::from(end.ms_since(&begin)?) * 1e-3 / n_steps as f64);
    }
    let median = |mut times: Vec<f64>| {
        times.sort_by(f64::total_cmp);
        times[times.len() / 2]
    };
    Ok(StepTime { device_s: median(device), wall_s: median(wall) })
}

/// Returns a step of many empty launches.
fn empty_launches(nothing: &Function) -> impl Fn(&mut dyn Queue) -> Result<(), DriverError> + use<> {
    // SAFETY: the kernel accesses no memory.
    let launch = unsafe { LaunchBuilder::new(nothing, 1, 32).step("cost").build() };
    move |q| (0..LAUNCHES).try_for_each(|_| q.launch(&launch))
}

/// Records the step of empty launches and times its replays.
fn replay_empty_launches(bench: &mut Bench) -> Result<(StepTime, Duration), DriverError> {
    let options = RecordOptions::named("launch cost");
    let many = empty_launches(&bench.nothing);
    let graph = bench.stream.record(&bench.memory, Method::Stream, &options, many)?;
    let time = time_batches(bench, |b| graph.replay(&mut b.lease, &mut b.stream).map(drop))?;
    Ok((time, graph.info().record_time))
}

/// Measures a step of many empty launches, launched one by one and as a graph.
pub(super) fn launch_cost(bench: &mut Bench) -> Result<DoctorRow, DriverError> {
    let many = empty_launches(&bench.nothing);
    let one_by_one = time_batches(bench, |b| b.stream.run(&mut b.lease, true, &many).map(drop))?;
    let (as_graph, record_time) = replay_empty_launches(bench)?;
    let on_gpu = bench.ctx.device().backend() != "sim";
    let [eager, replayed] = [one_by_one, as_graph].map(|t| t.seconds(on_gpu));
    bench.first_cost = Some(replayed);
    let wall = if on_gpu {
        format!(", {:.3} ms measured by the host", as_graph.wall_s * 1e3)
    } else {
        String::new()
    };
    let measured = format!(
        "{LAUNCHES} launches: {:.3} ms on a stream, {:.3} ms as a graph{wall} (recorded in {:.2} ms)",
        eager * 1e3,
        replayed * 1e3,
        record_time.as_secs_f64() * 1e3
    );
    let words = if replayed < eager {
        "replaying a graph is cheaper than launching one by one"
    } else {
        "a graph saves no time here"
    };
    let verdict = if replayed < eager || bench.ctx.device().backend() == "sim" {
        CheckVerdict::Good
    } else {
        CheckVerdict::Note
    };
    Ok(DoctorRow::new("launch cost", verdict, measured, words))
}

/// Measures the same graph again, after the other checks have used the context.
pub(super) fn launch_cost_at_the_end(bench: &mut Bench) -> Result<DoctorRow, DriverError> {
    let name = "launch cost at the end";
    let (as_graph, _) = replay_empty_launches(bench)?;
    let on_gpu = bench.ctx.device().backend() != "sim";
    let replayed = as_graph.seconds(on_gpu);
    let mut measured = format!("{LAUNCHES} launches: {:.3} ms as a graph", replayed * 1e3);
    let Some(first) = bench.first_cost else {
        return Ok(DoctorRow::new(
            name,
            CheckVerdict::Note,
            measured,
            "there is no first measurement to compare with",
        ));
    };
    measured += &format!(", {:.3} ms at the start", first * 1e3);
    // Two runs on a GPU differ by about one percent; the simulated device shares the host with everything else.
    if on_gpu && replayed > 1.1 * first {
        let words =
            "the same graph is slower than in a fresh context: the checks in between left a slowdown behind";
        return Ok(DoctorRow::new(name, CheckVerdict::Note, measured, words));
    }
    let words = match on_gpu {
        true => "the checks in between did not slow graphs down",
        false => "the simulated device has no clock, so nothing is compared",
    };
    Ok(DoctorRow::new(name, CheckVerdict::Good, measured, words))
}

/// Measures the device's read bandwidth; returns the best rate in bytes per second and the number of bytes read.
pub(super) fn read_rate(bench: &mut Bench) -> Result<(f64, u64), DriverError> {
    let device = bench.ctx.device();
    let (free, _) = bench.ctx.mem_info()?;
    // Many times the L2 size, so that this measures the memory; small on the simulated device, which is slow.
    let most = if device.backend() == "sim" { 4 << 20 } else { 4 << 30 };
    let bytes = (free / 4).min(most) & !0xFFFF;
    let mut layout = MemoryLayout::new("bandwidth");
    let (src, sink) = (layout.device("src", bytes), layout.device("sink", 256));
    let memory = Memory::plan(&bench.ctx, &layout)?;
    let mut lease = memory.lease()?;
    let (src, sink) = (memory.buf(src), memory.buf(sink));
    let launch = LaunchBuilder::new(&bench.read, 8 * device.info().n_sms.max(1), 512)
        .step("bandwidth")
        .read(src)
        .baked(Baked(bytes / 16))
        .write(sink);
    // SAFETY: `read` reads that many 16-byte vectors of `src` and writes at most one word to `sink`, which has 256
    // bytes.
    let launch = unsafe { launch.build() };
    bench.stream.run(&mut lease, true, |q| q.fill(src, 1))?;
    let (start, end) = (bench.ctx.event()?, bench.ctx.event()?);
    let mut best = f64::INFINITY;
    for _ in 0..6 {
        bench.stream.record_event(&start)?;
        bench.stream.run(&mut lease, true, |q| q.launch(&launch))?;
        bench.stream.record_event(&end)?;
        bench.stream.synchronize()?;
        best = best.min(f64::from(end.ms_since(&start)?) * 1e-3);
    }
    Ok((if best > 0.0 { bytes as f64 / best } else { 0.0 }, bytes))
}

pub(super) fn bandwidth(bench: &mut Bench) -> Result<DoctorRow, DriverError> {
    let (rate, bytes) = read_rate(bench)?;
    let device = bench.ctx.device();
    let info = device.info();
    let peak = info.peak_bytes_per_second().unwrap_or(0.0);
    let mut measured = format!("{:.0} GB/s over {} MiB", rate / 1e9, bytes >> 20);
    if peak > 0.0 && rate > 0.0 {
        measured += &format!(", {:.0} % of {:.0} GB/s", rate / peak * 100.0, peak / 1e9);
    }
    if device.backend() == "sim" {
        return Ok(DoctorRow::new(
            "read bandwidth",
            CheckVerdict::Good,
            measured,
            "simulated: says nothing about a GPU",
        ));
    }
    let slow = peak > 0.0 && rate < 0.6 * peak;
    let mut row = DoctorRow::new(
        "read bandwidth",
        if slow { CheckVerdict::Note } else { CheckVerdict::Good },
        measured,
        "decoding reads every weight once per token, so this bounds tokens per second",
    );
    row.advice =
        slow.then(|| "check with `nvidia-smi` that the GPU is idle and its clocks are up".to_owned());
    Ok(row)
}
