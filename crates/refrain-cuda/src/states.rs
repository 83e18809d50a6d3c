//! Control blocks and states that a graph is verified with.
//!
//! Three cases in which every index that ops read is valid: early in a sequence, in the middle, and at the
//! end of the context, past every split boundary of attention. Block tables point at scratch blocks only, and
//! slots of recurrent states at scratch slots only, so nothing of a session is read or written. Other states
//! are saved, filled, compared and restored as a whole.

use refrain_driver::Buf;
use refrain_graph::{
    ADAM_PARAMS, AdamParam, AdamW, Feedback, Field, Op, PagedBound, Place, Plan, SAMPLE_PARAMS, Sample,
    SampleParam, Segment, SlotBound, StateKind, TrainOp,
};
use refrain_kernels::{CommitState, Digester};
use refrain_tensor::DType;

use crate::error::CudaError;
use crate::feed::{FeedLayout, RING_ENTRIES};
use crate::resident::ResidentMemory;
use crate::verify::{N_CASES, VerifyCase, VerifySetup};

/// Maximum number of (row, position) pairs that attention reads of a sequence in one case, unless a single
/// row reads more. Verifying the graph of a long prompt then costs no more than a few decode steps.
const MAX_PAIRS: usize = 1 << 15;

/// States are filled by repeating this many bytes on the device: a model in training may have gigabytes of
/// them.
const PATTERN_BYTES: usize = 256 << 10;

/// Builds the verification cases of a plan's segment, or of a loop that repeats it with `n_body` steps in its body.
pub(crate) fn check(
    plan: &Plan,
    segment: &Segment,
    feedback: Option<&Feedback>,
    resident: &ResidentMemory,
    digester: &Digester,
    n_body: Option<u32>,
) -> Result<VerifySetup, CudaError> {
    let failed = |e| CudaError::Driver { step: "preparing verification".into(), source: e };
    let live_in = live_in(plan, segment);
    let touched = states_of(plan, segment, |step| step.inputs.iter().chain(&step.outputs).collect());
    let updated = states_of(plan, segment, |step| step.outputs.iter().collect());
    let n_scratch = n_scratch_of(plan).min(resident.n_scratch());
    // Skip scratch blocks that this plan's rows do not need.
    let scratch_of = |state: usize| {
        let whole = resident.state_scratch(state).map_err(failed)?;
        let n_blocks = resident.state(state).n_scratch.max(1) as u64;
        whole.slice(0, whole.len() / n_blocks * (n_scratch as u64).min(n_blocks)).map_err(failed)
    };
    let mut cases = Vec::with_capacity(N_CASES);
    for idx in 0..N_CASES {
        let mut rng = Random(0x9E37_79B9 + idx as u64);
        let (mut uploads, mut patterned) = (Vec::new(), Vec::<((DType, StateKind), Vec<Buf>)>::new());
        let control = control_block(plan, n_scratch, idx, &mut rng);
        if !control.is_empty() {
            uploads.push((resident.control.slice(0, control.len() as u64).map_err(failed)?, control));
        }
        if let Some(feedback) = feedback {
            let feed = resident.feed_of(feedback.n_rows).map_err(failed)?;
            let context = plan.bounds().paged.iter().map(|p| p.max_blocks * p.kv_block).min();
            let limit = n_body.and(context).map_or(u32::MAX, |n| u32::try_from(n).unwrap_or(u32::MAX));
            let (count, header) = run_state(feedback, idx, limit);
            uploads.push((feed, header));
            if let Some(n_body) = n_body {
                let words = loop_state(count, n_body, idx);
                let header = resident.ring.slice(0, 8 * words.len() as u64).map_err(failed)?;
                uploads.push((header, words.iter().flat_map(|word| word.to_le_bytes()).collect()));
            }
        }
        for &(buffer, dtype) in &live_in {
            let buf = resident.buffer(plan, buffer).map_err(failed)?;
            uploads.push((buf, values(dtype, buf.len() as usize, &mut rng)));
        }
        for &state in &touched {
            let placed = resident.state(state);
            let buf = match placed.kind {
                StateKind::Paged => scratch_of(state)?,
                StateKind::Slots => resident.state_scratch(state).map_err(failed)?,
                // States that no launch writes keep their contents.
                StateKind::Whole if updated.contains(&state) => resident.state_buf(state).map_err(failed)?,
                StateKind::Whole => continue,
            };
            let key = (placed.dtype, placed.kind);
            match patterned.iter_mut().find(|(of, _)| *of == key) {
                _ if buf.is_empty() => {}
                Some((_, bufs)) => bufs.push(buf),
                None => patterned.push((key, vec![buf])),
            }
        }
        let patterns = patterned.into_iter().map(|((dtype, kind), bufs)| {
            let largest = bufs.iter().map(|buf| buf.len()).max().unwrap_or(0);
            let n_bytes = PATTERN_BYTES.min(usize::try_from(largest).unwrap_or(usize::MAX));
            (state_values(kind, dtype, n_bytes, &mut rng), bufs)
        });
        let patterns = patterns.collect();
        uploads.push((resident.counters, vec![0; resident.counters.len() as usize]));
        cases.push(VerifyCase { uploads, patterns });
    }
    // A plan that reads only weights, or only integers of unknown meaning, has a single case.
    let only_one = cases.iter().all(|case| *case == cases[0]);
    let mut check = if only_one { VerifySetup::of_one_case(cases) } else { VerifySetup::new(cases)? };
    check = check.workspace(resident.scratch).digests(digester.clone());
    let paged = |state: &&usize| resident.state(**state).kind == StateKind::Paged;
    // Rows found through values outside the control block may be anywhere in the pool.
    for &state in touched.iter().filter(paged).filter(|s| !plan.bounds().computed.contains(s)) {
        check = check.narrow(resident.state_buf(state).map_err(failed)?, vec![scratch_of(state)?]);
    }
    let in_slots = |state: &&usize| resident.state(**state).kind == StateKind::Slots;
    for &state in touched.iter().filter(in_slots).filter(|s| !plan.bounds().computed.contains(s)) {
        let scratch = resident.state_scratch(state).map_err(failed)?;
        check = check.narrow(resident.state_buf(state).map_err(failed)?, vec![scratch]);
    }
    Ok(check)
}

