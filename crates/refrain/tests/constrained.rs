//! Text that follows a grammar, on the CPU and on the simulated device.

use refrain::{
    Builtin, Constraint, Device, Error, FaultScript, Finish, FinishReason, Generate, GrammarError,
    GrammarSource, GraphMode, Method, Model, Prompt, Request, SamplingParams, Service, ServiceOptions,
    Session, SessionOptions, StepKind, TokenEvent,
};
use serde_json::Value;

const PERSON: &str = r##"{
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
        "friend": {"anyOf": [{"type": "null"}, {"type": "object", "properties": {"name": {"type": "string", "maxLength": 10}}, "required": ["name"], "additionalProperties": false}]}
    },
    "required": ["name", "age", "friend"],
    "additionalProperties": false
}"##;
const SUM: &str =
    "start: term (\"+\" term){0,3}\nterm: NUMBER | \"(\" term \")\"\nNUMBER: /[1-9][0-9]{0,3}/\n";
const DATE: &str = r"(19|20)[0-9]{2}-[01][0-9]-[0-3][0-9]( [ap]m)?";

fn cpu() -> Device {
    Device::Cpu { threads: Some(1) }
}

fn sim() -> Device {
    let (graph, method) = (GraphMode::Require, Method::Stream);
    Device::Sim { seed: 1, faults: FaultScript::default(), graph, method, profile: false }
}

fn options(device: Device) -> SessionOptions {
    SessionOptions { device, context: Some(256), ..SessionOptions::default() }
}

/// Hot enough that every allowed token has a chance.
fn hot(seed: u64) -> SamplingParams {
    SamplingParams { temperature: 4.0, top_k: 0, top_p: 1.0, min_p: 0.0, seed, ..SamplingParams::default() }
}

fn constrained(
    model: &Model,
    source: GrammarSource,
    sampling: SamplingParams,
    max_tokens: usize,
) -> Generate {
    let grammar = model.grammar(&source).unwrap();
    Generate {
        sampling: Some(sampling),
        max_tokens: Some(max_tokens),
        grammar: Some(grammar),
        ..Generate::default()
    }
}

fn is_person(text: &str) -> bool {
    let Ok(value) = serde_json::from_str::<Value>(text) else { return false };
    let known = ["name", "age", "tags", "friend"];
    let keys = value.as_object().is_some_and(|keys| keys.keys().all(|key| known.contains(&key.as_str())));
    keys && value["name"].is_string()
        && value["age"].as_u64().is_some_and(|age| age <= 120)
        && (value["friend"].is_null() || value["friend"]["name"].is_string())
        && value.as_object().unwrap().contains_key("friend")
}

fn is_sum(text: &str) -> bool {
    text.split('+').all(|term| {
        let inner = term.trim_matches(['(', ')']);
        !inner.is_empty() && inner.bytes().all(|byte| byte.is_ascii_digit()) && !inner.starts_with('0')
    }) && text.matches('(').count() == text.matches(')').count()
}

fn is_date(text: &str) -> bool {
    let (date, suffix) = text.split_at(text.len().min(10));
    let parts: Vec<usize> = date.split('-').map(str::len).collect();
    parts == [4, 2, 2] && ["", " am", " pm"].contains(&suffix)
}

fn cases() -> [(GrammarSource, fn(&str) -> bool); 4] {
    [
        (GrammarSource::JsonSchema(PERSON.into()), is_person),
        (GrammarSource::JsonObject, |text| match serde_json::from_str::<Value>(text) {
            Ok(value) => value.is_object(),
            // JSON itself does not limit numbers.
            Err(error) => error.to_string().starts_with("number out of range"),
        }),
        (GrammarSource::Lark(SUM.into()), is_sum),
        (GrammarSource::Regex(DATE.into()), is_date),
    ]
}

fn complete(finish: Option<Finish>) -> bool {
    matches!(finish, Some(Finish::Complete | Finish::EndOfTurn))
}

