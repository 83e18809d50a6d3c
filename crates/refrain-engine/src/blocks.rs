//! KV blocks: which sequence owns which part of the cache.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A pool of KV blocks, handed out one at a time.
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

    /// Adds blocks until there are `n_blocks`. A pool never shrinks: any of its blocks may be in a table.
    pub fn extend(&mut self, n_blocks: usize) {
        let added = self.in_use.len() as u32..(n_blocks.max(self.in_use.len()) as u32);
        // In front of those that are free already, which are handed out first.
        self.free.splice(0..0, added.clone().rev());
        self.in_use.resize(added.end as usize, false);
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

/// A pool that the sequences of one engine share.
#[derive(Clone, Debug)]
pub(crate) struct SharedPool(Arc<Mutex<Books>>);

#[derive(Debug)]
struct Books {
    pool: BlockPool,
    /// Blocks that open sequences were promised, in use or not.
    n_reserved: usize,
    /// Blocks that one table may have.
    max_blocks: usize,
}

impl SharedPool {
    /// A pool whose tables have at most `max_blocks` blocks.
    pub(crate) fn new(pool: BlockPool, max_blocks: usize) -> SharedPool {
        SharedPool(Arc::new(Mutex::new(Books { pool, n_reserved: 0, max_blocks })))
    }

    /// A table without blocks.
    pub(crate) fn table(&self) -> Table {
        Table { blocks: Vec::new(), pool: self.clone() }
    }

    /// Promises a sequence of `n_positions` its blocks, if so many are promised to nobody else.
    pub(crate) fn reserve(&self, n_positions: usize) -> Option<Reservation> {
        let mut books = self.lock();
        let n_blocks = n_positions.div_ceil(books.pool.kv_block());
        if n_blocks > books.max_blocks || n_blocks > books.pool.n_blocks() - books.n_reserved {
            return None;
        }
        books.n_reserved += n_blocks;
        Some(Reservation { n_blocks, pool: self.clone() })
    }

    /// Blocks of the pool and of a table that a further sequence of `n_positions` needs.
    pub(crate) fn size_for(&self, n_positions: usize) -> (usize, usize) {
        let books = self.lock();
        let need = n_positions.div_ceil(books.pool.kv_block());
        (books.pool.n_blocks().max(books.n_reserved + need), books.max_blocks.max(need))
    }

    /// Makes the pool and its tables larger.
    pub(crate) fn extend(&self, n_blocks: usize, max_blocks: usize) {
        let mut books = self.lock();
        books.pool.extend(n_blocks);
        books.max_blocks = max_blocks;
    }

    pub(crate) fn is(&self, other: &SharedPool) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    fn lock(&self) -> MutexGuard<'_, Books> {
        // A panic inside is the pool's own check: it may lose a block, never hand one out twice.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Blocks that a sequence can count on. Dropping it gives them back.
#[derive(Debug)]
pub(crate) struct Reservation {
    n_blocks: usize,
    pool: SharedPool,
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.pool.lock().n_reserved -= self.n_blocks;
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
        self.pool.is(pool)
    }

    /// Makes the table cover `n_positions` and no block more.
    pub(crate) fn fit(&mut self, n_positions: usize) -> Result<(), OutOfBlocks> {
        let mut books = self.pool.lock();
        books.pool.shrink(&mut self.blocks, n_positions);
        books.pool.grow(&mut self.blocks, n_positions)
    }
}

impl Drop for Table {
    fn drop(&mut self) {
        self.pool.lock().pool.shrink(&mut self.blocks, 0);
    }
}