/// Arena buffers that the segment reads before it writes them, with the dtype of that read.
pub(crate) fn live_in(plan: &Plan, segment: &Segment) -> Vec<(refrain_graph::BufferId, DType)> {
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

fn states_of(
    plan: &Plan,
    segment: &Segment,
    operands: fn(&refrain_graph::Step) -> Vec<&refrain_graph::Operand>,
) -> Vec<usize> {
    let steps = plan.steps()[segment.steps.clone()].iter();
    let mut states: Vec<usize> = steps
        .flat_map(operands)
        .filter_map(|operand| match plan.buffer(operand.buffer).place {
            Place::State(id) => Some(id.idx()),
            Place::Arena { .. } | Place::Control { .. } | Place::Weight(_) => None,
        })
        .collect();
    states.sort_unstable();
    states.dedup();
    states
}

fn control_block(plan: &Plan, n_scratch: usize, case: usize, rng: &mut Random) -> Vec<u8> {
    let mut block = vec![0; plan.control().bytes()];
    for slot in plan.control().slots() {
        let fill = values(slot.ty.dtype, slot.bytes, rng);
        block[slot.offset..slot.offset + slot.bytes].copy_from_slice(&fill);
    }
    for ids in &plan.bounds().ids {
        // Occasionally an unused entry, if there is more than one.
        let id = |i: usize, rng: &mut Random| match i > 0 && rng.below(8) == 0 {
            true => -1,
            false => rng.below(ids.limit.max(1)) as i32,
        };
        let all: Vec<i32> = (0..ids.field.len).map(|i| id(i, rng)).collect();
        ids.field.put(&mut block, &all);
    }
    for step in plan.steps() {
        let Op::Sample(sample) = &step.op else { continue };
        let field = |i: usize| step.inputs.get(i).and_then(|operand| plan.field_of(operand));
        if let Some(params) = field(1) {
            let values: Vec<f32> = (0..params.len).map(|i| sample_param(i % SAMPLE_PARAMS, case)).collect();
            params.put(&mut block, &values);
        }
        if let Some(seeds) = field(2) {
            let values: Vec<u32> = (0..seeds.len).map(|_| rng.next()).collect();
            seeds.put(&mut block, &values);
        }
        if let Some(mask) = field(Sample::MASK).filter(|_| sample.masked) {
            // About half of the tokens, and never none.
            let values: Vec<u32> = (0..mask.len).map(|_| rng.next() | 1).collect();
            mask.put(&mut block, &values);
        }
    }
    let mut tables: Vec<(Field, RowPositions)> = Vec::new();
    for paged in &plan.bounds().paged {
        // Rows found through the same tables must be the same rows: other tables would redirect their writes.
        if let Some((_, rows)) = tables.iter().find(|(field, _)| *field == paged.tables) {
            put_rows(&mut block, paged, rows);
            continue;
        }
        let rows = put_pages(&mut block, paged, n_scratch, case);
        tables.push((paged.tables, rows));
    }
    for slots in &plan.bounds().slots {
        let has_rows = plan.bounds().paged.iter().any(|p| p.positions == slots.positions);
        put_slots(&mut block, slots, has_rows, case);
    }
    for spans in &plan.bounds().spans {
        spans.spans.put(&mut block, &documents(spans.n_rows(), case, rng));
    }
    put_training(plan, &mut block, case, rng);
    block
}

/// Number of slots for verification, after those of sequences. Rows read the last two of them and write the
/// others, so that no two rows write the same slot and no row reads a slot that another one writes.
pub(crate) const SCRATCH_SLOTS: usize = 6;
const READ_SLOTS: usize = 2;

/// Assigns slots to the sequences that have rows: scratch slots as long as there are some, none for the
/// others, which start with zeros and write nothing. If no paged state has placed the rows, each sequence
/// gets one or more.
fn put_slots(block: &mut [u8], slots: &SlotBound, has_rows: bool, case: usize) {
    let (n, n_seqs) = (slots.positions.len, slots.n_seqs().max(1));
    if !has_rows {
        let each = n.div_ceil(n_seqs);
        let first = |seq: usize| case * (seq + 1) + seq % 2;
        let rows: Vec<(i32, i32)> =
            (0..n).map(|row| ((first(row / each) + row % each) as i32, (row / each) as i32)).collect();
        slots.positions.put(block, &rows.iter().map(|row| row.0).collect::<Vec<_>>());
        slots.seqs.put(block, &rows.iter().map(|row| row.1).collect::<Vec<_>>());
    }
    let mut table = vec![-1; slots.slots.len];
    let mut n_given = 0;
    for row in 0..n {
        let (position, seq) = (slots.positions.at(block, row), slots.seqs.at(block, row));
        let (Ok(position), Ok(seq)) = (usize::try_from(position), usize::try_from(seq)) else { continue };
        let Some(versions) = table.get_mut(2 * seq..2 * seq + 2) else { continue };
        if versions != [-1, -1] || n_given == SCRATCH_SLOTS - READ_SLOTS {
            continue;
        }
        let read = SCRATCH_SLOTS - READ_SLOTS + n_given % READ_SLOTS;
        versions[position % 2] = (slots.n_slots + read) as i32;
        versions[(position + 1) % 2] = (slots.n_slots + n_given) as i32;
        n_given += 1;
    }
    slots.slots.put(block, &table);
}

/// Documents: one with all rows, then several of different lengths, then several with padding after them.
fn documents(n_rows: usize, case: usize, rng: &mut Random) -> Vec<i32> {
    let n_used = if case == 2 { n_rows - n_rows / 8 } else { n_rows };
    let mut spans = Vec::with_capacity(2 * n_rows);
    let mut first = 0;
    while first < n_used {
        let len = if case == 0 { n_used } else { 1 + rng.below(n_used / 3 + 1) };
        let end = (first + len).min(n_used);
        (first..end).for_each(|_| spans.extend([first as i32, end as i32]));
        first = end;
    }
    (n_used..n_rows).for_each(|row| spans.extend([row as i32; 2]));
    spans
}

/// Sets valid positions of ropes, seeds of dropout and parameters of the optimiser.
fn put_training(plan: &Plan, block: &mut [u8], case: usize, rng: &mut Random) {
    for step in plan.steps() {
        let field = |i: usize| step.inputs.get(i).and_then(|operand| plan.field_of(operand));
        let Op::Train(op) = &step.op else { continue };
        match op {
            TrainOp::RopeGrad(_) => {
                if let Some(positions) = field(1) {
                    let all: Vec<i32> = (0..positions.len).map(|_| rng.below(4096) as i32 - 1).collect();
                    positions.put(block, &all);
                }
            }
            TrainOp::Dropout(_) => {
                if let Some(seeds) = field(1) {
                    let all: Vec<u32> = (0..seeds.len).map(|_| rng.next()).collect();
                    seeds.put(block, &all);
                }
            }
            TrainOp::AdamW(_) => {
                if let Some(params) = field(AdamW::PARAMS) {
                    params.put(block, &adam_params(case));
                }
            }
            TrainOp::UnaryGrad(_)
            | TrainOp::GateGrad(_)
            | TrainOp::SoftmaxGrad
            | TrainOp::RmsNormGrad { .. }
            | TrainOp::AddProduct
            | TrainOp::SpanAttentionGrad(_)
            | TrainOp::CrossEntropy
            | TrainOp::SumSquares => {}
        }
    }
}

/// Optimiser parameters: with clipping and decay, without clipping, without either.
fn adam_params(case: usize) -> [f32; ADAM_PARAMS] {
    let (beta1, beta2) = (0.9f32, 0.99f32);
    let mut params = [0.0; ADAM_PARAMS];
    let mut set = |param: AdamParam, value: f32| params[param as usize] = value;
    set(AdamParam::Lr, [1e-3, 3e-4, 1e-2][case.min(2)]);
    set(AdamParam::Beta1, beta1);
    set(AdamParam::OneMinusBeta1, 1.0 - beta1);
    set(AdamParam::LnBeta1, beta1.ln());
    set(AdamParam::Beta2, beta2);
    set(AdamParam::OneMinusBeta2, 1.0 - beta2);
    set(AdamParam::LnBeta2, beta2.ln());
    set(AdamParam::Eps, 1e-8);
    set(AdamParam::WeightDecay, if case == 2 { 0.0 } else { 0.1 });
    set(AdamParam::MaxNorm, if case == 0 { 1.0 } else { 0.0 });
    params
}

/// Values of a state. States that a step may change as a whole are parameters and moments: their values are
/// small and not negative, so that gradients stay finite and the update is applied.
fn state_values(kind: StateKind, dtype: DType, n_bytes: usize, rng: &mut Random) -> Vec<u8> {
    let mut bytes = values(dtype, n_bytes, rng);
    // Values are in [0.5, 1) or negated; the fixed exponent moves them to [2^-6, 2^-5).
    let mut short = |mantissa: u16, exponent: u16| {
        let words = bytes.as_chunks_mut::<2>().0.iter_mut();
        words.for_each(|b| *b = ((u16::from_le_bytes(*b) & mantissa) | exponent).to_le_bytes());
    };
    if kind == StateKind::Paged {
        if dtype == DType::U8 {
            // Small bytes of either sign: no key may outweigh all others.
            bytes.iter_mut().for_each(|b| *b = (rng.next() as u8 & 7).wrapping_sub(4));
        }
        return bytes;
    }
    if dtype == DType::BF16 {
        short(0x007F, 0x3C80);
    } else if dtype == DType::F16 {
        short(0x03FF, 0x2400);
    } else if dtype == DType::F32 {
        let words = bytes.as_chunks_mut::<4>().0.iter_mut();
        words.for_each(|b| *b = ((u32::from_le_bytes(*b) & 0x007F_FFFF) | 0x3C80_0000).to_le_bytes());
    }
    bytes
}

/// State of a run: in the middle of it; at its last token, with the ring wrapping around; with the history
/// wrapping around. Some rows have ended, and the biases of some lapse.
fn run_state(feedback: &Feedback, case: usize, limit: u32) -> (u64, Vec<u8>) {
    let n_rows = feedback.n_rows.max(1);
    let window = ((feedback.history.len / n_rows) >> (case / 2)) as u32;
    let (count, n_left, history_next) =
        [(3, 100, 1), (u64::from(RING_ENTRIES), 1, 2), (250, 7, window.saturating_sub(1))][case.min(2)];
    let row = |row: usize| {
        let state = CommitState {
            done: u32::from(row > 0 && (row + case).is_multiple_of(5)),
            n_left: n_left + (row % 3) as u32,
            limit,
            window,
            history_next,
            bias_until: u32::from((row + case).is_multiple_of(2)),
            n_bias_kept: (row % 4) as u32,
            hold: u32::from(case == 1 && row % 7 == 3),
        };
        (state, &[1, 2][..])
    };
    let rows: Vec<_> = (0..n_rows).map(row).collect();
    (count, FeedLayout { n_rows }.header(count, &rows))
}

/// Header of the ring of a loop: it ends after a few bodies, then when its row does.
fn loop_state(count: u64, n_body: u32, case: usize) -> [u64; 3] {
    let until = if case == 0 { count + u64::from(2 * n_body).max(3) } else { u64::MAX };
    [count, until, 0]
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

/// Writes rows, positions and tables of one case.
///
/// Rows of a step never write to the same location. Rows of one sequence have consecutive positions. In a
/// step of one sequence, the table cycles through the scratch blocks, so earlier positions share memory. With
/// several sequences, and with a single row, the launch that appends a row may also be the one that reads the
/// others. There, each sequence writes to blocks of its own, and its other positions are in blocks that
/// nobody writes.
fn put_pages(block: &mut [u8], p: &PagedBound, n_scratch: usize, case: usize) -> RowPositions {
    let (n, context) = (p.positions.len, p.max_blocks * p.kv_block);
    let rows = match p.n_seqs > 1 || n == 1 {
        true => rows_of_several(p, n_scratch.max(1), context, case),
        false => consecutive_rows(p, n_scratch.max(1), context, case),
    };
    put_rows(block, p, &rows);
    p.tables.put(block, &rows.tables);
    rows
}

fn put_rows(block: &mut [u8], p: &PagedBound, rows: &RowPositions) {
    let row_at = |i: usize| rows.places.get(i).copied().unwrap_or((-1, 0));
    let positions: Vec<i32> = (0..p.positions.len).map(|i| row_at(i).0).collect();
    let seqs: Vec<i32> = (0..p.positions.len).map(|i| row_at(i).1).collect();
    p.positions.put(block, &positions);
    p.seqs.put(block, &seqs);
}

/// Position and sequence of each row, -1 for padding, and the block tables of all sequences.
struct RowPositions {
    places: Vec<(i32, i32)>,
    tables: Vec<i32>,
}

/// Number of positions before the first row: at the start, in the middle, and at the end.
fn start_of(case: usize, context: usize, n_rows: usize) -> usize {
    let last = context.saturating_sub(n_rows);
    [1.min(last), last / 2, last][case.min(2)]
}

/// Number of consecutive rows, up to `most`, that attend to few enough positions. It is halved until they do,
/// down to one, so that the end of a long context is reached.
fn n_affordable(most: usize, context: usize, case: usize) -> usize {
    let affordable = |n: usize| n * (start_of(case, context, n) + n) <= MAX_PAIRS;
    let mut halves = std::iter::successors(Some(most), |n| (*n > 1).then_some(n / 2));
    halves.find(|&n| affordable(n)).unwrap_or(1.min(most))
}

/// Rows of a chunk of a prompt, fewer if they would attend to too many positions.
fn consecutive_rows(p: &PagedBound, n_scratch: usize, context: usize, case: usize) -> RowPositions {
    // More blocks would make the verification of a prompt slower without covering more.
    let n_scratch = n_scratch.min(CHUNK_BLOCKS);
    let most = p.positions.len.min(n_scratch * p.kv_block).min(context);
    let n_rows = n_affordable(most, context, case);
    let start = start_of(case, context, n_rows);
    let block_of = |column: usize| (p.n_blocks + column % n_scratch) as i32;
    RowPositions {
        places: (start..start + n_rows).map(|i| (i as i32, 0)).collect(),
        tables: (0..p.tables.len).map(|i| block_of(i % p.max_blocks)).collect(),
    }
}

/// Blocks that hold the rows of a prompt's chunk.
const CHUNK_BLOCKS: usize = 4;

/// Rows of several sequences. If there are more rows than sequences, one sequence has a chunk of a prompt.
/// All others have a single row, as many as there are blocks to write. Which sequences these are and how far
/// each has come differs from case to case.
fn rows_of_several(p: &PagedBound, n_scratch: usize, context: usize, case: usize) -> RowPositions {
    // With a single block, everything is in it.
    let n_read = (n_scratch / 4).clamp(1, N_READ);
    let n_write = n_scratch.saturating_sub(n_read).max(1);
    let first_read = if n_scratch > 1 { n_write } else { 0 };
    let block_of = |column: usize| (p.n_blocks + first_read + column % p.max_blocks % n_read) as i32;
    let mut tables: Vec<i32> = (0..p.tables.len).map(block_of).collect();
    let mut to_write = p.n_blocks as i32..(p.n_blocks + n_write) as i32;
    let n_seqs = p.n_seqs.min(p.positions.len);
    let mut places = vec![(-1, 0); p.positions.len];
    let mut set = |row: usize, seq: usize, position: usize, block: i32| {
        places[row] = (position as i32, seq as i32);
        tables[seq * p.max_blocks + position / p.kv_block] = block;
    };
    let n_spare = p.positions.len - n_seqs;
    let mut n_chunk = 0;
    if n_spare > 0 {
        let most = (n_spare + 1).min((n_write / 2).clamp(1, CHUNK_BLOCKS) * p.kv_block).min(context);
        let start = start_of(case, context, n_affordable(most, context, case));
        let mut block = None;
        for position in start..start + n_affordable(most, context, case) {
            if position % p.kv_block == 0 || block.is_none() {
                block = to_write.next();
            }
            let Some(block) = block else { break };
            set(n_chunk, case % p.n_seqs, position, block);
            n_chunk += 1;
        }
    }
    let is_chunk = usize::from(n_chunk > 0);
    let n_single = (n_seqs - is_chunk).min(to_write.len());
    let (last, few) = (start_of(case, context, 1), MAX_PAIRS / n_single.max(1));
    for (i, block) in to_write.take(n_single).enumerate() {
        // Different rows in each case. One is at the last position, the others have come less far.
        let idx = (case * n_single + i) % (n_seqs - is_chunk).max(1);
        let seq = if n_spare > 0 { (case + is_chunk + idx) % p.n_seqs } else { idx };
        let position = if i == 0 { last } else { last.min(few).saturating_sub(5 * i) };
        let row = if n_spare > 0 { n_chunk + i } else { idx };
        set(row, seq, position, block);
    }
    RowPositions { places, tables }
}

/// Maximum number of blocks that single rows read and nobody writes.
pub(crate) const N_READ: usize = 4;

/// Scratch blocks that a plan's rows use: one per sequence, those of a chunk, and the read-only ones.
fn n_scratch_of(plan: &Plan) -> usize {
    let of = |p: &PagedBound| match p.n_seqs {
        0 | 1 => CHUNK_BLOCKS,
        n => n + N_READ + if p.positions.len > n { CHUNK_BLOCKS } else { 0 },
    };
    plan.bounds().paged.iter().map(of).max().unwrap_or(CHUNK_BLOCKS)
}

/// Random values for floats, with either sign and magnitude in [0.5, 1); zeros for everything else.
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
            | DType::IQ4_XS
            | DType::MXFP4
            | DType::IQ2_XXS
            | DType::IQ2_XS
            | DType::IQ2_S
            | DType::IQ3_XXS
            | DType::IQ3_S => bytes.resize(n_bytes, 0),
        }
    }
    bytes.truncate(n_bytes);
    bytes
}

