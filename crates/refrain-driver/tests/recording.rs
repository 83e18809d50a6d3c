//! Content of recordings, and checks of launches, buffers and transfers.

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::{BYTES, Bed, N, built};
use refrain_driver::api::{DevicePtr, StreamHandle};
use refrain_driver::sim::{SimDriver, SimOptions, SimSchedule};
use refrain_driver::{
    Access, Baked, Buf, Device, DriverError, EdgeKind, LaunchBuilder, LibraryCall, Memory, MemoryLayout,
    Method, Module, NodeKind, RecordOptions, Ring, Staging, probe,
};

const METHODS: [Method; 2] = [Method::Stream, Method::Nodes];

both! {
    fn independent_launches_become_branches_and_dependent_ones_wait(bed) {
        let graph = bed.record(Method::Nodes).unwrap();
        let info = graph.info();
        let mut edges: Vec<(u32, u32)> = info.edges.iter().map(|e| (e.0, e.1)).collect();
        edges.sort_unstable();
        // b = a+a | e = 7 | c = b+a | d = c | c = d+e. The last waits for the copy (which waits for c) and for e.
        assert_eq!(edges, [(0, 2), (1, 4), (2, 3), (3, 4)]);
        assert_eq!(info.counts(), [(NodeKind::Kernel, 4), (NodeKind::Memcpy, 1)]);
        bed.check_replay(&graph, 12).unwrap();
    }
}

both! {
    fn overlapping_handles_are_ordered_by_their_bytes(bed) {
        let step = bed.step.clone();
        let half = |b: Buf, i: u64| b.slice(i * BYTES / 2, BYTES / 2).unwrap();
        let fill = |dst: Buf, value: u32| {
            let fill = LaunchBuilder::new(&step.fill, N / 128, 64);
            built(fill.write(dst).baked(Baked(value)).baked(Baked(N / 2)))
        };
        let options = RecordOptions::named("halves");
        let graph = bed.stream.record(&bed.memory, Method::Nodes, &options, |q| {
            q.fill(step.b, 0)?; // 0
            q.launch(&fill(half(step.b, 0), 1))?; // 1, after 0
            q.launch(&fill(half(step.b, 1), 2))?; // 2, after 0, independent of 1
            q.launch(&step.add(step.c, step.b, step.b)) // 3, after both
        });
        let graph = graph.unwrap();
        let mut edges: Vec<(u32, u32)> = graph.info().edges.iter().map(|e| (e.0, e.1)).collect();
        edges.sort_unstable();
        assert_eq!(edges, [(0, 1), (0, 2), (1, 3), (2, 3)]);
        graph.replay(&mut bed.lease, &mut bed.stream).unwrap();
        let c = bed.read(step.c).unwrap();
        assert_eq!((c[0], c[N as usize - 1]), (2, 4));
        assert_eq!(bed.device.take_reports(), Vec::<String>::new());
    }
}

both! {
    fn programmatic_edges_are_created_on_request_and_overlap_can_be_off(bed) {
        if bed.device.backend() == "cuda" && bed.device.info().compute < (9, 0) {
            panic!("this test needs a GPU of compute capability 9.0");
        }
        // SAFETY: this crate's own PTX text.
        let add = unsafe { Module::load(&bed.ctx, "overlap", probe::PROBE_OVERLAP_PTX) }.unwrap();
        let add = add.function("refrain_probe_add_pdl").unwrap();
        let step = bed.step.clone();
        let pdl = |dst, x, y| {
            built(LaunchBuilder::new(&add, N / 64, 64).write(dst).read(x).read(y).baked(Baked(N)).pdl())
        };
        let work = |q: &mut dyn refrain_driver::Queue| {
            q.launch(&pdl(step.b, step.a, step.a))?;
            q.launch(&pdl(step.c, step.b, step.a))?;
            q.launch(&pdl(step.d, step.c, step.b))
        };
        for method in METHODS {
            for overlap in [true, false] {
                let options = RecordOptions { overlap, ..RecordOptions::named("overlap") };
                let graph = bed.stream.record(&bed.memory, method, &options, work).unwrap();
                let early = graph.info().edges.iter().filter(|e| e.2 == EdgeKind::Programmatic).count();
                assert_eq!(early, if overlap { graph.info().edges.len() } else { 0 }, "{method} {overlap}");
                for input in [5, 6] {
                    bed.set_input(input).unwrap();
                    graph.replay(&mut bed.lease, &mut bed.stream).unwrap();
                    assert!(bed.read(step.d).unwrap().iter().all(|&v| v == 5 * input));
                }
            }
        }
        assert_eq!(bed.device.take_reports(), Vec::<String>::new());
    }
}

