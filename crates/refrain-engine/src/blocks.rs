//! KV blocks: which sequence holds which part of the cache, and what an unheld part still holds.
//!
//! A block is *used* while a table holds it, *cached* when no table does but its content is known, and *free* otherwise:
//! `used + cached + free = total`. Several tables may hold one block; nobody writes to a block that another holds.
//!
//! The content of a full block is its tokens and all tokens before them, since KV depends on both. [`Content`] is that,
//! as a chain: the tokens of the block and the name of the content before it. Names are given once and never again, so
//! two contents are the same exactly if their keys are: the hash of a key only says where to look. A block that is
//! written loses its name first, and a content whose predecessor is gone cannot be found.

use crate::slots::{N_PAIR, OutOfSlots, SlotCounts, SlotPool, Slots};
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Names what a block and all blocks before it hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ContentName {
    /// Nothing yet. Sequences that must not share, such as those of different adapters, begin at different roots.
    Root(u64),
    /// That of a block, given when it was published.
    Block(u64),
}

/// What a full block holds.
#[derive(Debug, PartialEq, Eq, Hash)]
struct Content {
    before: ContentName,
    tokens: Box<[u32]>,
}

#[derive(Clone, Debug, Default)]
struct Block {
    /// Tables that hold it.
    n_holders: u32,
    /// Its key in the index and its name, if it was published.
    content: Option<(Arc<Content>, u64)>,
    /// Its key among the cached blocks, while it is one.
    released: u64,
}

/// A pool of KV blocks with reference counts, and an index of what they hold.
#[derive(Clone, Debug)]
pub struct BlockPool {
    blocks: Vec<Block>,
    free: Vec<u32>,
    /// Blocks that nobody holds and whose content is known, from the one that was released first.
    cached: BTreeMap<u64, u32>,
    index: HashMap<Arc<Content>, u32>,
    n_named: u64,
    n_released: u64,
    kv_block: usize,
}

/// All blocks are taken, or all slots of recurrent states.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{}", self.text())]
pub struct OutOfBlocks {
    /// Blocks asked for, or slots.
    pub need: usize,
    /// Blocks left.
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
            blocks: vec![Block::default(); n_blocks],
            // Handed out from the lowest on, so that a single sequence lies in order.
            free: (0..n_blocks as u32).rev().collect(),
            cached: BTreeMap::new(),
            index: HashMap::new(),
            n_named: 0,
            n_released: 0,
            kv_block,
        }
    }

    /// Positions in a block.
    pub fn kv_block(&self) -> usize {
        self.kv_block
    }

    /// Blocks that nobody holds and that hold nothing.
    pub fn n_free(&self) -> usize {
        self.free.len()
    }

    /// Blocks that nobody holds and whose content can be found again.
    pub fn n_cached(&self) -> usize {
        self.cached.len()
    }

    /// Blocks that can be had: free ones, then cached ones from the least recently used.
    pub fn n_available(&self) -> usize {
        self.free.len() + self.cached.len()
    }

    /// Blocks that tables hold; one that several hold counts once.
    pub fn n_used(&self) -> usize {
        self.blocks.len() - self.n_available()
    }

    /// Blocks in all.
    pub fn n_blocks(&self) -> usize {
        self.blocks.len()
    }

    /// Adds blocks until there are `n_blocks`. A pool never shrinks: any of its blocks may be in a table.
    pub fn extend(&mut self, n_blocks: usize) {
        let added = self.blocks.len() as u32..(n_blocks.max(self.blocks.len()) as u32);
        // In front of those that are free already, which are handed out first.
        self.free.splice(0..0, added.clone().rev());
        self.blocks.resize(added.end as usize, Block::default());
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

    /// Takes back the blocks of a sequence's table that lie behind `n_positions`. Those whose content is known stay
    /// cached.
    ///
    /// # Panics
    /// When a block is not in use: two tables would end up sharing it.
    pub fn shrink(&mut self, table: &mut Vec<u32>, n_positions: usize) {
        let keep = n_positions.div_ceil(self.kv_block).min(table.len());
        // From the last, so that a block is cached longer than those whose content needs it.
        for block in table.drain(keep..).rev() {
            self.release(block);
        }
    }

    /// Makes a table hold a block that others may hold too.
    pub fn share(&mut self, block: u32) {
        let entry = &mut self.blocks[block as usize];
        if entry.n_holders == 0 {
            let was_cached = self.cached.remove(&entry.released);
            assert_eq!(was_cached, Some(block), "KV block {block} is shared and nobody holds it");
        }
        entry.n_holders += 1;
    }

    /// Makes sure that nobody else sees what is written to a block, which then has no name any more. False when other
    /// tables hold it: the writer needs a block of its own.
    pub fn own(&mut self, block: u32) -> bool {
        let is_own = self.blocks[block as usize].n_holders == 1;
        if is_own {
            self.unname(block);
        }
        is_own
    }

    /// Says what a full block holds, so that others find it, and gives the name of that content. Where another block
    /// holds the same already, that one stays the one to be found.
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

    /// The block that holds these tokens behind that content, and the name of its own.
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

/// The slots of a sequence that has none.
pub(crate) const NO_SLOTS: [i32; 2] = [-1, -1];

/// Figures of a pool at one moment. `free + cached + used = total`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockCounts {
    /// Blocks that hold nothing.
    pub free: usize,
    /// Blocks that nobody holds and whose content can be found again.
    pub cached: usize,
    /// Blocks that sequences hold.
    pub used: usize,
    /// Blocks in all.
    pub total: usize,
}

