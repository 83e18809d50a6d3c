//! The scheduler over a fake device.
//!
//! Like KV, each cell of the device's memory depends on all tokens up to it: it stores their hash. A step
//! checks that the blocks of each row hold the row's own prefix, writes what it evaluates, and chooses the
//! next token from that hash. A request therefore gets the same tokens as alone exactly if scheduling, blocks
//! and prefix cache are correct.

use super::*;
use crate::blocks::{BlockPool, SharedPool};
use proptest::prelude::*;
use std::collections::BTreeMap;

const EMPTY: u64 = 0;

fn hash(before: u64, token: u32) -> u64 {
    (before ^ u64::from(token)).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(23) | 1
}

/// The token that follows a prefix.
fn next(hash: u64) -> u32 {
    (hash >> 40) as u32 % 3
}

/// The tokens that a request gets when it runs alone.
fn alone(prompt: &[u32], n_tokens: usize) -> Vec<u32> {
    let mut state = prompt.iter().fold(EMPTY, |h, t| hash(h, *t));
    (0..n_tokens)
        .map(|_| {
            let token = next(state);
            state = hash(state, token);
            token
        })
        .collect()
}

/// A small random number generator (splitmix64).
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        ((z ^ (z >> 27)) >> 11) as usize % n.max(1)
    }
}

struct Asked {
    prompt: Vec<u32>,
    max_tokens: usize,
    got: Vec<u32>,
}

struct World {
    pool: SharedPool,
    scheduler: Scheduler,
    memory: Vec<u64>,
    open: BTreeMap<u64, Asked>,
    limits: ScheduleLimits,
    n_submitted: u64,
    n_ended: u64,
    n_evaluated: usize,
    n_steps: usize,
}

const KV_BLOCK: usize = 4;

impl World {
    fn new(n_blocks: usize, limits: ScheduleLimits) -> World {
        let pool = SharedPool::new(BlockPool::new(n_blocks, KV_BLOCK), n_blocks);
        let memory = vec![EMPTY; n_blocks * KV_BLOCK];
        let scheduler = Scheduler::new(limits);
        let (open, n_submitted, n_ended) = (BTreeMap::new(), 0, 0);
        World { pool, scheduler, memory, open, limits, n_submitted, n_ended, n_evaluated: 0, n_steps: 0 }
    }

    fn submit(&mut self, prompt: Vec<u32>, max_tokens: usize, user: u64, priority: i32) -> RequestId {
        let n_positions = prompt.len() + max_tokens - 1;
        let state = SequenceState::new(self.pool.table(), n_positions, None);
        self.submit_in(state, prompt, max_tokens, user, priority)
    }

    fn submit_in(
        &mut self,
        state: SequenceState,
        prompt: Vec<u32>,
        max_tokens: usize,
        user: u64,
        priority: i32,
    ) -> RequestId {
        let id = RequestId(self.n_submitted);
        self.n_submitted += 1;
        let mut active = ActiveRequest::new(id, prompt.clone(), prompt.len() + max_tokens - 1, state);
        (active.user, active.priority) = (user, priority);
        active.shares = !active.state.table.is_reserved();
        self.scheduler.submit(active);
        self.open.insert(id.0, Asked { prompt, max_tokens, got: Vec::new() });
        id
    }

    fn end(&mut self, id: RequestId) -> Option<SequenceState> {
        self.open.remove(&id.0);
        self.n_ended += 1;
        self.scheduler.remove(id).map(|active| active.state)
    }

