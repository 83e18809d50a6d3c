//! Several sessions of one model on one engine: each gives the same text as alone.

use refrain::{DType, Device, FaultScript, Finish, Generate, GraphMode, Method, Model, Prompt};
use refrain::{SamplingParams, Session, SessionOptions, StepKind};

const PROMPTS: [&str; 3] = ["Once upon a time", "The cat sat on the mat", "One day, a little boat"];

fn cpu(context: usize) -> SessionOptions {
    let device = Device::Cpu { threads: Some(2) };
    SessionOptions { device, context: Some(context), ..SessionOptions::default() }
}

fn sampled(seed: u64) -> Generate {
    let sampling = SamplingParams { repeat_penalty: 1.1, seed, ..SamplingParams::default() };
    Generate { sampling: Some(sampling), max_tokens: Some(40), ..Generate::default() }
}

fn text(session: &mut Session, prompt: &str, seed: u64) -> String {
    session.generate(Prompt::Text(prompt), &sampled(seed)).unwrap().map(|p| p.unwrap().text).collect()
}

/// Two turns of a conversation on a session that is alone on the device.
fn alone(idx: usize) -> [String; 2] {
    let mut session = Session::new(&Model::builtin().unwrap(), &cpu(128)).unwrap();
    turns(&mut session, idx)
}

fn turns(session: &mut Session, idx: usize) -> [String; 2] {
    let first = text(session, PROMPTS[idx], idx as u64);
    let second = text(session, &format!("{}{first} Then", PROMPTS[idx]), 7);
    [first, second]
}

#[test]
fn sessions_can_move_between_threads() {
    fn check<T: Send>() {}
    check::<Session>();
}

#[test]
fn interleaved_sessions_give_the_same_texts_as_alone() {
    let model = Model::builtin().unwrap();
    // Different lengths: the cache and its tables grow during the first conversation.
    let mut sessions = [128, 200, 110].map(|context| Session::new(&model, &cpu(context)).unwrap());
    let options = [0, 1, 2].map(sampled);
    let mut texts = [const { String::new() }; 3];
    {
        let mut running: Vec<_> = sessions
            .iter_mut()
            .zip(&options)
            .zip(PROMPTS)
            .map(|((session, options), prompt)| session.generate(Prompt::Text(prompt), options).unwrap())
            .collect();
        let mut is_going = true;
        while is_going {
            is_going = false;
            for (generation, text) in running.iter_mut().zip(&mut texts) {
                if let Some(piece) = generation.next() {
                    *text += &piece.unwrap().text;
                    is_going = true;
                }
            }
        }
        assert!(running.iter().all(|generation| generation.summary().finish == Some(Finish::MaxTokens)));
    }
    for (idx, (session, first)) in sessions.iter_mut().zip(texts).enumerate() {
        let want = alone(idx);
        let prompt = format!("{}{first} Then", PROMPTS[idx]);
        assert_eq!([first, text(session, &prompt, 7)], want);
        // Each has its own ledger: of each text one step for the prompt, and 39 after the first token. Those that the
        // prompt of another session took part in are mixed.
        let ledger = session.ledger();
        let n_steps = StepKind::ALL.map(|kind| ledger.tally(kind).steps());
        assert_eq!(n_steps.iter().sum::<u64>(), 2 * 40);
        assert!(ledger.tally(StepKind::Decode).steps() >= 70);
    }
}

#[test]
fn a_cache_that_grows_during_a_text_does_not_change_it() {
    let model = Model::builtin().unwrap();
    let mut session = Session::new(&model, &cpu(128)).unwrap();
    let options = sampled(0);
    let mut generation = session.generate(Prompt::Text(PROMPTS[0]), &options).unwrap();
    let mut got: String = generation.by_ref().take(10).map(|p| p.unwrap().text).collect();
    let mut other = Session::new(&model, &cpu(300)).unwrap();
    let long = "The dog ran. ".repeat(60);
    assert!(!text(&mut other, &long, 3).is_empty());
    got += &generation.map(|p| p.unwrap().text).collect::<String>();
    assert_eq!(got, alone(0)[0]);
}

