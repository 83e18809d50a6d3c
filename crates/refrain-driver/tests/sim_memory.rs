//! Memory of the simulated device: guard zones, use after free, pinned and stream-ordered memory, leaks.

mod sim_common;

use refrain_driver::api::{Census, Code, CopyEnd, DevicePtr, HostPtr, StreamKind};
use refrain_driver::sim::{DriverCall, SimOptions, SimSchedule};
use sim_common::{Bench, options};

#[test]
fn a_kernel_that_writes_past_its_buffer_loses_the_context_for_good() {
    let b = Bench::lazy();
    let p = b.words(16);
    b.fill(b.s, p, 1, 17).expect("the launch itself succeeds");
    assert_eq!(b.sim.stream_synchronize(b.s), Err(Code::ILLEGAL_ADDRESS));
    assert_eq!(b.sim.alloc(4), Err(Code::ILLEGAL_ADDRESS));
    assert_eq!(b.sim.ctx_create(0), Err(Code::ILLEGAL_ADDRESS));
    assert_eq!(b.sim.primary_ctx_retain(0), Err(Code::ILLEGAL_ADDRESS));
    assert_eq!(b.sim.stream_is_capturing(b.s), Err(Code::ILLEGAL_ADDRESS));
    assert_eq!(b.sim.driver_version(), Ok(13000));
    let reports = b.reports();
    assert!(reports[0].contains("kernel fill writes out of bounds: guard zone: bytes 0..68"), "{reports:?}");
}

