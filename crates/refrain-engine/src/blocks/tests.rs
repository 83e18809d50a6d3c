//! Tables checked against a model of the cache's memory.
//!
//! KV at a position depends on all tokens up to it. The model's memory therefore stores, for each cell, the
//! token prefix that the sequence had when it wrote there. A table is correct if every cell it maps to holds
//! its own prefix.

use super::*;
use proptest::prelude::*;
use std::collections::HashMap;

struct Sim {
    pool: SharedPool,
    window: Option<usize>,
    /// Prefix written to (block, offset).
    memory: HashMap<(u32, usize), Vec<u32>>,
    seqs: Vec<Sim1>,
}

/// A sequence and the tokens it holds.
struct Sim1 {
    tokens: Vec<u32>,
    table: BlockTable,
}

impl Sim {
    fn new(n_blocks: usize, kv_block: usize) -> Sim {
        Sim::windowed(n_blocks, kv_block, None)
    }

    fn windowed(n_blocks: usize, kv_block: usize, window: Option<usize>) -> Sim {
        let pool = SharedPool::new(BlockPool::new(n_blocks, kv_block), n_blocks).windowed(window);
        Sim { pool, window, memory: HashMap::new(), seqs: Vec::new() }
    }

    /// Makes a sequence hold `prompt`, as an engine does; false if the pool is full.
    fn prompt(&mut self, idx: usize, prompt: &[u32]) -> bool {
        let seq = &mut self.seqs[idx];
        let n_shared = seq.tokens.iter().zip(prompt).take_while(|(a, b)| a == b).count();
        let n_shared = n_shared.min(prompt.len().saturating_sub(1));
        let n_held = seq.table.write_from(seq.table.max_kept(n_shared, seq.tokens.len()));
        let n_held = seq.table.reuse(prompt, n_held);
        seq.tokens = prompt[..n_held].to_vec();
        if seq.table.fit(prompt.len()).is_err() {
            return false;
        }
        self.append(idx, &prompt[n_held..])
    }

    /// Appends tokens to a sequence.
    fn append(&mut self, idx: usize, tokens: &[u32]) -> bool {
        let kv_block = self.pool.kv_block();
        let seq = &mut self.seqs[idx];
        for &token in tokens {
            let position = seq.tokens.len();
            if seq.table.fit(position + 1).is_err() {
                return false;
            }
            seq.tokens.push(token);
            let place = (seq.table.blocks()[position / kv_block], position % kv_block);
            self.memory.insert(place, seq.tokens.clone());
        }
        seq.table.publish(&seq.tokens);
        seq.table.leave_window(seq.tokens.len());
        true
    }

    fn check(&self) {
        let kv_block = self.pool.kv_block();
        let mut held: HashMap<u32, u32> = HashMap::new();
        for (idx, Sim1 { tokens, table }) in self.seqs.iter().enumerate() {
            // The next step attends to `window` positions with its own.
            let first = self.window.map_or(0, |window| (tokens.len() + 1).saturating_sub(window));
            for position in first..tokens.len() {
                let place = (table.blocks()[position / kv_block], position % kv_block);
                assert_eq!(self.memory[&place], tokens[..=position], "sequence {idx} at {position}");
            }
            let is_gone = |column: usize| table.blocks()[column] == GONE;
            assert!((0..table.blocks().len()).all(|column| is_gone(column) == (column < table.n_gone)));
            assert!(table.n_gone * kv_block <= first);
            let there = table.blocks().iter().filter(|block| **block != GONE);
            there.for_each(|&block| *held.entry(block).or_default() += 1);
        }
        let pool_state = self.pool.lock();
        for (block, entry) in pool_state.pool.blocks.iter().enumerate() {
            assert_eq!(entry.n_holders, held.get(&(block as u32)).copied().unwrap_or(0), "block {block}");
        }
        let counts = [pool_state.pool.n_free(), pool_state.pool.n_cached(), pool_state.pool.n_used()];
        assert_eq!(counts.iter().sum::<usize>(), pool_state.pool.n_blocks(), "{counts:?}");
        assert_eq!(pool_state.pool.n_used(), held.len());
        // Free blocks are not in the index, and the index agrees with the blocks.
        assert!(pool_state.pool.free.iter().all(|&b| pool_state.pool.blocks[b as usize].content.is_none()));
        let n_named = pool_state.pool.blocks.iter().filter(|b| b.content.is_some()).count();
        assert_eq!(pool_state.pool.index.len(), n_named);
        let reserved: usize = self.seqs.iter().filter_map(|s| s.table.n_reserved).sum();
        let kept: usize = self.seqs.iter().map(|s| s.table.n_reserved_held()).sum();
        assert_eq!((pool_state.n_reserved, pool_state.n_reserved_held), (reserved, kept));
    }
}

