//! The built-in model on the simulated CUDA device: the same text as on the CPU, with every decode step replayed.

use refrain::{
    DType, Device, FaultScript, Generate, GraphMode, Method, Model, Prompt, SamplingParams, Session,
    SessionOptions, StepKind,
};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

const PROMPT: &str = "Once upon a time";
const N_TOKENS: usize = 12;

fn sim(graph: GraphMode, method: Method, faults: &str, profile: bool) -> Device {
    Device::Sim { seed: 1, faults: FaultScript::parse(faults).unwrap(), graph, method, profile }
}

fn text(model: &Model, device: Device) -> (String, Session) {
    let options = SessionOptions { device, context: Some(64), ..SessionOptions::default() };
    let mut session = Session::new(model, &options).unwrap();
    let generate = Generate {
        max_tokens: Some(N_TOKENS),
        sampling: Some(SamplingParams::greedy()),
        ..Generate::default()
    };
    let pieces = session.generate(Prompt::Text(PROMPT), &generate).unwrap();
    let text = pieces.map(|p| p.unwrap().text).collect();
    (text, session)
}

#[test]
fn replayed_steps_give_the_text_of_the_cpu() {
    let model = Model::builtin().unwrap();
    let (want, _) = text(&model, Device::Cpu { threads: Some(2) });
    for method in [Method::Stream, Method::Nodes] {
        let (got, session) = text(&model, sim(GraphMode::Require, method, "", false));
        assert_eq!(got, want);
        let ledger = session.ledger();
        let decode = ledger.tally(StepKind::Decode);
        assert!(decode.replayed > 0 && decode.eager == 0, "{decode}");
        let status = session.device_status().unwrap();
        assert!(status.graphs.iter().all(|g| g.bit_exact && g.method == method), "{status:?}");
        assert!(status.memory.weight_bytes > 1 << 20);
    }
}

/// A greedy text with a cache of this type, and the size of the cache: bytes per position in the plan and, on a CUDA
/// device, bytes of all positions.
fn with_cache(model: &Model, device: Device, kv_dtype: DType) -> (String, usize, Option<u64>) {
    let options = SessionOptions { device, context: Some(32), kv_dtype, ..SessionOptions::default() };
    let mut session = Session::new(model, &options).unwrap();
    let generate = Generate {
        max_tokens: Some(N_TOKENS),
        sampling: Some(SamplingParams::greedy()),
        ..Generate::default()
    };
    let text = session.generate(Prompt::Text(PROMPT), &generate).unwrap().map(|p| p.unwrap().text).collect();
    let per_position = session.plan(1).unwrap().traffic().kv_bytes(1);
    (text, per_position, session.device_status().map(|s| s.memory.kv_bytes))
}

#[test]
fn caches_of_every_type_give_the_same_text_on_cpu_and_device_and_take_their_bytes() {
    let model = Model::builtin().unwrap();
    let (_, exact, _) = with_cache(&model, Device::Cpu { threads: Some(2) }, DType::F32);
    let on_device = || sim(GraphMode::Require, Method::Stream, "", false);
    let (_, _, all) = with_cache(&model, on_device(), DType::F32);
    for (dtype, part) in [(DType::F16, 2), (DType::BF16, 2), (DType::F32, 1)] {
        let cpu = with_cache(&model, Device::Cpu { threads: Some(2) }, dtype);
        let device = with_cache(&model, on_device(), dtype);
        assert_eq!(cpu.0, device.0, "{dtype}");
        assert!(cpu.0.split_whitespace().count() > 5, "{dtype}: {}", cpu.0);
        assert_eq!([cpu.1, device.1], [exact / part; 2], "{dtype}");
        assert_eq!((cpu.2, device.2), (None, all.map(|bytes| bytes / part as u64)), "{dtype}");
    }
}

#[test]
fn a_cache_of_quantised_elements_is_refused_by_name() {
    let model = Model::builtin().unwrap();
    for device in [Device::Cpu { threads: Some(2) }, sim(GraphMode::Auto, Method::Stream, "", false)] {
        let options =
            SessionOptions { device, context: Some(64), kv_dtype: DType::Q8_0, ..SessionOptions::default() };
        let Err(error) = Session::new(&model, &options) else { panic!("a session with a quantised cache") };
        assert_eq!(error.to_string(), "a KV cache cannot have elements of Q8_0");
        assert!(error.hint().unwrap().contains("BF16"), "{error:?}");
    }
}

