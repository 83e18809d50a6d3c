//! KV blocks: which sequence holds which part of the cache, and what unheld blocks still contain.
//!
//! A block is *used* while a table holds it, *cached* when no table holds it but its content is known, and
//! *free* otherwise: `used + cached + free = total`. Several tables may hold the same block; a block that
//! another table holds is never written.
//!
//! The content of a full block is its tokens and all tokens before them, since KV depends on both.
//! [`Content`] represents that as a chain: the block's tokens and the name of the preceding content. Names
//! are never reused, so two contents are equal exactly if their keys are equal: the hash of a key only
//! selects the bucket. A block loses its name before it is written, and content whose predecessor is gone
//! cannot be found.

use crate::slots::{N_PAIR, OutOfSlots, SlotCounts, SlotPool, Slots};
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Identifies the content of a block together with all blocks before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ContentName {
    /// No content yet. Sequences that must not share, such as those of different adapters, start from
    /// different roots.
    Root(u64),
    /// Content of a block, named when it was published.
    Block(u64),
}

/// Content of a full block.
#[derive(Debug, PartialEq, Eq, Hash)]
struct Content {
    before: ContentName,
    tokens: Box<[u32]>,
}

#[derive(Clone, Debug, Default)]
struct PoolBlock {
    /// Number of tables that hold it.
    n_holders: u32,
    /// Its key in the index and its name, once published.
    content: Option<(Arc<Content>, u64)>,
    /// Its key in `cached`, while it is cached.
    released: u64,
}

/// A pool of reference-counted KV blocks, and an index of their contents.
#[derive(Clone, Debug)]
pub struct BlockPool {
    blocks: Vec<PoolBlock>,
    free: Vec<u32>,
    /// Blocks that no table holds but whose content is known, least recently released first.
    cached: BTreeMap<u64, u32>,
    index: HashMap<Arc<Content>, u32>,
    n_named: u64,
    n_released: u64,
    kv_block: usize,
}

/// No blocks are left, or no slots for recurrent states.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{}", self.text())]
pub struct OutOfBlocks {
    /// Blocks (or slots) requested.
    pub need: usize,
    /// Blocks available.
    pub free: usize,
    /// Blocks in the pool.
    pub total: usize,
    /// Positions in a block; 0 for slots of recurrent layers.
    pub kv_block: usize,
}

impl OutOfBlocks {
    fn text(&self) -> String {
        let OutOfBlocks { need, free, total, kv_block } = self;
        match kv_block {
            0 => format!(
                "all slots for recurrent states are taken: {need} are needed, {free} of {total} are free"
            ),
            _ => format!(
                "the KV cache is full: {need} blocks of {kv_block} positions are needed, {free} of {total} are free"
            ),
        }
    }
}

impl From<OutOfSlots> for OutOfBlocks {
    fn from(OutOfSlots { free, total }: OutOfSlots) -> OutOfBlocks {
        OutOfBlocks { need: N_PAIR, free, total, kv_block: 0 }
    }
}

impl BlockPool {
    /// A pool of `n_blocks` blocks of `kv_block` positions.
    pub fn new(n_blocks: usize, kv_block: usize) -> BlockPool {
        BlockPool {
            blocks: vec![PoolBlock::default(); n_blocks],
            // Lowest index first, so that a single sequence is contiguous.
            free: (0..n_blocks as u32).rev().collect(),
            cached: BTreeMap::new(),
            index: HashMap::new(),
            n_named: 0,
            n_released: 0,
            kv_block,
        }
    }

    /// Positions per block.
    pub fn kv_block(&self) -> usize {
        self.kv_block
    }

    /// Blocks that no table holds and that contain nothing.
    pub fn n_free(&self) -> usize {
        self.free.len()
    }

    /// Blocks that no table holds but whose content can be found again.
    pub fn n_cached(&self) -> usize {
        self.cached.len()
    }

    /// Blocks that can be allocated: free ones first, then cached ones, least recently used first.
    pub fn n_available(&self) -> usize {
        self.free.len() + self.cached.len()
    }

