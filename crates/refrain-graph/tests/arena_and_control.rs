//! Buffer placement and the control block.

use proptest::prelude::*;
use refrain_graph::{Arena, ControlBlock, ControlLayout, Input, InputId, PlanError, Span, TensorType};
use refrain_tensor::{DType, Shape};

fn spans() -> impl Strategy<Value = Vec<Span>> {
    let span = (0usize..2000, 0usize..30, 0usize..12);
    let span = span.prop_map(|(bytes, first, length)| Span { bytes, first, last: first + length });
    prop::collection::vec(span, 0..40)
}

proptest! {
    #[test]
    fn buffers_are_aligned_apart_and_within_the_arena(spans in spans(), log_align in 0u32..10) {
        let align = 1usize << log_align;
        let arena = Arena::place(&spans, align);
        prop_assert_eq!(arena.offsets.len(), spans.len());
        let live_at = |t: usize| spans.iter().filter(move |s| s.first <= t && t <= s.last).map(|s| s.bytes).sum::<usize>();
        let least = (0..50).map(live_at).max().unwrap_or(0);
        let most: usize = spans.iter().map(|s| s.bytes.next_multiple_of(align)).sum();
        prop_assert!(arena.bytes >= least && arena.bytes <= most, "{} not in {}..={}", arena.bytes, least, most);
        for (i, (a, &at)) in spans.iter().zip(&arena.offsets).enumerate() {
            prop_assert!(at.is_multiple_of(align) && at + a.bytes <= arena.bytes);
            for (b, &other) in spans.iter().zip(&arena.offsets).take(i) {
                let together = a.first <= b.last && b.first <= a.last;
                let apart = at + a.bytes <= other || other + b.bytes <= at || a.bytes == 0 || b.bytes == 0;
                prop_assert!(!together || apart, "{:?} at {} and {:?} at {}", a, at, b, other);
            }
        }
    }

    #[test]
    fn buffers_with_disjoint_lifetimes_share_an_offset(bytes in 1usize..1000, n in 1usize..20) {
        let spans: Vec<Span> = (0..n).map(|i| Span { bytes, first: i, last: i }).collect();
        prop_assert_eq!(Arena::place(&spans, 1).bytes, bytes);
    }

    #[test]
    fn control_slots_are_aligned_and_apart(sizes in prop::collection::vec(0usize..50, 0..12), log_align in 0u32..9) {
        let align = 1usize << log_align;
        let inputs: Vec<Input> = sizes.iter().enumerate().map(|(i, &n)| input(&format!("i{i}"), DType::I32, n)).collect();
        let layout = ControlLayout::new(&inputs, align).unwrap();
        let mut at = 0;
        for (slot, &n) in layout.slots().iter().zip(&sizes) {
            prop_assert!(slot.offset.is_multiple_of(align) && slot.offset >= at);
            prop_assert_eq!(slot.bytes, 4 * n);
            at = slot.offset + slot.bytes;
        }
        prop_assert!(layout.bytes() >= at && layout.bytes().is_multiple_of(align));
        let mut block = ControlBlock::new(&layout);
        for (i, &n) in sizes.iter().enumerate() {
            block.set_i32(InputId::from_idx(i), &vec![i as i32 + 1; n]).unwrap();
        }
        for (i, slot) in layout.slots().iter().enumerate() {
            let bytes = &block.bytes()[slot.offset..slot.offset + slot.bytes];
            prop_assert!(bytes.chunks(4).all(|w| w == (i as i32 + 1).to_le_bytes()));
        }
    }
}

fn input(name: &str, dtype: DType, n: usize) -> Input {
    Input { name: name.into(), ty: TensorType::new(dtype, Shape::from([n])) }
}

#[test]
fn a_value_of_the_wrong_size_or_dtype_is_refused_and_changes_nothing() {
    let inputs =
        [input("tokens", DType::I32, 3), input("params", DType::F32, 2), input("rng", DType::U32, 4)];
    let layout = ControlLayout::new(&inputs, 64).unwrap();
    let mut block = ControlBlock::new(&layout);
    let [tokens, params, rng] = ["tokens", "params", "rng"].map(|n| layout.find(n).unwrap());
    assert_eq!(layout.find("other"), None);
    let error = block.set_i32(tokens, &[1, 2]).unwrap_err();
    assert_eq!(error.to_string(), "step input \"tokens\" is I32[3], got 2 elements of I32");
    let error = block.set_f32(tokens, &[1.0, 2.0, 3.0]).unwrap_err();
    assert_eq!(error.to_string(), "step input \"tokens\" is I32[3], got 3 elements of F32");
    assert_eq!((error.slot, error.dtype, error.got), (inputs[0].ty, DType::F32, 3));
    assert!(block.set_u32(params, &[1, 2]).is_err());
    assert!(block.set_i32(rng, &[1, 2, 3, 4]).is_err());
    assert!(block.bytes().iter().all(|&b| b == 0));
    block.set_f32(params, &[1.0, 2.0]).unwrap();
    block.set_u32(rng, &[1, 2, 3, u32::MAX]).unwrap();
    let at = layout.slot(rng).offset;
    assert_eq!(block.bytes()[at + 12..at + 16], [0xFF; 4]);
}

#[test]
fn a_step_input_of_partial_blocks_is_refused_by_name() {
    let error = ControlLayout::new(&[input("scales", DType::Q8_0, 33)], 64).unwrap_err();
    assert!(matches!(error, PlanError::PartialBlocks { .. }));
    assert_eq!(error.to_string(), "scales: Q8_0[33] is not whole blocks");
}

/// Queries, keys, values, the row before them and the residual sum of two layers: placing the largest first
/// leaves gaps.
#[test]
fn the_placement_order_with_the_smallest_arena_wins() {
    let lives: [(usize, usize, usize); 19] = [
        (2, 0, 31),
        (2, 1, 4),
        (2, 2, 9),
        (2, 2, 8),
        (2, 2, 8),
        (2, 9, 10),
        (2, 10, 13),
        (3, 12, 15),
        (3, 12, 14),
        (2, 15, 19),
        (2, 17, 24),
        (2, 17, 23),
        (2, 17, 23),
        (2, 24, 25),
        (2, 25, 28),
        (3, 27, 30),
        (3, 27, 29),
        (2, 30, 32),
        (4, 32, 33),
    ];
    let spans = lives.map(|(bytes, first, last)| Span { bytes, first, last });
    let live = |step: usize| {
        spans.iter().filter(|s| s.first <= step && step <= s.last).map(|s| s.bytes).sum::<usize>()
    };
    assert_eq!((0..34).map(live).max(), Some(10));
    assert_eq!(Arena::place(&spans, 1).bytes, 10);
}
