//! Loops on the device: recording, limits, back-pressure, stopping, and what goes wrong.

mod common;

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use common::{BYTES, Bed, N, built};
use refrain_driver::sim::{FaultScript, SimDriver, SimOptions, SimSchedule};
use refrain_driver::{
    Access, Baked, Buf, Code, DriverError, EdgeKind, Graph, Launch, LaunchBuilder, Lease, Memory,
    MemoryLayout, Method, Module, NodeKind, RecordOptions, Ring, probe,
};

const METHODS: [Method; 2] = [Method::Stream, Method::Nodes];
/// More than the simulated device fills between two looks at the ring.
const N_ENTRIES: u32 = 64;

/// A body `b = b + a`, reported through a ring: its first word is the result.
struct LoopBed<'a> {
    bed: &'a mut Bed,
    lease: Lease,
    ring: Ring,
    memory: std::sync::Arc<Memory>,
    a: Buf,
    b: Buf,
    count: Buf,
    add: Launch,
    repeat: Launch,
}

impl<'a> LoopBed<'a> {
    fn new(bed: &'a mut Bed) -> LoopBed<'a> {
        let mut layout = MemoryLayout::new("loop");
        let [a, b] = ["a", "b"].map(|name| layout.device(name, BYTES));
        let (count, ring) =
            (layout.device("count", 8), layout.pinned("ring", Ring::bytes(N_ENTRIES, 4).unwrap()));
        let memory = Memory::plan(&bed.ctx, &layout).unwrap();
        let ring = Ring::new(&memory, ring, N_ENTRIES, 4).unwrap();
        let [a, b, count] = [a, b, count].map(|region| memory.buf(region));
        // SAFETY: this crate's own PTX text.
        let module = unsafe { Module::load(&bed.ctx, "loop", probe::PROBE_LOOP_PTX) }.unwrap();
        let repeat = LaunchBuilder::new(&module.function("refrain_probe_repeat").unwrap(), 1, 1)
            .step("repeat")
            .read_write(ring.buf())
            .read_write(count)
            .read(b)
            .baked(Baked(N_ENTRIES))
            .baked(Baked(Ring::stride(4).unwrap() as u32))
            .condition();
        let add = LaunchBuilder::new(&bed.step.add, N / 64, 64);
        let add = built(add.step("add").write(b).read(b).read(a).baked(Baked(N)));
        let mut bed = LoopBed {
            lease: memory.lease().unwrap(),
            ring,
            a,
            b,
            count,
            add,
            repeat: built(repeat),
            memory,
            bed,
        };
        bed.restart();
        bed
    }

    fn restart(&mut self) {
        self.ring.restart();
        let (stream, lease) = (&mut self.bed.stream, &mut self.lease);
        stream.upload(lease, self.count, &[0; 8]).unwrap();
        stream.upload(lease, self.a, &3_u32.to_le_bytes().repeat(N as usize)).unwrap();
        stream.upload(lease, self.b, &[0; BYTES as usize]).unwrap();
    }

    fn record(&mut self, method: Method) -> Result<Graph, DriverError> {
        let (add, repeat) = (self.add.clone(), self.repeat.clone());
        self.bed.stream.record_loop(&self.memory, method, &RecordOptions::named("loop"), |q| {
            q.launch(&add)?;
            q.launch(&repeat)
        })
    }

    fn launch(&mut self, graph: &Graph, n: u64) {
        assert!(self.ring.begin_loop(n, 1));
        graph.replay(&mut self.lease, &mut self.bed.stream).unwrap();
    }

    /// Takes results until the loop has ended or there are `n` of them.
    fn take(&mut self, n: usize) -> Vec<u32> {
        let (mut results, mut payload, began) = (Vec::new(), [0; 4], Instant::now());
        while results.len() < n {
            assert!(began.elapsed() < Duration::from_secs(20), "{results:?}");
            match self.ring.try_take(&mut payload).unwrap() {
                Some(_) => results.push(u32::from_le_bytes(payload)),
                None if self.ring.n_pending() == 0 => break,
                None => drop(self.bed.stream.is_done().unwrap()),
            }
        }
        results
    }

    fn wait(&mut self) {
        self.bed.stream.synchronize().unwrap();
    }
}

fn multiples(n: usize) -> Vec<u32> {
    (1..=n as u32).map(|i| 3 * i).collect()
}

both! {
    fn a_loop_runs_its_body_as_often_as_it_was_asked_to(base) {
        let mut bed = LoopBed::new(&mut base);
        for method in METHODS {
            let graph = bed.record(method).unwrap();
            let info = graph.info();
            assert!(info.is_loop && info.dot().contains("body of a loop"));
            assert_eq!(info.counts(), [(NodeKind::Kernel, 2)], "{method}");
            assert_eq!(info.edges, [(0, 1, EdgeKind::Full)]);
            bed.restart();
            let mut all = Vec::new();
            for n in [1, 5, 2] {
                bed.launch(&graph, n);
                bed.wait();
                assert_eq!(bed.ring.loop_end(), Some(all.len() as u64 + n), "{method}");
                all.extend(bed.take(usize::MAX));
                assert_eq!(bed.ring.end_loop(), Some(all.len() as u64));
            }
            assert_eq!((all, graph.n_replays()), (multiples(8), 3));
        }
        assert_eq!(bed.bed.device.take_reports(), Vec::<String>::new());
    }
}

both! {
    fn a_loop_leaves_when_nobody_reads_its_ring_and_continues_with_the_next_launch(base) {
        let mut bed = LoopBed::new(&mut base);
        for method in METHODS {
            let graph = bed.record(method).unwrap();
            bed.restart();
            let n = 2 * N_ENTRIES as usize + 4;
            bed.launch(&graph, n as u64);
            bed.wait();
            assert_eq!(bed.ring.loop_end(), Some(u64::from(N_ENTRIES)), "{method}");
            assert!(!bed.ring.begin_loop(1, 1), "the ring is full");
            let mut all = bed.take(usize::MAX);
            assert_eq!(bed.ring.end_loop(), Some(u64::from(N_ENTRIES)));
            while all.len() < n {
                bed.launch(&graph, (n - all.len()) as u64);
                all.extend(bed.take(usize::MAX));
                assert_eq!(bed.ring.end_loop(), Some(all.len() as u64));
            }
            assert_eq!(all, multiples(n), "{method}");
            bed.wait();
        }
    }
}

both! {
    fn a_loop_that_never_ends_is_stopped_from_another_thread(base) {
        let mut bed = LoopBed::new(&mut base);
        for method in METHODS {
            let graph = bed.record(method).unwrap();
            bed.restart();
            bed.launch(&graph, 1 << 40);
            let mut all = bed.take(100);
            // A host that was not scheduled for long enough finds that the loop has left.
            while bed.ring.end_loop().is_some() {
                bed.launch(&graph, 1 << 40);
                all.extend(bed.take(100 - all.len().min(100)));
            }
            let n_taken = all.len() as u64;
            assert_eq!(all, multiples(all.len()));
            let stopped = AtomicBool::new(false);
            let LoopBed { ring, bed: Bed { stream, .. }, .. } = &mut bed;
            std::thread::scope(|s| {
                s.spawn(|| {
                    ring.stop_loop();
                    stopped.store(true, Ordering::Release);
                });
                while !stopped.load(Ordering::Acquire) {
                    stream.is_done().unwrap();
                }
            });
            bed.wait();
            let n = bed.ring.loop_end().expect("it has been stopped");
            assert!((n_taken..=n_taken + u64::from(N_ENTRIES)).contains(&n), "{n}");
            assert_eq!(bed.take(usize::MAX).len() as u64, n - n_taken);
            assert_eq!(bed.ring.end_loop(), Some(n));
        }
    }
}

both! {
    fn the_launches_of_a_loop_also_run_once_outside_it(base) {
        let mut bed = LoopBed::new(&mut base);
        let graph = bed.record(Method::Nodes).unwrap();
        let (add, repeat) = (bed.add.clone(), bed.repeat.clone());
        let once = |q: &mut dyn refrain_driver::Queue| {
            q.launch(&add)?;
            q.launch(&repeat)
        };
        for _ in 0..2 {
            assert!(bed.ring.reserve());
            bed.bed.stream.run(&mut bed.lease, false, once).unwrap();
        }
        let step = bed.bed.stream.record(&bed.memory, Method::Stream, &RecordOptions::named("step"), once).unwrap();
        assert!(!step.info().is_loop);
        assert!(bed.ring.reserve());
        step.replay(&mut bed.lease, &mut bed.bed.stream).unwrap();
        assert_eq!(bed.take(usize::MAX), multiples(3));
        bed.launch(&graph, 2);
        assert_eq!(bed.take(usize::MAX), [12, 15]);
        bed.wait();
    }
}

both! {
    fn a_loop_that_nothing_ends_or_that_is_empty_is_refused(base) {
        let mut bed = LoopBed::new(&mut base);
        let census = bed.bed.device.census();
        let add = bed.add.clone();
        for method in METHODS {
            let options = RecordOptions::named("loop");
            let endless = bed.bed.stream.record_loop(&bed.memory, method, &options, |q| q.launch(&add));
            let Err(error @ DriverError::LoopWithoutEnd { .. }) = endless else { panic!("{endless:?}") };
            assert!(error.to_string().contains("would never end") && error.hint().is_some());
            let empty = bed.bed.stream.record_loop(&bed.memory, method, &options, |_| Ok(()));
            assert!(matches!(empty, Err(DriverError::EmptyRecording { .. })), "{empty:?}");
        }
        assert_eq!(bed.bed.device.census(), census, "nothing is left behind");
        let graph = bed.record(Method::Stream).unwrap();
        bed.launch(&graph, 3);
        assert_eq!(bed.take(usize::MAX), multiples(3));
        bed.wait();
    }
}

both! {
    fn a_recording_of_a_loop_that_fails_leaves_nothing_that_breaks_the_next(base) {
        let mut bed = LoopBed::new(&mut base);
        for method in METHODS {
            let (add, memory) = (bed.add.clone(), bed.memory.clone());
            let options = RecordOptions { limit: Duration::from_millis(30), ..RecordOptions::named("loop") };
            let stopped = bed.bed.stream.record_loop(&memory, method, &options, |q| {
                let began = Instant::now();
                while began.elapsed() < Duration::from_secs(2) {
                    q.launch(&add)?;
                    std::thread::sleep(Duration::from_millis(2));
                }
                Ok(())
            });
            assert!(matches!(stopped, Err(DriverError::RecordingDeadline { .. })), "{stopped:?}");
            let result = bed.bed.stream.record_loop(&memory, method, &RecordOptions::named("loop"), |q| {
                q.launch(&add)?;
                panic!("in the middle")
            });
            assert!(matches!(result, Err(DriverError::Panicked { .. })), "{result:?}");
            let graph = bed.record(method).unwrap();
            bed.restart();
            bed.launch(&graph, 4);
            assert_eq!(bed.take(usize::MAX), multiples(4), "{method}");
            bed.wait();
        }
    }
}

#[test]
fn a_fault_in_a_body_loses_the_context_and_is_reported() {
    for schedule in [SimSchedule::Lazy, SimSchedule::Seeded] {
        let sim = SimDriver::new(SimOptions { schedule, ..SimOptions::default() });
        let mut base = Bed::on(&sim);
        let mut bed = LoopBed::new(&mut base);
        let graph = bed.record(Method::Nodes).unwrap();
        sim.inject(FaultScript::parse("on 2nd replay: illegal address").unwrap());
        bed.launch(&graph, 3);
        assert_eq!(bed.take(usize::MAX), multiples(3));
        assert_eq!(bed.ring.end_loop(), Some(3));
        bed.launch(&graph, 3);
        let lost = bed.bed.stream.synchronize();
        assert!(
            matches!(&lost, Err(DriverError::ContextLost(lost)) if lost.code == Some(Code::ILLEGAL_ADDRESS))
        );
        assert!(bed.ring.n_pending() > 0, "its results never come");
    }
}

#[test]
fn the_calls_that_build_a_loop_can_fail() {
    for script in [
        "on 1st graph_condition: fail 801",
        "on 1st graph_add_loop: fail 801",
        "on 1st instantiate: out of memory",
        "on 1st add_node: fail 1",
    ] {
        let sim = SimDriver::new(SimOptions::default());
        let mut base = Bed::on(&sim);
        let mut bed = LoopBed::new(&mut base);
        let live = sim.stats().live;
        sim.inject(FaultScript::parse(script).unwrap());
        assert!(bed.record(Method::Nodes).is_err(), "{script}");
        assert_eq!(sim.stats().live, live, "{script}");
        assert_eq!(sim.unused_faults(), Vec::<String>::new());
        let graph = bed.record(Method::Nodes).unwrap();
        bed.launch(&graph, 2);
        assert_eq!(bed.take(usize::MAX), multiples(2));
        bed.wait();
    }
}

#[test]
fn unordered_nodes_of_a_body_are_reported_as_a_race() {
    let sim = SimDriver::new(SimOptions { strict: false, ..SimOptions::default() });
    let mut base = Bed::on(&sim);
    let mut bed = LoopBed::new(&mut base);
    let graph = bed.record(Method::Nodes).unwrap();
    bed.launch(&graph, 3);
    bed.wait();
    assert_eq!(sim.reports(), Vec::<String>::new(), "bodies follow each other");
    // Both write bytes that they declare to read, so nothing orders them.
    let hidden = LaunchBuilder::new(&bed.bed.step.fill, N / 64, 64).buf(bed.b, Access::Read);
    let hidden = built(hidden.baked(Baked(1_u32)).baked(Baked(N)));
    let (add, repeat) = (bed.add.clone(), bed.repeat.clone());
    let graph = bed.bed.stream.record_loop(&bed.memory, Method::Nodes, &RecordOptions::named("race"), |q| {
        [&hidden, &hidden, &add, &repeat].into_iter().try_for_each(|launch| q.launch(launch))
    });
    bed.take(usize::MAX);
    bed.ring.end_loop();
    bed.launch(&graph.unwrap(), 2);
    bed.wait();
    let reports = sim.reports();
    assert_eq!(reports.len(), 2, "one in each body: {reports:?}");
    assert!(reports[0].contains("race between graph nodes"), "{reports:?}");
}