    /// Blocks that tables hold; a shared block counts once.
    pub fn n_used(&self) -> usize {
        self.blocks.len() - self.n_available()
    }

    /// Total number of blocks.
    pub fn n_blocks(&self) -> usize {
        self.blocks.len()
    }

    /// Grows the pool to `n_blocks`. A pool never shrinks: any of its blocks may be in a table.
    pub fn extend(&mut self, n_blocks: usize) {
        let added = self.blocks.len() as u32..(n_blocks.max(self.blocks.len()) as u32);
        // Blocks are popped from the back, so blocks that were free before the growth are handed out first.
        self.free.splice(0..0, added.clone().rev());
        self.blocks.resize(added.end as usize, PoolBlock::default());
    }

    /// Extends a sequence's table until it covers `n_positions`; all or nothing.
    pub fn grow(&mut self, table: &mut Vec<u32>, n_positions: usize) -> Result<(), OutOfBlocks> {
        let need = n_positions.div_ceil(self.kv_block).saturating_sub(table.len());
        let free = self.n_available();
        if need > free {
            return Err(OutOfBlocks { need, free, total: self.blocks.len(), kv_block: self.kv_block });
        }
        table.extend((0..need).filter_map(|_| self.take()));
        Ok(())
    }

    /// Releases the blocks of a sequence's table past `n_positions`. Blocks with known content stay cached.
    ///
    /// # Panics
    /// Panics if a block is not in use: two tables would end up sharing it.
    pub fn shrink(&mut self, table: &mut Vec<u32>, n_positions: usize) {
        let keep = n_positions.div_ceil(self.kv_block).min(table.len());
        // Last block first, so that a block stays cached longer than the blocks whose content depends on it.
        for block in table.drain(keep..).rev().filter(|block| *block != GONE) {
            self.release(block);
        }
    }

    /// Adds a holder to a block that other tables may hold too.
    pub fn share(&mut self, block: u32) {
        let entry = &mut self.blocks[block as usize];
        if entry.n_holders == 0 {
            let was_cached = self.cached.remove(&entry.released);
            assert_eq!(was_cached, Some(block), "KV block {block} is shared but neither held nor cached");
        }
        entry.n_holders += 1;
    }

    /// Makes a block safe to write: drops its name and returns true if the caller is the only holder. Returns
    /// false if other tables hold it too; the writer then needs a block of its own.
    pub fn own(&mut self, block: u32) -> bool {
        let is_own = self.blocks[block as usize].n_holders == 1;
        if is_own {
            self.unname(block);
        }
        is_own
    }

    /// Publishes the content of a full block so that others can find it, and returns the name of that
    /// content. If another block already holds the same content, that one stays in the index.
    pub fn publish(&mut self, block: u32, before: ContentName, tokens: &[u32]) -> ContentName {
        let content = Content { before, tokens: tokens.into() };
        let known = self.index.get(&content).and_then(|&known| self.blocks[known as usize].content.as_ref());
        if let Some((_, name)) = known {
            return ContentName::Block(*name);
        }
        self.unname(block);
        let (content, name) = (Arc::new(content), self.n_named);
        self.n_named += 1;
        self.index.insert(content.clone(), block);
        self.blocks[block as usize].content = Some((content, name));
        ContentName::Block(name)
    }

    /// Returns the block that holds these tokens after the content `before`, and the name of its content.
    pub fn find(&self, before: ContentName, tokens: &[u32]) -> Option<(u32, ContentName)> {
        let block = *self.index.get(&Content { before, tokens: tokens.into() })?;
        let (_, name) = self.blocks[block as usize].content.as_ref()?;
        Some((block, ContentName::Block(*name)))
    }

    fn take(&mut self) -> Option<u32> {
        let block = match self.free.pop() {
            Some(block) => block,
            None => {
                let (_, block) = self.cached.pop_first()?;
                self.unname(block);
                block
            }
        };
        self.blocks[block as usize].n_holders = 1;
        Some(block)
    }