both! {
    fn a_library_call_becomes_a_child_graph_that_waits_like_any_node(bed) {
        let step = bed.step.clone();
        let api = bed.api();
        let handle: Arc<dyn std::any::Any + Send + Sync> = Arc::new("the library's handle");
        let weak = Arc::downgrade(&handle);
        let call = LibraryCall {
            step: Arc::from("gemm"),
            name: Arc::from("library"),
            reads: vec![step.b],
            writes: vec![step.c, step.e],
            keep: Some(handle),
            run: &|s| {
                let stream = StreamHandle(s.raw());
                let [b, c, e] = [s.address(step.b)?, s.address(step.c)?, s.address(step.e)?].map(DevicePtr);
                api.memcpy_dtod_async(e, b, BYTES, stream).unwrap();
                api.memcpy_dtod_async(c, e, BYTES, stream).unwrap();
                Ok(())
            },
        };
        let mut graphs = Vec::new();
        for method in METHODS {
            let graph = bed.stream.record(&bed.memory, method, &RecordOptions::named("library"), |q| {
                q.launch(&step.add(step.b, step.a, step.a))?;
                q.library(&call)?;
                q.launch(&step.add(step.d, step.c, step.a))
            });
            let graph = graph.unwrap();
            assert_eq!(graph.info().count(NodeKind::Child), usize::from(method == Method::Nodes));
            for input in [2, 9] {
                bed.set_input(input).unwrap();
                graph.replay(&mut bed.lease, &mut bed.stream).unwrap();
                assert!(bed.read(step.d).unwrap().iter().all(|&v| v == 3 * input), "{method}");
            }
            graphs.push(graph);
        }
        drop(call);
        assert!(weak.upgrade().is_some(), "the graphs keep the library's handle alive");
        drop(graphs);
        bed.stream.synchronize().unwrap();
        assert!(weak.upgrade().is_none());
    }
}

both! {
    fn the_drawing_names_steps_and_kernels(bed) {
        for method in METHODS {
            let graph = bed.record(method).unwrap();
            let dot = graph.info().dot();
            assert!(dot.starts_with("digraph \"step\" {") && dot.ends_with("}\n"));
            assert!(dot.contains("kernel \\\"refrain_probe_fill\\\" of step \\\"step\\\""), "{dot}");
            assert_eq!(dot.matches(" -> ").count(), graph.info().edges.len());
        }
    }
}

#[test]
fn a_ring_larger_than_its_region_is_an_error() {
    assert_eq!(Ring::bytes(4, 4), Some(64 + 4 * 16));
    let bed = Bed::sim();
    let mut layout = MemoryLayout::new("ring");
    let region = layout.pinned("ring", 256);
    let memory = Memory::plan(&bed.ctx, &layout).unwrap();
    for (n_entries, payload_bytes) in [(u32::MAX, usize::MAX / 2), (1, usize::MAX), (u32::MAX, 1 << 31)] {
        let ring = Ring::new(&memory, region, n_entries, payload_bytes);
        assert!(matches!(ring, Err(DriverError::OutOfRange { .. })), "{ring:?}");
    }
    assert_eq!([Ring::bytes(u32::MAX, usize::MAX / 2), Ring::bytes(1, usize::MAX)], [None; 2]);
    let mut ring = Ring::new(&memory, region, 4, 4).unwrap();
    // Results of a different size in the same region, with as many entries, if they fit.
    for payload_bytes in [48, usize::MAX, 1 << 40] {
        let refused = ring.restart_with(payload_bytes);
        assert!(matches!(refused, Err(DriverError::OutOfRange { bytes: 256, .. })), "{refused:?}");
        assert_eq!(ring.payload_bytes(), 4);
    }
    ring.restart_with(40).unwrap();
    assert_eq!(ring.payload_bytes(), 40);
    assert!((0..4).all(|_| ring.reserve()) && !ring.reserve());
    assert_eq!(ring.try_take(&mut [0; 40]).unwrap(), None);
}

