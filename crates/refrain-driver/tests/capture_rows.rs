//! One named test for each row of the capture table that concerns the driver.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use common::{Bed, faults};
use refrain_driver::api::{DevicePtr, StreamHandle};
use refrain_driver::sim::{DriverCall, SimDriver, SimOptions};
use refrain_driver::{
    CaptureStatus, Code, Device, DriverError, Health, LibraryCall, Memory, MemoryLayout, Method, Module,
    NodeKind, RecordOptions, Staging, capture_status, probe,
};

const METHODS: [Method; 2] = [Method::Stream, Method::Nodes];

fn incompatible<T>(result: Result<T, DriverError>) -> bool {
    matches!(result, Err(DriverError::CaptureIncompatible { .. }))
}

both! {
    /// Row 5.
    fn row_5_everything_lazy_is_loaded_before_recording(bed) {
        let (ctx, module, step) = (bed.ctx.clone(), Arc::clone(&bed.module), bed.step.clone());
        for method in METHODS {
            let options = RecordOptions::named("lazy");
            let graph = bed.stream.record(&bed.memory, method, &options, |q| {
                // SAFETY: the load is refused, and nothing of it is launched.
                assert!(incompatible(unsafe { Module::load(&ctx, "late", probe::PROBE_PTX) }));
                assert!(incompatible(module.function("refrain_probe_fill")));
                assert!(incompatible(step.add.allow_shared(50_000)));
                step.enqueue(q)
            });
            assert_eq!(graph.unwrap().info().nodes.len(), 5);
        }
        bed.check_good();
    }
}

both! {
    /// Row 6.
    fn row_6_both_methods_record_the_same_step(bed) {
        let graphs = METHODS.map(|method| bed.record(method).unwrap());
        for input in [3, 1000, u32::MAX] {
            bed.set_input(input).unwrap();
            let step = bed.step.clone();
            let out = bed.stream.run(&mut bed.lease, false, |q| step.enqueue(q)).unwrap();
            let eager = out.values::<u32>(&mut bed.stream, step.c).unwrap();
            for graph in &graphs {
                let out = graph.replay(&mut bed.lease, &mut bed.stream).unwrap();
                assert_eq!(out.values::<u32>(&mut bed.stream, step.c).unwrap(), eager);
            }
        }
        let [stream, nodes] = graphs;
        assert_eq!(stream.info().edges.len(), 4, "a capture is a chain");
        assert!(nodes.info().edges.len() >= 4, "{:?}", nodes.info().edges);
        assert!(!nodes.info().edges.iter().any(|e| (e.0, e.1) == (0, 1)), "the fill is an independent branch");
    }
}

#[test]
fn row_6_explicit_nodes_work_on_a_driver_that_cannot_capture() {
    let sim = SimDriver::new(SimOptions {
        faults: faults("on every begin_capture: fail 901"),
        ..SimOptions::default()
    });
    let mut bed = Bed::on(&sim);
    assert_eq!(bed.record(Method::Stream).unwrap_err().code(), Some(Code::STREAM_CAPTURE_INVALIDATED));
    let graph = bed.record(Method::Nodes).unwrap();
    bed.check_replay(&graph, 5).unwrap();
}

both! {
    /// Row 8.
    fn row_8_a_failed_recording_leaves_no_state_behind(bed) {
        bed.set_input(11).unwrap();
        let before: Vec<_> = [bed.step.a, bed.step.b, bed.step.c].map(|b| bed.read(b).unwrap()).into();
        let census = bed.device.census();
        for method in METHODS {
            let step = bed.step.clone();
            let options = RecordOptions::named("fails");
            let failed = bed.stream.record(&bed.memory, method, &options, |q| {
                step.enqueue(q)?;
                Err(DriverError::caller(std::io::Error::other("the model is not ready")))
            });
            assert!(matches!(failed, Err(DriverError::Caller(_))), "{failed:?}");
            assert_eq!(bed.stream.capture_status().unwrap(), CaptureStatus::None);
        }
        let after: Vec<_> = [bed.step.a, bed.step.b, bed.step.c].map(|b| bed.read(b).unwrap()).into();
        assert_eq!(before, after);
        assert_eq!(bed.device.census(), census);
        bed.check_good();
    }
}