/// A small generator (splitmix64), so that the states are the same on every run.
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

#[cfg(test)]
mod tests {
    use super::*;
    use refrain_graph::{Attention, GraphBuilder, PlanOptions, State, StateId, TensorType};
    use std::collections::HashSet;

    /// `n` rows of `n_seqs` sequences of `max_blocks` blocks of 16 positions, in a pool of 8 blocks.
    fn paged_plan(n: usize, n_seqs: usize, max_blocks: usize) -> Plan {
        let cache = TensorType::new(DType::F16, [8, 1, 16, 4]);
        let states = vec![State::paged("k", cache), State::paged("v", cache)];
        let mut b = GraphBuilder::new(vec![], states);
        let rows = b.input("rows", TensorType::new(DType::F32, [n, 1, 4])).unwrap();
        let positions = b.input("positions", TensorType::new(DType::I32, [n])).unwrap();
        let seqs = b.input("seqs", TensorType::new(DType::I32, [n])).unwrap();
        let tables = b.input("tables", TensorType::new(DType::I32, [n_seqs, max_blocks])).unwrap();
        let paging = [positions, seqs, tables];
        let caches = [0, 1].map(|i| {
            let state = b.state(StateId::from_idx(i));
            b.kv_append(state, rows, paging).unwrap()
        });
        let attention = Attention { scale: 1.0, window: None, softcap: None };
        let y = b.attention(attention, rows, caches, paging).unwrap();
        b.output("y", y).unwrap();
        Plan::new(&b.finish(), PlanOptions::default()).unwrap()
    }