both! {
    fn results_arrive_through_the_ring_in_order_without_a_wait(bed) {
        let mut layout = MemoryLayout::new("ring");
        let (ring, count, token) = (layout.pinned("ring", Ring::bytes(4, 4).unwrap()), layout.device("count", 8), layout.device("token", 4));
        let memory = Memory::plan(&bed.ctx, &layout).unwrap();
        let mut lease = memory.lease().unwrap();
        let region = ring;
        let mut ring = Ring::new(&memory, region, 4, 4).unwrap();
        assert!(Ring::new(&memory, region, 4, 4).is_err(), "one ring per region");
        let (count, token) = (memory.buf(count), memory.buf(token));
        bed.stream.run(&mut lease, true, |q| q.fill(count, 0)).unwrap();
        let mut staging = Staging::new(&bed.ctx, 3, 64).unwrap();
        let launch = LaunchBuilder::new(&bed.function("publish"), 1, 1)
            .read_write(ring.buf())
            .read_write(count)
            .slot(token.slot::<u32>(0).unwrap())
            .baked(Baked(4_u32))
            .baked(Baked(Ring::stride(4).unwrap() as u32));
        let launch = built(launch);
        let options = RecordOptions::named("publish");
        let graph = bed.stream.record(&memory, Method::Stream, &options, |q| q.launch(&launch)).unwrap();
        let (mut sent, mut got) = (0_u32, Vec::new());
        let mut payload = [0; 4];
        while got.len() < 50 {
            while sent < 50 && ring.reserve() {
                bed.stream.set(&mut lease, &mut staging, token.slot(0).unwrap(), 1000 + sent).unwrap();
                graph.replay(&mut lease, &mut bed.stream).unwrap();
                sent += 1;
            }
            assert!(ring.n_pending() <= 4);
            let seq = ring.take(&mut bed.stream, Duration::from_secs(5), &mut payload).unwrap();
            assert_eq!(seq, got.len() as u64 + 1);
            got.push(u32::from_le_bytes(payload));
        }
        assert_eq!(got, (1000..1050).collect::<Vec<u32>>());
        let nothing = ring.take(&mut bed.stream, Duration::from_millis(5), &mut payload);
        assert!(matches!(nothing, Err(DriverError::Timeout { .. })), "{nothing:?}");
        // Too many steps: the host notices the overrun.
        for _ in 0..6 {
            graph.replay(&mut lease, &mut bed.stream).unwrap();
        }
        bed.stream.synchronize().unwrap();
        let overrun = ring.take(&mut bed.stream, Duration::from_secs(5), &mut payload);
        assert!(matches!(overrun, Err(DriverError::RingOverrun { expected: 51, found: 55 })), "{overrun:?}");
    }
}

both! {
    fn copies_between_pinned_and_device_memory_are_recorded_with_memory_that_the_graph_owns(bed) {
        let mut layout = MemoryLayout::new("pinned");
        let (pinned, device, other) = (layout.pinned("p", 64), layout.device("d", 64), layout.pinned("o", 64));
        let memory = Memory::plan(&bed.ctx, &layout).unwrap();
        let mut lease = memory.lease().unwrap();
        let [pinned, device, other] = [pinned, device, other].map(|r| memory.buf(r));
        for method in METHODS {
            let graph = bed.stream.record(&memory, method, &RecordOptions::named("copies"), |q| {
                q.fill(pinned, 0x3C)?;
                q.copy(device, pinned)?;
                q.copy(other, device)
            });
            bed.stream.run(&mut lease, true, |q| q.fill(other, 0)).unwrap();
            let out = graph.unwrap().replay(&mut lease, &mut bed.stream).unwrap();
            assert_eq!(out.values::<u8>(&mut bed.stream, other).unwrap(), [0x3C; 64], "{method}");
        }
    }
}

both! {
    fn a_buffer_of_another_memory_or_out_of_range_is_refused(bed) {
        let mut layout = MemoryLayout::new("other");
        let region = layout.device("x", BYTES);
        let other = Memory::plan(&bed.ctx, &layout).unwrap();
        let foreign = other.buf(region);
        for method in METHODS {
            let step = bed.step.clone();
            let options = RecordOptions::named("foreign");
            let result = bed.stream.record(&bed.memory, method, &options, |q| q.launch(&step.fill(foreign, 1)));
            assert!(matches!(result, Err(DriverError::ForeignMemory { .. })), "{result:?}");
            let result = bed.stream.record(&bed.memory, method, &options, |q| q.copy(step.a, foreign));
            assert!(matches!(result, Err(DriverError::ForeignMemory { .. })), "{result:?}");
        }
        assert!(matches!(bed.step.a.slice(1, BYTES), Err(DriverError::OutOfRange { .. })));
        assert!(matches!(bed.step.a.slice(u64::MAX, 2), Err(DriverError::OutOfRange { .. })));
        assert!(matches!(bed.step.a.slot::<u64>(BYTES - 4), Err(DriverError::OutOfRange { .. })));
        let graph = bed.record(Method::Stream).unwrap();
        let mut wrong = other.lease().unwrap();
        assert!(matches!(graph.replay(&mut wrong, &mut bed.stream), Err(DriverError::ForeignMemory { .. })));
        assert!(matches!(other.lease(), Err(DriverError::LeaseTaken { .. })));
        drop(wrong);
        assert!(other.lease().is_ok());
    }
}