/// An operation on a sequence.
#[derive(Clone, Debug)]
enum Act {
    Open { reserved: usize },
    Prompt { seq: usize, tokens: Vec<u32> },
    Append { seq: usize, tokens: Vec<u32> },
    Fork { seq: usize },
    Clear { seq: usize },
    Drop { seq: usize },
    Extend { by: usize },
}

fn acts() -> impl Strategy<Value = Vec<Act>> {
    // Only two distinct tokens, so that prefixes often match fully or almost.
    let tokens = || prop::collection::vec(0u32..2, 1..14);
    let act = prop_oneof![
        2 => (0usize..3).prop_map(|reserved| Act::Open { reserved }),
        6 => (0usize..8, tokens()).prop_map(|(seq, tokens)| Act::Prompt { seq, tokens }),
        4 => (0usize..8, tokens()).prop_map(|(seq, tokens)| Act::Append { seq, tokens }),
        2 => (0usize..8).prop_map(|seq| Act::Fork { seq }),
        1 => (0usize..8).prop_map(|seq| Act::Clear { seq }),
        2 => (0usize..8).prop_map(|seq| Act::Drop { seq }),
        1 => (0usize..3).prop_map(|by| Act::Extend { by }),
    ];
    prop::collection::vec(act, 0..60)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]
    #[test]
    fn every_sequence_finds_its_own_prefix_whatever_others_did(
        n_blocks in 1usize..12,
        kv_block in 1usize..5,
        window in prop::option::of(1usize..9),
        acts in acts(),
    ) {
        let mut sim = Sim::windowed(n_blocks, kv_block, window);
        for act in acts {
            let n = sim.seqs.len();
            match act {
                Act::Open { reserved } if n < 6 => {
                    let table = match reserved {
                        0 => Some(sim.pool.table()),
                        n => sim.pool.reserve(n * kv_block),
                    };
                    sim.seqs.extend(table.map(|table| Sim1 { tokens: Vec::new(), table }));
                }
                Act::Prompt { seq, tokens } if n > 0 => {
                    sim.prompt(seq % n, &tokens);
                }
                Act::Append { seq, tokens } if n > 0 => {
                    sim.append(seq % n, &tokens);
                }
                Act::Fork { seq } if n > 0 && n < 6 => {
                    let mut table = sim.pool.table();
                    let from = &sim.seqs[seq % n];
                    let n_held = from.table.fork(from.tokens.len(), &mut table);
                    let is_whole = from.table.n_gone == 0;
                    prop_assert_eq!(n_held, if is_whole { from.tokens.len() / kv_block * kv_block } else { 0 });
                    let tokens = from.tokens[..n_held].to_vec();
                    sim.seqs.push(Sim1 { tokens, table });
                }
                Act::Clear { seq } if n > 0 => {
                    let seq = &mut sim.seqs[seq % n];
                    seq.tokens.clear();
                    seq.table.fit(0).unwrap();
                }
                Act::Drop { seq } if n > 0 => drop(sim.seqs.swap_remove(seq % n)),
                Act::Extend { by } => {
                    let total = sim.pool.counts().total + by;
                    sim.pool.extend(total, total, 0);
                }
                _ => {}
            }
            sim.check();
        }
        sim.seqs.clear();
        sim.check();
        let counts = sim.pool.counts();
        prop_assert_eq!((counts.used, counts.free + counts.cached), (0, counts.total));
    }
}