    fn release(&mut self, block: u32) {
        let entry = &mut self.blocks[block as usize];
        assert!(entry.n_holders > 0, "KV block {block} is released twice");
        entry.n_holders -= 1;
        match (entry.n_holders, &entry.content) {
            (0, Some(_)) => {
                self.n_released += 1;
                entry.released = self.n_released;
                self.cached.insert(entry.released, block);
            }
            (0, None) => self.free.push(block),
            _ => {}
        }
    }

    fn unname(&mut self, block: u32) {
        if let Some((content, _)) = self.blocks[block as usize].content.take() {
            self.index.remove(&content);
        }
    }
}

/// Entry of a table for a block that the attention window has left: no step may read it.
pub(crate) const GONE: u32 = u32::MAX;

/// Slots of a sequence that has none.
pub(crate) const NO_SLOTS: [i32; 2] = [-1, -1];

/// Block counts of a pool at one moment. `free + cached + used = total`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockCounts {
    /// Blocks that contain nothing.
    pub free: usize,
    /// Blocks that no sequence holds but whose content can be found again.
    pub cached: usize,
    /// Blocks that sequences hold.
    pub used: usize,
    /// Total number of blocks.
    pub total: usize,
}

/// A pool shared by the sequences of one engine.
#[derive(Clone, Debug)]
pub(crate) struct SharedPool(Arc<Mutex<PoolState>>);

#[derive(Debug)]
struct PoolState {
    pool: BlockPool,
    /// Blocks reserved for tables, held or not.
    n_reserved: usize,
    /// Reserved blocks that tables already hold.
    n_reserved_held: usize,
    /// Maximum number of blocks per table.
    max_blocks: usize,
    /// Slots of recurrent layers, if the model has any.
    slots: SlotPool,
    /// The most positions that any layer attends to, if no layer attends to all.
    window: Option<usize>,
}

impl PoolState {
    /// Blocks available to a table without a reservation.
    fn n_unreserved(&self) -> usize {
        self.pool.n_available().saturating_sub(self.n_reserved - self.n_reserved_held)
    }
}

impl SharedPool {
    /// A pool whose tables hold at most `max_blocks` blocks.
    #[cfg(test)]
    pub(crate) fn new(pool: BlockPool, max_blocks: usize) -> SharedPool {
        SharedPool::with_slots(pool, max_blocks, 0)
    }

    /// A pool whose tables also own slots, `n_slots` in total; 0 for a model without recurrent layers.
    pub(crate) fn with_slots(pool: BlockPool, max_blocks: usize, n_slots: usize) -> SharedPool {
        let slots = SlotPool::new(n_slots);
        SharedPool(Arc::new(Mutex::new(PoolState {
            pool,
            n_reserved: 0,
            n_reserved_held: 0,
            max_blocks,
            slots,
            window: None,
        })))
    }

    /// The same pool for a model whose layers attend to at most `window` positions.
    #[must_use]
    pub(crate) fn windowed(self, window: Option<usize>) -> SharedPool {
        self.lock().window = window;
        self
    }

    /// An empty table without a reservation: it allocates from the unreserved blocks.
    pub(crate) fn table(&self) -> BlockTable {
        BlockTable {
            blocks: Vec::new(),
            n_gone: 0,
            names: Vec::new(),
            root: 0,
            n_reserved: None,
            slots: None,
            pool: self.clone(),
        }
    }

    /// Returns a table with blocks reserved for `n_positions`, or `None` if too many are already reserved.
    /// Blocks held by tables without a reservation count as available: those tables must give them up.
    pub(crate) fn reserve(&self, n_positions: usize) -> Option<BlockTable> {
        let mut pool_state = self.lock();
        let n_blocks = n_positions.div_ceil(pool_state.pool.kv_block());
        if n_blocks > pool_state.max_blocks || n_blocks > pool_state.pool.n_blocks() - pool_state.n_reserved {
            return None;
        }
        if !pool_state.slots.reserve() {
            return None;
        }
        pool_state.n_reserved += n_blocks;
        let mut table = self.table();
        table.n_reserved = Some(n_blocks);
        Some(table)
    }