both! {
    fn a_launch_is_checked_against_the_compiled_kernel(bed) {
        let step = bed.step.clone();
        let run = |bed: &mut Bed, launch: LaunchBuilder| {
            let launch = built(launch);
            bed.stream.run(&mut bed.lease, true, |q| q.launch(&launch)).map(|_| ()).unwrap_err()
        };
        let few = LaunchBuilder::new(&step.fill, 1, 32).step("s").write(step.a).baked(Baked(1_u32));
        let few = run(&mut bed, few);
        assert!(matches!(few, DriverError::ParamCount { expected: 3, given: 2, .. }), "{few}");
        let wide = LaunchBuilder::new(&step.fill, 1, 32).write(step.a).baked(Baked(1_u64)).baked(Baked(N));
        let wide = run(&mut bed, wide);
        assert!(matches!(wide, DriverError::ParamSize { index: 1, expected: 4, given: 8, .. }), "{wide}");
        let good = || step.filling(step.a, 1);
        let threads = LaunchBuilder::new(&step.fill, 1, 4096);
        let threads = threads.write(step.a).baked(Baked(1_u32)).baked(Baked(N));
        assert!(matches!(run(&mut bed, threads), DriverError::LaunchShape { what: "threads per block", .. }));
        let shared = run(&mut bed, good().shared(1 << 20));
        assert!(matches!(shared, DriverError::LaunchShape { what: "dynamic shared bytes", .. }), "{shared}");
        assert!(matches!(run(&mut bed, good().cluster(3)), DriverError::LaunchShape { .. }));
        let grid = LaunchBuilder::new(&step.fill, 0, 32).write(step.a).baked(Baked(1_u32)).baked(Baked(N));
        assert!(matches!(run(&mut bed, grid), DriverError::LaunchShape { what: "blocks", .. }));
        let many = LaunchBuilder::new(&step.fill, 10_000_000, 1024);
        let many = many.write(step.a).baked(Baked(1_u32)).baked(Baked(N));
        assert!(matches!(run(&mut bed, many.cooperative()), DriverError::LaunchShape { what: "cooperative blocks", .. }));
        bed.stream.run(&mut bed.lease, true, |q| q.launch(&built(good().cooperative()))).unwrap();
        let undeclared = run(&mut bed, good().touches(Memory::dangling_buf(), Access::Read));
        assert!(matches!(undeclared, DriverError::ForeignMemory { .. }));
        bed.check_good();
    }
}

both! {
    fn addresses_in_a_struct_are_resolved_checked_and_ordered_like_arguments(bed) {
        let step = bed.step.clone();
        // The kernel's second parameter is a pointer, passed here as an 8-byte struct that holds one.
        let add = |x: Buf| {
            let add = LaunchBuilder::new(&step.add, N / 64, 64).step("table").write(step.c);
            built(add.table(Baked(&[0_u64]), vec![(0, x, Access::Read)]).read(step.a).baked(Baked(N)))
        };
        for method in METHODS {
            let graph = bed.stream.record(&bed.memory, method, &RecordOptions::named("table"), |q| {
                q.launch(&step.fill(step.b, 7))?;
                q.launch(&add(step.b))
            });
            let graph = graph.unwrap();
            let edges: Vec<(u32, u32)> = graph.info().edges.iter().map(|e| (e.0, e.1)).collect();
            assert_eq!(edges, [(0, 1)], "{method}");
            bed.set_input(5).unwrap();
            graph.replay(&mut bed.lease, &mut bed.stream).unwrap();
            assert_eq!(bed.read(step.c).unwrap(), vec![12; N as usize], "{method}");
        }
        let accesses: Vec<(Buf, Access)> = add(step.b).accesses().collect();
        assert_eq!(accesses.len(), 3);
        assert_eq!(accesses[1].1, Access::Read);
        let gone = add(Memory::dangling_buf());
        let refused = bed.stream.run(&mut bed.lease, true, |q| q.launch(&gone)).map(|_| ()).unwrap_err();
        assert!(matches!(refused, DriverError::ForeignMemory { .. }), "{refused}");
        assert_eq!(bed.device.take_reports(), Vec::<String>::new());
    }
}

