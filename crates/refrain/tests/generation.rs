//! Text from the built-in model: where it ends, what is evaluated, and that it is reproducible.

use refrain::{Builtin, DType, Device, EngineError, Error, Finish, Generate, Model, Prompt, SamplingParams};
use refrain::{Service, ServiceOptions, Session, SessionOptions, StepKind, Summary};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

const START: &str = "Once upon a time";

fn session(options: SessionOptions) -> Session {
    Session::new(&Model::builtin().unwrap(), &options).unwrap()
}

fn cpu(threads: usize) -> SessionOptions {
    SessionOptions { device: Device::Cpu { threads: Some(threads) }, ..SessionOptions::default() }
}

fn greedy(max_tokens: usize) -> Generate {
    Generate { sampling: Some(SamplingParams::greedy()), max_tokens: Some(max_tokens), ..Generate::default() }
}

/// The whole text and its measurements.
fn text(session: &mut Session, prompt: &str, options: &Generate) -> (String, Summary) {
    let mut generation = session.generate(Prompt::Text(prompt), options).unwrap();
    let mut text = String::new();
    for piece in generation.by_ref() {
        text += &piece.unwrap().text;
    }
    assert!(generation.next().is_none(), "an ended generation stays ended");
    (text, generation.summary().clone())
}

/// A prompt that needs more than one step.
fn long_prompt() -> String {
    "The cat sat on the mat and saw a dog. ".repeat(32)
}

#[test]
fn the_builtin_model_continues_a_story_for_the_requested_number_of_tokens() {
    let mut session = session(SessionOptions::default());
    let (story, summary) = text(&mut session, START, &greedy(24));
    assert!(story.split_whitespace().count() > 10 && story.is_ascii(), "{story}");
    assert_eq!(summary.finish, Some(Finish::MaxTokens));
    assert_eq!(summary.n_generated, 24);
    assert!(summary.n_prompt > 0 && summary.n_evaluated == summary.n_prompt);
    assert_eq!(session.ledger().tally(StepKind::Decode).steps(), 23);
    assert_eq!(session.backend(), "cpu");
    assert!(Builtin::Stories.name() == "stories" && session.model().chat_template().is_none());

    let (nothing, summary) = text(&mut session, START, &greedy(0));
    assert_eq!((nothing.as_str(), summary.finish, summary.n_generated), ("", Some(Finish::MaxTokens), 0));
}

#[test]
fn a_stop_text_ends_the_generation_and_is_not_shown() {
    let mut session = session(SessionOptions::default());
    let (story, _) = text(&mut session, START, &greedy(40));
    // A stop text that begins and ends within tokens, and the earliest of several.
    let stop = story[10..].char_indices().map(|(i, _)| &story[10 + i..10 + i + 7]).next().unwrap().to_owned();
    let options = Generate { stop: vec!["zzz".into(), String::new(), stop.clone()], ..greedy(40) };
    let (cut, summary) = text(&mut session, START, &options);
    assert_eq!(cut, story[..story.find(&stop).unwrap()]);
    assert_eq!(summary.finish, Some(Finish::StopText));
    assert!(summary.n_generated < 40);
}

#[test]
fn text_held_back_for_a_stop_text_is_shown_if_none_follows() {
    let mut session = session(SessionOptions::default());
    let (story, _) = text(&mut session, START, &greedy(16));
    let almost = format!("{}#", &story[story.len() - 4..]);
    let options = Generate { stop: vec![almost], ..greedy(16) };
    assert_eq!(text(&mut session, START, &options).0, story);
}

#[test]
fn cancelling_ends_before_the_next_token() {
    let mut session = session(SessionOptions::default());
    let cancel = Arc::new(AtomicBool::new(false));
    let options = Generate { cancel: Some(cancel.clone()), ..greedy(50) };
    let mut generation = session.generate(Prompt::Text(START), &options).unwrap();
    for _ in 0..3 {
        generation.next().unwrap().unwrap();
    }
    cancel.store(true, Ordering::Relaxed);
    let rest: Vec<_> = generation.by_ref().collect();
    assert!(rest.iter().all(|piece| piece.as_ref().unwrap().token.is_none()), "{rest:?}");
    assert_eq!(generation.summary().n_generated, 3);
    assert_eq!(generation.summary().finish, Some(Finish::Cancelled));
    drop(generation);
    // Cancelled from the start: nothing is evaluated.
    session.reset_ledger();
    assert_eq!(text(&mut session, "Another", &options).1.finish, Some(Finish::Cancelled));
    assert_eq!(session.ledger().tally(StepKind::Prompt).steps(), 0);
}

