//! The built-in model on the simulated CUDA device: the CPU's text, every decode step replayed.

use refrain::{
    Device, FaultScript, Generate, GraphMode, Method, Model, Prompt, SamplingParams, Session, SessionOptions,
    StepKind,
};

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