/// A pool that the sequences of one engine share.
#[derive(Clone, Debug)]
pub(crate) struct SharedPool(Arc<Mutex<Books>>);

#[derive(Debug)]
struct Books {
    pool: BlockPool,
    /// Blocks promised to tables, held or not.
    n_promised: usize,
    /// Blocks that such tables hold.
    n_kept: usize,
    /// Blocks that one table may have.
    max_blocks: usize,
    /// Of recurrent layers, where the model has some.
    slots: SlotPool,
}

impl Books {
    /// Blocks that a table without a promise can have.
    fn n_unpromised(&self) -> usize {
        self.pool.n_available().saturating_sub(self.n_promised - self.n_kept)
    }
}

impl SharedPool {
    /// A pool whose tables have at most `max_blocks` blocks.
    #[cfg(test)]
    pub(crate) fn new(pool: BlockPool, max_blocks: usize) -> SharedPool {
        SharedPool::with_slots(pool, max_blocks, 0)
    }

    /// A pool whose tables have slots as well, of which there are `n_slots`; 0 for a model that needs none.
    pub(crate) fn with_slots(pool: BlockPool, max_blocks: usize, n_slots: usize) -> SharedPool {
        let slots = SlotPool::new(n_slots);
        SharedPool(Arc::new(Mutex::new(Books { pool, n_promised: 0, n_kept: 0, max_blocks, slots })))
    }

    /// A table without blocks, which takes what nobody was promised.
    pub(crate) fn table(&self) -> Table {
        Table {
            blocks: Vec::new(),
            names: Vec::new(),
            root: 0,
            n_promised: None,
            slots: None,
            pool: self.clone(),
        }
    }

    /// A table that is promised blocks for `n_positions`, if so many are promised to nobody else. Blocks that others hold
    /// for now count: they have to give them up.
    pub(crate) fn reserve(&self, n_positions: usize) -> Option<Table> {
        let mut books = self.lock();
        let n_blocks = n_positions.div_ceil(books.pool.kv_block());
        if n_blocks > books.max_blocks || n_blocks > books.pool.n_blocks() - books.n_promised {
            return None;
        }
        if !books.slots.promise() {
            return None;
        }
        books.n_promised += n_blocks;
        let mut table = self.table();
        table.n_promised = Some(n_blocks);
        Some(table)
    }

    /// Blocks of the pool and of a table, and slots, that a further sequence of `n_positions` needs.
    pub(crate) fn size_for(&self, n_positions: usize) -> (usize, usize, usize) {
        let books = self.lock();
        let need = n_positions.div_ceil(books.pool.kv_block());
        let n_slots = books.slots.size_for_promise();
        (books.pool.n_blocks().max(books.n_promised + need), books.max_blocks.max(need), n_slots)
    }

