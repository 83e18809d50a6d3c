//! Cases of sampling.

use refrain_graph::{Op, SAMPLE_PARAMS, TensorType};
use refrain_kernels::{SampleArgs, SampleTop, sample_scratch_bytes, sample_state_bytes};
use refrain_tensor::DType;
use refrain_testkit::{Rng, Tol};

use crate::bed::{Case, Operand, Role, contiguous, decode, dense, f32s, i32s, normals, reference, shape};

/// Temperature, top-k, top-p, min-p, repeat, frequency, presence.
const OFF: [f32; 7] = [1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0];

fn with(changes: &[(usize, f32)]) -> [f32; 7] {
    let mut params = OFF;
    changes.iter().for_each(|&(i, v)| params[i] = v);
    params
}

pub fn sample() -> Vec<Case> {
    let rows = [
        ("greedy", with(&[(0, 0.0)])),
        ("negative temperature", with(&[(0, -1.0)])),
        ("NaN temperature", with(&[(0, f32::NAN)])),
        ("greedy with penalties", with(&[(0, 0.0), (4, 1.3), (5, 0.2), (6, 0.1)])),
        ("plain", OFF),
        ("cold", with(&[(0, 0.3)])),
        ("hot", with(&[(0, 5.0)])),
        ("penalties", with(&[(4, 0.7), (5, -0.5), (6, 0.4)])),
        ("top-k 1", with(&[(1, 1.0)])),
        ("top-k 7", with(&[(1, 7.0)])),
        ("top-k past the vocabulary", with(&[(1, 1e9)])),
        ("top-p 0.9", with(&[(2, 0.9)])),
        ("top-p 0", with(&[(2, 0.0)])),
        ("top-p NaN", with(&[(2, f32::NAN)])),
        ("min-p 0.05", with(&[(3, 0.05)])),
        ("min-p 1", with(&[(3, 1.0)])),
        ("min-p 2", with(&[(3, 2.0)])),
        ("all filters", with(&[(0, 0.8), (1, 40.0), (2, 0.95), (3, 0.02), (4, 1.1), (5, 0.1), (6, 0.1)])),
        ("top-k then top-p", with(&[(0, 2.0), (1, 5.0), (2, 0.5)])),
    ];
    let mut cases = Vec::new();
    for vocab in [1, 2, 50, 1024, 1025, 5000] {
        for (i, (name, params)) in rows.iter().enumerate() {
            cases.push(sample_case(
                &format!("{name}, vocab {vocab}"),
                vocab,
                &[*params; 2],
                Logits::Normal,
                i as u64,
            ));
        }
        // Many ties, so that ids decide.
        for params in [OFF, with(&[(0, 0.0)]), with(&[(1, 3.0)]), with(&[(2, 0.3)])] {
            cases.push(sample_case(
                &format!("ties {params:?}, vocab {vocab}"),
                vocab,
                &[params; 4],
                Logits::Ties,
                90,
            ));
        }
        for logits in [Logits::AllMinusInf, Logits::SomeNan, Logits::PlusInf, Logits::MostlyMinusInf] {
            for params in [OFF, with(&[(0, 0.0)]), with(&[(1, 4.0), (2, 0.7)])] {
                let name = format!("{logits:?} {params:?}, vocab {vocab}");
                cases.push(sample_case(&name, vocab, &[params; 2], logits, 91));
            }
        }
    }
    let [plain, large, top_k] = [OFF, with(&[(2, 0.99)]), with(&[(0, 1.3), (1, 40.0), (2, 0.95)])];
    cases.push(sample_case("a large vocabulary", 40_000, &[plain, large, top_k], Logits::Normal, 92));
    for vocab in [7, 1023, 4099] {
        cases.extend(KINDS.map(|kind| {
            sample_case(&format!("hard {kind:?}, vocab {vocab}"), vocab, &hard(), kind, 200 + vocab as u64)
        }));
    }
    // More keys per bin than fit in shared memory.
    for kind in [Logits::AllEqual, Logits::Sigma(0.01)] {
        cases.push(sample_case(&format!("long {kind:?}"), 9000, &hard(), kind, 93));
    }
    cases.extend([Left::Rubbish, Left::Chunks].map(|left| broken_off(left, 5000)));
    let low_min_p = [with(&[(3, 1e-20)]), with(&[(0, 0.5), (3, 1e-20)]), with(&[(2, 0.999), (3, 1e-15)])];
    cases.extend([1000, 6000].map(|vocab| {
        sample_case(&format!("low min-p, vocab {vocab}"), vocab, &low_min_p, Logits::Cliff, 95)
    }));
    let counted = [with(&[(1, 100.0)]), with(&[(1, 900.0)]), with(&[(0, 0.02), (1, 900.0), (2, 0.9)]), OFF];
    cases.push(sample_case("masked chunks", 8192, &counted, Logits::MaskedChunks, 96));
    cases.extend(top());
    cases.extend(masked());
    cases
}