#[test]
fn cancelling_during_a_long_prompt_keeps_the_evaluated_tokens() {
    let (prompt, mut session) = (long_prompt(), session(SessionOptions::default()));
    let (whole, _) = text(&mut session, &prompt, &greedy(6));
    session.reset();
    session.reset_ledger();
    let cancel = Arc::new(AtomicBool::new(false));
    let options = Generate { cancel: Some(cancel.clone()), ..greedy(6) };
    let mut heard = Vec::new();
    let generation = session.generate(Prompt::Text(&prompt), &options).unwrap();
    let mut generation = generation.on_prefill(|done, of| {
        heard.push((done, of));
        cancel.store(true, Ordering::Relaxed);
    });
    assert!(generation.next().is_none());
    let summary = generation.summary().clone();
    drop(generation);
    assert_eq!((summary.finish, summary.n_generated), (Some(Finish::Cancelled), 0));
    let [(done, of)] = heard[..] else { panic!("{heard:?}") };
    assert!(done < of && of == summary.n_prompt, "{done} of {of}");
    assert_eq!(session.ledger().tally(StepKind::Prompt).steps(), 1);

    let (again, summary) = text(&mut session, &prompt, &greedy(6));
    assert_eq!(again, whole);
    assert_eq!(summary.n_evaluated, of - done);
}

#[test]
fn cached_tokens_are_not_evaluated_again_and_give_the_same_text() {
    let mut used = session(SessionOptions::default());
    let (first, before) = text(&mut used, START, &greedy(12));
    let longer = format!("{START}{first} The");
    let (second, summary) = text(&mut used, &longer, &greedy(12));
    assert!(summary.n_evaluated < summary.n_prompt / 2, "{summary:?} after {before:?}");
    let (fresh, all) = text(&mut session(SessionOptions::default()), &longer, &greedy(12));
    assert_eq!((second, all.n_evaluated), (fresh, all.n_prompt));
    used.reset();
    assert_eq!(text(&mut used, START, &greedy(12)).0, first);
}

#[test]
fn a_full_context_ends_the_text_and_a_prompt_that_does_not_fit_is_refused() {
    let mut session = session(SessionOptions { context: Some(16), ..SessionOptions::default() });
    let (_, summary) = text(&mut session, START, &greedy(100));
    assert_eq!(summary.finish, Some(Finish::ContextFull));
    // The last token needs no position in the cache.
    assert_eq!(summary.n_prompt + summary.n_generated, 17);
    let error = session.generate(Prompt::Text(&long_prompt()), &greedy(1)).err().unwrap();
    assert!(matches!(error, Error::PromptTooLong { context: 16, most: 512, .. }), "{error}");
    assert_eq!(error.hint().unwrap(), "shorten the prompt, or use a context of at least 355 tokens");
    let beyond_the_model = long_prompt().repeat(2);
    let error = session.generate(Prompt::Text(&beyond_the_model), &greedy(1)).err().unwrap();
    assert_eq!(error.hint().unwrap(), "shorten the prompt: the model takes at most 512 tokens");
    assert_eq!(text(&mut session, START, &greedy(2)).1.n_generated, 2);

    for context in [0, 1 << 30] {
        let options = SessionOptions { context: Some(context), ..SessionOptions::default() };
        let error = Session::new(&Model::builtin().unwrap(), &options).err().unwrap();
        assert!(matches!(error, Error::Context { got, most: 512, .. } if got == context), "{error}");
    }
}

#[test]
fn the_end_of_the_turn_ends_the_text_unless_it_is_ignored() {
    let mut session = session(SessionOptions::default());
    let end = session.model().tokenizer().end_of_generation()[0];
    let sampling = Some(SamplingParams { logit_bias: vec![(end, 1e6)], ..SamplingParams::greedy() });
    let options = Generate { sampling, ..greedy(5) };
    let (shown, summary) = text(&mut session, START, &options);
    assert_eq!((shown.as_str(), summary.finish, summary.n_generated), ("", Some(Finish::EndOfTurn), 1));
    let (_, summary) = text(&mut session, START, &Generate { ignore_end: true, ..options });
    assert_eq!((summary.finish, summary.n_generated), (Some(Finish::MaxTokens), 5));
}

#[test]
fn a_seed_gives_the_same_text_on_any_number_of_threads() {
    let story = |seed, threads| {
        let sampling = Some(SamplingParams { temperature: 1.0, seed, ..SamplingParams::default() });
        text(&mut session(cpu(threads)), START, &Generate { sampling, ..greedy(24) }).0
    };
    let first = story(7, 1);
    assert_eq!(story(7, 1), first);
    assert_eq!(story(7, 2), first);
    assert_eq!(story(7, 3), first);
    assert_ne!(story(8, 1), first);
}

#[test]
fn invalid_sampling_parameters_are_refused_before_anything_runs() {
    let mut session = session(SessionOptions::default());
    let sampling = Some(SamplingParams { top_p: 2.0, ..SamplingParams::default() });
    let error = session.generate(Prompt::Text(START), &Generate { sampling, ..greedy(1) }).err().unwrap();
    assert_eq!(error.to_string(), "top-p is 2, must be above 0 and at most 1");
    let error = session.generate(Prompt::Tokens(&[1, u32::MAX]), &greedy(1)).err().unwrap();
    assert!(matches!(error, Error::Engine(EngineError::UnknownToken { .. })), "{error}");
    let error = session.generate(Prompt::Tokens(&[]), &greedy(1)).err().unwrap();
    assert!(matches!(error, Error::Engine(EngineError::EmptyPrompt)), "{error}");
    assert_eq!(session.ledger().tally(StepKind::Prompt).steps(), 0);
}