both! {
    /// Row 13: the recorded stream is unreachable (see the compile_fail doctests), and another stream is refused.
    fn row_13_a_host_copy_forced_through_another_stream_is_a_typed_error(bed) {
        let mut other = bed.ctx.stream().unwrap();
        let mut staging = Staging::new(&bed.ctx, 2, 64).unwrap();
        for method in METHODS {
            let step = bed.step.clone();
            let lease = &mut bed.lease;
            let graph = bed.stream.record(&bed.memory, method, &RecordOptions::named("copies"), |q| {
                let a = step.a.slice(0, 8)?;
                let upload = other.upload(lease, a, &[1; 8]);
                let refused =
                    matches!(upload, Err(DriverError::CaptureIncompatible { what: "upload", bytes: 8 }));
                assert!(refused, "{upload:?}");
                assert!(incompatible(other.stage(lease, &mut staging, a, &[1; 8])));
                assert!(incompatible(other.download(lease, a, &mut [0; 8])));
                step.enqueue(q)
            });
            graph.unwrap();
        }
        drop(other);
        bed.check_good();
    }
}

both! {
    /// Row 14.
    fn row_14_the_status_probe_has_three_values(bed) {
        assert_eq!(capture_status(None).unwrap(), CaptureStatus::None, "without a device nothing is capturing");
        assert_eq!(capture_status(Some(&bed.device)).unwrap(), CaptureStatus::None);
        assert_eq!(bed.stream.capture_status().unwrap(), CaptureStatus::None);
        let step = bed.step.clone();
        let device = bed.device.clone();
        let options = RecordOptions { limit: Duration::from_millis(60), ..RecordOptions::named("probed") };
        let mut seen = Vec::new();
        let broken = bed.stream.record(&bed.memory, Method::Stream, &options, |q| {
            seen.push(device.capture_status()?);
            // Also from another thread.
            seen.push(std::thread::scope(|s| s.spawn(|| device.capture_status()).join().unwrap())?);
            step.enqueue(q)?;
            let start = Instant::now();
            while device.n_aborted() == 0 && start.elapsed() < Duration::from_secs(5) {
                std::thread::sleep(Duration::from_millis(1));
            }
            std::thread::sleep(Duration::from_millis(20));
            seen.push(device.capture_status()?);
            Ok(())
        });
        assert!(matches!(broken, Err(DriverError::RecordingDeadline { .. })), "{broken:?}");
        assert_eq!(seen, [CaptureStatus::Active, CaptureStatus::Active, CaptureStatus::Invalidated]);
        assert_eq!(device.capture_status().unwrap(), CaptureStatus::None);
    }
}

#[test]
fn row_14_probe_errors_are_passed_on_and_901_and_905_mean_invalidated() {
    for (code, expected) in
        [(901, Some(CaptureStatus::Invalidated)), (905, Some(CaptureStatus::Invalidated)), (999, None)]
    {
        let bed = Bed::sim();
        bed.sim.as_ref().unwrap().inject(faults(&format!("on 1st stream_is_capturing: fail {code}")));
        let got = bed.stream.capture_status();
        assert_eq!(got.as_ref().ok().copied(), expected, "{got:?}");
        assert_eq!(got.err().and_then(|e| e.code()), expected.is_none().then_some(Code(code)));
    }
}

both! {
    /// Row 15.
    fn row_15_allocation_and_upload_during_a_recording_fail_fast(bed) {
        let (ctx, step) = (bed.ctx.clone(), bed.step.clone());
        for method in METHODS {
            let start = Instant::now();
            let graph = bed.stream.record(&bed.memory, method, &RecordOptions::named("weights"), |q| {
                let mut layout = MemoryLayout::new("weights");
                layout.device("w", 1 << 30);
                match Memory::plan(&ctx, &layout) {
                    Err(DriverError::CaptureIncompatible { what: "allocation", bytes }) => assert_eq!(bytes, 1 << 30),
                    other => panic!("{other:?}"),
                }
                assert!(incompatible(Staging::new(&ctx, 1, 64)));
                assert!(incompatible(ctx.stream()));
                assert!(incompatible(ctx.event()));
                assert!(incompatible(ctx.device().health(Duration::from_secs(1))));
                step.enqueue(q)
            });
            graph.unwrap();
            assert!(start.elapsed() < Duration::from_secs(5));
        }
        bed.check_good();
    }
}