/// Sampling with a mask, with and without lists of the most probable tokens.
fn masked() -> Vec<Case> {
    let rows = [
        with(&[(0, 0.0)]),
        with(&[(0, 1.2), (1, 40.0), (4, 1.3), (6, 0.4)]),
        with(&[(2, 0.9)]),
        with(&[(0, 0.8), (1, 700.0), (3, 0.01)]),
        OFF,
    ];
    let mut cases = Vec::new();
    for (vocab, n_top) in [(1, 0), (31, 3), (33, 0), (1025, 20), (5000, 0)] {
        for (mask, kind) in [
            (Mask::Half, Logits::Normal),
            (Mask::Half, Logits::SomeNan),
            (Mask::One, Logits::Ties),
            (Mask::None, Logits::Normal),
            (Mask::All, Logits::OneChunk),
        ] {
            let name = format!("mask {mask:?}, {n_top} most probable, {kind:?}, vocab {vocab}");
            cases.push(sample_case_with((Left::Nothing, n_top, Some(mask)), &name, vocab, &rows, kind, 98));
        }
    }
    cases
}

/// Tokens that a mask allows.
#[derive(Clone, Copy, Debug)]
enum Mask {
    Half,
    /// Only the last token.
    One,
    None,
    All,
}

fn mask_words(mask: Mask, n: usize, vocab: usize, seed: u64) -> Vec<u32> {
    let n_words = vocab.div_ceil(32);
    let mut rng = Rng::new(seed + 7);
    let last = |i: usize| if i % n_words == n_words - 1 { 1 << ((vocab - 1) % 32) } else { 0 };
    let word = |i: usize| match mask {
        // Bits past the vocabulary are ignored.
        Mask::Half => rng.word(),
        Mask::One => last(i),
        Mask::None => 0,
        Mask::All => u32::MAX,
    };
    (0..n * n_words).map(word).collect()
}

/// Lists of the most probable tokens: the whole vocabulary, fewer than a group of keys, and more.
fn top() -> Vec<Case> {
    let rows = [with(&[(0, 0.0)]), with(&[(0, 1.2), (1, 40.0), (4, 1.3), (6, 0.4)]), with(&[(2, 0.9)])];
    let sizes = [(1, 1, Logits::Normal), (50, 20, Logits::Ties), (1025, 70, Logits::Normal)];
    let hard = [(5000, 20, Logits::OneChunk), (5000, 20, Logits::MostlyMinusInf), (1024, 5, Logits::SomeNan)];
    let case = |(vocab, n_top, kind): (usize, usize, Logits)| {
        let name = format!("{n_top} most probable, {kind:?}, vocab {vocab}");
        sample_case_after((Left::Nothing, n_top), &name, vocab, &rows, kind, 97)
    };
    sizes.into_iter().chain(hard).map(case).collect()
}