/// Texts of every grammar, at every kind of sampling and near the token limit.
fn follows_every_grammar(device: Device, seeds: std::ops::Range<u64>) {
    let model = Model::builtin().unwrap();
    let mut session = Session::new(&model, &options(device)).unwrap();
    let mut n_all = 0;
    for (idx, (source, is_right)) in cases().into_iter().enumerate() {
        let (mut n_complete, mut n_cut) = (0, 0);
        for seed in seeds.clone() {
            let sampling = match seed % 4 {
                0 => hot(seed),
                1 => SamplingParams::greedy(),
                2 => {
                    SamplingParams { repeat_penalty: 1.3, presence_penalty: 0.5, top_k: 3, seed, ..hot(seed) }
                }
                _ => SamplingParams {
                    top_p: 0.5,
                    logit_bias: vec![(5, f32::NEG_INFINITY), (9, 8.0)],
                    ..hot(seed)
                },
            };
            let max_tokens = [100, 5, 20, 8][seed as usize / 4 % 4];
            let generate = constrained(&model, source.clone(), sampling, max_tokens);
            session.reset();
            let mut pieces = session.generate(Prompt::Text("Once upon a time"), &generate).unwrap();
            let mut text = String::new();
            for piece in pieces.by_ref() {
                text += &piece.unwrap().text;
            }
            let summary = pieces.summary();
            assert!(summary.n_generated <= max_tokens);
            match summary.finish {
                finish if complete(finish) => {
                    n_complete += 1;
                    assert!(is_right(&text), "case {idx}, seed {seed}: {text:?}");
                }
                Some(Finish::MaxTokens) => n_cut += 1,
                other => panic!("{other:?}: {text:?}"),
            }
        }
        assert_eq!(n_complete + n_cut, seeds.clone().count());
        n_all += n_complete;
    }
    assert!(n_all >= seeds.count(), "only {n_all} texts are complete");
}

#[test]
fn every_text_that_ends_follows_its_grammar() {
    follows_every_grammar(cpu(), 0..32);
}

#[test]
fn every_text_that_ends_follows_its_grammar_on_the_simulated_device() {
    follows_every_grammar(sim(), 8..10);
}

#[test]
fn the_simulated_device_writes_the_constrained_text_of_the_cpu_and_replays_its_steps() {
    let model = Model::builtin().unwrap();
    let text = |device: Device| {
        let mut session = Session::new(&model, &options(device)).unwrap();
        let greedy = SamplingParams::greedy();
        let generate = constrained(&model, GrammarSource::JsonSchema(PERSON.into()), greedy, 40);
        let pieces = session.generate(Prompt::Text("Once upon a time"), &generate).unwrap();
        let text: String = pieces.map(|piece| piece.unwrap().text).collect();
        (text, session.ledger())
    };
    let (want, _) = text(cpu());
    let (got, ledger) = text(sim());
    assert_eq!(got, want);
    let decode = ledger.tally(StepKind::Decode);
    assert!(decode.replayed > 0 && decode.eager == 0, "{decode}");
}

/// Tokens of a request and why it ended.
fn collect(service: &Service, request: Request) -> Result<(Vec<u32>, FinishReason), Error> {
    let mut tokens = Vec::new();
    for event in service.submit_tokens(request)? {
        match event? {
            TokenEvent::Prompt { .. } => {}
            TokenEvent::Token { token, .. } => tokens.push(token),
            TokenEvent::End(finish) => return Ok((tokens, finish)),
        }
    }
    panic!("a stream without an end");
}

fn request(model: &Model, prompt: &str, source: &GrammarSource, sampling: SamplingParams) -> Request {
    let mut request = Request::once(model.text_tokens(prompt).unwrap());
    request.constraint = Some(Constraint::new(model.grammar(source).unwrap()));
    request.end = model.tokenizer().end_of_generation().to_vec();
    (request.sampling, request.max_tokens) = (sampling, 60);
    request
}