#[test]
fn every_kind_of_stray_access_has_its_own_report() {
    let before = |b: &Bench, p: DevicePtr| b.fill(b.s, DevicePtr(p.0 - 8), 1, 1);
    let freed = |b: &Bench, p: DevicePtr| {
        b.sim.free(p).expect("free");
        b.fill(b.s, p.add(8), 1, 1)
    };
    let wild = |b: &Bench, _| b.fill(b.s, DevicePtr(0x1000), 1, 1);
    let null = |b: &Bench, p| b.add(b.s, p, DevicePtr(0), p, 1);
    let crooked = |b: &Bench, p: DevicePtr| b.fill(b.s, p.add(2), 1, 1);
    type Launch<'a> = &'a dyn Fn(&Bench, DevicePtr) -> Result<(), Code>;
    let cases: [(Launch<'_>, Code, &str); 5] = [
        (&before, Code::ILLEGAL_ADDRESS, "guard zone"),
        (&freed, Code::ILLEGAL_ADDRESS, "use after free: 4 bytes at offset 8 of 64 bytes"),
        (&wild, Code::ILLEGAL_ADDRESS, "wild address"),
        (&null, Code::ILLEGAL_ADDRESS, "wild address: 4 bytes at 0x0"),
        (&crooked, Code::MISALIGNED_ADDRESS, "not aligned to 4 bytes"),
    ];
    for (launch, code, words) in cases {
        let b = Bench::lazy();
        let p = b.words(16);
        launch(&b, p).expect("the launch itself succeeds");
        assert_eq!(b.sim.stream_synchronize(b.s), Err(code));
        let reports = b.reports();
        assert!(reports[0].contains(words), "{words}: {reports:?}");
    }
}

#[test]
fn device_addresses_are_aligned_never_reused_and_never_pointers() {
    let b = Bench::lazy();
    let mut seen = Vec::new();
    for bytes in [1, 3, 256, 4096, 100] {
        let p = b.sim.alloc(bytes).expect("memory");
        assert!(p.0.is_multiple_of(256) && p.0 >> 48 != 0, "{p:?}");
        assert!(!seen.contains(&p));
        seen.push(p);
        b.sim.free(p).expect("free");
    }
    assert_eq!(b.sim.alloc(0), Err(Code::INVALID_VALUE));
}

#[test]
fn allocations_fail_beyond_the_configured_capacity() {
    let b = Bench::new(SimOptions { memory_bytes: 1000, ..options(SimSchedule::Seeded) });
    assert_eq!(b.sim.mem_info(), Ok((1000, 1000)));
    let p = b.sim.alloc(600).expect("memory");
    assert_eq!(b.sim.alloc(600), Err(Code::OUT_OF_MEMORY));
    assert_eq!(b.sim.alloc_async(600, b.s), Err(Code::OUT_OF_MEMORY));
    assert_eq!(b.sim.alloc(u64::MAX), Err(Code::OUT_OF_MEMORY));
    b.sim.free(p).expect("free");
    assert_eq!(b.sim.mem_info(), Ok((1000, 1000)));
    b.sim.alloc(600).expect("memory again");
}

#[test]
fn freeing_twice_or_inside_an_allocation_is_refused_and_reported() {
    let b = Bench::lazy();
    let p = b.words(16);
    assert_eq!(b.sim.free(p.add(8)), Err(Code::INVALID_VALUE));
    b.sim.free(p).expect("free");
    assert_eq!(b.sim.free(p), Err(Code::INVALID_VALUE));
    assert_eq!(b.reports().len(), 2);
}

#[test]
fn a_copy_beyond_a_buffer_is_refused_at_the_call() {
    let b = Bench::lazy();
    let p = b.words(4);
    assert_eq!(b.sim.memcpy_htod(p, &[0; 17]), Err(Code::INVALID_VALUE));
    assert_eq!(b.sim.memset_async(p, 0, 17, b.s), Err(Code::INVALID_VALUE));
    assert_eq!(b.sim.memcpy_dtod_async(p, p.add(8), 16, b.s), Err(Code::INVALID_VALUE));
    b.sim.ctx_synchronize().expect("the context is healthy");
}

#[test]
fn new_memory_reads_as_not_a_number() {
    let b = Bench::lazy();
    let p = b.sim.alloc(8).expect("memory");
    assert!(b.read(p, 2).into_iter().all(|w| f32::from_bits(w).is_nan()));
}

#[test]
fn pinned_memory_is_real_and_a_kernel_writes_it() {
    let b = Bench::lazy();
    let host = b.sim.alloc_host(64).expect("pinned memory");
    b.fill(b.s, host.device(), 9, 16).expect("launch");
    b.sim.stream_synchronize(b.s).expect("wait");
    // SAFETY: 64 pinned bytes, and the device is done with them.
    let words = unsafe { std::slice::from_raw_parts(host.as_ptr().cast::<u32>(), 16) };
    assert_eq!(words, [9; 16]);
    b.sim.free_host(host).expect("free");
    assert_eq!(b.sim.free_host(host), Err(Code::INVALID_VALUE));
    assert_eq!(b.reports(), Vec::<String>::new());
}

#[test]
fn writes_past_pinned_memory_by_a_kernel_or_the_host_are_detected() {
    let b = Bench::lazy();
    let host = b.sim.alloc_host(64).expect("pinned memory");
    // SAFETY: the guard zone after the 64 bytes is part of the same real allocation.
    unsafe { host.as_ptr().add(64).write(1) };
    b.sim.free_host(host).expect("free");
    assert!(b.reports()[0].contains("guard zone overwritten around 64 pinned bytes"));
    let host = b.sim.alloc_host(64).expect("pinned memory");
    b.fill(b.s, host.device(), 9, 17).expect("launch");
    assert_eq!(b.sim.stream_synchronize(b.s), Err(Code::ILLEGAL_ADDRESS));
}

#[test]
fn pageable_memory_is_read_at_the_call_and_pinned_memory_when_the_copy_runs() {
    let b = Bench::lazy();
    let (p, q) = (b.words(1), b.words(1));
    let mut pageable = 1u32;
    let pinned = b.sim.alloc_host(4).expect("pinned memory");
    // SAFETY: both sources live until the wait below. The pinned one is rewritten on purpose, on this thread, while
    // the copy is still queued.
    unsafe {
        pinned.as_ptr().cast::<u32>().write(1);
        b.sim.memcpy_htod_async(p, HostPtr::of(&raw const pageable), 4, b.s).expect("copy");
        b.sim.memcpy_htod_async(q, pinned, 4, b.s).expect("copy");
        pinned.as_ptr().cast::<u32>().write(2);
    }
    pageable += 1;
    b.sim.stream_synchronize(b.s).expect("wait");
    assert_eq!((b.read(p, 1), b.read(q, 1), pageable), (vec![1], vec![2], 2));
}

#[test]
fn a_copy_node_accepts_only_pinned_host_memory() {
    let b = Bench::lazy();
    let (p, word) = (b.words(1), 5u32);
    let graph = b.sim.graph_create().expect("graph");
    let pageable = CopyEnd::Host(HostPtr::of(&raw const word));
    // SAFETY: the call is refused, so nothing is read later.
    let refused = unsafe { b.sim.graph_add_memcpy(graph, &[], CopyEnd::Device(p), pageable, 4) };
    assert_eq!(refused, Err(Code::INVALID_VALUE));
}

#[test]
fn stream_ordered_memory_is_live_between_its_allocation_and_its_free() {
    let b = Bench::lazy();
    let p = b.sim.alloc_async(64, b.s).expect("memory");
    b.fill(b.s, p, 3, 16).expect("launch");
    b.sim.free_async(p, b.s).expect("free");
    assert_eq!(b.sim.free_async(p, b.s), Err(Code::INVALID_VALUE), "a second free");
    b.sim.stream_synchronize(b.s).expect("wait");
    assert_eq!(b.sim.census().expect("census").allocations, 0);

    let p = b.sim.alloc_async(64, b.s).expect("memory");
    let other = b.stream();
    b.fill(other, p, 3, 16).expect("launch");
    // Nothing orders the other stream after the allocation.
    assert_eq!(b.sim.stream_query(other), Err(Code::ILLEGAL_ADDRESS));
    assert!(b.reports()[0].contains("stream-ordered bytes that are not allocated at this point"));
}

#[test]
fn a_replay_over_freed_memory_is_detected() {
    let b = Bench::lazy();
    let p = b.words(4);
    let graph = b.sim.graph_create().expect("graph");
    b.sim.graph_add_memset(graph, &[], p, 1, 16).expect("node");
    let exec = b.sim.graph_instantiate(graph).expect("exec");
    b.sim.exec_launch(exec, b.s).expect("launch");
    b.sim.free(p).expect("freeing waits for the device");
    b.sim.exec_launch(exec, b.s).expect("launch");
    assert_eq!(b.sim.stream_synchronize(b.s), Err(Code::ILLEGAL_ADDRESS));
    assert!(b.reports()[0].contains("use after free"));
}

#[test]
fn every_object_is_counted_and_the_counts_return_to_zero() {
    let b = Bench::new(options(SimSchedule::Seeded));
    let p = b.words(4);
    let host = b.sim.alloc_host(128).expect("pinned memory");
    let event = b.event();
    let graph = b.sim.graph_create().expect("graph");
    let exec = b.sim.graph_instantiate(graph).expect("exec");
    let full = Census {
        contexts: 1,
        allocations: 1,
        bytes: 16,
        host_allocations: 1,
        host_bytes: 128,
        streams: 1,
        events: 1,
        modules: 1,
        graphs: 1,
        execs: 1,
    };
    assert_eq!(b.driver.stats().live, full);
    b.sim.free(p).expect("free");
    b.sim.free_host(host).expect("free");
    b.sim.event_destroy(event).expect("event");
    b.sim.exec_destroy(exec).expect("exec");
    b.sim.graph_destroy(graph).expect("graph");
    b.sim.module_unload(b.module).expect("module");
    b.sim.stream_destroy(b.s).expect("stream");
    assert_eq!(b.driver.stats().live, Census { contexts: 1, ..Census::default() });
    b.sim.primary_ctx_release(0).expect("context");
    assert_eq!(b.driver.stats().live, Census::default());
    assert_eq!(b.driver.stats().n_calls(DriverCall::Alloc), 1);
    assert!(b.driver.stats().n_calls_total() >= 14);
}

#[test]
fn destroying_a_context_destroys_everything_in_it() {
    let b = Bench::lazy();
    let own = b.sim.ctx_create(0).expect("context");
    b.sim.alloc(64).expect("memory");
    b.sim.alloc_host(64).expect("pinned memory");
    b.sim.stream_create(StreamKind::Blocking).expect("stream");
    b.sim.event_create(false).expect("event");
    b.sim.ctx_destroy(own).expect("destroy");
    assert_eq!(b.sim.alloc(1), Err(Code::INVALID_CONTEXT), "no context is current any more");
    b.sim.ctx_set_current(Some(b.ctx)).expect("back");
    let live = b.driver.stats().live;
    assert_eq!((live.contexts, live.bytes, live.host_bytes, live.streams, live.events), (1, 0, 0, 1, 0));
    assert_eq!(b.sim.ctx_destroy(own), Err(Code::INVALID_CONTEXT));
}