fn session(model: &Model, ahead: usize) -> Session {
    let device = sim(GraphMode::Require, Method::Stream, "", false);
    let options =
        SessionOptions { device, context: Some(64), ahead: Some(ahead), ..SessionOptions::default() };
    Session::new(model, &options).unwrap()
}

/// A text that is interrupted, by a stop text or by the caller, and the turn after it.
fn turns(model: &Model, ahead: usize, stop: &str) -> (Vec<String>, u64) {
    let mut session = session(model, ahead);
    let cancel = Arc::new(AtomicBool::new(false));
    let sampling =
        SamplingParams { repeat_penalty: 1.1, penalty_window: 8, seed: 4, ..SamplingParams::default() };
    let generate = Generate {
        max_tokens: Some(30),
        sampling: Some(sampling),
        stop: vec![stop.to_owned()],
        cancel: Some(cancel.clone()),
        ..Generate::default()
    };
    let mut texts = Vec::new();
    for (prompt, n_pieces) in [(PROMPT, usize::MAX), ("The cat", 5), ("The cat and the dog", 4), (PROMPT, 6)]
    {
        let mut generation = session.generate(Prompt::Text(prompt), &generate).unwrap();
        let mut text = String::new();
        for piece in generation.by_ref().take(n_pieces) {
            text += &piece.unwrap().text;
        }
        // As Ctrl-C does.
        cancel.store(n_pieces == 5, Ordering::Relaxed);
        if n_pieces == 5 {
            text += &generation.map(|piece| piece.unwrap().text).collect::<String>();
        }
        cancel.store(false, Ordering::Relaxed);
        texts.push(text);
    }
    (texts, session.ledger().tally(StepKind::Decode).discarded)
}

#[test]
fn interrupted_texts_with_steps_in_flight_do_not_affect_the_next_ones() {
    let model = Model::builtin().unwrap();
    let (whole, _) = turns(&model, 1, "nothing like this");
    let first = &whole[0];
    let stop: String = first.chars().skip(12).take(4).collect();
    let (want, discarded) = turns(&model, 1, &stop);
    assert!(want[0].len() < first.len() && discarded == 0, "{want:?}");
    let (got, discarded) = turns(&model, 8, &stop);
    assert_eq!(got, want);
    assert!(discarded > 0);
}

#[test]
fn required_graphs_that_cannot_be_recorded_are_an_error_with_a_hint() {
    let model = Model::builtin().unwrap();
    let device = sim(GraphMode::Require, Method::Stream, "on every instantiate: fail 801", false);
    let options = SessionOptions { device, context: Some(64), ..SessionOptions::default() };
    let Err(error) = Session::new(&model, &options) else { panic!("a session without graphs") };
    assert!(error.hint().unwrap().contains("graph mode auto"), "{error:?}");
}

// The simulated device multiplies decoded weights with activations as they are; the CPU rounds activations to 8 bits.
#[test]
fn rounding_activations_moves_perplexity_by_less_than_half_a_percent() {
    let model = Model::builtin().unwrap();
    let text = "Once upon a time, there was a little girl named Lily. She loved to play in the garden with her dog. \
                One day, she found a small bird that could not fly. She took the bird home and gave it some water. \
                Her mother was happy that she was so kind. The next day the bird could fly again, and it sang a \
                song for Lily. She smiled and waved as it flew away over the trees. From that day on, the bird came \
                back every morning to sing for her. Lily told all her friends about it, and they came to listen.";
    let perplexity = |device: Device| {
        let options = SessionOptions { device, context: Some(64), ..SessionOptions::default() };
        let mut session = Session::new(&model, &options).unwrap();
        session.perplexity(text, 64, Some(2), |_, _| {}).unwrap().perplexity
    };
    let cpu = perplexity(Device::Cpu { threads: Some(2) });
    let exact = perplexity(sim(GraphMode::Auto, Method::Stream, "", false));
    assert!((cpu / exact - 1.0).abs() < 5e-3, "{cpu} on the CPU, {exact} exactly");
}
