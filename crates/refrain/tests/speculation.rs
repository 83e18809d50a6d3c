//! Guessed tokens change how fast a text comes, not the text.

use refrain::{
    BenchOptions, BenchTarget, Builtin, Chat, ChatOptions, Device, DraftWeights, Error, FaultScript,
    Generate, GraphMode, GuessSource, Method, Model, ModelFiles, NamedShape, Prompt, QuantMix,
    SamplingParams, Service, ServiceOptions, Session, SessionOptions, SpeculationOptions, StepKind, bench,
};
use refrain_formats::params::Arch;

fn options(source: GuessSource) -> SessionOptions {
    let speculation =
        SpeculationOptions { source, max_draft: Some(6), is_fixed: true, ..SpeculationOptions::default() };
    let device = Device::Cpu { threads: Some(1) };
    SessionOptions { device, context: Some(160), speculation, ..SessionOptions::default() }
}

fn sampled(seed: u64) -> Generate {
    let sampling = SamplingParams { repeat_penalty: 1.1, seed, ..SamplingParams::default() };
    Generate { sampling: Some(sampling), max_tokens: Some(48), ..Generate::default() }
}

const PROMPT: &str = "Tim had a red ball. Tim had a red ball. Tim had a red";

fn text(session: &mut Session, seed: u64) -> String {
    session.generate(Prompt::Text(PROMPT), &sampled(seed)).unwrap().map(|p| p.unwrap().text).collect()
}

#[test]
fn a_session_gives_the_same_text_with_guesses_of_any_source() {
    let stories = Model::builtin().unwrap();
    let mut plain = Session::new(&stories, &options(GuessSource::None)).unwrap();
    let draft = GuessSource::Model(DraftWeights::of(&stories));
    for source in [GuessSource::Ngram, draft] {
        let is_model = matches!(source, GuessSource::Model(_));
        let mut session = Session::new(&stories, &options(source)).unwrap();
        for seed in [1, 2] {
            assert_eq!(text(&mut session, seed), text(&mut plain, seed), "seed {seed}");
        }
        let ledger = session.ledger();
        let guesses = ledger.speculation();
        assert!(guesses.accepted > 0 && guesses.emitted > guesses.steps, "{guesses}");
        assert_eq!(ledger.tally(StepKind::Verify).steps(), guesses.steps);
        // The model drafts for itself: the same random numbers choose the same tokens.
        assert!(!is_model || guesses.accepted == guesses.drafted, "{guesses}");
        assert_eq!(guesses.drafting.is_zero(), !is_model);
    }
    assert_eq!(plain.ledger().speculation().steps, 0);
}

#[test]
fn sessions_with_and_without_a_draft_model_do_not_share_an_engine() {
    let stories = Model::builtin().unwrap();
    let draft = DraftWeights::of(&stories);
    let mut with = Session::new(&stories, &options(GuessSource::Model(draft.clone()))).unwrap();
    let mut other = Session::new(&stories, &options(GuessSource::Model(draft))).unwrap();
    let mut ngram = Session::new(&stories, &options(GuessSource::Ngram)).unwrap();
    let texts = [&mut with, &mut other, &mut ngram].map(|session| text(session, 3));
    assert!(texts.iter().all(|one| one == &texts[0]));
    assert!(with.ledger().speculation().accepted > 0 && other.ledger().speculation().accepted > 0);
}

#[test]
fn a_conversation_that_outgrows_its_context_goes_on_with_guesses() {
    let said = |source| {
        let model = Model::from_files(Builtin::Chat.files().unwrap()).unwrap();
        let session =
            Session::new(&model, &SessionOptions { context: Some(120), ..options(source) }).unwrap();
        let mut chat = Chat::new(session, ChatOptions::default()).unwrap();
        let turns = ["Hello! Do you like cats?", "Tell me about a red ball and a red ball.", "And then?"];
        let mut generate = sampled(4);
        generate.max_tokens = Some(60);
        let texts = turns.map(|turn| {
            chat.send(turn.to_owned(), &generate)
                .unwrap()
                .map(|piece| piece.unwrap().text)
                .collect::<String>()
        });
        (texts, chat.session().ledger().speculation().steps)
    };
    let (want, none) = said(GuessSource::None);
    let (got, some) = said(GuessSource::Ngram);
    assert_eq!(got, want);
    assert!(none == 0 && some > 0);
}

#[test]
fn a_service_guesses_for_all_of_its_requests() {
    let stories = Model::builtin().unwrap();
    let texts = |source| {
        let options = ServiceOptions { session: options(source), max_seqs: 4, ..ServiceOptions::default() };
        let service = Service::new(&stories, &options).unwrap();
        let replies: Vec<_> =
            (0..4).map(|seed| service.submit(Prompt::Text(PROMPT), &sampled(seed)).unwrap()).collect();
        let texts: Vec<String> = replies.into_iter().map(|reply| reply.text().unwrap().0).collect();
        (texts, service.ledger().unwrap().speculation().clone())
    };
    let (want, _) = texts(GuessSource::None);
    let (got, guesses) = texts(GuessSource::Model(DraftWeights::of(&stories)));
    assert_eq!(got, want);
    assert!(guesses.accepted > 0 && guesses.accepted == guesses.drafted, "{guesses}");
}

