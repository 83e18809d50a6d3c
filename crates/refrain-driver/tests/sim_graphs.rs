//! Explicit graphs of the simulated device: orders, races, programmatic edges, children, memory nodes.

mod sim_common;

use std::collections::BTreeSet;
use std::ffi::c_void;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};

use refrain_driver::api::{
    CaptureMode, Code, CopyEnd, Dependency, DevicePtr, EdgeKind, GraphHandle, NodeHandle, NodeKind,
};
use refrain_driver::sim::{SimOptions, SimSchedule};
use sim_common::{Bench, PLAIN, add_params, early_params, fill_params, options};

fn after(nodes: &[NodeHandle]) -> Vec<Dependency> {
    nodes.iter().map(|&on| Dependency { on, kind: EdgeKind::Full }).collect()
}

fn overlapping(on: NodeHandle) -> [Dependency; 1] {
    [Dependency { on, kind: EdgeKind::Programmatic }]
}

fn kernel(b: &Bench, g: GraphHandle, deps: &[Dependency], name: &str, params: &[u8]) -> NodeHandle {
    b.sim.graph_add_kernel(g, deps, b.function(name), &PLAIN, params).expect("kernel node")
}

/// Instantiates, replays and waits. Returns the reports.
fn replay(b: &Bench, graph: GraphHandle) -> Vec<String> {
    let exec = b.sim.graph_instantiate(graph).expect("exec");
    b.sim.exec_launch(exec, b.s).expect("replay");
    b.sim.stream_synchronize(b.s).expect("wait");
    b.sim.exec_destroy(exec).expect("exec");
    b.reports()
}

#[test]
fn a_diamond_computes_the_same_in_every_order() {
    for seed in 0..50 {
        let b = Bench::new(SimOptions { seed, strict: true, ..options(SimSchedule::Seeded) });
        let (x, l, r, out) = (b.words(4), b.words(4), b.words(4), b.words(4));
        let g = b.sim.graph_create().expect("graph");
        let top = kernel(&b, g, &[], "fill", &fill_params(x, 3, 4));
        let left = kernel(&b, g, &after(&[top]), "add", &add_params(l, x, x, 4));
        let right = kernel(&b, g, &after(&[top]), "add", &add_params(r, x, x, 4));
        kernel(&b, g, &after(&[left, right]), "add", &add_params(out, l, r, 4));
        assert_eq!(replay(&b, g), Vec::<String>::new());
        assert_eq!(b.read(out, 4), [12; 4], "seed {seed}");
    }
}

static ORDER: Mutex<Vec<u32>> = Mutex::new(Vec::new());

extern "C" fn note(user: *mut c_void) {
    ORDER.lock().expect("no panic before").push(user as usize as u32);
}

#[test]
fn every_legal_order_of_a_graph_occurs_and_no_other() {
    let b = Bench::lazy();
    let g = b.sim.graph_create().expect("graph");
    // SAFETY: the function uses its argument only as a number.
    let host = |deps: &[Dependency], i: usize| unsafe {
        b.sim.graph_add_host(g, deps, note, std::ptr::without_provenance_mut(i)).expect("host node")
    };
    let a = host(&[], 1);
    let c = host(&after(&[a]), 2);
    let d = host(&after(&[a]), 3);
    host(&after(&[c, d]), 4);
    host(&[], 5);
    let exec = b.sim.graph_instantiate(g).expect("exec");
    let mut seen = BTreeSet::new();
    for _ in 0..400 {
        b.sim.exec_launch(exec, b.s).expect("replay");
        b.sim.stream_synchronize(b.s).expect("wait");
        seen.insert(std::mem::take(&mut *ORDER.lock().expect("no panic before")));
    }
    // 5 at five positions, 2 and 3 in two orders.
    assert_eq!(seen.len(), 10, "{seen:?}");
    assert!(seen.iter().all(|o| {
        let at = |n| o.iter().position(|&x| x == n);
        at(1) < at(2) && at(1) < at(3) && at(4) > at(2) && at(4) > at(3)
    }));
}