    fn positions(plan: &Plan, case: usize) -> (PagedBound, Vec<u8>, Vec<usize>) {
        positions_in(plan, 4, case)
    }

    fn positions_in(plan: &Plan, n_scratch: usize, case: usize) -> (PagedBound, Vec<u8>, Vec<usize>) {
        let block = control_block(plan, n_scratch, case, &mut Random(7));
        let paged = plan.bounds().paged[0].clone();
        let rows = paged.positions.read(&block).filter(|p| *p >= 0).map(|p| p as usize).collect();
        (paged, block, rows)
    }

    /// Appends of many rows and attention of a few, found through the same tables.
    #[test]
    fn rows_that_share_tables_are_the_same_rows() {
        let cache = TensorType::new(DType::F16, [8, 1, 16, 4]);
        let states = vec![State::paged("k", cache), State::paged("v", cache)];
        let mut b = GraphBuilder::new(vec![], states);
        let tables = b.input("tables", TensorType::new(DType::I32, [3, 6])).unwrap();
        let mut rows = |name: &str, n: usize| {
            let mut input = |what: &str, dtype, dims: &[usize]| {
                let shape = refrain_tensor::Shape::new(dims).unwrap();
                b.input(&format!("{what} {name}"), TensorType { dtype, shape }).unwrap()
            };
            let x = input("rows", DType::F32, &[n, 1, 4]);
            (x, [input("positions", DType::I32, &[n]), input("seqs", DType::I32, &[n]), tables])
        };
        let ((x, appended), (q, seen)) = (rows("appended", 40), rows("seen", 5));
        let caches = [0, 1].map(|i| {
            let state = b.state(StateId::from_idx(i));
            b.kv_append(state, x, appended).unwrap()
        });
        let attention = Attention { scale: 1.0, window: None, softcap: None };
        let y = b.attention(attention, q, caches, seen).unwrap();
        b.output("y", y).unwrap();
        let plan = Plan::new(&b.finish(), PlanOptions::default()).unwrap();
        assert_eq!(plan.bounds().paged.len(), 2);
        for case in 0..N_CASES {
            let block = control_block(&plan, 16, case, &mut Random(7));
            let rows = |p: &PagedBound| -> Vec<(i32, i32)> {
                let n = p.positions.len;
                (0..n).map(|i| (p.positions.at(&block, i), p.seqs.at(&block, i))).collect()
            };
            let [many, few] = [0, 1].map(|i| rows(&plan.bounds().paged[i]));
            assert_eq!(many[..few.len()], few, "case {case}");
            assert!(few.iter().any(|(position, _)| *position >= 0), "case {case}: {few:?}");
        }
    }