    /// Runs one step and returns its rows.
    fn step(&mut self) -> Vec<StepRow> {
        let StepSchedule { rows, refused } = self.scheduler.plan();
        assert!(refused.is_empty(), "{refused:?}");
        assert!(rows.iter().map(|row| row.n_tokens).sum::<usize>() <= self.limits.n_tokens);
        assert!(rows.len() <= self.limits.n_rows);
        self.n_steps += 1;
        // All rows write before any row reads, so rows that share a cell by mistake are detected.
        let mut done = Vec::new();
        for row in &rows {
            let active = self.scheduler.get(row.id).unwrap();
            let (start, blocks) = (active.state.tokens.len(), active.state.table.blocks());
            assert_eq!(row.chooses, start + row.n_tokens == active.tokens.len());
            let place = |p: usize| blocks[p / KV_BLOCK] as usize * KV_BLOCK + p % KV_BLOCK;
            let mut state = active.tokens[..start].iter().fold(EMPTY, |h, t| hash(h, *t));
            for (position, token) in active.tokens.iter().enumerate().skip(start).take(row.n_tokens) {
                state = hash(state, *token);
                self.memory[place(position)] = state;
            }
            done.push((*row, start + row.n_tokens, state));
        }
        for (row, end, state) in done {
            let active = self.scheduler.get(row.id).unwrap();
            let blocks = active.state.table.blocks();
            let mut before = EMPTY;
            for (position, token) in active.tokens[..end].iter().enumerate() {
                before = hash(before, *token);
                let place = blocks[position / KV_BLOCK] as usize * KV_BLOCK + position % KV_BLOCK;
                assert_eq!(self.memory[place], before, "{} at position {position}", row.id);
            }
            self.n_evaluated += row.n_tokens;
            let chosen = row.chooses.then(|| next(state));
            self.scheduler.advance(row.id, row.n_tokens, chosen);
            let asked = self.open.get_mut(&row.id.0).unwrap();
            asked.got.extend(chosen);
            if asked.got.len() == asked.max_tokens {
                assert_eq!(asked.got, alone(&asked.prompt, asked.max_tokens), "{}", row.id);
                self.end(row.id);
            }
        }
        let counts = self.pool.counts();
        assert_eq!(counts.free + counts.cached + counts.used, counts.total);
        rows
    }

    /// Runs steps until no request is left.
    fn drain(&mut self) {
        let most = 4 * (self.open.values().map(|a| a.prompt.len() + a.max_tokens).sum::<usize>() + 1).pow(2);
        let until = self.n_steps + most;
        while !self.open.is_empty() {
            let rows = self.step();
            assert!(!rows.is_empty(), "{} requests and nothing to do", self.open.len());
            assert!(self.n_steps < until, "it does not terminate");
        }
        assert_eq!(self.pool.counts().used, 0, "blocks are lost");
        assert_eq!(self.scheduler.n_running_and_waiting(), (0, 0));
        assert!(self.scheduler.served.is_empty());
    }
}

fn limits(n_tokens: usize, n_rows: usize) -> ScheduleLimits {
    ScheduleLimits { n_tokens, n_beside: n_tokens, n_rows }
}

fn prompt(random: &mut Random, most: usize) -> Vec<u32> {
    // Few distinct tokens and common prefixes, so that the prefix cache finds something.
    let common = random.below(3) as u32;
    let n = 1 + random.below(most);
    (0..n).map(|i| if i < 9 { common } else { random.below(3) as u32 }).collect()
}

#[test]
fn a_million_tokens_are_evaluated_and_every_request_gets_its_tokens() {
    let mut random = Random(11);
    // Capacity for about ten requests, so that preemptions never stop.
    let mut world = World::new(120, ScheduleLimits { n_beside: 6, ..limits(48, 24) });
    let mut n_cancelled = 0;
    while world.n_evaluated < 1_000_000 {
        while world.open.len() < 40 {
            let (text, max_tokens) = (prompt(&mut random, 60), 1 + random.below(60));
            let (user, priority) = (random.below(5) as u64, random.below(3) as i32 - 1);
            world.submit(text, max_tokens, user, priority);
        }
        if random.below(50) == 0 {
            let ids: Vec<u64> = world.open.keys().copied().collect();
            world.end(RequestId(ids[random.below(ids.len())]));
            n_cancelled += 1;
        }
        if random.below(20) == 0 {
            let ids: Vec<u64> = world.open.keys().copied().collect();
            let (id, is_paused) = (ids[random.below(ids.len())], random.below(2) == 0);
            world.scheduler.get(RequestId(id)).unwrap().is_paused = is_paused;
        }
        world.step();
    }
    let ids: Vec<u64> = world.open.keys().copied().collect();
    ids.iter().for_each(|id| world.scheduler.get(RequestId(*id)).unwrap().is_paused = false);
    world.drain();
    assert_eq!(world.n_ended, world.n_submitted);
    assert!(n_cancelled > 100 && world.scheduler.n_preempted() > 1000, "the load was too low");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]
    #[test]
    fn requests_that_fit_alone_finish_in_a_pool_of_any_size(
        n_blocks in 4usize..20,
        n_tokens in 1usize..20,
        n_rows in 1usize..8,
        asks in prop::collection::vec((1usize..12, 1usize..6, 0u64..3, -1i32..2), 1..20),
        n_reserved in 0usize..3,
        seed in any::<u64>(),
    ) {
        let mut random = Random(seed);
        let mut world = World::new(n_blocks, ScheduleLimits { n_beside: 1 + n_tokens / 3, ..limits(n_tokens, n_rows) });
        // Sessions have reserved blocks.
        let mut sessions = Vec::new();
        for _ in 0..n_reserved.min(n_blocks / 8) {
            let table = world.pool.reserve(4 * KV_BLOCK).unwrap();
            let text = prompt(&mut random, 10);
            let state = SequenceState::new(table, 4 * KV_BLOCK, None);
            sessions.push(world.submit_in(state, text, 4, 0, 0));
        }
        let most = world.pool.max_positions();
        for (n_prompt, max_tokens, user, priority) in asks {
            let text = prompt(&mut random, n_prompt);
            if text.len() + max_tokens - 1 <= most {
                world.submit(text, max_tokens, user, priority);
            }
            for _ in 0..random.below(4) {
                world.step();
            }
        }
        world.drain();
    }
}

