//! Measures the cost of sampling inside a recorded chain. Prints the time, and bounds it on known GPUs.
#![allow(unreachable_pub, dead_code, reason = "the test bed is shared with the other tests")]

mod bed;

use bed::{Bed, dense, f32s, i32s, normals};
use refrain_driver::{Launch, MemoryLayout, Method, RecordOptions};
use refrain_graph::SAMPLE_PARAMS;
use refrain_kernels::{SampleArgs, sample_scratch_bytes, sample_state_bytes};
use refrain_testkit::Rng;

/// Samplings per recording, and replays per measurement.
const CHAIN: usize = 32;
const REPLAYS: usize = 10;
const N_HISTORY: usize = 64;
const N_BIAS: usize = 8;

/// Temperature, top-k, top-p, min-p, repeat, frequency and presence penalty; then the maximum microseconds
/// for a vocabulary of 128,256 on an H200, for logits with [`Shape::is_bounded`]. More is a regression.
const MODES: [(&str, [f32; 7], f64); 6] = [
    ("greedy", [0.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0], 6.5),
    ("top-k 40, top-p 0.95", [0.8, 40.0, 0.95, 0.0, 1.0, 0.0, 0.0], 10.5),
    ("top-k 64, top-p 0.95", [0.8, 64.0, 0.95, 0.0, 1.0, 0.0, 0.0], 12.0),
    ("top-k 64, top-p 0.95, penalties", [0.8, 64.0, 0.95, 0.0, 1.1, 0.1, 0.1], 13.0),
    ("top-p 0.95", [0.8, 0.0, 0.95, 0.0, 1.0, 0.0, 0.0], 29.0),
    ("temperature", [0.8, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0], 21.0),
];

/// Distribution of logits.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Shape {
    /// As from a model: a few likely tokens and many unlikely ones.
    Peaked,
    /// A normal distribution with this standard deviation: thousands of likely tokens, or nearly all of them
    /// if it is narrow.
    Bell(f32),
    Equal,
}

impl Shape {
    /// Unrealistic logits are only printed.
    fn is_bounded(self) -> bool {
        match self {
            Shape::Peaked => true,
            Shape::Bell(sigma) => sigma >= 1.0,
            Shape::Equal => false,
        }
    }

    fn logits(self, vocab: usize) -> Vec<f32> {
        let sigma = match self {
            Shape::Peaked => 2.0,
            Shape::Bell(sigma) => sigma,
            Shape::Equal => 0.0,
        };
        let mut values: Vec<f32> = normals(vocab, 5).into_iter().map(|v| 1.5 + sigma * v).collect();
        let mut rng = Rng::new(6);
        for rank in 0..if self == Shape::Peaked { 2000 } else { 0 } {
            values[rng.below(vocab)] = 20.0 - 1.5 * (1.0 + rank as f32).ln();
        }
        values
    }
}

/// Microseconds per sampling in the middle of a chain, for each mode.
fn measure(bed: &mut Bed, vocab: usize, shape: Shape) -> Vec<f64> {
    let mut layout = MemoryLayout::new("speed");
    let scratch = sample_scratch_bytes(1, vocab);
    let regions = [
        ("logits", 4 * vocab as u64),
        ("params", 4 * SAMPLE_PARAMS as u64),
        ("rng", 16),
        ("history", 4 * N_HISTORY as u64),
        ("bias_ids", 4 * N_BIAS as u64),
        ("bias", 4 * N_BIAS as u64),
        ("token", 4),
        ("logprob", 4),
        ("scratch", scratch),
        ("state", sample_state_bytes(1)),
    ]
    .map(|(name, bytes)| layout.device(name, bytes));
    let memory = bed.plan(&layout);
    let [logits_at, params, rng, history, bias_ids, bias, token, logprob, scratch, state] =
        regions.map(|r| memory.buf(r));
    let args = SampleArgs {
        logits: dense(logits_at, &[1, vocab]),
        params,
        rng,
        history,
        bias_ids,
        bias,
        mask: None,
        token,
        logprob,
        scratch,
        state,
        n: 1,
        vocab,
        n_history: N_HISTORY,
        n_bias: N_BIAS,
        top: None,
        step: "sample",
    };
    let mut launches: Vec<Launch> = Vec::new();
    (0..CHAIN).for_each(|_| bed.kernels.sample(&args, &mut launches).unwrap());
    let mut lease = memory.lease().unwrap();
    let mut set = |buf, bytes: &[u8]| bed.stream.upload(&mut lease, buf, bytes).unwrap();
    set(state, &vec![0; state.len() as usize]);
    set(logits_at, &f32s(&shape.logits(vocab)));
    set(rng, &i32s(&[1, 2, 3, 0]));
    set(history, &i32s(&(0..N_HISTORY as i32).map(|i| 7 * i % 50).collect::<Vec<_>>()));
    set(bias_ids, &i32s(&[-1; N_BIAS]));
    set(bias, &f32s(&[0.0; N_BIAS]));
    let options = RecordOptions::named("speed");
    let graph = bed
        .stream
        .record(&memory, Method::Stream, &options, |q| launches.iter().try_for_each(|l| q.launch(l)))
        .unwrap();
    let (start, end) = (bed.ctx.event().unwrap(), bed.ctx.event().unwrap());
    let mut times = Vec::new();
    for (_, mode, _) in MODES {
        let mode: Vec<f32> = mode.iter().copied().chain([0.0; SAMPLE_PARAMS - 7]).collect();
        bed.stream.upload(&mut lease, params, &f32s(&mode)).unwrap();
        let mut best = f64::INFINITY;
        for _ in 0..5 {
            bed.stream.record_event(&start).unwrap();
            for _ in 0..REPLAYS {
                graph.replay(&mut lease, &mut bed.stream).unwrap();
            }
            bed.stream.record_event(&end).unwrap();
            bed.stream.synchronize().unwrap();
            best = best.min(f64::from(end.ms_since(&start).unwrap()) * 1e3 / (REPLAYS * CHAIN) as f64);
        }
        times.push(best);
    }
    times
}

#[test]
#[cfg_attr(not(feature = "gpu-tests"), ignore = "needs a CUDA device: cargo xtask gpu-bundle")]
fn sampling_costs_microseconds_in_a_recorded_chain() {
    let mut bed = Bed::gpu();
    let mut slow = Vec::new();
    for vocab in [128_256, 262_144] {
        for shape in [
            Shape::Peaked,
            Shape::Bell(3.0),
            Shape::Bell(2.0),
            Shape::Bell(1.0),
            Shape::Bell(0.1),
            Shape::Equal,
        ] {
            for ((name, _, limit), us) in MODES.into_iter().zip(measure(&mut bed, vocab, shape)) {
                let shape_name = format!("{shape:?}");
                println!("sample {vocab} {shape_name:9} {name:32} {us:7.2} us");
                if vocab == 128_256 && shape.is_bounded() && us > limit {
                    slow.push(format!("{name} over {shape:?} logits: {us:.1} us, at most {limit}"));
                }
            }
        }
    }
    // The bounds hold for one GPU model; others may be slower.
    let name = bed.device.info().name.clone();
    assert!(slow.is_empty() || !name.contains("H200"), "{}", slow.join("; "));
}

#[test]
fn the_timed_chain_runs() {
    let times = measure(&mut Bed::sim(), 1500, Shape::Peaked);
    assert_eq!(times.len(), MODES.len());
}
