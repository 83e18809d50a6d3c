//! What a step costs on a CUDA device: launches, kernels, and bytes that cross the bus.

use crate::out::{counted, short_time};
use refrain::graph::{Crossing, Plan, SegmentKind};
use refrain::{TableNeeds, TablePlacement};
use refrain_hub::Bytes;
use std::borrow::Cow;

/// What a copy over PCIe 4.0 with sixteen lanes reaches, for an estimate.
const BUS_BYTES_PER_SECOND: f64 = 25e9;
/// What a small copy and its wait take beside their bytes, for an estimate.
const COPY_SECONDS: f64 = 10e-6;

/// Launches by the host and kernels, then each kernel with its count, from the most to the least.
pub(super) fn kernels(plan: &Plan, kernels: &[(usize, Cow<'static, str>)], is_replayed: bool) -> Vec<String> {
    let recordable = plan.segments().iter().filter(|s| s.kind == SegmentKind::Recordable).count();
    let n_launches = if is_replayed { recordable } else { kernels.len() };
    let mut counts: Vec<(&str, usize)> = Vec::new();
    for (_, name) in kernels {
        match counts.iter_mut().find(|(known, _)| known == name) {
            Some((_, n)) => *n += 1,
            None => counts.push((name, 1)),
        }
    }
    counts.sort_by_key(|(_, n)| std::cmp::Reverse(*n));
    let s = if n_launches == 1 { "" } else { "es" };
    let mut lines =
        vec![format!("launches {n_launches} launch{s}, {} a step", counted(kernels.len(), "kernel"))];
    lines.extend(counts.iter().map(|(name, n)| format!("         {n:>5} {name}")));
    lines
}

/// What each host segment takes over the bus, and about how long.
pub(super) fn crossings(plan: &Plan) -> Vec<String> {
    let host = plan.segments().iter().enumerate().filter(|(_, s)| s.kind != SegmentKind::Recordable);
    host.map(|(i, segment)| {
        let crossing = plan.crossing(segment);
        let (down, up) = (Bytes(crossing.to_host_bytes as u64), Bytes(crossing.to_device_bytes as u64));
        let took = short_time(seconds(&crossing));
        format!(
            "host     segment {i}: {down} to the host, {up} back, about {took} a step besides its own work"
        )
    })
    .collect()
}

/// What a read over the bus takes before its first byte is there, for an estimate.
const BUS_LATENCY_SECONDS: f64 = 2e-6;

/// Where the table of per-layer embeddings may lie: the segments of a decode step, what crosses the bus for a token, and
/// about how long that takes.
pub(super) fn placements(needs: &TableNeeds, here: TablePlacement) -> Vec<String> {
    let (table, row) = (Bytes(needs.table_bytes), Bytes(needs.row_bytes));
    let head =
        format!("table    {table} of per-layer embeddings, {row} of it a token; --ple says where it lies:");
    let row_seconds = needs.row_bytes as f64 / BUS_BYTES_PER_SECOND;
    let line = |place: TablePlacement| {
        let what = match place {
            TablePlacement::Auto => unreachable!("auto is no place"),
            TablePlacement::Device => format!("1 segment, nothing over the bus, {table} more on the device"),
            TablePlacement::Pinned => {
                let took = short_time(row_seconds + BUS_LATENCY_SECONDS);
                format!("1 segment, {row} over the bus inside the graph, about {took} a token")
            }
            TablePlacement::Host => {
                let took = short_time(row_seconds + COPY_SECONDS);
                format!(
                    "2 segments, {row} over the bus before the graph, about {took} a token, and none is sent ahead"
                )
            }
        };
        let mark = if place == here { '*' } else { ' ' };
        format!("       {mark} {place:<6} {what}")
    };
    std::iter::once(head).chain(TablePlacement::PLACES.map(line)).collect()
}

fn seconds(crossing: &Crossing) -> f64 {
    let bytes = crossing.to_host_bytes + crossing.to_device_bytes;
    bytes as f64 / BUS_BYTES_PER_SECOND + crossing.n_copies as f64 * COPY_SECONDS
}

#[cfg(test)]
mod tests {
    use super::*;
    use refrain::DType;
    use refrain::graph::{
        GraphBuilder, HostBuf, HostCall, HostCallError, HostFn, PlanOptions, TensorType, Unary,
    };
    use std::sync::Arc;

    struct Pass;

    impl HostFn for Pass {
        fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, HostCallError> {
            Ok(inputs.to_vec())
        }
        fn call(&self, _: &[HostBuf<'_>], _: &mut [&mut [u8]]) -> Result<(), HostCallError> {
            Ok(())
        }
    }

    #[test]
    fn every_place_of_a_table_is_told_with_its_cost() {
        let needs = TableNeeds { table_bytes: 4_697_620_480, row_bytes: 17_920, other_bytes: 5 << 30 };
        let said = placements(&needs, TablePlacement::Pinned);
        assert_eq!(said.len(), 4);
        assert!(said[0].contains("4.4 GiB of per-layer embeddings, 17.5 KiB of it a token"), "{said:?}");
        assert!(said[1].starts_with("         device 1 segment, nothing over the bus"), "{said:?}");
        // 17.5 KiB at 25 GB/s take 0.7 us.
        assert!(
            said[2].starts_with("       * pinned 1 segment") && said[2].contains("about 2.7 us"),
            "{said:?}"
        );
        assert!(said[3].contains("2 segments") && said[3].contains("about 10.7 us"), "{said:?}");
    }

    #[test]
    fn a_plan_with_a_host_step_tells_two_launches_and_what_crosses_the_bus() {
        let mut b = GraphBuilder::new(vec![], vec![]);
        let x = b.input("x", TensorType::new(DType::F32, [1 << 20])).unwrap();
        let x = b.unary(Unary::Exp, x).unwrap();
        let call = HostCall { name: "pass", because: "a test", function: Arc::new(Pass) };
        let x = b.host_call(call, &[x]).unwrap()[0];
        let x = b.unary(Unary::Exp, x).unwrap();
        b.output("x", x).unwrap();
        let plan = Plan::new(&b.finish(), PlanOptions::default()).unwrap();
        let names = [(0, Cow::Borrowed("unary_exp_f32")), (2, Cow::Borrowed("unary_exp_f32"))];
        let said = kernels(&plan, &names, true);
        assert_eq!(said, ["launches 2 launches, 2 kernels a step", "             2 unary_exp_f32"]);
        assert_eq!(kernels(&plan, &names[..1], false)[0], "launches 1 launch, 1 kernel a step");
        let said = crossings(&plan);
        assert_eq!(said.len(), 1, "{said:?}");
        // 8 MiB at 25 GB/s take 336 us, and two copies 20 us.
        assert!(said[0].contains("segment 1: 4.0 MiB to the host, 4.0 MiB back, about 355.5 us"), "{said:?}");
    }
}