const KINDS: [Logits; 11] = [
    Logits::Normal,
    Logits::AllEqual,
    Logits::Spike,
    Logits::Ramp,
    Logits::OneChunk,
    Logits::Far,
    Logits::Sigma(0.3),
    Logits::Sigma(1.0),
    Logits::Sigma(6.0),
    Logits::Sigma(40.0),
    Logits::TwoValues,
];

/// Vocabularies of real models, with every kind of logits that makes sampling hard.
pub fn large() -> Vec<Case> {
    let mut cases = Vec::new();
    for vocab in [63, 49_152, 128_256, 262_144] {
        for (i, kind) in KINDS.into_iter().enumerate() {
            // The reference sorts each row, so each kind of logits gets a third of the filters.
            let some: Vec<_> = hard().into_iter().skip(i % 3).step_by(3).collect();
            cases.push(sample_case(&format!("large {kind:?}, vocab {vocab}"), vocab, &some, kind, 300));
        }
    }
    for kind in [Logits::Normal, Logits::Sigma(1.0), Logits::AllEqual] {
        let some = [OFF, with(&[(0, 0.8), (2, 0.95)]), with(&[(1, 5000.0), (2, 0.9)])];
        cases.push(sample_case(&format!("large {kind:?}, vocab 2^20"), 1 << 20, &some, kind, 301));
    }
    cases.extend([Left::Rubbish, Left::Chunks].map(|left| broken_off(left, 128_256)));
    cases
}

/// Contents of the state before sampling.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Left {
    Nothing,
    Rubbish,
    /// Left by a first launch whose second launch never ran.
    Chunks,
}

/// Sampling after an aborted one: the same token, and a clean state.
fn broken_off(left: Left, vocab: usize) -> Case {
    let rows = [OFF, with(&[(0, 0.8), (2, 0.95)]), with(&[(1, 700.0), (2, 0.9)])];
    let name = format!("after {left:?}, vocab {vocab}");
    sample_case_after((left, 0), &name, vocab, &rows, Logits::Normal, 94)
}

/// Filters that cut everywhere: within the best few tokens, far beyond them, and nowhere.
fn hard() -> [[f32; 7]; 22] {
    [
        OFF,
        with(&[(0, 0.0)]),
        with(&[(0, 1e-6)]),
        with(&[(0, 1e6)]),
        with(&[(0, 1e30)]),
        with(&[(0, 0.7), (1, 1.0)]),
        with(&[(0, 1.3), (1, 40.0), (2, 0.95)]),
        with(&[(1, 64.0)]),
        with(&[(1, 65.9)]),
        with(&[(1, 700.0), (2, 0.9)]),
        with(&[(0, 0.8), (2, 0.95)]),
        with(&[(2, 0.999_999)]),
        with(&[(2, -1.0)]),
        with(&[(2, 0.5), (3, 0.2)]),
        with(&[(0, 2.0), (3, 1e-4)]),
        with(&[(0, 0.9), (2, 0.99), (4, 1.2), (5, 0.3), (6, -0.2)]),
        with(&[(0, 0.05), (2, 0.9)]),
        with(&[(0, 5.0), (2, 0.95)]),
        with(&[(0, 0.01), (2, 0.95)]),
        with(&[(0, 0.8), (1, 3000.0), (2, 0.7)]),
        with(&[(3, 0.05)]),
        with(&[(0, 12.0), (1, 500.0), (2, 0.9), (3, 1e-3)]),
    ]
}