    /// Returns the number of blocks in the pool, blocks per table and slots that one more sequence of
    /// `n_positions` requires.
    pub(crate) fn size_for(&self, n_positions: usize) -> (usize, usize, usize) {
        let pool_state = self.lock();
        let need = n_positions.div_ceil(pool_state.pool.kv_block());
        let n_slots = pool_state.slots.size_for_reservation();
        (
            pool_state.pool.n_blocks().max(pool_state.n_reserved + need),
            pool_state.max_blocks.max(need),
            n_slots,
        )
    }

    /// Grows the pool and the maximum table size.
    pub(crate) fn extend(&self, n_blocks: usize, max_blocks: usize, n_slots: usize) {
        let mut pool_state = self.lock();
        pool_state.slots.extend(n_slots);
        pool_state.pool.extend(n_blocks);
        pool_state.max_blocks = max_blocks;
    }

    pub(crate) fn counts(&self) -> BlockCounts {
        let pool = &self.lock().pool;
        BlockCounts {
            free: pool.n_free(),
            cached: pool.n_cached(),
            used: pool.n_used(),
            total: pool.n_blocks(),
        }
    }

    pub(crate) fn kv_block(&self) -> usize {
        self.lock().pool.kv_block()
    }

    /// Maximum number of positions that a table without a reservation can ever hold.
    pub(crate) fn max_positions(&self) -> usize {
        let pool_state = self.lock();
        if !pool_state.slots.has_pair() {
            return 0;
        }
        (pool_state.pool.n_blocks() - pool_state.n_reserved).min(pool_state.max_blocks)
            * pool_state.pool.kv_block()
    }

    /// Whether sequences have recurrent states, which hold exactly the tokens evaluated so far.
    pub(crate) fn has_slots(&self) -> bool {
        self.lock().slots.is_used()
    }

    pub(crate) fn slot_counts(&self) -> SlotCounts {
        self.lock().slots.counts()
    }

    /// The first block that a step attends to after `n_tokens` tokens.
    fn first_seen(&self, n_tokens: usize) -> usize {
        let pool_state = self.lock();
        let first = pool_state.window.map_or(0, |window| (n_tokens + 1).saturating_sub(window));
        first / pool_state.pool.kv_block()
    }

    pub(crate) fn is(&self, other: &SharedPool) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    fn lock(&self) -> MutexGuard<'_, PoolState> {
        // A panic inside is the pool's own assertion: it may lose a block, but never hands one out twice.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The blocks of one sequence, in order of position. Dropping it releases them.
#[derive(Debug)]
pub(crate) struct BlockTable {
    blocks: Vec<u32>,
    /// Number of leading blocks that the attention window has left; their entries are [`GONE`].
    n_gone: usize,
    /// Names of the leading blocks' contents, as far as they were published or found.
    names: Vec<ContentName>,
    root: u64,
    /// Number of reserved blocks; without a reservation it allocates what is left.
    n_reserved: Option<usize>,
    /// Its slots, while it covers at least one position.
    slots: Option<Slots>,
    pool: SharedPool,
}

impl BlockTable {
    pub(crate) fn blocks(&self) -> &[u32] {
        &self.blocks
    }

    /// The slots that a step reads and writes; negative if there are none.
    pub(crate) fn slot_row(&self) -> [i32; 2] {
        self.slots.as_ref().map_or(NO_SLOTS, Slots::row)
    }

    /// How many of a sequence's `n_tokens` can be kept if `n_shared` of them are to be reused.
    pub(crate) fn max_kept(&self, n_shared: usize, n_tokens: usize) -> usize {
        match &self.slots {
            Some(slots) => slots.max_kept(n_shared, n_tokens),
            None if self.has_slots() => 0,
            // The next step would attend to positions that are gone.
            None if n_shared < n_tokens && self.pool.first_seen(n_shared) < self.n_gone => 0,
            None => n_shared,
        }
    }