#[test]
fn sessions_on_many_threads_give_the_same_texts_as_alone() {
    let model = Model::builtin().unwrap();
    let want = [0, 1, 2].map(alone);
    std::thread::scope(|scope| {
        for idx in 0..6 {
            let (model, want) = (&model, &want);
            scope.spawn(move || {
                for _ in 0..3 {
                    let mut session = Session::new(model, &cpu(100 + 20 * idx)).unwrap();
                    assert_eq!(turns(&mut session, idx % 3), want[idx % 3]);
                }
            });
        }
    });
}

#[test]
fn sessions_with_other_caches_and_thread_counts_share_weights() {
    let model = Model::builtin().unwrap();
    let want = alone(1);
    let mut sessions: Vec<_> = [(1, DType::F16), (2, DType::F16), (2, DType::F32)]
        .into_iter()
        .map(|(threads, kv_dtype)| {
            let device = Device::Cpu { threads: Some(threads) };
            Session::new(&model, &SessionOptions { device, kv_dtype, ..cpu(128) }).unwrap()
        })
        .collect();
    let exact = text(&mut sessions[2], PROMPTS[1], 1);
    assert!(exact.split_whitespace().count() > 10, "{exact}");
    for session in &mut sessions[..2] {
        assert_eq!(turns(session, 1), want);
    }
}

#[test]
fn another_session_gets_its_own_engine_if_the_cache_cannot_grow() {
    let model = Model::builtin().unwrap();
    let device = Device::Sim {
        seed: 1,
        faults: FaultScript::parse("").unwrap(),
        graph: GraphMode::Require,
        method: Method::Stream,
        profile: false,
    };
    let options = SessionOptions { device, context: Some(64), ..SessionOptions::default() };
    let greedy =
        Generate { sampling: Some(SamplingParams::greedy()), max_tokens: Some(8), ..Generate::default() };
    let mut one = Session::new(&model, &options).unwrap();
    let mut two = Session::new(&model, &options).unwrap();
    let [first, second] = [&mut one, &mut two].map(|session| {
        let pieces = session.generate(Prompt::Text(PROMPTS[0]), &greedy).unwrap();
        pieces.map(|p| p.unwrap().text).collect::<String>()
    });
    assert_eq!(first, second);
    assert_eq!(one.ledger().tally(StepKind::Decode).replayed, 7);
    assert_eq!(two.ledger().tally(StepKind::Decode).replayed, 7);
    let [one, two] = [one, two].map(|session| session.device_status().unwrap().memory);
    assert_eq!((one.weight_bytes, one.kv_bytes), (two.weight_bytes, two.kv_bytes));
    assert!(one.kv_bytes > 0);
}

#[test]
fn two_models_on_one_device_share_its_owner() {
    let device = Device::Sim {
        seed: 77,
        faults: FaultScript::default(),
        graph: GraphMode::Require,
        method: Method::Stream,
        profile: false,
    };
    let options = SessionOptions { device, context: Some(64), ..SessionOptions::default() };
    let generate =
        Generate { max_tokens: Some(8), sampling: Some(SamplingParams::greedy()), ..Generate::default() };
    let say = |session: &mut Session| -> String {
        let pieces = session.generate(Prompt::Text(PROMPTS[0]), &generate).unwrap();
        pieces.map(|p| p.unwrap().text).collect()
    };
    // Models that were opened separately share no engine.
    let models = [(); 2].map(|()| Model::builtin().unwrap());
    let mut sessions = models.each_ref().map(|model| Session::new(model, &options).unwrap());
    let texts = sessions.each_mut().map(say);
    assert_eq!(texts[0], texts[1]);
    let status = sessions.each_ref().map(|session| session.device_status().unwrap());
    let held: Vec<u64> = status[1].others.iter().map(|held| held.bytes).collect();
    assert_eq!(held, [status[0].memory.total()]);
    assert_eq!(status[1].others[0].model, models[0].name());
}
