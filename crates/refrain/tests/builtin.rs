//! The built-in chat model: it ends its turn by itself, with the same text on the CPU and on the simulated device.

use refrain::{
    Builtin, Device, FaultScript, Finish, Generate, GraphMode, Message, Method, Model, Prompt, RenderOptions,
    SamplingParams, Session, SessionOptions, StepKind,
};

const QUESTIONS: [&str; 2] = ["Hello!", "What is your name?"];

/// Greedy answers to these questions in one conversation, and why each answer ended.
fn conversation(model: &Model, device: Device) -> (Vec<(String, Option<Finish>)>, Session) {
    let options = SessionOptions { device, ..SessionOptions::default() };
    let mut session = Session::new(model, &options).unwrap();
    let greedy = Generate { sampling: Some(SamplingParams::greedy()), ..Generate::default() };
    let mut messages = Vec::new();
    let mut answers = Vec::new();
    for question in QUESTIONS {
        messages.push(Message::new("user", question));
        let render = RenderOptions { add_generation_prompt: true, ..RenderOptions::default() };
        let mut generation = session.generate(Prompt::Chat(&messages, &render), &greedy).unwrap();
        let text: String = generation.by_ref().map(|piece| piece.unwrap().text).collect();
        let finish = generation.summary().finish;
        messages.push(Message::new("assistant", text.clone()));
        answers.push((text, finish));
    }
    (answers, session)
}

#[test]
fn the_chat_model_ends_its_turn_on_the_cpu_and_as_replayed_graphs() {
    let model = Builtin::Chat.open().unwrap();
    let (answers, _) = conversation(&model, Device::Cpu { threads: Some(2) });
    for (text, finish) in &answers {
        assert_eq!(*finish, Some(Finish::EndOfTurn), "{text}");
        assert!(!text.contains("<|") && text.ends_with(['.', '!', '?']), "{text}");
    }
    let faults = FaultScript::parse("").unwrap();
    let device =
        Device::Sim { seed: 1, faults, graph: GraphMode::Require, method: Method::Stream, profile: false };
    let (simulated, session) = conversation(&model, device);
    assert_eq!(simulated, answers);
    let ledger = session.ledger();
    let decode = ledger.tally(StepKind::Decode);
    assert!(decode.replayed > 0 && decode.eager == 0, "{decode}");
}

#[test]
fn built_in_models_are_found_by_name_and_only_one_of_them_chats() {
    for builtin in Builtin::ALL {
        assert_eq!(Builtin::named(&builtin.name().to_uppercase()), Some(builtin));
        let has_template = builtin.open().unwrap().chat_template().is_some();
        assert_eq!(has_template, builtin == Builtin::Chat, "{builtin:?}");
    }
    assert_eq!(Builtin::named("story"), None);
}