    /// Releases the blocks that no step after the first `n_tokens` tokens attends to. Steps in flight may be later ones.
    /// Tables with a reservation keep them: nobody else could use them, and their sequence may be cut at an earlier token.
    pub(crate) fn leave_window(&mut self, n_tokens: usize) {
        let first = self.pool.first_seen(n_tokens).min(self.blocks.len());
        if first <= self.n_gone || self.is_reserved() {
            return;
        }
        self.update(|table, pool_state| {
            for block in &mut table.blocks[table.n_gone..first] {
                pool_state.pool.release(std::mem::replace(block, GONE));
            }
            table.n_gone = first;
        });
    }

    /// Whether its recurrent state, if any, is the state after `n_tokens`.
    pub(crate) fn holds_state(&self, n_tokens: usize) -> bool {
        match &self.slots {
            Some(slots) => slots.holds(n_tokens),
            None => n_tokens == 0 || !self.has_slots(),
        }
    }

    /// Whether it has a recurrent state, which can be neither truncated nor shared.
    pub(crate) fn has_slots(&self) -> bool {
        self.pool.has_slots()
    }

    /// Its slots, to record what steps do to them.
    pub(crate) fn slots_mut(&mut self) -> Option<&mut Slots> {
        self.slots.as_mut()
    }

    pub(crate) fn belongs_to(&self, pool: &SharedPool) -> bool {
        self.pool.is(pool)
    }

    pub(crate) fn kv_block(&self) -> usize {
        self.pool.kv_block()
    }

    pub(crate) fn is_reserved(&self) -> bool {
        self.n_reserved.is_some()
    }

    pub(crate) fn root(&self) -> u64 {
        self.root
    }

    /// Sets the root: content is shared only among tables with the same root.
    pub(crate) fn set_root(&mut self, root: u64) {
        debug_assert!(self.names.is_empty(), "its blocks have names from another root");
        self.root = root;
    }

    /// Makes the table cover exactly `n_positions`, with no extra block. Not allowed while in-flight steps
    /// write past it.
    pub(crate) fn fit(&mut self, n_positions: usize) -> Result<(), OutOfBlocks> {
        self.update(|table, pool_state| {
            table.shrink(pool_state, n_positions);
            table.names.truncate(table.blocks.len());
            if n_positions == 0 {
                table.release_slots(pool_state);
            }
        });
        self.cover(n_positions)
    }

    /// Makes the table cover `n_positions`; blocks it already holds stay in place.
    pub(crate) fn cover(&mut self, n_positions: usize) -> Result<(), OutOfBlocks> {
        self.update(|table, pool_state| {
            let need = n_positions.div_ceil(pool_state.pool.kv_block()).saturating_sub(table.blocks.len());
            let free = pool_state.n_unreserved();
            if table.n_reserved.is_none() && need > free {
                let (total, kv_block) = (pool_state.pool.n_blocks(), pool_state.pool.kv_block());
                return Err(OutOfBlocks { need, free, total, kv_block });
            }
            if n_positions > 0 && pool_state.slots.is_used() && table.slots.is_none() {
                table.slots = Some(pool_state.slots.take(table.n_reserved.is_some())?);
            }
            pool_state.pool.grow(&mut table.blocks, n_positions)
        })
    }

    /// Prepares for writing at `position`, releasing everything after it. Returns the position from which KV
    /// must be evaluated. It is earlier than `position` if other tables hold the block, because the start of
    /// that block then has to be evaluated again.
    pub(crate) fn write_from(&mut self, position: usize) -> usize {
        self.update(|table, pool_state| {
            let kv_block = pool_state.pool.kv_block();
            table.shrink(pool_state, position);
            table.names.truncate(position / kv_block);
            let start = position / kv_block * kv_block;
            match table.blocks.get(position / kv_block) {
                Some(&block) if !pool_state.pool.own(block) => {
                    table.shrink(pool_state, start);
                    start
                }
                _ => position,
            }
        })
    }