both! {
    /// Row 16: the watchdog invalidates the capture but never ends it, so nothing enqueued afterwards executes.
    fn row_16_a_recording_past_its_deadline_is_aborted_and_names_the_last_launch(bed) {
        bed.set_input(1).unwrap();
        let before = bed.read(bed.step.c).unwrap();
        for method in METHODS {
            let step = bed.step.clone();
            let options = RecordOptions { limit: Duration::from_millis(30), ..RecordOptions::named("slow") };
            let start = Instant::now();
            let mut errors = 0;
            let broken = bed.stream.record(&bed.memory, method, &options, |q| {
                step.enqueue(q)?;
                std::thread::sleep(Duration::from_millis(60));
                // A caller that ignores errors cannot enqueue anything either.
                for _ in 0..3 {
                    errors += usize::from(q.launch(&step.fill(step.c, 1)).is_err());
                }
                Ok(())
            });
            match broken {
                Err(DriverError::RecordingDeadline { n_enqueued: 5, last: Some(last), .. }) => {
                    assert_eq!((&*last.kernel, &*last.step), ("refrain_probe_add", "step"));
                }
                other => panic!("{other:?}"),
            }
            assert_eq!(errors, 3);
            assert!(start.elapsed() < Duration::from_secs(5));
        }
        assert_eq!(bed.read(bed.step.c).unwrap(), before, "nothing executed");
        assert_eq!(bed.stream.health(Duration::from_secs(5)).unwrap(), Health::Healthy);
        bed.check_good();
    }
}