    #[test]
    fn the_last_position_of_a_long_context_is_verified_by_every_size_of_step() {
        for (n, max_blocks) in [(1, 4), (1, 8192), (8, 8192), (512, 8192), (512, 256)] {
            let plan = paged_plan(n, 1, max_blocks);
            let (_, _, rows) = positions(&plan, 2);
            assert_eq!(rows.last(), Some(&(16 * max_blocks - 1)), "{n} rows, {max_blocks} blocks");
            let pairs: usize = rows.iter().map(|p| p + 1).sum();
            assert!(rows.len() == 1 || pairs <= 2 * MAX_PAIRS, "{n} rows, {max_blocks} blocks: {pairs}");
            let (_, _, rows) = positions(&plan, 0);
            assert_eq!(rows, (1..=n.min(64)).collect::<Vec<_>>());
        }
    }

    #[test]
    fn rows_of_a_step_write_distinct_locations_that_no_other_sequence_reads() {
        let sizes = [(1, 1), (2, 2), (8, 8), (32, 32), (40, 40), (3, 7), (16, 3), (64, 8), (512, 32)];
        for ((n, n_seqs), n_scratch) in sizes.into_iter().flat_map(|size| [(size, 4), (size, 36)]) {
            let mut seen = HashSet::new();
            for case in 0..N_CASES {
                let plan = paged_plan(n, n_seqs, 6);
                let (p, block, _) = positions_in(&plan, n_scratch, case);
                let name = format!("{n} rows of {n_seqs}, {n_scratch} blocks, case {case}");
                let place = |row: usize, position: usize| {
                    let seq = p.seqs.at(&block, row) as usize;
                    (p.tables.at(&block, seq * p.max_blocks + position / 16), position % 16)
                };
                let rows: Vec<(usize, usize)> = (0..n)
                    .filter_map(|row| Some((row, usize::try_from(p.positions.at(&block, row)).ok()?)))
                    .collect();
                let seqs: HashSet<i32> = rows.iter().map(|(row, _)| p.seqs.at(&block, *row)).collect();
                let most = if n_scratch == 4 { 3 } else { 32 };
                match n > n_seqs {
                    // A chunk of one sequence, and single rows of others.
                    true => assert!(rows.len() > seqs.len() && seqs.len() > 1, "{name}: {rows:?}"),
                    false => assert_eq!((rows.len(), seqs.len()), (n.min(most), n.min(most)), "{name}"),
                }
                seen.extend(seqs);
                let written: Vec<_> = rows.iter().map(|(row, at)| place(*row, *at)).collect();
                let distinct: HashSet<_> = written.iter().collect();
                assert_eq!(distinct.len(), rows.len(), "{name}: {written:?}");
                // Only blocks after the pool.
                assert!(written.iter().all(|(b, _)| (8..8 + n_scratch as i32).contains(b)), "{written:?}");
                for (row, at) in &rows {
                    let seq = p.seqs.at(&block, *row);
                    let others: HashSet<_> = rows
                        .iter()
                        .zip(&written)
                        .filter(|((other, _), _)| p.seqs.at(&block, *other) != seq)
                        .map(|(_, to)| *to)
                        .collect();
                    for before in (0..*at).map(|position| place(*row, position)) {
                        assert!(!others.contains(&before), "{name}: row {row} reads {before:?} of another");
                    }
                }
            }
            assert!(seen.len() == n_seqs.min(n) || n_scratch == 4, "{n} rows of {n_seqs}: {seen:?}");
        }
    }
}