    /// Publishes the full blocks of a sequence that holds `tokens`.
    pub(crate) fn publish(&mut self, tokens: &[u32]) {
        let kv_block = self.pool.kv_block();
        if tokens.len() / kv_block <= self.names.len() {
            return;
        }
        self.update(|table, pool_state| {
            let full = tokens.chunks_exact(kv_block).zip(&table.blocks).skip(table.names.len());
            for (tokens, &block) in full {
                let before = table.names.last().copied().unwrap_or(ContentName::Root(table.root));
                table.names.push(pool_state.pool.publish(block, before, tokens));
            }
        });
    }

    /// Extends a table that holds the first `n_held` of these tokens with cached blocks that hold the next
    /// ones. Returns how many tokens are held afterwards; never all of them.
    pub(crate) fn reuse(&mut self, tokens: &[u32], n_held: usize) -> usize {
        self.update(|table, pool_state| {
            let kv_block = pool_state.pool.kv_block();
            let n_full = n_held / kv_block;
            // Without names for its own blocks, nothing can be found after them.
            if table.names.len() < n_full {
                return n_held;
            }
            table.names.truncate(n_full);
            let usable = &tokens[..tokens.len().saturating_sub(1)];
            for tokens in usable.chunks_exact(kv_block).skip(n_full) {
                let before = table.names.last().copied().unwrap_or(ContentName::Root(table.root));
                let Some((block, name)) = pool_state.pool.find(before, tokens) else { break };
                // The part past its full blocks is a prefix of the block that was found.
                let end = table.names.len() * kv_block;
                table.shrink(pool_state, end);
                pool_state.pool.share(block);
                table.blocks.push(block);
                table.names.push(name);
            }
            n_held.max(table.names.len() * kv_block)
        })
    }

    /// Makes another table hold the full blocks of this one up to `n_positions`, and nothing else. Returns
    /// the number of positions they cover.
    pub(crate) fn fork(&self, n_positions: usize, into: &mut BlockTable) -> usize {
        let n_positions = into.update(|to, pool_state| {
            let n_full = (n_positions / pool_state.pool.kv_block()).min(self.blocks.len());
            // Without its first blocks, the copy could not be cut.
            let n_full = if self.n_gone > 0 { 0 } else { n_full };
            to.shrink(pool_state, 0);
            self.blocks[..n_full].iter().for_each(|&block| pool_state.pool.share(block));
            to.blocks.extend_from_slice(&self.blocks[..n_full]);
            to.names = self.names[..n_full.min(self.names.len())].to_vec();
            n_full * pool_state.pool.kv_block()
        });
        into.root = self.root;
        n_positions
    }

    fn shrink(&mut self, pool_state: &mut PoolState, n_positions: usize) {
        pool_state.pool.shrink(&mut self.blocks, n_positions);
        self.n_gone = self.n_gone.min(self.blocks.len());
    }

    fn release_slots(&mut self, pool_state: &mut PoolState) {
        if let Some(slots) = self.slots.take() {
            pool_state.slots.release(&slots);
        }
    }

    /// Applies a change to the table and updates the count of reserved blocks held.
    fn update<R>(&mut self, change: impl FnOnce(&mut BlockTable, &mut PoolState) -> R) -> R {
        let pool = self.pool.clone();
        let mut pool_state = pool.lock();
        let before = self.n_reserved_held();
        let out = change(self, &mut pool_state);
        pool_state.n_reserved_held = pool_state.n_reserved_held + self.n_reserved_held() - before;
        out
    }

    /// Reserved blocks that it holds.
    fn n_reserved_held(&self) -> usize {
        self.n_reserved.map_or(0, |reserved| reserved.min(self.blocks.len()))
    }
}

impl Drop for BlockTable {
    fn drop(&mut self) {
        let reserved = self.n_reserved.unwrap_or(0);
        self.update(|table, pool_state| {
            table.shrink(pool_state, 0);
            table.release_slots(pool_state);
        });
        let pool = self.pool.clone();
        let mut pool_state = pool.lock();
        pool_state.n_reserved -= reserved;
        if self.n_reserved.is_some() {
            pool_state.slots.cancel_reservation();
        }
    }
}

#[cfg(test)]
mod tests;