trait BufOfNothing {
    fn dangling_buf() -> Buf;
}

impl BufOfNothing for Memory {
    /// A handle to a memory that no longer exists.
    fn dangling_buf() -> Buf {
        let device = Device::open(refrain_driver::DeviceKind::Sim(Default::default())).unwrap();
        let ctx = device.context().unwrap();
        let mut layout = MemoryLayout::new("gone");
        let region = layout.device("x", 8);
        let memory = Memory::plan(&ctx, &layout).unwrap();
        memory.buf(region)
    }
}

both! {
    fn an_empty_recording_is_an_error(bed) {
        for method in METHODS {
            let result = bed.stream.record(&bed.memory, method, &RecordOptions::named("nothing"), |_| Ok(()));
            assert!(matches!(result, Err(DriverError::EmptyRecording { .. })), "{result:?}");
            let empty = bed.step.a.slice(0, 0).unwrap();
            let result = bed.stream.record(&bed.memory, method, &RecordOptions::named("nothing"), |q| {
                q.copy(empty, empty)?;
                q.fill(empty, 1)
            });
            assert!(matches!(result, Err(DriverError::EmptyRecording { .. })), "{result:?}");
        }
        bed.check_good();
    }
}

both! {
    fn a_recording_inside_a_recording_is_refused(bed) {
        let mut other = bed.ctx.stream().unwrap();
        let (step, memory) = (bed.step.clone(), Arc::clone(&bed.memory));
        let graph = bed.stream.record(&bed.memory, Method::Stream, &RecordOptions::named("outer"), |q| {
            let inner = other.record(&memory, Method::Nodes, &RecordOptions::named("inner"), |q| step.enqueue(q));
            assert!(matches!(inner, Err(DriverError::CaptureIncompatible { .. })), "{inner:?}");
            step.enqueue(q)
        });
        graph.unwrap();
        bed.check_good();
    }
}

both! {
    fn global_mode_records_too(bed) {
        let step = bed.step.clone();
        let options = RecordOptions { global: true, ..RecordOptions::named("global") };
        let graph = bed.stream.record(&bed.memory, Method::Stream, &options, |q| step.enqueue(q)).unwrap();
        bed.check_replay(&graph, 4).unwrap();
    }
}

both! {
    fn two_streams_may_use_a_memory_only_one_after_the_other(bed) {
        let graph = bed.record(Method::Stream).unwrap();
        let mut other = bed.ctx.stream().unwrap();
        graph.replay(&mut bed.lease, &mut bed.stream).unwrap();
        let busy = graph.replay(&mut bed.lease, &mut other);
        assert!(matches!(busy, Err(DriverError::LeaseBusy { .. })), "{busy:?}");
        bed.stream.synchronize().unwrap();
        graph.replay(&mut bed.lease, &mut other).unwrap();
        other.synchronize().unwrap();
        bed.check_replay(&graph, 3).unwrap();
    }
}

both! {
    fn large_transfers_go_through_pinned_slots_in_chunks(bed) {
        let bytes = (9 << 20) + 12345;
        let mut layout = MemoryLayout::new("large");
        let region = layout.device("x", bytes);
        let memory = Memory::plan(&bed.ctx, &layout).unwrap();
        let mut lease = memory.lease().unwrap();
        let data: Vec<u8> = (0..bytes).map(|i| (i * 31 % 251) as u8).collect();
        let buf = memory.buf(region);
        bed.stream.upload(&mut lease, buf, &data).unwrap();
        let mut back = vec![0; bytes as usize];
        bed.stream.download(&lease, buf, &mut back).unwrap();
        assert!(back == data);
        let short = bed.stream.upload(&mut lease, buf, &data[1..]);
        assert!(matches!(short, Err(DriverError::SizeMismatch { .. })));
    }
}

both! {
    fn events_time_and_order_streams(bed) {
        let (start, end) = (bed.ctx.event().unwrap(), bed.ctx.event().unwrap());
        let mut other = bed.ctx.stream().unwrap();
        bed.stream.record_event(&start).unwrap();
        let spin = built(LaunchBuilder::new(&bed.function("spin"), 1, 1).baked(Baked(2_000_000_u64)));
        bed.stream.run(&mut bed.lease, true, |q| q.launch(&spin)).unwrap();
        bed.stream.record_event(&end).unwrap();
        other.wait_event(&end).unwrap();
        other.synchronize().unwrap();
        end.wait(Duration::from_secs(1)).unwrap();
        let ms = end.ms_since(&start).unwrap();
        assert!((0.0..1000.0).contains(&ms), "{ms}");
        bed.stream.synchronize().unwrap();
    }
}