#[derive(Clone, Copy, Debug)]
enum Logits {
    Normal,
    Ties,
    AllMinusInf,
    SomeNan,
    PlusInf,
    MostlyMinusInf,
    AllEqual,
    /// One logit that leaves nothing to the others.
    Spike,
    /// Decreasing with the id, in small steps.
    Ramp,
    /// All probable tokens in one of the kernel's chunks.
    OneChunk,
    /// So large that the kernel's bins are useless, with many ties because few fractional bits remain.
    Far,
    /// A normal distribution with this standard deviation: from nearly uniform to a wider range than the bins
    /// cover.
    Sigma(f32),
    TwoValues,
    /// A few tokens so far above all others that the bins do not reach the others.
    Cliff,
    /// Chunks in which no token is allowed, and logits around the bin that theirs would use.
    MaskedChunks,
}

fn logits(kind: Logits, n: usize, vocab: usize, seed: u64) -> Vec<f32> {
    let mut values: Vec<f32> = normals(n * vocab, seed).into_iter().map(|v| 3.0 * v).collect();
    for (i, v) in values.iter_mut().enumerate() {
        let token = i % vocab;
        match kind {
            Logits::Normal => {}
            Logits::Ties => *v = (*v as i32 as f32) * if token.is_multiple_of(2) { 1.0 } else { -0.0 },
            Logits::AllMinusInf => *v = f32::NEG_INFINITY,
            Logits::SomeNan if token % 3 == 1 => *v = f32::NAN,
            Logits::PlusInf if token == vocab / 2 => *v = f32::INFINITY,
            Logits::MostlyMinusInf if token != vocab - 1 && token != vocab / 3 => *v = f32::NEG_INFINITY,
            Logits::AllEqual => *v = 1.5,
            Logits::Spike if token == vocab * 2 / 3 => *v = 90.0,
            Logits::Ramp => *v = -1e-3 * token as f32,
            Logits::OneChunk if (token / 4).is_multiple_of(vocab.div_ceil(1024)) => *v = 20.0 + 0.1 * *v,
            Logits::Far => *v += 3e6,
            Logits::Sigma(sigma) => *v *= sigma / 3.0,
            Logits::TwoValues => *v = if *v > 1.0 { 2.25 } else { 2.21 },
            Logits::Cliff => *v = if token % 1000 == 3 { 40.0 + 0.1 * *v } else { 0.0 },
            Logits::MaskedChunks if !(token / 4).is_multiple_of(vocab.div_ceil(1024)) => {
                *v = f32::NEG_INFINITY
            }
            Logits::MaskedChunks => *v = if token % 256 < 8 { 32.1 } else { 31.9 },
            Logits::SomeNan | Logits::PlusInf | Logits::MostlyMinusInf => {}
            Logits::Spike | Logits::OneChunk => {}
        }
    }
    values
}

fn sample_case(name: &str, vocab: usize, rows: &[[f32; 7]], kind: Logits, seed: u64) -> Case {
    sample_case_after((Left::Nothing, 0), name, vocab, rows, kind, seed)
}

fn sample_case_after(
    (left, n_top): (Left, usize),
    name: &str,
    vocab: usize,
    rows: &[[f32; 7]],
    kind: Logits,
    seed: u64,
) -> Case {
    sample_case_with((left, n_top, None), name, vocab, rows, kind, seed)
}

