//! Many requests at once, through the library.

use refrain::{Device, Error, Finish, Generate, Model, Prompt, SamplingParams, Service, ServiceOptions};
use refrain::{EngineError, Session, SessionOptions};

fn cpu() -> SessionOptions {
    SessionOptions {
        device: Device::Cpu { threads: Some(1) },
        context: Some(96),
        ..SessionOptions::default()
    }
}

fn sampled(seed: u64, max_tokens: usize) -> Generate {
    let sampling = SamplingParams { seed, ..SamplingParams::default() };
    Generate { sampling: Some(sampling), max_tokens: Some(max_tokens), ..Generate::default() }
}

#[test]
fn each_of_many_replies_equals_that_of_a_session() {
    let model = Model::builtin().unwrap();
    // Space for about four of them.
    let options = ServiceOptions { session: cpu(), max_seqs: 8, kv_tokens: Some(384), ..Default::default() };
    let service = Service::new(&model, &options).unwrap();
    assert_eq!((service.backend(), service.context()), ("cpu", 96));
    let prompt =
        |i: u64| format!("Once upon a time there were {} little", ["two", "three", "ten"][i as usize % 3]);
    let replies: Vec<_> = (0..12)
        .map(|i| service.submit(Prompt::Text(&prompt(i)), &sampled(i, 12 + i as usize)).unwrap())
        .collect();
    let mut session = Session::new(&model, &cpu()).unwrap();
    for (i, reply) in (0..).zip(replies) {
        let (text, summary) = reply.text().unwrap();
        session.reset();
        let alone = session.generate(Prompt::Text(&prompt(i)), &sampled(i, 12 + i as usize)).unwrap();
        let alone: String = alone.map(|piece| piece.unwrap().text).collect();
        assert_eq!(text, alone, "reply {i}");
        assert_eq!((summary.finish, summary.n_generated), (Some(Finish::MaxTokens), 12 + i as usize));
    }
    let load = service.load().unwrap();
    assert_eq!((load.n_running, load.n_waiting, load.blocks.used), (0, 0, 0));
}

#[test]
fn invalid_requests_are_refused_and_a_dropped_reply_is_cancelled() {
    let options = ServiceOptions { session: cpu(), max_seqs: 2, max_requests: 2, ..Default::default() };
    let service = Service::new(&Model::builtin().unwrap(), &options).unwrap();
    let long = service.submit(Prompt::Text("A cat"), &sampled(1, 500)).err().unwrap();
    assert!(
        matches!(long, Error::Engine(EngineError::NeverFits { max_tokens: 500, context: 96, .. })),
        "{long}"
    );
    assert!(long.hint().is_some());
    let open = [(); 2].map(|()| service.submit(Prompt::Text("A cat"), &sampled(1, 90)).unwrap());
    let full = service.submit(Prompt::Text("A cat"), &sampled(1, 5));
    // They may have ended by now, or not.
    assert!(matches!(full, Ok(_) | Err(Error::Engine(EngineError::QueueFull { max: 2, .. }))));
    drop((open, full));
    while service.load().unwrap().n_running > 0 {}
    assert_eq!(service.load().unwrap().blocks.used, 0);
    let stop = Generate { stop: vec!["e".into()], ..sampled(3, 60) };
    let (text, summary) = service.submit(Prompt::Text("A cat"), &stop).unwrap().text().unwrap();
    assert!(!text.contains('e') && summary.finish == Some(Finish::StopText), "{text}");
}
