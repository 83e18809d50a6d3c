//! Placement of the per-layer embeddings of a Gemma 4 model, as set in the session options.

use refrain::graph::SegmentKind;
use refrain::{
    DType, Device, FaultScript, GraphMode, Method, ModelFiles, Planner, SessionOptions, TablePlacement,
};
use std::path::Path;

fn files() -> ModelFiles {
    let folder = "../refrain-models/tests/goldens/gemma4-e2b";
    ModelFiles::open(Path::new(env!("CARGO_MANIFEST_DIR")).join(folder)).unwrap()
}

fn options(graph: GraphMode, table: TablePlacement) -> SessionOptions {
    let faults = FaultScript::parse("").unwrap();
    let device = Device::Sim { seed: 1, faults, graph, method: Method::Stream, profile: false };
    SessionOptions { device, table, context: Some(64), kv_dtype: DType::F32, ..SessionOptions::default() }
}

#[test]
fn each_placement_has_the_expected_segments_and_memory() {
    // 128 rows of nine layers of eight elements.
    let table = 128 * 9 * 8 * 4;
    let mut on_device = None;
    for (table_option, kinds, pinned) in [
        (TablePlacement::Auto, &[true][..], 0),
        (TablePlacement::Device, &[true], 0),
        (TablePlacement::Pinned, &[true], table),
        (TablePlacement::Host, &[false, true], 0),
    ] {
        // Graphs are required, but the host step of the requested placement is allowed.
        let planner = Planner::new(&files(), &options(GraphMode::Require, table_option)).unwrap();
        let plan = planner.plan(1).unwrap();
        let found: Vec<bool> = plan.segments().iter().map(|s| s.kind == SegmentKind::Recordable).collect();
        assert_eq!(found, kinds, "{table_option}");
        let memory = planner.device_status().unwrap().memory;
        assert_eq!(memory.pinned_bytes, pinned, "{table_option}");
        let all = *on_device.get_or_insert(memory.weight_bytes);
        let there = matches!(table_option, TablePlacement::Auto | TablePlacement::Device);
        assert_eq!(memory.weight_bytes, if there { all } else { all - table }, "{table_option}");
    }
}

#[test]
fn the_cpu_runs_the_lookup_in_a_host_table_as_its_own_step() {
    let cpu = |table| {
        let device = Device::Cpu { threads: Some(1) };
        let options = SessionOptions { device, ..options(GraphMode::Auto, table) };
        Planner::new(&files(), &options).unwrap().plan(1).unwrap().segments().len()
    };
    assert_eq!([TablePlacement::Auto, TablePlacement::Pinned, TablePlacement::Host].map(cpu), [1, 1, 2]);
}
