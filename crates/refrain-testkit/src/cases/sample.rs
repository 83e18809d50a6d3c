//! Cases of sampling.

use crate::case::{Arg, Case};
use crate::compare::Tol;
use crate::fill::{Fill, Rng};
use refrain_graph::{Op, SAMPLE_PARAMS, Sample, SampleParam};
use refrain_tensor::DType;

const OFF: [f32; SAMPLE_PARAMS] = [1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0];

fn params(set: &[(SampleParam, f32)]) -> [f32; SAMPLE_PARAMS] {
    let mut params = OFF;
    set.iter().for_each(|&(param, value)| params[param as usize] = value);
    params
}

pub(super) fn cases() -> Vec<Case> {
    use SampleParam as P;
    let greedy = params(&[(P::Temperature, 0.0)]);
    let all = [
        (P::Temperature, 0.7),
        (P::TopK, 40.0),
        (P::TopP, 0.9),
        (P::MinP, 0.05),
        (P::RepeatPenalty, 1.2),
        (P::FrequencyPenalty, 0.3),
        (P::PresencePenalty, 0.2),
    ];
    let mut cases = vec![
        case("greedy", 1000, &[greedy], &spread),
        case("one token", 1, &[OFF], &spread),
        case("plain", 1000, &[OFF; 8], &spread),
        case("hot", 257, &[params(&[(P::Temperature, 10.0)]); 8], &spread),
        case("cold", 257, &[params(&[(P::Temperature, 0.01)]); 8], &spread),
        case("top-k", 1000, &[params(&[(P::TopK, 5.0)]); 8], &spread),
        case("top-k of one", 1000, &[params(&[(P::TopK, 1.0)]); 2], &spread),
        case("top-k beyond the vocabulary", 7, &[params(&[(P::TopK, 100.0)]); 4], &spread),
        case("top-p", 1000, &[params(&[(P::TopP, 0.8)]); 8], &spread),
        case("top-p of nothing", 1000, &[params(&[(P::TopP, 0.0)]); 2], &spread),
        case("top-k and top-p", 1000, &[params(&[(P::TopK, 30.0), (P::TopP, 0.6)]); 8], &spread),
        case("min-p", 1000, &[params(&[(P::MinP, 0.1)]); 8], &spread),
        case("penalties", 31, &[params(&[(P::RepeatPenalty, 1.7), (P::PresencePenalty, 1.0)]); 8], &spread),
        case("everything", 4099, &[params(&all); 8], &spread),
        case("rows that differ", 515, &[OFF, greedy, params(&all), params(&[(P::TopK, 3.0)])], &spread),
        case("ties", 64, &[greedy, params(&[(P::TopK, 9.0)]), params(&[(P::TopP, 0.5)])], &|i, _| {
            (i % 4) as f32
        }),
        case("all equal", 100, &[OFF, greedy, params(&[(P::TopP, 0.3)])], &|_, _| 0.0),
        case("large logits", 100, &[OFF, greedy], &|_, rng| 5e4 * rng.normal()),
        case("mostly masked", 300, &[OFF, greedy, params(&all)], &|i, rng| match i % 37 {
            5 => rng.normal(),
            _ => f32::NEG_INFINITY,
        }),
        case("some not a number", 300, &[OFF, greedy], &|i, rng| match i % 11 {
            0 => f32::NAN,
            _ => rng.normal(),
        }),
        case("all masked", 9, &[OFF, greedy], &|_, _| f32::NEG_INFINITY),
        case("nothing is a number", 9, &[OFF, greedy], &|_, _| f32::NAN),
    ];
    cases.push(build("no history and no bias", 50, &[OFF, greedy], &spread, (0, 0), Sample::default()));
    let hot = params(&[(P::Temperature, 1.5), (P::TopP, 0.9)]);
    for (masked, n_top) in [(true, 0), (false, 1), (false, 7), (true, 5)] {
        let name = format!("mask {masked}, {n_top} most probable");
        cases.push(build(&name, 131, &[OFF, greedy, hot], &spread, (6, 3), Sample { masked, n_top }));
    }
    cases
}

/// Logits like a model's: a few large ones.
fn spread(_: usize, rng: &mut Rng) -> f32 {
    3.0 * rng.normal()
}

type Logit = dyn Fn(usize, &mut Rng) -> f32;

fn case(name: &str, vocab: usize, rows: &[[f32; SAMPLE_PARAMS]], logit: &Logit) -> Case {
    build(name, vocab, rows, logit, (6, 3), Sample::default())
}

fn build(
    name: &str,
    vocab: usize,
    rows: &[[f32; SAMPLE_PARAMS]],
    logit: &Logit,
    (width, n_bias): (usize, usize),
    op: Sample,
) -> Case {
    let n = rows.len();
    let mut rng = Rng::new(vocab as u64);
    let logits = (0..n * vocab).map(|i| logit(i % vocab, &mut rng)).collect();
    // Ids repeat, and some slots are empty or past the vocabulary.
    let mut ids = |count: usize| -> Vec<i32> {
        let id = |i: usize, rng: &mut Rng| match i % 5 {
            3 => -1,
            4 => vocab as i32 + 3,
            _ => rng.below(vocab.min(12)) as i32,
        };
        (0..count).map(|i| id(i, &mut rng)).collect()
    };
    let (history, bias_ids) = (ids(n * width), ids(n * n_bias));
    let words = (0..n as i32).flat_map(|row| [77 + row, -5, 1000 * row + 3, 0]).collect();
    let mut args = vec![
        Arg::float(DType::F32, [n, vocab]).fill(Fill::Floats(logits)),
        Arg::float(DType::F32, [n, SAMPLE_PARAMS]).fill(Fill::Floats(rows.concat())),
        Arg::ints([n, 4], words).dtype(DType::U32),
        Arg::ints([n, width], history),
        Arg::ints([n, n_bias], bias_ids),
        Arg::float(DType::F32, [n, n_bias]).fill(Fill::Uniform(-2.0, 2.0)),
    ];
    if op.masked {
        let n_words = vocab.div_ceil(32);
        let mask = (0..n * n_words).map(|i| (0x5a5a_1234_u32.rotate_left(i as u32) | 1) as i32).collect();
        args.push(Arg::ints([n, n_words], mask).dtype(DType::U32));
    }
    Case::one_node(format!("{name}, {n} rows of {vocab}"), Op::Sample(op), Tol::Whole(1e-5), args)
}