    /// Makes the pool and its tables larger.
    pub(crate) fn extend(&self, n_blocks: usize, max_blocks: usize, n_slots: usize) {
        let mut books = self.lock();
        books.slots.extend(n_slots);
        books.pool.extend(n_blocks);
        books.max_blocks = max_blocks;
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

    /// The most positions that a table without a promise can ever have.
    pub(crate) fn most_positions(&self) -> usize {
        let books = self.lock();
        if !books.slots.has_pair() {
            return 0;
        }
        (books.pool.n_blocks() - books.n_promised).min(books.max_blocks) * books.pool.kv_block()
    }

    /// Whether sequences have recurrent states, which hold exactly what was evaluated.
    pub(crate) fn has_slots(&self) -> bool {
        self.lock().slots.is_used()
    }

    pub(crate) fn slot_counts(&self) -> SlotCounts {
        self.lock().slots.counts()
    }

    pub(crate) fn is(&self, other: &SharedPool) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    fn lock(&self) -> MutexGuard<'_, Books> {
        // A panic inside is the pool's own check: it may lose a block, never hand one out twice.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The blocks of one sequence, in the order of its positions. They go back to their pool with it.
#[derive(Debug)]
pub(crate) struct Table {
    blocks: Vec<u32>,
    /// What the first blocks hold, as far as it was published or found.
    names: Vec<ContentName>,
    root: u64,
    /// Blocks that it can count on; without a promise it takes what is left.
    n_promised: Option<usize>,
    /// Its slots, while it covers any position.
    slots: Option<Slots>,
    pool: SharedPool,
}

impl Table {
    pub(crate) fn blocks(&self) -> &[u32] {
        &self.blocks
    }

    /// The slots that a step reads and writes; negative ones where there are none.
    pub(crate) fn slot_row(&self) -> [i32; 2] {
        self.slots.as_ref().map_or(NO_SLOTS, Slots::row)
    }

    /// How many of a sequence's `n_tokens` can stay, where `n_shared` are to.
    pub(crate) fn most_kept(&self, n_shared: usize, n_tokens: usize) -> usize {
        match &self.slots {
            Some(slots) => slots.most(n_shared, n_tokens),
            None if self.has_slots() => 0,
            None => n_shared,
        }
    }

    /// Whether its recurrent state, if it has one, is that behind `n_tokens`.
    pub(crate) fn holds_state(&self, n_tokens: usize) -> bool {
        match &self.slots {
            Some(slots) => slots.holds(n_tokens),
            None => n_tokens == 0 || !self.has_slots(),
        }
    }

    /// Whether it has a recurrent state, which cannot be cut shorter or shared.
    pub(crate) fn has_slots(&self) -> bool {
        self.pool.has_slots()
    }

    /// Its slots, to note what steps do to them.
    pub(crate) fn slots_mut(&mut self) -> Option<&mut Slots> {
        self.slots.as_mut()
    }

    pub(crate) fn belongs_to(&self, pool: &SharedPool) -> bool {
        self.pool.is(pool)
    }

    pub(crate) fn kv_block(&self) -> usize {
        self.pool.kv_block()
    }

    pub(crate) fn is_promised(&self) -> bool {
        self.n_promised.is_some()
    }

    pub(crate) fn root(&self) -> u64 {
        self.root
    }

    /// What is shared is shared among tables of one root.
    pub(crate) fn set_root(&mut self, root: u64) {
        debug_assert!(self.names.is_empty(), "its blocks have names of another root");
        self.root = root;
    }

    /// Makes the table cover `n_positions` and no block more. Not while steps are under way that write further on.
    pub(crate) fn fit(&mut self, n_positions: usize) -> Result<(), OutOfBlocks> {
        self.update(|table, books| {
            books.pool.shrink(&mut table.blocks, n_positions);
            table.names.truncate(table.blocks.len());
            if n_positions == 0 {
                table.give_back_slots(books);
            }
        });
        self.cover(n_positions)
    }

    /// Makes the table cover `n_positions`; what it covers already stays where it is.
    pub(crate) fn cover(&mut self, n_positions: usize) -> Result<(), OutOfBlocks> {
        self.update(|table, books| {
            let need = n_positions.div_ceil(books.pool.kv_block()).saturating_sub(table.blocks.len());
            let free = books.n_unpromised();
            if table.n_promised.is_none() && need > free {
                let (total, kv_block) = (books.pool.n_blocks(), books.pool.kv_block());
                return Err(OutOfBlocks { need, free, total, kv_block });
            }
            if n_positions > 0 && books.slots.is_used() && table.slots.is_none() {
                table.slots = Some(books.slots.take(table.n_promised.is_some())?);
            }
            books.pool.grow(&mut table.blocks, n_positions)
        })
    }

    /// Prepares for writing at `position`, behind which nothing is held any more. Gives the position from which KV must
    /// be evaluated: an earlier one where other tables hold the block, whose beginning is then needed a second time.
    pub(crate) fn write_from(&mut self, position: usize) -> usize {
        self.update(|table, books| {
            let kv_block = books.pool.kv_block();
            books.pool.shrink(&mut table.blocks, position);
            table.names.truncate(position / kv_block);
            let start = position / kv_block * kv_block;
            match table.blocks.get(position / kv_block) {
                Some(&block) if !books.pool.own(block) => {
                    books.pool.shrink(&mut table.blocks, start);
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
        self.update(|table, books| {
            let full = tokens.chunks_exact(kv_block).zip(&table.blocks).skip(table.names.len());
            for (tokens, &block) in full {
                let before = table.names.last().copied().unwrap_or(ContentName::Root(table.root));
                table.names.push(books.pool.publish(block, before, tokens));
            }
        });
    }

    /// Continues a table that holds the first `n_held` of these tokens with blocks that hold the next ones already. Gives
    /// how many are held then; never all.
    pub(crate) fn reuse(&mut self, tokens: &[u32], n_held: usize) -> usize {
        self.update(|table, books| {
            let kv_block = books.pool.kv_block();
            let n_full = n_held / kv_block;
            // Without the names of its own blocks nothing can be found behind them.
            if table.names.len() < n_full {
                return n_held;
            }
            table.names.truncate(n_full);
            let usable = &tokens[..tokens.len().saturating_sub(1)];
            for tokens in usable.chunks_exact(kv_block).skip(n_full) {
                let before = table.names.last().copied().unwrap_or(ContentName::Root(table.root));
                let Some((block, name)) = books.pool.find(before, tokens) else { break };
                // What it has beyond its full blocks is a beginning of what was found.
                let end = table.names.len() * kv_block;
                books.pool.shrink(&mut table.blocks, end);
                books.pool.share(block);
                table.blocks.push(block);
                table.names.push(name);
            }
            n_held.max(table.names.len() * kv_block)
        })
    }

    /// Makes another table hold the full blocks of this one up to `n_positions`, and nothing else. Gives the positions
    /// that they cover.
    pub(crate) fn fork(&self, n_positions: usize, into: &mut Table) -> usize {
        let n_positions = into.update(|to, books| {
            let n_full = (n_positions / books.pool.kv_block()).min(self.blocks.len());
            books.pool.shrink(&mut to.blocks, 0);
            self.blocks[..n_full].iter().for_each(|&block| books.pool.share(block));
            to.blocks.extend_from_slice(&self.blocks[..n_full]);
            to.names = self.names[..n_full.min(self.names.len())].to_vec();
            n_full * books.pool.kv_block()
        });
        into.root = self.root;
        n_positions
    }

    fn give_back_slots(&mut self, books: &mut Books) {
        if let Some(slots) = self.slots.take() {
            books.slots.give_back(&slots);
        }
    }

    /// Changes what it holds, and keeps the books on promised blocks.
    fn update<R>(&mut self, change: impl FnOnce(&mut Table, &mut Books) -> R) -> R {
        let pool = self.pool.clone();
        let mut books = pool.lock();
        let before = self.n_kept();
        let out = change(self, &mut books);
        books.n_kept = books.n_kept + self.n_kept() - before;
        out
    }

    /// Blocks that it holds of those that it was promised.
    fn n_kept(&self) -> usize {
        self.n_promised.map_or(0, |promised| promised.min(self.blocks.len()))
    }
}

impl Drop for Table {
    fn drop(&mut self) {
        let promised = self.n_promised.unwrap_or(0);
        self.update(|table, books| {
            books.pool.shrink(&mut table.blocks, 0);
            table.give_back_slots(books);
        });
        let pool = self.pool.clone();
        let mut books = pool.lock();
        books.n_promised -= promised;
        if self.n_promised.is_some() {
            books.slots.forget_promise();
        }
    }
}

#[cfg(test)]
mod tests;