#[test]
fn decoding_rows_come_first_and_prompts_fill_the_remaining_budget() {
    let mut world = World::new(64, limits(8, 8));
    let short = world.submit(vec![1], 6, 0, 0);
    world.step();
    let long = world.submit(vec![2; 17], 2, 0, 0);
    let late = world.submit(vec![0; 3], 2, 0, 0);
    let row = |id, n_tokens, chooses| StepRow { id, n_tokens, chooses };
    assert_eq!(world.step(), [row(short, 1, true), row(long, 7, false)]);
    assert_eq!(world.step(), [row(short, 1, true), row(long, 7, false)]);
    assert_eq!(world.step(), [row(short, 1, true), row(long, 3, true), row(late, 3, true)]);
    assert_eq!(world.step(), [row(short, 1, true), row(long, 1, true), row(late, 1, true)]);
    world.drain();
}

#[test]
fn chunks_are_small_beside_many_decoding_rows_and_large_beside_few() {
    let mut world = World::new(512, ScheduleLimits { n_beside: 8, ..limits(64, 16) });
    for _ in 0..6 {
        world.submit(vec![1], 40, 0, 0);
    }
    world.step();
    let n_prompt = |rows: &[StepRow]| rows.iter().map(|row| row.n_tokens).filter(|n| *n > 1).sum::<usize>();
    // One prompt of seven sequences has a seventh of the budget, or what any step has room for.
    world.submit(vec![2; 100], 2, 0, 0);
    assert_eq!(n_prompt(&world.step()), 64 / 7);
    for _ in 0..3 {
        world.submit(vec![0; 100], 2, 0, 0);
    }
    assert_eq!(n_prompt(&world.step()), 64 * 4 / 10);
    world.drain();
    world.submit(vec![7; 100], 2, 0, 0);
    assert_eq!(n_prompt(&world.step()), 64);
    world.drain();
    for _ in 0..15 {
        world.submit(vec![1], 40, 0, 0);
    }
    world.step();
    world.submit(vec![5; 30], 2, 0, 0);
    assert_eq!(n_prompt(&world.step()), 8);
    world.drain();
}

#[test]
fn a_request_is_admitted_when_its_prompt_and_one_more_block_fit_and_nobody_overtakes_it() {
    let mut world = World::new(6, limits(64, 8));
    let first = world.submit(vec![1; 12], 3, 0, 0);
    // It needs three blocks and one more, and three are left.
    let large = world.submit(vec![2; 12], 4, 0, 0);
    let small = world.submit(vec![0; 2], 1, 0, 0);
    assert_eq!(world.step().iter().map(|row| row.id).collect::<Vec<_>>(), [first]);
    world.step();
    world.step();
    assert!(!world.open.contains_key(&first.0));
    assert_eq!(world.step().iter().map(|row| row.id).collect::<Vec<_>>(), [large, small]);
    world.drain();
}

#[test]
fn the_newest_is_preempted_and_readmitted_when_another_has_left() {
    let mut world = World::new(6, limits(64, 8));
    let old = world.submit(vec![1; 8], 12, 0, 0);
    let new = world.submit(vec![2; 4], 12, 0, 0);
    let mut n_rows = Vec::new();
    while world.open.contains_key(&old.0) {
        n_rows.push(world.step().len());
    }
    assert_eq!(world.scheduler.n_preempted(), 1, "preempted once, not repeatedly");
    let (first_alone, n) = (n_rows.iter().position(|n| *n == 1).unwrap(), n_rows.len());
    assert!(first_alone > 0 && n_rows[first_alone..].iter().all(|n| *n == 1), "{n_rows:?} of {n}");
    assert_eq!(world.step()[0].id, new);
    world.drain();
}