/// Requests with and without grammars share steps, are preempted, and write what they write alone.
fn neighbours_do_not_matter(device: Device, n: u64, kv_tokens: usize) {
    let model = Model::builtin().unwrap();
    let service = |max_seqs, kv_tokens| {
        let session = SessionOptions { context: Some(128), reproducible: true, ..options(device.clone()) };
        Service::new(&model, &ServiceOptions { session, max_seqs, kv_tokens, ..ServiceOptions::default() })
            .unwrap()
    };
    let make = |i: u64| {
        let source = &cases()[i as usize % 4].0;
        let mut request = request(&model, "Once upon a time there was", source, hot(i));
        if i % 3 == 0 {
            (request.constraint, request.max_tokens) = (None, 20);
        }
        request
    };
    let together = service(8, Some(kv_tokens));
    let streams: Vec<_> = (0..n).map(|i| together.submit_tokens(make(i)).unwrap()).collect();
    let alone = service(1, None);
    for (i, stream) in (0..n).zip(streams) {
        let mut tokens = Vec::new();
        for event in stream {
            if let TokenEvent::Token { token, logprob, .. } = event.unwrap() {
                assert!(logprob <= 0.0);
                tokens.push(token);
            }
        }
        assert_eq!(tokens, collect(&alone, make(i)).unwrap().0, "request {i}");
    }
    let load = together.load().unwrap();
    assert_eq!((load.n_running, load.n_waiting, load.blocks.used), (0, 0, 0));
    assert!(kv_tokens > 300 || load.n_preempted > 0, "no request was preempted");
}

#[test]
fn constrained_requests_share_steps_with_others_and_survive_preemption() {
    neighbours_do_not_matter(cpu(), 16, 160);
}

#[test]
fn constrained_requests_share_replayed_steps_on_the_simulated_device() {
    neighbours_do_not_matter(sim(), 4, 1024);
}

#[test]
fn an_interrupted_text_continues_from_its_given_tokens() {
    let model = Model::builtin().unwrap();
    let session = options(cpu());
    let service = Service::new(&model, &ServiceOptions { session, ..ServiceOptions::default() }).unwrap();
    let source = GrammarSource::JsonSchema(PERSON.into());
    let whole = collect(&service, request(&model, "Tom", &source, SamplingParams::greedy())).unwrap();
    for n_given in 1..=whole.0.len() {
        let mut rest = request(&model, "Tom", &source, SamplingParams::greedy());
        rest.prompt.extend(&whole.0[..n_given]);
        rest.max_tokens -= n_given;
        rest.constraint.as_mut().unwrap().n_given = n_given;
        if whole.1 == FinishReason::EndToken && n_given == whole.0.len() {
            break;
        }
        let (tokens, finish) = collect(&service, rest).unwrap();
        assert_eq!([&whole.0[..n_given], &tokens[..]].concat(), whole.0, "{n_given} given");
        assert_eq!(finish, whole.1);
    }
    let mut wrong = request(&model, "Tom", &source, SamplingParams::greedy());
    wrong.constraint.as_mut().unwrap().n_given = 1;
    let error = collect(&service, wrong).unwrap_err();
    assert!(error.to_string().contains("is not allowed by the grammar after 0 tokens"), "{error}");
}

#[test]
fn forced_tokens_are_evaluated_together_and_do_not_change_the_text() {
    let model = Model::builtin().unwrap();
    let session = options(cpu());
    let service = Service::new(&model, &ServiceOptions { session, ..ServiceOptions::default() }).unwrap();
    let schema = r#"{"type": "object", "properties": {"kind": {"const": "a very long constant that leaves no choice"}, "n": {"enum": [1, 2]}}, "required": ["kind", "n"], "additionalProperties": false}"#;
    let source = GrammarSource::JsonSchema(schema.into());
    let steps = |forces: bool| {
        let before = service.ledger().unwrap();
        let mut request = request(&model, "Tom", &source, SamplingParams::greedy());
        request.constraint.as_mut().unwrap().forces = forces;
        request.max_tokens = 200;
        let (tokens, finish) = collect(&service, request).unwrap();
        let text = model.tokenizer().decode(&tokens).unwrap();
        assert!(matches!(finish, FinishReason::Complete | FinishReason::EndToken), "{finish:?}: {text:?}");
        let after = service.ledger().unwrap();
        let n = |kind| after.tally(kind).steps() - before.tally(kind).steps();
        (text, n(StepKind::Decode) + n(StepKind::Prompt))
    };
    let (forced, n_forced) = steps(true);
    let (chosen, n_chosen) = steps(false);
    let value = |text: &str| serde_json::from_str::<Value>(text).unwrap()["kind"].clone();
    assert_eq!(value(&forced), value(&chosen));
    assert!(n_forced + 5 < n_chosen, "{n_forced} steps instead of {n_chosen}");
}