#[test]
fn row_16_a_driver_call_that_does_not_return_is_reported_to_the_caller() {
    for call in ["end_capture", "instantiate", "begin_capture", "launch"] {
        let sim = SimDriver::new(SimOptions::default());
        let device = Device::simulated(&sim).unwrap();
        let worker = device.spawn(Duration::from_secs(5), Bed::with_context).unwrap();
        sim.inject(faults(&format!("on 1st {call}: hang")));
        let limit = Duration::from_millis(100);
        let start = Instant::now();
        let stuck = worker.call("recording", limit, |bed| bed.record(Method::Stream).map(|_| ()));
        match stuck {
            Err(DriverError::NoAnswer { what: "recording", busy, .. }) => {
                assert!(busy.starts_with("recording, in cu"), "{busy}");
            }
            other => panic!("{call}: {other:?}"),
        }
        // Later calls do not wait again.
        let again = worker.call("another", Duration::from_secs(60), |_| Ok(()));
        assert!(matches!(again, Err(DriverError::NoAnswer { .. })), "{again:?}");
        assert!(start.elapsed() < Duration::from_secs(5), "{call}");
        sim.release_hung();
        // Once the call returns after all, the thread works again.
        let start = Instant::now();
        while worker.call("after", limit, |bed| bed.record(Method::Nodes).map(|_| ())).is_err() {
            assert!(start.elapsed() < Duration::from_secs(10), "{call}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

both! {
    /// Row 17.
    fn row_17_a_graph_with_memory_nodes_is_rejected(bed) {
        let api = bed.api();
        let census = bed.device.census();
        for method in METHODS {
            let step = bed.step.clone();
            let allocates = |s: &mut refrain_driver::LibraryStream<'_>| {
                // An allocation hidden inside a library call.
                let (stream, b) = (StreamHandle(s.raw()), DevicePtr(s.address(step.b)?));
                api.alloc_async(256, stream).unwrap();
                api.memset_async(b, 1, step.b.len(), stream).unwrap();
                Ok(())
            };
            let call = LibraryCall {
                step: Arc::from("gemm"),
                name: Arc::from("library"),
                reads: vec![],
                writes: vec![step.b],
                keep: None,
                run: &allocates,
            };
            let options = RecordOptions::named("allocates");
            let rejected = bed.stream.record(&bed.memory, method, &options, |q| q.library(&call));
            assert!(matches!(rejected, Err(DriverError::MemoryNodes { n_nodes: 1, .. })), "{rejected:?}");
        }
        assert_eq!(bed.device.census(), census);
        bed.check_good();
    }
}

both! {
    /// Row 18.
    fn row_18_the_recording_ends_on_error_and_on_panic(bed) {
        let census = bed.device.census();
        for method in METHODS {
            for point in 0..3 {
                let step = bed.step.clone();
                let options = RecordOptions::named("panics");
                let result = bed.stream.record(&bed.memory, method, &options, |q| {
                    assert!(point != 0, "before the first launch");
                    step.enqueue(q)?;
                    assert!(point != 1, "after the last launch");
                    Err(DriverError::caller(std::io::Error::other("no")))
                });
                match result {
                    Err(DriverError::Panicked { message, .. }) => assert!(point < 2 && message.contains("launch")),
                    Err(DriverError::Caller(_)) => assert_eq!(point, 2),
                    other => panic!("{other:?}"),
                }
                assert_eq!(bed.stream.capture_status().unwrap(), CaptureStatus::None);
                bed.stream.synchronize().unwrap();
            }
        }
        assert_eq!(bed.device.census(), census);
        bed.check_good();
    }
}

both! {
    /// Row 18, with a library call that panics inside its own capture.
    fn row_18_a_panic_in_a_library_call_ends_its_capture_too(bed) {
        let census = bed.device.census();
        let step = bed.step.clone();
        let call = LibraryCall {
            step: Arc::from("gemm"),
            name: Arc::from("library"),
            reads: vec![step.a],
            writes: vec![step.b],
            keep: None,
            run: &|_| panic!("inside the library"),
        };
        for method in METHODS {
            let result = bed.stream.record(&bed.memory, method, &RecordOptions::named("lib"), |q| q.library(&call));
            assert!(matches!(result, Err(DriverError::Panicked { .. })), "{result:?}");
        }
        assert_eq!(bed.device.census(), census);
        bed.check_good();
    }
}

/// Row 19: one thread records repeatedly while another uploads thousands of tensors.
fn uploads_while_recording(device: &Device) {
    let worker = device.spawn(Duration::from_secs(10), Bed::with_context).unwrap();
    let (done, refused, uploaded) = (AtomicBool::new(false), AtomicUsize::new(0), AtomicUsize::new(0));
    let recorded = std::thread::scope(|s| {
        let uploader = s.spawn(|| {
            let tensor = vec![42_u8; common::BYTES as usize];
            for _ in 0..3000 {
                let bytes = tensor.clone();
                let result =
                    worker.call_unless_recording("upload", bytes.len() as u64, Duration::from_secs(10), {
                        move |bed: &mut Bed| bed.stream.upload(&mut bed.lease, bed.step.e, &bytes)
                    });
                match result {
                    Ok(()) => uploaded.fetch_add(1, Ordering::Relaxed),
                    Err(DriverError::CaptureIncompatible { what: "upload", bytes: common::BYTES }) => {
                        refused.fetch_add(1, Ordering::Relaxed)
                    }
                    Err(error) => panic!("{error}"),
                };
            }
            done.store(true, Ordering::Release);
        });
        let mut recorded = 0;
        while !done.load(Ordering::Acquire) {
            for method in METHODS {
                let graph = worker.call("record", Duration::from_secs(10), move |bed| bed.record(method));
                drop(graph.unwrap()); // dropped on this thread, freed later by the device thread
                recorded += 1;
            }
        }
        uploader.join().unwrap();
        recorded
    });
    assert!(recorded >= 2);
    assert_eq!(uploaded.into_inner() + refused.into_inner(), 3000, "each upload succeeded or was refused");
    let good = worker.call("check", Duration::from_secs(10), |bed| {
        bed.check_good();
        Ok(())
    });
    good.unwrap();
}

#[test]
fn row_19_uploads_while_another_thread_records_on_the_simulated_device() {
    let sim = SimDriver::new(SimOptions::default());
    let device = Device::simulated(&sim).unwrap();
    let before = sim.stats().live;
    uploads_while_recording(&device);
    drop(device.context().unwrap()); // frees objects dropped on other threads
    assert_eq!(sim.stats().live, before);
    assert_eq!(
        sim.stats().n_calls(DriverCall::CtxSynchronize),
        0,
        "a context-wide wait would break every capture"
    );
    assert_eq!(
        sim.stats().n_calls(DriverCall::MemcpyHtod),
        0,
        "a synchronous copy would execute at once, outside the graph"
    );
}

#[test]
#[cfg_attr(not(feature = "gpu-tests"), ignore = "needs a CUDA device: cargo xtask gpu-bundle")]
fn row_19_uploads_while_another_thread_records_on_a_gpu() {
    let _turn = common::gpu_turn();
    uploads_while_recording(&Device::open(refrain_driver::DeviceKind::Cuda(0)).unwrap());
}

both! {
    fn frees_during_a_recording_wait_for_its_end(bed) {
        let mut layout = MemoryLayout::new("temporary");
        layout.device("t", 1 << 16);
        layout.pinned("p", 1 << 12);
        for method in METHODS {
            let temporary = Memory::plan(&bed.ctx, &layout).unwrap();
            // SAFETY: none of its kernels is launched.
            let module = unsafe { Module::load(&bed.ctx, "temporary", probe::PROBE_PTX) }.unwrap();
            let event = bed.ctx.event().unwrap();
            let census = bed.device.census();
            let (step, device) = (bed.step.clone(), bed.device.clone());
            let graph = bed.stream.record(&bed.memory, method, &RecordOptions::named("frees"), |q| {
                drop((temporary, module, event));
                assert_eq!(device.n_deferred(), 4);
                assert!(device.census().map(|c| c.allocations) == census.map(|c| c.allocations));
                step.enqueue(q)
            });
            assert_eq!(graph.unwrap().info().count(NodeKind::Kernel), 4);
            assert_eq!(bed.device.n_deferred(), 0);
            assert!(bed.device.census().is_none_or(|c| c.allocations + 1 == census.unwrap().allocations));
        }
        bed.check_good();
    }
}

both! {
    fn a_replay_sees_inputs_written_after_the_recording_and_graphs_outlive_their_handles(bed) {
        let graph = bed.record(Method::Nodes).unwrap();
        let Bed { memory, module, .. } = &bed;
        let weak = (Arc::downgrade(memory), Arc::downgrade(module));
        for input in 0..20 {
            bed.check_replay(&graph, input * 7).unwrap();
        }
        let Bed { lease, stream, step, memory, module, .. } = bed;
        drop((lease, stream, step, memory, module));
        assert!(weak.0.upgrade().is_some() && weak.1.upgrade().is_some(), "the graph keeps them alive");
        drop(graph);
        assert!(weak.0.upgrade().is_none() && weak.1.upgrade().is_none());
    }
}

both! {
    fn a_deadline_at_any_moment_aborts_cleanly_or_not_at_all(bed) {
        let census = bed.device.census();
        let (mut aborted, mut good) = (0, 0);
        for round in 0..150_u64 {
            let method = METHODS[round as usize % 2];
            let step = bed.step.clone();
            let limit = Duration::from_micros(round * 7 % 400);
            let options = RecordOptions { limit, ..RecordOptions::named("tight") };
            let result = bed.stream.record(&bed.memory, method, &options, |q| {
                for _ in 0..8 {
                    step.enqueue(q)?;
                    std::thread::sleep(Duration::from_micros(5));
                }
                Ok(())
            });
            match result {
                Ok(graph) => {
                    good += 1;
                    assert_eq!(graph.info().nodes.len(), 40);
                }
                Err(DriverError::RecordingDeadline { .. }) => aborted += 1,
                Err(error) => panic!("{limit:?}: {error}"),
            }
            assert_eq!(bed.stream.capture_status().unwrap(), CaptureStatus::None);
        }
        assert!(aborted > 0, "{aborted} aborted, {good} good");
        assert_eq!(bed.device.census(), census);
        bed.check_good();
    }
}
