//! KV blocks: which sequence owns which part of the cache.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A fixed pool of KV blocks, handed out one at a time.
#[derive(Clone, Debug)]
pub struct BlockPool {
    free: Vec<u32>,
    in_use: Vec<bool>,
    kv_block: usize,
}

/// All blocks are taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the KV cache is full: {need} blocks of {kv_block} positions are needed, {free} of {total} are free")]
pub struct OutOfBlocks {
    /// Blocks asked for.
    pub need: usize,
    /// Blocks left.
    pub free: usize,
    /// Blocks in the pool.
    pub total: usize,
    /// Positions in a block.
    pub kv_block: usize,
}

impl BlockPool {
    /// A pool of `n_blocks` blocks of `kv_block` positions.
    pub fn new(n_blocks: usize, kv_block: usize) -> BlockPool {
        // Handed out from the lowest on, so that a single sequence lies in order.
        let free = (0..n_blocks as u32).rev().collect();
        BlockPool { free, in_use: vec![false; n_blocks], kv_block }
    }

    /// Positions in a block.
    pub fn kv_block(&self) -> usize {
        self.kv_block
    }

    /// Blocks nobody owns.
    pub fn n_free(&self) -> usize {
        self.free.len()
    }

    /// Blocks in all.
    pub fn n_blocks(&self) -> usize {
        self.in_use.len()
    }

    /// Extends a sequence's table until it covers `n_positions`; all or nothing.
    pub fn grow(&mut self, table: &mut Vec<u32>, n_positions: usize) -> Result<(), OutOfBlocks> {
        let need = n_positions.div_ceil(self.kv_block).saturating_sub(table.len());
        if need > self.free.len() {
            let (free, total, kv_block) = (self.free.len(), self.in_use.len(), self.kv_block);
            return Err(OutOfBlocks { need, free, total, kv_block });
        }
        for _ in 0..need {
            let Some(block) = self.free.pop() else { unreachable!("counted above") };
            self.in_use[block as usize] = true;
            table.push(block);
        }
        Ok(())
    }

    /// Takes back the blocks of a sequence's table that lie behind `n_positions`.
    ///
    /// # Panics
    /// When a block is not in use: two tables would end up sharing it.
    pub fn shrink(&mut self, table: &mut Vec<u32>, n_positions: usize) {
        let keep = n_positions.div_ceil(self.kv_block).min(table.len());
        for block in table.drain(keep..).rev() {
            let used = std::mem::replace(&mut self.in_use[block as usize], false);
            assert!(used, "KV block {block} is released twice");
            self.free.push(block);
        }
    }
}

/// A pool that the sessions of one engine share.
#[derive(Clone, Debug)]
pub(crate) struct SharedPool(Arc<Mutex<BlockPool>>);

impl SharedPool {
    pub(crate) fn new(pool: BlockPool) -> SharedPool {
        SharedPool(Arc::new(Mutex::new(pool)))
    }

    /// A table without blocks.
    pub(crate) fn table(&self) -> Table {
        Table { blocks: Vec::new(), pool: self.clone() }
    }

    fn lock(&self) -> MutexGuard<'_, BlockPool> {
        // A panic inside is the pool's own check: it may lose a block, never hand one out twice.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The blocks of one sequence, in the order of its positions. They go back to their pool with it.
#[derive(Debug)]
pub(crate) struct Table {
    blocks: Vec<u32>,
    pool: SharedPool,
}

impl Table {
    pub(crate) fn blocks(&self) -> &[u32] {
        &self.blocks
    }

    pub(crate) fn belongs_to(&self, pool: &SharedPool) -> bool {
        Arc::ptr_eq(&self.pool.0, &pool.0)
    }

    /// Makes the table cover `n_positions` and no block more.
    pub(crate) fn fit(&mut self, n_positions: usize) -> Result<(), OutOfBlocks> {
        let mut pool = self.pool.lock();
        pool.shrink(&mut self.blocks, n_positions);
        pool.grow(&mut self.blocks, n_positions)
    }
}

impl Drop for Table {
    fn drop(&mut self) {
        self.pool.lock().shrink(&mut self.blocks, 0);
    }
}
