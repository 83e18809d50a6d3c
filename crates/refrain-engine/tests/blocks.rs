//! Accounting of the block pool.

use proptest::prelude::*;
use refrain_engine::BlockPool;
use std::collections::BTreeSet;

const N_TABLES: usize = 4;

proptest! {
    #[test]
    fn every_block_is_free_or_in_one_table(
        n_blocks in 0usize..24,
        kv_block in 1usize..9,
        steps in prop::collection::vec((0..N_TABLES, any::<bool>(), 0usize..80), 0..60),
    ) {
        let mut pool = BlockPool::new(n_blocks, kv_block);
        let mut tables = vec![Vec::new(); N_TABLES];
        for (which, grow, n_positions) in steps {
            let (before, free) = (tables[which].clone(), pool.n_free());
            let need = n_positions.div_ceil(kv_block);
            if grow {
                match pool.grow(&mut tables[which], n_positions) {
                    Ok(()) => prop_assert_eq!(tables[which].len(), need.max(before.len())),
                    Err(error) => {
                        let missing = need - before.len();
                        prop_assert!(missing > free);
                        prop_assert_eq!((error.need, error.free, error.total), (missing, free, n_blocks));
                        prop_assert_eq!(&tables[which], &before);
                    }
                }
            } else {
                pool.shrink(&mut tables[which], n_positions);
                prop_assert_eq!(tables[which].len(), need.min(before.len()));
            }
            // Kept blocks stay in place, because the sequence's KV is in them.
            let kept = before.len().min(tables[which].len());
            prop_assert_eq!(&tables[which][..kept], &before[..kept]);
            let used: Vec<u32> = tables.concat();
            let different: BTreeSet<u32> = used.iter().copied().collect();
            prop_assert_eq!(different.len(), used.len(), "a block is in two tables");
            prop_assert!(different.iter().all(|&b| (b as usize) < n_blocks));
            prop_assert_eq!(pool.n_free() + used.len(), pool.n_blocks());
        }
    }
}

#[test]
fn a_single_sequence_is_contiguous() {
    let mut pool = BlockPool::new(4, 8);
    let mut table = Vec::new();
    pool.grow(&mut table, 32).unwrap();
    assert_eq!(table, [0, 1, 2, 3]);
    pool.shrink(&mut table, 9);
    pool.grow(&mut table, 32).unwrap();
    assert_eq!(table, [0, 1, 2, 3]);
}

#[test]
#[should_panic(expected = "KV block 0 is released twice")]
fn a_block_that_nobody_holds_cannot_be_released() {
    BlockPool::new(2, 8).shrink(&mut vec![0], 0);
}

#[test]
fn a_pool_that_grows_hands_out_its_old_blocks_first_and_never_shrinks() {
    let mut pool = BlockPool::new(3, 8);
    let (mut one, mut two) = (Vec::new(), Vec::new());
    pool.grow(&mut one, 16).unwrap();
    pool.extend(6);
    pool.extend(2);
    assert_eq!((pool.n_blocks(), pool.n_free()), (6, 4));
    pool.grow(&mut two, 32).unwrap();
    assert_eq!((one, two), (vec![0, 1], vec![2, 3, 4, 5]));
}
