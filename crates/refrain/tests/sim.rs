//! The built-in model on the simulated CUDA device: the CPU's text, every decode step replayed.

use refrain::{
    Device, FaultScript, Generate, GraphMode, Method, Model, Prompt, SamplingParams, Session, SessionOptions,
    StepKind,
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
        let decode = session.ledger().tally(StepKind::Decode);
        assert!(decode.replayed > 0 && decode.eager == 0, "{decode}");
        let status = session.device_status().unwrap();
        assert!(status.graphs.iter().all(|g| g.bit_exact && g.method == method), "{status:?}");
        assert!(status.memory.weight_bytes > 1 << 20);
    }
}

fn session(model: &Model, ahead: usize) -> Session {
    let device = sim(GraphMode::Require, Method::Stream, "", false);
    let options =
        SessionOptions { device, context: Some(64), ahead: Some(ahead), ..SessionOptions::default() };
    Session::new(model, &options).unwrap()
}

/// A text that is broken off, by a stop text or by the caller, and the turn behind it.
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
    (texts, session.ledger().tally(StepKind::Decode).unused)
}

#[test]
fn texts_that_are_broken_off_with_steps_under_way_leave_the_next_ones_as_they_are() {
    let model = Model::builtin().unwrap();
    let (whole, _) = turns(&model, 1, "nothing like this");
    let first = &whole[0];
    let stop: String = first.chars().skip(12).take(4).collect();
    let (want, unused) = turns(&model, 1, &stop);
    assert!(want[0].len() < first.len() && unused == 0, "{want:?}");
    let (got, unused) = turns(&model, 8, &stop);
    assert_eq!(got, want);
    assert!(unused > 0);
}

#[test]
fn graphs_that_are_required_and_cannot_be_had_are_an_error_with_a_hint() {
    let model = Model::builtin().unwrap();
    let device = sim(GraphMode::Require, Method::Stream, "on every instantiate: fail 801", false);
    let options = SessionOptions { device, context: Some(64), ..SessionOptions::default() };
    let Err(error) = Session::new(&model, &options) else { panic!("a session without graphs") };
    assert!(error.hint().unwrap().contains("--graph auto"), "{error:?}");
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