#[test]
fn both_models_share_a_simulated_device_and_every_step_is_a_replay() {
    let stories = Model::builtin().unwrap();
    let on = |source| {
        let (faults, method) = (FaultScript::default(), Method::Stream);
        let device = Device::Sim { seed: 3, faults, graph: GraphMode::Require, method, profile: false };
        SessionOptions { device, context: Some(64), ..options(source) }
    };
    let said = |source| {
        let mut session = Session::new(&stories, &on(source)).unwrap();
        let mut generate = sampled(5);
        generate.max_tokens = Some(10);
        let pieces = session.generate(Prompt::Text(PROMPT), &generate).unwrap();
        let text: String = pieces.map(|piece| piece.unwrap().text).collect();
        (text, session.ledger())
    };
    let (want, _) = said(GuessSource::None);
    let (got, ledger) = said(GuessSource::Model(DraftWeights::of(&stories)));
    assert_eq!(got, want);
    let verify = ledger.tally(StepKind::Verify);
    assert!(verify.steps() > 0 && verify.replayed == verify.steps() && verify.launches == verify.steps());
    assert!(ledger.speculation().accepted > 0, "{}", ledger.speculation());
}

fn refused(model: &Model, options: &SessionOptions) -> String {
    let error = Session::new(model, options).map(drop).unwrap_err();
    assert!(error.hint().is_some(), "{error}");
    error.to_string()
}

#[test]
fn what_cannot_speculate_is_refused_by_name_and_number() {
    let stories = Model::builtin().unwrap();
    for (max_draft, got) in [(0, "0 guessed tokens"), (100, "100 guessed tokens")] {
        let mut options = options(GuessSource::Ngram);
        options.speculation.max_draft = Some(max_draft);
        assert!(refused(&stories, &options).starts_with(got));
    }
    let verify_every = std::num::NonZeroU32::new(8);
    let compared = SessionOptions { verify_every, ..options(GuessSource::Ngram) };
    assert!(refused(&stories, &compared).contains("compared with their eager run"));
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../refrain-models/tests/goldens/lfm2");
    let files = ModelFiles::open(folder).unwrap();
    let session = SessionOptions { context: Some(32), ..options(GuessSource::Ngram) };
    let options = BenchOptions {
        session,
        n_prompt: 1,
        n_decode: 1,
        depths: vec![1],
        seqs: vec![],
        repeats: 1,
        adapters: 0,
    };
    let error = bench(&BenchTarget::Files(&files), &options, |_| {}).unwrap_err();
    assert!(error.to_string().starts_with("lfm2 models cannot speculate"), "{error}");
}

#[test]
fn a_bench_compares_guessing_with_plain_decoding() {
    let stories = Model::builtin().unwrap();
    let mut session = options(GuessSource::Ngram);
    session.context = Some(400);
    session.speculation.forced_acceptance = Some(1.0);
    let options = BenchOptions {
        session,
        n_prompt: 0,
        n_decode: 40,
        depths: vec![20],
        seqs: vec![2],
        repeats: 1,
        adapters: 0,
    };
    let report = bench(&BenchTarget::Model(&stories), &options, |_| {}).unwrap();
    let guesses = report.speculation.unwrap();
    assert_eq!(guesses.drafted, guesses.accepted, "{guesses}");
    assert!(guesses.tokens_per_step().is_some_and(|n| n > 3.0), "{guesses}");
    assert_eq!(report.decode[0].plain.as_ref().map(|plain| plain.0.len()), Some(1));
    assert!(report.decode[0].speedup().is_some());
    assert!(report.verify_steps.is_some_and(|tally| tally.steps() == guesses.steps));
    let none = BenchOptions {
        session: SessionOptions { context: Some(400), ..self::options(GuessSource::None) },
        ..options
    };
    let report = bench(&BenchTarget::Model(&stories), &none, |_| {}).unwrap();
    assert!(report.decode[0].speedup().is_none() && report.speculation.is_none());
}

#[test]
fn an_error_of_a_draft_model_names_both_models() {
    let stories = Model::builtin().unwrap();
    let other = QuantMix::from_name("Q8_0").unwrap();
    let shape = NamedShape::new("tiny", Arch::Llama, [96, 64, 64, 1], [2, 1, 32]);
    let draft = DraftWeights::random(&shape, other).unwrap();
    let error = Session::new(&stories, &options(GuessSource::Model(draft))).map(drop).unwrap_err();
    let Error::DraftVocabulary { sizes: [ours, theirs], .. } = &error else { panic!("{error}") };
    let text = error.to_string();
    assert!(text.contains(&ours.to_string()) && text.contains(&theirs.to_string()), "{text}");
    assert!(text.contains("tiny") && text.contains(stories.name()), "{text}");
}

#[test]
fn a_draft_model_counts_among_the_bytes_that_a_service_needs() {
    let stories = Model::builtin().unwrap();
    let needs = |source: Option<GuessSource>| {
        let speculation = source.map_or_else(SpeculationOptions::default, |source| SpeculationOptions {
            source,
            ..SpeculationOptions::default()
        });
        let session = SessionOptions { speculation, ..SessionOptions::default() };
        let options = ServiceOptions { session, kv_tokens: Some(512), ..ServiceOptions::default() };
        Service::memory_needs(&stories, &options).unwrap()
    };
    let alone = needs(None);
    assert_eq!(needs(Some(GuessSource::Ngram)), alone);
    // The model drafts for itself.
    assert_eq!(needs(Some(GuessSource::Model(DraftWeights::of(&stories)))), 2 * alone);
}