#[test]
fn explicit_graphs_give_the_same_bytes_in_every_legal_order() {
    for seed in 0..40 {
        let options = SimOptions { seed, schedule: SimSchedule::Lazy, ..SimOptions::default() };
        let mut bed = Bed::on(&SimDriver::new(options));
        bed.check_good();
    }
}

#[test]
fn an_undeclared_access_is_reported_as_a_race_by_the_simulated_device() {
    let mut found = 0;
    for seed in 0..10 {
        let options = SimOptions { seed, strict: false, ..SimOptions::default() };
        let mut bed = Bed::on(&SimDriver::new(options));
        let step = bed.step.clone();
        // Reads all of `b` but declares only one word of it.
        let word = step.b.slice(0, 4).unwrap();
        let half = step.b.slice(BYTES / 2, BYTES / 2).unwrap();
        let graph = bed.stream.record(&bed.memory, Method::Nodes, &RecordOptions::named("liar"), |q| {
            q.fill(half, 1)?;
            q.launch(&step.add(step.c, word, word))
        });
        graph.unwrap().replay(&mut bed.lease, &mut bed.stream).unwrap();
        bed.stream.synchronize().unwrap();
        found += usize::from(!bed.device.take_reports().is_empty());
    }
    assert_eq!(found, 10);
}

both! {
    fn a_panic_while_enqueueing_to_a_live_stream_is_an_error_and_the_stream_still_works(bed) {
        let step = bed.step.clone();
        let result = bed.stream.run(&mut bed.lease, true, |q| {
            q.launch(&step.fill(step.b, 1))?;
            panic!("half way")
        });
        assert!(matches!(result, Err(DriverError::Panicked { .. })), "{result:?}");
        bed.check_good();
    }
}

both! {
    fn a_successor_memory_keeps_inherited_addresses_and_the_old_memory_cannot_be_used(bed) {
        let step = bed.step.clone();
        let graph = bed.record(Method::Stream).unwrap();
        bed.check_replay(&graph, 5).unwrap();
        let names = |memory: &Memory| -> Vec<(String, u64)> {
            memory.regions().map(|(name, _, address)| (name.to_owned(), address)).collect()
        };
        let before = names(&bed.memory);
        let mut layout = MemoryLayout::new("bed");
        let sources = bed.regions;
        let c = layout.inherit("c", sources[2]);
        let more = layout.device("more", 4 * BYTES);
        let spare = Memory::plan(&bed.ctx, &MemoryLayout::new("spare")).unwrap();
        let lease = std::mem::replace(&mut bed.lease, spare.lease().unwrap());
        // With work in flight, whose results the successor takes over.
        let mut lease = lease.succeed(&layout).map_err(|(_, error)| error).unwrap();
        let memory = Arc::clone(lease.memory());
        assert_eq!(names(&memory)[0], before[2]);
        let mut words = vec![0u8; BYTES as usize];
        bed.stream.download(&lease, memory.buf(c), &mut words).unwrap();
        assert_eq!(words[..4], common::Step::expected(5).to_le_bytes());
        bed.stream.upload(&mut lease, memory.buf(more), &[7; 4 * BYTES as usize]).unwrap();
        // Handles, graphs and further leases of the old memory are all refused.
        assert!(matches!(
            bed.stream.download(&lease, step.c, &mut words),
            Err(DriverError::ForeignMemory { .. })
        ));
        assert!(graph.replay(&mut lease, &mut bed.stream).is_err());
        assert!(matches!(bed.memory.lease(), Err(DriverError::LeaseTaken { .. })));
        // Inheriting a missing region returns the old lease.
        let mut wrong = MemoryLayout::new("wrong");
        wrong.inherit("nothing", more);
        wrong.inherit("nothing either", sources[4]);
        let (lease, error) = lease.succeed(&wrong).unwrap_err();
        assert!(matches!(error, DriverError::OutOfRange { .. }), "{error}");
        bed.stream.download(&lease, memory.buf(c), &mut words).unwrap();
        assert_eq!(bed.device.take_reports(), Vec::<String>::new());
    }
}
