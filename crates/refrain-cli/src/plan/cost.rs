//! Costs of a step on a CUDA device: launches, kernels and transfers over the bus.

use crate::out::{counted, short_time};
use refrain::graph::{Crossing, Plan, SegmentKind};
use refrain::{ExpertNeeds, ExpertPlacement, TableNeeds, TablePlacement};
use refrain_hub::ByteSize;
use std::borrow::Cow;

/// Estimated bandwidth of a copy over PCIe 4.0 x16.
const BUS_BYTES_PER_SECOND: f64 = 25e9;
/// Estimated fixed cost of a small copy and its wait.
const COPY_SECONDS: f64 = 10e-6;

/// Host launches and kernels, then each kernel with its count, in descending order.
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
    let (n_launches, n_kernels) = (counted(n_launches, "launch"), counted(kernels.len(), "kernel"));
    let mut lines = vec![format!("launches {n_launches}, {n_kernels} per step")];
    lines.extend(counts.iter().map(|(name, n)| format!("         {n:>5} {name}")));
    lines
}

/// The transfers of each host segment over the bus, with an estimate of their time.
pub(super) fn crossings(plan: &Plan) -> Vec<String> {
    let host = plan.segments().iter().enumerate().filter(|(_, s)| s.kind != SegmentKind::Recordable);
    host.map(|(i, segment)| {
        let crossing = plan.crossing(segment);
        let (down, up) = (ByteSize(crossing.to_host_bytes as u64), ByteSize(crossing.to_device_bytes as u64));
        let took = short_time(seconds(&crossing));
        format!(
            "host     segment {i}: {down} to the host, {up} back, about {took} per step in addition to its own work"
        )
    })
    .collect()
}

/// Estimated latency of a read over the bus.
const BUS_LATENCY_SECONDS: f64 = 2e-6;

/// The placements of the per-layer embedding table: segments of a decode step, transfers per token, and an estimate of
/// their time.
pub(super) fn placements(needs: &TableNeeds, here: TablePlacement) -> Vec<String> {
    let (table, row) = (ByteSize(needs.table_bytes), ByteSize(needs.row_bytes));
    let head =
        format!("table    {table} of per-layer embeddings, {row} per token; --ple sets the placement:");
    let row_seconds = needs.row_bytes as f64 / BUS_BYTES_PER_SECOND;
    let line = |place: TablePlacement| {
        let what = match place {
            TablePlacement::Auto => unreachable!("auto is not a placement"),
            TablePlacement::Device => format!("1 segment, no transfers, {table} more on the device"),
            TablePlacement::Pinned => {
                let took = short_time(row_seconds + BUS_LATENCY_SECONDS);
                format!("1 segment, {row} over the bus inside the graph, about {took} per token")
            }
            TablePlacement::Host => {
                let took = short_time(row_seconds + COPY_SECONDS);
                format!(
                    "2 segments, {row} over the bus before the graph, about {took} per token, no steps launched ahead"
                )
            }
        };
        let mark = if place == here { '*' } else { ' ' };
        format!("       {mark} {place:<6} {what}")
    };
    std::iter::once(head).chain(TablePlacement::PLACES.map(line)).collect()
}

/// The placements of the experts: memory, transfers per token, and an estimate of their time.
pub(super) fn expert_placements(needs: &ExpertNeeds, here: ExpertPlacement) -> Vec<String> {
    let (all, token) = (ByteSize(needs.expert_bytes), ByteSize(needs.token_bytes));
    let head = format!("experts  {all}, {token} per token; --experts sets the placement:");
    let line = |place: ExpertPlacement| {
        let what = match place {
            ExpertPlacement::Device => format!("1 segment, no transfers, {all} more on the device"),
            ExpertPlacement::Host => {
                let took = short_time(needs.token_bytes as f64 / BUS_BYTES_PER_SECOND);
                format!(
                    "1 segment, {token} over the bus inside the graph, about {took} per token, {all} of pinned host memory"
                )
            }
        };
        let mark = if place == here { '*' } else { ' ' };
        format!("       {mark} {:<6} {what}", place.name())
    };
    std::iter::once(head).chain(ExpertPlacement::PLACES.map(line)).collect()
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
    fn every_placement_of_a_table_is_listed_with_its_cost() {
        let needs = TableNeeds { table_bytes: 4_697_620_480, row_bytes: 17_920, other_bytes: 5 << 30 };
        let said = placements(&needs, TablePlacement::Pinned);
        assert_eq!(said.len(), 4);
        assert!(said[0].contains("4.4 GiB of per-layer embeddings, 17.5 KiB per token"), "{said:?}");
        assert!(said[1].starts_with("         device 1 segment, no transfers"), "{said:?}");
        // 17.5 KiB at 25 GB/s take 0.7 us.
        assert!(
            said[2].starts_with("       * pinned 1 segment") && said[2].contains("about 2.7 us"),
            "{said:?}"
        );
        assert!(said[3].contains("2 segments") && said[3].contains("about 10.7 us"), "{said:?}");
    }

    #[test]
    fn both_placements_of_experts_are_listed_with_their_cost() {
        let needs = ExpertNeeds { expert_bytes: 16 << 30, token_bytes: 1 << 30, other_bytes: 1 << 30 };
        let said = expert_placements(&needs, ExpertPlacement::Host);
        assert_eq!(said[0], "experts  16.0 GiB, 1.0 GiB per token; --experts sets the placement:");
        assert!(said[1].starts_with("         device 1 segment, no transfers, 16.0 GiB more"), "{said:?}");
        // 1 GiB at 25 GB/s takes 43 ms.
        assert!(said[2].starts_with("       * host   1 segment, 1.0 GiB over"), "{said:?}");
        assert!(said[2].contains("about 42.95 ms"), "{said:?}");
    }

    #[test]
    fn a_plan_with_a_host_step_has_two_launches_and_transfers() {
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
        assert_eq!(said, ["launches 2 launches, 2 kernels per step", "             2 unary_exp_f32"]);
        assert_eq!(kernels(&plan, &names[..1], false)[0], "launches 1 launch, 1 kernel per step");
        let said = crossings(&plan);
        assert_eq!(said.len(), 1, "{said:?}");
        // 8 MiB at 25 GB/s take 336 us, and two copies 20 us.
        assert!(said[0].contains("segment 1: 4.0 MiB to the host, 4.0 MiB back, about 355.5 us"), "{said:?}");
    }
}