#[test]
fn minimum_tokens_biases_and_end_tokens_never_break_a_text() {
    let model = Model::builtin().unwrap();
    let session = options(cpu());
    let service = Service::new(&model, &ServiceOptions { session, ..ServiceOptions::default() }).unwrap();
    let source = GrammarSource::Regex("ab?".into());
    // The grammar is complete before the minimum.
    let mut least = request(&model, "Tom", &source, SamplingParams::greedy());
    least.min_tokens = 30;
    let (tokens, finish) = collect(&service, least).unwrap();
    assert_eq!((model.tokenizer().decode(&tokens).unwrap().as_str(), finish), ("ab", FinishReason::Complete));
    // No token may end the text.
    let mut endless = request(&model, "Tom", &source, SamplingParams::greedy());
    endless.end = Vec::new();
    assert_eq!(collect(&service, endless).unwrap().1, FinishReason::Complete);
    // Every allowed token is forbidden.
    let mut nothing = request(&model, "Tom", &GrammarSource::Regex("[0-9]".into()), SamplingParams::greedy());
    let vocab = model.tokenizer().vocab_size() as u32;
    let digits = (0..vocab).filter(|id| {
        model.tokenizer().piece(*id).is_some_and(|piece| piece.len() == 1 && piece[0].is_ascii_digit())
    });
    nothing.sampling.logit_bias = digits.map(|id| (id, f32::NEG_INFINITY)).collect();
    let error = collect(&service, nothing).unwrap_err();
    assert!(
        error.to_string().contains("are forbidden by the logit bias") && error.hint().is_some(),
        "{error}"
    );
    // Other requests go on.
    assert!(collect(&service, request(&model, "Tom", &source, hot(3))).is_ok());
}

#[test]
fn log_probabilities_are_reported_for_every_token() {
    let model = Model::builtin().unwrap();
    let session = options(cpu());
    let service = Service::new(&model, &ServiceOptions { session, ..ServiceOptions::default() }).unwrap();
    let mut top = request(&model, "Tom", &GrammarSource::JsonSchema(PERSON.into()), SamplingParams::greedy());
    (top.n_top_logprobs, top.max_tokens) = (3, 12);
    for event in service.submit_tokens(top).unwrap() {
        if let TokenEvent::Token { token, logprob, top, .. } = event.unwrap() {
            assert_eq!((top.len(), top[0]), (3, (token, logprob)));
        }
    }
}

#[test]
fn a_grammar_that_cannot_be_used_is_refused_before_anything_runs() {
    let model = Builtin::Chat.open().unwrap();
    let refused = |source: GrammarSource| match model.grammar(&source) {
        Err(error @ Error::Grammar(_)) => {
            assert!(error.hint().is_some(), "{error}");
            error.to_string()
        }
        other => panic!("{other:?}"),
    };
    assert!(refused(GrammarSource::Regex(String::new())).contains("is empty"));
    assert!(refused(GrammarSource::JsonSchema("{]".into())).contains("not valid JSON"));
    assert!(matches!(
        model.vocabulary().unwrap().compile(&GrammarSource::JsonSchema(r#"{"not": {}}"#.into())),
        Err(GrammarError::Schema { .. })
    ));
}
