//! The control-block states that a graph is verified with.
//!
//! Three blocks in which every number that the ops index with points somewhere allowed: early in a sequence, in the
//! middle, and at the end of the context, past every boundary between splits of attention. Block tables point at
//! scratch blocks only, so nothing that a session owns is read or written.

use refrain_graph::{Feedback, Place, Plan, SampleParam, Segment};
use refrain_kernels::{CommitState, Digester};
use refrain_tensor::DType;

use crate::error::CudaError;
use crate::feed::{FEED_BYTES, RING_ENTRIES, header};
use crate::resident::Resident;
use crate::roles::{Paging, Roles, Words};
use crate::verify::{Case, Check, N_CASES};

/// Attention looks at no more than this many (row, position) pairs of a sequence in a state, so that verifying a long
/// prompt's graph costs no more than a few decode steps.
const MAX_PAIRS: usize = 1 << 15;

/// What a segment of a plan is verified with.
pub(crate) fn check(
    plan: &Plan,
    segment: &Segment,
    roles: &Roles,
    feedback: Option<&Feedback>,
    resident: &Resident,
    digester: &Digester,
) -> Result<Check, CudaError> {
    let failed = |e| CudaError::Driver { step: "preparing verification".into(), source: e };
    let live_in = live_in(plan, segment);
    let states = states_of(plan, segment);
    let mut cases = Vec::with_capacity(N_CASES);
    for idx in 0..N_CASES {
        let mut rng = Random(0x9E37_79B9 + idx as u64);
        let mut uploads = Vec::new();
        let control = control_block(plan, roles, resident, idx, &mut rng);
        if !control.is_empty() {
            uploads.push((resident.control.slice(0, control.len() as u64).map_err(failed)?, control));
        }
        if let Some(feedback) = feedback {
            uploads.push((resident.feed, run_state(feedback, idx).to_vec()));
        }
        for &(buffer, dtype) in &live_in {
            let buf = resident.buffer(plan, buffer).map_err(failed)?;
            uploads.push((buf, values(dtype, buf.len() as usize, &mut rng)));
        }
        for &state in &states {
            let buf = resident.state_scratch(state).map_err(failed)?;
            if !buf.is_empty() {
                uploads.push((buf, values(resident.state(state).dtype, buf.len() as usize, &mut rng)));
            }
        }
        uploads.push((resident.counters, vec![0; resident.counters.len() as usize]));
        cases.push(Case { uploads });
    }
    // A plan that reads nothing but weights, or nothing but integers of unknown meaning, has one state only.
    let only_one = cases.iter().all(|case| *case == cases[0]);
    let mut check = if only_one { Check::of_one_state(cases) } else { Check::new(cases)? };
    check = check.workspace(resident.scratch).digests(digester.clone());
    for &state in states.iter().filter(|s| !roles.elsewhere.contains(s)) {
        let scratch = resident.state_scratch(state).map_err(failed)?;
        check = check.narrow(resident.state_buf(state).map_err(failed)?, vec![scratch]);
    }
    Ok(check)
}

/// Arena buffers that the segment reads before it writes them, with the type they are read as.
fn live_in(plan: &Plan, segment: &Segment) -> Vec<(refrain_graph::BufferId, DType)> {
    let mut written = vec![false; plan.buffers().len()];
    let mut found: Vec<(refrain_graph::BufferId, DType)> = Vec::new();
    for step in &plan.steps()[segment.steps.clone()] {
        for operand in &step.inputs {
            let in_arena = matches!(plan.buffer(operand.buffer).place, Place::Arena { .. });
            let known = found.iter().any(|(buffer, _)| *buffer == operand.buffer);
            if in_arena && !written[operand.buffer.idx()] && !known {
                found.push((operand.buffer, operand.dtype));
            }
        }
        step.outputs.iter().for_each(|operand| written[operand.buffer.idx()] = true);
    }
    found
}

fn states_of(plan: &Plan, segment: &Segment) -> Vec<usize> {
    let steps = plan.steps()[segment.steps.clone()].iter();
    let operands = steps.flat_map(|step| step.inputs.iter().chain(&step.outputs));
    let mut states: Vec<usize> = operands
        .filter_map(|operand| match plan.buffer(operand.buffer).place {
            Place::State(id) => Some(id.idx()),
            Place::Arena { .. } | Place::Control { .. } | Place::Weight(_) => None,
        })
        .collect();
    states.sort_unstable();
    states.dedup();
    states
}

fn control_block(plan: &Plan, roles: &Roles, resident: &Resident, case: usize, rng: &mut Random) -> Vec<u8> {
    let mut block = vec![0; plan.control().bytes()];
    for slot in plan.control().slots() {
        let fill = values(slot.ty.dtype, slot.bytes, rng);
        block[slot.offset..slot.offset + slot.bytes].copy_from_slice(&fill);
    }
    for ids in &roles.ids {
        // Now and then an empty place, where there is more than one.
        let id = |i: usize, rng: &mut Random| match i > 0 && rng.below(8) == 0 {
            true => -1,
            false => rng.below(ids.limit.max(1)) as i32,
        };
        let all: Vec<i32> = (0..ids.words.len).map(|i| id(i, rng)).collect();
        put(&mut block, ids.words, &all);
    }
    for choice in &roles.choices {
        let params: Vec<f32> = (0..choice.params.len).map(|i| sample_param(i % 8, case)).collect();
        put(&mut block, choice.params, &params);
        let seeds: Vec<i32> = (0..choice.rng.len).map(|_| rng.next() as i32).collect();
        put(&mut block, choice.rng, &seeds);
    }
    for paging in &roles.paging {
        put_pages(&mut block, paging, resident, case);
    }
    block
}