#[test]
fn a_prompt_far_too_long_is_refused_before_it_is_tokenized() {
    let mut session = session(SessionOptions { context: Some(64), ..SessionOptions::default() });
    let huge = "word ".repeat(10_000_000);
    let began = std::time::Instant::now();
    let error = session.generate(Prompt::Text(&huge), &greedy(1)).err().unwrap();
    assert!(matches!(error, Error::PromptBytes { n_bytes: 50_000_000, context: 64, .. }), "{error}");
    assert!(began.elapsed().as_secs() < 5, "{:?}", began.elapsed());
    // The bound on bytes is loose: this prompt passes it, and is refused by its number of tokens.
    let error = session.generate(Prompt::Text(&huge[..8_000]), &greedy(1)).err().unwrap();
    assert!(matches!(error, Error::PromptTooLong { context: 64, .. }), "{error}");
}

#[test]
fn the_seed_is_random_unless_it_is_given() {
    let mut session = session(SessionOptions::default());
    let mut seeds =
        || text(&mut session, START, &Generate { max_tokens: Some(2), ..Generate::default() }).1.seed;
    assert_ne!(seeds(), seeds());
    let model = session.model();
    assert_ne!(model.sampling().seed, model.sampling().seed);
    let sampling = Some(SamplingParams { seed: 7, ..model.sampling() });
    assert_eq!(text(&mut session, START, &Generate { sampling, ..greedy(2) }).1.seed, 7);
}

#[test]
fn the_automatic_device_is_usable() {
    let options = SessionOptions { device: Device::auto(), ..SessionOptions::default() };
    let mut session = session(options);
    assert_eq!(text(&mut session, START, &greedy(3)).1.n_generated, 3);
}

#[test]
fn perplexity_is_low_for_stories_and_the_same_on_any_number_of_threads() {
    let (story, _) = text(&mut session(SessionOptions::default()), START, &greedy(100));
    let story = format!("{START}{story}");
    let of = |threads, text: &str| session(cpu(threads)).perplexity(text, 32, Some(2), |_, _| {}).unwrap();
    let one = of(1, &story);
    assert_eq!(of(2, &story), one);
    assert_eq!((one.n_windows, one.n_scored), (2, 30));
    assert!(one.perplexity < 3.0, "its own text: {one:?}");
    let shuffled: String = story.split(' ').rev().collect::<Vec<_>>().join(" ");
    assert!(of(1, &shuffled).perplexity > 10.0 * one.perplexity);

    let mut small = session(SessionOptions { context: Some(64), ..SessionOptions::default() });
    let error = small.perplexity(&story, 65, None, |_, _| {}).unwrap_err();
    assert!(matches!(error, Error::Engine(EngineError::Window { window: 65, context: 64 })), "{error}");
    let error = small.perplexity("Too short", 64, None, |_, _| {}).unwrap_err();
    assert!(matches!(error, Error::Engine(EngineError::TextTooShort { window: 64, .. })), "{error}");
}

#[test]
fn a_cache_in_bytes_halves_the_memory_and_predicts_as_well_as_one_in_f16() {
    let with = |kv_dtype| SessionOptions { kv_dtype, ..cpu(2) };
    // Stories of its own, in windows of which most tokens are read from the cache.
    let mut story = String::new();
    let mut teller = session(cpu(2));
    for seed in 0..4 {
        let sampling = SamplingParams { seed, ..SamplingParams::default() };
        let options = Generate { sampling: Some(sampling), ..greedy(200) };
        story += &text(&mut teller, START, &options).0;
        teller.reset();
    }
    let of = |kv_dtype| session(with(kv_dtype)).perplexity(&story, 128, None, |_, _| {}).unwrap();
    let (half, bytes) = (of(DType::F16), of(DType::U8));
    assert!(half.n_scored > 100, "{half:?}");
    let change = bytes.perplexity / half.perplexity - 1.0;
    assert!(change != 0.0 && change.abs() < 0.005, "{half:?} and {bytes:?}");
    let model = Model::builtin().unwrap();
    let of = |kv_dtype| {
        let kv_tokens =
            |n| ServiceOptions { session: with(kv_dtype), kv_tokens: Some(n), ..ServiceOptions::default() };
        Service::memory_needs(&model, &kv_tokens(8192)).unwrap()
            - Service::memory_needs(&model, &kv_tokens(4096)).unwrap()
    };
    let share = of(DType::U8) as f64 / of(DType::F16) as f64;
    assert!(share < 0.57, "{share}");
}