#[test]
fn a_higher_priority_goes_first_and_preempts_a_lower_one() {
    let mut world = World::new(6, limits(64, 8));
    let low = world.submit(vec![1; 8], 12, 0, -1);
    world.step();
    let high = world.submit(vec![2; 8], 12, 0, 5);
    assert_eq!(world.step().iter().map(|row| row.id).collect::<Vec<_>>(), [low, high]);
    while world.open.contains_key(&high.0) {
        assert_eq!(world.step()[0].id, high);
    }
    assert!(world.open.contains_key(&low.0) && world.scheduler.n_preempted() == 1);
    // A waiting request of higher priority preempts too.
    assert_eq!(world.step()[0].id, low);
    let high = world.submit(vec![2; 17], 2, 0, 5);
    world.step();
    assert_eq!(world.step()[0].id, high);
    assert_eq!(world.scheduler.n_preempted(), 2);
    world.drain();
}

#[test]
fn a_user_with_one_request_does_not_wait_for_all_of_another_user() {
    let mut world = World::new(64, limits(16, 2));
    let many: Vec<_> = (0..20).map(|_| world.submit(vec![1; 4], 4, 1, 0)).collect();
    world.step();
    let one = world.submit(vec![2; 4], 4, 2, 0);
    while world.open.contains_key(&one.0) {
        world.step();
    }
    let left = many.iter().filter(|id| world.open.contains_key(&id.0)).count();
    assert!(left >= 16, "{left} of 20 are left");
    world.drain();
}

#[test]
fn a_paused_request_is_preempted_and_finishes_later() {
    let mut world = World::new(6, limits(64, 1));
    let idle = world.submit(vec![1; 16], 4, 0, 0);
    world.step();
    world.scheduler.get(idle).unwrap().is_paused = true;
    let other = world.submit(vec![2; 16], 4, 0, 0);
    while world.open.contains_key(&other.0) {
        assert_eq!(world.step()[0].id, other);
    }
    assert!(world.scheduler.plan().rows.is_empty());
    world.scheduler.get(idle).unwrap().is_paused = false;
    world.drain();
}

#[test]
fn a_request_that_can_no_longer_fit_is_refused_with_the_numbers() {
    let mut world = World::new(6, limits(64, 8));
    let id = world.submit(vec![1; 20], 4, 0, 0);
    world.step();
    // A session reserves most of the pool.
    let _session = world.pool.reserve(4 * KV_BLOCK).unwrap();
    let refused = loop {
        let StepSchedule { rows, mut refused } = world.scheduler.plan();
        match refused.pop() {
            Some(refused) => break refused,
            None => rows.iter().for_each(|row| world.scheduler.advance(row.id, 1, Some(1))),
        }
    };
    assert_eq!((refused.0.id, refused.1.total), (id, 6));
    assert!(refused.1.need > refused.1.free);
}

#[test]
fn requests_with_a_common_prefix_share_its_blocks() {
    let mut world = World::new(64, limits(64, 8));
    let text: Vec<u32> = (0..18).map(|i| i % 3).collect();
    world.submit(text.clone(), 2, 0, 0);
    world.step();
    let again = world.submit(text, 2, 0, 0);
    let rows = world.step();
    let row = rows.iter().find(|row| row.id == again).unwrap();
    assert_eq!(row.n_tokens, 2, "four blocks of four were found");
    world.drain();
}

#[test]
fn several_completions_of_one_prompt_evaluate_it_once() {
    let mut world = World::new(64, limits(16, 8));
    let text: Vec<u32> = (0..30).map(|i| i * i % 3).collect();
    let ids: Vec<_> = (0..6).map(|_| world.submit(text.clone(), 3, 0, 0)).collect();
    let row = |id: RequestId, n_tokens, chooses| StepRow { id, n_tokens, chooses };
    assert_eq!(world.step(), [row(ids[0], 16, false)]);
    assert_eq!(world.step(), [row(ids[0], 14, true)]);
    // Seven blocks of four are cached; each request has two tokens left.
    let remaining: Vec<_> = ids[1..].iter().map(|id| row(*id, 2, true)).collect();
    assert_eq!(world.step(), [&[row(ids[0], 1, true)], &remaining[..]].concat());
    world.drain();
    assert_eq!(world.n_evaluated, 30 + 5 * 2 + 6 * 2);
    // Nobody waits for a paused request.
    let idle = world.submit(vec![0; 40], 3, 0, 0);
    world.step();
    world.scheduler.get(idle).unwrap().is_paused = true;
    let other = world.submit(vec![0; 40], 3, 0, 0);
    assert_eq!(world.step()[0].id, other);
    world.scheduler.get(idle).unwrap().is_paused = false;
    world.drain();
}