/// In the middle of a run, at its last token with a ring that starts over, and with a history that does.
fn run_state(feedback: &Feedback, case: usize) -> [u8; FEED_BYTES as usize] {
    let window = (feedback.history.len >> (case / 2)) as u32;
    let (count, n_left, history_next) =
        [(3, 100, 1), (u64::from(RING_ENTRIES), 1, 2), (250, 7, window.saturating_sub(1))][case.min(2)];
    let state = CommitState { done: 0, n_left, limit: u32::MAX, window, history_next, unused: [0; 3] };
    header(count, &state, &[1, 2])
}

/// Greedy, then all filters, then all penalties.
fn sample_param(param: usize, case: usize) -> f32 {
    let set = |p: SampleParam| param == p as usize;
    match case {
        0 if set(SampleParam::TopP) || set(SampleParam::RepeatPenalty) => 1.0,
        1 if set(SampleParam::Temperature) => 0.8,
        1 if set(SampleParam::TopK) => 12.0,
        1 if set(SampleParam::TopP) => 0.9,
        1 if set(SampleParam::MinP) => 0.02,
        1 if set(SampleParam::RepeatPenalty) => 1.0,
        2 if set(SampleParam::Temperature) => 1.3,
        2 if set(SampleParam::TopP) => 1.0,
        2 if set(SampleParam::RepeatPenalty) => 1.1,
        2 if set(SampleParam::FrequencyPenalty) || set(SampleParam::PresencePenalty) => 0.25,
        _ => 0.0,
    }
}

/// Consecutive positions, and tables that walk through the scratch blocks again and again: rows of a step never share
/// a place, earlier positions do. A single row has the block it writes to for itself where there are two: the launch
/// that appends its key may also be the one that reads the others.
fn put_pages(block: &mut [u8], p: &Paging, resident: &Resident, case: usize) {
    let n_scratch = resident.n_scratch().max(1);
    let (n, context) = (p.positions.len, p.max_blocks * p.kv_block);
    let n_rows = n.min(n_scratch * p.kv_block).min(context);
    let last = (context - n_rows).min(MAX_PAIRS / n_rows.max(1));
    let start = [1.min(last), last / 2, last][case.min(2)];
    let positions: Vec<i32> = (0..n).map(|i| if i < n_rows { (start + i) as i32 } else { -1 }).collect();
    let seqs: Vec<i32> = (0..n).map(|i| (i % p.n_seqs.max(1)) as i32).collect();
    let own = (n_rows == 1 && n_scratch > 1).then_some(start / p.kv_block);
    let block_of = |column: usize| match own {
        Some(own) if column == own => 0,
        Some(_) => 1 + column % (n_scratch - 1),
        None => column % n_scratch,
    };
    let tables: Vec<i32> =
        (0..p.tables.len).map(|i| (p.n_blocks + block_of(i % p.max_blocks)) as i32).collect();
    put(block, p.positions, &positions);
    put(block, p.seqs, &seqs);
    put(block, p.tables, &tables);
}

fn put<T: bytemuck::Pod>(block: &mut [u8], words: Words, values: &[T]) {
    if let Some(to) = block.get_mut(words.offset..words.offset + 4 * words.len) {
        to.copy_from_slice(bytemuck::cast_slice(values));
    }
}

/// Numbers of both signs around 1 for floats, zeros for everything else.
fn values(dtype: DType, n_bytes: usize, rng: &mut Random) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(n_bytes);
    while bytes.len() < n_bytes {
        let r = rng.next();
        match dtype {
            // Sign, exponent of [0.5, 1), random mantissa.
            DType::F32 => bytes.extend_from_slice(&((r & 0x807F_FFFF) | 0x3F00_0000).to_le_bytes()),
            DType::F16 => bytes.extend_from_slice(&((r as u16 & 0x83FF) | 0x3800).to_le_bytes()),
            DType::BF16 => bytes.extend_from_slice(&((r as u16 & 0x807F) | 0x3F00).to_le_bytes()),
            DType::I32
            | DType::U32
            | DType::I64
            | DType::U8
            | DType::Q4_0
            | DType::Q4_1
            | DType::Q5_0
            | DType::Q5_1
            | DType::Q8_0
            | DType::Q2_K
            | DType::Q3_K
            | DType::Q4_K
            | DType::Q5_K
            | DType::Q6_K
            | DType::IQ4_NL
            | DType::IQ4_XS => bytes.resize(n_bytes, 0),
        }
    }
    bytes.truncate(n_bytes);
    bytes
}

/// A small generator (splitmix64): the states are the same on every run.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u32 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (z >> 32) as u32
    }

    fn below(&mut self, n: usize) -> usize {
        self.next() as usize % n.max(1)
    }
}