#[test]
fn unordered_nodes_over_the_same_bytes_are_reported() {
    let shared_write = |b: &Bench, g, p: DevicePtr| {
        kernel(b, g, &[], "fill", &fill_params(p, 1, 4));
        kernel(b, g, &[], "fill", &fill_params(p.add(12), 2, 4));
    };
    let read_and_write = |b: &Bench, g, p: DevicePtr| {
        kernel(b, g, &[], "add", &add_params(p.add(64), p, p, 4));
        b.sim.graph_add_memset(g, &[], p.add(8), 0, 4).expect("node");
    };
    let two_readers = |b: &Bench, g, p: DevicePtr| {
        kernel(b, g, &[], "add", &add_params(p.add(64), p, p, 4));
        kernel(b, g, &[], "add", &add_params(p.add(96), p, p, 4));
    };
    let neighbours = |b: &Bench, g, p: DevicePtr| {
        kernel(b, g, &[], "fill", &fill_params(p, 1, 4));
        kernel(b, g, &[], "fill", &fill_params(p.add(16), 2, 4));
    };
    let ordered_far = |b: &Bench, g, p: DevicePtr| {
        let first = kernel(b, g, &[], "fill", &fill_params(p, 1, 4));
        let between = b.sim.graph_add_empty(g, &after(&[first])).expect("node");
        b.sim.graph_add_empty(g, &[]).expect("node");
        kernel(b, g, &after(&[between]), "fill", &fill_params(p, 2, 4));
    };
    type Build<'a> = &'a dyn Fn(&Bench, GraphHandle, DevicePtr);
    let cases: [(Build<'_>, usize, &str); 5] = [
        (&shared_write, 1, "writes the same 4 bytes"),
        (&read_and_write, 1, "a fill of 4 bytes (node 1) writes"),
        (&two_readers, 0, ""),
        (&neighbours, 0, ""),
        (&ordered_far, 0, ""),
    ];
    for (build, n, words) in cases {
        let b = Bench::lazy();
        let (g, p) = (b.sim.graph_create().expect("graph"), b.words(64));
        build(&b, g, p);
        let reports = replay(&b, g);
        assert_eq!(reports.len(), n, "{reports:?}");
        assert!(
            reports.iter().all(|r| r.starts_with("race between graph nodes") && r.contains(words)),
            "{reports:?}"
        );
    }
}

#[test]
fn a_race_in_a_graph_fails_the_replay_in_strict_mode() {
    let b = Bench::new(SimOptions { strict: true, ..options(SimSchedule::Seeded) });
    let (g, p) = (b.sim.graph_create().expect("graph"), b.words(4));
    kernel(&b, g, &[], "fill", &fill_params(p, 1, 4));
    kernel(&b, g, &[], "fill", &fill_params(p, 2, 4));
    let exec = b.sim.graph_instantiate(g).expect("exec");
    b.sim.exec_launch(exec, b.s).expect("the launch itself succeeds");
    assert_eq!(b.sim.stream_synchronize(b.s), Err(Code::LAUNCH_FAILED));
}

#[test]
fn a_forked_capture_without_order_between_the_branches_is_reported() {
    let b = Bench::lazy();
    let (p, other, event) = (b.words(4), b.stream(), b.event());
    b.sim.stream_begin_capture(b.s, CaptureMode::ThreadLocal).expect("begin");
    b.sim.event_record(event, b.s).expect("record");
    b.sim.stream_wait_event(other, event).expect("fork");
    b.fill(other, p, 1, 4).expect("launch");
    b.fill(b.s, p, 2, 4).expect("launch");
    b.sim.event_record(event, other).expect("record");
    b.sim.stream_wait_event(b.s, event).expect("join");
    let graph = b.sim.stream_end_capture(b.s).expect("end");
    assert_eq!(replay(&b, graph).len(), 1);
}

#[test]
fn a_programmatic_edge_orders_accesses_after_the_wait_and_none_before_it() {
    // The dependent kernel, whether the edge is programmatic, and whether that is a race.
    let cases = [("add", true, false), ("early", true, true), ("early", false, false), ("rude", true, true)];
    for (name, programmatic, races) in cases {
        for seed in 0..8 {
            let b = Bench::new(SimOptions { seed, ..options(SimSchedule::Seeded) });
            let (g, p, q) = (b.sim.graph_create().expect("graph"), b.words(4), b.words(4));
            let first = kernel(&b, g, &[], "fill", &fill_params(p, 1, 4));
            let params = match name {
                "add" => add_params(q, p, p, 4),
                "early" => early_params(q, p, 4),
                _ => fill_params(p, 2, 4),
            };
            let deps = if programmatic { overlapping(first).to_vec() } else { after(&[first]) };
            kernel(&b, g, &deps, name, &params);
            let reports = replay(&b, g);
            assert_eq!(!reports.is_empty(), races, "{name}, seed {seed}: {reports:?}");
        }
    }
}

#[test]
fn an_early_read_races_with_the_whole_chain_of_programmatic_edges() {
    let b = Bench::lazy();
    let (g, p, q, r) = (b.sim.graph_create().expect("graph"), b.words(4), b.words(4), b.words(4));
    let first = kernel(&b, g, &[], "fill", &fill_params(p, 1, 4));
    let second = kernel(&b, g, &overlapping(first), "fill", &fill_params(q, 1, 4));
    kernel(&b, g, &overlapping(second), "early", &early_params(r, p, 4));
    let reports = replay(&b, g);
    assert_eq!(reports.len(), 1, "{reports:?}");
    assert!(reports[0].contains("(node 0)") && reports[0].contains("(node 2)"), "{reports:?}");
}

#[test]
fn an_early_read_after_a_late_starter_sees_everything_before_that_kernel_complete() {
    let b = Bench::lazy();
    let (g, p, q, r) = (b.sim.graph_create().expect("graph"), b.words(4), b.words(4), b.words(4));
    let first = kernel(&b, g, &[], "fill", &fill_params(p, 1, 4));
    let second = kernel(&b, g, &overlapping(first), "late", &fill_params(q, 1, 4));
    let third = kernel(&b, g, &overlapping(second), "early", &early_params(r, p, 4));
    assert_eq!(replay(&b, g), Vec::<String>::new());
    // That kernel's own writes may still be in flight.
    kernel(&b, g, &overlapping(third), "early", &early_params(r, q, 4));
    let reports = replay(&b, g);
    assert_eq!(reports.len(), 1, "{reports:?}");
    assert!(reports[0].contains("(node 1)") && reports[0].contains("(node 3)"), "{reports:?}");
}

#[test]
fn a_kernel_that_never_waits_can_run_first() {
    let mut seen = BTreeSet::new();
    for seed in 0..40 {
        let b = Bench::new(SimOptions { seed, ..options(SimSchedule::Seeded) });
        let (g, p) = (b.sim.graph_create().expect("graph"), b.words(1));
        let first = kernel(&b, g, &[], "fill", &fill_params(p, 1, 1));
        kernel(&b, g, &overlapping(first), "rude", &fill_params(p, 2, 1));
        replay(&b, g);
        seen.insert(b.read(p, 1)[0]);
    }
    assert_eq!(seen, BTreeSet::from([1, 2]));
}

#[test]
fn programmatic_edges_join_only_kernels_and_dependencies_belong_to_the_graph() {
    let b = Bench::lazy();
    let (g, h, p) = (b.sim.graph_create().expect("graph"), b.sim.graph_create().expect("graph"), b.words(4));
    let fill = b.sim.graph_add_memset(g, &[], p, 1, 16).expect("node");
    let add = |graph, deps: &[Dependency]| {
        b.sim.graph_add_kernel(graph, deps, b.function("fill"), &PLAIN, &fill_params(p, 1, 4)).map(drop)
    };
    assert_eq!(add(g, &overlapping(fill)), Err(Code::INVALID_VALUE));
    assert_eq!(add(h, &after(&[fill])), Err(Code::INVALID_VALUE));
    assert_eq!(add(g, &after(&[fill, fill])), Err(Code::INVALID_VALUE));
    assert_eq!(add(GraphHandle(3), &[]), Err(Code::INVALID_HANDLE));
    add(g, &after(&[fill])).expect("a plain edge");
}

#[test]
fn a_child_graph_is_a_copy_that_runs_in_its_place() {
    let b = Bench::new(SimOptions { strict: true, ..options(SimSchedule::Seeded) });
    let (child, g) = (b.sim.graph_create().expect("graph"), b.sim.graph_create().expect("graph"));
    let (x, y, z) = (b.words(4), b.words(4), b.words(4));
    let inner = kernel(&b, child, &[], "add", &add_params(y, x, x, 4));
    kernel(&b, child, &after(&[inner]), "add", &add_params(y, y, x, 4));
    let first = kernel(&b, g, &[], "fill", &fill_params(x, 2, 4));
    let node = b.sim.graph_add_child(g, &after(&[first]), child).expect("child node");
    kernel(&b, g, &after(&[node]), "add", &add_params(z, y, y, 4));
    b.sim.graph_destroy(child).expect("the parent holds a copy");
    let borrowed = b.sim.graph_child(node).expect("the child");
    assert_eq!(b.sim.graph_nodes(borrowed).expect("nodes").len(), 2);
    assert_eq!(b.sim.graph_destroy(borrowed), Err(Code::INVALID_VALUE));
    assert_eq!(b.driver.stats().live.graphs, 1);
    assert_eq!(replay(&b, g), Vec::<String>::new());
    assert_eq!(b.read(z, 4), [12; 4]);
    b.sim.graph_destroy(g).expect("graph");
    assert_eq!(b.sim.graph_nodes(borrowed), Err(Code::INVALID_HANDLE));
}

#[test]
fn a_graph_launch_cannot_be_captured() {
    let b = Bench::lazy();
    let (g, p) = (b.sim.graph_create().expect("graph"), b.words(4));
    kernel(&b, g, &[], "fill", &fill_params(p, 4, 4));
    let exec = b.sim.graph_instantiate(g).expect("exec");
    b.sim.stream_begin_capture(b.s, CaptureMode::ThreadLocal).expect("begin");
    assert_eq!(b.sim.exec_launch(exec, b.s), Err(Code::STREAM_CAPTURE_UNSUPPORTED));
    assert_eq!(b.sim.stream_end_capture(b.s), Err(Code::STREAM_CAPTURE_INVALIDATED));
}

#[test]
fn copy_nodes_move_bytes_between_pinned_and_device_memory() {
    let b = Bench::lazy();
    let host = b.sim.alloc_host(16).expect("pinned memory");
    let (p, q) = (b.words(2), b.words(2));
    let g = b.sim.graph_create().expect("graph");
    let out = refrain_driver::api::HostPtr(host.0 + 8);
    // SAFETY: the pinned memory outlives the graph.
    unsafe {
        let up = b.sim.graph_add_memcpy(g, &[], CopyEnd::Device(p), CopyEnd::Host(host), 8).expect("node");
        let across = b
            .sim
            .graph_add_memcpy(g, &after(&[up]), CopyEnd::Device(q), CopyEnd::Device(p), 8)
            .expect("node");
        b.sim
            .graph_add_memcpy(g, &after(&[across]), CopyEnd::Host(out), CopyEnd::Device(q), 8)
            .expect("node");
        host.as_ptr().cast::<u64>().write(0x0102_0304_0506_0708);
    }
    assert_eq!(replay(&b, g), Vec::<String>::new());
    // SAFETY: the device is done with it.
    assert_eq!(unsafe { out.as_ptr().cast::<u64>().read() }, 0x0102_0304_0506_0708);
}

#[test]
fn launches_of_one_executable_never_overlap() {
    let b = Bench::lazy();
    let (g, p, one, other) = (b.sim.graph_create().expect("graph"), b.words(1), b.words(1), b.stream());
    b.sim.memcpy_htod(one, &1u32.to_ne_bytes()).expect("upload");
    kernel(&b, g, &[], "add", &add_params(p, p, one, 1));
    let exec = b.sim.graph_instantiate(g).expect("exec");
    b.sim.exec_launch(exec, b.s).expect("replay");
    b.sim.exec_launch(exec, other).expect("replay");
    b.sim.ctx_synchronize().expect("wait");
    assert_eq!(b.read(p, 1), [2]);
    assert_eq!(b.reports(), Vec::<String>::new());
}

#[test]
fn a_memory_node_allocates_at_replay_and_must_be_freed_before_the_next() {
    let b = Bench::lazy();
    b.sim.stream_begin_capture(b.s, CaptureMode::ThreadLocal).expect("begin");
    let p = b.sim.alloc_async(64, b.s).expect("memory node");
    b.fill(b.s, p, 1, 16).expect("launch");
    let graph = b.sim.stream_end_capture(b.s).expect("end");
    assert!(b.sim.graph_nodes(graph).expect("nodes").iter().any(|(_, k)| *k == NodeKind::MemAlloc));
    assert_eq!(b.driver.stats().live.bytes, 0);
    let exec = b.sim.graph_instantiate(graph).expect("exec");
    b.sim.exec_launch(exec, b.s).expect("replay");
    b.sim.stream_synchronize(b.s).expect("wait");
    assert_eq!(b.driver.stats().live.bytes, 64);
    assert_eq!(b.sim.exec_launch(exec, b.s), Err(Code::INVALID_VALUE));
    b.sim.free_async(p, b.s).expect("free");
    b.sim.stream_synchronize(b.s).expect("wait");
    b.sim.exec_launch(exec, b.s).expect("replay");
    b.sim.stream_synchronize(b.s).expect("wait");
    assert_eq!(b.read(p, 16), [1; 16]);
}

#[test]
fn a_node_of_an_unloaded_module_is_detected() {
    let b = Bench::lazy();
    let (g, p) = (b.sim.graph_create().expect("graph"), b.words(4));
    kernel(&b, g, &[], "fill", &fill_params(p, 1, 4));
    let exec = b.sim.graph_instantiate(g).expect("exec");
    b.sim.module_unload(b.module).expect("unload");
    b.sim.exec_launch(exec, b.s).expect("replay");
    assert_eq!(b.sim.stream_synchronize(b.s), Err(Code::ILLEGAL_ADDRESS));
    assert!(b.reports()[0].contains("after its module was unloaded"));
}

static N_CALLED: AtomicU32 = AtomicU32::new(0);

extern "C" fn count(_: *mut c_void) {
    N_CALLED.fetch_add(1, Ordering::SeqCst);
}

#[test]
fn a_graph_of_many_nodes_replays_many_times() {
    let b = Bench::new(SimOptions { strict: true, ..options(SimSchedule::Seeded) });
    let g = b.sim.graph_create().expect("graph");
    let (p, one) = (b.words(16), b.words(1));
    b.sim.memcpy_htod(one, &1u32.to_ne_bytes()).expect("upload");
    let mut tips: Vec<Option<NodeHandle>> = vec![None; 16];
    for i in 0..320 {
        let lane = i % 16;
        let word = p.add(4 * lane as u64);
        let deps: Vec<NodeHandle> = tips[lane].into_iter().collect();
        tips[lane] = Some(kernel(&b, g, &after(&deps), "add", &add_params(word, word, one, 1)));
    }
    // SAFETY: the function ignores its argument.
    unsafe { b.sim.graph_add_host(g, &[], count, std::ptr::null_mut()).expect("host node") };
    let exec = b.sim.graph_instantiate(g).expect("exec");
    for _ in 0..100 {
        b.sim.exec_launch(exec, b.s).expect("replay");
    }
    b.sim.stream_synchronize(b.s).expect("wait");
    assert_eq!(b.read(p, 16), [2000; 16]);
    assert_eq!(N_CALLED.load(Ordering::SeqCst), 100);
}