fn sample_case_with(
    (left, n_top, mask): (Left, usize, Option<Mask>),
    name: &str,
    vocab: usize,
    rows: &[[f32; 7]],
    kind: Logits,
    seed: u64,
) -> Case {
    // For large vocabularies, more history than a block has threads.
    let (n, n_history, n_bias) = (rows.len(), if vocab < 1000 { 9 } else { 300 }, 4);
    let mut rng = Rng::new(seed + 1000);
    let logits = f32s(&logits(kind, n, vocab, seed));
    let params: Vec<f32> =
        rows.iter().flat_map(|r| r.iter().copied().chain([0.0; SAMPLE_PARAMS - 7])).collect();
    let params = f32s(&params);
    let seeds: Vec<u8> = (0..n)
        .flat_map(|i| [rng.word(), rng.word(), 40 + i as u32, 0].map(u32::to_le_bytes))
        .flatten()
        .collect();
    let id = |rng: &mut Rng| rng.below(vocab.min(20) + 3) as i32 - 2;
    let history: Vec<i32> = (0..n * n_history).map(|_| id(&mut rng)).collect();
    // One token twice, so that the order of biases matters.
    let bias_ids: Vec<i32> = (0..n).flat_map(|_| [id(&mut rng), 0, id(&mut rng), 0]).collect();
    let (history, bias_ids, bias) = (i32s(&history), i32s(&bias_ids), f32s(&normals(n * n_bias, seed + 1)));
    let n_words = vocab.div_ceil(32);
    let allowed: Option<Vec<u8>> =
        mask.map(|mask| mask_words(mask, n, vocab, seed).into_iter().flat_map(u32::to_le_bytes).collect());
    let mut inputs = vec![
        Operand(DType::F32, contiguous(&[n, vocab]), &logits),
        Operand(DType::F32, contiguous(&[n, SAMPLE_PARAMS]), &params),
        Operand(DType::U32, contiguous(&[n, 4]), &seeds),
        Operand(DType::I32, contiguous(&[n, n_history]), &history),
        Operand(DType::I32, contiguous(&[n, n_bias]), &bias_ids),
        Operand(DType::F32, contiguous(&[n, n_bias]), &bias),
    ];
    inputs.extend(allowed.as_ref().map(|mask| Operand(DType::U32, contiguous(&[n, n_words]), mask)));
    let state = sample_state_bytes(n) as usize;
    let ty = |dtype| TensorType::new(dtype, shape(&[n]));
    let mut outputs = vec![(ty(DType::I32), vec![0; 4 * n]), (ty(DType::F32), vec![0; 4 * n])];
    if n_top > 0 {
        let many = |dtype| (TensorType::new(dtype, shape(&[n, n_top])), vec![0; 4 * n * n_top]);
        outputs.extend([DType::I32, DType::F32].map(many));
    }
    reference(&Op::Sample(refrain_graph::Sample { masked: mask.is_some(), n_top }), &inputs, &mut outputs);
    let [token, logprob, ids, logprobs] =
        [0, 1, 2, 3].map(|i| outputs.get(i).map_or_else(Vec::new, |(_, bytes)| bytes.clone()));
    let mut roles = vec![
        Role::Exact(token),
        Role::Out(decode(DType::F32, &logprob), Tol::Whole(1e-6)),
        Role::In(logits),
        Role::In(params),
        Role::In(seeds),
        Role::In(history),
        Role::In(bias_ids),
        Role::In(bias),
        Role::Unordered(sample_scratch_bytes(n, vocab) as usize),
        Role::InOut {
            before: vec![if left == Left::Rubbish { 0xcd } else { 0 }; state],
            after: vec![0; state],
            dtype: DType::F32,
            tol: Tol::Bits,
        },
    ];
    if n_top > 0 {
        roles.extend([Role::Exact(ids), Role::Out(decode(DType::F32, &logprobs), Tol::Whole(1e-6))]);
    }
    let mask_at = allowed.map(|mask| {
        roles.push(Role::In(mask));
        roles.len() - 1
    });
    Case::new(format!("sample {name}"), roles, move |kernels, b, out| {
        let args = SampleArgs {
            logits: dense(b[2], &[n, vocab]),
            params: b[3],
            rng: b[4],
            history: b[5],
            bias_ids: b[6],
            bias: b[7],
            mask: mask_at.map(|at| b[at]),
            token: b[0],
            logprob: b[1],
            scratch: b[8],
            state: b[9],
            n,
            vocab,
            n_history,
            n_bias,
            top: (n_top > 0).then(|| SampleTop { ids: b[10], logprobs: b[11], n_top }),
            step: "case",
        };
        if left == Left::Chunks {
            kernels.sample(&SampleArgs { top: None, ..args }, out)?;
            out.pop();
        }
        kernels.sample(&args, out)
    })
}