#[test]
fn a_cached_prefix_is_found_until_its_blocks_are_needed() {
    let mut sim = Sim::new(4, 2);
    let open = |sim: &mut Sim| {
        let table = sim.pool.table();
        sim.seqs.push(Sim1 { tokens: Vec::new(), table });
        sim.seqs.len() - 1
    };
    let one = open(&mut sim);
    assert!(sim.prompt(one, &[1, 2, 3, 4, 5]));
    let held = sim.seqs[one].table.blocks().to_vec();
    // While another sequence holds them: two full blocks are shared.
    let two = open(&mut sim);
    assert_eq!(sim.seqs[two].table.reuse(&[1, 2, 3, 4, 9, 9], 0), 4);
    assert_eq!(sim.seqs[two].table.blocks(), &held[..2]);
    // Never the whole prompt: its last token must be evaluated to choose the next.
    let three = open(&mut sim);
    assert_eq!(sim.seqs[three].table.reuse(&[1, 2, 3, 4], 0), 2);
    // Another root shares nothing.
    let mut other = sim.pool.table();
    other.set_root(7);
    assert_eq!(other.reuse(&[1, 2, 3, 4, 5], 0), 0);
    sim.seqs.clear();
    let counts = sim.pool.counts();
    assert_eq!((counts.free, counts.cached, counts.used), (2, 2, 0));
    // Three blocks: the two free ones and the cached one that no other content depends on.
    let four = open(&mut sim);
    assert!(sim.prompt(four, &[9, 9, 9, 9, 9, 9]));
    let five = open(&mut sim);
    assert_eq!(sim.seqs[five].table.reuse(&[1, 2, 3, 4, 5], 0), 2);
}

#[test]
fn blocks_that_the_window_has_left_serve_others_and_are_never_found_with_other_content() {
    let mut sim = Sim::windowed(4, 2, Some(3));
    let table = sim.pool.table();
    sim.seqs.push(Sim1 { tokens: Vec::new(), table });
    assert!(sim.prompt(0, &[1, 2]));
    // A window of three positions needs two blocks, or three while a new one begins.
    for token in 3..40 {
        assert!(sim.append(0, &[token]));
        sim.check();
        assert!(sim.pool.counts().used <= 3);
    }
    // The first block was written again since, so the beginning is not found.
    let mut table = sim.pool.table();
    assert_eq!(table.reuse(&[1, 2, 3, 4, 5], 0), 0);
    // To continue from an earlier token, everything is evaluated again.
    assert_eq!(sim.seqs[0].table.max_kept(20, 39), 0);
    assert_eq!(sim.seqs[0].table.max_kept(39, 39), 39);
    let mut reserved = Sim::windowed(8, 2, Some(3));
    let table = reserved.pool.reserve(16).unwrap();
    reserved.seqs.push(Sim1 { tokens: Vec::new(), table });
    assert!(reserved.prompt(0, &[1, 2, 3, 4, 5, 6, 7, 8, 9]));
    assert_eq!((reserved.pool.counts().used, reserved.seqs[0].table.max_kept(2, 9)), (5, 2));
}

#[test]
fn reserved_blocks_are_not_given_to_others() {
    let pool = SharedPool::new(BlockPool::new(4, 2), 4);
    let mut reserved = pool.reserve(6).unwrap();
    let mut other = pool.table();
    other.fit(2).unwrap();
    assert_eq!(other.fit(3).unwrap_err(), OutOfBlocks { need: 1, free: 0, total: 4, kv_block: 2 });
    assert!(pool.reserve(4).is_none() && pool.max_positions() == 2);
    reserved.fit(6).unwrap();
    reserved.fit(2).unwrap();
    assert!(other.fit(3).is_err());
    drop(reserved);
    other.fit(8).unwrap();
}
